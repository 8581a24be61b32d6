"""tools.check --fuzz: clean draws pass, and a draw that fails is reported in its smallest form."""

import functools
import itertools
import os
import re
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import pytest
from conftest import ROOT, copy_with
from test_lecture import copy

from tools.measuring import fuzz
from tools.measuring.fuzz import CHOICES, SIMPLEST

LARGEST = {name: choices[-1] for name, choices in CHOICES.items()}


@pytest.fixture
def fuzzer(pool, tmp_path):
    return fuzz.Fuzzer(pool, tmp_path)


def test_a_seed_always_gives_the_same_draws(fuzzer):
    draws = list(itertools.islice(fuzzer.draws(500, seed=0), 20))
    assert list(fuzzer.draws(20, seed=0)) == draws
    assert list(fuzzer.draws(20, seed=1)) != draws


def test_all_choices_are_drawn(fuzzer):
    draws = list(fuzzer.draws(500, seed=0))
    for name, choices in CHOICES.items():
        assert {draw[name] for draw in draws} == set(choices)
    models = [[draw[name] for name in fuzz.MODEL] for draw in draws]
    changes = sum(a != b for a, b in itertools.pairwise(models))
    assert changes < 500 / len(fuzz.MESHES)


def test_every_15_draws_have_muon_and_adamw_in_float32_and_fsdp_with_tp(fuzzer):
    for seed in range(20):
        draws = list(fuzzer.draws(15, seed))
        in_float32 = [draw for draw in draws if draw["dtype"] == "float32"]
        assert {draw["optimizer"] for draw in in_float32} == {"adamw", "muon"}
        assert {draw["clip"] for draw in in_float32} == {"norm", "adaptive"}
        assert any(draw["mesh"] in fuzz.MESHES["fsdp x tp"] for draw in in_float32)


@pytest.mark.parametrize("clip", fuzz.MODEL["clip"])
def test_draws_clip(fuzzer, clip):
    log, _ = fuzzer.train_reference(("clip", clip))
    clipped = [row["clipped"] for row in log.rows]
    assert clipped == [1] * fuzz.STEPS


@pytest.mark.parametrize(
    "draw",
    [
        {"mesh": "single-1-1-4", "vocab_size": 258},  # tp cannot split the vocabulary
        {"mesh": "single-1-1-4", "n_kv_head": 2},
        {"then": "single-1-1-4", "n_kv_head": 2},
    ],
)
def test_a_draw_that_train_py_would_refuse_is_not_possible(fuzzer, draw):
    assert not fuzzer.is_possible(SIMPLEST | draw)
    name = [*draw][-1]
    assert fuzzer.is_possible(SIMPLEST | draw | {name: SIMPLEST[name]})


# --------------------------------------------------------------------------------------------------
# Clean draws pass, and planted faults are found


@pytest.mark.parametrize(
    "draw",
    [
        {"mesh": "fsdp-1-2-2", "then": "hsdp-2-1-1", "optimizer": "muon"},
        {"mesh": "fsdp-1-3-1", "vocab_size": 258, "tied": False, "wrap": "block"},
    ],
)
def test_a_clean_draw_passes(pool, tmp_path, draw):
    found = fuzz.Fuzzer(pool, tmp_path).try_draw(SIMPLEST | draw)
    assert not found.problems
    if "optimizer" in draw:  # with Muon, one ulp raises the limit to 20 times its minimum
        assert 2e-5 < found.limits["one rank's gradients"] < 1e-2


