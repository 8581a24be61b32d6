"""One update: clipping, weight decay, the schedule, and what it communicates."""

import functools
import math
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from conftest import build_model, rows
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel
from torch.utils.flop_counter import FlopCounterMode

import checkpoint
import dist
import model
import optim
from runtime.profiling import CommunicationCounter

MESHES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}


SMALL = model.ModelConfig(64, n_layer=1, n_head=2, n_kv_head=2, d_model=16, d_ff=24, seq_len=8)
FROZEN = "blocks.0.mlp_norm.weight"  # a parameter without a gradient
NOT_DECAYED = {"embed.weight", "blocks.0.attention_norm.weight", FROZEN, "norm.weight"}


def lr_at(step: int) -> float:
    return 0.001 * step


def settings(**options) -> optim.Settings:
    """Warm-up with the learning rates of `lr_at`."""
    return optim.Settings(lr=0.1, warmup_steps=100, max_steps=200, **options)


def batch(step: int) -> torch.Tensor:
    return torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(step))


def loss_factor(step: int) -> int:
    return 10 if step == 4 else 1  # one gradient is much larger


@dataclass
class Setup:
    """A small decoder on the mesh of this process's world."""

    net: model.Transformer
    forward: torch.nn.Module  # what to call in place of net
    optimizer: optim.Optimizer
    part: slice  # this rank's part of a batch of 8
    mesh: torch.distributed.DeviceMesh


def build(mesh_name: str, **options) -> Setup:
    """On a mesh such as "fsdp" or "ddp tp 2"; hsdp shards over two ranks."""
    world = dist.start("cpu")
    strategy, _, tp = mesh_name.partition(" tp ")
    dp_shard = 2 if strategy == "hsdp" else None
    shape = dist.mesh_shape(strategy, world.size, world.local_size, None, dp_shard, int(tp or 1))
    mesh = dist.make_mesh(world, shape)
    with torch.device("meta"):
        net = model.Transformer(SMALL)
    net.get_parameter(FROZEN).requires_grad_(False)
    forward = dist.parallelize(
        net,
        mesh,
        strategy,
        init=functools.partial(net.init_tensor, seed=7),
        tp_plan=net.tensor_parallel_plan(),
        fsdp_units=[[block] for block in net.blocks],
        keep_gradients=True,
    )
    optimizer = optim.Optimizer(
        net.named_parameters(), net.decays, settings(**options), net.is_hidden
    )
    share = 8 * shape[2] // world.size
    start = dist.dp_rank(mesh) * share
    return Setup(net, forward, optimizer, slice(start, start + share), mesh)


def train_on_mesh(mesh_name: str, steps: int, options: dict) -> tuple[list[dict], dict]:
    """The metrics of each step, and the full weights after the last."""
    setup = build(mesh_name, **options)
    log = []
    for step in range(1, steps + 1):
        tokens = batch(step)[setup.part]
        with loss_parallel():
            loss = setup.forward(tokens[:, :-1], tokens[:, 1:]) * loss_factor(step)
            loss.backward()
        metrics = setup.optimizer.step(step)
        log.append({name: float(value) for name, value in metrics.items()})
    weights = {}
    for name, parameter in setup.net.named_parameters():
        weights[name] = model.full_tensor(parameter.detach())
    return log, weights


def is_muons(name: str) -> bool:
    return name.startswith("blocks.") and not name.endswith("norm.weight")


