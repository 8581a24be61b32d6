"""What every command shares: errors that end it in one line, a parser that raises them, a lock.

Only the standard library is imported, so that prepare.py starts without loading torch.
"""

import argparse
import contextlib
import errno
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

VERSION = "0.1.0"


class UsageError(ValueError):
    """Flags conflict with each other or with what is on disk."""

    exit_status = 2


class RunError(RuntimeError):
    """A run-time error with a known remedy, such as too little memory."""

    exit_status = 1


def number(kind: type, least: float, below: float = math.inf) -> Callable[[str], float]:
    """An argparse type: an int or float in least <= value < below."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < below:  # also rejects nan
            upper = "finite" if below == math.inf else f"below {below}"
            raise argparse.ArgumentTypeError(f"{value} must be at least {least} and {upper}")
        return value

    parse.__name__ = kind.__name__  # argparse prints "invalid int value"
    return parse


positive_number = number(float, 1e-12)


def need_extra(name: str, flag: str) -> None:
    """Raise UsageError if extras/NAME.py, without which `flag` cannot work, was deleted."""
    if not Path(__file__).with_name("extras").joinpath(f"{name}.py").exists():
        raise UsageError(f"{flag} needs extras/{name}.py")


def plural(count: int, noun: str) -> str:
    """Return "2 lines (broken)" for 2 and "line (broken)"."""
    word, bracket, note = noun.partition(" (")
    ending = "" if count == 1 else "s"
    return f"{count:,} {word}{ending}{bracket}{note}"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with --version, which raises errors as a one-line UsageError."""

    def __init__(self, **options):
        keeps_lines = argparse.RawDescriptionHelpFormatter  # of descriptions, often docstrings
        super().__init__(allow_abbrev=False, formatter_class=keeps_lines, **options)
        text = f"nanoshard {VERSION}, torch {version('torch')}"
        self.add_argument("--version", action="version", version=text)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; argparse would print many lines of usage and exit."""
        raise UsageError(f"{message} ({self.prog} --help lists the flags)")


def set_torch_variables() -> None:
    """Set the environment variables that torch reads when it is imported, unless a user has."""
    # They silence the profiler's log and C++ warnings about failed collectives, which are less
    # informative than the line that ends the run.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # FSDP allocates on four streams, which share no blocks: expandable segments leave no gaps.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def report_error(program: str, message: str, where: str = "", began: float | None = None) -> None:
    """Print an error in one line, if stderr is still open, and add it to torchrun's report."""
    line = f"{program}: error{where}: {message}"
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    write_root_cause(line, began)


def write_root_cause(line: str, began: float | None = None) -> None:
    """Write why this rank ends to the file from which torchrun reports its "Root Cause".

    The file has the format of torch.distributed.elastic's ErrorHandler, without a traceback.
    torchrun reports the failure with the earliest `began`, in seconds since the epoch (default:
    now), as the root cause.
    """
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": line, "extraInfo": {"timestamp": str(int(began or time.time()))}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": message}))


def report_stop(line: str) -> int:
    """Print on rank 0 that a run has stopped early, as it was asked to; return the exit status."""
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):
            print(line, flush=True)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun's report on each host shows it once
        write_root_cause(line)
    # Status 75 (EX_TEMPFAIL) asks a scheduler to start the run again. With --max-restarts, torchrun
    # would restart a failed run at once: then return 0.
    will_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    return 0 if will_restart else os.EX_TEMPFAIL


def execute(program: str, command: Callable, *arguments) -> int:
    """Call the command and return the exit status: its result, or the status of its error.

    If `explain` knows the error, prints one line and returns the error's `exit_status` (UsageError:
    2, RunError: 1), by default 1. Returns 130 after Ctrl-C or a closed pipe. Other exceptions are
    bugs and propagate.
    """
    if hasattr(sys.stdout, "reconfigure"):
        # Print \u1234 for a character that is not in the encoding, for example in ASCII.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command(*arguments) or 0
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    except Exception as error:
        if (message := explain(error)) is None:
            raise
        report_error_once(program, message)
        return getattr(error, "exit_status", 1)


def report_error_once(program: str, message: str) -> None:
    """Report an error from one rank only, even if all ranks fail with it.

    If all ranks fail, rank 0 reports it, and torchrun ends the other ranks as soon as rank 0 exits.
    Any other rank that is still alive after 3 s has failed alone and reports it.
    """
    rank = int(os.environ.get("RANK", 0))
    began = time.time()  # before other ranks end, so that torchrun reports this rank as the cause
    if rank > 0:
        time.sleep(3)
    report_error(program, message, f" on rank {rank}" if rank else "", began)


# In torch's messages for too little memory. Only CUDA's error has its own class. Errors of the CPU
# are plain RuntimeErrors, which only their texts distinguish from bugs.
OUT_OF_MEMORY = ("out of memory", "allocate memory", "calculation overflowed")  # CUDA, CPU, both


def explain(error: Exception) -> str | None:
    """Return one line for an expected error, or None for a bug, whose traceback helps.

    Expected errors are this project's, the system's (OSError) and too little memory.
    """
    if hasattr(error, "exit_status") or isinstance(error, OSError):
        return str(error)
    first_line = str(error).partition("\n")[0]
    if isinstance(error, MemoryError):
        first_line = "out of memory"
    is_memory = any(text in first_line for text in OUT_OF_MEMORY)
    if is_memory and isinstance(error, RuntimeError | MemoryError):
        need = first_line.rpartition("DefaultCPUAllocator: ")[2].rstrip(".")
        return f"{need}; lower --micro_batch_size, or shard with --strategy fsdp: see tools.plan"
    return None


# --------------------------------------------------------------------------------------------------
# A lock that only one process holds


def try_lock(path: Path) -> int | None:
    """Create and lock the file `path`; return its open descriptor, or None if it is locked.

    A POSIX record lock: the kernel releases it when its process ends, even by kill -9. Unlike
    a flock lock, it is not inherited by child processes, which may outlive their parent (for
    example compilers). It works between hosts on NFS and Lustre. Closing any descriptor
    of the file releases it. If the file system does not support locks, warns and continues.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            return None
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        print(f"{path}: no locks on this file system: do not start another run there")
    # The last owner may have removed or renamed the file since this process opened it.
    if is_at(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def is_at(path: Path, descriptor: int) -> bool:
    """Whether `path` refers to the open file `descriptor`."""
    return path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
