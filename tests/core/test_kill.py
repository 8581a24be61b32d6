"""Whatever ends a run, the same command continues it, and it ends with the same bits.

Each test ends a run in another way and then starts the same command again. It compares every
weight, every moment of the optimizer and every loss with those of `whole`, a run that nothing
ended. A job under torchrun spends most of its seconds on imports, so ranks of the pool take the
place of torchrun's where torchrun adds nothing to what a row is about.
"""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

import checkpoint

from .conftest import KILLED, Job, PoolJob, Run, arguments, run_command

STEPS = 13
SAVE_INTERVAL = 5
# Eight micro-batches per rank make a step long enough to end a run in the middle of it.
RUN = (
    f"--strategy fsdp --max_steps {STEPS} --save_interval {SAVE_INTERVAL} --keep_every 1 "
    "--global_batch_size 16 --micro_batch_size 1"
)
LONG_EVALUATIONS = f"{RUN} --eval_interval 1 --eval_sequences 100"  # longer than a step
SAVE_EVERY_STEP = f"{RUN} --save_interval 1"
TORCHRUN_FAILED = 1


# --------------------------------------------------------------------------------------------------
# Runs to end


@pytest.fixture(scope="module")
def whole(pool, tokens, tmp_path_factory) -> Run:
    """The run that nothing ends."""
    return finish(pool, tokens, tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def start(pool, tokens, job, tmp_path) -> Iterator[Callable]:
    """start("torchrun" or "pool", flags): start a run on two ranks, to end it."""
    started = []

    def call(launcher: str, text: str = RUN) -> Job | PoolJob:
        if launcher == "torchrun":
            return job(2, text)
        started.append(PoolJob(pool, arguments(tokens, tmp_path / "run", text)))
        return started[-1]

    yield call
    wait([each.answers for each in started])  # a test that failed may have left one


def finish(pool, tokens: Path, out: Path, text: str = RUN) -> Run:
    """Start a command, for the first time or again, and let it end."""
    (status, printed, error), _ = pool(2, run_command, arguments(tokens, out, text))
    assert status == 0, error
    return Run(out, status, printed, error)


def saved_steps(out: Path) -> list[int]:
    """The steps of all checkpoints, each of which must be valid."""
    paths = checkpoint.list_checkpoints(out)
    assert [checkpoint.verify(path) for path in paths] == [None] * len(paths)
    return [checkpoint.step_of(path) for path in paths]


def incomplete(out: Path) -> list[Path]:
    """What lies beside the checkpoints: folders whose names are not those of checkpoints."""
    entries = out.glob("checkpoints/*")
    return [path for path in entries if checkpoint.step_of(path) is None]


def assert_same(out: Path, whole: Run) -> None:
    """Fail unless a run has the losses, weights and optimizer state of `whole`, bit for bit."""
    run = Run(out, 0, "", "")
    losses = [(row["step"], row["loss"], row["grad_norm"]) for row in run.rows()]
    assert losses == [(row["step"], row["loss"], row["grad_norm"]) for row in whole.rows()]
    tensors, expected = run.weights(), whole.weights()
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []
    assert any(name.startswith("optimizer.") for name in expected)
    assert saved_steps(out)[-1] == STEPS
    assert incomplete(out) == []


def assert_continued(before: list[dict], out: Path, from_step: int) -> None:
    """Fail unless steps up to `from_step` were kept, and not trained again."""
    rows = Run(out, 0, "", "").rows()
    assert rows[:from_step] == before[:from_step]
    # The rows contain times, so those of a step that is trained twice differ.
    assert [row["step"] for row in before[:from_step]] == [*range(1, 1 + from_step)]


# --------------------------------------------------------------------------------------------------
# Signals


def after_a_step(run) -> bool:
    """Whether there was a save, and a stop within two steps comes before the next one."""
    return len(run.rows()) > SAVE_INTERVAL


def in_an_evaluation(run) -> bool:
    """Whether the row of a step is there, but not yet the row of its evaluation."""
    return len(run.rows()) > len(run.rows("val_loss")) >= SAVE_INTERVAL


# The signal that one rank gets, who started the ranks, the flags, when, and the exit status
STOPS = {
    "SIGTERM to torchrun's rank": (signal.SIGTERM, "torchrun", RUN, after_a_step, TORCHRUN_FAILED),
    "SIGINT": (signal.SIGINT, "pool", RUN, after_a_step, os.EX_TEMPFAIL),
    "SIGUSR1": (signal.SIGUSR1, "pool", RUN, after_a_step, os.EX_TEMPFAIL),
    "SIGHUP": (signal.SIGHUP, "pool", RUN, after_a_step, os.EX_TEMPFAIL),
    "SIGTERM in an evaluation": (
        signal.SIGTERM,
        "pool",
        LONG_EVALUATIONS,
        in_an_evaluation,
        os.EX_TEMPFAIL,
    ),
}


MORE_SIGNALS = pytest.mark.slow(proves="torchrun, and further signals")
QUICK = ("SIGINT", "SIGTERM in an evaluation")


@pytest.mark.parametrize(
    "number, launcher, flags, when, status",
    [
        pytest.param(*row, id=name, marks=[MORE_SIGNALS] * (name not in QUICK))
        for name, row in STOPS.items()
    ],
)
def test_a_signal_to_any_rank_stops_all_ranks_after_the_same_step(
    start, whole, pool, tokens, number, launcher, flags, when, status
):
    run = start(launcher, flags)
    run.until(lambda: when(run))
    os.kill(run.ranks()[1], number)
    seen = run.rows()[-1]["step"]  # the rank is in step seen + 1, or in a later one
    assert run.wait() == status

    stopped = saved_steps(run.out)[-1]
    before = run.rows()
    assert stopped == before[-1]["step"] < STEPS
    if when is after_a_step:
        assert stopped <= seen + 1 + 2
    assert f"stopped after step {stopped}; the same command continues" in run.printed()

    finish(pool, tokens, run.out, flags)
    assert_continued(before, run.out, stopped)
    assert_same(run.out, whole)


def test_a_stop_in_the_last_evaluation_saves_and_the_next_start_evaluates(
    start, whole, pool, tokens
):
    """The evaluation has 170 batches, and ends after the one in which the signal comes."""
    flags = f"{RUN} --eval_sequences 400"
    run = start("pool", flags)
    run.until(lambda: run.rows()[-1:] and run.rows()[-1]["step"] == STEPS)
    os.kill(run.ranks()[1], signal.SIGTERM)
    assert run.wait() == os.EX_TEMPFAIL
    assert f"stopped after step {STEPS}; the same command continues" in run.printed()
    assert run.rows("val_loss") == []
    assert saved_steps(run.out)[-1] == STEPS

    again = finish(pool, tokens, run.out, flags)
    assert [row["step"] for row in again.rows("val_loss")] == [STEPS]
    assert_same(run.out, whole)
    log = (run.out / "metrics.jsonl").read_text()
    assert (
        f"is finished at step {STEPS}, and --max_steps is {STEPS}:"
        in finish(pool, tokens, run.out, flags).printed
    )
    assert (run.out / "metrics.jsonl").read_text() == log


def test_a_kill_in_an_evaluation_loses_neither_the_save_nor_the_evaluation(
    start, whole, pool, tokens
):
    """Both are due at step 5. The save comes first, and the next start evaluates its step."""
    flags = f"{RUN} --eval_interval {SAVE_INTERVAL} --eval_sequences 400"
    run = start("pool", flags)
    run.until(lambda: saved_steps(run.out) == [SAVE_INTERVAL])
    for rank in run.ranks():
        os.kill(rank, signal.SIGKILL)
    assert run.wait() == KILLED
    assert run.rows("val_loss") == []
    again = finish(pool, tokens, run.out, flags)
    assert [row["step"] for row in again.rows("val_loss")] == [5, 10, STEPS]
    assert_same(run.out, whole)


@pytest.mark.slow(proves="torchrun's ranks are still starting")
def test_a_signal_before_the_first_step_ends_the_job_and_harms_nothing(start, whole, pool, tokens):
    job = start("torchrun")
    job.until(lambda: job.out.exists() and len(job.ranks()) == 2)
    os.kill(job.ranks()[1], signal.SIGTERM)
    assert job.wait() == TORCHRUN_FAILED
    assert len(job.rows()) <= 2
    finish(pool, tokens, job.out)
    assert_same(job.out, whole)


# --------------------------------------------------------------------------------------------------
# Kills


def kill_between_saves(run) -> None:
    run.until(lambda: len(run.rows()) >= SAVE_INTERVAL + 2)
    for rank in run.ranks():
        os.kill(rank, signal.SIGKILL)


def kill_in_a_save(run) -> None:
    """Kill all ranks while a checkpoint is incomplete."""

    def stop_in_a_save() -> bool:
        # A checkpoint is complete from the moment at which it has its name.
        newest = checkpoint.list_checkpoints(run.out)[-1:]
        assert not any(checkpoint.verify(path) for path in newest)
        if len(run.rows()) < SAVE_INTERVAL + 2 or not incomplete(run.out):
            return False
        for rank in run.ranks():
            os.kill(rank, signal.SIGSTOP)
        if incomplete(run.out):
            return True
        for rank in run.ranks():
            os.kill(rank, signal.SIGCONT)
        return False

    run.until(stop_in_a_save)
    for rank in run.ranks():
        os.kill(rank, signal.SIGKILL)


# How ranks are killed, who started them, the exit status, the flags, and those of the next start.
# With rarer saves, the step whose save was interrupted is not saved again.
KILLS = {
    "torchrun's ranks between saves": (kill_between_saves, "torchrun", TORCHRUN_FAILED, RUN, RUN),
    "all ranks in a save": (kill_in_a_save, "pool", KILLED, SAVE_EVERY_STEP, SAVE_EVERY_STEP),
    "all ranks in a save, then rarer saves": (kill_in_a_save, "pool", KILLED, SAVE_EVERY_STEP, RUN),
}


UNDER_TORCHRUN = pytest.mark.slow(proves="kills of torchrun's ranks; STOPS has a signal to one")
ROWS = [
    pytest.param(*row, id=name, marks=[UNDER_TORCHRUN] * ("torchrun" in name))
    for name, row in KILLS.items()
]


@pytest.mark.parametrize("kill, launcher, status, flags, again", ROWS)
def test_a_killed_run_continues_from_its_last_checkpoint(
    start, whole, pool, tokens, kill, launcher, status, flags, again
):
    run = start(launcher, flags)
    kill(run)
    assert run.wait() == status
    saved, before = saved_steps(run.out)[-1], run.rows()
    assert run.rows("end") == []
    assert 0 < saved < STEPS
    if kill is kill_between_saves:
        assert saved == SAVE_INTERVAL < before[-1]["step"]
    finish(pool, tokens, run.out, again)
    assert_continued(before, run.out, saved)
    assert_same(run.out, whole)


@pytest.mark.slow(proves="torchrun's own restart; test_launch.py has the keys of its store")
def test_torchrun_starts_ranks_again_of_which_one_was_killed(job, whole):
    run = job(2, RUN, "run", "--max-restarts", "1")
    run.until(lambda: len(run.rows()) > SAVE_INTERVAL)
    os.kill(run.ranks()[0], signal.SIGKILL)
    assert run.wait(120) == 0, run.printed()
    assert f"continuing from {checkpoint.step_path(run.out, SAVE_INTERVAL)}" in run.printed()
    assert_same(run.out, whole)


FILE_OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def save_and_die(out: Path, operations: int) -> bool:
    """Save step 2 in a child process that is killed before file operation number `operations`.

    Returns whether the save ended before that.
    """
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL)
        return status == 0
    left = iter(range(operations))

    def count(event: str, arguments: tuple) -> None:
        if event in FILE_OPERATIONS and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)  # called before each such operation
    try:
        save_one(out, step=2)
        os._exit(0)
    finally:
        os._exit(1)


