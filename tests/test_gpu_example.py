"""examples/gpu.py: what it measures on fake CUDA devices, its limits, its dry run and Ctrl-C."""

import json
import os
import signal
import sys
import time

import fake_cuda
import pytest
from old import children, is_running, start_process, wait_until
from rig import ROOT
from test_fake_cuda import gpus  # noqa: F401

sys.path.insert(0, str(ROOT / "examples"))
import gpu
from gpu import Step


def run_on_gpu(function: str, *arguments) -> dict:
    """Run a function of gpu.py on a fake GPU."""
    fake_cuda.install()
    fakes = fake_cuda.Fakes()
    mode = fake_cuda.Gpu(fakes)
    with fakes, mode:
        found = getattr(gpu, function)(*arguments)
    assert not mode.refusals
    return found


@pytest.mark.slow(proves="what the script itself does on a CUDA device")
def test_ceilings_and_ranks_that_share_a_fake_gpu(gpus, tmp_path):  # noqa: F811
    (found,) = gpus(1, run_on_gpu, "ceilings")
    assert len(found) == 2 + 4 + 4 * 2 * 4 + 2
    products = [speed for name, speed in found.items() if name[0].isdigit()]
    assert found["products, TFLOP/s"] == max(products)
    gpu.write_tokens(tmp_path / "tokens")
    for found in gpus(4, run_on_gpu, "train_on_ranks", tmp_path / "tokens", timeout=300):
        assert len(found["losses"]) == len(found["grad_norms"]) == 5


def test_a_step_that_fails_does_not_stop_the_next(tmp_path):
    """A step that ignores SIGTERM at its limit is killed."""
    ignores = tmp_path / "ignores.py"
    ignores.write_text("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(99)")
    steps = {
        "fails": Step(1, 5, "false"),
        "ignores": Step(1, 1, f"PYTHON {ignores}"),
        "needs": Step(1, 9, "false", needs_gpu=True),
        "prints": Step(1, 5, 'echo {"x":1}'),
        "too late": Step(1, 99, "true"),
    }
    began = time.monotonic()
    found = gpu.run_steps(steps, gpu.GRACE + gpu.LEAST, tmp_path / "a.json")
    assert time.monotonic() - began < 2 * gpu.GRACE + gpu.LEAST
    assert json.loads((tmp_path / "a.json").read_text())["steps"] == found
    statuses = [str(step["status"]).partition(":")[0] for step in found.values()]
    assert statuses == ["1", "ended after 1 s", "skipped", "0", "cut"]
    assert found["prints"]["last_lines"] == ['{"x":1}']


@pytest.mark.slow(proves="the commands of both calls, as they are typed")
@pytest.mark.parametrize(
    "call, skipped", [("a", {"ceilings", "gpu-tests", "nanogpt"}), ("b", set())]
)
def test_a_dry_run_needs_no_gpu(tmp_path, call, skipped):
    assert gpu.main([call, str(tmp_path)]) == 0
    found = json.loads((tmp_path / f"{call}.json").read_text())["steps"]
    assert {name for name, step in found.items() if step["status"]} == skipped
    assert {name for name, step in found.items() if "figures" not in step} == skipped
    if call == "b":
        assert found["four-ranks"]["figures"]["losses, relative"] < 1e-5
        assert found["four-ranks"]["figures"]["grad_norms, relative"] < 1e-4
        assert len(found["saves-resumed"]["figures"]["losses"]) == 10


@pytest.mark.slow(proves="no process is left on a rented machine")
def test_ctrl_c_ends_the_step_that_runs(tmp_path):
    command = [sys.executable, str(ROOT / "examples/gpu.py"), "b", str(tmp_path / "out")]
    process = start_process(command, env=os.environ | {"TMPDIR": str(tmp_path)})
    printed = "nanoshard-gpu-*/saves.txt"
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob(printed)), 60)
    step, *_ = children(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert not is_running(step)
    assert not [*tmp_path.glob("nanoshard-gpu-*")]
