import functools
import json
import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean, stdev
from unittest import mock

import pytest
import torch
from conftest import build_run, flags, listen, rows, tensors, train_step
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

import checkpoint
import dist
import model
import optim
import train
from runtime.profiling import CommunicationCounter, HostSyncCounter

MESHES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}
SMALL = model.ModelConfig(64, n_layer=1, n_head=2, n_kv_head=1, d_model=16, d_ff=24, seq_len=8)
FROZEN = "blocks.0.mlp_norm.weight"  # a parameter without a gradient
NOT_DECAYED = {"embed.weight", "blocks.0.attention_norm.weight", FROZEN, "norm.weight"}


def lr_at(step: int) -> float:
    return 0.001 * step


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
    optimizer = optim.Optimizer(net.named_parameters(), net.decays, lr_at, **options)
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
        log.append({name: value.item() for name, value in metrics.items()})
    weights = {}
    for name, parameter in setup.net.named_parameters():
        weights[name] = model.full_tensor(parameter.detach())
    return log, weights


def train_plainly(steps: int, clip) -> tuple[list[float], list[float], dict]:
    """The same with torch's AdamW, not fused, on one whole model.

    clip(parameters) returns (total norm, whether something was clipped). Returns both for each step
    and the weights after the last.
    """
    net = model.build_model(SMALL, seed=7)
    net.get_parameter(FROZEN).requires_grad_(False)
    parameters = dict(net.named_parameters())
    groups = [
        {"params": [p for name, p in parameters.items() if name not in NOT_DECAYED]},
        {"params": [p for name, p in parameters.items() if name in NOT_DECAYED], "weight_decay": 0},
    ]
    adamw = torch.optim.AdamW(
        groups, betas=(0.9, 0.95), weight_decay=0.1, foreach=False, fused=False
    )
    norms, clips = [], []
    for step in range(1, steps + 1):
        tokens = batch(step)
        loss = net(tokens[:, :-1], tokens[:, 1:]) * loss_factor(step)
        loss.backward()
        norm, clipped = clip([p for p in net.parameters() if p.grad is not None])
        norms.append(float(norm))
        clips.append(float(clipped))
        for group in adamw.param_groups:
            group["lr"] = lr_at(step)
        adamw.step()
        adamw.zero_grad()
    return norms, clips, parameters


# ---- clipping


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


def clip_halve(optimizer, grads, norms):  # the example of the README
    large = norms > 1.0
    torch._foreach_mul_(grads, torch.where(large, 0.5, 1.0).unbind())
    return large


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


# ---- weight decay


def test_weight_decay_shrinks_only_the_parameters_that_decay():
    weights = {name: torch.nn.Parameter(torch.ones(3)) for name in ("decayed", "kept")}
    optimizer = optim.Optimizer(
        weights.items(), lambda name: name == "decayed", lr_at, weight_decay=0.5
    )
    for weight in weights.values():
        weight.grad = torch.zeros(3)  # so that nothing but weight decay changes the weights
    optimizer.step(100, torch.tensor(1.0))
    assert weights["decayed"].tolist() == pytest.approx([1 - 0.1 * 0.5] * 3)
    assert weights["kept"].tolist() == [1.0] * 3


# ---- guards


FAULTS = {6: math.nan, 7: 1e4}  # at these steps the gradient and the loss are not finite, a spike


def faulty_run(argv: list[str], faulty_rank: int | None) -> list[float]:
    """Train ten steps; the losses of those without a fault, and the number of skipped updates.

    The faults are on one rank. With None, there is none, and their updates are omitted by hand.
    """
    with mock.patch.object(optim, "SPIKE_HISTORY", 8):
        run = build_run(argv)
    batches = train.micro_batches(run, 1, 10)
    forward = run.forward
    losses = []
    for step in range(1, 11):
        if faulty_rank is None and step in FAULTS:
            omit_update(run, batches, step)
            continue
        factor = FAULTS.get(step, 1.0) if run.world.rank == faulty_rank else 1.0
        run.forward = Scaled(forward, factor)
        loss = train_step(run, batches, step)["loss"]
        torch.distributed.all_reduce(loss)
        if step not in FAULTS:
            losses.append(loss.item())
    return losses + [run.optimizer.skipped_steps.item()]


