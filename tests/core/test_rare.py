"""What is rare in a run, and must not change its numbers or lose it.

A gradient that is not finite on one rank, a write that fails on one rank, compiled layers, and
hundreds of steps.
"""

import math
import os
import resource
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed
from rig import (
    assert_close,
    assert_same_bits,
    build_run,
    cells,
    run_command,
    snapshot,
    train_step,
)
from torch import Tensor

import dist
import optim
import train

FSDP = "--strategy fsdp --wrap block"


# --------------------------------------------------------------------------------------------------
# A gradient that is not finite on one rank


def steps_with_nan(argv: list[str], rank: int) -> list[list[float]]:
    """Take five steps; in step 3, this rank's part of one gradient becomes nan.

    Returns the norm of each step's gradient, and the number of skipped steps.
    """
    built = build_run(argv)

    def spoil(parameter: Tensor) -> None:
        if built.state.step == 3 and torch.distributed.get_rank() == rank:
            optim.local(parameter.grad).fill_(math.nan)

    parameter = built.state.decoder.get_parameter("blocks.1.mlp.up.weight")
    parameter.register_post_accumulate_grad_hook(spoil)
    found = []
    for step in range(1, 6):
        columns, _ = train_step(built, step)
        found.append([columns[name].item() for name in ("grad_norm", "skipped_steps")])
    return found


def test_nan_in_the_shard_of_rank_1_skips_the_update_on_all(on_ranks):
    """They go on as one rank does, whose gradient of the same step is nan."""
    (expected,) = on_ranks(1, steps_with_nan, "", 0, name="one")
    assert [skipped for _, skipped in expected] == [0, 0, 1, 1, 1]
    assert [math.isnan(norm) for norm, _ in expected] == [False, False, True, False, False]
    for found in on_ranks(2, steps_with_nan, FSDP, 1):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0, equal_nan=True)


def problem_of_a_save(argv: list[str], rank: int) -> str | None:
    """Save while this rank's part of a weight is infinite; return what prevents that."""
    built = build_run(argv)
    if torch.distributed.get_rank() == rank:
        optim.local(built.state.tensors["model"]["norm.weight"]).fill_(math.inf)
    problems = []
    saver = SimpleNamespace(save=lambda state, manifest, problem: problems.append(problem))
    train.save(built.state, built.run, saver)
    return problems[0]


def test_an_infinite_weight_on_rank_1_prevents_a_save_on_all(on_ranks):
    assert all(on_ranks(2, problem_of_a_save, FSDP, 1))
    assert on_ranks(2, problem_of_a_save, FSDP, None) == [None, None]


# --------------------------------------------------------------------------------------------------
# A write that fails on one rank


def run_with_small_files(argv: list[str], rank: int) -> tuple[int, str, str]:
    """Run train.command; on one rank, the kernel refuses to make any file longer than 4 KB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ["RANK"]) == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        return run_command(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_on_rank_1_loses_no_checkpoint(on_ranks, train):
    flags = f"{FSDP} --max_steps 6 --save_interval 2 --keep_every 1"
    whole = train(2, flags, "whole")
    run = train(2, f"{flags} --max_steps 2")
    before = snapshot(run.out / "checkpoints")
    answers = on_ranks(2, run_with_small_files, flags, 1)
    assert [status for status, _, _ in answers] == [1, 1]
    saves = [(row["event"], row["step"]) for row in run.rows("event")]
    assert saves == [("checkpoint", 2), ("checkpoint_failed", 4), ("checkpoint_failed", 6)]
    assert snapshot(run.out / "checkpoints") == before

    again = train(2, flags)
    assert (again.status, again.steps()) == (0, [2, 4, 6]), again.error
    assert_same_bits(again.out, whole.out)


# --------------------------------------------------------------------------------------------------
# Signals after a run


def handlers_before_and_after(argv: list[str]) -> list[list]:
    """The handlers of all signals that stop a run, before train.command and after it."""
    before = [*map(str, map(signal.getsignal, dist.StopRequest.SIGNALS))]
    assert run_command(argv)[0] == 0
    return [before, [*map(str, map(signal.getsignal, dist.StopRequest.SIGNALS))]]


def test_a_process_gets_its_signals_back_when_a_run_ends(on_ranks):
    ((before, after),) = on_ranks(1, handlers_before_and_after, "")
    assert after == before


# --------------------------------------------------------------------------------------------------
# Compiled layers


def run_and_count_graphs(argv: list[str]) -> tuple[int, str, int]:
    """Run train.command; return its status, its error, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    status, _, error = run_command(argv)
    return status, error, torch._dynamo.utils.counters["aot_autograd"]["total"]


# A block has 2.4 MB: by default, Dynamo would split it where DDP's first bucket, of 1 MB, is full.
# With 9 sequences, the last batch of an evaluation is smaller than the other batches.
LARGE = "--d_model 256 --d_ff 512 --micro_batch_size 4 --eval_sequences 9 --eval_interval 2"
COMPILED = """
1 | --n_layer 5 --activation_checkpointing selective
2 | --strategy ddp
2 | --strategy fsdp --wrap block
"""


@pytest.mark.slow(proves="--compile, which takes half a minute, with a graph that all blocks share")
@pytest.mark.parametrize("ranks, flags", cells(COMPILED))
def test_a_compiled_run_has_the_numbers_of_the_plain_one(on_ranks, train, tmp_path, ranks, flags):
    text = f"{LARGE} --sample_tokens 3 {flags}"
    plain = train(int(ranks), text, "plain")
    for status, error, graphs in on_ranks(
        int(ranks), run_and_count_graphs, f"{text} --compile", name="compiled", timeout=240
    ):
        assert status == 0, error
        # A block and the loss: for steps, for evaluations, and for their last, smaller batch.
        # One more block is that of the sample.
        assert 3 < graphs <= 7
    assert_close(tmp_path / "compiled", plain.out)


# --------------------------------------------------------------------------------------------------
# Memory


@pytest.mark.slow(proves="300 steps")
def test_hundreds_of_steps_need_no_more_memory_than_one_hundred(job):
    flags = f"{FSDP} --micro_batch_size 2"
    running = job(2, f"{flags} --max_steps 300 --log_interval 100 --eval_interval 50")
    assert running.wait(120) == 0, running.printed()
    peaks = {row["step"]: row["peak_host_memory"] for row in running.rows()}
    assert peaks[300] - peaks[100] < 2e6
