"""From a launcher's variables to a process group."""

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import flags, free_port, is_running, listen, rank_variables, wait_until

import dist
from runtime import cli, launch

FORK = multiprocessing.get_context("fork")

# --------------------------------------------------------------------------------------------------
# The variables


def slurm_task(rank: int, **more: str) -> dict[str, str]:
    """The variables of srun's task `rank` of 4 on two hosts."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_ID": "123456",
        **more,
    }


@pytest.mark.parametrize(
    "hosts, tasks, node, address, local_size",
    [
        ("gpu[07-09,12]", "8(x3),4", 3, "gpu07", "4"),
        ("rack[1-2]node[3-4],login", "8(x4)", 3, "rack1node3", "8"),
    ],
)
def test_slurm_variables_become_those_of_torchrun(hosts, tasks, node, address, local_size):
    more = {"SLURM_STEP_NODELIST": hosts, "SLURM_STEP_TASKS_PER_NODE": tasks}
    variables = slurm_task(3, **more, SLURM_NODEID=str(node))
    expected = rank_variables(3, 4, port=23456) | {"MASTER_ADDR": address}
    expected |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": local_size}
    with mock.patch.dict(os.environ, variables):
        for name in expected:
            os.environ.pop(name, None)
        launch.read_slurm()
        assert {name: os.environ[name] for name in expected} == expected


def test_variables_of_torchrun_override_those_of_slurm():
    variables = slurm_task(3, SLURM_STEP_NODELIST="gpu07") | {"RANK": "7", "MASTER_ADDR": "a"}
    with mock.patch.dict(os.environ, variables):
        launch.read_slurm()
        assert os.environ["RANK"] == "7"
        assert os.environ["MASTER_ADDR"] == "a"


@pytest.mark.parametrize(
    "variables",
    [
        "WORLD_SIZE=2",
        "RANK=0, WORLD_SIZE=1, MASTER_PORT=b, MASTER_ADDR=a",
        "RANK=1, WORLD_SIZE=2, MASTER_PORT=65536, MASTER_ADDR=a",
        "RANK=2, WORLD_SIZE=2, MASTER_PORT=1, MASTER_ADDR=a",
    ],
)
def test_incomplete_variables_are_refused_at_once(monkeypatch, tokens, variables):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the pause of a rank other than 0
    for variable in variables.split(", "):
        monkeypatch.setenv(*variable.split("="))
    status, out, err = listen(flags(f"--data {tokens} --max_steps 1"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f": {variables} in the environment does not describe a rank: unset these" in err


# --------------------------------------------------------------------------------------------------
# This process


def test_each_rank_gets_its_own_gpu(monkeypatch):
    def see_gpus(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    see_gpus(8)
    assert launch.find_device("auto", local_rank=3, local_size=8) == torch.device("cuda", 3)
    see_gpus(4)
    with pytest.raises(dist.MeshError, match="8 processes .* 4 GPUs: use --nproc_per_node 4"):
        launch.find_device("auto", local_rank=0, local_size=8)
    see_gpus(1)  # srun --gpus-per-task=1
    assert launch.find_device("auto", local_rank=3, local_size=8) == torch.device("cuda", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")  # torchrun shows the same GPUs to all ranks
    with pytest.raises(dist.MeshError, match="8 processes .* 1 GPUs: use --nproc_per_node 1"):
        launch.find_device("auto", local_rank=0, local_size=8)


def open_file_limits() -> list[int]:
    """Start with a low soft limit; return both limits afterwards, and the hard limit before."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    launch.start("cpu")
    return [*resource.getrlimit(resource.RLIMIT_NOFILE), hard]


def test_a_start_raises_the_limit_of_open_files(pool):
    ((soft, hard, hard_before),) = pool(1, open_file_limits)
    assert soft == hard == hard_before


def count_sockets() -> int:
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists this folder
            count += "socket" in os.readlink(path)
    return count


def sockets_of_groups(start: Callable) -> int:
    """Return the number of sockets that a rank opens to form three groups of four ranks."""
    before = count_sockets()
    start("cpu")
    for _ in range(2):
        torch.distributed.new_group(backend="gloo")
    return count_sockets() - before


def test_ranks_of_a_run_connect_when_they_first_send(pool):
    """In a notebook they connect at once: no watchdog ends a rank that waits for one that died."""
    of_launch, of_notebook = [pool(4, sockets_of_groups, one.start) for one in (launch, dist)]
    for lazy, eager in zip(of_launch, of_notebook):
        assert lazy + 4 < eager  # 9 connections; torch also opens and closes other sockets


def wait_for_the_end(folder: Path) -> None:
    launch.prepare_process(torch.device("cpu"))
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


def test_the_error_names_ranks_that_do_not_join(monkeypatch):
    store, timeout = torch.distributed.HashStore(), timedelta(minutes=20)
    world = dist.World(1, 4, 1, 4, torch.device("cpu"), timeout, store)
    store.set("joined 0", "")
    store.add("joined", 1)
    line = "^2 of 4 ranks did not join within 0.5 s, first rank 2$"
    with pytest.raises(ConnectionError, match=line):
        launch.await_ranks(world, store, timedelta(seconds=0.5))
    port = free_port()
    for name, value in rank_variables(1, 2, port).items():
        monkeypatch.setenv(name, value)
    line = f"nobody listens at MASTER_ADDR:MASTER_PORT, 127.0.0.1:{port}, after 0.5 s: rank 0"
    with pytest.raises(ConnectionError, match=line):
        launch.start("cpu", timeout, join_timeout=timedelta(seconds=0.5))
    monkeypatch.setenv("RANK", "0")
    line = "^1 of 2 ranks did not join within 1 s, first rank 1$"
    with pytest.raises(ConnectionError, match=line):
        launch.start("cpu", timeout, join_timeout=timedelta(seconds=1))


def test_the_error_names_a_missing_rank_in_each_attempt(monkeypatch):
    """The store of torchrun still contains the keys of the previous attempt."""
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    variables = rank_variables(0, 2, port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    for attempt in range(2):
        variables |= {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        line = "^1 of 2 ranks did not join within 0.5 s, first rank 1$"
        with pytest.raises(ConnectionError, match=line):
            launch.start("cpu", timedelta(seconds=5), join_timeout=timedelta(seconds=0.5))
    assert store.port == port  # keeps the store alive until here


def test_the_error_of_a_failed_connection_suggests_a_remedy():
    reason = "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:42420$1"
    line = cli.explain(RuntimeError(f"[/gloo/transport/tcp/pair.cc:152] {reason}"))
    assert f"cannot connect to another rank: {reason}; set GLOO_SOCKET_IFNAME (NCCL_SOCK" in line
