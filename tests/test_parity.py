"""Extras that are turned on together give the numbers of one rank, and so do many ranks.

The tables of tests/core and tests/extras have the meshes, and each extra alone.
"""

import pytest
import torch
from core.conftest import job, pool, tokens, train  # noqa: F401

FSDP_TP = "--strategy fsdp --tp 2"
UNTIED = "--model tinyllama-1.1b"  # a size with an untied head; the tests override all other sizes

# ranks, flags of the mesh, flags of both runs, tolerance
ROWS = {
    "tp, loss chunks, recomputed": (
        4,
        f"{FSDP_TP} --loss_chunks 3 --activation_checkpointing selective --wrap block_group:2",
        UNTIED,
        1e-5,
    ),
    "tp, loss chunks, bfloat16": (4, f"{FSDP_TP} --loss_chunks 2", "--dtype bfloat16", 1e-2),
    # Muon iterates in bfloat16, so a rounding difference in a gradient grows to 1e-4 of a loss.
    "tp, muon": (4, FSDP_TP, "--optimizer muon", 1e-4),
}


def assert_close(one, other, relative: float, steps: int) -> None:
    assert (one.status, other.status) == (0, 0), other.error
    assert len(one.rows()) == steps
    for expected, found in zip(one.rows(), other.rows(), strict=True):
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=relative)


@pytest.mark.slow(proves="extras together")
@pytest.mark.parametrize("row", ROWS)
def test_extras_together_give_the_numbers_of_one_rank(train, row):  # noqa: F811
    ranks, mesh, flags, relative = ROWS[row]
    one = train(1, f"--strategy single --loss_chunks 1 {flags}", "one")
    assert_close(one, train(ranks, f"{mesh} {flags}", "many"), relative, 5)


@pytest.mark.slow(proves="extras together")
def test_a_run_with_several_extras_continues_bit_for_bit(train):  # noqa: F811
    flags = f"{FSDP_TP} --async_save --optimizer muon --schedule constant --save_interval 3"
    whole = train(4, f"{flags} --max_steps 6", "whole")
    assert train(4, f"{flags} --max_steps 3", "stopped").status == 0
    continued = train(4, f"{flags} --max_steps 6", "stopped")
    assert continued.status == 0, continued.error
    weights = whole.weights()
    for name, tensor in continued.weights().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.slow(proves="meshes of eight ranks, for twenty steps")
@pytest.mark.parametrize("mesh", ["fsdp --tp 4", "hsdp --dp_shard 2 --tp 2"])
def test_eight_ranks_match_one_rank(train, job, mesh):  # noqa: F811
    flags = "--max_steps 20 --max_grad_norm 2 --n_kv_head 4"
    one = train(1, f"{flags} --strategy single", "one")
    many = job(8, f"{flags} --strategy {mesh}", "many")
    assert many.wait(300) == 0, many.printed()
    assert len(many.rows()) == 20
    for expected, found in zip(one.rows(), many.rows(), strict=True):
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
