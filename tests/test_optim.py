import math

import pytest
import torch

import optim


def small(**options) -> tuple[torch.nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2), torch.nn.Linear(2, 2)
    )
    decays, lr_at = lambda name: name.startswith(("0", "2")), lambda step: 0.01 * (step + 1)
    return net, optim.Optimizer(net.named_parameters(), decays, lr_at, **options)


def backward(net, scale: float = 1.0) -> None:
    """Gradients of all layers but the last."""
    (net[:3](torch.linspace(-1, 1, 12).view(3, 4)).square().sum() * scale).backward()


@pytest.mark.parametrize("scale", [1e-3, 100.0])
def test_a_step_is_torchs_own_clipping_and_adamw(scale):
    net, optimizer = small(max_grad_norm=0.5)
    reference, _ = small()
    decayed = [p for name, p in reference.named_parameters() if name.startswith(("0", "2"))]
    others = [p for name, p in reference.named_parameters() if not name.startswith(("0", "2"))]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        fused=False,
    )
    for step in range(5):
        for group in adamw.param_groups:
            group["lr"] = 0.01 * (step + 1)
        backward(net, scale)
        backward(reference, scale)
        metrics = optimizer.step(step)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        adamw.step()
        adamw.zero_grad()
        assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-6)
        assert metrics["clipped"].item() == (norm > 0.5)
        for p, q in zip(net.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
            assert p.grad is None
    assert torch.equal(net[3].weight, reference[3].weight)  # no gradient, no update, no decay


def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing():
    net, optimizer = small()
    for bad in (math.nan, math.inf):
        backward(net)
        optimizer.step(0)
        before = [p.detach().clone() for p in net.parameters()]
        state = {
            name: {key: tensor.clone() for key, tensor in slot.items()}
            for name, slot in optimizer.state().items()
            if isinstance(slot, dict)
        }
        backward(net)
        net[0].weight.grad[1, 1] = bad
        metrics = optimizer.step(0)
        assert not metrics["grad_norm"].isfinite()
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
        assert all(
            torch.equal(tensor, optimizer.state()[name][key])
            for name, slot in state.items()
            for key, tensor in slot.items()
        )
    assert metrics["skipped_steps"].item() == 2
    backward(net)
    assert optimizer.step(0)["grad_norm"].isfinite() and not torch.equal(net[0].weight, before[0])


def test_schedules():
    settings = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "max_steps": 110}
    for schedule in optim.SCHEDULES:
        lrs = [optim.learning_rate(step, schedule=schedule, **settings) for step in range(110)]
        assert lrs[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
        assert lrs[10] == 1.0 and lrs[10:] == sorted(lrs[10:], reverse=True)
    at = lambda step, schedule: optim.learning_rate(step, schedule=schedule, **settings)  # noqa: E731
    assert at(60, "cosine") == pytest.approx(0.55) and at(110, "cosine") == pytest.approx(0.1)
    assert at(89, "wsd") == 1.0 and at(100, "wsd") == pytest.approx(0.55) and at(110, "wsd") == pytest.approx(0.1)
    assert at(109, "constant") == 1.0
