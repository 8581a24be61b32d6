"""A cluster in a box: trains across hosts that a slow network joins, all on this machine.

python -m tools.cluster --hosts 2 --nproc 2 --bandwidth 200mbit

The hosts are network namespaces on one virtual switch. Needs Linux, root and iproute2.
"""

import contextlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator
from pathlib import Path

import prepare
from runtime import cli
from tools.bench import (
    ONE_THREAD,
    ONLY_STEPS,
    STRATEGIES,
    TORCHRUN,
    TRAIN,
    CannotMeasure,
    RunFailed,
    Table,
    add_count,
    read_rows,
    report,
)

GRAD_ACCUM_STEPS = 8
# 2.4 million parameters: enough for the network to matter, and a run takes only seconds
MODEL = ["--model=tiny", "--d_model=192", "--d_ff=768", "--seq_len=64", "--micro_batch_size=1"]
SUBNET = "10.0.0"  # host 0 is 10.0.0.1; no other network sees these addresses
MAX_HOSTS = 254
FIRST_PORT = 29500  # of the rendezvous; each run takes the next one


def cluster(args: Namespace) -> Table:
    """Each strategy, with its gradients averaged once a step or after every micro-batch.

    gloo's reduce-scatter sends as much as an all-reduce, twice what nccl's sends: that is why
    micro_batch is so much slower under fsdp.
    """
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="cluster-") as folder,
        hosts(args.hosts, args.bandwidth) as namespaces,
    ):
        tokens = prepare_tokens(folder)
        for strategy in args.strategies:
            for sync in ("batch", "micro_batch"):
                print(f"{strategy}, {sync} ...", file=sys.stderr, flush=True)
                out = Path(folder, f"{strategy}-{sync}")
                flags = [*train_flags(strategy, sync, args), f"--data={tokens}", f"--out={out}"]
                run_on(namespaces, args.nproc, FIRST_PORT + len(rows), flags, out)
                row = {"strategy": strategy, "grad_sync": sync, "tokens/s/device": speeds(out)}
                rows.append(row)

    baseline = statistics.median(rows[0]["tokens/s/device"])
    for row in rows:
        ratios = [speed / baseline for speed in row["tokens/s/device"]]
        row[f"ratio to {rows[0]['strategy']}, batch"] = ratios
    subject = (
        f"{args.hosts} hosts x {args.nproc} processes, {args.bandwidth} each way between hosts, "
        f"2.4 million parameters, accumulation {GRAD_ACCUM_STEPS}, {args.steps} steps"
    )
    return Table(subject, rows)


def prepare_tokens(folder: str) -> Path:
    """A token folder of the sources of train.py."""
    tokens = Path(folder, "tokens")
    sources = sorted(str(path) for path in Path(TRAIN).parent.glob("*.py"))
    prepare.prepare(sources, tokens, say=lambda line: None)
    return tokens


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
    found = []
    for row in read_rows(out):
        if row.get("step_time") and row["step"] > 1:
            found.append(row["tokens_per_second_per_device"])
    return found


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
        add_switch(switch)
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


def add_switch(switch: str) -> None:
    ip("netns", "add", switch)
    ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    ip("-n", switch, "link", "set", "bridge", "up")


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


def run_on(
    namespaces: list[str],
    nproc: int,
    port: int,
    flags: list[str],
    out: Path,
    script: tuple[str, ...] = (TRAIN,),
) -> None:
    """Run train.py, or another script, under one torchrun on each host.

    What host i prints goes to the file `out`-host<i>.txt. Raises RunFailed if one fails.
    """
    environment = os.environ | ONE_THREAD
    environment["PYTHONPATH"] = str(Path(TRAIN).parent)  # for -m tools....
    environment["TMPDIR"] = str(out.parent)  # torchrun leaves folders there
    environment["GLOO_SOCKET_IFNAME"] = "eth0"  # gloo's default is the address of the host name
    logs = []
    agents = []
    for number, namespace in enumerate(namespaces):
        torchrun = [
            *TORCHRUN,
            f"--nnodes={len(namespaces)}",
            f"--nproc_per_node={nproc}",
            f"--node_rank={number}",
            f"--local_addr={address(number)}",
            f"--master_addr={address(0)}",
            f"--master_port={port}",
        ]
        logs.append(out.with_name(f"{out.name}-host{number}.txt"))
        with open(logs[-1], "w") as log:
            agent = subprocess.Popen(
                ["ip", "netns", "exec", namespace, *torchrun, *script, *flags],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        agents.append(agent)
    failed = wait_for(agents)
    if failed is not None:
        message = f"host {failed} failed: {' '.join([*script, *flags])}"
        raise RunFailed(message, logs[failed].read_text())


def wait_for(agents: list[subprocess.Popen]) -> int | None:
    """Wait until all have succeeded (returns None) or one has failed (returns its number).

    After a failure the others may wait for it forever, so it does not wait for them.
    """
    while True:
        statuses = [agent.poll() for agent in agents]
        for number, status in enumerate(statuses):
            if status:
                return number
        if None not in statuses:
            return None
        time.sleep(0.1)


# --------------------------------------------------------------------------------------------------
# The command line


def rate(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(\.\d+)?[kmgt]?i?(bit|bps)", text):
        raise ArgumentTypeError(f"{text} is not a rate as tc writes it, such as 200mbit or 1gbit")
    return text


def parse(argv: list[str]) -> Namespace:
    parser = cli.Parser(
        prog="tools.cluster",
        description="Measure training across hosts that a slow network joins, on this machine. "
        "Needs Linux, root and iproute2.",
    )
    parser.set_defaults(table="cluster")
    add_flags(parser)
    parser.add_argument(
        "--bandwidth",
        type=rate,
        default="200mbit",
        metavar="RATE",
        help="of each host's link, in each direction, as tc writes it (default: 200mbit)",
    )
    return parser.parse_args(argv)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of all that measures in these hosts."""
    add_count(parser, "--hosts", 2, "hosts")
    add_count(parser, "--nproc", 2, "processes on each host")
    add_count(parser, "--steps", 3, "counted steps of each run")
    parser.add_argument(
        "--strategies",
        nargs="+",
        default=list(STRATEGIES),
        choices=STRATEGIES,
        metavar="NAME",
        help=f"of {', '.join(STRATEGIES)}; the first is compared with (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print numbers, not a table")


def main(argv: list[str]) -> int:
    return cli.run("tools.cluster", lambda: report(cluster, parse(argv)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
