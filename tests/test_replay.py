"""tools/replay.py as `python -m tools.replay`: repeats a step of a run and explains it."""

import contextlib
import json
import math
import re
import shutil
import sys
import traceback
from pathlib import Path

import pytest
import torch
from conftest import (
    call_train,
    contents,
    exit_statuses,
    flags,
    fork_ranks,
    listen,
    rows,
    start_row,
)

import checkpoint
import model
from tools import replay
from tools.common import read_starts

NUMBER = re.compile(r"^(loss|grad_norm) \S+, logged \S+: a relative difference of (\S+)$", re.M)
SEQUENCE = re.compile(r"sequence (\d+): .*")
KEPT = "--dtype float32 --save_interval 2 --keep_every 1"


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


def differences(out: str) -> list[float]:
    """The relative differences of the loss and of the gradient norm from the log."""
    found = dict(NUMBER.findall(out))
    return [float(found["loss"]), float(found["grad_norm"])]


@pytest.fixture(scope="module")
def runs(pool, tokens, tmp_path_factory) -> dict[str, Path]:
    """A run of 6 steps on one rank, and one of 4 steps on 4 ranks, which save every 2 steps."""
    found = {}
    for ranks, steps, mesh in ((1, 6, "single"), (4, 4, "fsdp --tp 2")):
        found[mesh] = tmp_path_factory.mktemp("runs") / "run"
        text = f"--data {tokens} --out {found[mesh]} --max_steps {steps} --strategy {mesh} {KEPT}"
        argv = flags(text)
        warmup = argv.index("--warmup_steps")
        del argv[warmup : warmup + 2]  # the default may exceed max_steps
        assert pool(ranks, call_train, argv) == [0] * ranks
    return found


@pytest.fixture
def single(runs, tmp_path) -> Path:
    """A copy of the run on one rank."""
    return shutil.copytree(runs["single"], tmp_path / "run")


# --------------------------------------------------------------------------------------------------
# Numbers


def test_one_process_repeats_a_step_of_a_mesh_up_to_rounding(runs):
    run = runs["fsdp --tp 2"]
    out = repeated(run, 4)
    assert f"step 4 of {run}: 2 steps after {run}/checkpoints/step-00000002, about " in out
    loss, grad_norm = differences(out)
    assert loss < 1e-6 and grad_norm < 1e-5
    found = re.findall(r"^  (\S+)% (\S+) sequence (\d+): ", out, re.M)
    shares, losses, numbers = zip(*[map(float, line) for line in found])
    assert sorted(numbers) == list(range(24, 32)) and sum(shares) == pytest.approx(100, abs=0.5)
    assert sorted(losses, reverse=True) == list(losses)
    mean = rows(run)[-1]["loss"]
    assert sum(losses) / 8 == pytest.approx(mean, abs=1e-4)
    norms = [float(norm) for norm in re.findall(r"^  (\S+) \S+weight$", out, re.M)]
    assert len(norms) == 20 and sorted(norms, reverse=True) == norms


def test_the_same_mesh_repeats_a_step_bit_by_bit(runs, pool):
    run = runs["fsdp --tp 2"]
    (status, out, _), *others = pool(4, call, [run, 4])
    assert status == 0 and differences(out) == [0, 0]
    assert sorted(map(int, SEQUENCE.findall(out))) == list(range(24, 32))
    assert others == [(0, "", "")] * 3  # rank 0 prints
    ((status, _, err), _) = pool(2, call, [run, 4])
    assert status == 2 and "ran on 4 ranks after step 0, not on 2: start as many" in err


def test_an_early_step_is_repeated_from_the_initial_weights(runs):
    out = repeated(runs["single"], 2)
    assert "2 steps after the initial weights" in out and differences(out) == [0, 0]


def test_replay_skips_a_damaged_checkpoint(single):
    path = single / "checkpoints/step-00000004"
    weights = path / "rank-00000.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    out = repeated(single, 6)
    assert f"passed over {path}: rank-00000.safetensors has changed" in out
    assert f"4 steps after {single}/checkpoints/step-00000002" in out
    assert differences(out) == [0, 0]


def replay_while_it_is_removed(run: Path, aside: Path, printed: Path) -> None:
    """Replay step 6. When checkpoint 2 is opened for its weights, it is removed, and 4 appears."""
    early, late = (run / f"checkpoints/step-0000000{step}" for step in (2, 4))

    def replace(event: str, arguments: tuple) -> None:
        if event == "open" and str(arguments[0]).startswith(f"{early}/rank-") and aside.exists():
            names = [frame.name for frame in traceback.extract_stack()]
            if not any(name.startswith("verif") for name in names):  # to load it
                aside.rename(late)
                early.rename(run.parent / "removed")

    sys.addaudithook(replace)
    with open(printed, "w") as file, contextlib.redirect_stdout(file):
        sys.exit(replay.main([str(run), "6"]))


def test_replay_skips_a_checkpoint_removed_while_it_is_read(single, tmp_path):
    aside, printed = tmp_path / "not saved yet", tmp_path / "printed"
    (single / "checkpoints/step-00000004").rename(aside)
    (process,) = fork_ranks(1, replay_while_it_is_removed, single, aside, printed)
    assert exit_statuses([process]) == [0]
    out = printed.read_text()
    assert f"passed over {single}/checkpoints/step-00000002: " in out
    assert f"2 steps after {single}/checkpoints/step-00000004" in out
    assert differences(out) == [0, 0]


