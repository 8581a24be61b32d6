"""Ranks that were started differently are refused, or named."""

import os
import shutil
import signal
import socket
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ROOT, flags, free_port, listen, start_process, variables
from core.conftest import write_tokens

import data
import dist
from errors import UsageError
from start import compare_ranks, refuse_shared_sequences, source_hash


def start_in_own_folder(argv: list[str], folders: list[Path]) -> tuple[int, str, str]:
    """Run train.py in another folder on each rank, as on hosts with disks of their own."""
    before = Path.cwd()
    os.chdir(folders[int(os.environ["RANK"])])
    try:
        return listen(argv)
    finally:
        os.chdir(before)


def write_other(folder: Path) -> None:
    write_tokens(folder, seed=2)


def write_damaged(folder: Path) -> None:
    write_tokens(folder)
    os.truncate(folder / "val.bin", 1001)


FOLDERS = {
    "other data": (write_other, "error: rank 2 has other data than rank 0: the fingerprints are "),
    "a damaged file": (write_damaged, "tokens/val.bin has 1,001 bytes, not "),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_rank_whose_data_differs_ends_the_run(pool, tmp_path, case):
    write, line = FOLDERS[case]
    folders = [tmp_path / "same", tmp_path / "same", tmp_path / "rank 2", tmp_path / "same"]
    write_tokens(tmp_path / "same/tokens")
    write(tmp_path / "rank 2/tokens")
    text = f"--data tokens --out {tmp_path}/run --strategy hsdp --dp_shard 2 --max_steps 2"
    answers = pool(4, start_in_own_folder, flags(text), folders)
    assert [status for status, _, _ in answers] == [2] * 4
    assert line in answers[0][2] and answers[0][2].count("\n") == 1
    assert not (tmp_path / "run").exists()


def start_on_hardware(argv: list[str]) -> tuple[int, str, str]:
    """Run train.py where all CPUs but rank 2's multiply in bfloat16."""
    here = {"avx512_bf16": os.environ["RANK"] != "2"}
    with mock.patch.object(torch.cpu, "get_capabilities", lambda: here):
        return listen(argv)


def test_a_rank_whose_hardware_differs_ends_the_run(on_ranks, tmp_path):
    answers = on_ranks(3, start_on_hardware, "--strategy ddp --global_batch_size 9 --max_steps 2")
    assert [status for status, _, _ in answers] == [2] * 3
    assert "in bfloat16, which the hardware of rank 2 on " in answers[0][2]
    assert socket.gethostname() in answers[0][2]
    assert not (tmp_path / "run").exists()


def test_source_hash_covers_the_modules_in_all_folders(tmp_path):
    files = [tmp_path / name for name in ("train.py", "extras/muon.py", "text/encode.py")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
    # Each file changes, the first one twice. Then two files are exchanged, and one is renamed.
    contents = [("", "", ""), ("a", "", ""), ("a", "a", ""), ("a", "a", "a"), ("b", "a", "a")]
    contents.append(("a", "a", "b"))
    hashes = set()
    for texts in contents:
        for file, text in zip(files, texts):
            file.write_text(text)
        hashes.add(source_hash(tmp_path))
    files[0].rename(tmp_path / "sample.py")
    hashes.add(source_hash(tmp_path))
    assert len(hashes) == 7


def read(shape: tuple[int, int, int], indices_of_ranks: list[list[int]]) -> str | None:
    """Return the error of ranks that read these sequences."""
    world = dist.start("cpu")
    mesh = dist.make_mesh(world, shape)
    try:
        refuse_shared_sequences(mesh, indices_of_ranks[world.rank])
    except UsageError as error:
        return str(error)


SEQUENCES = {  # shape of the mesh, sequences of each rank, error
    "own": ((1, 2, 1), [[0, 4, 1], [2, 3, 5]], None),
    "one twice": (
        (1, 2, 1),
        [[0, 4, 1], [2, 3, 4]],
        "sequence 4 is read twice: by dp_replicate 0, dp_shard 0 and, on rank 1, by "
        "dp_replicate 0, dp_shard 1",
    ),
    "a tp group's": ((1, 1, 2), [[0, 1], [0, 1]], None),
    "another one in a tp group": (
        (1, 1, 2),
        [[0, 1], [0, 2]],
        "rank 1 reads the sequences [0, 2] first, but another rank of its tp group, "
        "dp_replicate 0, dp_shard 0, reads [0, 1]",
    ),
}


@pytest.mark.parametrize("case", SEQUENCES)
def test_each_sequence_belongs_to_one_place_of_the_mesh(pool, case):
    shape, indices_of_ranks, error = SEQUENCES[case]
    assert pool(2, read, shape, indices_of_ranks) == [error] * 2


def compare_flags(argv_of_ranks: list[list[str]]) -> list[str]:
    rank = dist.start("cpu").rank
    folder = data.TokenFolder(Path(), np.dtype("<u2"), 257, "bytes", fingerprint="abc")
    return compare_ranks(argv_of_ranks[rank], folder)


def test_a_rank_with_other_flags_is_named(pool):
    same, other = ["--lr", "1"], ["--lr", "2"]
    line = "rank 1 was started with other flags; those of rank 0 are used"
    assert pool(3, compare_flags, [same, other, same]) == [[line]] * 3
    assert pool(2, compare_flags, [same, same]) == [[], []]


@pytest.mark.slow(proves="two checkouts in one job")
def test_a_rank_with_other_code_is_named(tokens, tmp_path):
    """As if a host had an older checkout."""
    older = tmp_path / "older"
    older.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "extras", ROOT / "text"]:
        copy = shutil.copytree if path.is_dir() else shutil.copy
        copy(path, older / path.name)
    with open(older / "text/encode.py", "a") as file:
        file.write("# older\n")
    argv = flags(f"--data {tokens} --out {tmp_path}/run --strategy ddp --max_steps 1")
    port, printed = free_port(), tmp_path / "printed"
    ranks = []
    for rank, folder in enumerate((ROOT, older)):
        environment = os.environ | variables(rank, 2, port)
        with open(printed if rank == 0 else os.devnull, "w") as file:
            command = [sys.executable, folder / "train.py", *argv]
            ranks.append(start_process(command, env=environment, stdout=file))
    assert [process.wait(60) for process in ranks] == [0, 0]
    assert "rank 1 runs other code than rank 0" in printed.read_text()


def test_a_run_under_nohup_outlives_its_terminal(pool):
    assert pool(1, start_under_nohup) == [True]


def start_under_nohup() -> bool:
    """Return whether SIGHUP stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with dist.StopRequest(dist.start("cpu")):
        return signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
