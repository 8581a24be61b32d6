"""The lines that a run prints at its start, with the arithmetic, and for --eval_only."""

import contextlib
import math
from collections.abc import Iterable, Iterator

import data
import dist
import metrics
from layout import Setup, estimate_memory
from model import Transformer
from runtime.cli import plural
from runtime.preflight import Start


def say(world: dist.World, lines: Iterable[str]) -> None:
    """Print lines on rank 0. A run goes on where nothing takes them, such as a closed pipe."""
    if world.rank == 0:
        with contextlib.suppress(OSError):
            print("\n".join(lines), flush=True)


def describe_start(
    start: Start,
    setup: Setup,
    world: dist.World,
    model: Transformer,
    parts: list[data.TokenDataset],
) -> Iterator[str]:
    """Yield the lines on model, mesh, dtype, batch, data (`parts`), memory and beginning."""
    c, m = start.config, setup.model
    yield (
        f"model   {c.source or c.model}: {m.n_layer} layers x {m.d_model} wide, "
        f"vocabulary {m.vocab_size:,}: {model.parameter_count():,} parameters"
    )
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(dist.AXES, setup.mesh_shape))
    yield (
        f"mesh    {setup.strategy}: {axes} = {world.size} x {world.device.type} "
        f"({metrics.device_name(world.device)})"
    )
    dtype = str(setup.dtype).removeprefix("torch.")
    yield f"dtype   {dtype}; weights, reductions and optimizer in float32"
    yield (
        f"batch   {c.global_batch_size} sequences = micro_batch_size {setup.micro_batch_size} x "
        f"grad_accum_steps {setup.grad_accum_steps} x dp_size {setup.dp_size}; "
        f"x {m.seq_len} tokens = {setup.tokens_per_step:,} tokens a step"
    )
    for part in parts:
        share = part.folder.share / 1000
        epochs = share * c.max_steps * c.global_batch_size / len(part)
        of_mixture = f" at a share of {share:g}" if share < 1 else ""
        yield (
            f"data    {part.folder.path}: {len(part):,} sequences; "
            f"{c.max_steps:,} steps read {epochs:.2f} epochs{of_mixture}"
        )
    memory = {part: size for part, size in estimate_memory(c, setup, model).items() if size}
    sizes = " + ".join(f"{part} {size / 1e6:,.1f}" for part, size in memory.items())
    total = sum(memory.values())
    yield f"memory  a rank needs at least: {sizes} = {total / 1e6:,.1f} MB"
    for path, problem in start.damaged.items():
        yield f"        passed over {path}: {problem}"
    beginning = ""
    if start.checkpoint:
        how = "a new run with the weights of" if start.only_weights else "continuing from"
        beginning = f", {how} {start.checkpoint}"
    yield f"out     {c.out}{beginning}"
    yield from describe_changes(start)
    if c.dry_run:
        yield "--dry_run: all is ready for the first step; nothing was written"


def describe_no_steps(start: Start) -> Iterator[str]:
    """Yield the lines of a start whose checkpoint has already done max_steps."""
    c = start.config
    if start.checkpoint.is_relative_to(c.out):
        yield (
            f"{c.out} is finished, step {start.step} of {c.max_steps}: "
            "raise --max_steps, or choose another --out"
        )
    else:
        yield (
            f"--max_steps {c.max_steps} leaves no step to train: {start.checkpoint} is of step "
            f"{start.step}; raise --max_steps"
        )
    yield from describe_changes(start)


def describe_changes(start: Start) -> Iterator[str]:
    for change in start.changes:
        yield f"        changed: {change}"


def describe_evaluation(
    start: Start, val_loss: float, val_data: data.TokenDataset | data.Mixture
) -> Iterator[str]:
    """Yield the lines of --eval_only on val_loss, in nats per token."""
    bytes_per_token = 0.0
    for part in val_data.parts:
        mean = part.folder.val_bytes / len(part.folder.tokens("val"))
        bytes_per_token += part.folder.share / 1000 * mean
    bits = math.nan  # of a folder whose meta.json lacks val_bytes
    if bytes_per_token:
        bits = val_loss / math.log(2) / bytes_per_token
    perplexity = math.exp(min(val_loss, 700))  # exp(710) overflows
    n, seq_len = min(start.config.eval_sequences, len(val_data)), val_data.parts[0].seq_len
    yield (
        f"{start.checkpoint} on {start.config.data}: val_loss {val_loss:.6f}, "
        f"perplexity {perplexity:,.4f}, {bits:.6f} bits per byte "
        f"({plural(n, 'sequence')} of {seq_len:,} tokens)"
    )
