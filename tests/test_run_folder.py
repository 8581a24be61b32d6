"""Who writes a run folder, which run may continue in it, and from where."""

import contextlib
import dataclasses
import fcntl
import json
import multiprocessing
import os
import signal
import threading
import time
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import checkpoint
import data
from config import Config, model_config
from model import ModelConfig
from runtime import preflight, run_folder
from runtime.cli import UsageError
from runtime.lock import try_lock

MODEL = {
    "vocab_size": 320,
    "n_layer": 2,
    "n_head": 2,
    "n_kv_head": 2,
    "d_model": 32,
    "d_ff": 64,
    "seq_len": 16,
}


SIZE = 60_000  # bytes of a checkpoint's file: room for the model
CRC32 = f"{zlib.crc32(bytes(SIZE)):08x}"


def manifest(step: int, dtype: str = "float32", data: str = "abc", model=MODEL, **flags) -> dict:
    """What a checkpoint of step `step` says, after a start with `flags`."""
    config = {"global_batch_size": 8, "d_model": 32, "data": "tokens/a", **flags}
    files = {"full.safetensors": {"bytes": SIZE, "crc32": CRC32}}
    base = {"format": 2, "step": step, "files": files, "model": model, "data": data, "dtype": dtype}
    return base | {"config": {"seed": 0} | config}


def save(out, step: int, **changes):
    """A checkpoint without tensors, which is complete and verifies."""
    path = out / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "full.safetensors").write_bytes(bytes(SIZE))
    (path / "manifest.json").write_text(json.dumps(manifest(step, **changes)))
    return path


FOLDER = data.TokenFolder(Path("tokens/a"), np.dtype("<u2"), 257, "bytes", fingerprint="abc")


@pytest.fixture
def begin(tmp_path, one_rank):
    """begin(**flags): where a run in tmp_path / "run" with these flags begins."""

    def call(**flags) -> preflight.Start:
        sizes = {name: size for name, size in MODEL.items() if name != "vocab_size"}
        own = {"out": str(tmp_path / "run"), "data": "tokens/a", "dtype": "float32"}
        config = Config(**{"global_batch_size": 8, **sizes, **own, **flags})
        no_data = mock.patch.object(data, "open_folders", lambda names: [FOLDER])
        with no_data, contextlib.ExitStack() as held:
            return preflight.find_start(config, one_rank, held)

    return call


def place(start: preflight.Start) -> tuple:
    """The step, the checkpoint with all of the state, and the one with weights only."""
    path = start.checkpoint
    return start.step, None if start.only_weights else path, path if start.only_weights else None


# --------------------------------------------------------------------------------------------------
# Where a run begins


def test_a_run_continues_from_its_newest_valid_checkpoint(begin, tmp_path):
    assert place(begin()) == (0, None, None)
    good, newest = (save(tmp_path / "run", step) for step in (10, 20))
    assert place(begin()) == (20, newest, None)
    newest_of_all = save(tmp_path / "run", 30)
    for path in (newest, newest_of_all):
        os.truncate(path / "full.safetensors", 3)
    start = begin()
    assert place(start) == (10, good, None)
    problem = "full.safetensors has 3 bytes, not 60,000"
    assert start.damaged == {newest_of_all: problem, newest: problem}


@pytest.mark.parametrize(
    "flag, where", [("resume", (10, True, False)), ("init_from", (0, False, True))]
)
def test_a_named_checkpoint_begins_a_run_and_then_its_own_come_first(begin, tmp_path, flag, where):
    """Also the newest valid one of a named run."""
    named = save(tmp_path / "other", 10)
    named_run = {flag: str(tmp_path / "other")}
    step, *is_taken = where
    for flags in (named_run, {flag: str(named)}):
        assert place(begin(**flags)) == (step, *(named if taken else None for taken in is_taken))
    own = save(tmp_path / "run", 15)
    named.rename(tmp_path / "gone")
    assert place(begin(**named_run)) == (15, own, None)


def test_a_named_checkpoint_that_is_damaged_is_refused(begin, tmp_path):
    newest = [save(tmp_path / "other", step) for step in (10, 20)][-1]
    os.truncate(newest / "full.safetensors", 3)
    line = f"no checkpoint to use: {newest}: full.safetensors has 3 bytes, not 60,000; restore"
    for named in ("resume", "init_from"):
        with pytest.raises(checkpoint.CheckpointError, match=line):
            begin(**{named: str(tmp_path / "other")})


