"""The bytes that a step puts on the wire, counted by the kernel, match tools.plan."""

import ctypes
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import build_run, flags, fork_ranks, train_step

from tools import plan

CLONE_NEWNET = 0x40000000
HEADERS = 66  # bytes per packet: Ethernet 14, IP 20, TCP 32
STEPS = 4
# Matrices and activations have 256 KB or more: the headers of gloo's messages hardly count.
LARGE = "--n_layer 2 --d_model 256 --d_ff 512 --seq_len 64 --dtype float32 --global_batch_size 16"


def payload() -> int:
    """Bytes that the loopback device of this network namespace has sent, without headers."""
    _, _, line = Path("/proc/net/dev").read_text().partition("lo:")
    fields = ["lo:", *line.split()]
    return int(fields[9]) - HEADERS * int(fields[10])


def bytes_of_a_step(argv: list[str], file: Path) -> None:
    """Write the number of bytes that all ranks together send in a training step."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    run = build_run(argv)
    for step in (1, 2):  # DDP rebuilds its buckets
        train_step(run, step)
    torch.distributed.barrier()  # until all ranks have sent everything of step 2
    counts = [payload()]
    torch.distributed.barrier()
    counts.append(payload())  # the second barrier
    for step in range(3, 3 + STEPS):
        train_step(run, step)
    torch.distributed.barrier()
    counts.append(payload())
    if run.start.world.rank == 0:
        before, barrier, after = counts
        file.write_text(json.dumps((after - 2 * barrier + before) / STEPS))
    torch.distributed.barrier()


def in_a_namespace(size: int, argv: list[str], file: Path) -> int:
    """Run the ranks in a new, empty network namespace; return 1 if none can be created."""
    if ctypes.CDLL(None).unshare(CLONE_NEWNET):
        return 1
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    for process in fork_ranks(size, bytes_of_a_step, argv, file):
        process.join()
    return 0


CASES = [(mesh, size) for mesh in ("ddp --optimizer muon", "fsdp") for size in (2, 4)]
CASES += [("single --tp 2", 2), ("hsdp --dp_shard 2", 4), ("fsdp --tp 2", 4)]


@pytest.mark.slow(proves="the bytes that the kernel sends")
@pytest.mark.parametrize("mesh, size", CASES)
def test_a_step_sends_the_planned_bytes(tokens, tmp_path, mesh, size):
    argv = flags(f"--data {tokens} --out {tmp_path}/run {LARGE} --strategy {mesh} --max_steps 10")
    (parent,) = fork_ranks(1, in_a_namespace, size, argv, tmp_path / "bytes")
    parent.join()
    if parent.exitcode == 1:
        pytest.skip("network namespaces need root")
    words = f"--world_size {size} --nproc_per_node {size} --device_type cpu"
    planned_flags, cluster, _ = plan.parse([*argv, *words.split()])
    sent = [row["wire_bytes"] for row in plan.communication(plan.make_plan(planned_flags, cluster))]
    planned = size * sum(sent)
    found = json.loads((tmp_path / "bytes").read_text())
    print(f"\n{mesh} on {size}: {found:,.0f} bytes, planned {planned:,.0f}: {found / planned:.4f}")
    assert found == pytest.approx(planned, rel=0.02)
