"""The live line, on pseudo-terminals."""

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from unittest import mock

from conftest import ROOT, TRAIN, call_train, flags, rows, start_process, wait_until

import checkpoint
from runtime import console


class Terminal:
    """A pseudo-terminal and what was written to it."""

    def __init__(self):
        self.near, self.far = pty.openpty()
        fcntl.ioctl(self.far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.written = ""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        with contextlib.suppress(OSError):  # the far end is closed
            while block := os.read(self.near, 1 << 16):
                self.written += block.decode()

    def start(self, *command) -> subprocess.Popen:
        options = dict.fromkeys(("stdin", "stdout", "stderr"), self.far)
        options |= {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        options["prepare"] = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        return start_process([sys.executable, *command], **options)

    def close(self) -> str:
        """Return the final screen."""
        os.close(self.far)
        self.reader.join(10)
        screen = re.sub(r"\r\x1b\[J", "\v", self.written).replace("\r\n", "\n")
        return re.sub(r"[^\n\v]*\r?\v", "", screen)

    def live_lines(self) -> list[str]:
        return re.findall(r"\r\x1b\[J([^\r\n]+)\r(?!\n)", self.written)


PRINTS = """
import sys, time
from runtime import cli, console
console.INTERVAL = 0.01
what, asked = "converting", 0

def doing():
    global asked
    asked += 1
    return what

def wait_until_drawn():
    enough = asked + 3
    while sys.stdout.isatty() and asked < enough:
        time.sleep(0.001)

with console.live(doing):
    print("a line")
    wait_until_drawn()
    print("a part", end="", flush=True)
    wait_until_drawn()
    print(" and the rest")
    what = "still converting"
    wait_until_drawn()
cli.report_error("prog", "the last line")
"""


def test_a_terminal_ends_with_the_very_lines_of_a_pipe():
    terminal = Terminal()
    process = terminal.start("-c", PRINTS)
    command = [sys.executable, "-uc", PRINTS]
    piped = subprocess.run(command, cwd=ROOT, stdout=-1, stderr=subprocess.STDOUT, text=True)
    assert process.wait(30) == piped.returncode == 0
    assert terminal.close() == piped.stdout
    assert piped.stdout == "a line\na part and the rest\nprog: error: the last line\n"
    shown = terminal.live_lines()
    assert shown[0] == "converting  0m00s" and shown[-1] == "still converting  0m00s"


def train_on_terminal(argv: list[str]) -> tuple[str, list[str]]:
    """train.py with a live line every millisecond."""
    terminal = Terminal()
    with (
        open(terminal.far, "w", closefd=False) as stdout,
        mock.patch.object(sys, "stdout", stdout),
        mock.patch.object(console, "INTERVAL", 0.001),
    ):
        assert call_train(argv) == 0
    return terminal.close(), terminal.live_lines()


def test_a_run_shows_what_it_does_on_rank_0(pool, tokens, tmp_path):
    argv = flags(f"--data {tokens} --max_steps 6 --out {tmp_path}/run --strategy ddp")
    (screen, shown), (nothing, never) = pool(2, train_on_terminal, argv)
    assert (nothing, never) == ("", [])
    doings = {re.sub(r"\d+", "N", line) for line in shown}
    assert {"before the first step  NmNs", "after step N, saving  NmNs"} <= doings
    assert screen.count("\nstep 6/6  100%  loss ") == 1 and "saving" not in screen


def test_a_closed_terminal_stops_the_run_which_saves(tokens, tmp_path):
    terminal = Terminal()
    argv = flags(f"--data {tokens} --max_steps 100000 --out {tmp_path}/run --strategy ddp")
    process = terminal.start(TRAIN, *argv)
    wait_until(lambda: "step      5/100000" in terminal.written, 60)
    os.close(terminal.far)
    os.close(terminal.near)
    assert process.wait(60) == 75
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["step"] == int(path.name.removeprefix("step-"))
