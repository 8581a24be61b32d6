"""The kernels that the decoder chooses, what recomputation and chunks keep, and generation."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import build_model
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist import checkpoint_activations
from extras.chunked_loss import ChunkedLoss
from model import Head, ModelConfig, apply_rope, causal_attention, generate, rope_table

SMALL = ModelConfig(
    vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=48, seq_len=16
)


class Calls(TorchFunctionMode):
    """Records how the model calls torch's attention."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.found.append((args, kwargs))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, heads", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_float32_attention_on_a_gpu_repeats_k_and_v(dtype, heads):
    """torch's float32 kernels for GPUs need as many heads of k and v as of q.

    The meta device, like a GPU, is not the CPU.
    """
    q = torch.empty(2, 4, 8, 8, dtype=dtype, device="meta")
    k, v = torch.empty(2, 2, 2, 8, 8, dtype=dtype, device="meta")
    with Calls() as calls:
        assert causal_attention(q, k, v).shape == q.shape
    ((arguments, options),) = calls.found
    assert [x.size(1) for x in arguments] == [4, heads, heads]
    assert options["is_causal"] and options["enable_gqa"] == (heads < 4)


@pytest.mark.parametrize("kernel", ["_cudnn", "_flash"])
def test_attention_on_a_gpu_joins_its_heads_without_a_copy(kernel):
    """Both kernels return the layout of q: the heads of a token stay side by side in memory."""
    q, k, v = torch.empty(3, 2, 16, 4, 8, device="meta", dtype=torch.bfloat16).transpose(2, 3)
    q = apply_rope(q, rope_table(SMALL, 16, "meta"))
    options = [None, True] if kernel == "_cudnn" else []  # no bias, keep what backward needs
    attention = getattr(torch.ops.aten, f"_scaled_dot_product{kernel}_attention")
    y = attention(q, k, v, *options, 0.0, True)[0]
    assert y.shape == (2, 4, 16, 8)
    assert y.transpose(1, 2).is_contiguous()


def test_bfloat16_compute_keeps_gradients_in_float32():
    model = build_model(SMALL, dtype=torch.bfloat16)
    tokens = torch.randint(64, (2, 16))
    dtypes = set()
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    loss = model(tokens, tokens)
    loss.backward()
    assert (dtypes, loss.dtype) == ({torch.bfloat16}, torch.float32)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


class Largest(TorchDispatchMode):
    """Finds the number of elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


@pytest.mark.parametrize("chunks, most", [(1, 128 * 640), (5, 26 * 640)])
def test_a_chunked_loss_never_holds_all_logits(chunks, most):
    """128 tokens, or chunks of 26."""
    sizes = {"vocab_size": 640, "n_layer": 1, "n_kv_head": 4, "d_model": 16, "seq_len": 32}
    model = build_model(dataclasses.replace(SMALL, **sizes))
    if chunks > 1:
        model.head.loss = ChunkedLoss(model.head.loss, chunks)
    tokens = torch.arange(4 * 33).view(4, 33) % 640
    with Largest() as largest:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    assert largest.elements == most


def test_gradients_of_chunks_are_summed_in_float32():
    """FSDP gathers weights in bfloat16, in which a sum of 64 parts would be 1% off."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradients = []
    for chunks in (1, 64):
        weight = torch.ones(32, 16, dtype=torch.bfloat16, requires_grad=True)
        head = Head(dataclasses.replace(SMALL, vocab_size=32, d_model=16))
        if chunks > 1:
            head.loss = ChunkedLoss(head.loss, chunks)
        head(x[None], targets=torch.arange(64)[None] % 32, weight=weight).backward()
        gradients.append(weight.grad.float())
    whole, chunked = gradients
    assert (whole - chunked).norm() <= 0.005 * whole.norm()


def gradients_with_dropout(mode: str) -> list[torch.Tensor]:
    """The gradients of a fork with dropout in its MLPs."""
    model = build_model(SMALL)
    for block in model.blocks:
        block.mlp.down.register_forward_hook(lambda layer, inputs, x: F.dropout(x, 0.5))
    if mode != "none":
        checkpoint_activations(model.blocks, mode)
    torch.manual_seed(0)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_repeats_the_dropout_mask(mode):
    torch.testing.assert_close(gradients_with_dropout(mode), gradients_with_dropout("none"))


# --------------------------------------------------------------------------------------------------
# Generation


class Stub(nn.Module):
    """A model that computes its logits by a function of the tokens."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.forward = logits


def generated(model: nn.Module, prompt: list[int], n: int, **options) -> list[int]:
    settings = {"seq_len": 16, "vocab_size": 60, "device": "cpu"} | options
    return list(generate(model, prompt, n, **settings))


def generated_by_small(**options) -> list[int]:
    return generated(build_model(SMALL), [1, 2], 30, **options)


def test_generate_is_greedy_at_temperature_0():
    model = build_model(SMALL)
    greedy = generated_by_small(temperature=0)
    tokens = [1, 2]
    for token in greedy:
        logits = model(torch.tensor([tokens[-16:]]))[0, -1, :60]
        assert token == logits.argmax()
        tokens.append(token)
    assert generated_by_small(top_k=1, seed=5) == greedy


def test_generate_repeats_its_tokens_with_the_same_seed():
    five, again, six = (generated_by_small(seed=seed) for seed in (5, 5, 6))
    assert five == again != six


def test_generate_draws_only_tokens_of_the_vocabulary():
    assert max(generated_by_small(temperature=5.0)) < 60


@pytest.mark.parametrize("multiple", [1, 4])
def test_generate_gives_the_model_the_last_seq_len_tokens(multiple):
    """Padding at the end, which causal attention ignores, lets tp ranks split them."""
    given = []

    def count_up(tokens: torch.Tensor) -> torch.Tensor:
        given.append(tokens[0].tolist())
        return F.one_hot((tokens + 1) % 60, 64).float()

    options = {"temperature": 0, "multiple": multiple}
    assert generated(Stub(count_up), [5, 6], 30, **options) == [*range(7, 37)]
    for n, context in enumerate(given):
        expected = [*range(5, 7 + n)][-16:]
        assert context == expected + [0] * (-len(expected) % multiple)


@pytest.mark.parametrize("top_k, drawn", [(0, {0, 1, 2, 3}), (2, {0, 2}), (9, {0, 1, 2, 3})])
def test_top_k_keeps_the_most_likely_tokens(top_k, drawn):
    probabilities = torch.tensor([0.3, 0.15, 0.5, 0.05])
    model = Stub(lambda tokens: probabilities.log().expand(*tokens.shape, 4))
    assert {*generated(model, [0], 300, vocab_size=4, top_k=top_k)} == drawn
