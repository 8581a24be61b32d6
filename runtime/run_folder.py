"""The contents of a run folder, who may write it, and which run may continue in it.

OUT/config.json      the flags of the last start
    starts.jsonl     one row per start: when, where, from which step, with which flags
    console.log      what all ranks of all starts printed
    metrics.jsonl    one row per log_interval, evaluation and checkpoint
    optim.jsonl      one row per parameter, with --optim_metrics_interval
    checkpoints/     see checkpoint.py
    profile/         with --profile
    wandb/, tensorboard/  with --tracker
    flight/          the last collectives, after a rank hung or was lost
    lock             while a run writes here
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import torch

import checkpoint
import dist
from config import (
    BUILTIN,
    Config,
    check_min_lr,
    fill_sizes,
    lr_schedule,
    peak_lr,
    read_model,
    warmup_steps,
)
from metrics import read_lines, read_log, replace_file
from model import ModelConfig, Transformer
from runtime import console
from runtime.cli import UsageError
from runtime.lock import is_at, try_lock

# --------------------------------------------------------------------------------------------------
# One run at a time


@contextlib.contextmanager
def hold_lock(out: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold OUT/lock, which names the run that writes in OUT; the owner's death releases it.

    Creates the folder if needed, and removes it again if the run writes nothing to it. Waits up to
    `patience` seconds for another run to end. Raises UsageError.
    """
    path = out / "lock"
    deadline = time.monotonic() + patience
    while True:
        try:
            new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
            out.mkdir(parents=True, exist_ok=True)
            if (descriptor := try_lock(path)) is not None:
                break
        except OSError as error:
            raise UsageError(f"--out {out}: {error.strerror}; choose another --out") from None
        if time.monotonic() >= deadline:
            raise UsageError(
                f"--out {out} is in use by {path.read_text() or 'another run'}: "
                "wait until it ends or choose another --out"
            )
        time.sleep(1)
    started = datetime.now().astimezone().isoformat(" ", "seconds")
    name = f"host {socket.gethostname()}, process {os.getpid()}, since {started}"
    with contextlib.suppress(OSError):  # disk full: leave the owner's name out
        os.ftruncate(descriptor, 0)
        os.write(descriptor, name.encode())
    try:
        yield
    finally:
        # Removed before it is released: then it is not yet another run's. If this folder was
        # renamed meanwhile, the lock there may be another's.
        if is_at(path, descriptor):
            path.unlink()
        os.close(descriptor)
        with contextlib.suppress(OSError):  # not empty
            for folder in new_folders:  # innermost first
                folder.rmdir()


@contextlib.contextmanager
def locked(out: Path, timeout: float) -> Iterator[None]:
    """Keep other runs out of the run folder. A collective: rank 0 holds the lock.

    A killed process keeps its lock until its last thread has ended, so rank 0 waits a moment. After
    a restart by torchrun it waits up to `timeout` seconds, since a shared file system may release
    the lock of a lost host late. Raises UsageError.
    """
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    patience = timeout if is_restart else 3.0
    with contextlib.ExitStack() as stack:
        dist.on_rank0(lambda: stack.enter_context(hold_lock(out, patience)))
        if is_restart and (out / "console.log").exists():  # errors before step 1 go there, too
            console.keep_transcript(out / "console.log")
        yield


# --------------------------------------------------------------------------------------------------
# Where a run begins


@dataclass(frozen=True)
class Origin:
    """What a start takes over from a checkpoint or from the starts before it in its run folder."""

    path: Path | None = None  # the checkpoint that --init_from or --resume stands for, if needed
    manifest: dict = field(default_factory=dict)  # of that, or of the latest in --out
    model: ModelConfig | None = None  # of --init_from or --resume; flags override its parts
    flags: dict = field(default_factory=dict)  # of the run so far: those that hold until given


