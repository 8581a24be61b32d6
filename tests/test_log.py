"""Rows of the log: their contents, and how they are written to disk."""

import re
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rig import ROOT, build_run, cells, last_checkpoint, train_step

import dist
import log as logs
from errors import UsageError
from log import Log, has_evaluation, read_rows


def make_log(out: Path, step: int = 0, kind: type[Log] = Log) -> Log:
    """A log of steps of 1,000 tokens and 2e9 FLOPs."""
    run = SimpleNamespace(out=str(out), max_steps=100, tokens_per_step=1000)
    run.peak_tflops, run.optim_metrics_interval = 1.0, 1
    return kind(run, torch.device("cpu"), flops_per_token=2_000_000, step=step)


def columns(**changes: float) -> dict[str, torch.Tensor]:
    values = {"loss": 2.5, "grad_norm": 2.0, "skipped_in_a_row": 0} | changes
    return {name: torch.tensor(value) for name, value in values.items()}


# --------------------------------------------------------------------------------------------------
# Values


class Event:
    """An event of a device that lags behind the host."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later.seconds - self.seconds)


class LateLog(Log):
    now = 0.0

    def record_event(self) -> Event:
        return Event(self.now)


def test_a_row_is_written_once_its_values_have_arrived_or_at_a_pause(tmp_path, one_rank):
    """Its step time is the mean over the steps since the last row, without pauses."""
    file = tmp_path / "metrics.jsonl"
    log = make_log(tmp_path, kind=LateLog)
    log.now = 6.0
    log.row(3, 3000, 0.1, columns(), data_wait=0.0)
    log.write_arrived_row()
    assert not file.exists()
    log.begin.passed = True  # the end of the first row
    log.write_arrived_row()
    (row,) = read_rows(file)
    assert (row["step_time"], row["tokens_per_second"]) == (2.0, 500.0)
    with log.pause():
        log.now = 50.0
    log.now = 51.0
    log.row(5, 5000, 0.1, columns(), data_wait=0.0)
    with log.pause():
        assert read_rows(file)[1]["step_time"] == 0.5


def rows_of_a_rank(out: Path) -> int:
    """Log a row; return the peak of host memory. Rank 1 needs 300 MB more."""
    rank = dist.start("cpu").rank
    held = torch.ones(75_000_000 * rank)  # noqa: F841
    log = make_log(out)
    time.sleep(0.2)
    values = columns(loss=2.0 + rank, count=[0, 4, 1][rank])
    log.row(1, 1000, 0.1, values, data_wait=10.0 * (1 + rank))
    log.flush()
    return logs.peak_memory()[1]


def test_a_row_reduces_its_values_over_all_ranks(pool, tmp_path):
    peaks = pool(3, rows_of_a_rank, tmp_path)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert [row[name] for name in ("loss", "count", "lr")] == [3.0, pytest.approx(5 / 3), 0.1]
    assert (row["data_wait"], row["data_wait_min"]) == (30.0, 10.0)
    assert row["peak_host_memory"] == pytest.approx(max(peaks), rel=0.05)
    assert row["peak_host_memory_min"] == pytest.approx(min(peaks), rel=0.05)
    assert max(peaks) > min(peaks) + 2e8
    assert 0.1 < row["step_time"] < 10
    per_device = row["tokens_per_second_per_device"]
    assert per_device == pytest.approx(row["tokens_per_second"] / 3)
    assert row["mfu"] == pytest.approx(per_device * 2e6 / 1e12)


def documented_fields(kind: str) -> set[str]:
    """The fields that the reference lists for a kind of row."""
    (line,) = re.findall(rf"^\| {kind} \| (.*)", (ROOT / "docs/reference.md").read_text(), re.M)
    return {"time", *re.findall(r"`(\w+)`", line)}


def test_rows_have_the_documented_fields_and_come_before_what_follows_their_step(train):
    """Neither the save nor the evaluation of a step is a part of its time: see Log.pause."""
    run = train(2, "--strategy ddp --max_steps 2 --save_interval 1 --eval_interval 1")
    start, *rows = read_rows(run.out / "metrics.jsonl")
    assert start.keys() == documented_fields("start") - {"start"}
    assert [row["step"] for row in rows] == [1, 1, 1, 2, 2, 2]
    for training, saved, evaluation in (rows[:3], rows[3:]):
        assert training.keys() == documented_fields("training")
        assert evaluation.keys() == documented_fields("evaluation")
        expected = documented_fields("checkpoint") - {"checkpoint", "checkpoint_failed", "error"}
        assert saved.keys() == expected
    files = [file for file in last_checkpoint(run.out).iterdir() if file.name != "manifest.json"]
    assert saved["path"] == str(last_checkpoint(run.out))
    assert saved["bytes"] == sum(file.stat().st_size for file in files)


# --------------------------------------------------------------------------------------------------
# Columns of a fork


class MeanLogit(torch.nn.Module):
    """The loss of the reference's example of a column, and a column of another dtype."""

    def forward(self, x, weight, targets):
        logits = F.linear(x, weight).float()
        self.logged = {"logit": logits.mean(), "is_high": logits.mean() > 1}
        return F.cross_entropy(logits, targets, reduction="sum")


