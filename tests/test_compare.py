"""tools/compare.py as `python -m tools.compare`."""

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from rig import cells, run_command

from tools import compare

ROW = {"loss": 4.0, "grad_norm": 1.0, "mfu": None, "skipped_steps": 0, "peak_host_memory": 1e9}
ROW |= {"tokens_per_second_per_device": 1e4, "peak_device_memory": 0}


def compared(*arguments) -> list[dict[str, list[str]]]:
    """The tables that tools.compare prints: first cell of each row -> the other cells."""
    status, printed, error = run_command([*map(str, arguments)], compare.main)
    assert status == 0, error
    found = []
    for table in printed.split("\n\n"):
        lines = [line.strip("|").split("|") for line in table.splitlines() if "---" not in line]
        rows = [[cell.strip() for cell in line] for line in lines]
        found.append({name: others for name, *others in rows})
    return found


def start_row(step: int = 0, **flags) -> dict:
    return {"step": step, "event": "start", "config": flags, "ranks": 2}


def training_row(step: int, **values) -> dict:
    return ROW | {"step": step, "tokens": 100 * step} | values


def evaluation(step: int, loss: float | None) -> dict:
    return {"step": step, "val_loss": loss}


def write(folder: Path, metrics: list[dict], optim: list[dict] = (), **flags) -> Path:
    """A run folder as train.py leaves it, with the rows after those of its first start."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics", metrics), ("optim", optim)):
        lines = [start_row(**flags), *lines]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_table_has_the_numbers_of_the_logs(tmp_path):
    log = []
    for step, size, mfu, skipped in ((1, 7, 0.5, 0), (2, 9, None, 1), (3, 8, 0.3, 2)):
        values = {"tokens_per_second_per_device": 1e3 * size, "mfu": mfu, "skipped_steps": skipped}
        log.append(training_row(step, peak_device_memory=1e9 * size, **values))
    log += [evaluation(1, 2.25), evaluation(2, 2.5), evaluation(3, 2.375)]
    on_device = write(tmp_path / "a", log, max_steps=3, clip="norm")
    on_cpu = [training_row(1, peak_host_memory=2e9, loss=3.0), evaluation(1, None)]
    (found,) = compared(on_device, write(tmp_path / "b", on_cpu, max_steps=3, clip="adaptive"))
    assert found == {
        "": ["a", "b"],
        "final validation loss": ["2.3750", "none"],
        "training loss at 100 tokens": ["4.0000", "3.0000"],
        "best validation loss": ["2.2500", "none"],
        "tokens/s per device, median": ["8,000", "10,000"],
        "MFU, median": ["40.0%", "none"],
        "peak memory of a rank in GB": ["9.00", "2.00"],
        "steps skipped": ["2", "0"],
        "ranks": ["2", "2"],
        "first loss difference from a over 0.01 (--tolerance)": [
            *("-", "step 1: validation loss by inf")
        ],
        "`--clip`": ["norm", "adaptive"],
    }


def test_rows_that_a_restart_repeats_do_not_count(tmp_path):
    log = [training_row(1), training_row(2), evaluation(2, 2.5)]
    void = [training_row(3, loss=9.0, peak_host_memory=9e9), evaluation(3, 0.1)]
    a = write(tmp_path / "a", log, max_steps=2, lr=1)
    b = write(tmp_path / "b", [*log, *void, start_row(2, max_steps=2, lr=2)], max_steps=3, lr=1)
    (found,) = compared(a, b)
    assert found["best validation loss"] == found["final validation loss"] == ["2.5000", "2.5000"]
    assert found["peak memory of a rank in GB"] == ["1.00", "1.00"]
    assert found["`--lr`"] == ["1", "2"] and "`--max_steps`" not in found  # of the last start


def test_training_losses_are_means_over_the_same_tokens(tmp_path):
    losses = {
        "often": {n: 100.0 - n for n in range(1, 101)},  # the last tenth is steps 91 to 100
        "seldom": {1: 99.0, 90: 50.0, 95: 5.0, 100: 0.0, 150: 0.0},
        "once": {1: 99.0, 250: 0.0},
    }
    for name, by_step in losses.items():
        write(tmp_path / name, [training_row(step, loss=loss) for step, loss in by_step.items()])
    (found,) = compared(*(tmp_path / name for name in losses))
    assert found["training loss at 10,000 tokens"] == ["4.5000", "2.5000", "none"]


def test_a_mistake_is_one_line_with_status_2(tmp_path):
    run, empty = write(tmp_path / "run", [training_row(1)]), write(tmp_path / "empty", [])
    for words in ([], [empty], [run, "--tolerance=-1"], [run, "--plot=a.b"]):
        status, printed, error = run_command([*map(str, words)], compare.main)
        assert (status, printed, error.count("\n")) == (2, "", 1), words


# Two runs have the same values, but those of the second change:
# step, of what, value, ... | --tolerance | kind | the first difference of this kind
CHANGES = """
                           | 0    | loss      | never: at most 0 in 3 steps
