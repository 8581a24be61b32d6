"""The kernels of a GPU, for a step of fake tensors that are on a CPU.

A rehearsal needs them: what a kernel keeps for backward decides the memory of a step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention_flops(
    q: torch.Size, k: torch.Size, v, dropout: float = 0.0, is_causal: bool = False, **_
) -> int:
    """FLOPs of softmax(q k^T) v for q (B, H, T, d_head). The causal mask hides half of them."""
    B, H, T, d_head = q
    flops = 2 * (2 * B * H * T * k[-2] * d_head)  # two products, a multiply and an add each
    return flops // 2 if is_causal else flops


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention with a kernel that keeps no scores, as on CPUs and GPUs.

    It keeps q, k, v, the result and a number per token and head; the result has the layout of q, as
    cuDNN's has. Without a device, torch would write out the scores.
    """
    options = {"attn_mask": attn_mask, "scale": scale}
    y, _ = ATTENTION(q, k, v, dropout_p, is_causal, **options)
    return y


def rms_norm(x: Tensor, shape: tuple, weight: Tensor | None = None, eps: float | None = None):
    """F.rms_norm with the kernel of a GPU."""
    return FusedRMSNorm.apply(x, weight)


class FusedRMSNorm(torch.autograd.Function):
    """Reads and writes what the GPU's kernel does, whose operator has no CPU implementation."""

    @staticmethod
    def forward(context, x: Tensor, weight: Tensor | None) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)  # 1 / rms of each token
        context.save_for_backward(x, weight, rstd)
        return x.clone() if weight is None else x * weight

    @staticmethod
    def backward(context, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = context.saved_tensors
        return grad * x, None if weight is None else torch.empty_like(weight)


# What a step asks to choose a kernel, or calls to run one -> what it gets
ON_GPU = {
    Tensor.is_cuda.__get__: lambda tensor: True,
    Tensor.is_cpu.__get__: lambda tensor: False,
    F.scaled_dot_product_attention: flash_attention,
    F.rms_norm: rms_norm,
}


def choose_gpu_kernels(net: nn.Module) -> None:
    """Make a model of fake tensors allocate what it would on a GPU."""
    kernels = GPUKernels()
    layers = [layer for block in net.blocks for layer in block.children()]
    # In hooks: autograd switches modes off in backward, where a block may be computed again.
    for module in (net.embed, *layers, net.norm, net.head):
        module.register_forward_pre_hook(kernels.enter)
        module.register_forward_hook(kernels.leave, always_call=True)


class GPUKernels(TorchFunctionMode):
    """Answers as if all tensors were on a GPU, and calls kernels like those of a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return ON_GPU.get(function, function)(*args, **kwargs or {})

    def enter(self, *_) -> None:
        self.__enter__()

    def leave(self, *_) -> None:
        self.__exit__(None, None, None)
