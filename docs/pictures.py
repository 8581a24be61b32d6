"""Draw the pictures of docs/lecture.md from docs/pictures.json, or measure their data anew.

python docs/pictures.py                  # draw all into docs/pictures/
python docs/pictures.py --measure 3 4    # first run the commands of chapters 3 and 4 (none: all)
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
ROOT = DOCS.parent
DATA = DOCS / "pictures.json"  # {"chapter": what its `measure` returned}

# Mid-tones, which can be read on white and on black
COLORS = ["#4c8dd6", "#e0863a", "#4fa66b", "#cf5f66", "#8f7fd1", "#b0983a", "#45a3a8", "#b46ba5"]
GREY = "#858c94"
STYLE = {
    "svg.hashsalt": "nanoshard",
    "svg.fonttype": "none",
    "font.size": 10,
    "savefig.transparent": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.prop_cycle": matplotlib.cycler(color=COLORS),
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY
    ),
}

# --------------------------------------------------------------------------------------------------
# Measuring: what the lecture's commands leave in runs/


def commands(chapter: int) -> Iterator[str]:
    """The runnable commands of a chapter, in order."""
    current = 0
    lines = iter((DOCS / "lecture.md").read_text().splitlines())
    for line in lines:
        if match := re.match(r"## (\d+)\. ", line):
            current = int(match[1])
        if line == "<!-- run -->" and current == chapter:
            yield next(lines).strip()


def run(chapter: int) -> list[str]:
    """Run the commands of a chapter anew; return what each printed."""
    for folder in ROOT.glob(f"runs/ch{chapter}-*"):
        shutil.rmtree(folder)
    outputs = []
    for command in commands(chapter):
        print(f"chapter {chapter}: {command}", file=sys.stderr, flush=True)
        done = subprocess.run(command, shell=True, cwd=ROOT, text=True, stdout=subprocess.PIPE)
        outputs.append(done.stdout)
    return outputs


def rows(name: str) -> list[dict]:
    """The training rows of runs/NAME."""
    lines = (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def profile(name: str, rank: int = 0) -> dict:
    """The figures that --profile wrote for a rank of runs/NAME."""
    return json.loads((ROOT / f"runs/{name}/profile/rank_{rank}.json").read_text())


def spans(name: str, rank: int, kinds: dict[str, str]) -> list[list]:
    """[start, end, kind] in ms of a rank's trace, of events whose names match a pattern of `kinds`.

    kinds: pattern -> kind. Times are those of the host's clock, the same on all ranks of a host.
    """
    trace = json.loads((ROOT / f"runs/{name}/profile/rank_{rank}.trace.json").read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1e6
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        for pattern, kind in kinds.items():
            if re.search(pattern, event["name"]):
                start = base + event["ts"] / 1e3
                found.append([start, start + event["dur"] / 1e3, kind])
                break
    return sorted(found)


# --------------------------------------------------------------------------------------------------
# Drawing: three kinds of pictures


def bars(axes: Axes, stacks: dict[str, dict[str, float]], unit: str) -> None:
    """A horizontal bar for each stack, part by part: {bar: {part: value}}."""
    parts = list(dict.fromkeys(part for stack in stacks.values() for part in stack))
    for number, stack in enumerate(stacks.values()):
        left = 0.0
        for part, value in stack.items():
            color = COLORS[parts.index(part) % len(COLORS)]
            axes.barh(number, value, left=left, height=0.6, color=color)
            left += value
        axes.text(left, number, f" {left:,.4g}", va="center")
    axes.set_yticks(range(len(stacks)), stacks)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    key(axes, parts)


def lanes(axes: Axes, lanes: dict[str, list[list]], unit: str) -> None:
    """A lane for each name with its spans: {lane: [[start, end, kind], ...]}."""
    kinds = list(dict.fromkeys(kind for spans in lanes.values() for _, _, kind in spans))
    for number, spans in enumerate(lanes.values()):
        for start, end, kind in spans:
            color = COLORS[kinds.index(kind) % len(COLORS)]
            axes.barh(number, end - start, left=start, height=0.7, color=color, linewidth=0)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    key(axes, kinds)


def lines(axes: Axes, series: dict[str, list[list[float]]], x: str, y: str, log: bool) -> None:
    """A line for each name: {name: [xs, ys]}."""
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, label=name, linewidth=1.6)
    axes.set_yscale("log" if log else "linear")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend()


def key(axes: Axes, names: list[str]) -> None:
    """The colors of bars or lanes, in a row above them."""
    if len(names) < 2:
        return
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[i % 8]) for i in range(len(names))]
    axes.legend(patches, names, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(len(names), 5))


# --------------------------------------------------------------------------------------------------
# The chapters


@dataclass(frozen=True)
class Chapter:
    measure: Callable[[list[str]], dict]  # outputs of its commands -> what DATA keeps
    draw: Callable[[dict], None]  # on the current figure
    height: float = 2.6  # inches, of a width of 8


CHAPTERS: dict[int, Chapter] = {}


def draw(number: int, data: dict) -> None:
    """Write docs/pictures/NUMBER.svg, the same bytes whenever the data is the same."""
    chapter = CHAPTERS[number]
    figure = pyplot.figure(figsize=(8, chapter.height), layout="constrained")
    chapter.draw(data)
    figure.savefig(DOCS / "pictures" / f"{number}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    help = "run the commands of these chapters (none given: of all) and keep their figures"
    parser.add_argument("--measure", type=int, nargs="*", metavar="N", help=help, choices=CHAPTERS)
    args = parser.parse_args()
    data = json.loads(DATA.read_text())
    if args.measure is not None:
        for number in args.measure or CHAPTERS:
            data[str(number)] = CHAPTERS[number].measure(run(number))
            DATA.write_text(json.dumps(data) + "\n")
    (DOCS / "pictures").mkdir(exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for number in CHAPTERS:
            draw(number, data[str(number)])


if __name__ == "__main__":
    main()