def find_origin(config: Config) -> Origin:
    """Read what `settle` and `resume_point` need. Raises UsageError and CheckpointError.

    Once --out has a checkpoint, the model is that one's, and what --init_from or --resume named may
    be gone.
    """
    out = Path(config.out)
    starts = read_starts(out)
    manifest = None if config.eval_only else latest_manifest(out)
    path = None
    if manifest is None and (config.source or config.eval_only):
        path = find_source(config)
        manifest = checkpoint.read_manifest(path)
    if manifest is None:
        return Origin(flags=starts[-1]["config"] if starts else {})
    model = None
    if config.source or config.eval_only:
        size = checkpoint.total_bytes(manifest)
        model = read_model(path or checkpoint.list_checkpoints(out)[-1], manifest, size)
    flags = manifest.get("config") or {}
    if path is None and starts:
        flags = starts[-1]["config"]
    elif config.init_from and not config.eval_only:
        flags = {}  # a new run
    return Origin(path, manifest, model, flags)


def latest_manifest(out: Path) -> dict | None:
    """The newest manifest of a run that can be read: of its model any tells as much."""
    for path in reversed(checkpoint.list_checkpoints(out)):
        with contextlib.suppress(checkpoint.CheckpointError):
            return checkpoint.read_manifest(path)
    return None


def find_source(config: Config) -> Path:
    """The checkpoint that --init_from or --resume stands for, of a run its latest that verifies.

    With --eval_only its latest, by default of --out. Raises UsageError and CheckpointError.
    """
    if config.eval_only:
        return checkpoint.checkpoints_at(Path(config.source or config.out))[-1]
    try:
        return checkpoint.choose_checkpoint(Path(config.source), "train.py")
    except checkpoint.PathError as error:
        flag = "--init_from" if config.init_from else "--resume"
        raise UsageError(f"{flag}: {error}") from None


def settle(config: Config, origin: Origin) -> Config:
    """Fill in the flags whose values are the run's or its model's. Raises UsageError."""
    values = {}
    for f in dataclasses.fields(Config):
        if f.metadata["new_run"] is not None and getattr(config, f.name) is None:
            so_far = origin.flags.get(f.name)
            values[f.name] = f.metadata["new_run"] if so_far is None else so_far
    if config.eval_only:
        values |= to_evaluate(config, origin)
    if origin.model:
        config = fill_sizes(config, origin.model)
        # The rest of the model is the named size's, if any: --config RUN/config.json needs both.
        values["model"] = (origin.manifest.get("config") or {}).get("model", config.model)
    config = dataclasses.replace(config, **values)
    if not config.eval_only:
        check_min_lr(config)
    return config


def to_evaluate(config: Config, origin: Origin) -> dict:
    """Flags of --eval_only: the checkpoint, and by default its data, its dtype and batches."""
    saved = origin.manifest
    values = {"init_from": str(origin.path), "resume": "auto"}
    values["data"] = config.data or (saved.get("config") or {}).get("data") or BUILTIN
    if config.dtype == "auto":  # the manifest has what it was beside the config
        values["dtype"] = saved.get("dtype", "auto")
    values["micro_batch_size"] = config.micro_batch_size or saved.get("micro_batch_size")
    return values


@dataclass(frozen=True)
class ResumePoint:
    """A run begins after `step`, with the state of `checkpoint`; a new run with (0, None)."""

    step: int
    checkpoint: Path | None
    init_from: Path | None = None  # weights for a new run
    new_parameters: list[str] = field(default_factory=list)  # which init_from lacks
    changes: list[str] = field(default_factory=list)  # changed flags, as "--NAME OLD -> NEW"
    passed_over: list[str] = field(default_factory=list)  # newer checkpoints and their problems
    warnings: list[str] = field(default_factory=list)


def resume_key(path: Path, manifest: dict) -> dict:
    """What must not change within a run: model, optimizer, the data and its order."""
    try:
        return {
            **dataclasses.asdict(read_model(path, manifest)),
            "data": manifest["data"],
            "global_batch_size": manifest["config"]["global_batch_size"],
            "seed": manifest["config"]["seed"],
            "optimizer": manifest["config"].get("optimizer", Config.optimizer),
        }
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a checkpoint of train.py: its manifest.json lacks {error}"
        ) from None


