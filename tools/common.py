"""What the commands of tools/ need of the trainer: its flags, its runs and its step.

No other file of tools/ imports config, layout, train or the files with which a start finds its
checkpoint, so a change of those is a change of this file.
"""

from pathlib import Path

import torch

import data
import dist
from config import (
    BUILTIN,
    DEFAULTS,
    Config,
    blocks_per_unit,
    build_parser,
    default_out,
    flag_value,
    parse_flags,
)
from errors import UsageError
from layout import Run, empty_model, resolve
from runtime.machine import Machine, find_machine, read_machine
from runtime.preflight import (
    NEW_RUN,
    Origin,
    find_origin,
    prepare_builtin,
    read_model,
    read_named,
    recorded_values,
)
from runtime.run_folder import checkpoints_at, newest_checkpoint, read_starts
from runtime.startup_lines import say
from train import MicroBatches, State, build, load, local_train_indices, train, train_step

__all__ = [
    # flags
    "DEFAULTS",
    "Config",
    "blocks_per_unit",
    "build_parser",
    "default_out",
    "flag_value",
    "parse_flags",
    # a run
    "NEW_RUN",
    "Machine",
    "Origin",
    "Run",
    "fake_machine",
    "find_machine",
    "find_origin",
    "named_origin",
    "open_data",
    "read_machine",
    "recorded_origin",
    "recorded_values",
    "resolve",
    # a run folder
    "checkpoints_at",
    "newest_checkpoint",
    "read_starts",
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


def named_origin(flags: dict) -> Origin:
    """Return the checkpoint that --init_from names, or NEW_RUN without this flag."""
    named = flags.get("init_from")
    return read_named(flags, named, damaged={}) if named else NEW_RUN


def recorded_origin(out: Path, start: dict) -> Origin:
    """Return the origin for `resolve` to resolve a start of `out` again. Raises UsageError.

    The recorded values count as kept, not as typed: a typed warmup_steps must not exceed max_steps,
    but a default that was recorded may.
    """
    values = recorded_values(start)
    if unknown := values.keys() - DEFAULTS.keys():
        raise UsageError(f"{out} was trained by other code: --{min(unknown)} is unknown here")
    return Origin(model_config=read_model(out, start), kept_values=values)


def open_data(flags: dict) -> list[data.TokenFolder]:
    """Open the data of a planned run on all ranks; prepare the built-in data if it is missing."""
    path = flag_value(flags, "data")
    if path == BUILTIN:
        dist.on_rank0(prepare_builtin)
    return data.open_folders(path)


def fake_machine(world_size: int, local_size: int | None = None) -> Machine:
    """Return a machine of this host's hardware with other numbers of ranks."""
    local_size = local_size or world_size
    device = torch.device("cpu")
    return read_machine(dist.World(0, world_size, 0, local_size, device, None, None))
