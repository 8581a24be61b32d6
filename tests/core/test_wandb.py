"""--tracker wandb: rows are also sent to wandb, here to a module of this name that notes them."""

import json
import os
import sys
from pathlib import Path

import pytest
from rig import arguments, read_rows, run_command

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
def init(**options):
    time.sleep(int(os.environ.get("SECONDS", 0)))
    Run().note("init", sorted(options), options.get("id"))
    return Run()
"""


def run_with_wandb(argv: list[str], folder: Path, variables: dict) -> tuple[int, str, str]:
    """Run train.command on this rank, where `import wandb` finds the module above."""
    (folder / "wandb.py").write_text(NOTES)
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
    """train(ranks, flags): run with these variables; return what rank 0 printed, and its notes."""

    def call(ranks: int, text: str = "", **variables: str) -> tuple[str, list]:
        argv = arguments(tokens, tmp_path / "run", f"--tracker wandb {text}")
        answers = pool(ranks, run_with_wandb, argv, tmp_path, variables)
        assert [status for status, _, _ in answers] == [0] * ranks
        return answers[0][1], [*map(json.loads, (tmp_path / "notes").read_text().splitlines())]

    return call


def test_rank_0_sends_every_row_once(train):
    _, notes = train(2, "--strategy ddp")
    assert [kind for kind, *_ in notes].count("init") == 1
    sent = [(step, row["step"]) for _, step, row in notes[1:]]
    assert sent == [(None, step) for step in (1, 2, 3, 4, 5, 5)]  # wandb's own steps cannot repeat


def test_all_starts_of_a_run_continue_one_run_of_wandb_even_if_it_fails(train, tmp_path):
    train(1, "--max_steps 3", SECONDS="1")
    printed, notes = train(1, "--max_steps 5", SECONDS="1", BREAKS="1")
    assert "the network is down" in printed
    rows = read_rows(tmp_path / "run/metrics.jsonl", "loss")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    ids = [run_id for kind, _, run_id in notes if kind == "init"]
    assert len(ids) == 2 and len({*ids}) == 1
