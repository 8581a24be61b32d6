"""--profile START:STOP: a trace and figures of each rank, and the same numbers as without."""

import json
from collections import Counter

import pytest
from core.conftest import pool, tokens, train  # noqa: F401

ROWS = {
    "single": (1, "--strategy single", set()),
    "ddp 2": (2, "--strategy ddp", {"dp_replicate"}),
    "fsdp 2": (2, "--strategy fsdp --dtype bfloat16", {"dp_shard"}),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_rank_writes_a_trace_and_what_it_sent(train, row):  # noqa: F811
    ranks, mesh, axes = ROWS[row]
    plain = train(ranks, mesh, "plain")
    run = train(ranks, f"{mesh} --profile 1:3", "profiled")
    assert (plain.status, run.status) == (0, 0), run.error
    assert [each["loss"] for each in run.rows()] == [each["loss"] for each in plain.rows()]
    for rank in range(ranks):
        figures = json.loads((run.out / f"profile/rank_{rank}.json").read_text())
        trace = json.loads((run.out / f"profile/rank_{rank}.trace.json").read_text())
        assert len(trace["traceEvents"]) > 100
        assert figures["steps"] == [2, 3]
        assert not figures["host_syncs"]
        sent = Counter()
        for each in figures["communicated"]:
            sent[each["axis"]] += each["bytes"]
        assert axes <= sent.keys()
        assert all(sent[axis] > 10_000 for axis in axes)
        for each in figures["communicated"]:
            gathers = each["kind"] == "all_gather"
            assert each["dtypes"] == (["bfloat16"] if gathers else ["float32"])


def test_a_window_that_the_run_does_not_reach_is_refused(train):  # noqa: F811
    refused = train(1, "--profile 3:9")
    assert refused.status == 2 and "--profile 3:9" in refused.error
