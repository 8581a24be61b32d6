"""Compare runs by their logs: which one is better, and where do two of them part?

python -m tools.compare runs/ddp runs/fsdp
python -m tools.compare runs/* --plot curves.png
python -m tools.compare runs/single runs/fsdp --tolerance 1e-3

Runs that differ only in --seed are one setting, and a second table compares settings.
"""

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

MOST_COLUMNS = 6  # with more runs, each run is a row, and the best comes first
LEVEL = 0.05  # chance that at least one comparison in a table finds equal settings different

Values = dict[str, dict[int, float]]  # of what -> step -> value


@dataclass(frozen=True)
class Log:
    """The log of a run, without the rows that a later start made void."""

    name: str
    starts: list[dict]  # rows
    columns: Values  # of metrics.jsonl
    losses: Values
    statistics: Values  # of parameters, from optim.jsonl

    @property
    def flags(self) -> dict:
        """The values of all flags at the last start, except --out, which always differs."""
        return self.starts[-1]["config"] | {"out": None}

    def final_loss(self) -> float:
        """Return the final validation loss; inf if the run has not ended or it is not finite."""
        loss = self.columns["val_loss"].get(self.flags.get("max_steps"), math.inf)
        return loss if math.isfinite(loss) else math.inf


def read_run(folder: Path, name: str) -> Log:
    """Read a run folder. Raises UsageError if it is not one, or has no training row."""
    columns, statistics = defaultdict(dict), defaultdict(dict)
    starts, rows = read_log(folder / "metrics.jsonl")
    for row in rows:
        if "loss" in row:  # its memory is that of the device, or without one, of the process
            row["peak_gigabytes"] = (row["peak_device_memory"] or row["peak_host_memory"]) / 1e9
        for column, value in row.items():
            columns[column][row["step"]] = value
    if not columns["loss"]:
        raise UsageError(f"{folder} has no training row yet: let it run until its first one")
    losses = {"training loss": columns["loss"], "validation loss": columns["val_loss"]}
    _, rows = read_log(folder / "optim.jsonl")
    for row in rows:
        # Near the clip limit, rounding decides whether a gradient is clipped.
        for column in row.keys() - {"step", "parameter", "clipped"}:
            statistics[f"{row['parameter']} {column}"][row["step"]] = row[column]
    return Log(name, starts, columns, losses, statistics)


# --------------------------------------------------------------------------------------------------
# The table of runs


def table_of_runs(logs: list[Log], tolerance: float) -> str:
    """Return a table of losses, speed and memory, of first differences, and of flags that differ.

    First differences are those from the first run by more than `tolerance` (relative).
    """
    if len(logs) > MOST_COLUMNS:
        logs = sorted(logs, key=Log.final_loss)
    tokens = min(max(log.columns["tokens"].values()) for log in logs)  # that all runs have seen
    rows = []
    for log, flags in zip(logs, different_flags([log.flags for log in logs])):
        cells = {"": log.name} | summary(log, tokens)
        cells |= differences(logs[0], log, tolerance) | flags
        rows.append(list(cells.values()))
    header = list(cells)
    if len(logs) <= MOST_COLUMNS:
        header, *rows = zip(header, *rows)
    return markdown_table(header, rows)


SUMMARY = [  # title, column, how its values become one, format
    ("best validation loss", "val_loss", min, ".4f"),
    ("tokens/s per device, median", "tokens_per_second_per_device", median, ",.0f"),
    ("MFU, median", "mfu", median, ".1%"),
    ("peak memory of a rank in GB", "peak_gigabytes", max, ".2f"),
    ("steps skipped", "skipped_steps", max, ",.0f"),
]


def summary(log: Log, tokens: int) -> dict[str, str]:
    """Return the cells of a run on its losses, speed, memory and ranks."""
    losses = []  # in the last tenth of `tokens`
    for step, loss in log.columns["loss"].items():
        if 0.9 * tokens < log.columns["tokens"][step] <= tokens:
            losses.append(loss)
    cells = {"final validation loss": formatted([log.final_loss()], fmean, ".4f")}
    cells[f"training loss at {tokens:,} tokens"] = formatted(losses, fmean, ".4f")
    for title, column, combine, spec in SUMMARY:
        cells[title] = formatted(log.columns[column].values(), combine, spec)
    return cells | {"ranks": str(log.starts[-1]["ranks"])}


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
    kinds = [("loss", first.losses, log.losses)]
    kinds += [("parameter", first.statistics, log.statistics)]
    cells = {}
    for kind, reference, other in kinds:
        if reference:
            name = f"first {kind} difference from {first.name} over {limit:g} (--tolerance)"
            cells[name] = "-" if log is first else first_difference(reference, other, limit)
    return cells


