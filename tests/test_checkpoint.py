import itertools
import os
import pickle
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import call_train, flags, listen, rows, tensors

import checkpoint

ROOT = Path(__file__).parent.parent
LONG = "--max_steps 20 --dtype float32 --save_interval 10 --keep_last 0"
MESHES = {"single": 1, "ddp": 2, "fsdp": 4, "hsdp --dp_shard 2": 4, "fsdp --tp 2": 4}
FORMS = ["sharded", "sharded --async_save", "full"]


def assert_same(one, other):
    a, b = (tensors(checkpoint.list_checkpoints(run)[-1]) for run in (one, other))
    assert a.keys() == b.keys() and len(a) > 50
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(scope="module")
def whole(pool, tokens, tmp_path_factory) -> dict[str, Path]:
    """A run of 20 steps on every mesh, never stopped, with a checkpoint at step 10."""
    root, runs = tmp_path_factory.mktemp("whole"), {}
    for (mesh, ranks), form in zip(MESHES.items(), itertools.cycle(FORMS), strict=False):
        runs[mesh] = root / mesh.replace(" ", "")
        argv = flags(
            f"--data {tokens} --out {runs[mesh]} {LONG} --strategy {mesh} --checkpoint {form}"
        )
        assert pool(ranks, call_train, argv) == [0] * ranks
    return runs


@pytest.mark.parametrize("mesh", MESHES)
def test_ten_steps_and_ten_more_are_twenty_bit_for_bit(run, whole, tmp_path, mesh):
    half = tmp_path / "half"
    shutil.copytree(whole[mesh], half)  # as after a kill between step 10 and step 20
    shutil.rmtree(half / "checkpoints" / "step-00000020")
    run(MESHES[mesh], f"{LONG} --strategy {mesh}", "half")
    a, b = (rows(out) for out in (whole[mesh], half))
    assert [row["step"] for row in b] == list(range(1, 21))  # nothing logged twice
    assert [(r["loss"], r["lr"], r["grad_norm"]) for r in a] == [
        (r["loss"], r["lr"], r["grad_norm"]) for r in b
    ]
    assert_same(whole[mesh], half)


RING = list(zip(MESHES, [*list(MESHES)[1:], "single"]))  # each mesh to the next, and back


@pytest.mark.parametrize("start, goal", RING + [(goal, start) for start, goal in RING])
def test_a_checkpoint_of_any_mesh_continues_on_any_other(run, whole, start, goal):
    """Sharded, saved in the background, or in one file: those are the forms of `whole`."""
    out = run(
        MESHES[goal], f"{LONG} --strategy {goal} --resume {whole[start]}/checkpoints/step-00000010"
    )
    want = {row["step"]: row["loss"] for row in rows(whole[start])}
    got = {row["step"]: row["loss"] for row in rows(out)}
    assert list(got) == list(range(11, 21))
    assert all(loss == pytest.approx(want[step], rel=1e-5) for step, loss in got.items())


def test_fewer_shards_too(run, whole):
    out = run(2, f"{LONG} --strategy fsdp --resume {whole['fsdp']}/checkpoints/step-00000010")
    assert rows(out)[-1]["loss"] == pytest.approx(rows(whole["fsdp"])[-1]["loss"], rel=1e-5)


def test_each_part_is_written_once_and_names_are_plain(whole):
    for mesh, run in whole.items():
        path = checkpoint.list_checkpoints(run)[-1]
        state = tensors(path)
        values = sum(tensor.nbytes for tensor in state.values())
        on_disk = sum(
            file.stat().st_size for file in path.glob("*") if file.suffix in (".distcp", ".pt")
        )
        assert (
            values < on_disk < values + 2000 * len(state) * MESHES[mesh]
        )  # each piece of a tensor has a header
        names = {name.removeprefix("model.") for name in state if name.startswith("model.")}
        assert "blocks.1.attention.q.weight" in names and len(names) == 20
        assert {
            f"optimizer.{slot}.{name}"
            for slot in ("exp_avg", "exp_avg_sq", "step")
            for name in names
        } < state.keys()
        assert not any("_orig_mod" in name or "module." in name for name in state), mesh


def test_keep_last_and_keep_every(run):
    out = run(1, "--max_steps 12 --save_interval 1 --keep_last 2 --keep_every 5")
    assert [path.name[-2:] for path in checkpoint.list_checkpoints(out)] == ["05", "10", "11", "12"]
    assert [row["step"] for row in rows(out, "event")] == list(range(1, 13))


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_manifest_of_a_checkpoint(run, form):
    out = run(2, f"--max_steps 4 --strategy fsdp --checkpoint {form}")
    (row,) = rows(out, "event")
    path = checkpoint.list_checkpoints(out)[-1]
    assert (row["event"], row["step"], row["path"]) == ("checkpoint", 4, str(path))
    assert row["bytes"] == sum(
        file.stat().st_size for file in path.iterdir() if file.name != "manifest.json"
    )
    assert 0 < row["blocking_seconds"] <= row["seconds"]
    assert ("async" in form) == (row["blocking_seconds"] < row["seconds"])
    assert (
        row["peak_host_memory"] > 0.99 * row["host_memory_before"] > 1e7 < row["host_memory_after"]
    )  # Linux counts roughly
    assert row["available_host_memory"] > 1e6
    manifest = checkpoint.read_manifest(path)
    assert (manifest["step"], manifest["tokens"]) == (4, 4 * 8 * 16)
    assert {"files", "config", "model", "data", "torch"} < manifest.keys() and checkpoint.verify(
        path
    ) is None