def test_weights_alone_begin_a_new_run_with_other_data_and_flags(begin, tmp_path):
    named = save(tmp_path / "other", 10, data="other", schedule="linear")
    assert place(begin(init_from=str(named))) == (0, None, named)
    for field, value in {"vocab_size": 256, "n_layer": 1, "n_head": 4}.items():
        other = save(tmp_path / field, 10, model=MODEL | {field: value})
        with pytest.raises(UsageError, match=f"has {field} {value}, and this run has .*: its wei"):
            begin(init_from=str(other))


def test_a_model_field_that_a_checkpoint_lacks_has_its_default(begin, tmp_path):
    """Checkpoints of before a field existed."""
    save(tmp_path / "run", 10)
    assert begin().step == 10
    named = save(tmp_path / "other", 10)
    assert place(begin(init_from=str(named), out=str(tmp_path / "new"))) == (0, None, named)
    save(tmp_path / "run", 20, model={**MODEL, "norm_eps": 1e-6})
    with pytest.raises(UsageError, match="norm_eps 1e-06 -> 1e-05"):
        begin()


def test_an_evaluation_is_as_in_the_run(begin, tmp_path):
    path = save(tmp_path, 10, dtype="bfloat16", eval_sequences=7)
    saved = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(saved | {"micro_batch_size": 3}))
    run = {"eval_only": True, "out": str(tmp_path)}

    def evaluated(**flags) -> tuple:
        not_given = {"data": None, "eval_sequences": None, "dtype": "auto"}
        c = begin(**run, **not_given | flags).config
        return c.dtype, c.data, c.eval_sequences, c.micro_batch_size

    assert evaluated() == ("bfloat16", "tokens/a", 7, 3)
    given = {"dtype": "float32", "data": "tokens/b", "eval_sequences": 5, "micro_batch_size": 1}
    assert evaluated(**given) == ("float32", "tokens/b", 5, 1)
    imported = {name: saved[name] for name in ("format", "step", "files", "model")}  # by tools.hf
    (path / "manifest.json").write_text(json.dumps(imported))
    with mock.patch.object(preflight, "prepare_builtin"):
        assert evaluated() == ("auto", "tokens/python", 512, None)


@pytest.mark.parametrize("flag, seq_len", [("resume", 16), ("init_from", 8)])
def test_the_model_is_the_checkpoints_and_flags_override_only_what_they_set(
    begin, tmp_path, flag, seq_len
):
    """Also where no flag could describe it, and where the run has its own checkpoint by now."""
    model = MODEL | {"vocab_size": 500, "rope_theta": 5e5, "tied": False, "norm_eps": 1e-6}
    save(tmp_path / "other", 10, model=model)
    flags = dict.fromkeys(MODEL.keys() - {"vocab_size"}) | {"seq_len": seq_len}
    flags |= {flag: str(tmp_path / "other")}
    for own in (False, True):
        if own:
            save(tmp_path / "run", 20, model=model | {"seq_len": seq_len})
            (tmp_path / "other").rename(tmp_path / "gone")
        start = begin(**flags)
        assert start.model == ModelConfig(**model | {"seq_len": seq_len})
        c = start.config
        assert (c.n_layer, c.d_model, c.seq_len) == (
            2,
            32,
            seq_len,
        )  # in config.json, for a new run
    assert model_config(c, 501, start.model).vocab_size == 512  # which its weights do not fit


def test_another_model_batch_seed_optimizer_or_other_data_is_refused(begin, tmp_path):
    changes = {"global_batch_size": 16, "seed": 7, "optimizer": "muon", "data": "other"}
    path = save(tmp_path / "run", 10, model=MODEL | {"d_model": 64}, **changes)
    with pytest.raises(UsageError) as error:
        begin(allow_changes=True)
    line = str(error.value)
    assert line.startswith(f"cannot continue from {path}: ") and f"--init_from {path}" in line
    for change in (
        "d_model 64 -> 32",
        "--global_batch_size 16 -> 8",
        "--seed 7 -> 0",
        "--optimizer muon -> adamw",
        "the data's fingerprint other -> abc",
    ):
        assert change in line


