"""The optimizer: AdamW with clipping, skipped updates, statistics and learning rates.

An update never waits for the device: norms, decisions and counters stay there. Another update rule
is a class like AdamW, a clipping strategy a function in CLIPS, a schedule a function in SCHEDULES.
An idea that draws random numbers uses `normal_like`, so that they are the same on every mesh.
"""

from __future__ import annotations  # Settings names SCHEDULES and CLIPS, which are defined below

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of `Optimizer` and `learning_rate`; config.py explains the annotations."""

    max_steps: Annotated[int, "free", "optimizer steps of the run", (1,)] = 700
    lr: Annotated[float | None, "part", "peak learning rate (default: 0.5 / d_model)", (0,)] = None
    min_lr: Annotated[float, "part", "learning rate at step max_steps + 1", (0,)] = 0.0
    warmup_steps: Annotated[int, "part", "steps of linear warm-up from 0 to lr", (0,)] = 50
    schedule: Annotated[
        Literal[tuple(SCHEDULES)],
        "part",
        "decay to min_lr; wsd: only in the last fifth of steps after warm-up",
    ] = "linear"
    optimizer: Annotated[
        Literal["adamw", "muon"],
        "part",
        "muon: Muon for the matrices of the blocks, AdamW for the rest",
    ] = "adamw"
    weight_decay: Annotated[float, "part", "not applied to norms and the embedding", (0,)] = 0.1
    beta1: Annotated[float, "part", "AdamW beta1", (0, 1)] = 0.9
    beta2: Annotated[float, "part", "AdamW beta2", (0, 1)] = 0.95
    eps: Annotated[float, "part", "AdamW epsilon", (0,)] = 1e-8
    clip: Annotated[
        Literal[tuple(CLIPS)],
        "part",
        "norm: clip the full gradient; adaptive: each parameter's gradient",
    ] = "norm"
    max_grad_norm: Annotated[float, "part", "limit of --clip norm", (1e-9,)] = 1.0
    max_grad_norm_ratio: Annotated[float, "part", "limit of --clip adaptive", (1e-9,)] = 2.0
    # Not a flag of this file, but of dist.py. On a CPU, norms are summed differently: see
    # all_reduce_squares.
    device: str = "cpu"


# --------------------------------------------------------------------------------------------------
# Update rules
#
# An update rule is a class with three static methods:
#
#     takes(name, shape, hidden) -> bool    whether it updates a parameter
#     slots(shape) -> {slot: shape}         its float32 state for a parameter of this shape
#     update(optimizer, names, update)      updates the parameters that have a gradient
#
#     hidden        is_hidden(name), an argument of Optimizer because names differ between models
#     optimizer     the Optimizer: optimizer.settings; optimizer.parameters[name], a DTensor on a
#                   mesh; the parameter's .grad; and its slots, optimizer.slots[slot][name]
#
# All state is in one Optimizer object, so clipping, skipping, statistics and checkpoints work the
# same for every class. It is not a torch.optim.Optimizer, because that state_dict identifies
# parameters by number, and our checkpoints identify them by name.
#
# A slot starts at zero. It has the shape and distribution of its parameter, or it is a number of
# shape (). A slot is a number for all parameters that have it, or for none. Checkpoints and
# statistics learn about slots only from slots(). A skipped update must leave weights and slots
# unchanged (see `assign_unless`) without the host reading `skip`.


class Update(NamedTuple):
    """One update of some parameters."""

    step: int  # counted from 1
    lr: float
    weight_decay: float
    divisor: Tensor  # 0-d, on the device: divide the gradients by it
    skip: Tensor  # 0-d bool, on the device: if true, change nothing


class AdamW:
    """AdamW (Loshchilov & Hutter 2019), with torch's fused kernel.

    The kernel divides gradients by `grad_scale` and does nothing if `found_inf` is 1.
    torch.amp.GradScaler skips updates in the same way, without waiting for the device.
    """

    @staticmethod
    def takes(name: str, shape: torch.Size, hidden: bool) -> bool:
        """AdamW updates any parameter."""
        return True

    @staticmethod
    def slots(shape: torch.Size) -> dict[str, torch.Size]:
        """The number of updates, and moving averages of the gradient and of its square."""
        return {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}

    @staticmethod
    def update(optimizer: Optimizer, names: list[str], update: Update) -> None:
        """Update this rank's parts of the parameters, all of them in one kernel."""
        settings, slots = optimizer.settings, optimizer.slots
        parameters = [optimizer.parameters[name] for name in names]
        # Local parts: DTensors here must share a mesh, but under tp the norms are on a smaller one.
        adamw(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],
            [local(slots["exp_avg"][name]) for name in names],
            [local(slots["exp_avg_sq"][name]) for name in names],
            max_exp_avg_sqs=[],
            state_steps=[slots["step"][name] for name in names],
            fused=True,
            grad_scale=update.divisor,
            found_inf=update.skip.float(),
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=update.lr,
            weight_decay=update.weight_decay,
            eps=settings.eps,
            maximize=False,
        )


