"""tools/report.py as `python -m tools.report`, and its page in a browser."""

import html
import json
import math
import multiprocessing
import random
import re
import shutil
import subprocess
import time
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from pathlib import Path

import pytest
from conftest import rows, wait_until

from runtime.run_folder import hold_lock
from tools import report

ROOT = Path(__file__).parent.parent
BEGAN = datetime(2026, 11, 22, 12, tzinfo=UTC)


def at(seconds: float) -> str:
    """The time `seconds` after the first start, as in rows."""
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def training_row(step: int, ended: float, **fields) -> dict:
    """A row written `ended` seconds after the first start."""
    generator = random.Random(step)
    row = {
        "step": step,
        "tokens": 1000 * step,
        "loss": 1 + 4 / step + generator.random() / 10,
        "grad_norm": generator.uniform(0.5, 1.5),
        "lr": 1e-3,
        "clipped": 0,
        "skipped_steps": 0,
        "step_time": 1.0,
        "tokens_per_second": 1000.0,
        "mfu": None,
        "data_wait": 0.25,
        "data_wait_min": 0.125,
        "goodput": 0.9,
        "peak_device_memory": 0,
        "peak_host_memory": 10**9,
        "time": at(ended),
    }
    return row | fields


def save_row(step: int, ended: float) -> dict:
    row = {"step": step, "event": "checkpoint", "bytes": 10**7, "path": "runs/a/checkpoints/x"}
    return row | {"seconds": 1.5, "blocking_seconds": 0.5, "time": at(ended)}


def start_row(step: int, began: float, last_logged: float | None = None, **flags) -> dict:
    logged = None if last_logged is None else at(last_logged)
    config = {"compile": False, "lr": 1e-3} | flags
    row = {"time": at(began), "last_logged": logged, "host": "here", "ranks": 2, "step": step}
    return row | {"config": config, "strategy": "fsdp", "device": "cpu", "dtype": "float32"}


