"""Train a language model: a run, from its flags to its last save, in the order in which it happens.

    torchrun --standalone --nproc_per_node 2 train.py --strategy fsdp

Read `run`, then `train_step`. What they call, by question:

    the learning rate, its default             optim.learning_rate, config.fill_learning_rate
    clipping, an update                        optim.Optimizer.step, CLIPS
    attention, the loss                        model.Attention, Head
    how ranks average gradients                dist.gradient_sync
    which rank reads which sequences           data.train_indices; data.py on packing
    a checkpoint of one mesh on another        checkpoint.load_state
    a row of the log, without a host sync      metrics.Log.step
    a flag, and what follows from it           config.Config, layout.choose
    a rank that dies or hangs                  runtime.watchdog.Watchdog
"""

import contextlib
import dataclasses
import gc
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

if __name__ == "__main__":
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
import layout
import metrics
import optim
from config import Config, fill_learning_rate, parse, profile_window
from layout import Setup
from metrics import is_due
from model import Transformer, eval_mode
from runtime import agreement, cli, console, memory, preflight, profiling, run_folder, slurm
from runtime.saver import Saver
from runtime.startup_lines import describe_evaluation, describe_no_steps, describe_start, say
from runtime.watchdog import SLOW_FACTOR, Watchdog, end_with_launcher, take_over_nccl_errors
from sample import closing_sample

# --------------------------------------------------------------------------------------------------
# The run


def command(argv: list[str]) -> int:
    """Join the other ranks, train or evaluate, and leave; return the exit status."""
    flags = parse(argv)
    # Collectives get longer, since a rank may wait in one while another compiles or saves.
    timeout = timedelta(seconds=SLOW_FACTOR * flags.timeout)
    take_over_nccl_errors(timeout)
    world = dist.start(flags.device, timeout, join_timeout=timedelta(seconds=flags.timeout))
    # A rank that dies or hangs ends all ranks. torchrun --max-restarts or a scheduler starts them
    # again, and they continue from the last checkpoint.
    watchdog = Watchdog(world.store, world.rank, world.size, flags.timeout)
    # Under tp each rank holds part of the logits, which loss_parallel() never gathers.
    with contextlib.ExitStack() as held, watchdog, loss_parallel(), no_garbage_collection():
        if world.rank == 0:
            held.enter_context(console.live(lambda: watchdog.place))
        status = run(flags, world, watchdog, held)
    torch.distributed.destroy_process_group()
    return status


