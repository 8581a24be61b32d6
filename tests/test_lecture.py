"""The documents' commands print the output shown, and planted bugs change it.

Each chapter (## heading) of a document runs in its own copy of the project. Marks:

    <!-- run -->            before an indented block: commands; the next ``` block is their output
    <!-- run exact -->      the same, for an output that is the same on every machine
    <!-- bug N PLACE -->    before a ```diff block: docs/bugs/N.patch, and the function it is in
    <!-- shows bug N -->    before an indented block: commands; the next ``` block has lines that
                            they print with bug N, and not without it; also `shows bug N exact`
    <!-- code FILE -->      before a ```python block: lines of FILE

A line ... stands for any lines. Words must match. Numbers may differ, except in an `exact` block,
in the bytes that a step sends, and where a bug changes only the numbers of the lines shown.
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
from old import start_process
from rig import ROOT

from docs import play as game
from docs.play import Block, chapters, start

DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# For example 1m20s, 1,234.5, 1e-5, 12%
NUMBER = re.compile(r"(?<![A-Za-z_\d])(?:\d+[hm]\d+[ms]|[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?%?)")
UNIT = re.compile(r"# ?(?:[kMGT]?B|us|ms|s|min|m|h)(?![A-Za-z])")
# "5 x reduce_scatter over dp_shard: 3.38 MB a step": the same on every machine
TRAFFIC = re.compile(r"\d+ x \w+ over \w+: [\d.]+ MB a step")
# Logged by torchrun or torch's C++
LOG = re.compile(r"\[?[WIE]\d{3,4}[ :]|\*+$")


# --------------------------------------------------------------------------------------------------
# Does an output have the same shape as the output shown?


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


def shows_bug(shown: str, with_bug: str, without: str, forms=(shape, exact)) -> str | None:
    """What is wrong with the output shown for a bug, or None."""
    for form in forms:
        missing = find(lines(shown, form), lines(with_bug, form), anywhere=True)
        if missing is not None:
            return f"not printed with the bug: {missing}"
        if find(lines(shown, form), lines(without, form), anywhere=True) is not None:
            return None
    return "also printed without the bug"


# --------------------------------------------------------------------------------------------------
# Running


def copy(project: Path, folder: Path) -> Path:
    unwanted = shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache")
    return shutil.copytree(project, folder, ignore=unwanted, symlinks=True)


def run(command: str, folder: Path) -> tuple[int, str]:
    """Return (exit status, output)."""
    process = start(command, folder)
    try:
        out, _ = process.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks left behind
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out


def run_chapter(blocks: list[Block], project: Path, tmp: Path) -> list[str]:
    """Run the blocks in order, in a copy of the project. Return the problems."""
    here = copy(project, tmp / "chapter")
    bugs = {block.name: block for block in blocks if block.kind == "bug"}
    wrong = []
    for block in blocks:
        start = time.monotonic()
        if block.kind == "run":
            status, out = run(block.text, here)
            form = exact if block.name == "exact" else shape
            problem = block.output and find(lines(block.output, form), lines(out, form))
            # A document may show a run that fails.
            if status and not re.search("error|stopped", block.output or "", re.I):
                problem = f"exit status {status}"
        elif block.kind == "shows bug":
            planted, clean = copy(here, tmp / "planted"), copy(here, tmp / "clean")
            plant(bugs[block.name], planted)
            _, out = run(block.text, planted)
            forms = (exact,) if block.place == "exact" else (shape, exact)
            problem = shows_bug(block.output, out, run(block.text, clean)[1], forms)
            shutil.rmtree(planted)
            shutil.rmtree(clean)
        else:
            continue
        print(f"{time.monotonic() - start:6.1f} s  {' '.join(block.text.split())}")
        if problem:
            wrong.append(f"{block.text}{problem}\n\n{out}")
    return wrong


def patch_of(bug: Block) -> Path:
    return ROOT / f"docs/bugs/{bug.name}.patch"


def plant(bug: Block, folder: Path, *options: str) -> None:
    subprocess.run(["git", "apply", *options, patch_of(bug)], cwd=folder, check=True)


# --------------------------------------------------------------------------------------------------
# The documents of this project


MARKED = [
    pytest.param(path, heading, id=f"{path.name}: {heading}")
    for path in DOCUMENTS
    for heading in chapters(path.read_text())
]


LECTURE_BLOCKS = [
    block
    for part in game.LECTURE
    for blocks in chapters(part.read_text()).values()
    for block in blocks
]
BUGS = [block for block in LECTURE_BLOCKS if block.kind == "bug"]


def lines_of(diff: str, *marks: str) -> list[str]:
    return [line for line in diff.splitlines() if line[:1] in marks and line[:3] not in HEADER]


HEADER = ("---", "+++")


def test_each_bug_has_a_patch_and_an_output():
    assert [bug.name for bug in BUGS] == [b.name for b in LECTURE_BLOCKS if b.kind == "shows bug"]
    assert {bug.name for bug in BUGS} == {path.stem for path in ROOT.glob("docs/bugs/*.patch")}
    for bug in BUGS:  # the lecture shows less of what has not changed
        patch = patch_of(bug).read_text()
        assert lines_of(bug.text, "+", "-") == lines_of(patch, "+", "-")
        assert {*lines_of(bug.text, " ")} <= {*lines_of(patch, " ")}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_changes_the_function_of_its_mark(bug, tmp_path):
    file, name = bug.place.split(":")
    shutil.copyfile(ROOT / file, tmp_path / Path(file).name)
    plant(bug, tmp_path, f"-p{1 + file.count('/')}")
    before, after = (folder.read_text() for folder in (ROOT / file, tmp_path / Path(file).name))
    lines = zip(before.splitlines(), after.splitlines())
    first = next(i for i, (a, b) in enumerate(lines, start=1) if a != b)
    node = ast.parse(before)
    for part in name.split("."):  # for example Head.__init__
        (node,) = (child for child in node.body if getattr(child, "name", None) == part)
    assert node.lineno <= first <= node.end_lineno
    assert game.missing(name, bug.place, before) == game.missing(bug.place, bug.place, before) == ""


def test_every_bug_applies():
    for patch in sorted(ROOT.glob("docs/bugs/*.patch")):
        subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)


def test_the_code_that_the_lecture_shows_exists():
    for block in LECTURE_BLOCKS:
        if block.kind == "code":
            assert block.text in (ROOT / block.name).read_text()


LESSON = """## 1. Sums

