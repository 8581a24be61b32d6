"""The files of a checkpoint: damaged, half written, hostile; tools.checkpoint list and verify."""

import enum
import json
import os
import pickle
import shutil
import subprocess
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from conftest import call_train, file_names, flags, last_checkpoint, listen, tensors
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

import checkpoint


def truncate(path: Path) -> None:
    os.truncate(next(path.glob("__1_*")), 1000)


def flip_a_bit(path: Path) -> None:
    with open(next(path.glob("__0_*")), "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 4]))


DAMAGE = {
    "has 1,000 bytes, not": truncate,
    "has changed since it was written": flip_a_bit,
    "is missing": lambda path: next(path.glob("__1_*")).unlink(),
    ".metadata has 0 bytes": lambda path: (path / ".metadata").write_bytes(b""),
    "its manifest.json is damaged": lambda path: (path / "manifest.json").write_text('{"step": 6'),
}


def test_damaged_checkpoints_are_passed_over_and_replaced(run, pool, tokens):
    text = "--max_steps 6 --save_interval 1 --keep_last 0 --strategy fsdp"
    out = run(2, text)
    first, *damaged = checkpoint.list_checkpoints(out)
    weights = tensors(damaged[-1])
    for path, (problem, damage) in zip(damaged, DAMAGE.items(), strict=True):
        damage(path)
        assert problem in checkpoint.verify(path)
    ((status, said, _), _) = pool(2, listen, flags(f"--data {tokens} --out {out} {text}"))
    assert status == 0
    for path, problem in zip(damaged, DAMAGE):
        (line,) = [line for line in said.splitlines() if f"passed over {path}: " in line]
        assert problem in line
    assert f"continuing from {first}" in said
    for path in damaged:
        assert checkpoint.verify(path) is None
    torch.testing.assert_close(tensors(damaged[-1]), weights, rtol=0, atol=0, equal_nan=True)
    kept = f".{damaged[-1].name}.damaged.tmp"  # until the next save removes it
    assert file_names(out / "checkpoints") == [kept, first.name, *[path.name for path in damaged]]


def test_a_half_written_checkpoint_does_not_count_and_is_removed(run, tokens, pool):
    out = run(1, "--max_steps 4 --save_interval 2 --keep_last 0")
    last = last_checkpoint(out)
    (last / "manifest.json").unlink()
    os.rename(last, last.with_name(f".{last.name}.tmp"))
    (out / "checkpoints" / "notes").write_text("mine")
    assert [path.name for path in checkpoint.list_checkpoints(out)] == ["step-00000002"]
    argv = flags(f"--data {tokens} --out {out} --max_steps 4 --keep_last 0")
    assert pool(1, call_train, argv) == [0]
    assert file_names(out / "checkpoints") == ["notes", "step-00000002", "step-00000004"]


# --------------------------------------------------------------------------------------------------
# Hostile files


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.pair = function, arguments

    def __reduce__(self):
        return self.pair

    def __call__(self):
        """What is called may itself be the result of a call."""


def attacks(target: str) -> dict[str, object]:
    """Pickles that create the file `target` when they are loaded carelessly."""
    return {
        "os.system": Call(os.system, f"touch {target}"),
        "eval": Call(eval, f"open({target!r}, 'w')"),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "getattr of an allowed class": Call(Call(getattr, type(Path()), "touch"), Path(target)),
        "in a container": OrderedDict(weights=[Call(exec, f"open({target!r}, 'w')")]),
        "class of torch": Call(torch.hub.load_state_dict_from_url, f"file://{target}"),
        "subprocess": Call(subprocess.Popen, ["touch", target]),
    }


def load_one_tensor(path: Path) -> None:
    checkpoint.load_state(path, {"optimizer": {"skipped_steps": torch.zeros(())}})


@pytest.mark.parametrize("attack", attacks("x"))
@pytest.mark.parametrize("format", ["sharded", "full"])
def test_a_hostile_pickle_runs_nothing(whole, tmp_path, attack, format):
    path = tmp_path / "checkpoint"
    saved = {"sharded": whole["single"], "full": whole["fsdp"]}
    shutil.copytree(last_checkpoint(saved[format]), path)
    target = tmp_path / "executed"
    bomb = attacks(str(target))[attack]
    if format == "sharded":
        (path / ".metadata").write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"optimizer": {"skipped_steps": bomb}}, path / "full.pt")
    with pytest.raises(checkpoint.CheckpointError, match="^cannot read [^\n]*$"):
        load_one_tensor(path)
    assert not target.exists()


class OldPickler(pickle.Pickler):
    """Pickles the members of an Enum as Python 3.11.2 does, Debian 12's."""

    def reducer_override(self, value):
        is_member = isinstance(value, enum.Enum)
        return (getattr, (type(value), value.name)) if is_member else NotImplemented


