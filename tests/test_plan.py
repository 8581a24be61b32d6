"""tools/plan.py and tools/planning/: predictions for a run on a cluster that one does not have."""

import collections
import contextlib
import dataclasses
import io
import json
import math
import re
import statistics

import pytest
import torch
from conftest import ROOT, TINY, listen, resolve, rows

from model import SIZES, meta_model
from tools import plan
from tools.planning import predict
from tools.planning.predict import Cluster, Group, Links
from tools.planning.rehearse import Communication, Operation, Rehearsal

# Round numbers: 100 GB/s within a host, 10 GB/s out of a host of 4 devices; no latency
LINKS = Links(
    local_size=4,
    intra_bandwidth=100e9,
    host_bandwidth=10e9,
    intra_latency=0.0,
    inter_latency=0.0,
    launch_latency=0.0,
)
# Devices compute 1e12 FLOP/s x 0.5, with peak_tflops 1, and move data at 32 GB/s.
CLUSTER = Cluster(
    world_size=8,
    device_type="h100",
    device=dataclasses.replace(predict.DEVICES["h100"], memory_bandwidth=32e9 / predict.STREAM),
    device_memory=10**9,
    links=LINKS,
    achieved=0.5,
    peak_tflops=1.0,
)


def rehearsal(
    communication=(), flops=0.0, recomputed=0.0, accum=1, mesh=(1, 8, 1), grad_sync="batch"
) -> Rehearsal:
    """What a rehearsal could have found, for a tiny model of 1,000,000 parameters."""
    text = f"{TINY} --dtype bfloat16 --micro_batch_size 1 --strategy fsdp"
    run = resolve(f"{text} --grad_sync {grad_sync}", size=8, device=torch.device("cuda"))
    run = dataclasses.replace(
        run,
        grad_accum_steps=accum,
        dp_replicate=mesh[0],
        dp_shard=mesh[1],
        tp=mesh[2],
        tokens_per_step=math.prod(mesh[:2]) * accum * run.seq_len,
    )
    operations = [
        Operation("forward", "mm", (), flops=flops / 3, bytes=10**9),
        Operation("backward", "mm", (), flops=flops * 2 / 3 + recomputed),
        Operation("optimizer", "_fused_adamw_", (), bytes=32 * 10**6),
    ]
    return Rehearsal(
        run=run,
        parameters=10**6,
        parameters_per_rank=10**6,
        memory={"parameters": 4 * 10**6, "activations": 10**6},
        state={"parameters": 4 * 10**6, "gradients": 4 * 10**6, "optimizer": 8 * 10**6},
        communication=list(communication),
        operations=operations,
        flops=flops,
        recomputed_flops=recomputed,
    )


def sends(seconds, collective="all_gather", phase="forward", count=10) -> Communication:
    """Collectives of 8 ranks on two hosts that take `seconds` in all (all_reduces twice that)."""
    return Communication("dp_shard", collective, phase, count, round(seconds * 10e9 * 8 / 7))


def step(found: Rehearsal, cluster: Cluster = CLUSTER) -> predict.Speed:
    return predict.speed(found, cluster)


# --------------------------------------------------------------------------------------------------
# Collectives and the step


def test_the_order_of_the_mesh_decides_which_groups_span_hosts():
    for axis, mesh, group in (
        ("tp", (2, 2, 2), Group(size=2, hosts=1)),
        ("dp_replicate", (2, 2, 2), Group(size=2, hosts=2)),
        ("dp_shard", (1, 4, 2), Group(size=4, hosts=2)),
        ("world", (1, 4, 2), Group(size=8, hosts=2)),
    ):
        assert predict.group_of(axis, mesh, 4) == group


