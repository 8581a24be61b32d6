"""What tests/core does not need: full checkpoints, tools.checkpoint, several hosts, and memory."""

import math
import os
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from conftest import (
    build_run,
    call_train,
    command,
    documented_fields,
    file_names,
    flags,
    full_tensor,
    last_checkpoint,
    make_saver,
    memory_taken,
    rows,
    tensors,
)

import checkpoint
import dist
from optim import local
from start import find_origin
from tools.checkpoint import consolidate

TEN_STEPS = "--max_steps 10 --dtype float32 --save_interval 5 --keep_last 0"
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
    row, _ = rows(whole[mesh], "event")
    path, _ = checkpoint.list_checkpoints(whole[mesh])
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    fields = documented_fields("reference.md", "rows | fields", "checkpoint")
    assert row.keys() == fields - {"checkpoint", "checkpoint_failed", "error"} | {"time"}
    assert row["event"] == "checkpoint"
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


def test_consolidate_copies_extra_files(tmp_path, one_rank):
    saver = make_saver(tmp_path, False, 0, 0, extra_files={"my.json": b"IQ== 0\n" * 200_000})
    saver.save({"weight": torch.ones(3)}, {"step": 1})
    path = last_checkpoint(tmp_path)
    consolidate(path, tmp_path / "one")
    assert (tmp_path / "one/my.json").read_bytes() == (path / "my.json").read_bytes()
    assert checkpoint.verify(tmp_path / "one") is None


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
