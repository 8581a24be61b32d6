"""The log: rows of metrics.jsonl and optim.jsonl, and lines on the console.

    log.row(step, tokens, mean={"loss": loss}, equal={"lr": lr}, spread={"data_wait": waited})

writes a training row of all ranks, for which no host waits for its device. A file of the log only
grows. Each start of a run writes a row of its own, {"event": "start", "step": 20, ...}, which makes
earlier rows after its step void: `read_log` leaves them out.
"""

import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import BinaryIO

import torch
import torch.distributed
from torch import Tensor

# torch 2.13 introduced the name all_gather_single, and warns about the older one.
all_gather_single = getattr(
    torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
)

REMEDY = "The checkpoints in --out precede the divergence: lower --lr or check the data"


class Diverged(RuntimeError):
    """Training no longer makes progress."""

    exit_status = 1


# --------------------------------------------------------------------------------------------------
# Training rows


@dataclass(frozen=True)
class Mark:
    """A point of a run: now, or on a GPU the end of all work that is queued so far."""

    step: int
    tokens: int  # of all steps up to this one
    host_time: float
    event: torch.cuda.Event | None

    def has_passed(self) -> bool:
        return self.event is None or self.event.query()

    def seconds_since(self, earlier: "Mark") -> float:
        """Return the seconds from an earlier mark to this one. Both must have passed."""
        if self.event:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.host_time - earlier.host_time


def set_mark(device: torch.device, step: int, tokens: int) -> Mark:
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return Mark(step, tokens, time.perf_counter(), event)


@dataclass(frozen=True)
class Pending:
    """A row on its way from the devices to the hosts. It has arrived when `end` has passed."""

    begin: Mark  # of the steps that the row is about
    end: Mark
    columns: dict[str, tuple[Callable, bool]]  # name: how ranks are combined, is it an integer
    values: Tensor  # (world_size, columns), float64, in host memory

    def combine(self) -> dict[str, float | int]:
        """Wait for the values, and return the columns."""
        if self.end.event:
            self.end.event.synchronize()
        combined = {}
        by_column = self.values.T.tolist()  # (columns, world_size)
        for (name, (combine, is_integer)), by_rank in zip(self.columns.items(), by_column):
            combined[name] = combine(map(int, by_rank) if is_integer else by_rank)
        return combined


