"""Rows of the log: their contents, and how they are written to disk."""

import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from old import rows
from rig import build_run, train_step

import dist
import log as logs
from errors import UsageError
from log import Log, has_evaluation, read_rows


def make_log(out: Path, step: int = 0, kind: type[Log] = Log) -> Log:
    run = SimpleNamespace(out=str(out), max_steps=100, tokens_per_step=1000)
    run.peak_tflops, run.optim_metrics_interval = 1.0, 1
    return kind(run, torch.device("cpu"), flops_per_token=2_000_000, step=step)


def columns(**changes: float) -> dict[str, torch.Tensor]:
    values = {"loss": 2.5, "grad_norm": 2.0, "skipped_in_a_row": 0} | changes
    return {name: torch.tensor(value) for name, value in values.items()}


# --------------------------------------------------------------------------------------------------
# Values


def test_step_times_do_not_depend_on_the_log_interval(tmp_path, one_rank):
    """A row covers 3 steps of 1,000 tokens and 2e9 FLOPs each, and no pause."""
    log = make_log(tmp_path)
    time.sleep(0.3)
    log.row(3, 3000, 0.1, columns(), data_wait=0.0)
    with log.pause():
        time.sleep(0.5)
    time.sleep(0.02)
    log.row(5, 5000, 0.1, columns(), data_wait=0.0)
    log.flush()
    row, later = rows(tmp_path)
    assert 0.1 <= row["step_time"] < 0.2
    assert 0.01 <= later["step_time"] < 0.2
    assert row["tokens_per_second"] == pytest.approx(1000 / row["step_time"])
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 2e6 / 1e12)
    assert (row["loss"], row["grad_norm"], row["lr"]) == (2.5, 2.0, 0.1)


class LateEvent:
    """An event that a device which lags behind the host has not reached yet."""

    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, later: "LateEvent") -> float:
        return 500.0  # milliseconds


class LateLog(Log):
    def record_event(self) -> LateEvent:
        return LateEvent()


def test_a_row_is_written_once_its_values_have_arrived(tmp_path, one_rank):
    """Until a pause, the host does not wait for a device that lags behind."""
    log = make_log(tmp_path, kind=LateLog)
    log.row(1, 1000, 0.1, columns(), data_wait=0.0)
    log.write_arrived_row()
    assert not (tmp_path / "metrics.jsonl").exists()
    log.begin.passed = True  # the end of the first row
    log.write_arrived_row()
    assert len(rows(tmp_path)) == 1
    log.row(6, 6000, 0.1, columns(), data_wait=0.0)
    with log.pause():
        assert [row["step_time"] for row in rows(tmp_path)][1:] == [0.1]


def rows_of_a_rank(out: Path) -> int:
    """Log a row; return the peak of host memory. Rank 1 needs 300 MB more."""
    rank = dist.start("cpu").rank
    held = torch.ones(75_000_000 * rank)  # noqa: F841
    log = make_log(out)
    values = columns(loss=2.0 + rank, count=[0, 4, 1][rank])
    log.row(1, 1000, 0.1, values, data_wait=10.0 * (1 + rank))
    log.flush()
    return logs.peak_memory()[1]


def test_a_row_reduces_its_values_over_all_ranks(pool, tmp_path):
    peaks = pool(3, rows_of_a_rank, tmp_path)
    (row,) = rows(tmp_path)
    assert [row[name] for name in ("loss", "count", "lr")] == [3.0, pytest.approx(5 / 3), 0.1]
    assert (row["data_wait"], row["data_wait_min"]) == (30.0, 10.0)
    assert row["peak_host_memory"] == pytest.approx(max(peaks), rel=0.05)
    assert row["peak_host_memory_min"] == pytest.approx(min(peaks), rel=0.05)
    assert max(peaks) > min(peaks) + 2e8
    per_device = row["tokens_per_second_per_device"]
    assert per_device == pytest.approx(row["tokens_per_second"] / 3)


