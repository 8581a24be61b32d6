"""Draw the pictures of docs/lecture.md from docs/pictures.json, or remeasure their data.

python docs/pictures.py                  # draw all into docs/pictures/
python docs/pictures.py --measure 3 4    # first run the commands of chapters 3 and 4 (none: all)
"""

import argparse
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

DOCS = Path(__file__).parent
ROOT = DOCS.parent
DATA = DOCS / "pictures.json"  # {"chapter": what its `measure` returned}
PLAN = "--config docs/lecture.json --device_type cpu --peak_tflops 0.1"

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
    """Rerun the commands of a chapter; return what each printed."""
    for folder in ROOT.glob(f"runs/ch{chapter}-*"):
        shutil.rmtree(folder)
    outputs = []
    for command in commands(chapter):
        print(f"chapter {chapter}: {command}", file=sys.stderr, flush=True)
        outputs.append(shell(command))
    return outputs


def shell(command: str) -> str:
    """Run a command in the project's folder; return its stdout."""
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
    """Peak resident memory of a rank of runs/NAME, in MB."""
    return max(row["peak_host_memory"] for row in rows(name)) / 1e6


def spans(name: str, rank: int, kinds: dict[str, str], gap: float = 0.0) -> list[list]:
    """[start, end, kind], in ms, of events in a rank's trace whose names match `kinds`.

    kinds: pattern -> kind. Spans of a kind less than `gap` ms apart are merged. Times are of the
    host's clock, the same on all ranks of a host.
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
# The chapters


@dataclass(frozen=True)
class Chapter:
    measure: Callable[[list[str]], dict]  # outputs of its commands -> its entry in DATA
    draw: Callable[[dict], None]  # on the current figure
    height: float = 2.6  # inches; the width is 8


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
    """The second of two traced steps, on both ranks."""
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
    """When each unit was gathered, in the second of two traced steps."""
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
    # A log axis has no place for 0, a bitwise equal loss: leave a gap.
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


# --------------------------------------------------------------------------------------------------
# Chapters 8 to 12


def measure_queue(outputs: list[str]) -> dict:
    """A host that queues 12 operations, and a thread that plays the device, in ms."""
    return {name: queue(asks) for name, asks in (("nobody asks", False), ("asks each time", True))}


def queue(asks: bool) -> dict[str, list[list]]:
    """1 ms to queue an operation, 3 ms to run it. With `asks`, the host waits for each result."""
    host, device = [], []

    def operation() -> None:
        began = time.perf_counter()
        time.sleep(3e-3)
        device.append([began, time.perf_counter(), "computes"])

    with ThreadPoolExecutor(1) as thread:
        for _ in range(12):
            began = time.perf_counter()
            time.sleep(1e-3)
            result = thread.submit(operation)
            host.append([began, time.perf_counter(), "queues"])
            if asks:  # as .item() does
                result.result()
                host.append([host[-1][1], time.perf_counter(), "waits"])
    began = host[0][0]
    for span in host + device:
        span[:2] = [round(1e3 * (seconds - began), 3) for seconds in span[:2]]
    return {"host": host, "device": device}


def draw_queue(data: dict) -> None:
    both = pyplot.gcf().subplots(2, 1, sharex=True)
    for axes, (name, found) in zip(both, data.items()):
        order = {"host": found["host"], "device": found["device"]}
        kinds = ["queues", "waits", "computes"]
        for number, spans_of_lane in enumerate(order.values()):
            for start, end, kind in spans_of_lane:
                color = COLORS[kinds.index(kind)]
                axes.barh(number, end - start, left=start, color=color, edgecolor="none")
        axes.set_yticks(range(2), order)
        axes.invert_yaxis()
        axes.set_title(f"{name}: {found['device'][-1][1]:.0f} ms", fontsize=10, loc="right")
    key(both[0], kinds)
    both[1].set_xlabel("ms")


POLICIES = ("none", "selective", "full")


def measure_memory(outputs: list[str]) -> dict:
    """MB of all tensors over one step of chapter 9's model, for each policy."""
    return {policy: step_memory(policy) for policy in POLICIES}


