"""tools/compare.py as `python -m tools.compare`."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
from old import rows, start_row
from rig import ROOT

from tools import compare

FIRST_ROW = rows(ROOT / "docs/runs/tiny")[0]


def table_cells(table: str) -> dict[str, list[str]]:
    """First cell of each row -> the other cells."""
    lines = [line.strip("|").split("|") for line in table.splitlines() if "---" not in line]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


@pytest.fixture
def compared(capsys):
    """compared(RUN, ...): the cells of the tables that tools.compare prints."""

    def call(*arguments) -> list[dict[str, list[str]]]:
        status = compare.main([str(argument) for argument in arguments])
        answer = capsys.readouterr()
        assert status == 0, answer.err
        return [table_cells(table) for table in answer.out.split("\n\n")]

    return call


def training_row(step: int, **values) -> dict:
    return FIRST_ROW | {"step": step, "tokens": 100 * step} | values


def evaluation(step: int, loss: float | None) -> dict:
    return {"step": step, "val_loss": loss}


def write(folder: Path, metrics: list[dict], optim: list[dict] = (), **flags) -> Path:
    """A run folder as train.py leaves it, with the rows after those of its first start."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics", metrics), ("optim", optim)):
        lines = [start_row(**flags), *lines]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


# --------------------------------------------------------------------------------------------------
# The table of runs


def test_the_table_has_the_numbers_of_the_logs(tmp_path, compared):
    log = []
    for step, size, mfu, skipped in ((1, 7, 0.5, 0), (2, 9, None, 1), (3, 8, 0.3, 2)):
        speed = {"tokens_per_second_per_device": 1e3 * size, "mfu": mfu}
        log.append(training_row(step, peak_device_memory=1e9 * size, **speed))
        log[-1]["skipped_steps"] = skipped
    log += [evaluation(1, 2.25), evaluation(2, 2.5), evaluation(3, 2.375)]
    on_device = write(tmp_path / "a", log, max_steps=3, clip="norm")
    on_cpu = [training_row(1, peak_host_memory=2e9, loss=3.0), evaluation(1, None)]
    (found,) = compared(on_device, write(tmp_path / "b", on_cpu, max_steps=3, clip="adaptive"))
    first = found.pop("first loss difference from a over 0.01 (--tolerance)")
    assert first == ["-", "step 1: validation loss by inf"]
    assert found == {
        "": ["a", "b"],
        "final validation loss": ["2.3750", "none"],
        "training loss at 100 tokens": [f"{FIRST_ROW['loss']:.4f}", "3.0000"],
        "best validation loss": ["2.2500", "none"],
        "tokens/s per device, median": ["8,000", "10,444"],
        "MFU, median": ["40.0%", "none"],
        "peak memory of a rank in GB": ["9.00", "2.00"],
        "steps skipped": ["2", "0"],
        "ranks": ["2", "2"],
        "`--clip`": ["norm", "adaptive"],
    }


