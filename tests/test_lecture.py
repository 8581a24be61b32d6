"""The documents' commands print the output shown, and planted bugs show.

Each chapter (## heading) of a document runs in its own copy of the project. Marks:

    <!-- run -->            before an indented block: commands; the next ``` block is their output
    <!-- ask Q | A | P -->  before run: a question for docs.play, the formula's answer, and a
                            pattern that finds the measured one in the output
    <!-- bug N PLACE -->    before a ```diff block: docs/bugs/N.patch, and the function it is in
    <!-- shows bug N -->    before an indented block: commands; the next ``` block has lines that
                            they print with bug N, and not without it
    <!-- code FILE -->      before a ```python block: lines of FILE

A line ... stands for any lines. Words must match; numbers may differ, except the bytes that a step
sends. If a bug changes only the numbers of the lines shown, those must match too.
"""

import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, start_process

from docs.play import Block, chapters

DOCUMENTS = [ROOT / "README.md", *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])]
# Such as 1m20s, 1,234.5, 1e-5, 12%
NUMBER = re.compile(r"(?<![A-Za-z_\d])(?:\d+[hm]\d+[ms]|[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?%?)")
UNIT = re.compile(r"# ?(?:[kMGT]?B|us|ms|s|min|m|h)(?![A-Za-z])")
# "5 x reduce_scatter over dp_shard: 3.38 MB a step": the same on every machine
TRAFFIC = re.compile(r"\d+ x \w+ over \w+: [\d.]+ MB a step")
# Logged by torchrun or torch's C++
LOG = re.compile(r"\[?[WIE]\d{3,4}[ :]|\*+$")


# --------------------------------------------------------------------------------------------------
# Does an output have the shape shown?


def exact(line: str) -> str:
    return " ".join(line.split())


def shape(line: str) -> str:
    """A line with # for numbers and units, single spaces, and no Markdown bold."""
    if TRAFFIC.search(line):
        return exact(line)
    line = UNIT.sub("#", NUMBER.sub("#", line.replace("**", "")))
    return exact(re.sub(r"-{3,}", "---", line))


def lines(text: str, form=shape) -> list[str]:
    return [form(line) for line in text.splitlines() if line.strip() and not LOG.match(line)]


def find(shown: list[str], printed: list[str], anywhere: bool = False) -> str | None:
    """The first line shown that was not printed in its place, or None.

    Only a line ... allows other lines between two lines shown or, unless `anywhere` is set, before
    the first and after the last.
    """
    begins = {*range(len(printed) + 1)} if anywhere else {0}  # possible places of the next line
    for line in shown:
        if line == "...":
            begins = {*range(min(begins), len(printed) + 1)}
            continue
        begins = {i + 1 for i in begins if i < len(printed) and printed[i] == line}
        if not begins:
            return line
    return None if anywhere or len(printed) in begins else f"{shown[-1]} (and more comes after it)"


def shows_bug(shown: str, with_bug: str, without: str) -> str | None:
    """What is wrong with the output shown for a bug, or None."""
    for form in (shape, exact):
        missing = find(lines(shown, form), lines(with_bug, form), anywhere=True)
        if missing is not None:
            return f"not printed with the bug: {missing}"
        if find(lines(shown, form), lines(without, form), anywhere=True) is not None:
            return None
    return "printed without the bug, too"


# --------------------------------------------------------------------------------------------------
# Running


def copy(project: Path, folder: Path) -> Path:
    unwanted = shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache")
    return shutil.copytree(project, folder, ignore=unwanted, symlinks=True)


