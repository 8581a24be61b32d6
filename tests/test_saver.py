"""Saving: which checkpoints are kept, and saves that fail, on a rank or on a full disk."""

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import file_names, last_checkpoint, listen, make_saver, rows, tensors
from test_dist import TwoArguments

import checkpoint
import dist
import optim
import train
from tools.checkpoint import consolidate

EVERY_BIT = torch.arange(256, dtype=torch.uint8)  # every byte: also inf and nan


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("async_save", [False, True])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, one_rank, async_save):
    """Also tensors without dimensions, empty ones and ones that are not contiguous."""
    assert {"I8", "I16", "U16", "U32", "F8_E4M3", "F8_E5M2"} < checkpoint.DTYPES.keys()
    state = {"odd": {"number": torch.tensor(3.0), "empty": torch.empty(0, 4)}}
    state["odd"]["transposed"] = torch.arange(6.0).view(2, 3).mT
    for name, dtype in checkpoint.DTYPES.items():
        values = torch.randint(0, 2, (3,) if name == "BOOL" else (3, 5))
        state[name] = values.to(dtype)
        state[f"every bit of {name}"] = EVERY_BIT[: 2 if name == "BOOL" else None].view(dtype)
    saver = make_saver(tmp_path, async_save, 1, 0)
    saver.save(state, {"step": 1})
    saver.wait()
    assert saver.failure is None
    (path,) = checkpoint.list_checkpoints(tmp_path)
    assert checkpoint.verify(path) is None
    contents = (path / "rank-00000.safetensors").read_bytes()
    data = 8 + int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8:data])
    for name, entry in header.items():  # aligned when the file is mapped
        size = torch.empty(0, dtype=checkpoint.DTYPES[entry.get("dtype", "U8")]).itemsize
        assert name == "__metadata__" or (data + entry["data_offsets"][0]) % size == 0, name
    assert data % 8 == 0
    saved = dict(checkpoint.flatten(state))
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    checkpoint.load_state(path, loaded)
    for name, tensor in saved.items():
        assert bits(loaded[name]) == bits(tensor), name


NOT_SAVED = {"int": 5, "list": [1, 2], "torch.complex128": torch.ones(2, dtype=torch.complex128)}


@pytest.mark.parametrize("async_save", [False, True])
def test_state_that_could_not_be_loaded_is_not_saved(tmp_path, one_rank, async_save):
    for kind, value in NOT_SAVED.items():
        saver = make_saver(tmp_path, async_save, 1, 0)
        saver.save({"a": torch.ones(2), "b": {"odd": value}}, {"step": 1})
        saver.wait()
        assert f"b.odd cannot be saved: {kind} is none of F64, F32, F16" in saver.failure
        assert "\n" not in saver.failure
        assert [row["event"] for row in saver.take_rows()] == ["checkpoint_failed"]
    assert not file_names(tmp_path)


def test_an_async_save_uses_a_separate_process_group(tmp_path, one_rank):
    """In a shared group, its collectives could be matched with those of the training step."""
    groups = []
    gather = torch.distributed.all_gather_object

    def record(answers, result, group=None):
        groups.append(group)
        gather(answers, result, group=group)

    saver = make_saver(tmp_path, True, 0, 0)
    with mock.patch.object(torch.distributed, "all_gather_object", record):
        saver.save({"weight": torch.ones(3)}, {"step": 1})
        saver.wait()
        first_save = len(groups)
        saver.save({"weight": torch.ones(3)}, {"step": 2})
        saver.wait()
    # After the copy, and three times in save_state
    assert groups == [saver.group] * 8 and first_save == 4
    assert saver.failure is None


def test_an_async_save_waits_for_the_previous_save(tmp_path, one_rank):
    """Otherwise the first checkpoint would get weights of the second, with valid checksums."""
    saver = make_saver(tmp_path, True, 0, 0)
    weight = torch.ones(3)
    waits = threading.Event()  # nothing of step 1 is written before this event
    write, wait = checkpoint.write_safetensors, saver.wait

    def write_late(*arguments):
        assert waits.wait(20)
        return write(*arguments)

    with mock.patch.object(checkpoint, "write_safetensors", write_late):
        saver.save({"weight": weight}, {"step": 1})
        weight.fill_(2)
        with mock.patch.object(saver, "wait", lambda: (waits.set(), wait())):
            saver.save({"weight": weight}, {"step": 2})
        saver.wait()
    first, second = checkpoint.list_checkpoints(tmp_path)
    assert tensors(first)["weight"].tolist() == [1, 1, 1]
    assert tensors(second)["weight"].tolist() == [2, 2, 2]


