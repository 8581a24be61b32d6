"""tools/replay.py as `python -m tools.replay`: repeats a step of a run and explains it."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from rig import arguments, flip, read_rows, run_command, snapshot

import checkpoint
import model
from tools import replay
from tools.common import read_log

NUMBER = re.compile(r"^(loss|grad_norm) \S+, logged \S+: a relative difference of (\S+)$", re.M)
SEQUENCE = re.compile(r"^  (\S+) (\S+)% sequence (\d+): '(.*)'", re.M)
KEPT = "--save_interval 4 --keep_every 1"
RANKS_OF_MESH = {"single": 1, "ddp": 2, "fsdp --optimizer muon": 2, "fsdp --tp 2": 4}


def call(arguments: list) -> tuple[int, str, str]:
    """Return (status, standard output, error), and check that the folder is unchanged."""
    before = snapshot(arguments[0])
    answer = run_command(arguments, replay.command)
    assert snapshot(arguments[0]) == before
    return answer


def repeated(*arguments) -> str:
    status, out, error = call(arguments)
    assert status == 0, error
    return out


def refused(*arguments) -> int:
    """Return the status of an error that is one line."""
    status, out, error = call(arguments)
    assert (out, len(error.splitlines())) == ("", 1)
    return status


def differences(out: str) -> list[float]:
    """The relative differences of the loss and of the gradient norm from the log."""
    found = dict(NUMBER.findall(out))
    return [float(found["loss"]), float(found["grad_norm"])]


@pytest.fixture(scope="module")
def runs(pool, tokens, tmp_path_factory) -> dict[str, Path]:
    """{mesh: folder of a run of 10 steps, with checkpoints at steps 4, 8 and 10}."""
    found = {}
    for mesh, ranks in RANKS_OF_MESH.items():
        found[mesh] = tmp_path_factory.mktemp("runs") / "run"
        argv = arguments(tokens, found[mesh], f"--max_steps 10 --strategy {mesh} {KEPT}")
        assert {status for status, *_ in pool(ranks, run_command, argv)} == {0}
    return found


@pytest.fixture
def single(runs, tmp_path) -> Path:
    """A copy of the run on one rank."""
    return shutil.copytree(runs["single"], tmp_path / "copy")


@pytest.mark.parametrize("mesh", RANKS_OF_MESH)
def test_the_same_mesh_repeats_a_step_bit_by_bit(runs, pool, mesh):
    """From the initial weights, and from checkpoints one and two steps before."""
    ranks = RANKS_OF_MESH[mesh]
    for step, origin in {3: "the initial weights", 5: "step-00000004", 10: "step-00000008"}.items():
        (status, out, _), *others = pool(ranks, call, [runs[mesh], step])
        assert status == 0 and f"{origin} on\n" in out
        assert differences(out) == [0, 0]
        numbers = [int(number) for _, _, number, _ in SEQUENCE.findall(out)]
        assert sorted(numbers) == list(range(8 * step - 8, 8 * step))
        assert others == [(0, "", "")] * (ranks - 1)  # rank 0 prints


def test_one_process_repeats_a_step_of_a_mesh_up_to_rounding(runs, tokens):
    """It shows the sequences with their losses, shares and texts, the largest loss first."""
    run = runs["fsdp --tp 2"]
    out = repeated(run, 6)
    loss, grad_norm = differences(out)
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
    """Steps 1 to 3 were trained by two ranks, and steps 7 and 8 with another learning rate."""
    out = train(2, f"--strategy ddp --max_steps 3 --lr 0.01 {KEPT}").out
    for flags in ("--max_steps 6 --lr 0.01", "--max_steps 8 --lr 0.03"):
        assert train(1, f"{flags} {KEPT} --allow_changes").status == 0
    for step, tolerance in {2: 1e-5, 4: 0, 6: 0, 8: 0}.items():
        assert max(differences(repeated(out, step))) <= tolerance
    for step in (3, 6):
        shutil.rmtree(out / f"checkpoints/step-{step:08}")
        assert refused(out, step + 1) == 2
    assert differences(repeated(out, 6)) == [0, 0]


def test_the_first_module_that_is_not_finite_is_found(runs):
    def after_forward(module: torch.nn.Module, inputs: tuple, output: torch.Tensor):
        if isinstance(module, model.MLP) and torch.is_grad_enabled() and not output.is_meta:
            return output * math.inf

    def after_backward(module: torch.nn.Module, of_inputs: tuple, of_outputs: tuple):
        if isinstance(module, model.Attention):
            return tuple(None if grad is None else grad * math.inf for grad in of_inputs)

    with torch.nn.modules.module.register_module_forward_hook(after_forward):
        assert "first not finite in forward: blocks.0.mlp\n" in repeated(runs["single"], 6)
    with torch.nn.modules.module.register_module_full_backward_hook(after_backward):
        out = repeated(runs["single"], 6)
    assert "first not finite in forward: none\n" in out
    assert "first not finite in backward: blocks.1.attention\n" in out
    assert "first not finite" not in repeated(runs["single"], 6)


def test_replay_without_a_step_lists_spikes_and_skips(single):
    command = re.compile(r"^step (\d+): (loss|updates).*: python -m .* (\d+)$", re.M)
    assert command.findall(repeated(single)) == []
    losses = [2 + 0.1 * (i % 2) for i in range(60)]
    losses[19] = 50  # one row too early
    losses[45], losses[50], losses[55] = 2.4, 2.2, None
    log, _ = read_log(single / "metrics.jsonl")
    for i, loss in enumerate(losses):
        log.append({"step": 10 * i + 10, "loss": loss, "skipped_steps": 3 * (i >= 30)})
    (single / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    found = [("310", "updates", "310"), ("460", "loss", "460"), ("560", "loss", "560")]
    assert command.findall(repeated(single)) == found


def test_a_step_that_cannot_be_repeated_is_refused(runs, single, pool, tmp_path):
    assert refused(tmp_path, 1) == 2
    assert refused(single, 0) == refused(single, 11) == 2
    assert [status for status, *_ in pool(2, call, [runs["fsdp --tp 2"], 4])] == [2, 2]
    flip(single / "checkpoints/step-00000004/rank-00000.safetensors", -1)
    assert refused(single, 6) == 1
    assert differences(repeated(single, 10)) == [0, 0]
    (start,), _ = read_log(single / "metrics.jsonl")
    (single / "metrics.jsonl").write_text(json.dumps(start | {"data": "others"}) + "\n")
    assert refused(single, 10) == 2


def test_replay_needs_the_weights_that_a_run_started_from(runs, train, tmp_path):
    """Those of --init_from, or of a folder that began with a copied checkpoint."""
    path = checkpoint.list_checkpoints(runs["single"])[-1]
    shutil.copytree(path, tmp_path / "branch/checkpoints" / path.name)
    for name, text in {"init_from": f"--init_from {runs['single']}", "branch": ""}.items():
        out = train(1, f"--max_steps 14 {KEPT} {text}", name).out
        assert differences(repeated(out, 14)) == [0, 0]
        shutil.rmtree(out / "checkpoints")
        assert refused(out, 14) == 2
    assert refused(out, 5) == 2  # it is in the run of the branch's first checkpoint
