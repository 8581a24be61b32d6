"""The optimizer: AdamW with clipping, skipped updates, statistics and learning rates.

An update never waits for the device: norms, decisions and counters stay there. Another update rule
is a class like AdamW, a clipping strategy a function in CLIPS, a schedule a function in SCHEDULES.
"""

from __future__ import annotations  # Settings names SCHEDULES and CLIPS, which are defined below

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of `Optimizer` and `learning_rate`; config.py explains the annotations."""

    max_steps: Annotated[int, "free", "optimizer steps of the run", (1,)] = 400
    lr: Annotated[float | None, "part", "peak learning rate (default: 0.5 / d_model)", (0,)] = None
    min_lr: Annotated[float, "part", "learning rate at the end of the decay", (0,)] = 0.0
    warmup_steps: Annotated[int, "part", "steps of linear warm-up from 0 to lr", (0,)] = 100
    schedule: Annotated[Literal[tuple(SCHEDULES)], "part", "decay from lr to min_lr"] = "linear"
    optimizer: Annotated[Literal["adamw", "muon"], "part", "muon: for blocks' matrices"] = "adamw"
    weight_decay: Annotated[float, "part", "not applied to norms and the embedding", (0,)] = 0.1
    beta1: Annotated[float, "part", "AdamW beta1", (0, 1)] = 0.9
    beta2: Annotated[float, "part", "AdamW beta2", (0, 1)] = 0.95
    clip: Annotated[Literal[tuple(CLIPS)], "part", "adaptive: for each parameter"] = "norm"
    max_grad_norm: Annotated[float, "part", "limit of --clip norm", (1e-9,)] = 1.0
    max_grad_norm_ratio: Annotated[float, "part", "limit of --clip adaptive", (1e-9,)] = 2.0


# --------------------------------------------------------------------------------------------------
# Update rules
#
#     slots                                 names of the rule's state: a float32 tensor for each
#                                           parameter, distributed like it, and zero at first
#     takes(name, parameter) -> bool        whether the rule updates a parameter
#     update(optimizer, names, update)      updates these parameters and their slots
#
# All state is in one Optimizer, so clipping, skipping, statistics and checkpoints work the same for
# every rule. It is no torch.optim.Optimizer, whose state_dict identifies parameters by number.


class Update(NamedTuple):
    """One update of some parameters."""

    step: int  # counted from 1
    lr: float
    weight_decay: float
    divisor: Tensor  # 0-d, on the device: divide the gradients by it
    skip: Tensor  # 0-d bool, on the device: if true, change neither weights nor slots


class AdamW:
    """AdamW (Loshchilov & Hutter 2019), with torch's fused kernel.

    The kernel divides gradients by `grad_scale` and does nothing if `found_inf` is 1.
    torch.amp.GradScaler skips updates in the same way, without waiting for the device.
    """

    slots = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def takes(name: str, parameter: Tensor) -> bool:
        return True

    @staticmethod
    def update(optimizer: Optimizer, names: list[str], update: Update) -> None:
        """Update this rank's parts of the parameters, all of them in one kernel."""
        settings = optimizer.settings
        parameters = [optimizer.parameters[name] for name in names]
        done = update.step - 1 - optimizer.skipped_steps  # updates before this one
        # Local parts: DTensors must share a mesh, but under tp the weights of norms have a smaller.
        adamw(
            [local(parameter) for parameter in parameters],
            [local(parameter.grad) for parameter in parameters],
            [local(optimizer.slots["exp_avg"][name]) for name in names],
            [local(optimizer.slots["exp_avg_sq"][name]) for name in names],
            max_exp_avg_sqs=[],
            state_steps=list(done.repeat(len(names)).unbind()),  # to which the kernel adds 1
            fused=True,
            grad_scale=update.divisor,
            found_inf=update.skip.float(),
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=update.lr,
            weight_decay=update.weight_decay,
            eps=1e-8,
            maximize=False,
        )


# --------------------------------------------------------------------------------------------------
# The optimizer


