"""Benchmarks. Each prints one table in Markdown, or with --json its numbers.

python -m tools.bench strategies --nproc 2
python -m tools.bench nanogpt --path ~/nanoGPT
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed

import metrics
from model import SIZES
from runtime import cli
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
    """This machine lacks something the benchmark needs."""

    exit_status = 2


class RunFailed(RuntimeError):
    """A measured run failed; `output` is the end of what it printed."""

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

    speed: float  # tokens/s/device, median
    mfu: float | None  # median; None: device peak unknown
    communicated: str  # MB per rank and step by mesh axis: "dp_shard 4.20, tp 1.05"
    peak_memory: int  # bytes, largest rank; device memory if there is a GPU
    said_memory: float  # bytes, from the line "memory" at the start


def ratios(values: list[float], baseline: list[float]) -> list[float]:
    """Each round's value divided by the same round's baseline."""
    return [value / unit for value, unit in zip(values, baseline)]


def take_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """What to measure next, A B A B, so that load on the machine slows all equally."""
    for turn in range(rounds):
        for name in names:
            print(f"round {turn + 1} of {rounds}: {name} ...", file=sys.stderr, flush=True)
            yield name


def run(flags: str, nproc: int, out: Path, steps: int) -> Measurement:
    """Run train.py once, with `steps` counted steps. Raises RunFailed."""
    last = WARM_UP + steps
    command = [
        *TORCHRUN,
        "--standalone",
        f"--nproc_per_node={nproc}",
        TRAIN,
        *ONLY_STEPS,
        # Two extra steps, which profiling slows: one is traced, the other's bytes are counted
        f"--max_steps={last + 2}",
        f"--profile={last}:{last + 1}",
        f"--out={out}",
        *flags.split(),
    ]
    output = output_of(command, **ONE_THREAD)
    out.with_name(f"{out.name}.txt").write_text(output)
    counted = [row for row in training_rows(out) if WARM_UP < row["step"] <= last]
    mfu = [row["mfu"] for row in counted]
    megabytes = Counter()
    for row in json.loads((out / "profile" / "rank_0.json").read_text())["communicated"]:
        megabytes[row["axis"]] += row["bytes"] / 1e6
    return Measurement(
        speed=statistics.median(row["tokens_per_second_per_device"] for row in counted),
        mfu=None if None in mfu else statistics.median(mfu),
        communicated=", ".join(f"{axis} {n:,.2f}" for axis, n in megabytes.items()) or "none",
        peak_memory=max(row["peak_device_memory"] or row["peak_host_memory"] for row in counted),
        said_memory=said_memory(output),
    )


def said_memory(output: str) -> float:
    """The bytes at the end of the line "memory  a rank at its peak: ... = 2.67 GB"."""
    number, unit = re.search(r"^memory .* = ([\d.,]+) ([MG])B$", output, re.M).groups()
    return float(number.replace(",", "")) * {"M": 1e6, "G": 1e9}[unit]


def training_rows(out: Path) -> list[dict]:
    return [row for row in metrics.read_log(out / "metrics.jsonl") if "loss" in row]


def counted_rows(out: Path) -> list[dict]:
    """The log of every step but the first, which sets up buckets and buffers."""
    return [row for row in training_rows(out) if row["step"] > 1]


def output_of(command: list[str], cwd: Path | None = None, **variables: str) -> str:
    """What a command prints. Raises RunFailed."""
    pipe = subprocess.PIPE
    environment = os.environ | variables
    # Not subprocess.run: on Ctrl-C it kills torchrun before that can end its ranks.
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        printed, errors = process.communicate()
    if process.returncode:
        raise RunFailed(f"{' '.join(command)} failed", errors)
    return printed


class Job:
    """Commands that run at the same time; number i prints to the file `out`-<i>.txt.

    Leaving the `with` block kills those still running, but not what torchrun started.
    """

    def __init__(self, commands: list[list[str]], out: Path, **variables: str):
        self.commands = commands
        self.outputs = [out.with_name(f"{out.name}-{i}.txt") for i in range(len(commands))]
        self.processes = []
        root = {"PYTHONPATH": str(Path(TRAIN).parent)}  # for -m tools....
        for command, output in zip(commands, self.outputs):
            with open(output, "w") as file:
                process = subprocess.Popen(
                    command,
                    env=os.environ | ONE_THREAD | root | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            self.processes.append(process)

    def is_running(self) -> bool:
        """False when all have succeeded. Raises RunFailed as soon as one fails.

        The others might wait for it forever.
        """
        statuses = [process.poll() for process in self.processes]
        for command, output, status in zip(self.commands, self.outputs, statuses):
            if status:
                printed = output.read_text(errors="replace")
                raise RunFailed(f"{' '.join(command)} failed", printed)
        return None in statuses

    def wait(self, until: Callable[[], bool] = lambda: False) -> None:
        """Wait until a condition holds or all have succeeded. Raises RunFailed."""
        while self.is_running() and not until():
            time.sleep(0.01)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def torchrun(nproc: int, flags: list[str], max_steps: int, out: Path) -> Iterator[Job]:
    """train.py under torchrun, ended by SIGTERM after the block.

    SIGKILL would leave its ranks behind.
    """
    run = [f"--nproc_per_node={nproc}", TRAIN, *flags, f"--max_steps={max_steps}", f"--out={out}"]
    with Job([[*TORCHRUN, "--standalone", *run]], out) as job:
        try:
            yield job
        finally:
            job.processes[0].terminate()
            job.processes[0].wait()


def run_all(commands: list[list[str]], out: Path, **variables: str) -> None:
    """Run commands at the same time. Raises RunFailed if one fails."""
    with Job(commands, out, **variables) as job:
        job.wait()


def mfu_alone(prefixes: list[list[str]], flags: list[str], out: Path) -> float:
    """The mean MFU of ranks that train concurrently and send nothing, one per prefix.

    Where ranks share cores, one may take twice the time of another, and each is faster while others
    start or have ended. So it is the work that all have done while all trained, over that time.
    """
    outs = [out.with_name(f"{out.name}-rank-{rank}") for rank in range(len(prefixes))]
    train = [sys.executable, TRAIN, *ONLY_STEPS, *flags]
    run_all([[*prefix, *train, f"--out={one}"] for prefix, one in zip(prefixes, outs)], out)
    runs = [counted_rows(one) for one in outs]
    began = max(rows[0]["time"] for rows in runs)
    ended = min(rows[-1]["time"] for rows in runs)
    counted = [row for rows in runs for row in rows if began < row["time"] <= ended]
    if not counted:  # they did not overlap
        return statistics.median(row["mfu"] for rows in runs for row in rows)
    seconds = (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    return sum(row["mfu"] * row["step_time"] for row in counted) / len(runs) / seconds


def device(args: Namespace) -> str:
    return "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"


def strategies(args: Namespace) -> Table:
    """Speed, communication and memory of every strategy on N processes, against one process.

    hsdp has two replicas. MFU is relative to the data sheet's dense bfloat16 peak, which no
    program reaches; it is empty if the device's peak is unknown. "Memory said" is the estimate
    at the start of the run.
    """
    size = args.micro_batch_size
    common = f"--model {args.model} --device {args.device} --micro_batch_size {size}"
    ways = {"single": "--strategy single", **STRATEGIES}
    ways["hsdp"] += " --dp_replicate 2"
    if args.nproc % 2:
        del ways["hsdp"]
    found: dict[str, list[Measurement]] = {name: [] for name in ways}
    for name in take_turns(ways, args.rounds):
        nproc = 1 if name == "single" else args.nproc
        flags = f"{common} --global_batch_size {size * nproc} {ways[name]} {args.flags}"
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            found[name].append(run(flags, nproc, Path(folder, "run"), args.steps))

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
                "MB communicated a step": measured[0].communicated,
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
# The ranks of a process group, and the links between them

# Slow means more than 1 + SPREADS x the spread of repeated measurements times as long as the faster
# ones, in each of ATTEMPTS measurements.
SPREADS = 4
LEAST_SPREAD = 0.05
ATTEMPTS = 3
REPEATS = 10  # at most; fewer if they take more than two seconds


def exchange(value) -> list:
    """The values of all ranks."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def times(function: Callable[[], object]) -> list[float]:
    """Seconds of repeated calls; all ranks make equally many and start each together."""

    def measure() -> float:
        torch.distributed.barrier()
        began = time.perf_counter()
        function()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    slowest = max(exchange(measure()))  # the first call allocates
    repeats = max(3, min(REPEATS, int(2 / slowest)))
    return [measure() for _ in range(repeats)]


