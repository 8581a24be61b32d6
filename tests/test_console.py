"""A terminal that is closed while a run trains in it."""

import contextlib
import fcntl
import os
import pty
import subprocess
import sys
import termios
import threading

from conftest import ROOT, TRAIN, flags, rows, wait_until

import checkpoint


class Terminal:
    """A pseudo-terminal, what was written to it, and a command in it."""

    def __init__(self, *command):
        self.near, self.far = pty.openpty()
        self.written = ""
        threading.Thread(target=self.read, daemon=True).start()
        self.process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=self.far,
            stdout=self.far,
            stderr=self.far,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )

    def read(self) -> None:
        with contextlib.suppress(OSError):  # the far end is closed
            while block := os.read(self.near, 1 << 16):
                self.written += block.decode()


def test_a_closed_terminal_stops_the_run_which_saves(tokens, tmp_path):
    argv = flags(f"--data {tokens} --max_steps 100000 --out {tmp_path}/run --strategy ddp")
    terminal = Terminal(TRAIN, *argv)
    wait_until(lambda: "step      5/100000" in terminal.written, 60)
    os.close(terminal.far)
    os.close(terminal.near)
    assert terminal.process.wait(60) == 75
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["step"] == int(path.name.removeprefix("step-"))
