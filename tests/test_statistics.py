"""--optim_metrics_interval: statistics of every parameter, its gradient and its moments."""

import json
import math

import pytest
import torch
from conftest import rows

import optim

MESHES = {"single": 1, "fsdp": 2, "hsdp": 4}


def test_statistics_are_the_same_on_every_mesh(run):
    logs = {}
    for mesh, ranks in MESHES.items():
        options = "--dtype float32 --max_steps 4 --optim_metrics_interval 2 --clip adaptive"
        options += " --max_grad_norm_ratio 1.05" + " --dp_shard 2" * (mesh == "hsdp")
        out = run(ranks, f"--strategy {mesh} {options}", mesh)
        lines = map(json.loads, (out / "optim.jsonl").read_text().splitlines())
        logs[mesh] = {(row.pop("step"), row.pop("parameter")): row for row in lines}
    single = logs["single"]
    assert {step for step, _ in single} == {2, 4} and len(single) == 2 * 20
    assert {row["clipped"] for row in single.values()} == {0.0, 1.0}
    for log in logs.values():
        assert log.keys() == single.keys()
        for key, row in log.items():
            assert row == pytest.approx(single[key], rel=1e-3, abs=1e-6), key
    norms = [row["grad_norm"] for (step, _), row in single.items() if step == 4]
    assert math.hypot(*norms) == pytest.approx(rows(out)[-1]["grad_norm"], rel=1e-3)


def test_statistics_use_raw_gradients_and_updated_weights():
    """For a matrix, which Muon updates, and a vector. A slot that a parameter lacks is nan."""
    net = torch.nn.Linear(3, 2)
    options = {"clip": "adaptive", "max_grad_norm_ratio": 0.5, "optimizer": "muon"}
    settings = optim.Settings(lr=0.1, warmup_steps=100, max_steps=200, **options)
    everything = {"decays": lambda name: True, "is_hidden": lambda name: True}
    optimizer = optim.Optimizer(net.named_parameters(), settings=settings, **everything)
    net(torch.tensor([[0.1, -2.0, 3.0]])).sum().backward()
    grads = {name: p.grad.clone() for name, p in net.named_parameters()}
    old_weights = {name: p.detach().clone() for name, p in net.named_parameters()}
    table = optimizer.step(1, lr=0.001, measure=True)["parameters"]
    for (name, parameter), row in zip(net.named_parameters(), table.rows(), strict=True):
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
