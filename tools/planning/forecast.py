"""A run on a cluster: the rehearsed rank, its step, its checkpoints, and fewer hosts."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import dist
from runtime.cli import UsageError
from tools.planning import predict
from tools.planning.predict import Request
from tools.planning.rehearse import Rehearsal


@dataclass(frozen=True)
class Plan:
    """A rehearsal and the predictions from it. Dictionaries are as in --json."""

    request: Request
    rehearsal: Rehearsal
    speed: predict.Speed
    tokens: float | None = None  # to train on

    @property
    def fits(self) -> bool:
        return predict.fits(self.rehearsal.peak, self.request.cluster)

    @property
    def hours(self) -> float:
        devices = self.request.cluster.world_size
        return self.tokens / (self.speed.tokens_per_second_per_device * devices) / 3600

    def checkpoint(self) -> dict[str, int]:
        """Bytes that a rank writes, and that both ways to save take on a host.

        Each replica writes a share of the weights and the optimizer state. A sharded save copies
        tensors to the host one by one, at most what the rank writes. An async save copies all
        that every rank holds.
        """
        local_size = self.request.cluster.links.local_size
        held = self.rehearsal.state["parameters"] + self.rehearsal.state["optimizer"]
        written = held // self.rehearsal.setup.mesh_shape[0]
        return {
            "bytes_per_rank": written,
            "host_bytes_sharded": local_size * written,
            "host_bytes_async": local_size * held,
        }

    def communication(self) -> list[dict]:
        """One row per axis and collective of a step."""
        links = self.request.cluster.links
        shape = self.rehearsal.setup.mesh_shape
        rows = {}
        for entry in self.rehearsal.communication:
            group = predict.group_of(entry.axis, self.request.rank, shape, links.local_size)
            row = {"axis": entry.axis, "collective": entry.collective, "count": 0, "bytes": 0}
            row |= {"inter_host": group.hosts > 1, "seconds": 0.0, "phases": []}
            row = rows.setdefault((entry.axis, entry.collective), row)
            row["phases"].append(entry.phase)
            row["count"] += entry.count
            row["bytes"] += entry.bytes
            row["seconds"] += predict.collective_seconds(entry, group, links)
        return list(rows.values())

    def scaling(self) -> Iterator[dict]:
        """The run on 1, 2, 4, ... hosts, with the same global batch and micro-batch.

        With fewer ranks dp_shard shrinks, and dp_replicate follows.
        """
        cluster = self.request.cluster
        hosts = 1
        while hosts < cluster.hosts:
            world_size = hosts * cluster.links.local_size
            yield {"hosts": hosts, "world_size": world_size} | self.scaled(world_size)
            hosts *= 2
        row = {"hosts": cluster.hosts, "world_size": cluster.world_size, "fits": self.fits}
        yield row | {"mesh_shape": self.rehearsal.setup.mesh_shape} | self.speed.to_json()

    def scaled(self, world_size: int) -> dict:
        """The step on fewer ranks, or the problem."""
        whole = self.rehearsal.setup
        cluster = dataclasses.replace(self.request.cluster, world_size=world_size)
        _, dp_shard, tp = whole.mesh_shape
        c = dataclasses.replace(
            self.request.config,
            strategy=whole.strategy,
            dp_replicate=None,
            dp_shard=min(dp_shard, max(1, world_size // tp)) if whole.strategy == "hsdp" else None,
            micro_batch_size=whole.micro_batch_size,
        )
        request = dataclasses.replace(self.request, config=c, cluster=cluster, rank=0)
        try:
            plan = make_plan(request)
        except (UsageError, dist.MeshError) as error:
            return {"fits": False, "problem": str(error)}
        shape = plan.rehearsal.setup.mesh_shape
        return {"fits": plan.fits, "mesh_shape": shape} | plan.speed.to_json()


def make_plan(request: Request, tokens: float | None = None) -> Plan:
    rehearsal = request.rehearse()
    speed = predict.speed(rehearsal, request.config, request.cluster, request.rank)
    return Plan(request, rehearsal, speed, tokens)
