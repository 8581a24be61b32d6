"""The configuration of a run: a dataclass whose fields are the flags of train.py.

python train.py --help
"""

import argparse
import dataclasses
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin

import errors
import optim
from errors import UsageError
from model import SIZES

BUILTIN = "tokens/python"


def parse_wrap(text: str) -> str:
    """The argparse type of --wrap."""
    if text != "auto":
        blocks_per_unit(text)
    return text


def blocks_per_unit(wrap: str) -> int | None:
    """Return the number of blocks per FSDP unit, or None for all. `wrap` is not "auto"."""
    match = re.fullmatch(r"none|block(?:_group:(\d*[1-9]\d*))?", wrap)
    if not match:
        raise argparse.ArgumentTypeError(
            f"{wrap}: choose auto, block, block_group:K (K blocks at a time) or none"
        )
    return None if wrap == "none" else int(match[1] or 1)


def parse_window(text: str) -> str:
    """The argparse type of --profile."""
    profile_window(text)
    return text


def profile_window(profile: str) -> tuple[int, int]:
    """Return the two steps of --profile START:STOP."""
    match = re.fullmatch(r"(\d+):(\d+)", profile)
    start, stop = map(int, match.groups()) if match else (0, 0)
    if start >= stop:
        raise argparse.ArgumentTypeError(
            f"{profile}: give START:STOP with START < STOP, like 10:13"
        )
    return start, stop


def flag(
    group: str,
    default,
    help: str,
    *,
    ge: float | None = None,
    lt: float = math.inf,
    metavar: str | None = None,
    parse: Callable | None = None,
    resume: Literal["never", "refused", "allowed", "not compared"] = "refused",
):
    """Return a field of Config: its group in --help, default, help text, and how to parse it.

    Numbers must be in ge <= value < lt. `parse` is an argparse type that replaces the field's type.
    `resume` is what happens if the value differs from the value in the run to continue:

    never           the start is refused: it would be a different run
    refused         the start is refused without --allow_changes: results would change
    allowed         the change is printed. Each start computes defaults of None and "auto" again
                    (layout.resolve). Model and data are compared by their fields and fingerprint.
    not compared    nothing: the flag applies to one start, and later starts do not take it over
    """
    metadata = {"group": group, "help": help, "ge": ge, "lt": lt, "resume": resume}
    return field(default=default, metadata=metadata | {"metavar": metavar, "parse": parse})


fixed = functools.partial(flag, resume="never")
free = functools.partial(flag, resume="allowed")
once = functools.partial(flag, resume="not compared")


