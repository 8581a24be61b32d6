import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import build_model
from core.test_model import error_of_repeated_tokens, scaled
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist import checkpoint_activations
from extras.chunked_loss import ChunkedLoss
from model import (
    Head,
    ModelConfig,
    NotFinite,
    RopeScaling,
    Sampling,
    apply_rope,
    causal_attention,
    draw,
    generate,
    is_gpu,
    rope_table,
)

SMALL = ModelConfig(
    vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=48, seq_len=16
)


# ---- arithmetic


def plain_decoder(config: ModelConfig, weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (T, vocab_size) by the published formula: one head at a time, complex rotations."""
    T = tokens.numel()
    d_head = config.d_model // config.n_head
    heads_per_group = config.n_head // config.n_kv_head
    pairs = range(d_head // 2)
    frequency = [config.rope_theta ** (-2 * i / d_head) for i in pairs]
    if config.rope_scaling:
        frequency = [scaled(one, config.rope_scaling) for one in frequency]
    frequency = torch.tensor(frequency)
    rotation = torch.polar(torch.ones(T, d_head // 2), torch.arange(T)[:, None] * frequency)
    future = torch.ones(T, T).triu(1).bool()

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weight

    def rotated(x):  # (T, d_head)
        z = torch.complex(x[:, : d_head // 2], x[:, d_head // 2 :]) * rotation
        return torch.cat((z.real, z.imag), 1)

    def rows(weight, head):  # of one head
        return weight[head * d_head : (head + 1) * d_head]

    x = weights["embed.weight"][tokens]  # (T, d_model)
    for layer in range(config.n_layer):
        prefix = f"blocks.{layer}."
        h = norm(x, weights[prefix + "attention_norm.weight"])
        outputs = []
        for head in range(config.n_head):
            group = head // heads_per_group
            q = rotated(h @ rows(weights[prefix + "attention.q.weight"], head).T)
            k = rotated(h @ rows(weights[prefix + "attention.k.weight"], group).T)
            v = h @ rows(weights[prefix + "attention.v.weight"], group).T
            scores = (q @ k.T / d_head**0.5).masked_fill(future, -torch.inf)
            outputs.append(scores.softmax(-1) @ v)
        x = x + torch.cat(outputs, 1) @ weights[prefix + "attention.out.weight"].T
        h = norm(x, weights[prefix + "mlp_norm.weight"])
        gate = h @ weights[prefix + "mlp.gate.weight"].T
        up = h @ weights[prefix + "mlp.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ weights[prefix + "mlp.down.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["embed.weight"].T


# SMALL has 4 frequencies, which turn 2.5, 0.25, 0.025 and 0.0025 times in 16 tokens. This scaling
# regards the first as fast, the second as in between, and the last two as slow.
LONG = dataclasses.replace(SMALL, norm_eps=0.1, rope_scaling=RopeScaling(8.0, 0.1, 1.0, 16))


@pytest.mark.parametrize("config", [SMALL, LONG], ids=["plain", "eps and RoPE scaling"])
def test_forward_matches_the_published_formula(config):
    model = build_model(config, seed=3)
    for parameter in model.parameters():  # larger than initially, so that no term is negligible
        parameter.data.mul_(5).add_(0.1)
    tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(0))
    logits = plain_decoder(config, dict(model.named_parameters()), tokens)
    torch.testing.assert_close(model(tokens[None])[0], logits, rtol=1e-4, atol=1e-4)
    targets = tokens.roll(-1)
    loss = F.cross_entropy(logits, targets)
    torch.testing.assert_close(model(tokens[None], targets[None]), loss, rtol=1e-5, atol=1e-5)


class Operations(TorchDispatchMode):
    """Counts each operation by name, and the elements of the largest result."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(tensor.numel() for tensor in tensors)])
        return result


def test_both_attention_implementations_agree():
    """Beyond 512 tokens torch's kernel is used. Causal attention over a prefix is unchanged."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 520, 8, generator=generator)
    k = torch.randn(2, 2, 520, 8, generator=generator)
    v = torch.randn(2, 2, 520, 8, generator=generator)
    whole = causal_attention(q, k, v)
    with Operations() as short:
        prefix = causal_attention(q[:, :, :512], k[:, :, :512], v[:, :, :512])
    assert short.counts["aten.baddbmm.default"] == 1  # the scores, written out
    torch.testing.assert_close(whole[:, :, :512], prefix, rtol=1e-4, atol=1e-5)


class AsOnGpu(TorchFunctionMode):
    """Lets the model choose the kernels of a GPU, and records how it calls attention."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.calls.append((args, kwargs))
        return function is is_gpu or function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype, heads", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_float32_attention_on_a_gpu_repeats_k_and_v(dtype, heads):
    """torch's float32 kernels for GPUs need as many heads of k and v as of q."""
    q = torch.randn(2, 4, 8, 8, dtype=dtype)
    k, v = torch.randn(2, 2, 2, 8, 8, dtype=dtype)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with AsOnGpu() as gpu:
        y = causal_attention(q, k, v)
    torch.testing.assert_close(y, expected)
    ((arguments, options),) = gpu.calls
    assert [x.size(1) for x in arguments] == [4, heads, heads]
    assert options["enable_gqa"] == (heads < 4)


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


def test_rope_has_the_same_bits_in_both_layouts():
    x = torch.randn(2, 16, 4, 8).transpose(1, 2)
    rope = rope_table(SMALL, 16, "cpu")
    rotated = apply_rope(x, rope)
    with AsOnGpu():
        as_on_gpu = apply_rope(x, rope)
    assert (rotated.is_contiguous(), as_on_gpu.is_contiguous()) == (True, False)
    assert rotated.equal(as_on_gpu)


def test_bfloat16_compute_keeps_gradients_in_float32():
    model = build_model(SMALL, dtype=torch.bfloat16)
    tokens = torch.randint(64, (2, 16))
    dtypes = set()
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    loss = model(tokens, tokens)
    loss.backward()
    assert dtypes == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    torch.testing.assert_close(loss, build_model(SMALL)(tokens, tokens), rtol=1e-2, atol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_give_the_same_loss_without_all_logits(tied):
    sizes = {"vocab_size": 640, "n_layer": 1, "n_kv_head": 4, "d_model": 16, "seq_len": 32}
    config = dataclasses.replace(SMALL, **sizes, tied=tied)
    tokens = torch.arange(4 * 33).view(4, 33) % 640
    losses, gradients, largest = [], [], []
    for chunks in (1, 5):
        model = build_model(config)
        if chunks > 1:
            model.head.loss = ChunkedLoss(model.head.loss, chunks)
        with Operations() as operations:
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters()])
        largest.append(operations.largest)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for whole, chunked in zip(*gradients, strict=True):
        assert (whole - chunked).norm() <= 1e-6 * whole.norm()
    assert largest == [128 * 640, 26 * 640]  # 128 tokens in chunks of 26, the last of 24


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
    checkpoint_activations(model.blocks, mode, SMALL)
    torch.manual_seed(0)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, tokens).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_repeats_the_dropout_mask(mode):
    torch.testing.assert_close(gradients_with_dropout(mode), gradients_with_dropout("none"))