def test_metadata_that_an_older_python_wrote_is_read(whole, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(last_checkpoint(whole["single"]), path)
    metadata = checkpoint.Reader(path).metadata
    with open(path / ".metadata", "wb") as file:
        OldPickler(file).dump(metadata)
    assert b"getattr" in (path / ".metadata").read_bytes()
    load_one_tensor(path)


def ask_for_plain_pickle(metadata) -> None:
    metadata.state_dict_metadata["optimizer.skipped_steps"] = BytesStorageMetadata()


def point_outside(metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../../../etc/passwd"


def ask_for_a_decoder(metadata) -> None:
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


@pytest.mark.tries("it points to")
def test_metadata_that_asks_for_pickle_or_other_files_is_refused(whole, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(last_checkpoint(whole["single"]), path)
    original = (path / ".metadata").read_bytes()
    for change in (ask_for_plain_pickle, point_outside, ask_for_a_decoder):
        metadata = checkpoint.Reader(path).metadata
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(checkpoint.CheckpointError, match=r"^cannot read [^\n]*/\.metadata: "):
            load_one_tensor(path)
        (path / ".metadata").write_bytes(original)
    load_one_tensor(path)


@pytest.mark.tries("it has no tensor")
def test_a_full_checkpoint_of_another_model_is_refused(tmp_path):
    torch.save({"model": {"weight": torch.ones(3)}}, tmp_path / "full.pt")
    for name, shape in (("weight", 4), ("bias", 3)):
        with pytest.raises(checkpoint.CheckpointError, match=f"no tensor model.{name} of shape"):
            checkpoint.load_state(tmp_path, {"model": {name: torch.empty(shape)}})


HOSTILE_MANIFESTS = [
    "[]",
    "{}",
    '{"step": "os.system", "files": {"full.pt": {"bytes": 1, "crc32": "0"}}}',
    '{"step": 1, "files": {"../../x": {}}}',
    '{"step": 1, "files": ["full.pt"]}',
    '{"step": 1, "files": {"full.pt": {"bytes": "many", "crc32": "0"}}}',
    '{"step": 1, "files": {"full.pt": {"bytes": 1, "crc32": "0"}}, "tokens": "many"}',
    '{"step": -5, "files": {"full.pt": {"bytes": 1, "crc32": "0"}}}',
    '{"step": 1, "files": {}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE_MANIFESTS[:4])
def test_a_hostile_manifest_is_a_clear_error(whole, pool, tokens, tmp_path, text):
    out = tmp_path / "run"
    shutil.copytree(whole["single"], out)
    shutil.rmtree(out / "checkpoints" / "step-00000005")
    path = last_checkpoint(out)
    (path / "manifest.json").write_text(text)
    assert checkpoint.verify(path)
    argv = flags(f"--data {tokens} --out {out} --max_steps 1")
    ((status, said, error),) = pool(1, listen, argv)
    assert (status, said, error.count("\n")) == (1, "", 1)
    assert f"--out {out} has checkpoints, but none is valid ({path}: " in error


# --------------------------------------------------------------------------------------------------
# tools.checkpoint


def test_list_prints_step_tokens_and_size(whole, tmp_path, command):
    run = whole["single"]
    status, out, _ = command("list", run)
    assert status == 0
    step_5, step_10 = out.splitlines()
    assert step_5.startswith(f"{run}/checkpoints/step-00000005  step 5  640 tokens  ")
    assert step_10.startswith(f"{run}/checkpoints/step-00000010  step 10  1,280 tokens  ")


def copy_and_damage(whole: dict[str, Path], folder: Path) -> Path:
    """A run of two checkpoints, the first of which is damaged."""
    run = folder / "run"
    shutil.copytree(whole["fsdp --tp 2"], run)
    flip_a_bit(run / "checkpoints/step-00000005")
    return run


def test_verify_of_a_run_verifies_each_of_its_checkpoints(whole, tmp_path, command):
    run = copy_and_damage(whole, tmp_path)
    status, out, error = command("verify", run)
    assert status == 1
    first, second = out.splitlines()
    assert first.startswith(f"DAMAGED: {run}/checkpoints/step-00000005: __0_0.distcp has changed")
    assert second.startswith(f"{run}/checkpoints/step-00000010: complete and unchanged: 5 files, ")
    assert error == f"tools.checkpoint: error: {run}: 1 of 2 checkpoints damaged\n"
    shutil.rmtree(run / "checkpoints/step-00000005")
    assert command("verify", run) == (0, f"{second}\n", "")


@pytest.mark.tries(
    "must be an integer of at least 0",
    "it names the file",
    "it names no file",
    "checkpoints damaged",
)
@pytest.mark.parametrize("text", HOSTILE_MANIFESTS, ids=lambda text: text[:40])
def test_list_says_which_manifest_is_damaged(whole, tmp_path, command, text):
    run = tmp_path / "run"
    shutil.copytree(whole["single"], run)
    (run / "checkpoints/step-00000005/manifest.json").write_text(text)
    status, out, error = command("list", run)
    assert status == 1
    first, second = out.splitlines()
    assert first.startswith(f"DAMAGED: {run}/checkpoints/step-00000005 is not a complete")
    assert "its manifest.json is damaged" in first
    assert second.startswith(f"{run}/checkpoints/step-00000010  step 10  ")
    assert error.count("\n") == 1


def test_a_manifest_that_is_no_file_is_damaged(tmp_path, command):
    path = tmp_path / "checkpoints/step-00000001"
    (path / "manifest.json").mkdir(parents=True)
    for name in ("list", "verify"):
        status, out, error = command(name, tmp_path)
        assert (status, out.count("\n"), error.count("\n")) == (1, 1, 1)
        assert out.startswith(f"DAMAGED: {path} is not a complete checkpoint: its manifest.json is")


def test_a_checkpoint_of_no_known_format_is_refused(whole, tmp_path, command):
    path = tmp_path / "checkpoint"
    shutil.copytree(last_checkpoint(whole["single"]), path)
    manifest = checkpoint.read_manifest(path)
    del manifest["files"][".metadata"]
    (path / ".metadata").unlink()
    (path / "manifest.json").write_text(json.dumps(manifest))
    line = f"cannot read {path}/.metadata: "
    with pytest.raises(checkpoint.CheckpointError, match=f"^{line}.*No such file"):
        load_one_tensor(path)
    status, out, error = command("consolidate", path, tmp_path / "one")
    assert (status, out, error.count("\n")) == (1, "", 1)
    assert line in error
