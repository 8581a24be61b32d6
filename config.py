"""From a command line to a resolved run.

    flags = parse(argv)                               as given: {name: value}
    run = resolve(Config(**flags), world, source)     a value for every flag, and what follows

Each file declares the flags that it obeys in a class named Settings, and Config is their union. To
add a flag, add a line to one of these classes; --help prints it, and config.json keeps it:

    lr: Annotated[float | None, "part", "peak learning rate", (0,)] = None

The strings are the flag's kind and its help text. (0,) are the limits of a number: at least 0, or
with (0, 1) also below 1. A kind says what happens to the flag when a run continues:

    part    a part of the run: a changed value is refused without --allow_changes
    free    remembered like a part, but it may change; the change is printed
    once    for this start only: neither remembered nor compared

None, which is typed as auto, and "auto" stand for a default that `resolve` computes.
"""

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch

import checkpoint
import data
import dist
import errors
import model
import optim
from data import TokenFolder
from dist import World
from errors import UsageError
from model import SIZES, ModelConfig, meta_model

# --------------------------------------------------------------------------------------------------
# The flags


@dataclass(frozen=True, kw_only=True)
class Config(
    dist.Settings,
    model.Settings,
    data.Settings,
    optim.Settings,
    checkpoint.Settings,
):
    """The flags as given: typed now or earlier, or their defaults."""

    out: Annotated[str | None, "once", "run folder (default: runs/MODEL)"] = None
    # global_batch_size = micro_batch_size (default: all) x grad_accum_steps x dp_size
    global_batch_size: Annotated[int, "part", "sequences per step, over all ranks", (1,)] = 16
    micro_batch_size: Annotated[int | None, "free", "per rank and forward", (1,)] = None
    eval_interval: Annotated[int, "free", "steps between evaluations; 0: at the end", (0,)] = 250
    eval_sequences: Annotated[int, "free", "validation sequences, always the same", (1,)] = 512
    eval_only: Annotated[bool, "once", "evaluate the latest checkpoint; write nothing"] = False
    sample_tokens: Annotated[int, "free", "tokens to sample at the end; 0: none", (0,)] = 256
    log_interval: Annotated[int, "free", "steps between log rows", (1,)] = 10
    optim_metrics_interval: Annotated[int, "free", "steps between rows of optim.jsonl", (0,)] = 0
    tracker: Annotated[Literal["none", "wandb"], "free", "also send log rows to wandb"] = "none"
    profile: Annotated[str | None, "once", "steps to trace, as START:STOP"] = None
    allow_changes: Annotated[bool, "once", "continue a run even if its results change"] = False


HINTS = get_type_hints(Config, include_extras=True)  # of all flags
KINDS = {name: hint.__metadata__[0] for name, hint in HINTS.items()}
SIZE_FLAGS = [name for name in KINDS if name in ModelConfig.__annotations__]
COMPUTED = (None, "auto")  # values that stand for a default that `resolve` computes


def build_parser() -> errors.Parser:
    """Return a parser of all flags. Only those that are given get a value."""
    parser = errors.Parser(
        prog="train.py",
        usage="train.py [--FLAG VALUE ...]",
        description="Train a language model. The same command continues a stopped run.",
    )
    help = "a JSON file of flags, such as config.json of a run; the command line overrides it"
    parser.add_argument("--config", default=argparse.SUPPRESS, help=help)
    for owner in Config.__mro__[:-1]:  # object has none
        group = parser.add_argument_group(f"{owner.__module__}.py")
        for name in owner.__annotations__:
            add_flag(group, name)
    return parser


def add_flag(group, name: str) -> None:
    """Add a flag to a group of the parser, as the annotation of its field declares it."""
    _, help, *limits = HINTS[name].__metadata__
    of_type = HINTS[name].__origin__
    if type(None) in get_args(of_type):  # int for int | None
        of_type, _ = get_args(of_type)
    choices = {choice: choice for choice in get_args(of_type)}  # of a Literal
    if of_type is bool:
        choices = {"true": True, "false": False}
    default = getattr(Config, name)

    def convert(text: str):
        if text == "auto" and default is None:
            return None
        if choices and text.lower() not in choices:
            raise argparse.ArgumentTypeError(f"{text}: choose from {', '.join(choices)}")
        if choices:
            return choices[text.lower()]
        return errors.number(of_type, *limits[0])(text) if limits else of_type(text)

    what = f"{{{','.join(choices)}}}" if choices else of_type.__name__
    convert.__name__ = what  # argparse prints "invalid int value"
    options = {"type": convert, "default": argparse.SUPPRESS, "metavar": what}
    if of_type is bool:  # --compile alone is --compile true
        options |= {"nargs": "?", "const": True}
    if default is not None:
        help += f" (default: {str(default).lower()})"
    group.add_argument(f"--{name}", help=help, **options)


# --------------------------------------------------------------------------------------------------
# Command line -> flags


def parse(argv: list[str], parser: errors.Parser | None = None) -> dict[str, Any]:
    """Return the flags of --config FILE, then those typed, by name. Raises UsageError.

    `parser` has the flags of `build_parser`, and perhaps those of a tool.
    """
    flags = vars((parser or build_parser()).parse_args(argv))
    file = flags.pop("config", None)
    return (read_flags(Path(file)) if file else {}) | flags


def read_flags(file: Path) -> dict[str, Any]:
    """Return the flags in a JSON file, checked as if they had been typed. Raises UsageError."""
    try:
        flags = json.loads(file.read_text())
        given = [f"--{name}={value}" for name, value in flags.items() if value not in COMPUTED]
        return parse(given)
    except (OSError, ValueError, AttributeError) as error:  # for example, a list has no items()
        raise UsageError(f"{file}: {error}") from None


