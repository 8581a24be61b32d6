"""Rows of the log: their contents, and how they are written to disk."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from rig import ROOT, build_run, train_step

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


class LateEvent(logs.HostEvent):
    """An event of a device that lags behind the host, until the host waits for it."""

    passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class LateLog(Log):
    now = 0.0

    def record_event(self) -> LateEvent:
        event = LateEvent()
        event.time = self.now
        return event


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


def log_of_a_rank(out: Path) -> None:
    """Log a row. Rank 1 needs 300 MB more."""
    rank = dist.join("cpu").rank
    held = torch.ones(75_000_000 * (rank == 1))  # noqa: F841
    log = make_log(out)
    log.row(1, 1000, 0.1, columns(loss=[0.0, 4.0, 1.0][rank]), data_wait=10.0 * (1 + rank))
    log.flush()


def test_a_row_reduces_its_values_over_all_ranks(pool, tmp_path):
    pool(3, log_of_a_rank, tmp_path)
    (row,) = read_rows(tmp_path / "metrics.jsonl")
    assert (row["loss"], row["lr"]) == (pytest.approx(5 / 3), 0.1)
    assert (row["data_wait"], row["data_wait_min"]) == (30.0, 10.0)
    assert row["peak_host_memory"] > row["peak_host_memory_min"] + 2e8
    per_device = row["tokens_per_second_per_device"]
    assert per_device == pytest.approx(row["tokens_per_second"] / 3)
    assert row["mfu"] == pytest.approx(per_device * 2e6 / 1e12)


def test_rows_come_before_what_follows_their_step_and_the_reference_has_their_fields(train):
    """Neither the save nor the evaluation of a step is a part of its time: see Log.pause."""
    run = train(2, "--strategy ddp --max_steps 2 --save_interval 1 --eval_interval 1")
    start, *rows = read_rows(run.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 1, 1, 2, 2, 2]
    reference = (ROOT / "docs/reference.md").read_text()
    kinds = {"start": start, "training": rows[3], "checkpoint": rows[4], "evaluation": rows[5]}
    for kind, row in kinds.items():
        (line,) = re.findall(rf"^\| {kind} \| (.*)", reference, re.M)
        fields = {"time", *re.findall(r"`(\w+)`", line)}
        assert row.keys() == fields - {"start", "checkpoint", "checkpoint_failed", "error"}, kind


def leave_mean_logit(loss: torch.nn.Module, arguments: tuple, _) -> None:
    """A hook that leaves a column, as the reference's example does."""
    x, weight, _ = arguments
    loss.logged = {"logit": F.linear(x, weight).float().mean()}


def fork_columns(argv: list[str]) -> dict[str, float]:
    """The columns of a step of a model with this hook, whose blocks leave 1.0 and 3.0."""
    built = build_run(argv)
    decoder = built.state.decoder
    *_, loss = decoder.head.loss.modules()  # in a chunked loss, the loss of a chunk
    loss.register_forward_hook(leave_mean_logit)
    for value, block in zip((1.0, 3.0), decoder.blocks, strict=True):
        block.mlp_norm.logged = {"of_two": torch.tensor(value)}
    values, _ = train_step(built, 1)
    decoder.norm.logged = {"grad_norm": torch.tensor(1.0)}  # the log has such a column already
    with pytest.raises(UsageError):
        train_step(built, 2)
    return {name: float(value) for name, value in values.items()}


def test_a_column_has_the_value_of_one_rank_with_any_policy(on_ranks):
    """It is the mean over micro-batches, chunks, ranks and modules that leave the same name."""
    (expected,) = on_ranks(1, fork_columns, "")
    for policy in ("--strategy fsdp --micro_batch_size 2", "--tp 2 --loss_chunks 2"):
        found = on_ranks(2, fork_columns, policy)
        logit = sum(values["logit"] for values in found) / 2  # as in a row
        assert logit == pytest.approx(expected["logit"], rel=1e-4)
        assert {values["of_two"] for values in found} == {2}


def test_a_start_makes_later_rows_void(tmp_path, one_rank):
    for step in (1, 2, 3):
        make_log(tmp_path).evaluation(step, 2.5)
    again = make_log(tmp_path, step=2)
    again.start({"ranks": 2})
    assert [has_evaluation(tmp_path, step) for step in (1, 2, 3)] == [True, True, False]
    again.evaluation(3, 2.25)
    assert has_evaluation(tmp_path, 3)


def test_a_torn_row_is_left_out_and_the_next_one_has_a_line_of_its_own(tmp_path, one_rank):
    """As kill -9 in the middle of a write leaves it. JSON has no nan."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n{"step": 2, "loss": 3.25')
    make_log(tmp_path).append(file.name, [{"step": 2, "loss": float("nan")}])
    assert read_rows(file) == [{"step": 1}, {"step": 2, "loss": None}]
