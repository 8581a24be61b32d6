"""Run folders: which process may write, which run may continue, and from which checkpoint."""

import fcntl
import json
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
from conftest import CPU, children, fork_ranks, resolve, wait_until

import checkpoint
import config
import data
import layout
import train
from config import POLICIES
from errors import UsageError
from model import ModelConfig
from runtime import run_folder
from runtime.lock import try_lock

MODEL = {"vocab_size": 320, "n_layer": 2, "n_head": 2, "n_kv_head": 2}
MODEL |= {"d_model": 32, "d_ff": 64, "seq_len": 16}
SIZE = 60_000  # bytes of a checkpoint's file, enough for the model
CRC32 = f"{zlib.crc32(bytes(SIZE)):08x}"


def manifest(step: int, dtype: str = "float32", data: str = "abc", model=MODEL, **flags) -> dict:
    """The manifest of a checkpoint of step `step`, after a start with `flags`."""
    config = {"global_batch_size": 8, "d_model": 32, "data": "tokens/a", **flags}
    files = {"full.safetensors": {"bytes": SIZE, "crc32": CRC32}}
    base = {"format": 2, "step": step, "files": files, "model": model, "data": data, "dtype": dtype}
    return base | {"config": {"seed": 0} | config}


def save(out, step: int, fields: dict | None = None, **changes):
    """Write a complete, valid checkpoint without tensors; `fields` go into its manifest."""
    path = out / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "full.safetensors").write_bytes(bytes(SIZE))
    sealed = checkpoint.seal(manifest(step, **changes) | (fields or {}))
    (path / "manifest.json").write_text(json.dumps(sealed))
    return path


FOLDER = data.TokenFolder(Path("tokens/a"), np.dtype("<u2"), 257, "bytes", fingerprint="abc")


@pytest.fixture
def begin(tmp_path):
    """begin(**flags): what train.command passes to train.train for a run in tmp_path / "run"."""

    def call(**flags) -> SimpleNamespace:
        sizes = {name: size for name, size in MODEL.items() if name != "vocab_size"}
        own = {"out": str(tmp_path / "run"), "data": "tokens/a", "dtype": "float32"}
        given = {"global_batch_size": 8, "device": "cpu", **sizes, **own, **flags}
        argv = [f"--{name}={value}" for name, value in given.items() if value is not None]
        started = SimpleNamespace()

        def train_nothing(run, origin, folders, world, watchdog, notes, **options) -> int:
            vars(started).update(run=run, origin=origin, notes=notes)
            return 0

        with (
            mock.patch.object(data, "open_folders", lambda names: [FOLDER]),
            mock.patch.object(train, "train", train_nothing),
        ):
            try:
                assert train.command(argv) == 0
            finally:
                if torch.distributed.is_initialized():  # after an error
                    torch.distributed.destroy_process_group()
        return started

    return call


def changes(start: SimpleNamespace) -> list[str]:
    """The notes on flags that changed."""
    lines = [note.partition("changed: ")[2] for note in start.notes]
    return [line for line in lines if line]


# --------------------------------------------------------------------------------------------------
# Where a run starts


def test_flags_override_single_fields_of_a_saved_model(begin, tmp_path):
    """No flag could describe this model. Later the run continues from its own checkpoint."""
    model = MODEL | {"vocab_size": 500, "rope_theta": 5e5, "tied": False, "norm_eps": 1e-6}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model |= {"rope_scaling": scaling | {"original_seq_len": 8}}
    save(tmp_path / "other", 10, model=model)
    seq_len = 8
    flags = dict.fromkeys(MODEL.keys() - {"vocab_size"}) | {"seq_len": seq_len}
    flags |= {"init_from": str(tmp_path / "other")}
    for own in (False, True):
        if own:
            save(tmp_path / "run", 20, model=model | {"seq_len": seq_len})
            (tmp_path / "other").rename(tmp_path / "gone")
        start = begin(**flags)
        assert start.run.model_config == ModelConfig.from_dict(model | {"seq_len": seq_len})
        assert start.run.model_config.rope_scaling.factor == 8.0
        assert (start.run.n_layer, start.run.d_model, start.run.seq_len) == (2, 32, seq_len)
        if not own:  # in config.json, for a new run
            assert start.run.flags["n_layer"] == 2
    for tokens, vocab_size in ((500, 500), (501, 512)):  # 501 tokens do not fit its weights
        facts = data.DataFacts(vocab_size=tokens, tokenizer=None, fingerprint="abc")
        run = layout.resolve(start.run.flags, CPU, facts, start.origin)
        assert run.model_config.vocab_size == vocab_size


