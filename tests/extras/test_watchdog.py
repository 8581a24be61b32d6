"""The watchdog: if a rank stops, dies, hangs or is slow, it is reported, and the job ends."""

import atexit
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    ROOT,
    exit_statuses,
    flags,
    fork_ranks,
    free_port,
    is_running,
    start_process,
    wait_until,
)

import data
import dist
import train
from extras import watchdog


def train_without_batch_40(argv: list[str], folder: Path, ending: str) -> int:
    """Train; rank 1 hangs or dies when it reads its 40th micro-batch, up to four steps ahead."""
    reads = []

    def see(frame, event: str, _) -> None:
        if event != "call" or frame.f_code is not data.TokenDataset.__getitem__.__code__:
            return
        reads.append(frame)
        if len(reads) == 40 and os.environ["RANK"] == "1":
            if "SIGTERM" in ending:  # as torchrun sends it to the ranks of a host that are left
                os.kill(int((folder / "rank 0").read_text()), signal.SIGTERM)
            if ending != "hangs":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)

    sys.argv[0] = "train.py"
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / f"error-{os.environ['RANK']}.json")
    (folder / f"rank {os.environ['RANK']}").write_text(str(os.getpid()))
    threading.setprofile(see)  # batches are read in threads
    with open(folder / "stderr", "a") as file, contextlib.redirect_stderr(file):
        return train.main(argv)


DIES = (-9, "stopped or died, last seen (before the first|after) step.*")
ENDINGS = {
    "hangs": (1, "did not arrive within 4 s: still after step 39, reading data"),
    "dies": DIES,
    "dies, and the others get SIGTERM": DIES,
}


WATCHED = "--watchdog --timeout 4"


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_dies_or_hangs_is_reported(tokens, tmp_path, ending):
    text = f"--data {tokens} --out {tmp_path}/run --strategy fsdp --max_steps 1000000"
    ranks = fork_ranks(2, train_without_batch_40, flags(f"{text} {WATCHED}"), tmp_path, ending)
    status, said = ENDINGS[ending]
    assert exit_statuses(ranks) == [1, status]
    line = f"train.py: error: rank 1 {said}; rank 0 is after step 3[5-9], computing\n"
    assert re.fullmatch(line, (tmp_path / "stderr").read_text())
    (file,) = tmp_path.glob("error-*.json")  # for torchrun's report, once
    message = json.loads(file.read_text())["message"]
    assert re.fullmatch(line, message["message"] + "\n")
    # The failure began before all ranks ended, which torchrun sees within the same second.
    assert float(message["extraInfo"]["timestamp"]) <= file.stat().st_mtime - 4


# The function that rank 1 dies in: before the first collective of a gloo group, which connects the
# ranks, or before its part of a save or of a stop request
FIRSTS = {
    "default group": "on_rank0",
    "mesh": "build",
    "saver's group": "begin_save",
    "save": "write_chunks",
    "stop request": "poll",
}


def train_until(argv: list[str], folder: Path, first: str) -> int:
    """Train; rank 1 dies when it calls the function FIRSTS[first] of this project."""

    def see(frame, event: str, _) -> None:
        is_ours = Path(frame.f_code.co_filename).parent == ROOT
        if event == "call" and is_ours and frame.f_code.co_name == FIRSTS[first]:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.argv[0] = "train.py"
    if os.environ["RANK"] == "1":
        sys.setprofile(see)
    with open(folder / "stderr", "a") as file, contextlib.redirect_stderr(file):
        return train.main(argv)


@pytest.mark.slow(proves="a death at each place where a group of gloo connects")
@pytest.mark.parametrize("first", FIRSTS)
def test_a_rank_that_dies_before_it_connects_is_reported(tokens, tmp_path, first):
    text = f"--data {tokens} --out {tmp_path}/run --strategy fsdp --max_steps 4 {WATCHED}"
    began = time.monotonic()
    ranks = fork_ranks(4, train_until, flags(f"{text} --save_interval 2"), tmp_path, first)
    assert exit_statuses(ranks) == [1, -9, 1, 1]
    assert time.monotonic() - began < 25
    line = r"train.py: error: rank 1 stopped or died, last seen .*; rank \d is .*\n"
    assert re.fullmatch(line, (tmp_path / "stderr").read_text())


def lose_a_rank_in_two_threads(said: Path) -> None:
    """One thread finds rank 1 silent; the other reads this before the first has printed."""
    store = torch.distributed.HashStore()
    dog = watchdog.Watchdog(store, 0, 2, 4, dist.Progress())
    store.set("heartbeat 1", store.get("heartbeat 0"))

    class Late:
        def __getattr__(self, name):
            return getattr(store, name)

        def add(self, *arguments):
            value = store.add(*arguments)
            time.sleep(1)
            return value

    dog.store = Late()
    reader = threading.Thread(target=lambda: [dog.exchange([1]) for _ in range(10**6)])
    with open(said, "w") as file, contextlib.redirect_stderr(file):
        reader.start()
        dog.abort_if_confirmed()


