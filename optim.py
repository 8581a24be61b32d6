"""AdamW, clipping, schedule, guards and metrics as one object. Knows nothing of files or text.

Nothing here waits for the device: norms, decisions and counters are tensors on it, and the host only queues work. Which
strategy clips is one entry of a table, so that an A/B test is one flag and an idea of your own is one function.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# ---------------------------------------------------------------------------------------------------------------
# Schedules: share of the way from min_lr (0) to lr (1), at x from 0 (end of warm-up) to 1 (end of the run)

SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "wsd": lambda x: min(
        1.0, (1 - x) / 0.2
    ),  # warm-up, stable, decay over the last fifth (Hu et al. 2024)
    "linear": lambda x: 1 - x,
    "constant": lambda x: 1.0,
}


def learning_rate(
    step: int, *, schedule: str, lr: float, min_lr: float, warmup_steps: int, max_steps: int
) -> float:
    """The learning rate of update number `step`, counted from 0: a pure function, so a resumed run needs no state."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    x = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return min_lr + (lr - min_lr) * SCHEDULES[schedule](min(x, 1.0))


# ---------------------------------------------------------------------------------------------------------------
# Clipping: a strategy changes this rank's parts of the gradients in place and tells which it changed
#
#     strategy(o, grads, norms) -> bool (n,)    o: the Optimizer, for its settings and o.skip, whether this update is
#                                               left out; grads: n local parts; norms (n,): of the whole gradients


def clip_norm(o: "Optimizer", grads: list[Tensor], norms: Tensor) -> Tensor:
    """All gradients by one factor, so that their common norm is at most max_grad_norm (Pascanu et al. 2013)."""
    total = norms.norm()
    o.adamw.grad_scale = ((total + 1e-6) / o.max_grad_norm).clamp(
        min=1.0
    )  # AdamW divides by it: no pass of its own
    return (total > o.max_grad_norm).expand_as(norms)


def clip_adaptive(o: "Optimizer", grads: list[Tensor], norms: Tensor) -> Tensor:
    """Each gradient to max_grad_norm_ratio x the moving average of its own clipped norm (OLMo, Groeneveld et al. 2024).

    The average begins with the first norm that is not 0.
    """
    average = torch.where(o.norm_average > 0, o.norm_average, norms)
    limit = o.max_grad_norm_ratio * average
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(grads, factors.unbind())
    average = average.lerp(norms * factors, 1 - max(o.adamw.defaults["betas"]))
    o.norm_average.copy_(torch.where(o.skip, o.norm_average, average))
    return norms > limit


def clip_value(o: "Optimizer", grads: list[Tensor], norms: Tensor) -> Tensor:
    """Each element to -max_grad_norm ... max_grad_norm."""
    largest = torch._foreach_norm(
        [grad if grad.numel() else grad.new_zeros(1) for grad in grads], math.inf
    )
    torch._foreach_clamp_min_(grads, -o.max_grad_norm)
    torch._foreach_clamp_max_(grads, o.max_grad_norm)
    return torch.stack(largest) > o.max_grad_norm


def clip_none(o: "Optimizer", grads: list[Tensor], norms: Tensor) -> Tensor:
    return torch.zeros_like(norms, dtype=torch.bool)


CLIPS = {"norm": clip_norm, "adaptive": clip_adaptive, "value": clip_value, "none": clip_none}

