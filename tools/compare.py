"""Compare runs by their logs: an A/B test, seeds, a sweep, or the same run on two meshes.

python -m tools.compare runs/norm runs/adaptive
python -m tools.compare runs/* --sort lr --csv runs.csv --x lr --plot lr.png
python -m tools.compare runs/single runs/fsdp --tolerance 1e-3
"""

import argparse
import csv
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, stdev, variance

import numpy as np

import config as train_config
from metrics import read_log
from runtime import cli
from runtime.cli import UsageError

# Relative difference that counts as rounding: 8 float32 steps of 1.2e-7. In float32 the losses of
# single, ddp, fsdp and tp stay within 2e-7 while their weights agree, and exceed 1e-6 once the
# weights have drifted apart, after a few dozen steps.
ROUNDING = 1e-6
# Rounding differences of parameters grow until they are as large as the values. With --model tiny
# in float32, single, fsdp, hsdp and tp differ in some column by at most 3e-6 in step 1, 5e-5 up to
# step 10, 5e-3 up to 20 and 0.8 up to 40. Above the default tolerance, they grew at most 12-fold
# between rows one step apart, 41-fold between rows ten apart (AMD EPYC Zen 4, 2026-11-22).
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
    config: dict  # the flags; {} if config.json is damaged
    training: list[dict]  # training rows, each with its "time" since the start of the run
    val: list[dict]  # evaluations, each with the "tokens" and the "time" of its step
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

        Interpolated linearly between the two evaluations around it.
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

    def ended_loss(self) -> float | None:
        """The final validation loss if the run has ended and the loss is finite."""
        at_end = [row for row in self.finite_val() if row["step"] == self.config.get("max_steps")]
        return at_end[-1]["val_loss"] if at_end else None


def warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def read(folder: str, name: str, warn: Callable[[str], None] = warn) -> Log:
    """Read a run folder; `warn` of what is not the log's. Raises UsageError if it is none."""
    run = Path(folder)
    for file in ("config.json", "metrics.jsonl"):
        if not (run / file).is_file():
            raise UsageError(f"{folder} has no {file}: it is not the folder of a started run")
    rows = read_log(run / "metrics.jsonl", warn)
    training, val = with_times(rows)
    if not training:
        raise UsageError(f"{folder} has no training row yet: let it run until its first one")
    losses = {row["step"]: {"training": {"loss": row["loss"]}} for row in training}
    parameters = {}
    for row in map(with_nan, read_log(run / "optim.jsonl", warn)):
        parameters.setdefault(row.pop("step"), {})[row.pop("parameter")] = row
    config = read_flags(run / "config.json", warn)
    return Log(name, config, training, val, {"loss": losses, "parameter": parameters}, rows)


def read_flags(file: Path, warn: Callable[[str], None]) -> dict:
    """The flags of a run, with the learning rate and warm-up in use where they were not given."""
    try:
        given = json.loads(file.read_bytes())
        known = {f.name for f in dataclasses.fields(train_config.Config)}
        c = train_config.Config(**{name: given[name] for name in known & given.keys()})
        resolved = train_config.resolve(c)
        in_use = {"lr": resolved.lr, "warmup_steps": resolved.warmup_steps}
        return given | {name: in_use[name] for name in in_use.keys() & given.keys()}
    except (AttributeError, TypeError, ValueError) as error:
        warn(f"{file} is damaged, so that its flags are not known: {error}")
        return {}


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
            at = training[step]
            val.append(row | {"tokens": at["tokens"], "time": at["time"]})
    return list(training.values()), val


# --------------------------------------------------------------------------------------------------
# The table


def table(logs: list[Log], loss: float | None, tolerance: float) -> str:
    """A Markdown table with a row for each quantity and a column for each run.

    Reports the time to validation loss `loss`, and the first training losses that differ by more
    than `tolerance`, relatively. The flags that differ between runs come last.
    """
    rows = [[column.name, *column.cells()] for column in quantities(logs, loss)]
    if len(logs) > 1:
        rows.append(differences(logs, "loss", ROUNDING, "rounding"))
        rows.append(differences(logs, "loss", tolerance, "--tolerance"))
        if logs[0].values["parameter"]:
            rows.append(differences(logs, "parameter", tolerance, "--tolerance"))
    return markdown_table(["", *(log.name for log in logs)], rows + different_flags(logs))


