"""Check that a planned run computes on its ranks what it computes on one, before it begins.

OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 -m tools.check --strategy fsdp
torchrun --nnodes 4 --nproc_per_node 8 ... -m tools.check --model llama3-8b --strategy hsdp

Start it like train.py, with the flags of the planned run. The run is cut to two blocks and at most
20 steps, and trained six times:

    alone      on one rank, and three times more from weights that are moved by an ulp, the distance
               to the next float32: so far apart are runs that differ by rounding alone
    mesh       on all ranks: losses and gradients are those of one rank, within 8 times that
               distance (after TTrace, arXiv 2506.09280); every parameter learns; a step does not
               make the host wait for the device, and sends what tools.plan rehearses
    resumed    on all ranks, stopped and continued halfway: the same numbers, on CPUs bit for bit
"""

import contextlib
import dataclasses
import gc
import json
import math
import shutil
import statistics
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

import config
import dist
import errors
import train
from config import Config, Run
from data import TokenFolder
from log import say
from start import Origin, find_origin, open_data, open_start
from tools import rehearse
from tools.common import named_origin, read_log

STEPS, LEAST_STEPS = 20, 4
MICRO_BATCHES = 1000  # about the most on one rank, which computes those of all ranks
GRAD_ACCUM_STEPS = 2  # so that gradient accumulation is checked as well
PERTURBED, SPREADS = 3, 8
# The least limits: a few perturbed runs may all be close by chance, and a mesh also rounds in other
# places, for example in a sum of squares, or in a tp rank's part of a sum. Correct runs differed by
# up to 2e-6 in float32 (grad_norm), and in bfloat16 by up to 2e-5, 1.1e-3 and 0.005.
LEAST = {
    torch.float32: {"losses": 1e-6, "grad_norms": 1e-5, "gradient": 1e-5},
    torch.bfloat16: {"losses": 5e-5, "grad_norms": 2.5e-3, "gradient": 1e-2},
}
LEARNED = 0.995  # the loss in the second half of the steps, relative to the first half
# Flags of every run, which override those of the planned run. The learning rate is low: at a high
# one, two runs in bfloat16 drift apart within 20 steps. Even steps measure each parameter.
SHORT = (
    "--warmup_steps 10 --schedule constant --lr 1e-3 --min_lr 0 --log_interval 1 "
    "--optim_metrics_interval 2 --eval_interval 0 --eval_sequences 5 --sample_tokens 0 "
    "--save_interval 0 --keep_last 0 --tracker none --eval_only false"
)
PROFILED = "1:2"  # steps to trace; syncs and bytes are counted in the next one, which is odd


# --------------------------------------------------------------------------------------------------
# A run and its numbers


@dataclass(frozen=True)
class Numbers:
    """What a run computed."""

    losses: list[float]  # one a step, then that of the evaluation
    grad_norms: list[float]  # one a step
    parameters: dict[str, list[dict]]  # name -> its rows of optim.jsonl, one a measured step


def train_run(
    run: Run, origin: Origin, source: TokenFolder, world: dist.World, seed: int = 0
) -> Numbers:
    """Train as train.py does. With a `seed`, start from weights that are moved by an ulp.

    The run continues if its folder has a checkpoint, else it starts at `origin`. Raises
    KeyboardInterrupt if a signal stops it.
    """
    dist.on_rank0(partial(Path(run.out).mkdir, parents=True, exist_ok=True))
    _, found = find_origin({"out": run.out}, world)
    start = open_start(run, found if found.path else origin, source, world)
    with contextlib.ExitStack() as held:
        held.enter_context(contextlib.redirect_stdout(None))
        held.enter_context(warnings.catch_warnings(action="ignore"))
        state = train.build(run, start.mesh, train.empty_model(run))
        train.load(state, start)
        state.model.eval()  # a fork's dropout would differ from mesh to mesh
        if seed:
            move_by_an_ulp(state.tensors["model"], seed)
        if train.train(state, run, start, held) != 0:
            raise KeyboardInterrupt
    return dist.on_rank0(read_numbers, Path(run.out))


def move_by_an_ulp(weights: dict[str, Tensor], seed: int) -> None:
    """Move each value to the next float32 above or below it, at random."""
    torch.manual_seed(seed)
    for weight in weights.values():
        weight.copy_(torch.nextafter(weight, weight + torch.randn_like(weight)))