def omit_update(run: train.Run, batches, step: int) -> None:
    """A step after which all is as if its batch had not been."""
    average = run.optimizer.norm_average.clone()
    with mock.patch.object(run.optimizer.adamw, "step", lambda: None):
        train_step(run, batches, step)
    run.optimizer.norm_average.copy_(average)


class Scaled(torch.nn.Module):
    def __init__(self, forward, factor: float):
        super().__init__()
        self.forward_of, self.factor = [forward], factor

    def forward(self, tokens, targets):
        return self.forward_of[0](tokens, targets) * self.factor


@pytest.mark.parametrize("mesh", ["ddp", "fsdp", "hsdp --dp_shard 2"])
def test_faults_on_one_rank_of_four_are_skipped_on_all(pool, tokens, tmp_path, mesh):
    text = f"--strategy {mesh} --dtype float32 --skip_spikes 6 --clip adaptive"
    argv = flags(f"--data {tokens} --out {tmp_path}/run {text}")
    never = pool(4, faulty_run, argv, None)
    faulty = pool(4, faulty_run, argv, 2)
    for expected, losses in zip(never, faulty, strict=True):
        assert len(losses) == 8 + 1 and losses[:-1] == expected[:-1]
        assert (expected[-1], losses[-1]) == (0.0, 2.0)


