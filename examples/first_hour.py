"""The first hour on a GPU: measure in about 25 minutes what no GPU has measured yet.

python examples/first_hour.py --nanogpt ../nanoGPT
python examples/first_hour.py --model tiny --micro_batch_size 1    # a dry run, also on CPUs

Each step is a command with a time limit. If a step fails, the next one still runs.
OUT/first_hour.json contains the hardware, the versions, and for each step its command, seconds,
status, figures and last lines. OUT/STEP.txt contains everything that a step printed.
"""

import json
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import collect_env

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import metrics
import train
from model import SIZES, Transformer
from runtime import agreement, cli
from tools.measuring.harness import ROOT, training_rows

THIS = Path(__file__).resolve()
VOCABULARY = 50257  # GPT-2's; the token folder has no tokenizer
LAST_LINES = 30  # of a step's output, in the report
GRACE = 40  # seconds to end after an interrupt; torchrun gives its ranks 30
FIRST_STRICT, LAST_STRICT = 4, 53  # steps without host syncs; the first three allocate

# --------------------------------------------------------------------------------------------------
# The steps


@dataclass(frozen=True)
class Step:
    name: str
    limit: int  # seconds; less than 25 minutes in total
    command: str  # with keys of `values_for` in braces
    ranks: int = 1  # the fewest it needs


TRAIN = "{torchrun} train.py {flags} --max_steps 20"
ENDLESS = "train.py {flags} --max_steps 1000000 --timeout 20"
STEPS = [
    Step("start-first", 30, "{torchrun} train.py {flags} --dry_run"),  # reads files from disk
    Step("start-lazy", 30, "env TORCH_GLOO_LAZY_INIT=1 {torchrun} train.py {flags} --dry_run", 2),
    Step("start-eager", 30, "env TORCH_GLOO_LAZY_INIT=0 {torchrun} train.py {flags} --dry_run", 2),
    Step("gpu-tests", 100, "{python} -m pytest -m gpu"),
    Step("check", 200, "{torchrun} -m tools.check {flags} --json {out}/check.json"),
    Step("no-syncs", 60, "{torchrun} {this} no-syncs {flags} --max_steps 54"),
    Step("profile", 75, f"{TRAIN} --compile --loss_chunks 8 --profile 10:15"),
    Step("uncompiled", 60, f"{TRAIN} --loss_chunks 1"),
    Step("compiled", 90, f"{TRAIN} --loss_chunks 1 --compile"),
    Step("loss-chunks", 75, f"{TRAIN} --loss_chunks 8 --compile"),
    Step("compare", 15, "{python} -m tools.compare {out}/uncompiled {out}/compiled"),
    Step(
        "nanogpt",
        300,
        "{python} -m tools.bench nanogpt --path {nanogpt} --dataset first_hour {their_size} "
        "--nproc 1 --steps 40 --rounds 2 --json",
    ),
    Step(
        "strategies",
        150,
        "{python} -m tools.bench strategies --only single ddp fsdp --nproc {ranks} {size} "
        "--rounds 1 --json "
        '--flags="--data {out}/tokens --compile --loss_chunks 8"',
    ),
    Step("kill-1", 50, f"{{python}} {{this}} kill {{torchrun_1}} {ENDLESS}"),  # without NCCL
    Step("kill", 60, f"{{python}} {{this}} kill {{torchrun}} {ENDLESS}", 2),
    Step("plan-uncompiled", 20, "{plan} --run {out}/uncompiled"),
    Step("plan-compiled", 20, "{plan} --run {out}/compiled"),
    Step("plan-loss-chunks", 20, "{plan} --run {out}/loss-chunks"),
    Step(
        "muon", 90, f"{TRAIN} --profile 10:15 --optimizer muon --strategy hsdp --dp_replicate 2", 4
    ),
]


