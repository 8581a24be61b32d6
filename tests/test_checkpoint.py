"""Checkpoints: any mesh to any mesh, damaged, hostile, too large for the disk, or of 2026-11-20."""

import base64
import contextlib
import io
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import threading
import warnings
import zlib
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import assert_same, build_run, call_train, flags, listen, rows, tensors
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import checkpoint
import train
from model import ModelConfig, build_model
from tools import checkpoint as commands

TEN_STEPS = "--max_steps 10 --dtype float32 --save_interval 5 --keep_last 0"
RANKS = {"single": 1, "ddp": 4, "fsdp": 4, "hsdp --dp_shard 2": 4, "fsdp --tp 2": 4}
FORMATS = ["sharded", "sharded --async_save", "full"]
FORMAT_OF_MESH = {
    "single": "sharded",
    "ddp": "sharded --async_save",
    "fsdp": "full",
    "hsdp --dp_shard 2": "sharded",
    "fsdp --tp 2": "sharded --async_save",
}


def last_checkpoint(run: Path) -> Path:
    return checkpoint.list_checkpoints(run)[-1]


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def whole(pool, tokens, tmp_path_factory) -> dict[str, Path]:
    """On every mesh a run of 10 steps without a stop, with a checkpoint at step 5."""
    root = tmp_path_factory.mktemp("whole")
    runs = {}
    for mesh, ranks in RANKS.items():
        runs[mesh] = root / mesh.replace(" ", "")
        text = f"{TEN_STEPS} --strategy {mesh} --checkpoint {FORMAT_OF_MESH[mesh]}"
        argv = flags(f"--data {tokens} --out {runs[mesh]} {text}")
        assert pool(ranks, call_train, argv) == [0] * ranks
    return runs


# ---- resuming


@pytest.mark.parametrize("mesh", RANKS)
def test_five_steps_and_five_more_are_ten_bit_for_bit(run, whole, tmp_path, mesh):
    resumed = tmp_path / "resumed"
    shutil.copytree(whole[mesh], resumed)  # as if killed between step 5 and step 10
    shutil.rmtree(resumed / "checkpoints" / "step-00000010")
    run(RANKS[mesh], f"{TEN_STEPS} --strategy {mesh}", "resumed")
    expected = rows(whole[mesh])
    actual = rows(resumed)
    assert [row["step"] for row in actual] == list(range(1, 11))  # no step is logged twice
    for key in ("loss", "lr", "grad_norm"):
        assert [row[key] for row in actual] == [row[key] for row in expected]
    assert_same(whole[mesh], resumed)


RING = list(zip(RANKS, [*list(RANKS)[1:], "single"]))  # from each mesh to the next


@pytest.mark.parametrize("start, goal", RING)
def test_a_checkpoint_of_any_mesh_continues_on_another(run, whole, start, goal):
    """The checkpoints are in the format of FORMAT_OF_MESH[start]."""
    path = whole[start] / "checkpoints" / "step-00000005"
    resumed = rows(run(RANKS[goal], f"{TEN_STEPS} --strategy {goal} --resume {path}"))
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
    assert (path / "full.pt").exists()
    argv = flags(f"--data {tokens} --out {tmp_path}/run --dtype float32 --strategy {mesh}")
    for copied, held in pool(4, load_and_count, argv, path):
        assert copied == held


# ---- what is saved


@pytest.mark.parametrize("mesh", RANKS)
def test_every_value_is_written_once(whole, mesh):
    path = last_checkpoint(whole[mesh])
    state = tensors(path)
    values = sum(tensor.nbytes for tensor in state.values())
    on_disk = 0
    for file in path.iterdir():
        if file.suffix in (".distcp", ".pt"):
            on_disk += file.stat().st_size
    headers = 2000 * len(state) * RANKS[mesh]  # each shard of a tensor has one
    assert values < on_disk < values + headers


@pytest.mark.parametrize("mesh", RANKS)
def test_names_are_those_of_the_bare_model(whole, mesh):
    state = tensors(last_checkpoint(whole[mesh]))
    names = {name.removeprefix("model.") for name in state if name.startswith("model.")}
    assert "blocks.1.attention.q.weight" in names
    assert len(names) == 20
    for slot in ("exp_avg", "exp_avg_sq", "step"):
        assert {f"optimizer.{slot}.{name}" for name in names} < state.keys()
    assert not [name for name in state if "_orig_mod" in name or "module." in name]


