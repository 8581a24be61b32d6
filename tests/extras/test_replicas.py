"""Copies of a weight that differ between ranks are found, and named with their ranks and hosts."""

import re

import torch
from core.conftest import pool  # noqa: F401
from core.test_mesh import Sent
from torch.distributed.tensor import DTensor, Replicate, Shard

import dist
from extras.replicas import describe_difference, find_difference


def test_the_error_names_the_replica_that_differs():
    """Ranks 0 to 2 hold part 0 of the second weight, rank 3 part 1."""
    a_sums, b_parts, b_sums = [9, 9, 9, 9], [0, 0, 0, 1], [5, 5, 6, 7]
    ranks = []
    for host, a, part, b in zip("uvwx", a_sums, b_parts, b_sums, strict=True):
        ranks.append((host, [((), a), ((part,), b)]))
    line = "b has different bits on rank 2 (w) than on rank 0 (u), which holds the same part of it"
    assert describe_difference(["a", "b"], ranks) == line
    assert describe_difference(["a"], ranks) is None


def gathers_and_line(weights: dict) -> tuple[int, str | None]:
    """Return how often ranks gathered to compare the weights, and the difference."""
    with Sent() as sent:
        line = find_difference(weights)
    return sum(n for (kind, _), n in sent.messages.items() if kind == "allgather"), line


def compare_before_and_after_a_bit_flips() -> list[tuple[int, str | None]]:
    """A bit of rank 3 flips. Ranks 1 and 3 hold the same half of the second weight."""
    world = dist.start("cpu")
    mesh = dist.make_mesh(world, (2, 2, 1))
    part = torch.full((3,), 1.0 + world.rank % 2)
    placements = [Replicate(), Shard(0)]
    split = DTensor.from_local(part, mesh["dp_replicate", "dp_shard"], placements)
    weights = {"whole": torch.ones(2), "split": split}
    before = gathers_and_line(weights)
    part.view(torch.int32)[1] += world.rank == 3
    return [before, gathers_and_line(weights)]


def test_replicas_are_gathered_only_if_two_differ(pool):  # noqa: F811
    for before, (gathers, line) in pool(4, compare_before_and_after_a_bit_flips):
        assert before == (0, None)
        assert gathers > 0
        assert re.match(r"split has different bits on rank [13] \(.*\) than on rank [13] \(", line)
