"""What a run needs, before its first step: the FLOPs of a token, and the bytes of a rank.

Both are measured on the model. It runs with one and with two blocks on torch's meta device, where
tensors have shapes but no values, in a few hundredths of a second. So no formula has to be kept in
step with the model. tools.plan rehearses a whole step, with its communication and its update.
"""

import dataclasses
import functools
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Private, but torch has no public way to see every operation.
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import dist
import errors
import model
import optim
from model import ModelConfig, Transformer

# --------------------------------------------------------------------------------------------------
# FLOPs


@functools.cache
def flops_per_token(model_config: ModelConfig) -> float | None:
    """Return the FLOPs per token of a forward and backward pass.

    Each matrix product of forward costs two in backward, one for each operand's gradient. What is
    computed again in backward does not count (Chowdhery et al. 2022, appendix B).

    None if the model cannot run without values, for example because it calls item().
    """

    def forward_flops(net: Transformer) -> int:
        choose_kernels(net, on_gpu=True)  # on a CPU, attention may be written out in full
        tokens = torch.zeros(1, model_config.seq_len, dtype=torch.int64, device="meta")
        counter = FlopCounterMode(display=False, custom_mapping={ATTENTION: attention_flops})
        with counter, torch.no_grad():
            net(tokens, targets=tokens)
        return counter.get_total_flops()

    try:
        one, two = map(forward_flops, models_of_one_and_two_blocks(model_config))
    except RuntimeError:
        return None
    return 3 * (one + (model_config.n_layer - 1) * (two - one)) / model_config.seq_len


def attention_flops(
    q: torch.Size, k: torch.Size, v, dropout: float = 0.0, is_causal: bool = False, **_
) -> int:
    """FLOPs of softmax(q k^T) v for q (B, H, T, d_head). The causal mask hides half of them."""
    B, H, T, d_head = q
    flops = 2 * (2 * B * H * T * k[-2] * d_head)  # two products, a multiply and an add each
    return flops // 2 if is_causal else flops


def models_of_one_and_two_blocks(
    model_config: ModelConfig, dtype: torch.dtype = torch.float32
) -> Iterator[Transformer]:
    """Yield two models, from which deeper ones follow: all blocks are alike."""
    for n_layer in (1, 2):
        yield model.meta_model(dataclasses.replace(model_config, n_layer=n_layer), dtype)


# --------------------------------------------------------------------------------------------------
# Bytes


def memory_of(run, rules: Sequence[type] = (optim.AdamW,)) -> dict[str, int]:
    """Estimate the bytes of tensors that a rank holds at the peak of a step, by part.

    run    config.Run, or an object with the same attributes
    rules  the update rules of optim.Optimizer

    What a pass adds is left out if the model cannot run without values.
    """
    state = state_bytes(run, rules)
    of_pass = pass_bytes(run)
    keeps_gradients = run.grad_accum_steps > 1 or (run.strategy == "ddp" and run.tp == 1)
    if keeps_gradients:
        return state | of_pass
    # Gradients come into being while backward frees the activations.
    if state["gradients"] > sum(of_pass.values()):
        return state | dict.fromkeys(of_pass, 0)
    return state | {"gradients": 0} | of_pass


@functools.cache
def parameters_of(model_config: ModelConfig) -> list[tuple[str, Tensor, bool]]:
    """The parameters of a model on the meta device: name, parameter, whether a block has it."""
    net = model.meta_model(model_config)
    return [(name, weight, net.is_hidden(name)) for name, weight in net.named_parameters()]


