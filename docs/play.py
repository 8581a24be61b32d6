"""Play the lecture: predict its numbers, find its bugs, and write its functions.

python -m docs.play          lists the chapters, what you have done, and what comes next
python -m docs.play 3        asks for chapter 3's numbers, runs its commands, judges your numbers
python -m docs.play bug 3    shows a run without and with bug 3, and asks where it is
python -m docs.play write 3  you write chapter 3's functions of examples/zero.py (write NAME: one)

Commands run in a copy of the project. runs/ keeps your score and the functions that you write.
"""

import ast
import json
import os
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
MINE = "runs/write/zero.py"
# {"3": [right, close, neither], "bug 3": [tries, or 0 if it was shown], "write zero2": [1]}
SCORE = "runs/play.json"
# Precedes each command: grep prints each line at once, and torchrun does not warn of threads.
SHELL = """unset RANK WORLD_SIZE OMP_NUM_THREADS
grep() { command grep --line-buffered "$@"; }
torchrun() { OMP_NUM_THREADS=1 command torchrun "$@"; }
"""
ASK = re.compile(r"<!-- ask (.+?) \| (.+?) \| (.+) -->\n")  # question, formula's answer, pattern
MARK = re.compile(r"<!-- (run|bug|shows bug|code|write)(?: (\S+))?(?: (\S+))? -->\n\n?")
BODIES = {"bug": "```diff\n(.*?^)```\n", "code": "```python\n(.*?^)```\n", "write": "()"}
OUTPUT = re.compile(r"^```\n(.*?)^```", re.M | re.S)
DETAILS = re.compile(r"<details><summary>[^\n]*</summary>(.*?)</details>", re.S)
END = re.compile(r"^(?:\*\*Plant|\*\*Exercise|#|</?details)", re.M)  # of the text after an output
IMAGE = re.compile(r"!\[[^]]*\]\([^)]*\)\n*(?:\*[^*](?:.|\n(?!\n))*?\*\n)?")  # and its caption
# `name`: the bug's number, the file of the code, or the function to write. `place`: the function
# that contains the bug, for example dist.py:dp_rank. `note`: the text to print after a run: the sum
# that answers the questions and the text below the output, or the answer to a bug.
Block = namedtuple("Block", "kind name place text output questions note")


def chapters(text: str) -> dict[str, list[Block]]:
    """Return {heading: marked blocks}. Raises ValueError if a mark is unknown or has no block."""
    found = {}
    for chapter in re.split(r"^## ", text, flags=re.M):
        before, *parts = re.split(r"^(?=<!--)", chapter, flags=re.M)
        heading, blocks, questions = before.partition("\n")[0], [], []
        for part in parts:
            if question := ASK.match(part):
                questions.append(question.groups())
            else:
                mark = MARK.match(part)
                pattern = mark and BODIES.get(mark[1], r"((?: {4}[^\n]*\n|\n(?= {4}))+)")
                body = mark and re.compile(pattern, re.M | re.S).match(part, mark.end())
                output = body and OUTPUT.search(part, body.end())
                if not body or (mark[1] == "shows bug" and not output):
                    raise ValueError(f"a mark without its block, in {heading}: {part[:50]}")
                note = END.split(part[(output or body).end() :])[0]
                if mark[1] == "shows bug":  # the explanation starts before the mark
                    note = before.rpartition("</summary>")[2] + output[1] + note
                elif questions:
                    note = "".join(DETAILS.findall(before)) + note
                blocks.append(Block(*mark.groups(), body[1], output and output[1], questions, note))
                questions = []
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


def number(text: str, question: str = "") -> float | None:
    """Parse 24, ~24, 844,928, 3.38 MB or none; None if it is not in the question's unit."""
    text = re.sub(r" |,(?=\d{3}(?!\d))", "", re.sub("none|zero", "0", text.lower()).strip("~≈ "))
    match = re.fullmatch(r"(\d+\.?\d*(?:e[-+]?\d+)?|\.\d+)([a-z/]*)", text.replace(",", "."))
    is_number = match and (not match[2] or re.search(rf"\b{match[2]}", question.lower()))
    return float(match[1]) if is_number else None


def ask(question: str) -> float | None:
    while (text := input(f"{question}? ").strip()) and number(text, question) is None:
        print("a number, such as 24, in the question's unit (Enter alone: skip)")
    return number(text, question)