def test_a_save_is_synced_before_and_after_its_rename(tmp_path, one_rank):
    events = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_rename(old: Path, new: Path) -> None:
        events.append(f"{old.name} -> {new.name}")
        rename(old, new)

    saver = make_saver(tmp_path, False, 0, 0, extra_files={"x.json": b"x"})
    with mock.patch.multiple(os, fsync=record_fsync, rename=record_rename):
        saver.save({"weight": torch.ones(3)}, {"step": 1})
    *files, manifest, work, renamed, parent = events
    assert sorted(files) == ["index.json", "rank-00000.safetensors", "x.json"]
    assert (manifest, work) == ("manifest.json", ".step-00000001.tmp")
    assert (renamed, parent) == (".step-00000001.tmp -> step-00000001", "checkpoints")


# Longer than a single read
TOKENIZER_FILE = b"IQ== 0\n" * 200_000


def save_with_extra_files(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    extra = {"my.json": TOKENIZER_FILE}
    saver = make_saver(folder, False, 0, 0, extra_files=extra)
    saver.save({"weight": torch.ones(3)}, {"step": 1})
    assert saver.failure is None


def test_extra_files_belong_to_every_checkpoint(pool, tmp_path):
    """Also to a consolidated checkpoint."""
    pool(2, save_with_extra_files, tmp_path)
    path = last_checkpoint(tmp_path)
    consolidate(path, tmp_path / "one")
    assert (tmp_path / "one/my.json").read_bytes() == TOKENIZER_FILE
    assert (path / "my.json").read_bytes() == TOKENIZER_FILE
    assert checkpoint.read_manifest(path)["files"]["my.json"]["bytes"] == 1_400_000
    (path / "my.json").write_bytes(b"IQ== 1\n" + TOKENIZER_FILE[7:])
    assert "my.json has changed since it was written" in checkpoint.verify(path)


# --------------------------------------------------------------------------------------------------
# Saves that fail


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


def errors_of_a_save() -> list[Exception]:
    """Errors with the text "this disk is lost". Only the last two can be sent to another rank."""

    class Local(Exception):
        pass

    text = "this disk is lost"
    with_lock = OSError(text)
    with_lock.lock = threading.Lock()
    errors = [Unpicklable(text), TwoArguments("disk", "lost"), Local(text), with_lock]
    return [*errors, TypeError(text), OSError(text)]


# What fails, and on which rank: the start of a save, writing a rank's file, publishing
PLACES = {"check_tensors": 1, "write_safetensors": 1, "write_index": 0}


def save_with_errors(run: Path, async_save: bool) -> list[str | None]:
    """Save where nothing can be written, then with an error of one rank, then without errors.

    Return `failure` before the first save and after each save.
    """
    rank = dist.start("cpu").rank
    saver = make_saver(run, async_save, 0, 0)
    failures = [saver.failure]

    def save(step: int) -> None:
        saver.save({"a": torch.ones(3), "b": torch.ones(3)}, {"step": step})
        saver.wait()
        failures.append(saver.failure)

    save(1)
    torch.distributed.barrier()
    if rank == 0:
        run.parent.unlink()
    torch.distributed.barrier()
    for error in errors_of_a_save():
        for place, failing in PLACES.items():
            with contextlib.ExitStack() as stack:
                if rank == failing:
                    stack.enter_context(mock.patch.object(checkpoint, place, side_effect=error))
                save(2)
    assert not checkpoint.list_checkpoints(run)
    torch.distributed.barrier()
    save(2)
    events = [row["event"] for row in saver.take_rows()]
    assert events == ["checkpoint_failed"] * (len(failures) - 2) + ["checkpoint"]
    return failures


@pytest.mark.parametrize("async_save", [False, True])
def test_a_failed_save_is_reported_on_all_ranks(pool, tmp_path, async_save):
    run = tmp_path / "a_file" / "run"
    run.parent.write_text("in the way")
    answers = pool(2, save_with_errors, run, async_save, timeout=10)
    for before, in_the_way, *lost, succeeded in answers:
        assert before is None
        assert in_the_way.startswith(f"cannot write {run}/checkpoints/step-00000001: rank 0: [Errn")
        line = f"cannot write {run}/checkpoints/step-00000002: rank"
        expected = [f"{line} {rank}: this disk is lost" for rank in PLACES.values()]
        assert lost == expected * 6
        assert succeeded is None


def test_a_refused_save_only_logs_a_row(tmp_path, one_rank):
    """It touches no file and does not communicate: all ranks know that they refuse."""
    (tmp_path / "checkpoints/.step-00000002.tmp").mkdir(parents=True)  # left by a killed save
    saver = make_saver(tmp_path, False, 1, 0)
    no_gather = mock.patch.object(torch.distributed, "all_gather_object", side_effect=OSError)
    with no_gather as gather:
        saver.refuse(3, "a weight is not finite", ends_run=True)
    assert not gather.called
    path = checkpoint.step_path(tmp_path, 3)
    (row,) = saver.take_rows()
    assert row.pop("seconds") == row.pop("blocking_seconds")
    failed = {"step": 3, "event": "checkpoint_failed", "error": "a weight is not finite"}
    assert row == failed | {"path": str(path)}
    assert saver.failure == f"cannot write {path}: a weight is not finite"
    assert saver.ends_run
    assert file_names(tmp_path / "checkpoints") == [".step-00000002.tmp"]
    assert saver.take_rows() == []


def listen_with_a_fault(argv: list[str], odd: int, name: str, fault: str) -> tuple[int, str, str]:
    """Run train.py. After step 4, flip one bit of a weight of rank `odd`, or make it nan."""
    train_step = train.train_step

    def change_later(state, *rest):
        values = train_step(state, *rest)
        if state.step == 4 and int(os.environ["RANK"]) == odd:
            weight = optim.local(state.optimizer.parameters[name]).detach().view(-1)
            weight.view(torch.int32)[0] ^= 1
            weight[0] *= torch.nan if fault == "nan" else 1
        return values

    with mock.patch.object(train, "train_step", change_later):
        return listen(argv)


# (mesh, fault) -> the rank and the weight that change, the other ranks with a copy of that part
FAULTS = {
    ("hsdp --dp_shard 2 --async_save", "nan"): (3, "blocks.0.mlp.down.weight", [1]),
    ("fsdp --tp 2", "bit"): (1, "blocks.0.attention_norm.weight", [0]),
    ("ddp", "bit"): (2, "blocks.1.attention.q.weight", [0, 1, 3]),
}


@pytest.mark.parametrize("mesh, fault", FAULTS)
def test_a_corrupted_weight_of_one_rank_is_not_saved(on_ranks, tmp_path, mesh, fault):
    odd, name, others = FAULTS[mesh, fault]
    out = tmp_path / "run"
    text = f"--strategy {mesh} --max_steps 5 --save_interval 2 --global_batch_size 4"
    text += " --check_replicas"
    answers = on_ranks(4, listen_with_a_fault, text, odd, name, fault)
    assert [status for status, _, _ in answers] == [1] * 4
    assert [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(out)] == [2]
    _, _, error = answers[0]
    assert error.count("\n") == 1
    (failed,) = [row for row in rows(out, "event") if row["step"] == 4]
    if fault == "nan":
        assert failed["error"] == "the loss or a weight is not finite"
        return
    assert error == f"train.py: error: cannot write {failed['path']}: {failed['error']}\n"
    assert failed["error"].startswith(f"{name} has different bits on rank ")
    named = [int(rank) for rank in re.findall(r"rank (\d) \(", error)]
    assert odd == named[0] or named == [*others, odd]  # of two copies, either may be wrong
    assert set(named) <= {odd, *others} and socket.gethostname() in error


def test_a_run_and_its_checkpoints_survive_a_full_disk(on_ranks, small_disk):
    out = small_disk / "run"
    text = f"--out {out} --max_steps 5 --save_interval 1 --keep_last 0 --strategy fsdp --async_save"
    (status, said, error), (other_status, *_) = on_ranks(2, listen, text)
    assert status == other_status == 1  # because the last checkpoint is missing
    assert "NOT SAVED: cannot write" in said
    assert "step 5/5" in said
    assert error.count("\n") == 1
    assert "No space left on device" in error
    saved = checkpoint.list_checkpoints(out)
    assert saved
    assert all(checkpoint.verify(path) is None for path in saved)
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    ((status, said, _), _) = on_ranks(2, listen, text)
    assert status == 0
    assert f"continuing from {saved[-1]}" in said
    assert len(checkpoint.list_checkpoints(out)) == 5
    assert not list((out / "checkpoints").glob(".*"))
