"""A live line on a terminal, below all other output; and a copy of what a run prints."""

import functools
import io
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CLEAR = "\r\x1b[J"  # this line, and what a narrowed window wrapped of it
RED, DIM = 31, 2
INTERVAL = 1.0  # seconds between live lines
is_quiet = False  # --quiet

# Held while printing and while forking, so that the child's copy is free.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
shown: "LiveLine | None" = None
transcript: "Transcript | None" = None


def is_terminal(stream) -> bool:
    # None, as under redirect_stdout(None), discards output.
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, color: int, stream) -> str:
    """In color on a terminal, unless NO_COLOR is set (https://no-color.org)."""
    if not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{color}m{text}\x1b[0m"


def print_error(line: str) -> None:
    """Print "PROGRAM: error: ..." on stderr."""
    line = line.replace("error", paint("error", RED, sys.stderr), 1)
    if os.environ.get("RANK", "0") != "0" and is_terminal(sys.stderr):
        line = CLEAR + line  # the live line of rank 0
    print(line, file=sys.stderr, flush=True)


class Output:
    """In place of sys.stdout or sys.stderr, in a Transcript: nothing that it cannot print matters.

    Its reader, its terminal or the room on its disk may be gone.
    """

    def __init__(self, stream, transcript: "Transcript"):
        self.stream = stream  # None discards output
        self.transcript = transcript
        self.unfinished = ""  # a line

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with lock:
            lines, newline, self.unfinished = (self.unfinished + text).rpartition("\n")
            self.transcript.append(lines + newline)
            with suppress(OSError, ValueError):
                if self.stream:
                    self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if self.stream:
                self.stream.flush()

    def isatty(self) -> bool:
        return is_terminal(self.stream)


class Transcript:
    """A context that keeps what is printed in it: all lines go through `append`.

    Holds them in memory until `keep` names a file. The streams cannot raise meanwhile.
    """

    def __init__(self, heading: str = ""):
        self.file = io.BytesIO()
        self.append(heading)

    def append(self, lines: str) -> None:
        plain = re.sub(r"\r|\x1b\[[\d;]*[A-Za-z]", "", lines)
        with suppress(OSError, ValueError):  # the disk is full, or the context was left
            self.file.write(plain.encode(errors="backslashreplace"))

    def keep(self, path: Path) -> None:
        """Append everything to a file, to which other ranks may append as well."""
        if not isinstance(self.file, io.BytesIO):
            return  # to a file already
        with lock, suppress(OSError):
            # Unbuffered: the kernel has each line at once.
            file = open(path, "ab", buffering=0)  # noqa: SIM115
            file.write(self.file.getvalue())
            self.file = file

    def __enter__(self) -> "Transcript":
        global transcript
        transcript = self
        self.streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (Output(stream, self) for stream in self.streams)
        return self

    def __exit__(self, kind, error, trace) -> None:
        global transcript
        if isinstance(error, Exception):  # a bug: Python will print it
            self.append("".join(traceback.format_exception(error)))
        sys.stdout, sys.stderr = map(unless_broken, self.streams)
        transcript = None
        self.file.close()


def unless_broken(stream):
    """The stream, or None: Python would try to flush it at its exit, and end with status 120."""
    try:
        if stream:
            stream.flush()
        return stream
    except (OSError, ValueError):
        return None


def keep_transcript(path: Path) -> None:
    """From now on keep what this process prints, and has printed, at the end of a file."""
    if transcript:
        transcript.keep(path)


class Progress:
    """A task: its start, the share done, and the seconds it took last time."""

    def __init__(self, doing: str, expected: float = 0.0):
        self.doing = doing
        self.began = time.monotonic()
        self.expected = expected  # 0: unknown
        self.share = 0.0  # 0: unknown

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def __call__(self) -> str:
        """Such as "saving  0m12s, 0m03s left"."""
        seconds = self.seconds()
        left = (seconds / self.share if self.share else self.expected) - seconds
        return f"{self.doing}  {clock(seconds)}" + (f", {clock(left)} left" if left > 0 else "")


def clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}m{seconds:02}s"


class LiveLine:
    """The last line of a terminal. What this process prints goes above it."""

    def __init__(self, what: Callable[[], str]):
        self.what = what
        # Below a Transcript, which has no live lines
        stdout, stderr = (getattr(s, "stream", s) for s in (sys.stdout, sys.stderr))
        self.stdout = stdout
        self.is_shown = False
        self.is_in_line = False  # an unfinished line was printed
        self.streams = {s: s.write for s in (stdout, stderr) if is_terminal(s)}
        for stream, write in self.streams.items():
            stream.write = functools.partial(self.print_above, write)

    def show(self) -> None:
        with lock:
            if not self.is_in_line:
                width = os.get_terminal_size(self.stdout.fileno()).columns or 80
                text = paint(self.what()[: width - 1], DIM, self.stdout)
                # Put the cursor at the start, where text of other processes then begins.
                self.streams[self.stdout](f"{CLEAR}{text}\r")
                self.stdout.flush()
                self.is_shown = True

    def hide(self) -> None:
        if self.is_shown:
            self.is_shown = False
            with suppress(OSError):  # the terminal is gone
                self.streams[self.stdout](CLEAR)
                self.stdout.flush()

    def print_above(self, write: Callable[[str], int], text: str) -> int:
        with lock:
            self.hide()
            if text:
                self.is_in_line = not text.endswith("\n")
            return write(text)

    def remove(self) -> None:
        with lock:
            self.hide()
        for stream, write in self.streams.items():
            stream.write = write


@contextmanager
def live(what: Callable[[], str], plain_interval: float | None = None) -> Iterator:
    """Show what `what` returns, once a second while the block runs; yields `what`.

    If stdout is not a terminal, print it every `plain_interval` seconds instead, or never.
    """
    global shown
    interval = INTERVAL if is_terminal(sys.stdout) else plain_interval
    if is_quiet or interval is None:
        yield what
        return
    if is_terminal(sys.stdout):
        shown = LiveLine(what)
    ended = threading.Event()

    def repeat() -> None:
        with suppress(OSError):  # the pipe's reader or the terminal is gone
            while not ended.wait(interval):
                shown.show() if shown else print(f"{what()}\n", end="", flush=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield what
    finally:
        ended.set()
        thread.join()
        if shown:
            shown.remove()
            shown = None


def close() -> None:
    """Before os._exit: remove the live line, and let only this thread print."""
    lock.acquire()
    if shown:
        shown.hide()
