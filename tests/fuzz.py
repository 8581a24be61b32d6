"""Draw small random runs, and compare each with its model on one rank.

    python tests/fuzz.py 90 --seed 0
    python tests/fuzz.py --draw '{"optimizer": "muon", "mesh": "ddp-2-1-2"}'

The bugs of a distributed trainer hide where two features meet. A draw has a model of 25,000
weights, a mesh of 1 to 4 ranks, policies, and perhaps a second mesh on which the run continues
halfway. A draw that fails is shrunk to the simplest one that fails, and its command is printed.
"""

import argparse
import functools
import itertools
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
from rig import Pool, write_tokens

import config
import dist
from start import Origin, open_source
from tools import check
from tools.check import Numbers
from tools.rehearse import fake_world

STEPS = 6
# Ranks get unequal shares of the 10 sequences of an evaluation, and all steps are clipped.
FLAGS = (
    "--n_layer 3 --n_head 4 --d_model 32 --d_ff 64 --seq_len 16 --global_batch_size 24 --lr 1e-3 "
    "--warmup_steps 2 --schedule constant --max_grad_norm 0.2 --max_grad_norm_ratio 0.9 "
    "--log_interval 1 --optim_metrics_interval 1 --eval_interval 0 --eval_sequences 10 "
    "--save_interval 0 --sample_tokens 0 --device cpu"
)
# Strategy, dp_replicate, dp_shard and tp, the simplest first. Three ranks cannot split a weight
# evenly, neither the 320 ids of the vocabulary nor the 32 or 64 rows of other weights.
MESHES = [
    *("single-1-1-1", "ddp-2-1-1", "ddp-3-1-1", "ddp-4-1-1"),
    *("fsdp-1-2-1", "fsdp-1-3-1", "fsdp-1-4-1"),
    *("hsdp-2-1-1", "hsdp-1-2-1", "hsdp-1-3-1", "hsdp-2-2-1"),
    *("single-1-1-2", "ddp-2-1-2", "hsdp-2-1-2", "fsdp-1-2-2", "hsdp-1-2-2"),
]
# Flag -> choices, the simplest first. A draw has one choice for each. Those in MODEL change the
# numbers of a run; the others must not.
MODEL = {
    "n_kv_head": [4, 2],
    "model": ["tiny", "tinyllama-1.1b"],  # FLAGS has all sizes, but the head of "tiny" is tied
    "optimizer": ["adamw", "muon"],
    "clip": ["norm", "adaptive"],
    "dtype": ["float32", "bfloat16"],
}
CHOICES = MODEL | {
    "then": [None, *MESHES],  # the mesh on which the run continues halfway
    "mesh": MESHES,
    "micro_batch_size": [None, 2],
    "wrap": ["none", "block", "block_group:2"],
    "grad_sync": ["batch", "micro_batch", "shard"],
    "reshard_after_forward": [True, False],
    "activation_checkpointing": ["none", "selective", "full"],
    "loss_chunks": [1, 2],
    "async_save": [False, True],
}
SIMPLEST = {name: choices[0] for name, choices in CHOICES.items()}


def draws(seed: int) -> Iterator[dict]:
    """Yield draws, the same for the same seed."""
    generator = random.Random(seed)
    models = [dict(zip(MODEL, choices)) for choices in itertools.product(*MODEL.values())]
    generator.shuffle(models)
    for model in itertools.cycle(models):
        for _ in range(3):  # draws, which share the model's runs on one rank
            draw = {name: generator.choice(choices) for name, choices in CHOICES.items()}
            yield draw | model


def shrink(draw: dict, fails: Callable[[dict], object]) -> dict:
    """Replace choices by simpler ones, one by one, as long as the draw fails."""
    before = None
    while draw != before:
        before = draw
        for name, choices in CHOICES.items():
            simpler = [draw | {name: choice} for choice in choices[: choices.index(draw[name])]]
            draw = next(filter(fails, simpler), draw)
    return draw


def describe(draw: dict) -> str:
    """Return the choices that are not the simplest, as --draw accepts them."""
    return json.dumps({name: draw[name] for name in draw if draw[name] != SIMPLEST[name]})


