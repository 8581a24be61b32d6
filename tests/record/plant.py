"""Plant the faults of faults.json, one at a time, and record which tests find each.

    python tests/record/plant.py [NUMBER ...]      all faults, or those at these places of the list

Each fault replaces a text, which occurs once in its file, in a copy of the working tree. The
tests in TESTS run there to their end, so that `found_by` names every test function that fails, with
the number of its cases. After LIMIT seconds the rest does not run, and `cut` is true.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("faults.json")
LIMIT = 170
NEW = "numbers golden flags rare"
# tests/core/test_X.py for each X, beside those of NEW, and other files. test_mesh.py is left out
# where test_golden.py runs the same meshes, and jobs under torchrun are left out, because 60 faults
# shall not take three hours.
TESTS = {
    "train.py": "start step tests/extras/test_golden.py",
    "model.py": "step tests/test_model.py tests/extras/test_golden.py",
    "optim.py": "step tests/extras/test_golden.py tests/extras/test_muon.py",
    "data.py": "step data",
    "dist.py": "mesh kill tests/extras/test_golden.py",
    "checkpoint.py": "files kill mesh",
    "config.py": "start",
    "start.py": "start files kill",
    "log.py": "mesh tests/test_log.py",
    "extras/async_save.py": "tests/extras/test_async_save.py tests/extras/test_flags.py",
    "extras/muon.py": "tests/extras/test_muon.py tests/extras/test_golden.py",
}


def tests_for(file: str) -> list[str]:
    """The test files that run with a fault in this file."""
    names = f"{NEW} {TESTS[file]}".split()
    return [name if "/" in name else f"tests/core/test_{name}.py" for name in names]


def copy_with(fault: dict, to: Path) -> None:
    """Copy the files that git knows, with the fault."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, to / name)
    text = (to / fault["file"]).read_text()
    assert text.count(fault["line"]) == 1, f"not once in {fault['file']}: {fault['line']}"
    (to / fault["file"]).write_text(text.replace(fault["line"], fault["fault"]))


def failing_tests(folder: Path, tests: list[str]) -> tuple[dict[str, int], bool]:
    """Run the tests; return {test function: cases that failed}, and whether the time was up."""
    command = [sys.executable, "-m", "pytest", "-vv", "-n", "3", "--tb=no", "-k", "not torchrun"]
    with (folder / "printed").open("w") as printed:
        process = subprocess.Popen(
            [*command, *tests], cwd=folder, stdout=printed, stderr=printed, start_new_session=True
        )
        try:
            process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
    text = (folder / "printed").read_text()
    found = Counter(
        re.findall(r"^\[gw\d\] \[ *\d+%\] (?:FAILED|ERROR) (tests/[^\[ ]+)", text, re.M)
    )
    return dict(sorted(found.items())), process.wait() < 0


def main(numbers: list[int]) -> None:
    for number in numbers or range(len(json.loads(FILE.read_text()))):
        fault = json.loads(FILE.read_text())[number]
        with tempfile.TemporaryDirectory(prefix="fault-") as folder:
            copy_with(fault, Path(folder))
            found, cut = failing_tests(Path(folder), tests_for(fault["file"]))
        print(
            f"{number:2} {fault['file']:16} {sum(found.values()):4}  {fault['breaks']}", flush=True
        )
        faults = json.loads(FILE.read_text())  # again: somebody may have added one meanwhile
        faults[number] |= {"found_by": found, "cut": cut}
        FILE.write_text(json.dumps(faults, indent=1) + "\n")


if __name__ == "__main__":
    main([*map(int, sys.argv[1:])])
