"""Compare runs by their logs: an A/B test, seeds, a sweep, or the same run on two meshes.

python -m tools.compare runs/norm runs/adaptive
python -m tools.compare runs/*
python -m tools.compare runs/single runs/fsdp --tolerance 1e-3
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev, variance

import numpy as np

from metrics import read_log
from runtime import cli
from runtime.cli import UsageError

# Rounding differences of parameters grow until they are as large as the values: in float32, above
# the default tolerance, at most 12-fold from one step to the next, and 41-fold in ten.
GROWTH = 100
MOST_COLUMNS = 6  # with more runs, each is a row
LEVEL = 0.05  # chance of telling equal settings apart, over all comparisons of a table

# --------------------------------------------------------------------------------------------------
# The log of a run


@dataclass(frozen=True)
class Log:
    """What one run logged. Times are seconds of training, without evaluations and checkpoints.

    Non-finite losses and norms are nan.
    """

    name: str
    config: dict  # the flags, as given
    training: list[dict]  # training rows, each with its "time" since the start of the run
    val: list[dict]  # evaluations, each with the "time" of its step
    values: dict[str, dict]  # {"loss" or "parameter": {step: {name: {column: value}}}}
    rows: list[dict] = field(default_factory=list)  # all of metrics.jsonl

    def final_val_loss(self) -> float | str:
        return self.val[-1]["val_loss"] if self.val else "none yet"

    def best_val_loss(self) -> float | str:
        """The lowest validation loss; nan if none was finite."""
        none = math.nan if self.val else "none yet"
        return min((row["val_loss"] for row in self.finite_val()), default=none)

    def finite_val(self) -> list[dict]:
        return [row for row in self.val if math.isfinite(row["val_loss"])]

    def loss_at(self, tokens: int) -> float | str:
        """Mean of the finite training losses in the last tenth of the first `tokens` tokens."""
        span = [row for row in self.training if 0.9 * tokens < row["tokens"] <= tokens]
        if not span:
            return "no row"
        finite = [row["loss"] for row in span if math.isfinite(row["loss"])]
        return fmean(finite) if finite else math.nan

    def time_to(self, loss: float) -> float | str:
        """When an evaluation first reached `loss`."""
        if not self.val:
            return "none yet"
        times = [row["time"] for row in self.finite_val() if row["val_loss"] <= loss]
        return times[0] if times else "never"

    def speed(self) -> float:
        return median(row["tokens_per_second"] for row in self.training)

    def clipped(self) -> float:
        return fmean(row["clipped"] for row in self.training)

    def ended_loss(self) -> float | None:
        """The final validation loss if the run has ended and the loss is finite."""
        at_end = [row for row in self.finite_val() if row["step"] == self.config.get("max_steps")]
        return at_end[-1]["val_loss"] if at_end else None


def read(folder: str, name: str) -> Log:
    """Read a run folder. Raises UsageError if it is none."""
    run = Path(folder)
    for file in ("config.json", "metrics.jsonl"):
        if not (run / file).is_file():
            raise UsageError(f"{folder} has no {file}: it is not the folder of a started run")
    rows = read_log(run / "metrics.jsonl")
    training, val = with_times(rows)
    if not training:
        raise UsageError(f"{folder} has no training row yet: let it run until its first one")
    losses = {}
    for row in training:
        losses[row["step"]] = {"training": {"loss": row["loss"]}}
    parameters = {}
    for row in map(with_nan, read_log(run / "optim.jsonl")):
        parameters.setdefault(row.pop("step"), {})[row.pop("parameter")] = row
    try:
        config = json.loads((run / "config.json").read_bytes())
    except ValueError as error:
        raise UsageError(f"{run}/config.json is damaged: {error}") from None
    return Log(name, config, training, val, {"loss": losses, "parameter": parameters}, rows)


def with_nan(row: dict) -> dict:
    """Reads null, the log's form of a non-finite value, as nan."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def with_times(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """The training and evaluation rows, each with the "time" at which its step ended."""
    training: dict[int, dict] = {}  # by step
    val = []
    time = 0.0
    previous_step = None
    for row in map(with_nan, rows):
        step = row["step"]
        if "loss" in row:
            # step_time is the mean since the previous row. The first row has one step, which is
            # not step 1 if the run started from another run's checkpoint.
            steps = 1 if previous_step is None else step - previous_step
            time += steps * row["step_time"]
            previous_step = step
            training[step] = row | {"time": time}
        elif "val_loss" in row and step in training:
            val.append(row | {"time": training[step]["time"]})
    return list(training.values()), val


# --------------------------------------------------------------------------------------------------
# The table


