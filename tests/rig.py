"""The rig of the tests: ranks that have torch loaded, runs, jobs, and tokens of its own.

With conftest.py, which makes fixtures of it, and the folder core it also works beside the ten files
of the core alone, which it knows by their command line, their files and public functions.

pool(n, function, ...)     calls a function on n ranks at once; importing torch is paid only once
train(n, tokens, out, "")  runs train.command with these flags on n ranks of the pool
PoolJob(argv, n)           starts such a run, and returns at once
Job(torchrun(n, argv))     starts train.py under torchrun, for signals and kills
"""

import contextlib
import ctypes
import dataclasses
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
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["OMP_NUM_THREADS"] = "1"  # of this process and of all ranks
os.environ["RES_OPTIONS"] = "timeout:1"  # without a name server, torch's store waits 1 s, not 5

import torch  # noqa: E402
from torch.distributed.tensor import DTensor, debug  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import checkpoint  # noqa: E402
import config  # noqa: E402
import data  # noqa: E402
import dist  # noqa: E402
import model  # noqa: E402
import optim  # noqa: E402
import start  # noqa: E402
import train as trainer  # noqa: E402

torch.set_num_threads(1)

KILLED = -signal.SIGKILL

SMALL = (
    "--n_layer 2 --n_head 4 --n_kv_head 2 --d_model 32 --d_ff 64 --seq_len 16 "
    "--global_batch_size 8 --sample_tokens 0 --device cpu --eval_sequences 10 --eval_interval 0 "
    "--save_interval 0 --log_interval 1 --lr 3e-3 --warmup_steps 1 --max_steps 5 --dtype float32"
)

AT_END: list[Callable[[], object]] = []  # what ends the processes that the current test has started


def cells(table: str) -> list[tuple[str, ...]]:
    """The cells of each line of a table, without empty lines and comments."""
    lines = [line for line in table.splitlines() if line.strip() and line[0] != "#"]
    return [tuple(cell.strip() for cell in line.split("|")) for line in lines]


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


# --------------------------------------------------------------------------------------------------
# Runs of train.command


@dataclass(frozen=True)
class Run:
    """What a run printed and left. `status` 0, 1, 2 and 75 are those of train.py."""

    out: Path
    status: int = 0
    printed: str = ""  # by rank 0
    error: str = ""  # the line of the error, if there was one

    def rows(self, key: str = "loss") -> list[dict]:
        """The rows of metrics.jsonl that contain `key`."""
        return read_rows(self.out / "metrics.jsonl", key)

    def statistics(self) -> list[dict]:
        return read_rows(self.out / "optim.jsonl", "parameter")

    def steps(self) -> list[int]:
        """The steps of the checkpoints, sorted."""
        return [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(self.out)]

    def weights(self) -> dict[str, torch.Tensor]:
        return full_tensors(last_checkpoint(self.out))


def read_rows(path: Path, key: str = "loss") -> list[dict]:
    """The rows of a log that contain `key`, without those of steps that a later start repeats."""
    rows = []
    complete = path.read_text().rpartition("\n")[0] if path.exists() else ""
    for row in map(json.loads, complete.splitlines()):
        if row.get("event") == "start":
            rows = [earlier for earlier in rows if earlier["step"] <= row["step"]]
        elif key in row:
            rows.append(row)
    return rows


def arguments(tokens: Path, out: Path, text: str = "") -> list[str]:
    """SMALL with these folders and further flags."""
    return [*SMALL.split(), "--data", str(tokens), "--out", str(out), *text.split()]


def last_checkpoint(out: Path) -> Path:
    return checkpoint.list_checkpoints(out)[-1]


def full_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The full tensors of a checkpoint, read in this process."""
    reader = checkpoint.Reader(path)
    found = {}
    for name, saved in reader.tensors.items():
        found[name] = torch.empty_like(saved.full, device="cpu")
        reader.fill(name, found[name])
    return found


def run_command(argv: list[str], main: Callable = trainer.command) -> tuple[int, str, str]:
    """Run train.py or another command here; return its status, output, and its line of error."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(list(map(str, argv)))
        error = err.getvalue() if status else ""  # else it has warnings of packages
    except SystemExit as end:  # from the parser
        status, error = end.code, err.getvalue()
    except Exception as exception:
        if not hasattr(exception, "exit_status"):
            raise
        status, error = exception.exit_status, str(exception)
    return status or 0, out.getvalue(), error


