"""Train a language model: the parts of a run, one step, saving, evaluation, the loop, the command.

Read the loop in `train` first, then `train_step`; `build` makes what they use.

torchrun --standalone --nproc_per_node 2 train.py --strategy fsdp
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import math
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from runtime import launcher

if __name__ == "__main__":
    launcher.end_quietly()
    # torch reads these on import. They silence the profiler's log, and C++ warnings about failed
    # collectives, which tell less than the watchdog's line.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # FSDP allocates on four streams, each with blocks of its own: segments that grow leave no gaps.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor.parallel import loss_parallel

import checkpoint
import data
import dist
import metrics
import optim
import prepare
from config import BUILTIN, Config, lr_schedule, parse, profile_window
from layout import Layout, choose_layout, empty_model, lay_out
from model import NotFinite, Transformer, generate
from runtime import agreement, cli, console, memory, profiling, report, run_folder, slurm, watchdog
from runtime.consolidate import FULL, replace_shards
from text import tokenizer

# --------------------------------------------------------------------------------------------------
# What a run is made of


@dataclass(frozen=True)
class Plan:
    """What every rank decides, in the same way, before anything is built."""

    layout: Layout
    token_folders: list[data.TokenFolder]  # more than one: a mixture
    manifest: dict  # goes into every checkpoint
    resume: run_folder.ResumePoint
    started: datetime
    deadline: float  # of --time_limit, by time.monotonic()

    @property
    def token_folder(self) -> data.TokenFolder:
        """The first folder, for what all share: vocabulary and tokenizer."""
        return self.token_folders[0]


def make_plan(c: Config, world: dist.World) -> Plan:
    """Check that flags, ranks, data and run folder fit together; write only the built-in data."""
    started = datetime.now().astimezone()
    deadline = time.monotonic() + (c.time_limit or math.inf)
    origin = dist.on_rank0(lambda: run_folder.find_origin(c))
    c = run_folder.settle(c, origin)
    if c.data == BUILTIN:
        dist.on_rank0(prepare_builtin)
    token_folders = data.open_folders(c.data)
    dist.on_rank0(lambda: check_tokenizer(token_folders[0]))
    device_memory = dist.on_rank0(lambda: memory.device_memory(world.device, world.local_size))
    layout = choose_layout(c, world, token_folders[0].vocab_size, device_memory, origin.model)
    manifest = make_manifest(c, layout, token_folders)
    if c.eval_only:
        resume = dist.on_rank0(lambda: run_folder.evaluation_point(manifest, origin))
    else:
        latest, passed_over = checkpoint.latest_valid(Path(c.out))
        resume = dist.on_rank0(
            lambda: run_folder.resume_point(c, manifest, origin, latest, passed_over)
        )
    return Plan(layout, token_folders, manifest, resume, started, deadline)


def check_tokenizer(folder: data.TokenFolder) -> None:
    """Check the tokenizer file that goes into every checkpoint. Raises TokenizerError."""
    if folder.tokenizer_file:  # a built-in tokenizer has none, and may need the network
        tokenizer.find(folder.path.absolute(), folder.tokenizer_name, folder.vocab_size)


def make_manifest(c: Config, layout: Layout, token_folders: list[data.TokenFolder]) -> dict:
    return {
        "config": dataclasses.asdict(c),
        "model": dataclasses.asdict(layout.model_config),
        "dtype": str(layout.dtype).removeprefix("torch."),
        "micro_batch_size": layout.micro_batch_size,
        "data": ", ".join(folder.fingerprint for folder in token_folders),
        "tokenizer": token_folders[0].tokenizer_name,
        "tokens_in_vocabulary": token_folders[0].vocab_size,
    }


def prepare_builtin() -> None:
    if not Path(BUILTIN).exists():
        prepare.prepare(None, Path(BUILTIN))


@dataclass
class Run:
    """The parts of a run on this rank, in the order in which `build` makes them.

    The last four are for training only: --dry_run and --eval_only have none.
    """

    plan: Plan
    world: dist.World
    watchdog: watchdog.Watchdog
    train_data: data.TokenDataset | data.Mixture
    val_data: data.TokenDataset | data.Mixture
    mesh: dist.DeviceMesh  # dp_replicate x dp_shard x tp
    model: Transformer
    forward: nn.Module  # what a step calls: the model, or DDP around it
    optimizer: optim.Optimizer | None  # None with --eval_only
    state: dict  # what a checkpoint holds: the live tensors, sharded
    val_batches: list = field(default_factory=list)  # from read_validation_set
    should_stop: agreement.StopRequest | None = None
    saver: checkpoint.Saver | None = None
    log: metrics.Log | None = None
    profiler: profiling.Profiler | None = None

    def __post_init__(self):
        self.layout = self.plan.layout
        self.config = self.layout.config
        self.dp_rank = dist.dp_rank(self.mesh)
        self.n_val = min(self.config.eval_sequences, len(self.val_data))  # sequences to evaluate
        self.step = self.plan.resume.step  # updates so far


def build(plan: Plan, world: dist.World, dog: watchdog.Watchdog) -> Run:
    """Build the run on all ranks, up to its first step, and check that they agree."""
    layout, resume = plan.layout, plan.resume
    c, seq_len = layout.config, layout.model_config.seq_len
    train_data = data.open_dataset(plan.token_folders, "train", seq_len, c.seed)
    val_data = data.open_dataset(plan.token_folders, "val", seq_len, seed=None)
    mesh = dist.make_mesh(world, layout.mesh_shape)
    model = empty_model(layout)
    forward = lay_out(model, mesh, layout)
    # Taken before the first forward: after an evaluation FSDP's root shows gathered weights.
    state = {"model": {name: weight.detach() for name, weight in model.named_parameters()}}
    optimizer = None
    if not c.eval_only:
        optimizer = build_optimizer(model, c)
        state["optimizer"] = optimizer.state()
    memory.trim_freed_memory()  # whole tensors, now that each rank has its shards
    torch.cuda.empty_cache()  # the same on a GPU; does nothing without one
    if resume.checkpoint:
        dist.on_rank0(lambda: run_folder.check_complete(resume.checkpoint, state))
        checkpoint.load_state(resume.checkpoint, state)
    elif resume.init_from:
        saved = {name: w for name, w in state["model"].items() if name not in resume.new_parameters}
        checkpoint.load_state(resume.init_from, {"model": saved})
    run = Run(plan, world, dog, train_data, val_data, mesh, model, forward, optimizer, state)
    check_agreement(run)
    # Read once, here, so that a damaged file ends the run before its first step
    run.val_batches = dist.raise_on_all_ranks(lambda: read_validation_set(run))
    if not (c.dry_run or c.eval_only):
        open_run_folder(run)
    return run


def check_agreement(run: Run) -> None:
    """Check that the ranks form one run: flags, code and data, weights, and who reads what."""
    manifest = run.plan.manifest
    must_match = {f"--{name}": value for name, value in manifest["config"].items()}
    must_match["the code"] = source_hash()
    must_match["the fingerprint of the data"] = manifest["data"]
    if run.config.eval_only:
        first_indices = indices_of_evaluation(run)
    else:
        first_indices = indices_of_steps(run, run.step + 1, run.step + 1)
    weights = run.model.parameters()
    agreement.check_ranks_agree(
        run.mesh, must_match, weights, itertools.chain.from_iterable(first_indices)
    )


def open_run_folder(run: Run) -> None:
    """Take over the run folder; create what writes to it and what stops the run."""
    plan, world, c = run.plan, run.world, run.config
    out = Path(c.out)
    start = plan.manifest | {
        "strategy": run.layout.strategy,
        "ranks_per_host": world.local_size,
        "device": metrics.device_name(world.device),
    }
    first_start = dist.on_rank0(
        lambda: run_folder.create(out, start, run.step, world.size, plan.started)
    )
    console.keep_transcript(out / "console.log")
    run.watchdog.dump_folder = out / "flight"
    run.should_stop = agreement.StopRequest(world.timeout)  # handles signals from here on
    extra_files = plan.token_folder.tokenizer_file
    run.saver = checkpoint.Saver(
        out,
        c.async_save,
        c.keep_last,
        c.keep_every,
        world.timeout,
        extra_files,
        memory.host_memory,
        start_step=run.step,
    )
    run.log = build_log(run, first_start)

    def settle() -> None:
        """Wait for collectives outside the step; the step's own have ended by then."""
        run.should_stop.wait()
        run.saver.wait()

    run.profiler = profiling.Profiler(
        profile_window(c), out / "profile", run.mesh, run.log.say, settle
    )


