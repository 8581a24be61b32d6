"""The ranks, the device mesh, and how each strategy lays a model out on the mesh.

    dp_replicate x dp_shard x tp

    single (1, 1, tp)    ddp (R, 1, tp)    fsdp (1, S, tp)    hsdp (R, S, tp)

Ranks that differ in dp_shard or tp hold different parts of the weights; ranks that differ only in
dp_replicate hold the same part. The ranks of a tp group read the same data and compute one
forward pass together. Ranks of different tp groups read different data: dp_rank =
replicate_rank * S + shard_rank is unique for each group and covers 0 ... R * S - 1.
"""

import ctypes
import os
import platform
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Annotated, Literal

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class MeshError(ValueError):
    """Processes, devices or mesh sizes do not fit together."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of ranks, devices and the mesh; config.py explains the annotations."""

    strategy: Annotated[
        Literal["auto", "single", "ddp", "fsdp", "hsdp"], "free", "auto: ddp, on one rank single"
    ] = "auto"
    dp_shard: Annotated[int | None, "once", "ranks per replica (hsdp: all of a host)", (1,)] = None
    tp: Annotated[int, "once", "ranks that compute one forward together", (1,)] = 1
    wrap: Annotated[str, "free", "FSDP unit: auto, block, block_group:K or none"] = "auto"
    reshard_after_forward: Annotated[bool, "free", "false: SHARD_GRAD_OP, more memory"] = True
    grad_sync: Annotated[
        Literal["batch", "micro_batch", "shard"], "free", "when gradients are averaged"
    ] = "batch"
    activation_checkpointing: Annotated[
        Literal["none", "selective", "full"], "free", "what blocks compute again in backward"
    ] = "none"
    compile: Annotated[bool, "free", "compile each block and the loss with torch.compile"] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], "once", "auto: GPUs if available"] = "auto"
    timeout: Annotated[float, "once", "seconds that a collective waits", (1, 1e9)] = 600.0


# --------------------------------------------------------------------------------------------------
# The ranks


@dataclass(frozen=True)
class World:
    """The ranks, and what this one computes on."""

    rank: int
    size: int
    local_size: int  # ranks per host
    device: torch.device
    timeout: timedelta  # of collectives
    device_name: str  # of a GPU, or the architecture of a CPU
    has_bfloat16: bool  # whether the device multiplies in bfloat16, instead of emulating it


def join(device: str = "auto", timeout: timedelta = torch.distributed.default_pg_timeout) -> World:
    """Join the ranks that torchrun started; without torchrun, form a group of one process.

    So there is always a group. `timeout` is that of a collective. Raises MeshError.
    """
    found = find_device(device)
    is_cuda = found.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(found)
    # Connect two ranks when they first send to each other, not each rank to all others.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    store, rank, size = find_ranks(timeout)
    torch.distributed.init_process_group(
        # gloo carries CPU tensors and Python objects, and NCCL carries CUDA tensors.
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        # No device_id: other groups would be split from this one, which has crashed for a group of
        # two backends. So NCCL connects at its first collective.
    )
    return World(
        rank=rank,
        size=size,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        device=found,
        timeout=timeout,
        device_name=torch.cuda.get_device_name(found) if is_cuda else platform.machine(),
        has_bfloat16=has_bfloat16(found),
    )


