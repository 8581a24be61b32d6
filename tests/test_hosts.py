"""More than one host: torchrun's agents, and Slurm's tasks without torchrun."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from conftest import call_train, flags, listen, rows

import dist

ROOT = Path(__file__).parent.parent
RUN = "--strategy hsdp --max_steps 3 --dtype float32"


@pytest.fixture(scope="module")
def single(pool, tokens, tmp_path_factory) -> list[float]:
    """The losses of a single process."""
    out = tmp_path_factory.mktemp("hosts") / "single"
    assert pool(
        1, call_train, flags(f"--data {tokens} --out {out} {RUN.replace('hsdp', 'single')}")
    ) == [0]
    return [row["loss"] for row in rows(out)]


@pytest.mark.slow
def test_two_agents_meet_and_hsdp_shards_within_each_and_replicates_across(
    tokens, tmp_path, single
):
    """Two hosts of two ranks, as torchrun --nnodes 2 starts them on each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc_per_node",
        "2",
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        f"127.0.0.1:{port}",
        "--rdzv_id",
        "hosts",
        ROOT / "train.py",
    ]
    argv = flags(f"--data {tokens} --out {tmp_path}/run {RUN}")
    agents = [
        subprocess.Popen(
            [*agent, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=90) for process in agents]
    assert [process.returncode for process in agents] == [0, 0], answers
    assert "hsdp: dp_replicate 2 x dp_shard 2 x tp 1 = 4 x cpu" in "".join(
        out for out, _ in answers
    )
    assert [row["loss"] for row in rows(tmp_path / "run")] == pytest.approx(single, rel=1e-5)


def as_slurm(rank: int, jobs: dict[str, str]) -> dict[str, str]:
    """The variables of srun's task `rank` of 4 on two hosts."""
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_NODEID": str(rank // 2),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_JOB_ID": "123456",
        **jobs,
    }


def train_under_slurm(argv: list[str]) -> tuple[int, str, str]:
    port, rank = os.environ["MASTER_PORT"], int(os.environ["RANK"])
    with mock.patch.dict(
        os.environ, as_slurm(rank, {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": port})
    ):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[name]
        return listen(argv)


def test_slurms_tasks_need_no_torchrun(pool, tokens, tmp_path, single):
    answers = pool(4, train_under_slurm, flags(f"--data {tokens} --out {tmp_path}/run {RUN}"))
    assert [status for status, _, _ in answers] == [0] * 4
    assert "hsdp: dp_replicate 2 x dp_shard 2 x tp 1 = 4 x cpu" in answers[0][1]
    assert [row["loss"] for row in rows(tmp_path / "run")] == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize(
    "hosts, tasks, node, address, local",
    [
        ("gpu07", "8", 0, "gpu07", "8"),
        ("gpu[07-09,12]", "8(x3),4", 3, "gpu07", "4"),
        ("rack2-gpu[3,5]", "8(x2)", 1, "rack2-gpu3", "8"),
        ("alpha,beta[1-2]", "2,4(x2)", 2, "alpha", "4"),
    ],
)
def test_slurms_lists(monkeypatch, hosts, tasks, node, address, local):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    variables = as_slurm(
        3,
        {
            "SLURM_STEP_NODELIST": hosts,
            "SLURM_STEP_TASKS_PER_NODE": tasks,
            "SLURM_NODEID": str(node),
        },
    )
    with mock.patch.dict(os.environ, variables):
        dist.read_slurm()
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
        )
        assert [os.environ[name] for name in names] == ["3", "4", "1", local, address, "23456"]


def test_torchrun_within_slurm_keeps_its_own_numbers(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    with mock.patch.dict(os.environ, as_slurm(0, {"SLURM_STEP_NODELIST": "a"})):
        dist.read_slurm()
        assert os.environ["RANK"] == "7" and os.environ.get("MASTER_ADDR") != "a"