def read_numbers(out: Path) -> Numbers:
    """Read the log of a run."""
    _, rows = read_log(out / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    *_, val_loss = [row["val_loss"] for row in rows if "val_loss" in row]
    grad_norms = [row["grad_norm"] for row in rows if "loss" in row]
    parameters = defaultdict(list)
    _, rows = read_log(out / "optim.jsonl")
    for row in rows:
        parameters[row["parameter"]].append(row)
    return Numbers([*losses, val_loss], grad_norms, parameters)


# --------------------------------------------------------------------------------------------------
# Figures and their limits


@dataclass(frozen=True)
class Figure:
    """A figure that must lie between 0 and a finite limit, which nan never does."""

    name: str  # with its unit
    value: float
    limit: float
    where: str = ""

    @property
    def is_right(self) -> bool:
        return 0 <= self.value <= self.limit < math.inf

    def __str__(self) -> str:
        row = f"{self.name:64}{self.value:>10.3g}{self.limit:>12.3g}"
        return row if self.is_right else f"{row}  FAIL {self.where}"


def relative(expected: float, found: float) -> float:
    """Return the change as a share of `expected`; inf if that is 0 or either is nan."""
    if expected == found:
        return 0.0
    change = (found - expected) / expected if expected else math.nan
    return math.inf if math.isnan(change) else change


def differences(expected: Numbers, found: Numbers) -> dict[str, tuple[float, str]]:
    """Return name -> the largest relative difference between two runs, and in which parameter.

    Of a parameter's gradient it is the median over the steps. A gradient with a wrong constant
    factor does not show in the loss, since AdamW and Muon undo the factor, and a small one not in
    the norm of all gradients. The factor is in every step, so the median shows it. Rounding changed
    single steps by up to 8% in bfloat16, but in both directions, and the median by at most 0.15%
    (20 checks on five meshes, with AdamW and Muon).
    """
    sizes = {}
    for name in ("losses", "grad_norms"):
        pairs = zip(getattr(expected, name), getattr(found, name), strict=True)
        sizes[name] = (max(abs(relative(a, b)) for a, b in pairs), "")
    medians = []
    for parameter, rows in expected.parameters.items():
        pairs = zip(rows, found.parameters[parameter], strict=True)
        changes = [relative(a["grad_norm"], b["grad_norm"]) for a, b in pairs]
        medians.append((abs(statistics.median(changes)), parameter))
    return sizes | {"gradient": max(medians)}


def rounding_limits(runs: list[Numbers], dtype: torch.dtype) -> dict[str, float]:
    """Return name -> how far a mesh may be from one rank, relative; only `runs[0]` is not moved."""
    limits = dict(LEAST[dtype])
    for moved in runs[1:]:
        for name, (size, _) in differences(runs[0], moved).items():
            limits[name] = max(limits[name], SPREADS * size)
    return limits


def compare(whose: str, expected: Numbers, found: Numbers, limits: dict) -> list[Figure]:
    """Return the largest differences between two runs as figures."""
    figures = []
    for name, (size, where) in differences(expected, found).items():
        figures.append(Figure(f"{name}, {whose}, relative", size, limits[name], where))
    return figures


def learning(numbers: Numbers, run: Run) -> list[Figure]:
    """Return whether the loss falls, and each parameter learns: two dead models agree as well.

    Each parameter needs an update that is larger than weight decay alone could make it, in a
    measured step (not the first, in which a block may not get a gradient yet).
    """
    *losses, _ = numbers.losses
    half = len(losses) // 2
    decay = 2 * run.lr * run.weight_decay  # twice: weight_norm is from after the update
    fading = []
    for parameter, rows in numbers.parameters.items():
        if not any(row["update_norm"] > decay * row["weight_norm"] for row in rows):
            fading.append(parameter)
    return [
        Figure("loss, second / first half", sum(losses[-half:]) / sum(losses[:half]), LEARNED),
        Figure("parameters that only decay", len(fading), 0, ", ".join(fading)),
    ]


def profiled(profile: dict, sent: list[rehearse.Communication]) -> list[Figure]:
    """Return whether a profiled step makes the host wait, and sends what the rehearsal sends."""
    extra = Counter()  # bytes
    for row in profile["communicated"]:
        extra[f"{row['kind']} over {row['axis']}"] += row["bytes"]
    for row in sent:
        extra[f"{row.collective} over {row.axis}"] -= row.bytes
    wrong = [f"{size:+,} of {kind}" for kind, size in extra.items() if size]
    size = sum(map(abs, extra.values()))
    syncs = profile["host_syncs"]
    return [
        Figure("host syncs in a step", sum(syncs.values()), 0, ", ".join(syncs)),
        Figure("bytes in a step beside the rehearsed", size, 0, ", ".join(wrong)),
    ]


# --------------------------------------------------------------------------------------------------
# The check on all ranks


def cut_short(flags: dict, world: dist.World) -> tuple[Run, Origin, TokenFolder]:
    """Return the run of `flags`, cut to two blocks and two micro-batches per rank, and its data.

    Its --out is a new folder. All ranks call it. Raises UsageError.
    """
    parent = Path(flags.get("out") or tempfile.gettempdir()).absolute()
    dist.on_rank0(partial(parent.mkdir, parents=True, exist_ok=True))
    folder = Path(dist.on_rank0(tempfile.mkdtemp, None, "check-", parent))
    source = open_data(flags.get("data", Config.data), world)
    origin = dist.on_rank0(named_origin, flags)
    planned = dist.on_rank0(resolve, flags, world, source, origin)
    per_step = GRAD_ACCUM_STEPS * planned.dp_size  # micro-batches of all ranks
    short = planned.manifest["config"] | {
        "model": planned.given.model,  # resolved, it may be the path of a checkpoint
        "n_layer": min(2, planned.n_layer),
        "global_batch_size": per_step * planned.micro_batch_size,
        "max_steps": min(STEPS, max(LEAST_STEPS, MICRO_BATCHES // per_step)),
        "profile": None,
        "out": str(folder),
    }
    run = dist.on_rank0(resolve, short, world, source, origin)
    return run, origin, source


def resolve(flags: dict, world: dist.World, source: TokenFolder, origin: Origin) -> Run:
    """Return the run of `flags`, with the model of the origin's checkpoint, if any."""
    return config.resolve(Config(**flags), world, source, origin.model_config)


def train_alone(
    run: Run, origin: Origin, source: TokenFolder, world: dist.World
) -> tuple[list[Numbers], list[rehearse.Communication]]:
    """Train on one rank, and PERTURBED times from moved weights; rehearse a step of this rank.

    The ranks share these runs, each in a group of its own. Then all join again.
    """
    store, *_ = dist.find_ranks(world.timeout)
    rehearse.leave_group()
    sent = rehearse.rehearse(run, world.rank).communication
    single = dataclasses.replace(world, rank=0, size=1, local_size=1)
    join_group(single, torch.distributed.HashStore())
    mesh = dict(strategy="single", tp=1, dp_shard=1, grad_sync="batch", compile=False)
    folders = [Path(run.out, f"alone-{seed}") for seed in range(1 + PERTURBED)]
    for seed in range(world.rank, len(folders), world.size):
        flags = vars(run.given) | mesh | {"out": str(folders[seed])}
        alone = resolve(flags, single, source, origin)
        train_run(alone, origin, source, single, seed)
    gc.collect()  # a group still referenced keeps its connections
    rehearse.leave_group()
    join_group(world, torch.distributed.PrefixStore("after", store))
    return [dist.on_rank0(read_numbers, folder) for folder in folders], sent


def join_group(world: dist.World, store: torch.distributed.Store) -> None:
    """Form the process group of a world, as dist.join does for torchrun's ranks."""
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=world.timeout,
    )


def measure(run: Run, origin: Origin, source: TokenFolder, world: dist.World) -> list[Figure]:
    """Train all runs; return their figures, and of the profiled step those of the worst rank."""
    folder, steps = Path(run.out), run.max_steps
    say(f"{steps} steps on one rank, and {PERTURBED} times more from weights moved by an ulp ...")
    alone, sent = train_alone(run, origin, source, world)
    limits = rounding_limits(alone, run.compute_dtype)
    with dist.name_lost_rank(world):
        say(f"{steps} steps on {world.size} ranks ...")
        once = dataclasses.replace(run, out=str(folder / "mesh"), profile=PROFILED)
        mesh = train_run(once, origin, source, world)
        file = folder / f"mesh/profile/rank_{world.rank}.json"
        of_ranks = dist.on_all_ranks(lambda: profiled(json.loads(file.read_text()), sent))
        say(f"{steps // 2} steps on them, then the others from a checkpoint ...")
        twice = dataclasses.replace(run, out=str(folder / "resumed"), keep_last=1)
        train_run(dataclasses.replace(twice, max_steps=steps // 2), origin, source, world)
        resumed = train_run(twice, origin, source, world)
    # Equal bit for bit on CPUs. On GPUs attention's backward is not deterministic.
    exact = dict.fromkeys(limits, 0.0) if world.device.type == "cpu" else limits
    return [
        *compare("mesh and one rank", alone[0], mesh, limits),
        *compare("resumed and not", mesh, resumed, exact),
        *(max(figures, key=lambda figure: figure.value) for figures in zip(*of_ranks)),
        *learning(mesh, run),
    ]


# --------------------------------------------------------------------------------------------------
# The command


def command(argv: list[str]) -> int:
    """Check the planned run on all ranks; return the exit status, 1 if a figure is wrong."""
    parser = config.build_parser()
    parser.prog, parser.usage = "tools.check", "torchrun ... -m tools.check [--FLAG VALUE ...]"
    parser.description = __doc__
    flags = config.parse([*argv, *SHORT.split()], parser)
    given = Config(**flags)
    world = dist.join(given.device, timedelta(seconds=given.timeout))
    run, origin, source = cut_short(flags, world)
    figures = measure(run, origin, source, world)
    # The others wait: when one of them ends with status 1, torchrun ends rank 0.
    status = dist.on_rank0(report, figures, Path(run.out))
    torch.distributed.destroy_process_group()
    return status


def report(figures: list[Figure], folder: Path) -> int:
    """Print the figures, and remove the runs if all are right; return the status."""
    say(f"\n{'figure':64}{'value':>10}{'at most':>12}", *map(str, figures), "")
    if not all(figure.is_right for figure in figures):
        say(f"fail; the first difference: python -m tools.compare {folder}/alone-0 {folder}/mesh")
        return 1
    say("pass")
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def main(argv: list[str]) -> int:
    return errors.execute("tools.check", command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
