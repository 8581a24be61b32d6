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
# Precedes each command: grep prints each line at once, and torchrun does not warn of threads.
SHELL = """unset RANK WORLD_SIZE OMP_NUM_THREADS
grep() { command grep --line-buffered "$@"; }
torchrun() { OMP_NUM_THREADS=1 command torchrun "$@"; }
"""
MARK = re.compile(r"<!-- (run|bug|shows bug|code)(?: (\S+))?(?: (\S+))? -->\n\n?")
BODIES = {"bug": "```diff\n(.*?^)```\n", "code": "```python\n(.*?^)```\n"}
OUTPUT = re.compile(r"^```\n(.*?)^```", re.M | re.S)
END = re.compile(r"^(?:\*\*Plant|\*\*Exercise|#|</?details)", re.M)  # of the text after an output
IMAGE = re.compile(r"!\[[^]]*\]\([^)]*\)\n*(?:\*[^*](?:.|\n(?!\n))*?\*\n)?")  # and its caption
# `name`: the bug's number, or the file of the code. `place`: the function that contains the bug,
# for example dist.py:dp_rank. `note`: the answer to a bug.
Block = namedtuple("Block", "kind name place text output note")


def chapters(text: str) -> dict[str, list[Block]]:
    """Return {heading: marked blocks}. Raises ValueError if a mark is unknown or has no block."""
    found = {}
    for chapter in re.split(r"^## ", text, flags=re.M):
        before, *parts = re.split(r"^(?=<!--)", chapter, flags=re.M)
        heading, blocks = before.partition("\n")[0], []
        for part in parts:
            mark = MARK.match(part)
            pattern = mark and BODIES.get(mark[1], r"((?: {4}[^\n]*\n|\n(?= {4}))+)")
            body = mark and re.compile(pattern, re.M | re.S).match(part, mark.end())
            output = body and OUTPUT.search(part, body.end())
            if not body or (mark[1] == "shows bug" and not output):
                raise ValueError(f"a mark without its block, in {heading}: {part[:50]}")
            note = None
            if mark[1] == "shows bug":  # the explanation starts before the mark
                note = before.rpartition("</summary>")[2] + output[1]
                note += END.split(part[output.end() :])[0]
            blocks.append(Block(*mark.groups(), body[1], output and output[1], note))
            before = part
        found[heading] = blocks
    return {heading: blocks for heading, blocks in found.items() if blocks}


def plain(text: str) -> str:
    """Return Markdown without images, their captions, the addresses of links, and bold stars."""
    text = re.sub(r"\[([^]]+)\]\([^)\s]+\)", r"\1", IMAGE.sub("", text))
    return re.sub(r"\*\*(.+?)\*\*", r"\1", text, flags=re.S).strip()


def start(command: str, folder: Path) -> subprocess.Popen:
    """Start indented commands in the folder, as a reader would, in a session of their own."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONUNBUFFERED": "1"}
    script = SHELL + "\n".join(line[4:] for line in command.splitlines())
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    options = dict(cwd=folder, env=environment, text=True, errors="replace")
    return subprocess.Popen(["bash", "-c", script], start_new_session=True, **pipes, **options)


def run(command: str, folder: Path, what: str = "", show=print) -> tuple[int, str]:
    """Run commands, and show what they print as it comes. Return (exit status, output)."""
    show(f"\n{command}\n(in {folder}{what})\n")
    process, output = start(command, folder), ""
    try:
        for line in process.stdout:
            show(line, end="")
            output += line
    except BaseException:  # Ctrl-C
        os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its ranks
        process.communicate(timeout=60)  # until the last of them has closed its output
        raise
    return process.wait(), output


def missing(answer: str, place: str, source: str) -> str:
    """Return what an answer such as head.__init__() or model.py:Head lacks, or nothing."""
    words = re.sub(r"\.py:|/", ".", answer.lower().strip(" ()")).replace(" ", "_").split(".")
    right = re.sub(r"\.py:|/", ".", place.lower()).split(".")
    alike = re.findall(rf"^ *(?:def|class) {re.escape(words[-1])}\b", source.lower(), re.M)
    if words == right[-len(words) :]:
        is_unclear = len(words) == 1 and len(alike) > 1
        return "several functions have that name: name its class" if is_unclear else ""
    if words[-1] in right:
        return "the right class: which function?"
    return "no" if alike else "the file has no such function"


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
    _, without = run(shows.text, folder, f", without bug {bug.name}")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    subprocess.run(["git", "apply", f"docs/bugs/{bug.name}.patch"], cwd=folder, check=True)
    _, output = run(shows.text, folder, f", with bug {bug.name}")
    more, source = iter(hints(bug, without, output)), (folder / file).read_text()
    question = f"Which function of {file} is wrong? (Enter: the solution) "
    while (answer := input(question).strip()) and (lack := missing(answer, bug.place, source)):
        print(f"{lack}.", next(more, "") if lack == "no" else "")
    print(f"\n{'Yes: ' * bool(answer)}{bug.place}\n\n{bug.text}\n{plain(shows.note)}\n")


def main(arguments: list[str]) -> None:
    blocks = {}  # bug's number -> its two blocks
    for part in LECTURE:
        for block in sum(chapters(part.read_text()).values(), []):
            if "bug" in block.kind:
                blocks.setdefault(block.name, []).append(block)
    number = arguments[1] if len(arguments) > 1 else random.choice([*blocks])
    if arguments[:1] != ["bug"] or number not in blocks:
        sys.exit(f"{__doc__}\nThe bugs are {', '.join(blocks)}.")
    if not (ROOT / "tokens/python").exists():
        run("    python prepare.py --out tokens/python", ROOT, ", once: the data are missing")
    unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "__pycache__", ".*_cache", "*venv")
    with tempfile.TemporaryDirectory(prefix="play-", ignore_cleanup_errors=True) as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder, "nanoshard"), ignore=unwanted))
        shutil.copytree(ROOT / "tokens/python", copy / "tokens/python")
        find_bug(*blocks[number], copy)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.stdout.reconfigure(line_buffering=True)
    try:
        main(sys.argv[1:])
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the last one: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"docs.play: {error}")