def table(logs: list[Log], loss: float | None, tolerance: float, turned: bool = False) -> str:
    """A Markdown table with a row for each quantity and a column for each run, or the other way.

    Has the time to validation loss `loss`, and the first training losses and statistics of
    parameters that differ by more than `tolerance`, relatively; last the flags that differ.
    """
    rows = [["", *(log.name for log in logs)], *quantities(logs, loss)]
    if len(logs) > 1:
        rows += differences(logs, tolerance)
    rows += flag_rows(logs)
    header, *rows = zip(*rows) if turned else rows
    return markdown_table(header, rows)


def quantities(logs: list[Log], loss: float | None) -> list[list[str]]:
    """Rows of what each run reached; `loss` as in `table`."""
    tokens = min(log.training[-1]["tokens"] for log in logs)
    reached = [log.best_val_loss() for log in logs if log.finite_val()]
    loss = loss or max(reached, default=None)  # the lowest that all runs reached
    found = {
        "final validation loss": (Log.final_val_loss, ".4f"),
        "best validation loss": (Log.best_val_loss, ".4f"),
        f"training loss at {tokens:,} tokens": (lambda log: log.loss_at(tokens), ".4f"),
    }
    if loss is not None:
        found[f"seconds to validation loss {loss:.4f}"] = (lambda log: log.time_to(loss), ",.1f")
    found |= {
        "tokens per second, median": (Log.speed, ",.0f"),
        "steps clipped, of those logged": (Log.clipped, ".1%"),
        "steps skipped": (lambda log: log.training[-1]["skipped_steps"], ","),
    }
    rows = []
    for name, (value_of, spec) in found.items():
        values = [value_of(log) for log in logs]
        rows.append([name, *(v if isinstance(v, str) else format(v, spec) for v in values)])
    return rows


def differences(logs: list[Log], limit: float) -> list[list[str]]:
    """Rows of where losses, and parameters, of each run first differ from the first run's."""
    rows = []
    for what, reference in logs[0].values.items():
        growth = GROWTH if what == "parameter" else 0
        if reference:
            name = f"first {what} difference from {logs[0].name} over {limit:g} (--tolerance)"
            rows.append([name, "-"])
            for log in logs[1:]:
                rows[-1].append(first_difference(reference, log.values[what], limit, growth))
    return rows


def first_difference(reference: dict, other: dict, limit: float, growth: float) -> str:
    """The first step logged by both in which a value differs by more than `limit`, and the value.

    It must also exceed `growth` times the largest difference so far. If several do, names the one
    that differs most among those computed first in a step.
    """
    largest = 0.0  # difference so far
    common = [step for step in other if step in reference]
    for step in common:
        found = list(differences_of_step(reference[step], other[step]))
        beyond = [each for each in found if each[1] > max(limit, growth * largest)]
        if beyond:
            _, difference, name, column = max(beyond)
            more = len({name for *_, name, _ in beyond}) - 1
            also = f", and {more:,} more" if more else ""
            return f"step {step:,}: {name} {column} by {difference:.1g}{also}"
        for _, difference, *_ in found:
            largest = max(largest, difference)
    if not common:
        return "no logged step in common"
    how = f"by at most {largest:.1g}" if largest else "equal"
    return f"never, {how} in {len(common):,} logged steps in common"


def differences_of_step(a_rows: dict, b_rows: dict) -> Iterator[tuple[int, float, str, str]]:
    """(place in the step, relative difference, name, column) of each value in both runs."""
    for name in a_rows.keys() & b_rows.keys():
        a, b = a_rows[name], b_rows[name]
        # Weights that differ by more than their updates come first, then gradients.
        updates = a.get("update_ratio", math.inf) + b.get("update_ratio", math.inf)
        for column in a.keys() & b.keys() - {"clipped"}:  # near the limit, rounding decides it
            difference = relative_difference(a, b, column)
            place = 1 if column.startswith("grad") else 0
            if column == "weight_norm" and difference > updates:
                place = 2
            yield place, difference, name, column


def relative_difference(a: dict, b: dict, column: str) -> float:
    x, y = a[column], b[column]
    if math.isnan(x) or math.isnan(y):  # elsewhere nan is a slot the optimizer lacks
        is_one = math.isnan(x) != math.isnan(y) and column in ("loss", "grad_norm")
        return math.inf if is_one else 0.0
    scale = max(abs(x), abs(y))
    return abs(x - y) / scale if scale else 0.0


