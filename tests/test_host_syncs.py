"""On CUDA, where it matters, no step makes the host wait. tests/core counts on CPUs."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import build_run, train_step

import optim
from log import Log

# Steps with and without statistics, and everything else that an update can do
FLAGS = "--micro_batch_size 1 --global_batch_size 4 --optim_metrics_interval 3"


def clip_in_every_way():
    """Make `--clip norm` run all clip strategies, one after another."""
    clips = list(optim.CLIPS.values())

    def clip(*arguments):
        return [each(*arguments) for each in clips][0]

    return mock.patch.dict(optim.CLIPS, norm=clip)


def cuda_steps(argv: list[str]) -> int:
    run = build_run(argv)

    log = Log(Path(run.run.out), run.run, run.start.world.device, flops_per_token=1.0)
    with clip_in_every_way():
        for step in (1, 2, 3):  # the first steps allocate
            train_step(run, step)
        torch.cuda.set_sync_debug_mode("error")
        for step in (4, 5, 6):
            columns, _ = train_step(run, step)  # reading a table would wait
            log.write_arrived_row()
            log.row(step, step, **columns, spread={"data_wait": run.batches.take_wait()})
    torch.cuda.set_sync_debug_mode("default")
    with log.pause():  # which waits for the row
        return 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_step_on_cuda_does_not_synchronise(on_ranks, strategy):
    assert on_ranks(1, cuda_steps, f"--strategy {strategy} {FLAGS} --device cuda") == [0]
