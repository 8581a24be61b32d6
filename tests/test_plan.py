"""tools/plan.py: what a run on a cluster that one does not have holds, sends and takes."""

import collections
import dataclasses
import json
import math
import re
import shlex
import statistics

import pytest
from old import TINY, listen
from rig import ROOT, SOURCE, resolve

import config
import dist
from model import SIZES, meta_model
from tools import plan
from tools.plan import Cluster, Device
from tools.rehearse import Communication, Operation, Rehearsal

# Round numbers: 1 TFLOP/s, 100 GB/s within a host, 10 GB/s out of a host of 4 devices
DEVICE = Device("round", 1.0, 1.0, 10**9, 1e12 / plan.STREAM, 100e9 / plan.LINK_EFFICIENCY, 0.0)
CLUSTER = Cluster("round", DEVICE, world_size=8, local_size=4, host_bandwidth=10e9)
GB = 10**9


# --------------------------------------------------------------------------------------------------
# Seconds


GROUPS = [  # axis, mesh, (ranks, hosts)
    ("tp", (2, 2, 2), (2, 1)),
    ("dp_shard", (2, 2, 2), (2, 1)),
    ("dp_replicate", (2, 2, 2), (2, 2)),
    ("dp_shard", (1, 4, 2), (4, 2)),
    ("world", (1, 4, 2), (8, 2)),
]


def test_the_order_of_the_mesh_decides_which_groups_span_hosts():
    for axis, mesh, group in GROUPS:
        run = dataclasses.replace(resolve(TINY), **dict(zip(dist.AXES, mesh)))
        assert plan.group_of(axis, run, local_size=4) == group


# collective | count | bytes | ranks, hosts | hops within a host and between hosts, starts | seconds
COLLECTIVES = [
    ("all_reduce", 1, GB, 4, 1, (6, 0, 1), 2 * 0.75 / 100),
    # All four ranks of a host use all of its network cards.
    ("all_gather", 1, GB, 8, 2, (6, 1, 1), 7 / 8 / 10),
    # Four groups, each with one rank on a host, have a quarter of the cards each.
    ("all_reduce", 1, GB, 2, 2, (0, 2, 1), 2 * 1 / 2 / 2.5),
    # A rank of 8 sends 7/8 of its matrices, with a quarter of its host's cards.
    ("all_to_all", 1, GB, 8, 2, (6, 1, 1), 7 / 8 / 2.5),
    ("all_gather", 3, 0, 8, 2, (3 * 6, 3, 3), 0.0),
    # In a tree: up and down log2(1024) levels of hosts
    ("all_reduce", 1, 0, 4096, 1024, (2 * 3, 2 * 10, 1), 0.0),
    ("all_gather", 1, GB, 1, 1, (0, 0, 0), 0.0),
]


@pytest.mark.parametrize("row", COLLECTIVES)
def test_a_collective_takes_its_bytes_and_its_hops(row):
    kind, count, size, ranks, hosts, (inner, between, starts), seconds = row
    waits = inner * plan.HOP + between * plan.HOP_BETWEEN_HOSTS + starts * plan.START
    sent = Communication("dp_shard", kind, "forward", count, size)
    found = plan.collective_seconds(sent, ranks, hosts, CLUSTER)
    assert found == pytest.approx(seconds + waits, rel=1e-6)


# A forward computes for 2 s in each micro-batch, a backward for 4 s, and the update for 0.1 s.
# axis, collective, phase | count | GB of all | micro-batches | mesh | --grad_sync | exposed seconds
EXPOSED = """
dp_shard all_gather     forward   |   10 |  11.43 | 1 | 1 8 1 | batch       | 0.1    # hides 9 of 10
dp_shard all_gather     forward   | 1000 | 133.33 | 4 | 2 4 1 | batch       | 0.4    # SLOWED
dp_shard reduce_scatter backward  |    4 | 182.86 | 4 | 1 8 1 | batch       | 13     # 3 of 4
dp_shard reduce_scatter backward  |   16 | 182.86 | 4 | 1 8 1 | micro_batch | 4      # hides 3 of 4
dp_shard reduce_scatter backward  |   16 | 182.86 | 4 | 1 8 1 | shard       | 4
dp_shard all_reduce     backward  |    4 |  91.43 | 4 | 1 8 1 | shard       | 13
tp       all_reduce     forward   |   10 |   1    | 1 | 1 2 4 | batch       | 0.015  # a layer waits
dp_shard all_reduce     optimizer |    1 |  11.43 | 1 | 1 8 1 | batch       | 2
"""


