"""Plan a run on any cluster, from this machine: memory, communication, checkpoints, time.

python -m tools.plan --model llama3-70b --world_size 512 --strategy hsdp --dp_shard 64 --tp 8 \
    --micro_batch_size 1 --global_batch_size 1024 --device_type h200
python -m tools.plan --run runs/tiny --peak_tflops 0.1

Accepts the flags of train.py, rehearses one optimizer step of one rank with the training code, and
predicts the step time from the counts: see planning/rehearse.py and planning/predict.py.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dist
import errors
from data import TokenFolder
from errors import UsageError
from model import SIZES, ModelConfig
from tools import common
from tools.common import Run, flag_value, read_rows, read_starts
from tools.measuring.tables import add_flags, count, positive_number
from tools.planning import predict
from tools.planning.predict import DEVICES, Cluster, Request
from tools.planning.rehearse import Rehearsal, rehearse

# --------------------------------------------------------------------------------------------------
# Flags


def number(metavar: str, help: str, default: float | None = None) -> dict:
    return dict(metavar=metavar, help=help, type=positive_number, default=default)


# This command's flags beyond train.py's: name -> argparse options
FLAGS = {
    "world_size": count(None, "total number of devices; required"),
    "nproc_per_node": count(8, "devices per host"),
    "device_type": dict(
        choices=DEVICES, default="h100", help="sets memory, speed and links (default: h100)"
    ),
    "peak_tflops": number("X", "dense TFLOP/s of one device (default: its data sheet)"),
    "achieved": number(
        "X",
        "share of its peak that your device reaches in compute (default: estimated by operation)",
    ),
    "intra_host_bandwidth": number(
        "GB/s",
        "from a device to the other devices of its host, in one direction, like the busbw of "
        "nccl-tests (default: 80%% of the data sheet)",
    ),
    "inter_host_bandwidth": number(
        "GB/s",
        "from a host to other hosts, in one direction, over all its network cards, which its "
        "devices share (default: 80%% of the data sheet)",
    ),
    "tokens": number("N", "tokens to train on, for example 15e12: adds the hours"),
    "run": dict(metavar="DIR", help="plan an existing run, and print its measured step"),
    "json": dict(action="store_true", help="print the figures, unrounded, as one JSON object"),
}


def build_parser() -> errors.Parser:
    parser = common.build_parser()
    parser.prog = "tools.plan"
    parser.usage = "python -m tools.plan --world_size N [--FLAG VALUE ...], or --run DIR"
    parser.description = (
        "Rehearse a step of train.py on any cluster, without it: print what a rank holds,\n"
        "sends and computes, and how long that takes. All flags of train.py are accepted."
    )
    parser.epilog = "examples, and how the prediction is computed: docs/plan.md"
    add_flags(parser.add_argument_group("the cluster"), FLAGS)
    return parser


@dataclass(frozen=True)
class Measured:
    """Measurements of a run."""

    step_time: float  # the median, in seconds
    peak_memory: int  # bytes of tensors on a GPU, or bytes of the whole process on a CPU


def parse(argv: list[str]) -> tuple[Request, argparse.Namespace, Measured | None]:
    """Return the run to plan, the flags of this command, and with --run the measurements.

    Raises UsageError, MeshError and DataError.
    """
    given = common.parse_flags(argv, build_parser())
    options = argparse.Namespace(**{name: given[name] for name in FLAGS})
    flags = {name: value for name, value in given.items() if name not in FLAGS}
    typed = {word.split("=")[0].removeprefix("--") for word in argv}
    if options.run:
        if others := typed & flags.keys():
            raise UsageError(f"--run takes the flags of the run: leave out --{min(others)}")
        request, measured = read_run(options, flags)
        return request, options, measured
    cluster = make_cluster(options, options.world_size, options.nproc_per_node, options.device_type)
    saved_model = common.named_origin(flags).model_config
    request = Request(flags, cluster, find_source(flags, typed, saved_model), saved_model)
    predict.peak_flops(cluster, request.resolve())  # raises early if the speed is unknown
    return request, options, None


def find_source(flags: dict, typed: set[str], saved_model: ModelConfig | None) -> TokenFolder:
    """Open the token folder or, without one, return one with the vocabulary of the model."""
    path = flag_value(flags, "data")
    if "data" in typed or ("data" in flags and Path(path).exists()):  # --config's may not exist
        return common.open_source(path)
    model_config = saved_model or SIZES[flags.get("model") or "tiny"]
    return common.unread_source(path, model_config.vocab_size)


def make_cluster(
    options: argparse.Namespace, world_size: int | None, local_size: int, device_type: str
) -> Cluster:
    """Return the cluster. Raises UsageError if --world_size is missing or does not fill hosts."""
    if world_size is None:
        raise UsageError("--world_size is missing: give the number of devices in all")
    local_size = min(local_size, world_size)
    if world_size % local_size:
        raise UsageError(
            f"--world_size {world_size} is not a multiple of --nproc_per_node {local_size}"
        )
    device = predict.with_measured(DEVICES[device_type])
    bandwidths = {
        "intra_bandwidth": options.intra_host_bandwidth,
        "host_bandwidth": options.inter_host_bandwidth,
    }
    given = {name: 1e9 * value for name, value in bandwidths.items() if value}
    here = common.fake_world(world_size)
    return Cluster(
        world_size=world_size,
        device_type=device_type,
        device=device,
        device_memory=device.memory or host_memory() // local_size,
        links=dataclasses.replace(predict.default_links(device, local_size), **given),
        achieved=options.achieved,
        peak_tflops=options.peak_tflops,
        has_bfloat16=here.has_bfloat16 if device.kind == "cpu" else device.float32 is None,
    )


def read_run(options: argparse.Namespace, flags: dict) -> tuple[Request, Measured]:
    """Return the last start of --run as a request with additional `flags`, and its measurements.

    Raises UsageError if this start has logged no training row.
    """
    folder = options.run
    start = read_starts(Path(folder))[-1]
    rows = [row for row in read_rows(Path(folder) / "metrics.jsonl") if "loss" in row]
    rows = [row for row in rows if row["step"] > start["step"]]
    if not rows:
        raise UsageError(f"{folder} has no training row of its last start yet: let it run longer")
    flags = common.recorded_flags(Path(folder), start) | flags
    saved_model = common.recorded_model(Path(folder), start)
    on_device = max(row["peak_device_memory"] for row in rows)
    device_type = "cpu"
    if on_device:
        names = {device.name: name for name, device in DEVICES.items()}
        device_type = names.get(start["device"], options.device_type)
    cluster = make_cluster(options, start["ranks"], options.nproc_per_node, device_type)
    vocab_size, tokenizer = start["tokens_in_vocabulary"], start["tokenizer"]
    source = common.unread_source(flag_value(flags, "data"), vocab_size, tokenizer, start["data"])
    measured = Measured(
        step_time=statistics.median(row["step_time"] for row in rows[1:] or rows),
        peak_memory=on_device or max(row["peak_host_memory"] for row in rows),
    )
    return Request(flags, cluster, source, saved_model), measured


# --------------------------------------------------------------------------------------------------
# The plan of a run


@dataclass(frozen=True)
class Plan:
    """A rehearsal and the predictions from it."""

    request: Request
    rehearsal: Rehearsal
    speed: predict.Speed
    options: argparse.Namespace
    measured: Measured | None = None

    @property
    def run(self) -> Run:
        return self.rehearsal.run

    @property
    def fits(self) -> bool:
        return self.rehearsal.peak <= predict.USABLE * self.request.cluster.device_memory

    @property
    def hours(self) -> float:
        devices = self.request.cluster.world_size
        return self.options.tokens / (self.speed.tokens_per_second_per_device * devices) / 3600

    def checkpoint(self) -> dict[str, int]:
        """Bytes that a rank writes, and what the ranks of a host write: each replica has a share.

        An async save copies all of it to host memory first, another save one tensor at a time.
        """
        local_size = self.request.cluster.links.local_size
        held = self.rehearsal.state["parameters"] + self.rehearsal.state["optimizer"]
        written = held // self.run.dp_replicate
        return {
            "bytes_per_rank": written,
            "bytes_per_host": local_size * written,
        }

    def communication(self) -> list[dict]:
        """One row per axis and collective of a step."""
        links = self.request.cluster.links
        shape = self.run.mesh_shape
        rows = {}
        for entry in self.rehearsal.communication:
            group = predict.group_of(entry.axis, shape, links.local_size)
            row = {"axis": entry.axis, "collective": entry.collective, "count": 0, "bytes": 0}
            row |= {"wire_bytes": 0.0, "inter_host": group.hosts > 1, "seconds": 0.0}
            row = rows.setdefault((entry.axis, entry.collective), row)
            row["count"] += entry.count
            row["bytes"] += entry.bytes
            row["wire_bytes"] += predict.wire_bytes(entry, group, links)
            row["seconds"] += predict.collective_seconds(entry, group, links)
        return list(rows.values())


def make_plan(
    request: Request, options: argparse.Namespace, measured: Measured | None = None
) -> Plan:
    """Rehearse a step of rank 0 and predict its speed. No rank holds more than rank 0.

    The arguments are what `parse` returns. Raises UsageError and MeshError.
    """
    rehearsal = rehearse(request.resolve())
    speed = predict.speed(rehearsal, request.cluster)
    return Plan(request, rehearsal, speed, options, measured)


# --------------------------------------------------------------------------------------------------
# The report


def figures(plan: Plan) -> dict:
    """The figures of the report, unrounded: bytes, seconds, FLOPs, FLOP/s and tokens."""
    batch = ("model", "strategy", "micro_batch_size", "grad_accum_steps", "tokens_per_step")
    held = ("parameters", "parameters_per_rank", "state", "memory", "flops", "recomputed_flops")
    took = ("step_time", "tokens_per_second_per_device", "mfu")
    parts = ((plan.run, batch), (plan.rehearsal, held), (plan.speed, took))
    found = {name: getattr(part, name) for part, names in parts for name in names}
    return {
        **found,
        **dataclasses.asdict(plan.speed),
        "mesh": dict(zip(dist.AXES, plan.run.mesh_shape)),
        "peak_memory": plan.rehearsal.peak,
        "device_memory": plan.request.cluster.device_memory,
        "fits": plan.fits,
        "sends": plan.communication(),
        "checkpoint": plan.checkpoint(),
        "training_hours": plan.hours if plan.options.tokens else None,
        "measured": plan.measured and dataclasses.asdict(plan.measured),
    }


def report(plan: Plan) -> Iterator[str]:
    """Yield the lines of the printed report: one screen, which shows the arithmetic."""
    yield from describe_run(plan)
    yield from describe_memory(plan)
    yield from describe_communication(plan)
    yield from describe_checkpoint(plan)
    yield from describe_step(plan)
    if took := plan.measured:
        yield (
            f"measured    step {took.step_time:.4g} s, the median; peak memory "
            f"{gigabytes(took.peak_memory)} GB, on CPUs of the whole process"
        )


def describe_run(plan: Plan) -> Iterator[str]:
    run = plan.run
    cluster = plan.request.cluster
    rehearsal = plan.rehearsal
    yield (
        f"model       {run.model}: {run.n_layer} layers x {run.d_model} wide, vocabulary "
        f"{run.model_config.vocab_size:,}: {rehearsal.parameters:,} parameters, "
        f"{rehearsal.parameters_per_rank:,} a rank"
    )
    axes = " x ".join(f"{axis} {size}" for axis, size in zip(dist.AXES, run.mesh_shape))
    yield (
        f"mesh        {run.strategy}: {axes} = {cluster.world_size} x {cluster.device_type}, "
        f"{cluster.links.local_size} on each of {cluster.hosts} hosts"
    )
    yield (
        f"batch       {run.global_batch_size:,} sequences = micro_batch_size "
        f"{run.micro_batch_size} x grad_accum_steps {run.grad_accum_steps} x dp_size "
        f"{run.dp_size}; x {run.seq_len:,} tokens = {run.tokens_per_step:,} tokens a step"
    )


def describe_memory(plan: Plan) -> Iterator[str]:
    found = plan.rehearsal
    available = plan.request.cluster.device_memory
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield f"memory      rank 0, in GB: {parts_of(found.state)} at the update"
    yield f"            at its peak: {parts_of(found.memory)}"
    yield (
        f"            = {gigabytes(found.peak)} GB of {gigabytes(available)} GB, "
        f"{found.peak / available:.0%}: {verdict} (limit {predict.USABLE:.0%})"
    )


def parts_of(sizes: dict[str, int]) -> str:
    """Format sizes as a sum in GB, without negligible parts."""
    least = 1e-4 * sum(sizes.values())
    parts = [f"{kind} {gigabytes(size)}" for kind, size in sizes.items() if size > least]
    return " + ".join(parts)


def describe_communication(plan: Plan) -> Iterator[str]:
    title = "sends       "
    rows = plan.communication()
    if not rows:
        yield f"{title}nothing"
    for row in rows:
        where = "between hosts" if row["inter_host"] else "within a host"
        handed, sent = gigabytes(row["bytes"]), gigabytes(row["wire_bytes"])
        yield (
            f"{title}{row['axis']:12} {row['count']:6,} x {row['collective']:14} handed to torch "
            f"{handed:>6} GB, on the wire {sent:>6} GB  {where}  {row['seconds']:8.4f} s"
        )
        title = "            "


def describe_checkpoint(plan: Plan) -> Iterator[str]:
    saved = {name: gigabytes(size) for name, size in plan.checkpoint().items()}
    yield (
        f"checkpoint  {saved['bytes_per_rank']} GB a rank, {saved['bytes_per_host']} GB a host, "
        "which --async_save copies to host memory"
    )


def describe_step(plan: Plan) -> Iterator[str]:
    speed = plan.speed
    flops, repeated = plan.rehearsal.flops, plan.rehearsal.recomputed_flops
    recomputed = f" + {repeated / 1e12:,.1f} recomputed" if repeated else ""
    yield (
        f"compute     {flops / 1e12:,.1f}{recomputed} TFLOP in {speed.compute:.4g} s: "
        f"{(flops + repeated) / speed.compute / speed.peak:.1%} of {speed.peak / 1e12:,.4g} TFLOP/s"
    )
    if file := plan.request.cluster.device.measured:
        yield f"            with the speeds of products, attention and memory in {file}"
    exposed = [
        f"{axis} {time:.4g} of {speed.communication[axis]:.4g} s"
        for axis, time in speed.exposed.items()
        if time > 0
    ]
    yield f"exposed     {', '.join(exposed) or 'nothing'}"
    yield (
        f"step        compute {speed.compute:.4g} + exposed communication "
        f"{sum(speed.exposed.values()):.4g} + optimizer {speed.optimizer:.4g} = "
        f"{speed.step_time:.4g} s"
    )
    low, high = predict.TOOK
    yield (
        f"            half of the 21 blind runs took {low:.2f} to {high:.2f} times as long, "
        f"here {low * speed.step_time:.4g} to {high * speed.step_time:.4g} s"
    )
    low, high = predict.COMPILED
    yield (
        "            it is not compiled: compiled steps of 124M parameters took "
        f"{low:.2f} to {high:.2f} times as long"
    )
    per_device = speed.tokens_per_second_per_device
    yield f"speed       {per_device:,.0f} tokens/s/device, MFU {speed.mfu:.1%}"
    if tokens := plan.options.tokens:
        devices = plan.request.cluster.world_size
        yield (
            f"training    {tokens:.4g} tokens: {plan.hours:,.1f} hours x {devices} = "
            f"{plan.hours * devices:,.0f} device-hours"
        )


def host_memory() -> int:
    """Bytes of this host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def gigabytes(size: int) -> str:
    """Format a size in GB, with three significant digits below 100."""
    if size == 0:
        return "0"
    number = size / 1e9
    digits = 2 - math.floor(math.log10(number))
    return f"{number:,.{min(max(digits, 0), 4)}f}"


# --------------------------------------------------------------------------------------------------
# The command line


def run(argv: list[str]) -> None:
    plan = make_plan(*parse(argv))
    if plan.options.json:
        print(json.dumps(figures(plan), indent=1, allow_nan=False))
    else:
        print("\n".join(report(plan)))


def main(argv: list[str]) -> int:
    return errors.execute("tools.plan", run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
