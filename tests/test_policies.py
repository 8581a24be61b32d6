"""What tensor parallelism communicates, what recomputation saves, what compiling keeps equal."""

import pytest
import torch
from rig import assert_close, build_model, build_run, train_step
from torch.profiler import profile

import dist
import model
import train
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
COMPILED = "--dtype float32 --micro_batch_size 4 --d_model 256 --d_ff 512 --eval_sequences 9"
COMPILED += " --sample_tokens 3"


def numbers_and_graphs(argv: list[str]) -> tuple[list[list[float]], list[int]]:
    """Return the numbers of 4 steps and 2 evaluations, and graph counts after each of the two."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = build_run(argv)
    compiled = torch._dynamo.utils.counters["aot_autograd"]
    numbers = []
    for step in range(1, 5):
        columns, _ = train_step(run, step)
        numbers.append([float(columns["loss"]), float(columns["grad_norm"])])
    graphs = [compiled["total"]]
    for _ in range(2):
        numbers.append([train.evaluate(run.state, run.start.val_batches)])
    train.print_sample(run.state, run.run, run.start)
    return numbers, [*graphs, compiled["total"]]


@pytest.mark.slow(proves="the compiler, and the number of its graphs")
@pytest.mark.parametrize(
    "ranks, policy",
    [
        (1, "--activation_checkpointing selective --loss_chunks 2"),
        (1, "--n_layer 5"),
        (2, "--strategy ddp"),
    ],
)
def test_compiled_runs_match_eager_ones_and_need_few_graphs(on_ranks, ranks, policy):
    text = f"{COMPILED} {policy}"
    ((eager, none),) = on_ranks(1, numbers_and_graphs, text, timeout=120)
    assert {*none} == {0}
    for compiled, counts in on_ranks(ranks, numbers_and_graphs, f"{text} --compile", timeout=120):
        for expected, found in zip(eager, compiled, strict=True):
            # Under ddp the loss of a step differs between ranks; val_loss does not.
            shared = slice(None) if ranks == 1 else slice(-2, None)
            assert found[shared] == pytest.approx(expected[shared], rel=1e-5)
        training, all_graphs = counts
        assert training == 2  # one that all blocks share, and one for the loss
        # As many for evaluation, as many for its last, smaller batch, and a block's for the sample
        assert all_graphs <= 7


@pytest.mark.slow(proves="the compiler, with tensor parallelism")
def test_a_compiled_tp_group_matches_one_rank(run):
    text = "--max_steps 4 --dtype float32 --strategy single"
    one = run(1, text, "one", timeout=120)
    two = run(2, f"{text} --tp 2 --compile", "two", timeout=120)
    assert_close(one, two)


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
