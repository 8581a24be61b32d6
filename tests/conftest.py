"""What the tests share: a small corpus, and a pool of processes that play the ranks.

Starting torch costs seconds, so four workers are started once and form a new gloo group for every case.
"""

import contextlib
import io
import json
import multiprocessing
import os
import random
import socket
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import prepare

TINY = "--n_layer 2 --n_head 4 --n_kv_head 2 --d_model 32 --d_ff 64 --seq_len 16 --global_batch_size 8 --sample_tokens 0"
QUIET = "--device cpu --eval_sequences 10 --eval_interval 0 --save_interval 0 --log_interval 1 --lr 3e-3 --warmup_steps 3"


# torch's store asks for the name of every peer: where no name server answers, that shall take one second, not five.
os.environ["RES_OPTIONS"] = "timeout:1"


def worker(pipe) -> None:
    torch.set_num_threads(1)
    while True:
        environment, function, arguments = pipe.recv()
        os.environ.update(environment)
        try:
            result, error = function(*arguments), None
        except BaseException:
            result, error = None, traceback.format_exc()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        pipe.send((result, error))


class Pool:
    """pool(n, function, *arguments): the results of calling `function` on n ranks at once, in the order of ranks."""

    def __init__(self):
        self.workers = []

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for _ in range(4):
            here, there = context.Pipe()
            process = context.Process(target=worker, args=(there,), daemon=False)
            process.start()
            self.workers.append((process, here))

    def stop(self) -> None:
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []

    def __call__(
        self, size: int, function, *arguments, local_size: int | None = None, timeout: float = 60
    ) -> list:
        if not self.workers:
            self.start()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        local_size = local_size or size
        for rank, (_, pipe) in enumerate(self.workers[:size]):
            numbers = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": rank % local_size,
                "LOCAL_WORLD_SIZE": local_size,
                "MASTER_PORT": port,
            }
            pipe.send(
                (
                    {**{name: str(n) for name, n in numbers.items()}, "MASTER_ADDR": "127.0.0.1"},
                    function,
                    arguments,
                )
            )
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self.workers[:size]):
            result, error = (
                pipe.recv()
                if pipe.poll(5 if errors else timeout)
                else (None, f"no answer within {timeout} s")
            )
            results.append(result)
            errors += [f"rank {rank}: {error}"] if error else []
        if errors:
            self.stop()  # some may hang in a collective: the next case gets new ones
            raise AssertionError("\n".join(errors))
        return results


@pytest.fixture(scope="session")
def pool():
    os.environ["OMP_NUM_THREADS"] = "1"
    ranks = Pool()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A token folder of 40 documents of invented words: about 30,000 bytes."""
    root, rng = tmp_path_factory.mktemp("corpus"), random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(50)]
    (root / "text").mkdir()
    for i in range(40):
        (root / "text" / f"{i:02}.txt").write_text(" ".join(rng.choices(words, k=150)))
    prepare.prepare([str(root / "text")], root / "tokens", val_fraction=0.2, say=lambda line: None)
    return root / "tokens"


def call_train(argv: list[str]) -> int:
    import train

    return train.main(argv)


class Scalars(TorchDispatchMode):
    """Counts the reads of a tensor's value by the host."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def listen(argv: list[str]) -> tuple[int, str, str]:
    """(status, standard output, standard error) of train.py"""
    out, err = io.StringIO(), io.StringIO()
    quiet = mock.patch(
        "time.sleep"
    )  # with which ranks wait for rank 0 to speak: here nothing ends them
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), quiet:
        status = call_train(argv)
    return status, out.getvalue(), err.getvalue()


def start_run(argv: list[str]):
    """A run of train.py on this rank, before it is built."""
    import dist
    import train
    import watchdog

    config = train.parse(argv)
    world = dist.start(config.device)
    dog = watchdog.Watchdog(world.store, world.rank, world.size, config.timeout)
    return train.Run(config, world, dog)


def flags(text: str) -> list[str]:
    return f"{TINY} {QUIET} {text}".split()


def rows(run: Path, key: str = "loss") -> list[dict]:
    """The rows of a run's metrics.jsonl that hold `key`."""
    return [
        row
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if key in (row := json.loads(line))
    ]


def tensors(path: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The full tensors of a checkpoint whose names begin with `prefix`."""
    if (path / "full.pt").exists():
        state = dict(checkpoint.flatten(torch.load(path / "full.pt", weights_only=True)))
        return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}
    reader = checkpoint.Reader(path)
    state = {}
    for name, metadata in reader.metadata.state_dict_metadata.items():
        if name.startswith(prefix):
            state[name] = torch.empty(metadata.size, dtype=metadata.properties.dtype)
    torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_same(run: Path, other: Path) -> None:
    """The latest checkpoints of two runs hold the same tensors, bit for bit."""
    ours = tensors(checkpoint.list_checkpoints(run)[-1])
    theirs = tensors(checkpoint.list_checkpoints(other)[-1])
    assert len(ours) > 50  # weights, moments and step counts, not an empty checkpoint
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def run(pool, tokens, tmp_path):
    """run(ranks, "--strategy ...", name): train and return the run folder."""

    def start(size: int, text: str, name: str = "run", status: int = 0, **options) -> Path:
        out = tmp_path / name
        assert (
            pool(size, call_train, flags(f"--data {tokens} --out {out} {text}"), **options)
            == [status] * size
        )
        return out

    return start