@dataclass(frozen=True)
class Column:
    """A quantity of every run; a row in the table of a few runs."""

    name: str
    values: list  # numbers, or text if a run has none; for a flag, as given
    spec: str = ""  # format of a number
    best: Callable | None = None  # min or max, in bold unless all are equal

    @property
    def title(self) -> str:
        return self.name.strip("`-")

    def cells(self) -> list[str]:
        texts = [v if isinstance(v, str) else format(v, self.spec) for v in self.values]
        numbers = [value for value in self.values if is_finite(value)]
        if self.best and numbers and len(set(texts)) > 1:
            best = self.best(numbers)
            texts = [f"**{t}**" if value == best else t for t, value in zip(texts, self.values)]
        return texts

    def order(self) -> list[int]:
        """The runs by value: the best (else the lowest) first, text and nan last."""
        sign = -1 if self.best is max else 1
        keys = [(0, sign * v) if is_finite(v) else (1, str(v)) for v in self.values]
        return sorted(range(len(keys)), key=keys.__getitem__)


def is_finite(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def quantities(logs: list[Log], loss: float | None) -> list[Column]:
    """What each run reached; `loss` as in `table`."""
    tokens = min(log.training[-1]["tokens"] for log in logs)

    def column(name: str, value_of: Callable[[Log], float | str], *more) -> Column:
        return Column(name, [value_of(log) for log in logs], *more)

    columns = [
        column("final validation loss", Log.final_val_loss, ".4f", min),
        column("best validation loss", Log.best_val_loss, ".4f", min),
        column(f"training loss at {tokens:,} tokens", lambda log: log.loss_at(tokens), ".4f", min),
        column("tokens per second, median", Log.tokens_per_second, ",.0f", max),
        column("steps clipped, of those logged", Log.clipped, ".1%"),
        column("steps skipped", Log.skipped, ".1%"),
    ]
    reached = [log.best_val_loss() for log in logs if log.finite_val()]
    loss = loss or max(reached, default=None)  # the lowest that all runs reached
    if loss is not None:
        name = f"seconds to validation loss {loss:.4f}"
        columns.insert(3, column(name, lambda log: log.time_to(loss), ",.1f", min))
    return columns


def table_of_many(columns: list[Column], sort: str) -> str:
    """A Markdown table, a row per run, sorted by the column whose title starts with `sort`."""
    titles = {column.title: column for column in columns}
    found = [title for title in titles if title.startswith(sort)]
    if not found:
        raise UsageError(f"--sort {sort}: the columns are {', '.join(titles)}")
    order = titles[sort if sort in titles else found[0]].order()
    rows = list(zip(*(column.cells() for column in columns)))
    return markdown_table([column.name for column in columns], [rows[run] for run in order])


def write_csv(columns: list[Column], file: str) -> None:
    """Write a row per run, with all digits."""
    titles = [column.title for column in columns]
    with open(file, "w", newline="") as opened:
        csv.writer(opened).writerows([titles, *zip(*(column.values for column in columns))])


def differences(logs: list[Log], what: str, limit: float, reason: str) -> list[str]:
    """A row: where the values of each run first differ from the first run's."""
    reference, *others = (log.values[what] for log in logs)
    growth = GROWTH if what == "parameter" else 0
    name = f"first {what} difference from {logs[0].name} over {limit:g} ({reason})"
    return [name, "-", *(first_difference(reference, other, limit, growth) for other in others)]


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
        largest = max([largest, *(difference for _, difference, *_ in found)])
    if not common:
        return "no logged step in common"
    how = f"by at most {largest:.1g}" if largest else "equal"
    return f"never, {how} in {len(common):,} logged steps in common"


def differences_of_step(a_rows: dict, b_rows: dict) -> Iterator[tuple[int, float, str, str]]:
    """(place in the step, relative difference, name, column) of each value in both runs."""
    for name in a_rows.keys() & b_rows.keys():
        a, b = a_rows[name], b_rows[name]
        for column in a.keys() & b.keys() - {"clipped"}:  # near the limit, rounding decides it
            difference = relative_difference(a, b, column)
            # Weights that differ by more than their updates come first, then gradients.
            updates = sum(row.get("update_ratio", math.inf) for row in (a, b))
            is_old = column == "weight_norm" and difference > updates
            yield 2 * is_old + column.startswith("grad"), difference, name, column


def relative_difference(a: dict, b: dict, column: str) -> float:
    """A mean or an extreme, which may be near 0, is compared to the largest element."""
    x, y = a[column], b[column]
    if math.isnan(x) or math.isnan(y):  # elsewhere nan is a slot the optimizer lacks
        is_one = math.isnan(x) != math.isnan(y) and column in ("loss", "grad_norm")
        return math.inf if is_one else 0.0
    kind, _, statistic = column.rpartition("_")
    is_element = statistic in ("mean", "max", "min")
    sizes = {column, f"{kind}_max", f"{kind}_min"} if is_element else {column}
    scale = max(abs(row[size]) for row in (a, b) for size in sizes & row.keys())
    return abs(x - y) / scale if scale else 0.0


def different_flags(logs: list[Log]) -> list[list[str]]:
    """A row for each flag that differs between runs, except --out, which always does."""
    return [[column.name, *column.cells()] for column in flag_columns(logs)]


def flag_columns(logs: list[Log], *left_out: str) -> list[Column]:
    """The flags that differ between runs."""
    flags = set().union(*(log.config for log in logs)) - {"out", *left_out}
    columns = [Column(f"`--{flag}`", [log.config.get(flag) for log in logs]) for flag in flags]
    different = [column for column in columns if len(set(map(str, column.values))) > 1]
    return sorted(different, key=lambda column: column.name)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --------------------------------------------------------------------------------------------------
# Seeds


def group(logs: list[Log], *flags: str) -> list[list[Log]]:
    """Groups of runs that differ only in these flags and --out, in order of first appearance."""
    groups: dict[str, list[Log]] = {}
    for log in logs:
        same = {flag: log.config[flag] for flag in log.config.keys() - {"out", *flags}}
        groups.setdefault(json.dumps(same, sort_keys=True), []).append(log)
    return list(groups.values())


def seeds_table(logs: list[Log]) -> str:
    """Each setting's mean and spread over seeds, against the first; empty if none has two."""
    settings = group(logs, "seed")
    losses = [{log.config.get("seed"): log.ended_loss() for log in each} for each in settings]
    if max(map(len, losses)) < 2:
        return ""
    flags = flag_columns([setting[0] for setting in settings], "seed")
    header = ["seeds", "final validation loss, mean", "standard deviation", "from the first"]
    comparisons = sum(len(found) > 1 for found in losses[1:])
    rows = []
    for i, setting in enumerate(settings):
        found = [loss for loss in losses[i].values() if loss is not None]
        count = f"{len(found)}" if len(found) == len(setting) else f"{len(found)} of {len(setting)}"
        mean = format(fmean(found), ".4f") if found else "none yet"
        spread = format(stdev(found), ".4f") if len(found) > 1 else "-"
        word = verdict(losses[0], losses[i], comparisons) if i else "-"
        rows.append([*(column.cells()[i] for column in flags), count, mean, spread, word])
    return markdown_table([*(column.name for column in flags), *header], rows)


def verdict(first: dict[int, float], other: dict[int, float], comparisons: int) -> str:
    """Whether two settings differ by more than their seeds do, in words.

    Means of n losses are nearly normal, so Student's t works even with three seeds, where a
    permutation test cannot reach p < 0.1. `comparisons` share LEVEL (Bonferroni).
    """
    if None in (*first.values(), *other.values()):
        return "no word: a run has not ended, or not with a finite loss"
    if min(len(first), len(other)) < 2:
        return "no word: it takes two seeds of each"
    name, p = t_test(first, other)
    difference = fmean(other.values()) - fmean(first.values())
    is_large = p * comparisons < LEVEL
    word = "larger than the spread of seeds" if is_large else "not distinguishable"
    shared = f", x {comparisons} comparisons" if comparisons > 1 else ""
    return f"{difference:+.4f}: {word} ({name}, p = {p:.2g}{shared})"


def t_test(a: dict[int, float], b: dict[int, float]) -> tuple[str, float]:
    """The test with its n, and its two-sided p; paired if both have the same seeds."""
    if a.keys() == b.keys():
        n = len(a)
        pairs = [b[seed] - a[seed] for seed in a]
        return f"paired t test, n = {n}", p_value(fmean(pairs), variance(pairs) / n, n - 1)
    x, y = a.values(), b.values()
    u, v = variance(x) / len(x), variance(y) / len(y)  # of the means
    df = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1) or 1)  # Welch 1947
    name = f"Welch's t test, n = {len(x)} and {len(y)}"
    return name, p_value(fmean(y) - fmean(x), u + v, df)


