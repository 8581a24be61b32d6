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
from pathlib import Path
from statistics import median
from unittest import mock

import pytest
import torch
from conftest import ROOT, flags

import dist
from tools import bench
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
    assert not any(harness.slow_ones(lambda: measured(generator, {})) for _ in range(1000))


@pytest.mark.parametrize("names", [range(2), range(3), range(8)])
def test_a_rank_that_is_always_slow_is_named_and_no_other(names):
    generator = random.Random(1)
    found = harness.slow_ones(lambda: measured(generator, {1: 2}, names))
    assert found == {1: pytest.approx(2, rel=0.1)}
    once = iter([{1: 2}, {}, {1: 2}])
    assert not harness.slow_ones(lambda: measured(generator, next(once), names))


@pytest.mark.parametrize("hosts, local_size", [(1, 8), (2, 4), (3, 2), (4, 3), (5, 1)])
def test_every_rank_meets_its_neighbours_once_and_one_at_a_time(hosts, local_size):
    size = hosts * local_size
    for between in (False, True):
        met = set()
        for pairs in harness.neighbours(hosts, local_size, between):
            ranks = [rank for pair in pairs for rank in pair]
            assert len(set(ranks)) == len(ranks)
            met |= {frozenset(pair) for pair in pairs}
        expected = set()
        for rank in range(size):
            if not between and rank % local_size:
                expected.add(frozenset((rank - 1, rank)))
            if between and hosts > 1:
                expected.add(frozenset((rank, (rank + local_size) % size)))
        assert met == expected


def named(slow: set[tuple[int, int]], ranks: int, local_size: int) -> list[str]:
    """What harness.slow_links says, with the transfers of `slow` twice as long."""

    def transfers(rounds, size, device):
        generator = random.Random(1)
        pairs = [pair for pairs in rounds for pair in pairs]
        pairs += [(b, a) for a, b in pairs]
        return measured(generator, dict.fromkeys(slow, 2), pairs)

    with mock.patch.object(harness, "transfers", transfers):
        names = [f"rank {rank}" for rank in range(ranks)]
        lines = harness.slow_links(names, local_size, 4, torch.device("cpu"))
    return [line.partition(",")[0] for line in lines]


def test_a_slow_link_is_named_and_a_slow_host_where_its_links_meet():
    assert not named(set(), 8, 2)
    assert named({(1, 0)}, 2, 1) == ["slow: the link from rank 1 to rank 0"]
    of_rank_5 = {(4, 5), (5, 4), (5, 6), (6, 5)}
    assert named(of_rank_5, 8, 8) == ["slow: all links of rank 5"]
    of_host_1 = {(0, 2), (2, 0), (2, 4), (4, 2), (1, 3), (3, 1), (3, 5), (5, 3)}
    assert named(of_host_1, 8, 2) == ["slow: all links of the host of rank 2"]
    assert named({(2, 4)}, 8, 2) == ["slow: the link from rank 2 to rank 4"]


def test_the_rate_of_a_link_is_of_more_than_a_burst(pool):
    sent = sum(pool(2, bytes_in_an_all_reduce))
    assert sent > 40 * 256 * 1024  # what the link lets pass at once


def bytes_in_an_all_reduce() -> int:
    """What a rank of two hands to all_reduce in one measurement of `harness.measure_links`."""
    dist.start("cpu")
    sent = []
    count = mock.patch.object(
        torch.distributed, "all_reduce", lambda tensor, group: sent.append(tensor.nbytes)
    )
    with count, mock.patch.object(harness, "times", lambda function: [function() or 0.5]):
        group = torch.distributed.group.WORLD
        seconds = harness.collectives(harness.LINK_BYTES, group, torch.device("cpu"))
    assert seconds["all_reduce"] == 0.5 / len(sent)
    return sum(sent)


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert harness.bus_bandwidth("all_reduce", 100, 0.5, 4) == 2 * 3 / 4 * 100 / 0.5
    assert harness.bus_bandwidth("all_gather", 100, 0.5, 4) == 3 / 4 * 100 / 0.5


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
def test_ddp_across_hosts_is_faster_with_one_reduction_as_predicted(box):
    options = ("--hosts=2", "--nproc=1", "--only", "ddp", "--steps=1", "--predict")
    once, often = table(box, *options).values()
    assert median(once["tokens/s/device"]) > 1.5 * median(often["tokens/s/device"])
    assert once["predicted"][0] > 1.5 * often["predicted"][0] > 0
    assert once["error"] == "+0%" and often["error"].endswith("%")
    assert once["MB communicated a step"].startswith("dp_replicate ")


@pytest.mark.slow
def test_all_strategies_across_hosts(box):
    rows = table(box, "--hosts=2", "--steps=2")
    found = {name: median(row["tokens/s/device"]) for name, row in rows.items()}
    assert len(found) == 8
    assert found["ddp"] > 2 * found["ddp, micro_batch"]
    assert found["ddp"] > 1.5 * found["fsdp"]
    assert found["hsdp"] > found["fsdp, micro_batch"]


@pytest.mark.parametrize(
    "number, status",
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
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


@pytest.mark.parametrize(
    "path, user, problem",
    [
        (None, 0, "ip and tc not found: install iproute2"),
        ("/sbin/ip", 1000, "network namespaces need root: run with sudo"),
    ],
)
def test_what_namespaces_lack_is_one_line(monkeypatch, capsys, path, user, problem):
    monkeypatch.setattr(shutil, "which", lambda tool: path)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert bench.main(["strategies", "--hosts", "2"]) == 2
    out, errors = capsys.readouterr()
    assert errors.startswith(f"tools.bench: error: {problem}")
    assert (out, errors.count("\n")) == ("", 1)


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
        argv = ["-m", "tools.check", "devices", "links", *flags(f"--data {tokens} --json {file}")]
        job = hosts.torchrun(names, 1, [*argv, f"--out={folder}"])
        with contextlib.suppress(harness.RunFailed):  # its status, where a check fails
            harness.run_all(job, folder / "job", TMPDIR=str(folder))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    found = json.loads(file.read_text())["checks"]
    shutil.rmtree(folder)
    return {result["name"]: result for result in found}


@pytest.mark.slow
def test_the_host_with_a_slow_link_is_named(box, tokens):
    found = check_hosts(box / "clean", tokens, 4, {})
    assert found["devices"]["figures"]["hosts"] == 4
    assert found["links"]["status"] == "pass", found["links"]
    found = check_hosts(box / "slow", tokens, 4, {"sends": 2, "gets": 2})
    (problem,) = found["links"]["problems"]
    assert problem.startswith("slow: all links of the host of rank 2 (") and "host 2)" in problem
    found = check_hosts(box / "oneway", tokens, 2, {"sends": 1})
    (problem,) = found["links"]["problems"]
    assert problem.startswith("slow: the link from rank 1 (") and " to rank 0 (" in problem