def test_a_change_that_makes_another_run_is_refused(begin, tmp_path):
    changes = {"global_batch_size": 16, "seed": 7, "optimizer": "muon", "data": "other"}
    path = save(tmp_path / "run", 10, model=MODEL | {"d_model": 64}, **changes)
    with pytest.raises(UsageError) as error:
        begin(allow_changes=True, seed=0, optimizer="adamw")
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


# --------------------------------------------------------------------------------------------------
# Flags that changed


# docs/reference.md lists them (test_config.py)
REFUSED = {name for name, policy in POLICIES.items() if policy == "refused"}
ANOTHER_RUN = {"seed", "global_batch_size", "optimizer", "model"}
OF_ONE_START = {"out", "init_from", "allow_changes", "dry_run", "eval_only"}
OF_ONE_START |= {"device", "timeout", "profile"}


@pytest.fixture
def change(begin, tmp_path):
    """change(name, value, **flags): the notes of a start with another value of one flag."""
    save(tmp_path / "run", 3, begin(lr=0.25).run.manifest)

    def call(name: str, value, **flags) -> list[str]:
        return changes(begin(**{"lr": 0.25, **flags, name: value}))

    return call


@pytest.mark.parametrize("name", sorted(REFUSED - {"dtype"}))
def test_a_flag_that_changes_numbers_needs_allow_changes(change, name):
    values = {"schedule": "wsd", "clip": "adaptive"}
    values |= dict.fromkeys(("keep_last", "warmup_steps"), 5)
    value = values.get(name, 0.125)
    with pytest.raises(UsageError, match=f"--{name} .* -> .*give --allow_changes"):
        change(name, value)
    (said,) = change(name, value, allow_changes=True)
    assert said.startswith(f"--{name} ")


OTHER_VALUES = {"data": "tokens/b", "wrap": "block", "strategy": "fsdp"}
OTHER_VALUES |= {"reshard_after_forward": False}
OTHER_VALUES |= {"activation_checkpointing": "full", "tracker": "wandb", "checkpoint": "none"}
OTHER_VALUES |= {"async_save": True, "compile": True, "micro_batch_size": 4}


def test_a_change_of_any_other_flag_is_printed(change):
    assert {name for name, policy in POLICIES.items() if policy == "never"} == ANOTHER_RUN
    free = {name for name, policy in POLICIES.items() if policy == "allowed"}
    # These need more ranks, or had no value before.
    free -= {"tp", "dp_replicate", "dp_shard", "grad_sync", "peak_tflops"}
    for name in free - MODEL.keys():
        value = OTHER_VALUES.get(name, 5)
        said = change(name, value)
        assert f" -> {value}" in said[-1] and len(said) == 1
        assert said[0].startswith(f"--{name} ")


def test_flags_of_a_single_start_are_not_compared(change):
    assert {name for name, policy in POLICIES.items() if policy == "not compared"} == OF_ONE_START
    for name in ("allow_changes", "dry_run"):
        assert change(name, True) == []


def test_a_flag_unknown_to_this_code_is_refused(begin, tmp_path):
    save(tmp_path / "run", 10, label_smoothing=0.1)
    with pytest.raises(UsageError, match="--label_smoothing 0.1 -> unknown to this code"):
        begin()
    assert len(changes(begin(allow_changes=True))) == 1
    save(tmp_path / "run", 20, label_smoothing=None)  # not set
    assert changes(begin()) == []


# --------------------------------------------------------------------------------------------------
# Flags that are not typed


NOT_TYPED = dict.fromkeys((*MODEL.keys() - {"vocab_size"}, "global_batch_size", "data", "dtype"))


def test_a_flag_value_unknown_to_this_code_is_reported(begin, tmp_path):
    save(tmp_path / "run", 10, clip="halve")
    with pytest.raises(UsageError, match="--clip halve of the run is unknown .* norm, adaptive"):
        begin(**NOT_TYPED)


