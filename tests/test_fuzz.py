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

LARGEST = {name: choices[-1] for name, choices in CHOICES.items()}


def drawn(count: int, seed: int = 0) -> list[dict]:
    return list(itertools.islice(fuzz.draws(seed), count))


def test_a_seed_gives_the_same_draws_and_all_choices():
    draws = drawn(96)
    assert drawn(20) == draws[:20] != drawn(20, seed=1)
    assert len({tuple(draw[name] for name in MODEL) for draw in draws}) == 32
    for name, choices in CHOICES.items():
        assert {draw[name] for draw in draws} == set(choices)


@pytest.mark.parametrize(
    "draw",
    [
        {"mesh": "fsdp-1-2-2", "then": "hsdp-2-1-1", "optimizer": "muon"},
        {"mesh": "fsdp-1-3-1", "model": "tinyllama-1.1b", "clip": "adaptive", "wrap": "block"},
    ],
)
def test_a_clean_draw_passes_and_clips(pool, tmp_path, draw):
    fuzzer = fuzz.Fuzzer(pool, tmp_path)
    assert fuzzer.problems(SIMPLEST | draw) == []
    for rows in zip(*fuzzer.train(SIMPLEST | draw).parameters.values(), strict=True):
        assert any(row["clipped"] for row in rows)  # in each step


def test_a_draw_that_fails_is_shrunk_to_the_simplest():
    """Nothing is trained: a draw fails if it has grouped queries and tp on one of its meshes."""

    def fails(draw: dict) -> bool:
        has_tp = any(str(draw[name]).endswith("-2") for name in ("mesh", "then"))
        return has_tp and draw["n_kv_head"] == 2

    draw = LARGEST | {"mesh": "hsdp-1-2-2", "then": "fsdp-1-4-1"}
    smallest = fuzz.shrink(draw, fails)
    assert fuzz.describe(smallest) == '{"n_kv_head": 2, "mesh": "single-1-1-2"}'
    for each in (smallest, draw, SIMPLEST):
        assert SIMPLEST | json.loads(fuzz.describe(each)) == each


@pytest.mark.slow(proves="meshes, models and policies that nobody chose")
def test_sixty_draws_pass():
    assert fuzz.main(["60"]) == 0


FAULTS = {  # a change of the code, and the draws of which one is the simplest that shows it
    "hsdp averages over too few ranks": (
        *("dist.py", "    fully_shard(model, mesh=mesh, mp_policy=policy)"),
        "    fully_shard(model, mesh=mesh, mp_policy=policy)\n"
        "    if mesh.ndim == 2:\n        model.set_gradient_divide_factor(mesh.shape[1])",
        [{"mesh": "hsdp-2-1-1"}, {"then": "hsdp-2-1-1"}],
    ),
    "a checkpoint places uneven shards as if they were even": (
        *("checkpoint.py", "    return tuple(chunk.offsets)"),
        "    first, *rest = chunk.offsets\n    n = tensor.device_mesh.size()\n"
        "    return (first * (len(tensor) // n) // -(-len(tensor) // n), *rest)",
        [{"then": "fsdp-1-3-1"}, {"then": "single-1-1-1", "mesh": "fsdp-1-3-1"}],
    ),
}


@pytest.mark.slow(proves="random draws find faults that were not made for them")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_shrunk(tmp_path, fault):
    *change, simplest = FAULTS[fault]
    project = copy_with(tmp_path / "project", tuple(change))
    (project / "tests/core").mkdir(parents=True)
    for name in ("fuzz.py", "core/__init__.py", "core/conftest.py"):
        shutil.copy(ROOT / "tests" / name, project / "tests" / name)
    command = [sys.executable, "tests/fuzz.py", "60"]
    answer = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    *_, again = answer.stdout.splitlines()
    found = json.loads(again.removeprefix("python tests/fuzz.py --draw ").strip("'"))
    assert found in simplest, answer.stdout
