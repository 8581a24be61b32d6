"""Runs that are killed at any moment, and started again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import assert_same, call_train, flags, rows

import checkpoint

ROOT = Path(__file__).parent.parent
RUN = "--strategy fsdp --save_interval 5 --dtype float32 --max_steps"
SHORT = f"{RUN} 100"


def never_killed(pool, tokens: Path, folder: Path, run: str) -> Path:
    out = folder / "run"
    assert pool(2, call_train, flags(f"--data {tokens} --out {out} {run}"), timeout=120) == [0, 0]
    return out


@pytest.fixture(scope="module")
def whole(pool, tokens, tmp_path_factory) -> Path:
    return never_killed(pool, tokens, tmp_path_factory.mktemp("whole"), SHORT)


def start(argv: list[str], *options: str) -> subprocess.Popen:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        *options,
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*torchrun, ROOT / "train.py", *argv], start_new_session=True, **pipes)


def ranks(process: subprocess.Popen) -> list[int]:
    """The process ids of the ranks that torchrun has started."""
    return list(
        map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
    )


def wait_for(condition, seconds: float, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.01)


def steps(out: Path) -> int:
    return len(rows(out)) if (out / "metrics.jsonl").exists() else 0


def kill_and_restart(out: Path, argv: list[str], times: int, rng: random.Random) -> None:
    """Kill a run `times` times, all of it or one rank, between its start and its end; let it end the last time.

    All of it are the agent and its ranks, one by one: torchrun gives each a session, and a process group, of its own.
    """
    for _ in range(times):
        process, before = start(argv), steps(out)
        wait_for(lambda before=before: steps(out) not in (0, before), 60, process)
        time.sleep(rng.uniform(0, 0.3))
        first, second = ranks(process)
        for pid in rng.choice([[process.pid, first, second], [first], [second]]):
            os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=45)  # a rank that dies ends the job
        for path in checkpoint.list_checkpoints(out):
            assert checkpoint.verify(path) is None
    process = start(argv)
    said, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


def chaos(whole: Path, tokens: Path, out: Path, run: str, times: int, seed: int) -> None:
    kill_and_restart(out, flags(f"--data {tokens} --out {out} {run}"), times, random.Random(seed))
    assert_same(whole, out)
    assert [row["step"] for row in rows(out)] == [row["step"] for row in rows(whole)], (
        f"seed {seed}"
    )


def test_killed_at_random_the_run_ends_with_the_same_weights(whole, tokens, tmp_path):
    chaos(whole, tokens, tmp_path / "out", f"{SHORT} --async_save", 2, random.randrange(1000))


@pytest.mark.chaos
def test_killed_a_hundred_times(pool, tokens, tmp_path):
    long = f"{RUN} 1000"  # time for 40 kills at 25 steps each
    whole = never_killed(pool, tokens, tmp_path, long)
    for form, times in {"sharded": 40, "sharded --async_save": 40, "full": 20}.items():
        chaos(
            whole, tokens, tmp_path / form.replace(" ", ""), f"{long} --checkpoint {form}", times, 0
        )


def test_a_signal_to_one_rank_saves_and_stops_all(run, whole, tokens, tmp_path):
    out, last = tmp_path / "out", 0
    argv = flags(f"--data {tokens} --out {out} {SHORT} --save_interval 0 --log_interval 1000")
    for number, victim in ((signal.SIGTERM, 1), (signal.SIGUSR1, 0)):
        process, before = start(argv), steps(out)
        wait_for(lambda before=before: steps(out) > before, 60, process)
        time.sleep(0.1)
        os.kill(ranks(process)[victim], number)
        said, err = process.communicate(timeout=40)
        assert "exitcode  : 75" in err and "the same command continues" in said
        step = checkpoint.read_manifest(checkpoint.list_checkpoints(out)[-1])["step"]
        assert last < step < 100
        last = step
    run(2, SHORT, "out")
    assert_same(whole, out)


def test_a_time_limit_saves_before_it_and_the_run_goes_on(run, tokens, tmp_path):
    text = "--strategy ddp --max_steps 100000 --save_interval 0 --log_interval 50"
    begun = time.monotonic()
    run(2, f"{text} --time_limit 2", "out", status=75)
    took = time.monotonic() - begun
    (saved,) = checkpoint.list_checkpoints(tmp_path / "out")
    step = checkpoint.read_manifest(saved)["step"]
    assert took < 5 and 10 < step < 100000
    run(2, f"{text} --time_limit 2", "out", status=75)
    assert (
        checkpoint.read_manifest(checkpoint.list_checkpoints(tmp_path / "out")[-1])["step"] > step
    )


@pytest.mark.slow
def test_max_restarts_continues_by_itself(whole, tokens, tmp_path):
    out = tmp_path / "out"
    process = start(flags(f"--data {tokens} --out {out} {SHORT}"), "--max-restarts", "2")
    wait_for(lambda: len(checkpoint.list_checkpoints(out)) > 1, 60, process)
    os.kill(ranks(process)[0], signal.SIGKILL)
    said, err = process.communicate(timeout=90)
    assert process.returncode == 0 and "continuing from" in said, err
    assert_same(whole, out)
