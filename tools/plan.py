"""Plan a run on any cluster, from this machine: memory, communication, checkpoints, time.

python -m tools.plan --model llama3-70b --world_size 512 --strategy hsdp --dp_shard 64 --tp 8 \
    --micro_batch_size 1 --global_batch_size 1024 --device_type h200
python -m tools.plan --run runs/tiny

Takes train.py's flags, rehearses one optimizer step of one rank with train.py's code, and predicts
the step time from what that did: see planning/rehearse.py and planning/predict.py.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import config
import data
import dist
from layout import compute_dtype, estimate_memory
from metrics import read_log
from model import SIZES, ModelConfig
from runtime import cli, memory, preflight, run_folder
from runtime.cli import UsageError
from tools.bench import add_flags, count, positive
from tools.compare import positive_number, read
from tools.planning import predict, search
from tools.planning.predict import DEVICES, Cluster, Links, Request
from tools.planning.rehearse import Rehearsal

# --------------------------------------------------------------------------------------------------
# Flags


def fraction(text: str) -> float:
    """A number, or the median MFU of a one-device run, given its folder."""
    if Path(text).is_dir():
        rows = read_log(Path(text, "metrics.jsonl"))
        values = [row["mfu"] for row in rows if row.get("mfu")]
        if not values:
            raise argparse.ArgumentTypeError(
                f"the log of {text} has no MFU: it needs --peak_tflops, or a GPU that is known"
            )
        return statistics.median(values)
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and at most 1")
    return number


def number(metavar: str, help: str, kind=positive_number, default: float | None = None) -> dict:
    return dict(metavar=metavar, help=help, type=kind, default=default)


# This command's flags beyond train.py's: name -> argparse options
FLAGS = {
    "world_size": number("N", "devices in all; required", positive),
    "nproc_per_node": count(8, "devices of a host"),
    "rank": number("N", "the rank to rehearse (default: 0)", int, 0),
    "device_type": dict(
        choices=DEVICES, default="h100", help="memory, speed and links (default: h100)"
    ),
    "achieved": number(
        "X|RUN",
        "share of its peak that your device reaches while it computes, or a run on one device to "
        "read it from (default: by operation)",
        fraction,
    ),
    "intra_host_bandwidth": number(
        "GB/s",
        "of a device to the others of its host, in one direction, as nccl-tests' busbw "
        "(default: 80%% of the data sheet's)",
    ),
    "inter_host_bandwidth": number(
        "GB/s",
        "of a host to others, in one direction, all its network cards together, which its devices "
        "share (default: 80%% of the data sheet's)",
    ),
    "host_memory": number("GB", "of a host, to compare checkpoints with"),
    "tokens": number("N", "tokens to train on, such as 15e12: hours"),
    "search": dict(action="store_true", help="rank the meshes and policies that fit"),
    "search_seconds": number("S", "of --search (default: 120)", default=120.0),
    "scaling": dict(action="store_true", help="also plan the run on 1, 2, 4, ... hosts"),
    "run": dict(metavar="DIR", help="a run: what was rehearsed and predicted beside what it took"),
    "json": dict(action="store_true", help="print one JSON object; takes no file, as others do"),
}


def build_parser() -> cli.Parser:
    parser = config.build_parser()
    parser.prog = "tools.plan"
    parser.usage = "python -m tools.plan --world_size N [--FLAG VALUE ...], or --run DIR"
    parser.description = (
        "Rehearse a step of train.py on any cluster, without it: what a rank holds,\n"
        "sends and computes, and how long that takes. It takes all flags of train.py."
    )
    parser.epilog = "examples, and how the prediction is computed: docs/plan.md"
    add_flags(parser.add_argument_group("the cluster"), FLAGS)
    return parser


def parse(argv: list[str]) -> tuple[Request, argparse.Namespace]:
    """The run, and this command's own flags; `free` holds train.py's flags that were not given.

    Raises UsageError, MeshError and DataError.
    """
    flags = config.parse_flags(build_parser(), argv)
    options = argparse.Namespace(**{name: flags.pop(name) for name in FLAGS})
    given = {word.split("=")[0].removeprefix("--") for word in argv}
    options.free = frozenset(flags) - given
    if options.run:
        if others := given & flags.keys() - {"peak_tflops"}:
            raise UsageError(f"--run takes the flags of the run: leave out --{min(others)}")
        options.past = read_past(options.run, flags["peak_tflops"])
        return request_of(options.past, options), options
    folders = flags["data"]
    c = config.to_config(flags)
    cluster = make_cluster(options)
    if c.dtype == "auto":  # for the planned device, not this machine
        is_cuda = cluster.device.kind == "cuda"
        dtype = torch.bfloat16 if is_cuda else compute_dtype("auto", torch.device("cpu"))
        c = dataclasses.replace(c, dtype=str(dtype).removeprefix("torch."))
    predict.peak_flops(cluster, c)  # raises early if unknown
    base = preflight.find_origin(c).model
    vocab_size = (base or SIZES[c.model]).vocab_size
    if folders and ("data" in given or Path(folders).exists()):  # a --config's may be missing
        vocab_size = data.open_folders(folders)[0].vocab_size
    return Request(c, cluster, vocab_size, options.rank, base), options


def make_cluster(options: argparse.Namespace) -> Cluster:
    """Raises UsageError if ranks and hosts do not match."""
    world_size = options.world_size
    if world_size is None:
        raise UsageError("--world_size is missing: give the number of devices in all")
    local_size = min(options.nproc_per_node, world_size)
    if world_size % local_size:
        raise UsageError(
            f"--world_size {world_size} is not a multiple of --nproc_per_node {local_size}"
        )
    if not 0 <= options.rank < world_size:
        raise UsageError(f"--rank {options.rank}: the ranks are 0 to {world_size - 1}")
    device = DEVICES[options.device_type]
    return Cluster(
        world_size=world_size,
        device_type=options.device_type,
        device=device,
        device_memory=device.memory or memory.device_memory(torch.device("cpu"), local_size),
        links=make_links(options, predict.default_links(device, local_size)),
        achieved=options.achieved,
        host_memory=int(options.host_memory * 1e9) if options.host_memory else None,
    )


def make_links(options: argparse.Namespace, links: Links) -> Links:
    """The table's links, overridden by flags."""
    if within := options.intra_host_bandwidth:
        links = dataclasses.replace(links, intra_bandwidth=1e9 * within)
    if between := options.inter_host_bandwidth:
        links = dataclasses.replace(links, host_bandwidth=1e9 * between)
    return links


