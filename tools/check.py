"""Does everything work on these ranks, and how fast? The first hour on a machine, or on a cluster.

python -m tools.check --model gpt2-124m --strategy fsdp --json check.json
torchrun --nnodes 4 --nproc_per_node 8 ... -m tools.check --model llama3-8b --strategy hsdp

Takes train.py's flags, those of the planned run. On its own it starts torchrun on this host.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import math
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from unittest import mock

if __name__ == "__main__":
    # As train.py allocates
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import collect_env

import checkpoint
import config
import data
import dist
import layout
import metrics
import model
import train
from config import Config
from runtime import agreement, cli, memory, preflight, slurm, watchdog
from tools import bench
from tools.planning import rehearse

STEPS = 20
LONG = 5_000  # steps of a job that is ended long before
SECONDS = 60  # for one rank, which computes the micro-batches of all ranks
# Relative differences between a mesh and one rank: loss, gradient norm
TOLERANCE = {"float32": (1e-5, 1e-5), "bfloat16": (1e-2, 5e-2)}
# Flags of every run; they override the planned run's
SHORT = (
    f"--max_steps {STEPS} --warmup_steps 10 --schedule constant --log_interval 1 --save_interval 0 "
    "--keep_last 1 --eval_interval 0 --eval_sequences 1 --sample_tokens 0 --profile 0:1 "
    "--optim_metrics_interval 0 --tracker none --resume auto --allow_changes false --time_limit 0 "
    "--dry_run false --eval_only false "
)
SMALL = (
    f"{SHORT} --n_layer 2 --n_head 4 --n_kv_head 2 --d_model 32 --d_ff 64 --seq_len 16 --lr 3e-3 "
    "--micro_batch_size 2 "
)
STRATEGIES = {
    "ddp": "--strategy ddp",
    "fsdp": "--strategy fsdp",
    "compiled": "--strategy fsdp --compile",
    "hsdp": "--strategy hsdp --dp_replicate 2",
    "tp": "--strategy fsdp --tp 2",
    "hsdp-tp": "--strategy hsdp --dp_replicate 2 --tp 2",
}
FOLDER = "NANOSHARD_CHECK_FOLDER"  # variable by which `check_host` tells the ranks


@dataclass
class Check:
    """What one check found: a paragraph on the console, an object in the JSON file."""

    name: str
    status: str = "pass"  # or FAIL, or skip
    seconds: float = 0.0
    figures: dict = field(default_factory=dict)
    limits: dict[str, list[float]] = field(default_factory=dict)  # figure -> [least, most]
    problems: list[str] = field(default_factory=list)  # why it failed
    not_checked: str = ""  # what was left out, and why

    def hold(self, figure: str, value: float, most: float, least: float = 0.0) -> None:
        """Record a figure that must lie between `least` and `most`; nan never does."""
        self.figures[figure] = value
        self.limits[figure] = [least, most]
        if not least <= value <= most:
            self.problems.append(f"{figure} {value:.3g} is not between {least:g} and {most:g}")

    def run(self, function: Callable, lab: "Lab") -> float:
        """Run a check; an exception only fails it. Returns the time it raised, or inf."""
        began = time.perf_counter()
        raised_at = math.inf
        try:
            with contextlib.redirect_stdout(None), warnings.catch_warnings(action="ignore"):
                function(lab, self)
        except (bench.CannotMeasure, dist.MeshError) as reason:
            self.status, self.not_checked = "skip", str(reason)
        except Exception as error:
            raised_at = time.time()
            traceback.print_exc()
            self.problems.append(traceback.format_exception_only(error)[-1].strip())
        if self.problems:
            self.status = "FAIL"
        self.seconds = time.perf_counter() - began
        return raised_at

    def __str__(self) -> str:
        said = list(self.problems)
        for figure, value in self.figures.items():
            text = value if isinstance(value, str) else bench.three_digits(value)
            said.append(f"{figure} {text}")
        said += [f"not checked: {self.not_checked}"] if self.not_checked else []
        line = f"{self.status}  {self.name:23} {self.seconds:5.1f} s  {', '.join(said)}"
        return textwrap.fill(line, 100, subsequent_indent=" " * 40, break_on_hyphens=False)


# --------------------------------------------------------------------------------------------------
# The ranks


class Lab:
    """Shared by the checks on ranks: the planned run, its folder, and where ranks meet."""

    def __init__(self, own: argparse.Namespace, c: Config, world: dist.World, dog):
        self.planned, self.world, self.watchdog = c, world, dog
        self.device, self.is_cuda = world.device, world.device.type == "cuda"
        self.store, self.store_keeper = world.store.clone(), torch.distributed.group.WORLD
        rank, local_size = world.rank, world.local_size
        host = f"{socket.gethostname()}, host {rank // local_size}"
        self.names = bench.exchange(f"rank {rank} ({host})")
        self.folder = Path(os.environ.get(FOLDER) or dist.on_rank0(own.new_folder))
        self.is_shared = all(bench.exchange(self.folder.exists()))
        self.environment = functools.cache(collect_env.get_env_info)  # takes seconds
        if c.data == config.BUILTIN:
            dist.on_rank0(preflight.prepare_builtin)
        self.vocab_size = data.open_folders(c.data)[0].vocab_size
        self.base = dist.on_rank0(lambda: preflight.find_origin(c)).model  # of the planned run
        self.device_memory = dist.on_rank0(lambda: memory.device_memory(self.device, local_size))

    def meet(self, place: str) -> None:
        """Form a new group of all ranks, under its own prefix of torchrun's store."""
        gc.collect()  # a group still referenced keeps its connections
        rehearse.leave_group()
        dist.join_group(self.world, torch.distributed.PrefixStore(place, self.store))

    @contextlib.contextmanager
    def apart(self, check: Check) -> Iterator[dist.World]:
        """Each rank is its own world until all meet again."""
        rehearse.leave_group()
        one = dict(rank=0, size=1, local_rank=0, local_size=1, store=torch.distributed.HashStore())
        alone = dataclasses.replace(self.world, **one)
        dist.join_group(alone, alone.store)
        yield alone
        self.meet(f"in {check.name}")

    def run_of(self, name: str) -> tuple[Config, layout.Setup]:
        """The run "planned", or "STRATEGY DTYPE". Raises MeshError, UsageError."""
        if name == "planned":
            place = (self.world, self.vocab_size, self.device_memory)
            return short_run(self.planned, *place, base=self.base)
        strategy, dtype = name.split()
        flags = f"{SMALL} {STRATEGIES[strategy]} --dtype {dtype} --data {self.planned.data}"
        c = config.parse(flags.split())
        return short_run(c, self.world, self.vocab_size, self.device_memory, accumulate=2)

    def rehearse(self, c: Config) -> list[rehearse.Communication]:
        """What this rank would send in a step."""
        rehearse.leave_group()
        world = self.world
        base = self.base if c.source else None
        model = config.model_config(c, self.vocab_size, base)
        place = (world.rank, world.size, world.local_size, model, world.device.type)
        return rehearse.rehearse(c, *place, self.device_memory).communication

    def train(self, c: Config, world: dist.World, name: str) -> list[dict]:
        """Train as train.py does; return the log's rows on rank 0 of `world`."""
        out = self.folder / name
        # No handlers: a signal ends this process, not only the run.
        with loss_parallel(), mock.patch("signal.signal"):
            train.run(dataclasses.replace(c, out=str(out)), world, self.watchdog)
        return bench.training_rows(out) if world.rank == 0 else []

    def train_alone(self, c: Config, world: dist.World, name: str) -> tuple[list[dict], str]:
        """The rows of the run on one rank, and why there may be too few."""
        one = dict(strategy="single", tp=1, dp_replicate=None, dp_shard=None, grad_sync="batch")
        one |= dict(compile=False, checkpoint="none", async_save=False, time_limit=SECONDS)
        c = dataclasses.replace(c, **one)
        base = self.base if c.source else None
        model = config.model_config(c, self.vocab_size, base)
        need = layout.estimate_memory(c, layout.choose(c, world, model, self.device_memory))
        if not need.fits(self.device_memory):
            room = f"more than 80% of {self.device_memory / 1e9:,.1f} GB"
            return [], f"one rank cannot hold the run: {need}, {room}"
        rows = self.train(c, world, f"{name} on rank {self.world.rank}")
        return rows, f"one rank does not train two steps in {SECONDS} s"

    def settle(self, check: Check, raised_at: float) -> None:
        """Collect on rank 0, through the store, what all ranks found; form a new group."""
        problems = [f"{self.names[self.world.rank]}: {line}" for line in check.problems]
        self.store.set(f"{check.name} {self.world.rank}", json.dumps([raised_at, problems]))
        self.meet(f"after {check.name}")
        ranks = range(self.world.size if self.world.rank == 0 else 0)
        found = [json.loads(self.store.get(f"{check.name} {rank}")) for rank in ranks]
        # The first exception may have caused the others.
        failed = sorted(one for one in found if one[1])
        if failed and failed[0] is not found[0]:
            check.status, check.problems = "FAIL", failed[0][1]


