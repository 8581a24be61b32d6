"""More than one host: torchrun's agents, and Slurm's tasks without torchrun."""

import os
from unittest import mock

import pytest
from conftest import TRAIN, Job, call_train, flags, free_port, listen, rows
from test_dist import slurm_task

RUN = "--strategy hsdp --max_steps 3 --dtype float32"
MESH = "hsdp: dp_replicate 2 x dp_shard 2 x tp 1 = 4 x cpu"


@pytest.fixture(scope="module")
def single(pool, tokens, tmp_path_factory) -> list[float]:
    """The losses of a single process."""
    out = tmp_path_factory.mktemp("hosts") / "single"
    argv = flags(f"--data {tokens} --out {out} {RUN.replace('hsdp', 'single')}")
    assert pool(1, call_train, argv) == [0]
    return [row["loss"] for row in rows(out)]


@pytest.mark.slow
def test_two_agents_meet_and_hsdp_shards_within_each_and_replicates_across(
    tokens, tmp_path, single
):
    """Two hosts of two ranks, as torchrun --nnodes 2 starts them on each."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc_per_node", 2]
    launcher += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    launcher += ["--rdzv_id", "hosts"]
    argv = flags(f"--data {tokens} --out {tmp_path}/run {RUN}")
    agents = [Job([*launcher, TRAIN, *argv], tmp_path / f"host {host}") for host in range(2)]
    assert [agent.wait(90) for agent in agents] == [0, 0], [agent.err for agent in agents]
    assert MESH in "".join(agent.out for agent in agents)
    assert [row["loss"] for row in rows(tmp_path / "run")] == pytest.approx(single, rel=1e-5)


def train_under_slurm(argv: list[str]) -> tuple[int, str, str]:
    port, rank = os.environ["MASTER_PORT"], int(os.environ["RANK"])
    variables = slurm_task(rank, SLURM_STEP_NODELIST="localhost", MASTER_PORT=port)
    with mock.patch.dict(os.environ, variables):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[name]
        return listen(argv)


def test_the_tasks_of_slurm_need_no_torchrun(pool, tokens, tmp_path, single):
    argv = flags(f"--data {tokens} --out {tmp_path}/run {RUN}")
    answers = pool(4, train_under_slurm, argv)
    assert [status for status, _, _ in answers] == [0] * 4
    assert MESH in answers[0][1]
    assert [row["loss"] for row in rows(tmp_path / "run")] == pytest.approx(single, rel=1e-5)
