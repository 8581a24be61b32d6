"""The log: rows of metrics.jsonl and optim.jsonl, and lines on the console.

StepMeter times steps and gathers a row from all ranks. Log writes the rows.
"""

import importlib
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

import torch
import torch.distributed
from torch import Tensor

# Dense bfloat16 TFLOP/s, accumulated in float32, by the name that torch.cuda.get_device_name
# returns. Comments quote the vendors; a figure "with sparsity" is twice the dense one.
PEAK_TFLOPS = {
    # A100 data sheet 1758950: 312 dense, PCIe and SXM
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    # nvidia.com/en-us/data-center/h100, with sparsity: SXM 1,979, PCIe 1,513, NVL 1,671
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    # nvidia.com/en-us/data-center/h200, with sparsity: SXM 1,979, NVL 1,671
    "NVIDIA H200": 989,
    "NVIDIA H200 NVL": 835,
    # nvidia.com/en-us/data-center/grace-hopper-superchip: as the H100 SXM
    "NVIDIA GH200 120GB": 989,
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 144G HBM3e": 989,
    # Blackwell data sheet 3384703, with sparsity, per GPU: HGX B200 4,500, GB200 5,000
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    # nvidia.com/en-us/data-center/hgx and gb300-nvl72, with sparsity, per GPU: 4,500, 5,000
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA GB300": 2500,
    # amd.com, pages of the Instinct accelerators, dense. The MI355X's page rounds to 2,500. This is
    # 1,024 matrix cores x 512 multiply-adds per clock x 2 x 2.4 GHz.
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI325X": 1307.4,
    "AMD Instinct MI355X": 2516.6,
    # nvidia.com/en-us/data-center/l4: 242 with sparsity; L40S data sheet: 362.05 dense
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    # White papers, dense: Ada, appendix A: 165.2; RTX Blackwell, table 3: 209.5
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
}


# torch 2.13 introduced the name all_gather_single, and warns about the older one.
all_gather_single = getattr(
    torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
)

REMEDY = "The checkpoints in --out precede the divergence: lower --lr or check the data"


class Diverged(RuntimeError):
    """Training no longer makes progress."""

    exit_status = 1


# --------------------------------------------------------------------------------------------------
# Measurements


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
# Files


def replace_file(path: Path, text: str | bytes) -> None:
    """Replace a file atomically. On failure, it is unchanged; the OSError contains its path."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        partial.write_bytes(text.encode() if isinstance(text, str) else text)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_lines(path: Path) -> Iterator[tuple[bytes, object]]:
    """Yield each line of a JSON lines file with its value, or None if it does not parse."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        value = None
        with suppress(ValueError):
            value = json.loads(line)
        yield line, value


def read_log(path: Path) -> list[dict]:
    """The rows of metrics.jsonl or optim.jsonl: JSON objects with a `step`.

    Other lines are skipped, for example a row that was cut short by a full disk.
    """
    return [value for _, value in read_lines(path) if is_row(value)]


def is_row(value: object) -> bool:
    """Whether a line's value is a row (an object with a `step`), not a note added by a user."""
    return isinstance(value, dict) and type(value.get("step")) is int


def drop_rows_after(path: Path, step: int) -> list[dict]:
    """Drop the rows after `step`, from which a run resumes; return the remaining rows."""
    if not path.exists():
        return []
    kept = [line for line, row in read_lines(path) if not is_row(row) or row["step"] <= step]
    replace_file(path, b"".join(line + b"\n" for line in kept))
    return read_log(path)


def is_due(step: int, interval: int) -> bool:
    """Whether `step` ends an interval; an interval of 0 never ends."""
    return interval > 0 and step % interval == 0


def console_line(row: dict, max_steps: int, is_first: bool) -> str:
    """Format a training row for the console.

    A process's first step allocates and may compile, so it cannot predict the time left.
    """
    line = (
        f"{row['step'] / max_steps:4.0%}  loss {row['loss']:.4f}  "
        f"grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"{row['step_time'] * 1e3:,.0f} ms  {row['tokens_per_second']:,.0f} tok/s"
    )
    if row["mfu"] is not None:
        line += f"  mfu {row['mfu']:.1%}"
    if not is_first:
        left = round((max_steps - row["step"]) * row["step_time"])  # 59.7 s become 1m00s
        line += f"  {left // 60}m{left % 60:02}s left"
    return line


