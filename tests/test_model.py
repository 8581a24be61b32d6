import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from model import SIZES, ModelConfig, Transformer, generate

SMALL = ModelConfig(
    vocab_size=64, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=48, seq_len=16
)

# Published counts. GPT-2's own 124,439,808 has position embeddings and biases, which this decoder has not: its shape
# gives 50257 * 768 + 12 * (4 * 768^2 + 3 * 768 * 2048 + 2 * 768) + 768. OLMo's norms have no weights: 33 * 2048 more.
COUNTS = {
    "gpt2-124m": 123_551_232,
    "tinyllama-1.1b": 1_100_048_384,
    "olmo-1b": 1_176_764_416 + 33 * 2048,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}


def build(c: ModelConfig = SMALL, seed: int = 0, dtype=torch.float32) -> Transformer:
    net = Transformer(c, dtype)
    for name, parameter in net.named_parameters():
        net.init_tensor(name, parameter.data, seed)
    return net


@pytest.mark.parametrize("name", COUNTS)
def test_named_sizes_have_their_published_parameter_counts(name):
    with torch.device("meta"):
        assert Transformer(SIZES[name]).parameter_count() == COUNTS[name]


def test_forward_is_the_published_formula():
    """Against the decoder written out plainly: one head at a time, complex rotations, softmax by hand."""
    net, c = build(seed=3), SMALL
    for (
        parameter
    ) in net.parameters():  # larger than at the start, so that nothing hides behind small numbers
        parameter.data.mul_(5).add_(0.1)
    weights = dict(net.named_parameters())
    tokens = torch.randint(64, (16,), generator=torch.Generator().manual_seed(0))

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    d_head = c.d_model // c.n_head
    frequency = torch.tensor([c.rope_theta ** (-2 * i / d_head) for i in range(d_head // 2)])
    turn = torch.polar(torch.ones(16, d_head // 2), torch.arange(16.0)[:, None] * frequency)

    def rotated(x):
        pairs = torch.complex(x[:, : d_head // 2], x[:, d_head // 2 :]) * turn
        return torch.cat((pairs.real, pairs.imag), 1)

    x = weights["embed.weight"][tokens]
    for i in range(c.n_layer):
        w = {
            name.removeprefix(f"blocks.{i}."): weight
            for name, weight in weights.items()
            if name.startswith(f"blocks.{i}.")
        }
        h, heads = norm(x, w["attention_norm.weight"]), []
        for head in range(c.n_head):
            rows = slice(head * d_head, (head + 1) * d_head)
            group = head // (c.n_head // c.n_kv_head)
            kv_rows = slice(group * d_head, (group + 1) * d_head)
            q, k = (
                rotated(h @ w["attention.q.weight"][rows].T),
                rotated(h @ w["attention.k.weight"][kv_rows].T),
            )
            scores = (q @ k.T / d_head**0.5).masked_fill(
                torch.ones(16, 16).triu(1).bool(), -torch.inf
            )
            heads.append(scores.softmax(-1) @ (h @ w["attention.v.weight"][kv_rows].T))
        x = x + torch.cat(heads, 1) @ w["attention.out.weight"].T
        h = norm(x, w["mlp_norm.weight"])
        gate = h @ w["mlp.gate.weight"].T
        x = x + (gate * torch.sigmoid(gate) * (h @ w["mlp.up.weight"].T)) @ w["mlp.down.weight"].T
    logits = norm(x, weights["norm.weight"]) @ weights["embed.weight"].T
    torch.testing.assert_close(net(tokens[None])[0], logits, rtol=1e-4, atol=1e-4)
    targets = tokens.roll(-1)
    torch.testing.assert_close(
        net(tokens[None], targets[None]), F.cross_entropy(logits, targets), rtol=1e-5, atol=1e-5
    )


def test_a_token_does_not_see_what_follows():
    net, tokens = build(), torch.randint(64, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 64
    before, after = net(tokens)[0], net(changed)[0]
    torch.testing.assert_close(before[:9], after[:9], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[9:], after[9:])


def test_initial_weights_depend_on_seed_and_name_alone():
    a, b, c = build(seed=1), build(seed=1), build(seed=2)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed.weight, c.embed.weight)
    assert not torch.equal(a.blocks[0].attention.q.weight, a.blocks[1].attention.q.weight)
    assert a.blocks[0].mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert a.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4**0.5, rel=0.1)


def test_flops_are_counted_as_the_matrix_products_that_run():
    """6 N + 6 * n_layer * d_model * T against torch's own counter, in which the mask does not halve attention."""
    net, tokens = build(), torch.randint(64, (1, 16))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        net(tokens, tokens).backward()
    norms = sum(p.numel() for name, p in net.named_parameters() if name.endswith("norm.weight"))
    masked_half = 6 * SMALL.n_layer * SMALL.d_model * 16
    assert counter.get_total_flops() == pytest.approx(
        16 * (net.flops_per_token(16) - 6 * norms + masked_half), rel=1e-9
    )


def test_bfloat16_computes_in_bfloat16_and_keeps_gradients_in_float32():
    net, tokens = build(dtype=torch.bfloat16), torch.randint(64, (2, 16))
    seen = set()
    for block in net.blocks:
        block.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    loss = net(tokens, tokens)
    loss.backward()
    assert seen == {torch.bfloat16} and loss.dtype == torch.float32
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    torch.testing.assert_close(loss, build()(tokens, tokens), rtol=1e-2, atol=0)


def test_generate_is_greedy_at_temperature_0_and_repeats_itself_with_one_seed():
    net = build()
    settings = {"seq_len": 16, "vocab_size": 60, "device": "cpu"}
    draw = lambda **more: list(generate(net, [1, 2], 30, **settings, **more))  # noqa: E731
    greedy, tokens = draw(temperature=0), [1, 2]
    for token in greedy:
        assert token == net(torch.tensor([tokens[-16:]]))[0, -1, :60].argmax()
        tokens.append(token)
    assert draw(seed=5) == draw(seed=5) != draw(seed=6)
    assert draw(top_k=1, seed=5) == greedy
    assert max(draw(temperature=5.0)) < 60


@pytest.mark.parametrize("change", [{"n_head": 3}, {"n_kv_head": 3}, {"d_model": 36}])
def test_numbers_that_do_not_fit_together_are_refused(change):
    with pytest.raises(ValueError, match="must be"):
        ModelConfig(**{**vars(SMALL), **change})


class Largest(TorchDispatchMode):
    """The most elements that any tensor has."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.elements = max(
            [
                self.elements,
                *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)),
            ]
        )
        return result


@pytest.mark.parametrize("tied", [True, False])
def test_a_loss_in_chunks_is_the_same_and_never_has_all_logits(tied):
    c = ModelConfig(
        640, n_layer=1, n_head=2, n_kv_head=1, d_model=16, d_ff=24, seq_len=32, tied=tied
    )
    tokens, found = torch.arange(4 * 33).view(4, 33) % 640, {}
    for chunks in (1, 5):  # 128 tokens in parts of 26, the last of 24
        net = Transformer(c, loss_chunks=chunks)
        for name, parameter in net.named_parameters():
            net.init_tensor(name, parameter.data, 0)
        with Largest() as largest:
            loss = net(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        found[chunks] = loss, [parameter.grad for parameter in net.parameters()], largest.elements
    (loss, grads, most), (chunked, others, least) = found[1], found[5]
    assert chunked.item() == pytest.approx(loss.item(), rel=1e-6)
    assert all((a - b).norm() <= 1e-6 * a.norm() for a, b in zip(grads, others, strict=True))
    assert most == 128 * 640 and least == 26 * 640
