"""The configuration of a run: a dataclass whose fields are the flags of train.py.

python train.py --help
"""

import argparse
import dataclasses
import functools
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin

import optim
from model import SIZES, ModelConfig
from runtime import cli
from runtime.cli import UsageError

BUILTIN = "tokens/python"
WARMUP_STEPS = 50  # the default of --warmup_steps
EVAL_SEQUENCES = 512  # that of --eval_sequences


def flag(
    group: str,
    default,
    help: str,
    least: float | None = None,
    below: float = math.inf,
    metavar: str | None = None,
    resume: Literal["never", "refused", "allowed", "not compared"] = "refused",
):
    """A field of Config: its group in --help, default, help text and, for numbers, limits.

    Numbers must be in least <= value < below. `resume` is what happens if the value changes when a
    run continues: by default it is refused without --allow_changes, "never" in any case.
    """
    metadata = {"group": group, "help": help, "least": least, "below": below}
    metadata |= {"metavar": metavar, "resume": resume}
    return field(default=default, metadata=metadata)


# It would be another run.
fixed = functools.partial(flag, resume="never")
# May change: results stay the same, or preflight.properties has what the flag stands for (model,
# data), or the run reports the change at start (max_steps).
free = functools.partial(flag, resume="allowed")
# Applies to one start and is not compared with earlier ones.
once = functools.partial(flag, resume="not compared")