class TrackerError(RuntimeError):
    """A tracker cannot be opened in the first start of a run."""

    exit_status = 2


def open_tracker(
    out: Path, config: dict, first_start: datetime, is_first: bool
) -> Callable[[dict], None] | None:
    """Return send(row) of --tracker, or None with a printed line if it fails in a later start.

    In the first start somebody is there to correct it: raises TrackerError.
    """
    try:
        return open_wandb(out, f"{out.name}-{first_start:%Y%m%d-%H%M%S}", config)
    except Exception as error:
        if is_first:
            raise TrackerError(
                f"--tracker {config['tracker']} cannot be used: {error!r}; correct this, or train "
                "with --tracker none"
            ) from None
        print(TRACKER_IS_OFF.format(error), flush=True)
        return None


TRACKER_IS_OFF = "--tracker failed and is off until the next start: {!r}"


def open_wandb(out: Path, run_id: str, config: dict) -> Callable[[dict], None]:
    """Start or continue the wandb run `run_id`, with its files in `out`; return send(row)."""
    wandb = importlib.import_module("wandb")  # an optional package
    options = {"project": "nanoshard", "name": out.name, "dir": out, "config": config}
    run = wandb.init(id=run_id, resume="allow", **options)

    def send(row: dict) -> None:
        values = {name: value for name, value in row.items() if name != "step"}
        run.log(values, step=row["step"])

    return send


# --------------------------------------------------------------------------------------------------
# Measuring a row


@dataclass(frozen=True)
class Column:
    """A value of this rank; the row gets the mean over ranks. Plain values are treated the same."""

    value: Tensor | float  # a tensor is 0-d, and may be on the device
    reduce = staticmethod(fmean)


class Maximum(Column):
    """A value of this rank; the row gets the maximum over ranks."""

    reduce = staticmethod(max)


class Minimum(Column):
    """A value of this rank; the row gets the minimum over ranks."""

    reduce = staticmethod(min)


@dataclass(frozen=True)
class Rates:
    """The constants that convert the time of a step into rates."""

    device: torch.device
    tokens_per_step: int  # of all ranks
    flops_per_token: float
    peak_flops: float | None  # per device; None if unknown
    # All tokens of a run are tokens_before + step x tokens_per_step. Not 0 if an earlier start had
    # another batch size.
    tokens_before: int = 0


class Mark:
    """The start or end of a row's interval: now, or on a GPU after all work queued so far."""

    def __init__(self, device: torch.device, step: int):
        self.step = step
        self.host_time = time.perf_counter()
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def since(self, earlier: "Mark") -> float:
        """The seconds from an earlier mark to this one. Both must have been reached."""
        if self.event:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.host_time - earlier.host_time


@dataclass(frozen=True)
class PendingRow:
    """A row on its way from the devices to the host."""

    began: Mark
    ended: Mark  # `values` have arrived when this mark is reached
    columns: dict[str, Column]
    values: Tensor  # (world_size, columns), float64, in host memory


