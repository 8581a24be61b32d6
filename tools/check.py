"""Check that a planned run works on these ranks as on one, and that no link is slow.

torchrun --standalone --nproc_per_node 2 -m tools.check --json check.json
torchrun --nnodes 4 --nproc_per_node 8 ... -m tools.check --model llama3-8b --strategy hsdp
python -m tools.check --fuzz 60

Start it like train.py, with the flags of the planned run. With --fuzz it draws small random runs
instead, and starts their ranks itself.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import math
import shlex
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path

import torch
import torch.distributed
from torch.distributed import P2POp
from torch.utils import collect_env

import checkpoint
import dist
import errors
from tools import common, rehearse
from tools.common import Run, flag_value
from tools.measuring import fuzz
from tools.measuring.parity import (
    GRADIENTS,
    PERTURBED,
    Check,
    RunLog,
    check_worst,
    compare,
    first_difference,
    gradient_changes,
    rounding_limits,
    spread,
    train_watched,
)

STEPS = 20
GRAD_ACCUM_STEPS = 2  # so that gradient accumulation is checked as well
LEARNED = 0.995  # limit of the loss in the second half of the steps, relative to the first half
LEAST_STEPS = 4  # enough to profile the second half
MICRO_BATCHES = 1000  # about the most in the run on one rank, which computes those of all ranks
# A link is slow if the best of its REPEATS times exceeds SLOW x the first quartile of all links.
SLOW, REPEATS = 1.4, 30
LINK_BYTES = {"cuda": 1 << 26, "cpu": 1 << 20}  # more than a switch may buffer
# Flags of every run, which override those of the planned run. The learning rate is low: at a high
# one, two runs in bfloat16 drift apart within 20 steps.
SHORT = (
    f"--max_steps {STEPS} --warmup_steps 10 --schedule constant --log_interval 1 --save_interval 0 "
    "--keep_last 1 --eval_interval 0 --eval_sequences 1 --sample_tokens 0 "
    "--optim_metrics_interval 0 --tracker none --allow_changes false "
    "--eval_only false --lr 1e-3 --min_lr 0 "
)


# --------------------------------------------------------------------------------------------------
# The ranks


class Ranks:
    """Trains the planned run, cut short, on the mesh of all ranks and on each rank alone."""

    def __init__(self, flags: dict, out: str | None, world: dist.World):
        self.world = world
        self.store, *_ = dist.find_ranks(world.timeout)  # joins the ranks again after `alone`
        # Kept after `alone` leaves it: without torchrun, rank 0's group owns the store's server.
        self.first_group = torch.distributed.group.WORLD
        host, device = socket.gethostname(), world.device_name
        name = f"rank {world.rank} ({host}, {device}, torch {torch.__version__})"
        self.names = dist.on_all_ranks(lambda: name)
        parent = Path(out or tempfile.gettempdir()).absolute()
        parent.mkdir(parents=True, exist_ok=True)  # --out of a planned run may not exist yet
        self.folder = Path(dist.on_rank0(tempfile.mkdtemp, None, "check-", parent))
        if not all(dist.on_all_ranks(self.folder.exists)):
            raise errors.UsageError(f"{self.folder} is not on all hosts: give a shared --out")
        self.source = common.open_data(flag_value(flags, "data"), world)
        self.origin = dist.on_rank0(common.named_origin, flags)
        self.flags = dist.on_rank0(lambda: shorten(self.resolve(flags, world)))
        self.run = dist.on_rank0(self.resolve, self.flags, world)

    def resolve(self, flags: dict, world: dist.World) -> Run:
        """Return the run of `flags`, with the model of their checkpoint, if they give one."""
        return common.resolve(flags, world, self.source, self.origin.model_config)

    def train(self, run: Run, world: dist.World, name: str, seed: int | None = None) -> RunLog:
        """Train as parity.train_watched does. A run of the same name continues."""
        run = dataclasses.replace(run, out=str(self.folder / name))
        return train_watched(run, self.origin, self.source, world, seed)

    def alone(self) -> tuple[RunLog, list[RunLog], list[rehearse.Communication]]:
        """Train on this rank alone; return its run, perturbed ones, and the rehearsed traffic."""
        rehearse.leave_group()
        found = rehearse.rehearse(self.run, self.world.rank)
        world = dataclasses.replace(self.world, rank=0, size=1, local_size=1)
        common.join_group(world, torch.distributed.HashStore())
        per_step = self.run.global_batch_size // self.run.micro_batch_size
        steps = max(LEAST_STEPS, MICRO_BATCHES // per_step)
        mesh = dict(strategy="single", tp=1, dp_shard=1, grad_sync="batch")
        rest = dict(compile=False, keep_last=0, async_save=False, optim_metrics_interval=1)
        rest["max_steps"] = min(self.run.max_steps, steps)
        run = self.resolve(self.flags | mesh | rest, world)
        folder = f"alone on rank {self.world.rank}"
        log = self.train(run, world, folder)
        # Each rank trains a share of the perturbed runs.
        seeds = range(self.world.rank, PERTURBED, self.world.size)
        perturbed = [self.train(run, world, f"{folder}, {seed}", seed) for seed in seeds]
        gc.collect()  # a group still referenced keeps its connections
        rehearse.leave_group()
        common.join_group(self.world, torch.distributed.PrefixStore("after", self.store))
        return log, perturbed, found.communication


def shorten(planned: Run) -> dict:
    """Return the flags of a run cut to two blocks and two micro-batches per rank, on its mesh."""
    per_forward = planned.micro_batch_size * planned.dp_size  # sequences of all ranks
    return planned.manifest["config"] | {
        "model": planned.given.model,  # resolved, it may be the path of a checkpoint
        "n_layer": min(2, planned.n_layer),
        "global_batch_size": GRAD_ACCUM_STEPS * per_forward,
        "profile": None,
    }


# --------------------------------------------------------------------------------------------------
# The check


def links(ranks: Ranks, check: Check) -> None:
    """Time transfers between neighbours, on a host and across hosts, and report slow links."""
    kinds = rounds_of_links(ranks.world.size, ranks.world.local_size)
    for kind, rounds in kinds.items():
        time_links(ranks, check, kind, rounds)


def rounds_of_links(size: int, local_size: int) -> dict[str, list[list[tuple[int, int]]]]:
    """Return kind of link -> rounds of pairs (sender, receiver).

    In a round a host is in one pair: more hosts add no rounds.
    """
    on_host, across = defaultdict(list), defaultdict(list)
    for rank in range(size):
        host, place = divmod(rank, local_size)
        on_host[place].append((rank, rank - place + (place + 1) % local_size))
        peer = (rank + local_size) % size
        turn = 2 if peer < rank and host % 2 == 0 else host % 2  # 2: the last of an odd count
        across[place, turn].append((rank, peer))
    kinds = {}
    if local_size > 1:
        kinds["on a host"] = [*on_host.values()]
    if local_size < size:
        kinds["across hosts"] = [*across.values()]
    return kinds


def time_links(ranks: Ranks, check: Check, kind: str, rounds: list[list[tuple]]) -> None:
    """Time the links of all `rounds`, and report those that are slow in two measurements.

    Links between CPUs of a host are all the same memory, so a slow one only shows other work.
    """
    device = ranks.world.device
    best = best_times(rounds, device)
    check.figures[f"{kind} GB/s"] = LINK_BYTES[device.type] / max(best.values()) / 1e9
    if device.type == "cpu" and kind == "on a host":
        return
    slow = slow_links(best)
    if slow:  # perhaps other work on these hosts was in the way
        again = slow_links(best_times(rounds, device))
        slow = {pair: ratio for pair, ratio in again.items() if pair in slow}
    for (sender, receiver), ratio in slow.items():
        link = f"the link from {ranks.names[sender]} to {ranks.names[receiver]}"
        check.problems.append(f"slow: {link} takes {ratio:.1f} x as long as the faster links")


def best_times(rounds: list[list[tuple]], device: torch.device) -> dict[tuple[int, int], float]:
    """Return link -> the seconds of its fastest transfer. All ranks call it and get the same."""
    best = min(transfer(pairs, device) for pairs in rounds * REPEATS)  # of the link to this rank
    of_ranks = dist.on_all_ranks(lambda: best)
    return {pair: of_ranks[pair[1]] for pairs in rounds for pair in pairs}


def slow_links(best: dict[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return slow link -> its time relative to the first quartile of all links."""
    by_time = sorted(best.values())
    typical = by_time[len(best) // 4]  # one slow host slows many links
    return {pair: least / typical for pair, least in best.items() if least > SLOW * typical}


def transfer(pairs: list[tuple[int, int]], device: torch.device) -> float:
    """Return the seconds of a transfer to this rank, inf without one. All ranks must call it."""
    tensor = torch.zeros(LINK_BYTES[device.type] // 4, device=device)
    rank = torch.distributed.get_rank()
    operations = []
    for sender, receiver in pairs:
        if rank == sender:
            operations.append(P2POp(torch.distributed.isend, tensor, receiver))
        elif rank == receiver:
            operations.append(P2POp(torch.distributed.irecv, tensor, sender))
    torch.distributed.barrier()
    began = time.perf_counter()
    for work in torch.distributed.batch_isend_irecv(operations) if operations else []:
        work.wait()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds if any(rank == receiver for _, receiver in pairs) else math.inf


def parity(ranks: Ranks, check: Check) -> None:
    """Check that a run on the mesh equals the run on one rank up to rounding, and can resume."""
    alone, perturbed, sent = ranks.alone()
    spreads = dist.on_all_ranks(lambda: [spread(alone, log) for log in perturbed])
    limits = rounding_limits(itertools.chain(*spreads), ranks.run.compute_dtype)
    steps = len(alone.rows)
    half = steps // 2
    run = dataclasses.replace(ranks.run, max_steps=steps, keep_last=0, async_save=False)
    profiled = dataclasses.replace(run, profile=f"{half}:{steps - 1}")
    mesh = ranks.train(profiled, ranks.world, "mesh")
    file = ranks.folder / f"mesh/profile/rank_{ranks.world.rank}.json"
    check_profile(check, json.loads(file.read_text()), sent)
    before = len(check.problems)
    compare(check, "one rank's", alone.rows, mesh.rows, limits)
    if len(check.problems) > before:
        check.problems.append(first_difference(alone.squares, mesh.squares, limits["loss"]))
    run = dataclasses.replace(run, keep_last=2, optim_metrics_interval=1)
    try:
        for last in (half, steps):
            part = dataclasses.replace(run, max_steps=last)
            resumed = ranks.train(part, ranks.world, "resumed")
    except checkpoint.CheckpointError as error:
        check.problems.append(str(error))
        return
    # Equal bit for bit on CPUs. On GPUs attention's backward is not deterministic.
    is_exact = ranks.world.device.type == "cpu"
    resumed_limits = dict.fromkeys(limits, 0.0) if is_exact else limits
    compare(check, "resumed", mesh.rows, resumed.rows, resumed_limits)
    check_worst(check, GRADIENTS, gradient_changes(alone, resumed), limits[GRADIENTS])
    if ranks.world.rank == 0:
        check_learning(check, resumed, run)


def check_learning(check: Check, log: RunLog, run: Run) -> None:
    """Check that the loss falls, and that each parameter learns: two dead models agree as well.

    Each parameter needs a gradient after the first step (in which a block may not get one yet), and
    an update that is larger than weight decay alone could make it.
    """
    half = len(log.rows) // 2
    losses = [row["loss"] for row in log.rows]
    ratio = sum(losses[-half:]) / sum(losses[:half])
    check.limit("loss, second half / first", ratio, LEARNED)
    decay = 2 * run.lr * run.weight_decay  # twice: weight_norm is from after the update
    names, with_gradient, updated = set(), set(), set()
    for row in log.of_parameters:
        names.add(row["parameter"])
        if row["step"] > 1 and row["grad_norm"] > 0:
            with_gradient.add(row["parameter"])
        if row["update_norm"] > decay * row["weight_norm"]:
            updated.add(row["parameter"])
    for fault, found in (
        ("no gradient", names - with_gradient),
        ("no update besides weight decay", names - updated),
    ):
        if found:
            check.problems.append(f"{fault}: {len(found)} parameters, such as {min(found)}")


def check_profile(check: Check, profile: dict, sent: list[rehearse.Communication]) -> None:
    """Check that a profiled step has no host syncs, and sends what the rehearsal sends.

    Gradients and norms must be summed in float32: in bfloat16 the limits of the gradients are too
    wide to show a sum in bfloat16. Activations, over tp, may be summed in bfloat16.
    """
    syncs = profile["host_syncs"]
    check.limit("host syncs", sum(syncs.values()), 0)
    for place in syncs:
        check.problems.append(f"the host waits at {place}")
    extra = Counter()
    for row in profile["communicated"]:
        extra[row["kind"], row["axis"]] += row["bytes"]
        reduces = row["kind"] in ("all_reduce", "reduce_scatter") and row["axis"] != "tp"
        if reduces and "bfloat16" in row["dtypes"]:
            check.problems.append(f"{row['kind']} over {row['axis']} sums in bfloat16: use float32")
    check.figures["MB handed to torch"] = extra.total() / 1e6
    for row in sent:
        extra[row.collective, row.axis] -= row.bytes
    for (kind, axis), size in extra.items():
        if size:
            check.problems.append(f"{size:+,} bytes of {kind} over {axis} are not in the rehearsal")


# --------------------------------------------------------------------------------------------------
# The command line


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict]:
    """Return the flags of this command, and those of the planned run. Raises UsageError."""
    parser = common.build_parser()
    parser.prog = "tools.check"
    parser.usage = (
        "torchrun ... -m tools.check [--FLAG VALUE ...]\n"
        "       python -m tools.check --fuzz N [--seed S]"
    )
    parser.description = "Check the ranks for a planned run, whose train.py flags are accepted."
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add(
        "--fuzz",
        type=errors.number(int, 1),
        metavar="N",
        help="draw N runs of 1 to 4 ranks (--seed)",
    )
    add("--draw", type=fuzz.parse_draw, metavar="TEXT", help="check one run, as printed by --fuzz")
    given = common.parse_flags([*argv, *SHORT.split()], parser)
    own = {name: given.pop(name) for name in ("json", "fuzz", "draw")}
    options = argparse.Namespace(**own, out=given.get("out"), argv=argv)
    if options.fuzz or options.draw:
        typed = {word.partition("=")[0] for word in argv if word.startswith("--")}
        if others := typed - {"--fuzz", "--draw", "--seed"}:
            raise errors.UsageError(f"--fuzz draws the flags of its runs: leave out {min(others)}")
    if options.json and not options.json.absolute().parent.is_dir():
        raise errors.UsageError(f"--json {options.json}: there is no folder {options.json.parent}")
    return options, given


def command(argv: list[str]) -> int:
    """Check ranks or draws; return the exit status, 1 if a check failed."""
    options, flags = parse(argv)
    if options.fuzz or options.draw:
        return fuzz.fuzz(options.fuzz, flag_value(flags, "seed"), options.draw)
    return check_ranks(options, flags)


def check_ranks(options: argparse.Namespace, flags: dict) -> int:
    """Check the planned run on every rank. Rank 0 prints and writes the results."""
    timeout = timedelta(seconds=flag_value(flags, "timeout"))
    world = dist.start(flag_value(flags, "device"), timeout)
    with dist.name_lost_rank(world):
        ranks = Ranks(flags, options.out, world)
        check = run_check(ranks)
        # The others wait: when one of them ends with status 1, torchrun ends rank 0.
        dist.on_rank0(report, ranks, options, check)
    torch.distributed.destroy_process_group()
    return int(check.status == "FAIL")


def run_check(ranks: Ranks) -> Check:
    """Run all checks. Returns this rank's figures, and problems of the first rank that has any."""
    check = Check()
    with warnings.catch_warnings(action="ignore"):
        links(ranks, check)
        parity(ranks, check)
    for rank, problems in enumerate(dist.on_all_ranks(lambda: check.problems)):
        if problems:
            where = f"{ranks.names[rank]}: " if rank else ""
            check.problems = [f"{where}{line}" for line in problems]
            check.problems.append(f"see {ranks.folder}")
            break
    return check


def report(ranks: Ranks, options: argparse.Namespace, check: Check) -> None:
    """Print and write the results, and remove the runs if all is well."""
    print(check, flush=True)
    if options.json:
        write_json(ranks, options, check)
    if not check.problems:
        shutil.rmtree(ranks.folder, ignore_errors=True)


def write_json(ranks: Ranks, options: argparse.Namespace, check: Check) -> None:
    """Write the results, and the machines that they come from."""
    found = {
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": shlex.join(["python", "-m", "tools.check", *options.argv]),
        "ranks": ranks.names,
        "host": collect_env.get_env_info()._asdict(),
        "status": check.status,
        **asdict(check),
    }
    options.json.write_text(json.dumps(found, indent=2) + "\n")


def main(argv: list[str]) -> int:
    return errors.execute("tools.check", command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
