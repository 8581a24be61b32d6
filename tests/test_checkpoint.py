import os
import pickle
import shutil

import pytest
import torch
from conftest import call_train, flags, rows, tensors

import checkpoint

LONG = "--max_steps 20 --dtype float32 --save_interval 10 --keep_last 0"
MESHES = {"single": 1, "ddp": 2, "fsdp": 4, "hsdp --dp_shard 2": 4}


def assert_same(one, other):
    a, b = (tensors(checkpoint.saved(run)[-1]) for run in (one, other))
    assert a.keys() == b.keys() and len(a) > 50
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mesh", MESHES)
def test_ten_steps_and_ten_more_are_twenty_bit_for_bit(run, tmp_path, mesh):
    whole = run(MESHES[mesh], f"{LONG} --strategy {mesh}", "whole")
    half = tmp_path / "half"
    shutil.copytree(whole, half)  # as after a kill between step 10 and step 20
    shutil.rmtree(half / "checkpoints" / "step-00000020")
    run(MESHES[mesh], f"{LONG} --strategy {mesh}", "half")
    assert_same(whole, half)
    assert [row["step"] for row in rows(half)] == list(range(1, 21))  # nothing logged twice
    assert [(r["loss"], r["lr"], r["grad_norm"]) for r in rows(half)] == [
        (r["loss"], r["lr"], r["grad_norm"]) for r in rows(whole)
    ]


def test_saved_on_four_shards_continues_on_any_mesh(run):
    whole = run(4, f"{LONG} --strategy fsdp", "whole")
    for mesh, ranks in {"single": 1, "ddp": 2, "fsdp": 2, "hsdp --dp_shard 2": 4}.items():
        other = run(
            ranks,
            f"{LONG} --strategy {mesh} --resume {whole}/checkpoints/step-00000010",
            f"on-{mesh.split()[0]}-{ranks}",
        )
        want = {row["step"]: row["loss"] for row in rows(whole)}
        got = {row["step"]: row["loss"] for row in rows(other)}
        assert list(got) == list(range(11, 21))
        assert all(loss == pytest.approx(want[step], rel=1e-5) for step, loss in got.items())


def test_keep_last_removes_the_oldest(run):
    out = run(1, "--max_steps 8 --save_interval 2 --keep_last 2")
    assert [path.name for path in checkpoint.saved(out)] == ["step-00000006", "step-00000008"]
    assert [row["step"] for row in rows(out, "event")] == [2, 4, 6, 8]


def test_rows_and_manifest_of_a_checkpoint(run):
    out = run(2, "--max_steps 4 --strategy fsdp")
    (row,) = rows(out, "event")
    path = checkpoint.saved(out)[-1]
    assert (row["event"], row["step"], row["path"]) == ("checkpoint", 4, str(path))
    assert row["bytes"] == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    assert row["seconds"] >= row["blocking_seconds"] > 0 and row["peak_host_memory"] > 1e7
    manifest = checkpoint.read_manifest(path)
    assert (manifest["step"], manifest["tokens"]) == (4, 4 * 8 * 16)
    names = tensors(path)
    assert "model.blocks.1.attention.q.weight" in names and "optimizer.exp_avg.embed.weight" in names


def test_a_half_written_checkpoint_is_none_and_the_next_save_removes_it(run, tokens, pool):
    out = run(1, "--max_steps 4 --save_interval 2 --keep_last 0")
    last = checkpoint.saved(out)[-1]
    (last / "manifest.json").unlink()
    os.rename(last, last.with_name(f".{last.name}.tmp"))
    assert [path.name for path in checkpoint.saved(out)] == ["step-00000002"]
    assert pool(1, call_train, flags(f"--data {tokens} --out {out} --max_steps 4 --keep_last 0")) == [0]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]


class Bomb:
    def __reduce__(self):
        return os.system, ("touch bomb",)


@pytest.mark.parametrize("what", ["code", "bytes", "empty"])
def test_hostile_or_broken_metadata_runs_nothing(run, tmp_path, monkeypatch, what):
    out = run(1, "--max_steps 1")
    monkeypatch.chdir(tmp_path)
    path = checkpoint.saved(out)[-1]
    metadata = checkpoint.Reader(path).metadata
    if what == "bytes":  # an entry that DCP would load with plain pickle
        metadata.state_dict_metadata["optimizer.skipped_steps"] = (
            torch.distributed.checkpoint.metadata.BytesStorageMetadata()
        )
    (path / ".metadata").write_bytes(
        {"code": pickle.dumps(Bomb()), "bytes": pickle.dumps(metadata), "empty": b""}[what]
    )
    with pytest.raises(checkpoint.CheckpointError, match="^cannot read [^\n]*$"):
        checkpoint.load(path, {"optimizer": {"skipped_steps": torch.zeros(())}})
    assert not (tmp_path / "bomb").exists()
