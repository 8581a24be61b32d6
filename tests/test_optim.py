"""One update: clipping, weight decay, the schedule, and what it communicates."""

import functools
import math
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from conftest import build_model, last_checkpoint, rows, tensors
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint
import dist
import model
import optim
from runtime.profiling import CommunicationCounter

MESHES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}


SMALL = model.ModelConfig(64, n_layer=1, n_head=2, n_kv_head=1, d_model=16, d_ff=24, seq_len=8)


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


def build(strategy: str, **options) -> Setup:
    world = dist.start("cpu")
    dp_shard = 2 if strategy == "hsdp" else None
    shape = dist.mesh_shape(strategy, world.size, world.local_size, None, dp_shard)
    mesh = dist.make_mesh(world, shape)
    with torch.device("meta"):
        net = model.Transformer(SMALL)
    net.get_parameter(FROZEN).requires_grad_(False)
    units = [[block] for block in net.blocks]

    init = functools.partial(net.init_tensor, seed=7)
    forward = dist.parallelize(
        net, mesh, strategy, init=init, fsdp_units=units, keep_gradients=True
    )
    optimizer = optim.Optimizer(
        net.named_parameters(), net.decays, settings(**options), net.is_hidden
    )
    share = 8 // world.size
    start = dist.dp_rank(mesh) * share
    return Setup(net, forward, optimizer, slice(start, start + share), mesh)


