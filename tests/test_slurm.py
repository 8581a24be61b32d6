"""examples/slurm.sh, alone and under a real Slurm: two nodes on this machine."""

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from old import flags, newest_step, rows, wait_until
from rig import ROOT, assert_same_bits, free_port

SCRIPT = ROOT / "examples/slurm.sh"
# The torchruns meet at the first host of a job. Its name, given by Slurm, must have an address.
NODES = [socket.gethostname(), f"{socket.gethostname()}-2"]
# A cluster may have JobRequeue=0 and KillOnBadExit=1, which the script has to override.
# A requeued job waits for cred_expire, 120 s by default. Ports are derived from job ids.
CONFIGURATION = """
ClusterName=test
FirstJobId={job_id}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
JobRequeue=0
KillOnBadExit=1
KillWait=10
ReturnToService=2
SlurmdTimeout=5
PartitionName=all Nodes=ALL Default=YES
"""


@pytest.mark.parametrize("status, saves", [(0, True), (1, True), (1, False)])
def test_the_script_starts_torchrun_and_requeues_what_goes_on(tmp_path, status, saves):
    """A run is finished with status 0; one that stopped has saved, and one that fails has not."""
    run = tmp_path / "run"
    (run / "checkpoints/step-00000010").mkdir(parents=True)
    new = f"mkdir {run}/checkpoints/step-00000020" if saves else ""
    programs = {
        "srun": f'echo "$SRUN_CPUS_PER_TASK $@" > {tmp_path}/said\n{new}\nexit {status}',
        "scontrol": f"echo $@ >> {tmp_path}/controlled\necho first-host\necho second-host",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_CPUS_PER_TASK": "6"}
    environment |= {"SLURM_JOB_ID": "12345", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert subprocess.run(["bash", SCRIPT, run, "--tp=2"], env=environment).returncode == status
    said = (tmp_path / "said").read_text()
    # srun of Slurm 22.05 and later does not read sbatch's --cpus-per-task.
    assert said.startswith("6 --kill-on-bad-exit=0 torchrun --nnodes 2 --nproc_per_node 8 ")
    assert "--rdzv-endpoint first-host:22345 --rdzv-id 12345 " in said
    assert said.endswith(f" train.py --out {run} --tp=2\n")
    resources = "--nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --mem=0\n"
    assert f"#SBATCH {resources}" in SCRIPT.read_text()
    is_requeued = "requeue 12345" in (tmp_path / "controlled").read_text()
    assert is_requeued == (status == 1 and saves)


class Slurm:
    """A separate Slurm, with its state in `folder`, and the last job that was submitted."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons: list[subprocess.Popen] = []
        (folder / "state").mkdir()
        job_id = random.randrange(1, 10000)
        text = CONFIGURATION.format(host=NODES[0], port=free_port(), folder=folder, job_id=job_id)
        for name in NODES:
            text += f"NodeName={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8\n"
        (folder / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(64))
        key.chmod(0o600)
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the script's python
        }

    def start(self) -> None:
        munge = self.folder / "munge"
        files = [f"--{kind}-file={munge}.{kind}" for kind in ("key", "pid", "log", "seed")]
        self.start_daemon("munged", "-F", "--force", f"--socket={munge}.socket", *files)
        wait_until(Path(f"{munge}.socket").exists, 10)
        self.start_daemon("slurmctld", "-D")
        for name in NODES:
            self.start_daemon("slurmd", "-D", "-N", name)
        wait_until(lambda: self.run("sinfo", "-h", "-o", "%D %T").split() == ["2", "idle"], 30)

    def start_daemon(self, *command: str) -> None:
        self.daemons.append(subprocess.Popen(command, env=self.environment))

    def stop(self) -> None:
        """Kill the daemons and the jobs: all processes with this Slurm's configuration."""
        mark = f"SLURM_CONF={self.folder}/".encode()
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended
                if mark in environment.read_bytes():
                    os.kill(int(environment.parent.name), signal.SIGKILL)
        for daemon in self.daemons:
            daemon.wait()

    def run(self, *command: str) -> str:
        """Standard output of one of Slurm's commands."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        return done.stdout

    def submit(self, out: Path, tokens: Path, text: str, ranks: int) -> None:
        """Submit the script as a user does who has two nodes without GPUs."""
        self.out, self.printed = out, out.with_name(f"{out.name}.txt")
        options = ["--nodes=2", "--gpus-per-node=0", f"--output={self.printed}", f"--chdir={ROOT}"]
        options += ["--cpus-per-task=2", f"--export=ALL,RANKS_PER_NODE={ranks}"]
        argv = flags(f"--data {tokens} --dtype float32 {text}")
        self.job = self.run("sbatch", "--parsable", *options, str(SCRIPT), str(out), *argv).strip()

    def said(self) -> str:
        return self.printed.read_text() if self.printed.exists() else ""

    def wait_for(self, state: str, restarts: int) -> None:
        def has_state() -> bool:
            said = self.run("scontrol", "-o", "show", "job", self.job).split()
            return {f"JobState={state}", f"Restarts={restarts}"} <= {*said}

        wait_until(has_state, 120, self.said, pause=0.1)

    def wait_for_steps(self, n_steps: int) -> None:
        log = self.out / "metrics.jsonl"
        wait_until(lambda: log.exists() and len(rows(self.out)) >= n_steps, 120, self.said, 0.1)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    if os.geteuid() or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
        pytest.skip("a real Slurm needs root, slurm-wlm and munge")
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.slow(proves="a real Slurm with two nodes")
def test_a_signalled_job_is_requeued_and_a_cancelled_one_only_saves(slurm, run, tokens, tmp_path):
    text = "--strategy hsdp --max_steps 80"
    whole = run(4, f"--dtype float32 {text} --dp_shard 2", "whole", timeout=120)
    out = tmp_path / "run"
    slurm.submit(out, tokens, text, ranks=2)
    slurm.wait_for_steps(5)
    slurm.run("scancel", "--signal=USR1", slurm.job)
    slurm.wait_for("COMPLETED", restarts=1)
    assert "hsdp: dp_replicate 2 x dp_shard 2 x tp 1 = 4 x " in slurm.said()
    stopped, continued = slurm.said().split("; the same command continues")
    step = int(stopped.split()[-1])
    assert 5 <= step < 80 and f"continuing from {out}/checkpoints/step-{step:08d}" in continued
    assert [row["loss"] for row in rows(out)] == [row["loss"] for row in rows(whole)]
    assert_same_bits(whole, out)

    slurm.submit(tmp_path / "endless", tokens, "--strategy fsdp --max_steps 1000000", ranks=1)
    slurm.wait_for_steps(5)
    slurm.run("scancel", slurm.job)
    slurm.wait_for("CANCELLED", restarts=0)
    saved = newest_step(slurm.out)
    assert f"stopped after step {saved}; the same command continues" in slurm.said()
