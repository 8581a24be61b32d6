"""examples/slurm.sh, alone and under a real Slurm: two nodes on this machine."""

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rig import ROOT, Job, arguments, assert_same_bits, free_port, read_rows, wait_until

import checkpoint

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
    is_requeued = "requeue 12345" in (tmp_path / "controlled").read_text()
    assert is_requeued == (status == 1 and saves)


@pytest.fixture
def slurm(tmp_path) -> Callable:
    """slurm("sinfo", ...): what a command of Slurm prints. Two daemons play the nodes."""
    if os.geteuid() or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
        pytest.skip("a real Slurm needs root, slurm-wlm and munge")
    (tmp_path / "state").mkdir()
    job_id = random.randrange(1, 10000)
    text = CONFIGURATION.format(host=NODES[0], port=free_port(), folder=tmp_path, job_id=job_id)
    for name in NODES:
        text += f"NodeName={name} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8\n"
    (tmp_path / "slurm.conf").write_text(text)
    (tmp_path / "munge.key").write_bytes(os.urandom(64))
    (tmp_path / "munge.key").chmod(0o600)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the script's python
    environment = os.environ | {"SLURM_CONF": f"{tmp_path}/slurm.conf", "PATH": path}

    def call(*command: object) -> str:
        words = [*map(str, command)]
        return subprocess.run(words, env=environment, capture_output=True, text=True).stdout

    files = [f"--{kind}-file={tmp_path}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
    Job(
        ["munged", "-F", "--force", f"--socket={tmp_path}/munge.socket", *files], tmp_path / "munge"
    )
    wait_until((tmp_path / "munge.socket").exists)
    Job(["slurmctld", "-D"], tmp_path / "slurmctld", env=environment)
    for name in NODES:
        Job(["slurmd", "-D", "-N", name], tmp_path / name, env=environment)
    wait_until(lambda: call("sinfo", "-h", "-o", "%D %T").split() == ["2", "idle"])
    return call


@pytest.mark.slow(proves="a real Slurm with two nodes")
def test_a_signalled_job_is_requeued_and_continues(slurm, train, tokens, tmp_path):
    out = tmp_path / "run"
    # As a user submits it who has two nodes without GPUs
    options = ["--nodes=2", "--gpus-per-node=0", f"--output={out}.txt", f"--chdir={ROOT}"]
    options += ["--cpus-per-task=2", "--export=ALL,RANKS_PER_NODE=2"]
    argv = arguments(tokens, out, "--strategy hsdp --max_steps 80")
    job = slurm("sbatch", "--parsable", *options, SCRIPT, out, *argv).strip()
    wait_until(lambda: len(read_rows(out / "metrics.jsonl")) >= 5, 120)
    slurm("scancel", "--signal=USR1", job)
    ended = {"JobState=COMPLETED", "Restarts=1"}
    wait_until(lambda: ended <= {*slurm("scontrol", "-o", "show", "job", job).split()}, 120)
    said = Path(f"{out}.txt").read_text()
    assert "hsdp: dp_replicate 2 x dp_shard 2 x tp 1 = 4 x " in said
    stopped, continued = said.split("; the same command continues")
    step = int(stopped.split()[-1])
    assert 5 <= step < 80 and f"continuing from {checkpoint.step_path(out, step)}" in continued
    whole = train(4, "--strategy hsdp --max_steps 80 --dp_shard 2", "whole", timeout=120)
    assert_same_bits(out, whole.out)
