"""--optimizer muon: torch's Muon on a mesh; a skipped step leaves its momentum alone."""

import functools

import pytest
import torch
from old import full_tensor
from rig import build_model
from torch import nn

import dist
import model
import optim
from extras import tensor_parallel
from extras.muon import Muon

RULES = (Muon, optim.AdamW)

# --------------------------------------------------------------------------------------------------
# The numbers of torch

# With four ranks, one of them has no row of the MLP's first two matrices.
SMALL = model.ModelConfig(64, n_layer=1, n_head=2, n_kv_head=2, d_model=16, d_ff=6, seq_len=8)
FROZEN = "blocks.0.mlp_norm.weight"  # a parameter without a gradient
STEPS = 5


def batch(step: int) -> torch.Tensor:
    return torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(step))


def loss_factor(step: int) -> int:
    return 10 if step == 4 else 1  # one gradient is much larger


def train_on_mesh(strategy: str, tp: int) -> tuple[list[dict], dict]:
    """Return the metrics of each step, and all weights."""
    world = dist.start("cpu")
    run = dist.Settings(strategy=strategy, tp=tp, wrap="block")
    mesh = dist.make_mesh(world, dist.mesh_shape(strategy, world.size, world.size, tp=tp))
    net = model.meta_model(SMALL)
    net.get_parameter(FROZEN).requires_grad_(False)
    if tp > 1:
        tensor_parallel.split(net, mesh["tp"])
    forward = dist.parallelize(net, mesh, run, functools.partial(net.init_tensor, seed=7))
    settings = optim.Settings(lr=0.1, max_grad_norm=1.5, weight_decay=5.0)
    optimizer = optim.Optimizer(net.named_parameters(), net.decays, settings, RULES)
    share = 8 * tp // world.size
    start = dist.dp_rank(mesh) * share
    log = []
    for step in range(1, STEPS + 1):
        windows = batch(step)[start : start + share]
        (forward(windows[:, :-1], windows[:, 1:]) * loss_factor(step)).backward()
        metrics, _ = optimizer.step(step, 0.001 * step)
        log.append({name: float(value) for name, value in metrics.items()})
    return log, {name: full_tensor(p.detach()) for name, p in net.named_parameters()}


def train_plainly() -> tuple[list[float], dict]:
    """Train one full model with torch's Muon and AdamW; return gradient norms and weights."""
    net = build_model(SMALL, seed=7)
    net.get_parameter(FROZEN).requires_grad_(False)
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    matrices = [p for name, p in parameters.items() if name.startswith("blocks") and p.dim() == 2]
    others = [p for p in parameters.values() if not any(p is matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0)  # norms, the embedding
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", weight_decay=5.0)
    norms = []
    for step in range(1, STEPS + 1):
        windows = batch(step)
        (net(windows[:, :-1], windows[:, 1:]) * loss_factor(step)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), 1.5).item())
        for optimizer in (adamw, muon):
            for group in optimizer.param_groups:
                group["lr"] = 0.001 * step
            optimizer.step()
            optimizer.zero_grad()
    return norms, dict(net.named_parameters())


@pytest.mark.parametrize("ranks, strategy, tp", [(1, "single", 1), (4, "fsdp", 1), (4, "fsdp", 2)])
def test_muon_matches_torch_on_a_mesh(pool, ranks, strategy, tp):
    """Newton-Schulz makes the small singular values of a momentum, which are rounding errors, as
    large as the others. A sum in another order therefore turns the update, in directions that the
    loss hardly depends on. So between meshes the weights differ more than the norms.
    """
    norms, weights = train_plainly()
    for log, found in pool(ranks, train_on_mesh, strategy, tp):
        assert [row["grad_norm"] for row in log] == pytest.approx(norms, rel=1e-4)
        assert {row["clipped"] for row in log} == {0, 1}
        for name, weight in weights.items():
            assert (found[name] - weight).norm() <= 1e-2 * weight.norm(), name
        assert torch.equal(found[FROZEN], weights[FROZEN])


@pytest.mark.parametrize("ranks, mesh", [(2, "ddp"), (3, "fsdp")])
def test_a_muon_run_has_the_numbers_of_one_rank(train, ranks, mesh):
    """Three ranks are more than some matrices have rows for."""
    flags = "--optimizer muon --global_batch_size 12 --optim_metrics_interval 2"
    one = train(1, f"--strategy single {flags}", "one")
    many = train(ranks, f"--strategy {mesh} {flags}", "many")
    assert (one.status, many.status) == (0, 0), many.error
    for expected, found in zip(one.rows(), many.rows(), strict=True):
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4)
    moments = {name for name in many.weights() if "momentum" in name}
    assert len(moments) == 2 * 7  # the matrices of two blocks
    column = "momentum_buffer_norm"
    for expected, found in zip(one.statistics(), many.statistics(), strict=True):
        if f"optimizer.momentum_buffer.{found['parameter']}" in moments:
            assert found[column] == pytest.approx(expected[column], rel=1e-3)
        else:
            assert found[column] is None


# --------------------------------------------------------------------------------------------------
# One update


def make_optimizer(name: str, parameter: nn.Parameter) -> optim.Optimizer:
    return optim.Optimizer([(name, parameter)], str.isupper, optim.Settings(lr=0.1), RULES)


def test_a_skipped_step_leaves_the_momentum_alone():
    """A gradient that is not finite skips the update on all ranks."""
    name, matrix = "blocks.0.matrix", nn.Parameter(torch.arange(6.0).view(2, 3) / 6)
    optimizer = make_optimizer(name, matrix)
    matrix.grad = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    optimizer.step(1, 0.1)
    weight = matrix.detach().clone()
    momentum = optimizer.state()["momentum_buffer"][name].clone()
    assert momentum.norm() > 0
    matrix.grad = torch.full((2, 3), torch.nan)
    values, _ = optimizer.step(2, 0.1)
    assert values["skipped_steps"] == 1
    assert torch.equal(matrix, weight)
    assert torch.equal(optimizer.state()["momentum_buffer"][name], momentum)


def test_the_norm_of_a_large_gradient_is_exact():
    """torch's norm is 5e-6 too small for these 6.4 million numbers, and 3e-3 for 38 million."""
    weight = nn.Parameter(torch.zeros(50_000, 128))
    weight.grad = torch.randn(50_000, 128, generator=torch.Generator().manual_seed(0))
    weight.grad *= torch.linspace(1, 0, 50_000)[:, None] ** 8  # as for frequent and rare tokens
    norm = torch.linalg.vector_norm(weight.grad, dtype=torch.float64)
    values, _ = make_optimizer("weight", weight).step(1, lr=0.1)
    assert values["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-6)


def test_a_scalar_parameter_has_moments_and_a_norm():
    scale = nn.Parameter(torch.ones(()))
    scale.grad = torch.tensor(-3.0)
    optimizer = make_optimizer("scale", scale)
    values, _ = optimizer.step(1, lr=0.1)
    assert values["grad_norm"] == 3.0 and scale > 1
    assert optimizer.state()["exp_avg"]["scale"].shape == ()
