"""Everything that can refuse a run before its first step and needs no weights and no other rank.

Flags, data, run folder, what the run continues from, and which flags may change. Whether the ranks
form one run is asked later: see train.agree.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path

import checkpoint
import data
import dist
import layout
import prepare
from config import (
    BUILTIN,
    EVAL_SEQUENCES,
    Config,
    fill_learning_rate,
    fill_sizes,
    model_config,
    read_model,
)
from metrics import read_log
from model import ModelConfig
from runtime import memory, run_folder
from runtime.cli import UsageError
from text import tokenizer


@dataclass(frozen=True)
class Start:
    """Where a run begins: after `step`, with the state of `checkpoint`, or new after step 0."""

    config: Config  # with the values that the run or its model has for flags not given
    model: ModelConfig
    manifest: dict  # goes into every checkpoint
    device_memory: int  # bytes that a rank may fill, for --strategy auto
    step: int = 0
    checkpoint: Path | None = None
    init_from: Path | None = None  # weights for a new run, or for --eval_only
    changes: list[str] = field(default_factory=list)  # such as "--max_steps 100 -> 200"
    passed_over: list[str] = field(default_factory=list)  # newer checkpoints and their problems


def check(flags: Config, world: dist.World, latest: Path | None, passed_over: list[str]) -> Start:
    """Check what needs no weights, on rank 0; find where the run begins and with what model.

    `latest` is the latest valid checkpoint of --out, `passed_over` has the problems of newer ones.
    Writes only the built-in data. Raises UsageError, CheckpointError, DataError and TokenizerError.
    """
    if not flags.eval_only:
        check_folder(flags, latest, passed_over)
    origin = find_origin(flags, latest)
    c = settle(flags, origin)
    if c.data == BUILTIN:
        prepare_builtin()
    folders = data.open_folders(c.data)
    first = folders[0]  # for what all share: vocabulary and tokenizer
    if first.tokenizer_file:  # a built-in tokenizer has none, and may need the network
        tokenizer.find(first.path.absolute(), first.tokenizer_name, first.vocab_size)
    model = model_config(c, first.vocab_size, origin.model)
    manifest = {
        "config": dataclasses.asdict(c),
        "model": dataclasses.asdict(model),
        "dtype": str(layout.compute_dtype(c.dtype, world.device)).removeprefix("torch."),
        "data": ", ".join(folder.fingerprint for folder in folders),
        "tokenizer": first.tokenizer_name,
        "tokens_in_vocabulary": first.vocab_size,
    }
    device_memory = 0
    if c.strategy == "auto":
        device_memory = memory.device_memory(world.device, world.local_size)
    start = Start(c, model, manifest, device_memory, passed_over=passed_over)
    return begin(start, origin, latest)


def prepare_builtin() -> None:
    if not Path(BUILTIN).exists():
        prepare.prepare(None, Path(BUILTIN))


# --------------------------------------------------------------------------------------------------
# What a start takes over


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a start takes something over from, if any."""

    path: Path | None = None  # the latest checkpoint of --out, else that of --init_from or --resume
    manifest: dict = field(default_factory=dict)  # of that
    model: ModelConfig | None = None  # with --init_from or --resume; flags override its parts


def check_folder(c: Config, latest: Path | None, passed_over: list[str]) -> None:
    """Refuse a folder whose contents a run would overwrite. Raises UsageError, CheckpointError."""
    out = Path(c.out)
    rows = read_log(out / "metrics.jsonl")
    saved = [row["step"] for row in rows if row.get("event") == "checkpoint"]
    starts = run_folder.read_starts(out)
    reason = None
    if c.resume == "never" and any(path.name != "lock" for path in out.glob("*")):
        reason = "it is not empty, and --resume never would overwrite it"
    elif latest:
        return
    elif passed_over or saved:
        damage = passed_over[0] if passed_over else f"its checkpoint of step {saved[-1]} is gone"
        raise checkpoint.CheckpointError(
            f"cannot continue --out {out}: {damage}; restore a checkpoint, or choose another --out"
        )
    elif not starts and (out / "config.json").exists():
        reason = "it holds files that are not train.py's"
    elif starts and rows and starts[-1]["config"].get("checkpoint") == "none":
        reason = "its run has --checkpoint none"
    if reason:
        raise UsageError(f"cannot continue --out {out}: {reason}; choose another --out")


def find_origin(config: Config, latest: Path | None = None) -> Origin:
    """Read what `settle` and `begin` need. Raises UsageError, PathError and CheckpointError.

    `latest`, of --out, takes precedence over --init_from and --resume, so that the same command can
    be repeated, even if what they named is gone.
    """
    named = config.source or (config.out if config.eval_only else None)
    path = latest
    if named and not latest:
        path = run_folder.choose_checkpoint(Path(named), "train.py")
    if path is None:
        return Origin()
    manifest = checkpoint.read_manifest(path)
    return Origin(path, manifest, read_model(path, manifest) if named else None)


