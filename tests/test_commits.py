"""tools.compare --commits runs the same steps on two commits and compares them."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, TINY, fork_ranks, is_running

from tools import compare
from tools.measuring import commits
from tools.measuring.harness import TORCHRUN

# In place of train.py: writes its log at once, with losses and the norms of two gradients.
TRAIN = """
import json, os, sys, time
from pathlib import Path
import model

flags = dict(word.lstrip("-").split("=") for word in sys.argv[1:])
if unknown := {"z_loss"} & flags.keys() - vars(model).keys():
    sys.exit(f"train.py: error: unrecognized arguments: --{unknown.pop()}")
if "sleep" in flags:
    Path("pid").write_text(str(os.getpid()))
    time.sleep(60)
start = {"step": 0, "event": "start", "config": {"out": flags["out"]}}
metrics, optim = [start], [start]
for step in range(1, int(flags["max_steps"]) + 1):
    row = {"step": step, "loss": float(Path(flags["data"]).read_text()), "tokens": step}
    row |= {"tokens_per_second": 3.0, "step_time": 1.0, "clipped": 0, "skipped_steps": 0}
    metrics.append(row)
    optim.append({"step": step, "parameter": "embed", "grad_norm": 1.0})
    optim.append({"step": step, "parameter": "head", "grad_norm": 1.0 + (step > 1) * model.NORM})
