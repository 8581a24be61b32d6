"""Benchmarks. Each prints one table in Markdown, or with --json its numbers.

python -m tools.bench strategies --nproc 2
python -m tools.bench nanogpt --path ~/nanoGPT
python -m tools.bench optimizer
python -m tools.bench checkpoint --nproc 4
python -m tools.bench memory
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import checkpoint
import data
import dist
import metrics
import optim
import prepare
from config import BUILTIN
from model import SIZES, Transformer, build_model
from runtime import cli
from tools.compare import markdown_table, positive_number, read_rows

TRAIN = str(Path(__file__).parent.parent / "train.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# Flags of a run that only trains and logs every step
ONLY_STEPS = [
    "--log_interval=1",
    "--eval_interval=0",
    "--eval_sequences=1",
    "--sample_tokens=0",
    "--checkpoint=none",
]
STRATEGIES = {
    "ddp": "--strategy ddp",
    "fsdp": "--strategy fsdp",
    "SHARD_GRAD_OP": "--strategy fsdp --reshard_after_forward false",
    "hsdp": "--strategy hsdp",
}
WARM_UP = 3  # steps of every run that are not counted


class CannotMeasure(RuntimeError):
    """This machine lacks something that the benchmark needs."""

    exit_status = 2


class RunFailed(RuntimeError):
    """A measured run exited with an error; `output` is the end of what it printed."""

    exit_status = 1

    def __init__(self, message: str, output: str):
        super().__init__(message)
        self.output = output[-4000:]


@dataclass
class Table:
    """What a benchmark found."""

    subject: str  # what was measured: the line above the table
    rows: list[dict]  # column -> text, number, or list of measurements


# --------------------------------------------------------------------------------------------------
# Measuring whole runs of train.py


@dataclass
class Measurement:
    """What one run of train.py logged in its counted steps."""

    speed: float  # tokens/s/device, median
    mfu: float | None  # median; None: the peak of the device is unknown
    bytes_by_axis: dict[str, int]  # what a rank communicates in one step, by axis of the mesh
    peak_memory: int  # bytes, of the rank with the most; device memory where there is a GPU


@dataclass
class Case:
    """A configuration of train.py to measure: one row of a table."""

    columns: dict  # the first columns of the row, which name the case
    flags: str
    nproc: int = 1  # processes of one thread each
    jobs: int = 1  # runs at the same time; the first one is measured
    rounds: list[Measurement] = field(default_factory=list)

    def speeds(self) -> list[float]:
        return [measurement.speed for measurement in self.rounds]

    def ratios(self, baseline: "Case") -> list[float]:
        """Speed relative to `baseline`, round by round."""
        return ratios(self.speeds(), baseline.speeds())

    def mfu(self) -> list[float] | str:
        values = [measurement.mfu for measurement in self.rounds]
        return "" if None in values else values

    def communicated(self) -> str:
        """MB that a rank communicates in a step, such as "dp_shard 4.20, tp 1.05"."""
        parts = []
        for axis, size in self.rounds[0].bytes_by_axis.items():
            parts.append(f"{axis} {size / 1e6:,.2f}")
        return ", ".join(parts) or "none"

    def peak_memory(self) -> str:
        return f"{self.rounds[0].peak_memory / 1e6:,.0f}"


def ratios(values: list[float], baseline: list[float]) -> list[float]:
    """Each round's value divided by the baseline of the same round."""
    return [value / unit for value, unit in zip(values, baseline)]


def measure(cases: list[Case], args: Namespace) -> None:
    """Run the cases in turn, A B A B ..., so that a drift of the machine affects all alike."""
    for turn in range(args.rounds):
        for case in cases:
            show_round(turn, args.rounds, ", ".join(map(str, case.columns.values())))
            case.rounds.append(run(case, args))


def show_round(turn: int, rounds: int, name: str) -> None:
    print(f"round {turn + 1} of {rounds}: {name} ...", file=sys.stderr, flush=True)


