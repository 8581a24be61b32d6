"""The log: rows of metrics.jsonl and optim.jsonl, and lines on the console."""

import functools
import importlib
import json
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

# Dense bfloat16 FLOP/s, accumulated in float32, keyed by torch.cuda.get_device_name. Comments quote
# NVIDIA's figures in TFLOP/s; those "with sparsity" are twice the dense ones.
PEAK_FLOPS = {
    # A100 data sheet 1758950: 312 dense, PCIe and SXM
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    # nvidia.com/en-us/data-center/h100, with sparsity: SXM 1,979, PCIe 1,513, NVL 1,671
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    # nvidia.com/en-us/data-center/h200, with sparsity: SXM 1,979, NVL 1,671
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    # nvidia.com/en-us/data-center/grace-hopper-superchip: as the H100 SXM
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA GH200 144G HBM3e": 989e12,
    # Blackwell data sheet 3384703, with sparsity, of one GPU: HGX B200 4,500, GB200 5,000
    "NVIDIA B200": 2250e12,
    "NVIDIA GB200": 2500e12,
    # nvidia.com/en-us/data-center/l4: 242 with sparsity; L40S data sheet: 362.05 dense
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    # White papers, dense: Ada, appendix A: 165.2; RTX Blackwell, table 3: 209.5
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA GeForce RTX 5090": 209.5e12,
}


# The name since torch 2.13, which warns of the older one
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

REMEDY = "The checkpoints in --out are from before: lower --lr or check the data"


class Diverged(RuntimeError):
    """Training no longer makes progress."""

    exit_status = 1


# --------------------------------------------------------------------------------------------------
# Measurements


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads a rank"


def peak_flops(
    device: torch.device, dtype: torch.dtype, peak_tflops: float | None = None
) -> float | None:
    """FLOP/s that MFU divides by: `peak_tflops`, else from PEAK_FLOPS, else None."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    return PEAK_FLOPS.get(device_name(device)) if dtype == torch.bfloat16 else None


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes so far: of tensors on the device, and of this process's resident memory.

    Of the device also what torch's allocator has reserved, and how often it had to free its cache
    and try again, which waits for the device. On a CPU the device's figures are 0.
    """
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return {
        "peak_device_memory": stats.get("allocated_bytes.all.peak", 0),
        "peak_reserved_memory": stats.get("reserved_bytes.all.peak", 0),
        "allocation_retries": stats.get("num_alloc_retries", 0),
        "peak_host_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
    }