def short_run(
    c: Config,
    world: dist.World,
    vocab_size: int,
    device_memory: int,
    accumulate: int = 1,
    base=None,
) -> tuple[Config, layout.Setup]:
    """The run cut to two blocks and few micro-batches per rank, on the whole run's mesh."""
    dp_size = max(1, world.size // c.tp)
    size = layout.micro_batch_size(c, dp_size)
    batch = {"micro_batch_size": size, "global_batch_size": accumulate * size * dp_size}
    c = dataclasses.replace(c, **batch, profile=None)
    chosen = layout.choose(c, world, config.model_config(c, vocab_size, base), device_memory)
    dtype = str(chosen.dtype).removeprefix("torch.")
    n_layer = min(2, chosen.model.n_layer)
    c = dataclasses.replace(c, strategy=chosen.strategy, dtype=dtype, n_layer=n_layer)
    return c, layout.choose(c, world, config.model_config(c, vocab_size, base), device_memory)


# --------------------------------------------------------------------------------------------------
# The checks on the ranks


def devices(lab: Lab, check: Check) -> None:
    """all ranks have the same device and versions; float32 products are not computed in TF32"""
    own = {"device": metrics.device_name(lab.device), "torch": torch.__version__}
    if lab.is_cuda:
        own |= {"cuda": torch.version.cuda, "nccl": str(torch.cuda.nccl.version())}
    size = lab.world.size
    check.figures = {"ranks": size, "hosts": size // lab.world.local_size, **own}
    for rank, other in enumerate(bench.exchange(own)):
        if other != own and rank > lab.world.rank:
            check.problems.append(f"{lab.names[rank]} has {other}, not {own}")
    tf32 = torch.get_float32_matmul_precision() != "highest"
    check.hold("tf32", int(tf32 or os.environ.get("NVIDIA_TF32_OVERRIDE") == "1"), 0)


def matmul(lab: Lab, check: Check) -> None:
    """matrix products in TFLOP/s: a square one, those of the MLP; a slow rank is named"""
    _, chosen = lab.run_of("planned")
    m = chosen.model
    tokens = chosen.micro_batch_size * m.seq_len
    side = 8192 if lab.is_cuda else 512
    shapes = [(side, side, side), (tokens, m.d_model, m.d_ff), (tokens, m.d_ff, m.d_model)]
    peak = metrics.peak_flops(lab.device, chosen.dtype, lab.planned.peak_tflops)
    for rows, inner, columns in shapes:
        a = torch.randn(rows, inner, device=lab.device, dtype=chosen.dtype)
        b = torch.randn(inner, columns, device=lab.device, dtype=chosen.dtype)

        def measure(a=a, b=b) -> dict[int, list[float]]:
            return dict(enumerate(bench.exchange(bench.times(lambda: a @ b))))

        rates = [2 * rows * inner * columns / min(times) for times in measure().values()]
        label = f"{rows} x {inner} x {columns}"
        check.figures[f"{label} TFLOP/s"] = min(rates) / 1e12
        if peak:
            check.hold(f"{label} of peak", max(rates) / peak, 1)
        for rank, ratio in bench.slow_ones(measure).items():
            check.problems.append(f"slow: {lab.names[rank]}, {ratio:.2f} x the time for {label}")


def attention(lab: Lab, check: Check) -> None:
    """the attention kernel in bfloat16, of 1,024 tokens, against math in float32; gradients too"""
    H = 16 if lab.is_cuda else 2
    for d_head in (64, 128):
        generator = torch.Generator().manual_seed(d_head)
        tensors = []
        for heads in (H, H // 2, H // 2, H):  # of q, k, v, and the gradient of the output
            tensor = torch.randn(1, heads, 1024, d_head, generator=generator)
            tensors.append(tensor.to(lab.device, torch.bfloat16).requires_grad_())
        found = attend(model.causal_attention, tensors, mask=None)
        with sdpa_kernel(SDPBackend.MATH):
            tensors = [tensor.detach().float().requires_grad_() for tensor in tensors]
            options = dict(is_causal=True, enable_gqa=True)
            exact = attend(F.scaled_dot_product_attention, tensors, **options)
        for name, value, expected in zip(("y", "dq", "dk", "dv"), found, exact):
            error = (value.float() - expected).norm() / expected.norm()
            check.hold(f"d_head {d_head} {name}", error.item(), 1e-2)


def attend(function: Callable, tensors: list[Tensor], **options) -> tuple[Tensor, ...]:
    """The output, and the gradients of q, k and v."""
    *inputs, gradient = tensors
    y = function(*inputs, **options)
    return y.detach(), *torch.autograd.grad(y, inputs, gradient)


def links(lab: Lab, check: Check) -> None:
    """collectives of each axis, of the sizes that the run sends; a slow host or link is named"""
    if lab.world.size == 1:
        raise bench.CannotMeasure("it takes two ranks")
    c, chosen = lab.run_of("planned")
    with lab.apart(check):
        sent = lab.rehearse(c)
    mesh = dist.make_mesh(lab.world, chosen.mesh_shape)
    largest = 1 << 20  # more than a switch may pass at once
    for axis in dist.AXES:
        sizes = {row.bytes // row.count for row in sent if row.axis == axis}
        for size in sorted(sizes | {4}) if mesh[axis].size() > 1 else []:
            figures = bench.collectives(size, mesh.get_group(axis), lab.device)
            check.figures |= {f"{axis} {name}": value for name, value in figures.items()}
            largest = max(largest, min(size, 1 << 26))
    check.problems += bench.slow_links(lab.names, lab.world.local_size, largest, lab.device)


def parity(lab: Lab, check: Check) -> None:
    """a run on the mesh is that of one rank; sends what is rehearsed; no host syncs; resumes"""
    name = check.name.removeprefix("parity ")
    c, chosen = lab.run_of(name)
    with lab.apart(check) as world:
        alone, reason = lab.train_alone(c, world, name)
        sent = lab.rehearse(c)
    steps = min(bench.exchange(len(alone)))
    if steps < 2:
        check.not_checked = f"one rank's losses: {reason}"
        steps, alone = 4, []
    c = dataclasses.replace(c, max_steps=steps, checkpoint="none", async_save=False)
    profiled = dataclasses.replace(c, profile=f"{steps - 2}:{steps - 1}")
    rows = bench.exchange(lab.train(profiled, lab.world, name))[0]
    record_speed(check, rows, chosen)
    compare_profile(check, lab.folder / name / f"profile/rank_{lab.world.rank}.json", sent)
    if alone:
        compare(check, "one rank's", alone, rows, TOLERANCE[c.dtype])
    if not lab.is_shared:
        check.not_checked += " save and resume: --out is no folder that all hosts share"
        return
    for last in (steps // 2, steps):
        part = dataclasses.replace(c, max_steps=last, checkpoint="sharded")
        resumed = bench.exchange(lab.train(part, lab.world, f"{name} resumed"))[0]
    # Bit for bit on CPUs. On GPUs attention's backward is not deterministic, and the step that the
    # profile counts is not compiled.
    limits = TOLERANCE[c.dtype] if lab.is_cuda or c.compile else (0.0, 0.0)
    compare(check, "resumed", rows, resumed, limits)


def record_speed(check: Check, rows: list[dict], chosen: layout.Setup) -> None:
    speeds = [row["tokens_per_second_per_device"] for row in rows]
    check.figures["tokens/s/device"] = statistics.median(speeds)
    if rows[-1]["mfu"] is not None:
        check.hold("MFU", statistics.median(row["mfu"] for row in rows), 1)


def compare(check: Check, label: str, expected: list, found: list, limits: tuple) -> None:
    """Hold the largest relative differences between the rows of two runs."""
    for name, limit in zip(("loss", "grad_norm"), limits):
        values = [
            torch.tensor([row[name] for row in rows], dtype=torch.float64)
            for rows in (expected, found)
        ]
        one, other = (tensor[: len(found)] for tensor in values)
        check.hold(f"{label} {name}", ((other - one) / one).abs().max().item(), limit)


def compare_profile(check: Check, file: Path, sent: list[rehearse.Communication]) -> None:
    """Hold the figures of --profile, and compare what a step sends with the rehearsal."""
    profile = json.loads(file.read_text())
    for share in ("busy", "exposed_communication"):
        check.hold(share, profile[share], 1)
    check.hold("host syncs", sum(profile["host_syncs"].values()), 0)
    check.problems += [f"the host waits at {place}" for place in profile["host_syncs"]]
    extra = Counter()
    for row in profile["communicated"]:
        extra[row["kind"], row["axis"]] += row["bytes"]
    check.figures["MB sent"] = extra.total() / 1e6
    for row in sent:
        extra[row.collective, row.axis] -= row.bytes
    for (kind, axis), size in extra.items():
        if size:
            check.problems.append(f"beside the rehearsal {size:+,} bytes of {kind} over {axis}")


def cpu(lab: Lab, check: Check) -> None:
    """a GPU computes what a CPU computes, from the same weights"""
    if not lab.is_cuda:
        raise bench.CannotMeasure("it takes a GPU")
    c = dataclasses.replace(lab.run_of("fsdp float32")[0], strategy="single")
    # Initial weights depend on the device type: both start from one step on the CPU.
    with lab.apart(check) as world:
        on_cpu = dataclasses.replace(world, device=torch.device("cpu"))
        start = f"start {lab.world.rank}"
        lab.train(dataclasses.replace(c, max_steps=1), on_cpu, start)
        c = dataclasses.replace(c, init_from=str(lab.folder / start), checkpoint="none")
        rows = [lab.train(c, one, f"{one.device.type} {start}") for one in (on_cpu, world)]
        compare(check, "the CPU's", *rows, TOLERANCE["float32"])


# --------------------------------------------------------------------------------------------------
# Checks that need a launcher, on this host


def stop(lab: Lab, check: Check) -> None:
    """SIGTERM saves the last step; after kill -9 of a rank, the losses of a run without either"""
    if FOLDER not in os.environ:
        raise bench.CannotMeasure("it takes the launcher: run python -m tools.check on a host")
    if lab.world.rank:
        return
    flags = f"{SMALL} --strategy fsdp --dtype float32 --num_workers 2 --device {lab.device.type}"
    flags = [*flags.split(), "--save_interval=5", f"--data={lab.planned.data}"]
    train_until = functools.partial(bench.torchrun, lab.world.size, flags)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # ends the job too
    out = lab.folder / "stopped"

    def last_step() -> int:  # saved
        return checkpoint.read_manifest(checkpoint.list_checkpoints(out)[-1])["step"]

    with train_until(LONG, out) as running:
        running.wait(until=(out / "metrics.jsonl").exists)
    stopped = check.figures["stopped after step"] = last_step()
    check.hold("steps lost", bench.training_rows(out)[-1]["step"] - stopped, 0)
    with train_until(LONG, out) as running:
        running.wait(until=lambda: last_step() > stopped)
        pid = running.processes[0].pid
        *_, rank = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(rank), signal.SIGKILL)
        running.processes[0].wait()
    killed = check.figures["killed after step"] = last_step()
    rows = []
    for folder in (lab.folder / "whole", out):
        with train_until(killed + STEPS, folder) as running:
            running.wait()
        rows.append(bench.training_rows(folder))
    compare(check, "resumed", *rows, TOLERANCE["float32"] if lab.is_cuda else (0.0, 0.0))


CHECKS = {
    "devices": devices,
    "matmul": matmul,
    "attention": attention,
    "links": links,
    "cpu": cpu,
    "stop": stop,
    "parity": parity,
}


# --------------------------------------------------------------------------------------------------
# The command line


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """This command's own flags, and the planned run. Raises UsageError."""
    parser = config.build_parser()
    parser.prog = "tools.check"
    parser.usage = "[torchrun ... -m | python -m] tools.check [CHECK ...] [--FLAG VALUE ...]"
    parser.description = "Check the ranks, with the flags of the run that is planned: train.py's."
    lines = [f"  {name:10} {check.__doc__}" for name, check in CHECKS.items()]
    parser.epilog = "\n".join(["checks, in this order:", *lines])
    group = parser.add_argument_group("the checks")
    group.add_argument("checks", nargs="*", metavar="CHECK", help="(default: all)")
    group.add_argument(
        "--ranks", type=bench.positive, metavar="N", help="(default: all GPUs; 2 on CPUs)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    flags = config.parse_flags(parser, [*argv, *SHORT.split()])
    own = {name: flags.pop(name) for name in ("checks", "ranks", "json")}
    parent = flags["out"] and Path(flags["out"]).absolute()

    def new_folder() -> str:
        if parent:  # of a planned run, so it may not exist yet
            parent.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="check-", dir=parent)

    own = argparse.Namespace(**own, argv=argv, new_folder=new_folder)
    if unknown := [name for name in own.checks if name not in CHECKS]:
        raise cli.UsageError(f"no check is named {unknown[0]}: choose from {', '.join(CHECKS)}")
    return own, config.to_config(flags)


def check_ranks(argv: list[str]) -> int:
    """On every rank. Rank 0 prints and writes the results, and returns 1 if a check failed."""
    own, c = parse(argv)
    world = dist.start(c.device, timedelta(seconds=watchdog.SLOW_FACTOR * c.timeout))
    dog = watchdog.Watchdog(world.store, world.rank, world.size, c.timeout)
    with dog:
        lab = Lab(own, c, world, dog)
        lab.run_of("planned")  # raises if flags and ranks do not match
        checks = run_checks(lab, own)
        failed = [check.name for check in checks if check.status == "FAIL"]
        if world.rank == 0:
            print(f"FAIL: {', '.join(failed)}; see {lab.folder}" if failed else "pass", flush=True)
        if not any(bench.exchange(failed)) and world.local_rank == 0:
            shutil.rmtree(lab.folder, ignore_errors=True)
    dist.stop()
    return int(bool(failed) and FOLDER not in os.environ)  # else torchrun prints a long report


def run_checks(lab: Lab, own: argparse.Namespace) -> list[Check]:
    """The results, all on rank 0. While a check runs, the file says a rank ended in it."""
    names = [*list(CHECKS)[:-1], "parity planned"]
    names += [f"parity {strategy} {dtype}" for strategy in STRATEGIES for dtype in TOLERANCE]
    checks = []
    for name in names:
        check = Check(name)
        if own.checks and name.split()[0] not in own.checks:
            check.status, check.not_checked = "skip", "not asked for"
        else:
            write_json(lab, own, [*checks, Check(name, "FAIL", problems=["a rank ended in it"])])
            lab.watchdog.progress(len(checks), f"in the check {name}", slow=True)
            raised_at = check.run(CHECKS[name.split()[0]], lab)
            lab.settle(check, raised_at)
        checks.append(check)
        if lab.world.rank == 0:
            print(check, flush=True)
    write_json(lab, own, checks)
    return checks


def write_json(lab: Lab, own: argparse.Namespace, checks: list[Check]) -> None:
    """Write the results, and the machines and code they came from."""
    if lab.world.rank > 0 or not own.json:
        return
    git = f"git -C {Path(bench.TRAIN).parent} describe --always --dirty --abbrev=40 --exclude=*"
    found = {
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "commit": collect_env.run(git.split())[1],
        "code": agreement.source_hash(),
        "command": shlex.join(["python", "-m", "tools.check", *own.argv]),
        "ranks": lab.names,
        "host": lab.environment()._asdict(),
        "checks": [asdict(check) for check in checks],
    }
    metrics.replace_file(own.json, json.dumps(found, indent=2) + "\n")


def check_host(argv: list[str]) -> int:
    """Start torchrun on this host, which runs this command on the ranks."""
    own, c = parse(argv)
    if own.json and not own.json.absolute().parent.is_dir():
        raise cli.UsageError(f"--json {own.json}: there is no folder {own.json.parent}")
    # Raises MeshError if there is no such device, or too few GPUs.
    device = dist.set_device(c.device, 0, own.ranks or 1).type
    size = own.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    world = rehearse.make_world(0, size, size, device)
    short_run(c, world, 64 * c.tp, memory.device_memory(world.device, size))  # raises early
    folder = Path(own.new_folder())
    launcher = [*bench.TORCHRUN, "--standalone", f"--nproc_per_node={size}", "-m", "tools.check"]
    variables = {FOLDER: str(folder), "KINETO_LOG_LEVEL": "6"}  # the profiler's own log
    # Not subprocess.run: on Ctrl-C it kills torchrun before that can end its ranks.
    with subprocess.Popen([*launcher, *argv], env=os.environ | variables) as process:
        # The ranks remove the folder if all checks pass.
        return int(process.wait() != 0 or folder.exists())


def main(argv: list[str]) -> int:
    slurm.read_slurm()
    if "RANK" in os.environ:
        return cli.execute("tools.check", lambda: check_ranks(argv))
    return cli.execute("tools.check", lambda: check_host(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
