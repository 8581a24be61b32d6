"""The files of a checkpoint, if they are damaged or hostile, and tools.checkpoint."""

import os
import shutil
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    TEN_STEPS,
    command,
    file_names,
    last_checkpoint,
    make_saver,
    memory_taken,
    rows,
    tensors,
)
from test_imports import MODULES, imported_modules

import checkpoint
import dist
from start import find_origin
from tools.checkpoint import consolidate


def flip_a_bit(path: Path, name: str = "rank-00000.safetensors", place: int = -5) -> None:
    contents = bytearray((path / name).read_bytes())
    contents[place] ^= 4
    (path / name).write_bytes(contents)


def find_damage_on_two_hosts(argv: list[str]) -> str:
    """Return the error of a start on two hosts of one rank each."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    world = dist.start("cpu")
    try:
        path = find_origin(argv, world).path
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


def test_a_disk_error_fails_the_verification(path):
    with mock.patch("builtins.open", side_effect=OSError(5, "Input/output error")):
        assert "Input/output error" in checkpoint.verify(path)


# --------------------------------------------------------------------------------------------------
# Hostile files

WHOLE = torch.arange(24.0).view(6, 4)


def write_two_files(path: Path, cut: int = 4) -> None:
    """Write `a` in two chunks of rows, the second from row `cut` on, and `b` in the first file."""
    work = path.with_name("work")
    work.mkdir(parents=True)
    first = {"a": WHOLE[:cut], "b": torch.arange(3)}
    files = [f"rank-0000{rank}.safetensors" for rank in range(2)]
    a = {"dtype": "F32", "shape": [6, 4], "cuts": [[0, cut], [0]], "grid": [0, 1]}
    b = {"dtype": "I64", "shape": [3], "cuts": [[0]], "grid": [0]}
    entries = {
        files[0]: checkpoint.write_safetensors(work / files[0], first),
        files[1]: checkpoint.write_safetensors(work / files[1], {"a": WHOLE[cut:]}),
        "index.json": checkpoint.write_index(work, files, {"a": a, "b": b}),
    }
    checkpoint.complete(work, path, {"step": 1, "files": entries})


@pytest.fixture
def path(tmp_path) -> Path:
    """The checkpoint of `write_two_files`."""
    write_two_files(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


EXECUTES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_no_module_can_execute_the_files_that_it_reads():
    """No module unpickles anything. The packages that read parquet or zstd are not checked."""
    for name, path in MODULES.items():
        assert not imported_modules(path) & EXECUTES, name
        source = path.read_text()
        for call in ("torch.load(", "weights_only", "allow_pickle", " eval(", " exec("):
            assert call not in source, f"{name} has {call}"


# --------------------------------------------------------------------------------------------------
# Manifests


def save_alone(path: Path) -> str:
    """Return the error of a save without on_all_ranks."""
    dist.start("cpu")
    with pytest.raises(ValueError) as error:
        checkpoint.save_state(path, {"a": torch.ones(2)}, {"step": 6})
    dist.on_all_ranks(int)  # no rank exits while another one is still connecting
    return str(error.value)


def test_a_save_without_on_all_ranks_is_refused(pool, tmp_path):
    line = "on several ranks, save_state needs on_all_ranks=dist.on_all_ranks"
    assert pool(2, save_alone, tmp_path / "checkpoint") == [line] * 2
    assert not file_names(tmp_path)


# --------------------------------------------------------------------------------------------------
# A sharded checkpoint as one file


def test_consolidate_writes_a_complete_checkpoint(whole, tmp_path):
    """It creates the parent folder, and there is no warning."""
    path = whole["hsdp --dp_shard 2"] / "checkpoints/step-00000005"
    out = tmp_path / "new/one"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, said, error = command("consolidate", path, out)
    assert (status, error) == (0, "") and said.startswith(f"{out}: one file, ")
    assert file_names(out.parent) == ["one"]
    assert file_names(out) == ["full.safetensors", "index.json", "manifest.json"]
    torch.testing.assert_close(tensors(out), tensors(path), rtol=0, atol=0, equal_nan=True)
    source = checkpoint.read_manifest(path)
    manifest = checkpoint.read_manifest(out)
    shards = {f"rank-{rank:05d}.safetensors" for rank in range(4)}
    assert source.pop("files").keys() == shards | {"index.json"}
    assert manifest.pop("files").keys() == {"full.safetensors", "index.json"}
    assert manifest.pop("crc32") != source.pop("crc32")
    assert manifest == source
    status, said, _ = command("verify", out)
    assert (status, "complete and unchanged: 2 files" in said) == (0, True)
    assert said.count("\n") == 1


def test_a_run_continues_from_a_consolidated_checkpoint(whole, run, tmp_path):
    path = checkpoint.step_path(tmp_path / "run", 5)
    consolidate(whole["hsdp --dp_shard 2"] / "checkpoints/step-00000005", path)
    resumed = rows(run(2, f"{TEN_STEPS} --strategy fsdp", "run"))
    losses = [row["loss"] for row in rows(whole["hsdp --dp_shard 2"])[5:]]
    assert [row["loss"] for row in resumed] == pytest.approx(losses, rel=1e-5)


def test_consolidate_leaves_nothing_on_a_disk_that_fills_up(whole, small_disk):
    path = last_checkpoint(whole["hsdp --dp_shard 2"])
    (small_disk / "other").write_bytes(bytes(900_000))
    status, _, error = command("consolidate", path, small_disk / "new/one")
    assert (status, error.count("\n")) == (1, 1)
    line = f"tools.checkpoint: error: cannot write {small_disk}/new/one: [Errno 28] No space left"
    assert error.startswith(line)
    assert not list(small_disk.glob("new/*"))


def test_loading_and_consolidating_take_little_memory(tmp_path, one_rank):
    """At most the pages of one tensor of a mapped file are resident: 4 MB of 96."""
    state = {str(number): torch.ones(1024, 1024) for number in range(24)}
    saver = make_saver(tmp_path, False, 0, 0)
    saver.save(state, {"step": 1})
    path = last_checkpoint(tmp_path)
    assert memory_taken(lambda: checkpoint.load_state(path, state)) < 45e6
    assert memory_taken(lambda: consolidate(path, tmp_path / "one")) < 45e6
