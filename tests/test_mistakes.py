"""Mistakes: each command answers with one clear line and the right status, and writes nothing.

The tables are in the files mistakes_*.py: a row for each family of errors.
"""

import contextlib
import io
import os
import shlex
from pathlib import Path
from unittest import mock

import mistakes_data
import mistakes_flags
import mistakes_hf
import mistakes_runs
import mistakes_tools
import pytest
import torch
from conftest import call_train, flags, listen

import prepare
import sample
from tools import bench, check, compare, hf, plan, report
from tools import checkpoint as commands

TABLES = [mistakes_flags, mistakes_data, mistakes_runs, mistakes_tools, mistakes_hf]
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


def contents(folder: Path) -> dict[Path, int]:
    """The files of the folder, and when each was written; 0 for folders, which a lock changes."""
    return {path: path.is_file() and path.stat().st_mtime_ns for path in folder.rglob("*")}


def call(name: str, argv: list[str]) -> tuple[int, str, str]:
    """Return (status, standard output, standard error) of a command in this process."""
    if name == "train.py":
        with mock.patch.dict(os.environ):  # which train.py changes for NCCL
            answer = listen(argv)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return answer
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = COMMANDS[name](argv)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name, mistake", CASES, ids=lambda case: str(case)[:60])
def test_a_mistake_is_one_clear_line_and_writes_nothing(name, mistake, folders, pool, tokens):
    if "--device cuda" in mistake.arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    root = folders["root"]
    before = contents(root)
    argv = shlex.split(mistake.arguments.format(**folders))
    if name == "train.py":
        argv = [*flags(f"--data {tokens} --out {root}/new --max_steps 4"), *argv]
    if mistake.ranks == 1:
        status, out, err = call(name, argv)
    else:
        status, out, err = pool(mistake.ranks, listen, argv)[0]
    assert (status, out, err.count("\n")) == (mistake.status, "", 1), err
    assert err.startswith(f"{name}: error: ")
    assert mistake.line.format(**folders) in err
    assert contents(root) == before
