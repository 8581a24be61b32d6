import json
import math
from unittest import mock

import pytest
import torch
from conftest import Scalars, flags, listen, rows, tensors

import checkpoint
import data
import dist
import model
import optim
import train

MESHES = {"single": 1, "ddp": 2, "fsdp": 4, "hsdp": 4}
SMALL = model.ModelConfig(64, n_layer=1, n_head=2, n_kv_head=1, d_model=16, d_ff=24, seq_len=8)
FROZEN = "blocks.0.mlp_norm.weight"  # a parameter without gradient


def lr_at(step: int) -> float:
    return 0.001 * (step + 1)


def build(strategy: str, **options) -> tuple:
    """(what to call, optimizer, this rank's part of a batch of 8, mesh) of a small decoder in this process's world"""
    world = dist.start("cpu")
    shape = dist.mesh_shape(
        strategy, world.size, world.local_size, None, 2 if strategy == "hsdp" else None
    )
    mesh = dist.make_mesh(world, shape)
    with torch.device("meta"):
        net = model.Transformer(SMALL)
    net.get_parameter(FROZEN).requires_grad_(False)
    init = lambda name, tensor: net.init_tensor(name, tensor, 7)  # noqa: E731
    forward = dist.parallelize(
        net,
        {},
        [[block] for block in net.blocks],
        mesh,
        strategy,
        torch.float32,
        world.device,
        init,
    )
    optimizer = optim.Optimizer(net.named_parameters(), net.decays, lr_at, **options)
    share = 8 // world.size
    return (
        forward,
        optimizer,
        slice(dist.dp_rank(mesh) * share, (dist.dp_rank(mesh) + 1) * share),
        mesh,
    )


def batch(step: int) -> torch.Tensor:
    return torch.randint(64, (8, 9), generator=torch.Generator().manual_seed(step))


def steps(strategy: str, count: int, **options) -> tuple[list, dict]:
    """(metrics of each step, the weights after the last)"""
    forward, optimizer, part, _ = build(strategy, **options)
    log = []
    for step in range(count):
        tokens = batch(step)[part]
        loss = forward(tokens[:, :-1], tokens[:, 1:]) * (
            10 if step == 3 else 1
        )  # a larger gradient
        loss.backward()
        log.append(
            {name: value.item() for name, value in optimizer.step(step, loss.detach()).items()}
        )
    whole = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
        for name, p in optimizer.parameters.items()
    }
    return log, whole


def reference(count: int, clip) -> tuple[list, dict]:
    """The same with torch's own AdamW, one step at a time, on one whole model; clip(step, parameters) -> (norm, clipped)."""
    net = model.Transformer(SMALL)
    for name, parameter in net.named_parameters():
        net.init_tensor(name, parameter.data, 7)
    net.get_parameter(FROZEN).requires_grad_(False)
    decays = {True: [], False: []}
    for name, parameter in net.named_parameters():
        decays[net.decays(name)].append(parameter)
    groups = [
        {"params": decays[True], "weight_decay": 0.1},
        {"params": decays[False], "weight_decay": 0.0},
    ]
    adamw, log = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False, fused=False), []
    for step in range(count):
        (net(batch(step)[:, :-1], batch(step)[:, 1:]) * (10 if step == 3 else 1)).backward()
        norm, clipped = clip(step, [p for p in net.parameters() if p.grad is not None])
        log.append((float(norm), float(clipped)))
        for group in adamw.param_groups:
            group["lr"] = lr_at(step)
        adamw.step()
        adamw.zero_grad()
    return log, dict(net.named_parameters())


def torch_norm(step: int, parameters: list) -> tuple:
    norm = torch.nn.utils.clip_grad_norm_(parameters, 1.5)
    return norm, norm > 1.5


def torch_value(step: int, parameters: list) -> tuple:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    clipped = max(p.grad.abs().max() for p in parameters) > 0.2
    torch.nn.utils.clip_grad_value_(parameters, 0.2)
    return norm, clipped


def nothing(step: int, parameters: list) -> tuple:
    return torch.nn.utils.get_total_norm([p.grad for p in parameters]), False