def step_memory(policy: str) -> list[list[float]]:
    """[ms, MB] of step 2 by torch's memory profiler, plus 12 bytes per parameter held before."""
    sys.path.insert(0, str(ROOT))
    import torch

    import config
    import data
    import dist
    import layout
    import train

    flags = f"--config {DOCS}/lecture.json --n_layer 8 --seq_len 256 --global_batch_size 16 "
    flags += f"--strategy single --dry_run --activation_checkpointing {policy}"
    c = config.parse(flags.split())
    world = dist.start(c.device)
    folders = data.open_folders(c.data)
    decoder = config.model_config(c, folders[0].vocab_size)
    setup = layout.choose(c, world, decoder, device_memory=10**12)
    state, forward = train.build(c, setup, dist.make_mesh(world, setup.mesh_shape))
    train_data = data.open_dataset(folders, "train", decoder.seq_len, c.seed)
    batches = iter(2 * [train_data[list(range(16))]])
    train.train_step(forward, state.optimizer, batches, 1)
    with torch.profiler.profile(profile_memory=True) as profiler:
        train.train_step(forward, state.optimizer, batches, 2)
    dist.stop()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    events = [event for event in events if event["name"] == "[memory]"]
    began = events[0]["ts"]
    held = 12 * state.model.parameter_count()
    series = [
        [(e["ts"] - began) / 1e3, (held + e["args"]["Total Allocated"]) / 1e6] for e in events
    ]
    thinned = [max(part, key=lambda point: point[1]) for part in chunks(series, 300)]
    return [[round(value, 1) for value in values] for values in zip(*thinned)]