# ---- damage


def truncate(path: Path) -> None:
    os.truncate(next(path.glob("__1_*")), 1000)


def flip(path: Path) -> None:
    with open(next(path.glob("__0_*")), "r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 4]))


DAMAGE = {
    "has 1,000 bytes, not": truncate,
    "has changed since it was written": flip,
    "is missing": lambda path: next(path.glob("__1_*")).unlink(),
    ".metadata has 0 bytes": lambda path: (path / ".metadata").write_bytes(b""),
    "its manifest.json is damaged": lambda path: (path / "manifest.json").write_text('{"step": 6'),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_replaced(run, pool, tokens, what):
    out = run(2, "--max_steps 6 --save_interval 3 --strategy fsdp")
    last = checkpoint.list_checkpoints(out)[-1]
    weights = tensors(last)
    DAMAGE[what](last)
    assert what in checkpoint.verify(last)
    ((status, said, _), _) = pool(
        2, listen, flags(f"--data {tokens} --out {out} --max_steps 6 --strategy fsdp")
    )
    assert status == 0 and f"passed over {last}: " in said and what in said
    assert f"continuing from {out}/checkpoints/step-00000003" in said
    assert checkpoint.verify(last) is None
    torch.testing.assert_close(tensors(last), weights, rtol=0, atol=0, equal_nan=True)
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == [
        f".{last.name}.damaged.tmp",
        "step-00000003",
        last.name,
    ]  # the next save removes it


def test_a_half_written_checkpoint_is_none_and_the_next_save_removes_it(run, tokens, pool):
    out = run(1, "--max_steps 4 --save_interval 2 --keep_last 0")
    last = checkpoint.list_checkpoints(out)[-1]
    (last / "manifest.json").unlink()
    os.rename(last, last.with_name(f".{last.name}.tmp"))
    (out / "checkpoints" / "notes").write_text("mine")
    assert [path.name for path in checkpoint.list_checkpoints(out)] == ["step-00000002"]
    assert pool(
        1, call_train, flags(f"--data {tokens} --out {out} --max_steps 4 --keep_last 0")
    ) == [0]
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "notes",
        "step-00000002",
        "step-00000004",
    ]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MB: room for two checkpoints or three, not for eight."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_ends_no_run_and_loses_no_checkpoint(pool, tokens, small_disk, form):
    text = f"--max_steps 8 --save_interval 1 --keep_last 0 --strategy fsdp --checkpoint {form}"
    argv = flags(f"--data {tokens} --out {small_disk}/run {text}")
    answers = pool(2, listen, argv)
    assert [status for status, _, _ in answers] == [
        1,
        1,
    ]  # the last checkpoint is missing: that is an error
    assert "NOT SAVED: cannot write" in answers[0][1] and "step 8/8" in answers[0][1]
    assert answers[0][2].count("\n") == 1 and "MB were free on its disk" in answers[0][2]
    good = checkpoint.list_checkpoints(small_disk / "run")
    assert good and all(checkpoint.verify(path) is None for path in good)
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    ((status, said, _), _) = pool(2, listen, argv)
    assert status == 0 and f"continuing from {good[-1]}" in said
    assert len(checkpoint.list_checkpoints(small_disk / "run")) == 8 and not list(
        (small_disk / "run" / "checkpoints").glob(".*")
    )


# ---- hostile files


class Call:
    def __init__(self, function, *arguments):
        self.pair = function, arguments

    def __reduce__(self):
        return self.pair


def attacks(place: str) -> dict[str, object]:
    return {
        "os.system": Call(os.system, f"touch {place}"),
        "eval": Call(eval, f"open({place!r}, 'w')"),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "in a container": OrderedDict(weights=[Call(exec, f"open({place!r}, 'w')")]),
        "class of torch": Call(torch.hub.load_state_dict_from_url, f"file://{place}"),
        "subprocess": Call(subprocess.Popen, ["touch", place]),
    }


@pytest.mark.parametrize("attack", attacks("x"))
@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_hostile_pickle_runs_nothing(run, tmp_path, attack, form):
    out = run(1, f"--max_steps 1 --checkpoint {form}")
    path, place = checkpoint.list_checkpoints(out)[-1], tmp_path / "executed"
    bomb = attacks(str(place))[attack]
    if form == "sharded":
        (path / ".metadata").write_bytes(pickle.dumps(bomb))
    else:
        torch.save({"optimizer": {"skipped_steps": bomb}}, path / "full.pt")
    with pytest.raises(checkpoint.CheckpointError, match="^cannot read [^\n]*$"):
        checkpoint.load(path, {"optimizer": {"skipped_steps": torch.zeros(())}})
    assert not place.exists()


def metadata_with(path: Path, change) -> None:
    metadata = checkpoint.Reader(path).metadata
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_metadata_that_sends_dcp_to_plain_pickle_or_elsewhere_is_refused(run, tmp_path):
    path = checkpoint.list_checkpoints(run(1, "--max_steps 1"))[-1]
    original = (path / ".metadata").read_bytes()
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    changes = [
        lambda m: m.state_dict_metadata.update({"optimizer.skipped_steps": BytesStorageMetadata()}),
        lambda m: [
            setattr(place, "relative_path", "../../../etc/passwd")
            for place in m.storage_data.values()
        ],
        lambda m: [
            setattr(place, "transform_descriptors", ["zstd"]) for place in m.storage_data.values()
        ],
    ]
    for change in changes:
        metadata_with(path, change)
        with pytest.raises(checkpoint.CheckpointError, match="damaged or hostile"):
            checkpoint.load(path, {"optimizer": {"skipped_steps": torch.zeros(())}})
        (path / ".metadata").write_bytes(original)
    checkpoint.load(path, {"optimizer": {"skipped_steps": torch.zeros(())}})


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"step": "os.system", "files": {}}', '{"step": 1, "files": {"../../x": {}}}'],
)
def test_a_hostile_manifest_is_a_clear_error(run, pool, tokens, text):
    out = run(1, "--max_steps 1")
    path = checkpoint.list_checkpoints(out)[-1]
    (path / "manifest.json").write_text(text)
    assert checkpoint.verify(path)
    ((status, said, err),) = pool(1, listen, flags(f"--data {tokens} --out {out} --max_steps 1"))
    assert status == 0 and f"passed over {path}" in said and not err  # it begins anew