@dataclass(frozen=True)
class Config:
    """The flags. To add one, add a field here; --help prints it.

    A field named like one of ModelConfig overrides it unless it is None. Resuming refuses a changed
    value unless the field is `free` or `once`.
    """

    data: str | None = free(
        "basics", None, f"token folder, or DIR:SHARE,... (default: {BUILTIN})", metavar="DIR"
    )
    out: str | None = once(
        "basics", None, "run folder (default: runs/MODEL or runs/INIT_FROM)", metavar="DIR"
    )
    seed: int = fixed("data", 0, "seed of the initial weights and of the data order", 0, 2**32)

    model: Literal[tuple(SIZES)] = free(
        "basics", "tiny", "named size; --n_layer ... --seq_len override its parts"
    )
    n_layer: int | None = free("model", None, "number of blocks", 1, 10_000)
    n_head: int | None = free("model", None, "number of attention heads", 1, 10_000)
    n_kv_head: int | None = free("model", None, "key and value heads; fewer than n_head: GQA", 1)
    d_model: int | None = free("model", None, "width of the residual stream", 1, 1_000_000)
    d_ff: int | None = free("model", None, "hidden width of the MLP", 1, 10_000_000)
    seq_len: int | None = free("model", None, "tokens per sequence", 1)

    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = free(
        "basics", "auto", "auto: ddp if everything fits on a device, else fsdp, across hosts hsdp"
    )
    dp_replicate: int | None = free("mesh", None, "number of replicas (hsdp: one per host)", 1)
    dp_shard: int | None = free("mesh", None, "ranks per replica (hsdp: those of a host)", 1)
    tp: int = free("mesh", 1, "tensor parallelism: ranks that compute one forward together", 1)
    wrap: str = free(
        "mesh", "auto", "FSDP unit: auto, block, block_group:K or none", metavar="UNIT"
    )
    reshard_after_forward: bool = free(
        "mesh", True, "drop gathered weights after forward, gather them again; false: SHARD_GRAD_OP"
    )
    grad_sync: Literal["batch", "micro_batch", "shard"] = free(
        "mesh", "batch", "when gradients are averaged; shard: between hsdp's replicas once per step"
    )

    # global_batch_size = micro_batch_size x grad_accum_steps x dp_size
    global_batch_size: int = fixed("basics", 32, "sequences per optimizer step, over all ranks", 1)
    micro_batch_size: int | None = free(
        "basics", None, "sequences per rank and forward (default: its share of the global batch)", 1
    )
    activation_checkpointing: Literal["none", "selective", "full"] = free(
        "memory", "none", "recompute blocks in backward; selective: all but matmuls and attention"
    )
    loss_chunks: int = free("memory", 1, "compute logits in N chunks, twice, to save memory", 1)

    max_steps: int = free("basics", 600, "optimizer steps of the run", 1)
    lr: float | None = flag("basics", None, "peak learning rate (default: 0.5 / d_model)", 0)
    min_lr: float = flag("optimizer", 0.0, "learning rate one step after the last", 0)
    warmup_steps: int | None = flag(
        "optimizer", None, f"steps of linear warm-up from 0 to lr (default: {WARMUP_STEPS})", 0
    )
    schedule: Literal[tuple(optim.SCHEDULES)] = flag(
        "optimizer", "cosine", "decay to min_lr; wsd: only in the last fifth after warm-up"
    )
    optimizer: Literal[tuple(optim.OPTIMIZERS)] = fixed(
        "optimizer", "adamw", "muon: for the matrices of the blocks, AdamW for the rest"
    )
    weight_decay: float = flag("optimizer", 0.1, "not applied to norms and the embedding", 0)
    beta1: float = flag("optimizer", 0.9, "AdamW beta1", 0, 1)
    beta2: float = flag("optimizer", 0.95, "AdamW beta2", 0, 1)
    eps: float = flag("optimizer", 1e-8, "AdamW epsilon", 0)
    clip: Literal[tuple(optim.CLIPS)] = flag(
        "optimizer", "norm", "norm: full gradient; adaptive: each parameter"
    )
    max_grad_norm: float = flag("optimizer", 1.0, "limit of --clip norm", 1e-9)
    max_grad_norm_ratio: float = flag("optimizer", 2.0, "limit of --clip adaptive", 1e-9)
    max_skipped: int = free("optimizer", 100, "skipped updates in a row that end a run; 0: off", 0)

    log_interval: int = free("cadence", 10, "steps between log rows", 1)
    tracker: Literal["none", "wandb"] = free(
        "cadence", "none", "also send training and evaluation rows to wandb (pip install wandb)"
    )
    optim_metrics_interval: int = free(
        "cadence", 0, "steps between rows of per-parameter statistics in optim.jsonl; 0: none", 0
    )
    eval_interval: int = free("basics", 250, "steps between evaluations; 0: only at the end", 0)
    eval_sequences: int | None = free(
        "cadence", None, f"per evaluation, always the same (default: {EVAL_SEQUENCES})", 1
    )
    eval_only: bool = once(
        "cadence", False, "print the validation loss of --out's latest checkpoint; write nothing"
    )
    sample_tokens: int = free("cadence", 256, "tokens to sample at the end; 0: none", 0)
    profile: str | None = free("cadence", None, "steps to trace", metavar="START:STOP")

    save_interval: int = free("basics", 250, "steps between checkpoints; 0: only at the end", 0)
    keep_last: int = flag("checkpoints", 2, "latest ones to keep; 0: all", 0)
    keep_every: int = flag("checkpoints", 0, "also keep those of every N-th step; 0: none", 0)
    checkpoint: Literal["sharded", "none"] = free(
        "checkpoints", "sharded", "sharded: one file per rank; none: the run cannot be continued"
    )
    async_save: bool = free("checkpoints", False, "write while training continues")
    resume: str = once(
        "checkpoints",
        "auto",
        "auto: continue the run in --out; PATH of a checkpoint or run: continue it in a new --out",
        metavar="auto|never|PATH",
    )
    init_from: str | None = once(
        "checkpoints", None, "start from the weights of this checkpoint or run", metavar="PATH"
    )
    allow_changes: bool = once("checkpoints", False, "continue a run even if its results change")

    dry_run: bool = once("stops", False, "build and check all up to the first step; write nothing")
    timeout: float = free(
        "stops", 120.0, "seconds without progress that end the run; 10 x to start or save", 1, 1e9
    )

    device: Literal["auto", "cpu", "cuda"] = free("hardware", "auto", "auto: GPUs if available")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "hardware", "auto", "compute dtype; auto: bfloat16 if the hardware has it"
    )
    compile: bool = free("hardware", False, "compile the model, or its layers, with torch.compile")
    num_workers: int | None = free(
        "hardware", None, "processes per rank that read ahead (default: 2 with GPUs, else 0)", 0
    )
    peak_tflops: float | None = free("hardware", None, "dense TFLOP/s of a device, for MFU", 1e-9)

    @property
    def source(self) -> str | None:
        """The checkpoint or run that --init_from or --resume names: it has the model."""
        return self.init_from or (None if self.resume in ("auto", "never") else self.resume)


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
# Flags -> Config


