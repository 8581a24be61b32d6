"""Compare a run on a mesh with the same run on one rank; find the first layer that differs.

The limit of a difference is SPREADS times the largest that rounding alone makes, in PERTURBED more
runs on one rank that start with weights moved by an ulp (after TTrace, arXiv 2506.09280).
"""

import contextlib
import math
import statistics
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import dist
import optim
from data import TokenFolder
from tools import common
from tools.common import Origin, Run, State, read_rows
from tools.measuring.tables import three_digits

PERTURBED, SPREADS = 3, 8
COLUMNS = ("loss", "grad_norm")  # of the log
GRADIENTS, WEIGHTS = "gradients", "weights"  # of all parameters
# The least limits: a few perturbed runs may all be close by chance, and a mesh also rounds in other
# places, for example in a sum of squares, or in a tp rank's part of a sum. Correct runs differed by
# up to 2e-6 in float32 (grad_norm), and in bfloat16 by up to 2e-5, 1.1e-3, 0.005 and 0.02.
LEAST = {
    torch.float32: {"loss": 1e-6, "grad_norm": 1e-5, GRADIENTS: 1e-5, WEIGHTS: 1e-5},
    torch.bfloat16: {"loss": 5e-5, "grad_norm": 2.5e-3, GRADIENTS: 1e-2, WEIGHTS: 5e-2},
}


@dataclass
class Check:
    """The findings: printed as a paragraph, or written as an object of the JSON file."""

    figures: dict = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)  # figure -> the most it may be
    problems: list[str] = field(default_factory=list)  # why it failed

    def limit(self, figure: str, value: float, most: float, where: str = "") -> None:
        """Record a figure that must lie between 0 and a finite `most`, which nan never does.

        If it does not, record a problem as well, with `where` at the end.
        """
        self.figures[figure] = value
        self.limits[figure] = most
        if not 0 <= value <= most < math.inf:
            self.problems.append(f"{figure} {value:.3g} is not between 0 and {most:.3g}{where}")

    @property
    def status(self) -> str:
        return "FAIL" if self.problems else "pass"

    def __str__(self) -> str:
        parts = list(self.problems)
        for name, value in self.figures.items():
            parts.append(f"{name} {three_digits(value)}")
        line = f"{self.status}  {', '.join(parts)}"
        return textwrap.fill(line, 100, subsequent_indent=" " * 6, break_on_hyphens=False)


# --------------------------------------------------------------------------------------------------
# A run


@dataclass
class RunLog:
    """What rank 0 of a run logged, and what the layers of all ranks computed."""

    rows: list[dict]  # training rows of metrics.jsonl
    of_parameters: list[dict]  # rows of optim.jsonl
    val_loss: float  # the last
    squares: Counter  # layer -> the sum of its squared outputs in step 1, in the order of forward
    weights: dict[str, Tensor] = field(default_factory=dict)  # in full, if they are compared


def train_watched(
    run: Run,
    origin: Origin,
    source: TokenFolder,
    world: dist.World,
    seed: int | None = None,
) -> RunLog:
    """Train as train.py does. With a `seed`, start from weights that are moved by an ulp.

    The run continues if its folder has a checkpoint, else it starts at `origin`. Raises
    KeyboardInterrupt if a signal stops it.
    """
    dist.on_rank0(partial(Path(run.out).mkdir, parents=True, exist_ok=True))
    _, found = common.find_origin({"out": run.out}, world)
    start = common.open_start(run, found if found.path else origin, source, world)
    squares = Counter()
    with contextlib.redirect_stdout(None):
        state = common.build(run, start.mesh, common.empty_model(run))
        common.load(state, start)
        state.model.eval()  # a fork's dropout would differ from mesh to mesh
        if seed is not None:
            move_by_an_ulp(state.tensors["model"], seed)
        if not run.compile:
            squares = sum_outputs(state)
        if common.train(state, run, start) != 0:
            raise KeyboardInterrupt
    of_all_ranks = sum(dist.on_all_ranks(squares.copy), Counter())
    return RunLog(*dist.on_rank0(read_logs, Path(run.out)), of_all_ranks)


def read_logs(out: Path) -> tuple[list[dict], list[dict], float]:
    """Read a run's training rows, its rows of parameters and its last validation loss."""
    rows = read_rows(out / "metrics.jsonl")
    (*_, val_loss) = [row["val_loss"] for row in rows if "val_loss" in row]
    return [row for row in rows if "loss" in row], read_rows(out / "optim.jsonl"), val_loss


