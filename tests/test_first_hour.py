"""examples/first_hour.py: its train.py commands on fake CUDA devices; limits, failures, Ctrl-C."""

import json
import shlex
import signal
import sys
from pathlib import Path

import pytest
from test_fake_cuda import gpus, play, pytestmark  # noqa: F401

sys.path.append(str(Path(__file__).parent.parent / "examples"))
import first_hour
from first_hour import STEPS, Step

DRY = "--model tiny --micro_batch_size 1 --nproc_per_node 4"
TRAINS = [step for step in STEPS if "{flags}" in step.command and "check" not in step.name]


@pytest.mark.parametrize("step", TRAINS, ids=lambda step: step.name)
def test_first_hour_trains_on_fake_gpus(gpus, tmp_path, step):  # noqa: F811
    """The commands run without --compile, and an endless run takes six steps."""
    first_hour.write_tokens(tmp_path / "tokens")
    options = first_hour.parse([*DRY.split(), f"--out={tmp_path}/new"])
    command = shlex.split(step.command.format(**first_hour.values_for(step, options, tmp_path)))
    argv = [word for word in command[command.index("--model") :] if word != "--compile"]
    argv += ["--device", "cuda", "--num_workers", "0"]
    if "1000000" in argv:
        argv += ["--max_steps", "6"]
    ranks = 1 if "torchrun_1" in step.command else 4
    for _, refusals in gpus(ranks, play, argv, timeout=200):
        assert not refusals


def test_first_hour_continues_after_a_step_that_fails(tmp_path, monkeypatch, capsys):
    steps = [
        Step("fails", 9, "{python} -c 'raise SystemExit(3)'"),
        Step("sleeps", 1, "sleep 60"),
        Step("many", 9, "true", 1000),
        Step("prints", 9, "echo '{{\"x\": 1}}'"),
    ]
    monkeypatch.setattr(first_hour, "STEPS", steps)
    out = tmp_path / "out"
    assert first_hour.main([*DRY.split(), f"--out={out}"]) == 1
    found = json.loads((out / "first_hour.json").read_text())["steps"]
    statuses = [step["status"] for step in found]
    assert statuses == [3, "ended after 1 s", "skipped: needs 1000 GPUs", 0]
    assert found[-1]["figures"] == {"x": 1}


def test_first_hour_writes_its_file_after_ctrl_c(tmp_path, monkeypatch):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    interrupt = "sh -c 'sleep 0.5; kill -INT $PPID; sleep 60'"  # first_hour.py has started by then
    steps = [Step("waits", 60, interrupt), Step("never", 9, "true")]
    monkeypatch.setattr(first_hour, "STEPS", steps)
    out = tmp_path / "out"
    assert first_hour.main([*DRY.split(), f"--out={out}"]) == 130
    found = json.loads((out / "first_hour.json").read_text())["steps"]
    assert [step["status"] for step in found] == ["interrupted"]


def test_first_hour_takes_less_than_25_minutes():
    assert sum(step.limit for step in STEPS) < 25 * 60
