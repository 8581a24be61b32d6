"""Runs that are killed or stopped at any moment, and started again."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from conftest import assert_same, call_train, flags, rows, torchrun

import checkpoint

RUN = "--strategy fsdp --save_interval 5 --dtype float32 --max_steps"
SHORT = f"{RUN} 60"


def never_killed(pool, tokens: Path, folder: Path, text: str) -> Path:
    out = folder / "whole"
    argv = flags(f"--data {tokens} --out {out} {text}")
    assert pool(2, call_train, argv, timeout=120) == [0, 0]
    return out


@pytest.fixture(scope="module")
def whole(pool, tokens, tmp_path_factory) -> Path:
    return never_killed(pool, tokens, tmp_path_factory.mktemp("chaos"), SHORT)


def logged_steps(out: Path) -> int:
    return len(rows(out)) if (out / "metrics.jsonl").exists() else 0


def kill_and_restart(out: Path, argv: list[str], times: int, rng: random.Random) -> None:
    """Kill a run `times` times between its start and its end, then let it end.

    The victims are one rank, or everything: the agent and its ranks one by one, since torchrun
    gives each a session of its own.
    """
    folder = out.with_name(f"{out.name} job")
    for _ in range(times):
        before = logged_steps(out)
        job = torchrun(2, argv, folder)
        job.wait_until(lambda before=before: logged_steps(out) not in (0, before), 60)
        time.sleep(rng.uniform(0, 0.3))
        first, second = job.ranks()
        for pid in rng.choice([[job.pid, first, second], [first], [second]]):
            os.kill(pid, signal.SIGKILL)
        job.wait(45)  # a rank that dies ends the job
        for path in checkpoint.list_checkpoints(out):
            assert checkpoint.verify(path) is None
    job = torchrun(2, argv, folder)
    assert job.wait(120) == 0, job.err


def assert_survives(whole: Path, tokens: Path, out: Path, text: str, times: int, seed: int) -> None:
    try:
        argv = flags(f"--data {tokens} --out {out} {text}")
        kill_and_restart(out, argv, times, random.Random(seed))
        assert_same(whole, out)
        assert [row["step"] for row in rows(out)] == [row["step"] for row in rows(whole)]
    except BaseException as error:
        error.add_note(f"the kills were drawn with seed {seed}")
        raise


def test_killed_at_random_the_run_ends_with_the_same_weights(whole, tokens, tmp_path):
    seed = random.randrange(1000)
    assert_survives(whole, tokens, tmp_path / "out", f"{SHORT} --async_save", 2, seed)


@pytest.mark.chaos
@pytest.mark.parametrize(
    "checkpoints, times", [("sharded", 40), ("sharded --async_save", 40), ("full", 20)]
)
def test_killed_a_hundred_times(pool, tokens, tmp_path, checkpoints, times):
    text = f"{RUN} 1000"  # time for 40 kills at 25 steps each
    whole = never_killed(pool, tokens, tmp_path, text)
    out = tmp_path / "out"
    assert_survives(whole, tokens, out, f"{text} --checkpoint {checkpoints}", times, seed=0)


def test_a_signal_to_one_rank_saves_and_stops_all(run, whole, tokens, tmp_path):
    out = tmp_path / "out"
    text = f"--data {tokens} --out {out} {SHORT} --save_interval 0 --log_interval 1000"
    last = 0
    for number, victim in ((signal.SIGINT, 1), (signal.SIGUSR1, 0)):
        before = logged_steps(out)
        job = torchrun(2, flags(text), tmp_path / "job")
        job.wait_until(lambda before=before: logged_steps(out) > before, 60)
        time.sleep(0.1)
        os.kill(job.ranks()[victim], number)
        job.wait(40)
        assert "exitcode  : 75" in job.err and "the same command continues" in job.out
        step = checkpoint.read_manifest(checkpoint.list_checkpoints(out)[-1])["step"]
        assert last < step < 60
        last = step
    run(2, SHORT, "out")
    assert_same(whole, out)


def test_a_time_limit_saves_before_it_and_the_run_goes_on(run):
    text = "--strategy ddp --max_steps 100000 --save_interval 0 --log_interval 50 --time_limit 2"
    began = time.monotonic()
    out = run(2, text, status=75)
    assert time.monotonic() - began < 10
    (saved,) = checkpoint.list_checkpoints(out)
    step = checkpoint.read_manifest(saved)["step"]
    assert 10 < step < 100000
    run(2, text, status=75)
    assert checkpoint.read_manifest(checkpoint.list_checkpoints(out)[-1])["step"] > step


@pytest.mark.slow
def test_max_restarts_continues_by_itself(whole, tokens, tmp_path):
    out = tmp_path / "out"
    argv = flags(f"--data {tokens} --out {out} {SHORT}")
    job = torchrun(2, argv, tmp_path / "job", "--max-restarts", "2")
    job.wait_until(lambda: len(checkpoint.list_checkpoints(out)) > 1, 60)
    os.kill(job.ranks()[0], signal.SIGKILL)
    assert job.wait(90) == 0, job.err
    assert "continuing from" in job.out
    assert_same(whole, out)
