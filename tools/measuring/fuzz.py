"""tools.check --fuzz: draw random configurations, and compare each with its model on one rank.

The bugs of a distributed trainer hide where two features meet. A draw has a model of 25,000
weights, a mesh of 1 to 4 ranks, policies, and perhaps a second mesh on which the run continues
halfway. It needs no GPU and no data: processes on this machine play the ranks.
"""

import argparse
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import random
import shutil
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path

import torch

import checkpoint
import dist
import prepare
from errors import UsageError
from model import ModelConfig
from prepare import plural
from tools import common
from tools.common import Origin, Run, read_full
from tools.measuring import parity
from tools.measuring.parity import GRADIENTS, PERTURBED, WEIGHTS, Check, RunLog
from tools.planning.rehearse import leave_group

RANKS = 4
STEPS = 6
TIMEOUT = timedelta(seconds=30)  # of a collective that another rank never joins
# Flags of every draw. Ranks get unequal shares of the 10 sequences of an evaluation. The limits of
# clipping are below the norms that occur (0.4 in all steps, or 1 x a parameter's average).
FLAGS = (
    f"--global_batch_size 24 --max_steps {STEPS} --warmup_steps 2 --schedule constant --lr 1e-3 "
    "--max_grad_norm 0.2 --max_grad_norm_ratio 0.9 --log_interval 1 --optim_metrics_interval 1 "
    "--eval_interval 0 --eval_sequences 10 --save_interval 0 --sample_tokens 0 --device cpu"
)
SIZES = dict(n_layer=3, n_head=4, d_model=32, d_ff=64, seq_len=16)
# Kind -> meshes: strategy, dp_replicate, dp_shard and tp. The consecutive draws of a model, which
# share its runs on one rank, are on one mesh of each kind.
MESHES = {
    "replicas": ["single-1-1-1", "ddp-2-1-1", "ddp-3-1-1", "ddp-4-1-1"],
    "fsdp": ["fsdp-1-2-1", "fsdp-1-3-1", "fsdp-1-4-1"],
    "hsdp": [
        *("hsdp-2-2-1", "hsdp-2-1-1", "hsdp-3-1-1", "hsdp-4-1-1"),
        *("hsdp-1-2-1", "hsdp-1-3-1", "hsdp-1-4-1"),
    ],
    "tp": ["single-1-1-2", "single-1-1-4", "ddp-2-1-2", "hsdp-2-1-2"],
    "fsdp x tp": ["fsdp-1-2-2", "hsdp-1-2-2"],
}
ALL_MESHES = [mesh for meshes in MESHES.values() for mesh in meshes]

# Name -> choices, the simplest first. A draw has one choice for each name. The choices in MODEL
# change the numbers of a run; the other choices must not.
MODEL = {
    "n_kv_head": [4, 2, 1],
    "tied": [True, False],
    "vocab_size": [320, 258],  # 3 and 4 ranks cannot split 258 evenly
    "optimizer": ["adamw", "muon"],
    "clip": ["norm", "adaptive"],
    "dtype": ["float32", "bfloat16"],
}
CHOICES = MODEL | {
    "then": ["nothing", *ALL_MESHES],  # the mesh on which the run continues halfway
    "mesh": ALL_MESHES,
    "grad_accum_steps": [1, 2, 3],
    "wrap": ["none", "block", "block_group:2"],
    "grad_sync": ["batch", "micro_batch", "shard"],
    "reshard_after_forward": [True, False],
    "activation_checkpointing": ["none", "selective", "full"],
    "loss_chunks": [1, 2],
    "async_save": [False, True],
}
SIMPLEST = {name: choices[0] for name, choices in CHOICES.items()}


# --------------------------------------------------------------------------------------------------
# Processes that play the ranks of one mesh after another


def prepare_process() -> None:
    torch.set_num_threads(1)  # the ranks share the cores
    warnings.simplefilter("ignore")
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process if its parent is killed, since then the parent's queue never closes."""
    multiprocessing.parent_process().join()
    os._exit(1)


