"""The ranks agree: at start on flags, code, data, weights and sequences, later on a stop."""

import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def format_ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 1 and 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"


def end_on_early_signals(program: str) -> None:
    """Until there is a StopRequest, end this process on a signal, with a line on rank 0.

    A thread does: handlers run in the main thread, which a rendezvous may block for minutes.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writer)

    def wait() -> None:
        while (number := os.read(reader, 1)[0]) == signal.SIGINT:
            pass  # KeyboardInterrupt removes what is unfinished
        if os.environ.get("RANK", "0") == "0":
            name = signal.Signals(number).name
            print(f"{program}: stopped by {name} before its first step", file=sys.stderr)
        os._exit(128 + number)

    threading.Thread(target=wait, daemon=True).start()


class StopRequest:
    """Whether any rank got a signal to stop, or is late; all ranks learn it one step later.

    Construction installs signal handlers, which only set a flag. The all_reduce of a step runs
    during the next step, on CPU tensors and a gloo group of its own: devices take no part, and a
    host waits only for another more than a step behind. All ranks leave the loop in the same step.
    """

    def __init__(self, timeout: timedelta):
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.flag = torch.zeros(1)
        self.in_flight: dist.Work | None = None
        self.signalled = False
        signal.set_wakeup_fd(-1)  # of end_on_early_signals
        # Ctrl-C; torchrun and schedulers; Slurm, ahead of its limit; a terminal that closes
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            # nohup has SIGHUP ignored: then the run outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame) -> None:
        self.signalled = True
        if "RANK" not in os.environ:  # torchrun forwards the Ctrl-C that the terminal sends as well
            # Without torchrun, a second Ctrl-C ends the run at once.
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self, is_late: bool) -> bool:
        """Send whether this rank must stop; return whether any rank had to a step ago."""
        self.wait()
        any_rank = self.flag.numpy()[0] > 0  # not .item(), which --profile counts as a host sync
        self.flag = torch.tensor([float(self.signalled or is_late)])
        self.in_flight = dist.all_reduce(self.flag, group=self.group, async_op=True)
        return any_rank

    def wait(self) -> None:
        """Wait until no all_reduce is in flight."""
        if self.in_flight:
            self.in_flight.wait()


class RankMismatch(ValueError):
    """Ranks differ in flags, code or data, in a shard, or in who reads what."""

    exit_status = 2


def check_ranks_agree(
    mesh: DeviceMesh,
    must_match: dict[str, object],
    weights: Iterable[Tensor],
    first_indices: Iterable[int],
) -> None:
    """Check before the first step, with one all_gather, that the ranks form one run.

    All ranks must have equal values in `must_match`. Ranks with the same part of `weights`, the
    parameters, must have the same bits. The ranks of a tp group must read the same `first_indices`,
    the sequences of their first step, and no other rank may read any of them. Raises RankMismatch
    on every rank.
    """
    *dp_coordinates, _ = mesh.get_coordinate()
    tp_group = tuple(dp_coordinates)
    first_indices = list(first_indices)
    # (kind, name) -> a value that must be the same on every rank that has the key
    own = {("value", name): value for name, value in must_match.items()}
    own |= {("weights", part): total for part, total in sum_weights(weights).items()}
    own["group", tp_group] = first_indices
    own |= {("reader", index): tp_group for index in first_indices}
    claims: list = [None] * dist.get_world_size()
    dist.all_gather_object(claims, own)
    first_ranks: dict[tuple, int] = {}  # the first rank that has a key
    for rank, claim in enumerate(claims):
        for key, value in claim.items():
            first = first_ranks.setdefault(key, rank)
            if value != claims[first][key]:
                raise_mismatch(claims, key, first, rank)


def raise_mismatch(claims: list[dict], key: tuple, first: int, rank: int) -> NoReturn:
    """Explain that two ranks have different values for a key."""
    kind, name = key
    both = format_ranks([first, rank])
    if kind == "weights":
        raise RankMismatch(f"{both} hold the same part of the model, but with different weights")
    if kind == "group":
        raise RankMismatch(f"{both} are one tp group, but read different sequences")
    if kind == "reader":
        raise RankMismatch(f"{both} both read sequence {name}: each would train on it")
    value = claims[rank][key]
    others = [other for other, claim in enumerate(claims) if claim.get(key) == value]
    raise RankMismatch(
        f"{name} is {claims[first][key]} on rank {first} and {value} on {format_ranks(others)}: "
        "start all ranks with the same flags, code and data"
    )


def sum_weights(weights: Iterable[Tensor]) -> dict[tuple, int]:
    """Sum the bits of the local weights as integers: exact in any order of summation."""
    sums: Counter = Counter()  # one for each way to cut a parameter: only dp_shard cuts norms
    for weight in weights:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        bits = local.detach().view(torch.int32)
        sums[shard_coordinates(weight)] += int(bits.sum(dtype=torch.int64))
    return dict(sums)


def shard_coordinates(weight: Tensor) -> tuple:
    """Return which part of a weight this rank holds: (axis, rank) for each axis that cuts it."""
    if not isinstance(weight, DTensor):
        return ()
    mesh = weight.device_mesh
    axes = zip(mesh.mesh_dim_names, mesh.get_coordinate(), weight.placements)
    return tuple((axis, rank) for axis, rank, placement in axes if not placement.is_replicate())
