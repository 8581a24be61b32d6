"""tools/plan.py: what a run on a cluster that one does not have holds, sends and takes."""

import collections
import dataclasses
import json
import math
import re
import shlex
import statistics

import pytest
from rig import ROOT, SMALL, SOURCE, cells, run_command

import config
from model import SIZES, meta_model
from tools import plan
from tools.plan import Cluster, Device

# Round numbers: 1 TFLOP/s, 100 GB/s within a host, 10 GB/s out of a host of 4 devices
DEVICE = Device("round", 1.0, 1.0, 10**9, 1e12 / plan.STREAM, 100e9 / plan.LINK_EFFICIENCY, 0.0)
CLUSTER = Cluster("round", DEVICE, world_size=8, local_size=4, host_bandwidth=10e9)
GB = 10**9
BFLOAT16 = f"{SMALL} --dtype bfloat16"


# --------------------------------------------------------------------------------------------------
# The command


def planned(flags: str) -> plan.Plan:
    return plan.make_plan(*plan.parse(flags.split())[:2])


def test_a_plan_reports_bytes_between_hosts_and_on_disk(pool):
    """A host has two of the four shards, with both tp ranks of each."""
    mesh = "--world_size 16 --nproc_per_node 4 --strategy hsdp --dp_shard 4 --tp 2"
    (found,) = pool(1, planned, f"{BFLOAT16} {mesh} --global_batch_size 32")
    rows = {(row["axis"], row["collective"]): row for row in plan.communication(found)}
    between = {axis: row["between_hosts"] for (axis, _), row in rows.items()}
    assert between == {"dp_replicate": True, "dp_shard": True, "tp": False, "world": True}
    gathered, reduced = rows["dp_shard", "all_gather"], rows["dp_replicate", "all_reduce"]
    assert gathered["wire_bytes"] == gathered["bytes"] * 3 / 4  # 4 shards
    assert reduced["wire_bytes"] == 2 * reduced["bytes"] / 2  # 2 replicas
    assert found.tokens_per_second == 32 * 16 / 16 / found.seconds.step
    per_token = meta_model(found.run.model_config).flops_per_token()
    mfu = found.tokens_per_second * per_token / 989e12
    # Each of two replicas writes half of the 12 bytes per parameter.
    share = 6 * found.found.parameters_per_rank
    lines = "\n".join(plan.report(found))
    assert f" {plan.gigabytes(share)} GB a rank, {plan.gigabytes(4 * share)} GB a host" in lines
    assert f" {found.tokens_per_second:,.0f} tokens/s/device, MFU {mfu:.1%}" in lines


CHOICES = f"{BFLOAT16} --n_layer 1 --wrap block --world_size 4 --nproc_per_node 2 --choose"


def chosen(flags: str, memory: int) -> tuple[list[str], list[str]]:
    """The lines of --choose on devices with `memory`, and the run of the command that it prints."""
    flags, cluster, _ = plan.parse(flags.split())
    device = dataclasses.replace(cluster.device, memory=memory)
    lines = [*plan.choose(flags, dataclasses.replace(cluster, device=device))]
    _, _, typed = lines[-1].partition("train.py ")
    given = config.Config(**config.parse(shlex.split(typed)))
    run = config.resolve(given, cluster.world, SOURCE)
    return lines, [str(getattr(run, name)) for name in plan.CHOSEN]


def test_the_fastest_run_that_fits_is_chosen(pool):
    """Flags that are given are kept. A later strategy is taken only if it is 3% faster."""
    (small,) = pool(1, planned, f"{CHOICES} --strategy fsdp --micro_batch_size 1")
    memory = math.ceil(1.001 * small.found.peak / plan.USABLE)
    given = "--activation_checkpointing none --grad_sync batch"
    ((lines, choice),) = pool(1, chosen, f"{CHOICES} {given}", memory)
    rows = [line.split(None, 5) for line in lines[1 : lines.index("")]]
    assert {strategy for strategy, *_ in rows} == {"ddp", "fsdp", "hsdp"}
    assert {(recompute, sync) for _, recompute, sync, *_ in rows} == {("none", "batch")}
    fits = {tuple(row[:4]): row[4:] for row in rows if row[5] != "does not fit"}
    too_large = [float(size) for *_, size, took in rows if took == "does not fit"]
    assert max(float(size) for size, _ in fits.values()) <= min(too_large)
    seconds = {kind: float(took) for kind, (_, took) in fits.items()}
    alike = [took for kind, took in seconds.items() if kind[0] == choice[0]]
    assert seconds[tuple(choice)] == min(alike) <= 1.04 * min(seconds.values())


