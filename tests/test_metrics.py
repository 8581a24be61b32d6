"""Rows of the log: their contents, and how they are written to disk."""

import dataclasses
import json
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import build_model, listen, rows
from test_train import signal_in_step_2

import dist
import metrics
import train
from config import Config
from model import ModelConfig


def make_log(out, start_step: int = 0) -> metrics.Log:
    c = Config(max_steps=100, max_skipped=3)
    rates = metrics.Rates(torch.device("cpu"), 1000, flops_per_token=2e6, peak_flops=1e12)
    return metrics.Log(out, c, rates, start_step, datetime.fromtimestamp(1000, UTC))


def log_step(the_log: metrics.Log, step: int, loss: float = 2.5, **changes: float) -> None:
    values = {"grad_norm": 2.0, "clipped": 1, "skipped_steps": 5, "skipped_in_a_row": 0, "lr": 0.1}
    equal = {name: metrics.Maximum(value) for name, value in (values | changes).items()}
    the_log.send_row(step, {"loss": torch.tensor(loss), **equal})


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_host_memory_is_in_bytes():
    """The peak is about this process's memory or more, and less than a terabyte."""
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident = resident_pages * os.sysconf("SC_PAGE_SIZE")
    assert 0.9 * resident <= metrics.peak_memory(torch.device("cpu"))["peak_host_memory"] < 1e12


@pytest.fixture
def clock(monkeypatch):
    """clock(seconds): set all clocks to this time; they do not advance."""

    def set_to(seconds: float) -> None:
        fake = mock.Mock(wraps=datetime)
        fake.now.return_value = datetime.fromtimestamp(seconds, UTC)
        monkeypatch.setattr(metrics, "datetime", fake)
        for name in ("perf_counter", "time"):
            monkeypatch.setattr(metrics.time, name, lambda: seconds)

    set_to(1000.0)
    return set_to


@pytest.fixture
def log(tmp_path, one_rank, clock):
    """log(start_step=0): a log of one process."""
    return lambda **settings: make_log(tmp_path, **settings)


def test_step_times_do_not_depend_on_the_log_interval(log, tmp_path, clock):
    """A row covers 6 seconds: 3 steps of 1,000 tokens and 2e9 FLOPs each."""
    the_log = log()
    clock(1006)
    log_step(the_log, 3)
    (row,) = rows(tmp_path)
    assert (row["step"], row["tokens"], row["step_time"]) == (3, 3000, 2.0)
    assert (row["tokens_per_second"], row["tokens_per_second_per_device"]) == (500.0, 500.0)
    assert row["mfu"] == pytest.approx(500 * 2e6 / 1e12)
    assert (row["loss"], row["grad_norm"], row["lr"]) == (2.5, 2.0, 0.1)
    assert (row["clipped"], row["skipped_steps"]) == (1, 5)
    with the_log.pause():  # not part of a step
        clock(1050)
    clock(1051)
    log_step(the_log, 5)
    assert rows(tmp_path)[-1]["step_time"] == 0.5


def log_of_a_rank(out) -> float:
    """Log two rows, and return the last loss. Rank 1 has larger values, but less device memory."""
    rank = dist.start("cpu").rank
    memory = {"peak_device_memory": 500 - rank, "peak_host_memory": 700 + rank}
    memory |= {"peak_reserved_memory": 600 - rank, "allocation_retries": 2 + rank}
    the_log = make_log(out)
    with mock.patch.object(metrics, "peak_memory", lambda device: memory):
        log_step(the_log, 1, 2.0 + rank, grad_norm=3.0 + rank)
        log_step(the_log, 2, 5.0 + rank)
    return the_log.last_row["loss"]


def test_a_row_reduces_its_values_over_all_ranks(pool, tmp_path):
    assert pool(2, log_of_a_rank, tmp_path) == [5.5, 5.5]
    row, _ = rows(tmp_path)
    assert (row["loss"], row["grad_norm"], row["lr"]) == (2.5, 4.0, 0.1)
    assert (row["peak_device_memory"], row["peak_host_memory"]) == (500, 701)
    assert (row["peak_reserved_memory"], row["allocation_retries"]) == (600, 3)


def train_a_fork(argv: list[str]) -> tuple[int, str, str]:
    """Run train.py with extra columns and waits for data, which both differ between ranks."""
    rank = int(os.environ["RANK"])
    train_step, read = train.train_step, train.MicroBatches.__next__

    def forked_step(*arguments):
        values, table = train_step(*arguments)
        spread = torch.tensor([10.0, 14.0, 11.0][rank])
        values["spread"] = metrics.Maximum(spread)
        values["spread_min"] = metrics.Minimum(spread)
        values["spread_mean"] = spread
        values["count"] = metrics.Maximum(torch.tensor(rank))
        values["count_mean"] = torch.tensor([0, 4, 1][rank])
        values["constant"] = metrics.Minimum(7)
        return values, table

    def read_slowly(batches):
        batches.waited += 100 + 100 * rank
        return read(batches)

    with (
        mock.patch.object(train, "train_step", forked_step),
        mock.patch.object(train.MicroBatches, "__next__", read_slowly),
    ):
        return listen(argv)