class PlainAdaptive:
    """limit = ratio x average; average <- beta x average + (1 - beta) x clipped norm, beginning with the first norm."""

    def __init__(self):
        self.average = {}

    def __call__(self, step: int, parameters: list) -> tuple:
        total, clipped = math.sqrt(sum(p.grad.norm().item() ** 2 for p in parameters)), False
        for i, p in enumerate(parameters):
            norm = p.grad.norm().item()
            average = self.average.get(i, norm)
            factor = min(1.0, 1.2 * average / (norm + 1e-6))
            clipped |= norm > 1.2 * average
            p.grad.mul_(factor)
            self.average[i] = 0.95 * average + 0.05 * norm * factor
        return total, clipped


CASES = {
    "norm": ({"max_grad_norm": 1.5}, torch_norm),
    "value": ({"max_grad_norm": 0.2}, torch_value),
    "adaptive": ({"max_grad_norm_ratio": 1.2}, PlainAdaptive),
    "none": ({}, nothing),
}


@pytest.mark.parametrize("clip", CASES)
def test_clipping_is_its_formula_on_every_mesh(pool, clip):
    options, plain = CASES[clip]
    want, weights = reference(8, plain() if clip == "adaptive" else plain)
    assert clip == "none" or {clipped for _, clipped in want} == {0, 1}
    for mesh, ranks in MESHES.items():
        for log, whole in pool(ranks, steps_with, mesh, 8, {"clip": clip, **options}):
            norms, close = [norm for norm, _ in want], 1e-6 if clip == "norm" else 1e-5
            assert [row["grad_norm"] for row in log] == pytest.approx(norms, rel=close)
            if (
                clip != "value" or ranks == 1
            ):  # by value a rank knows only of its own elements; the log takes the greatest
                assert [row["clipped"] for row in log] == [clipped for _, clipped in want]
            for name, weight in weights.items():
                torch.testing.assert_close(whole[name], weight, rtol=1e-4, atol=2e-5)
            assert torch.equal(whole[FROZEN], weights[FROZEN])  # no gradient, no update, no decay


def steps_with(mesh: str, count: int, options: dict) -> tuple:
    return steps(mesh, count, **options)


def halve(o, grads, norms):  # a strategy of one's own, as in the README
    """Halve what is above 1."""
    large = norms > 1.0
    torch._foreach_mul_(grads, torch.where(large, 0.5, 1.0).unbind())
    return large


def steps_of_a_fork(mesh: str) -> tuple:
    with mock.patch.dict(optim.CLIPS, halve=halve):
        return steps(mesh, 4, clip="halve")


def test_a_fork_adds_a_strategy_in_a_few_lines(pool):
    def plain(step, parameters):
        norms = [p.grad.norm().item() for p in parameters]
        for p, norm in zip(parameters, norms, strict=True):
            p.grad.mul_(0.5 if norm > 1.0 else 1.0)
        return math.hypot(*norms), max(norms) > 1.0

    want, weights = reference(4, plain)
    for mesh in ("single", "fsdp"):
        log, whole = pool(MESHES[mesh], steps_of_a_fork, mesh)[0]
        assert [row["clipped"] for row in log] == [clipped for _, clipped in want]
        torch.testing.assert_close(
            whole["embed.weight"], weights["embed.weight"], rtol=1e-4, atol=2e-5
        )


# ---- guards


def faulty_run(argv: list[str], fault: str, rank: int, at: int, count: int) -> list[float]:
    """Train `count` steps with a fault planted on one rank at step `at`; the losses of the others steps.

    fault: "nan" or "spike" spoil the gradient, and in the log the loss; "none" leaves the update of that step out by hand.
    """
    run = train.Run(train.parse(argv), dist.start("cpu"))
    with mock.patch.object(optim, "SPIKE_HISTORY", 8):
        run.build()
    numbers = data.train_indices(
        range(1, count + 1), run.config.global_batch_size, run.micro, run.rank, run.ranks
    )
    batches = run.fetch(run.train_windows, numbers)
    forward, losses = run.forward, []
    for step in range(count):
        factor = (
            {"nan": math.nan, "spike": 1e4}.get(fault, 1.0)
            if (step, run.rank) == (at, rank)
            else 1.0
        )
        run.forward = Scaled(forward, factor)
        if fault == "none" and step == at:  # as if the batch had not been
            average = run.optimizer.norm_average.clone()
            run.optimizer.adamw.step, really = lambda: None, run.optimizer.adamw.step
            run.train_step(batches)
            run.optimizer.adamw.step = really
            run.optimizer.norm_average.copy_(average)
            continue
        loss = dist.gather(run.train_step(batches)["loss"][None]).mean().item()
        losses += [loss] if step != at else []
    return losses + [run.optimizer.skipped_steps.item()]


