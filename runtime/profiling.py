"""Where the time of a step goes: host syncs, communication, and a trace."""

import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

# Private, but nothing else sees every operation, including the collectives of DDP and FSDP.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# --------------------------------------------------------------------------------------------------
# Counters


# Tags of operations whose result or its shape depends on values, like .item() and nonzero
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def asks_for_values(function, args) -> bool:
    """Whether a GPU's host would wait for values, to know the result or its shape."""
    if function is torch.ops.aten.index.Tensor:  # a mask hides the shape, integers do not
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return not WAITS.isdisjoint(function.tags)


class HostSyncCounter(TorchDispatchMode):
    """Counts where the host reads a tensor's values, on any device: {"train.py:123": times}."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it decomposes into operations on its local tensors
        if asks_for_values(function, args):
            self.counts[caller()] += 1
        return function(*args, **(kwargs or {}))


def caller() -> str:
    """file:line of the innermost frame outside torch and this file."""
    library = (str(Path(torch.__file__).parent), __file__)
    frame = sys._getframe()
    while frame.f_back and frame.f_code.co_filename.startswith(library):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class CudaSyncCounter(warnings.catch_warnings):
    """Counts where the host waits for the GPU, copies included: {"train.py:123": times}.

    Leaving the context fills `counts`.
    """

    def __init__(self):
        super().__init__(record=True)
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "CudaSyncCounter":
        self.caught = super().__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *error) -> None:
        torch.cuda.set_sync_debug_mode("default")
        super().__exit__(*error)
        for warning in self.caught:
            # Skips torch's notice that this mode does not detect all synchronizations.
            if "called a synchronizing" in str(warning.message):
                self.counts[f"{Path(warning.filename).name}:{warning.lineno}"] += 1


@dataclass
class Traffic:
    calls: int = 0
    bytes: int = 0


class CommunicationCounter(TorchDispatchMode):
    """Counts collectives, including those of DDP and FSDP: {(kind, axis): Traffic}.

    `kind` is all_gather, reduce_scatter, all_reduce, ...; `axis` is the mesh axis whose ranks took
    part, or "world". An axis of one rank sends nothing and does not count. Bytes are those of the
    full tensor that is gathered, scattered or reduced: on a ring each rank sends (n - 1) / n of it
    for a gather or a scatter, twice that for an all_reduce.
    """

    KINDS = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
        # DTensor's, from tp and from an optimizer that gathers
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_reduce": "all_reduce",
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
        self.count_operation(function, args, result)
        return result

    def count_operation(self, function, args, result) -> None:
        """Count an operation, already run, if it is a collective."""
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "c10d":
            kind, group = self.KINDS.get(name, name), group_name(args)
        elif namespace == "_c10d_functional" and name in self.KINDS:
            kind, group = self.KINDS[name], args[-1]
        else:
            return
        if axis := self.axes.get(group, "world"):
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.record(kind, axis, max(tensor.nbytes for tensor in tensors))

    def record(self, kind: str, axis: str, size: int) -> None:
        traffic = self.counts.setdefault((kind, axis), Traffic())
        traffic.calls += 1
        traffic.bytes += size


def group_name(args) -> str | None:
    """The name of the process group among the arguments of a c10d operation."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject):
            return torch.distributed.ProcessGroup.unbox(leaf).group_name
    return None


# --------------------------------------------------------------------------------------------------
# The profile window


def covered_seconds(events: Iterable) -> float:
    """The length of the union of the events' time ranges."""
    total = 0.0
    reached = -math.inf
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6  # from microseconds


def gpu_work(events: Iterable) -> list:
    """The profiler's events, or averages of them, that are GPU work: kernels, copies and fills.

    Not ranges annotated by the host, such as "FSDP::all_gather" or "nccl:all_reduce", which cover
    idle time between their kernels; nor CPU operations, whose time repeats that of their kernels.
    """
    cuda = torch.autograd.DeviceType.CUDA
    return [event for event in events if event.device_type == cuda and not event.is_user_annotation]


def clocks(data_wait: float) -> np.ndarray:
    """Seconds so far: wall clock, main thread running, main thread waiting for data."""
    return np.array([time.perf_counter(), time.thread_time(), data_wait])


