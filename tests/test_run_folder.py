"""Where a run starts: its checkpoint, its flags, what may change, and the lock."""

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import CPU, ROOT, children, exit_statuses, fork_ranks, resolve, wait_until

import checkpoint
import config
import data
import dist
from config import FLAGS
from errors import UsageError
from model import ModelConfig
from start import compare, find_origin, hold_lock

MODEL = {"vocab_size": 320, "n_layer": 2, "n_head": 2, "n_kv_head": 2}
MODEL |= {"d_model": 32, "d_ff": 64, "seq_len": 16}
SIZES = {name: size for name, size in MODEL.items() if name != "vocab_size"}
SIZE = 60_000  # bytes of a checkpoint's file, enough for the model
CRC32 = f"{zlib.crc32(bytes(SIZE)):08x}"
FOLDER = data.TokenFolder(Path("tokens/a"), np.dtype("<u2"), 257, "bytes", fingerprint="abc")


def given(**flags) -> list[str]:
    """The flags of the runs of this file, as typed."""
    own = {"data": "tokens/a", "global_batch_size": 8, "dtype": "float32", "device": "cpu"}
    return config.as_argv(own | SIZES | flags)


def save(out: Path, step: int, manifest: dict | None = None, **fields) -> Path:
    """Write a complete, valid checkpoint without tensors; `fields` go into its manifest."""
    path = out / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "full.safetensors").write_bytes(bytes(SIZE))
    files = {"full.safetensors": {"bytes": SIZE, "crc32": CRC32}}
    base = {"format": 2, "step": step, "files": files, "tokens": step * 128}
    sealed = checkpoint.seal(base | (manifest or recorded()) | fields)
    (path / "manifest.json").write_text(json.dumps(sealed))
    return path


def recorded(**flags) -> dict:
    """What the checkpoints of a run with these flags record."""
    return resolve(" ".join(given(**flags))).manifest


@pytest.fixture
def begin(tmp_path):
    """begin(argv): the origin of a start of tmp_path / "run", its run, and what has changed."""

    def call(argv: list[str], machine: dist.Machine = CPU) -> SimpleNamespace:
        world = dist.start("cpu")
        try:
            origin = find_origin([f"--out={tmp_path}/run", *argv], world)
        finally:
            torch.distributed.destroy_process_group()
        facts = data.facts_of(FOLDER)
        run = config.resolve(origin.given, machine, facts, origin.kept, origin.model_config)
        return SimpleNamespace(origin=origin, run=run, changes=compare(origin, run, FOLDER))

    return call


# --------------------------------------------------------------------------------------------------
# The model of a start


def test_flags_override_single_fields_of_a_saved_model(begin, tmp_path):
    """No flag could describe this model. Later the run continues from its own checkpoint."""
    model = MODEL | {"vocab_size": 500, "rope_theta": 5e5, "tied": False, "norm_eps": 1e-6}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model |= {"rope_scaling": scaling | {"original_seq_len": 8}}
    save(tmp_path / "other", 10, {"model": model, "tokenizer": "bytes"})  # as tools.hf writes it
    argv = ["--data=tokens/a", "--seq_len=8", f"--init_from={tmp_path}/other"]
    for own in (False, True):
        if own:
            save(tmp_path / "run", 20, begin(argv).run.manifest)
            (tmp_path / "other").rename(tmp_path / "gone")
        begun = begin(argv)
        assert begun.run.model_config == ModelConfig.from_dict(model | {"seq_len": 8})
        assert begun.run.model_config.rope_scaling.factor == 8.0
        assert (begun.run.n_layer, begun.run.d_model, begun.run.seq_len) == (2, 32, 8)
        assert begun.run.model == f"{tmp_path}/other"
        assert (begun.origin.step, begun.origin.only_weights) == ((20, False) if own else (0, True))
    assert begin([*argv, "--init_from=elsewhere"]).changes == []  # the run is past its beginning
    for tokens, vocab_size in ((500, 500), (501, 512)):  # 501 tokens do not fit its weights
        facts = data.DataFacts(vocab_size=tokens, tokenizer=None, fingerprint="abc")
        origin = begun.origin
        run = config.resolve(origin.given, CPU, facts, origin.kept, origin.model_config)
        assert run.model_config.vocab_size == vocab_size


@pytest.mark.parametrize("model, fits", [("tiny", True), ("gpt2-124m", False)])
def test_a_typed_model_must_be_that_of_the_weights(begin, tmp_path, model, fits):
    save(tmp_path / "other", 10)
    argv = [f"--init_from={tmp_path}/other", "--data=tokens/a", f"--model={model}"]
    if fits:
        assert begin(argv).run.n_layer == 2
        return
    with pytest.raises(UsageError, match=r"use the weights of .*n_layer 2 -> 12.*own model"):
        begin(argv)


# --------------------------------------------------------------------------------------------------
# What may change

