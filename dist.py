"""The device mesh, and how each strategy lays a model out on the mesh.

    dp_replicate x dp_shard x tp

    single (1, 1, tp)    ddp (R, 1, tp)    fsdp (1, S, tp)    hsdp (R, S, tp)

Ranks that differ in dp_shard or tp hold different parts of the weights; ranks that differ only in
dp_replicate hold the same part. The ranks of a tp group read the same data and compute one
forward pass together. Ranks of different tp groups read different data: dp_rank =
replicate_rank * S + shard_rank is unique for each group and covers 0 ... R * S - 1.
"""

import collections
import ctypes
import functools
import itertools
import os
import platform
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
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
        Literal["auto", "single", "ddp", "fsdp", "hsdp"],
        "free",
        "auto: ddp if it fits on one device, else fsdp, or hsdp on several hosts",
    ] = "auto"
    dp_replicate: Annotated[int | None, "once", "number of replicas (hsdp: one per host)", (1,)] = (
        None
    )
    dp_shard: Annotated[int | None, "once", "ranks per replica (hsdp: all of a host)", (1,)] = None
    tp: Annotated[
        int, "once", "tensor parallelism: ranks that compute one forward together", (1,)
    ] = 1
    wrap: Annotated[str, "free", "FSDP unit: auto, block, block_group:K or none", "UNIT"] = "auto"
    reshard_after_forward: Annotated[
        bool,
        "free",
        "free weights after forward and regather in backward; false: SHARD_GRAD_OP",
    ] = True
    grad_sync: Annotated[
        Literal["batch", "micro_batch", "shard"],
        "free",
        "when to average gradients; shard: across hsdp replicas only once per step",
    ] = "batch"
    activation_checkpointing: Annotated[
        Literal["none", "selective", "full"],
        "free",
        "recompute blocks in backward; selective: all but matmuls and attention",
    ] = "none"
    compile: Annotated[bool, "free", "compile the model, or its layers, with torch.compile"] = False
    device: Annotated[Literal["auto", "cpu", "cuda"], "once", "auto: GPUs if available"] = "auto"
    timeout: Annotated[
        float,
        "once",
        "seconds that a collective waits for a rank before the run ends",
        (1, 1e9),
    ] = 600.0


# --------------------------------------------------------------------------------------------------
# The mesh


@dataclass(frozen=True)
class World:
    """The place of this process among all ranks."""

    rank: int
    size: int
    local_rank: int  # on this host
    local_size: int
    device: torch.device
    timeout: timedelta  # of collectives
    backend: str | None = None  # of collectives on the device: see `start`

    @property
    def uses_nccl(self) -> bool:
        return self.device.type == "cuda" and self.backend != "gloo"


# tp is last, so that its ranks, which communicate most, are neighbours on a host. To add an axis,
# also extend mesh_shape, `parallelize` and dp_rank, which ranks that read the same batch share.
AXES = ("dp_replicate", "dp_shard", "tp")