def test_a_fork_chooses_how_its_columns_are_reduced(on_ranks, tmp_path):
    """The run logs rows after steps 1, 2, 4 and 5, and evaluates after step 4."""
    text = "--strategy ddp --max_steps 5 --eval_interval 4 --log_interval 2 --lr 0.1"
    text += " --global_batch_size 9 --micro_batch_size 3 --schedule constant"
    for status, _, _ in on_ranks(3, train_a_fork, text):
        assert status == 0
    log = rows(tmp_path / "run")
    assert [row["step"] for row in log] == [1, 2, 4, 5]
    for row in log:
        names = ("spread", "spread_min", "spread_mean", "count", "count_mean", "constant")
        assert [row[name] for name in names] == [14.0, 10.0, 35 / 3, 2, 5 / 3, 7]
        kinds = [type(row[name]) for name in ("spread", "count", "constant", "clipped")]
        assert kinds == [float, int, int, int]
        assert row["lr"] == 0.1  # exact: a mean of three equal values may be rounded
    # A row adds up the waits of the steps since the row before.
    for name, of_a_step in {"data_wait": 300, "data_wait_min": 100}.items():
        waits = [of_a_step * steps for steps in (1, 1, 2, 1)]
        assert [row[name] for row in log] == pytest.approx(waits, abs=20)


def test_the_console_prints_a_line_for_each_row(log, capsys, clock):
    the_log = log()
    clock(1002)
    log_step(the_log, 4)
    line = (
        "step   4/100    4%  loss 2.5000  grad_norm 2.000  lr 1.00e-01  500 ms  2,000 tok/s  "
        "mfu 0.4%"
    )
    assert capsys.readouterr().out == f"{line}\n"  # no time left: the first step may compile
    clock(1003.27)
    log_step(the_log, 6)  # 94 steps of 0.635 s
    assert capsys.readouterr().out.endswith("  1m00s left\n")


def test_the_console_prints_how_long_a_save_took(log, capsys):
    the_log = log()
    row = {"event": "checkpoint", "step": 4, "path": "here", "bytes": 2_500_000, "seconds": 1.5}
    the_log.checkpoint(row | {"blocking_seconds": 1.5})
    the_log.checkpoint(row | {"blocking_seconds": 0.25})
    line = "step   4/100  saved here: 2.5 MB in 1.50 s"
    assert capsys.readouterr().out == f"{line}\n{line}, of which training waited 0.25 s\n"


class LateEvent:
    """An event that a device which lags behind the host has not reached yet."""

    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True

    def elapsed_time(self, later: "LateEvent") -> float:
        return 500.0  # milliseconds


def test_a_row_is_written_once_its_values_have_arrived(log, tmp_path, clock):
    """Until a pause, the host does not wait for a device that lags behind."""
    the_log = log()
    meter = the_log.meter
    meter.rates = dataclasses.replace(meter.rates, device=torch.device("meta"))
    clock(1001)
    for step, written in ((1, 0), (4, 1)):
        meter.began.event = LateEvent()
        log_step(the_log, step)
        meter.began.event = ended = LateEvent()
        the_log.write_arrived_row()
        assert (tmp_path / "metrics.jsonl").exists() == (written > 0)
        if step == 1:
            ended.passed = True
            the_log.write_arrived_row()
            assert [row["step_time"] for row in rows(tmp_path)] == [0.5]
    with the_log.pause():
        assert ended.passed
        assert meter.pending is None
        assert len(rows(tmp_path)) == 2


def test_each_step_that_logs_evaluates_or_saves_writes_a_row(run):
    intervals = "--log_interval 4 --eval_interval 5 --save_interval 6"
    out = run(1, f"--max_steps 13 {intervals}")
    assert [row["step"] for row in rows(out)] == [1, 4, 5, 6, 8, 10, 12, 13]
    run(1, f"--max_steps 17 {intervals}")  # the first step of a process writes one as well
    assert [row["step"] for row in rows(out)][8:] == [14, 15, 16, 17]


def stop_with_rows_in_flight(argv: list[str]) -> tuple[int, str, str]:
    """Run train.py, signal it in step 2, and let rows arrive late, as they may on a GPU."""

    def send_row(log, step, values):
        log.flush()
        log.meter.send_row(step, values)

    with (
        mock.patch.object(metrics.Log, "send_row", send_row),
        mock.patch.object(metrics.Log, "write_arrived_row", lambda log: None),
    ):
        return signal_in_step_2(argv, max_restarts="0")


def test_a_stop_without_a_save_writes_the_last_row(on_ranks, tmp_path):
    ((status, _, _),) = on_ranks(1, stop_with_rows_in_flight, "--max_steps 9 --checkpoint none")
    assert (status, [row["step"] for row in rows(tmp_path / "run")]) == (os.EX_TEMPFAIL, [1, 2, 3])


