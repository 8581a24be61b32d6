"""Checkpoints on disk: what is damaged, what is saved and kept, and kills while it is saved."""

import functools
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rig import SMALL, Run, copy_run, end_with_parent, full_tensors, run_command
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import checkpoint
import dist

RANK0 = "rank-00000.safetensors"
RANK1 = "rank-00001.safetensors"

FLAGS = "--strategy fsdp --save_interval 2 --max_steps 4 --keep_every 1"


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


def save_one(run: Path, step: int) -> None:
    """Save a step with values of its own, and keep the last two checkpoints."""
    state = {"a": torch.full((5,), float(step)), "b": torch.arange(step)}
    saver = new_saver(run, keep_last=2)
    saver.save(state, {"step": step})
    saver.close()


def new_saver(run: Path, keep_last: int, report: Callable = lambda row, line: None):
    """A Saver without other ranks."""
    on_all_ranks = lambda function, *arguments: [function(*arguments)]  # noqa: E731
    return checkpoint.Saver(run, keep_last, 0, {}, on_all_ranks, report)


def steps_of(run: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run)]


# --------------------------------------------------------------------------------------------------
# Damage


def flip(file: Path, place: int) -> None:
    """Flip one bit of a byte."""
    contents = bytearray(file.read_bytes())
    contents[place] ^= 4
    file.write_bytes(contents)


def set_field(file: Path, name: str, value: object) -> None:
    """Change a field of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "has another bit": lambda file: flip(file, -5),
    "is cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "is missing": Path.unlink,
    "lists no files": lambda file: set_field(file, "files", None),
}
# Ranks share the files: rank 1 verifies only RANK0, and rank 0 the next two.
ROWS = f"""
{RANK0} has another bit
{RANK1} is cut
index.json is missing
manifest.json is missing
manifest.json is cut
manifest.json lists no files
"""


@pytest.mark.parametrize("row", ROWS.strip().splitlines())
def test_a_damage_is_named_and_passed_over(train, trained, tmp_path, row):
    """The start continues from the older checkpoint, and replaces the damaged one."""
    name, damage = row.split(maxsplit=1)
    out = copy_run(trained.out, tmp_path / "run")
    old, new = checkpoint.list_checkpoints(out)
    DAMAGES[damage](new / name)
    named = "" if "no files" in row else name
    assert checkpoint.verify(old) is None
    assert named in checkpoint.verify(new)
    run = train(2, FLAGS)
    assert run.status == 0, run.error
    (line,) = [line for line in run.printed.splitlines() if f"passed over {new}: " in line]
    assert named in line
    assert f"continuing from {old}\n" in run.printed
    losses = [row["loss"] for row in trained.rows()]
    assert [row["loss"] for row in run.rows()] == pytest.approx(losses, rel=1e-5)
    assert checkpoint.verify(new) is None
    assert sorted(new.parent.iterdir()) == [old, new]


def test_a_start_without_an_intact_checkpoint_is_refused(train, trained, tmp_path):
    """In one line, which is not taken for gloo's error of a lost rank, although it has gloo/."""
    out = copy_run(trained.out, tmp_path / "gloo/run")
    old, new = checkpoint.list_checkpoints(out)
    flip(new / RANK0, -5)
    (old / "index.json").unlink()
    before = snapshot(out)
    run = train(2, FLAGS, "gloo/run")
    assert (run.status, snapshot(out)) == (1, before)
    assert str(old) in run.error and str(new) in run.error
    assert "\n" not in run.error.strip() and "a rank died" not in run.error


def test_a_checkpoint_of_another_format_is_refused(train, trained, tmp_path):
    """No older checkpoint is used instead: the code that wrote this one can read it."""
    out = copy_run(trained.out, tmp_path / "run")
    path = checkpoint.step_path(out, 4)
    for version in (1, "2", None, 99):
        set_field(path / "manifest.json", "format", version)
        with pytest.raises(checkpoint.FormatError):
            checkpoint.verify(path)
    before = snapshot(out)
    run = train(2, FLAGS)
    assert (run.status, snapshot(out)) == (1, before)
    assert str(path) in run.error


