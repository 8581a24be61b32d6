"""The numbers of runs with extras are the recorded ones.

Tensor parallelism changes none of the numbers in core/golden.json. golden.json has those of Muon,
on one rank. After a change that is meant to change them,

    PYTHONPATH=tests python -m tests.extras.test_golden

writes them again, and the commit says why.
"""

import json
import tempfile
from pathlib import Path

import pytest
from core.test_golden import FILE as CORE_FILE
from core.test_golden import FSDP, HSDP, NUMBERS, TOLERANCES, assert_numbers, numbers_of, run
from rig import POOL, write_tokens

FILE = Path(__file__).with_name("golden.json")
MUON = "--optimizer muon --lr 3e-3"  # at 1e-2, rounding grows faster
# ranks, flags of the mesh and its policy, and a key of NUMBERS
TP_ROWS = {
    "tp 2": (2, "--strategy single --tp 2", "plain"),
    "ddp x tp 2": (4, "--strategy ddp --tp 2 --micro_batch_size 2", "plain"),
    "fsdp x tp 2": (4, f"{FSDP} --tp 2", "plain"),
    "fsdp x tp 2, untied": (4, f"{FSDP} --tp 2 --micro_batch_size 1", "untied"),
}
MORE_MESHES = pytest.mark.slow(proves="the recorded numbers on further meshes")
MUON_ROWS = {
    "single": (1, ""),
    "ddp 2": (2, "--strategy ddp"),
    "fsdp 2": (2, FSDP),
    "hsdp 2x2": (4, f"{HSDP} --micro_batch_size 1"),
    "fsdp x tp 2": (4, f"{FSDP} --tp 2"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[MORE_MESHES] * (name != "fsdp x tp 2")) for name in TP_ROWS]
)
def test_tensor_parallelism_changes_no_recorded_number(pool, tokens, tmp_path, name):
    ranks, flags, numbers = TP_ROWS[name]
    out = run(pool, tokens, tmp_path / "run", ranks, f"{NUMBERS[numbers]} {flags}")
    expected = json.loads(CORE_FILE.read_text())["numbers"][numbers]
    assert_numbers(numbers_of(out), expected, TOLERANCES[numbers])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[MORE_MESHES] * (name != "hsdp 2x2")) for name in MUON_ROWS]
)
def test_muon_has_the_recorded_numbers_on_any_mesh(pool, tokens, tmp_path, name):
    ranks, flags = MUON_ROWS[name]
    out = run(pool, tokens, tmp_path / "run", ranks, f"{MUON} {flags}")
    expected = json.loads(FILE.read_text())["muon"]
    assert_numbers(numbers_of(out), expected, TOLERANCES["plain"])


def write() -> None:
    """Write golden.json from a run on one rank."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        root = Path(folder)
        muon = numbers_of(run(POOL, write_tokens(root / "tokens"), root / "run", 1, MUON))
        POOL.stop()
    FILE.write_text(json.dumps({"muon": muon}, indent=1) + "\n")


if __name__ == "__main__":
    write()
