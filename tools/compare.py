"""Compare runs by their logs: which one is better, and where do two of them part?

python -m tools.compare runs/ddp runs/fsdp
python -m tools.compare runs/* --plot curves.png
python -m tools.compare runs/single runs/fsdp --tolerance 1e-3

Runs that differ only in --seed are one setting, and a second table compares settings.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

import errors
from errors import UsageError
from tools.common import read_log, relative_difference

MOST_COLUMNS = 6  # with more runs, each run is a row
LEVEL = 0.05  # chance that at least one comparison in a table finds equal settings different
# A parameter's difference counts only if it exceeds GROWTH times all earlier ones. Rounding errors
# grow too: in float32, those above the default tolerance grew 12-fold in a step, 41-fold in ten.
GROWTH = 100

Values = dict[tuple[str, str], dict[int, float]]  # (of what, column) -> step -> value


@dataclass(frozen=True)
class Log:
    """The log of a run, without the rows that a later start made void."""

    name: str
    starts: list[dict]  # rows
    columns: dict[str, dict[int, float]]  # column of metrics.jsonl -> step -> value
    statistics: Values  # of parameters

    @property
    def flags(self) -> dict:
        """The values of all flags at the last start, except --out, which always differs."""
        return self.starts[-1]["config"] | {"out": None}

    @property
    def losses(self) -> Values:
        training, validation = self.columns["loss"], self.columns["val_loss"]
        return {("training", "loss"): training, ("validation", "loss"): validation}

    def final_loss(self) -> float | None:
        """Return the final validation loss if the run has ended and the loss is finite."""
        loss = self.columns["val_loss"].get(self.flags.get("max_steps"), math.nan)
        return loss if math.isfinite(loss) else None


def read_run(folder: Path, name: str) -> Log:
    """Read a run folder. Raises UsageError if it is not one, or has no training row."""
    starts, rows = read_log(folder / "metrics.jsonl")
    log = Log(name, starts, defaultdict(dict), defaultdict(dict))
    for row in rows:
        if "loss" in row:  # its memory is that of the device, or without one, of the process
            row["gigabytes"] = (row["peak_device_memory"] or row["peak_host_memory"]) / 1e9
        for column, value in row.items():
            log.columns[column][row["step"]] = value
    _, rows = read_log(folder / "optim.jsonl")
    for row in rows:
        # Near the clip limit, rounding decides whether a gradient is clipped.
        for column in row.keys() - {"step", "parameter", "clipped"}:
            log.statistics[row["parameter"], column][row["step"]] = row[column]
    if not log.columns["loss"]:
        raise UsageError(f"{folder} has no training row yet: let it run until its first one")
    return log


# --------------------------------------------------------------------------------------------------
# The table of runs


def table_of_runs(logs: list[Log], tolerance: float) -> str:
    """Return a table of losses, speed and memory, of first differences, and of flags that differ.

    First differences are those from the first run by more than `tolerance` (relative).
    """
    tokens = min(max(log.columns["tokens"].values()) for log in logs)  # that all runs have seen
    rows = []
    for log, flags in zip(logs, different_flags([log.flags for log in logs])):
        cells = {"": log.name} | summary(log, tokens)
        if len(logs) > 1:
            cells |= differences(logs[0], log, tolerance)
        cells |= flags
        rows.append(list(cells.values()))
    header = list(cells)
    if len(logs) <= MOST_COLUMNS:
        header, *rows = zip(header, *rows)
    return markdown_table(header, rows)


def summary(log: Log, tokens: int) -> dict[str, str]:
    """Return the cells of a run on its losses, speed, memory and updates."""

    def cell(column: str, combine: Callable, spec: str) -> str:
        return formatted(log.columns[column].values(), combine, spec)

    val_losses = list(log.columns["val_loss"].values())
    losses = []  # in the last tenth of `tokens`
    for step, loss in log.columns["loss"].items():
        if 0.9 * tokens < log.columns["tokens"][step] <= tokens:
            losses.append(loss)
    return {
        "final validation loss": f"{val_losses[-1]:.4f}" if val_losses else "none",  # also nan
        "best validation loss": cell("val_loss", min, ".4f"),
        f"training loss at {tokens:,} tokens": formatted(losses, fmean, ".4f"),
        "tokens/s per device, median": cell("tokens_per_second_per_device", median, ",.0f"),
        "MFU, median": cell("mfu", median, ".1%"),
        "step time in s, median": cell("step_time", median, ".4f"),
        "peak memory of a rank in GB": cell("gigabytes", max, ".2f"),
        "logged steps that were clipped": cell("clipped", fmean, ".1%"),
        "steps skipped": cell("skipped_steps", max, ",.0f"),
        "ranks": str(log.starts[-1]["ranks"]),
    }


def formatted(values: Iterable[float], combine: Callable, spec: str) -> str:
    """Combine the values that are finite into one, and format it."""
    values = list(filter(math.isfinite, values))
    return format(combine(values), spec) if values else "none"


def different_flags(runs: list[dict]) -> list[dict[str, str]]:
    """Return the cells of each run, given its flags, with those whose values differ."""
    cells = [{} for _ in runs]
    for name in sorted(set().union(*runs)):
        values = [str(flags.get(name)) for flags in runs]
        if len(set(values)) > 1:
            for of_run, value in zip(cells, values):
                of_run[f"`--{name}`"] = value
    return cells


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    ruler = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ruler, *rows))


# --------------------------------------------------------------------------------------------------
# Where two runs first differ


def differences(first: Log, log: Log, limit: float) -> dict[str, str]:
    """Return the cells of a run on where its losses and parameters first differ."""
    kinds = [("loss", first.losses, log.losses, 0)]
    kinds += [("parameter", first.statistics, log.statistics, GROWTH)]
    cells = {}
    for what, reference, other, growth in kinds:
        if reference:
            name = f"first {what} difference from {first.name} over {limit:g} (--tolerance)"
            found = first_difference(reference, other, limit, growth)
            cells[name] = "-" if log is first else found
    return cells


def first_difference(reference: Values, other: Values, limit: float, growth: float) -> str:
    """Describe the first step that both runs logged and in which a value differs by over `limit`.

    The difference must also exceed `growth` times the largest in earlier steps. If several values
    differ that much, describes the largest difference among those that a step computes first.
    """
    by_step = defaultdict(dict)  # step -> (of what, column) -> relative difference
    for key in reference.keys() & other.keys():
        for step in reference[key].keys() & other[key].keys():
            by_step[step][key] = relative_difference(reference[key][step], other[key][step])
    largest = 0.0  # in earlier steps
    for step, sizes in sorted(by_step.items()):
        beyond = []
        for (what, column), size in sizes.items():
            if size > max(limit, growth * largest):
                ratios = [values.get((what, "update_ratio"), {}) for values in (reference, other)]
                updates = sum(of_steps.get(step, math.inf) for of_steps in ratios)
                beyond.append((earliness(column, size, updates), size, what, column))
        if beyond:
            _, size, what, column = max(beyond)
            line = f"step {step}: {what} {column} by {size:.1g}"
            others = {each for _, _, each, _ in beyond} - {what}
            return f"{line}, and {len(others)} more" if others else line
        largest = max([largest, *sizes.values()])
    return f"never: at most {largest:.1g} in {len(by_step)} steps that both runs logged"


def earliness(column: str, size: float, updates: float) -> int:
    """Return a larger number for a difference in what a step computes earlier.

    updates    relative to the weights, of both runs
    """
    if column == "weight_norm" and size > updates:
        return 2  # the weights differed before the step
    return 1 if column.startswith("grad") else 0


# --------------------------------------------------------------------------------------------------
# Seeds


def table_of_settings(logs: list[Log]) -> str:
    """Return a table of means and spreads over seeds; empty if no setting has two seeds.

    A setting is the runs that ended with a finite loss and differ only in --seed and --out.
    """
    losses = defaultdict(dict)  # flags in JSON -> seed -> final validation loss
    for log in logs:
        if (loss := log.final_loss()) is not None:
            flags = json.dumps(log.flags | {"seed": None}, sort_keys=True)
            losses[flags][log.flags.get("seed")] = loss
    settings = {flags: by_seed for flags, by_seed in losses.items() if len(by_seed) > 1}
    if not settings:
        return ""
    first, *others = settings.values()
    rows = []
    for cells, by_seed in zip(different_flags(list(map(json.loads, settings))), settings.values()):
        cells["seeds"] = str(len(by_seed))
        cells["final validation loss, mean"] = f"{fmean(by_seed.values()):.4f}"
        cells["standard deviation"] = f"{stdev(by_seed.values()):.4f}"
        is_first = by_seed is first
        cells["from the first"] = "-" if is_first else verdict(first, by_seed, len(others))
        rows.append(list(cells.values()))
    return markdown_table(list(cells), rows)


def verdict(first: dict[int, float], other: dict[int, float], comparisons: int) -> str:
    """Describe whether the losses of two settings, {seed: loss}, differ by more than chance.

    Losses of seeds are nearly normal, so Student's t works even with three seeds. All
    `comparisons` share LEVEL (Bonferroni).
    """
    if first.keys() != other.keys():
        return "no verdict: both settings need finished runs with the same seeds"
    pairs = [other[seed] - first[seed] for seed in first]
    p = p_value(pairs)
    word = "not distinguishable"
    if p * comparisons < LEVEL:
        word = "larger than the spread of seeds"
    test = f"paired t test, n = {len(pairs)}, p = {p:.2g}"
    if comparisons > 1:
        test += f", x {comparisons} comparisons"
    return f"{fmean(pairs):+.4f}: {word} ({test})"


def p_value(pairs: list[float]) -> float:
    """Return the chance of a mean at least this far from 0 if the true mean is 0 (two-sided).

    With t = sqrt(df) tan(x), Student's t has a density in x proportional to cos(x)^(df - 1).
    """
    n = len(pairs)
    df = n - 1
    # t = mean / (stdev / sqrt(n)), so tan(x) = t / sqrt(df) = mean / spread
    spread = stdev(pairs) * math.sqrt(df / n)
    start = math.atan2(abs(fmean(pairs)), spread)
    angles = np.linspace(0, math.pi / 2, 100_000)
    density = np.cos(angles) ** (df - 1)
    tail = density[angles >= start].sum()
    return float(tail / density.sum())


# --------------------------------------------------------------------------------------------------
# The curves

PANELS = {  # column -> title
    "loss": "training loss",
    "val_loss": "validation loss",
    "grad_norm": "gradient norm",
    "tokens_per_second_per_device": "tokens/s per device",
    "gigabytes": "peak memory of a rank in GB",
}


def plot(logs: list[Log], file: Path) -> None:
    """Draw the curves of the runs, with a thin vertical line at each step where a run restarted."""
    from matplotlib import colormaps  # an optional package
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(15, 8), layout="constrained")
    *panels, for_legend = figure.subplots(2, 3, sharex=True).flat
    colours = colormaps["tab10"].colors
    if len(logs) > len(colours):
        colours = colormaps["turbo"](np.linspace(0, 1, len(logs)))
    for panel, (column, title) in zip(panels, PANELS.items()):
        for log, colour in zip(logs, colours):
            points = log.columns[column]
            marker = "." if len(points) < 30 else None  # a single evaluation is no line
            style = dict(color=colour, alpha=0.8, marker=marker, label=log.name)
            panel.plot(points.keys(), points.values(), **style)
            for start in log.starts[1:]:
                panel.axvline(start["step"], color=colour, linewidth=0.8)
        if column in ("loss", "val_loss", "grad_norm"):
            panel.set_yscale("log")
            panel.yaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())
        else:
            panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.set(title=title, xlabel="step")
        panel.tick_params(labelbottom=True)
        panel.grid(which="both", alpha=0.3)
    for_legend.axis("off")
    names = panels[0].get_legend_handles_labels()
    legend = for_legend.legend(*names, loc="upper left", ncols=1 + len(logs) // 20)
    legend.set_in_layout(False)  # many names would leave no place for the curves
    figure.savefig(file)


# --------------------------------------------------------------------------------------------------
# The command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = errors.Parser(prog="tools.compare", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, such as runs/a runs/b")
    help = "relative difference above which a loss or a parameter counts as different (default: "
    help += "0.01)"
    add("--tolerance", type=errors.number(float, 0.0), default=1e-2, metavar="T", help=help)
    help = "also draw the curves in a picture (.png, .svg or .pdf); needs matplotlib"
    add("--plot", type=Path, metavar="FILE", help=help)
    args = parser.parse_args(argv)
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot {args.plot}: the name must end in .png, .svg or .pdf")
    return args


def run(argv: list[str]) -> None:
    args = parse(argv)
    names = [Path(folder).resolve().name for folder in args.runs]
    if len(set(names)) < len(names):
        names = args.runs
    logs = [read_run(Path(folder), name) for folder, name in zip(args.runs, names)]
    ranked = logs
    if len(logs) > MOST_COLUMNS:
        ranked = sorted(logs, key=lambda log: log.final_loss() or math.inf)
    print(table_of_runs(ranked, args.tolerance))
    if over_seeds := table_of_settings(logs):
        print(f"\n{over_seeds}")
    if args.plot:
        plot(logs, args.plot)


def main(argv: list[str]) -> int:
    return errors.execute("tools.compare", run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
