"""Saving and loading: the order on disk, memory, the log, and a weight that is not finite."""

import ctypes
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from old import documented_fields, listen, make_saver, memory_taken, rows
from rig import last_checkpoint
from torch.distributed import tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import checkpoint
import model
from tools.hf import consolidate


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


def test_a_save_logs_its_size_and_duration(run):
    out = run(2, "--max_steps 2 --strategy ddp --async_save")
    (row,) = rows(out, "bytes")
    files = [file for file in last_checkpoint(out).iterdir() if file.name != "manifest.json"]
    fields = documented_fields("reference.md", "rows | fields", "checkpoint")
    assert row.keys() == fields - {"checkpoint", "checkpoint_failed", "error"} | {"time"}
    assert (row["step"], row["path"]) == (2, str(last_checkpoint(out)))
    assert row["bytes"] == sum(file.stat().st_size for file in files)
    assert 0 < row["blocking_seconds"] < row["seconds"]


def listen_with_nan(argv: list[str], odd: int) -> tuple[int, str, str]:
    """Run train.py. In its fourth forward pass, a weight of rank `odd` becomes nan."""
    passes = []

    def corrupt(module: torch.nn.Module, inputs: tuple) -> None:
        if not (isinstance(module, model.Transformer) and torch.is_grad_enabled()):
            return
        passes.append(module)
        if len(passes) == 4 and int(os.environ["RANK"]) == odd:
            weight = module.get_parameter("blocks.0.mlp.down.weight").detach()
            weight.to_local().view(-1)[0] = torch.nan

    with torch.nn.modules.module.register_module_forward_pre_hook(corrupt):
        return listen(argv)


def test_a_weight_that_is_not_finite_on_one_rank_is_not_saved(on_ranks, tmp_path):
    out = tmp_path / "run"
    text = "--strategy fsdp --async_save --max_steps 5 --save_interval 2"
    answers = on_ranks(2, listen_with_nan, text, 1)
    assert [status for status, _, _ in answers] == [1] * 2
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(out)] == [2]
    failed = rows(out, "error")
    assert [(row["step"], row["event"]) for row in failed] == [
        (4, "checkpoint_failed"),
        (5, "checkpoint_failed"),
    ]


# --------------------------------------------------------------------------------------------------
# Memory


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


def private_memory_taken(task: Callable[[], None]) -> int:
    """Run the task; return the growth of the memory that the kernel cannot reclaim, in bytes.

    So the pages of mapped files do not count.
    """
    sizes, is_done = [], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.001):
            status = Path("/proc/self/status").read_text()
            sizes.append(1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(0.02)
    task()
    is_done.set()
    watcher.join()
    return max(sizes) - sizes[0]


def test_loading_and_consolidating_take_little_memory(tmp_path, one_rank):
    """They need memory for a few tensors of 4 MB at a time, of 48."""
    state = {str(number): torch.ones(1024, 1024) for number in range(48)}
    saver = make_saver(tmp_path, False, 0, 0)
    saver.save(state, {"step": 1})
    path = last_checkpoint(tmp_path)
    assert private_memory_taken(lambda: checkpoint.load_state(path, state)) < 20e6
    assert private_memory_taken(lambda: consolidate(path, tmp_path / "one")) < 60e6
