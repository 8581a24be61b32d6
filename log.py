"""The log: rows of metrics.jsonl and optim.jsonl, and lines on the console.

A training row is gathered from all ranks by one small all_gather and copied to the host while the
next steps run. It is written when it has arrived, so no host waits for its device.

The files only grow. Each start of a run writes a row of its own, {"event": "start", "step": 20,
...}, which makes earlier rows after its step void, as in `has_evaluation`.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor


class Diverged(RuntimeError):
    """Training no longer makes progress."""

    exit_status = 1


class HostEvent:
    """A torch.cuda.Event for a CPU, which has done its work when the host gets here."""

    def record(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "HostEvent") -> float:
        return 1e3 * (later.time - self.time)


# Columns of which a row has the largest and, as NAME_min, the smallest value over ranks: if they
# differ much, the load is not balanced. Of the others it has the mean.
SPREADS = ("data_wait", "peak_device_memory", "peak_host_memory")
# What a row has beside the columns of a step
COLUMNS = {"step", "tokens", "lr", "time", "event", "val_loss", "mfu", "step_time", *SPREADS}
COLUMNS |= {"tokens_per_second", "tokens_per_second_per_device", *(f"{n}_min" for n in SPREADS)}
MAX_SKIPPED = 100  # skipped updates in a row that end a run


@dataclass(frozen=True)
class Pending:
    """A training row on its way to the host. It has arrived when `end` has passed."""

    row: dict  # what the host knows already
    columns: list[str]
    values: Tensor  # (ranks, columns), float64
    steps: int  # that the row is about
    begin: torch.cuda.Event | HostEvent  # of these steps
    end: torch.cuda.Event | HostEvent


class Log:
    """Writes rows and console lines on rank 0; every rank takes part in a training row.

    run              the flags, and tokens_per_step
    device           of this rank
    flops_per_token  of the model, for mfu
    step             the last step before this start
    """

    def __init__(self, run, device: torch.device, flops_per_token: int, step: int):
        self.run = run
        self.device = device
        self.flops_per_token = flops_per_token
        self.step = step  # of the last row
        self.begin = self.record_event()  # of the next row
        self.pending: Pending | None = None
        self.last_row: dict | None = None  # that has arrived, on every rank
        self.page = None  # of wandb

    def record_event(self) -> torch.cuda.Event | HostEvent:
        """Return the end of all work that is queued on the device so far."""
        is_cuda = self.device.type == "cuda"
        event = torch.cuda.Event(enable_timing=True) if is_cuda else HostEvent()
        event.record()
        return event

    def open_wandb(self) -> None:
        """Also send rows to wandb, to the run's page, whose id is in OUT/wandb_id."""
        import wandb  # an optional package

        out = Path(self.run.out)
        file = out / "wandb_id"
        if not file.exists() or not file.read_text():
            file.write_text(f"{out.name}-{datetime.now():%Y%m%d-%H%M%S}")
        page = {"project": "nanoshard", "name": out.name, "dir": out, "id": file.read_text()}
        self.page = wandb.init(**page, resume="allow", config=self.run.manifest["config"])
        self.page.define_metric("*", step_metric="step")  # wandb's own step cannot be repeated

    def start(self, facts: dict) -> None:
        """Write the row of this start, with `facts` about it. It makes rows of later steps void."""
        row = {"step": self.step, "event": "start"}
        self.write(row | facts)
        if self.run.optim_metrics_interval:
            self.append("optim.jsonl", [row])
        self.begin = self.record_event()

    def row(
        self, step: int, tokens: int, lr: float, columns: dict[str, Tensor], data_wait: float
    ) -> None:
        """Begin a row about the steps since the last one; `tokens` are those of all steps.

        columns      0-d tensors on the device, which have the same names on all ranks. The host
                     does not wait for them
        data_wait    seconds for which this rank's host waited for batches

        Waits if the previous row has not arrived.
        """
        self.flush()
        on_host = torch.tensor([data_wait, *peak_memory()], dtype=torch.float64)  # as SPREADS
        if self.device.type == "cuda":
            on_host = on_host.pin_memory()  # or the host would wait for the copy
        on_device = torch.stack([value.double() for value in columns.values()])
        local = torch.cat((on_device, on_host.to(self.device, non_blocking=True)))  # (columns,)
        values = local.new_empty(torch.distributed.get_world_size(), len(local))
        torch.distributed.all_gather([*values], local)
        values = values.to("cpu", non_blocking=True)
        row = {"step": step, "tokens": tokens, "lr": lr}
        begin, self.begin = self.begin, self.record_event()
        steps, self.step = step - self.step, step
        self.pending = Pending(row, [*columns, *SPREADS], values, steps, begin, self.begin)

    def write_arrived_row(self) -> None:
        """Write the pending row if it has arrived. Never waits."""
        if self.pending and self.pending.end.query():
            self.write_pending_row()

    def flush(self) -> None:
        """Wait for the pending row, if any, and write it.

        Raises Diverged if training makes no progress. It is raised here, where all ranks are at
        the same step, and not when a row arrives.
        """
        if self.pending:
            self.write_pending_row()
        row = self.last_row
        if row and row["skipped_in_a_row"] >= MAX_SKIPPED:
            raise Diverged(
                f"{row['skipped_in_a_row']:.0f} updates in a row were skipped up to step "
                f"{row['step']}, because gradients were not finite: lower --lr or check the data"
            )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Write the pending row, then leave the block of `with` out of the step time."""
        self.flush()
        yield
        self.begin = self.record_event()

    def write_pending_row(self) -> None:
        """Wait for the pending row, write it and print it."""
        pending, self.pending = self.pending, None
        pending.end.synchronize()
        row = dict(pending.row)
        values = pending.values  # (ranks, columns)
        combined = (values.mean(0), values.amax(0), values.amin(0))
        for name, mean, largest, smallest in zip(pending.columns, *map(Tensor.tolist, combined)):
            row[name] = mean
            if name in SPREADS:
                row |= {name: largest, f"{name}_min": smallest}
        row["step_time"] = pending.begin.elapsed_time(pending.end) / 1e3 / pending.steps
        row["tokens_per_second"] = self.run.tokens_per_step / row["step_time"]
        per_device = row["tokens_per_second"] / len(values)
        row |= {"tokens_per_second_per_device": per_device, "mfu": None}
        if self.run.peak_tflops:
            row["mfu"] = per_device * self.flops_per_token / (1e12 * self.run.peak_tflops)
        self.write(row, console_line(row, self.run.max_steps))
        self.last_row = row

    def evaluation(self, step: int, val_loss: float) -> None:
        """Write the row of an evaluation. Raises Diverged if its loss is not finite."""
        self.write({"step": step, "val_loss": val_loss}, f"val_loss {val_loss:.4f}")
        if not math.isfinite(val_loss):
            raise Diverged(f"the validation loss is {val_loss}: lower --lr or check the data")

    def write(self, row: dict, line: str | None = None) -> None:
        """Append a row to metrics.jsonl, and print its line."""
        self.append("metrics.jsonl", [row | {"time": datetime.now().astimezone().isoformat()}])
        if line:
            say(f"step {row['step']:>{len(str(self.run.max_steps))}}/{self.run.max_steps}  {line}")
        if self.page and "event" not in row:
            try:
                self.page.log(row)
            except Exception as error:  # the run goes on
                say(f"wandb: {error}")

    def append(self, name: str, rows: list[dict]) -> None:
        """Append rows to a file of the run on rank 0. A full disk does not end the run."""
        if torch.distributed.get_rank() > 0:
            return
        try:
            with open(Path(self.run.out) / name, "ab+") as file:
                size = file.tell()
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                    file.write(b"\n")  # a kill has torn the last row
                file.writelines(to_json(row) for row in rows)
        except OSError as error:
            say(f"cannot write {name}: {error}")


def to_json(row: dict) -> bytes:
    """Return a line of JSON, in which numbers that are not finite are null: JSON has no nan."""
    row = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    return json.dumps(row).encode() + b"\n"


def read_rows(file: Path) -> list[dict]:
    """Return the rows of a file of the log, but not one that a kill has torn."""
    rows = []
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def has_saved(out: Path) -> bool:
    """Whether the log of the run `out` has a checkpoint."""
    return any(row.get("event") == "checkpoint" for row in read_rows(out / "metrics.jsonl"))


def has_evaluation(out: Path, step: int) -> bool:
    """Whether the log has a finite evaluation of `step`, which no later start has made void."""
    for row in reversed(read_rows(out / "metrics.jsonl")):
        if row.get("val_loss") is not None and row["step"] == step:
            return True
        if row.get("event") == "start" and row["step"] < step:
            return False
    return False


def peak_memory() -> tuple[int, int]:
    """Peak bytes so far of tensors on the GPU, 0 without one, and of this process on the host."""
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    on_host = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return torch.cuda.max_memory_allocated(), on_host


def console_line(row: dict, max_steps: int) -> str:
    """Format a training row for the console, with the time left at the speed of its steps."""
    left = round((max_steps - row["step"]) * row["step_time"])
    line = (
        f"{row['step'] / max_steps:4.0%}  loss {row['loss']:.4f}  "
        f"grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"{row['step_time'] * 1e3:,.0f} ms  {row['tokens_per_second']:,.0f} tok/s"
    )
    if row["mfu"] is not None:
        line += f"  mfu {row['mfu']:.1%}"
    return f"{line}  {left // 60}m{left % 60:02}s left"


def say(*lines: str) -> None:
    """Print lines on rank 0. A closed pipe, or one for ASCII only, does not end the run."""
    if torch.distributed.get_rank() == 0:
        with suppress(OSError, UnicodeError):
            print("\n".join(lines), flush=True)
