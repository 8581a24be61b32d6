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

# Mid-tones, readable on white and on black; each of the first five has one meaning everywhere
GREY = "#858c94"
MEANINGS = {
    "forward": "#4c8dd6",
    "backward": "#e0863a",
    "communication": "#4fa66b",
    "waiting": GREY,
    "starts": GREY,
    "lost": "#cf5f66",
    "steps that count": "#45a3a8",
}
COLORS = ["#8f7fd1", "#b0983a", "#45a3a8", "#b46ba5"]  # of runs and ranks
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
# Drawing


def lanes(axes: Axes, lanes: dict[str, list[list]], unit: str, legend: bool = True) -> None:
    """A lane of spans per name: {lane: [[start, end, meaning], ...]}."""
    for number, spans in enumerate(lanes.values()):
        for start, end, kind in spans:
            axes.barh(number, end - start, 0.7, start, color=MEANINGS[kind], linewidth=0)
    name_rows(axes, lanes)
    axes.set_xlabel(unit)
    if legend:
        used = {kind for spans in lanes.values() for _, _, kind in spans}
        kinds = [kind for kind in MEANINGS if kind in used]
        patches = [pyplot.Rectangle((0, 0), 1, 1, color=MEANINGS[kind]) for kind in kinds]
        above = dict(loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
        axes.legend(patches, kinds, handlelength=1, columnspacing=1.2, **above)


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


# --------------------------------------------------------------------------------------------------
# The chapters: what the data is, and how it is drawn


@dataclass(frozen=True)
class Chapter:
    draw: Callable[[dict], None]  # an entry of pictures.json, on the current figure
    height: float = 2.6  # inches; the width is 8


def draw_3(data: dict) -> None:
    """The second of two traced steps: {label: {lane: spans in ms}}."""
    for axes, (label, steps) in zip(pyplot.gcf().subplots(2, 1, sharex=True), data.items()):
        names = [name for name in steps if "gloo" in name]
        for both in [*zip(*(steps[name] for name in names))]:  # one all_reduce, of each rank
            together = max(start for start, _, _ in both)
            for name, (start, _, _) in zip(names, both):
                steps[name].append([start, together, "waiting"])
        lanes(axes, steps, "ms", legend=label == "once")
        axes.set_title(f"gradients averaged {label}", loc="right", fontsize=10, pad=3)
        axes.label_outer()


def draw_4(data: dict) -> None:
    """A traced step: {unit: spans in ms}, and those of gloo's threads."""
    lanes(pyplot.gca(), data, "ms")


def draw_6(data: dict) -> None:
    """{mesh: the relative difference of its loss to that of `single`, step by step}."""
    # A log axis has no place for 0, a bitwise equal loss: leave a gap.
    series = {n: [range(1, 1 + len(ys)), [y or math.nan for y in ys]] for n, ys in data.items()}
    lines(pyplot.gca(), series, "step", "difference to single, relative", log=True)
    pyplot.axhline(1e-5, color=GREY, linestyle=":")
    pyplot.annotate("tolerance of the tests", (1, 1.3e-5))


def draw_7(data: dict) -> None:
    """Matrices as parts, [x, y, width, height, rank or null], their texts, and MB of each kind."""
    left, right = pyplot.gcf().subplots(1, 2, width_ratios=[2.2, 1])
    for x, y, width, height, rank in data["parts"]:
        color = GREY if rank is None else COLORS[rank]
        left.add_patch(pyplot.Rectangle((x, y), width, height, color=color, ec="white", alpha=0.8))
    for x, y, text in data["texts"]:
        left.annotate(text, (x, y), ha="center", va="center")
    arrow = dict(arrowstyle="->", color=MEANINGS["communication"], linewidth=2)
    for x, end, text in ((0.7, 1.4, "all_gather"), (9.6, 10.3, "reduce_scatter")):
        left.annotate("", (end, 1), (x, 1), arrowprops=arrow)
        left.annotate(text, (x + 0.35, 2.25), ha="center", color=arrow["color"])
    for rank in (0, 1):
        left.annotate(f"rank {rank}", (4.4 + 1.8 * rank, 2.7), ha="center", color=COLORS[rank])
    left.set(xlim=(-0.2, 11.2), ylim=(-0.6, 3.1))
    left.axis("off")
    half = data["handed"] / 2  # (n - 1) / n of what 2 ranks hand to 18 all_gathers
    sent = {"all_reduce": 2 * half, "the two, NCCL": 2 * half, "the two, gloo": 3 * half}
    right.barh(range(3), sent.values(), 0.6, color=MEANINGS["communication"])
    for row, value in enumerate(sent.values()):
        right.annotate(f" {value:.1f}", (value, row), va="center")
    name_rows(right, sent)
    right.set_xlabel("MB on the wire, of a rank")


def draw_9(data: dict) -> None:
    """{policy: [ms, MB]} of the tensors in a step, from torch's memory profiler."""
    lines(pyplot.gca(), data, "ms of one step", "MB of tensors", log=False)
    for color, (times, sizes) in zip(COLORS, data.values()):
        peak = max(sizes)
        place = (times[sizes.index(peak)], peak)
        pyplot.annotate(f"{peak:.0f} MB", place, (5, 4), textcoords="offset points", color=color)


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


def draw_15(data: dict) -> None:
    """{strategy: {"MB": on the wire, "seconds": {Mbit/s: of a step}}}; the fastest link gives C."""
    axes = pyplot.gca()
    for name, run in data.items():
        links = {int(mbit): seconds for mbit, seconds in run["seconds"].items()}
        megabits = 8 * run["MB"]
        computing = links[max(links)] - megabits / max(links)
        predicted = [computing + megabits / mbit for mbit in links]
        (line,) = axes.plot([*links], [*run["seconds"].values()], "o", label=name)
        axes.plot([*links], predicted, "x:", color=line.get_color())
        axes.plot(megabits / computing, 2 * computing, "D", color=line.get_color(), mfc="none")
    axes.plot([], [], "x:", color=GREY, label="predicted")
    axes.plot([], [], "D", color=GREY, mfc="none", label="crossover")
    axes.set(xscale="log", yscale="log", xlabel="Mbit/s between hosts", ylabel="seconds a step")
    axes.set_xticks([*links], [f"{mbit:,}" for mbit in links])
    axes.set_yticks(seconds := [0.5, 1, 2, 5, 10], [f"{second:g}" for second in seconds])
    axes.minorticks_off()
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def draw_12(data: dict) -> None:
    """Seconds of two watchdogs' heartbeats, and where the time of a run with two starts went."""
    upper, lower = pyplot.gcf().subplots(2, 1, height_ratios=[2, 1])
    beats, color = data["beats"], MEANINGS["communication"]
    upper.eventplot(list(beats.values()), colors=color, linelengths=0.7, linewidths=2)
    name_rows(upper, beats)
    for moment, text, side in (("stopped", "rank 1 is stopped", 1), ("ended", "the job ends", -1)):
        upper.axvline(data[moment], color=GREY, linestyle=":")
        place = dict(textcoords="offset points", ha="left" if side > 0 else "right")
        upper.annotate(text, (data[moment], 1.1), (6 * side, 0), **place)
    upper.set_xlabel("seconds")
    lanes(lower, data["goodput"], "seconds since the first start")


CHAPTERS = {
    3: Chapter(draw_3, height=4.2),
    4: Chapter(draw_4, height=3.0),
    6: Chapter(draw_6, height=3.2),
    7: Chapter(draw_7, height=2.4),
    9: Chapter(draw_9),
    10: Chapter(draw_10, height=3.2),
    12: Chapter(draw_12, height=3.2),
    15: Chapter(draw_15, height=3.2),
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
