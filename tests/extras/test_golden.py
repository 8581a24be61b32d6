"""Runs with extras have recorded numbers: those of core/golden.json under tensor parallelism.

After a change that is meant to alter the numbers of Muon, which are in golden.json,

    RECORD=1 pytest -n 0 tests/extras/test_golden.py -k muon

writes them again, and the commit says why.
"""

from pathlib import Path

import pytest
from core.test_golden import BASE, assert_recorded
from core.test_golden import FILE as CORE_FILE
from rig import cells

FILE = Path(__file__).with_name("golden.json")
FSDP = "--strategy fsdp --wrap block"
# recorded as | ranks | flags
TP_TABLE = f"""
untied | 4 | {FSDP} --tp 2 --micro_batch_size 2 --model tinyllama-1.1b
plain  | 4 | --strategy ddp --tp 2
"""
MUON_TABLE = f"""
muon   | 1 |
muon   | 4 | --strategy hsdp --wrap block --dp_shard 2 --micro_batch_size 1
muon   | 4 | {FSDP} --tp 2
"""


@pytest.mark.parametrize("name, ranks, flags", cells(TP_TABLE))
def test_tensor_parallelism_changes_no_recorded_number(train, name, ranks, flags):
    run = train(int(ranks), f"{BASE} {flags}")
    assert_recorded(run, CORE_FILE, name, 1e-5, 1e-4)


@pytest.mark.parametrize("name, ranks, flags", cells(MUON_TABLE))
def test_muon_has_the_recorded_numbers_on_any_mesh(train, name, ranks, flags):
    """At a lr of 1e-2, rounding would grow faster."""
    run = train(int(ranks), f"{BASE} --optimizer muon --lr 3e-3 {flags}")
    assert_recorded(run, FILE, name, 1e-5, 1e-4)
