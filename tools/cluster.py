"""A cluster in a box: trains across hosts that a slow network joins, all on this machine.

python -m tools.cluster --hosts 2 --nproc 2 --bandwidth 200mbit
python -m tools.cluster --bandwidth 1gbit --predict

The hosts are network namespaces on one virtual switch. Needs Linux, root and iproute2.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed

import config
import prepare
from metrics import read_rows
from runtime import cli
from tools.bench import (
    JSON,
    ONLY_STEPS,
    STRATEGIES,
    TORCHRUN,
    TRAIN,
    CannotMeasure,
    Job,
    Table,
    add_flags,
    count,
    report,
)
from tools.planning import predict
from tools.planning.predict import Cluster, Links, Request

GRAD_ACCUM_STEPS = 8
# 2.4 million parameters: enough for the network to matter, and a run takes only seconds
MODEL = ["--model=tiny", "--d_model=192", "--d_ff=768", "--seq_len=64", "--micro_batch_size=1"]
SUBNET = "10.0.0"  # host 0 is 10.0.0.1; no other network sees these addresses
MAX_HOSTS = 254
PORTS = itertools.count(29500)  # of the rendezvous; each run takes the next one


def cluster(args: Namespace) -> Table:
    """Each strategy, with its gradients averaged once a step or after every micro-batch.

    gloo's reduce-scatter sends as much as an all-reduce, twice what nccl's sends: that is why
    micro_batch is so much slower under fsdp. With --predict also what tools.plan predicts.
    """
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as folder,
        hosts(args.hosts, args.bandwidth) as namespaces,
    ):
        sources = sorted(str(path) for path in Path(TRAIN).parent.glob("*.py"))
        with contextlib.redirect_stdout(None):  # quiet
            prepare.prepare(sources, Path(folder, "tokens"))
        data = f"--data={folder}/tokens"
        if args.predict:
            print("links and cores ...", file=sys.stderr, flush=True)
            machines = measured_machines(args, namespaces, data, Path(folder))
        for strategy in args.strategies:
            for sync in ("batch", "micro_batch"):
                print(f"{strategy}, {sync} ...", file=sys.stderr, flush=True)
                out = Path(folder, f"{strategy}-{sync}")
                flags = [*train_flags(strategy, sync, args), data]
                run_on(namespaces, args.nproc, [TRAIN, *flags, f"--out={out}"], out)
                row = {"strategy": strategy, "grad_sync": sync, "tokens/s/device": speeds(out)}
                if args.predict:
                    machine = machines["single" if strategy == "ddp" else "fsdp"]
                    request = request_of(flags, machine)
                    found = predict.speed(request.rehearse(), request.config, machine)
                    row["predicted"] = [found.tokens_per_second_per_device]
                rows.append(row)

    ratio = f"ratio to {rows[0]['strategy']}, batch"
    add_ratios(rows, "tokens/s/device", ratio)
    if args.predict:
        add_ratios(rows, "predicted", "predicted ratio")
        for row in rows:
            error = row["predicted ratio"][0] / statistics.median(row[ratio]) - 1
            row["error"] = f"{error:+.0%}"
    subject = (
        f"{args.hosts} hosts x {args.nproc} processes, {args.bandwidth} each way between hosts, "
        f"2.4 million parameters, accumulation {GRAD_ACCUM_STEPS}, {args.steps} steps"
    )
    return Table(subject, rows)


def add_ratios(rows: list[dict], column: str, name: str) -> None:
    """Add a column: the values of another one divided by the median of the first row's."""
    baseline = statistics.median(rows[0][column])
    for row in rows:
        row[name] = [value / baseline for value in row[column]]


def train_flags(strategy: str, sync: str, args: Namespace) -> list[str]:
    return [
        *ONLY_STEPS,
        *MODEL,
        *STRATEGIES[strategy].split(),
        f"--grad_sync={sync}",
        f"--global_batch_size={GRAD_ACCUM_STEPS * args.hosts * args.nproc}",
        f"--max_steps={args.steps + 1}",  # the first one is not counted
        "--device=cpu",
    ]


def speeds(out: Path) -> list[float]:
    """Tokens/s/device of every step but the first, which sets up buckets and buffers."""
    rows = [row for row in read_rows(out / "metrics.jsonl") if "loss" in row]
    return [row["tokens_per_second_per_device"] for row in rows if row["step"] > 1]


# --------------------------------------------------------------------------------------------------
# What tools.plan predicts, from links and cores that are measured in the same hosts

SMALL = 256  # elements: latency
LARGE = 1 << 19  # elements, 2 MB: the unit that fsdp gathers is 1 MB
REPEATS = 20


