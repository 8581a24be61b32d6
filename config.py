"""From a command line to a resolved run.

    config = parse(argv, saved)                    the run's own flags, then those typed now
    run = resolve(config, machine, data, ...)      a value for every flag, and what follows from it

Each file declares the flags that it obeys in a class named Settings, and Config is their union. To
add a flag, add a line to one of these classes; --help prints it, and config.json keeps it:

    lr: Annotated[float | None, "part", "peak learning rate", (0,)] = None

An annotated field of model.ModelConfig is a flag, too. The strings are the flag's kind and its help
text. (0,) are the limits of a number: at least 0, or with (0, 1) also below 1. A text may have a
name for --help instead, such as "PATH". A kind says what happens to the flag when a run continues:

    part    a part of the run: a changed value is refused without --allow_changes
    free    remembered like a part, but it may change; the change is printed
    once    for this start only: neither remembered nor compared

None, which is typed as auto, and "auto" stand for a default that `resolve` computes. A part that is
not given keeps the value that the checkpoint records, so its default is computed only for a new
run. The default of a free flag is computed in each start. So no default of a part may depend on a
flag that is free.
"""

import argparse
import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import torch

import checkpoint
import data
import dist
import errors
import model
import optim
from data import DataFacts
from dist import Machine
from errors import UsageError
from model import SIZES, ModelConfig, meta_model

# --------------------------------------------------------------------------------------------------
# The flags


@dataclass(frozen=True, kw_only=True)
class Config(
    dist.Settings,
    model.Settings,
    model.SizeFlags,
    data.Settings,
    optim.Settings,
    checkpoint.Settings,
):
    """The flags as given: typed now or earlier, or their defaults."""

    out: Annotated[
        str | None, "once", "run folder (default: runs/MODEL or runs/INIT_FROM)", "DIR"
    ] = None
    # global_batch_size = micro_batch_size x grad_accum_steps x dp_size
    global_batch_size: Annotated[int, "part", "sequences per step, over all ranks", (1,)] = 16
    micro_batch_size: Annotated[
        int | None,
        "free",
        "sequences per rank and forward (default: its share of the batch)",
        (1,),
    ] = None
    eval_interval: Annotated[int, "free", "steps between evaluations; 0: only at the end", (0,)] = (
        250
    )
    eval_sequences: Annotated[int, "free", "validation sequences, always the same", (1,)] = 512
    eval_only: Annotated[
        bool, "once", "print the validation loss of --out's latest checkpoint; write nothing"
    ] = False
    sample_tokens: Annotated[int, "free", "tokens to sample at the end; 0: none", (0,)] = 256
    max_skipped: Annotated[
        int, "free", "end the run after N skipped updates in a row; 0: never", (0,)
    ] = 100
    log_interval: Annotated[int, "free", "steps between log rows", (1,)] = 10
    optim_metrics_interval: Annotated[
        int,
        "free",
        "steps between rows of per-parameter statistics in optim.jsonl; 0: none",
        (0,),
    ] = 0
    tracker: Annotated[
        Literal["none", "wandb"],
        "free",
        "also send training and evaluation rows to wandb (pip install wandb)",
    ] = "none"
    peak_tflops: Annotated[float | None, "free", "dense TFLOP/s per device, for MFU", (1e-9,)] = (
        None
    )
    profile: Annotated[str | None, "once", "steps to trace", "START:STOP"] = None
    allow_changes: Annotated[bool, "once", "continue a run even if its results change"] = False
    dry_run: Annotated[
        bool, "once", "check everything up to the first step; write nothing to OUT"
    ] = False


@dataclass(frozen=True)
class Flag:
    """A field of Config, as its annotation declares it."""

    name: str
    type: Any  # int, float, bool, str or a Literal
    kind: Literal["part", "free", "once"]
    help: str
    default: Any
    file: str  # which obeys it
    least: float | None = None  # a number must be least <= value < below
    below: float = math.inf
    metavar: str | None = None

    def parse(self, text: str):
        """The argparse type of the flag."""
        if text == "auto" and self.default is None:
            return None
        if get_origin(self.type) is Literal:
            if text not in get_args(self.type):
                choices = ", ".join(get_args(self.type))
                raise argparse.ArgumentTypeError(f"{text}: choose from {choices}")
            return text
        if self.type is bool:
            if text.lower() not in ("true", "false"):
                raise argparse.ArgumentTypeError(f"{text}: give true or false")
            return text.lower() == "true"
        if self.least is None:
            return self.type(text)
        try:
            return errors.number(self.type, self.least, self.below)(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"invalid {self.type.__name__} value: {text!r}"
            ) from None