@dataclass(frozen=True)
class Config:
    """The flags and their defaults. To add a flag, add a field here; --help prints it.

    A field with the same name as a field of ModelConfig overrides that field unless it is None.
    Continuing a run with a changed value is refused unless the field is `free` or `once`.
    layout.resolve replaces defaults of None or "auto" with computed values.
    """

    data: str = free("basics", BUILTIN, "token folder, or DIR:SHARE,...", metavar="DIR")
    out: str | None = once(
        "basics", None, "run folder (default: runs/MODEL or runs/INIT_FROM)", metavar="DIR"
    )
    seed: int = fixed("data", 0, "seed of the initial weights and the data order", ge=0, lt=2**32)

    model: Literal[tuple(SIZES)] = fixed(
        "basics", "tiny", "named size; --n_layer ... --seq_len override its parts"
    )
    n_layer: int | None = free("model", None, "number of blocks", ge=1, lt=10_000)
    n_head: int | None = free("model", None, "number of attention heads", ge=1, lt=10_000)
    n_kv_head: int | None = free("model", None, "key and value heads; fewer than n_head: GQA", ge=1)
    d_model: int | None = free("model", None, "width of the residual stream", ge=1, lt=1_000_000)
    d_ff: int | None = free("model", None, "hidden width of the MLP", ge=1, lt=10_000_000)
    seq_len: int | None = free("model", None, "tokens per sequence", ge=1)

    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = free(
        "basics", "auto", "auto: ddp if it fits on one device, else fsdp, or hsdp on several hosts"
    )
    dp_replicate: int | None = free("mesh", None, "number of replicas (hsdp: one per host)", ge=1)
    dp_shard: int | None = free("mesh", None, "ranks per replica (hsdp: all of a host)", ge=1)
    tp: int = free("mesh", 1, "tensor parallelism: ranks that compute one forward together", ge=1)
    wrap: str = free(
        "mesh",
        "auto",
        "FSDP unit: auto, block, block_group:K or none",
        metavar="UNIT",
        parse=parse_wrap,
    )
    reshard_after_forward: bool = free(
        "mesh", True, "free weights after forward and regather in backward; false: SHARD_GRAD_OP"
    )
    grad_sync: Literal["batch", "micro_batch", "shard"] = free(
        "mesh", "batch", "when to average gradients; shard: across hsdp replicas only once per step"
    )

    # global_batch_size = micro_batch_size x grad_accum_steps x dp_size
    global_batch_size: int = fixed("basics", 16, "sequences per step, over all ranks", ge=1)
    micro_batch_size: int | None = free(
        "basics", None, "sequences per rank and forward (default: its share of the batch)", ge=1
    )
    activation_checkpointing: Literal["none", "selective", "full"] = free(
        "memory", "none", "recompute blocks in backward; selective: all but matmuls and attention"
    )
    loss_chunks: int | None = free(
        "memory", None, "compute logits and loss in N chunks of tokens (default: by size)", ge=1
    )

    max_steps: int = free("basics", 700, "optimizer steps of the run", ge=1)
    lr: float | None = flag("basics", None, "peak learning rate (default: 0.5 / d_model)", ge=0)
    min_lr: float = flag("optimizer", 0.0, "learning rate at step max_steps + 1", ge=0)
    warmup_steps: int = flag("optimizer", 50, "steps of linear warm-up from 0 to lr", ge=0)
    schedule: Literal[tuple(optim.SCHEDULES)] = flag(
        "optimizer", "linear", "decay to min_lr; wsd: only in the last fifth of steps after warm-up"
    )
    optimizer: Literal[tuple(optim.OPTIMIZERS)] = fixed(
        "optimizer", "adamw", "muon: Muon for the matrices of the blocks, AdamW for the rest"
    )
    weight_decay: float = flag("optimizer", 0.1, "not applied to norms and the embedding", ge=0)
    beta1: float = flag("optimizer", 0.9, "AdamW beta1", ge=0, lt=1)
    beta2: float = flag("optimizer", 0.95, "AdamW beta2", ge=0, lt=1)
    eps: float = flag("optimizer", 1e-8, "AdamW epsilon", ge=0)
    clip: Literal[tuple(optim.CLIPS)] = flag(
        "optimizer", "norm", "norm: clip the full gradient; adaptive: each parameter's gradient"
    )
    max_grad_norm: float = flag("optimizer", 1.0, "limit of --clip norm", ge=1e-9)
    max_grad_norm_ratio: float = flag("optimizer", 2.0, "limit of --clip adaptive", ge=1e-9)
    max_skipped: int = free(
        "optimizer", 100, "end the run after N skipped updates in a row; 0: never", ge=0
    )

    log_interval: int = free("cadence", 10, "steps between log rows", ge=1)
    tracker: Literal["none", "wandb"] = free(
        "cadence", "none", "also send training and evaluation rows to wandb (pip install wandb)"
    )
    optim_metrics_interval: int = free(
        "cadence", 0, "steps between rows of per-parameter statistics in optim.jsonl; 0: none", ge=0
    )
    eval_interval: int = free("basics", 250, "steps between evaluations; 0: only at the end", ge=0)
    eval_sequences: int = free("cadence", 512, "validation sequences, always the same", ge=1)
    eval_only: bool = once(
        "cadence", False, "print the validation loss of --out's latest checkpoint; write nothing"
    )
    sample_tokens: int = free(
        "cadence", 256, "tokens to sample at the end, if memory allows; 0: none", ge=0
    )
    profile: str | None = once(
        "cadence", None, "steps to trace", metavar="START:STOP", parse=parse_window
    )

    save_interval: int = free("basics", 250, "steps between checkpoints; 0: only at the end", ge=0)
    keep_last: int = flag("checkpoints", 2, "number of latest checkpoints to keep; 0: all", ge=0)
    keep_every: int = free("checkpoints", 0, "also keep steps N, 2N, 3N, ...; 0: none", ge=0)
    checkpoint: Literal["sharded", "none"] = free(
        "checkpoints", "sharded", "sharded: one file per rank; none: the run cannot be continued"
    )
    async_save: bool = free("checkpoints", False, "write checkpoints while training continues")
    init_from: str | None = once(
        "checkpoints", None, "start from the weights of this checkpoint or run", metavar="PATH"
    )
    allow_changes: bool = once("checkpoints", False, "continue a run even if its results change")

    dry_run: bool = once(
        "stops", False, "check everything up to the first step; write nothing to OUT"
    )
    timeout: float = once(
        "stops",
        120.0,
        "end the run after X seconds without progress; 10 times as long to start or save",
        ge=1,
        lt=1e9,
    )

    device: Literal["auto", "cpu", "cuda"] = once("hardware", "auto", "auto: GPUs if available")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "hardware", "auto", "compute dtype; auto: bfloat16 if the hardware supports it"
    )
    compile: bool = free("hardware", False, "compile the model, or its layers, with torch.compile")
    num_workers: int | None = free(
        "hardware", None, "processes per rank that read ahead (default: 2 with GPUs, else 0)", ge=0
    )
    peak_tflops: float | None = free("hardware", None, "dense TFLOP/s per device, for MFU", ge=1e-9)


