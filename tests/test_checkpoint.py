"""Checkpoints: saved on any mesh, in any format, loaded on any other."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from conftest import (
    FORMAT_OF_MESH,
    RANKS_OF_MESH,
    TEN_STEPS,
    assert_same,
    build_run,
    documented_fields,
    flags,
    last_checkpoint,
    rows,
    tensors,
)
from torch.distributed.tensor import DTensor

import checkpoint


@pytest.mark.parametrize("mesh", RANKS_OF_MESH)
def test_five_steps_and_five_more_are_ten_bit_for_bit(run, whole, tmp_path, mesh):
    resumed = tmp_path / "resumed"
    shutil.copytree(whole[mesh], resumed)  # as if killed between step 5 and step 10
    shutil.rmtree(resumed / "checkpoints" / "step-00000010")
    run(RANKS_OF_MESH[mesh], f"{TEN_STEPS} --strategy {mesh}", "resumed")
    expected = rows(whole[mesh])
    actual = rows(resumed)
    assert [row["step"] for row in actual] == list(range(1, 11))  # no step is logged twice
    for key in ("loss", "lr", "grad_norm"):
        assert [row[key] for row in actual] == [row[key] for row in expected]
    assert_same(whole[mesh], resumed)


RING = list(zip(RANKS_OF_MESH, [*list(RANKS_OF_MESH)[1:], "single"]))  # from each mesh to the next


@pytest.mark.parametrize("start, goal", RING)
def test_a_checkpoint_of_any_mesh_continues_on_another(run, whole, start, goal):
    """The checkpoints are in the format of FORMAT_OF_MESH[start]."""
    path = whole[start] / "checkpoints" / "step-00000005"
    resumed = rows(run(RANKS_OF_MESH[goal], f"{TEN_STEPS} --strategy {goal} --resume {path}"))
    expected = rows(whole[start])[5:]
    assert [row["step"] for row in resumed] == list(range(6, 11))
    losses = [row["loss"] for row in resumed]
    assert losses == pytest.approx([row["loss"] for row in expected], rel=1e-5)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_and_count(argv: list[str], path: Path) -> tuple[int, int]:
    """Load a checkpoint; return how many elements were copied and how many this rank holds."""
    state = dict(checkpoint.flatten(build_run(argv).state))
    with torch.profiler.profile(record_shapes=True) as profile:
        checkpoint.load_state(path, state)
    copies = [event for event in profile.events() if event.name == "aten::copy_"]
    copied = sum(math.prod(event.input_shapes[0]) for event in copies)
    loaded = {name: full(tensor) for name, tensor in state.items()}
    torch.testing.assert_close(loaded, tensors(path), rtol=0, atol=0, equal_nan=True)
    return copied, sum(local(tensor).numel() for tensor in state.values())


@pytest.mark.parametrize("mesh", ["hsdp --dp_shard 2", "fsdp --tp 2"])
def test_of_a_full_checkpoint_each_rank_reads_only_its_shards(pool, tokens, whole, tmp_path, mesh):
    path = last_checkpoint(whole["fsdp"])
    assert (path / "full.safetensors").exists()
    argv = flags(f"--data {tokens} --out {tmp_path}/run --dtype float32 --strategy {mesh}")
    for copied, held in pool(4, load_and_count, argv, path):
        assert copied == held


# --------------------------------------------------------------------------------------------------
# What is saved


@pytest.mark.parametrize("mesh", RANKS_OF_MESH)
def test_every_value_is_written_once(whole, mesh):
    path = last_checkpoint(whole[mesh])
    state = tensors(path)
    values = sum(tensor.nbytes for tensor in state.values())
    on_disk = 0
    for file in path.iterdir():
        if file.suffix == ".safetensors":
            on_disk += file.stat().st_size
    headers = 150 * len(state) * RANKS_OF_MESH[mesh]  # each chunk of a tensor has an entry
    assert values < on_disk < values + headers


@pytest.mark.parametrize("mesh", RANKS_OF_MESH)
def test_names_are_those_of_the_bare_model(whole, mesh):
    state = tensors(last_checkpoint(whole[mesh]))
    names = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    assert "blocks.1.attention.q.weight" in names
    assert len(names) == 20
    for slot in ("exp_avg", "exp_avg_sq"):
        assert {f"optimizer.{slot}.{name}" for name in names} < state.keys()
    assert state["optimizer.step"].tolist() == [10.0] * 20
    assert not [name for name in state if "_orig_mod" in name or "module." in name]


@pytest.mark.parametrize("mesh", ["ddp", "fsdp", "hsdp --dp_shard 2"])
def test_rows_and_manifest_of_a_checkpoint(whole, mesh):
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
    assert ("async" in FORMAT_OF_MESH[mesh]) == (row["blocking_seconds"] < row["seconds"])
    assert row["host_memory_before"] > 1e7
    assert row["host_memory_after"] > 1e7
    assert row["peak_host_memory"] > 0.99 * row["host_memory_before"]  # Linux counts roughly
    assert row["available_host_memory"] > 1e6
    manifest = checkpoint.read_manifest(path)
    assert manifest["step"] == 5
    assert manifest["tokens"] == 5 * 8 * 16
    assert {"files", "config", "model", "data", "torch"} < manifest.keys()
    assert manifest["files"].keys() == {file.name for file in files}
    assert checkpoint.verify(path) is None
