"""Draw runs as one HTML page, from their logs: charts, a time line, and what ran where.

python -m tools.report runs/tiny --follow
python -m tools.report runs/norm runs/adaptive --out ab.html

The page is self-contained: it opens anywhere and loads nothing from a network.
"""

import argparse
import contextlib
import html
import json
import math
import re
import sys
import time
from datetime import datetime, timedelta
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
    """Return the steps and the values of a series for JSON."""
    kept = thin(values, max_points)
    return [[steps[i] for i in kept], [rounded(values[i]) for i in kept]]


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


def time_line(phases_of: dict[str, list[list]]) -> str:
    """Return a bar for each run, whose parts are its phases. All bars have the same scale."""
    longest = max(total(found) for found in phases_of.values()) or 1
    lines = []
    for name, found in phases_of.items():
        parts = []
        for seconds, cause in found:
            style = f"width:{100 * seconds / longest:.4g}%;background:{color_of(cause)}"
            parts.append(f'<i style="{style}" title="{cause}, {seconds:,.5g} s"></i>')
        took = timedelta(seconds=round(total(found)))
        lines.append(f"{html.escape(name)}, {took}<div class=line>{''.join(parts)}</div>")
    return "".join(lines)


def cause_rows(phases_of: dict[str, list[list]]) -> list[list]:
    """Return rows of a table: the seconds of each cause and their share, by run."""
    rows = [["", *phases_of]]
    every = [cause for found in phases_of.values() for _, cause in found]
    for cause in dict.fromkeys(every):
        cells = []
        for found in phases_of.values():
            seconds = sum(took for took, other in found if other == cause)
            share = seconds / (total(found) or 1)
            cells.append(f"{seconds:,.1f} s, {share:.1%}" if seconds else "")
        rows.append([cause, *cells])
    return rows


def total(found: list[list]) -> float:
    return sum(seconds for seconds, _ in found)


def color_of(cause: str) -> str:
    return f"var(--{cause.split()[0]})"  # for "lost steps": --lost


# --------------------------------------------------------------------------------------------------
# Tables


def card(title: str, content: str, is_wide: bool = False) -> str:
    return f"<section{' class=wide' * is_wide}><h2>{title}</h2>{content}</section>\n"


def table(rows: list[list], chips: bool = False) -> str:
    """Return a table. Its first row is bold, and so is a cell in Markdown's asterisks.

    `chips` puts the color of a cause before it, in the first column.
    """
    lines = []
    for number, cells in enumerate(rows):
        line = ""
        for place, cell in enumerate(cells):
            text = "" if cell is None else str(cell)
            tag = "th" if number == 0 or "**" in text else "td"
            chip = ""
            if chips and number > 0 and place == 0:
                chip = f'<span class=chip style="background:{color_of(text)}"></span>'
            line += f"<{tag}>{chip}{html.escape(text.strip('|*` '))}</{tag}>"
        lines.append(f"<tr>{line}</tr>")
    return f"<div class=scroll><table>{''.join(lines)}</table></div>"


def start_rows(logs: list[Log]) -> list[list]:
    titles = ["run", "start", "from step", "host", "device", "ranks", "strategy", "dtype"]
    rows = [[*titles, "flags changed"]]
    for log in logs:
        before = log.starts[0]["config"]
        for start in log.starts:
            config = start["config"]
            changes = [
                f"--{flag} {before.get(flag)} -> {value}"
                for flag, value in config.items()
                if value != before.get(flag)
            ]
            place = [start.get(name) for name in ("step", "host", "device", "ranks")]
            layout = [config.get("strategy"), config.get("dtype"), ", ".join(changes)]
            rows.append([log.name, start["time"][:19].replace("T", " "), *place, *layout])
            before = config
    return rows


def save_rows(logs: list[Log]) -> list[list]:
    rows = [["run", "step", "MB", "s", "s that training waited for it"]]
    for log in logs:
        for row in [row for row in log.rows if "event" in row][-20:]:
            cells = [f"NOT SAVED: {row.get('error')}"]
            if row["event"] == "checkpoint":
                seconds = (row["seconds"], row["blocking_seconds"])
                cells = [f"{row['bytes'] / 1e6:,.5g}", *(f"{value:.4g}" for value in seconds)]
            rows.append([log.name, row["step"], *cells])
    return rows


