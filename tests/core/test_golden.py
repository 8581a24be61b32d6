"""The numbers of runs are those in golden.json, on every mesh.

Comparisons of one mesh with another cannot see a fault that all meshes share, nor a seed that is
ignored. golden.json has, for each set of flags in NUMBERS, the losses and gradient norms of one
rank and, for two seeds, the sum and norm of each initial weight, and a hash of the sequences that
200 steps read. After a change that is meant to change these values,

    python -m tests.core.test_golden

writes them again, and the commit says why. Bits of random numbers differ between CPUs, so values
are compared with tolerances.
"""

import hashlib
import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from rig import POOL, SMALL, full_tensors, read_rows, run_command, write_tokens

import data

from .test_numbers import checkpoint_in

FILE = Path(__file__).with_name("golden.json")
BASE = f"{SMALL} --max_steps 6 --global_batch_size 12 --lr 1e-2 --max_grad_norm 1.8"

# Flags that change the numbers
NUMBERS = {
    "plain": "",
    "another seed": "--seed 1",
    "bfloat16": "--dtype bfloat16",
    # No number of ranks above 1 divides the rows of these weights, except those of the embedding.
    "uneven": "--n_head 3 --n_kv_head 1 --d_model 42 --d_ff 53",
    "untied": "--model tinyllama-1.1b",  # SMALL replaces all its sizes, but not its separate head
    "adaptive": "--clip adaptive --max_grad_norm_ratio 1.05",
}
# Relative; the losses and norms of bfloat16 also depend on how a mesh adds gradients
TOLERANCES = dict.fromkeys(NUMBERS, {"loss": 1e-5, "grad_norm": 1e-4})
TOLERANCES["bfloat16"] = {"loss": 2e-3, "grad_norm": 2e-2}


FSDP = "--strategy fsdp --wrap block"
HSDP = "--strategy hsdp --wrap block --dp_shard 2"
ACCUMULATE = "--micro_batch_size 1"
KEEP = "--reshard_after_forward false --activation_checkpointing selective"
# ranks, flags of the mesh and its policy, which change no number, and a key of NUMBERS
ROWS = {
    "single": (1, "", "plain"),
    "ddp 4": (4, f"--strategy ddp {ACCUMULATE} --grad_sync micro_batch", "plain"),
    "fsdp 2, accumulated": (2, f"{FSDP} {ACCUMULATE} --grad_sync batch", "plain"),
    "hsdp 2x2, shard": (4, f"{HSDP} {ACCUMULATE} --grad_sync shard", "plain"),
    "hsdp 2x2, not resharded": (4, f"{HSDP} {KEEP}", "plain"),
    "seed 1": (1, "", "another seed"),
    "bfloat16": (1, "", "bfloat16"),
    "bfloat16, fsdp 2": (2, FSDP, "bfloat16"),
    "uneven, fsdp 3": (3, FSDP, "uneven"),
    "untied, fsdp 2": (2, FSDP, "untied"),
    "adaptive, fsdp 2": (2, FSDP, "adaptive"),
}
SEEDS = (0, 1)

# --------------------------------------------------------------------------------------------------
# What the file has


def run(pool, tokens: Path, out: Path, ranks: int, flags: str) -> Path:
    """Run train.py on ranks of the pool; return its folder."""
    argv = f"{BASE} {flags} --data {tokens} --out {out}".split()
    for status, _, error in pool(ranks, run_command, argv):
        assert status == 0, error
    return out


def numbers_of(out: Path) -> dict[str, list[float]]:
    """The losses and gradient norms of a run, and the validation loss at its end."""
    rows = read_rows(out / "metrics.jsonl", "loss")
    found = {name: [row[name] for row in rows] for name in ("loss", "grad_norm")}
    (evaluation,) = read_rows(out / "metrics.jsonl", "val_loss")
    found["loss"].append(evaluation["val_loss"])
    return found


def initial_weights(pool, tokens: Path, out: Path, seed: int) -> dict[str, tuple]:
    """The shape, sum and norm of each initial weight in float64, from a step that changes none."""
    flags = f"--seed {seed} --max_steps 1 --warmup_steps 0 --lr 0"
    tensors = full_tensors(checkpoint_in(run(pool, tokens, out, 1, flags)))
    return {
        name: ([*tensor.shape], tensor.double().sum().item(), tensor.double().norm().item())
        for name, tensor in tensors.items()
        if name.startswith("model.")
    }


def order(tokens: Path, seed: int, dp_size: int, micro_batch_size: int) -> str:
    """A hash of the tokens of 200 steps, in the order in which the dp_ranks read them."""
    dataset = data.open_folder(tokens).open("train", 16, seed)
    found = hashlib.sha256()
    for step in range(1, 201):
        for rank in range(dp_size):
            layout = 8, micro_batch_size, rank, dp_size  # of a global batch of 8
            for indices in data.train_indices(range(step, step + 1), *layout):
                found.update(dataset[indices].to(torch.int64).numpy().tobytes())
    return found.hexdigest()


# --------------------------------------------------------------------------------------------------
# Comparing and writing


def assert_numbers(found: dict, expected: dict, tolerances: dict) -> None:
    assert found.keys() == expected.keys() == tolerances.keys()
    for name, relative in tolerances.items():
        assert found[name] == pytest.approx(expected[name], rel=relative), name


@pytest.fixture(scope="session")
def golden() -> dict:
    return json.loads(FILE.read_text())


@pytest.mark.parametrize("name", ROWS)
def test_a_run_has_the_recorded_numbers_on_any_mesh(pool, tokens, tmp_path, golden, name):
    ranks, flags, numbers = ROWS[name]
    out = run(pool, tokens, tmp_path / "run", ranks, f"{NUMBERS[numbers]} {flags}")
    assert_numbers(numbers_of(out), golden["numbers"][numbers], TOLERANCES[numbers])


@pytest.mark.parametrize("seed", SEEDS)
def test_initial_weights_are_the_recorded_ones(pool, tokens, tmp_path, golden, seed):
    found = initial_weights(pool, tokens, tmp_path / "run", seed)
    expected = golden["initial_weights"][str(seed)]
    assert found.keys() == expected.keys()
    for name, (shape, total, norm) in expected.items():
        assert found[name][0] == shape, name
        # If n elements are each off by 1e-6 of their size, the sum is off by up to this.
        most = 1e-6 * norm * math.sqrt(math.prod(shape))
        assert found[name][1] == pytest.approx(total, abs=most), name
        assert found[name][2] == pytest.approx(norm, rel=1e-6), name


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_the_data_is_the_recorded_one(tokens, golden, seed):
    for dp_size, micro_batch_size in [(1, 8), (1, 2), (4, 2), (2, 1)]:
        assert order(tokens, seed, dp_size, micro_batch_size) == golden["order"][str(seed)]


def write() -> None:
    """Write golden.json from runs on one rank."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        root = Path(folder)
        tokens = write_tokens(root / "tokens")
        found = {"numbers": {}, "initial_weights": {}, "order": {}}
        for i, (name, flags) in enumerate(NUMBERS.items()):
            found["numbers"][name] = numbers_of(run(POOL, tokens, root / f"run-{i}", 1, flags))
        for seed in SEEDS:
            weights = initial_weights(POOL, tokens, root / f"seed-{seed}", seed)
            found["initial_weights"][seed] = weights
            found["order"][seed] = order(tokens, seed, 1, 8)
        POOL.stop()
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    write()
