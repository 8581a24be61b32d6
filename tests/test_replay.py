"""tools/replay.py as `python -m tools.replay`: repeats a step of a run and explains it."""

import contextlib
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import call_train, contents, flags, listen, rows, start_row

import checkpoint
import model
from tools import replay
from tools.common import read_log

NUMBER = re.compile(r"^(loss|grad_norm) \S+, logged \S+: a relative difference of (\S+)$", re.M)
SEQUENCE = re.compile(r"^  (\S+) (\S+)% sequence (\d+): '", re.M)
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


def refused(*arguments) -> tuple[int, str]:
    """Return the status and the one line of an error."""
    status, out, err = call(arguments)
    assert (out, err.count("\n")) == ("", 1)
    return status, err


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
        numbers = [int(number) for _, _, number in SEQUENCE.findall(out)]
        assert sorted(numbers) == list(range(8 * step - 8, 8 * step))
        assert others == [(0, "", "")] * (ranks - 1)  # rank 0 prints


def test_one_process_repeats_a_step_of_a_mesh_up_to_rounding(runs):
    run = runs["fsdp --tp 2"]
    out = repeated(run, 6)
    loss, grad_norm = differences(out)
    assert loss < 1e-6 and grad_norm < 1e-5
    losses, shares, _ = zip(*[map(float, line) for line in SEQUENCE.findall(out)])
    assert sorted(losses, reverse=True) == list(losses)
    assert sum(losses) / 8 == pytest.approx(rows(run)[5]["loss"], abs=1e-4)
    assert [loss / sum(losses) for loss in losses] == pytest.approx([s / 100 for s in shares], 0.01)
    norms = [float(norm) for norm in re.findall(r"^  (\S+) \S+weight$", out, re.M)]
    assert len(norms) == 20 and sorted(norms, reverse=True) == norms


def test_a_step_is_repeated_with_the_flags_that_trained_it(run):
    """Steps 1 to 3 were trained by two ranks, and steps 7 and 8 with another learning rate."""
    out = run(2, f"--max_steps 3 --lr 0.01 {KEPT}")
    run(1, f"--max_steps 6 --lr 0.01 {KEPT} --allow_changes")
    assert differences(repeated(out, 6)) == [0, 0]
    shutil.rmtree(out / "checkpoints/step-00000003")
    assert max(differences(repeated(out, 2))) < 1e-5
    status, line = refused(out, 4)
    assert status == 2 and "ranks changed from 2 to 1 after step 1" in line
    assert differences(repeated(out, 6)) == [0, 0]
    run(1, f"--max_steps 8 --lr 0.03 {KEPT} --allow_changes")
    assert differences(repeated(out, 8)) == [0, 0]
    shutil.rmtree(out / "checkpoints/step-00000006")
    assert refused(out, 8)[0] == 2


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
    log = [
        {"step": 10 * i + 10, "loss": loss, "skipped_steps": 3 * (i >= 30)}
        for i, loss in enumerate(losses)
    ]
    log.insert(0, start_row())
    (single / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    lines = repeated(single).splitlines()
    command = f"python -m tools.replay {single}"
    assert lines[0] == f"step 310: updates skipped after step 300: 3: {command} 310"
    assert lines[1].startswith("step 460: loss 2.4000, above 2.3") and lines[1].endswith(" 460")
    assert lines[2].startswith("step 560: loss nan, above 2.") and len(lines) == 3


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["11"], "ends with step 10"),
        (["0"], "at least 1"),
        (["6", "--data", "OTHER"], "other tokens"),
        (["6", "--data", "nowhere"], "nowhere"),
    ],
)
def test_a_step_or_data_that_the_run_lacks_is_refused(runs, tokens, tmp_path, arguments, problem):
    other = shutil.copytree(tokens, tmp_path / "other")
    (other / "train.bin").write_bytes(bytes(2) + (tokens / "train.bin").read_bytes()[2:])
    arguments = [str(other) if argument == "OTHER" else argument for argument in arguments]
    status, line = refused(runs["single"], *arguments)
    assert status == 2 and problem in line


def test_a_damaged_checkpoint_is_one_line(single):
    weights = single / "checkpoints/step-00000004/rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    status, line = refused(single, 6)
    assert status == 1 and "step-00000004" in line
    assert differences(repeated(single, 10)) == [0, 0]


def test_folders_and_ranks_that_cannot_repeat_a_step_are_refused(runs, single, pool, tmp_path):
    assert refused(tmp_path, 1)[0] == 2
    ((status, _, err), _) = pool(2, call, [runs["fsdp --tp 2"], 4])
    assert status == 2 and "4 ranks, not on 2" in err
    (start,), _ = read_log(single / "metrics.jsonl")
    start["config"]["window"] = 4
    (single / "metrics.jsonl").write_text(json.dumps(start) + "\n")
    status, line = refused(single, 1)
    assert status == 2 and "other code: --window" in line


def test_replay_needs_the_weights_that_a_run_started_from(runs, run, tmp_path):
    branch = tmp_path / "branch"
    path = checkpoint.list_checkpoints(runs["single"])[-1]
    shutil.copytree(path, branch / "checkpoints" / path.name)
    for name, text in {"init_from": f"--init_from {runs['single']}", "branch": ""}.items():
        out = run(1, f"--max_steps 14 {KEPT} {text}", name)
        assert differences(repeated(out, 14)) == [0, 0]
        shutil.rmtree(out / "checkpoints")
        assert refused(out, 14)[0] == 2
    assert refused(out, 5)[0] == 2  # it is in the run of the branch's first checkpoint
