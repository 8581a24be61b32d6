"""Where the time of a step goes: what the host waits for, what is communicated, and a trace."""

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

# Private, but the one place that sees every operation, and the collectives of DDP and FSDP too.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# Counters


class HostSyncCounter(TorchDispatchMode):
    """Counts where the host asks for a tensor's value: {"train.py:123": times}."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it decomposes into operations on its local tensors
        if function is torch.ops.aten._local_scalar_dense.default:
            self.counts[caller()] += 1
        return function(*args, **(kwargs or {}))


def caller() -> str:
    """file:line of the innermost frame that belongs neither to torch nor to this file."""
    library = (str(Path(torch.__file__).parent), __file__)
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(library):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@dataclass
class Traffic:
    calls: int = 0
    bytes: int = 0


class CommunicationCounter(TorchDispatchMode):
    """Counts collectives, those of DDP and FSDP too: {(kind, axis): Traffic}.

    `kind` is all_gather, reduce_scatter, all_reduce, ...; `axis` is the mesh axis whose ranks took
    part, or "world". An axis of one rank sends nothing and does not count. Bytes are those of the
    full tensor that is gathered, scattered or reduced: a ring sends (n - 1) / n of it from each
    rank for a gather or a scatter, and twice that for an all_reduce.
    """

    C10D_KINDS = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
    }

    def __init__(self, mesh: DeviceMesh):
        super().__init__()
        self.axes: dict[str, str | None] = {}  # name of the process group -> axis
        for axis in mesh.mesh_dim_names:
            name = mesh.get_group(axis).group_name
            self.axes[name] = axis if mesh[axis].size() > 1 else None
        self.counts: dict[tuple[str, str], Traffic] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it decomposes into operations on its local tensors
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "c10d":
            self.count(self.C10D_KINDS.get(name, name), group_name(args), args, result)
        elif namespace == "_c10d_functional" and name == "all_reduce":  # of tp
            self.count(name, args[-1], args, result)
        return result

    def count(self, kind: str, group: str | None, args, result) -> None:
        axis = self.axes.get(group, "world")
        if axis is None:
            return
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
        traffic = self.counts.setdefault((kind, axis), Traffic())
        traffic.calls += 1
        traffic.bytes += max(tensor.nbytes for tensor in tensors)


def group_name(args) -> str | None:
    """The name of the process group among the arguments of a c10d operation."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject):
            return dist.ProcessGroup.unbox(leaf).group_name
    return None


