"""How a process becomes a rank, how a command ends, and what torchrun reports of it."""

import os
from datetime import timedelta
from unittest import mock

import pytest
import torch
from conftest import flags, free_port, listen, variables

import dist
import errors

# --------------------------------------------------------------------------------------------------
# Ranks


def listen_with(variables: dict[str, str], argv: list[str]) -> tuple:
    """Run a command without torchrun, in an environment with these variables."""
    with mock.patch.dict(os.environ, variables):
        return listen(argv)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_NTASKS"])
@pytest.mark.parametrize("number, status", [("8", 2), ("1", 0)])
def test_one_of_several_processes_without_torchrun_is_refused(
    pool, tokens, tmp_path, name, number, status
):
    """Otherwise `srun -n 8 python train.py` would become eight runs of one process."""
    argv = flags(f"--data {tokens} --out {tmp_path}/run --max_steps 1")
    ((found, _, err),) = pool(1, listen_with, {name: number}, argv)
    assert (found, err.count("\n")) == (status, 1 if status else 0)
    assert (tmp_path / "run").exists() == (status == 0)


@pytest.mark.parametrize(
    "name, gpus, local_rank, device",
    [
        ("auto", 8, 3, "cuda:3"),
        ("cuda", 8, 3, "cuda:3"),
        ("cpu", 8, 3, "cpu"),
        ("auto", 0, 3, "cpu"),
        ("auto", 4, 4, None),
        ("cuda", 0, 0, None),
    ],
)
def test_each_rank_gets_its_own_gpu(monkeypatch, name, gpus, local_rank, device):
    """A rank without one is refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    if device:
        assert dist.find_device(name) == torch.device(device)
    else:
        with pytest.raises(dist.MeshError):
            dist.find_device(name)


def join_twice(variables: dict[str, str]) -> None:
    """Look for the store of torchrun, and again after a restart."""
    os.environ |= variables | {"TORCHELASTIC_RESTART_COUNT": "0"}
    port = int(variables["MASTER_PORT"])
    server = torch.distributed.TCPStore("127.0.0.1", port, is_master=True)  # noqa: F841

    def find_store() -> torch.distributed.Store:
        store, rank, size = dist.find_ranks(timedelta(seconds=5))
        assert (rank, size) == (0, 2)
        return store

    find_store().set("address", "of the first")
    assert find_store().check(["address"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert not find_store().check(["address"])


def test_ranks_that_torchrun_restarts_do_not_read_the_addresses_of_dead_ones(pool):
    pool(1, join_twice, variables(0, 2, free_port()) | {"TORCHELASTIC_USE_AGENT_STORE": "True"})


# --------------------------------------------------------------------------------------------------
# Ends


@pytest.mark.parametrize(
    "error, status",
    [
        (errors.UsageError("--lr is too high"), 2),
        (dist.RankError("rank 1: no memory is left", 1), 1),
        (OSError(28, "No space left"), 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1),
        (ModuleNotFoundError("No module named 'wandb'", name="wandb"), 1),
        (KeyboardInterrupt(), 130),
        (ZeroDivisionError("a bug"), None),
    ],
)
def test_an_expected_error_gives_one_line_and_a_status(capsys, error, status):
    """An unexpected one is raised. Ctrl-C prints nothing."""

    def fail() -> None:
        raise error

    if status is None:
        with pytest.raises(type(error)):
            errors.execute("prog", fail)
        return
    assert errors.execute("prog", fail) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 0 if status == 130 else 1)
    assert err == "" or (err.startswith("prog: error: ") and str(error) in err)


@pytest.mark.parametrize("result, status", [(None, 0), (75, 75)])
def test_execute_returns_the_status_of_the_command(result, status):
    assert errors.execute("prog", lambda: result) == status
