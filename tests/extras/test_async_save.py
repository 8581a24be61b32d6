"""--async_save: checkpoints that are written while training continues are those of other saves."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rig import ROOT, PoolJob, arguments, full_tensors

import checkpoint
import dist
from extras.async_save import AsyncSaver


def test_a_stopped_run_finishes_its_save_and_continues_from_it(train, tokens, tmp_path):
    """Each save has the tensors of its step; later steps, which change them, do not reach it."""
    flags = "--strategy fsdp --save_interval 1 --keep_every 1 --max_steps 20"
    whole = train(2, flags, "whole")
    running = PoolJob(arguments(tokens, tmp_path / "run", f"{flags} --async_save"))
    running.until(lambda: len(running.rows()) > 3)
    os.kill(running.ranks()[1], signal.SIGTERM)
    assert running.wait() == os.EX_TEMPFAIL
    newest = checkpoint.list_checkpoints(running.out)[-1]
    assert checkpoint.step_of(newest) == running.rows()[-1]["step"] < 20
    assert checkpoint.verify(newest) is None

    continued = train(2, f"{flags} --async_save")
    assert continued.status == 0, continued.error
    assert continued.steps() == whole.steps() == [*range(1, 21)]
    for row in continued.rows("blocking_seconds"):
        assert 0 < row["blocking_seconds"] < row["seconds"] < 60
    for step in (*range(1, 11), 20):
        found, expected = (
            full_tensors(checkpoint.step_path(run.out, step)) for run in (continued, whole)
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def save_twice(run: Path, size: int) -> tuple[list[int], bool]:
    """Save ones and, at once, twos; then ranks gather numbers. Return these, and success."""
    world = dist.join("cpu")
    keep = dict(keep_last=1, keep_every=1, extra_files={})
    saver = AsyncSaver(timedelta(seconds=20), run=run, report=lambda row, line: None, **keep)
    weight, gathered = torch.ones(size), []
    for step in (1, 2):
        saver.save({"weight": weight}, {"step": step})
        weight.fill_(step + 1)  # while the files of this step are written
    for number in range(20):
        found = [None] * world.size
        torch.distributed.all_gather_object(found, number)
        gathered += found
    saver.wait()
    return gathered, saver.failure is None


def test_a_save_waits_for_the_one_before_and_leaves_collectives_of_training_alone(pool, tmp_path):
    """Else step 1 would get weights of step 2, or a rank would gather what belongs to a save."""
    for gathered, succeeded in pool(2, save_twice, tmp_path, 20_000_000):
        assert succeeded
        assert gathered == [number for number in range(20) for _ in range(2)]
    for step in (1, 2):
        weight = full_tensors(checkpoint.step_path(tmp_path, step))["weight"]
        assert weight.eq(step).all()


class LateSaver(AsyncSaver):
    """Rank 1 begins to write only when rank 0 no longer waits for it."""

    def write(self, *arguments) -> None:
        time.sleep(3 * torch.distributed.get_rank())
        super().write(*arguments)


def save_late(run: Path) -> str:
    """The error with which the last save ends on this rank."""
    dist.join("cpu")
    keep = dict(keep_last=1, keep_every=1, extra_files={})
    saver = LateSaver(timedelta(seconds=1), run=run, report=lambda row, line: None, **keep)
    saver.save({"weight": torch.ones(3)}, {"step": 1})
    with pytest.raises(checkpoint.CheckpointError) as error:
        saver.close()
    return str(error.value)


def test_a_save_for_which_a_rank_is_too_late_fails_the_run(pool, tmp_path):
    assert all("step 1" in line for line in pool(2, save_late, tmp_path))
    assert checkpoint.list_checkpoints(tmp_path) == []


DIVERGE = """
import sys
from datetime import timedelta
from pathlib import Path
import torch, dist
from extras.async_save import AsyncSaver
dist.join("cpu")
options = dict(keep_last=1, keep_every=1, extra_files={}, report=lambda row, line: None)
saver = AsyncSaver(timedelta(seconds=20), run=Path(sys.argv[1]), **options)
saver.save({"weight": torch.ones(20_000_000)}, {"step": 1})
raise RuntimeError("training diverges in a later step")
"""


def test_a_process_that_fails_finishes_its_save(tmp_path):
    command = [sys.executable, "-c", DIVERGE, tmp_path]
    job = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert job.returncode == 1 and "training diverges" in job.stderr
    (path,) = checkpoint.list_checkpoints(tmp_path)
    assert checkpoint.verify(path) is None