def parse(argv: list[str]) -> Config:
    """Parse the command line. Raises UsageError."""
    return to_config(parse_flags(build_parser(), argv))


def parse_flags(parser: cli.Parser, argv: list[str]) -> dict:
    """Flag -> value; flags in `argv` override those of a --config file. Raises UsageError.

    `parser` has at least the flags of `build_parser`.
    """
    given = parser.parse_known_args(argv)[0]
    if given.config:
        argv = config_flags(parser, given.config, given.out) + argv
    flags = vars(parser.parse_args(argv))
    del flags["config"]
    return flags


def to_config(flags: dict) -> Config:
    """Fill in defaults that depend on other flags, then check all. Raises UsageError."""
    if flags["out"] is None:
        flags["out"] = f"runs/{name_of(flags['init_from'] or flags['model'])}"
    if not flags["eval_only"]:  # for which the checkpoint has the defaults
        flags["data"] = flags["data"] or BUILTIN
        flags["eval_sequences"] = flags["eval_sequences"] or EVAL_SEQUENCES
    config = Config(**flags)
    if Path.cwd().is_relative_to(Path(config.out).resolve()):
        raise UsageError(
            f"--out {config.out or repr('')} is the current folder or a folder above it: "
            "name a folder for this run alone, such as runs/mine"
        )
    if config.warmup_steps is not None and config.warmup_steps > config.max_steps:
        raise UsageError(
            f"--warmup_steps {config.warmup_steps} is more than --max_steps {config.max_steps}: "
            "the learning rate would never reach --lr"
        )
    if config.init_from and config.resume not in ("auto", "never"):
        raise UsageError(
            "--init_from begins a new run and --resume PATH continues one: give only one of them"
        )
    # Fail early on flags that cannot fit together, whatever the data and the number of processes.
    if not (config.source or config.eval_only):  # the checkpoint has the model
        model_config(config, vocab_size=64 * config.tp)
        fill_learning_rate(config)
    check_wrap(config.wrap)
    profile_window(config)
    return config


def name_of(source: str) -> str:
    """The name of a model, a run or an imported checkpoint; RUN-step-N for one of a run."""
    path = Path(source)
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    return path.name


def build_parser() -> cli.Parser:
    """A parser with one flag for each field of Config."""
    parser = cli.Parser(
        prog="train.py",
        usage="train.py [--FLAG VALUE ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        help="config.json of a run, or a file in configs/; flags on the command line win",
    )
    return parser


def add_flag(group, f: dataclasses.Field) -> None:
    options = {"default": f.default, "help": f.metadata["help"]}
    least = f.metadata["least"]
    if f.default is not None:
        options["help"] += f" (default: {str(f.default).lower()})"
    kind, *_ = get_args(f.type) or [f.type]  # int for int, and for int | None
    if get_origin(f.type) is Literal:
        options["choices"] = get_args(f.type)
    elif kind is bool:
        # --async_save alone is --async_save true
        options |= {"type": boolean, "nargs": "?", "const": True, "metavar": "BOOL"}
    else:
        checked = kind if least is None else cli.number(kind, least, f.metadata["below"])
        options |= {"type": checked, "metavar": f.metadata["metavar"] or METAVARS[kind]}
    group.add_argument(f"--{f.name}", **options)


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def config_flags(parser: cli.Parser, file: str, out: str | None) -> list[str]:
    """Turn a saved config.json into flags, so that one parser checks both. Raises UsageError.

    Where another run began does not go into a new one in `out`.
    """
    left_out = {"allow_changes"}  # it applied to one start
    run = Path(file).resolve().parent
    if out and (run / "starts.jsonl").exists() and Path(out).resolve() != run:
        left_out |= {"resume", "init_from"}
    if Path(file).is_dir():
        raise UsageError(f"--config {file} is a folder: name a file, such as {file}/config.json")
    try:
        values = json.loads(Path(file).read_text("utf-8-sig"))
        if not isinstance(values, dict) or "config" in values:
            raise UsageError("it is not a JSON object of flags other than --config")
        flags = []
        for name, value in values.items():
            if value is not None and name not in left_out:
                flags.append(f"--{name}={value}")
        parser.parse_args(flags)
    except (OSError, ValueError) as error:  # such as a UsageError
        raise UsageError(f"--config {file}: {error}") from None
    return flags


