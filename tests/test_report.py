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
from pathlib import Path

import pytest
from conftest import ROOT, fork_ranks, rows, start_row, wait_until

from start import hold_lock
from tools import report

BEGAN = datetime(2026, 11, 22, 12, tzinfo=UTC)


def at(seconds: float) -> str:
    """The time `seconds` after the first start, in the format of rows."""
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


FIRST_ROW = rows(ROOT / "docs/runs/tiny")[0]


def training_row(step: int, ended: float, **fields) -> dict:
    """A row written `ended` seconds after the first start."""
    noise = random.Random(step)
    row = FIRST_ROW | {"step": step, "clipped": 0, "step_time": 1.0, "time": at(ended)}
    row |= {"loss": 1 + 4 / step + noise.random() / 10, "grad_norm": noise.uniform(0.5, 1.5)}
    return row | {"data_wait": 0.25, "data_wait_min": 0.125} | fields


def start(step: int, began: float, **flags) -> dict:
    """A start that began `began` seconds after the first one."""
    config = {"strategy": "fsdp", "dtype": "float32", "compile": False, "lr": 1e-3}
    return start_row(step, at(began), **config | flags)


def write_run(folder: Path, log: list[dict], statistics=()) -> Path:
    """Write a run folder. The times since a start follow from those of the rows."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for row in log if "event" in log[0] else [start(0, 0), *log]:
        now = datetime.fromisoformat(row["time"])
        if row.get("event") == "start":
            began = now
        rows.append(row | {"elapsed": (now - began).total_seconds()})
    for name, lines in (("metrics", rows), ("optim", statistics)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def save(step: int, ended: float) -> dict:
    """The row of a save of 5 MB, which took 2 s."""
    row = {"step": step, "event": "checkpoint", "bytes": 5_000_000, "time": at(ended)}
    return row | {"seconds": 2.0, "blocking_seconds": 0.5}


def training_rows(n: int) -> list[dict]:
    return [training_row(step, step) for step in range(1, n + 1)]


def shown(page: Path) -> dict:
    """The data in the script of a page."""
    return json.loads(re.search(r"const report = (.*);</script>", page.read_text())[1])


@pytest.fixture
def drawn(tmp_path):
    """drawn(RUN, ...): the data of the page that tools.report writes."""

    def draw(*runs: Path) -> dict:
        page = tmp_path / "page.html"
        assert report.main([*map(str, runs), "--out", str(page)]) == 0
        return shown(page)

    return draw


def points(run: dict, name: str) -> list[tuple[int, float | None]]:
    """The steps and values of a series."""
    return list(zip(*run["series"][name]))


def test_thinning_a_long_log_keeps_its_extremes(drawn, tmp_path):
    log = training_rows(5001)
    log[1234]["loss"] = 77.0
    log[3000]["loss"] = math.inf
    logged = {}
    for name in ("loss", "grad_norm"):
        logged[name] = [(row["step"], float(f"{row[name]:.5g}")) for row in log]
    log[3000]["loss"] = None  # JSON's form of inf as well as of nan
    (young,) = drawn(write_run(tmp_path / "young", log[:2000]))["runs"]
    assert points(young, "grad_norm") == logged["grad_norm"][:2000]  # not thinned
    # A series without values is not drawn.
    assert not {"mfu", "peak_device_memory", "val_loss", "clipped"} & young["series"].keys()
    (run,) = drawn(write_run(tmp_path / "run", log))["runs"]
    assert "run: 5,001 rows, thinned" in (tmp_path / "page.html").read_text()
    for name, values in logged.items():
        kept = points(run, name)
        assert 1000 < len(kept) <= report.MAX_POINTS == 2000
        assert set(kept) <= set(values)
        for start in range(0, 5001, 6):  # extremes of 6 rows are kept, or ones near them
            bucket = [value for _, value in values[start : start + 6]]
            there = [value for step, value in kept if start - 6 < step <= start + 12]
            assert min(there) <= min(bucket)
            assert max(there) >= max(filter(math.isfinite, bucket))


def test_a_page_draws_clipping_skips_and_data_waits(drawn, tmp_path):
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
    # data_wait becomes a share of the time. The first row of a log covers one step only.
    assert points(run, "data_wait")[:2] == [(10, 0.25), (20, 0.25)]
    assert points(run, "data_wait_min")[1] == (20, 0.05)


def test_smoothed_losses_follow_the_finite_ones():
    assert report.smooth([math.nan, 3.0, math.nan, 1.0]) == [3.0, 3.0, 3.0, 1.0]


def bar(page: str) -> str:
    """The phases in the time line of a page with one run."""
    (line,) = re.findall(r"<div class=line>(.*?)</div>", page)
    return ", ".join(re.findall(r'title="(.*?)"', line))


def test_the_time_line_shows_the_phases_of_a_run(drawn, tmp_path):
    log = [
        start(0, 0),
        training_row(1, 10, step_time=5.0),
        training_row(11, 20),
        {"step": 11, "val_loss": 2.5, "time": at(23)},
        save(11, 24),
        training_row(16, 29),  # lost
        start(11, 33, compile=True),
        training_row(12, 36, step_time=2.0),  # after a second start; a step takes 1 s
        training_row(22, 46, step_time=0.9),  # written late, as on GPUs
        {"step": 22, "val_loss": 2.5, "time": at(47)},
        training_row(32, 60, step_time=1.0),  # --async_save held it up for 3 s
        save(22, 60),
    ]
    drawn(write_run(tmp_path / "run", log))
    page = (tmp_path / "page.html").read_text()
    assert bar(page) == (
        "starting, 5 s, training, 15 s, evaluating, 3 s, saving, 1 s, lost steps, 5 s, "
        "waiting, 4 s, starting, 1 s, compiling, 1 s, training, 11 s, evaluating, 1 s, "
        "saving, 3 s, training, 10 s"
    )
    assert "width:25%;background:var(--training)" in page  # 15 of 60 s
    assert "run, 0:01:00<div" in page
    assert "</span>training</td><td>36.0 s, 60.0%</td>" in page
    assert "</span>lost steps</td><td>5.0 s, 8.3%</td>" in page
    assert "--compile False -&gt; True" in page
    assert "<td>11</td><td>5</td><td>2</td><td>0.5</td>" in page


@pytest.mark.parametrize(
    "hours, goodput", [(0, "67%: 20 of the 30 s"), (-1, "100%: 20 of the 20 s")]
)
def test_goodput_is_right_although_clocks_are_set(tmp_path, capsys, hours, goodput):
    """The second start is 10 s after the first, on a clock that may be an hour behind."""
    log = [start(0, 0), training_row(1, 1), training_row(10, 10)]
    log += [start(10, 20 + 3600 * hours), training_row(11, 21 + 3600 * hours)]
    log += [training_row(20, 30 + 3600 * hours)]
    folder = write_run(tmp_path / "run", log)
    assert report.main([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert f"run: goodput {goodput} since the first start were" in capsys.readouterr().out


def test_a_page_of_two_runs_escapes_their_names(drawn, tmp_path):
    name = '</script><img src=x onerror="alert(1)"> & "a"'.replace("/", "")
    a = write_run(tmp_path / name, [start(0, 0, data="</script>"), *training_rows(3)])
    b = write_run(tmp_path / "b", [start(0, 0, lr=2e-3), *training_rows(1500)])
    page = drawn(a, b)
    assert [run["name"] for run in page["runs"]] == [name, "b"]
    text = (tmp_path / "page.html").read_text("ascii")
    assert "<td>--data</td><td>&lt;/script&gt;</td>" in text
    assert "<td>--lr</td><td>0.001</td><td>0.002</td>" in text
    # The runs share the limit on points.
    assert 500 < len(points(page["runs"][1], "loss")) <= 1000
    assert text.count("</script>") == 3 and "<img" not in text
    assert "default-src 'none'" in text


def test_only_a_page_is_written_again(tmp_path, capsys):
    folder = write_run(tmp_path / "run", [start(0, 0), *training_rows(3)])
    log = folder / "metrics.jsonl"
    before = log.read_bytes()
    assert report.main([str(folder), "--out", str(log)]) == 2
    line = f"tools.report: error: --out {log} exists and is not a page of tools.report: "
    assert capsys.readouterr().err.startswith(line)
    assert log.read_bytes() == before
    page = str(tmp_path / "page.html")
    assert [report.main([str(folder), "--out", page]) for _ in range(2)] == [0, 0]


def test_follow_rewrites_the_page_until_the_run_ends(tmp_path, monkeypatch):
    """The run logs each row once the page shows the rows before it, and then ends."""
    monkeypatch.setattr(report, "FOLLOW_SECONDS", 0.05)
    page, folder = tmp_path / "page.html", tmp_path / "run"

    def count(page: Path) -> int:
        return len(points(shown(page)["runs"][0], "loss"))

    begins = multiprocessing.get_context("fork").Event()

    def train() -> None:
        with hold_lock(folder):
            begins.set()
            time.sleep(0.1)  # without a row
            for n in (1, 2):
                write_run(folder, training_rows(n))
                wait_until(lambda n=n: page.exists() and count(page) == n, 20)
                assert shown(page)["reloadSeconds"] > 0
            write_run(folder, training_rows(3))

    (run,) = fork_ranks(1, train)
    assert begins.wait(20)
    assert report.main([str(folder), "--out", str(page), "--follow"]) == 0
    run.join(20)
    assert run.exitcode == 0
    assert count(page) == 3 and shown(page)["reloadSeconds"] == 0


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
# Reads what a user sees who points at step 500 and then zooms into a chart
SCRIPT = """<script>onload = async () => {
  const pause = () => new Promise(done => setTimeout(done, 100));
  const read = (line, part) => line.querySelector(".u-" + part).textContent;
  charts.forEach(chart => chart.setCursor({left: chart.valToPos(500, "x"), top: 9}));
  await pause();
  const legends = charts.flatMap(chart => [...chart.root.querySelectorAll(".u-series")].map(
    line => [read(line, "label"), read(line, "value")]));
  charts[0].setScale("x", {min: 200, max: 500});
  await pause();
  const zoomed = charts.map(chart => [chart.scales.x.min, chart.scales.x.max]);
  const loaded = performance.getEntriesByType("resource").length;
  document.body.dataset.result = JSON.stringify([legends, zoomed, loaded]);
}</script></body>"""


@pytest.mark.slow(proves="the script of the page, in Chromium")
@pytest.mark.skipif(not BROWSER, reason="no Chromium here")
def test_a_browser_shows_the_logged_values(drawn, tmp_path):
    drawn(ROOT / "docs/runs/tiny")
    page = tmp_path / "page.html"
    page.write_text(page.read_text().replace("</body>", SCRIPT))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--virtual-time-budget=5000", f"--user-data-dir={tmp_path}/profile"]
    answer = subprocess.run([*command, f"file://{page}"], capture_output=True, timeout=60)
    assert "<td>fsdp</td><td>bfloat16</td>" in answer.stdout.decode()  # what ran where
    found = re.search(r'data-result="(.*?)"', answer.stdout.decode())
    legends, zoomed, loaded = json.loads(html.unescape(found[1]))
    # The values under the pointer equal those in the log.
    (row,) = [row for row in rows(ROOT / "docs/runs/tiny") if row["step"] == 500]
    expected = {"training": row["loss"], "norm": row["grad_norm"], "learning rate": row["lr"]}
    expected |= {"tokens/s": row["tokens_per_second"], "host": row["peak_host_memory"] / 1e9}
    said = dict(legends)
    for label, value in expected.items():
        assert float(said[label].replace(",", "")) == float(f"{value:.5g}")
    assert zoomed == [[200, 500]] * 6
    assert loaded == 0
