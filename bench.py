"""Benchmarks: each prints one table in Markdown, or with --json its numbers.

    python bench.py optimizer
    python bench.py checkpoint --nproc 4
"""

import argparse
import ctypes
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import checkpoint
import dist
import optim
from model import SIZES, Transformer


def alternate(work: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each piece of work in turn, A B A B ...: what drifts, drifts for all. One round before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, do in work.items():
            began = time.perf_counter()
            do()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def cell(value) -> str:
    """Text as it is; measurements as median (smallest ... largest)."""
    if not isinstance(value, list):
        return str(value)
    return f"{statistics.median(value):.4g} ({min(value):.4g} ... {max(value):.4g})"


def optimizer(args) -> tuple[list[dict], str]:
    """The optimizer's step, clip by norm, against bare clip_grad_norm_ and AdamW(fused=True).step() on the same model."""
    world = dist.start(args.device)

    def model() -> Transformer:
        with torch.device("meta"):
            net = Transformer(SIZES[args.model])
        dist.materialize(net, world.device, lambda name, tensor: net.init_tensor(name, tensor, 0))
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        return net

    ours, bare = model(), model()
    wrapper = optim.Optimizer(ours.named_parameters(), ours.decays, lambda step: 1e-4)
    wrapper.adamw.zero_grad = lambda: None  # both keep their gradients, to step again
    adamw, loss = torch.optim.AdamW(bare.parameters(), lr=1e-4, fused=True), torch.zeros((), device=world.device)

    def bare_step() -> None:
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        adamw.step()

    seconds = alternate({"bare": bare_step, "nanoshard": lambda: wrapper.step(0, loss)}, args.rounds, world.device)
    ratios = [a / b for a, b in zip(seconds["nanoshard"], seconds["bare"])]
    rows = [{"step": name, "milliseconds": [1e3 * s for s in times], "ratio": [1.0]} for name, times in seconds.items()]
    rows[1]["ratio"] = ratios
    return rows, f"{args.model}, {ours.parameter_count():,} parameters, {args.rounds} rounds, {dist.device_name(world.device)}"


def plain_write(path: Path, size: int) -> None:
    """`size` bytes from one process to disk, as fast as it goes."""
    block = os.urandom(1 << 20) * 16
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def checkpoints(args) -> tuple[list[dict], str]:
    """Saving a model and its AdamW state under fsdp: each form against a plain write of as many bytes, in turn."""
    world = dist.start("cpu")
    mesh = dist.make_mesh(world, (1, world.size))
    with torch.device("meta"):
        net = Transformer(SIZES[args.model])
    init = lambda name, tensor: net.init_tensor(name, tensor, 0)  # noqa: E731
    dist.parallelize(net, [[block] for block in net.blocks], mesh, "fsdp", torch.float32, world.device, init)
    slots = ("model", "exp_avg", "exp_avg_sq")
    state = {slot: {name: p.detach().clone() for name, p in net.named_parameters()} for slot in slots}
    shard = sum(4 * optim.local(tensor).numel() for slot in state.values() for tensor in slot.values())
    folder = Path(dist.on_first_rank(lambda: tempfile.mkdtemp(prefix="bench-", dir=".")))
    forms = {"sharded": ("sharded", False), "sharded, async": ("sharded", True), "full": ("full", False)}
    savers = {name: checkpoint.Saver(folder / name, *form, 0, 0, world.timeout) for name, form in forms.items()}
    extra: dict[str, float] = {}  # the most of all rounds, the first too: it makes the copy that async saves keep
    columns = ("seconds", "blocking seconds", "MB/s", "of plain write")
    rows: dict[str, dict] = {name: {column: [] for column in columns} for name in forms}
    size = 12 * net.parameter_count()
    for turn in range(args.rounds + 1):
        for name, saver in savers.items():
            began = time.perf_counter()
            dist.on_first_rank(lambda: plain_write(folder / "plain", size))
            plain = time.perf_counter() - began
            before = reset_peak()
            saver.save(state, {"step": turn})
            saver.wait()
            (row,) = saver.done()
            dist.on_first_rank(functools.partial(shutil.rmtree, row["path"]))
            peak = torch.tensor([checkpoint.host_memory()["peak"] - before], dtype=torch.float64)
            extra[name] = max(extra.get(name, 0.0), dist.gather(peak).max().item() / shard)
            speed = row["bytes"] / row["seconds"]
            values = (row["seconds"], row["blocking_seconds"], speed / 1e6, speed / (size / plain))
            for column, value in zip(columns, values):
                rows[name][column] += [value] if turn else []  # the first round is not counted
    dist.on_first_rank(lambda: shutil.rmtree(folder))
    subject = f"{args.model}, {size / 1e6:,.0f} MB on {world.size} ranks, shards of {shard / 1e6:,.0f} MB, {args.rounds} rounds"
    return [{"form": name, **rows[name], "peak extra host memory / shard": f"{extra[name]:.3f}"} for name in forms], subject


def reset_peak() -> int:
    """Give free memory back and forget the highest of this process so far; returns what is resident now, in bytes (Linux)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return checkpoint.host_memory()["resident"]


TABLES = {"optimizer": optimizer, "checkpoint": checkpoints}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure nanoshard on this machine.")
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, table in TABLES.items():
        sub = tables.add_parser(name, help=table.__doc__, description=table.__doc__)
        sub.add_argument("--model", default="gpt2-124m", choices=SIZES, help="(default: gpt2-124m)")
        sub.add_argument("--rounds", type=int, default=15, metavar="N", help="counted rounds (default: 15)")
        sub.add_argument("--nproc", type=int, default=1, metavar="N", help="processes (default: 1)")
        sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
        sub.add_argument("--json", action="store_true", help="print numbers instead of the table")
    args = parser.parse_args()
    if args.nproc > 1 and "RANK" not in os.environ:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.nproc), sys.argv[0], args.table]
        # spelled out anew: torchrun would take --nproc for one of its own
        options = [f"--{name}={value}" for name, value in vars(args).items() if name not in ("table", "nproc", "json")]
        os.execv(sys.executable, [sys.executable, *torchrun, *options, *["--json"] * args.json])
    rows, subject = TABLES[args.table](args)
    dist.stop()
    if int(os.environ.get("RANK", 0)):
        return 0
    if args.json:
        print(json.dumps({"table": args.table, "subject": subject, "torch": torch.__version__, "rows": rows}))
        return 0
    print(f"{args.table}: {subject}, torch {torch.__version__}; median (smallest ... largest)\n")
    print(f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(cell, row.values()))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
