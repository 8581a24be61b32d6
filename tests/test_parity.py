"""The same configuration gives the same numbers on every mesh: losses, gradient norms, weights."""

import functools
import json
from pathlib import Path

import pytest
import torch
from conftest import call_train, flags, rows, tensors, torchrun

import checkpoint
import dist
import layout
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
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # relative

# Each with which (grad_accum_steps, dtype, steps). A strategy sees both dtypes, with and without
# accumulation, on two numbers of ranks; the many small collectives of tp take long. "untied": the
# head has a weight of its own; a wrong norm shows in the first step.
COMBINATIONS = {
    "ddp 2": [(1, "float32", 20), (4, "bfloat16", 5)],
    "ddp 4": [(1, "bfloat16", 20), (4, "float32", 5)],
    "fsdp 2": [(1, "float32", 20), (4, "bfloat16", 5)],
    "fsdp 4": [(1, "bfloat16", 20), (4, "float32", 5)],
    "hsdp 2x2": [(1, "bfloat16", 20), (4, "float32", 5)],
    "single tp 2": [(1, "float32", 20)],
    "ddp 2 tp 2": [(1, "float32", 5)],
    "fsdp 2 tp 2": [(1, "bfloat16", 5), (1, "float32", 5)],
    "single tp 2 untied": [(1, "float32", 2)],
    "fsdp 2 tp 2 untied": [(1, "float32", 2)],
}
CASES = [(mesh, *each) for mesh, combinations in COMBINATIONS.items() for each in combinations]


def ranks_of(mesh: str) -> int:
    return MESHES[mesh.removesuffix(" untied")]


def case_flags(mesh: str, grad_accum_steps: int, dtype: str, steps: int) -> str:
    dp_size = ranks_of(mesh) // (2 if "tp" in mesh else 1)
    global_batch_size = 8 if grad_accum_steps == 1 else 16
    text = f"--strategy {mesh.split()[0]} --dtype {dtype} --global_batch_size {global_batch_size}"
    text += f" --micro_batch_size {global_batch_size // dp_size // grad_accum_steps}"
    text += f" --max_steps {steps} --max_grad_norm 2"
    if mesh.startswith("hsdp"):
        text += " --dp_replicate 2"
    if "untied" in mesh:  # a size whose head is; its other parts are overridden
        text += " --model tinyllama-1.1b"
    if "tp" in mesh:
        text += " --tp 2"
    return text


@pytest.fixture(scope="module")
def trained(pool, tokens, tmp_path_factory):
    """trained(mesh, grad_accum_steps, dtype, steps): the run folder; each run is made once."""
    root = tmp_path_factory.mktemp("parity")

    @functools.cache
    def start(*case) -> Path:
        out = root / " ".join(map(str, case))
        argv = [*flags(case_flags(*case)), "--data", str(tokens), "--out", str(out)]
        ranks = ranks_of(case[0])
        assert pool(ranks, call_train, argv) == [0] * ranks
        return out

    return start


@pytest.mark.parametrize("mesh, grad_accum_steps, dtype, steps", CASES)
def test_every_mesh_gives_the_numbers_of_a_single_process(
    trained, mesh, grad_accum_steps, dtype, steps
):
    reference = "single untied" if "untied" in mesh else "single"
    single = trained(reference, grad_accum_steps, dtype, steps)
    out = trained(mesh, grad_accum_steps, dtype, steps)
    tolerance = TOLERANCE[dtype]
    assert len(rows(out)) == steps
    for expected, row in zip(rows(single), rows(out), strict=True):
        for key in ("loss", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=tolerance)
        for key in ("step", "tokens", "lr"):
            assert row[key] == expected[key]
        assert dtype == "bfloat16" or row["clipped"] == expected["clipped"]
    expected, val_loss = (rows(at, "val_loss")[-1]["val_loss"] for at in (single, out))
    assert val_loss == pytest.approx(expected, rel=tolerance)
    weights = tensors(checkpoint.list_checkpoints(out)[-1], "model.")
    for name, weight in tensors(checkpoint.list_checkpoints(single)[-1], "model.").items():
        difference = (weights[name] - weight).norm()
        assert difference <= (1e-5 if dtype == "float32" else 5e-2) * weight.norm(), name


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_single_process_gives_the_numbers_of_2026_11_22(trained, dtype):
    """Nearly: those are of an AMD EPYC Zen 5, and other CPUs round differently.

    It learns, and clips in some steps: so parity is parity of something.
    """
    file = Path(__file__).parent / "meshes_2026_11_22/numbers.json"
    expected = json.loads(file.read_text())[f"single 1 {dtype}"]
    log = rows(trained("single", 1, dtype, 20))
    for key in ("loss", "grad_norm"):
        found = [row[key] for row in log]
        assert found == pytest.approx(expected[key], rel={"float32": 1e-4, "bfloat16": 2e-2}[dtype])
    assert log[-1]["loss"] < 0.7 * log[0]["loss"]
    assert {row["clipped"] for row in log} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "tinyllama-1.1b"])
