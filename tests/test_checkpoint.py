"""What tests/core does not need: saves in the log, several hosts, and memory."""

import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import (
    build_run,
    call_train,
    documented_fields,
    flags,
    full_tensor,
    last_checkpoint,
    make_saver,
    rows,
    tensors,
)

import checkpoint
import dist
from config import parse
from optim import local
from start import find_origin
from tools.hf import consolidate

TEN_STEPS = "--max_steps 10 --dtype float32 --save_interval 5 --keep_every 1"
RANKS_OF_MESH = {"ddp --async_save": 2, "hsdp --dp_shard 2": 4}


@pytest.fixture(scope="module")
def whole(pool, tokens, tmp_path_factory) -> dict[str, Path]:
    """{mesh: folder of an uninterrupted run of 10 steps, with checkpoints at steps 5 and 10}."""
    root = tmp_path_factory.mktemp("whole")
    runs = {}
    for mesh, ranks in RANKS_OF_MESH.items():
        runs[mesh] = root / mesh.replace(" ", "")
        argv = flags(f"--data {tokens} --out {runs[mesh]} {TEN_STEPS} --strategy {mesh}")
        assert pool(ranks, call_train, argv) == [0] * ranks
    return runs


def load_and_count(argv: list[str], path: Path) -> tuple[int, int]:
    """Load a checkpoint; return the number of elements copied, and the number on this rank."""
    state = dict(checkpoint.flatten(build_run(argv).state.tensors))
    with torch.profiler.profile(record_shapes=True) as profile:
        checkpoint.load_state(path, state)
    copies = [event for event in profile.events() if event.name == "aten::copy_"]
    copied = sum(math.prod(event.input_shapes[0]) for event in copies)
    loaded = {name: full_tensor(tensor) for name, tensor in state.items()}
    torch.testing.assert_close(loaded, tensors(path), rtol=0, atol=0, equal_nan=True)
    return copied, sum(local(tensor).numel() for tensor in state.values())


@pytest.mark.slow(proves="the memory of loading a large checkpoint")
def test_each_rank_reads_only_its_shards_of_a_full_checkpoint(on_ranks, whole, tmp_path):
    path = tmp_path / "full"
    consolidate(last_checkpoint(whole["hsdp --dp_shard 2"]), path)
    text = "--dtype float32 --strategy fsdp --tp 2"
    for copied, held in on_ranks(4, load_and_count, text, path):
        assert copied == held


@pytest.mark.parametrize("mesh", ["ddp --async_save", "hsdp --dp_shard 2"])
def test_a_save_logs_its_size_and_duration(whole, mesh):
    row, _ = [row for row in rows(whole[mesh], "event") if row["event"] == "checkpoint"]
    path, _ = checkpoint.list_checkpoints(whole[mesh])
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    fields = documented_fields("reference.md", "rows | fields", "checkpoint")
    assert row.keys() == fields - {"checkpoint", "checkpoint_failed", "error"} | {"time"}
    assert row["step"] == 5
    assert row["path"] == str(path)
    assert row["bytes"] == sum(file.stat().st_size for file in files)
    assert 0 < row["blocking_seconds"] <= row["seconds"]
    assert ("async" in mesh) == (row["blocking_seconds"] < row["seconds"])


def flip_a_bit(path: Path, name: str = "rank-00000.safetensors", place: int = -5) -> None:
    contents = bytearray((path / name).read_bytes())
    contents[place] ^= 4
    (path / name).write_bytes(contents)


def find_damage_on_two_hosts(argv: list[str]) -> str:
    """Return the error of a start on two hosts of one rank each."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    world = dist.start("cpu")
    try:
        path = find_origin(parse(argv), world)[1].path
    except (checkpoint.CheckpointError, dist.RankError) as error:
        return str(error)
    return f"{path} verifies"


def test_ranks_of_two_hosts_verify_all_files_together(whole, on_ranks, tmp_path):
    """One checkpoint has a damaged file that rank 0 verifies, the other one that rank 1 does."""
    out = tmp_path / "run"
    shutil.copytree(whole["ddp --async_save"], out)
    damaged = ["index.json", "rank-00000.safetensors"]
    for path, name in zip(checkpoint.list_checkpoints(out), damaged, strict=True):
        flip_a_bit(path, name)
    for error in on_ranks(2, find_damage_on_two_hosts, f"{TEN_STEPS} --strategy ddp"):
        for name in damaged:
            assert f"{name} has changed since it was written" in error


# --------------------------------------------------------------------------------------------------
# Memory


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