@pytest.mark.parametrize(
    "collective, group, seconds",
    [
        ("all_reduce", Group(4, 1), 2 * 0.75 * 1e9 / 100e9),
        # All four ranks of a host use all of its network cards.
        ("all_gather", Group(8, 2), 7 / 8 * 1e9 / 10e9),
        ("broadcast", Group(8, 2), 7 / 8 * 1e9 / 10e9),
        # Four groups, each with one rank per host, get a quarter of the cards each.
        ("all_reduce", Group(2, 2), 2 * 1 / 2 * 1e9 / 2.5e9),
    ],
)
def test_a_ring_is_as_fast_as_its_slowest_link(collective, group, seconds):
    row = Communication("dp_shard", collective, "forward", 1, 10**9)
    assert predict.collective_seconds(row, group, LINKS) == pytest.approx(seconds)


LATENCIES = {"intra_latency": 1e-6, "inter_latency": 10e-6, "launch_latency": 100e-6}
SLOW_LINKS = dataclasses.replace(LINKS, **LATENCIES)


def test_the_latency_of_a_ring_counts_its_hops():
    gather = Communication("dp_shard", "all_gather", "forward", 2, 0)
    # 3 hops within each of the two hosts, one between them
    assert predict.collective_seconds(gather, Group(8, 2), SLOW_LINKS) == pytest.approx(2 * 116e-6)
    # Seven hops take 16e-6. The two broadcasts follow each other around the ring: each adds a hop.
    broadcast = Communication("dp_shard", "broadcast", "optimizer", 2, 0)
    seconds = 2 * 100e-6 + 16e-6 * (1 + 2 / 7)
    assert predict.collective_seconds(broadcast, Group(8, 2), SLOW_LINKS) == pytest.approx(seconds)


def test_many_hosts_reduce_with_a_tree():
    reduce = Communication("world", "all_reduce", "optimizer", 1, 0)
    # 3 hops within a host and log2(1024) between hosts, up and down
    seconds = 100e-6 + 2 * (3e-6 + 10 * 10e-6)
    found = predict.collective_seconds(reduce, Group(4096, 1024), SLOW_LINKS)
    assert found == pytest.approx(seconds)


def test_step_time_adds_compute_and_the_optimizer():
    speed = step(rehearsal(flops=3e12, recomputed=1e12))
    assert (speed.compute, speed.optimizer) == pytest.approx((4e12 / 0.5e12, 32 * 1e6 / 32e9))
    assert speed.tokens_per_second_per_device == pytest.approx(speed.tokens / 8.001)


@pytest.mark.parametrize("device", ["cpu", "h100"])
def test_mfu_has_the_definition_of_train_py(device):
    """On a CPU, where short attention is written out in full, a causal mask hides half of it."""
    flags = f"{TINY} --world_size 1 --peak_tflops 1 --device_type {device} --json"
    _, printed, _ = listen(flags.split(), plan.main)
    one = json.loads(printed)
    per_token = meta_model(resolve(TINY).model_config).flops_per_token()
    flops = per_token * one["tokens_per_second_per_device"]
    assert one["mfu"] == pytest.approx(flops / 1e12)


EXCHANGED = Communication("world", "all_to_all", "optimizer", 2, 2 * 10**9)
SCATTERED = sends(16.0, "reduce_scatter", "backward", count=16)
WITHIN = Communication("dp_shard", "all_gather", "forward", 1000, round(100e9 * 4 / 3))  # 1 s
TP = Communication("tp", "all_reduce", "forward", 10, 10**9)  # 0.015 s
HSDP = (2, 4, 1)