def move_by_an_ulp(weights: dict[str, Tensor], seed: int) -> None:
    """Move each value to the next float32 above or below it, at random."""
    torch.manual_seed(seed)
    for weight in weights.values():
        weight.copy_(torch.nextafter(weight, weight + torch.randn_like(weight)))


def sum_outputs(state: State) -> Counter:
    """Return layer -> sum of its squared outputs on this rank, which the first step fills in."""
    squares = Counter()

    def add(name: str, layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        if state.step == 1 and torch.is_grad_enabled():
            values = optim.local(output.detach()).double()
            squares[name] += values.square().sum().item()

    for name, layer in state.decoder.named_modules():
        if not any(layer.children()) and name != "head":  # which returns the loss
            layer.register_forward_hook(partial(add, name))
    return squares


# --------------------------------------------------------------------------------------------------
# Differences


def relative(expected: float, found: float) -> float:
    """Return the change as a share of `expected`; inf if that is 0 or either is nan."""
    if expected == found:
        return 0.0
    change = (found - expected) / expected if expected else math.inf
    return math.inf if math.isnan(change) else change


def difference(expected: list[dict], found: list[dict], name: str) -> float:
    """The largest relative difference between the rows of two runs."""
    return max(abs(relative(a[name], b[name])) for a, b in zip(expected, found))


def spread(alone: RunLog, perturbed: RunLog) -> dict[str, float]:
    """How far a perturbed run is off, for the columns of the log and for the worst parameters."""
    found = {name: difference(alone.rows, perturbed.rows, name) for name in COLUMNS}
    found[GRADIENTS] = max(gradient_changes(alone, perturbed).values())
    found[WEIGHTS] = max(weight_changes(alone, perturbed).values(), default=0.0)
    return found


def rounding_limits(spreads: Iterable[dict[str, float]], dtype: torch.dtype) -> dict[str, float]:
    """Compute how far a mesh may be from one rank from the spreads of all perturbed runs."""
    limits = dict(LEAST[dtype])
    for found in spreads:
        for name in limits:
            limits[name] = max(limits[name], SPREADS * found[name])
    return limits


def compare(
    check: Check, label: str, expected: list[dict], found: list[dict], limits: dict[str, float]
) -> None:
    """Limit the largest relative differences between the rows of two runs."""
    for name in COLUMNS:
        check.limit(f"{label} {name}", difference(expected, found, name), limits[name])


def check_worst(check: Check, name: str, changes: dict[str, float], limit: float) -> None:
    """Limit the largest of the parameters' changes."""
    worst = max(changes, key=changes.get)
    check.limit(f"one rank's {name}", changes[worst], limit, f": {worst}")


def gradient_changes(expected: RunLog, found: RunLog) -> dict[str, float]:
    """Return how far the norm of each parameter's gradient is off: the median over the steps.

    A gradient with a wrong constant factor does not show in the loss, since AdamW and Muon undo the
    factor, and a small one not in the norm of all gradients. The factor is in every step, so the
    median shows it. Rounding changed single steps by up to 8% in bfloat16, but in both directions,
    and the median by at most 0.15% (20 checks on five meshes, with AdamW and Muon).
    """
    changes = defaultdict(list)
    for a, b in zip(expected.of_parameters, found.of_parameters):
        changes[a["parameter"]].append(relative(a["grad_norm"], b["grad_norm"]))
    return {name: abs(statistics.median(steps)) for name, steps in changes.items()}


def weight_changes(expected: RunLog, found: RunLog) -> dict[str, float]:
    """Return how far each weight is off, as a share of its norm."""
    changes = {}
    for name, weight in expected.weights.items():
        changes[name] = ((found.weights[name] - weight).norm() / weight.norm()).item()
    return changes


def first_difference(expected: Counter, found: Counter, limit: float) -> str:
    """Report the first layer, in the order of the forward pass, whose output differs in step 1."""
    for name, squares in found.items():
        if not abs(squares - expected[name]) <= limit * expected[name]:
            return f"the first output that differs in step 1 is from {name}"
    return f"no output of {len(found)} layers differs in step 1: gradients or the update do"