def values_for(step: Step, options: Namespace, out: Path) -> dict[str, str]:
    """Return {key: words} to fill in a step's command."""
    python = shlex.quote(sys.executable)
    torchrun = f"{python} -m torch.distributed.run --standalone --nproc_per_node"
    n, batch = options.nproc_per_node, options.micro_batch_size
    size = f"--model {options.model} --micro_batch_size {batch}"
    # Each rank has one micro-batch a step. Every run is new, and saves nothing.
    flags = (
        f"{size} --global_batch_size {n * batch} --strategy fsdp --data {out}/tokens "
        f"--out {out}/{step.name} --warmup_steps 5 --log_interval 1 --eval_interval 0 "
        "--eval_sequences 1 --checkpoint none --sample_tokens 0"
    )
    theirs = SIZES["tiny" if options.model == "tiny" else "gpt2-124m"]
    their_size = (
        f"--n_layer {theirs.n_layer} --n_head {theirs.n_head} --n_embd {theirs.d_model} "
        f"--block_size {theirs.seq_len} --batch_size {2 * batch}"
    )
    of_cpus = "" if torch.cuda.is_available() else " --peak_tflops 0.1"  # their peak is in no table
    return {
        "python": python,
        "this": shlex.quote(str(THIS)),
        "torchrun": f"{torchrun} {n}",
        "torchrun_1": f"{torchrun} 1",
        "plan": f"{python} -m tools.plan{of_cpus}",
        "ranks": str(n),
        "size": size,
        "flags": flags,
        "their_size": their_size,
        "nanogpt": f"{out}/nanoGPT",
        "out": str(out),
    }


def reason_to_skip(step: Step, options: Namespace) -> str:
    """Return why a step cannot run here; an empty string if it can."""
    if step.name == "nanogpt" and not options.nanogpt:
        return "needs --nanogpt PATH"
    if step.ranks > options.nproc_per_node:
        return f"needs {step.ranks} GPUs"
    return ""


# --------------------------------------------------------------------------------------------------
# Steps with code of their own


def train_without_syncs(argv: list[str]) -> int:
    """Run train.py, one micro-batch a step; a host sync in steps 4 to 53 is an error."""
    forwards = 0

    def watch(module, inputs) -> None:
        nonlocal forwards
        if not isinstance(module, Transformer) or not torch.is_grad_enabled():
            return
        forwards += 1
        is_strict = FIRST_STRICT <= forwards <= LAST_STRICT
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error" if is_strict else "default")

    hook = register_module_forward_pre_hook(watch)  # called before each forward of any module
    try:
        return train.main(argv)
    finally:
        hook.remove()


def kill_a_rank(command: list[str]) -> None:
    """Run torchrun until step 5, read the GPUs' memory, and kill -9 the last rank.

    Prints as JSON the seconds until torchrun ends, its status, its error lines, and the bytes in
    use on each GPU that torch has not reserved: the CUDA context and NCCL's communicators.
    """
    before = used_memory()
    log = Path(command[command.index("--out") + 1])
    torchrun = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while not (rows := training_rows(log)) or rows[-1]["step"] < 5:
        if torchrun.poll() is not None:
            raise cli.RunError(f"torchrun ended before step 5: {torchrun.stdout.read()}")
        time.sleep(0.1)
    reserved = rows[-1]["peak_reserved_memory"]
    beside = [now - then - reserved for now, then in zip(used_memory(), before)]
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text()
    os.kill(int(children.split()[-1]), signal.SIGKILL)
    began = time.monotonic()
    printed, _ = torchrun.communicate()
    found = {"seconds_to_end": time.monotonic() - began, "status": torchrun.returncode}
    found["errors"] = [line for line in printed.splitlines() if "error:" in line]
    print(printed, json.dumps(found | {"bytes_beside_reserved": beside}), sep="\n")


def used_memory() -> list[int]:
    """Return the bytes in use on each GPU, by all processes; [] without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(mebibytes) << 20 for mebibytes in subprocess.check_output(query).split()]


# --------------------------------------------------------------------------------------------------
# Running a step


def run_step(step: Step, command: list[str], out: Path) -> dict:
    """Run a step within its limit; return its entry in first_hour.json."""
    file = out / f"{step.name}.txt"
    began = time.monotonic()
    with open(file, "w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the step
        )
    try:
        status = process.wait(step.limit)
    except subprocess.TimeoutExpired:
        status = f"ended after {step.limit} s"
    except KeyboardInterrupt:
        status = "interrupted"
    finally:
        end(process)
    lines = file.read_text(errors="replace").splitlines()
    result = {"seconds": round(time.monotonic() - began, 1), "status": status}
    with suppress(ValueError, LookupError, OSError):  # a step that failed may lack them
        result["figures"] = read_figures(step.name, lines, out)
    return result | {"last_lines": lines[-LAST_LINES:]}


def end(process: subprocess.Popen) -> None:
    """Interrupt a step that still runs, and kill the processes that are left."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_figures(name: str, lines: list[str], out: Path) -> dict:
    """Return the figures of a run, of tools.check, or the JSON in a step's last line.

    Raises ValueError, LookupError or OSError if there are none.
    """
    if (out / f"{name}.json").exists():
        return json.loads((out / f"{name}.json").read_text())
    rows = training_rows(out / name)
    if not rows or name.startswith("kill"):
        return json.loads(lines[-1])
    figures = {"loss": [row["loss"] for row in rows]}
    for column in ("step_time", "tokens_per_second_per_device", "mfu"):
        figures[column] = statistics.median(row[column] or 0 for row in rows[2:])
    for column in ("peak_device_memory", "peak_reserved_memory", "peak_host_memory"):
        figures[column] = rows[-1][column]
    for file in (out / name).glob("profile/rank_0.json"):
        figures["profile"] = json.loads(file.read_text())
    return figures