@pytest.mark.parametrize(
    "row, micro_batches, mesh, grad_sync, exposed",
    [
        # A forward pass of 2 s hides 9 of 10 gathers.
        (sends(1.0), 1, None, "batch", 0.1),
        # Hidden gathers slow compute by a share of the time that they take within a host, 1 s.
        (WITHIN, 4, HSDP, "batch", predict.SLOWED),
        # Gradients that are reduced once overlap the last micro-batch only: 15 of 16 parts.
        (SCATTERED, 4, None, "batch", 16 - 4 * 15 / 16),
        (SCATTERED, 4, None, "micro_batch", 4 * (4 - 4 * 3 / 4)),
        # A rank sends 7 of 8 parts of its matrices, with a quarter of its host's bandwidth.
        (EXCHANGED, 1, HSDP, "batch", 2e9 * 7 / 8 / (10e9 / 4)),
        # Nothing hides these: the next layer waits for a sum over tp, the update for the norm.
        (TP, 1, (1, 2, 4), "batch", 0.015),
        (sends(1.0, "all_reduce", "optimizer", count=1), 1, None, "batch", 2.0),
    ],
)
def test_compute_hides_the_communication_that_overlaps_it(
    row, micro_batches, mesh, grad_sync, exposed
):
    flops = 3e12 * micro_batches
    found = step(rehearsal([row], flops, 0.0, micro_batches, mesh or (1, 8, 1), grad_sync))
    assert found.exposed == pytest.approx({row.axis: exposed})
    assert found.compute == pytest.approx(6.0 * micro_batches)


CPU = dataclasses.replace(CLUSTER.device, kind="cpu")


def test_cpus_do_not_compute_while_they_copy_within_a_host():
    cpus = dataclasses.replace(CLUSTER, device=CPU)
    between_hosts = rehearsal([sends(1.0)], flops=3e12)
    assert step(between_hosts, cluster=cpus).exposed == pytest.approx({"dp_shard": 0.1})
    within_hosts = rehearsal([WITHIN], flops=3e12, mesh=HSDP)
    assert step(within_hosts, cluster=cpus).exposed == pytest.approx({"dp_shard": 1.0})


def test_cpus_scatter_in_two_passes():
    assert predict.default_links(CPU, 4).scatter_passes == 2


def test_a_row_of_communication_sums_over_phases():
    found = rehearsal([sends(1.0), sends(3.0, phase="backward")])
    request, *_ = plan.parse(f"{TINY} --world_size 8".split())
    request = dataclasses.replace(request, cluster=CLUSTER)
    (row,) = plan.Plan(request, found, step(found), options=None).communication()
    assert row["count"] == 20
    assert row["seconds"] == pytest.approx(4.0)


# --------------------------------------------------------------------------------------------------
# The command


ON_TWO_HOSTS = "--world_size 16 --strategy hsdp --micro_batch_size 1 --global_batch_size 32"


def figures(text: str) -> tuple[list[dict], dict[str, int], int]:
    """Return what a rank sends and saves, and its number of parameters."""
    request, options, _ = plan.parse(f"{text} --tokens 1e9".split())
    one = plan.make_plan(request, options)
    hours = 1e9 / 3600 / one.speed.tokens_per_second_per_device
    assert one.fits and one.hours == pytest.approx(hours / one.request.cluster.world_size)
    assert one.rehearsal.memory["optimizer"] >= 8 * one.rehearsal.parameters_per_rank
    return one.communication(), one.checkpoint(), one.rehearsal.parameters_per_rank


def test_a_plan_reports_bytes_between_hosts_and_on_disk(pool):
    ((sent, saved, parameters),) = pool(1, figures, f"{TINY} {ON_TWO_HOSTS}")
    assert all(0 < row["wire_bytes"] <= 2 * row["bytes"] and row["count"] > 0 for row in sent)
    between = {(row["axis"], row["collective"]): row["inter_host"] for row in sent}
    assert between["dp_shard", "all_gather"] is False
    assert between["dp_replicate", "all_reduce"] is True
    # Each of two replicas writes half of the 12 bytes per parameter and of some counters.
    assert 0 < saved["bytes_per_rank"] - 6 * parameters < 1000
    assert saved["bytes_per_host"] == 8 * saved["bytes_per_rank"]


