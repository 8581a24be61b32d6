"""How the weights are wrapped, kept, recomputed and synchronised: the same numbers, other costs, each counted."""

import ctypes

import pytest
import torch
from conftest import call_train, flags, rows, start_run
from torch.distributed.tensor.parallel import loss_parallel

import checkpoint
import data
import dist
import model
import profiling

BASE = "--max_steps 6 --dtype float32 --global_batch_size 16 --model tinyllama-1.1b"  # with a head of its own
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
    "--strategy hsdp --dp_shard 2 --grad_sync shard --reshard_after_forward false --activation_checkpointing full",
    "--strategy fsdp --tp 2 --activation_checkpointing selective --wrap block_group:2 --micro_batch_size 4",
    "--strategy ddp --tp 2 --activation_checkpointing full --grad_sync micro_batch --micro_batch_size 4",
]


@pytest.fixture(scope="module")
def single(pool, tokens, tmp_path_factory):
    out = tmp_path_factory.mktemp("single") / "run"
    assert pool(
        1,
        call_train,
        flags(f"--data {tokens} --out {out} {BASE} --strategy single --micro_batch_size 4"),
    ) == [0]
    return out


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_numbers_of_a_single_process(run, single, policy):
    out = run(
        4 if "hsdp" in policy or "tp" in policy else 2, f"{BASE} --micro_batch_size 1 {policy}"
    )
    for a, b in zip(rows(single), rows(out), strict=True):
        assert (b["loss"], b["grad_norm"]) == (
            pytest.approx(a["loss"], rel=1e-5),
            pytest.approx(a["grad_norm"], rel=1e-5),
        )
    last = [rows(at, "val_loss")[-1]["val_loss"] for at in (single, out)]
    assert last[1] == pytest.approx(last[0], rel=1e-5)


def count(argv: list[str]) -> tuple[dict, list[int]]:
    """(what a step of this run communicates, the sizes of its blocks and of the rest)"""
    run = start_run(argv)
    run.build()
    numbers = data.train_indices(
        range(1, 4), run.config.global_batch_size, run.micro, run.rank, run.ranks
    )
    batches = run.fetch(run.train_windows, numbers)
    with loss_parallel():
        run.train_step(batches)
        run.train_step(batches)  # DDP arranges its buckets after the first
        with profiling.CommunicationCounter(run.mesh) as counter:
            run.train_step(batches)
    blocks = sum(p.numel() for p in run.model.blocks.parameters())
    counts = {key: [traffic.calls, traffic.bytes] for key, traffic in counter.counts.items()}
    return counts, [blocks, run.model.parameter_count() - blocks]


A = 4  # micro-batches


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("sync, times", [("batch", 1), ("micro_batch", A)])
def test_bytes_of_ddp(pool, tokens, tmp_path, sync, times, dtype, size):
    argv = flags(
        f"--data {tokens} --out {tmp_path}/run --strategy ddp --grad_sync {sync} --dtype {dtype} --micro_batch_size 1"
    )
    for counts, (blocks, rest) in pool(2, count, argv):
        assert counts == {
            ("all_reduce", "dp_replicate"): [times, times * 4 * (blocks + rest)]
        }  # float32, whatever computes


