"""Runs that are killed or stopped at any moment, and started again."""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import (
    assert_same,
    call_train,
    flags,
    fork_ranks,
    newest_step,
    rows,
    torchrun,
    wait_until,
)

import checkpoint

RUN = "--strategy fsdp --save_interval 5 --dtype float32 --max_steps"
STEPS = 80
SHORT = f"{RUN} {STEPS}"


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


def kill(out: Path, argv: list[str], rng: random.Random) -> None:
    """Start a run and kill it between its first new log row and its end.

    The victims are one rank, or everything: the agent and its ranks one by one, since torchrun
    gives each a session of its own.
    """
    before = logged_steps(out)
    job = torchrun(2, argv, out.with_name(f"{out.name} job"))
    job.wait_until(lambda: logged_steps(out) not in (0, before), 60)
    time.sleep(rng.uniform(0, 0.3))
    first, second = job.ranks()
    for pid in rng.choice([[job.pid, first, second], [first], [second]]):
        os.kill(pid, signal.SIGKILL)
    job.wait(45)  # a rank that dies ends the job
    for path in checkpoint.list_checkpoints(out):
        assert checkpoint.verify(path) is None


def stop_torchrun(out: Path, argv: list[str]) -> None:
    """Start a run and tell torchrun to stop, as a scheduler does: the ranks save, and stop.

    It signals the process groups of its ranks, which data-loading workers have left.
    """
    before = logged_steps(out)
    job = torchrun(2, [*argv, "--num_workers", 1], out.with_name(f"{out.name} job"))
    job.wait_until(lambda: logged_steps(out) > before, 60)
    os.kill(job.pid, signal.SIGTERM)
    job.wait(40)
    line = f"stopped after step {newest_step(out)}; the same command continues"
    assert line in job.out


def train_until_signalled(out: Path, argv: list[str], number: int, victim: int) -> int:
    """train.py in a worker of the pool, where the victim signals itself after the first row."""

    def signal_myself() -> None:
        before = logged_steps(out)
        while logged_steps(out) == before:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    if int(os.environ["RANK"]) == victim:
        threading.Thread(target=signal_myself, daemon=True).start()
    return call_train(argv)


def assert_same_run(whole: Path, out: Path) -> None:
    assert_same(whole, out)
    assert [row["step"] for row in rows(out)] == [row["step"] for row in rows(whole)]


@contextlib.contextmanager
def drawn_with(seed: int) -> Iterator[random.Random]:
    try:
        yield random.Random(seed)
    except BaseException as error:
        error.add_note(f"the kills were drawn with seed {seed}")
        raise


def test_stopped_and_killed_the_run_ends_with_the_same_weights(run, pool, whole, tokens, tmp_path):
    """Stopped by a signal to torchrun, to one rank and to the other, then killed after a save."""
    out = tmp_path / "out"
    argv = flags(f"--data {tokens} --out {out} {SHORT} --async_save")
    # Without --save_interval only the signal can be the reason for a checkpoint.
    unsaved = [*argv, "--save_interval", "0"]
    stop_torchrun(out, unsaved)
    steps = [0, newest_step(out)]
    for number, victim in ((signal.SIGINT, 1), (signal.SIGUSR1, 0)):
        assert pool(2, train_until_signalled, out, unsaved, number, victim) == [75, 75]
        steps.append(newest_step(out))
    assert steps == sorted(set(steps)) and steps[-1] < STEPS
    ranks = fork_ranks(2, call_train, argv)
    wait_until(lambda: newest_step(out) > steps[-1], 60)
    for process in ranks:
        process.kill()
        process.join()
    assert checkpoint.verify(checkpoint.list_checkpoints(out)[-1]) is None
    run(2, SHORT, "out")
    assert_same_run(whole, out)


@pytest.mark.chaos
@pytest.mark.parametrize("checkpoints, times", [("sharded", 50), ("sharded --async_save", 50)])
def test_killed_a_hundred_times(pool, tokens, tmp_path, checkpoints, times):
    text = f"{RUN} 1250"  # time for 50 kills at 25 steps each
    whole = never_killed(pool, tokens, tmp_path, text)
    out = tmp_path / "out"
    argv = flags(f"--data {tokens} --out {out} {text} --checkpoint {checkpoints}")
    with drawn_with(seed=0) as rng:
        for _ in range(times):
            kill(out, argv, rng)
        job = torchrun(2, argv, tmp_path / "job")
        assert job.wait(400) == 0, job.err
        assert_same_run(whole, out)


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
