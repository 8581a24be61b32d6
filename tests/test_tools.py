"""tools/compare.py as `python -m tools.compare`."""

import itertools
import json
import math
import statistics
from pathlib import Path

import pytest
from conftest import ROOT, rows, start_row

from tools import compare

# --------------------------------------------------------------------------------------------------
# compare


FIRST_ROW = rows(ROOT / "docs/runs/tiny")[0]


def table_cells(table: str) -> dict[str, list[str]]:
    """First cell of each row -> the other cells, without the asterisks of bold text."""
    found = {}
    for line in table.splitlines():
        name, *values = [cell.strip(" *") for cell in line.strip("|").split("|")]
        found[name] = values
    return found


@pytest.fixture
def compared(capsys):
    """compared(RUN, ...): the cells of the table that tools.compare prints."""

    def call(*arguments) -> dict[str, list[str]]:
        status = compare.main([str(argument) for argument in arguments])
        answer = capsys.readouterr()
        assert status == 0, answer.err
        return table_cells(answer.out)

    return call


def row(found: dict[str, list[str]], beginning: str) -> list[str]:
    """The cells of the one row whose first cell starts with `beginning`."""
    (name,) = [name for name in found if name.startswith(beginning)]
    return found[name]


def four_digits(losses: list[float]) -> list[str]:
    return [f"{loss:.4f}" for loss in losses]