def build_optimizer(model: Transformer, c: Config) -> optim.Optimizer:
    return optim.Optimizer(
        model.named_parameters(),
        model.decays,
        lr_schedule(c),
        optimizer=c.optimizer,
        is_hidden=model.is_hidden,
        weight_decay=c.weight_decay,
        betas=(c.beta1, c.beta2),
        eps=c.eps,
        clip=c.clip,
        max_grad_norm=c.max_grad_norm,
        max_grad_norm_ratio=c.max_grad_norm_ratio,
        skip_spikes=c.skip_spikes,
    )


def build_log(run: Run, first_start: datetime) -> metrics.Log:
    c, layout, device = run.config, run.layout, run.world.device
    out = Path(c.out)
    tracker = None
    if c.tracker != "none":
        run_id = f"{out.name}-{first_start:%Y%m%d-%H%M%S}"
        tracker = metrics.Tracker(c.tracker, out, run_id, run.step, dataclasses.asdict(c))
    return metrics.Log(
        out,
        device,
        last_step=run.step,
        started=first_start.timestamp(),
        max_steps=c.max_steps,
        tokens_per_step=layout.tokens_per_step,
        flops_per_token=run.model.flops_per_token(layout.model_config.seq_len),
        peak_flops=metrics.peak_flops(device, layout.dtype, c.peak_tflops),
        max_skipped=c.max_skipped,
        tracker=tracker,
        quiet=c.quiet,
    )


