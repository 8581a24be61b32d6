"""All meshes and policies that fit, ranked by predicted speed: tools.plan --search.

A candidate is a set of flags. Its step is first sketched with formulas, which takes no time, and
predicted from that. Then the candidates are rehearsed, the fastest first, until the time is up;
those that do not fit by layout.py's estimate are passed over.
"""

import dataclasses
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dist
from config import Config, blocks_per_unit
from layout import Layout, choose_layout, unit_numels
from runtime.cli import UsageError
from tools.planning import predict
from tools.planning.predict import Cluster, Request, Speed
from tools.planning.rehearse import Communication, Rehearsal, make_world

# Predictions that differ by less say nothing: of these the simplest candidate is the best.
TIE = 0.03
SHOWN = 10  # rows of the table
BUCKET = 25 << 20  # bytes of a DDP bucket, torch's default
# Flags of a candidate
SEARCHED = (
    *("strategy", "dp_shard", "tp", "micro_batch_size"),
    *("activation_checkpointing", "reshard_after_forward", "grad_sync"),
)
# Policies, the simplest first
STRATEGIES = ("single", "ddp", "fsdp", "hsdp")
CHECKPOINTING = ("none", "selective", "full")
SYNCS = ("batch", "shard", "micro_batch")


def lay_out(c: Config, cluster: Cluster, vocab_size: int) -> Layout:
    """The layout on a cluster, with its memory estimate. Raises UsageError and MeshError."""
    local_size = cluster.links.local_size
    world = make_world(0, cluster.world_size, local_size, cluster.device.kind)
    return choose_layout(c, world, vocab_size, cluster.device_memory)


