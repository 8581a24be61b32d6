"""tools/replay.py as `python -m tools.replay`: repeats a step of a run and explains it."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import rig
import torch
from rig import flip, read_rows, run_command, snapshot

import model
from tools import replay

# Of the loss and of the gradient norm from those in the log
DIFFERENCE = re.compile(r"^\w+ \S+, logged \S+: a relative difference of (\S+)$", re.M)
SEQUENCE = re.compile(r"^  (\S+) (\S+)% sequence (\d+): '(.*)'", re.M)
KEPT = "--save_interval 3 --keep_every 1"


def call(arguments: list) -> tuple[int, str, str]:
    """Return (status, standard output, error), and check that the folder is unchanged."""
    before = snapshot(arguments[0])
    answer = run_command(arguments, replay.command)
    assert snapshot(arguments[0]) == before
    return answer


@pytest.fixture(scope="module")
def run(pool, tokens, tmp_path_factory) -> Path:
    """A run of 6 steps on two ranks, with checkpoints at steps 3 and 6."""
    out = tmp_path_factory.mktemp("runs") / "run"
    flags = f"--strategy fsdp --optimizer muon --max_steps 6 {KEPT}"
    assert rig.train(2, tokens, out, flags).status == 0
    return out


def test_the_same_mesh_repeats_a_step_bit_by_bit(run, pool):
    """From the initial weights, and from a checkpoint two steps before."""
    for step, origin in {2: "the initial weights", 5: "step-00000003"}.items():
        (status, out, _), other = pool(2, call, [run, step])
        assert status == 0 and f"{origin} on\n" in out
        assert DIFFERENCE.findall(out) == ["0", "0"]
        numbers = [int(number) for _, _, number, _ in SEQUENCE.findall(out)]
        assert sorted(numbers) == list(range(8 * step - 8, 8 * step))
        assert other == (0, "", "")  # rank 0 prints


def test_one_process_repeats_a_step_of_a_mesh_up_to_rounding(run, tokens):
    """It shows the sequences with their losses, shares and texts, the largest loss first."""
    _, out, _ = call([run, 6])
    loss, grad_norm = map(float, DIFFERENCE.findall(out))
    assert loss < 1e-6 and grad_norm < 1e-5
    losses, shares, _, texts = zip(*SEQUENCE.findall(out))
    losses = list(map(float, losses))
    assert sorted(losses, reverse=True) == losses
    expected = read_rows(run / "metrics.jsonl")[5]["loss"]
    assert sum(losses) / 8 == pytest.approx(expected, abs=1e-3)
    assert float(shares[0]) == pytest.approx(100 * losses[0] / sum(losses), 0.01)
    low_bytes = (tokens / "train.bin").read_bytes()[::2]  # 0 for token 256
    assert all(text.replace("<|endoftext|>", "\0").encode() in low_bytes for text in texts)


def test_a_step_is_repeated_from_a_checkpoint_of_the_start_that_trained_it(train):
    """Steps 4 and 5 were trained with another learning rate."""
    for flags in ("--max_steps 3 --lr 0.01", "--max_steps 5 --lr 0.03"):
        out = train(1, f"{flags} {KEPT} --allow_changes").out
    for step in (3, 5):
        assert DIFFERENCE.findall(call([out, step])[1]) == ["0", "0"]
    shutil.rmtree(out / "checkpoints/step-00000003")
    assert call([out, 5])[0] == 2


def test_the_first_module_that_is_not_finite_is_found(run):
    def after_forward(module: torch.nn.Module, inputs: tuple, output: torch.Tensor):
        if isinstance(module, model.MLP) and torch.is_grad_enabled() and not output.is_meta:
            return output * math.inf

    def after_backward(module: torch.nn.Module, of_inputs: tuple, of_outputs: tuple):
        if isinstance(module, model.Attention):
            return tuple(None if grad is None else grad * math.inf for grad in of_inputs)

    with torch.nn.modules.module.register_module_forward_hook(after_forward):
        assert "first not finite in forward: blocks.0.mlp\n" in call([run, 6])[1]
    with torch.nn.modules.module.register_module_full_backward_hook(after_backward):
        _, out, _ = call([run, 6])
    assert "first not finite in forward: none\n" in out
    assert "first not finite in backward: blocks.1.attention\n" in out


def test_replay_without_a_step_lists_spikes_and_skips(tmp_path):
    losses = [2 + 0.1 * (i % 2) for i in range(60)]
    losses[19] = 50  # one row too early
    losses[45], losses[50], losses[55] = 2.4, 2.2, None
    log = [{"step": 0, "event": "start"}]
    for i, loss in enumerate(losses):
        log.append({"step": 10 * i + 10, "loss": loss, "skipped_steps": 3 * (i >= 30)})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    command = re.compile(r"^step (\d+): (loss|updates).*: python -m .* (\d+)$", re.M)
    found = [("310", "updates", "310"), ("460", "loss", "460"), ("560", "loss", "560")]
    assert command.findall(call([tmp_path])[1]) == found


def test_a_step_that_cannot_be_repeated_is_refused(run, train, pool, tmp_path):
    assert [status for status, *_ in pool(3, call, [run, 2])] == [2, 2, 2]
    other = train(1, f"--keep_last 0 --init_from {run}").out
    assert call([other, 2])[0] == 2  # its initial weights are not those of the seed
    copy = shutil.copytree(run, tmp_path / "copy")
    flip(copy / "checkpoints/step-00000003/rank-00000.safetensors", -1)
    assert call([copy, 5])[0] == 1
    log = copy / "metrics.jsonl"
    log.write_text(re.sub(r'"data": "\w+"', '"data": "others"', log.read_text()))
    assert call([copy, 2])[0] == 2