class Optimizer:
    """Update rules with clipping, skipped updates and statistics, on any mesh.

    parameters    (name, parameter) pairs, DTensors or plain tensors. Those that need a gradient
                  have one in every step, the others are left alone
    decays        decays(name): whether the parameter gets weight decay
    settings      Settings, or an object with the same attributes
    rules         the update rules; the first one that takes a parameter updates it

    If the gradient is not finite, all ranks skip the update: weights and slots do not change.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        decays: Callable[[str], bool],
        settings: Settings,
        rules: Sequence[type] = (AdamW,),
    ):
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.settings = settings
        self.groups: dict[tuple[type, float], list[str]] = {}  # (rule, weight decay) -> names
        self.slots: dict[str, dict[str, Tensor]] = {}  # slot -> name -> tensor
        for name, parameter in self.parameters.items():
            rule = next(rule for rule in rules if rule.takes(name, parameter))
            weight_decay = settings.weight_decay if decays(name) else 0.0
            self.groups.setdefault((rule, weight_decay), []).append(name)
            for slot in rule.slots:
                self.slots.setdefault(slot, {})[name] = torch.zeros_like(parameter)

        is_alone = not torch.distributed.is_initialized()
        self.world_size = 1 if is_alone else torch.distributed.get_world_size()
        device = next(iter(self.parameters.values())).device
        shards = [num_shards(parameter) for parameter in self.parameters.values()]
        self.is_sharded = max(shards) > 1
        copies = [self.world_size / n for n in shards]
        self.copies = torch.tensor(copies, device=device)  # (n,): how many hold each
        # Gradients that exist already are views of DDP's buckets: zero them, never free them.
        self.keep_gradients = any(p.grad is not None for p in self.parameters.values())
        self.norm_average = torch.zeros(len(shards), device=device)  # for clip_adaptive
        self.skipped_steps = torch.zeros((), device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int, device=device)  # the latest

    @torch.no_grad()
    def step(
        self, step: int, lr: float, measure: bool = False
    ) -> tuple[dict[str, Tensor], list[dict]]:
        """Update the weights from their gradients, then free or zero the gradients.

        `step` is counted from 1; `lr` is the step's learning rate. Returns 0-d tensors on the
        device, equal on all ranks: grad_norm (of the full gradient before clipping) and the
        integers clipped (1 if any gradient was), skipped_steps (so far) and skipped_in_a_row. With
        `measure`, also waits for the device, and returns the rows of `statistics`.
        """
        gradients = self.local_gradients()
        (norms,) = self.norms(gradients)  # (n,)
        grad_norm = norms.norm()
        skip = ~grad_norm.isfinite()
        weights = [local(parameter) for parameter in self.parameters.values()]
        old_weights = [weight.clone() for weight in weights] if measure else []

        divisor, clipped = CLIPS[self.settings.clip](self, gradients, norms, skip)
        for (rule, weight_decay), names in self.groups.items():
            rule.update(self, names, Update(step, lr, weight_decay, divisor, skip))
        if self.keep_gradients:
            torch._foreach_zero_(gradients)
        else:
            for parameter in self.parameters.values():
                parameter.grad = None

        self.skipped_steps += skip
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * skip
        values = {
            "grad_norm": grad_norm,
            "clipped": clipped.any().int(),
            "skipped_steps": self.skipped_steps.int(),
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        rows = self.statistics(norms, clipped, weights, old_weights) if measure else []
        return values, rows

    def local_gradients(self) -> list[Tensor]:
        """This rank's parts of the n gradients."""
        for parameter in self.parameters.values():
            grad = parameter.grad
            if isinstance(grad, DTensor) and grad.placements != parameter.placements:
                # Partial sums of a norm weight's gradient, under tp: FSDP adds them, or else this.
                parameter.grad = grad.redistribute(placements=parameter.placements)
        return [local(parameter.grad) for parameter in self.parameters.values()]

    def norms(self, *lists: list[Tensor]) -> Tensor:
        """The norms of full tensors, from the parts on all ranks, with one small all_reduce.

        lists      k lists of n local tensors, the parts of tensors distributed like the parameters
        returns    (k, n), the same on all ranks

        A sum over all ranks counts an element once for each rank that holds it, so each rank first
        divides its squares by this number.
        """
        parts = list(itertools.chain(*lists))
        dtype = None
        if parts[0].is_cpu:
            # Reduce each row, then the rows in float64. On a CPU torch adds a tensor's squares one
            # by one in float32: the norm of 50,000 x 768 normal numbers would be 0.3% too small.
            parts = [torch.linalg.vector_norm(part, dim=-1) for part in parts]
            dtype = torch.float64
        norms = torch.stack(torch._foreach_norm(parts, dtype=dtype)).float()
        squares = norms.square().view(len(lists), -1)
        if self.is_sharded:
            squares /= self.copies
            torch.distributed.all_reduce(squares)
        return squares.sqrt()

    def statistics(
        self, grad_norms: Tensor, clipped: Tensor, weights: list[Tensor], old_weights: list[Tensor]
    ) -> list[dict]:
        """A row for each full parameter, the same on all ranks. Waits for the device.

        Gradient norms are measured before clipping, weight and slot norms after the update. The
        norm of a slot that a parameter does not have is nan.
        """
        measured = {"weight_norm": weights}
        missing = torch.full((1,), math.nan, device=grad_norms.device)
        for slot, tensors in self.slots.items():
            parts = [local(tensors.get(name, missing)) for name in self.parameters]
            measured[f"{slot}_norm"] = parts
        measured["update_norm"] = torch._foreach_sub(weights, old_weights)
        columns = {"grad_norm": grad_norms, **dict(zip(measured, self.norms(*measured.values())))}
        columns["update_ratio"] = columns["update_norm"] / columns["weight_norm"]
        columns["clipped"] = clipped.float()
        table = torch.stack(list(columns.values()), dim=1)  # (n, columns)
        rows = zip(self.parameters, table.tolist())
        return [{"parameter": name, **dict(zip(columns, values))} for name, values in rows]

    def state(self) -> dict:
        """The live tensors, by their names in a checkpoint, to save or to fill in place."""
        counters = {"skipped_steps": self.skipped_steps, "norm_average": self.norm_average}
        return counters | self.slots


