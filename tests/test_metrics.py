"""Rows of the log: what they say, and how they get to disk."""

import dataclasses
import json
import math
import os
from datetime import UTC, datetime
from unittest import mock

import pytest
import torch
from conftest import flags, listen, rows

import dist
import metrics
from config import Config
from model import ModelConfig, build_model
from runtime import report


def make_log(out, **changes) -> metrics.Log:
    settings = {"last_step": 0, "first_start": datetime.fromtimestamp(0, UTC)}
    c = Config(max_steps=100, max_skipped=3)
    rates = metrics.Rates(torch.device("cpu"), 1000, flops_per_token=2e6, peak_flops=1e12)
    return metrics.Log(out, c, rates, **settings | changes)


def device_metrics(
    loss: float, skipped_in_a_row: int = 0, grad_norm: float = 2.0
) -> dict[str, torch.Tensor]:
    values = {
        "loss": loss,
        "grad_norm": grad_norm,
        "clipped": 1.0,
        "skipped_steps": 5.0,
        "skipped_in_a_row": float(skipped_in_a_row),
    }
    return {name: torch.tensor(value) for name, value in values.items()} | {"lr": 0.1}


def log_step(the_log: metrics.Log, step: int, values: dict[str, torch.Tensor]) -> None:
    the_log.step(step, values, stops=True)


