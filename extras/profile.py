"""--profile START:STOP: where the time of a step goes: host syncs, communication, and a trace.

A traced step is a few percent slower, and the step after the last one, in which operations are
counted, several times. To remove it, delete this file and its branch in train.profile_steps.
"""

import inspect
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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

# Tags of operations that depend on values: in their result (.item()) or its shape (nonzero)
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def asks_for_values(function, args) -> bool:
    """Whether the host would wait for a GPU's values to know the result or its shape."""
    if function is torch.ops.aten.index.Tensor:  # a mask's values decide the shape
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return not WAITS.isdisjoint(function.tags)


def copies_and_waits(function, args, kwargs, result) -> bool:
    """Whether an operation copies between two devices and makes the host wait for it."""
    aten = torch.ops.aten
    if function not in (aten._to_copy.default, aten.copy_.default):
        return False
    source = args[1] if function is aten.copy_.default else args[0]
    is_async = kwargs.get("non_blocking") or True in args[2:]
    return source.device != result.device and not is_async


class OperationCounter(TorchDispatchMode):
    """Calls `count_operation` with each operation, its arguments and its result.

    Compiled code stays compiled: the counter sees its collectives, but not what it has fused.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # by default, compiled functions run uncompiled under a dispatch mode

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operations on its local tensors
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.count_operation(function, args, kwargs, result)
        return result


class HostSyncCounter(OperationCounter):
    """Counts where the host waits for a GPU, or would if there were one: {"train.py:123": times}.

    It waits where it reads a tensor's values, and where it copies between host and device.
    """

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def count_operation(self, function, args, kwargs, result) -> None:
        if asks_for_values(function, args) or copies_and_waits(function, args, kwargs, result):
            self.count(function.overloadpacket.__name__)

    def count(self, operation: str) -> None:
        place = caller()
        self.counts[f"{Path(place.filename).name}:{place.lineno}"] += 1


def caller(skipping: str = __file__) -> inspect.Traceback:
    """Return the innermost frame outside torch, this file and the file `skipping`."""
    library = (str(Path(torch.__file__).parent), __file__, skipping)
    frame = inspect.currentframe()
    while frame.f_back and frame.f_code.co_filename.startswith(library):
        frame = frame.f_back
    return inspect.getframeinfo(frame, context=0)


@dataclass
class Traffic:
    calls: int = 0
    bytes: int = 0
    dtypes: set[torch.dtype] = field(default_factory=set, compare=False)


def group_name(args) -> str | None:
    """Return the name of the process group in the arguments of a c10d operation, if any."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject):
            return torch.distributed.ProcessGroup.unbox(leaf).group_name
    return None


