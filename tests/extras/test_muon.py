"""--optimizer muon: the same numbers on every mesh; a skipped step leaves its momentum alone.

Muon iterates in bfloat16, so a rounding difference in a gradient grows to 1e-4 of a loss.
"""

import math

import pytest
import torch
from core.conftest import pool, tokens, train  # noqa: F401
from torch import nn

import optim
from extras.muon import Muon

ROWS = {
    "ddp 2": (2, "--strategy ddp"),
    "fsdp 2": (2, "--strategy fsdp"),
    "fsdp 3": (3, "--strategy fsdp"),  # more ranks than some matrices have rows for
    "hsdp 2 x 2": (4, "--strategy hsdp --dp_shard 2"),
}
MUON = "--optimizer muon --global_batch_size 12 --optim_metrics_interval 2"

RULES = (Muon, optim.AdamW)
NAME = "blocks.0.matrix"


@pytest.mark.parametrize("row", ROWS)
def test_muon_gives_the_numbers_of_one_rank(train, row):  # noqa: F811
    ranks, mesh = ROWS[row]
    one = train(1, f"--strategy single {MUON}", "one")
    many = train(ranks, f"{mesh} {MUON}", "many")
    assert (one.status, many.status) == (0, 0), many.error
    assert len(one.rows()) == 5
    for expected, found in zip(one.rows(), many.rows(), strict=True):
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4)
    moments = {name for name in many.weights() if "momentum" in name}
    assert len(moments) == 2 * 7  # the matrices of two blocks
    for expected, found in zip(one.statistics(), many.statistics(), strict=True):
        assert found["parameter"] == expected["parameter"]
        norm = "momentum_buffer_norm"
        if expected[norm] is not None:
            assert found[norm] == pytest.approx(expected[norm], rel=1e-3)


def test_a_muon_run_continues_bit_for_bit(train):  # noqa: F811
    flags = f"--strategy fsdp {MUON} --save_interval 3 --keep_every 1 --schedule constant"
    whole = train(2, f"{flags} --max_steps 6", "whole")
    assert train(2, f"{flags} --max_steps 3", "stopped").status == 0
    continued = train(2, f"{flags} --max_steps 6", "stopped")
    assert continued.status == 0, continued.error
    weights = whole.weights()
    for name, tensor in continued.weights().items():
        assert torch.equal(tensor, weights[name]), name


def test_a_skipped_step_leaves_the_momentum_alone():
    """A gradient that is not finite skips the update on all ranks."""
    matrix = nn.Parameter(torch.arange(6.0).view(2, 3) / 6)
    settings = optim.Settings(lr=0.1, max_steps=9, optimizer="muon", weight_decay=0.0)
    optimizer = optim.Optimizer([(NAME, matrix)], lambda name: False, settings, RULES)
    matrix.grad = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    optimizer.step(1, 0.1)
    weight = matrix.detach().clone()
    momentum = optimizer.state()["momentum_buffer"][NAME].clone()
    assert momentum.norm() > 0
    matrix.grad = torch.full((2, 3), torch.nan)
    values, _ = optimizer.step(2, 0.1)
    assert values["skipped_steps"] == 1 and values["skipped_in_a_row"] == 1
    assert torch.equal(matrix, weight)
    assert torch.equal(optimizer.state()["momentum_buffer"][NAME], momentum)
    matrix.grad = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    values, _ = optimizer.step(3, 0.1)
    assert values["skipped_in_a_row"] == 0
    assert not torch.equal(optimizer.state()["momentum_buffer"][NAME], momentum)


def test_the_first_update_is_orthogonal():
    """Its singular values lie around 1 times the scale, whatever those of the gradient are."""
    matrix = nn.Parameter(torch.zeros(8, 8))
    settings = optim.Settings(lr=1.0, max_steps=9, optimizer="muon", weight_decay=0.0)
    optimizer = optim.Optimizer([(NAME, matrix)], lambda name: False, settings, RULES)
    generator = torch.Generator().manual_seed(0)
    matrix.grad = torch.randn(8, 8, generator=generator)
    optimizer.step(1, 1.0)
    values = torch.linalg.svdvals(matrix.detach())
    assert values.max() / values.min() < 2 and values.min() > 0


def test_statistics_use_raw_gradients_and_updated_weights():
    """For a matrix, which Muon updates, and a vector. A slot that a parameter lacks is nan."""
    net = torch.nn.ModuleDict({"blocks": torch.nn.Linear(3, 2)})
    options = {"clip": "adaptive", "max_grad_norm_ratio": 0.5, "optimizer": "muon"}
    settings = optim.Settings(lr=0.1, warmup_steps=100, max_steps=200, **options)
    optimizer = optim.Optimizer(net.named_parameters(), lambda name: True, settings, RULES)
    net["blocks"](torch.tensor([[0.1, -2.0, 3.0]])).sum().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    old_weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    _, rows = optimizer.step(1, lr=0.001, measure=True)
    for (name, parameter), row in zip(net.named_parameters(), rows, strict=True):
        weight = parameter.detach()
        update_norm = (weight - old_weights[name]).norm()
        want = {"update_norm": update_norm, "clipped": 1.0}
        want["update_ratio"] = update_norm / weight.norm()
        tensors = {"grad": grads[name], "weight": weight}
        nothing = torch.full((1,), math.nan)
        for slot in ("momentum_buffer", "exp_avg", "exp_avg_sq"):
            tensors[slot] = optimizer.slots[slot].get(name, nothing)
        want |= {f"{kind}_norm": tensor.norm() for kind, tensor in tensors.items()}
        assert row.pop("parameter") == name and row["update_norm"] > 0
        want = {column: float(value) for column, value in want.items()}
        assert row == pytest.approx(want, rel=1e-5, abs=1e-9, nan_ok=True)