REFUSED = """
--world_size 12 --nproc_per_node 8 --global_batch_size 12
--world_size 4 --strategy hsdp --dp_shard 3
--choose --world_size 2 --device_type cpu
--choose --world_size 2 --dtype float32 --model gpt2-124m
--choose --world_size 1 --model llama3-70b --n_layer 4
"""


def test_what_cannot_be_planned_is_one_line(pool):
    for (text,) in cells(REFUSED):
        ((status, _, error),) = pool(1, run_command, text.split(), plan.main)
        assert (status, error.count("\n")) == (2, 1), text


def test_the_data_and_the_cluster_are_those_of_the_flags(tokens, tmp_path):
    for data, size in ((f"--data {tokens}", 257), (f"--data {tmp_path}/none", 50257)):
        flags, *_ = plan.parse(f"--world_size 8 {data}".split())
        assert plan.find_source(flags, SIZES["gpt2-124m"]).vocab_size == size
    for flag, bandwidth in (("--host_bandwidth 10", 10e9), ("", 0.8 * 4 * 50e9)):
        _, cluster, _ = plan.parse(f"--world_size 8 --nproc_per_node 4 {flag}".split())
        assert (cluster.hosts, cluster.host_bandwidth) == (2, bandwidth)


# --------------------------------------------------------------------------------------------------
# The pages


@pytest.mark.slow(proves="plans of large models in the reference")
def test_the_reference_shows_the_planned_peaks(pool):
    row = r"^\| `([\w-]+\.json)`.*?\| (\d+) \|.*\| ([\d.]+) GB \|$"
    rows = re.findall(row, (ROOT / "docs/reference.md").read_text(), re.M)
    assert rows
    for name, ranks, shown in rows:
        flags = f"--config {ROOT}/configs/{name} --world_size {ranks}"
        (found,) = pool(1, planned, flags, timeout=200)
        assert plan.gigabytes(found.found.peak) == shown, name


def predict_published(published: list[dict]) -> list[float]:
    """Predicted / published speed - 1 of each row."""
    found = [planned(row["flags"]).tokens_per_second for row in published]
    return [speed / row["tokens_per_second_per_device"] - 1 for speed, row in zip(found, published)]


@pytest.mark.slow(proves="the table of published runs")
def test_errors_of_published_runs_are_those_of_the_page(pool):
    """Prints each run and the rows of the table in the documents with pytest -s."""
    published = json.loads((ROOT / "docs/published.json").read_text())
    (errors,) = pool(1, predict_published, published, timeout=800)
    groups = collections.defaultdict(list)
    for row, error in zip(published, errors):
        print(f"| {row['name']} | {row['tokens_per_second_per_device']:,.0f} | {error:+.0%} |")
        groups[row["set"]].append(error)
    pages = "".join(path.read_text() for path in ROOT.glob("docs/*.md"))
    for name, group in groups.items():
        middle, size = statistics.median(group), statistics.median(map(abs, group))
        near = sum(abs(error) <= 0.25 for error in group)
        cell = f"{size:.0%} | {middle:+.0%} | {max(group, key=abs):+.0%} | {near} |"
        print(f"| {name} | {len(group)} | {cell}")
        assert f"| {name} | {len(group)} | {cell}\n" in pages
    low, _, high = statistics.quantiles((1 + e for e in groups["blind"]), method="inclusive")
    assert (low, high) == pytest.approx(plan.TOOK, abs=0.005)