def train_on_mesh(strategy: str, steps: int, options: dict) -> tuple[list[dict], dict]:
    """The metrics of each step, and the whole weights after the last."""
    setup = build(strategy, **options)
    log = []
    for step in range(1, steps + 1):
        tokens = batch(step)[setup.part]
        loss = setup.forward(tokens[:, :-1], tokens[:, 1:]) * loss_factor(step)
        loss.backward()
        metrics = setup.optimizer.step(step, loss.detach())
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
    """The same with torch's AdamW, not fused, its Muon and its SGD, on one whole model.

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
    norms, clips = [], []
    for step in range(1, steps + 1):
        tokens = batch(step)
        loss = net(tokens[:, :-1], tokens[:, 1:]) * loss_factor(step)
        loss.backward()
        norm, clipped = clip([p for p in net.parameters() if p.grad is not None])
        norms.append(float(norm))
        clips.append(float(clipped))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step)
            optimizer.step()
            optimizer.zero_grad()
    return norms, clips, parameters


# --------------------------------------------------------------------------------------------------
# Clipping


def plain_norm(parameters: list) -> tuple:
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.5)
    return norm, norm > 1.5


def plain_value(parameters: list) -> tuple:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    clipped = max(p.grad.abs().max() for p in parameters) > 0.2
    torch.nn.utils.clip_grad_value_(parameters, 0.2)
    return norm, clipped


def plain_none(parameters: list) -> tuple:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters]), False


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
    "value": ({"max_grad_norm": 0.2}, plain_value),
    "adaptive": ({"max_grad_norm_ratio": 1.2}, None),  # PlainAdaptive, which keeps averages
    "none": ({}, plain_none),
}


@pytest.mark.parametrize("clip", CASES)
def test_clipping_is_its_formula_on_every_mesh(pool, clip):
    options, plain_clip = CASES[clip]
    norms, clips, weights = train_plainly(5, plain_clip or PlainAdaptive())
    assert clip == "none" or set(clips) == {0, 1}
    tolerance = 1e-6 if clip == "norm" else 1e-5
    for mesh, ranks in MESHES.items():
        for log, mesh_weights in pool(ranks, train_on_mesh, mesh, 5, {"clip": clip, **options}):
            assert [row["grad_norm"] for row in log] == pytest.approx(norms, rel=tolerance)
            # By value a rank knows of its own elements only, and the log has the maximum of ranks.
            if clip != "value" or ranks == 1:
                assert [row["clipped"] for row in log] == clips
            for name, weight in weights.items():
                torch.testing.assert_close(mesh_weights[name], weight, rtol=1e-4, atol=2e-5)
            assert torch.equal(mesh_weights[FROZEN], weights[FROZEN])  # not updated, not decayed


def clip_halve(s, g):  # the example of the README
    large = g.norms > 1.0
    torch._foreach_mul_(g.local, torch.where(large, 0.5, 1.0).unbind())
    return optim.Clipped(torch.ones_like(g.norms[0]), large)


def plain_halve(parameters: list) -> tuple:
    norms = [p.grad.norm().item() for p in parameters]
    for p, norm in zip(parameters, norms, strict=True):
        p.grad.mul_(0.5 if norm > 1.0 else 1.0)
    return math.hypot(*norms), max(norms) > 1.0


def train_with_clip_halve(strategy: str) -> tuple:
    with mock.patch.dict(optim.CLIPS, halve=clip_halve):
        return train_on_mesh(strategy, 4, {"clip": "halve"})


def test_a_strategy_is_added_as_one_function_and_one_entry(pool):
    _, clips, weights = train_plainly(4, plain_halve)
    for mesh in ("single", "fsdp"):
        log, mesh_weights = pool(MESHES[mesh], train_with_clip_halve, mesh)[0]
        assert [row["clipped"] for row in log] == clips
        for name, weight in weights.items():
            torch.testing.assert_close(mesh_weights[name], weight, rtol=1e-4, atol=2e-5)


# --------------------------------------------------------------------------------------------------
# Optimizers

# Muon, relative. Newton-Schulz gives the small singular values of a momentum, which are rounding,
# the size of the large ones: what differs in its last bit, by the order of a sum, turns the update
# in directions that the loss hardly depends on. So weights differ more than losses.
LOSSES = 1e-4
WEIGHTS = 5e-2


def test_muon_is_torchs_on_every_mesh(pool):
    norms, clips, weights = train_plainly(5, plain_norm, muon=True)
    assert clips == [0, 0, 0, 1, 0]
    options = {"optimizer": "muon", "max_grad_norm": 1.5}
    for mesh, ranks in MESHES.items():
        log, mesh_weights = pool(ranks, train_on_mesh, mesh, 5, options)[-1]
        assert [row["grad_norm"] for row in log] == pytest.approx(norms, rel=LOSSES)
        for name, weight in weights.items():
            difference = (mesh_weights[name] - weight).norm()
            assert difference <= (1e-2 if is_muons(name) else 1e-3) * weight.norm(), name
        assert torch.equal(mesh_weights[FROZEN], weights[FROZEN])


def test_an_optimizer_that_takes_no_parameter_is_an_error():
    """As Muon in another project, where parameters have other names, or with vectors only."""
    matrix = torch.nn.Parameter(torch.ones(2, 2))
    vector = torch.nn.Parameter(torch.ones(2))
    for parameter, hidden in ((matrix, {}), (vector, {"is_hidden": lambda name: True})):
        with pytest.raises(ValueError, match="optimizer muon takes none of the 1 parameters"):
            parameters = [("blocks.weight", parameter)]
            optim.Optimizer(parameters, lambda name: True, settings(optimizer="muon"), **hidden)
    hidden = {"is_hidden": lambda name: name == "layers.weight"}
    parameters = [("layers.weight", matrix), ("last.weight", torch.nn.Parameter(torch.ones(2, 2)))]
    muon = settings(optimizer="muon")
    optimizer = optim.Optimizer(parameters, lambda name: True, muon, **hidden)
    assert optimizer.slots["momentum_buffer"].keys() == {"layers.weight"}
    assert optimizer.slots["exp_avg"].keys() == {"last.weight"}


def gather_one() -> str:
    """The type of a matrix that is gathered as Muon does."""
    mesh = dist.make_mesh(dist.start("cpu"), (1, 2, 1))["dp_shard"]
    matrix = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    return type(optim.all_gather_matrix(matrix)).__name__


def test_on_cpus_a_gathered_matrix_is_there_before_the_next(pool):
    """Not torch's AsyncCollectiveTensor: two on their way under gloo damaged the heap."""
    assert pool(2, gather_one) == ["Tensor", "Tensor"]


