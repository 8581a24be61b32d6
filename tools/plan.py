"""Plan a run for any cluster, on this machine: what a rank holds, what travels, how long it takes.

python -m tools.plan --world_size 512 --device_type h200 --model llama3-70b --strategy fsdp \
    --activation_checkpointing full --micro_batch_size 2 --global_batch_size 1024
python -m tools.plan --choose --world_size 8 --model llama3-8b --global_batch_size 512

Accepts the flags of train.py. Memory, communication and FLOPs are counted, because rehearse.py runs
a step of rank 0, which no rank exceeds, with the training code. Only the seconds are estimated:

    step = compute + communication that compute does not hide + update
"""

import dataclasses
import itertools
import math
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import config
import dist
import errors
from config import Config, Run
from data import TokenFolder
from errors import UsageError
from model import SIZES, ModelConfig, meta_model
from start import open_source
from tools.common import named_origin
from tools.rehearse import Communication, Operation, Rehearsal, fake_world, rehearse

# --------------------------------------------------------------------------------------------------
# Devices

USABLE = 0.9  # of a device's memory: CUDA, NCCL and gaps between tensors take the rest (assumed)
STREAM = 0.85  # of the data sheet's memory bandwidth, which kernels reach (assumed)
LAUNCH = 5e-6  # seconds in which a host launches an operation (assumed)

# Speed of attention relative to large matrix products. FlashAttention-2: forward 178 to 187 of 271
# TFLOP/s on an A100 (github.com/liangan1/GPU_travel, performance/flash-attn), less in backward.
ATTENTION = 0.6

# NVLink carries 450 GB/s each way on an H100; NCCL's gathers and rings reach 360 to 370. Its
# protocol takes the other fifth (github.com/NVIDIA/nccl-tests, issues 212 and 326).
LINK_EFFICIENCY = 0.8

# Seconds of a ring's hop within a host and between hosts, and to start a collective, from NCCL's
# tuning model for rings with the Simple protocol (src/graph/tuning.cc: hwLat, baseLat)
HOP, HOP_BETWEEN_HOSTS, START = 3.4e-6, 14.0e-6, 8.4e-6

# Seconds by which overlapping NCCL traffic slows compute, for each second that the traffic takes on
# links within a host: NCCL's kernels occupy multiprocessors and memory bandwidth. This is the only
# fitted constant, on the 12 `fitted` rows of docs/published.json; 0.2 to 0.5 fit about as well.
SLOWED = 0.4

# Quartiles of measured / predicted seconds in the `blind` rows of docs/published.json: half of the
# runs lie between the two.
TOOK = (0.97, 1.47)


@dataclass(frozen=True)
class Device:
    """A row of DEVICES, from data sheets: bytes, and bytes per second in one direction."""

    name: str  # as torch.cuda.get_device_name returns it
    peak: float  # TFLOP/s in bfloat16, dense and accumulated in float32
    products: float  # the share of the peak that the fastest matrix products reach
    memory: int  # torch's total_memory, which is less than on the data sheet
    memory_bandwidth: float
    intra_bandwidth: float  # from a device to the other devices of its host
    nic_bandwidth: float  # of a device's share of its host's network cards