FAULTS = {  # a change of the code, a draw, and what is reported
    "norms count one shard": (
        (
            "optim.py",
            "return math.prod(size for placement",
            "return 1 + 0 * math.prod(size for placement",
        ),
        "mesh=fsdp-1-2-1",
        ["one rank's grad_norm", "one rank's gradients"],
    ),
    "data continues a step late": (
        (
            "data.py",
            "    for step in steps:\n",
            "    for step in steps:\n        step += steps.start > 1\n",
        ),
        "mesh=ddp-2-1-1 then=ddp-2-1-1",
        ["one rank's loss"],
    ),
    "a mesh evaluates other sequences": (
        (
            "data.py",
            "        yield chosen[first :",
            "        first += dp_size > 1\n        yield chosen[first :",
        ),
        "mesh=ddp-2-1-1",
        ["one rank's val_loss"],
    ),
    "a mesh saves another weight": (
        (
            "checkpoint.py",
            "            boxes[cut_of(tensor)] =",
            "            size = torch.distributed.get_world_size()\n"
            "            if size > 1 and name == 'model.norm.weight':\n"
            "                values = 1.001 * values\n"
            "            boxes[cut_of(tensor)] =",
        ),
        "mesh=ddp-2-1-1",
        ["one rank's weights 0.001 "],
    ),
}


@pytest.mark.slow(proves="the command finds a fault in the code, from start to end")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(tmp_path, fault):
    change, draw, problems = FAULTS[fault]
    project = copy_with(tmp_path / "project", change)
    status, printed = run_command("--draw", draw, cwd=project)
    assert status == 1, printed
    for beginning in problems:
        assert re.search(f"^{beginning}", printed, re.M), printed


def test_the_smallest_draw_that_fails_is_found(capsys):
    """Nothing is trained: a draw fails if it has grouped queries and tp 2 on one of its meshes."""

    def try_draw(draw: dict) -> SimpleNamespace:
        has_tp = any(mesh.endswith("-2") for mesh in fuzz.meshes_of(draw))
        return SimpleNamespace(problems=["planted"] if has_tp and draw["n_kv_head"] < 4 else [])

    fuzzer = SimpleNamespace(try_draw=try_draw, is_possible=lambda draw: draw["n_kv_head"] > 1)
    fuzzer.shrink = functools.partial(fuzz.Fuzzer.shrink, fuzzer)
    draw = LARGEST | {"n_kv_head": 2, "mesh": "fsdp-1-4-1", "then": "hsdp-1-2-2"}
    assert fuzz.check_draws(fuzzer, [SIMPLEST, draw, SIMPLEST]) == 1
    *_, problem, command = capsys.readouterr().out.splitlines()
    assert problem == "planted"
    assert command == 'python -m tools.check --draw "n_kv_head=2 mesh=single-1-1-2"'
    assert fuzz.check_draws(fuzzer, [SIMPLEST] * 3) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("pass  3 draws, ")


def test_parse_draw_inverts_describe():
    for draw in (SIMPLEST, LARGEST, SIMPLEST | {"reshard_after_forward": False}):
        assert fuzz.parse_draw(fuzz.describe(draw)) == draw


# --------------------------------------------------------------------------------------------------
# The command


def run_command(*arguments: str, cwd=ROOT) -> tuple[int, str]:
    command = [sys.executable, "-m", "tools.check", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    return answer.returncode, answer.stdout + answer.stderr


@pytest.mark.slow(proves="the pool outlives a rank that ends its process")
def test_a_rank_pool_replaces_dead_processes():
    ranks = fuzz.RankPool()
    with pytest.raises(BrokenProcessPool):
        ranks(2, os._exit, 3)
    assert ranks(2, os.getenv, "RANK") == ["0", "1"]
    ranks.executor.shutdown()


@pytest.mark.slow(proves="meshes, models and policies that nobody chose")
def test_sixty_draws_pass():
    status, printed = run_command("--fuzz", "60")
    assert status == 0, printed


@pytest.mark.slow(proves="random draws find bugs that were not made for them")
@pytest.mark.parametrize("bug", [2, 5, 6, 7, 11])
def test_a_bug_of_the_lecture_is_found(tmp_path, bug):
    project = copy(ROOT, tmp_path / "project")
    patch = ROOT / f"docs/bugs/{bug}.patch"
    subprocess.run(["git", "apply", str(patch)], cwd=project, check=True)
    status, printed = run_command("--fuzz", "60", cwd=project)
    assert status == 1, printed
    assert re.search('^python -m tools.check --draw "', printed, re.M)
