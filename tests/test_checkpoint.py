"""What a save writes in which order, which weights it refuses, and how much memory it takes."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from rig import Run, run_command

import checkpoint
import model
from extras.async_save import AsyncSaver
from tools.hf import consolidate


def test_a_save_is_synced_before_and_after_its_rename(tmp_path):
    """After a power failure, a folder with the name of a checkpoint has all its files."""
    calls = []

    def see(frame, event: str, function) -> None:
        if event == "c_call" and function in (os.fsync, os.rename):
            calls.append(function.__name__)

    path = checkpoint.step_path(tmp_path, 1)
    sys.setprofile(see)
    checkpoint.save_state(path, {"weight": torch.ones(3)}, {"step": 1}, {"x.json": b"x"})
    sys.setprofile(None)
    # x.json, the index, the rank's file, the manifest and their folder; then both folders above
    assert calls == [*["fsync"] * 5, "rename", *["fsync"] * 2]


def run_with_nan(argv: list[str]) -> tuple[int, str, str]:
    """Run train.command. In its fourth forward pass, a weight of rank 1 becomes nan."""
    passes = []

    def corrupt(module: torch.nn.Module, inputs: tuple) -> None:
        if not (isinstance(module, model.Transformer) and torch.is_grad_enabled()):
            return
        passes.append(module)
        if len(passes) == 4 and os.environ["RANK"] == "1":
            weight = module.get_parameter("blocks.0.mlp.down.weight").detach()
            weight.to_local().view(-1)[0] = torch.nan

    with torch.nn.modules.module.register_module_forward_pre_hook(corrupt):
        return run_command(argv)


def test_a_weight_that_is_not_finite_on_one_rank_is_not_saved(on_ranks, tmp_path):
    answers = on_ranks(2, run_with_nan, "--strategy fsdp --async_save --save_interval 2")
    assert [status for status, _, _ in answers] == [1] * 2
    run = Run(tmp_path / "run", *answers[0])
    assert run.steps() == [2]
    failed = [(row["step"], row["event"]) for row in run.rows("error")]
    assert failed == [(step, "checkpoint_failed") for step in (4, 5)]


# --------------------------------------------------------------------------------------------------
# Memory


def memory_taken(task: Callable[[], object]) -> float:
    """Run the task; return by how many MB the memory grew that the kernel cannot reclaim.

    So the pages of mapped files do not count.
    """
    sizes, is_done = [], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.001):
            status = Path("/proc/self/status").read_text()
            sizes.append(int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1000)

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(0.02)
    task()
    is_done.set()
    watcher.join()
    return max(sizes) - sizes[0]


def test_saving_and_loading_and_consolidating_take_little_memory(tmp_path, one_rank):
    """They need memory for a few tensors of 4 MB at a time, of 192 MB; --async_save copies all."""
    state = {str(number): torch.ones(1024, 1024) for number in range(48)}
    path = checkpoint.step_path(tmp_path, 1)
    assert memory_taken(lambda: checkpoint.save_state(path, state, {"step": 1})) < 20
    assert memory_taken(lambda: checkpoint.load_state(path, state)) < 20
    assert memory_taken(lambda: consolidate(path, tmp_path / "one")) < 60
    options = dict(run=tmp_path, keep_last=1, keep_every=0, extra_files={})
    saver = AsyncSaver(timedelta(seconds=20), report=lambda row, line: None, **options)
    assert memory_taken(lambda: (saver.save(state, {"step": 2}), saver.close())) < 1.15 * 201
