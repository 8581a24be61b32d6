"""tools/check.py: clean ranks pass, and each planted fault is reported."""

import contextlib
import io
import json
import math
import subprocess
import time
from argparse import Namespace
from unittest import mock

import pytest
import torch
from conftest import ROOT, TORCHRUN, copy_with, flags, resolve

import dist
from tools import check
from tools.measuring import parity
from tools.rehearse import Communication

SMALL = "--n_layer 3 --micro_batch_size 2 --dtype float32 --strategy ddp"


def on_rank(argv: list[str]) -> tuple[int, str]:
    """Run tools.check on this rank; return its status and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        return check.main(argv), printed.getvalue()


def test_clean_ranks_pass(pool, tokens, tmp_path):
    file = tmp_path / "check.json"
    text = f"{SMALL} --json {file} --data {tokens} --out {tmp_path}/work"
    (status, printed), (_, quiet) = pool(2, on_rank, flags(text), timeout=120)
    found = json.loads(file.read_text())
    assert (status, quiet) == (0, ""), printed
    assert printed.startswith("pass  ") and found["status"] == "pass"
    assert not list((tmp_path / "work").iterdir())
    assert [name.partition(" (")[0] for name in found["ranks"]] == ["rank 0", "rank 1"]
    assert found["date"]
    assert found["host"]["torch_version"]
    assert found["command"].startswith("python -m tools.check ")

    figures = found["figures"]
    assert figures["on a host GB/s"] > 0
    # The limits are 8 times the effect of one ulp in the float32 weights.
    for name in parity.COLUMNS:
        assert parity.LEAST[torch.float32][name] <= found["limits"][f"one rank's {name}"] < 1e-4
    assert figures["resumed loss"] == figures["resumed grad_norm"] == figures["host syncs"] == 0
    # The profiled run has two of the three blocks.
    weights = 320 * 32 + 2 * (3 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert figures["MB handed to torch"] == 4 * weights / 1e6


# --------------------------------------------------------------------------------------------------
# Faults, planted in a copy of the project. Each one leaves the rehearsal alone, or does not show.

REAL = 'torch.distributed.get_backend() != "fake"'  # not in a rehearsal
MESH = "torch.distributed.get_world_size() > 1"  # not in the run on one rank
STEP = "    update, rows = state.optimizer.step("
MLP = "return self.down(F.silu(self.gate(x)) * self.up(x))"
ONE = "--n_layer 3 --micro_batch_size 1 --strategy single --dtype"
NORM = "F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)"
SCALE = "decoder.blocks[0].attention.q.weight.register_hook(lambda grad: {} * grad)"

# Name -> ranks, flags, changes of the code, beginnings and ends of problems
FAULTS = {
    "a step sends more and waits": (
        2,
        SMALL,
        [
            (
                "train.py",
                STEP,
                f"    if {REAL}:\n        torch.distributed.all_reduce(torch.ones(25))\n"
                f"        loss.item()\n{STEP}",
            )
        ],
        [
            ("+100 bytes of all_reduce over dp_replicate", " are not in the rehearsal"),
            ("host syncs 1 is not", ""),
            ("the host waits at train.py:", ""),
        ],
    ),
    "ddp does not average": (
        2,
        SMALL,
        [
            (
                "dist.py",
                '    if run.strategy == "ddp" and run.tp == 1:',
                f'    if run.strategy == "ddp" and run.tp == 1 and not {REAL}:',
            )
        ],
        [
            ("one rank's loss ", ""),
            ("one rank's grad_norm ", "is not between 0 and 1e-05"),
            ("-1", " bytes of all_reduce over dp_replicate are not in the rehearsal"),
        ],
    ),
    "a rank computes other norms": (
        2,
        SMALL,
        [
            (
                "model.py",
                f"return {NORM}",
                f"return {NORM} * (1 + 1e-3 * ({REAL} and torch.distributed.get_rank() == 1))",
            )
        ],
        [("the first output that differs in step 1 is from blocks.0.attention_norm", "")],
    ),
    "moments are not loaded": (
        1,
        f"{ONE} float32",
        [
            (
                "checkpoint.py",
                "    for name, tensor in flatten(state):\n        reader.fill",
                "    for name, tensor in flatten({'model': state['model']}):\n        reader.fill",
            )
        ],
        [("resumed loss ", "")],
    ),
    "weights only decay": (
        1,
        f"{ONE} bfloat16",
        [
            (
                "optim.py",
                "lr=update.lr,\n            weight_decay",
                "lr=1e-9,\n            weight_decay",
            )
        ],
        [
            ("loss, second half", ""),
            ("no update besides weight decay: 20 parameters", ""),
        ],
    ),
    "mlps are dead": (
        1,
        f"{ONE} float32",
        [("model.py", MLP, f"return 0 * ({MLP.removeprefix('return ')})")],
        [
            ("no gradient: 8 parameters, such as ", ""),
            ("no update besides weight decay: 8 parameters, such as ", ""),
        ],
    ),
    "a gradient is 1% too large on a mesh": (
        2,
        SMALL,
        [
            (
                "train.py",
                '    tensors = {"model": {name',
                f'    if {MESH}:\n        {SCALE.format(1.01)}\n    tensors = {{"model": {{name',
            )
        ],
        [("one rank's gradients 0.01 is not between 0 and ", ": blocks.0.attention.q.weight")],
    ),
    "a gradient in bfloat16 is 5% too large on a mesh": (
        2,
        SMALL.replace("float32", "bfloat16"),
        [
            (
                "train.py",
                '    tensors = {"model": {name',
                f'    if {MESH}:\n        {SCALE.format(1.05)}\n    tensors = {{"model": {{name',
            )
        ],
        [("one rank's gradients 0.05 is not between 0 and 0.01", ": blocks.0.attention.q.weight")],
    ),
    "the last micro-batch has another weight": (
        2,
        SMALL,
        [
            (
                "train.py",
                "micro_loss.backward()  #",
                f"micro_loss = micro_loss * (1.5 if micro_step == n - 1 > 0 and {MESH} else 1)\n"
                "            micro_loss.backward()  #",
            )
        ],
        [("one rank's loss ", ""), ("one rank's gradients ", "")],
    ),
    "replicas are not reduced": (
        2,
        SMALL.replace("ddp", "hsdp --dp_shard 1"),
        [
            (
                "dist.py",
                'axes = mesh["dp_shard"] if run.strategy == "fsdp"',
                f'axes = mesh["dp_shard"] if run.strategy == "fsdp" or {REAL}',
            )
        ],
        [("one rank's grad_norm ", ""), ("one rank's gradients ", "")],
    ),
    "gradients are summed in bfloat16": (
        2,
        SMALL.replace("float32 --strategy ddp", "bfloat16 --strategy fsdp"),
        [("dist.py", "reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16")],
        [("reduce_scatter over dp_shard sums in bfloat16: use float32", "")],
    ),
    "one rank finds a slow link": (
        2,
        SMALL,
        [
            (
                "tools/check.py",
                "        parity(ranks, check)\n    for rank",
                "        if ranks.world.rank == 1:\n            check.problems.append('planted')\n"
                "    for rank",
            )
        ],
        [("rank 1 (", "): planted")],
    ),
}


@pytest.mark.slow(proves="the command finds a fault in the code, from start to end")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(tokens, tmp_path, fault):
    ranks, text, changes, expected = FAULTS[fault]
    folder, file = copy_with(tmp_path / "project", *changes), tmp_path / "check.json"
    words = flags(f"{text} --json {file} --data {tokens} --out {tmp_path}/work")
    command = [*TORCHRUN, "--standalone", f"--nproc_per_node={ranks}", "-m", "tools.check", *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 1 and answer.stdout.startswith("FAIL  "), answer.stderr
    problems = json.loads(file.read_text())["problems"]
    for begin, end in [*expected, ("see ", "")]:
        assert any(line.startswith(begin) and line.endswith(end) for line in problems), problems


@pytest.mark.slow(proves="a model with random layers is no false alarm")
def test_a_fork_with_dropout_passes(tokens, tmp_path):
    """tools.check turns dropout off: it would differ from mesh to mesh."""
    dropped = f"return F.dropout({MLP.removeprefix('return ')}, 0.5, self.training)"
    folder = copy_with(tmp_path / "project", ("model.py", MLP, dropped))
    words = flags(f"{SMALL} --data {tokens} --out {tmp_path}/work")
    command = [*TORCHRUN, "--standalone", "--nproc_per_node=2", "-m", "tools.check", *words]
    answer = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout


# --------------------------------------------------------------------------------------------------
# What a profile and a log must show

SENT = Communication("dp_shard", "reduce_scatter", "backward", 2, 400)
COMMUNICATED = {"kind": "reduce_scatter", "axis": "dp_shard", "calls": 2, "bytes": 400}
PROFILES = {  # host syncs, dtypes and bytes of what was sent, problems
    "as rehearsed": ({}, ["float32"], 400, []),
    "a sync": (
        {"train.py:9": 2},
        ["float32"],
        400,
        ["host syncs 2 is not between 0 and 0", "the host waits at train.py:9"],
    ),
    "more bytes": (
        {},
        ["float32"],
        500,
        ["+100 bytes of reduce_scatter over dp_shard are not in the rehearsal"],
    ),
    "fewer bytes": (
        {},
        ["float32"],
        300,
        ["-100 bytes of reduce_scatter over dp_shard are not in the rehearsal"],
    ),
    "another dtype": (
        {},
        ["bfloat16", "float32"],
        400,
        ["reduce_scatter over dp_shard sums in bfloat16: use float32"],
    ),
}


@pytest.mark.parametrize("case", PROFILES)
def test_a_profiled_step_does_what_was_rehearsed(case):
    syncs, dtypes, size, problems = PROFILES[case]
    communicated = [COMMUNICATED | {"dtypes": dtypes, "bytes": size}]
    # Activations may be summed over tp in bfloat16.
    over_tp = {"kind": "all_reduce", "axis": "tp", "calls": 1, "bytes": 8, "dtypes": ["bfloat16"]}
    found = parity.Check()
    sent = [SENT, Communication("tp", "all_reduce", "forward", 1, 8)]
    profile = {"host_syncs": syncs, "communicated": [*communicated, over_tp]}
    check.check_profile(found, profile, sent)
    assert found.problems == problems
    assert found.figures["MB handed to torch"] == (size + 8) / 1e6


LEARNS = {"grad_norm": 1.0, "update_norm": 1.0, "weight_norm": 1.0}
LEARNING = {  # losses, what changes in the rows of parameter b, beginnings of the problems
    "both learn": ([4, 4, 3, 3], {}, []),
    "the loss stays": ([4, 4, 4, 4], {}, ["loss, second half / first 1 is not"]),
    "no gradient": ([4, 4, 3, 3], {"grad_norm": 0.0}, ["no gradient: 1 parameters, such as b"]),
    "only decay": (
        [4, 4, 3, 3],
        {"update_norm": 1e-5},
        ["no update besides weight decay: 1 parameters, such as b"],
    ),
}


@pytest.mark.parametrize("case", LEARNING)
def test_each_parameter_must_learn(case):
    losses, change, problems = LEARNING[case]
    of_parameters = []
    for step in range(1, 5):
        late = change if step > 1 else {}  # a gradient of the first step may be 0
        of_parameters += [{"step": step, "parameter": "a", **LEARNS}]
        of_parameters += [{"step": step, "parameter": "b", **LEARNS, **change, **late}]
    found = parity.Check()
    run = resolve("--lr 1e-3 --weight_decay 0.1")
    log = parity.RunLog([{"loss": loss} for loss in losses], of_parameters, 0.0, {})
    check.check_learning(found, log, run)
    assert len(found.problems) == len(problems)
    assert all(map(str.startswith, found.problems, problems)), found.problems


@pytest.mark.parametrize(
    "value, most", [(math.nan, 1), (-1, 1), (2, 1), (1, math.nan), (1, math.inf)]
)
def test_a_figure_outside_its_limits_is_a_problem(value, most):
    result = parity.Check()
    result.limit("figure", 1, 1)
    assert not result.problems
    result.limit("figure", value, most)
    assert len(result.problems) == 1


@pytest.mark.parametrize(
    "losses, largest",
    [([2, 2], 1.0), ([2, 0.5], 0.5), ([1, 1], 0.5), ([2, 0], 1.0), ([None, 1], math.inf)],
)
def test_a_difference_of_either_sign_in_any_row_fails(tmp_path, losses, largest):
    """The losses should be 2 and 1. A log contains null in place of nan."""
    result = parity.Check()
    expected = [{"loss": loss, "grad_norm": 0.0} for loss in (2, 1)]
    lines = [json.dumps({"step": 1, "loss": loss, "grad_norm": 0.0}) for loss in losses]
    lines.append(json.dumps({"step": 1, "val_loss": 3.0}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found, _, val_loss = parity.read_logs(tmp_path)
    assert val_loss == 3
    parity.compare(result, "one rank's", expected, found, {"loss": 1e-5, "grad_norm": 1e-5})
    assert result.figures == {"one rank's loss": largest, "one rank's grad_norm": 0.0}
    assert len(result.problems) == 1


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
    def log(norms: list[float]) -> parity.RunLog:
        rows = [{"parameter": name, "grad_norm": norm} for norm in norms for name in "ab"]
        return parity.RunLog([], rows, 0.0, {})

    changes = parity.gradient_changes(log(expected), log(found))
    assert changes == {name: pytest.approx(change) for name in "ab"}


@pytest.mark.parametrize("hosts, local_size, count", [(1, 4, 4), (64, 8, 24), (513, 8, 32)])
def test_links_are_timed_in_few_rounds(hosts, local_size, count):
    """Each link is timed, and no two links of a host at the same time."""
    size = hosts * local_size
    kinds = check.rounds_of_links(size, local_size)
    assert kinds.keys() == ({"on a host", "across hosts"} if hosts > 1 else {"on a host"})
    rounds = [pairs for found in kinds.values() for pairs in found]
    assert len(rounds) == count
    found = {pair for pairs in rounds for pair in pairs if pair[0] != pair[1]}
    assert len(found) == size * len(kinds)
    for pairs in rounds:
        busy = [host for pair in pairs for host in {rank // local_size for rank in pair}]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize(
    "seconds, slow",
    [
        ([1, 1, 1, 1], {}),
        ([1, 1, 1.3, 1.4], {}),
        ([1, 1, 1, 1.5], {3: 1.5}),
        ([2, 1, 1, 2, 2], {0: 2, 3: 2, 4: 2}),  # one slow host slows many links
    ],
)
def test_a_link_is_slow_beside_the_faster_quarter(seconds, slow):
    assert check.slow_links(dict(enumerate(seconds))) == slow


def find_slow_links(local_size: int, slow: set[tuple[int, int]]) -> list[str]:
    """Time the links of hosts of `local_size` ranks, some slowed down; return the problems."""
    dist.start("cpu")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def transfer_late(operations) -> list:
        (link,) = {
            (one.peer, rank) if one.op is torch.distributed.irecv else (rank, one.peer)
            for one in operations
        }
        works = transfer(operations)
        time.sleep(0.01 * (4 if link in slow and link[1] == rank else 1))
        return works

    transfer = torch.distributed.batch_isend_irecv
    ranks = Namespace(names=[f"rank {number}" for number in range(size)])
    ranks.world = Namespace(size=size, local_size=local_size, device=torch.device("cpu"))
    found = parity.Check()
    with mock.patch.object(torch.distributed, "batch_isend_irecv", transfer_late):
        check.links(ranks, found)
    assert found.figures.keys() >= {"across hosts GB/s"}
    return found.problems


@pytest.mark.slow(proves="it depends on times")
def test_only_a_slow_link_between_hosts_is_reported(pool):
    """There are two hosts of two ranks. Within a host of CPUs, a link is memory that all share."""
    for lines in pool(4, find_slow_links, 2, {(3, 2), (1, 3)}):
        assert [line.partition(" takes ")[0] for line in lines] == [
            "slow: the link from rank 1 to rank 3"
        ]


@pytest.mark.slow(proves="four ranks and the default tolerances")
def test_the_check_passes_under_torchrun(tokens, tmp_path):
    file = tmp_path / "check.json"
    paths = f"--data {tokens} --out {tmp_path}/work --json {file}"
    command = [*TORCHRUN, "--standalone", "--nproc_per_node=4", "-m", "tools.check"]
    command += f"{paths} --max_steps 100 --n_layer 3 --seq_len 64".split()
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert json.loads(file.read_text())["status"] == "pass"
    assert not list((tmp_path / "work").iterdir())
