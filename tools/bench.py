"""Benchmarks. Each prints one table in Markdown, or with --json its numbers.

python -m tools.bench strategies --nproc 2
python -m tools.bench checkpoint --nproc 4
python -m tools.bench nanogpt --path ~/nanoGPT
"""

import ctypes
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import checkpoint
import dist
import metrics
from model import SIZES, Transformer
from runtime import cli
from runtime.memory import host_memory
from tools.compare import markdown_table

TRAIN = str(Path(__file__).parent.parent / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Flags of a run that only trains and logs every step
ONLY_STEPS = [
    *("--log_interval=1", "--eval_interval=0", "--eval_sequences=1"),
    *("--sample_tokens=0", "--checkpoint=none"),
]
STRATEGIES = {
    "ddp": "--strategy ddp",
    "fsdp": "--strategy fsdp",
    "SHARD_GRAD_OP": "--strategy fsdp --reshard_after_forward false",
    "hsdp": "--strategy hsdp",
}
WARM_UP = 3  # steps of every run that are not counted


class CannotMeasure(RuntimeError):
    """This machine lacks something that the benchmark needs."""

    exit_status = 2


class RunFailed(RuntimeError):
    """A measured run exited with an error; `output` is the end of what it printed."""

    exit_status = 1

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output[-4000:]


@dataclass
class Table:
    """What a benchmark found."""

    subject: str  # what was measured: the line above the table
    rows: list[dict]  # column -> text, number, or list of measurements


# --------------------------------------------------------------------------------------------------
# Whole runs of train.py


@dataclass
class Measurement:
    """What one run of train.py printed, and logged in its counted steps."""

    out: Path
    speed: float  # tokens/s/device, median
    mfu: float | None  # median; None: the peak of the device is unknown
    bytes_by_axis: Counter[str]  # what a rank communicates in one step, by axis of the mesh
    peak_memory: int  # bytes, of the rank with the most; device memory where there is a GPU
    said_memory: float  # bytes, of the line "memory" at the start

    def communicated(self) -> str:
        """MB that a rank communicates in a step, such as "dp_shard 4.20, tp 1.05"."""
        sizes = self.bytes_by_axis.items()
        return ", ".join(f"{axis} {size / 1e6:,.2f}" for axis, size in sizes) or "none"


def ratios(values: list[float], baseline: list[float]) -> list[float]:
    """Each round's value divided by the baseline of the same round."""
    return [value / unit for value, unit in zip(values, baseline)]


def show_round(turn: int, rounds: int, name: str) -> None:
    print(f"round {turn + 1} of {rounds}: {name} ...", file=sys.stderr, flush=True)


def run(flags: str, nproc: int, out: Path, steps: int) -> Measurement:
    """Run train.py once, with `steps` steps that count. Raises RunFailed."""
    last = WARM_UP + steps
    command = [
        *TORCHRUN,
        "--standalone",
        f"--nproc_per_node={nproc}",
        TRAIN,
        *ONLY_STEPS,
        # Two more steps, since both slow a run down: one is traced, the other's bytes are counted
        f"--max_steps={last + 2}",
        f"--profile={last}:{last + 1}",
        f"--out={out}",
        *flags.split(),
    ]
    output = "".join(printed_lines(command, **ONE_THREAD))
    out.with_name(f"{out.name}.txt").write_text(output)
    rows = metrics.read_rows(out / "metrics.jsonl")
    counted = [row for row in rows if "loss" in row and WARM_UP < row["step"] <= last]
    mfu = [row["mfu"] for row in counted]
    bytes_by_axis = Counter()
    for row in json.loads((out / "profile" / "rank_0.json").read_text())["communicated"]:
        bytes_by_axis[row["axis"]] += row["bytes"]
    return Measurement(
        out=out,
        speed=statistics.median(row["tokens_per_second_per_device"] for row in counted),
        mfu=None if None in mfu else statistics.median(mfu),
        bytes_by_axis=bytes_by_axis,
        peak_memory=max(row["peak_device_memory"] or row["peak_host_memory"] for row in counted),
        said_memory=said_memory(output),
    )


def said_memory(output: str) -> float:
    """The bytes at the end of the line "memory  a rank at its peak: ... = 2.67 GB"."""
    number, unit = re.search(r"^memory .* = ([\d.,]+) ([MG])B$", output, re.M).groups()
    return float(number.replace(",", "")) * {"M": 1e6, "G": 1e9}[unit]


def printed_lines(command: list[str], cwd: Path | None = None, **variables: str) -> Iterator[str]:
    """Run a command and yield the lines that it prints. Raises RunFailed."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | variables,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        yield from process.stdout
        if process.wait():
            errors.seek(0)
            raise RunFailed(f"{' '.join(command)} failed", errors.read())


class Job:
    """Commands that run at the same time; number i prints to the file `out`-<i>.txt.

    What still runs at the end of the `with` block is killed, but not what torchrun started.
    """

    def __init__(self, commands: list[list[str]], environments: list[dict], out: Path):
        self.commands = commands
        self.outputs = [out.with_name(f"{out.name}-{i}.txt") for i in range(len(commands))]
        self.processes = []
        variables = ONE_THREAD | {"PYTHONPATH": str(Path(TRAIN).parent)}  # for -m tools....
        for command, environment, output in zip(commands, environments, self.outputs):
            with open(output, "w") as file:
                process = subprocess.Popen(
                    command,
                    env=os.environ | variables | environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            self.processes.append(process)

    def is_running(self) -> bool:
        """False when all have succeeded. Raises RunFailed as soon as one has failed.

        The others may wait for it forever.
        """
        statuses = [process.poll() for process in self.processes]
        for command, printed, status in zip(self.commands, self.printed(), statuses):
            if status:
                raise RunFailed(f"{' '.join(command)} failed", printed)
        return None in statuses

    def printed(self) -> list[str]:
        return [output.read_text(errors="replace") for output in self.outputs]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def device(args: Namespace) -> str:
    return "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"


def strategies(args: Namespace) -> Table:
    """Speed, communication and memory of every strategy on N processes, against one process.

    hsdp has two replicas. MFU is relative to the data sheet's peak for dense bfloat16, which no
    program reaches; it is empty if the peak of the device is unknown. Memory said is the estimate
    at the start of the run.
    """
    size = args.micro_batch_size
    common = f"--model {args.model} --device {args.device} --micro_batch_size {size}"
    ways = {"single": "--strategy single", **STRATEGIES}
    ways["hsdp"] += " --dp_replicate 2"
    if args.nproc % 2:
        del ways["hsdp"]
    found: dict[str, list[Measurement]] = {name: [] for name in ways}
    for turn in range(args.rounds):
        for name, measured in found.items():
            show_round(turn, args.rounds, name)
            nproc = 1 if name == "single" else args.nproc
            flags = f"{common} --global_batch_size {size * nproc} {ways[name]} {args.flags}"
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                measured.append(run(flags, nproc, Path(folder, "run"), args.steps))

    single = [measured.speed for measured in found["single"]]
    rows = []
    for name, measured in found.items():
        speeds = [one.speed for one in measured]
        mfu = [one.mfu for one in measured]
        rows.append(
            {
                "strategy": name,
                "processes": 1 if name == "single" else args.nproc,
                "tokens/s/device": speeds,
                "ratio to single": ratios(speeds, single),
                "MFU": "" if None in mfu else mfu,
                "MB communicated a step": measured[0].communicated(),
                "peak memory of a rank, MB": f"{measured[0].peak_memory / 1e6:,.0f}",
                "said, MB": f"{measured[0].said_memory / 1e6:,.0f}",
            }
        )
    subject = f"{args.model}, micro-batch {size}, one thread a process, {steps_and_rounds(args)}"
    if peak := metrics.peak_flops(torch.device(device(args)), torch.bfloat16):
        subject += f", MFU of {peak / 1e12:,.0f} TFLOP/s"
    return Table(subject, rows)


def steps_and_rounds(args: Namespace) -> str:
    return f"{args.steps} steps x {args.rounds} rounds"


# --------------------------------------------------------------------------------------------------
# nanoGPT


def nanogpt(args: Namespace) -> Table:
    """nanoGPT's trainer and this one in turn, on the same data, with models of the same size.

    The models have the same layers, width, heads and tokens a step, and as many parameters in
    their blocks: SwiGLU's d_ff is 8/3 of the width, a multiple of 8. Needs a checkout of
    github.com/karpathy/nanoGPT with a prepared data set.
    """
    dataset = args.path / "data" / args.dataset
    if not (args.path / "train.py").exists() or not (dataset / "train.bin").exists():
        raise CannotMeasure(
            f"--path {args.path}: no nanoGPT with data/{args.dataset}/train.bin there: "
            "clone it and run its prepare.py"
        )
    commands = {"nanoGPT": nanogpt_command(args), "nanoshard": nanoshard_command(args, dataset)}
    speeds: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(args.rounds):
        for name, command in commands.items():
            show_round(turn, args.rounds, name)
            with tempfile.TemporaryDirectory(prefix="bench-") as out:
                out_flag, cwd = f"--out={out}", None
                if name == "nanoGPT":
                    out_flag, cwd = f"--out_dir={out}", args.path
                tokens = args.batch_size * args.block_size
                speeds[name].append(trainer_speed([*command, out_flag], cwd, tokens))

    rows = []
    for name, found in speeds.items():
        ratio = ratios(found, speeds["nanoGPT"])
        rows.append({"trainer": name, "tokens/s": found, "ratio": ratio})
    subject = (
        f"{args.n_layer} layers x {args.n_embd}, {args.n_head} heads, block {args.block_size}, "
        f"batch {args.batch_size}, {steps_and_rounds(args)}, {args.dataset} {args.flags}"
    )
    return Table(subject.rstrip(), rows)


def nanogpt_command(args: Namespace) -> list[str]:
    sizes = ("dataset", "n_layer", "n_head", "n_embd", "block_size", "batch_size")
    # Evaluates never. The schedule divides by lr_decay_iters - warmup_iters, which are 100.
    flags = (
        f"--max_iters={args.steps} --lr_decay_iters={args.steps + 1} --dropout=0.0 "
        f"--eval_interval={10**9} --eval_iters=1 --log_interval=1 --device={device(args)} "
        f"--compile={device(args) == 'cuda'}"
    )
    given = [f"--{name}={getattr(args, name)}" for name in sizes]
    config = "config/train_shakespeare_char.py"
    return [sys.executable, "train.py", config, *given, *flags.split()]


def nanoshard_command(args: Namespace, dataset: Path) -> list[str]:
    # 3 d_model d_ff = 8 d_model^2, the parameters of GPT-2's MLP
    d_ff = 8 * round(args.n_embd / 3)
    flags = (
        f"--n_layer={args.n_layer} --n_head={args.n_head} --n_kv_head={args.n_head} "
        f"--d_model={args.n_embd} --d_ff={d_ff} --seq_len={args.block_size} "
        f"--global_batch_size={args.batch_size} --max_steps={args.steps} --device={device(args)} "
        f"{args.flags}"
    )
    return [sys.executable, TRAIN, *ONLY_STEPS, f"--data={dataset}", *flags.split()]


# "iter 7: loss 4.2000, time 250.00ms, mfu 1.20%", "step 7/10  70%  ...  500 ms  12,346 tok/s"
NANOGPT_STEP = re.compile(r"time ([\d.]+)ms")
NANOSHARD_STEP = re.compile(r"ms  ([\d,]+) tok/s")


def trainer_speed(command: list[str], cwd: Path | None, tokens: int) -> float:
    """Median tokens/s that a trainer prints, whose step has `tokens`, without its first fifth.

    Raises RunFailed.
    """
    speeds = []
    for line in printed_lines(command, cwd):
        if step := NANOGPT_STEP.search(line):
            speeds.append(tokens / (float(step[1]) / 1e3))
        elif step := NANOSHARD_STEP.search(line):
            speeds.append(float(step[1].replace(",", "")))
    return statistics.median(speeds[len(speeds) // 5 :])


# --------------------------------------------------------------------------------------------------
# Checkpoints


def checkpoints(args: Namespace) -> Table:
    """Saving weights and AdamW state under fsdp, against a plain write of as many bytes."""
    world = dist.start("cpu")
    mesh = init_device_mesh("cpu", (world.size,))
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Transformer(SIZES[args.model]).named_parameters()}
    state = {slot: sharded(shapes, mesh) for slot in ("model", "exp_avg", "exp_avg_sq")}
    weights = [weight for _, weight in checkpoint.flatten(state)]
    size = sum(weight.nbytes for weight in weights)
    shard = sum(weight.to_local().nbytes for weight in weights)

    folder = Path(dist.on_rank0(lambda: tempfile.mkdtemp(prefix="bench-", dir=".")))
    savers = {
        "sharded": checkpoint.Saver(folder / "sharded", False, 0, 0, world.timeout),
        "sharded, async": checkpoint.Saver(folder / "async", True, 0, 0, world.timeout),
    }
    saves: dict[str, list[dict]] = {name: [] for name in savers}
    for turn in range(args.rounds + 1):
        for name, saver in savers.items():
            began = time.perf_counter()
            dist.on_rank0(lambda: plain_write(folder / "plain", size))
            plain_seconds = time.perf_counter() - began
            saves[name].append(save(saver, state, turn) | {"plain_seconds": plain_seconds})
    dist.on_rank0(lambda: shutil.rmtree(folder))
    subject = (
        f"{args.model}, {size / 1e6:,.0f} MB on {world.size} ranks, "
        f"shards of {shard / 1e6:,.0f} MB, {args.rounds} rounds"
    )
    return Table(subject, [checkpoint_row(name, saves[name], size, shard) for name in savers])


def sharded(shapes: dict[str, torch.Size], mesh: DeviceMesh) -> dict[str, DTensor]:
    """Random float32 tensors, sharded over all ranks as fsdp shards them."""
    found = {}
    for name, shape in shapes.items():
        found[name] = tensor.empty(shape, device_mesh=mesh, placements=[Shard(0)])
        found[name].to_local().normal_()
    return found


def plain_write(path: Path, size: int) -> None:
    """Write `size` bytes to disk, as fast as one process can."""
    block = os.urandom(1 << 20) * 16  # 16 MiB
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def save(saver: checkpoint.Saver, state: dict, step: int) -> dict:
    """Save `state` once and remove the checkpoint; the log row, with "extra_memory" in bytes."""
    memory_before = reset_peak()
    saver.save(state, {"step": step})
    saver.wait()
    row = saver.done()[0]
    dist.on_rank0(lambda: shutil.rmtree(row["path"]))
    extra_memory = torch.tensor(host_memory().peak - memory_before)
    torch.distributed.all_reduce(extra_memory, op=torch.distributed.ReduceOp.MAX)
    return row | {"extra_memory": extra_memory.item()}


def reset_peak() -> int:
    """Reset the peak of this process's memory (Linux); returns the memory in use, in bytes."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return free memory to the system first
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset VmHWM
    return host_memory().resident


def checkpoint_row(name: str, saves: list[dict], size: int, shard: int) -> dict:
    counted = saves[1:]  # the first round is a warm-up
    seconds = [save["seconds"] for save in counted]
    # Of all rounds: the first asynchronous save allocates a copy, which later ones use again
    extra_memory = max(save["extra_memory"] for save in saves)
    plain_seconds = [save["plain_seconds"] for save in counted]
    return {
        "form": name,
        "seconds": seconds,
        "blocking seconds": [save["blocking_seconds"] for save in counted],
        "MB/s": [save["bytes"] / save["seconds"] / 1e6 for save in counted],
        "of plain write": ratios(plain_seconds, seconds),
        "peak extra host memory / shard": f"{extra_memory / shard:.3f}",
    }


# --------------------------------------------------------------------------------------------------
# The command line

TABLES = {"strategies": strategies, "nanogpt": nanogpt, "checkpoint": checkpoints}


def parse(argv: list[str]) -> Namespace:
    parser = cli.Parser(prog="tools.bench", description="Measure nanoshard on this machine.")
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    parsers = {}
    for name, table in TABLES.items():
        summary = table.__doc__.splitlines()[0]
        parsers[name] = tables.add_parser(name, help=summary, description=table.__doc__)
        parsers[name].add_argument("--json", action="store_true", help="print numbers, not a table")
    for name in ("strategies", "nanogpt"):
        choices = ("auto", "cpu", "cuda")
        parsers[name].add_argument("--device", default="auto", choices=choices)
        parsers[name].add_argument(
            "--flags", default="", help="more flags for our train.py, as one argument"
        )
    add_strategies_flags(parsers["strategies"])
    add_nanogpt_flags(parsers["nanogpt"])
    add_checkpoint_flags(parsers["checkpoint"])
    return parser.parse_args(argv)


def add_strategies_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", choices=SIZES, help="(default: tiny)")
    add_count(parser, "--nproc", 2, "processes")
    add_count(parser, "--micro_batch_size", 16, "sequences")
    add_count(parser, "--steps", 10, "counted steps of each run")
    add_count(parser, "--rounds", 3, "counted rounds")


def add_nanogpt_flags(parser: ArgumentParser) -> None:
    """The defaults are nanoGPT's command for a CPU, from its README, with fewer steps."""
    parser.add_argument(
        "--path", type=Path, required=True, metavar="DIR", help="a checkout of nanoGPT"
    )
    dataset = "shakespeare_char"
    parser.add_argument(
        "--dataset", default=dataset, help=f"a folder of its data/ (default: {dataset})"
    )
    add_count(parser, "--n_layer", 4, "layers")
    add_count(parser, "--n_head", 4, "attention heads")
    add_count(parser, "--n_embd", 128, "width")
    add_count(parser, "--block_size", 64, "tokens of a sequence")
    add_count(parser, "--batch_size", 12, "sequences of a step")
    add_count(parser, "--steps", 200, "steps of each run")
    add_count(parser, "--rounds", 3, "counted rounds")


def add_checkpoint_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt2-124m", choices=SIZES, help="(default: gpt2-124m)")
    add_count(parser, "--nproc", 1, "processes")
    add_count(parser, "--rounds", 15, "counted rounds")


def add_count(parser: ArgumentParser, name: str, default: int, what: str) -> None:
    """Add a flag that takes a positive integer."""
    parser.add_argument(
        name, type=positive, default=default, metavar="N", help=f"{what} (default: {default})"
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def restart_under_torchrun(args: Namespace) -> None:
    """Replace this process with torchrun, which starts the same benchmark on --nproc ranks."""
    torchrun = [*TORCHRUN, "--standalone", f"--nproc_per_node={args.nproc}"]
    # torchrun would read --nproc as an abbreviation of its own --nproc_per_node
    options = [f"--model={args.model}", f"--rounds={args.rounds}", *["--json"] * args.json]
    os.execv(sys.executable, [*torchrun, "-m", "tools.bench", args.table, *options])


def report(benchmark: Callable[[Namespace], Table], args: Namespace) -> None:
    """Run a benchmark and print its table, or its numbers with --json."""
    try:
        table = benchmark(args)
    except RunFailed as error:
        print(error.output, file=sys.stderr)
        raise
    if torch.distributed.is_initialized():
        dist.stop()
    if int(os.environ.get("RANK", 0)) != 0:
        return
    version = torch.__version__
    if args.json:
        head = {"table": args.table, "subject": table.subject, "torch": version}
        print(json.dumps(head | {"rows": table.rows}))
    else:
        print(f"{args.table}: {table.subject}, torch {version}; median (smallest ... largest)\n")
        cells = [[cell(value) for value in row.values()] for row in table.rows]
        print(markdown_table(list(table.rows[0]), cells))


def cell(value) -> str:
    """Measurements as "median (smallest ... largest)"; everything else as text."""
    if not isinstance(value, list):
        return str(value)
    median = three_digits(statistics.median(value))
    if len(value) == 1:
        return median
    return f"{median} ({three_digits(min(value))} ... {three_digits(max(value))})"


def three_digits(number: float) -> str:
    """Three significant digits; 100 and more as whole numbers."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def bench(argv: list[str]) -> None:
    args = parse(argv)
    if args.table == "checkpoint" and args.nproc > 1 and "RANK" not in os.environ:
        restart_under_torchrun(args)
    report(TABLES[args.table], args)


def main(argv: list[str]) -> int:
    return cli.run("tools.bench", lambda: bench(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
