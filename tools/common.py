"""What the commands of tools/ need of the trainer: its flags, its runs and its step.

No other file of tools/ imports config, start or train, so a change of those is a change of
this file. Commands keep the flags that were given as {name: value}.
"""

import contextlib
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch import Tensor

import checkpoint
import config
import dist
from config import Config, Run, build_parser
from config import parse as parse_flags
from data import TokenFolder
from dist import World
from errors import UsageError
from log import say
from model import ModelConfig
from sample import newest_checkpoint
from start import (
    Origin,
    Start,
    checkpoints_at,
    find_origin,
    open_data,
    open_source,
    open_start,
)
from train import State, build, empty_model, load, micro_batches, train, train_step

__all__ = [
    # flags
    "build_parser",
    "flag_value",
    "known_flags",
    "parse_flags",
    # a run
    "Origin",
    "Run",
    "Start",
    "fake_world",
    "find_origin",
    "join_group",
    "named_origin",
    "open_data",
    "open_source",
    "open_start",
    "recorded_flags",
    "recorded_model",
    "resolve",
    "unread_source",
    # a run folder
    "checkpoints_at",
    "newest_checkpoint",
    "read_full",
    # the run itself
    "State",
    "build",
    "empty_model",
    "load",
    "micro_batches",
    "say",
    "train",
    "train_step",
]


def flag_value(flags: dict, name: str):
    """Return the flag as given, else its default."""
    return flags.get(name, getattr(Config, name))


def known_flags(values: dict) -> dict:
    """Return those of the values that are flags."""
    return {name: value for name, value in values.items() if name in config.KINDS}


def resolve(
    flags: dict, world: World, source: TokenFolder, saved_model: ModelConfig | None = None
) -> Run:
    """Return the run of `flags`, with the model of a checkpoint, if any."""
    return config.resolve(Config(**flags), world, source, saved_model)


def named_origin(flags: dict) -> Origin:
    """Return the origin with the weights that --init_from names, or a new run without this flag."""
    named = flags.get("init_from")
    if not named:
        return Origin()
    path = checkpoints_at(Path(named))[-1]
    manifest = checkpoint.read_manifest(path)
    model_config = ModelConfig.from_dict(manifest["model"])
    return Origin(path, manifest, only_weights=True, model_config=model_config)


def recorded_flags(out: Path, row: dict) -> dict:
    """Return the flags of a start's row of the log. Raises UsageError."""
    if unknown := row["config"].keys() - config.KINDS.keys():
        raise UsageError(f"{out} was trained by other code: --{min(unknown)} is unknown here")
    return row["config"]


def recorded_model(out: Path, row: dict) -> ModelConfig:
    """Return the model of a start's row of the log. Raises UsageError."""
    try:
        return ModelConfig.from_dict(row["model"])
    except TypeError as error:
        raise UsageError(f"{out} was trained by other code: {error}") from None


def unread_source(
    path: str, vocab_size: int, tokenizer: str | None = None, fingerprint: str = ""
) -> TokenFolder:
    """Return a token folder that is not read: what a run follows from is in the arguments."""
    return TokenFolder(Path(path), np.dtype(np.uint16), vocab_size, tokenizer, fingerprint)


# --------------------------------------------------------------------------------------------------
# Ranks


def fake_world(size: int, rank: int = 0, local_size: int | None = None) -> World:
    """Return a world of `size` CPUs like this one, as if all were on one host."""
    device = torch.device("cpu")
    return World(
        rank=rank,
        size=size,
        local_size=local_size or size,
        device=device,
        timeout=timedelta(minutes=1),
        device_name=platform.machine(),
        has_bfloat16=dist.has_bfloat16(device),
    )


def join_group(world: World, store: torch.distributed.Store) -> None:
    """Form the process group of a world, as dist.start does for torchrun's ranks."""
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=world.timeout,
    )


# --------------------------------------------------------------------------------------------------
# Files


def read_full(reader: checkpoint.Reader, name: str) -> Tensor:
    """Return a full tensor of a checkpoint. Raises CheckpointError."""
    full = torch.empty_like(reader.tensors[name].full, device="cpu")
    reader.fill(name, full)
    return full


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder; remove it at the end of the block, also after Ctrl-C and SIGTERM."""

    def end(number: int, frame) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the removal
        sys.exit(128 + number)  # as a shell reports the signal

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
