"""What a reader relies on: commands, flags, names and links exist, outputs and sizes are true."""

import ast
import contextlib
import functools
import importlib
import io
import re
import subprocess
from pathlib import Path

import pytest
from conftest import NEXT_ISSUES
from rig import ROOT
from test_imports import CORE, MODULES
from torch.distributed.run import get_args_parser

from config import KINDS

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")]
DOCUMENTS += sorted({*ROOT.glob("docs/*.md")} - {ROOT / name for name in NEXT_ISSUES})
PATCHES = {path.stem: path.read_text() for path in sorted(ROOT.glob("examples/*.patch"))}
SUFFIXES = {"py", "json", "jsonl", "bin", "pt"}
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
# Flags of sbatch, srun and lm_eval, and torchrun's since torch 2.13
FLAGS_OF_OTHERS = """--nodes --time --signal --gpus-per-task --requeue --cpus-per-task
    --gpus-per-node --kill-on-bad-exit --model_args --tasks --shutdown-timeout --ntasks-per-node"""
NAMES_OF_OTHERS = "AutoModelForCausalLM AutoTokenizer OMP_NUM_THREADS GLOO_SOCKET_IFNAME"
NAMES_OF_OTHERS += " NCCL_SOCKET_IFNAME"

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


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


@documents
def test_files_and_sections_that_a_document_names_exist(path):
    names = re.findall(r"(?<![\w/.*$-])(?:[\w.-]+/)*[\w-]+\.(?:py|sh|patch|md|svg)\b", read(path))
    added = re.findall(r"^\+\+\+ b/(\S+)", own_code(path), re.M)
    for name in {*names} - {*added}:
        assert any((folder / name).exists() for folder in (ROOT, path.parent, ROOT / "tests")), name
    for file, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", read(path)):
        target = path.parent / file if file else path
        assert target.exists(), file
        if anchor:
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
            assert anchor in [slug.replace(" ", "-") for slug in slugs], f"{file}#{anchor}"


@functools.cache
def words_of(module: str) -> set[str]:
    """The names in the code of a module; in that of all modules and examples if it is not ours."""
    every = [*MODULES.values(), *ROOT.glob("examples/*.py")]
    paths = [MODULES[module]] if module in MODULES else every
    return {word for path in paths for word in re.findall(r"\w+", path.read_text())}


@documents
def test_names_in_a_document_are_in_the_code(path):
    """Names with a dot, an underscore or inner capitals: `optim.clip_norm`, `seq_len`."""
    others = {*NAMES_OF_OTHERS.split(), *re.findall(r"\w+", own_code(path))}
    for text in inline_code(path):
        text = text.replace(".py:", ".")
        first, *names = text.split(".")
        if re.fullmatch(rf"({'|'.join(CORE)}|[A-Z]\w*)(\.\w+)+", text):
            assert {*names} - SUFFIXES <= words_of(first) | others, text
        elif re.fullmatch(r"[A-Za-z]+_\w+|[A-Z]+[a-z]\w*[A-Z]\w*", text):
            stems = {text, text.removesuffix("_norm"), text.removesuffix("_min")}
            assert stems & (words_of("") | others), text


def test_error_lines_that_a_page_explains_are_in_the_code():
    """They are the symptoms in docs/when-it-goes-wrong.md. There ... stands for a value."""
    code = "".join(path.read_text() for path in MODULES.values())
    code = re.sub(r'"\n\s*f?"', "", code)  # joins the parts of a text
    code = re.sub(r"\{[^{}\n]*\}", "...", code)
    page = (ROOT / "docs/when-it-goes-wrong.md").read_text()
    symptoms = " ".join(re.findall(r"^\| (`[^`]+`(?:(?:,| or) `[^`]+`)*) \| ", page, re.M))
    lines = re.findall("`(.*?)`", symptoms)
    assert len(lines) > 20
    assert not [line for line in lines if line not in code]


# --------------------------------------------------------------------------------------------------
# Commands and flags

