"""What one step is: the sequences that it reads, the rate, the update, and no wait for the device.

Most tests call the public functions of data, model and optim, and compare the results with the
reference in test_numbers.py, or with numbers that a reader can work out by hand. The last ones run
whole steps on ranks of the pool: through train.command, and through a loop of this file's own over
dist, optim and checkpoint.
"""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rig import SMALL, Operations, read_rows, run_command
from torch import Tensor, nn

import checkpoint
import data
import dist
import optim
from model import SIZES, ModelConfig, RopeScaling, Transformer, meta_model, scale_frequencies

from .test_numbers import decoder, rate

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


@pytest.mark.parametrize("count, windows", [(5, 1), (8, 1), (9, 2), (81, 20)])
def test_the_last_token_of_a_window_is_the_first_of_the_next(tmp_path, count, windows):
    """In a folder of `count` tokens, of which number i is 3 * i + 1, and with T = 4."""
    for split in ("train", "val"):
        (3 * np.arange(count, dtype=np.uint16) + 1).tofile(tmp_path / f"{split}.bin")
    meta = {"tokenizer": "bytes", "dtype": "uint16", "vocab_size": 257}
    meta |= {"train_tokens": count, "val_tokens": count}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    dataset = data.open_folder(tmp_path).open("val", 4, None)
    assert len(dataset) == windows
    batch = dataset[[*range(windows)]]
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[3 * (4 * w + i) + 1 for i in range(5)] for w in range(windows)]


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


def make_optimizer(parameters, settings: optim.Settings) -> optim.Optimizer:
    """An optimizer in which only the matrix decays."""
    return optim.Optimizer(parameters, decays=lambda name: name == MATRIX, settings=settings)


class Updated(NamedTuple):
    """Two parameters, full of ones at first, and their optimizer."""

    matrix: nn.Parameter
    vector: nn.Parameter
    optimizer: optim.Optimizer

    def update(self, step: int, lr: float, matrix_norm: float, vector_norm: float) -> dict:
        """Update the parameters with gradients of these norms, whose elements are all equal."""
        self.matrix.grad = torch.full((2, 2), matrix_norm / 2)
        self.vector.grad = torch.full((16,), vector_norm / 4)
        values, _ = self.optimizer.step(step, lr)
        return {name: value.item() for name, value in values.items()}

    def copy(self) -> list[Tensor]:
        """Copies of the weights and of all state except the number of skipped steps."""
        state = self.optimizer.state()
        tensors = [self.matrix, self.vector, state["norm_average"]]
        tensors += [*state["exp_avg"].values(), *state["exp_avg_sq"].values()]
        return [tensor.detach().clone() for tensor in tensors]


def new_parameters(**settings) -> Updated:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(16))
    settings = optim.Settings(lr=1.0, max_steps=10, **settings)
    return Updated(matrix, vector, make_optimizer([(MATRIX, matrix), (VECTOR, vector)], settings))


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
    run = train(2, "--strategy ddp --lr 1e300 --max_steps 130 --save_interval 25")
    assert run.status == 1
    assert "100" in run.error and "101" in run.error  # skipped updates, and the step
    assert run.steps() == []
    assert run.printed.count("NOT SAVED") == 4


# --------------------------------------------------------------------------------------------------
# The model

SHAPE = ModelConfig(64, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=48, seq_len=16)


def new_model(dtype: torch.dtype = torch.float32, **changes) -> Transformer:
    """A model of SHAPE with these changes, and with initial weights."""
    model = Transformer(dataclasses.replace(SHAPE, **changes), dtype)
    for name, parameter in model.named_parameters():
        model.init_tensor(name, parameter, seed=0)
    return model


@pytest.mark.parametrize("T, tied", [(16, True), (600, False)])
@torch.no_grad()
def test_the_logits_are_those_of_a_llama(T, tied):
    """A CPU uses another kernel for long sequences."""
    model = new_model(tied=tied)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 10  # so that attention chooses between tokens
    tokens = torch.randint(64, (2, T), generator=torch.Generator().manual_seed(0))
    expected = decoder(model.state_dict(), tokens, n_layer=2, d_head=8)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-3, atol=1e-4)


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
        model = new_model(torch.bfloat16, tied=tied, seq_len=256)
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


# --------------------------------------------------------------------------------------------------
# Steps of train.command

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def waits_for_device(operation, arguments) -> bool:
    """Whether a host would wait until a GPU has computed a value.

    The results, or the shapes of results, then depend on the values of a tensor: those of item and
    equal, for example, of nonzero, and of an index that is a mask.
    """
    if operation.overloadpacket is torch.ops.aten.index:
        return any(index is not None and index.dtype == torch.bool for index in arguments[1])
    return not WAITS.isdisjoint(operation.tags)