def fork_columns(argv: list[str]) -> dict[str, float]:
    """The columns of a step of a model with this loss, whose blocks leave 1.0 and 3.0."""
    built = build_run(argv)
    decoder = built.state.decoder
    owner = decoder.head.loss if hasattr(decoder.head.loss, "chunks") else decoder.head
    owner.loss = MeanLogit()
    for value, block in zip((1.0, 3.0), decoder.blocks, strict=True):
        block.mlp_norm.logged = {"of_two": torch.tensor(value)}
    values, _ = train_step(built, 1)
    decoder.norm.logged = {"grad_norm": torch.tensor(1.0)}  # the log has such a column already
    with pytest.raises(UsageError):
        train_step(built, 2)
    return {name: float(value) for name, value in values.items()}


POLICIES = """
1 | --loss_chunks 3 --micro_batch_size 1
2 | --strategy fsdp --micro_batch_size 2 --activation_checkpointing full
2 | --tp 2 --loss_chunks 2
"""


@pytest.mark.parametrize("ranks, policy", cells(POLICIES))
def test_a_column_has_the_value_of_one_rank_with_any_policy(on_ranks, ranks, policy):
    """It is the mean over micro-batches, chunks, ranks and modules that leave the same name."""
    (expected,) = on_ranks(1, fork_columns, "")
    found = on_ranks(int(ranks), fork_columns, policy)
    logit = statistics.fmean(values["logit"] for values in found)  # as in a row
    assert logit == pytest.approx(expected["logit"], rel=1e-4)
    assert {(values["is_high"], values["of_two"]) for values in found} == {(0, 2)}


@pytest.mark.parametrize("name", ["tokens", "data_wait_min"])
def test_a_column_of_a_row_cannot_be_replaced(tmp_path, one_rank, name):
    with pytest.raises(UsageError):
        make_log(tmp_path).row(1, 1000, 0.1, columns(**{name: 1.0}), data_wait=0.0)


# --------------------------------------------------------------------------------------------------
# Files that only grow


def test_a_start_makes_later_rows_void_and_removes_nothing(tmp_path, one_rank):
    file = tmp_path / "metrics.jsonl"
    log = make_log(tmp_path)
    log.start({"ranks": 1})
    for step in (1, 2, 3):
        log.evaluation(step, 2.5)
    before = file.read_bytes()
    again = make_log(tmp_path, step=2)
    again.start({"ranks": 2})
    assert [has_evaluation(tmp_path, step) for step in (1, 2, 3)] == [True, True, False]
    again.evaluation(3, 2.25)
    assert has_evaluation(tmp_path, 3)
    assert file.read_bytes().startswith(before)
    # The rows of parameters have the same starts.
    assert [row["step"] for row in read_rows(tmp_path / "optim.jsonl")] == [0, 2]


@pytest.mark.parametrize("torn", [b'{"step": 2, "loss": 3.25', b"\xff"])
def test_a_torn_row_is_left_out_and_the_next_one_has_a_line_of_its_own(tmp_path, one_rank, torn):
    """As kill -9 in the middle of a write leaves it. JSON has no nan."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + torn)
    log = make_log(tmp_path)
    for step in (2, 3):
        log.append(file.name, [{"step": step, "loss": float("nan")}])
    assert read_rows(file) == [{"step": 1}, *({"step": step, "loss": None} for step in (2, 3))]
