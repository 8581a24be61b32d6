"""AdamW, clipping, schedule, a guard against non-finite gradients, and metrics, as one object. Knows nothing of files or text.

Nothing here waits for the device: norms, decisions and counters are tensors on it, and the host only queues work.
"""

import math
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Share of the way from min_lr (0) to lr (1), at x from 0 (end of warm-up) to 1 (end of the run).
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    "wsd": lambda x: min(1.0, (1 - x) / 0.2),  # warm-up, stable, decay over the last fifth (Hu et al. 2024)
    "constant": lambda x: 1.0,
}


def learning_rate(step: int, *, schedule: str, lr: float, min_lr: float, warmup_steps: int, max_steps: int) -> float:
    """The learning rate of update number `step`, counted from 0: a pure function, so a resumed run needs no state."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    x = (step - warmup_steps) / max(1, max_steps - warmup_steps)
    return min_lr + (lr - min_lr) * SCHEDULES[schedule](min(x, 1.0))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Optimizer:
    """Clips by global norm, skips non-finite updates and applies torch's fused AdamW (Loshchilov & Hutter 2019).

    `parameters` are (name, parameter) pairs, sharded or not; `decays(name)` tells which get weight decay; `lr_at(step)`
    is the learning rate of update number `step`, counted from 0. Clipping costs no pass of its own: AdamW's kernel
    divides each gradient by `grad_scale` and does nothing where `found_inf` is set, both tensors on the device (they
    are what torch.amp's GradScaler hands it).
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        decays: Callable[[str], bool],
        lr_at: Callable[[int], float],
        *,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        max_grad_norm: float = 1.0,
    ):
        self.parameters, self.lr_at = dict(parameters), lr_at
        self.max_grad_norm = max_grad_norm
        groups: dict[bool, list] = {True: [], False: []}
        for name, parameter in self.parameters.items():
            groups[decays(name)].append(parameter)
        self.adamw = torch.optim.AdamW(
            [{"params": params, "weight_decay": weight_decay * decay} for decay, params in groups.items() if params],
            lr=0.0, betas=betas, eps=eps, fused=True,
        )
        device = local(next(iter(self.parameters.values()))).device
        # AdamW's state now and not at the first step: a run that does not fit fails before it starts, and a checkpoint
        # has tensors to load into.
        for parameter in self.parameters.values():
            self.adamw.state[parameter] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            }
        self.skipped_steps = torch.zeros((), device=device)

    def step(self, step: int) -> dict[str, Tensor]:
        """Update the weights from their gradients and drop these. Metrics are 0-d tensors on the device, the same on all ranks:

        grad_norm: of the whole gradient, before clipping; clipped: 1 where it was above max_grad_norm; skipped_steps:
        updates left out so far because the norm was not finite. Those change neither weights nor moments nor AdamW's
        count of steps.
        """
        norm = self.grad_norm()
        found_inf = (~norm.isfinite()).float()
        self.adamw.found_inf = found_inf
        self.adamw.grad_scale = ((norm + 1e-6) / self.max_grad_norm).clamp(min=1.0)  # as torch.nn.utils.clip_grad_norm_
        self.lr = self.lr_at(step)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        self.adamw.zero_grad()
        self.skipped_steps += found_inf
        return {
            "grad_norm": norm,
            "clipped": (norm > self.max_grad_norm).float(),
            "skipped_steps": self.skipped_steps.clone(),
        }

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The 2-norm of the whole gradient, float32 (): squares of local parts, summed over the ranks that hold the others.

        Gradients that are replicated, by DDP or along hsdp's dp_replicate, are whole on this rank and counted once.
        """
        grads = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        square = torch.nn.utils.get_total_norm([local(grad) for grad in grads]).square()
        if grads and isinstance(grads[0], DTensor):
            mesh = grads[0].device_mesh
            for axis, placement in enumerate(grads[0].placements):
                if placement.is_shard():
                    dist.all_reduce(square, group=mesh.get_group(axis))
        return square.sqrt()

    def state(self) -> dict:
        """The live tensors, by name, for a checkpoint to save and to load in place."""
        slots = ("step", "exp_avg", "exp_avg_sq")
        adamw = {slot: {name: self.adamw.state[p][slot] for name, p in self.parameters.items()} for slot in slots}
        return {"skipped_steps": self.skipped_steps, **adamw}