@pytest.mark.parametrize("row", EXPOSED.strip().splitlines())
def test_compute_hides_the_communication_that_overlaps_it(row):
    what, count, size, n, mesh, grad_sync, exposed = row.partition("#")[0].split("|")
    sent = Communication(*what.split(), int(count), round(float(size) * GB))
    values = dict(zip(dist.AXES, map(int, mesh.split())), grad_sync=grad_sync.strip())
    run = resolve(f"{TINY} --dtype bfloat16", size=1)
    run = dataclasses.replace(run, grad_accum_steps=int(n), **values)
    operations = [
        Operation("forward", "mm", (), flops=int(n) * 2e12),
        Operation("backward", "mm", (), flops=int(n) * 4e12),
        Operation("optimizer", "_fused_adamw_", (), bytes=10**11),
    ]
    rehearsal = Rehearsal(run, 1, 1, {}, {}, [sent], operations, flops=0.0, recomputed_flops=0.0)
    found = plan.predict(rehearsal, CLUSTER)
    assert found.exposed == pytest.approx(float(exposed), abs=0.015)  # latencies
    assert (found.compute, found.update) == pytest.approx((6 * int(n), 0.1))
    assert found.step == found.compute + found.exposed + found.update


def test_an_operation_computes_and_moves_bytes():
    for name, flops, moved, count, seconds in (
        ("mm", 1e12, 10**12, 1, 2.0),
        ("_flash_attention", plan.ATTENTION * 1e12, 0, 1, 1.0),
        ("add", 0, 10**12, 1, 1.0),
        ("add", 0, 0, 100, 100 * plan.LAUNCH),
    ):
        row = Operation("forward", name, (), count, flops, moved)
        assert plan.operation_seconds(row, DEVICE) == pytest.approx(seconds)


# --------------------------------------------------------------------------------------------------
# The command


def planned(flags: str) -> tuple[plan.Plan, list[dict]]:
    """A plan, and what a rank sends."""
    found = plan.make_plan(*plan.parse(flags.split())[:2])
    return found, plan.communication(found)


ON_TWO_HOSTS = f"{TINY} --world_size 16 --strategy hsdp --tp 2 --global_batch_size 32"


def test_a_plan_reports_bytes_between_hosts_and_on_disk(pool):
    ((found, sent),) = pool(1, planned, ON_TWO_HOSTS)
    rows = {(row["axis"], row["collective"]): row for row in sent}
    gathered, reduced = rows["dp_shard", "all_gather"], rows["dp_replicate", "all_reduce"]
    assert (gathered["between_hosts"], reduced["between_hosts"]) == (False, True)
    assert gathered["wire_bytes"] == gathered["bytes"] * 3 / 4  # 4 shards
    assert reduced["wire_bytes"] == 2 * reduced["bytes"] / 2  # 2 replicas
    lines = "\n".join(plan.report(found))
    # Each of two replicas writes half of the 12 bytes per parameter.
    share = 6 * found.found.parameters_per_rank
    assert f"saves   {plan.gigabytes(share)} GB a rank, {plan.gigabytes(8 * share)} GB a" in lines
    assert found.fits and "fits" in lines
    per_token = meta_model(resolve(TINY).model_config).flops_per_token()
    mfu = found.tokens_per_second * per_token / 989e12
    assert f" {found.tokens_per_second:,.0f} tokens/s/device, MFU {mfu:.1%}" in lines
    assert found.tokens_per_second == 32 * 16 / 16 / found.seconds.step
    device = dataclasses.replace(DEVICE, memory=math.ceil(found.found.peak / plan.USABLE) - 10)
    small = dataclasses.replace(found, cluster=dataclasses.replace(CLUSTER, device=device))
    assert not small.fits and "DOES NOT FIT" in "\n".join(plan.report(small))


SEVERAL = (
    f"{TINY} --n_layer 1 --world_size 4 --nproc_per_node 2 --global_batch_size 8 --dtype bfloat16"
)


def chosen(flags: str, memory: int | None) -> tuple[list[str], tuple]:
    """The lines of --choose on devices with `memory`, and the run of the printed command."""
    flags, cluster, _ = plan.parse(flags.split())
    device = dataclasses.replace(cluster.device, memory=memory)
    lines = [*plan.choose(flags, dataclasses.replace(cluster, device=device))]
    _, _, typed = lines[-1].partition("train.py ")
    given = config.Config(**config.parse(shlex.split(typed)))
    run = config.resolve(given, cluster.world, SOURCE)
    return lines, tuple(getattr(run, name) for name in plan.CHOSEN)


