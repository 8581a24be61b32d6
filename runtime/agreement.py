"""The ranks agree: at start on flags, code, data, weights and sequences, later on a stop."""

import hashlib
import math
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed
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

    Construction installs signal handlers, unless told not to; they only set a flag. The all_reduce
    of a step runs during the next step, on CPU tensors and a gloo group of its own: devices take no
    part, and a host waits only for another more than a step behind. All ranks leave the loop in the
    same step.
    """

    def __init__(self, timeout: timedelta, handle_signals: bool = True):
        self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self.flag = torch.zeros(1)
        self.in_flight: torch.distributed.Work | None = None
        self.signalled = False
        if not handle_signals:
            return
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
        self.in_flight = torch.distributed.all_reduce(self.flag, group=self.group, async_op=True)
        return any_rank

    def wait(self) -> None:
        """Wait until no all_reduce is in flight."""
        if self.in_flight:
            self.in_flight.wait()


class TimeLimit:
    """--time_limit: when to stop, so that a last save ends in time."""

    def __init__(self, seconds: float):
        self.deadline = time.monotonic() + (seconds or math.inf)
        self.last_call: float | None = None
        self.longest = 0.0  # seconds from call to call

    def is_near(self, save_seconds: float) -> bool:
        """Whether to stop after this step. Call it after each.

        Leaves twice the longest time that a step has taken, with its evaluation and save, and twice
        what a save takes that goes on beside the steps.
        """
        now = time.monotonic()
        if self.last_call is not None:  # the first step may have compiled
            self.longest = max(self.longest, now - self.last_call)
        self.last_call = now
        return now + 2 * (self.longest + save_seconds) > self.deadline


class RankMismatch(ValueError):
    """Ranks differ in flags, code or data, in a shard, or in who reads what."""

    exit_status = 2


def local_claims(
    mesh: DeviceMesh,
    must_match: dict[str, object],
    weights: Iterable[Tensor],
    first_indices: Iterable[int],
) -> dict[tuple, object]:
    """What this rank says of itself: (kind, name) -> a value that all ranks with the key share.

    All ranks must have equal values in `must_match`, and the same code. Ranks with the same part of
    `weights`, the parameters, must have the same bits. The ranks of a tp group must read the same
    `first_indices`, the sequences of their first step, and no other rank may read any of them.
    """
    *dp_coordinates, _ = mesh.get_coordinate()
    tp_group = tuple(dp_coordinates)
    first_indices = list(first_indices)
    claims = {("value", name): value for name, value in must_match.items()}
    claims["value", "the code"] = source_hash()
    claims |= {("weights", part): total for part, total in sum_weights(weights).items()}
    claims["group", tp_group] = first_indices
    claims |= {("reader", index): tp_group for index in first_indices}
    return claims


def compare_claims(claims: list[dict]) -> None:
    """Check before the first step that the ranks form one run. Raises RankMismatch on every rank.

    `claims` has the `local_claims` of all ranks.
    """
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


def source_hash() -> str:
    """Hash the Python files of a run and their paths."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for pattern in ("*.py", "runtime/*.py", "text/*.py"):
        for path in sorted(root.glob(pattern)):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


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