# --------------------------------------------------------------------------------------------------
# The optimizer


class Optimizer:
    """Update rules with clipping, skipped updates and statistics, on any mesh.

    parameters    (name, parameter) pairs, DTensors or plain tensors
    decays        decays(name): whether the parameter gets weight decay
    settings      Settings, or an object with the same attributes
    is_hidden     is_hidden(name): whether the parameter belongs to a hidden layer, not to the
                  embedding, the head or the last norm
    rules         the update rules; the first one that takes a parameter updates it

    If the gradient is not finite, all ranks skip the update: weights and slots do not change.
    Raises ValueError if the first rule updates none of the parameters.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        decays: Callable[[str], bool],
        settings: Settings,
        is_hidden: Callable[[str], bool],
        rules: Sequence[type] = (AdamW,),
    ):
        self.parameters = dict(parameters)
        self.settings = settings
        rule_of = {}  # parameter -> rule
        self.groups: dict[tuple[type, float], list[str]] = {}  # (rule, weight decay) -> names
        for name, parameter in self.parameters.items():
            arguments = name, parameter.shape, is_hidden(name)
            rule_of[name] = next(rule for rule in rules if rule.takes(*arguments))
            group = (rule_of[name], settings.weight_decay if decays(name) else 0.0)
            self.groups.setdefault(group, []).append(name)
        if rules[0] not in rule_of.values():
            raise ValueError(
                f"{rules[0].__name__} updates no parameter: check is_hidden and takes()"
            )
        grouped = torch.distributed.is_initialized()
        self.world_size = torch.distributed.get_world_size() if grouped else 1
        device = next(iter(self.parameters.values())).device
        shards = [num_shards(p) for p in self.parameters.values()]
        self.is_sharded = max(shards) > 1
        overcount = [self.world_size / n for n in shards]
        self.overcount = torch.tensor(overcount, device=device)  # (n,): see all_reduce_squares
        numels = [p.numel() for p in self.parameters.values()]
        self.numels = torch.tensor(numels, device=device)  # (n,)
        self.allocate_slots(rule_of, device)

        # Gradients that exist already are views of DDP's buckets: zero them, never free them.
        self.keep_gradients = any(p.grad is not None for p in self.parameters.values())
        self.empty_grad = torch.empty(0, device=device)  # for a parameter without a gradient
        self.no_slot = torch.full((1,), math.nan, device=device)
        self.norm_average = torch.zeros(len(self.parameters), device=device)  # for clip_adaptive
        self.skipped_steps = torch.zeros((), device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int, device=device)  # up to this one

    def allocate_slots(self, rule_of: dict[str, type], device: torch.device) -> None:
        """Create all slots now: a lack of memory shows early, and checkpoints load in place."""
        shapes: dict[str, dict[str, torch.Size]] = {}  # slot -> parameter -> shape
        for name, parameter in self.parameters.items():
            for slot, shape in rule_of[name].slots(parameter.shape).items():
                shapes.setdefault(slot, {})[name] = shape
        self.slots: dict[str, dict[str, Tensor]] = {}  # slot -> parameter -> tensor
        self.numbers: dict[str, Tensor] = {}  # slot -> (parameters with it,)
        for slot, shapes_of_slot in shapes.items():
            names = list(shapes_of_slot)
            if any(shapes_of_slot.values()):
                tensors = [torch.zeros_like(self.parameters[name]) for name in names]
            else:  # numbers: a checkpoint contains them as one tensor, not as thousands
                self.numbers[slot] = torch.zeros(len(names), device=device)
                tensors = self.numbers[slot].unbind()  # views
            self.slots[slot] = dict(zip(names, tensors))

    @torch.no_grad()
    def step(
        self, step: int, lr: float, measure: bool = False
    ) -> tuple[dict, ParameterTable | None]:
        """Update the weights from their gradients, then free or zero the gradients.

        `step` is counted from 1; `lr` is the step's learning rate. Returns a dict with lr and, as
        0-d tensors on the device, grad_norm (of the full gradient before clipping) and integers:
        clipped (1 if any gradient was), skipped_steps (so far) and skipped_in_a_row. With
        `measure`, also returns statistics, for one more collective if weights are sharded.
        """
        gradients = self.local_gradients()
        (squared_norms,) = self.all_reduce_squares(gradients)  # (n,)
        grad_norm = squared_norms.sum().sqrt()
        skip = ~grad_norm.isfinite()

        if measure:
            old_weights = [local(p).clone() for p in self.parameters.values()]
        norms = squared_norms.sqrt()
        to_clip = Gradients(
            step, self.parameters, gradients, norms, self.numels, self.norm_average, skip
        )
        divisor, clipped = CLIPS[self.settings.clip](self.settings, to_clip)
        for (rule, weight_decay), names in self.groups.items():
            present = [name for name in names if self.parameters[name].grad is not None]
            if present:
                rule.update(self, present, Update(step, lr, weight_decay, divisor, skip))
        if self.keep_gradients:
            torch._foreach_zero_(gradients)
        else:
            for parameter in self.parameters.values():
                parameter.grad = None

        self.skipped_steps += skip
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skip
        values = {
            "grad_norm": grad_norm,
            "lr": lr,
            "clipped": clipped.any().int(),
            "skipped_steps": self.skipped_steps.int(),
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        table = self.parameter_stats(norms, old_weights, clipped) if measure else None
        return values, table

    def local_gradients(self) -> list[Tensor]:
        """This rank's parts of the n gradients; an empty tensor for a parameter without one."""
        gradients = []
        for parameter in self.parameters.values():
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                # Under tp without FSDP, each rank has a partial sum of a norm weight's gradient.
                parameter.grad = grad.redistribute(placements=parameter.placements)
            gradients.append(self.empty_grad if grad is None else local(parameter.grad))
        return gradients

    def all_reduce_squares(self, *lists: list[Tensor]) -> Tensor:
        """Compute the squared norms of full tensors from the parts on all ranks.

        lists      k lists of n local tensors, the parts of tensors distributed like the parameters
        returns    (k, n): the squared norms of the full tensors, the same on all ranks

        If a parameter is split into s shards, world_size / s ranks hold each element, so a sum over
        all ranks counts it world_size / s times (its overcount). Each rank divides by this first.
        For example, on 4 ranks, a tensor in 2 shards (squares 6 and 10) and an unsplit one (8):

            rank                        0     1     2     3
            squares of the first        6    10     6    10
            / overcount 4 / 2           3     5     3     5     their sum is 16 = 6 + 10
            squares of the second       8     8     8     8
            / overcount 4 / 1           2     2     2     2     their sum is 8
        """
        parts = list(itertools.chain(*lists))
        dtype = None
        if self.settings.device == "cpu":
            # Reduce each row, then the rows in float64. On a CPU torch adds a tensor's squares one
            # by one in float32: the norm of 50,000 x 768 normal numbers would be 0.3% too small.
            parts = [torch.linalg.vector_norm(part, dim=-1) for part in parts]
            dtype = torch.float64
        norms = torch.stack(torch._foreach_norm(parts, dtype=dtype)).float()
        squares = norms.square().view(len(lists), -1)
        if self.is_sharded:
            squares /= self.overcount
            torch.distributed.all_reduce(squares)
        return squares

    def parameter_stats(
        self, grad_norms: Tensor, old_weights: list[Tensor], clipped: Tensor
    ) -> ParameterTable:
        """One row per full parameter, the same on all ranks.

        Gradient norms are measured before clipping, weight and slot norms after the update. The
        norm of a slot that a parameter does not have is nan.
        """
        weights = [local(p) for p in self.parameters.values()]
        lists = {"weight_norm": weights}
        for slot, slots in self.slots.items():
            if slot not in self.numbers:
                parts = [local(slots.get(name, self.no_slot)) for name in self.parameters]
                lists[f"{slot}_norm"] = parts
        lists["update_norm"] = torch._foreach_sub(weights, old_weights)
        norms = self.all_reduce_squares(*lists.values()).sqrt()  # (2 + slots, n)
        columns = {"grad_norm": grad_norms, **dict(zip(lists, norms))}
        columns["update_ratio"] = columns["update_norm"] / columns["weight_norm"]
        columns["clipped"] = clipped.float()
        values = torch.stack(list(columns.values()), dim=1)  # (n, len(columns))
        return ParameterTable(list(self.parameters), list(columns), values)

    def state(self) -> dict:
        """The live tensors, by their names in a checkpoint, to save or to fill in place."""
        return {
            "skipped_steps": self.skipped_steps,
            "norm_average": self.norm_average,
            **self.slots,
            **self.numbers,  # these replace the views of them in self.slots
        }