def gather(
    device: torch.device, columns: dict[str, tuple[Tensor | float, Callable]]
) -> tuple[dict[str, tuple[Callable, bool]], Tensor]:
    """Gather columns, {name: (value, how ranks are combined)}, with one small all_gather.

    Returns `Pending.columns` and `Pending.values`, which are copied to the host asynchronously.
    float64 is exact for integers below 2^53.
    """
    tensors = {name: column for name, column in columns.items() if isinstance(column[0], Tensor)}
    numbers = {name: column for name, column in columns.items() if name not in tensors}
    on_device = torch.tensor([value for value, _ in numbers.values()], dtype=torch.float64)
    if device.type == "cuda":
        on_device = on_device.pin_memory().to(device, non_blocking=True)
    parts = [value.double()[None] for value, _ in tensors.values()]  # (1,) each
    local = torch.cat((*parts, on_device))  # (columns,)
    world_size = torch.distributed.get_world_size()
    gathered = local.new_empty(world_size * len(local))
    all_gather_single(gathered, local)
    gathered = gathered.view(world_size, -1)  # (world_size, columns)
    kinds = {}
    for name, (value, combine) in (tensors | numbers).items():
        is_float = value.is_floating_point() if name in tensors else isinstance(value, float)
        kinds[name] = combine, not is_float
    return kinds, gathered.to("cpu", non_blocking=True)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes so far of tensors on the device, and of this process's resident memory.

    Also returns the peak bytes that torch's allocator has reserved on the device, and the number of
    times it freed its cache to try again, which waits for the device. On a CPU, all values but the
    resident memory are 0.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {
        "peak_device_memory": stats.get("allocated_bytes.all.peak", 0),
        "peak_reserved_memory": stats.get("reserved_bytes.all.peak", 0),
        "allocation_retries": stats.get("num_alloc_retries", 0),
        "peak_host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


# --------------------------------------------------------------------------------------------------
# The log


def is_due(step: int, interval: int) -> bool:
    """Whether something is due that happens every `interval` steps; 0: never."""
    return interval > 0 and step % interval == 0


class Log:
    """Writes rows and console lines on rank 0; every rank takes part in a training row.

    out              the run folder
    run              the flags, or an object with the same attributes
    device           of this rank
    flops_per_token  of the model, for mfu
    step, tokens     done before this start
    send             called with each training row and evaluation, for a tracker
    """

    def __init__(
        self,
        out: Path,
        run,
        device: torch.device,
        flops_per_token: float,
        step: int = 0,
        tokens: int = 0,
        send: Callable[[dict], None] | None = None,
    ):
        self.run = run
        self.device = device
        self.flops_per_token = flops_per_token
        self.send = send
        self.is_rank0 = torch.distributed.get_rank() == 0
        self.file = Appender(out / "metrics.jsonl")
        self.parameters_file = Appender(out / "optim.jsonl")
        self.last_row: dict | None = None  # this process's last training row, on every rank
        self.mark = set_mark(device, step, tokens)  # where the next row begins
        self.pending: Pending | None = None

    # Training rows

    def row(
        self, step: int, tokens: int, mean: dict, equal: dict, spread: dict | None = None
    ) -> None:
        """Gather a row about the steps since the last row; write it as soon as it has arrived.

        `tokens` are those of all steps up to `step`. Columns have the same names on all ranks, and
        values of this rank: numbers, and 0-d tensors on the device, for which the host does not
        wait. In the row, a column has

            mean      its mean over ranks
            equal     its value, which all ranks share; the largest, if they do not
            spread    its largest value and, as NAME_min, its smallest one

        Waits if the previous row has not arrived. Raises Diverged on all ranks at the same step if
        training no longer makes progress.
        """
        self.flush()
        columns = {name: (value, fmean) for name, value in mean.items()}
        for name, value in (equal | peak_memory(self.device)).items():
            columns[name] = (value, max)
        for name, value in (spread or {}).items():
            columns |= {name: (value, max), f"{name}_min": (value, min)}
        kinds, values = gather(self.device, columns)
        begin, self.mark = self.mark, set_mark(self.device, step, tokens)
        self.pending = Pending(begin, self.mark, kinds, values)
        if self.device.type == "cpu":  # it has already arrived
            self.flush()

    def write_arrived_row(self) -> None:
        """Write the pending row if it has arrived. Never waits."""
        if self.pending and self.pending.end.has_passed():
            self.write_pending()

    def flush(self) -> None:
        """Wait for the pending row and write it. Raises Diverged as `row` does."""
        if self.pending:
            self.write_pending()
        # Checked only here: all ranks flush at the same step, but may receive a row at any time.
        row, limit = self.last_row, self.run.max_skipped
        if row and limit and row["skipped_in_a_row"] >= limit:
            raise Diverged(
                f"{row['skipped_in_a_row']} updates in a row were skipped up to step "
                f"{row['step']}, because their gradients were not finite. {REMEDY}"
            )

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Write the pending row, then exclude the block of `with` from the step time."""
        self.flush()
        yield
        self.mark = set_mark(self.device, self.mark.step, self.mark.tokens)

    def write_pending(self) -> None:
        """Wait for the pending row, write it and print it."""
        pending, self.pending = self.pending, None
        columns = pending.combine()
        begin, end = pending.begin, pending.end
        seconds = end.seconds_since(begin)
        tokens_per_second = (end.tokens - begin.tokens) / seconds
        per_device = tokens_per_second / len(pending.values)
        mfu = None
        if self.run.peak_tflops:
            mfu = per_device * self.flops_per_token / (1e12 * self.run.peak_tflops)
        row = {
            "step": end.step,
            "tokens": end.tokens,
            **columns,
            "step_time": seconds / (end.step - begin.step),
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": per_device,
            "mfu": mfu,
        }
        self.write(row)
        # A process's first step allocates and may compile, so it cannot predict the time left.
        left = (self.run.max_steps - end.step) * row["step_time"] if self.last_row else None
        self.say(console_line(row, self.run.max_steps, left), end.step)
        self.last_row = row

    # Other rows

    def start(self, facts: dict) -> None:
        """Write the row of this start, with `facts` about it. It makes rows of later steps void."""
        step = self.mark.step
        row = {"step": step, "event": "start", "time": now(), **facts}
        self.append(self.file, [row])
        if self.run.optim_metrics_interval:
            self.append(self.parameters_file, [{"step": step, "event": "start"}])

    def parameters(self, step: int, rows: list[dict]) -> None:
        """Append the rows of an optim.ParameterTable to optim.jsonl."""
        self.append(self.parameters_file, [{"step": step, **row} for row in rows])

    def evaluation(self, step: int, val_loss: float | None) -> None:
        """Write the row of an evaluation, unless it was given up (None).

        Raises Diverged if the loss is not finite.
        """
        if val_loss is None:
            return
        self.write({"step": step, "val_loss": val_loss})
        self.say(f"val_loss {val_loss:.4f}", step)
        if not math.isfinite(val_loss):
            raise Diverged(f"the validation loss of step {step} is {val_loss}. {REMEDY}")

    def checkpoints(self, rows: list[dict]) -> None:
        """Write the rows of saves that succeeded or failed."""
        for row in rows:
            self.write(row)
            self.say(describe_save(row), row["step"])

    def end(self, step: int, end: str, error: str | None = None) -> None:
        """Write the last row of a start, for scripts: it "finished", "stopped" or "failed"."""
        row = {"step": step, "end": end}
        self.write(row | {"error": error} if error else row)

    # Output

    def write(self, row: dict) -> None:
        """Append a row to metrics.jsonl; send training rows and evaluations to the tracker."""
        self.append(self.file, [row | {"time": now()}])
        if self.send and not row.keys() & {"event", "end"}:
            try:
                self.send({name: value for name, value in row.items() if value is not None})
            except Exception as error:
                self.send = None
                self.say(f"--tracker failed and is off until the next start: {error!r}")

    def append(self, appender: "Appender", rows: list[dict]) -> None:
        """Append rows to a file. If they cannot be written, training continues."""
        if not self.is_rank0:
            return
        try:
            appender.append(rows)
        except OSError as error:
            self.say(f"cannot write {appender.path}: {error.strerror}")

    def say(self, line: str, step: int | None = None) -> None:
        """Print a line on rank 0; with `step`, after the number of steps."""
        if step is not None:
            line = f"step {step:>{len(str(self.run.max_steps))}}/{self.run.max_steps}  {line}"
        say(line)


def say(*lines: str) -> None:
    """Print lines on rank 0. A closed pipe or a full disk does not end the run."""
    if torch.distributed.get_rank() == 0:
        with suppress(OSError):
            print("\n".join(lines), flush=True)


class TrackerError(RuntimeError):
    """A tracker cannot be used."""

    exit_status = 2


def open_wandb(out: Path, config: dict) -> Callable[[dict], None]:
    """Begin or continue a run's page at wandb, whose id is in OUT/wandb_id; return send(row).

    wandb sends from a process of its own, so a step does not wait. Raises TrackerError.
    """
    try:
        import wandb  # an optional package
    except ImportError as error:
        raise TrackerError(f"--tracker wandb: {error}: pip install wandb") from None
    file = out / "wandb_id"
    run_id = f"{out.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if file.exists():
        run_id = file.read_text()
    place = {"project": "nanoshard", "name": out.name, "dir": out}
    page = wandb.init(id=run_id, resume="allow", config=config, **place)
    # The step is a column: after a kill, wandb would drop rows whose step it has seen.
    page.define_metric("*", step_metric="step")
    replace_file(file, run_id)
    return page.log


def console_line(row: dict, max_steps: int, seconds_left: float | None) -> str:
    """Format a training row for the console."""
    line = (
        f"{row['step'] / max_steps:4.0%}  loss {row['loss']:.4f}  "
        f"grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"{row['step_time'] * 1e3:,.0f} ms  {row['tokens_per_second']:,.0f} tok/s"
    )
    if row["mfu"] is not None:
        line += f"  mfu {row['mfu']:.1%}"
    if seconds_left is not None:
        left = round(seconds_left)  # 59.7 s become 1m00s
        line += f"  {left // 60}m{left % 60:02}s left"
    return line


def describe_save(row: dict) -> str:
    """Format the row of a save for the console."""
    if row["event"] == "checkpoint_failed":
        return (
            f"NOT SAVED: cannot write {row['path']}: {row['error']}; earlier checkpoints are intact"
        )
    seconds, blocking_seconds = row["seconds"], row["blocking_seconds"]
    line = f"saved {row['path']}: {row['bytes'] / 1e6:,.1f} MB in {seconds:.2f} s"
    if blocking_seconds < seconds:
        line += f", of which training waited {blocking_seconds:.2f} s"
    return line


# --------------------------------------------------------------------------------------------------
# Files


class Appender:
    """Appends rows to a file of JSON lines."""

    def __init__(self, path: Path):
        self.path = path
        self.is_whole = False  # whether the file is known to end with a whole row

    def append(self, rows: list[dict]) -> None:
        """Write the rows. Raises OSError, after which the file may end with a part of a row."""
        was_whole, self.is_whole = self.is_whole, False
        with open(self.path, "ab+") as file:
            if not was_whole:
                cut_torn_row(file)
            file.writelines(json_line(row).encode() for row in rows)
        self.is_whole = True


def now() -> str:
    return datetime.now().astimezone().isoformat()


def json_line(row: dict) -> str:
    """Format a row as a line of JSON, in which null stands for a value that is not finite."""
    finite = {}
    for name, value in row.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        finite[name] = value if is_finite else None
    return json.dumps(finite) + "\n"


def cut_torn_row(file: BinaryIO) -> None:
    """Cut off a last row that a kill or a full disk has torn; end a whole one with a newline."""
    size = file.seek(0, os.SEEK_END)
    most = min(size, 1_000_000)
    file.seek(size - most)
    last = file.read(most).rpartition(b"\n")[2]
    if not last:
        return
    try:
        json.loads(last)
    except ValueError:
        file.truncate(size - len(last))
    else:
        file.write(b"\n")


def read_all_rows(path: Path) -> tuple[list[dict], int]:
    """Return all rows of a file of the log, and the number of torn lines, which are not JSON.

    Skips notes that a user has added. Without the file, there are no rows.
    """
    rows, torn = [], 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            torn += 1
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows, torn


def drop_void(rows: list[dict]) -> list[dict]:
    """Return the rows that count: without those of steps that a later start repeats, and starts."""
    valid = []
    for row in rows:
        if row.get("event") == "start":
            valid = [earlier for earlier in valid if earlier["step"] <= row["step"]]
        else:
            valid.append(row)
    return valid


def read_log(path: Path) -> list[dict]:
    """Return the rows of a file of the log that count."""
    return drop_void(read_all_rows(path)[0])


def read_starts(out: Path) -> list[dict]:
    """Return the rows of the starts of the run `out`."""
    rows, _ = read_all_rows(out / "metrics.jsonl")
    return [row for row in rows if row.get("event") == "start"]


def has_evaluation(out: Path, step: int) -> bool:
    """Whether the log of the run `out` has an evaluation of `step`."""
    rows = read_log(out / "metrics.jsonl")
    return any("val_loss" in row and row["step"] == step for row in rows)


def replace_file(path: Path, text: str | bytes) -> None:
    """Replace a file atomically. On failure, it is unchanged; the OSError contains its path."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        partial.write_bytes(text.encode() if isinstance(text, str) else text)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
