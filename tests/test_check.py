"""tools/check.py: clean ranks pass, and each planted fault is named."""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import ROOT, flags
from test_cluster import box  # noqa: F401

import checkpoint
import dist
import model
import train
from runtime import memory
from tools import bench, check, cluster

SMALL = "--n_layer 3 --micro_batch_size 2 --dtype float32 --strategy ddp"


# --------------------------------------------------------------------------------------------------
# Faults, planted in the ranks


train_step, replicate = train.train_step, dist.replicate
load_state = checkpoint.load_state


def is_rehearsal() -> bool:
    return torch.distributed.get_backend() == "fake"


def sends_more_and_waits(forward, optimizer, batches, *rest):
    values = train_step(forward, optimizer, batches, *rest)
    if not is_rehearsal():
        torch.distributed.all_reduce(torch.ones(25))
        values["loss"].item()
    return values


def forgets_to_average(net, *rest):
    return replicate(net, *rest) if is_rehearsal() else net


def loads_no_moments(path, state):
    load_state(path, {"model": state["model"]})


def sees_the_future(q, k, v, mask):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def fails_alone(lab, result):
    torch.distributed.barrier()
    if lab.world.rank == 1:
        raise ValueError("planted")
    torch.distributed.barrier()


FAULTS = {
    "step": lambda: mock.patch.object(train, "train_step", sends_more_and_waits),
    "average": lambda: mock.patch.object(dist, "replicate", forgets_to_average),
    "load": lambda: mock.patch.object(checkpoint, "load_state", loads_no_moments),
    "attention": lambda: mock.patch.object(model, "causal_attention", sees_the_future),
    "alone": lambda: mock.patch.dict(check.CHECKS, matmul=fails_alone),
    "memory": lambda: mock.patch.object(memory, "device_memory", lambda *_: 10**5),
    "tf32": lambda: mock.patch.dict(os.environ, NVIDIA_TF32_OVERRIDE="1"),
}


def on_rank(argv: list[str], faults: list[str]) -> tuple[int, str]:
    """The status of tools.check in this rank, and what it printed."""
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(FAULTS[fault]())
        # Of the runs beside the planned one, none
        stack.enter_context(mock.patch.object(check, "STRATEGIES", {}))
        stack.enter_context(contextlib.redirect_stdout(printed))
        return check.main(argv), printed.getvalue()


@pytest.fixture
def checked(pool, tokens, tmp_path):
    """checked(2, "devices ...", "fault", ...): status, lines, and the checks by name."""

    def call(ranks: int, text: str, *faults: str) -> tuple[int, str, dict]:
        file = tmp_path / "check.json"
        text = f"{text} --json {file} --data {tokens} --out {tmp_path}/work"
        answers = pool(ranks, on_rank, flags(text), faults, timeout=120)
        assert [status for status, _ in answers] == [answers[0][0]] * ranks
        assert not "".join(printed for _, printed in answers[1:])
        found = json.loads(file.read_text())
        return *answers[0], {result["name"]: result for result in found["checks"]} | {"": found}

    return call