def judge(guess: float | None, answer: str, measured: str) -> str:
    """Return right, close, no or skipped, and the error. `answer` is the formula's number."""
    value, formula = number(measured), number(answer)
    if guess is None or value is None:
        return "skipped"
    error = abs(guess - value) / (abs(value) or 1e-9)
    verdict = "right" if error <= 0.05 else "close" if error <= 0.25 else "no"
    if verdict != "right" and formula and abs(guess / formula - 1) <= 0.05:
        verdict = "right by the sum, but the run differs"
    return f"{verdict}, {guess:,.10g} is {min(error, 99):.1%} off"


def predict(blocks: list[Block], folder: Path) -> list[int]:
    """Ask for all numbers first, since an output may hint at the next one; run, and judge."""
    runs = [block for block in blocks if block.kind == "run"]
    last = max(i for i, block in enumerate(runs) if block.questions)
    asked = {text: answer for block in runs for text, answer, _ in block.questions}
    load, cores = os.getloadavg()[0], os.cpu_count()
    if load > cores and re.search("(?i)seconds|tokens/s", " ".join(asked)):
        print(f"the load is {load:.1f} on {cores} cores: seconds will be too long")
    guesses = {text: ask(text) for text in asked if asked[text] != "as before"}
    verdicts = []
    for block in runs[: last + 1]:
        guesses |= {text: ask(text) for text, _, _ in block.questions if text not in guesses}
        _, output = run(block.text, folder)
        for text, answer, pattern in block.questions:
            measured = (re.findall(pattern, output) or ["nothing"])[-1]
            verdicts.append(judge(guesses[text], answer, measured))
            print(f"\n{text}: {verdicts[-1]}; expected {answer}, measured {measured}")
        print(f"\n{plain(block.note)}".rstrip("\n"))
    if rest := [block.text for block in runs[last + 1 :]]:
        print("\nNot run, for you to read:", *rest, sep="\n")
    return [sum(v.startswith(word) for v in verdicts) for word in ("right", "close", "no")]


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


def find_bug(bug: Block, shows: Block, folder: Path) -> list[int]:
    """Ask for the function of a bug. Return the number of tries, or 0 if the reader gave up."""
    file = bug.place.split(":")[0]
    _, without = run(shows.text, folder, f", without bug {bug.name}")
    shutil.rmtree(folder / "runs", ignore_errors=True)
    subprocess.run(["git", "apply", f"docs/bugs/{bug.name}.patch"], cwd=folder, check=True)
    _, output = run(shows.text, folder, f", with bug {bug.name}")
    more, tries, source = iter(hints(bug, without, output)), 1, (folder / file).read_text()
    question = f"Which function of {file} is wrong? (Enter: the solution) "
    while (answer := input(question).strip()) and (lack := missing(answer, bug.place, source)):
        tries += lack == "no"
        print(f"{lack}.", next(more, "") if lack == "no" else "")
    print(f"\n{'Yes: ' * bool(answer)}{bug.place}\n\n{bug.text}\n{plain(shows.note)}\n")
    return [tries if answer else 0]


def without_bodies(source: str, names: list[str]) -> str:
    """Return the code with an error in place of the bodies of the functions `names`."""
    result = source
    for node in ast.parse(source).body:
        if getattr(node, "name", "") in names:
            text, docstring = (ast.get_source_segment(source, n) for n in (node, node.body[0]))
            head = text.partition(docstring)[0] + docstring
            result = result.replace(text, f'{head}\n    raise NotImplementedError("write this")')
    return result


def write(name: str, names: list[str]) -> list[int] | None:
    """Have the reader write a function of examples/zero.py. Return None if the reader stops."""
    mine, stage = ROOT / MINE, name.replace("all_gather", "ring")
    if not mine.exists():
        mine.write_text(without_bodies((ROOT / "examples/zero.py").read_text(), names))
    line = mine.read_text().partition(f"\ndef {name}(")[0].count("\n") + 2
    print(f"\nWrite {name} in {MINE}, line {line}. To start over, delete the file.")
    while input("Press Enter when it is written (q: stop) ").strip().lower() != "q":
        command = f"    torchrun --standalone --nproc_per_node 3 {MINE} {stage}"
        status, output = run(command, ROOT, show=lambda *_, **__: None)
        lines = re.findall(rf"^(?:{stage}\b|\w+Error:| *File \S*{MINE}).*", output, re.M)
        print(" ".join(dict.fromkeys(lines)) or output)
        if status == 0:
            print(f"{name} is right")
            return [1]


