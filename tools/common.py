"""What the commands of tools/ need of the trainer: its flags, its runs, its step and its log.

No other file of tools/ imports config, start or train, so a change of those is a change of
this file. Commands keep the flags that were given as {name: value}.
"""

import contextlib
import json
import math
import platform
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import checkpoint
import config
import data
import dist
from config import Config, Run, build_parser
from config import parse as parse_flags
from data import TokenFolder
from dist import World
from errors import UsageError
from log import read_rows as read_all_rows
from log import say
from model import ModelConfig
from sample import newest_checkpoint
from start import (
    Origin,
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
    # the log of a run
    "read_rows",
    "read_starts",
    "relative_difference",
    # a checkpoint in one file
    "new_folder",
    "read_full",
    "write_full",
    # the run itself
    "State",
    "build",
    "empty_model",
    "load",
    "local_train_indices",
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


def local_train_indices(run: Run, mesh: DeviceMesh, steps: range) -> Iterator[list[int]]:
    """Yield the sequence indices of each of this rank's micro-batches in `steps`."""
    place = dist.dp_rank(mesh), run.dp_size
    return data.train_indices(steps, run.global_batch_size, run.micro_batch_size, *place)


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
# The log of a run


def read_starts(out: Path) -> list[dict]:
    """Return the rows of the starts of a run. Raises UsageError if there are none."""
    starts = [row for row in rows_of(out / "metrics.jsonl") if row.get("event") == "start"]
    if not starts:
        raise UsageError(f"{out} is not the folder of a run that has started")
    return starts


def read_rows(file: Path) -> list[dict]:
    """Return the rows of a log that count, with nan for null, which stands for any such value.

    Starts, and the rows of steps that a later start repeats, do not count.
    """
    valid = []
    for row in rows_of(file):
        if row.get("event") == "start":
            valid = [earlier for earlier in valid if earlier["step"] <= row["step"]]
        else:
            valid.append({name: math.nan if row[name] is None else row[name] for name in row})
    return valid


def rows_of(file: Path) -> list[dict]:
    """Return all rows of a log, but not the notes that a user has added."""
    rows = read_all_rows(file)
    return [row for row in rows if isinstance(row, dict) and type(row.get("step")) is int]


def relative_difference(a: float, b: float) -> float:
    """Return |a - b| relative to the larger one; inf if only one is nan."""
    if math.isnan(a) and math.isnan(b):
        return 0.0
    if math.isnan(a) or math.isnan(b):
        return math.inf
    if a == b:  # also if both are 0
        return 0.0
    return abs(a - b) / max(abs(a), abs(b))


# --------------------------------------------------------------------------------------------------
# A checkpoint in one file


def read_full(reader: checkpoint.Reader, name: str) -> Tensor:
    """Return a full tensor of a checkpoint. Raises CheckpointError."""
    full = torch.empty_like(reader.tensors[name].full, device="cpu")
    reader.fill(name, full)
    return full


def write_full(
    folder: Path, layout: dict[str, Tensor], read: Callable[[str], Tensor]
) -> dict[str, dict]:
    """Write the file of rank 0 with full tensors, and the index; return their manifest entries.

    `layout` maps names to meta tensors; read(name) returns the values of one.
    """
    boxes = {}
    for tensor in layout.values():
        boxes[checkpoint.cut_of(tensor)] = (0,) * tensor.dim(), tuple(tensor.shape)
    index = json.dumps(checkpoint.index_of(layout, [boxes])).encode()
    name = checkpoint.file_of(rank=0)
    return {
        name: checkpoint.write_safetensors(folder / name, layout, read),
        "index.json": checkpoint.write_file(folder / "index.json", [index]),
    }


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`. The block fills it and renames it to `out`.

    If the block fails, removes it. Raises UsageError if `out` exists.
    """
    if out.exists():
        raise UsageError(f"{out} exists: remove it or choose another name")
    work = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(work, ignore_errors=True)  # left by a killed process
        work.mkdir(parents=True)
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
