"""Run a benchmark. Each one prints a table in Markdown, or with --json its numbers.

python -m tools.bench strategies --nproc 2
python -m tools.bench strategies --hosts 2 --link 200mbit
python -m tools.bench peers --path ~/nanoGPT
"""

import contextlib
import importlib.util
import inspect
import json
import re
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import errors
from log import read_starts
from model import SIZES
from tools.measuring.harness import (
    PRODUCTS,
    TRAIN,
    TRANSFORMERS_TRAINER,
    run_all,
    training_rows,
)
from tools.measuring.hosts import hosts, torchrun
from tools.measuring.tables import add_flags, count, markdown_table, three_digits

# Flags of a run that only trains and logs every step
ONLY_STEPS = [
    *("--log_interval=1", "--eval_interval=0", "--eval_sequences=1"),
    *("--sample_tokens=0", "--checkpoint=none"),
]
STRATEGIES = {
    "single": "--strategy single",
    "ddp": "--strategy ddp",
    "fsdp": "--strategy fsdp",
    "SHARD_GRAD_OP": "--strategy fsdp --reshard_after_forward false",
    "hsdp": "--strategy hsdp",
}
# Defaults. Across hosts, 2.4 million parameters make the network matter in a step of seconds.
ONE_HOST = dict(model="tiny", micro_batch_size=16, steps=10, rounds=3)
ACROSS_HOSTS = dict(model="tiny --d_model 192 --d_ff 768 --seq_len 64", micro_batch_size=1)
ACROSS_HOSTS |= dict(steps=3, rounds=1, device="cpu")
GRAD_ACCUM_STEPS = 8  # across hosts
# nanoGPT's size flags. The defaults are the CPU command in its README, with fewer steps.
NANOGPT = dict(n_layer=4, n_head=4, n_embd=128, block_size=64, batch_size=12)