def find_ranks(timeout: timedelta) -> tuple[torch.distributed.Store, int, int]:
    """Return a store that all ranks share, this rank and their number. Raises MeshError."""
    if "RANK" not in os.environ:
        # Each of several processes would train alone.
        if {os.environ.get(name, "1") for name in ("WORLD_SIZE", "SLURM_NTASKS")} != {"1"}:
            raise MeshError("torchrun must start several processes: see docs/reference.md")
        return torch.distributed.HashStore(), 0, 1
    store, rank, size = next(torch.distributed.rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # After a restart, torchrun's store still has the addresses of ranks that died.
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        store = torch.distributed.PrefixStore(f"attempt {attempt}", store)
    return store, rank, size


def find_device(name: str) -> torch.device:
    """Return the device of this process for --device. Raises MeshError."""
    gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= gpus:
        raise MeshError(f"this host has {gpus} GPUs: change --nproc_per_node, or --device cpu")
    return torch.device("cuda", local_rank)


def has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step, as torch does on GPUs.

    By default it returns large blocks to the kernel, which clears every page before it provides it
    again. That took a fifth of a step of gpt2-124m. Other C libraries have no mallopt.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads, gloo's included
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks also come from the heap
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free memory stays there


# --------------------------------------------------------------------------------------------------
# The mesh

# tp is last, so that its ranks, which communicate most, are neighbours on a host. To add an axis,
# also extend mesh_shape, `parallelize` and dp_rank, which ranks that read the same batch share.
AXES = ("dp_replicate", "dp_shard", "tp")


def mesh_shape(
    strategy: str, world_size: int, local_size: int, dp_shard: int | None, tp: int
) -> tuple[int, int, int]:
    """Return (dp_replicate, dp_shard, tp). Raises MeshError.

    The strategy chooses a dp_shard of None.
    """
    dp_size = max(1, world_size // tp)
    # By default a replica of hsdp is a host, within which links are fast.
    per_replica = dp_shard or max(1, local_size // tp)
    hsdp = max(1, dp_size // per_replica), per_replica
    shapes = {"single": (1, 1), "ddp": (dp_size, 1), "fsdp": (1, dp_size), "hsdp": hsdp}
    shape = shapes[strategy]
    if dp_shard not in (None, shape[1]):
        raise MeshError(f"--strategy {strategy} takes no --dp_shard")
    size = shape[0] * shape[1] * tp
    if size != world_size:
        raise MeshError(
            f"--strategy {strategy} with dp_replicate {shape[0]} x dp_shard {shape[1]} x tp {tp} "
            f"needs {size} processes, but {world_size} were started"
        )
    return (*shape, tp)


def make_mesh(world: World, shape: tuple[int, int, int]) -> DeviceMesh:
    """Create the mesh over all ranks; collectives on every axis have the world's timeout."""
    ranks = torch.arange(world.size).view(shape)
    groups = []  # of this rank; those of init_device_mesh might wait hours for a rank to connect
    for axis, size in enumerate(shape):
        group = torch.distributed.group.WORLD  # for an axis of all ranks
        if size < world.size:
            members = ranks.movedim(axis, -1).reshape(-1, size).tolist()  # as [[0, 1], [2, 3]]
            group, _ = torch.distributed.new_subgroups_by_enumeration(members, world.timeout)
        groups.append(group)
    return DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=AXES)


def dp_rank(mesh: DeviceMesh) -> int:
    """Return the part of the data that this rank reads, 0 ... dp_size - 1; a tp group shares it."""
    replicate_rank = mesh.get_local_rank("dp_replicate")
    shard_rank = mesh.get_local_rank("dp_shard")
    return replicate_rank * mesh["dp_shard"].size() + shard_rank


# --------------------------------------------------------------------------------------------------
# A model on the mesh

# Selective recomputation keeps the results of these, which cost most to compute.
KEPT_OPERATIONS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,  # written-out attention
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,  # of tp: not sent twice
]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    run: Settings,
    init: Callable[[str, Tensor], None] | None,
    dtype: torch.dtype = torch.float32,
    kept: Callable | list = KEPT_OPERATIONS,
) -> nn.Module:
    """Lay out a model, built on the meta device, as the flags say; return the module to call.

    Weights stay in float32, FSDP gathers them in `dtype`, and gradients are averaged in float32
    over all dp ranks. Parameters keep their names.

    model    any module; if it is to be recomputed, compiled or wrapped by blocks, a Transformer
    init     init(name, tensor) fills one full tensor; None: values are undefined
    kept     see `checkpoint_activations`
    """
    if run.activation_checkpointing != "none":
        checkpoint_activations(model.blocks, run.activation_checkpointing, kept)
    if run.compile:
        compile_layers(model, run.tp)
    uses_ddp = run.strategy == "ddp" and run.tp == 1  # DDP cannot hold the parameters of tp
    if run.strategy != "single" and not uses_ddp:
        # fully_shard reads a 2-D mesh by position: replicate first, then shard.
        axes = mesh["dp_shard"] if run.strategy == "fsdp" else mesh["dp_replicate", "dp_shard"]
        shard(model, axes, run, dtype)
    materialize(model, mesh.device_type, init)
    if uses_ddp:
        return DistributedDataParallel(
            model,
            process_group=mesh.get_group("dp_replicate"),
            gradient_as_bucket_view=True,  # no second copy of the gradients
            init_sync=False,  # `materialize` has given all ranks the same weights
        )
    return model


def warm_up_ddp(model: nn.Module, *inputs: Tensor) -> None:
    """Make DDP choose its final buckets, in a forward and backward pass without other effects.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived.
    With three or more ranks, the buckets decide in which order the gradients of the ranks are
    added. After this pass the order is the same in all steps, even the first ones after a restart.
    """
    if isinstance(model, DistributedDataParallel):
        model(*inputs).backward()
        model.zero_grad(set_to_none=False)  # they remain views of the buckets


def shard(model: nn.Module, mesh: DeviceMesh, run: Settings, dtype: torch.dtype) -> None:
    """Apply FSDP to each unit, then to the rest of the model.

    Between steps, each rank holds its shards in float32. In a step, over time:

        forward     gather unit 1   compute 1, gather 2   compute 2, gather 3   ...
                                    free 1                free 2
        backward    gather n-1      compute n-1, gather n-2        compute n-2, gather n-3   ...
                                    free n-1, reduce_scatter n-1   free n-2, reduce_scatter n-2

    "gather" is an all_gather in `dtype`. Unit n and the root keep their weights between the passes.
    In forward, a GPU gathers early because its host runs ahead; a CPU gathers a unit when it needs
    it. Gradients are reduced in float32, in the micro-batches that `gradient_sync` chooses.
    """
    # Inputs keep their dtype: the model casts them, except the RoPE table, which stays in float32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    units = fsdp_units(model, run.wrap)
    for unit in units:
        # The last unit keeps its weights: its backward follows soon after its forward.
        drops = run.reshard_after_forward and unit is not units[-1]
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=drops)
        if isinstance(unit[0], nn.Embedding):
            unit[0].set_unshard_in_backward(False)  # backward needs the indices, not the weight
    fully_shard(model, mesh=mesh, mp_policy=policy)


