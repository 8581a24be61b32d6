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
def test_the_lists_of_slurm(hosts, tasks, node, address, local_size):
    more = {"SLURM_STEP_NODELIST": hosts, "SLURM_STEP_TASKS_PER_NODE": tasks}
    variables = slurm_task(3, **more, SLURM_NODEID=str(node))
    expected = rank_variables(3, 4, port=23456) | {"MASTER_ADDR": address}
    expected |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": local_size}
    with mock.patch.dict(os.environ, variables):
        for name in expected:
            os.environ.pop(name, None)
        launch.read_slurm()
        assert {name: os.environ[name] for name in expected} == expected
        os.environ |= {"RANK": "7", "MASTER_ADDR": "a"}  # torchrun's own numbers
        launch.read_slurm()
        assert os.environ["RANK"] == "7" and os.environ["MASTER_ADDR"] == "a"


@pytest.mark.parametrize(
    "variables",
    [
        "WORLD_SIZE=2",
        "RANK=0, WORLD_SIZE=1, MASTER_PORT=b, MASTER_ADDR=a",
        "RANK=1, WORLD_SIZE=2, MASTER_PORT=65536, MASTER_ADDR=a",
        "RANK=2, WORLD_SIZE=2, MASTER_PORT=1, MASTER_ADDR=a",
    ],
)
def test_variables_that_are_incomplete_are_refused_at_once(monkeypatch, tokens, variables):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of a rank other than 0
    for variable in variables.split(", "):
        monkeypatch.setenv(*variable.split("="))
    status, out, err = listen(flags(f"--data {tokens} --max_steps 1"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f": {variables} in the environment does not describe a rank: unset these" in err


# --------------------------------------------------------------------------------------------------
# This process


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one(monkeypatch):
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
    """The soft limit before and after a start, and the hard one, where it begins low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    launch.start("cpu")
    return [*resource.getrlimit(resource.RLIMIT_NOFILE), hard]


def test_a_rank_may_open_as_many_files_as_the_system_grants(pool):
    ((soft, hard, hard_before),) = pool(1, open_file_limits)
    assert soft == hard == hard_before


def count_sockets() -> int:
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # what lists this folder
            count += "socket" in os.readlink(path)
    return count


def sockets_of_groups(start: Callable) -> int:
    """How many sockets a rank gets when three groups of four ranks are formed, and not used yet."""
    before = count_sockets()
    start("cpu")
    for _ in range(2):
        torch.distributed.new_group(backend="gloo")
    return count_sockets() - before


def test_ranks_connect_when_they_first_send_where_a_watchdog_runs(pool):
    """Not in a notebook: there a rank would wait forever for one that died before."""
    of_launch, of_notebook = [pool(4, sockets_of_groups, one.start) for one in (launch, dist)]
    for lazy, eager in zip(of_launch, of_notebook):
        assert lazy + 4 < eager  # 9 connections, beside sockets that torch opens and closes


def wait_for_the_end(folder: Path) -> None:
    launch.prepare_process(torch.device("cpu"), timedelta(seconds=9))
    (folder / str(os.getpid())).touch()
    time.sleep(1000)


def launch_two(folder: Path) -> None:
    """Start a rank as torchrun does, and another process as a shell does; then die."""
    for environment in ({"TORCHELASTIC_RUN_ID": "1"}, {}):
        with mock.patch.dict(os.environ, environment):
            FORK.Process(target=wait_for_the_end, args=[folder]).start()
    wait_until(lambda: len(list(folder.iterdir())) == 2, 20)
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_end_when_their_launcher_has_gone_but_may_outlive_a_shell(tmp_path):
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
# The meeting of the ranks


def test_ranks_that_do_not_join_are_named(monkeypatch):
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


def test_a_missing_rank_is_named_in_each_attempt(monkeypatch):
    """In torchrun's store, which also has what the attempt before has left."""
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
    assert store.port == port  # it was there until here


def test_ranks_that_do_not_reach_each_other_name_the_interface():
    reason = "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:42420$1"
    line = cli.explain(RuntimeError(f"[/gloo/transport/tcp/pair.cc:152] {reason}"))
    assert f"cannot connect to another rank: {reason}; set GLOO_SOCKET_IFNAME (NCCL_SOCK" in line