def p_value(difference: float, squared_error: float, df: float) -> float:
    """The chance of a difference at least this large, either way, if there is none.

    With t = sqrt(df) tan(x), the density of Student's t is cos(x)^(df - 1) over its integral.
    """
    if squared_error == 0:
        return float(difference == 0)
    start = math.atan(abs(difference) / math.sqrt(squared_error * df))
    width = math.pi / 2 - start
    x = start + width * (np.arange(1000) + 0.5) / 1000
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(df / 2) - math.lgamma((df + 1) / 2))
    return float(2 * width * np.mean(np.cos(x) ** (df - 1)) / whole)


# --------------------------------------------------------------------------------------------------
# Plots


def import_pyplot():
    """matplotlib's pyplot, without a display. Raises UsageError."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_sweep(logs: list[Log], flag: str, file: str) -> None:
    """Plot final validation losses against a flag: a point per run, a line through means.

    Runs that differ in flags other than --seed get separate lines. Raises UsageError.
    """
    if not any(flag in log.config for log in logs):
        raise UsageError(f"--x {flag}: no run has this flag")
    values = [log.config.get(flag) for log in logs]
    is_number = all(is_finite(value) and not isinstance(value, bool) for value in values)
    pyplot = import_pyplot()
    figure, axes = pyplot.subplots(layout="constrained")
    lines = group(logs, "seed", flag)
    others = flag_columns([line[0] for line in lines], "seed", flag)
    for i, line in enumerate(lines):
        points: dict = {}
        for log in line:
            if is_finite(loss := log.final_val_loss()):
                value = log.config.get(flag)
                points.setdefault(value if is_number else str(value), []).append(loss)
        x = sorted(points)
        label = " ".join(f"{column.title} {column.cells()[i]}" for column in others)
        axes.plot(x, [fmean(points[value]) for value in x], color=f"C{i}", label=label)
        for value in x:
            axes.plot([value] * len(points[value]), points[value], "o", color=f"C{i}", alpha=0.5)
    if is_number and min(values) > 0 and max(values) >= 8 * min(values):
        axes.set_xscale("log")
    if others:
        axes.legend()
    axes.set_xlabel(flag)
    axes.set_ylabel("final validation loss, and its mean over seeds")
    figure.savefig(file, dpi=150)


# --------------------------------------------------------------------------------------------------
# The command line


def positive_number(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return number


def file_ending_in(*suffixes: str) -> Callable[[str], str]:
    """A type for argparse."""

    def check(text: str) -> str:
        if not text.lower().endswith(suffixes):
            raise argparse.ArgumentTypeError(f"{text} must end in {', '.join(suffixes)}")
        return text

    return check


plot_file = file_ending_in(".png", ".pdf", ".svg")


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
        help="plot final validation losses against --x (needs matplotlib); .pdf and .svg work too",
    )
    parser.add_argument("--x", metavar="FLAG", help="the flag of --plot, such as lr")
    parser.add_argument(
        "--sort",
        metavar="COLUMN",
        help="one run a row, in the order of the first column that begins like this, such as lr "
        f"(default: for more than {MOST_COLUMNS} runs, final validation loss)",
    )
    parser.add_argument(
        "--csv", type=file_ending_in(".csv"), metavar="FILE.csv", help="also write one run a row"
    )
    args = parser.parse_args(argv)
    if bool(args.x) != bool(args.plot):
        raise UsageError("--x FLAG and --plot FILE.png go together; tools.report draws single runs")
    return args


def compare(argv: list[str]) -> None:
    args = parse(argv)
    logs = [read(folder, name) for folder, name in zip(args.runs, names(args.runs))]
    columns = [Column("run", [log.name for log in logs])]
    columns += quantities(logs, args.loss) + flag_columns(logs)
    if args.sort or len(logs) > MOST_COLUMNS:
        text = table_of_many(columns, args.sort or "final validation loss")
    else:
        text = table(logs, args.loss, args.tolerance)
    if args.x:
        plot_sweep(logs, args.x, args.plot)
    if args.csv:
        write_csv(columns, args.csv)
    print(text)
    if over_seeds := seeds_table(logs):
        print(f"\n{over_seeds}")


def names(folders: list[str]) -> list[str]:
    """The folders' names, or their paths if two share a name."""
    short = [Path(folder).resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else folders


def main(argv: list[str]) -> int:
    return cli.execute("tools.compare", lambda: compare(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
