"""Draw the pictures of docs/lecture.md from docs/pictures.json, or measure their data anew.

python docs/pictures.py                  # draw all into docs/pictures/
python docs/pictures.py --measure 3 4    # first run the commands of chapters 3 and 4 (none: all)
"""

import argparse
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
ROOT = DOCS.parent
DATA = DOCS / "pictures.json"  # {"chapter": what its `measure` returned}
PLAN = "--config docs/lecture.json --device_type cpu --peak_tflops 0.1"

# Mid-tones, which can be read on white and on black
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
        outputs.append(shell(command))
    return outputs


def shell(command: str) -> str:
    """What a command prints, in the project's folder; its errors pass."""
    done = subprocess.run(command, shell=True, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    return done.stdout


def rows(name: str) -> list[dict]:
    """The training rows of runs/NAME."""
    lines = (ROOT / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def profile(name: str, rank: int = 0) -> dict:
    """The figures that --profile wrote for a rank of runs/NAME."""
    return json.loads((ROOT / f"runs/{name}/profile/rank_{rank}.json").read_text())


def peak_memory(name: str) -> float:
    """The most that a rank of runs/NAME had resident, in MB."""
    return max(row["peak_host_memory"] for row in rows(name)) / 1e6


def spans(name: str, rank: int, kinds: dict[str, str], gap: float = 0.0) -> list[list]:
    """[start, end, kind] in ms of a rank's trace, of events whose names match a pattern of `kinds`.

    kinds: pattern -> kind. Spans of a kind that are less than `gap` ms apart become one. Times are
    of the host's clock, the same on all ranks of a host.
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
    merged = []
    for start, end, kind in sorted(found):
        if merged and merged[-1][2] == kind and start < merged[-1][1] + gap:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end, kind])
    return merged


def from_start(lanes: dict[str, list[list]], start: float) -> dict[str, list[list]]:
    """The spans that begin at `start` or later, in ms since then."""
    later = {}
    for name, spans in lanes.items():
        later[name] = [
            [round(a - start, 2), round(b - start, 2), kind] for a, b, kind in spans if a >= start
        ]
    return later


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
        total = f"{left:,.4g}"
        axes.annotate(total, (left, number), (3, 0), textcoords="offset points", va="center")
    name_rows(axes, stacks)
    axes.set_xlabel(unit)
    key(axes, parts)


def lanes(axes: Axes, lanes: dict[str, list[list]], unit: str, legend: bool = True) -> None:
    """A lane for each name with its spans: {lane: [[start, end, kind], ...]}."""
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
    """The names of bars or lanes, from top to bottom."""
    names = list(names)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


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
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS[: len(names)]]
    above = dict(loc="lower left", bbox_to_anchor=(0, 1), ncols=min(len(names), 5))
    axes.legend(patches, names, handlelength=1, columnspacing=1.2, **above)


# --------------------------------------------------------------------------------------------------
# The chapters


@dataclass(frozen=True)
class Chapter:
    measure: Callable[[list[str]], dict]  # outputs of its commands -> what DATA keeps
    draw: Callable[[dict], None]  # on the current figure
    height: float = 2.6  # inches, of a width of 8


def measure_1(outputs: list[str]) -> dict:
    estimate = re.search(r"at its peak: (.*) =", outputs[0])[1]
    parts = {part: float(size) for part, size in re.findall(r"(\w+) ([\d.]+)", estimate)}
    return {"estimated": parts, "resident": {"resident": peak_memory("ch1-one")}}


def draw_1(data: dict) -> None:
    bars(pyplot.gca(), data, "MB")


def measure_2(outputs: list[str]) -> dict:
    data = {"loss of step 1": {}, "peak memory, MB": {}, "step, ms (median)": {}}
    for label, name in {"1 x 32": "ch2-whole", "8 x 4": "ch2-eighths"}.items():
        steps = rows(name)
        seconds = statistics.median(row["step_time"] for row in steps[1:])
        for what, value in zip(data, (steps[0]["loss"], peak_memory(name), 1e3 * seconds)):
            data[what][label] = value
    return data


def draw_2(data: dict) -> None:
    for axes, (what, values) in zip(pyplot.gcf().subplots(1, 3, sharey=True), data.items()):
        bars(axes, {label: {what: value} for label, value in values.items()}, what)


def measure_3(outputs: list[str]) -> dict:
    """The second of the two steps that were traced, on both ranks."""
    work = {"DataParallel.forward": "forward", "evaluate_function": "backward"}
    data = {}
    for label, name in {"once": "ch3-once", "each time": "ch3-each"}.items():
        lanes, starts = {}, []
        for rank in (0, 1):
            lanes[f"rank {rank}"] = worked = spans(name, rank, work, gap=5)
            lanes[f"rank {rank}, gloo"] = spans(name, rank, {"gloo:all_reduce": "all_reduce"})
            forwards = [start for start, _, kind in worked if kind == "forward"]
            starts.append(forwards[len(forwards) // 2])
        data[label] = from_start(lanes, min(starts))
    return data


def draw_3(data: dict) -> None:
    for axes, (label, steps) in zip(pyplot.gcf().subplots(2, 1, sharex=True), data.items()):
        lanes(axes, steps, "ms", legend=label == "once")
        axes.set_title(f"gradients averaged {label}", loc="right", fontsize=10, pad=3)
        axes.label_outer()


def measure_4(outputs: list[str]) -> dict:
    """When each unit was gathered, in the second of the two steps that were traced."""
    lanes = {}
    for unit in ("", *(f" \\(blocks.{i}\\)" for i in range(4))):
        ends = {"post_forward": "forward", "post_backward_reshard": "backward"}
        kinds = {f"FSDP::{event}{unit}$": kind for event, kind in ends.items()}
        events = spans("ch4-fsdp", 0, {f"FSDP::all_gather_copy_out{unit}$": "gathered", **kinds})
        held = []
        for start, end, kind in events:
            if kind == "gathered":
                held.append([start, end, []])
            held[-1][1:] = [end, [*held[-1][2], kind]]
        lanes[unit.strip(" \\()") or "root"] = [[a, b, " and ".join(k[1:])] for a, b, k in held]
    gathers = lanes["root"]
    return from_start(lanes, gathers[len(gathers) // 2][0])


def draw_4(data: dict) -> None:
    lanes(pyplot.gca(), data, "ms")


def measure_5(outputs: list[str]) -> dict:
    data = {"rows of the embedding": {}, "sequences of the batch": {}}
    for line in sorted(outputs[0].splitlines()):
        rank, _, shard, _, *numbers = map(int, re.findall(r"\d+", line))
        first_row, last_row, _, first, last = numbers
        kind = f"shard {shard}"
        data["rows of the embedding"][f"rank {rank}"] = [[first_row, last_row + 1, kind]]
        data["sequences of the batch"][f"rank {rank}"] = [[first, last + 1, kind]]
    return data


def draw_5(data: dict) -> None:
    for axes, (what, ranks) in zip(pyplot.gcf().subplots(1, 2, sharey=True), data.items()):
        lanes(axes, ranks, what, legend=axes.get_subplotspec().is_first_col())


def measure_6(outputs: list[str]) -> dict:
    single = [row["loss"] for row in rows("ch6-single")]
    data = {}
    for mesh in ("fsdp", "hsdp", "tp"):
        losses = [row["loss"] for row in rows(f"ch6-{mesh}")]
        data[mesh] = [abs(loss / one - 1) for loss, one in zip(losses, single)]
    return data


def draw_6(data: dict) -> None:
    # A loss that is equal to the last bit has no place on a log axis: a gap.
    series = {n: [range(1, 1 + len(ys)), [y or math.nan for y in ys]] for n, ys in data.items()}
    lines(pyplot.gca(), series, "step", "difference to single, relative", log=True)
    pyplot.axhline(1e-5, color=GREY, linestyle=":")


def measure_7(outputs: list[str]) -> dict:
    kept = {}
    for tp in (1, 2, 4):
        flags = f"{PLAN} --world_size {tp} --nproc_per_node {tp} --tp {tp} --json"
        memory = json.loads(shell(f"python -m tools.plan {flags}"))["memory"]
        kept[f"tp {tp}"] = {part: memory[part] / 1e6 for part in ("activations", "logits")}
    sent = {}
    for row in profile("ch7-tp")["communicated"]:
        sent[row["kind"]] = row["bytes"] / 1e6 / 2  # (n - 1) / n of them
    gathered = {kind: sent[kind] for kind in ("all_gather", "reduce_scatter")}
    return {
        "MB of a rank": kept,
        "MB sent by a rank in a step": {
            "all_reduce": {"all_reduce": sum(gathered.values())},
            "became": gathered,
        },
    }


def draw_7(data: dict) -> None:
    for axes, (what, stacks) in zip(pyplot.gcf().subplots(1, 2), data.items()):
        bars(axes, stacks, what)


CHAPTERS = {
    1: Chapter(measure_1, draw_1, height=2.2),
    2: Chapter(measure_2, draw_2, height=1.8),
    3: Chapter(measure_3, draw_3, height=4.2),
    4: Chapter(measure_4, draw_4),
    5: Chapter(measure_5, draw_5, height=2.2),
    6: Chapter(measure_6, draw_6, height=3.2),
    7: Chapter(measure_7, draw_7, height=2.2),
}


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
        for number in sorted(CHAPTERS.keys() & map(int, data)):
            draw(number, data[str(number)])


if __name__ == "__main__":
    main()
