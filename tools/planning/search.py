"""All meshes and policies that fit, ranked by predicted speed: tools.plan --search.

A candidate is a set of flags. Candidates that compute the same way form a group, simplest first.
The search rehearses the first of each group that fits, as --strategy auto would choose it, then the
next of the fastest group, until time is up. One estimate decides what fits, here and in auto.
"""

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import dist
from config import Config
from layout import Setup, choose, estimate_memory
from runtime.cli import UsageError
from tools.planning import predict
from tools.planning.predict import Cluster, Request, Speed
from tools.planning.rehearse import Rehearsal

# Predictions closer than this are a tie: the simplest candidate wins.
TIE = 0.03
SHOWN = 10  # rows of the table
# Flags of a candidate
SEARCHED = (
    *("strategy", "dp_shard", "tp", "micro_batch_size"),
    *("activation_checkpointing", "reshard_after_forward", "grad_sync"),
)
# Policies, simplest first
STRATEGIES = ("single", "ddp", "fsdp", "hsdp")
CHECKPOINTING = ("none", "selective", "full")
SYNCS = ("batch", "shard", "micro_batch")


def setup_of(c: Config, request: Request) -> Setup:
    """The setup on a cluster. Raises UsageError and MeshError."""
    return choose(c, request.world(), request.model(c), request.cluster.device_memory)