def train(ranks: int, tokens: Path, out: Path, text: str = "", **options) -> Run:
    """Run train.command with SMALL and further flags on ranks of the pool, which must end alike."""
    answers = POOL(ranks, run_command, arguments(tokens, out, text), **options)
    statuses = {status for status, _, _ in answers}
    assert len(statuses) == 1, f"ranks end with different statuses: {answers}"
    return Run(out, *answers[0])


def assert_same_bits(out: Path, other: Path) -> None:
    """Fail unless two runs have the same losses, weights and optimizer state, bit for bit."""
    losses = [
        [(row["step"], row["loss"], row["grad_norm"]) for row in read_rows(run / "metrics.jsonl")]
        for run in (out, other)
    ]
    assert losses[0] == losses[1]
    tensors, expected = (full_tensors(last_checkpoint(run)) for run in (out, other))
    assert any(name.startswith("optimizer.") for name in expected)
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0, equal_nan=True)


def assert_close(out: Path, other: Path, relative: float = 1e-5) -> None:
    """Fail unless two runs logged the same losses and gradient norms, up to rounding."""
    rows, expected = (read_rows(run / "metrics.jsonl") for run in (out, other))
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm"):
        values = [row[key] for row in expected]
        assert [row[key] for row in rows] == pytest.approx(values, rel=relative), key


# --------------------------------------------------------------------------------------------------
# Runs in the background, of processes and of ranks of the pool


def torchrun(ranks: int, argv: list, *options: str, script: Path = ROOT / "train.py") -> list[str]:
    """The command that starts a script under torchrun, or as one process without it."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", *options]
        launcher += ["--nproc_per_node", ranks]
    return [*map(str, [*launcher, script, *argv])]


class Job:
    """A command in a session of its own, as if started from a terminal."""

    def __init__(self, command: list, folder: Path, **options):
        folder.mkdir(exist_ok=True)
        self.log = folder / "printed.txt"
        command = [*map(str, command)]
        self.out = Path(command[command.index("--out") + 1]) if "--out" in command else None
        with open(self.log, "w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
                **options,
            )
        AT_END.append(self.end)

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

        def is_met() -> object:
            ended = self.process.poll() is not None
            met = condition()
            assert met or not ended, self.printed()
            return met

        wait_until(is_met, seconds, self.printed)

    def wait(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def wait_until(
    condition: Callable[[], object], seconds: float = 60, said: Callable[[], str] = str
) -> None:
    """Wait until the condition is true; if the time is up before, fail with what `said` returns."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.002)


class PoolJob:
    """A run on ranks of the pool, in the background, with methods of Job."""

    def __init__(self, argv: list[str], ranks: int = 2, run: Callable = run_command):
        self.out = Path(argv[argv.index("--out") + 1])
        self.answers = ThreadPoolExecutor(1).submit(POOL, ranks, run, argv)
        AT_END.append(self.answers.exception)  # waits

    rows = Job.rows

    def printed(self) -> str:
        """What rank 0 printed, once the run has ended."""
        return self.answers.result()[0][1]

    def ranks(self) -> list[int]:
        return [process.pid for process, _ in POOL.workers[:2]]

    def until(self, condition: Callable[[], object], seconds: float = 60) -> None:
        def is_met() -> object:
            assert not self.answers.done(), self.answers.result()
            return condition()

        wait_until(is_met, seconds)

    def wait(self) -> int:
        """Wait until all ranks have ended, with the same status; return it."""
        try:
            answers = self.answers.result()
        except AssertionError as error:
            assert str(error).count("the process has ended") == 2, error
            return KILLED
        assert len({status for status, _, _ in answers}) == 1, answers
        return answers[0][0]


def fork_ranks(size: int, function: Callable, *arguments) -> list[multiprocessing.Process]:
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
        AT_END.append(process.kill)
    return processes


# --------------------------------------------------------------------------------------------------
# Parts of a run, in this process


SOURCE = data.TokenFolder(Path("tokens"), np.dtype(np.uint16), 257, "bytes", "abc")
CPU = dist.World(
    rank=0,
    size=1,
    local_size=1,
    device=torch.device("cpu"),
    timeout=timedelta(seconds=600),
    device_name="",
    has_bfloat16=False,
)


