"""The memory of a rank: an estimate of its peak, what there is, and what freed memory keeps."""

import contextlib
import ctypes
import dataclasses
import fnmatch
import itertools
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

# --------------------------------------------------------------------------------------------------
# The estimate

# What a process on a CPU takes before it holds a tensor: Python, torch's libraries, gloo.
# Measured on Linux with torch 2.13; it does not depend on the model.
PROCESS_BYTES = 350_000_000
# What the profiler records of a block's forward and backward: 6 MB (single) to 8 MB (recomputed),
# measured with torch 2.13, 2 and 8 blocks, 1 and 4 micro-batches, 3 to 20 steps.
TRACED_BYTES = 7_000_000


@dataclass(frozen=True)
class Estimate:
    """The peak memory of a rank in bytes, part by part: see `estimate`."""

    weights: int  # float32
    gradients: int  # float32; under ddp DDP's buckets
    optimizer: int  # AdamW's two moments, float32
    accumulated: int  # beyond `gradients`: those not synchronized yet; under ddp see `estimate`
    gathered: int  # weights in the compute dtype and gradients on their way, of a unit or the model
    activations: int
    logits: int
    process: int  # 0 on a GPU
    profile: int  # what --profile has recorded, in host memory; 0 on a GPU
    kept: int  # freed memory that the C library has not used again; 0 on a GPU

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    @property
    def transient(self) -> int:
        """What a step allocates and frees."""
        persistent = self.weights + self.optimizer + self.process + self.profile
        return self.total - persistent

    def __str__(self) -> str:
        """One line of arithmetic; parts that are 0 are left out."""
        unit, name = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
        digits = 2 if name == "GB" else 1
        parts = []
        for part, size in dataclasses.asdict(self).items():
            if size:
                parts.append(f"{part} {size / unit:,.{digits}f}")
        return f"{' + '.join(parts)} = {self.total / unit:,.{digits}f} {name}"


def estimate(
    model: nn.Module,
    mesh_shape: tuple[int, int, int],
    strategy: str,
    *,
    dtype: torch.dtype,
    tp_plan: dict[str, ParallelStyle],
    fsdp_units: list[list[nn.Module]],
    reshard_after_forward: bool,
    recomputes: bool,
    grad_sync: str,
    grad_accum_steps: int,
    activations: int,
    logits: int,
    traced_blocks: int,
    device_type: str,
) -> Estimate:
    """Estimate the peak memory of a rank. `model` is whole, and may be on the meta device.

    `recomputes` says whether activation checkpointing is on; `activations` and `logits` are bytes
    for one micro-batch on one rank of a tp group; `traced_blocks` counts the forward passes of
    blocks that a profile records. The other arguments are those of `parallelize` and
    `gradient_sync`. Weights, gradients and optimizer are exact. All parts are added, although
    activations shrink while gradients grow.
    """
    _, dp_shard, tp = mesh_shape
    whole = local_numels(model, tp, tp_plan)  # of each parameter, under tp this rank's part
    is_fsdp = strategy in ("fsdp", "hsdp") or (strategy == "ddp" and tp > 1)
    own = local_numels(model, tp, tp_plan, dp_shard) if is_fsdp else whole
    own_numel = sum(own.values())
    if is_fsdp:
        gathered = fsdp_buffers(model, whole, dtype, fsdp_units, reshard_after_forward)
    else:
        gathered = cast_buffers(model, whole, dtype, recomputes)
    accumulated = 0
    if grad_sync == "batch" and grad_accum_steps > 1 and strategy != "single":
        if is_fsdp:  # whole gradients; those of a unit are freed when its shards have been reduced
            accumulated = 4 * (gradient_numel(model, whole, tp) - own_numel)
        else:  # in DDP's buckets, which DDP replaces once, before the second step computes
            accumulated = max(0, 4 * own_numel - gathered - activations - logits)
    found = Estimate(
        weights=4 * own_numel,
        gradients=4 * own_numel,
        optimizer=8 * own_numel,
        accumulated=accumulated,
        gathered=gathered,
        activations=activations,
        logits=logits,
        process=0,
        profile=0,
        kept=0,
    )
    return on_cpu(found, is_fsdp, traced_blocks) if device_type == "cpu" else found


