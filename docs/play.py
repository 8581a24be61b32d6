"""Find the bugs of the lecture: python -m docs.play bug [NUMBER]

Shows a run of the lecture without and with a bug, by default with any of them, and asks which
function is wrong. Commands run in a copy of the project.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

ROOT = Path(__file__).parent.parent
LECTURE = sorted(ROOT.glob("docs/lecture-*.md"))  # its parts

# The marks of the lecture's blocks
#
#     <!-- prints -->         before an indented block: commands; the next ``` block is their output
#     <!-- prints exact -->   the same, for an output that is the same on every machine
#     <!-- code FILE -->      before a ```python block: lines of FILE
#     <!-- bug N PLACE -->    before a ```diff block: docs/bugs/N.patch, and the function it is in
#     <!-- shows bug N -->    before an indented block: commands; the next ``` block has lines that
#                             they print with bug N, and not without it
MARK = re.compile(r"<!-- (prints|bug|shows bug|code)(?: (\S+))?(?: (\S+))? -->\n\n?")
BODIES = {"bug": "```diff\n(.*?^)```\n", "code": "```python\n(.*?^)```\n"}
COMMANDS = r"((?: {4}[^\n]*\n|\n(?= {4}))+)"
OUTPUT = re.compile(r"^```\n(.*?)^```", re.M | re.S)
# `name`: exact, the bug's number, or the file of the code. `place`: the function that contains the
# bug, for example dist.py:dp_rank. `note`: the answer to a bug.
Block = namedtuple("Block", "kind name place text output note")


def chapters(text: str) -> dict[str, list[Block]]:
    """Return {heading: marked blocks}. Raises ValueError if a mark is unknown or has no block."""
    found = {}
    for chapter in re.split(r"^## ", text, flags=re.M):
        before, *parts = re.split(r"^(?=<!--)", chapter, flags=re.M)
        heading, blocks = before.partition("\n")[0], []
        for part in parts:
            mark = MARK.match(part)
            pattern = mark and BODIES.get(mark[1], COMMANDS)
            body = mark and re.compile(pattern, re.M | re.S).match(part, mark.end())
            output = body and OUTPUT.search(part, body.end())
            if not body or (mark[1] in ("prints", "shows bug") and not output):
                raise ValueError(f"a mark without its block, in {heading}: {part[:50]}")
            note = None
            if mark[1] == "shows bug":  # the explanation starts before the mark
                note = before.rpartition("</summary>")[2] + output[1]
                note += part[output.end() :].partition("</details>")[0]
            blocks.append(Block(*mark.groups(), body[1], output and output[1], note))
            before = part
        if blocks:
            found[heading] = blocks
    return found


def shell(commands: str) -> list[str]:
    """Return the arguments that run indented commands as a reader would, with this Python."""
    lines = [f"export PATH={Path(sys.executable).parent}:$PATH OMP_NUM_THREADS=1"]
    lines += ["export PYTHONUNBUFFERED=1", "unset RANK WORLD_SIZE"]
    lines += [line[4:] for line in commands.splitlines()]
    return ["bash", "-c", "\n".join(lines)]


def run(commands: str, folder: Path, what: str) -> str:
    """Run commands, show what they print as it comes, and return it."""
    print(f"\n{commands}\n(in {folder}, {what})\n")
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process = subprocess.Popen(
        shell(commands), cwd=folder, start_new_session=True, text=True, errors="replace", **pipes
    )
    output = ""
    try:
        for line in process.stdout:
            if line.startswith("USDT:"):  # of torch's profiler
                continue
            print(line, end="")
            output += line
    except BaseException:  # Ctrl-C
        os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks
        process.communicate(timeout=60)  # until the last of them has closed its output
        raise
    process.wait()
    return output


def missing(answer: str, place: str, source: str) -> str:
    """Return what an answer such as head.__init__() or model.py:Head lacks, or nothing."""
    words = re.sub(r"\.py:|/", ".", answer.lower().strip(" ()")).replace(" ", "_").split(".")
    right = re.sub(r"\.py:|/", ".", place.lower()).split(".")
    if words == right[-len(words) :]:
        return ""
    if words[-1] in right:
        return "the right class: which function?"
    is_there = re.search(rf"^ *(?:def|class) {re.escape(words[-1])}\b", source.lower(), re.M)
    return "no" if is_there else "the file has no such function"


def hints(bug: Block, without: str, output: str) -> list[str]:
    """Return hints at the function, the smaller first, from outputs without and with the bug."""
    noise = re.compile(r"[\d.,]+ ?(?:%|(?:ms|s|tok/s)\b)|\d+m\d+s|^ *slowest.*", re.M)
    without = noise.sub("", without)
    lines = [line.strip() for line in output.splitlines() if noise.sub("", line) not in without]
    letter = bug.place.replace(".", ":").split(":")[-1][0]
    return [f"The first line that differs: {''.join(lines[:1])}", f"Its name begins with {letter}."]


def find_bug(bug: Block, shows: Block, folder: Path) -> None:
    """Ask for the function of a bug, until it is found or the reader gives up."""
    file = bug.place.split(":")[0]
    without = run(shows.text, folder, f"without bug {bug.name}")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    subprocess.run(["git", "apply", f"docs/bugs/{bug.name}.patch"], cwd=folder, check=True)
    output = run(shows.text, folder, f"with bug {bug.name}")
    more, source = iter(hints(bug, without, output)), (folder / file).read_text()
    question = f"Which function of {file} is wrong? (Enter: the solution) "
    while (answer := input(question).strip()) and (lack := missing(answer, bug.place, source)):
        print(f"{lack}.", next(more, "") if lack == "no" else "")
    note = re.sub(r"\[([^]]+)\]\([^)\s]+\)", r"\1", shows.note).strip()  # without addresses
    print(f"\n{'Yes: ' * bool(answer)}{bug.place}\n\n{bug.text}\n{note}\n")


def main(arguments: list[str]) -> None:
    blocks = {}  # bug's number -> its two blocks
    for part in LECTURE:
        for block in sum(chapters(part.read_text()).values(), []):
            if "bug" in block.kind:
                blocks.setdefault(block.name, []).append(block)
    number = arguments[1] if len(arguments) > 1 else random.choice([*blocks])
    if arguments[:1] != ["bug"] or number not in blocks:
        sys.exit(f"{__doc__}\nThe bugs are {', '.join(blocks)}.")
    names = (".git", "runs", "tokens", "__pycache__", ".*_cache", "*venv")
    unwanted = shutil.ignore_patterns(*names)  # the first command makes tokens
    with tempfile.TemporaryDirectory(prefix="play-", ignore_cleanup_errors=True) as folder:
        find_bug(*blocks[number], Path(shutil.copytree(ROOT, f"{folder}/code", ignore=unwanted)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.stdout.reconfigure(line_buffering=True)
    try:
        main(sys.argv[1:])
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the last one: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"docs.play: {error}")
