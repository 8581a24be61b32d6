"""Imports point one way, and no function changes its arguments.

A leaf can be copied into another project as a single file.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

# Each file may import only files of earlier lines of this list.
ORDER = [
    "model data dist optim checkpoint log",  # the leaves
    "errors",
    "extras.tensor_parallel extras.muon extras.mixture extras.chunked_loss extras.async_save",
    "extras.profile",
    "text.sources text.tokenizer_json",
    "text.tokenizer",
    "text.encode",
    "prepare",
    "config",
    "start",
    "sample",
    "train",
    "tools.common",
    "tools.measuring.runs tools.measuring.tables",
    "tools.planning.kernels",
    "tools.planning.rehearse",
    "tools.planning.predict",
    "tools.measuring.parity",
    "tools.measuring.fuzz",
    "tools.check tools.checkpoint tools.compare tools.hf tools.plan tools.replay",
]
LINE = {name: i for i, names in enumerate(ORDER) for name in names.split()}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


PATHS = [*ROOT.glob("*.py"), *ROOT.glob("extras/*.py"), *ROOT.glob("text/*.py")]
PATHS += ROOT.glob("tools/**/*.py")
MODULES = {module_name(path): path for path in PATHS if path.name != "__init__.py"}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """The modules that a file imports, for example {"torch", "errors"}."""
    modules = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            inner = {f"{module}.{alias.name}" for alias in node.names}
            modules |= inner & MODULES.keys() or {module}
    return modules


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_only_earlier_modules(name):
    for module in imported_modules(MODULES[name]) & MODULES.keys():
        assert LINE[module] < LINE[name], f"{name} imports {module}"


@pytest.mark.parametrize("name", ORDER[0].split())
def test_a_leaf_imports_only_torch_numpy_and_the_stdlib(name):
    roots = {module.split(".")[0] for module in imported_modules(MODULES[name])}
    # data.py imports tiktoken when it decodes, and log.py wandb with --tracker wandb
    assert roots <= {"torch", "numpy", "tiktoken", "wandb", *sys.stdlib_module_names}


# What decides how a run starts, and the run: their changes should reach one file of tools/
STARTS = {"config", "start", "train"}


COMMANDS = [name for name in MODULES if re.fullmatch(r"tools\.\w+", name)]


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("tools.")])
def test_no_file_of_tools_imports_a_command(name):
    assert not imported_modules(MODULES[name]) & {*COMMANDS} - {"tools.common"}


def test_no_function_body_of_eight_lines_occurs_twice_in_tools():
    found = {}
    for name in MODULES:
        nodes = ast.walk(parse(MODULES[name])) if name.startswith("tools.") else ()
        for function in [node for node in nodes if isinstance(node, ast.FunctionDef)]:
            body = ast.unparse([part for part in function.body if not is_docstring(part)])
            if body.count("\n") >= 7:
                found.setdefault(body, []).append(f"{name}.{function.name}")
    assert [names for names in found.values() if len(names) > 1] == []


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("tools.")])
def test_one_file_of_tools_knows_how_a_run_starts(name):
    assert name == "tools.common" or not imported_modules(MODULES[name]) & STARTS


def test_errors_and_text_need_no_torch():
    """So a refusal of prepare.py comes at once."""
    code = "import sys, errors, prepare; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    roots = {module.split(".")[0] for module in imported_modules(MODULES["errors"])}
    assert roots <= set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", MODULES)
def test_importing_a_file_does_not_change_the_environment(name):
    for node in parse(MODULES[name]).body:
        is_run = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.If)
        assert is_run or "environ" not in ast.unparse(node)
        assert not isinstance(node, ast.If) or ast.unparse(node.test) == "__name__ == '__main__'"


def test_no_public_name_is_defined_twice_outside_tools():
    seen = {}
    for name, path in MODULES.items():
        for node in parse(path).body:
            is_public = isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
            # Every command has the first three, every file with flags has Settings, and the leaves
            # that ask for this rank's part of a tensor have `local`, since they share no file.
            shared = ("build_parser", "run_command", "main", "Settings", "local")
            if not is_public or node.name in shared:
                continue
            if not name.startswith("tools."):
                assert seen.setdefault(node.name, name) == name


def test_every_init_file_is_empty():
    for path in PATHS:
        assert path.name != "__init__.py" or path.read_text() == ""


# --------------------------------------------------------------------------------------------------
# Who changes what

# Attributes of modules that are settings of the process.
SETTINGS = {
    "os.environ",  # os.environ |= ... updates it in place
    "sys.argv",  # what a script reads as its arguments under runpy
    "torch._dynamo.config.optimize_ddp",  # torch documents no other way to set it
}
# Classes of arguments that a function fills in: it may set the attributes of such an argument, but
# not an attribute of an attribute.
RECORDS = {"State", "Corpus", "Check"}


def changed(tree: ast.AST) -> Iterator[ast.expr]:
    """Each a.b and a[b] that is assigned or deleted, also by setattr(a, b, c) and a.pop(b)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in ("setattr", "delattr"):
                yield ast.Attribute(node.args[0], ast.unparse(node.args[1]), ast.Store())
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "pop":
                yield ast.Subscript(node.func.value, ast.Constant("..."), ast.Del())


