"""AdamW, learning-rate schedules, gradient clipping, skipped updates and statistics in one object.

Nothing here waits for the device: norms, decisions and counters are tensors that stay on it, and
the host only queues work. Adding a clipping strategy takes one function and one entry in CLIPS, a
schedule one entry in SCHEDULES; config.py has the help texts.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

SPIKE_HISTORY = 128  # updates whose loss and gradient norm a new one is compared with

# --------------------------------------------------------------------------------------------------
# Learning rate

# Height between min_lr (0) and lr (1), at progress x from 0 (the first step after warm-up) to 1
# (the step after the last)
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    # warm-up, stable, decay: decays over the last fifth of the rest only (Hu et al. 2024)
    "wsd": lambda x: min(1.0, (1 - x) / 0.2),
    "linear": lambda x: 1 - x,
    "constant": lambda x: 1.0,
}


def learning_rate(
    step: int, *, schedule: str, lr: float, min_lr: float, warmup_steps: int, max_steps: int
) -> float:
    """The learning rate of update `step`, counted from 1. Stateless, so resuming restores nothing.

    Rises linearly to `lr` at step `warmup_steps`, then follows the schedule towards `min_lr`, which
    step max_steps + 1 would have.
    """
    if step <= warmup_steps:
        return lr * step / warmup_steps
    progress = (step - 1 - warmup_steps) / max(1, max_steps - warmup_steps)
    return min_lr + (lr - min_lr) * SCHEDULES[schedule](min(progress, 1.0))


# --------------------------------------------------------------------------------------------------
# Clipping strategies
#
#     clip_x(optimizer, grads, norms) -> clipped
#
#     optimizer   the Optimizer: its settings, and optimizer.skip, whether this update is skipped
#     grads       n tensors, this rank's parts of the gradients; changed in place
#     norms       (n,) float32, the norm of each whole gradient, over all ranks
#     clipped     (n,) bool, whether each gradient was clipped, at least on this rank
#
# It may scale `grads` in place, or set optimizer.adamw.grad_scale, by which AdamW divides.
#
# torch._foreach_* launch one kernel for many tensors. They have no public name; torch.optim and
# torch.nn.utils.clip_grad_norm_ are built on them too.


def clip_norm(optimizer: "Optimizer", grads: list[Tensor], norms: Tensor) -> Tensor:
    """Scale all gradients so that their total norm is at most max_grad_norm (Pascanu et al. 2013).

    AdamW's kernel divides the gradients by `grad_scale` as it reads them: no pass over memory here.
    """
    total_norm = norms.norm()
    limit = optimizer.max_grad_norm
    optimizer.adamw.grad_scale = ((total_norm + 1e-6) / limit).clamp(min=1.0)
    return (total_norm > limit).expand_as(norms)


def clip_adaptive(optimizer: "Optimizer", grads: list[Tensor], norms: Tensor) -> Tensor:
    """Scale each gradient to at most max_grad_norm_ratio x the moving average of its clipped norm.

    After OLMo's per-parameter clipping (Groeneveld et al. 2024). The average starts at the first
    norm above 0.
    """
    average = torch.where(optimizer.norm_average > 0, optimizer.norm_average, norms)
    limits = optimizer.max_grad_norm_ratio * average
    factors = (limits / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factors.unbind())
    beta = max(optimizer.adamw.defaults["betas"])
    average = average.lerp(norms * factors, 1 - beta)
    optimizer.norm_average.copy_(torch.where(optimizer.skip, optimizer.norm_average, average))
    return norms > limits


def clip_value(optimizer: "Optimizer", grads: list[Tensor], norms: Tensor) -> Tensor:
    """Clamp each element to [-max_grad_norm, max_grad_norm]."""
    limit = optimizer.max_grad_norm
    non_empty = [grad if grad.numel() else grad.new_zeros(1) for grad in grads]
    largest = torch.stack(torch._foreach_norm(non_empty, math.inf))  # (n,), of this rank's parts
    torch._foreach_clamp_min_(grads, -limit)
    torch._foreach_clamp_max_(grads, limit)
    return largest > limit


def clip_none(optimizer: "Optimizer", grads: list[Tensor], norms: Tensor) -> Tensor:
    """Change nothing."""
    return torch.zeros_like(norms, dtype=torch.bool)


CLIPS = {"norm": clip_norm, "adaptive": clip_adaptive, "value": clip_value, "none": clip_none}

# --------------------------------------------------------------------------------------------------
# Parameters on a mesh


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor; the tensor itself where it is not distributed."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def lay_out_gradient(parameter: nn.Parameter) -> None:
    """Lay the gradient of a parameter out as the parameter is.

    Under tp, torch gives a separate embedding the gradient of the whole matrix on every rank: a sum
    over ranks would count it once for each.
    """
    grad = parameter.grad
    if isinstance(grad, DTensor) and grad.placements != parameter.placements:
        parameter.grad = grad.redistribute(placements=parameter.placements)


def num_shards(parameter: Tensor) -> int:
    """How many parts a parameter is split into: 1 where it is replicated."""
    if not isinstance(parameter, DTensor):
        return 1
    axes = zip(parameter.placements, parameter.device_mesh.shape)
    return math.prod(size for placement, size in axes if not placement.is_replicate())


class Sharding:
    """How n parameters are distributed, which is what a sum over all ranks has to know."""

    def __init__(self, parameters: list[nn.Parameter]):
        device = parameters[0].device
        shards = [num_shards(parameter) for parameter in parameters]
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.is_sharded = max(shards) > 1
        # Each element is held by this many ranks: a sum over all ranks counts it that many times.
        self.replicas = torch.tensor([self.world_size / n for n in shards], device=device)  # (n,)
        self.numels = torch.tensor([p.numel() for p in parameters], device=device)  # (n,)


def adamw_groups(
    parameters: dict[str, nn.Parameter], decays: Callable[[str], bool], weight_decay: float
) -> list[dict]:
    """AdamW's parameter groups: one for each combination of weight decay and mesh.

    A fused kernel takes tensors of one mesh only, and under tp the norms are on a smaller one.
    """
    groups = {}
    for name, parameter in parameters.items():
        mesh = getattr(parameter, "device_mesh", None)
        group = groups.setdefault((decays(name), mesh), {"params": []})
        group["params"].append(parameter)
        group["weight_decay"] = weight_decay if decays(name) else 0.0
    return list(groups.values())


def allocate_state(adamw: torch.optim.AdamW) -> None:
    """Create AdamW's state now, not in its first step.

    A run that does not fit in memory then fails at start, and a checkpoint can be loaded in place.
    """
    for group in adamw.param_groups:
        for parameter in group["params"]:
            adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


# --------------------------------------------------------------------------------------------------
# Statistics


@dataclass
class TensorStats:
    """Statistics of n tensors, each field (n,)."""

    square_sum: Tensor
    sum: Tensor
    max: Tensor
    min: Tensor


def tensor_stats(tensors: list[Tensor]) -> TensorStats:
    """Statistics of this rank's parts. An empty part contributes nothing to a sum, max or min."""
    maxima = []
    minima = []
    for tensor in tensors:
        is_empty = tensor.numel() == 0
        maxima.append(tensor.new_full((), -math.inf) if is_empty else tensor.amax())
        minima.append(tensor.new_full((), math.inf) if is_empty else tensor.amin())
    return TensorStats(
        square_sum=torch.stack(torch._foreach_norm(tensors)).square(),
        sum=torch.stack([t.sum() for t in tensors]),
        max=torch.stack(maxima),
        min=torch.stack(minima),
    )