def run(case: Case, args: Namespace) -> Measurement:
    """Run a case once and read its log. Raises RunFailed."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        run_in(folder, case, args)
        return read_measurement(Path(folder, "0"), args.steps)


def run_in(folder: str, case: Case, args: Namespace) -> str:
    """Run a case once, with --out `folder`/0; return what it printed. Raises RunFailed."""
    last = WARM_UP + args.steps
    command = [
        *TORCHRUN,
        "--standalone",
        f"--nproc_per_node={case.nproc}",
        TRAIN,
        *ONLY_STEPS,
        # Two more steps, since both slow a run down: one is traced, the other's bytes are counted
        f"--max_steps={last + 2}",
        f"--profile={last}:{last + 1}",
        f"--model={args.model}",
        f"--device={args.device}",
        *case.flags.split(),
        *args.flags.split(),
    ]
    return run_at_once(command, case.jobs, folder)[0]


def run_at_once(command: list[str], jobs: int, folder: str) -> list[str]:
    """Run `jobs` copies of a command at the same time, with --out `folder`/0, `folder`/1, ...

    Returns what each printed. Raises RunFailed.
    """
    outputs = []
    with contextlib.ExitStack() as stack:  # waits for all of them, even after Ctrl-C
        processes = []
        for job in range(jobs):
            process = subprocess.Popen(
                [*command, f"--out={folder}/{job}"],
                env=os.environ | ONE_THREAD,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            processes.append(stack.enter_context(process))
        for process in processes:
            output, errors = process.communicate()
            if process.returncode:
                raise RunFailed(f"{' '.join(command)} failed", errors)
            outputs.append(output)
    return outputs


def read_measurement(out: Path, steps: int) -> Measurement:
    """Read what a run folder says about the `steps` steps after the warm-up."""
    counted = []
    for row in read_rows(out):
        if "loss" in row and WARM_UP < row["step"] <= WARM_UP + steps:
            counted.append(row)
    mfu = None
    if counted[0]["mfu"] is not None:
        mfu = statistics.median(row["mfu"] for row in counted)
    profile = json.loads((out / "profile" / "rank_0.json").read_text())
    bytes_by_axis = Counter()
    for row in profile["communicated"]:
        bytes_by_axis[row["axis"]] += row["bytes"]
    return Measurement(
        speed=statistics.median(row["tokens_per_second_per_device"] for row in counted),
        mfu=mfu,
        bytes_by_axis=dict(bytes_by_axis),
        peak_memory=max(row["peak_device_memory"] or row["peak_host_memory"] for row in counted),
    )


def on_gpu(args: Namespace) -> bool:
    return args.device != "cpu" and torch.cuda.is_available()


def single(columns: dict, args: Namespace, jobs: int = 1) -> Case:
    """The case of one process, which the others are compared with."""
    return Case(columns, f"--strategy single --global_batch_size {args.micro_batch_size}", 1, jobs)


# --------------------------------------------------------------------------------------------------
# Tables of whole runs


def strategies(args: Namespace) -> Table:
    """Speed, communication and memory of every strategy on N processes, against one process.

    hsdp has two replicas. MFU is relative to the data sheet's peak for dense bfloat16, which no
    program reaches; it is empty if the peak of the device is unknown.
    """
    size = args.micro_batch_size
    batch = f"--micro_batch_size {size} --global_batch_size {size * args.nproc}"
    cases = [single({"strategy": "single", "processes": 1}, args)]
    for name, flags in STRATEGIES.items():
        if name == "hsdp":
            if args.nproc % 2:
                continue
            flags += " --dp_replicate 2"
        columns = {"strategy": name, "processes": args.nproc}
        cases.append(Case(columns, f"{flags} {batch}", args.nproc))
    measure(cases, args)

    rows = []
    for case in cases:
        measured = {
            "tokens/s/device": case.speeds(),
            "ratio to single": case.ratios(cases[0]),
            "MFU": case.mfu(),
            "MB communicated a step": case.communicated(),
            "peak memory of a rank, MB": case.peak_memory(),
        }
        rows.append(case.columns | measured)
    subject = f"{args.model}, micro-batch {size}, one thread a process, {steps_and_rounds(args)}"
    if on_gpu(args) and (peak := metrics.peak_flops(torch.device("cuda"), torch.bfloat16)):
        subject += f", MFU of {peak / 1e12:,.0f} TFLOP/s"
    return Table(subject, rows)


def steps_and_rounds(args: Namespace) -> str:
    return f"{args.steps} steps x {args.rounds} rounds"


def accumulation(args: Namespace) -> Table:
    """Gradient accumulation: gradients averaged once a step, or after every micro-batch."""
    size = args.micro_batch_size
    cases = []
    for strategy in ("ddp", "fsdp"):
        for count in (1, 4, 8):
            batch = f"--micro_batch_size {size} --global_batch_size {size * args.nproc * count}"
            for sync in ("batch", "micro_batch"):
                if count == 1 and sync == "micro_batch":
                    continue  # the same as "batch"
                columns = {"strategy": strategy, "micro-batches": count, "grad_sync": sync}
                flags = f"--strategy {strategy} --grad_sync {sync} {batch}"
                cases.append(Case(columns, flags, args.nproc))
    measure(cases, args)

    rows = []
    for case in cases:
        if case.columns["micro-batches"] == 1:
            one_micro_batch = case  # comes before the other cases of its strategy
        measured = {
            "tokens/s/device": case.speeds(),
            "ratio to one micro-batch": case.ratios(one_micro_batch),
            "MB communicated a step": case.communicated(),
        }
        rows.append(case.columns | measured)
    return Table(
        f"{args.model} on {args.nproc} processes, micro-batch {size}, {steps_and_rounds(args)}",
        rows,
    )


def scaling(args: Namespace) -> Table:
    """Weak scaling: 1 to N processes with the same micro-batch each, against one process.

    On CPUs, also N independent runs of one process at the same time. They share only the machine,
    so they show how much of a core's speed its memory and caches leave before any communication.
    """
    size = args.micro_batch_size
    cases = [single({"strategy": "single", "processes": 1}, args)]
    for nproc in range(2, args.nproc + 1):
        if not on_gpu(args):
            columns = {"strategy": "independent", "processes": nproc}
            cases.append(single(columns, args, jobs=nproc))
        for strategy in ("ddp", "fsdp"):
            columns = {"strategy": strategy, "processes": nproc}
            flags = f"--strategy {strategy} --global_batch_size {size * nproc}"
            cases.append(Case(columns, flags, nproc))
    measure(cases, args)

    rows = []
    for case in cases:
        measured = {
            "tokens/s/device": case.speeds(),
            "ratio to one process": case.ratios(cases[0]),
        }
        rows.append(case.columns | measured)
    return Table(f"{args.model}, micro-batch {size} a process, {steps_and_rounds(args)}", rows)


# Five shapes, on two processes each but for the first: name -> flags
MEMORY_SHAPES = {
    "tiny, single, bfloat16": "--strategy single --global_batch_size 32",
    "gpt2-124m, ddp, bfloat16, 2 micro-batches": "--model gpt2-124m --seq_len 512 --strategy ddp "
    "--micro_batch_size 1 --global_batch_size 4",
    "gpt2-124m, fsdp, float32, 2 micro-batches, block_group:2": "--model gpt2-124m --seq_len 512 "
    "--strategy fsdp --wrap block_group:2 --dtype float32 --micro_batch_size 1 "
    "--global_batch_size 4",
    "olmo-1b of 4 layers, SHARD_GRAD_OP, bfloat16, full recomputation": "--model olmo-1b "
    "--n_layer 4 --seq_len 256 --strategy fsdp --reshard_after_forward false "
    "--activation_checkpointing full --global_batch_size 4",
    "tinyllama-1.1b of {layers} layers, fsdp, bfloat16": "--model tinyllama-1.1b "
    "--n_layer {layers} --seq_len 128 --strategy fsdp --global_batch_size 2",
}


def memory(args: Namespace) -> Table:
    """Memory said and used on CPUs: the estimate of a rank's peak, and what was resident.

    Five shapes; --layers sets the size of the last, and --flags adds flags to all of them.
    """
    rows = []
    for name, flags in MEMORY_SHAPES.items():
        name, flags = name.format(layers=args.layers), flags.format(layers=args.layers)
        show_round(0, 1, name)
        command = [
            *TORCHRUN,
            "--standalone",
            f"--nproc_per_node={1 if 'single' in flags else 2}",
            TRAIN,
            *ONLY_STEPS,
            f"--max_steps={args.steps}",
            "--device=cpu",
            *flags.split(),
            *args.flags.split(),
        ]
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            (output,) = run_at_once(command, 1, folder)
            used = max(row.get("peak_host_memory", 0) for row in read_rows(Path(folder, "0")))
        said = said_memory(output)
        rows.append(
            {
                "shape": name,
                "said, MB": f"{said / 1e6:,.0f}",
                "resident peak, MB": f"{used / 1e6:,.0f}",
                "resident / said": f"{used / said:.2f}",
            }
        )
    return Table(f"{args.steps} steps, the rank with the most", rows)


def said_memory(output: str) -> float:
    """The bytes at the end of the line "memory  a rank at its peak: ... = 2.67 GB"."""
    number, unit = re.search(r"^memory .* = ([\d.,]+) ([MG])B$", output, re.M).groups()
    return float(number.replace(",", "")) * {"M": 1e6, "G": 1e9}[unit]


def loader(args: Namespace) -> Table:
    """The data path alone, in one process, against what the model consumes.

    The data path reads and checks the tokens and turns them into tensors.
    """
    size = args.micro_batch_size
    folder = Path(BUILTIN)
    if not folder.exists():
        prepare.prepare(None, folder)
    seq_len = SIZES[args.model].seq_len
    dataset = data.TokenDataset(data.open_folder(folder), "train", seq_len, seed=0)
    read_speed(dataset, size)  # warm-up
    speeds = [read_speed(dataset, size) for _ in range(args.rounds)]

    model = single({"what": f"{args.model} on one process"}, args)
    measure([model], args)
    model_speed = statistics.median(model.speeds())
    rows = [
        {
            "what": "data path",
            "tokens/s": speeds,
            "ratio to the model": [speed / model_speed for speed in speeds],
        },
        model.columns | {"tokens/s": model.speeds(), "ratio to the model": [1.0]},
    ]
    return Table(f"batches of {size}", rows)


def read_speed(dataset: data.TokenDataset, size: int) -> float:
    """Tokens/s at which 200 batches of `size` sequences are read: the same 100 batches twice."""
    sequences = [list(range(i * size, (i + 1) * size)) for i in range(100)]
    began = time.perf_counter()
    tokens = 0
    for batch in data.loader(dataset, sequences * 2):  # (size, seq_len + 1)
        tokens += batch[:, 1:].numel()
    return tokens / (time.perf_counter() - began)


# --------------------------------------------------------------------------------------------------
# nanoGPT


@dataclass
class Followed:
    """What a trainer printed while it ran."""

    speeds: list[float]  # tokens/s of every step
    seconds: float  # from start to end
    seconds_to_target: float  # from start to the target validation loss; inf: not reached

    def speed(self) -> float:
        """Median tokens/s, without the first fifth of the steps."""
        return statistics.median(self.speeds[len(self.speeds) // 5 :])


def nanogpt(args: Namespace) -> Table:
    """nanoGPT's trainer and this one in turn, on the same data, with models of the same size.

    The models have the same layers, width, heads and tokens a step, and as many parameters in
    their blocks: SwiGLU's d_ff is 8/3 of the width, a multiple of 8. Needs a checkout of
    github.com/karpathy/nanoGPT with a prepared data set. --target also measures the seconds from
    start to a validation loss, imports and compilation included (inf: the run ends above it);
    nanoshard then trains for a third of the steps, at its own learning rate.
    """
    dataset = args.path / "data" / args.dataset
    if not (args.path / "train.py").exists() or not (dataset / "train.bin").exists():
        raise CannotMeasure(
            f"--path {args.path}: no nanoGPT with data/{args.dataset}/train.bin there: "
            "clone it and run its prepare.py"
        )
    trainers = {"nanoGPT": run_nanogpt, "nanoshard": run_nanoshard}
    found: dict[str, list[Followed]] = {name: [] for name in trainers}
    for turn in range(args.rounds):
        for name, run_trainer in trainers.items():
            show_round(turn, args.rounds, name)
            with tempfile.TemporaryDirectory(prefix="bench-") as out:
                found[name].append(run_trainer(args, out))

    rows = []
    for name, runs in found.items():
        speeds = [run.speed() for run in runs]
        if name == "nanoGPT":
            baseline = speeds
        row = {"trainer": name, "tokens/s": speeds, "ratio": ratios(speeds, baseline)}
        if args.target:
            row["seconds"] = [run.seconds for run in runs]
            row[f"seconds to {args.target}"] = [run.seconds_to_target for run in runs]
        rows.append(row)
    subject = (
        f"{args.n_layer} layers x {args.n_embd}, {args.n_head} heads, block {args.block_size}, "
        f"batch {args.batch_size}, {steps_and_rounds(args)}, {args.dataset} {args.flags}"
    )
    return Table(subject.rstrip(), rows)


def run_nanogpt(args: Namespace, out: str) -> Followed:
    eval_interval = 10**9  # never
    eval_iters = 1
    if args.target:
        eval_interval = args.steps // 8
        eval_iters = 20
    command = [
        sys.executable,
        "train.py",
        "config/train_shakespeare_char.py",
        f"--out_dir={out}",
        f"--dataset={args.dataset}",
        f"--n_layer={args.n_layer}",
        f"--n_head={args.n_head}",
        f"--n_embd={args.n_embd}",
        f"--block_size={args.block_size}",
        f"--batch_size={args.batch_size}",
        "--dropout=0.0",
        f"--max_iters={args.steps}",
        # not 100 = warmup_iters: its schedule divides by their difference
        f"--lr_decay_iters={args.steps + 1}",
        f"--eval_interval={eval_interval}",
        f"--eval_iters={eval_iters}",
        "--log_interval=1",
        f"--device={'cuda' if on_gpu(args) else 'cpu'}",
        f"--compile={on_gpu(args)}",
    ]
    return follow(command, args.path, args.batch_size * args.block_size, args.target)


def run_nanoshard(args: Namespace, out: str) -> Followed:
    steps = args.steps
    eval_interval = 0  # never
    eval_sequences = 12
    if args.target:
        steps = args.steps // 3
        eval_interval = steps // 8
        eval_sequences = 240  # as many as 20 batches of nanoGPT's default size, 12
    command = [
        sys.executable,
        TRAIN,
        *ONLY_STEPS,
        f"--out={out}",
        f"--data={args.path / 'data' / args.dataset}",
        f"--n_layer={args.n_layer}",
        f"--n_head={args.n_head}",
        f"--n_kv_head={args.n_head}",
        f"--d_model={args.n_embd}",
        # 3 d_model d_ff = 8 d_model^2, the parameters of GPT-2's MLP
        f"--d_ff={8 * round(args.n_embd / 3)}",
        f"--seq_len={args.block_size}",
        f"--global_batch_size={args.batch_size}",
        f"--max_steps={steps}",
        f"--eval_interval={eval_interval}",
        f"--eval_sequences={eval_sequences}",
        f"--device={'cuda' if on_gpu(args) else 'cpu'}",
        *args.flags.split(),
    ]
    return follow(command, None, args.batch_size * args.block_size, args.target)


# "iter 7: loss 4.2000, time 250.00ms, mfu 1.20%", "step 7/10  70%  ...  500 ms  12,346 tok/s"
NANOGPT_STEP = re.compile(r"time ([\d.]+)ms")
NANOSHARD_STEP = re.compile(r"ms  ([\d,]+) tok/s")
# "step 0: train loss 4.2000, val loss 4.1000", "step 7/10  val_loss 1.8712"
VALIDATION = re.compile(r"val[ _]loss ([\d.]+)")


def follow(command: list[str], cwd: Path | None, tokens: int, target: float | None) -> Followed:
    """Run a trainer, whose step has `tokens` tokens, and read what it prints. Raises RunFailed."""
    began = time.perf_counter()
    speeds = []
    seconds_to_target = math.inf
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            cwd=cwd,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        for line in process.stdout:
            if step := NANOGPT_STEP.search(line):
                speeds.append(tokens / (float(step[1]) / 1e3))
            elif step := NANOSHARD_STEP.search(line):
                speeds.append(float(step[1].replace(",", "")))
            validation = VALIDATION.search(line)
            if target and validation and float(validation[1]) <= target:
                seconds_to_target = min(seconds_to_target, time.perf_counter() - began)
        if process.wait():
            errors.seek(0)
            raise RunFailed(f"{' '.join(command)} failed", errors.read())
    return Followed(speeds, time.perf_counter() - began, seconds_to_target)


# --------------------------------------------------------------------------------------------------
# Parts of the trainer


def optimizer(args: Namespace) -> Table:
    """The optimizer step, clipping by norm, against torch's own functions on the same model.

    These are clip_grad_norm_ and AdamW(fused=True).step().
    """
    device = dist.start(args.device).device
    bare_model = model_with_gradients(args.model, device)
    adamw = torch.optim.AdamW(bare_model.parameters(), lr=1e-4, fused=True)

    def bare_step() -> None:
        torch.nn.utils.clip_grad_norm_(bare_model.parameters(), 1.0)
        adamw.step()

    model = model_with_gradients(args.model, device)
    ours = optim.Optimizer(model.named_parameters(), model.decays, lambda step: 1e-4)
    ours.adamw.zero_grad = lambda set_to_none: None  # keep the gradients for the next round
    loss = torch.zeros((), device=device)

    def our_step() -> None:
        ours.step(1, loss)

    work = {"bare": bare_step, "nanoshard": our_step}
    times = milliseconds_in_turn(work, args.rounds, device)
    ratio = ratios(times["nanoshard"], times["bare"])
    rows = [
        {"step": "bare", "milliseconds": times["bare"], "ratio": [1.0]},
        {"step": "nanoshard", "milliseconds": times["nanoshard"], "ratio": ratio},
    ]
    subject = (
        f"{args.model}, {model.parameter_count():,} parameters, {args.rounds} rounds, "
        f"{metrics.device_name(device)}"
    )
    return Table(subject, rows)


def model_with_gradients(size: str, device: torch.device) -> Transformer:
    """A model with initial weights and random gradients."""
    model = build_model(SIZES[size], device)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return model


def milliseconds_in_turn(
    work: dict[str, Callable[[], None]], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """What each piece of work takes in each round, in turn as in `measure`, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 1):
        for name, do in work.items():
            began = time.perf_counter()
            do()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn > 0:
                times[name].append(1e3 * (time.perf_counter() - began))
    return times


