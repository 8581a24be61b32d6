"""tools/compare.py as `python -m tools.compare`."""

import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from conftest import ROOT, rows, start_row

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


def row(found: dict[str, list[str]], beginning: str) -> list[str]:
    """The cells of the one row whose first cell starts with `beginning`."""
    (name,) = [name for name in found if name.startswith(beginning)]
    return found[name]


def training_row(step: int, **values) -> dict:
    return FIRST_ROW | {"step": step, "tokens": 100 * step} | values


def write(folder: Path, metrics: list[dict], optim: list[dict] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics", metrics), ("optim", optim)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_losses(
    folder: Path, losses: dict[int, float | None], evaluations=None, optim=(), **flags
) -> Path:
    """A run folder as train.py leaves it: {step: loss}, {step: validation loss}, optim.jsonl."""
    log = [start_row(**flags)]
    log += [training_row(step, loss=loss) for step, loss in losses.items()]
    log += [{"step": step, "val_loss": loss} for step, loss in (evaluations or {}).items()]
    return write(folder, log, optim)


# --------------------------------------------------------------------------------------------------
# The table of runs


def test_the_table_has_the_numbers_of_the_logs(compared):
    runs = [ROOT / "docs/runs" / name for name in ("norm", "adaptive")]
    (found,) = compared(*runs)
    for beginning, column, combine, spec in (
        ("final validation loss", "val_loss", lambda losses: losses[-1], ".4f"),
        ("best validation loss", "val_loss", min, ".4f"),
        ("training loss at 1,433,600", "loss", lambda losses: statistics.fmean(losses[-7:]), ".4f"),
        ("tokens/s per device", "tokens_per_second_per_device", statistics.median, ",.0f"),
        ("step time in s", "step_time", statistics.median, ".4f"),
        ("peak memory of a rank in GB", "peak_host_memory", lambda n: max(n) / 1e9, ".2f"),
        ("logged steps that were clipped", "clipped", statistics.fmean, ".1%"),
    ):
        of_runs = [combine([row[column] for row in rows(out, column)]) for out in runs]
        assert row(found, beginning) == [format(value, spec) for value in of_runs]
    assert row(found, "MFU") == ["none", "none"] and row(found, "ranks") == ["2", "2"]
    assert {name for name in found if name.startswith("`--")} == {"`--clip`"}
    assert found["`--clip`"] == ["norm", "adaptive"]


def test_memory_is_that_of_the_device_and_mfu_that_of_the_rows_that_have_it(tmp_path, compared):
    log = [start_row()]
    for step, size, mfu, skipped in ((1, 7, 0.5, 0), (2, 9, None, 1), (3, 8, 0.3, 1000)):
        log.append(
            training_row(step, peak_device_memory=size * 1e9, mfu=mfu, skipped_steps=skipped)
        )
    (found,) = compared(write(tmp_path / "run", log))
    assert row(found, "peak memory of a rank in GB") == ["9.00"]
    assert row(found, "MFU") == ["40.0%"] and row(found, "steps skipped") == ["1,000"]


def test_a_torn_line_and_rows_that_a_restart_repeats_do_not_count(tmp_path, compared):
    runs = [write_losses(tmp_path / name, {1: 3.0, 2: 2.0}, {2: 2.5}) for name in "ab"]
    void = [training_row(3, loss=9.0, peak_host_memory=9e9), {"step": 3, "val_loss": 0.1}]
    with open(runs[1] / "metrics.jsonl", "a") as log:
        for each in (*void, start_row(step=2, seed=1)):
            log.write(json.dumps(each) + "\n")
        log.write('{"step": 3, "lo')  # torn
    (found,) = compared(*runs)
    assert found["best validation loss"] == found["final validation loss"] == ["2.5000", "2.5000"]
    assert found["peak memory of a rank in GB"] == ["0.41", "0.41"]
    assert found["`--seed`"] == ["None", "1"]  # of the last start
    assert row(found, "first loss") == ["-", "never: at most 0 in 2 steps that both runs logged"]