# ---------------------------------------------------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shards(parameter: Tensor) -> int:
    """How many parts a parameter is cut into."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = zip(parameter.placements, parameter.device_mesh.shape)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())


class Optimizer:
    """torch's fused AdamW (Loshchilov & Hutter 2019) behind a guard and a clipping strategy, on any mesh.

    `parameters` are (name, parameter) pairs, sharded or not; `decays(name)` tells which get weight decay; `lr_at(step)`
    is the learning rate of update number `step`, counted from 0; `clip` names an entry of CLIPS. An update is skipped,
    on all ranks alike, where its gradient is not finite, or, with `skip_spikes`, where its loss or its norm is more than
    so many standard deviations above the mean of the last WINDOW ones (after OLMo-core's SkipStepOptimizer). It then
    changes neither weights nor moments nor AdamW's count of steps: the kernel does nothing where the tensor `found_inf`
    is set, which is how torch.amp's GradScaler skips steps without asking the device.
    """

    WINDOW = 128

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
        self.parameters, self.lr_at, self.clip = dict(parameters), lr_at, CLIPS[clip]
        self.max_grad_norm, self.max_grad_norm_ratio, self.skip_spikes = (
            max_grad_norm,
            max_grad_norm_ratio,
            skip_spikes,
        )
        groups: dict[
            tuple, list
        ] = {}  # one kernel takes no two meshes: under tp the norms are on a smaller one
        for name, parameter in self.parameters.items():
            groups.setdefault((decays(name), getattr(parameter, "device_mesh", None)), []).append(
                parameter
            )
        self.adamw = torch.optim.AdamW(
            [
                {"params": params, "weight_decay": weight_decay * decay}
                for (decay, _), params in groups.items()
            ],
            lr=0.0,
            betas=betas,
            eps=eps,
            fused=True,
        )
        parts = [local(parameter) for parameter in self.parameters.values()]
        device = parts[0].device
        # AdamW's state now and not at the first step: a run that does not fit fails before it starts, and a checkpoint
        # has tensors to load into.
        for parameter in self.parameters.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        # Sums over parts are taken over all ranks: there each part counts once for every rank that holds a copy of it.
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        cuts = [shards(parameter) for parameter in self.parameters.values()]
        self.sharded = max(cuts) > 1
        self.copies = torch.tensor([self.world / cut for cut in cuts], device=device)
        self.sizes = torch.tensor(
            [parameter.numel() for parameter in self.parameters.values()], device=device
        )
        self.nothing = parts[0].new_empty(0)  # stands for the gradient of a parameter that has none
        self.skipped_steps = torch.zeros((), device=device)  # in all
        self.skipped_in_a_row = torch.zeros(2, device=device)  # now, and at most since the start
        self.norm_average = torch.zeros(len(parts), device=device)  # for clip_adaptive
        self.window = torch.full(
            (2, self.WINDOW), math.nan, device=device
        )  # losses and norms, oldest first; nan: none yet

    @torch.no_grad()
    def step(self, step: int, loss: Tensor, measure: bool = False) -> dict[str, Tensor]:
        """Update the weights from their gradients and drop these. `loss` is this rank's, 0-d.

        Returns 0-d tensors on the device: grad_norm, of the whole gradient before clipping; clipped, 1 where a gradient
        was; skipped_steps so far; skipped_in_a_row, at most so far. With `measure` also "parameters" (n, len(COLUMNS)).
        One collective where weights are sharded or spikes skipped, else none; with `measure` two more.
        """
        grads = [
            self.nothing if p.grad is None else local(p.grad) for p in self.parameters.values()
        ]
        squares = torch.stack(torch._foreach_norm(grads)).square()  # (n,), of the local parts
        if self.sharded or (self.skip_spikes and self.world > 1):
            sums = torch.cat((squares / self.copies, loss[None] / self.world))
            dist.all_reduce(sums)
            squares, loss = sums[:-1], sums[-1]
        norm = squares.sum().sqrt()
        self.skip = ~norm.isfinite()
        if self.skip_spikes:
            self.skip |= self.is_spike(torch.stack((loss, norm)))
        gradients = self.statistics(grads) if measure else None  # of what came, before clipping
        self.adamw.grad_scale, self.adamw.found_inf = None, self.skip.float()
        clipped = self.clip(self, grads, squares.sqrt())

        before = [local(p).clone() for p in self.parameters.values()] if measure else None
        self.lr = self.lr_at(step)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.adamw.zero_grad()
        self.skipped_steps += self.skip
        now, most = self.skipped_in_a_row
        now.add_(1).mul_(self.skip)
        most.copy_(torch.maximum(most, now))
        counts = {"skipped_steps": self.skipped_steps.clone(), "skipped_in_a_row": most.clone()}
        metrics = {"grad_norm": norm, "clipped": clipped.any().float(), **counts}
        return (
            metrics | {"parameters": self.measure(gradients, before, clipped)}
            if measure
            else metrics
        )

    def is_spike(self, latest: Tensor) -> Tensor:
        """Whether loss or norm, `latest` (2,), is far above the window, of which half must be full; then it enters it.

        A spike enters too, so that a lasting change of level is not skipped for ever; what is not finite does not.
        """
        known = self.window.isfinite()
        count = known.sum(1)
        mean = self.window.nansum(1) / count
        deviation = (((self.window - mean[:, None]) ** 2).nansum(1) / (count - 1)).sqrt()
        spike = (
            (latest > mean + self.skip_spikes * deviation) & (count >= self.window.size(1) // 2)
        ).any()
        moved = torch.cat((self.window[:, 1:], latest[:, None]), 1)
        self.window.copy_(torch.where(latest.isfinite().all(), moved, self.window))
        return spike

    # ---- what an optimizer looks like from inside, for every parameter

    KINDS = ("grad", "weight", "exp_avg", "exp_avg_sq")
    COLUMNS = (
        *(f"{kind}_{what}" for kind in KINDS for what in ("norm", "mean", "max", "min")),
        "update_norm",
        "update_ratio",
        "clipped",
    )

    @staticmethod
    def statistics(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        """((2, n) sums of squares and of elements, (2, n) greatest elements and greatest negated ones) of local parts."""
        squares = torch.stack(torch._foreach_norm(tensors)).square()
        sums = torch.stack([tensor.sum() for tensor in tensors])
        none = squares.new_tensor(-math.inf)
        top = torch.stack([tensor.amax() if tensor.numel() else none for tensor in tensors])
        bottom = torch.stack([-tensor.amin() if tensor.numel() else none for tensor in tensors])
        return torch.stack((squares, sums)), torch.stack((top, bottom))

    def measure(
        self, gradients: tuple[Tensor, Tensor], before: list[Tensor], clipped: Tensor
    ) -> Tensor:
        """(n, len(COLUMNS)): gradients before clipping, weights and moments after the update, the update as it was applied."""
        weights = [local(p) for p in self.parameters.values()]
        moments = [
            [local(self.adamw.state[p][slot]) for p in self.parameters.values()]
            for slot in ("exp_avg", "exp_avg_sq")
        ]
        all_sums, all_tops = zip(gradients, *map(self.statistics, (weights, *moments)))
        updates = torch.stack(torch._foreach_norm(torch._foreach_sub(weights, before))).square()
        sums, tops = (
            torch.cat((*all_sums, updates[None])),
            torch.cat((*all_tops, clipped[None].float())),
        )  # (9, n) each
        if self.sharded:
            sums /= self.copies
            dist.all_reduce(sums)
            dist.all_reduce(tops, op=dist.ReduceOp.MAX)
        norms, means = sums[0:8:2].sqrt(), sums[1:8:2] / self.sizes
        columns = [
            column
            for i in range(4)
            for column in (norms[i], means[i], tops[2 * i], -tops[2 * i + 1])
        ]
        update = sums[8].sqrt()
        return torch.stack((*columns, update, update / norms[1], tops[8]), 1)

    def state(self) -> dict:
        """The live tensors, by name, for a checkpoint to save and to load in place."""
        slots = ("step", "exp_avg", "exp_avg_sq")
        adamw = {
            slot: {name: self.adamw.state[p][slot] for name, p in self.parameters.items()}
            for slot in slots
        }
        own = {name: getattr(self, name) for name in ("skipped_steps", "norm_average", "window")}
        return {**own, **adamw}
