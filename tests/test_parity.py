"""The same configuration gives the same numbers on every mesh: losses, gradient norms, weights, and what each rank reads."""

import itertools
import math

import pytest
import torch
from conftest import call_train, flags, rows, tensors
from torch.distributed.tensor import DTensor

import checkpoint
import dist
import model
import optim

MESHES = {
    "single": 1,
    "ddp 2": 2,
    "ddp 4": 4,
    "fsdp 2": 2,
    "fsdp 4": 4,
    "hsdp 2x2": 4,
    "single tp 2": 2,
    "ddp 2 tp 2": 4,
    "fsdp 2 tp 2": 4,
}
BATCHES = {1: "", 4: "--global_batch_size 16"}  # accumulation -> flags
DTYPES = {"float32": 1e-5, "bfloat16": 1e-2}  # -> relative tolerance
# What runs long, many processes or tp's many small collectives, in fewer combinations.
SOME = {
    mesh: {(1, "bfloat16"), (4, "float32")}
    for mesh in ("ddp 4", "fsdp 4", "hsdp 2x2", "fsdp 2 tp 2")
}
SOME |= {mesh: {(1, "float32")} for mesh in ("single tp 2", "ddp 2 tp 2")}
CASES = [
    case
    for case in itertools.product(MESHES, BATCHES, DTYPES)
    if case[1:] in SOME.get(case[0], [case[1:]])
]


def strategy(mesh: str) -> str:
    tp = (
        " --tp 2 --checkpoint full" if "tp" in mesh else ""
    )  # where whole tensors come together from two axes
    return mesh.split()[0] + (" --dp_shard 2" if mesh.startswith("hsdp") else "") + tp


@pytest.fixture(scope="module")
def results(pool, tokens, tmp_path_factory) -> dict:
    """The run folder for every mesh, accumulation and dtype: 20 steps each."""
    root, runs = tmp_path_factory.mktemp("parity"), {}
    for mesh, accumulation, dtype in CASES:
        ranks = MESHES[mesh]
        out = root / f"{mesh}-{accumulation}-{dtype}".replace(" ", "")
        micro = (
            (8 if accumulation == 1 else 16)
            // (ranks // 2 if "tp" in mesh else ranks)
            // accumulation
        )
        argv = f"--data {tokens} --out {out} --max_steps 20 --max_grad_norm 2 --dtype {dtype}"
        argv += f" --strategy {strategy(mesh)} {BATCHES[accumulation]} --micro_batch_size {micro}"
        assert pool(ranks, call_train, flags(argv)) == [0] * ranks
        runs[mesh, accumulation, dtype] = out
    return runs


@pytest.mark.parametrize(
    "mesh, accumulation, dtype", [case for case in CASES if case[0] != "single"]
)
def test_every_mesh_gives_the_numbers_of_a_single_process(results, mesh, accumulation, dtype):
    one, many, close = (
        results["single", accumulation, dtype],
        results[mesh, accumulation, dtype],
        DTYPES[dtype],
    )
    assert len(rows(many)) == 20
    for a, b in zip(rows(one), rows(many), strict=True):
        assert (b["loss"], b["grad_norm"]) == (
            pytest.approx(a["loss"], rel=close),
            pytest.approx(a["grad_norm"], rel=close),
        )
        assert [a[key] for key in ("step", "tokens", "lr")] == [
            b[key] for key in ("step", "tokens", "lr")
        ]
        assert dtype == "bfloat16" or a["clipped"] == b["clipped"]
    assert rows(many, "val_loss")[-1]["val_loss"] == pytest.approx(
        rows(one, "val_loss")[-1]["val_loss"], rel=close
    )
    for name, weight in tensors(checkpoint.list_checkpoints(one)[-1], "model.").items():
        other = tensors(checkpoint.list_checkpoints(many)[-1], "model.")[name]
        assert (weight - other).norm() <= (1e-5 if dtype == "float32" else 5e-2) * weight.norm(), (
            name
        )


def test_the_runs_learn_clip_and_differ_from_step_to_step(results):
    """So that parity is parity of something."""
    log = rows(results["single", 1, "float32"])
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert {row["clipped"] for row in log} == {0, 1}


@pytest.mark.parametrize("mesh", ["ddp 2", "fsdp 2"])
def test_micro_batch_size_and_grad_sync_do_not_change_the_numbers(run, mesh):
    runs = [
        run(2, f"--max_steps 6 --strategy {mesh.split()[0]} --dtype float32 {text}", name)
        for name, text in {
            "a": "--micro_batch_size 4",
            "b": "--micro_batch_size 1",
            "c": "--micro_batch_size 1 --grad_sync micro_batch",
        }.items()
    ]
    want = [(row["loss"], row["grad_norm"]) for row in rows(runs[0])]
    for other in runs[1:]:
        for row, (loss, norm) in zip(rows(other), want, strict=True):
            assert (row["loss"], row["grad_norm"]) == (
                pytest.approx(loss, rel=1e-5),
                pytest.approx(norm, rel=1e-5),
            )


def initial_weights(mesh: str) -> tuple[int, dict]:
    """(parameters this rank holds, the whole weights)"""
    world = dist.start("cpu")
    tp = 2 if "tp" in mesh else 1
    shape = dist.mesh_shape(
        mesh.split()[0], world.size, world.local_size, None, 2 if mesh == "hsdp 2x2" else None, tp
    )
    with torch.device("meta"):
        net = model.Transformer(
            model.ModelConfig(
                64, n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=24, seq_len=8, tied=False
            )
        )
    dist.parallelize(
        net,
        net.tensor_parallel_plan(),
        [[block] for block in net.blocks],
        dist.make_mesh(world, shape),
        mesh.split()[0],
        torch.float32,
        world.device,
        lambda name, tensor: net.init_tensor(name, tensor, 7),
    )
    held = sum(optim.local(p).numel() for p in net.parameters())
    return held, {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in net.named_parameters()
    }


def test_initial_weights_are_the_same_on_every_mesh_and_no_rank_holds_more_than_its_shard(pool):
    ((total, whole),) = pool(1, initial_weights, "single")
    parts = {
        "single": 1,
        "ddp 2": 1,
        "ddp 4": 1,
        "fsdp 2": 2,
        "fsdp 4": 4,
        "hsdp 2x2": 2,
        "single tp 2": 2,
        "ddp 2 tp 2": 2,
        "fsdp 2 tp 2": 4,
    }
    norms = sum(weight.numel() for name, weight in whole.items() if name.endswith("norm.weight"))
    for mesh, ranks in MESHES.items():
        for held, weights in pool(ranks, initial_weights, mesh):
            uncut = norms if "tp" in mesh else 0  # by tp
            assert held == (total + uncut) / parts[mesh]  # every first dimension here divides by 4
            assert weights.keys() == whole.keys() and all(
                torch.equal(weights[name], whole[name]) for name in whole
            )


def own_dp_rank(shape: tuple[int, int, int]) -> int:
    return dist.dp_rank(dist.make_mesh(dist.start("cpu"), shape))


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (3, 1, 1), (1, 3, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)],
)
def test_dp_rank_is_unique_and_complete(pool, shape):
    ranks, tp = math.prod(shape), shape[-1]
    assert pool(ranks, own_dp_rank, shape) == [
        rank // tp for rank in range(ranks)
    ]  # one for all of a tp group
