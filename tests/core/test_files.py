"""Checkpoints on disk: what is damaged, what is saved and kept, and kills while it is saved."""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import rig
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import checkpoint
import dist

RANK0 = "rank-00000.safetensors"
FLAGS = "--strategy fsdp --save_interval 2 --max_steps 4 --keep_every 1"


@pytest.fixture(scope="module")
def trained(pool, tokens, tmp_path_factory) -> rig.Run:
    """A run of two ranks with checkpoints of steps 2 and 4. Tests damage copies of it."""
    out = tmp_path_factory.mktemp("trained") / "run"
    return rig.train(2, tokens, out, FLAGS)


def new_saver(run: Path, report: Callable = lambda row, line: None) -> checkpoint.Saver:
    """A Saver without other ranks, which keeps the last two checkpoints."""
    on_all_ranks = lambda function, *arguments: [function(*arguments)]  # noqa: E731
    return checkpoint.Saver(run, 2, 0, {}, on_all_ranks, report)


def save_one(run: Path, step: int) -> None:
    """Save a step with values of its own."""
    state = {"a": torch.full((5,), float(step)), "b": torch.arange(step)}
    saver = new_saver(run)
    saver.save(state, {"step": step})
    saver.close()


# --------------------------------------------------------------------------------------------------
# Damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "has another bit": lambda file: rig.flip(file, -5),
    "is cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "is missing": Path.unlink,
}
# Ranks share the files: rank 1 verifies only RANK0, and rank 0 the next two.
ROWS = """
rank-00000.safetensors | has another bit
rank-00001.safetensors | is cut
index.json             | is missing
manifest.json          | is missing
"""


@pytest.mark.parametrize("name, damage", rig.cells(ROWS))
def test_a_damaged_checkpoint_is_passed_over(train, trained, tmp_path, name, damage):
    """The start names it, continues from the older one, and replaces it."""
    out = shutil.copytree(trained.out, tmp_path / "run")
    old, new = checkpoint.list_checkpoints(out)
    DAMAGES[damage](new / name)
    assert checkpoint.verify(new)
    run = train(2, FLAGS)
    assert run.status == 0, run.error
    assert f"passed over {new}: " in run.printed
    assert f"continuing from {old}\n" in run.printed
    losses = [row["loss"] for row in trained.rows()]
    assert [row["loss"] for row in run.rows()] == pytest.approx(losses, rel=1e-5)
    assert checkpoint.verify(new) is None
    assert sorted(new.parent.iterdir()) == [old, new]


def test_a_start_without_an_intact_checkpoint_is_refused(train, trained, tmp_path):
    """In one line, which is not taken for gloo's error of a lost rank, although it has gloo/."""
    out = shutil.copytree(trained.out, tmp_path / "gloo/run")
    old, new = checkpoint.list_checkpoints(out)
    rig.flip(new / RANK0, -5)
    (old / "index.json").unlink()
    before = rig.snapshot(out)
    run = train(2, FLAGS, "gloo/run")
    assert (run.status, rig.snapshot(out)) == (1, before)
    assert str(old) in run.error and str(new) in run.error
    assert "\n" not in run.error.strip() and "a rank died" not in run.error


