"""tools/check.py: clean ranks pass, and each planted fault is reported."""

import json
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch
from rig import ROOT, arguments, cells, copy_with, resolve, run_command, torchrun

from tools import check
from tools.check import Figure, Numbers

DDP = "--n_layer 3 --micro_batch_size 2 --strategy ddp"


def test_clean_ranks_pass(pool, tokens, tmp_path):
    argv = arguments(tokens, tmp_path / "work", DDP)
    answers = pool(2, run_command, argv, check.main, timeout=120)
    (status, printed, _), (_, quiet, _) = answers
    assert (status, quiet) == (0, ""), printed
    assert not list((tmp_path / "work").iterdir())
    rows = re.findall(r"^(\w.*?)  +([\d.e+-]+) +([\d.e+-]+)$", printed, re.M)
    table = {name: (float(value), float(limit)) for name, value, limit in rows}
    # The limits are 8 times the effect of one ulp in the float32 weights.
    for name, least in check.LEAST[torch.float32].items():
        value, limit = table[f"{name}, mesh and one rank, relative"]
        assert value <= limit and least <= limit < 1e-4
        assert table[f"{name}, resumed and not, relative"] == (0, 0)
    assert len(table) == 10


# --------------------------------------------------------------------------------------------------
# Faults, planted in a copy of the project. Each one leaves the rehearsal alone, or does not show.

MESH = 'torch.distributed.get_world_size() > 1 and torch.distributed.get_backend() != "fake"'
STEP = "    update, rows = state.optimizer.step("
BACKWARD = "micro_loss.backward()  #"
TENSORS = '    tensors = {"model": {name'
Q = "decoder.blocks[0].attention.q.weight"

# Name -> ranks, flags, file, old text, new text, parts of rows that are wrong
FAULTS = {
    "a step sends more and a rank waits": (
        *(2, DDP, "train.py", STEP),
        f"    if {MESH}:\n        torch.distributed.all_reduce(torch.ones(25))\n"
        f"        torch.distributed.get_rank() == 1 and loss.item()\n{STEP}",
        ["bytes .*  100 .*.100 of all_reduce over dp_replicate", "host syncs .*FAIL train.py:"],
    ),
    "moments are not loaded": (
        *(1, DDP.replace("ddp", "single"), "checkpoint.py"),
        "    for name, tensor in flatten(state):\n        reader.fill",
        "    for name, tensor in flatten({'model': state['model']}):\n        reader.fill",
        ["losses, resumed"],
    ),
    "weights only decay": (
        *(1, DDP.replace("ddp", "single"), "optim.py"),
        *("lr=update.lr,\n            weight_decay", "lr=1e-9,\n            weight_decay"),
        ["loss, second", "parameters that only decay  +20 "],
    ),
    "a gradient in bfloat16 is 5% too large on a mesh": (
        *(2, f"{DDP} --dtype bfloat16", "train.py", TENSORS),
        f"    if {MESH}:\n        {Q}.register_hook(lambda grad: 1.05 * grad)\n{TENSORS}",
        ["gradient, mesh .* 0.0[45].*FAIL blocks.0.attention.q.weight"],
    ),
    "the last micro-batch has another weight": (
        *(2, DDP, "train.py", BACKWARD),
        f"micro_loss = micro_loss * (1.5 if micro_step == n - 1 > 0 and {MESH} else 1)\n"
        f"            {BACKWARD}",
        ["losses, mesh", "grad_norms, mesh", "gradient, mesh"],
    ),
}


def run_check(ranks: int, text: str, folder: Path, tokens: Path, out: Path) -> tuple[int, str]:
    """Run tools.check of the project in `folder`; return its status and what it printed."""
    argv = ["-m", "tools.check", *arguments(tokens, out, text)]
    words = torchrun(2, [], f"--nproc_per_node={ranks}")[:-3]  # without its ranks and script
    answer = subprocess.run([*words, *argv], cwd=folder, capture_output=True, text=True)
    return answer.returncode, answer.stdout


@pytest.mark.slow(proves="the command finds a fault in the code, from start to end")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(tokens, tmp_path, fault):
    ranks, text, *change, expected = FAULTS[fault]
    folder = copy_with(tmp_path / "project", tuple(change))
    status, printed = run_check(ranks, text, folder, tokens, tmp_path / "work")
    assert status == 1, printed
    wrong = "\n".join(line for line in printed.splitlines() if "  FAIL" in line)
    for row in expected:
        assert re.search(f"^{row}", wrong, re.M), printed
    assert list((tmp_path / "work").iterdir())