def slow_ones(measure: Callable[[], dict[Hashable, list[float]]]) -> dict[Hashable, float]:
    """Those slow in every attempt, with the ratio of their time to the faster ones'."""
    found = None
    for _ in range(ATTEMPTS):
        seconds = measure()
        best = {name: min(values) for name, values in seconds.items()}
        reference = sorted(best.values())[len(best) // 4]  # one slow host slows many links
        spreads = [statistics.median(values) / min(values) - 1 for values in seconds.values()]
        limit = 1 + SPREADS * max(LEAST_SPREAD, statistics.median(spreads))
        ratios = {name: value / reference for name, value in best.items()}
        found = {name: ratios[name] for name in found or ratios if ratios[name] > limit}
        if not found:
            break
    return found


def neighbours(hosts: int, local_size: int, between: bool) -> list[list[tuple[int, int]]]:
    """Pairs of ranks, in rounds that use each rank at most once.

    Neighbours on a host, or ranks in the same place on hosts that are neighbours on a ring.
    """
    size = hosts * local_size
    rounds: list[list] = [[], [], []]
    for rank in range(size):
        host, place = divmod(rank, local_size)
        if not between and place + 1 < local_size:
            rounds[place % 2].append((rank, rank + 1))
        if between and (hosts > 2 or host + 1 < hosts):
            closes_odd_ring = host == hosts - 1 and hosts % 2 == 1
            number = 2 if closes_odd_ring else host % 2
            rounds[number].append((rank, (rank + local_size) % size))
    return [pairs for pairs in rounds if pairs]


def transfers(
    rounds: list[list[tuple[int, int]]], size: int, device: torch.device
) -> dict[tuple[int, int], list[float]]:
    """Seconds for `size` bytes to reach the other rank of a pair and be answered."""
    payload = torch.zeros(size // 4, device=device)
    answer = torch.zeros(1, device=device)
    local = {}
    for pairs in rounds:
        for turn in (pairs, [(b, a) for a, b in pairs]):
            mine = [pair for pair in turn if torch.distributed.get_rank() in pair]

            def transfer(mine=mine) -> None:
                for sender, receiver in mine:
                    if sender == torch.distributed.get_rank():
                        torch.distributed.send(payload, receiver)
                        torch.distributed.recv(answer, receiver)
                    else:
                        torch.distributed.recv(payload, sender)
                        torch.distributed.send(answer, sender)

            seconds = times(transfer)
            local |= {pair: seconds for pair in mine if pair[0] == torch.distributed.get_rank()}
    return {pair: seconds for found in exchange(local) for pair, seconds in found.items()}


def slow_links(names: list[str], local_size: int, size: int, device: torch.device) -> list[str]:
    """Send `size` bytes; return lines that name slow links, or the end that they all share.

    Links within hosts and links between hosts are judged separately.
    """
    lines = []
    for between, unit in ((False, 1), (True, local_size)):
        rounds = neighbours(len(names) // local_size, local_size, between)
        slow = slow_ones(lambda rounds=rounds: transfers(rounds, size, device)) if rounds else {}
        ends = [{rank // unit for rank in pair} for pair in slow]
        common = set.intersection(*ends) if ends else set()
        if len(common) == 1:
            end = f"{'the host of ' if between else ''}{names[common.pop() * unit]}"
            lines.append(f"slow: all links of {end}, {max(slow.values()):.1f} x as long as others")
            continue
        for (sender, receiver), ratio in slow.items():
            link = f"the link from {names[sender]} to {names[receiver]}"
            lines.append(f"slow: {link}, {ratio:.1f} x as long as others")
    return lines


def collectives(
    size: int, group: torch.distributed.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Bus bandwidth of `size` bytes, as nccl-tests defines it, and latency of four bytes."""
    n = torch.distributed.get_world_size(group)
    part = torch.zeros(max(1, size // 4 // n), device=device)
    full = part.repeat(n)
    calls = {
        "all_gather": lambda: torch.distributed.all_gather_into_tensor(full, part, group=group),
        "reduce_scatter": lambda: torch.distributed.reduce_scatter_tensor(part, full, group=group),
        "all_reduce": lambda: torch.distributed.all_reduce(full, group=group),
    }
    figures = {}
    for kind, call in calls.items():
        seconds = statistics.median(times(call))
        passes = 2 if kind == "all_reduce" else 1
        rate = passes * (n - 1) / n * full.nbytes / seconds
        if size <= 4:
            figures[f"{kind} us"] = seconds * 1e6
        else:
            figures[f"{kind} {size / 1e6:.3g} MB GB/s"] = rate / 1e9
    return figures


# --------------------------------------------------------------------------------------------------
# nanoGPT


def nanogpt(args: Namespace) -> Table:
    """nanoGPT's trainer and this one in turn, each also compiled, with models of the same size.

    Both read the same data, with the same layers, width, heads and tokens per step, and as many
    parameters in their blocks: SwiGLU's d_ff is 8/3 of the width, a multiple of 8. Ratios are to
    the faster of nanoGPT's two modes. Needs a checkout of github.com/karpathy/nanoGPT with a
    prepared data set.
    """
    dataset = args.path / "data" / args.dataset
    if not (args.path / "train.py").exists() or not (dataset / "train.bin").exists():
        raise CannotMeasure(
            f"--path {args.path}: no nanoGPT with data/{args.dataset}/train.bin there: "
            "clone it and run its prepare.py"
        )
    modes = ("nanoGPT", "nanoGPT compiled", "nanoshard", "nanoshard compiled")
    speeds: dict[str, list[float]] = {mode: [] for mode in modes}
    for mode in take_turns(modes, args.rounds):
        name, *compiled = mode.split()
        run_trainer = run_nanogpt if name == "nanoGPT" else run_nanoshard
        with tempfile.TemporaryDirectory(prefix="bench-") as out:
            steps = run_trainer(args, dataset, Path(out), compile=bool(compiled))
        speeds[mode].append(statistics.median(steps[len(steps) // 5 :]))

    baseline = max(speeds["nanoGPT"], speeds["nanoGPT compiled"], key=statistics.median)
    rows = []
    for mode, found in speeds.items():
        rows.append({"trainer": mode, "tokens/s": found, "ratio": ratios(found, baseline)})
    subject = (
        f"{args.n_layer} layers x {args.n_embd}, {args.n_head} heads, block {args.block_size}, "
        f"batch {args.batch_size}, {steps_and_rounds(args)}, {args.dataset} {args.flags}"
    )
    return Table(subject.rstrip(), rows)


def run_nanogpt(args: Namespace, dataset: Path, out: Path, compile: bool) -> list[float]:
    """Tokens/s of each step, from lines like "iter 7: loss 4.2000, time 250.00ms"."""
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "batch_size")
    # Never evaluates. The schedule divides by lr_decay_iters - warmup_iters, here 100.
    flags = (
        f"--max_iters={args.steps} --lr_decay_iters={args.steps + 1} --dropout=0.0 "
        f"--eval_interval={10**9} --eval_iters=1 --log_interval=1 --device={device(args)} "
        f"--compile={compile} --dataset={args.dataset}"
    )
    given = [f"--{name}={getattr(args, name)}" for name in sizes]
    config = "config/train_shakespeare_char.py"
    command = [sys.executable, "train.py", config, *given, *flags.split(), f"--out_dir={out}"]
    times = re.findall(r"time ([\d.]+)ms", output_of(command, cwd=args.path))
    return [args.batch_size * args.block_size / (float(time) / 1e3) for time in times]


def run_nanoshard(args: Namespace, dataset: Path, out: Path, compile: bool) -> list[float]:
    """Tokens/s of each step."""
    # 3 d_model d_ff = 8 d_model^2, the parameters of GPT-2's MLP
    d_ff = 8 * round(args.n_embd / 3)
    flags = (
        f"--n_layer={args.n_layer} --n_head={args.n_head} --n_kv_head={args.n_head} "
        f"--d_model={args.n_embd} --d_ff={d_ff} --seq_len={args.block_size} "
        f"--global_batch_size={args.batch_size} --max_steps={args.steps} --device={device(args)} "
        f"--compile={compile} {args.flags}"
    )
    paths = [f"--data={dataset}", f"--out={out}"]
    output_of([sys.executable, TRAIN, *ONLY_STEPS, *paths, *flags.split()])
    return [row["tokens_per_second"] for row in training_rows(out)]


# --------------------------------------------------------------------------------------------------
# The command line


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def count(default: int, what: str) -> dict:
    """Options of a flag that takes a positive integer."""
    return dict(type=positive, default=default, metavar="N", help=f"{what} (default: {default})")


JSON = dict(action="store_true", help="print numbers, not a table")
COMMON = {
    "rounds": count(3, "counted rounds"),
    "device": dict(default="auto", choices=("auto", "cpu", "cuda")),
    "flags": dict(default="", help="more flags for our train.py, as one argument"),
    "json": JSON,
}
TABLES = {"strategies": strategies, "nanogpt": nanogpt}
# table -> {flag: argparse options}
FLAGS = {
    "strategies": {
        "model": dict(default="tiny", choices=SIZES, help="(default: tiny)"),
        "nproc": count(2, "processes"),
        "micro_batch_size": count(16, "sequences"),
        "steps": count(10, "counted steps of each run"),
        **COMMON,
    },
    # Defaults: the CPU command in nanoGPT's README, with fewer steps
    "nanogpt": {
        "path": dict(type=Path, required=True, metavar="DIR", help="a checkout of nanoGPT"),
        "dataset": dict(
            default="shakespeare_char", help="a folder of its data/ (default: shakespeare_char)"
        ),
        "n_layer": count(4, "layers"),
        "n_head": count(4, "attention heads"),
        "n_embd": count(128, "width"),
        "block_size": count(64, "tokens of a sequence"),
        "batch_size": count(12, "sequences of a step"),
        "steps": count(200, "steps of each run"),
        **COMMON,
    },
}


def parse(argv: list[str]) -> Namespace:
    parser = cli.Parser(prog="tools.bench", description="Measure nanoshard on this machine.")
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, table in TABLES.items():
        summary = table.__doc__.splitlines()[0]
        add_flags(tables.add_parser(name, help=summary, description=table.__doc__), FLAGS[name])
    return parser.parse_args(argv)


def add_flags(parser: ArgumentParser, flags: dict[str, dict]) -> None:
    """Add `flags`, a dict from flag to argparse options."""
    for name, options in flags.items():
        parser.add_argument(f"--{name}", **options)


def report(benchmark: Callable[[Namespace], Table], args: Namespace) -> None:
    """Run a benchmark and print its table, or its numbers with --json."""
    try:
        table = benchmark(args)
    except RunFailed as error:
        print(error.output, file=sys.stderr)
        raise
    version = torch.__version__
    if args.json:
        head = {"table": args.table, "subject": table.subject, "torch": version}
        print(json.dumps(head | {"rows": table.rows}))
    else:
        print(f"{args.table}: {table.subject}, torch {version}; median (smallest ... largest)\n")
        cells = [[cell(value) for value in row.values()] for row in table.rows]
        print(markdown_table(list(table.rows[0]), cells))


def cell(value) -> str:
    """Measurements as "median (smallest ... largest)", the rest as text."""
    if not isinstance(value, list):
        return str(value)
    median = three_digits(statistics.median(value))
    if len(value) == 1:
        return median
    return f"{median} ({three_digits(min(value))} ... {three_digits(max(value))})"


def three_digits(number: float) -> str:
    """Three significant digits, or a whole number from 100 on."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def bench(argv: list[str]) -> None:
    args = parse(argv)
    report(TABLES[args.table], args)


def main(argv: list[str]) -> int:
    return cli.execute("tools.bench", lambda: bench(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
