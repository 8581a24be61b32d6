"""Train a language model. The file follows a run in order, from its flags to its last checkpoint.

    torchrun --standalone --nproc_per_node 2 train.py --strategy fsdp

Start with `command`, `train` and `train_step`. Where to look for the rest:

    the learning rate and its default          optim.learning_rate, config.compute_defaults
    gradient clipping, the weight update       optim.CLIPS, optim.Optimizer.step
    attention, the loss                        model.Attention, model.Head
    how gradients are averaged over ranks      dist.gradient_sync
    which rank reads which sequences           data.train_indices; packing: the docstring of data.py
    loading a checkpoint on another mesh       checkpoint.load_state
    log rows and tokens/s without host syncs   log.Log.row
    the flags, and values derived from them    config.Config, config.resolve
    FSDP units                                 config.choose_wrap, layout.fsdp_units
    tensor parallelism, tied embeddings        model.Transformer.tensor_parallel_plan
    how the ranks find each other              dist.start
    a rank that dies or hangs                  runtime.watchdog.Watchdog
    adding an optimizer, model field, column   docs/forking.md
"""

import contextlib
import functools
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

if __name__ == "__main__":
    # torch reads these variables on import. They silence the profiler's log and C++ warnings about
    # failed collectives, which are less informative than the watchdog's message.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # FSDP allocates on four streams, which share no blocks: expandable segments leave no gaps.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name of the same variable
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor.parallel import loss_parallel

import checkpoint
import config
import data
import dist
import errors
import layout
import optim
from config import Run
from log import Log, has_ended, is_due, read_starts, replace_file
from model import Transformer, eval_mode
from runtime import agreement, startup_lines
from runtime.profiling import Profiler
from runtime.saver import Saver
from runtime.tracker import open_tracker
from runtime.watchdog import SLOW_FACTOR, Watchdog
from start import (
    Lock,
    Start,
    compare,
    compare_ranks,
    find_start,
    hold_lock,
    open_data,
    refuse_shared_sequences,
)

# --------------------------------------------------------------------------------------------------
# The run


def command(argv: list[str]) -> int:
    """Resolve the command line into a run; train or evaluate it; return the exit status."""
    typed = config.parse(argv)
    dist.refuse_other_launchers()
    # Collectives get more time: a rank may wait in one while another rank compiles or saves.
    collective_timeout = timedelta(seconds=SLOW_FACTOR * typed.timeout)
    join_timeout = timedelta(seconds=typed.timeout)
    world = dist.start(typed.device, collective_timeout, join_timeout, lazy=True)
    # If a rank dies or hangs, the watchdog ends all ranks. torchrun --max-restarts or a scheduler
    # restarts them, and they continue from the latest valid checkpoint.
    watchdog = Watchdog(world.store, world.rank, world.size, typed.timeout)
    # Under tp each rank has part of the logits; loss_parallel() computes the loss from the parts.
    with contextlib.ExitStack() as held, watchdog, loss_parallel():
        gc.disable()  # a collection on one rank delays all: the loop collects on all ranks at once
        held.callback(gc.enable)
        lock = None
        typed = dist.on_rank0(config.parse, argv)  # all ranks use rank 0's flags
        if not typed.eval_only:  # an evaluation may run during training
            hold = hold_lock(Path(typed.out), typed.timeout)
            lock = dist.on_rank0(held.enter_context, hold)  # rank 0 holds it until the end
        start = find_start(argv, world)
        machine = dist.find_machine(world)
        folders = open_data(start.given.data)
        notes = compare_ranks(argv, folders)  # lines to print at the start
        facts = data.facts_of(folders)
        run = dist.on_rank0(
            config.resolve, start.given, machine, facts, start.kept, start.model_config
        )
        changes = dist.on_rank0(compare, start, run, folders[0])
        notes += [f"changed: {change}" for change in changes]
        notes += startup_lines.describe_learning_rate(run, start)
        # Refuse hardware that only emulates bfloat16, unless --dtype was given.
        if run.dtype == "bfloat16" and not run.eval_only and start.given.dtype == "auto":
            with dist.raise_on_all_ranks():
                dist.refuse_emulated_bfloat16(world)
        options = {"lock": lock, "on_exit": held.push}
        status = train(run, start, folders, world, watchdog, notes, **options)
        torch.distributed.barrier()  # a rank that leaves earlier would look dead to the others
    torch.distributed.destroy_process_group()
    return status


