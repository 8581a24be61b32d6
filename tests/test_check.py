"""tools/check.py: clean ranks pass, and each planted fault is reported."""

import contextlib
import io
import json
import math
import re
import subprocess

import pytest
import torch
from old import TORCHRUN, flags
from rig import ROOT, copy_with, resolve

from tools import check
from tools.check import Figure, Numbers
from tools.rehearse import Communication

SMALL = "--n_layer 3 --micro_batch_size 2 --dtype float32 --strategy ddp"


def on_rank(argv: list[str]) -> tuple[int, str]:
    """Run tools.check on this rank; return its status and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return check.main(argv), printed.getvalue()


def test_clean_ranks_pass(pool, tokens, tmp_path):
    text = f"{SMALL} --data {tokens} --out {tmp_path}/work"
    (status, printed), (_, quiet) = pool(2, on_rank, flags(text), timeout=120)
    assert (status, quiet) == (0, "") and printed.endswith("\npass\n"), printed
    assert not list((tmp_path / "work").iterdir())
    rows = re.findall(r"^(\w.*?)  +([\d.e+-]+) +([\d.e+-]+)$", printed, re.M)
    table = {name: (float(value), float(limit)) for name, value, limit in rows}
    # The limits are 8 times the effect of one ulp in the float32 weights.
    for name, least in check.LEAST[torch.float32].items():
        value, limit = table[f"{name}, mesh and one rank, relative"]
        assert value <= limit and least <= limit < 1e-4
        assert table[f"{name}, resumed and not, relative"] == (0, 0)
    assert len(table) == 10


def test_a_mistake_in_a_flag_is_one_line_and_status_2(tmp_path, capsys):
    argv = flags(f"--strategy fsdp --tp 2 --data {tmp_path} --out {tmp_path}/work")
    assert check.main([*argv, "--no_such_flag", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# Faults, planted in a copy of the project. Each one leaves the rehearsal alone, or does not show.

REAL = 'torch.distributed.get_backend() != "fake"'  # not in a rehearsal
MESH = "torch.distributed.get_world_size() > 1"  # not in the run on one rank
STEP = "    update, rows = state.optimizer.step("
MLP = "return self.down(F.silu(self.gate(x)) * self.up(x))"
ONE = "--n_layer 3 --micro_batch_size 1 --strategy single --dtype"
TENSORS = '    tensors = {"model": {name'


def scaled(factor: float) -> str:
    """Return TENSORS after code that multiplies a gradient on a mesh by `factor`."""
    hook = f"decoder.blocks[0].attention.q.weight.register_hook(lambda grad: {factor} * grad)"
    return f"    if {MESH}:\n        {hook}\n{TENSORS}"


# Name -> ranks, flags, file, old text, new text, parts of rows that are wrong
FAULTS = {
    "a step sends more and a rank waits": (
        *(2, SMALL, "train.py", STEP),
        f"    if {REAL}:\n        torch.distributed.all_reduce(torch.ones(25))\n"
        f"        torch.distributed.get_rank() == 1 and loss.item()\n{STEP}",
        ["bytes .*  100 .*.100 of all_reduce over dp_replicate", "host syncs .*FAIL train.py:"],
    ),
    "ddp does not average": (
        *(2, SMALL, "dist.py", '    if run.strategy == "ddp" and run.tp == 1:'),
        f'    if run.strategy == "ddp" and run.tp == 1 and not {REAL}:',
        ["losses, mesh", "grad_norms, mesh", "bytes .* -[0-9,]+ of all_reduce over dp_replicate"],
    ),
    "a rank reads another's data": (
        *(2, SMALL, "dist.py", 'return replicate_rank * mesh["dp_shard"].size() + shard_rank'),
        *('return shard_rank * mesh["dp_shard"].size() + shard_rank', ["losses, mesh"]),
    ),
    "moments are not loaded": (
        *(1, f"{ONE} float32", "checkpoint.py"),
        "    for name, tensor in flatten(state):\n        reader.fill",
        "    for name, tensor in flatten({'model': state['model']}):\n        reader.fill",
        ["losses, resumed"],
    ),
    "weights only decay": (
        *(1, f"{ONE} bfloat16", "optim.py"),
        *("lr=update.lr,\n            weight_decay", "lr=1e-9,\n            weight_decay"),
        ["loss, second", "parameters that only decay  +20 "],
    ),
    "a gradient is 1% too large on a mesh": (
        *(2, SMALL, "train.py", TENSORS, scaled(1.01)),
        ["gradient, mesh .* 0.01 .*FAIL blocks.0.attention.q.weight"],
    ),
    "a gradient in bfloat16 is 5% too large on a mesh": (
        *(2, SMALL.replace("float32", "bfloat16"), "train.py", TENSORS, scaled(1.05)),
        ["gradient, mesh .* 0.0[45].*FAIL blocks.0.attention.q.weight"],
    ),
    "the last micro-batch has another weight": (
        *(2, SMALL, "train.py", "micro_loss.backward()  #"),
        f"micro_loss = micro_loss * (1.5 if micro_step == n - 1 > 0 and {MESH} else 1)\n"
        "            micro_loss.backward()  #",
        ["losses, mesh", "gradient, mesh"],
    ),
    "replicas are not reduced": (
        *(2, SMALL.replace("ddp", "hsdp --dp_shard 1"), "dist.py"),
        'axes = mesh["dp_shard"] if run.strategy == "fsdp"',
        f'axes = mesh["dp_shard"] if run.strategy == "fsdp" or {REAL}',
        ["grad_norms, mesh", "gradient, mesh"],
    ),
}


def run_check(ranks: int, text: str, folder, tokens, tmp_path) -> tuple[int, str]:
    """Run tools.check of the project in `folder`; return its status and what it printed."""
    words = flags(f"{text} --data {tokens} --out {tmp_path}/work")
    command = [*TORCHRUN, "--standalone", f"--nproc_per_node={ranks}", "-m", "tools.check", *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return answer.returncode, answer.stdout


@pytest.mark.slow(proves="the command finds a fault in the code, from start to end")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(tokens, tmp_path, fault):
    ranks, text, *change, expected = FAULTS[fault]
    folder = copy_with(tmp_path / "project", tuple(change))
    status, printed = run_check(ranks, text, folder, tokens, tmp_path)
    assert status == 1, printed
    wrong = "\n".join(line for line in printed.splitlines() if "  FAIL" in line)
    for row in expected:
        assert re.search(f"^{row}", wrong, re.M), printed
    assert list((tmp_path / "work").iterdir())


@pytest.mark.slow(proves="a model with random layers is no false alarm")
def test_a_fork_with_dropout_passes(tokens, tmp_path):
    """tools.check turns dropout off: it would differ from mesh to mesh."""
    dropped = f"return F.dropout({MLP.removeprefix('return ')}, 0.5, self.training)"
    folder = copy_with(tmp_path / "project", ("model.py", MLP, dropped))
    status, printed = run_check(2, SMALL, folder, tokens, tmp_path)
    assert status == 0, printed


EXTRAS = "--strategy fsdp --tp 2 --async_save --optimizer muon --loss_chunks 2"


@pytest.mark.slow(proves="larger meshes, and extras together")
@pytest.mark.parametrize(
    "ranks, mesh", [(4, ""), (4, EXTRAS), (8, "--strategy hsdp --dp_shard 2 --tp 2")]
)
def test_the_check_passes_under_torchrun(tokens, tmp_path, ranks, mesh):
    text = f"--max_steps 100 --n_layer 3 --seq_len 64 --n_kv_head 4 --global_batch_size 24 {mesh}"
    status, printed = run_check(ranks, text, ROOT, tokens, tmp_path)
    assert status == 0, printed
    assert not list((tmp_path / "work").iterdir())


# --------------------------------------------------------------------------------------------------
# Figures

PROFILES = {  # host syncs, bytes sent of the 400 that are rehearsed, values of the figures
    "as rehearsed": ({}, 400, [0, 0]),
    "syncs": ({"train.py:9": 2, "dist.py:3": 1}, 400, [3, 0]),
    "more bytes": ({}, 500, [0, 100]),
    "fewer bytes": ({}, 300, [0, 100]),
}


@pytest.mark.parametrize("case", PROFILES)
def test_a_profiled_step_does_what_was_rehearsed(case):
    syncs, size, values = PROFILES[case]
    sent = [
        Communication("dp_shard", "reduce_scatter", "backward", 2, 400),
        Communication("tp", "all_reduce", "forward", 1, 8),
    ]
    communicated = [
        {"kind": "reduce_scatter", "axis": "dp_shard", "bytes": size},
        {"kind": "all_reduce", "axis": "tp", "bytes": 8},
    ]
    figures = check.profiled({"host_syncs": syncs, "communicated": communicated}, sent)
    assert [figure.value for figure in figures] == values
    assert [figure.is_right for figure in figures] == [value == 0 for value in values]


LEARNS = {"update_norm": 1.0, "weight_norm": 1.0}
LEARNING = {  # losses, what changes in the rows of parameter b, values
    "both learn": ([4, 4, 3, 3], {}, [0.75, 0]),
    "the loss stays": ([4, 4, 4, 4], {}, [1, 0]),
    "only decay": ([4, 4, 3, 3], {"update_norm": 1e-5}, [0.75, 1]),
    "nan": ([4, 4, 3, 3], dict.fromkeys(LEARNS, math.nan), [0.75, 1]),
}


@pytest.mark.parametrize("case", LEARNING)
def test_each_parameter_must_learn(case):
    losses, change, values = LEARNING[case]
    parameters = {"a": [LEARNS | {"update_norm": 0.0}, LEARNS], "b": [LEARNS | change] * 2}
    numbers = Numbers([*losses, 9.0], [], parameters)  # 9: of the evaluation
    loss, fading = check.learning(numbers, resolve("--lr 1e-3 --weight_decay 0.1"))
    assert [loss.value, fading.value] == values
    assert loss.is_right == (values[0] < 1) and fading.is_right == (values[1] == 0)
    assert fading.where == "b" * values[1]


@pytest.mark.parametrize(
    "value, limit, is_right",
    [
        *((0, 0, True), (1, 1, True), (0.5, 1, True), (-1, 1, False), (2, 1, False)),
        *((math.nan, 1, False), (1, math.nan, False), (1, math.inf, False)),
    ],
)
def test_a_figure_outside_its_limits_is_wrong(value, limit, is_right):
    assert Figure("figure", value, limit).is_right == is_right


# What the log of a run has in place of two losses of 2 and 1, one evaluation of 3, and three
# gradients of 1, 2 and 1, and the difference that this makes. A log has null in place of nan.
DIFFERENCES = {
    "equal": ("losses", [2, 1, 3], 0.0),
    "either sign": ("losses", [2, 0.5, 3], 0.5),
    "the larger one": ("losses", [4, 0.5, 3], 1.0),
    "evaluation": ("losses", [2, 1, 6], 1.0),
    "nan loss": ("losses", [None, 1, 3], math.inf),
    "median": ("gradient", [1.3, 2.02, 0.8], 0.01),
    "negative median": ("gradient", [1.3, 1.96, 0.8], 0.02),
    "no gradient": ("gradient", [0, 0, 0], 1.0),
    "nan gradient": ("gradient", [None, None, 1], math.inf),
}


def numbers_of(tmp_path, losses: list, gradients: list) -> Numbers:
    """Numbers, read from a log."""
    *losses, val_loss = losses
    rows = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(losses)]
    rows.append({"step": 2, "val_loss": val_loss})
    optim = []
    for step, norm in enumerate(gradients):
        optim += [{"step": step, "parameter": "a", "grad_norm": 1.0}]
        optim += [{"step": step, "parameter": "b", "grad_norm": norm}]
    for name, lines in (("metrics", rows), ("optim", optim)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return check.read_numbers(tmp_path)


@pytest.mark.parametrize("case", DIFFERENCES)
def test_losses_differ_by_the_largest_and_gradients_by_the_median_change(tmp_path, case):
    name, values, change = DIFFERENCES[case]
    right = {"losses": [2, 1, 3], "gradient": [1, 2, 1]}
    runs = [numbers_of(tmp_path, *each.values()) for each in (right, right | {name: values})]
    found = check.differences(*runs)
    assert found[name][0] == pytest.approx(change) and found["gradient"][1] == "b"
    assert all(size == 0 for other, (size, _) in found.items() if other != name)
    # The limits are 8 times the largest change of a moved run, and at least LEAST.
    limits = check.rounding_limits([runs[0], runs[0], runs[1]], torch.float32)
    least = check.LEAST[torch.float32]
    assert limits == pytest.approx(least | {name: max(least[name], 8 * change)})
