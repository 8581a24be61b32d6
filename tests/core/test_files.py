"""Checkpoints on disk: what is damaged, what is saved, what is kept, and kills while it is saved.

Each damage of a table meets all observers in one test: checkpoint.verify names it, a start passes
over the checkpoint and, without another one, refuses to train.
"""

import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import checkpoint
import dist
from model import SIZES, meta_model

from .conftest import SMALL, Run, copy_run, end_with_parent, full_tensors, run_command

RANK0 = "rank-00000.safetensors"
RANK1 = "rank-00001.safetensors"
EMBED = "model.embed.weight"  # 320 x 32: rows 0-159 are in RANK0, the others in RANK1

FLAGS = "--strategy fsdp --save_interval 2 --max_steps 4 --keep_every 1"

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


def exchange(folder: Path) -> None:
    """Exchange two chunks of equal shape, which only the checksum of index.json reveals."""
    groups = json.loads((folder / "index.json").read_text())
    (group,) = [group for group in groups if EMBED in group["tensors"]]
    for chunk in group["chunks"]:
        chunk[0] = 1 - chunk[0]
    (folder / "index.json").write_text(json.dumps(groups))


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


def manifest(**fields) -> Damage:
    """Change fields of manifest.json."""

    def damage(folder: Path) -> None:
        value = json.loads((folder / "manifest.json").read_text()) | fields
        (folder / "manifest.json").write_text(json.dumps(value))

    return damage


