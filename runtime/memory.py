"""The memory of this host and of this process, and what glibc does with freed memory."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import NamedTuple

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


class HostMemory(NamedTuple):
    """Bytes; resident and peak are 0 if the system does not report them."""

    resident: int  # of this process
    peak: int  # of this process so far
    available: int  # on this host


def host_memory() -> HostMemory:
    fields = read_fields(Path("/proc/self/status"))
    resident, peak = (1024 * fields.get(name, 0) for name in ("VmRSS:", "VmHWM:"))
    return HostMemory(resident, peak, available_memory())


def read_fields(path: Path) -> dict[str, int]:
    """The lines "name number ..." of a kernel file; empty if it does not exist."""
    fields = {}
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[1].isdecimal():
                fields[words[0]] = int(words[1])
    return fields


# --------------------------------------------------------------------------------------------------
# What glibc does with freed memory
#
# By default glibc returns large blocks to the kernel, which clears every page before handing it out
# again: a fifth of a step of gpt2-124m. So training takes all blocks from the heap and keeps them
# for the next step, as torch does on GPUs. The build and the first step do not: they also create
# small objects that live until the end and would lie between the large blocks, whose memory could
# then never be merged and reused. Other C libraries have neither mallopt nor malloc_trim.

# Options of mallopt, from malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_MMAP_MAX = -4
M_ARENA_MAX = -8


def set_malloc_option(option: int, value: int) -> None:
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(option, value)


def separate_large_blocks() -> None:
    """Allocate blocks of 1 MiB and more outside the heap; use one heap for all threads.

    Otherwise gloo's threads get heaps too small for their buffers.
    """
    set_malloc_option(M_MMAP_THRESHOLD, 1 << 20)
    set_malloc_option(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep freed memory for the next step; the loop calls `trim_freed_memory` now and then."""
    set_malloc_option(M_MMAP_MAX, 0)
    set_malloc_option(M_TRIM_THRESHOLD, 2**31 - 1)  # an int
    trim_freed_memory()


def trim_freed_memory() -> None:
    """Return all free memory of the heap to the kernel."""
    if malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        malloc_trim(0)
