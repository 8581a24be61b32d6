"""How a run is laid out: strategy, mesh, batch, dtype, model and memory, from flags and ranks."""

import dataclasses
import functools
import itertools
import math
import socket
from dataclasses import dataclass

import torch
from torch import nn

import dist
import optim
from config import Config, blocks_per_unit, model_config
from model import ModelConfig, Transformer, activation_bytes_of_block
from runtime import memory
from runtime.cli import UsageError


@dataclass(frozen=True)
class Layout:
    """What follows from flags, ranks and vocabulary: the same on every rank."""

    config: Config
    device_type: str
    strategy: str
    strategy_reason: str  # for the choice of --strategy auto
    mesh_shape: tuple[int, int, int]
    micro_batch_size: int
    grad_accum_steps: int
    dtype: torch.dtype  # of the forward pass
    model_config: ModelConfig

    @property
    def dp_size(self) -> int:
        dp_replicate, dp_shard, _ = self.mesh_shape
        return dp_replicate * dp_shard

    @property
    def tokens_per_step(self) -> int:
        sequences = self.micro_batch_size * self.grad_accum_steps * self.dp_size
        return sequences * self.model_config.seq_len

    @property
    def uses_fsdp(self) -> bool:
        return dist.uses_fsdp(self.strategy, self.mesh_shape[2])

    @functools.cached_property
    def memory(self) -> "Estimate":
        return estimate_memory(self)

    def fits(self, device_memory: int) -> bool:
        """Whether the estimate leaves a fifth of `device_memory` free for everything else."""
        return self.memory.total <= 0.8 * device_memory


def choose_layout(
    c: Config,
    world: dist.World,
    vocab_size: int,
    device_memory: int,
    base: ModelConfig | None = None,
) -> Layout:
    """Check that flags, ranks and vocabulary fit together. Raises UsageError and MeshError.

    `device_memory` is the bytes that one rank may fill, for --strategy auto; `base` the model whose
    parts flags override, of a checkpoint (default: the named size).
    """
    model = model_config(c, vocab_size, base)
    strategy, reason = c.strategy, ""
    if strategy == "auto":
        strategy, reason = choose_strategy(c, world, model, device_memory)
    if c.grad_sync == "shard" and strategy != "hsdp":
        raise UsageError(
            f"--grad_sync shard is for --strategy hsdp, not {strategy}: use batch or micro_batch"
        )
    mesh_shape = dist.mesh_shape(
        strategy, world.size, world.local_size, c.dp_replicate, c.dp_shard, c.tp
    )
    return make_layout(c, world.device, model, strategy, mesh_shape, reason)


