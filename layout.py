"""From flags and ranks to a model on the mesh: strategy, mesh shape, batch, dtype, memory."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import nn

import dist
import optim
from config import Config
from model import (
    ModelConfig,
    Transformer,
    activation_bytes_of_block,
    checkpoint_activations,
    compile_modules,
)
from runtime.cli import UsageError

# --------------------------------------------------------------------------------------------------
# The setup of a run

UNIT_BYTES = 8_000_000  # of float32 weights in an FSDP unit at most, under --wrap auto


@dataclass(frozen=True)
class Setup:
    """What follows from flags, ranks and model: the same on every rank."""

    device_type: str
    strategy: str
    mesh_shape: tuple[int, int, int]  # dp_replicate, dp_shard, tp
    micro_batch_size: int
    grad_accum_steps: int
    dtype: torch.dtype  # of the forward pass
    model: ModelConfig
    blocks_per_unit: int | None  # of FSDP; None: the whole model is one unit

    @property
    def dp_size(self) -> int:
        return self.mesh_shape[0] * self.mesh_shape[1]

    @property
    def tokens_per_step(self) -> int:
        return self.micro_batch_size * self.grad_accum_steps * self.dp_size * self.model.seq_len


def choose(c: Config, world: dist.World, model: ModelConfig, device_memory: int) -> Setup:
    """Check that flags, ranks and model fit together. Raises UsageError and MeshError.

    `device_memory` is the bytes that one rank may fill. --strategy auto takes the first that fits
    of ddp, which communicates least, hsdp across hosts, and fsdp.
    """
    if c.strategy != "auto":
        return make_setup(c, world, model, c.strategy)
    if world.size == c.tp:
        return make_setup(c, world, model, "single")
    if c.dp_replicate or c.dp_shard or c.grad_sync == "shard":
        return make_setup(c, world, model, "hsdp")
    for strategy in ("ddp", "hsdp") if world.size > world.local_size else ("ddp",):
        setup = make_setup(c, world, model, strategy)
        if fits(c, setup, device_memory):
            return setup
    return make_setup(c, world, model, "fsdp")


def make_setup(c: Config, world: dist.World, model: ModelConfig, strategy: str) -> Setup:
    """Raises UsageError, as for a batch that cannot be split, and MeshError."""
    if c.grad_sync == "shard" and strategy != "hsdp":
        raise UsageError(f"--grad_sync shard is for --strategy hsdp, not {strategy}")
    shape = dist.mesh_shape(
        strategy, world.size, world.local_size, c.dp_replicate, c.dp_shard, c.tp
    )
    batch = split_batch(c, shape[0] * shape[1])
    dtype = compute_dtype(c.dtype, world.device)
    blocks = blocks_per_unit(c.wrap, model)
    return Setup(world.device.type, strategy, shape, *batch, dtype, model, blocks)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """--dtype; auto: bfloat16 if the hardware multiplies in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        supported = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        supported = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if supported else torch.float32


