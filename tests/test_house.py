"""The leaf rule: each leaf can be lifted into another project by copying one file."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUT_LEAVES_TOGETHER = {"train", "config", "layout", "run_folder", "prepare", "sample"}
LEAVES = sorted({path.stem for path in ROOT.glob("*.py")} - PUT_LEAVES_TOGETHER)
ALLOWED = {"torch", "numpy", "tiktoken", *sys.stdlib_module_names}


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or ""))
    return {module.split(".")[0] for module in modules}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_imports_only_torch_numpy_tiktoken_and_the_standard_library(name):
    assert imported_modules(ROOT / f"{name}.py") <= ALLOWED