# --------------------------------------------------------------------------------------------------
# Candidates


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def candidates(c: Config, cluster: Cluster, free: frozenset[str]) -> Iterator[Config]:
    """Every combination of the flags in `free`; the others keep their value.

    Some do not fit the model, the batch or the number of ranks.
    """

    def choices(name: str, values: Sequence, can_differ: bool = True) -> Sequence:
        return values if can_differ and name in free else [getattr(c, name)]

    strategies = STRATEGIES if c.strategy == "auto" else choices("strategy", STRATEGIES)
    tps = choices("tp", divisors(cluster.links.local_size))  # across hosts it is too slow
    for tp, strategy in itertools.product(tps, strategies):
        dp_size = cluster.world_size // tp
        if (strategy == "single") != (dp_size == 1):
            continue
        is_hsdp = strategy == "hsdp"
        is_sharded = is_hsdp or strategy == "fsdp"
        shards = divisors(dp_size)[1:-1]  # 1 is ddp, dp_size fsdp
        sizes = divisors(c.global_batch_size // dp_size)
        syncs = SYNCS if is_hsdp else ("batch", "micro_batch")
        flags = {
            "dp_shard": choices("dp_shard", shards, is_hsdp and "dp_replicate" in free),
            "micro_batch_size": choices("micro_batch_size", sizes),
            "activation_checkpointing": choices("activation_checkpointing", CHECKPOINTING),
            "reshard_after_forward": choices("reshard_after_forward", (True, False), is_sharded),
            "grad_sync": choices("grad_sync", syncs, is_sharded),
        }
        for values in itertools.product(*flags.values()):
            one = dict(zip(flags, values))
            is_whole = [one["micro_batch_size"]] == sizes[-1:]
            if is_whole and one["grad_sync"] != "batch" and "grad_sync" in free:
                continue  # no effect with one micro-batch
            yield dataclasses.replace(c, tp=tp, strategy=strategy, **one)


# --------------------------------------------------------------------------------------------------
# The search


@dataclass(frozen=True)
class Candidate:
    config: Config
    rehearsal: Rehearsal
    speed: Speed

    def tokens_per_second(self) -> float:
        return self.speed.tokens_per_second_per_device


def search(
    request: Request, free: frozenset[str], seconds: float
) -> tuple[list[Candidate], Counter]:
    """Rank the candidates over `free` until time is up: best first, and why others are missing.

    Finds at least one that fits, however long that takes. Raises UsageError if none does.
    """
    began = time.monotonic()
    cluster = request.cluster
    groups, impossible = group_candidates(request, free)
    speeds = dict.fromkeys(groups, math.inf)  # of the last one rehearsed, tokens/s/device
    passed_over = Counter({"are impossible": impossible})
    found = []
    while groups:
        if found and time.monotonic() - began >= seconds:
            passed_over["had no time left"] = sum(map(len, groups.values()))
            break
        fastest = max(groups, key=speeds.get)
        c, setup = groups[fastest].pop(0)
        if not groups[fastest]:
            del groups[fastest]
        if not estimate_memory(c, setup).fits(cluster.device_memory):
            passed_over["are too large by the estimate"] += 1
            continue
        rehearsal = dataclasses.replace(request, config=c).rehearse()
        if not predict.fits(rehearsal.peak, cluster):
            passed_over["are too large when rehearsed"] += 1
            continue
        found.append(Candidate(c, rehearsal, predict.speed(rehearsal, c, cluster, request.rank)))
        speeds[fastest] = found[-1].tokens_per_second()
    if not found:
        raise UsageError(
            f"nothing fits on {cluster.world_size} x {cluster.device_type}: take more devices, a "
            "smaller model or a shorter --seq_len"
        )
    return best_first(found, cluster), passed_over


def group_candidates(request: Request, free: frozenset[str]) -> tuple[dict[tuple, list], int]:
    """Lists of those that compute alike, simplest first, and how many candidates are impossible.

    If all are, raises the UsageError or MeshError of the last.
    """
    groups = {}
    problems = []
    cluster = request.cluster
    every = candidates(request.config, cluster, free)
    for c in sorted(every, key=lambda c: complexity(c, cluster)):
        try:
            setup = setup_of(c, request)
        except (UsageError, dist.MeshError) as error:
            problems.append(error)
            continue
        key = (c.tp, setup.micro_batch_size, c.activation_checkpointing)
        groups.setdefault(key, []).append((c, setup))
    if problems and not groups:
        raise problems[-1]
    return groups, len(problems)


def best_first(found: list[Candidate], cluster: Cluster) -> list[Candidate]:
    """The simplest of those within TIE of the fastest, then the others, fastest first."""
    ranked = sorted(found, key=Candidate.tokens_per_second, reverse=True)
    limit = (1 - TIE) * ranked[0].tokens_per_second()
    tied = [one for one in ranked if one.tokens_per_second() >= limit]
    best = min(tied, key=lambda one: complexity(one.config, cluster))
    return [best, *(one for one in ranked if one is not best)]


def complexity(c: Config, cluster: Cluster) -> tuple:
    """Smaller is simpler: fewer axes, less recomputation, fewer flags that differ from default.

    Strategies are in --strategy auto's order: ddp, fsdp, and across hosts hsdp before fsdp if it
    shards within a host, as it does unless --dp_shard says otherwise.
    """
    strategy = STRATEGIES.index(c.strategy)
    in_host = c.dp_shard in (None, cluster.links.local_size // c.tp)
    if c.strategy == "hsdp" and in_host and cluster.hosts > 1:
        strategy = STRATEGIES.index("fsdp") - 0.5
    return (
        c.tp,
        strategy,
        CHECKPOINTING.index(c.activation_checkpointing),
        SYNCS.index(c.grad_sync),
        not c.reshard_after_forward,
        -(c.micro_batch_size or 0),
    )


# --------------------------------------------------------------------------------------------------
# Output


def flags_of(c: Config) -> str:
    """The flags of a candidate that differ from their defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    names = [name for name in SEARCHED if getattr(c, name) != defaults[name]]
    return " ".join(f"--{name} {str(getattr(c, name)).lower()}" for name in names)


def table(found: dict, cluster: Cluster) -> Iterator[str]:
    """The lines for people, from a `to_json` result."""
    yield "tokens/s/device     MFU  step, s  memory  flags"
    for row in found["ranked"][:SHOWN]:
        yield (
            f"{row['tokens_per_second_per_device']:15,.0f}  {row['mfu']:6.1%}  "
            f"{row['step_time']:7.4g}  {row['peak'] / cluster.device_memory:6.0%}  {row['flags']}"
        )
    counts = [f"{count:,} {why}" for why, count in found["passed_over"].items() if count]
    yield (
        f"{len(found['ranked'])} fit and were rehearsed; {', '.join(counts) or 'none passed over'}"
    )
    yield f"best: {found['ranked'][0]['flags']}: {found['reason']}"


def to_json(ranked: list[Candidate], passed_over: Counter) -> dict:
    rows = []
    for one in ranked:
        row = {"flags": flags_of(one.config), "peak": one.rehearsal.peak}
        rows.append(row | one.speed.to_json())
    best = ranked[0].speed
    compute, waits = best.compute / best.step_time, sum(best.exposed.values()) / best.step_time
    reason = f"{compute:.0%} of its step is compute, {waits:.0%} waits"
    return {"ranked": rows, "reason": reason, "passed_over": dict(passed_over)}