def first_difference(reference: Values, other: Values, limit: float) -> str:
    """Describe the largest difference in the first step in which one exceeds `limit`.

    Steps that only one of the runs logged do not count.
    """
    by_step = defaultdict(dict)  # step -> of what -> relative difference
    for what in reference.keys() & other.keys():
        for step in reference[what].keys() & other[what].keys():
            size = relative_difference(reference[what][step], other[what][step])
            by_step[step][what] = size
    for step, sizes in sorted(by_step.items()):
        what = max(sorted(sizes), key=sizes.get)
        if sizes[what] > limit:
            return f"step {step}: {what} by {sizes[what]:.1g}"
    largest = max((max(sizes.values()) for sizes in by_step.values()), default=0.0)
    return f"never: at most {largest:.1g} in {len(by_step)} steps that both runs logged"


# --------------------------------------------------------------------------------------------------
# Seeds


def table_of_settings(logs: list[Log]) -> str:
    """Return a table of means and spreads over seeds; empty if no setting has two seeds.

    A setting is the runs that ended with a finite loss and differ only in --seed and --out.
    """
    losses = defaultdict(dict)  # flags in JSON -> seed -> final validation loss
    for log in logs:
        if math.isfinite(log.final_loss()):
            flags = json.dumps(log.flags | {"seed": None}, sort_keys=True)
            losses[flags][log.flags.get("seed")] = log.final_loss()
    settings = {flags: by_seed for flags, by_seed in losses.items() if len(by_seed) > 1}
    if not settings:
        return ""
    first, *others = settings.values()
    verdicts = ["-", *(verdict(first, other, len(others)) for other in others)]
    flags = different_flags(list(map(json.loads, settings)))
    rows = []
    for cells, by_seed, word in zip(flags, settings.values(), verdicts):
        values = by_seed.values()
        spread = [f"{fmean(values):.4f}", f"{stdev(values):.4f}"]
        rows.append([*cells.values(), str(len(values)), *spread, word])
    titles = ["seeds", "final validation loss, mean", "standard deviation", "from the first"]
    return markdown_table([*cells, *titles], rows)


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

COLUMNS = ("loss", "val_loss", "grad_norm", "tokens_per_second_per_device", "peak_gigabytes")


def plot(logs: list[Log], file: Path) -> None:
    """Draw the curves of the runs, with a thin vertical line at each step where a run restarted."""
    from matplotlib import colormaps  # an optional package
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 8), layout="constrained")
    *panels, for_legend = figure.subplots(2, 3).flat
    colours = colormaps["turbo"](np.linspace(0.1, 0.9, len(logs)))
    for panel, column in zip(panels, COLUMNS):
        panel.set(title=column, xlabel="step")
        for log, colour in zip(logs, colours):
            points = log.columns[column]
            # The markers show a run that has a single evaluation.
            style = dict(color=colour, marker=".", markersize=3, label=log.name)
            panel.plot(points.keys(), points.values(), **style)
            for start in log.starts[1:]:
                panel.axvline(start["step"], color=colour, linewidth=0.8)
    for_legend.axis("off")
    names = panels[0].get_legend_handles_labels()
    for_legend.legend(*names, loc="upper left", ncols=1 + len(logs) // 16)
    figure.savefig(file)


# --------------------------------------------------------------------------------------------------
# The command line


def run(argv: list[str]) -> None:
    parser = errors.Parser(prog="tools.compare", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, such as runs/a runs/b")
    help = "relative difference above which values count as different (default: 0.01)"
    add("--tolerance", type=errors.number(float, 0.0), default=1e-2, metavar="T", help=help)
    help = "also draw the curves in a picture (.png, .svg or .pdf); needs matplotlib"
    add("--plot", type=Path, metavar="FILE", help=help)
    args = parser.parse_args(argv)
    if args.plot and args.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot {args.plot}: the name must end in .png, .svg or .pdf")
    names = [Path(folder).resolve().name for folder in args.runs]
    if len(set(names)) < len(names):
        names = args.runs
    logs = [read_run(Path(folder), name) for folder, name in zip(args.runs, names)]
    print(table_of_runs(logs, args.tolerance))
    if over_seeds := table_of_settings(logs):
        print(f"\n{over_seeds}")
    if args.plot:
        plot(logs, args.plot)


def main(argv: list[str]) -> int:
    return errors.execute("tools.compare", run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
