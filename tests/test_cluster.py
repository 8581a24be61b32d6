"""tools/cluster.py: training across hosts, which are network namespaces of this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from statistics import median

import pytest
import torch

import metrics
from tools import bench, cluster

ROOT = Path(__file__).parent.parent


def start(folder: Path, *options: str, **variables) -> subprocess.Popen:
    """Start tools.cluster in a new process group, with its temporary files under `folder`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tools.cluster", *options],
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
    return [line for line in listed.splitlines() if line.startswith(f"cluster-{pid}-")]


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
    """A folder for the files of tools.cluster; afterwards no file and no process is left of it.

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


def table(folder: Path, *options: str) -> dict[tuple[str, str], dict]:
    """(strategy, grad_sync) -> the row of the table"""
    process = start(folder, "--json", *options)
    out, errors = process.communicate(timeout=900)
    assert process.returncode == 0, errors
    assert not namespaces(process.pid)
    found = {}
    for row in json.loads(out)["rows"]:
        found[row["strategy"], row["grad_sync"]] = row
    return found


def speeds(folder: Path, *options: str) -> dict[tuple[str, str], float]:
    """(strategy, grad_sync) -> median tokens/s/device"""
    return {key: median(row["tokens/s/device"]) for key, row in table(folder, *options).items()}


@pytest.mark.slow
def test_ddp_across_hosts_is_faster_with_one_reduction_as_predicted(box):
    found = table(box, "--nproc", "1", "--strategies", "ddp", "--steps", "1", "--predict")
    once, often = found["ddp", "batch"], found["ddp", "micro_batch"]
    assert median(once["tokens/s/device"]) > 1.5 * median(often["tokens/s/device"])
    assert once["predicted"][0] > 1.5 * often["predicted"][0] > 0
    assert once["error"] == "+0%" and often["error"].endswith("%")


def test_the_rate_of_a_link_is_of_more_than_a_burst(monkeypatch):
    sent = []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 4)
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda tensor, group: sent.append(1.5 * tensor.nbytes)
    )
    monkeypatch.setattr(cluster, "times", lambda function: [function() or 0.5])
    assert cluster.bandwidth() == sum(sent) / 0.5
    assert sum(sent) > 40 * 256 * 1024  # what the link lets pass at once


def test_ranks_that_share_cores_count_while_all_of_them_train(monkeypatch, tmp_path):
    def log(commands, out):
        """Rank 0 takes 0.1 s a step, the others 0.4 s and, once it has ended, 0.2 s."""
        for rank, command in enumerate(commands):
            flags = dict(word.split("=") for word in command if "=" in word)
            now = 0.3 * rank
            Path(flags["--out"]).mkdir()
            with open(Path(flags["--out"], "metrics.jsonl"), "w") as file:
                for step in range(1, int(flags["--max_steps"]) + 1):
                    seconds = 0.1 if rank == 0 else 0.4 if now < 2.4 else 0.2
                    now += seconds
                    at = datetime.fromtimestamp(now).isoformat()
                    row = dict.fromkeys(metrics.KINDS[0].split(), 1.0)
                    row |= {"step": step, "step_time": seconds, "time": at}
                    print(json.dumps(row | {"mfu": 0.08 / seconds}), file=file)

    monkeypatch.setattr(bench, "run_all", log)
    monkeypatch.setattr(cluster, "run_on", lambda names, nproc, script, out: None)
    (tmp_path / "links.json").write_text("[2e8, 2e7]")
    machines = cluster.measured_machines(cluster.parse([]), ["a", "b"], "--data=d", tmp_path)
    for machine in machines.values():
        assert machine.achieved == pytest.approx((0.8 + 3 * 0.2) / 4, rel=0.08)


@pytest.mark.slow
def test_all_strategies_across_hosts(box):
    found = speeds(box, "--steps", "2")
    assert len(found) == 8
    assert found["ddp", "batch"] > 2 * found["ddp", "micro_batch"]
    assert found["ddp", "batch"] > 1.5 * found["fsdp", "batch"]
    assert found["hsdp", "batch"] > found["fsdp", "micro_batch"]


@pytest.mark.parametrize(
    "number, status",
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_a_signal_leaves_nothing_behind(box, number, status):
    process = start(box, "--strategies", "ddp")
    until = time.monotonic() + 60
    # both torchruns, and two ranks
    while sum("train.py" in line for line in processes(box)) < 4:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    assert len(namespaces(process.pid)) == 3  # two hosts and the switch
    os.killpg(process.pid, number)
    assert process.wait(timeout=30) == status
    assert not namespaces(process.pid)
    assert "Traceback" not in process.stderr.read()


def test_without_iproute2_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert cluster.main([]) == 2
    out, errors = capsys.readouterr()
    assert "ip and tc not found: install iproute2" in errors
    assert (out, errors.count("\n")) == ("", 1)


def test_without_root_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cluster.main([]) == 2
    line = "tools.cluster: error: network namespaces need root: run with sudo"
    assert capsys.readouterr().err.startswith(line)
