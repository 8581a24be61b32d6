"""tools/compare.py as `python -m tools.compare`."""

import json
import math
import re
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
    """Training losses are means over the same tokens: the last tenth that all runs have seen."""
    log = []
    for step, loss, size, mfu in ((18, 9.0, 7, 0.5), (19, 5.0, 9, None), (20, 4.0, 8, 0.3)):
        speed = {"tokens_per_second_per_device": 1e3 * size, "mfu": mfu, "skipped_steps": step}
        log.append(training_row(step, loss=loss, peak_device_memory=1e9 * size, **speed))
    log += [training_row(21, loss=9.0, tokens_per_second_per_device=8e3)]
    log += [evaluation(18, 2.25), evaluation(20, 2.5), evaluation(21, 2.375)]
    on_device = write(tmp_path / "a", log, max_steps=21)
    on_cpu = [training_row(20, peak_host_memory=2e9, loss=3.0), evaluation(20, None)]
    (found,) = compared(on_device, write(tmp_path / "b", on_cpu, max_steps=21))
    assert found == {
        "": ["a", "b"],
        "final validation loss": ["2.3750", "none"],
        "training loss at 2,000 tokens": ["4.5000", "3.0000"],
        "best validation loss": ["2.2500", "none"],
        "tokens/s per device, median": ["8,000", "10,000"],
        "MFU, median": ["40.0%", "none"],
        "peak memory of a rank in GB": ["9.00", "2.00"],
        "steps skipped": ["20", "0"],
        "ranks": ["2", "2"],
        "first loss difference from a over 0.01 (--tolerance)": [
            *("-", "step 20: validation loss by inf")
        ],
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


def test_a_mistake_is_one_line_with_status_2(tmp_path):
    run, empty = write(tmp_path / "run", [training_row(1)]), write(tmp_path / "empty", [])
    for words in ([], [empty], [run, "--tolerance=-1"], [run, "--plot=a.b"]):
        status, printed, error = run_command([*map(str, words)], compare.main)
        assert (status, printed, error.count("\n")) == (2, "", 1), words


# Training and validation losses of steps 1 to 3, which are 3 in another run | --tolerance | the
# first difference
CHANGES = """
3 3.0000003 3   | 3 3   3 | 1e-6 | never: at most 1e-07 in 3 steps
3 2.99999   2.1 | 3 3   3 | 1e-6 | step 2: training loss by 3e-06
3 2.9       3   | 3 2.4 3 | 0.01 | step 2: validation loss by 0.2
3 3        null | 3 3   3 | 0.01 | step 3: training loss by inf
"""


@pytest.mark.parametrize("row", cells(CHANGES), ids=" ".join)
def test_the_largest_difference_of_the_first_step_that_differs(tmp_path, row):
    changed, val_changed, tolerance, first = row
    runs = {"a": ("3 3 3", "3 3 3", 2.0, 5), "b": (changed, val_changed, 1.0, 4)}
    for name, (losses, val_losses, norm, last) in runs.items():
        log = [training_row(last)]  # of one run alone, so it does not count
        for step, loss, val_loss in zip((1, 2, 3), losses.split(), val_losses.split()):
            log.append(training_row(step, loss=json.loads(loss)))
            log.append(evaluation(step, json.loads(val_loss)))
        # Rounding decides what is clipped.
        optim = {"step": 2, "parameter": "w", "grad_norm": norm, "clipped": 2 * norm}
        write(tmp_path / name, log, [optim])
    (found,) = compared(tmp_path / "a", tmp_path / "b", "--tolerance", tolerance)
    title = f"difference from a over {float(tolerance):g} (--tolerance)"
    assert found[f"first loss {title}"][1].startswith(first)
    assert found[f"first parameter {title}"] == ["-", "step 2: w grad_norm by 0.5"]


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
    assert found["0.1"] == ["3", "2.0000", "0.1000", "-"] and "0.9" not in found
    # Differences 1.0, 1.1 and 1.2: t = 1.1 / (0.1 / sqrt(3)) = 19.05; df = 2
    p = 1 - 19.0526 / math.sqrt(2 + 19.0526**2)
    verdict = f"+1.1000: larger than the spread of seeds (paired t test, n = 3, p = {p:.2g})"
    assert found["0.02"] == ["3", "3.1000", "0.1000", verdict]
    # A run without a finite final loss counts in no mean.
    write(runs[3], [training_row(1), evaluation(1, None)], max_steps=1, seed=2, lr=0.02)
    assert compared(*runs)[1]["0.02"][:3] == ["2", "3.1000", "0.1414"]


def test_several_comparisons_share_the_chance_of_a_false_alarm():
    first, other = {0: 1.0, 1: 5.0, 2: 9.0}, {2: 11.0, 0: 2.0, 1: 6.5}  # p = 0.035
    assert "larger than the spread" in compare.verdict(first, other, comparisons=1)
    assert "not distinguishable" in compare.verdict(first, other, comparisons=2)


def test_the_picture_shows_all_runs(tmp_path):
    pytest.importorskip("matplotlib", reason="needs tests/requirements-extra.txt")
    a = write(tmp_path / "a", [training_row(1), evaluation(1, 2.5), training_row(2, loss=None)])
    b = write(tmp_path / "b", [training_row(1), start_row(step=1), training_row(2)])
    compared(a, b, "--plot", tmp_path / "curves.svg")
    texts = re.findall("<!-- (.*) -->", (tmp_path / "curves.svg").read_text())
    assert {"a", "b", "loss", "val_loss"} <= {*texts}