def train_plainly(
    steps: int, clip, muon: bool = False, sgd: bool = False
) -> tuple[list[float], list[float], dict]:
    """The same with torch's AdamW, not fused, its Muon and its SGD, on one full model.

    clip(parameters) returns (total norm, whether something was clipped). Returns both for each step
    and the weights after the last.
    """
    net = build_model(SMALL, seed=7)
    net.get_parameter(FROZEN).requires_grad_(False)
    parameters = dict(net.named_parameters())
    matrices = [p for name, p in parameters.items() if is_muons(name)]
    others = [p for name, p in parameters.items() if name in NOT_DECAYED]
    groups = [
        {"params": [] if muon else matrices},
        {"params": others[sgd:], "weight_decay": 0},  # the first one is the embedding
    ]
    options = {"betas": (0.9, 0.95), "weight_decay": 0.1, "foreach": False, "fused": False}
    optimizers = [torch.optim.AdamW(groups, **options)]
    if sgd:
        optimizers.append(torch.optim.SGD(others[:1], momentum=0.9))
    if muon:
        optimizers.append(torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"))
    log = []
    for step in range(1, steps + 1):
        tokens = batch(step)
        loss = net(tokens[:, :-1], tokens[:, 1:]) * loss_factor(step)
        loss.backward()
        log.append(clip([p for p in net.parameters() if p.grad is not None]))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step)
            optimizer.step()
            optimizer.zero_grad()
    return [float(norm) for norm, _ in log], [float(clipped) for _, clipped in log], parameters


# --------------------------------------------------------------------------------------------------
# Clipping


def plain_norm(parameters: list) -> tuple:
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.5)
    return norm, norm > 1.5


class PlainAdaptive:
    """Limit 1.2 x average; average <- 0.95 x average + 0.05 x clipped norm, from the first norm."""

    def __init__(self):
        self.averages = {}

    def __call__(self, parameters: list) -> tuple:
        norms = [p.grad.norm().item() for p in parameters]
        clipped = False
        for i, norm in enumerate(norms):
            average = self.averages.get(i, norm)
            factor = min(1.0, 1.2 * average / (norm + 1e-6))
            clipped |= norm > 1.2 * average
            parameters[i].grad.mul_(factor)
            self.averages[i] = 0.95 * average + 0.05 * norm * factor
        return math.hypot(*norms), clipped


CASES = {
    "norm": ({"max_grad_norm": 1.5}, plain_norm),
    "adaptive": ({"max_grad_norm_ratio": 1.2}, None),  # PlainAdaptive, which keeps averages
}


@pytest.mark.parametrize("clip", CASES)
def test_clipping_is_its_formula_on_every_mesh(pool, clip):
    options, plain_clip = CASES[clip]
    norms, clips, weights = train_plainly(5, plain_clip or PlainAdaptive())
    assert set(clips) == {0, 1}
    tolerance = 1e-6 if clip == "norm" else 1e-5
    for mesh, ranks in MESHES.items():
        for log, mesh_weights in pool(ranks, train_on_mesh, mesh, 5, {"clip": clip, **options}):
            assert [row["grad_norm"] for row in log] == pytest.approx(norms, rel=tolerance)
            assert [row["clipped"] for row in log] == clips
            for name, weight in weights.items():
                torch.testing.assert_close(mesh_weights[name], weight, rtol=1e-4, atol=2e-5)
            assert torch.equal(mesh_weights[FROZEN], weights[FROZEN])  # not updated, not decayed


# --------------------------------------------------------------------------------------------------
# Optimizers

# Muon, relative. Newton-Schulz gives the small singular values of a momentum, which are rounding,
# the size of the large ones: what differs in its last bit, by the order of a sum, turns the update
# in directions that the loss hardly depends on. So weights differ more than losses.
LOSSES = 1e-4
MUONS_MESHES = MESHES | {"fsdp": 4, "fsdp tp 2": 4, "ddp tp 2": 4}


def test_muon_is_torchs_on_every_mesh(pool):
    norms, clips, weights = train_plainly(5, plain_norm, muon=True)
    assert clips == [0, 0, 0, 1, 0]
    options = {"optimizer": "muon", "max_grad_norm": 1.5}
    for mesh, ranks in MUONS_MESHES.items():
        log, mesh_weights = pool(ranks, train_on_mesh, mesh, 5, options)[-1]
        assert [row["grad_norm"] for row in log] == pytest.approx(norms, rel=LOSSES)
        for name, weight in weights.items():
            difference = (mesh_weights[name] - weight).norm()
            assert difference <= (1e-2 if is_muons(name) else 1e-3) * weight.norm(), name
        assert torch.equal(mesh_weights[FROZEN], weights[FROZEN])


