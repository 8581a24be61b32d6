"""How weights are grouped, kept, recomputed and synchronised: same numbers, counted costs."""

import ctypes

import pytest
import torch
from conftest import build_run, call_train, flags, rows
from torch.distributed.tensor.parallel import loss_parallel

import checkpoint
import dist
import model
import train
from profiling import CommunicationCounter, Traffic

# tinyllama-1.1b has a head with separate weights.
BASE = "--max_steps 6 --dtype float32 --global_batch_size 16 --model tinyllama-1.1b"
POLICIES = [
    "--strategy fsdp --wrap block_group:2",
    "--strategy fsdp --wrap none",
    "--strategy fsdp --wrap none --reshard_after_forward false",
    "--strategy fsdp --reshard_after_forward false",
    "--strategy fsdp --reshard_after_forward false --grad_sync micro_batch",
    "--strategy fsdp --activation_checkpointing selective",
    "--strategy fsdp --activation_checkpointing full --wrap block_group:2",
    "--strategy ddp --activation_checkpointing selective",
    "--strategy ddp --activation_checkpointing full --grad_sync micro_batch",
    "--strategy hsdp --dp_shard 2 --grad_sync batch",
    "--strategy hsdp --dp_shard 2 --grad_sync micro_batch",
    "--strategy hsdp --dp_shard 2 --grad_sync shard",
    "--strategy hsdp --dp_shard 2 --grad_sync shard --reshard_after_forward false "
    "--activation_checkpointing full",
    "--strategy fsdp --tp 2 --activation_checkpointing selective --wrap block_group:2 "
    "--micro_batch_size 4",
    "--strategy ddp --tp 2 --activation_checkpointing full --grad_sync micro_batch "
    "--micro_batch_size 4",
]


