"""From torchrun's variables to a process group; starts by other launchers are refused."""

import multiprocessing
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import flags, free_port, is_running, listen, wait_until
from conftest import variables as variables_of_a_rank

import dist
import train
from tools import check

FORK = multiprocessing.get_context("fork")

# --------------------------------------------------------------------------------------------------
# Launchers


def listen_with(variables: dict[str, str], argv: list[str], main=train.main) -> tuple:
    """Run a command without torchrun, in an environment with these variables."""
    ours = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    with mock.patch.dict(os.environ, {**ours, "WORLD_SIZE": "1", **variables}, clear=True):
        return listen(argv, main)


@pytest.mark.parametrize("main", [train.main, check.main])
def test_one_of_several_processes_without_torchrun_is_refused(pool, tmp_path, main):
    """Otherwise `srun -n 8 python train.py` would become eight runs of one process."""
    argv = [f"--out={tmp_path}/run"]
    for name in dist.NUMBERS_OF_PROCESSES:
        ((status, out, err),) = pool(1, listen_with, {name: "8"}, argv, main)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"error: {name} is 8, but torchrun did not start this process: " in err
        assert "torchrun --nnodes $SLURM_NNODES" in err and "--rdzv-id $SLURM_JOB_ID" in err
    assert not (tmp_path / "run").exists()


def test_one_process_of_any_launcher_trains(pool, tokens, tmp_path):
    argv = flags(f"--data {tokens} --out {tmp_path}/run --max_steps 1")
    variables = dict.fromkeys(dist.NUMBERS_OF_PROCESSES, "1") | {"RANK": "0"}
    ((status, _, err),) = pool(1, listen_with, variables, argv)
    assert (status, err) == (0, "")


# --------------------------------------------------------------------------------------------------
# This process


def test_each_rank_gets_its_own_gpu(monkeypatch):
    def see_gpus(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    see_gpus(8)
    for name in ("auto", "cuda"):
        assert dist.find_device(name, local_rank=3, local_size=8) == torch.device("cuda", 3)
    assert dist.find_device("cpu", local_rank=3, local_size=8) == torch.device("cpu")
    assert dist.find_device("cuda:0", local_rank=3, local_size=8) == torch.device("cuda", 0)
    see_gpus(4)
    with pytest.raises(dist.MeshError, match="8 processes .* 4 GPUs: use --nproc_per_node 4"):
        dist.find_device("auto", local_rank=0, local_size=8)
    see_gpus(0)
    assert dist.find_device("auto", local_rank=3, local_size=8) == torch.device("cpu")
    with pytest.raises(dist.MeshError, match="finds no CUDA device here; use --device cpu"):
        dist.find_device("cuda", local_rank=0, local_size=1)


def wait_for_the_end(folder: Path) -> None:
    dist.prepare_process(torch.device("cpu"))
    (folder / str(os.getpid())).touch()
    time.sleep(1000)


def launch_two(folder: Path) -> None:
    """Start a rank as torchrun does, and another process as a shell does; then die."""
    for environment in ({"TORCHELASTIC_RUN_ID": "1"}, {}):
        with mock.patch.dict(os.environ, environment):
            FORK.Process(target=wait_for_the_end, args=[folder]).start()
    wait_until(lambda: len(list(folder.iterdir())) == 2, 20)
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_end_with_torchrun_but_outlive_a_shell(tmp_path):
    launcher = FORK.Process(target=launch_two, args=[tmp_path])
    launcher.start()
    launcher.join()
    rank, other = sorted(int(path.name) for path in tmp_path.iterdir())
    try:
        wait_until(lambda: not is_running(rank), 10)
        assert is_running(other)
    finally:
        for pid in filter(is_running, (rank, other)):
            os.kill(pid, signal.SIGKILL)


# --------------------------------------------------------------------------------------------------
# The rendezvous of the ranks


def join_twice(variables: dict[str, str]) -> None:
    """Look for the store of torchrun, and again after a restart."""
    os.environ |= variables | {"TORCHELASTIC_RESTART_COUNT": "0"}
    port = int(variables["MASTER_PORT"])
    server = torch.distributed.TCPStore("127.0.0.1", port, is_master=True)  # noqa: F841
    dist.find_store(timedelta(seconds=5)).set("address", "of the first")
    assert dist.find_store(timedelta(seconds=5)).check(["address"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert not dist.find_store(timedelta(seconds=5)).check(["address"])


def test_ranks_that_torchrun_restarts_do_not_read_the_addresses_of_dead_ones(pool):
    variables = variables_of_a_rank(0, 2, free_port()) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    pool(1, join_twice, variables)