# The damage, and the file that verify names
DAMAGES: dict[str, tuple[Damage, str]] = {
    "file cut short": (contents(RANK1, lambda old: old[:1000]), RANK1),
    "file with one more byte": (contents(RANK0, lambda old: old + b"\0"), RANK0),
    "file that is empty": (contents(RANK0, lambda old: b""), RANK0),
    "bit of a value": (flip(RANK0, -5), RANK0),
    "bit of a value of rank 1": (flip(RANK1, -5), RANK1),
    "bit of a header": (flip(RANK1, 8), RANK1),
    "bit of index.json": (flip("index.json", -20), "index.json"),
    "chunks of index.json exchanged": (exchange, "index.json"),
    "missing file of rank 1": (remove(RANK1), RANK1),
    "missing index.json": (remove("index.json"), "index.json"),
    "missing manifest.json": (remove("manifest.json"), "manifest.json"),
    "half of manifest.json": (
        contents("manifest.json", lambda old: old[: len(old) // 2]),
        "manifest.json",
    ),
    "manifest.json without files": (manifest(files=None), ""),
    "folder in place of a file": (make_folder, RANK1),
    "file that cannot be read": (link_to_itself, RANK1),
}


# --------------------------------------------------------------------------------------------------
# The observers


def damaged_copy(trained: Run, tmp_path: Path, damage: Damage, *steps: int) -> Path:
    """Copy the run and damage its checkpoints of these steps."""
    out = copy_run(trained.out, tmp_path / "run")
    for step in steps:
        damage(checkpoint.step_path(out, step))
    return out


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damage_is_named_and_passed_over(train, trained, tmp_path, case):
    """The start continues from the older checkpoint, and replaces the damaged one."""
    damage, file = DAMAGES[case]
    out = damaged_copy(trained, tmp_path, damage, 4)
    old, new = checkpoint.list_checkpoints(out)
    assert checkpoint.verify(old) is None
    assert file in checkpoint.verify(new)
    run = train(1 if "manifest" in case else 2, FLAGS)
    assert run.status == 0, run.error
    (line,) = [line for line in run.printed.splitlines() if f"passed over {new}" in line]
    assert file in line
    assert f"continuing from {old}\n" in run.printed
    losses = [row["loss"] for row in trained.rows()]
    assert [row["loss"] for row in run.rows()] == pytest.approx(losses, rel=1e-5)
    assert checkpoint.verify(new) is None
    assert sorted(path.name for path in new.parent.iterdir()) == [old.name, new.name]


def assert_refused(run: Run, before: dict) -> None:
    """Both ranks end, in one line, and nothing on disk changes."""
    assert run.status == 1
    assert run.error.strip() and "\n" not in run.error.strip()
    assert "step 3/4" not in run.printed
    assert snapshot(run.out) == before


@pytest.mark.parametrize(
    "case", ["file cut short", "bit of a value of rank 1", "missing index.json"]
)
def test_a_start_without_an_intact_checkpoint_is_refused(train, trained, tmp_path, case):
    damage, file = DAMAGES[case]
    out = damaged_copy(trained, tmp_path, damage, 4, 2)
    before = snapshot(out)
    run = train(2, FLAGS)
    assert_refused(run, before)
    for path in checkpoint.list_checkpoints(out):
        assert str(path) in run.error
    assert run.error.count(file) >= 2


def test_a_folder_named_gloo_is_not_taken_for_a_lost_rank(train, trained, tmp_path):
    """The error of a damaged checkpoint contains its path, as gloo's errors contain gloo/."""
    out = copy_run(trained.out, tmp_path / "gloo/run")
    for path in checkpoint.list_checkpoints(out):
        remove("index.json")(path)
    run = train(2, FLAGS, "gloo/run")
    assert run.status == 1
    assert str(path) in run.error and "a rank died" not in run.error


@pytest.mark.parametrize("version", [1, 99, "2", None])
def test_a_checkpoint_of_another_format_is_refused(train, trained, tmp_path, version):
    """No older checkpoint is used instead: the code that wrote this one can read it."""
    out = damaged_copy(trained, tmp_path, manifest(format=version), 4)
    path = checkpoint.step_path(out, 4)
    with pytest.raises(checkpoint.FormatError):
        checkpoint.verify(path)
    before = snapshot(out)
    run = train(2, FLAGS)
    assert_refused(run, before)
    assert str(path) in run.error


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
    files = [read_safetensors(path) for path in sorted(folder.glob("rank-*.safetensors"))]
    tensors = {}
    for group in json.loads((folder / "index.json").read_text()):
        for name in group["tensors"]:
            full = torch.zeros(group["shape"], dtype=DTYPES[group["dtype"]])
            times = torch.zeros(group["shape"])
            for rank, start, shape in group["chunks"]:
                chunk = files[rank].pop(name)
                assert list(chunk.shape) == shape
                place = tuple(slice(i, i + n) for i, n in zip(start, shape, strict=True))
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
    # For each axis, the dimension of a tensor that it splits, or R for copies. An empty text:
    # tensors that are no DTensors.
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
    device_mesh = init_device_mesh("cpu", shape)

    def lay_out(full: Tensor) -> Tensor:
        if not splits:
            return full.clone()
        placements = []
        for split in splits:
            is_split = split != "R" and int(split) < full.dim()
            placements.append(Shard(int(split)) if is_split else Replicate())
        return distribute_tensor(full, device_mesh, placements, src_data_rank=None)

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


# The model, the mesh, and the placements of its weights
SHARES = {
    "ddp 4": ((4,), None),
    "ddp 64": ((64,), None),
    "hsdp 2x2": ((2, 2), [Replicate(), Shard(0)]),
    "hsdp 16x4": ((16, 4), [Replicate(), Shard(0)]),
}


def bytes_written(shape: tuple[int, ...], placements: list | None) -> list[int]:
    """The bytes of gpt2-124m that each rank of a mesh writes."""
    written = []
    for rank in range(math.prod(shape)):
        options = dict(rank=rank, world_size=math.prod(shape), store=FakeStore())
        torch.distributed.init_process_group("fake", **options)
        mesh = init_device_mesh("cpu", shape)
        total = 0
        for weight in meta_model(SIZES["gpt2-124m"]).parameters():
            if placements:
                weight = distribute_tensor(weight.detach(), mesh, placements, src_data_rank=None)
            _, values = checkpoint.chunk_of(weight)
            total += values.nbytes
        written.append(total)
        torch.distributed.destroy_process_group()
    return written


@pytest.mark.parametrize("case", SHARES)
def test_ranks_that_hold_copies_share_the_writing(pool, case):
    (written,) = pool(1, bytes_written, *SHARES[case])
    assert sum(written) == 4 * 123_551_232
    assert max(written) <= 1.1 * sum(written) / len(written)


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


EXACT = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
EXACT += [torch.int16, torch.int8, torch.uint8, torch.bool]


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
    assert "my.json" in checkpoint.verify(path)


def test_two_dtypes_of_one_shape_are_kept_apart(tmp_path):
    """The dtype belongs to how a tensor is cut, by which index.json groups the tensors."""
    state = {"a": torch.arange(6.0), "b": torch.arange(6), "c": torch.arange(6.0) + 1}
    checkpoint.save_state(tmp_path / "checkpoint", state, {"step": 1})
    found = full_tensors(tmp_path / "checkpoint")
    torch.testing.assert_close(found, state, rtol=0, atol=0)
    assert [found[name].dtype for name in state] == [value.dtype for value in state.values()]


def save_on_a_broken_rank(path: Path, broken: int) -> str:
    """Save with a value of one rank that cannot be saved; return the error."""
    rank = dist.start("cpu").rank
    value = torch.ones(3, dtype=torch.complex64 if rank == broken else torch.float32)
    try:
        checkpoint.save_state(path, {"a": value}, {"step": 1}, on_all_ranks=dist.on_all_ranks)
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("broken", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all(pool, tmp_path, broken):
    path = checkpoint.step_path(tmp_path, 1)
    errors = pool(2, save_on_a_broken_rank, path, broken)
    assert all(errors) and "RankError" in errors
    assert not path.exists()


# --------------------------------------------------------------------------------------------------
# Which checkpoints are kept

KEPT = {
    "--save_interval 1 --keep_every 1": [1, 2, 3, 4, 5, 6],
    "--save_interval 1 --keep_last 1": [6],
    "--save_interval 1 --keep_last 2": [5, 6],
    "--save_interval 1": [5, 6],
    "--save_interval 1 --keep_last 2 --keep_every 3": [3, 5, 6],
    "--save_interval 1 --keep_last 1 --keep_every 2": [2, 4, 6],
    "--save_interval 1 --keep_last 2 --keep_every 1": [1, 2, 3, 4, 5, 6],
    "--save_interval 2 --keep_last 2 --keep_every 3": [4, 6],
    "--save_interval 4 --keep_every 1": [4, 6],
    "--save_interval 0 --keep_every 1": [6],
    "--save_interval 1 --keep_last 0": [],
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
    run = train(2, "--max_steps 3 --save_interval 1 --keep_last 1 --keep_every 0 --allow_changes")
    assert (run.status, run.steps()) == (0, [3, 4])
    assert snapshot(checkpoint.step_path(out, 4)) == before
    assert checkpoint.verify(checkpoint.step_path(out, 3)) is None


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


def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save(train, trained, tmp_path):
    """A folder on which something is mounted cannot be renamed."""
    out = copy_run(trained.out, tmp_path / "run")
    old = checkpoint.step_path(out, 2)
    if os.geteuid() != 0 or subprocess.run(["mount", "--bind", old, old]).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        run = train(
            2, "--strategy fsdp --save_interval 2 --max_steps 6 --keep_last 1 --keep_every 0"
        )
    finally:
        subprocess.run(["umount", old], check=True)
    assert (run.status, run.steps()) == (0, [2, 6])
    assert "NOT SAVED" not in run.printed
    assert [checkpoint.verify(path) for path in checkpoint.list_checkpoints(out)] == [None, None]


def test_a_run_trains_on_while_its_disk_is_full(train, small_disk):
    """It tries each save, keeps the earlier checkpoints, and ends with status 1."""
    text = "--strategy fsdp --max_steps 5 --save_interval 1 --keep_every 1"
    run = train(2, text, "disk/run")
    assert run.status == 1
    assert f"{checkpoint.step_path(run.out, 5)}" in run.error
    assert "No space left on device" in run.error
    assert "\n" not in run.error
    assert "step 5/5  100%" in run.printed
    saved = checkpoint.list_checkpoints(run.out)
    assert run.steps() == [1, 2]
    assert all(checkpoint.verify(path) is None for path in saved)
    assert not list((run.out / "checkpoints").glob(".*"))
    for step in (3, 4, 5):
        path = checkpoint.step_path(run.out, step)
        (line,) = [line for line in run.printed.splitlines() if f"{step}/5  NOT SAVED" in line]
        assert str(path) in line
