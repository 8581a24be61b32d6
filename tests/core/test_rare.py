"""What is rare in a run, and must not change its numbers or lose it.

A gradient that is not finite on one rank, weights of another run on several ranks, tokens of four
bytes, a write that fails on one rank, compiled layers, and hundreds of steps.
"""

import json
import math
import os
import resource
import shutil

import numpy as np
import pytest
import torch
import torch.distributed
from rig import Run, arguments, read_rows, run_command
from torch import Tensor, nn

import checkpoint
import data
from model import Transformer

FSDP = "--strategy fsdp --wrap block"


def assert_close(run: Run, expected: Run, relative: float = 1e-5) -> None:
    """Compare the rows and the last weights of two runs; in a row, nan is null."""
    rows, others = run.rows(), expected.rows()
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(rows, others):
        for name in ("loss", "grad_norm", "skipped_steps", "skipped_in_a_row"):
            values = [math.nan if each[name] is None else each[name] for each in (row, other)]
            assert values[0] == pytest.approx(values[1], rel=relative, nan_ok=True), row["step"]
    weights, others = run.weights(), expected.weights()
    for name, weight in weights.items():
        if name.startswith("model."):
            assert (weight - others[name]).norm() <= 10 * relative * others[name].norm(), name


# --------------------------------------------------------------------------------------------------
# A gradient that is not finite

SPOILED = "blocks.1.mlp.up.weight"


def run_and_spoil(argv: list[str], rank: int, spoiled_step: int) -> tuple[int, str, str]:
    """Run train.command; in one step, this rank's part of one gradient becomes nan."""
    step = 0

    def spoil(parameter: Tensor) -> None:
        if step == spoiled_step and torch.distributed.get_rank() == rank:
            gradient = parameter.grad
            part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            part.fill_(math.nan)

    def begin_step(module: nn.Module, inputs: tuple) -> None:
        nonlocal step
        trains = isinstance(module, Transformer) and torch.is_grad_enabled()
        if trains and not inputs[0].is_meta:
            step += 1
            if step == 1:  # FSDP has not gathered the weights yet
                module.get_parameter(SPOILED).register_post_accumulate_grad_hook(spoil)

    with nn.modules.module.register_module_forward_pre_hook(begin_step):
        return run_command(argv)


def test_nan_in_the_shard_of_rank_1_skips_the_update_on_all(pool, tokens, tmp_path):
    """They go on as one rank does, whose gradient of the same step is nan."""
    runs = []
    for ranks, flags in ((1, ""), (2, FSDP)):
        argv = arguments(tokens, tmp_path / f"{ranks}", f"{flags} --max_steps 6")
        for status, _, error in pool(ranks, run_and_spoil, argv, ranks - 1, 3):
            assert status == 0, error
        runs.append(Run(tmp_path / f"{ranks}", 0, "", ""))
    one, two = runs
    assert [row["skipped_steps"] for row in one.rows()] == [0, 0, 1, 1, 1, 1]
    assert [row["step"] for row in one.rows("loss") if row["grad_norm"] is None] == [3]
    assert_close(two, one)


# --------------------------------------------------------------------------------------------------
# Where a run begins


def test_weights_of_another_run_start_several_ranks_as_they_start_one(train):
    first = train(2, "--strategy fsdp --max_steps 2 --lr 0.03", "first")
    begin = f"--init_from {first.out} --global_batch_size 12"
    one, several = train(1, begin, "one"), train(3, f"{begin} {FSDP}", "several")
    assert (one.status, several.status) == (0, 0), several.error
    assert_close(several, one)
    fresh = train(1, "--global_batch_size 12", "fresh")
    assert fresh.rows()[0]["loss"] != pytest.approx(one.rows()[0]["loss"], rel=1e-2)


# --------------------------------------------------------------------------------------------------
# Data


