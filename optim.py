"""AdamW or Muon, learning-rate schedules, clipping, skipped updates and statistics in one object.

Nothing here waits for the device: norms, decisions and counters are tensors that stay on it, and
the host only queues work. A new optimizer is one class and one entry in OPTIMIZERS, a clipping
strategy one function and one entry in CLIPS, a schedule one entry in SCHEDULES. Their help texts
are in config.py.
"""

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.optim.adamw import adamw

# The name since torch 2.13, which warns of the older one
all_gather_single = getattr(
    torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
)

SPIKE_HISTORY = 128  # updates whose loss and gradient norm a new one is compared with


@dataclass(frozen=True)
class Settings:
    """What an Optimizer reads. train.py passes its flags, which have the same names."""

    lr: float  # peak learning rate
    max_steps: int
    warmup_steps: int = 0
    min_lr: float = 0.0
    schedule: str = "cosine"  # a key of SCHEDULES
    optimizer: str = "adamw"  # a key of OPTIMIZERS
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: str = "norm"  # a key of CLIPS
    max_grad_norm: float = 1.0
    max_grad_norm_ratio: float = 2.0
    # Also skip updates whose loss or gradient norm is more than this many standard deviations
    # above the mean of the last SPIKE_HISTORY (after OLMo-core's SkipStepOptimizer)
    skip_spikes: float | None = None


# --------------------------------------------------------------------------------------------------
# Learning rate

# Height between min_lr (0) and lr (1), at progress x from 0 (the first step after warm-up) to 1
# (the step after the last); `s` is the Settings, where a schedule finds its own parameters.
SCHEDULES: dict[str, Callable[[float, Settings], float]] = {
    "cosine": lambda x, s: 0.5 * (1 + math.cos(math.pi * x)),
    # warm-up, stable, decay: falls only in the last fifth after warm-up (Hu et al. 2024)
    "wsd": lambda x, s: min(1.0, (1 - x) / 0.2),
    "linear": lambda x, s: 1 - x,
    "constant": lambda x, s: 1.0,
}


def learning_rate(step: int, s: Settings) -> float:
    """The learning rate of update `step`, counted from 1. Stateless, so resuming restores nothing.

    Rises linearly to `lr` at step `warmup_steps`, then follows the schedule towards `min_lr`, which
    it would reach at step max_steps + 1.
    """
    if step <= s.warmup_steps:
        return s.lr * step / s.warmup_steps
    progress = (step - 1 - s.warmup_steps) / max(1, s.max_steps - s.warmup_steps)
    return s.min_lr + (s.lr - s.min_lr) * SCHEDULES[s.schedule](min(progress, 1.0), s)


# --------------------------------------------------------------------------------------------------
# Clipping strategies
#
#     clip_x(s, g) -> Clipped
#
# s is the Settings, g the Gradients. The update divides all gradients by `divisor`; a clip by
# parameter writes into g.local and returns 1.
#
# torch._foreach_* launch one kernel for many tensors. They have no public name, but torch.optim and
# torch.nn.utils.clip_grad_norm_ use them, too.


class Gradients(NamedTuple):
    """The n gradients of an update."""

    local: list[Tensor]  # this rank's parts, to scale in place
    norms: Tensor  # (n,) float32: the norm of each full gradient, over all ranks
    numels: Tensor  # (n,) int64: elements of each full gradient
    averages: Tensor  # (n,) float32, saved with the run: what a clip may remember
    skip: Tensor  # 0-d bool: this update is skipped, and `averages` must stay as it is


class Clipped(NamedTuple):
    divisor: Tensor  # 0-d
    clipped: Tensor  # (n,) bool: whether each gradient was clipped


def clip_norm(s: Settings, g: Gradients) -> Clipped:
    """Scale all gradients so that their total norm is at most max_grad_norm (Pascanu et al. 2013).

    AdamW's kernel divides the gradients by the divisor as it reads them: no pass over memory here.
    """
    total_norm = g.norms.norm()
    divisor = ((total_norm + 1e-6) / s.max_grad_norm).clamp(min=1.0)
    return Clipped(divisor, (total_norm > s.max_grad_norm).expand_as(g.norms))