def test_muon_continues_on_every_mesh(run):
    """What four ranks have saved goes on alone as it would have there, and the other way round."""
    text = "--optimizer muon --dtype float32 --max_grad_norm 2"
    whole = {}
    for mesh, ranks in (("single", 1), ("fsdp --tp 2", 4)):
        options = f"{text} --max_steps 4 --save_interval 2 --keep_last 0"
        whole[mesh] = run(ranks, f"{options} --strategy {mesh}", f"whole-{mesh.split()[0]}")
    expected = rows(whole["single"])
    assert {row["clipped"] for row in expected} == {0, 1}
    final = tensors(last_checkpoint(whole["single"]))
    slots = {name.split(".")[1] for name in final if name.startswith("optimizer.") and "." in name}
    assert {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"} < slots
    continued = [whole["fsdp --tp 2"]]
    for mesh, ranks, start in (
        ("single", 1, "fsdp --tp 2"),
        ("fsdp", 4, "single"),
        ("hsdp --dp_shard 2", 4, "single"),
    ):
        at = checkpoint.list_checkpoints(whole[start])[0]
        options = f"{text} --max_steps 4 --strategy {mesh} --resume {at}"
        continued.append(run(ranks, options, mesh.split()[0]))
    for out in continued:
        log = rows(out)
        for row, same in zip(log, expected[-len(log) :], strict=True):
            assert row["loss"] == pytest.approx(same["loss"], rel=LOSSES)
            assert row["grad_norm"] == pytest.approx(same["grad_norm"], rel=10 * LOSSES)
        state = tensors(last_checkpoint(out))
        assert state.keys() == final.keys()
        for name, tensor in final.items():
            if "window" not in name:
                assert (state[name] - tensor).norm() <= WEIGHTS * tensor.norm(), name


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
    optimizer = optim.Optimizer(weights.items(), lambda name: name == "decayed", halving)
    for weight in weights.values():
        weight.grad = torch.zeros(3)  # so that nothing but weight decay changes the weights
    optimizer.step(100, torch.tensor(1.0))
    assert weights["decayed"].tolist() == pytest.approx([1 - 0.1 * 0.5] * 3)
    assert weights["kept"].tolist() == [1.0] * 3


def test_a_schedule_rises_to_lr_and_falls_to_min_lr():
    options = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "max_steps": 110}
    steps = range(1, 111)
    for schedule in optim.SCHEDULES:
        chosen = optim.Settings(schedule=schedule, **options)
        lrs = [optim.learning_rate(step, chosen) for step in steps]
        assert lrs[:10] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
        assert lrs[10] == 1.0
        assert lrs[10:] == sorted(lrs[10:], reverse=True)


@pytest.mark.parametrize(
    "schedule, step, lr",
    [
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


def count_collectives(strategy: str, choices: list[dict]) -> list[list[int]]:
    """The collectives of an ordinary update and of one with statistics.

    For each choice of the optimizer's options.
    """
    setup = build(strategy)
    found = []
    for options in choices:
        net = setup.net
        optimizer = optim.Optimizer(net.named_parameters(), net.decays, settings(**options))
        found.append(
            [collectives_of_update(setup, optimizer, measure) for measure in (False, True)]
        )
    return found


def collectives_of_update(setup: Setup, optimizer: optim.Optimizer, measure: bool) -> int:
    tokens = batch(1)[setup.part]
    loss = setup.forward(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    with CommunicationCounter(setup.mesh) as sent:
        optimizer.step(1, loss.detach(), measure)
    return sum(traffic.calls for traffic in sent.counts.values())


@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_of_an_update(pool, mesh):
    choices = [{"clip": clip} for clip in optim.CLIPS] + [{"skip_spikes": 3.0}]
    is_sharded = mesh in ("fsdp", "hsdp")
    for found in pool(MESHES[mesh], count_collectives, mesh, choices):
        for options, of_options in zip(choices, found, strict=True):
            ordinary = int(is_sharded or ("skip_spikes" in options and mesh == "ddp"))
            assert of_options == [ordinary, ordinary + 2 * is_sharded], options
