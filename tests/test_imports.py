"""Imports point one way, so a file can be read, deleted or copied without those above it."""

import ast
import functools
import re
import subprocess
import sys

from rig import ROOT

LEAVES = ["model", "dist", "optim", "checkpoint", "data"]  # each can be copied alone
CORE = [*LEAVES, "errors", "log", "config", "start", "train"]  # a file imports only earlier ones
TEXT = ["prepare", "tokenizer", "sample"]
HELPERS = ["tools.common", "tools.rehearse"]  # of several commands
# What a core file imports only in a function that needs it
LATER = {"log": {"wandb"}, "start": {"prepare"}, "train": {"tokenizer"}}

PATHS = [*ROOT.glob("*.py"), *ROOT.glob("extras/[a-z]*.py"), *ROOT.glob("tools/[a-z]*.py")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in PATHS}
EXTRAS = [name for name in MODULES if name.startswith("extras.")]


def imports(node: ast.AST, in_functions: bool) -> set[str]:
    """The modules that a file imports, for example {"torch", "errors", "tools.common"}."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        full = {f"{node.module}.{alias.name}" for alias in node.names}
        return full & MODULES.keys() or {node.module}
    if isinstance(node, ast.FunctionDef) and not in_functions:
        return set()
    return set().union(*(imports(child, in_functions) for child in ast.iter_child_nodes(node)))


@functools.cache
def imported(name: str, in_functions: bool = True) -> set[str]:
    return imports(ast.parse(MODULES[name].read_text()), in_functions)


def allowed(name: str) -> set[str]:
    """Our modules that a module may import, in functions too."""
    if name in CORE:
        return {*CORE} | LATER.get(name, set())
    if name in EXTRAS:
        return {*CORE}
    if name in TEXT:
        return {*CORE, "tokenizer"} if name == "sample" else {"errors", "tokenizer"}
    return {*CORE, *TEXT, *EXTRAS, *HELPERS}  # a tool, which imports no other command


def roots(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_a_file_imports_no_file_above_it_and_unpickles_nothing():
    packages = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    calls = ("torch.load(", "weights_only", "allow_pickle", " eval(", " exec(")
    for name, path in MODULES.items():
        assert imported(name) & MODULES.keys() <= allowed(name), name
        assert not roots(imported(name)) & packages, name
        assert not [call for call in calls if call in path.read_text()], name


def test_a_core_file_needs_only_earlier_ones_torch_numpy_and_the_standard_library():
    packages = {"torch", "numpy", *sys.stdlib_module_names}
    for name in CORE:
        earlier = set() if name in LEAVES else {*CORE[: CORE.index(name)]}
        assert roots(imported(name, in_functions=False)) <= earlier | packages, name
        assert roots(imported(name)) <= {*CORE} | packages | LATER.get(name, set()), name


def test_an_extra_is_imported_in_one_place():
    for extra in EXTRAS:
        file = extra.removeprefix("extras.")
        users = [name for name in CORE if f'import_extra("{file}"' in MODULES[name].read_text()]
        assert users == ["start" if file == "mixture" else "train"], extra


def test_prepare_starts_at_once_because_it_needs_no_torch():
    for name in ("prepare", "tokenizer", "errors"):
        assert "torch" not in roots(imported(name)), name


RUN = """
import sys, train
assert train.main(sys.argv[1:]) == 0
print(*(getattr(module, "__file__", None) for module in sys.modules.values()))
"""


def test_a_run_imports_the_ten_core_files_and_no_others(tokens, tmp_path):
    """The sample at its end also needs tokenizer.py, to decode its tokens."""
    flags = f"--strategy fsdp --max_steps 1 --warmup_steps 0 --sample_tokens 0 --data {tokens}"
    flags += f" --out {tmp_path}/run --n_layer 1 --d_model 16 --n_head 1 --n_kv_head 1"
    command = [sys.executable, "-c", RUN, *flags.split()]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours = re.findall(rf"{ROOT}/(\w\S*)", printed.splitlines()[-1])
    assert sorted(ours) == sorted(f"{name}.py" for name in CORE)
