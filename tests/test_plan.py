"""tools/plan.py: what a run on a cluster that one does not have holds, sends and takes."""

import collections
import dataclasses
import json
import math
import re
import shlex
import statistics

import pytest
from conftest import ROOT, SOURCE, TINY, listen, resolve

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


def step_of(row: Communication, n: int, mesh: tuple, grad_sync: str = "batch") -> plan.Seconds:
    """The predicted step of n micro-batches that compute 2 s forward and 4 s backward each."""
    run = resolve(f"{TINY} --dtype bfloat16", size=1)
    replicate, shard, tp = mesh
    values = dict(dp_replicate=replicate, dp_shard=shard, tp=tp, grad_sync=grad_sync)
    run = dataclasses.replace(run, grad_accum_steps=n, **values)
    operations = [
        Operation("forward", "mm", (), flops=n * 2e12),
        Operation("backward", "mm", (), flops=n * 4e12),
        Operation("optimizer", "_fused_adamw_", (), bytes=10**11),  # 0.1 s
    ]
    found = Rehearsal(run, 1, 1, {}, {}, [row], operations, flops=0.0, recomputed_flops=0.0)
    return plan.predict(found, CLUSTER)


# --------------------------------------------------------------------------------------------------
# Seconds

# axis | mesh | ranks of its group, hosts that they are on
GROUPS = [
    ("tp", (2, 2, 2), (2, 1)),
    ("dp_shard", (2, 2, 2), (2, 1)),
    ("dp_replicate", (2, 2, 2), (2, 2)),
    ("dp_shard", (1, 4, 2), (4, 2)),
    ("world", (1, 4, 2), (8, 2)),
]


@pytest.mark.parametrize("axis, mesh, group", GROUPS)
def test_the_order_of_the_mesh_decides_which_groups_span_hosts(axis, mesh, group):
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


@pytest.mark.parametrize("kind, count, size, ranks, hosts, latency, seconds", COLLECTIVES)
def test_a_collective_takes_its_bytes_and_its_hops(
    kind, count, size, ranks, hosts, latency, seconds
):
    row = Communication("dp_shard", kind, "forward", count, size)
    inner, between, starts = latency
    waits = inner * plan.HOP + between * plan.HOP_BETWEEN_HOSTS + starts * plan.START
    found = plan.collective_seconds(row, ranks, hosts, CLUSTER)
    assert found == pytest.approx(seconds + waits, rel=1e-6)


def sends(seconds: float, kind: str, phase: str, count: int, axis: str = "dp_shard"):
    """Collectives of 8 ranks on two hosts that take `seconds` in all, all_reduces twice that."""
    return Communication(axis, kind, phase, count, round(seconds * 10e9 * 8 / 7))


FSDP, HSDP, TP = (1, 8, 1), (2, 4, 1), (1, 2, 4)
WITHIN = Communication("dp_shard", "all_gather", "forward", 1000, round(100e9 * 4 / 3))  # 1 s
# What is sent | micro-batches | mesh | --grad_sync | exposed seconds
EXPOSED = {
    "a forward hides 9 of 10 gathers": (
        (sends(1.0, "all_gather", "forward", 10), 1, FSDP, "batch"),
        0.1,
    ),
    "hidden gathers slow compute": ((WITHIN, 4, HSDP, "batch"), plan.SLOWED),
    "the last backward hides 15 of 16 reductions": (
        (sends(16.0, "reduce_scatter", "backward", 16), 4, FSDP, "batch"),
        16 - 4 * 15 / 16,
    ),
    "each backward hides 3 of 4 reductions": (
        (sends(16.0, "reduce_scatter", "backward", 16), 4, FSDP, "micro_batch"),
        4 * (4 - 4 * 3 / 4),
    ),
    "a layer waits for tp": (
        (Communication("tp", "all_reduce", "forward", 10, GB), 1, TP, "batch"),
        2 * 3 / 4 / 100,
    ),
    "the update waits for the norm": (
        (sends(1.0, "all_reduce", "optimizer", 1), 1, FSDP, "batch"),
        2.0,
    ),
}