def test_a_torn_line_and_rows_that_a_restart_repeats_do_not_count(tmp_path, compared):
    log = [training_row(1), training_row(2), evaluation(2, 2.5)]
    void = [training_row(3, loss=9.0, peak_host_memory=9e9), evaluation(3, 0.1)]
    a = write(tmp_path / "a", log, max_steps=2, lr=1)
    b = write(tmp_path / "b", [*log, *void, start_row(2, max_steps=2, lr=2)], max_steps=3, lr=1)
    with open(b / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "lo')  # torn
    (found,) = compared(a, b)
    assert found["best validation loss"] == found["final validation loss"] == ["2.5000", "2.5000"]
    assert found["peak memory of a rank in GB"] == ["0.41", "0.41"]
    assert found["`--lr`"] == ["1", "2"] and "`--max_steps`" not in found  # of the last start


def test_training_losses_are_means_over_the_same_tokens(tmp_path, compared):
    losses = {
        "often": {n: 100.0 - n for n in range(1, 101)},  # the last tenth is steps 91 to 100
        "seldom": {1: 99.0, 90: 50.0, 95: 5.0, 100: 0.0, 150: 0.0},
        "once": {1: 99.0, 250: 0.0},
    }
    for name, by_step in losses.items():
        write(tmp_path / name, [training_row(step, loss=loss) for step, loss in by_step.items()])
    (found,) = compared(*(tmp_path / name for name in losses))
    assert found["training loss at 10,000 tokens"] == ["4.5000", "2.5000", "none"]


@pytest.mark.parametrize(
    "arguments", [[], ["EMPTY"], ["RUN", "--tolerance=-1"], ["RUN", "--plot=a.b"]]
)
def test_a_mistake_is_one_line_with_status_2(tmp_path, monkeypatch, capsys, arguments):
    write(tmp_path / "RUN", [training_row(1)])
    write(tmp_path / "EMPTY", [])
    monkeypatch.chdir(tmp_path)
    assert compare.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# The first difference. Two runs have the same values, but those of the second change.

NEVER = "never: at most {} in 3 steps that both runs logged"
CHANGES = {  # (step, of what) -> value; --tolerance; the first loss and parameter difference
    "equal": ({}, 0, NEVER.format(0), NEVER.format(0)),
    "rounding": ({(2, "loss"): 3.0000003}, 1e-6, NEVER.format("1e-07"), NEVER.format(0)),
    "two steps": (
        *({(2, "loss"): 2.99999, (3, "loss"): 2.1, (2, "b"): 1.9, (3, "b"): 0.1}, 1e-6),
        *("step 2: training loss by 3e-06", "step 2: b grad_norm by 0.05"),
    ),
    "no limit": ({(3, "loss"): 3.0000003}, 0, "step 3: training loss by 1e-07", NEVER.format(0)),
    "nan": (
        *({(3, "loss"): None, (2, "a"): None}, 0.01),
        *("step 3: training loss by inf", "step 2: a grad_norm by inf"),
    ),
    "two values": (
        *({(2, "loss"): 2.9, (2, "val_loss"): 2.4, (2, "a"): 1.9, (2, "b"): 1.0}, 0.01),
        *("step 2: validation loss by 0.2", "step 2: b grad_norm by 0.5"),
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_largest_difference_of_the_first_step_that_differs(tmp_path, compared, case):
    changes, tolerance, *expected = CHANGES[case]
    for name, changed, last in (("a", {}, 5), ("b", changes, 4)):  # steps 4 and 5 do not count
        log, optim = [], []
        for step in (1, 2, 3, last):
            log.append(training_row(step, loss=changed.get((step, "loss"), 3.0)))
            log.append(evaluation(step, changed.get((step, "val_loss"), 3.0)))
            for parameter in "ab":
                norm = changed.get((step, parameter), 2.0)
                # Rounding decides what is clipped. Some columns are of one of the optimizers.
                values = {"grad_norm": norm, "clipped": float(name == "b"), "exp_avg_norm": None}
                optim.append({"step": step, "parameter": parameter} | values)
        write(tmp_path / name, log, optim)
    (found,) = compared(tmp_path / "a", tmp_path / "b", "--tolerance", tolerance)
    for kind, first in zip(("loss", "parameter"), expected):
        row = found[f"first {kind} difference from a over {tolerance:g} (--tolerance)"]
        assert row == ["-", first]


# --------------------------------------------------------------------------------------------------
# Seeds

SPREAD = "+1.1000: larger than the spread of seeds (paired t test, n = 3, p = {:.2g})"
NONE = "no verdict: both settings need finished runs with the same seeds"


def test_settings_are_compared_by_a_paired_test_over_seeds(tmp_path, compared):
    runs = []
    losses = {0.1: {0: 2.0, 1: 2.1, 2: 1.9}, 0.02: {2: 3.1, 0: 3.0, 1: 3.2}, 0.9: {0: None}}
    for lr, by_seed in losses.items():
        for seed, loss in by_seed.items():
            log = [training_row(1), evaluation(1, loss)]
            runs.append(write(tmp_path / f"{lr}-{seed}", log, max_steps=1, seed=seed, lr=lr))
    table, found = compared(*runs)
    # More than six runs are rows, and the best is the first.
    assert list(table) == ["", "0.1-2", "0.1-0", "0.1-1", "0.02-0", "0.02-2", "0.02-1", "0.9-0"]
    assert table["0.1-2"][0] == "1.9000" and table["0.1-2"][table[""].index("`--lr`")] == "0.1"
    assert found["0.1"] == ["3", "2.0000", "0.1000", "-"] and "0.9" not in found
    # Differences 1.0, 1.1 and 1.2: t = 1.1 / (0.1 / sqrt(3)) = 19.05; df = 2
    p = 1 - 19.0526 / math.sqrt(2 + 19.0526**2)
    assert found["0.02"] == ["3", "3.1000", "0.1000", SPREAD.format(p)]
    assert len(compared(*runs[::3])) == 1  # one seed per setting: no table of settings
    # A run without a finite final loss, or that has not ended, counts in no mean.
    for unfinished in (evaluation(1, None), evaluation(0, 3.1)):
        write(runs[3], [training_row(1), unfinished], max_steps=1, seed=2, lr=0.02)
        assert compared(*runs)[1]["0.02"] == ["2", "3.1000", "0.1414", NONE]


def test_several_comparisons_share_the_chance_of_a_false_alarm():
    first, other = {0: 1.0, 1: 5.0, 2: 9.0}, {2: 11.0, 0: 2.0, 1: 6.5}  # p = 0.035
    assert "larger than the spread" in compare.verdict(first, other, comparisons=1)
    assert "not distinguishable" in compare.verdict(first, other, comparisons=2)


def test_the_recorded_runs_give_the_table_of_the_document(compared):
    page = (ROOT / "docs/benchmarks.md").read_text()
    runs = []
    for name in ("lr-0.008", "lr-0.004", "lr-0.016", "micro-8"):
        runs += [ROOT / f"docs/runs/seeds/{name}-{seed}" for seed in range(10)]
    expected = table_cells(page[page.index("| `--lr` |") :].partition("\n\n")[0])
    assert compared(*runs)[1] == expected


# --------------------------------------------------------------------------------------------------
# The picture


def test_the_picture_has_the_curves_of_each_run_and_a_line_at_each_restart(tmp_path, compared):
    pytest.importorskip("matplotlib", reason="needs tests/requirements-extra.txt")
    losses = {1: 4.0, 2: 3.0, 3: None, 4: 2.0}
    log = [training_row(step, loss=loss) for step, loss in losses.items()]
    a = write(tmp_path / "a", [*log, evaluation(4, 2.5)])
    b = write(tmp_path / "b", [log[0], start_row(step=1), log[1]])
    compared(a, b, "--plot", tmp_path / "curves.svg")
    picture = (tmp_path / "curves.svg").read_text()
    curves, restarts = defaultdict(list), defaultdict(int)  # colour -> points of curves; lines
    for path, colour in re.findall(r'<path d="([^"]*)"[^>]*stroke: (#\w+)', picture):
        x = re.findall(r"[ML] (\S+)", path)
        if len(x) == 2 and x[0] == x[1]:
            restarts[colour] += 1
        else:
            curves[colour].append(len(x))
    # Finite losses of `a`, its evaluation, three more panels, and the line of the legend
    blue, red = "#4559cb", "#c32503"
    assert curves[blue] == [3, 1, 4, 4, 4, 3] and restarts[blue] == 0
    assert curves[red] == [2, 2, 2, 2, 3] and restarts[red] == 5
    texts = re.findall("<!-- (.*) -->", picture)
    assert texts.count("a") == texts.count("b") == 1 and {*compare.COLUMNS} < {*texts}