# ---- one file


def test_list_verify_and_consolidate(whole, tmp_path, monkeypatch, capsys):
    def command(*arguments) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["checkpoint.py", *map(str, arguments)])
        return checkpoint.main(), *capsys.readouterr()

    run = whole["hsdp --dp_shard 2"]
    path = checkpoint.list_checkpoints(run)[-1]
    status, listed, _ = command("list", run)
    assert status == 0 and [line.split("  ")[:3] for line in listed.splitlines()][1] == [
        str(path),
        "step 20",
        "2,560 tokens",
    ]
    status, said, _ = command("verify", path)
    assert status == 0 and "complete and unchanged" in said
    made = subprocess.run(
        [sys.executable, ROOT / "checkpoint.py", "consolidate", path, tmp_path / "one.pt"],
        capture_output=True,
    )
    assert made.returncode == 0 and b"tensors" in made.stdout, made.stderr
    one = dict(checkpoint.flatten(torch.load(tmp_path / "one.pt", weights_only=True)))
    torch.testing.assert_close(one, tensors(path), rtol=0, atol=0, equal_nan=True)
    status, _, err = command("consolidate", path, tmp_path / "one.pt")
    assert status == 1 and "exists" in err
    damaged = tmp_path / "damaged"
    shutil.copytree(path, damaged)
    flip(damaged)
    status, _, err = command("verify", damaged)
    assert status == 1 and "its checksum differs" in err and err.count("\n") == 1
    assert command("list", tmp_path)[0] == 1


def test_full_is_refused_where_it_does_not_fit(pool, tokens, tmp_path):
    argv = flags(f"--data {tokens} --out {tmp_path}/run --max_steps 2 --checkpoint full")
    ((status, _, err),) = pool(1, full_on_a_small_host, argv)
    assert (
        status == 1
        and "gathers 12 bytes x" in err
        and "use --checkpoint sharded" in err
        and err.count("\n") == 1
    )
    assert not (tmp_path / "run").exists()


def full_on_a_small_host(argv: list[str]) -> tuple:
    with mock.patch.object(checkpoint, "host_memory", lambda: checkpoint.HostMemory(0, 0, available=1000)):
        return listen(argv)


# ---- compatibility

SAVED = Path(__file__).parent / "saved_run_2026_11_20"


@pytest.mark.parametrize("strategy, ranks", [("fsdp", 2), ("single", 1)])
def test_a_run_saved_on_2026_11_20_continues_with_the_losses_it_had(
    pool, tmp_path, strategy, ranks
):
    """Names inside checkpoints and manifests are a contract. The run was fsdp on two ranks, saved at step 4 of 8."""
    out = tmp_path / "run"
    shutil.copytree(SAVED / "run", out)
    argv = ["--config", str(out / "config.json"), "--data", str(SAVED / "tokens")]
    argv += ["--out", str(out), "--strategy", strategy]
    assert pool(ranks, call_train, argv) == [0] * ranks
    before, after = rows(SAVED / "run"), rows(out)
    assert [row["step"] for row in after] == list(range(1, 9))
    for key in ("loss", "grad_norm", "lr", "skipped_steps"):
        assert [row[key] for row in after] == pytest.approx([row[key] for row in before], rel=1e-5)
