"""Slurm's variables, translated to torchrun's."""

import os
import re


def read_slurm() -> None:
    """Translate srun's variables to torchrun's, in a task that srun started directly.

    The ranks meet on the first host of the job step, at a port derived from the job id.
    MASTER_ADDR and MASTER_PORT override both.
    """
    env = os.environ
    if "RANK" in env or "SLURM_STEP_NUM_TASKS" not in env:
        return
    tasks = []  # of each host: "4(x2),3" is [4, 4, 3]
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
        tasks += [count] * int(repeats or 1)
    # "rack[1-2]n[07-09,12]-ib,login" begins with rack1n07-ib
    hosts = re.sub(r"\[(\w+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"])
    env |= dict(
        RANK=env["SLURM_PROCID"],
        WORLD_SIZE=env["SLURM_STEP_NUM_TASKS"],
        LOCAL_RANK=env["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=tasks[int(env["SLURM_NODEID"])],
    )
    env.setdefault("MASTER_ADDR", hosts.partition(",")[0])
    env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 10000))
