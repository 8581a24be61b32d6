"""The ranks, hosts and devices for which a run is resolved; a setting for freed memory."""

import ctypes
import dataclasses
import os
import socket
from dataclasses import dataclass

import torch

import dist
import metrics
from errors import UsageError


@dataclass(frozen=True)
class Machine:
    """The ranks and their hardware: rank 0's, but with the memory of the smallest device."""

    world_size: int
    local_size: int  # ranks per host
    device_type: str  # cpu or cuda
    device_name: str
    device_memory: int  # bytes: of the rank's GPU, or the rank's share of the host's memory
    has_bfloat16: bool  # whether the hardware multiplies in bfloat16, instead of emulating it


def read_machine(world: dist.World) -> Machine:
    """Describe this rank's hardware."""
    if world.device.type == "cuda":
        device_memory = torch.cuda.get_device_properties(world.device).total_memory
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        host_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        device_memory = host_memory // world.local_size
        capabilities = torch.cpu.get_capabilities()
        has_bfloat16 = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return Machine(
        world_size=world.size,
        local_size=world.local_size,
        device_type=world.device.type,
        device_name=metrics.device_name(world.device),
        device_memory=device_memory,
        has_bfloat16=has_bfloat16,
    )


def find_machine(world: dist.World) -> Machine:
    """Return the machine for which all ranks resolve the run. All ranks call it."""
    machines = dist.on_all_ranks(read_machine, world)
    smallest = min(machine.device_memory for machine in machines)
    return dataclasses.replace(machines[0], device_memory=smallest)


def check_bfloat16(world: dist.World) -> None:
    """Raise UsageError with this rank's number unless its hardware multiplies in bfloat16."""
    if not read_machine(world).has_bfloat16:
        raise UsageError(
            f"the run computes in bfloat16, which the hardware of rank {world.rank} on "
            f"{socket.gethostname()} only emulates: give --dtype bfloat16 to emulate it, or "
            "--dtype float32"
        )


def keep_freed_memory() -> None:
    """Have glibc keep freed memory for the next step, as torch does on GPUs.

    By default it returns large blocks to the kernel, which clears every page before it provides it
    again. That took a fifth of a step of gpt2-124m. Other C libraries have no mallopt.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(-8, 1)  # M_ARENA_MAX: one heap for all threads, gloo's included
        mallopt(-4, 0)  # M_MMAP_MAX: large blocks also come from the heap
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free memory stays there
