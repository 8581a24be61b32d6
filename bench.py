"""Benchmarks: each prints one table in Markdown, or with --json its numbers.

python bench.py strategies --nproc 2
python bench.py nanogpt --path ~/nanoGPT
python bench.py optimizer
python bench.py checkpoint --nproc 4
python bench.py cluster --hosts 2 --nproc 2 --bandwidth 200mbit
"""

import argparse
import contextlib
import ctypes
import functools
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import checkpoint
import data
import dist
import optim
import prepare
from config import BUILTIN
from model import SIZES, Transformer, build_model


class CannotMeasure(RuntimeError):
    """What a benchmark needs is not here."""


def alternate(
    work: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each piece of work in turn, A B A B ...: what drifts, drifts for all. One round before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, do in work.items():
            began = time.perf_counter()
            do()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def cell(value) -> str:
    """Text as it is; measurements as median (smallest ... largest), in three digits or whole."""
    if not isinstance(value, list):
        return str(value)
    median, *ends = (
        f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
        for x in (statistics.median(value), min(value), max(value))
    )
    return f"{median} ({' ... '.join(ends)})" if len(value) > 1 else median


# ---------------------------------------------------------------------------------------------------------------
# Whole runs of train.py

FLAGS = "--eval_interval 0 --eval_sequences 1 --sample_tokens 0 --checkpoint none --log_interval 1"
WARM_UP = 3  # steps that are not counted
STRATEGIES = {
    "ddp": "--strategy ddp",
    "fsdp": "--strategy fsdp",
    "SHARD_GRAD_OP": "--strategy fsdp --reshard_after_forward false",
    "hsdp": "--strategy hsdp",
}


def run(nproc: int, flags: str, steps: int, jobs: int = 1) -> dict:
    """What train.py on `nproc` processes of one thread did in `steps` steps: the first of so many `jobs` at once.

    Medians of tokens/s/device and of MFU (None: unknown); bytes sent in a step, by axis of the mesh; peak memory of a rank.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]
    window = [
        "--max_steps",
        str(WARM_UP + steps + 2),
        "--profile",
        f"{WARM_UP + steps}:{WARM_UP + steps + 1}",
    ]
    command = [
        sys.executable,
        *torchrun,
        str(Path(__file__).with_name("train.py")),
        *FLAGS.split(),
        *window,
        *flags.split(),
    ]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, contextlib.ExitStack() as stack:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        here = os.environ | {"OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*command, "--out", f"{folder}/{i}"], env=here, **quiet)
            for i in range(jobs)
        ]
        for process in map(stack.enter_context, started):
            complaint = process.communicate()[1]
            if process.returncode:
                sys.exit(f"{complaint[-4000:]}\nbench.py: error: {' '.join(command[1:])} failed")
        logged = [
            json.loads(line) for line in Path(folder, "0/metrics.jsonl").read_text().splitlines()
        ]
        profile = json.loads(Path(folder, "0/profile/rank_0.json").read_text())
    counted = [row for row in logged if "loss" in row and WARM_UP < row["step"] <= WARM_UP + steps]
    sizes: dict[str, int] = {}
    for row in profile["communicated"]:
        sizes[row["axis"]] = sizes.get(row["axis"], 0) + row["bytes"]
    return {
        "tokens/s/device": statistics.median(
            row["tokens_per_second_per_device"] for row in counted
        ),
        "MFU": counted[0]["mfu"] and statistics.median(row["mfu"] for row in counted),
        "bytes": sizes,
        "memory": max(row["peak_device_memory"] or row["peak_host_memory"] for row in counted),
    }


def in_turn(runs: dict[tuple, tuple], args) -> dict[tuple, dict]:
    """Each of `runs`, name -> (processes, flags) or (processes, flags, jobs), --rounds times, A B A B."""
    found: dict[tuple, dict] = {}
    for turn in range(args.rounds):
        for name, (nproc, flags, *jobs) in runs.items():
            print(
                f"round {turn + 1} of {args.rounds}: {', '.join(map(str, name))} ...",
                file=sys.stderr,
                flush=True,
            )
            answer = run(
                nproc,
                f"--model {args.model} --device {args.device} {flags} {args.flags}",
                args.steps,
                *jobs,
            )
            row = found.setdefault(name, {**answer, "tokens/s/device": [], "MFU": []})
            for column in ("tokens/s/device", "MFU"):
                row[column].append(answer[column])
    return found


def on_gpu(args) -> bool:
    return args.device != "cpu" and torch.cuda.is_available()


def sent(row: dict) -> str:
    """MB that a rank's collectives handle in a step, by axis of the mesh."""
    return ", ".join(f"{axis} {size / 1e6:,.2f}" for axis, size in row["bytes"].items()) or "none"


def ratios(row: dict, to: dict) -> list[float]:
    return [a / b for a, b in zip(row["tokens/s/device"], to["tokens/s/device"])]


def strategies(args) -> tuple[list[dict], str]:
    """Speed, communication and memory of every strategy on N processes, with one process beside it. (hsdp: two replicas.)

    MFU divides by the peak of the data sheet, dense bfloat16 without sparsity, which no program reaches; empty where the
    device's is not known.
    """
    size = f"--micro_batch_size {args.micro_batch_size} --global_batch_size {args.micro_batch_size * args.nproc}"
    runs = {("single",): (1, f"--strategy single --global_batch_size {args.micro_batch_size}")}
    for name, flags in STRATEGIES.items():
        replicas = " --dp_replicate 2" if name == "hsdp" else ""
        if not replicas or args.nproc % 2 == 0:
            runs[name,] = args.nproc, f"{flags}{replicas} {size}"
    found = in_turn(runs, args)
    rows = [
        {
            "strategy": name,
            "processes": runs[name,][0],
            "tokens/s/device": row["tokens/s/device"],
            "ratio to single": ratios(row, found["single",]),
            "MFU": row["MFU"] if row["MFU"][0] else "",
            "MB communicated a step": sent(row),
            "peak memory of a rank, MB": f"{row['memory'] / 1e6:,.0f}",
        }
        for (name,), row in found.items()
    ]
    peak = dist.peak_flops(torch.device("cuda"), torch.bfloat16) if on_gpu(args) else None
    of = f", MFU of {peak / 1e12:,.0f} TFLOP/s" if peak else ""
    return rows, (
        f"{args.model}, micro-batch {args.micro_batch_size}, one thread a process, {args.steps} steps x "
        f"{args.rounds} rounds{of}"
    )


def accumulation(args) -> tuple[list[dict], str]:
    """What A micro-batches a step cost with gradients averaged once, and after each of them."""
    runs = {}
    for strategy, count, sync in itertools.product(
        ("ddp", "fsdp"), (1, 4, 8), ("batch", "micro_batch")
    ):
        size = f"--micro_batch_size {args.micro_batch_size} "
        size += f"--global_batch_size {args.micro_batch_size * args.nproc * count}"
        if count > 1 or sync == "batch":  # the same where there is one
            runs[strategy, count, sync] = (
                args.nproc,
                f"--strategy {strategy} --grad_sync {sync} {size}",
            )
    found = in_turn(runs, args)
    rows = [
        {
            "strategy": strategy,
            "micro-batches": count,
            "grad_sync": sync,
            "tokens/s/device": row["tokens/s/device"],
            "ratio to one micro-batch": ratios(row, found[strategy, 1, "batch"]),
            "MB communicated a step": sent(row),
        }
        for (strategy, count, sync), row in found.items()
    ]
    return rows, (
        f"{args.model} on {args.nproc} processes, micro-batch {args.micro_batch_size}, {args.steps} steps x "
        f"{args.rounds} rounds"
    )


def scaling(args) -> tuple[list[dict], str]:
    """Weak scaling: 1 to N processes of one thread, each with the same micro-batch, against one.

    On CPUs also as many runs of one process at once, which share nothing but the machine: what its memory and its caches
    leave of a core's speed, before any communication.
    """
    alone = f"--strategy single --global_batch_size {args.micro_batch_size}"
    runs: dict[tuple, tuple] = {("single", 1): (1, alone)}
    for n in range(2, args.nproc + 1):
        if not on_gpu(args):
            runs["independent", n] = 1, alone, n
        for strategy in ("ddp", "fsdp"):
            runs[strategy, n] = (
                n,
                f"--strategy {strategy} --global_batch_size {args.micro_batch_size * n}",
            )
    found = in_turn(runs, args)
    rows = [
        {
            "strategy": strategy,
            "processes": n,
            "tokens/s/device": row["tokens/s/device"],
            "ratio to one process": ratios(row, found["single", 1]),
        }
        for (strategy, n), row in found.items()
    ]
    return (
        rows,
        f"{args.model}, micro-batch {args.micro_batch_size} a process, {args.steps} steps x {args.rounds} rounds",
    )


def loader(args) -> tuple[list[dict], str]:
    """The data path alone, read, checked and made into tensors in one process, against what the model consumes."""
    if not Path(BUILTIN).exists():
        prepare.prepare(None, Path(BUILTIN))
    folder = data.open_folder(Path(BUILTIN))
    seq_len, size = SIZES[args.model].seq_len, args.micro_batch_size
    windows = data.TokenDataset(folder, "train", seq_len, 0)
    lists, speeds = itertools.cycle([list(range(i * size, (i + 1) * size)) for i in range(100)]), []
    for _ in range(args.rounds + 1):
        batches, began = data.loader(windows, itertools.islice(lists, 200)), time.perf_counter()
        tokens = sum(batch[:, 1:].numel() for batch in batches)
        speeds.append(tokens / (time.perf_counter() - began))
    model = in_turn({("model",): (1, f"--strategy single --global_batch_size {size}")}, args)[
        "model",
    ]["tokens/s/device"]
    used = [a / statistics.median(model) for a in speeds[1:]]
    return [
        {"what": "data path", "tokens/s": speeds[1:], "ratio to the model": used},
        {"what": f"{args.model} on one process", "tokens/s": model, "ratio to the model": [1.0]},
    ], f"batches of {size}"


# nanoGPT's command for a CPU, from its README
NANOGPT = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "block_size": 64,
    "batch_size": 12,
    "steps": 200,
}


