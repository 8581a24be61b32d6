"""Processes, the device mesh, and a strategy as a way to lay a model out on it. Knows nothing of files or text.

    dp_replicate x dp_shard x tp        single (1, 1, T)    ddp (R, 1, T)    fsdp (1, S, T)    hsdp (R, S, T)

Ranks that differ in dp_shard or tp hold different parts of the weights; ranks that differ in dp_replicate hold the same part.
The T ranks of a tp group read the same data and compute one forward pass together; all others read different data:
dp_rank = replicate_rank * S + shard_rank covers 0 ... R * S - 1.
"""

import ctypes
import functools
import itertools
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

T = TypeVar("T")


class MeshError(ValueError):
    """Processes, devices or mesh sizes that do not fit together; the user can mend it."""


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    local_rank: int  # on this host
    local_size: int
    device: torch.device
    timeout: timedelta = dist.default_pg_timeout  # of collectives
    store: dist.Store | None = None  # a second connection to the store in which the ranks met


def read_slurm() -> None:
    """Where srun has started this process and torchrun has not, give srun's variables the names of torchrun's.

    The ranks meet on the first host of the step, at a port that comes from the job's number; MASTER_ADDR and MASTER_PORT
    override both.
    """
    slurm = {
        name.removeprefix("SLURM_"): value
        for name, value in os.environ.items()
        if name.startswith("SLURM_")
    }
    if "RANK" in os.environ or "STEP_NUM_TASKS" not in slurm:
        return
    hosts = re.finditer(
        r"(\d+)(?:\(x(\d+)\))?", slurm["STEP_TASKS_PER_NODE"]
    )  # "4(x2),3": 4, 4 and 3 tasks
    tasks = [
        int(number)
        for number, times in (host.groups() for host in hosts)
        for _ in range(int(times or 1))
    ]
    prefix, first = re.match(r"([^\[,]+)(?:\[([^],-]+))?", slurm["STEP_NODELIST"]).groups(
        ""
    )  # "gpu[07-09,12]": gpu07
    os.environ |= {
        "RANK": slurm["PROCID"],
        "WORLD_SIZE": slurm["STEP_NUM_TASKS"],
        "LOCAL_RANK": slurm["LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks[int(slurm["NODEID"])]),
    }
    os.environ.setdefault("MASTER_ADDR", prefix + first)
    os.environ.setdefault("MASTER_PORT", str(20000 + int(slurm["JOB_ID"]) % 10000))


PATIENCE = 10  # starting, compiling and saving may take so many times --timeout


def start(device: str = "auto", timeout: float = 120.0) -> World:
    """Join the process group that torchrun's variables describe, or form one of this process alone.

    There is always a group, so that no code below needs a case for one process: gloo carries CPU tensors and objects,
    nccl CUDA tensors. `timeout`, in seconds, is the Watch's; collectives have PATIENCE times as much. Raises MeshError
    where the device is not there.
    """
    names = {
        "RANK": 0,
        "WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1,
    }  # and their values without torchrun
    rank, size, local_rank, local_size = (
        int(os.environ.get(name, alone)) for name, alone in names.items()
    )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise MeshError(
                "--device cuda: PyTorch finds no CUDA device here; use --device cpu or auto"
            )
        if local_size > torch.cuda.device_count():
            gpus = torch.cuda.device_count()
            raise MeshError(
                f"{local_size} processes on this host, which has {gpus} GPUs: start it with --nproc_per_node {gpus}"
            )
        target = torch.device("cuda", local_rank)
        torch.cuda.set_device(target)
    else:
        target = torch.device("cpu")
        keep_freed_memory()
    limit = timedelta(seconds=PATIENCE * timeout)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives in the flight recorder
    if "RANK" in os.environ:
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))
        # torchrun --max-restarts keeps its store, and in it the addresses of ranks that died: each attempt gets its own part
        store = dist.PrefixStore(
            f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store
        )
    else:
        store = dist.HashStore()
    # Cloned now: later, rank 0 might have left already, and the store with it.
    second_connection = store.clone() if size > 1 else store
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=limit,
        device_id=target if device == "cuda" else None,
    )
    return World(rank, size, local_rank, local_size, target, limit, second_connection)


