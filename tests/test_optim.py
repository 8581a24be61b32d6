"""The optimizer: clipping, weight decay, Muon, and learning rates."""

import functools
from dataclasses import dataclass

import pytest
import torch
from conftest import build_model, full_tensor

import dist
import model
import optim
from extras import tensor_parallel
from extras.muon import Muon

MESHES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}

# With four ranks, one of them has no row of the MLP's first two matrices.
SMALL = model.ModelConfig(64, n_layer=1, n_head=2, n_kv_head=2, d_model=16, d_ff=6, seq_len=8)
FROZEN = "blocks.0.mlp_norm.weight"  # a parameter without a gradient
NOT_DECAYED = {"embed.weight", "blocks.0.attention_norm.weight", FROZEN, "norm.weight"}


def lr_at(step: int) -> float:
    return 0.001 * step


def settings(**options) -> optim.Settings:
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


def build(mesh_name: str, **options) -> Setup:
    """Build a decoder on a mesh, for example "fsdp" or "ddp tp 2"; hsdp shards over two ranks."""
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
        tensor_parallel=tensor_parallel.split,
        fsdp_units=[[block] for block in net.blocks],
        keep_gradients=True,
    )
    chosen = settings(**options)
    rules = RULES[chosen.optimizer], optim.AdamW
    parameters = net.named_parameters()
    optimizer = optim.Optimizer(parameters, net.decays, chosen, net.is_hidden, rules)
    share = 8 * shape[2] // world.size
    start = dist.dp_rank(mesh) * share
    return Setup(net, forward, optimizer, slice(start, start + share))


def train_on_mesh(mesh_name: str, steps: int, options: dict) -> tuple[list[dict], dict]:
    """Return the metrics of each step, and the full weights after the last step."""
    setup = build(mesh_name, **options)
    log = []
    for step in range(1, steps + 1):
        tokens = batch(step)[setup.part]
        loss = setup.forward(tokens[:, :-1], tokens[:, 1:]) * loss_factor(step)
        loss.backward()
        metrics, _ = setup.optimizer.step(step, lr_at(step))
        log.append({name: float(value) for name, value in metrics.items()})
    weights = {}
    for name, parameter in setup.net.named_parameters():
        weights[name] = full_tensor(parameter.detach())
    return log, weights


def is_muons(name: str) -> bool:
    return name.startswith("blocks.") and not name.endswith("norm.weight")


def train_plainly(
    steps: int, clip, muon: bool = False, sgd: bool = False
) -> tuple[list[float], list[float], dict]:
    """Train one full model with torch's unfused AdamW, its Muon and its SGD.

    clip(parameters) returns (total norm, whether a gradient was clipped). Return the norms and the
    flags of all steps, and the weights after the last step.
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


def plain_norm(parameters: list) -> tuple:
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.5)
    return norm, norm > 1.5


# Newton-Schulz makes the small singular values of a momentum, which are rounding errors, as large
# as the others. A sum in another order therefore turns the update, in directions that the loss
# hardly depends on. So between meshes the weights differ more than the norms.
MUONS_MESHES = [("single", 1), ("ddp", 2), ("fsdp", 4), ("hsdp", 4), ("fsdp tp 2", 4)]


@pytest.mark.parametrize("mesh, ranks", MUONS_MESHES)
def test_muon_matches_torch_on_every_mesh(pool, mesh, ranks):
    norms, clips, weights = train_plainly(5, plain_norm, muon=True)
    assert clips == [0, 0, 0, 1, 0]
    options = {"optimizer": "muon", "max_grad_norm": 1.5}
    for log, mesh_weights in pool(ranks, train_on_mesh, mesh, 5, options):
        assert [row["grad_norm"] for row in log] == pytest.approx(norms, rel=1e-4)
        for name, weight in weights.items():
            difference = (mesh_weights[name] - weight).norm()
            assert difference <= (1e-2 if is_muons(name) else 1e-3) * weight.norm(), name
        assert torch.equal(mesh_weights[FROZEN], weights[FROZEN])


class Sgd:
    """An optimizer that a fork might add for the embedding. AdamW updates the rest."""

    @staticmethod
    def takes(name, shape, hidden):
        return name == "embed.weight"

    @staticmethod
    def slots(shape):
        return {"momentum": shape, "updates": torch.Size()}

    @staticmethod
    def update(optimizer, names, update):
        for name in names:
            parameter = optimizer.parameters[name]
            grad = optim.local(parameter.grad) / update.divisor
            momentum = optim.local(optimizer.slots["momentum"][name])
            optim.assign_unless(update.skip, momentum, 0.9 * momentum + grad)
            weight = optim.local(parameter)
            optim.assign_unless(update.skip, weight, weight - update.lr * momentum)


RULES = {"adamw": optim.AdamW, "muon": Muon, "sgd": Sgd}


def train_with_sgd(strategy: str) -> tuple:
    return train_on_mesh(strategy, 4, {"optimizer": "sgd", "max_grad_norm": 1.5})


def test_a_fork_adds_an_optimizer_with_one_class(pool):
    _, clips, expected = train_plainly(4, plain_norm, sgd=True)
    assert 1 in clips
    for mesh in ("single", "fsdp"):
        log, weights = pool(MESHES[mesh], train_with_sgd, mesh)[0]
        assert [row["clipped"] for row in log] == clips
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=2e-5)


def test_the_norm_of_a_large_gradient_is_exact():
    """torch's norm is 5e-6 too small for these 6.4 million numbers, and 3e-3 for 38 million."""
    weight = torch.nn.Parameter(torch.zeros(50_000, 128))
    weight.grad = torch.randn(50_000, 128, generator=torch.Generator().manual_seed(0))
    weight.grad *= torch.linspace(1, 0, 50_000)[:, None] ** 8  # as for frequent and rare tokens
    optimizer = optim.Optimizer([("weight", weight)], str.isupper, settings(), str.isupper)
    norm = torch.linalg.vector_norm(weight.grad, dtype=torch.float64)
    values, _ = optimizer.step(1, lr=0.1)
    assert values["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-6)


def test_a_scalar_parameter_keeps_its_moments_in_a_checkpoint():
    weights = {"scale": torch.nn.Parameter(torch.ones(())), "w": torch.nn.Parameter(torch.ones(2))}
    optimizer = optim.Optimizer(weights.items(), str.isupper, settings(), str.isupper)
    state = optimizer.state()
    assert {name: tensor.shape for name, tensor in state["exp_avg"].items()} == {
        name: weight.shape for name, weight in weights.items()
    }
    assert state["step"].shape == (2,)


@pytest.mark.parametrize("rule", [Muon, Sgd])
def test_an_update_rule_without_any_parameter_is_refused(rule):
    """For example Muon with a misspelled prefix, or Sgd for a model without an embedding."""
    parameters = torch.nn.Linear(3, 2).named_parameters()
    rules = rule, optim.AdamW
    with pytest.raises(ValueError, match=f"^{rule.__name__} updates no parameter: check is_hidden"):
        optim.Optimizer(parameters, str.isupper, settings(), str.isupper, rules)