def games(found: dict[str, list[Block]]) -> dict[str, list[Block]]:
    """Return {game, such as "3", "write ddp_each" or "bug 3": its chapter's blocks}, in order."""
    every = {}
    for heading, blocks in found.items():
        asked = [heading.split(".")[0]] if any(block.questions for block in blocks) else []
        named = [f"{kind} {b.name}" for kind in ("write", "bug") for b in blocks if b.kind == kind]
        every |= dict.fromkeys(asked + named, blocks)
    return every


def choose(words: str, every: dict[str, list[Block]], done: dict[str, list[int]]) -> list[str]:
    """Return the games that `words` mean. For `bug`, it is a bug of a played chapter, if any."""
    if words == "bug":
        hidden = [g for g in every if g.startswith("bug ") and not any(done.get(g, []))]
        played = [every[game] for game in done if game.isdigit() and game in every]
        return sorted(hidden, key=lambda bug: every[bug] not in played)[:1] or ["bug 1"]
    blocks = every.get(words.partition("write ")[2])
    functions = [game for game in every if game.startswith("write") and every[game] is blocks]
    new = [game for game in functions if game not in done]
    return new or functions or [game for game in every if game == words]


def play(game: str, blocks: list[Block]) -> list[int]:
    """Play a chapter's numbers or its bug, in a copy of the project. Return the result."""
    if not (ROOT / "tokens/python").exists():
        run("    python prepare.py --out tokens/python", ROOT, ", once: the data are missing")
    unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "__pycache__", ".*_cache", "*venv")
    with tempfile.TemporaryDirectory(prefix="play-", ignore_cleanup_errors=True) as folder:
        copy = Path(shutil.copytree(ROOT, Path(folder, "nanoshard"), ignore=unwanted))
        shutil.copytree(ROOT / "tokens/python", copy / "tokens/python")
        if game.startswith("bug "):
            return find_bug(*[block for block in blocks if block.name == game[4:]], copy)
        return predict(blocks, copy)


def score(done: dict[str, list[int]]) -> str:
    tallies = [done[game] for game in done if game.isdigit()]
    right, predictions = sum(tally[0] for tally in tallies), sum(map(sum, tallies))
    tries = [done[game][0] for game in done if game.startswith("bug ") and any(done[game])]
    found = f"bugs found: {len(tries)} in {sum(tries)} tries"
    written = sum(game.startswith("write ") for game in done)
    return f"{right} of {predictions} predictions right; {found}; functions written: {written}"


def main(words: str) -> None:
    found = {}
    for part in LECTURE:
        found |= chapters(part.read_text())
    item = r'"(\d+|bug \w+|write \w+)": \[\d+(, \d+)*\]'
    text = (ROOT / SCORE).read_text(errors="replace") if (ROOT / SCORE).exists() else "{}"
    if not re.fullmatch(rf"{{({item}(, {item})*)?}}", text):
        sys.exit(f"docs.play: {SCORE} is damaged or not a score: move it away to start over")
    every, done = games(found), json.loads(text)
    chosen = choose(words, every, done)
    if words and not chosen:
        print(f"docs.play: no game {words}; python -m docs.play lists them", file=sys.stderr)
        sys.exit(2)
    names = [game[6:] for game in every if game.startswith("write ")]
    for game in chosen:
        (ROOT / MINE).parent.mkdir(parents=True, exist_ok=True)
        result = write(game[6:], names) if game[6:] in names else play(game, every[game])
        if not result:
            break
        if not any(done.get(game, [])):  # the first result counts
            done[game] = result
        (ROOT / SCORE).write_text(json.dumps(done))
    if not words:
        print(__doc__)
        for heading, blocks in found.items():
            states = [g + " (done)" * (g in done) for g in every if every[g] is blocks]
            print(f"{heading}: {', '.join(states)}")
    todo = [f"python -m docs.play {game}" for game in every if game not in done]
    print(f"score: {score(done)} ({SCORE}). Next: {(todo or ['nothing, all is done'])[0]}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.stdout.reconfigure(line_buffering=True)
    try:
        main(re.sub("^(-h|--help)$", "", " ".join(sys.argv[1:])))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # the last one: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(f"docs.play: {error}")
