"""--optim_metrics_interval: statistics of every parameter, of its gradient and its moments."""

import json
import math

import pytest
import torch
from conftest import rows, tensors
from test_optim import MESHES, settings
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint
import dist
import optim


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


def test_statistics_are_of_raw_gradients_and_updated_weights():
    net = torch.nn.Linear(3, 2)
    clipping = settings(clip="value", max_grad_norm=0.5)
    optimizer = optim.Optimizer(net.named_parameters(), lambda name: True, clipping)
    net(torch.tensor([[0.1, -2.0, 3.0]])).sum().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    old_weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    table = optimizer.step(1, torch.tensor(1.0), measure=True)["parameters"]
    moments = optimizer.state()
    for (name, parameter), row in zip(net.named_parameters(), table.rows(), strict=True):
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
        assert row.pop("parameter") == name
        want = {column: float(value) for column, value in want.items()}
        assert row == pytest.approx(want, rel=1e-5, abs=1e-9)


def test_a_slot_that_a_parameter_lacks_has_no_statistics():
    net = torch.nn.Linear(3, 2)

    def always(name: str) -> bool:
        return True

    muon = settings(optimizer="muon")
    optimizer = optim.Optimizer(net.named_parameters(), always, muon, always)
    net(torch.ones(1, 3)).sum().backward()
    of_weight, of_bias = optimizer.step(1, torch.tensor(1.0), measure=True)["parameters"].rows()
    for row, slot, other in (
        (of_weight, "momentum_buffer", "exp_avg"),
        (of_bias, "exp_avg", "momentum_buffer"),
    ):
        assert row[f"{slot}_norm"] > 0 and row["update_norm"] > 0
        statistics = [row[f"{other}_{statistic}"] for statistic in ("norm", "mean", "max", "min")]
        assert all(map(math.isnan, statistics))
    momentum = optimizer.slots["momentum_buffer"]["weight"]
    assert of_weight["momentum_buffer_norm"] == pytest.approx(momentum.norm().item())


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
    optimizer = optim.Optimizer(parameters.items(), lambda name: False, settings())
    table = optimizer.step(1, torch.tensor(1.0), measure=True)["parameters"]
    return {row["parameter"]: row for row in table.rows()}


def test_a_rank_with_an_empty_shard_changes_no_statistics(pool):
    for answer in pool(2, statistics_of_one_row):
        for name, value in (("positive", 2.0), ("negative", -2.0)):
            row = answer[name]
            assert (row["weight_min"], row["weight_mean"], row["weight_max"]) == (value,) * 3
