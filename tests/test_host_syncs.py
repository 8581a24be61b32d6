"""On CUDA, where it matters, no step makes the host wait. tests/core counts on CPUs."""

import pytest
import torch
from conftest import build_run, train_step

from log import Log

# Everything that an update can do, but statistics, which wait
FLAGS = "--micro_batch_size 1 --global_batch_size 4 --device cuda"


def cuda_steps(argv: list[str]) -> int:
    run = build_run(argv)
    log = Log(run.run, run.start.world.device, flops_per_token=1, step=0)
    for step in (1, 2, 3):  # the first steps allocate
        train_step(run, step)
    torch.cuda.set_sync_debug_mode("error")
    for step in (4, 5, 6):
        columns, _ = train_step(run, step)
        log.write_arrived_row()
        log.row(step, step, 0.1, columns, run.state.data_wait)
    torch.cuda.set_sync_debug_mode("default")
    with log.pause():  # which waits for the row
        return 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("flags", ["--strategy single", "--strategy fsdp --clip adaptive"])
def test_a_step_on_cuda_does_not_synchronise(on_ranks, flags):
    assert on_ranks(1, cuda_steps, f"{flags} {FLAGS}") == [0]