def test_damage_is_never_a_fresh_start(begin, tmp_path):
    path = save(tmp_path / "run", 10)
    for name in ("full.safetensors", "manifest.json"):
        (path / name).unlink()
        with pytest.raises(checkpoint.CheckpointError, match=f"{path}: .*{name} is missing"):
            begin()


def test_a_run_whose_checkpoints_are_gone_does_not_start_again(begin, tmp_path):
    log = tmp_path / "run/metrics.jsonl"
    log.parent.mkdir()
    failed = {"step": 2, "event": "checkpoint_failed", "time": "noon", "path": "there"}
    lines = [{"step": 1, "loss": 5.5}, failed]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '12\n{"step')
    assert place(begin()) == (0, None, None)  # stopped before its first save
    log.write_text(json.dumps(failed | {"step": 250, "event": "checkpoint"}) + "\n")
    with pytest.raises(UsageError, match="it has no checkpoint, but files that"):
        begin()


# --------------------------------------------------------------------------------------------------
# Flags that changed


# docs/reference.md lists them (test_config.py)
POLICIES = {f.name: f.metadata["resume"] for f in dataclasses.fields(Config)}
REFUSED = {name for name, policy in POLICIES.items() if policy == "refused"}
ANOTHER_RUN = {"seed", "global_batch_size", "optimizer"}
OF_ONE_START = {"out", "resume", "init_from", "allow_changes", "dry_run", "eval_only"}


@pytest.fixture
def change(begin, tmp_path):
    """change(name, value, **flags): what a start says with another value of one flag."""
    save(tmp_path / "run", 3, lr=0.25)

    def call(name: str, value, **flags) -> list[str]:
        return begin(**{"lr": 0.25, **flags, name: value}).changes

    return call


@pytest.mark.parametrize("name", sorted(REFUSED - {"dtype"}))
def test_a_flag_that_changes_the_numbers_is_refused_unless_it_is_allowed(change, name):
    with pytest.raises(UsageError, match=f"--{name} .* -> .*give --allow_changes"):
        change(name, 0.125)
    (said,) = change(name, 0.125, allow_changes=True)
    assert said.startswith(f"--{name} ")


def test_any_other_flag_may_change_and_is_printed_unless_it_holds_for_one_start(change, tmp_path):
    assert {n for n, p in POLICIES.items() if p == "never"} == ANOTHER_RUN
    assert {n for n, p in POLICIES.items() if p == "not compared"} == OF_ONE_START
    free = {n for n, p in POLICIES.items() if p == "allowed"}
    values = {"data": "tokens/b", "model": "gpt2-124m", "tp": 2}
    for name in free - MODEL.keys():
        value = values.get(name, 5)  # nothing is built, so that any value will do
        (said,) = change(name, value)
        assert said.startswith(f"--{name} ") and said.endswith(f" -> {value}")
    for name in ("allow_changes", "dry_run"):
        assert change(name, True) == []


def test_a_flag_that_only_the_checkpoint_has_is_refused(begin, tmp_path):
    save(tmp_path / "run", 10, label_smoothing=0.1)
    with pytest.raises(UsageError, match="--label_smoothing 0.1 -> unknown to this code"):
        begin()
    assert len(begin(allow_changes=True).changes) == 1
    save(tmp_path / "run", 20, label_smoothing=None)  # not set
    assert begin().changes == []


def test_flags_are_compared_as_resolved(begin, tmp_path):
    save(tmp_path / "run", 10, lr=0.5 / 32, warmup_steps=50, dtype="float32")
    assert begin().changes == []
    with pytest.raises(UsageError, match="--dtype float32 -> bfloat16"):
        begin(dtype="bfloat16")


TWO_RANKS = SimpleNamespace(size=2, local_size=2, device=torch.device("cpu"))


