"""The live line on pseudo-terminals, and a run whose output nobody takes."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from unittest import mock

import pytest
from conftest import ROOT, TRAIN, call_train, flags, rows, wait_until

import checkpoint
from runtime import console, watchdog

RED = re.compile(r"\x1b\[\d+m")


def control_by_terminal() -> None:
    """In a new process: Ctrl-C sends a signal, not ignored as in a background job."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A pseudo-terminal and its commands."""

    def __init__(self, columns: int = 80):
        self.near, self.far = pty.openpty()
        self.resize(columns)
        self.written = ""
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.far, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> None:
        with contextlib.suppress(OSError):  # the far end is closed
            while block := os.read(self.near, 1 << 16):
                self.written += block.decode()

    def start(self, *command, **environment) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=self.far,
            stdout=self.far,
            stderr=self.far,
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"} | environment,
            start_new_session=True,
            preexec_fn=control_by_terminal,
        )

    def close(self) -> str:
        """Return the final screen."""
        os.close(self.far)
        self.reader.join(10)
        lines, column = [""], 0
        for part in re.split(r"(\r\n|\r|\x1b\[J)", RED.sub("", self.written)):
            if part == "\x1b[J":
                lines[-1] = lines[-1][:column]
            elif part == "\r\n":
                lines.append("")
            elif part != "\r":
                end = column + len(part)
                lines[-1] = lines[-1][:column] + part + lines[-1][end:]
            column = 0 if part[:1] == "\r" else column + len(part) * (part != "\x1b[J")
        return "\n".join(lines)


def live_lines(written: str) -> list[str]:
    """The successive texts of the live line."""
    return re.findall(r"\r\x1b\[J([^\r\n]+)\r(?!\n)", RED.sub("", written))


BEGINNING = """
import sys, time, warnings
from runtime import cli, console
console.INTERVAL = 0.01
what = "converting"
"""
PRINTS = f"""{BEGINNING}
with console.live(lambda: what):
    time.sleep(0.05)
    print("a line")
    time.sleep(0.05)
    print("a part", end="", flush=True)
    time.sleep(0.05)
    print(" and the rest")
    what = "still converting"
    time.sleep(0.3)
    warnings.warn("a warning")
    time.sleep(0.05)
    print("an error", file=sys.stderr)
    time.sleep(0.05)
console.print_error("prog: error: the last line")
"""


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_ends_with_the_very_lines_of_a_pipe(environment):
    terminal = Terminal()
    process = terminal.start("-c", PRINTS, **environment)
    command = [sys.executable, "-uc", PRINTS]
    piped = subprocess.run(command, cwd=ROOT, stdout=-1, stderr=subprocess.STDOUT, text=True)
    assert process.wait(30) == piped.returncode == 0
    assert terminal.close() == piped.stdout
    assert "converting" not in piped.stdout and "\x1b" not in piped.stdout
    is_shown = any(line.startswith("still") for line in live_lines(terminal.written))
    assert is_shown == ("TERM" not in environment)
    assert bool(RED.search(terminal.written)) == (not environment)


def test_a_live_line_says_since_when_within_the_window_until_ctrl_c():
    code = f"""{BEGINNING}
clock = iter([0.0, 0.4, 59.7, 3600.0])
time.monotonic = lambda: next(clock, 3600.0)
def command():
    with console.live(lambda: what):
        time.sleep(60)
sys.exit(cli.execute("prog", command))
"""
    terminal = Terminal(columns=30)
    process = terminal.start("-c", code)
    wait_until(lambda: "converting  60m00s" in live_lines(terminal.written), 30)
    terminal.resize(12)
    wait_until(lambda: live_lines(terminal.written)[-1] == "converting ", 30)
    os.write(terminal.near, b"\x03")
    assert process.wait(30) == 130
    shown = list(dict.fromkeys(live_lines(terminal.written)))
    assert shown == ["converting  0m00s", "converting  1m00s", "converting  60m00s", "converting "]
    assert terminal.close() == ""


def train_on_terminal(argv: list[str]) -> tuple[str, list[str]]:
    """train.py with a live line every 5 ms, in a run that spends 30 ms in every place."""
    terminal = Terminal()
    report_progress = watchdog.Watchdog.progress

    def progress(*arguments, **more) -> None:
        report_progress(*arguments, **more)
        time.sleep(0.03)

    with (
        open(terminal.far, "w", closefd=False) as stdout,
        mock.patch.object(sys, "stdout", stdout),
        mock.patch.object(console, "INTERVAL", 0.005),
        mock.patch.object(watchdog.Watchdog, "progress", progress),
        mock.patch.dict(os.environ, {"TERM": "xterm"}),
    ):
        assert call_train(argv) == 0
    return terminal.close(), live_lines(terminal.written)


def test_a_run_shows_what_it_does_and_how_much_is_done(pool, tokens, tmp_path):
    text = f"--data {tokens} --max_steps 6 --eval_interval 3 --save_interval 3"
    argv = flags(f"{text} --out {tmp_path}/run --strategy ddp")
    (screen, shown), (nothing, never) = pool(2, train_on_terminal, argv)
    assert (nothing, never) == ("", [])  # rank 1
    for pattern in (
        "  0%  after step 0, (reading data|computing)  0m00s",
        " 67%  after step 4, (reading data|computing)  0m00s",
        " 50%  after step 3, evaluating  0m00s",
        "100%  after step 6, saving  0m00s",
    ):
        assert any(re.fullmatch(pattern, line) for line in shown), pattern
    assert screen.count("\nstep 6/6  100%  loss ") == 1
    assert "saving" not in screen and "computing" not in screen
    ((screen, shown),) = pool(1, train_on_terminal, [*argv, "--max_steps", "7", "--quiet"])
    assert shown == []
    assert "model   tiny" in screen and "goodput" in screen and "step 7/7" not in screen


# --------------------------------------------------------------------------------------------------
# A console that is gone


@pytest.mark.parametrize("kind", ["a full disk", "a closed pipe"])
def test_a_run_goes_on_when_nobody_takes_what_it_prints(tokens, tmp_path, kind):
    reader, stream = os.pipe()
    os.close(reader)
    if kind == "a full disk":
        stream = os.open("/dev/full", os.O_WRONLY)
    argv = flags(f"--data {tokens} --max_steps 2 --out {tmp_path}/run")
    command = [sys.executable, TRAIN, *argv]
    assert subprocess.run(command, stdout=stream, stderr=stream).returncode == 0
    os.close(stream)
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]
    assert len(checkpoint.list_checkpoints(tmp_path / "run")) == 1


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


def test_a_run_under_nohup_outlives_its_terminal(pool, tokens, tmp_path):
    argv = flags(f"--data {tokens} --max_steps 1 --out {tmp_path}/run")
    assert pool(1, train_under_nohup, argv) == [True]


def train_under_nohup(argv: list[str]) -> bool:
    """Whether train.py has left SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert call_train(argv) == 0
    return signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
