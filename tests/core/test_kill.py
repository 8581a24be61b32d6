"""Whatever ends a run, the same command continues it, and it ends with the same bits.

Each test ends a run in another way and then starts the same command again. It compares every
weight, every moment of the optimizer and every loss with those of `whole`, a run that nothing
ended. A job under torchrun spends most of its seconds on imports, so ranks of the pool take the
place of torchrun's where torchrun adds nothing to what a row is about.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rig import KILLED, Job, PoolJob, Run, arguments, run_command

import checkpoint

STEPS = 13
SAVE_INTERVAL = 5
# Eight micro-batches per rank make a step long enough to end a run in the middle of it.
RUN = (
    f"--strategy fsdp --max_steps {STEPS} --save_interval {SAVE_INTERVAL} --keep_every 1 "
    "--global_batch_size 16 --micro_batch_size 1"
)
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
        started.append(PoolJob(arguments(tokens, tmp_path / "run", text)))
        return started[-1]

    yield call


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

# Who gets the signal: rank 1, both ranks as from Slurm, or torchrun with its ranks as from Ctrl-C
# in a terminal. The evaluations of the second row are longer than a step.
QUICK = """
SIGINT  | rank 1   |
SIGTERM | both     | --eval_interval 1 --eval_sequences 100
"""
SLOW = """
SIGUSR1 | rank 1   |
SIGHUP  | rank 1   |
SIGTERM | torchrun |
SIGINT  | torchrun |
"""
MORE = pytest.mark.slow(proves="torchrun with its whole process group, and further signals")


@pytest.mark.parametrize(
    "row",
    QUICK.strip().splitlines()
    + [pytest.param(row, marks=MORE) for row in SLOW.strip().splitlines()],
)
def test_a_signal_to_any_rank_stops_all_ranks_after_the_same_step(start, whole, pool, tokens, row):
    name, receiver, flags = (cell.strip() for cell in row.split("|"))
    number, flags = getattr(signal, name), f"{RUN} {flags}"
    run = start("torchrun" if receiver == "torchrun" else "pool", flags)
    if "--eval" in flags:  # the row of a step is there, but not yet the row of its evaluation
        run.until(lambda: len(run.rows()) > len(run.rows("val_loss")) >= SAVE_INTERVAL)
    else:
        run.until(lambda: len(run.rows()) > SAVE_INTERVAL)
    if receiver == "torchrun":
        os.killpg(run.process.pid, number)
    for rank in {"rank 1": run.ranks()[1:], "both": run.ranks()}.get(receiver, []):
        os.kill(rank, number)
    seen = run.rows()[-1]["step"]  # the rank is in step seen + 1, or in a later one
    assert run.wait() == (TORCHRUN_FAILED if receiver == "torchrun" else os.EX_TEMPFAIL)

    stopped = saved_steps(run.out)[-1]
    before = run.rows()
    assert stopped == before[-1]["step"] < STEPS
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
    finish(pool, tokens, run.out, flags)
    assert (run.out / "metrics.jsonl").read_text() == log  # it was finished


# --------------------------------------------------------------------------------------------------
# Kills


def signal_all(run: PoolJob, number: int) -> None:
    for rank in run.ranks():
        os.kill(rank, number)


def kill_all(run: PoolJob) -> None:
    signal_all(run, signal.SIGKILL)
    assert run.wait() == KILLED
    assert run.rows("end") == []


def test_a_kill_in_an_evaluation_loses_neither_the_save_nor_the_evaluation(
    start, whole, pool, tokens
):
    """Both are due at step 5. The save comes first, and the next start evaluates its step."""
    flags = f"{RUN} --eval_interval {SAVE_INTERVAL} --eval_sequences 400"
    run = start("pool", flags)
    run.until(lambda: saved_steps(run.out) == [SAVE_INTERVAL])
    kill_all(run)
    assert run.rows("val_loss") == []
    again = finish(pool, tokens, run.out, flags)
    assert [row["step"] for row in again.rows("val_loss")] == [5, 10, STEPS]
    assert_same(run.out, whole)


def test_a_run_killed_in_a_save_continues_from_the_one_before(start, whole, pool, tokens):
    """The next start saves more rarely, so the step whose save was interrupted has no other."""
    run = start("pool", f"{RUN} --save_interval 1")

    def stop_in_a_save() -> bool:
        # A checkpoint is complete from the moment at which it has its name.
        newest = checkpoint.list_checkpoints(run.out)[-1:]
        assert not any(checkpoint.verify(path) for path in newest)
        if len(run.rows()) < SAVE_INTERVAL + 2 or not incomplete(run.out):
            return False
        signal_all(run, signal.SIGSTOP)
        if incomplete(run.out):
            return True
        signal_all(run, signal.SIGCONT)
        return False

    run.until(stop_in_a_save)
    kill_all(run)
    saved, before = saved_steps(run.out)[-1], run.rows()
    assert 0 < saved < STEPS
    finish(pool, tokens, run.out)
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
