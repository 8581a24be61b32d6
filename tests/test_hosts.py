"""More than one host: torchrun's agents come and go."""

import os
import signal
from unittest import mock

import pytest
from old import TRAIN, Job, flags, rows
from rig import free_port

from log import read_rows


@pytest.mark.slow(proves="torchrun's agents, one of which is killed")
def test_a_run_continues_without_a_lost_host(tokens, tmp_path):
    """One of two hosts with two ranks each is killed. Then a third host joins."""
    out = tmp_path / "run"
    launcher = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", 2]
    launcher += ["--max-restarts", 9, "--rdzv_backend", "c10d", "--rdzv_id", "elastic"]
    launcher += ["--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    quick = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    text = "--strategy fsdp --dtype float32 --max_steps 1000000 --save_interval 20 --keep_every 1"
    argv = flags(f"--data {tokens} --out {out} --timeout 10 {text}")

    def host(number: int) -> Job:
        rdzv_conf = f"{quick},is_host={int(number == 0)}"
        command = [*launcher, "--rdzv_conf", rdzv_conf, TRAIN, *argv]
        with mock.patch.dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"):
            return Job(command, tmp_path / f"host {number}")

    def starts() -> list[dict]:
        return [row for row in read_rows(out / "metrics.jsonl") if row.get("event") == "start"]

    def has_trained(ranks: int, steps: int) -> bool:
        """Whether the last start is on `ranks` ranks and has trained for `steps` steps."""
        if not starts() or starts()[-1]["ranks"] != ranks:
            return False
        steps_done = [row["step"] for row in rows(out)]  # none when the first start begins
        return bool(steps_done) and steps_done[-1] >= starts()[-1]["step"] + steps

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

    first, second, third = starts()[-3:]
    assert [start["ranks"] for start in (first, second, third)] == [4, 2, 4]
    # A lost host costs the steps since the latest checkpoint; a host that joins costs none.
    assert second["step"] % 20 == 0
    assert third["step"] >= second["step"] + 25
    assert [row["step"] for row in rows(out)] == list(range(1, rows(out)[-1]["step"] + 1))
    assert "a rank died or hangs" in meeting_place.err