def planned(found: Rehearsal, text: str) -> plan.Plan:
    """The plan of this rehearsal."""
    request, options, _ = plan.parse(f"{TINY} {text}".split())
    return plan.Plan(request, found, predict.speed(found, request.cluster), options)


ON_EIGHT = "--world_size 8 --micro_batch_size 1 --strategy fsdp --tokens 1e9"


def test_a_run_that_does_not_fit_is_reported_on_one_screen():
    found = rehearsal([sends(1.0)], flops=3e12)
    lines = [*plan.report(planned(dataclasses.replace(found, memory={"other": 10**12}), ON_EIGHT))]
    assert len(lines) < 30
    assert "DOES NOT FIT (limit 90%)" in "\n".join(lines)


def test_json_has_the_figures_of_the_text():
    found = planned(rehearsal([sends(1.0)], flops=3e12, recomputed=1e12), ON_EIGHT)
    printed = "\n".join(plan.report(found))
    one = json.loads(json.dumps(plan.figures(found), allow_nan=False))
    assert one["step_time"] == one["compute"] + one["optimizer"] + sum(one["exposed"].values())
    (sent,) = one["sends"]
    for figure in (
        f"gradients {plan.gigabytes(one['state']['gradients'])} + ",
        f"activations {plan.gigabytes(one['memory']['activations'])}",
        f"= {plan.gigabytes(one['peak_memory'])} GB of {plan.gigabytes(one['device_memory'])} GB",
        f"on the wire {plan.gigabytes(sent['wire_bytes']):>6} GB  within a host",
        f"{one['flops'] / 1e12:.1f} + {one['recomputed_flops'] / 1e12:.1f} recomputed TFLOP",
        f"{one['exposed']['dp_shard']:.4g} of {one['communication']['dp_shard']:.4g} s",
        f"= {one['step_time']:.4g} s\n",
        f"here {0.98 * one['step_time']:.4g} to {1.42 * one['step_time']:.4g} s",
        f"{one['tokens_per_second_per_device']:,.0f} tokens/s/device, MFU {one['mfu']:.1%}",
        f"{one['training_hours']:,.1f} hours x {one['mesh']['dp_shard']}",
    ):
        assert figure in printed
    assert one["fits"] is True and one["measured"] is None