# --------------------------------------------------------------------------------------------------
# The optimizer


class Optimizer:
    """torch's fused AdamW (Loshchilov & Hutter 2019) with clipping and skipped updates, on a mesh.

    parameters    (name, parameter) pairs, DTensors or plain tensors
    decays        decays(name): whether the parameter gets weight decay
    lr_at         lr_at(step): the learning rate of update `step`, counted from 1
    clip          a key of CLIPS
    skip_spikes   also skip updates whose loss or gradient norm is more than this many standard
                  deviations above the mean of the last SPIKE_HISTORY (after OLMo-core's
                  SkipStepOptimizer); None: skip only those whose gradient is not finite

    An update is skipped on all ranks alike. It changes neither weights nor moments nor AdamW's step
    count: the fused kernel does nothing where the tensor `found_inf` is 1. torch.amp.GradScaler
    uses that too, to skip updates without asking the device.
    """

    # The columns of metrics["parameters"]
    COLUMNS = (
        *(
            f"{kind}_{statistic}"
            for kind in ("grad", "weight", "exp_avg", "exp_avg_sq")
            for statistic in ("norm", "mean", "max", "min")
        ),
        "update_norm",
        "update_ratio",
        "clipped",
    )

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        decays: Callable[[str], bool],
        lr_at: Callable[[int], float],
        *,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        clip: str = "norm",
        max_grad_norm: float = 1.0,
        max_grad_norm_ratio: float = 2.0,
        skip_spikes: float | None = None,
    ):
        self.parameters = dict(parameters)
        self.lr_at = lr_at
        self.clip = CLIPS[clip]
        self.max_grad_norm = max_grad_norm
        self.max_grad_norm_ratio = max_grad_norm_ratio
        self.skip_spikes = skip_spikes

        groups = adamw_groups(self.parameters, decays, weight_decay)
        self.adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        allocate_state(self.adamw)
        self.sharding = Sharding(list(self.parameters.values()))

        # Gradients that exist by now, as views of DDP's buckets, stay where they are.
        self.keep_gradients = any(p.grad is not None for p in self.parameters.values())
        device = self.sharding.replicas.device
        self.empty_grad = torch.empty(0, device=device)  # of a parameter that has none
        self.norm_average = torch.zeros(len(self.parameters), device=device)  # for clip_adaptive
        # Losses and gradient norms, oldest first; nan: not known yet
        self.spike_history = torch.full((2, SPIKE_HISTORY), math.nan, device=device)
        self.skipped_steps = torch.zeros((), device=device)
        self.skipped_in_a_row = torch.zeros((), device=device)  # up to this update
        self.most_skipped_in_a_row = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, step: int, loss: Tensor, measure: bool = False) -> dict[str, Tensor]:
        """Update the weights from their gradients, then free or zero the gradients.

        `step` is counted from 1, `loss` is this rank's, 0-d. Returns 0-d tensors on the device:
        grad_norm of the whole gradient before clipping; clipped, 1 where any gradient was;
        skipped_steps so far; skipped_in_a_row, the most so far. `measure` adds "parameters",
        (n, len(COLUMNS)). One collective where weights are sharded, or where several ranks look
        for spikes, else none; `measure` takes two more where weights are sharded.
        """
        grads = []
        for parameter in self.parameters.values():
            lay_out_gradient(parameter)
            has_grad = parameter.grad is not None
            grads.append(local(parameter.grad) if has_grad else self.empty_grad)
        square_sums = torch.stack(torch._foreach_norm(grads)).square()  # (n,), of this rank's parts
        world_size = self.sharding.world_size
        if self.sharding.is_sharded or (self.skip_spikes and world_size > 1):
            sums = torch.cat((square_sums / self.sharding.replicas, loss[None] / world_size))
            dist.all_reduce(sums)
            square_sums = sums[:-1]  # (n,), of the whole gradients
            loss = sums[-1]  # mean over ranks
        grad_norm = square_sums.sum().sqrt()
        self.skip = ~grad_norm.isfinite()
        if self.skip_spikes:
            self.skip |= self.is_spike(loss, grad_norm)

        if measure:
            grad_stats = tensor_stats(grads)  # before clipping
            old_weights = [local(p).clone() for p in self.parameters.values()]
        self.adamw.found_inf = self.skip.float()
        clipped = self.clip(self, grads, square_sums.sqrt())
        self.lr = self.lr_at(step)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=not self.keep_gradients)

        self.skipped_steps += self.skip
        self.skipped_in_a_row = (self.skipped_in_a_row + 1) * self.skip
        self.most_skipped_in_a_row = torch.maximum(
            self.most_skipped_in_a_row, self.skipped_in_a_row
        )
        metrics = {
            "grad_norm": grad_norm,
            "clipped": clipped.any().float(),
            "skipped_steps": self.skipped_steps.clone(),
            "skipped_in_a_row": self.most_skipped_in_a_row,
        }
        if measure:
            metrics["parameters"] = self.parameter_stats(grad_stats, old_weights, clipped)
        return metrics

    def is_spike(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether the loss or the gradient norm is a spike, which needs half of the history known.

        Both then enter the history if they are finite. A spike enters too, so that a lasting change
        of level is not skipped forever.
        """
        history = self.spike_history  # (2, SPIKE_HISTORY)
        latest = torch.stack((loss, grad_norm))  # (2,)
        known = history.isfinite().sum(1)
        mean = history.nansum(1) / known
        variance = ((history - mean[:, None]) ** 2).nansum(1) / (known - 1)
        is_far = latest > mean + self.skip_spikes * variance.sqrt()
        spike = (is_far & (known >= history.size(1) // 2)).any()
        shifted = torch.cat((history[:, 1:], latest[:, None]), dim=1)
        history.copy_(torch.where(latest.isfinite().all(), shifted, history))
        return spike

    def parameter_stats(
        self, grad_stats: TensorStats, old_weights: list[Tensor], clipped: Tensor
    ) -> Tensor:
        """(n, len(COLUMNS)): a row for each whole parameter, the same on all ranks.

        Gradients are those before clipping, weights and moments those after the update.
        """
        weights = [local(p) for p in self.parameters.values()]
        stats = [grad_stats, tensor_stats(weights)]  # in the order of COLUMNS
        for slot in ("exp_avg", "exp_avg_sq"):
            moments = self.adamw_state(slot).values()
            stats.append(tensor_stats([local(moment) for moment in moments]))
        updates = torch._foreach_sub(weights, old_weights)
        update_norms = torch.stack(torch._foreach_norm(updates))

        # One collective for the sums, one for the maxima: a minimum is a negated maximum.
        sums = [s.square_sum for s in stats] + [s.sum for s in stats] + [update_norms.square()]
        maxima = [s.max for s in stats] + [-s.min for s in stats] + [clipped.float()]
        sums = torch.stack(sums)  # (4 + 4 + 1, n)
        maxima = torch.stack(maxima)  # (4 + 4 + 1, n)
        if self.sharding.is_sharded:
            sums /= self.sharding.replicas
            dist.all_reduce(sums)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)

        square_sums, element_sums, update_square_sums = sums.split((4, 4, 1))
        largest, negated_smallest, clipped = maxima.split((4, 4, 1))
        norms = square_sums.sqrt()
        means = element_sums / self.sharding.numels
        update_norms = update_square_sums.sqrt()  # (1, n)
        update_ratios = update_norms / norms[1]  # to the norms of the weights
        by_kind = torch.stack((norms, means, largest, -negated_smallest), dim=1)  # (4, 4, n)
        rows = torch.cat((by_kind.flatten(0, 1), update_norms, update_ratios, clipped))  # (19, n)
        return rows.mT

    def adamw_state(self, slot: str) -> dict[str, Tensor]:
        """AdamW's "step", "exp_avg" or "exp_avg_sq" of each parameter."""
        return {name: self.adamw.state[p][slot] for name, p in self.parameters.items()}

    def state(self) -> dict:
        """The live tensors by their names in a checkpoint, to save or to load in place."""
        return {
            "skipped_steps": self.skipped_steps,
            "norm_average": self.norm_average,
            "window": self.spike_history,
            "step": self.adamw_state("step"),
            "exp_avg": self.adamw_state("exp_avg"),
            "exp_avg_sq": self.adamw_state("exp_avg_sq"),
        }
