"""The log: rows of metrics.jsonl and optim.jsonl, and lines on the console."""

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
import torch.distributed
from torch import Tensor

# Dense bfloat16 TFLOP/s, accumulated in float32; the keys are what torch.cuda.get_device_name
# returns. Comments quote NVIDIA's figures; a figure "with sparsity" is twice the dense one.
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
    "NVIDIA GH200 480GB": 989,
    "NVIDIA GH200 144G HBM3e": 989,
    # Blackwell data sheet 3384703, with sparsity, of one GPU: HGX B200 4,500, GB200 5,000
    "NVIDIA B200": 2250,
    "NVIDIA GB200": 2500,
    # nvidia.com/en-us/data-center/l4: 242 with sparsity; L40S data sheet: 362.05 dense
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    # White papers, dense: Ada, appendix A: 165.2; RTX Blackwell, table 3: 209.5
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
}


# The name since torch 2.13, which warns of the older one
all_gather_single = getattr(
    torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
)

REMEDY = "The checkpoints in --out precede the divergence: lower --lr or check the data"


class Diverged(RuntimeError):
    """Training no longer makes progress."""

    exit_status = 1


# --------------------------------------------------------------------------------------------------
# Measurements


def device_name(device: torch.device) -> str:
    """The name of a GPU, or the architecture of a CPU and the threads that this rank uses."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} threads a rank"


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak bytes so far of tensors on the device, and of this process's resident memory.

    Also the peak bytes that torch's allocator has reserved on the device, and how often it had to
    free its cache and try again, which waits for the device. All but the resident memory are 0 on
    a CPU.
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


def read_log(path: Path) -> list[dict]:
    """The rows of metrics.jsonl or optim.jsonl: JSON objects with a `step`.

    All other lines are left out, such as a row that a full disk cut short.
    """
    return [value for _, value in read_lines(path) if is_row(value)]


def is_row(value: object) -> bool:
    """Whether the value of a line is a row, and no note of a user's: an object with a `step`."""
    return isinstance(value, dict) and type(value.get("step")) is int


def drop_rows_after(path: Path, step: int) -> list[dict]:
    """Drop the rows after `step`, where a run resumes; return the rows that are left."""
    if not path.exists():
        return []
    kept = [line for line, row in read_lines(path) if not is_row(row) or row["step"] <= step]
    replace_file(path, b"".join(line + b"\n" for line in kept))
    return read_log(path)


def is_due(step: int, interval: int) -> bool:
    """Whether `step` ends an interval; an interval of 0 never ends."""
    return interval > 0 and step % interval == 0


def console_line(row: dict, max_steps: int, is_first: bool) -> str:
    """A training row for people.

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
        left = round((max_steps - row["step"]) * row["step_time"])  # 59.7 seconds are 1m00s
        line += f"  {left // 60}m{left % 60:02}s left"
    return line


def open_wandb(out: Path, run_id: str, config: dict) -> Callable[[dict], None]:
    """Continue the run with the id `run_id`, in a folder in `out`; return send(row)."""
    wandb = importlib.import_module("wandb")  # an optional package
    options = {"project": "nanoshard", "name": out.name, "dir": out, "config": config}
    run = wandb.init(id=run_id, resume="allow", **options)

    def send(row: dict) -> None:
        values = {name: value for name, value in row.items() if name != "step"}
        run.log(values, step=row["step"])

    return send


# --------------------------------------------------------------------------------------------------
# The log


# A row has the mean over ranks; for a loss, that over the global batch. Of these columns it has the
# maximum, of counts as an integer.
LARGEST = {"lr", "grad_norm", "data_wait"}
COUNTS = {"clipped", "skipped_steps", "skipped_in_a_row", "peak_device_memory"}
COUNTS |= {"peak_reserved_memory", "allocation_retries", "peak_host_memory"}


@dataclass(frozen=True)
class Rates:
    """What turns the time of a step into rates."""

    device: torch.device
    tokens_per_step: int  # of all ranks
    flops_per_token: float
    peak_flops: float | None  # of a device; None: unknown


class Mark:
    """The start or end of a row's interval: now, or on a GPU after all work queued so far."""

    def __init__(self, device: torch.device, step: int, data_wait: float):
        self.step = step
        self.data_wait = data_wait  # seconds so far
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

    def since(self, earlier: "Mark") -> float:
        """Seconds between two marks that have passed."""
        if self.event:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self.host_time - earlier.host_time


