"""What every command shares: a parser and its errors, errors in one line, a lock.

Only the standard library is imported, so that prepare.py starts without loading torch.
"""

import argparse
import contextlib
import errno
import fcntl
import importlib
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn


class UsageError(ValueError):
    """Flags conflict with each other or with what is on disk."""

    exit_status = 2


def import_extra(name: str, flag: str) -> ModuleType:
    """Import extras/NAME.py, which `flag` needs. Raises UsageError if it cannot be imported."""
    try:
        return importlib.import_module(f"extras.{name}")
    except ImportError as error:
        raise UsageError(f"{flag} needs extras/{name}.py: {error}") from None


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises a UsageError in one line, where argparse prints and exits."""

    def __init__(self, **options):
        keeps_lines = argparse.RawDescriptionHelpFormatter  # of descriptions, often docstrings
        super().__init__(allow_abbrev=False, formatter_class=keeps_lines, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help lists the flags)")


def number(kind: type, least: float, below: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type: an int or float in least <= value < below."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < below:  # also rejects nan
            raise argparse.ArgumentTypeError(f"{text} must be at least {least} and below {below}")
        return value

    parse.__name__ = kind.__name__  # argparse prints "invalid int value"
    return parse


def execute(program: str, command: Callable, *arguments) -> int:
    """Call the command and return the exit status: its result, or the status of its error.

    An expected error is printed in one line. Such an error has an `exit_status` (UsageError: 2), or
    is the system's, a missing package, or too little memory. Others are bugs and propagate.
    """
    try:
        return command(*arguments) or 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = str(error).partition("\n")[0]
        if "out of memory" in message or "allocate memory" in message:  # CUDA's and the CPU's
            message += "; lower --micro_batch_size, or shard with --strategy fsdp: see tools.plan"
        elif isinstance(error, ModuleNotFoundError):
            message += f": pip install {error.name}"
        elif not hasattr(error, "exit_status") and not isinstance(error, OSError):
            raise
        if os.environ.get("RANK", "0") != "0":
            time.sleep(3)  # if all ranks fail, rank 0 prints the error, and torchrun ends the rest
        print(f"{program}: error: {message}", file=sys.stderr, flush=True)
        return getattr(error, "exit_status", 1)


@contextlib.contextmanager
def hold_lock(path: Path, wait: float = 0.0) -> Iterator[None]:
    """A context in which only this process holds the file `path`, which it creates.

    The kernel frees it when the process ends, even by kill -9, on NFS and Lustre as well. In the
    end the file is removed, and its folder if nothing else is there. Raises UsageError if another
    process holds it for more than `wait` seconds: a killed one does, until its last thread ends.
    """
    deadline = time.monotonic() + wait
    try:
        while (descriptor := try_lock(path)) is None:
            if time.monotonic() >= deadline:
                raise UsageError(f"{path} is held by another process: wait until it ends")
            time.sleep(0.5)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()
        os.close(descriptor)


def try_lock(path: Path) -> int | None:
    """Create and lock a file; return its descriptor, or None if another process holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The last owner may have removed this file, and another process created a new one.
        is_held = not path.exists() or not os.path.samestat(os.stat(descriptor), path.stat())
    except (BlockingIOError, PermissionError):
        is_held = True
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(f"{path}: {error.strerror}, so start no second run there")
        is_held = False
    if not is_held:
        return descriptor
    os.close(descriptor)
    return None
