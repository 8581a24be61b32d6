"""What one step is: the sequences that it reads, the rate, the update, and sizes of the model.

The tests call the public functions of data, model and optim, and compare the results with numbers
that a reader can work out by hand. test_numbers.py compares whole steps with a reference.
"""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rig import build_model
from torch import Tensor, nn

import data
import optim
from model import SIZES, ModelConfig, RopeScaling, meta_model, scale_frequencies

from .test_numbers import rate

# --------------------------------------------------------------------------------------------------
# Which sequences a step reads


@pytest.mark.parametrize("windows", [1, 2, 3, 5, 16, 17, 100])
def test_each_epoch_is_a_permutation_of_all_windows(windows):
    orders = []
    for seed, epoch in itertools.product((0, 1), (0, 1, 2)):
        numbers = range(epoch * windows, (epoch + 1) * windows)
        orders.append([data.window_of(n, windows, seed) for n in numbers])
        assert sorted(orders[-1]) == [*range(windows)]
    if windows == 100:  # then orders differ, between seeds as well as epochs
        assert len({*map(tuple, orders)}) == 6


@pytest.mark.parametrize("dp_size, micro_batch_size", [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2)])
def test_a_step_reads_the_same_sequences_on_any_ranks_each_once(dp_size, micro_batch_size):
    for step in (1, 2, 7):
        layout = range(step, step + 1), 8, micro_batch_size
        ranks = [[*data.train_indices(*layout, rank, dp_size)] for rank in range(dp_size)]
        batches = [*itertools.chain(*ranks)]
        assert {len(batch) for batch in batches} == {micro_batch_size}
        assert len({len(micro_batches) for micro_batches in ranks}) == 1
        assert sorted(itertools.chain(*batches)) == [*range(8 * (step - 1), 8 * step)]