def all_tensors(optimizer: optim.Optimizer, net: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the optimizer's state and the weights; 0 for nan, since nan does not equal nan."""
    copies = {}
    for slot, value in (optimizer.state() | {"weights": net.state_dict()}).items():
        by_name = value if isinstance(value, dict) else {"": value}
        for name, tensor in by_name.items():
            copies[f"{slot} {name}".strip()] = tensor.detach().clone().nan_to_num()
    return copies


def test_a_skipped_step_changes_nothing_but_the_count_of_skipped_steps():
    net = torch.nn.Linear(4, 4)
    options = {"clip": "adaptive", "skip_spikes": 3.0}
    optimizer = optim.Optimizer(net.named_parameters(), lambda name: True, lr_at, **options)
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


class OneWeight:
    """An optimizer of one weight, whose loss and gradient norm a test chooses."""

    def __init__(self, skip_spikes: float):
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = optim.Optimizer(
            [("weight", self.weight)], lambda name: True, lr_at, skip_spikes=skip_spikes
        )
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


@pytest.mark.parametrize("known, spike", [(63, False), (64, True)])
def test_nothing_is_a_spike_until_64_updates_are_known(known, spike):
    one = OneWeight(skip_spikes=4.0)
    one.fill(known)
    assert one.is_skipped(100.0, 1.0) == spike


def test_a_lasting_change_of_level_is_not_skipped_forever():
    one = OneWeight(skip_spikes=4.0)
    one.fill(128)
    skipped = [one.is_skipped(8.0, 1.0) for _ in range(40)]
    assert skipped[0] and not skipped[-1]


def test_values_that_are_not_finite_do_not_enter_the_history():
    one = OneWeight(skip_spikes=4.0)
    one.fill(64)
    for _ in range(128):  # would push all that is known out
        assert one.is_skipped(math.nan, math.nan)
    assert one.is_skipped(100.0, 1.0)


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


def test_too_many_skips_end_the_run_with_a_line_and_leave_the_checkpoint(
    run, tokens, tmp_path, pool
):
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


# ---- cost


def costs(strategy: str, choices: list[dict]) -> list[list[tuple[int, int]]]:
    """(collectives, reads by the host) of an ordinary step and of one with statistics.

    For each choice of the optimizer's options.
    """
    setup = build(strategy)
    found = []
    for options in choices:
        net = setup.net
        optimizer = optim.Optimizer(net.named_parameters(), net.decays, lr_at, **options)
        found.append([step_cost(setup, optimizer, measure) for measure in (False, True)])
    return found


def step_cost(setup: Setup, optimizer: optim.Optimizer, measure: bool) -> tuple[int, int]:
    tokens = batch(1)[setup.part]
    loss = setup.forward(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    with CommunicationCounter(setup.mesh) as sent, HostSyncCounter() as reads:
        optimizer.step(1, loss.detach(), measure)
    calls = sum(traffic.calls for traffic in sent.counts.values())
    return calls, reads.counts.total()


@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_and_host_reads_of_a_step(pool, mesh):
    choices = [{"clip": clip} for clip in optim.CLIPS] + [{"skip_spikes": 3.0}]
    is_sharded = mesh in ("fsdp", "hsdp")
    for found in pool(MESHES[mesh], costs, mesh, choices):
        for options, of_options in zip(choices, found, strict=True):
            ordinary = int(is_sharded or ("skip_spikes" in options and mesh == "ddp"))
            assert of_options == [(ordinary, 0), (ordinary + 2 * is_sharded, 0)], options


class IdleAdamW(torch.optim.SGD):
    """In place of torch's AdamW, which has no kernel for the meta device."""

    def __init__(self, groups, lr, betas, eps, fused):
        super().__init__(groups)
        self.defaults["betas"] = betas

    def step(self):
        pass


class HostConstants(TorchFunctionMode):
    """Records the calls that build a tensor from Python's numbers, which lie on the host."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor):
            self.calls.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", optim.CLIPS)
def test_no_value_leaves_or_reaches_the_device_in_a_step(clip, monkeypatch):
    """A tensor on the meta device has no data: copying it to the host or branching on it raises.

    On a GPU a constant that the host builds would be one more copy, for which the host waits.
    """
    monkeypatch.setattr(torch.optim, "AdamW", IdleAdamW)
    net = model.Transformer(SMALL).to("meta")
    net.get_parameter(FROZEN).requires_grad_(False)
    optimizer = optim.Optimizer(
        net.named_parameters(), net.decays, lr_at, clip=clip, skip_spikes=3.0
    )
    tokens = torch.zeros(4, 9, dtype=torch.long, device="meta")
    loss = net(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    with HostConstants() as host:
        metrics = optimizer.step(1, loss.detach(), measure=True)
    assert host.calls == []
    assert {value.device.type for value in metrics.values()} == {"meta"}
    with pytest.raises((RuntimeError, NotImplementedError)):
        loss.item()


# ---- metrics


def test_metrics_are_the_same_on_every_mesh_and_are_what_they_say(pool, run):
    logs = {}
    for mesh, ranks in MESHES.items():
        text = (
            f"--strategy {mesh} {'--dp_shard 2' * (mesh == 'hsdp')} --dtype float32 --max_steps 4"
        )
        out = run(
            ranks, f"{text} --optim_metrics_interval 2 --clip value --max_grad_norm 0.05", mesh
        )
        lines = (out / "optim.jsonl").read_text().splitlines()
        logs[mesh] = {
            (row.pop("step"), row.pop("parameter")): row for row in map(json.loads, lines)
        }
    single = logs["single"]
    assert {step for step, _ in single} == {2, 4} and len(single) == 2 * 20
    assert {row["clipped"] for row in single.values()} == {0.0, 1.0}
    for log in logs.values():
        assert log.keys() == single.keys()
        for key, row in log.items():
            assert row == pytest.approx(single[key], rel=1e-3, abs=1e-6), key
    weights = tensors(checkpoint.list_checkpoints(out)[-1])
    for (step, name), row in single.items():
        if step == 4:
            for kind, tensor in (
                ("weight", weights[f"model.{name}"]),
                ("exp_avg", weights[f"optimizer.exp_avg.{name}"]),
            ):
                want = [
                    value.item()
                    for value in (tensor.norm(), tensor.mean(), tensor.min(), tensor.max())
                ]
                logged = [row[f"{kind}_{what}"] for what in ("norm", "mean", "min", "max")]
                assert logged == pytest.approx(want, rel=1e-3, abs=1e-6)
            assert row["update_ratio"] == pytest.approx(
                row["update_norm"] / row["weight_norm"], rel=1e-5
            )
            assert row["update_norm"] > 0
    norms = [row["grad_norm"] for (step, _), row in single.items() if step == 4]
    assert math.hypot(*norms) == pytest.approx(rows(out)[-1]["grad_norm"], rel=1e-3)


def test_statistics_of_gradients_before_clipping_and_of_weights_and_moments_after_the_update():
    net = torch.nn.Linear(3, 2)
    optimizer = optim.Optimizer(
        net.named_parameters(), lambda name: True, lr_at, clip="value", max_grad_norm=0.5
    )
    net(torch.tensor([[0.1, -2.0, 3.0]])).sum().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    old_weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    table = optimizer.step(1, torch.tensor(1.0), measure=True)["parameters"]
    moments = optimizer.state()
    for (name, parameter), row in zip(net.named_parameters(), table.tolist(), strict=True):
        weight = parameter.detach()
        update_norm = (weight - old_weights[name]).norm()
        want = {
            "update_norm": update_norm,
            "update_ratio": update_norm / weight.norm(),
            "clipped": 1.0,
        }
        for kind, tensor in (
            ("grad", grads[name]),
            ("weight", weight),
            ("exp_avg", moments["exp_avg"][name]),
            ("exp_avg_sq", moments["exp_avg_sq"][name]),
        ):
            want[f"{kind}_norm"] = tensor.norm()
            want[f"{kind}_mean"] = tensor.mean()
            want[f"{kind}_max"] = tensor.max()
            want[f"{kind}_min"] = tensor.min()
        got = dict(zip(optimizer.COLUMNS, row, strict=True))
        want = {column: float(value) for column, value in want.items()}
        assert got == pytest.approx(want, rel=1e-5, abs=1e-9)


def statistics_of_one_row() -> dict[str, dict]:
    """Those of two parameters, each a single row, on two ranks that shard rows: one has none."""
    world = dist.start("cpu")
    mesh = dist.make_mesh(world, (1, 2, 1))["dp_shard"]
    parameters = {}
    for name, value in (("positive", 2.0), ("negative", -2.0)):
        parameter = torch.nn.Parameter(
            distribute_tensor(torch.full((1, 3), value), mesh, [Shard(0)])
        )
        parameter.grad = torch.zeros_like(parameter)
        parameters[name] = parameter
    optimizer = optim.Optimizer(parameters.items(), lambda name: False, lr_at)
    table = optimizer.step(1, torch.tensor(1.0), measure=True)["parameters"].tolist()
    return {name: dict(zip(optimizer.COLUMNS, row)) for name, row in zip(parameters, table)}


def test_a_rank_with_an_empty_shard_changes_no_statistics(pool):
    for answer in pool(2, statistics_of_one_row):
        for name, value in (("positive", 2.0), ("negative", -2.0)):
            row = answer[name]
            assert (row["weight_min"], row["weight_mean"], row["weight_max"]) == (value,) * 3


# ---- schedules


def test_a_schedule_rises_to_lr_and_falls_to_min_lr():
    options = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "max_steps": 110}
    steps = range(1, 111)
    for schedule in optim.SCHEDULES:
        lrs = [optim.learning_rate(step, schedule=schedule, **options) for step in steps]
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
    assert optim.learning_rate(step, schedule=schedule, **options) == pytest.approx(lr)
