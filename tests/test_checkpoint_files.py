"""The files of a checkpoint, if they are damaged or hostile, and tools.checkpoint."""

import importlib.util
import json
import os
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import (
    TEN_STEPS,
    command,
    file_names,
    last_checkpoint,
    listen,
    memory_taken,
    rows,
    tensors,
)
from test_house import MODULES, imported_modules

import checkpoint
import dist
from config import parse
from runtime import launch, preflight
from runtime.saver import Saver
from tools.checkpoint import consolidate


def change_manifest(path: Path, **fields) -> None:
    """Change fields of the manifest, and its checksum accordingly."""
    manifest = json.loads((path / "manifest.json").read_text()) | fields
    (path / "manifest.json").write_text(json.dumps(checkpoint.seal(manifest)))


def flip_a_bit(path: Path, name: str = "rank-00000.safetensors", place: int = -5) -> None:
    contents = bytearray((path / name).read_bytes())
    contents[place] ^= 4
    (path / name).write_bytes(contents)


DAMAGE = {
    "has 1,000 bytes, not": lambda path: os.truncate(path / "rank-00001.safetensors", 1000),
    "has changed since it was written": flip_a_bit,
    "rank-00001.safetensors is missing": lambda path: (path / "rank-00001.safetensors").unlink(),
    "index.json has 0 bytes": lambda path: (path / "index.json").write_bytes(b""),
    "manifest.json is damaged": lambda path: (path / "manifest.json").write_text('{"step": 6'),
    "manifest.json is missing": lambda path: (path / "manifest.json").unlink(),
    "manifest.json has changed since": lambda path: (path / "manifest.json").write_text(
        (path / "manifest.json").read_text().replace('"norm_eps": 1e-05', '"norm_eps": 1e-01')
    ),
    "was renamed: it holds step 8, not 10": lambda path: change_manifest(path, step=8),
}


def test_damaged_checkpoints_are_passed_over(run, on_ranks):
    """Retention does not remove a damaged checkpoint until the run has saved a later step."""
    text = "--max_steps 10 --save_interval 1 --strategy fsdp --keep_last"
    out = run(2, f"{text} 0")
    *_, first = paths = checkpoint.list_checkpoints(out)[:2]
    damaged = checkpoint.list_checkpoints(out)[2:]
    weights = tensors(damaged[-1])
    for path, (problem, damage) in zip(damaged, DAMAGE.items(), strict=True):
        damage(path)
        assert problem in checkpoint.verify(path)
    status, said, error = command("verify", out)
    assert (status, error.count("\n")) == (1, 1)
    assert [line.startswith("DAMAGED: ") for line in said.splitlines()] == [False] * 2 + [True] * 8
    for line, problem in zip(said.splitlines()[2:], DAMAGE):
        assert problem in line
    ((status, said, _), _) = on_ranks(2, listen, f"{text} 1 --save_interval 4 --allow_changes")
    assert status == 0
    for path, problem in zip(damaged, DAMAGE):
        (line,) = [line for line in said.splitlines() if f"passed over {path}: " in line]
        assert problem in line
    assert f"continuing from {first}" in said
    # The run replaced steps 4, 8 and 10, and retention removed all but the last checkpoint.
    assert checkpoint.list_checkpoints(out) == damaged[-1:]
    assert checkpoint.verify(damaged[-1]) is None
    torch.testing.assert_close(tensors(damaged[-1]), weights, rtol=0, atol=0, equal_nan=True)
    assert not paths[0].exists()


