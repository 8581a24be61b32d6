"""Benchmarks: each prints one table in Markdown, or with --json its numbers.

    python bench.py optimizer
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

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


TABLES = {"optimizer": optimizer}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure nanoshard on this machine.")
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, table in TABLES.items():
        sub = tables.add_parser(name, help=table.__doc__, description=table.__doc__)
        sub.add_argument("--model", default="gpt2-124m", choices=SIZES, help="(default: gpt2-124m)")
        sub.add_argument("--rounds", type=int, default=15, metavar="N", help="counted rounds (default: 15)")
        sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
        sub.add_argument("--json", action="store_true", help="print numbers instead of the table")
    args = parser.parse_args()
    rows, subject = TABLES[args.table](args)
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