DEFAULTS = {f.name: f.default for f in dataclasses.fields(Config)}
POLICIES = {f.name: f.metadata["resume"] for f in dataclasses.fields(Config)}
# The flags of the mesh go together: if one is typed, none is taken over from an earlier start.
MESH = ("strategy", "dp_replicate", "dp_shard", "tp", "grad_sync")
# Flags whose value a later start does not take over: those that apply to one start, and those whose
# default is computed in each start (unless they were typed)
PER_START = {
    f.name
    for f in dataclasses.fields(Config)
    if f.name in MESH
    or f.metadata["resume"] == "not compared"
    or (f.metadata["resume"] == "allowed" and f.default in (None, "auto"))
}

METAVARS = {int: "N", float: "X", str: "TEXT"}

EXAMPLES = """
examples:
  python train.py --max_steps 100
  torchrun --standalone --nproc_per_node 8 train.py --strategy fsdp --model gpt2-124m \\
      --data tokens/mine --global_batch_size 512 --micro_batch_size 32 --out runs/mine
  torchrun --standalone --nproc_per_node 8 train.py --config configs/gpt2-124m.json
  python train.py --eval_only --out runs/mine

docs/reference.md has the log's fields, exit statuses, file formats and guarantees.
"""


# --------------------------------------------------------------------------------------------------
# Command line -> flags


def parse(argv: list[str]) -> dict:
    """Return {name: value} of the flags that are typed or in the --config file.

    `out` is always included: its default depends only on these flags. Raises UsageError.
    """
    flags = parse_flags(build_parser(), argv)
    named = flags.get("init_from")
    if named == "":  # for example, a shell variable that is not set
        raise UsageError("--init_from is empty: give the path of a checkpoint or a run")
    if "out" not in flags:
        flags["out"] = default_out(flags)
        if Path(flags["out"]) == Path(named or "."):
            raise UsageError(f"choose a new folder with --out: {named} belongs to another run")
    if Path.cwd().is_relative_to(Path(flags["out"]).resolve()):
        raise UsageError(
            f"--out {flags['out'] or repr('')} is the current folder or a folder above it: "
            "choose a folder for this run alone, for example runs/mine"
        )
    return flags


