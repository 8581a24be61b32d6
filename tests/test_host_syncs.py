"""The host does not wait for the device in a step."""

import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, build_run, flags, train_step
from test_optim import FROZEN, SMALL, lr_at
from torch.overrides import TorchFunctionMode

import model
import optim
import train
from runtime.profiling import HostSyncCounter

# On a CPU nothing waits, so every way to ask for a value counts.
READS = ("item", "tolist", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero")


def count_reads(argv: list[str]) -> dict[str, int]:
    """How often our own files asked for a tensor's value in the loop, by file and method."""
    reads: dict[str, int] = {}

    def counting(name: str, method):
        def ask(tensor, *arguments, **options):
            asker = Path(sys._getframe(1).f_code.co_filename)
            if asker.parent == ROOT:
                key = f"{asker.name} {name}"
                reads[key] = reads.get(key, 0) + 1
            return method(tensor, *arguments, **options)

        return ask

    run = build_run(argv)
    patches = [mock.patch.object(train, "evaluate", lambda run, step: None)]  # evaluations wait
    for name in READS:
        method = counting(name, getattr(torch.Tensor, name))
        patches.append(mock.patch.object(torch.Tensor, name, method))
    for patch in patches:
        patch.start()
    with HostSyncCounter() as inside:  # what asks from inside of torch's functions
        assert train.train(run) == 0
    for patch in patches:
        patch.stop()
    for place, times in inside.counts.items():
        if (ROOT / place.split(":")[0]).exists():
            reads[place] = times
    return reads


@pytest.mark.parametrize(
    "mesh, ranks",
    [("single", 1), ("ddp", 2), ("fsdp", 2), ("hsdp --dp_shard 2 --dp_replicate 2", 4)],
)
def test_the_host_reads_from_the_device_for_log_rows_only(pool, tokens, tmp_path, mesh, ranks):
    """Steps 1, 5 and 6 of 6 are logged: one read each."""
    text = f"--data {tokens} --out {tmp_path}/run --strategy {mesh} --micro_batch_size 1"
    argv = flags(f"{text} --max_steps 6 --checkpoint none --log_interval 5")
    assert pool(ranks, count_reads, argv) == [{"metrics.py tolist": 3}] * ranks


def cuda_steps(argv: list[str]) -> int:
    run = build_run(argv)
    batches = run.batches(1, 6)
    for step in (1, 2, 3):  # the first allocates
        train_step(run, batches, step)
    torch.cuda.set_sync_debug_mode("error")
    for step in (4, 5, 6):
        row = train_step(run, batches, step)
        run.log.queue(step, row, run.optimizer.lr)
    torch.cuda.set_sync_debug_mode("default")
    run.log.flush()
    return 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_no_sync_on_cuda(pool, tokens, tmp_path, strategy):
    text = f"--data {tokens} --out {tmp_path}/run --strategy {strategy} --micro_batch_size 2"
    assert pool(1, cuda_steps, [*flags(text), "--device", "cuda"]) == [0]


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