def stop() -> None:
    dist.destroy_process_group()


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on all; an exception is raised on all, so that none is left waiting."""
    box: list = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


# ---------------------------------------------------------------------------------------------------------------
# What a device can do

# Dense bfloat16 FLOP/s, from NVIDIA's data sheets, without sparsity. A device that is not here has no MFU.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads a rank"


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that MFU divides by; None where it is not known."""
    return PEAK_FLOPS.get(device_name(device)) if dtype == torch.bfloat16 else None


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies in it, else float32."""
    if device.type == "cuda":
        return (
            torch.bfloat16
            if torch.cuda.is_bf16_supported(including_emulation=False)
            else torch.float32
        )
    capabilities = torch.cpu.get_capabilities()
    return (
        torch.bfloat16
        if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
        else torch.float32
    )


def keep_freed_memory() -> None:
    """Have the C library keep what tensors free for those of the next step, as torch does on GPUs itself.

    By default glibc gives large pieces back to the kernel at once, which clears every page before it comes again: a
    quarter of a step of gpt2-124m. Private to glibc; other C libraries are left as they are.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: no free memory is enough to give it back
        mallopt(-4, 0)  # M_MMAP_MAX: large tensors come from the heap too


class Moment:
    """When the device gets to where the host is now in what it asks of it. The host waits only in `wait`."""

    def __init__(self, device: torch.device):
        self.time, self.event = time.perf_counter(), None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def since(self, earlier: "Moment") -> float:
        """Seconds from another moment to this one, on the device; both have passed."""
        return (
            earlier.event.elapsed_time(self.event) / 1e3 if self.event else self.time - earlier.time
        )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on the device; the host does not wait for a GPU."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def peak_device_memory(device: torch.device) -> int:
    """Bytes, at most, that tensors took on the device so far; 0 on a CPU, where the host's memory is all there is."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def peak_host_memory() -> int:
    """Bytes, at most, that this process had resident so far (Linux counts in KiB, macOS in bytes)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


# ---------------------------------------------------------------------------------------------------------------
# The mesh


def mesh_shape(
    strategy: str,
    world_size: int,
    local_size: int,
    replicate: int | None,
    shard: int | None,
    tp: int = 1,
) -> tuple[int, int, int]:
    """(dp_replicate, dp_shard, tp) of a strategy; None: the strategy's own choice. Raises MeshError with the arithmetic."""
    if world_size % tp:
        raise MeshError(
            f"{world_size} processes / tp {tp} is not a whole number: start a multiple of {tp} or change --tp"
        )
    ranks = world_size // tp  # that read different data
    if strategy == "hsdp" and replicate is None and shard is None:
        shard = max(
            1, local_size // tp
        )  # shard within a host, where links are fast; replicate across hosts
    if strategy == "single" and ranks > 1:
        processes = f"one process is {tp} with --tp {tp}" if tp > 1 else "one process"
        raise MeshError(
            f"--strategy single is {processes}, but {world_size} were started: use ddp, fsdp or hsdp"
        )
    one = {"single": (1, 1), "ddp": (None, 1), "fsdp": (1, None), "hsdp": (None, None)}[strategy]
    for name, given, own in (("dp_replicate", replicate, one[0]), ("dp_shard", shard, one[1])):
        if given is not None and own is not None and given != own:
            raise MeshError(
                f"--strategy {strategy} has {name} {own}, not {given}: leave --{name} out or use --strategy hsdp"
            )
    replicate, shard = replicate or one[0], shard or one[1]
    replicate = replicate or ranks // shard
    shard = shard or ranks // replicate
    if replicate * shard != ranks:
        product, of = (
            f"dp_replicate {replicate} x dp_shard {shard}",
            f" / tp {tp} = {ranks}" if tp > 1 else "",
        )
        raise MeshError(
            f"{product} = {replicate * shard}, but {world_size} processes{of} were started: "
            f"choose --dp_replicate and --dp_shard whose product is {ranks}"
        )
    return replicate, shard, tp


