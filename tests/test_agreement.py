"""Ranks that were started differently are refused, or named."""

import os
import signal
import socket
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import flags, listen
from core.conftest import write_tokens

import dist


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


def test_a_run_under_nohup_outlives_its_terminal(pool):
    assert pool(1, start_under_nohup) == [True]


def start_under_nohup() -> bool:
    """Return whether SIGHUP stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with dist.StopRequest(dist.start("cpu")):
        return signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