2 loss 3.0000003           | 1e-6 | loss      | never: at most 1e-07 in 3 steps
3 loss 3.0000003           | 0    | loss      | step 3: training loss by 1e-07
2 loss 2.99999, 3 loss 2.1 | 1e-6 | loss      | step 2: training loss by 3e-06
2 loss 2.9, 2 val_loss 2.4 | 0.01 | loss      | step 2: validation loss by 0.2
3 loss null                | 0.01 | loss      | step 3: training loss by inf
2 b 1.9, 3 b 0.1           | 1e-6 | parameter | step 2: b grad_norm by 0.05
2 a 1.9, 2 b 1.0           | 0.01 | parameter | step 2: b grad_norm by 0.5
2 a null                   | 0.01 | parameter | step 2: a grad_norm by inf
"""


@pytest.mark.parametrize("row", cells(CHANGES), ids=" ".join)
def test_the_largest_difference_of_the_first_step_that_differs(tmp_path, row):
    changes, tolerance, kind, first = row
    changed = {}
    for change in filter(None, changes.split(", ")):
        step, name, value = change.split()
        changed[int(step), name] = json.loads(value)
    for name, values, last in (("a", {}, 5), ("b", changed, 4)):  # steps 4 and 5 do not count
        log, optim = [], []
        for step in (1, 2, 3, last):
            log.append(training_row(step, loss=values.get((step, "loss"), 3.0)))
            log.append(evaluation(step, values.get((step, "val_loss"), 3.0)))
            for parameter in "ab":
                norm = values.get((step, parameter), 2.0)
                # Rounding decides what is clipped. Some columns are of one of the optimizers.
                row = {"grad_norm": norm, "clipped": float(name == "b"), "exp_avg_norm": None}
                optim.append({"step": step, "parameter": parameter} | row)
        write(tmp_path / name, log, optim)
    (found,) = compared(tmp_path / "a", tmp_path / "b", "--tolerance", tolerance)
    for each in ("loss", "parameter"):
        limit = f"{float(tolerance):g} (--tolerance)"
        of_first, other = found[f"first {each} difference from a over {limit}"]
        assert of_first == "-" and other.startswith(first if each == kind else "never")


# --------------------------------------------------------------------------------------------------
# Seeds

SPREAD = "+1.1000: larger than the spread of seeds (paired t test, n = 3, p = {:.2g})"
NONE = "no verdict: both settings need finished runs with the same seeds"


def test_settings_are_compared_by_a_paired_test_over_seeds(tmp_path):
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


def test_the_picture_has_the_curves_of_each_run_and_a_line_at_each_restart(tmp_path):
    pytest.importorskip("matplotlib", reason="needs tests/requirements-extra.txt")
    log = [
        training_row(step, loss=loss) for step, loss in ((1, 4.0), (2, 3.0), (3, None), (4, 2.0))
    ]
    a = write(tmp_path / "a", [*log, evaluation(4, 2.5)])
    b = write(tmp_path / "b", [log[0], start_row(step=1), log[1]])
    compared(a, b, "--plot", tmp_path / "curves.svg")
    curves, restarts = defaultdict(list), Counter()  # colour -> points of curves; lines
    picture = (tmp_path / "curves.svg").read_text()
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
