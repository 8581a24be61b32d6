"""The rig of the core's tests: a pool of ranks, jobs under torchrun, and tokens of its own.

The tests of this folder judge the trainer from outside. They use command lines, files on disk, and
public functions of model, dist, optim, checkpoint and data. They import nothing else of this
project, so they also pass in a folder that contains only the core.

pool(n, function, ...)     calls a function on n ranks at once; importing torch is paid only once
train(n, "FLAGS", name)    runs train.command on n ranks of the pool; returns what happened
PoolJob(pool, argv)        starts a run on ranks of the pool, and returns at once
job(n, "FLAGS", name)      starts train.py under torchrun, for signals and kills
"""

import contextlib
import ctypes
import faulthandler
import io
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # of this process and of all ranks
os.environ["RES_OPTIONS"] = "timeout:1"  # without a name server, torch's store waits 1 s, not 5

import torch  # noqa: E402
from torch.distributed.tensor import debug  # noqa: E402

import checkpoint  # noqa: E402
import train as trainer  # noqa: E402

torch.set_num_threads(1)

KILLED = -signal.SIGKILL

SMALL = (
    "--n_layer 2 --n_head 4 --n_kv_head 2 --d_model 32 --d_ff 64 --seq_len 16 "
    "--global_batch_size 8 --sample_tokens 0 --device cpu --eval_sequences 10 --eval_interval 0 "
    "--save_interval 0 --log_interval 1 --lr 3e-3 --warmup_steps 1 --max_steps 5 --dtype float32"
)


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "slow(proves): shows what the default suite cannot")


# --------------------------------------------------------------------------------------------------
# Ranks that have torch loaded


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets for a rank, if all ranks are on one host.

    A single rank is a process without torchrun. It has no store, which would look up names.
    """
    if size == 1:
        return {}
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    found = {name: str(value) for name, value in numbers.items()}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return found | address | {"TORCHELASTIC_RUN_ID": "pool"}


def end_with_parent() -> None:
    """Make this process end with pytest, and handle signals as a process of a terminal does."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def work(pipe, stacks: Path) -> None:
    """Call the functions that come through the pipe, as one rank.

    One that takes too long writes where it is to the file `stacks`.
    """
    end_with_parent()
    file = stacks.open("w")
    while True:
        environment, function, arguments, timeout = pipe.recv()
        before = dict(os.environ)
        os.environ |= environment
        faulthandler.dump_traceback_later(timeout, file=file)
        try:
            result, error = function(*arguments), None
        except BaseException:
            result, error = None, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        # DTensor caches meshes by shape, with the names of groups that no longer exist.
        debug._clear_python_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()
        os.environ.clear()
        os.environ |= before
        pipe.send((result, error))


class Pool:
    start_method = "forkserver"

    def __init__(self):
        self.workers = []

    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="pool-")
        context = multiprocessing.get_context(self.start_method)
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # both are slow to import
        # The fork server does not inherit sys.path.
        os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/tests:{ROOT}/tests/extras"
        for rank in range(4):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, self.stacks(rank)))
            process.start()
            self.workers.append((process, here))
        del os.environ["PYTHONPATH"]

    def stacks(self, rank: int) -> Path:
        return Path(self.folder.name, f"rank-{rank}")

    def stop(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []

    def __call__(self, size: int, function: Callable, *arguments, timeout: float = 60) -> list:
        """Call the function on `size` ranks; return their results. An error of a rank fails."""
        if not self.workers:
            self.start()
        port = free_port()
        for rank, (_, pipe) in enumerate(self.workers[:size]):
            pipe.send((variables(rank, size, port), function, arguments, timeout))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self.workers[:size]):
            result, error = None, f"no answer within {timeout} s"
            has_answer = pipe.poll(5 if errors else timeout + 1)
            if not has_answer:
                error += f"\n{self.stacks(rank).read_text()}"
            else:
                try:
                    result, error = pipe.recv()
                except EOFError:  # a rank may end its own process
                    error = "the process has ended"
            results.append(result)
            if error:
                errors.append(f"rank {rank}: {error}")
        if errors:
            self.stop()  # some may hang in a collective: the next call starts new ones
            raise AssertionError("\n".join(errors))
        return results


POOL = Pool()  # of this session, whichever folder's tests ask for it first


@pytest.fixture(scope="session")
def pool():
    yield POOL
    POOL.stop()


# --------------------------------------------------------------------------------------------------
# Runs of train.command


@dataclass(frozen=True)
class Run:
    """What a run printed and left. `status` 0, 1, 2 and 75 are those of train.py."""

    out: Path
    status: int
    printed: str  # by rank 0
    error: str  # the line of the error; empty if there was none

    def rows(self, key: str = "loss") -> list[dict]:
        """The rows of metrics.jsonl that contain `key`."""
        return read_rows(self.out / "metrics.jsonl", key)

    def statistics(self) -> list[dict]:
        return read_rows(self.out / "optim.jsonl", "parameter")

    def steps(self) -> list[int]:
        """The steps of the checkpoints, sorted."""
        return [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(self.out)]

    def weights(self) -> dict[str, torch.Tensor]:
        return full_tensors(checkpoint.list_checkpoints(self.out)[-1])


