"""tools/check.py: clean ranks pass, and each planted fault is reported."""

import contextlib
import io
import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, flags
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import checkpoint
import dist
import model
import optim
import train
from tools import check, common
from tools.measuring import parity
from tools.measuring.harness import TORCHRUN

SMALL = "--n_layer 3 --micro_batch_size 2 --dtype float32 --strategy ddp"

# The original functions, which the planted faults call
train_step, replicate = train.train_step, dist.replicate
build, gradient_sync = train.build, dist.gradient_sync
load_state = checkpoint.load_state
run_mlp, empty_model = model.MLP.forward, train.empty_model
run_norm = model.RMSNorm.forward


def is_rehearsal() -> bool:
    return torch.distributed.get_backend() == "fake"


def sends_more_and_waits(*arguments):
    columns, table = train_step(*arguments)
    if not is_rehearsal():
        torch.distributed.all_reduce(torch.ones(25))
        columns["mean"]["loss"].item()
    return columns, table


def forgets_to_average(net, *rest):
    return replicate(net, *rest) if is_rehearsal() else net


def scales_norms(norm, x):
    """Scale the norms on rank 1 of the mesh."""
    if is_rehearsal() or torch.distributed.get_rank() == 0:
        return run_norm(norm, x)
    return 1.001 * run_norm(norm, x)


def loads_no_moments(path, state, **options):
    load_state(path, {"model": state["model"]}, **options)


def only_decays(optimizer, names, update):
    for name in names:
        optimizer.parameters[name].detach().mul_(1 - update.lr * update.weight_decay)


def is_dead(mlp, x):
    return 0 * run_mlp(mlp, x)


def drops_in_training(mlp, x):
    return F.dropout(run_mlp(mlp, x), 0.5, mlp.training)


def freezes_the_embedding(run):
    net = empty_model(run)
    net.embed.weight.requires_grad_(False)
    return net


def scales_a_gradient(run, mesh, *rest, **options):
    """Scale a gradient by 1.05 (bfloat16) or 1.01 (float32), except in one-rank reference runs."""
    state = build(run, mesh, *rest, **options)
    if not (is_rehearsal() or Path(run.out).name.startswith("alone on rank")):
        scale = 1.05 if run.dtype == "bfloat16" else 1.01
        state.decoder.blocks[0].attention.q.weight.register_hook(lambda grad: scale * grad)
    return state


def weights_the_last_micro_batch(state, batches, run):
    factors = [1.0] * run.grad_accum_steps
    if run.grad_accum_steps > 1 and torch.distributed.get_world_size() > 1:
        factors[-1] = 1.5
    with state.model.register_forward_hook(lambda net, inputs, loss: factors.pop(0) * loss):
        return train_step(state, batches, run)


@contextlib.contextmanager
def reduces_no_replicas(net, mode, is_last):
    with gradient_sync(net, mode, is_last):
        if isinstance(net, FSDPModule):
            net.set_requires_all_reduce(False)
        yield


def reduces_in_bfloat16(**options):
    return MixedPrecisionPolicy(**options | {"reduce_dtype": torch.bfloat16})


def finds_alone(ranks, check):
    if torch.distributed.get_rank() == 1:
        check.problems.append("planted")


FAULTS = {
    "step": lambda: mock.patch.object(train, "train_step", sends_more_and_waits),
    "average": lambda: mock.patch.object(dist, "replicate", forgets_to_average),
    "norm": lambda: mock.patch.object(model.RMSNorm, "forward", scales_norms),
    "load": lambda: mock.patch.object(checkpoint, "load_state", loads_no_moments),
    "update": lambda: mock.patch.object(optim.AdamW, "update", only_decays),
    "block": lambda: mock.patch.object(model.MLP, "forward", is_dead),
    "frozen": lambda: mock.patch.object(train, "empty_model", freezes_the_embedding),
    "dropout": lambda: mock.patch.object(model.MLP, "forward", drops_in_training),
    "gradient": lambda: mock.patch.object(common, "build", scales_a_gradient),
    "weight": lambda: mock.patch.object(train, "train_step", weights_the_last_micro_batch),
    "replicas": lambda: mock.patch.object(dist, "gradient_sync", reduces_no_replicas),
    "dtype": lambda: mock.patch.object(dist, "MixedPrecisionPolicy", reduces_in_bfloat16),
    "alone": lambda: mock.patch.object(check, "parity", finds_alone),
}


