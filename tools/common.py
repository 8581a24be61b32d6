"""What the commands of tools/ need of the trainer: its flags, its runs and its step.

No other file of tools/ imports config, start or train, so a change of those is a change of
this file. Commands keep the flags that were given as {name: value}.
"""

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import config
import data
import dist
import start
from checkpoint import CheckpointError, PathError
from config import FLAGS, PEAK_TFLOPS, Config, Run, build_parser, default_out
from data import DataFacts
from dist import Machine
from errors import UsageError
from log import say
from start import (
    Origin,
    checkpoints_at,
    find_origin,
    local_train_indices,
    newest_checkpoint,
    open_start,
    read_model,
    with_weights,
)
from train import MicroBatches, State, build, empty_model, load, load_mixture, train, train_step

__all__ = [
    # flags
    "FLAGS",
    "PEAK_TFLOPS",
    "build_parser",
    "default_out",
    "flag_value",
    "parse_flags",
    # a run
    "NEW_RUN",
    "Origin",
    "Run",
    "fake_machine",
    "find_origin",
    "named_origin",
    "open_data",
    "open_source",
    "open_start",
    "recorded_flags",
    "recorded_model",
    "resolve",
    # a run folder
    "checkpoints_at",
    "newest_checkpoint",
    # a checkpoint in one file
    "FULL",
    "new_folder",
    "read_full",
    "write_full",
    # the run itself
    "MicroBatches",
    "State",
    "build",
    "empty_model",
    "load",
    "local_train_indices",
    "say",
    "train",
    "train_step",
]

NEW_RUN = Origin(Config())


def parse_flags(parser, argv: list[str]) -> dict:
    """Return {name: value} of the flags of --config FILE and the typed ones. Raises UsageError.

    `parser` has the flags of `build_parser`, and those of a command.
    """
    return config.merge(config.parse_layers(parser, argv))


def flag_value(flags: dict, name: str):
    """Return the flag as given, else its default."""
    return flags.get(name, FLAGS[name].default)


def resolve(flags: dict, machine: Machine, facts: DataFacts, origin: Origin = NEW_RUN) -> Run:
    """Return the run of `flags`, with the model of the checkpoint of `origin`, if any."""
    return config.resolve(Config(**flags), machine, facts, origin.kept, origin.model_config)


def named_origin(flags: dict) -> Origin:
    """Return the origin with the weights that --init_from names, or NEW_RUN without this flag."""
    named = flags.get("init_from")
    if not named:
        return NEW_RUN
    return with_weights(Origin(Config(**flags)), checkpoints_at(Path(named))[-1], damaged={})


def recorded_flags(out: Path, row: dict) -> dict:
    """Return the flags of a start's row of the log, but its model. Raises UsageError."""
    values = {name: value for name, value in row["config"].items() if value is not None}
    if unknown := values.keys() - FLAGS.keys():
        raise UsageError(f"{out} was trained by other code: --{min(unknown)} is unknown here")
    return {name: value for name, value in values.items() if name != "model"}


def recorded_model(out: Path, row: dict) -> Origin:
    """Return the origin with the model of a start's row of the log. Raises UsageError."""
    return Origin(Config(), model_config=read_model(out, row))


def open_data(flags: dict) -> data.Source:
    """Open the data of a planned run on all ranks; prepare the built-in data if it is missing."""
    path = flag_value(flags, "data")
    return start.open_data(path, load_mixture() if data.names_mixture(path) else None)


def open_source(path: str) -> data.Source:
    """Open --data on this rank alone. Raises DataError."""
    if data.names_mixture(path):
        return load_mixture().open_mixture(path)
    return data.open_folder(Path(path))


def fake_machine(world_size: int, local_size: int | None = None) -> Machine:
    """Return a machine of this host's hardware with other numbers of ranks."""
    local_size = local_size or world_size
    device = torch.device("cpu")
    return dist.read_machine(dist.World(0, world_size, 0, local_size, device, None, None))


# --------------------------------------------------------------------------------------------------
# A checkpoint in one file

FULL = "full.safetensors"


def read_full(reader: checkpoint.Reader, name: str) -> Tensor:
    """Return a full tensor of a checkpoint. Raises CheckpointError."""
    full = reader.tensors[name].full
    pieces = list(reader.overlaps(name, (0,) * full.dim(), full.shape))
    full = torch.empty_like(full, device="cpu")  # only now: the files contain all its bytes
    for place, saved in pieces:
        full[place] = saved
    return full


def write_full(
    folder: Path, layout: dict[str, Tensor], read: Callable[[str], Tensor]
) -> dict[str, dict]:
    """Write the one file and its index; return their entries in the manifest.

    `layout` maps names to meta tensors; read(name) returns the values of one.
    """
    index = {}
    for name, tensor in layout.items():
        index[name] = {
            "dtype": checkpoint.DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "cuts": [[0]] * tensor.dim(),
            "grid": [0],
        }
    full = checkpoint.write_safetensors(folder / FULL, layout, read)
    return {FULL: full, "index.json": checkpoint.write_index(folder, [FULL], index)}


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`. The block fills it and renames it to `out`.

    If the block fails, removes it and raises CheckpointError. Raises PathError if `out` exists.
    """
    if out.exists():
        raise PathError(f"{out} exists: remove it or choose another name")
    work = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(work, ignore_errors=True)  # left by a killed process
        work.mkdir(parents=True)
        yield work
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {out}: {checkpoint.reason(error)}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


# --------------------------------------------------------------------------------------------------
# Files


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
