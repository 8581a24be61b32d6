"""Run commands at the same time. Shared by bench, check and compare."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from errors import RunError
from log import read_log

ROOT = Path(__file__).parents[2]
TRAIN = str(ROOT / "train.py")
TRANSFORMERS_TRAINER = str(ROOT / "tools/measuring/transformers_trainer.py")
PRODUCTS = str(ROOT / "tools/measuring/products.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a new folder; remove it at the end of the block, also after Ctrl-C and SIGTERM."""

    def end(number: int, frame) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the removal
        sys.exit(128 + number)  # as a shell reports the signal

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(
    commands: list[list[str]], out: Path, cwd: Path | None = None, **variables: str
) -> list[str]:
    """Run commands as `finish_all` does; return what each printed.

    If a command fails, prints the end of its output and raises RunError.
    """
    finished = finish_all(commands, out, cwd, **variables)
    for command, (status, text) in zip(commands, finished):
        if status:
            print(text[-4000:], file=sys.stderr)
            raise RunError(f"{' '.join(command)} failed")
    return [text for _, text in finished]


def finish_all(
    commands: list[list[str]], out: Path, cwd: Path | None = None, **variables: str
) -> list[tuple[int | None, str]]:
    """Run commands at the same time; return the exit status and the output of each.

    Command i prints to `out`-i.txt. If one fails, or at a signal, the others are terminated, since
    they might wait for it forever. Their status is None.
    """
    files = [out.with_name(f"{out.name}-{number}.txt") for number in range(len(commands))]
    options = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "cwd": cwd}
    options["env"] = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    processes = []
    try:
        for command, file in zip(commands, files):
            with open(file, "w") as output:
                # In a new session, so that Ctrl-C reaches only this process
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
    return [(status, file.read_text(errors="replace")) for status, file in zip(statuses, files)]


def training_rows(out: Path) -> list[dict]:
    return [row for row in read_log(out / "metrics.jsonl") if "loss" in row]
