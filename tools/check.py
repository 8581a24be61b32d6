"""Does everything work on this machine, and with which figures? The first hour on a GPU.

python -m tools.check --device cuda --json results/check.json
python -m tools.check --device cpu parity stop
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import numpy as np
import torch

import checkpoint
import dist
import metrics
import prepare
import train
from runtime import cli, watchdog
from runtime.profiling import CudaSyncCounter, HostSyncCounter
from tools import bench

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # relative, over 20 steps of SMALL
SMALL = (
    "--n_layer 2 --n_head 4 --n_kv_head 2 --d_model 32 --d_ff 64 --seq_len 16 --lr 3e-3 "
    "--warmup_steps 1 --max_grad_norm 2 --micro_batch_size 2 --log_interval 1 --eval_interval 0 "
    "--eval_sequences 1 --sample_tokens 0 --keep_last 0"
)
PATIENCE = 600  # seconds for a small job


@dataclass(frozen=True)
class Layout:
    """A strategy to compare with a single process."""

    flags: str
    multiple: int = 1  # of ranks that it takes


LAYOUTS = {
    "ddp": Layout("--strategy ddp"),
    "fsdp": Layout("--strategy fsdp"),
    "hsdp": Layout("--strategy hsdp --dp_replicate 2", multiple=2),
    "tp": Layout("--strategy fsdp --tp 2", multiple=2),
    "hsdp-tp": Layout("--strategy hsdp --dp_replicate 2 --tp 2", multiple=4),
}


@dataclass
class Check:
    """What one check found: a line on the console, an object in the JSON file."""

    name: str
    status: str = "pass"  # or FAIL, or skip
    seconds: float = 0.0
    figures: dict = field(default_factory=dict)
    limits: dict[str, list[float]] = field(default_factory=dict)  # figure -> [least, most]
    reason: str = ""  # why it failed or was skipped
    output: str = ""  # where a failed check left what its job printed

    def hold(self, figure: str, value: float, most: float, least: float = 0.0) -> None:
        """Record a figure that must lie between `least` and `most`."""
        self.figures[figure] = value
        self.limits[figure] = [least, most]

    def beyond_limits(self) -> str:
        """The figures that do not lie within their limits, in words; nan never does."""
        found = []
        for figure, (least, most) in self.limits.items():
            value = self.figures[figure]
            if not least <= value <= most:
                found.append(f"{figure} {value:.3g} is not between {least:g} and {most:g}")
        return "; ".join(found)

    def line(self) -> str:
        said = [self.reason] if self.reason else []
        for figure, value in self.figures.items():
            text = value if isinstance(value, str) else bench.three_digits(value)
            said.append(f"{figure} {text}")
        if self.output:
            said.append(f"see {self.output}")
        return f"{self.status}  {self.name:15} {self.seconds:5.1f} s  {', '.join(said)}"


# --------------------------------------------------------------------------------------------------
# Jobs


def last_error(text: str) -> str:
    """The last exception in what a job printed or, without one, the last error of a command."""
    for pattern in (r"\b[A-Z]\w*Error: \S", r"\berror: \S"):
        lines = [line for line in text.splitlines() if re.search(pattern, line)]
        if lines:
            return lines[-1].strip()
    return "no line of its output names an error"


def rank_environments(size: int) -> list[dict[str, str]]:
    """What torchrun would tell `size` ranks of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environments = []
    for rank in range(size):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environments.append({name: str(value) for name, value in (ranks | address).items()})
    return environments


