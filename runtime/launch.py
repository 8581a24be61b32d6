"""Form the process group from the variables that torchrun or srun sets.

They tell each process its rank and where the ranks meet. Every error that a user can fix is raised
as one line, before or when the time for ranks to join has passed.
"""

import ctypes
import os
import re
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed

import dist


def read_slurm() -> None:
    """Translate srun's variables to torchrun's, in a task that srun started directly.

    The ranks meet on the first host of the job step, at a port derived from the job id.
    MASTER_ADDR and MASTER_PORT override both.
    """
    env = os.environ
    if "RANK" in env or "SLURM_STEP_NUM_TASKS" not in env:
        return
    tasks = []  # on each host: "4(x2),3" is [4, 4, 3]
    for count, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", env["SLURM_STEP_TASKS_PER_NODE"]):
        tasks += [count] * int(repeats or 1)
    # The first host of "rack[1-2]n[07-09,12]-ib,login" is rack1n07-ib.
    hosts = re.sub(r"\[(\w+)[^]]*\]", r"\1", env["SLURM_STEP_NODELIST"])
    env["RANK"] = env["SLURM_PROCID"]
    env["WORLD_SIZE"] = env["SLURM_STEP_NUM_TASKS"]
    env["LOCAL_RANK"] = env["SLURM_LOCALID"]
    env["LOCAL_WORLD_SIZE"] = tasks[int(env["SLURM_NODEID"])]
    env.setdefault("MASTER_ADDR", hosts.partition(",")[0])
    env.setdefault("MASTER_PORT", str(20000 + int(env["SLURM_JOB_ID"]) % 10000))


def start(
    device: str = "auto",
    timeout: timedelta = torch.distributed.default_pg_timeout,
    join_timeout: timedelta | None = None,
) -> dist.World:
    """Join the process group that torchrun's variables describe, or form one of a single process.

    There is always a group, so that no code needs a special case for one process. `timeout` applies
    to collectives, `join_timeout` (default: `timeout`) to joining. Raises MeshError and, if ranks
    are missing or cannot connect, ConnectionError.
    """
    rank, size, local_rank, local_size = read_variables()
    local_device = find_device(device, local_rank, local_size)
    prepare_process(local_device)
    join_timeout = join_timeout or timeout
    try:
        store = find_store(join_timeout)
        # Cloned now: cloning connects to rank 0, which may have ended later.
        world = dist.World(rank, size, local_rank, local_size, local_device, timeout, store.clone())
        await_ranks(world, store, join_timeout)
        dist.join_group(world, store)
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        reason = str(error).partition("\n")[0]
        raise ConnectionError(f"the ranks do not meet: {reason}") from None
    return world


def read_variables() -> tuple[int, int, int, int]:
    """Return rank, world size, local rank and local size. Raises MeshError.

    Checks all of them here, so that this process does not wait for ranks that do not exist.
    """
    env = os.environ
    if "RANK" not in env and env.get("WORLD_SIZE", "1") == "1":  # set by some schedulers
        return 0, 1, 0, 1
    needed = ("RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
    with suppress(KeyError, ValueError):
        rank, size, port = (int(env[name]) for name in needed[:3])
        if 0 <= rank < size and 0 <= port < 2**16 and env["MASTER_ADDR"]:
            return rank, size, int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    found = ", ".join(f"{name}={env[name]}" for name in needed if name in env)
    raise dist.MeshError(
        f"{found} in the environment does not describe a rank: unset these for one process, or "
        "start the ranks with torchrun --nproc_per_node N, which sets all of them"
    )


def find_device(name: str, local_rank: int, local_size: int) -> torch.device:
    """Return the device of this process; `auto` prefers GPUs. Raises MeshError."""
    gpus = torch.cuda.device_count()
    if name == "cpu" or (name == "auto" and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise dist.MeshError("--device cuda: PyTorch finds no CUDA device here; use --device cpu")
    if gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        # srun --gpus-per-task=1 shows each process only its GPU; torchrun shows it all GPUs.
        return torch.device("cuda", 0)
    if local_size > gpus:
        raise dist.MeshError(
            f"{local_size} processes were started on this host, which has {gpus} GPUs: "
            f"use --nproc_per_node {gpus}"
        )
    return torch.device("cuda", local_rank)


def prepare_process(device: torch.device) -> None:
    """Set limits and variables of this process before it joins a group."""
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ
    if is_launched and sys.platform == "linux":  # a rank may outlive a shell that started it
        # PR_SET_PDEATHSIG: Linux kills this rank when torchrun or srun, which started it, dies.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    # Make gloo connect two ranks when one first sends to the other. By default, each of N ranks
    # reads N address lists of 154 + 8 N bytes from the store at the start: 552 GB for N = 4,096. A
    # rank waits forever for one that died before they were connected; the Watchdog ends it.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Without torchrun, rank 0 serves the store and needs two open files (sockets) for each rank.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS rejects its own hard limit, which is infinite
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    # NCCL's own error handling keeps torch's defaults, as a second safety net beside the Watchdog.
    # But a request to dump NCCL's flight recorder stays in torchrun's store, where torch's monitor
    # would find it again after a restart, and end the new and healthy attempt.
    may_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    if device.type == "cuda" and may_restart:
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")


def find_store(timeout: timedelta) -> torch.distributed.Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT; without torchrun, rank 0 serves it."""
    env = os.environ
    if "RANK" not in env:
        return torch.distributed.HashStore()
    is_agents = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = env["RANK"] == "0" and not is_agents
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if not is_server:
        await_listener(host, port, timeout)
    # rendezvous("env://") would make rank 0 wait for all clients, and report only the number
    # of missing ones.
    store = torch.distributed.TCPStore(
        host, port, is_master=is_server, timeout=timeout, wait_for_workers=False
    )
    if is_agents:
        # torchrun --max-restarts keeps its store and, in it, the addresses of ranks that died. So
        # each attempt uses a different prefix. Agents that joined later count fewer attempts: if
        # hosts come and go, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 starts a store for each attempt.
        store = torch.distributed.PrefixStore(f"attempt {env['TORCHELASTIC_RESTART_COUNT']}", store)
    return store


def await_listener(host: str, port: int, timeout: timedelta) -> None:
    """Wait until the store listens. TCPStore would wait twice as long and print a C++ stack."""
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=seconds).close()
            return
        time.sleep(0.2)
    raise ConnectionError(
        f"nobody listens at MASTER_ADDR:MASTER_PORT, {host}:{port}, after {seconds:g} s: "
        "rank 0 or its torchrun is missing"
    )


def await_ranks(world: dist.World, store: torch.distributed.Store, timeout: timedelta) -> None:
    """Wait until all ranks have joined. Raises ConnectionError with the first missing rank."""
    store.set(f"joined {world.rank}", "")
    store.add("joined", 1)
    deadline = time.monotonic() + timeout.total_seconds()
    pause = 0.01
    while store.add("joined", 0) < world.size:  # not store.wait: it delays Ctrl-C and logs
        if time.monotonic() > deadline:
            missing = [rank for rank in range(world.size) if not store.check([f"joined {rank}"])]
            raise ConnectionError(
                f"{len(missing)} of {world.size} ranks did not join within "
                f"{timeout.total_seconds():g} s, first rank {missing[0]}"
            )
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)  # thousands of ranks poll one store