# (rows, columns); of four ranks some hold unequal parts, or none
SHAPES = [(16, 16), (8, 3), (3, 8), (12, 6), (10, 20), (1, 4), (6, 12)]


def update_on(shape: tuple[int, int, int]) -> tuple[int, list[torch.Tensor]]:
    """The FLOPs of this rank in an update of matrices of SHAPES, and the full weights after it."""
    world = dist.start("cpu")
    mesh = dist.make_mesh(world, shape)
    with torch.device("meta"):
        net = torch.nn.Sequential(*(torch.nn.Linear(n, m, bias=False) for m, n in SHAPES))
    split = (ColwiseParallel(), RowwiseParallel())  # rows and columns of the weight
    strategy = "ddp" if shape[0] == world.size else "hsdp"
    tp_plan = {f"{i}": split[i % 2] for i in range(len(SHAPES))}
    dist.parallelize(net, mesh, strategy, init=fill, tp_plan=tp_plan)
    chosen = settings(optimizer="muon", max_grad_norm=1e9)
    everything = {"decays": lambda name: True, "is_hidden": lambda name: True}
    optimizer = optim.Optimizer(net.named_parameters(), settings=chosen, **everything)
    for parameter in net.parameters():
        parameter.grad = parameter.detach().clone()
    with FlopCounterMode(display=False) as counter:
        optimizer.step(100)
    return counter.get_total_flops(), [model.full_tensor(p.detach()) for p in net.parameters()]


def fill(name: str, full: torch.Tensor) -> None:
    full.normal_(generator=torch.Generator().manual_seed(int(name.partition(".")[0])))


@pytest.fixture(scope="module")
def update_alone(pool) -> tuple[int, list[torch.Tensor]]:
    return pool(1, update_on, (1, 1, 1))[0]


@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2)])
def test_each_matrix_is_orthogonalized_once_with_the_same_bits(pool, update_alone, shape):
    """Newton-Schulz of (m, n), m <= n, is five steps of 4 m^2 n + 2 m^3."""
    flops = [5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in SHAPES]
    shares, weights = zip(*pool(4, update_on, shape))
    assert sum(shares) == update_alone[0] == sum(flops)
    assert max(shares) < 1.05 * max(flops)  # beside the largest, a rank has only a small one
    for found in weights:
        for weight, expected in zip(found, update_alone[1], strict=True):
            assert torch.equal(weight, expected)


def test_muon_takes_the_matrices_of_hidden_layers_and_adamw_the_rest():
    """By is_hidden: in another project parameters have other names."""
    sizes = {"layers.weight": (2, 2), "layers.bias": (2,), "last.weight": (2, 2)}
    parameters = {name: torch.nn.Parameter(torch.ones(size)) for name, size in sizes.items()}
    muon, hidden = settings(optimizer="muon"), lambda name: name.startswith("layers.")
    optimizer = optim.Optimizer(parameters.items(), lambda name: True, muon, hidden)
    assert optimizer.slots["momentum_buffer"].keys() == {"layers.weight"}
    assert optimizer.slots["exp_avg"].keys() == {"layers.bias", "last.weight"}


def test_muon_continues_on_another_mesh(run):
    """What four ranks have saved goes on alone as it would have there."""
    text = "--optimizer muon --dtype float32 --max_grad_norm 2 --max_steps 4 --strategy"
    single = run(1, f"{text} single", "single")
    sharded = run(4, f"{text} fsdp --tp 2 --save_interval 2", "sharded")
    at = checkpoint.list_checkpoints(sharded)[0]
    continued = run(1, f"{text} single --resume {at}", "continued")
    assert {row["clipped"] for row in rows(single)} == {0, 1}
    for out in (sharded, continued):
        log = rows(out)
        for row, same in zip(log, rows(single)[-len(log) :], strict=True):
            assert row["loss"] == pytest.approx(same["loss"], rel=LOSSES)
            assert row["grad_norm"] == pytest.approx(same["grad_norm"], rel=10 * LOSSES)


