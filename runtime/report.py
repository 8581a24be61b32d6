"""The lines that a run prints: at its start, with the arithmetic, and of --eval_only."""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator

import torch

import data
import dist
import metrics
from config import WARMUP_STEPS, Config
from layout import Setup, empty_model, estimate_memory
from runtime.preflight import Start, in_short
from text import tokenizer

ENOUGH_CORES = 4  # for the thread of a GPU rank, its loader workers, NCCL and a save


def say(world: dist.World, lines: Iterable[str]) -> None:
    """Print lines on rank 0. A run goes on where nothing takes them, such as a closed pipe."""
    if world.is_rank0:
        with contextlib.suppress(OSError):
            print("\n".join(lines), flush=True)


def describe_finished(start: Start) -> Iterator[str]:
    c = start.config
    yield (
        f"{c.out} is finished, step {start.step} of {c.max_steps}: "
        "raise --max_steps, or choose another --out"
    )


def describe_start(
    start: Start, setup: Setup, world: dist.World, parts: list[data.TokenDataset]
) -> Iterator[str]:
    """Yield the lines on model, mesh, dtype, batch, data (`parts`), memory and beginning."""
    c = start.config
    yield from describe_setup(c, setup, world)
    for part in parts:
        share = part.folder.share / 1000
        epochs = share * c.max_steps * c.global_batch_size / len(part)
        of_mixture = f" at a share of {share:g}" if share < 1 else ""
        yield (
            f"data    {part.folder.path}: {len(part):,} sequences; "
            f"{c.max_steps:,} steps read {epochs:.2f} epochs{of_mixture}"
        )
    if c.warmup_steps is None and c.max_steps <= WARMUP_STEPS:
        yield (
            f"        warning: all {c.max_steps} steps are warm-up (--warmup_steps {WARMUP_STEPS} "
            "by default): give fewer"
        )
    yield f"memory  a rank needs at least: {estimate_memory(c, setup)}"
    yield from describe_beginning(start)
    if c.dry_run:
        yield "--dry_run: all is ready for the first step; nothing was written"


def describe_setup(c: Config, setup: Setup, world: dist.World) -> Iterator[str]:
    """Yield the lines on model, mesh, dtype and batch."""
    m = setup.model
    yield (
        f"model   {c.source or c.model}: {m.n_layer} layers x {m.d_model} wide, "
        f"vocabulary {m.vocab_size:,}: {empty_model(c, setup).parameter_count():,} parameters"
    )
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(dist.AXES, setup.mesh_shape))
    yield (
        f"mesh    {setup.strategy}: {axes} = {world.size} x {world.device.type} "
        f"({metrics.device_name(world.device)})"
    )
    cores = len(os.sched_getaffinity(0)) if world.device.type == "cuda" else ENOUGH_CORES
    if cores < ENOUGH_CORES:
        yield (
            f"        warning: this rank may use {cores} of the host's cores, and a GPU needs "
            f"{ENOUGH_CORES} or more: under Slurm, give --cpus-per-task to srun"
        )
    if setup.reason:
        yield f"        --strategy auto: {setup.reason}"
    dtype = str(setup.dtype).removeprefix("torch.")
    auto = " (--dtype auto)" if c.dtype == "auto" else ""
    yield f"dtype   {dtype}{auto}; weights, reductions and optimizer in float32"
    peak_flops = metrics.peak_flops(world.device, setup.dtype, c.peak_tflops)
    if world.device.type == "cuda" and peak_flops is None:
        yield f"        no MFU: the peak of this GPU in {dtype} is not known; give --peak_tflops"
    yield (
        f"batch   {c.global_batch_size} sequences = micro_batch_size {setup.micro_batch_size} x "
        f"grad_accum_steps {setup.grad_accum_steps} x dp_size {setup.dp_size}; "
        f"x {m.seq_len} tokens = {setup.tokens_per_step:,} tokens a step"
    )


def describe_beginning(start: Start) -> Iterator[str]:
    """Yield the lines on where the run begins, damaged checkpoints and changed flags."""
    c = start.config
    for problem in start.passed_over:
        yield f"        passed over {problem}"
    beginning = ""
    if start.checkpoint:
        beginning = f", continuing from {start.checkpoint}"
    if start.init_from:
        beginning = f", a new run with the weights of {start.init_from}"
    yield f"out     {c.out}{beginning}"
    if start.other_tokenizer:
        yield f"        warning: the tokenizer is {start.other_tokenizer}"
    if start.new_parameters:
        yield f"        with new ones, which it lacks: {in_short(start.new_parameters)}"
    if c.checkpoint == "none":
        yield "        --checkpoint none: this run saves nothing and cannot be continued"
    for change in start.changes:
        yield f"        changed: {change}"


def describe_evaluation(
    start: Start, val_loss: float, val_data: data.TokenDataset | data.Mixture
) -> Iterator[str]:
    """Yield the lines of --eval_only on val_loss, in nats per token."""
    folders = [part.folder for part in val_data.parts]
    seq_len = val_data.parts[0].seq_len
    n = min(start.config.eval_sequences, len(val_data))
    (indices,) = data.val_indices(n, len(val_data), n, dp_rank=0, dp_size=1)
    counts = torch.zeros(folders[0].vocab_size, dtype=torch.int64)
    for index in indices:
        targets = val_data[[index]][0, 1:]  # (T,)
        counts += targets.bincount(minlength=folders[0].vocab_size)
    perplexity = math.exp(min(val_loss, 700))  # exp(710) overflows
    yield (
        f"{start.init_from} on {start.config.data}: "
        f"val_loss {val_loss:.6f}, perplexity {perplexity:,.4f}, "
        f"{bits_per_byte(val_loss, folders, counts)} "
        f"({n:,} sequences of {seq_len:,} tokens)"
    )


def bits_per_byte(val_loss: float, folders: list[data.TokenFolder], counts: torch.Tensor) -> str:
    """Describe val_loss as bits per byte of the documents.

    nats per token x tokens / (ln 2 x bytes), with counts[i] tokens of id i. End-of-text tokens have
    a loss but no bytes. If ids do not tell bytes, tokens get the mean of their folder's val.bin.
    """
    n_tokens = int(counts.sum())
    n_bytes = 0
    for folder in folders:
        mean = folder.val_bytes / len(folder.tokens("val"))
        n_bytes += n_tokens * folder.share / 1000 * mean
    try:
        n_bytes = n_bytes or tokenizer.text_bytes(folders[0].tokenizer, counts.tolist())
    except tokenizer.TokenizerError as error:
        return f"no bits per byte: {error}"
    return f"{val_loss * n_tokens / (math.log(2) * n_bytes):.6f} bits per byte"
