"""Predict the time of a step from a rehearsal, a table of devices and links, and what overlaps.

    step = compute + exposed communication + optimizer

All constants are here, with their sources. Assumed ones are marked as such. Speeds that
examples/gpu.py has measured on a device replace them.
"""

import dataclasses
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

import dist
from data import TokenFolder
from dist import World
from errors import UsageError
from model import ModelConfig, meta_model
from tools.common import Run, fake_world, resolve
from tools.planning.rehearse import Communication, Operation, Rehearsal

# Speed of attention relative to large matrix products. FlashAttention-2: forward 178 to 187 of 271
# TFLOP/s on an A100 (github.com/liangan1/GPU_travel, performance/flash-attn), less in backward.
ATTENTION = 0.6

# Share of the data sheet's memory bandwidth that kernels reach: assumed, not measured
STREAM = 0.85

# Seconds by which overlapping NCCL traffic slows compute, for each second that the traffic takes on
# links within a host: NCCL's kernels occupy multiprocessors and memory bandwidth. Slower links
# carry less per second, and slow compute less. This is the only fitted constant, on the 12 `fitted`
# rows of docs/published.json; any value from 0.2 to 0.5 fits about as well.
SLOWED = 0.4

# Seconds that a host needs to launch one operation: assumed, at the low end for eager mode
LAUNCH = 5e-6

# NVLink carries 450 GB/s each way on an H100; NCCL's gathers and rings reach 360 to 370. Its
# protocol takes the other fifth (github.com/NVIDIA/nccl-tests, issues 212 and 326).
LINK_EFFICIENCY = 0.8

# Quartiles of measured / predicted seconds in the 21 `blind` rows of docs/published.json: half of
# the runs lie between the two, a quarter was faster, and a quarter was slower.
TOOK = (0.98, 1.42)

# A rehearsed step is not compiled. Measured / predicted seconds of the three blind rows of
# modded-nanogpt's 124M parameters, which were compiled
COMPILED = (0.63, 0.69)

# Share of a device's memory that tensors may fill. The rest is for the CUDA context, NCCL's buffers
# and gaps in torch's caching allocator.
USABLE = 0.9


@dataclass(frozen=True)
class Device:
    """A row of DEVICES, from data sheets: bytes, and bytes per second in one direction.

    `memory` is what torch reports, for example in its errors: less than on the data sheet.
    """

    kind: str  # torch's device type: cuda or cpu
    name: str  # as torch.cuda.get_device_name returns it
    peak: float | None  # TFLOP/s in bfloat16, dense and accumulated in float32; None: unknown
    products: float  # the share of the peak that the fastest matrix products reach
    memory: int | None  # torch's total_memory; None stands for this machine's memory
    memory_bandwidth: float
    intra_bandwidth: float  # from a device to the other devices of its host
    nic_bandwidth: float  # of a device's share of its host's network cards
    float32: float | None = None  # peak TFLOP/s in float32, if bfloat16 is only emulated
    attention: float = ATTENTION
    stream: float = STREAM
    measured: str = ""  # the file that `products`, `attention` and `stream` are from


# Share of a workstation card's peak that the fastest products reach: assumed, about the A100's
WORKSTATION = 0.85