def source_hash() -> str:
    """Hash the Python files of a run and their paths."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for pattern in ("*.py", "runtime/*.py", "text/*.py"):
        for path in sorted(root.glob(pattern)):
            digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


# --------------------------------------------------------------------------------------------------
# One step


def indices_of_steps(run: Run, start_step: int, stop_step: int) -> Iterator[list[int]]:
    """The sequence indices of this rank's micro-batches, start_step through stop_step."""
    return data.train_indices(
        range(start_step, stop_step + 1),
        run.config.global_batch_size,
        run.layout.micro_batch_size,
        run.dp_rank,
        run.layout.dp_size,
    )


def micro_batches(run: Run, start_step: int, stop_step: int) -> Iterator[Tensor]:
    """This rank's micro-batches (B, T + 1) on its device, start_step through stop_step."""
    device = run.world.device
    is_cuda = device.type == "cuda"
    workers = run.config.num_workers
    if workers is None:
        workers = 2 if is_cuda else 0
    indices = indices_of_steps(run, start_step, stop_step)
    batches = data.loader(run.train_data, indices, workers, pin=is_cuda)
    if is_cuda:
        batches = data.prefetch(batches, device)
    while True:
        run.watchdog.progress(run.step, "reading data")
        began = time.perf_counter()
        tokens = next(batches, None)
        run.log.data_wait += time.perf_counter() - began
        # The first step allocates its memory and may compile.
        is_first = run.step < start_step
        doing = "compiling" if is_first and run.config.compile else "computing"
        run.watchdog.progress(run.step, doing, slow=is_first)
        if tokens is None:
            return
        yield tokens


