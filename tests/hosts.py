"""Hosts on one machine: network namespaces connected by a switch. Needs root and iproute2."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from errors import UsageError


@contextlib.contextmanager
def hosts(count: int, link: str) -> Iterator[list[str]]:
    """Yield the names of `count` namespaces with `link`, a rate as tc writes it, in each direction.

    At the end of the block, kills the processes in them and deletes them. Raises UsageError if
    namespaces cannot be created.
    """
    if os.geteuid() or not shutil.which("tc"):
        raise UsageError("hosts need root, and ip and tc: apt-get install iproute2")
    prefix = f"test-{os.getpid()}"
    switch = f"{prefix}-switch"
    names = [f"{prefix}-host{number}" for number in range(count)]
    # SIGTERM becomes an exception, so that `finally` runs
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add bridge type bridge")
        ip(f"-n {switch} link set bridge up")
        for number, name in enumerate(names):
            add_host(name, number, switch, link)
        yield names
    finally:
        # A second Ctrl-C must not interrupt the removal
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name in (switch, *names):
            with contextlib.suppress(UsageError):  # not created yet
                kill_all(name)
                ip(f"netns delete {name}")  # also deletes its links


def add_host(name: str, number: int, switch: str, link: str) -> None:
    """Create a host and connect its eth0 to a port of the switch."""
    port = f"port{number}"
    ip(f"netns add {name}")
    ip(f"link add eth0 netns {name} type veth peer name {port} netns {switch}")
    ip(f"-n {switch} link set {port} master bridge")
    ip(f"-n {name} address add {address(number)}/24 dev eth0")
    ip(f"-n {name} link set lo up")
    ip(f"-n {name} link set eth0 up")
    ip(f"-n {switch} link set {port} up")
    # Limit what each end sends: one limit per direction, as in a cable. The burst is four of
    # the largest packets: 10 ms at 200mbit.
    bucket = f"root tbf rate {link} burst 256kb latency 50ms"
    ip(f"-n {name} qdisc add dev eth0 {bucket}", tool="tc")
    ip(f"-n {switch} qdisc add dev {port} {bucket}", tool="tc")


def address(number: int) -> str:
    return f"10.0.0.{number + 1}"  # invisible to other networks


def ip(words: str, tool: str = "ip") -> str:
    """Run `ip` or `tc` of iproute2 and return what it prints. Raises UsageError if it fails."""
    answer = subprocess.run([tool, *words.split()], capture_output=True, text=True)
    if answer.returncode != 0:
        message = " ".join(answer.stderr.split())
        raise UsageError(f"{tool} {words}: {message} (a container needs --privileged)")
    return answer.stdout


def kill_all(namespace: str) -> None:
    """Kill all processes in a namespace, until none is left."""
    while pids := ip(f"netns pids {namespace}").split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
