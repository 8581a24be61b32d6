"""How a run is laid out: strategy, mesh, batch, dtype, model and memory, from flags and ranks."""

import functools
from dataclasses import dataclass

import torch
from torch import nn

import dist
from config import Config, blocks_per_unit, model_config, profile_window
from model import ModelConfig, Transformer
from runtime import memory
from runtime.cli import UsageError


@dataclass(frozen=True)
class Layout:
    """What follows from the flags, the ranks and the vocabulary, alike on every rank."""

    strategy: str
    strategy_reason: str  # of --strategy auto
    mesh_shape: tuple[int, int, int]
    micro_batch_size: int
    grad_accum_steps: int
    dtype: torch.dtype  # of the forward pass
    model_config: ModelConfig
    memory: memory.Estimate

    @property
    def dp_size(self) -> int:
        dp_replicate, dp_shard, _ = self.mesh_shape
        return dp_replicate * dp_shard

    @property
    def tokens_per_step(self) -> int:
        sequences = self.micro_batch_size * self.grad_accum_steps * self.dp_size
        return sequences * self.model_config.seq_len


def choose_layout(c: Config, world: dist.World, vocab_size: int, device_memory: int) -> Layout:
    """Check that flags, ranks and a vocabulary fit together. Raises UsageError and MeshError.

    `device_memory` is the bytes that one rank may fill, for --strategy auto.
    """
    dtype = dist.fast_dtype(world.device) if c.dtype == "auto" else getattr(torch, c.dtype)
    model = model_config(c, vocab_size)
    strategy, reason = c.strategy, ""
    if strategy == "auto":
        strategy, reason = decide_strategy(c, world, model, dtype, device_memory)
    if c.grad_sync == "shard" and strategy != "hsdp":
        raise UsageError(
            f"--grad_sync shard is for --strategy hsdp, not {strategy}: use batch or micro_batch"
        )
    mesh_shape = dist.mesh_shape(
        strategy, world.size, world.local_size, c.dp_replicate, c.dp_shard, c.tp
    )
    micro_batch_size, grad_accum_steps = split_batch(c, mesh_shape[0] * mesh_shape[1])
    return Layout(
        strategy=strategy,
        strategy_reason=reason,
        mesh_shape=mesh_shape,
        micro_batch_size=micro_batch_size,
        grad_accum_steps=grad_accum_steps,
        dtype=dtype,
        model_config=model,
        memory=estimate_memory(c, model, mesh_shape, strategy, dtype, world.device),
    )


def micro_batch_size(config: Config, dp_size: int) -> int:
    """--micro_batch_size, or the whole share of one of `dp_size` ranks."""
    return config.micro_batch_size or max(1, config.global_batch_size // dp_size)


def split_batch(config: Config, dp_size: int) -> tuple[int, int]:
    """Return (micro_batch_size, grad_accum_steps) for `dp_size` ranks. Raises UsageError."""
    global_batch_size = config.global_batch_size
    size = micro_batch_size(config, dp_size)
    if config.eval_only:  # which has no global batch
        return size, 1
    per_forward = size * dp_size  # sequences of all ranks
    if global_batch_size % per_forward:
        remedy = "change --global_batch_size or --micro_batch_size"
        if counts := fitting_dp_sizes(config, at_most=2 * dp_size):
            remedy += f", or run on {', '.join(map(str, counts))} data-parallel ranks"
        raise UsageError(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size "
            f"{size} x {dp_size} data-parallel ranks = {per_forward}: {remedy}"
        )
    return size, global_batch_size // per_forward


def fitting_dp_sizes(config: Config, at_most: int) -> list[int]:
    """The numbers of data-parallel ranks over which the global batch divides."""
    counts = []
    for count in range(1, at_most + 1):
        if config.global_batch_size % (micro_batch_size(config, count) * count) == 0:
            counts.append(count)
    return counts


def decide_strategy(
    c: Config, world: dist.World, model: ModelConfig, dtype: torch.dtype, device_memory: int
) -> tuple[str, str]:
    """--strategy auto: the strategy, and the sum that decided."""
    ddp = (max(1, world.size // c.tp), 1, c.tp)
    need = estimate_memory(c, model, ddp, "ddp", dtype, world.device)
    fits = need.total <= 0.8 * device_memory
    relation = "at most" if fits else "more than"
    reason = f"with ddp, {need}: {relation} 80% of {device_memory / 1e9:,.1f} GB"
    return dist.default_strategy(world, fits, c.tp), reason


def estimate_memory(
    c: Config,
    config: ModelConfig,
    mesh_shape: tuple[int, int, int],
    strategy: str,
    dtype: torch.dtype,
    device: torch.device,
) -> memory.Estimate:
    """The peak memory of a rank, from what the flags say: nothing is built but an empty model."""
    micro_batch, grad_accum_steps = split_batch(c, mesh_shape[0] * mesh_shape[1])
    start, stop = profile_window(c) or (0, 0)
    model = empty_model(config, dtype, c)
    return memory.estimate(
        model,
        mesh_shape,
        strategy,
        dtype=dtype,
        tp_plan=model.tensor_parallel_plan(),
        fsdp_units=fsdp_units(model, c),
        reshard_after_forward=c.reshard_after_forward,
        recomputes=c.activation_checkpointing != "none",
        grad_sync=c.grad_sync,
        grad_accum_steps=grad_accum_steps,
        activations=model.activation_bytes(
            micro_batch, c.activation_checkpointing, c.tp, device.type
        ),
        logits=model.logit_bytes(micro_batch, c.tp),
        traced_blocks=(stop - start) * grad_accum_steps * config.n_layer,
        device_type=device.type,
    )


def largest_gathered(model: Transformer, mesh_shape: tuple[int, int, int], device_type: str) -> int:
    """Elements of the largest tensor that a full checkpoint gathers in host memory: on CPUs."""
    _, dp_shard, tp = mesh_shape
    if device_type != "cpu" or dp_shard * tp == 1:
        return 0
    return max(parameter.numel() for parameter in model.parameters())


def empty_model(config: ModelConfig, dtype: torch.dtype, c: Config) -> Transformer:
    """The model without memory: on the meta device."""
    with torch.device("meta"):
        return Transformer(config, dtype, c.loss_chunks)


def fsdp_units(model: Transformer, c: Config) -> list[list[nn.Module]]:
    return dist.group_units(model.blocks, model.embed_and_head(), blocks_per_unit(c))


def lay_out(model: Transformer, mesh: dist.DeviceMesh, layout: Layout, c: Config) -> nn.Module:
    """Lay the model out on the mesh with its initial weights; return the module to call."""
    dist.checkpoint_activations(model.blocks, c.activation_checkpointing)
    if c.compile:
        dist.compile_layers([*model.blocks, model.head])
    forward = dist.parallelize(
        model,
        mesh,
        layout.strategy,
        init=functools.partial(model.init_tensor, seed=c.seed),
        dtype=layout.dtype,
        tp_plan=model.tensor_parallel_plan(),
        fsdp_units=fsdp_units(model, c),
        reshard_after_forward=c.reshard_after_forward,
        keep_gradients=c.grad_sync == "batch" and layout.grad_accum_steps > 1,
    )
    if not c.eval_only:
        shape = (layout.micro_batch_size, layout.model_config.seq_len + 1)  # as in train_step
        tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device_type)
        dist.settle_buckets(forward, tokens[:, :-1], tokens[:, 1:])
    return forward