class Sgd:
    """What a fork might add, for the embedding: AdamW has the rest."""

    @staticmethod
    def takes(name, shape, hidden):
        return name == "embed.weight"

    @staticmethod
    def slots(shape):
        return {"momentum": shape, "updates": torch.Size()}

    @staticmethod
    def update(optimizer, names, u):
        for name in names:
            parameter, momentum = optimizer.parameters[name], optimizer.slots["momentum"][name]
            grad = optim.local(parameter.grad) / u.divisor
            optim.write(optim.local(momentum), 0.9 * optim.local(momentum) + grad, u.skip)
            weight = optim.local(parameter)
            optim.write(weight, weight - u.lr * optim.local(momentum), u.skip)


def train_with_sgd(strategy: str) -> tuple:
    with mock.patch.dict(optim.OPTIMIZERS, sgd=Sgd):
        return train_on_mesh(strategy, 4, {"optimizer": "sgd", "max_grad_norm": 1.5})


def test_an_optimizer_is_added_as_one_class_and_one_entry(pool):
    _, clips, expected = train_plainly(4, plain_norm, sgd=True)
    assert 1 in clips
    for mesh in ("single", "fsdp"):
        log, weights = pool(MESHES[mesh], train_with_sgd, mesh)[0]
        assert [row["clipped"] for row in log] == clips
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=2e-5)


# --------------------------------------------------------------------------------------------------
# Weight decay and schedules


def test_weight_decay_shrinks_only_the_parameters_that_decay():
    weights = {name: torch.nn.Parameter(torch.ones(3)) for name in ("decayed", "kept")}
    halving = settings(weight_decay=0.5)
    optimizer = optim.Optimizer(weights.items(), lambda name: name == "decayed", halving, bool)
    for weight in weights.values():
        weight.grad = torch.zeros(3)  # so that nothing but weight decay changes the weights
    optimizer.step(100)
    assert weights["decayed"].tolist() == pytest.approx([1 - 0.1 * 0.5] * 3)
    assert weights["kept"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "schedule, step, lr",
    [
        *((schedule, 3, 0.3) for schedule in optim.SCHEDULES),  # warm-up
        *((schedule, 11, 1.0) for schedule in optim.SCHEDULES),
        ("cosine", 61, 0.55),  # half way between the end of warm-up and max_steps
        ("cosine", 36, 0.1 + 0.9 * (2 + math.sqrt(2)) / 4),  # (1 + cos 45 degrees) / 2
        ("cosine", 111, 0.1),
        ("cosine", 200, 0.1),
        ("wsd", 90, 1.0),
        ("wsd", 101, 0.55),
        ("wsd", 111, 0.1),
        ("linear", 36, 0.775),
        ("linear", 111, 0.1),
        ("constant", 110, 1.0),
    ],
)
def test_learning_rates_by_hand(schedule, step, lr):
    options = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "max_steps": 110}
    chosen = optim.Settings(schedule=schedule, **options)
    assert optim.learning_rate(step, chosen) == pytest.approx(lr)


# --------------------------------------------------------------------------------------------------
# Communication


CHOICES = [{"clip": clip} for clip in optim.CLIPS]


def count_collectives(strategy: str) -> list[list[int]]:
    """For each of CHOICES, those of an ordinary update and of one with statistics."""
    setup = build(strategy)
    found = []
    for options in CHOICES:
        net, counts = setup.net, []
        chosen = settings(**options)
        optimizer = optim.Optimizer(net.named_parameters(), net.decays, chosen, net.is_hidden)
        for measure in (False, True):
            tokens = batch(1)[setup.part]
            loss = setup.forward(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            with CommunicationCounter(setup.mesh) as sent:
                optimizer.step(1, measure)
            counts.append(sum(traffic.calls for traffic in sent.counts.values()))
        found.append(counts)
    return found


@pytest.mark.parametrize("mesh", ["single", "ddp", "hsdp"])
def test_collectives_of_an_update(pool, mesh):
    is_sharded = mesh == "hsdp"
    for found in pool(MESHES[mesh], count_collectives, mesh):
        for options, of_options in zip(CHOICES, found, strict=True):
            assert of_options == [is_sharded, 2 * is_sharded], options