def write_run(folder: Path, log: list[dict], starts: list[dict] | None = None) -> Path:
    starts = starts or [start_row(0, 0)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics.jsonl", log), ("starts.jsonl", starts)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps(starts[-1]["config"]))
    return folder


def training_rows(n: int) -> list[dict]:
    return [training_row(step, step) for step in range(1, n + 1)]


def page_of(tmp_path: Path, *runs: Path) -> Path:
    page = tmp_path / "page.html"
    assert report.main([*map(str, runs), "--out", str(page)]) == 0
    return page


@pytest.fixture
def drawn(tmp_path):
    """drawn(RUN, ...): the data in the script of the page that tools.report writes."""
    return lambda *runs: shown(page_of(tmp_path, *runs))


def shown(page: Path) -> dict:
    return json.loads(re.search(r"const report = (.*);</script>", page.read_text())[1])


def points(run: dict, name: str) -> list[tuple[int, float | None]]:
    """The steps and values of a series."""
    differences, values = run["series"][name]
    return list(zip(accumulate(differences), values))


def of_log(log: list[dict], name: str) -> list[tuple[int, float]]:
    return [(row["step"], float(f"{row[name]:.5g}")) for row in log]


# --------------------------------------------------------------------------------------------------
# Series


@pytest.mark.parametrize("n", [1, 2000])
def test_up_to_2000_rows_are_all_drawn(drawn, tmp_path, n):
    log = training_rows(n)
    (run,) = drawn(write_run(tmp_path / "run", log))["runs"]
    for name in ("loss", "grad_norm", "tokens_per_second"):
        assert points(run, name) == of_log(log, name)
    # What is not known is not drawn
    assert not {"mfu", "peak_device_memory", "val_loss", "clipped"} & run["series"].keys()


def test_more_rows_are_thinned_to_what_stands_out(drawn, tmp_path):
    log = training_rows(5001)
    log[1234]["loss"] = 77.0
    log[1235]["loss"] = 0.01
    log[4321]["grad_norm"] = 55.0
    log[3000]["loss"] = None
    page = drawn(write_run(tmp_path / "run", log))
    (run,) = page["runs"]
    log[3000]["loss"] = math.inf  # which it also stands for
    for name in ("loss", "grad_norm"):
        kept = points(run, name)
        assert 1000 < len(kept) <= page["maxPoints"] == 2000
        assert set(kept) <= set(of_log(log, name))
        for start in range(0, 5001, 6):  # the extremes of any 6 rows, or near them
            bucket = [value for _, value in of_log(log[start : start + 6], name)]
            there = [value for step, value in kept if start - 6 < step <= start + 12]
            assert min(there) <= min(bucket)
            assert max(there) >= max(filter(math.isfinite, bucket))
    assert (1235, 77.0) in points(run, "loss") and (1236, 0.01) in points(run, "loss")


def test_what_is_drawn_beside_the_losses(drawn, tmp_path):
    log = [training_row(10 * k, 10 * k) for k in range(1, 7)]
    log[2] |= {"clipped": 1, "grad_norm": 3.0}
    for k, count in ((3, 2), (4, 2), (5, 3)):
        log[k]["skipped_steps"] = count
    log[1] |= {"step_time": 4.0, "data_wait": 10.0, "data_wait_min": 2.0}  # of ten steps
    log.insert(2, {"step": 20, "val_loss": 2.5, "time": at(21)})
    (run,) = drawn(write_run(tmp_path / "run", log))["runs"]
    assert points(run, "clipped") == [(30, 3.0)]
    assert points(run, "skipped") == [(40, 2), (60, 1)]
    assert points(run, "val_loss") == [(20, 2.5)]
    # Waiting for data is a share of the time; a log's first row has one step.
    assert points(run, "data_wait")[:2] == [(10, 0.25), (20, 0.25)]
    assert points(run, "data_wait_min")[1] == (20, 0.05)
    # Smoothed losses follow the finite ones.
    assert report.smooth([math.nan, 3.0, math.nan, 1.0]) == [3.0, 3.0, 3.0, 1.0]
    smoothed = report.smooth([3.0] * 300 + [0.5] * 300)
    assert smoothed[299] == 3.0 > smoothed[310] > 0.5 == pytest.approx(smoothed[-1], rel=1e-4)


# --------------------------------------------------------------------------------------------------
# The time line


def test_the_time_line_says_what_the_time_went_into(drawn, tmp_path):
    log = [
        training_row(1, 10, step_time=5.0),
        training_row(11, 20),
        {"step": 11, "val_loss": 2.5, "time": at(23)},
        save_row(11, 24),
        training_row(12, 36, step_time=2.0),  # after a second start; a step takes 1 s
        training_row(22, 46, step_time=0.9),  # written late, as on GPUs
        {"step": 22, "val_loss": 2.5, "time": at(47)},
        training_row(32, 60, step_time=1.0),  # --async_save held it up for 3 s
        save_row(22, 60),
    ]
    starts = [start_row(0, 0), start_row(11, 33, last_logged=29, compile=True)]
    (run,) = drawn(write_run(tmp_path / "run", log, starts))["runs"]
    assert run["phases"] == [
        [5, "starting"],
        [15, "training"],
        [3, "evaluating"],
        [1, "saving"],
        [5, "lost steps"],
        [4, "waiting"],
        [1, "starting"],
        [1, "compiling"],
        [11, "training"],
        [1, "evaluating"],
        [3, "saving"],
        [10, "training"],
    ]


def test_the_time_line_agrees_with_the_goodput_of_the_log(drawn):
    for name in ("tiny", "norm"):
        folder = ROOT / "docs/runs" / name
        (run,) = drawn(folder)["runs"]
        last = rows(folder)[-1]
        age = report.seconds(last["time"]) - report.seconds(run["starts"][0]["time"])
        training = sum(seconds for seconds, cause in run["phases"] if cause == "training")
        assert training == pytest.approx(last["goodput"] * age, rel=5e-3)


# --------------------------------------------------------------------------------------------------
# The page


def test_the_page_loads_nothing_and_no_name_ends_its_script(drawn, tmp_path):
    name = '</script><img src=x onerror="alert(1)"> & "a"'.replace("/", "")
    folder = write_run(tmp_path / name, training_rows(3), [start_row(0, 0, data="</script>")])
    shown_page = drawn(folder)
    assert shown_page["runs"][0]["name"] == name
    assert shown_page["runs"][0]["config"]["data"] == "</script>"
    text = (tmp_path / "page.html").read_text("ascii")
    assert text.count("</script>") == 3 and "<img" not in text
    assert "default-src 'none'" in text


def test_runs_are_shown_with_their_table_and_share_the_points(drawn, tmp_path):
    a = write_run(tmp_path / "a", training_rows(1500))
    b = write_run(tmp_path / "b", training_rows(3), [start_row(0, 0, lr=2e-3)])
    page = drawn(a, b)
    assert [run["name"] for run in page["runs"]] == ["a", "b"]
    assert any(
        "`--lr`" in line[0] and line[1:] == ["0.001", "0.002 |"] for line in page["compared"]
    )
    assert 500 < len(points(page["runs"][0], "loss")) <= page["maxPoints"] == 1000


# --------------------------------------------------------------------------------------------------
# --follow


def train_in_front_of(page: Path, folder: Path, problems) -> None:
    """Play a run that logs each row once the page shows those before, then ends."""

    def wait_for_row(n: int) -> None:
        wait_until(lambda: page.exists() and shown(page)["runs"][0]["rows"] == n, 20)
        assert shown(page)["reloadSeconds"] > 0

    try:
        with hold_lock(folder):
            problems.put("locked")
            time.sleep(0.1)  # without a row
            for n in (1, 2):
                write_run(folder, training_rows(n))
                wait_for_row(n)
            write_run(folder, training_rows(3))
    except BaseException as error:
        problems.put(repr(error))
    problems.put("ended")


def test_follow_writes_the_page_anew_until_the_run_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "FOLLOW_SECONDS", 0.05)
    page, folder = tmp_path / "page.html", tmp_path / "run"
    fork = multiprocessing.get_context("fork")
    problems = fork.Queue()
    process = fork.Process(target=train_in_front_of, args=(page, folder, problems))
    process.start()
    assert problems.get(timeout=20) == "locked"
    assert report.main([str(folder), "--out", str(page), "--follow"]) == 0
    process.join(20)
    assert problems.get(timeout=20) == "ended"
    assert shown(page)["runs"][0]["rows"] == 3 and shown(page)["reloadSeconds"] == 0


