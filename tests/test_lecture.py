"""The documents' commands print the output shown, and planted bugs show.

Each chapter (## heading) of a document runs in its own copy of the project. Marks:

    <!-- run -->            before an indented block: commands; the next ``` block is their output
    <!-- bug N -->          before a ```diff block: a bug to plant with git apply
    <!-- shows bug N -->    before an indented block: commands; the next ``` block has lines that
                            they print with bug N, and not without it

A line ... stands for any lines. Words must match; numbers may differ, except the bytes that a step
sends. If a bug changes only the numbers of the lines shown, those must match too.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])]
LECTURE = "lecture.md"
MARK = re.compile(r"^<!-- (run|bug|shows bug)(?: (\w+))? -->\n", re.M)
COMMAND = re.compile(r"(?: {4}.*\n|\n(?= {4}))+")
DIFF = re.compile(r"```diff\n(.*?)^```", re.M | re.S)
OUTPUT = re.compile(r"^```\n(.*?)^```", re.M | re.S)
# Such as 1m20s, 1,234.5, 1e-5, 12%
NUMBER = re.compile(r"(?<![A-Za-z_\d])(?:\d+[hm]\d+[ms]|[-+]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?%?)")
UNIT = re.compile(r"# ?(?:[kMGT]?B|us|ms|s|min|m|h)(?![A-Za-z])")
# "5 x reduce_scatter over dp_shard: 3.38 MB a step": the same on every machine
TRAFFIC = re.compile(r"\d+ x \w+ over \w+: [\d.]+ MB a step")
# Logged by torchrun or torch's C++
LOG = re.compile(r"\[?[WIE]\d{3,4}[ :]|\*+$")


@dataclass
class Block:
    kind: str  # run, bug, shows bug
    bug: str | None  # its number
    text: str  # commands or a diff
    output: str | None


def chapters(text: str) -> dict[str, list[Block]]:
    """Heading -> its marked blocks. Raises ValueError if a mark has no block."""
    found = {}
    for chapter in re.split(r"^## ", text, flags=re.M):
        marks = list(MARK.finditer(chapter))
        if len(marks) != chapter.count("\n<!--"):
            raise ValueError(f"a mark that is none of three: {chapter.splitlines()[0]}")
        blocks = []
        for mark, following in zip(marks, [*marks[1:], None]):
            rest = chapter[mark.end() : following and following.start()]
            body = (DIFF if mark[1] == "bug" else COMMAND).match(rest)
            if body is None:
                raise ValueError(f"{mark[0]}stands before something else: {rest[:50]}")
            output = OUTPUT.search(rest, body.end())
            block = Block(mark[1], mark[2], body[body.re.groups], output and output[1])
            if mark[1] == "shows bug" and not output:
                raise ValueError(f"{mark[0]}what it prints is missing")
            blocks.append(block)
        if blocks:
            found[chapter.splitlines()[0]] = blocks
    return found


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


def run(command: str, folder: Path) -> tuple[int, str, float]:
    """Return (exit status, output, seconds)."""
    start = time.monotonic()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    script = "\n".join(line[4:] for line in command.splitlines())
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        out, _ = process.communicate(timeout=600)
    finally:
        with contextlib.suppress(ProcessLookupError):  # ranks left behind
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, time.monotonic() - start


def run_chapter(blocks: list[Block], project: Path, tmp: Path) -> tuple[list[str], list[float]]:
    """Run the blocks in order, in a copy of the project. Return problems and seconds."""
    here = copy(project, tmp / "chapter")
    bugs = {block.bug: block.text for block in blocks if block.kind == "bug"}
    wrong, seconds = [], []
    for block in blocks:
        if block.kind == "run":
            status, out, took = run(block.text, here)
            problem = block.output and find(lines(block.output), lines(out))
            # A document may show a run that fails.
            if status and not re.search("error|stopped", block.output or "", re.I):
                problem = f"exit status {status}"
        elif block.kind == "shows bug":
            planted = copy(here, tmp / f"bug-{block.bug}-{len(seconds)}")
            clean = copy(here, tmp / f"clean-{block.bug}-{len(seconds)}")
            plant(bugs[block.bug], planted)
            _, out, took = run(block.text, planted)
            problem = shows_bug(block.output, out, run(block.text, clean)[1])
            shutil.rmtree(planted)
            shutil.rmtree(clean)
        else:
            continue
        seconds.append(took)
        print(f"{took:6.1f} s  {' '.join(block.text.split())}")
        if problem:
            wrong.append(f"{block.text}{problem}\n\n{out}")
    return wrong, seconds


def plant(diff: str, folder: Path, *options: str) -> None:
    subprocess.run(["git", "apply", *options, "-"], input=diff, cwd=folder, text=True, check=True)


# --------------------------------------------------------------------------------------------------
# The documents of this project


MARKED = [
    pytest.param(path, heading, id=f"{path.name}: {heading}")
    for path in DOCUMENTS
    for heading in chapters(path.read_text())
]


def test_each_bug_can_be_planted_and_is_shown():
    for path in DOCUMENTS:
        for blocks in chapters(path.read_text()).values():
            bugs = [block for block in blocks if block.kind == "bug"]
            shown = {block.bug for block in blocks if block.kind == "shows bug"}
            assert {block.bug for block in bugs} == shown, path
            for block in bugs:
                plant(block.text, ROOT, "--check")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project with the built-in data and without runs."""
    folder = tmp_path_factory.mktemp("project") / "code"
    unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=unwanted)
    assert run("    python prepare.py --out tokens/python", folder)[0] == 0
    return folder