GIB = 1 << 30
# peak: data sheets, where a figure "with sparsity" is twice as high, and amd.com. The MI355X's page
# rounds to 2,500: this is 1,024 matrix cores x 512 multiply-adds per clock x 2 x 2.4 GHz.
# products: github.com/stas00/ml-engineering, compute/accelerator: 271.2 of 312 TFLOP/s on the A100,
# 794.5 of 989 on H100 and H200, 828.6 of 989 on a 900 W GH200, 1,745 of 2,250 on the B200, 1,769
# of 2,250 on the B300, 668.4 and 784.9 of 1,307 on MI300X and MI325X, 1,565 of 2,517 on the MI355X
DEVICES = {
    # A100 data sheet 1758950: 2.0 TB/s, NVLink 600 GB/s both ways; DGX A100: 8 x 200 Gb/s
    "a100": Device(
        "cuda", "NVIDIA A100-SXM4-80GB", 312, 0.869, int(79.2 * GIB), 2.04e12, 300e9, 25e9
    ),
    # nvidia.com/en-us/data-center/h100: 3.35 TB/s, 900 GB/s both ways; DGX H100: 8 x 400 Gb/s
    "h100": Device(
        "cuda", "NVIDIA H100 80GB HBM3", 989, 0.803, int(79.1 * GIB), 3.35e12, 450e9, 50e9
    ),
    # nvidia.com/en-us/data-center/h200: 4.8 TB/s, the rest like the H100
    "h200": Device("cuda", "NVIDIA H200", 989, 0.803, int(139.7 * GIB), 4.8e12, 450e9, 50e9),
    # DGX B200 data sheet: 8 TB/s, 1.8 TB/s both ways, 8 x 400 Gb/s
    "b200": Device("cuda", "NVIDIA B200", 2250, 0.776, int(178.3 * GIB), 8e12, 900e9, 50e9),
    # DGX B300 data sheet: 8 TB/s, 1.8 TB/s both ways, 8 x 800 Gb/s
    "b300": Device(
        "cuda", "NVIDIA B300 SXM6 AC", 2250, 0.786, int(267.7 * GIB), 8e12, 900e9, 100e9
    ),
    # GH200 data sheet 3011356, 96 GB: 4 TB/s; four in a host: 900 GB/s both ways. Each has a card
    # of 200 Gb/s, as in Alps (HPE Slingshot 11); in other hosts it is 400 Gb/s.
    "gh200": Device("cuda", "NVIDIA GH200 120GB", 989, 0.838, int(94.5 * GIB), 4e12, 450e9, 25e9),
    # Data sheets: 5.3, 6 and 8 TB/s; 7 Infinity Fabric links of 128, 128 and 153 GB/s both ways.
    # Each has a card of 400 Gb/s: from github.com/AMD-AGI/Primus for the MI325X, else assumed.
    "mi300x": Device(
        "cuda", "AMD Instinct MI300X", 1307.4, 0.511, int(192.0 * GIB), 5.3e12, 448e9, 50e9
    ),
    "mi325x": Device(
        "cuda", "AMD Instinct MI325X", 1307.4, 0.600, int(256.0 * GIB), 6e12, 448e9, 50e9
    ),
    "mi355x": Device(
        "cuda", "AMD Instinct MI355X", 2516.6, 0.622, int(288.0 * GIB), 8e12, 535e9, 50e9
    ),
    # Workstation cards: 10 Gb/s Ethernet for 8 of them is assumed. GeForces have no peer-to-peer
    # copies, so NCCL sends through host memory: give your own --intra_host_bandwidth.
    # Ada and RTX Blackwell whitepapers, Appendix A: 1,008 and 1,792 GB/s, PCIe 4.0 and 5.0 x 16
    "rtx4090": Device(
        "cuda",
        "NVIDIA GeForce RTX 4090",
        165.2,
        WORKSTATION,
        int(23.6 * GIB),
        1.008e12,
        32e9,
        0.16e9,
    ),
    "rtx5090": Device(
        "cuda",
        "NVIDIA GeForce RTX 5090",
        209.5,
        WORKSTATION,
        int(31.3 * GIB),
        1.792e12,
        64e9,
        0.16e9,
    ),
    # RTX A6000 data sheet: 768 GB/s, PCIe 4.0 x 16; L40S data sheet: 864 GB/s, PCIe 4.0 x 16
    "a6000": Device(
        "cuda", "NVIDIA RTX A6000", 154.8, WORKSTATION, int(47.5 * GIB), 0.768e12, 32e9, 0.16e9
    ),
    "l40s": Device(
        "cuda", "NVIDIA L40S", 362, WORKSTATION, int(44.4 * GIB), 0.864e12, 32e9, 0.16e9
    ),
    # V100 data sheet: 900 GB/s, NVLink 300 GB/s both ways, float32 15.7 TFLOP/s, bfloat16 only
    # emulated; DGX-1: 4 x 100 Gb/s for 8
    "v100": Device(
        "cuda",
        "Tesla V100-SXM2-32GB",
        None,
        WORKSTATION,
        int(31.7 * GIB),
        0.9e12,
        150e9,
        6.25e9,
        float32=15.7,
    ),
    # A server core, with 10 Gb/s Ethernet for 8 cores: give the bandwidths of your own machines
    "cpu": Device("cpu", "", None, 1.0, None, 10e9, 2e9, 0.16e9),
}

