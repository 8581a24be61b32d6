"""examples/gpu.py: its commands on fake CUDA devices, its limits, its dry run and Ctrl-C."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import fake_cuda
import pytest
from conftest import ROOT, children, is_running, start_process, wait_until
from test_fake_cuda import gpus, play  # noqa: F401

sys.path.insert(0, str(ROOT / "examples"))
import gpu
from gpu import STEPS, Step

TRAINS = {
    name: step
    for steps in STEPS.values()
    for name, step in steps.items()
    if "train.py --data" in step.command and name != "saves-resumed"
}


def argv_of(name: str, work: Path) -> list[str]:
    """The flags of a step of train.py; without a GPU here, the model is tiny and not compiled."""
    words = gpu.command_of(TRAINS.get(name) or STEPS["b"][name], name, work)
    flags = words[words.index("train.py") + 1 :]
    assert "--compile" not in flags and "tiny" in flags
    if "--async_save" in flags:  # fake tensors do not work in a thread beside the training
        flags += ["--save_interval", "30"]
    if name == "eager":  # a fake token takes half a second
        flags += ["--sample_tokens", "8"]
    return [*flags, "--device", "cuda"]


@pytest.mark.slow(proves="every step of the script runs on a CUDA device")
@pytest.mark.parametrize("name", TRAINS)
def test_a_step_trains_on_a_fake_gpu(gpus, tmp_path, name):  # noqa: F811
    gpu.write_tokens(tmp_path / "tokens")
    for each in (name, "saves-resumed") if name == "saves" else (name,):
        ((_, refusals),) = gpus(1, play, argv_of(each, tmp_path), timeout=300)
        assert not refusals
        (tmp_path / f"{each}.txt").touch()  # what the step printed
        found = gpu.figures(each, tmp_path, {})
        expected = {"saves-resumed": 10, "1b-eager": 14, "1b-compiled": 14, "llama-slice": 14}
        assert len(found["losses"]) == expected.get(each, 30)


def run_on_gpu(function: str, *arguments) -> dict:
    """Run a function of gpu.py on a fake GPU."""
    fake_cuda.install()
    fakes = fake_cuda.Fakes()
    mode = fake_cuda.Gpu(fakes)
    with fakes, mode:
        found = getattr(gpu, function)(*arguments)
    assert not mode.refusals
    return found


@pytest.mark.slow(proves="events and streams of a CUDA device")
def test_the_ceilings_are_measured_on_a_fake_gpu(gpus):  # noqa: F811
    (found,) = gpus(1, run_on_gpu, "ceilings")
    assert len(found) == 2 + 4 + 4 * 2 * 4 + 2
    products = [speed for name, speed in found.items() if name[0].isdigit()]
    assert found["products, TFLOP/s"] == max(products)
    assert found["attention, TFLOP/s"] > 0


@pytest.mark.slow(proves="the ranks of the script share one device")
@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_share_a_fake_gpu(gpus, tmp_path, ranks):  # noqa: F811
    gpu.write_tokens(tmp_path / "tokens")
    for found in gpus(ranks, run_on_gpu, "train_on_ranks", tmp_path / "tokens", timeout=300):
        assert len(found["losses"]) == len(found["grad_norms"]) == 5


# --------------------------------------------------------------------------------------------------
# The limits


def test_a_step_that_fails_does_not_stop_the_next(tmp_path):
    steps = {
        "fails": Step(1, 9, "false"),
        "sleeps": Step(1, 1, "sleep 60"),
        "needs": Step(1, 9, "false", needs_gpu=True),
        "prints": Step(1, 9, 'echo {"x":1}'),
    }
    began = time.monotonic()
    found = gpu.run_steps(steps, 60, tmp_path / "a.json")
    assert time.monotonic() - began < 20
    assert json.loads((tmp_path / "a.json").read_text())["steps"] == found
    statuses = [step["status"] for step in found.values()]
    assert statuses == [1, "ended after 1 s", "skipped: needs a GPU", 0]
    assert found["prints"]["last_lines"] == ['{"x":1}']


@pytest.mark.slow(proves="minutes of a machine are not overspent")
def test_the_limit_includes_the_step_that_runs(tmp_path):
    """A process that ignores SIGTERM is killed, and the step after it does not start."""
    ignores = tmp_path / "ignores.py"
    ignores.write_text("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(99)")
    steps = {"ignores": Step(1, 99, f"PYTHON {ignores}"), "next": Step(1, 99, "true")}
    began = time.monotonic()
    found = gpu.run_steps(steps, gpu.GRACE + gpu.LEAST + 1, tmp_path / "a.json")
    assert time.monotonic() - began < 2 * gpu.GRACE + gpu.LEAST + 1
    assert [step["status"] for step in found.values()] == ["ended after 16 s", "cut: no time left"]


@pytest.mark.slow(proves="the commands of both calls, as they are typed")
@pytest.mark.parametrize("call", "ab")
def test_a_dry_run_needs_no_gpu(tmp_path, call):
    assert gpu.main([call, str(tmp_path)]) == 0
    found = json.loads((tmp_path / f"{call}.json").read_text())["steps"]
    skipped = {name for name, step in found.items() if step["status"]}
    assert skipped == ({"ceilings", "gpu-tests", "nanogpt"} if call == "a" else set())
    assert all("figures" in found[name] for name in found.keys() - skipped)
    if call == "b":
        assert found["four-ranks"]["figures"]["losses, relative"] < 1e-5
        assert found["four-ranks"]["figures"]["grad_norms, relative"] < 1e-4
        assert len(found["saves-resumed"]["figures"]["losses"]) == 10


@pytest.mark.slow(proves="no process is left on a rented machine")
def test_ctrl_c_ends_the_step_that_runs(tmp_path):
    command = [sys.executable, str(ROOT / "examples/gpu.py"), "b", str(tmp_path / "out")]
    process = start_process(command, env=os.environ | {"TMPDIR": str(tmp_path)})

    def has_printed() -> bool:
        return any(path.stat().st_size for path in tmp_path.glob("nanoshard-gpu-*/saves.txt"))

    wait_until(has_printed, 60)
    step, *_ = children(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert not is_running(step)
    assert not [*tmp_path.glob("nanoshard-gpu-*")]
