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
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import checkpoint
import dist
from config import BUILTIN, Config, lr_schedule, peak_lr, read_model, warmup_steps
from metrics import read_lines, read_log, replace_file
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
class ResumePoint:
    """A run begins after `step`, with the state of `checkpoint`; a new run with (0, None)."""

    step: int
    checkpoint: Path | None
    init_from: Path | None = None  # weights for a new run
    changes: list[str] = field(default_factory=list)  # changed flags, as "--NAME OLD -> NEW"
    passed_over: list[str] = field(default_factory=list)  # newer checkpoints and their problems


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
    config: Config, manifest: dict, latest: Path | None, passed_over: list[str]
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
    resume_from = latest
    if config.resume not in ("auto", "never"):
        check_named(Path(config.resume), latest, out)
        resume_from = latest or Path(config.resume)
    if resume_from is None:
        step = steps_without_checkpoint(config, manifest)
        init_from = None
        if config.init_from and step == 0:
            init_from = checkpoint.choose_checkpoint(Path(config.init_from), "train.py")
            check_init(init_from, manifest)
        return ResumePoint(step, None, init_from)
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


def to_evaluate(config: Config) -> Config:
    """The flags of --eval_only: the checkpoint as --init_from, by default its data and dtype.

    The checkpoint is the one that --init_from, --resume or --out names, or the latest in a run
    folder. Raises checkpoint.PathError and CheckpointError.
    """
    named = config.init_from
    if config.resume not in ("auto", "never"):
        named = config.resume
    path = checkpoint.checkpoints_at(Path(named or config.out))[-1]
    manifest = checkpoint.read_manifest(path)
    folder = config.data or (manifest.get("config") or {}).get("data") or BUILTIN
    dtype = config.dtype
    if dtype == "auto":  # the manifest has what it was beside the config
        dtype = manifest.get("dtype", "auto")
    return dataclasses.replace(config, init_from=str(path), data=folder, dtype=dtype)


def evaluation_point(config: Config, manifest: dict) -> ResumePoint:
    """The weights that --eval_only evaluates. Raises UsageError and CheckpointError."""
    path = Path(config.init_from)
    check_valid("--init_from", path)
    check_init(path, manifest)
    return ResumePoint(step=0, checkpoint=None, init_from=path)


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


def check_named(named: Path, latest: Path | None, out: Path) -> None:
    """Check the checkpoint of --resume PATH against the latest one of --out."""
    if latest is None:
        check_valid("--resume", named)
        return
    is_of_this_run = named.resolve().parent == latest.resolve().parent
    if is_of_this_run and named.resolve() != latest.resolve():
        raise UsageError(
            f"--resume {named} is not the latest checkpoint of --out {out}: "
            "choose another --out to branch off"
        )


def check_valid(flag: str, path: Path) -> None:
    if not (path / "manifest.json").is_file():
        raise UsageError(
            f"{flag} {path}: no checkpoint there; name one like runs/tiny/checkpoints/step-00000250"
        )
    if problem := checkpoint.verify(path):
        raise checkpoint.CheckpointError(f"{flag} {path}: {problem}")


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


def check_init(path: Path, manifest: dict) -> None:
    """Check that the weights of --init_from fit. Raises UsageError and CheckpointError."""
    saved = dataclasses.asdict(read_model(path, checkpoint.read_manifest(path)))
    for key, value in manifest["model"].items():
        if key != "seq_len" and saved[key] != value:
            raise UsageError(
                f"--init_from {path} has {key} {saved[key]}, and this run has {value}: "
                "its weights do not fit"
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
    """All flags, with computed defaults filled in."""
    flags = dataclasses.asdict(config)
    return flags | {"lr": peak_lr(config), "warmup_steps": warmup_steps(config), "dtype": dtype}


def check_changes(saved: dict, manifest: dict, step: int) -> list[str]:
    """Return each flag that differs between two manifests, as text, after `step` updates.

    Raises UsageError for one that may change results, unless --allow_changes is given.
    """
    config = Config(**manifest["config"])
    now = resolved(config, manifest["dtype"])
    known, changes = {}, []
    for name, value in saved["config"].items():
        if name in now:
            known[name] = value
        else:
            changes.append(f"--{name} {value} -> unknown to this code")
    refused = list(changes)
    before_config = Config(**known)  # with defaults for newer flags
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