def fsdp_units(model: nn.Module, wrap: str) -> list[list[nn.Module]]:
    """Return the modules of each FSDP unit; the rest of the model, its root, is one more unit.

    Larger units send fewer, longer messages and need more memory for gathered weights. An embedding
    and a head that are not tied are also units. With --wrap none, the root is the full model.
    """
    size = blocks_per_unit(wrap)
    if size is None:
        return []
    starts = range(0, len(model.blocks), size)
    units = [list(model.blocks[start : start + size]) for start in starts]
    return units if model.config.tied else [[model.embed], *units, [model.head]]


def blocks_per_unit(wrap: str) -> int | None:
    """Return the number of blocks per FSDP unit, or None for all. Raises MeshError."""
    match = re.fullmatch(r"none|block(_group:([1-9]\d*))?", wrap)
    if not match:
        raise MeshError(f"--wrap {wrap}: choose auto, block, block_group:K (of K blocks) or none")
    return None if wrap == "none" else int(match[2] or 1)


@torch.no_grad()
def materialize(model: nn.Module, device: str, init: Callable[[str, Tensor], None] | None) -> None:
    """Allocate and fill the weights of a model on the meta device.

    Every rank fills one full tensor at a time and keeps its part. So the weights are the same on
    every mesh of one type of device without communication, and memory holds only the shards and
    one full tensor. (On GPUs, random numbers depend on the model of the device.)
    """
    model.to_empty(device=device)
    for name, weight in model.named_parameters() if init else ():
        full = torch.empty(weight.shape, device=device)
        init(name, full)
        if isinstance(weight, DTensor):
            # src_data_rank=None: split locally, since all ranks have the full tensor
            layout = weight.device_mesh, weight.placements
            full = distribute_tensor(full, *layout, src_data_rank=None)
        weight.copy_(full)


@contextmanager
def gradient_sync(model: nn.Module, mode: str, is_last: bool) -> Iterator[None]:
    """Choose whether the backward of this micro-batch averages gradients over ranks.

    Use this context around forward *and* backward, since DDP decides in forward. `is_last` marks
    the last micro-batch of a step. What FSDP does in backward, by mode:

                       a micro-batch before the last    the last
        batch          -                                reduce_scatter, all_reduce
        micro_batch    reduce_scatter, all_reduce       reduce_scatter, all_reduce
        shard          reduce_scatter                   reduce_scatter, all_reduce

    Gradients that wait for the last one are unsharded, 4 bytes x all parameters. Those of the other
    modes need 4 bytes x parameters / dp_shard. shard suits hsdp: it needs as little memory as
    micro_batch and, between replicas, as little traffic as batch.
    """
    if isinstance(model, DistributedDataParallel) and mode == "batch" and not is_last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        # FSDP averages in backward: a reduce_scatter over dp_shard, an all_reduce over
        # dp_replicate. The order of the calls matters: the first one also sets the second flag.
        model.set_requires_gradient_sync(is_last or mode != "batch")
        model.set_requires_all_reduce(is_last or mode == "micro_batch")
    yield


# --------------------------------------------------------------------------------------------------
# Recomputation and compilation


def checkpoint_activations(
    blocks: Iterable[nn.Module], mode: str, kept: Callable | list = KEPT_OPERATIONS
) -> None:
    """Keep fewer activations of each block and recompute the rest in backward (Chen et al. 2016).

    full keeps only the input of a block and costs a third more compute. selective keeps results of
    matrix products and attention and recomputes the rest (Korthikanti et al. 2022). `kept` are the
    operations whose results it keeps, or a policy of create_selective_checkpoint_contexts.
    """
    run_block = partial(checkpoint, use_reentrant=False)
    if mode == "selective":
        contexts = partial(create_selective_checkpoint_contexts, kept)
        run_block = partial(run_block, context_fn=contexts)
    for block in blocks:  # replaces forward only, so that parameters keep their names
        block.forward = partial(run_block, block.forward)


