"""What goes: helpers of the old rig, until the files that use them are rewritten."""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

import torch
from rig import AT_END, ROOT, end_with_parent, last_checkpoint
from torch.distributed.tensor import DTensor

import checkpoint
import dist
import train
from log import read_rows

TRAIN = ROOT / "train.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TINY = (
    "--n_layer 2 --n_head 4 --n_kv_head 2 --d_model 32 --d_ff 64 --seq_len 16 "
    "--global_batch_size 8 --sample_tokens 0 --wrap block"
)
QUIET = (
    "--device cpu --eval_sequences 10 --eval_interval 0 --save_interval 0 --log_interval 1 "
    "--lr 3e-3 --warmup_steps 1"
)


def end_process(process: subprocess.Popen | BaseProcess) -> None:
    if not isinstance(process, subprocess.Popen):
        process.kill()
        process.join()
    elif process.poll() is None:
        process.terminate()  # torchrun and docs.play then end their child processes
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that its parent has yet to wait for."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and ") Z " not in status.read_text()


def start_process(command: list, prepare=lambda: None, **options) -> subprocess.Popen:
    """Start a command that ends with its test; `prepare` runs first in the new process."""

    def prepare_all() -> None:
        end_with_parent()
        prepare()

    words = list(map(str, command))
    process = subprocess.Popen(words, preexec_fn=prepare_all, start_new_session=True, **options)
    AT_END.append(lambda: end_process(process))
    return process


def exit_statuses(processes: list[BaseProcess]) -> list[int | None]:
    """Return the exit statuses, with None for a process that does not end within 60 seconds."""
    for process in processes:
        process.join(60)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return statuses


def call_train(argv: list[str]) -> int:
    return train.main(argv)


def listen(argv: list[str], main=call_train) -> tuple[int, str, str]:
    """Run train.py or another command; return (status, standard output, standard error)."""
    out, err = io.StringIO(), io.StringIO()
    # A failing rank other than 0 waits for torchrun to end it. Here nothing would end it.
    no_pause = mock.patch("time.sleep")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), no_pause:
        status = main(argv)
    return status, out.getvalue(), err.getvalue()


def make_saver(
    folder: Path, async_save: bool, keep_last: int, keep_every: int, extra_files: dict | None = None
) -> checkpoint.Saver:
    """A saver whose rows are in `saver.rows`."""
    rows = []
    options = dict(
        run=folder,
        keep_last=keep_last,
        keep_every=keep_every,
        extra_files=extra_files or {},
        report=lambda row, line: rows.append(row),
    )
    if async_save:
        from extras.async_save import AsyncSaver  # which a reader may have deleted

        saver = AsyncSaver(timedelta(seconds=20), **options)
    else:
        saver = checkpoint.Saver(on_all_ranks=dist.on_all_ranks, **options)
    saver.rows = rows
    return saver


def memory_taken(task: Callable[[], None]) -> int:
    """Run the task; return the largest growth of this process meanwhile, in bytes."""
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak

    def kilobytes(name: str) -> int:
        return int(re.search(rf"{name}:\s+(\d+)", status.read_text())[1])

    before = kilobytes("VmRSS")
    task()
    return 1024 * (kilobytes("VmHWM") - before)


def wait_until(condition, seconds: float, said=lambda: "", pause: float = 0.01) -> None:
    """Wait until the condition is true; on a timeout, fail with the text that `said` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(pause)


def children(pid: int) -> list[int]:
    """The process ids of a process's children."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


class Job:
    """A command in its own session, as if started from a terminal, with its output in files."""

    def __init__(self, command: list, folder: Path, **options):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        folder.mkdir(exist_ok=True)
        self.out_file = folder / "stdout.txt"
        self.err_file = folder / "stderr.txt"
        with open(self.out_file, "w") as out, open(self.err_file, "w") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            command = [sys.executable, *command]
            self.process = start_process(command, env=environment, **streams, **options)
        self.pid = self.process.pid

    @property
    def out(self) -> str:
        return self.out_file.read_text()

    @property
    def err(self) -> str:
        return self.err_file.read_text()

    def ranks(self) -> list[int]:
        """The process ids of the ranks that torchrun started."""
        return children(self.pid)

    def wait_until(self, condition, seconds: float) -> None:
        """Wait until the condition is true; fail if the job ends before."""

        def is_met() -> bool:
            met = condition()
            assert met or self.process.poll() is None, self.err
            return met

        wait_until(is_met, seconds, lambda: self.err)

    def wait(self, seconds: float) -> int:
        """Wait for the end; return the exit status."""
        return self.process.wait(seconds)


def torchrun(nproc: int, argv: list, folder: Path, *options: str, script: Path = TRAIN, **more):
    """Start train.py or another script under torchrun, as a user does on one host."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", nproc]
    return Job([*launcher, *options, script, *argv], folder, **more)


def flags(text: str) -> list[str]:
    return f"{TINY} {QUIET} {text}".split()


def rows(run: Path, key: str = "loss") -> list[dict]:
    """The rows of a run's metrics.jsonl that contain `key`, without those that are void."""
    valid = []
    for row in read_rows(run / "metrics.jsonl"):
        if row.get("event") == "start":
            valid = [earlier for earlier in valid if earlier["step"] <= row["step"]]
        valid.append(row)
    return [row for row in valid if key in row]


def start_row(step: int = 0, **config) -> dict:
    """The row of a start of a log."""
    row = {"step": step, "event": "start", "time": "2026-11-28T00:00:00+00:00", "config": config}
    return row | {"host": "here", "ranks": 2, "device": "cpu"}


def documented_fields(document: str, table: str, row: str = "") -> set[str]:
    """The names in the first column of the table with this header, or in `row`'s other cells."""
    text = (ROOT / "docs" / document).read_text().partition(f"\n| {table} |")[2]
    _, _, *lines = text.partition("\n\n")[0].splitlines()
    cells = [line.split(" | ", 1) for line in lines]
    if row:
        (found,) = [rest for first, rest in cells if first == f"| {row}"]
    else:
        found = " ".join(first for first, _ in cells)
    return set(re.findall(r"`(\w+)`", found))


def newest_step(run: Path) -> int:
    return checkpoint.read_manifest(last_checkpoint(run))["step"]


def tensors(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The full tensors of a checkpoint."""
    reader = checkpoint.Reader(path)
    found = {}
    for name, saved in reader.tensors.items():
        if name.startswith(prefix):
            found[name] = torch.empty_like(saved.full, device="cpu")
            reader.fill(name, found[name])
    return found


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    """Gather a DTensor on every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def contents(folder: Path) -> dict:
    """{path: (time, bytes)} of a folder's files. Folders, whose times a lock changes, are False."""
    return {
        path: path.is_file() and (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
    }


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
