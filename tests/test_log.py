"""Rows of the log: their contents, and how they are written to disk."""

import dataclasses
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from conftest import build_run, rows, train_step

import dist
import log as logs
import train
from config import Config
from log import Appender, Diverged, Log
from model import ModelConfig, meta_model


def make_log(out, step: int = 0, **options) -> Log:
    run = Config(max_steps=100, max_skipped=3, peak_tflops=1.0)
    options |= {"flops_per_token": 2e6, "step": step, "tokens": 1000 * step}
    return Log(out, run, torch.device("cpu"), **options)


def log_step(log: Log, step: int, loss: float = 2.5, **changes: float) -> None:
    values = {"grad_norm": 2.0, "clipped": 1, "skipped_steps": 5, "skipped_in_a_row": 0, "lr": 0.1}
    log.row(step, 1000 * step, mean={"loss": torch.tensor(loss)}, equal=values | changes)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_host_memory_is_in_bytes():
    """The peak is about this process's memory or more, and less than a terabyte."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = resident_pages * os.sysconf("SC_PAGE_SIZE")
    assert 0.9 * resident <= logs.peak_memory(torch.device("cpu"))["peak_host_memory"] < 1e12


@pytest.fixture
def log(tmp_path, one_rank):
    """log(step=0): a log of one process."""
    return lambda **settings: make_log(tmp_path, **settings)


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
    assert (row["clipped"], row["skipped_steps"]) == (1, 5)
    with the_log.pause():
        time.sleep(0.5)
    time.sleep(0.02)
    log_step(the_log, 5)
    assert 0.01 <= rows(tmp_path)[-1]["step_time"] < 0.2


def rows_of_a_rank(out) -> tuple[float, int]:
    """Log two rows; return the last loss and the peak of host memory. Rank 1 needs 300 MB more."""
    rank = dist.start("cpu").rank
    held = torch.ones(75_000_000 * rank)  # noqa: F841
    the_log = make_log(out)
    for step, loss in ((1, 2.0), (2, 5.0)):
        mean = {"loss": torch.tensor(loss + rank), "count": torch.tensor([0, 4, 1][rank])}
        values = {"clipped": 1, "skipped_steps": 5, "skipped_in_a_row": 0, "lr": 0.1}
        equal = values | {"grad_norm": 3.0 + rank, "last_rank": torch.tensor(rank)}
        the_log.row(step, 1000 * step, mean, equal, spread={"data_wait": 10.0 * (1 + rank)})
    return the_log.last_row["loss"], logs.peak_memory(torch.device("cpu"))["peak_host_memory"]


def test_a_row_reduces_its_values_over_all_ranks(pool, tmp_path):
    answers = pool(3, rows_of_a_rank, tmp_path)
    assert [loss for loss, _ in answers] == [6.0] * 3
    row, _ = rows(tmp_path)
    found = [row[name] for name in ("loss", "count", "grad_norm", "last_rank", "lr")]
    assert found == [3.0, 5 / 3, 5.0, 2, 0.1]  # lr is exact: a mean of three may be rounded
    kinds = [type(row[name]) for name in ("count", "grad_norm", "last_rank", "clipped")]
    assert kinds == [float, float, int, int]
    assert (row["data_wait"], row["data_wait_min"]) == (30.0, 10.0)
    peaks = [peak for _, peak in answers]
    assert row["peak_host_memory"] == pytest.approx(max(peaks), rel=0.02)
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
    """Two steps of a model with such a loss, and with two norms that leave 1.0 and 3.0."""
    built = build_run(argv)
    decoder = built.state.decoder
    decoder.head.loss = LoggedLoss(decoder.head.loss)
    for value, block in zip((1.0, 3.0), decoder.blocks, strict=True):
        block.mlp_norm.logged = {"of_two": torch.tensor(value)}
    found = []
    for step in (1, 2):
        columns, _ = train_step(built, step)
        found.append({name: float(value) for name, value in columns["mean"].items()})
    return found


def test_modules_leave_columns_of_the_log(on_ranks):
    """A column is the mean over the micro-batches of a step, of a rank and of equal names."""
    text = "--strategy fsdp --global_batch_size 8 --micro_batch_size 2 --n_layer 2"
    for first, second in on_ranks(2, log_of_modules, text):
        assert first["call"] == 1.5 and second["call"] == 3.5
        assert first["of_two"] == second["of_two"] == 2.0
        for columns in (first, second):
            assert columns["our_mean"] == pytest.approx(columns["loss"])


def test_the_console_prints_a_line_for_each_row():
    row = {"step": 4, "loss": 2.5, "grad_norm": 2.0, "lr": 0.1, "step_time": 0.5, "mfu": 0.004}
    row |= {"tokens_per_second": 2000.0}
    line = "  4%  loss 2.5000  grad_norm 2.000  lr 1.00e-01  500 ms  2,000 tok/s"
    assert logs.console_line(row | {"mfu": None}, 100, None) == line
    assert logs.console_line(row, 100, None) == f"{line}  mfu 0.4%"
    assert logs.console_line(row, 100, 59.7) == f"{line}  mfu 0.4%  1m00s left"


def test_the_console_estimates_the_time_left_from_the_second_row_on(log, capsys):
    """The first step of a process may compile."""
    the_log = log()
    for step, ends in ((4, " tok/s"), (6, "s left")):
        time.sleep(0.01)
        log_step(the_log, step)
        said = capsys.readouterr().out
        assert said.startswith(f"step   {step}/100  ")
        assert ("s left" in said) == (ends == "s left")


def test_the_console_prints_how_long_a_save_took(log, capsys):
    the_log = log()
    row = {"event": "checkpoint", "step": 4, "path": "here", "bytes": 2_500_000, "seconds": 1.5}
    the_log.checkpoints([row | {"blocking_seconds": waited} for waited in (1.5, 0.25)])
    line = "step   4/100  saved here: 2.5 MB in 1.50 s"
    assert capsys.readouterr().out == f"{line}\n{line}, of which training waited 0.25 s\n"


def test_a_tracker_gets_training_rows_and_evaluations(log):
    sent = []
    the_log = log()
    the_log.send = sent.append
    the_log.mark = dataclasses.replace(the_log.mark, host_time=999.0)
    log_step(the_log, 1)
    the_log.evaluation(1, 4.0)
    failed = {"step": 1, "event": "checkpoint_failed", "path": "here", "error": "full"}
    the_log.checkpoints([failed])
    the_log.end(1, "finished")
    assert [row.get("loss") or row["val_loss"] for row in sent] == [2.5, 4.0]


@pytest.mark.parametrize("loss, weight, finite", [(2.0, 1.0, True), (math.nan, 1.0, False)])
def test_a_save_needs_a_finite_loss(one_rank, loss, weight, finite):
    tensors = {"model": {"w": torch.full((2,), weight)}}
    state = train.State(1, 0, None, None, None, tensors, torch.tensor(loss))
    assert train.is_finite(state) == finite


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
    marks = [logs.Mark(step, 0, float(step), LateEvent()) for step in (0, 1, 4)]

    def gather_late(mark: logs.Mark) -> LateEvent:
        """As `row` does on a GPU: a row is on its way to the host."""
        values = {"loss": 2.5, "grad_norm": 2.0, "lr": 0.1, "skipped_in_a_row": 0}
        columns = {name: (max, False) for name in values}
        numbers = torch.tensor([[*values.values()]], dtype=torch.float64)
        begin, the_log.mark = the_log.mark, mark
        the_log.pending = logs.Pending(begin, mark, columns, numbers)
        return mark.event

    the_log.mark = marks[0]
    first = gather_late(marks[1])
    the_log.write_arrived_row()
    assert not (tmp_path / "metrics.jsonl").exists()
    first.passed = True
    the_log.write_arrived_row()
    assert [row["step_time"] for row in rows(tmp_path)] == [0.5]
    second = gather_late(marks[2])
    with the_log.pause():
        assert second.passed
        assert the_log.pending is None
        assert len(rows(tmp_path)) == 2


def test_each_step_that_logs_evaluates_or_saves_writes_a_row(run):
    intervals = "--log_interval 4 --eval_interval 5 --save_interval 6"
    out = run(1, f"--max_steps 13 {intervals}")
    assert [row["step"] for row in rows(out)] == [1, 4, 5, 6, 8, 10, 12, 13]
    run(1, f"--max_steps 17 {intervals}")  # the first step of a process writes one as well
    assert [row["step"] for row in rows(out)][8:] == [14, 15, 16, 17]


def test_too_many_skipped_updates_in_a_row_end_the_run(log, tmp_path):
    the_log = log()
    log_step(the_log, 7, math.nan, skipped_in_a_row=2)
    with pytest.raises(Diverged, match="3 updates in a row were skipped up to step 8"):
        log_step(the_log, 8, math.nan, skipped_in_a_row=3)
    # The last row is still written. JSON has no nan.
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(7, None), (8, None)]


# --------------------------------------------------------------------------------------------------
# Files that only grow

NOTES = [b'{"note": "lr looks high"}', b"12", b'{"event": "pause", "time": 12.5}']


def test_a_start_makes_later_rows_void_and_removes_nothing(log, tmp_path):
    """Lines that a user has added to the log stay in it as well."""
    file = tmp_path / "metrics.jsonl"
    the_log = log()
    the_log.start({"host": "a"})
    for step in (1, 2, 3):
        the_log.evaluation(step, 2.5)
    with open(file, "ab") as added:
        added.write(b"\n".join(NOTES))  # the last one without a newline
    before = file.read_bytes()
    again = log(step=2)
    again.start({"host": "b"})
    again.evaluation(3, 2.25)
    assert file.read_bytes().startswith(before + b"\n")
    read, torn = logs.read_all_rows(file)
    assert torn == 0 and [row["step"] for row in read] == [0, 1, 2, 3, 2, 3]
    found = [(row["step"], row["val_loss"]) for row in logs.read_log(file)]
    assert found == [(1, 2.5), (2, 2.5), (3, 2.25)]
    starts = logs.read_starts(tmp_path)
    assert [(start["step"], start["host"]) for start in starts] == [(0, "a"), (2, "b")]


def test_rows_of_parameters_become_void_with_their_steps(log, tmp_path):
    for step, logged in ((0, (3, 4)), (3, (4,))):
        the_log = log(step=step)
        the_log.run = dataclasses.replace(the_log.run, optim_metrics_interval=1)
        the_log.start({})
        for number in logged:
            the_log.parameters(number, [{"parameter": "w", "began": step}])
    found = [(row["step"], row["began"]) for row in logs.read_log(tmp_path / "optim.jsonl")]
    assert found == [(3, 0), (4, 3)]


@pytest.mark.parametrize("torn", [b'{"step": 2, "lo', b'{"step": 2, "loss": 3.25', b"\xff", b"{"])
def test_a_torn_row_is_cut_before_the_next_one_is_written(tmp_path, torn):
    """As kill -9 in the middle of a write leaves it."""
    file = tmp_path / "metrics.jsonl"
    row = {"step": 1}
    Appender(file).append([row])
    with open(file, "ab") as opened:
        opened.write(torn)
    assert logs.read_all_rows(file) == ([row], 1)
    again = Appender(file)
    for step in (2, 3):
        again.append([{"step": step}])
    assert logs.read_all_rows(file) == ([{"step": 1}, {"step": 2}, {"step": 3}], 0)


def test_rows_after_a_full_disk_begin_on_a_line_of_their_own(log, small_disk, capsys):
    """Half of a row fits; then the other file is removed."""
    the_log = log()
    file, other = small_disk / "metrics.jsonl", small_disk / "other"
    the_log.file = Appender(file)
    the_log.evaluation(1, 4.0)
    other.write_bytes(bytes(500_000))
    with suppress(OSError), open(other, "ab", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 12))
    for step in range(2, 200):  # more than the last block of the file has room for
        the_log.evaluation(step, 3.0)
    assert f"cannot write {file}: No space left on device" in capsys.readouterr().out
    other.unlink()
    the_log.evaluation(200, 2.0)
    logged = [row["step"] for row in logs.read_log(file)]
    assert logged == [*range(1, len(logged)), 200] and len(logged) > 1


def test_mfu_is_the_share_of_the_peak_of_all_devices(run):
    out = run(2, "--strategy ddp --max_steps 1 --peak_tflops 0.5")
    config = ModelConfig(**logs.read_starts(out)[0]["model"])
    (row,) = rows(out)
    flops = row["tokens_per_second"] * meta_model(config).flops_per_token()
    assert row["mfu"] == pytest.approx(flops / (2 * 0.5e12))
    assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2)