def tables(logs: list[Log]) -> str:
    """Return the cards below the charts."""
    names = [log.name for log in logs]
    phases_of = {log.name: phases(log.rows, log.starts) for log in logs}
    flags = dict.fromkeys(flag for log in logs for flag in log.config)
    all_flags = [["", *names]]
    for flag in flags:
        all_flags.append([f"--{flag}", *(log.config.get(flag) for log in logs)])
    compared = [*zip(*compare(logs, tolerance=1e-2))]
    details = f"<details><summary>All flags</summary>{table(all_flags)}</details>"
    return "".join(
        [
            card("Time line since the first start", time_line(phases_of), is_wide=True),
            card("Where the time went", table(cause_rows(phases_of), chips=True)),
            card("Compared", table(compared), is_wide=len(logs) > 1),
            card("What ran where", table(start_rows(logs)), is_wide=True),
            card("Last saves", table(save_rows(logs))),
            f"<section>{details}</section>",
        ]
    )


# --------------------------------------------------------------------------------------------------
# The page


def charted(log: Log, max_points: int) -> dict:
    """Return what the charts show of one run, with at most max_points of each series."""
    series = {}
    for name, (steps, values) in series_of(log).items():
        # Leave out unknown values, and the device memory of a run on CPUs
        if any(value and math.isfinite(value) for value in values):
            series[name] = encode(steps, values, max_points)
    last = log.training[-1]
    return {
        "name": log.name,
        "tokensPerStep": last["tokens"] / last["step"],
        "series": series,
        "saved": [row["step"] for row in log.rows if row.get("event") == "checkpoint"],
        "restarts": [start["step"] for start in log.starts[1:]],
    }


def about(logs: list[Log], max_points: int, follow: bool) -> str:
    lines = [f"Drawn {datetime.now().astimezone().isoformat(' ', 'seconds')}."]
    for log in logs:
        if (rows := len(log.training)) > max_points:
            lines.append(
                f"{log.name}: {rows:,} rows, thinned to the smallest and the largest value of "
                f"every {math.ceil(rows / (max_points // 2))} rows."
            )
    if follow:
        lines.append(
            "The run continues: the page reloads itself, except while the pointer is on a chart."
        )
    return " ".join(lines)


def write(folders: list[str], out: Path, follow: bool) -> list[Log]:
    """Write the page, in ASCII, atomically; return the logs that it shows.

    Raises UsageError if a run cannot be read.
    """
    logs = read_all(folders)
    max_points = MAX_POINTS // len(logs)
    data = {
        "reloadSeconds": FOLLOW_SECONDS if follow else 0,
        "runs": [charted(log, max_points) for log in logs],
    }
    script = json.dumps(data, separators=(",", ":"))
    parts = {
        "/* uPlot.css */": (UPLOT / "uPlot.min.css").read_text(),
        "/* uPlot.js */": (UPLOT / "uPlot.iife.min.js").read_text(),
        "/* data */": script.replace("<", "\\u003c"),  # no name can end the script
        "<!-- title -->": html.escape(", ".join(log.name for log in logs)),
        "<!-- about -->": html.escape(about(logs, max_points, follow)),
        "<!-- tables -->": tables(logs),
    }
    # In one pass, since a name may look like a placeholder
    pattern = "|".join(map(re.escape, parts))
    page = re.sub(pattern, lambda found: parts[found[0]], TEMPLATE.read_text())
    replace_file(out, page.encode("ascii", "xmlcharrefreplace").decode())
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


def is_page(file: Path) -> bool:
    """Whether a file is a page that may be written again."""
    with open(file, "rb") as page:
        return b'content="nanoshard tools.report"' in page.read(300)


def report(argv: list[str]) -> None:
    args = parse(argv)
    if args.out.exists() and not is_page(args.out):
        raise UsageError(
            f"--out {args.out} exists and is not a page of tools.report: choose another"
        )
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