def test_too_many_skipped_updates_in_a_row_end_the_run(log, tmp_path, clock):
    the_log = log()
    clock(1001)
    log_step(the_log, 7, math.nan, skipped_in_a_row=2)
    clock(1002)
    with pytest.raises(metrics.Diverged, match="3 updates in a row were skipped up to step 8"):
        log_step(the_log, 8, math.nan, skipped_in_a_row=3)
    # The last row is still written. JSON has no nan.
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(7, None), (8, None)]


NOTES = [b'{"note": "lr looks high"}', b"12", b"# \xff", b'{"event": "pause", "time": 12.5}']


def test_a_continued_run_drops_only_rows_after_its_checkpoint(log, tmp_path):
    """Lines that a user has added to the log stay in it."""
    the_log = log()
    for step in (1, 2, 3):
        the_log.evaluation(step, 2.5)
    file = tmp_path / "metrics.jsonl"
    first, second, third = file.read_bytes().splitlines()
    kept = [first, *NOTES[:2], second, *NOTES[2:]]
    file.write_bytes(b"\n".join([*kept, third, b'{"step": 3, "lo']))
    read = metrics.read_log(file)
    assert read == [json.loads(line) for line in (first, second, third)]
    log(start_step=2)
    assert file.read_bytes().splitlines()[: len(kept)] == kept
    assert metrics.read_log(file) == read[:2]


def test_a_continued_run_drops_later_rows_of_parameters(log, tmp_path):
    lines = [json.dumps({"step": step, "parameter": "w"}) + "\n" for step in (3, 4)]
    (tmp_path / "optim.jsonl").write_text("".join(lines))
    log(start_step=3)
    assert (tmp_path / "optim.jsonl").read_text() == lines[0]


def test_goodput_excludes_lost_steps_across_restarts(log, tmp_path, clock, capsys):
    """A restart from step 3 keeps 4 useful seconds, and loses the 7 s of steps 4 and 5."""
    the_log = log()
    for now, step in ((1003, 1), (1004, 3), (1010, 4)):
        clock(now)
        log_step(the_log, step)
        the_log.evaluation(step, 3.0)  # a row without goodput
    with the_log.pause():
        clock(1020)
    clock(1021)
    log_step(the_log, 5)
    assert [row["goodput"] for row in rows(tmp_path)] == [1.0, 1.0, 1.0, pytest.approx(11 / 21)]
    assert [row["useful_seconds"] for row in rows(tmp_path)] == [3, 4, 10, 11]

    clock(1067)
    again = log(start_step=3)
    clock(1070)
    log_step(again, 5)
    last = rows(tmp_path)[-1]
    assert (last["useful_seconds"], last["goodput"]) == (7.0, pytest.approx(7 / 70))
    assert len(rows(tmp_path)) == 3
    capsys.readouterr()
    again.say(again.goodput())
    line = (
        "goodput 10%: 7 of the 70 s since the first start were training steps, lost steps excluded"
    )
    assert capsys.readouterr().out == f"{line}\n"
    now = datetime.fromtimestamp(1100, UTC)  # without starts.jsonl, this start counts as the first
    rates = again.meter.rates
    assert metrics.Log(tmp_path, again.run, rates, 5, now).meter.useful_seconds == 0


def test_training_continues_if_a_row_cannot_be_written(log, tmp_path, capsys):
    the_log = log()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    the_log.evaluation(1, 4.0)
    assert "metrics.jsonl: [Errno 28] No space left on device" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").unlink()
    the_log.evaluation(2, 3.0)
    assert [row["step"] for row in rows(tmp_path, "val_loss")] == [2]


def as_on_an_h200(argv: list[str]) -> tuple[int, str, str]:
    """Run train.py on a CPU that has the name of a GPU."""
    with mock.patch.object(dist, "device_name", lambda device: "NVIDIA H200"):
        return listen(argv)


def test_mfu_uses_the_known_peak_or_peak_tflops(on_ranks, tmp_path):
    """The peak of an H200 is known for bfloat16 only: 989 TFLOP/s."""
    cases = {"known": 989e12, "other --peak_tflops 0.5": 0.5e12, "none --dtype float32": None}
    for name, peak in cases.items():
        text = f"--strategy ddp --max_steps 1 --dtype bfloat16 --out {tmp_path}/{name}"
        (status, _, _), _ = on_ranks(2, as_on_an_h200, text)
        assert status == 0
        folder = tmp_path / name.split()[0]
        config = ModelConfig(**json.loads((folder / "starts.jsonl").read_text())["model"])
        (row,) = rows(folder)
        flops = row["tokens_per_second"] * build_model(config).flops_per_token(config.seq_len)
        of_peak = peak and pytest.approx(flops / (2 * peak))  # both devices at their peak
        assert row["mfu"] == of_peak
        assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2)
