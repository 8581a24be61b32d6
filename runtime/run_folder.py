"""The contents of a run folder, and who may write it.

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
import json
import os
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import checkpoint
import dist
from metrics import device_name, read_lines, read_log, replace_file
from runtime import console
from runtime.cli import RunError, UsageError
from runtime.lock import is_at, try_lock


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
    now = datetime.now().astimezone().isoformat(" ", "seconds")
    name = f"host {socket.gethostname()}, process {os.getpid()}, since {now}"
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


def read_starts(out: Path) -> list[dict]:
    rows = [row for _, row in read_lines(out / "starts.jsonl") if isinstance(row, dict)]
    rows = [row for row in rows if row.keys() >= {"time", "step", "config"}]
    return [row for row in rows if isinstance(row["config"], dict)]


def create(
    out: Path, manifest: dict, strategy: str, world: dist.World, step: int, started: datetime
) -> datetime:
    """Make `out` this run's folder and add this start; return the time of its first start."""
    logged = read_log(out / "metrics.jsonl")  # before the rows of lost steps are dropped
    start = {
        **manifest,
        "time": started.isoformat(),
        "last_logged": logged[-1]["time"] if logged else None,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "ranks": world.size,
        "ranks_per_host": world.local_size,
        "device": device_name(world.device),
        "strategy": strategy,
        "step": step,
    }
    out.mkdir(parents=True, exist_ok=True)
    starts = [*read_starts(out), start]
    replace_file(out / "starts.jsonl", "".join(json.dumps(start) + "\n" for start in starts))
    replace_file(out / "config.json", json.dumps(manifest["config"], indent=2) + "\n")
    return datetime.fromisoformat(starts[0]["time"])


def check_is_there(out: Path, is_gone: bool, c, step: int) -> None:
    """Raises RunError if the log found no run folder: it was renamed or removed."""
    if is_gone:
        saved = ""
        if c.checkpoint != "none":
            path = checkpoint.step_path(out, step)
            saved = f"; {path} is new: move it into the run's checkpoints/, and continue there"
        raise RunError(f"{out} was renamed or removed while the run wrote there{saved}")
