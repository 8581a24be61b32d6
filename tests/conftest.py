"""The fixtures of the tests, made of rig.py."""

from collections.abc import Callable
from pathlib import Path

import pytest
import rig
import torch

import dist


def pytest_configure(config) -> None:
    for marker in (
        "slow(proves): shows what the default suite cannot; run with: pytest -m slow",
        "gpu: needs CUDA",
        "hf: needs the packages of tests/requirements-extra.txt; run with: pytest -m hf",
    ):
        config.addinivalue_line("markers", marker)


@pytest.fixture(autouse=True)
def processes_end_with_their_test():
    yield
    while rig.AT_END:
        rig.AT_END.pop()()


@pytest.fixture(scope="session")
def pool():
    yield rig.POOL
    rig.POOL.stop()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A token folder of bytes: see rig.write_tokens."""
    return rig.write_tokens(tmp_path_factory.mktemp("data") / "tokens")


@pytest.fixture
def on_ranks(pool, tokens, tmp_path) -> Callable:
    """on_ranks(2, function, "--strategy ...", ...): call function(argv, ...) on each of two ranks.

    argv is the flags of a run in tmp_path / "run". Returns a list with the result of each rank.
    """

    def call(ranks: int, function: Callable, text: str, *more, name="run", **options) -> list:
        argv = rig.arguments(tokens, tmp_path / name, text)
        return pool(ranks, function, argv, *more, **options)

    return call


@pytest.fixture
def train(pool, tokens, tmp_path) -> Callable:
    """train(ranks, "--strategy fsdp", name): run train.command with SMALL and these flags."""

    def call(ranks: int, text: str = "", name: str = "run", **options) -> rig.Run:
        return rig.train(ranks, tokens, tmp_path / name, text, **options)

    return call


@pytest.fixture
def job(tokens, tmp_path) -> Callable:
    """job(ranks, "--strategy fsdp", name, *options of torchrun): start train.py."""

    def start(ranks: int, text: str = "", name: str = "run", *options: str) -> rig.Job:
        argv = rig.arguments(tokens, tmp_path / name, text)
        return rig.Job(rig.torchrun(ranks, argv, *options), tmp_path / f"{name}.job")

    return start


@pytest.fixture
def one_rank(monkeypatch):
    """Start a process group of this process alone; the value is its dist.World."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield dist.join("cpu")
    torch.distributed.destroy_process_group()


@pytest.fixture
def tokenizers():
    return pytest.importorskip("tokenizers", reason="needs tests/requirements-extra.txt")
