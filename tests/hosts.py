"""Hosts on one machine: network namespaces connected by a switch. Needs root and iproute2."""

import contextlib
import os
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Yield the names of two namespaces, in which eth0 has `address`, and delete them at the end.

    Raises CalledProcessError or OSError if namespaces cannot be created.
    """
    switch, *names = [f"test-{os.getpid()}-{name}" for name in ("switch", "host0", "host1")]
    try:
        ip(f"netns add {switch}")
        ip(f"-n {switch} link add bridge type bridge")
        ip(f"-n {switch} link set bridge up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ip(f"netns add {name}")
            ip(f"link add eth0 netns {name} type veth peer name {port} netns {switch}")
            ip(f"-n {switch} link set {port} master bridge")
            ip(f"-n {switch} link set {port} up")
            ip(f"-n {name} address add {address(number)}/24 dev eth0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set eth0 up")
        yield names
    finally:
        for name in (switch, *names):
            with contextlib.suppress(subprocess.CalledProcessError, OSError):  # not created
                ip(f"netns delete {name}")  # also deletes its links


def address(number: int) -> str:
    return f"10.0.0.{number + 1}"  # invisible to other networks


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True)