KINDS = {kind: {n for n, f in FLAGS.items() if f.kind == kind} for kind in ("part", "free", "once")}
ONCE = {"out", "allow_changes", "dry_run", "eval_only", "device", "timeout", "profile"}
ONCE |= {"dp_replicate", "dp_shard", "tp"}
# Another value of each flag, if it is not twice the default or 5
OTHER_VALUES = {"schedule": "wsd", "clip": "adaptive", "optimizer": "muon", "dtype": "bfloat16"}
OTHER_VALUES |= {"data": "tokens/b", "wrap": "block", "strategy": "fsdp", "compile": True}
OTHER_VALUES |= {"reshard_after_forward": False, "grad_sync": "shard", "async_save": True}
OTHER_VALUES |= {"activation_checkpointing": "full", "tracker": "wandb", "checkpoint": "none"}
OTHER_VALUES |= {"micro_batch_size": 4, "lr": 0.125, "beta1": 0.5, "beta2": 0.5, "min_lr": 1e-4}


def other_value(name: str):
    return OTHER_VALUES.get(name, 2 * FLAGS[name].default if FLAGS[name].default else 5)


@pytest.mark.parametrize("name", sorted(KINDS["part"] - SIZES.keys() - {"model"}))
def test_a_part_needs_allow_changes(begin, tmp_path, name):
    save(tmp_path / "run", 3)
    value = other_value(name)
    with pytest.raises(UsageError, match=rf"--{name} .* -> {value}; .*--allow_changes"):
        begin(given(**{name: value}))
    changes = begin(given(**{name: value}, allow_changes=True)).changes
    assert changes[0].startswith(f"--{name} ") and len(changes) == 1 + (name == "global_batch_size")


@pytest.mark.parametrize("name", sorted(SIZES.keys() - {"seq_len"}))
def test_another_model_is_refused_in_any_case(begin, tmp_path, name):
    save(tmp_path / "run", 3, recorded(d_model=64, n_head=4, n_kv_head=4, d_ff=32, n_layer=3))
    with pytest.raises(UsageError, match=rf"{name} \d+ -> {SIZES[name]}.*only their own model"):
        begin(given(allow_changes=True))


# init_from only says where a run began, and peak_tflops had no value before.
@pytest.mark.parametrize("name", sorted(KINDS["free"] - {"init_from", "peak_tflops"}))
def test_a_change_of_a_free_flag_is_printed(begin, tmp_path, name):
    save(tmp_path / "run", 3)
    value = other_value(name)
    (said,) = begin(given(**{name: value})).changes
    assert said.startswith(f"--{name} ") and said.endswith(f" -> {value}")


def test_flags_of_one_start_are_neither_remembered_nor_compared(begin, tmp_path):
    assert KINDS["once"] == ONCE
    typed = {"dp_replicate": 1, "dp_shard": 1, "dry_run": True, "timeout": 7}
    manifest = recorded(**typed)
    save(tmp_path / "run", 3, manifest)
    assert not manifest["given"].keys() & ONCE
    assert begin(given()).changes == []
    assert begin([]).run.timeout == FLAGS["timeout"].default


def test_no_default_of_a_part_depends_on_a_free_flag():
    """Else a start with another value of the free flag would be refused or train differently."""
    parts = KINDS["part"]
    base = resolve("--data tokens/a")
    for name in sorted(KINDS["free"]):
        changed = resolve(f"--data tokens/a --{name} {str(other_value(name)).lower()}")
        assert {n: getattr(changed, n) for n in parts} == {n: getattr(base, n) for n in parts}


def test_a_flag_unknown_to_this_code_is_refused(begin, tmp_path):
    manifest = recorded()
    for step, smoothing in ((10, 0.1), (20, None)):  # later it was not set
        for record in ("given", "config"):
            manifest[record] = manifest[record] | {"label_smoothing": smoothing}
        save(tmp_path / "run", step, manifest)
        (tmp_path / "run/config.json").write_text(json.dumps(manifest["given"]))
        if smoothing is None:
            assert begin([]).changes == []
            continue
        with pytest.raises(UsageError, match="--label_smoothing 0.1 -> unknown to this code"):
            begin([])
        assert len(begin(["--allow_changes"]).changes) == 1


def test_a_flag_unknown_to_the_checkpoint_had_its_default(begin, tmp_path):
    manifest = recorded()
    for name in ("weight_decay", "lr"):  # one default is a number, the other is computed
        del manifest["given"][name], manifest["config"][name]
    save(tmp_path / "run", 10, manifest)
    assert begin([]).changes == []
    with pytest.raises(UsageError, match="--weight_decay 0.1 -> 0.5"):
        begin(["--weight_decay=0.5"])


def test_other_data_is_named_with_its_folder(begin, tmp_path):
    save(tmp_path / "run", 10, data="other")
    with pytest.raises(UsageError, match="fingerprint other -> abc .--data tokens/a -> tokens/b"):
        begin(["--data=tokens/b"])


