"""Play the lecture, in a copy of the project that is deleted at the end.

python -m docs.play 3       asks for numbers, runs chapter 3's commands, and shows who was right
python -m docs.play bug     shows a run without and with a bug (bug 3: chapter 3's), and asks for it
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ASK = re.compile(r"<!-- ask (.+?) \| (.+?) \| (.+) -->\n")  # question, formula's answer, pattern
MARK = re.compile(r"<!-- (run|bug|shows bug|code)(?: (\S+))?(?: (\S+))? -->\n")
BODIES = {"bug": "```diff\n(.*?^)```\n", "code": "```python\n(.*?^)```\n"}
OUTPUT = re.compile(r"^```\n(.*?)^```", re.M | re.S)


@dataclass
class Block:
    kind: str  # run, bug, shows bug, code
    name: str | None  # the number of a bug, the file of code
    place: str | None  # the function that a bug is in, such as dist.py:dp_rank
    text: str
    output: str | None
    questions: list[tuple[str, str, str]]


def chapters(text: str) -> dict[str, list[Block]]:
    """Heading -> its marked blocks. Raises ValueError if a mark is unknown or has no block."""
    found = {}
    for chapter in re.split(r"^## ", text, flags=re.M):
        heading, *parts = re.split(r"^(?=<!--)", chapter, flags=re.M)
        heading, blocks, questions = heading.partition("\n")[0], [], []
        for part in parts:
            if question := ASK.match(part):
                questions.append(question.groups())
                continue
            mark = MARK.match(part)
            pattern = mark and BODIES.get(mark[1], r"((?: {4}[^\n]*\n|\n(?= {4}))+)")
            body = mark and re.compile(pattern, re.M | re.S).match(part, mark.end())
            output = body and OUTPUT.search(part, body.end())
            if not body or (mark[1] == "shows bug" and not output):
                raise ValueError(f"a mark without its block, in {heading}: {part[:50]}")
            blocks.append(Block(*mark.groups(), body[1], output and output[1], questions))
            questions = []
        if blocks:
            found[heading] = blocks
    return found


def run(command: str, folder: Path, what: str = "") -> str:
    """Run indented commands in the folder. Print what they print as it comes, and return it."""
    print(f"\n{command}\n(in {folder}{what})\n", flush=True)
    script = "\n".join(line[4:] for line in command.splitlines())
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    options = dict(cwd=folder, env=environment, text=True, start_new_session=True)
    process = subprocess.Popen(["bash", "-c", script], **pipes, **options)
    output = ""
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            output += line
    except BaseException:  # Ctrl-C
        os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks
        process.communicate(timeout=60)  # until the last of them has closed its output
        raise
    return output


def guess(blocks: list[Block], folder: Path) -> None:
    """Ask for all numbers first, since one output may hint at the next; run, and compare."""
    questions = [question for block in blocks for question, _, _ in block.questions]
    guesses = [input(f"{question}? ") for question in questions]
    for block in blocks:
        output = run(block.text, folder) if block.kind == "run" else ""
        for question, formula, pattern in block.questions:
            measured = re.findall(pattern, output)[-1:] or ["nothing"]
            print(
                f"{question}: you {guesses.pop(0)}, the formula {formula}, measured {measured[0]}"
            )


def find_bug(bug: Block, shows: Block, folder: Path) -> None:
    """Show a run without and with a bug, and ask for its function."""
    run(shows.text, folder, ", without the bug")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    subprocess.run(["git", "apply"], input=bug.text, cwd=folder, text=True, check=True)
    run(shows.text, folder, ", with the bug")
    file, function = bug.place.split(":")
    answer = "?"
    while answer and answer not in (bug.place, function, function.split(".")[-1]):
        answer = input(f"Which function of {file} is wrong? (Enter: the solution) ")
    print(f"{bug.place}, bug {bug.name} of the lecture. It shows in\n{shows.output}\n{bug.text}")


def main(what: str = "", number: str = "") -> None:
    found = chapters((ROOT / "docs/lecture.md").read_text())
    chapter = {heading.split(".")[0]: blocks for heading, blocks in found.items()}
    bugs = {(b.kind, b.name): b for blocks in found.values() for b in blocks if "bug" in b.kind}
    number = number or random.choice([name for _, name in bugs])
    if what != "bug" and not any(block.questions for block in chapter.get(what, [])):
        sys.exit(f"{__doc__}\nChapters with questions: {', '.join(chapter)}.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "__pycache__", ".*_cache", "*venv")
    with tempfile.TemporaryDirectory(prefix="play-", ignore_cleanup_errors=True) as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder, "nanoshard"), ignore=unwanted))
        if (ROOT / "tokens/python").exists():
            shutil.copytree(ROOT / "tokens/python", copy / "tokens/python")
        if what == "bug":
            find_bug(bugs["bug", number], bugs["shows bug", number], copy)
        else:
            guess(chapter[what], copy)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        main(*sys.argv[1:])