@pytest.fixture
def log(tmp_path, monkeypatch):
    """log(**settings): a log of one process, whose clock stands still."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    dist.start("cpu")
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 100.0)
    yield lambda **settings: make_log(tmp_path, **settings)
    dist.stop()


def test_times_are_those_of_a_step_whatever_the_interval(log, tmp_path, monkeypatch):
    """6 seconds over 3 steps of 1,000 tokens and 2e9 FLOPs."""
    the_log = log()
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 106.0)
    log_step(the_log, 3, device_metrics(2.5))
    (row,) = rows(tmp_path)
    assert (row["step"], row["tokens"], row["step_time"]) == (3, 3000, 2.0)
    assert (row["tokens_per_second"], row["tokens_per_second_per_device"]) == (500.0, 500.0)
    assert row["mfu"] == pytest.approx(500 * 2e6 / 1e12)
    assert (row["loss"], row["grad_norm"], row["lr"]) == (2.5, 2.0, 0.1)
    assert (row["clipped"], row["skipped_steps"]) == (1, 5)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 107.0)
    log_step(the_log, 5, device_metrics(2.5))
    assert rows(tmp_path)[-1]["step_time"] == 0.5


def log_of_a_rank(out) -> float:
    """A row in which everything of rank 1 is larger but its data_wait and device memory."""
    rank = dist.start("cpu").rank
    memory = {"peak_device_memory": 500 - rank, "peak_host_memory": 700 + rank}
    memory |= {"peak_reserved_memory": 600 - rank, "allocation_retries": 2 + rank}
    waited = [0.0]
    the_log = make_log(out, data_wait=lambda: sum(waited))
    with the_log.pause():
        pass
    waited.append(30 - 20 * rank)
    with mock.patch.object(metrics, "peak_memory", lambda device: memory):
        log_step(the_log, 1, device_metrics(2.0 + rank, grad_norm=3.0 + rank))
        waited.append(1)
        log_step(the_log, 2, device_metrics(5.0 + rank))
    return the_log.loss


def test_a_row_is_of_all_ranks(pool, tmp_path):
    assert pool(2, log_of_a_rank, tmp_path) == [5.5, 5.5]
    row, next_row = rows(tmp_path)
    assert (row["loss"], row["grad_norm"]) == (2.5, 4.0)
    assert (row["data_wait"], row["data_wait_min"]) == (30.0, 10.0)
    assert (row["peak_device_memory"], row["peak_host_memory"]) == (500, 701)
    assert (row["peak_reserved_memory"], row["allocation_retries"]) == (600, 3)
    # Times are those of the row's own interval.
    assert (next_row["data_wait"], next_row["data_wait_min"]) == (1.0, 1.0)


def test_of_a_gpu_the_log_has_what_is_reserved_and_how_often_an_allocation_was_retried():
    stats = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 7, "num_alloc_retries": 2}
    with mock.patch.object(torch.cuda, "memory_stats", return_value=stats):
        assert [*metrics.peak_memory(torch.device("cuda")).values()][:3] == [5, 7, 2]


def test_a_pause_is_not_part_of_a_step(log, tmp_path, monkeypatch):
    the_log = log()
    with the_log.pause():
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: 150.0)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 151.0)
    log_step(the_log, 1, device_metrics(2.5))
    assert rows(tmp_path)[0]["step_time"] == 1.0


def test_the_console_line(log, capsys, monkeypatch):
    the_log = log()
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 102.0)
    log_step(the_log, 4, device_metrics(2.5))
    line = (
        "step   4/100    4%  loss 2.5000  grad_norm 2.000  lr 1.00e-01  500 ms  2,000 tok/s  "
        "mfu 0.4%"
    )
    assert capsys.readouterr().out == f"{line}\n"  # the first step may compile: no time left yet
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 103.0)
    log_step(the_log, 6, device_metrics(2.5))
    assert capsys.readouterr().out.endswith("  0m47s left\n")


class EventOfADevice(metrics.DeviceEvent):
    """An event that has passed when somebody has waited for it, as on a device that is behind."""

    waited = False

    def has_passed(self) -> bool:
        return self.waited

    def wait(self) -> None:
        self.waited = True


def test_a_row_is_written_when_it_has_arrived(log, tmp_path, monkeypatch):
    """The host does not wait for the device before a pause."""
    monkeypatch.setattr(metrics, "DeviceEvent", EventOfADevice)
    the_log = log()
    the_log.rates = dataclasses.replace(the_log.rates, device=torch.device("meta"))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 101.0)
    for step in (1, 2):  # the first of a start has a row
        the_log.step(step, device_metrics(2.5))
        assert not (tmp_path / "metrics.jsonl").exists()
    with the_log.pause():
        assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize("seconds, clock", [(59.7, "1m00s"), (3599.8, "60m00s"), (59.2, "0m59s")])
def test_the_time_left_is_rounded_to_whole_seconds(seconds, clock):
    row = {"step": 1, "step_time": seconds, "mfu": None, "tokens_per_second": 1.0}
    row |= {"loss": 1.0, "grad_norm": 1.0, "lr": 1.0}
    assert metrics.console_line(row, max_steps=2, is_first=False).endswith(f"  {clock} left")


def test_the_console_says_for_how_long_training_waited_for_a_save(log, capsys):
    row = {"event": "checkpoint", "step": 4, "path": "here", "bytes": 2_500_000, "seconds": 1.5}
    the_log = log()
    the_log.checkpoint(row | {"blocking_seconds": 1.5})
    the_log.checkpoint(row | {"blocking_seconds": 0.25})
    line = "step   4/100  saved here: 2.5 MB in 1.50 s"
    assert capsys.readouterr().out == f"{line}\n{line}, of which training waited 0.25 s\n"


def test_too_many_skips_in_a_row_end_the_run_after_their_row(log, tmp_path, monkeypatch):
    the_log = log()
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 101.0)
    log_step(the_log, 7, device_metrics(math.nan, skipped_in_a_row=2))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 102.0)
    with pytest.raises(metrics.Diverged, match="3 updates in a row were skipped up to step 8"):
        log_step(the_log, 8, device_metrics(math.nan, skipped_in_a_row=3))
    # JSON has no nan.
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(7, None), (8, None)]


def test_a_run_that_continues_drops_what_came_after_its_checkpoint(log, tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    log(last_step=2)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


NOTES = [
    b'{"note": "lr looks high"}',
    b"12",
    b"# \xff",
    b'{"event": "pause", "time": 12.5}',
    b"[3]",
]


def test_what_others_wrote_into_the_log_is_counted_and_kept(log, tmp_path, capsys):
    the_log = log()
    for step in (1, 2, 3):
        the_log.evaluation(step, 2.5)
    file = tmp_path / "metrics.jsonl"
    first, second, _ = file.read_bytes().splitlines()
    capsys.readouterr()
    content = [first, *NOTES[:2], second, *NOTES[2:], b'{"step": 3, "note": 1}', b'{"step": 3, "lo']
    file.write_bytes(b"\n".join(content))
    warnings = []
    assert metrics.read_log(file, warnings.append) == [json.loads(first), json.loads(second)]
    assert warnings == [f"{file}: skipped 7 lines not written by the log"]
    log(last_step=2)
    assert capsys.readouterr().out == f"{file}: skipped 5 lines not written by the log\n"
    assert file.read_bytes().splitlines() == [first, *NOTES[:2], second, *NOTES[2:]]


def test_goodput_leaves_out_what_was_lost_and_outlives_a_restart(
    log, tmp_path, monkeypatch, capsys
):
    """3 steps of 4 seconds count in the first 10; then one of a second is lost, and a minute."""
    clock = mock.Mock(wraps=datetime)
    clock.now.return_value = datetime.fromtimestamp(1010, UTC)
    monkeypatch.setattr(metrics, "datetime", clock)
    monkeypatch.setattr(metrics.time, "time", lambda: 1010.0)
    started = datetime.fromtimestamp(1000, UTC)
    the_log = log(first_start=started)
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 103.0)
    log_step(the_log, 1, device_metrics(2.5))
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 104.0)
    log_step(the_log, 3, device_metrics(2.5))
    the_log.evaluation(3, 3.0)  # a row without goodput
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 105.0)
    log_step(the_log, 4, device_metrics(2.5))
    assert [row["goodput"] for row in rows(tmp_path)] == [0.3, 0.4, 0.5]

    of_parameters = [json.dumps({"step": step, "parameter": "w"}) + "\n" for step in (3, 4)]
    (tmp_path / "optim.jsonl").write_text("".join(of_parameters))
    monkeypatch.setattr(metrics.time, "time", lambda: 1070.0)
    again = log(first_start=started, last_step=3)
    assert (tmp_path / "optim.jsonl").read_text() == of_parameters[0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: 108.0)
    log_step(again, 5, device_metrics(2.5))
    assert [row["goodput"] for row in rows(tmp_path)] == [0.3, 0.4, pytest.approx(7 / 70)]
    capsys.readouterr()
    again.say(again.goodput())
    line = "goodput 10%: 7 of the 70 s since the first start went into steps that count\n"
    assert capsys.readouterr().out == line


def test_rows_that_a_full_disk_does_not_take_come_with_the_next(log, tmp_path, monkeypatch, capsys):
    the_log = log()
    real_open = open

    class FullDisk:
        """A file that takes only the beginning of a row."""

        def __init__(self, *arguments, **options):
            self.file = real_open(*arguments, **options)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def seek(self, *where):
            return self.file.seek(*where)

        def truncate(self, size):
            return self.file.truncate(size)

        def write(self, content):
            return self.file.write(content[:10])

    the_log.evaluation(1, 4.0)
    monkeypatch.setattr(metrics, "open", FullDisk, raising=False)
    the_log.evaluation(2, 3.0)
    the_log.evaluation(3, 2.0)
    assert capsys.readouterr().out.count("cannot write") == 2
    assert [row["step"] for row in rows(tmp_path, "val_loss")] == [1]
    monkeypatch.setattr(metrics, "open", real_open)
    the_log.evaluation(4, 1.0)
    the_log.evaluation(5, 0.5)
    assert [row["step"] for row in rows(tmp_path, "val_loss")] == [1, 2, 3, 4, 5]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("before")
    monkeypatch.setattr(os, "replace", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        metrics.replace_file(path, "after")
    assert path.read_text() == "before"


def test_mfu_is_known_for_bfloat16_on_a_listed_device_only(monkeypatch):
    monkeypatch.setattr(metrics, "device_name", lambda device: "NVIDIA H200")
    assert metrics.peak_flops(torch.device("cpu"), torch.bfloat16) == 989e12
    assert metrics.peak_flops(torch.device("cpu"), torch.float32) is None
    monkeypatch.setattr(metrics, "device_name", lambda device: "NVIDIA H300")
    assert metrics.peak_flops(torch.device("cpu"), torch.bfloat16) is None


def as_on_an_h200(argv: list[str]) -> tuple[int, str, str]:
    """train.py, on a CPU that has the name of a GPU, and at its start the type of one."""
    start = report.describe_start

    def on_cuda(begins, setup, world, *more):
        world = dataclasses.replace(world, device=torch.device("cuda", 0))
        return start(begins, setup, world, *more)

    with (
        mock.patch.object(metrics, "device_name", lambda device: "NVIDIA H200"),
        mock.patch.object(report, "describe_start", on_cuda),
    ):
        return listen(argv)


def test_without_mfu_a_start_says_so_and_peak_tflops_gives_it(pool, tokens, tmp_path):
    line = "no MFU: the peak of this GPU in float32 is not known; give --peak_tflops\n"
    text = f"--data {tokens} --out {tmp_path}/run --max_steps 1"
    ((status, out, _),) = pool(1, as_on_an_h200, flags(f"{text} --dtype float32"))
    assert (status, line in out, rows(tmp_path / "run")[0]["mfu"]) == (0, True, None)

    text = f"--data {tokens} --out {tmp_path}/other --max_steps 1 --peak_tflops 0.5"
    (status, out, _), _ = pool(2, as_on_an_h200, flags(f"{text} --dtype bfloat16 --strategy ddp"))
    assert (status, "no MFU" in out) == (0, False)
    start = json.loads((tmp_path / "other/starts.jsonl").read_text())
    config = ModelConfig(**start["model"])
    flops_per_token = build_model(config).flops_per_token(config.seq_len)
    (row,) = rows(tmp_path / "other")
    flops = row["tokens_per_second"] * flops_per_token
    assert row["mfu"] == pytest.approx(flops / (2 * 0.5e12))  # both devices at their peak
    assert row["tokens_per_second_per_device"] == pytest.approx(row["tokens_per_second"] / 2)