@pytest.mark.parametrize("dtype, size", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("sync, times", [("batch", 1), ("micro_batch", A)])
@pytest.mark.parametrize("reshard, gathers", [("true", 2), ("false", 1)])
def test_bytes_of_fsdp(pool, tokens, tmp_path, sync, times, reshard, gathers, dtype, size):
    """Per micro-batch the blocks are gathered for forward and, if dropped, for backward; what is left of the model once."""
    text = f"--strategy fsdp --grad_sync {sync} --reshard_after_forward {reshard} --dtype {dtype} --micro_batch_size 1"
    for counts, (blocks, rest) in pool(
        2, count, flags(f"--data {tokens} --out {tmp_path}/run {text}")
    ):
        assert counts.pop(("all_reduce", "world")) == [
            1,
            4 * (20 + 1),
        ]  # the optimizer's: 20 parameters' squares and a loss
        assert counts == {
            ("all_gather", "dp_shard"): [
                A * (2 * gathers + 1),
                A * size * (gathers * blocks + rest),
            ],
            ("reduce_scatter", "dp_shard"): [3 * times, 4 * times * (blocks + rest)],
        }


@pytest.mark.parametrize(
    "sync, scatters, reduces", [("batch", 1, 1), ("micro_batch", A, A), ("shard", A, 1)]
)
def test_bytes_of_hsdp(pool, tokens, tmp_path, sync, scatters, reduces):
    text = f"--strategy hsdp --dp_shard 2 --grad_sync {sync} --dtype float32 --micro_batch_size 1 --global_batch_size 16"
    for counts, (blocks, rest) in pool(
        4, count, flags(f"--data {tokens} --out {tmp_path}/run {text}")
    ):
        assert counts["reduce_scatter", "dp_shard"] == [
            3 * scatters,
            4 * scatters * (blocks + rest),
        ]
        assert counts["all_reduce", "dp_replicate"] == [
            3 * reduces,
            4 * reduces * (blocks + rest) // 2,
        ]


@pytest.mark.parametrize("checkpointing, again", [("none", 0), ("selective", 0), ("full", 1)])
def test_bytes_of_tensor_parallelism(pool, tokens, tmp_path, checkpointing, again):
    """Per layer and micro-batch two all-reduces of (B, T, d_model) forward and two backward, and one at each end."""
    text = f"--strategy single --tp 2 --dtype float32 --micro_batch_size 2 --activation_checkpointing {checkpointing}"
    each = 2 * (
        4 + again
    )  # two layers; full recomputes attention's sum of parts, and not the last of a block
    tensor, loss = (
        4 * 2 * 16 * 32,
        3 * 4 * 2 * 16,
    )  # the loss: a maximum, a sum and the target's logit for each token
    for counts, _ in pool(2, count, flags(f"--data {tokens} --out {tmp_path}/run {text}")):
        assert counts.pop(("all_reduce", "world")) == [1, 4 * (20 + 1)]
        assert counts == {
            ("all_reduce", "tp"): [A * (each + 2 + 3), A * ((each + 2) * tensor + loss)]
        }


def held() -> dict[str, tuple[int, float]]:
    """For each mode (bytes resident between forward and backward beyond the model, loss, norm of a gradient)"""
    c = model.ModelConfig(512, n_layer=6, n_head=4, n_kv_head=4, d_model=256, d_ff=704, seq_len=256)
    tokens, answers = torch.arange(4 * 256).view(4, 256) % 512, {}
    for mode in ("full", "selective", "none"):
        net = model.Transformer(c)
        for name, parameter in net.named_parameters():
            net.init_tensor(name, parameter.data, 0)
        dist.checkpoint_activations(net.blocks, mode)
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        before = checkpoint.host_memory().resident
        loss = net(tokens, tokens)
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        kept = checkpoint.host_memory().resident - before
        loss.backward()
        answers[mode] = kept, loss.item(), net.blocks[0].mlp.up.weight.grad.norm().item()
    return answers


def test_recomputing_saves_memory_and_changes_no_number(pool):
    (answers,) = pool(1, held)
    (full, *a), (selective, *b), (none, *c) = (
        answers[mode] for mode in ("full", "selective", "none")
    )
    # full keeps 6 inputs of blocks, 4 * 256 * 256 * 4 = 1 MB each, and the logits; a block's activations are 30 times an input
    assert full < 0.5 * none and full < 0.8 * selective and selective < 0.75 * none, answers
    assert a == pytest.approx(c, rel=1e-6) and b == pytest.approx(c, rel=1e-6)


@pytest.mark.parametrize(
    "wrap", ["blocks", "block_group", "block_group:0", "block_group:x", "none:2"]
)
def test_a_wrap_that_does_not_exist_is_refused(wrap):
    with pytest.raises(dist.MeshError, match="choose block, block_group:K"):
        dist.wrap_units([], [], wrap)


def compiled(argv: list[str]) -> tuple[list[tuple], list[int]]:
    """((loss, gradient norm, learning rate) of each step, graphs that torch.compile has made after each)"""
    torch._dynamo.reset()
    run = start_run(argv)
    run.build()
    numbers = data.train_indices(
        range(1, 5), run.config.global_batch_size, run.micro, run.rank, run.ranks
    )
    batches, found, graphs = run.fetch(run.train_windows, numbers), [], []
    for _ in range(4):
        metrics = run.train_step(batches)
        found.append((metrics["loss"].item(), metrics["grad_norm"].item(), run.optimizer.lr))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, graphs


@pytest.mark.slow
def test_compiled_blocks_give_the_same_numbers_and_one_compilation_serves_all_blocks_and_learning_rates(
    pool, tokens, tmp_path
):
    argv = flags(f"--data {tokens} --out {tmp_path}/run --dtype float32 --micro_batch_size 4")
    ((plain, none),), ((fast, graphs),) = (
        pool(1, compiled, [*argv, *more], timeout=120) for more in ([], ["--compile"])
    )
    assert len({lr for _, _, lr in plain}) > 2 and not any(none)
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in zip(fast, plain, strict=True))
    assert graphs == [2] * 4  # that of the two blocks, and the head's
