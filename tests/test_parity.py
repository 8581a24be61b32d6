"""The same configuration gives the same numbers on every mesh: losses, gradient norms, weights."""

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import assert_close, build_run, call_train, flags, rows, tensors, torchrun
from torch.distributed.tensor.parallel import loss_parallel

import checkpoint

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # relative

# Mesh -> (grad_accum_steps, dtype, steps, flags for wrapping, resharding, recomputation and
# gradient synchronisation). Cases with tp are short: their many small collectives are slow.
# "untied": the head has a separate weight, and a wrong gradient norm shows in the first step.
FULL = "--activation_checkpointing full"
SELECTIVE = "--activation_checkpointing selective"
COMBINATIONS = {
    "ddp 2": [(1, "float32", 20, "")],
    "ddp 4": [(4, "bfloat16", 5, ""), (4, "float32", 5, f"{SELECTIVE} --grad_sync micro_batch")],
    "fsdp 2": [
        (1, "float32", 20, ""),
        (4, "bfloat16", 5, ""),
        (4, "float32", 5, f"{FULL} --wrap none"),
    ],
    "fsdp 4": [
        (4, "float32", 5, f"{SELECTIVE} --reshard_after_forward false --grad_sync micro_batch")
    ],
    "hsdp 2x2": [
        (1, "bfloat16", 20, ""),
        (4, "float32", 5, f"{FULL} --reshard_after_forward false --grad_sync shard"),
    ],
    "single tp 2": [(1, "float32", 5, f"{FULL} --loss_chunks 2")],
    "ddp 2 tp 2": [(1, "float32", 5, "")],
    "fsdp 2 tp 2": [(1, "bfloat16", 5, f"{SELECTIVE} --wrap block_group:2 --loss_chunks 2")],
    "fsdp 2 tp 2 untied": [(1, "float32", 2, "")],
}
CASES = [(mesh, *each) for mesh, combinations in COMBINATIONS.items() for each in combinations]


def ranks_of(mesh: str) -> int:
    """The product of the numbers in the name of a mesh."""
    return math.prod(int(digit) for digit in mesh if digit.isdigit())


def case_flags(mesh: str, grad_accum_steps: int, dtype: str, steps: int, policy: str) -> str:
    dp_size = ranks_of(mesh) // (2 if "tp" in mesh else 1)
    global_batch_size = 8 if grad_accum_steps == 1 else 16
    text = f"--strategy {mesh.split()[0]} --dtype {dtype} --global_batch_size {global_batch_size}"
    text += f" --micro_batch_size {global_batch_size // dp_size // grad_accum_steps}"
    text += f" --max_steps {steps} --schedule cosine --max_grad_norm 2 {policy}"
    if mesh.startswith("hsdp"):
        text += " --dp_replicate 2"
    if "untied" in mesh:  # a size with an untied head; all other sizes are overridden
        text += " --model tinyllama-1.1b"
    if "tp" in mesh:
        text += " --tp 2 --sample_tokens 3"  # an odd number, which two tp ranks cannot split
    return text


@pytest.fixture(scope="module")
def trained(pool, tokens, tmp_path_factory):
    """trained(mesh, grad_accum_steps, ...): the run folder; each run is made once."""
    root = tmp_path_factory.mktemp("parity")

    @functools.cache
    def start(*case) -> Path:
        out = root / " ".join(map(str, case))
        argv = [*flags(case_flags(*case)), "--data", str(tokens), "--out", str(out)]
        ranks = ranks_of(case[0])
        assert pool(ranks, call_train, argv) == [0] * ranks
        return out

    return start


@pytest.mark.parametrize("mesh, grad_accum_steps, dtype, steps, policy", CASES)
def test_every_mesh_matches_a_single_process(trained, mesh, grad_accum_steps, dtype, steps, policy):
    reference = "single untied" if "untied" in mesh else "single"
    single = trained(reference, grad_accum_steps, dtype, steps, "")
    out = trained(mesh, grad_accum_steps, dtype, steps, policy)
    tolerance = TOLERANCE[dtype]
    assert len(rows(out)) == steps
    assert_close(single, out, tolerance)
    for expected, row in zip(rows(single), rows(out), strict=True):
        assert (row["step"], row["lr"]) == (expected["step"], expected["lr"])
        assert row["tokens"] == row["step"] * (8 if grad_accum_steps == 1 else 16) * 16
        assert dtype == "bfloat16" or row["clipped"] == expected["clipped"]
    expected, val_loss = (rows(at, "val_loss")[-1]["val_loss"] for at in (single, out))
    assert val_loss == pytest.approx(expected, rel=tolerance)
    weights = tensors(checkpoint.list_checkpoints(out)[-1], "model.")
    for name, weight in tensors(checkpoint.list_checkpoints(single)[-1], "model.").items():
        difference = (weights[name] - weight).norm()
        assert difference <= (1e-5 if dtype == "float32" else 5e-2) * weight.norm(), name


def test_micro_batches_of_any_size_give_the_same_numbers(trained):
    """The test above compares meshes with a single process at equal grad_accum_steps only."""
    policies = "", "--micro_batch_size 16"  # four of 4 sequences, one of 16
    assert_close(*(trained("single", 4, "float32", 5, policy) for policy in policies))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_single_process_matches_the_recorded_numbers(trained, dtype):
    """An AMD EPYC Zen 5 gave them on 2026-11-22; other CPUs round differently.

    The run learns, and clips in some steps, so the tests of parity do not compare trivial runs.
    """
    file = Path(__file__).parent / "meshes_2026_11_22/numbers.json"
    expected = json.loads(file.read_text())[f"single 1 {dtype}"]
    log = rows(trained("single", 1, dtype, 20, ""))
    for key in ("loss", "grad_norm"):
        found = [row[key] for row in log]
        assert found == pytest.approx(expected[key], rel={"float32": 1e-4, "bfloat16": 2e-2}[dtype])
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert {row["clipped"] for row in log} == {0, 1}


def loss_over_all_tokens(argv: list[str]) -> float:
    """The initial loss of a batch in which each of 256 bytes occurs."""
    run = build_run(argv)
    tokens = torch.arange(256).view(16, 16)
    with loss_parallel(), torch.no_grad():
        return run.forward(tokens, tokens.roll(1)).item()


def test_tensor_parallel_ranks_look_up_every_token(on_ranks, tmp_path):
    losses = []
    for tp in (1, 2):
        text = f"--out {tmp_path}/{tp} --dtype float32 --tp {tp}"
        losses += on_ranks(tp, loss_over_all_tokens, text)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp --tp 4", "hsdp --dp_shard 2 --tp 2"])
def test_eight_ranks_match_one_rank(tokens, tmp_path, mesh):
    text = f"--data {tokens} --max_steps 20 --dtype float32 --max_grad_norm 2 --n_kv_head 4"
    for name, strategy, size in (("one", "single", 1), ("all", mesh, 8)):
        argv = flags(f"{text} --out {tmp_path}/{name} --strategy {strategy}")
        job = torchrun(size, argv, tmp_path / f"{name}.job")
        assert job.wait(300) == 0, job.err
    assert_close(tmp_path / "one", tmp_path / "all")