def train(
    run: Run,
    start: Start,
    folders: list[data.TokenFolder],
    world: dist.World,
    watchdog: Watchdog,
    notes: Iterable[str] = (),
    handle_signals: bool = True,
    after_load: Callable[["State"], None] | None = None,
    lock: Lock | None = None,
    on_exit: Callable[[Callable], None] | None = None,
) -> int:
    """Build and load the model, then train, evaluate and save; return the exit status.

    `notes` are printed at the start. `after_load` (for tools.check) is called with the state,
    before the ranks compare their weights. If the folder of the `lock` that rank 0 holds is moved,
    the run ends before it writes. `on_exit`, an ExitStack's push, registers a function that writes
    to the log with which error the run ends.

    In a step the host queues work and does not wait for the device. Batches are copied from pinned
    memory, gradients are clipped and updates skipped by tensors on the device (optim.Optimizer),
    ranks agree on a stop one step late, through CPU tensors (StopRequest), and log rows are copied
    asynchronously (log.Log). An .item(), a print or an `if` on a device tensor would make the
    host wait. It waits only for an evaluation, a save, the end of the run, statistics for
    optim.jsonl, another host more than a step behind and, with --log_interval 1, the previous row.
    """
    began = time.monotonic()
    is_done = start.step >= run.max_steps
    if is_done and dist.on_rank0(has_ended, Path(run.out), start.step, run.max_steps):
        startup_lines.say(world, startup_lines.describe_no_steps(run, start, notes))
        return 0

    # The model on the mesh, with initial or loaded weights
    mesh = dist.make_mesh(world, run.mesh_shape)
    state, forward = build(run, mesh)
    load(state, start, mesh, watchdog)
    if after_load:
        after_load(state)

    # The data; no sequence is read twice, and all ranks have the same weights
    train_data = data.open_dataset(folders, "train", run.seq_len, run.seed)
    val_data = data.open_dataset(folders, "val", run.seq_len, seed=None)
    count = min(run.eval_sequences, len(val_data))
    val_indices = list(
        data.val_indices(
            count, len(val_data), run.micro_batch_size, dist.dp_rank(mesh), run.dp_size
        )
    )
    with dist.raise_on_all_ranks():  # read once: a damaged file ends the run before its first step
        # A rank without sequences evaluates sequence 0 with weight 0: forward is collective.
        val_batches = [(len(indices), val_data[indices or [0]]) for indices in val_indices]
    first_indices = val_indices
    if not run.eval_only:
        first_indices = local_train_indices(run, mesh, range(state.step + 1, state.step + 2))
    refuse_shared_sequences(mesh, itertools.chain.from_iterable(first_indices))
    if difference := agreement.compare_replicas(state.tensors["model"]):
        raise errors.UsageError(f"{difference}: start all ranks with the same code and data")
    if run.eval_only:
        val_loss = evaluate(forward, val_batches, watchdog, state.step)
        startup_lines.say(world, startup_lines.describe_evaluation(run, start, val_loss, val_data))
        return 0
    lines = startup_lines.describe_start(run, start, world, state.model, train_data.parts, notes)
    startup_lines.say(world, lines)
    if run.dry_run:
        return 0

    # From here on, the run writes to its folder
    out = Path(run.out)
    send = None
    if run.tracker != "none":
        with dist.raise_on_all_ranks():
            if world.rank == 0:
                send = open_tracker(out, run.manifest["config"], read_starts(out))
    with dist.raise_on_all_ranks():
        if world.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            text = json.dumps(run.manifest["given"], indent=2) + "\n"
            replace_file(out / "config.json", text)
    stop_request = agreement.StopRequest(world, handle_signals)  # signals end the run after a step
    tokenizer_file = folders[0].tokenizer_file
    saver = Saver(out, run.async_save, run.keep_last, run.keep_every, world.timeout, tokenizer_file)
    batches = MicroBatches(run, mesh, train_data, watchdog, start.step)
    flops_per_token = state.model.flops_per_token(run.seq_len)
    is_lost = lock.is_lost if lock else None
    since = (state.step, state.tokens, began)
    log = Log(out, run, world.device, flops_per_token, *since, send, is_lost)
    log.start(dist.describe_ranks(world) | run.manifest | {"notes": [*notes]})
    if on_exit:
        on_exit(functools.partial(record_failure, log, state))
    profiler = None
    if run.profile:
        window = config.profile_window(run.profile)
        profiler = Profiler(window, out / "profile", mesh, log.say, [stop_request, saver])

    if world.device.type == "cpu":
        dist.keep_freed_memory()
    stop = False
    if is_done:  # but for the last evaluation, which a signal has ended
        val_loss = evaluate(forward, val_batches, watchdog, state.step, stop_request)
        stop = val_loss is None
        if not stop:
            log.evaluation(state.step, val_loss)
    for step in range(start.step + 1, run.max_steps + 1):
        state.step = step
        state.tokens += run.tokens_per_step
        lr = optim.learning_rate(step, run)
        measure = is_due(step, run.optim_metrics_interval)
        with profiler.step(step, batches.waited) if profiler else contextlib.nullcontext():
            columns, table = train_step(
                forward,
                state.optimizer,
                batches,
                step,
                lr,
                run.grad_accum_steps,
                run.grad_sync,
                measure,
            )
        is_last = step == run.max_steps
        # True if rank 0 knew of a stop request one step ago. All ranks stop after the same step.
        stop = stop_request.poll()
        evaluates = not stop and (is_last or is_due(step, run.eval_interval))
        saves = is_last or stop or is_due(step, run.save_interval)
        is_first = step == start.step + 1
        log.write_arrived_row()  # the row of an earlier step
        if is_first or evaluates or saves or is_due(step, run.log_interval):
            log.row(step, state.tokens, **columns, spread={"data_wait": batches.take_wait()})
        if table and world.rank == 0:
            log.parameters(step, table.rows())  # waits for the device
        if evaluates or saves:
            with log.pause():
                if evaluates:
                    val_loss = evaluate(forward, val_batches, watchdog, step, stop_request)
                    stop = val_loss is None
                    if not stop:
                        log.evaluation(step, val_loss)
                # After the evaluation, since a run that resumes here does not evaluate again.
                if (saves or stop) and run.checkpoint != "none":
                    save(run, state, saver, columns["mean"]["loss"], watchdog, lock)
        if saver.rows:
            log.checkpoints(saver.take_rows())
        if stop or saver.ends_run:
            break
        if log.has_lost:  # as after a signal, all ranks stop after the same step
            stop_request.signalled = True
        if step % 100 == 0:
            gc.collect(1)  # on all ranks in the same step

    # The end
    if lock:
        dist.on_rank0(lock.raise_if_lost)
    watchdog.progress(state.step, "saving", slow=True)
    saver.wait()
    log.checkpoints(saver.take_rows())
    if saver.failure:
        raise checkpoint.CheckpointError(saver.failure)
    log.flush()  # on a GPU, the last row is still pending after a stop without a save
    if stop:
        return report_stop(run, state.step, log)
    log.end(state.step, "finished")
    if run.sample_tokens:
        from sample import closing_sample

        watchdog.progress(state.step, "sampling", slow=True, status=0)  # 0: the run is complete
        text = closing_sample(forward, folders[0], run, world, watchdog)
        log.say(f"{' sample ':-^80}\n{text}\n{'-' * 80}")
    return 0


