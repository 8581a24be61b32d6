"""Saving: the order on disk, the memory of a save, and a weight of one rank that is corrupted."""

import ctypes
import os
import sys
from pathlib import Path

import pytest
import torch
from conftest import listen, make_saver, memory_taken, rows
from torch.distributed import tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import checkpoint
import model


def test_a_save_is_synced_before_and_after_its_rename(tmp_path, one_rank):
    """After a power failure, a folder with the name of a checkpoint has all its files."""
    calls = []

    def see(frame, event: str, function) -> None:
        if event == "c_call" and function in (os.fsync, os.rename):
            calls.append(function.__name__)

    saver = make_saver(tmp_path, False, 0, 0, extra_files={"x.json": b"x"})
    sys.setprofile(see)
    saver.save({"weight": torch.ones(3)}, {"step": 1})
    sys.setprofile(None)
    assert saver.failure is None
    # x.json, the index, the rank's file, the manifest and their folder; then both folders above
    assert calls == [*["fsync"] * 5, "rename", *["fsync"] * 2]


def memory_of_a_save(folder: Path, async_save: bool) -> float:
    """The peak of host memory that a save needs, as a multiple of the rank's shard."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    weights = {str(i): tensor.ones(1024, 4096, device_mesh=mesh) for i in range(16)}
    state = {name: whole.redistribute(placements=[Shard(0)]) for name, whole in weights.items()}
    del weights
    saver = make_saver(folder, async_save, 1, 0)
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return free memory to the system first
    taken = memory_taken(lambda: (saver.save(state, {"step": 1}), saver.wait()))
    assert saver.failure is None
    return taken / sum(weight.to_local().nbytes for weight in state.values())


@pytest.mark.slow(proves="a checkpoint that is larger than what Python needs")
@pytest.mark.parametrize("async_save, most", [(False, 0.3), (True, 1.1)])
def test_a_save_takes_no_more_host_memory_than_its_shard(pool, tmp_path, async_save, most):
    for multiple in pool(2, memory_of_a_save, tmp_path, async_save):
        assert multiple < most


def listen_with_nan(argv: list[str], odd: int) -> tuple[int, str, str]:
    """Run train.py. In its fourth forward pass, a weight of rank `odd` becomes nan."""
    passes = []

    def corrupt(module: torch.nn.Module, inputs: tuple) -> None:
        if not (isinstance(module, model.Transformer) and torch.is_grad_enabled()):
            return
        passes.append(module)
        if len(passes) == 4 and int(os.environ["RANK"]) == odd:
            weight = module.get_parameter("blocks.0.mlp.down.weight").detach()
            getattr(weight, "_local_tensor", weight).view(-1)[0] = torch.nan

    with torch.nn.modules.module.register_module_forward_pre_hook(corrupt):
        return listen(argv)


def test_a_weight_that_is_not_finite_on_one_rank_is_not_saved(on_ranks, tmp_path):
    out = tmp_path / "run"
    text = "--strategy hsdp --dp_shard 2 --async_save --max_steps 5 --save_interval 2"
    answers = on_ranks(4, listen_with_nan, f"{text} --global_batch_size 4", 3)
    assert [status for status, _, _ in answers] == [1] * 4
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(out)] == [2]
    assert [row["step"] for row in rows(out, "error")] == [4, 5]
    (failed, _) = rows(out, "error")
    assert failed["event"] == "checkpoint_failed" and "not finite" in failed["error"]