@dataclass
class Save:
    """What one save took, with a plain write of as many bytes just before it."""

    seconds: float
    blocking_seconds: float
    speed: float  # bytes/s
    plain_speed: float  # bytes/s of the plain write
    extra_memory: int  # peak host memory during the save minus memory before, in bytes, worst rank


def checkpoints(args: Namespace) -> Table:
    """Saving weights and AdamW state under fsdp, against a plain write of as many bytes."""
    world = dist.start("cpu")
    model = sharded_model(args.model, world)
    state = {}
    for slot in ("model", "exp_avg", "exp_avg_sq"):
        state[slot] = {name: p.detach().clone() for name, p in model.named_parameters()}
    size = 12 * model.parameter_count()  # bytes: a weight and two moments in float32
    shard = 12 * sum(optim.local(parameter).numel() for parameter in model.parameters())

    folder = Path(dist.on_rank0(lambda: tempfile.mkdtemp(prefix="bench-", dir=".")))

    def saver(name: str, checkpoint_format: str, asynchronous: bool = False) -> checkpoint.Saver:
        run = folder / name
        return checkpoint.Saver(run, checkpoint_format, asynchronous, 0, 0, world.timeout)

    savers = {
        "sharded": saver("sharded", "sharded"),
        "sharded, async": saver("async", "sharded", asynchronous=True),
        "full": saver("full", "full"),
    }
    saves: dict[str, list[Save]] = {name: [] for name in savers}
    for turn in range(args.rounds + 1):
        for name, saver in savers.items():
            plain_speed = size / time_plain_write(folder / "plain", size)
            saves[name].append(timed_save(saver, state, turn, plain_speed))
    dist.on_rank0(lambda: shutil.rmtree(folder))

    rows = [checkpoint_row(name, saves[name], shard) for name in savers]
    subject = (
        f"{args.model}, {size / 1e6:,.0f} MB on {world.size} ranks, "
        f"shards of {shard / 1e6:,.0f} MB, {args.rounds} rounds"
    )
    return Table(subject, rows)