# --------------------------------------------------------------------------------------------------
# Before the first step


@dataclass
class State:
    """What a step changes and a checkpoint stores."""

    step: int  # the last finished step, or the one in progress
    model: Transformer
    optimizer: optim.Optimizer | None  # None with --eval_only
    # This rank's shards, which checkpoints save and load. They are collected before the first
    # forward, because after an evaluation the parameters of FSDP's root are full weights.
    tensors: dict
    tokens: int = 0  # of all steps


def build(
    run: Run,
    mesh: dist.DeviceMesh,
    model: Transformer | None = None,
    init_weights: bool = True,
) -> tuple[State, nn.Module]:
    """Build the model with its initial weights and the optimizer, on the mesh.

    Return the state and the module that a step calls. `model`, by default a new one, is on the meta
    device. `init_weights`: see layout.place.
    """
    model = model or layout.empty_model(run)
    forward = layout.place(model, mesh, run, init_weights)
    tensors = {"model": {name: weight.detach() for name, weight in model.named_parameters()}}
    optimizer = None
    if not run.eval_only:
        optimizer = optim.Optimizer(model.named_parameters(), model.decays, run, model.is_hidden)
        tensors["optimizer"] = optimizer.state()
    torch.cuda.empty_cache()  # frees the full tensors that the shards were cut from; no-op on CPUs
    return State(0, model, optimizer, tensors), forward


