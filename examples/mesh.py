"""Print what each rank holds and reads on a mesh, for chapter 3 of the lecture.

torchrun --standalone --nproc_per_node 4 examples/mesh.py          # 2 x 2
torchrun --standalone --nproc_per_node 6 examples/mesh.py 3 2      # dp_replicate 3 x dp_shard 2
"""

import sys

import torch
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, ".")
import data
import dist

dp_replicate, dp_shard = map(int, sys.argv[1:] or (2, 2))
world = dist.join("cpu")
mesh = dist.make_mesh(world, (dp_replicate, dp_shard, 1))
n = dist.dp_rank(mesh)
table = torch.arange(320)  # the rows of the embedding
rows = distribute_tensor(table, mesh["dp_shard"], [Shard(0)]).to_local()
reads = next(data.train_indices(range(1, 2), 8 * world.size, 8, n, world.size))
place = f"rank {world.rank} at {mesh.get_coordinate()}: rows {rows[0]} to {rows[-1]}"
for turn in range(world.size):  # one rank after the other
    if turn == world.rank:
        print(f"{place}, dp_rank {n}, sequences {reads[0]} to {reads[-1]}", flush=True)
    torch.distributed.barrier()