@dataclass(frozen=True)
class PendingRow:
    """A row on its way from the devices to the log."""

    began: Mark
    ended: Mark  # `values` have arrived
    names: list[str]
    values: Tensor  # (world_size, len(names)), float64, in host memory


class Log:
    """Rows and console lines from rank 0; every rank takes part in the all_gather of a row.

    out         the run folder
    c           the flags, or anything with their names
    rates       of this device and model
    last_step   the run resumes after it
    first_start when the run first started
    batches     its `waited` is the seconds that this rank has waited for data so far

    A training row goes step -> send -> write -> append.
    """

    def __init__(self, out: Path, c, rates: Rates, last_step: int, first_start: datetime, batches):
        self.out = out
        self.c = c
        self.rates = rates
        self.last_step = last_step
        self.first_start = first_start.timestamp()
        self.batches = batches
        self.is_rank0 = torch.distributed.get_rank() == 0
        self.skipped_in_a_row = 0
        self.loss = math.nan  # last row: mean over the global batch
        self.pending: PendingRow | None = None
        self.mark = Mark(rates.device, last_step, batches.waited)
        self.useful_time = 0.0  # seconds in steps so far, lost ones excluded
        self.tracker = None  # send(row)
        if not self.is_rank0:
            return
        drop_rows_after(out / "optim.jsonl", last_step)
        rows = [row for row in drop_rows_after(out / "metrics.jsonl", last_step) if "loss" in row]
        if rows:
            age = datetime.fromisoformat(rows[-1]["time"]).timestamp() - self.first_start
            self.useful_time = rows[-1]["goodput"] * max(0.0, age)  # < 0: starts.jsonl is missing
        if c.tracker != "none":
            run_id = f"{out.name}-{first_start:%Y%m%d-%H%M%S}"
            try:
                self.tracker = open_wandb(out, run_id, vars(c))
            except Exception as error:
                self.drop_tracker(error)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes its block from the step time; first writes the pending row."""
        self.flush()
        yield
        self.mark = Mark(self.rates.device, self.mark.step, self.batches.waited)

    # Training rows

    def step(self, step: int, values: dict, stops: bool = False) -> None:
        """Call after each step: writes the row that has arrived, and sends one if it is due.

        `values` is what train_step returned: every 0-d tensor and every number in it is a column.
        `stops`: the run stops here. Raises Diverged on all ranks in the same step if training no
        longer makes progress.
        """
        if self.pending and self.pending.ended.has_passed():
            self.write()
        table = values.pop("parameters", None)  # an optim.ParameterTable
        if table and self.is_rank0:
            self.append("optim.jsonl", [{"step": step, **row} for row in table.rows()])
        c = self.c
        due = stops or step in (self.last_step + 1, c.max_steps)
        for interval in (c.log_interval, c.eval_interval, c.save_interval):
            due = due or is_due(step, interval)
        if due:
            self.flush()  # waits only if the previous row has not arrived
            self.send(step, values)
            if self.rates.device.type == "cpu":  # it is already here
                self.flush()

    def send(self, step: int, values: dict) -> None:
        """Make the pending row: one small all_gather and an asynchronous copy to the host."""
        device = self.rates.device
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        numbers = {name: value for name, value in values.items() if name not in tensors}
        numbers["data_wait"] = self.batches.waited - self.mark.data_wait
        numbers |= peak_memory(device)
        columns = torch.tensor(list(numbers.values()), dtype=torch.float64)
        if device.type == "cuda":
            columns = columns.pin_memory().to(device, non_blocking=True)
        parts = [value.double()[None] for value in tensors.values()]
        columns = torch.cat((*parts, columns))
        ranks = columns.new_empty(torch.distributed.get_world_size() * len(columns))
        all_gather_single(ranks, columns)
        ranks = ranks.view(-1, len(columns)).to("cpu", non_blocking=True)
        began, self.mark = self.mark, Mark(device, step, self.batches.waited)
        self.pending = PendingRow(began, self.mark, [*tensors, *numbers], ranks)

    def flush(self) -> None:
        """Wait for the pending row and write it. Raises Diverged as `step` does."""
        if self.pending:
            self.pending.ended.wait()
            self.write()
        if self.c.max_skipped and self.skipped_in_a_row >= self.c.max_skipped:
            raise Diverged(
                f"{self.skipped_in_a_row} updates in a row were skipped up to step "
                f"{self.mark.step}, because their gradients were not finite. {REMEDY}"
            )

    def write(self) -> None:
        """Compute the pending row from the values of all ranks, write it and print it."""
        row, self.pending = self.pending, None
        steps = row.ended.step - row.began.step
        world_size = len(row.values)
        columns = {}
        for name, ranks in zip(row.names, row.values.T.tolist()):
            columns[name] = max(ranks) if name in LARGEST else sum(ranks) / world_size
            if name in COUNTS:
                columns[name] = int(max(ranks))
            if name == "data_wait":
                columns["data_wait_min"] = min(ranks)
        self.skipped_in_a_row = columns.pop("skipped_in_a_row")
        self.loss = columns["loss"]
        step_time = row.ended.since(row.began) / steps
        self.useful_time += steps * step_time
        tokens_per_second = self.rates.tokens_per_step / step_time
        flops = tokens_per_second / world_size * self.rates.flops_per_token
        peak_flops = self.rates.peak_flops
        line = {
            "step": row.ended.step,
            "tokens": row.ended.step * self.rates.tokens_per_step,
            **columns,
            "step_time": step_time,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / world_size,
            "mfu": flops / peak_flops if peak_flops else None,
            "goodput": self.useful_time / (time.time() - self.first_start),
        }
        self.record(line)
        is_first = row.began.step == self.last_step
        self.say(console_line(line, self.c.max_steps, is_first), line["step"])

    # Other rows

    def evaluation(self, step: int, val_loss: float) -> None:
        """Write the row of an evaluation. Raises Diverged if the loss is not finite."""
        self.record({"step": step, "val_loss": val_loss})
        self.say(f"val_loss {val_loss:.4f}", step)
        if not math.isfinite(val_loss):
            raise Diverged(f"the validation loss of step {step} is {val_loss}. {REMEDY}")

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

    # Output

    def record(self, row: dict) -> None:
        """Append a row to metrics.jsonl; unless it is a save, send it to the tracker."""
        self.append("metrics.jsonl", [{**row, "time": datetime.now().astimezone().isoformat()}])
        if self.tracker and "event" not in row:
            try:
                self.tracker({name: value for name, value in row.items() if value is not None})
            except Exception as error:
                self.drop_tracker(error)

    def drop_tracker(self, error: Exception) -> None:
        self.tracker = None
        self.say(f"--tracker failed and is off until the next start: {error!r}")

    def say(self, line: str, step: int | None = None) -> None:
        if not self.is_rank0:
            return
        if step is not None:
            line = f"step {step:>{len(str(self.c.max_steps))}}/{self.c.max_steps}  {line}"
        with suppress(OSError):  # a run goes on without its terminal, pipe or full disk
            print(line, flush=True)

    def goodput(self) -> str:
        """The line for the console: the share of the time since the first start in useful steps."""
        age = time.time() - self.first_start
        return (
            f"goodput {self.useful_time / age:.0%}: {self.useful_time:,.0f} of the {age:,.0f} s "
            "since the first start were training steps, lost steps excluded"
        )

    def append(self, name: str, rows: list[dict]) -> None:
        """Append rows to a file. If they cannot be written, training goes on without them."""
        if not self.is_rank0:
            return
        lines = []
        for row in rows:
            for field, value in row.items():
                if isinstance(value, float) and not math.isfinite(value):
                    row = row | {field: None}  # JSON has no nan
            lines.append(json.dumps(row) + "\n")
        try:
            with open(self.out / name, "a") as file:  # closed, the kernel has each row at once
                file.write("".join(lines))
        except OSError as error:
            self.say(f"cannot write {self.out / name}: {error}")
