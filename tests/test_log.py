"""Rows of the log: their contents, and how they are written to disk."""

import os
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import build_run, rows, train_step

import dist
import log as logs
from errors import UsageError
from log import Log, has_evaluation, read_rows


def make_log(out: Path, step: int = 0) -> Log:
    run = SimpleNamespace(out=str(out), max_steps=100, tokens_per_step=1000)
    run.peak_tflops, run.optim_metrics_interval = 1.0, 1
    return Log(run, torch.device("cpu"), flops_per_token=2_000_000, step=step)


def columns(**changes: float) -> dict[str, torch.Tensor]:
    values = {"loss": 2.5, "grad_norm": 2.0, "skipped_in_a_row": 0} | changes
    return {name: torch.tensor(value) for name, value in values.items()}


def log_step(log: Log, step: int) -> None:
    log.row(step, 1000 * step, 0.1, columns(), data_wait=0.0)
    log.flush()


@pytest.fixture
def log(tmp_path, one_rank):
    """log(step=0): a log of one process."""
    return lambda **options: make_log(tmp_path, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_host_memory_is_in_bytes():
    """The peak is about this process's memory or more, and less than a terabyte."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = resident_pages * os.sysconf("SC_PAGE_SIZE")
    assert 0.9 * resident <= logs.peak_memory()[1] < 1e12


def test_step_times_do_not_depend_on_the_log_interval(log, tmp_path):
    """A row covers 3 steps of 1,000 tokens and 2e9 FLOPs each, and no pause."""
    the_log = log()
    time.sleep(0.3)
    log_step(the_log, 3)
    (row,) = rows(tmp_path)
    assert (row["step"], row["tokens"]) == (3, 3000)
    assert 0.1 <= row["step_time"] < 0.2
    assert row["tokens_per_second"] == pytest.approx(1000 / row["step_time"])
    assert row["tokens_per_second_per_device"] == row["tokens_per_second"]
    assert row["mfu"] == pytest.approx(row["tokens_per_second"] * 2e6 / 1e12)
    assert (row["loss"], row["grad_norm"], row["lr"]) == (2.5, 2.0, 0.1)
    with the_log.pause():
        time.sleep(0.5)
    time.sleep(0.02)
    log_step(the_log, 5)
    assert 0.01 <= rows(tmp_path)[-1]["step_time"] < 0.2


def rows_of_a_rank(out: Path) -> int:
    """Log two rows; return the peak of host memory. Rank 1 needs 300 MB more."""
    rank = dist.start("cpu").rank
    held = torch.ones(75_000_000 * rank)  # noqa: F841
    the_log = make_log(out)
    for step, loss in ((1, 2.0), (2, 5.0)):
        values = columns(loss=loss + rank, count=[0, 4, 1][rank])
        the_log.row(step, 1000 * step, 0.1, values, data_wait=10.0 * (1 + rank))
    the_log.flush()
    assert the_log.last_row["loss"] == 6.0
    return logs.peak_memory()[1]


def test_a_row_reduces_its_values_over_all_ranks(pool, tmp_path):
    peaks = pool(3, rows_of_a_rank, tmp_path)
    row, _ = rows(tmp_path)
    assert [row[name] for name in ("loss", "count", "lr")] == [3.0, pytest.approx(5 / 3), 0.1]
    assert (row["data_wait"], row["data_wait_min"]) == (30.0, 10.0)
    assert row["peak_host_memory"] == pytest.approx(max(peaks), rel=0.05)
    assert row["peak_host_memory_min"] == pytest.approx(min(peaks), rel=0.05)
    assert max(peaks) > min(peaks) + 2e8


class LoggedLoss(torch.nn.Module):
    """A loss that leaves the number of its call and its mean as columns of the log."""

    def __init__(self, loss: torch.nn.Module):
        super().__init__()
        self.loss = loss
        self.calls = 0

    def forward(self, x, weight, targets):
        summed = self.loss(x, weight, targets)
        self.calls += 1
        mean = summed.detach() / targets.numel()
        self.logged = {"our_mean": mean, "call": torch.tensor(float(self.calls))}
        return summed


def log_of_modules(argv: list[str]) -> list[dict]:
    """Two steps of a model with such a loss, and with two norms that leave 1.0 and 3.0.

    In a third step, a norm leaves a column that the log has already.
    """
    built = build_run(argv)
    decoder = built.state.decoder
    decoder.head.loss = LoggedLoss(decoder.head.loss)
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


class MeanLogit(torch.nn.Module):
    """The loss of the reference's example of a column, and a column of another dtype."""

    def forward(self, x, weight, targets):
        logits = F.linear(x, weight).float()
        self.logged = {"logit": logits.mean(), "is_high": logits.mean() > 1}
        return F.cross_entropy(logits, targets, reduction="sum")


def mean_logits(argv: list[str]) -> list[dict]:
    """The columns of two steps of a model with this loss."""
    built = build_run(argv)
    head = built.state.decoder.head
    if hasattr(head.loss, "chunks"):
        head.loss.loss = MeanLogit()
    else:
        head.loss = MeanLogit()
    found = []
    for step in (1, 2):
        values, _ = train_step(built, step)
        found.append({name: float(value) for name, value in values.items()})
    return found


# Flags and ranks
POLICIES = {
    "--loss_chunks 4": 1,
    "--loss_chunks 3 --micro_batch_size 1": 1,  # 16 tokens: unequal chunks
    "--strategy fsdp": 2,
    "--tp 2": 2,
    "--tp 2 --loss_chunks 2": 2,
    "--activation_checkpointing full --strategy ddp": 2,
}


@pytest.mark.parametrize("flags", POLICIES)
def test_a_column_has_the_value_of_one_rank_with_any_policy(on_ranks, flags):
    text = "--dtype float32 --global_batch_size 8 --n_layer 1"
    (expected,) = on_ranks(1, mean_logits, text)
    of_ranks = on_ranks(POLICIES[flags], mean_logits, f"{text} {flags}")
    for of_one, *found in zip(expected, *of_ranks, strict=True):
        logit = statistics.fmean(values["logit"] for values in found)  # as in a row
        assert logit == pytest.approx(of_one["logit"], rel=1e-4)
        assert {values["is_high"] for values in found} == {0}


@pytest.mark.parametrize("name", ["tokens", "lr", "step_time", "data_wait_min", "event"])
def test_a_column_of_a_row_cannot_be_replaced(log, name):
    with pytest.raises(UsageError):
        log().row(1, 1000, 0.1, columns(**{name: 1.0}), data_wait=0.0)


def test_modules_leave_columns_of_the_log(on_ranks):
    """A column is the mean over the micro-batches of a step, of a rank and of equal names."""
    text = "--strategy fsdp --global_batch_size 8 --micro_batch_size 2 --n_layer 2"
    for first, second in on_ranks(2, log_of_modules, text):
        assert first["call"] == 1.5 and second["call"] == 3.5
        assert first["of_two"] == second["of_two"] == 2.0
        for values in (first, second):
            assert values["our_mean"] == pytest.approx(values["loss"])


class LateEvent:
    """An event that a device which lags behind the host has not reached yet."""

    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, later: "LateEvent") -> float:
        return 500.0  # milliseconds