@pytest.fixture(scope="module")
def total() -> dict[str, float]:
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("path, heading", MARKED)
def test_a_chapter_prints_what_it_shows(path, heading, project, tmp_path, total, capsys):
    with capsys.disabled():
        print(f"\n{path.name}: {heading}")
        wrong, seconds = run_chapter(chapters(path.read_text())[heading], project, tmp_path)
    total[path.name] = total.get(path.name, 0) + sum(seconds)
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
def test_the_commands_of_the_lecture_take_less_than_25_minutes(total, capsys):
    with capsys.disabled():
        print("".join(f"\n{seconds:6.1f} s  {name} in all" for name, seconds in total.items()))
    assert total.get(LECTURE, 0) < 25 * 60


# --------------------------------------------------------------------------------------------------
# What this file finds

DOCUMENT = """# A program
## One

<!-- run -->
    python greet.py 2 > greeted
    cat greeted

It prints two lines:

```
hello 1 took 0.01 s
hello 2 took 0.02 s
        1 x all_reduce over world: 0.00 MB a step
```

<!-- run -->
    python greet.py 9 && ls greeted

```
hello 1 took 12.5 ms
...
hello 9 took 1,000 s
...
greeted
```

<!-- run -->
    python greet.py x

```
Traceback (most recent call last):
...
ValueError: invalid literal for int() with base 10: 'x'
```

<!-- bug 1 -->
```diff
--- a/greet.py
+++ b/greet.py
@@ -1,4 +1,4 @@
 import sys
 for i in range(int(sys.argv[1])):
-    print("hello", i + 1, "took", i * 0.01, "s")
+    print("hello", i, "took", i * 0.01, "s")
 print("  1 x all_reduce over world: 0.00 MB a step")
```

<!-- shows bug 1 -->
    python greet.py 3

```
hello 0 took 0.0 s
...
hello 2 took 0.02 s
```
"""
PROGRAM = """import sys
for i in range(int(sys.argv[1])):
    print("hello", i + 1, "took", i * 0.01, "s")
print("  1 x all_reduce over world: 0.00 MB a step")
"""


def problems(document: str, tmp_path: Path) -> list[str]:
    (tmp_path / "project").mkdir()
    (tmp_path / "project/greet.py").write_text(PROGRAM)
    (blocks,) = chapters(document).values()
    return run_chapter(blocks, tmp_path / "project", tmp_path)[0]


def test_a_document_that_shows_what_is_printed_passes(tmp_path):
    assert problems(DOCUMENT, tmp_path) == []


@pytest.mark.parametrize(
    "old, new, problem",
    [
        ("hello 1 took 12.5 ms", "hello 1 takes 12.5 ms", "hello # takes #"),
        ("hello 2 took 0.02 s\n", "", "1 x all_reduce"),
        ("        1 x all_reduce over world: 0.00 MB a step\n", "", "and more comes after it"),
        ("1 x all_reduce", "2 x all_reduce", "2 x all_reduce over world: 0.00 MB a step"),
        ("...\nhello 9 took 1,000 s\n...", "hello 9 took 1,000 s", "greeted"),
        ("greeted\n```", "greeted\ngreeted\n```", "greeted"),
        ("ls greeted", "ls greeted; exit 3", "exit status 3"),
        ("hello 0 took", "hello 7 took", "not printed with the bug: hello 7 took 0.0 s"),
        ("hello 0 took 0.0 s\n...\nhello 2 took 0.02 s", "...", "printed without the bug, too"),
        ('+    print("hello", i,', '+    print("hello", i + 1,', "not printed with the bug"),
    ],
)
def test_what_is_not_printed_as_shown_is_found(old, new, problem, tmp_path):
    assert old in DOCUMENT
    (found,) = problems(DOCUMENT.replace(old, new, 1), tmp_path)
    assert problem in found


@pytest.mark.parametrize(
    "old, new",
    [
        ("<!-- run -->", "<!-- runs -->"),
        ("<!-- run -->", "<!--run-->"),
        ("<!-- run -->\n", "<!-- run -->\nthat is:\n"),
        ("```diff", "```"),
        ("hello 0 took 0.0 s\n...\nhello 2 took 0.02 s\n```\n", ""),
    ],
)
def test_a_mark_that_is_not_understood_is_refused(old, new):
    with pytest.raises(ValueError):
        chapters(DOCUMENT.replace(old, new))