def clip_adaptive(s: Settings, g: Gradients) -> Clipped:
    """Limit each gradient's norm to max_grad_norm_ratio x the moving average of its clipped norms.

    After OLMo's per-parameter clipping (Groeneveld et al. 2024). The average starts at the first
    norm above 0.
    """
    average = torch.where(g.averages > 0, g.averages, g.norms)
    limits = s.max_grad_norm_ratio * average
    factors = (limits / (g.norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(g.local, factors.unbind())
    average = average.lerp(g.norms * factors, 1 - max(s.beta1, s.beta2))
    write(g.averages, average, g.skip)
    return Clipped(torch.ones_like(g.norms[0]), g.norms > limits)


def clip_none(s: Settings, g: Gradients) -> Clipped:
    """Change nothing."""
    return Clipped(torch.ones_like(g.norms[0]), torch.zeros_like(g.norms, dtype=torch.bool))


CLIPS = {"norm": clip_norm, "adaptive": clip_adaptive, "none": clip_none}

# --------------------------------------------------------------------------------------------------
# Parameters on a mesh


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the tensor itself if it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write(tensor: Tensor, value: Tensor, skip: Tensor) -> None:
    """Set a tensor in place, unless `skip`, 0-d bool on the device."""
    tensor.copy_(torch.where(skip, tensor, value))


def num_shards(parameter: Tensor) -> int:
    """How many parts a parameter is split into; 1 if it is replicated."""
    if not isinstance(parameter, DTensor):
        return 1
    axes = zip(parameter.placements, parameter.device_mesh.shape)
    return math.prod(size for placement, size in axes if not placement.is_replicate())


class Sharding:
    """How n parameters are distributed: what a sum over all ranks must know."""

    def __init__(self, parameters: list[nn.Parameter]):
        device = parameters[0].device
        shards = [num_shards(parameter) for parameter in parameters]
        self.world_size = (
            torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        )
        self.is_sharded = max(shards) > 1
        # This many ranks hold each element: a sum over all ranks counts it that many times.
        self.replicas = torch.tensor([self.world_size / n for n in shards], device=device)  # (n,)
        self.numels = torch.tensor([p.numel() for p in parameters], device=device)  # (n,)


def parts_of_ranks(matrix: DTensor) -> list[list[range]]:
    """The rows and columns that each rank of a matrix's mesh holds; some are empty."""
    parts = [[*map(range, matrix.shape)]]
    # From the last axis: FSDP, whose axis is before tp's, splits what tp has left.
    for placement, size in reversed([*zip(matrix.placements, matrix.device_mesh.shape)]):
        parts = [chunk(part, placement, size, i) for i in range(size) for part in parts]
    return parts


def chunk(part: list[range], placement: Placement, size: int, i: int) -> list[range]:
    """What rank i of `size` holds of a part, in chunks like torch.chunk's."""
    part = list(part)
    if not placement.is_replicate():
        side = part[placement.dim]
        length = math.ceil(len(side) / size)
        part[placement.dim] = side[i * length : (i + 1) * length]
    return part


# --------------------------------------------------------------------------------------------------
# Optimizers
#
# Each is a class of three functions:
#
#     takes(name, shape, hidden) -> bool    whether it updates a parameter; AdamW updates the others
#     slots(shape) -> {slot: shape}         its state for a parameter of this shape, in float32
#     update(optimizer, names, u)
#
#     hidden        is_hidden(name), by the Optimizer's argument: names differ from model to model
#     optimizer     the Optimizer: optimizer.settings; optimizer.parameters[name], a DTensor on a
#                   mesh; its .grad, distributed like it; and optimizer.slots[slot][name]
#     names         parameters that have a gradient
#     u             the Update: how large, and whether at all
#
# A slot with the shape of its parameter is distributed like it; any other is full on every rank.
# Slots begin as zeros; those of shape () are views of one tensor, as which a checkpoint holds them.
# Checkpoints, statistics and the memory estimate know slots only through slots(). A skipped update
# must leave weights and slots unchanged, as `write` does, and the host must not read `skip`.


class Update(NamedTuple):
    """One update of some parameters."""

    step: int  # counted from 1
    lr: float
    weight_decay: float
    divisor: Tensor  # 0-d, on the device: divide the gradients by it
    skip: Tensor  # 0-d bool, on the device: change nothing


class AdamW:
    """AdamW (Loshchilov & Hutter 2019), by torch's fused kernel.

    The kernel divides by `grad_scale` and does nothing if `found_inf` is 1, which is also how
    torch.amp.GradScaler skips updates without waiting for the device.
    """

    @staticmethod
    def takes(name: str, shape: torch.Size, hidden: bool) -> bool:
        return True

    @staticmethod
    def slots(shape: torch.Size) -> dict[str, torch.Size]:
        return {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}

    @staticmethod
    def update(optimizer: "Optimizer", names: list[str], u: Update) -> None:
        s, slots = optimizer.settings, optimizer.slots
        parameters = [optimizer.parameters[name] for name in names]
        # Local parts: the kernel takes tensors of a single mesh, and under tp the norms are on a
        # smaller one.
        adamw(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],
            [local(slots["exp_avg"][name]) for name in names],
            [local(slots["exp_avg_sq"][name]) for name in names],
            max_exp_avg_sqs=[],
            state_steps=[slots["step"][name] for name in names],
            fused=True,
            grad_scale=u.divisor,
            found_inf=u.skip.float(),
            amsgrad=False,
            beta1=s.beta1,
            beta2=s.beta2,
            lr=u.lr,
            weight_decay=u.weight_decay,
            eps=s.eps,
            maximize=False,
        )


class Muon:
    """Orthogonalized momentum (Jordan et al. 2024), for the matrices of hidden layers.

    Updates have the size of AdamW's (Liu et al. 2025), so that one learning rate and one weight
    decay serve both. Each rank orthogonalizes its share of the matrices. torch.optim.Muon
    multiplies the shards of DTensors, and no tensor can skip or clip its step.
    """

    MOMENTUM = 0.95  # as in both papers; --beta1 applies to AdamW's parameters

    @staticmethod
    def takes(name: str, shape: torch.Size, hidden: bool) -> bool:
        return hidden and len(shape) == 2

    @staticmethod
    def slots(shape: torch.Size) -> dict[str, torch.Size]:
        return {"momentum_buffer": shape}

    @staticmethod
    def update(optimizer: "Optimizer", names: list[str], u: Update) -> None:
        matrices = [optimizer.parameters[name] for name in names]
        directions = (Muon.direction(optimizer, name, u) for name in names)
        parts = orthogonalize_shares(matrices, directions, optimizer.sharding.world_size)
        for matrix, orthogonal in zip(matrices, parts):
            # The root mean square of an orthogonal matrix is 1 / sqrt(its longer side), that of an
            # AdamW update 0.2 to 0.4.
            scale = 0.2 * math.sqrt(max(matrix.shape))
            weight = local(matrix)
            decayed = weight * (1 - u.lr * u.weight_decay)
            write(weight, decayed.add_(orthogonal, alpha=-u.lr * scale), u.skip)

    @staticmethod
    def direction(optimizer: "Optimizer", name: str, u: Update) -> Tensor:
        """Nesterov momentum, this rank's part."""
        grad = local(optimizer.parameters[name].grad) / u.divisor
        buffer = local(optimizer.slots["momentum_buffer"][name])
        momentum = buffer.lerp(grad, 1 - Muon.MOMENTUM)
        write(buffer, momentum, u.skip)
        return grad.lerp_(momentum, Muon.MOMENTUM)


def orthogonalize_shares(
    matrices: list[Tensor], directions: Iterable[Tensor], world_size: int
) -> list[Tensor]:
    """Orthogonalize n directions, distributed like `matrices`, each on one rank of the world.

    Takes and returns this rank's parts. The ranks that together hold each matrix once, a replica,
    exchange the parts of their shares; then replicas gather one another's results.
    """
    replicas, group = world_size, None
    if isinstance(matrices[0], DTensor):
        mesh = matrices[0].device_mesh  # replicas first, as FSDP has them
        group = mesh.get_group(0)
        replicates = all(matrix.placements[0].is_replicate() for matrix in matrices)
        replicas = mesh.size(0) if replicates else 1
    ranks = world_size // replicas  # of a replica
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    shares = deal(matrices, world_size, ranks)

    # This rank's parts in bfloat16: a row for each replica, all of one length, which a gather needs
    numels = [local(matrix).numel() for matrix in matrices]
    orders = [[*chain(*shares[first : first + ranks])] for first in range(0, world_size, ranks)]
    length = max(sum(numels[i] for i in order) for order in orders)
    rows = local(matrices[0]).new_empty((replicas, length), dtype=torch.bfloat16)
    parts = {}
    for row, order in zip(rows, orders):
        for i in order:
            parts[i] = row[: numels[i]].view(local(matrices[i]).shape)
            row = row[numels[i] :]
    for i, direction in enumerate(directions):
        parts[i].copy_(direction)

    row = rows[rank // ranks]
    if ranks > 1:
        elements = [sum(numels[i] for i in share) for share in shares]
        exchange(row, elements, [matrices[i] for i in shares[rank]], ranks)
    else:
        for i in shares[rank]:
            parts[i].copy_(orthogonalize(parts[i]))
    if replicas > 1:
        all_gather_single(rows.view(-1), row, group)
    return [parts[i] for i in range(len(matrices))]


def deal(matrices: list[Tensor], world_size: int, ranks: int) -> list[list[int]]:
    """Which matrices each rank orthogonalizes: the largest first, each goes where FLOPs are fewest.

    Of ranks with as many, first to one of each replica, for rows of similar length.
    """
    flops = [min(m.shape) ** 2 * (2 * max(m.shape) + min(m.shape)) for m in matrices]
    turns = [first + i for i in range(ranks) for first in range(0, world_size, ranks)]
    loads = [(0, turn) for turn in range(world_size)]  # a heap
    shares = [[] for _ in turns]
    for i in sorted(range(len(matrices)), key=lambda i: -flops[i]):
        load, turn = loads[0]
        heapq.heapreplace(loads, (load + flops[i], turn))
        shares[turns[turn]].append(i)
    return shares


def exchange(row: Tensor, elements: list[int], matrices: list[Tensor], ranks: int) -> None:
    """Collect this rank's share of the matrices, orthogonalize them, and send the parts back.

    Of `row`, elements[j] are parts of the share of rank j of the world. One collective after the
    other: two in flight under gloo corrupt the heap.
    """
    first = torch.distributed.get_rank() // ranks * ranks  # of this replica
    sent, received, sizes = [0] * len(elements), [0] * len(elements), []
    places = [parts_of_ranks(matrix)[first : first + ranks] for matrix in matrices]
    for i in range(ranks):
        of_rank = [math.prod(map(len, place[i])) for place in places]
        sent[first + i] = elements[first + i]
        received[first + i] = sum(of_rank)
        sizes += of_rank
    outgoing, incoming = row[: sum(sent)], row.new_empty(sum(received))
    torch.distributed.all_to_all_single(incoming, outgoing, received, sent)
    pieces = incoming.split(sizes)  # by rank, then matrix
    for k, matrix in enumerate(matrices):
        full = row.new_empty(matrix.shape)
        views = [full[r.start : r.stop, c.start : c.stop] for r, c in places[k]]
        of_matrix = [p.view(v.shape) for p, v in zip(pieces[k :: len(matrices)], views)]
        torch._foreach_copy_(views, of_matrix)
        full.copy_(orthogonalize(full))
        torch._foreach_copy_(of_matrix, views)
    torch.distributed.all_to_all_single(outgoing, incoming, sent, received)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Approximate U V^T of a matrix U S V^T by five Newton-Schulz steps: S becomes 0.7 to 1.2.

    With the coefficients of Jordan et al., singular values near 0 grow by 3.4 a step.
    """
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.mT if is_tall else matrix  # (m, n), m <= n
    x = x / x.norm().clamp(min=1e-7)  # singular values of at most 1
    for _ in range(5):
        gram = x @ x.mT  # (m, m)
        polynomial = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)  # (m, m)
        x = torch.addmm(x, polynomial, x, beta=3.4445)  # (m, n)
    return x.mT if is_tall else x


OPTIMIZERS = {"adamw": AdamW, "muon": Muon}


def updater(optimizer: str, name: str, shape: torch.Size, hidden: bool) -> type:
    """The class that updates a parameter when this key of OPTIMIZERS is chosen."""
    chosen = OPTIMIZERS[optimizer]
    return chosen if chosen.takes(name, shape, hidden) else AdamW


# --------------------------------------------------------------------------------------------------
# Statistics


@dataclass
class ParameterTable:
    """Statistics of n parameters, on the device until `rows` is called."""

    names: list[str]  # n
    columns: list[str]
    values: Tensor  # (n, len(columns))

    def rows(self) -> list[dict]:
        """One dict per parameter. Waits for the device."""
        rows = []
        for name, values in zip(self.names, self.values.tolist()):
            rows.append({"parameter": name, **dict(zip(self.columns, values))})
        return rows


def tensor_stats(tensors: list[Tensor]) -> Tensor:
    """Of this rank's parts of n tensors: sums of squares, sums, maxima, negated minima: (4, n).

    An empty part adds nothing to a sum or a maximum.
    """
    smallest = []
    largest = []
    for tensor in tensors:
        nothing = (tensor.new_full((), math.inf), tensor.new_full((), -math.inf))
        low, high = tensor.aminmax() if tensor.numel() else nothing
        smallest.append(low)
        largest.append(high)
    square_sums = torch.stack(torch._foreach_norm(tensors)).square()
    sums = torch.stack([tensor.sum() for tensor in tensors])
    return torch.stack((square_sums, sums, torch.stack(largest), -torch.stack(smallest)))


# --------------------------------------------------------------------------------------------------
# The optimizer


class Optimizer:
    """One of OPTIMIZERS with clipping, schedule, skipped updates and statistics, on any mesh.

    parameters    (name, parameter) pairs, DTensors or plain tensors
    decays        decays(name): whether the parameter gets weight decay
    settings      Settings, or anything with its attributes
    is_hidden     is_hidden(name): whether the parameter is of a hidden layer, not the embedding,
                  the head or the last norm; Muon takes the matrices among them

    All ranks skip an update together: one whose gradient is not finite, or a spike. It then changes
    neither weights nor slots. Raises ValueError if the chosen optimizer takes no parameter.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        decays: Callable[[str], bool],
        settings: Settings,
        is_hidden: Callable[[str], bool] = lambda name: False,
    ):
        self.parameters = dict(parameters)
        self.settings = settings
        updaters = {}
        self.groups: dict[tuple[type, float], list[str]] = {}  # (updater, weight decay) -> names
        for name, parameter in self.parameters.items():
            hidden = is_hidden(name)
            updaters[name] = updater(settings.optimizer, name, parameter.shape, hidden)
            group = (updaters[name], settings.weight_decay if decays(name) else 0.0)
            self.groups.setdefault(group, []).append(name)
        if OPTIMIZERS[settings.optimizer] not in updaters.values():
            raise ValueError(
                f"optimizer {settings.optimizer} takes none of the {len(updaters)} parameters: "
                "AdamW would update them all; is_hidden(name) says which are of hidden layers"
            )
        self.sharding = Sharding(list(self.parameters.values()))
        device = self.sharding.replicas.device
        self.allocate_slots(updaters, device)
        self.columns = []  # of a ParameterTable
        for kind in ("grad", "weight", *self.measured):
            self.columns += [f"{kind}_{statistic}" for statistic in ("norm", "mean", "max", "min")]
        self.columns += ["update_norm", "update_ratio", "clipped"]

        # Gradients that exist already are views of DDP's buckets: zero them, never free them.
        self.keep_gradients = any(p.grad is not None for p in self.parameters.values())
        self.empty_grad = torch.empty(0, device=device)  # for a parameter without a gradient
        self.no_slot = torch.full((1,), math.nan, device=device)
        self.norm_average = torch.zeros(len(self.parameters), device=device)  # for clip_adaptive
        # Losses and gradient norms, oldest first; nan where there was no update yet
        self.spike_history = torch.full((2, SPIKE_HISTORY), math.nan, device=device)
        self.skipped_steps = torch.zeros((), device=device)
        self.skipped_in_a_row = torch.zeros((), device=device)  # up to this update
        self.most_skipped_in_a_row = torch.zeros((), device=device)

    def allocate_slots(self, updaters: dict[str, type], device: torch.device) -> None:
        """Create the tensors of all slots at start, not in the first update.

        A run that does not fit in memory fails early, and a checkpoint can be loaded in place.
        """
        self.slots: dict[str, dict[str, Tensor]] = {}  # slot -> parameter -> tensor
        self.measured: dict[str, dict[str, Tensor]] = {}  # the slots with statistics
        for name, parameter in self.parameters.items():
            for slot, shape in updaters[name].slots(parameter.shape).items():
                slots = self.slots.setdefault(slot, {})
                if shape == parameter.shape:
                    slots[name] = torch.zeros_like(parameter)
                    self.measured[slot] = slots
                elif shape:
                    slots[name] = torch.zeros(shape, device=device)
                else:
                    slots[name] = None  # a number, see below
        # A checkpoint holds numbers as one tensor for each slot, not as thousands of single ones.
        self.numbers: dict[str, Tensor] = {}  # slot -> (parameters that have it,)
        for slot, slots in self.slots.items():
            names = [name for name, tensor in slots.items() if tensor is None]
            if names:
                self.numbers[slot] = torch.zeros(len(names), device=device)
                slots.update(zip(names, self.numbers[slot]))  # views

    @torch.no_grad()
    def step(self, step: int, loss: Tensor, measure: bool = False) -> dict:
        """Update the weights from their gradients, then free or zero the gradients.

        `step` is counted from 1, `loss` is this rank's, 0-d. Returns lr, a float, and 0-d tensors
        on the device: grad_norm of the full gradient before clipping; clipped, 1 if any gradient
        was; skipped_steps so far; skipped_in_a_row, the most so far. `measure` adds "parameters", a
        ParameterTable, for two more collectives where weights are sharded.
        """
        s = self.settings
        grads = self.local_gradients()
        square_sums, loss = self.sum_over_ranks(grads, loss)
        grad_norm = square_sums.sum().sqrt()
        skip = ~grad_norm.isfinite()
        if s.skip_spikes:
            skip |= self.is_spike(loss, grad_norm)

        if measure:
            grad_stats = tensor_stats(grads)  # before clipping
            old_weights = [local(p).clone() for p in self.parameters.values()]
        norms, sharding = square_sums.sqrt(), self.sharding
        divisor, clipped = CLIPS[s.clip](
            s, Gradients(grads, norms, sharding.numels, self.norm_average, skip)
        )
        lr = learning_rate(step, s)
        for (chosen, weight_decay), names in self.groups.items():
            present = [name for name in names if self.parameters[name].grad is not None]
            if present:
                chosen.update(self, present, Update(step, lr, weight_decay, divisor, skip))
        if self.keep_gradients:
            torch._foreach_zero_(grads)
        else:
            for parameter in self.parameters.values():
                parameter.grad = None

        self.skipped_steps += skip
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skip
        self.most_skipped_in_a_row = torch.maximum(
            self.most_skipped_in_a_row, self.skipped_in_a_row
        )
        values = {
            "grad_norm": grad_norm,
            "lr": lr,
            "clipped": clipped.any().float(),
            "skipped_steps": self.skipped_steps.clone(),
            "skipped_in_a_row": self.most_skipped_in_a_row,
        }
        if measure:
            values["parameters"] = self.parameter_stats(grad_stats, old_weights, clipped)
        return values

    def local_gradients(self) -> list[Tensor]:
        """This rank's parts of the n gradients; an empty tensor for a parameter without one."""
        grads = []
        for parameter in self.parameters.values():
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                # Under tp without FSDP, each rank has its part of the sum of a norm's gradient.
                parameter.grad = grad.redistribute(placements=parameter.placements)
            grads.append(self.empty_grad if grad is None else local(parameter.grad))
        return grads

    def sum_over_ranks(self, grads: list[Tensor], loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared norms (n,) of the full gradients, and the mean loss over ranks.

        One collective if weights are sharded or several ranks look for spikes. Otherwise none: then
        the loss stays this rank's.
        """
        square_sums = torch.stack(torch._foreach_norm(grads)).square()  # (n,), of this rank's parts
        world_size = self.sharding.world_size
        if self.sharding.is_sharded or (self.settings.skip_spikes and world_size > 1):
            sums = torch.cat((square_sums / self.sharding.replicas, loss[None] / world_size))
            torch.distributed.all_reduce(sums)
            return sums[:-1], sums[-1]
        return square_sums, loss

    def is_spike(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether the loss or gradient norm is a spike; never before half of the history is known.

        Both enter the history if they are finite, spikes included, so that a lasting change of
        level is not skipped forever.
        """
        history = self.spike_history  # (2, SPIKE_HISTORY)
        latest = torch.stack((loss, grad_norm))  # (2,)
        known = history.isfinite().sum(1)
        mean = history.nansum(1) / known
        variance = ((history - mean[:, None]) ** 2).nansum(1) / (known - 1)
        is_far = latest > mean + self.settings.skip_spikes * variance.sqrt()
        spike = (is_far & (known >= history.size(1) // 2)).any()
        shifted = torch.cat((history[:, 1:], latest[:, None]), dim=1)
        history.copy_(torch.where(latest.isfinite().all(), shifted, history))
        return spike

    def parameter_stats(
        self, grad_stats: Tensor, old_weights: list[Tensor], clipped: Tensor
    ) -> ParameterTable:
        """One row per full parameter, the same on all ranks.

        Gradients before clipping, weights and slots after the update; nan for a slot that a
        parameter does not have.
        """
        weights = [local(p) for p in self.parameters.values()]
        stats = [grad_stats, tensor_stats(weights)]  # in the order of the columns
        for slots in self.measured.values():
            parts = [local(slots.get(name, self.no_slot)) for name in self.parameters]
            stats.append(tensor_stats(parts))
        k = len(stats)
        updates = torch._foreach_sub(weights, old_weights)
        update_square_sums = torch.stack(torch._foreach_norm(updates)).square()

        # One collective for the sums, one for the maxima: a minimum is a negated maximum.
        sums, maxima = torch.stack(stats, dim=1).flatten(0, 1).split(2 * k)  # of (4 * k, n)
        sums = torch.cat((sums, update_square_sums[None]))  # (k + k + 1, n)
        if self.sharding.is_sharded:
            sums /= self.sharding.replicas
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(maxima, op=torch.distributed.ReduceOp.MAX)

        square_sums, element_sums, update_square_sums = sums.split((k, k, 1))
        largest, negated_smallest = maxima.split(k)
        norms = square_sums.sqrt()
        means = element_sums / self.sharding.numels
        update_norms = update_square_sums.sqrt()  # (1, n)
        update_ratios = update_norms / norms[1]  # relative to the norms of the weights
        by_kind = torch.stack((norms, means, largest, -negated_smallest), dim=1)  # (k, 4, n)
        rows = torch.cat((by_kind.flatten(0, 1), update_norms, update_ratios, clipped[None]))
        return ParameterTable(list(self.parameters), self.columns, rows.mT)  # (n, 4 * k + 3)

    def state(self) -> dict:
        """The live tensors by their names in a checkpoint, to save or to load in place."""
        return {
            "skipped_steps": self.skipped_steps,
            "norm_average": self.norm_average,
            "window": self.spike_history,
            **self.slots,
            **self.numbers,  # in place of their views
        }