class Scaled(torch.nn.Module):
    def __init__(self, forward, factor: float):
        super().__init__()
        self.forward_of, self.factor = [forward], factor

    def forward(self, tokens, targets):
        return self.forward_of[0](tokens, targets) * self.factor


@pytest.mark.parametrize("mesh", ["ddp", "fsdp", "hsdp --dp_shard 2"])
def test_a_fault_on_one_rank_of_four_is_skipped_on_all(pool, tokens, tmp_path, mesh):
    argv = flags(
        f"--data {tokens} --out {tmp_path}/run --strategy {mesh} --dtype float32 --skip_spikes 6 --clip adaptive"
    )
    never, with_nan, with_spike = (
        pool(4, faulty_run, argv, fault, 2, 9, 14) for fault in ("none", "nan", "spike")
    )
    assert all(
        losses[:-1] == never[0][:-1] and len(losses) == 14 for losses in with_nan + with_spike
    )
    assert [losses[-1] for losses in with_nan + with_spike] == [1.0] * 8 and never[0][-1] == 0.0


def test_a_skipped_step_leaves_everything_as_it_was():
    net = torch.nn.Linear(4, 4)
    o = optim.Optimizer(
        net.named_parameters(), lambda name: True, lr_at, clip="adaptive", skip_spikes=3.0
    )
    for step, bad in enumerate((1.0, 1.0, math.nan, math.inf, 1.0)):
        before = {
            name: value.clone()
            for name, value in flat(o.state() | {"weight": net.weight.detach()}).items()
        }
        (net(torch.full((2, 4), 1.0 + step)).sum() * bad).backward()
        metrics = o.step(step, torch.tensor(1.0) * bad)
        after = flat(o.state() | {"weight": net.weight.detach()})
        changed = {
            name
            for name in after
            if not torch.equal(after[name].nan_to_num(), before[name].nan_to_num())
        }
        assert changed == (after.keys() - {"skipped_steps"} if bad == 1.0 else {"skipped_steps"})
    assert (metrics["skipped_steps"].item(), metrics["skipped_in_a_row"].item()) == (2, 2)


def flat(state: dict) -> dict:
    inner = {
        slot: value if isinstance(value, dict) else {"": value} for slot, value in state.items()
    }
    return {
        f"{slot} {name}".strip(): tensor
        for slot, tensors in inner.items()
        for name, tensor in tensors.items()
    }


def test_spikes_are_judged_by_the_last_128_of_which_64_must_be_known():
    o = optim.Optimizer(
        [("w", torch.nn.Parameter(torch.zeros(1)))], lambda name: True, lr_at, skip_spikes=4.0
    )
    levels = torch.Generator().manual_seed(0)
    ask = lambda loss, norm: bool(o.is_spike(torch.tensor([loss, norm])))  # noqa: E731
    assert not any(
        ask(2 + 0.1 * torch.randn((), generator=levels).item(), 1.0 + 0.01 * i % 2)
        for i in range(63)
    )
    assert not ask(100.0, 1.0)  # too early to tell: 63 known
    for i in range(128):
        ask(2 + 0.1 * (i % 3), 1.0 + 0.1 * (i % 2))
    for loss, norm, spike in (
        (2.4, 1.1, False),
        (4.0, 1.0, True),
        (2.0, 3.0, True),
        (0.1, 0.1, False),
    ):
        window, losses = o.window.clone(), o.window[0]
        by_hand = (
            loss > losses.mean() + 4 * losses.std() or norm > window[1].mean() + 4 * window[1].std()
        )
        assert ask(loss, norm) == spike == bool(by_hand)
        o.window.copy_(window)


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
    saved = checkpoint.saved(tmp_path / "run")
    assert saved[-1].name == "step-00000006"
    assert all(
        value.isfinite().all() for name, value in tensors(saved[-1]).items() if "window" not in name
    )