def load(state: State, start: Start, mesh: dist.DeviceMesh, watchdog: Watchdog) -> None:
    """Load this run's starting checkpoint, if any; with --init_from or --eval_only, its weights."""
    if start.path:
        weights = {"model": state.tensors["model"]}
        tensors = weights if start.only_weights else state.tensors
        replicas = mesh.get_group("dp_replicate")
        progress = functools.partial(watchdog.progress, start.step, "loading", slow=True)
        with dist.raise_on_all_ranks():
            checkpoint.load_state(start.path, tensors, replicas=replicas, progress=progress)
    state.step, state.tokens = start.step, start.tokens


def local_train_indices(run: Run, mesh: dist.DeviceMesh, steps: range) -> Iterator[list[int]]:
    """Yield the sequence indices of each of this rank's micro-batches in `steps`."""
    return data.train_indices(
        steps, run.global_batch_size, run.micro_batch_size, dist.dp_rank(mesh), run.dp_size
    )


# --------------------------------------------------------------------------------------------------
# One step


class MicroBatches:
    """An iterator over this rank's micro-batches (B, T + 1), on its device, from start_step + 1 on.

    Their order depends only on (seed, step). `waited` counts the seconds spent waiting for them.
    """

    def __init__(
        self,
        run: Run,
        mesh: dist.DeviceMesh,
        train_data: data.TokenDataset | data.Mixture,
        watchdog: Watchdog,
        start_step: int,
    ):
        indices = local_train_indices(run, mesh, range(start_step + 1, run.max_steps + 1))
        is_cuda = mesh.device_type == "cuda"
        self.batches = data.loader(train_data, indices, run.num_workers, pin=is_cuda)
        self.run = run
        self.watchdog = watchdog
        self.start_step = start_step
        self.read = 0
        self.waited = 0.0
        self.waited_before = 0.0  # `waited` at the last call of take_wait

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        step = self.start_step + self.read // self.run.grad_accum_steps  # steps done
        self.watchdog.progress(step, "reading data")
        began = time.perf_counter()
        tokens = next(self.batches).to(self.run.device, non_blocking=True)  # from pinned memory
        self.waited += time.perf_counter() - began
        self.read += 1
        is_first = step == self.start_step  # the first step allocates memory and may compile
        doing = "compiling" if is_first and self.run.compile else "computing"
        self.watchdog.progress(step, doing, slow=is_first)
        return tokens

    def take_wait(self) -> float:
        """Return the seconds waited since the last call."""
        waited, self.waited_before = self.waited - self.waited_before, self.waited
        return waited


def train_step(
    forward: nn.Module,
    optimizer: optim.Optimizer,
    batches: Iterator[Tensor],
    step: int,
    lr: float,
    grad_accum_steps: int = 1,
    grad_sync: str = "batch",
    measure: bool = False,
) -> tuple[dict, optim.ParameterTable | None]:
    """Train on one global batch. The host queues the work and does not wait for the device.

    `forward` is the model, or DDP around it. `batches` yields this rank's micro-batches (B, T + 1);
    a step reads grad_accum_steps of them. `lr` is the learning rate of the step. Return the columns
    of a log row (see log.Log.row) and, if `measure`, statistics of each parameter.
    """
    n = grad_accum_steps
    loss = 0
    for micro_step in range(n):
        tokens = next(batches)  # (B, T + 1)
        with dist.gradient_sync(forward, grad_sync, is_last=micro_step == n - 1):
            # The mean over the micro-batch, divided by n. Its sum over micro-batches, averaged over
            # ranks, is the mean over the global batch.
            micro_loss = forward(tokens[:, :-1], tokens[:, 1:]) / n
            micro_loss.backward()  # in the last micro-batch, this averages gradients over ranks
        loss = loss + micro_loss.detach()
    # Clip and update the weights
    update = optimizer.step(step, lr, measure)
    table = update.pop("parameters", None)
    return {"mean": {"loss": loss}, "equal": update}, table