def take_turns(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Yield what to measure next (A B A B), so that load on the machine slows all equally."""
    for turn in range(1, rounds + 1):
        for name in names:
            print(f"round {turn}: {name} ...", file=sys.stderr, flush=True)
            yield name


def compare_rounds(found: dict[str, list[tuple]], baseline: str, unit: str) -> dict[str, dict]:
    """Return name -> columns, from (tokens/s, tokens/s of matrix products alone) of each round."""
    rows = {}
    of_baseline = [speed for speed, _ in found[baseline]]
    for name, rounds in found.items():
        speeds = [speed for speed, _ in rounds]
        rows[name] = {
            unit: speeds,
            "limit": [limit for _, limit in rounds],
            "of the limit": [speed / limit for speed, limit in rounds],
            f"ratio to {baseline}": [a / b for a, b in zip(speeds, of_baseline)],
        }
    return rows


def products_limit(printed: list[str], tokens: int) -> float:
    """Tokens/s/device if a micro-batch of `tokens` took only the time of its matrix products."""
    seconds = re.findall(r"matrix products of a micro-batch: (\S+) s", "".join(printed))
    return tokens / statistics.median(map(float, seconds))  # over all ranks


# --------------------------------------------------------------------------------------------------
# Strategies


def strategies(args: Namespace) -> list[dict]:
    """Speed of each strategy on one host, or across several.

    --hosts puts the ranks into network namespaces of this machine, on CPUs, connected by --link.
    A step then has eight micro-batches, and a second row of each strategy averages gradients after
    each of them. This is slow with fsdp, because gloo's reduce_scatter sends as much as an
    all_reduce, twice as much as nccl's. hsdp has two replicas, or one on each host.

    The limit is the speed of the matrix products alone, without attention's, in the same process.
    """
    runs = flags_of_runs(args)
    found = {name: [] for name in runs}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        namespaces = []
        if args.hosts > 1:
            namespaces = stack.enter_context(hosts(args.hosts, args.link))
        for number, name in enumerate(take_turns(runs, args.rounds)):
            nproc = 1 if name == "single" else args.nproc
            out = folder / str(number)
            found[name].append(measure(runs[name], nproc, out, args.steps, namespaces))

    baseline, *_ = found
    columns = compare_rounds(found, baseline, "tokens/s/device")
    return [{"strategy": name, **columns[name]} for name in runs]


def flags_of_runs(args: Namespace) -> dict[str, str]:
    """The flags of train.py for each row of the table. Raises UsageError if no row is left."""
    runs = {}
    for name in args.only or STRATEGIES:
        flags = f"--model {args.model} --micro_batch_size {args.micro_batch_size} "
        flags += f"--device {args.device} {STRATEGIES[name]}"
        processes = 1 if name == "single" else args.hosts * args.nproc
        sequences = args.micro_batch_size * processes
        if "hsdp" in flags:
            replicas = max(2, args.hosts)
            flags += f" --dp_replicate {replicas}"
            if processes % replicas:
                continue
        if args.hosts == 1:
            runs[name] = f"{flags} --global_batch_size {sequences} {args.flags}"
        elif name != "single":
            flags += f" --global_batch_size {GRAD_ACCUM_STEPS * sequences} {args.flags}"
            runs |= {name: flags, f"{name}, micro_batch": f"{flags} --grad_sync micro_batch"}
    if not runs:
        raise errors.UsageError("no strategy is left: hsdp needs an even --nproc, single --hosts 1")
    return runs


def measure(
    flags: str, nproc: int, out: Path, steps: int, namespaces: list[str]
) -> tuple[float, float]:
    """Run train.py; return the median tokens/s/device of `steps` steps, and their limit.

    The first two steps, which set up buffers and time products, do not count. Raises RunError.
    """
    script = [PRODUCTS, TRAIN, *ONLY_STEPS]
    script += [f"--max_steps={2 + steps}", f"--out={out}", *flags.split()]
    commands = torchrun(namespaces, nproc, script)
    # torchrun leaves folders in TMPDIR.
    printed = run_all(commands, out, OMP_NUM_THREADS="1", TMPDIR=str(out.parent))
    config = read_starts(out)[-1]["config"]
    rows = training_rows(out)
    tokens = rows[0]["tokens"] * config["micro_batch_size"] // config["global_batch_size"]
    limit = products_limit(printed, tokens)
    speeds = [row["tokens_per_second_per_device"] for row in rows[2:]]
    return statistics.median(speeds), limit


# --------------------------------------------------------------------------------------------------
# Other trainers


def peers(args: Namespace) -> list[dict]:
    """Speed and memory of nanoGPT, of transformers' Trainer and of this trainer, with equal models.

    All use the same data, layers, width, heads and tokens per step. SwiGLU's d_ff is 8/3 of the
    width, rounded to a multiple of 8, so that nanoGPT's blocks have as many parameters. Ranks of
    ddp and fsdp split the batch, and have one thread each on CPUs. On CPUs nanoGPT computes in
    float32. Ratios are relative to the faster of nanoGPT's two modes, limits are as in
    `strategies`, and memory is that of the largest process. Needs a checkout of
    github.com/karpathy/nanoGPT with a prepared data set. transformers' rows need accelerate too.
    """
    dataset = args.path / "data" / args.dataset
    if not (dataset / "train.bin").exists():
        raise errors.UsageError(
            f"--path {args.path}: no nanoGPT with data/{args.dataset}/train.bin there: "
            "clone nanoGPT and run its prepare.py"
        )
    modes = [mode for mode in MODES if is_possible(mode, args)]
    found, memory = {}, {}
    for mode in take_turns(modes, args.rounds):
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            out = Path(folder, "run")
            speeds, printed = MODES[mode](args, out, mode)
        limit = products_limit(printed, args.batch_size * args.block_size)
        speed = statistics.median(speeds[max(2, len(speeds) // 5) :])
        found.setdefault(mode, []).append((speed, limit))
        memory.setdefault(mode, []).append(peak_memory(printed) / 1e6)

    nanogpts = ("nanoGPT", "nanoGPT compiled")
    baseline = max(nanogpts, key=lambda mode: statistics.median(speed for speed, _ in found[mode]))
    columns = compare_rounds(found, baseline, "tokens/s")
    return [{"trainer": mode, **columns[mode], "MB": memory[mode]} for mode in modes]


def is_possible(mode: str, args: Namespace) -> bool:
    """Whether a row has enough processes and its library."""
    needs_ranks = "ddp" in mode or "fsdp" in mode
    is_installed = all(map(importlib.util.find_spec, ("transformers", "accelerate")))
    return (args.nproc > 1 or not needs_ranks) and (is_installed or "Trainer" not in mode)


def peak_memory(printed: list[str]) -> int:
    """Bytes of the largest process."""
    return max(map(int, re.findall(r"peak memory of this process: (\d+)", "".join(printed))))


def speeds_of_steps(printed: list[str], args: Namespace) -> list[float]:
    """Tokens/s of each step, from nanoGPT's lines, like "iter 7: ... time 250.00ms"."""
    times = re.findall(r"iter \d+: .*?time ([\d.]+)ms", "".join(printed))
    tokens = args.batch_size * args.block_size
    return [1e3 * tokens / float(time) for time in times]


def run_script(
    args: Namespace, out: Path, mode: str, script: list[str], cwd: Path | None = None
) -> list[str]:
    """Run a script of a row, with products.py around it; return what each process printed."""
    if "ddp" not in mode and "fsdp" not in mode:
        return run_all([[sys.executable, PRODUCTS, *script]], out, cwd=cwd)
    # torchrun gives each rank one thread, and leaves folders in TMPDIR
    return run_all(torchrun([], args.nproc, [PRODUCTS, *script]), out, TMPDIR=str(out.parent))


def run_nanogpt(args: Namespace, out: Path, mode: str) -> tuple[list[float], list[str]]:
    """Tokens/s of each step, and the output. Its DDP puts each rank on a GPU."""
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    values = {"device": device, "compile": "compiled" in mode, "out": out, "last": args.steps + 1}
    # Never evaluates. The schedule divides by lr_decay_iters - warmup_iters (100).
    flags = (
        "--n_layer={n_layer} --n_head={n_head} --n_embd={n_embd} --block_size={block_size} "
        "--batch_size={batch_size} --max_iters={last} --lr_decay_iters={last} --dropout=0.0 "
        "--eval_interval=1000000000 --eval_iters=1 --log_interval=1 --device={device} "
        "--compile={compile} --dataset={dataset} --out_dir={out}"
    ).format(**vars(args) | values)
    script = ["train.py", "config/train_shakespeare_char.py", *flags.split()]
    printed = run_script(args, out, mode, script, cwd=args.path)
    return speeds_of_steps(printed, args), printed


def run_transformers(args: Namespace, out: Path, mode: str) -> tuple[list[float], list[str]]:
    """Tokens/s of each step, and the output. On CPUs accelerate trains with DDP, never FSDP."""
    dtype = "bfloat16" if "bfloat16" in mode else "float32"
    data = args.path / "data" / args.dataset / "train.bin"
    sizes = [args.n_layer, args.n_head, args.n_embd, d_ff(args), args.block_size, args.batch_size]
    script = [TRANSFORMERS_TRAINER, data, *sizes, args.steps + 1, dtype]
    printed = run_script(args, out, mode, [*map(str, script)])
    return speeds_of_steps(printed, args), printed


def run_nanoshard(args: Namespace, out: Path, mode: str) -> tuple[list[float], list[str]]:
    """Tokens/s of each step over all ranks, and the output."""
    strategy = next((name for name in ("ddp", "fsdp") if name in mode), "single")
    values = {"compile": "compiled" in mode, "last": args.steps + 2, "strategy": strategy}
    values |= {"d_ff": d_ff(args), "dtype": "bfloat16" if "bfloat16" in mode else "float32"}
    flags = (
        "--n_layer={n_layer} --n_head={n_head} --n_kv_head={n_head} --d_model={n_embd} "
        "--d_ff={d_ff} --seq_len={block_size} --global_batch_size={batch_size} --dtype={dtype} "
        "--max_steps={last} --device={device} --strategy={strategy} --compile={compile} {flags}"
    ).format(**vars(args) | values)
    paths = [f"--data={args.path}/data/{args.dataset}", f"--out={out}"]
    printed = run_script(args, out, mode, [TRAIN, *ONLY_STEPS, *paths, *flags.split()])
    return [row["tokens_per_second"] for row in training_rows(out)], printed


def d_ff(args: Namespace) -> int:
    return 8 * round(args.n_embd / 3)


MODES = {
    "nanoGPT": run_nanogpt,
    "nanoGPT compiled": run_nanogpt,
    "nanoshard": run_nanoshard,
    "nanoshard compiled": run_nanoshard,
    "nanoshard bfloat16": run_nanoshard,
    "nanoshard ddp": run_nanoshard,
    "Trainer ddp": run_transformers,
    "nanoshard fsdp": run_nanoshard,
    "nanoshard ddp bfloat16": run_nanoshard,
    "Trainer ddp bfloat16": run_transformers,
}


# --------------------------------------------------------------------------------------------------
# The command line


COMMON = {
    "device": dict(default="auto", choices=("auto", "cpu", "cuda")),
    "flags": dict(default="", help="more flags for our train.py, as one argument"),
    "json": dict(action="store_true", help="print numbers, not a table"),
}
TABLES = {"strategies": strategies, "peers": peers}
# table -> {flag: argparse options}
FLAGS = {
    "strategies": {
        "only": dict(nargs="+", choices=STRATEGIES, help="rows; the first is the baseline"),
        "nproc": count(2, "processes on each host"),
        "hosts": count(1, "hosts; more than one needs Linux, root and iproute2"),
        "link": dict(default="200mbit", metavar="RATE", help="speed per host (default: 200mbit)"),
        "model": dict(choices=SIZES, help="(default: tiny; across hosts, a wider one)"),
        "micro_batch_size": count(None, "sequences (default: 16; across hosts, 1)"),
        "steps": count(None, "measured steps of each run (default: 10; across hosts, 3)"),
        "rounds": count(None, "rounds (default: 3; across hosts, 1)"),
        **COMMON,
    },
    "peers": {
        "path": dict(type=Path, required=True, metavar="DIR", help="a checkout of nanoGPT"),
        "dataset": dict(default="shakespeare_char", help="a folder in its data/"),
        "nproc": count(2, "ranks of the rows of ddp and fsdp; 1 leaves them out"),
        **{name: count(size, "as in nanoGPT") for name, size in NANOGPT.items()},
        "steps": count(200, "steps of each run"),
        "rounds": count(3, "rounds"),
        **COMMON,
    },
}


def parse(argv: list[str]) -> Namespace:
    """Return the flags of a benchmark, each with a value."""
    parser = errors.Parser(prog="tools.bench", description="Measure nanoshard on this machine.")
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, table in TABLES.items():
        text = inspect.getdoc(table)
        parser_of_table = tables.add_parser(name, help=text.splitlines()[0], description=text)
        add_flags(parser_of_table, FLAGS[name])
    args = parser.parse_args(argv)
    if args.table == "strategies":
        for name, default in (ACROSS_HOSTS if args.hosts > 1 else ONE_HOST).items():
            if getattr(args, name) in (None, "auto"):
                setattr(args, name, default)
    return args


def bench(argv: list[str]) -> None:
    """Run a benchmark and print its rows: column -> text or measurements."""
    args = parse(argv)
    rows = TABLES[args.table](args)
    if args.json:
        print(json.dumps({"flags": vars(args), "rows": rows}, default=str))
        return
    flags = ", ".join(f"{name} {value}" for name, value in vars(args).items())
    print(f"{flags}, torch {torch.__version__}; median (smallest ... largest)\n")
    cells = [[cell(value) for value in row.values()] for row in rows]
    print(markdown_table([*rows[0]], cells))


def cell(value) -> str:
    """Format measurements as "median (smallest ... largest)", and the rest as text."""
    if not isinstance(value, list):
        return str(value)
    median = three_digits(statistics.median(value))
    if len(value) == 1:
        return median
    return f"{median} ({three_digits(min(value))} ... {three_digits(max(value))})"


def main(argv: list[str]) -> int:
    return errors.execute("tools.bench", bench, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