COMMANDS = ["train.py", "prepare.py", "sample.py", "torchrun"]
COMMANDS += [name for name in MODULES if re.fullmatch("tools.(?!common|rehearse).*", name)]


@functools.cache
def flags_of(command: str) -> dict[str, list[str]]:
    """Flag -> its choices, if any, from a command's --help."""
    out = io.StringIO()
    if command == "torchrun":
        out.write(get_args_parser().format_help())
    else:
        main = importlib.import_module(command.removesuffix(".py")).main
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
            main(["--help"])
    rows = re.findall(r"^ +(?:-\w+, )?(--.*)", out.getvalue(), re.M)
    parts = [(FLAG.findall(row.split("  ")[0]), re.search(r"\{(.*?)\}", row)) for row in rows]
    return {name: match[1].split(",") if match else [] for names, match in parts for name in names}


@documents
def test_flags_in_a_document_are_those_of_its_commands(path):
    every = {name: choices for each in COMMANDS for name, choices in flags_of(each).items()}
    every |= flags_of("train.py") | dict.fromkeys(FLAGS_OF_OTHERS.split(), [])
    text = read(path).replace("\\\n", " ")
    assert {*re.findall(r"\btools\.\w+", text)} <= MODULES.keys()
    new = {flag for flag in FLAG.findall(text) if re.search(rf"\b{flag[2:]}\b", own_code(path))}
    assert {*FLAG.findall(text)} - new <= every.keys()
    uses = [(every, code) for code in inline_code(path) if code.startswith("--")]
    for command, words in re.findall(r"([\w/]+\.py|tools\.\w+)((?: +[^\s`|;&#]+)+)", text):
        if command in COMMANDS:
            uses.append((flags_of(command), words))
    for flags, words in uses:
        for name, value in re.findall(rf"({FLAG.pattern})[ =]?([a-z]\w*(?![\w/.:-]))?", words):
            if name not in new:
                known = f'"{value}"' in own_code(path) or value in ("", *flags[name])
                assert known or not flags[name], f"{name} {value} in: {words}"


EXACT = re.compile(r"<!-- run exact -->\n((?: {4}.*\n)+)\n```\n((?:.*\n)*?)```")


@pytest.mark.slow(proves="the outputs that a page shows digit by digit")
@documents
def test_a_command_prints_exactly_what_a_document_shows(path):
    for command, shown in EXACT.findall(path.read_text()):
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert (done.stdout, done.returncode) == (shown, 0), done.stderr
    assert path.read_text().count("<!-- run") == len(EXACT.findall(path.read_text()))


# --------------------------------------------------------------------------------------------------
# Sizes


def test_the_readme_counts_the_lines_of_the_core():
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (\w+\.py) \| ([\d,]+) \| .* \|$", readme, re.M)
    lines = {name: f"{(ROOT / name).read_text().count(chr(10)):,}" for name, _ in rows}
    assert dict(rows) == lines and len(rows) == len(CORE) == 10
    total = sum(int(count.replace(",", "")) for count in lines.values())
    assert f"{total:,} lines of PyTorch" in readme and total <= 3400


def test_a_run_has_at_most_50_flags_and_two_functions_fit_on_a_screen():
    assert len(KINDS) <= 50
    for module, name in (("train", "train"), ("optim", "step")):
        nodes = ast.walk(ast.parse(MODULES[module].read_text()))
        (found,) = [n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name]
        assert found.end_lineno - found.lineno < 60


def test_the_page_counts_the_lines_of_the_forks():
    page = (ROOT / "docs/forking.md").read_text()
    rows = re.findall(r"^\| \[([\w-]+)\]\(#.*\| \+(\d+) -(\d+) \|$", page, re.M)
    counts = []
    for name, patch in PATCHES.items():
        changed = [line[0] for line in patch.splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
        counts.append((name, str(changed.count("+")), str(changed.count("-"))))
    assert sorted(rows) == counts
