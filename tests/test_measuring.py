"""tools/measuring: the matrix products of a step, slow links, and network namespaces as hosts."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, start_process
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dist
from tools import bench, check
from tools.measuring import parity, products

# --------------------------------------------------------------------------------------------------
# Matrix products and links


class Block(nn.Module):
    """Products with a bias, without one, batched, and with a tied embedding, as in nanoGPT."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.inner, self.outer = nn.Linear(16, 64), nn.Linear(64, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = (x @ x.transpose(1, 2)).softmax(-1) @ x
        x = self.outer(self.inner(x).relu())
        return F.linear(x, self.embed.weight).logsumexp(-1).mean()


def flops(counts: Counter) -> int:
    """Count the operations of products (..., m, k) x (..., k, n) of the last two operands."""
    found = 0
    for (_, operands), count in counts.items():
        (*_, left), (*_, right) = operands[-2][:1], operands[-1][:1]
        found += count * 2 * left.numel() * right[-1]
    return found


def test_products_counts_the_same_flops_as_torch():
    tokens = torch.randint(50, (3, 17))
    with products.Products() as counted, FlopCounterMode(display=False) as reference:
        Block()(tokens).backward()
    assert flops(counted.counts) == reference.get_total_flops() > 0


SCRIPT = """
import sys
import torch
assert sys.argv[1:] == ["--steps=3"] and sys.path[0] == {folder!r}
weight = torch.randn(64, 32, requires_grad=True)
for _ in range(2):  # an estimate, on tensors without values
    of_estimate = torch.ones(4, 4, device="meta", requires_grad=True)
    (of_estimate @ of_estimate).sum().backward()
torch.randn(99, 99) @ torch.randn(99, 99)  # an evaluation before the first step
for step in range(3):
    x = torch.randn(8, 64)
    (x @ weight + x @ weight).sum().backward()
"""


def test_products_times_the_second_step_of_a_script(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path)))
    monkeypatch.setattr(sys, "argv", sys.argv)  # restored afterwards
    monkeypatch.setattr(sys, "path", [*sys.path])
    products.main([str(script), "--steps=3"])
    assert sys.getprofile() is None
    # Forward and the weight's gradient, each twice: 4 x 32,768 FLOPs take longer than 1 us
    said = capsys.readouterr().out
    assert 0 < bench.products_limit([said], tokens=100) < 100 / 1e-6
    assert bench.peak_memory([said]) > 1e8


def find_slow_links(local_size: int, slow: set[tuple[int, int]]) -> list[str]:
    """Time the links of hosts of `local_size` ranks, some slowed down; return the problems."""
    dist.start("cpu")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def transfer_late(operations) -> list:
        (link,) = {
            (one.peer, rank) if one.op is torch.distributed.irecv else (rank, one.peer)
            for one in operations
        }
        works = transfer(operations)
        time.sleep(0.01 * (4 if link in slow and link[1] == rank else 1))
        return works

    transfer = torch.distributed.batch_isend_irecv
    ranks = Namespace(names=[f"rank {number}" for number in range(size)])
    ranks.world = Namespace(size=size, local_size=local_size, device=torch.device("cpu"))
    found = parity.Check()
    with mock.patch.object(torch.distributed, "batch_isend_irecv", transfer_late):
        check.links(ranks, found)
    assert found.figures.keys() >= {"across hosts GB/s"}
    return found.problems


@pytest.mark.slow(proves="it depends on times")
def test_only_a_slow_link_between_hosts_is_reported(pool):
    """There are two hosts of two ranks. Within a host of CPUs, a link is memory that all share."""
    for lines in pool(4, find_slow_links, 2, {(3, 2), (1, 3)}):
        assert [line.partition(" takes ")[0] for line in lines] == [
            "slow: the link from rank 1 to rank 3"
        ]


# --------------------------------------------------------------------------------------------------
# Hosts


def start(folder: Path, *options: str) -> subprocess.Popen:
    """Start the benchmark in a new process group, with its temporary files under `folder`."""
    return start_process(
        [sys.executable, "-m", "tools.bench", "strategies", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder)},
    )


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"bench-{pid}-")]


def processes(folder: Path) -> list[str]:
    """The command lines that contain `folder`: those of torchrun and of its ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]


@pytest.fixture
def box(tmp_path):
    """A folder for the files of a tool. The test fails if the tool leaves a file or a process.

    Skips the test where network namespaces cannot be created.
    """
    if os.name != "posix" or os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, and ip and tc of iproute2")
    probe = f"probe-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        pytest.skip("root may not create network namespaces here")
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    yield tmp_path
    assert not processes(tmp_path)
    # Except torch's cache, which the rehearsal fills
    assert not [path for path in tmp_path.iterdir() if "torchinductor" not in path.name]


@pytest.mark.slow(proves="the benchmark on two hosts and a slow link")
def test_strategies_across_hosts_have_the_expected_order(box):
    strategies = ["ddp", "fsdp", "hsdp"]
    process = start(box, "--json", "--hosts=2", "--steps=2", "--only", *strategies)
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    assert not namespaces(process.pid)
    rows = json.loads(out)["rows"]
    found = {row["strategy"]: median(row["tokens/s/device"]) for row in rows}
    assert len(found) == 2 * len(strategies)
    assert all(0 < row["of the limit"][0] < 1 for row in rows)
    assert found["ddp"] > 2 * found["ddp, micro_batch"]
    assert found["ddp"] > 1.5 * found["fsdp"]
    assert found["hsdp"] > found["fsdp"]


@pytest.mark.slow(proves="hosts, links and jobs that the benchmark must remove")
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_behind(box, number, status):
    process = start(box, "--hosts=2", "--only", "ddp")
    until = time.monotonic() + 120
    # both torchruns, and two ranks
    while sum("train.py" in line for line in processes(box)) < 4:
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.1)
    assert len(namespaces(process.pid)) == 3  # two hosts and the switch
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == status
    assert not namespaces(process.pid)
    assert "Traceback" not in process.stderr.read()


def test_missing_tools_of_namespaces_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert bench.main(["strategies", "--hosts", "2"]) == 2
    line = "tools.bench: error: hosts need root, and ip and tc: apt-get install iproute2\n"
    assert capsys.readouterr() == ("", line)