@pytest.fixture(scope="module")
def single(pool, tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("single") / "run"
    argv = flags(f"--data {tokens} --out {out} {BASE} --strategy single --micro_batch_size 4")
    assert pool(1, call_train, argv) == [0]
    return out


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_numbers_of_a_single_process(run, single, policy):
    ranks = 4 if "hsdp" in policy or "tp" in policy else 2
    out = run(ranks, f"{BASE} --micro_batch_size 1 {policy}")
    for expected, row in zip(rows(single), rows(out), strict=True):
        for key in ("loss", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=1e-5)
    expected, val_loss = (rows(at, "val_loss")[-1]["val_loss"] for at in (single, out))
    assert val_loss == pytest.approx(expected, rel=1e-5)


# --------------------------------------------------------------------------------------------------
# Communication, counted and compared with the formula

A = 4  # grad_accum_steps
WORLD_REDUCE = ("all_reduce", "world")
OPTIMIZER = Traffic(1, 4 * (20 + 1))  # float32: the squared norms of 20 parameters, and a loss


def count(argv: list[str]) -> tuple[dict, int, int]:
    """What a step communicates, and the parameters of the blocks and of the rest of the model."""
    run = build_run(argv)
    batches = run.batches(1, 3)
    with loss_parallel():
        train.train_step(run, batches, 1)
        train.train_step(run, batches, 2)  # DDP arranges its buckets after the first
        with CommunicationCounter(run.mesh) as counter:
            train.train_step(run, batches, 3)
    blocks = sum(weight.numel() for weight in run.model.blocks.parameters())
    return counter.counts, blocks, run.model.parameter_count() - blocks


@pytest.fixture
def traffic(pool, tokens, tmp_path):
    """traffic(ranks, "--strategy ..."): what `count` returns on each rank."""

    def start(ranks: int, text: str) -> list[tuple[dict, int, int]]:
        return pool(ranks, count, flags(f"--data {tokens} --out {tmp_path}/run {text}"))

    return start


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sync, times", [("batch", 1), ("micro_batch", A)])
def test_bytes_of_ddp(traffic, sync, times, dtype):
    text = f"--strategy ddp --grad_sync {sync} --dtype {dtype} --micro_batch_size 1"
    for counts, blocks, rest in traffic(2, text):
        size = 4 * (blocks + rest)  # gradients are float32, whatever the compute dtype
        assert counts == {("all_reduce", "dp_replicate"): Traffic(times, times * size)}


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("sync, times", [("batch", 1), ("micro_batch", A)])
@pytest.mark.parametrize("reshard, gathers", [("true", 2), ("false", 1)])
def test_bytes_of_fsdp(traffic, sync, times, reshard, gathers, dtype, size):
    """In each micro-batch the two blocks are gathered for forward and, if dropped, for backward.

    The rest of the model is gathered once.
    """
    text = f"--strategy fsdp --grad_sync {sync} --reshard_after_forward {reshard}"
    for counts, blocks, rest in traffic(2, f"{text} --dtype {dtype} --micro_batch_size 1"):
        gathered = size * (gathers * blocks + rest)
        scattered = 4 * (blocks + rest)
        assert counts == {
            ("all_gather", "dp_shard"): Traffic(A * (2 * gathers + 1), A * gathered),
            ("reduce_scatter", "dp_shard"): Traffic(3 * times, times * scattered),
            WORLD_REDUCE: OPTIMIZER,
        }


@pytest.mark.parametrize(
    "sync, scatters, reduces", [("batch", 1, 1), ("micro_batch", A, A), ("shard", A, 1)]
)
def test_bytes_of_hsdp(traffic, sync, scatters, reduces):
    text = f"--strategy hsdp --dp_shard 2 --grad_sync {sync} --dtype float32"
    for counts, blocks, rest in traffic(4, f"{text} --micro_batch_size 1 --global_batch_size 16"):
        size = 4 * (blocks + rest)
        scatter = counts["reduce_scatter", "dp_shard"]
        assert scatter == Traffic(3 * scatters, scatters * size)
        # Between replicas each rank averages its half.
        reduce = counts["all_reduce", "dp_replicate"]
        assert reduce == Traffic(3 * reduces, reduces * size // 2)


@pytest.mark.parametrize("checkpointing, again", [("none", 0), ("selective", 0), ("full", 1)])
def test_bytes_of_tensor_parallelism(traffic, checkpointing, again):
    """An all_reduce of (B, T, d_model) = (2, 16, 32) adds the parts of each attention and MLP.

    In each of the two layers there are two in forward and two in backward, and one at each end of
    the model. Full checkpointing recomputes attention's, but not the last of a block. The loss
    takes three numbers a token: a maximum, a sum and the target's logit.
    """
    text = "--strategy single --tp 2 --dtype float32 --micro_batch_size 2"
    for counts, _, _ in traffic(2, f"{text} --activation_checkpointing {checkpointing}"):
        tensors = 2 * (4 + again) + 2
        tensor_bytes = 4 * 2 * 16 * 32
        loss_bytes = 3 * 4 * 2 * 16
        assert counts == {
            ("all_reduce", "tp"): Traffic(
                A * (tensors + 3), A * (tensors * tensor_bytes + loss_bytes)
            ),
            WORLD_REDUCE: OPTIMIZER,
        }


# --------------------------------------------------------------------------------------------------
# Recomputation and compilation


def activations_of(mode: str) -> tuple[int, float, float]:
    """Bytes kept between forward and backward, the loss, and the norm of a gradient."""
    config = model.ModelConfig(
        512, n_layer=6, n_head=4, n_kv_head=4, d_model=256, d_ff=704, seq_len=256
    )
    net = model.build_model(config)
    dist.checkpoint_activations(net.blocks, mode)
    tokens = torch.arange(4 * 256).view(4, 256) % 512
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = checkpoint.host_memory().resident
    loss = net(tokens, tokens)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    kept = checkpoint.host_memory().resident - before
    loss.backward()
    return kept, loss.item(), net.blocks[0].mlp.up.weight.grad.norm().item()


def activations_of_all_modes() -> list[tuple[int, float, float]]:
    return [activations_of(mode) for mode in ("full", "selective", "none")]


def test_recomputing_saves_memory_and_changes_no_number(pool):
    (answers,) = pool(1, activations_of_all_modes)
    full, selective, none = (kept for kept, _, _ in answers)
    # full keeps the inputs of 6 blocks, 4 * 256 * 256 * 4 bytes = 1 MB each, and the logits. All
    # activations of a block are 30 times its input.
    assert full < 0.5 * none and full < 0.8 * selective and selective < 0.75 * none, answers
    for _, loss, grad_norm in answers:
        assert [loss, grad_norm] == pytest.approx(answers[-1][1:], rel=1e-6)


def compiled_steps(argv: list[str]) -> list[tuple[float, float, float, int]]:
    """Loss, gradient norm and learning rate of four steps, and the graphs compiled by then."""
    torch._dynamo.reset()
    run = build_run(argv)
    batches = run.batches(1, 4)
    steps = []
    for step in range(1, 5):
        metrics = train.train_step(run, batches, step)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        loss, grad_norm = metrics["loss"].item(), metrics["grad_norm"].item()
        steps.append((loss, grad_norm, run.optimizer.lr, graphs))
    return steps


@pytest.mark.slow
def test_one_compilation_serves_all_blocks_and_learning_rates_and_changes_no_number(
    pool, tokens, tmp_path
):
    argv = flags(f"--data {tokens} --out {tmp_path}/run --dtype float32 --micro_batch_size 4")
    (eager,) = pool(1, compiled_steps, argv, timeout=120)
    (compiled,) = pool(1, compiled_steps, [*argv, "--compile"], timeout=120)
    assert len({lr for _, _, lr, _ in eager}) > 2
    for expected, step in zip(eager, compiled, strict=True):
        assert step[:3] == pytest.approx(expected[:3], rel=1e-5)
        # One graph of the two blocks, and the head's.
        assert (expected[3], step[3]) == (0, 2)