def run(
    flags: Config,
    world: dist.World,
    watchdog: Watchdog,
    held: contextlib.ExitStack,
    handle_signals: bool = True,
    after_load: Callable[["State"], None] | None = None,
) -> int:
    """What happens, from the first look at the disk to the last line; returns the exit status.

    `held` keeps the lock of the run folder. `after_load` is called with the state before the ranks
    compare their weights.

    In a step the host queues work and does not wait for the device: batches are copied from pinned
    memory, tensors decide on clipping and skipping (optim.Optimizer), ranks agree to stop with CPU
    tensors one step late (StopRequest), and a log row is an asynchronous copy (metrics.Log). An
    .item(), a print or an `if` on a tensor would break that. The host waits only for an evaluation,
    a save, the end, optim.jsonl, a host more than a step behind and, with --log_interval 1, the
    previous row.
    """
    # Lock the run folder; check it, flags and data before the model is built.
    start = preflight.find_start(flags, world, held)
    c = start.config  # the flags; those not given have the values of the run that continues
    if start.step >= c.max_steps:
        say(world, describe_no_steps(start))
        return 0

    # From flags and ranks to a model on the mesh, with its weights
    setup = layout.choose(c, world, start.model, start.device_memory)
    mesh = dist.make_mesh(world, setup.mesh_shape)
    state, forward = build(c, setup, mesh)
    load(state, start)
    if after_load:
        after_load(state)

    # The data, and whether all ranks together form one run
    folders = data.open_folders(c.data)
    train_data = data.open_dataset(folders, "train", setup.model.seq_len, c.seed)
    val_data = data.open_dataset(folders, "val", setup.model.seq_len, seed=None)
    val_batches = agree(flags, c, setup, mesh, state, val_data)
    if c.eval_only:
        val_loss = evaluate(forward, val_batches, watchdog, state.step)
        say(world, describe_evaluation(start, val_loss, val_data))
        return 0
    say(world, describe_start(start, setup, world, state.model, train_data.parts))
    if c.dry_run:
        return 0

    # From here on the run writes
    out = Path(c.out)
    chosen = {"strategy": setup.strategy, "micro_batch_size": setup.micro_batch_size}
    manifest = start.manifest | chosen
    if world.rank == 0:
        run_folder.create(out, manifest, world, start.step, start.times[-1])
    stop_request = agreement.StopRequest(world.timeout, handle_signals)  # from here on
    tokenizer_file = folders[0].tokenizer_file
    saver = Saver(out, c.async_save, c.keep_last, c.keep_every, world.timeout, tokenizer_file)
    batches = MicroBatches(c, setup, mesh, train_data, watchdog, start.step)
    flops_per_token = state.model.flops_per_token(setup.model.seq_len)
    peak_flops = metrics.peak_flops(world.device, setup.dtype, c.peak_tflops)
    rates = metrics.Rates(world.device, setup.tokens_per_step, flops_per_token, peak_flops)
    log = metrics.Log(out, c, rates, start.step, start.times[0], batches)
    profiler = None
    if window := profile_window(c):
        in_flight = [stop_request, saver]
        profiler = profiling.Profiler(window, out / "profile", mesh, log.say, in_flight)

    if world.device.type == "cpu":
        memory.keep_freed_memory()
    n, grad_sync = setup.grad_accum_steps, c.grad_sync
    for step in range(start.step + 1, c.max_steps + 1):
        measure = is_due(step, c.optim_metrics_interval)
        with profiler.step(step, batches.waited) if profiler else contextlib.nullcontext():
            values = train_step(forward, state.optimizer, batches, step, n, grad_sync, measure)
        state.step = step
        is_last = step == c.max_steps
        # Whether any rank asked a step ago: all ranks stop after the same step.
        stop = stop_request() and not is_last
        log.step(step, values, stops=stop)  # a row if one is due
        evaluates = is_last or is_due(step, c.eval_interval)
        saves = c.checkpoint != "none" and (is_last or stop or is_due(step, c.save_interval))
        if evaluates or saves:
            with log.pause():
                if saves and stop:  # save first: torchrun kills the ranks 30 s after a signal
                    save(setup, state, manifest, saver, log.loss, watchdog)
                if evaluates:
                    log.evaluation(step, evaluate(forward, val_batches, watchdog, step))
                # After the evaluation: a kill between the two repeats both, and loses no row.
                if saves and not stop:
                    save(setup, state, manifest, saver, log.loss, watchdog)
        while saver.rows:
            log.checkpoint(saver.rows.pop(0))
        if stop or saver.ends_run:
            break
        if step % 100 == 0:
            gc.collect(1)  # on all ranks in the same step

    # The end
    watchdog.progress(state.step, "saving", slow=True)
    saver.wait()
    while saver.rows:
        log.checkpoint(saver.rows.pop(0))
    if saver.failure:
        raise checkpoint.CheckpointError(saver.failure)
    log.say(log.goodput())
    if stop:
        return report_stop(c, state.step, log)
    if c.sample_tokens:
        watchdog.progress(state.step, "sampling", slow=True)
        seq_len = setup.model.seq_len
        text = closing_sample(forward, folders[0], c.sample_tokens, seq_len, c.tp, world)
        log.say(f"{' sample ':-^80}\n{text}\n{'-' * 80}")
    return 0


# --------------------------------------------------------------------------------------------------
# Before the first step


@dataclass
class State:
    """What a step changes, and a checkpoint holds."""

    step: int  # updates so far
    model: Transformer
    optimizer: optim.Optimizer | None  # None with --eval_only
    tensors: dict  # the live tensors, sharded: saved, and loaded in place


def build(
    c: Config,
    setup: Setup,
    mesh: dist.DeviceMesh,
    model: Transformer | None = None,
    init_weights: bool = True,
) -> tuple[State, nn.Module]:
    """The model with its initial weights and the optimizer, on the mesh; and what a step calls.

    `model` is on the meta device: by default a new one. `init_weights`: see layout.place.
    """
    model = model or layout.empty_model(c, setup)
    forward = layout.place(model, mesh, c, setup, init_weights)
    # Taken before the first forward: after an evaluation FSDP's root shows gathered weights.
    tensors = {"model": {name: weight.detach() for name, weight in model.named_parameters()}}
    optimizer = None
    if not c.eval_only:
        optimizer = optim.Optimizer(
            model.named_parameters(), model.decays, fill_learning_rate(c), model.is_hidden
        )
        tensors["optimizer"] = optimizer.state()
    torch.cuda.empty_cache()  # full tensors, now that each rank has its shards; nothing on CPUs
    return State(0, model, optimizer, tensors), forward