GIB = 1 << 30
# peak: data sheets, where a figure "with sparsity" is twice as high, and amd.com
# products: github.com/stas00/ml-engineering, compute/accelerator: 271.2 of 312 TFLOP/s on the A100,
# 794.5 of 989 on H100 and H200, 828.6 of 989 on a 900 W GH200, 1,745 of 2,250 on the B200, 668.4
# and 784.9 of 1,307 on MI300X and MI325X
DEVICES = {
    # A100 data sheet 1758950: 2.0 TB/s, NVLink 600 GB/s both ways; DGX A100: 8 x 200 Gb/s
    "a100": Device("NVIDIA A100-SXM4-80GB", 312, 0.869, int(79.2 * GIB), 2.04e12, 300e9, 25e9),
    # nvidia.com/en-us/data-center/h100: 3.35 TB/s, 900 GB/s both ways; DGX H100: 8 x 400 Gb/s
    "h100": Device("NVIDIA H100 80GB HBM3", 989, 0.803, int(79.1 * GIB), 3.35e12, 450e9, 50e9),
    # nvidia.com/en-us/data-center/h200: 4.8 TB/s, the rest like the H100
    "h200": Device("NVIDIA H200", 989, 0.803, int(139.7 * GIB), 4.8e12, 450e9, 50e9),
    # GH200 data sheet 3011356, 96 GB: 4 TB/s; four in a host: 900 GB/s both ways. Each has a card
    # of 200 Gb/s, as in Alps (HPE Slingshot 11); in other hosts it is 400 Gb/s.
    "gh200": Device("NVIDIA GH200 120GB", 989, 0.838, int(94.5 * GIB), 4e12, 450e9, 25e9),
    # DGX B200 data sheet: 8 TB/s, 1.8 TB/s both ways, 8 x 400 Gb/s
    "b200": Device("NVIDIA B200", 2250, 0.776, int(178.3 * GIB), 8e12, 900e9, 50e9),
    # Data sheets: 5.3 and 6 TB/s; 7 Infinity Fabric links of 128 GB/s both ways. Each has a card of
    # 400 Gb/s: from github.com/AMD-AGI/Primus for the MI325X, else assumed.
    "mi300x": Device("AMD Instinct MI300X", 1307.4, 0.511, int(192 * GIB), 5.3e12, 448e9, 50e9),
    "mi325x": Device("AMD Instinct MI325X", 1307.4, 0.600, int(256 * GIB), 6e12, 448e9, 50e9),
    # Ada whitepaper, Appendix A: 1,008 GB/s, PCIe 4.0 x 16, without copies between cards; the share
    # of products and 10 Gb/s of Ethernet for a host of 8 are assumed.
    "rtx4090": Device(
        "NVIDIA GeForce RTX 4090", 165.2, 0.85, int(23.6 * GIB), 1.008e12, 32e9, 0.16e9
    ),
}


@dataclass(frozen=True)
class Cluster:
    """Equal devices on equal hosts. Bandwidths are those that collectives reach, in bytes/s."""

    device_type: str  # in DEVICES, or cpu
    device: Device | None  # None for cpu, whose speeds are not known
    world_size: int
    local_size: int  # devices of a host
    host_bandwidth: float = 0.0  # from a host to the other hosts, over all its network cards

    @property
    def hosts(self) -> int:
        return math.ceil(self.world_size / self.local_size)

    @property
    def world(self) -> dist.World:
        """The place of rank 0."""
        world = fake_world(self.world_size, local_size=self.local_size)
        if self.device is None:
            return world
        device = torch.device("cuda")
        name = self.device.name
        return dataclasses.replace(world, device=device, device_name=name, has_bfloat16=True)


# --------------------------------------------------------------------------------------------------
# Bytes