def test_clean_ranks_pass_and_the_file_says_what_was_not_checked(checked, tmp_path):
    status, printed, found = checked(2, f"devices attention parity cpu stop {SMALL}")
    assert status == 0 and printed.endswith("pass\n"), printed
    assert not list((tmp_path / "work").iterdir())
    facts = found.pop("")
    statuses = {name: result["status"] for name, result in found.items()}
    skipped = dict.fromkeys(("matmul", "links", "cpu", "stop"), "skip")
    assert statuses == skipped | dict.fromkeys(("devices", "attention", "parity planned"), "pass")
    for name, reason in {"links": "not asked for", "cpu": "it takes a GPU"}.items():
        assert found[name]["not_checked"] == reason
        assert f"skip  {name} " in printed
    assert [name.partition(" (")[0] for name in facts["ranks"]] == ["rank 0", "rank 1"]
    assert facts.keys() >= {"date", "commit", "code"} and facts["host"]["torch_version"]
    assert facts["command"].startswith("python -m tools.check ")

    figures = found["parity planned"]["figures"]
    for name in ("one rank's loss", "one rank's grad_norm"):
        assert 0 <= figures[name] <= 1e-5 == found["parity planned"]["limits"][name][1]
    assert figures["resumed loss"] == figures["resumed grad_norm"] == figures["host syncs"] == 0
    # The gradients of two blocks of the three
    weights = 320 * 32 + 2 * (3 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    assert figures["MB sent"] == 4 * weights / 1e6


def test_each_fault_of_a_run_is_a_problem_of_its_own(checked, tmp_path):
    faults = ("step", "average", "load")
    status, printed, found = checked(2, f"parity {SMALL}", *faults)
    assert status == 1
    (folder,) = (tmp_path / "work").iterdir()
    assert printed.endswith(f"FAIL: parity planned; see {folder}\n")
    problems = found["parity planned"]["problems"]
    for begin, end in (
        ("one rank's loss ", "is not between 0 and 1e-05"),
        ("one rank's grad_norm ", "is not between 0 and 1e-05"),
        ("beside the rehearsal +100 bytes of all_reduce over world", ""),
        ("beside the rehearsal -1", " bytes of all_reduce over dp_replicate"),
        ("host syncs 1 is not", ""),
        ("the host waits at test_check.py:", ""),
        ("resumed loss ", "is not between 0 and 0"),
    ):
        assert any(line.startswith(begin) and line.endswith(end) for line in problems), begin


def test_what_fails_on_one_rank_names_it_and_the_other_checks_go_on(checked):
    faults = ("alone", "attention", "tf32")
    status, printed, found = checked(2, "devices matmul attention links", *faults)
    assert status == 1 and "FAIL: devices, matmul, attention; see " in printed
    assert found["devices"]["problems"] == ["tf32 1 is not between 0 and 0"]
    (problem,) = found["matmul"]["problems"]
    assert problem.startswith("rank 1 (") and problem.endswith(", host 0): ValueError: planted")
    assert len(found["attention"]["problems"]) == 8  # y, dq, dk, dv, for both widths
    assert found["links"]["status"] == "pass"
    assert found["links"]["figures"]["dp_replicate all_reduce us"] > 0


def test_a_rank_that_cannot_hold_the_run_says_so(checked):
    status, _, found = checked(1, f"links parity {SMALL}".replace("ddp", "single"), "memory")
    assert status == 0
    assert found["links"]["not_checked"] == "it takes two ranks"
    said = found["parity planned"]["not_checked"]
    assert said.startswith("one rank's losses: one rank cannot hold the run: weights ")
    assert said.endswith("more than 80% of 0.0 GB")
    assert found["parity planned"]["figures"].keys() >= {"resumed loss", "host syncs"}


@pytest.mark.parametrize("losses, largest", [([2, 2], 1.0), ([2, 0.5], 0.5), ([1, 1], 0.5)])
def test_a_difference_of_either_sign_in_any_row_fails(losses, largest):
    """Of a run whose losses should be 2 and 1."""
    result = check.Check("parity")
    expected, found = (
        [{"loss": loss, "grad_norm": 1.0} for loss in each] for each in ([2, 1], losses)
    )
    check.compare(result, "one rank's", expected, found, (1e-5, 1e-5))
    assert result.figures == {"one rank's loss": largest, "one rank's grad_norm": 0.0}
    assert len(result.problems) == 1


# --------------------------------------------------------------------------------------------------
# What is slow


def measured(generator: random.Random, slow: dict[object, float], names=range(8)) -> dict:
    """Repeated measurements with a noise of a tenth, and of up to a half now and then."""
    found = {}
    for name in names:
        times = [1 + 0.1 * generator.random() + 0.5 * (generator.random() > 0.8) for _ in range(9)]
        found[name] = [slow.get(name, 1) * time for time in times]
    return found


def test_of_a_thousand_clean_measurements_none_is_slow():
    generator = random.Random(1)
    assert not any(bench.slow_ones(lambda: measured(generator, {})) for _ in range(1000))


@pytest.mark.parametrize("names", [range(2), range(3), range(8)])
def test_a_rank_that_is_always_slow_is_named_and_no_other(names):
    generator = random.Random(1)
    found = bench.slow_ones(lambda: measured(generator, {1: 2}, names))
    assert found == {1: pytest.approx(2, rel=0.1)}
    once = iter([{1: 2}, {}, {1: 2}])
    assert not bench.slow_ones(lambda: measured(generator, next(once), names))


@pytest.mark.parametrize("hosts, local_size", [(1, 8), (2, 4), (3, 2), (4, 3), (5, 1)])
def test_every_rank_meets_its_neighbours_once_and_one_at_a_time(hosts, local_size):
    size = hosts * local_size
    for between in (False, True):
        met = set()
        for pairs in bench.neighbours(hosts, local_size, between):
            ranks = [rank for pair in pairs for rank in pair]
            assert len(set(ranks)) == len(ranks)
            met |= {frozenset(pair) for pair in pairs}
        expected = set()
        for rank in range(size):
            if not between and rank % local_size:
                expected.add(frozenset((rank - 1, rank)))
            if between and hosts > 1:
                expected.add(frozenset((rank, (rank + local_size) % size)))
        assert met == expected


def named(slow: set[tuple[int, int]], ranks: int, local_size: int) -> list[str]:
    """What bench.slow_links says, with the transfers of `slow` twice as long."""

    def transfers(rounds, size, device):
        generator = random.Random(1)
        pairs = [pair for pairs in rounds for pair in pairs]
        pairs += [(b, a) for a, b in pairs]
        return measured(generator, dict.fromkeys(slow, 2), pairs)

    with mock.patch.object(bench, "transfers", transfers):
        names = [f"rank {rank}" for rank in range(ranks)]
        lines = bench.slow_links(names, local_size, 4, torch.device("cpu"))
    return [line.partition(",")[0] for line in lines]


def test_a_slow_link_is_named_and_a_slow_host_where_its_links_meet():
    assert not named(set(), 8, 2)
    assert named({(1, 0)}, 2, 1) == ["slow: the link from rank 1 to rank 0"]
    of_rank_5 = {(4, 5), (5, 4), (5, 6), (6, 5)}
    assert named(of_rank_5, 8, 8) == ["slow: all links of rank 5"]
    of_host_1 = {(0, 2), (2, 0), (2, 4), (4, 2), (1, 3), (3, 1), (3, 5), (5, 3)}
    assert named(of_host_1, 8, 2) == ["slow: all links of the host of rank 2"]
    assert named({(2, 4)}, 8, 2) == ["slow: the link from rank 2 to rank 4"]


@pytest.mark.slow
def test_twenty_clean_checks_name_no_rank_and_no_link(checked):
    for _ in range(20):
        status, printed, _ = checked(2, "matmul links")
        assert status == 0, printed


def check_hosts(folder: Path, tokens: Path, hosts: int, slow: dict[str, int]) -> dict:
    """What tools.check finds on hosts with one rank; of some, tc limits what they send or get."""
    file = folder / "check.json"
    folder.mkdir()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with cluster.hosts(hosts, "1gbit") as names:
        for end, number in slow.items():
            where = f"-n {names[number]} qdisc replace dev eth0"
            if end == "gets":
                switch = names[0].replace("host0", "switch")
                where = f"-n {switch} qdisc replace dev port{number}"
            cluster.ip(f"{where} root tbf rate 50mbit burst 256kb latency 50ms", tool="tc")
        argv = ["-m", "tools.check", "devices", "links", *flags(f"--data {tokens} --json {file}")]
        with contextlib.suppress(bench.RunFailed):  # its status, where a check fails
            cluster.run_on(names, 1, [*argv, f"--out={folder}"], folder / "job")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    found = json.loads(file.read_text())["checks"]
    shutil.rmtree(folder)
    return {result["name"]: result for result in found}


@pytest.mark.slow
def test_the_host_with_a_slow_link_is_named(box, tokens):  # noqa: F811
    found = check_hosts(box / "clean", tokens, 4, {})
    assert found["devices"]["figures"]["hosts"] == 4
    assert found["links"]["status"] == "pass", found["links"]
    found = check_hosts(box / "slow", tokens, 4, {"sends": 2, "gets": 2})
    (problem,) = found["links"]["problems"]
    assert problem.startswith("slow: all links of the host of rank 2 (") and "host 2)" in problem
    found = check_hosts(box / "oneway", tokens, 2, {"sends": 1})
    (problem,) = found["links"]["problems"]
    assert problem.startswith("slow: the link from rank 1 (") and " to rank 0 (" in problem


# --------------------------------------------------------------------------------------------------
# Without torchrun


def run_alone(arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.check", *arguments.split()]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_checks_on_cpus(tokens, tmp_path, ranks):
    file = tmp_path / "check.json"
    paths = f"--data {tokens} --out {tmp_path}/work --json {file}"
    answer = run_alone(f"--ranks {ranks} {paths} --max_steps 100 --n_layer 3 --seq_len 64")
    found = {result["name"]: result for result in json.loads(file.read_text())["checks"]}
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert not list((tmp_path / "work").iterdir())
    skipped = {name for name, result in found.items() if result["status"] == "skip"}
    meshes = {1: ("hsdp", "tp", "hsdp-tp"), 2: ("hsdp-tp",), 4: ()}[ranks]
    expected = {f"parity {mesh} {dtype}" for mesh in meshes for dtype in check.TOLERANCE}
    assert skipped == expected | {"cpu"} | ({"links"} if ranks == 1 else set())
    assert found["stop"]["figures"]["resumed loss"] == 0  # to the last bit


@pytest.mark.slow
def test_a_rank_that_dies_leaves_the_name_of_the_check(tokens, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, sys\n"
        "from tools import check\n"
        "dies = lambda lab, result: os._exit(3) if lab.world.rank else None\n"
        "check.CHECKS['matmul'] = dies\n"
        "sys.exit(check.main(sys.argv[1:]))\n"
    )
    file = tmp_path / "check.json"
    arguments = f"devices matmul links --json {file} --data {tokens} --out {tmp_path}"
    command = [*bench.TORCHRUN, "--standalone", "--nproc_per_node=2", str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run([*command, *flags(arguments)], env=environment, capture_output=True)
    assert answer.returncode == 1
    devices, matmul = json.loads(file.read_text())["checks"]
    assert devices["status"] == "pass"
    assert (matmul["name"], matmul["problems"]) == ("matmul", ["a rank ended in it"])


def test_help_lists_the_checks(capsys):
    with pytest.raises(SystemExit):
        check.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in check.CHECKS)
