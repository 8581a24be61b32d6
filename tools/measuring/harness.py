"""Shared by bench and check: commands that run at the same time, and the links between ranks."""

import os
import statistics
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
BURST = 4  # collectives in a row: an idle link lets 256 kB through at once


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


def slow_ones(measure: Callable[[], dict[Hashable, list[float]]]) -> dict[Hashable, float]:
    """Those slow in every attempt, with the ratio of their time to the faster ones'."""
    found = None
    for _ in range(ATTEMPTS):
        best = {name: min(seconds) for name, seconds in measure().items()}
        reference = sorted(best.values())[len(best) // 4]  # one slow host slows many links
        ratios = {name: value / reference for name, value in best.items()}
        found = {name: ratios[name] for name in found or ratios if ratios[name] > SLOW}
        if not found:
            break
    return found


def transfers(
    ring: list[int], size: int, device: torch.device
) -> dict[tuple[int, int], list[float]]:
    """Seconds for `size` bytes from each rank of a ring to the next: (sender, receiver) -> times.

    All ranks of the world call it, each with its ring. Every second rank of a ring sends, then the
    others, so that a slow link holds up no other.
    """
    rank = torch.distributed.get_rank()
    place = ring.index(rank)
    sender, receiver = ring[place - 1], ring[(place + 1) % len(ring)]
    payload, received = torch.zeros(2, size // 4, device=device)
    found = {}
    for turn in range(2):
        operations = []
        if place % 2 == turn:
            operations.append(P2POp(torch.distributed.isend, payload, receiver))
        if ring.index(sender) % 2 == turn:
            operations.append(P2POp(torch.distributed.irecv, received, sender))

        def transfer(operations=operations) -> None:
            for work in torch.distributed.batch_isend_irecv(operations) if operations else []:
                work.wait()

        seconds = times(transfer)
        if ring.index(sender) % 2 == turn:
            found[sender, rank] = seconds
    return {link: seconds for each in exchange(found) for link, seconds in each.items()}


def slow_links(names: list[str], local_size: int, size: int, device: torch.device) -> list[str]:
    """Send `size` bytes around the ranks of each host, and around the hosts; name slow links.

    The two kinds of links are judged separately.
    """
    host, place = divmod(torch.distributed.get_rank(), local_size)
    on_host = range(host * local_size, (host + 1) * local_size)
    lines = []
    for ring in (on_host, range(place, len(names), local_size)):
        if len(ring) == 1:
            continue
        slow = slow_ones(lambda ring=ring: transfers([*ring], size, device))
        for (sender, receiver), ratio in slow.items():
            link = f"the link from {names[sender]} to {names[receiver]}"
            lines.append(f"slow: {link}, {ratio:.1f} x as long as others")
    return lines


def collectives(
    size: int, group: torch.distributed.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """Seconds of each collective of `size` bytes, the median of several bursts.

    All ranks of the world call it, each with its group.
    """
    part = torch.zeros(max(1, size // 4 // group.size()), device=device)
    full = part.repeat(group.size())
    calls = {
        "all_gather": lambda: torch.distributed.all_gather_into_tensor(full, part, group=group),
        "reduce_scatter": lambda: torch.distributed.reduce_scatter_tensor(part, full, group=group),
        "all_reduce": lambda: torch.distributed.all_reduce(full, group=group),
    }
    found = {}
    for kind, call in calls.items():

        def burst(call=call) -> None:
            for _ in range(BURST):
                call()

        found[kind] = statistics.median(times(burst)) / BURST
    return found


def bus_bandwidth(kind: str, size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that a rank sends, as nccl-tests defines it."""
    passes = 2 if kind == "all_reduce" else 1
    return passes * (ranks - 1) / ranks * size / seconds