def device_memory(world: World) -> int:
    """Bytes that one rank may fill: its GPU's, or its share of what the host has free."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_properties(world.device).total_memory
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.local_size


def choose_strategy(
    world: World, parameters: int, activations: int, tp: int = 1
) -> tuple[str, str]:
    """(strategy, the sum that decided): ddp where everything fits with a fifth to spare, else fsdp, across hosts hsdp.

    A whole copy takes 16 bytes a parameter: float32 weight and gradient, and AdamW's two moments. ddp sends least.
    """
    need, have = 16 * parameters // tp + activations, device_memory(world)
    fits = need <= 0.8 * have
    several = "hsdp" if world.size > world.local_size else "fsdp"
    strategy = "single" if world.size == tp else "ddp" if fits else several
    weights = f"16 bytes x {parameters:,} parameters" + f" / tp {tp}" * (tp > 1)
    total = f"{weights} + {activations / 1e9:,.2f} GB activations = {need / 1e9:,.2f} GB"
    return strategy, f"{total}, {'at most' if fits else 'more than'} 80% of {have / 1e9:,.1f} GB"


AXES = (
    "dp_replicate",
    "dp_shard",
    "tp",
)  # tp last: its ranks are neighbours on one host, since they talk in every layer


def make_mesh(world: World, shape: tuple[int, int, int]) -> DeviceMesh:
    """The mesh over all ranks, dp_replicate x dp_shard x tp, with the world's timeout for the collectives of every axis."""
    grid = torch.arange(world.size).view(shape)
    groups = []
    for axis, size in enumerate(
        shape
    ):  # one group for each line of ranks along the axis; each rank keeps its own
        lines = grid.movedim(axis, -1).reshape(-1, size).tolist()
        groups.append(dist.new_subgroups_by_enumeration(lines, timeout=world.timeout)[0])
    return DeviceMesh.from_group(groups, world.device.type, mesh=grid, mesh_dim_names=AXES)


def dp_rank(mesh: DeviceMesh) -> int:
    """Which part of the data this rank reads: unique, and complete over 0 ... dp_size - 1."""
    return mesh.get_local_rank("dp_replicate") * mesh["dp_shard"].size() + mesh.get_local_rank(
        "dp_shard"
    )


# ---------------------------------------------------------------------------------------------------------------
# A model on the mesh


