"""Compares runs side by side, from their logs: the result of an A/B test.

python -m tools.compare runs/a runs/b --plot ab.png
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median


class CompareError(ValueError):
    """A run that cannot be compared, or a plot that cannot be drawn."""


@dataclass(frozen=True)
class Log:
    """What one run logged. Times are seconds of training, without evaluations and checkpoints."""

    name: str
    config: dict
    training: list[dict]  # training rows, each with its "time" since the start of the run
    val: list[dict]  # evaluations, each with the "tokens" and the "time" of its step

    def final_val_loss(self) -> float:
        return self.val[-1]["val_loss"]

    def best_val_loss(self) -> float:
        return min(row["val_loss"] for row in self.val)

    def loss_at(self, tokens: int) -> float:
        """Training loss at a number of tokens: the mean of the last tenth of the rows up to it."""
        losses = []
        for row in self.training:
            if row["tokens"] <= tokens and row["loss"] is not None:
                losses.append(row["loss"])
        if not losses:
            return float("nan")
        tenth = max(1, len(losses) // 10)
        return fmean(losses[-tenth:])

    def time_to(self, loss: float) -> float | None:
        """When the validation loss first reached `loss`; None if it never did.

        Interpolates linearly between the two evaluations around it.
        """
        previous = None
        for row in self.val:
            if row["val_loss"] > loss:
                previous = row
                continue
            if previous is None:
                return row["time"]
            descent = previous["val_loss"] - row["val_loss"]
            fraction = (previous["val_loss"] - loss) / descent
            return previous["time"] + fraction * (row["time"] - previous["time"])
        return None

    def tokens_per_second(self) -> float:
        return median(row["tokens_per_second"] for row in self.training)

    def clipped(self) -> float:
        """The fraction of logged steps whose gradient was clipped."""
        return fmean(row["clipped"] for row in self.training)

    def skipped(self) -> float:
        """The fraction of all steps whose update was skipped."""
        last = self.training[-1]
        return last["skipped_steps"] / last["step"]


def read_rows(run: Path) -> list[dict]:
    """All rows of a run folder's metrics.jsonl."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read(folder: str) -> Log:
    """Read the log of a run folder. Raises CompareError if it has none, or no evaluation yet."""
    run = Path(folder)
    try:
        config = json.loads((run / "config.json").read_text())
        rows = read_rows(run)
    except (OSError, ValueError) as error:
        raise CompareError(f"{folder} is not a readable run folder: {error}") from None
    training = training_rows(rows)
    val = validation_rows(rows, training)
    if not val:
        raise CompareError(f"{folder} has no evaluation yet: let it run until its first one")
    return Log(run.name, config, training, val)


def training_rows(rows: list[dict]) -> list[dict]:
    """The rows that have a training loss, each with the "time" at which its step ended."""
    training = []
    time = 0.0
    previous_step = 0
    for row in rows:
        if "loss" not in row:
            continue
        # step_time is the mean over the steps since the previous row
        time += (row["step"] - previous_step) * row["step_time"]
        previous_step = row["step"]
        training.append(row | {"time": time})
    return training


def validation_rows(rows: list[dict], training: list[dict]) -> list[dict]:
    """The rows that have a validation loss, with "tokens" and "time" of the same training step."""
    training_at = {row["step"]: row for row in training}
    val = []
    for row in rows:
        at = training_at.get(row["step"])
        if row.get("val_loss") is not None and at:
            val.append(row | {"tokens": at["tokens"], "time": at["time"]})
    return val


@dataclass(frozen=True)
class Quantity:
    """One row of the table: a quantity of every run."""

    name: str
    of: Callable[[Log], float | None]  # None: the run never reached it
    spec: str  # format specification of a value
    best: Callable | None = None  # min or max; None: neither is better

    def cells(self, logs: list[Log]) -> list[str]:
        """The value of each run as text, the best in bold unless all are the same."""
        values = [self.of(log) for log in logs]
        cells = ["never" if value is None else format(value, self.spec) for value in values]
        if self.best is None or len(set(cells)) == 1:
            return cells
        best = self.best(value for value in values if value is not None)
        return [f"**{cell}**" if value == best else cell for cell, value in zip(cells, values)]