class CommunicationCounter(OperationCounter):
    """Counts collectives, including those of DDP and FSDP: {(kind, axis): Traffic}.

    `kind` is all_gather, reduce_scatter, all_reduce, ...; `axis` is the mesh axis whose ranks took
    part, or "world". Collectives over an axis of one rank send nothing and are not counted. Bytes
    are the size of the full tensor that is gathered, scattered or reduced: on a ring each rank
    sends (n - 1) / n of it for a gather or a scatter, and 2 (n - 1) / n for an all_reduce. If a
    rank sends and receives different amounts in an all_to_all, the larger amount is counted.
    """

    KINDS = {
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
        "alltoall_base_": "all_to_all",
        "broadcast_": "broadcast",
        # Called by DTensor: for tp, and in an optimizer that gathers
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

    def count_operation(self, function, args, kwargs, result) -> None:
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "c10d":
            kind, group = self.KINDS.get(name, name), group_name(args)
        elif namespace == "_c10d_functional" and name in self.KINDS:
            kind, group = self.KINDS[name], args[-1]
        else:
            return
        if axis := self.axes.get(group, "world"):
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.record(kind, axis, max(tensors, key=lambda tensor: tensor.nbytes))

    def record(self, kind: str, axis: str, full: Tensor) -> None:
        """Count a collective, whose largest tensor is `full`."""
        traffic = self.counts.setdefault((kind, axis), Traffic())
        traffic.calls += 1
        traffic.bytes += full.nbytes
        traffic.dtypes.add(full.dtype)


# --------------------------------------------------------------------------------------------------
# The profile window


def covered_seconds(events: Iterable) -> float:
    """Return the length of the union of the events' time ranges."""
    total = 0.0
    reached = -math.inf
    for start, end in sorted((event.time_range.start, event.time_range.end) for event in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1e6  # from microseconds


def clocks(data_wait: float) -> np.ndarray:
    """Return seconds so far: wall clock, main thread running, main thread waiting for data."""
    return np.array([time.perf_counter(), time.thread_time(), data_wait])


class Profiler:
    """Traces steps start + 1 ... stop on each rank; counts syncs and traffic in the next step.

    Counting slows a step down, so it stays out of the trace. Each rank writes
    `folder`/rank_N.trace.json, for chrome://tracing or ui.perfetto.dev, and the figures to
    rank_N.json, and passes them to `say` as text. Does nothing if the run resumed in the window.

    torch's profiler corrupts memory if it starts or stops while a collective runs on a gloo thread.
    Before that, `wait` is called on all of `in_flight`; the step's collectives have ended by then.
    `data_wait` returns the seconds that this rank has waited for data so far.
    """

    def __init__(
        self,
        window: tuple[int, int],  # start, stop
        folder: Path,
        mesh: DeviceMesh,
        say: Callable[[str], None],
        in_flight: Iterable,
        data_wait: Callable[[], float],
    ):
        self.start, self.stop = window
        self.path = folder / f"rank_{torch.distributed.get_rank()}"
        self.mesh = mesh
        self.say = say
        self.in_flight = in_flight
        self.data_wait = data_wait
        self.is_cuda = mesh.device_type == "cuda"
        self.trace: profile | None = None  # from the window's first step on
        self.began = np.zeros(3)  # `clocks` at that step

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The context around step number `step`."""
        if step == self.start + 1:
            self.begin()
        if self.trace and step == self.stop + 1:
            figures = self.end()
            with CommunicationCounter(self.mesh) as traffic, HostSyncCounter() as syncs:
                yield
            self.finish(figures, traffic, syncs)
        else:
            yield

    def wait_for_collectives(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()
        for each in self.in_flight:
            each.wait()

    def begin(self) -> None:
        self.wait_for_collectives()
        cuda = [ProfilerActivity.CUDA] if self.is_cuda else []
        self.trace = profile(activities=[ProfilerActivity.CPU, *cuda])
        self.trace.start()
        self.began = clocks(self.data_wait())

    def end(self) -> dict:
        """Write the trace; return the figures of the window."""
        if self.is_cuda:
            torch.cuda.synchronize()
        wall, thread, data_wait = (clocks(self.data_wait()) - self.began).tolist()
        self.wait_for_collectives()
        self.trace.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.trace.export_chrome_trace(f"{self.path}.trace.json")
        busy, exposed = self.busy_and_exposed(wall, thread, data_wait)
        steps = self.stop - self.start
        return {
            "steps": [self.start + 1, self.stop],
            "step_time": wall / steps,
            "busy": busy / wall,
            "exposed_communication": exposed / wall,
            "data_wait": data_wait / wall,
            "waited": exposed / steps,
        }

    def busy_and_exposed(self, wall: float, thread: float, data_wait: float) -> tuple[float, float]:
        """Return seconds of work, and seconds of communication during which nothing else ran."""
        events = self.trace.events()
        if not self.is_cuda:
            # While the main thread does not run, it waits for data or a collective, or it sleeps.
            sent = covered_seconds(event for event in events if event.name.startswith("gloo:"))
            return thread, min(sent, max(0.0, wall - thread - data_wait))
        # Kernels, copies and fills: neither CPU operations nor ranges that the host annotates (for
        # example "FSDP::all_gather"), which include idle time.
        cuda = torch.autograd.DeviceType.CUDA
        work = [each for each in events if each.device_type == cuda and not each.is_user_annotation]
        # NCCL's kernels have names like ncclDevKernel_AllGather_RING_LL(...).
        compute = [event for event in work if not event.name.startswith("nccl")]
        busy = covered_seconds(work)
        return busy, busy - covered_seconds(compute)

    def finish(self, figures: dict, traffic: CommunicationCounter, syncs: HostSyncCounter) -> None:
        """Gather how long each rank waited, then write and print all figures."""
        waited = [0.0] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(waited, figures["waited"])
        communicated = []
        for (kind, axis), total in traffic.counts.items():
            row = {"kind": kind, "axis": axis, "calls": total.calls, "bytes": total.bytes}
            dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in total.dtypes)
            communicated.append(row | {"dtypes": dtypes})
        counted = {"host_syncs": dict(syncs.counts), "communicated": communicated}
        figures = {**figures, "waited": waited, **counted}
        self.path.with_suffix(".json").write_text(json.dumps(figures, indent=2) + "\n")
        self.describe(figures)

    def describe(self, figures: dict) -> None:
        """Print the figures of this rank, and which rank is the slowest."""
        self.say(
            f"profile steps {self.start + 1} to {self.stop}, {1e3 * figures['step_time']:,.1f} ms "
            f"each, on this rank: {figures['busy']:.0%} busy, "
            f"{figures['exposed_communication']:.0%} exposed communication, "
            f"{figures['data_wait']:.0%} waiting for data"
        )
        syncs = [f"{times} x {place}" for place, times in figures["host_syncs"].items()]
        self.say(f"        host syncs: {', '.join(syncs) or 'none'}")
        waited = figures["waited"]
        least, most = min(waited), max(waited)
        if len(waited) > 1:
            self.say(
                f"        slowest is rank {waited.index(least)}: it waited {1e3 * least:,.1f} "
                f"ms a step for the others, who waited up to {1e3 * most:,.1f} ms"
            )
        for row in figures["communicated"]:
            total = f"{row['bytes'] / 1e6:,.2f} MB a step handed to torch"
            self.say(f"        {row['calls']} x {row['kind']} over {row['axis']}: {total}")
        self.say(f"        trace: {self.path}.trace.json")
