"""Check that the ranks agree on weights; stop them together."""

import itertools
import signal
import socket
from collections.abc import Iterable

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

import dist
import optim


def format_ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 1 and 2`."""
    numbers = " and ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


class StopRequest:
    """Tells all ranks in the same step, within two steps, that one of them got a signal to stop.

    The constructor installs signal handlers if `handle_signals`; they only set a flag. A rank that
    got a signal tells rank 0 through the store. In each step, rank 0 broadcasts whether there is a
    signal. The broadcast and a barrier run during the next step, in log2(N) hops, in a separate
    gloo group: devices do not wait, and a host waits only for hosts more than one step behind.
    """

    def __init__(self, world: dist.World, handle_signals: bool = True):
        self.rank = world.rank
        self.store = world.store
        self.group = torch.distributed.new_group(backend="gloo", timeout=world.timeout)
        self.flag = torch.zeros(1)
        self.in_flight: list[torch.distributed.Work] = []
        self.signalled = False
        if not handle_signals:
            return
        # Ctrl-C; torchrun and schedulers; schedulers, before a time limit; a closing terminal
        to_the_limit = (signal.SIGUSR1, signal.SIGUSR2)
        for number in (signal.SIGINT, signal.SIGTERM, *to_the_limit, signal.SIGHUP):
            # Under nohup, SIGHUP is ignored: then the run outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame) -> None:
        self.signalled = True
        if not dist.is_torchruns():  # torchrun forwards the Ctrl-C that the terminal sends as well
            # Without torchrun, a second Ctrl-C ends the run at once.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def poll(self) -> bool:
        """Pass on this rank's signal; return whether rank 0 knew of any signal one step ago."""
        self.wait()
        any_rank = bool(self.flag.numpy()[0])  # not .item(), which --profile counts as a host sync
        if self.signalled:
            self.store.set("stop requested", "")
        is_requested = self.rank == 0 and self.store.check(["stop requested"])
        self.flag = torch.tensor([float(is_requested)])
        broadcast = torch.distributed.broadcast(self.flag, 0, self.group, async_op=True)
        barrier = torch.distributed.barrier(self.group, async_op=True)
        self.in_flight = [broadcast, barrier]
        return any_rank

    def agree(self) -> bool:
        """Return whether any rank got a signal. The hosts wait for each other, not for devices."""
        self.wait()
        flag = torch.tensor([float(self.signalled)])
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, self.group)
        return bool(flag[0])

    def wait(self) -> None:
        """Wait until the broadcast and the barrier are done."""
        for work in self.in_flight:
            work.wait()


def compare_replicas(weights: dict[str, Tensor]) -> str | None:
    """Describe the first weight whose bits differ between ranks with the same part, if any does.

    All ranks call it together. For each weight, ranks with the same part all_reduce the maximum and
    the minimum of the sums of its bits. Only if these differ, all ranks gather all sums.

    The device adds the elements as integers, in any order. A sum changes if one bit changes. It
    does not if changes cancel: two elements are exchanged, or a bit is set in one element and
    cleared in another. Factors by position would detect that, but need a copy of the weight.
    """
    parts, groups, sums = [], [], []  # one entry for each of n weights
    for weight in weights.values():
        copies, split = [torch.distributed.group.WORLD], []  # groups with the same part, or not
        if isinstance(weight, DTensor):
            axes = list(zip(weight.device_mesh.get_all_groups(), weight.placements))
            copies = [group for group, placement in axes if placement.is_replicate()]
            split = [group for group, placement in axes if not placement.is_replicate()]
        groups.append(copies)
        parts.append(tuple(group.rank() for group in split))  # this rank's place on these axes
        bits = optim.local(weight).view(torch.int32)
        sums.append(bits.sum(dtype=torch.int32))  # modulo 2^32; int64 would copy the weight
    sums = torch.stack(sums)  # (n,)
    differs = torch.zeros_like(sums[0])
    for group in dict.fromkeys(itertools.chain(*groups)):
        extremes = torch.stack((sums, ~sums))  # (2, n); the minimum of sums is ~(maximum of ~sums)
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group)
        is_copied = torch.tensor([group in copies for copies in groups], device=sums.device)
        differs |= (is_copied & (extremes[0] != ~extremes[1])).any()
    torch.distributed.all_reduce(differs, torch.distributed.ReduceOp.MAX)
    if not differs:
        return None
    held = socket.gethostname(), list(zip(parts, sums.tolist()))
    return describe_difference(weights, dist.on_all_ranks(lambda: held))


def describe_difference(names: Iterable[str], hosts_and_sums: Iterable[tuple]) -> str | None:
    """Describe the first of the weights `names` whose bits differ between ranks with the same part.

    `hosts_and_sums` contains for each rank its host and, for each weight, (part, sum of its bits).
    """
    hosts, sums_of_ranks = zip(*hosts_and_sums)
    for name, sums in zip(names, zip(*sums_of_ranks)):
        parts: dict[tuple, dict[int, list[int]]] = {}  # part -> sum -> the ranks that have it
        for rank, (part, total) in enumerate(sums):
            parts.setdefault(part, {}).setdefault(total, []).append(rank)
        for ranks_by_sum in parts.values():
            if len(ranks_by_sum) > 1:
                fewest, *_, most = sorted(ranks_by_sum.values(), key=len)
                return (
                    f"{name} has different bits on {format_ranks(fewest)} ({hosts[fewest[0]]}) "
                    f"than on rank {most[0]} ({hosts[most[0]]}), which holds the same part of it"
                )
    return None
