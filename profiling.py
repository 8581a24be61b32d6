"""Where the time of a step goes: a window of steps, traced, and the answers that people open a trace for.

Knows nothing of the loop: it is told which step begins.
"""

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import (
    TorchDispatchMode,
)  # sees every operation, from wherever it is called


class HostSyncs(TorchDispatchMode):
    """Counts where the host asks for a tensor's value, by the source line that does: {"train.py:123": times}."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it breaks itself up into operations on its parts
        if function is torch.ops.aten._local_scalar_dense.default:
            self.counts[caller()] += 1
        return function(*args, **(kwargs or {}))


def caller() -> str:
    """file:line of the innermost frame that is neither torch's nor this file's."""
    frame, own = sys._getframe(), (str(Path(torch.__file__).parent), __file__)
    while frame.f_back and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line the (start, end) spans cover together."""
    total, reached = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class Window:
    """Traces the steps start + 1 ... stop on each rank, and counts in the one after, since counting slows it down.

    Writes `folder`/rank_N.trace.json, which chrome://tracing and ui.perfetto.dev open, and rank_N.json, the answers as
    numbers. `counter` is a context that fills its `counts`, {(kind, axis): [calls, bytes]}, with what was communicated.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        folder: Path,
        rank: int,
        device: torch.device,
        counter: TorchDispatchMode,
    ):
        self.start, self.stop, self.path, self.device, self.counter = (
            start,
            stop,
            folder / f"rank_{rank}",
            device,
            counter,
        )
        cuda = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self.profiler = profile(activities=[ProfilerActivity.CPU, *cuda])
        self.began, self.answers = None, {}

    @contextmanager
    def around(self, step: int, data_wait: float) -> Iterator[None]:
        """Around the step of this number, counted from 1; `data_wait`: seconds that this rank has waited for data so far."""
        if step == self.start + 1:
            self.begin(data_wait)
        if not self.began or step != self.stop + 1:
            yield
            return
        self.end(data_wait)
        with self.counter, HostSyncs() as syncs:
            yield
        self.write(syncs.counts)

    def begin(self, data_wait: float) -> None:
        self.until_end, self.warnings = ExitStack(), []
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            # CUDA's own word on syncs: a dispatch mode sees reads of single values, but no copies
            self.warnings = self.until_end.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        self.profiler.start()
        self.began = time.perf_counter(), time.thread_time(), data_wait

    def end(self, data_wait: float) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        now = time.perf_counter(), time.thread_time(), data_wait
        self.until_end.close()
        self.profiler.stop()
        wall, ran, waited = (b - a for a, b in zip(self.began, now))
        steps = self.stop - self.start
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.profiler.export_chrome_trace(f"{self.path}.trace.json")
        kind = "device" if self.device.type == "cuda" else "cpu"
        busy, exposed = (
            self.of_gpu(wall)
            if kind == "device"
            else (ran / wall, max(0.0, 1 - (ran + waited) / wall))
        )
        own = f"self_{kind}_time_total"  # microseconds
        dearest = sorted(
            self.profiler.key_averages(), key=lambda row: getattr(row, own), reverse=True
        )[:10]
        self.answers = {
            "steps": [self.start + 1, self.stop],
            "step_time": wall / steps,
            "busy": busy,
            "exposed_communication": exposed,
            "data_wait": waited / wall,
            "operations": [
                {
                    "name": row.key,
                    "calls": row.count / steps,
                    "share": getattr(row, own) / 1e6 / wall,
                }
                for row in dearest
            ],
        }

    def of_gpu(self, wall: float) -> tuple[float, float]:
        """(share of the time in which the GPU ran anything, in which it ran communication and nothing beside it)"""
        spans = [
            (
                event.name.startswith("nccl"),
                (event.time_range.start / 1e6, event.time_range.end / 1e6),
            )
            for event in self.profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        every, compute = (
            covered(span for _, span in spans),
            covered(span for sends, span in spans if not sends),
        )
        return every / wall, (every - compute) / wall

    def write(self, syncs: Counter[str]) -> None:
        warned = [found for found in self.warnings if "synchroniz" in str(found.message)]
        lines = Counter(f"{Path(found.filename).name}:{found.lineno}" for found in warned)
        self.answers["host_syncs"] = dict(syncs | lines)
        self.answers["communicated"] = [
            {"kind": kind, "axis": axis, "calls": calls, "bytes": size}
            for (kind, axis), (calls, size) in self.counter.counts.items()
        ]
        self.path.with_suffix(".json").write_text(json.dumps(self.answers, indent=2) + "\n")

    def report(self) -> list[str]:
        """The answers in words, a line each; none where the run was continued inside the window, which then never began."""
        a = self.answers
        if not a:
            return []
        syncs = [f"{times} x {place}" for place, times in a["host_syncs"].items()]
        return [
            f"profile steps {a['steps'][0]} to {a['steps'][1]}, {a['step_time'] * 1e3:,.1f} ms each, on this rank: "
            f"{a['busy']:.0%} busy, {a['exposed_communication']:.0%} exposed communication, "
            f"{a['data_wait']:.0%} waiting for data",
            f"        host syncs: {', '.join(syncs) or 'none'}",
            *(
                f"        {row['calls']:.0f} x {row['kind']} over {row['axis']}: {row['bytes'] / 1e6:,.2f} MB a step"
                for row in a["communicated"]
            ),
            *(
                f"        {row['share']:6.1%}  {row['calls']:6.0f} x {row['name']}"
                for row in a["operations"]
            ),
            f"        trace: {self.path}.trace.json",
        ]