<!-- run -->
    python one.py

<!-- bug 1 one.py:total -->
```diff
 def total():
-    return 24.0
+    return 12.0
```
<details><summary>Answer</summary>As [summed](one.md), **half** is lost.

<!-- shows bug 1 -->
    python one.py

```
sent 12.0
```
</details>
"""


BUG = """--- a/one.py
+++ b/one.py
@@ -1,3 +1,3 @@
 def total():
-    return 24.0
+    return 12.0
 print("sent", total())
"""


def play(project: Path, folder: Path, *arguments: str) -> subprocess.Popen:
    """Start docs.play, with its temporary folder in `folder`."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    command = [sys.executable, "-m", "docs.play", *arguments]
    environment = os.environ | {"TMPDIR": str(folder)}
    return start_process(command, cwd=project, env=environment, text=True, **pipes)


def test_play_asks_for_the_function_of_a_bug(tmp_path):
    project = tmp_path / "project"
    (project / "tokens/python").mkdir(parents=True)
    (project / "docs/bugs").mkdir(parents=True)
    shutil.copy(ROOT / "docs/play.py", project / "docs")
    (project / "docs/bugs/1.patch").write_text(BUG)
    (project / "docs/lecture-1.md").write_text(LESSON)
    source = 'def total():\n    return 24.0\nprint("sent", total())\ndef other(): ...\n'
    (project / "one.py").write_text(source)
    out, _ = play(project, tmp_path, "bug").communicate("other\nprints\nONE.total() \n")
    assert "no. The first line that differs: sent 12.0" in out and "no such function." in out
    assert "Yes: one.py:total" in out and "As summed, half is lost." in out
    for words in (["bug", "99"], ["1"], []):
        process = play(project, tmp_path, *words)
        out, _ = process.communicate()
        assert process.returncode == 1 and "The bugs are 1." in out
    assert list(tmp_path.glob("play-*")) == []


