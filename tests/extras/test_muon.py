"""--optimizer muon: torch's Muon, on any mesh; a skipped step leaves its momentum alone."""

import pytest
import torch
from rig import assert_close, build_model, cells
from torch import nn

import optim
from extras.muon import Muon
from model import ModelConfig

RULES = (Muon, optim.AdamW)
SMALL = ModelConfig(64, n_layer=1, n_head=2, n_kv_head=2, d_model=16, d_ff=6, seq_len=8)
FROZEN = "blocks.0.mlp_norm.weight"  # a parameter without a gradient


def compute_gradients(step: int, net: nn.Module) -> None:
    """Compute the gradients of a step. Those of step 4 are much larger."""
    windows = torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(step))
    (net(windows[:, :-1], windows[:, 1:]) * (10 if step == 4 else 1)).backward()


def test_muon_matches_torch():
    nets = [build_model(SMALL, seed=7) for _ in range(2)]
    for net in nets:
        net.get_parameter(FROZEN).requires_grad_(False)
    ours, plain = nets
    settings = optim.Settings(lr=0.1, max_grad_norm=1.5, weight_decay=5.0)
    optimizer = optim.Optimizer(ours.named_parameters(), ours.decays, settings, RULES)

    parameters = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    matrices = [p for name, p in parameters.items() if name.startswith("blocks") and p.dim() == 2]
    others = [p for p in parameters.values() if not any(p is matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0)  # norms, the embedding
    muon = torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", weight_decay=5.0)
    clipped = set()
    for step in range(1, 6):
        for net in nets:
            compute_gradients(step, net)
        values, _ = optimizer.step(step, 0.001 * step)
        clipped.add(values["clipped"].item())
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.5)
        assert values["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-4)
        for other in (adamw, muon):
            for group in other.param_groups:
                group["lr"] = 0.001 * step
            other.step()
            other.zero_grad()
    assert clipped == {0, 1}
    for name, weight in plain.named_parameters():
        difference = (ours.get_parameter(name) - weight).norm()
        assert difference <= 1e-2 * weight.norm(), name
    assert torch.equal(ours.get_parameter(FROZEN), plain.get_parameter(FROZEN))


# ranks | mesh. Some of four ranks have no row of the MLP's first two matrices.
MESHES = """
2 | --strategy ddp
4 | --strategy fsdp
4 | --strategy fsdp --tp 2
"""


@pytest.mark.parametrize("ranks, mesh", cells(MESHES))
def test_a_mesh_has_the_numbers_of_one_rank(train, ranks, mesh):
    flags = "--optimizer muon --d_ff 6 --optim_metrics_interval 2"
    one = train(1, f"--strategy single {flags}", "one")
    many = train(int(ranks), f"{mesh} {flags}", "many")
    assert (one.status, many.status) == (0, 0), many.error
    assert_close(many.out, one.out, 1e-4)
    moments = {name for name in many.weights() if "momentum" in name}
    assert len(moments) == 2 * 7  # the matrices of two blocks
    for expected, found in zip(one.statistics(), many.statistics(), strict=True):
        norm = expected["momentum_buffer_norm"]
        assert found["momentum_buffer_norm"] == (norm and pytest.approx(norm, rel=1e-3))
        assert (norm is not None) == (f"optimizer.momentum_buffer.{found['parameter']}" in moments)


# --------------------------------------------------------------------------------------------------
# One update


def make_optimizer(name: str, parameter: nn.Parameter) -> optim.Optimizer:
    return optim.Optimizer([(name, parameter)], str.isupper, optim.Settings(lr=0.1), RULES)


def test_a_skipped_step_leaves_the_momentum_alone():
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