# --------------------------------------------------------------------------------------------------
# What follows from the flags


def from_saved(flags: dict) -> Config:
    """The Config of saved flags. Newer flags have their defaults; unknown flags are left out."""
    known = {f.name: flags[f.name] for f in dataclasses.fields(Config) if f.name in flags}
    return Config(**known)


def fill_learning_rate(config: Config) -> Config:
    """The flags with computed defaults filled in: also an optim.Settings. Raises UsageError.

    Of a checkpoint's model, call it with the sizes filled in.
    """
    lr, warmup_steps = config.lr, config.warmup_steps
    if lr is None:
        lr = 0.5 / (config.d_model or SIZES[config.model].d_model)
    if warmup_steps is None:
        warmup_steps = WARMUP_STEPS
    if config.min_lr > lr:
        raise UsageError(f"--min_lr {config.min_lr} is above the peak learning rate {lr}")
    return dataclasses.replace(config, lr=lr, warmup_steps=warmup_steps)


def read_model(path: Path, manifest: dict) -> ModelConfig:
    """The model in the manifest of `path`. Raises UsageError."""
    try:
        return ModelConfig.from_dict(manifest.get("model", {}))
    except ValueError as error:
        raise UsageError(f"{path} cannot be used: {error}") from None


def fill_sizes(config: Config, base: ModelConfig) -> Config:
    """The flags, with those that override parts of `base` filled in from it."""
    sizes = {}
    for f in dataclasses.fields(base):
        if getattr(config, f.name, 0) is None:
            sizes[f.name] = getattr(base, f.name)
    if base.n_kv_head == base.n_head and config.n_kv_head is None:
        # A size without grouped queries gets them only from --n_kv_head.
        sizes["n_kv_head"] = config.n_head or base.n_head
    return dataclasses.replace(config, **sizes)


def model_config(config: Config, vocab_size: int, base: ModelConfig | None = None) -> ModelConfig:
    """The named size, or `base`, the model of a checkpoint; flags named like its fields override.

    The vocabulary of a checkpoint stays if it has room for `vocab_size`; else it is padded to a
    multiple of 64, where matrix kernels are fast. Raises UsageError.
    """
    size = base or SIZES[config.model]
    overrides = {}
    if base is None or vocab_size > base.vocab_size:
        overrides["vocab_size"] = math.ceil(vocab_size / 64) * 64
    for name, value in vars(fill_sizes(config, size)).items():
        if hasattr(size, name) and value is not None:
            overrides[name] = value
    try:
        model = dataclasses.replace(size, **overrides)
        model.check_tensor_parallel(config.tp)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return model


def check_wrap(wrap: str) -> None:
    """Raises UsageError."""
    if not re.fullmatch(r"auto|none|block|block_group:\d*[1-9]\d*", wrap):
        raise UsageError(
            f"--wrap {wrap}: choose auto, block, block_group:K (K blocks at a time) or none"
        )


def profile_window(config: Config) -> tuple[int, int] | None:
    """--profile as (start, stop). Raises UsageError."""
    if config.profile is None:
        return None
    match = re.fullmatch(r"(\d+):(\d+)", config.profile)
    start, stop = map(int, match.groups()) if match else (0, 0)
    if not start < stop < config.max_steps:
        raise UsageError(
            f"--profile {config.profile}: give START:STOP with START < STOP < max_steps "
            f"{config.max_steps}, like 10:13"
        )
    return start, stop
