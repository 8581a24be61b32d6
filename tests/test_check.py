"""tools/check.py: one line for each check, the whole as JSON, and failures that stop nothing."""

import json
import os
import tempfile
from pathlib import Path

import pytest

from tools import bench, check


@pytest.fixture
def checked(monkeypatch, tmp_path, capsys):
    """checked("--ranks 2 ..."): exit status, lines, and the results by name."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    file = tmp_path / "check.json"

    def call(arguments: str) -> tuple[int, list[str], dict]:
        argv = ["--device", "cpu", "--json", str(file), *arguments.split()]
        status = check.main(argv)
        answer = capsys.readouterr()
        assert not answer.err
        return status, answer.out.splitlines(), json.loads(file.read_text())

    return call


def by_name(found: dict) -> dict[str, dict]:
    return {result["name"]: result for result in found["checks"]}


def test_the_file_says_what_was_run_where(checked, tmp_path):
    status, lines, found = checked("devices cpu")
    assert status == 0
    assert not list((tmp_path / "work").iterdir())
    assert lines[0].startswith("pass  devices ") and lines[1].startswith("skip  cpu ")
    assert found["ranks"] == 2 and found["hardware"]["host_cores"] > 0
    assert found["versions"].keys() == {"torch", "python"}
    assert found["command"].startswith("python -m tools.check --device cpu --json ")
    assert found.keys() >= {"date", "commit", "code"}
    assert all(result["seconds"] >= 0 for result in found["checks"])


@pytest.mark.tries("it takes a multiple of", "it takes a GPU")
def test_a_check_that_fails_says_why_and_the_others_go_on(checked, monkeypatch, tmp_path):
    """One check beyond its limit, one in its limits, two skipped."""
    layouts = {name: check.LAYOUTS[name] for name in ("hsdp-tp", "fsdp")}
    monkeypatch.setattr(check, "LAYOUTS", layouts)
    monkeypatch.setattr(check, "TOLERANCE", {"float32": 1e-5})
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    status, lines, found = checked("--ranks 2 devices parity cpu")
    assert status == 1
    (folder,) = (tmp_path / "work").iterdir()
    results = by_name(found)
    for line, result in zip(lines, found["checks"], strict=True):
        assert line.startswith(f"{result['status']}  {result['name']} ")
    statuses = {name: result["status"] for name, result in results.items()}
    assert statuses == {
        "devices": "FAIL",
        "parity hsdp-tp": "skip",
        "parity fsdp": "pass",
        "cpu": "skip",
    }
    assert results["devices"]["reason"] == "tf32 1 is not between 0 and 0"
    assert results["parity hsdp-tp"]["reason"] == "it takes a multiple of 4 ranks, not 2"
    fsdp = results["parity fsdp"]
    assert 0 < fsdp["figures"]["float32 grad_norm"] <= 1e-5
    assert 0 < fsdp["figures"]["float32 loss"] <= 1e-5
    assert fsdp["limits"]["float32 loss"] == [0, 1e-5]
    assert results["devices"]["output"] == str(folder)


FAILING_RANK = """
import os, pathlib, sys, time
waiting = pathlib.Path(__file__).with_name("waiting")
if os.environ["RANK"] == "0" and os.environ["WORLD_SIZE"] == "2":
    waiting.write_text(str(os.getpid()))
    time.sleep(1000)
if os.environ["RANK"] == "1":
    while not waiting.exists() or not waiting.read_text():
        time.sleep(0.01)
    sys.exit("train.py: error: no room")
"""


def test_a_job_fails_with_its_first_rank_and_leaves_no_other(checked, monkeypatch, tmp_path):
    script = tmp_path / "failing_rank.py"
    script.write_text(FAILING_RANK)
    monkeypatch.setattr(bench, "TRAIN", str(script))
    monkeypatch.setattr(check, "LAYOUTS", {"ddp": check.LAYOUTS["ddp"]})
    status, _, found = checked("--ranks 2 parity")
    failed = by_name(found)["parity ddp"]
    assert (status, failed["status"], failed["reason"]) == (1, "FAIL", "train.py: error: no room")
    assert "no room" in (Path(failed["output"]) / "parity ddp.failed.txt").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "waiting").read_text()), 0)


@pytest.mark.parametrize(
    "text, line",
    [
        ("train.py: error: a\nE1121 failed (exitcode: 1)\n", "train.py: error: a"),
        ("[rank0]: OSError: b\ntrain.py: error: rank 0 died\nA.ChildFailedError: \n", "OSError: b"),
        ("Killed\n", "no line of its output names an error"),
    ],
)
def test_the_reason_of_a_failure_is_an_exception_or_an_error_line(text, line):
    assert check.last_error(text).removeprefix("[rank0]: ") == line


def test_help_lists_the_checks(capsys):
    with pytest.raises(SystemExit):
        check.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in check.CHECKS)


@pytest.mark.slow
def test_all_checks_on_cpus(checked):
    status, lines, found = checked("--ranks 2")
    statuses = {name: result["status"] for name, result in by_name(found).items()}
    skipped = {"parity hsdp-tp", "cpu"}
    assert {name for name, said in statuses.items() if said == "skip"} == skipped
    assert not [line for line in lines if line.startswith("FAIL")]
    assert status == 0
    figures = {name: result["figures"] for name, result in by_name(found).items()}
    assert figures["resume"]["loss"] == 0  # to the last bit
    assert figures["stop"]["steps after resuming"] == 2
    assert figures["speed"]["single tokens/s/device"] > 0
