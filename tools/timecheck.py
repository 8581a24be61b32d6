"""Is a step as long as tools.plan predicts? Measured in the cluster in a box, at two bandwidths.

python -m tools.timecheck --bandwidths 200mbit 1gbit --rounds 2

Each round measures what the prediction starts from: the speed of all ranks that compute at once
without communication, without FSDP and with it, and gloo's bandwidth and latency within a host and
between hosts. Then it trains with each strategy. Rounds and bandwidths take turns, A B A B. Needs
Linux, root and iproute2.
"""

import dataclasses
import json
import math
import os
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed

import config
from runtime import cli
from tools import bench, cluster
from tools.bench import TRAIN, Table
from tools.compare import read_rows
from tools.planning import predict
from tools.planning.predict import Cluster, Links, Request

# --------------------------------------------------------------------------------------------------
# gloo's links, measured by all ranks: this file is then run by torchrun

SMALL = 256  # elements: latency
LARGE = 1 << 19  # elements, 2 MB: the unit that fsdp gathers in tools.cluster's model is 1 MB
REPEATS = 20


def measure_links(out: str) -> None:
    """Write what gloo's all_reduce reaches, within a host and between hosts, as JSON."""
    torch.distributed.init_process_group("gloo")
    size = torch.distributed.get_world_size()
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    within, _ = torch.distributed.new_subgroups(local_size)
    links = solve(
        local_size=local_size,
        hosts=size // local_size,
        within=[seconds_of(SMALL, within), seconds_of(LARGE, within)],
        between=[seconds_of(SMALL), seconds_of(LARGE)],
    )
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(dataclasses.asdict(links)))
    torch.distributed.destroy_process_group()


def seconds_of(elements: int, group=None) -> float:
    """Median seconds of an all_reduce."""
    tensor = torch.zeros(elements)
    found = []
    for _ in range(REPEATS):
        torch.distributed.barrier()
        began = time.perf_counter()
        torch.distributed.all_reduce(tensor, group=group)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def solve(local_size: int, hosts: int, within: list[float], between: list[float]) -> Links:
    """The links for which predict.collective_seconds gives these times, [small, large].

    Within a host an all_reduce is a ring of local_size - 1 hops a pass; between hosts it takes a
    tree, which has as many and the logarithm of the hosts.
    """
    inner = fit(local_size, within)
    outer = fit(local_size * hosts, between)
    hop = inner.latency / max(1, local_size - 1)
    return Links(
        local_size=local_size,
        intra_bandwidth=inner.bandwidth,
        host_bandwidth=outer.bandwidth,
        intra_latency=hop,
        inter_latency=max(0.0, outer.latency - inner.latency) / max(1.0, math.log2(hosts)),
        launch_latency=0.0,
        scatter_passes=2,
    )


@dataclass(frozen=True)
class Line:
    """Seconds of an all_reduce = 2 x latency + 2 (n - 1) / n x bytes / bandwidth."""

    latency: float  # seconds of a pass
    bandwidth: float  # bytes per second


def fit(ranks: int, seconds: list[float]) -> Line:
    """The line through the times of the small and the large tensor; one rank takes no time."""
    if ranks == 1:
        return Line(0.0, math.inf)
    small, large = (2 * (ranks - 1) / ranks * 4 * elements for elements in (SMALL, LARGE))
    bandwidth = (large - small) / (seconds[1] - seconds[0])
    return Line(max(0.0, seconds[0] - small / bandwidth) / 2, bandwidth)


# --------------------------------------------------------------------------------------------------
# Measured and predicted


@dataclass
class Case:
    """A strategy at a bandwidth."""

    bandwidth: str
    strategy: str
    sync: str
    measured: list[float] = field(default_factory=list)  # seconds of a step, by round
    predicted: list[float] = field(default_factory=list)


def check(args: Namespace) -> Table:
    """Step times predicted and measured, and their ratios to ddp's."""
    cases = []
    for bandwidth in args.bandwidths:
        for strategy in args.strategies:
            for sync in args.syncs:
                cases.append(Case(bandwidth, strategy, sync))
    with tempfile.TemporaryDirectory(prefix="timecheck-") as folder:
        tokens = cluster.prepare_tokens(folder)
        for turn in range(args.rounds):
            for bandwidth in args.bandwidths:
                of_bandwidth = [case for case in cases if case.bandwidth == bandwidth]
                work = Path(folder, f"{turn}-{bandwidth}")
                work.mkdir()
                run_round(of_bandwidth, args, turn, tokens, work)
    return Table(
        f"{args.hosts} hosts x {args.nproc} processes, {args.rounds} rounds",
        [row for bandwidth in args.bandwidths for row in rows_of(cases, bandwidth)],
    )