class Lab:
    """What the checks share: device, folder of their runs, token folder, processes."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        self.device = args.device
        self.is_cuda = args.device == "cuda"
        self.size = args.ranks
        self.micro_batch_size = args.micro_batch_size or (16 if self.is_cuda else 4)
        self.folder = folder
        self.tokens = folder / "tokens"
        self.train = functools.cache(self.train)  # several checks read the same run
        self.measure = functools.cache(self.measure)
        write_text(folder / "text")
        text = [str(folder / "text")]
        with contextlib.redirect_stdout(None):  # quiet
            prepare.prepare(text, self.tokens, val_fraction=0.2)

    def flags(self, name: str, more: str) -> list[str]:
        """Flags of a run of the small model in the run folder `name`."""
        text = f"--device {self.device} --global_batch_size {4 * self.size} {SMALL} {more}"
        return [f"--data={self.tokens}", f"--out={self.folder / name}", *text.split()]

    def start(self, name: str, size: int, more: str, script: tuple = ()) -> bench.Job:
        """Start `size` ranks, without torchrun, which cannot be killed together with its ranks."""
        command = [sys.executable, *(script or [bench.TRAIN]), *self.flags(name, more)]
        return bench.Job([command] * size, rank_environments(size), self.folder / name)

    def train(self, name: str, size: int, more: str) -> Path:
        """Train the small model. Raises RunFailed."""
        with self.start(name, size, more) as job:
            wait_until(lambda: not job.is_running())
        return self.folder / name

    def measure(self, strategy: str, size: int, more: str = "") -> bench.Measurement:
        """Train the larger model for 10 steps that count. Raises RunFailed."""
        out = self.folder / f"{strategy}-{size}{more}"
        shutil.rmtree(out, ignore_errors=True)  # of one that failed
        model = "gpt2-124m" if self.is_cuda else "tiny"
        data = self.gpt2_tokens() if self.is_cuda else self.tokens
        flags = f"--model {model} --device {self.device} --strategy {strategy} --data {data} "
        flags += f"--micro_batch_size {self.micro_batch_size} "
        flags += f"--global_batch_size {self.micro_batch_size * size} {more}"
        return bench.run(flags, size, out, steps=10)

    def gpt2_tokens(self) -> Path:
        """A token folder, as nanoGPT writes it, of random tokens of GPT-2's vocabulary."""
        folder = self.folder / "gpt2-tokens"
        folder.mkdir(exist_ok=True)
        generator = np.random.default_rng(0)
        for split in ("train", "val"):
            generator.integers(50257, size=1 << 21, dtype=np.uint16).tofile(folder / f"{split}.bin")
        return folder


def write_text(folder: Path) -> None:
    """40 documents of invented words, about 30,000 bytes, the same on every machine."""
    generator = random.Random(1)
    words = []
    for _ in range(50):
        words.append("".join(generator.choices("abcdefgh", k=generator.randint(2, 6))))
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(" ".join(generator.choices(words, k=150)))


def training_rows(out: Path) -> list[dict]:
    return [row for row in metrics.read_rows(out / "metrics.jsonl") if "loss" in row]


def difference(expected: Path, found: Path, name: str, after: int = 0) -> float:
    """The largest relative difference of a field of two logs, in the steps after `after`."""
    largest = 0.0
    for one, other in zip(training_rows(expected), training_rows(found), strict=True):
        if one["step"] > after:
            largest = max(largest, abs(other[name] - one[name]) / abs(one[name]))
    return largest


# --------------------------------------------------------------------------------------------------
# The checks


def devices(lab: Lab, check: Check) -> None:
    """names, memory, versions; float32 products are not computed in TF32"""
    check.figures = hardware(lab.device) | versions(lab.device)
    tf32 = torch.get_float32_matmul_precision() != "highest"
    check.hold("tf32", int(tf32 or os.environ.get("NVIDIA_TF32_OVERRIDE") == "1"), 0)


def parity(lab: Lab, check: Check) -> None:
    """the losses and gradient norms of every strategy are those of a single process"""
    name = check.name.removeprefix("parity ")
    layout = LAYOUTS[name]
    if lab.size % layout.multiple:
        raise bench.CannotMeasure(f"it takes a multiple of {layout.multiple} ranks, not {lab.size}")
    for dtype in TOLERANCE:
        steps = f"--max_steps 20 --dtype {dtype}"
        single = lab.train(f"single-{dtype}", 1, f"--strategy single {steps}")
        out = lab.train(f"{name}-{dtype}", lab.size, f"{layout.flags} {steps}")
        compare(check, dtype, single, out)


def compare(check: Check, dtype: str, single: Path, out: Path) -> None:
    check.hold(f"{dtype} loss", difference(single, out, "loss"), TOLERANCE[dtype])
    grad_norm = difference(single, out, "grad_norm")
    if dtype == "float32":
        check.hold("float32 grad_norm", grad_norm, TOLERANCE["float32"])
    else:
        check.figures[f"{dtype} grad_norm"] = grad_norm  # depends on the data: up to 1.7e-2 seen