class Profiler:
    """Traces the steps start + 1 ... stop on each rank, and counts in the step after them.

    Counting slows a step down, so it stays out of the trace. Each rank writes
    `folder`/rank_N.trace.json, for chrome://tracing or ui.perfetto.dev, and the figures to
    rank_N.json; `say` gets them in words. Does nothing without a window, or if the run resumed
    inside it. An exception in the profiler costs only the profile.

    torch's profiler corrupts memory if it starts or stops while a collective runs on a gloo thread.
    Before it does, `wait` of each object `in_flight` is called; the step's own have ended by then.
    """

    def __init__(
        self,
        window: tuple[int, int] | None,
        folder: Path,
        mesh: DeviceMesh,
        say: Callable[[str], None],
        in_flight: Iterable,
    ):
        self.start, self.stop = window or (math.inf, math.inf)
        self.path = folder / f"rank_{torch.distributed.get_rank()}"
        self.mesh = mesh
        self.is_cuda = mesh.device_type == "cuda"
        self.say = say
        self.in_flight = in_flight
        self.has_begun = False  # on all ranks, whether or not the profiler works on this one
        self.trace: profile | None = None  # while it runs
        self.figures: dict = {}  # from the trace, until the next step has been counted

    @contextmanager
    def step(self, step: int, data_wait: float) -> Iterator[None]:
        """Wrap step number `step`; `data_wait` is the seconds waited for data so far."""
        if step == self.start + 1:
            self.has_begun = True
            self.attempt(self.begin, data_wait)
        if not self.has_begun or step != self.stop + 1:
            yield
            return
        if self.trace:
            self.attempt(self.end, data_wait)
        syncs = CudaSyncCounter() if self.is_cuda else HostSyncCounter()
        with CommunicationCounter(self.mesh) as traffic, syncs:
            yield
        waited = self.exchange(self.figures.get("waited", math.nan))
        if self.figures:
            self.attempt(self.finish, syncs.counts, traffic.counts, waited)

    def exchange(self, seconds: float) -> list[float]:
        """The value of each rank."""
        of_ranks = [math.nan] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_ranks, seconds)
        return of_ranks

    def attempt(self, part: Callable, *arguments) -> None:
        """Call a part of the profile; if it fails, give up the profile, not the run."""
        try:
            part(*arguments)
        except Exception as error:
            self.trace = None
            self.figures = {}
            print(
                f"rank {torch.distributed.get_rank()}: no profile: {error!r}",
                file=sys.stderr,
                flush=True,
            )

    def wait(self) -> None:
        for each in self.in_flight:
            each.wait()

    def begin(self, data_wait: float) -> None:
        activities = [ProfilerActivity.CPU]
        if self.is_cuda:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self.wait()
        self.trace = profile(activities=activities)
        self.trace.start()
        self.began = clocks(data_wait)

    def end(self, data_wait: float) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
        elapsed = clocks(data_wait) - self.began
        self.wait()
        self.trace.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.trace.export_chrome_trace(f"{self.path}.trace.json")
        self.figures = self.summarize(*elapsed.tolist())
        self.trace = None

    def summarize(self, wall: float, thread: float, data_wait: float) -> dict:
        """The figures of the window, from the seconds that `clocks` measured."""
        steps = self.stop - self.start
        events = self.trace.events()
        rows = self.trace.key_averages()
        if self.is_cuda:
            work = gpu_work(events)
            # Communication is named like ncclDevKernel_AllGather_RING_LL(...).
            compute = [event for event in work if not event.name.startswith("nccl")]
            busy = covered_seconds(work)
            exposed = busy - covered_seconds(compute)
            rows = gpu_work(rows)
        else:
            # While the thread does not run it waits for data, or for a collective, or it sleeps.
            sent = covered_seconds(event for event in events if event.name.startswith("gloo:"))
            idle = max(0.0, wall - thread - data_wait)
            busy, exposed = (
                thread,
                min(sent, idle) if torch.distributed.get_world_size() > 1 else 0.0,
            )
        operations = []
        for row in rows:
            microseconds = row.self_device_time_total if self.is_cuda else row.self_cpu_time_total
            share = microseconds / 1e6 / wall
            operations.append({"name": row.key, "calls": row.count / steps, "share": share})
        operations.sort(key=lambda operation: operation["share"], reverse=True)
        return {
            "steps": [self.start + 1, self.stop],
            "step_time": wall / steps,
            "busy": busy / wall,
            "exposed_communication": exposed / wall,
            "data_wait": data_wait / wall,
            "waited": exposed / steps,
            "operations": operations[:10],
        }

    def finish(
        self,
        host_syncs: dict[str, int],
        traffic: dict[tuple[str, str], Traffic],
        waited: list[float],
    ) -> None:
        """Write and report the figures, with those of the counted step and of all ranks."""
        communicated = []
        for (kind, axis), total in traffic.items():
            communicated.append({"kind": kind, "axis": axis, **vars(total)})
        self.figures |= {"host_syncs": dict(host_syncs), "communicated": communicated}
        self.figures["waited"] = [seconds if seconds >= 0 else None for seconds in waited]
        self.path.with_suffix(".json").write_text(json.dumps(self.figures, indent=2) + "\n")
        f = self.figures
        self.say(
            f"profile steps {self.start + 1} to {self.stop}, {f['step_time'] * 1e3:,.1f} ms each, "
            f"on this rank: {f['busy']:.0%} busy, {f['exposed_communication']:.0%} exposed "
            f"communication, {f['data_wait']:.0%} waiting for data"
        )
        syncs = [f"{times} x {place}" for place, times in host_syncs.items()]
        lines = [f"host syncs: {', '.join(syncs) or 'none'}"]
        ranks = [rank for rank, seconds in enumerate(waited) if seconds >= 0]
        if len(ranks) > 1:
            slow = min(ranks, key=waited.__getitem__)
            most = max(map(waited.__getitem__, ranks))
            lines.append(
                f"slowest is rank {slow}: it waited {waited[slow] * 1e3:,.1f} ms a step for the "
                f"others, who waited up to {most * 1e3:,.1f} ms"
            )
        for row in communicated:
            megabytes = f"{row['bytes'] / 1e6:,.2f} MB a step"
            lines.append(f"{row['calls']:.0f} x {row['kind']} over {row['axis']}: {megabytes}")
        for row in f["operations"]:
            # Some kernel names have hundreds of characters.
            lines.append(f"{row['share']:6.1%}  {row['calls']:6.0f} x {row['name']:.60}")
        for line in [*lines, f"trace: {self.path}.trace.json"]:
            self.say(f"        {line}")