def declared_flags(config: type) -> dict[str, Flag]:
    """Return the flags of a Config, in the order of --help."""
    hints = get_type_hints(config, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    flags = {}
    for owner in (config, *config.__bases__):
        file = "train.py" if owner is config else f"{owner.__module__}.py"
        for name in owner.__annotations__:
            if get_origin(hints[name]) is not Annotated or name in flags:
                continue
            kind, help, *rest = hints[name].__metadata__
            declared, *_ = get_args(hints[name])
            if type(None) in get_args(declared):  # int for int | None
                declared, _ = get_args(declared)
            options = {}
            for option in rest:
                limits = ("least", "below")
                named = {"metavar": option} if isinstance(option, str) else zip(limits, option)
                options |= dict(named)
            flags[name] = Flag(name, declared, kind, help, defaults[name], file, **options)
    return flags


FLAGS = declared_flags(Config)
METAVARS = {int: "N", float: "X", str: "TEXT", bool: "BOOL"}

DESCRIPTION = """\
Train a language model on one process, or on the N processes that torchrun
--nproc_per_node N starts. The same command continues a stopped run.

  python train.py --max_steps 100
  torchrun --standalone --nproc_per_node 8 train.py --strategy fsdp --model gpt2-124m \\
      --data tokens/mine --global_batch_size 512 --micro_batch_size 32 --out runs/mine
  torchrun --standalone --nproc_per_node 8 train.py --config configs/gpt2-124m.json
  python train.py --eval_only --out runs/mine

The flags of each file are those that its code obeys. docs/reference.md has the
log's fields, exit statuses, file formats and guarantees.
"""


def build_parser() -> errors.Parser:
    """Return a parser of all flags. Only those that are given get a value."""
    parser = errors.Parser(
        prog="train.py",
        usage="train.py [--FLAG VALUE ...]",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "--config",
        metavar="FILE.json",
        default=argparse.SUPPRESS,
        help="config.json of a run, or a file in configs/; the command line overrides it",
    )
    groups = {}
    for flag in FLAGS.values():
        if flag.file not in groups:
            groups[flag.file] = parser.add_argument_group(flag.file)
        help = flag.help
        if flag.default is not None:
            help += f" (default: {str(flag.default).lower()})"
        metavar = flag.metavar or METAVARS.get(flag.type)
        if get_origin(flag.type) is Literal:
            metavar = f"{{{','.join(get_args(flag.type))}}}"
        options = {"type": flag.parse, "metavar": metavar, "help": help}
        if flag.type is bool:  # --async_save alone is --async_save true
            options |= {"nargs": "?", "const": True}
        groups[flag.file].add_argument(f"--{flag.name}", default=argparse.SUPPRESS, **options)
    return parser


# --------------------------------------------------------------------------------------------------
# Command line -> flags


def parse(argv: list[str], saved: dict[str, dict] | None = None) -> Config:
    """Return the flags: those of `saved`, then those of --config FILE, then the typed ones.

    `saved` is {file: flags}, as `read_flags` returns the flags of the run to continue. `out` is
    always given, since its default follows from the other flags of `argv`. Raises UsageError.
    """
    layers = parse_layers(build_parser(), argv)
    typed = merge(layers)
    check_paths(typed)
    out = typed.get("out") or default_out(typed)
    source = typed.get("init_from")
    if source and not typed.get("out") and Path(out) == Path(source) and not typed.get("eval_only"):
        raise UsageError(f"choose a new folder with --out: {source} belongs to another run")
    if Path.cwd().is_relative_to(Path(out).resolve()):
        raise UsageError(
            f"--out {out} is the current folder or a folder above it: "
            "choose a folder for this run alone, for example runs/mine"
        )
    return Config(**merge(saved or {}) | typed | {"out": out})


def parse_layers(parser: errors.Parser, argv: list[str]) -> dict[str, dict]:
    """Return {where: flags}: where they were given, in the order in which they override each other.

    `parser` has at least the flags of `build_parser`. Raises UsageError.
    """
    typed = vars(parser.parse_args(argv))
    file = typed.pop("config", None)
    if file is None:
        return {"typed": typed}
    source = f"--config {file}"
    return {source: read_flags(Path(file), source), "typed": typed}


def merge(layers: dict[str, dict]) -> dict:
    flags = {}
    for given in layers.values():
        flags |= given
    return flags


def check_paths(flags: dict) -> None:
    """Raise UsageError for an empty path, for example from a shell variable that is not set."""
    for name in ("out", "init_from"):
        if flags.get(name) == "":
            raise UsageError(f"--{name} is empty: give a path")


def default_out(flags: dict) -> str:
    """Return runs/NAME, named after the model or the run or checkpoint of --init_from.

    For a checkpoint of a run, NAME is RUN-step-N.
    """
    path = Path(flags.get("init_from") or flags.get("model") or "tiny")
    if path.parent.name == "checkpoints":
        return f"runs/{path.parent.parent.name}-{path.name}"
    return f"runs/{path.name}"


def read_flags(file: Path, source: str, ignored: tuple[str, ...] = ()) -> dict:
    """Return the flags in a JSON file, as `check_flags` does. `source` is its name in errors."""
    if file.is_dir():
        raise UsageError(f"{source} is a folder: give a file, such as {file}/config.json")
    try:
        values = json.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None
    if not isinstance(values, dict) or "config" in values:
        raise UsageError(f"{source}: it must be a JSON object of flags, without config")
    return check_flags(values, source, ignored)


def check_flags(values: dict, source: str, ignored: tuple[str, ...] = ()) -> dict:
    """Return saved flags, except those named `ignored`, as if they had been typed.

    Raises UsageError with the name of their `source` for an unknown name or a bad value.
    """
    kept = {name: value for name, value in values.items() if name not in ignored}
    try:
        return vars(build_parser().parse_args(as_argv(kept)))
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def as_argv(flags: dict) -> list[str]:
    """Return the command line that gives these flags. None was not given, so it is left out."""
    return [f"--{name}={value}" for name, value in flags.items() if value is not None]


def remembered(config: Config) -> dict:
    """Return the flags that later starts of the run take over: all but those of kind once."""
    return {name: getattr(config, name) for name, flag in FLAGS.items() if flag.kind != "once"}


# --------------------------------------------------------------------------------------------------
# Flags -> run


@dataclass(frozen=True, kw_only=True)
class Run(Config):
    """A resolved run: the value of every flag, and what follows from flags, ranks and data.

    It is the same on all ranks, and the manifest of each checkpoint records it. No value is None or
    "auto", except init_from and profile if not given, peak_tflops of an unknown device, the name of
    an unknown tokenizer, and rope_scaling of a model without it.
    """

    given: Config
    machine: Machine
    model_config: ModelConfig
    data_facts: DataFacts
    mesh_shape: tuple[int, int, int]  # dp_replicate, dp_shard, tp
    dp_size: int  # dp_replicate x dp_shard
    grad_accum_steps: int
    tokens_per_step: int  # of all ranks
    compute_dtype: torch.dtype  # of the forward pass

    @property
    def manifest(self) -> dict:
        """What every checkpoint of the run records."""
        return {
            "given": remembered(self.given),
            "config": {name: getattr(self, name) for name in FLAGS},
            "model": dataclasses.asdict(self.model_config),
            "data": self.data_facts.fingerprint,
            "tokenizer": self.data_facts.tokenizer,
            "tokens_in_vocabulary": self.data_facts.vocab_size,
        }


# Flags that override a part of the model
SIZE_FLAGS = FLAGS.keys() & {field.name for field in dataclasses.fields(ModelConfig)}


def resolve(
    given: Config,
    machine: Machine,
    facts: DataFacts,
    kept: dict | None = None,
    saved_model: ModelConfig | None = None,
) -> Run:
    """Fill in every default of a run. Reads no file, prints nothing and queries no hardware.

    kept         values, by flag, that replace defaults which would be computed: those of the run
                 that a start continues
    saved_model  the model of the checkpoint that a start continues or takes weights from, if any

    Raises UsageError and MeshError if flags, ranks, data and model do not fit together.
    """
    values = {name: getattr(given, name) for name in FLAGS}
    for name, value in (kept or {}).items():
        if values[name] in (None, "auto"):
            values[name] = value
    model_config = resolve_model(values, facts.vocab_size, kept or {}, saved_model)
    values = compute_defaults(values, model_config, machine)
    check_steps(values)

    asked = (values["dp_replicate"], values["dp_shard"], values["tp"])
    shape = dist.mesh_shape(values["strategy"], machine.world_size, machine.local_size, *asked)
    values["dp_replicate"], values["dp_shard"], _ = shape
    dp_size = shape[0] * shape[1]
    batch = values["global_batch_size"]
    if not values["eval_only"]:
        check_batch(batch, values["micro_batch_size"], dp_size)
    values["micro_batch_size"] = values["micro_batch_size"] or max(1, batch // dp_size)
    per_forward = values["micro_batch_size"] * dp_size  # sequences of all ranks
    return Run(
        **values,
        given=given,
        machine=machine,
        model_config=model_config,
        data_facts=facts,
        mesh_shape=shape,
        dp_size=dp_size,
        grad_accum_steps=batch // per_forward,
        tokens_per_step=batch * values["seq_len"],
        compute_dtype=getattr(torch, values["dtype"]),
    )


def update_rules(run: Run) -> tuple[type, ...]:
    """Return the rules of --optimizer. The first one that takes a parameter updates it."""
    if run.optimizer != "muon":
        return (optim.AdamW,)
    errors.need_extra("muon", "--optimizer muon")
    from extras.muon import Muon

    return Muon, optim.AdamW


def resolve_model(
    values: dict, vocab_size: int, kept: dict, saved: ModelConfig | None
) -> ModelConfig:
    """Return the named size or `saved`, the model of a checkpoint, as changed by the size flags.

    The vocabulary of a checkpoint is kept if it has room for `vocab_size` ids. Otherwise vocab_size
    is rounded up to a multiple of 64, for which matrix kernels are fast. Raises UsageError.
    """
    is_saved = saved and values["model"] in (None, kept.get("model"))
    size = saved if is_saved else SIZES[values["model"] or "tiny"]
    overrides = {"vocab_size": math.ceil(vocab_size / 64) * 64}
    if saved and vocab_size <= saved.vocab_size:
        overrides["vocab_size"] = saved.vocab_size
    for name in SIZE_FLAGS:
        if values[name] is not None:
            overrides[name] = values[name]
    if size.n_kv_head == size.n_head and values["n_kv_head"] is None:
        # A model without grouped-query attention gets it only from --n_kv_head.
        overrides["n_kv_head"] = overrides.get("n_head", size.n_head)
    try:
        model_config = dataclasses.replace(size, **overrides)
        check_tensor_parallel(model_config, values["tp"])
    except ValueError as error:
        raise UsageError(str(error)) from None
    return model_config


def check_tensor_parallel(model_config: ModelConfig, tp: int) -> None:
    """Raise ValueError unless `tp` ranks can split every layer into equal parts."""
    # n_head needs no check: it is a multiple of n_kv_head
    for name in ("n_kv_head", "d_ff", "vocab_size", "seq_len"):
        size = getattr(model_config, name)
        if size % tp:
            raise ValueError(
                f"{name} {size} / tp {tp} = {size / tp:.3g}, but each rank of a tp group "
                f"needs a whole number: choose a --tp that divides {size}"
            )


def compute_defaults(values: dict, model_config: ModelConfig, machine: Machine) -> dict:
    """Return the values with the model's sizes and all defaults that do not depend on the mesh."""
    filled = values | {name: getattr(model_config, name) for name in SIZE_FLAGS}
    filled["device"] = machine.device_type
    if filled["model"] is None:
        filled["model"] = "tiny"
    if filled["dtype"] == "auto":
        filled["dtype"] = "bfloat16" if machine.has_bfloat16 else "float32"
    if filled["strategy"] == "auto":
        filled["strategy"] = "single" if machine.world_size == filled["tp"] else "ddp"
    if filled["wrap"] == "auto":
        filled["wrap"] = choose_wrap(model_config)
    if filled["lr"] is None:
        filled["lr"] = 0.5 / model_config.d_model
    if filled["peak_tflops"] is None and filled["dtype"] == "bfloat16":
        filled["peak_tflops"] = PEAK_TFLOPS.get(machine.device_name)
    dist.blocks_per_unit(filled["wrap"])  # raises if no unit has this name
    return filled


def check_steps(values: dict) -> None:
    """Raise UsageError for steps or learning rates that contradict each other."""
    if values["min_lr"] > values["lr"]:
        raise UsageError(
            f"--min_lr {values['min_lr']} is above the peak learning rate {values['lr']}"
        )
    max_steps = values["max_steps"]
    if values["profile"] and profile_window(values["profile"])[1] >= max_steps:
        raise UsageError(f"--profile {values['profile']}: STOP must be below max_steps {max_steps}")


def profile_window(profile: str) -> tuple[int, int]:
    """Return the two steps of --profile START:STOP. Raises UsageError."""
    match = re.fullmatch(r"(\d+):(\d+)", profile)
    start, stop = map(int, match.groups()) if match else (0, 0)
    if start >= stop:
        raise UsageError(f"--profile {profile}: give START:STOP with START < STOP, like 10:13")
    return start, stop


def check_batch(global_batch_size: int, micro_batch_size: int | None, dp_size: int) -> None:
    """Raise UsageError unless every rank gets as many sequences, in whole micro-batches."""
    per_forward = (micro_batch_size or 1) * dp_size  # the fewest sequences of all ranks
    if global_batch_size % per_forward == 0:
        return
    larger = math.ceil(global_batch_size / per_forward) * per_forward
    split = f"{dp_size} data-parallel ranks"
    remedy = f"--global_batch_size {larger} or another number of ranks"
    if micro_batch_size:
        split = f"micro_batch_size {micro_batch_size} x {split} = {per_forward}"
        remedy = f"another --micro_batch_size, {remedy}"
    raise UsageError(
        f"global_batch_size {global_batch_size} is not a multiple of {split}: give {remedy}"
    )


# --------------------------------------------------------------------------------------------------
# Sizes on which defaults depend

# The most bytes of float32 weights in an FSDP unit of --wrap auto. With 8 blocks of 2.6 MB on 2
# ranks (gloo, Zen 3, medians of three rounds) a step took 386, 360, 346 and 335 ms with 1, 2, 3 and
# 4 blocks per unit, and 311 ms with a single unit. A limit of 8 MB gives half of this gain. Two
# gathered units are in memory at a time, since FSDP gathers one ahead; with
# --wrap none, the full model is.
UNIT_BYTES = 8_000_000


def choose_wrap(model_config: ModelConfig) -> str:
    """Choose --wrap auto: blocks in groups of up to UNIT_BYTES, or one unit for a small model.

    Each message has a fixed cost, so small blocks are gathered together. A model that fits into one
    unit is gathered once per micro-batch.
    """
    net = meta_model(model_config)
    if 4 * net.parameter_count() <= UNIT_BYTES:
        return "none"
    block_bytes = 4 * sum(p.numel() for p in net.blocks[0].parameters())
    return f"block_group:{max(1, UNIT_BYTES // block_bytes)}"


# Dense bfloat16 TFLOP/s, accumulated in float32, by the name that torch.cuda.get_device_name
# returns. Comments quote the vendors; a figure "with sparsity" is twice the dense one.
PEAK_TFLOPS = {
    # A100 data sheet 1758950: 312 dense, PCIe and SXM
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    # nvidia.com/en-us/data-center/h100, with sparsity: SXM 1,979, PCIe 1,513, NVL 1,671
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    # nvidia.com/en-us/data-center/h200, with sparsity: SXM 1,979, NVL 1,671
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    # nvidia.com/en-us/data-center/grace-hopper-superchip: as the H100 SXM
    "NVIDIA GH200 120GB": 989,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 144G HBM3e": 989,
    # Blackwell data sheet 3384703, with sparsity, per GPU: HGX B200 4,500, GB200 5,000
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    # nvidia.com/en-us/data-center/hgx and gb300-nvl72, with sparsity, per GPU: 4,500, 5,000
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB300": 2500,
    # amd.com, pages of the Instinct accelerators, dense. The MI355X's page rounds to 2,500. This is
    # 1,024 matrix cores x 512 multiply-adds per clock x 2 x 2.4 GHz.
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI355X": 2516.6,
    # nvidia.com/en-us/data-center/l4: 242 with sparsity; L40S data sheet: 362.05 dense
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    # RTX A6000 data sheet: 309.7 with sparsity
    "NVIDIA RTX A6000": 154.8,
    # White papers, dense: Ada, appendix A: 165.2; RTX Blackwell, table 3: 209.5
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
}
