"""What a run prints: a copy of it, whatever becomes of the console; a live line on a terminal."""

import io
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

CLEAR = "\r\x1b[J"  # this line, and what a narrowed window wrapped of it
RED, DIM = 31, 2
INTERVAL = 1.0  # seconds between live lines
is_quiet = False  # --quiet

# Held while printing and while forking, so that the child's copy is free.
lock = threading.RLock()
os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
transcript: "Transcript | None" = None
terminal = None  # the stream that shows a live line at present


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
            hide()
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


# --------------------------------------------------------------------------------------------------
# The live line


class Progress:
    """What goes on, and the share of it that is done: a call returns such as "exporting  45%"."""

    def __init__(self, doing: str):
        self.doing = doing
        self.share = 0.0  # 0: unknown

    def report(self, share: float) -> None:
        self.share = share

    def __call__(self) -> str:
        return f"{self.doing}  {self.share:.0%}" if self.share else self.doing


@contextmanager
def live(what: Callable[[], str]) -> Iterator:
    """Show what `what` returns, and since when, below all other output while the block runs.

    On a terminal only; yields `what`.
    """
    if is_quiet or not is_terminal(sys.stdout):
        yield what
        return
    ended = threading.Event()
    thread = threading.Thread(target=redraw, args=(what, ended), daemon=True)
    with nullcontext() if transcript else Transcript():  # its Outputs hide the line as they print
        thread.start()
        try:
            yield what
        finally:
            ended.set()
            thread.join()
            hide()


def redraw(what: Callable[[], str], ended: threading.Event) -> None:
    """Draw the live line in every INTERVAL."""
    global terminal
    outputs = sys.stdout, sys.stderr
    text, began = what(), time.monotonic()
    while not ended.wait(INTERVAL):
        if what() != text:
            text, began = what(), time.monotonic()
        minutes, seconds = divmod(round(time.monotonic() - began), 60)
        line = f"{text}  {minutes}m{seconds:02}s" if minutes or seconds else text
        with lock, suppress(OSError):  # the terminal is gone
            if any(output.unfinished for output in outputs):
                continue  # part of a line was printed
            terminal = outputs[0].stream
            width = os.get_terminal_size(terminal.fileno()).columns or 80
            # Put the cursor at the start, where text of other processes then begins.
            terminal.write(f"{CLEAR}{paint(line[: width - 1], DIM, terminal)}\r")
            terminal.flush()


def hide() -> None:
    """Remove the live line: call it with the lock held, or when nothing draws it."""
    global terminal
    shown, terminal = terminal, None
    with suppress(OSError):
        if shown:
            shown.write(CLEAR)
            shown.flush()


def close() -> None:
    """Before os._exit: remove the live line, and let only this thread print."""
    lock.acquire()
    hide()
