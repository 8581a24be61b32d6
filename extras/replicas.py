"""--check_replicas: ranks with the same part of a weight must have the same bits.

A device that computes wrongly, now and then, gives its replica other weights than the others have.
Compared at the start and before each save, they tell which rank it is, and no checkpoint stores
them. It costs a pass over the weights and two small all_reduces per save. To remove it, delete
this file and train.compare_replicas.
"""

import itertools
import socket
from collections.abc import Iterable

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

import dist
import optim
from errors import format_ranks


def find_difference(weights: dict[str, Tensor]) -> str | None:
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
