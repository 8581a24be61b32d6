"""tools.checkpoint consolidate: a sharded checkpoint as one file."""

import contextlib
import io
import shutil
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import TEN_STEPS, file_names, last_checkpoint, rows, tensors
from test_saver import RANKS_FILE, save_with_extra_files

import checkpoint
from model import ModelConfig, build_model
from tools import checkpoint as commands


@pytest.fixture(scope="module")
def consolidated(whole, tmp_path_factory) -> Path:
    """Step 5 of the hsdp run as a checkpoint of the full format, in a folder that is created."""
    root = tmp_path_factory.mktemp("consolidated")
    path = whole["hsdp --dp_shard 2"] / "checkpoints/step-00000005"
    out = root / "new/one"
    said, error = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(error))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("error")
        assert commands.main(["consolidate", str(path), str(out)]) == 0, error.getvalue()
    assert said.getvalue().startswith(f"{out}: 83 tensors, ")
    assert not error.getvalue()
    assert file_names(root / "new") == ["one"]
    return out


def test_consolidate_writes_a_complete_checkpoint_of_the_full_format(whole, consolidated, command):
    path = whole["hsdp --dp_shard 2"] / "checkpoints/step-00000005"
    assert file_names(consolidated) == ["full.pt", "manifest.json"]
    torch.testing.assert_close(tensors(consolidated), tensors(path), rtol=0, atol=0, equal_nan=True)
    source = checkpoint.read_manifest(path)
    manifest = checkpoint.read_manifest(consolidated)
    assert manifest.keys() == source.keys()
    assert manifest.pop("files").keys() == {"full.pt"}
    assert source.pop("files").keys() == {f"__{rank}_0.distcp" for rank in range(4)} | {".metadata"}
    assert manifest == source
    status, out, _ = command("verify", consolidated)
    assert (status, "complete and unchanged: 1 files" in out) == (0, True)


def test_a_run_continues_from_a_consolidated_checkpoint(run, whole, consolidated):
    resumed = rows(run(2, f"{TEN_STEPS} --strategy fsdp --resume {consolidated}"))
    losses = [row["loss"] for row in rows(whole["hsdp --dp_shard 2"])[5:]]
    assert [row["loss"] for row in resumed] == pytest.approx(losses, rel=1e-5)


def test_plain_torch_reads_full_pt(consolidated):
    """As docs/reference.md shows."""
    state = torch.load(consolidated / "full.pt", mmap=True, weights_only=True)
    weights = state["model"]
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    assert shapes["blocks.0.attention.q.weight"] == (32, 32)
    layer = torch.nn.Linear(32, 64, bias=False)
    layer.load_state_dict({"weight": weights["blocks.0.mlp.gate.weight"]})
    model = build_model(ModelConfig.from_dict(checkpoint.read_manifest(consolidated)["model"]))
    model.load_state_dict(weights)


def test_consolidate_copies_the_extra_files(pool, tmp_path, command):
    pool(2, save_with_extra_files, tmp_path, "sharded")
    out = tmp_path / "one"
    assert command("consolidate", last_checkpoint(tmp_path), out)[0] == 0
    assert (out / "my.tiktoken").read_bytes() == RANKS_FILE


@pytest.mark.tries("and its disk has")
def test_consolidate_refuses_a_disk_without_the_room(whole, small_disk, command):
    path = last_checkpoint(whole["hsdp --dp_shard 2"])
    (small_disk / "other").write_bytes(bytes(900_000))
    status, _, error = command("consolidate", path, small_disk / "new/one")
    assert status == 1
    assert f"{small_disk}/new/one needs 0." in error
    assert "MB free" in error
    assert file_names(small_disk) == ["other"]


@pytest.mark.tries("cannot write")
def test_consolidate_leaves_nothing_on_a_disk_that_fills_up(whole, small_disk, command):
    path = last_checkpoint(whole["hsdp --dp_shard 2"])
    (small_disk / "other").write_bytes(bytes(900_000))
    before = shutil.disk_usage("/")
    with mock.patch.object(checkpoint.shutil, "disk_usage", return_value=before):
        status, _, error = command("consolidate", path, small_disk / "one")
    assert status == 1
    assert error.startswith(
        f"tools.checkpoint: error: cannot write {small_disk}/one: the disk is full"
    )
    assert error.count("\n") == 1
    assert file_names(small_disk) == ["other"]


def test_ctrl_c_leaves_nothing_of_consolidate(whole, tmp_path, command):
    path = last_checkpoint(whole["hsdp --dp_shard 2"])
    interrupted = mock.patch.object(checkpoint.Reader, "read_data", side_effect=KeyboardInterrupt)
    with interrupted:
        assert command("consolidate", path, tmp_path / "one") == (130, "", "")
    assert not file_names(tmp_path)
