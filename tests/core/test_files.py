"""Checkpoints on disk: what is damaged, what is saved, what is kept, and a disk that is full.

A table of damages meets three observers: checkpoint.verify names the problem, load_state raises
CheckpointError, and a start passes over the checkpoint or, without another one, refuses to train.
A second table has damages whose checksums fit, so that only the meaning of a file is wrong.
"""

import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import checkpoint
import dist

from .conftest import (
    SMALL,
    Run,
    copy_run,
    end_with_parent,
    full_tensors,
    read_rows,
    run_command,
    trainer,
)

RANK0 = "rank-00000.safetensors"
RANK1 = "rank-00001.safetensors"
EMBED = "model.embed.weight"  # 320 x 32: rows 0-159 are in RANK0, the others in RANK1

FLAGS = "--strategy fsdp --save_interval 2 --max_steps 4 --keep_last 0"

Damage = Callable[[Path], object]  # called with the folder of a checkpoint


@pytest.fixture(scope="module")
def trained(pool, tokens, tmp_path_factory) -> Run:
    """A run of two ranks with checkpoints of steps 2 and 4. Tests damage copies of it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    argv = f"{SMALL} {FLAGS} --data {tokens} --out {out}".split()
    answers = pool(2, run_command, argv)
    assert [status for status, _, _ in answers] == [0, 0]
    return Run(out, *answers[0])


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """The contents of all files below a folder; None for a folder."""
    found = {}
    for path in folder.rglob("*"):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


# --------------------------------------------------------------------------------------------------
# Ways to damage a checkpoint


def contents(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Replace the contents of a file by change(contents)."""
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip(name: str, place: int) -> Damage:
    """Flip one bit of a byte."""

    def change(old: bytes) -> bytes:
        new = bytearray(old)
        new[place] ^= 4
        return bytes(new)

    return contents(name, change)


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def swap(folder: Path) -> None:
    (folder / RANK0).rename(folder / "other")
    (folder / RANK1).rename(folder / RANK0)
    (folder / "other").rename(folder / RANK1)


def exchange(folder: Path) -> None:
    """Exchange two chunks of equal shape, which only the checksum of index.json reveals."""
    value = json.loads((folder / "index.json").read_text())
    value["tensors"][EMBED]["grid"].reverse()
    (folder / "index.json").write_text(json.dumps(value))


def make_folder(folder: Path) -> None:
    (folder / RANK1).unlink()
    (folder / RANK1).mkdir()


def link_to_itself(folder: Path) -> None:
    """Make a file that the system cannot read, as on a disk that fails."""
    (folder / RANK1).unlink()
    (folder / RANK1).symlink_to(folder / RANK1)


def data_start(file: bytes) -> int:
    """Where the header of a safetensors file ends."""
    return 8 + int.from_bytes(file[:8], "little")


def zero_data(old: bytes) -> bytes:
    """Zeros in place of all tensors, as a crash leaves a file that was never flushed."""
    start = data_start(old)
    return old[:start] + bytes(len(old) - start)


def manifest(**fields) -> Damage:
    """Change fields of manifest.json, and its checksum accordingly."""

    def damage(folder: Path) -> None:
        value = json.loads((folder / "manifest.json").read_text()) | fields
        (folder / "manifest.json").write_text(json.dumps(checkpoint.seal(value)))

    return damage


def listed(name: str, **entry) -> Damage:
    """Change or add the entry of a file in manifest.json, which is sealed again."""

    def damage(folder: Path) -> None:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        manifest(files=files | {name: files.get(name, {}) | entry})(folder)

    return damage


def unlisted(*names: str) -> Damage:
    """Remove entries of files from manifest.json, which is sealed again."""

    def damage(folder: Path) -> None:
        files = json.loads((folder / "manifest.json").read_text())["files"]
        manifest(files={name: files[name] for name in files if name not in names})(folder)

    return damage


