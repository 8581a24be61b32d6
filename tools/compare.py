"""Compare runs by their logs: A/B tests, seeds, sweeps, or one run on two meshes.

python -m tools.compare runs/norm runs/adaptive
python -m tools.compare runs/*
python -m tools.compare runs/single runs/fsdp --tolerance 1e-3
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

import errors
from tools.measuring.runs import Log, compare, different_flags, read_all
from tools.measuring.tables import markdown_table, positive_number

MOST_COLUMNS = 6  # with more runs, each run is a row
LEVEL = 0.05  # chance that at least one comparison in a table finds equal settings different

# --------------------------------------------------------------------------------------------------
# Seeds


@dataclass
class Setting:
    """Runs that ended with a finite loss and differ only in --seed and --out."""

    log: Log  # of one of them
    losses: dict[int, float]  # seed -> final validation loss


def seeds_table(logs: list[Log]) -> str:
    """Return a table of means and spreads over seeds; empty if no setting has two seeds."""
    settings = settings_of(logs)
    if not settings:
        return ""
    first, *others = settings
    flags = different_flags([setting.log for setting in settings], {"out", "seed"})
    rows = []
    for cells, setting in zip(flags, settings):
        losses = setting.losses.values()
        cells["seeds"] = str(len(losses))
        cells["final validation loss, mean"] = f"{fmean(losses):.4f}"
        cells["standard deviation"] = f"{stdev(losses):.4f}"
        cells["from the first"] = "-"
        if setting is not first:
            cells["from the first"] = verdict(first.losses, setting.losses, len(others))
        rows.append(list(cells.values()))
    return markdown_table(list(cells), rows)


def settings_of(logs: list[Log]) -> list[Setting]:
    """Return the settings with at least two seeds, in order of first appearance."""
    found: dict[str, Setting] = {}
    for log in logs:
        same = {**log.config, "out": None, "seed": None}
        key = json.dumps(same, sort_keys=True)
        loss = log.ended_loss()
        if loss is not None:
            setting = found.setdefault(key, Setting(log, {}))
            setting.losses[log.config.get("seed")] = loss
    return [setting for setting in found.values() if len(setting.losses) > 1]


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
# The command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = errors.Parser(prog="tools.compare", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, such as runs/a runs/b")
    help = "relative difference above which a loss or a parameter counts as different (default: "
    help += "0.01)"
    add("--tolerance", type=positive_number, default=1e-2, metavar="T", help=help)
    return parser.parse_args(argv)


def run(argv: list[str]) -> int:
    args = parse(argv)
    logs = read_all(args.runs)
    if len(logs) > MOST_COLUMNS:
        by_loss = sorted(logs, key=lambda log: log.ended_loss() or math.inf)
        header, *rows = compare(by_loss, args.tolerance)
    else:
        header, *rows = zip(*compare(logs, args.tolerance))
    print(markdown_table(header, rows))
    if over_seeds := seeds_table(logs):
        print(f"\n{over_seeds}")
    return 0


def main(argv: list[str]) -> int:
    return errors.execute("tools.compare", run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
