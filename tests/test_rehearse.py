"""A rehearsal of one rank finds what a real step of four ranks does."""

import dataclasses
from argparse import Namespace

import pytest
import torch
from rig import build_run, cells, resolve, train_step
from torch._subclasses.fake_tensor import FakeTensor

import dist
import optim
from tools import rehearse as rehearsing
from tools.rehearse import Recorder, Rehearsal, at_peak, rehearse

# A micro-batch is one sequence: four ranks accumulate a quarter of the global batch each, two tp
# groups a half. A rehearsal runs three of four micro-batches. The head of tinyllama is not tied.
CASES = """
ddp --model tinyllama-1.1b
hsdp --dp_shard 2 --dtype bfloat16 --global_batch_size 16 --grad_sync shard --optimizer muon
fsdp --tp 2 --n_layer 1 --model tinyllama-1.1b --global_batch_size 4 --optimizer muon \
--grad_sync micro_batch --reshard_after_forward false
"""


class RealRecorder(Recorder):
    """Records a step of real tensors."""

    def run(self, function, types, args, kwargs):
        return function(*args, **kwargs)

    def is_about_shapes(self, types) -> bool:
        return FakeTensor in types  # DTensor computes shapes with fake tensors

    def takes_memory(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has storage: it is not on the meta device, nor a wrapper of another."""
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
        return is_plain and tensor.device.type != "meta"


def both(argv: list[str]) -> tuple[Namespace, Rehearsal | None]:
    """Return what this rank does in a step of a run and, on the last rank, its rehearsal."""
    recorder = RealRecorder(fakes=None)
    with recorder, rehearsing.no_garbage_collection():
        run = build_run(argv)
        optimizer = recorder.follow(run.mesh, run.run, run.state)
        run.state = dataclasses.replace(run.state, optimizer=optimizer)
        steps = 2 if run.run.strategy == "ddp" else 1  # DDP replaces its buckets in the first step
        batches = run.batches
        for step in range(1, steps + 1):
            recorder.forget_counts()
            run.batches = recorder.batches(batches, [1] * run.run.grad_accum_steps)
            train_step(run, step)
    for block in recorder.live.values():
        assert block.size == block.reference().nbytes()  # storages may have been resized
    real = Namespace(
        peak=sum(at_peak(recorder.changes()).values()),
        state=recorder.state,
        communication=recorder.communication(),
        operations=list(recorder.operations.values()),
        flops=recorder.flops["computed"],
        parameters=sum(optim.local(weight).nbytes for weight in run.state.decoder.parameters()),
    )
    if run.start.world.rank < 3:
        return real, None
    torch.distributed.destroy_process_group()
    return real, rehearse(run.run, rank=3)


def operations(found: Namespace | Rehearsal) -> list[str]:
    """All but copies, of which gloo makes more when it scatters shards."""
    return sorted(repr(row) for row in found.operations if row.name != "copy_")


@pytest.mark.parametrize("strategy", [row for (row,) in cells(CASES)])
def test_a_rehearsed_step_matches_a_real_one(on_ranks, strategy):
    answers = on_ranks(4, both, f"--micro_batch_size 1 --strategy {strategy}")
    rehearsed = answers[-1][1]
    alike = answers[-1:] if "muon" in strategy else answers  # under Muon the ranks differ
    for real, _ in alike:
        assert rehearsed.peak == pytest.approx(real.peak, rel=0.05)
        assert sorted(rehearsed.communication, key=repr) == sorted(real.communication, key=repr)
        assert rehearsed.state == real.state
        assert real.state["parameters"] == real.parameters
        assert rehearsed.flops == real.flops
        assert operations(rehearsed) == operations(real)
        update = [row for row in real.operations if row.phase == "optimizer" and row.flops]
        assert bool(update) == ("muon" in strategy)


# --------------------------------------------------------------------------------------------------
# Layers

# Two and three units of each case are rehearsed, with the remainder of a block_group.
EXTENDED = """
fsdp --wrap block_group:2 --n_layer 13 --reshard_after_forward false
hsdp --wrap block --n_layer 6 --dp_shard 2 --tp 2 --activation_checkpointing selective
"""


def rehearse_by_layers(text: str) -> tuple[Rehearsal, Rehearsal]:
    """Return a rehearsal extended from a few layers, and one of all layers."""
    sizes = "--model tinyllama-1.1b --n_head 8 --n_kv_head 8 --d_model 32 --d_ff 64 --seq_len 32"
    text = f"{sizes} --micro_batch_size 1 --global_batch_size 8 --dtype bfloat16 --strategy {text}"
    run = resolve(text, size=8, device=torch.device("cuda"))
    found = rehearse(run, rank=3)
    with rehearsing.fake_group(3, 8):
        mesh = dist.make_mesh(rehearsing.fake_world(8, 3), (run.dp_replicate, run.dp_shard, run.tp))
        whole = rehearsing.run_step(run, mesh)
    return found, dataclasses.replace(whole, memory=at_peak(whole.changes), changes=[])


@pytest.mark.slow(proves="all layers, rehearsed one by one")
@pytest.mark.parametrize("text", [row for (row,) in cells(EXTENDED)])
def test_extending_a_few_layers_equals_rehearsing_all(pool, text):
    ((found, whole),) = pool(1, rehearse_by_layers, text)
    assert found == whole