def train_step(
    forward: nn.Module,
    optimizer: optim.Optimizer,
    batches: Iterator[Tensor],
    step: int,
    grad_accum_steps: int = 1,
    grad_sync: str = "batch",
    measure: bool = False,
) -> dict[str, Tensor]:
    """Train on one global batch. The host queues the work and does not wait for the device.

    `forward` is the model, or DDP around it; `batches` yields this rank's micro-batches (B, T + 1);
    a step takes grad_accum_steps. Returns metrics as 0-d tensors on the device; `measure` adds the
    table "parameters".
    """
    n = grad_accum_steps
    loss = 0
    for micro_step in range(n):
        tokens = next(batches)  # (B, T + 1)
        with dist.gradient_sync(forward, grad_sync, is_last=micro_step == n - 1):
            # Mean over the micro-batch / n: summed over micro-batches and averaged over ranks, it
            # is the mean over the global batch.
            micro_loss = forward(tokens[:, :-1], tokens[:, 1:]) / n
            micro_loss.backward()  # DDP and FSDP average gradients here: see gradient_sync
        loss = loss + micro_loss.detach()
    return {"loss": loss, **optimizer.step(step, loss, measure)}


def is_due(step: int, interval: int) -> bool:
    """Whether `step` ends an interval; an interval of 0 never ends."""
    return interval > 0 and step % interval == 0


@dataclass(frozen=True)
class Due:
    """What is due in and after a step. Depends on flags only, so all ranks agree."""

    measure: bool  # statistics of each parameter, in the step
    evaluate: bool
    save: bool
    log: bool


def due_at(step: int, c: Config, is_first: bool) -> Due:
    """What is due at `step`; `is_first`: it is the first since this start."""
    is_last = step == c.max_steps
    measure = is_due(step, c.optim_metrics_interval)
    evaluate = is_last or is_due(step, c.eval_interval)
    save = is_last or is_due(step, c.save_interval)
    log = evaluate or save or is_first or is_due(step, c.log_interval)
    return Due(measure, evaluate, save, log)


# --------------------------------------------------------------------------------------------------
# Saving and evaluation


def save(run: Run, step: int) -> None:
    """Save a checkpoint, or start saving it with --async_save."""
    if run.config.checkpoint == "none":
        return
    run.watchdog.progress(step, "saving", slow=True)
    if is_finite(run):
        tokens = step * run.layout.tokens_per_step
        run.saver.save(run.state, {"step": step, "tokens": tokens, **run.plan.manifest})
    else:
        run.saver.refuse(step, "the loss or a weight is not finite")
    log_saves(run)


def is_finite(run: Run) -> bool:
    """Whether the last loss and all weights are finite, on all ranks."""
    weights = [optim.local(weight) for weight in run.state["model"].values()]
    finite = torch.stack([weight.isfinite().all() for weight in weights]).all().float()
    torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
    return math.isfinite(run.log.loss) and finite.item() == 1


def log_saves(run: Run) -> None:
    """Log the saves that have finished."""
    for row in run.saver.done():
        run.log.checkpoint(row)
        if row["event"] == "checkpoint":
            run.log.longest_pause = max(run.log.longest_pause, row["seconds"])  # of --async_save
            run.watchdog.saved_step = row["step"]


def consolidate_last(c: Config, step: int | None) -> None:
    """With --checkpoint full, turn the checkpoint of `step` into one file.

    On rank 0, after the process group has ended: no other rank waits, and no timeout applies.
    Raises CheckpointError and leaves the sharded checkpoint.
    """
    if c.checkpoint != "full" or c.dry_run or c.eval_only:
        return
    began = time.perf_counter()
    path = checkpoint.step_path(Path(c.out), step)
    with console.live(console.Progress("consolidating")) as progress:
        is_new = replace_shards(path, functools.partial(setattr, progress, "share"))
    if is_new:
        seconds = time.perf_counter() - began
        print(f"consolidated {path} in {FULL} in {seconds:.2f} s", flush=True)


