"""--optimizer muon: orthogonalized momentum for the matrices of the blocks, AdamW for the rest.

A matrix is orthogonalized as a whole, so its shards travel to one rank and back in each step, in
bfloat16. It has one float32 slot, where AdamW has two. To remove it, delete this file and its
branch in config.update_rules.
"""

import math

import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from optim import Optimizer, Update, assign_unless, local


class Muon:
    """Orthogonalized momentum (Jordan et al. 2024), for the matrices of hidden layers.

    Updates are scaled to the size of AdamW's (Liu et al. 2025), so that both use one learning rate
    and weight decay. torch.optim.Muon would communicate in each matrix product of sharded DTensors,
    and cannot skip an update without waiting for the device.
    """

    MOMENTUM = 0.95  # as in both papers; --beta1 applies to AdamW's parameters

    @staticmethod
    def takes(name: str, shape: torch.Size, hidden: bool) -> bool:
        """Muon updates the matrices of hidden layers."""
        return hidden and len(shape) == 2

    @staticmethod
    def slots(shape: torch.Size) -> dict[str, torch.Size]:
        """A moving average of the gradient."""
        return {"momentum_buffer": shape}

    @staticmethod
    def update(optimizer: Optimizer, names: list[str], update: Update) -> None:
        """Orthogonalize the momentum of each matrix, and subtract it from the weights."""
        world_size = optimizer.world_size
        matrices = optimizer.parameters
        # The largest first: matrices of one turn then take about the same time
        names = sorted(names, key=lambda name: -matrices[name].numel())
        for start in range(0, len(names), world_size):  # a turn: one matrix for each rank
            turn = names[start : start + world_size]
            directions = [Muon.direction(optimizer, name, update) for name in turn]
            parts = orthogonalize_turn([matrices[name] for name in turn], directions, world_size)
            for name, orthogonal in zip(turn, parts):
                # The root mean square of an orthogonal matrix is 1 / sqrt(its longer side). AdamW's
                # updates have a root mean square of 0.2 to 0.4.
                scale = 0.2 * math.sqrt(max(matrices[name].shape))
                weight = local(matrices[name])
                decayed = weight * (1 - update.lr * update.weight_decay)
                decayed.add_(orthogonal, alpha=-update.lr * scale)
                assign_unless(update.skip, weight, decayed)

    @staticmethod
    def direction(optimizer: Optimizer, name: str, update: Update) -> Tensor:
        """Update the momentum; return this rank's part of the Nesterov momentum, in bfloat16."""
        gradient = local(optimizer.parameters[name].grad) / update.divisor
        buffer = local(optimizer.slots["momentum_buffer"][name])
        momentum = buffer.lerp(gradient, 1 - Muon.MOMENTUM)
        assign_unless(update.skip, buffer, momentum)
        return gradient.lerp_(momentum, Muon.MOMENTUM).bfloat16()