# --------------------------------------------------------------------------------------------------
# Clipping strategies
#
#     clip_x(settings, gradients) -> Clipped
#
# The update divides all gradients by `divisor`. A strategy that scales each gradient by a different
# factor multiplies gradients.local in place and returns a divisor of 1.
#
# The torch._foreach_* functions process many tensors in one kernel. They have no public names, but
# torch.optim and torch.nn.utils.clip_grad_norm_ use them as well.


class Gradients(NamedTuple):
    """The n gradients of an update."""

    step: int  # counted from 1
    parameters: dict[str, Tensor]  # n, by name; on a mesh they are DTensors
    local: list[Tensor]  # this rank's parts, to scale in place
    norms: Tensor  # (n,) float32: the norm of each full gradient, over all ranks
    numels: Tensor  # (n,) int64: elements of each full gradient
    averages: Tensor  # (n,) float32: state for the clipping strategy, saved in checkpoints
    skip: Tensor  # 0-d bool: if true, the update is skipped and `averages` must not change


class Clipped(NamedTuple):
    """What a clipping strategy decided about the n gradients of an update."""

    divisor: Tensor  # 0-d
    clipped: Tensor  # (n,) bool: whether each gradient was clipped


def clip_norm(settings: Settings, gradients: Gradients) -> Clipped:
    """Scale all gradients so that their total norm is at most max_grad_norm (Pascanu et al. 2013).

    AdamW's kernel divides gradients by the divisor as it reads them. This saves a pass over memory.
    """
    total_norm = gradients.norms.norm()
    divisor = ((total_norm + 1e-6) / settings.max_grad_norm).clamp(min=1.0)
    is_clipped = total_norm > settings.max_grad_norm
    return Clipped(divisor, is_clipped.expand_as(gradients.norms))