def evaluate_and_save(run: Run, step: int, due: Due, stop: bool) -> None:
    """Do what is due after a step, outside its time. Raises Diverged on all ranks."""
    with run.log.pause():
        if stop:  # save first: torchrun kills the ranks 30 s after a signal
            save(run, step)
        if due.evaluate:
            run.log.evaluation(step, validation_loss(run))
        # After the evaluation: a kill between the two repeats both, and loses no row.
        if due.save and not stop:
            save(run, step)


def indices_of_evaluation(run: Run) -> list[list[int]]:
    """The sequence indices of this rank's batches of the fixed validation set."""
    batch_size, dp_size = run.layout.micro_batch_size, run.layout.dp_size
    return list(data.val_indices(run.n_val, len(run.val_data), batch_size, run.dp_rank, dp_size))


def read_validation_set(run: Run) -> list[tuple[int, Tensor]]:
    """(number of sequences, tokens (B, T + 1)) for each of this rank's batches."""
    return [(len(indices), run.val_data[indices or [0]]) for indices in indices_of_evaluation(run)]


@torch.no_grad()
def validation_loss(run: Run) -> float:
    """The mean loss over the fixed validation set, in nats per token.

    Every rank takes part in every forward, with weight 0 once it has no sequences left.
    """
    total = torch.zeros((), device=run.world.device)
    run.watchdog.progress(run.step, "evaluating", slow=True)  # the first forward may compile
    for i, (weight, tokens) in enumerate(run.val_batches, 1):
        tokens = tokens.to(run.world.device)
        total += run.forward(tokens[:, :-1], tokens[:, 1:]) * weight
        run.watchdog.progress(run.step, "evaluating", share=i / len(run.val_batches))
    total = total.double()
    torch.distributed.all_reduce(total)
    return total.item() / run.config.tp / run.n_val  # a tp group's ranks have the same loss


# --------------------------------------------------------------------------------------------------
# The loop


def train(run: Run) -> int:
    """Train up to max_steps; return the exit status.

    In a step the host queues work and does not wait for the device: batches are copied ahead on a
    side stream (data.prefetch), tensors decide on clipping and skipping (optim.Optimizer), ranks
    agree to stop with CPU tensors one step late (StopRequest), and a log row is an asynchronous
    copy (metrics.Log). An .item(), a print or an `if` on a tensor would break that. The host waits
    only for an evaluation, a save, the end, optim.jsonl, a host more than a step behind and, with
    --log_interval 1, the previous row.
    """
    c, forward, optimizer, log = run.config, run.forward, run.optimizer, run.log
    n = run.layout.grad_accum_steps
    start_step = run.step + 1
    batches = micro_batches(run, start_step, c.max_steps)  # in an order given by (seed, step)
    deadline = run.plan.deadline  # of --time_limit
    for step in range(start_step, c.max_steps + 1):
        due = due_at(step, c, is_first=step == start_step)
        with run.profiler.step(step, log.data_wait):  # does nothing without --profile
            values = train_step(forward, optimizer, batches, step, n, c.grad_sync, due.measure)
        run.step = step
        is_late = log.is_gone or time.monotonic() > deadline - seconds_to_stop(run)
        stop = run.should_stop(is_late) and step < c.max_steps
        log.step(step, values, optimizer, is_due=due.log or stop)
        if c.async_save and due.log:
            log_saves(run)
        if due.evaluate or due.save or stop:
            evaluate_and_save(run, step, due, stop)
        if stop:
            break
        tidy_memory(run, step, is_first=step == start_step)
    return finish(run, stopped=stop)


def seconds_to_stop(run: Run) -> float:
    """Time to leave for a stop: twice as long as one would take by the run's own timings."""
    # One more step, an evaluation and a save; with --checkpoint full also the one file
    seconds = run.log.step_time + run.log.longest_pause
    if run.config.checkpoint == "full":
        seconds += run.saver.replace_seconds
    return 2 * seconds


