"""The kernels that the decoder chooses, and generation."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from model import ModelConfig, apply_rope, causal_attention, generate, rope_table


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
    sizes = ModelConfig(64, n_layer=1, n_head=4, n_kv_head=4, d_model=32, d_ff=48, seq_len=16)
    q, k, v = torch.empty(3, 2, 16, 4, 8, device="meta", dtype=torch.bfloat16).transpose(2, 3)
    q = apply_rope(q, rope_table(sizes, 16, "meta"))
    options = [None, True] if kernel == "_cudnn" else []  # no bias, keep what backward needs
    attention = getattr(torch.ops.aten, f"_scaled_dot_product{kernel}_attention")
    y = attention(q, k, v, *options, 0.0, True)[0]
    assert y.shape == (2, 4, 16, 8)
    assert y.transpose(1, 2).is_contiguous()


# --------------------------------------------------------------------------------------------------
# Generation


class Stub(nn.Module):
    """A model that computes its logits by a function of the tokens."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.forward = logits


@pytest.mark.parametrize("multiple", [1, 4])
def test_generate_gives_the_model_the_last_seq_len_tokens(multiple):
    """Padding at the end, which causal attention ignores, lets tp ranks split them."""
    given = []

    def count_up(tokens: torch.Tensor) -> torch.Tensor:
        given.append(tokens[0].tolist())
        return F.one_hot((tokens + 1) % 60, 64).float()

    options = dict(seq_len=16, vocab_size=60, device="cpu", temperature=0, multiple=multiple)
    assert [*generate(Stub(count_up), [5, 6], 30, **options)] == [*range(7, 37)]
    for n, context in enumerate(given):
        expected = [*range(5, 7 + n)][-16:]
        assert context == expected + [0] * (-len(expected) % multiple)


# Of six logits, the last two pad the head of a vocabulary of four
LOGITS = torch.tensor([0.3, 0.15, 0.5, 0.05, 0.6, 0.6]).log()
DRAWN = [
    ({}, {0, 1, 2, 3}),
    ({"top_k": 2}, {0, 2}),
    ({"top_k": 9}, {0, 1, 2, 3}),
    ({"temperature": 0}, {2}),
    ({"temperature": 0.01}, {2}),
]


@pytest.mark.parametrize("options, drawn", DRAWN)
def test_generate_draws_the_likely_tokens_of_the_vocabulary(options, drawn):
    model = Stub(lambda tokens: LOGITS.expand(*tokens.shape, 6))
    options = dict(seq_len=16, vocab_size=4, device="cpu") | options
    first, again, other = ([*generate(model, [0], 300, seed=seed, **options)] for seed in (5, 5, 6))
    assert {*first} == drawn
    assert first == again
    assert (first != other) == (len(drawn) > 1)