# examples/gpu.py writes a.json here, in a folder for each device.
RESULTS = Path(__file__).resolve().parents[2] / "results"


def with_measured(device: Device, folder: Path = RESULTS) -> Device:
    """Return the device with the speeds that were measured on it, if `folder` contains any."""
    for file in sorted(folder.glob("*/a.json")):
        found = json.loads(file.read_text())
        speeds = found["steps"]["ceilings"].get("figures")
        if found["device"] == device.name and speeds:
            product = speeds["products, TFLOP/s"]
            return dataclasses.replace(
                device,
                products=product / device.peak,
                attention=speeds["attention, TFLOP/s"] / product,
                stream=1e12 * speeds["copy, TB/s"] / device.memory_bandwidth,
                measured=str(file.relative_to(folder.parent)),
            )
    return device


@dataclass(frozen=True)
class Links:
    """Bandwidths (bytes per second in one direction) and latencies (seconds) of collectives.

    Two latencies are those of a ring hop, within a host and between hosts; the third starts a
    collective. The defaults are from NCCL's tuning model for rings with the Simple protocol
    (src/graph/tuning.cc: hwLat of NVLink and network, baseLat).
    """

    local_size: int  # devices per host
    intra_bandwidth: float  # from a device to the other devices of its host
    host_bandwidth: float  # from a host to the other hosts, over all its network cards
    intra_latency: float = 3.4e-6
    inter_latency: float = 14.0e-6
    launch_latency: float = 8.4e-6
    # What a rank sends in a reduce_scatter, in units of (n - 1) / n of the tensor: 2 for gloo,
    # which sends as much as in an all_reduce.
    scatter_passes: int = 1


def default_links(device: Device, local_size: int) -> Links:
    return Links(
        local_size=local_size,
        intra_bandwidth=LINK_EFFICIENCY * device.intra_bandwidth,
        host_bandwidth=LINK_EFFICIENCY * device.nic_bandwidth * local_size,
        scatter_passes=2 if device.kind == "cpu" else 1,
    )


@dataclass(frozen=True)
class Cluster:
    """The machines that a run is planned for."""

    world_size: int
    device_type: str  # in DEVICES
    device: Device
    device_memory: int
    links: Links
    # Measured share of its peak that a device reaches in compute; None: estimated by operation
    achieved: float | None = None
    has_bfloat16: bool = True
    peak_tflops: float | None = None  # of a device; None: its data sheet's

    @property
    def hosts(self) -> int:
        return math.ceil(self.world_size / self.links.local_size)

    @property
    def world(self) -> World:
        return dataclasses.replace(
            fake_world(self.world_size, local_size=self.links.local_size),
            device=torch.device(self.device.kind),
            device_name=self.device.name,
            has_bfloat16=self.has_bfloat16,
        )


@dataclass(frozen=True)
class Request:
    """A run of train.py planned for a cluster."""

    flags: dict  # as common.parse_flags returns them
    cluster: Cluster
    source: TokenFolder
    saved_model: ModelConfig | None = None  # of the checkpoint of --init_from, or of --run

    def resolve(self) -> Run:
        """Return the run on the cluster. Raises UsageError and MeshError."""
        return resolve(self.flags, self.cluster.world, self.source, self.saved_model)


def peak_flops(cluster: Cluster, run: Run) -> float:
    """Return the peak FLOP/s of a device in the compute dtype. Raises UsageError if unknown."""
    device = cluster.device
    peak = cluster.peak_tflops or (device.peak if run.dtype == "bfloat16" else device.float32)
    if peak is None:
        raise UsageError(
            f"the speed of --device_type {cluster.device_type} with --dtype {run.dtype} is not "
            "known: give --peak_tflops, the dense TFLOP/s of one device"
        )
    return peak * 1e12