def checkpoint_row(name: str, saves: list[Save], shard: int) -> dict:
    counted = saves[1:]  # the first round is a warm-up
    # Of all rounds: the first asynchronous save allocates a copy, which later ones use again
    extra_memory = max(save.extra_memory for save in saves)
    return {
        "form": name,
        "seconds": [save.seconds for save in counted],
        "blocking seconds": [save.blocking_seconds for save in counted],
        "MB/s": [save.speed / 1e6 for save in counted],
        "of plain write": [save.speed / save.plain_speed for save in counted],
        "peak extra host memory / shard": f"{extra_memory / shard:.3f}",
    }


def sharded_model(size: str, world: dist.World) -> Transformer:
    """A model of float32 weights under fsdp, on all ranks."""
    mesh = dist.make_mesh(world, (1, world.size, 1))
    with torch.device("meta"):
        model = Transformer(SIZES[size])

    dist.parallelize(
        model,
        mesh,
        "fsdp",
        init=functools.partial(model.init_tensor, seed=0),
        fsdp_units=dist.group_units(model.blocks, model.embed_and_head(), blocks_per_unit=1),
    )
    return model


def time_plain_write(path: Path, size: int) -> float:
    """Seconds that rank 0 takes to write `size` bytes to disk, as fast as it can."""
    began = time.perf_counter()
    dist.on_rank0(lambda: plain_write(path, size))
    return time.perf_counter() - began


