"""Compare runs by their logs: A/B tests, seeds, sweeps, or one run on two meshes or commits.

python -m tools.compare runs/norm runs/adaptive
python -m tools.compare runs/*
python -m tools.compare runs/single runs/fsdp --tolerance 1e-3
python -m tools.compare --commits HEAD . -- --strategy fsdp

The exit status of --commits is 1 if the numbers differ, so `git bisect run` can call it.
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

import numpy as np

import errors
from tools.measuring import commits
from tools.measuring.harness import temporary_folder
from tools.measuring.runs import (
    NEVER,
    Log,
    compare,
    differences,
    different_flags,
    read,
    read_all,
)
from tools.measuring.tables import markdown_table

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
# Commits


def compare_commits(args: argparse.Namespace) -> int:
    """Run the same steps on two commits, and print where their numbers first differ.

    Return the exit status, 1 if they do.
    """
    descriptions = [commits.describe(commit) for commit in args.commits]
    logs = []
    with temporary_folder("compare-") as folder:
        for number, (commit, description) in enumerate(zip(args.commits, descriptions)):
            print(f"running {description}", file=sys.stderr)
            path = folder / str(number)
            out = commits.run_steps(commit, args.nproc_per_node, args.flags, path)
            logs.append(read(out, commit))
        print(describe_pair(*logs, args.tolerance))
    return int(is_different(*logs, args.tolerance))


def is_different(first: Log, log: Log, limit: float) -> bool:
    """Whether a loss or a statistic that both runs logged differs: see `first_difference`."""
    found = differences(first, log, limit)
    return any(not text.startswith(NEVER) for text in found.values())


def describe_pair(first: Log, log: Log, tolerance: float) -> str:
    """Describe where the numbers of two commits first differ, what a step sends, and speeds."""
    logs = [first, log]
    if is_different(first, log, tolerance):
        header, *rows = zip(*compare(logs, tolerance))
        lines = [markdown_table(header, rows)]
    else:
        lines = [describe_equal(first, log, tolerance)]
    sent = [bytes_sent(each.folder) for each in logs]
    word = "differ" if sent[0] != sent[1] else "are equal"
    lines.append(f"the bytes that a step hands to torch {word}; speeds are not compared")
    for each, text in zip(logs, sent):
        speed = median(row["tokens_per_second"] for row in each.training)
        lines.append(f"{each.name}: {text}; {speed:,.0f} tokens/s")
    return "\n".join(lines)


def describe_equal(first: Log, log: Log, tolerance: float) -> str:
    """State that all values of two commits are equal, with the number of common parameters."""
    names = first.parameters() & log.parameters()
    parameters = errors.plural(len(names), "parameter")
    steps = errors.plural(len(log.training), "step")
    within = f"within {tolerance:g}" if tolerance else "bit for bit"
    return f"{first.name} and {log.name} are equal {within}: losses and {parameters} in {steps}"


def bytes_sent(run: Path) -> str:
    """Describe what rank 0 handed to torch in the step that --profile counted."""
    path = run / "profile/rank_0.json"
    if not path.exists():
        return "bytes not counted (--profile)"
    found = []
    for row in json.loads(path.read_text())["communicated"]:
        found.append(f"{row['bytes']:,} bytes of {row['kind']} over {row['axis']}")
    return ", ".join(sorted(found)) or "no bytes"


# --------------------------------------------------------------------------------------------------
# The command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = errors.Parser(prog="tools.compare", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run folders, such as runs/a runs/b")
    help = "run 20 steps on two commits; . is the working tree; flags of train.py follow after --"
    add("--commits", nargs=2, metavar=("A", "B"), help=help)
    help = "ranks of each run of --commits (default: 2)"
    add("--nproc_per_node", type=errors.number(int, 1), default=2, metavar="N", help=help)
    help = "relative difference above which a loss or a parameter counts as different (default: "
    help += "0.01; for commits: 0)"
    add("--tolerance", type=errors.positive_number, metavar="T", help=help)
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end], argparse.Namespace(flags=argv[end + 1 :]))
    if bool(args.runs) == bool(args.commits) or (args.runs and args.flags):
        parser.error("give RUN ..., or --commits A B [-- FLAGS]")
    if args.tolerance is None:
        args.tolerance = 1e-2 if args.runs else 0.0
    return args


def run(argv: list[str]) -> int:
    args = parse(argv)
    if args.commits:
        return compare_commits(args)
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
