"""Draw runs as one HTML page, from their logs: charts, a time line, and what ran where.

python -m tools.report runs/tiny --follow
python -m tools.report runs/norm runs/adaptive --out ab.html

The page is self-contained: it opens anywhere and loads nothing from a network.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import errors
from errors import UsageError
from log import replace_file
from tools.measuring.runs import Log, compare, read_all

TEMPLATE = Path(__file__).with_suffix(".html")
# uPlot 1.6.32 from npm. It draws thousands of points on a canvas, where SVG needs an element for
# each, and brings zoom and the values under the pointer, in 51 kB.
UPLOT = Path(__file__).parent / "uplot"
MAX_POINTS = 2000  # of a series, over all runs together
FOLLOW_SECONDS = 5  # between updates of --follow
# Fields of training rows that are drawn unchanged
FIELDS = ["loss", "lr", "grad_norm", "tokens_per_second", "mfu"]
FIELDS += ["peak_device_memory", "peak_host_memory", "time"]

# --------------------------------------------------------------------------------------------------
# Series


def series_of(log: Log) -> dict[str, tuple[list, list]]:
    """Return the steps and values of each series, by name; non-finite values are nan."""
    found = {}

    def add(name: str, step: int, value: float) -> None:
        steps, values = found.setdefault(name, ([], []))
        steps.append(step)
        values.append(value)

    previous_step = log.training[0]["step"] - 1  # the first row covers one step
    skipped = 0
    for row in log.training:
        step = row["step"]
        for name in FIELDS:
            add(name, step, row.get(name, math.nan))
        took = (step - previous_step) * row["step_time"]
        for name in ("data_wait", "data_wait_min"):  # seconds since the previous row
            add(name, step, row.get(name, math.nan) / took)
        if row["clipped"]:
            add("clipped", step, row["grad_norm"])
        if row["skipped_steps"] > skipped:
            add("skipped", step, row["skipped_steps"] - skipped)
        previous_step = step
        skipped = row["skipped_steps"]
    for row in log.val:
        add("val_loss", row["step"], row["val_loss"])
    steps, losses = found["loss"]
    found["smoothed"] = steps, smooth(losses)
    return found


def smooth(values: list[float]) -> list[float]:
    """Return a moving mean of finite values, over about a thirtieth of the series."""
    weight = 1 / max(1, len(values) / 30)
    smoothed = []
    mean = next(filter(math.isfinite, values), math.nan)
    for value in values:
        if math.isfinite(value):
            mean += weight * (value - mean)
        smoothed.append(mean)
    return smoothed


def thin(values: list[float], max_points: int) -> list[int]:
    """Return the indices of at most max_points values: all, or the extremes of each bucket."""
    n = len(values)
    if n <= max_points:
        return list(range(n))
    size = math.ceil(n / (max_points // 2))
    kept = []
    for start in range(0, n, size):
        bucket = range(start, min(start + size, n))
        finite = [i for i in bucket if math.isfinite(values[i])] or bucket[:1]
        kept += sorted({min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)})
    return kept


def encode(steps: list[int], values: list[float], max_points: int) -> list[list]:
    """Return a series for JSON: the differences between its steps, and its values."""
    kept = thin(values, max_points)
    kept_steps = [0, *(steps[i] for i in kept)]
    differences = [b - a for a, b in pairwise(kept_steps)]
    return [differences, [rounded(values[i]) for i in kept]]


def rounded(value: float) -> float | None:
    """Round to five digits; None if the value is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None


# --------------------------------------------------------------------------------------------------
# The time line