def on_cpu(found: Estimate, is_fsdp: bool, traced_blocks: int) -> Estimate:
    """Add what a process on a CPU takes besides tensors.

    `kept` is an empirical rule for glibc 2.36, see `tools.bench memory`: FSDP allocates blocks of
    many sizes with every unit, which leave as much again in gaps. Without it, gradients stay where
    they are, and the rest leaves half as much.
    """
    kept = found.transient
    if not is_fsdp:
        kept = (found.gathered + found.activations + found.logits) // 2
    profile = TRACED_BYTES * traced_blocks
    return dataclasses.replace(found, process=PROCESS_BYTES, profile=profile, kept=kept)


def local_numels(
    model: nn.Module, tp: int, tp_plan: dict[str, ParallelStyle], dp_shard: int = 1
) -> dict[str, int]:
    """Elements of each parameter on one rank: split by tp, then by FSDP along dimension 0.

    FSDP pads the last shards: every rank has the rows of the first one, rounded up.
    """
    numels = {}
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        module = name.rpartition(".")[0]
        for pattern, style in tp_plan.items():
            if tp > 1 and fnmatch.fnmatchcase(module, pattern):
                is_linear = isinstance(model.get_submodule(module), nn.Linear)
                if isinstance(style, RowwiseParallel) and is_linear:
                    shape[1] //= tp  # splits inputs
                elif isinstance(style, (ColwiseParallel, RowwiseParallel)):
                    shape[0] //= tp  # splits outputs, or the rows of an embedding
        shape[0] = -(-shape[0] // dp_shard)  # rounded up
        numels[name] = torch.Size(shape).numel()
    return numels


def gradient_numel(model: nn.Module, numels: dict[str, int], tp: int) -> int:
    """Elements of the gradients that a rank accumulates before FSDP shards them.

    Under tp, torch computes all rows of a separate embedding's gradient on every rank.
    """
    rows_of_others = 0 if model.config.tied else (tp - 1) * numels["embed.weight"]
    return sum(numels.values()) + rows_of_others


def unit_numels(
    model: nn.Module, numels: dict[str, int], units: list[list[nn.Module]]
) -> tuple[list[int], int]:
    """Return the elements of each FSDP unit, and of the rest of the model."""
    numel_of = {}  # id of a parameter -> elements
    for name, parameter in model.named_parameters():
        numel_of[id(parameter)] = numels[name]
    sizes = []
    for unit in units:
        parameters = itertools.chain.from_iterable(module.parameters() for module in unit)
        sizes.append(sum(numel_of[id(parameter)] for parameter in parameters))
    return sizes, sum(numels.values()) - sum(sizes)


def fsdp_buffers(
    model: nn.Module,
    numels: dict[str, int],
    dtype: torch.dtype,
    units: list[list[nn.Module]],
    reshard_after_forward: bool,
) -> int:
    """Bytes of FSDP's gathered weights and of gradients on their way to a reduce_scatter.

    In the backward pass of a unit of U parameters, a size being that of the compute dtype:

        size U   its weights                 size V   the next unit's, which are on their way
        size U   its gradients               4 U      the input of the last unit's reduce_scatter

    An embedding's weights are not gathered for it. The rest of the model stays gathered, and so do
    all units without reshard_after_forward. The rest's gradients come last, when the units' buffers
    are free again.
    """
    size = dtype.itemsize
    sizes, rest = unit_numels(model, numels, units)
    largest = max(sizes, default=0)
    gathered = size * (largest_pair(units, sizes) if reshard_after_forward else sum(sizes))
    in_units = 2 * size * rest + gathered + (size + 4) * largest
    in_rest = size * rest + max(2 * size, 4) * rest
    return max(in_units, in_rest)


def largest_pair(units: list[list[nn.Module]], sizes: list[int]) -> int:
    """The most elements that two neighbouring units gather for the backward pass."""
    needed = []
    for unit, numel in zip(units, sizes):
        is_embedding = all(isinstance(module, nn.Embedding) for module in unit)
        needed.append(0 if is_embedding else numel)
    return max(one + other for one, other in itertools.pairwise([0, *needed, 0]))


def cast_buffers(
    model: nn.Module, numels: dict[str, int], dtype: torch.dtype, recomputes: bool
) -> int:
    """Bytes of weights cast to the compute dtype, which wait for the backward pass (single, ddp).

    With activation checkpointing, only those of one block at a time.
    """
    largest = 4 * max(numels.values())  # a gradient before it is added to the others
    if dtype == torch.float32:
        return largest
    embedding = 0 if model.config.tied else numels["embed.weight"]  # it is only looked up
    cast = sum(numels.values()) - embedding
    if recomputes:
        blocks, _ = unit_numels(model, numels, [[block] for block in model.blocks])
        cast -= sum(blocks) - max(blocks)
    return dtype.itemsize * cast + largest


# --------------------------------------------------------------------------------------------------
# What there is


def device_memory(device: torch.device, local_size: int) -> int:
    """Bytes that one of a host's `local_size` ranks may fill: its GPU, or its share of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return available_memory() // local_size


def available_memory() -> int:
    """Bytes that this host can give to its processes, the page cache included.

    Linux's MemAvailable, or less where a cgroup limits the processes; elsewhere, where the system
    does not say what is available, all physical memory.
    """
    fields = read_fields(Path("/proc/meminfo"))
    if "MemAvailable:" in fields:
        available = 1024 * fields["MemAvailable:"]
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cgroup = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max": no limit
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        cache = read_fields(cgroup / "memory.stat").get("inactive_file", 0)
        available = min(available, max(0, limit - used + cache))
    return available


def read_fields(path: Path) -> dict[str, int]:
    """The lines "name number ..." of a file of the kernel; none where it does not exist."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[1].isdecimal():
                fields[words[0]] = int(words[1])
    return fields


def shortage(need: Estimate, local_size: int) -> str | None:
    """What this host lacks for its `local_size` ranks on CPUs, before they build their models.

    None if it lacks nothing.
    """
    available = available_memory()
    missing = local_size * (need.total - need.process)  # the processes themselves run already
    if missing <= available:
        return None
    return (
        f"on {socket.gethostname()} this run needs {missing / 1e9:,.1f} GB more ({local_size} x "
        f"{missing / local_size / 1e9:,.1f} a rank), and {available / 1e9:,.1f} GB are available: "
        "lower --micro_batch_size, shard with --strategy fsdp, or start fewer ranks on a host"
    )


# --------------------------------------------------------------------------------------------------
# What glibc does with freed memory
#
# By default glibc returns large blocks to the kernel at once, which clears every page before
# handing it out again: a fifth of a step of gpt2-124m. So training takes all blocks from the heap
# and keeps them for the next step, as torch does on GPUs. But the build and the first step do not:
# they also create what lives until the end, small objects that would lie between the large blocks
# and keep their memory from ever being merged and used again. Other C libraries have neither
# mallopt nor malloc_trim.

# Options of mallopt, from malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
M_ARENA_MAX = -8


def set_malloc_option(option: int, value: int) -> None:
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(option, value)


def separate_large_blocks() -> None:
    """Allocate blocks of 1 MiB and more outside the heap, and one heap for all threads.

    gloo's threads would otherwise have heaps that cannot hold their buffers.
    """
    set_malloc_option(M_MMAP_THRESHOLD, 1 << 20)
    set_malloc_option(M_ARENA_MAX, 1)


def keep_freed_memory(limit: int) -> None:
    """Keep freed memory for the next step, up to `limit` bytes where it ends the heap.

    A small object behind a free block hides it from that limit, so the training loop also calls
    `trim_freed_memory` now and then.
    """
    set_malloc_option(M_MMAP_MAX, 0)
    set_malloc_option(M_TRIM_THRESHOLD, min(limit, 2**31 - 1))  # an int
    trim_freed_memory()


def trim_freed_memory() -> None:
    """Return to the kernel what is free now, in the whole heap."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)
