"""Draw the pictures of the lecture, from docs/pictures.json. 5.svg is written by hand.

python docs/pictures.py
"""

import itertools
import json
import math
from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).parent

# Mid-tones, readable on white and on black; each meaning has its color everywhere
GREY = "#858c94"
MEANINGS = {
    "forward": "#4c8dd6",
    "backward": "#e0863a",
    "communication": "#4fa66b",
    "gathered, not needed yet": "#bcdcc6",
    "queueing": "#8f7fd1",
    "computing": "#4c8dd6",
    "waiting": GREY,
}
COLORS = ["#8f7fd1", "#b0983a", "#45a3a8", "#b46ba5"]  # for runs and ranks
STYLE = {
    "svg.hashsalt": "nanoshard",
    "svg.fonttype": "none",
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
    """Draw one lane of spans per name: {lane: [[start, end, meaning], ...]}."""
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
    """Label the bars or lanes, from top to bottom."""
    names = list(names)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def lines(axes: Axes, series: dict[str, list[list[float]]], x: str, y: str, log: bool) -> None:
    """Draw one line per name: {name: [xs, ys]}."""
    for name, (xs, ys) in series.items():
        axes.plot(xs, ys, label=name, linewidth=1.6)
    axes.set_yscale("log" if log else "linear")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend()


# --------------------------------------------------------------------------------------------------
# The pictures: each docstring describes the data


def draw_0(data: dict) -> None:
    """{"ranks": n}: a ring's reduce_scatter by round; a cell has the number of ranks summed."""
    n = data["ranks"]
    green = MEANINGS["communication"]
    counts = [[1] * n for _ in range(n)]  # [rank][part]: the ranks summed so far
    for i, axes in enumerate(pyplot.gcf().subplots(1, n), start=1):
        sent = [(rank - i) % n for rank in range(n)] if i < n else [None] * n  # part, by rank
        for rank in range(n):
            for part, count in enumerate(counts[rank]):
                cell = ((rank - 0.4, part - 0.4), 0.8, 0.8)
                edge = green if part == sent[rank] else "none"
                axes.add_patch(pyplot.Rectangle(*cell, fc=COLORS[rank], ec=edge, lw=3))
                weight = "bold" if count == n else "normal"
                place = dict(ha="center", va="center", color="white", weight=weight)
                axes.annotate(count, (rank, part), **place)
        if i < n:
            for rank, part in enumerate(sent):
                counts[(rank + 1) % n][part] += i
                arrow = dict(arrowstyle="->", color=green, linewidth=2)
                axes.annotate("", (rank + 0.62, part), (rank + 0.38, part), arrowprops=arrow)
                if rank + 1 == n:  # the ring closes: this arrow arrives at rank 0
                    axes.annotate("", (-0.38, part), (-0.62, part), arrowprops=arrow)
        name_rows(axes, [f"part {part}" for part in range(n)])
        axes.set_xticks(range(n), range(n))
        rounds = "at the start" if i == 1 else f"after {i - 1} round{'s' * (i > 2)}"
        axes.set(xlim=(-0.7, n - 0.3), xlabel="rank", title=rounds)
        axes.tick_params(length=0)
        axes.label_outer()
        axes.spines[:].set_visible(False)


def draw_2(data: dict) -> None:
    """{label: [micro-batches, MB of activations of one]}; backward takes twice as long."""
    above, below = pyplot.gcf().subplots(2, 1, sharex=True, height_ratios=[1, 1.3])
    spans = {}
    for color, (label, (n, size)) in zip(COLORS, data.items()):
        forward = 1 / n
        starts = [3 * forward * i for i in range(n)]
        spans[label] = []
        times, sizes = [], []
        for start in starts:
            middle, end = start + forward, start + 3 * forward
            spans[label] += [[start, middle, "forward"], [middle, end, "backward"]]
            times += [start, middle, end]
            sizes += [0, size, 0]
        below.plot(times, sizes, color=color, linewidth=1.6)
        below.annotate(
            f"{size:g} MB", (forward, size), (6, 5), textcoords="offset points", color=color
        )
    lanes(above, spans, "")
    below.set_xlabel("time, in forward passes of 32 sequences")
    below.set_ylabel("MB of activations")


def draw_3(data: dict) -> None:
    """The second of two traced steps: {label: {lane: spans in ms}}."""
    for axes, (label, steps) in zip(pyplot.gcf().subplots(2, 1, sharex=True), data.items()):
        names = [name for name in steps if "gloo" in name]
        for both in [*zip(*(steps[name] for name in names))]:  # one all_reduce, on each rank
            together = max(start for start, _, _ in both)
            for name, (start, _, _) in zip(names, both):
                steps[name].append([start, together, "waiting"])
        lanes(axes, steps, "ms", legend=label == "once")
        axes.set_title(f"gradients averaged {label}", loc="right", fontsize=10, pad=3)
        axes.label_outer()


def draw_4(data: dict) -> None:
    """A traced step: {unit: spans in ms}, and the spans of gloo's threads."""
    lanes(pyplot.gca(), data, "ms")


def draw_memory(data: dict) -> None:
    """{strategy: bytes a parameter, [sent in a step, held]}."""
    axes = pyplot.gca()
    for name, place in data.items():
        axes.plot(*place, "o", color=MEANINGS["communication"], markersize=9)
        axes.annotate(name, place, (10, 0), textcoords="offset points", va="center")
    axes.set(xlim=(-0.5, 9.5), ylim=(0, 18), yticks=range(0, 17, 4))
    axes.set_xlabel("bytes per parameter that a rank sends in a step")
    axes.set_ylabel("bytes per parameter\nthat a rank holds")


def draw_6(data: dict) -> None:
    """{mesh: [relative difference between its loss and the loss of `single`, for each step]}."""
    # A log axis has no place for 0, a bitwise equal loss: leave a gap.
    series = {n: [range(1, 1 + len(ys)), [y or math.nan for y in ys]] for n, ys in data.items()}
    lines(pyplot.gca(), series, "step", "difference to single, relative", log=True)
    pyplot.axhline(1e-5, color=GREY, linestyle=":")


def draw_7(data: dict) -> None:
    """Matrices as parts, [x, y, width, height, rank or null], and their texts."""
    axes = pyplot.gca()
    for x, y, width, height, rank in data["parts"]:
        color = "none" if rank is None else COLORS[rank]
        edge = GREY if rank is None else "white"
        axes.add_patch(pyplot.Rectangle((x, y), width, height, fc=color, ec=edge, alpha=0.8))
    for x, y, text in data["texts"]:
        axes.annotate(text, (x, y), ha="center", va="center")
    arrow = dict(arrowstyle="->", color=MEANINGS["communication"], linewidth=2)
    for x, end, text in ((0.7, 1.4, "all_gather"), (9.6, 10.3, "reduce_scatter")):
        axes.annotate("", (end, 1), (x, 1), arrowprops=arrow)
        axes.annotate(text, (x + 0.35, 2.25), ha="center", color=arrow["color"])
    for rank in (0, 1):
        axes.annotate(f"rank {rank}", (4.4 + 1.8 * rank, 2.7), ha="center", color=COLORS[rank])
    axes.set(xlim=(-0.2, 11.2), ylim=(-0.6, 3.1))
    axes.axis("off")


def draw_8(data: dict) -> None:
    """{"queue": ms, "run": ms, "operations": n}: a host that never waits, and one that waits."""
    queue, run = data["queue"], data["run"]
    titles = ("the host never waits", "the host waits for each result")
    for waits, axes in enumerate(pyplot.gcf().subplots(2, 1, sharex=True)):
        host, device, now, free = [], [], 0, 0
        for _ in range(data["operations"]):
            host.append([now, now + queue, "queueing"])
            now += queue
            if free and now > free:
                device.append([free, now, "waiting"])
            begin = max(now, free)
            free = begin + run
            device.append([begin, free, "computing"])
            if waits:
                host.append([now, free, "waiting"])
                now = free
        lanes(axes, {"host": host, "device": device}, "ms", legend=bool(waits))
        axes.set_title(titles[waits], loc="right", fontsize=10, pad=3)
        axes.label_outer()


def draw_9(data: dict) -> None:
    """{policy: [ms, MB]} of the tensors in a step, from torch's memory profiler."""
    lines(pyplot.gca(), data, "ms of one step", "MB of tensors", log=False)
    for color, (times, sizes) in zip(COLORS, data.values()):
        peak = max(sizes)
        place = (times[sizes.index(peak)], peak)
        pyplot.annotate(
            f"{peak:.0f} MB", place, (-5, 4), textcoords="offset points", ha="right", color=color
        )


def draw_11(data: dict) -> None:
    """{"rows": n, "saved": ranks, "loaded": ranks}: chunks, their overlaps, and parts of rows."""
    n = data["rows"]
    edges = {side: range(0, n + 1, n // data[side]) for side in ("saved", "loaded")}
    cuts = sorted({*edges["saved"], *edges["loaded"]})
    columns = {"saved by four ranks": edges["saved"], "copied": cuts}
    columns |= {"loaded by three ranks": edges["loaded"]}
    axes = pyplot.gca()
    for x, bounds in zip((0, 2, 4), columns.values()):
        for number, (low, high) in enumerate(itertools.pairwise(bounds)):
            saver = low * data["saved"] // n
            color = COLORS[saver] if x < 4 else "none"
            cell = ((x, low + 0.06), 1.2, high - low - 0.12)
            axes.add_patch(pyplot.Rectangle(*cell, fc=color, ec=GREY))
            rows = f"row {low}" if high == low + 1 else f"rows {low} to {high - 1}"
            text = rows if x == 2 else f"rank {number}: {rows}"
            place = dict(ha="center", va="center", fontsize=9, color="white" if x < 4 else GREY)
            axes.annotate(text, (x + 0.6, (low + high) / 2), **place)
    arrow = dict(arrowstyle="->", color=MEANINGS["communication"], linewidth=1.5)
    for low, high in itertools.pairwise(cuts):
        middle = (low + high) / 2
        axes.annotate("", (1.95, middle), (1.25, middle), arrowprops=arrow)
        axes.annotate("", (3.95, middle), (3.25, middle), arrowprops=arrow)
    for x, title in zip((0, 2, 4), columns):
        axes.annotate(title, (x + 0.6, -0.5), ha="center")
    axes.set(xlim=(-0.1, 5.3), ylim=(n + 0.2, -1.2))
    axes.axis("off")


# {name of the file and of its entry in pictures.json: (function that draws it, height in inches)}
PICTURES = {
    "0": (draw_0, 2.6),
    "2": (draw_2, 3.2),
    "3": (draw_3, 4.2),
    "memory": (draw_memory, 3.2),
    "4": (draw_4, 3.0),
    "6": (draw_6, 3.2),
    "7": (draw_7, 2.4),
    "8": (draw_8, 3.2),
    "9": (draw_9, 2.6),
    "11": (draw_11, 3.4),
}


def main() -> None:
    """Write docs/pictures/NAME.svg for each picture; equal data gives equal bytes."""
    data = json.loads((DOCS / "pictures.json").read_text())
    with matplotlib.rc_context(STYLE):
        for name, (draw, height) in PICTURES.items():
            figure = pyplot.figure(figsize=(8, height), layout="constrained")
            draw(data[name])
            figure.savefig(DOCS / "pictures" / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


if __name__ == "__main__":
    main()
