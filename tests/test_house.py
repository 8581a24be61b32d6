"""The ground-floor rule: each of the five files can be lifted into another project by copying it."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", ["model", "data", "tokenizer", "dist", "optim", "checkpoint"])
def test_ground_floor_files_import_only_torch_numpy_tiktoken_and_the_standard_library(name):
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    foreign = {
        module
        for module in imported
        if module.split(".")[0] not in {"torch", "numpy", "tiktoken", *sys.stdlib_module_names}
    }
    assert not foreign