def cpu(lab: Lab, check: Check) -> None:
    """a GPU computes what a CPU computes, from the same weights"""
    if not lab.is_cuda:
        raise bench.CannotMeasure("it takes a GPU")
    # Initial weights depend on the kind of device: both begin with those of one step on the CPU.
    steps = "--strategy single --dtype float32"
    start = lab.train("start", 1, f"{steps} --max_steps 1 --device cpu")
    steps += f" --max_steps 20 --init_from {checkpoint.list_checkpoints(start)[0]}"
    on_cpu = lab.train("on-cpu", 1, f"{steps} --device cpu")
    on_gpu = lab.train("on-gpu", 1, steps)
    compare(check, "float32", on_cpu, on_gpu)


def syncs(lab: Lab, check: Check) -> None:
    """the host does not wait for the device in a step"""
    for strategy in ("single", "ddp", "fsdp"):
        size = 1 if strategy == "single" else lab.size
        flags = f"--strategy {strategy} --max_steps 6"
        script = ("-m", "tools.check", "--count_syncs")
        with lab.start(f"syncs-{strategy}", size, flags, script) as job:
            wait_until(lambda: not job.is_running())
        counts = [re.search(r"^host syncs: (\d+)", text, re.M)[1] for text in job.printed()]
        check.hold(strategy, max(map(int, counts)), 0)


def count_syncs(argv: list[str]) -> None:
    """Print how often the host waits for the device in three steps, after three, which allocate.

    Runs on all ranks.
    """
    config = train.parse(argv)
    world = dist.start(config.device)
    dog = watchdog.Watchdog(world.store, world.rank, world.size, config.timeout)
    run = train.build(train.make_plan(config, world), world, dog)
    batches = train.micro_batches(run, 1, 6)
    for step in (1, 2, 3):
        train.train_step(run.forward, run.optimizer, batches, step)
    counter = CudaSyncCounter() if world.device.type == "cuda" else HostSyncCounter()
    with counter:
        for step in (4, 5, 6):
            row = train.train_step(run.forward, run.optimizer, batches, step)
            run.log.step(step, row, run.optimizer, is_due=True)
    with run.log.pause():  # which waits for the row
        pass
    dist.stop()
    print(f"host syncs: {counter.counts.total()} {dict(counter.counts)}")


def stop(lab: Lab, check: Check) -> None:
    """SIGTERM to torchrun, with data-loading workers: the run saves, and continues"""
    flags = "--strategy ddp --num_workers 2 --schedule constant --max_steps"
    out = lab.folder / "stop"
    torchrun = [*bench.TORCHRUN, "--standalone", f"--nproc_per_node={lab.size}"]
    command = [*torchrun, bench.TRAIN, *lab.flags("stop", f"{flags} 1000000")]
    with bench.Job([command], [{}], out) as job:
        try:
            wait_until(lambda: (out / "metrics.jsonl").exists() or not job.is_running())
        finally:
            job.processes[0].terminate()  # torchrun passes it on to its ranks
            check.figures["torchrun status"] = job.processes[0].wait(PATIENCE)
    (text,) = job.printed()
    saved = checkpoint.list_checkpoints(out)
    if "stopped after step" not in text or not saved:
        raise bench.RunFailed(last_error(text), text)
    step = checkpoint.read_manifest(saved[-1])["step"]
    check.hold("steps lost", training_rows(out)[-1]["step"] - step, 0)
    lab.train("stop", lab.size, f"{flags} {step + 2}")
    check.hold("steps after resuming", training_rows(out)[-1]["step"] - step, most=2, least=2)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job did nothing for {PATIENCE} s")
        time.sleep(0.005)