def resume_point(
    config: Config, manifest: dict, origin: Origin, latest: Path | None, passed_over: list[str]
) -> ResumePoint:
    """Find where the run begins. Raises UsageError if it may not, CheckpointError for damage.

    `latest`, the latest valid checkpoint of --out, takes precedence over --resume PATH, so that the
    same command can be repeated. `passed_over` has the problems of newer ones.
    """
    out = Path(config.out)
    if config.resume == "never" and any(path.name != "lock" for path in out.glob("*")):
        raise UsageError(
            f"--out {out} is not empty, and --resume never would overwrite it: choose another --out"
        )
    if config.init_from:
        check_is_new(Path(config.init_from), out)
    if latest is None:
        check_nothing_is_lost(out, passed_over)
    elif config.continues:
        check_named(Path(config.continues), latest, out)
    resume_from = latest or (origin.path if config.continues else None)
    if resume_from is None:
        step = steps_without_checkpoint(config, manifest)
        if origin.path and step == 0:
            return begin_with_weights(origin, manifest)
        return ResumePoint(step, None)
    saved = checkpoint.read_manifest(resume_from)
    step = saved["step"]
    check_same_run(resume_from, saved, manifest)
    # A new folder must have steps left to train.
    if step > config.max_steps or (latest is None and step == config.max_steps):
        raise UsageError(
            f"{resume_from} is at step {step}, and --max_steps {config.max_steps} leaves nothing "
            "to train: raise --max_steps or choose another --out"
        )
    changes = check_changes(saved, manifest, step)
    return ResumePoint(step, resume_from, changes=changes, passed_over=passed_over)


def begin_with_weights(origin: Origin, manifest: dict) -> ResumePoint:
    """Begin a new run with the weights of a checkpoint. Raises UsageError and CheckpointError."""
    new = check_init(origin, manifest)
    warnings = [warning] if (warning := other_tokenizer(origin, manifest)) else []
    return ResumePoint(0, None, origin.path, new, warnings=warnings)


def evaluation_point(manifest: dict, origin: Origin) -> ResumePoint:
    """The weights that --eval_only evaluates. Raises UsageError and CheckpointError."""
    if problem := checkpoint.verify(origin.path):
        raise checkpoint.CheckpointError(f"{origin.path}: {problem}")
    point = begin_with_weights(origin, manifest)
    if point.new_parameters:
        raise UsageError(
            f"{origin.path} lacks {in_short(point.new_parameters)}: evaluate it with the code and "
            "flags that trained it"
        )
    return point


def check_is_new(init_from: Path, out: Path) -> None:
    """Refuse to begin a run in the run folder that --init_from names."""
    is_run = not (init_from / "manifest.json").is_file()
    if is_run and init_from.resolve() == out.resolve():
        raise UsageError(f"--init_from {init_from} is the run in --out {out}: choose another --out")


def check_nothing_is_lost(out: Path, passed_over: list[str]) -> None:
    """Refuse to begin at step 1 in a folder whose checkpoints are all damaged or gone."""
    for path in sorted(out.glob("checkpoints/step-*")):
        if path.name.removeprefix("step-").isdecimal():
            reason = passed_over[0] if passed_over else f"{path}: manifest.json is missing"
            raise checkpoint.CheckpointError(
                f"--out {out} has checkpoints, but none is valid ({reason}): restore one, or start "
                "over in another --out"
            )
    saved = [row for row in read_log(out / "metrics.jsonl") if row.get("event") == "checkpoint"]
    if saved:
        raise checkpoint.CheckpointError(
            f"--out {out} saved step {saved[-1].get('step')}, according to its metrics.jsonl, but "
            "has no checkpoint now: restore its checkpoints/, or start over in another --out"
        )


def check_named(named: Path, latest: Path, out: Path) -> None:
    """Check the checkpoint of --resume PATH against the latest one of --out. Raises UsageError."""
    is_of_this_run = named.resolve().parent == latest.resolve().parent
    if is_of_this_run and named.resolve() != latest.resolve():
        raise UsageError(
            f"--resume {named} is not the latest checkpoint of --out {out}: "
            "choose another --out to branch off"
        )