def tidy_memory(run: Run, step: int, is_first: bool) -> None:
    """Keep freed memory for the next steps; collect garbage on all ranks in the same step."""
    if is_first and run.world.device.type == "cpu":
        # Not before: the first step also allocates memory that lives until the end.
        memory.keep_freed_memory(run.layout.memory.transient)
    if step % 100 == 0:
        gc.collect(1)
        memory.trim_freed_memory()  # left by evaluations and saves


def finish(run: Run, stopped: bool) -> int:
    """Wait for the last save and print how the run ended; return the exit status.

    Raises CheckpointError if that save failed.
    """
    c = run.config
    run.watchdog.progress(run.step, "saving", slow=True)
    run.saver.wait()
    log_saves(run)
    if run.saver.failure:
        raise checkpoint.CheckpointError(run.saver.failure)
    dist.raise_on_all_ranks(lambda: check_is_there(run))
    run.log.say(run.log.goodput())
    if stopped:
        continues = "" if c.checkpoint == "none" else "; the same command continues"
        line = f"stopped after step {run.step}{continues}"
        run.log.say(line)
        watchdog.tell_torchrun(line)
        if run.world.is_rank0:
            watchdog.say_after_torchrun(line)
        # 75 tells a scheduler to try again. With torchrun --max-restarts, which would retry at
        # once, return 0.
        will_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
        return 0 if will_restart else os.EX_TEMPFAIL
    if c.sample_tokens:
        run.log.say(f"{' sample ':-^80}\n{closing_sample(run)}\n{'-' * 80}")
    return 0


def check_is_there(run: Run) -> None:
    """Raises RunError if the log found no run folder: it was renamed or removed."""
    if run.log.is_gone:
        out = run.log.out
        saved = ""
        if run.config.checkpoint != "none":
            path = checkpoint.step_path(out, run.step)
            saved = f"; {path} is new: move it into the run's checkpoints/, and continue there"
        raise cli.RunError(f"{out} was renamed or removed while the run wrote there{saved}")


