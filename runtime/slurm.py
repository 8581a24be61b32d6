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
    tasks = tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = str(tasks[int(env["SLURM_NODEID"])])
    env.setdefault("MASTER_ADDR", first_node(env["SLURM_STEP_NODELIST"]))
    env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 10000))


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's "4(x2),3" to [4, 4, 3]."""
    tasks = []
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(count)] * int(repeats or 1)
    return tasks


def first_node(text: str) -> str:
    """Return the first host of a list: rack1n07-ib for "rack[1-2]n[07-09,12]-ib,login"."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", text).partition(",")[0]
