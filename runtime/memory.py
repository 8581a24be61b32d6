"""The memory of this host, and what glibc does with freed memory."""

import ctypes
import os

import torch


def device_memory(device: torch.device, local_size: int) -> int:
    """Bytes that each of `local_size` ranks may fill: its GPU, or its share of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local_size


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step, as torch does on GPUs.

    By default it returns large blocks to the kernel, which clears every page before handing it out
    again: a fifth of a step of gpt2-124m. Other C libraries have no mallopt.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads, gloo's included
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap, too
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free memory stays there