@pytest.mark.parametrize(
    "given, strategies",
    [
        ("--activation_checkpointing none", {"ddp", "hsdp", "fsdp"}),
        ("--strategy fsdp --grad_sync batch", {"fsdp"}),
    ],
)
def test_the_fastest_run_that_fits_is_chosen(pool, given, strategies):
    ((small, _),) = pool(1, planned, f"{SEVERAL} --strategy fsdp --micro_batch_size 1")
    memory = math.ceil(1.001 * small.found.peak / plan.USABLE)
    ((lines, choice),) = pool(1, chosen, f"{SEVERAL} {given}", memory)
    rows = [line.split(None, 5) for line in lines[1 : lines.index("")]]
    fitting, too_large = {}, []
    for strategy, recomputed, sync, size, gigabytes, took in rows:
        if took == "does not fit":
            too_large.append(float(gigabytes))
        else:
            fitting[strategy, recomputed, sync, int(size)] = float(took)
    sizes = [float(gigabytes) for *_, gigabytes, took in rows if took != "does not fit"]
    assert max(sizes) <= min(too_large)
    assert fitting[choice] <= 1.04 * min(fitting.values())
    alike = [took for kind, took in fitting.items() if kind[0] == choice[0]]
    assert fitting[choice] == min(alike)
    assert {strategy for strategy, *_ in rows} == strategies


REFUSED = """
--world_size 12 --nproc_per_node 8 --global_batch_size 12
--world_size 0
--choose --world_size 2 --device_type cpu
--choose --world_size 2 --dtype float32 --model gpt2-124m
--choose --world_size 1 --model llama3-70b --n_layer 4
--world_size 4 --strategy hsdp --dp_shard 3
--world_sizes 4
"""


def test_what_cannot_be_planned_is_one_line(pool):
    for text in REFUSED.strip().splitlines():
        ((status, _, error),) = pool(1, listen, text.split(), plan.main)
        assert (status, error.count("\n")) == (2, 1), text


def test_the_vocabulary_is_read_from_the_data(tokens, tmp_path):
    for data, size in ((f"--data {tokens}", 257), (f"--data {tmp_path}/none", 50257), ("", 50257)):
        flags, *_ = plan.parse(f"--world_size 8 {data}".split())
        assert plan.find_source(flags, SIZES["gpt2-124m"]).vocab_size == size


def test_the_cluster_has_the_bandwidth_of_the_flag():
    for flag, bandwidth in (("--host_bandwidth 10", 10e9), ("", 0.8 * 4 * 50e9)):
        _, cluster, _ = plan.parse(f"--world_size 8 --nproc_per_node 4 {flag}".split())
        assert (cluster.hosts, cluster.host_bandwidth) == (2, bandwidth)


# --------------------------------------------------------------------------------------------------
# The pages


def planned_peaks(rows: list[tuple[str, str, str]]) -> list[str]:
    """The peak of each row (configuration, ranks, peak shown)."""
    texts = [f"--config {ROOT}/configs/{name} --world_size {ranks}" for name, ranks, _ in rows]
    return [plan.gigabytes(planned(text)[0].found.peak) for text in texts]


@pytest.mark.slow(proves="plans of large models in the reference")
def test_the_reference_shows_the_planned_peaks(pool):
    row = r"^\| `([\w-]+\.json)`.*?\| (\d+) \|.*\| ([\d.]+) GB \|$"
    rows = re.findall(row, (ROOT / "docs/reference.md").read_text(), re.M)
    assert len(rows) == 3
    assert pool(1, planned_peaks, rows, timeout=200) == [[shown for *_, shown in rows]]


PUBLISHED = json.loads((ROOT / "docs/published.json").read_text())


def predict_published() -> list[float]:
    """Predicted / published speed - 1 of each row."""
    found = [planned(row["flags"])[0].tokens_per_second for row in PUBLISHED]
    return [speed / row["tokens_per_second_per_device"] - 1 for speed, row in zip(found, PUBLISHED)]


@pytest.mark.slow(proves="the table of published runs")
def test_errors_of_published_runs_are_those_of_the_page(pool):
    """Prints each run and the rows of the table in docs/plan.md with pytest -s."""
    (errors,) = pool(1, predict_published, timeout=800)
    groups = collections.defaultdict(list)
    for row, error in zip(PUBLISHED, errors):
        print(f"| {row['name']} | {row['tokens_per_second_per_device']:,.0f} | {error:+.0%} |")
        groups[row["set"]].append(error)
    table = [
        f"| {name} | {len(group)} | {statistics.median(map(abs, group)):.0%} "
        f"| {statistics.median(group):+.0%} | {max(group, key=abs):+.0%} "
        f"| {sum(abs(error) <= 0.25 for error in group)} |"
        for name, group in groups.items()
    ]
    print("\n".join(table))
    low, _, high = statistics.quantiles((1 + e for e in groups["blind"]), method="inclusive")
    print(f"quartiles of measured / predicted seconds: {low:.3f}, {high:.3f}")
    assert (low, high) == pytest.approx(plan.TOOK, abs=0.005)
    page = (ROOT / "docs/plan.md").read_text()
    assert re.findall(r"^\| .* \| [-+]\d+% \| [-+]\d+% \| \d+ \|$", page, re.M) == table
