"""tests/fuzz.py: clean draws pass, and a draw that fails is reported in its simplest form."""

import itertools
import json
import shutil
import subprocess
import sys

import fuzz
import pytest
from fuzz import CHOICES, MODEL, SIMPLEST
from rig import ROOT, copy_with


def test_a_seed_gives_the_same_draws_and_all_choices():
    draws, again, others = (list(itertools.islice(fuzz.draws(seed), 96)) for seed in (0, 0, 1))
    assert draws == again != others
    assert len({tuple(draw[name] for name in MODEL) for draw in draws}) == 32
    for name, choices in CHOICES.items():
        assert {draw[name] for draw in draws} == set(choices)


def test_a_clean_draw_passes_and_clips(pool, tmp_path):
    draw = SIMPLEST | {"mesh": "fsdp-1-3-1", "then": "hsdp-2-1-1", "clip": "adaptive"}
    fuzzer = fuzz.Fuzzer(pool, tmp_path)
    assert fuzzer.problems(draw) == []
    for rows in zip(*fuzzer.train(draw).parameters.values(), strict=True):
        assert any(row["clipped"] for row in rows)  # in each step


def test_a_draw_that_fails_is_shrunk_to_the_simplest():
    """Nothing is trained: a draw fails if it has grouped queries and tp on one of its meshes."""

    def fails(draw: dict) -> bool:
        has_tp = any(str(draw[name]).endswith("-2") for name in ("mesh", "then"))
        return has_tp and draw["n_kv_head"] == 2

    largest = {name: choices[-1] for name, choices in CHOICES.items()}
    smallest = fuzz.shrink(largest | {"mesh": "hsdp-1-2-2", "then": "fsdp-1-4-1"}, fails)
    assert fuzz.describe(smallest) == '{"n_kv_head": 2, "mesh": "single-1-1-2"}'
    assert SIMPLEST | json.loads(fuzz.describe(largest)) == largest


@pytest.mark.slow(proves="meshes, models and policies that nobody chose")
def test_twenty_draws_pass():
    assert fuzz.main(["20"]) == 0


@pytest.mark.slow(proves="random draws find a fault that was not made for them")
def test_a_planted_fault_is_found_and_shrunk(tmp_path):
    """With it, hsdp averages over the shards only, so all meshes but those with replicas pass."""
    old = "    fully_shard(model, mesh=mesh, mp_policy=policy)"
    new = "    mesh.ndim == 2 and model.set_gradient_divide_factor(mesh.shape[1])"
    project = copy_with(tmp_path / "project", ("dist.py", old, f"{old}\n{new}"))
    (project / "tests").mkdir()
    for name in ("fuzz.py", "rig.py"):
        shutil.copy(ROOT / "tests" / name, project / "tests")
    command = [sys.executable, "tests/fuzz.py", "60"]
    answer = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    *_, again = answer.stdout.splitlines()
    found = json.loads(again.removeprefix("python tests/fuzz.py --draw ").strip("'"))
    assert found in [{"mesh": "hsdp-2-1-1"}, {"then": "hsdp-2-1-1"}], answer.stdout