def resolve(text: str, source: data.TokenFolder = SOURCE, **world) -> config.Run:
    """Resolve a command line on one CPU, or in a world with these fields."""
    if "size" in world:
        world = {"local_size": world["size"], **world}
    place = dataclasses.replace(CPU, **world)
    return config.resolve(config.Config(**config.parse(text.split())), place, source, None)


def build_run(argv: list[str]) -> SimpleNamespace:
    """Build a run of train.py on this rank, up to its first step."""
    world = dist.join(config.parse(argv).get("device", "auto"))
    with contextlib.ExitStack() as held, contextlib.redirect_stdout(io.StringIO()):
        run, here = start.start_run(argv, world, held)
        state = trainer.build(run, here.mesh, trainer.empty_model(run))
        trainer.load(state, here)
    batches = trainer.micro_batches(run, here, state.step)
    return SimpleNamespace(run=run, start=here, state=state, batches=batches, mesh=here.mesh)


def train_step(built: SimpleNamespace, step: int) -> tuple:
    """Take step number `step` of a run."""
    built.state.step = step
    lr = optim.learning_rate(step, built.run)
    return trainer.train_step(built.state, built.batches, built.run, lr)


def build_model(sizes: model.ModelConfig, seed: int = 0, **options) -> model.Transformer:
    """A model on the CPU with its initial weights in float32."""
    with torch.device("meta"):
        decoder = model.Transformer(sizes, **options)
    decoder.to_empty(device="cpu")
    for name, parameter in decoder.named_parameters():
        decoder.init_tensor(name, parameter, seed)
    return decoder


class Operations(TorchDispatchMode):
    """Calls see(operation, arguments, result) for each operation of torch on this rank."""

    def __init__(self, see: Callable):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor then calls operations on its local tensors
        result = operation(*args, **(kwargs or {}))
        self.see(operation, args, result)
        return result


# --------------------------------------------------------------------------------------------------
# Files


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


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """The contents of all files below a folder; None for a folder."""
    found = {}
    for path in folder.rglob("*"):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def flip(file: Path, place: int) -> None:
    """Flip one bit of a byte."""
    contents = bytearray(file.read_bytes())
    contents[place] ^= 4
    file.write_bytes(contents)


def edit_manifest(file: Path, fields: dict) -> None:
    """Change fields of a manifest, and its checksum."""
    manifest = json.loads(file.read_text()) | fields
    del manifest["crc32"]
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    file.write_text(json.dumps(manifest))


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


# --------------------------------------------------------------------------------------------------
# Tokenizers, which need no download


def small_gpt2(monkeypatch, merges: list[bytes]):
    """GPT-2's tokenizer with `merges` in place of the 50,000 merges that tiktoken downloads."""
    from tiktoken import Encoding, registry
    from tiktoken_ext.openai_public import r50k_pat_str

    tokens = [*(bytes([byte]) for byte in range(256)), *merges]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    ends = {"<|endoftext|>": len(ranks)}
    made = Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=ends)
    monkeypatch.setitem(registry.ENCODINGS, "gpt2", made)  # where those that are downloaded go
    return made


def save_tokenizer(package, kind: str, path: Path, more: str = "") -> Path:
    """Train a tokenizer of the package tokenizers on data.py and `more`; save it as JSON.

    A "byte level" one is like GPT-2's. One like that of "llama 2" begins a text with a space, and
    spells an unknown character in bytes. A "unigram" one loses such a character, and its special
    tokens are words like all others.
    """
    models, pre, trainers = package.models, package.pre_tokenizers, package.trainers
    decoders, normalizers = package.decoders, package.normalizers
    special = ["</s>", "<s>", "<unk>"]
    options = {"vocab_size": 900, "show_progress": False, "special_tokens": special}
    if kind == "byte level":
        made = package.Tokenizer(models.BPE())
        made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre.ByteLevel.alphabet(), **options)
    elif kind == "unigram":
        made = package.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    else:
        made = package.Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        made.pre_tokenizer = pre.Metaspace()  # only to train: in a file, Llama's has none
        options["special_tokens"] = special + [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(**options)
    made.train_from_iterator([Path(data.__file__).read_text(), more], trainer)
    if kind == "llama 2":
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        made.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    spec = json.loads(made.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]  # those of bytes are no special tokens
    path.write_text(json.dumps(spec))
    return path
