"""Compare runs side by side, from their logs: an A/B test, or the same run on two meshes.

python -m tools.compare runs/norm runs/adaptive --plot ab.png
python -m tools.compare runs/single runs/fsdp --tolerance 1e-3
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from metrics import read_rows
from runtime import cli
from runtime.cli import UsageError

# Relative difference that counts as rounding: 8 steps of float32, whose resolution is 1.2e-7. The
# losses of single, ddp, fsdp and tp in float32 stay within 2e-7 while their weights agree. They
# leave 1e-6 when the weights have drifted apart, after some dozens of steps.
ROUNDING = 1e-6
# Rounding differences of parameters grow, until they are as large as the values. In --model tiny
# in float32, single, fsdp, hsdp and tp differ in some column by at most 3e-6 in step 1, 5e-5 up to
# step 10, 5e-3 up to 20 and 0.8 up to 40. Once above the default tolerance, they grew at most
# 12-fold from a row to the next of every step, 41-fold of every tenth (AMD EPYC Zen 4, 2026-11-22).
GROWTH = 100
PLOT_SUFFIXES = (".png", ".pdf", ".svg")


# --------------------------------------------------------------------------------------------------
# The log of a run


@dataclass(frozen=True)
class Log:
    """What one run logged. Times are seconds of training, without evaluations and checkpoints.

    A loss or norm that was not finite is nan.
    """

    name: str
    config: dict
    training: list[dict]  # training rows, each with its "time" since the start of the run
    val: list[dict]  # evaluations, each with the "tokens" and the "time" of its step
    values: dict[str, dict]  # {"loss" or "parameter": {step: {name: {column: value}}}}

    def final_val_loss(self) -> float | str:
        return self.val[-1]["val_loss"] if self.val else "none yet"

    def best_val_loss(self) -> float | str:
        """The lowest validation loss; nan if none was finite."""
        none = math.nan if self.val else "none yet"
        return min((row["val_loss"] for row in self.finite_val()), default=none)

    def finite_val(self) -> list[dict]:
        return [row for row in self.val if math.isfinite(row["val_loss"])]

    def loss_at(self, tokens: int) -> float | str:
        """Mean of the finite training losses logged in the last tenth of the first `tokens` tokens.

        The span is the same for every run, however many rows a run logged in it.
        """
        span = [row for row in self.training if 0.9 * tokens < row["tokens"] <= tokens]
        if not span:
            return "no row"
        finite = [row["loss"] for row in span if math.isfinite(row["loss"])]
        return fmean(finite) if finite else math.nan

    def time_to(self, loss: float) -> float | str:
        """When the validation loss first reached `loss`.

        Interpolates linearly between the two evaluations around it.
        """
        if not self.val:
            return "none yet"
        previous = None
        for row in self.finite_val():
            if row["val_loss"] > loss:
                previous = row
                continue
            if previous is None:
                return row["time"]
            descent = previous["val_loss"] - row["val_loss"]
            fraction = (previous["val_loss"] - loss) / descent
            return previous["time"] + fraction * (row["time"] - previous["time"])
        return "never"

    def tokens_per_second(self) -> float:
        return median(row["tokens_per_second"] for row in self.training)

    def clipped(self) -> float:
        """The fraction of logged steps whose gradient was clipped."""
        return fmean(row["clipped"] for row in self.training)

    def skipped(self) -> float:
        """The fraction of all steps whose update was skipped."""
        last = self.training[-1]
        return last["skipped_steps"] / last["step"]


def read(folder: str, name: str) -> Log:
    """Read a run folder. Raises UsageError if it is none."""
    run = Path(folder)
    for file in ("config.json", "metrics.jsonl"):
        if not (run / file).is_file():
            raise UsageError(f"{folder} has no {file}: it is not the folder of a started run")
    training, val = with_times(read_rows(run / "metrics.jsonl"))
    if not training:
        raise UsageError(f"{folder} has no training row yet: let it run until its first one")
    losses = {row["step"]: {"training": {"loss": row["loss"]}} for row in training}
    parameters = {}
    for row in map(with_nan, read_rows(run / "optim.jsonl")):
        parameters.setdefault(row.pop("step"), {})[row.pop("parameter")] = row
    config = json.loads((run / "config.json").read_text())
    return Log(name, config, training, val, {"loss": losses, "parameter": parameters})


def with_nan(row: dict) -> dict:
    """JSON has no nan: the log has null for a value that is not finite."""
    return {name: math.nan if value is None else value for name, value in row.items()}


def with_times(rows: list[dict]) -> tuple[list[dict], list[dict]]:
    """The rows of training and of evaluations, each with the "time" at which its step ended."""
    training: dict[int, dict] = {}  # by step
    val = []
    time = 0.0
    previous_step = None
    for row in map(with_nan, rows):
        step = row["step"]
        if "loss" in row:
            # step_time is the mean over the steps since the previous row. The first row has one
            # step, which is not step 1 where the run began with a checkpoint of another.
            steps = 1 if previous_step is None else step - previous_step
            time += steps * row["step_time"]
            previous_step = step
            training[step] = row | {"time": time}
        elif "val_loss" in row and step in training:
            at = training[step]
            val.append(row | {"tokens": at["tokens"], "time": at["time"]})
    return list(training.values()), val


# --------------------------------------------------------------------------------------------------
# The table


def table(logs: list[Log], loss: float | None, tolerance: float) -> str:
    """A Markdown table with a row for each quantity and a column for each run.

    `loss` is the validation loss to measure the time to, `tolerance` the relative difference of
    training losses to look for. At the end come the flags in which the runs differ.
    """
    tokens = min(log.training[-1]["tokens"] for log in logs)
    at_tokens = f"training loss at {tokens:,} tokens"
    rows = [
        row_of("final validation loss", logs, Log.final_val_loss, ".4f", best=min),
        row_of("best validation loss", logs, Log.best_val_loss, ".4f", best=min),
        row_of(at_tokens, logs, lambda log: log.loss_at(tokens), ".4f", best=min),
    ]
    reached = [log.best_val_loss() for log in logs if log.finite_val()]
    loss = loss or max(reached, default=None)  # the lowest that all of them reached
    if loss is not None:
        to_loss = f"seconds to validation loss {loss:.4f}"
        rows.append(row_of(to_loss, logs, lambda log: log.time_to(loss), ",.1f", best=min))
    rows += [
        row_of("tokens per second, median", logs, Log.tokens_per_second, ",.0f", best=max),
        row_of("steps clipped, of those logged", logs, Log.clipped, ".1%"),
        row_of("steps skipped", logs, Log.skipped, ".1%"),
    ]
    if len(logs) > 1:
        rows.append(differences(logs, "loss", ROUNDING, "rounding"))
        rows.append(differences(logs, "loss", tolerance, "--tolerance"))
        if logs[0].values["parameter"]:
            rows.append(differences(logs, "parameter", tolerance, "--tolerance"))
    return markdown_table(["", *(log.name for log in logs)], rows + different_flags(logs))


def row_of(
    name: str,
    logs: list[Log],
    value_of: Callable[[Log], float | str],
    spec: str,
    best: Callable | None = None,
) -> list[str]:
    """A quantity of every run, text where a run has no such number.

    `spec` is the format of a number. The best, min or max, is bold unless all are the same.
    """
    values = [value_of(log) for log in logs]
    cells = [value if isinstance(value, str) else format(value, spec) for value in values]
    numbers = [value for value in values if not isinstance(value, str) and math.isfinite(value)]
    if best and numbers and len(set(cells)) > 1:
        winner = best(numbers)
        cells = [f"**{cell}**" if value == winner else cell for cell, value in zip(cells, values)]
    return [name, *cells]


def differences(logs: list[Log], what: str, limit: float, reason: str) -> list[str]:
    """A row that says where the values of each run first differ from the first run's."""
    reference, *others = (log.values[what] for log in logs)
    growth = GROWTH if what == "parameter" else 0
    name = f"first {what} difference from {logs[0].name} over {limit:g} ({reason})"
    return [name, "-", *(first_difference(reference, other, limit, growth) for other in others)]