def test_a_step_is_repeated_with_the_flags_that_trained_it(run, tmp_path):
    run(1, f"--max_steps 3 {KEPT}")
    out = run(1, f"--max_steps 6 {KEPT} --lr 0.02 --beta1 0.5 --allow_changes")
    last = run(1, f"--max_steps 8 {KEPT} --lr 0.01 --beta1 0.5 --clip adaptive --allow_changes")
    assert out == last
    shutil.rmtree(out / "checkpoints")
    for step in (3, 4, 6, 8):
        assert differences(repeated(out, step)) == [0, 0]


def test_the_last_start_that_trained_a_step_is_found():
    starts = [{"step": step, "name": i} for i, step in enumerate((0, 10, 5, 5))]
    names = [replay.start_of(starts, step)["name"] for step in (1, 5, 6, 10, 11)]
    assert names == [0, 0, 3, 3, 3]


# --------------------------------------------------------------------------------------------------
# Modules


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


@contextlib.contextmanager
def planted(passes: range, kind: type, change):
    """Change what modules of a kind return in these forward passes in training, from 1."""
    count = [0]

    def see(module: torch.nn.Module, inputs: tuple) -> None:
        if isinstance(module, model.Transformer) and not inputs[0].is_meta:
            count[0] += torch.is_grad_enabled()

    def plant(module: torch.nn.Module, inputs: tuple, output: torch.Tensor):
        if isinstance(module, kind) and torch.is_grad_enabled() and count[0] in passes:
            return change(output)

    modules = torch.nn.modules.module
    with (
        modules.register_module_forward_pre_hook(see),
        modules.register_module_forward_hook(plant),
    ):
        yield


def test_replay_reports_the_first_module_with_an_inf(single):
    """Step 6 is the second after a checkpoint. It is then repeated, to find the module."""
    with planted(range(2, 4), model.MLP, lambda x: x * math.inf):
        out = repeated(single, 6)
    assert "first not finite in forward: blocks.0.mlp\n" in out
    assert "grad_norm nan" in out


def test_replay_reports_the_first_inf_of_a_backward_pass(single):
    with planted(range(1, 3), model.Attention, InfiniteGradient.apply):
        out = repeated(single, 3)
    assert "first not finite in forward: none\n" in out
    assert "first not finite in backward: blocks.1.attention\n" in out
    with planted(range(1, 2), model.Attention, InfiniteGradient.apply):
        out = repeated(single, 4)
    assert "step 3: its update is skipped" in out and "first not finite" not in out


# --------------------------------------------------------------------------------------------------
# The log, and errors of the user


def test_replay_without_a_step_lists_spikes_and_skips(single):
    losses = [2 + 0.1 * (i % 2) for i in range(60)]
    losses[19] = 50  # one row too early
    losses[45], losses[50], losses[55] = 2.4, 2.2, None
    log = [
        {"step": 10 * i + 10, "loss": loss, "skipped_steps": 3 * (i >= 30)}
        for i, loss in enumerate(losses)
    ]
    assert repeated(single) == "no spike and no skipped update in 6 training rows\n"
    log.insert(0, start_row())
    (single / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    lines = repeated(single).splitlines()
    command = f"python -m tools.replay {single}"
    assert lines[0] == f"step 310: 3 updates skipped after step 300: {command} 310"
    assert lines[1].startswith("step 460: loss 2.4000, above 2.3") and lines[1].endswith(" 460")
    assert lines[2].startswith("step 560: loss nan, above 2.") and len(lines) == 3


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (["7"], "ends with step 6: give a step up to that"),
        (["0"], "0 must be at least 1"),
        (["6", "--data", "OTHER"], "OTHER has the fingerprint .*, and RUN was trained on .*--data"),
        (["6", "--data", "nowhere"], "--data nowhere is not a token folder"),
    ],
)
def test_a_step_or_data_that_the_run_lacks_is_refused(single, tokens, arguments, problem):
    other = shutil.copytree(tokens, single.parent / "other")
    with open(other / "train.bin", "r+b") as file:
        file.write(b"\0\0")
    names = {"OTHER": str(other), "RUN": str(single)}
    arguments = [names.get(argument, argument) for argument in arguments]
    for name, value in names.items():
        problem = problem.replace(name, value)
    status, out, err = call([single, *arguments])
    assert status == 2 and not out
    assert re.match(f"^tools.replay: error: .*{problem}[^\n]*\n$", err)


def test_a_folder_without_a_run_is_refused(tmp_path):
    status, _, err = call([tmp_path, "1"])
    assert status == 2 and "is not the folder of a run" in err


def test_a_run_of_other_code_is_refused(single):
    (start,) = read_starts(single)
    start["config"]["window"] = 4
    (single / "metrics.jsonl").write_text(json.dumps(start) + "\n")
    status, _, err = call([single, "1"])
    assert status == 2 and "was trained by other code: --window is unknown" in err


def test_replay_needs_the_weights_that_a_run_started_from(runs, run, tmp_path):
    branch = tmp_path / "branch"
    path = checkpoint.list_checkpoints(runs["single"])[-1]
    shutil.copytree(path, branch / "checkpoints" / path.name)
    for how, text in {
        "init_from": f"--init_from {runs['single']}",
        "branch": "--warmup_steps 50",  # the value of that run
    }.items():
        out = run(1, f"--max_steps 60 {KEPT} {text}", how)
        assert differences(repeated(out, 10)) == [0, 0]
        shutil.rmtree(out / "checkpoints")
        status, _, err = call([out, 10])
        assert status == 2 and "began with the weights of another run, and has no" in err
    status, _, err = call([out, 5])
    assert status == 2 and "step 5 is in another run: this one began with its checkpoint" in err
