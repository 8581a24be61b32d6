"""Every flag of an extra has an effect, which a user can see: see core/test_flags.py."""

from pathlib import Path

import pytest
from core.test_flags import EXTRAS, assert_seen, parse_table, see  # noqa: F401

TABLE = """
tp 2                       | 2 |                               | more all_gather
optimizer muon             | 1 |                               | loss from 2
loss_chunks 4              | 1 |                               | more mm
profile 1:3                | 1 |                               | files + rank_0.json
"""
ROWS = parse_table(TABLE)
# Flags whose effect is not in a healthy run of a few steps, and the test that shows it
ELSEWHERE = {
    "async_save": "test_flags.py::test_training_does_not_wait_for_an_asynchronous_save",
}


@pytest.mark.parametrize("name", ROWS)
def test_a_flag_has_the_effect_that_its_row_names(see, name):  # noqa: F811
    row = ROWS[name]
    with_flag, without = see(row.ranks, f"{row.flags} --{row.flag}"), see(row.ranks, row.flags)
    assert_seen(row, with_flag, without)


def test_training_does_not_wait_for_an_asynchronous_save(see):  # noqa: F811
    for flags, waits in (("", True), ("--async_save", False)):
        saves = see(1, f"--save_interval 1 {flags}").run.rows("blocking_seconds")
        assert len(saves) == 5
        assert {row["blocking_seconds"] == row["seconds"] for row in saves} == {waits}


def test_every_flag_of_an_extra_has_a_row():
    assert {*ROWS, *ELSEWHERE} == EXTRAS


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_test_that_shows_a_flag_exists(name):
    file, _, function = ELSEWHERE[name].partition("::")
    assert f"def {function}(" in Path(__file__).with_name(file).read_text()