def first_difference(reference: dict, other: dict, limit: float, growth: float) -> str:
    """The first step logged by both, and the value that differs there by more than `limit`.

    It also differs by more than `growth` times what any did in the rows before. Of several, it is
    the one that differs most of those that come first in a step.
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
        largest = max([largest, *(difference for _, difference, *_ in found)])
    if not common:
        return "no logged step in common"
    how = f"by at most {largest:.1g}" if largest else "equal"
    return f"never, {how} in {len(common):,} logged steps in common"


def differences_of_step(a_rows: dict, b_rows: dict) -> Iterator[tuple[int, float, str, str]]:
    """(place in the step, relative difference, name, column) of all values that both runs have."""
    for name in a_rows.keys() & b_rows.keys():
        a, b = a_rows[name], b_rows[name]
        for column in a.keys() & b.keys() - {"clipped"}:  # at the limit, rounding decides that
            difference = relative_difference(a, b, column)
            # First come weights that differ by more than their updates, then gradients.
            updates = sum(row.get("update_ratio", math.inf) for row in (a, b))
            is_old = column == "weight_norm" and difference > updates
            yield 2 * is_old + column.startswith("grad"), difference, name, column


def relative_difference(a: dict, b: dict, column: str) -> float:
    """That of an element, or of a mean, which may be near 0, is relative to the largest element."""
    x, y = a[column], b[column]
    if math.isnan(x) or math.isnan(y):  # in other columns, a slot that the optimizer lacks
        is_one = math.isnan(x) != math.isnan(y) and column in ("loss", "grad_norm")
        return math.inf if is_one else 0.0
    kind, _, statistic = column.rpartition("_")
    is_element = statistic in ("mean", "max", "min")
    sizes = {column, f"{kind}_max", f"{kind}_min"} if is_element else {column}
    scale = max(abs(row[size]) for row in (a, b) for size in sizes & row.keys())
    return abs(x - y) / scale if scale else 0.0


def different_flags(logs: list[Log]) -> list[list[str]]:
    """A row for each flag whose value is not the same in all runs; --out is always different."""
    flags = set().union(*(log.config for log in logs)) - {"out"}
    rows = []
    for flag in sorted(flags):
        values = [str(log.config.get(flag)) for log in logs]
        if len(set(values)) > 1:
            rows.append([f"`--{flag}`", *values])
    return rows


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --------------------------------------------------------------------------------------------------
# The plot


def import_pyplot():
    """matplotlib's pyplot, which draws without a display. Raises UsageError."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(logs: list[Log], file: str) -> None:
    """Plot loss and gradient norm against tokens and against time. Raises UsageError."""
    pyplot = import_pyplot()
    shared = dict(sharex="col", sharey="row", layout="constrained")
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), **shared)
    figure.suptitle("Loss and gradient norm, by tokens and by time")
    for (losses, norms), x in zip(axes.T, ("tokens", "time")):
        norms.set_xlabel("tokens" if x == "tokens" else "seconds of training")
        for number, log in enumerate(logs):
            thin = dict(color=f"C{number}", alpha=0.5, linewidth=0.8)
            draw(losses, log.training, x, "loss", label=f"{log.name}, training", **thin)
            if log.val:
                label = f"{log.name}, validation"
                draw(losses, log.val, x, "val_loss", label=label, color=f"C{number}", marker="o")
            draw(norms, log.training, x, "grad_norm", **thin)
    axes[0, 0].legend()
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("gradient norm")
    axes[1, 0].set_yscale("log")  # both columns share it
    figure.savefig(file, dpi=150)


