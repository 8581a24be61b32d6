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
from rig import last_checkpoint

import checkpoint
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


def test_a_weight_that_is_not_finite_on_one_rank_is_not_saved(train, tmp_path):
    """Its run starts from weights of which one, in the part of rank 1, is nan."""
    first = train(1, "--max_steps 1", "first")
    weights = first.weights()
    weights["model.blocks.0.mlp.down.weight"][-1, 0] = torch.nan
    manifest = checkpoint.read_manifest(last_checkpoint(first.out))
    checkpoint.save_state(checkpoint.step_path(tmp_path / "nan", 1), weights, manifest)
    run = train(2, f"--strategy fsdp --init_from {tmp_path}/nan --save_interval 2")
    assert run.status == 1
    assert run.steps() == []
    failed = [(row["step"], row["event"]) for row in run.rows("error")]
    assert failed == [(step, "checkpoint_failed") for step in (2, 4, 5)]


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
    # Half of all: glibc may keep freed tensors (84 MB once, 8 to 30 MB otherwise).
    assert memory_taken(lambda: consolidate(path, tmp_path / "one")) < 100
    options = dict(run=tmp_path, keep_last=1, keep_every=0, extra_files={})
    saver = AsyncSaver(timedelta(seconds=20), report=lambda row, line: None, **options)
    assert memory_taken(lambda: (saver.save(state, {"step": 2}), saver.close())) < 1.15 * 201
