"""What a run is resolved for: ranks, hosts, devices; and what glibc does with freed memory."""

import ctypes
import os
import socket
from dataclasses import dataclass

import torch

import dist
import metrics
from runtime.cli import UsageError


@dataclass(frozen=True)
class Machine:
    """The ranks and their hardware. A run is resolved for rank 0's on all ranks."""

    world_size: int
    local_size: int  # ranks of a host
    device_type: str  # cpu or cuda
    device_name: str
    device_memory: int  # bytes that a rank may fill
    has_bfloat16: bool  # the hardware multiplies in it


def read_machine(world: dist.World) -> Machine:
    """Describe this rank's hardware."""
    return Machine(
        world_size=world.size,
        local_size=world.local_size,
        device_type=world.device.type,
        device_name=metrics.device_name(world.device),
        device_memory=device_memory(world.device, world.local_size),
        has_bfloat16=has_bfloat16(world.device),
    )


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware multiplies in bfloat16, instead of emulating it."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def check_bfloat16(world: dist.World) -> None:
    """Raise UsageError, which names this rank, unless its hardware multiplies in bfloat16."""
    if not has_bfloat16(world.device):
        raise UsageError(
            f"the run computes in bfloat16, which the hardware of rank {world.rank} on "
            f"{socket.gethostname()} only emulates: give --dtype bfloat16 to emulate it, or "
            "--dtype float32"
        )


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
