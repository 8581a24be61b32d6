"""Shared by bench and check: commands that run at the same time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import metrics
from runtime.cli import RunError

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
PRODUCTS = str(ROOT / "tools/measuring/products.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def run_all(
    commands: list[list[str]], out: Path, cwd: Path | None = None, **variables: str
) -> list[str]:
    """Run commands at the same time; return what each printed. Number i prints to `out`-i.txt.

    If one fails, or at a signal, the others are terminated: they might wait for it forever. Prints
    the end of what a failed one printed, and raises RunError.
    """
    files = [out.with_name(f"{out.name}-{number}.txt") for number in range(len(commands))]
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": cwd}
    options["env"] = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    processes = []
    try:
        for command, file in zip(commands, files):
            with open(file, "w") as output:
                # In a session of its own: Ctrl-C reaches only this process
                process = subprocess.Popen(
                    command, stdout=output, start_new_session=True, **options
                )
            processes.append(process)
        while None in (statuses := [process.poll() for process in processes]):
            if any(statuses):
                break
            time.sleep(0.01)
    finally:
        for process in processes:
            process.terminate()  # not kill: torchrun has to end its ranks
        for process in processes:
            process.wait()
    printed = [file.read_text(errors="replace") for file in files]
    for command, status, text in zip(commands, statuses, printed):
        if status:
            print(text[-4000:], file=sys.stderr)
            raise RunError(f"{' '.join(command)} failed")
    return printed


def training_rows(out: Path) -> list[dict]:
    return [row for row in metrics.read_log(out / "metrics.jsonl") if "loss" in row]