@pytest.mark.parametrize("dp_size, micro_batch_size", [(1, 1), (1, 3), (2, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("count, sequences", [(4, 4), (5, 10), (4, 10), (1, 10)])
def test_an_evaluation_reads_the_same_sequences_on_any_ranks_each_once(
    count, sequences, dp_size, micro_batch_size
):
    """They are spread evenly over the split."""
    layout = count, sequences, micro_batch_size
    ranks = [[*data.val_indices(*layout, rank, dp_size)] for rank in range(dp_size)]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [*itertools.chain(*ranks)]
    assert max(map(len, batches)) <= micro_batch_size
    expected = [i * sequences // count for i in range(count)]
    assert sorted(itertools.chain(*batches)) == expected


@pytest.mark.parametrize("dtype, first", [("uint16", 1), ("uint32", 70_000)])
@pytest.mark.parametrize("count, windows", [(5, 1), (8, 1), (9, 2), (81, 20)])
def test_the_last_token_of_a_window_is_the_first_of_the_next(
    tmp_path, count, windows, dtype, first
):
    """In a folder of `count` tokens, of which number i is first + 3 * i, and with T = 4."""
    for split in ("train", "val"):
        (3 * np.arange(count) + first).astype(dtype).tofile(tmp_path / f"{split}.bin")
    meta = {"tokenizer": None, "dtype": dtype, "vocab_size": first + 257}
    meta |= {"train_tokens": count, "val_tokens": count}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    dataset = data.open_folder(tmp_path).open("val", 4, None)
    assert len(dataset) == windows
    batch = dataset[[*range(windows)]]
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[first + 3 * (4 * w + i) for i in range(5)] for w in range(windows)]


# --------------------------------------------------------------------------------------------------
# The learning rate


@pytest.mark.parametrize("schedule", optim.SCHEDULES)
@pytest.mark.parametrize("warmup_steps, max_steps", [(0, 1), (2, 10), (3, 25)])
def test_the_learning_rate_of_each_step(schedule, warmup_steps, max_steps):
    flags = dict(lr=0.3, min_lr=0.02, schedule=schedule)
    flags |= dict(warmup_steps=warmup_steps, max_steps=max_steps)
    for step in range(1, max_steps + 2):  # at max_steps + 1, a schedule would arrive at min_lr
        expected = rate(step, SimpleNamespace(**flags))
        assert optim.learning_rate(step, optim.Settings(**flags)) == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------
# The update

MATRIX, VECTOR = "matrix", "vector"  # (2, 2) with weight decay, and (16,) without


class Updated(NamedTuple):
    """Two parameters, full of ones at first, and their optimizer."""

    matrix: nn.Parameter
    vector: nn.Parameter
    optimizer: optim.Optimizer

    def update(self, step: int, lr: float, matrix_norm: float, vector_norm: float) -> dict:
        """Update the parameters with gradients of these norms, whose elements are all equal."""
        self.matrix.grad = torch.full((2, 2), matrix_norm / 2)
        self.vector.grad = torch.full((16,), vector_norm / 4)
        values, rows = self.optimizer.step(step, lr)
        assert rows == []  # statistics, for which the host would wait
        return {name: value.item() for name, value in values.items()}

    def copy(self) -> list[Tensor]:
        """Copies of the weights and of all state except the number of skipped steps."""
        state = self.optimizer.state()
        tensors = [self.matrix, self.vector, state["norm_average"]]
        tensors += [*state["exp_avg"].values(), *state["exp_avg_sq"].values()]
        return [tensor.detach().clone() for tensor in tensors]


def new_parameters(**settings) -> Updated:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(16))
    optimizer = optim.Optimizer(
        [(MATRIX, matrix), (VECTOR, vector)],
        decays=lambda name: name == MATRIX,
        settings=optim.Settings(lr=1.0, max_steps=10, **settings),
    )
    return Updated(matrix, vector, optimizer)


def test_updates_of_tiny_gradients_are_those_of_torch():
    """They are so small that the 1e-8 in the denominator counts. The second one is skipped."""
    both = new_parameters(beta1=0.8, beta2=0.9, weight_decay=0.5, max_grad_norm=1e9)
    others = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(16))]
    groups = [{"params": others[:1]}, {"params": others[1:], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, betas=(0.8, 0.9), weight_decay=0.5)
    for step, (lr, gradient) in enumerate([(0.1, 2e-8), (0.1, math.nan), (0.05, -1e-8)], start=1):
        both.update(step, lr, matrix_norm=2 * gradient, vector_norm=4 * gradient)
        for group, other in zip(adamw.param_groups, others):
            group["lr"] = lr
            other.grad = torch.full_like(other, gradient)
        if math.isfinite(gradient):
            adamw.step()
        torch.testing.assert_close([both.matrix, both.vector], others, rtol=1e-6, atol=0)


# The norms of both gradients, max_grad_norm, by what the gradients are divided, whether it clips.
# torch.nn.utils.clip_grad_norm_ also adds 1e-6 to the norm.
CLIPPED = {
    "3 and 4 give 5": (3.0, 4.0, 1.0, 5.000001, 1),
    "tiny": (3e-6, 4e-6, 1e-6, 6.0, 1),
    "below the limit": (3.0, 4.0, 5.1, 1.0, 0),
    "at the limit": (3.0, 4.0, 5.0, 1.0000002, 0),
}


@pytest.mark.parametrize("name", CLIPPED)
def test_clipping_divides_by_the_norm_of_all_gradients(name):
    matrix, vector, limit, divisor, is_clipped = CLIPPED[name]
    both = new_parameters(max_grad_norm=limit)
    values = both.update(1, 1.0, matrix, vector)
    exp_avg = both.optimizer.state()["exp_avg"]  # 0.1 * the clipped gradient
    assert exp_avg[MATRIX].mean().item() == pytest.approx(0.1 * matrix / 2 / divisor, rel=1e-6)
    assert exp_avg[VECTOR].mean().item() == pytest.approx(0.1 * vector / 4 / divisor, rel=1e-6)
    assert values["grad_norm"] == pytest.approx(math.hypot(matrix, vector))
    assert values["clipped"] == is_clipped


@pytest.mark.parametrize("clip", ["norm", "adaptive"])
@pytest.mark.parametrize("matrix, vector", [(math.nan, 4.0), (3.0, math.inf)])
def test_a_gradient_that_is_not_finite_skips_the_whole_update(clip, matrix, vector):
    both = new_parameters(clip=clip)
    both.update(1, 1.0, 3.0, 4.0)
    before = both.copy()
    for count in (1, 2):
        values = both.update(1 + count, 1.0, matrix, vector)
        assert all(map(torch.equal, both.copy(), before))
        assert values["skipped_steps"] == values["skipped_in_a_row"] == count
    values = both.update(4, 1.0, 3.0, 4.0)
    assert not any(map(torch.equal, both.copy()[:2], before[:2]))
    assert (values["skipped_steps"], values["skipped_in_a_row"]) == (2, 0)
    assert both.optimizer.state()["skipped_steps"].item() == 2


def test_too_many_skipped_updates_end_a_run_that_saves_no_such_weights(train):
    """The first update makes all weights infinite, and no later gradient is finite."""
    run = train(1, "--lr 1e300 --max_steps 130 --save_interval 25")
    assert run.status == 1
    assert run.rows()[-1]["step"] == 101
    assert run.rows()[-1]["skipped_in_a_row"] == 100
    waits = [row["data_wait"] for row in run.rows()]
    assert waits != sorted(waits)  # each is that of one row
    failed = [row["step"] for row in run.rows("event") if row["event"] == "checkpoint_failed"]
    assert failed == [25, 50, 75, 100]
    assert run.steps() == []


def test_a_validation_loss_that_is_not_finite_ends_each_start_of_a_run(train):
    for _ in range(2):
        run = train(1, "--lr 1e17 --max_steps 1")
        assert (run.status, run.steps()) == (1, [1])


# --------------------------------------------------------------------------------------------------
# The model

SHAPE = ModelConfig(64, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=48, seq_len=16)

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


def test_named_sizes_have_their_published_parameter_counts():
    assert {name: meta_model(size).parameter_count() for name, size in SIZES.items()} == COUNTS


@pytest.mark.parametrize("tied", [True, False])
def test_flops_by_hand(tied):
    """Each weight costs a multiply and an add in forward, and twice that in backward.

    So does each element of a query with a key, and of a score with a value. The causal mask hides
    half of the keys. An embedding is only looked up.
    """
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48  # q and out, k and v, MLP
    attention = 2 * 32 * 1024 / 2
    model = meta_model(dataclasses.replace(SHAPE, tied=tied, n_layer=5, seq_len=1024))
    assert model.flops_per_token() == 6 * (64 * 32 + 5 * (block + attention))


def test_rope_scaling_matches_the_published_formula():
    """With the settings of Llama 3.1: wavelengths below 2048, from 8192, and in between."""
    frequencies = 500_000.0 ** (-torch.arange(0, 128, 2) / 128)
    wavelengths = 2 * math.pi / frequencies
    smooth = ((8192 / wavelengths - 1) / (4 - 1)).clamp(0, 1)
    expected = (1 - smooth) * frequencies / 8 + smooth * frequencies
    scaling = RopeScaling(8.0, 1.0, 4.0, original_seq_len=8192)
    torch.testing.assert_close(scale_frequencies(frequencies, scaling), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_repeated_tokens_are_summed_in_float32(tied):
    """Half of 16 x 256 tokens are the same one, whose weight is in bfloat16, as FSDP gathers it."""
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(64, (16, 256), generator=generator) for _ in range(2))
    tokens[:, ::2] = 7
    gradients = []
    for weight_dtype in (torch.float32, torch.bfloat16):
        model = build_model(dataclasses.replace(SHAPE, tied=tied), dtype=torch.bfloat16)
        model.bfloat16().to(weight_dtype)(tokens, targets).backward()
        gradients.append(model.embed.weight.grad.float())
    expected, rounded = gradients
    assert (rounded - expected).norm() < 0.005 * expected.norm()


def test_a_manifest_without_a_field_gives_its_default():
    """A manifest may be older than the field."""
    scaled = dataclasses.replace(SHAPE, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16))
    fields = dataclasses.asdict(scaled)
    del fields["norm_eps"]
    assert ModelConfig.from_dict(fields) == scaled
