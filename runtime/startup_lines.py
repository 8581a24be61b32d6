"""The lines that a run prints at its start, with the arithmetic, and after --eval_only."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import config
import data
import dist
import optim
from config import Run
from errors import plural
from model import Transformer
from start import Start


def say(world: dist.World, lines: Iterable[str]) -> None:
    """Print lines on rank 0. A run continues if they cannot be printed (a closed pipe)."""
    if world.rank == 0:
        with contextlib.suppress(OSError):
            print("\n".join(lines), flush=True)


def describe_start(
    run: Run,
    start: Start,
    world: dist.World,
    model: Transformer,
    parts: list[data.TokenDataset],
    notes: Iterable[str],
) -> Iterator[str]:
    """Yield the lines on model, mesh, dtype, batch, data (`parts`), memory and checkpoint."""
    yield (
        f"model   {run.model}: {run.n_layer} layers x {run.d_model} wide, "
        f"vocabulary {run.model_config.vocab_size:,}: {model.parameter_count():,} parameters"
    )
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(dist.AXES, run.mesh_shape))
    yield (
        f"mesh    {run.strategy}: {axes} = {world.size} x {run.device} "
        f"({dist.device_name(world.device)})"
    )
    yield f"dtype   {run.dtype}; weights, reductions and optimizer in float32"
    if run.device == "cuda" and not run.compile:
        yield (
            "        --compile is off: according to tools.plan, elementwise operations, which it "
            "fuses, take 22% of a step of llama3-8b on 64 H100s and 41% of gpt2-124m on 8 A100s"
        )
    yield (
        f"batch   {run.global_batch_size} sequences = micro_batch_size {run.micro_batch_size} x "
        f"grad_accum_steps {run.grad_accum_steps} x dp_size {run.dp_size}; "
        f"x {run.seq_len} tokens = {run.tokens_per_step:,} tokens a step"
    )
    for part in parts:
        share = part.folder.share / 1000
        epochs = share * run.max_steps * run.global_batch_size / len(part)
        of_mixture = f" at a share of {share:g}" if share < 1 else ""
        yield (
            f"data    {part.folder.path}: {len(part):,} sequences; "
            f"{run.max_steps:,} steps read {epochs:.2f} epochs{of_mixture}"
        )
    memory = {
        part: size
        for part, size in config.memory_of(run, run.model_config, run.machine).items()
        if size
    }
    sizes = " + ".join(f"{part} {size / 1e6:,.1f}" for part, size in memory.items())
    total = sum(memory.values())
    yield f"memory  estimate for a rank: {sizes} = {total / 1e6:,.1f} MB"
    for path, problem in start.damaged.items():
        yield f"        passed over {path}: {problem}"
    beginning = ""
    if start.path:
        how = "a new run with the weights of" if start.only_weights else "continuing from"
        beginning = f", {how} {start.path}"
    yield f"out     {run.out}{beginning}"
    for note in notes:
        yield f"        {note}"
    if run.dry_run:
        yield "--dry_run: all is ready for the first step; nothing was written"


def describe_learning_rate(run: Run, start: Start) -> Iterator[str]:
    """Yield notes on a learning rate that may not be what the user expects."""
    if run.warmup_steps > run.max_steps:
        yield (
            f"--warmup_steps {run.warmup_steps} is more than --max_steps {run.max_steps}: the "
            "learning rate will not reach --lr"
        )
    if run.eval_only or start.path is None:
        return
    if start.only_weights:
        if run.given.lr is None:
            yield (
                f"the default --lr, {run.lr:.2g}, is meant for training from scratch: give a lower "
                "one to fine-tune"
            )
        return
    step = start.step + 1
    values = start.manifest.get("config")
    if values is None:  # a model that tools.hf has imported was not trained here
        return
    recorded = SimpleNamespace(**vars(optim.Settings()) | values)
    before, now = optim.learning_rate(step, recorded), optim.learning_rate(step, run)
    if now != before:
        yield f"the learning rate of step {step:,}: {before:.2e} -> {now:.2e}"


def describe_no_steps(run: Run, start: Start, notes: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a start whose checkpoint has already done max_steps."""
    yield (
        f"{run.out} is finished, step {start.step} of {run.max_steps}: "
        "raise --max_steps, or choose another --out"
    )
    for note in notes:
        yield f"        {note}"


def describe_evaluation(
    run: Run, start: Start, val_loss: float, val_data: data.TokenDataset | data.Mixture
) -> Iterator[str]:
    """Yield the line of --eval_only for `val_loss`, in nats per token."""
    bytes_per_token = 0.0
    for part in val_data.parts:
        mean = part.folder.val_bytes / len(part.folder.tokens("val"))
        bytes_per_token += part.folder.share / 1000 * mean
    bits = math.nan  # if a meta.json lacks val_bytes
    if all(part.folder.val_bytes for part in val_data.parts):
        bits = val_loss / math.log(2) / bytes_per_token
    perplexity = math.exp(min(val_loss, 700))  # exp(710) overflows
    count = min(run.eval_sequences, len(val_data))
    yield (
        f"{start.path} on {run.data}: val_loss {val_loss:.6f}, "
        f"perplexity {perplexity:,.4f}, {bits:.6f} bits per byte "
        f"({plural(count, 'sequence')} of {run.seq_len:,} tokens)"
    )
