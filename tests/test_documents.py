"""What a reader relies on: commands, flags, names and links exist, outputs and sizes are true.

Each test collects what is wrong in all documents, so its message is a list.
"""

import ast
import functools
import importlib
import re
import subprocess
from pathlib import Path

import pytest
from rig import ROOT, run_command
from test_imports import CORE, MODULES
from torch.distributed.run import get_args_parser

from config import KINDS

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")]
DOCUMENTS += sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
PATCHES = {path.stem: path.read_text() for path in sorted(ROOT.glob("examples/*.patch"))}
COMMANDS = ["train.py", "prepare.py", "sample.py"]
COMMANDS += [name for name in MODULES if re.fullmatch("tools.(?!common|rehearse).*", name)]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Flags of sbatch, srun, lm_eval and pytest-xdist, and torchrun's since torch 2.13
FLAGS_OF_OTHERS = """--nodes --time --signal --gpus-per-task --requeue --cpus-per-task --dist
    --gpus-per-node --kill-on-bad-exit --model_args --tasks --shutdown-timeout --ntasks-per-node"""


@functools.cache
def read(path: Path) -> str:
    """A document about this commit: without links to other sites and commands of other commits."""
    text = re.sub(r"\]\(https?://[^)]*\)|https?://\S+", "]", path.read_text())
    past = r"^ {4}.*# at commit .*\n|`[^`]*`(?=[^`]{,30} commit [0-9a-f]{7})"
    return re.sub(past, "", text, flags=re.M)


def inline_code(path: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```|^ {4}[^\n]*", "", read(path), flags=re.M | re.S)
    return {" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose)}


@functools.cache
def own_code(path: Path) -> str:
    """The code that a document shows, and what the patches that it names add."""
    text = path.read_text()
    lines = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    for name, patch in PATCHES.items():
        lines += re.findall(r"^\+.*", patch, re.M) if name in text else []
    return "\n".join(lines)


def anchors(path: Path) -> set[str]:
    """The sections of a document, as links name them."""
    headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_and_sections_that_documents_name_exist():
    missing = []
    for path in DOCUMENTS:
        names = re.findall(
            r"(?<![\w/.*$-])(?:[\w.-]+/)*[\w-]+\.(?:py|sh|patch|md|svg)\b", read(path)
        )
        added = re.findall(r"^\+\+\+ b/(\S+)", own_code(path), re.M)
        folders = (ROOT, path.parent, ROOT / "tests")
        for name in {*names} - {*added}:
            if not any((folder / name).exists() for folder in folders):
                missing.append((path.name, name))
        for file, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", read(path)):
            target = path.parent / file if file else path
            if not target.exists() or (anchor and anchor not in anchors(target)):
                missing.append((path.name, f"{file}#{anchor}"))
    assert not missing


def test_names_in_documents_are_in_their_modules():
    """For example `optim.CLIPS` and `dist.py:dp_rank`."""
    unknown = []
    for path in DOCUMENTS:
        for module, name in re.findall(rf"`({'|'.join(CORE)})(?:\.py:|\.)(\w+)", read(path)):
            is_file = name in ("py", "bin", "jsonl")
            if not is_file and not re.search(rf"\b{name}\b", MODULES[module].read_text()):
                unknown.append((path.name, f"{module}.{name}"))
    assert not unknown


def test_error_lines_that_are_explained_are_in_the_code():
    """They are the symptoms of "When it goes wrong". There ... stands for a value."""
    code = "".join(path.read_text() for path in MODULES.values())
    code = re.sub(r'"\n\s*f?"', "", code)  # joins the parts of a text
    code = re.sub(r"\{[^{}\n]*\}", "...", code)
    _, _, page = (ROOT / "docs/reference.md").read_text().partition("# When it goes wrong\n")
    symptoms = " ".join(re.findall(r"^\| (`[^`]+`(?:(?:,| or) `[^`]+`)*) \| ", page, re.M))
    lines = re.findall("`(.*?)`", symptoms)
    assert lines and not [line for line in lines if line not in code]


# --------------------------------------------------------------------------------------------------
# Commands and flags


@functools.cache
def flags_of(command: str) -> dict[str, list[str]]:
    """Flag -> its choices, if any, from a command's --help."""
    if command == "torchrun":
        help = get_args_parser().format_help()
    else:
        main = importlib.import_module(command.removesuffix(".py")).main
        _, help, _ = run_command(["--help"], main)
    rows = re.findall(r"^ +(?:-\w+, )?(--.*)", help, re.M)
    parts = [(FLAG.findall(row.split("  ")[0]), re.search(r"\{(.*?)\}", row)) for row in rows]
    return {name: match[1].split(",") if match else [] for names, match in parts for name in names}


def test_flags_in_documents_are_those_of_their_commands():
    every = dict.fromkeys(FLAGS_OF_OTHERS.split(), [])
    for command in [*COMMANDS, "torchrun", "train.py"]:  # the choices of train.py count last
        every |= flags_of(command)
    wrong = []
    for path in DOCUMENTS:
        text = read(path).replace("\\\n", " ")
        code = own_code(path)
        new = {flag for flag in FLAG.findall(text) if re.search(rf"\b{flag[2:]}\b", code)}
        wrong += [(path.name, name) for name in {*FLAG.findall(text)} - new - every.keys()]
        tools = {*re.findall(r"\btools\.\w+", text)}
        wrong += [(path.name, name) for name in tools - MODULES.keys()]
        uses = [(every, words) for words in inline_code(path) if words.startswith("--")]
        for command, words in re.findall(r"([\w/]+\.py|tools\.\w+)((?: +[^\s`|;&#]+)+)", text):
            if command in COMMANDS:
                uses.append((flags_of(command), words))
        for flags, words in uses:
            for name, value in re.findall(rf"({FLAG.pattern})[ =]?([a-z]\w*(?![\w/.:-]))?", words):
                choices = flags.get(name)  # None: not a flag of this command
                is_value = not choices or value in ("", *choices) or f'"{value}"' in code
                if name not in new and (choices is None or not is_value):
                    wrong.append((path.name, words))
    assert not wrong


EXACT = re.compile(r"<!-- run exact -->\n((?: {4}.*\n)+)\n```\n((?:.*\n)*?)```")


MORE = pytest.mark.slow(proves="the outputs that the other pages show digit by digit")
README, *PAGES = DOCUMENTS


@pytest.mark.parametrize("path", [README, *(pytest.param(page, marks=MORE) for page in PAGES)])
def test_a_command_prints_exactly_what_a_document_shows(path):
    text = path.read_text()
    assert text.count("<!-- run") == len(EXACT.findall(text))
    for command, shown in EXACT.findall(text):
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert (done.stdout, done.returncode) == (shown, 0), done.stderr


# --------------------------------------------------------------------------------------------------
# Sizes


def test_the_readme_counts_the_lines_of_the_core():
    readme = (ROOT / "README.md").read_text()
    lines = {f"{name}.py": MODULES[name].read_text().count("\n") for name in CORE}
    rows = re.findall(r"^\| `?(\w+\.py)`? \| ([\d,]+) \|", readme, re.M)
    assert {name: int(count.replace(",", "")) for name, count in rows} == lines
    total = sum(lines.values())
    assert f"{total:,} lines" in readme and total <= 3400


def test_a_run_has_at_most_50_flags_and_two_functions_fit_on_a_screen():
    assert len(KINDS) <= 50
    for module, name in (("train", "train"), ("optim", "step")):
        nodes = ast.walk(ast.parse(MODULES[module].read_text()))
        (found,) = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name]
        assert found.end_lineno - found.lineno < 60