def test_the_error_is_printed_whichever_thread_reads_first(tmp_path):
    (process,) = fork_ranks(1, lose_a_rank_in_two_threads, tmp_path / "said")
    process.join(30)
    assert process.exitcode == 1
    assert "error: rank 1 stopped or died" in (tmp_path / "said").read_text()


MANY = 20  # ranks


class Seen:
    """A store. `see` is called when the heartbeats of all ranks are read from it."""

    def __init__(self, store, see):
        self.store, self.see = store, see

    def __getattr__(self, name: str):
        return getattr(self.store, name)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if len(keys) == MANY + 1:  # and the number of failures
            self.see()
        return self.store.multi_get(keys)


def lose_one_of_many(port: int, folder: Path, ending: str) -> int:
    """Either all ranks hang and the first to investigate dies, or rank 1 dies and collectives fail.

    `folder` gets a file for each rank that investigates, dies, or goes on to print its error.
    """
    rank = int(os.environ["RANK"])
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)

    def die() -> None:
        (folder / f"rank {rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def see() -> None:
        (folder / f"reads {rank}").touch()
        if ending == "hang" and store.add("first reader", 1) == 1:
            die()

    progress = dist.Progress()
    dog = watchdog.Watchdog(Seen(store, see), rank, MANY, 8, progress)
    progress.report(7, "computing")
    with open(folder / "stderr", "a") as file, contextlib.redirect_stderr(file):
        with contextlib.suppress(RuntimeError), dog:
            time.sleep(1000 if ending == "hang" else 1)
            if rank == 1:
                die()
            wait_until((folder / "rank 1").exists, 20)
            raise RuntimeError("of a collective")
        (folder / f"own error {rank}").touch()
    return 1


@pytest.mark.slow(proves="more ranks than any other test has")
@pytest.mark.parametrize("ending", ["hang", "fail"])
def test_few_ranks_investigate_even_if_one_of_them_dies(ending, tmp_path):
    port = free_port()
    ranks = fork_ranks(MANY, lose_one_of_many, port, tmp_path, ending)
    # After the forks, which would inherit its sockets
    server = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert sorted(exit_statuses(ranks)) == [-9, *[1] * (MANY - 1)]
    (dead,) = tmp_path.glob("rank *")
    line = f".*: error: {dead.name} stopped or died, .*\n"
    assert re.fullmatch(line, (tmp_path / "stderr").read_text())
    # Investigators are counted in periods. All ranks begin at nearly the same time, in one period
    # or in two.
    assert 1 <= len(list(tmp_path.glob("reads *"))) <= 2 * watchdog.INVESTIGATORS < MANY
    assert not list(tmp_path.glob("own error *"))
    del server


def start_and_wait(folder: Path) -> None:
    """Act as pytest, and start a process."""
    process = start_process([sys.executable, "-c", "import time; time.sleep(1000)"])
    (folder / str(process.pid)).touch()
    time.sleep(1000)


def test_processes_of_a_test_end_when_pytest_is_killed(tmp_path):
    (parent,) = fork_ranks(1, start_and_wait, tmp_path)
    wait_until(lambda: list(tmp_path.iterdir()), 20)
    parent.kill()
    parent.join()
    (child,) = tmp_path.iterdir()
    wait_until(lambda: not is_running(int(child.name)), 10)


def fail_alone() -> None:
    """Do what a rank with an error does, up to the destructors of torch's groups."""
    atexit._clear()  # what pytest has registered
    with (
        contextlib.suppress(ValueError),
        watchdog.Watchdog(torch.distributed.HashStore(), 0, 3, 60, dist.Progress()),
    ):
        raise ValueError("which no other rank has")
    atexit._run_exitfuncs()
    ctypes.PyDLL(None).sleep(1000)  # as NCCL's communicators may, with Python's lock held


@pytest.mark.slow(proves="a destructor that holds Python's lock for ever")
def test_a_failed_rank_ends_even_if_nccl_waits_for_others():
    """It has ten seconds for its last words."""
    assert exit_statuses(fork_ranks(1, fail_alone)) == [1]


@pytest.mark.parametrize(
    "after, collective_failed, line",
    [
        ("5 9 a|7 9 a|8 9 a", False, "no rank made progress for 60 s: all are a"),
        ("5 9 a|7 8 b c|8 9 a", False, "rank 1 did not arrive within 60 s: still b c; rank 0 is a"),
        ("5 9 a|4 9 a|8 9 a", False, "rank 1 stopped or died, last seen a; rank 0 is a"),
        ("5 9 a|4 9 a|4 9 b", True, "ranks 1 and 2 stopped or died, last seen a; rank 0 is a"),
        ("5 9 a|7 8 a|8 9 a", True, None),  # an error of this rank only
    ],
)
def test_the_diagnosis_blames_the_right_ranks(after, collective_failed, line):
    store = torch.distributed.HashStore()
    dog, *_ = (watchdog.Watchdog(store, rank, 3, 60, dist.Progress()) for rank in range(3))
    looks = []
    for text in ("2 9 a|4 9 a|4 9 b", after):
        beats = [beat.split(" ", 2) for beat in text.split("|")]
        looks.append([watchdog.Heartbeat(int(n), int(m), place) for n, m, place in beats])
    assert dog.diagnose(*looks, collective_failed) == line


class Beats:
    """Replaces the event that ends the thread: `count` intervals pass at once, then it ends."""

    def __init__(self, count: int, others: list[watchdog.Watchdog]):
        self.count = count
        self.others = others
        self.passed = 0

    def wait(self, seconds: float) -> bool:
        self.passed += 1
        for dog in self.others:
            dog.exchange([])
        return self.passed > self.count


NO_PROGRESS = "no rank made progress for 60 s: all are after step 3, saving"
SILENT = "rank 1 stopped or died, last seen after step 0, starting; rank 0 is after step 3, saving"


@pytest.mark.parametrize(
    "seconds, slow, is_silent, line",
    [
        (50, False, False, None),
        (60, False, False, NO_PROGRESS),
        (500, True, False, None),
        (600, True, False, NO_PROGRESS),
        (50, True, True, None),
        (60, True, True, SILENT),
    ],
)
def test_only_slow_work_may_take_ten_times_the_timeout(seconds, slow, is_silent, line):
    """Two ranks make no progress. The timeout is 60 seconds, with a heartbeat each second."""
    store = torch.distributed.HashStore()
    dogs = [Reporting(store, rank, 2, 60, dist.Progress()) for rank in range(2)]
    for dog in dogs:
        dog.progress.report(3, "saving", is_slow=slow)
    dogs[0].stopped = Beats(seconds, [] if is_silent else dogs[1:])
    with contextlib.suppress(SystemExit):
        dogs[0].run()
    assert dogs[0].line == line


class Reporting(watchdog.Watchdog):
    """Keeps the line with which it would end the process."""

    line = None

    def abort(self, line: str) -> None:
        self.line = line
        raise SystemExit


class Gone:
    """A store whose server has ended."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("intervals, line", [(1, watchdog.STORE_GONE), (0, None)])
def test_a_lost_store_ends_a_run_that_does_not_end_soon(intervals, line):
    """Rank 0 may serve the store, and may have finished first: then so will this rank."""
    dog = Reporting(torch.distributed.HashStore(), 1, 2, 60, dist.Progress())
    dog.store, dog.stopped = Gone(), Beats(intervals, [])
    with contextlib.suppress(SystemExit):
        dog.exchange([0])
    assert dog.line == line


def watch_a_run(argv: list[str]) -> list[tuple[int, str, bool]]:
    """Train; return each (steps done, next activity, whether that may be slow) once."""
    seen = []

    def see(frame, event: str, _) -> None:
        if event == "call" and frame.f_code is dist.Progress.report.__code__:
            seen.append(tuple(frame.f_locals[name] for name in ("step", "doing", "is_slow")))

    sys.setprofile(see)
    assert train.main(argv) == 0
    sys.setprofile(None)
    left_out = ("starting", "reading data")
    return [report for report in dict.fromkeys(seen) if report[1] not in left_out]


def test_the_first_step_and_saves_count_as_slow_work(on_ranks):
    text = "--save_interval 2 --sample_tokens 1 --max_steps"
    (seen,) = on_ranks(1, watch_a_run, f"{text} 3")
    assert seen == [
        (0, "computing", True),
        (1, "computing", False),
        (2, "saving", True),
        (2, "computing", False),
        (3, "saving", True),
        (3, "evaluating", True),  # the first forward may compile
        (3, "evaluating", False),
        (3, "sampling", True),
    ]
    ((loading, resumed, *_),) = on_ranks(1, watch_a_run, f"{text} 4")
    assert loading == (3, "loading", True)
    assert resumed == (3, "computing", True)  # a new process compiles again


@pytest.mark.slow(proves="torchrun itself sends SIGTERM")
def test_a_rank_that_dies_under_torchrun_is_named(job):
    """torchrun sends SIGTERM to the others at once, but they must live until they have named it."""
    running = job(2, f"--strategy fsdp --max_steps 1000000 {WATCHED}")
    running.until(running.rows)
    os.kill(running.ranks()[1], signal.SIGKILL)
    assert running.wait() == 1
    assert "train.py: error: rank 1 stopped or died, last seen after step" in running.printed()
