"""A sharded checkpoint as one file: tools.checkpoint consolidate."""

import warnings
import weakref
import zlib
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from conftest import (
    TEN_STEPS,
    file_names,
    last_checkpoint,
    memory_taken,
    rows,
    tensors,
)
from test_saver import RANKS_FILE, save_with_extra_files

import checkpoint
from runtime import consolidate
from runtime.saver import Saver

FULL_FILES = ["full.safetensors", "index.json", "manifest.json"]


def test_consolidate_writes_a_complete_checkpoint_that_a_run_continues_from(
    whole, run, tmp_path, command
):
    """In a folder that is created, without a warning."""
    path = whole["hsdp --dp_shard 2"] / "checkpoints/step-00000005"
    out = tmp_path / "new/one"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, said, error = command("consolidate", path, out)
    assert (status, error) == (0, "") and said.startswith(f"{out}: one file, ")
    assert file_names(out.parent) == ["one"]
    torch.testing.assert_close(one_file(out), tensors(path), rtol=0, atol=0, equal_nan=True)
    source = checkpoint.read_manifest(path)
    manifest = checkpoint.read_manifest(out)
    shards = {f"rank-{rank:05d}.safetensors" for rank in range(4)}
    assert source.pop("files").keys() == shards | {"index.json"}
    assert manifest.pop("files").keys() == {"full.safetensors", "index.json"}
    assert manifest == source
    status, said, _ = command("verify", out)
    assert (status, "complete and unchanged: 2 files" in said) == (0, True)
    resumed = rows(run(2, f"{TEN_STEPS} --strategy fsdp --resume {out}"))
    losses = [row["loss"] for row in rows(whole["hsdp --dp_shard 2"])[5:]]
    assert [row["loss"] for row in resumed] == pytest.approx(losses, rel=1e-5)


def test_consolidate_copies_the_extra_files(pool, tmp_path, command):
    pool(2, save_with_extra_files, tmp_path)
    out = tmp_path / "one"
    assert command("consolidate", last_checkpoint(tmp_path), out)[0] == 0
    assert (out / "my.tiktoken").read_bytes() == RANKS_FILE


def test_consolidate_leaves_nothing_on_a_disk_that_fills_up(whole, small_disk, command):
    path = last_checkpoint(whole["hsdp --dp_shard 2"])
    (small_disk / "other").write_bytes(bytes(900_000))
    status, _, error = command("consolidate", path, small_disk / "new/one")
    assert (status, error.count("\n")) == (1, 1)
    line = f"tools.checkpoint: error: cannot write {small_disk}/new/one: [Errno 28] No space left"
    assert error.startswith(line)
    assert not list(small_disk.glob("new/*"))


def one_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that verifies and is one file, with a manifest."""
    assert file_names(path) == FULL_FILES
    assert checkpoint.verify(path) is None
    return tensors(path)


def test_one_file_is_written_with_one_tensor_in_memory(tmp_path):
    alive, at_once = weakref.WeakSet(), []

    def read(name: str) -> torch.Tensor:
        tensor = torch.full((30, 40), float(name))
        alive.add(tensor)
        at_once.append(len(alive))
        return tensor

    layout = {str(number): torch.empty(30, 40, device="meta") for number in range(20)}
    entries = consolidate.write_full(tmp_path, layout, read)
    crc = zlib.crc32((tmp_path / "full.safetensors").read_bytes())
    assert entries["full.safetensors"]["crc32"] == f"{crc:08x}"
    assert len(at_once) == 20 and max(at_once) == 1
    loaded = tensors(tmp_path)
    assert [loaded[str(number)][2, 3].item() for number in range(20)] == list(range(20))


def test_loading_and_converting_take_little_memory(tmp_path, one_rank):
    """Of a mapped file, the pages of one tensor at most: 8 MB of 192."""
    state = {str(number): torch.ones(1024, 2048) for number in range(24)}
    saver = Saver(tmp_path, False, 0, 0, timedelta(seconds=20))
    saver.save(state, {"step": 1})
    path = last_checkpoint(tmp_path)
    assert memory_taken(lambda: checkpoint.load_state(path, state)) < 90e6
    assert memory_taken(lambda: consolidate.consolidate(path, tmp_path / "one")) < 90e6
