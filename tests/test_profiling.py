"""--profile: a trace for each rank, and true figures."""

import json
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import flags, listen

import data
import optim
import profiling


def profiled(argv: list[str], fault: str) -> tuple[int, str, str]:
    """train.py, whose steps from 4 on ask for a value on the host, or wait for data."""
    step, read = optim.Optimizer.step, data.TokenDataset.__getitem__

    def ask(self, number, loss, measure=False):
        if fault == "sync" and number > 3:
            loss.item()  # here
        return step(self, number, loss, measure)

    def wait(dataset, indices):
        if fault == "data":
            threading.Event().wait(0.1)  # time.sleep is patched here
        return read(dataset, indices)

    with (
        mock.patch.object(optim.Optimizer, "step", ask),
        mock.patch.object(data.TokenDataset, "__getitem__", wait),
    ):
        return listen(argv)


@pytest.mark.parametrize("fault", ["sync", "data"])
def test_a_window_of_steps_is_traced_and_explained(pool, tokens, tmp_path, fault):
    argv = flags(
        f"--data {tokens} --out {tmp_path}/run --strategy fsdp --max_steps 8 --profile 3:6"
    )
    ((status, out, _), _) = pool(2, profiled, argv, fault)
    assert status == 0
    for rank in range(2):
        figures = json.loads((tmp_path / f"run/profile/rank_{rank}.json").read_text())
        trace = json.loads((tmp_path / f"run/profile/rank_{rank}.trace.json").read_text())
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
        assert names.count("aten::embedding") == 3  # one forward a step
        sent = {(row["kind"], row["axis"]): row["calls"] for row in figures["communicated"]}
        assert sent == {
            ("all_gather", "dp_shard"): 5,
            ("reduce_scatter", "dp_shard"): 3,
            ("all_reduce", "world"): 1,
        }
        shares = [figures[name] for name in ("busy", "exposed_communication", "data_wait")]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) == pytest.approx(1, abs=0.1)
        operations = {row["name"] for row in figures["operations"]}
        assert len(figures["operations"]) == 10 and "aten::mm" in operations
        if fault == "sync":
            source = Path(__file__).read_text().splitlines()
            (line,) = [i for i, text in enumerate(source, 1) if text.endswith("# here")]
            assert figures["host_syncs"] == {f"test_profiling.py:{line}": 1}
        else:
            assert figures["host_syncs"] == {} and figures["data_wait"] > 0.5
    assert "profile steps 4 to 6, " in out and "5 x all_gather over dp_shard" in out
    assert "host syncs: " + ("1 x test_profiling.py:" if fault == "sync" else "none") in out


def test_a_run_that_is_continued_inside_the_window_has_nothing_to_report(run):
    run(1, "--max_steps 4 --save_interval 4")
    out = run(1, "--max_steps 9 --profile 2:6")
    assert not (out / "profile").exists()


@pytest.mark.parametrize(
    "spans, length",
    [
        ([], 0),
        ([(0, 2), (1, 3)], 3),
        ([(5, 6), (0, 1)], 2),
        ([(0, 9), (1, 2), (3, 4)], 9),
    ],
)
def test_overlapping_spans_count_once(spans, length):
    assert profiling.union_length(spans) == length


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_the_figures_of_a_gpu(pool, tokens, tmp_path):
    text = f"--data {tokens} --out {tmp_path}/run --max_steps 8 --profile 3:6"
    ((status, _, _),) = pool(1, profiled, [*flags(text), "--device", "cuda"], "sync")
    figures = json.loads((tmp_path / "run/profile/rank_0.json").read_text())
    assert status == 0 and 0 < figures["busy"] <= 1
    assert any("test_profiling.py" in place for place in figures["host_syncs"])
