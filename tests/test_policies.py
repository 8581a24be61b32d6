"""What tensor parallelism communicates, what recomputation saves, what compiling keeps equal."""

import pytest
import torch
import torch.nn.functional as F
from rig import assert_close, build_model, build_run, cells, train_step
from torch.profiler import profile

import dist
import model
import train
from extras.profile import CommunicationCounter, Traffic

# --------------------------------------------------------------------------------------------------
# Communication, counted and compared with formulas


def count(argv: list[str]) -> dict:
    """What a second step communicates."""
    run = build_run(argv)
    train_step(run, 1)
    with CommunicationCounter(run.mesh) as counter:
        train_step(run, 2)
    return counter.counts


# ranks, flags | of a layer in a micro-batch: gathers, scatters
TP = """
2 --strategy single --activation_checkpointing full      | 6 5
4 --strategy ddp    --activation_checkpointing selective | 6 4
"""


@pytest.mark.parametrize("flags, per_layer", cells(TP))
def test_the_bytes_of_tensor_parallelism_match_the_formula(on_ranks, flags, per_layer):
    """Before each attention and MLP, the tokens of (B, T, d_model) = (2, 16, 32) are gathered.

    After each, partial results are added and scattered. So each of the two layers gathers and
    scatters twice in forward and twice in backward; embedding and head do each once. Checkpointing
    gathers again; "full" also repeats attention's scatter, but not the last scatter of a block. The
    loss reduces three numbers per token: a maximum, a sum and the target's logit. The gradients of
    the five norms are all_reduced once a step, by optim.py ("single") or by FSDP.
    """
    ranks, text = flags.split(maxsplit=1)
    n = 4 // int(ranks)  # micro-batches of a tp group: two groups share four sequences
    gathers, scatters = (n * (2 * int(number) + 2) for number in per_layer.split())
    size = 4 * 2 * 16 * 32
    reduces = Traffic(n * 3 + 5, n * 3 * 4 * 2 * 16 + 5 * 4 * 32)
    if ranks == "2":  # then tp is an axis of all ranks, who add the squared norms of 20 parameters
        reduces = Traffic(reduces.calls + 1, reduces.bytes + 4 * 20)
    text += " --tp 2 --micro_batch_size 2 --global_batch_size 4"
    for counts in on_ranks(int(ranks), count, text):
        assert {kind: sent for (kind, axis), sent in counts.items() if axis == "tp"} == {
            "all_gather": Traffic(gathers, gathers * size),
            "reduce_scatter": Traffic(scatters, scatters * size),
            "all_reduce": reduces,
        }


# --------------------------------------------------------------------------------------------------
# Recomputation


def activations_of(mode: str) -> tuple[int, float, float]:
    """The bytes kept between forward and backward, the loss, and a gradient's norm.

    Of a fork with dropout in its MLPs, whose mask backward has to repeat.
    """
    sizes = dict(n_layer=6, n_head=4, n_kv_head=4, d_model=128, d_ff=352, seq_len=128)
    net = build_model(model.ModelConfig(512, **sizes))
    for block in net.blocks:
        block.mlp.down.register_forward_hook(lambda layer, inputs, x: F.dropout(x, 0.5))
    if mode != "none":
        dist.checkpoint_activations(net.blocks, mode)
    tokens = torch.arange(4 * 128).view(4, 128) % 512
    torch.manual_seed(0)
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
    for _, *numbers in answers:
        assert numbers == pytest.approx(answers[-1][1:], rel=1e-6)


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
def test_a_compiled_tp_group_matches_one_rank(train):
    one = train(1, "--max_steps 4 --strategy single", "one", timeout=120)
    two = train(2, "--max_steps 4 --strategy single --tp 2 --compile", "two", timeout=120)
    assert (one.status, two.status) == (0, 0), two.error
    assert_close(one.out, two.out)