def test_the_first_step_of_a_process_writes_a_row(run):
    intervals = "--log_interval 4 --eval_interval 5 --save_interval 6"
    out = run(1, f"--max_steps 8 {intervals}")
    assert [row["step"] for row in rows(out)] == [1, 4, 5, 6, 8]
    run(1, f"--max_steps 11 {intervals}")
    assert [row["step"] for row in rows(out)][5:] == [9, 10, 11]


def test_a_row_is_written_before_the_save_and_the_evaluation_of_its_step(run):
    """So neither is a part of a step time: see Log.pause."""
    out = run(1, "--max_steps 2 --save_interval 1 --eval_interval 1")
    kinds = ("loss", "blocking_seconds", "val_loss")
    found = [(row["step"], *(kind for kind in kinds if kind in row)) for row in rows(out, "step")]
    assert found == [(0,), *((step, kind) for step in (1, 2) for kind in kinds)]


# --------------------------------------------------------------------------------------------------
# Columns of a fork


class MeanLogit(torch.nn.Module):
    """The loss of the reference's example of a column, and a column of another dtype."""

    def forward(self, x, weight, targets):
        logits = F.linear(x, weight).float()
        self.logged = {"logit": logits.mean(), "is_high": logits.mean() > 1}
        return F.cross_entropy(logits, targets, reduction="sum")


def fork_columns(argv: list[str]) -> list[dict]:
    """The columns of two steps of a model with this loss, and with norms that leave 1.0 and 3.0.

    In a third step, a norm leaves a column that the log has already.
    """
    built = build_run(argv)
    decoder = built.state.decoder
    owner = decoder.head.loss if hasattr(decoder.head.loss, "chunks") else decoder.head
    owner.loss = MeanLogit()
    for value, block in zip((1.0, 3.0), decoder.blocks, strict=True):
        block.mlp_norm.logged = {"of_two": torch.tensor(value)}
    found = []
    for step in (1, 2):
        values, _ = train_step(built, step)
        found.append({name: float(value) for name, value in values.items()})
    decoder.norm.logged = {"grad_norm": torch.tensor(1.0)}
    with pytest.raises(UsageError):
        train_step(built, 3)
    return found


# ranks, flags
POLICIES = """\
1 --loss_chunks 3 --micro_batch_size 1
2 --strategy fsdp --micro_batch_size 2
2 --tp 2 --loss_chunks 2
2 --activation_checkpointing full --strategy ddp
"""


@pytest.mark.parametrize("row", POLICIES.splitlines())
def test_a_column_has_the_value_of_one_rank_with_any_policy(on_ranks, row):
    """It is the mean over micro-batches, chunks, ranks and modules that leave the same name."""
    ranks, policy = row.split(maxsplit=1)
    (expected,) = on_ranks(1, fork_columns, "--dtype float32")
    of_ranks = on_ranks(int(ranks), fork_columns, f"--dtype float32 {policy}")
    for of_one, *found in zip(expected, *of_ranks, strict=True):
        logit = statistics.fmean(values["logit"] for values in found)  # as in a row
        assert logit == pytest.approx(of_one["logit"], rel=1e-4)
        assert {(values["is_high"], values["of_two"]) for values in found} == {(0, 2)}


@pytest.mark.parametrize("name", ["tokens", "step_time", "data_wait_min", "event"])
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
    assert [row["step"] for row in read_rows(file)] == [0, 1, 2, 3, 2, 3]
    # The rows of parameters have the same starts.
    assert [row["step"] for row in read_rows(tmp_path / "optim.jsonl")] == [0, 2]


@pytest.mark.parametrize("torn", [b'{"step": 2, "loss": 3.25', b"\xff"])
def test_a_torn_row_is_left_out_and_the_next_one_has_a_line_of_its_own(tmp_path, one_rank, torn):
    """As kill -9 in the middle of a write leaves it."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + torn)
    assert read_rows(file) == [{"step": 1}]
    log = make_log(tmp_path)
    for step in (2, 3):
        log.append(file.name, [{"step": step, "loss": float("nan")}])
    assert read_rows(file) == [{"step": 1}, *({"step": step, "loss": None} for step in (2, 3))]
