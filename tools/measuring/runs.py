"""The log of a run, read for tables and comparisons."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from errors import UsageError
from log import read_rows as read_all_rows

# A parameter's difference counts only if it exceeds GROWTH times all earlier ones. Rounding errors
# grow too: in float32, those above the default tolerance grew 12-fold in a step, 41-fold in ten.
GROWTH = 100

# --------------------------------------------------------------------------------------------------
# The log of a run


@dataclass(frozen=True)
class Log:
    """The log of one run. Times are seconds of training, without evaluations and checkpoints."""

    name: str
    folder: Path
    starts: list[dict]
    training: list[dict]  # training rows, each with its "time" since the start of the run
    val: list[dict]  # evaluations, each with the "time" of its step
    values: dict[str, dict]  # {"loss" or "parameter": {step: {name: {column: value}}}}

    @property
    def config(self) -> dict:
        """The values of all flags at the last start."""
        return self.starts[-1]["config"]

    def final_val_loss(self) -> float | None:
        """Return the last validation loss; None before the first evaluation."""
        return self.val[-1]["val_loss"] if self.val else None

    def best_val_loss(self) -> float | None:
        """Return the lowest finite validation loss."""
        losses = [row["val_loss"] for row in self.val]
        return min(filter(math.isfinite, losses), default=None)

    def loss_at(self, tokens: int) -> float | None:
        """Return the mean of the finite training losses in the last tenth of `tokens` tokens."""
        losses = []
        for row in self.training:
            if 0.9 * tokens < row["tokens"] <= tokens and math.isfinite(row["loss"]):
                losses.append(row["loss"])
        return fmean(losses) if losses else None

    def time_to(self, loss: float) -> float | None:
        """Return the time of the first evaluation that reached `loss`."""
        for row in self.val:
            if row["val_loss"] <= loss:  # not if it is nan
                return row["time"]
        return None

    def parameters(self) -> set[str]:
        """Return the names of the parameters with statistics."""
        names = set()
        for rows in self.values["parameter"].values():
            names |= rows.keys()
        return names

    def ended_loss(self) -> float | None:
        """Return the final validation loss if the run has ended and the loss is finite."""
        for row in self.val:
            if row["step"] == self.config.get("max_steps") and math.isfinite(row["val_loss"]):
                return row["val_loss"]
        return None


def read_all(folders: list[str]) -> list[Log]:
    """Read runs. Their names are those of the folders, or the paths if two folders share a name."""
    names = [Path(folder).resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = folders
    return [read(folder, name) for folder, name in zip(folders, names)]


def read(folder: str, name: str) -> Log:
    """Read a run folder. Raises UsageError if it is not one."""
    run = Path(folder)
    starts = read_starts(run)
    training, val = with_times(read_rows(run / "metrics.jsonl"))
    if not training:
        raise UsageError(f"{folder} has no training row yet: let it run until its first one")
    losses = {}
    for row in training:
        losses[row["step"]] = {"training": {"loss": row["loss"]}}
    for row in val:
        losses[row["step"]]["validation"] = {"loss": row["val_loss"]}
    parameters = {}
    for row in read_rows(run / "optim.jsonl"):
        parameters.setdefault(row.pop("step"), {})[row.pop("parameter")] = row
    values = {"loss": losses, "parameter": parameters}
    return Log(name, run, starts, training, val, values)


def read_starts(run: Path) -> list[dict]:
    """Return the rows of the starts of a run. Raises UsageError if there are none."""
    starts = [row for row in rows_of(run / "metrics.jsonl") if row.get("event") == "start"]
    if not starts:
        raise UsageError(f"{run} is not the folder of a run that has started")
    return starts


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a log that count, with nan for null, which stands for any such value.

    Starts, and the rows of steps that a later start repeats, do not count.
    """
    valid = []
    for row in rows_of(path):
        if row.get("event") == "start":
            valid = [earlier for earlier in valid if earlier["step"] <= row["step"]]
        else:
            valid.append(
                {name: math.nan if value is None else value for name, value in row.items()}
            )
    return valid


def rows_of(path: Path) -> list[dict]:
    """Return all rows of a log, but not the notes that a user has added."""
    rows = read_all_rows(path)
    return [row for row in rows if isinstance(row, dict) and type(row.get("step")) is int]