def group_of(axis: str, run: Run, local_size: int) -> tuple[int, int]:
    """Return the number of ranks in rank 0's group on an axis, and of hosts that they are on.

    Rank (replicate, shard, t) of the mesh is rank (replicate x dp_shard + shard) x tp + t.
    """
    place = dist.AXES.index(axis) if axis in dist.AXES else None  # "world": all ranks
    mesh_shape = run.dp_replicate, run.dp_shard, run.tp
    size = math.prod(mesh_shape) if place is None else mesh_shape[place]
    stride = 1 if place is None else math.prod(mesh_shape[place + 1 :])
    hosts = {member // local_size for member in range(0, size * stride, stride)}
    return size, len(hosts)


def passes(collective: str, on_gloo: bool) -> int:
    """How often a ring passes a tensor around; gloo's reduce_scatter sends like its all_reduce."""
    return 2 if collective == "all_reduce" or (collective == "reduce_scatter" and on_gloo) else 1


def wire_bytes(row: Communication, size: int, on_gloo: bool = False) -> float:
    """Bytes that one of `size` ranks sends for a row, whose row.bytes are handed to torch."""
    return passes(row.collective, on_gloo) * row.bytes * (size - 1) / size


# --------------------------------------------------------------------------------------------------
# Seconds


@dataclass(frozen=True)
class Seconds:
    """A predicted step."""

    compute: float
    exposed: float  # communication that compute does not hide
    update: float

    @property
    def step(self) -> float:
        return self.compute + self.exposed + self.update


@dataclass
class Pass:
    """The communication during a forward or backward pass of one micro-batch."""

    seconds: float = 0.0
    slowed: float = 0.0  # by which it slows compute
    longest: float = 0.0  # of one collective
    count: float = 0.0  # collectives of the most frequent kind

    def exposed(self, compute: float) -> float:
        """Return the seconds of communication that `compute` seconds do not hide.

        The pass has as many parts as collectives, and each part overlaps the collective of the next
        or the previous part. So one collective is always exposed: the first gather or the last
        reduction. The others are exposed as far as they take longer than all parts but one. Hidden
        communication slows the compute that it overlaps.
        """
        if not self.seconds:
            return 0.0
        hidden = compute * max(0.0, 1 - 1 / self.count)
        return max(self.longest, self.slowed, self.seconds - hidden)


def predict(found: Rehearsal, cluster: Cluster) -> Seconds | None:
    """Predict a step in bfloat16 on GPUs; None for other steps. It is not compiled.

    Gathers overlap every pass, and reductions the backward pass of the last micro-batch or of all
    (--grad_sync). Nothing hides the traffic of tp, because a layer needs its sums, or the update's.
    """
    run = found.run
    if cluster.device is None or run.dtype != "bfloat16":
        return None
    n = run.grad_accum_steps
    phases = Counter()  # phase -> seconds of all micro-batches
    for row in found.operations:
        phases[row.phase] += operation_seconds(row, cluster.device)
    forward, backward, last_backward = Pass(), Pass(), Pass()
    alone = 0.0
    for row in found.communication:
        size, hosts = group_of(row.axis, run, cluster.local_size)
        seconds = collective_seconds(row, size, hosts, cluster)
        slowed = SLOWED * collective_seconds(row, size, 1, cluster)
        if row.axis in ("tp", "world") or row.phase == "optimizer":
            alone += seconds
        elif row.phase == "forward":
            add(forward, row, seconds, slowed, n)
        elif is_last_only(row, run.grad_sync):
            add(last_backward, row, seconds, slowed, 1)
        else:
            add(backward, row, seconds, slowed, n)
            add(last_backward, row, seconds, slowed, n)
    of_forward, of_backward = phases["forward"] / n, phases["backward"] / n  # of a micro-batch
    exposed = alone + n * forward.exposed(of_forward)
    exposed += (n - 1) * backward.exposed(of_backward) + last_backward.exposed(of_backward)
    return Seconds(phases["forward"] + phases["backward"], exposed, phases["optimizer"])


def add(during: Pass, row: Communication, seconds: float, slowed: float, times: int) -> None:
    """Add a row, whose `seconds` are shared by `times` equal passes of a step."""
    during.seconds += seconds / times
    during.slowed += slowed / times
    during.longest = max(during.longest, seconds / row.count)
    during.count = max(during.count, row.count / times)


def is_last_only(row: Communication, grad_sync: str) -> bool:
    """Whether a collective of the backward pass runs only in the last micro-batch."""
    if row.collective == "all_gather" or grad_sync == "micro_batch":
        return False
    return grad_sync == "batch" or row.collective == "all_reduce"


def operation_seconds(row: Operation, device: Device) -> float:
    """Return the seconds of a row's operations.

    A matrix product reads its first operands before it computes, and writes its last results
    afterwards, so its traffic is added to its arithmetic.
    """
    rate = 1e12 * device.peak * device.products
    if "attention" in row.name:
        rate *= ATTENTION
    moved = row.bytes / (STREAM * device.memory_bandwidth)
    return max(row.flops / rate + moved, row.count * LAUNCH)


def collective_seconds(row: Communication, size: int, hosts: int, cluster: Cluster) -> float:
    """Return the seconds of a row's collectives, run one after the other.

    In each pass a rank of a ring sends (n - 1) / n of the tensor at the speed of the slowest link,
    in n - 1 hops, of which hosts - 1 leave a host. An all_reduce may use a tree of hosts instead,
    whose depth is a logarithm.
    """
    if size == 1:
        return 0.0
    sent = wire_bytes(row, size)
    bandwidth = LINK_EFFICIENCY * cluster.device.intra_bandwidth
    if hosts > 1:
        # The other ranks of a host run the same collective at the same time on its other cards.
        share = size / hosts / cluster.local_size
        bandwidth = min(bandwidth, cluster.host_bandwidth * share)
    if row.collective == "all_to_all":
        sent *= size / hosts if hosts > 1 else 1  # no ring: every rank sends
    inner = size / hosts - 1  # hops within a host
    hops = inner * hosts * HOP + (hosts - 1) * HOP_BETWEEN_HOSTS
    if row.collective == "all_reduce":
        hops = min(hops, inner * HOP + math.log2(hosts) * HOP_BETWEEN_HOSTS)
    return sent / bandwidth + row.count * (START + passes(row.collective, False) * hops)


# --------------------------------------------------------------------------------------------------
# The report


@dataclass(frozen=True)
class Plan:
    """A rehearsed run, and the seconds of a step where they can be predicted."""

    cluster: Cluster
    found: Rehearsal
    seconds: Seconds | None

    @property
    def run(self) -> Run:
        return self.found.run

    @property
    def fits(self) -> bool:
        """Whether the step fits into a device; a CPU's memory is not asked for."""
        device = self.cluster.device
        return device is None or self.found.peak <= USABLE * device.memory

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.run.tokens_per_step / self.cluster.world_size / self.seconds.step


def make_plan(flags: dict, cluster: Cluster) -> Plan:
    """Rehearse a step of the run of `flags`. Raises UsageError, MeshError and DataError."""
    saved_model = named_origin(flags).model_config
    source = find_source(flags, saved_model or SIZES[flags.get("model") or "tiny"])
    run = config.resolve(Config(**flags), cluster.world, source, saved_model)
    found = rehearse(run)
    return Plan(cluster, found, predict(found, cluster))


def find_source(flags: dict, model_config: ModelConfig) -> TokenFolder:
    """Open --data or, if it is not here, return a token folder with the vocabulary of a model."""
    path = flags.get("data", Config.data)
    if "data" in flags and Path(path).exists():  # that of --config may be on the cluster only
        return open_source(path)
    dtype, tokenizer, fingerprint = np.dtype(np.uint16), None, ""  # not read
    return TokenFolder(Path(path), dtype, model_config.vocab_size, tokenizer, fingerprint)


def report(plan: Plan) -> Iterator[str]:
    """Yield the lines of a plan: bytes first, then the estimate of seconds."""
    run, found, cluster = plan.run, plan.found, plan.cluster
    axes = " x ".join(f"{axis} {getattr(run, axis)}" for axis in dist.AXES)
    yield (
        f"model   {run.model}: {run.n_layer} layers x {run.d_model} wide, vocabulary "
        f"{run.model_config.vocab_size:,}: {found.parameters:,} parameters, "
        f"{found.parameters_per_rank:,} a rank"
    )
    yield (
        f"mesh    {run.strategy}: {axes} = {cluster.world_size} x {cluster.device_type}, "
        f"{cluster.local_size} on each of {cluster.hosts} hosts"
    )
    yield (
        f"batch   {run.global_batch_size:,} sequences = micro_batch_size {run.micro_batch_size} x "
        f"grad_accum_steps {run.grad_accum_steps} x dp_size {run.dp_size}; "
        f"x {run.seq_len:,} tokens = {run.tokens_per_step:,} tokens a step"
    )
    yield f"memory  {parts_of(found.state)} GB at the update"
    yield f"        {parts_of(found.memory)} GB at the peak"
    yield f"        = {memory_of(plan)}"
    yield from describe_communication(plan)
    saved = (found.state["parameters"] + found.state["optimizer"]) // run.dp_replicate
    per_host = cluster.local_size * saved
    yield f"saves   {gigabytes(saved)} GB a rank, {gigabytes(per_host)} GB a host"
    yield from describe_seconds(plan)


def memory_of(plan: Plan) -> str:
    peak, device = plan.found.peak, plan.cluster.device
    if device is None:
        return f"{gigabytes(peak)} GB"
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    share = f"{peak / device.memory:.0%} (limit {USABLE:.0%})"
    return f"{gigabytes(peak)} GB of {gigabytes(device.memory)} GB, {share}: {verdict}"


def parts_of(sizes: dict[str, int]) -> str:
    """Format sizes as a sum in GB, without negligible parts."""
    least = 1e-4 * sum(sizes.values())
    parts = [f"{kind} {gigabytes(size)}" for kind, size in sizes.items() if size > least]
    return " + ".join(parts)


def communication(plan: Plan) -> list[dict]:
    """One row for each axis and collective of a step, with the bytes that a rank sends."""
    on_gloo = plan.cluster.device is None
    rows = {}
    for entry in plan.found.communication:
        size, hosts = group_of(entry.axis, plan.run, plan.cluster.local_size)
        row = {"axis": entry.axis, "collective": entry.collective, "between_hosts": hosts > 1}
        row |= {"count": 0, "bytes": 0, "wire_bytes": 0.0}
        row = rows.setdefault((entry.axis, entry.collective), row)
        row["count"] += entry.count
        row["bytes"] += entry.bytes
        row["wire_bytes"] += wire_bytes(entry, size, on_gloo)
    return list(rows.values())


def describe_communication(plan: Plan) -> Iterator[str]:
    rows = communication(plan)
    for row in rows:
        place = "between hosts" if row["between_hosts"] else "within a host"
        handed, sent = gigabytes(row["bytes"]), gigabytes(row["wire_bytes"])
        yield (
            f"sends   {row['axis']:12} {row['count']:6,} x {row['collective']:14} of {handed:>6} "
            f"GB in all, {sent:>6} GB on the wire {place}"
        )
    if not rows:
        yield "sends   nothing"


def describe_seconds(plan: Plan) -> Iterator[str]:
    took, device = plan.seconds, plan.cluster.device
    if took is None:
        yield "step    seconds are predicted for bfloat16 on GPUs only"
        return
    low, high = (ratio * took.step for ratio in TOOK)
    per_token = meta_model(plan.run.model_config).flops_per_token()
    mfu = plan.tokens_per_second * per_token / (1e12 * device.peak)
    yield (
        f"step    {took.step:.4g} s = compute {took.compute:.4g} + exposed communication "
        f"{took.exposed:.4g} + update {took.update:.4g}"
    )
    yield f"        {plan.tokens_per_second:,.0f} tokens/s/device, MFU {mfu:.1%}"
    yield (
        "        not compiled, from data sheets; half of the published runs took "
        f"{low:.4g} to {high:.4g} s"
    )


def gigabytes(size: float) -> str:
    """Format a size in GB, with three significant digits below 100."""
    if size == 0:
        return "0"
    number = size / 1e9
    digits = 2 - math.floor(math.log10(number))
    return f"{number:,.{min(max(digits, 0), 4)}f}"


# --------------------------------------------------------------------------------------------------
# The fastest run that fits

CHOSEN = ("strategy", "activation_checkpointing", "grad_sync", "micro_batch_size")
# Each from the one that needs the least memory to the fastest
RECOMPUTED = ["full", "selective", "none"]
GRAD_SYNCS = {"fsdp": ["micro_batch", "batch"], "hsdp": ["shard", "batch"]}


def choose(flags: dict, cluster: Cluster) -> Iterator[str]:
    """Yield a line for each run that was rehearsed, then the plan and the command of the fastest.

    Raises UsageError if no run fits, or if seconds cannot be predicted.
    """
    if cluster.device is None or flags.get("dtype") == "float32":
        raise UsageError(
            "--choose predicts seconds, for bfloat16 on the GPUs of --device_type only"
        )
    memory = f"GB of {gigabytes(cluster.device.memory)}"
    row = "{:8}  {:9}  {:11}  {:>11}  {:>10}  {:>12}"
    yield row.format("strategy", "recompute", "grad_sync", "micro-batch", memory, "s a step")
    best = None
    for plan in candidates(flags, cluster):
        cells = [getattr(plan.run, name) for name in CHOSEN]
        took = f"{plan.seconds.step:.4g}" if plan.fits else "does not fit"
        yield row.format(*cells, gigabytes(plan.found.peak), took)
        if plan.fits and (best is None or is_faster(plan, best)):
            best = plan
    if best is None:
        raise UsageError("none of these fits: take more devices, or split each layer with --tp")
    yield ""
    yield from report(best)
    yield ""
    yield command_of(best, flags)


def is_faster(plan: Plan, best: Plan) -> bool:
    """Whether a run is faster than an earlier one, of a simpler strategy by 3% at least."""
    if plan.run.strategy == best.run.strategy:
        return plan.seconds.step <= best.seconds.step
    return plan.seconds.step < 0.97 * best.seconds.step


def candidates(flags: dict, cluster: Cluster) -> Iterator[Plan]:
    """Rehearse the runs among which the fastest is chosen; flags that are given stay as they are.

    Of each kind of run, which is a strategy, what is recomputed and when gradients are averaged,
    micro-batches double until one does not fit.
    """
    dp_size = cluster.world_size // flags.get("tp", 1)
    strategies = ["ddp", "hsdp", "fsdp"] if cluster.hosts > 1 else ["ddp", "fsdp"]
    sizes = [max(1, flags.get("global_batch_size", Config.global_batch_size) // dp_size)]
    while sizes[0] % 2 == 0:
        sizes.insert(0, sizes[0] // 2)

    def choices(name: str, default: list) -> list:
        return [flags[name]] if flags.get(name) not in (None, "auto") else default

    sizes = choices("micro_batch_size", sizes)
    for strategy in choices("strategy", strategies if dp_size > 1 else ["single"]):
        policies = choices("activation_checkpointing", RECOMPUTED)
        syncs = choices("grad_sync", GRAD_SYNCS.get(strategy, ["batch"]))
        kinds = list(itertools.product(policies, syncs))
        for kind in kinds:
            for size in sizes:
                choice = dict(zip(CHOSEN, (strategy, *kind, size)))
                plan = make_plan(flags | choice, cluster)
                yield plan
                if not plan.fits:
                    break
            if (kind, size) == (kinds[0], sizes[0]) and not plan.fits:
                break  # not even the kind that needs the least memory


def command_of(plan: Plan, flags: dict) -> str:
    """Return the command line of a planned run, for each host of its cluster."""
    cluster = plan.cluster
    launch = f"torchrun --nnodes {cluster.hosts} --nproc_per_node {cluster.local_size}"
    if cluster.hosts == 1:
        launch = launch.replace("--nnodes 1", "--standalone")
    words = [*launch.split(), "train.py"]
    for name, value in (flags | {name: getattr(plan.run, name) for name in CHOSEN}).items():
        words += [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return shlex.join(words)


# --------------------------------------------------------------------------------------------------
# The command


def build_parser() -> errors.Parser:
    parser = config.build_parser()
    parser.prog = "tools.plan"
    parser.usage = "python -m tools.plan --world_size N [--choose] [--FLAG VALUE ...]"
    parser.description = (
        "Rehearse a step of train.py for any cluster, without it: print what a rank holds and\n"
        "sends, and how long a step may take. All flags of train.py are accepted."
    )
    parser.epilog = "how seconds are estimated, and how well: docs/plan.md"
    count = errors.number(int, 1)
    add = parser.add_argument_group("the cluster").add_argument
    add("--world_size", type=count, metavar="N", required=True, help="number of devices in all")
    add("--nproc_per_node", type=count, default=8, metavar="N", help="devices a host (default: 8)")
    help = "memory, speed and links (default: h100)"
    add("--device_type", choices=[*DEVICES, "cpu"], default="h100", help=help)
    help = "GB/s that a host sends to the others (default: 80%% of the data sheet's network cards)"
    add("--host_bandwidth", type=errors.number(float, 1e-12), metavar="X", help=help)
    help = "print the fastest command that fits, of all strategies, micro-batches and recomputation"
    add("--choose", action="store_true", help=help)
    return parser


def make_cluster(
    device_type: str, world_size: int, local_size: int, host_bandwidth: float | None = None
) -> Cluster:
    """Return the cluster; `host_bandwidth` is in GB/s. Raises UsageError if it has half a host."""
    local_size = min(local_size, world_size)
    if world_size % local_size:
        raise UsageError(
            f"--world_size {world_size} is not a multiple of --nproc_per_node {local_size}"
        )
    if device_type == "cpu":
        return Cluster(device_type, None, world_size, local_size)
    device = DEVICES[device_type]
    between_hosts = LINK_EFFICIENCY * device.nic_bandwidth * local_size
    if host_bandwidth:
        between_hosts = 1e9 * host_bandwidth
    return Cluster(device_type, device, world_size, local_size, between_hosts)


def parse(argv: list[str]) -> tuple[dict, Cluster, bool]:
    """Return the flags of train.py, the cluster, and whether to choose. Raises UsageError."""
    flags = config.parse(argv, build_parser())
    names = ("device_type", "world_size", "nproc_per_node", "host_bandwidth")
    cluster = make_cluster(*(flags.pop(name) for name in names))
    return flags, cluster, flags.pop("choose")


def run(argv: list[str]) -> None:
    flags, cluster, chooses = parse(argv)
    for line in choose(flags, cluster) if chooses else report(make_plan(flags, cluster)):
        print(line, flush=True)


def main(argv: list[str]) -> int:
    return errors.execute("tools.plan", run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
