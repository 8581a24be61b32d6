"""Run the same steps of train.py on commits of this project."""

import re
import shutil
import subprocess
from pathlib import Path

from errors import RunError, UsageError
from tools.measuring.harness import ROOT, TORCHRUN, finish_all

WORKING_TREE = "."
# Flags of each run. The user's flags come between the two, so they override only SHORT. On CPUs,
# equal code computes equal bits. The warm-up is short, so that steps after it are also compared.
SHORT = "--device=cpu --max_steps=20 --warmup_steps=5 --eval_sequences=64 --profile=2:3"
LOGGED = "--log_interval=1 --optim_metrics_interval=1 --sample_tokens=0 --checkpoint=none"
LOGGED += " --tracker=none"


def git(*words: str) -> str:
    """Return what git prints about this project. Raises UsageError with git's own error."""
    answer = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    if answer.returncode:
        raise UsageError(answer.stderr.partition("\n")[0])
    return answer.stdout.strip()


def describe(commit: str) -> str:
    """Return a commit's short hash and subject. Raises UsageError if there is no such commit."""
    if commit == WORKING_TREE:
        return "the working tree"
    return git("log", "-1", "--format=%h %s", commit, "--")


def write_files(commit: str, folder: Path) -> Path:
    """Write the files of a commit into a new folder; return it, or ROOT for the working tree.

    A git worktree would be recorded in the repository and remain there after a kill -9.
    """
    if commit == WORKING_TREE:
        return ROOT
    git("archive", f"--output={folder}.tar", commit)
    shutil.unpack_archive(f"{folder}.tar", folder)
    return folder


def run_steps(commit: str, nproc: int, flags: list[str], folder: Path) -> Path:
    """Run train.py of a commit on `nproc` ranks; return its run folder, which is in `folder`.

    It runs in the current folder, so that relative paths in `flags` lead to the same files for all
    commits, and the first run prepares the built-in data for all. Raises RunError if it fails.
    """
    folder.mkdir()
    code = write_files(commit, folder / "code")
    out = folder / "run"
    launcher = [*TORCHRUN, "--standalone", f"--nproc_per_node={nproc}", str(code / "train.py")]
    # A module that the commit lacks must not be imported from this project.
    variables = {"PYTHONPATH": str(code), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [*launcher, *SHORT.split(), *flags, *LOGGED.split(), f"--out={out}"]
    [(status, printed)] = finish_all([command], out, **variables)
    if status:
        raise RunError(f"{describe(commit)} does not run: {last_line(printed)}")
    return out


def last_line(printed: str) -> str:
    """Return the last line that the ranks printed, before torchrun's report."""
    of_ranks = re.split(r"^[EW]\d{4} \d\d:\d\d", printed, maxsplit=1, flags=re.MULTILINE)[0]
    lines = of_ranks.strip().splitlines() or ["it printed nothing"]
    return lines[-1]