def test_ids_above_65535_are_read_and_trained(train, tokens, tmp_path):
    """The tokens of two bytes, with 70,000 added, in four bytes."""
    folder = shutil.copytree(tokens, tmp_path / "wide")
    meta = json.loads((folder / "meta.json").read_text())
    meta |= {"dtype": "uint32", "vocab_size": 257 + 70_000, "tokenizer": None}
    (folder / "meta.json").write_text(json.dumps(meta))
    for split in ("train", "val"):
        ids = np.fromfile(tokens / f"{split}.bin", np.uint16).astype(np.uint32) + 70_000
        ids.astype(np.uint32).tofile(folder / f"{split}.bin")
    datasets = [data.open_folder(path).open("train", 16, 0) for path in (tokens, folder)]
    narrow, wide = (dataset[[0, 5, 9]] for dataset in datasets)
    assert torch.equal(wide, narrow + 70_000)
    run = train(1, f"--data {folder} --max_steps 2")
    assert run.status == 0, run.error
    assert run.rows()[0]["loss"] == pytest.approx(math.log(70_257), abs=0.1)


# --------------------------------------------------------------------------------------------------
# Saves


def run_with_small_files(argv: list[str], rank: int) -> tuple[int, str, str]:
    """Run train.command; on one rank, the kernel refuses to make any file longer than 4 KB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ["RANK"]) == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        return run_command(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_on_rank_1_loses_no_checkpoint(pool, train, tokens, tmp_path):
    flags = f"{FSDP} --max_steps 6 --save_interval 2 --keep_every 1"
    whole = train(2, flags, "whole")
    assert train(2, f"{flags} --max_steps 2", "run").status == 0
    out = tmp_path / "run"
    answers = pool(2, run_with_small_files, arguments(tokens, out, flags), 1)
    assert [status for status, _, _ in answers] == [1, 1]
    failed = read_rows(out / "metrics.jsonl", "event")[1:]
    assert [row["event"] for row in failed] == ["checkpoint_failed"] * 2
    assert [row["step"] for row in failed] == [4, 6]  # the run goes on
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    assert checkpoint.verify(checkpoint.step_path(out, 2)) is None

    again = train(2, flags, "run")
    assert (again.status, again.steps()) == (0, [2, 4, 6]), again.error
    assert_close(again, whole, 0)


# --------------------------------------------------------------------------------------------------
# Compiled layers, and memory


def run_and_count_graphs(argv: list[str]) -> tuple[int, str, str, int]:
    """Run train.command; also return the number of graphs that were compiled."""
    torch._dynamo.reset()
    before = sum(torch._dynamo.utils.counters["aot_autograd"].values())
    answer = run_command(argv)
    return *answer, sum(torch._dynamo.utils.counters["aot_autograd"].values()) - before


@pytest.mark.slow(proves="--compile, which takes half a minute")
@pytest.mark.parametrize("ranks, flags", [(1, ""), (2, FSDP)])
def test_a_compiled_run_has_the_numbers_of_the_plain_one(
    pool, train, tokens, tmp_path, ranks, flags
):
    plain = train(ranks, flags, "plain")
    argv = arguments(tokens, tmp_path / "compiled", f"{flags} --compile")
    for status, _, error, graphs in pool(ranks, run_and_count_graphs, argv, timeout=240):
        assert status == 0, error
        assert graphs > 0
    assert_close(Run(tmp_path / "compiled", 0, "", ""), plain, 1e-4)


@pytest.mark.slow(proves="300 steps")
@pytest.mark.parametrize("ranks, flags", [(1, ""), (2, f"{FSDP} --micro_batch_size 2")])
def test_hundreds_of_steps_need_no_more_memory_than_one_hundred(job, ranks, flags):
    running = job(ranks, f"{flags} --max_steps 300 --log_interval 100 --eval_interval 50")
    assert running.wait(120) == 0, running.printed()
    peaks = {row["step"]: row["peak_host_memory"] for row in running.rows()}
    assert peaks[300] - peaks[100] < 2e6
