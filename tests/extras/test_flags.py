"""Every flag of an extra has an effect, which a user can see: see core/test_flags.py."""

import pytest
from core.test_flags import EXTRAS, see_row  # noqa: F401
from rig import cells

TABLE = """
tp 2                       | 2 |                               | more all_gather
optimizer muon             | 1 |                               | loss from 2
loss_chunks 4              | 1 |                               | more mm
async_save                 | 1 | --save_interval 1             | more copy_
profile 1:3                | 1 |                               | files + rank_0.json
"""
ROWS = {flag.split()[0]: (flag, *line) for flag, *line in cells(TABLE)}


@pytest.mark.parametrize("name", ROWS)
def test_a_flag_has_the_effect_that_its_row_names(see_row, name):  # noqa: F811
    see_row(*ROWS[name])


def test_every_flag_of_an_extra_has_a_row():
    assert ROWS.keys() == EXTRAS
