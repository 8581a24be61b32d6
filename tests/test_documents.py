"""What documents mention exists, and what they promise about the size of the core holds."""

import ast
import contextlib
import functools
import importlib
import io
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from conftest import NEXT_ISSUES, ROOT
from test_imports import MODULES
from torch.distributed.run import get_args_parser

from config import KINDS

DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")]
DOCUMENTS += sorted(set(ROOT.glob("docs/*.md")) - {ROOT / name for name in NEXT_ISSUES})
CODE = [*MODULES.values()]
COMMANDS = ["train.py", "prepare.py", "sample.py"]
TOOLS = {path.stem for path in ROOT.glob("tools/[a-z]*.py")} - {"common", "rehearse"}
COMMANDS += [f"tools.{name}" for name in sorted(TOOLS)]
# Flags of sbatch, srun, lm_eval, and torchrun of torch 2.13
FLAGS_OF_OTHERS = ["--nodes", "--time", "--signal", "--gpus-per-task", "--requeue"]
FLAGS_OF_OTHERS += ["--cpus-per-task", "--gpus-per-node", "--kill-on-bad-exit"]
FLAGS_OF_OTHERS += ["--model_args", "--tasks", "--shutdown-timeout", "--ntasks-per-node"]
SUFFIXES = ("py", "json", "jsonl", "bin", "pt")
# Names of Hugging Face and of torch
NAMES_OF_OTHERS = {"AutoModelForCausalLM", "AutoTokenizer", "OMP_NUM_THREADS"}
NAMES_OF_OTHERS |= {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
PATCHES = "".join(path.read_text() for path in ROOT.glob("examples/*.patch"))
FORKED = {*re.findall(r"^--- /dev/null\n\+\+\+ b/(.+)", PATCHES, re.M)}  # files that forks add
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")

documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


@functools.cache
def read(path: Path) -> str:
    """A document's text about this project, at this commit.

    Leaves out links to other sites, commands that ran "at commit 0123abc", and planted bugs.
    """
    text = re.sub(r"\[[^\]]*\]\(https?://[^)]*\)|https?://\S+", "", path.read_text())
    text = re.sub(r"^```diff\n.*?^```", "", text, flags=re.M | re.S)
    past = r"^ {4}.*# at commit .*\n|`[^`]*`(?=[^`]{,30} commit [0-9a-f]{7})"
    return re.sub(past, "", text, flags=re.M)


@functools.cache
def inline_code(path: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```|^ {4}[^\n]*", "", read(path), flags=re.M | re.S)
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose)]


@functools.cache
def own_code(path: Path) -> str:
    """The Python code in the document, and the lines that its patches add."""
    text = path.read_text()
    lines = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    for name in re.findall(r"(?:examples/|forking\.md#|\]\(#)([\w-]+)", text):
        for patch in ROOT.glob(f"examples/{name}.patch"):
            lines += re.findall(r"^\+(.*)", patch.read_text(), re.M)
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# Files, functions, fields, links


@documents
def test_files_that_a_document_mentions_exist(path):
    names = re.findall(r"(?<![\w/.*$-])(?:[\w.-]+/)*[\w-]+\.(?:py|sh|patch|md|svg)\b", read(path))
    names += re.findall(r"(?<![\w/.])(?:docs|configs|examples|tests|tools)/[\w./-]*\w", read(path))
    for name in {*names} - FORKED:
        assert any((folder / name).exists() for folder in (ROOT, path.parent, ROOT / "tests")), name


@functools.cache
def definitions(file: Path) -> set[str]:
    """Functions, classes, methods, variables and fields of a file."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


@documents
def test_functions_that_a_document_mentions_exist(path):
    """They are written as optim.py:clip_norm, `optim.clip_norm` or `Optimizer.step`."""
    for file, names in re.findall(r"([\w/]+\.py):([A-Za-z_]\w*(?:\.\w+)*)", read(path)):
        assert {*names.split(".")} <= definitions(ROOT / file), f"{file}:{names}"
    classes = {node for file in CODE for node in definitions(file) if node[0].isupper()}
    for text in inline_code(path):
        parts = text.split(".")
        if not re.fullmatch(r"\w+(\.\w+)+", text) or parts[-1] in SUFFIXES:
            continue
        n = max(n for n in range(len(parts)) if n == 0 or ".".join(parts[:n]) in MODULES)
        if n > 0 or parts[0] in classes:
            files = [MODULES[".".join(parts[:n])]] if n else CODE
            found = set().union(*map(definitions, files))
            assert all(part in found or part in own_code(path) for part in parts[n:]), text


@functools.cache
def words_of_the_code() -> set[str]:
    files = [*CODE, *ROOT.glob("examples/*.py")]
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}


@documents
def test_names_that_a_document_mentions_occur_in_the_code(path):
    """Only names with an underscore or inner capitals. For x_norm or x_min the code may have x."""
    for text in inline_code(path):
        if re.fullmatch(r"[A-Za-z]+_\w+|[A-Z]+[a-z]\w*[A-Z]\w*", text):
            names = {text, text.removesuffix("_norm"), text.removesuffix("_min")}
            known = names & (words_of_the_code() | NAMES_OF_OTHERS)
            assert known or re.search(rf"\b{text}\b", own_code(path)), text


def test_error_lines_that_a_page_explains_are_in_the_code():
    """They are the symptoms in docs/when-it-goes-wrong.md. There ... stands for a value."""
    printed = []
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts = [getattr(part, "value", "") for part in node.values]
                printed.append("".join(t if isinstance(t, str) else "..." for t in texts))
            elif isinstance(node, ast.Constant):
                printed.append(str(node.value))
    page = (ROOT / "docs/when-it-goes-wrong.md").read_text()
    symptoms = re.findall(r"^\| (`[^`]+`(?:(?:,| or) `[^`]+`)*) \| ", page, re.M)
    lines = re.findall("`(.*?)`", " ".join(symptoms))
    assert len(lines) > 20
    for line in lines:
        assert any(line in text for text in printed), line


@documents
def test_links_of_a_document_have_a_target(path):
    for file, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", read(path)):
        target = path.parent / file if file else path
        assert target.exists(), file
        if anchor:
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.M)
            slugs = [re.sub(r"[^\w -]", "", heading.lower()) for heading in headings]
            assert anchor in [slug.replace(" ", "-") for slug in slugs], f"{file}#{anchor}"


# --------------------------------------------------------------------------------------------------
# Commands and flags


@functools.cache
def flags_of(command: str, word: str = "") -> dict[str, list[str]]:
    """Flag -> its choices, if any, from the --help of a command and its first word."""
    out = io.StringIO()
    if command == "torchrun":
        out.write(get_args_parser().format_help())
    else:
        main = importlib.import_module(command.removesuffix(".py")).main
        with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
            main([word, "--help"] if word else ["--help"])
    rows = re.findall(r"^ +(?:-\w+, )?(--.*)", out.getvalue(), re.M)
    flags = {}
    for row in rows:
        for name in FLAG.findall(row.split("  ")[0]):
            flags[name] = re.findall(r"[^{},]+", "".join(re.findall(r"\{.*?\}", row)))
    return flags


def check_flags(words: list[str], flags: dict[str, list[str]], path: Path) -> None:
    """Each flag is in `flags`, and its value is a choice or a placeholder."""
    for word, following in zip(words, [*words[1:], ""]):
        name, _, value = word.partition("=")
        if not FLAG.fullmatch(name) or re.search(rf"\b{name[2:]}\b", own_code(path)):
            continue
        assert name in flags, f"{name} in: {' '.join(words)}"
        value = value or following
        if flags[name] and re.fullmatch(r"[a-z][\w-]*", value):
            known = value in flags[name] or f'"{value}"' in own_code(path)
            assert known, f"{name} {value} in: {' '.join(words)}"


@functools.cache
def names_of_tests() -> str:
    return " ".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))


def check_command(words: list[str], path: Path) -> None:
    """Check a command of this project: under python, under torchrun, or bare."""
    if words[:1] == ["pytest"] and "-k" in words:
        for part in words[words.index("-k") + 1].split(" or "):
            assert re.search(rf"def test_\w*{part}", names_of_tests()), part
    launchers = [i for i, word in enumerate(words) if word in ("python", "torchrun")]
    words = words[launchers[0] :] if launchers else words  # drops OMP_NUM_THREADS=1, do, ...
    start = next((i for i, word in enumerate(words) if re.match(r"tools\.\w|\w+\.py$", word)), None)
    if start is None or words[0] not in ("python", "torchrun", words[start]):
        return
    command, arguments = words[start], words[start + 1 :]
    if len(words) == 1 and command.endswith(".py"):  # a file
        return
    if command in FORKED:
        return
    assert command in COMMANDS, command
    if words[0] == "torchrun":
        check_flags(words[:start], flags_of("torchrun"), path)
    if "--" in arguments:
        end = arguments.index("--")
        check_flags(arguments[end:], flags_of("train.py"), path)
        arguments = arguments[:end]
    is_word = arguments and re.match(r"[a-z]+$", arguments[0])
    check_flags(arguments, flags_of(command, arguments[0] if is_word else ""), path)


def shell_commands(block: str):
    """The commands of a block as words, with the $variables it sets."""
    variables = {}
    for line in block.replace("\\\n", " ").splitlines():
        if assignment := re.fullmatch(r' *(\w+)="(.*)"', line):
            variables[f"${assignment[1]}"] = assignment[2]
            continue
        for name, value in variables.items():
            line = line.replace(name, value)
        for part in re.split(r"&&|\||;", line):
            with contextlib.suppress(ValueError):  # an apostrophe: not a command
                yield shlex.split(part, comments=True)


@documents
def test_commands_of_a_document_have_the_flags_shown(path):
    prose = re.sub(r"^```.*?^```", "", read(path), flags=re.M | re.S)
    for block in re.findall(r"(?:^ {4}.*\n)+", prose, re.M):
        for words in shell_commands(block):
            check_command(words, path)
    for text in inline_code(path):
        for words in shell_commands(text):
            check_command(words, path)


@documents
def test_flags_that_a_document_mentions_exist(path):
    flags = dict.fromkeys(FLAGS_OF_OTHERS, [])
    for command in ("torchrun", *COMMANDS):
        for name, choices in flags_of(command).items():
            flags[name] = [*flags.get(name, []), *choices]
    check_flags(FLAG.findall(read(path)), flags, path)
    for text in inline_code(path):
        if text.startswith("--"):
            check_flags(text.split(), flags, path)


@documents
def test_a_shell_can_read_the_commands_of_a_document(path):
    first = r"python|torchrun|pip|git|for|export|curl|pytest|sbatch|lm_eval|\w+\(\) \{"
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    blocks = re.findall(rf"^ {{4}}(?:{first}) .*\n(?:^ {{4}}.*\n)*", prose, re.M)
    script = textwrap.dedent("".join(blocks))
    for shell in filter(shutil.which, ("bash", "zsh")):
        answer = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True)
        assert (answer.returncode, answer.stderr) == (0, ""), script


# --------------------------------------------------------------------------------------------------
# The size of the core

README = (ROOT / "README.md").read_text()
FILES = re.findall(r"^\| (\w+\.py) \| [\d,]+ \| (.*) \|$", README, re.M)  # and what each does


def test_the_readme_counts_the_lines_of_the_core():
    lines = {name: (ROOT / name).read_text().count("\n") for name, _ in FILES}
    table = "".join(f"| {name} | {lines[name]:,} | {what} |\n" for name, what in FILES)
    total = f"{sum(lines.values()):,} lines of PyTorch"
    assert table in README and total in README, f"README.md needs {total}, and the table\n{table}"
    assert len(lines) == 10 and sum(lines.values()) <= 3400


def test_a_run_has_no_more_flags_than_it_had():
    assert len(KINDS) <= 56


@pytest.mark.parametrize("file, name", [("train.py", "train"), ("optim.py", "step")])
def test_the_functions_that_everybody_reads_fit_on_a_screen(file, name):
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    (found,) = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == name]
    assert found.end_lineno - found.lineno < 60


def test_the_page_counts_the_lines_of_the_forks():
    page = (ROOT / "docs/forking.md").read_text()
    rows = re.findall(r"^\| \[([\w-]+)\]\(#.*\| \+(\d+) -(\d+) \|$", page, re.M)
    patches = sorted(ROOT.glob("examples/*.patch"))
    assert sorted(name for name, _, _ in rows) == [patch.stem for patch in patches]
    for name, added, removed in rows:
        lines = (ROOT / f"examples/{name}.patch").read_text().splitlines()
        for sign, count in (("+", added), ("-", removed)):
            assert sum(line[:1] == sign != line[1:2] for line in lines) == int(count), name
