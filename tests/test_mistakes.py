"""Mistakes: each command answers with one clear line and the right status, and writes nothing.

The tables are in the files mistakes_*.py: a row for each family of errors.
"""

import contextlib
import io
import shlex
from dataclasses import dataclass
from pathlib import Path

import mistakes_cli
import mistakes_data
import mistakes_flags
import mistakes_hf
import mistakes_runs
import mistakes_tools
import pytest
import torch
from conftest import call_train, flags, listen
from mistakes import Mistake

import prepare
import sample
from tools import bench, check, compare, hf, plan, report
from tools import checkpoint as commands

TABLES = [
    mistakes_cli,
    mistakes_flags,
    mistakes_data,
    mistakes_runs,
    mistakes_tools,
    mistakes_hf,
]
CASES = []
for table in TABLES:
    for command, rows in table.MISTAKES.items():
        CASES += [(command, mistake) for mistake in rows]

COMMANDS = {
    "prepare.py": prepare.main,
    "sample.py": sample.main,
    "tools.checkpoint": commands.main,
    "tools.compare": compare.main,
    "tools.bench": bench.main,
    "tools.check": check.main,
    "tools.hf": hf.main,
    "tools.plan": plan.main,
    "tools.report": report.main,
}


@pytest.fixture(scope="module")
def folders(pool, tokens, tmp_path_factory) -> dict[str, Path]:
    """By name, the folders of all tables and `other`, a run of two steps."""
    root = tmp_path_factory.mktemp("bad")
    text = f"--data {tokens} --out {root}/other --max_steps 2 --save_interval 1"
    assert pool(1, call_train, flags(text)) == [0]
    for table in TABLES:
        if hasattr(table, "write_folders"):
            table.write_folders(root)
    return {"root": root} | {path.name: path for path in root.iterdir()}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str
    wrote_nothing: bool


@pytest.fixture(scope="module")
def answer(pool, tokens, folders):
    """answer(command, mistake): what the command says to it. Each is tried once."""
    root = folders["root"]
    answers = {}

    def ask(name: str, mistake: Mistake) -> Answer:
        before = contents(root)
        if name == "train.py":
            text = f"--data {tokens} --out {root}/new --max_steps 4 {mistake.arguments}"
            argv = flags(text.format(**folders))
            status, out, err = pool(mistake.ranks, listen, argv)[0]
        else:
            argv = shlex.split(mistake.arguments.format(**folders))
            status, out, err = call(name, argv)
        return Answer(status, out, err, contents(root) == before)

    def look_up(name: str, mistake: Mistake) -> Answer:
        if (name, mistake) not in answers:
            answers[name, mistake] = ask(name, mistake)
        return answers[name, mistake]

    return look_up


def call(name: str, argv: list[str]) -> tuple[int, str, str]:
    """Return (status, standard output, standard error) of a command other than train.py."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = COMMANDS[name](argv)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name, mistake", CASES, ids=lambda case: str(case)[:60])
def test_a_mistake_is_one_clear_line_and_writes_nothing(name, mistake, folders, answer):
    if "--device cuda" in mistake.arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    said = answer(name, mistake)
    assert (said.status, said.out, said.err.count("\n")) == (mistake.status, "", 1), said.err
    assert said.err.startswith(f"{name}: error: ")
    assert mistake.line.format(**folders) in said.err
    assert said.wrote_nothing