def chunks(points: list, count: int) -> Iterator[list]:
    """At most `count` parts of equal length; the last may be shorter."""
    size = -(-len(points) // count)
    for start in range(0, len(points), size):
        yield points[start : start + size]


def draw_memory(data: dict) -> None:
    lines(pyplot.gca(), data, "ms of one step", "MB of tensors", log=False)


BANDWIDTHS = {"200mbit": 200, "1gbit": 1000}


def measure_network(outputs: list[str]) -> dict:
    """Tokens/s/device by strategy and Mbit/s, measured and predicted; needs Linux and root."""
    found = {}
    for bandwidth, mbit in BANDWIDTHS.items():
        table = json.loads(
            shell(f"python -m tools.bench strategies --hosts 2 --link {bandwidth} --predict --json")
        )
        for row in table["rows"]:
            if "micro_batch" not in row["strategy"]:
                speeds = statistics.median(row["tokens/s/device"]), row["predicted"][0]
                found.setdefault(row["strategy"], []).append([mbit, *map(round, speeds)])
    return found


def draw_network(data: dict) -> None:
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


def measure_checkpoints(outputs: list[str]) -> dict:
    """Who wrote what in runs/ch11-killed, and its loss over seconds since the first start."""
    out = ROOT / "runs/ch11-killed"
    starts = [json.loads(line)["time"] for line in (out / "starts.jsonl").read_text().splitlines()]
    began = datetime.fromisoformat(starts[0])

    def curve(name: str, first: int) -> list[list[float]]:
        found = [row for row in rows(name) if row["step"] >= first]
        return [[seconds(row["time"]) for row in found], [row["loss"] for row in found]]

    def seconds(time: str) -> float:
        return round((datetime.fromisoformat(time) - began).total_seconds(), 2)

    files = {}
    for path in sorted(out.glob("checkpoints/step-*")):
        shards = sorted(path.glob("rank-*.safetensors"))
        sizes = {f"rank {int(shard.stem[5:])}": shard.stat().st_size / 1e6 for shard in shards}
        files[f"step {int(path.name[5:])}"] = {rank: round(size, 2) for rank, size in sizes.items()}
    resumed = int(re.search(r"continuing from \S*step-(\d+)", "".join(outputs))[1])
    before, after = curve("ch11-before", 1), curve("ch11-killed", resumed + 1)
    return {"files": files, "loss": {"2 ranks, fsdp, killed": before, "1 rank, resumed": after}}


def draw_checkpoints(data: dict) -> None:
    left, right = pyplot.gcf().subplots(1, 2)
    bars(left, data["files"], "MB")
    lines(right, data["loss"], "seconds since the first start", "loss", log=False)


BEATS = """
import sys, time, torch.distributed
from runtime.watchdog import Watchdog
rank, port = int(sys.argv[1]), int(sys.argv[2])
torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port + 1}", rank=rank, world_size=2)
with Watchdog(torch.distributed.TCPStore("127.0.0.1", port), rank, 2, timeout=10) as watchdog:
    for step in range(1000):
        watchdog.progress(step, "computing")
        time.sleep(0.1)
"""


def measure_heartbeats(outputs: list[str]) -> dict:
    """Seconds at which two watchdogs sent a heartbeat; rank 1 stops after 5 s."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", BEATS]
    ranks = [subprocess.Popen([*command, str(r), str(store.port)], cwd=ROOT) for r in range(2)]
    store.wait([f"heartbeat {rank}" for rank in range(2)])
    began = time.perf_counter()
    beats, counts, stopped = {"rank 0": [], "rank 1": []}, [None, None], None
    while ranks[0].poll() is None:
        now = round(time.perf_counter() - began, 2)
        if stopped is None and now >= 5:
            ranks[1].send_signal(signal.SIGSTOP)
            stopped = now
        for rank in range(2):
            count = json.loads(store.get(f"heartbeat {rank}"))[0]
            if count != counts[rank]:
                beats[f"rank {rank}"].append(now)
                counts[rank] = count
        time.sleep(0.02)
    ranks[1].kill()
    return {"beats": beats, "stopped": stopped, "ended": now, "goodput": goodput("ch12-stopped")}


def goodput(name: str) -> dict[str, list[list]]:
    """Where the wall clock of a run with two starts went: [start, end, kind] in seconds."""
    lines_of_starts = (ROOT / "runs" / name / "starts.jsonl").read_text().splitlines()
    starts = [json.loads(line) for line in lines_of_starts]
    began = datetime.fromisoformat(starts[0]["time"])

    def seconds(row: dict) -> float:
        return round((datetime.fromisoformat(row["time"]) - began).total_seconds(), 2)

    found = rows(name)
    saved = starts[1]["step"]
    first, kept = found[0], max((r for r in found if r["step"] <= saved), key=lambda r: r["step"])
    again = min((row for row in found if row["step"] > saved), key=lambda row: row["step"])
    return {
        "run": [
            [0, seconds(first), "starts"],
            [seconds(first), seconds(kept), "steps that count"],
            [seconds(kept), seconds(starts[1]), "lost: steps, silence, torchrun"],
            [seconds(starts[1]), seconds(again), "starts"],
            [seconds(again), seconds(found[-1]), "steps that count"],
        ]
    }


def draw_heartbeats(data: dict) -> None:
    upper, lower = pyplot.gcf().subplots(2, 1, height_ratios=[2, 1])
    upper.eventplot(list(data["beats"].values()), colors=COLORS[:2], linelengths=0.7, linewidths=2)
    name_rows(upper, data["beats"])
    for moment, text, side in (("stopped", "rank 1 is stopped", 1), ("ended", "the job ends", -1)):
        upper.axvline(data[moment], color=GREY, linestyle=":")
        place = dict(textcoords="offset points", ha="left" if side > 0 else "right")
        upper.annotate(text, (data[moment], 1.1), (6 * side, 0), **place)
    upper.set_xlabel("seconds")
    lanes(lower, data["goodput"], "seconds since the first start")


CHAPTERS |= {
    8: Chapter(measure_queue, draw_queue),
    9: Chapter(measure_memory, draw_memory),
    10: Chapter(measure_network, draw_network, height=3.2),
    11: Chapter(measure_checkpoints, draw_checkpoints, height=3),
    12: Chapter(measure_heartbeats, draw_heartbeats, height=3.2),
}


def draw(number: int, data: dict) -> None:
    """Write docs/pictures/NUMBER.svg; equal data gives equal bytes."""
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