def on_rank(argv: list[str], faults: list[str]) -> tuple[int, str]:
    """Run tools.check with faults on this rank; return its status and what it printed."""
    printed = io.StringIO()
    short = f"{check.SHORT} --max_steps 6 --warmup_steps 1"
    with mock.patch.object(check, "SHORT", short), contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(FAULTS[fault]())
        stack.enter_context(contextlib.redirect_stdout(printed))
        return check.main(argv), printed.getvalue()


@pytest.fixture
def checked(pool, tokens, tmp_path):
    """checked(2, "--strategy ...", "fault", ...): status, lines, and the JSON object."""

    def call(ranks: int, text: str, *faults: str) -> tuple[int, str, dict]:
        file = tmp_path / "check.json"
        text = f"{text} --json {file} --data {tokens} --out {tmp_path}/work"
        answers = pool(ranks, on_rank, flags(text), faults, timeout=120)
        assert [status for status, _ in answers] == [answers[0][0]] * ranks
        assert not "".join(printed for _, printed in answers[1:])
        return *answers[0], json.loads(file.read_text())

    return call


def test_clean_ranks_pass(checked, tmp_path):
    status, printed, found = checked(2, SMALL, "dropout")  # which tools.check turns off
    assert status == 0, printed
    assert printed.startswith("pass  ") and found["status"] == "pass"
    assert not list((tmp_path / "work").iterdir())
    assert [name.partition(" (")[0] for name in found["ranks"]] == ["rank 0", "rank 1"]
    assert found.keys() >= {"date", "code"}
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


def assert_among(problems: list[str], *expected: tuple[str, str]) -> None:
    """Check that each (beginning, end) is the beginning and end of one of the problems."""
    for begin, end in expected:
        assert any(line.startswith(begin) and line.endswith(end) for line in problems), begin


def test_each_fault_is_reported_as_a_separate_problem(checked, tmp_path):
    status, printed, found = checked(2, SMALL, "step", "average", "norm")
    assert status == 1
    assert printed.startswith("FAIL  ")
    (folder,) = (tmp_path / "work").iterdir()
    assert_among(
        found["problems"],
        (f"see {folder}", ""),
        ("+100 bytes of all_reduce over world", " are not in the rehearsal"),
        ("host syncs 1 is not", ""),
        ("the host waits at test_check.py:", ""),
        # From ranks that do not average
        ("one rank's loss ", ""),
        ("one rank's grad_norm ", "is not between 0 and 1e-05"),
        ("the first output that differs in step 1 is from blocks.0.attention_norm", ""),
        ("-1", " bytes of all_reduce over dp_replicate are not in the rehearsal"),
        (f"cannot write {folder}/resumed/checkpoints/step-00000003: embed", "check these devices"),
    )


def test_a_problem_found_by_one_rank_names_the_rank(checked):
    status, _, found = checked(2, SMALL, "alone")
    assert status == 1
    assert found["problems"][0].startswith("rank 1 (")
    assert found["problems"][0].endswith("): planted")


def test_lost_gradients_and_a_wrong_loss_both_fail(checked):
    """A gradient norm of 0 must not cause a division by zero."""
    mesh = SMALL.replace("ddp", "hsdp --dp_shard 1")
    status, _, found = checked(2, mesh, "weight", "replicas")
    assert status == 1
    assert found["figures"]["one rank's loss"] > 0.25  # 0.07 without the weight
    for name in ("one rank's grad_norm", "one rank's gradients"):
        assert found["figures"][name] == 1
    assert found["figures"]["resumed grad_norm"] == 0
    assert_among(found["problems"], ("no gradient: 20 parameters, such as ", ""))


