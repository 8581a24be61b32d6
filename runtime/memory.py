"""The memory of this host, and what glibc does with freed memory."""

import contextlib
import ctypes
import os
from pathlib import Path

import torch


def device_memory(device: torch.device, local_size: int) -> int:
    """Bytes that each of `local_size` ranks may fill: its GPU, or its share of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return available_memory() // local_size


def available_memory() -> int:
    """Bytes that this host can give to its processes, including the page cache.

    MemAvailable on Linux, or less if a cgroup limits it; on other systems all physical memory.
    """
    fields = read_fields(Path("/proc/meminfo"))
    if "MemAvailable:" in fields:
        available = 1024 * fields["MemAvailable:"]
    else:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cgroup = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no cgroup, or "max": no limit
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        cache = read_fields(cgroup / "memory.stat").get("inactive_file", 0)
        available = min(available, max(0, limit - used + cache))
    return available


def read_fields(path: Path) -> dict[str, int]:
    """The lines "name number ..." of a kernel file; empty if it does not exist."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[1].isdecimal():
                fields[words[0]] = int(words[1])
    return fields


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step, as torch does on GPUs.

    By default it returns large blocks to the kernel, which clears every page before handing it out
    again: a fifth of a step of gpt2-124m. Other C libraries have no mallopt.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads, gloo's included
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap, too
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free memory stays there
