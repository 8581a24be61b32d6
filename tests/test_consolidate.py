"""A sharded checkpoint as one file: tools.checkpoint consolidate, and --checkpoint full."""

import contextlib
import math
import os
import shutil
import subprocess
import warnings
import weakref
import zlib
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    TEN_STEPS,
    file_names,
    flags,
    last_checkpoint,
    listen,
    memory_taken,
    rows,
    tensors,
)
from test_saver import RANKS_FILE, save_with_extra_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

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


# --------------------------------------------------------------------------------------------------
# --checkpoint full


def one_file(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint that verifies and is one file, with a manifest."""
    assert file_names(path) == FULL_FILES
    assert checkpoint.verify(path) is None
    return tensors(path)


def test_checkpoint_full_leaves_one_file_where_the_run_ends(whole):
    """Bit for bit what a sharded one holds: test_five_steps_and_five_more_are_ten."""
    middle, last = checkpoint.list_checkpoints(whole["fsdp"])
    assert checkpoint.read_manifest(last)["step"] == 10
    assert len(one_file(last)) == 64
    assert "rank-00003.safetensors" in file_names(middle)
    assert file_names(whole["fsdp"] / "checkpoints") == [middle.name, last.name]


def test_a_disk_without_room_for_one_file_leaves_the_shards(pool, tokens, small_disk):
    out = small_disk / "run"
    (small_disk / "other").write_bytes(bytes(300_000))
    argv = flags(f"--data {tokens} --out {out} --max_steps 1 --strategy fsdp --checkpoint full")
    answers = pool(2, listen, argv)
    path = last_checkpoint(out)
    expected = tensors(path)
    (status, _, error), other = answers
    assert status == 1
    assert f"cannot write {path}: [Errno 28] No space left on device; " in error
    assert error.endswith(f"{path} stays in the sharded format\n") and error.count("\n") == 1
    assert other == (0, "", "")  # the other rank has ended: it trained to the end
    assert "saved" in answers[0][1] and "goodput" in answers[0][1]  # the training succeeded
    assert file_names(out / "checkpoints") == [path.name]
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    ((status, said, _), _) = pool(2, listen, argv)
    assert (
        status == 0 and "is finished" in said and f"consolidated {path} in full.safetensors" in said
    )
    torch.testing.assert_close(one_file(path), expected, rtol=0, atol=0, equal_nan=True)


def save_two_tensors(run: Path) -> None:
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    saver = Saver(run, False, 0, 0, timedelta(seconds=20))
    sharded = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])
    saver.save({"model": {"a": sharded, "b": torch.ones(2)}}, {"step": 5})


@pytest.fixture
def shards(pool, tmp_path) -> Path:
    """A sharded checkpoint of two ranks, to consolidate."""
    pool(2, save_two_tensors, tmp_path / "run")
    return last_checkpoint(tmp_path / "run")


class Killed(BaseException):
    """Ends all work at once, as a signal does: what would tidy up raises it again."""


def replace_until_killed(path: Path, operation: float) -> int:
    """Kill at the n-th change of a directory or flush of a file; return how many were begun."""
    begun = 0

    def watched(function):
        def call(*args, **kwargs):
            nonlocal begun
            begun += 1
            if begun >= operation:
                raise Killed
            return function(*args, **kwargs)

        return call

    names = ("replace", "rename", "unlink", "rmdir", "mkdir", "fsync")
    functions = {name: watched(getattr(os, name)) for name in names}
    with mock.patch.multiple(os, **functions), contextlib.suppress(Killed):
        consolidate.replace_shards(path)
    return begun


def test_a_consolidation_killed_at_any_moment_loses_nothing(shards):
    expected = tensors(shards)
    kept = shutil.copytree(shards, shards.with_name("kept"))
    operations = replace_until_killed(kept, math.inf)
    assert operations > 10
    for operation in range(1, operations + 1):
        shutil.rmtree(kept)
        shutil.copytree(shards, kept)
        replace_until_killed(kept, operation)
        assert checkpoint.verify(kept) is None
        torch.testing.assert_close(tensors(kept), expected, rtol=0, atol=0, equal_nan=True)
        consolidate.replace_shards(kept)
        torch.testing.assert_close(one_file(kept), expected, rtol=0, atol=0, equal_nan=True)
        assert file_names(kept.parent) == [kept.name, shards.name]


def test_files_that_a_host_sees_late_are_waited_for_but_not_forever(shards, tmp_path):
    late = shards / "rank-00001.safetensors"
    os.rename(late, tmp_path / "late")
    no_patience = mock.patch.object(consolidate, "LATE_FILES_SECONDS", 0)
    line = f"{late.name} is missing; .* stays in the sharded format"
    with no_patience, pytest.raises(checkpoint.CheckpointError, match=line):
        consolidate.replace_shards(shards)
    arrives = mock.Mock(side_effect=lambda seconds: os.rename(tmp_path / "late", late))
    with mock.patch("time.sleep", arrives):
        consolidate.replace_shards(shards)
    arrives.assert_called_once()
    one_file(shards)


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


def test_loading_and_converting_take_little_memory(tmp_path):
    """Of a mapped file, the pages of one tensor at most: 8 MB of 192."""
    state = {str(number): torch.ones(1024, 2048) for number in range(24)}
    saver = Saver(tmp_path, False, 0, 0, timedelta(seconds=20))
    saver.save(state, {"step": 1})
    path = last_checkpoint(tmp_path)
    assert memory_taken(lambda: checkpoint.load_state(path, state)) < 90e6
    assert memory_taken(lambda: consolidate.consolidate(path, tmp_path / "one")) < 90e6
