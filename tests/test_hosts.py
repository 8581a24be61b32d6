"""More than one host: torchrun's agents, and Slurm's tasks without torchrun."""

import os
import re
import signal
from unittest import mock

import pytest
from conftest import TRAIN, Job, assert_close, flags, free_port, listen, rows
from test_launch import slurm_task

from runtime import run_folder


@pytest.mark.slow
def test_a_run_continues_without_a_lost_host(tokens, tmp_path):
    """One of two hosts with two ranks each is killed. Then a third host joins."""
    out = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", 2]
    launcher += ["--max-restarts", 9, "--rdzv_backend", "c10d", "--rdzv_id", "elastic"]
    launcher += ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    quick = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    text = "--strategy fsdp --dtype float32 --max_steps 1000000 --save_interval 20 --keep_last 0"
    argv = flags(f"--data {tokens} --out {out} --timeout 10 {text}")

    def host(number: int) -> Job:
        rdzv_conf = f"{quick},is_host={int(number == 0)}"
        command = [*launcher, "--rdzv_conf", rdzv_conf, TRAIN, *argv]
        with mock.patch.dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
            return Job(command, tmp_path / f"host {number}")

    def has_trained(ranks: int, steps: int) -> bool:
        """Whether the last start is on `ranks` ranks and has trained for `steps` steps."""
        starts = run_folder.read_starts(out)
        if not starts or starts[-1]["ranks"] != ranks or not (out / "metrics.jsonl").exists():
            return False
        return rows(out)[-1]["step"] >= starts[-1]["step"] + steps

    meeting_place = host(0)
    lost = host(1)
    meeting_place.wait_until(lambda: has_trained(4, steps=30), 90)
    for pid in (lost.pid, *lost.ranks()):
        os.kill(pid, signal.SIGKILL)
    meeting_place.wait_until(lambda: has_trained(2, steps=25), 90)
    new = host(2)
    meeting_place.wait_until(lambda: has_trained(4, steps=5), 90)
    os.kill(meeting_place.pid, signal.SIGTERM)
    meeting_place.wait(60)
    new.wait(60)

    first, second, third = run_folder.read_starts(out)[-3:]
    assert [start["ranks"] for start in (first, second, third)] == [4, 2, 4]
    # A lost host costs the steps since the latest checkpoint; a host that joins costs none.
    assert second["step"] % 20 == 0
    assert third["step"] >= second["step"] + 25
    assert [row["step"] for row in rows(out)] == list(range(1, rows(out)[-1]["step"] + 1))
    assert re.search("ranks (2 and 3|0 and 1) stopped or died", meeting_place.err)


def train_under_slurm(argv: list[str]) -> tuple[int, str, str]:
    port, rank = os.environ["MASTER_PORT"], int(os.environ["RANK"])
    variables = slurm_task(rank, SLURM_STEP_NODELIST="localhost", MASTER_PORT=port)
    with mock.patch.dict(os.environ, variables):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[name]
        return listen(argv)


def test_slurm_tasks_run_without_torchrun(run, on_ranks, tmp_path):
    """hsdp shards within each host and replicates across them, with the losses of one process."""
    text = "--max_steps 3 --dtype float32 --strategy"
    single = run(1, f"{text} single", "single")
    answers = on_ranks(4, train_under_slurm, f"{text} hsdp")
    assert [status for status, _, _ in answers] == [0] * 4
    assert "hsdp: dp_replicate 2 x dp_shard 2 x tp 1 = 4 x cpu" in answers[0][1]
    assert_close(single, tmp_path / "run")
