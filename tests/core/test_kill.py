"""Whatever ends a run, the same command continues it, and it ends with the same bits.

Each row of a table ends a run in another way and then starts the same command again. The test
compares every weight, every moment of the optimizer and every loss with those of `whole`, a run
that nothing ended. A job under torchrun spends most of its seconds on imports, so ranks of the pool
take the place of torchrun's where torchrun adds nothing to what a row is about.
"""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import rig
from rig import KILLED, Job, PoolJob, arguments, assert_same_bits, cells

import checkpoint

STEPS = 13
SAVE_INTERVAL = 5
# Eight micro-batches per rank make a step long enough to end a run in the middle of it.
RUN = (
    f"--strategy fsdp --max_steps {STEPS} --save_interval {SAVE_INTERVAL} --keep_every 1 "
    "--global_batch_size 16 --micro_batch_size 1"
)


@pytest.fixture(scope="module")
def whole(pool, tokens, tmp_path_factory) -> Path:
    """The folder of the run that nothing ends."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert rig.train(2, tokens, out, RUN).status == 0
    return out


def saved_steps(out: Path) -> list[int]:
    """The steps of all checkpoints, each of which must be valid."""
    paths = checkpoint.list_checkpoints(out)
    assert [checkpoint.verify(path) for path in paths] == [None] * len(paths)
    return [checkpoint.step_of(path) for path in paths]


def incomplete(out: Path) -> list[Path]:
    """What lies beside the checkpoints: folders whose names are not those of checkpoints."""
    entries = out.glob("checkpoints/*")
    return [path for path in entries if checkpoint.step_of(path) is None]


# --------------------------------------------------------------------------------------------------
# When a run is ended


def in_a_step(run: Job | PoolJob) -> bool:
    return len(run.rows()) > SAVE_INTERVAL


def in_an_evaluation(run: PoolJob) -> bool:
    """Of each step: the row of a step is there, but not yet the row of its evaluation."""
    return len(run.rows()) > len(run.rows("val_loss")) >= SAVE_INTERVAL


def in_the_last_evaluation(run: PoolJob) -> bool:
    return len(run.rows()) == STEPS


def after_a_save(run: PoolJob) -> bool:
    return saved_steps(run.out) == [SAVE_INTERVAL]


def after_the_last_save(run: PoolJob) -> bool:
    return STEPS in saved_steps(run.out)


def in_a_save(run: PoolJob) -> bool:
    """Stop the ranks as soon as there is an incomplete checkpoint; let them go on if it is gone."""
    # A checkpoint is complete from the moment at which it has its name.
    newest = checkpoint.list_checkpoints(run.out)[-1:]
    assert not any(checkpoint.verify(path) for path in newest)
    if not in_a_step(run) or not incomplete(run.out):
        return False
    for rank in run.ranks():
        os.kill(rank, signal.SIGSTOP)
    if not incomplete(run.out):
        for rank in run.ranks():
            os.kill(rank, signal.SIGCONT)
    return bool(incomplete(run.out))


MOMENTS = [in_a_step, in_an_evaluation, in_the_last_evaluation]
MOMENTS += [after_a_save, after_the_last_save, in_a_save]

# --------------------------------------------------------------------------------------------------
# How

# signal | who gets it | when | further flags | steps that are evaluated in the end
# Both ranks get a signal from Slurm, and torchrun with its ranks from Ctrl-C in a terminal. Steps 5
# and 13 are saved before they are evaluated, so a kill between the two loses neither.
QUICK = """
SIGUSR1 | rank 1   | in_a_step              |                                        | 13
SIGTERM | both     | in_an_evaluation       | --eval_interval 1 --eval_sequences 100 | 1-13
SIGINT  | rank 1   | in_the_last_evaluation | --eval_sequences 200                   | 13
SIGKILL | both     | after_a_save           | --eval_interval 5 --eval_sequences 200 | 5 10 13
SIGKILL | both     | after_the_last_save    | --eval_sequences 200                   | 13
SIGKILL | both     | in_a_save              | --save_interval 1                      | 13
"""
SLOW = """
SIGTERM | torchrun | in_a_step              |                                        | 13
SIGINT  | torchrun | in_a_step              |                                        | 13
SIGHUP  | rank 1   | in_a_step              |                                        | 13
"""
MORE = pytest.mark.slow(proves="torchrun with its whole process group, and another signal")


@pytest.mark.parametrize(
    "name, receiver, moment, more, evaluated",
    [*cells(QUICK), *[pytest.param(*row, marks=MORE) for row in cells(SLOW)]],
)
def test_the_same_command_continues_a_run_that_was_ended(
    job, train, tokens, tmp_path, whole, name, receiver, moment, more, evaluated
):
    number, flags = getattr(signal, name), f"{RUN} {more}"
    (is_now,) = [function for function in MOMENTS if function.__name__ == moment]
    if receiver == "torchrun":
        run = job(2, flags)
    else:
        run = PoolJob(arguments(tokens, tmp_path / "run", flags))
    run.until(lambda: is_now(run))
    if receiver == "torchrun":
        os.killpg(run.process.pid, number)
    for rank in {"rank 1": run.ranks()[1:], "both": run.ranks()}.get(receiver, []):
        os.kill(rank, number)
    seen = run.rows()[-1]["step"]  # the rank is in step seen + 1, or in a later one
    status = run.wait()

    before, saved = run.rows(), saved_steps(run.out)[-1]
    if number == signal.SIGKILL:
        assert status == KILLED
        assert saved > 0 and run.rows("val_loss") == []
    else:
        # The status of torchrun, which got the signal as well, is its own.
        assert status != 0 if receiver == "torchrun" else status == os.EX_TEMPFAIL
        assert saved == before[-1]["step"] <= seen + 1 + 2
        assert f"stopped after step {saved}; the same command continues" in run.printed()

    again = train(2, flags)
    assert again.status == 0, again.error
    assert [row["step"] for row in before[:saved]] == [*range(1, 1 + saved)]
    # The rows contain times, so those of a step that is trained twice would differ.
    assert again.rows()[:saved] == before[:saved]
    steps = range(1, 14) if evaluated == "1-13" else map(int, evaluated.split())
    assert [row["step"] for row in again.rows("val_loss")] == [*steps]
    assert_same_bits(again.out, whole)
    assert saved_steps(again.out)[-1] == STEPS
    assert incomplete(again.out) == []


# --------------------------------------------------------------------------------------------------
# Ranks of torchrun that die or hang


@pytest.mark.slow(proves="torchrun's own restart; test_launch.py has the keys of its store")
def test_torchrun_starts_ranks_again_of_which_one_was_killed(job, whole):
    run = job(2, RUN, "run", "--max-restarts", "1")
    run.until(lambda: in_a_step(run))
    os.kill(run.ranks()[0], signal.SIGKILL)
    assert run.wait(120) == 0, run.printed()
    assert f"continuing from {checkpoint.step_path(run.out, SAVE_INTERVAL)}" in run.printed()
    assert_same_bits(run.out, whole)


@pytest.mark.slow(proves="the time-out of a collective, and torchrun's wait")
@pytest.mark.parametrize("hung", [0, 2])
def test_a_rank_that_hangs_ends_the_job_by_a_line_that_names_it(job, hung):
    """A collective waits --timeout for it, rank 0 10 s more, the others 20 s, and torchrun 30 s."""
    running = job(3, "--strategy fsdp --global_batch_size 6 --max_steps 100000 --timeout 6")
    running.until(running.rows)
    os.kill(running.ranks()[hung], signal.SIGSTOP)
    began = time.monotonic()
    running.until(lambda: "error" in running.printed(), 40)
    assert time.monotonic() - began > 5, running.printed()
    assert running.wait() == 1  # torchrun's, of a job that failed
    lost = {0: "while waiting for send/recv from rank 0", 2: "Ranks 2 failed to pass"}
    line = f"a rank died or hangs \\(.*{lost[hung]}"
    assert re.search(line, running.printed()), running.printed()
