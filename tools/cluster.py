"""A cluster in a box: trains across hosts on a slow network, all on this machine.

python -m tools.cluster --hosts 2 --nproc 2 --bandwidth 200mbit
python -m tools.cluster --bandwidth 1gbit --predict

The hosts are network namespaces on one virtual switch. Needs Linux, root and iproute2.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed

import config
import prepare
from runtime import cli
from tools.bench import (
    JSON,
    ONLY_STEPS,
    STRATEGIES,
    TORCHRUN,
    TRAIN,
    CannotMeasure,
    Table,
    add_flags,
    count,
    counted_rows,
    mfu_alone,
    report,
    run_all,
    times,
)
from tools.planning import predict
from tools.planning.predict import Cluster, Links, Request

GRAD_ACCUM_STEPS = 8
# 2.4 million parameters: the network matters, yet a run takes only seconds
MODEL = ["--model=tiny", "--d_model=192", "--d_ff=768", "--seq_len=64", "--micro_batch_size=1"]
SUBNET = "10.0.0"  # host 0 is 10.0.0.1; invisible to other networks
PORTS = itertools.count(29500)  # for the rendezvous, one per run


def cluster(args: Namespace) -> Table:
    """Each strategy, with gradients averaged once per step or after every micro-batch.

    gloo's reduce-scatter sends as much as an all-reduce, twice what nccl's sends, which makes
    micro_batch so much slower under fsdp. --predict adds what tools.plan predicts.
    """
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as folder,
        hosts(args.hosts, args.bandwidth) as namespaces,
    ):
        sources = sorted(str(path) for path in Path(TRAIN).parent.glob("*.py"))
        with contextlib.redirect_stdout(None):
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
                speeds = [row["tokens_per_second_per_device"] for row in counted_rows(out)]
                row = {"strategy": strategy, "grad_sync": sync, "tokens/s/device": speeds}
                if args.predict:
                    machine = machines["single" if strategy == "ddp" else "fsdp"]
                    request = Request(config.parse(flags), machine, vocab_size=257, rank=0)
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
    """Add a column: another's values divided by the median of the first row's."""
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
        f"--max_steps={args.steps + 1}",  # the first is not counted
        "--device=cpu",
        "--peak_tflops=1",  # the log's mfu is TFLOP/s
    ]


# --------------------------------------------------------------------------------------------------
# What tools.plan predicts, from links and cores measured in the same hosts

ELEMENTS = 1 << 19  # 2 MB: the unit that fsdp gathers is 1 MB
IN_A_ROW = 4  # all_reduces: an idle link lets a burst of 256 kB through at once
ALONE_STEPS = 24  # 5 to 15 s, while processes start within 2 s of each other


def measured_machines(
    args: Namespace, namespaces: list[str], data: str, folder: Path
) -> dict[str, Cluster]:
    """The box as ranks see it without a mesh ("single"), and under FSDP ("fsdp").

    FSDP is slower: its copies and its Python take the same cores. All ranks compute at once and
    send nothing. Few steps run while another rank is still starting or has ended.
    """
    links_file = folder / "links.json"
    measure = ["-m", "tools.cluster", "--measure_links", str(links_file)]
    run_on(namespaces, args.nproc, measure, folder / "links")
    links = Links(args.nproc, *json.loads(links_file.read_text()), scatter_passes=2)
    inside = [enter(namespace) for namespace in namespaces * args.nproc]
    machines = {}
    for strategy in ("single", "fsdp"):
        flags = [*train_flags("ddp", "batch", args), data, f"--strategy={strategy}"]
        flags += [f"--global_batch_size={GRAD_ACCUM_STEPS}", f"--max_steps={ALONE_STEPS}"]
        achieved = mfu_alone(inside, flags, folder / strategy)
        box = Cluster(len(inside), "cpu", predict.DEVICES["cpu"], 1 << 60, links, achieved)
        machines[strategy] = predict.as_measured(box)
    return machines


def measure_links(out: str) -> None:
    """Write what gloo's all_reduce reaches within and between hosts, as JSON.

    Runs on all ranks, under torchrun.
    """
    torch.distributed.init_process_group("gloo")
    within, _ = torch.distributed.new_subgroups(int(os.environ["LOCAL_WORLD_SIZE"]))
    found = [bandwidth(within), bandwidth()]
    if torch.distributed.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def bandwidth(group=None) -> float:
    """Bytes per second that a rank sends in consecutive all_reduces, the median of several.

    In each it sends 2 (n - 1) / n of the tensor.
    """
    ranks = torch.distributed.get_world_size(group)
    if ranks == 1:
        return math.inf
    tensor = torch.zeros(ELEMENTS)

    def all_reduces() -> None:
        for _ in range(IN_A_ROW):
            torch.distributed.all_reduce(tensor, group=group)

    sent = IN_A_ROW * 2 * (ranks - 1) / ranks * tensor.nbytes
    return sent / statistics.median(times(all_reduces))


# --------------------------------------------------------------------------------------------------
# Hosts


@contextlib.contextmanager
def hosts(count: int, bandwidth: str) -> Iterator[list[str]]:
    """Network namespaces that play hosts on one switch; yields their names.

    The end of the block kills their processes and deletes them. Raises CannotMeasure if
    namespaces cannot be created.
    """
    check_requirements()
    prefix = f"cluster-{os.getpid()}"
    switch = f"{prefix}-switch"
    names = [f"{prefix}-host{number}" for number in range(count)]
    # SIGTERM becomes an exception, so that `finally` runs
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add bridge type bridge")
        ip(f"-n {switch} link set bridge up")
        for number, name in enumerate(names):
            add_host(name, number, switch, bandwidth)
        yield names
    finally:
        # A second Ctrl-C must not interrupt the removal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        existing = {line.split()[0] for line in ip("netns list").splitlines()}
        for name in (switch, *names):
            if name in existing:
                kill_all(name)
                ip(f"netns delete {name}")  # deletes its links too


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
    ip(f"netns add {name}")
    ip(f"link add eth0 netns {name} type veth peer name {port} netns {switch}")
    ip(f"-n {switch} link set {port} master bridge")
    ip(f"-n {name} address add {address(number)}/24 dev eth0")
    ip(f"-n {name} link set lo up")
    ip(f"-n {name} link set eth0 up")
    ip(f"-n {switch} link set {port} up")
    # Limit what each end sends: one limit per direction, like a cable. The burst is four of the
    # largest packets: 10 ms of 200mbit.
    bucket = f"root tbf rate {bandwidth} burst 256kb latency 50ms"
    ip(f"-n {name} qdisc add dev eth0 {bucket}", tool="tc")
    ip(f"-n {switch} qdisc add dev {port} {bucket}", tool="tc")


def address(number: int) -> str:
    return f"{SUBNET}.{number + 1}"


def ip(words: str, tool: str = "ip") -> str:
    """Run `ip` or `tc` of iproute2 and return what it prints. Raises CannotMeasure if it fails."""
    answer = subprocess.run([tool, *words.split()], capture_output=True, text=True)
    if answer.returncode != 0:
        message = " ".join(answer.stderr.split())
        if "not permitted" in message:
            message += ": a container needs --privileged for this"
        raise CannotMeasure(f"{tool} {words}: {message}")
    return answer.stdout


def kill_all(namespace: str) -> None:
    """Kill all processes in a namespace.

    No process group contains them all: torchrun starts every worker in a new session.
    """
    while pids := ip(f"netns pids {namespace}").split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


# --------------------------------------------------------------------------------------------------
# Runs


def run_on(namespaces: list[str], nproc: int, script: list[str], out: Path) -> None:
    """Run a script and its flags under one torchrun on each host. Raises RunFailed."""
    torchrun = [
        *TORCHRUN,
        f"--nnodes={len(namespaces)}",
        f"--nproc_per_node={nproc}",
        f"--master_addr={address(0)}",
        f"--master_port={next(PORTS)}",
    ]
    commands = []
    for number, namespace in enumerate(namespaces):
        host = [f"--node_rank={number}", f"--local_addr={address(number)}"]
        commands.append([*enter(namespace), *torchrun, *host, *script])
    # torchrun leaves folders in TMPDIR; gloo defaults to the host name's address.
    run_all(commands, out, TMPDIR=str(out.parent), GLOO_SOCKET_IFNAME="eth0")


def enter(namespace: str) -> list[str]:
    """The command prefix that runs a command in a namespace."""
    return ["ip", "netns", "exec", namespace]


# --------------------------------------------------------------------------------------------------
# The command line


FLAGS = {
    "hosts": count(2, "hosts"),
    "nproc": count(2, "processes on each host"),
    "steps": count(3, "counted steps of each run"),
    "bandwidth": dict(
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
    if argv[:1] == ["--measure_links"]:  # a rank started by `measured_machines`
        measure_links(argv[1])
        return 0
    return cli.execute("tools.cluster", lambda: report(cluster, parse(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
