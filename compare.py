"""The answer of an A/B test: runs side by side, from their logs.

python compare.py runs/a runs/b --plot ab.png
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median


class CompareError(ValueError):
    """A run that cannot be compared."""


@dataclass(frozen=True)
class Log:
    """What a run logged. Times are training time in seconds, without evaluations and checkpoints."""

    name: str
    config: dict
    training: list[dict]  # rows, each with its "time" since the start of the run
    val: list[dict]  # rows, with "tokens" and "time" of the training row of their step

    def loss_at(self, tokens: int) -> float:
        """Training loss around a number of tokens: the mean over the tenth of the log that ends there."""
        before = [
            row["loss"]
            for row in self.training
            if row["tokens"] <= tokens and row["loss"] is not None
        ]
        return fmean(before[-max(1, len(before) // 10) :]) if before else float("nan")

    def time_to(self, loss: float) -> float | None:
        """When validation first reached `loss`, between two evaluations on the straight line; None: never."""
        last = None
        for row in self.val:
            if row["val_loss"] <= loss:
                if last is None:
                    return row["time"]
                share = (last["val_loss"] - loss) / (last["val_loss"] - row["val_loss"])
                return last["time"] + share * (row["time"] - last["time"])
            last = row
        return None


def read(folder: str) -> Log:
    path = Path(folder)
    try:
        config = json.loads((path / "config.json").read_text())
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise CompareError(f"{folder} is no run folder that can be read: {error}") from None
    training, step, time = [], 0, 0.0
    for row in rows:
        if "loss" in row:
            time += (row["step"] - step) * row[
                "step_time"
            ]  # the mean over the steps since the row before
            step = row["step"]
            training.append(row | {"time": time})
    at = {row["step"]: {"tokens": row["tokens"], "time": row["time"]} for row in training}
    val = [
        row | at[row["step"]]
        for row in rows
        if row.get("val_loss") is not None and row["step"] in at
    ]
    if not val:
        raise CompareError(f"{folder} has no evaluation yet: let it run to its first")
    return Log(path.name, config, training, val)


def table(logs: list[Log], loss: float | None) -> str:
    """Markdown: a row for each quantity, a column for each run, the best in bold where there is a best."""
    tokens = min(log.training[-1]["tokens"] for log in logs)
    # A loss that all reached, and as late as possible: the worst of their best.
    target = (
        loss if loss is not None else max(min(row["val_loss"] for row in log.val) for log in logs)
    )
    rows = [
        ("final validation loss", [log.val[-1]["val_loss"] for log in logs], "{:.4f}", min),
        (
            "best validation loss",
            [min(row["val_loss"] for row in log.val) for log in logs],
            "{:.4f}",
            min,
        ),
        (
            f"training loss at {tokens:,} tokens",
            [log.loss_at(tokens) for log in logs],
            "{:.4f}",
            min,
        ),
        (
            f"seconds to validation loss {target:.4f}",
            [log.time_to(target) for log in logs],
            "{:,.1f}",
            min,
        ),
        (
            "tokens per second, median",
            [median(row["tokens_per_second"] for row in log.training) for log in logs],
            "{:,.0f}",
            max,
        ),
        (
            "steps clipped, of those logged",
            [fmean(row["clipped"] for row in log.training) for log in logs],
            "{:.1%}",
            None,
        ),
        (
            "steps skipped",
            [log.training[-1]["skipped_steps"] / log.training[-1]["step"] for log in logs],
            "{:.1%}",
            None,
        ),
    ]
    lines = [["", *(log.name for log in logs)], ["---"] * (len(logs) + 1)]
    for name, values, form, best in rows:
        cells = ["never" if value is None else form.format(value) for value in values]
        known = [value for value in values if value is not None]
        if best and len(set(cells)) > 1:
            cells = [
                f"**{cell}**" if value == best(known) else cell
                for cell, value in zip(cells, values)
            ]
        lines.append([name, *cells])
    fields = sorted({field for log in logs for field in log.config} - {"out"})
    for field in fields:
        values = [str(log.config.get(field)) for log in logs]
        if len(set(values)) > 1:
            lines.append([f"`--{field}`", *values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(logs: list[Log], file: str) -> None:
    """Loss and gradient norm against tokens and against time, training thin and validation with dots."""
    try:
        import matplotlib
    except ImportError:
        raise CompareError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, 2, figsize=(12, 8), sharex="col", sharey="row", layout="constrained"
    )
    for column, (x, label) in enumerate((("tokens", "tokens"), ("time", "seconds of training"))):
        for log in logs:
            for row, key in enumerate(("loss", "grad_norm")):
                points = [(r[x], r[key]) for r in log.training if r[key] is not None]
                (line,) = axes[row, column].plot(*zip(*points), linewidth=0.8, label=log.name)
            axes[0, column].plot(
                [r[x] for r in log.val],
                [r["val_loss"] for r in log.val],
                "o--",
                color=line.get_color(),
            )
        axes[1, column].set_xlabel(label)
        axes[1, column].set_yscale("log")
    axes[0, 0].set_ylabel("loss (dots: validation)")
    axes[1, 0].set_ylabel("gradient norm")
    axes[0, 0].legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise CompareError(f"--plot {file}: {error}") from None


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Compare runs in a Markdown table: losses, speed, and which flags differ."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, such as runs/a runs/b")
    parser.add_argument(
        "--loss",
        type=float,
        metavar="L",
        help="time to this validation loss (default: one that all reached)",
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw loss and gradient norm too (needs matplotlib)"
    )
    args = parser.parse_args()
    try:
        logs = [read(run) for run in args.runs]
        print(table(logs, args.loss))
        if args.plot:
            plot(logs, args.plot)
    except CompareError as error:
        print(f"compare.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
