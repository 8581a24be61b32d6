"""tools/check.py: clean ranks pass, and each planted fault is reported."""

import contextlib
import io
import json
import math
import re
import subprocess

import pytest
import torch
from conftest import ROOT, TORCHRUN, copy_with, flags, resolve

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
    # The profiled run has two of the three blocks, and ddp sends its gradients once.
    weights = 320 * 32 + 2 * (3 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    megabytes = f"{4 * weights / 1e6:.3g}"
    assert table[f"bytes in a step beside the rehearsed {megabytes} MB"] == (0, 0)
    assert table["host syncs in a step"] == (0, 0)


# --------------------------------------------------------------------------------------------------
# Faults, planted in a copy of the project. Each one leaves the rehearsal alone, or does not show.

REAL = 'torch.distributed.get_backend() != "fake"'  # not in a rehearsal
MESH = "torch.distributed.get_world_size() > 1"  # not in the run on one rank
STEP = "    update, rows = state.optimizer.step("
MLP = "return self.down(F.silu(self.gate(x)) * self.up(x))"
ONE = "--n_layer 3 --micro_batch_size 1 --strategy single --dtype"
NORM = "F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)"
BFLOAT16 = SMALL.replace("float32", "bfloat16")
TENSORS = '    tensors = {"model": {name'


def scaled(factor: float) -> str:
    """Return TENSORS after code that multiplies a gradient on a mesh by `factor`."""
    hook = f"decoder.blocks[0].attention.q.weight.register_hook(lambda grad: {factor} * grad)"
    return f"    if {MESH}:\n        {hook}\n{TENSORS}"


# Name -> ranks, flags, file, old text, new text, parts of problems
FAULTS = {
    "a step sends more and waits": (
        *(2, SMALL, "train.py", STEP),
        f"    if {REAL}:\n        torch.distributed.all_reduce(torch.ones(25))\n"
        f"        loss.item()\n{STEP}",
        ["bytes .* is 100, .*: .100 of all_reduce over dp_replicate", "host syncs .*: train.py:"],
    ),
    "ddp does not average": (
        *(2, SMALL, "dist.py", '    if run.strategy == "ddp" and run.tp == 1:'),
        f'    if run.strategy == "ddp" and run.tp == 1 and not {REAL}:',
        ["loss, mesh", "grad_norm, mesh", "bytes .*: -[0-9,]+ of all_reduce over dp_replicate"],
    ),
    "a rank computes other norms": (
        *(2, SMALL, "model.py", f"return {NORM}"),
        f"return {NORM} * (1 + 1e-3 * ({REAL} and torch.distributed.get_rank() == 1))",
        ["loss, mesh"],
    ),
    "a rank reads another's data": (
        *(2, SMALL, "dist.py", 'return replicate_rank * mesh["dp_shard"].size() + shard_rank'),
        'return shard_rank * mesh["dp_shard"].size() + shard_rank',
        ["loss, mesh"],
    ),
    "moments are not loaded": (
        *(1, f"{ONE} float32", "checkpoint.py"),
        "    for name, tensor in flatten(state):\n        reader.fill",
        "    for name, tensor in flatten({'model': state['model']}):\n        reader.fill",
        ["loss, resumed"],
    ),
    "weights only decay": (
        *(1, f"{ONE} bfloat16", "optim.py"),
        "lr=update.lr,\n            weight_decay",
        "lr=1e-9,\n            weight_decay",
        ["loss, second", "parameters that only decay is 20,"],
    ),
    "mlps are dead": (
        *(1, f"{ONE} float32", "model.py", MLP),
        f"return 0 * ({MLP.removeprefix('return ')})",
        ["parameters without a gradient is 8, .*mlp", "parameters that only decay is 8, .*mlp"],
    ),
    "a gradient is 1% too large on a mesh": (
        *(2, SMALL, "train.py", TENSORS, scaled(1.01)),
        ["gradient, mesh .* is 0.01, .*: blocks.0.attention.q.weight"],
    ),
    "a gradient in bfloat16 is 5% too large on a mesh": (
        *(2, BFLOAT16, "train.py", TENSORS, scaled(1.05)),
        ["gradient, mesh .* is 0.0[45][0-9]*, .*: blocks.0.attention.q.weight"],
    ),
    "the last micro-batch has another weight": (
        *(2, SMALL, "train.py", "micro_loss.backward()  #"),
        f"micro_loss = micro_loss * (1.5 if micro_step == n - 1 > 0 and {MESH} else 1)\n"
        "            micro_loss.backward()  #",
        ["loss, mesh", "gradient, mesh"],
    ),
    "replicas are not reduced": (
        *(2, SMALL.replace("ddp", "hsdp --dp_shard 1"), "dist.py"),
        'axes = mesh["dp_shard"] if run.strategy == "fsdp"',
        f'axes = mesh["dp_shard"] if run.strategy == "fsdp" or {REAL}',
        ["grad_norm, mesh", "gradient, mesh"],
    ),
    "gradients are summed in bfloat16": (
        *(2, BFLOAT16.replace("ddp", "fsdp"), "dist.py"),
        *("reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16"),
        ["collectives that sum in bfloat16 .*: reduce_scatter over dp_shard"],
    ),
    "only rank 1 waits": (
        *(2, SMALL, "train.py", STEP),
        f"    if {REAL} and torch.distributed.get_rank() == 1:\n        loss.item()\n{STEP}",
        ["host syncs in a step is 1, .*: train.py:"],
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
    for problem in expected:
        assert re.search(f"^FAIL: {problem}", printed, re.M), printed
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


def test_a_mistake_in_a_flag_is_one_line_and_status_2(tmp_path, capsys):
    argv = flags(f"--strategy fsdp --tp 2 --data {tmp_path} --out {tmp_path}/work")
    assert check.main([*argv, "--no_such_flag", "1"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# What a profile and a log must show

SENT = Communication("dp_shard", "reduce_scatter", "backward", 2, 400)
COMMUNICATED = {"kind": "reduce_scatter", "axis": "dp_shard", "calls": 2}
PROFILES = {  # host syncs, dtypes and bytes of what was sent, the values of the figures
    "as rehearsed": ({}, ["float32"], 400, [0, 0, 0]),
    "syncs": ({"train.py:9": 2, "dist.py:3": 1}, ["float32"], 400, [3, 0, 0]),
    "more bytes": ({}, ["float32"], 500, [0, 100, 0]),
    "fewer bytes": ({}, ["float32"], 300, [0, 100, 0]),
    "another dtype": ({}, ["bfloat16", "float32"], 400, [0, 0, 1]),
}


@pytest.mark.parametrize("case", PROFILES)
def test_a_profiled_step_does_what_was_rehearsed(case):
    syncs, dtypes, size, values = PROFILES[case]
    communicated = [COMMUNICATED | {"dtypes": dtypes, "bytes": size}]
    # Activations may be summed over tp in bfloat16.
    over_tp = {"kind": "all_reduce", "axis": "tp", "calls": 1, "bytes": 8, "dtypes": ["bfloat16"]}
    sent = [SENT, Communication("tp", "all_reduce", "forward", 1, 8)]
    profile = {"host_syncs": syncs, "communicated": [*communicated, over_tp]}
    figures = check.profiled(profile, sent)
    assert [figure.value for figure in figures] == values
    assert [bool(figure.problem) for figure in figures] == [value > 0 for value in values]


LEARNS = {"grad_norm": 1.0, "update_norm": 1.0, "weight_norm": 1.0}
LEARNING = {  # losses, what changes in the rows of parameter b, values
    "both learn": ([4, 4, 3, 3], {}, [0.75, 0, 0]),
    "the loss stays": ([4, 4, 4, 4], {}, [1, 0, 0]),
    "no gradient": ([4, 4, 3, 3], {"grad_norm": 0.0}, [0.75, 1, 0]),
    "only decay": ([4, 4, 3, 3], {"update_norm": 1e-5}, [0.75, 0, 1]),
    "nan": ([4, 4, 3, 3], dict.fromkeys(LEARNS, math.nan), [0.75, 1, 1]),
}


@pytest.mark.parametrize("case", LEARNING)
def test_each_parameter_must_learn(case):
    losses, change, values = LEARNING[case]
    of_parameters = []
    for _ in range(2):  # measured steps
        of_parameters += [{"parameter": "a", **LEARNS}, {"parameter": "b", **LEARNS, **change}]
    numbers = Numbers([{"loss": loss} for loss in losses], 0.0, of_parameters)
    figures = check.learning(numbers, resolve("--lr 1e-3 --weight_decay 0.1"))
    assert [figure.value for figure in figures] == values
    wrong = [figure.problem for figure in figures[1:] if figure.problem]
    assert all(line.endswith(": b") for line in wrong)


@pytest.mark.parametrize(
    "value, limit, is_wrong",
    [
        *((0, 0, False), (1, 1, False), (0.5, 1, False), (-1, 1, True), (2, 1, True)),
        *((math.nan, 1, True), (1, math.nan, True), (1, math.inf, True)),
    ],
)
def test_a_figure_outside_its_limits_is_a_problem(value, limit, is_wrong):
    assert bool(Figure("figure", value, limit).problem) == is_wrong


@pytest.mark.parametrize(
    "losses, val_loss, largest, where",
    [
        ([2, 2], 3, 1.0, "step 2"),
        ([2, 0.5], 3, 0.5, "step 2"),
        ([1, 1], 3, 0.5, "step 1"),
        ([2, 1], 6, 1.0, "evaluation"),
        ([None, 1], 3, math.inf, "step 1"),
    ],
)
def test_a_difference_of_either_sign_in_any_row_counts(tmp_path, losses, val_loss, largest, where):
    """The losses should be 2, 1 and in the evaluation 3. A log contains null in place of nan."""
    expected = [{"step": step, "loss": 3 - step, "grad_norm": 0.0} for step in (1, 2)]
    rows = [row | {"loss": loss} for row, loss in zip(expected, losses)]
    lines = [json.dumps(row) for row in [*rows, {"step": 2, "val_loss": val_loss}]]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = check.differences(Numbers(expected, 3, []), check.read_numbers(tmp_path))
    assert found == {"loss": (largest, where), "grad_norm": (0.0, "step 2")}


@pytest.mark.parametrize(
    "expected, found, change",
    [
        ([1, 2, 1], [1.3, 2.02, 0.8], 0.01),
        ([1, 2, 1], [1.3, 1.96, 0.8], 0.02),
        ([0, 0, 0], [0, 0, 0], 0.0),
        ([1, 2, 1], [0, 0, 0], 1.0),
        ([0, 0, 1], [1, 1, 1], math.inf),
        ([1, 2, 1], [math.nan, math.nan, 1], math.inf),
    ],
)
def test_gradients_are_compared_by_the_median_over_steps(expected, found, change):
    def numbers(norms: list[float]) -> Numbers:
        rows = []
        for norm in norms:
            rows += [{"parameter": name, "grad_norm": norm} for name in "ab"]
        return Numbers([], 0.0, rows)

    (size, _) = check.differences(numbers(expected), numbers(found))["gradient"]
    assert size == pytest.approx(change)


def test_limits_are_8_times_the_largest_change_of_a_moved_run_and_at_least_least():
    def numbers(loss: float) -> Numbers:
        return Numbers([{"step": 1, "loss": loss, "grad_norm": 1.0}], 1.0, [])

    limits = check.rounding_limits([*map(numbers, (1.0, 1.25, 0.5, 1.0))], torch.float32)
    assert limits == check.LEAST[torch.float32] | {"loss": 4.0}