def mesh_shape(
    strategy: str,
    world_size: int,
    local_size: int,
    dp_replicate: int | None = None,
    dp_shard: int | None = None,
    tp: int = 1,
) -> tuple[int, int, int]:
    """Return (dp_replicate, dp_shard, tp); the strategy replaces None. Raises MeshError."""
    dp_size = max(1, world_size // tp)
    if strategy == "hsdp":
        if dp_replicate is None and dp_shard is None:
            dp_shard = max(1, local_size // tp)  # within a host, where links are fast
        shape = (
            dp_replicate or max(1, dp_size // dp_shard),
            dp_shard or max(1, dp_size // dp_replicate),
        )
    else:
        shape = {"single": (1, 1), "ddp": (dp_size, 1), "fsdp": (1, dp_size)}[strategy]
        if (dp_replicate or shape[0], dp_shard or shape[1]) != shape:
            raise MeshError(
                f"--strategy {strategy} sets dp_replicate and dp_shard itself: leave "
                "--dp_replicate and --dp_shard out or use --strategy hsdp"
            )
    size = shape[0] * shape[1] * tp
    if size != world_size:
        raise MeshError(
            f"--strategy {strategy} with dp_replicate {shape[0]} x dp_shard {shape[1]} x tp {tp} "
            f"needs {size} processes, but {world_size} were started: change --strategy, "
            "--dp_replicate, --dp_shard, --tp or the number of processes"
        )
    return (*shape, tp)


def make_mesh(world: World, shape: tuple[int, int, int]) -> DeviceMesh:
    """Create the mesh over all ranks; collectives on every axis have the world's timeout."""
    ranks = torch.arange(world.size).view(shape)
    # For NCCL, create one group and split it per axis. init_device_mesh would split the default
    # group, and also create a gloo group per axis, with a timeout of 30 minutes. Before torch 2.11,
    # split_group could mix up large groups: it identified them by hashes, which may collide.
    groups = []
    if world.uses_nccl:
        nccl_group = torch.distributed.new_group(backend="nccl", timeout=world.timeout)
    for axis, name in enumerate(AXES):
        # One group for each line of ranks along the axis; each rank keeps its own.
        lines = ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist()
        options = {"timeout": world.timeout, "group_desc": name}
        if world.uses_nccl:
            local_group = torch.distributed.split_group(nccl_group, lines, **options)
        else:
            local_group, _ = torch.distributed.new_subgroups_by_enumeration(lines, **options)
        groups.append(local_group)
    return DeviceMesh.from_group(groups, world.device.type, mesh=ranks, mesh_dim_names=AXES)


def dp_rank(mesh: DeviceMesh) -> int:
    """Return the part of the data that this rank reads, 0 ... dp_size - 1; a tp group shares it."""
    replicate_rank = mesh.get_local_rank("dp_replicate")
    shard_rank = mesh.get_local_rank("dp_shard")
    return replicate_rank * mesh["dp_shard"].size() + shard_rank


# --------------------------------------------------------------------------------------------------
# A model on the mesh


def place(
    model: nn.Module,
    mesh: DeviceMesh,
    run: Settings,
    tensor_parallel: Callable[[nn.Module, DeviceMesh], None] | None = None,
    init_weights: bool = True,
) -> nn.Module:
    """Lay out a model as the flags of a run say; return the module to call.

    With ddp, this runs one forward and backward pass: see `warm_up_buckets`.

    model            has embed, blocks and head, and init_tensor(name, tensor, seed)
    run              config.Run, or an object with the same attributes
    tensor_parallel  see `parallelize`
    init_weights     if False, weights are allocated but not filled, as a rehearsal needs them
    """
    mode = run.activation_checkpointing
    if mode != "none":
        checkpoint_activations(model.blocks, mode, model.config, run.tp)
    if run.compile:
        compile_modules(modules_to_compile(model, run))
    forward = parallelize(
        model,
        mesh,
        run.strategy,
        init=functools.partial(model.init_tensor, seed=run.seed) if init_weights else None,
        dtype=run.compute_dtype,
        tensor_parallel=tensor_parallel,
        fsdp_units=fsdp_units(model, run.wrap),
        reshard_after_forward=run.reshard_after_forward,
        keep_gradients=run.grad_sync == "batch" and run.grad_accum_steps > 1,
    )
    if isinstance(forward, DistributedDataParallel) and not run.eval_only:
        shape = (run.micro_batch_size, run.seq_len + 1)  # as in train_step
        tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device_type)
        warm_up_buckets(forward, tokens[:, :-1], tokens[:, 1:])
    return forward


def uses_fsdp(strategy: str, tp: int) -> bool:
    """Whether FSDP holds the parameters, and gathers them.

    DDP does not support the DTensors of tp: ddp with tp is FSDP with one shard per replica.
    """
    return strategy in ("fsdp", "hsdp") or (strategy == "ddp" and tp > 1)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    strategy: str,
    *,
    init: Callable[[str, Tensor], None] | None,
    dtype: torch.dtype = torch.float32,
    tensor_parallel: Callable[[nn.Module, DeviceMesh], None] | None = None,
    fsdp_units: Sequence[list[nn.Module]] = (),
    reshard_after_forward: bool = True,
    keep_gradients: bool = False,
) -> nn.Module:
    """Lay out a model, built on the meta device, on the mesh; return the module to call.

    Weights stay in float32, FSDP gathers them in `dtype`, and gradients are averaged in float32
    over all dp ranks. Parameters keep their names.

    init                    init(name, tensor) fills one full tensor; None: values are undefined
    tensor_parallel         tensor_parallel(model, mesh["tp"]) splits the model over a tp group
    fsdp_units              groups of submodules, in forward order, whose weights FSDP gathers
                            together; the rest of the model is one more unit
    reshard_after_forward   units but the last free gathered weights after forward and, if backward
                            needs them, gather them again; False: SHARD_GRAD_OP
    keep_gradients          DDP's gradients exist from the start, as views of its buckets, in which
                            they accumulate over micro-batches until DDP synchronizes them
    """
    tp = mesh["tp"].size()
    if tp > 1:
        tensor_parallel(model, mesh["tp"])
    if uses_fsdp(strategy, tp):
        # fully_shard reads a 2-D mesh by position: replicate first, then shard.
        axes = mesh["dp_shard"] if strategy == "fsdp" else mesh["dp_replicate", "dp_shard"]
        shard(model, axes, dtype, fsdp_units, reshard_after_forward)
    materialize(model, torch.device(mesh.device_type), init)
    if strategy == "ddp" and tp == 1:
        return replicate(model, mesh, keep_gradients)
    return model


@contextmanager
def gradient_sync(model: nn.Module, mode: str, is_last: bool) -> Iterator[None]:
    """Choose whether the backward of this micro-batch averages gradients over ranks.

    Use this context around forward *and* backward, since DDP decides in forward. `is_last` marks
    the last micro-batch of a step. What FSDP does in backward, by mode:

                       a micro-batch before the last    the last
        batch          -                                reduce_scatter, all_reduce
        micro_batch    reduce_scatter, all_reduce       reduce_scatter, all_reduce
        shard          reduce_scatter                   reduce_scatter, all_reduce

    batch: until the last micro-batch, each rank accumulates gradients. DDP does so in its buckets
        (see `keep_gradients`), FSDP unsharded in float32 (4 bytes x all parameters).
    micro_batch: gradients stay sharded, 4 bytes x parameters / dp_shard, but the traffic is
        grad_accum_steps times as high.
    shard: suits hsdp with fast links within dp_shard. It needs as little memory as micro_batch and,
        between hosts, as little traffic as batch. With fsdp and ddp it is like micro_batch, but
        ddp with tp is hsdp with one shard.
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


def replicate(model: nn.Module, mesh: DeviceMesh, keep_gradients: bool) -> nn.Module:
    """Wrap the model in DDP over dp_replicate."""
    if keep_gradients:
        # DDP moves existing gradients into its buckets now, later ones only when it synchronizes.
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group("dp_replicate"),
        device_ids=[torch.cuda.current_device()] if mesh.device_type == "cuda" else None,
        gradient_as_bucket_view=True,  # no second copy of the gradients
        init_sync=False,  # `materialize` has given all ranks the same weights
    )


def warm_up_buckets(model: DistributedDataParallel, *inputs: Tensor) -> None:
    """Make DDP choose its final buckets now, in a forward and backward pass without other effects.

    DDP rebuilds its buckets after the first backward pass, in the order in which gradients arrived.
    With three or more ranks, the buckets decide in which order the gradients of the ranks are
    added. After this pass the order is the same in all steps, even the first ones after a restart.
    """
    keep_gradients = any(p.grad is not None for p in model.parameters())
    model(*inputs).backward()
    model.zero_grad(set_to_none=not keep_gradients)


def blocks_per_unit(wrap: str) -> int | None:
    """Return the number of blocks per FSDP unit, or None for all. Raises MeshError.

    `wrap` is --wrap, but not "auto", which is resolved before.
    """
    match = re.fullmatch(r"none|block(?:_group:(\d*[1-9]\d*))?", wrap)
    if not match:
        raise MeshError(
            f"--wrap {wrap}: choose auto, block, block_group:K (K blocks at a time) or none"
        )
    return None if wrap == "none" else int(match[1] or 1)


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


def shard(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, units: Sequence[list], reshard: bool
) -> None:
    """Apply FSDP to each unit, then to the rest of the model.

    Between steps, each rank holds its shards in float32. In a step, over time:

        forward     gather unit 1   compute 1, gather 2   compute 2, gather 3   ...
                                    free 1                free 2
        backward    gather unit n   compute n, gather n-1      compute n-1, gather n-2   ...
                                    free n, reduce_scatter n   free n-1, reduce_scatter n-1

    "gather" is an all_gather in `dtype`. Gradients are reduced in float32, in the micro-batches
    that `gradient_sync` chooses. Chapter 4 of the lecture, in docs/, counts what is sent.
    """
    # Inputs keep their dtype: the model casts them, except the RoPE table, which stays in float32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for unit in units:
        # The last unit keeps its weights: its backward follows soon after its forward.
        drops = reshard and unit is not units[-1]
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=drops)
        if all(isinstance(module, nn.Embedding) for module in unit):
            unit[0].set_unshard_in_backward(False)  # backward needs the indices, not the weight
    fully_shard(model, mesh=mesh, mp_policy=policy)
    # Gather the weights of the next unit while this one computes. FSDP does this by itself in
    # backward and, on a GPU, whose host runs ahead, in forward, where this call would only make it
    # hold one more unit.
    if mesh.device_type == "cpu":
        for unit, next_unit in itertools.pairwise(units):
            unit[-1].set_modules_to_forward_prefetch([next_unit[0]])


@torch.no_grad()
def materialize(
    model: nn.Module, device: torch.device, init: Callable[[str, Tensor], None] | None
) -> None:
    """Allocate and fill the weights of a model on the meta device.

    Every rank fills one full tensor at a time and keeps its part. So the weights are the same on
    every mesh without communication, and memory holds only the shards and one full tensor.
    """
    model.to_empty(device=device)
    for name, tensor in model.named_parameters() if init else ():
        if not isinstance(tensor, DTensor):
            init(name, tensor)
            continue
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        init(name, full)
        # src_data_rank=None: split locally, since all ranks have the full tensor
        part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.copy_(part)


# --------------------------------------------------------------------------------------------------
# Recomputation and compilation

PRODUCT = torch.ops.aten.mm.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default  # of tp
# Selective checkpointing keeps the results that cost most to compute, with exceptions below.
SAVED_OPERATIONS = [
    PRODUCT,
    REDUCE_SCATTER,  # so that it is not sent twice
    torch.ops.aten.bmm.default,  # written-out attention
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def selective_contexts(config, tp: int) -> tuple:
    """Return the contexts of a block's forward and recomputation: see checkpoint_activations.

    Called in each forward of a block, or once if the block is compiled, with plain tensors in place
    of DTensors.
    """
    # Backward does not need the result of mlp.down, which is only added to the residual stream.
    recomputed = [(config.d_ff // tp, config.d_model)]  # shapes of weights, (in, out)
    if tp > 1:
        # attention.out computes a partial sum as large as the full output. The result of its
        # reduce_scatter is kept instead, which is only 1 / tp as large.
        recomputed.append((config.d_model // tp, config.d_model))
    scattered = collections.Counter()

    def is_saved(context, operator, *args, **kwargs) -> bool:
        if operator is PRODUCT:
            weight = args[1].to_local() if isinstance(args[1], DTensor) else args[1]
            return tuple(weight.shape) not in recomputed
        if operator is REDUCE_SCATTER:
            scattered[context.is_recompute] += 1  # torch 2.11 asks again when it recomputes
            return scattered[context.is_recompute] == 1  # the second one is mlp.down's
        return operator in SAVED_OPERATIONS

    return create_selective_checkpoint_contexts(is_saved)


def checkpoint_activations(blocks: Iterable[nn.Module], mode: str, config, tp: int = 1) -> None:
    """Keep fewer activations of each block and recompute the rest in backward (Chen et al. 2016).

    full keeps only the input of a block and costs a third more compute. selective keeps results of
    matrix products and attention and recomputes the rest (Korthikanti et al. 2022). `config` is the
    model's.
    """
    # By default checkpoint() also restores the random generators, so that dropout in a fork drops
    # the same elements when a block is computed again.
    options = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(selective_contexts, config, tp)
    for block in blocks:  # replaces forward only, so that parameters keep their names
        block.forward = functools.partial(checkpoint, block.forward, **options)


def modules_to_compile(model: nn.Module, run: Settings) -> list[nn.Module]:
    """Return the parts of the model that are compiled: its blocks and the loss of a chunk."""
    if run.tp > 1:
        # Inductor silently gave wrong losses under loss_parallel() (torch 2.13, CPU).
        return [*model.blocks]
    if run.strategy == "single" and len(model.blocks) <= 4 and run.loss_chunks == 1:
        return [model]  # deeper models gain nothing and take longer to compile
    *_, loss = model.head.loss.modules()  # in a chunked loss, the loss of a chunk
    return [*model.blocks, loss]


def compile_modules(modules: Iterable[nn.Module]) -> None:
    """Compile the forward and backward of each module for the shapes of its first call.

    Replaces their forward. Other shapes (samples, a smaller last evaluation batch) run uncompiled.
    Equal modules share one compilation. Call this before FSDP wraps the modules, so that gathering
    weights stays outside the compiled region. Parameters keep their names.
    """
    # By default Dynamo splits graphs at DDP's bucket boundaries, to send buckets during backward.
    # Compiling layer by layer also overlaps the two, and is faster. This setting has no public
    # name, but torch's notes on DDP describe it.
    torch._dynamo.config.optimize_ddp = False
    for module in modules:
        module.forward = compiled_for_one_shape(module.forward)


def compiled_for_one_shape(forward: Callable) -> Callable:
    """Compile a function for the shapes of its first call; other shapes run uncompiled."""
    compiled = torch.compile(forward, dynamic=False)
    first_shapes = None

    def call(*args, **kwargs) -> Tensor:
        nonlocal first_shapes
        shapes = [getattr(arg, "shape", None) for arg in (*args, *kwargs.values())]
        if first_shapes is None:
            first_shapes = shapes
        if shapes == first_shapes:
            return compiled(*args, **kwargs)
        return forward(*args, **kwargs)

    return call


# --------------------------------------------------------------------------------------------------
# Joining the other ranks

# What launchers other than torchrun tell each of several processes: how many there are
NUMBERS_OF_PROCESSES = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def refuse_other_launchers() -> None:
    """Raise MeshError in one of several processes that torchrun did not start.

    Without this, each of them would train alone, in a run of one process.
    """
    if torch.distributed.is_torchelastic_launched():
        return
    for name in NUMBERS_OF_PROCESSES:
        number = os.environ.get(name, "1")
        if number != "1":
            raise MeshError(
                f"{name} is {number}, but torchrun did not start this process: start the ranks "
                "with torchrun --nproc_per_node N; under Slurm, one torchrun per node: srun "
                "--ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc_per_node N "
                "--rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id $SLURM_JOB_ID"
            )


def start(
    device: str = "cpu",
    timeout: timedelta = torch.distributed.default_pg_timeout,
    backend: str | None = None,
) -> World:
    """Join the process group of torchrun's ranks; without torchrun, form a group of one process.

    There is always a group, so that no code needs a special case for one process.

    device          "cpu", "cuda" for the GPU of this local rank, "auto" for it if there are GPUs,
                    or one GPU, such as "cuda:0"
    timeout         of finding the other ranks, and of collectives
    backend         "gloo" also for CUDA tensors, so that ranks can share a GPU; None: NCCL for them

    Raises MeshError.
    """
    rank, size, local_rank, local_size = 0, 1, 0, 1
    if torch.distributed.is_torchelastic_launched():
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        rank, size, local_rank, local_size = (int(os.environ[name]) for name in names)
    place = find_device(device, local_rank, local_size)
    prepare_process(place)
    world = World(rank, size, local_rank, local_size, place, timeout, backend)
    join_group(world, find_store(timeout))
    return world


def find_device(name: str, local_rank: int, local_size: int) -> torch.device:
    """Return the device of this process (see `start`). Raises MeshError."""
    gpus = torch.cuda.device_count()
    if name not in ("auto", "cuda"):
        return torch.device(name)
    if name == "auto" and not gpus:
        return torch.device("cpu")
    if not gpus:
        raise MeshError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    if local_size > gpus:
        raise MeshError(
            f"{local_size} processes were started on this host, which has {gpus} GPUs: "
            f"use --nproc_per_node {gpus}"
        )
    return torch.device("cuda", local_rank)


def prepare_process(device: torch.device) -> None:
    """Make this process end with torchrun, and set what torch reads when it joins a group."""
    if torch.distributed.is_torchelastic_launched() and sys.platform == "linux":
        # PR_SET_PDEATHSIG: Linux kills this rank when torchrun, which started it, dies.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # A request to dump NCCL's flight recorder stays in torchrun's store, where torch's monitor
    # would find it again after a restart, and end the new and healthy attempt.
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if device.type == "cuda" and may_restart:
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def find_store(timeout: timedelta) -> torch.distributed.Store:
    """Return the store in which torchrun's ranks find each other, or one for a single process."""
    if not torch.distributed.is_torchelastic_launched():
        return torch.distributed.HashStore()
    store, _, _ = next(torch.distributed.rendezvous("env://", timeout=timeout))
    prefix = os.environ["TORCHELASTIC_RUN_ID"]
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun --max-restarts keeps this store and, in it, the addresses of ranks that died, so
        # each attempt has its own keys. Agents that joined later count fewer attempts, and their
        # ranks would look under other keys and never meet the rest: if hosts come and go,
        # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 starts a store for each attempt.
        prefix += f" attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
    return torch.distributed.PrefixStore(prefix, store)


def join_group(world: World, store: torch.distributed.Store) -> None:
    """Create torch's default process group of all ranks, which find each other through `store`.

    gloo carries CPU tensors and Python objects, and NCCL carries CUDA tensors.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if world.uses_nccl else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=world.timeout,
        device_id=world.device if world.uses_nccl else None,
    )


# --------------------------------------------------------------------------------------------------
# The hardware of the ranks


@dataclass(frozen=True)
class Machine:
    """The ranks, and the hardware of one of them."""

    world_size: int
    local_size: int  # ranks per host
    device_type: str  # cpu or cuda
    device_name: str
    has_bfloat16: bool  # whether the hardware multiplies in bfloat16, instead of emulating it


def read_machine(world: World) -> Machine:
    """Describe this rank's hardware."""
    if world.device.type == "cuda":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        has_bfloat16 = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return Machine(
        world_size=world.size,
        local_size=world.local_size,
        device_type=world.device.type,
        device_name=device_name(world.device),
        has_bfloat16=has_bfloat16,
    )


def describe_ranks(world: World) -> dict:
    """Describe the ranks of a start, and this rank's host and device, for the log."""
    return {
        "host": socket.gethostname(),
        "ranks": world.size,
        "ranks_per_host": world.local_size,
        "device": device_name(world.device),
    }


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the architecture of a CPU and the threads that this rank uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return f"{platform.machine()}, {count} {'thread' if count == 1 else 'threads'} a rank"


def refuse_emulated_bfloat16(world: World) -> None:
    """Raise MeshError with this rank's number unless its hardware multiplies in bfloat16."""
    if not read_machine(world).has_bfloat16:
        raise MeshError(
            f"the run computes in bfloat16, which the hardware of rank {world.rank} on "
            f"{socket.gethostname()} only emulates: give --dtype bfloat16 to emulate it, or "
            "--dtype float32"
        )


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
# Stopping together


class StopRequest:
    """Makes all ranks stop after the same step, at most two steps after one of them got a signal.

    In its context, signal handlers replace those of the process, and only set a flag. After each
    step the ranks begin to all_reduce their flags, in a gloo group of its own, and read the result
    one step later: devices do not wait, and a host waits only for hosts more than one step behind.
    """

    def __init__(self, world: World):
        self.group = torch.distributed.new_group(backend="gloo", timeout=world.timeout)
        self.flag = torch.zeros(1)  # above 0 if any rank got a signal, once `work` is done
        self.work: torch.distributed.Work | None = None
        self.signalled = False
        self.old_handlers: dict[int, Callable] = {}

    def __enter__(self) -> "StopRequest":
        # Ctrl-C; torchrun and schedulers; schedulers, before a time limit; a closing terminal
        to_the_limit = (signal.SIGUSR1, signal.SIGUSR2)
        for number in (signal.SIGINT, signal.SIGTERM, *to_the_limit, signal.SIGHUP):
            # Under nohup, SIGHUP is ignored: then the run outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self.old_handlers[number] = signal.signal(number, self.on_signal)
        return self

    def __exit__(self, kind, *_) -> None:
        # After an error this process ends, but not by torchrun's SIGTERM, which may arrive before
        # `name_lost_rank` has found the rank that was lost.
        if kind is None:
            self.wait()
            for number, handler in self.old_handlers.items():
                signal.signal(number, handler)

    def on_signal(self, number: int, frame) -> None:
        self.signalled = True
        # torchrun forwards the Ctrl-C that the terminal sends as well. Without torchrun, a second
        # Ctrl-C ends the run at once.
        if not torch.distributed.is_torchelastic_launched():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def poll(self) -> bool:
        """Pass on this rank's flag; return whether any rank had one at the last call."""
        self.wait()
        # Not .item(), which --profile counts as a host sync
        was_requested = bool(self.flag.numpy()[0])
        self.flag = torch.tensor([float(self.signalled)])
        largest = torch.distributed.ReduceOp.MAX
        self.work = torch.distributed.all_reduce(self.flag, largest, self.group, async_op=True)
        return was_requested

    def agree(self) -> bool:
        """Return whether any rank got a signal. The hosts wait for each other, not for devices."""
        self.wait()
        flag = torch.tensor([float(self.signalled)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self.group)
        return bool(flag[0])

    def wait(self) -> None:
        """Wait until the all_reduce is done."""
        if self.work:
            self.work.wait()


# --------------------------------------------------------------------------------------------------
# An exception on one rank


class RankError(RuntimeError):
    """An exception of another rank, with the text and the exit status of that exception."""

    def __init__(self, text: str, exit_status: int = 1):
        super().__init__(text)
        self.exit_status = exit_status


def on_all_ranks(function: Callable, *arguments, group: ProcessGroup | None = None) -> list:
    """Call `function` on each rank of the group; return the results of all ranks, by rank.

    If a rank raises, or its result cannot be pickled, all ranks raise, so that none waits forever.
    The lowest rank that failed raises its own exception, and other ranks raise a RankError.
    """
    error = None
    outcomes = [None] * torch.distributed.get_world_size(group)
    try:
        torch.distributed.all_gather_object(outcomes, (function(*arguments), None), group)
    except Exception as exception:  # nothing was sent yet: pickling comes first
        error = exception
        torch.distributed.all_gather_object(outcomes, (None, text_and_status(error)), group)
    for rank, (_, sent) in enumerate(outcomes):
        if sent and rank == torch.distributed.get_rank(group):
            raise error
        if sent:
            raise RankError(*sent) from error
    return [result for result, _ in outcomes]


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """A context that raises on all ranks if its block raises on one. Leaving it is a collective."""
    error = None
    try:
        yield
    except Exception as exception:
        error = exception

    def raise_error() -> None:
        if error:
            raise error

    on_all_ranks(raise_error)


def on_rank0(function: Callable, *arguments):
    """Call `function` on rank 0; return its result on all ranks.

    If it raises, or its result cannot be pickled, rank 0 raises the exception, and other ranks
    raise a RankError.
    """
    is_rank0 = torch.distributed.get_rank() == 0
    outcome = [None, None]  # the result; the text and the exit status of the exception
    try:
        if is_rank0:
            outcome[0] = function(*arguments)
        torch.distributed.broadcast_object_list(outcome)
    except Exception as error:  # nothing was sent yet: pickling comes first
        if is_rank0:
            torch.distributed.broadcast_object_list([None, text_and_status(error)])
        raise
    result, sent = outcome
    if sent:
        raise RankError(*sent)
    return result


@contextmanager
def name_lost_rank(world: World) -> Iterator[None]:
    """A context that says which rank no longer answers, if that is why its block fails.

    The hosts wait for each other in every step, through gloo, whose errors name its source files:
    after a time-out, or a connection that was lost. Then rank 0 waits for a word of each rank, and
    the others for an answer of rank 0. All ranks enter the context together.
    """
    limit = timedelta(seconds=10)
    # A group of its own, because the others are undefined after an error. monitored_barrier's
    # argument limits the wait of rank 0, and the time-out of the group that of the other ranks.
    group = torch.distributed.new_group(backend="gloo", timeout=2 * limit)
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankError) or "gloo/" not in str(error):
            raise
        try:
            torch.distributed.monitored_barrier(group, limit, wait_all_ranks=True)
        except RuntimeError as lost:
            reason = str(lost).strip().partition("\n")[0]
            if "monitoredBarrier" not in reason:
                reason = "its connection was closed"  # torchrun names a rank that died
            raise RankError(f"a rank died or hangs ({reason}): see its host and output") from error
        raise


def text_and_status(error: Exception) -> tuple[str, int]:
    """Return what a RankError says about an exception; for a bug, also the name of its class."""
    is_expected = hasattr(error, "exit_status") or isinstance(error, OSError)
    text = str(error) if is_expected else f"{type(error).__name__}: {error}"
    return text, getattr(error, "exit_status", 1)
