"""How every command ends."""

import os
import time
from unittest import mock

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import errors

LARGE = "can't allocate memory"
NO_MEMORY = "lower --micro_batch_size, or shard with --strategy fsdp: see tools.plan\n"


@pytest.mark.parametrize(
    "error, status, said",
    [
        (errors.UsageError("--lr is too high"), 2, "--lr is too high\n"),
        (errors.RunError("no memory is left"), 1, "no memory is left\n"),
        (OSError(28, "No space left"), 1, "[Errno 28] No space left\n"),
        (RuntimeError(f"DefaultCPUAllocator: {LARGE}."), 1, f"{LARGE}; {NO_MEMORY}"),
        (RuntimeError("calculation overflowed"), 1, f"calculation overflowed; {NO_MEMORY}"),
        (MemoryError(), 1, f"out of memory; {NO_MEMORY}"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 130, ""),  # the reader of a pipe has closed it
    ],
)
def test_an_expected_error_gives_one_line_and_a_status(capsys, error, status, said):
    assert errors.execute("prog", mock.Mock(side_effect=error)) == status
    assert capsys.readouterr() == ("", said and f"prog: error: {said}")


@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_names_the_error_as_the_root_cause(monkeypatch, tmp_path, rank):
    """Even if torchrun ends the other rank while this one waits to print."""
    file = tmp_path / "error.json"
    clock = [1000.0]
    monkeypatch.setattr(time, "time", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("RANK", str(rank))
    assert errors.execute("train.py", mock.Mock(side_effect=errors.UsageError("--lr is high"))) == 2
    ended = ProcessFailure(1 - rank, pid=8, exitcode=-15, error_file="missing")
    failed = ProcessFailure(rank, pid=7, exitcode=2, error_file=str(file))
    by_rank = {0: failed, 1: ended} if rank == 0 else {0: ended, 1: failed}
    others, root_cause = str(ChildFailedError("train.py", by_rank)).split("Root Cause")
    assert f"rank      : {rank} (local_rank: {rank})" in root_cause
    assert "exitcode  : 2 " in root_cause
    where = " on rank 1" if rank else ""
    assert root_cause.strip("=\n").endswith(f"traceback : train.py: error{where}: --lr is high")
    assert "--lr is high" not in others


@pytest.mark.parametrize(
    "rank, local_rank, restarts, is_printed, is_reported, status",
    [
        (0, 0, 0, True, True, os.EX_TEMPFAIL),
        (1, 1, 0, False, False, os.EX_TEMPFAIL),
        (8, 0, 0, False, True, os.EX_TEMPFAIL),  # the first rank of the second host
        (0, 0, 3, True, True, 0),  # torchrun would restart a run that fails
    ],
)
def test_a_stop_is_printed_once_and_is_in_the_report_of_each_host(
    monkeypatch, capsys, tmp_path, rank, local_rank, restarts, is_printed, is_reported, status
):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert errors.report_stop("stopped after step 3") == status
    assert capsys.readouterr().out == "stopped after step 3\n" * is_printed
    assert (tmp_path / "error.json").exists() == is_reported


def test_execute_returns_the_status_of_the_command():
    assert [errors.execute("prog", mock.Mock(return_value=result)) for result in (None, 75)] == [
        0,
        75,
    ]


def test_an_unexpected_error_is_raised():
    with pytest.raises(ZeroDivisionError):
        errors.execute("prog", lambda: 1 // 0)