def test_a_row_is_written_once_its_values_have_arrived(log, tmp_path):
    """Until a pause, the host does not wait for a device that lags behind."""
    the_log = log()

    def leave(step: int, steps: int) -> LateEvent:
        """Leave a row on its way to the host, as `row` does on a GPU."""
        names = [*columns(), *logs.SPREADS]
        values = torch.zeros(1, len(names), dtype=torch.float64)
        row = {"step": step, "tokens": 0, "lr": 0.1}
        event = LateEvent()
        the_log.pending = logs.Pending(row, names, values, steps, LateEvent(), event)
        return event

    first = leave(step=1, steps=1)
    the_log.write_arrived_row()
    assert not (tmp_path / "metrics.jsonl").exists()
    first.passed = True
    the_log.write_arrived_row()
    assert [row["step_time"] for row in rows(tmp_path)] == [0.5]
    second = leave(step=6, steps=5)
    with the_log.pause():
        assert second.passed
        assert [row["step_time"] for row in rows(tmp_path)] == [0.5, 0.1]


def test_each_step_that_logs_evaluates_or_saves_writes_a_row(run):
    intervals = "--log_interval 4 --eval_interval 5 --save_interval 6"
    out = run(1, f"--max_steps 13 {intervals}")
    assert [row["step"] for row in rows(out)] == [1, 4, 5, 6, 8, 10, 12, 13]
    run(1, f"--max_steps 17 {intervals}")  # the first step of a process writes one as well
    assert [row["step"] for row in rows(out)][8:] == [14, 15, 16, 17]


def test_mfu_is_the_share_of_the_peak_of_a_device(log, tmp_path):
    log_step(log(), 1)
    (row,) = rows(tmp_path)
    assert row["mfu"] == pytest.approx(2e6 * row["tokens_per_second_per_device"] / 1e12)


def test_ranks_share_the_tokens_of_a_second_and_a_cpu_has_no_mfu(run):
    (row,) = rows(run(2, "--strategy ddp --max_steps 1"))
    assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2)
    assert row["mfu"] is None


# --------------------------------------------------------------------------------------------------
# Files that only grow


def test_a_start_makes_later_rows_void_and_removes_nothing(log, tmp_path):
    file = tmp_path / "metrics.jsonl"
    the_log = log()
    the_log.start({"ranks": 1})
    for step in (1, 2, 3):
        the_log.evaluation(step, 2.5)
    before = file.read_bytes()
    again = log(step=2)
    again.start({"ranks": 2})
    assert [has_evaluation(tmp_path, step) for step in (1, 2, 3)] == [True, True, False]
    again.evaluation(3, 2.25)
    assert has_evaluation(tmp_path, 3)
    assert file.read_bytes().startswith(before)
    assert [row["step"] for row in read_rows(file)] == [0, 1, 2, 3, 2, 3]
    assert [(row["step"], row["val_loss"]) for row in rows(tmp_path, "val_loss")] == [
        (1, 2.5),
        (2, 2.5),
        (3, 2.25),
    ]
    # The rows of parameters have the same starts.
    assert [row["step"] for row in read_rows(tmp_path / "optim.jsonl")] == [0, 2]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b'{"step": 2, "loss": 3.25', b"\xff", b"{"])
def test_a_torn_row_is_left_out_and_the_next_one_has_a_line_of_its_own(log, tmp_path, torn):
    """As kill -9 in the middle of a write leaves it."""
    file = tmp_path / "metrics.jsonl"
    the_log = log()
    the_log.append(file.name, [{"step": 1}])
    with open(file, "ab") as opened:
        opened.write(torn)
    assert read_rows(file) == [{"step": 1}]
    for step in (2, 3):
        the_log.append(file.name, [{"step": step, "loss": float("nan")}])
    assert read_rows(file) == [{"step": 1}, *({"step": step, "loss": None} for step in (2, 3))]