def call_as_rank(rank: int, size: int, port: int, function: Callable, *arguments):
    """Call a function with the environment variables of a rank."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"WORLD_SIZE": f"{size}", "LOCAL_WORLD_SIZE": f"{size}", "MASTER_PORT": f"{port}"}
    os.environ["TORCHELASTIC_RUN_ID"] = "fuzz"
    return function(*arguments)


class RankPool:
    """pool(n, function, *arguments) returns what n ranks return from calling `function` together.

    Raises what one of them raised. No process plays two ranks, since `function` waits for all.
    """

    def __init__(self):
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imports torch once for all processes
        self.executor = ProcessPoolExecutor(RANKS, context, prepare_process)

    def __call__(self, size: int, function: Callable, *arguments) -> list:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        call = functools.partial(self.executor.submit, call_as_rank)
        futures = [call(rank, size, port, function, *arguments) for rank in range(size)]
        wait(futures)
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool:  # a process has died
            self.start()
            raise


def train_on_mesh(run: Run, data_path: str) -> RunLog:
    return train_in(dist.start("cpu", TIMEOUT), run, data_path)


def train_alone(run: Run, data_path: str) -> RunLog:
    """Train on this rank alone; all ranks but the first start from weights moved by an ulp."""
    rank = int(os.environ["RANK"])
    world = common.fake_world(1)
    common.join_group(world, torch.distributed.HashStore())
    run = dataclasses.replace(run, out=f"{run.out}-{rank}")
    return train_in(world, run, data_path, seed=rank or None)


def train_in(world: dist.World, run: Run, data_path: str, seed: int | None = None) -> RunLog:
    try:
        source = common.open_source(data_path)
        return parity.train_watched(run, Origin(), source, world, seed)
    finally:
        leave_group()


# --------------------------------------------------------------------------------------------------
# A draw


class Fuzzer:
    """Trains draws in the folder `root`; `on_ranks` is a RankPool."""

    def __init__(self, on_ranks: Callable, root: Path):
        self.on_ranks = on_ranks
        self.root = root
        self.data_path = str(root / "tokens")
        write_tokens(root)
        self.source = common.open_source(self.data_path)
        self.flags = common.parse_flags(FLAGS.split())
        self.reference = functools.cache(self.train_reference)
        self.count = 0  # runs so far

    def resolve(self, draw: dict, mesh: str) -> Run:
        """Return a draw's run on a mesh. Raises UsageError and MeshError."""
        strategy, *shape = mesh.split("-")
        dp_replicate, dp_shard, tp = map(int, shape)
        dp_size = dp_replicate * dp_shard
        sequences = self.flags["global_batch_size"] // dp_size  # of a rank
        flags = self.flags | {
            **common.known_flags(draw),
            "micro_batch_size": max(1, sequences // draw["grad_accum_steps"]),
            "strategy": strategy,
            "dp_shard": dp_shard if strategy == "hsdp" else None,
            "tp": tp,
            "out": str(self.root / f"run-{self.count}"),
        }
        sizes = {name: draw[name] for name in ("n_kv_head", "tied", "vocab_size")}
        model_config = ModelConfig(**SIZES, **sizes)
        return common.resolve(flags, common.fake_world(dp_size * tp), self.source, model_config)

    def is_possible(self, draw: dict) -> bool:
        """Whether the draw's meshes fit its model and its batch."""
        try:
            runs = [self.resolve(draw, mesh) for mesh in meshes_of(draw)]
        except (UsageError, dist.MeshError):
            return False
        # The other sizes can be split over up to four ranks of a tp group.
        return not any(draw[name] % run.tp for run in runs for name in ("n_kv_head", "vocab_size"))

    def train_reference(self, *model: tuple) -> tuple[RunLog, dict[str, float]]:
        """Train a model on one rank; return its log, and how far a mesh may be from it.

        PERTURBED other ranks train it as well, each alone and from weights moved by an ulp.
        """
        self.count += 1
        run = self.resolve(SIMPLEST | dict(model), SIMPLEST["mesh"])
        logs = []
        found = self.on_ranks(1 + PERTURBED, train_alone, run, self.data_path)
        for rank, log in enumerate(found):
            logs.append(with_weights(log, f"{run.out}-{rank}"))
        alone, *perturbed = logs
        spreads = [parity.spread(alone, log) for log in perturbed]
        return alone, parity.rounding_limits(spreads, run.compute_dtype)

    def train(self, draw: dict) -> RunLog:
        """Train a draw on its one or two meshes."""
        self.count += 1
        meshes = meshes_of(draw)
        squares = None
        for part, mesh in enumerate(meshes, start=1):
            run = self.resolve(draw, mesh)
            run = dataclasses.replace(run, max_steps=STEPS * part // len(meshes))
            log, *_ = self.on_ranks(run.dp_size * run.tp, train_on_mesh, run, self.data_path)
            squares = squares or log.squares  # of step 1
        log = dataclasses.replace(with_weights(log, run.out), squares=squares)
        shutil.rmtree(run.out)
        return log

    def try_draw(self, draw: dict) -> Check:
        """Train a draw, and compare it with its model on one rank."""
        check = Check()
        try:
            alone, limits = self.reference(*((name, draw[name]) for name in MODEL))
            mesh = self.train(draw)
        except Exception as error:  # a fault may raise anything, on any rank
            check.problems.append(f"{type(error).__name__}: {error}".splitlines()[0])
            return check
        parity.compare(check, "one rank's", alone.rows, mesh.rows, limits)
        change = abs(parity.relative(alone.val_loss, mesh.val_loss))
        check.limit("one rank's val_loss", change, limits["loss"])
        gradients = parity.gradient_changes(alone, mesh)
        parity.check_worst(check, GRADIENTS, gradients, limits[GRADIENTS])
        weights = parity.weight_changes(alone, mesh)
        parity.check_worst(check, WEIGHTS, weights, limits[WEIGHTS])
        if check.problems:
            line = parity.first_difference(alone.squares, mesh.squares, limits["loss"])
            check.problems.append(line)
        return check

    def draws(self, count: int, seed: int) -> Iterator[dict]:
        """Yield possible draws, the same for the same seed."""
        generator = random.Random(seed)
        models = draw_models(generator)
        kinds = []
        for _ in range(count):
            if not kinds:
                model = next(models)
                kinds = generator.sample(list(MESHES), len(MESHES))
            meshes = self.possible_meshes(model, MESHES[kinds.pop()])
            draw = None
            while draw is None or not self.is_possible(draw):
                draw = {name: generator.choice(choices) for name, choices in CHOICES.items()}
                draw |= model | {"mesh": generator.choice(meshes)}
            yield draw

    def possible_meshes(self, model: dict, meshes: list[str]) -> list[str]:
        """Return the meshes that fit a model, or if none of them does, all that fit it."""

        def fits(mesh: str) -> bool:
            return self.is_possible(SIMPLEST | model | {"mesh": mesh})

        return [*filter(fits, meshes)] or [*filter(fits, ALL_MESHES)]

    def shrink(self, draw: dict) -> dict:
        """Replace choices by simpler ones, one by one, as long as the draw fails."""
        before = None
        while draw != before:
            before = draw
            for name in CHOICES:
                for candidate in simpler(draw, name):
                    if self.is_possible(candidate) and self.try_draw(candidate).problems:
                        draw = candidate
                        break
        return draw


def draw_models(generator: random.Random) -> Iterator[dict]:
    """Yield the choices in MODEL, in groups of three models.

    Two are in float32, which shows small faults: with AdamW, which shows a wrong average of
    adaptive clipping, and with Muon. The third may have any choices. tp can split two of them.
    """
    while True:
        group = [
            {"optimizer": "adamw", "dtype": "float32", "clip": "adaptive"},
            {"optimizer": "muon", "dtype": "float32", "clip": "norm"},
            {},
        ]
        heads = generator.sample(MODEL["n_kv_head"], len(group))  # tp cannot split one head
        for chosen, n_kv_head in zip(generator.sample(group, len(group)), heads):
            model = {name: generator.choice(choices) for name, choices in MODEL.items()}
            yield model | chosen | {"n_kv_head": n_kv_head}


def simpler(draw: dict, name: str) -> list[dict]:
    """Return the draw with each simpler choice for one name, the simplest first."""
    choices = CHOICES[name]
    found = [draw | {name: choice} for choice in choices[: choices.index(draw[name])]]
    if name == "then" and found:  # also the second mesh alone
        found.insert(1, draw | {"mesh": draw["then"], "then": "nothing"})
    return found


def meshes_of(draw: dict) -> list[str]:
    return [draw["mesh"]] if draw["then"] == "nothing" else [draw["mesh"], draw["then"]]


def with_weights(log: RunLog, out: str) -> RunLog:
    """Return the log with the full weights of the run's last checkpoint."""
    reader = checkpoint.Reader(checkpoint.list_checkpoints(Path(out))[-1])
    names = [name for name in reader.tensors if name.startswith("model.")]
    weights = {name.removeprefix("model."): read_full(reader, name) for name in names}
    return dataclasses.replace(log, weights=weights)


def write_tokens(root: Path) -> None:
    """Prepare 40 documents of random bytes, so that nearly every token occurs."""
    generator = random.Random(0)
    (root / "text").mkdir()
    for number in range(40):
        (root / f"text/{number}.txt").write_bytes(generator.randbytes(50).replace(b"\0", b""))
    with contextlib.redirect_stdout(None):
        prepare.prepare([str(root / "text")], root / "tokens", val_fraction=0.2)


# --------------------------------------------------------------------------------------------------
# Output


def describe(draw: dict) -> str:
    """Return the choices that are not the simplest, as --draw accepts them."""
    return " ".join(f"{name}={value}" for name, value in draw.items() if value != SIMPLEST[name])


def parse_draw(text: str) -> dict:
    """Parse the text of --draw, as an argparse type."""
    draw = dict(SIMPLEST)
    for word in text.split():
        name, _, value = word.partition("=")
        choices = {str(choice): choice for choice in CHOICES.get(name, [])}
        if value not in choices:
            where = f"{name} is one of {', '.join(choices)}"
            if not choices:
                where = f"NAME is one of {', '.join(CHOICES)}"
            raise argparse.ArgumentTypeError(f"{word}: give NAME=VALUE, where {where}")
        draw[name] = choices[value]
    return draw


def check_draws(fuzzer: Fuzzer, draws: Iterable[dict]) -> int:
    """Check draws until one fails, and print the smallest that fails; return the status."""
    began = time.perf_counter()
    for number, draw in enumerate(draws, start=1):
        print(f"{number:4}  {describe(draw)}", flush=True)
        if fuzzer.try_draw(draw).problems:
            print(f"draw {number} fails; looking for the smallest draw that fails ...", flush=True)
            smallest = fuzzer.shrink(draw)
            print("\n".join(fuzzer.try_draw(smallest).problems))
            print(f'python -m tools.check --draw "{describe(smallest)}"')
            return 1
    minutes = (time.perf_counter() - began) / 60
    print(f"pass  {plural(number, 'draw')}, {number / minutes:.0f} a minute")
    return 0


def fuzz(count: int, seed: int, draw: dict | None = None) -> int:
    """Check `count` draws, or only `draw`; return the exit status."""
    with common.temporary_folder("fuzz-") as root:
        fuzzer = Fuzzer(RankPool(), root)
        return check_draws(fuzzer, [draw] if draw else fuzzer.draws(count, seed))