def plain_write(path: Path, size: int) -> None:
    block = os.urandom(1 << 20) * 16  # 16 MiB
    with open(path, "wb") as file:
        for start in range(0, size, len(block)):
            file.write(block[: size - start])
        os.fsync(file.fileno())


def timed_save(saver: checkpoint.Saver, state: dict, step: int, plain_speed: float) -> Save:
    """Save `state` once and remove the checkpoint."""
    memory_before = reset_peak()
    saver.save(state, {"step": step})
    saver.wait()
    row = saver.done()[0]
    dist.on_rank0(lambda: shutil.rmtree(row["path"]))
    extra_memory = torch.tensor(checkpoint.host_memory().peak - memory_before)
    torch.distributed.all_reduce(extra_memory, op=torch.distributed.ReduceOp.MAX)
    return Save(
        seconds=row["seconds"],
        blocking_seconds=row["blocking_seconds"],
        speed=row["bytes"] / row["seconds"],
        plain_speed=plain_speed,
        extra_memory=extra_memory.item(),
    )


def reset_peak() -> int:
    """Reset the peak of this process's memory (Linux); returns the memory in use, in bytes."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return free memory to the system first
    Path("/proc/self/clear_refs").write_text("5")  # 5: reset VmHWM
    return checkpoint.host_memory().resident


# --------------------------------------------------------------------------------------------------
# The command line

RUNS = {
    "strategies": strategies,
    "accumulation": accumulation,
    "scaling": scaling,
    "loader": loader,
}
PARTS = {"optimizer": optimizer, "checkpoint": checkpoints}
TABLES = {**RUNS, "memory": memory, "nanogpt": nanogpt, **PARTS}


def parse(argv: list[str]) -> Namespace:
    parser = cli.Parser(prog="tools.bench", description="Measure nanoshard on this machine.")
    tables = parser.add_subparsers(dest="table", required=True, metavar="TABLE")
    for name, table in TABLES.items():
        summary = table.__doc__.splitlines()[0]
        flags = tables.add_parser(name, help=summary, description=table.__doc__)
        choices = ("auto", "cpu", "cuda")
        flags.add_argument("--device", default="auto", choices=choices, help="(default: auto)")
        flags.add_argument("--json", action="store_true", help="print numbers, not a table")
        if name in RUNS:
            add_run_flags(flags)
        elif name in PARTS:
            add_part_flags(flags)
        elif name == "memory":
            add_count(flags, "--layers", 10, "layers of tinyllama-1.1b; 10 take 13 GB in all")
            add_count(flags, "--steps", 6, "steps of each run")
            flags.add_argument("--flags", default="", help="more flags for train.py")
        else:
            add_nanogpt_flags(flags)
    return parser.parse_args(argv)


def add_run_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny", choices=SIZES, help="(default: tiny)")
    add_count(parser, "--nproc", 2, "processes")
    add_count(parser, "--micro_batch_size", 16, "sequences")
    add_count(parser, "--steps", 10, "counted steps of each run")
    add_count(parser, "--rounds", 3, "counted rounds")
    parser.add_argument("--flags", default="", help="more flags for train.py, as one argument")


def add_nanogpt_flags(parser: ArgumentParser) -> None:
    """The defaults are nanoGPT's command for a CPU, from its README, with fewer steps."""
    parser.add_argument(
        "--path",
        type=Path,
        required=True,
        metavar="DIR",
        help="a checkout of nanoGPT",
    )
    dataset = "shakespeare_char"
    parser.add_argument(
        "--dataset", default=dataset, help=f"a folder of its data/ (default: {dataset})"
    )
    add_count(parser, "--n_layer", 4, "layers")
    add_count(parser, "--n_head", 4, "attention heads")
    add_count(parser, "--n_embd", 128, "width")
    add_count(parser, "--block_size", 64, "tokens of a sequence")
    add_count(parser, "--batch_size", 12, "sequences of a step")
    add_count(parser, "--steps", 200, "steps of each run")
    add_count(parser, "--rounds", 3, "counted rounds")
    parser.add_argument(
        "--target",
        type=positive_number,
        metavar="LOSS",
        help="also measure the time to this validation loss",
    )
    parser.add_argument("--flags", default="", help="more flags for our train.py, as one argument")