def run_the_loop() -> list[str]:
    """The lines that the loop of docs/plan.md prints."""
    page = (ROOT / "docs/plan.md").read_text()
    (code,) = re.findall(r"## The fastest of many plans\n.*?```python\n(.*?)```", page, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    return out.getvalue().splitlines()


@pytest.mark.slow(proves="the loop of docs/plan.md")
def test_the_documented_loop_runs_unchanged(pool):
    (lines,) = pool(1, run_the_loop)
    assert len(lines) == 5 and "--strategy hsdp --tp 1 --micro_batch_size 32" in lines[0]


def figures_of_tables() -> list[tuple[str, str]]:
    """(figure shown, figure planned) for each plan in a table of the documents."""

    def make_plan(flags: str) -> plan.Plan:
        return plan.make_plan(*plan.parse(flags.split()))

    found = []
    reference = (ROOT / "docs/reference.md").read_text()
    row = r"^\| `([\w-]+\.json)`.*?\| (\d+) \|.*\| ([\d.]+) GB \|$"
    for name, ranks, shown in re.findall(row, reference, re.M):
        planned = make_plan(f"--config {ROOT}/configs/{name} --world_size {ranks}")
        found.append((shown, plan.gigabytes(planned.rehearsal.peak)))
    page = (ROOT / "docs/plan.md").read_text()
    (flags,) = re.findall(r"tools\.plan (--model olmo-1b .*) --strategy ddp\n", page)
    for mesh, shown in re.findall(r"^\| `(--strategy .*?)` \| ([\d,]*\d)", page, re.M):
        planned = make_plan(f"{flags} {mesh}")
        found.append((shown, f"{planned.speed.tokens_per_second_per_device:,.0f}"))
    return found


@pytest.mark.slow(proves="plans of large models in tables of the documents")
def test_tables_show_the_figures_of_the_planner(pool):
    (found,) = pool(1, figures_of_tables, timeout=200)
    assert len(found) == 6
    assert [shown for shown, _ in found] == [planned for _, planned in found]


PUBLISHED = json.loads((ROOT / "docs/published.json").read_text())
SETS = {"fitted": "fitted on", "blind": "blind"}


def test_the_published_rows_can_be_planned():
    sets = collections.Counter(row["set"] for row in PUBLISHED)
    assert sets == {"fitted": 12, "blind": 21}
    for device in predict.DEVICES.values():
        assert device.kind == "cpu" or device.float32 or device.peak
    for row in PUBLISHED[::6]:
        plan.parse(row["flags"].split())
        assert row["source"] and row["tokens_per_second_per_device"] > 0


def predict_published() -> list[float]:
    """Return predicted / published speed - 1 for each row."""
    found = []
    for row in PUBLISHED:
        request, options, _ = plan.parse(row["flags"].split())
        one = plan.make_plan(request, options)
        ratio = one.speed.tokens_per_second_per_device / row["tokens_per_second_per_device"]
        found.append(ratio - 1)
    return found


def classes(row: dict) -> list[str]:
    """The lines of docs/plan.md's table in which a row counts."""
    request, _, _ = plan.parse(row["flags"].split())
    run, device = request.resolve(), request.cluster.device_type
    name = SETS[row["set"]]
    kinds = []
    if name == "blind":
        kinds = [device, row["trainer"], "tp" if run.tp > 1 else run.strategy]
    if name == "blind" and device in ("b300", "gh200", "mi325x"):
        kinds.append("devices seen only by their data sheets")
    return [name] + [f"{name}: {kind}" for kind in kinds]


@pytest.mark.slow(proves="all 33 published runs")
def test_errors_of_published_runs_match_docs_plan(pool):
    """Prints the tables of docs/plan.md (pytest -s): each run, then errors by group."""
    (errors,) = pool(1, predict_published, timeout=800)
    groups = {}
    for row, error in zip(PUBLISHED, errors):
        print(f"| {row['name']} | {row['tokens_per_second_per_device']:,.0f} | {error:+.0%} |")
        for name in classes(row):
            groups.setdefault(name, []).append(error)
    table = [
        f"| {name} | {len(group)} | {statistics.median(map(abs, group)):.0%} "
        f"| {statistics.median(group):+.0%} | {max(group, key=abs):+.0%} "
        f"| {sum(abs(error) <= 0.25 for error in group)} |"
        for name, group in groups.items()
    ]
    print("\n".join(table))
    ratios = {name: [] for name in SETS}
    for row, error in zip(PUBLISHED, errors):
        ratios[row["set"]].append(1 + error)
    low, _, high = statistics.quantiles(ratios["blind"], method="inclusive")
    assert (low, high) == pytest.approx(predict.TOOK, abs=0.005)
    compiled = [1 + error for row, error in zip(PUBLISHED, errors) if "124M" in row["name"]]
    assert (min(compiled), max(compiled)) == pytest.approx(predict.COMPILED, abs=0.005)
    page = (ROOT / "docs/plan.md").read_text()
    documented = re.findall(r"^\| .* \| [-+]\d+% \| [-+]\d+% \| \d+ \|$", page, re.M)
    assert len(documented) == 4 and {*documented} <= {*table}


ON_HOSTS_OF_4 = "--world_size 8 --nproc_per_node 4 --model gpt2-124m"


def test_the_cluster_has_the_bandwidths_of_the_flags():
    bandwidths = "--intra_host_bandwidth 100 --inter_host_bandwidth 10"
    request, _, _ = plan.parse(f"{ON_HOSTS_OF_4} {bandwidths}".split())
    links = request.cluster.links
    assert (links.intra_bandwidth, links.host_bandwidth) == (100e9, 10e9)
    assert request.cluster.world.local_size == 4


@pytest.mark.parametrize(
    "device, dtype, tflops",
    [("rtx4090", "bfloat16", 165.2), ("a6000", "bfloat16", 154.8), ("v100", "float32", 15.7)],
)
def test_a_workstation_card_needs_no_peak_tflops(device, dtype, tflops):
    request, *_ = plan.parse(f"{ON_HOSTS_OF_4} --device_type {device}".split())
    run = request.resolve()
    assert run.dtype == dtype
    assert predict.peak_flops(request.cluster, run) == tflops * 1e12


def test_what_was_measured_on_a_device_comes_before_the_assumptions(tmp_path):
    speeds = {"products, TFLOP/s": 494.5, "attention, TFLOP/s": 346.15, "copy, TB/s": 2.01}
    of_h100 = {
        "device": "NVIDIA H100 80GB HBM3",
        "steps": {"ceilings": {"status": 0, "figures": speeds}},
    }
    failed = of_h100 | {"steps": {"ceilings": {"status": 1}}}
    for name, contents in (("earlier", failed), ("h100", of_h100)):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "a.json").write_text(json.dumps(contents))
    h100 = predict.with_measured(predict.DEVICES["h100"], tmp_path / "results")
    assert (h100.products, h100.attention, h100.stream) == pytest.approx((0.5, 0.7, 0.6))
    assert h100.measured == "results/h100/a.json"
    h200 = predict.DEVICES["h200"]
    assert predict.with_measured(h200, tmp_path / "results") == h200
    # 1 s each at the measured speeds: a product, attention, and what moves 2.01 TB
    cluster = dataclasses.replace(CLUSTER, device=h100, achieved=None)
    for name, flops, moved in (
        ("mm", 494.5e12, 0),
        ("_flash_attention", 346.15e12, 0),
        ("add", 0, 2.01e12),
    ):
        row = Operation("forward", name, (), count=1, flops=flops, bytes=moved)
        assert predict.operation_seconds(row, 989e12, cluster) == pytest.approx(1)