# --------------------------------------------------------------------------------------------------
# The plan of a run


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
        """The run on 1, 2, 4, ... hosts, each rehearsed, with the same batch and micro-batch.

        With fewer ranks dp_shard shrinks, and dp_replicate follows.
        """
        cluster, setup = self.request.cluster, self.rehearsal.setup
        _, dp_shard, tp = setup.mesh_shape
        hosts = 1
        while hosts < cluster.hosts:
            size = hosts * cluster.links.local_size
            c = dataclasses.replace(
                self.request.config,
                strategy=setup.strategy,
                dp_replicate=None,
                dp_shard=min(dp_shard, max(1, size // tp)) if setup.strategy == "hsdp" else None,
                micro_batch_size=setup.micro_batch_size,
            )
            smaller = dataclasses.replace(cluster, world_size=size)
            row = {"hosts": hosts, "world_size": size}
            try:
                request = dataclasses.replace(self.request, config=c, cluster=smaller, rank=0)
                yield row | make_plan(request).summary()
            except (UsageError, dist.MeshError) as error:
                yield row | {"fits": False, "problem": str(error)}
            hosts *= 2
        yield {"hosts": cluster.hosts, "world_size": cluster.world_size} | self.summary()

    def summary(self) -> dict:
        shape = self.rehearsal.setup.mesh_shape
        return {"fits": self.fits, "mesh_shape": shape} | self.speed.to_json()


def make_plan(request: Request, tokens: float | None = None) -> Plan:
    rehearsal = request.rehearse()
    speed = predict.speed(rehearsal, request.config, request.cluster, request.rank)
    return Plan(request, rehearsal, speed, tokens)


# --------------------------------------------------------------------------------------------------
# A run that has been trained


@dataclass(frozen=True)
class Past:
    """The last start of a run, read from its folder."""

    config: config.Config  # with the strategy and the dtype that auto chose
    start: dict  # its row of starts.jsonl
    rows: list[dict]  # of training
    profiles: list[dict]  # of the ranks; none without --profile

    @property
    def is_cuda(self) -> bool:
        return self.rows[-1]["peak_device_memory"] > 0

    def seconds(self) -> list[float | None]:
        """The step, its compute, exposed communication and wait for data; None: unknown.

        The parts are those of the profile, the mean over the ranks. Without one only the log is
        known, where what ranks wait for one another is part of the step.
        """
        step = statistics.median(row["step_time"] for row in self.rows[1:] or self.rows)
        if not self.profiles:
            waits = sum(row["data_wait"] for row in self.rows)
            waits /= self.rows[-1]["step"] - self.start["step"]
            if self.start["ranks"] == 1:
                return [step, step - waits, 0.0, waits]
            return [step, None, None, waits]
        busy, exposed, waits = (
            statistics.fmean(one[share] * one["step_time"] for one in self.profiles)
            for share in ("busy", "exposed_communication", "data_wait")
        )
        # On a GPU `busy` has communication, on a CPU it is the thread's time.
        return [step, busy - exposed if self.is_cuda else busy, exposed, waits]


def read_past(folder: str, peak_tflops: float | None) -> Past:
    """Raises UsageError if this code has logged no step there."""
    rows = read(folder, folder).training
    starts = run_folder.read_starts(Path(folder))
    rows = [row for row in rows if starts and row["step"] > starts[-1]["step"]]
    if not rows:
        raise UsageError(f"{folder} has no training row of its last start yet: let it run on")
    start = starts[-1]
    if unknown := start["config"].keys() - {f.name for f in dataclasses.fields(config.Config)}:
        raise UsageError(
            f"{folder} was trained by other code, with --{min(unknown)}, which this one does not "
            "know: plan it with that code"
        )
    files = sorted(Path(folder).glob("profile/rank_*[0-9].json"))
    profiles = [json.loads(file.read_text()) for file in files]
    profiles = [one for one in profiles if one["steps"][0] > start["step"]]
    chosen = {"strategy": start["strategy"]} if "strategy" in start else {}
    chosen |= {"peak_tflops": peak_tflops} if peak_tflops else {}
    c = config.Config(**start["config"] | chosen | {"dtype": start["dtype"]})
    return Past(c, start, rows, profiles)


def request_of(past: Past, options: argparse.Namespace) -> Request:
    """The run on its cluster. The speed of CPUs is known only with --achieved."""
    options.world_size = past.start["ranks"]
    options.nproc_per_node = past.start.get("ranks_per_host", options.nproc_per_node)
    c = past.config
    if past.is_cuda:
        names = {device.name: name for name, device in DEVICES.items() if device.name}
        options.device_type = names.get(past.start.get("device"), options.device_type)
        cluster = make_cluster(options)
    else:
        options.device_type = "cpu"
        if options.achieved is None:
            c = dataclasses.replace(c, peak_tflops=1.0)  # no seconds are shown
        cluster = predict.as_measured(make_cluster(options))
    model = ModelConfig.from_dict(past.start["model"])
    return Request(c, cluster, past.start["tokens_in_vocabulary"], options.rank, model)


def beside(plan: Plan, past: Past) -> list[dict]:
    """Rows of `what`, `planned` and `measured` (None: unknown).

    Seconds of CPUs are planned from --achieved only.
    """
    speed = plan.speed
    c, setup = plan.request.config, plan.rehearsal.setup
    counted = {}  # in the step that rank 0 counted
    for row in past.profiles[0]["communicated"] if past.profiles else []:
        counted[row["axis"], row["kind"]] = (row["calls"], row["bytes"])
    rows = []
    for row in plan.communication():
        where = f"{row['axis']} {row['collective']} ({', '.join(row['phases'])})"
        nothing = (0, 0) if past.profiles else (None, None)
        calls, size = counted.pop((row["axis"], row["collective"]), nothing)
        rows += [(f"{where}, calls", row["count"], calls), (f"{where}, bytes", row["bytes"], size)]
    for (axis, collective), (_, size) in counted.items():
        rows.append((f"{axis} {collective}, bytes", 0, size))
    used = "peak_device_memory" if past.is_cuda else "peak_host_memory"
    used = max(row[used] for row in past.rows)
    rows.append(("memory needed at least, bytes", estimate_memory(c, setup).total, used))
    if past.is_cuda:  # on CPUs the whole process is measured, not only tensors
        rows.append(("memory of the tensors as rehearsed, bytes", plan.rehearsal.peak, used))
    exposed = sum(speed.exposed.values(), 0.0)
    predicted = [speed.step_time, speed.compute + speed.optimizer, exposed, 0.0]
    if not (past.is_cuda or plan.request.cluster.achieved):
        predicted = [None] * 4
    parts = ("step", "compute and optimizer", "exposed communication", "data wait")
    for part, seconds, measured in zip(parts, predicted, past.seconds()):
        rows.append((f"{part}, seconds", seconds, measured))
    return [dict(zip(("what", "planned", "measured"), row)) for row in rows]


# --------------------------------------------------------------------------------------------------
# JSON


def to_json(plan: Plan) -> dict:
    rehearsal = plan.rehearsal
    cluster = plan.request.cluster
    speed = plan.speed
    found = {
        "parameters": rehearsal.parameters,
        "parameters_per_rank": rehearsal.parameters_per_rank,
        # The first three at the update, the others at the peak of the step
        "memory": {
            **rehearsal.memory,
            **rehearsal.state,
            "peak": rehearsal.peak,
            "device": cluster.device_memory,
        },
        "fits": plan.fits,
        "communication": plan.communication(),
        "checkpoint": plan.checkpoint(),
        "flops": rehearsal.flops,
        "recomputed_flops": rehearsal.recomputed_flops,
        "step_time_parts": {
            "compute": speed.compute,
            "exposed_communication": speed.exposed,
            "optimizer": speed.optimizer,
        },
        **speed.to_json(),
    }
    if plan.tokens:
        found["hours"] = plan.hours
        found["device_hours"] = plan.hours * cluster.world_size
    return found


# --------------------------------------------------------------------------------------------------
# The report

VERDICT = {True: "fits", False: "DOES NOT FIT"}


def report(plan: Plan) -> Iterator[str]:
    """The lines for people: one screen, with the arithmetic."""
    yield from describe_run(plan)
    yield from describe_memory(plan)
    yield from describe_communication(plan)
    yield from describe_checkpoint(plan)
    yield from describe_step(plan)


def describe_run(plan: Plan) -> Iterator[str]:
    c = plan.request.config
    cluster = plan.request.cluster
    rehearsal = plan.rehearsal
    setup = rehearsal.setup
    m = setup.model
    yield (
        f"model       {c.model}: {m.n_layer} layers x {m.d_model} wide, vocabulary "
        f"{m.vocab_size:,}: {rehearsal.parameters:,} parameters, "
        f"{rehearsal.parameters_per_rank:,} a rank"
    )
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(dist.AXES, setup.mesh_shape))
    yield (
        f"mesh        {setup.strategy}: {axes} = {cluster.world_size} x {cluster.device_type}, "
        f"{cluster.links.local_size} on each of {cluster.hosts} hosts"
    )
    yield (
        f"batch       {c.global_batch_size:,} sequences = micro_batch_size "
        f"{setup.micro_batch_size} x grad_accum_steps {setup.grad_accum_steps} x dp_size "
        f"{setup.dp_size}; x {m.seq_len:,} tokens = {setup.tokens_per_step:,} tokens a step"
    )


def describe_memory(plan: Plan) -> Iterator[str]:
    found = plan.rehearsal
    available = plan.request.cluster.device_memory
    yield f"memory      rank {plan.request.rank}, in GB: {parts_of(found.state)} at the update"
    yield f"            at its peak: {parts_of(found.memory)}"
    yield (
        f"            = {gigabytes(found.peak)} GB of {gigabytes(available)} GB, "
        f"{found.peak / available:.0%}: {VERDICT[plan.fits]} (limit {predict.USABLE:.0%})"
    )


def parts_of(sizes: dict[str, int]) -> str:
    """As a sum, without negligible parts."""
    visible = {kind: size for kind, size in sizes.items() if size > 1e-4 * sum(sizes.values())}
    return " + ".join(f"{kind} {gigabytes(size)}" for kind, size in visible.items())


def describe_communication(plan: Plan) -> Iterator[str]:
    title = "sends       "
    rows = plan.communication()
    if not rows:
        yield f"{title}nothing"
    for row in rows:
        where = "between hosts" if row["inter_host"] else "within a host"
        yield (
            f"{title}{row['axis']:12} {row['count']:6,} x {row['collective']:14} "
            f"{gigabytes(row['bytes']):>9} GB  {where}  {row['seconds']:8.4f} s"
        )
        title = "            "


def describe_checkpoint(plan: Plan) -> Iterator[str]:
    saved = plan.checkpoint()
    sharded, in_async = saved["host_bytes_sharded"], saved["host_bytes_async"]
    yield (
        f"checkpoint  sharded: {gigabytes(saved['bytes_per_rank'])} GB a rank, on a host at most "
        f"{gigabytes(sharded)} GB; async_save: {gigabytes(in_async)} GB"
    )
    if available := plan.request.cluster.host_memory:
        yield (
            f"            of {gigabytes(available)} GB a host: "
            f"sharded {VERDICT[sharded <= available]}, async_save {VERDICT[in_async <= available]}"
        )


def describe_step(plan: Plan) -> Iterator[str]:
    speed = plan.speed
    flops, repeated = plan.rehearsal.flops, plan.rehearsal.recomputed_flops
    recomputed = f" + {repeated / 1e12:,.1f} recomputed" if repeated else ""
    yield (
        f"compute     {flops / 1e12:,.1f}{recomputed} TFLOP in {speed.compute:.4g} s: "
        f"{(flops + repeated) / speed.compute / speed.peak:.1%} of {speed.peak / 1e12:,.4g} TFLOP/s"
    )
    exposed = [
        f"{axis} {seconds:.4g} of {speed.communication[axis]:.4g} s"
        for axis, seconds in speed.exposed.items()
        if seconds > 0
    ]
    yield f"exposed     {', '.join(exposed) or 'nothing'}"
    yield (
        f"step        compute {speed.compute:.4g} + exposed communication "
        f"{sum(speed.exposed.values()):.4g} + optimizer {speed.optimizer:.4g} = "
        f"{speed.step_time:.4g} s"
    )
    yield (
        f"speed       {speed.tokens_per_second_per_device:,.0f} tokens/s/device, "
        f"MFU {speed.mfu:.1%}"
    )
    if plan.tokens:
        devices = plan.request.cluster.world_size
        yield (
            f"training    {plan.tokens:.4g} tokens: {plan.hours:,.1f} hours x {devices} = "
            f"{plan.hours * devices:,.0f} device-hours"
        )


def describe_scaling(rows: list[dict]) -> Iterator[str]:
    yield "scaling     hosts  devices  mesh           step, s  tokens/s/device     MFU"
    for row in rows:
        begin = f"            {row['hosts']:5}  {row['world_size']:7}"
        if "problem" in row:
            yield f"{begin}  {row['problem']:.60}"
            continue
        shape = " x ".join(map(str, row["mesh_shape"]))
        note = "" if row["fits"] else "  does not fit"
        yield (
            f"{begin}  {shape:13}  {row['step_time']:7.4g}  "
            f"{row['tokens_per_second_per_device']:15,.0f}  {row['mfu']:6.1%}{note}"
        )


def report_beside(plan: Plan, past: Past, rows: list[dict]) -> Iterator[str]:
    """The lines for people, from rows of `beside`."""
    _, mesh, *_ = describe_run(plan)
    yield mesh
    if not past.profiles:
        yield "            not profiled since its last start (--profile 10:13): nothing was counted"
    yield f"{'':60}  {'planned':>15}  {'measured':>15}"
    for row in rows:
        planned, measured = row["planned"], row["measured"]
        difference = ""
        if planned is not None and measured is not None:
            difference = "equal" if planned == measured else "differs"
            if planned != measured and measured:
                difference = f"{planned / measured - 1:+.1%}"
        line = f"{row['what']:60}  {figure(planned)}  {figure(measured)}  {difference}"
        yield line.rstrip()
    if rows[-1]["planned"] is None:
        yield "to predict seconds of CPUs, give --achieved and --peak_tflops"


def figure(number: float | None) -> str:
    if number is None:
        return f"{'not known':>15}"
    return f"{number:15,.4g}" if isinstance(number, float) else f"{number:15,}"


def gigabytes(size: int) -> str:
    """In GB, to three significant digits below 100."""
    number = size / 1e9
    digits = max(0, 2 - math.floor(math.log10(number))) if number > 0 else 0
    return f"{number:,.{min(digits, 4)}f}"


# --------------------------------------------------------------------------------------------------
# The command line


def run(argv: list[str]) -> None:
    request, options = parse(argv)
    if options.run:
        plan = make_plan(request)
        found = beside(plan, options.past)
        lines = report_beside(plan, options.past, found)
    elif options.search:
        found = search.to_json(*search.search(request, options.free, options.search_seconds))
        lines = search.table(found, request.cluster)
    else:
        plan = make_plan(request, options.tokens)
        found = to_json(plan)
        lines = [*report(plan)]
        if options.scaling:
            found["scaling"] = [*plan.scaling()]
            lines += describe_scaling(found["scaling"])
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(lines))


def main(argv: list[str]) -> int:
    return cli.execute("tools.plan", lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