def load(state: State, start: preflight.Start) -> None:
    """Fill the state from the checkpoint to continue from, or its weights from another run's."""
    if start.checkpoint:
        weights = {"model": state.tensors["model"]}
        checkpoint.load_state(start.checkpoint, weights if start.only_weights else state.tensors)
    state.step = start.step


def agree(
    flags: Config,
    c: Config,
    setup: Setup,
    mesh: dist.DeviceMesh,
    state: State,
    val_data: data.TokenDataset | data.Mixture,
) -> list[tuple[int, Tensor]]:
    """Check that the ranks form one run: flags, code and data, weights, and who reads what.

    Returns this rank's batches of the fixed validation set, (number of sequences, tokens
    (B, T + 1)), read once, so that a damaged file ends the run before its first step. Raises
    UsageError and DataError on all ranks.
    """
    reader = setup.micro_batch_size, dist.dp_rank(mesh), setup.dp_size
    n_val = min(c.eval_sequences, len(val_data))
    val_indices = list(data.val_indices(n_val, len(val_data), *reader))
    first_indices = val_indices
    if not c.eval_only:
        first_step = range(state.step + 1, state.step + 2)
        first_indices = data.train_indices(first_step, c.global_batch_size, *reader)
    must_match = {f"--{name}": value for name, value in dataclasses.asdict(flags).items()}
    folders = [part.folder for part in val_data.parts]
    must_match["the data's fingerprint"] = [folder.fingerprint for folder in folders]
    val_batches = []

    def read_and_claim() -> dict:
        for indices in val_indices:
            # A rank with none left reads any: it takes part in the forward, with weight 0.
            val_batches.append((len(indices), val_data[indices or [0]]))
        indices = itertools.chain.from_iterable(first_indices)
        return agreement.local_claims(mesh, must_match, indices, state.tensors["model"])

    agreement.compare_claims(dist.on_all_ranks(read_and_claim))
    return val_batches


# --------------------------------------------------------------------------------------------------
# One step


class MicroBatches:
    """This rank's micro-batches (B, T + 1) on its device, of the steps after `resumed_step`.

    Their order is given by (seed, step). `waited` is the seconds spent waiting for them so far.
    """

    def __init__(
        self,
        c: Config,
        setup: Setup,
        mesh: dist.DeviceMesh,
        train_data: data.TokenDataset | data.Mixture,
        watchdog: Watchdog,
        resumed_step: int,
    ):
        is_cuda = mesh.device_type == "cuda"
        workers = c.num_workers
        if workers is None:
            workers = 2 if is_cuda else 0
        reader = setup.micro_batch_size, dist.dp_rank(mesh), setup.dp_size
        steps = range(resumed_step + 1, c.max_steps + 1)
        indices = data.train_indices(steps, c.global_batch_size, *reader)
        self.batches = data.loader(train_data, indices, workers, pin=is_cuda)
        self.device = mesh.device_type
        self.watchdog = watchdog
        self.resumed_step = resumed_step
        self.per_step = setup.grad_accum_steps
        self.first_doing = "compiling" if c.compile else "computing"
        self.read = 0
        self.waited = 0.0

    def __next__(self) -> Tensor:
        step = self.resumed_step + self.read // self.per_step  # steps done
        is_first = step == self.resumed_step  # it allocates its memory and may compile
        self.watchdog.progress(step, "reading data")
        began = time.perf_counter()
        tokens = next(self.batches).to(self.device, non_blocking=True)  # from pinned memory
        self.waited += time.perf_counter() - began
        self.read += 1
        self.watchdog.progress(step, self.first_doing if is_first else "computing", slow=is_first)
        return tokens