def flag_rows(logs: list[Log], *left_out: str) -> list[list[str]]:
    """Rows of the flags that differ between runs, except --out, which always does."""
    rows = []
    flags = set().union(*(log.config for log in logs))
    for flag in sorted(flags - {"out", *left_out}):
        values = [str(log.config.get(flag)) for log in logs]
        if len(set(values)) > 1:
            rows.append([f"`--{flag}`", *values])
    return rows


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --------------------------------------------------------------------------------------------------
# Seeds


def settings_of(logs: list[Log]) -> list[list[Log]]:
    """Groups of runs that differ only in --seed and --out, in order of first appearance."""
    groups: dict[str, list[Log]] = {}
    for log in logs:
        same = {flag: log.config[flag] for flag in log.config.keys() - {"out", "seed"}}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(log)
    return list(groups.values())


def seeds_table(logs: list[Log]) -> str:
    """Each setting's mean and spread over seeds, against the first; empty if none has two."""
    settings = settings_of(logs)
    losses = [{log.config.get("seed"): log.ended_loss() for log in each} for each in settings]
    if max(map(len, losses)) < 2:
        return ""
    columns = flag_rows([setting[0] for setting in settings], "seed")
    columns += [["seeds"], ["final validation loss, mean"], ["standard deviation"]]
    columns += [["from the first"]]
    comparisons = sum(len(found) > 1 for found in losses[1:])
    for setting, by_seed in zip(settings, losses):
        found = [loss for loss in by_seed.values() if loss is not None]
        *_, counts, means, spreads, words = columns
        ended = "" if len(found) == len(setting) else f" of {len(setting)}"
        counts.append(f"{len(found)}{ended}")
        means.append(f"{fmean(found):.4f}" if found else "none yet")
        spreads.append(f"{stdev(found):.4f}" if len(found) > 1 else "-")
        is_first = by_seed is losses[0]
        words.append("-" if is_first else verdict(losses[0], by_seed, comparisons))
    header, *rows = zip(*columns)
    return markdown_table(header, rows)


def verdict(first: dict[int, float], other: dict[int, float], comparisons: int) -> str:
    """Whether two settings differ by more than their seeds do, in words.

    Means of n losses are nearly normal, so Student's t works even with three seeds. `comparisons`
    share LEVEL (Bonferroni).
    """
    has_ended = None not in (*first.values(), *other.values())
    if not has_ended or first.keys() != other.keys() or len(first) < 2:
        return "no word: it takes runs that ended, with the same seeds, two or more"
    n = len(first)
    pairs = [other[seed] - first[seed] for seed in first]
    difference = fmean(pairs)
    p = p_value(difference, variance(pairs) / n, n - 1)
    is_large = p * comparisons < LEVEL
    word = "larger than the spread of seeds" if is_large else "not distinguishable"
    shared = f", x {comparisons} comparisons" if comparisons > 1 else ""
    return f"{difference:+.4f}: {word} (paired t test, n = {n}, p = {p:.2g}{shared})"


def p_value(difference: float, squared_error: float, df: int) -> float:
    """The chance of a difference at least this large, either way, if there is none.

    With t = sqrt(df) tan(x), the density of Student's t is cos(x)^(df - 1) over its integral.
    """
    if squared_error == 0:
        return float(difference == 0)
    start = math.atan(abs(difference) / math.sqrt(squared_error * df))
    x = np.linspace(0, math.pi / 2, 100_000)
    density = np.cos(x) ** (df - 1)
    return float(density[x >= start].sum() / density.sum())


# --------------------------------------------------------------------------------------------------
# The command line


def positive_number(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return number


def parse(argv: list[str]) -> argparse.Namespace:
    parser = cli.Parser(
        prog="tools.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, such as runs/a runs/b")
    help = "measure the time to this validation loss (default: the lowest that all runs reached)"
    add("--loss", type=positive_number, metavar="L", help=help)
    help = "relative difference above which a loss or a parameter differs (default: 0.01)"
    add("--tolerance", type=positive_number, default=1e-2, metavar="T", help=help)
    return parser.parse_args(argv)


def compare(argv: list[str]) -> None:
    args = parse(argv)
    logs = [read(folder, name) for folder, name in zip(args.runs, names(args.runs))]
    if len(logs) > MOST_COLUMNS:
        by_loss = sorted(logs, key=lambda log: log.ended_loss() or math.inf)
        print(table(by_loss, args.loss, args.tolerance, turned=True))
    else:
        print(table(logs, args.loss, args.tolerance))
    if over_seeds := seeds_table(logs):
        print(f"\n{over_seeds}")


def names(folders: list[str]) -> list[str]:
    """The folders' names, or their paths if two share a name."""
    short = [Path(folder).resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else folders


def main(argv: list[str]) -> int:
    return cli.execute("tools.compare", compare, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
