"""What tensor parallelism communicates, and what recomputation saves."""

import pytest
import torch
import torch.nn.functional as F
from rig import build_model, build_run, cells, train_step
from torch.profiler import profile

import dist
import model
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