def split_batch(c: Config, dp_size: int) -> tuple[int, int]:
    """Return (micro_batch_size, grad_accum_steps) for `dp_size` ranks. Raises UsageError."""
    size = c.micro_batch_size or max(1, c.global_batch_size // dp_size)
    if c.eval_only:  # no global batch
        return size, 1
    per_forward = size * dp_size  # sequences of all ranks
    if c.global_batch_size % per_forward == 0:
        return size, c.global_batch_size // per_forward
    raise UsageError(
        f"global_batch_size {c.global_batch_size} is not a multiple of micro_batch_size "
        f"{size} x {dp_size} data-parallel ranks = {per_forward}: "
        "change --global_batch_size, --micro_batch_size or the number of ranks"
    )


# --------------------------------------------------------------------------------------------------
# The model on the mesh


def empty_model(c: Config, setup: Setup) -> Transformer:
    """The model on the meta device, without memory."""
    with torch.device("meta"):
        return Transformer(setup.model, setup.dtype, c.loss_chunks)


@functools.cache  # a search asks for each of a thousand candidates
def blocks_per_unit(wrap: str, model: ModelConfig) -> int | None:
    """--wrap as a number of blocks; None: the whole model is one unit.

    auto: as many as have UNIT_BYTES of float32 weights. A message costs time whatever its size, so
    small blocks go together; a model that fits into one unit is gathered once a micro-batch.
    """
    if wrap == "auto":
        with torch.device("meta"):
            net = Transformer(model)
        if 4 * net.parameter_count() <= UNIT_BYTES:
            return None
        block_bytes = 4 * sum(p.numel() for p in net.blocks[0].parameters())
        return max(1, UNIT_BYTES // block_bytes)
    if wrap == "none":
        return None
    return int(wrap.removeprefix("block").removeprefix("_group:") or 1)


def fsdp_units(model: Transformer, blocks_per_unit: int | None) -> list[list[nn.Module]]:
    """The modules that FSDP gathers together; the rest of the model, its root, is one more unit.

    Larger units send fewer, longer messages and need more memory for gathered weights. Untied, the
    embedding and the head are units too. blocks_per_unit None: the whole model is the root.
    """
    if blocks_per_unit is None:
        return []
    starts = range(0, len(model.blocks), blocks_per_unit)
    units = [list(model.blocks[start : start + blocks_per_unit]) for start in starts]
    return units if model.config.tied else [[model.embed], *units, [model.head]]


def place(
    model: Transformer, mesh: dist.DeviceMesh, c: Config, setup: Setup, init_weights: bool = True
) -> nn.Module:
    """Place the model on the mesh; return the module to call.

    `init_weights` False: weights get memory, but no values, as a rehearsal needs them.
    Under ddp this runs one forward and backward pass: see dist.settle_buckets.
    """
    checkpoint_activations(model.blocks, c.activation_checkpointing)
    if c.compile:
        modules = [*model.blocks, model.head]
        if c.tp > 1:
            # Inductor silently gave wrong losses under torch's loss_parallel() (2.13, CPU).
            modules.remove(model.head)
        elif setup.strategy == "single" and len(model.blocks) <= 4:
            modules = [model]  # deeper models gain nothing and take longer to compile
        compile_modules(modules)
    forward = dist.parallelize(
        model,
        mesh,
        setup.strategy,
        init=functools.partial(model.init_tensor, seed=c.seed) if init_weights else None,
        dtype=setup.dtype,
        tp_plan=model.tensor_parallel_plan(),
        fsdp_units=fsdp_units(model, setup.blocks_per_unit),
        reshard_after_forward=c.reshard_after_forward,
        keep_gradients=c.grad_sync == "batch" and setup.grad_accum_steps > 1,
    )
    is_ddp = forward is not model
    if is_ddp and not c.eval_only:
        shape = (setup.micro_batch_size, setup.model.seq_len + 1)  # as in train_step
        tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device_type)
        dist.settle_buckets(forward, tokens[:, :-1], tokens[:, 1:])
    return forward


# --------------------------------------------------------------------------------------------------
# Memory


def fits(c: Config, setup: Setup, device_memory: int) -> bool:
    """Whether a fifth of `device_memory` stays free for what `estimate_memory` leaves out."""
    need = estimate_memory(c, setup, empty_model(c, setup))
    return sum(need.values()) <= 0.8 * device_memory


def estimate_memory(c: Config, setup: Setup, model: Transformer) -> dict[str, int]:
    """The least that a rank needs at its peak, {part: bytes}; activations peak before gradients.

    Weights, gradients and optimizer are exact. What FSDP gathers, communication buffers and the
    process itself come on top: tools.plan rehearses a step and counts them.
    """
    m = setup.model
    _, dp_shard, tp = setup.mesh_shape
    weights = optimizer = 0
    for name, parameter in model.named_parameters():
        # FSDP splits the rows of all parameters, and pads the last shards to the size of the first;
        # tp splits those of matrices.
        parts = dp_shard * (tp if parameter.dim() > 1 else 1)
        local = math.ceil(len(parameter) / parts) * (parameter.numel() // len(parameter))
        weights += 4 * local
        updater = optim.updater(c.optimizer, name, parameter.shape, model.is_hidden(name))
        for shape in updater.slots(parameter.shape).values():
            optimizer += 4 * (local if shape else 1)  # a slot is sharded like its parameter
    # A logit and its gradient in float32, and once in the compute dtype
    logit_size = 4 + 4 + (setup.dtype.itemsize if setup.dtype != torch.float32 else 0)
    logits = setup.micro_batch_size * m.seq_len * m.vocab_size // c.loss_chunks // tp
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": optimizer,
        "activations": activation_bytes(c, setup),
        "logits": logit_size * logits,
    }


def activation_bytes(c: Config, setup: Setup) -> int:
    """Bytes that all blocks save for backward in one micro-batch."""
    m, tp = setup.model, c.tp
    block = activation_bytes_of_block(m, setup.dtype, setup.device_type, tp)  # per token
    kept = {
        "none": m.n_layer * block,
        "selective": m.n_layer * block // 2,  # about
        # Inputs, and a recomputed block
        "full": m.n_layer * setup.dtype.itemsize * m.d_model // tp + block,
    }
    return setup.micro_batch_size * m.seq_len * kept[c.activation_checkpointing]
