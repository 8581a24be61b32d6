"""The configuration of a run: one dataclass, whose fields are the flags of train.py.

python train.py --help
"""

import argparse
import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args, get_origin

import optim
from model import SIZES, ModelConfig

BUILTIN = "tokens/python"


class UsageError(ValueError):
    """Flags that do not fit together, or with what is on disk."""


def flag(default, help: str, least: float | None = None, below: float = math.inf):
    return field(default=default, metadata={"help": help, "least": least, "below": below})


@dataclass(frozen=True)
class Config:
    data: str = flag(
        BUILTIN,
        "token folder, written by data.py or nanoGPT; the default is prepared on first use, "
        "from the installed Python's library",
    )
    out: str | None = flag(None, "run folder (default: runs/MODEL)")
    # model
    model: Literal[tuple(SIZES)] = flag("tiny", "named size; the next six override parts of it")
    n_layer: int | None = flag(None, "blocks", 1)
    n_head: int | None = flag(None, "attention heads", 1)
    n_kv_head: int | None = flag(
        None, "heads of keys and values; fewer than n_head is grouped-query attention", 1
    )
    d_model: int | None = flag(None, "width", 1)
    d_ff: int | None = flag(None, "width of the MLP's hidden layer", 1)
    seq_len: int | None = flag(None, "tokens in a sequence", 1)
    # what runs where
    strategy: Literal["auto", "single", "ddp", "fsdp", "hsdp"] = flag(
        "auto",
        "what the ranks share; auto: ddp where all of it fits a device, else fsdp, across hosts hsdp",
    )
    dp_replicate: int | None = flag(
        None, "copies of the weights (default: the strategy's; hsdp: one per host)", 1
    )
    dp_shard: int | None = flag(
        None, "ranks that share a copy (default: the strategy's; hsdp: those of a host)", 1
    )
    tp: int = flag(
        1,
        "tensor parallelism: ranks that share every layer of one forward pass, with any strategy",
        1,
    )
    wrap: str = flag(
        "block",
        "what fsdp gathers at once: block, block_group:K (K blocks), none (the whole model)",
    )
    reshard_after_forward: bool = flag(
        True, "drop gathered weights after forward and gather them again; false is SHARD_GRAD_OP"
    )
    activation_checkpointing: Literal["none", "selective", "full"] = flag(
        "none",
        "compute again in backward: selective all but matrix products and attention, full whole blocks",
    )
    loss_chunks: int = flag(
        1,
        "parts of a micro-batch whose logits are made one after the other, and again in backward: less "
        "memory for large vocabularies",
        1,
    )
    compile: bool = flag(
        False, "let torch.compile make fast kernels of the blocks, in the first step"
    )
    device: Literal["auto", "cpu", "cuda"] = flag("auto", "auto takes the GPUs where there are any")
    dtype: Literal["auto", "float32", "bfloat16"] = flag(
        "auto",
        "compute dtype; auto is bfloat16 where the hardware has it; weights and reductions stay float32",
    )
    timeout: float = flag(
        120.0,
        "seconds after which a rank that is lost or gets nowhere ends the run; ten times as many while "
        "it starts and saves",
        1,
        1e9,
    )
    time_limit: float = flag(
        0.0,
        "seconds after which the run saves and stops, early enough to be done by then; 0 is none",
        0,
    )
    # batch: global_batch_size = micro_batch_size x accumulation x data-parallel ranks
    global_batch_size: int = flag(32, "sequences per optimizer step over all ranks", 1)
    micro_batch_size: int | None = flag(
        None,
        "sequences per rank and forward (default: the rank's whole share of the step; less accumulates)",
        1,
    )
    grad_sync: Literal["batch", "micro_batch", "shard"] = flag(
        "batch",
        "average gradients once per step, or after every micro-batch: more traffic, under fsdp less memory; shard, "
        "for hsdp: scatter them every time, average between replicas once",
    )
    num_workers: int | None = flag(
        None, "processes per rank that read ahead (default: 2 with GPUs, else 0)", 0
    )
    seed: int = flag(0, "of the initial weights and of the order of the data", 0, 2**32)
    # optimizer
    max_steps: int = flag(600, "optimizer steps in all", 1)
    lr: float | None = flag(
        None, "highest learning rate (default: 0.5 / d_model, which is close to GPT-3's table)", 0
    )
    min_lr: float = flag(0.0, "learning rate at the end of the schedule", 0)
    warmup_steps: int = flag(50, "steps of linear warm-up from 0 to lr", 0)
    schedule: Literal[tuple(optim.SCHEDULES)] = flag(
        "cosine", "way from lr to min_lr; wsd falls over the last fifth only"
    )
    weight_decay: float = flag(0.1, "AdamW's, on matrices only", 0)
    beta1: float = flag(0.9, "AdamW's memory of gradients", 0, 1)
    beta2: float = flag(0.95, "AdamW's memory of their squares", 0, 1)
    eps: float = flag(1e-8, "AdamW's", 0)
    clip: Literal[tuple(optim.CLIPS)] = flag(
        "norm",
        "norm: the whole gradient to max_grad_norm; adaptive: each parameter's to max_grad_norm_ratio x the moving "
        "average of its own norm; value: each element to +- max_grad_norm",
    )
    max_grad_norm: float = flag(1.0, "limit of --clip norm and value", 1e-9)
    max_grad_norm_ratio: float = flag(2.0, "limit of --clip adaptive", 1e-9)
    skip_spikes: float | None = flag(
        None,
        "skip updates whose loss or gradient norm is more than so many standard deviations above their last 128",
        1e-9,
    )
    max_skipped: int = flag(100, "updates skipped in a row that end the run; 0 never does", 0)
    # cadence, in optimizer steps
    log_interval: int = flag(10, "steps between log rows", 1)
    optim_metrics_interval: int = flag(
        0, "steps between rows of every parameter's statistics in optim.jsonl; 0 is never", 0
    )
    eval_interval: int = flag(250, "steps between evaluations; 0 is only at the end", 0)
    eval_sequences: int = flag(512, "validation sequences of an evaluation, the same at each", 1)
    sample_tokens: int = flag(256, "tokens of text written at the end; 0 is none", 0)
    save_interval: int = flag(250, "steps between checkpoints; 0 is only at the end", 0)
    keep_last: int = flag(2, "newest checkpoints kept; 0 keeps all", 0)
    keep_every: int = flag(0, "keep those of every so many steps too; 0 is none", 0)
    profile: str | None = flag(
        None, "START:STOP: trace the steps after START up to STOP, and say where their time goes"
    )
    # checkpoints
    checkpoint: Literal["sharded", "full", "none"] = flag(
        "sharded",
        "sharded: each rank writes its own part; full: one file, assembled in the first host's memory",
    )
    async_save: bool = flag(False, "copy to host memory, and write while training goes on")
    resume: str = flag(
        "auto",
        "auto continues the run in --out; never wants an empty --out; PATH of a checkpoint begins there",
    )