# --------------------------------------------------------------------------------------------------
# The profile window


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of (start, end) spans."""
    total = 0.0
    reached = -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class Clocks:
    """Seconds of this rank at one moment."""

    wall: float
    thread: float  # in which the main thread ran
    data_wait: float  # in which it waited for data

    def since(self, earlier: "Clocks") -> "Clocks":
        return Clocks(
            self.wall - earlier.wall,
            self.thread - earlier.thread,
            self.data_wait - earlier.data_wait,
        )


class Profiler:
    """Traces the steps start + 1 ... stop on each rank, and counts in the step after them.

    Counting slows a step down, so it is kept out of the trace. Each rank writes
    `folder`/rank_N.trace.json, for chrome://tracing or ui.perfetto.dev, and rank_N.json, the
    figures; `say` gets them in words. Without a window every step passes untouched, as it does in a
    run that was resumed inside the window.
    """

    def __init__(
        self,
        window: tuple[int, int] | None,
        folder: Path,
        mesh: DeviceMesh,
        say: Callable[[str], None],
    ):
        self.window = window
        self.path = folder / f"rank_{dist.get_rank()}"
        self.is_cuda = mesh.device_type == "cuda"
        self.mesh = mesh
        self.say = say
        self.trace: profile | None = None
        self.figures: dict = {}

    @contextmanager
    def step(self, step: int, data_wait: float) -> Iterator[None]:
        """Around step number `step`; `data_wait` is the seconds waited for data so far."""
        if self.window is None:
            yield
            return
        start, stop = self.window
        if step == start + 1:
            self.begin(data_wait)
        if self.trace is None or step != stop + 1:
            yield
            return
        self.end(data_wait)
        with CommunicationCounter(self.mesh) as traffic, HostSyncCounter() as syncs:
            yield
        self.figures["host_syncs"] = dict(syncs.counts + self.cuda_syncs)
        self.figures["communicated"] = []
        for (kind, axis), total in traffic.counts.items():
            row = {"kind": kind, "axis": axis, "calls": total.calls, "bytes": total.bytes}
            self.figures["communicated"].append(row)
        self.path.with_suffix(".json").write_text(json.dumps(self.figures, indent=2) + "\n")
        for line in self.report():
            self.say(line)

    def begin(self, data_wait: float) -> None:
        activities = [ProfilerActivity.CPU]
        self.until_end = ExitStack()
        self.warnings: list = []
        if self.is_cuda:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
            # CUDA reports every sync; a dispatch mode sees reads of single values, but no copies.
            self.warnings = self.until_end.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        self.trace = profile(activities=activities)
        self.trace.start()
        self.began = Clocks(time.perf_counter(), time.thread_time(), data_wait)

    def end(self, data_wait: float) -> None:
        if self.is_cuda:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        now = Clocks(time.perf_counter(), time.thread_time(), data_wait)
        self.until_end.close()
        self.trace.stop()
        self.cuda_syncs: Counter[str] = Counter()
        for warning in self.warnings:
            if "synchroniz" in str(warning.message):
                self.cuda_syncs[f"{Path(warning.filename).name}:{warning.lineno}"] += 1
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.trace.export_chrome_trace(f"{self.path}.trace.json")
        self.figures = self.summarize(now.since(self.began))

    def summarize(self, elapsed: Clocks) -> dict:
        start, stop = self.window
        steps = stop - start
        if self.is_cuda:
            busy, exposed = self.gpu_shares(elapsed.wall)
        else:
            # The thread runs, waits for data or waits for other ranks.
            busy = elapsed.thread / elapsed.wall
            exposed = max(0.0, 1 - (elapsed.thread + elapsed.data_wait) / elapsed.wall)
        time_field = f"self_{'device' if self.is_cuda else 'cpu'}_time_total"  # microseconds
        operations = []
        for row in self.trace.key_averages():
            share = getattr(row, time_field) / 1e6 / elapsed.wall
            operations.append({"name": row.key, "calls": row.count / steps, "share": share})
        operations.sort(key=lambda operation: operation["share"], reverse=True)
        return {
            "steps": [start + 1, stop],
            "step_time": elapsed.wall / steps,
            "busy": busy,
            "exposed_communication": exposed,
            "data_wait": elapsed.data_wait / elapsed.wall,
            "operations": operations[:10],
        }

    def gpu_shares(self, wall: float) -> tuple[float, float]:
        """Return the share of the time in which the GPU ran anything, and only communication."""
        busy = []
        compute = []
        for event in self.trace.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                span = (event.time_range.start / 1e6, event.time_range.end / 1e6)  # seconds
                busy.append(span)
                if not event.name.startswith("nccl"):
                    compute.append(span)
        busy_time = union_length(busy)
        return busy_time / wall, (busy_time - union_length(compute)) / wall

    def report(self) -> Iterator[str]:
        f = self.figures
        first, last = f["steps"]
        yield (
            f"profile steps {first} to {last}, {f['step_time'] * 1e3:,.1f} ms each, on this rank: "
            f"{f['busy']:.0%} busy, {f['exposed_communication']:.0%} exposed communication, "
            f"{f['data_wait']:.0%} waiting for data"
        )
        syncs = [f"{times} x {place}" for place, times in f["host_syncs"].items()]
        yield f"        host syncs: {', '.join(syncs) or 'none'}"
        for row in f["communicated"]:
            megabytes = f"{row['bytes'] / 1e6:,.2f} MB a step"
            yield f"        {row['calls']:.0f} x {row['kind']} over {row['axis']}: {megabytes}"
        for row in f["operations"]:
            yield f"        {row['share']:6.1%}  {row['calls']:6.0f} x {row['name']}"
        yield f"        trace: {self.path}.trace.json"
