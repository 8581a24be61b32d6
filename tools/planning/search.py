"""All meshes and policies that fit, ranked by predicted speed: tools.plan --search.

A candidate is a set of flags. Candidates that compute the same way form a group, simplest first.
The search rehearses the first of each group that fits by the estimate of --strategy auto, then the
next of the fastest group, until time is up.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import dist
from config import flag_value
from layout import fits
from runtime.cli import UsageError
from tools.planning import predict
from tools.planning.predict import Cluster, Request

SHOWN = 10  # rows of the table
# Flags of a candidate
SEARCHED = ["strategy", "dp_shard", "tp", "micro_batch_size", "activation_checkpointing"]
SEARCHED += ["reshard_after_forward", "grad_sync"]
# Policies, simplest first
STRATEGIES = ("single", "ddp", "hsdp", "fsdp")
CHECKPOINTING = ("none", "selective", "full")
SYNCS = ("batch", "shard", "micro_batch")


# --------------------------------------------------------------------------------------------------
# Candidates


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def candidates(flags: dict, cluster: Cluster) -> Iterator[dict]:
    """Every combination of the flags that are not in `flags`, simplest first.

    Some do not fit the model, the batch or the number of ranks.
    """

    def choices(name: str, values: Sequence, can_differ: bool = True) -> Sequence:
        return values if can_differ and name not in flags else [flag_value(flags, name)]

    strategies = [flag_value(flags, "strategy")]
    if strategies == ["auto"]:
        strategies = STRATEGIES
    global_batch_size = flag_value(flags, "global_batch_size")
    tps = choices("tp", divisors(cluster.links.local_size))  # across hosts it is too slow
    for tp, strategy in itertools.product(tps, strategies):
        dp_size = cluster.world_size // tp
        if (strategy == "single") != (dp_size == 1):
            continue
        is_hsdp = strategy == "hsdp"
        is_sharded = is_hsdp or strategy == "fsdp"
        shards = divisors(dp_size)[1:-1]  # 1 is ddp, dp_size fsdp
        sizes = divisors(global_batch_size // dp_size)[::-1]
        syncs = SYNCS if is_hsdp else ("batch", "micro_batch")
        policies = {
            "dp_shard": choices("dp_shard", shards, is_hsdp and "dp_replicate" not in flags),
            "micro_batch_size": choices("micro_batch_size", sizes),
            "activation_checkpointing": choices("activation_checkpointing", CHECKPOINTING),
            "grad_sync": choices("grad_sync", syncs, is_sharded),
            "reshard_after_forward": choices("reshard_after_forward", (True, False), is_sharded),
        }
        for values in itertools.product(*policies.values()):
            one = dict(zip(policies, values))
            is_whole = [one["micro_batch_size"]] == sizes[:1]
            if is_whole and one["grad_sync"] != "batch" and "grad_sync" not in flags:
                continue  # no effect with one micro-batch
            yield {"tp": tp, "strategy": strategy, **one}


# --------------------------------------------------------------------------------------------------
# The search


def search(request: Request, seconds: float) -> dict:
    """Rank the candidates over the flags that are not given, until time is up.

    Returns `ranked`, fastest first, and `passed_over`. Finds at least one that
    fits, however long that takes. Raises UsageError if none does.
    """
    began = time.monotonic()
    cluster = request.cluster
    groups, impossible = group_candidates(request)
    speeds = dict.fromkeys(groups, math.inf)  # of the last one rehearsed, tokens/s/device
    passed_over = Counter({"are impossible": impossible})
    found = []
    while groups:
        if found and time.monotonic() - began >= seconds:
            passed_over["had no time left"] = sum(map(len, groups.values()))
            break
        fastest = max(groups, key=speeds.get)
        candidate, run = groups[fastest].pop(0)
        if not groups[fastest]:
            del groups[fastest]
        if not fits(run, cluster.device_memory):
            passed_over["are too large by the estimate"] += 1
            continue
        rehearsal = request.rehearse(run)
        if not predict.fits(rehearsal.peak, cluster):
            passed_over["are too large when rehearsed"] += 1
            continue
        speed = predict.speed(rehearsal, cluster)
        found.append(
            {
                "flags": command_line(request.flags | candidate),
                "peak": rehearsal.peak,
                "speed": speed,
            }
        )
        speeds[fastest] = speed.tokens_per_second_per_device
    if not found:
        raise UsageError(
            f"nothing fits on {cluster.world_size} x {cluster.device_type}: take more devices, a "
            "smaller model or a shorter --seq_len"
        )
    found.sort(key=lambda row: row["speed"].tokens_per_second_per_device, reverse=True)
    return {"ranked": found, "passed_over": dict(passed_over)}


def group_candidates(request: Request) -> tuple[dict[tuple, list], int]:
    """Lists of those that compute alike, simplest first, and how many candidates are impossible.

    If all are, raises the UsageError or MeshError of the last.
    """
    groups = {}
    problems = []
    for candidate in candidates(request.flags, request.cluster):
        try:
            run = request.resolve(candidate)
        except (UsageError, dist.MeshError) as error:
            problems.append(error)
            continue
        key = (run.tp, run.micro_batch_size, run.activation_checkpointing)
        groups.setdefault(key, []).append((candidate, run))
    if problems and not groups:
        raise problems[-1]
    return groups, len(problems)


# --------------------------------------------------------------------------------------------------
# Output


def command_line(flags: dict) -> str:
    """The flags of a candidate that differ from their defaults."""
    words = []
    for name in SEARCHED:
        value = flag_value(flags, name)
        if value != flag_value({}, name):
            words.append(f"--{name} {str(value).lower()}")
    return " ".join(words)


def table(found: dict, cluster: Cluster) -> Iterator[str]:
    """The lines for people."""
    yield "tokens/s/device     MFU  step, s  memory  flags"
    for row in found["ranked"][:SHOWN]:
        speed = row["speed"]
        memory = row["peak"] / cluster.device_memory
        yield (
            f"{speed.tokens_per_second_per_device:15,.0f}  {speed.mfu:6.1%}  "
            f"{speed.step_time:7.4g}  {memory:6.0%}  {row['flags']}"
        )
    counts = [f"{count:,} {why}" for why, count in found["passed_over"].items() if count]
    passed_over = ", ".join(counts) or "none passed over"
    yield f"{len(found['ranked'])} fit and were rehearsed; {passed_over}"
    best = found["ranked"][0]
    speed = best["speed"]
    waits = sum(speed.exposed.values()) / speed.step_time
    compute = f"{speed.compute / speed.step_time:.0%} of its step is compute"
    yield f"best: {best['flags']}: {compute}, {waits:.0%} waits"