def test_the_folder_holds_the_flags_of_every_start(tmp_path):
    began = datetime(2026, 11, 21, tzinfo=UTC)
    for step, lr in ((0, 0.5), (10, 0.25)):
        now = began + timedelta(hours=step)
        run_folder.create(tmp_path, manifest(0, lr=lr), TWO_RANKS, step, now)
        times = [began + timedelta(hours=hours) for hours in (1, 2)]
        log = [{"step": 1, "val_loss": 5.5, "time": time.isoformat()} for time in times]
        lines = "".join(json.dumps(row) + "\n" for row in log)
        (tmp_path / "metrics.jsonl").write_text(f'{lines}{{"note": 1}}\n12\n{{"ti')
    starts = run_folder.read_starts(tmp_path)
    assert [start["last_logged"] for start in starts] == [None, times[1].isoformat()]
    assert [(start["step"], start["config"]["lr"]) for start in starts] == [(0, 0.5), (10, 0.25)]
    assert starts[0]["ranks"] == 2
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 0.25

    with open(tmp_path / "starts.jsonl", "a") as file:
        file.write('12\n{"note": 1}\n{"config": {"lr": 0.5}')  # torn, by a kill or a full disk
    run_folder.create(tmp_path, manifest(0, lr=0.1), TWO_RANKS, 20, now)
    starts = run_folder.read_starts(tmp_path)
    assert [start["config"]["lr"] for start in starts] == [0.5, 0.25, 0.1]
    assert starts[0]["time"] == began.isoformat()


# --------------------------------------------------------------------------------------------------
# One run at a time


def test_when_the_lock_is_released_its_file_is_gone(tmp_path, monkeypatch):
    """Else the next owner's could be deleted, which a third would not see."""
    out = tmp_path / "run"
    real_close, at_release = os.close, []

    def close(descriptor):
        at_release.append((out / "lock").exists())
        real_close(descriptor)

    with run_folder.hold_lock(out):
        (out / "metrics.jsonl").touch()
        monkeypatch.setattr(os, "close", close)
    assert at_release == [False]


def test_the_lock_of_another_run_is_not_deleted(tmp_path):
    with run_folder.hold_lock(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "renamed")
        (tmp_path / "run").mkdir()
        (tmp_path / "run/lock").write_text("another's")
    assert (tmp_path / "run/lock").read_text() == "another's"


def hold(out, is_held) -> None:
    """Lock `out`, start a child as a data loader does, and wait."""
    with run_folder.hold_lock(out):
        if os.fork():
            is_held.set()
        time.sleep(60)


@pytest.fixture
def first(tmp_path):
    """A process that holds the lock of tmp_path / "run", and has a child."""
    fork = multiprocessing.get_context("fork")
    is_held = fork.Event()
    process = fork.Process(target=hold, args=(tmp_path / "run", is_held))
    process.start()
    assert is_held.wait(20)
    child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    yield process
    process.kill()
    process.join()
    os.kill(int(child), signal.SIGKILL)


def test_a_folder_in_use_is_refused_but_a_dead_process_frees_it(first, tmp_path):
    line = rf"is in use by host .+, process {first.pid}: wait"
    with pytest.raises(UsageError, match=line), run_folder.hold_lock(tmp_path / "run"):
        pass
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    # although the child of the first, which has its open files, lives
    with run_folder.hold_lock(tmp_path / "run"):
        (tmp_path / "run/written").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["written"]


def test_a_restarted_job_waits_for_the_lock_of_a_lost_host(first, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    threading.Timer(0.5, first.kill).start()
    with run_folder.hold_lock(tmp_path / "run", timeout=20):
        assert (tmp_path / "run/lock").exists()


def test_an_unused_lock_leaves_what_was_there(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "a" / "b"):
        with run_folder.hold_lock(folder):
            assert (folder / "lock").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]
    line = "--out .*/file: File exists; choose another"
    with pytest.raises(UsageError, match=line), run_folder.hold_lock(tmp_path / "file"):
        pass


def test_a_link_to_no_folder_is_named(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    line = f"{link} is a link to {tmp_path}/gone, where there is no folder; choose another"
    for out in (link, link / "run"):
        with pytest.raises(UsageError, match=line), run_folder.hold_lock(out):
            pass
    assert not (tmp_path / "gone").exists()


def test_a_lock_file_replaced_before_it_was_locked_locks_nothing(tmp_path):
    """The last holder removes it, and a third run creates it anew."""
    path = tmp_path / "lock"
    lock_it = fcntl.lockf

    def replace_first(descriptor: int, operation: int) -> None:
        path.unlink()
        path.touch()
        lock_it(descriptor, operation)

    with mock.patch("fcntl.lockf", replace_first):
        assert try_lock(path) is None
    assert try_lock(path) is not None
