"""What the tests share: a small corpus, worker processes that play the ranks, and real jobs.

Importing torch takes seconds, so one process imports it and the workers are forked from it. They
form a new gloo group for every case. Tests that need torchrun, signals or kills start a job.
"""

import contextlib
import dataclasses
import io
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from core import conftest as core
from core.conftest import end_with_parent, free_port, variables
from torch.distributed.tensor import DTensor

import checkpoint
import config
import dist
import optim
import prepare
import train
from config import Config, Run, parse
from data import TokenFolder
from dist import World
from log import read_rows
from model import ModelConfig, Transformer
from start import start_run

ROOT = Path(__file__).parent.parent
pool, job = core.pool, core.job  # fixtures: the ranks of tests/core, and jobs on `tokens`
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

# torch's store looks up the name of every peer. If no name server answers, wait one second,
# not five.
os.environ["RES_OPTIONS"] = "timeout:1"

torch.set_num_threads(1)  # also in the workers: other processes use the other cores

# Files, by their paths in the repository, that an issue will move to the new core, and what it
# does. Tests among them are not collected, and tests of documents leave the others out.
NEXT_ISSUES = dict.fromkeys(
    [
        "docs/lecture.md",
        "docs/lecture-1-ranks.md",
        "docs/lecture-2-memory.md",
        "docs/lecture-3-clusters.md",
        "tests/test_lecture.py",  # and so docs/bugs and docs/play.py
    ],
    "issue 100 writes the lecture again",
)
collect_ignore = [ROOT / file for file in NEXT_ISSUES]


# --------------------------------------------------------------------------------------------------
# Processes that end with their test

STARTED: list[subprocess.Popen | BaseProcess] = []  # by the current test


@pytest.fixture(autouse=True)
def processes_end_with_their_test():
    """End the processes that a failed test has left running."""
    yield
    while STARTED:
        end_process(STARTED.pop())


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
    STARTED.append(process)
    return process


# --------------------------------------------------------------------------------------------------
# Workers that play the ranks


@pytest.fixture
def one_rank(monkeypatch):
    """Start a process group of this process alone; the value is its dist.World."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield dist.start("cpu")
    torch.distributed.destroy_process_group()


def fork_ranks(size: int, function, *arguments) -> list[multiprocessing.Process]:
    """Start ranks that a test may kill. They are forked, so they need not import torch."""
    port = free_port()

    def play(rank: int) -> None:
        end_with_parent()
        os.environ |= variables(rank, size, port)
        torch.set_num_threads(1)
        sys.exit(function(*arguments))

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=play, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    STARTED.extend(processes)
    return processes


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


CPU = World(
    rank=0,
    size=1,
    local_size=1,
    device=torch.device("cpu"),
    timeout=timedelta(seconds=600),
    device_name="",
    has_bfloat16=False,
)
SOURCE = TokenFolder(Path("tokens"), np.dtype(np.uint16), 257, "bytes", "abc")


def resolve(
    text: str, source: TokenFolder = SOURCE, saved: ModelConfig | None = None, **world
) -> Run:
    """Resolve a command line on one CPU, or in a world with the fields `world` changed."""
    if "size" in world:
        world = {"local_size": world["size"], **world}
    place = dataclasses.replace(CPU, **world)
    return config.resolve(Config(**parse(text.split())), place, source, saved)


def build_run(argv: list[str]) -> SimpleNamespace:
    """Build a run of train.py on this rank, up to its first step."""
    world = dist.start(parse(argv).get("device", "auto"))
    with contextlib.ExitStack() as held, contextlib.redirect_stdout(io.StringIO()):
        run, start = start_run(argv, world, held)
        state = train.build(run, start.mesh, train.empty_model(run))
        train.load(state, start)
    batches = train.micro_batches(run, start, state.step)
    return SimpleNamespace(run=run, start=start, state=state, batches=batches, mesh=start.mesh)


def train_step(built: SimpleNamespace, step: int) -> tuple:
    """Take step number `step` of a run."""
    built.state.step = step
    lr = optim.learning_rate(step, built.run)
    return train.train_step(built.state, built.batches, built.run, lr)


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


# --------------------------------------------------------------------------------------------------
# Jobs: train.py under torchrun, or without


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


# --------------------------------------------------------------------------------------------------
# Runs and what they leave


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A token folder of 40 documents of invented words: about 30,000 bytes."""
    root, rng = tmp_path_factory.mktemp("corpus"), random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    (root / "text").mkdir()
    for i in range(40):
        (root / "text" / f"{i:02}.txt").write_text(" ".join(rng.choices(words, k=150)))
    prepare.prepare([str(root / "text")], root / "tokens", val_fraction=0.2)
    return root / "tokens"


@pytest.fixture
def small_disk(tmp_path):
    """A 1 MB file system, with room for two or three checkpoints but not eight."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture
def tokenizers():
    return pytest.importorskip("tokenizers", reason="needs tests/requirements-extra.txt")


def flags(text: str) -> list[str]:
    return f"{TINY} {QUIET} {text}".split()


@pytest.fixture
def on_ranks(pool, tokens, tmp_path):
    """on_ranks(2, function, "--strategy ...", ...): call function(argv, ...) on each of two ranks.

    argv is the flags of a run in tmp_path / "run". Returns a list with the result of each rank.
    """

    def call(size: int, function, text: str, *arguments, **options) -> list:
        argv = flags(f"--data {tokens} --out {tmp_path}/run {text}")
        return pool(size, function, argv, *arguments, **options)

    return call


@pytest.fixture
def run(on_ranks, tmp_path):
    """run(ranks, "--strategy ...", name): train and return the run folder."""

    def start(size: int, text: str, name: str = "run", **options) -> Path:
        out = tmp_path / name
        assert on_ranks(size, call_train, f"--out {out} {text}", **options) == [0] * size
        return out

    return start


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


def last_checkpoint(run: Path) -> Path:
    return checkpoint.list_checkpoints(run)[-1]


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


def assert_same(one: Path, other: Path) -> None:
    """Check that two runs ended with the same weights and optimizer state, bit for bit."""
    a, b = (tensors(last_checkpoint(run)) for run in (one, other))
    assert a.keys() == b.keys()
    assert len(a) > 50
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def assert_close(one: Path, other: Path, rel: float = 1e-5) -> None:
    """Check that two runs logged the same losses and gradient norms, up to rounding."""
    for expected, row in zip(rows(one), rows(other), strict=True):
        for key in ("loss", "grad_norm"):
            assert row[key] == pytest.approx(expected[key], rel=rel)


def contents(folder: Path) -> dict:
    """{path: (time, bytes)} of a folder's files. Folders, whose times a lock changes, are False."""
    return {
        path: path.is_file() and (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
    }


def file_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def build_model(config: ModelConfig, seed: int = 0, **options) -> Transformer:
    """A model on the CPU with its initial weights in float32."""
    with torch.device("meta"):
        model = Transformer(config, **options)
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        model.init_tensor(name, parameter, seed)
    return model


def copy_with(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """Copy the project's code to `folder`, with changes: (file, old text, which occurs once, new).

    A fault that is planted in this way is what a person could commit.
    """
    unwanted = shutil.ignore_patterns("__pycache__")
    for path in ROOT.glob("*.py"):
        folder.mkdir(exist_ok=True)
        shutil.copy(path, folder)
    for name in ("extras", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    for name, old, new in changes:
        source = (folder / name).read_text()
        assert source.count(old) == 1, (name, old)
        (folder / name).write_text(source.replace(old, new))
    return folder