class DeviceEvent:
    """A point in the device's queue of work, after everything the host has queued so far."""

    def __init__(self, device: torch.device):
        self.host_time = time.perf_counter()
        self.event = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record()

    def has_passed(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        if self.event:
            self.event.synchronize()

    def since(self, earlier: "DeviceEvent") -> float:
        """Seconds on the device between two events that have passed."""
        if self.event:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.host_time - earlier.host_time


# --------------------------------------------------------------------------------------------------
# Files


def replace_file(path: Path, text: str | bytes) -> None:
    """Replace a file atomically. On failure it is unchanged; OSError names it."""
    partial = path.with_name(f".{path.name}.tmp")
    try:
        partial.write_bytes(text.encode() if isinstance(text, str) else text)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_lines(path: Path) -> Iterator[tuple[bytes, object]]:
    """The lines of a file of JSON lines, each with its value: None if it does not parse."""
    for line in path.read_bytes().splitlines() if path.exists() else []:
        value = None
        with suppress(ValueError):
            value = json.loads(line)
        yield line, value


# What each kind of row has; any may have more
KINDS = [
    "step time tokens loss grad_norm lr clipped skipped_steps step_time tokens_per_second",
    "step time val_loss",
    "step time event path",
    "step parameter",
]


def is_of_log(row) -> bool:
    """Whether a Log wrote it: it is no note of yours, and no event of other code."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    is_timed = isinstance(row.get("time", ""), str)
    return is_timed and any(row.keys() >= {*kind.split()} for kind in KINDS)


def read_log(path: Path, warn: Callable[[str], None] = lambda line: None) -> list[dict]:
    """The rows of metrics.jsonl or optim.jsonl; `warn` gets a line that counts all others.

    Such as a row that a kill or a full disk cut short.
    """
    values = [value for _, value in read_lines(path)]
    rows = [value for value in values if is_of_log(value)]
    if skipped := len(values) - len(rows):
        warn(f"{path}: skipped {skipped} line{'s' * (skipped > 1)} not written by the log")
    return rows


def drop_rows_after(path: Path, step: int, warn: Callable[[str], None]) -> list[dict]:
    """Drop the rows after `step`, where a run resumes; return the others of the log.

    Rows that were cut short go as well. What else is there stays as it is.
    """
    kept = []
    for line, row in read_lines(path):
        if isinstance(row, dict) and type(row.get("step")) is int:
            is_kept = row["step"] <= step
        else:
            is_kept = not line.startswith(b'{"step"')
        kept += [line + b"\n"] * is_kept
    if path.exists():
        replace_file(path, b"".join(kept))
    return read_log(path, warn)


def seconds_in_steps(rows: list[dict]) -> float:
    """The time that the steps of a log's training rows took."""
    total = 0.0
    previous_step = None
    for row in rows:
        if "loss" in row:
            # step_time is the mean since the previous row. The first row of a run has one step.
            steps = 1 if previous_step is None else row["step"] - previous_step
            total += steps * row["step_time"]
            previous_step = row["step"]
    return total


def json_line(row: dict) -> bytes:
    """Writes nan and inf, which JSON lacks, as null."""
    finite = {}
    for key, value in row.items():
        is_finite = not isinstance(value, float) or math.isfinite(value)
        finite[key] = value if is_finite else None
    return json.dumps(finite).encode() + b"\n"


def console_line(row: dict, max_steps: int, is_first: bool) -> str:
    """A training row for people.

    A process's first step allocates and may compile, so it cannot predict the time left.
    """
    # Rounded first: 59.7 seconds are 1m00s
    minutes, seconds = divmod(round((max_steps - row["step"]) * row["step_time"]), 60)
    left = "" if is_first else f"  {minutes}m{seconds:02}s left"
    mfu = "" if row["mfu"] is None else f"  mfu {row['mfu']:.1%}"
    return (
        f"{row['step'] / max_steps:4.0%}  loss {row['loss']:.4f}  "
        f"grad_norm {row['grad_norm']:.3f}  lr {row['lr']:.2e}  "
        f"{row['step_time'] * 1e3:,.0f} ms  {row['tokens_per_second']:,.0f} tok/s{mfu}{left}"
    )


# --------------------------------------------------------------------------------------------------
# Trackers

# Optional packages, each with the module to import
TRACKERS = {"wandb": "wandb", "tensorboard": "torch.utils.tensorboard"}


class TrackerError(ImportError):
    """A tracker's package is not installed or fails to import."""

    exit_status = 2


def check_tracker(name: str) -> None:
    """Raises TrackerError if a tracker's package is missing."""
    try:
        if name != "none":
            importlib.import_module(TRACKERS[name])
    except Exception as error:  # importing a package can raise anything
        raise TrackerError(f"--tracker {name}: pip install {name} ({error})") from None


@dataclass(frozen=True)
class Tracker:
    """wandb or TensorBoard, writing to a folder in `out`; opens on first access to `send`."""

    name: str
    out: Path
    run_id: str  # wandb continues the run with this id
    last_step: int  # before this start
    config: dict

    @functools.cached_property
    def send(self) -> Callable[[int, dict[str, float]], None]:
        """send(step, numbers)"""
        module = importlib.import_module(TRACKERS[self.name])
        if self.name == "wandb":
            run = module.init(
                project="nanoshard",
                name=self.out.name,
                id=self.run_id,
                resume="allow",
                dir=self.out,
                config=self.config,
            )
            return lambda step, numbers: run.log(numbers, step=step)
        writer = module.SummaryWriter(self.out / "tensorboard", purge_step=self.last_step + 1)

        def send(step: int, numbers: dict[str, float]) -> None:
            for field, value in numbers.items():
                writer.add_scalar(field, value, step)
            writer.flush()  # a kill loses nothing

        return send


# --------------------------------------------------------------------------------------------------
# The log


@dataclass(frozen=True)
class Mark:
    """The start or end of a row's interval."""

    step: int
    event: DeviceEvent
    data_wait: float  # seconds


@dataclass(frozen=True)
class PendingRow:
    """A row on its way from the devices to the log."""

    began: Mark
    ended: Mark
    arrived: DeviceEvent
    lr: float
    names: list[str]
    values: Tensor  # (world_size, len(names)), float64, in host memory


@dataclass
class Log:
    """Rows and console lines from rank 0; every rank takes part in the all_gather of a row.

    A training row goes step -> send_row -> write_pending -> record -> append.
    """

    out: Path
    device: torch.device
    last_step: int  # the run resumes after it
    started: float  # first start of the run, seconds since the epoch
    max_steps: int
    tokens_per_step: int  # of all ranks
    flops_per_token: float
    peak_flops: float | None  # of a device; None: unknown
    max_skipped: int  # consecutive skipped updates that end the run; 0: never
    tracker: Tracker | None = None
    quiet: bool = False  # warnings only

    def __post_init__(self):
        self.is_rank0 = dist.get_rank() == 0
        self.skipped_in_a_row = 0
        self.data_wait = 0.0  # seconds this rank has waited for data
        self.loss = math.nan  # last row: mean over the global batch
        self.step_time = 0.0  # seconds, last row
        self.longest_pause = 0.0  # seconds
        self.pending: PendingRow | None = None
        self.mark = self.mark_now(self.last_step)
        self.unwritten: dict[str, bytes] = {}
        self.is_gone = False  # the folder: renamed or removed
        self.useful_time = 0.0  # seconds in steps so far, lost ones excluded
        if self.is_rank0:
            drop_rows_after(self.out / "optim.jsonl", self.last_step, self.say)
            rows = drop_rows_after(self.out / "metrics.jsonl", self.last_step, self.say)
            self.useful_time = seconds_in_steps(rows)
        self.track({})  # opens it now: wandb takes seconds

    def mark_now(self, step: int) -> Mark:
        return Mark(step, DeviceEvent(self.device), self.data_wait)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes its block from the step time; first writes the pending row."""
        self.flush()
        began = time.perf_counter()
        yield
        self.longest_pause = max(self.longest_pause, time.perf_counter() - began)
        self.mark = self.mark_now(self.mark.step)

    # Training rows

    def step(self, step: int, metrics: dict[str, Tensor], optimizer, is_due: bool) -> None:
        """Call after each step: writes the row that has arrived, and sends one if it is due.

        `metrics` is what train_step returned, `optimizer` an optim.Optimizer. Raises Diverged on
        all ranks in the same step if training no longer makes progress.
        """
        if self.pending and self.pending.arrived.has_passed():
            self.write_pending()
        if "parameters" in metrics:
            self.parameters(step, optimizer, metrics.pop("parameters"))
        if is_due:
            self.flush()  # waits only if the previous row has not arrived
            self.pending = self.send_row(step, metrics, optimizer.lr)
            self.mark = self.pending.ended
            if self.device.type == "cpu":  # it is already here
                self.flush()

    def send_row(self, step: int, metrics: dict[str, Tensor], lr: float) -> PendingRow:
        """One small all_gather and an asynchronous copy to the host.

        `metrics` are 0-d device tensors: the loss and what optim.Optimizer.step returned.
        """
        now = self.mark_now(step)
        own = {
            "data_wait": now.data_wait - self.mark.data_wait,
            **peak_memory(self.device),
        }
        own_values = torch.tensor(list(own.values()), dtype=torch.float64)
        if self.device.type == "cuda":
            own_values = own_values.pin_memory().to(self.device, non_blocking=True)
        metric_values = torch.stack([value.double() for value in metrics.values()])
        values = torch.cat((metric_values, own_values))
        ranks = values.new_empty(dist.get_world_size() * len(values))
        all_gather_single(ranks, values)
        in_host_memory = ranks.view(-1, len(values)).to("cpu", non_blocking=True)
        arrived = DeviceEvent(self.device)
        return PendingRow(self.mark, now, arrived, lr, [*metrics, *own], in_host_memory)

    def flush(self) -> None:
        """Wait for the pending row and write it. Raises Diverged as `step` does."""
        if self.pending:
            self.pending.arrived.wait()
            self.write_pending()
        if self.max_skipped and self.skipped_in_a_row >= self.max_skipped:
            raise Diverged(
                f"{self.skipped_in_a_row} updates in a row were skipped up to step "
                f"{self.mark.step}, because their gradients were not finite or spiked. {REMEDY}"
            )

    def write_pending(self) -> None:
        """Compute the row from the values of all ranks, write it and print it."""
        pending = self.pending
        self.pending = None
        ranks = dict(zip(pending.names, pending.values.T.tolist()))  # name -> value of each rank
        steps = pending.ended.step - pending.began.step
        world_size = len(pending.values)
        self.skipped_in_a_row = int(max(ranks["skipped_in_a_row"]))
        self.loss = sum(ranks["loss"]) / world_size
        self.step_time = pending.ended.event.since(pending.began.event) / steps
        tokens_per_second = self.tokens_per_step / self.step_time
        flops = tokens_per_second / world_size * self.flops_per_token
        self.useful_time += steps * self.step_time
        row = {
            "step": pending.ended.step,
            "tokens": pending.ended.step * self.tokens_per_step,
            "loss": self.loss,
            "grad_norm": max(ranks["grad_norm"]),
            "lr": pending.lr,
            "clipped": int(max(ranks["clipped"])),
            "skipped_steps": int(max(ranks["skipped_steps"])),
            "step_time": self.step_time,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / world_size,
            "mfu": flops / self.peak_flops if self.peak_flops else None,
            "data_wait": max(ranks["data_wait"]),
            "data_wait_min": min(ranks["data_wait"]),
            "goodput": self.useful_time / (time.time() - self.started),
            "peak_device_memory": int(max(ranks["peak_device_memory"])),
            "peak_reserved_memory": int(max(ranks["peak_reserved_memory"])),
            "allocation_retries": int(max(ranks["allocation_retries"])),
            "peak_host_memory": int(max(ranks["peak_host_memory"])),
        }
        self.record(row)
        is_first = pending.began.step == self.last_step
        self.say_unless_quiet(console_line(row, self.max_steps, is_first), row["step"])

    # Other rows

    def parameters(self, step: int, optimizer, table: Tensor) -> None:
        """Write a row of optim.jsonl per parameter; rank 0 waits for the device.

        `table` (parameters, columns) is on the device, as optim.Optimizer returned it.
        """
        if not self.is_rank0:
            return
        rows = []
        for name, values in zip(optimizer.parameters, table.tolist()):
            columns = dict(zip(optimizer.columns, values))
            rows.append({"step": step, "parameter": name, **columns})
        self.append("optim.jsonl", rows)

    def evaluation(self, step: int, val_loss: float) -> None:
        """Write the row of an evaluation. Raises Diverged if the loss is not finite."""
        self.record({"step": step, "val_loss": val_loss})
        self.say_unless_quiet(f"val_loss {val_loss:.4f}", step)
        if not math.isfinite(val_loss):
            raise Diverged(f"the validation loss of step {step} is {val_loss}. {REMEDY}")

    def checkpoint(self, row: dict) -> None:
        """Write the row of a save that succeeded or failed."""
        self.record(row)
        if row["event"] == "checkpoint_failed":
            problem = f"cannot write {row['path']}: {row['error']}"
            self.say(f"NOT SAVED: {problem}; earlier checkpoints are intact", row["step"])
            return
        line = f"saved {row['path']}: {row['bytes'] / 1e6:,.1f} MB in {row['seconds']:.2f} s"
        if row["blocking_seconds"] < row["seconds"]:
            line += f", of which training waited {row['blocking_seconds']:.2f} s"
        self.say_unless_quiet(line, row["step"])

    # Output

    def record(self, row: dict) -> None:
        """Append a row to metrics.jsonl; unless it is a save, send it to the tracker."""
        self.append("metrics.jsonl", [{**row, "time": datetime.now().astimezone().isoformat()}])
        if "event" not in row:
            self.track({name: value for name, value in row.items() if value is not None})

    def track(self, numbers: dict) -> None:
        """Send a row's numbers to the tracker; if there are none, just open it."""
        if not (self.tracker and self.is_rank0):
            return
        try:
            send = self.tracker.send
            if numbers:
                send(numbers.pop("step"), numbers)
        except Exception as error:
            self.tracker = None
            self.say(f"--tracker failed and is off until the next start: {error!r}")

    def say_unless_quiet(self, line: str, step: int) -> None:
        if not self.quiet:
            self.say(line, step)

    def say(self, line: str, step: int | None = None) -> None:
        if not self.is_rank0:
            return
        if step is not None:
            line = f"step {step:>{len(str(self.max_steps))}}/{self.max_steps}  {line}"
        print(line, flush=True)

    def goodput(self) -> str:
        """The share of time since the first start that made progress, in words."""
        age = time.time() - self.started
        return (
            f"goodput {self.useful_time / age:.0%}: {self.useful_time:,.0f} of the {age:,.0f} s "
            "since the first start went into steps that count"
        )

    def append(self, name: str, rows: list[dict]) -> None:
        """Append rows to a file; if the disk is full, keep them for the next call.

        If the folder is gone, only says so, in `is_gone`: the run must end.
        """
        if not self.is_rank0 or self.is_gone:
            return
        content = self.unwritten.pop(name, b"") + b"".join(map(json_line, rows))
        try:
            # Open for each write, unbuffered: the kernel has each row at once.
            with open(self.out / name, "ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                if file.write(content) < len(content):
                    file.truncate(size)
                    raise OSError("no room for a whole row")
        except FileNotFoundError:
            self.is_gone = True
        except OSError as error:
            self.unwritten[name] = content
            self.say(f"cannot write {self.out / name} now: {error}")