def find_damage_on_two_hosts(argv: list[str]) -> str:
    """Return the error of a start on two hosts of one rank each."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    world = launch.start("cpu")
    try:
        path = preflight.find_origin(parse(argv), world).path
    except checkpoint.CheckpointError as error:
        return str(error)
    return f"{path} verifies"


def test_ranks_of_two_hosts_verify_all_files_together(whole, on_ranks, tmp_path):
    """One checkpoint has a damaged file that rank 0 verifies, the other one that rank 1 does."""
    out = tmp_path / "run"
    shutil.copytree(whole["ddp --async_save"], out)
    damaged = ["index.json", "rank-00000.safetensors"]
    for path, name in zip(checkpoint.list_checkpoints(out), damaged, strict=True):
        flip_a_bit(path, name)
    for error in on_ranks(2, find_damage_on_two_hosts, f"{TEN_STEPS} --strategy ddp"):
        for name in damaged:
            assert f"{name} has changed since it was written" in error


def test_a_changed_first_byte_of_a_long_file_is_found(tmp_path):
    """The file is so long that it is read in several blocks."""
    path = tmp_path / "checkpoint"
    checkpoint.save_state(path, {"weight": torch.ones(1 << 19)}, {"step": 1})
    assert (path / "rank-00000.safetensors").stat().st_size > 2 << 20
    assert checkpoint.verify(path) is None
    flip_a_bit(path, place=0)
    assert "rank-00000.safetensors has changed" in checkpoint.verify(path)


def test_a_disk_error_fails_the_verification(path):
    with mock.patch("builtins.open", side_effect=OSError(5, "Input/output error")):
        assert "Input/output error" in checkpoint.verify(path)


# --------------------------------------------------------------------------------------------------
# Hostile files

WHOLE = torch.arange(24.0).view(6, 4)


def write_two_files(path: Path, cut: int = 4) -> None:
    """Write `a` in two chunks of rows, the second from row `cut` on, and `b` in the first file."""
    work = path.with_name("work")
    work.mkdir(parents=True)
    first = {"a": WHOLE[:cut], "b": torch.arange(3)}
    files = [f"rank-0000{rank}.safetensors" for rank in range(2)]
    a = {"dtype": "F32", "shape": [6, 4], "cuts": [[0, cut], [0]], "grid": [0, 1]}
    b = {"dtype": "I64", "shape": [3], "cuts": [[0]], "grid": [0]}
    entries = {
        files[0]: checkpoint.write_safetensors(work / files[0], first),
        files[1]: checkpoint.write_safetensors(work / files[1], {"a": WHOLE[cut:]}),
        "index.json": checkpoint.write_index(work, files, {"a": a, "b": b}),
    }
    checkpoint.complete(work, path, {"step": 1, "files": entries})


@pytest.fixture
def path(tmp_path) -> Path:
    """The checkpoint of `write_two_files`."""
    write_two_files(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def index(change) -> callable:
    """Change the JSON of the index in place."""

    def spoil(path: Path) -> None:
        value = json.loads((path / "index.json").read_text())
        change(value)
        (path / "index.json").write_text(json.dumps(value))

    return spoil


def of_a(**fields) -> callable:
    return index(lambda value: value["tensors"]["a"].update(fields))


def put(name: str, contents: bytes) -> callable:
    return lambda path: (path / name).write_bytes(contents)


def raw(text: str, length: int | None = None, data: bytes = bytes(32)) -> callable:
    """Write another header, and bytes of tensors, to the file of the second chunk."""
    size = len(text) if length is None else length
    return put("rank-00001.safetensors", size.to_bytes(8, "little") + text.encode() + data)


def header(data: bytes = bytes(32), **fields) -> callable:
    """Change the entry of `a` in the file of the second chunk."""
    entry = {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]} | fields
    return raw(json.dumps({"a": entry}), data=data)


HOSTILE = {
    "header longer than the file": raw("{}", length=100),
    "header that is not JSON": raw("a: {}"),
    "header without an end": raw("[" * 100_000),
    "unknown dtype": header(dtype="F4"),
    "absurd shape": header(shape=[2**40, 2**40]),
    "size of thousands of digits": raw('{"a": {"shape": [1' + 5000 * "0" + "]}}"),
    "offset beyond the end": header(data_offsets=[32, 64]),
    "offset before the beginning": header(data_offsets=[-64, -32], data=bytes(64)),
    "offset after a gap": header(data_offsets=[8, 40], data=bytes(40)),
    "bytes after the last tensor": header(data=bytes(40)),
    "dtype of another kind": header(dtype="I32"),
    "chunk that would be broadcast": header(shape=[1, 4], data_offsets=[0, 16], data=bytes(16)),
    "empty file": put("rank-00001.safetensors", b""),
    "chunk of another shape": header(shape=[4, 2]),
    "chunk that is missing": raw('{"c": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}'),
    "missing file": lambda path: (path / "rank-00001.safetensors").unlink(),
    "index that is not JSON": put("index.json", b"files: a"),
    "index without files": index(lambda value: value.pop("files")),
    "entry that is null": index(lambda value: value["tensors"].update(a=None)),
    "index of another shape": of_a(shape=[6, 5]),
    "cuts that do not start at 0": of_a(cuts=[[1, 4], [0]]),
    "grid with a hole": of_a(grid=[0]),
    "grid with an unknown file": of_a(grid=[0, 2]),
}


def fit_manifest(path: Path) -> None:
    """Give the manifest the sizes and checksums that the files have now."""
    files = checkpoint.read_manifest(path)["files"]
    for name in files.keys() & set(file_names(path)):
        files[name] = checkpoint.write_file(path / name, [(path / name).read_bytes()])
    change_manifest(path, files=files)


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(path, tmp_path, case):
    """It is refused even if its checksums fit. Loading takes less than 8 MB, which Python needs."""
    state = {"b": torch.zeros(3, dtype=torch.int64), "a": torch.zeros(6, 4)}
    checkpoint.load_state(path, state)
    assert torch.equal(state["a"], WHOLE)
    HOSTILE[case](path)

    def load() -> None:
        with pytest.raises(checkpoint.CheckpointError, match="^cannot read [^\n]*$"):
            checkpoint.load_state(path, state)

    assert memory_taken(load) < 8e6
    assert checkpoint.verify(path)  # verify also finds it
    for _ in range(2):
        with pytest.raises(checkpoint.CheckpointError):
            consolidate(path, tmp_path / "one")
        assert not (tmp_path / "one").exists()
        fit_manifest(path)
        load()


def write_a_longer_file(path: Path) -> None:
    """Write a longer file with a valid header that contains the chunk."""
    wrong = {"a": WHOLE[:3], "c": torch.ones(3)}
    checkpoint.write_safetensors(path / "rank-00001.safetensors", wrong)


# Damage that no header shows, and whether it takes verify_files to find it
HIDDEN = {
    "/index.json: it has changed since it": (of_a(grid=[1, 0]), False),  # equal chunks exchanged
    ": rank-00001.safetensors has .* bytes, not": (write_a_longer_file, False),
    ": rank-00000.safetensors has changed": (flip_a_bit, True),
}


@pytest.mark.parametrize("line", HIDDEN)
def test_damage_that_no_header_shows_is_found(tmp_path, line):
    damage, verify_files = HIDDEN[line]
    write_two_files(tmp_path / "checkpoint", cut=3)
    state = {"a": torch.zeros(6, 4)}
    checkpoint.load_state(tmp_path / "checkpoint", state, verify_files)
    assert torch.equal(state["a"], WHOLE)
    damage(tmp_path / "checkpoint")
    with pytest.raises(checkpoint.CheckpointError, match=f"^cannot read .*{line}"):
        checkpoint.load_state(tmp_path / "checkpoint", state, verify_files)


def test_a_link_or_pipe_in_place_of_a_file_does_not_verify(path, tmp_path):
    file = path / "rank-00001.safetensors"
    for make in (
        lambda: file.symlink_to(shutil.copy(path / "rank-00000.safetensors", tmp_path)),
        lambda: file.symlink_to("/dev/zero"),
        lambda: os.mkfifo(file),
    ):
        file.unlink()
        make()
        assert "rank-00001.safetensors has " in checkpoint.verify(path)


def test_the_error_names_a_tensor_that_does_not_fit(path):
    for name, shape in (("a", (6, 5)), ("a", (24,)), ("weight", (3,))):
        with pytest.raises(checkpoint.CheckpointError, match=f"it has no tensor {name} of shape"):
            checkpoint.load_state(path, {name: torch.empty(shape)})


EXECUTES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_no_module_can_execute_the_files_that_it_reads():
    """No module unpickles anything. The packages that read parquet or zstd are not checked."""
    for name, path in MODULES.items():
        assert not imported_modules(path) & EXECUTES, name
        source = path.read_text()
        for call in ("torch.load(", "weights_only", "allow_pickle", " eval(", " exec("):
            assert call not in source, f"{name} has {call}"


# --------------------------------------------------------------------------------------------------
# Manifests

HOSTILE_MANIFESTS = [
    "{}",
    '{"step": "os.system", "files": {"a.safetensors": {"bytes": 1, "crc32": "0"}}}',
    '{"step": 1, "files": {"../../x": {}}}',
    '{"step": 1, "files": {"a.safetensors": {"bytes": "many", "crc32": "0"}}}',
    '{"step": 1, "files": {"a.safetensors": {"bytes": 1, "crc32": "0"}}, "tokens": "many"}',
    '{"step": 1, "files": {}}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(checkpoint.CheckpointError, match=f"^{tmp_path} is not a complete [^\n]*$"):
        checkpoint.read_manifest(tmp_path)


def test_a_changed_byte_of_a_manifest_is_found(path):
    """Except in the word "crc32" itself, where a change leaves all other fields as they were."""
    fields = checkpoint.read_manifest(path)
    del fields["crc32"]
    contents = (path / "manifest.json").read_bytes()
    missed = 0
    for i, byte in enumerate(contents):
        changed = contents[:i] + bytes([byte ^ 1]) + contents[i + 1 :]
        (path / "manifest.json").write_bytes(changed)
        if checkpoint.verify(path) is None:
            missed += 1
            manifest = checkpoint.read_manifest(path)
            assert manifest | fields == manifest
    assert missed == len("crc32")


@pytest.mark.parametrize("format", [{}, {"format": 1}, {"format": 3}])  # {}: before 0.2.0
def test_checkpoints_of_another_format_are_refused(path, format):
    manifest = checkpoint.read_manifest(path)
    del manifest["format"], manifest["crc32"]
    (path / "manifest.json").write_text(json.dumps(manifest | format))
    line = f"has format {format.get('format', 1)}, not 2: use the version that wrote it"
    with pytest.raises(checkpoint.PathError, match=line):
        checkpoint.read_manifest(path)


UNREADABLE = {  # manifest -> the error
    '{"tokens": 5}': "the manifest's step is None, not an integer of at least 0",
    '{"step": -1}': "the manifest's step is -1, not",
    '{"step": 7}': "step-00000006 was renamed: it holds step 7, not 6",
    '{"step": 6, "tokens": "many"}': "the manifest's tokens is 'many', not",
}


def save_with_manifest(
    path: Path, manifest: dict, on_all_ranks=checkpoint.on_only_rank, **extra_files
):
    """Save on this rank or on all ranks; return the error."""
    try:
        checkpoint.save_state(path, {"a": torch.ones(2)}, manifest, extra_files, on_all_ranks)
    except checkpoint.CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("text", UNREADABLE)
def test_an_invalid_manifest_is_not_saved(tmp_path, text):
    path = checkpoint.step_path(tmp_path, 6)
    assert UNREADABLE[text] in save_with_manifest(path, json.loads(text))
    error = save_with_manifest(path, {"step": 6}, **{"../x": b""})
    assert "'../x' is not the name of a file" in error
    assert "not JSON serializable" in save_with_manifest(path, {"step": 6, "path": tmp_path})
    assert not file_names(tmp_path)


def save_with_steps(path: Path, *steps: int) -> str | None:
    world = dist.start("cpu")
    return save_with_manifest(path, {"step": steps[world.rank]}, dist.on_all_ranks)


@pytest.mark.parametrize("steps, error", [((6, -1), "rank 1: "), ((-1, -2), "rank 0: ")])
def test_a_manifest_that_one_rank_rejects_is_not_saved(pool, tmp_path, steps, error):
    """If several ranks reject it, all ranks raise the error of the first one."""
    path = tmp_path / "checkpoint"
    first, second = pool(2, save_with_steps, path, *steps)
    assert first == second == f"{error}the manifest's step is -1, not an integer of at least 0"
    assert not path.exists()


def save_alone(path: Path) -> str:
    """Return the error of a save without on_all_ranks."""
    dist.start("cpu")
    with pytest.raises(ValueError) as error:
        checkpoint.save_state(path, {"a": torch.ones(2)}, {"step": 6})
    dist.on_all_ranks(int)  # no rank exits while another one is still connecting
    return str(error.value)


def test_a_save_without_on_all_ranks_is_refused(pool, tmp_path):
    line = "on several ranks, save_state needs on_all_ranks=dist.on_all_ranks"
    assert pool(2, save_alone, tmp_path / "checkpoint") == [line] * 2
    assert not file_names(tmp_path)


def test_a_copy_of_checkpoint_py_saves_and_loads_alone(tmp_path):
    """Each of three saves replaces the one before, under the same name."""
    file = shutil.copy(checkpoint.__file__, tmp_path / "copied.py")
    specification = importlib.util.spec_from_file_location("copied", file)
    copied = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(copied)
    path = str(tmp_path / "saved/latest")
    for value in (1.0, 2.0, 3.0):
        saved = {"a": {"weight": torch.full((2, 3), value)}, "b": torch.arange(3)}
        loaded = {"a": {"weight": torch.zeros(2, 3)}, "b": torch.zeros(3, dtype=torch.int64)}
        copied.save_state(path, saved, {"step": 5, "mine": {2: (3, 4), 10: 5}})
        assert copied.verify(path) is None
        copied.load_state(path, loaded)
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert copied.read_manifest(Path(path))["mine"] == {"2": [3, 4], "10": 5}
    assert file_names(tmp_path / "saved") == ["latest"]


def test_retention_ignores_newer_checkpoints(tmp_path, one_rank):
    """They did not verify when the run started: a save neither removes nor counts them."""
    for step in range(1, 6):
        path = checkpoint.step_path(tmp_path, step)
        write_two_files(path)
        change_manifest(path, step=step)
    for name in (".step-00000001.tmp", ".step-00000009.damaged.tmp"):  # left by killed saves
        (tmp_path / "checkpoints" / name).mkdir()
    saver = Saver(tmp_path, False, 2, 0, timedelta(seconds=5))
    for step, steps in {3: (2, 3, 4, 5), 4: (3, 4, 5), 7: (5, 7)}.items():
        saver.save({"a": torch.ones(2)}, {"step": step})
        assert saver.failure is None
        left = checkpoint.list_checkpoints(tmp_path)
        assert [checkpoint.step_of(path) for path in left] == list(steps)
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_removing_a_linked_checkpoint_keeps_its_target(tmp_path, one_rank):
    """Retention removes the link of step 1, and a save replaces the link of step 2."""
    archived = tmp_path / "archived"
    write_two_files(archived)
    for step in (1, 2):
        path = checkpoint.step_path(tmp_path, step)
        path.parent.mkdir(exist_ok=True)
        path.symlink_to(archived)
    saver = Saver(tmp_path, False, 1, 0, timedelta(seconds=5))
    saver.save({"a": torch.ones(2)}, {"step": 2})
    assert file_names(tmp_path / "checkpoints") == ["step-00000002"]
    assert not checkpoint.step_path(tmp_path, 2).is_symlink()
    assert checkpoint.verify(archived) is None


# --------------------------------------------------------------------------------------------------
# A sharded checkpoint as one file


def test_consolidate_writes_a_complete_checkpoint(whole, tmp_path):
    """It creates the parent folder, and there is no warning."""
    path = whole["hsdp --dp_shard 2"] / "checkpoints/step-00000005"
    out = tmp_path / "new/one"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        status, said, error = command("consolidate", path, out)
    assert (status, error) == (0, "") and said.startswith(f"{out}: one file, ")
    assert file_names(out.parent) == ["one"]
    assert file_names(out) == ["full.safetensors", "index.json", "manifest.json"]
    torch.testing.assert_close(tensors(out), tensors(path), rtol=0, atol=0, equal_nan=True)
    source = checkpoint.read_manifest(path)
    manifest = checkpoint.read_manifest(out)
    shards = {f"rank-{rank:05d}.safetensors" for rank in range(4)}
    assert source.pop("files").keys() == shards | {"index.json"}
    assert manifest.pop("files").keys() == {"full.safetensors", "index.json"}
    assert manifest.pop("crc32") != source.pop("crc32")
    assert manifest == source
    status, said, _ = command("verify", out)
    assert (status, "complete and unchanged: 2 files" in said) == (0, True)
    assert said.count("\n") == 1


def test_a_run_continues_from_a_consolidated_checkpoint(whole, run, tmp_path):
    consolidate(whole["hsdp --dp_shard 2"] / "checkpoints/step-00000005", tmp_path / "one")
    resumed = rows(run(2, f"{TEN_STEPS} --strategy fsdp --resume {tmp_path}/one"))
    losses = [row["loss"] for row in rows(whole["hsdp --dp_shard 2"])[5:]]
    assert [row["loss"] for row in resumed] == pytest.approx(losses, rel=1e-5)


def test_consolidate_leaves_nothing_on_a_disk_that_fills_up(whole, small_disk):
    path = last_checkpoint(whole["hsdp --dp_shard 2"])
    (small_disk / "other").write_bytes(bytes(900_000))
    status, _, error = command("consolidate", path, small_disk / "new/one")
    assert (status, error.count("\n")) == (1, 1)
    line = f"tools.checkpoint: error: cannot write {small_disk}/new/one: [Errno 28] No space left"
    assert error.startswith(line)
    assert not list(small_disk.glob("new/*"))


def test_loading_and_consolidating_take_little_memory(tmp_path, one_rank):
    """At most the pages of one tensor of a mapped file are resident: 4 MB of 96."""
    state = {str(number): torch.ones(1024, 1024) for number in range(24)}
    saver = Saver(tmp_path, False, 0, 0, timedelta(seconds=20))
    saver.save(state, {"step": 1})
    path = last_checkpoint(tmp_path)
    assert memory_taken(lambda: checkpoint.load_state(path, state)) < 45e6
    assert memory_taken(lambda: consolidate(path, tmp_path / "one")) < 45e6