@pytest.mark.parametrize(
    "mesh, ranks", [("single --tp 4", 4), ("fsdp --tp 4", 8), ("hsdp --dp_shard 2 --tp 2", 8)]
)
def test_large_tp_groups_and_meshes_give_the_numbers_of_one(tokens, tmp_path, model, mesh, ranks):
    """ "tiny" has a tied head, "tinyllama-1.1b" a separate one."""
    base = f"--data {tokens} --max_steps 20 --dtype float32 --max_grad_norm 2 --model {model}"
    text = f"{base} --n_kv_head 4 --micro_batch_size 1 --global_batch_size 16"
    found = []
    for name, strategy, size in (("one", "single", 1), ("all", mesh, ranks)):
        argv = flags(f"{text} --out {tmp_path}/{name} --strategy {strategy}")
        job = torchrun(size, argv, tmp_path / f"{name}.job")
        assert job.wait(300) == 0, job.err
        found.append(rows(tmp_path / name))
    for expected, row in zip(*found, strict=True):
        for key in ("loss", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-5)


def initial_weights(mesh_name: str) -> tuple[int, dict]:
    """The number of parameters that this rank holds, and the full weights."""
    world = dist.start("cpu")
    strategy = mesh_name.split()[0]
    dp_replicate = 2 if strategy == "hsdp" else None
    tp = 2 if "tp" in mesh_name else 1
    shape = dist.mesh_shape(strategy, world.size, world.local_size, dp_replicate, None, tp)
    config = model.ModelConfig(
        64, n_layer=2, n_head=4, n_kv_head=2, d_model=16, d_ff=24, seq_len=8, tied=False
    )
    with torch.device("meta"):
        net = model.Transformer(config)
    dist.parallelize(
        net,
        dist.make_mesh(world, shape),
        strategy,
        init=lambda name, tensor: net.init_tensor(name, tensor, seed=7),
        tp_plan=net.tensor_parallel_plan(),
        fsdp_units=layout.fsdp_units(net, blocks_per_unit=1),
    )
    held = sum(optim.local(weight).numel() for weight in net.parameters())
    weights = {name: weight.detach() for name, weight in net.named_parameters()}
    return held, {name: model.full_tensor(weight) for name, weight in weights.items()}


def test_every_mesh_has_the_same_initial_weights_one_shard_a_rank(pool):
    ((total, expected),) = pool(1, initial_weights, "single")
    norms = sum(w.numel() for name, w in expected.items() if name.endswith("norm.weight"))
    # tp cuts everything but the norms in two; dp_shard cuts what is left, norms too.
    held_by_rank = {
        "ddp 2": total,
        "fsdp 4": total / 4,
        "hsdp 2x2": total / 2,
        "ddp 2 tp 2": (total + norms) / 2,
        "fsdp 2 tp 2": (total + norms) / 4,
    }
    for mesh, expected_held in held_by_rank.items():
        for held, weights in pool(MESHES[mesh], initial_weights, mesh):
            assert held == expected_held  # every first dimension here divides by 4
            assert weights.keys() == expected.keys()
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
