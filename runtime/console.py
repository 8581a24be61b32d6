"""Errors in color, and the live line of a terminal: what goes on, and for how long."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

CLEAR = "\r\x1b[J"  # this line, and what a narrowed window wrapped of it
RED, PLAIN = "\x1b[31m", "\x1b[0m"
INTERVAL = 1.0  # seconds between live lines
is_quiet = False  # --quiet
ended = threading.Event()  # set it before os._exit: removes the live line


def is_terminal(stream) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def print_error(line: str) -> None:
    """Print "PROGRAM: error: ..." on stderr, if that still takes it."""
    if is_terminal(sys.stderr):
        if not os.environ.get("NO_COLOR"):  # see https://no-color.org
            line = line.replace("error", f"{RED}error{PLAIN}", 1)
        line = CLEAR + line  # perhaps the live line of another rank
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class Lines:
    """In place of a terminal's stream: prints whole lines, each in place of the live line."""

    def __init__(self, stream):
        self.stream = stream
        self.unfinished = ""

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        lines, newline, self.unfinished = (self.unfinished + text).rpartition("\n")
        if newline:
            self.stream.write(f"{CLEAR}{lines}\n")


@contextmanager
def live(what: Callable[[], str]) -> Iterator[None]:
    """On a terminal, show what `what` returns below other output while the block runs."""
    if is_quiet or not is_terminal(sys.stdout):
        yield
        return
    streams = sys.stdout, sys.stderr
    ended.clear()
    thread = threading.Thread(target=redraw, args=(what, sys.stdout.fileno()), daemon=True)
    thread.start()
    try:
        sys.stdout, sys.stderr = (Lines(each) if is_terminal(each) else each for each in streams)
        yield
    finally:
        ended.set()
        thread.join()
        sys.stdout, sys.stderr = streams


def redraw(what: Callable[[], str], terminal: int) -> None:
    """Draw the live line in every INTERVAL, in one write, which needs no lock."""
    text, began = what(), time.monotonic()
    with suppress(OSError):  # the terminal is gone
        while not ended.wait(INTERVAL):
            if what() != text:
                text, began = what(), time.monotonic()
            minutes, seconds = divmod(round(time.monotonic() - began), 60)
            width = os.get_terminal_size(terminal).columns - 1
            line = f"{text}  {minutes}m{seconds:02}s"[:width]
            os.write(terminal, f"{CLEAR}{line}\r".encode())  # other processes print over it
        os.write(terminal, CLEAR.encode())