def resume(lab: Lab, check: Check) -> None:
    """save, kill -9, resume: the losses of a run that was not killed"""
    flags = "--strategy fsdp --dtype float32 --schedule constant --save_interval 5 --max_steps"
    out = lab.folder / "killed"
    with lab.start("killed", lab.size, f"{flags} 1000000") as job:
        wait_until(lambda: checkpoint.list_checkpoints(out) or not job.is_running())
    step = checkpoint.read_manifest(checkpoint.list_checkpoints(out)[-1])["step"]
    flags += f" {step + 20}"
    lab.train("killed", lab.size, flags)
    whole = lab.train("whole", lab.size, flags)
    # Equal to the last bit on CPUs; on GPUs the backward pass of attention is not deterministic.
    limit = TOLERANCE["float32"] if lab.is_cuda else 0.0
    check.figures["resumed after step"] = step
    check.hold("loss", difference(whole, out, "loss", after=step), limit)


def compiled(lab: Lab, check: Check) -> None:
    """--compile: the losses of the same run without it, and the ratio of their speeds"""
    eager = lab.measure("single", 1)
    faster = lab.measure("single", 1, "--compile")
    record_speed(check, "compiled", faster)
    check.figures["ratio"] = faster.speed / eager.speed
    check.hold("loss", difference(eager.out, faster.out, "loss"), TOLERANCE["bfloat16"])


def record_speed(check: Check, label: str, found: bench.Measurement) -> None:
    check.figures[f"{label} tokens/s/device"] = found.speed
    if found.mfu is not None:
        check.hold(f"{label} MFU", found.mfu, 1)


def measured_runs(lab: Lab) -> dict[str, bench.Measurement]:
    """The larger model on one device; on GPUs also under fsdp there, and on all of them."""
    runs = {"single": lab.measure("single", 1)}
    if lab.is_cuda:
        runs["fsdp x 1"] = lab.measure("fsdp", 1)
    if lab.is_cuda and lab.size > 1:
        for strategy in ("ddp", "fsdp"):
            runs[f"{strategy} x {lab.size}"] = lab.measure(strategy, lab.size)
    return runs


def profile(lab: Lab, check: Check) -> None:
    """--profile: shares of the time between 0 and 1, operations with names"""
    for label, run in measured_runs(lab).items():
        figures = json.loads((run.out / "profile" / "rank_0.json").read_text())
        for share in ("busy", "exposed_communication", "data_wait"):
            check.hold(f"{label} {share}", figures[share], 1)
        names = [operation["name"] for operation in figures["operations"] if operation["name"]]
        check.hold(f"{label} named operations", len(names), most=10, least=1)
        check.figures[f"{label} most time"] = ", ".join(names[:1])


def memory(lab: Lab, check: Check) -> None:
    """memory said at the start and used: auto fills 80% of a device, so at most 1 / 0.8"""
    for label, run in measured_runs(lab).items():
        check.figures[f"{label} MB said"] = run.said_memory / 1e6
        check.figures[f"{label} MB used"] = run.peak_memory / 1e6
        check.hold(f"{label} used / said", run.peak_memory / run.said_memory, most=1.25, least=0.5)


def speed(lab: Lab, check: Check) -> None:
    """tokens per second and MFU: gpt2-124m on GPUs, tiny on CPUs"""
    for label, run in measured_runs(lab).items():
        record_speed(check, label, run)


CHECKS = {
    "devices": devices,
    "parity": parity,
    "cpu": cpu,
    "syncs": syncs,
    "stop": stop,
    "resume": resume,
    "compile": compiled,
    "profile": profile,
    "memory": memory,
    "speed": speed,
}


# --------------------------------------------------------------------------------------------------
# The machine


def hardware(device: str) -> dict:
    host_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes
    found = {"host_cores": os.cpu_count(), "host_memory": host_memory}
    if device == "cpu":
        return {"device": cpu_name()} | found
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    counts = Counter(gpu.name for gpu in gpus)
    names = ", ".join(f"{count} x {name}" for name, count in counts.items())
    return {"device": names, "device_memory": min(gpu.total_memory for gpu in gpus)} | found


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else None
    return found[1] if found else platform.machine()


def versions(device: str) -> dict:
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if device == "cuda":
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = (program_output(query) or "unknown").splitlines()[0]
    return found


def commit() -> str | None:
    """The commit of this folder, with "-dirty" where files differ; None without git."""
    describe = "describe --always --dirty --abbrev=40 --exclude=*"
    return program_output(["git", "-C", str(Path(bench.TRAIN).parent), *describe.split()])


