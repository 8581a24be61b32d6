"""tools/replay.py as `python -m tools.replay`: repeats a step of a run and explains it."""

import contextlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from old import call_train, contents, flags, listen, rows, start_row

import checkpoint
import model
from tools import replay
from tools.common import read_log

NUMBER = re.compile(r"^(loss|grad_norm) \S+, logged \S+: a relative difference of (\S+)$", re.M)
SEQUENCE = re.compile(r"^  (\S+) (\S+)% sequence (\d+): '(.*)'", re.M)
KEPT = "--dtype float32 --save_interval 4 --keep_every 1"
RANKS_OF_MESH = {"single": 1, "ddp": 2, "fsdp --optimizer muon": 2, "fsdp --tp 2": 4}


def call(arguments: list) -> tuple[int, str, str]:
    """Return (status, standard output, standard error), and check that the folder is unchanged."""
    before = contents(arguments[0])
    said = listen(list(map(str, arguments)), replay.main)
    assert contents(arguments[0]) == before
    return said


def repeated(*arguments) -> str:
    status, out, err = call(arguments)
    assert status == 0, err
    return out


def refused(*arguments) -> int:
    """Return the status of an error that is one line."""
    status, out, err = call(arguments)
    assert (out, err.count("\n")) == ("", 1)
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
        argv = flags(f"--data {tokens} --out {found[mesh]} --max_steps 10 --strategy {mesh} {KEPT}")
        assert pool(ranks, call_train, argv) == [0] * ranks
    return found


@pytest.fixture
def single(runs, tmp_path) -> Path:
    """A copy of the run on one rank."""
    return shutil.copytree(runs["single"], tmp_path / "run")


@pytest.mark.parametrize("mesh", RANKS_OF_MESH)
def test_the_same_mesh_repeats_a_step_bit_by_bit(runs, pool, mesh):
    """From the initial weights, and from checkpoints one, two and four steps before."""
    ranks = RANKS_OF_MESH[mesh]
    for step, origin in {3: "the initial weights", 5: "step-00000004", 10: "step-00000008"}.items():
        (status, out, _), *others = pool(ranks, call, [runs[mesh], step])
        assert status == 0 and f"{origin} on\n" in out
        assert differences(out) == [0, 0]
        numbers = [int(number) for _, _, number, _ in SEQUENCE.findall(out)]
        assert sorted(numbers) == list(range(8 * step - 8, 8 * step))
        assert others == [(0, "", "")] * (ranks - 1)  # rank 0 prints


def test_one_process_repeats_a_step_of_a_mesh_up_to_rounding(runs, tokens):
    run = runs["fsdp --tp 2"]
    out = repeated(run, 6)
    loss, grad_norm = differences(out)
    assert loss < 1e-6 and grad_norm < 1e-5
    *numbers, texts = zip(*SEQUENCE.findall(out))
    losses, shares, _ = [list(map(float, column)) for column in numbers]
    assert sorted(losses, reverse=True) == losses
    assert sum(losses) / 8 == pytest.approx(rows(run)[5]["loss"], abs=1e-4)
    assert [loss / sum(losses) for loss in losses] == pytest.approx([s / 100 for s in shares], 0.01)
    low_bytes = (tokens / "train.bin").read_bytes()[::2]  # 0 for token 256
    assert all(text.replace("<|endoftext|>", "\0").encode() in low_bytes for text in texts)


def test_a_step_is_repeated_from_a_checkpoint_of_the_start_that_trained_it(run):
    """Steps 1 to 3 were trained by two ranks, and steps 7 and 8 with another learning rate."""
    out = run(2, f"--max_steps 3 --lr 0.01 {KEPT}")
    run(1, f"--max_steps 6 --lr 0.01 {KEPT} --allow_changes")
    run(1, f"--max_steps 8 --lr 0.03 {KEPT} --allow_changes")
    for step, tolerance in {2: 1e-5, 4: 0, 6: 0, 8: 0}.items():
        assert max(differences(repeated(out, step))) <= tolerance
    for step in (3, 6):
        shutil.rmtree(out / f"checkpoints/step-{step:08}")
        assert refused(out, step + 1) == 2
    assert differences(repeated(out, 6)) == [0, 0]


@contextlib.contextmanager
def planted(kind: type, change):
    """Change what modules of a kind return in training."""

    def plant(module: torch.nn.Module, inputs: tuple, output: torch.Tensor):
        if isinstance(module, kind) and torch.is_grad_enabled() and not output.is_meta:
            return change(output)

    with torch.nn.modules.module.register_module_forward_hook(plant):
        yield


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


def test_the_first_module_that_is_not_finite_is_found(runs):
    with planted(model.MLP, lambda x: x * math.inf):
        assert "first not finite in forward: blocks.0.mlp\n" in repeated(runs["single"], 6)
    with planted(model.Attention, InfiniteGradient.apply):
        out = repeated(runs["single"], 6)
    assert "first not finite in forward: none\n" in out
    assert "first not finite in backward: blocks.1.attention\n" in out
    assert "first not finite" not in repeated(runs["single"], 6)


def test_replay_without_a_step_lists_spikes_and_skips(single):
    assert repeated(single).count("\n") == 1 and " 10 training rows" in repeated(single)
    losses = [2 + 0.1 * (i % 2) for i in range(60)]
    losses[19] = 50  # one row too early
    losses[45], losses[50], losses[55] = 2.4, 2.2, None
    log = [start_row()]
    for i, loss in enumerate(losses):
        log.append({"step": 10 * i + 10, "loss": loss, "skipped_steps": 3 * (i >= 30)})
    (single / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    found = re.findall(
        r"^step (\d+): (loss|updates).*: python -m .* (\d+)$", repeated(single), re.M
    )
    assert found == [("310", "updates", "310"), ("460", "loss", "460"), ("560", "loss", "560")]


def test_a_step_that_cannot_be_repeated_is_refused(runs, single, pool, tmp_path):
    assert refused(tmp_path, 1) == 2
    assert refused(single, 0) == refused(single, 11) == 2
    ((status, _, err), _) = pool(2, call, [runs["fsdp --tp 2"], 4])
    assert status == 2 and "4 ranks" in err
    weights = single / "checkpoints/step-00000004/rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert refused(single, 6) == 1
    assert differences(repeated(single, 10)) == [0, 0]
    (start,), _ = read_log(single / "metrics.jsonl")
    (single / "metrics.jsonl").write_text(json.dumps(start | {"data": "others"}) + "\n")
    assert refused(single, 10) == 2


def test_replay_needs_the_weights_that_a_run_started_from(runs, run, tmp_path):
    branch = tmp_path / "branch"
    path = checkpoint.list_checkpoints(runs["single"])[-1]
    shutil.copytree(path, branch / "checkpoints" / path.name)
    for name, text in {"init_from": f"--init_from {runs['single']}", "branch": ""}.items():
        out = run(1, f"--max_steps 14 {KEPT} {text}", name)
        assert differences(repeated(out, 14)) == [0, 0]
        shutil.rmtree(out / "checkpoints")
        assert refused(out, 14) == 2
    assert refused(out, 5) == 2  # it is in the run of the branch's first checkpoint
