"""Shared by bench and check: commands that run at the same time, and what is slow among ranks."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import torch
import torch.distributed
from torch.distributed import P2POp

import metrics
from runtime.cli import RunError

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run_all(
    commands: list[list[str]], out: Path, cwd: Path | None = None, **variables: str
) -> list[str]:
    """Run commands at the same time; return what each printed. Number i prints to `out`-i.txt.

    If one fails, or at a signal, the others are terminated: they might wait for it forever. Prints
    the end of what a failed one printed, and raises RunError.
    """
    files = [out.with_name(f"{out.name}-{number}.txt") for number in range(len(commands))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables  # for -m tools....
    processes = []
    try:
        for command, file in zip(commands, files):
            with open(file, "w") as output:
                process = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches only this process
                )
            processes.append(process)
        while None in (statuses := [process.poll() for process in processes]):
            if any(statuses):
                break
            time.sleep(0.01)
    finally:
        for process in processes:
            process.terminate()  # not kill: torchrun has to end its ranks
        for process in processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks notice, and end themselves
    printed = [file.read_text(errors="replace") for file in files]
    for command, status, text in zip(commands, statuses, printed):
        if status:
            print(text[-4000:], file=sys.stderr)
            raise RunError(f"{' '.join(command)} failed")
    return printed


def training_rows(out: Path) -> list[dict]:
    return [row for row in metrics.read_log(out / "metrics.jsonl") if "loss" in row]


# --------------------------------------------------------------------------------------------------
# The ranks of a process group, and the links between them

# Slow means that the best time is more than SLOW times that of the faster ones, in each of ATTEMPTS
# measurements.
SLOW = 1.4
ATTEMPTS = 3
REPEATS = 10  # at most; fewer if they take more than two seconds


def exchange(value) -> list:
    """The values of all ranks."""
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def times(function: Callable[[], object]) -> list[float]:
    """Seconds of repeated calls; all ranks make equally many and start each together."""

    def measure() -> float:
        torch.distributed.barrier()
        began = time.perf_counter()
        function()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter() - began

    slowest = max(exchange(measure()))  # the first call allocates
    repeats = max(3, min(REPEATS, int(2 / slowest)))
    return [measure() for _ in range(repeats)]


def slow_ones(measure: Callable[[], dict[Hashable, list[float]]]) -> tuple[dict, dict]:
    """The best seconds of each, and of those slow in every attempt the ratio to the faster ones."""
    found = None
    for _ in range(ATTEMPTS):
        best = {name: min(seconds) for name, seconds in measure().items()}
        reference = sorted(best.values())[len(best) // 4]  # one slow host slows many links
        ratios = {name: value / reference for name, value in best.items()}
        found = {name: ratios[name] for name in found or ratios if ratios[name] > SLOW}
        if not found:
            break
    return best, found


def neighbours(size: int, local_size: int) -> dict[str, list[tuple[int, int]]]:
    """Links (sender, receiver): around the ranks of each host, and around the hosts."""
    on_host, across = [], []
    for rank in range(size):
        host, place = divmod(rank, local_size)
        on_host.append((rank, host * local_size + (place + 1) % local_size))
        across.append((rank, (rank + local_size) % size))
    found = {"on a host": on_host} if local_size > 1 else {}
    return found | ({"across hosts": across} if size > local_size else {})


def transfer(sender: int, receiver: int, size: int, device: torch.device) -> list[float]:
    """Seconds of repeated transfers of `size` bytes over a link. All ranks of the world call it."""
    tensor = torch.zeros(size // 4, device=device)
    operations = []
    if torch.distributed.get_rank() == sender:
        operations.append(P2POp(torch.distributed.isend, tensor, receiver))
    elif torch.distributed.get_rank() == receiver:
        operations.append(P2POp(torch.distributed.irecv, tensor, sender))

    def send_or_receive() -> None:
        for work in torch.distributed.batch_isend_irecv(operations) if operations else []:
            work.wait()

    return exchange(times(send_or_receive))[receiver]