def count_syncs(argv: list[str]) -> tuple[int, int]:
    """Run train.command on this rank; return its status and the number of host syncs."""
    waits = []

    def see(operation, arguments, result) -> None:
        waits.append(waits_for_device(operation, arguments))

    with Operations(see):
        status, _, _ = run_command(argv)
    return status, sum(waits)


MESHES = {
    "single": (1, "--strategy single --clip adaptive"),
    "ddp": (2, "--strategy ddp --micro_batch_size 2"),
    "fsdp": (2, "--strategy fsdp --micro_batch_size 1"),
}


@pytest.mark.parametrize("name", MESHES)
def test_the_host_does_not_wait_for_the_device_in_a_step(pool, tokens, tmp_path, name):
    """A run of 6 steps has as many host syncs as one of 5 steps."""
    ranks, flags = MESHES[name]
    answers = []
    for steps in (5, 6):
        out = tmp_path / f"{steps}"
        text = f"{SMALL} --data {tokens} --out {out} {flags} --max_steps {steps} --log_interval 1"
        answers.append(pool(ranks, count_syncs, text.split()))
        assert len(read_rows(out / "metrics.jsonl", "loss")) == steps
    assert answers[0] == answers[1]
    assert {status for status, _ in answers[0]} == {0}


# --------------------------------------------------------------------------------------------------
# The leaves, without the trainer


class Net(nn.Module):
    """A model that is not ours: y = W2 tanh(W1 x + b)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.second = nn.Linear(32, 1, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(self.first(x).tanh()), y)


def fill(name: str, tensor: Tensor) -> None:
    generator = torch.Generator().manual_seed(len(name))
    tensor.normal_(0.0, 0.3, generator=generator)


def train_net(strategy: str, out: Path, start_step: int, max_steps: int) -> list[tuple]:
    """Train Net from a checkpoint of `start_step`, if it is not 0, and save it after each step.

    Returns the loss and the norm of the gradient of each step.
    """
    world = dist.start("cpu")
    shape = dist.mesh_shape(strategy, world.size, local_size=2)
    mesh = dist.make_mesh(world, shape)
    with torch.device("meta"):
        net = Net()
    forward = dist.parallelize(net, mesh, dist.Settings(strategy=strategy, wrap="none"), fill)
    settings = optim.Settings(lr=0.05, max_steps=max_steps, warmup_steps=0, weight_decay=0.0)
    optimizer = make_optimizer(net.named_parameters(), settings)
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}
    state = {"model": weights, "optimizer": optimizer.state()}
    if start_step > 0:
        checkpoint.load_state(checkpoint.step_path(out, start_step), state)

    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    y = x.prod(dim=1, keepdim=True).sin()
    rows = torch.arange(16).chunk(world.size)[dist.dp_rank(mesh)]
    steps = []
    for step in range(start_step + 1, max_steps + 1):
        loss = torch.zeros(())
        for micro_step, part in enumerate(rows.chunk(2)):
            with dist.gradient_sync(forward, "batch", is_last=micro_step == 1):
                micro_loss = forward(x[part], y[part]) / 2
                micro_loss.backward()
            loss += micro_loss.detach() / world.size
        torch.distributed.all_reduce(loss)
        values, _ = optimizer.step(step, optim.learning_rate(step, settings))
        steps.append((loss.item(), values["grad_norm"].item()))
        path = checkpoint.step_path(out, step)
        checkpoint.save_state(path, state, {"step": step}, on_all_ranks=dist.on_all_ranks)
    return steps


@pytest.mark.parametrize("strategy, ranks", [("ddp", 2), ("hsdp", 4)])
def test_a_loop_without_the_trainer_trains_and_saves_and_continues_on_one_rank(
    pool, tmp_path, strategy, ranks
):
    (alone,) = pool(1, train_net, "single", tmp_path / "alone", 0, 20)
    steps, *others = pool(ranks, train_net, strategy, tmp_path, 0, 20)
    assert others == [steps] * (ranks - 1)
    assert steps[-1][0] < 0.5 * steps[0][0]
    np.testing.assert_allclose(steps, alone, rtol=1e-4)

    assert checkpoint.verify(checkpoint.step_path(tmp_path, 10)) is None
    (on_one_rank,) = pool(1, train_net, "single", tmp_path, 10, 20)
    np.testing.assert_allclose(on_one_rank, alone[10:], rtol=1e-4)