def with_times(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """Return the training and evaluation rows, each with the "time" at which its step ended."""
    training: dict[int, dict] = {}  # by step
    val = []
    time = 0.0
    previous_step = None
    for row in rows:
        step = row["step"]
        if "loss" in row:
            # step_time is the mean since the previous row. The first row covers one step, which is
            # not step 1 if the run started from another run's checkpoint.
            steps = 1 if previous_step is None else step - previous_step
            time += steps * row["step_time"]
            previous_step = step
            training[step] = row | {"time": time}
        elif "val_loss" in row and step in training:
            val.append(row | {"time": training[step]["time"]})
    return list(training.values()), val


def relative_difference(a: float, b: float) -> float:
    """Return |a - b| relative to the larger one; inf if only one is nan."""
    if math.isnan(a) and math.isnan(b):
        return 0.0
    if math.isnan(a) or math.isnan(b):
        return math.inf
    if a == b:  # also if both are 0
        return 0.0
    return abs(a - b) / max(abs(a), abs(b))


# --------------------------------------------------------------------------------------------------
# The table


def compare(logs: list[Log], tolerance: float) -> list[list[str]]:
    """Return a header, and a line for each run with what it reached.

    The cells include the time to the lowest validation loss that all runs reached, the first loss
    and the first parameter statistic that differ from the first run's by more than `tolerance`
    (relative), and the flags that differ.
    """
    tokens = min(log.training[-1]["tokens"] for log in logs)
    best = [log.best_val_loss() for log in logs]
    loss = max(filter(None, best), default=None)
    lines = []
    for log, flags in zip(logs, different_flags(logs, {"out"})):  # --out always differs
        cells = {"": log.name}
        cells |= reached(log, tokens, loss)
        if len(logs) > 1:
            cells |= differences(logs[0], log, tolerance)
        cells |= flags
        lines.append(list(cells.values()))
    return [list(cells), *lines]


def reached(log: Log, tokens: int, loss: float | None) -> dict[str, str]:
    """Return the cells on losses, the time to `loss`, speed, and clipped and skipped steps."""
    found = {
        "final validation loss": shown(log.final_val_loss(), ".4f"),
        "best validation loss": shown(log.best_val_loss(), ".4f"),
        f"training loss at {tokens:,} tokens": shown(log.loss_at(tokens), ".4f"),
    }
    if loss is not None:
        name = f"seconds to validation loss {loss:.4f}"
        found[name] = shown(log.time_to(loss), ",.1f")
    speed = median(row["tokens_per_second"] for row in log.training)
    found["tokens per second, median"] = shown(speed, ",.0f")
    clipped = fmean(row["clipped"] for row in log.training)
    found["logged steps that were clipped"] = shown(clipped, ".1%")
    found["steps skipped"] = shown(log.training[-1]["skipped_steps"], ",")
    return found


def shown(value: float | None, spec: str) -> str:
    return "none" if value is None else format(value, spec)


def different_flags(logs: list[Log], left_out: set[str]) -> list[dict[str, str]]:
    """Return, for each run, the flags whose values differ between the runs."""
    found = [{} for _ in logs]
    names = set()
    for log in logs:
        names |= log.config.keys() - left_out
    for name in sorted(names):
        values = [str(log.config.get(name)) for log in logs]
        if len(set(values)) > 1:
            for flags, value in zip(found, values):
                flags[f"`--{name}`"] = value
    return found


# --------------------------------------------------------------------------------------------------
# Where two runs first differ


class Difference(NamedTuple):
    """How a logged value differs between two runs in a step; max() picks the most informative."""

    place: int  # order within the step: the greater, the earlier the value is computed
    size: float  # relative
    name: str  # of the parameter; for a loss, training or validation
    column: str


def differences(first: Log, log: Log, limit: float) -> dict[str, str]:
    """Describe where the losses and parameters of a run first differ from the first run's."""
    found = {}
    for what, growth in (("loss", 0), ("parameter", GROWTH)):
        reference, other = first.values[what], log.values[what]
        if not reference:
            continue
        name = f"first {what} difference from {first.name} over {limit:g} (--tolerance)"
        found[name] = "-"
        if log is not first:
            found[name] = first_difference(reference, other, limit, growth)
    return found


def first_difference(reference: dict, other: dict, limit: float, growth: float) -> str:
    """Describe the first step that both runs logged and in which a value differs by over `limit`.

    The difference must also exceed `growth` times the largest in earlier steps. If several values
    differ that much, describes the largest difference among those that a step computes first.
    """
    largest = 0.0  # largest difference so far
    common = 0  # logged steps
    for step in other:
        if step not in reference:
            continue
        common += 1
        least = max(limit, growth * largest)
        beyond = []
        for found in differences_of_step(reference[step], other[step]):
            largest = max(largest, found.size)
            if found.size > least:
                beyond.append(found)
        if beyond:
            first = max(beyond)
            line = f"step {step}: {first.name} {first.column} by {first.size:.1g}"
            others = {found.name for found in beyond} - {first.name}
            return f"{line}, and {len(others)} more" if others else line
    return f"never: at most {largest:.1g} in {common} steps that both runs logged"


def differences_of_step(a_rows: dict[str, dict], b_rows: dict[str, dict]) -> list[Difference]:
    """Return the difference of each value that both runs logged."""
    found = []
    for name in a_rows.keys() & b_rows.keys():
        a, b = a_rows[name], b_rows[name]
        updates = a.get("update_ratio", math.inf) + b.get("update_ratio", math.inf)
        for column in a.keys() & b.keys() - {"clipped"}:  # near the clip limit, rounding decides
            size = relative_difference(a[column], b[column])
            place = 0
            if column == "weight_norm" and size > updates:
                place = 2  # the weights differed before the step
            elif column.startswith("grad"):
                place = 1
            found.append(Difference(place, size, name, column))
    return found
