"""The live line on pseudo-terminals, and what replaces it in a file."""

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
from runtime import console, consolidate, watchdog

COLOR = re.compile(r"\x1b\[\d+m")


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
        try:
            while block := os.read(self.near, 1 << 16):
                self.written += block.decode()
        except OSError:  # the far end is closed
            return

    def start(self, *command, **environment) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=self.far,
            stdout=self.far,
            stderr=self.far,
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm"} | environment,
            start_new_session=True,
            preexec_fn=control_by_terminal,
        )

    def close(self) -> str:
        """Return the final screen."""
        os.close(self.far)
        self.reader.join(10)
        lines, column = [""], 0
        for part in re.split(r"(\r\n|\r|\x1b\[J)", COLOR.sub("", self.written)):
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
    return re.findall(r"\r\x1b\[J([^\r\n]+)\r(?!\n)", COLOR.sub("", written))


BEGINNING = """
import sys, time, warnings
from runtime import console
console.INTERVAL = 0.01
progress = console.Progress("converting")
"""
PRINTS = f"""{BEGINNING}
with console.live(progress):
    time.sleep(0.05)
    print("a line")
    time.sleep(0.05)
    print("a part", end="", flush=True)
    time.sleep(0.05)
    print(" and the rest")
    print("", end="")
    progress.doing = "still converting"
    time.sleep(0.3)
    progress.doing = "converting"
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
    assert bool(COLOR.search(terminal.written)) == (not environment)


def test_a_live_line_is_no_wider_than_the_window(tmp_path):
    code = f"""{BEGINNING}
progress.doing = "converting" + 100 * "."
with console.live(progress):
    input()
"""
    terminal = Terminal(columns=30)
    process = terminal.start("-c", code)
    wait_until(lambda: live_lines(terminal.written), 30)
    terminal.resize(12)
    wait_until(lambda: live_lines(terminal.written)[-1] == "converting.", 30)
    os.write(terminal.near, b"\n")
    assert process.wait(30) == 0
    assert live_lines(terminal.written)[0] == "converting" + 19 * "."
    terminal.close()


def test_a_live_line_says_which_share_is_done_or_since_when_the_rest_is_the_same():
    code = f"""{BEGINNING}
clock = iter([0.0, 0.4, 59.7, 3600.0])
time.monotonic = lambda: next(clock, 3600.0)
with console.live(progress):
    time.sleep(0.1)
    progress.report(0.25)
    time.sleep(0.1)
"""
    terminal = Terminal()
    assert terminal.start("-c", code).wait(30) == 0
    terminal.close()
    shown = dict.fromkeys(live_lines(terminal.written))
    times = ["", "  1m00s", "  60m00s"]
    assert list(shown) == [*(f"converting{time}" for time in times), "converting  25%"]


def test_ctrl_c_leaves_a_clean_line():
    code = f"""{BEGINNING}
from runtime import cli
def command():
    with console.live(progress):
        time.sleep(60)