def orthogonalize_turn(matrices: list, directions: list, world_size: int) -> list[Tensor]:
    """Orthogonalize at most world_size directions, each on one rank.

    `directions` and the result are this rank's parts; direction k is distributed like matrix k. If
    there are R replicas, replica k % R collects direction k on one of its ranks, which returns to
    each of its ranks their part of the result. Each rank then broadcasts its part to the other
    replicas. For example, 2 replicas x 2 shards and directions A to D, whose shards are A0, A1 ...:

        rank                             0             1             2             3
        directions                  A0 B0 C0 D0   A1 B1 C1 D1   A0 B0 C0 D0   A1 B1 C1 D1
        all_to_all in a replica        A0 A1         C0 C1         B0 B1         D0 D1
        orthogonalize                    A             C             B             D
        all_to_all in a replica        A0 C0         A1 C1         B0 D0         B1 D1
        broadcast                   A0 B0 C0 D0   A1 B1 C1 D1   A0 B0 C0 D0   A1 B1 C1 D1
    """
    across, within = groups_of(matrices[0])
    replica, replicas = (across.rank(), across.size()) if across else (0, 1)
    rank, size = (within.rank(), within.size()) if within else (0, 1)
    ranks = world_size // replicas  # per replica; equals `size` unless the group is the world
    start = rank - rank % ranks  # the replica's first rank in the group
    own = slice(replica, None, replicas)  # what this replica orthogonalizes, one matrix per rank
    owners = slice(start, start + len(matrices[own]))

    nothing = directions[0].new_empty(0)
    sent, collected = [nothing] * size, [nothing] * size  # to each rank, from each rank
    sent[owners] = directions[own]
    if rank < owners.stop:
        matrix = matrices[own][rank - start]
        full = nothing.new_empty(matrix.shape)
        collected[start : start + ranks] = parts_of_ranks(full, matrix)[:ranks]
    for part, value in zip(collected, all_to_all(sent, like=collected, group=within)):
        part.copy_(value)
    if rank < owners.stop:
        full.copy_(orthogonalize(full))

    parts = [direction.new_empty(direction.shape) for direction in directions]
    parts[own] = all_to_all(collected, like=sent, group=within)[owners]
    # One broadcast at a time: two in flight corrupted the heap with gloo.
    for k, part in enumerate(parts):
        if replicas > 1 and part.numel() > 0:
            torch.distributed.broadcast(part, group=across, group_src=k % replicas)
    return parts


def groups_of(matrix: Tensor) -> tuple:
    """This rank's groups across replicas and within its replica; None if a group has one rank."""
    world = torch.distributed.group.WORLD
    if not isinstance(matrix, DTensor):
        return world, None
    mesh = matrix.device_mesh
    axes = zip(mesh.mesh_dim_names, mesh.shape)
    groups = {axis: mesh.get_group(axis) for axis, size in axes if size > 1}
    across = groups.pop("dp_replicate", None)
    # No group spans dp_shard and tp: use the world, in which other replicas send nothing.
    return across, world if len(groups) > 1 else next(iter(groups.values()), None)


def all_to_all(tensors: list[Tensor], like: list[Tensor], group) -> list[Tensor]:
    """Send tensor r to rank r; return the tensors from all ranks, with the shapes of `like`."""
    if group is None:
        return tensors
    sent = torch.cat([tensor.flatten() for tensor in tensors])
    sent_sizes = [tensor.numel() for tensor in tensors]
    received_sizes = [tensor.numel() for tensor in like]
    received = sent.new_empty(sum(received_sizes))
    torch.distributed.all_to_all_single(received, sent, received_sizes, sent_sizes, group)
    parts = received.split(received_sizes)
    return [part.view(tensor.shape) for part, tensor in zip(parts, like)]


def parts_of_ranks(full: Tensor, like: Tensor) -> list[Tensor]:
    """Return a view of each rank's part of `full`, distributed as `like` is. Parts may be empty."""
    parts = [full]
    axes = list(zip(like.placements, like.device_mesh.shape)) if isinstance(like, DTensor) else []
    # From the last axis to the first: tp, the last axis, splits first, and FSDP splits tp's parts.
    for placement, size in reversed(axes):
        parts = [chunk(part, placement, i, size) for i in range(size) for part in parts]
    return parts


def chunk(x: Tensor, placement: Placement, i: int, size: int) -> Tensor:
    """The part of x on rank i of `size`: x if it is replicated, otherwise a chunk (torch.chunk)."""
    if placement.is_replicate():
        return x
    rows = x.movedim(placement.dim, 0)
    length = math.ceil(len(rows) / size)
    return rows[i * length : (i + 1) * length].movedim(0, placement.dim)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate U V^T for a matrix U S V^T in five Newton-Schulz steps; S is then 0.7 to 1.2.

    With the coefficients of Jordan et al., singular values near 0 grow by a factor of 3.4 per step.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if is_tall else matrix  # (m, n), m <= n
    x = x / x.norm().clamp(min=1e-7)  # singular values of at most 1
    for _ in range(5):
        gram = x @ x.mT  # (m, m)
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)  # (m, m)
        x = torch.addmm(x, polynomial, x, beta=3.4445)  # (m, n)
    return x.mT if is_tall else x