def run(command: str, folder: Path) -> tuple[int, str]:
    """Return (exit status, output)."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    script = "\n".join(line[4:] for line in command.splitlines())
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options = {"cwd": folder, "env": environment, "text": True, "errors": "replace"}
    command = ["bash", "-c", script]
    process = subprocess.Popen(command, start_new_session=True, **pipes, **options)
    try:
        out, _ = process.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks left behind
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out


def run_chapter(blocks: list[Block], project: Path, tmp: Path) -> list[str]:
    """Run the blocks in order, in a copy of the project. Return the problems."""
    here = copy(project, tmp / "chapter")
    bugs = {block.name: block.text for block in blocks if block.kind == "bug"}
    wrong = []
    for block in blocks:
        start = time.monotonic()
        if block.kind == "run":
            status, out = run(block.text, here)
            problem = block.output and find(lines(block.output), lines(out))
            # A document may show a run that fails.
            if status and not re.search("error|stopped", block.output or "", re.I):
                problem = f"exit status {status}"
        elif block.kind == "shows bug":
            planted, clean = copy(here, tmp / "planted"), copy(here, tmp / "clean")
            plant(bugs[block.name], planted)
            _, out = run(block.text, planted)
            problem = shows_bug(block.output, out, run(block.text, clean)[1])
            shutil.rmtree(planted)
            shutil.rmtree(clean)
        else:
            continue
        print(f"{time.monotonic() - start:6.1f} s  {' '.join(block.text.split())}")
        if problem:
            wrong.append(f"{block.text}{problem}\n\n{out}")
    return wrong


def plant(diff: str, folder: Path, *options: str) -> None:
    subprocess.run(["git", "apply", *options, "-"], input=diff, cwd=folder, text=True, check=True)


# --------------------------------------------------------------------------------------------------
# The documents of this project


MARKED = [
    pytest.param(path, heading, id=f"{path.name}: {heading}")
    for path in DOCUMENTS
    for heading in chapters(path.read_text())
]


LECTURE = chapters((ROOT / "docs/lecture.md").read_text())
LECTURE_BLOCKS = [block for blocks in LECTURE.values() for block in blocks]
BUGS = [block for block in LECTURE_BLOCKS if block.kind == "bug"]


def test_each_bug_is_a_file_and_is_shown():
    bugs = {bug.name: bug.text for bug in BUGS}
    assert [*bugs] == [block.name for block in LECTURE_BLOCKS if block.kind == "shows bug"]
    assert bugs == {path.stem: path.read_text() for path in ROOT.glob("docs/bugs/*.patch")}
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert all(line in bugs["3"] for line in diff.splitlines())


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_applies_in_the_function_that_its_mark_names(bug, tmp_path):
    file, name = bug.place.split(":")
    shutil.copyfile(ROOT / file, tmp_path / Path(file).name)
    plant(bug.text, tmp_path, f"-p{1 + file.count('/')}")
    before, after = (folder.read_text() for folder in (ROOT / file, tmp_path / Path(file).name))
    lines = zip(before.splitlines(), after.splitlines())
    first = next(i for i, (a, b) in enumerate(lines, start=1) if a != b)
    node = ast.parse(before)
    for part in name.split("."):  # such as Head.__init__
        (node,) = (child for child in node.body if getattr(child, "name", None) == part)
    assert node.lineno <= first <= node.end_lineno


def test_code_and_numbers_shown_are_there():
    """docs.play finds the measured number in the output, and it is the formula's or near it."""
    for block in LECTURE_BLOCKS:
        if block.kind == "code":
            assert block.text in (ROOT / block.name).read_text()
        for question, formula, pattern in block.questions:
            assert re.search(r"\d|none", formula), question
            assert block.output is None or re.findall(pattern, block.output), question


def play(folder: Path, *arguments: str) -> subprocess.Popen:
    """Start docs.play, with its temporary folder in `folder`."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    command = [sys.executable, "-u", "-m", "docs.play", *arguments]
    environment = os.environ | {"TMPDIR": str(folder)}
    return start_process(command, cwd=ROOT, env=environment, text=True, **pipes)


@pytest.mark.slow
def test_play_compares_your_number_then_plants_a_bug_and_asks_for_its_function(tmp_path):
    out, _ = play(tmp_path, "1").communicate("840,000\n235\n", timeout=300)
    assert "you 840,000, the formula 844,928, measured 844,928" in out
    assert "you 235, the formula 234.9, measured 234.9" in out
    runs = {*ROOT.glob("runs/*")}
    out, _ = play(tmp_path, "bug", "2").communicate("evaluate\ntrain_step\n", timeout=300)
    before, solution = out.split("Which function of train.py is wrong?", 1)
    assert "loss 5." in before and "train_step" not in before and "n * micro_loss" in solution
    assert list(tmp_path.glob("play-*")) == [] and {*ROOT.glob("runs/*")} == runs


def test_play_leaves_nothing_after_ctrl_c(tmp_path):
    process = play(tmp_path, "bug", "3")
    for line in process.stdout:
        if line.startswith("(in "):
            break
    time.sleep(1)  # torchrun has begun
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert list(tmp_path.glob("play-*")) == []


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project with the built-in data and without runs."""
    folder = tmp_path_factory.mktemp("project") / "code"
    unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=unwanted)
    assert run("    python prepare.py --out tokens/python", folder)[0] == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path, heading", MARKED)
def test_a_chapter_prints_what_it_shows(path, heading, project, tmp_path, capsys):
    with capsys.disabled():
        print(f"\n{path.name}: {heading}")
        wrong = run_chapter(chapters(path.read_text())[heading], project, tmp_path)
    assert not wrong, "\n\n".join(wrong)


# --------------------------------------------------------------------------------------------------
# What this file finds


def test_a_bug_shows_in_a_line_or_in_numbers_alone():
    assert shows_bug("hello 0 took 0 s", "hello 0 took 0 s", "hello 1 took 0 s") is None
    assert shows_bug("hello 0", "hello 1", "hello 1") == "not printed with the bug: hello 0"
    assert shows_bug("...", "hello 0", "hello 1") == "printed without the bug, too"


DOCUMENT = """# A program
## One

<!-- run -->
    echo hello && exit 3

```
hello
```
"""


def test_a_command_that_fails_and_a_mark_that_is_not_understood_are_found(tmp_path):
    (tmp_path / "project").mkdir()
    ((block,),) = chapters(DOCUMENT).values()
    (problem,) = run_chapter([block], tmp_path / "project", tmp_path)
    assert "exit status 3" in problem
    for mark in ("<!--run-->", "<!-- run -->\nthat is:"):
        with pytest.raises(ValueError):
            chapters(DOCUMENT.replace("<!-- run -->", mark))