def draw(axes, rows: list[dict], x: str, y: str, **style) -> None:
    """Draw a field of the log against "tokens" or "time". nan leaves a gap."""
    axes.plot([row[x] for row in rows], [row[y] for row in rows], **style)


# --------------------------------------------------------------------------------------------------
# The command line


def positive_number(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return number


def plot_file(text: str) -> str:
    if not text.lower().endswith(PLOT_SUFFIXES):
        raise argparse.ArgumentTypeError(f"{text} must end in {', '.join(PLOT_SUFFIXES)}")
    return text


def parse(argv: list[str]) -> argparse.Namespace:
    parser = cli.Parser(
        prog="tools.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, such as runs/a runs/b")
    parser.add_argument(
        "--loss",
        type=positive_number,
        metavar="L",
        help="measure the time to this validation loss (default: the lowest that all runs reached)",
    )
    parser.add_argument(
        "--tolerance",
        type=positive_number,
        default=1e-2,
        metavar="T",
        help="find the first step whose training loss, and the first parameter of optim.jsonl, "
        "differs from the first run's by more than T, relative (default: 0.01)",
    )
    parser.add_argument(
        "--plot",
        type=plot_file,
        metavar="FILE.png",
        help="also plot loss and gradient norm (needs matplotlib); .pdf and .svg work too",
    )
    return parser.parse_args(argv)


def compare(argv: list[str]) -> None:
    args = parse(argv)
    logs = [read(folder, name) for folder, name in zip(args.runs, names(args.runs))]
    if args.plot:
        plot(logs, args.plot)
    print(table(logs, args.loss, args.tolerance))


def names(folders: list[str]) -> list[str]:
    """The names of the folders; their paths where two have the same name."""
    short = [Path(folder).resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else folders


def main(argv: list[str]) -> int:
    return cli.run("tools.compare", lambda: compare(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
