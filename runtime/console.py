"""The live line of a terminal: what goes on, and since when."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress

CLEAR = "\r\x1b[J"  # erases the line, and the lines onto which a narrowed window wrapped it
INTERVAL = 1.0  # seconds between live lines


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
    if not sys.stdout.isatty():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=redraw, args=(what, sys.stdout.fileno(), ended), daemon=True)
    thread.start()
    try:
        with redirect_stdout(Lines(sys.stdout)):
            yield
    finally:
        ended.set()
        thread.join()


def redraw(what: Callable[[], str], terminal: int, ended: threading.Event) -> None:
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