def test_keep_last_and_keep_every_leave_a_copy_that_the_user_made(run, tmp_path):
    copy = tmp_path / "run" / "checkpoints" / "step-00000001-copy"
    copy.mkdir(parents=True)
    (copy / "manifest.json").write_text("{}")
    out = run(1, "--max_steps 7 --save_interval 1 --keep_last 2 --keep_every 4")
    kept = ["step-00000004", "step-00000006", "step-00000007"]
    assert file_names(out / "checkpoints") == [copy.name, *kept]
    assert [path.name for path in checkpoint.list_checkpoints(out)] == kept
    assert [row["step"] for row in rows(out, "event")] == list(range(1, 8))


def save_over_later_ones(folder: Path) -> list[str]:
    """Save step 2 with --keep_last 1 beside damaged checkpoints that are later."""
    torch.distributed.init_process_group("gloo")
    saver = checkpoint.Saver(folder, "sharded", False, 1, 0, timedelta(seconds=20))
    for step in (1, 2):
        saver.save({"weight": torch.ones(3)}, {"step": step})
        assert saver.failure is None
    return file_names(folder / "checkpoints")


def test_checkpoints_that_are_later_and_damaged_do_not_count_as_kept(pool, tmp_path):
    later = tmp_path / "checkpoints" / "step-00000009"
    later.mkdir(parents=True)
    (later / "manifest.json").write_text("torn")
    assert pool(1, save_over_later_ones, tmp_path) == [["step-00000002", later.name]]


@pytest.mark.parametrize("mesh", ["ddp", "fsdp", "hsdp --dp_shard 2"])
def test_rows_and_manifest_of_a_checkpoint(whole, mesh):
    _, row = rows(whole[mesh], "event")
    path = last_checkpoint(whole[mesh])
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    assert row["event"] == "checkpoint"
    assert row["step"] == 10
    assert row["path"] == str(path)
    assert row["bytes"] == sum(file.stat().st_size for file in files)
    assert 0 < row["blocking_seconds"] <= row["seconds"]
    assert ("async" in FORMAT_OF_MESH[mesh]) == (row["blocking_seconds"] < row["seconds"])
    assert row["host_memory_before"] > 1e7
    assert row["host_memory_after"] > 1e7
    assert row["peak_host_memory"] > 0.99 * row["host_memory_before"]  # Linux counts roughly
    assert row["available_host_memory"] > 1e6
    manifest = checkpoint.read_manifest(path)
    assert manifest["step"] == 10
    assert manifest["tokens"] == 10 * 8 * 16
    assert {"files", "config", "model", "data", "torch"} < manifest.keys()
    assert manifest["files"].keys() == {file.name for file in files}
    assert checkpoint.verify(path) is None


CUDA_CALLS = ["current_device", "current_stream", "init", "set_device", "stream", "synchronize"]