def operation_seconds(row: Operation, peak: float, cluster: Cluster) -> float:
    """Return the seconds of a row's operations.

    A matrix product (m, k) x (k, n) reads its first operands before it computes, and writes its
    last results afterwards, so its traffic is added to its arithmetic. In bfloat16 it reaches the
    share 1 / (1 + ridge x (1 / m + 1 / n + 1 / k)) of the speed of the fastest products, where
    ridge = FLOP/s / (bytes/s).
    """
    moved = row.bytes / (cluster.device.stream * cluster.device.memory_bandwidth)
    if cluster.achieved:
        computed = row.flops / (cluster.achieved * peak)
        return computed + moved if row.phase == "optimizer" else computed
    rate = peak * cluster.device.products
    if "attention" in row.name:
        rate *= cluster.device.attention
    return max(row.flops / rate + moved, row.count * LAUNCH)


# --------------------------------------------------------------------------------------------------
# Collectives


@dataclass(frozen=True)
class Group:
    """The ranks along one axis of the mesh, or all ranks."""

    size: int
    hosts: int


def group_of(axis: str, mesh_shape: tuple[int, int, int], local_size: int) -> Group:
    """Rank 0's group on an axis, where rank = (replicate x dp_shard + shard) x tp + tp_rank."""
    if axis not in dist.AXES:
        size = math.prod(mesh_shape)
        return Group(size, math.ceil(size / local_size))
    place = dist.AXES.index(axis)
    size = mesh_shape[place]
    stride = math.prod(mesh_shape[place + 1 :])
    hosts = {member // local_size for member in range(0, size * stride, stride)}
    return Group(size, len(hosts))


def passes(collective: str, links: Links) -> int:
    """How often a ring passes a tensor around. A broadcast is one: it ends before its source."""
    return {"all_reduce": 2, "reduce_scatter": links.scatter_passes}.get(collective, 1)


def wire_bytes(row: Communication, group: Group, links: Links) -> float:
    """Bytes that a rank sends for a row, whose row.bytes are handed to torch."""
    return passes(row.collective, links) * row.bytes * (group.size - 1) / group.size


def collective_seconds(row: Communication, group: Group, links: Links) -> float:
    """Return the seconds of a row's collectives, run one after the other.

    In each pass a rank of a ring sends (n - 1) / n of the tensor at the speed of the slowest link.
    A pass takes n - 1 hops; hosts - 1 of them leave a host. An all_reduce makes two passes, or uses
    a tree whose depth is the logarithm of the number of hosts. Successive broadcasts come from
    successive ranks and overlap: together they take n - 1 hops, and one more for each broadcast.
    """
    if group.size == 1:
        return 0.0
    sent = wire_bytes(row, group, links)
    if row.collective == "all_to_all" and group.hosts > 1:
        sent *= group.size / group.hosts  # no ring: every rank of a host sends to other hosts
    bandwidth = links.intra_bandwidth
    if group.hosts > 1:
        # The other ranks of a host run the same collective at the same time on its other cards.
        share = group.size / group.hosts / links.local_size
        bandwidth = min(bandwidth, links.host_bandwidth * share)
    inner_hops = group.size - group.hosts
    hops = inner_hops * links.intra_latency + (group.hosts - 1) * links.inter_latency
    if row.collective == "all_reduce":
        inner = (group.size / group.hosts - 1) * links.intra_latency
        hops = min(hops, inner + math.log2(group.hosts) * links.inter_latency)
    if row.collective == "broadcast":
        hops *= 1 / (group.size - 1) + 1 / row.count
    hops *= passes(row.collective, links)
    return sent / bandwidth + row.count * (links.launch_latency + hops)


# --------------------------------------------------------------------------------------------------
# The step


@dataclass(frozen=True)
class Speed:
    """A predicted step. Times in seconds."""

    compute: float
    optimizer: float
    exposed: dict[str, float]  # axis -> communication that compute does not hide
    communication: dict[str, float]  # axis -> all communication
    tokens: float  # per step and device
    peak: float  # FLOP/s of a device
    model_flops: float  # per step and device, as in train.py's MFU: see Transformer.flops_per_token

    @property
    def step_time(self) -> float:
        return self.compute + self.optimizer + sum(self.exposed.values())

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.tokens / self.step_time

    @property
    def mfu(self) -> float:
        return self.model_flops / self.step_time / self.peak


@dataclass
class Queue:
    """Communication that overlaps the forward or the backward pass of one micro-batch."""

    seconds: Counter = field(default_factory=Counter)  # axis -> seconds
    longest: float = 0.0  # of one collective
    slowed: float = 0.0  # seconds that it adds to compute
    count: float = 0.0  # collectives of the most frequent kind

    def add(self, row: Communication, seconds: float, slowed: float, micro_batches: int) -> None:
        """Add a row that takes `seconds` per step, shared equally by `micro_batches`."""
        self.seconds[row.axis] += seconds / micro_batches
        self.slowed += slowed / micro_batches
        self.count = max(self.count, row.count / micro_batches)
        self.longest = max(self.longest, seconds / row.count)

    def exposed(self, compute: float) -> Counter:
        """Return axis -> seconds that `compute` seconds do not hide.

        The pass has as many parts as collectives, and each part overlaps the collective of the next
        or the previous part. So one collective is always exposed: the first gather or the last
        reduction. The others are exposed as far as they take longer than all parts but one. Hidden
        communication slows the compute that it overlaps.
        """
        total = sum(self.seconds.values())
        if not total:
            return Counter()
        hidden = compute * max(0.0, 1 - 1 / self.count)
        seconds = max(self.longest, self.slowed, total - hidden)
        return Counter({axis: seconds * part / total for axis, part in self.seconds.items()})


def speed(rehearsal: Rehearsal, cluster: Cluster) -> Speed:
    """Predict a step. Raises UsageError if the device's speed is unknown.

    docs/plan.md lists what overlaps and what is left out.
    """
    run = rehearsal.run
    n = run.grad_accum_steps
    peak = peak_flops(cluster, run)
    phases = Counter()  # phase -> seconds
    for row in rehearsal.operations:
        phases[row.phase] += operation_seconds(row, peak, cluster)
    forward, backward = phases["forward"] / n, phases["backward"] / n  # of a micro-batch
    beside, exposed, total = overlap(rehearsal, cluster)
    for work, compute, times in (
        ("forward", forward, n),
        ("backward", backward, n - 1),
        ("last backward", backward, 1),
    ):
        for axis, seconds in beside[work].exposed(compute).items():
            exposed[axis] += times * seconds
    tokens = run.tokens_per_step / math.prod(run.mesh_shape)
    return Speed(
        compute=n * (forward + backward),
        optimizer=phases["optimizer"],
        exposed=dict(exposed),
        communication=dict(total),
        tokens=tokens,
        peak=peak,
        model_flops=tokens * meta_model(run.model_config).flops_per_token(),
    )


def overlap(rehearsal: Rehearsal, cluster: Cluster) -> tuple[dict[str, Queue], Counter, Counter]:
    """Return pass -> communication during it, axis -> seconds in no pass, axis -> all seconds."""
    run = rehearsal.run
    links = cluster.links
    n = run.grad_accum_steps
    beside = {work: Queue() for work in ("forward", "backward", "last backward")}
    alone, total = Counter(), Counter()  # axis -> seconds per step
    for row in rehearsal.communication:
        group = group_of(row.axis, run.mesh_shape, links.local_size)
        seconds = collective_seconds(row, group, links)
        slowed = SLOWED * collective_seconds(row, Group(group.size, 1), links)
        total[row.axis] += seconds
        on_cores = cluster.device.kind == "cpu" and group.hosts == 1  # which copy the data
        # Nothing runs meanwhile: the next layer needs the sum over tp, the update its collectives.
        if on_cores or row.axis in ("tp", "world") or row.phase == "optimizer":
            alone[row.axis] += seconds
        elif row.phase == "forward":
            beside["forward"].add(row, seconds, slowed, n)
        elif is_last_only(row, run.grad_sync):
            beside["last backward"].add(row, seconds, slowed, 1)
        else:
            beside["backward"].add(row, seconds, slowed, n)
            beside["last backward"].add(row, seconds, slowed, n)
    return beside, alone, total


def is_last_only(row: Communication, grad_sync: str) -> bool:
    """Whether a collective of the backward pass runs only in the last micro-batch."""
    if row.collective == "all_gather" or grad_sync == "micro_batch":
        return False
    return grad_sync == "batch" or row.collective == "all_reduce"
