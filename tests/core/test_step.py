"""What one step is: the sequences that it reads, the loss, the update, and no wait for the device.

Most tests call the public functions of data, model and optim, and compare the results with numbers
that a reader can work out by hand. The last ones run whole steps on ranks of the pool: through
train.command, and through a loop of this file's own over dist, optim and checkpoint.
"""

import itertools
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import data
import dist
import optim
from model import ModelConfig, Transformer

from .conftest import ROOT, SMALL, Run, full_tensors, run_command
from .test_numbers import decoder

# --------------------------------------------------------------------------------------------------
# Which sequences a step reads

SIZES = (1, 2, 3, 5, 16, 17, 100)  # numbers of windows, powers of two and others
LAYOUTS = [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (8, 1)]  # (dp_size, micro_batch_size)
GLOBAL_BATCH_SIZE = 8


@pytest.mark.parametrize("windows", SIZES)
def test_each_epoch_is_a_permutation_of_all_windows(windows):
    for seed, epoch in itertools.product((0, 1), (0, 1, 2)):
        numbers = range(epoch * windows, (epoch + 1) * windows)
        order = [data.window_of(n, windows, seed) for n in numbers]
        assert sorted(order) == [*range(windows)]


@pytest.mark.parametrize("first, second", [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((0, 1), (1, 0))])
def test_the_order_of_windows_differs_between_seeds_and_epochs(first, second):
    orders = []
    for seed, epoch in (first, second):
        numbers = range(epoch * 100, (epoch + 1) * 100)
        orders.append([data.window_of(n, 100, seed) for n in numbers])
    assert orders[0] != orders[1]
    assert [*range(100)] not in orders


@pytest.mark.parametrize("windows", [5, 16, 17])
def test_any_window_can_come_at_any_place_of_an_epoch(windows):
    for n in (0, windows - 1):
        places = {data.window_of(n, windows, seed) for seed in range(300)}
        assert places == {*range(windows)}


def test_an_epoch_may_have_more_windows_than_a_table_could_list():
    assert 0 <= data.window_of(10**14 - 1, 10**14, 5) < 10**14


def indices_of_ranks(steps: range, dp_size: int, micro_batch_size: int) -> list[list[list[int]]]:
    """The micro-batches of each dp_rank."""
    sizes = (GLOBAL_BATCH_SIZE, micro_batch_size)
    ranks = range(dp_size)
    return [list(data.train_indices(steps, *sizes, rank, dp_size)) for rank in ranks]


@pytest.mark.parametrize("dp_size, micro_batch_size", LAYOUTS)
def test_a_step_reads_the_same_sequences_on_any_ranks_each_once(dp_size, micro_batch_size):
    for step in (1, 2, 7):
        ranks = indices_of_ranks(range(step, step + 1), dp_size, micro_batch_size)
        batches = [*itertools.chain(*ranks)]
        assert {len(batch) for batch in batches} == {micro_batch_size}
        assert len({len(micro_batches) for micro_batches in ranks}) == 1
        last = step * GLOBAL_BATCH_SIZE
        assert sorted(itertools.chain(*batches)) == [*range(last - GLOBAL_BATCH_SIZE, last)]


@pytest.mark.parametrize("dp_size, micro_batch_size", LAYOUTS)
def test_a_resumed_run_reads_what_the_whole_run_reads(dp_size, micro_batch_size):
    whole = indices_of_ranks(range(1, 8), dp_size, micro_batch_size)
    parts = [range(1, 4), range(4, 8)]
    before, after = (indices_of_ranks(steps, dp_size, micro_batch_size) for steps in parts)
    assert [first + rest for first, rest in zip(before, after)] == whole


# (evaluated sequences, sequences of the split, which ones are read)
EVALUATED = {
    "all": (4, 4, [0, 1, 2, 3]),
    "every second": (5, 10, [0, 2, 4, 6, 8]),
    "spread unevenly": (4, 10, [0, 2, 5, 7]),
    "one": (1, 10, [0]),
}