def test_a_change_of_any_file_is_found(tmp_path):
    """Of a caller's files, too, and of the manifest."""
    path = checkpoint.step_path(tmp_path, 5)
    state = {"long": torch.zeros(300_000), "short": torch.ones(3)}  # 1.2 MB are read in 2 blocks
    mine = {"step": 5, "mine": {"x": [1, 2]}}
    size = checkpoint.save_state(path, state, mine, {"my.json": b"contents"})
    manifest = checkpoint.read_manifest(path)
    assert mine.items() <= manifest.items()
    assert (path / "my.json").read_bytes() == b"contents"
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    del files["manifest.json"]
    assert size == sum(map(len, files.values()))
    assert files.keys() == {RANK0, "index.json", "my.json"}
    assert checkpoint.verify(path) is None

    for name, file in files.items():
        for place in range(0, len(file), 1 + len(file) // 8):
            rig.flip(path / name, place)
            assert name in checkpoint.verify(path), place
            rig.flip(path / name, place)
        (path / name).write_bytes(file + b"\0")
        assert name in checkpoint.verify(path)
        (path / name).write_bytes(file)

    file = path / "manifest.json"
    for place in range(file.stat().st_size):
        rig.flip(file, place)
        with contextlib.suppress(checkpoint.FormatError):
            assert checkpoint.verify(path), place
        rig.flip(file, place)
    (tmp_path / "outside").write_bytes(b"contents")
    manifest["files"]["../../outside"] = manifest["files"].pop("my.json")
    rig.edit_manifest(file, {"files": manifest["files"]})
    assert "outside" in checkpoint.verify(path)
    file.chmod(0)  # it may be intact, so no start may replace it
    with contextlib.ExitStack() as back, pytest.raises(PermissionError):
        back.callback(os.seteuid, os.geteuid())
        os.seteuid(os.geteuid() or 65534)  # root may read all files
        checkpoint.verify(path)


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


# 2 and 4 ranks split these evenly, unevenly or not at all. Ranks that hold copies of a part share
# the writing of `large` only: half of it has 64 KiB.
SHAPES = {"even": (8, 4), "odd": (7,), "one": (1, 5), "step": (), "none": (0, 4)}
SHAPES |= {"large": (259, 129), "few": (3, 2), "cube": (5, 2, 3)}
# Elements differ from each other, and none is 0.
FULL = {name: 1.0 + torch.arange(math.prod(shape)).view(shape) for name, shape in SHAPES.items()}
FULL |= {"odd": FULL["odd"].bfloat16(), "cube": FULL["cube"].long()}


def state_on(mesh: str) -> dict[str, Tensor]:
    """Join the process group; return copies of FULL, laid out on the mesh."""
    shape, splits = MESHES[mesh]
    dist.join("cpu")
    device_mesh = init_device_mesh("cpu", shape)
    state = {name: full.clone() for name, full in FULL.items()}
    for name, full in state.items() if splits else ():
        dims = [str(dim) for dim in range(full.dim())]
        placements = [Shard(int(split)) if split in dims else Replicate() for split in splits]
        state[name] = distribute_tensor(full, device_mesh, placements, src_data_rank=None)
    return state


def save_on(mesh: str, path: Path) -> None:
    checkpoint.save_state(path, state_on(mesh), {"step": 1}, on_all_ranks=dist.on_all_ranks)


def load_on(mesh: str, paths: dict[str, Path]) -> list[tuple[str, str]]:
    """Load each checkpoint on this mesh; return those that are wrong, with the tensors' names."""
    wrong = []
    state = state_on(mesh)
    for saving, path in paths.items():
        for tensor in state.values():
            tensor.fill_(-1)
        checkpoint.load_state(path, state)
        for name, tensor in state.items():
            found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not found.equal(FULL[name]):
                wrong.append((saving, name))
    return wrong


@pytest.fixture(scope="module")
def saved(pool, tmp_path_factory) -> dict[str, Path]:
    """The checkpoint that each mesh has written."""
    paths = {}
    for mesh, (shape, _) in MESHES.items():
        paths[mesh] = tmp_path_factory.mktemp("saved") / "checkpoint"
        pool(math.prod(shape), save_on, mesh, paths[mesh])
    return paths


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, which must fill it: there is no room for anything else."""
    file = path.read_bytes()
    start = 8 + int.from_bytes(file[:8], "little")
    entries = json.loads(file[8:start])
    entries.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        assert entry["data_offsets"][0] == end
        assert (start + end) % DTYPES[entry["dtype"]].itemsize == 0  # as a memory map needs it
        end = entry["data_offsets"][1]
        values = bytearray(file[start:][slice(*entry["data_offsets"])])
        tensors[name] = torch.frombuffer(values, dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
    assert start + end == len(file)
    return tensors


def assemble(folder: Path) -> dict[str, Tensor]:
    """The full tensors, as docs/reference.md describes the format. Values written twice double."""
    files = [read_safetensors(path) for path in sorted(folder.glob("rank-*.safetensors"))]
    tensors = {}
    for group in json.loads((folder / "index.json").read_text()):
        for name in group["tensors"]:
            full = torch.zeros(group["shape"], dtype=DTYPES[group["dtype"]])
            for rank, start, shape in group["chunks"]:
                place = tuple(slice(i, i + n) for i, n in zip(start, shape, strict=True))
                full[place] += files[rank].pop(name)
            tensors[name] = full
    assert not any(files), "chunks that index.json does not name"
    return tensors


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_writes_each_value_once_and_loads_what_any_other_wrote(pool, saved, mesh):
    folder, ranks = saved[mesh], math.prod(MESHES[mesh][0])
    torch.testing.assert_close(assemble(folder), FULL, rtol=0, atol=0)
    assert checkpoint.verify(folder) is None
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    del sizes["manifest.json"], sizes["index.json"]
    assert sizes.keys() == {f"rank-{rank:05d}.safetensors" for rank in range(ranks)}
    assert max(sizes.values()) < 1.1 * sum(sizes.values()) / ranks  # they share the writing
    assert pool(ranks, load_on, mesh, saved) == [[]] * ranks


def test_a_tensor_that_does_not_fit_is_named(saved):
    for name, shape in (("weight", (4,)), ("even", (4, 4)), ("even", (32,)), ("odd", ())):
        with pytest.raises(checkpoint.CheckpointError, match=rf"\b{name}\b"):
            checkpoint.load_state(saved["fsdp on 2"], {name: torch.zeros(shape)})


def test_every_dtype_comes_back_or_is_converted(tmp_path):
    """Also inf and nan, and tensors that are not contiguous."""
    state = {"transposed": torch.arange(6.0).view(2, 3).mT, "part": torch.arange(9.0)[1::2]}
    for name, dtype in checkpoint.DTYPES.items():
        count = 2 if name == "BOOL" else 256
        state[name] = torch.arange(count, dtype=torch.uint8).view(dtype)
    assert len(state) == 2 + 8
    path = tmp_path / "checkpoint"
    checkpoint.save_state(path, state, {"step": 1})
    torch.testing.assert_close(rig.full_tensors(path), state, rtol=0, atol=0, equal_nan=True)
    for dtype in (torch.bfloat16, torch.float64):
        converted = torch.zeros(64, dtype=dtype)
        checkpoint.load_state(path, {"I32": converted})
        assert converted.equal(state["I32"].to(dtype))


# --------------------------------------------------------------------------------------------------
# Which checkpoints are kept


def test_checkpoints_are_listed_from_the_oldest_to_the_newest(tmp_path):
    names = ["step-00000009", "step-00000010", "step-99999999", "step-100000000"]
    others = ["step-3", "step-00000001-copy", ".step-00000004.tmp", "latest"]
    for name in names + others:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == names


KEPT = """
--save_interval 1 --keep_last 2 --keep_every 3 | 3 5 6
--save_interval 4 --keep_every 1               | 4 6
--save_interval 0 --keep_every 1               | 6
--save_interval 1 --keep_last 0                |
"""


@pytest.mark.parametrize("flags, steps", rig.cells(KEPT))
def test_a_run_keeps_exactly_these_checkpoints(train, tmp_path, flags, steps):
    """Copies that a user made beside them stay."""
    copies = ["step-00000001-copy", "step-3"]
    for name in copies:
        (tmp_path / "run/checkpoints" / name).mkdir(parents=True)
    run = train(1, f"--max_steps 6 {flags}")
    assert run.status == 0
    names = {path.name for path in (run.out / "checkpoints").iterdir()}
    assert names == {*copies, *(f"step-{step:0>8}" for step in steps.split())}
    assert not any(map(checkpoint.verify, checkpoint.list_checkpoints(run.out)))


def test_retention_neither_removes_nor_counts_newer_checkpoints(tmp_path):
    """They are damaged: a start has passed over them."""
    for step in (9, 1, 2, 3):
        save_one(tmp_path, step)
    assert rig.Run(tmp_path).steps() == [2, 3, 9]


def test_only_the_failure_of_the_last_save_fails_a_run(tmp_path):
    """An old checkpoint that cannot be removed fails none."""
    rows = []
    saver = new_saver(tmp_path, report=lambda row, line: rows.append(row))
    for step, problem in ((1, None), (2, "no space"), (3, None), (4, None)):
        saver.save({"a": torch.ones(3)}, {"step": step}, problem)
        checkpoint.step_path(tmp_path, 3).with_name(".step-00000003.old.tmp").touch()  # in the way
    saver.save({"a": torch.ones(3)}, {"step": 5})
    saver.close()
    assert [row["step"] for row in rows if row["event"] == "checkpoint_failed"] == [2]
    assert rig.Run(tmp_path).steps() == [3, 4, 5]
    saver.save({"a": torch.ones(3)}, {"step": 6}, "no space")
    with pytest.raises(checkpoint.CheckpointError, match="no space"):
        saver.close()
    assert rig.Run(tmp_path).steps() == [3, 4, 5]


# --------------------------------------------------------------------------------------------------
# Killed while it saves

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


def save_and_die(number: int, run: Path, step: int) -> None:
    """Save a step, and kill this process before its change number `number` on disk.

    Python tells its audit hooks of every path that is written, created, renamed or removed.
    """
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


def killed_saves(earlier: Path, folder: Path, step: int) -> Iterator[Path]:
    """Copies of a run in which the save of a step was killed ever later, until it has ended."""
    for number in itertools.count(1):
        run = shutil.copytree(earlier, folder / str(number))
        (process,) = rig.fork_ranks(1, save_and_die, number, run, step)
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        yield run
        if process.exitcode == 0:
            return


@pytest.mark.parametrize("step", [3, 2], ids=["new step", "damaged step"])
def test_a_save_killed_anywhere_loses_no_checkpoint(tmp_path, step):
    """Of a run with steps 1 and 2. Step 3 replaces step 1; step 2 replaces itself if it is damaged.

    What a killed save leaves is not listed, and the next one removes it.
    """
    for saved_step in (1, 2):
        save_one(tmp_path / "earlier", saved_step)
    if step == 2:
        rig.flip(checkpoint.step_path(tmp_path / "earlier", 2) / RANK0, -5)
    intact, left = [], set()
    for run in killed_saves(tmp_path / "earlier", tmp_path, step):
        paths = checkpoint.list_checkpoints(run)
        intact.append([checkpoint.step_of(path) for path in paths if not checkpoint.verify(path)])
        left.add(len(list((run / "checkpoints").iterdir())) > len(paths))
        assert step == 2 or intact[-1] == rig.Run(run).steps()
        save_one(run, step if step == 2 else 4)
        assert not any(map(checkpoint.verify, checkpoint.list_checkpoints(run)))
        assert len(list((run / "checkpoints").iterdir())) == 2
    changes = [steps for steps, _ in itertools.groupby(intact)]
    assert changes == ([[1], [1, 2]] if step == 2 else [[1, 2], [1, 2, 3], [2, 3]])
    assert left == {True, False}
