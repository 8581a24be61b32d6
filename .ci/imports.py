"""Which files of this project does a command import?

python .ci/imports.py 2 --strategy fsdp

Runs train.py with these flags on two ranks for two steps, on tokens of its own, and prints the
files that rank 0 has imported, one in a line.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from core.conftest import write_tokens  # noqa: E402


def run_rank(argv: list[str]) -> None:
    """Run train.py on this rank; on rank 0, write the files to the first argument."""
    found, *sys.argv[1:] = argv
    sys.path.insert(0, str(ROOT))
    sys.argv[0] = "train.py"
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as end:
        status = end.code
    if os.environ["RANK"] == "0" and not status:
        files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        ours = {Path(file) for file in files if file and Path(file).is_relative_to(ROOT)}
        ours = {file.relative_to(ROOT) for file in ours if file.name != "__init__.py"}
        names = {str(file) for file in ours if file.parts[0] not in (".ci", "tests")} | {"train.py"}
        Path(found).write_text("\n".join(sorted(names)) + "\n")
    sys.exit(status)


def main(ranks: str, *argv: str) -> int:
    with tempfile.TemporaryDirectory(prefix="imports-") as folder:
        write_tokens(Path(folder) / "tokens")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", ranks, __file__, f"{folder}/found"]
        command += ["--data", f"{folder}/tokens", "--out", f"{folder}/run"]
        command += ["--max_steps", "2", "--warmup_steps", "1", *argv]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL)
        if run.returncode == 0:
            print(Path(folder, "found").read_text(), end="")
        return run.returncode


if __name__ == "__main__":
    if "RANK" in os.environ:
        run_rank(sys.argv[1:])
    sys.exit(main(*sys.argv[1:]))