def closing_sample(run: Run) -> str:
    """Continue the start of the validation set; text on rank 0. Collective, like every forward."""
    run.watchdog.progress(run.step, "sampling", slow=True)
    seq_len = run.layout.model_config.seq_len
    folder = run.plan.token_folder
    prompt = folder.tokens("val")[: max(1, seq_len // 4)].tolist()
    new = generate(
        run.forward,
        [prompt],
        run.config.sample_tokens,
        seq_len=seq_len,
        vocab_size=folder.vocab_size,
        device=run.world.device,
        temperature=0.8,
        tp=run.config.tp,
    )
    try:
        tokens = [*prompt, *(drawn[0] for drawn in new)]
        if not run.log.is_rank0:
            return ""
        return "".join(tokenizer.decode(folder.tokenizer, tokens))
    except (tokenizer.TokenizerError, NotFinite) as error:  # the run itself has succeeded
        return f"no text: {error}"


# --------------------------------------------------------------------------------------------------
# The command


def print_evaluation(run: Run) -> None:
    """Evaluate, and print the line of --eval_only."""
    val_loss = validation_loss(run)
    if run.world.is_rank0:
        for warning in run.plan.resume.warnings:
            print(f"train.py: warning: {warning}", file=sys.stderr, flush=True)
        line = report.describe_evaluation(val_loss, run.val_data, run.n_val)
        print(f"{run.plan.resume.init_from} on {run.config.data}: {line}", flush=True)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection on one rank delays all of them: `tidy_memory` collects on all at once."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def prepare_memory(plan: Plan, world: dist.World) -> None:
    """On CPUs, warn if the host lacks memory for its ranks, and tune malloc."""
    if world.device.type != "cpu":
        return
    shortage = plan.layout.memory.shortage(world.local_size)
    memory.separate_large_blocks()
    if shortage and world.local_rank == 0:
        print(f"train.py: warning: {shortage}", file=sys.stderr, flush=True)


def run_command(config: Config) -> int:
    """Join the other ranks, then train or evaluate; return the exit status."""
    collective_timeout = timedelta(seconds=watchdog.SLOW_FACTOR * config.timeout)
    join_timeout = timedelta(seconds=config.timeout)
    world = dist.start(config.device, collective_timeout, join_timeout)
    console.is_quiet = config.quiet or not world.is_rank0
    dog = watchdog.Watchdog(world.store, world.rank, world.size, config.timeout)
    with contextlib.ExitStack() as lock:  # rank 0 keeps it until the checkpoint is one file
        # loss_parallel is for --tp, where each rank holds part of the logits.
        with dog, loss_parallel(), no_garbage_collection():
            if config.eval_only:  # only reads, so needs no lock
                print_evaluation(build(make_plan(config, world), world, dog))
                status = 0
            else:
                lock.enter_context(run_folder.locked(Path(config.out), config.timeout))
                status = run_training(config, world, dog)
        dist.stop()
        if world.is_rank0:
            consolidate_last(config, dog.saved_step)
    return status


def run_training(config: Config, world: dist.World, dog: watchdog.Watchdog) -> int:
    """Plan, build and train, unless the run is finished; return the exit status."""
    dist.on_rank0(lambda: metrics.check_tracker(config.tracker))
    plan = make_plan(config, world)
    dog.saved_step = plan.resume.step or None
    if plan.resume.step >= config.max_steps:
        if world.is_rank0:
            print(
                f"{config.out} is finished, step {plan.resume.step} of {config.max_steps}: "
                "raise --max_steps, or choose another --out"
            )
        return 0
    prepare_memory(plan, world)
    run = build(plan, world, dog)
    lines = [
        *report.describe_start(run.config, run.layout, world, run.model, run.train_data.parts),
        *report.describe_beginning(run.config, plan.resume),
    ]
    if config.dry_run:
        lines.append("--dry_run: all is ready for the first step; nothing was written")
    if world.is_rank0:
        print("\n".join(lines), flush=True)
    if config.dry_run:
        return 0
    with console.live(lambda: report.describe_activity(run.step, dog.now, run.log)):
        status = train(run)
    if run.step == config.max_steps:
        run.log.say(f"planned and measured: python -m tools.plan --run {config.out}")
    return status


def main(argv: list[str]) -> int:
    def command() -> int:
        try:
            return run_command(parse(argv))
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":
                print("train.py: stopped at once by Ctrl-C, without a save", file=sys.stderr)
            raise
        except RuntimeError as error:
            message = None if hasattr(error, "exit_status") else explain(error)
            if message is None:
                raise
            raise cli.RunError(message) from None

    slurm.read_slurm()
    launcher.watch()
    heading = f"--- {datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z} train.py {shlex.join(argv)}\n"
    with console.Transcript(heading if os.environ.get("RANK", "0") == "0" else ""):
        return cli.run("train.py", command, watchdog.fail_on_ranks)


def explain(error: RuntimeError) -> str | None:
    """One line for an error of torch that has a remedy: out of memory, or from torch.compile."""
    inner = getattr(error, "inner_exception", None)  # in torch.compile's errors
    first_line = str(inner or error).partition("\n")[0]
    for text in ("out of memory", "allocate memory", "calculation overflowed"):  # CUDA, CPU, both
        if text in str(error):
            need = first_line.rpartition("DefaultCPUAllocator: ")[2].rstrip(".")
            return f"{need}; lower --micro_batch_size, or shard with --strategy fsdp"
    if inner:
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # set by Inductor, if it got so far
        remedy = f"; if its cache is damaged, remove {cache}" if cache else ""
        return f"--compile: {first_line}{remedy}"
    return None


if __name__ == "__main__":
    agreement.end_on_early_signals("train.py")
    # `record` puts the traceback of an unexpected error into torchrun's report.
    sys.exit(record(main)(sys.argv[1:]))