def test_losses_are_means_over_the_same_tokens_and_missing_ones_not_nan(tmp_path, compared):
    steps = range(1, 101)
    often = write_losses(tmp_path / "often", {n: 100.0 - n for n in steps}, {50: 2.25, 100: 2.5})
    seldom = write_losses(tmp_path / "seldom", {1: 99.0, 50: 50.0, 95: 5.0, 100: 0.0, 150: 0.0})
    once = write_losses(tmp_path / "once", {1: 99.0, 250: 0.0})
    nan = write_losses(
        tmp_path / "nan", {n: 1.0 if n < 91 else None for n in steps}, {9: 2, 99: None}
    )
    (found,) = compared(often, seldom, once, nan)
    # The means are over steps 91 to 100 of `often`, and 95 and 100 of `seldom`; `once` has none.
    losses = ["4.5000", "2.5000", "none", "none"]
    assert found["training loss at 10,000 tokens"] == losses
    assert found["final validation loss"] == ["2.5000", "none", "none", "nan"]
    assert found["best validation loss"] == ["2.2500", "none", "none", "2.0000"]


def test_a_mistake_is_one_line_with_status_2(tmp_path, capsys):
    run = str(write_losses(tmp_path / "run", {1: 3.0}))
    no_row = str(write_losses(tmp_path / "none", {}))
    for arguments in (
        [],
        [str(tmp_path)],
        [no_row],
        [run, "--tolerance=-1"],
        [run, "--plot", "a.b"],
    ):
        assert compare.main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1


# --------------------------------------------------------------------------------------------------
# The first difference

LOSSES = {1: 4.0, 10: 3.0, 20: 2.0}


@pytest.mark.parametrize(
    "losses, evaluations, tolerance, first",
    [
        (LOSSES, {}, 0, "never: at most 0 in 3 steps that both runs logged"),
        (LOSSES | {10: 3.0000003}, {}, 0, "step 10: training loss by 1e-07"),
        (
            LOSSES | {10: 3.0000003},
            {},
            1e-6,
            "never: at most 1e-07 in 3 steps that both runs logged",
        ),
        (LOSSES | {10: 2.99999, 20: 2.1}, {}, 1e-6, "step 10: training loss by 3e-06"),
        (LOSSES | {20: None}, {}, 0.01, "step 20: training loss by inf"),
        ({5: 3.0, 15: 2.0}, {}, 0.01, "never: at most 0 in 0 steps that both runs logged"),
        (LOSSES | {10: 2.9}, {10: 2.4}, 0.01, "step 10: validation loss by 0.2, and 1 more"),
    ],
)
def test_the_first_loss_that_differs(tmp_path, compared, losses, evaluations, tolerance, first):
    a = write_losses(tmp_path / "a", LOSSES, {10: 3.0})
    b = write_losses(tmp_path / "b", losses, evaluations)
    (found,) = compared(a, b, "--tolerance", tolerance)
    assert row(found, f"first loss difference from a over {tolerance:g}") == ["-", first]


# The statistics of a parameter, equal in all of three steps
STATISTICS = dict(grad_norm=2.0, weight_norm=10.0, exp_avg_norm=1.0, update_ratio=0.01, clipped=0.0)
# Too small for float32; of another optimizer
STATISTICS |= dict(exp_avg_sq_norm=0.0, momentum_buffer_norm=None)


@pytest.mark.parametrize(
    "changes, first",
    [
        # The parameter that differs most, and its gradient before what depends on it
        (
            {"2a": {"grad_norm": 1.9, "exp_avg_norm": 0.1}, "2b": {"grad_norm": 1.0}},
            "step 2: b grad_norm by 0.5, and 1 more",
        ),
        # Rounding may grow from 0.009 to 0.5, and decide what is clipped.
        (
            {"1b": {"grad_norm": 1.982}, "2a": {"clipped": 1.0}, "3a": {"grad_norm": 1.0}},
            "never: at most 0.5 in 3 steps that both runs logged",
        ),
        ({"2a": {"grad_norm": None}}, "step 2: a grad_norm by inf"),
        # More than updates explain, so the weights differed before
        (
            {"1a": {"weight_norm": 10.3}, "1b": {"grad_norm": 1.0}},
            "step 1: a weight_norm by 0.03, and 1 more",
        ),
        # No more than the updates of both runs
        (
            {"1a": {"weight_norm": 10.15}, "1b": {"grad_norm": 1.0}},
            "step 1: b grad_norm by 0.5, and 1 more",
        ),
    ],
)
def test_the_first_parameter_that_differs(tmp_path, compared, changes, first):
    runs = []
    for name, changed in (("a", {}), ("b", changes)):
        optim = []
        for step, parameter in itertools.product((1, 2, 3), "ab"):
            values = STATISTICS | changed.get(f"{step}{parameter}", {})
            optim.append({"step": step, "parameter": parameter} | values)
        runs.append(write_losses(tmp_path / name, LOSSES, optim=optim))
    (found,) = compared(*runs)
    assert row(found, "first parameter difference from a over 0.01") == ["-", first]