@pytest.mark.parametrize("dp_size, micro_batch_size", [(1, 1), (1, 3), (2, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("count, sequences, expected", EVALUATED.values(), ids=EVALUATED)
def test_an_evaluation_reads_the_same_sequences_on_any_ranks_each_once(
    count, sequences, expected, dp_size, micro_batch_size
):
    ranks = []
    for rank in range(dp_size):
        ranks.append([*data.val_indices(count, sequences, micro_batch_size, rank, dp_size)])
    assert len({len(batches) for batches in ranks}) == 1
    batches = [*itertools.chain(*ranks)]
    assert max(map(len, batches)) <= micro_batch_size
    assert sorted(itertools.chain(*batches)) == expected


# --------------------------------------------------------------------------------------------------
# Which tokens a sequence contains

T = 4  # tokens of a sequence


def open_tokens(folder: Path, count: int, split: str, seed: int | None) -> data.TokenDataset:
    """The dataset of a folder in which token i is 3 * i + 1."""
    folder.mkdir()
    for name in ("train", "val"):
        (3 * np.arange(count, dtype=np.uint16) + 1).tofile(folder / f"{name}.bin")
    meta = {"tokenizer": "bytes", "dtype": "uint16", "vocab_size": 257}
    meta |= {"train_tokens": count, "val_tokens": count}
    (folder / "meta.json").write_text(json.dumps(meta))
    return data.open_folder(folder).open(split, T, seed)


@pytest.mark.parametrize("count, windows", [(T + 1, 1), (2 * T, 1), (2 * T + 1, 2), (81, 20)])
def test_the_last_token_of_a_window_is_the_first_of_the_next(tmp_path, count, windows):
    dataset = open_tokens(tmp_path / "tokens", count, "val", seed=None)
    assert len(dataset) == windows
    batch = dataset[[*range(windows)]]
    assert batch.dtype == torch.int64
    expected = [[3 * (w * T + i) + 1 for i in range(T + 1)] for w in range(windows)]
    assert batch.tolist() == expected


@pytest.mark.parametrize("seed", [0, 5])
def test_sequence_n_of_the_training_split_is_window_of_n(tmp_path, seed):
    dataset = open_tokens(tmp_path / "tokens", 81, "train", seed)
    numbers = [0, 19, 20, 7, 45]  # of three epochs, in any order
    firsts = [3 * T * data.window_of(n, 20, seed) + 1 for n in numbers]
    assert dataset[numbers][:, 0].tolist() == firsts
    assert (dataset[numbers].diff() == 3).all()


def test_a_split_that_is_shorter_than_a_sequence_is_refused(tmp_path):
    with pytest.raises(data.DataError, match="needs 5"):
        open_tokens(tmp_path / "tokens", T, "train", seed=0)


# --------------------------------------------------------------------------------------------------
# The learning rate

# lr 1 and min_lr 0.1, with 2 steps of warm-up and 8 steps after it. `progress` of step s is
# (s - 3) / 8: 0 at step 3, 1/2 at step 7 and 7/8 at step 10, the last one.
RATES = {
    "linear": {1: 0.5, 2: 1.0, 3: 1.0, 7: 0.55, 10: 0.1 + 0.9 / 8, 11: 0.1},
    "cosine": {1: 0.5, 2: 1.0, 3: 1.0, 5: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 7: 0.55, 11: 0.1},
    "wsd": {1: 0.5, 2: 1.0, 3: 1.0, 9: 1.0, 10: 0.1 + 0.9 * 0.625, 11: 0.1},
    "constant": {1: 0.5, 2: 1.0, 3: 1.0, 7: 1.0, 10: 1.0, 11: 1.0},
}
ROWS = [(schedule, step, lr) for schedule, row in RATES.items() for step, lr in row.items()]


@pytest.mark.parametrize("schedule, step, lr", ROWS)
def test_the_learning_rate_of_a_step(schedule, step, lr):
    settings = optim.Settings(lr=1.0, max_steps=10, warmup_steps=2, min_lr=0.1, schedule=schedule)
    assert optim.learning_rate(step, settings) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize("schedule", RATES)
def test_without_warm_up_the_first_step_has_the_peak_learning_rate(schedule):
    settings = optim.Settings(lr=0.3, max_steps=1, warmup_steps=0, schedule=schedule)
    assert optim.learning_rate(1, settings) == pytest.approx(0.3)


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
        return values

    def copy(self) -> list[Tensor]:
        """Copies of the weights and of all state except the number of skipped steps."""
        state = self.optimizer.state()
        tensors = [self.matrix, self.vector, state["norm_average"]]
        tensors += [*state["exp_avg"].values(), *state["exp_avg_sq"].values()]
        return [tensor.detach().clone() for tensor in tensors]


def new_parameters(**settings) -> Updated:
    matrix, vector = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(16))
    named = [(MATRIX, matrix), (VECTOR, vector)]
    settings = optim.Settings(lr=1.0, max_steps=10, **settings)
    return Updated(matrix, vector, make_optimizer(named, settings))


def close(tensor: Tensor, value: float, rel: float = 1e-6) -> bool:
    return tensor.flatten().tolist() == pytest.approx([value] * tensor.numel(), rel=rel)


# lr, the gradient of every element, and by hand the weight of a matrix (which decays) and of a
# vector. beta1 is 0.8, beta2 0.9 and the weight decay 0.5. In the first update both averages,
# corrected for bias, are the gradient's own: the weight moves by lr * g / (|g| + 1e-8), and the
# gradient is so small that the 1e-8 counts.
FIRST = 0.1 * 2e-8 / (2e-8 + 1e-8)
EXP_AVG = 0.8 * 0.2 * 2e-8 + 0.2 * -1e-8  # 1.2e-9
EXP_AVG_SQ = 0.9 * 0.1 * 2e-8**2 + 0.1 * 1e-8**2  # 4.6e-17
SECOND = 0.05 * EXP_AVG / 0.36 / (math.sqrt(EXP_AVG_SQ / 0.19) + 1e-8)  # 1 - 0.8^2, 1 - 0.9^2
UPDATES = [
    (0.1, 2e-8, 1 - 0.1 * 0.5 - FIRST, 1 - FIRST),
    (0.05, -1e-8, (0.95 - FIRST) * (1 - 0.05 * 0.5) - SECOND, 1 - FIRST - SECOND),
]


def test_the_first_two_updates_of_adamw_are_those_of_the_paper():
    both = new_parameters(beta1=0.8, beta2=0.9, weight_decay=0.5, max_grad_norm=1e9)
    for step, (lr, gradient, matrix, vector) in enumerate(UPDATES, start=1):
        both.update(step, lr, matrix_norm=2 * gradient, vector_norm=4 * gradient)
        assert close(both.matrix, matrix)
        assert close(both.vector, vector)
        assert both.matrix.grad is None and both.vector.grad is None
    state = both.optimizer.state()
    assert close(state["exp_avg"][MATRIX], EXP_AVG, rel=1e-5)
    assert close(state["exp_avg_sq"][VECTOR], EXP_AVG_SQ, rel=1e-5)


# The norms of both gradients, max_grad_norm, by what the gradients are divided, whether it clips.
# torch.nn.utils.clip_grad_norm_ also adds 1e-6 to the norm.
CLIPPED = {
    "3 and 4 give 5": (3.0, 4.0, 1.0, 5.000001, 1),
    "a lower limit": (3.0, 4.0, 0.1, 50.00001, 1),
    "tiny": (3e-6, 4e-6, 1e-6, 6.0, 1),
    "below the limit": (3.0, 4.0, 5.1, 1.0, 0),
    "at the limit": (3.0, 4.0, 5.0, 1.0000002, 0),
    "one is zero": (0.0, 4.0, 2.0, 2.0000005, 1),
}


@pytest.mark.parametrize(
    "matrix, vector, limit, divisor, is_clipped", CLIPPED.values(), ids=CLIPPED
)
def test_clipping_divides_by_the_norm_of_all_gradients(matrix, vector, limit, divisor, is_clipped):
    both = new_parameters(max_grad_norm=limit)
    values = both.update(1, 1.0, matrix, vector)
    exp_avg = both.optimizer.state()["exp_avg"]  # 0.1 * the clipped gradient
    assert close(exp_avg[MATRIX], 0.1 * matrix / 2 / divisor)
    assert close(exp_avg[VECTOR], 0.1 * vector / 4 / divisor)
    assert values["grad_norm"].item() == pytest.approx(math.hypot(matrix, vector))
    assert values["clipped"].item() == is_clipped


# The norms of both gradients, and by hand the averages after the update, and whether it clips. An
# average moves by 1 - max(beta1, beta2) = 0.05 of the way to the clipped norm, at most 2 x average.
NAN = math.nan
ADAPTIVE = [
    (3.0, 4.0, 3.0, 4.0, 0),  # start at the first norms
    (30.0, 4.0, 3.15, 4.0, 1),  # 3 + 0.05 * (6 - 3)
    (NAN, 4.0, 3.15, 4.0, None),  # skipped
    (3.15, NAN, 3.15, 4.0, None),
    (3.15, 0.0, 3.15, 3.8, 0),  # 4 + 0.05 * (0 - 4)
]


def test_adaptive_clipping_follows_the_average_norm_of_each_gradient():
    both = new_parameters(clip="adaptive", max_grad_norm_ratio=2.0)
    averages = both.optimizer.state()["norm_average"]
    for step, (matrix, vector, *expected, is_clipped) in enumerate(ADAPTIVE, start=1):
        values = both.update(step, 1.0, matrix, vector)
        assert averages.tolist() == pytest.approx(expected, rel=1e-5)
        if is_clipped is not None:
            assert values["clipped"].item() == is_clipped
        if step == 2:  # 0.9 * the first update's 0.1 * 3 / 2, and 0.1 * the limit of 6 / 2
            assert close(both.optimizer.state()["exp_avg"][MATRIX], 0.435, rel=1e-5)
            assert close(both.optimizer.state()["exp_avg"][VECTOR], 0.19, rel=1e-5)


def test_adaptive_clipping_leaves_small_gradients_alone():
    both = new_parameters(clip="adaptive", max_grad_norm_ratio=2.0)
    for step in range(1, 4):
        both.update(step, 1.0, 1e-7, 1e-9)
        norms = both.optimizer.state()["norm_average"].tolist()
        assert norms == pytest.approx([1e-7, 1e-9], rel=1e-5)


@pytest.mark.parametrize("clip", ["norm", "adaptive"])
@pytest.mark.parametrize("matrix, vector", [(NAN, 4.0), (3.0, NAN), (math.inf, 4.0)])
def test_a_gradient_that_is_not_finite_skips_the_whole_update(clip, matrix, vector):
    both = new_parameters(clip=clip)
    both.update(1, 1.0, 3.0, 4.0)
    before = both.copy()
    for count in (1, 2):
        values = both.update(1 + count, 1.0, matrix, vector)
        assert all(map(torch.equal, both.copy(), before))
        assert values["skipped_steps"].item() == values["skipped_in_a_row"].item() == count
    values = both.update(4, 1.0, 3.0, 4.0)
    assert not any(map(torch.equal, both.copy()[:2], before[:2]))
    assert (values["skipped_steps"].item(), values["skipped_in_a_row"].item()) == (2, 0)
    state = both.optimizer.state()
    assert state["skipped_steps"].item() == 2


def test_too_many_skipped_updates_end_a_run_that_saves_no_such_weights(train):
    """The first update makes all weights infinite, and no later gradient is finite."""
    run = train(2, "--strategy ddp --lr 1e300 --max_steps 130 --save_interval 25")
    assert run.status == 1
    assert "100 updates in a row were skipped up to step 101" in run.error
    assert "\n" not in run.error
    assert run.steps() == []
    assert run.printed.count("NOT SAVED") == 4


def test_the_state_that_a_checkpoint_stores_has_these_names():
    state = new_parameters().optimizer.state()
    slots = {name: [*value] for name, value in state.items() if isinstance(value, dict)}
    assert slots == {"exp_avg": [MATRIX, VECTOR], "exp_avg_sq": [MATRIX, VECTOR]}
    assert state.keys() - slots.keys() == {"norm_average", "skipped_steps"}


# --------------------------------------------------------------------------------------------------
# The model and its loss


def new_model(seed: int = 0, **changes) -> Transformer:
    shape = dict(vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, d_model=32, d_ff=48, seq_len=16)
    model = Transformer(ModelConfig(**shape | changes))
    for name, parameter in model.named_parameters():
        model.init_tensor(name, parameter, seed)
    return model


def random_tokens(T: int, vocab_size: int = 61) -> Tensor:
    """Two sequences of random tokens, (2, T)."""
    return torch.randint(vocab_size, (2, T), generator=torch.Generator().manual_seed(0))


def test_initial_weights_depend_on_the_seed_and_the_name():
    torch.manual_seed(1)
    first = new_model().state_dict()
    torch.manual_seed(2)
    again = new_model().state_dict()
    other = new_model(seed=1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [name for name in first if first[name].dim() == 2]
    assert not any(torch.equal(first[name], other[name]) for name in matrices)
    for one, two in itertools.combinations(matrices, 2):
        assert not torch.equal(first[one].flatten()[:64], first[two].flatten()[:64])


# Names, the standard deviation with 8 layers, and whether weight decay applies
WEIGHTS = {
    "embed.weight": (0.02, False),
    "head.weight": (0.02, True),
    "blocks.0.attention.q.weight": (0.02, True),
    "blocks.7.attention.k.weight": (0.02, True),
    "blocks.7.attention.out.weight": (0.02 / 4, True),  # sqrt(2 * 8) layers add to the residual
    "blocks.3.mlp.up.weight": (0.02, True),
    "blocks.0.mlp.down.weight": (0.02 / 4, True),
    "blocks.0.mlp_norm.weight": (0.0, False),
    "norm.weight": (0.0, False),
}


@pytest.mark.parametrize("name, std, decays", [(name, *row) for name, row in WEIGHTS.items()])
def test_the_size_of_initial_weights_and_which_of_them_decay(name, std, decays):
    model = new_model(n_layer=8, d_model=64, tied=False)
    weight = model.get_parameter(name)
    mean = 0.0 if std else 1.0
    assert weight.mean().item() == pytest.approx(mean, abs=0.1 * std)
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert model.decays(name) == decays


@pytest.mark.parametrize("tied", [True, False])
def test_an_untrained_model_guesses_and_its_loss_is_the_mean_over_tokens(tied):
    model, tokens = new_model(tied=tied), random_tokens(17)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(61), abs=0.05)
    logits = model(tokens[:, :-1])
    assert logits.shape == (2, 16, 61)
    by_hand = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)


def larger(model: Transformer) -> Transformer:
    """Make the model's weights large enough that attention chooses between tokens."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data *= 10
    return model


# A CPU uses another kernel for long sequences.
@pytest.mark.parametrize("T", [16, 600])
@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_the_logits_are_those_of_a_llama(T, tied):
    model, tokens = larger(new_model(tied=tied)), random_tokens(T)
    expected = decoder(model.state_dict(), tokens, n_layer=2, d_head=8)
    torch.testing.assert_close(model(tokens), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("T", [16, 600])
@torch.no_grad()
def test_a_later_token_does_not_change_earlier_logits(T):
    model, tokens = larger(new_model()), random_tokens(T)
    changed = tokens.clone()
    changed[:, 10] = (changed[:, 10] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert (before[:, 10:] != after[:, 10:]).any(dim=-1).all()


@pytest.mark.parametrize("T", [16, 600])
@torch.no_grad()
def test_shared_key_and_value_heads_equal_repeated_ones(T):
    shared, repeated = larger(new_model(n_kv_head=2)), new_model(n_kv_head=4)
    weights = shared.state_dict()
    for name, weight in weights.items():
        if name.endswith(("attention.k.weight", "attention.v.weight")):
            heads = weight.unflatten(0, (2, 8))  # d_head is 32 / 4
            weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    repeated.load_state_dict(weights)
    tokens = random_tokens(T)
    torch.testing.assert_close(shared(tokens), repeated(tokens), rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# Steps of train.command

WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class HostSyncs(TorchDispatchMode):
    """Counts operations for which a host would wait until a GPU has computed a value.

    Their results, or the shapes of their results, depend on the values of a tensor: item and equal,
    for example, nonzero, and an index that is a mask.
    """

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        waits = not WAITS.isdisjoint(operator.tags)
        if operator.overloadpacket is torch.ops.aten.index:
            waits = any(index is not None and index.dtype == torch.bool for index in args[1])
        self.count += waits
        return operator(*args, **(kwargs or {}))


def count_syncs(argv: list[str]) -> tuple[int, tuple[int, str, str]]:
    """Run train.command on this rank; return the number of host syncs, and the answer."""
    with HostSyncs() as syncs:
        answer = run_command(argv)
    return syncs.count, answer


MESHES = {
    "single": (1, "--strategy single --clip adaptive"),
    "ddp": (2, "--strategy ddp --micro_batch_size 2"),
    "fsdp": (2, "--strategy fsdp --micro_batch_size 1"),
}


class Counted(NamedTuple):
    run: Run
    syncs: list[int]  # of each rank


@pytest.fixture(scope="module", params=MESHES.values(), ids=MESHES)
def counted(request, pool, tokens, tmp_path_factory) -> dict[int, Counted]:
    """A run of 5 steps and one of 6 steps on a mesh."""
    ranks, flags = request.param
    runs = {}
    for steps in (5, 6):
        out = tmp_path_factory.mktemp("steps") / "run"
        text = f"{SMALL} --data {tokens} --out {out} {flags} --max_steps {steps} --log_interval 1"
        counts, answers = zip(*pool(ranks, count_syncs, text.split()))
        assert answers[0][0] == 0, answers
        runs[steps] = Counted(Run(out, *answers[0]), list(counts))
    return runs


def test_the_host_does_not_wait_for_the_device_in_a_step(counted):
    assert counted[6].syncs == counted[5].syncs
    assert len(counted[6].run.rows()) == 1 + len(counted[5].run.rows())


def model_of(weights: dict[str, Tensor]) -> Transformer:
    """The model of SMALL with these weights, {"model.embed.weight": ...}, or initial ones."""
    vocab_size = len(weights["model.embed.weight"])
    return new_model(vocab_size=vocab_size, d_ff=64)


@torch.no_grad()
def test_a_run_logs_the_loss_of_the_sequences_and_weights_of_a_step(counted, tokens):
    """The first loss is that of initial weights and sequences 0 to 7, the last one of 10 others."""
    run = counted[5].run
    folder = data.open_folder(tokens)
    weights = run.weights()
    model = model_of(weights)
    batch = folder.open("train", 16, seed=0)[[*range(8)]]
    expected = model(batch[:, :-1], batch[:, 1:]).item()
    assert run.rows()[0]["loss"] == pytest.approx(expected, rel=1e-5)

    model.load_state_dict({name: weights[f"model.{name}"] for name in model.state_dict()})
    val_data = folder.open("val", 16, seed=None)
    batch = val_data[[*itertools.chain(*data.val_indices(10, len(val_data), 10, 0, 1))]]
    expected = model(batch[:, :-1], batch[:, 1:]).item()
    assert run.rows("val_loss")[-1]["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_run_uses_the_learning_rate_of_each_step(counted):
    settings = optim.Settings(lr=3e-3, max_steps=5, warmup_steps=1, schedule="linear")
    expected = [optim.learning_rate(step, settings) for step in range(1, 6)]
    assert [row["lr"] for row in counted[5].run.rows()] == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------
# The leaves, without the trainer

LEAVES = ("model", "dist", "optim", "checkpoint", "data")
IMPORT = """
import importlib, json, sys
problems = {}
for folder, name in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.path.insert(0, folder)
    try:
        file = importlib.import_module(name).__file__
        problems[name] = None if file.startswith(folder) else file
    except Exception as error:
        problems[name] = repr(error)
    sys.path.remove(folder)
    sys.modules.pop(name, None)
print(json.dumps(problems))
"""


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> dict[str, str | None]:
    """The problem of importing each leaf from a folder in which nothing else is, or None."""
    arguments = []
    for name in LEAVES:
        folder = tmp_path_factory.mktemp(name)
        shutil.copy(ROOT / f"{name}.py", folder)
        arguments += [str(folder), name]
    # -I ignores PYTHONPATH and the current folder. One process imports torch only once.
    command = [sys.executable, "-I", "-c", IMPORT, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_can_be_copied_into_another_project(problems, name):
    assert problems[name] is None


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


MESHES_OF_NET = {"single": (1, {}), "ddp": (2, {}), "fsdp": (2, {}), "hsdp": (4, {"dp_shard": 2})}


def train_net(strategy: str, out: Path, start_step: int, max_steps: int) -> list[tuple]:
    """Train Net from a checkpoint of `start_step`, if it is not 0, and save it after each step.

    Returns the loss and the norm of the gradient of each step.
    """
    world = dist.start("cpu")
    shape = dist.mesh_shape(strategy, world.size, world.local_size, **MESHES_OF_NET[strategy][1])
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


def assert_close(steps: list[tuple], expected: list[tuple]) -> None:
    assert np.array(steps) == pytest.approx(np.array(expected), rel=1e-4)


@pytest.fixture(scope="module")
def of_one_rank(pool, tmp_path_factory) -> list[tuple]:
    (steps,) = pool(1, train_net, "single", tmp_path_factory.mktemp("net"), 0, 20)
    return steps


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_loop_without_the_trainer_trains_and_saves_and_continues_on_other_ranks(
    pool, of_one_rank, tmp_path, strategy
):
    ranks, _ = MESHES_OF_NET[strategy]
    steps, *others = pool(ranks, train_net, strategy, tmp_path, 0, 20)
    assert others == [steps] * (ranks - 1)
    assert steps[-1][0] < 0.5 * steps[0][0]
    assert_close(steps, of_one_rank)

    middle = checkpoint.list_checkpoints(tmp_path)[9]
    assert checkpoint.verify(middle) is None
    shapes = {name: list(tensor.shape) for name, tensor in full_tensors(middle).items()}
    assert shapes["model.first.weight"] == shapes["optimizer.exp_avg.first.weight"] == [32, 4]
    (on_one_rank,) = pool(1, train_net, "single", tmp_path, 10, 20)
    assert_close(on_one_rank, of_one_rank[10:])
    on_all_ranks = pool(ranks, train_net, strategy, tmp_path, 15, 20)
    assert_close(on_all_ranks[-1], of_one_rank[15:])
