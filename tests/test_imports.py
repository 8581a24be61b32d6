"""Imports point one way, so a file can be read, deleted or copied without those above it."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

LEAVES = ["model", "dist", "optim", "checkpoint", "data"]  # each can be copied alone
CORE = [*LEAVES, "errors", "log", "config", "start", "train"]  # a file imports only earlier ones
HELPERS = ["tools.common", "tools.rehearse"]  # of several commands


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


PATHS = [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")]
PATHS += ROOT.glob("tools/**/*.py")
MODULES = {module_name(path): path for path in PATHS if path.name != "__init__.py"}
EXTRAS = [name for name in MODULES if name.startswith("extras.")]
TOOLS = [name for name in MODULES if name.startswith("tools.")]
COMMANDS = [name for name in TOOLS if name not in HELPERS]


@functools.cache
def imports(name: str, also_in_functions: bool = True) -> set[str]:
    """The modules that a file imports, for example {"torch", "errors", "tools.common"}."""
    found = set()
    nodes = [ast.parse(MODULES[name].read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES.keys() or {node.module}
        elif also_in_functions or not isinstance(node, ast.FunctionDef):
            nodes += ast.iter_child_nodes(node)
    return found


def roots(modules: set[str]) -> set[str]:
    return {module.split(".")[0] for module in modules}


@pytest.mark.parametrize("name", CORE)
def test_a_core_file_imports_earlier_core_files_torch_numpy_and_the_standard_library(name):
    earlier = {*CORE[: CORE.index(name)]} if name not in LEAVES else set()
    found = roots(imports(name, also_in_functions=False))
    assert found <= {*earlier, "torch", "numpy", *sys.stdlib_module_names}


# What a core file imports only in a function that needs it
LATER = {"log": {"wandb"}, "start": {"prepare"}, "train": {"tokenizer"}}


@pytest.mark.parametrize("name", CORE)
def test_a_core_file_imports_little_later(name):
    later = imports(name) - imports(name, also_in_functions=False)
    others = {module for module in later if module.split(".")[0] not in ("torch", *CORE)}
    assert others - sys.stdlib_module_names <= LATER.get(name, set())


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_imports_only_the_core_and_is_imported_in_one_place(name):
    assert imports(name) & MODULES.keys() <= {*CORE}
    _, _, file = name.partition(".")
    places = []
    for core in CORE:
        assert name not in imports(core)
        places += [core] * MODULES[core].read_text().count(f'import_extra("{file}"')
    assert places == ["start" if file == "mixture" else "train"]


@pytest.mark.parametrize("name", ["prepare", "tokenizer", "sample"])
def test_text_and_generation_import_no_tool_and_no_extra(name):
    allowed = {"errors", "tokenizer"} if name != "sample" else {*CORE, "tokenizer"}
    assert imports(name) & MODULES.keys() <= allowed


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_imports_no_other_command(name):
    allowed = {*CORE, *EXTRAS, *HELPERS, "prepare", "tokenizer", "sample"}
    assert imports(name) & MODULES.keys() <= allowed


def test_prepare_needs_no_torch():
    """So it starts at once."""
    code = "import sys, errors, prepare; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


EXECUTES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = ("torch.load(", "weights_only", "allow_pickle", " eval(", " exec(")


@pytest.mark.parametrize("name", MODULES)
def test_no_file_can_execute_what_it_reads(name):
    """No file unpickles anything. The packages that read parquet or zstd are not checked."""
    assert not roots(imports(name)) & EXECUTES
    source = MODULES[name].read_text()
    assert [call for call in CALLS if call in source] == []


IMPORTED = """
import runpy, sys
sys.path.insert(0, ".")
sys.argv = ["train.py", *sys.argv[1:]]
try:
    runpy.run_path("train.py", run_name="__main__")
except SystemExit as end:
    assert not end.code
print(*(module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)))
"""


def test_a_run_imports_the_files_of_the_readme_and_no_others(tokens, tmp_path):
    """The sample at its end also needs tokenizer.py, to decode its tokens."""
    flags = f"--strategy fsdp --max_steps 2 --warmup_steps 1 --sample_tokens 0 --data {tokens}"
    command = [sys.executable, "-c", IMPORTED, *flags.split(), "--out", tmp_path / "run"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(file) for file in printed.splitlines()[-1].split()]
    found = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
    readme = (ROOT / "README.md").read_text()
    listed = re.findall(r"\w+\.py", re.search(r"^\| file .*?\n\n", readme, re.M | re.S)[0])
    assert found | {"train.py"} == {*listed} == {f"{name}.py" for name in CORE}