# --------------------------------------------------------------------------------------------------
# Seeds


def test_settings_are_compared_by_a_test_over_seeds(tmp_path, compared):
    runs = []
    for lr, losses in ((0.1, (2.0, 2.1, 1.9)), (0.02, (3.0, 3.2, 3.1)), (0.9, (None,))):
        for seed, loss in enumerate(losses):
            flags = {"max_steps": 1, "seed": seed, "lr": lr}
            runs.append(write_losses(tmp_path / f"{lr}-{seed}", {1: loss}, {1: loss}, **flags))
    table, found = compared(*runs)
    # More than six runs are rows, and the best is the first.
    assert list(table) == ["", "0.1-2", "0.1-0", "0.1-1", "0.02-0", "0.02-2", "0.02-1", "0.9-0"]
    assert table["0.1-2"][0] == "1.9000" and table["0.1-2"][table[""].index("`--lr`")] == "0.1"
    assert found["0.1"] == ["3", "2.0000", "0.1000", "-"] and "0.9" not in found
    # Differences 1.0, 1.1 and 1.2: t = 1.1 / (0.1 / sqrt(3)) = 19.05; df = 2
    p = 1 - 19.0526 / math.sqrt(2 + 19.0526**2)
    word = f"+1.1000: larger than the spread of seeds (paired t test, n = 3, p = {p:.2g})"
    assert found["0.02"] == ["3", "3.1000", "0.1000", word]

    assert len(compared(*runs[::3])) == 1  # one seed per setting: no table of settings
    # A run without a finite final loss, or that has not ended, counts in no mean.
    no_word = "no verdict: both settings need finished runs with the same seeds"
    flags = {"max_steps": 1, "seed": 2, "lr": 0.02}
    for evaluations in ({1: None}, {0: 3.1}):
        write_losses(runs[5], {1: 3.1}, evaluations, **flags)
        assert compared(*runs)[1]["0.02"] == ["2", "3.1000", "0.1414", no_word]


def test_losses_are_paired_by_seed_and_p_values_corrected_for_several_comparisons():
    first, other = {0: 1.0, 1: 5.0, 2: 9.0}, {2: 11.0, 0: 2.0, 1: 6.5}
    test = "paired t test, n = 3, p = 0.035"  # t = 1.5 / (0.5 / sqrt(3))
    spread = f"+1.5000: larger than the spread of seeds ({test})"
    assert compare.verdict(first, other, comparisons=1) == spread
    word = f"+1.5000: not distinguishable ({test}, x 2 comparisons)"
    assert compare.verdict(first, other, comparisons=2) == word


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
    a = write_losses(tmp_path / "a", {1: 4.0, 2: 3.0, 3: None, 4: 2.0}, {4: 2.5})
    b = [start_row(), training_row(1), training_row(3), start_row(step=2), training_row(3)]
    compared(a, write(tmp_path / "b", b), "--plot", tmp_path / "curves.svg")
    picture = (tmp_path / "curves.svg").read_text()
    curves, restarts = defaultdict(list), defaultdict(int)  # colour -> points of curves; lines
    for path, colour in re.findall(r'<path d="([^"]*)"[^>]*stroke: (#\w+)', picture):
        x = re.findall(r"[ML] (\S+)", path)
        if len(x) == 2 and x[0] == x[1]:
            restarts[colour] += 1
        else:
            curves[colour].append(len(x))
    blue, orange = "#1f77b4", "#ff7f0e"
    # Finite losses of `a`, its evaluation, three more panels, and the line of the legend
    assert curves[blue] == [3, 1, 4, 4, 4, 3] and restarts[blue] == 0
    assert curves[orange] == [2, 2, 2, 2, 3] and restarts[orange] == 5
    texts = re.findall("<!-- (.*) -->", picture)
    assert texts.count("a") == texts.count("b") == 1 and {*compare.PANELS.values()} < {*texts}
