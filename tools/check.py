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
from log import read_rows, say
from start import Origin, find_origin, open_data, open_start
from tools import rehearse
from tools.common import named_origin

STEPS, LEAST_STEPS = 20, 4
MICRO_BATCHES = 1000  # about the most on one rank, which computes those of all ranks
GRAD_ACCUM_STEPS = 2  # so that gradient accumulation is checked as well
PERTURBED, SPREADS = 3, 8
# The least limits: a few perturbed runs may all be close by chance, and a mesh also rounds in other
# places, for example in a sum of squares, or in a tp rank's part of a sum. Correct runs differed by
# up to 2e-6 in float32 (grad_norm), and in bfloat16 by up to 2e-5, 1.1e-3 and 0.005.
LEAST = {
    torch.float32: {"loss": 1e-6, "grad_norm": 1e-5, "gradient": 1e-5},
    torch.bfloat16: {"loss": 5e-5, "grad_norm": 2.5e-3, "gradient": 1e-2},
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
    """What a run computed. A row is a dict of its log, with nan where the log has null."""

    rows: list[dict]  # one a step
    val_loss: float  # the last
    of_parameters: list[dict]  # one for each parameter in each measured step


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
    with contextlib.redirect_stdout(None), warnings.catch_warnings(action="ignore"):
        state = train.build(run, start.mesh, train.empty_model(run))
        train.load(state, start)
        state.model.eval()  # a fork's dropout would differ from mesh to mesh
        if seed:
            move_by_an_ulp(state.tensors["model"], seed)
        if train.train(state, run, start) != 0:
            raise KeyboardInterrupt
    return dist.on_rank0(read_numbers, Path(run.out))


def move_by_an_ulp(weights: dict[str, Tensor], seed: int) -> None:
    """Move each value to the next float32 above or below it, at random."""
    torch.manual_seed(seed)
    for weight in weights.values():
        weight.copy_(torch.nextafter(weight, weight + torch.randn_like(weight)))


def read_numbers(out: Path) -> Numbers:
    """Read the log of a run."""
    rows = []
    for row in read_rows(out / "metrics.jsonl") + read_rows(out / "optim.jsonl"):
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    (*_, val_loss) = [row["val_loss"] for row in rows if "val_loss" in row]
    of_parameters = [row for row in rows if "parameter" in row]
    return Numbers([row for row in rows if "loss" in row], val_loss, of_parameters)


# --------------------------------------------------------------------------------------------------
# Figures and their limits


@dataclass(frozen=True)
class Figure:
    """A figure that must lie between 0 and a finite limit, which nan never does."""

    name: str  # with its unit
    value: float
    limit: float
    where: str = ""

    def __str__(self) -> str:
        return f"{self.name:64}{self.value:>10.3g}{self.limit:>12.3g}"

    @property
    def problem(self) -> str | None:
        """What is wrong, in one line."""
        if 0 <= self.value <= self.limit < math.inf:
            return None
        line = f"{self.name} is {self.value:.3g}, but at most {self.limit:.3g} is right"
        return f"{line}: {self.where}" if self.where else line


def relative(expected: float, found: float) -> float:
    """Return the change as a share of `expected`; inf if that is 0 or either is nan."""
    if expected == found:
        return 0.0
    change = (found - expected) / expected if expected else math.nan
    return math.inf if math.isnan(change) else change


def differences(expected: Numbers, found: Numbers) -> dict[str, tuple[float, str]]:
    """Return name -> the largest relative difference between two runs, and where it is.

    Of a parameter's gradient it is the median over the steps. A gradient with a wrong constant
    factor does not show in the loss, since AdamW and Muon undo the factor, and a small one not in
    the norm of all gradients. The factor is in every step, so the median shows it. Rounding changed
    single steps by up to 8% in bfloat16, but in both directions, and the median by at most 0.15%
    (20 checks on five meshes, with AdamW and Muon).
    """
    changes: dict[str, dict[str, float]] = defaultdict(dict)  # name -> where -> change
    for a, b in zip(expected.rows, found.rows, strict=True):
        for name in ("loss", "grad_norm"):
            changes[name][f"step {a['step']}"] = relative(a[name], b[name])
    changes["loss"]["evaluation"] = relative(expected.val_loss, found.val_loss)
    gradients = defaultdict(list)  # parameter -> change in each step
    for a, b in zip(expected.of_parameters, found.of_parameters, strict=True):
        gradients[a["parameter"]].append(relative(a["grad_norm"], b["grad_norm"]))
    for parameter, of_steps in gradients.items():
        changes["gradient"][parameter] = statistics.median(of_steps)
    largest = {}
    for name, by_place in changes.items():
        largest[name] = max((abs(change), where) for where, change in by_place.items())
    return largest


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

    Each parameter needs a gradient in a measured step (not the first, in which a block may not get
    one yet), and an update that is larger than weight decay alone could make it.
    """
    half = len(numbers.rows) // 2
    losses = [row["loss"] for row in numbers.rows]
    decay = 2 * run.lr * run.weight_decay  # twice: weight_norm is from after the update
    rows = numbers.of_parameters
    names = {row["parameter"] for row in rows}
    dead = names - {row["parameter"] for row in rows if row["grad_norm"] > 0}
    updated = {row["parameter"] for row in rows if row["update_norm"] > decay * row["weight_norm"]}
    fading = names - updated
    return [
        Figure("loss, second / first half", sum(losses[-half:]) / sum(losses[:half]), LEARNED),
        Figure("parameters without a gradient", len(dead), 0, min(dead, default="")),
        Figure("parameters that only decay", len(fading), 0, min(fading, default="")),
    ]


def profiled(profile: dict, sent: list[rehearse.Communication]) -> list[Figure]:
    """Return whether a profiled step makes the host wait, and sends what the rehearsal sends.

    Gradients and norms must be summed in float32: in bfloat16 the limits of the gradients are too
    wide to show a sum in bfloat16. Activations, over tp, may be summed in bfloat16.
    """
    extra = Counter()  # bytes
    in_bfloat16 = []
    for row in profile["communicated"]:
        kind = f"{row['kind']} over {row['axis']}"
        extra[kind] += row["bytes"]
        reduces = row["kind"] in ("all_reduce", "reduce_scatter") and row["axis"] != "tp"
        if reduces and "bfloat16" in row["dtypes"]:
            in_bfloat16.append(kind)
    for row in sent:
        extra[f"{row.collective} over {row.axis}"] -= row.bytes
    wrong = [f"{size:+,} of {kind}" for kind, size in extra.items() if size]
    megabytes = sum(row.bytes for row in sent) / 1e6
    beside = f"bytes in a step beside the rehearsed {megabytes:.3g} MB"
    syncs = profile["host_syncs"]
    return [
        Figure("host syncs in a step", sum(syncs.values()), 0, ", ".join(syncs)),
        Figure(beside, sum(map(abs, extra.values())), 0, ", ".join(wrong)),
        Figure("collectives that sum in bfloat16", len(in_bfloat16), 0, ", ".join(in_bfloat16)),
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
    if not all(dist.on_all_ranks(folder.exists)):
        raise errors.UsageError(f"{folder} is not on all hosts: give a shared --out")
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

    Rank 0 trains the first run, and the ranks share the others, each in a group of its own. Then
    all join again.
    """
    store, *_ = dist.find_ranks(world.timeout)
    rehearse.leave_group()
    sent = rehearse.rehearse(run, world.rank).communication
    single = dataclasses.replace(world, rank=0, size=1, local_size=1)
    join_group(single, torch.distributed.HashStore())
    mesh = dict(strategy="single", tp=1, dp_shard=1, grad_sync="batch", compile=False)
    numbers = []
    for seed in range(world.rank, 1 + PERTURBED, world.size):
        flags = vars(run.given) | mesh | {"out": f"{run.out}/alone-{seed}"}
        alone = resolve(flags, single, source, origin)
        numbers.append(train_run(alone, origin, source, single, seed))
    gc.collect()  # a group still referenced keeps its connections
    rehearse.leave_group()
    join_group(world, torch.distributed.PrefixStore("after", store))
    of_ranks = dist.on_all_ranks(numbers.copy)
    seeds = range(1 + PERTURBED)
    return [of_ranks[seed % world.size][seed // world.size] for seed in seeds], sent


def join_group(world: dist.World, store: torch.distributed.Store) -> None:
    """Form the process group of a world, as dist.start does for torchrun's ranks."""
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

    def train_here(name: str, **changes) -> Numbers:
        changed = dataclasses.replace(run, out=str(folder / name), **changes)
        return train_run(changed, origin, source, world)

    with dist.name_lost_rank(world):
        say(f"{steps} steps on {world.size} ranks ...")
        mesh = train_here("mesh", profile=PROFILED)
        say(f"{steps // 2} steps on them, then the others from a checkpoint ...")
        train_here("resumed", keep_last=1, max_steps=steps // 2)
        resumed = train_here("resumed", keep_last=1)
        file = folder / f"mesh/profile/rank_{world.rank}.json"
        of_ranks = dist.on_all_ranks(lambda: profiled(json.loads(file.read_text()), sent))
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
    world = dist.start(given.device, timedelta(seconds=given.timeout))
    run, origin, source = cut_short(flags, world)
    figures = measure(run, origin, source, world)
    # The others wait: when one of them ends with status 1, torchrun ends rank 0.
    status = dist.on_rank0(report, figures, Path(run.out))
    torch.distributed.destroy_process_group()
    return status


def report(figures: list[Figure], folder: Path) -> int:
    """Print the figures and problems, and remove the runs if all is well; return the status."""
    say(f"\n{'figure':64}{'value':>10}{'at most':>12}", *map(str, figures), "")
    problems = [figure.problem for figure in figures if figure.problem]
    if problems:
        runs = f"python -m tools.compare {folder}/alone-0 {folder}/mesh"
        say(f"the first difference: {runs}", *(f"FAIL: {problem}" for problem in problems))
        return 1
    say("pass")
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def main(argv: list[str]) -> int:
    return errors.execute("tools.check", command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