# --------------------------------------------------------------------------------------------------
# In a browser

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def browse(tmp_path):
    """browse(page, script, ...): what the script returns, run in the page once it is drawn.

    Runs without a network, which the page must not need.
    """
    if not BROWSER:
        pytest.skip("no Chromium here")

    def call(page: Path, script: str):
        result = "JSON.stringify(await (async () => {" + script + "})())"
        probe = (
            f"<script>onload = async () => {{ document.body.dataset.result = {result}; }}</script>"
        )
        probed = tmp_path / "probed.html"
        probed.write_text(page.read_text().replace("</body>", probe + "</body>"))
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path}/profile"]
        command += [f"file://{probed}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        found = re.search(r'data-result="(.*?)"', shown)
        assert found, shown[-2000:]
        return json.loads(html.unescape(found[1]))

    return call


# mouse(chart, type, x, target): a mouse event above x in a chart
MOUSE = """
  const pause = () => new Promise(done => setTimeout(done, 100));
  const mouse = (chart, type, x, target = chart.over) => {
    const {left, top} = chart.over.getBoundingClientRect();
    const place = {clientX: left + chart.valToPos(x, "x"), clientY: top + 9};
    target.dispatchEvent(new MouseEvent(type, {...place, bubbles: true, movementX: 1}));
  };
  const read = (line, part) => line.querySelector(".u-" + part).textContent;
  const legend = chart => [...chart.root.querySelectorAll(".u-series")].map(
    line => [read(line, "label"), read(line, "value")]);
"""


@pytest.mark.slow
def test_a_page_in_a_browser(browse, tmp_path):
    page = page_of(tmp_path, ROOT / "docs/runs/tiny")
    row = next(row for row in rows(ROOT / "docs/runs/tiny") if row["step"] == 500)
    (evaluation,) = [r for r in rows(ROOT / "docs/runs/tiny", "val_loss") if r["step"] == 500]
    script = """mouse(charts[0], "mouseenter", 500.3); mouse(charts[0], "mousemove", 500.3);
        await pause();
        const legends = charts.map(legend);
        const scales = () => charts.map(chart => [chart.scales.x.min, chart.scales.x.max]);
        mouse(charts[0], "mousemove", 200);
        mouse(charts[0], "mousedown", 200);
        mouse(charts[0], "mousemove", 500);
        mouse(charts[0], "mouseup", 500, document);
        await pause();
        const zoomed = scales();
        mouse(charts[0], "dblclick", 300);
        await pause();
        mouse(timeline, "mouseenter", 60); mouse(timeline, "mousemove", 60);
        await pause();
        const loaded = performance.getEntriesByType("resource").length;
        return [legends, zoomed, scales(), legend(timeline), loaded]"""
    legends, zoomed, after, (_, phase), loaded = browse(page, MOUSE + script)
    # The values under the pointer are those of the log
    expected = {
        "training": row["loss"],
        "validation": evaluation["val_loss"],
        "norm": row["grad_norm"],
        "learning rate": row["lr"],
        "tokens/s": row["tokens_per_second"],
        "host": row["peak_host_memory"] / 1e9,
    }
    said = {label: value for legend in legends for label, value in legend}
    for label, value in expected.items():
        assert float(said[label].replace(",", "")) == float(f"{value:.5g}")
    # Dragging zooms all charts, a double click ends it
    assert zoomed == [[pytest.approx(200, abs=5), pytest.approx(500, abs=5)]] * 6
    assert after == [[0, 600]] * 6
    assert phase[1].startswith("training, ") and loaded == 0
