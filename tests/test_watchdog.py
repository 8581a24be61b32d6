"""A rank that stops, dies, hangs or is slow is named, and a job without it ends."""

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import call_train, flags, rows

import data
import watchdog

ROOT = Path(__file__).parent.parent
# train.py, whose rank 1 never gets the micro-batch of step 40
STUCK = """
import os, sys, time
sys.path.insert(0, {root!r})
import data, train
reads, get = 0, data.TokenDataset.__getitem__
def stuck(windows, number):
    global reads
    reads += 1
    if reads == 40 and os.environ["RANK"] == "1":
        time.sleep(1000)
    return get(windows, number)
data.TokenDataset.__getitem__ = stuck
sys.exit(train.main(sys.argv[1:]))
"""


class Job:
    """train.py, or a script like it, under torchrun: in a session of its own, with its errors in a file."""

    def __init__(self, script: Path, ranks: int, out: Path, argv: list[str]):
        self.out, self.errors, self.ranks = out, out.with_suffix(".errors"), []
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(ranks),
        ]
        with open(self.errors, "w") as file:
            self.process = subprocess.Popen(
                [*torchrun, script, "--out", out, *argv],
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def wait(self, condition, limit: float) -> None:
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.05)

    def signal(self, rank: int, number: int) -> None:
        if not self.ranks:  # later some may be gone
            self.ranks = (
                Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
                .read_text()
                .split()
            )
        os.kill(int(self.ranks[rank]), number)

    def trains(self) -> bool:
        """For more than a second, and so for more than a beat: what ranks have last said is of a step."""
        log = self.out / "metrics.jsonl"
        return log.exists() and sum(row["step_time"] for row in rows(self.out)) > 1.2

    def line(self) -> str:
        """What train.py said of the end."""
        return "".join(
            "".join(found)
            for found in re.findall(r"^\w+.py: error: (.*)$", self.errors.read_text(), re.M)
        )

    def over(self) -> bool:
        """It has ended, with status 1, and no process of it is left."""
        return (
            self.process.poll() == 1
            and not subprocess.run(
                ["pgrep", "-s", str(self.process.pid)], capture_output=True
            ).stdout
        )


def last_collective(out: Path, rank: int) -> dict:
    return pickle.loads((out / "flight" / f"rank_{rank}").read_bytes())["entries"][-1]


def test_a_rank_that_stops_dies_or_hangs_ends_the_job_and_is_named(tokens, tmp_path):
    """Three jobs at once, each with a time-out of 6 seconds."""
    (tmp_path / "stuck.py").write_text(STUCK.format(root=str(ROOT)))
    scripts = {
        "stopped": ROOT / "train.py",
        "killed": ROOT / "train.py",
        "stuck": tmp_path / "stuck.py",
    }
    argv = flags(f"--data {tokens} --strategy fsdp --max_steps 1000000 --timeout 6")
    jobs = {name: Job(script, 2, tmp_path / name, argv) for name, script in scripts.items()}
    for name, number in ("stopped", signal.SIGSTOP), ("killed", signal.SIGKILL):
        jobs[name].wait(jobs[name].trains, 60)
        jobs[name].signal(1, number)
    jobs["stopped"].wait(jobs["stopped"].line, 6 + 2)
    jobs["stopped"].signal(1, signal.SIGKILL)  # which torchrun would do after 30 seconds
    for name, job in jobs.items():
        job.wait(job.over, 6 + 5)
        if name != "stuck":
            line = r"rank 1 stopped or died, last seen after step (\d+), \D+; rank 0 is after step (\d+), \D+"
            last_seen, step = map(int, re.fullmatch(line, job.line()).groups())
            assert last_seen <= step and abs(step - len(rows(tmp_path / name))) < 2
    line = "rank 1 did not arrive within 6 s: still after step 39, reading data; rank 0 is after step 39, computing"
    assert jobs["stuck"].line() == line
    assert (
        last_collective(tmp_path / "stuck", 0)["profiling_name"] == "gloo:all_gather"
    )  # waits for weights; rank 1 is behind
    assert (tmp_path / "stuck/flight/rank_1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_torchrun_as_it_is_ends_within_the_time_out_and_30_seconds(tokens, tmp_path, rank, number):
    job = Job(
        ROOT / "train.py",
        4,
        tmp_path / "run",
        flags(f"--data {tokens} --strategy ddp --max_steps 1000000 --timeout 10"),
    )
    job.wait(job.trains, 60)
    job.signal(rank, number)
    job.wait(job.over, 10 + 30)
    assert job.line().startswith(f"rank {rank} stopped or died, last seen after step ")


def train_with_a_slow_rank(argv: list[str]) -> int:
    get = data.TokenDataset.__getitem__

    def slow(windows, number):
        time.sleep(0.01 * (os.environ["RANK"] == "2"))
        return get(windows, number)

    with mock.patch.object(data.TokenDataset, "__getitem__", slow):
        return call_train(argv)


def test_the_slowest_rank_is_named_in_the_log(pool, tokens, tmp_path):
    argv = flags(f"--data {tokens} --out {tmp_path}/run --strategy ddp --max_steps 4")
    assert pool(4, train_with_a_slow_rank, argv) == [0] * 4
    for row in rows(tmp_path / "run")[1:]:  # in the first step all have their own start to pay for
        assert row["slowest_rank"] == 2 and row["step_time_min"] < row["step_time_max"]
        assert (
            row["data_wait"] > 0.01 > row["data_wait_min"]
        )  # the others waited for rank 2, not for data


@pytest.mark.parametrize(
    "after, alarm, line",
    [
        ("5 9 a|7 9 a|8 9 a", False, "no rank made progress for 60 s: all are a"),
        ("5 9 a|7 8 b c|8 9 a", False, "rank 1 did not arrive within 60 s: still b c; rank 0 is a"),
        ("5 9 a|4 9 a|8 9 a", False, "rank 1 stopped or died, last seen a; rank 0 is a"),
        ("5 9 a|4 9 a|4 9 b", True, "ranks 1 and 2 stopped or died, last seen a; rank 0 is a"),
        ("5 9 a|7 8 a|8 9 a", True, None),  # an error of this rank's own
    ],
)
def test_who_is_to_blame(after, alarm, line):
    watch = watchdog.Watchdog(torch.distributed.HashStore(), 0, 3, timeout=60)
    watch.collective_failed = alarm
    looks = []
    for text in ("2 9 a|4 9 a|4 9 b", after):
        looks.append([watchdog.Heartbeat.decode(beat.encode()) for beat in text.split("|")])
    assert watch.diagnose(*looks) == line
