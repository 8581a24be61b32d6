"""Shared by bench and check: commands that run at the same time, and the links between ranks.

torchrun ... -m tools.measuring.harness FILE writes the bandwidth within and between hosts, as JSON.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import torch
import torch.distributed

import metrics

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


class CannotMeasure(RuntimeError):
    """This machine lacks something that the measurement needs."""

    exit_status = 2


class RunFailed(RuntimeError):
    """A measured command failed; `output` is the end of what it printed."""

    exit_status = 1

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output[-4000:]


def run_all(
    commands: list[list[str]], out: Path, cwd: Path | None = None, **variables: str
) -> list[str]:
    """Run commands at the same time; return what each printed. Number i prints to `out`-i.txt.

    If one fails, or at a signal, the others are terminated: they might wait for it forever. Raises
    RunFailed.
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
            raise RunFailed(f"{' '.join(command)} failed", text)
    return printed


def training_rows(out: Path) -> list[dict]:
    return [row for row in metrics.read_log(out / "metrics.jsonl") if "loss" in row]


# --------------------------------------------------------------------------------------------------
# The ranks of a process group, and the links between them

# Slow means more than 1 + SPREADS x the spread of repeated measurements times as long as the faster
# ones, in each of ATTEMPTS measurements.
SPREADS = 4
LEAST_SPREAD = 0.05
ATTEMPTS = 3
REPEATS = 10  # at most; fewer if they take more than two seconds
BURST = 4  # collectives in a row: an idle link lets 256 kB through at once
LINK_BYTES = 1 << 21  # FSDP gathers units of about 1 MB


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
        seconds = measure()
        best = {name: min(values) for name, values in seconds.items()}
        reference = sorted(best.values())[len(best) // 4]  # one slow host slows many links
        spreads = [statistics.median(values) / min(values) - 1 for values in seconds.values()]
        limit = 1 + SPREADS * max(LEAST_SPREAD, statistics.median(spreads))
        ratios = {name: value / reference for name, value in best.items()}
        found = {name: ratios[name] for name in found or ratios if ratios[name] > limit}
        if not found:
            break
    return found


def neighbours(hosts: int, local_size: int, between: bool) -> list[list[tuple[int, int]]]:
    """Pairs of ranks, in rounds that use each rank at most once.

    Neighbours on a host, or ranks in the same place on hosts that are neighbours on a ring.
    """
    size = hosts * local_size
    rounds: list[list] = [[], [], []]
    for rank in range(size):
        host, place = divmod(rank, local_size)
        if not between and place + 1 < local_size:
            rounds[place % 2].append((rank, rank + 1))
        if between and (hosts > 2 or host + 1 < hosts):
            closes_odd_ring = host == hosts - 1 and hosts % 2 == 1
            number = 2 if closes_odd_ring else host % 2
            rounds[number].append((rank, (rank + local_size) % size))
    return [pairs for pairs in rounds if pairs]


def transfers(
    rounds: list[list[tuple[int, int]]], size: int, device: torch.device
) -> dict[tuple[int, int], list[float]]:
    """Seconds for `size` bytes to reach the other rank of a pair and be answered."""
    payload = torch.zeros(size // 4, device=device)
    answer = torch.zeros(1, device=device)
    local = {}
    for pairs in rounds:
        for turn in (pairs, [(b, a) for a, b in pairs]):
            mine = [pair for pair in turn if torch.distributed.get_rank() in pair]

            def transfer(mine=mine) -> None:
                for sender, receiver in mine:
                    if sender == torch.distributed.get_rank():
                        torch.distributed.send(payload, receiver)
                        torch.distributed.recv(answer, receiver)
                    else:
                        torch.distributed.recv(payload, sender)
                        torch.distributed.send(answer, sender)

            seconds = times(transfer)
            local |= {pair: seconds for pair in mine if pair[0] == torch.distributed.get_rank()}
    return {pair: seconds for found in exchange(local) for pair, seconds in found.items()}


def slow_links(names: list[str], local_size: int, size: int, device: torch.device) -> list[str]:
    """Send `size` bytes; return lines that name slow links, or the end that they all share.

    Links within hosts and links between hosts are judged separately.
    """
    lines = []
    for between, unit in ((False, 1), (True, local_size)):
        rounds = neighbours(len(names) // local_size, local_size, between)
        slow = slow_ones(lambda rounds=rounds: transfers(rounds, size, device)) if rounds else {}
        ends = [{rank // unit for rank in pair} for pair in slow]
        common = set.intersection(*ends) if ends else set()
        if len(common) == 1:
            end = f"{'the host of ' if between else ''}{names[common.pop() * unit]}"
            lines.append(f"slow: all links of {end}, {max(slow.values()):.1f} x as long as others")
            continue
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
    """Bytes per second that a rank sends, as nccl-tests defines it; inf for a single rank."""
    if ranks == 1:
        return math.inf
    passes = 2 if kind == "all_reduce" else 1
    return passes * (ranks - 1) / ranks * size / seconds


def measure_links(out: str) -> None:
    """Write the bus bandwidth of gloo's all_reduce, [within a host, between hosts], as JSON."""
    torch.distributed.init_process_group("gloo")
    within, _ = torch.distributed.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))
    found = []
    for group in (within, torch.distributed.group.WORLD):
        seconds = collectives(LINK_BYTES, group, torch.device("cpu"))["all_reduce"]
        found.append(bus_bandwidth("all_reduce", LINK_BYTES, seconds, group.size()))
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    measure_links(sys.argv[1])
