"""Checkpoints are saved on any mesh, in either format, and loaded on any other mesh."""

import itertools
import json
import math
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    build_run,
    documented_fields,
    full_tensor,
    last_checkpoint,
    make_saver,
    resolve,
    rows,
    tensors,
)
from torch.distributed.tensor import DTensor, distribute_tensor

import checkpoint
import dist
import train
from optim import local
from tools.checkpoint import consolidate


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
    assert row.keys() == fields - {"checkpoint", "checkpoint_failed", "error"} | {"time", "elapsed"}
    assert row["event"] == "checkpoint"
    assert row["step"] == 5
    assert row["path"] == str(path)
    assert row["bytes"] == sum(file.stat().st_size for file in files)
    assert 0 < row["blocking_seconds"] <= row["seconds"]
    assert ("async" in mesh) == (row["blocking_seconds"] < row["seconds"])


MESHES = {1: ["single"], 2: ["fsdp", "single --tp 2"], 4: ["hsdp --dp_shard 2", "fsdp --tp 2"]}
# 4 ranks do not divide the rows; with tp 2, neither do 2. The head has a separate weight.
FLAGS = (
    "--n_layer 1 --n_head 2 --n_kv_head 2 --d_model 20 --d_ff 22 --model tinyllama-1.1b "
    "--optimizer muon --clip adaptive --seq_len 16 --global_batch_size 8 --max_steps 1 "
    "--device cpu --dtype float32"
)


def expected_values(name: str, shape: torch.Size) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


def expected_part(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the expected values, as torch shards a full tensor."""
    whole = expected_values(name, tensor.shape)
    if not isinstance(tensor, DTensor):
        return whole
    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def states_of_meshes(argv: list[str]) -> Iterator[tuple[str, dist.DeviceMesh, dict]]:
    """Build the run on each mesh with this number of ranks; yield name, mesh and tensors."""
    world = dist.start("cpu")
    for mesh in MESHES[world.size]:
        text = " ".join([*argv, "--strategy", mesh])
        run = resolve(text, world_size=world.size)
        device_mesh = dist.make_mesh(world, run.mesh_shape)
        state = train.build(run, device_mesh)
        name = f"{world.size}_{mesh.replace(' ', '')}"
        yield name, device_mesh, dict(checkpoint.flatten(state.tensors))


def save_on_each_mesh(argv: list[str], folder: Path) -> None:
    for number, (name, _, state) in enumerate(states_of_meshes(argv)):
        for key, tensor in state.items():
            local(tensor).copy_(expected_part(key, tensor))
        saver = make_saver(folder / name, number % 2 == 1, 0, 0)
        saver.save(state, {"step": 1})
        saver.wait()
        assert saver.failure is None


def load_on_each_mesh(argv: list[str], paths: list[Path]) -> int:
    """Load each checkpoint on each mesh; return the number of pairs. Only replica 0 reads."""
    pairs = 0
    fill, read = checkpoint.Reader.fill, []

    def fill_and_record(reader: checkpoint.Reader, name: str, tensor: torch.Tensor) -> None:
        read.append(name)
        if "damaged" in reader.path.parts and len(read) > 1:
            raise checkpoint.CheckpointError("the disk is damaged")
        fill(reader, name, tensor)

    for _, mesh, state in states_of_meshes(argv):
        replicas = mesh.get_group("dp_replicate")
        names = list(state) if mesh.get_local_rank("dp_replicate") == 0 else []
        for path in paths:
            for tensor in state.values():
                local(tensor).fill_(torch.nan)
            read.clear()
            with mock.patch.object(checkpoint.Reader, "fill", fill_and_record):
                progress = mock.Mock()
                checkpoint.load_state(path, state, replicas, progress)
            assert read == names
            assert progress.call_count == len(state)
            for key, tensor in state.items():
                assert torch.equal(local(tensor), expected_part(key, tensor)), (path, key)
            pairs += 1
        read.clear()
        damaged = mock.patch.object(checkpoint.Reader, "fill", fill_and_record)
        errors = (checkpoint.CheckpointError, dist.RankError)
        failure = pytest.raises(errors, match="the disk is damaged")
        with damaged, failure, dist.raise_on_all_ranks():  # no rank waits for the one that failed
            checkpoint.load_state(paths[0].parents[2] / "damaged", state, replicas)
    return pairs


def test_any_mesh_loads_what_any_other_has_saved(pool, tokens, tmp_path):
    argv = f"{FLAGS} --data {tokens} --out {tmp_path}/run".split()
    for ranks in MESHES:
        pool(ranks, save_on_each_mesh, argv, tmp_path / "saved")
    paths = sorted((tmp_path / "saved").glob("*/checkpoints/step-00000001"))
    consolidate(paths[-1], tmp_path / "saved/full")
    shutil.copytree(tmp_path / "saved/full", paths[0].parents[2] / "damaged")
    paths.append(tmp_path / "saved/full")
    assert len(paths) == 6
    for ranks, meshes in MESHES.items():
        for pairs in pool(ranks, load_on_each_mesh, argv, paths):
            assert pairs == 6 * len(meshes)
    for path in paths:
        assert_anyone_can_read(path)


def assert_anyone_can_read(path: Path) -> None:
    """Assemble each tensor with only the package safetensors, as docs/reference.md shows."""
    safe_open = pytest.importorskip("safetensors").safe_open
    index = json.loads((path / "index.json").read_text())
    for name, tensor in index["tensors"].items():
        whole = torch.full(tensor["shape"], torch.nan)
        for start, file in zip(itertools.product(*tensor["cuts"]), tensor["grid"], strict=True):
            with safe_open(path / index["files"][file], framework="pt") as opened:
                chunk = opened.get_tensor(name)
            place = [slice(begin, begin + n) for begin, n in zip(start, chunk.shape)]
            whole[tuple(place)] = chunk
        assert torch.equal(whole, expected_values(name, whole.shape))