def phases(rows: list[dict], starts: list[dict]) -> list[list]:
    """Return [seconds, cause] of each phase of a run.

    `rows` and `starts` are those of a Log. A row was written at the end of what it reports.
    """
    events = sorted([*starts, *rows], key=lambda event: event["at"])
    saved = {row["step"] for row in rows if "event" in row}
    typical = median(row["step_time"] for row in rows if "loss" in row)
    compiles = False
    previous = None  # the last training row of this start
    pause = "starting"  # the cause of a pause before the next step, if any
    ends = []
    for event in events:
        ended = event["at"]
        if "config" in event:  # a start, which drops the rows after its checkpoint
            if event["last_at"] is not None:
                ends.append((event["last_at"], "lost steps"))
            ends.append((ended, "waiting"))
            compiles, previous, pause = event["config"]["compile"], None, "starting"
            continue
        # A saved step is followed by its save, although --async_save logs the save later.
        following = "saving" if event["step"] in saved else None
        if "loss" not in event:
            cause = "evaluating" if "val_loss" in event else "saving"
            ends.append((ended, cause))
            pause = following or cause
            continue
        if pause:
            steps = event["step"] - previous["step"] if previous else 1
            ends.append((ended - steps * event["step_time"], pause))
        if compiles and not previous:
            ends.append((ended - typical, "compiling"))
        ends.append((ended, "training"))
        previous, pause = event, following
    return durations(ends)


def durations(ends: list[tuple[float, str]]) -> list[list]:
    """Return [seconds, cause] of each phase; neighbours with the same cause are joined.

    `ends` starts with the first start. Drops phases that end before their predecessor.
    """
    found = []
    began, _ = ends[0]
    for end, cause in ends:
        if end <= began:
            continue
        if found and found[-1][1] == cause:
            found[-1][0] += end - began
        else:
            found.append([end - began, cause])
        began = end
    return found


# --------------------------------------------------------------------------------------------------
# The page


def describe(log: Log, max_points: int) -> dict:
    """Return all that the page shows for one run, with at most max_points of each series."""
    series = {}
    for name, (steps, values) in series_of(log).items():
        # Leave out unknown values, and the device memory of a run on CPUs
        if any(value and math.isfinite(value) for value in values):
            series[name] = encode(steps, values, max_points)
    last = log.training[-1]
    saves = [row for row in log.rows if "event" in row]
    return {
        "name": log.name,
        "rows": len(log.training),
        "tokensPerStep": last["tokens"] / last["step"],
        "series": series,
        "saved": [row["step"] for row in saves if row["event"] == "checkpoint"],
        "phases": [[round(seconds, 2), cause] for seconds, cause in phases(log.rows, log.starts)],
        "config": log.config,
        "starts": log.starts,
        "saves": saves[-20:],
    }


def write(folders: list[str], out: Path, follow: bool) -> list[Log]:
    """Write the page, in ASCII, atomically; return the logs that it shows.

    Raises UsageError if a run cannot be read.
    """
    logs = read_all(folders)
    max_points = MAX_POINTS // len(logs)
    data = {
        "made": datetime.now().astimezone().isoformat(" ", "seconds"),
        "reloadSeconds": FOLLOW_SECONDS if follow else 0,
        "maxPoints": max_points,
        "runs": [describe(log, max_points) for log in logs],
        "compared": list(zip(*compare(logs, tolerance=1e-2))),
    }
    page = TEMPLATE.read_text()
    page = page.replace("/* uPlot.css */", (UPLOT / "uPlot.min.css").read_text())
    page = page.replace("/* uPlot.js */", (UPLOT / "uPlot.iife.min.js").read_text())
    script = json.dumps(data, separators=(",", ":"))
    page = page.replace("/* data */", script.replace("<", "\\u003c"))  # no name can end the script
    replace_file(out, page)
    return logs


# --------------------------------------------------------------------------------------------------
# The command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = errors.Parser(prog="tools.report", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run folders, such as runs/a runs/b")
    help = "the page (default: report.html)"
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help=help)
    help = "rewrite the page every few seconds until the runs end, or Ctrl-C; in a browser, the "
    add("--follow", action="store_true", help=f"{help}page reloads itself")
    return parser.parse_args(argv)


def report(argv: list[str]) -> None:
    args = parse(argv)
    with contextlib.suppress(KeyboardInterrupt):  # the last page does not reload
        while args.follow and any((Path(run) / "lock").exists() for run in args.runs):
            began = time.monotonic()
            with contextlib.suppress(UsageError):  # before the first row, or after lost steps
                write(args.runs, args.out, follow=True)
            # At most 2% of a core, however long the logs are
            time.sleep(max(FOLLOW_SECONDS, 50 * (time.monotonic() - began)))
    for log in write(args.runs, args.out, follow=False):
        print(f"{log.name}: {log.goodput()}")
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB")


def main(argv: list[str]) -> int:
    return errors.execute("tools.report", report, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