def test_a_sum_in_bfloat16_fails_although_all_numbers_are_within_their_limits(checked):
    mesh = "--n_layer 3 --micro_batch_size 2 --dtype bfloat16 --strategy fsdp"
    status, _, found = checked(2, mesh, "dtype")
    assert status == 1
    problem, folder = found["problems"]
    assert problem == "reduce_scatter over dp_shard sums in bfloat16: use float32"


ON_ONE_RANK = {
    "bfloat16 update gradient": [
        ("loss, second half", ""),
        ("no update besides weight decay: 20 parameters", ""),
        ("one rank's gradients 0.05 is not between 0 and 0.01", ": blocks.0.attention.q.weight"),
    ],
    "float32 block frozen load gradient": [
        ("no gradient: 9 parameters, such as ", ""),
        ("no update besides weight decay: 9 parameters, such as ", ""),
        ("resumed loss ", ""),
        ("one rank's gradients 0.01 is not between 0 and 1e-05", ": blocks.0.attention.q.weight"),
    ],
}


@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_dead_models_and_a_scaled_gradient_fail(checked, case):
    """Two dead models agree with each other, and AdamW undoes a factor, yet the check fails."""
    dtype, *faults = case.split()
    mesh = f"--n_layer 3 --micro_batch_size 1 --dtype {dtype} --strategy single"
    status, _, found = checked(1, mesh, *faults)
    assert status == 1
    assert_among(found["problems"], *ON_ONE_RANK[case])


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
    world = SimpleNamespace(size=hosts * local_size, local_size=local_size)
    with mock.patch.object(check, "time_links") as time_links:
        check.links(SimpleNamespace(world=world), parity.Check())
    rounds = [pairs for call in time_links.call_args_list for pairs in call.args[3]]
    assert len(rounds) == count
    found = {pair for pairs in rounds for pair in pairs if pair[0] != pair[1]}
    assert len(found) == world.size * time_links.call_count
    for pairs in rounds:
        busy = [host for pair in pairs for host in {rank // local_size for rank in pair}]
        assert len(busy) == len(set(busy))


@pytest.mark.parametrize(
    "device, kind, second, slow",
    [
        ("cpu", "across hosts", [1, 2], 1),
        ("cpu", "across hosts", [1, 1], 0),
        ("cpu", "across hosts", [2, 1], 0),
        ("cuda", "on a host", [1, 2], 1),
        ("cpu", "on a host", [1, 2], 0),  # other work on the cores
    ],
)
def test_a_link_is_slow_only_if_a_second_measurement_agrees(device, kind, second, slow):
    world = SimpleNamespace(device=torch.device(device))
    ranks = SimpleNamespace(names=["rank 0", "rank 1"], world=world)
    pairs = [(0, 1), (1, 0)]
    times = [dict(zip(pairs, seconds)) for seconds in ([1, 2], second)]
    result = parity.Check()
    with mock.patch.object(check, "best_times", side_effect=times):
        check.time_links(ranks, result, kind, pairs)
    expected = ["slow: the link from rank 1 to rank 0 takes 2.0 x as long as the faster links"]
    assert result.problems == slow * expected


@pytest.mark.slow
def test_the_check_passes_under_torchrun(tokens, tmp_path):
    file = tmp_path / "check.json"
    paths = f"--data {tokens} --out {tmp_path}/work --json {file}"
    command = [*TORCHRUN, "--standalone", "--nproc_per_node=4", "-m", "tools.check"]
    command += f"{paths} --max_steps 100 --n_layer 3 --seq_len 64".split()
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert json.loads(file.read_text())["status"] == "pass"
    assert not list((tmp_path / "work").iterdir())