def table(logs: list[Log], loss: float | None) -> str:
    """A Markdown table with a row for each quantity and a column for each run.

    `loss` is the validation loss to measure the time to. Below the quantities come the flags
    in which the runs differ.
    """
    tokens = min(log.training[-1]["tokens"] for log in logs)
    if loss is None:
        # The lowest loss that every run reached: the worst of their best.
        loss = max(log.best_val_loss() for log in logs)
    at_tokens = f"training loss at {tokens:,} tokens"
    to_loss = f"seconds to validation loss {loss:.4f}"
    quantities = [
        Quantity("final validation loss", Log.final_val_loss, ".4f", best=min),
        Quantity("best validation loss", Log.best_val_loss, ".4f", best=min),
        Quantity(at_tokens, lambda log: log.loss_at(tokens), ".4f", best=min),
        Quantity(to_loss, lambda log: log.time_to(loss), ",.1f", best=min),
        Quantity("tokens per second, median", Log.tokens_per_second, ",.0f", best=max),
        Quantity("steps clipped, of those logged", Log.clipped, ".1%"),
        Quantity("steps skipped", Log.skipped, ".1%"),
    ]
    header = ["", *(log.name for log in logs)]
    rows = [[quantity.name, *quantity.cells(logs)] for quantity in quantities]
    return markdown_table(header, rows + different_flags(logs))


def different_flags(logs: list[Log]) -> list[list[str]]:
    """A row for each flag whose value is not the same in all runs; --out is always different."""
    flags = set()
    for log in logs:
        flags.update(log.config)
    rows = []
    for flag in sorted(flags - {"out"}):
        values = [str(log.config.get(flag)) for log in logs]
        if len(set(values)) > 1:
            rows.append([f"`--{flag}`", *values])
    return rows


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(logs: list[Log], file: str) -> None:
    """Plot loss and gradient norm against tokens and against time. Raises CompareError.

    Training is a thin line; evaluations are dots.
    """
    try:
        import matplotlib
    except ImportError:
        raise CompareError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, 2, figsize=(12, 8), sharex="col", sharey="row", layout="constrained"
    )
    for column, x in enumerate(("tokens", "time")):
        loss_axes = axes[0, column]
        norm_axes = axes[1, column]
        for number, log in enumerate(logs):
            color = f"C{number}"
            loss_axes.plot(*curve(log.training, x, "loss"), color, linewidth=0.8, label=log.name)
            loss_axes.plot(*curve(log.val, x, "val_loss"), "o--", color=color)
            norm_axes.plot(*curve(log.training, x, "grad_norm"), color, linewidth=0.8)
        norm_axes.set_yscale("log")
    axes[0, 0].set_ylabel("loss (dots: validation)")
    axes[1, 0].set_ylabel("gradient norm")
    axes[1, 0].set_xlabel("tokens")
    axes[1, 1].set_xlabel("seconds of training")
    axes[0, 0].legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise CompareError(f"--plot {file}: {error}") from None


def curve(rows: list[dict], x: str, y: str) -> tuple[list[float], list[float]]:
    """The x and the y values of the rows whose y is finite (a log has null for the others)."""
    finite = [row for row in rows if row[y] is not None]
    return [row[x] for row in finite], [row[y] for row in finite]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.compare",
        description="Compare runs in a Markdown table: losses, speed, and the flags that differ.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, such as runs/a runs/b")
    parser.add_argument(
        "--loss",
        type=float,
        metavar="L",
        help="measure the time to this validation loss (default: the lowest that all runs reached)",
    )
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="also plot loss and gradient norm (needs matplotlib)",
    )
    args = parser.parse_args(argv)
    try:
        logs = [read(run) for run in args.runs]
        print(table(logs, args.loss))
        if args.plot:
            plot(logs, args.plot)
    except CompareError as error:
        print(f"tools.compare: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