def save_beside_a_gpu(folder: Path) -> list[str]:
    """Save tensors on the CPU where CUDA seems to be available; return the calls of it."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    state = {"whole": torch.ones(3), "shards": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    calls = []

    def fail(*args, **kwargs):
        calls.append(threading.current_thread().name)
        raise RuntimeError("no context on GPU 0")

    cuda = dict.fromkeys(CUDA_CALLS, fail) | {"is_available": lambda: True}
    with mock.patch.multiple(torch.cuda, **cuda):
        for format in ("sharded", "full"):
            for async_save in (False, True):
                run = folder / f"{format} {async_save}"
                saver = checkpoint.Saver(run, format, async_save, 1, 0, timedelta(seconds=20))
                for step in (1, 2):
                    saver.save(state, {"step": step})
                saver.wait()
                calls += [saver.failure] if saver.failure else []
    return calls


def test_saving_from_the_cpu_leaves_gpu_0_alone(pool, tmp_path):
    assert pool(2, save_beside_a_gpu, tmp_path) == [[], []]


# ---- damage


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


def test_a_half_written_checkpoint_does_not_count_and_the_next_save_removes_it(run, tokens, pool):
    out = run(1, "--max_steps 4 --save_interval 2 --keep_last 0")
    last = last_checkpoint(out)
    (last / "manifest.json").unlink()
    os.rename(last, last.with_name(f".{last.name}.tmp"))
    (out / "checkpoints" / "notes").write_text("mine")
    assert [path.name for path in checkpoint.list_checkpoints(out)] == ["step-00000002"]
    argv = flags(f"--data {tokens} --out {out} --max_steps 4 --keep_last 0")
    assert pool(1, call_train, argv) == [0]
    assert file_names(out / "checkpoints") == ["notes", "step-00000002", "step-00000004"]


# ---- full disks, small hosts


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_ends_no_run_and_loses_no_checkpoint(pool, tokens, small_disk, format):
    out = small_disk / "run"
    text = f"--max_steps 5 --save_interval 1 --keep_last 0 --strategy fsdp --checkpoint {format}"
    argv = flags(f"--data {tokens} --out {out} {text}")
    answers = pool(2, listen, argv)
    assert [status for status, _, _ in answers] == [1, 1]  # since the last checkpoint is missing
    _, said, error = answers[0]
    assert "NOT SAVED: cannot write" in said
    assert "step 5/5" in said
    assert error.count("\n") == 1
    assert f"the disk is full, or its quota: 0.0 MB free at {out}" in error
    saved = checkpoint.list_checkpoints(out)
    assert saved
    assert all(checkpoint.verify(path) is None for path in saved)
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    ((status, said, _), _) = pool(2, listen, argv)
    assert status == 0
    assert f"continuing from {saved[-1]}" in said
    assert len(checkpoint.list_checkpoints(out)) == 5
    assert not list((out / "checkpoints").glob(".*"))


def save_too_much(folder: Path, format: str) -> str | None:
    torch.distributed.init_process_group("gloo")
    saver = checkpoint.Saver(folder, format, False, 0, 0, timedelta(seconds=20))
    saver.save({"weight": torch.ones(1_000_000)}, {"step": 1})
    return saver.failure


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_an_error_of_torch_that_does_not_say_so_is_said_to_be_a_full_disk(pool, small_disk, format):
    (failure,) = pool(1, save_too_much, small_disk, format)
    assert failure.startswith(f"cannot write {small_disk}/checkpoints/step-00000001: the disk is")
    assert "unexpected pos" in failure  # of torch.save, which is all that it says
    assert "\n" not in failure


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


# What fails on rank 1: the writing of its shards by DCP, and what follows it
PLACES = [(torch.distributed.checkpoint.FileSystemWriter, "write_data"), (checkpoint, "checksum")]


def save_with_errors(run: Path, async_save: bool) -> list[str | None]:
    """Save where nothing can be written, with errors on rank 1, and without one.

    Returns `failure` before the first save and after each.
    """
    torch.distributed.init_process_group("gloo")
    saver = checkpoint.Saver(run, "sharded", async_save, 0, 0, timedelta(seconds=20))
    errors = [TypeError("lost"), Unpicklable("lost"), OSError("lost")]
    if async_save:
        errors.append(SystemExit("lost"))
    failures = [saver.failure]

    def save(step: int) -> None:
        saver.save({"weight": torch.ones(3)}, {"step": step})
        saver.wait()
        failures.append(saver.failure)

    save(1)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        run.parent.unlink()
    torch.distributed.barrier()
    for place in PLACES:
        for error in errors:
            with contextlib.ExitStack() as stack:
                if torch.distributed.get_rank() == 1:
                    stack.enter_context(mock.patch.object(*place, side_effect=error))
                save(2)
    save(2)
    events = [row["event"] for row in saver.done()]
    assert events == ["checkpoint_failed"] * (len(failures) - 2) + ["checkpoint"]
    return failures


@pytest.mark.parametrize("async_save", [False, True])
def test_whatever_ends_a_save_is_told_on_all_ranks_at_once(pool, tmp_path, async_save):
    run = tmp_path / "a_file" / "run"
    run.parent.write_text("in the way")
    answers = pool(2, save_with_errors, run, async_save)
    for before, in_the_way, *lost, succeeded in answers:
        assert before is None
        assert in_the_way.startswith(f"cannot write {run}/checkpoints/step-00000001: rank 0: [Errn")
        assert len(lost) == 6 + 2 * async_save
        for failure in lost:
            assert failure.startswith(f"cannot write {run}/checkpoints/step-00000002: ")
            assert "lost" in failure and ("rank 1: " in failure or "SystemExit" in failure)
        assert succeeded is None


def save_interrupted(run: Path) -> None:
    torch.distributed.init_process_group("gloo")
    saver = checkpoint.Saver(run, "sharded", False, 0, 0, timedelta(seconds=20))
    for place in PLACES:
        interrupted = mock.patch.object(*place, side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            saver.save({"weight": torch.ones(3)}, {"step": 1})


def test_ctrl_c_in_a_save_that_training_waits_for_is_no_failed_save(pool, tmp_path):
    pool(1, save_interrupted, tmp_path)
    assert not checkpoint.list_checkpoints(tmp_path)


def save_with_a_nan_on_rank_1(argv: list[str]) -> str | None:
    run = build_run(argv)
    run.log.loss = 1.0
    if torch.distributed.get_rank() == 1:
        local(run.state["model"]["norm.weight"])[0] = torch.nan
    train.save(run, 1)
    return run.saver.failure


def test_one_weight_of_one_rank_that_is_not_finite_refuses_the_save(pool, tokens, tmp_path):
    argv = flags(f"--data {tokens} --out {tmp_path}/run --strategy fsdp")
    for failure in pool(2, save_with_a_nan_on_rank_1, argv):
        assert failure.endswith("step-00000001: the loss or a weight is not finite")
    assert not checkpoint.list_checkpoints(tmp_path / "run")


# Longer than what is read at a time
RANKS_FILE = b"IQ== 0\n" * 200_000


def save_with_extra_files(folder: Path, format: str) -> None:
    torch.distributed.init_process_group("gloo")
    extra = {"my.tiktoken": RANKS_FILE}
    saver = checkpoint.Saver(folder, format, False, 0, 0, timedelta(seconds=20), extra)
    saver.save({"weight": torch.ones(3)}, {"step": 1})
    assert saver.failure is None


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_extra_files_belong_to_every_checkpoint(pool, tmp_path, format):
    pool(2, save_with_extra_files, tmp_path, format)
    path = last_checkpoint(tmp_path)
    assert (path / "my.tiktoken").read_bytes() == RANKS_FILE
    assert checkpoint.read_manifest(path)["files"]["my.tiktoken"]["bytes"] == 1_400_000
    (path / "my.tiktoken").write_bytes(b"IQ== 1\n" + RANKS_FILE[7:])
    assert "my.tiktoken has changed since it was written" in checkpoint.verify(path)


def train_on_a_small_host(argv: list[str]) -> tuple:
    memory = checkpoint.HostMemory(resident=0, peak=0, available=1000)
    with mock.patch.object(checkpoint, "host_memory", lambda: memory):
        return listen(argv)


@pytest.mark.tries("--checkpoint full gathers")
def test_full_is_refused_where_it_does_not_fit_in_host_memory(pool, tokens, tmp_path):
    text = f"--data {tokens} --out {tmp_path}/run --max_steps 2 --checkpoint full --strategy fsdp"
    (status, _, error), _ = pool(2, train_on_a_small_host, flags(text))
    assert status == 1
    assert re.search(
        r"gathers 12 bytes x \S+ parameters \+ 16 bytes x \S+ of the .* x 2 ranks", error
    )
    assert "use --checkpoint sharded" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_full_checkpoint_needs_what_rank_0_keeps_and_what_the_ranks_gather():
    memory = checkpoint.HostMemory(resident=0, peak=0, available=12_000)
    with mock.patch.object(checkpoint, "host_memory", lambda: memory):
        checkpoint.check_full(1000)
        with pytest.raises(checkpoint.CheckpointError, match="gathers 12 bytes x 1,001 parameters"):
            checkpoint.check_full(1001)
        gathered = r"12 bytes x 500 parameters \+ 16 bytes x 200 of the largest tensor x 2 ranks ="
        with pytest.raises(checkpoint.CheckpointError, match=gathered):
            checkpoint.check_full(500, largest=200, local_size=2)
        checkpoint.check_full(500, largest=200, local_size=1)


STATUS = "Threads:\t1\nVmRSS:\t    12 kB\n"  # as of gVisor, which does not report VmHWM
MEMINFO = "MemTotal:  64 kB\nMemAvailable:  48 kB\n"


@pytest.mark.parametrize(
    "proc, expected",
    [
        ({"/proc/self/status": STATUS, "/proc/meminfo": MEMINFO}, (12 * 1024, 0, 48 * 1024)),
        ({"/proc/meminfo": MEMINFO}, (0, 0, 48 * 1024)),
        ({"/proc/self/status": STATUS}, (12 * 1024, 0, 0)),
        ({}, (0, 0, 0)),
    ],
)
def test_host_memory_is_0_where_the_system_does_not_report_it(proc, expected):
    def read_text(path: Path) -> str:
        if str(path) not in proc:
            raise FileNotFoundError(path)
        return proc[str(path)]

    with mock.patch.object(Path, "read_text", read_text):
        assert checkpoint.host_memory() == checkpoint.HostMemory(*expected)


# ---- hostile files


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function, *arguments):
        self.pair = function, arguments

    def __reduce__(self):
        return self.pair


def attacks(target: str) -> dict[str, object]:
    """Pickles that create the file `target` when they are loaded carelessly."""
    return {
        "os.system": Call(os.system, f"touch {target}"),
        "eval": Call(eval, f"open({target!r}, 'w')"),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "in a container": OrderedDict(weights=[Call(exec, f"open({target!r}, 'w')")]),
        "class of torch": Call(torch.hub.load_state_dict_from_url, f"file://{target}"),
        "subprocess": Call(subprocess.Popen, ["touch", target]),
    }


def load_one_tensor(path: Path) -> None:
    checkpoint.load_state(path, {"optimizer": {"skipped_steps": torch.zeros(())}})


@pytest.mark.tries("it holds a")
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


def ask_for_plain_pickle(metadata) -> None:
    metadata.state_dict_metadata["optimizer.skipped_steps"] = BytesStorageMetadata()


def point_outside(metadata) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../../../etc/passwd"


def ask_for_a_decoder(metadata) -> None:
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


@pytest.mark.tries("it points to")
def test_metadata_that_sends_dcp_to_plain_pickle_or_elsewhere_is_refused(whole, tmp_path):
    path = tmp_path / "checkpoint"
    shutil.copytree(last_checkpoint(whole["single"]), path)
    original = (path / ".metadata").read_bytes()
    for change in (ask_for_plain_pickle, point_outside, ask_for_a_decoder):
        metadata = checkpoint.Reader(path).metadata
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(checkpoint.CheckpointError, match="damaged or hostile"):
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


# ---- commands


@pytest.fixture
def command(capsys):
    """command("list", ...) -> (status, standard output, standard error) of tools.checkpoint"""

    def call(*arguments) -> tuple[int, str, str]:
        return commands.main(list(map(str, arguments))), *capsys.readouterr()

    return call


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
    "step and tokens must be",
    "files must be an object",
    "it names the file",
    "the entry of",
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


def make_pipe(path: Path) -> None:
    """A named pipe, which a thread opens and closes for each reader, so that none waits."""
    os.mkfifo(path)

    def write_nothing() -> None:
        with contextlib.suppress(OSError):  # until the folder is gone
            while True:
                path.write_text("")

    threading.Thread(target=write_nothing, daemon=True).start()


@pytest.mark.tries("it is missing, or not")
@pytest.mark.parametrize("create", [make_pipe, os.mkdir])
def test_a_manifest_that_is_no_file_is_damaged_and_nobody_waits_for_it(tmp_path, command, create):
    path = tmp_path / "checkpoints/step-00000001"
    path.mkdir(parents=True)
    create(path / "manifest.json")
    for name in ("list", "verify"):
        status, out, error = command(name, tmp_path)
        assert (status, out.count("\n"), error.count("\n")) == (1, 1, 1)
        assert out.startswith(f"DAMAGED: {path}")
        assert "it is missing, or not a file" in out


@pytest.mark.tries("neither full.pt nor")
def test_a_checkpoint_of_no_known_format_is_refused(whole, tmp_path, command):
    path = tmp_path / "checkpoint"
    shutil.copytree(last_checkpoint(whole["single"]), path)
    manifest = checkpoint.read_manifest(path)
    del manifest["files"][".metadata"]
    (path / ".metadata").unlink()
    (path / "manifest.json").write_text(json.dumps(manifest))
    line = f"cannot read {path}: it has neither full.pt nor .metadata, so its format is unknown"
    with pytest.raises(checkpoint.CheckpointError, match=f"^{line}"):
        load_one_tensor(path)
    status, out, error = command("consolidate", path, tmp_path / "one")
    assert (status, out, error.count("\n")) == (1, "", 1)
    assert line in error


def test_verify_finds_a_flipped_bit(whole, tmp_path, command):
    path = last_checkpoint(whole["hsdp --dp_shard 2"])
    status, out, _ = command("verify", path)
    assert status == 0
    assert "complete and unchanged: 5 files, " in out  # one of each rank, and .metadata
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    flip_a_bit(damaged)
    status, _, error = command("verify", damaged)
    assert status == 1
    assert "its checksum differs" in error
    assert error.count("\n") == 1


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


def test_consolidate_of_a_damaged_checkpoint_writes_nothing(whole, tmp_path, command):
    damaged = copy_and_damage(whole, tmp_path) / "checkpoints/step-00000005"
    status, out, error = command("consolidate", damaged, tmp_path / "one")
    assert (status, out) == (1, "")
    assert f"{damaged}: __0_0.distcp has changed since it was written" in error
    assert file_names(tmp_path) == ["run"]


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
def test_consolidate_leaves_nothing_on_a_disk_that_fills_up_meanwhile(whole, small_disk, command):
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


# ---- compatibility

SAVED = Path(__file__).parent / "saved_run_2026_11_20"


# The .metadata of a checkpoint with one tensor, pickled by Python 3.13.0: a path in it is one of
# pathlib._local, a module that 3.11 and 3.12 do not have.
METADATA_OF_PYTHON_3_13 = """
eNp9kktv00AUhQN5GEiDEC0/AAlEu4ix27RqVwiVgqIqadR2i0Zjz3U8xPEYz7gvqRIsskC6uw7/lxnn4UgIvLKvvznnnjv3
R+P3t3qtfPCtEnkYu4xLlfOgUMDcMIZwkgmeKncKijKqqMYng+Xrg975qe/1Nm5KRRUQxkNFVuC9xtY18HGsdFzDV5eQSpFf
GBM6hr8lnmW5yCBXHKTFX8zxUVUsyW1sll1qdKJEULW3a+q4Oe9cQs5pwu+o4iLV2CZjUCSht6JQluosKJOOAdMzfa5/Gact
MjgZkM9n54OPl+RkeHz2qT/8YvjTWkkoHWBD8jvQK+vGhf00RH1WqmArjIt0IvVX2/nWsf34Z05HRJEEZUK+tg7l+abVLysL
xSKgRSBxI0tomkJOFvOMndiZaVOXc/VVvYadpVM/ZXBT2dWj72l1D9jk5e/TGrbmfay1UQT47r8rEPEE5K1UMNW4QRYJ+2kk
KrtODokZ/xWQjKrYYsQjXikYZjr+YI0TSMfm32CnVWZcZrF7Y5O010a3Jlz1QTjT+NzqJzxwSSJCmmh8OhKS34ys64PhH73X
WFfTTOPjcGInPKWJodqVjNT40iwDZF1v/viu5ZW9EEdSE8H6vPH2/YP9Hj3qBlEUdHse+N3D3iHrHkV7jIY+9UPPYI5ZRmYP
DNGZClaYQZltMBN1riCX5To2fddzPVNz/wAKwlh5
"""


def test_metadata_of_other_versions_of_python_is_read(tmp_path):
    of_3_11 = (SAVED / "run/checkpoints/step-00000004/.metadata").read_bytes()
    of_3_13 = zlib.decompress(base64.b64decode(METADATA_OF_PYTHON_3_13))
    for pickled, tensor in ((of_3_11, "model.norm.weight"), (of_3_13, "weight")):
        (tmp_path / ".metadata").write_bytes(pickled)
        metadata = checkpoint.Reader(tmp_path).metadata
        assert tensor in metadata.state_dict_metadata
        assert isinstance(metadata.storage_meta.checkpoint_id, Path)


@pytest.mark.parametrize("strategy, ranks", [("fsdp", 2), ("single", 1)])
def test_a_run_saved_on_2026_11_20_continues_with_the_losses_it_had(
    pool, tmp_path, strategy, ranks
):
    """Names inside checkpoints and manifests are a contract.

    The run was fsdp on two ranks, saved at step 4 of 8.
    """
    out = tmp_path / "run"
    shutil.copytree(SAVED / "run", out)
    argv = ["--config", str(out / "config.json"), "--data", str(SAVED / "tokens")]
    argv += ["--out", str(out), "--strategy", strategy]
    assert pool(ranks, call_train, argv) == [0] * ranks
    before = rows(SAVED / "run")
    after = rows(out)
    assert [row["step"] for row in after] == list(range(1, 9))
    for key in ("loss", "grad_norm", "lr", "skipped_steps"):
        assert [row[key] for row in after] == pytest.approx([row[key] for row in before], rel=1e-5)