def parse_flags(parser: errors.Parser, argv: list[str]) -> dict:
    """Return {flag: value}; flags in `argv` override those of a --config file. Raises UsageError.

    `parser` has at least the flags of `build_parser`; those have no argparse defaults.
    """
    given = parser.parse_known_args(argv)[0]
    if given.config:
        argv = config_flags(parser, given.config, getattr(given, "out", None)) + argv
    flags = vars(parser.parse_args(argv))
    return {name: value for name, value in flags.items() if name != "config"}


def default_out(flags: dict) -> str:
    """Return runs/NAME, named after the model or the run or checkpoint of --init_from.

    For a checkpoint of a run, NAME is RUN-step-N.
    """
    path = Path(flags.get("init_from") or flag_value(flags, "model"))
    if path.parent.name == "checkpoints":
        return f"runs/{path.parent.parent.name}-{path.name}"
    return f"runs/{path.name}"


def flag_value(flags: dict, name: str):
    """Return the flag as typed or in --config, else its default in Config."""
    return flags.get(name, getattr(Config, name))


def build_parser() -> errors.Parser:
    """Return a parser with one flag for each field of Config."""
    parser = errors.Parser(
        prog="train.py",
        usage="train.py [--FLAG VALUE ...]",
        description="Train a language model on one process, or on the N processes that\n"
        "torchrun --nproc_per_node N starts. The same command continues a stopped run.",
        epilog=EXAMPLES,
    )
    groups = {}
    for f in dataclasses.fields(Config):
        title = f.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        add_flag(groups[title], f)
    groups["basics"].add_argument(
        "--config",
        metavar="FILE.json",
        help="config.json of a run, or a file in configs/; the command line overrides it",
    )
    return parser


def add_flag(group, f: dataclasses.Field) -> None:
    # Only flags that are typed get a value: layout.resolve fills in the defaults.
    options = {"default": argparse.SUPPRESS, "help": f.metadata["help"]}
    if f.default is not None:
        options["help"] += f" (default: {str(f.default).lower()})"
    kind, *_ = get_args(f.type) or [f.type]  # int for int, and for int | None
    if get_origin(f.type) is Literal:
        options["choices"] = get_args(f.type)
    elif kind is bool:
        # --async_save alone is --async_save true
        options |= {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
    else:
        parse = f.metadata["parse"] or kind
        if f.metadata["ge"] is not None:
            parse = errors.number(kind, f.metadata["ge"], f.metadata["lt"])
        options |= {"type": parse, "metavar": f.metadata["metavar"] or METAVARS[kind]}
    group.add_argument(f"--{f.name}", **options)


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def config_flags(parser: errors.Parser, file: str, out: str | None) -> list[str]:
    """Turn a saved config.json into flags, so that one parser checks both. Raises UsageError.

    A new run in `out` does not take over init_from from the config of another run.
    """
    left_out = {"allow_changes"}  # applied only to the start that gave it
    run = Path(file).resolve().parent
    if out and (run / "starts.jsonl").exists() and Path(out).resolve() != run:
        left_out.add("init_from")
    if Path(file).is_dir():
        raise UsageError(f"--config {file} is a folder: give a file, such as {file}/config.json")
    try:
        values = json.loads(Path(file).read_text("utf-8-sig"))
        if not isinstance(values, dict) or "config" in values:
            raise UsageError("it must be a JSON object of flags, without config")
        flags = []
        for name, value in values.items():
            if value is not None and name not in left_out:
                flags.append(f"--{name}={value}")
        parser.parse_args(flags)
    except (OSError, ValueError) as error:  # including UsageError
        raise UsageError(f"--config {file}: {error}") from None
    return flags