def request_of(flags: list[str], machine: Cluster) -> Request:
    c = config.parse([*flags, "--peak_tflops=1"])
    return Request(c, machine, vocab_size=257, rank=0)


def measured_machines(
    args: Namespace, namespaces: list[str], data: str, folder: Path
) -> dict[str, Cluster]:
    """The box as ranks without a mesh find it ("single"), and as those under FSDP ("fsdp").

    These compute more slowly: FSDP's copies and its Python take the same cores. All ranks compute
    at once, and send nothing.
    """
    links_file = folder / "links.json"
    measure = ["-m", "tools.cluster", "--measure_links", str(links_file)]
    run_on(namespaces, args.nproc, measure, folder / "links")
    # A measured step has the optimizer in it.
    no_optimizer = dataclasses.replace(predict.DEVICES["cpu"], memory_bandwidth=math.inf)
    machine = Cluster(
        world_size=args.hosts * args.nproc,
        device_type="cpu",
        device=no_optimizer,
        device_memory=1 << 60,
        links=Links(**json.loads(links_file.read_text())),
        achieved=1.0,
    )
    one_device = dataclasses.replace(machine.links, local_size=1)
    alone = dataclasses.replace(machine, world_size=1, links=one_device)
    machines = {}
    for strategy in ("single", "fsdp"):
        flags = [*train_flags("ddp", "batch", args), data, f"--strategy={strategy}"]
        flags.append(f"--global_batch_size={GRAD_ACCUM_STEPS}")
        outs = [folder / f"{strategy}-{rank}" for rank in range(machine.world_size)]
        commands = [[sys.executable, TRAIN, *flags, f"--out={out}"] for out in outs]
        run_all(namespaces * args.nproc, commands, folder / strategy)
        speed = statistics.median(speed for out in outs for speed in speeds(out))
        rehearsal = request_of(flags, alone).rehearse()
        flops = rehearsal.flops / rehearsal.layout.tokens_per_step * speed
        machines[strategy] = dataclasses.replace(machine, achieved=flops / 1e12)
    return machines


def measure_links(out: str) -> None:
    """Write what gloo's all_reduce reaches, within a host and between hosts, as JSON.

    Runs on all ranks, under torchrun.
    """
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
    inner_latency, inner_bandwidth = fit(local_size, within)
    latency, bandwidth = fit(local_size * hosts, between)
    return Links(
        local_size=local_size,
        intra_bandwidth=inner_bandwidth,
        host_bandwidth=bandwidth,
        intra_latency=inner_latency / max(1, local_size - 1),
        inter_latency=max(0.0, latency - inner_latency) / max(1.0, math.log2(hosts)),
        launch_latency=0.0,
        scatter_passes=2,
    )


def fit(ranks: int, seconds: list[float]) -> tuple[float, float]:
    """Seconds of a pass without data, and bytes per second, from the times of both tensors.

    Seconds of an all_reduce = 2 x latency + 2 (n - 1) / n x bytes / bandwidth; of one rank, none.
    """
    if ranks == 1:
        return 0.0, math.inf
    small, large = (2 * (ranks - 1) / ranks * 4 * elements for elements in (SMALL, LARGE))
    bandwidth = (large - small) / (seconds[1] - seconds[0])
    return max(0.0, seconds[0] - small / bandwidth) / 2, bandwidth


# --------------------------------------------------------------------------------------------------
# Hosts


@contextlib.contextmanager
def hosts(count: int, bandwidth: str) -> Iterator[list[str]]:
    """Network namespaces that play hosts on one switch; yields their names.

    They are deleted when the block ends, and all processes in them are killed. Raises CannotMeasure
    where namespaces cannot be created.
    """
    if count > MAX_HOSTS:
        raise CannotMeasure(f"--hosts {count}: {SUBNET}.0/24 has room for {MAX_HOSTS}")
    check_requirements()
    prefix = f"cluster-{os.getpid()}"
    switch = f"{prefix}-switch"
    names = [f"{prefix}-host{number}" for number in range(count)]
    # SIGTERM becomes an exception, so that `finally` runs
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            add_host(name, number, switch, bandwidth)
        yield names
    finally:
        # A second, impatient Ctrl-C must not interrupt the removal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        existing = {line.split()[0] for line in ip("netns", "list").splitlines()}
        for name in (switch, *names):
            if name in existing:
                kill_all(name)
                ip("netns", "delete", name)  # deletes its links too


def check_requirements() -> None:
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise CannotMeasure(
            f"{' and '.join(missing)} not found: install iproute2 (apt-get install iproute2)"
        )
    if os.geteuid() != 0:
        raise CannotMeasure(
            "network namespaces need root: run with sudo, or in a container with --privileged"
        )