def check_same_run(path: Path, saved: dict, manifest: dict) -> None:
    before = resume_key(path, saved)
    now = resume_key(path, manifest)
    changed = []
    for key, value in now.items():
        if key != "data" and value != before[key]:
            changed.append(f"{key} was {before[key]} and is now {value}")
    if changed:
        raise UsageError(
            f"{path} cannot be continued: {', '.join(changed)}; "
            "change that back or choose another --out"
        )
    if now["data"] != before["data"]:
        folder = manifest["config"]["data"]
        old_folder = saved["config"].get("data")
        what = f"the data was {old_folder} and is now {folder}"
        if folder == old_folder:
            what = f"the tokens in {folder} have changed"
        raise UsageError(
            f"{path} cannot be continued: {what}; change that back, or begin a new run with its "
            f"weights: --init_from {path} and another --out"
        )


def check_init(origin: Origin, manifest: dict) -> list[str]:
    """Check that saved weights fit the model; return the parameters that the checkpoint lacks.

    Raises UsageError and CheckpointError.
    """
    path = origin.path
    now = ModelConfig.from_dict(manifest["model"])
    parameters = parameter_shapes(now)
    for key, before in dataclasses.asdict(read_model(path, origin.manifest)).items():
        value = manifest["model"].get(key, before)
        if key == "seq_len" or value == before:
            continue
        if key == "vocab_size":
            folder, tokens = manifest["config"]["data"], manifest.get("tokens_in_vocabulary", value)
            raise UsageError(
                f"{path} has vocab_size {before}, and the tokenizer of {folder} has {tokens} "
                "tokens: its weights do not fit"
            )
        if not adds_parameters(now, key, before):
            raise UsageError(
                f"{path} has {key} {before}, and this run has {value}: its weights do not fit"
            )
    saved = checkpoint.tensor_shapes(path)
    new = []
    for name, shape in parameters.items():
        saved_shape = saved.get(f"model.{name}")
        if saved_shape is None:
            new.append(name)
        elif saved_shape != shape:
            raise UsageError(
                f"{path} has {name} of shape {saved_shape}, and this run of {shape}: "
                "its weights do not fit"
            )
    return new


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        parameters = Transformer(model).named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in parameters}


def adds_parameters(model: ModelConfig, key: str, before) -> bool:
    """Whether a changed field of the model adds parameters to those it had with `before`."""
    try:
        less = parameter_shapes(dataclasses.replace(model, **{key: before}))
    except ValueError:  # its numbers do not fit together
        return False
    return parameter_shapes(model).keys() > less.keys()


def in_short(parameters: list[str]) -> str:
    """Such as "blocks.*.attention.q_norm.weight (4)"."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in parameters)
    return ", ".join(f"{name} ({n})" if "*" in name else name for name, n in counts.items())


def other_tokenizer(origin: Origin, manifest: dict) -> str | None:
    """What to say if the data has another tokenizer than the checkpoint, as far as is known."""
    known = []
    for one in (origin.manifest, manifest):
        known.append((one.get("tokenizer"), one.get("tokens_in_vocabulary")))
    (name, tokens), (new_name, new_tokens) = known
    if tokens in (None, new_tokens) and (name == new_name or None in (name, new_name)):
        return None
    return (
        f"the tokenizer of {manifest['config']['data']}, {new_name} with {new_tokens} tokens, is "
        f"not the checkpoint's, {name} with {tokens}"
    )


def check_complete(path: Path, state: dict) -> None:
    """Check that a checkpoint to continue from has all of `state`. Raises UsageError."""
    saved = checkpoint.tensor_shapes(path)
    missing = [name for name, _ in checkpoint.flatten(state) if name not in saved]
    if missing:
        raise UsageError(
            f"{path} cannot be continued by this code, which keeps more in a checkpoint: "
            f"{in_short(missing)}; use the code that wrote it, or begin a new run with its "
            f"weights: --init_from {path} and another --out"
        )


def steps_without_checkpoint(config: Config, manifest: dict) -> int:
    """Return the steps of a finished run with --checkpoint none in --out; 0 if there is none.

    Raises UsageError if the run is not finished: it cannot be continued.
    """
    out = Path(config.out)
    starts = read_starts(out)
    if not starts and (out / "config.json").exists():
        raise UsageError(f"--out {out} holds files that are not train.py's: choose another --out")
    steps = [row["step"] for row in read_log(out / "metrics.jsonl")] if starts else []
    if not steps or starts[-1]["config"]["checkpoint"] != "none":
        return 0
    if steps[-1] != config.max_steps:
        raise UsageError(
            f"--out {out} holds a run that saved no checkpoints and cannot be continued: "
            "choose another --out"
        )
    check_same_run(out, starts[-1], manifest)
    check_changes(starts[-1], manifest, steps[-1])
    return steps[-1]


# --------------------------------------------------------------------------------------------------
# Flags that changed between two starts


def resolved(config: Config, dtype: str) -> dict:
    """All flags, with computed defaults filled in; `config` has the model's sizes."""
    flags = dataclasses.asdict(config)
    return flags | {"lr": peak_lr(config), "warmup_steps": warmup_steps(config), "dtype": dtype}


