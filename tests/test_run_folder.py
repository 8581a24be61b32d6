"""Which run may continue in a run folder, and from where."""

import dataclasses
import json

import pytest

import checkpoint
import run_folder
from cli import UsageError
from config import Config

MODEL = {"n_layer": 2, "d_model": 32}


def manifest(step: int, **changes) -> dict:
    config = {"global_batch_size": 8, "seed": 0}
    base = {"step": step, "files": {}, "model": MODEL, "data": "abc", "config": config}
    return base | changes


def save(out, step: int, **changes):
    """A checkpoint without files, which is complete and verifies."""
    path = out / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(json.dumps(manifest(step, **changes)))
    return path


@pytest.fixture
def config(tmp_path):
    """config(**flags) of a run in tmp_path / "run"."""
    return lambda **flags: Config(out=str(tmp_path / "run"), **flags)


def test_a_new_run_begins_at_step_0(config):
    begin = run_folder.resume_point(config(), manifest(0), latest=None)
    assert begin == run_folder.ResumePoint(0, None)


def test_a_run_continues_from_its_newest_checkpoint(config, tmp_path):
    path = save(tmp_path / "run", 10)
    begin = run_folder.resume_point(config(), manifest(0), latest=path)
    assert begin == run_folder.ResumePoint(10, path)


def test_a_named_checkpoint_begins_a_run_and_then_its_own_come_first(config, tmp_path):
    named = save(tmp_path / "other", 10)
    flags = config(resume=str(named))
    assert run_folder.resume_point(flags, manifest(0), None) == run_folder.ResumePoint(10, named)
    own = save(tmp_path / "run", 15)
    assert run_folder.resume_point(flags, manifest(0), own) == run_folder.ResumePoint(15, own)


def test_a_named_checkpoint_that_is_damaged_is_an_error(config, tmp_path):
    named = save(tmp_path / "other", 10, files={"full.pt": {"bytes": 3, "crc32": "0"}})
    with pytest.raises(checkpoint.CheckpointError, match="full.pt is missing"):
        run_folder.resume_point(config(resume=str(named)), manifest(0), None)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"model": MODEL | {"d_model": 64}}, "d_model was 64 and is now 32"),
        ({"data": "other"}, "data was other and is now abc"),
        ({"config": {"global_batch_size": 16, "seed": 0}}, "global_batch_size was 16 and is now 8"),
        ({"config": {}}, "is not a checkpoint of train.py: its manifest.json lacks"),
    ],
)
def test_what_would_change_the_numbers_of_a_run_is_refused(config, tmp_path, change, line):
    path = save(tmp_path / "run", 10, **change)
    with pytest.raises(UsageError, match=line):
        run_folder.resume_point(config(), manifest(0), latest=path)


def test_the_folder_holds_the_flags(tmp_path):
    config = Config(out=str(tmp_path / "run"), lr=0.5)
    run_folder.create(tmp_path / "run", config)
    assert json.loads((tmp_path / "run/config.json").read_text()) == dataclasses.asdict(config)