metrics.append({"step": step, "val_loss": model.VAL_LOSS})
sent = [{"kind": "all_reduce", "axis": "dp_shard", "bytes": model.BYTES}]
out = Path(flags["out"])
(out / "profile").mkdir(parents=True)
(out / "profile/rank_0.json").write_text(json.dumps({"communicated": sent}))
for name, rows in (("metrics", metrics), ("optim", optim)):
    (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
"""
MODEL = "NORM = 0.0\nVAL_LOSS = 2.5\nBYTES = 1024\n"
# In place of torchrun: runs the script that follows two options.
RUN = "import runpy, sys; sys.argv = sys.argv[3:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def commit(folder: Path, subject: str, **files: str) -> None:
    """Write some Python files, and commit everything in the repository."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
    for words in (["add", "--all"], [*identity, "commit", "--quiet", "--message", subject]):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A repository with one commit, which tools.compare uses as its project."""
    folder = tmp_path / "project"
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    commit(folder, "first", train=TRAIN, model=MODEL)
    (tmp_path / "tokens").write_text("2.0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(commits, "ROOT", folder)
    monkeypatch.setattr(commits, "TORCHRUN", [sys.executable, "-c", RUN])
    return folder


def call(capsys, words: str, *more: str, status: int = 0) -> list[str]:
    """Run tools.compare with a relative path to the data; return the lines that it prints."""
    assert compare.main([*words.split(), "--", "--data=tokens", *more]) == status
    out, err = capsys.readouterr()
    assert not list(Path().glob("compare-*"))
    return [line for line in (out + err).splitlines() if not line.startswith("running ")]


def test_two_commits_are_compared_bit_for_bit(project, capsys):
    commit(project, "second", model=f"{MODEL}# a comment\n")
    equal, *others = call(capsys, "--commits HEAD~1 HEAD")
    assert equal == "HEAD~1 and HEAD are equal bit for bit: losses and 2 parameters in 20 steps"
    assert others == [
        "the bytes that a step hands to torch are equal; speeds are not compared",
        "HEAD~1: 1,024 bytes of all_reduce over dp_shard; 3 tokens/s",
        "HEAD: 1,024 bytes of all_reduce over dp_shard; 3 tokens/s",
    ]
    # A change of one bit in the working tree
    (project / "model.py").write_text(MODEL.replace("0.0", "2.3e-16").replace("1024", "1000"))
    text = "\n".join(call(capsys, "--commits HEAD .", status=1))
    assert "| - | step 2: head grad_norm by 2e-16 |" in text
    assert "a step hands to torch differ; " in text and ".: 1,000 bytes of all_reduce" in text
    equal, *_ = call(capsys, "--commits HEAD . --tolerance 1e-12", "--max_steps=3")
    assert equal == "HEAD and . are equal within 1e-12: losses and 2 parameters in 3 steps"
    (project / "model.py").write_text(MODEL.replace("2.5", "2.6"))
    text = "\n".join(call(capsys, "--commits HEAD .", status=1))
    assert "| - | step 20: validation loss by 0.04 |" in text and "| - | never: at most " in text


def test_an_error_of_the_command_or_a_commit_is_one_line(project, capsys, monkeypatch):
    commit(project, "broken", model="NORM = (\n")
    for words, line in (
        ("--commits HEAD", "argument --commits: expected 2 arguments"),
        ("--commits HEAD nowhere", "fatal: bad revision 'nowhere'"),
        ("--commits HEAD . runs/a", "give RUN ..., or --commits A B [-- FLAGS]"),
    ):
        (error,) = call(capsys, words, status=2)
        assert error.startswith(f"tools.compare: error: {line}")
    (error,) = call(capsys, "--commits HEAD~1 HEAD", status=1)
    assert error.endswith(" broken does not run: SyntaxError: '(' was never closed")
    # A module that the commit lacks is not taken from this project.
    commit(project, "without", train="import dist")
    (error,) = call(capsys, "--commits HEAD HEAD", status=1)
    assert error.endswith(" without does not run: ModuleNotFoundError: No module named 'dist'")
    monkeypatch.setattr(commits, "TORCHRUN", TORCHRUN)  # torchrun prints its own report
    (error,) = call(capsys, "--commits HEAD~2 .", "--z_loss=1", status=1)
    assert error.endswith(" first does not run: train.py: error: unrecognized arguments: --z_loss")
    monkeypatch.setattr(commits, "ROOT", project.parent)
    (error,) = call(capsys, "--commits HEAD .", status=2)
    assert error.startswith("tools.compare: error: fatal: not a git repository")


@pytest.mark.parametrize("number, is_impatient", [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_signal_leaves_nothing_behind(number, is_impatient, project):
    argv = ["--commits", "HEAD", ".", "--", "--data=tokens", "--sleep=60"]
    (process,) = fork_ranks(1, compare.main, argv)
    started = Path("pid")
    while not (started.exists() and started.read_text()):
        assert process.is_alive()
        time.sleep(0.01)
    assert list(Path().glob("compare-*"))
    os.kill(process.pid, number)
    while is_impatient and list(Path().glob("compare-*")) and process.is_alive():
        os.kill(process.pid, number)
    process.join(20)
    assert is_impatient or process.exitcode == 128 + number
    assert not list(Path().glob("compare-*"))
    assert not is_running(int(started.read_text()))


@pytest.mark.slow(proves="git's commits, trained twice")
def test_real_commits_are_compared(tokens, tmp_path):
    code = tmp_path / "code"
    unwanted = shutil.ignore_patterns(".git", "runs", "tokens", "tests", "docs", "__pycache__")
    shutil.copytree(ROOT, code, ignore=unwanted)
    subprocess.run(["git", "init", "--quiet", code], check=True)
    commit(code, "before")
    optim = (code / "optim.py").read_text()
    commit(code, "constant", optim=optim.replace("beta2=settings.beta2,", "beta2=0.951,"))

    def printed(words: str, more: str = "") -> str:
        command = [sys.executable, "-m", "tools.compare", *words.split()]
        command += ["--", *TINY.split(), "--data", str(tokens), *more.split()]
        job = subprocess.run(command, cwd=code, capture_output=True, text=True, timeout=300)
        return job.stdout + job.stderr

    text = printed("--commits HEAD~1 HEAD", "--strategy fsdp")
    assert "step 1: " in text and " exp_avg_sq_norm by 0.02, and 19 more |" in text
    commit(code, "moved", optim=f"{optim}\n\n# The end\n")
    text = printed("--commits HEAD~2 HEAD", "--strategy fsdp")
    assert "are equal bit for bit: losses and 20 parameters in 20 steps" in text
    assert "HEAD: " in text and " bytes of all_gather over dp_shard" in text
    text = printed("--commits . HEAD --nproc_per_node 1", "--z_loss 1")
    assert "working tree does not run: train.py: error: unrecognized arguments: --z_loss" in text
