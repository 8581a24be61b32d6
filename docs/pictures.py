"""Draw the pictures of docs/lecture.md, from docs/pictures.json into docs/pictures/.

python docs/pictures.py
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).parent

# Mid-tones, readable on white and on black
GREY = "#858c94"
COLORS = ["#4c8dd6", "#e0863a", "#4fa66b", "#cf5f66", "#8f7fd1", "#b0983a", "#45a3a8", "#b46ba5"]
COLORS += [GREY]
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
# Drawing: three kinds of pictures


def bars(axes: Axes, stacks: dict[str, dict[str, float]], unit: str) -> None:
    """A horizontal bar per stack, part by part: {bar: {part: value}}."""
    parts = list(dict.fromkeys(part for stack in stacks.values() for part in stack))
    for number, stack in enumerate(stacks.values()):
        left = 0.0
        for part, value in stack.items():
            color = COLORS[parts.index(part) % len(COLORS)]
            axes.barh(number, value, left=left, height=0.6, color=color)
            left += value
        total = f"{left:,.4g}"
        axes.annotate(total, (left, number), (3, 0), textcoords="offset points", va="center")
    name_rows(axes, stacks)
    axes.set_xlabel(unit)
    key(axes, parts)


def lanes(axes: Axes, lanes: dict[str, list[list]], unit: str, legend: bool = True) -> None:
    """A lane of spans per name: {lane: [[start, end, kind], ...]}."""
    kinds = list(dict.fromkeys(kind for spans in lanes.values() for _, _, kind in spans))
    for number, spans in enumerate(lanes.values()):
        for start, end, kind in spans:
            color = COLORS[kinds.index(kind) % len(COLORS)]
            axes.barh(number, end - start, left=start, height=0.7, color=color, linewidth=0)
    name_rows(axes, lanes)
    axes.set_xlabel(unit)
    if legend:
        key(axes, kinds)


def name_rows(axes: Axes, names: Iterable[str]) -> None:
    """Name bars or lanes, from top to bottom."""
    names = list(names)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def lines(axes: Axes, series: dict[str, list[list[float]]], x: str, y: str, log: bool) -> None:
    """A line per name: {name: [xs, ys]}."""
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, label=name, linewidth=1.6)
    axes.set_yscale("log" if log else "linear")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend()


def key(axes: Axes, names: list[str]) -> None:
    """A legend of bars or lanes, in a row above them."""
    if len(names) < 2:
        return
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS[: len(names)]]
    above = dict(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(len(names), 5))
    axes.legend(patches, names, handlelength=1, columnspacing=1.2, **above)


# --------------------------------------------------------------------------------------------------
# The chapters: what the data is, and how it is drawn


@dataclass(frozen=True)
class Chapter:
    draw: Callable[[dict], None]  # an entry of pictures.json, on the current figure
    height: float = 2.6  # inches; the width is 8


def draw_3(data: dict) -> None:
    """The second of two traced steps: {label: {lane: spans in ms}}."""
    for axes, (label, steps) in zip(pyplot.gcf().subplots(2, 1, sharex=True), data.items()):
        lanes(axes, steps, "ms", legend=label == "once")
        axes.set_title(f"gradients averaged {label}", loc="right", fontsize=10, pad=3)
        axes.label_outer()


def draw_4(data: dict) -> None:
    """The second of two traced steps: {unit: spans in ms from its all-gather to its reshard}."""
    lanes(pyplot.gca(), data, "ms")


def draw_6(data: dict) -> None:
    """{mesh: the relative difference of its loss to that of `single`, step by step}."""
    # A log axis has no place for 0, a bitwise equal loss: leave a gap.
    series = {n: [range(1, 1 + len(ys)), [y or math.nan for y in ys]] for n, ys in data.items()}
    lines(pyplot.gca(), series, "step", "difference to single, relative", log=True)
    pyplot.axhline(1e-5, color=GREY, linestyle=":")


def draw_7(data: dict) -> None:
    """{unit of the bars: {bar: {part: MB}}}: from tools.plan, and from --profile."""
    for axes, (what, stacks) in zip(pyplot.gcf().subplots(1, 2), data.items()):
        bars(axes, stacks, what)


def draw_9(data: dict) -> None:
    """{policy: [ms, MB]} of the tensors in a step, from torch's memory profiler."""
    lines(pyplot.gca(), data, "ms of one step", "MB of tensors", log=False)


def draw_10(data: dict) -> None:
    """{strategy: [[Mbit/s, tokens/s/device measured, predicted], ...]}."""
    axes = pyplot.gca()
    for name, points in data.items():
        mbits, measured, predicted = zip(*points)
        (line,) = axes.plot(mbits, measured, "o-", label=name)
        axes.plot(mbits, predicted, "x:", color=line.get_color())
    axes.plot([], [], "x:", color=GREY, label="predicted")
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s between hosts", ylabel="tokens/s/device")
    axes.set_xticks(mbits, [f"{mbit:,}" for mbit in mbits])
    axes.set_yticks(speeds := [200, 500, 1000], [f"{speed:,}" for speed in speeds])
    axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_12(data: dict) -> None:
    """Seconds of two watchdogs' heartbeats, and where the time of a run with two starts went."""
    upper, lower = pyplot.gcf().subplots(2, 1, height_ratios=[2, 1])
    upper.eventplot(list(data["beats"].values()), colors=COLORS[:2], linelengths=0.7, linewidths=2)
    name_rows(upper, data["beats"])
    for moment, text, side in (("stopped", "rank 1 is stopped", 1), ("ended", "the job ends", -1)):
        upper.axvline(data[moment], color=GREY, linestyle=":")
        place = dict(textcoords="offset points", ha="left" if side > 0 else "right")
        upper.annotate(text, (data[moment], 1.1), (6 * side, 0), **place)
    upper.set_xlabel("seconds")
    lanes(lower, data["goodput"], "seconds since the first start")


CHAPTERS = {
    3: Chapter(draw_3, height=4.2),
    4: Chapter(draw_4),
    6: Chapter(draw_6, height=3.2),
    7: Chapter(draw_7, height=2.2),
    9: Chapter(draw_9),
    10: Chapter(draw_10, height=3.2),
    12: Chapter(draw_12, height=3.2),
}


def draw(number: int, data: dict) -> None:
    """Write docs/pictures/NUMBER.svg; equal data gives equal bytes."""
    chapter = CHAPTERS[number]
    figure = pyplot.figure(figsize=(8, chapter.height), layout="constrained")
    chapter.draw(data)
    figure.savefig(DOCS / "pictures" / f"{number}.svg", metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    data = json.loads((DOCS / "pictures.json").read_text())
    with matplotlib.rc_context(STYLE):
        for number in CHAPTERS:
            draw(number, data[str(number)])


if __name__ == "__main__":
    main()