@pytest.mark.parametrize("arguments, exposed", EXPOSED.values(), ids=EXPOSED)
def test_compute_hides_the_communication_that_overlaps_it(arguments, exposed):
    _, n, *_ = arguments
    found = step_of(*arguments)
    assert found.exposed == pytest.approx(exposed, abs=0.015)  # latencies
    assert (found.compute, found.update) == pytest.approx((6 * n, 0.1))
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


def command(flags: str) -> tuple[int, str, str]:
    """Status, lines and error of the command."""
    return listen(flags.split(), plan.main)


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


# Given flags: the strategies that are tried
GIVEN = {
    "--activation_checkpointing none": {"ddp", "hsdp", "fsdp"},
    "--strategy fsdp --grad_sync batch": {"fsdp"},
}


@pytest.mark.parametrize("given", GIVEN)
def test_the_fastest_run_that_fits_is_chosen(pool, given):
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
    assert {strategy for strategy, *_ in rows} == GIVEN[given]


# Flags | what the line on stderr says
REFUSED = {
    "--world_size 12 --nproc_per_node 8": "12",
    "--world_size 0": "0",
    "--choose --world_size 2 --device_type cpu": "cpu|GPU",
    "--choose --world_size 2 --dtype float32 --model gpt2-124m": "bfloat16",
    "--choose --world_size 1 --model llama3-70b --n_layer 4": "fits",
    "--world_size 4 --strategy hsdp --dp_shard 3": "dp_shard 3",
    "": "world_size",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_planned_is_one_line(pool, flags):
    ((status, _, error),) = pool(1, command, flags)
    assert status == 2
    assert re.search(REFUSED[flags], error) and error.count("\n") <= 1


def test_the_vocabulary_is_read_from_the_data(tokens, tmp_path):
    def vocab_size(text: str) -> int:
        flags, *_ = plan.parse(f"--world_size 8 {text}".split())
        return plan.find_source(flags, SIZES["gpt2-124m"]).vocab_size

    assert vocab_size(f"--data {tokens}") == 257
    assert vocab_size("") == vocab_size(f"--data {tmp_path}/none") == 50257


BANDWIDTHS = {
    "--world_size 8 --nproc_per_node 4 --host_bandwidth 10": 10e9,
    "--world_size 8 --nproc_per_node 4": 0.8 * 4 * 50e9,
}


@pytest.mark.parametrize("flags", BANDWIDTHS)
def test_the_cluster_has_the_bandwidth_of_the_flag(flags):
    _, cluster, _ = plan.parse(flags.split())
    assert (cluster.hosts, cluster.host_bandwidth) == (2, BANDWIDTHS[flags])


# --------------------------------------------------------------------------------------------------
# The pages


def peaks_of_configurations() -> list[tuple[str, str]]:
    """(peak shown, peak planned) for each row of the reference's table of configurations."""
    reference = (ROOT / "docs/reference.md").read_text()
    row = r"^\| `([\w-]+\.json)`.*?\| (\d+) \|.*\| ([\d.]+) GB \|$"
    found = []
    for name, ranks, shown in re.findall(row, reference, re.M):
        one, _ = planned(f"--config {ROOT}/configs/{name} --world_size {ranks}")
        found.append((shown, plan.gigabytes(one.found.peak)))
    return found


@pytest.mark.slow(proves="plans of large models in the reference")
def test_the_reference_shows_the_planned_peaks(pool):
    (found,) = pool(1, peaks_of_configurations, timeout=200)
    assert len(found) == 3
    assert [shown for shown, _ in found] == [peak for _, peak in found]


PUBLISHED = json.loads((ROOT / "docs/published.json").read_text())


def predict_published() -> list[float]:
    """Predicted / published speed - 1 of each row."""
    found = []
    for row in PUBLISHED:
        one, _ = planned(row["flags"])
        found.append(one.tokens_per_second / row["tokens_per_second_per_device"] - 1)
    return found


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