def state_bytes(run, rules: Sequence[type]) -> dict[str, int]:
    """Return the bytes of the largest rank's weights, gradients and optimizer at an update."""
    weights = gradients = optimizer = 0
    # Until the last micro-batch, FSDP accumulates unsharded gradients: see dist.gradient_sync.
    accumulates_full = run.grad_sync == "batch" and run.grad_accum_steps > 1
    for name, parameter, is_hidden in parameters_of(run.model_config):
        # FSDP splits the rows of all parameters, and pads the last shards to the size of the first.
        # tp splits only matrices.
        tp = run.tp if parameter.dim() > 1 else 1
        columns = parameter.numel() // len(parameter)
        local = math.ceil(len(parameter) / (run.dp_shard * tp)) * columns
        weights += 4 * local
        gradients += 4 * (parameter.numel() // tp if accumulates_full else local)
        arguments = name, parameter.shape, is_hidden
        rule = next(rule for rule in rules if rule.takes(*arguments))
        for shape in rule.slots(parameter.shape).values():
            optimizer += 4 * (local if shape else 1)  # a slot is sharded like its parameter
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def pass_bytes(run) -> dict[str, int]:
    """Return the bytes that a forward and backward pass adds at its peak.

    gathered     FSDP's full weights
    activations  what the blocks keep for backward
    temporary    the rest: the logits, or what a single layer needs while it is computed

    Nothing if the model cannot run without values: see `flops_per_token`.
    """
    is_sharded = dist.uses_fsdp(run.strategy, run.tp)
    try:
        one, per_block, last = peaks_of_pass(
            run.model_config,
            run.compute_dtype,
            run.loss_chunks,
            weights_dtype=run.compute_dtype if is_sharded else torch.float32,
            micro_batch_size=run.micro_batch_size,
            activation_checkpointing=run.activation_checkpointing,
            tp=run.tp,
            on_gpu=run.device != "cpu",
        )
    except RuntimeError:
        return {}
    activations = run.n_layer * per_block
    gathered = 0
    if is_sharded:
        gathered = gathered_parameters(run.model_config, run.wrap, run.reshard_after_forward)
    return {
        "gathered": run.compute_dtype.itemsize * gathered // run.tp,
        "activations": activations,
        "temporary": max(one - per_block, last - activations),
    }


@functools.cache
def gathered_parameters(model_config: ModelConfig, wrap: str, reshard_after_forward: bool) -> int:
    """Return how many elements of full weights FSDP holds at a time."""
    net = model.meta_model(model_config)
    total = sum(weight.numel() for weight in net.parameters())
    modules = (nn.ModuleList(unit) for unit in dist.fsdp_units(net, wrap))
    units = [sum(weight.numel() for weight in unit.parameters()) for unit in modules]
    largest = max([*units, total - sum(units)])  # or the root
    # The parts of all ranks arrive in a buffer, and are copied out of it.
    return largest + (largest if reshard_after_forward else total)


@functools.cache
def peaks_of_pass(
    model_config: ModelConfig,
    dtype: torch.dtype,
    loss_chunks: int,
    *,
    weights_dtype: torch.dtype,
    micro_batch_size: int,
    activation_checkpointing: str,
    tp: int,
    on_gpu: bool,
) -> tuple[int, int, int]:
    """Measure the bytes of tensors in forward and backward, beside weights and gradients.

    Returns the peak with one block while there are activations of blocks, what each further block
    adds to it, and the peak in forward and backward of the embedding.
    """

    def peaks(net: Transformer) -> tuple[int, int]:
        if tp > 1:
            errors.need_extra("tensor_parallel", f"--tp {tp}")
            from extras.tensor_parallel import keep_part

            keep_part(net, tp)
        if loss_chunks > 1:
            errors.need_extra("chunked_loss", f"--loss_chunks {loss_chunks}")
            from extras.chunked_loss import ChunkedLoss

            net.set_submodule("head.loss", ChunkedLoss(net.head.loss, loss_chunks))
        if activation_checkpointing != "none":
            dist.checkpoint_activations(net.blocks, activation_checkpointing, net.config, tp)
        net.to(weights_dtype)
        choose_kernels(net, on_gpu)
        for weight in net.parameters():
            if weight.requires_grad:  # its gradient belongs to state_bytes
                weight.register_post_accumulate_grad_hook(lambda _: net.zero_grad())
        live = LiveBytes(net.parameters())

        def watch(module, inputs: tuple, x: Tensor) -> None:
            live.begin_peak()
            if x.requires_grad:
                x.register_hook(live.begin_peak)

        net.embed.register_forward_hook(watch)
        shape = (micro_batch_size, model_config.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64, device="meta")
        with live:
            net(tokens, targets=tokens).backward()
        of_blocks = live.peaks[1]
        return of_blocks, max(live.peaks[0], live.peaks[-1])

    one, two = map(peaks, models_of_one_and_two_blocks(model_config, dtype))
    return one[0], two[0] - one[0], one[1]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors from their allocation until they are freed."""

    def __init__(self, ignored: Iterable[Tensor]):
        super().__init__()
        self.now = 0
        self.peaks = [0]
        # By the id of a storage, which several tensors may share
        self.live = {id(tensor.untyped_storage()): tensor for tensor in ignored}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf.untyped_storage())
        return result

    def see(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self.live:
            self.live[key] = weakref.ref(storage, lambda _: self.forget(key, size))
            self.now += size
            self.peaks[-1] = max(self.peaks[-1], self.now)

    def begin_peak(self, *_) -> None:
        """From now on, look for another peak."""
        self.peaks.append(self.now)

    def forget(self, key: int, size: int) -> None:
        del self.live[key]
        self.now -= size


# --------------------------------------------------------------------------------------------------
# The kernels of another device

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def choose_kernels(net: nn.Module, on_gpu: bool) -> None:
    """Make a model without values allocate what it would on a GPU, or on a CPU."""
    kernels = Kernels(on_gpu)
    layers = [layer for block in net.blocks for layer in block.children()]
    # In hooks: autograd switches modes off in backward, where a block may be computed again.
    for module in (net.embed, *layers, net.norm, net.head):
        module.register_forward_pre_hook(kernels.enter)
        module.register_forward_hook(kernels.leave, always_call=True)


class Kernels(TorchFunctionMode):
    """Replaces the functions that choose a kernel by the device of their tensors."""

    def __init__(self, on_gpu: bool):
        super().__init__()
        self.on_gpu = on_gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is model.is_gpu:
            return self.on_gpu
        if function is F.scaled_dot_product_attention:
            return flash_attention(*args, **kwargs)
        if function is F.rms_norm and self.on_gpu:
            return FusedRMSNorm.apply(args[0], kwargs["weight"])
        return function(*args, **kwargs)

    def enter(self, *_) -> None:
        self.__enter__()

    def leave(self, *_) -> None:
        self.__exit__(None, None, None)


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