def add_part_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--model", default="gpt2-124m", choices=SIZES, help="(default: gpt2-124m)")
    add_count(parser, "--nproc", 1, "processes")
    add_count(parser, "--rounds", 15, "counted rounds")


def add_count(parser: ArgumentParser, name: str, default: int, what: str) -> None:
    """Add a flag that takes a positive integer."""
    parser.add_argument(
        name,
        type=positive,
        default=default,
        metavar="N",
        help=f"{what} (default: {default})",
    )


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def restart_under_torchrun(args: Namespace) -> None:
    """Replace this process with torchrun, which starts the same benchmark on --nproc ranks."""
    options = []
    for name, value in vars(args).items():
        # torchrun would read --nproc as an abbreviation of its own --nproc_per_node
        if name not in ("table", "nproc", "json"):
            options.append(f"--{name}={value}")
    if args.json:
        options.append("--json")
    torchrun = [*TORCHRUN, "--standalone", f"--nproc_per_node={args.nproc}"]
    os.execv(sys.executable, [*torchrun, "-m", "tools.bench", args.table, *options])


def report(benchmark: Callable[[Namespace], Table], args: Namespace) -> None:
    """Run a benchmark and print its table, or its numbers with --json."""
    try:
        table = benchmark(args)
    except RunFailed as error:
        print(error.output, file=sys.stderr)
        raise
    if torch.distributed.is_initialized():
        dist.stop()
    if int(os.environ.get("RANK", 0)) != 0:
        return
    version = torch.__version__
    if args.json:
        head = {"table": args.table, "subject": table.subject, "torch": version}
        print(json.dumps(head | {"rows": table.rows}))
    else:
        print(f"{args.table}: {table.subject}, torch {version}; median (smallest ... largest)\n")
        cells = [[cell(value) for value in row.values()] for row in table.rows]
        print(markdown_table(list(table.rows[0]), cells))


def cell(value) -> str:
    """Measurements as "median (smallest ... largest)"; everything else as text."""
    if not isinstance(value, list):
        return str(value)
    median = three_digits(statistics.median(value))
    if len(value) == 1:
        return median
    return f"{median} ({three_digits(min(value))} ... {three_digits(max(value))})"


def three_digits(number: float) -> str:
    """Three significant digits; 100 and more as whole numbers."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def bench(argv: list[str]) -> None:
    args = parse(argv)
    if args.table in PARTS and args.nproc > 1 and "RANK" not in os.environ:
        restart_under_torchrun(args)
    report(TABLES[args.table], args)


def main(argv: list[str]) -> int:
    return cli.run("tools.bench", lambda: bench(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
