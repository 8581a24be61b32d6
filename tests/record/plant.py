"""Plant the faults of faults.json, one at a time, and record the first test that finds each.

    python tests/record/plant.py [NUMBER ...]      all faults, or those at these places of the list

Each fault replaces a text, which occurs once in its file, in a copy of the working tree, where the
tests of that file run until one fails.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("faults.json")
# tests/core/test_X.py for each X, and other files, the likeliest first
TESTS = {
    "train.py": "numbers golden step mesh start flags kill files",
    "model.py": "numbers golden step mesh flags tests/test_model.py tests/test_launch.py",
    "optim.py": "step numbers golden mesh rare flags tests/extras/test_muon.py",
    "data.py": "step data golden numbers start flags",
    "dist.py": "mesh golden numbers kill start flags files tests/test_launch.py",
    "checkpoint.py": "files mesh kill start rare tests/test_checkpoint.py",
    "config.py": "start flags numbers golden tests/test_launch.py",
    "start.py": "start files kill flags data tests/test_launch.py",
    "log.py": "mesh flags start kill step wandb tests/test_log.py",
    "extras/async_save.py": "tests/extras/test_async_save.py tests/test_checkpoint.py",
    "extras/muon.py": "tests/extras/test_muon.py tests/extras/test_golden.py",
}


def copy_with(fault: dict, to: Path) -> None:
    """Copy the files that git knows, with the fault."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    text = (to / fault["file"]).read_text()
    assert text.count(fault["line"]) == 1, f"not once in {fault['file']}: {fault['line']}"
    (to / fault["file"]).write_text(text.replace(fault["line"], fault["fault"]))


def first_failure(fault: dict) -> str | None:
    names = TESTS[fault["file"]].split()
    paths = [name if "/" in name else f"tests/core/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-x", "-vv", "-n", "2", "--tb=no", *paths]
    with tempfile.TemporaryDirectory(prefix="fault-") as folder:
        copy_with(fault, Path(folder))
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    failed = re.findall(r"(?:FAILED|ERROR) (tests/[^\[\s]+)", done.stdout)
    return failed[0] if failed else None


def main(numbers: list[int]) -> None:
    faults = json.loads(FILE.read_text())
    for number in numbers or range(len(faults)):
        fault = faults[number]
        fault["found_by"] = first_failure(fault)
        print(f"{number:2} {fault['file']:16} {fault['found_by']}  {fault['breaks']}", flush=True)
        FILE.write_text(json.dumps(faults, indent=1) + "\n")


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])])