class StepMeter:
    """Times steps and gathers rows from all ranks: `send_row`, and later `compute_row`.

    rates           of this device and model
    step            the number of steps so far; the first row starts after them
    useful_seconds  the time spent in steps so far, without lost steps; known only on rank 0
    """

    def __init__(self, rates: Rates, step: int, useful_seconds: float):
        self.rates = rates
        self.useful_seconds = useful_seconds
        self.began = Mark(rates.device, step)  # where the next row starts
        self.pending: PendingRow | None = None

    def send_row(self, step: int, values: dict[str, Column | Tensor | float]) -> None:
        """Create the pending row with one small all_gather and an asynchronous copy to the host."""
        device = self.rates.device
        values = values | {name: Maximum(value) for name, value in peak_memory(device).items()}
        tensors, numbers = {}, {}
        for name, value in values.items():
            column = value if isinstance(value, Column) else Column(value)
            group = tensors if isinstance(column.value, Tensor) else numbers
            group[name] = column

        on_host = [column.value for column in numbers.values()]
        on_device = torch.tensor(on_host, dtype=torch.float64)  # (numbers,)
        if device.type == "cuda":
            on_device = on_device.pin_memory().to(device, non_blocking=True)
        parts = [column.value.double()[None] for column in tensors.values()]  # (1,) each
        local = torch.cat((*parts, on_device))  # (columns,)

        world_size = torch.distributed.get_world_size()
        gathered = local.new_empty(world_size * len(local))
        all_gather_single(gathered, local)
        gathered = gathered.view(world_size, -1)  # (world_size, columns)
        gathered = gathered.to("cpu", non_blocking=True)
        began, self.began = self.began, Mark(device, step)
        self.pending = PendingRow(began, self.began, tensors | numbers, gathered)

    def compute_row(self) -> dict:
        """Wait for the pending row, and compute it from the values of all ranks."""
        pending, self.pending = self.pending, None
        if pending.ended.event:
            pending.ended.event.synchronize()
        step, rates = pending.ended.step, self.rates
        row = {"step": step, "tokens": rates.tokens_before + step * rates.tokens_per_step}
        by_column = pending.values.T.tolist()  # (columns, world_size)
        for (name, column), by_rank in zip(pending.columns.items(), by_column):
            if isinstance(column.value, Tensor):
                is_integer = not column.value.is_floating_point()
            else:
                is_integer = isinstance(column.value, int)
            row[name] = column.reduce(map(int, by_rank) if is_integer else by_rank)

        seconds = pending.ended.since(pending.began)
        step_time = seconds / (step - pending.began.step)
        tokens_per_second = rates.tokens_per_step / step_time
        per_device = tokens_per_second / len(pending.values)
        row["step_time"] = step_time
        row["tokens_per_second"] = tokens_per_second
        row["tokens_per_second_per_device"] = per_device
        row["mfu"] = None
        if rates.peak_flops:
            row["mfu"] = per_device * rates.flops_per_token / rates.peak_flops
        self.useful_seconds += seconds
        row["useful_seconds"] = self.useful_seconds
        return row


def find_useful_seconds(row: dict, first_start: float) -> float:
    """The useful seconds of a resumed run up to `row`, its last training row."""
    # Without starts.jsonl, this start counts as the first. The row is older: no steps count so far.
    age = max(0.0, datetime.fromisoformat(row["time"]).timestamp() - first_start)
    return min(row["useful_seconds"], age)


# --------------------------------------------------------------------------------------------------
# The log