def test_a_change_of_any_file_is_found(tmp_path):
    """Of any byte of the files of a caller, too, and of any entry of the list of files."""
    path = checkpoint.step_path(tmp_path, 5)
    state = {"long": torch.zeros(700_000), "short": torch.ones(3)}  # 2.8 MB are read in 3 blocks
    manifest = {"step": 5, "mine": {"x": [1, 2]}}
    size = checkpoint.save_state(path, state, manifest, {"my.json": b"contents"})
    listed = checkpoint.read_manifest(path)
    assert (listed["step"], listed["mine"]) == (5, {"x": [1, 2]})
    assert (path / "my.json").read_bytes() == b"contents"
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    intact = files.pop("manifest.json")
    assert listed["files"] == {
        name: {"bytes": len(file), "crc32": f"{zlib.crc32(file):08x}"}
        for name, file in files.items()
    }
    assert size == sum(map(len, files.values()))
    assert files.keys() == {RANK0, "index.json", "my.json"}
    assert checkpoint.verify(path) is None

    for name, file in files.items():
        for place in range(0, len(file), 1 + len(file) // 8):
            flip(path / name, place)
            assert name in checkpoint.verify(path), place
            flip(path / name, place)
        (path / name).write_bytes(file + b"\0")
        assert name in checkpoint.verify(path)
        (path / name).write_bytes(file)
        for change in ({"bytes": 0}, {"crc32": "0"}, {"crc32": None}):
            entry = listed["files"][name] | change
            set_field(path / "manifest.json", "files", listed["files"] | {name: entry})
            assert name in checkpoint.verify(path)
        (path / "manifest.json").write_bytes(intact)
    (tmp_path / "outside").write_bytes(b"contents")
    entry = {"../../outside": listed["files"]["my.json"]}
    set_field(path / "manifest.json", "files", entry)
    assert checkpoint.verify(path)


# --------------------------------------------------------------------------------------------------
# Saving and loading on meshes

# The shape and, for each axis, the dimension of a tensor that it splits, or R for copies. An empty
# text: tensors that are no DTensors.
MESHES = {
    "single": ((1,), ""),
    "ddp on 4": ((4,), ""),
    "fsdp on 2": ((2,), "0"),
    "fsdp on 4": ((4,), "0"),
    "hsdp on 2 x 2": ((2, 2), "R0"),
    "fsdp and tp on 2 x 2": ((2, 2), "01"),
    "copies on 2 x 2": ((2, 2), "RR"),
}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64}


def values(first: int, *shape: int) -> Tensor:
    """A tensor whose elements differ from each other."""
    return (first + torch.arange(math.prod(shape))).view(shape).float()


FULL = {  # 2 and 4 ranks split these evenly, unevenly or not at all
    "model": {"even": values(1, 8, 4), "odd": values(2, 7).bfloat16(), "one": values(3, 1, 5)},
    # Ranks that hold copies of a part share the writing of `large` only: half of it has 64 KiB.
    "optimizer": {"step": values(4), "none": values(5, 0, 4), "large": values(6, 259, 129)},
    "more": {"few": values(7, 3, 2), "cube": values(8, 5, 2, 3).long()},
}


def state_on(mesh: str, change: Callable[[Tensor], Tensor]) -> dict:
    """Join the process group; return FULL with each tensor changed and laid out on the mesh."""
    shape, splits = MESHES[mesh]
    dist.start("cpu")
    device_mesh = init_device_mesh("cpu", shape)

    def lay_out(full: Tensor) -> Tensor:
        if not splits:
            return full
        placements = []
        for split in splits:
            is_split = split != "R" and int(split) < full.dim()
            placements.append(Shard(int(split)) if is_split else Replicate())
        return distribute_tensor(full, device_mesh, placements, src_data_rank=None)

    return {
        part: {name: lay_out(change(full)) for name, full in tensors.items()}
        for part, tensors in FULL.items()
    }


def save_on(mesh: str, path: Path) -> None:
    state = state_on(mesh, Tensor.clone)
    checkpoint.save_state(path, state, {"step": 1}, on_all_ranks=dist.on_all_ranks)