def owner(node: ast.expr) -> str:
    """The first name of a chain: a for a.b[0].c, and "" for f().b."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("name", MODULES)
def test_no_code_assigns_an_attribute_of_a_module(name):
    imported = set()
    for node in ast.walk(parse(MODULES[name])):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    attributes = [node for node in changed(parse(MODULES[name])) if isinstance(node, ast.Attribute)]
    assigned = {ast.unparse(node) for node in attributes if owner(node) in imported}
    assert not assigned - SETTINGS


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_unittest(name):
    assert "unittest" not in {module.split(".")[0] for module in imported_modules(MODULES[name])}


def classes_of_arguments(function: ast.FunctionDef) -> dict[str, str]:
    """{argument: its class, or ""}, without self.

    A name that is assigned an attribute of an argument also counts as an argument.
    """
    classes = {}
    for argument in [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]:
        annotation = ast.unparse(argument.annotation or ast.Constant(""))
        classes[argument.arg] = annotation.strip("'").split(".")[-1]
    for name in ("self", "cls"):
        classes.pop(name, None)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets, values = node.targets, [node.value]
            if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                targets, values = targets[0].elts, node.value.elts
            for target, value in zip(targets, values, strict=False):
                is_part = isinstance(value, ast.Attribute) and "[" not in ast.unparse(value)
                if isinstance(target, ast.Name) and is_part and owner(value) in classes:
                    classes.setdefault(target.id, "")
    return classes


@pytest.mark.parametrize("name", MODULES)
def test_no_function_changes_its_arguments(name):
    nodes = ast.walk(parse(MODULES[name]))
    for function in [node for node in nodes if isinstance(node, ast.FunctionDef)]:
        classes = classes_of_arguments(function)
        found = []
        for node in changed(function):
            depth = sum(isinstance(part, ast.Attribute) for part in ast.walk(node))
            is_filled = classes.get(owner(node)) in RECORDS and depth == 1
            if owner(node) in classes and not is_filled:
                found.append(ast.unparse(node))
        assert not found, f"{function.name} changes {found}"


# --------------------------------------------------------------------------------------------------
# Files that are read are never executed

EXECUTES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_no_module_can_execute_the_files_that_it_reads():
    """No module unpickles anything. The packages that read parquet or zstd are not checked."""
    for name, path in MODULES.items():
        assert not imported_modules(path) & EXECUTES, name
        source = path.read_text()
        for call in ("torch.load(", "weights_only", "allow_pickle", " eval(", " exec("):
            assert call not in source, f"{name} has {call}"


# --------------------------------------------------------------------------------------------------
# What the first command imports

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


def test_the_first_command_imports_the_files_of_the_readme_and_no_others(tokens, tmp_path):
    flags = f"--strategy fsdp --max_steps 2 --warmup_steps 1 --data {tokens} --out {tmp_path}/run"
    command = [sys.executable, "-c", IMPORTED, *flags.split()]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(file) for file in printed.splitlines()[-1].split()]
    found = {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}
    readme = (ROOT / "README.md").read_text()
    listed = re.findall(r"\w+\.py", re.search(r"^\| file .*?\n\n", readme, re.M | re.S)[0])
    assert found | {"train.py"} == {*listed}
