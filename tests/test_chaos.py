"""Runs that meet a random fault, and are started again, end with the same weights."""

import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import rig
from rig import KILLED, arguments, assert_same_bits, fork_ranks, free_port, read_rows, wait_until

import checkpoint
import log
import train

SILENCE = 4  # --timeout, seconds
RUN = "--strategy fsdp --save_interval 5 --max_steps 80"
# Llama 3 had 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv 2407.21783, table 5):
# most ended a process, others were faults of the network or of a host.
FAULTS = ("process", "network", "host")


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces on one switch, another namespace; each has an address on eth0."""
    switch, *names = [f"test-{os.getpid()}-{name}" for name in ("switch", "host0", "host1")]
    try:
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add bridge type bridge")
        ip(f"-n {switch} link set bridge up")
        for number, name in enumerate(names):
            ip(f"netns add {name}")
            ip(f"link add eth0 netns {name} type veth peer name port{number} netns {switch}")
            ip(f"-n {switch} link set port{number} master bridge")
            ip(f"-n {switch} link set port{number} up")
            ip(f"-n {name} address add 10.0.0.{number + 1}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")
        yield names
    except (subprocess.CalledProcessError, OSError):
        pytest.skip("network namespaces need root and iproute2")
    finally:
        for name in (switch, *names):
            with contextlib.suppress(subprocess.CalledProcessError, OSError):  # not created
                ip(f"netns delete {name}")  # also deletes its links


@pytest.fixture(scope="module")
def whole(pool, tokens, tmp_path_factory) -> Path:
    """A run that was never killed."""
    out = tmp_path_factory.mktemp("chaos") / "whole"
    assert rig.train(2, tokens, out, RUN, timeout=120).status == 0
    return out


def train_on_host(argv: list[str], names: list[str]) -> int:
    """Run train.py in this rank's network namespace."""
    libc, clone_newnet = ctypes.CDLL(None), 0x40000000
    namespace = os.open(f"/var/run/netns/{names[int(os.environ['RANK'])]}", os.O_RDONLY)
    assert libc.setns(namespace, clone_newnet) == 0
    os.environ |= {"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
    return train.main(argv)


def starts(out: Path) -> list[dict]:
    """The rows of a log that starts have written."""
    return [row for row in log.read_rows(out / "metrics.jsonl") if row.get("event") == "start"]


def exit_statuses(ranks: list) -> list[int | None]:
    """The statuses of processes, with None for one that does not end within 60 seconds."""
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


@pytest.mark.slow(proves="kills and lost hosts at moments that nobody chose")
@pytest.mark.parametrize("seed", range(int(os.environ.get("SEEDS", 6))))
def test_a_run_recovers_from_a_random_fault(whole, two_hosts, tokens, tmp_path, seed):
    rng = random.Random(seed)
    out = tmp_path / "out"
    argv = arguments(tokens, out, f"{RUN} --timeout {SILENCE}" + " --async_save" * (seed % 2))
    ranks = fork_ranks(2, train_on_host, argv, two_hosts)
    number = rng.randrange(2)
    victim, other, host = ranks[number], ranks[1 - number], two_hosts[number]
    wait_until(lambda: len(checkpoint.list_checkpoints(out)) > 1)
    time.sleep(rng.uniform(0, 0.3))
    fault = FAULTS[seed % 3]
    if fault != "process":
        ip(f"-n {host} link set eth0 down")
    if fault != "network":
        victim.kill()  # a host that is lost cannot even close its connections
        victim.join()
    if fault != "process":
        other.join(15 * SILENCE if fault == "host" else rng.uniform(0.5, SILENCE / 2))
        ip(f"-n {host} link set eth0 up")
    assert {*exit_statuses(ranks)} <= {KILLED, 0, 1}
    # A kill in a save leaves no damaged checkpoint.
    assert not any(map(checkpoint.verify, checkpoint.list_checkpoints(out)))
    assert exit_statuses(fork_ranks(2, train_on_host, argv, two_hosts)) == [0, 0]
    assert_same_bits(out, whole)


@pytest.mark.slow(proves="torchrun's agents, one of which is killed, and one of which joins")
def test_a_run_continues_without_a_lost_host(tokens, tmp_path):
    """One of two hosts with two ranks each is killed. Then a third host joins."""
    out = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
    launcher += ["--nproc_per_node", 2, "--max-restarts", 9, "--rdzv_backend", "c10d"]
    launcher += ["--rdzv_id", "elastic", "--rdzv_endpoint", f"127.0.0.1:{free_port()}"]
    text = "--strategy fsdp --max_steps 1000000 --save_interval 20 --keep_every 1 --timeout 10"
    command = [rig.ROOT / "train.py", *arguments(tokens, out, text)]
    quick = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def host(number: int) -> rig.Job:
        argv = [*launcher, "--rdzv_conf", f"{quick},is_host={int(number == 0)}", *command]
        return rig.Job(argv, tmp_path / f"host {number}", env=environment)

    def has_trained(ranks: int, steps: int) -> bool:
        """Whether the last start is on `ranks` ranks and has trained for `steps` steps."""
        if not starts(out) or starts(out)[-1]["ranks"] != ranks:
            return False
        rows = read_rows(out / "metrics.jsonl")  # none when the first start begins
        return bool(rows) and rows[-1]["step"] >= starts(out)[-1]["step"] + steps

    meeting_place, lost = host(0), host(1)
    meeting_place.until(lambda: has_trained(4, steps=30), 90)
    for pid in (lost.process.pid, *lost.ranks()):
        os.kill(pid, signal.SIGKILL)
    meeting_place.until(lambda: has_trained(2, steps=25), 90)
    new = host(2)
    meeting_place.until(lambda: has_trained(4, steps=5), 90)
    meeting_place.process.terminate()
    meeting_place.wait()
    new.wait()

    first, second, third = starts(out)[-3:]
    assert [start["ranks"] for start in (first, second, third)] == [4, 2, 4]
    # A lost host costs the steps since the latest checkpoint; a host that joins costs none.
    assert second["step"] % 20 == 0
    assert third["step"] >= second["step"] + 25
    steps = [row["step"] for row in read_rows(out / "metrics.jsonl")]
    assert steps == [*range(1, steps[-1] + 1)]