def compile_layers(model: nn.Module, tp: int) -> None:
    """Compile the forward of each block and of the loss. FSDP gathers weights outside of it."""
    torch._dynamo.config.optimize_ddp = False  # do not split blocks where DDP's buckets end
    *_, loss = model.head.loss.modules()  # in a chunked loss, the loss of a chunk
    # Inductor silently gave wrong losses under loss_parallel() (torch 2.13, CPU).
    layers = [*model.blocks] if tp > 1 else [*model.blocks, loss]
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


# --------------------------------------------------------------------------------------------------
# Stopping together


class StopRequest:
    """Makes all ranks stop after the same step, at most two steps after one of them got a signal.

    From now on, a signal only sets a flag. After each step the ranks begin to all_reduce their
    flags, from CPU to CPU, and read the result one step later. So devices do not wait, and a host
    waits only for hosts more than one step behind.
    """

    # Ctrl-C; torchrun and schedulers; a closing terminal; schedulers, before a time limit
    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

    def __init__(self, world: World):
        # Half the time-out: after all of it, NCCL would end the process without naming a rank.
        self.group = torch.distributed.new_group(backend="gloo", timeout=world.timeout / 2)
        self.signalled = False
        self.flag = torch.zeros(1)  # 1 if any rank was signalled, once `work` is done
        self.work: torch.distributed.Work | None = None
        self.handlers = {}  # of the process, by signal
        for number in self.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets for SIGHUP
                self.handlers[number] = signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame) -> None:
        self.signalled = True

    def poll(self) -> bool:
        """Pass on this rank's flag; return whether any rank had one at the last call."""
        self.wait()
        was_requested = self.flag.tolist() == [1.0]
        self.flag = torch.tensor([float(self.signalled)])
        largest = torch.distributed.ReduceOp.MAX
        self.work = torch.distributed.all_reduce(self.flag, largest, self.group, async_op=True)
        return was_requested

    def wait(self) -> None:
        if self.work:
            self.work.wait()

    def close(self) -> None:
        """Give signals back to the handlers of the process."""
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


# --------------------------------------------------------------------------------------------------
# A failure of one rank


class RankError(RuntimeError):
    """What happened to another rank: its number, the text of its exception, and its exit status."""

    def __init__(self, text: str, exit_status: int):
        super().__init__(text)
        self.exit_status = exit_status


def on_all_ranks(function: Callable, *arguments, group: ProcessGroup | None = None) -> list:
    """Call `function` on each rank of the group; return the results of all ranks, by rank.

    If it raises on one rank, all ranks raise, because the others would wait for it in their next
    collective. The lowest rank that failed raises its own exception, and other ranks a RankError.
    """
    result = error = failure = None
    try:
        result = function(*arguments)
    except Exception as exception:
        error = exception
        failure = str(error), getattr(error, "exit_status", 1)
    outcomes = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(outcomes, (result, failure), group)
    for rank, (_, failure) in enumerate(outcomes):
        if failure and rank == torch.distributed.get_rank(group):
            raise error
        if failure:
            text, exit_status = failure
            raise RankError(f"rank {rank}: {text}", exit_status) from error
    return [result for result, _ in outcomes]


def on_rank0(function: Callable, *arguments):
    """Call `function` on rank 0; return its result on all ranks."""
    is_called = torch.distributed.get_rank() == 0
    return on_all_ranks(function if is_called else lambda *_: None, *arguments)[0]


@contextmanager
def name_lost_rank(world: World) -> Iterator[None]:
    """A context that says which rank no longer answers, if that is why its block fails.

    It catches the errors of gloo, with which hosts wait for each other in every step.
    """
    answer_within = timedelta(seconds=10)
    group = torch.distributed.new_group(backend="gloo", timeout=world.timeout)
    torch.distributed.monitored_barrier(group)  # connects rank 0 with all others: see `join`
    # Later, rank 0 waits `answer_within` for each other rank, and they wait twice that.
    _set_pg_timeout(2 * answer_within, group)
    try:
        yield
    except RuntimeError as error:
        if hasattr(error, "exit_status") or "gloo/" not in str(error):  # a file of gloo's code
            raise
        try:
            torch.distributed.monitored_barrier(group, answer_within, wait_all_ranks=True)
        except RuntimeError as lost:
            reason = str(lost).strip().partition("\n")[0]
            text = f"a rank died or hangs ({reason}): see its host, and what it printed"
            raise RankError(text, exit_status=1) from error
        raise