def run_round(cases: list[Case], args: Namespace, turn: int, tokens: Path, work: Path) -> None:
    """Measure the machine, then each case; predict each from that."""
    bandwidth = cases[0].bandwidth
    with cluster.hosts(args.hosts, bandwidth) as namespaces:
        port = cluster.FIRST_PORT
        bench.show_round(turn, args.rounds, f"{bandwidth}, links and cores")
        script = ("-m", "tools.timecheck")
        links_file = work / "links.json"
        flags = ["--measure_links", str(links_file)]
        cluster.run_on(namespaces, args.nproc, port, flags, work / "links", script)
        machine = measured_cluster(args, Links(**json.loads(links_file.read_text())))
        speeds = {}
        for strategy in ("single", "fsdp"):
            flags = cluster.train_flags("ddp", "batch", args) + [f"--data={tokens}"]
            speeds[strategy] = measured_speed(strategy, machine, flags, work / strategy)
        for number, case in enumerate(cases, start=1):
            bench.show_round(turn, args.rounds, f"{bandwidth}, {case.strategy}, {case.sync}")
            out = work / f"{case.strategy}-{case.sync}"
            flags = cluster.train_flags(case.strategy, case.sync, args) + [f"--data={tokens}"]
            cluster.run_on(namespaces, args.nproc, port + number, [*flags, f"--out={out}"], out)
            case.measured.append(step_seconds(out))
            speed = speeds["single" if case.strategy == "ddp" else "fsdp"]
            step = predicted_step(flags, dataclasses.replace(machine, achieved=speed))
            case.predicted.append(step.total)


def step_seconds(out: Path) -> float:
    """The median step but the first, which sets up buckets and buffers."""
    return statistics.median(
        row["step_time"] for row in read_rows(out) if row.get("step_time") and row["step"] > 1
    )


def measured_cluster(args: Namespace, links: Links) -> Cluster:
    """The box as a cluster, but for the speed of its ranks."""
    # A measured step has the optimizer in it.
    no_optimizer = dataclasses.replace(predict.DEVICES["cpu"], memory_bandwidth=float("inf"))
    return Cluster(
        world_size=args.hosts * args.nproc,
        device_type="cpu",
        device=no_optimizer,
        device_memory=1 << 60,
        links=links,
        achieved=1.0,
    )


def measured_speed(strategy: str, machine: Cluster, flags: list[str], out: Path) -> float:
    """TFLOP/s of a rank that sends nothing, while as many as the box has share its cores.

    Under FSDP they are fewer: its copies and its Python take the same cores.
    """
    flags = [*flags, f"--strategy={strategy}", f"--global_batch_size={cluster.GRAD_ACCUM_STEPS}"]
    out.mkdir()
    bench.run_at_once([sys.executable, TRAIN, *flags], machine.world_size, str(out))
    seconds = statistics.median(step_seconds(out / str(job)) for job in range(machine.world_size))
    one_device = dataclasses.replace(machine.links, local_size=1)
    alone = dataclasses.replace(machine, world_size=1, links=one_device)
    return request_of(flags, alone).rehearse().flops / seconds / 1e12


def request_of(flags: list[str], machine: Cluster) -> Request:
    c = config.parse([*flags, "--peak_tflops=1"])
    return Request(c, machine, vocab_size=257, rank=0)


def predicted_step(flags: list[str], machine: Cluster) -> predict.StepTime:
    request = request_of(flags, machine)
    return predict.predict(request.rehearse(), request.config, machine)


def rows_of(cases: list[Case], bandwidth: str) -> list[dict]:
    """The rows of a bandwidth; the first case, ddp's, is what the others are compared with."""
    of_bandwidth = [case for case in cases if case.bandwidth == bandwidth]
    first = of_bandwidth[0]
    rows = []
    for case in of_bandwidth:
        measured = bench.ratios(case.measured, first.measured)
        predicted = bench.ratios(case.predicted, first.predicted)
        error = statistics.median(predicted) / statistics.median(measured) - 1
        rows.append(
            {
                "bandwidth": bandwidth,
                "strategy": case.strategy,
                "grad_sync": case.sync,
                "step, s": case.measured,
                "predicted, s": case.predicted,
                f"ratio to {first.strategy}": measured,
                "predicted ratio": predicted,
                "error": f"{error:+.0%}",
                "place": place(case, of_bandwidth, measured_seconds),
                "predicted place": place(case, of_bandwidth, predicted_seconds),
            }
        )
    return rows


def measured_seconds(case: Case) -> float:
    return statistics.median(case.measured)


def predicted_seconds(case: Case) -> float:
    return statistics.median(case.predicted)


def place(case: Case, cases: list[Case], seconds: Callable[[Case], float]) -> str:
    """1 is the fastest."""
    return str(1 + sum(seconds(other) < seconds(case) for other in cases))


# --------------------------------------------------------------------------------------------------
# The command line


def parse(argv: list[str]) -> Namespace:
    parser = cli.Parser(
        prog="tools.timecheck",
        description="Compare the step times that tools.plan predicts for this machine with those "
        "of the cluster in a box. Needs Linux, root and iproute2.",
    )
    parser.set_defaults(table="timecheck")
    cluster.add_flags(parser)
    parser.add_argument(
        "--bandwidths",
        type=cluster.rate,
        nargs="+",
        default=["200mbit", "1gbit"],
        metavar="RATE",
        help="of each host's link, as tc writes them (default: 200mbit 1gbit)",
    )
    bench.add_count(parser, "--rounds", 2, "rounds over the bandwidths")
    parser.add_argument(
        "--syncs",
        nargs="+",
        default=["batch"],
        choices=("batch", "micro_batch"),
        metavar="SYNC",
        help="of batch, micro_batch (default: batch)",
    )
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    if argv[:1] == ["--measure_links"]:  # a rank that `run_round` has started
        measure_links(argv[1])
        return 0
    return cli.run("tools.timecheck", lambda: bench.report(check, parse(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