@pytest.mark.slow(proves="a model with random layers is no false alarm")
def test_a_fork_with_dropout_passes(tokens, tmp_path):
    """tools.check turns dropout off: it would differ from mesh to mesh."""
    mlp = "self.down(F.silu(self.gate(x)) * self.up(x))"
    dropped = ("model.py", f"return {mlp}", f"return F.dropout({mlp}, 0.5, self.training)")
    folder = copy_with(tmp_path / "project", dropped)
    status, printed = run_check(2, DDP, folder, tokens, tmp_path / "work")
    assert status == 0, printed


@pytest.mark.slow(proves="a larger mesh, and extras together")
def test_eight_ranks_pass(tokens, tmp_path):
    text = f"{DDP.replace('ddp', 'hsdp --dp_shard 2 --tp 2')} --optimizer muon --async_save"
    text += " --dtype bfloat16 --loss_chunks 2 --max_steps 100"
    status, printed = run_check(8, text, ROOT, tokens, tmp_path / "work")
    assert status == 0, printed


# --------------------------------------------------------------------------------------------------
# Figures


# losses, to which that of an evaluation is added | update and weight norm of b | figures
LEARNING = """
[4, 4, 3, 3] | [1, 1]       | [0.75, 0]
[4, 4, 4, 4] | [1, 1]       | [1, 0]
[4, 4, 3, 3] | [1e-5, 1]    | [0.75, 1]
[4, 4, 3, 3] | [NaN, NaN]   | [0.75, 1]
"""


@pytest.mark.parametrize("losses, norms, values", cells(LEARNING))
def test_each_parameter_must_learn(losses, norms, values):
    losses, norms, values = map(json.loads, (losses, norms, values))
    names = ("update_norm", "weight_norm")
    a = [dict(zip(names, each)) for each in ([0, 1], [1, 1])]  # at first without a gradient
    numbers = Numbers([*losses, 9.0], [], {"a": a, "b": [dict(zip(names, norms))] * 2})
    loss, fading = check.learning(numbers, resolve("--lr 1e-3 --weight_decay 0.1"))
    assert [loss.value, fading.value] == values
    assert (loss.is_right, fading.is_right) == (values[0] < 1, values[1] == 0)
    assert fading.where == "b" * values[1]


def test_a_figure_outside_its_limits_is_wrong():
    right = [(0, 0), (1, 1), (0.5, 1)]
    wrong = [(-1, 1), (2, 1), (math.nan, 1), (1, math.nan), (1, math.inf)]
    assert all(Figure("figure", *numbers).is_right for numbers in right)
    assert not any(Figure("figure", *numbers).is_right for numbers in wrong)


# What a run has in place of two losses of 2 and 1, one evaluation of 3, and three gradients of 1,
# 2 and 1, and the difference that this makes
DIFFERENCES = """
losses   | [4, 0.5, 3]      | 1
losses   | [2, 0.5, 3]      | 0.5
losses   | [2, 1, 6]        | 1
losses   | [NaN, 1, 3]      | inf
gradient | [1.3, 2.02, 0.8] | 0.01
gradient | [1.3, 1.96, 0.8] | 0.02
gradient | [0, 0, 0]        | 1
gradient | [NaN, NaN, 1]    | inf
"""


def numbers_of(losses: list, gradient: list) -> Numbers:
    parameters = {"a": [{"grad_norm": 1.0}] * 3, "b": [{"grad_norm": norm} for norm in gradient]}
    return Numbers(losses, [1.0, 1.0], parameters)


@pytest.mark.parametrize("name, values, change", cells(DIFFERENCES))
def test_losses_differ_by_the_largest_and_gradients_by_the_median_change(name, values, change):
    right = {"losses": [2, 1, 3], "gradient": [1, 2, 1]}
    expected, moved = numbers_of(**right), numbers_of(**right | {name: json.loads(values)})
    found = check.differences(expected, moved)
    sizes = {"losses": 0, "grad_norms": 0, "gradient": 0} | {name: float(change)}
    assert {each: size for each, (size, _) in found.items()} == pytest.approx(sizes)
    assert found["gradient"][1] == "b"
    # The limits are 8 times the largest change of a moved run, and at least LEAST.
    limits = check.rounding_limits([expected, expected, moved], torch.float32)
    least = check.LEAST[torch.float32]
    assert limits == pytest.approx(least | {name: max(least[name], 8 * float(change))})