def read_rows(path: Path, key: str) -> list[dict]:
    """The rows of a log that contain `key`, without those of steps that a later start repeats."""
    rows = []
    complete = path.read_text().rpartition("\n")[0] if path.exists() else ""
    for row in map(json.loads, complete.splitlines()):
        if row.get("event") == "start":
            rows = [earlier for earlier in rows if earlier["step"] <= row["step"]]
        elif key in row:
            rows.append(row)
    return rows


def full_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The full tensors of a checkpoint, read in this process."""
    reader = checkpoint.Reader(path)
    found = {}
    for name, saved in reader.tensors.items():
        found[name] = torch.empty_like(saved.full, device="cpu")
        reader.fill(name, found[name])
    return found


def run_command(argv: list[str]) -> tuple[int, str, str]:
    """Run train.command on this rank; return its status, output, and the line of its error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status, error = trainer.command(argv), ""
    except SystemExit as end:  # from the parser
        status, error = end.code, err.getvalue()
    except Exception as exception:
        if not hasattr(exception, "exit_status"):
            raise
        status, error = exception.exit_status, str(exception)
    return status or 0, out.getvalue(), error


@pytest.fixture
def train(pool, tokens, tmp_path):
    """train(ranks, "--strategy fsdp", name): run train.command with SMALL and these flags."""

    def call(ranks: int, text: str = "", name: str = "run", **options) -> Run:
        out = tmp_path / name
        answers = pool(ranks, run_command, arguments(tokens, out, text), **options)
        statuses = {status for status, _, _ in answers}
        assert len(statuses) == 1, f"ranks end with different statuses: {answers}"
        (status,) = statuses
        return Run(out, status, answers[0][1], answers[0][2])

    return call


# --------------------------------------------------------------------------------------------------
# Jobs under torchrun, and runs of the pool in the background


class Job:
    """train.py under torchrun, or alone, in a session of its own."""

    def __init__(self, ranks: int, argv: list[str], folder: Path, *options: str):
        folder.mkdir(exist_ok=True)
        self.out, self.log = Path(argv[argv.index("--out") + 1]), folder / "printed.txt"
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", *options]
            command += ["--nproc_per_node", str(ranks)]
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                [*command, str(ROOT / "train.py"), *argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def rows(self, key: str = "loss") -> list[dict]:
        return read_rows(self.out / "metrics.jsonl", key)

    def ranks(self) -> list[int]:
        """The process ids of torchrun's ranks, or of the only process."""
        pid = self.process.pid
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        return [int(word) for word in text.split()] or [pid]

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        """Wait until the condition is true; fail if the job ends or the time is up before."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.printed()
            assert time.monotonic() < deadline, self.printed()
            time.sleep(0.01)

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def job(tokens, tmp_path):
    """job(ranks, "--strategy fsdp", name, *options of torchrun): start train.py."""
    started = []

    def start(ranks: int, text: str = "", name: str = "run", *options: str) -> Job:
        argv = arguments(tokens, tmp_path / name, text)
        started.append(Job(ranks, argv, tmp_path / f"{name}.job", *options))
        return started[-1]

    yield start
    for each in started:
        each.end()


def arguments(tokens: Path, out: Path, text: str) -> list[str]:
    """The arguments that the fixture `job` gives to train.py."""
    return [*SMALL.split(), "--data", str(tokens), "--out", str(out), *text.split()]


class PoolJob:
    """A run on ranks of the pool, in the background, with methods of Job."""

    def __init__(self, pool, argv: list[str], ranks: int = 2, run: Callable = run_command):
        self.pool, self.out = pool, Path(argv[argv.index("--out") + 1])
        self.answers = ThreadPoolExecutor(1).submit(pool, ranks, run, argv)

    rows = Job.rows

    def printed(self) -> str:
        """What rank 0 printed, once the run has ended."""
        return self.answers.result()[0][1]

    def ranks(self) -> list[int]:
        return [process.pid for process, _ in self.pool.workers[:2]]

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert not self.answers.done(), self.answers.result()
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait(self) -> int:
        """Wait until all ranks have ended, with the same status; return it."""
        try:
            answers = self.answers.result()
        except AssertionError as error:
            assert str(error).count("the process has ended") == 2, error
            return KILLED
        assert len({status for status, _, _ in answers}) == 1, answers
        return answers[0][0]


# --------------------------------------------------------------------------------------------------
# Data


def write_tokens(folder: Path, seed: int = 1, documents: int = 40) -> Path:
    """Write a token folder of documents of invented words, as bytes: about 25,000 tokens."""
    random = np.random.default_rng(seed)
    letters = np.frombuffer(b"abcdefgh", np.uint8)
    words = [random.choice(letters, size).tobytes() for size in random.integers(2, 7, 50)]
    meta = {"tokenizer": "bytes", "dtype": "uint16", "vocab_size": 257}
    folder.mkdir(parents=True)
    for split, count in (("train", documents), ("val", 1 + documents // 5)):
        texts = [b" ".join(words[i] for i in random.integers(0, 50, 120)) for _ in range(count)]
        ids = np.concatenate([[*text, 256] for text in texts]).astype(np.uint16)
        ids.tofile(folder / f"{split}.bin")
        meta |= {f"{split}_tokens": len(ids), f"{split}_bytes": len(ids) - count}
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "tokens")


def copy_run(run: Path, to: Path) -> Path:
    """Copy a run folder, which a test may then damage."""
    return shutil.copytree(run, to)