def settle(config: Config, origin: Origin) -> Config:
    """Fill in the flags whose values are the checkpoint's. Raises UsageError."""
    saved = origin.manifest
    flags = saved.get("config") or {}
    values = {}
    if config.eval_only:  # by default on the checkpoint's data, in its dtype and batches
        values |= {"init_from": str(origin.path), "resume": "auto"}
        for name, default in {"data": BUILTIN, "eval_sequences": EVAL_SEQUENCES}.items():
            values[name] = getattr(config, name) or flags.get(name) or default
        values["dtype"] = saved.get("dtype", "auto") if config.dtype == "auto" else config.dtype
        values["micro_batch_size"] = config.micro_batch_size or saved.get("micro_batch_size")
    if origin.model:
        config = fill_sizes(config, origin.model)
        # The rest of the model is the named size's, if any: --config RUN/config.json needs both.
        values["model"] = flags.get("model", config.model)
    config = dataclasses.replace(config, **values)
    if not config.eval_only:
        fill_learning_rate(config)  # refuses a --min_lr above the peak
    return config


# --------------------------------------------------------------------------------------------------
# Where a run begins


def begin(start: Start, origin: Origin, latest: Path | None) -> Start:
    """Find where the run begins. Raises UsageError if it may not, CheckpointError for damage."""
    c, path = start.config, origin.path
    if path is None:
        return start
    if c.init_from and not latest:
        check_weights(path, origin.manifest, start)
        return dataclasses.replace(start, init_from=path)
    changes = check_changes(path, origin.manifest, start.manifest)
    step = origin.manifest["step"]
    # A new folder must have steps left to train.
    if step > c.max_steps or (latest is None and step == c.max_steps):
        raise UsageError(
            f"{path} is at step {step}, and --max_steps {c.max_steps} leaves nothing to train: "
            "raise --max_steps or choose another --out"
        )
    return dataclasses.replace(start, step=step, checkpoint=path, changes=changes)


def check_weights(path: Path, saved: dict, start: Start) -> None:
    """Check that the model uses saved weights as they were trained. Raises UsageError.

    Names and shapes are checked when the weights are loaded.
    """
    for key, before in vars(read_model(path, saved)).items():
        value = getattr(start.model, key)
        if value != before and key != "seq_len":
            raise UsageError(
                f"{path} has {key} {before}, and this run has {value}: its weights do not fit"
            )


# --------------------------------------------------------------------------------------------------
# What changed between two starts


def check_changes(path: Path, saved: dict, manifest: dict) -> list[str]:
    """Return what differs between the checkpoint `path` and this start, as text.

    Raises UsageError for what may not change, or not without --allow_changes (see config.flag).
    """
    policies = {f"--{f.name}": f.metadata["resume"] for f in dataclasses.fields(Config)}
    now = properties(path, manifest)
    changes, refused = [], {}
    for name, old in properties(path, saved).items():
        new = now.get(name, "unknown to this code")
        policy = policies.get(name, "refused" if name.startswith("--") else "never")
        if new == old or policy == "not compared":
            continue
        changes.append(f"{name} {old} -> {new}")
        if policy == "never" or (policy == "refused" and not now["--allow_changes"]):
            refused[changes[-1]] = policy
    if refused:
        remedy = "choose another --out, or give --allow_changes"
        if "never" in refused.values():
            remedy = f"or begin a new run with its weights: --init_from {path} and another --out"
        raise UsageError(
            f"cannot continue from {path}: {', '.join(refused)}; change that back, {remedy}"
        )
    return changes


def properties(path: Path, manifest: dict) -> dict:
    """What a manifest says of a run: its flags with defaults resolved, its model and its data."""
    try:
        flags, fingerprint = manifest["config"], manifest["data"]
    except KeyError as error:
        raise UsageError(
            f"{path} is not a checkpoint of train.py: its manifest.json lacks {error}"
        ) from None
    model = vars(read_model(path, manifest))
    names = {f.name for f in dataclasses.fields(Config)}
    known = {name: flags[name] for name in names & flags.keys()}  # newer flags have their defaults
    resolved = vars(fill_learning_rate(Config(**known | {"d_model": model["d_model"]})))
    dtype = {"dtype": manifest.get("dtype", resolved["dtype"])}  # what --dtype auto chose
    found = {f"--{name}": value for name, value in (flags | resolved | dtype).items()}
    for name, value in model.items():
        found.pop(f"--{name}", None)
        found[name] = value
    return found | {"the data's fingerprint": fingerprint}