def train_step(
    forward: nn.Module,
    optimizer: optim.Optimizer,
    batches: Iterator[Tensor],
    step: int,
    grad_accum_steps: int = 1,
    grad_sync: str = "batch",
    measure: bool = False,
) -> dict:
    """Train on one global batch. The host queues the work and does not wait for the device.

    `forward` is the model, or DDP around it; `batches` yields this rank's micro-batches (B, T + 1);
    a step takes grad_accum_steps. Returns the columns of a log row: numbers, and 0-d tensors on the
    device; `measure` adds "parameters", an optim.ParameterTable.
    """
    n = grad_accum_steps
    loss = 0
    for micro_step in range(n):
        tokens = next(batches)  # (B, T + 1)
        with dist.gradient_sync(forward, grad_sync, is_last=micro_step == n - 1):
            # Mean over the micro-batch / n: summed over micro-batches and averaged over ranks, it
            # is the mean over the global batch.
            micro_loss = forward(tokens[:, :-1], tokens[:, 1:]) / n
            micro_loss.backward()  # in the last one, DDP and FSDP average the gradients
        loss = loss + micro_loss.detach()
    # Clip, set the learning rate of this step, update
    return {"loss": loss, **optimizer.step(step, measure)}


# --------------------------------------------------------------------------------------------------
# Evaluation, saving and the end


@torch.no_grad()
def evaluate(
    forward: nn.Module, val_batches: list[tuple[int, Tensor]], watchdog: Watchdog, step: int
) -> float:
    """The mean loss over the fixed validation set, in nats per token.

    Every rank takes part in every forward, with weight 0 once it has no sequences left.
    """
    device = next(forward.parameters()).device
    total = torch.zeros((), device=device)
    watchdog.progress(step, "evaluating", slow=True)  # the first forward may compile
    with eval_mode(forward):
        for weight, tokens in val_batches:
            tokens = tokens.to(device)
            total += forward(tokens[:, :-1], tokens[:, 1:]) * weight
            watchdog.progress(step, "evaluating")
    # Under tp all ranks of a group count each of their sequences, in the loss and in the number.
    count = sum(weight for weight, _ in val_batches)
    sums = torch.stack((total.double(), total.new_tensor(count, dtype=torch.float64)))
    torch.distributed.all_reduce(sums)
    loss, sequences = sums.tolist()
    return loss / sequences


def save(
    setup: Setup, state: State, manifest: dict, saver: Saver, loss: float, watchdog: Watchdog
) -> None:
    """Save a checkpoint, or start saving it with --async_save.

    Refuses if it is not finite. If the weights of ranks have drifted apart, the run ends.
    """
    watchdog.progress(state.step, "saving", slow=True)
    if not is_finite(state.tensors["model"], loss):
        saver.refuse(state.step, "the loss or a weight is not finite")
        return
    sums = dist.on_all_ranks(agreement.sum_bits, state.tensors["model"])
    if difference := agreement.compare_replicas(state.tensors["model"], sums):
        saver.refuse(state.step, f"{difference}: check these devices", ends_run=True)
        return
    tokens = state.step * setup.tokens_per_step
    saver.save(state.tensors, {"step": state.step, "tokens": tokens, **manifest})


def is_finite(weights: dict[str, Tensor], loss: float) -> bool:
    """Whether the last loss and all weights are finite, on all ranks."""
    # A sum is not finite if a term is not; isfinite() of each takes 20 times as long on a CPU.
    sums = [optim.local(weight).sum() for weight in weights.values()]
    finite = torch.stack(sums).isfinite().all().float()
    torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
    return math.isfinite(loss) and finite.item() == 1


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection on one rank delays all of them: the loop collects on all at once."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def report_stop(c: Config, step: int, log: metrics.Log) -> int:
    """Say that a run stopped before its end; return the exit status."""
    continues = "" if c.checkpoint == "none" else "; the same command continues"
    line = f"stopped after step {step}{continues}"
    log.say(line)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # once in the report of each host's torchrun
        cli.write_root_cause(line)
    # 75 tells a scheduler to try again. With torchrun --max-restarts, which would retry at once,
    # return 0.
    will_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    return 0 if will_restart else os.EX_TEMPFAIL


def main(argv: list[str]) -> int:
    slurm.read_slurm()
    end_with_launcher()
    return cli.execute("train.py", command, argv)


if __name__ == "__main__":
    # `record` puts the traceback of an unexpected error into torchrun's report.
    sys.exit(record(main)(sys.argv[1:]))
