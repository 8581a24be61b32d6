"""examples/gpu.py: the steps of its plan run without a GPU, and it keeps their limits."""

import json
import sys
from dataclasses import replace

import pytest
from rig import ROOT, run_command

sys.path.insert(0, str(ROOT / "examples"))
import gpu
from gpu import Step


@pytest.mark.slow(proves="the commands of both calls, as they are typed")
def test_a_dry_run_needs_no_gpu(tmp_path):
    """The first call is made as a user does; a busy machine would not keep the second's limits."""
    status, printed, _ = run_command(["a", tmp_path], gpu.main)
    assert status == 0
    found = json.loads((tmp_path / "a.json").read_text())["steps"]
    assert [line.split()[0] for line in printed.splitlines()] == 2 * [*found]  # expected, found
    steps = {"fails": Step(1, 9, "false"), "hangs": Step(1, 1, "sleep 99")}
    steps |= {name: replace(step, limit=600) for name, step in gpu.STEPS["b"].items()}
    found |= gpu.run_steps(steps, 3000, tmp_path / "b.json")
    others = {"ceilings", "gpu-tests", "nanogpt", "fails", "hangs"}
    assert {name for name, step in found.items() if step["status"]} == others
    assert {name for name, step in found.items() if "figures" not in step} == others
    assert (found["fails"]["status"], found["hangs"]["status"]) == (1, "ended after 1 s")
    assert found["four-ranks"]["figures"]["losses, relative"] < 1e-5
    assert found["four-ranks"]["figures"]["grad_norms, relative"] < 1e-4
    assert len(found["saves-resumed"]["figures"]["losses"]) == 10
