"""Updates that are skipped because they are not finite, and a run that skips too many."""

import math
from unittest import mock

import pytest
import torch
from conftest import listen, tensors
from test_optim import settings

import checkpoint
import optim
import train


def all_tensors(optimizer: optim.Optimizer, net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy the optimizer's state and the weights, with 0 for nan, which does not equal itself."""
    copies = {}
    for slot, value in (optimizer.state() | {"weights": net.state_dict()}).items():
        by_name = value if isinstance(value, dict) else {"": value}
        for name, tensor in by_name.items():
            copies[f"{slot} {name}".strip()] = tensor.detach().clone().nan_to_num()
    return copies


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_a_skipped_step_changes_only_its_count(optimizer):
    net = torch.nn.Linear(4, 4)
    options = {"clip": "adaptive", "optimizer": optimizer}
    optimizer = optim.Optimizer(
        net.named_parameters(), lambda name: True, settings(**options), lambda name: True
    )
    in_a_row = []
    for step, factor in enumerate((1.0, math.nan, 1.0, math.nan, math.inf, 1.0), 1):
        before = all_tensors(optimizer, net)
        (net(torch.full((2, 4), float(step))).sum() * factor).backward()
        metrics = optimizer.step(step, lr=0.001 * step)
        in_a_row.append(metrics["skipped_in_a_row"].item())
        after = all_tensors(optimizer, net)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        if factor == 1.0:
            assert changed == after.keys() - {"skipped_steps"}
        else:
            assert changed == {"skipped_steps"}
    assert metrics["skipped_steps"].item() == 3
    assert in_a_row == [0, 1, 0, 1, 2, 0]


def test_adaptive_clipping_continues_after_loading():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    adaptive = settings(clip="adaptive")
    optimizers = [optim.Optimizer([("w", weight)], bool, adaptive, bool) for weight in weights]

    def step(i: int, number: int, gradient: float) -> None:
        weights[i].grad = torch.tensor([gradient])
        optimizers[i].step(number, lr=0.1)

    for number in range(1, 20):
        step(0, number, 1.0)
    saved, loaded = (dict(checkpoint.flatten(optimizer.state())) for optimizer in optimizers)
    weights[1].data.copy_(weights[0])
    for name, tensor in loaded.items():
        tensor.copy_(saved[name])
    for i in range(2):
        step(i, 20, 9.0)
    assert torch.equal(*weights)


def test_too_many_skipped_steps_end_the_run(on_ranks, tmp_path):
    text = "--strategy ddp --save_interval 3 --max_steps 30 --max_skipped 4 --log_interval 5"
    (status, error), (other_status, _) = on_ranks(2, diverging_run, text)
    assert status == other_status == 1
    assert "error: 4 updates in a row were skipped up to step 9" in error
    assert error.count("\n") == 1
    saved = checkpoint.list_checkpoints(tmp_path / "run")
    assert saved[-1].name == "step-00000003"  # at step 6 the loss was nan: not saved
    assert all(value.isfinite().all() for value in tensors(saved[-1]).values())


def diverging_run(argv: list[str]) -> tuple[int, str]:
    real = train.train_step

    def broken(forward, optimizer, batches, step, *options):
        if step == 6:
            forward.register_forward_hook(lambda module, inputs, loss: loss * math.nan)
        return real(forward, optimizer, batches, step, *options)

    with mock.patch.object(train, "train_step", broken):
        status, _, err = listen(argv)
        return status, err
