"""A ring all_reduce by hand: torchrun --standalone --nproc_per_node 4 examples/ring.py"""

from pathlib import Path

import torch
import torch.distributed as td


def exchange(chunk):
    """Send a chunk to the next rank of the ring, and return the one of the rank before."""
    received = torch.empty_like(chunk)
    request = td.isend(chunk, (rank + 1) % n)
    td.recv(received, (rank - 1) % n)
    request.wait()
    return received


def all_reduce(tensor):
    """Replace `tensor` by the sum over all ranks: twice n - 1 rounds, each sends a chunk."""
    chunks = tensor.view(n, -1)
    for i in range(n - 1):  # reduce_scatter: one chunk of the sum ends at each rank
        chunks[(rank - i - 1) % n] += exchange(chunks[(rank - i) % n])
    for i in range(n - 1):  # all_gather: the sums travel on to all others
        chunks[(rank - i) % n] = exchange(chunks[(rank - i + 1) % n])


def on_the_wire():
    """Bytes that processes of this machine have sent each other. Linux counts them."""
    return int(Path("/proc/net/dev").read_text().split("lo:")[1].split()[8])


def count(name, rounds, collective, *tensors):
    """Print a prediction, and what the wire carried for each rank."""
    before = on_the_wire()
    td.barrier()
    collective(*tensors)
    td.barrier()
    counted = (on_the_wire() - before) / n
    if rank == 0:
        predicted = rounds * ours.nbytes / n
        print(f"{name:21} predicted {predicted / 1e6:.1f} MB, counted {counted / 1e6:.1f} MB")


td.init_process_group("gloo")
rank, n = td.get_rank(), td.get_world_size()
ours = torch.arange(4e6) % 1000 * (rank + 1)  # 16 MB
theirs, part = ours.clone(), ours[: len(ours) // n].clone()
count("ring by hand", 2 * (n - 1), all_reduce, ours)
count("torch, all_reduce", 2 * (n - 1), td.all_reduce, theirs)
assert ours.equal(theirs)
# Names since torch 2.13, which warns of the older ones
all_gather = getattr(td, "all_gather_single", td.all_gather_into_tensor)
reduce_scatter = getattr(td, "reduce_scatter_single", td.reduce_scatter_tensor)
count("torch, all_gather", n - 1, all_gather, theirs, part)
count("torch, reduce_scatter", n - 1, reduce_scatter, part, theirs)
td.destroy_process_group()