# --------------------------------------------------------------------------------------------------
# The command


def parse(argv: list[str]) -> Namespace:
    """Raises UsageError."""
    parser = cli.Parser(prog="first_hour.py", description="Measure what needs a GPU.")
    gpus = torch.cuda.device_count()
    parser.add_argument("--out", type=Path, default=Path("runs/first-hour"), metavar="DIR")
    parser.add_argument("--nanogpt", type=Path, metavar="DIR", help="a checkout of nanoGPT")
    parser.add_argument("--model", choices=SIZES, default="olmo-1b", help="(default: olmo-1b)")
    parser.add_argument("--micro_batch_size", type=cli.number(int, 1), default=8, metavar="N")
    parser.add_argument(
        "--nproc_per_node",
        type=cli.number(int, 1),
        default=gpus or 4,
        metavar="N",
        help="ranks (default: the number of GPUs, or 4 without a GPU)",
    )
    options = parser.parse_args(argv)
    if options.out.exists():
        raise cli.UsageError(f"--out {options.out} exists: choose a new folder")
    if not gpus and options.model != "tiny":
        raise cli.UsageError(
            "PyTorch finds no GPU here: --model tiny --micro_batch_size 1 gives a dry run on CPUs"
        )
    if options.nanogpt and not (options.nanogpt / "train.py").exists():
        raise cli.UsageError(f"--nanogpt {options.nanogpt} has no train.py: clone nanoGPT")
    return options


def write_tokens(folder: Path) -> None:
    """Write random tokens, some rarer than others, in nanoGPT's format."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for name, count in (("train", 4_000_000), ("val", 200_000)):
        ids = VOCABULARY * random.random(count) ** 4
        ids.astype(np.uint16).tofile(folder / f"{name}.bin")


def first_hour(argv: list[str]) -> int:
    """Run all steps; return the exit status: 1 if a step failed, 130 after Ctrl-C."""
    options = parse(argv)
    out = options.out.absolute()
    write_tokens(out / "tokens")
    if options.nanogpt:
        shutil.copytree(
            options.nanogpt, out / "nanoGPT", ignore=shutil.ignore_patterns("data", ".git", "out*")
        )
        (out / "nanoGPT/data").mkdir()
        (out / "nanoGPT/data/first_hour").symlink_to(out / "tokens")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found = {
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "code": agreement.source_hash(),
        "command": shlex.join(sys.argv),
        "host": collect_env.get_env_info()._asdict(),
        "steps": [],
    }
    for step in STEPS:
        command = shlex.split(step.command.format(**values_for(step, options, out)))
        result = {"status": f"skipped: {reason_to_skip(step, options)}"}
        if not reason_to_skip(step, options):
            print(f"{step.name:16} at most {step.limit:3} s ...", end=" ", flush=True)
            result = run_step(step, command, out)
            print(f"{result['seconds']:5.1f} s, status {result['status']}")
        found["steps"].append({"name": step.name, "command": shlex.join(command), **result})
        metrics.replace_file(out / "first_hour.json", json.dumps(found, indent=2) + "\n")
        if result["status"] == "interrupted":
            break
    return report(found["steps"], out)


def report(results: list[dict], out: Path) -> int:
    """Print the table of the steps; return the exit status."""
    for result in results:
        took = f"{result['seconds']:6.1f} s" if "seconds" in result else ""
        print(f"{result['name']:16} {took:>8}  {result['status'] or 'ok'}")
    print(f"written to {out}/first_hour.json")
    statuses = [result["status"] for result in results]
    if "interrupted" in statuses:
        return 130
    return int(any(status and not str(status).startswith("skipped") for status in statuses))


def main(argv: list[str]) -> int:
    if argv[:1] == ["no-syncs"]:
        return train_without_syncs(argv[1:])
    if argv[:1] == ["kill"]:
        return cli.execute("first_hour.py", kill_a_rank, argv[1:])
    return cli.execute("first_hour.py", first_hour, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