class Log:
    """Writes rows and console lines on rank 0; every rank takes part in a training row.

    out         the run folder
    run         the flags, or an object with the same attributes
    rates       of this device and model
    start_step  the run continues after this step; later rows are dropped
    first_start when the run first started
    tracker     called with each training row and evaluation, if any
    is_lost     whether `out` is no longer this run's folder: then nothing is written
    """

    def __init__(
        self,
        out: Path,
        run,
        rates: Rates,
        start_step: int,
        first_start: datetime,
        tracker: Callable[[dict], None] | None = None,
        is_lost: Callable[[], bool] | None = None,
    ):
        self.out = out
        self.run = run
        self.first_start = first_start.timestamp()
        self.is_rank0 = torch.distributed.get_rank() == 0
        self.tracker = tracker
        self.is_lost = is_lost
        self.has_lost = False  # whether a write was left out for this reason
        self.last_row: dict | None = None  # this process's last training row, on every rank
        useful_seconds = 0.0
        if self.is_rank0:
            drop_rows_after(out / "optim.jsonl", start_step)
            rows = drop_rows_after(out / "metrics.jsonl", start_step)
            training_rows = [row for row in rows if "loss" in row]
            if training_rows:
                useful_seconds = find_useful_seconds(training_rows[-1], self.first_start)
        self.meter = StepMeter(rates, start_step, useful_seconds)

    # Training rows

    def send_row(self, step: int, values: dict[str, Column | Tensor | float]) -> None:
        """Gather the row of the steps since the last row; write it as soon as it has arrived.

        `values` are its columns, with the same names on all ranks: numbers, and 0-d tensors on the
        device, for which the host does not wait. The row gets the mean over ranks, except for a
        Maximum or Minimum. Waits if the previous row has not arrived. Raises Diverged on all ranks
        at the same step if training no longer makes progress.
        """
        self.flush()
        self.meter.send_row(step, values)
        if self.meter.rates.device.type == "cpu":  # it has already arrived
            self.flush()

    def write_arrived_row(self) -> None:
        """Write the pending row if it has arrived. Never waits."""
        pending = self.meter.pending
        if pending and (pending.ended.event is None or pending.ended.event.query()):
            self.write_row(self.meter.compute_row())

    def flush(self) -> None:
        """Wait for the pending row and write it. Raises Diverged as `send_row` does."""
        if self.meter.pending:
            self.write_row(self.meter.compute_row())
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
        self.meter.began = Mark(self.meter.rates.device, self.meter.began.step)

    def write_row(self, row: dict) -> None:
        """Write a training row and print it."""
        age = time.time() - self.first_start
        row = {**row, "goodput": row["useful_seconds"] / age}
        self.record(row)
        is_first = self.last_row is None
        self.say(console_line(row, self.run.max_steps, is_first), row["step"])
        self.last_row = row

    # Other rows

    def parameters(self, step: int, rows: list[dict]) -> None:
        """Append the rows of an optim.ParameterTable to optim.jsonl."""
        self.append("optim.jsonl", [{"step": step, **row} for row in rows])

    def evaluation(self, step: int, val_loss: float) -> None:
        """Write the row of an evaluation. Raises Diverged if the loss is not finite."""
        self.record({"step": step, "val_loss": val_loss})
        self.say(f"val_loss {val_loss:.4f}", step)
        if not math.isfinite(val_loss):
            raise Diverged(f"the validation loss of step {step} is {val_loss}. {REMEDY}")

    def checkpoints(self, rows: list[dict]) -> None:
        """Write the rows of saves that succeeded or failed."""
        for row in rows:
            self.checkpoint(row)

    def checkpoint(self, row: dict) -> None:
        """Write the row of a save that succeeded or failed."""
        self.record(row)
        step, path = row["step"], row["path"]
        if row["event"] == "checkpoint_failed":
            problem = f"cannot write {path}: {row['error']}"
            self.say(f"NOT SAVED: {problem}; earlier checkpoints are intact", step)
            return
        seconds, blocking_seconds = row["seconds"], row["blocking_seconds"]
        line = f"saved {path}: {row['bytes'] / 1e6:,.1f} MB in {seconds:.2f} s"
        if blocking_seconds < seconds:
            line += f", of which training waited {blocking_seconds:.2f} s"
        self.say(line, step)

    def end(self, step: int, end: str, error: str | None = None) -> None:
        """Write the last row of a start, for scripts: it "finished", "stopped" or "failed"."""
        row = {"step": step, "end": end, "time": datetime.now().astimezone().isoformat()}
        self.append("metrics.jsonl", [row | {"error": error} if error else row])

    # Output

    def record(self, row: dict) -> None:
        """Append a row to metrics.jsonl; unless it is a save, send it to the tracker."""
        self.append("metrics.jsonl", [{**row, "time": datetime.now().astimezone().isoformat()}])
        if self.tracker and "event" not in row:
            try:
                self.tracker({name: value for name, value in row.items() if value is not None})
            except Exception as error:
                self.tracker = None
                self.say(TRACKER_IS_OFF.format(error))

    def say(self, line: str, step: int | None = None) -> None:
        if not self.is_rank0:
            return
        if step is not None:
            line = f"step {step:>{len(str(self.run.max_steps))}}/{self.run.max_steps}  {line}"
        with suppress(OSError):  # a closed pipe or a full disk does not end the run
            print(line, flush=True)

    def goodput(self) -> str:
        """The console line that reports the goodput up to the last training row."""
        useful_seconds = self.last_row["useful_seconds"]
        age = time.time() - self.first_start
        return (
            f"goodput {useful_seconds / age:.0%}: {useful_seconds:,.0f} of the {age:,.0f} s since "
            "the first start were training steps, lost steps excluded"
        )

    def append(self, name: str, rows: list[dict]) -> None:
        """Append rows to a file. If they cannot be written, training continues without them."""
        if not self.is_rank0:
            return
        if self.is_lost and self.is_lost():
            self.has_lost = True
            return
        lines = []
        for row in rows:
            for field, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    row = row | {field: None}  # JSON has no nan
            lines.append(json.dumps(row) + "\n")
        try:
            with open(self.out / name, "a") as file:  # on closing, the kernel gets the rows
                file.write("".join(lines))
        except OSError as error:
            self.say(f"cannot write {self.out / name}: {error}")