# --------------------------------------------------------------------------------------------------
# Candidates


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def candidates(c: Config, cluster: Cluster, free: frozenset[str]) -> Iterator[Config]:
    """Every combination of the flags in `free` that can differ; others keep their value.

    Some do not fit the model, the batch or the number of ranks.
    """

    def choices(name: str, values: Sequence, can_differ: bool = True) -> Sequence:
        return values if can_differ and name in free else [getattr(c, name)]

    strategies = STRATEGIES if c.strategy == "auto" else choices("strategy", STRATEGIES)
    tps = choices("tp", divisors(cluster.links.local_size))  # beyond a host its links are too slow
    for tp, strategy in itertools.product(tps, strategies):
        dp_size = cluster.world_size // tp
        if (strategy == "single") != (dp_size == 1):
            continue
        is_hsdp = strategy == "hsdp"
        is_sharded = is_hsdp or strategy == "fsdp"
        shards = divisors(dp_size)[1:-1]  # 1 is ddp, dp_size fsdp
        syncs = SYNCS if is_hsdp else ("batch", "micro_batch")
        for shard, mode, reshard, sync in itertools.product(
            choices("dp_shard", shards, is_hsdp and "dp_replicate" in free),
            choices("activation_checkpointing", CHECKPOINTING),
            choices("reshard_after_forward", (True, False), is_sharded),
            choices("grad_sync", syncs, is_sharded),
        ):
            sizes = divisors(c.global_batch_size // dp_size)
            if sync != "batch":
                sizes = sizes[:-1]  # with one micro-batch it changes nothing
            for size in choices("micro_batch_size", sizes):
                yield dataclasses.replace(
                    c,
                    tp=tp,
                    strategy=strategy,
                    dp_shard=shard,
                    activation_checkpointing=mode,
                    reshard_after_forward=reshard,
                    grad_sync=sync,
                    micro_batch_size=size,
                )


# --------------------------------------------------------------------------------------------------
# The sketch


@dataclass(frozen=True)
class Candidate:
    config: Config
    rehearsal: Rehearsal  # or its sketch
    speed: Speed


def sketch(c: Config, cluster: Cluster, vocab_size: int) -> Rehearsal:
    """A rehearsal by formula. Raises UsageError and MeshError."""
    layout = lay_out(c, cluster, vocab_size)
    model = layout.model_config
    units, root = unit_numels(model, blocks_per_unit(c), c.tp)
    numel = sum(units) + root
    tokens = layout.micro_batch_size * layout.grad_accum_steps * model.seq_len  # of a rank
    flops = predict.flops_per_token(model) * tokens / c.tp
    return Rehearsal(
        layout=layout,
        parameters=numel * c.tp,
        parameters_per_rank=math.ceil(numel / layout.mesh_shape[1]),
        memory={},
        state={},
        communication=[*data_parallel(layout, units, root), *tensor_parallel(layout)],
        flops=flops,
        recomputed_flops=flops / 3 if c.activation_checkpointing == "full" else 0.0,
        checkpoint_bytes=0,
    )


def data_parallel(layout: Layout, units: list[int], root: int) -> Iterator[Communication]:
    """What dist.py's strategies send, for units and a root of so many elements."""
    c = layout.config
    replicate, shard, _ = layout.mesh_shape
    n = layout.grad_accum_steps
    numel = sum(units) + root
    itemsize = layout.dtype.itemsize  # of gathered weights; gradients are float32
    messages = len(units) + 1
    if shard > 1:
        size = n * itemsize * numel
        yield Communication("dp_shard", "all_gather", "forward", n * messages, size)
        # Once more, but for the last unit and an embedding: see dist.parallelize
        regathered = sum(units[:-1] if layout.model_config.tied else units[1:-1])
        if c.reshard_after_forward and regathered:
            size = n * itemsize * regathered
            yield Communication("dp_shard", "all_gather", "backward", n * messages, size)
        times = 1 if c.grad_sync == "batch" else n
        size = times * 4 * numel
        yield Communication("dp_shard", "reduce_scatter", "backward", times * messages, size)
    if replicate > 1:
        times = n if c.grad_sync == "micro_batch" else 1
        own = 4 * numel // shard
        count = messages if layout.uses_fsdp else math.ceil(own / BUCKET)
        yield Communication("dp_replicate", "all_reduce", "backward", times * count, times * own)


def tensor_parallel(layout: Layout) -> Iterator[Communication]:
    """Megatron's sums: two a block in forward and in backward, and again where it is recomputed."""
    c = layout.config
    if c.tp == 1:
        return
    model = layout.model_config
    n = layout.grad_accum_steps
    size = layout.dtype.itemsize * layout.micro_batch_size * model.seq_len * model.d_model
    for phase in ("forward", "backward"):
        count = 2 * model.n_layer + 1
        if phase == "backward" and c.activation_checkpointing == "full":
            count += 2 * model.n_layer
        yield Communication("tp", "all_reduce", phase, n * count, n * count * size)


# --------------------------------------------------------------------------------------------------
# The search


@dataclass
class Result:
    ranked: list[Candidate]  # rehearsed and fitting, best first
    passed_over: Counter  # why -> candidates
    seconds: float


def search(request: Request, free: frozenset[str], seconds: float) -> Result:
    """Rank what the flags in `free` can be, until the time is up. Raises UsageError if none fits.

    At least one that fits is found, however long it takes.
    """
    began = time.monotonic()
    cluster = request.cluster
    ordered, impossible = sketch_all(request, free)
    passed_over = Counter({"are impossible": impossible})
    found = []
    for number, candidate in enumerate(ordered):
        left = seconds - (time.monotonic() - began)
        if left <= 0 and found:
            passed_over["had no time left"] = len(ordered) - number
            break
        c = candidate.config
        if sys.stderr.isatty():  # progress, for whoever watches: not into a file
            progress = f"{number + 1} of {len(ordered)}, {max(0, left):.0f} s left: {flags_of(c)}"
            print(progress, file=sys.stderr, flush=True)
        if lay_out(c, cluster, request.vocab_size).memory.total > cluster.device_memory:
            passed_over["are too large by the estimate"] += 1
            continue
        rehearsal = dataclasses.replace(request, config=c).rehearse()
        if predict.fits(rehearsal.peak, cluster):
            speed = predict.speed(rehearsal, c, cluster, request.rank)
            found.append(Candidate(c, rehearsal, speed))
        else:
            passed_over["are too large when rehearsed"] += 1
    if not found:
        raise UsageError(
            f"nothing fits on {cluster.world_size} x {cluster.device_type}: take more devices, a "
            "smaller model or a shorter --seq_len"
        )
    return Result(in_order(found, cluster), passed_over, time.monotonic() - began)


def sketch_all(request: Request, free: frozenset[str]) -> tuple[list[Candidate], int]:
    """The candidates in the order to try them, and how many are impossible.

    Raises UsageError or MeshError, that of the last one, where all are.
    """
    possible = []
    problem = None
    impossible = 0
    for c in candidates(request.config, request.cluster, free):
        try:
            sketched = sketch(c, request.cluster, request.vocab_size)
            speed = predict.speed(sketched, c, request.cluster)
        except (UsageError, dist.MeshError) as error:
            problem = error
            impossible += 1
            continue
        possible.append(Candidate(c, sketched, speed))
    if problem and not possible:
        raise problem
    return in_order(possible, request.cluster), impossible


def in_order(possible: list[Candidate], cluster: Cluster) -> list[Candidate]:
    """Fastest first, and the simplest first of those within TIE of each other."""

    def speed(one: Candidate) -> float:
        return one.speed.tokens_per_second_per_device

    left = sorted(possible, key=speed, reverse=True)
    ordered = []
    while left:
        tied = [one for one in left if speed(one) >= (1 - TIE) * speed(left[0])]
        ordered += sorted(tied, key=lambda one: complexity(one.config, cluster))
        left = left[len(tied) :]
    return ordered


def complexity(c: Config, cluster: Cluster) -> tuple:
    """Smaller is simpler: fewer axes, less recomputation, fewer flags that differ from default."""
    return (
        c.tp,
        preference(c, cluster),
        CHECKPOINTING.index(c.activation_checkpointing),
        SYNCS.index(c.grad_sync),
        not c.reshard_after_forward,
        -(c.micro_batch_size or 0),
    )


def preference(c: Config, cluster: Cluster) -> float:
    """The order in which --strategy auto takes strategies: ddp, fsdp, across hosts hsdp.

    hsdp shards within a host where --dp_shard leaves it open.
    """
    in_host = cluster.links.local_size // c.tp
    shards_in_host = c.strategy == "hsdp" and c.dp_shard in (None, in_host)
    if shards_in_host and cluster.hosts > 1:
        return STRATEGIES.index("fsdp") - 0.5
    return STRATEGIES.index(c.strategy)


# --------------------------------------------------------------------------------------------------
# What it prints


def flags_of(c: Config) -> str:
    """The flags of a candidate that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    flags = []
    for name in SEARCHED:
        value = getattr(c, name)
        if value != defaults[name]:
            flags.append(f"--{name} {str(value).lower()}")
    return " ".join(flags)


def reason(result: Result) -> str:
    """Why the first one is the best."""
    best, *others = result.ranked
    speed = best.speed.tokens_per_second_per_device
    step = best.speed.step
    exposed = sum(step.exposed.values()) / step.total
    text = f"{step.compute / step.total:.0%} of its step is compute, {exposed:.0%} waits"
    if not others:
        return text
    fastest = max(others, key=lambda one: one.speed.tokens_per_second_per_device)
    ratio = fastest.speed.tokens_per_second_per_device / speed
    if ratio > 1:
        text += f"; {flags_of(fastest.config)} is {ratio - 1:.1%} faster, within the error of "
        return f"{text}{TIE:.0%}, and less simple"
    return f"{text}; the next is {1 - ratio:.1%} slower"


def table(result: Result, cluster: Cluster) -> Iterator[str]:
    yield "tokens/s/device     MFU  step, s  memory  flags"
    for one in result.ranked[:SHOWN]:
        share = one.rehearsal.peak / cluster.device_memory
        yield (
            f"{one.speed.tokens_per_second_per_device:15,.0f}  {one.speed.mfu:6.1%}  "
            f"{one.speed.step.total:7.4g}  {share:6.0%}  {flags_of(one.config)}"
        )
    counts = [f"{count:,} {why}" for why, count in result.passed_over.items() if count]
    yield (
        f"{len(result.ranked)} fit and were rehearsed in {result.seconds:.0f} s; "
        f"{', '.join(counts) or 'none passed over'}"
    )
    yield f"best: {flags_of(result.ranked[0].config)}: {reason(result)}"


def to_json(result: Result) -> dict:
    rows = []
    for one in result.ranked:
        rows.append(
            {
                "flags": flags_of(one.config),
                "peak": one.rehearsal.peak,
                "step_time": one.speed.step.total,
                "tokens_per_second_per_device": one.speed.tokens_per_second_per_device,
                "mfu": one.speed.mfu,
            }
        )
    return {"ranked": rows, "reason": reason(result), "passed_over": dict(result.passed_over)}
