"""Updates that are skipped: not finite, or a spike; and the run that has too many of them."""

import math
from collections import deque
from statistics import fmean, stdev
from unittest import mock

import pytest
import torch
from conftest import flags, listen, tensors
from test_optim import settings

import checkpoint
import dist
import optim
import train


def all_tensors(optimizer: optim.Optimizer, net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the optimizer's state and the weights; 0 for nan, since nan does not equal nan."""
    copies = {}
    for slot, value in (optimizer.state() | {"weights": net.state_dict()}).items():
        by_name = value if isinstance(value, dict) else {"": value}
        for name, tensor in by_name.items():
            copies[f"{slot} {name}".strip()] = tensor.detach().clone().nan_to_num()
    return copies


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_a_skipped_step_changes_nothing_but_its_count(optimizer):
    net = torch.nn.Linear(4, 4)
    options = {"clip": "adaptive", "skip_spikes": 3.0, "optimizer": optimizer}
    optimizer = optim.Optimizer(
        net.named_parameters(), lambda name: True, settings(**options), lambda name: True
    )
    for step, factor in enumerate((1.0, math.nan, 1.0, math.nan, math.inf, 1.0), 1):
        before = all_tensors(optimizer, net)
        (net(torch.full((2, 4), float(step))).sum() * factor).backward()
        metrics = optimizer.step(step, torch.tensor(1.0) * factor)
        after = all_tensors(optimizer, net)
        changed = {name for name in after if not torch.equal(after[name], before[name])}
        if factor == 1.0:
            assert changed == after.keys() - {"skipped_steps"}
        else:
            assert changed == {"skipped_steps"}
    assert metrics["skipped_steps"].item() == 3
    assert metrics["skipped_in_a_row"].item() == 2  # the most so far


def test_an_optimizer_that_was_loaded_clips_by_the_steps_before():
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    adaptive = settings(clip="adaptive")
    optimizers = [optim.Optimizer([("w", weight)], bool, adaptive, bool) for weight in weights]

    def step(i: int, number: int, gradient: float) -> None:
        weights[i].grad = torch.tensor([gradient])
        optimizers[i].step(number, torch.tensor(1.0))

    for number in range(1, 20):
        step(0, number, 1.0)
    saved, loaded = (dict(checkpoint.flatten(optimizer.state())) for optimizer in optimizers)
    weights[1].data.copy_(weights[0])
    for name, tensor in loaded.items():
        tensor.copy_(saved[name])
    for i in range(2):
        step(i, 20, 9.0)
    assert torch.equal(*weights)


# --------------------------------------------------------------------------------------------------
# Spikes


class OneWeight:
    """An optimizer of one weight, whose loss and gradient norm a test chooses."""

    def __init__(self, skip_spikes: float):
        self.weight = torch.nn.Parameter(torch.zeros(1))
        skipping = settings(skip_spikes=skip_spikes)
        self.optimizer = optim.Optimizer([("weight", self.weight)], bool, skipping, bool)
        self.skipped = 0
        self.losses = deque(maxlen=128)
        self.norms = deque(maxlen=128)

    def is_skipped(self, loss: float, norm: float) -> bool:
        self.weight.grad = torch.tensor([norm])
        skipped = self.optimizer.step(1, torch.tensor(loss))["skipped_steps"].item()
        is_skipped = skipped > self.skipped
        self.skipped = skipped
        if math.isfinite(loss) and math.isfinite(norm):
            self.losses.append(loss)
            self.norms.append(norm)
        return is_skipped

    def fill(self, count: int) -> None:
        for i in range(count):
            assert not self.is_skipped(2 + 0.1 * (i % 3), 1 + 0.1 * (i % 2))


def test_a_spike_lies_beyond_the_deviations_of_the_last_128_updates():
    one = OneWeight(skip_spikes=4.0)
    one.fill(200)
    for loss_sigmas, norm_sigmas, spike in (
        (3.99, 3.99, False),
        (4.01, 0.0, True),  # each enters the history, by which the next is judged
        (0.0, 4.01, True),
        (-9.0, -9.0, False),  # far below is no spike
        (3.99, 3.99, False),
    ):
        loss = fmean(one.losses) + loss_sigmas * stdev(one.losses)
        norm = fmean(one.norms) + norm_sigmas * stdev(one.norms)
        assert one.is_skipped(loss, norm) == spike, (loss_sigmas, norm_sigmas)


def test_nothing_is_a_spike_until_64_updates_are_known():
    one, other = (OneWeight(skip_spikes=4.0) for _ in range(2))
    one.fill(63)
    other.fill(64)
    assert not one.is_skipped(100.0, 1.0) and other.is_skipped(100.0, 1.0)


def test_a_lasting_change_of_level_is_not_skipped_forever():
    one = OneWeight(skip_spikes=4.0)
    one.fill(128)
    for _ in range(128):  # would push all that is known out
        assert one.is_skipped(math.nan, math.nan)
    skipped = [one.is_skipped(8.0, 1.0) for _ in range(40)]
    assert skipped[0] and not skipped[-1]


def spikes_on_one_rank() -> tuple[list[bool], float]:
    """Whether updates are skipped whose loss is far above the others on rank 0 or 1, or on rank 0
    but as far below on rank 1; and the latest loss in the history.
    """
    world = dist.start("cpu")
    one = OneWeight(skip_spikes=4.0)
    one.fill(128)
    sign = 1 if world.rank == 0 else -1
    skipped = [one.is_skipped(10.0 if world.rank == rank else 2.0, 1.0) for rank in (0, 1)]
    skipped.append(one.is_skipped(2.0 + 8.0 * sign, 1.0))
    return skipped, one.optimizer.state()["window"][0, -1].item()


def test_ranks_judge_spikes_together_by_their_mean_loss(pool):
    assert pool(2, spikes_on_one_rank) == [([True, True, False], 2.0)] * 2


# --------------------------------------------------------------------------------------------------
# Too many of them


def test_too_many_skips_end_the_run_and_leave_the_checkpoint(run, tokens, tmp_path, pool):
    text = "--strategy ddp --save_interval 3 --max_steps 30 --max_skipped 4 --log_interval 5"
    argv = flags(f"--data {tokens} --out {tmp_path}/run {text}")
    answers = pool(2, diverging_run, argv)
    assert [status for status, _ in answers] == [1, 1]
    assert (
        "error: 4 updates in a row were skipped up to step 9" in answers[0][1]
        and answers[0][1].count("\n") == 1
    )
    saved = checkpoint.list_checkpoints(tmp_path / "run")
    assert saved[-1].name == "step-00000003"  # at step 6 the loss was nan: not saved
    assert all(
        value.isfinite().all() for name, value in tensors(saved[-1]).items() if "window" not in name
    )


def diverging_run(argv: list[str]) -> tuple[int, str]:
    real = train.train_step

    def broken(forward, optimizer, batches, step, *options):
        if step == 6:
            forward.register_forward_hook(lambda module, inputs, loss: loss * math.nan)
        return real(forward, optimizer, batches, step, *options)

    with mock.patch.object(train, "train_step", broken):
        status, _, err = listen(argv)
        return status, err