# ---- parameters


def test_gradients_of_repeated_tokens_on_a_gpu_are_summed_in_float32():
    """By itself, CUDA sums in the weight's dtype for up to 12 x 256 = 3,072 tokens."""
    with AsOnGpu():
        difference, size = error_of_repeated_tokens(tied=True, count=12)
    assert difference < 0.005 * size


# ---- text


class Stub(nn.Module):
    """A model that computes its logits by a function of the tokens."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.forward = logits


def generated(model: nn.Module, prompt: list[int], n: int, tp: int = 1, **options) -> list[int]:
    """What `generate` adds to a prompt; `options` are fields of Sampling."""
    settings = {"seq_len": 16, "vocab_size": 60, "device": "cpu", "tp": tp}
    return list(generate(model, prompt, n, Sampling(**options), **settings))


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
    for options in ({"top_k": 1, "seed": 5}, {"top_p": 1e-9, "seed": 5}, {"temperature": 5e-324}):
        assert generated_by_small(**options) == greedy


def test_generate_repeats_its_tokens_with_the_same_seed():
    five, again, six = (generated_by_small(seed=seed) for seed in (5, 5, 6))
    assert five == again != six


def test_generate_draws_only_tokens_of_the_vocabulary():
    assert max(generated_by_small(temperature=5.0)) < 60


def test_generate_ends_at_the_stop_token():
    greedy = generated_by_small(temperature=0)
    stop = greedy[9]
    assert generated_by_small(temperature=0, stop=stop) == greedy[: greedy.index(stop)]


@pytest.mark.parametrize("tp", [1, 4])
def test_generate_gives_the_model_the_last_seq_len_tokens(tp):
    """Padding at the end, which causal attention ignores, lets tp ranks split them."""
    given = []

    def count_up(tokens: torch.Tensor) -> torch.Tensor:
        given.append(tokens[0].tolist())
        return F.one_hot((tokens + 1) % 60, 64).float()

    assert generated(Stub(count_up), [5, 6], 30, temperature=0, tp=tp) == [*range(7, 37)]
    for n, context in enumerate(given):
        expected = [*range(5, 7 + n)][-16:]
        assert context == expected + [0] * (-len(expected) % tp)


# top_k, top_p, the tokens drawn. Among the top 3, token 2 has the probability 0.5 / 0.95 = 0.526.
DRAWN = [(0, 0.49, {2}), (0, 0.51, {2, 0}), (0, 0.81, {2, 0, 1}), (0, 1.0, {2, 0, 1, 3})]
DRAWN += [(2, 1.0, {2, 0}), (3, 0.51, {2}), (4, 1.0, {2, 0, 1, 3})]


@pytest.mark.parametrize("top_k, top_p, drawn", DRAWN)
def test_top_k_and_top_p_keep_the_most_likely_tokens(top_k, top_p, drawn):
    logits = torch.tensor([0.3, 0.15, 0.5, 0.05]).double().log()
    generator = torch.Generator().manual_seed(0)
    draws = [draw(logits, Sampling(top_k=top_k, top_p=top_p), generator) for _ in range(300)]
    assert set(draws) == drawn


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_refuses_logits_that_are_not_finite(temperature):
    model = Stub(lambda tokens: torch.full((*tokens.shape, 64), torch.nan))
    with pytest.raises(NotFinite, match="logits are not finite"):
        generated(model, [1, 2], 1, temperature=temperature)