def save_one(out: Path, step: int) -> None:
    state = {"model": {"a": torch.full((3,), float(step)), "b": torch.zeros(2, 2)}}
    checkpoint.save_state(checkpoint.step_path(out, step), state, {"step": step})


def steps_after_kills(out: Path) -> list[list[int]]:
    """Kill a save before each of its file operations; return the saved steps after each."""
    save_one(out, step=1)
    found = []
    ended = False
    while not ended:
        shutil.rmtree(checkpoint.step_path(out, 2), ignore_errors=True)
        ended = save_and_die(out, len(found))
        found.append(saved_steps(out))
    return found


def test_a_save_killed_before_any_file_operation_leaves_only_valid_checkpoints(pool, tmp_path):
    (found,) = pool(1, steps_after_kills, tmp_path)
    assert len(found) > 5
    assert found[0] == [1] and found[-1] == [1, 2]
    assert found == sorted(found)
    assert incomplete(tmp_path) == []


# --------------------------------------------------------------------------------------------------
# A rank that hangs


@pytest.mark.slow(proves="the time-out of a collective, and torchrun's wait")
@pytest.mark.parametrize("hung", [0, 2])
def test_a_rank_that_hangs_ends_the_job_by_a_line_that_names_it(job, hung):
    """A collective waits --timeout for it, rank 0 10 s more, the others 20 s, and torchrun 30 s."""
    running = job(3, "--strategy fsdp --global_batch_size 6 --max_steps 100000 --timeout 10")
    running.until(running.rows)
    os.kill(running.ranks()[hung], signal.SIGSTOP)
    began = time.monotonic()
    running.until(lambda: "error" in running.printed(), 40)
    assert time.monotonic() - began > 9, running.printed()
    assert running.wait() == TORCHRUN_FAILED
    lost = {0: "while waiting for send/recv from rank 0", 2: "Ranks 2 failed to pass"}
    line = f"a rank died or hangs \\(.*{lost[hung]}"
    assert re.search(line, running.printed()), running.printed()
