"""What each rank holds and reads on a mesh of 2 x 2: chapter 5 of the lecture."""

import sys

import torch
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, ".")
import data
import dist

world = dist.start("cpu")
mesh = dist.make_mesh(world, (2, 2, 1))
n = dist.dp_rank(mesh)
table = torch.arange(320)  # the rows of the embedding
rows = distribute_tensor(table, mesh["dp_shard"], [Shard(0)]).to_local()
reads = next(data.train_indices(range(1, 2), 32, 8, n, 4))
place = f"rank {world.rank} at {mesh.get_coordinate()}: rows {rows[0]} to {rows[-1]}"
for turn in range(world.size):  # one rank after the other
    if turn == world.rank:
        print(f"{place}, dp_rank {n}, sequences {reads[0]} to {reads[-1]}", flush=True)
    torch.distributed.barrier()