def diverging_run(argv: list[str]) -> tuple[int, str]:
    step = train.Run.train_step

    def broken(run, batches):
        if run.step == 5:
            run.forward.register_forward_hook(lambda module, inputs, loss: loss * math.nan)
        return step(run, batches)

    with mock.patch.object(train.Run, "train_step", broken):
        status, _, err = listen(argv)
        return status, err


# ---- cost


def cost(strategy: str, options: dict) -> list[tuple[int, int]]:
    """(collectives, reads by the host) of an ordinary step and of one with metrics"""
    forward, optimizer, part, mesh = build(strategy, **options)
    counts = []
    for step, measure in enumerate((False, True)):
        loss = forward(batch(step)[part, :-1], batch(step)[part, 1:])
        loss.backward()
        with dist.CommunicationCounter(mesh) as sent, Scalars() as scalars:
            optimizer.step(step, loss.detach(), measure)
        counts.append((sum(calls for calls, _ in sent.counts.values()), scalars.count))
    return counts


@pytest.mark.parametrize("mesh", MESHES)
def test_collectives_and_host_reads_of_a_step(pool, mesh):
    for options in [{"clip": clip} for clip in optim.CLIPS] + [{"skip_spikes": 3.0}]:
        sharded = mesh in ("fsdp", "hsdp")
        ordinary = int(sharded or ("skip_spikes" in options and mesh == "ddp"))
        for answer in pool(MESHES[mesh], cost, mesh, options):
            assert answer == [(ordinary, 0), (ordinary + 2 * sharded, 0)], options


# ---- metrics


def test_metrics_are_the_same_on_every_mesh_and_are_what_they_say(pool, run):
    logs = {}
    for mesh, ranks in MESHES.items():
        text = (
            f"--strategy {mesh} {'--dp_shard 2' * (mesh == 'hsdp')} --dtype float32 --max_steps 6"
        )
        out = run(
            ranks, f"{text} --optim_metrics_interval 3 --clip value --max_grad_norm 0.05", mesh
        )
        lines = (out / "optim.jsonl").read_text().splitlines()
        logs[mesh] = {
            (row.pop("step"), row.pop("parameter")): row for row in map(json.loads, lines)
        }
    single = logs["single"]
    assert {step for step, _ in single} == {3, 6} and len(single) == 2 * 20
    assert {row["clipped"] for row in single.values()} == {0.0, 1.0}
    for log in logs.values():
        assert log.keys() == single.keys()
        for key, row in log.items():
            assert row == pytest.approx(single[key], rel=1e-3, abs=1e-6), key
    weights = tensors(checkpoint.saved(out)[-1])
    for (step, name), row in single.items():
        if step == 6:
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
    norms = [row["grad_norm"] for (step, _), row in single.items() if step == 6]
    assert math.hypot(*norms) == pytest.approx(rows(out)[-1]["grad_norm"], rel=1e-3)


def test_the_update_is_the_difference_of_weights():
    net = torch.nn.Linear(3, 2)
    o = optim.Optimizer(net.named_parameters(), lambda name: True, lr_at)
    net(torch.ones(1, 3)).sum().backward()
    before, gradient = net.weight.detach().clone(), net.weight.grad.clone()
    row = dict(
        zip(
            o.COLUMNS,
            o.step(0, torch.tensor(1.0), measure=True)["parameters"][0].tolist(),
            strict=True,
        )
    )
    assert row["update_norm"] == pytest.approx((net.weight - before).norm().item(), rel=1e-6)
    assert (row["grad_norm"], row["grad_max"]) == pytest.approx(
        (gradient.norm().item(), gradient.max().item())
    )


# ---- schedules


def test_schedules():
    settings = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "max_steps": 110}
    for schedule in optim.SCHEDULES:
        lrs = [optim.learning_rate(step, schedule=schedule, **settings) for step in range(110)]
        assert lrs[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
        assert lrs[10] == 1.0 and lrs[10:] == sorted(lrs[10:], reverse=True)
    at = lambda step, schedule: optim.learning_rate(step, schedule=schedule, **settings)  # noqa: E731
    assert at(60, "cosine") == pytest.approx(0.55) and at(110, "cosine") == pytest.approx(0.1)
    assert (
        at(89, "wsd") == 1.0
        and at(100, "wsd") == pytest.approx(0.55)
        and at(110, "wsd") == pytest.approx(0.1)
    )
    assert at(35, "linear") == pytest.approx(0.775) and at(109, "constant") == 1.0
