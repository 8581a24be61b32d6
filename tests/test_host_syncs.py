"""The host does not wait for the device in a step.

On a CPU the host never waits. The test counts everything that would make it wait for a GPU: reading
a tensor's value on the host, an operation whose result has a shape that depends on values, and
building a tensor on the host, which would then be copied to the GPU.
"""

import contextlib
from datetime import datetime
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, build_run, train_step

import metrics
import optim
import train
from runtime.profiling import HostSyncCounter, caller

# Functions that dispatch no torch operation on a CPU, so they are patched to be counted
CALLS = [(torch.Tensor, "tolist"), (torch.Tensor, "cpu"), (torch.Tensor, "numpy")]
CALLS += [(torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor")]

# Steps with and without statistics, and everything else that an update can do
FLAGS = "--micro_batch_size 1 --global_batch_size 4 --optim_metrics_interval 3"


def clip_in_every_way():
    """Make `--clip norm` run all clip strategies, one after another."""
    clips = list(optim.CLIPS.values())

    def clip(*arguments):
        return [each(*arguments) for each in clips][0]

    return mock.patch.dict(optim.CLIPS, norm=clip)


class HostSyncs(HostSyncCounter):
    """Counts what our files do that would make a host wait: {"x.py item": 1}."""

    def counting(self, owner, name: str):
        function = getattr(owner, name)

        def call(*args, **kwargs):
            self.count(name)
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    def count(self, operation: str) -> None:
        asker = Path(caller(skipping=__file__).filename)
        if ROOT in asker.parents and asker.parent != Path(__file__).parent:
            self.counts[f"{asker.name} {operation}"] += 1


def count_host_syncs(argv: list[str]) -> dict[str, int]:
    """Run train.py; return what would make the host wait from step 1 on, except evaluations."""
    syncs, stack = HostSyncs(), contextlib.ExitStack()
    build, step = train.build, train.train_step

    def build_with_a_frozen_norm(*arguments):
        state, forward = build(*arguments)
        if torch.distributed.get_world_size() == 1:
            state.model.norm.weight.requires_grad_(False)  # a parameter without a gradient
        return state, forward

    def first_step(*arguments):
        train.train_step = step
        for owner, name in CALLS:
            stack.enter_context(syncs.counting(owner, name))
        stack.enter_context(syncs)
        return step(*arguments)

    with (
        stack,
        clip_in_every_way(),
        mock.patch.object(train, "build", build_with_a_frozen_norm),
        mock.patch.object(train, "evaluate", lambda *_: 1.0),
        mock.patch.object(train, "train_step", first_step),
    ):
        assert train.main(argv) == 0
    return dict(syncs.counts)


MESHES = [("single", 1), ("ddp", 2), ("fsdp --optimizer muon", 2)]


@pytest.mark.parametrize("mesh, ranks", MESHES)
def test_the_host_reads_from_the_device_only_for_log_rows(on_ranks, mesh, ranks):
    """Steps 1, 5 and 6 of 6 are logged; steps 3 and 6 have statistics, which rank 0 reads."""
    text = f"--strategy {mesh} {FLAGS} --max_steps 6 --checkpoint none --log_interval 5"
    of_rows = {"metrics.py tensor": 3, "metrics.py tolist": 3}
    at_start = {"data.py _local_scalar_dense": 1}  # a seed of torch's DataLoader, on the host
    flag = {"agreement.py tensor": 6, "agreement.py numpy": 6}  # the stop request, on the host
    expected = of_rows | at_start | flag
    rank_0, *others = on_ranks(ranks, count_host_syncs, text)
    assert rank_0 == expected | {"optim.py tolist": 2}
    assert others == [expected] * (ranks - 1)


def cuda_steps(argv: list[str]) -> int:
    run = build_run(argv)

    rates = metrics.Rates(run.world.device, run.run.tokens_per_step, 1.0, None)
    log = metrics.Log(Path(run.run.out), run.run, rates, 0, datetime.now())
    with clip_in_every_way():
        for step in (1, 2, 3):  # the first steps allocate
            train_step(run, step)
        torch.cuda.set_sync_debug_mode("error")
        for step in (4, 5, 6):
            values, _ = train_step(run, step)  # reading a table would wait
            log.write_arrived_row()
            log.send_row(step, values | run.batches.take_waits())
    torch.cuda.set_sync_debug_mode("default")
    with log.pause():  # which waits for the row
        return 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_step_on_cuda_does_not_synchronise(on_ranks, strategy):
    assert on_ranks(1, cuda_steps, f"--strategy {strategy} {FLAGS} --device cuda") == [0]
