"""The lecture's commands print the outputs shown, and its bugs change them.

docs/play.py reads the marks of the blocks. A line ... of an output stands for any lines, and the
words of the others must match. So must numbers in an exact output, in that of a bug, and in the
bytes that a step sends.
"""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rig import ROOT, Job

from docs import play

CHAPTERS = {}  # heading -> marked blocks
for part in play.LECTURE:
    CHAPTERS |= play.chapters(part.read_text())
BLOCKS = sum(CHAPTERS.values(), [])
BUGS = [block for block in BLOCKS if block.kind == "bug"]

# For example 1m20s, 1,234.5, 1e-5, 12%
NUMBER = re.compile(r"(?<![A-Za-z_\d])(?:\d+m\d+s|[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?%?)")
# "5 x reduce_scatter over dp_shard: 3.38 MB a step": the same on every machine
TRAFFIC = re.compile(r"\d+ x \w+ over \w+: [\d.]+ MB a step")


def copy(project: Path, folder: Path) -> Path:
    """Copy the code; use its tokens, which no command changes, from the same place."""
    unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "__pycache__", ".*_cache")
    shutil.copytree(project, folder, ignore=unwanted)
    (folder / "tokens").symlink_to(project / "tokens")
    return folder


def plant(bug: play.Block, folder: Path) -> None:
    patch = ROOT / f"docs/bugs/{bug.name}.patch"
    subprocess.run(["git", "apply", patch], cwd=folder, check=True)


def run(commands: str, folder: Path) -> str:
    """Run commands in a folder; return what they print."""
    job = Job(play.shell(commands), folder / "runs", cwd=folder)
    job.wait(300)
    job.end()
    return job.printed()


def compared(line: str, exactly: bool) -> str:
    """What is compared of a line: all of it, or without its numbers."""
    exactly = exactly or TRAFFIC.search(line)
    return " ".join((line if exactly else NUMBER.sub("#", line)).split())


def absent(shown: str, printed: str, exactly: bool) -> list[str]:
    """Return the lines shown that were not printed, in this order."""
    rest = iter([compared(line, exactly) for line in printed.splitlines()])
    lines = [compared(line, exactly) for line in shown.splitlines() if line != "..."]
    return [line for line in lines if line not in rest]  # `in` moves on to the line that it finds


def test_the_code_that_the_lecture_shows_is_the_source():
    shown = [block for block in BLOCKS if block.kind == "code"]
    for block in shown:
        assert block.text in (ROOT / block.name).read_text(), block.text
    assert len(shown) >= len(CHAPTERS) == 8


def test_each_bug_has_one_patch_and_one_output():
    assert [bug.name for bug in BUGS] == [b.name for b in BLOCKS if b.kind == "shows bug"]
    assert {bug.name for bug in BUGS} == {path.stem for path in ROOT.glob("docs/bugs/*")}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_changes_the_function_of_its_mark(bug, tmp_path):
    patch = (ROOT / f"docs/bugs/{bug.name}.patch").read_text()
    assert bug.text in patch and patch.count("@@ -") == 1
    file, name = bug.place.split(":")
    before = (ROOT / file).read_text()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(before)
    plant(bug, tmp_path)
    after = (tmp_path / file).read_text().splitlines()
    changed = next(i for i, line in enumerate(before.splitlines()) if line != after[i])
    node = ast.parse(before)
    for part in name.split("."):  # for example Optimizer.norms
        (node,) = (child for child in node.body if getattr(child, "name", None) == part)
    assert node.lineno <= changed + 1 <= node.end_lineno


SLOW = pytest.mark.slow(proves="what the commands of the lecture print, with and without its bugs")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project with the built-in data, which its first command would make."""
    folder = copy(ROOT, tmp_path_factory.mktemp("project") / "code")
    (folder / "tokens").unlink()
    subprocess.run([sys.executable, "prepare.py", "--out", "tokens/python"], cwd=folder, check=True)
    return folder


@SLOW
@pytest.mark.parametrize("heading", CHAPTERS)
def test_a_chapter_prints_what_it_shows(heading, project, tmp_path):
    here = copy(project, tmp_path / "chapter")
    bugs = {block.name: block for block in CHAPTERS[heading] if block.kind == "bug"}
    for block in CHAPTERS[heading]:
        if block.kind == "prints":
            printed = run(block.text, here)
            assert not absent(block.output, printed, block.name == "exact"), printed
        elif block.kind == "shows bug":
            planted, clean = copy(here, tmp_path / block.name), copy(here, tmp_path / "clean")
            plant(bugs[block.name], planted)
            printed = run(block.text, planted)
            assert not absent(block.output, printed, exactly=True), printed
            assert absent(block.output, run(block.text, clean), exactly=True)
            shutil.rmtree(clean)


@SLOW
def test_play_asks_for_the_function_of_a_bug_and_leaves_no_folder(tmp_path):
    command = [sys.executable, "-m", "docs.play", "bug"]
    options = dict(cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, text=True)
    answers = "dist.py:make_mesh\nno_such_function\ndist.DP_RANK()\n"
    printed = subprocess.check_output([*command, "4"], input=answers, **options)
    assert "rank 3 at (1, 0, 0)" in printed and "Yes: dist.py:dp_rank" in printed

    job = Job([*command, "2"], tmp_path / "job", **options)
    job.until(lambda: list(tmp_path.glob("play-*/code/runs/*/metrics.jsonl")))
    os.kill(job.process.pid, signal.SIGINT)
    job.wait()
    assert list(tmp_path.glob("play-*")) == []