# --------------------------------------------------------------------------------------------------
# Flags -> run


@dataclass(frozen=True, kw_only=True)
class Run(Config):
    """A resolved run: the value of every flag, and what follows from flags, ranks and data.

    It is the same on all ranks, and the manifest of each checkpoint records it. No value is None or
    "auto", except init_from and profile if not given.
    """

    given: Config
    model_config: ModelConfig
    fingerprint: str  # of the tokens
    tokenizer: str | None  # bytes, gpt2 or the name of a tokenizer.json; None: unknown
    tokens_in_vocabulary: int  # the model's vocabulary is padded
    dp_replicate: int
    dp_size: int  # dp_replicate x dp_shard
    grad_accum_steps: int
    tokens_per_step: int  # of all ranks
    compute_dtype: torch.dtype  # of the forward pass
    peak_tflops: float | None  # of a device in bfloat16, for mfu; None: not known

    @property
    def manifest(self) -> dict:
        """What every checkpoint of the run records."""
        remembered = [name for name, kind in KINDS.items() if kind != "once"]
        return {
            "given": {name: getattr(self.given, name) for name in remembered},
            "config": {name: getattr(self, name) for name in KINDS},
            "model": dataclasses.asdict(self.model_config),
            "data": self.fingerprint,
            "tokenizer": self.tokenizer,
            "tokens_in_vocabulary": self.tokens_in_vocabulary,
        }


def resolve(
    given: Config, world: World, source: TokenFolder, saved_model: ModelConfig | None = None
) -> Run:
    """Fill in every default of a run. Reads no file, prints nothing and queries no hardware.

    `saved_model` is that of the checkpoint, if the start has one. Raises UsageError, ModelError and
    MeshError if flags, ranks, data and model do not fit together.
    """
    model_config = resolve_model(given, source.vocab_size, saved_model)
    # Each message has a fixed cost, so a small model is one FSDP unit.
    is_small = meta_model(model_config).parameter_count() <= 2_000_000
    defaults = {
        "model": "imported" if saved_model else "tiny",  # a saved model of ours has a name
        "strategy": "single" if world.size == given.tp else "ddp",
        "wrap": "none" if is_small else "block",
        "dtype": "bfloat16" if world.has_bfloat16 else "float32",
        "device": world.device.type,
        "lr": 0.5 / model_config.d_model,
    }
    values = {name: getattr(given, name) for name in KINDS}
    values |= {name: defaults.get(name) for name in values if values[name] in COMPUTED}
    values |= {name: getattr(model_config, name) for name in SIZE_FLAGS}
    dist.blocks_per_unit(values["wrap"])  # raises if no unit has this name
    if values["min_lr"] > values["lr"]:
        raise UsageError(f"--min_lr {given.min_lr} is above the peak learning rate {values['lr']}")

    dp_replicate, values["dp_shard"], _ = dist.mesh_shape(
        values["strategy"], world.size, world.local_size, given.dp_shard, given.tp
    )
    dp_size = dp_replicate * values["dp_shard"]
    batch = given.global_batch_size
    values["micro_batch_size"] = given.micro_batch_size or max(1, batch // dp_size)
    per_forward = values["micro_batch_size"] * dp_size  # sequences of all ranks
    if batch % per_forward and not given.eval_only:
        raise UsageError(
            f"global_batch_size {batch} is not a multiple of micro_batch_size "
            f"{values['micro_batch_size']} x {dp_size} data-parallel ranks"
        )
    peaks = (peak for name, peak in PEAK_TFLOPS.items() if name in world.device_name)
    return Run(
        **values,
        given=given,
        model_config=model_config,
        fingerprint=source.fingerprint,
        tokenizer=source.tokenizer and Path(source.tokenizer).name,
        tokens_in_vocabulary=source.vocab_size,
        dp_replicate=dp_replicate,
        dp_size=dp_size,
        grad_accum_steps=batch // per_forward,
        tokens_per_step=batch * model_config.seq_len,
        compute_dtype=getattr(torch, values["dtype"]),
        peak_tflops=next(peaks, None) if values["dtype"] == "bfloat16" else None,
    )


def resolve_model(given: Config, vocab_size: int, saved: ModelConfig | None) -> ModelConfig:
    """Return the named size or `saved`, the model of a checkpoint, as changed by the size flags.

    The vocabulary of a checkpoint is kept if it has room for `vocab_size` ids. Otherwise vocab_size
    is rounded up to a multiple of 64, for which matrix kernels are fast. Raises ModelError.
    """
    model_config = saved or SIZES[given.model or "tiny"]
    sizes = {name: getattr(given, name) for name in SIZE_FLAGS}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if not saved or vocab_size > saved.vocab_size:
        sizes["vocab_size"] = math.ceil(vocab_size / 64) * 64
    if model_config.n_kv_head == model_config.n_head and "n_head" in sizes:
        # A model without grouped-query attention gets it only from --n_kv_head.
        sizes.setdefault("n_kv_head", sizes["n_head"])
    return dataclasses.replace(model_config, **sizes)


# Dense bfloat16 TFLOP/s from the vendors' data sheets, where a figure "with sparsity" is twice as
# high, by a part of the name that torch gives a device. The first part that matches counts.
PEAK_TFLOPS = {
    "A100": 312,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200 NVL": 835,
    "H200": 989,  # and GH200
    "GB200": 2500,
    "B200": 2250,
    "MI300X": 1307.4,
    "RTX 4090": 165.2,
}