def check_changes(saved: dict, manifest: dict, step: int) -> list[str]:
    """Return each flag that differs between two manifests, as text, after `step` updates.

    Raises UsageError for one that may change results, unless --allow_changes is given.
    """
    config = with_sizes(manifest["config"], manifest)
    now = resolved(config, manifest["dtype"])
    known, changes = {}, []
    for name, value in saved["config"].items():
        if name in now:
            known[name] = value
        else:
            changes.append(f"--{name} {value} -> unknown to this code")
    refused = list(changes)
    before_config = with_sizes(known, saved)  # with defaults for newer flags
    before = resolved(before_config, saved.get("dtype", before_config.dtype))
    for f in dataclasses.fields(Config):
        old, new = before[f.name], now[f.name]
        if new == old or f.metadata["resume"] == "not compared":
            continue
        changes.append(f"--{f.name} {old} -> {new}")
        if f.metadata["resume"] == "refused":
            refused.append(changes[-1])
        if f.name == "max_steps":
            changes[-1] += f": {new_schedule(before_config, config, step)}"
    if refused and not config.allow_changes:
        if step == config.max_steps:
            raise UsageError(
                f"{config.out} is finished, step {step} of {step}, with other flags "
                f"({', '.join(refused)}): choose another --out"
            )
        raise UsageError(
            f"{', '.join(refused)} would change the results of {config.out}: change that back, "
            "choose another --out, or give --allow_changes"
        )
    return changes


def with_sizes(flags: dict, manifest: dict) -> Config:
    """The flags of a manifest, with the sizes of its model, whether given or not."""
    sizes = {f.name: manifest["model"].get(f.name) for f in dataclasses.fields(Config)}
    return Config(**flags | {name: size for name, size in sizes.items() if size is not None})


def new_schedule(before: Config, now: Config, step: int) -> str:
    """How a changed --max_steps changes the learning rate."""
    old_lr = f"{lr_schedule(before)(step + 1):.2e}"
    new_lr = f"{lr_schedule(now)(step + 1):.2e}"
    ends = f"the {now.schedule} schedule ends at step {now.max_steps}"
    if new_lr == old_lr:
        return ends
    return f"{ends}; the learning rate of step {step + 1} is {new_lr}, not {old_lr}"


# --------------------------------------------------------------------------------------------------
# Starts


def read_starts(out: Path) -> list[dict]:
    rows = [row for _, row in read_lines(out / "starts.jsonl") if isinstance(row, dict)]
    rows = [row for row in rows if row.keys() >= {"time", "step", "config"}]
    return [row for row in rows if isinstance(row["config"], dict)]


def create(out: Path, manifest: dict, step: int, world_size: int, started: datetime) -> datetime:
    """Make `out` this run's folder and add this start; return the time of its first start.

    If starts.jsonl has been deleted, that is when the first row's step began.
    """
    logged = read_log(out / "metrics.jsonl")  # before the rows of lost steps are dropped
    start = {
        **manifest,
        "time": started.isoformat(),
        "last_logged": logged[-1]["time"] if logged else None,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "ranks": world_size,
        "step": step,
    }
    out.mkdir(parents=True, exist_ok=True)
    starts = [*read_starts(out), start]
    replace_file(out / "starts.jsonl", "".join(json.dumps(start) + "\n" for start in starts))
    replace_file(out / "config.json", json.dumps(manifest["config"], indent=2) + "\n")
    first = datetime.fromisoformat(starts[0]["time"])
    for row in logged[:1]:
        step_time = timedelta(seconds=row.get("step_time", 0))
        first = min(first, datetime.fromisoformat(row["time"]) - step_time)
    return first
