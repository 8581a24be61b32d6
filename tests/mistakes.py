"""A row of the tables in the files mistakes_*.py, which test_mistakes.py tries."""

from typing import NamedTuple


class Mistake(NamedTuple):
    arguments: str  # {...} is a folder that `write_folders` of a table writes
    line: str  # part of the line printed, after "COMMAND: error: "
    status: int = 2  # 1 for a run-time error
    ranks: int = 1  # of train.py