def test_values_that_depend_on_the_ranks_are_recomputed(begin, tmp_path):
    text = "--strategy fsdp --global_batch_size 8 --data tokens/a"
    of_two = resolve(text, world_size=2)
    assert of_two.micro_batch_size == 4
    save(tmp_path / "run", 10, of_two.manifest)
    start = begin(**NOT_TYPED)
    assert (start.run.strategy, start.run.dp_shard, start.run.micro_batch_size) == ("fsdp", 1, 8)
    assert changes(start) == ["--dp_shard 2 -> 1", "--micro_batch_size 4 -> 8"]
    # A typed flag of the mesh replaces all of them.
    assert begin(**NOT_TYPED, tp=1).run.strategy == "single"


def test_a_run_keeps_its_value_when_a_default_changes(begin, tmp_path):
    defaults = {"weight_decay": 0.2, "warmup_steps": 70}
    save(tmp_path / "run", 20, resolve("--global_batch_size 8").manifest)
    with mock.patch.dict(config.DEFAULTS, defaults):
        start = begin(**NOT_TYPED)
    assert (start.run.weight_decay, start.run.warmup_steps) == (0.1, 50)


TWO_RANKS = SimpleNamespace(size=2, local_size=2, device=torch.device("cpu"))


def started_with(lr: float) -> dict:
    return manifest(0, lr=lr) | {"flags": {"lr": lr}}


def test_the_folder_records_the_flags_of_every_start(tmp_path):
    began = datetime(2026, 11, 21, tzinfo=UTC)
    for step, lr in ((0, 0.5), (10, 0.25)):
        now = began + timedelta(hours=step)
        run_folder.record_start(tmp_path, started_with(lr), TWO_RANKS, step, now)
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
    run_folder.record_start(tmp_path, started_with(0.1), TWO_RANKS, 20, now)
    starts = run_folder.read_starts(tmp_path)
    assert [start["config"]["lr"] for start in starts] == [0.5, 0.25, 0.1]
    assert starts[0]["time"] == began.isoformat()


# --------------------------------------------------------------------------------------------------
# One run at a time


def test_the_lock_file_is_removed_before_the_lock_is_released(tmp_path, monkeypatch):
    """Otherwise the file of the next owner could be removed, and a third run could lock it."""
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


def hold(out) -> None:
    """Lock `out`, start a child as a data loader does, and wait."""
    with run_folder.hold_lock(out):
        os.fork()
        time.sleep(60)


@pytest.fixture
def first(tmp_path):
    """A process that holds the lock of tmp_path / "run", and has a child."""
    (process,) = fork_ranks(1, hold, tmp_path / "run")
    wait_until(lambda: children(process.pid), 20)
    (child,) = children(process.pid)
    yield process
    os.kill(child, signal.SIGKILL)


def test_a_folder_stays_locked_until_its_process_dies(first, tmp_path):
    line = rf"is in use by host .+, process {first.pid}: wait"
    with pytest.raises(UsageError, match=line), run_folder.hold_lock(tmp_path / "run"):
        pass
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    # although the child, which shares the open files of the first process, is alive
    with run_folder.hold_lock(tmp_path / "run"):
        (tmp_path / "run/written").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["written"]


def test_a_restarted_job_waits_for_the_lock_of_a_lost_host(first, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    threading.Timer(0.5, first.kill).start()
    with run_folder.hold_lock(tmp_path / "run", timeout=20):
        assert (tmp_path / "run/lock").exists()


def test_an_unused_lock_leaves_the_folder_unchanged(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "a" / "b"):
        with run_folder.hold_lock(folder):
            assert (folder / "lock").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]
    line = "--out .*/file: File exists; choose another"
    with pytest.raises(UsageError, match=line), run_folder.hold_lock(tmp_path / "file"):
        pass


def test_a_dangling_link_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    line = f"{link} is a link to {tmp_path}/gone, where there is no folder; choose another"
    for out in (link, link / "run"):
        with pytest.raises(UsageError, match=line), run_folder.hold_lock(out):
            pass
    assert not (tmp_path / "gone").exists()


def test_a_lock_file_replaced_before_it_is_locked_is_rejected(tmp_path):
    """The last holder removes the file, and a third run creates another."""
    path = tmp_path / "lock"
    lock_it = fcntl.lockf

    def replace_first(descriptor: int, operation: int) -> None:
        path.unlink()
        path.touch()
        lock_it(descriptor, operation)

    with mock.patch("fcntl.lockf", replace_first):
        assert try_lock(path) is None
    assert try_lock(path) is not None