def parallelize(
    model: nn.Module,
    plan: dict[str, ParallelStyle],
    units: list[list[nn.Module]],
    mesh: DeviceMesh,
    strategy: str,
    dtype: torch.dtype,
    device: torch.device,
    init: Callable[[str, Tensor], None],
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Lay a model that was built on the meta device out on the mesh, fill it, and return what to call in its place.

    `plan` tells how the ranks of a tp group split which submodules (torch's parallelize_module; Shoeybi et al. 2019).
    `units` are the groups of submodules, in the order of the forward pass, whose weights FSDP gathers together; what is
    left is one more. `reshard_after_forward` drops the gathered weights of a unit after its forward and gathers them
    again for its backward; without, they stay, which is SHARD_GRAD_OP. Weights are kept in float32, FSDP gathers them in
    `dtype`, gradients are averaged in float32 over all dp ranks. `init(name, tensor)` fills one whole tensor; see
    `materialize`. The model's parameters keep their own names.
    """
    tp = mesh["tp"].size() > 1
    if tp:
        parallelize_module(model, mesh["tp"], plan)
    if strategy in ("fsdp", "hsdp") or (
        strategy == "ddp" and tp
    ):  # DDP knows no DTensors: one shard per replica is the same
        # fully_shard reads a 2-D mesh by position: replicate first, then shard. Inputs are left as they are: the model
        # casts its own, and keeps its rotations in float32.
        policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        axes = mesh["dp_shard"] if strategy == "fsdp" else mesh["dp_replicate", "dp_shard"]
        shard = functools.partial(fully_shard, mesh=axes, mp_policy=policy)
        for unit in units:
            shard(unit, reshard_after_forward=reshard_after_forward)
        shard(model)
        # The next unit's weights travel while this one computes. In the backward pass FSDP does so by itself, and the
        # forward pass of a GPU too, whose host runs ahead; saying it here brings it to CPUs.
        for unit, following in itertools.pairwise(units):
            unit[-1].set_modules_to_forward_prefetch([following[0]])
    materialize(model, device, init)
    if strategy == "ddp" and not tp:
        return DistributedDataParallel(
            model,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=mesh.get_group("dp_replicate"),
            gradient_as_bucket_view=True,  # no second copy of the gradients
        )
    return model


def materialize(
    model: nn.Module, device: torch.device, init: Callable[[str, Tensor], None]
) -> None:
    """Give the meta tensors of a model memory and values; a rank never holds more than its shard and one whole tensor.

    Every rank fills the same whole tensor and keeps its part: no communication, and the same weights on every mesh.
    """
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if isinstance(tensor, DTensor):
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                init(name, whole)
                tensor.copy_(
                    distribute_tensor(
                        whole, tensor.device_mesh, tensor.placements, src_data_rank=None
                    )
                )
            else:
                init(name, tensor)


def wrap_units(blocks: list[nn.Module], ends: list[nn.Module], wrap: str) -> list[list[nn.Module]]:
    """FSDP's units for `--wrap`: each block, each K blocks, or none; `ends` come before and after them and are units too.

    A unit is gathered at once. Larger ones send fewer, longer messages, and hold K blocks' weights: bytes of dtype x
    parameters of the unit, twice where the next one is on its way. Raises MeshError.
    """
    kind, _, size = wrap.partition(":")
    if kind == "none" and not size:
        return []
    if (kind, size) != ("block", "") and (
        kind != "block_group" or not size.isdecimal() or int(size) < 1
    ):
        raise MeshError(f"--wrap {wrap}: choose block, block_group:K (K blocks at a time) or none")
    step = int(size or 1)
    groups = [list(blocks[start : start + step]) for start in range(0, len(blocks), step)]
    return [*([end] for end in ends[:1]), *groups, *([end] for end in ends[1:])]


@contextmanager
def gradient_sync(model: nn.Module, mode: str, last: bool) -> Iterator[None]:
    """Around forward *and* backward of a micro-batch, since DDP decides at forward: when its gradients are averaged over ranks.

    batch: after the `last` one of the step. Until then they add up on each rank, under FSDP unsharded in float32: 4 bytes
    x all parameters. micro_batch: each time, sharded: 4 bytes x parameters / dp_shard, for as many times the traffic.
    shard, for hsdp: scattered within the shard group each time, where links are fast, and averaged over dp_replicate after
    the last one: the memory of the second, and between hosts the traffic of the first.
    """
    if isinstance(model, DistributedDataParallel) and mode == "batch" and not last:
        with model.no_sync():
            yield
    else:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or mode != "batch")
            model.set_requires_all_reduce(last or mode == "micro_batch")
        yield


def checkpoint_activations(blocks: Iterable[nn.Module], mode: str) -> None:
    """Keep less of each block's forward pass and compute it again in the backward pass (Chen et al. 2016).

    full keeps a block's input only: a third more compute. selective keeps what costs most to compute, matrix products and
    attention, and computes norms, rotations and activations again (Korthikanti et al. 2022).
    """
    if mode == "none":
        return
    options = {"use_reentrant": False, "preserve_rng_state": False}  # nothing in a block is random
    if mode == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, SAVED_OPERATIONS
        )
    for block in blocks:  # in place, so that parameters keep their names
        block.forward = functools.partial(checkpoint, block.forward, **options)


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Have torch.compile make kernels of each layer's forward and backward: once for all blocks, since they are alike.

    Before FSDP wraps them, so that what it gathers and drops stays outside. In place, so that parameters keep their names.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


SAVED_OPERATIONS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,  # attention written out
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_reduce.default,  # of tp: what was received need not be sent again
]


def gather(values: Tensor) -> Tensor:
    """Every rank's 1-D tensor (k,) as one (world size, k), on every rank: one small collective."""
    rows = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, values)
    return torch.stack(rows)