def write_losses(
    folder: Path, losses: dict[int, float | None], evaluations=(), statistics=(), **config
) -> Path:
    """A run folder as train.py leaves it: step -> loss, (step, validation loss), optim.jsonl."""
    log = [start_row(**{"compile": False} | config)]
    for step, loss in losses.items():
        row = {"step": step, "tokens": 100 * step, "loss": loss, "skipped_steps": step // 10}
        log.append(FIRST_ROW | row | {"step_time": 0.5, "time": "2026-11-28T00:00:01+00:00"})
    for step, val_loss in evaluations:
        log.append({"step": step, "val_loss": val_loss, "time": "2026-11-28T00:00:02+00:00"})
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics", log), ("optim", statistics)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def test_compare_prints_the_numbers_of_the_logs(compared):
    runs = [ROOT / "docs/runs" / name for name in ("norm", "adaptive")]
    found = compared(*runs)
    val_losses = [[row["val_loss"] for row in rows(out, "val_loss")] for out in runs]
    best = [min(losses) for losses in val_losses]
    assert found["final validation loss"] == four_digits([losses[-1] for losses in val_losses])
    assert found["best validation loss"] == four_digits(best)
    last = [[row["loss"] for row in rows(out) if 630 < row["step"] <= 700] for out in runs]
    (name,) = [name for name in found if name.startswith("training loss at ")]
    assert found[name] == four_digits(map(statistics.fmean, last))
    times = found[f"seconds to validation loss {max(best):.4f}"]
    for seconds, out in zip(times, runs, strict=True):
        assert 0 <= float(seconds) <= 700 * max(row["step_time"] for row in rows(out))
    different = {name: values for name, values in found.items() if name.startswith("`--")}
    assert different == {"`--clip`": ["norm", "adaptive"]}


def test_compare_skips_lines_that_are_not_rows(tmp_path, compared):
    runs = [write_losses(tmp_path / name, {1: 3.0, 2: 2.0}, [(2, 2.5)]) for name in "ab"]
    with open(runs[1] / "metrics.jsonl", "a") as log:
        log.write('{"note": "lr looks high"}\n12\n{"step": 3, "lo')  # torn
    assert compared(*runs)["final validation loss"] == ["2.5000", "2.5000"]


def test_training_losses_are_means_over_the_same_tokens(tmp_path, compared):
    steps = range(1, 101)
    often = write_losses(tmp_path / "often", {step: 100.0 - step for step in steps}, [(100, 1.0)])
    seldom = write_losses(tmp_path / "seldom", {1: 99.0, 50: 50.0, 95: 5.0, 100: 0.0, 150: 0.0})
    once = write_losses(tmp_path / "once", {1: 99.0, 250: 0.0})
    nan = write_losses(tmp_path / "nan", {step: None if step > 90 else 1.0 for step in steps})
    found = compared(often, seldom, once, nan)
    # The means are over steps 91 to 100 of `often`, and 95 and 100 of `seldom`; `once` has none.
    losses = ["4.5000", "2.5000", "none", "none"]
    assert found["training loss at 10,000 tokens"] == losses
    assert found["steps skipped"] == ["10", "15", "25", "10"]


def test_a_missing_evaluation_is_not_printed_as_nan(tmp_path, compared):
    good = write_losses(tmp_path / "good", {1: 3.0, 2: 2.0}, [(1, 3.0), (2, 2.5)])
    nan = write_losses(tmp_path / "nan", {1: 3.0, 2: 2.0}, [(1, 2.75), (2, None)])
    young = write_losses(tmp_path / "young", {1: 3.0})
    found = compared(good, nan, young)
    assert found["final validation loss"] == ["2.5000", "nan", "none"]
    assert found["best validation loss"] == ["2.5000", "2.7500", "none"]
    assert found["seconds to validation loss 2.7500"] == ["1.0", "0.5", "none"]


def test_seconds_to_a_loss_start_at_the_first_logged_step(tmp_path, compared):
    more = [(110, 2.0), (120, 1.5), (130, 2.0)]
    later = write_losses(tmp_path / "later", {101: 3.0, 110: 2.0, 120: 2.0, 130: 2.0}, more)
    assert row(compared(later), "seconds") == ["10.0"]


LOSSES = {1: 4.0, 10: 3.0, 20: 2.0}


@pytest.mark.parametrize(
    "losses, tolerance, first",
    [
        (LOSSES, 1e-6, "never: at most 0 in 3 steps that both runs logged"),
        (LOSSES | {10: 3.0000001}, 1e-6, "never: at most 3e-08 in 3 steps that both runs logged"),
        (LOSSES | {10: 2.99999, 20: 2.1}, 1e-6, "step 10: training loss by 3e-06"),
        (LOSSES | {20: None}, 0.01, "step 20: training loss by inf"),
        ({5: 3.0, 15: 2.0}, 0.01, "never: at most 0 in 0 steps that both runs logged"),
    ],
)
def test_compare_prints_where_two_runs_first_differ(tmp_path, compared, losses, tolerance, first):
    a = write_losses(tmp_path / "a", LOSSES)
    b = write_losses(tmp_path / "b", losses)
    found = compared(a, b, "--tolerance", tolerance)
    assert row(found, f"first loss difference from a over {tolerance:g}") == ["-", first]
    assert row(found, "final validation loss") == ["none", "none"]


# The statistics of a parameter, equal in all of three steps
STATISTICS = {
    "grad_norm": 2.0,
    "weight_norm": 10.0,
    "exp_avg_norm": 1.0,
    "exp_avg_sq_norm": 0.0,  # too small for float32
    "momentum_buffer_norm": None,  # of another optimizer
    "update_norm": 0.1,
    "update_ratio": 0.01,
    "clipped": 0.0,
}


def statistics_of(changes: dict[tuple[int, str], dict]) -> list[dict]:
    """The rows of two parameters, with changes by step and parameter."""
    found = []
    for key in itertools.product((1, 2, 3), "ab"):
        found.append({"step": key[0], "parameter": key[1]} | STATISTICS | changes.get(key, {}))
    return found


@pytest.mark.parametrize(
    "changes, first",
    [
        (  # the parameter that differs most, and its gradient before what depends on it
            {(2, "a"): {"grad_norm": 1.9, "exp_avg_norm": 0.1}, (2, "b"): {"grad_norm": 1.0}},
            "step 2: b grad_norm by 0.5, and 1 more",
        ),
        # Rounding may grow from 0.009 to 0.5.
        (
            {(1, "b"): {"grad_norm": 1.982}, (3, "a"): {"grad_norm": 1.0}},
            "never: at most 0.5 in 3 steps that both runs logged",
        ),
        ({(2, "a"): {"grad_norm": None}}, "step 2: a grad_norm by inf"),
        (  # more than updates explain: the weights differed before
            {(1, "a"): {"weight_norm": 12.0}, (1, "b"): {"grad_norm": 1.0}},
            "step 1: a weight_norm by 0.2, and 1 more",
        ),
    ],
)
def test_compare_prints_the_first_parameter_that_differs(tmp_path, compared, changes, first):
    a = write_losses(tmp_path / "a", LOSSES, statistics=statistics_of({}))
    b = write_losses(tmp_path / "b", LOSSES, statistics=statistics_of(changes))
    found = compared(a, b)
    assert row(found, "first parameter difference from a over 0.01 (--tolerance)") == ["-", first]


# --------------------------------------------------------------------------------------------------
# studies


def sweep(root: Path) -> list[Path]:
    """Seven runs of one step: two settings of three seeds, and a run that diverged."""
    runs = []
    final_losses = {0.1: (2.0, 2.1, 1.9), 0.02: (3.0, 3.2, 3.1)}
    for lr, losses in final_losses.items():
        for seed, loss in enumerate(losses):
            flags = {"max_steps": 1, "seed": seed, "lr": lr, "clip": "norm"}
            folder = root / f"lr-{lr}-seed-{seed}"
            runs.append(write_losses(folder, {1: loss}, [(1, loss)], **flags))
    flags |= {"lr": 0.9, "seed": 0}
    return [*runs, write_losses(root / "high", {1: None}, [(1, None)], **flags)]


NO_WORD = "no verdict: both settings need finished runs with the same seeds"


def seeds(out: str) -> dict[str, list[str]]:
    """The table of settings: first cell -> the other cells."""
    return table_cells(out.split("\n\n")[1])


def test_many_runs_are_sorted_by_final_loss(tmp_path, capsys):
    *runs, high = [str(run) for run in sweep(tmp_path)]
    assert compare.main([*runs, high]) == 0
    header, _, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split("|")[2].strip() == "final validation loss" and "| `--lr` |" in header
    by_loss = [f"lr-0.1-seed-{seed}" for seed in (2, 0, 1)]
    by_loss += [f"lr-0.02-seed-{seed}" for seed in (0, 2, 1)]
    assert [line.split("|")[1].strip() for line in lines] == [*by_loss, "high"]
    assert lines[0].split("|")[2].strip() == "1.9000"


def test_settings_are_compared_by_a_test_over_seeds(tmp_path, capsys):
    *runs, high = [str(run) for run in sweep(tmp_path)]
    assert compare.main(runs) == 0
    found = seeds(capsys.readouterr().out)
    assert found["0.1"] == ["3", "2.0000", "0.1000", "-"]
    # Differences 1.0, 1.1 and 1.2: t = 1.1 / (0.1 / sqrt(3)) = 19.05; df = 2
    p = 1 - 19.0526 / math.sqrt(2 + 19.0526**2)
    word = f"+1.1000: larger than the spread of seeds (paired t test, n = 3, p = {p:.2g})"
    assert found["0.02"] == ["3", "3.1000", "0.1000", word]

    assert compare.main([*runs[:2], *runs[4:], high]) == 0
    found = seeds(capsys.readouterr().out)
    assert found["0.02"] == ["2", "3.1500", "0.0707", NO_WORD]
    assert "0.9" not in found
    assert compare.main([*runs[::3], high]) == 0
    assert "\n\n" not in capsys.readouterr().out  # one seed per setting: no table of settings

    # A run without a finite final loss counts in no mean.
    log = Path(runs[5], "metrics.jsonl")
    log.write_text(log.read_text().replace('"val_loss": 3.1', '"val_loss": null'))
    assert compare.main(runs) == 0
    found = seeds(capsys.readouterr().out)
    assert found["0.02"] == ["2", "3.1000", "0.1414", NO_WORD]


def test_p_values_are_corrected_for_several_comparisons():
    first, other = {0: 1.0, 1: 1.0, 2: 1.0}, {0: 2.0, 1: 2.5, 2: 3.0}
    test = "paired t test, n = 3, p = 0.035"  # t = 1.5 / (0.5 / sqrt(3))
    spread = f"+1.5000: larger than the spread of seeds ({test})"
    assert compare.verdict(first, other, comparisons=1) == spread
    word = f"+1.5000: not distinguishable ({test}, x 2 comparisons)"
    assert compare.verdict(first, other, comparisons=2) == word


def test_losses_are_paired_by_their_seeds_in_any_order():
    first, other = {0: 1.0, 1: 5.0, 2: 9.0}, {2: 9.5, 0: 1.6, 1: 5.4}
    assert compare.verdict(first, other, 1) == compare.verdict(
        first, dict(sorted(other.items())), 1
    )
