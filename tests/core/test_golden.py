"""The numbers of runs on one rank are those in golden.json.

Neither a comparison of meshes, nor the reference in test_numbers.py, which starts from weights of a
run, sees a change of the initial weights, a seed that is ignored, or a sum in another precision.
After a change that is meant to alter these numbers,

    RECORD=1 pytest -n 0 tests/core/test_golden.py

writes them again, and the commit says why. Bits of random numbers differ between CPUs, so values
are compared with tolerances.
"""

import json
import os
from pathlib import Path

import pytest
from rig import Run, cells

FILE = Path(__file__).with_name("golden.json")
BASE = "--max_steps 6 --global_batch_size 12 --lr 1e-2 --max_grad_norm 1.8"

# name | flags | relative tolerances of losses and gradient norms
TABLE = """
plain        |                        | 1e-5 | 1e-4
another seed | --seed 1               | 1e-5 | 1e-4
untied       | --model tinyllama-1.1b | 1e-5 | 1e-4
bfloat16     | --dtype bfloat16       | 2e-3 | 2e-2
"""


def assert_recorded(run: Run, file: Path, name: str, loss: float, grad_norm: float) -> None:
    """Fail unless a run has the numbers that the file has under this name, up to rounding."""
    assert run.status == 0, run.error
    found = {key: [row[key] for row in run.rows(key)] for key in ("loss", "grad_norm", "val_loss")}
    recorded = json.loads(file.read_text())
    if "RECORD" in os.environ:
        file.write_text(json.dumps(recorded | {name: found}, indent=1) + "\n")
        return
    assert [len(values) for values in found.values()] == [6, 6, 1]
    tolerances = {"loss": loss, "grad_norm": grad_norm, "val_loss": loss}
    for key, values in recorded[name].items():
        assert found[key] == pytest.approx(values, rel=tolerances[key]), key


@pytest.mark.parametrize("name, flags, loss, grad_norm", cells(TABLE))
def test_a_run_has_the_recorded_numbers(train, name, flags, loss, grad_norm):
    run = train(1, f"{BASE} {flags}")
    assert_recorded(run, FILE, name, float(loss), float(grad_norm))
