"""--async_save: checkpoints that are written while training continues are those of other saves."""

import signal

import pytest
import torch
from core.conftest import full_tensors, job, pool, tokens, train  # noqa: F401

import checkpoint

ROWS = {
    "single": (1, "--strategy single"),
    "fsdp 2": (2, "--strategy fsdp"),
}
SAVES = "--save_interval 2 --keep_last 0 --max_steps 6"


@pytest.mark.parametrize("row", ROWS)
def test_an_asynchronous_save_writes_the_tensors_of_its_step(train, row):  # noqa: F811
    """Later steps, which change the weights, do not reach it."""
    ranks, mesh = ROWS[row]
    now = train(ranks, f"{mesh} {SAVES}", "now")
    later = train(ranks, f"{mesh} {SAVES} --async_save", "later")
    assert (now.status, later.status) == (0, 0), later.error
    assert now.steps() == later.steps() == [2, 4, 6]
    for step in (2, 4, 6):
        expected, found = (
            full_tensors(checkpoint.step_path(run.out, step)) for run in (now, later)
        )
        assert expected.keys() == found.keys() and len(found) > 50
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (step, name)
    rows = later.rows("event")
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert all(row["blocking_seconds"] <= row["seconds"] for row in rows)


def test_a_stop_waits_for_the_save_and_continues_from_it(train, job):  # noqa: F811
    flags = "--strategy fsdp --async_save --max_steps 400"
    running = job(2, f"{flags} --save_interval 1")
    running.until(lambda: len(running.rows()) > 3)
    running.process.send_signal(signal.SIGTERM)
    running.wait()
    (last,) = [row["step"] for row in running.rows()][-1:]
    newest = checkpoint.list_checkpoints(running.out)[-1]
    assert checkpoint.step_of(newest) == last
    assert checkpoint.verify(newest) is None
    continued = train(2, f"{flags} --max_steps {last + 2} --save_interval 1")
    assert continued.status == 0, continued.error
    assert continued.rows()[-1]["step"] == last + 2
