"""The contents of a run folder, and the lock for the one run that may write to it.

OUT/config.json      the flags that were typed, for this start or an earlier one
    starts.jsonl     one row per start: when, where, from which step, the resolved run
    metrics.jsonl    one row per log_interval, evaluation and checkpoint
    optim.jsonl      one row per parameter, with --optim_metrics_interval
    checkpoints/     see checkpoint.py
    profile/         with --profile
    wandb/           with --tracker wandb
    lock             exists while a run writes to the folder
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import checkpoint
import dist
from checkpoint import CheckpointError, PathError
from errors import RunError, UsageError
from metrics import device_name, read_lines, read_log, replace_file
from runtime.lock import is_at, try_lock


@dataclass(frozen=True)
class Lock:
    """OUT/lock, which this process holds."""

    path: Path
    descriptor: int  # of rank 0's open file

    def is_lost(self) -> bool:
        """Whether the folder was moved or removed: then another run may use its name."""
        return not is_at(self.path, self.descriptor)

    def raise_if_lost(self) -> None:
        """Raise RunError if the folder was moved or removed."""
        if self.is_lost():
            raise RunError(
                f"{self.path.parent} was moved or removed while the run trained. The run ends and "
                "writes nothing more, because another run may use this name. To continue this one, "
                "give its folder's new name to --out"
            )


@contextlib.contextmanager
def hold_lock(out: Path, timeout: float = 0.0) -> Iterator[Lock]:
    """Hold OUT/lock, so that only this run writes to OUT; the process's death releases it.

    Creates the folder if needed, and removes it again if the run writes nothing to it. Waits up to
    3 seconds for another run to end: a killed process keeps its lock until its last thread has
    ended. After a restart by torchrun, waits up to `timeout` seconds, since a shared file system
    may release the lock of a lost host late. Raises UsageError if another run keeps the lock.
    """
    path = out / "lock"
    is_restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    deadline = time.monotonic() + (timeout if is_restart else min(timeout, 3.0))
    while True:
        try:
            new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
            out.mkdir(parents=True, exist_ok=True)
            if (descriptor := try_lock(path)) is not None:
                break
        except OSError as error:
            why = error.strerror
            if isinstance(error, FileExistsError) and os.path.islink(error.filename):
                link = error.filename
                why = f"{link} is a link to {os.readlink(link)}, where there is no folder"
            raise UsageError(f"--out {out}: {why}; choose another --out") from None
        if time.monotonic() >= deadline:
            raise UsageError(
                f"--out {out} is in use by {path.read_text() or 'another run'}: "
                "wait until it ends or choose another --out"
            )
        time.sleep(1)
    name = f"host {socket.gethostname()}, process {os.getpid()}"
    with contextlib.suppress(OSError):  # disk full: leave the owner's name out
        os.ftruncate(descriptor, 0)
        os.write(descriptor, name.encode())
    try:
        yield Lock(path, descriptor)
    finally:
        # Remove the file before the lock is released: later it may be another run's lock. If this
        # folder was renamed meanwhile, a file at `path` belongs to another run: leave it.
        if is_at(path, descriptor):
            path.unlink()
        os.close(descriptor)
        with contextlib.suppress(OSError):  # not empty
            for folder in new_folders:  # innermost first
                folder.rmdir()


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint `path`, or all checkpoints of the run folder `path`, oldest first.

    Raises PathError if there are none.
    """
    found = checkpoint.list_checkpoints(path)
    if not found and (path / "manifest.json").is_file():
        found = [path]
    if not found:
        remedy = "name a run folder such as runs/tiny, or a checkpoint in one"
        raise PathError(f"{path} contains no checkpoint: {remedy}")
    return found


def newest_checkpoint(named: Path) -> Path:
    """Return the checkpoint `named`, or the newest one of the run `named`, after verifying it.

    Raises PathError, and CheckpointError if it is damaged.
    """
    path = checkpoints_at(named)[-1]
    if problem := checkpoint.verify(path):
        raise CheckpointError(f"{path}: {problem}; name another checkpoint")
    return path


def read_starts(out: Path) -> list[dict]:
    rows = [row for _, row in read_lines(out / "starts.jsonl") if isinstance(row, dict)]
    rows = [row for row in rows if row.keys() >= {"time", "step", "config"}]
    return [row for row in rows if isinstance(row["config"], dict)]


def record_start(
    out: Path, manifest: dict, world: dist.World, step: int, started: datetime
) -> None:
    """Write config.json and a row of starts.jsonl for this start, which follows step `step`."""
    logged = read_log(out / "metrics.jsonl")  # before the rows of lost steps are dropped
    start = {
        **manifest,
        "time": started.isoformat(),
        "last_logged": logged[-1]["time"] if logged else None,
        "host": socket.gethostname(),
        "ranks": world.size,
        "ranks_per_host": world.local_size,
        "device": device_name(world.device),
        "step": step,
    }
    out.mkdir(parents=True, exist_ok=True)
    starts = [*read_starts(out), start]
    replace_file(out / "starts.jsonl", "".join(json.dumps(start) + "\n" for start in starts))
    replace_file(out / "config.json", json.dumps(manifest["flags"], indent=2) + "\n")
