"""The bytes that a step puts on the wire, counted by the kernel, match tools.plan."""

import ctypes
import os
import subprocess
from pathlib import Path

import pytest
import torch
from rig import arguments, build_run, fork_ranks, train_step

from tools import plan

CLONE_NEWNET = 0x40000000
HEADERS = 66  # bytes per packet: Ethernet 14, IP 20, TCP 32
RANKS, STEPS = 4, 4
# Matrices and activations have 256 KB or more: the headers of gloo's messages hardly count.
LARGE = "--d_model 256 --d_ff 512 --seq_len 64 --global_batch_size 16 --max_steps 10"


def payload() -> int:
    """Bytes that the loopback device of this network namespace has sent, without headers."""
    _, _, line = Path("/proc/net/dev").read_text().partition("lo:")
    *_, sent, packets = line.split()[:10]
    return int(sent) - HEADERS * int(packets)


def bytes_of_a_step(argv: list[str], file: Path) -> None:
    """Write the number of bytes that all ranks together send in a training step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    run = build_run(argv)
    counts = []
    # DDP rebuilds its buckets in the first steps. No steps: what a barrier sends.
    for steps in ((1, 2), (), range(3, 3 + STEPS)):
        for step in steps:
            train_step(run, step)
        torch.distributed.barrier()  # until all ranks have sent everything
        counts.append(payload())
    before, barrier, after = counts
    if run.start.world.rank == 0:
        file.write_text(str((after - 2 * barrier + before) / STEPS))
    torch.distributed.barrier()


def in_a_namespace(argv: list[str], file: Path) -> int:
    """Run the ranks in a new, empty network namespace; return 1 if none can be created."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return 1
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for process in fork_ranks(RANKS, bytes_of_a_step, argv, file):
        process.join()
    return 0


@pytest.mark.slow(proves="the bytes that the kernel sends")
@pytest.mark.parametrize("mesh", ["ddp --optimizer muon", "hsdp --dp_shard 2", "fsdp --tp 2"])
def test_a_step_sends_the_planned_bytes(tokens, tmp_path, mesh):
    argv = arguments(tokens, tmp_path / "run", f"{LARGE} --strategy {mesh} --wrap block")
    (parent,) = fork_ranks(1, in_a_namespace, argv, tmp_path / "bytes")
    parent.join()
    if parent.exitcode == 1:
        pytest.skip("network namespaces need root")
    cluster = f"--world_size {RANKS} --nproc_per_node {RANKS} --device_type cpu"
    found = plan.make_plan(*plan.parse([*argv, *cluster.split()])[:2])
    planned = RANKS * sum(row["wire_bytes"] for row in plan.communication(found))
    assert float((tmp_path / "bytes").read_text()) == pytest.approx(planned, rel=0.02)
