"""What a run takes on a cluster: the rehearsed rank, its step, its checkpoints, fewer hosts."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import dist
from runtime.cli import UsageError
from tools.planning import predict, search
from tools.planning.predict import Request
from tools.planning.rehearse import Rehearsal


@dataclass(frozen=True)
class Plan:
    """What was rehearsed, and what is predicted from it."""

    request: Request
    rehearsal: Rehearsal
    speed: predict.Speed
    scaling: list["ScalingRow"]
    checkpoint: dict[str, int]  # bytes that a rank writes, and of a host's memory while it saves
    tokens: float | None  # to train on

    @property
    def fits(self) -> bool:
        return predict.fits(self.rehearsal.peak, self.request.cluster)


@dataclass(frozen=True)
class ScalingRow:
    """The same run on fewer hosts; `problem` says why it cannot run there."""

    hosts: int
    world_size: int
    mesh_shape: tuple[int, int, int] | None = None
    speed: predict.Speed | None = None
    fits: bool = False  # by the estimate of layout.py
    problem: str = ""


def make_plan(request: Request, tokens: float | None = None) -> Plan:
    rehearsal = request.rehearse()
    speed = predict.speed(rehearsal, request.config, request.cluster, request.rank)
    return Plan(
        request=request,
        rehearsal=rehearsal,
        speed=speed,
        scaling=list(scaling(request, rehearsal, speed)),
        checkpoint=plan_checkpoint(request, rehearsal),
        tokens=tokens,
    )


def plan_checkpoint(request: Request, rehearsal: Rehearsal) -> dict[str, int]:
    """Host memory of both ways to save.

    sharded: tensors are copied to the host one by one; a rank's shard is the most that it may take.
    async: every rank copies all it holds: a weight and two moments, in float32.
    """
    local_size = request.cluster.links.local_size
    return {
        "bytes_per_rank": rehearsal.checkpoint_bytes,
        "host_bytes_sharded": local_size * rehearsal.checkpoint_bytes,
        "host_bytes_async": local_size * 12 * rehearsal.parameters_per_rank,
    }


def scaling(request: Request, rehearsal: Rehearsal, speed: predict.Speed) -> Iterator[ScalingRow]:
    """From one host on, twice as many each time, with the same global batch and micro-batch.

    dp_shard becomes smaller where there are fewer ranks, dp_replicate follows.
    """
    cluster = request.cluster
    local_size = cluster.links.local_size
    whole = rehearsal.layout
    hosts = 1
    while hosts < cluster.hosts:
        yield scaled(request, rehearsal, hosts, hosts * local_size)
        hosts *= 2
    fits = predict.fits(rehearsal.peak, cluster)
    yield ScalingRow(cluster.hosts, cluster.world_size, whole.mesh_shape, speed, fits)


def scaled(request: Request, rehearsal: Rehearsal, hosts: int, world_size: int) -> ScalingRow:
    whole = rehearsal.layout
    cluster = dataclasses.replace(request.cluster, world_size=world_size)
    _, dp_shard, tp = whole.mesh_shape
    c = dataclasses.replace(
        request.config,
        strategy=whole.strategy,
        dp_replicate=None,
        dp_shard=min(dp_shard, max(1, world_size // tp)) if whole.strategy == "hsdp" else None,
        micro_batch_size=whole.micro_batch_size,
    )
    try:
        layout = search.lay_out(c, cluster, request.vocab_size)
    except (UsageError, dist.MeshError) as error:
        return ScalingRow(hosts, world_size, problem=str(error))
    rescaled = predict.rescale(rehearsal, c, layout)
    speed = predict.speed(rescaled, c, cluster)
    fits = predict.fits(layout.memory.total, cluster)
    return ScalingRow(hosts, world_size, layout.mesh_shape, speed, fits)


def communication_rows(plan: Plan) -> list[dict]:
    """One row for each axis and collective of a step."""
    cluster = plan.request.cluster
    shape = plan.rehearsal.layout.mesh_shape
    rows = {}
    for entry in plan.rehearsal.communication:
        group = predict.group_of(entry.axis, plan.request.rank, shape, cluster.links.local_size)
        row = rows.setdefault(
            (entry.axis, entry.collective),
            {
                "axis": entry.axis,
                "collective": entry.collective,
                "count": 0,
                "bytes": 0,
                "inter_host": group.hosts > 1,
                "seconds": 0.0,
            },
        )
        row["count"] += entry.count
        row["bytes"] += entry.bytes
        row["seconds"] += predict.collective_seconds(entry, group, cluster.links)
    return list(rows.values())


def training_hours(plan: Plan) -> float:
    devices = plan.request.cluster.world_size
    seconds = plan.tokens / (plan.speed.tokens_per_second_per_device * devices)
    return seconds / 3600