def choose_strategy(
    c: Config, world: dist.World, model: ModelConfig, device_memory: int
) -> tuple[str, str]:
    """Choose for --strategy auto the first that fits of ddp, hsdp (across hosts) and fsdp.

    Returns its name and the calculation behind the choice.
    """
    ddp = make_layout(c, world.device, model, "ddp", (max(1, world.size // c.tp), 1, c.tp))
    fits = ddp.fits(device_memory)
    relation = "at most" if fits else "more than"
    reason = f"with ddp, {ddp.memory}: {relation} 80% of {device_memory / 1e9:,.1f} GB"
    strategy = dist.default_strategy(world, fits, c.tp)
    if strategy == "hsdp" and not (c.dp_replicate or c.dp_shard or c.grad_sync == "shard"):
        shape = dist.mesh_shape("hsdp", world.size, world.local_size, tp=c.tp)
        hsdp = make_layout(c, world.device, model, "hsdp", shape)
        if not hsdp.fits(device_memory):
            return "fsdp", f"{reason}; with hsdp, {hsdp.memory.total / 1e9:,.2f} GB, too"
    return strategy, reason


def make_layout(
    c: Config,
    device: torch.device,
    model: ModelConfig,
    strategy: str,
    mesh_shape: tuple[int, int, int],
    reason: str = "",
) -> Layout:
    """Raises UsageError if the batch cannot be split."""
    micro_batch_size, grad_accum_steps = split_batch(c, mesh_shape[0] * mesh_shape[1])
    return Layout(
        config=c,
        device_type=device.type,
        strategy=strategy,
        strategy_reason=reason,
        mesh_shape=mesh_shape,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=grad_accum_steps,
        dtype=dist.fast_dtype(device) if c.dtype == "auto" else getattr(torch, c.dtype),
        model_config=model,
    )


def micro_batch_size(config: Config, dp_size: int) -> int:
    """--micro_batch_size, or by default the whole share of one of `dp_size` ranks."""
    return config.micro_batch_size or max(1, config.global_batch_size // dp_size)


def split_batch(config: Config, dp_size: int) -> tuple[int, int]:
    """Return (micro_batch_size, grad_accum_steps) for `dp_size` ranks. Raises UsageError."""
    global_batch_size = config.global_batch_size
    size = micro_batch_size(config, dp_size)
    if config.eval_only:  # no global batch
        return size, 1
    per_forward = size * dp_size  # sequences of all ranks
    if global_batch_size % per_forward == 0:
        return size, global_batch_size // per_forward
    fitting = []
    for count in range(1, 2 * dp_size + 1):
        if global_batch_size % (micro_batch_size(config, count) * count) == 0:
            fitting.append(str(count))
    plural = "" if fitting == ["1"] else "s"
    other_ranks = f", or run on {', '.join(fitting)} data-parallel rank{plural}" if fitting else ""
    raise UsageError(
        f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size "
        f"{size} x {dp_size} data-parallel ranks = {per_forward}: "
        f"change --global_batch_size or --micro_batch_size{other_ranks}"
    )


# --------------------------------------------------------------------------------------------------
# The model


def empty_model(layout: Layout) -> Transformer:
    """The model on the meta device, without memory."""
    with torch.device("meta"):
        return Transformer(layout.model_config, layout.dtype, layout.config.loss_chunks)


def fsdp_units(model: Transformer, blocks_per_unit: int | None) -> list[list[nn.Module]]:
    """The modules that FSDP gathers together; the rest of the model, its root, is one more unit.

    Larger units send fewer, longer messages and need more memory for gathered weights. Untied, the
    embedding and the head are units too. blocks_per_unit None: the whole model is the root.
    """
    if blocks_per_unit is None:
        return []
    units = []
    for start in range(0, len(model.blocks), blocks_per_unit):
        units.append(list(model.blocks[start : start + blocks_per_unit]))
    return units if model.config.tied else [[model.embed], *units, [model.head]]


def lay_out(model: Transformer, mesh: dist.DeviceMesh, layout: Layout) -> nn.Module:
    """Lay the model out on the mesh with its initial weights; return the module to call.

    Under ddp this runs one forward and backward pass: see dist.settle_buckets.
    """
    c = layout.config
    dist.checkpoint_activations(model.blocks, c.activation_checkpointing)
    if c.compile:
        modules = [*model.blocks, model.head]
        if c.tp > 1:
            # Inductor silently gave wrong losses under torch's loss_parallel() (2.13, CPU).
            modules.remove(model.head)
        elif layout.strategy == "single" and len(model.blocks) <= 4:
            modules = [model]  # deeper models gain nothing and take longer to compile
        dist.compile_modules(modules)
    forward = dist.parallelize(
        model,
        mesh,
        layout.strategy,
        init=functools.partial(model.init_tensor, seed=c.seed),
        dtype=layout.dtype,
        tp_plan=model.tensor_parallel_plan(),
        fsdp_units=fsdp_units(model, blocks_per_unit(c)),
        reshard_after_forward=c.reshard_after_forward,
        keep_gradients=c.grad_sync == "batch" and layout.grad_accum_steps > 1,
    )
    if not c.eval_only:
        shape = (layout.micro_batch_size, layout.model_config.seq_len + 1)  # as in train_step
        tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device_type)
        dist.settle_buckets(forward, tokens[:, :-1], tokens[:, 1:])
    return forward


# --------------------------------------------------------------------------------------------------
# The memory of a rank, for --strategy auto and the first lines of a run: the sum is explained in
# docs/reference.md. tools.plan counts what a step really allocates.

# Python, torch's libraries and gloo on a CPU, before the first tensor: Linux, torch 2.13
PROCESS_BYTES = 350_000_000


@dataclass(frozen=True)
class Estimate:
    """The peak memory of a rank in bytes, part by part."""

    weights: int
    gradients: int
    optimizer: int
    accumulated: int  # gradients not synchronized yet, beyond `gradients`
    gathered: int  # weights in the compute dtype and gradients being reduced, per unit or model
    activations: int
    logits: int
    process: int  # 0 on a GPU
    kept: int  # freed memory that the C library holds unused; 0 on a GPU

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    @property
    def transient(self) -> int:
        """Bytes that a step allocates and frees."""
        return self.total - self.weights - self.optimizer - self.process

    def shortage(self, local_size: int) -> str | None:
        """What the host lacks for its CPU ranks before they build their models, or None."""
        need = self.total - self.process  # the process is already running
        available = memory.available_memory()
        if local_size * need <= available:
            return None
        return (
            f"on {socket.gethostname()} this run needs {local_size * need / 1e9:,.1f} GB more "
            f"({local_size} x {need / 1e9:,.1f} a rank), and {available / 1e9:,.1f} GB are "
            "available: lower --micro_batch_size, shard with --strategy fsdp, or start fewer ranks "
            "on a host"
        )

    def __str__(self) -> str:
        """One line of arithmetic, without parts that are 0."""
        unit, name, digits = (1e9, "GB", 2) if self.total >= 1e9 else (1e6, "MB", 1)
        sizes = {part: size for part, size in vars(self).items() if size}
        parts = [f"{part} {size / unit:,.{digits}f}" for part, size in sizes.items()]
        return f"{' + '.join(parts)} = {self.total / unit:,.{digits}f} {name}"


def estimate_memory(layout: Layout) -> Estimate:
    """Estimate the peak memory of a rank. Weights, gradients and optimizer are exact.

    Adds all parts, although activations shrink while gradients grow.
    """
    c, m = layout.config, layout.model_config
    model = empty_model(layout)
    whole = numel(model, c.tp)  # before FSDP
    own = numel(model, c.tp, layout.mesh_shape[1])
    gathered = fsdp_buffers(layout) if layout.uses_fsdp else cast_buffers(model, layout)
    activations = activation_bytes(layout)
    # A logit and its gradient in float32, and once in the compute dtype
    logit_size = 4 + 4 + (layout.dtype.itemsize if layout.dtype != torch.float32 else 0)
    logits = layout.micro_batch_size * m.seq_len * m.vocab_size // c.loss_chunks // c.tp
    buffers = gathered + activations + logit_size * logits
    accumulated = 0
    if c.grad_sync == "batch" and layout.grad_accum_steps > 1:
        accumulated = 4 * (whole - own)  # FSDP frees them unit by unit as it reduces them
    process = kept = 0
    if layout.device_type == "cpu":
        process = PROCESS_BYTES
        # An empirical rule for glibc 2.36, see docs/benchmarks.md: the many sizes that FSDP
        # allocates with every unit leave as much again in gaps.
        kept = 4 * own + accumulated + buffers if layout.uses_fsdp else buffers // 2
    return Estimate(
        weights=4 * own,
        gradients=4 * own,
        optimizer=slot_bytes(model, c.optimizer, c.tp, layout.mesh_shape[1]),
        accumulated=accumulated,
        gathered=gathered,
        activations=activations,
        logits=logit_size * logits,
        process=process,
        kept=kept,
    )


def numel(module: nn.Module, tp: int, dp_shard: int = 1) -> int:
    """Elements on one rank. FSDP splits the rows of all parameters, tp those of matrices.

    Counted by rows for both: FSDP pads the last shards, so every rank has as many as the first.
    """
    return sum(numel_on_rank(parameter, tp, dp_shard) for parameter in module.parameters())


def numel_on_rank(parameter: nn.Parameter, tp: int, dp_shard: int) -> int:
    ranks = dp_shard * (tp if parameter.dim() > 1 else 1)
    return math.ceil(len(parameter) / ranks) * (parameter.numel() // len(parameter))


def slot_bytes(model: Transformer, optimizer: str, tp: int, dp_shard: int) -> int:
    """Bytes of the optimizer's state on one rank."""
    total = 0
    for name, parameter in model.named_parameters():
        updater = optim.updater(optimizer, name, parameter.shape, model.is_hidden(name))
        for shape in updater.slots(parameter.shape).values():
            is_sharded = shape == parameter.shape
            total += 4 * (numel_on_rank(parameter, tp, dp_shard) if is_sharded else shape.numel())
    return total


@functools.cache  # tools.plan --search asks for thousands of layouts
def unit_numels(config: ModelConfig, blocks_per_unit: int | None, tp: int) -> tuple[list[int], int]:
    """Elements of each of `fsdp_units`, and of the root, on one rank of a tp group."""
    with torch.device("meta"):
        model = Transformer(config)
    sizes = [numel(nn.ModuleList(unit), tp) for unit in fsdp_units(model, blocks_per_unit)]
    return sizes, numel(model, tp) - sum(sizes)


def fsdp_buffers(layout: Layout) -> int:
    """Bytes of the weights that FSDP has gathered and of the gradients that it is reducing.

    During the backward of a unit: its weights and gradients and the next unit's weights in the
    compute dtype, and the gradients of the previous unit in float32. The root's gradients come
    last, when the units' buffers are free again.
    """
    c = layout.config
    size = layout.dtype.itemsize
    units, root = unit_numels(layout.model_config, blocks_per_unit(c), c.tp)
    gathered = sum(units)
    if c.reshard_after_forward:
        gathered = max(unit + next_unit for unit, next_unit in itertools.pairwise([0, *units, 0]))
    in_units = size * (2 * root + gathered) + (size + 4) * max(units, default=0)
    in_root = size * root + max(2 * size, 4) * root
    return max(in_units, in_root)


def cast_buffers(model: Transformer, layout: Layout) -> int:
    """Bytes of weights cast to the compute dtype for backward, and of the largest gradient.

    For single and ddp. Activation checkpointing casts one block at a time.
    """
    c = layout.config
    largest = 4 * max(parameter.numel() for parameter in model.parameters()) // c.tp
    if layout.dtype == torch.float32:
        return largest
    cast = numel(model, c.tp)
    if c.activation_checkpointing != "none":
        cast -= numel(model.blocks[1:], c.tp)
    return layout.dtype.itemsize * cast + largest


def activation_bytes(layout: Layout) -> int:
    """Bytes that all blocks save for backward in one micro-batch."""
    m, tp = layout.model_config, layout.config.tp
    size = layout.dtype.itemsize
    block = activation_bytes_of_block(m, layout.dtype, layout.device_type, tp)  # per token
    kept = {
        "none": m.n_layer * block,
        "selective": m.n_layer * block // 2,  # about
        "full": m.n_layer * size * m.d_model // tp + block,  # inputs, and a recomputed block
    }
    return layout.micro_batch_size * m.seq_len * kept[layout.config.activation_checkpointing]