def add_host(name: str, number: int, switch: str, bandwidth: str) -> None:
    """Create a host and connect its eth0 to a port of the switch."""
    port = f"port{number}"
    ip("netns", "add", name)
    cable = f"link add eth0 netns {name} type veth peer name {port} netns {switch}"
    ip(*cable.split())
    ip("-n", switch, "link", "set", port, "master", "bridge")
    ip("-n", name, "address", "add", f"{address(number)}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", switch, "link", "set", port, "up")
    # A limit on what each end sends: one for each direction, as a cable has
    limit_bandwidth(name, "eth0", bandwidth)
    limit_bandwidth(switch, port, bandwidth)


def limit_bandwidth(namespace: str, device: str, bandwidth: str) -> None:
    """Limit what a device sends. The burst is four of the largest packets: 10 ms of 200mbit."""
    bucket = f"root tbf rate {bandwidth} burst 256kb latency 50ms"
    ip("-n", namespace, "qdisc", "add", "dev", device, *bucket.split(), tool="tc")


def address(number: int) -> str:
    return f"{SUBNET}.{number + 1}"


def ip(*words: str, tool: str = "ip") -> str:
    """Run `ip` or `tc` of iproute2 and return what it prints. Raises CannotMeasure if it fails."""
    answer = subprocess.run([tool, *words], capture_output=True, text=True)
    if answer.returncode != 0:
        message = " ".join(answer.stderr.split())
        if "not permitted" in message:
            message += ": a container needs --privileged for this"
        raise CannotMeasure(f"{tool} {' '.join(words)}: {message}")
    return answer.stdout


def kill_all(namespace: str) -> None:
    """Kill all processes in a namespace.

    No process group contains them all: torchrun starts every worker in a new session.
    """
    while pids := ip("netns", "pids", namespace).split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


# --------------------------------------------------------------------------------------------------
# Runs


def run_on(namespaces: list[str], nproc: int, script: list[str], out: Path) -> None:
    """Run a script and its flags under one torchrun on each host. Raises RunFailed."""
    port = next(PORTS)
    commands = []
    for number in range(len(namespaces)):
        command = [
            *TORCHRUN,
            f"--nnodes={len(namespaces)}",
            f"--nproc_per_node={nproc}",
            f"--node_rank={number}",
            f"--local_addr={address(number)}",
            f"--master_addr={address(0)}",
            f"--master_port={port}",
            *script,
        ]
        commands.append(command)
    run_all(namespaces, commands, out)


def run_all(namespaces: list[str], commands: list[list[str]], out: Path) -> None:
    """Run commands at the same time, number i in namespace i. Raises RunFailed if one fails."""
    inside = []
    for namespace, command in zip(namespaces, commands, strict=True):
        inside.append(["ip", "netns", "exec", namespace, *command])
    environment = {
        "TMPDIR": str(out.parent),  # torchrun leaves folders there
        "GLOO_SOCKET_IFNAME": "eth0",  # gloo's default is the address of the host name
    }
    with Job(inside, [environment] * len(inside), out) as job:
        while job.is_running():
            time.sleep(0.1)


# --------------------------------------------------------------------------------------------------
# The command line


def rate(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmgt]?i?(bit|bps)", text):
        raise ArgumentTypeError(f"{text} is not a rate as tc writes it, such as 200mbit or 1gbit")
    return text


FLAGS = {
    "hosts": count(2, "hosts"),
    "nproc": count(2, "processes on each host"),
    "steps": count(3, "counted steps of each run"),
    "bandwidth": dict(
        type=rate,
        default="200mbit",
        metavar="RATE",
        help="of each host's link, in each direction, as tc writes it (default: 200mbit)",
    ),
    "strategies": dict(
        nargs="+",
        default=list(STRATEGIES),
        choices=STRATEGIES,
        metavar="NAME",
        help=f"of {', '.join(STRATEGIES)}; the first is compared with (default: all)",
    ),
    "predict": dict(
        action="store_true",
        help="also measure links and cores, and print what tools.plan predicts from them",
    ),
    "json": JSON,
}


def parse(argv: list[str]) -> Namespace:
    parser = cli.Parser(
        prog="tools.cluster",
        description="Measure training across hosts that a slow network joins, on this machine. "
        "Needs Linux, root and iproute2.",
    )
    parser.set_defaults(table="cluster")
    add_flags(parser, FLAGS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    if argv[:1] == ["--measure_links"]:  # a rank that `measured_machines` has started
        measure_links(argv[1])
        return 0
    return cli.run("tools.cluster", lambda: report(cluster, parse(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
