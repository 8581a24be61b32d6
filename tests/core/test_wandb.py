"""--tracker wandb: rows are also sent to wandb, here to a module of this name that notes them."""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import pytest

import train as trainer

from .conftest import SMALL, read_rows, run_command

NOTES = """
import json, os, time
class Run:
    def note(self, *what):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps(what, default=str) + chr(10))
    def log(self, row, step=None, **_):
        self.note("log", step, row)
        if os.environ.get("BREAKS") and (step or row.get("step", 0)) >= 2:
            raise RuntimeError("the network is down")
    def define_metric(self, *_, **__): ...
    def finish(self, *_, **__):
        self.note("finish")
def init(**options):
    time.sleep(int(os.environ.get("SECONDS", 0)))
    Run().note("init", sorted(options), options.get("id"))
    return Run()
"""


def run_with_wandb(argv: list[str], folder: Path, module: str, variables: dict) -> tuple:
    """Run train.command on this rank, where `import wandb` finds this module."""
    (folder / "wandb.py").write_text(module)
    os.environ |= {"NOTES": str(folder / "notes"), **variables}
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        return run_command(argv)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("wandb", None)


@pytest.fixture
def train(pool, tokens, tmp_path):
    """train(ranks, flags, module): what each rank ended with."""

    def call(ranks: int, text: str = "", module: str = NOTES, **variables: str) -> list[tuple]:
        flags = f"{SMALL} --tracker wandb --data {tokens} --out {tmp_path}/run {text}"
        return pool(ranks, run_with_wandb, flags.split(), tmp_path, module, variables)

    return call


@pytest.fixture
def notes(tmp_path):
    return lambda: [*map(json.loads, (tmp_path / "notes").read_text().splitlines())]


def test_rank_0_sends_every_row_once(train, notes):
    assert [status for status, _, _ in train(2, "--strategy ddp")] == [0, 0]
    assert [kind for kind, *_ in notes()].count("init") == 1
    sent = [(step, row["step"]) for _, step, row in notes()[1:] if "loss" in row]
    assert sent == [(None, step) for step in (1, 2, 3, 4, 5)]  # wandb's own steps cannot repeat


def test_all_starts_of_a_run_continue_one_run_of_wandb(train, notes):
    for steps in (3, 4, 5):
        assert train(1, f"--max_steps {steps}", SECONDS="1")[0][0] == 0
    ids = [run_id for kind, _, run_id in notes() if kind == "init"]
    assert len(ids) == 3 and len({*ids}) == 1


def test_a_tracker_that_fails_later_does_not_end_the_run(train, tmp_path):
    ((status, printed, _),) = train(1, BREAKS="1")
    assert status == 0
    assert "the network is down" in printed
    assert len(read_rows(tmp_path / "run/metrics.jsonl", "loss")) == 5


def start_without_wandb(argv: list[str]) -> tuple[int, str]:
    """Run train.main where wandb is not installed; return the status and the error."""
    sys.modules["wandb"] = None
    with contextlib.redirect_stderr(io.StringIO()) as error:
        status = trainer.main(argv)
    return status, error.getvalue()


def test_a_start_without_the_package_is_refused(pool, tokens, tmp_path):
    flags = f"{SMALL} --tracker wandb --data {tokens} --out {tmp_path}/run"
    ((status, error),) = pool(1, start_without_wandb, flags.split())
    assert status == 1
    assert error.endswith(": pip install wandb\n") and error.count("\n") == 1
    assert read_rows(tmp_path / "run/metrics.jsonl", "loss") == []