def test_play_understands_names_of_functions():
    for answer in (" MESH_SHAPE ", "mesh shape", "dist.mesh_shape", "dist.py:mesh_shape()"):
        assert game.missing(answer, "dist.py:mesh_shape", "def mesh_shape(") == ""
        assert game.missing(answer, "dist.py:new_mesh_shape", "def mesh_shape(") == "no"
    source = "class Head:\n    def forward(\nclass Block:\n    def forward(\n"
    for answer, lacks in {
        "forward": "its class",
        "head": "which function",
        "tail": "no such",
    }.items():
        assert lacks in game.missing(answer, "model.py:Head.forward", source)
    assert game.missing("Head.forward", "model.py:Head.forward", source) == ""


def test_play_leaves_no_folder_after_ctrl_c(tmp_path):
    process = play(ROOT, tmp_path, "bug", "3")
    for line in process.stdout:
        if line.startswith("(in "):
            break
    time.sleep(1)  # torchrun has started by then
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


@pytest.mark.slow(proves="every marked command of every document")
@pytest.mark.parametrize("path, heading", MARKED)
def test_a_chapter_prints_what_it_shows(path, heading, project, tmp_path, capsys):
    with capsys.disabled():
        print(f"\n{path.name}: {heading}")
        wrong = run_chapter(chapters(path.read_text())[heading], project, tmp_path)
    assert not wrong, "\n\n".join(wrong)


# --------------------------------------------------------------------------------------------------
# What the checks of this file find


def test_a_bug_shows_in_words_or_in_numbers_alone():
    assert shows_bug("hello 0 took 0 s", "hello 0 took 0 s", "hello 1 took 0 s") is None
    assert shows_bug("hello 0", "hello 1", "hello 1") == "not printed with the bug: hello 0"
    assert shows_bug("...", "hello 0", "hello 1") == "also printed without the bug"


def test_every_digit_of_an_exact_block_must_match(tmp_path):
    (tmp_path / "project").mkdir()
    lesson = "## 1\n\n<!-- run exact -->\n    echo 24 MB of 30\n\n```\n24 MB of 31\n```\n"
    (problem,) = run_chapter(chapters(lesson)["1"], tmp_path / "project", tmp_path)
    assert "24 MB of 31" in problem
    shutil.rmtree(tmp_path / "chapter")
    lesson = lesson.replace("run exact", "run")
    assert run_chapter(chapters(lesson)["1"], tmp_path / "project", tmp_path) == []
    assert shows_bug("hello 0", "hello 1", "bye", [exact]) == "not printed with the bug: hello 0"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_output_of_a_plan_is_compared_exactly(path):
    """A plan is the same on every machine, unless it reads a run that was measured."""
    blocks = r"^(.*)\n+((?: {4}.*\n|\n(?= {4}))+)\n```\n"  # the line before, the commands
    for mark, commands in re.findall(blocks, path.read_text(), re.M):
        if "tools.plan" in commands and "--run" not in commands:
            assert re.fullmatch("<!-- .* exact -->", mark), commands


def test_a_command_that_fails_is_found(tmp_path):
    (tmp_path / "project").mkdir()
    lesson = LESSON.replace("python one.py", "exit 3")
    (problem,) = run_chapter(chapters(lesson)["1. Sums"][:1], tmp_path / "project", tmp_path)
    assert "exit status 3" in problem


def test_an_unknown_mark_is_refused():
    for mark in ("<!--run-->", "<!-- run -->\nthat is:"):
        with pytest.raises(ValueError):
            chapters(LESSON.replace("<!-- run -->", mark))
