"""tools/measuring: what is slow among ranks and links, and hosts that are network namespaces."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
import torch
from conftest import ROOT, flags

import dist
from runtime.cli import RunError
from tools import bench, check
from tools.measuring import harness, hosts

# --------------------------------------------------------------------------------------------------
# What is slow


def measured(generator: random.Random, slow: dict[object, float], names=range(8)) -> dict:
    """Repeated measurements with a noise of a tenth, and of up to a half now and then."""
    found = {}
    for name in names:
        times = [1 + 0.1 * generator.random() + 0.5 * (generator.random() > 0.8) for _ in range(9)]
        found[name] = [slow.get(name, 1) * time for time in times]
    return found


def test_of_a_thousand_clean_measurements_none_is_slow():
    generator = random.Random(1)
    assert not any(harness.slow_ones(lambda: measured(generator, {}))[1] for _ in range(1000))


@pytest.mark.parametrize("names", [range(2), range(3), range(8)])
def test_a_rank_that_is_always_slow_is_named_and_no_other(names):
    generator = random.Random(1)
    best, slow = harness.slow_ones(lambda: measured(generator, {1: 2}, names))
    assert slow == {1: pytest.approx(2, rel=0.1)} and best.keys() == set(names)
    once = iter([{1: 2}, {}, {1: 2}])
    assert not harness.slow_ones(lambda: measured(generator, next(once), names))[1]


def find_slow_links(local_size: int, slow: set[tuple[int, int]]) -> list[str]:
    """What is found on a rank of hosts of `local_size`; some links take longer."""
    dist.start("cpu")
    size = torch.distributed.get_world_size()
    transfer = harness.transfer

    def late(sender: int, receiver: int, size: int, device: torch.device) -> list[float]:
        seconds = transfer(sender, receiver, size, device)
        assert len(seconds) >= 3 and min(seconds) > 0
        return [1.0 + 0.5 * ((sender, receiver) in slow)]

    ranks = Namespace(names=[f"rank {number}" for number in range(size)])
    ranks.world = Namespace(size=size, local_size=local_size)
    ranks.device = torch.device("cpu")
    found = check.Check("links")
    with mock.patch.object(harness, "transfer", late):
        check.links(ranks, found)
    return found.problems


@pytest.mark.parametrize("ranks, local_size, slow", [(3, 1, [(2, 0)]), (4, 2, [(3, 2), (1, 3)])])
def test_a_slow_link_is_named_and_no_other(pool, ranks, local_size, slow):
    """On a ring of three hosts; on two hosts of two ranks, within one and between them."""
    expected = [f"slow: the link from rank {a} to rank {b}" for a, b in slow]
    for lines in pool(ranks, find_slow_links, local_size, set(slow)):
        assert [line.partition(",")[0] for line in lines] == expected


def seconds_of_a_late_link() -> list[list[float]]:
    """Two links of three ranks, of which rank 1 is late to send."""
    dist.start("cpu")
    send = torch.distributed.isend

    def late(tensor, receiver):
        time.sleep(0.05 * (torch.distributed.get_rank() == 1))
        return send(tensor, receiver)

    def batch(operations):
        return [operation.op(operation.tensor, operation.peer) for operation in operations]

    with (
        mock.patch.object(torch.distributed, "isend", late),
        mock.patch.object(torch.distributed, "batch_isend_irecv", batch),
        mock.patch.object(harness, "P2POp", lambda *parts: Namespace(**dict(zip(PARTS, parts)))),
    ):
        links = harness.neighbours(3, 1)["across hosts"]
        return [harness.transfer(*link, 4, torch.device("cpu")) for link in links]


PARTS = ("op", "tensor", "peer")


def test_a_transfer_is_timed_where_it_arrives(pool):
    for answer in pool(3, seconds_of_a_late_link):
        assert [min(seconds) > 0.05 for seconds in answer] == [False, True, False]


# --------------------------------------------------------------------------------------------------
# Hosts


def start(folder: Path, *options: str, **variables) -> subprocess.Popen:
    """Start the benchmark in a new process group, with its temporary files under `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tools.bench", "strategies", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(folder), **variables},
        start_new_session=True,
        # background jobs of a shell, such as this test may be, ignore SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if line.startswith(f"bench-{pid}-")]


def processes(folder: Path) -> list[str]:
    """The command lines that name `folder`: those of torchrun and of its ranks."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # the process has ended
    return [line for line in found if str(folder) in line]


@pytest.fixture
def box(tmp_path):
    """A folder for the files of a tool; afterwards no file and no process is left of it.

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
    # The cache is torch's, of the rehearsal
    assert not [path for path in tmp_path.iterdir() if "torchinductor" not in path.name]


def table(folder: Path, *options: str) -> dict[str, dict]:
    """Strategy -> the row of the table"""
    process = start(folder, "--json", *options)
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    assert not namespaces(process.pid)
    return {row["strategy"]: row for row in json.loads(out)["rows"]}


@pytest.mark.slow
def test_all_strategies_across_hosts(box):
    rows = table(box, "--hosts=2", "--steps=2")
    found = {name: median(row["tokens/s/device"]) for name, row in rows.items()}
    assert len(found) == 8
    assert found["ddp"] > 2 * found["ddp, micro_batch"]
    assert found["ddp"] > 1.5 * found["fsdp"]
    assert found["hsdp"] > found["fsdp, micro_batch"]
    assert rows["ddp"]["MB communicated a step"].startswith("dp_replicate ")


@pytest.mark.slow
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing_behind(box, number, status):
    process = start(box, "--hosts=2", "--only", "ddp")
    until = time.monotonic() + 120
    # both torchruns, and two ranks
    while sum("train.py" in line for line in processes(box)) < 4:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    assert len(namespaces(process.pid)) == 3  # two hosts and the switch
    os.killpg(process.pid, number)
    assert process.wait(timeout=60) == status
    assert not namespaces(process.pid)
    assert "Traceback" not in process.stderr.read()


def test_what_namespaces_lack_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert bench.main(["strategies", "--hosts", "2"]) == 2
    out, errors = capsys.readouterr()
    assert (
        errors == "tools.bench: error: hosts need root, and ip and tc: apt-get install iproute2\n"
    )
    assert out == ""


def check_hosts(folder: Path, tokens: Path, count: int, slow: dict[str, int]) -> dict:
    """What tools.check finds on hosts with one rank; of some, tc limits what they send or get."""
    file = folder / "check.json"
    folder.mkdir()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with hosts.hosts(count, "1gbit") as names:
        for end, number in slow.items():
            where = f"-n {names[number]} qdisc replace dev eth0"
            if end == "gets":
                switch = names[0].replace("host0", "switch")
                where = f"-n {switch} qdisc replace dev port{number}"
            hosts.ip(f"{where} root tbf rate 50mbit burst 256kb latency 50ms", tool="tc")
        argv = ["-m", "tools.check", "links", *flags(f"--data {tokens} --json {file}")]
        job = hosts.torchrun(names, 1, [*argv, f"--out={folder}"])
        with contextlib.suppress(RunError):  # its status, where a check fails
            harness.run_all(job, folder / "job", TMPDIR=str(folder))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    found = json.loads(file.read_text())["checks"]
    shutil.rmtree(folder)
    return {result["name"]: result for result in found}


@pytest.mark.slow
def test_the_host_with_a_slow_link_is_named(box, tokens):
    found = check_hosts(box / "clean", tokens, 4, {})
    assert found["links"]["status"] == "pass", found["links"]
    found = check_hosts(box / "slow", tokens, 4, {"sends": 2, "gets": 2})
    said = [problem.split(" (")[0] for problem in found["links"]["problems"]]
    assert said == ["slow: the link from rank 1", "slow: the link from rank 2"]
    found = check_hosts(box / "oneway", tokens, 2, {"sends": 1})
    (problem,) = found["links"]["problems"]
    assert problem.startswith("slow: the link from rank 1 (") and " to rank 0 (" in problem