# --------------------------------------------------------------------------------------------------
# Flags that are not typed


def test_a_value_that_this_code_does_not_know_is_reported_with_its_place(begin, tmp_path):
    manifest = recorded()
    manifest["given"]["clip"] = "halve"
    path = save(tmp_path / "run", 10, manifest)
    with pytest.raises(UsageError, match=f"{path}: .*--clip: halve: choose from norm, adaptive"):
        begin([])


def test_values_that_depend_on_the_ranks_are_computed_again(begin, tmp_path):
    text = " ".join(given(strategy="fsdp"))
    of_two = resolve(text, world_size=2)
    assert of_two.micro_batch_size == 4
    save(tmp_path / "run", 10, of_two.manifest)
    begun = begin([])
    assert (begun.run.strategy, begun.run.dp_shard, begun.run.micro_batch_size) == ("fsdp", 1, 8)
    mesh = "dp_replicate 1 x dp_shard {} x tp 1"
    changed = ["--micro_batch_size 4 -> 8", f"the mesh {mesh.format(2)} -> {mesh.format(1)}"]
    assert begun.changes == changed
    assert begin(["--micro_batch_size=auto", "--strategy=auto"]).run.strategy == "single"


def test_defaults_are_taken_from_the_run(begin, tmp_path):
    """Another code may have had other defaults, and other hardware computes in another dtype."""
    manifest = recorded(dtype="auto", weight_decay=0.25)
    save(tmp_path / "run", 20, manifest)
    new_hardware = dataclasses.replace(CPU, has_bfloat16=True)
    begun = begin([], new_hardware)
    assert (begun.run.dtype, begun.run.weight_decay, begun.changes) == ("float32", 0.25, [])
    (tmp_path / "run").rename(tmp_path / "gone")
    assert begin(["--data=tokens/a"], new_hardware).run.dtype == "bfloat16"


def test_an_evaluation_reads_as_many_sequences_at_once_as_training_did(begin, tmp_path):
    save(tmp_path / "run", 10, resolve(" ".join(given()), world_size=4).manifest)
    assert begin(["--eval_only"]).run.micro_batch_size == 2
    assert begin([]).run.micro_batch_size == 8


def test_a_file_overrides_the_run_and_typed_flags_override_both(begin, tmp_path):
    save(tmp_path / "run", 10, recorded(max_steps=10, eval_interval=10, keep_last=10))
    (tmp_path / "mine.json").write_text('{"eval_interval": 20, "keep_last": 20, "max_steps": null}')
    run = begin([f"--config={tmp_path}/mine.json", "--keep_last=30"]).run
    assert (run.max_steps, run.eval_interval, run.keep_last) == (10, 20, 30)


def test_a_small_model_keeps_the_strategy_of_a_configuration():
    argv = ["--config", f"{ROOT}/configs/llama3-8b.json", "--model", "tiny"]
    assert config.parse(argv).strategy == json.loads(Path(argv[1]).read_text())["strategy"]


# --------------------------------------------------------------------------------------------------
# One run at a time


def hold(out) -> None:
    """Lock `out`, start a child, and wait."""
    with hold_lock(out):
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
    with pytest.raises(UsageError, match=line), hold_lock(tmp_path / "run"):
        pass
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    # although the child, which shares the open files of the first process, is alive
    with hold_lock(tmp_path / "run"):
        (tmp_path / "run/written").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["written"]


def test_a_start_waits_for_the_lock_of_a_run_that_ends(first, tmp_path):
    threading.Timer(1.5, first.kill).start()
    with hold_lock(tmp_path / "run", wait=20):
        assert (tmp_path / "run/lock").exists()


def test_an_unused_lock_leaves_the_folder_unchanged(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path, tmp_path / "a" / "b"):
        with hold_lock(folder):
            assert (folder / "lock").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]
    line = "--out .*/file: File exists; choose another"
    with pytest.raises(UsageError, match=line), hold_lock(tmp_path / "file"):
        pass


def test_a_dangling_link_is_refused(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    line = f"{link} is a link to {tmp_path}/gone, where there is no folder; choose another"
    for out in (link, link / "run"):
        with pytest.raises(UsageError, match=line), hold_lock(out):
            pass
    assert not (tmp_path / "gone").exists()


def take_turns(out: Path, counter: Path) -> None:
    """Lock `out` a hundred times; each time add 1 to the counter, which only the owner may do."""
    done = 0
    while done < 100:
        with contextlib.suppress(UsageError), hold_lock(out):
            count = int(counter.read_text())
            time.sleep(0.0005)
            counter.write_text(str(count + 1))
            done += 1


def test_a_lock_has_one_owner_although_each_removes_its_file(tmp_path):
    """A process may lock the file of an owner who has just removed it."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = fork_ranks(3, take_turns, tmp_path / "run", counter)
    assert exit_statuses(processes) == [0, 0, 0]
    assert counter.read_text() == "300"