# --------------------------------------------------------------------------------------------------
# Training on ranks of the tests' pool


def train(flags: dict, is_alone: bool) -> Numbers:
    """Train on all ranks, or on each alone; then all but rank 0 start from moved weights."""
    seed = int(os.environ["RANK"]) if is_alone else 0
    if is_alone:
        world = fake_world(1)
        check.join_group(world, torch.distributed.HashStore())
    else:
        world = dist.join("cpu", timedelta(seconds=30))
    source = open_source(flags["data"])
    run = check.resolve(flags | {"out": f"{flags['out']}-{seed}"}, world, source, Origin())
    return check.train_run(run, Origin(), source, world, seed)


class Fuzzer:
    """Trains draws in folders of `root`."""

    def __init__(self, pool: Pool, root: Path):
        self.pool = pool
        self.root = root
        self.data = write_tokens(root / "tokens")
        self.alone = functools.cache(self.train_alone)

    def problems(self, draw: dict) -> list[str]:
        """Train a draw and, if it is new, its model on one rank; return what differs."""
        try:
            alone, limits = self.alone(tuple((name, draw[name]) for name in MODEL))
            figures = check.compare("mesh and one rank", alone, self.train(draw), limits)
        except AssertionError as error:  # of the pool: a fault may raise anything, on any rank
            return [str(error).strip().splitlines()[-1]]
        return [str(figure) for figure in figures if not figure.is_right]

    def train_alone(self, model: tuple) -> tuple[Numbers, dict[str, float]]:
        """Train a model on one rank, and from moved weights; return its numbers and the limits."""
        draw = SIMPLEST | dict(model)
        runs = self.pool(1 + check.PERTURBED, train, self.flags(draw, draw["mesh"]), True)
        return runs[0], check.rounding_limits(runs, getattr(torch, draw["dtype"]))

    def train(self, draw: dict) -> Numbers:
        """Train a draw on its one or two meshes."""
        out = tempfile.mkdtemp(dir=self.root)
        meshes = [*filter(None, (draw["mesh"], draw["then"]))]
        for part, mesh in enumerate(meshes, start=1):
            part_of_run = {"out": out, "max_steps": STEPS * part // len(meshes)}
            ranks = math.prod(map(int, mesh.split("-")[1:]))
            numbers, *_ = self.pool(ranks, train, self.flags(draw, mesh) | part_of_run, False)
        return numbers

    def flags(self, draw: dict, mesh: str) -> dict:
        """Return the flags of train.py for a draw on a mesh, in a new folder."""
        strategy, _, shard, tp = mesh.split("-")
        flags = config.parse(FLAGS.split())
        flags |= {name: draw[name] for name in draw if name in config.KINDS}
        flags |= {"strategy": strategy, "dp_shard": int(shard) if strategy == "hsdp" else None}
        out = tempfile.mkdtemp(dir=self.root)
        return flags | {"tp": int(tp), "data": str(self.data), "out": out, "max_steps": STEPS}


# --------------------------------------------------------------------------------------------------
# The command


def check_draws(fuzzer: Fuzzer, drawn: Iterable[dict]) -> int:
    """Check draws until one fails, and print the simplest that fails; return the status."""
    for number, draw in enumerate(drawn, start=1):
        print(f"{number:4}  {describe(draw)}", flush=True)
        if fuzzer.problems(draw):
            print("it fails; looking for the simplest draw that fails ...", flush=True)
            smallest = shrink(draw, fuzzer.problems)
            command = f"python tests/fuzz.py --draw '{describe(smallest)}'"
            print(*fuzzer.problems(smallest), command, sep="\n")
            return 1
    print(f"pass: {number} of {number} draws equal one rank up to rounding")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare random small runs with one rank.")
    parser.add_argument("count", type=int, nargs="?", default=90, help="draws (default: 90)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--draw", type=json.loads, help="the only draw, as printed for a failure")
    given = parser.parse_args(argv)
    chosen = itertools.islice(draws(given.seed), given.count)
    drawn = chosen if given.draw is None else [SIMPLEST | given.draw]
    pool = Pool()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as root:
        try:
            return check_draws(Fuzzer(pool, Path(root)), drawn)
        finally:
            pool.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