def clip_adaptive(settings: Settings, gradients: Gradients) -> Clipped:
    """Limit each gradient's norm to max_grad_norm_ratio x the moving average of its clipped norms.

    OLMo clips in this way (Groeneveld et al. 2024). The average starts at the first norm above 0.
    """
    norms = gradients.norms
    averages = torch.where(gradients.averages > 0, gradients.averages, norms)
    limits = settings.max_grad_norm_ratio * averages
    is_clipped = norms > limits
    factors = torch.where(is_clipped, limits / norms, 1.0)
    torch._foreach_mul_(gradients.local, factors.unbind())

    new_share = 1 - max(settings.beta1, settings.beta2)
    averages = averages.lerp(norms * factors, new_share)
    assign_unless(gradients.skip, gradients.averages, averages)
    return Clipped(divisor=torch.ones_like(norms[0]), clipped=is_clipped)


CLIPS = {"norm": clip_norm, "adaptive": clip_adaptive}


# --------------------------------------------------------------------------------------------------
# Learning rate

# A schedule maps progress to a factor. Progress is 0 at the first step after warm-up and would be 1
# at step max_steps + 1. At factor 1 the learning rate is lr, at factor 0 it is min_lr.
SCHEDULES: dict[str, Callable[[float, Settings], float]] = {
    "cosine": lambda progress, settings: 0.5 * (1 + math.cos(math.pi * progress)),
    # warm-up, stable, decay (Hu et al. 2024): decays in the last fifth of the steps after warm-up
    "wsd": lambda progress, settings: min(1.0, (1 - progress) / 0.2),
    "linear": lambda progress, settings: 1 - progress,
    "constant": lambda progress, settings: 1.0,
}


def learning_rate(step: int, settings: Settings) -> float:
    """The learning rate of update `step`, counted from 1. It has no state that checkpoints need.

    It rises linearly to `lr` at step `warmup_steps`, then follows the schedule. All schedules but
    "constant" would reach `min_lr` at step max_steps + 1.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    steps_after = max(1, settings.max_steps - settings.warmup_steps)
    progress = min(1.0, (step - 1 - settings.warmup_steps) / steps_after)
    factor = SCHEDULES[settings.schedule](progress, settings)
    return settings.min_lr + (settings.lr - settings.min_lr) * factor


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


# --------------------------------------------------------------------------------------------------
# Parameters on a mesh


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the tensor itself if it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assign_unless(skip: Tensor, tensor: Tensor, value: Tensor) -> None:
    """Set a tensor in place, unless `skip`, a 0-d bool on the device, is true."""
    tensor.copy_(torch.where(skip, tensor, value))


def normal_like(tensor: Tensor, seed: str) -> Tensor:
    """This rank's part of a full tensor of normal random numbers with the shape of `tensor`.

    Every rank draws the full tensor and keeps its part, so the numbers are the same on every mesh.
    They depend on the seed, for example f"{step} {name}", and on the type of the device.
    """
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(seed.encode()))
    full = torch.randn(tensor.shape, generator=generator, device=tensor.device)
    if not isinstance(tensor, DTensor):
        return full
    # src_data_rank=None: split locally, since all ranks have the full tensor
    mesh, placements = tensor.device_mesh, tensor.placements
    return distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


def num_shards(parameter: Tensor) -> int:
    """The number of parts that a parameter is split into; 1 if it is replicated."""
    if not isinstance(parameter, DTensor):
        return 1
    axes = zip(parameter.placements, parameter.device_mesh.shape)
    return math.prod(size for placement, size in axes if not placement.is_replicate())