def parse(argv: list[str]) -> Config:
    """Flags -> Config: each field is a flag of its name and type; those of a --config file stand before the others."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        allow_abbrev=False,
        description="Train a language model: "
        "on one process, or on the N that torchrun --nproc_per_node N starts.",
    )
    parser.add_argument(
        "--config", metavar="FILE.json", help="a run's config.json; flags given beside it override"
    )

    def refuse(message: str):
        raise UsageError(f"{message} (python train.py --help lists the flags)")

    parser.error = refuse  # instead of usage in many lines and an exit of its own
    for f in dataclasses.fields(Config):
        choices = get_args(f.type) if get_origin(f.type) is Literal else None
        kind = (
            str if choices else next((t for t in get_args(f.type) if t is not type(None)), f.type)
        )  # int | None -> int
        default = "" if f.default is None else f" (default: {f.default})"
        bare = (
            {"nargs": "?", "const": True} if kind is bool else {}
        )  # --async_save is --async_save true
        parser.add_argument(
            f"--{f.name}",
            type=boolean if kind is bool else kind,
            choices=choices,
            default=f.default,
            **bare,
            metavar=None if choices else kind.__name__.upper(),
            help=f.metadata["help"] + default,
        )
    file = parser.parse_known_args(argv)[0].config
    args = vars(parser.parse_args((config_flags(file) if file else []) + argv))
    del args["config"]
    for f in dataclasses.fields(Config):
        value, least, below = args[f.name], f.metadata["least"], f.metadata["below"]
        if (
            least is not None
            and value is not None
            and not (least <= value < below or value == below == math.inf)
        ):
            raise UsageError(
                f"--{f.name} {value} must be at least {least}"
                + f" and below {below}" * (below < math.inf)
            )
    return Config(**args | {"out": args["out"] or f"runs/{args['model']}"})


def boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def config_flags(file: str) -> list[str]:
    """A saved config.json as the flags it stands for, so that one parser checks both."""
    try:
        items = json.loads(Path(file).read_text()).items()
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"--config {file}: {error}") from None
    return [f"--{name}={value}" for name, value in items if value is not None]


def model_config(config: Config, vocab_size: int) -> ModelConfig:
    """The named size with the overrides, and the data's vocabulary padded to a multiple of 64 for the matrix kernels."""
    size = SIZES[config.model]
    names = ("n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "seq_len")
    overrides = {name: value for name in names if (value := getattr(config, name)) is not None}
    if size.n_kv_head == size.n_head:  # a size without grouped queries gets them only when asked
        overrides.setdefault("n_kv_head", config.n_head or size.n_head)
    try:
        model = dataclasses.replace(size, vocab_size=math.ceil(vocab_size / 64) * 64, **overrides)
        model.check_tensor_parallel(config.tp)
        return model
    except ValueError as error:
        raise UsageError(str(error)) from None


def profile_window(config: Config) -> tuple[int, int] | None:
    """(start, stop) of --profile"""
    if config.profile is None:
        return None
    start, _, stop = config.profile.partition(":")
    if not (start.isdecimal() and stop.isdecimal() and int(start) < int(stop) < config.max_steps):
        raise UsageError(
            f"--profile {config.profile}: give START:STOP with START < STOP < max_steps {config.max_steps}, "
            "like 10:13"
        )
    return int(start), int(stop)


def batch_shape(config: Config, ranks: int) -> tuple[int, int]:
    """(micro-batch size, accumulation)"""
    size = config.global_batch_size
    micro = config.micro_batch_size or max(1, size // ranks)
    if size % (micro * ranks):
        raise UsageError(
            f"global_batch_size {size} is not a multiple of micro_batch_size {micro} x {ranks} data-parallel ranks "
            f"= {micro * ranks}: change --global_batch_size or --micro_batch_size"
        )
    return micro, size // (micro * ranks)