# --------------------------------------------------------------------------------------------------
# Clipping strategies
#
#     clip_x(optimizer, gradients, norms, skip) -> (divisor, clipped)
#
#     gradients     this rank's parts of the n gradients
#     norms         (n,) float32: the norm of each full gradient, over all ranks
#     skip          0-d bool: if true, the update is skipped, and no state may change
#     divisor       0-d: the update divides all gradients by it, as it reads them. A strategy that
#                   scales each gradient by another factor multiplies them in place, and returns 1
#     clipped       (n,) bool: whether each gradient was clipped
#
# The torch._foreach_* functions process many tensors in one kernel. They have no public names, but
# torch.optim and torch.nn.utils.clip_grad_norm_ use them as well.


def clip_norm(
    optimizer: Optimizer, gradients: list[Tensor], norms: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """Limit the norm of all gradients together to max_grad_norm (Pascanu et al. 2013)."""
    total_norm = norms.norm()
    limit = optimizer.settings.max_grad_norm
    divisor = ((total_norm + 1e-6) / limit).clamp(min=1.0)
    return divisor, (total_norm > limit).expand_as(norms)


def clip_adaptive(
    optimizer: Optimizer, gradients: list[Tensor], norms: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """Limit each gradient's norm to max_grad_norm_ratio x the moving average of its clipped norms.

    OLMo clips in this way (Groeneveld et al. 2024). The average starts at the first norm above 0.
    """
    settings = optimizer.settings
    averages = torch.where(optimizer.norm_average > 0, optimizer.norm_average, norms)
    limits = settings.max_grad_norm_ratio * averages
    clipped = norms > limits
    factors = torch.where(clipped, limits / norms, 1.0)
    torch._foreach_mul_(gradients, factors.unbind())
    averages = averages.lerp(norms * factors, 1 - max(settings.beta1, settings.beta2))
    optimizer.norm_average.copy_(torch.where(skip, optimizer.norm_average, averages))
    return torch.ones_like(norms[0]), clipped


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

    It rises linearly to `lr` at step `warmup_steps`, then follows the schedule.
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    progress = (step - 1 - settings.warmup_steps) / (settings.max_steps - settings.warmup_steps)
    factor = SCHEDULES[settings.schedule](progress, settings)
    return settings.min_lr + (settings.lr - settings.min_lr) * factor


# --------------------------------------------------------------------------------------------------
# Parameters on a mesh


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the tensor itself if it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_shards(parameter: Tensor) -> int:
    """The number of parts that a parameter is split into; 1 if it is replicated."""
    if not isinstance(parameter, DTensor):
        return 1
    axes = zip(parameter.placements, parameter.device_mesh.shape)
    return math.prod(size for placement, size in axes if not placement.is_replicate())
