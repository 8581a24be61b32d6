"""--tracker wandb: rows are also sent to wandb, here to a module of this name that notes them."""

import json
import os
import sys
from pathlib import Path

from rig import read_rows, run_command

NOTES = """
import json, os, time
class Run:
    def note(self, *what):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps(what) + chr(10))
    def log(self, row, step=None, **_):
        self.note(step, row["step"])
        if row["step"] > 3:
            raise RuntimeError("the network is down")
    def define_metric(self, *_, **__): ...
def init(**options):
    time.sleep(1)  # so that two ids with the time would differ
    Run().note("init", options["id"])
    return Run()
"""


def run_with_wandb(argv: list[str], folder: Path) -> tuple[int, str, str]:
    """Run train.command on this rank, where `import wandb` finds the module of this folder."""
    os.environ["NOTES"] = str(folder / "notes")
    sys.path.insert(0, str(folder))
    try:
        return run_command(argv)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("wandb", None)


def test_rank_0_sends_every_row_once_to_one_page_even_if_that_fails(on_ranks, tmp_path):
    (tmp_path / "wandb.py").write_text(NOTES)
    for steps in (3, 5):
        flags = f"--tracker wandb --strategy ddp --max_steps {steps}"
        answers = on_ranks(2, run_with_wandb, flags, tmp_path)
        assert [status for status, _, _ in answers] == [0, 0]
    assert "the network is down" in answers[0][1]
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    first, *notes = [*map(json.loads, (tmp_path / "notes").read_text().splitlines())]
    assert first[0] == "init" and notes.count(first) == 1  # the second start has the same id
    sent = [note for note in notes if note != first]
    assert sent == [[None, step] for step in (1, 2, 3, 3, 4, 5, 5)]  # its own steps cannot repeat
