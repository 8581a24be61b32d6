"""--tracker wandb: rows are also sent to wandb, here to a module of this name that notes them."""

import json

import pytest
from core.conftest import job, tokens  # noqa: F401

NOTES = """
import json, os
class Run:
    def note(self, *what):
        with open(os.environ["NOTES"], "a") as file:
            file.write(json.dumps(what, default=str) + chr(10))
    def log(self, row, step=None, **_):
        self.note("log", step, row)
        if os.environ.get("BREAKS") and (step or row.get("step", 0)) >= 2:
            raise RuntimeError("the network is down")
    def define_metric(self, *_, **__): ...
    def finish(self, *_, **__):
        self.note("finish")
def init(**options):
    Run().note("init", sorted(options), options.get("id"))
    return Run()
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/wandb.py").write_text(NOTES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return lambda: [*map(json.loads, (tmp_path / "notes").read_text().splitlines())]


def test_rank_0_sends_every_row_once(job, notes):  # noqa: F811
    run = job(2, "--strategy ddp --tracker wandb")
    assert run.wait() == 0, run.printed()
    assert [kind for kind, *_ in notes()].count("init") == 1
    steps = [step or row["step"] for kind, step, row in notes()[1:-1] if "loss" in row]
    assert steps == [1, 2, 3, 4, 5]


def test_a_tracker_that_fails_later_does_not_end_the_run(job, notes, monkeypatch):  # noqa: F811
    monkeypatch.setenv("BREAKS", "1")
    run = job(1, "--tracker wandb")
    assert run.wait() == 0, run.printed()
    assert len(run.rows()) == 5
    assert "the network is down" in run.printed()


def test_a_first_start_without_the_tracker_is_refused_but_no_later_one(job, notes, tmp_path):  # noqa: F811
    (tmp_path / "site/wandb.py").write_text("raise ImportError('no wandb here')")
    first = job(2, "--strategy ddp --tracker wandb", "run")
    assert first.wait() == 1  # torchrun's
    assert "--tracker wandb cannot be used: ImportError('no wandb here')" in first.printed()
    assert not first.out.exists()

    (tmp_path / "site/wandb.py").write_text(NOTES)
    assert job(1, "--tracker wandb", "run").wait() == 0
    (tmp_path / "site/wandb.py").write_text("raise ImportError('no wandb here')")
    later = job(1, "--tracker wandb --max_steps 7", "run")
    assert later.wait() == 0, later.printed()
    assert "--tracker failed and is off" in later.printed() and "no wandb here" in later.printed()
    assert len(later.rows()) == 7