def load_on(mesh: str, paths: dict[str, Path]) -> list[tuple[str, str]]:
    """Load each checkpoint on this mesh; return those that are wrong, with the tensors' names."""
    wrong = []
    state = state_on(mesh, torch.zeros_like)
    for saving, path in paths.items():
        for _, tensor in checkpoint.flatten(state):
            tensor.fill_(-1)
        checkpoint.load_state(path, state)
        for (name, tensor), (_, full) in zip(checkpoint.flatten(state), checkpoint.flatten(FULL)):
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if found.dtype != full.dtype or not found.equal(full):
                wrong.append((saving, name))
    return wrong


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> Callable[[str], Path]:
    """saved(mesh): the checkpoint that this mesh has written."""

    @functools.cache
    def save(mesh: str) -> Path:
        path = tmp_path_factory.mktemp("saved") / "checkpoint"
        pool(math.prod(MESHES[mesh][0]), save_on, mesh, path)
        return path

    return save


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, which must fill it: there is no room for anything else."""
    file = path.read_bytes()
    start = 8 + int.from_bytes(file[:8], "little")
    entries = json.loads(file[8:start])
    entries.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        values = bytearray(file[start:][slice(*entry["data_offsets"])])
        tensors[name] = torch.frombuffer(values, dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
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


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_writes_each_value_once_and_loads_what_any_other_wrote(pool, saved, mesh):
    folder, ranks = saved(mesh), math.prod(MESHES[mesh][0])
    wanted = dict(checkpoint.flatten(FULL))
    torch.testing.assert_close(assemble(folder), wanted, rtol=0, atol=0)
    assert checkpoint.verify(folder) is None
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    del sizes["manifest.json"], sizes["index.json"]
    assert sizes.keys() == {f"rank-{rank:05d}.safetensors" for rank in range(ranks)}
    assert max(sizes.values()) < 1.1 * sum(sizes.values()) / ranks  # they share the writing

    paths = {saving: saved(saving) for saving in MESHES}
    assert pool(ranks, load_on, mesh, paths) == [[]] * ranks


def test_a_tensor_that_does_not_fit_is_named(saved):
    for name, shape in (("weight", (4,)), ("even", (4, 4)), ("even", (32,)), ("odd", ())):
        with pytest.raises(checkpoint.CheckpointError, match=rf"\bmodel\.{name}\b"):
            checkpoint.load_state(saved("fsdp on 2"), {"model": {name: torch.zeros(shape)}})


EXACT = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32]
EXACT += [torch.int16, torch.int8, torch.uint8, torch.bool]


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(-1).view(torch.uint8).tolist()


def test_every_dtype_comes_back_bit_for_bit_or_is_converted(tmp_path):
    """Also inf and nan, and tensors that are not contiguous."""
    state = {"transposed": torch.arange(6.0).view(2, 3).mT, "part": torch.arange(9.0)[1::2]}
    for dtype in EXACT:
        count = 2 if dtype == torch.bool else 256
        state[str(dtype)] = torch.arange(count, dtype=torch.uint8).view(dtype)
    path = tmp_path / "checkpoint"
    checkpoint.save_state(path, {"all": state}, {"step": 1})
    found = full_tensors(path)
    for name, tensor in state.items():
        loaded = found[f"all.{name}"]
        assert loaded.dtype == tensor.dtype
        assert bits(loaded) == bits(tensor), name
    for dtype in (torch.bfloat16, torch.float64):
        converted = torch.zeros(64, dtype=dtype)
        checkpoint.load_state(path, {"all": {"torch.int32": converted}})
        assert converted.equal(state["torch.int32"].to(dtype))


# --------------------------------------------------------------------------------------------------
# Which checkpoints are kept


def test_checkpoints_are_listed_from_the_oldest_to_the_newest(tmp_path):
    names = ["step-00000009", "step-00000010", "step-99999999", "step-100000000"]
    others = ["step-3", "step-00000001-copy", ".step-00000004.tmp", "latest"]
    for name in names + others:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == names
    assert steps_of(tmp_path) == [9, 10, 99_999_999, 100_000_000]


KEPT = """
--save_interval 1 --keep_last 2 --keep_every 3 = 3 5 6
--save_interval 4 --keep_every 1               = 4 6
--save_interval 0 --keep_every 1               = 6
--save_interval 1 --keep_last 0                =
"""


@pytest.mark.parametrize("row", KEPT.strip().splitlines())
def test_a_run_keeps_exactly_these_checkpoints(train, tmp_path, row):
    """Copies that a user made beside them stay."""
    flags, steps = row.split("=")
    copies = ["step-00000001-copy", "step-3"]
    for name in copies:
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
    run = train(1, f"--max_steps 6 {flags}")
    assert run.status == 0
    names = {path.name for path in (run.out / "checkpoints").iterdir()}
    assert names == {*copies, *(f"step-{step:0>8}" for step in steps.split())}
    assert all(checkpoint.verify(path) is None for path in checkpoint.list_checkpoints(run.out))


def test_retention_neither_removes_nor_counts_newer_damaged_checkpoints(train, trained, tmp_path):
    out = copy_run(trained.out, tmp_path / "run")
    flip(checkpoint.step_path(out, 4) / RANK0, -5)
    before = snapshot(checkpoint.step_path(out, 4))
    run = train(2, "--max_steps 3 --save_interval 1 --keep_last 1 --keep_every 0 --allow_changes")
    assert (run.status, run.steps()) == (0, [3, 4])
    assert snapshot(checkpoint.step_path(out, 4)) == before
    assert checkpoint.verify(checkpoint.step_path(out, 3)) is None


def test_only_the_failure_of_the_last_save_fails_a_run(tmp_path):
    """An old checkpoint that cannot be removed fails none."""
    rows = []
    saver = new_saver(tmp_path, keep_last=1, report=lambda row, line: rows.append(row))
    for step, problem in ((1, None), (2, "no space"), (3, None)):
        saver.save({"a": torch.ones(3)}, {"step": step}, problem)
    saver.close()
    assert [row["event"] for row in rows] == ["checkpoint", "checkpoint_failed", "checkpoint"]
    assert steps_of(tmp_path) == [3]
    in_the_way = checkpoint.step_path(tmp_path, 3).with_name(".step-00000003.old.tmp")
    in_the_way.touch()
    saver.save({"a": torch.ones(3)}, {"step": 4})
    saver.close()
    assert steps_of(tmp_path) == [3, 4]
    saver.save({"a": torch.ones(3)}, {"step": 5}, "no space")
    with pytest.raises(checkpoint.CheckpointError, match="no space"):
        saver.close()
    assert steps_of(tmp_path) == [3, 4]


# --------------------------------------------------------------------------------------------------
# Killed while it saves

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


def save_and_die(number: int, run: Path, step: int) -> None:
    """Save a step, and kill this process before its change number `number` on disk.

    Python tells its audit hooks of every path that is written, created, renamed or removed.
    """
    end_with_parent()
    seen = 0

    def hook(event: str, values: tuple) -> None:
        nonlocal seen
        writes = event == "open" and values[2] & (os.O_WRONLY | os.O_RDWR)
        if event in CHANGES or writes:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save_one(run, step)


def killed_saves(pool, earlier: Path, folder: Path, step: int) -> Iterator[Path]:
    """Copies of a run in which the save of a step was killed ever later, until it has ended."""
    pool(1, os.getpid)  # starts the server, from which a process with torch is forked
    context = multiprocessing.get_context("forkserver")
    for number in range(1, 100):
        run = copy_run(earlier, folder / str(number))
        process = context.Process(target=save_and_die, args=(number, run, step))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        yield run
        if process.exitcode == 0:
            return


@pytest.mark.parametrize("step", [3, 2], ids=["new step", "damaged step"])
def test_a_save_killed_anywhere_loses_no_checkpoint(pool, tmp_path, step):
    """Of a run with steps 1 and 2. Step 3 replaces step 1; step 2 replaces itself if it is damaged.

    What a killed save leaves is not listed, and the next one removes it.
    """
    for saved_step in (1, 2):
        save_one(tmp_path / "earlier", saved_step)
    if step == 2:
        flip(checkpoint.step_path(tmp_path / "earlier", 2) / RANK0, -5)
    intact, left = [], set()
    for run in killed_saves(pool, tmp_path / "earlier", tmp_path, step):
        paths = checkpoint.list_checkpoints(run)
        intact.append([checkpoint.step_of(path) for path in paths if not checkpoint.verify(path)])
        left.add(len(list((run / "checkpoints").iterdir())) > len(paths))
        assert step == 2 or intact[-1] == steps_of(run)
        save_one(run, step if step == 2 else 4)
        assert not any(map(checkpoint.verify, checkpoint.list_checkpoints(run)))
        assert len(list((run / "checkpoints").iterdir())) == 2
    changes = [steps for steps, _ in itertools.groupby(intact)]
    assert changes == ([[1], [1, 2]] if step == 2 else [[1, 2], [1, 2, 3], [2, 3]])
    assert left == {True, False}