# --------------------------------------------------------------------------------------------------
# Evaluation, saving and the end


@torch.no_grad()
def evaluate(
    forward: nn.Module,
    val_batches: list[tuple[int, Tensor]],
    watchdog: Watchdog,
    step: int,
    stop_request: agreement.StopRequest | None = None,
) -> float | None:
    """Return the mean loss over the fixed validation set, in nats per token.

    Every rank takes part in every forward, with weight 0 once it has no sequences left. Returns
    None on all ranks after the batch in which one of them got a signal to stop.
    """
    device = next(forward.parameters()).device
    total = torch.zeros((), device=device)
    watchdog.progress(step, "evaluating", slow=True)  # the first forward may compile
    with eval_mode(forward):
        for weight, tokens in val_batches:
            tokens = tokens.to(device)
            total += forward(tokens[:, :-1], tokens[:, 1:]) * weight
            watchdog.progress(step, "evaluating")
            if stop_request and stop_request.agree():
                return None
    # Under tp, all ranks of a group add the same sequences to both sums, so the ratio is right.
    count = sum(weight for weight, _ in val_batches)
    sums = torch.stack((total.double(), total.new_tensor(count, dtype=torch.float64)))
    torch.distributed.all_reduce(sums)
    loss, sequences = sums.tolist()
    return loss / sequences


def save(
    run: Run,
    state: State,
    saver: Saver,
    loss: Tensor,
    watchdog: Watchdog,
    lock: Lock | None = None,
) -> None:
    """Save a checkpoint; with --async_save, start to save it.

    Do not save if this rank's `loss`, 0-d, or a weight is not finite. If replicas of a weight
    differ between ranks, do not save, and end the run. Raises RunError if the folder of the `lock`
    has been moved.
    """
    watchdog.progress(state.step, "saving", slow=True)
    if lock:
        dist.on_rank0(lock.raise_if_lost)
    if not is_finite(state.tensors["model"], loss):
        saver.refuse(state.step, "the loss or a weight is not finite")
        return
    if difference := agreement.compare_replicas(state.tensors["model"]):
        saver.refuse(state.step, f"{difference}: check these devices", ends_run=True)
        return
    progress = {"step": state.step, "tokens": state.tokens}
    saver.save(state.tensors, progress | run.manifest)


def is_finite(weights: dict[str, Tensor], loss: Tensor) -> bool:
    """Whether the losses and weights of all ranks are finite."""
    # A sum is not finite if an element is not. isfinite() on every element is 20x slower on a CPU.
    sums = [optim.local(weight).sum() for weight in weights.values()]
    finite = torch.stack([*sums, loss]).isfinite().all().float()
    torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
    return finite.item() == 1


def report_stop(run: Run, step: int, log: Log) -> int:
    """Print that the run stopped before its last step; return the exit status."""
    continues = "" if run.checkpoint == "none" else "; the same command continues"
    line = f"stopped after step {step}{continues}"
    log.say(line)
    log.end(step, "stopped")
    if os.environ.get("LOCAL_RANK", "0") == "0":  # torchrun's report on each host shows it once
        errors.write_root_cause(line)
    # Status 75 (EX_TEMPFAIL) asks a scheduler to start the run again. With --max-restarts, torchrun
    # would restart a failed run at once: then return 0.
    will_restart = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    return 0 if will_restart else os.EX_TEMPFAIL


def record_failure(log: Log, state: State, kind: type | None, error, traceback) -> None:
    """Write to the log that the run has failed, if it has. For an ExitStack."""
    if kind and issubclass(kind, Exception):  # not the Ctrl-C that ends a run at once
        log.end(state.step, "failed", str(error).partition("\n")[0])


def main(argv: list[str]) -> int:
    return errors.execute("train.py", command, argv)


if __name__ == "__main__":
    # `record` adds the traceback of an unexpected error to torchrun's report.
    sys.exit(record(main)(sys.argv[1:]))