DAMAGES: dict[str, tuple[Damage, str, bool]] = {
    # damage, what verify says, whether load_state sees it, too
    "file cut short": (contents(RANK1, lambda old: old[:1000]), f"{RANK1} has 1,000 bytes", True),
    "file without its last byte": (contents(RANK1, lambda old: old[:-1]), f"{RANK1} has", True),
    "file with one more byte": (contents(RANK0, lambda old: old + b"\0"), f"{RANK0} has", True),
    "file that is empty": (contents(RANK0, lambda old: b""), f"{RANK0} has 0 bytes", True),
    "file of zeros": (contents(RANK1, lambda old: bytes(len(old))), f"{RANK1} has changed", True),
    "data of zeros": (contents(RANK1, zero_data), f"{RANK1} has changed", False),
    "bit of a value": (flip(RANK0, -5), f"{RANK0} has changed", False),
    "bit of a value of rank 1": (flip(RANK1, -5), f"{RANK1} has changed", False),
    "bit of a header's length": (flip(RANK1, 0), f"{RANK1} has changed", True),
    "bit of a header": (flip(RANK1, 8), f"{RANK1} has changed", True),
    "bit of index.json": (flip("index.json", -20), "index.json has changed", True),
    "bit of manifest.json": (flip("manifest.json", 30), "manifest.json", True),
    "missing file of rank 0": (remove(RANK0), f"{RANK0} is missing", True),
    "missing file of rank 1": (remove(RANK1), f"{RANK1} is missing", True),
    "missing index.json": (remove("index.json"), "index.json is missing", True),
    "missing manifest.json": (remove("manifest.json"), "manifest.json is missing", True),
    "empty index.json": (contents("index.json", lambda old: b""), "index.json has 0 bytes", True),
    "empty manifest.json": (contents("manifest.json", lambda old: b""), "manifest.json", True),
    "half of manifest.json": (
        contents("manifest.json", lambda old: old[: len(old) // 2]),
        "manifest.json",
        True,
    ),
    "manifest.json without an end": (
        contents("manifest.json", lambda old: b"[" * 100_000),
        "manifest.json",
        True,
    ),
    "tokens changed in manifest.json": (
        contents("manifest.json", lambda old: re.sub(rb'"tokens": \d+', b'"tokens": 7', old)),
        "manifest.json has changed",
        True,
    ),
    "folder in place of a file": (make_folder, RANK1, True),
    "file that cannot be read": (link_to_itself, RANK1, True),
    "chunks of index.json exchanged": (exchange, "index.json has", True),
    "files of two ranks swapped": (swap, "bytes, not", True),
    "folder of another step": (manifest(step=3), "renamed", True),
    "manifest: no files": (manifest(files={}), "manifest.json", True),
    "manifest: files is a list": (manifest(files=[RANK0]), "manifest.json", True),
    "manifest: no step": (manifest(step=None), "step", True),
    "manifest: step is a text": (manifest(step="4"), "step", True),
    "manifest: negative step": (manifest(step=-4), "step", True),
    "manifest: size is a text": (listed(RANK1, bytes="many"), RANK1, True),
    "manifest: negative size": (listed(RANK1, bytes=-1), RANK1, True),
    "manifest: another size": (listed(RANK1, bytes=10), f"{RANK1} has", True),
    "manifest: another checksum": (listed(RANK1, crc32="01234567"), f"{RANK1} has changed", False),
    "manifest: name with ..": (listed("../x", bytes=0, crc32="00000000"), "../x", True),
    "manifest: name with /": (listed("/etc/hosts", bytes=0, crc32="00000000"), "/etc/hosts", True),
}


# --------------------------------------------------------------------------------------------------
# Damages whose checksums fit: only the meaning is wrong


def header(change: Callable[[dict], object], data: Callable[[bytes], bytes] = bytes) -> Damage:
    """Change the header of RANK1 in place, and perhaps the bytes that follow it."""

    def rewrite(old: bytes) -> bytes:
        start = data_start(old)
        entries = json.loads(old[8:start])
        change(entries)
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + data(old[start:])

    return contents(RANK1, rewrite)


def embed_header(**fields) -> Damage:
    return header(lambda entries: entries[EMBED].update(fields))


def move_last(distance: int) -> Callable[[dict], None]:
    """Move the data_offsets of the last tensor of a file."""

    def change(entries: dict) -> None:
        del entries["__metadata__"]
        last = max(entries.values(), key=lambda entry: entry["data_offsets"])
        last["data_offsets"] = [place + distance for place in last["data_offsets"]]

    return change


def overlap(entries: dict) -> None:
    """Give two tensors of one size the same data."""
    first, second = (f"model.blocks.0.attention.{name}.weight" for name in "kv")
    entries[first]["data_offsets"] = entries[second]["data_offsets"]


def index(change: Callable[[dict], object]) -> Damage:
    """Change index.json in place."""

    def rewrite(old: bytes) -> bytes:
        value = json.loads(old)
        change(value)
        return json.dumps(value).encode()

    return contents("index.json", rewrite)


def embed(**fields) -> Damage:
    return index(lambda value: value["tensors"][EMBED].update(fields))


def named(name: str) -> Damage:
    """Name a file of index.json differently."""
    return index(lambda value: value.update(files=[RANK0, name]))


def named_elsewhere(folder: Path) -> None:
    """Name an intact file of the same size outside the checkpoint, with .. in its path."""
    (folder.parent.parent / "x").write_bytes((folder / RANK1).read_bytes())
    named("../../x")(folder)


MEANINGS: dict[str, Damage] = {
    "header: shape of the same size": embed_header(shape=[32, 160]),
    "header: flat shape": embed_header(shape=[5120]),
    "header: fewer rows than data": embed_header(shape=[1, 32]),
    "header: absurd shape": embed_header(shape=[2**40, 2**40]),
    "header: negative shape": embed_header(shape=[-160, -32]),
    "header: dtype of the same size": embed_header(dtype="I32"),
    "header: dtype of half the size": embed_header(dtype="BF16"),
    "header: unknown dtype": embed_header(dtype="F4"),
    "header: no dtype": header(lambda entries: entries[EMBED].pop("dtype")),
    "header: tensor missing": header(lambda entries: entries.update(x=entries.pop(EMBED))),
    "header: not a dict": header(lambda entries: entries.update({EMBED: None})),
    "header: offsets past the end": header(move_last(64)),
    "header: offsets before the data": embed_header(data_offsets=[-20480, 0]),
    "header: offsets of no data": embed_header(data_offsets=[0, 0]),
    "header: gap between two tensors": header(move_last(64), lambda data: data + bytes(64)),
    "header: two tensors overlap": header(overlap),
    "header: data that no tensor names": header(len, lambda data: data + bytes(64)),
    "header: longer than the file": contents(RANK1, lambda old: b"\xff\xff\xff\0" + old[4:]),
    "header: length of 2**63": contents(RANK1, lambda old: bytes(7) + b"\x80" + old[8:]),
    "header: not JSON": contents(RANK1, lambda old: old[:8] + b"x" + old[9:]),
    "file of 4 bytes": contents(RANK1, lambda old: old[:4]),
    "empty file": contents(RANK1, lambda old: b""),
    "file of zeros": contents(RANK1, lambda old: bytes(len(old))),
    "index: not JSON": contents("index.json", lambda old: b"files: a"),
    "index: a list": contents("index.json", lambda old: b"[]"),
    "index: no files": index(lambda value: value.pop("files")),
    "index: no tensors": index(lambda value: value.pop("tensors")),
    "index: tensor missing": index(lambda value: value["tensors"].pop(EMBED)),
    "index: tensor is null": index(lambda value: value["tensors"].update({EMBED: None})),
    "index: shape of more rows": embed(shape=[321, 32]),
    "index: shape of fewer rows": embed(shape=[319, 32]),
    "index: shape of more columns": embed(shape=[320, 33]),
    "index: absurd shape": embed(shape=[2**40, 2**40]),
    "index: another dtype": embed(dtype="I32"),
    "index: unknown dtype": embed(dtype="F4"),
    "index: gap before the first chunk": embed(cuts=[[1, 160], [0]]),
    "index: gap before the second chunk": embed(cuts=[[0, 161], [0]]),
    "index: chunks overlap": embed(cuts=[[0, 159], [0]]),
    "index: chunks in reverse": embed(cuts=[[160, 0], [0]]),
    "index: one chunk is missing": embed(cuts=[[0], [0]], grid=[0]),
    "index: cuts of one dimension": embed(cuts=[[0, 160]]),
    "index: cuts of three dimensions": embed(cuts=[[0, 160], [0], [0]]),
    "index: no cuts": embed(cuts=[[], []]),
    "index: grid too short": embed(grid=[0]),
    "index: grid too long": embed(grid=[0, 1, 1]),
    "index: grid names no file": embed(grid=[0, 2]),
    "index: grid is a text": embed(grid=["0", "1"]),
    "index: name of a missing file": named("rank-00002.safetensors"),
    "index: name of another file": named("manifest.json"),
    "index: name with ..": named(f"../step-00000002/{RANK1}"),
    "index: name with .. and a fitting file": named_elsewhere,
    "index: name with /": named("/dev/null"),
    "index: name is a number": index(lambda value: value.update(files=[RANK0, 5])),
    "manifest: index.json not listed": unlisted("index.json"),
    "manifest: a file not listed": unlisted(RANK1),
}


def seal_files(folder: Path) -> None:
    """Make the sizes and checksums in manifest.json those of the files."""
    files = json.loads((folder / "manifest.json").read_text())["files"]
    for name in files:
        file = (folder / name).read_bytes()
        files[name] = {"bytes": len(file), "crc32": f"{zlib.crc32(file):08x}"}
    manifest(files=files)(folder)


# --------------------------------------------------------------------------------------------------
# The observers


def damaged_copy(trained: Run, tmp_path: Path, damage: Damage, *steps: int) -> Path:
    """Copy the run and damage its checkpoints of these steps."""
    out = copy_run(trained.out, tmp_path / "run")
    for step in steps:
        damage(checkpoint.step_path(out, step))
    return out


def load_all(folder: Path, intact: Path) -> None:
    """Load all tensors that the intact checkpoint has."""
    tensors = json.loads((intact / "index.json").read_text())["tensors"]
    state = {name: torch.zeros(entry["shape"]) for name, entry in tensors.items()}
    checkpoint.load_state(folder, state)


def error_of_loading(folder: Path, intact: Path) -> str:
    with pytest.raises(checkpoint.CheckpointError) as error:
        load_all(folder, intact)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("step", [2, 4])
def test_an_intact_checkpoint_verifies_and_loads(trained, step):
    path = checkpoint.step_path(trained.out, step)
    assert checkpoint.verify(path) is None
    load_all(path, path)


@pytest.mark.parametrize("case", DAMAGES)
def test_verify_names_the_damage(trained, tmp_path, case):
    damage, words, _ = DAMAGES[case]
    out = damaged_copy(trained, tmp_path, damage, 4)
    problem = checkpoint.verify(checkpoint.step_path(out, 4))
    assert words in problem
    assert "\n" not in problem
    assert checkpoint.verify(checkpoint.step_path(out, 2)) is None


@pytest.mark.parametrize("case", [case for case in DAMAGES if DAMAGES[case][2]])
def test_loading_refuses_the_damage(trained, tmp_path, case):
    out = damaged_copy(trained, tmp_path, DAMAGES[case][0], 4)
    path = checkpoint.step_path(out, 4)
    assert str(path) in error_of_loading(path, checkpoint.step_path(trained.out, 4))


@pytest.mark.parametrize("case", MEANINGS)
def test_loading_refuses_a_wrong_meaning(trained, tmp_path, case):
    """If a file has changed, verify finds it until the manifest gets checksums that fit."""
    intact = checkpoint.step_path(trained.out, 4)
    out = damaged_copy(trained, tmp_path, MEANINGS[case], 4)
    path = checkpoint.step_path(out, 4)
    assert error_of_loading(path, intact)
    if not case.startswith("manifest"):
        assert re.search(f"({RANK1}|index.json) has ", checkpoint.verify(path))
        seal_files(path)
    assert checkpoint.verify(path) is None
    assert error_of_loading(path, intact)


def test_loading_refuses_an_index_without_the_first_row(trained, tmp_path):
    """All chunks have the right sizes, but they start at row 1 of 321."""
    damage = embed(shape=[321, 32], cuts=[[1, 161], [0]])
    path = checkpoint.step_path(damaged_copy(trained, tmp_path, damage, 4), 4)
    seal_files(path)
    with pytest.raises(checkpoint.CheckpointError, match=EMBED):
        checkpoint.load_state(path, {EMBED: torch.zeros(321, 32)})


# A start asks verify, which has found all of them above, so one of each kind is enough.
AT_A_START = [
    "file cut short",
    "bit of a value",
    "bit of a value of rank 1",
    "bit of index.json",
    "bit of manifest.json",
    "missing file of rank 1",
    "missing manifest.json",
    "half of manifest.json",
    "folder in place of a file",
    "folder of another step",
    "manifest: no files",
]
# Rank 0 reads manifest.json; all ranks share the other files.
STARTS = [(case, 1 if "manifest" in case else 2) for case in AT_A_START]
STARTS += [("bit of a value", 1), ("bit of a value of rank 1", 1), ("bit of index.json", 1)]


@pytest.mark.parametrize("case, ranks", STARTS)
def test_a_start_passes_over_the_damage(train, trained, tmp_path, case, ranks):
    """It says so, continues from the older checkpoint, and replaces the damaged one."""
    damage, words, _ = DAMAGES[case]
    out = damaged_copy(trained, tmp_path, damage, 4)
    evaluated = train(ranks, f"{FLAGS} --eval_only").printed
    run = train(ranks, FLAGS)
    assert run.status == 0
    old, new = checkpoint.list_checkpoints(out)
    assert f"passed over {new}" in evaluated and f"{old} on " in evaluated
    (line,) = [line for line in run.printed.splitlines() if f"passed over {new}" in line]
    assert words in line
    assert f"continuing from {old}\n" in run.printed
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4]
    losses = [row["loss"] for row in trained.rows()]
    assert [row["loss"] for row in run.rows()] == pytest.approx(losses, rel=1e-5)
    assert checkpoint.verify(new) is None
    assert sorted(path.name for path in new.parent.iterdir()) == [old.name, new.name]


def assert_refused(run: Run, before: dict) -> None:
    assert run.status in (1, 2)
    assert run.error.strip() and "\n" not in run.error.strip()
    assert "step 3/4" not in run.printed
    assert snapshot(run.out) == before


NONE_INTACT = [
    "file cut short",
    "bit of a value of rank 1",
    "bit of manifest.json",
    "missing index.json",
    "missing manifest.json",
    "folder in place of a file",
]


@pytest.mark.parametrize("case", NONE_INTACT)
def test_a_start_without_an_intact_checkpoint_is_refused(train, trained, tmp_path, case):
    """It names both checkpoints and what is wrong with them, and changes nothing on disk."""
    damage, words, _ = DAMAGES[case]
    out = damaged_copy(trained, tmp_path, damage, 4, 2)
    before = snapshot(out)
    run = train(1 if "manifest" in case else 2, FLAGS)
    assert_refused(run, before)
    for path in checkpoint.list_checkpoints(out):
        assert str(path) in run.error
    assert run.error.count(words) >= 2


READ_BY_RANK_1 = [
    "header: shape of the same size",
    "header: dtype of the same size",
    "header: two tensors overlap",
    "index: gap before the second chunk",
    "index: name with .. and a fitting file",
    "manifest: a file not listed",
]


@pytest.mark.parametrize("case", READ_BY_RANK_1)
def test_a_start_from_a_wrong_meaning_is_refused(train, trained, tmp_path, case):
    """Perhaps only rank 1 reads the damaged part, but both ranks end."""

    def damage(path: Path) -> None:
        MEANINGS[case](path)
        if not case.startswith("manifest"):
            seal_files(path)

    out = damaged_copy(trained, tmp_path, damage, 2)
    shutil.rmtree(checkpoint.step_path(out, 4))
    before = snapshot(out)
    assert_refused(train(2, FLAGS), before)


@pytest.mark.parametrize("version", [0, 1, 99, "2", None])
def test_a_checkpoint_of_another_format_is_refused(train, trained, tmp_path, version):
    """No older checkpoint is used instead: the version that wrote this one can read it."""
    out = damaged_copy(trained, tmp_path, manifest(format=version), 4)
    path = checkpoint.step_path(out, 4)
    with pytest.raises((checkpoint.PathError, checkpoint.CheckpointError), match="format") as error:
        load_all(path, checkpoint.step_path(trained.out, 4))
    assert error.value.exit_status == 2
    before = snapshot(out)
    run = train(2, FLAGS)
    assert_refused(run, before)
    assert run.status == 2
    assert f"{path} has format {version}" in run.error


def test_a_change_anywhere_in_a_long_file_is_found(tmp_path):
    """The file is so long that it is read in several blocks."""
    path = tmp_path / "checkpoint"
    checkpoint.save_state(path, {"weight": torch.ones(700_000)}, {"step": 1})
    size = (path / RANK0).stat().st_size
    assert checkpoint.verify(path) is None
    for place in (0, size // 2, size - 1):
        flip(RANK0, place)(path)
        assert f"{RANK0} has changed" in checkpoint.verify(path)
        flip(RANK0, place)(path)
    assert checkpoint.verify(path) is None


# --------------------------------------------------------------------------------------------------
# What a checkpoint consists of

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, which must fill it: there is no room for anything else."""
    file = path.read_bytes()
    start = data_start(file)
    entries = json.loads(file[8:start])
    entries.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        values = torch.tensor(list(file[start:][slice(*entry["data_offsets"])]), dtype=torch.uint8)
        tensors[name] = values.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    assert start + end == len(file)
    return tensors


def assemble(folder: Path) -> dict[str, Tensor]:
    """The full tensors, as docs/reference.md describes the format. Each value is written once."""
    value = json.loads((folder / "index.json").read_text())
    files = [read_safetensors(folder / name) for name in value["files"]]
    tensors = {}
    for name, entry in value["tensors"].items():
        full = torch.zeros(entry["shape"], dtype=DTYPES[entry["dtype"]])
        times = torch.zeros(entry["shape"])
        for start, file in zip(itertools.product(*entry["cuts"]), entry["grid"], strict=True):
            chunk = files[file].pop(name)
            place = tuple(slice(i, i + n) for i, n in zip(start, chunk.shape, strict=True))
            full[place] = chunk
            times[place] += 1
        assert torch.all(times == 1), name
        tensors[name] = full
    assert not any(files), "chunks that index.json does not name"
    return tensors


@pytest.mark.parametrize("step", [2, 4])
def test_every_file_is_json_or_safetensors(trained, step):
    """No file is a pickle, and together they are what load_state returns."""
    folder = checkpoint.step_path(trained.out, step)
    names = {path.name for path in folder.iterdir()}
    assert names == {RANK0, RANK1, "index.json", "manifest.json"}
    tensors = assemble(folder)
    torch.testing.assert_close(tensors, full_tensors(folder), rtol=0, atol=0)
    assert EMBED in tensors


@pytest.mark.parametrize("step", [2, 4])
def test_a_manifest_lists_the_files_with_sizes_and_checksums(trained, step):
    folder = checkpoint.step_path(trained.out, step)
    found = checkpoint.read_manifest(folder)
    assert (found["step"], found["tokens"]) == (step, step * 8 * 16)
    expected = {}
    for name in (RANK0, RANK1, "index.json"):
        file = (folder / name).read_bytes()
        expected[name] = {"bytes": len(file), "crc32": f"{zlib.crc32(file):08x}"}
    assert found["files"] == expected
    (row,) = [row for row in trained.rows("event") if row["step"] == step]
    assert (row["event"], row["path"]) == ("checkpoint", str(folder))
    assert row["bytes"] == sum(entry["bytes"] for entry in expected.values())


FOLDERS = {  # name -> whether it is a checkpoint
    "step-00000009": True,
    "step-00000010": True,
    "step-99999999": True,
    "step-100000000": True,
    "step-3": False,
    "step-00000001-copy": False,
    "step-0000001x": False,
    ".step-00000004.tmp": False,
    "latest": False,
}


def test_checkpoints_are_listed_from_the_oldest_to_the_newest(tmp_path):
    for name in FOLDERS:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert names == [name for name, is_checkpoint in FOLDERS.items() if is_checkpoint]
    steps = [9, 10, 99_999_999, 100_000_000]
    assert checkpoint.list_checkpoints(tmp_path) == [
        checkpoint.step_path(tmp_path, step) for step in steps
    ]


# --------------------------------------------------------------------------------------------------
# Saving and loading on meshes


class Mesh(NamedTuple):
    shape: tuple[int, ...]
    # For each axis, the dimension of a tensor that it splits, R for copies, or - if the tensors'
    # own mesh lacks the axis. An empty text: tensors that are no DTensors.
    splits: str = ""

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)


MESHES = {
    "single": Mesh((1,)),
    "ddp on 2": Mesh((2,)),
    "fsdp on 2": Mesh((2,), "0"),
    "ddp on 4": Mesh((4,)),
    "fsdp on 4": Mesh((4,), "0"),
    "hsdp on 2 x 2": Mesh((2, 2), "R0"),
    "hsdp on 4 x 1": Mesh((4, 1), "R0"),
    "fsdp and tp on 2 x 2": Mesh((2, 2), "01"),
    "copies on 2 x 2": Mesh((2, 2), "RR"),
    "only tp on 2 x 2": Mesh((2, 2), "-1"),
    "only the first axis of 2 x 2": Mesh((2, 2), "0-"),
}
SHAPES = {  # 2 and 4 ranks split these evenly, unevenly or not at all
    "model": {"even": (8, 4), "odd": (7,), "blocks": {"0": {"few": (3, 2)}, "1": {"one": (1, 5)}}},
    "optimizer": {"step": (), "none": (0, 4), "no_columns": (4, 0), "cube": (5, 2, 3)},
}


def mapped(function: Callable, state: dict, prefix: str = "") -> dict:
    """Nested dicts with function(full name, value) in place of each value."""
    found = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        is_dict = isinstance(value, dict)
        found[key] = mapped(function, value, f"{name}.") if is_dict else function(name, value)
    return found


def expected(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that depend on the name, and differ from each other."""
    count = torch.Size(shape).numel()
    dtype = {"odd": torch.bfloat16, "cube": torch.int64}.get(name.split(".")[-1], torch.float32)
    return (zlib.crc32(name.encode()) % 50 + torch.arange(1, count + 1)).view(shape).to(dtype)


def on_mesh(mesh: str) -> Callable[[Tensor], Tensor]:
    """The function that lays a full tensor out on the mesh; joins the process group."""
    shape, splits = MESHES[mesh]
    dist.start("cpu")
    axes = "abc"[: len(shape)]
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(axes))
    used = [axis for axis, split in zip(axes, splits) if split != "-"]
    splits = splits.replace("-", "")

    def lay_out(full: Tensor) -> Tensor:
        if not used:
            return full.clone()
        placements = []
        for split in splits:
            is_split = split != "R" and int(split) < full.dim()
            placements.append(Shard(int(split)) if is_split else Replicate())
        return distribute_tensor(full, device_mesh[tuple(used)], placements, src_data_rank=None)

    return lay_out


def save_on(mesh: str, path: Path) -> None:
    lay_out = on_mesh(mesh)
    state = mapped(lambda name, shape: lay_out(expected(name, shape)), SHAPES)
    checkpoint.save_state(path, state, {"step": 1}, on_all_ranks=dist.on_all_ranks)


def load_on(mesh: str, paths: dict[str, Path]) -> dict[str, list[str]]:
    """Load each checkpoint on this mesh; return the names of the tensors that are wrong."""
    lay_out = on_mesh(mesh)
    return {saving: wrong_tensors(path, lay_out) for saving, path in paths.items()}


def wrong_tensors(path: Path, lay_out: Callable[[Tensor], Tensor]) -> list[str]:
    """Load a checkpoint; return the names of the tensors that are wrong."""
    wrong = []

    def empty(name: str, shape: tuple[int, ...]) -> Tensor:
        return lay_out(torch.full_like(expected(name, shape), -1))

    def compare(name: str, tensor: Tensor) -> None:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        shape = tuple(full.shape)
        if full.dtype != expected(name, shape).dtype or not full.equal(expected(name, shape)):
            wrong.append(name)

    state = mapped(empty, SHAPES)
    checkpoint.load_state(path, state)
    mapped(compare, state)
    return wrong


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Callable[[str], Path]:
    """saved(mesh): the checkpoint that this mesh has written."""

    @functools.cache
    def save(mesh: str) -> Path:
        path = tmp_path_factory.mktemp("saved") / "checkpoint"
        pool(MESHES[mesh].ranks, save_on, mesh, path)
        return path

    return save


@pytest.mark.parametrize("mesh", MESHES)
def test_the_files_of_a_mesh_contain_each_value_once(saved, mesh):
    tensors = assemble(saved(mesh))
    assert checkpoint.verify(saved(mesh)) is None
    wanted = {}
    mapped(lambda name, shape: wanted.update({name: expected(name, shape)}), SHAPES)
    torch.testing.assert_close(tensors, wanted, rtol=0, atol=0)
    ranks = MESHES[mesh].ranks
    names = {f"rank-{rank:05d}.safetensors" for rank in range(ranks)}
    assert {path.name for path in saved(mesh).iterdir()} == names | {"index.json", "manifest.json"}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_loads_what_any_other_has_saved(pool, saved, mesh):
    ranks = MESHES[mesh].ranks
    paths = {saving: saved(saving) for saving in MESHES}
    assert pool(ranks, load_on, mesh, paths) == [dict.fromkeys(MESHES, [])] * ranks


def save_eight(mesh: str, path: Path) -> None:
    """Save eight tensors of one size."""
    lay_out = on_mesh(mesh)
    state = {str(number): lay_out(torch.full((4, 4), float(number))) for number in range(8)}
    checkpoint.save_state(path, state, {"step": 1}, on_all_ranks=dist.on_all_ranks)


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_that_hold_copies_share_the_writing(pool, tmp_path, mesh):
    pool(MESHES[mesh].ranks, save_eight, mesh, tmp_path / "checkpoint")
    tensors = assemble(tmp_path / "checkpoint")
    assert all(torch.all(tensor == float(name)) for name, tensor in tensors.items())
    written = []
    for file in (tmp_path / "checkpoint").glob("rank-*.safetensors"):
        written.append(sum(tensor.numel() for tensor in read_safetensors(file).values()))
    assert written == [8 * 16 / MESHES[mesh].ranks] * MESHES[mesh].ranks


WRONG_PARTS = {  # the bounds of three ranks' parts of a tensor (6, 4), and what is wrong
    "the same part twice": ([((0, 0), 8), ((2, 0), 8), ((2, 0), 8)], "ranks 1 and 2 "),
    "a part is missing": ([((0, 0), 8), ((2, 0), 8), ((6, 0), 0)], "16 elements, not the 24"),
    "too many rows": ([((0, 0), 8), ((2, 0), 8), ((4, 0), 12)], "28 elements, not the 24"),
    "no grid": ([((0, 0), 8), ((2, 0), 8), ((4, 1), 8)], "(0, 1)"),
}


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_parts_that_do_not_make_up_a_tensor_are_refused(case):
    bounds, words = WRONG_PARTS[case]
    with pytest.raises((ValueError, KeyError), match=re.escape(words)):
        checkpoint.arrange(torch.Size((6, 4)), np.array([0, 1, 2]), bounds)
    right = [((0, 0), 8), ((2, 0), 8), ((4, 0), 8)]
    arranged = checkpoint.arrange(torch.Size((6, 4)), np.array([2, 1, 0]), right)
    assert arranged == ([[0, 2, 4], [0]], [0, 1, 2])


ODD_TENSORS = {  # how the parts of a tensor (8, 4) on two ranks belong together, and the error
    "a missing row": (
        Shard(0),
        "the ranks' parts do not make up odd: they have 28 elements, not the",
    ),
    "parts of a sum": (Partial(), "odd cannot be saved: each rank holds a part of its sum"),
}


def save_odd_tensor(path: Path, placement: Placement) -> str:
    """Save a tensor of which rank 0 holds 4 rows and rank 1 holds 3; return the error."""
    rank = dist.start("cpu").rank
    mesh = init_device_mesh("cpu", (2,))
    odd = DTensor.from_local(
        torch.ones(4 - rank, 4), mesh, [placement], shape=(8, 4), stride=(4, 1)
    )
    try:
        state = {"whole": torch.ones(3), "odd": odd}
        checkpoint.save_state(path, state, {"step": 1}, on_all_ranks=dist.on_all_ranks)
    except (checkpoint.CheckpointError, dist.RankError) as error:
        return str(error)


@pytest.mark.parametrize("case", ODD_TENSORS)
def test_a_tensor_whose_parts_are_not_complete_is_named(pool, tmp_path, case):
    placement, words = ODD_TENSORS[case]
    for error in pool(2, save_odd_tensor, tmp_path / "checkpoint", placement):
        assert words in error
    assert not (tmp_path / "checkpoint").exists()


MISFITS = {  # the state that is loaded, and the name in the error
    "no such tensor": ({"model": {"weight": torch.zeros(4)}}, "model.weight"),
    "name of a dict": ({"model": torch.zeros(8, 4)}, "model"),
    "name without its dict": ({"even": torch.zeros(8, 4)}, "even"),
    "more rows": ({"model": {"even": torch.zeros(9, 4)}}, "model.even"),
    "fewer rows": ({"model": {"even": torch.zeros(4, 4)}}, "model.even"),
    "other columns": ({"model": {"even": torch.zeros(8, 1)}}, "model.even"),
    "flat": ({"model": {"even": torch.zeros(32)}}, "model.even"),
    "one more dimension": ({"model": {"even": torch.zeros(1, 8, 4)}}, "model.even"),
    "number for a vector": ({"model": {"odd": torch.zeros(())}}, "model.odd"),
    "vector for a number": ({"optimizer": {"step": torch.zeros(1)}}, "optimizer.step"),
    "values for an empty tensor": ({"optimizer": {"none": torch.zeros(1, 4)}}, "optimizer.none"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_tensor_that_does_not_fit_is_named(saved, case):
    state, name = MISFITS[case]
    with pytest.raises(checkpoint.CheckpointError, match=rf"\b{re.escape(name)}\b"):
        checkpoint.load_state(saved("fsdp on 2"), state)


def test_values_are_converted_to_the_dtype_of_the_state(saved):
    """A state in bfloat16 takes rounded values, one in float64 exact ones."""
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        even = torch.zeros(8, 4, dtype=dtype)
        checkpoint.load_state(saved("fsdp on 4"), {"model": {"even": even}})
        assert torch.equal(even, expected("model.even", (8, 4)).to(dtype))


EXACT = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
EXACT += [torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
EXACT += [torch.uint64, torch.uint32, torch.uint16, torch.bool]


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_every_dtype_comes_back_bit_for_bit(tmp_path):
    """Also inf and nan, and tensors that are not contiguous."""
    state = {"transposed": torch.arange(6.0).view(2, 3).mT, "part": torch.arange(9.0)[1::2]}
    for dtype in EXACT:
        count = 2 if dtype == torch.bool else 256
        state[str(dtype)] = torch.arange(count, dtype=torch.uint8).view(dtype)
    path = tmp_path / "checkpoint"
    checkpoint.save_state(path, {"all": state}, {"step": 1})
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load_state(path, {"all": loaded})
    for name, tensor in state.items():
        assert bits(loaded[name]) == bits(tensor), name


def test_a_caller_gets_its_manifest_and_its_files_back(tmp_path):
    path = checkpoint.step_path(tmp_path, 5)
    size = checkpoint.save_state(
        path, {"a": torch.ones(3)}, {"step": 5, "mine": {"x": [1, 2]}}, {"my.json": b"contents"}
    )
    assert checkpoint.read_manifest(path)["mine"] == {"x": [1, 2]}
    assert (path / "my.json").read_bytes() == b"contents"
    files = [file for file in path.iterdir() if file.name != "manifest.json"]
    assert len(files) == 3
    assert size == sum(file.stat().st_size for file in files)
    flip("my.json", 0)(path)
    assert "my.json has changed" in checkpoint.verify(path)


UNSAVABLE = {  # state, manifest, extra files, what the error says
    "a number": ({"b": {"odd": 5}}, {"step": 1}, {}, "b.odd"),
    "a list": ({"b": {"odd": [1, 2]}}, {"step": 1}, {}, "b.odd"),
    "a complex tensor": ({"odd": torch.ones(2, dtype=torch.complex64)}, {"step": 1}, {}, "odd"),
    "no step": ({}, {"tokens": 5}, {}, "step"),
    "a negative step": ({}, {"step": -1}, {}, "-1"),
    "another step than the folder": ({}, {"step": 2}, {}, "2"),
    "a manifest that is not JSON": ({}, {"step": 1, "path": Path("x")}, {}, "JSON"),
    "a file in another folder": ({}, {"step": 1}, {"../x": b""}, "../x"),
}


@pytest.mark.parametrize("case", UNSAVABLE)
def test_what_could_not_be_loaded_is_not_saved(tmp_path, case):
    state, fields, extra, words = UNSAVABLE[case]
    path = checkpoint.step_path(tmp_path, 1)
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(words)) as error:
        checkpoint.save_state(path, {"a": torch.ones(2)} | state, fields, extra)
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not checkpoint.list_checkpoints(tmp_path)


def save_on_a_broken_rank(path: Path, broken: int, place: str) -> str:
    """Save with a value or a manifest of one rank that cannot be saved; return the error."""
    rank = dist.start("cpu").rank
    is_broken = rank == broken
    value = 5 if is_broken and place == "state" else torch.ones(3)
    step = -1 if is_broken and place == "manifest" else 1
    try:
        checkpoint.save_state(path, {"a": value}, {"step": step}, on_all_ranks=dist.on_all_ranks)
    except (checkpoint.CheckpointError, dist.RankError) as error:
        return str(error)


@pytest.mark.parametrize("place", ["state", "manifest"])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all(pool, tmp_path, broken, place):
    path = checkpoint.step_path(tmp_path, 1)
    first, second = pool(2, save_on_a_broken_rank, path, broken, place)
    assert first and first == second
    assert not path.exists()


# --------------------------------------------------------------------------------------------------
# Which checkpoints are kept

KEPT = {
    "--save_interval 1 --keep_last 0": [1, 2, 3, 4, 5, 6],
    "--save_interval 1 --keep_last 1": [6],
    "--save_interval 1 --keep_last 2": [5, 6],
    "--save_interval 1": [5, 6],
    "--save_interval 1 --keep_last 2 --keep_every 3": [3, 5, 6],
    "--save_interval 1 --keep_last 1 --keep_every 2": [2, 4, 6],
    "--save_interval 1 --keep_last 2 --keep_every 1": [1, 2, 3, 4, 5, 6],
    "--save_interval 2 --keep_last 2 --keep_every 3": [4, 6],
    "--save_interval 4 --keep_last 0": [4, 6],
    "--save_interval 0 --keep_last 0": [6],
    "--save_interval 1 --checkpoint none": [],
}


@pytest.mark.parametrize("flags", KEPT)
def test_a_run_keeps_exactly_these_checkpoints(train, tmp_path, flags):
    """Copies that a user made beside them stay."""
    copies = ["step-00000001-copy", "step-3"]
    for name in copies:
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
    run = train(1, f"--max_steps 6 {flags}")
    assert run.status == 0
    assert run.steps() == KEPT[flags]
    names = {path.name for path in (run.out / "checkpoints").iterdir()}
    assert names == {*copies, *(f"step-{step:08d}" for step in KEPT[flags])}
    assert all(checkpoint.verify(path) is None for path in checkpoint.list_checkpoints(run.out))


def test_retention_neither_removes_nor_counts_newer_damaged_checkpoints(train, trained, tmp_path):
    out = damaged_copy(trained, tmp_path, flip(RANK0, -5), 4)
    before = snapshot(checkpoint.step_path(out, 4))
    text = "--strategy fsdp --save_interval 1 --max_steps 3 --keep_last 1 --allow_changes"
    run = train(2, text)
    assert (run.status, run.steps()) == (0, [3, 4])
    assert snapshot(checkpoint.step_path(out, 4)) == before
    assert checkpoint.verify(checkpoint.step_path(out, 3)) is None


def test_retention_does_not_count_an_older_damaged_checkpoint(train, trained, tmp_path):
    """Of steps 2, 4 (damaged) and 5, the last two intact ones are 2 and 5."""
    out = damaged_copy(trained, tmp_path, flip(RANK0, -5), 4)
    run = train(2, "--strategy fsdp --save_interval 5 --max_steps 5 --keep_last 2")
    assert (run.status, run.steps()) == (0, [2, 4, 5])
    run = train(2, "--save_interval 1 --max_steps 7 --keep_last 2")
    assert (run.status, run.steps()) == (0, [6, 7])
    assert all(checkpoint.verify(path) is None for path in checkpoint.list_checkpoints(out))


# --------------------------------------------------------------------------------------------------
# Killed while it saves

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


def call_and_die(number: int, first: str, function: Callable, *arguments) -> None:
    """Call the function, and kill this process before its change number `number` on disk.

    Python tells its audit hooks of every path that is written, created, renamed or removed. The
    first change that counts is of a path that contains `first`.
    """
    end_with_parent()
    seen = 0

    def hook(event: str, values: tuple) -> None:
        nonlocal seen
        writes = event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR)
        if (event in CHANGES or writes) and (seen > 0 or first in str(values[0])):
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    function(*arguments)


@pytest.fixture
def killed(pool) -> Callable[..., Iterator[int]]:
    """killed(first, arguments): call_and_die with the numbers 1, 2, ..., until none is left.

    arguments(number) returns the function to call and its arguments. Yields each number.
    """
    pool(1, os.getpid)  # starts the server, from which a process with torch is forked

    def kill_everywhere(first: str, arguments: Callable) -> Iterator[int]:
        context = multiprocessing.get_context("forkserver")
        for number in range(1, 100):
            call = (number, first, *arguments(number))
            process = context.Process(target=call_and_die, args=call)
            process.start()
            process.join(60)
            assert process.exitcode in (0, -signal.SIGKILL)
            yield number
            if process.exitcode == 0:
                return

    return kill_everywhere


def save_step(run: Path, step: int) -> None:
    state = {"a": torch.full((5,), float(step)), "b": torch.arange(step)}
    checkpoint.save_state(checkpoint.step_path(run, step), state, {"step": step})


def steps_of(run: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run)]


@pytest.mark.parametrize("replaces", [False, True], ids=["new step", "damaged step"])
def test_a_save_killed_anywhere_leaves_earlier_checkpoints(killed, tmp_path, replaces):
    """What it leaves is not listed, and the next save removes it."""
    save_step(tmp_path / "earlier", 1)
    first = checkpoint.step_path(tmp_path / "earlier", 1)
    if replaces:
        save_step(tmp_path / "earlier", 2)
        flip(RANK0, -5)(checkpoint.step_path(tmp_path / "earlier", 2))

    def folder(number: int) -> Path:
        run = tmp_path / str(number)
        return run if run.exists() else copy_run(tmp_path / "earlier", run)

    outcomes = set()
    for number in killed("", lambda number: (save_step, folder(number), 2)):
        run = folder(number)
        steps = steps_of(run)
        names = {path.name for path in (run / "checkpoints").iterdir()}
        leftovers = len(names) - len(steps)
        is_saved = 2 in steps and checkpoint.verify(checkpoint.step_path(run, 2)) is None
        outcomes.add((is_saved, leftovers > 0))
        assert snapshot(checkpoint.step_path(run, 1)) == snapshot(first)
        assert steps in ([1], [1, 2])
        assert replaces or 2 not in steps or is_saved
        save_step(run, 2 if replaces else 3)
        assert all(checkpoint.verify(path) is None for path in checkpoint.list_checkpoints(run))
        assert len(list((run / "checkpoints").iterdir())) == len(steps_of(run))
    assert {(False, False), (False, True), (True, False)} <= outcomes
    assert number > 5


def test_a_run_killed_while_it_removes_a_checkpoint_leaves_none_incomplete(
    killed, tokens, tmp_path
):
    """Once there is a checkpoint, there is always an intact one."""

    def arguments(number: int) -> tuple:
        flags = f"--data {tokens} --out {tmp_path}/{number} --max_steps 2 --save_interval 1"
        return run_command, [*SMALL.split(), *flags.split(), "--keep_last", "1"]

    found = []
    for number in killed("step-00000002", arguments):
        steps = steps_of(tmp_path / str(number))
        for path in checkpoint.list_checkpoints(tmp_path / str(number)):
            assert checkpoint.verify(path) is None
        found.append(steps)
    assert found[-1] == [2]
    changes = [steps for steps, _ in itertools.groupby(found)]
    assert changes == [[1], [1, 2], [2]]


# --------------------------------------------------------------------------------------------------
# A full disk


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 1 MB, which has room for two checkpoints of SMALL but not for three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_run_trains_on_while_its_disk_is_full(train, small_disk):
    """It tries each save, keeps the earlier checkpoints, and ends with status 1."""
    text = "--strategy fsdp --max_steps 5 --save_interval 1 --keep_last 0"
    run = train(2, text, "disk/run")
    assert run.status == 1
    line = f"cannot write {checkpoint.step_path(run.out, 5)}: "
    assert run.error.startswith(line) and "No space left on device" in run.error
    assert "\n" not in run.error
    assert "step 5/5  100%" in run.printed
    saved = checkpoint.list_checkpoints(run.out)
    assert run.steps() == [1, 2]
    assert all(checkpoint.verify(path) is None for path in saved)
    assert not list((run.out / "checkpoints").glob(".*"))
    for step in (3, 4, 5):
        path = checkpoint.step_path(run.out, step)
        (line,) = [line for line in run.printed.splitlines() if f"{step}/5  NOT SAVED" in line]
        assert f"cannot write {path}: " in line
        assert "earlier checkpoints are intact" in line

    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    run = train(2, text, "disk/run")
    assert run.status == 0
    assert f"continuing from {saved[-1]}\n" in run.printed
    assert run.steps() == [1, 2, 3, 4, 5]
    assert all(checkpoint.verify(path) is None for path in checkpoint.list_checkpoints(run.out))


class Room:
    """Standard output that removes a file as soon as a save has failed."""

    def __init__(self, file: Path):
        self.file, self.text = file, ""

    def write(self, text: str) -> None:
        self.text += text
        if "NOT SAVED" in text:
            self.file.unlink(missing_ok=True)

    def flush(self) -> None:
        pass


def train_with_room(argv: list[str], file: Path) -> tuple[int, str]:
    """Run train.command, and make room on its disk when it reports a failed save."""
    room = Room(file)
    with contextlib.redirect_stdout(room):
        return trainer.command(argv), room.text


def test_a_run_saves_again_when_its_disk_has_room(pool, tokens, small_disk):
    """Only the save of step 2 fails, so the run ends with status 0."""
    with open(small_disk / "other", "wb") as file:
        file.write(bytes(500_000))
    out = small_disk / "run"
    flags = f"{SMALL} --data {tokens} --out {out} --max_steps 4 --save_interval 1 --keep_last 1"
    ((status, printed),) = pool(1, train_with_room, flags.split(), small_disk / "other")
    assert status == 0
    assert printed.count("NOT SAVED") == 1
    assert "step 2/4  NOT SAVED" in printed
    assert [row["event"] for row in read_rows(out / "metrics.jsonl", "event")] == [
        "checkpoint",
        "checkpoint_failed",
        "checkpoint",
        "checkpoint",
    ]
    assert steps_of(out) == [4]
    assert checkpoint.verify(checkpoint.step_path(out, 4)) is None