sys.exit(cli.execute("prog", command))
"""
    terminal = Terminal()
    process = terminal.start("-c", code)
    wait_until(lambda: live_lines(terminal.written), 30)
    os.write(terminal.near, b"\x03")
    assert process.wait(30) == 130
    assert terminal.close() == ""


PREPARE = """
import sys
from runtime import console
console.INTERVAL = 0.01
import prepare
sys.exit(prepare.main(sys.argv[1:]))
"""


def test_prepare_shows_its_rate_on_a_terminal(tmp_path):
    (tmp_path / "a.txt").write_text("words and words\n" * 400_000)
    terminal = Terminal()
    process = terminal.start("-c", PREPARE, "--source", tmp_path / "a.txt", "--out", tmp_path / "t")
    assert process.wait(30) == 0
    shown = live_lines(terminal.written)
    assert any(re.match(r"tokenizing: [\d.]+ MB of text, .* MB/s, \d+%", line) for line in shown)
    assert "tokenizing" not in terminal.close()


def train_on_terminal(argv: list[str]) -> tuple[str, list[str]]:
    """train.py with a live line every 5 ms, in a run that spends 30 ms in every place."""
    terminal = Terminal()
    report_progress = watchdog.Watchdog.progress
    replace_shards = consolidate.replace_shards

    def progress(*arguments, **more) -> None:
        report_progress(*arguments, **more)
        time.sleep(0.03)

    def replace_slowly(path, report) -> bool:
        return replace_shards(path, lambda share: (report(share), time.sleep(0.01)))

    with (
        open(terminal.far, "w", closefd=False) as stdout,
        mock.patch.object(sys, "stdout", stdout),
        mock.patch.object(console, "INTERVAL", 0.005),
        mock.patch.object(watchdog.Watchdog, "progress", progress),
        mock.patch.object(consolidate, "replace_shards", replace_slowly),
        mock.patch.dict(os.environ, {"TERM": "xterm"}),
    ):
        assert call_train(argv) == 0
    return terminal.close(), live_lines(terminal.written)


def test_a_run_shows_what_it_does_and_how_much_is_done(pool, tokens, tmp_path):
    text = f"--data {tokens} --max_steps 6 --eval_interval 3 --save_interval 3 --checkpoint full"
    ranks = pool(2, train_on_terminal, flags(f"{text} --out {tmp_path}/run --strategy ddp"))
    (screen, shown), (nothing, never) = ranks
    assert (nothing, never) == ("", [])  # rank 1
    for pattern in (
        "  0%  after step 0, (reading data|computing)",
        " 67%  after step 4, (reading data|computing)",
        " 50%  after step 3, evaluating",
        "100%  after step 6, saving",
        r"consolidating  \d+%",
    ):
        assert any(re.fullmatch(pattern, line) for line in shown), pattern
    assert screen.count("\nstep 6/6  100%  loss ") == 1
    assert "saving" not in screen and "computing" not in screen


def test_quiet_leaves_out_lines_of_progress(pool, tokens, tmp_path):
    text = f"--data {tokens} --max_steps 2 --out {tmp_path}/run --quiet"
    ((screen, shown),) = pool(1, train_on_terminal, flags(text))
    assert shown == []
    assert "model   tiny" in screen and "goodput" in screen and "step 2/2" not in screen


# --------------------------------------------------------------------------------------------------
# A console that is gone, and its copy


def train_into(kind: str, argv: list[str]) -> tuple[int, bool]:
    """train.py, whose output nothing takes; and whether it still ignores SIGHUP, as under nohup."""
    # Written line by line, as on a terminal: write fails, not only flush
    stream = open("/dev/full", "w", 1) if kind == "a full disk" else closed_pipe()  # noqa: SIM115
    with (
        mock.patch.object(sys, "stdout", stream),
        mock.patch.object(sys, "stderr", stream),
        mock.patch("time.sleep"),  # before a rank fails alone
    ):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        status = call_train(argv)
        is_ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL) == signal.SIG_IGN
    with contextlib.suppress(OSError):
        stream.close()
    return status, is_ignored


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")  # noqa: SIM115


@pytest.mark.parametrize("kind", ["a full disk", "a closed pipe"])
def test_a_run_goes_on_when_nobody_takes_what_it_prints(pool, tokens, tmp_path, kind):
    text = f"--data {tokens} --max_steps 6 --out {tmp_path}/run --strategy ddp --save_interval 3"
    blocked = tmp_path / "run/checkpoints"
    blocked.parent.mkdir()
    blocked.write_text("in the way")
    argv = flags(text)
    assert pool(2, train_into, kind, argv) == [(1, True)] * 2
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    said = (tmp_path / "run/console.log").read_text()
    heading = said.partition("\n")[0]
    assert heading.startswith("--- 20") and heading.endswith(f" train.py {' '.join(argv)}")
    assert said.count("\nmodel   tiny") == 1 and said.count("NOT SAVED: cannot write ") == 2
    assert re.findall(r"step (\d)/6 .* loss", said) == [*"123456"]
    for rank in ("", " on rank 1"):
        assert f"\ntrain.py: error{rank}: cannot write {blocked}/step-00000006: " in said

    blocked.unlink()
    assert pool(2, train_into, kind, argv) == [(0, True)] * 2
    again = (tmp_path / "run/console.log").read_text()
    assert again.startswith(said) and again.count("\nmodel   tiny") == 2


def test_a_closed_terminal_stops_the_run_which_saves(tokens, tmp_path):
    terminal = Terminal()
    text = f"--data {tokens} --max_steps 100000 --out {tmp_path}/run --strategy ddp"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = terminal.start(*launcher, TRAIN, *flags(text), OMP_NUM_THREADS="1")
    wait_until(lambda: "step      5/100000" in terminal.written, 30)
    os.close(terminal.far)
    os.close(terminal.near)
    assert process.wait(60) == 1  # torchrun's own
    (path,) = checkpoint.list_checkpoints(tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["step"] == int(path.name.removeprefix("step-"))
    said = (tmp_path / "run/console.log").read_text()
    assert re.search(r"\nstopped after step \d+; the same command continues\n", said)
    assert "\x1b" not in said and "\r" not in said


def test_what_was_not_printed_changes_no_exit_status():
    code = "from runtime.console import Transcript\nwith Transcript():\n    print('a', flush=True)"
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=full).returncode == 0
