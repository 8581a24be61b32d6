"""What tensor parallelism communicates, what recomputation saves, what compiling keeps equal."""

import pytest
import torch
from conftest import assert_close, build_model, build_run, train_step
from core.test_rare import run_and_count_graphs
from torch.profiler import profile

import dist
import model
from extras.profile import CommunicationCounter, OperationCounter, Traffic

# --------------------------------------------------------------------------------------------------
# Communication, counted and compared with formulas

A = 2  # grad_accum_steps
OPTIMIZER = Traffic(1, 4 * 20)  # float32: the squared norms of 20 parameters


def count(argv: list[str]) -> dict:
    """What a second step communicates."""
    run = build_run(argv)
    train_step(run, 1)
    with CommunicationCounter(run.mesh) as counter:
        train_step(run, 2)
    return counter.counts


@pytest.mark.parametrize(
    "strategy, checkpointing, gathers_again, scatters_again, optimizer",
    [("single", "full", 2, 1, "adamw"), ("ddp", "selective", 2, 0, "muon")],
)
def test_the_bytes_of_tensor_parallelism_match_the_formula(
    on_ranks, strategy, checkpointing, gathers_again, scatters_again, optimizer
):
    """Before each attention and MLP, the tokens of (B, T, d_model) = (2, 16, 32) are gathered.

    After each, partial results are added and scattered. So each of the two layers gathers and
    scatters twice in forward and twice in backward; embedding and head do each once. Checkpointing
    gathers again; "full" also repeats attention's scatter, but not the last scatter of a block. The
    loss reduces three numbers per token: a maximum, a sum and the target's logit. The gradients of
    the five norms are all_reduced once a step, by optim.py ("single") or by FSDP.
    """
    ranks = 2 if strategy == "single" else 4
    n = A * 2 // ranks
    tensor_bytes = 4 * 2 * 16 * 32
    text = f"--strategy {strategy} --tp 2 --dtype float32 --micro_batch_size 2"
    text += " --global_batch_size 4 --activation_checkpointing"
    steps = on_ranks(ranks, count, f"{text} {checkpointing} --optimizer {optimizer}")
    for counts in steps:
        gathers = n * (2 * (4 + gathers_again) + 2)
        scatters = n * (2 * (4 + scatters_again) + 2)
        dealt = counts.pop(("all_to_all", "tp"), None)
        reduces = Traffic(n * 3 + 5, n * 3 * 4 * 2 * 16 + 5 * 4 * 32)
        if strategy == "single":  # tp is an axis of all ranks
            reduces.calls += OPTIMIZER.calls
            reduces.bytes += OPTIMIZER.bytes
        else:
            assert counts["all_reduce", "world"] == OPTIMIZER
        assert {kind_axis: sent for kind_axis, sent in counts.items() if "tp" in kind_axis} == {
            ("all_gather", "tp"): Traffic(gathers, gathers * tensor_bytes),
            ("reduce_scatter", "tp"): Traffic(scatters, scatters * tensor_bytes),
            ("all_reduce", "tp"): reduces,
        }
        if optimizer == "muon":
            # Matrices are dealt largest first. Rank 0 gets four of the 14 and returns the results.
            matrices = 2 * (2 * 64 * 32 + 32 * 32 + 16 * 32)
            assert counts is not steps[0] or dealt == Traffic(2 * 4, 2 * matrices)
            # Each rank sends its half of a result to the other replica, or gets it from there.
            halves = 2 * 2 * (3 * 64 * 32 + 2 * 32 * 32 + 2 * 16 * 32) // 2
            assert counts["broadcast", "dp_replicate"] == Traffic(14, halves)


# --------------------------------------------------------------------------------------------------
# Recomputation


def activations_of(mode: str) -> tuple[int, float, float]:
    """Return the bytes kept between forward and backward, the loss, and a gradient's norm."""
    config = model.ModelConfig(
        512, n_layer=6, n_head=4, n_kv_head=4, d_model=128, d_ff=352, seq_len=128
    )
    net = build_model(config)
    if mode != "none":
        dist.checkpoint_activations(net.blocks, mode)
    tokens = torch.arange(4 * 128).view(4, 128) % 512
    with profile(profile_memory=True) as profiler:
        loss = net(tokens, tokens)
    kept = sum(row.self_cpu_memory_usage for row in profiler.key_averages())  # allocated - freed
    loss.backward()
    return kept, loss.item(), net.blocks[0].mlp.up.weight.grad.norm().item()


def test_recomputing_saves_memory_without_changing_numbers():
    answers = [activations_of(mode) for mode in ("full", "selective", "none")]
    full, selective, none = (kept for kept, _, _ in answers)
    # "full" keeps the inputs of 6 blocks, 4 * 128 * 128 * 4 bytes = 0.26 MB each, and the logits.
    # All activations of a block together are 30 times its input.
    assert full < 0.5 * none, answers
    assert full < 0.8 * selective, answers
    assert selective < 0.75 * none, answers
    for _, loss, grad_norm in answers:
        assert [loss, grad_norm] == pytest.approx(answers[-1][1:], rel=1e-6)


# --------------------------------------------------------------------------------------------------
# Compilation


# A block has 2.4 MB: by default, Dynamo would split it where DDP's first bucket, of 1 MB, is full.
# With 9 sequences, the last batch of an evaluation is smaller than the other batches.
COMPILED = "--dtype float32 --max_steps 4 --d_model 256 --d_ff 512 --eval_sequences 9"
# name | ranks | flags
ROWS = """\
one       | 1 |
five      | 1 | --n_layer 5
recompute | 1 | --activation_checkpointing selective --loss_chunks 2
ddp       | 2 | --strategy ddp
tp        | 2 | --strategy single --tp 2
"""


@pytest.mark.slow(proves="the compiler, on every kind of mesh, and the number of its graphs")
def test_compiled_runs_match_eager_ones_and_share_graphs(run, on_ranks, tmp_path):
    """All blocks share a graph, which no bucket splits. With tp, the loss is not compiled."""
    graphs = {}
    for row in ROWS.splitlines():
        name, ranks, policy = (cell.strip() for cell in row.split("|"))
        text = f"{COMPILED} {policy}"
        eager, compiled = run(int(ranks), text, f"{name}-eager"), tmp_path / f"{name}-compiled"
        text += f" --compile --out {compiled}"
        for status, _, error, count in on_ranks(
            int(ranks), run_and_count_graphs, text, timeout=180
        ):
            assert status == 0, error
            graphs[name] = count
        assert_close(eager, compiled)
    assert graphs["one"] == graphs["five"] == graphs["recompute"] == graphs["ddp"] > graphs["tp"]


class SeenOperations(OperationCounter):
    """Collects the names of the operations of a step."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def count_operation(self, function, args, kwargs, result) -> None:
        self.names.add(function.overloadpacket.__name__)


def operations_of_a_step(argv: list[str]) -> set[str]:
    run = build_run(argv)
    for step in (1, 2):
        train_step(run, step)
    with SeenOperations() as seen:
        train_step(run, 3)
    return seen.names


@pytest.mark.slow(proves="counters do not disturb the compiler")
def test_a_step_stays_compiled_while_its_operations_are_counted(on_ranks):
    (eager,) = on_ranks(1, operations_of_a_step, "", timeout=120)
    (compiled,) = on_ranks(1, operations_of_a_step, "--compile", timeout=120)
    assert "silu" in eager and "silu" not in compiled  # fused