def nanogpt(args) -> tuple[list[dict], str]:
    """nanoGPT's trainer and this one in turn: same data, layers, width, heads and tokens, and as many parameters in the blocks.

    Needs a checkout of github.com/karpathy/nanoGPT with a prepared data set. SwiGLU's d_ff is 8/3 of the width, in whole
    eights: as many parameters as GPT-2's MLP has. With --target also the seconds from start to a validation loss, imports
    and compilation included (inf: the run ends above it): ours in a third of the steps, at its own learning rate.
    """
    path = args.path.resolve()
    folder = path / "data" / args.dataset
    if not (path / "train.py").exists() or not (folder / "train.bin").exists():
        raise CannotMeasure(
            f"--path {args.path}: no nanoGPT there with data/{args.dataset}/train.bin: clone it and run "
            "its prepare.py"
        )
    shape, device = (
        f"--n_layer={args.n_layer} --n_head={args.n_head}",
        "cuda" if on_gpu(args) else "cpu",
    )
    interval, sequences = (args.steps // 8, 20) if args.target else (10**9, 1)
    theirs = [
        sys.executable,
        "train.py",
        "config/train_shakespeare_char.py",
        *shape.split(),
        f"--n_embd={args.n_embd}",
        f"--block_size={args.block_size}",
        f"--batch_size={args.batch_size}",
        f"--max_iters={args.steps}",
        f"--lr_decay_iters={args.steps + 1}",  # not its warm-up's 100, by whose difference it divides
        f"--eval_interval={interval}",
        f"--eval_iters={sequences}",
        "--log_interval=1",
        f"--dataset={args.dataset}",
        "--dropout=0.0",
        f"--device={device}",
        f"--compile={device == 'cuda'}",
    ]
    steps = args.steps // 3 if args.target else args.steps
    ours = [
        sys.executable,
        str(Path(__file__).with_name("train.py")),
        *shape.split(),
        f"--n_kv_head={args.n_head}",
        f"--d_model={args.n_embd}",
        f"--d_ff={8 * round(args.n_embd / 3)}",
        f"--seq_len={args.block_size}",
        f"--global_batch_size={args.batch_size}",
        f"--max_steps={steps}",
        f"--data={folder}",
        f"--device={device}",
        f"--eval_interval={steps // 8 if args.target else 0}",
        *FLAGS.split()[2:],
        f"--eval_sequences={12 * sequences}",
        *args.flags.split(),
    ]
    names, tokens = (
        {"nanoGPT": (theirs, path), "nanoshard": (ours, None)},
        args.batch_size * args.block_size,
    )
    columns = ("tokens/s", "ratio", "seconds", f"seconds to {args.target}")[
        : 4 if args.target else 2
    ]
    rows = {name: {"trainer": name, **{column: [] for column in columns}} for name in names}
    for turn in range(args.rounds):
        for name, (command, where) in names.items():
            print(f"round {turn + 1} of {args.rounds}: {name} ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix="bench-") as out:
                speeds, *seconds = follow(
                    [*command, f"--out{'_dir' if where else ''}={out}"], where, args.target, tokens
                )
            speed = statistics.median(speeds[len(speeds) // 5 :])
            unit = rows["nanoGPT"]["tokens/s"][turn] if name != "nanoGPT" else speed
            for column, value in zip(columns, (speed, speed / unit, *seconds)):
                rows[name][column].append(value)
    return list(rows.values()), (
        f"{args.n_layer} layers x {args.n_embd}, {args.n_head} heads, block {args.block_size}, batch "
        f"{args.batch_size}, {args.steps} steps x {args.rounds} rounds, {args.dataset} {args.flags}"
    )


def follow(
    command: list[str], where: Path | None, target: float | None, tokens: int
) -> tuple[list[float], float, float]:
    """(tokens per second of each step, of `tokens`; seconds in all; seconds to a validation loss of `target`)"""
    began, speeds, reached = time.perf_counter(), [], math.inf
    with subprocess.Popen(
        command,
        cwd=where,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        for line in process.stdout:
            if step := re.search(r"time ([\d.]+)ms|ms  ([\d,]+) tok/s", line):
                speeds.append(
                    tokens / float(step[1]) * 1e3 if step[1] else float(step[2].replace(",", ""))
                )
            if (
                (found := re.search(r"val(?:_| )loss ([\d.]+)", line))
                and target
                and float(found[1]) <= target
            ):
                reached = min(reached, time.perf_counter() - began)
        if process.wait():
            sys.exit(
                f"{process.stderr.read()[-4000:]}\nbench.py: error: {' '.join(command)} failed"
            )
    return speeds, time.perf_counter() - began, reached


# ---------------------------------------------------------------------------------------------------------------
# Parts


def optimizer(args) -> tuple[list[dict], str]:
    """The optimizer's step, clip by norm, against bare clip_grad_norm_ and AdamW(fused=True).step() on the same model."""
    world = dist.start(args.device)

    def model() -> Transformer:
        net = build_model(SIZES[args.model], world.device)
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        return net

    ours, bare = model(), model()
    wrapper = optim.Optimizer(ours.named_parameters(), ours.decays, lambda step: 1e-4)
    wrapper.adamw.zero_grad = lambda: None  # both keep their gradients, to step again
    adamw, loss = (
        torch.optim.AdamW(bare.parameters(), lr=1e-4, fused=True),
        torch.zeros((), device=world.device),
    )

    def bare_step() -> None:
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
        adamw.step()

    seconds = alternate(
        {"bare": bare_step, "nanoshard": lambda: wrapper.step(1, loss)}, args.rounds, world.device
    )
    ratios = [a / b for a, b in zip(seconds["nanoshard"], seconds["bare"])]
    rows = [
        {"step": name, "milliseconds": [1e3 * s for s in times], "ratio": [1.0]}
        for name, times in seconds.items()
    ]
    rows[1]["ratio"] = ratios
    return (
        rows,
        f"{args.model}, {ours.parameter_count():,} parameters, {args.rounds} rounds, {dist.device_name(world.device)}",
    )


def plain_write(path: Path, size: int) -> None:
    """`size` bytes from one process to disk, as fast as it goes."""
    block = os.urandom(1 << 20) * 16
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def checkpoints(args) -> tuple[list[dict], str]:
    """Saving a model and its AdamW state under fsdp: each form against a plain write of as many bytes, in turn."""
    world = dist.start("cpu")
    mesh = dist.make_mesh(world, (1, world.size, 1))
    with torch.device("meta"):
        net = Transformer(SIZES[args.model])
    init = lambda name, tensor: net.init_tensor(name, tensor, 0)  # noqa: E731
    dist.parallelize(
        net, {}, [[block] for block in net.blocks], mesh, "fsdp", torch.float32, world.device, init
    )
    slots = ("model", "exp_avg", "exp_avg_sq")
    state = {
        slot: {name: p.detach().clone() for name, p in net.named_parameters()} for slot in slots
    }
    shard = sum(
        4 * optim.local(tensor).numel() for slot in state.values() for tensor in slot.values()
    )
    folder = Path(dist.on_first_rank(lambda: tempfile.mkdtemp(prefix="bench-", dir=".")))
    forms = {
        "sharded": ("sharded", False),
        "sharded, async": ("sharded", True),
        "full": ("full", False),
    }
    savers = {
        name: checkpoint.Saver(folder / name, *form, 0, 0, world.timeout)
        for name, form in forms.items()
    }
    extra: dict[
        str, float
    ] = {}  # the most of all rounds, the first too: it makes the copy that async saves keep
    columns = ("seconds", "blocking seconds", "MB/s", "of plain write")
    rows: dict[str, dict] = {name: {column: [] for column in columns} for name in forms}
    size = 12 * net.parameter_count()
    for turn in range(args.rounds + 1):
        for name, saver in savers.items():
            began = time.perf_counter()
            dist.on_first_rank(lambda: plain_write(folder / "plain", size))
            plain = time.perf_counter() - began
            before = reset_peak()
            saver.save(state, {"step": turn})
            saver.wait()
            (row,) = saver.done()
            dist.on_first_rank(functools.partial(shutil.rmtree, row["path"]))
            peak = torch.tensor([checkpoint.host_memory()["peak"] - before], dtype=torch.float64)
            extra[name] = max(extra.get(name, 0.0), dist.gather(peak).max().item() / shard)
            speed = row["bytes"] / row["seconds"]
            values = (row["seconds"], row["blocking_seconds"], speed / 1e6, speed / (size / plain))
            for column, value in zip(columns, values):
                rows[name][column] += [value] if turn else []  # the first round is not counted
    dist.on_first_rank(lambda: shutil.rmtree(folder))
    subject = f"{args.model}, {size / 1e6:,.0f} MB on {world.size} ranks, shards of {shard / 1e6:,.0f} MB, {args.rounds} rounds"
    return [
        {"form": name, **rows[name], "peak extra host memory / shard": f"{extra[name]:.3f}"}
        for name in forms
    ], subject


def reset_peak() -> int:
    """Give free memory back and forget the highest of this process so far; returns what is resident now, in bytes (Linux)."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return checkpoint.host_memory()["resident"]


# ---------------------------------------------------------------------------------------------------------------
# A cluster in a box

ACCUMULATION = 8
# 2.4 million parameters: enough for the network to matter, while a run takes seconds
RUN = (
    "--model tiny --d_model 192 --d_ff 768 --seq_len 64 --micro_batch_size 1 --device cpu --log_interval 1 "
    "--eval_interval 0 --eval_sequences 1 --sample_tokens 0 --checkpoint none"
)
ADDRESS = "10.0.0.{}"  # of host 1, 2 ...: no other network sees them


def cluster(args) -> tuple[list[dict], str]:
    """Training on hosts that a slow network joins, all on this machine: each strategy, with its gradients averaged once a
    step and after every micro-batch. Needs Linux, root and iproute2.

    gloo's reduce-scatter sends as much as an all-reduce, twice what nccl's does: micro_batch is that much slower under fsdp.
    """
    rows: list[dict] = []
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
        hosts(args.hosts, args.bandwidth) as names,
    ):
        sources = sorted(str(path) for path in Path(__file__).parent.glob("*.py"))
        prepare.prepare(sources, Path(folder, "tokens"), say=lambda line: None)
        for strategy in args.strategies:
            for sync in ("batch", "micro_batch"):
                out = Path(folder, f"{strategy}-{sync}")
                print(f"{strategy}, {sync} ...", file=sys.stderr, flush=True)
                flags = f"{RUN} {STRATEGIES[strategy]} --grad_sync {sync} --data {folder}/tokens --out {out} "
                flags += f"--global_batch_size {ACCUMULATION * args.hosts * args.nproc} --max_steps {args.steps + 1}"
                run_on(names, args.nproc, 29500 + len(rows), flags.split(), out)
                logged = [
                    json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
                ]
                # the first step sets buckets and buffers up
                speeds = [
                    row["tokens_per_second_per_device"]
                    for row in logged
                    if row.get("step_time") and row["step"] > 1
                ]
                rows.append({"strategy": strategy, "grad_sync": sync, "tokens/s/device": speeds})
    unit = statistics.median(rows[0]["tokens/s/device"])
    for row in rows:
        row[f"ratio to {rows[0]['strategy']}, batch"] = [
            speed / unit for speed in row["tokens/s/device"]
        ]
    return rows, (
        f"{args.hosts} hosts x {args.nproc} processes, {args.bandwidth} each way between hosts, 2.4 million "
        f"parameters, accumulation {ACCUMULATION}, {args.steps} steps"
    )


def ip(*words: str, tool: str = "ip") -> str:
    """Run iproute2's `ip` or `tc`; returns what it prints. Raises CannotMeasure with what it complains of."""
    answer = subprocess.run([tool, *words], capture_output=True, text=True)
    if answer.returncode:
        said = " ".join(answer.stderr.split())
        rights = ": a container needs --privileged for that" if "not permitted" in said else ""
        raise CannotMeasure(f"{tool} {' '.join(words)}: {said}{rights}")
    return answer.stdout


@contextlib.contextmanager
def hosts(count: int, bandwidth: str) -> Iterator[list[str]]:
    """Network namespaces that play hosts on one switch; their names. They go when the block ends, with all that runs in them.

    The limit is on both ends of a host's link, which makes it one of each direction, as a cable has.
    """
    if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        raise CannotMeasure(
            f"there is no {' and no '.join(missing)} here: install iproute2 (apt-get install iproute2)"
        )
    if os.geteuid():
        raise CannotMeasure(
            "only root may make network namespaces: run it with sudo, or in a container with --privileged"
        )
    switch, *names = [f"bench-{os.getpid()}-{part}" for part in ("switch", *range(count))]
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # an exception, so that what follows cleans up
    try:
        for name in (switch, *names):
            ip("netns", "add", name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for i, name in enumerate(names):
            port = f"port{i}"
            ip(
                "link",
                "add",
                "eth0",
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                switch,
            )
            ip("-n", switch, "link", "set", port, "master", "bridge")
            ip("-n", name, "address", "add", f"{ADDRESS.format(i + 1)}/24", "dev", "eth0")
            for namespace, device in ((name, "lo"), (name, "eth0"), (switch, port)):
                ip("-n", namespace, "link", "set", device, "up")
                if device != "lo":  # 256 kB at once: four of the largest packets, 10 ms of 200mbit
                    limit = ("rate", bandwidth, "burst", "256kb", "latency", "50ms")
                    ip(
                        "-n",
                        namespace,
                        "qdisc",
                        "add",
                        "dev",
                        device,
                        "root",
                        "tbf",
                        *limit,
                        tool="tc",
                    )
        yield names
    finally:
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # an impatient second Ctrl-C leaves nothing behind either
            signal.signal(number, signal.SIG_IGN)
        for name in {switch, *names} & {
            line.split()[0] for line in ip("netns", "list").splitlines()
        }:
            kill_all(name)
            ip("netns", "delete", name)  # and with it the links


def kill_all(namespace: str) -> None:
    """Kill what runs in a namespace. No process group has them all: torchrun gives each worker a session of its own."""
    while pids := ip("netns", "pids", namespace).split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def run_on(names: list[str], nproc: int, port: int, flags: list[str], out: Path) -> None:
    """train.py with `flags`, under one torchrun on each host; its output goes to files beside `out`."""
    here = {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(out.parent),  # where torchrun leaves folders of its own
        "GLOO_SOCKET_IFNAME": "eth0",
    }  # by itself gloo takes the address of the machine's name
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(names)}",
        f"--nproc_per_node={nproc}",
        f"--master_addr={ADDRESS.format(1)}",
        f"--master_port={port}",
    ]
    agents = []
    logs = [out.with_name(f"{out.name}-host{i}.txt") for i in range(len(names))]
    for i, name in enumerate(names):
        options = [
            f"--node_rank={i}",
            f"--local_addr={ADDRESS.format(i + 1)}",
            str(Path(__file__).with_name("train.py")),
        ]
        with open(logs[i], "w") as log:
            agents.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *torchrun, *options, *flags],
                    env=os.environ | here,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    while None in (statuses := [agent.poll() for agent in agents]) and not any(statuses):
        time.sleep(0.1)
    if any(statuses):  # the other hosts may wait for this one
        failed = next(i for i, status in enumerate(statuses) if status)
        sys.exit(
            f"{logs[failed].read_text()[-4000:]}\nbench.py: error: host {failed} failed: train.py {' '.join(flags)}"
        )


RUNS = {
    "strategies": strategies,
    "accumulation": accumulation,
    "scaling": scaling,
    "loader": loader,
}
PARTS = {"optimizer": optimizer, "checkpoint": checkpoints}
TABLES = {**RUNS, **PARTS, "cluster": cluster, "nanogpt": nanogpt}


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure nanoshard on this machine.")
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, table in TABLES.items():
        sub = tables.add_parser(name, help=table.__doc__, description=table.__doc__)
        if name != "cluster":
            sub.add_argument(
                "--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)"
            )
            rounds = 15 if name in PARTS else 3
            sub.add_argument(
                "--rounds",
                type=positive,
                default=rounds,
                metavar="N",
                help=f"counted rounds (default: {rounds})",
            )
        if name in RUNS:
            sub.add_argument("--model", default="tiny", choices=SIZES, help="(default: tiny)")
            sub.add_argument(
                "--nproc", type=positive, default=2, metavar="N", help="processes (default: 2)"
            )
            sub.add_argument(
                "--micro_batch_size", type=positive, default=16, metavar="N", help="(default: 16)"
            )
            sub.add_argument(
                "--steps",
                type=positive,
                default=10,
                metavar="N",
                help="counted steps of each run (default: 10)",
            )
            sub.add_argument(
                "--flags", default="", help="more flags for train.py, in one pair of quotes"
            )
        elif name == "nanogpt":
            sub.add_argument(
                "--path", type=Path, required=True, metavar="DIR", help="a checkout of nanoGPT"
            )
            sub.add_argument(
                "--dataset",
                default="shakespeare_char",
                help="a folder of its data/ (default: shakespeare_char)",
            )
            for option, default in NANOGPT.items():
                sub.add_argument(
                    f"--{option}",
                    type=positive,
                    default=default,
                    metavar="N",
                    help=f"(default: {default})",
                )
            sub.add_argument(
                "--target",
                type=float,
                metavar="LOSS",
                help="also measure the time to this validation loss",
            )
            sub.add_argument(
                "--flags", default="", help="more flags for our train.py, in one pair of quotes"
            )
        elif table is cluster:
            sub.add_argument("--hosts", type=positive, default=2, metavar="N", help="(default: 2)")
            sub.add_argument(
                "--nproc",
                type=positive,
                default=2,
                metavar="N",
                help="processes on each host (default: 2)",
            )
            sub.add_argument(
                "--bandwidth",
                default="200mbit",
                metavar="RATE",
                help="of each host's link, in each direction, as tc writes it (default: 200mbit)",
            )
            sub.add_argument(
                "--steps",
                type=positive,
                default=3,
                metavar="N",
                help="counted steps of each run (default: 3)",
            )
            sub.add_argument(
                "--strategies",
                nargs="+",
                default=list(STRATEGIES),
                choices=STRATEGIES,
                metavar="NAME",
                help=f"those to measure, of {', '.join(STRATEGIES)} (default: all)",
            )
        else:
            sub.add_argument(
                "--model", default="gpt2-124m", choices=SIZES, help="(default: gpt2-124m)"
            )
            sub.add_argument(
                "--nproc", type=positive, default=1, metavar="N", help="processes (default: 1)"
            )
        sub.add_argument("--json", action="store_true", help="print numbers instead of the table")
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.table in PARTS and args.nproc > 1 and "RANK" not in os.environ:
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(args.nproc),
            sys.argv[0],
            args.table,
        ]
        # spelled out anew: torchrun would take --nproc for one of its own
        options = [
            f"--{name}={value}"
            for name, value in vars(args).items()
            if name not in ("table", "nproc", "json")
        ]
        os.execv(sys.executable, [sys.executable, *torchrun, *options, *["--json"] * args.json])
    try:
        rows, subject = TABLES[args.table](args)
    except CannotMeasure as error:
        print(f"bench.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if torch.distributed.is_initialized():
        dist.stop()
    if int(os.environ.get("RANK", 0)):
        return 0
    if args.json:
        print(
            json.dumps(
                {"table": args.table, "subject": subject, "torch": torch.__version__, "rows": rows}
            )
        )
        return 0
    print(f"{args.table}: {subject}, torch {torch.__version__}; median (smallest ... largest)\n")
    print(f"| {' | '.join(rows[0])} |\n|{' --- |' * len(rows[0])}")
    for row in rows:
        print(f"| {' | '.join(map(cell, row.values()))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