def program_output(command: list[str]) -> str | None:
    """What a program prints; None where it is missing or fails."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()


# --------------------------------------------------------------------------------------------------
# The command line


def parse(argv: list[str]) -> argparse.Namespace:
    lines = [f"  {name:10} {check.__doc__.splitlines()[0]}" for name, check in CHECKS.items()]
    parser = cli.Parser(
        prog="tools.check",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Check nanoshard on this machine: one line for each check, status 1 if one "
        "fails.\nFiles of the runs are kept where one fails.",
        epilog="\n".join(["checks, in this order:", *lines]),
    )
    parser.add_argument(
        "checks", nargs="*", type=check_name, metavar="CHECK", help="(default: all)"
    )
    choices = ("auto", "cpu", "cuda")
    parser.add_argument("--device", default="auto", choices=choices, help="(default: auto)")
    parser.add_argument(
        "--ranks", type=bench.positive, metavar="N", help="processes (default: all GPUs; 2 on CPUs)"
    )
    parser.add_argument(
        "--micro_batch_size",
        type=bench.positive,
        metavar="N",
        help="sequences of a rank in measured runs (default: 16 on GPUs, 4 on CPUs)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    args = parser.parse_args(argv)
    if args.json and not args.json.absolute().parent.is_dir():
        raise cli.UsageError(f"--json {args.json}: there is no folder {args.json.parent}")
    return args


def check_name(text: str) -> str:
    if text not in CHECKS:
        raise argparse.ArgumentTypeError(
            f"no check is named {text}: choose from {', '.join(CHECKS)}"
        )
    return text


def run_check(lab: Lab, name: str, check: Check) -> None:
    """Fill in `check`; whatever a check raises is its failure."""
    began = time.perf_counter()
    try:
        CHECKS[name](lab, check)
        check.reason = check.beyond_limits()
        check.status = "FAIL" if check.reason else "pass"
    except bench.CannotMeasure as reason:
        check.status = "skip"
        check.reason = str(reason)
    except Exception as error:  # the other checks go on
        check.status = "FAIL"
        text = traceback.format_exc()
        if isinstance(error, bench.RunFailed):
            text += error.output
        check.reason = last_error(text)
        (lab.folder / f"{check.name}.failed.txt").write_text(text)
    if check.status == "FAIL":
        check.output = str(lab.folder)
    check.seconds = time.perf_counter() - began


def run_checks(args: argparse.Namespace, folder: Path, checks: list[Check]) -> None:
    """Run the checks that `args` names, print a line for each as it ends, append to `checks`."""
    lab = Lab(args, folder)
    for name in CHECKS:
        if args.checks and name not in args.checks:
            continue
        variants = [f" {layout}" for layout in LAYOUTS] if name == "parity" else [""]
        for variant in variants:
            check = Check(name + variant)
            run_check(lab, name, check)
            print(check.line(), flush=True)
            checks.append(check)


def write_json(args: argparse.Namespace, argv: list[str], checks: list[Check]) -> None:
    """Write what was found, on which machine and with which code."""
    found = {
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "commit": commit(),
        "code": train.source_hash(),
        "command": shlex.join(["python", "-m", "tools.check", *argv]),
        "ranks": args.ranks,
        "hardware": hardware(args.device),
        "versions": versions(args.device),
        "checks": [asdict(check) for check in checks],
    }
    args.json.write_text(json.dumps(found, indent=2) + "\n")


def check_machine(argv: list[str]) -> int:
    args = parse(argv)
    # Raises MeshError where there is no such device, or where it has too few GPUs.
    args.device = dist.set_device(args.device, 0, args.ranks or 1).type
    args.ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    folder = Path(tempfile.mkdtemp(prefix="check-"))
    checks: list[Check] = []
    try:
        run_checks(args, folder, checks)
    finally:  # also after Ctrl-C
        failed = any(check.status == "FAIL" for check in checks)
        if not failed:
            shutil.rmtree(folder)
        if args.json:
            write_json(args, argv, checks)
    return int(failed)


def main(argv: list[str]) -> int:
    if argv[:1] == ["--count_syncs"]:  # a rank of the check `syncs`
        return cli.run("tools.check", lambda: count_syncs(argv[1:]))
    return cli.run("tools.check", lambda: check_machine(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