def test_the_vocabulary_is_read_from_the_data(tokens):
    request, _, _ = plan.parse(f"{ON_HOSTS_OF_4} --data {tokens}".split())
    assert request.source.vocab_size == 257
    assert plan.parse(ON_HOSTS_OF_4.split())[0].source.vocab_size == 50257
    # A configuration can be planned without its data.
    argv = ["--config", str(ROOT / "configs/olmo-1b.json"), "--world_size", "64"]
    request, _, _ = plan.parse(argv)
    assert request.source.vocab_size == SIZES["olmo-1b"].vocab_size


def test_a_plan_of_a_run_shows_what_was_measured(run, pool):
    run(1, "--max_steps 5 --save_interval 5")
    out = run(2, "--max_steps 8 --strategy ddp")
    argv = f"--run {out} --peak_tflops 1".split()
    ((status, table, _),) = pool(1, listen, argv, plan.main)
    assert status == 0
    assert "mesh        ddp: dp_replicate 2 x dp_shard 1 x tp 1 = 2 x cpu, 2 on each" in table
    log = [row for row in rows(out) if row["step"] > 5]
    took = statistics.median(row["step_time"] for row in log[1:])
    peak = plan.gigabytes(max(row["peak_host_memory"] for row in log))
    assert f"measured    step {took:.4g} s, the median; peak memory {peak} GB" in table
    # The same log, changed as if GPUs had written it
    file = out / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["peak_device_memory"] = 7
        if line.get("event") == "start":
            line["device"] = "NVIDIA B200"
            line["config"]["warmup_steps"] = 50  # the default, though there are only 8 steps
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    request, _, measured = plan.parse(["--run", str(out)])
    assert (request.cluster.device_type, request.resolve().strategy) == ("b200", "ddp")
    assert measured.peak_memory == 7
