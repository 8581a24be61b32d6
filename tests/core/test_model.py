"""The decoder's sizes, FLOPs and fields, against published numbers and sums by hand.

test_step.py has its logits, its loss and its initial weights.
"""

import dataclasses
import math

import pytest
import torch

from model import (
    SIZES,
    ModelConfig,
    RopeScaling,
    Transformer,
    meta_model,
    scale_frequencies,
)

SMALL = ModelConfig(64, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=48, seq_len=16)
SCALED = dataclasses.replace(SMALL, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16))

COUNTS = {
    # (4 * 128^2 + 3 * 128 * 352 + 2 * 128) * 4 + 257 * 128 + 128
    "tiny": 836_864,
    # GPT-2's own 124,439,808 includes position embeddings and biases, which this decoder lacks:
    # 50257 * 768 + 12 * (4 * 768^2 + 3 * 768 * 2048 + 2 * 768) + 768
    "gpt2-124m": 123_551_232,
    "tinyllama-1.1b": 1_100_048_384,  # as published
    "olmo-1b": 1_176_764_416 + 33 * 2048,  # as published, plus the weights of our norms
    "llama3-8b": 8_030_261_248,  # as published
    "llama3-70b": 70_553_706_496,  # as published
}


@pytest.mark.parametrize("name", SIZES)
def test_named_sizes_have_their_published_parameter_counts(name):
    with torch.device("meta"):
        assert Transformer(SIZES[name]).parameter_count() == COUNTS[name]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_layer, seq_len", [(2, 16), (5, 1024)])
def test_flops_by_hand(tied, n_layer, seq_len):
    """Each weight costs a multiply and an add in forward, and twice that in backward.

    So does each element of a query with a key, and of a score with a value. The causal mask hides
    half of the keys. An embedding is only looked up.
    """
    config = dataclasses.replace(SMALL, tied=tied, n_layer=n_layer, seq_len=seq_len)
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48  # q and out, k and v, MLP
    attention = 2 * 32 * seq_len / 2
    assert meta_model(config).flops_per_token() == 6 * (64 * 32 + n_layer * (block + attention))


def scaled(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's RoPE scaling, as Meta published it."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_seq_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = scaling.original_seq_len / wavelength - scaling.low_freq_factor
    smooth /= scaling.high_freq_factor - scaling.low_freq_factor
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def test_rope_scaling_matches_the_published_formula():
    """With the settings of Llama 3.1, whose frequencies are fast, slow and in between."""
    scaling = RopeScaling(8.0, 1.0, 4.0, original_seq_len=8192)
    frequencies = 500_000.0 ** (-torch.arange(0, 128, 2) / 128)
    expected = torch.tensor([scaled(frequency, scaling) for frequency in frequencies.tolist()])
    torch.testing.assert_close(scale_frequencies(frequencies, scaling), expected)


def error_of_repeated_tokens(tied: bool, count: int) -> tuple[float, float]:
    """Return by how much the embedding's gradient of a bfloat16 weight is off, and its norm.

    Half of the count x 256 tokens are the same one. FSDP gathers such weights.
    """
    config = dataclasses.replace(SMALL, tied=tied, seq_len=256)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(64, (count, 256), generator=generator) for _ in range(2))
    tokens[:, ::2] = 7
    gradients = []
    for weight_dtype in (torch.float32, torch.bfloat16):
        model = Transformer(config, torch.bfloat16)
        for name, parameter in model.named_parameters():
            model.init_tensor(name, parameter, seed=0)
        model.bfloat16().to(weight_dtype)(tokens, targets).backward()
        gradients.append(model.embed.weight.grad.float())
    expected, rounded = gradients
    return (rounded - expected).norm().item(), expected.norm().item()


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_repeated_tokens_are_summed_in_float32(tied):
    difference, size = error_of_repeated_tokens(tied, count=16)
    assert difference < 0.005 * size


def test_a_manifest_without_a_field_gives_its_default():
    """A manifest may be older than the field."""
    fields = dataclasses.asdict(SCALED)
    del fields["norm_eps"]
    assert ModelConfig.from_dict(fields) == SCALED
