"""Train a language model: torchrun --standalone --nproc_per_node 2 train.py --strategy fsdp

One step of two ranks with fsdp, which gathers the weights of one unit at a time (--wrap): a block,
several blocks or, for a small model, all. Between steps each rank holds half of every tensor.

    forward    per unit: all_gather the weights, compute, free them (the last unit keeps them)
    backward   per unit: all_gather the weights, unless kept, compute, free them;
               in the last micro-batch: reduce_scatter the gradients
    update     norms of the halves: one small all_reduce; clip; each rank updates its halves
"""

import contextlib
import gc
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import errors  # before torch, which reads the variables when it is imported

if __name__ == "__main__":
    errors.set_torch_variables()

import torch
from torch import Tensor, nn

import checkpoint
import config
import data
import dist  # ours; torch's is spelled torch.distributed
import optim
from config import Run
from log import Diverged, Log, is_due, open_wandb, say
from model import Sampling, Transformer, eval_mode, generate, meta_model
from start import Start, describe_evaluation, local_train_indices, start_run, write_config

# Most functions take a run, a state and a start:
#
#     run      the flags, and what follows from them (config.py)
#     state    what a step changes
#     start    the place of this process, and what it has opened: its rank and device, the mesh, the
#              data, the checkpoint to load (start.py)


@dataclass
class State:
    """What a step changes. A checkpoint stores step, tokens and tensors."""

    step: int  # the last finished step, or the one in progress
    tokens: int  # of all steps
    model: nn.Module  # what a step calls: the decoder, or DDP around it
    decoder: Transformer
    optimizer: optim.Optimizer | None  # None with --eval_only
    tensors: dict  # this rank's shards, by their names in a checkpoint: see `build`
    loss: Tensor | None = None  # 0-d, of this rank's sequences in the last step


def train_step(
    state: State, batches: Iterator[Tensor], run: Run
) -> tuple[dict, optim.ParameterTable | None]:
    """Train on one global batch. The host queues the work and does not wait for the device.

    `batches` yields this rank's micro-batches (B, T + 1). Returns the columns of a log row and,
    when they are due, statistics of parameters.
    """
    n = run.grad_accum_steps
    loss = 0
    logged: dict[str, Tensor] = defaultdict(float)  # columns that modules of a fork compute
    for micro_step in range(n):
        tokens = next(batches)  # (B, T + 1)
        with dist.gradient_sync(state.model, run.grad_sync, is_last=micro_step == n - 1):
            # The mean over the micro-batch, divided by n. Its sum over micro-batches, averaged over
            # ranks, is the mean over the global batch.
            micro_loss = state.model(tokens[:, :-1], tokens[:, 1:]) / n
            micro_loss.backward()  # in the last micro-batch, this averages gradients over ranks
        loss = loss + micro_loss.detach()
        for name, value in state.decoder.logged_values().items():
            logged[name] = logged[name] + value / n
    state.loss = loss
    lr = optim.learning_rate(state.step, run)
    measure = is_due(state.step, run.optim_metrics_interval)
    # Clip the gradients, and update the weights
    update, table = state.optimizer.step(state.step, lr, measure)
    # The log averages the first over ranks; the second are equal on all ranks.
    return {"mean": {"loss": loss, **logged}, "equal": update}, table


@torch.no_grad()
def evaluate(
    state: State, val_batches: list[tuple[int, Tensor]], stop: dist.StopRequest | None = None
) -> float | None:
    """Return the mean loss over the fixed validation set, in nats per token.

    Every rank takes part in every forward: once it has no sequences left, it computes sequence 0
    with weight 0. Returns None on all ranks after the batch in which one of them got a signal to
    stop.
    """
    total = 0.0
    with eval_mode(state.model):
        for weight, tokens in val_batches:
            total = total + weight * state.model(tokens[:, :-1], tokens[:, 1:])
            if stop and stop.agree():
                return None
    # Under tp, all ranks of a group add the same sequences to both sums, so the ratio is right.
    count = sum(weight for weight, _ in val_batches)
    sums = torch.stack((total.double(), total.new_tensor(count, dtype=torch.float64)))
    torch.distributed.all_reduce(sums)
    loss, sequences = sums.tolist()
    return loss / sequences


def train(state: State, run: Run, start: Start) -> int:
    """Train from the state's step to max_steps, evaluate and save; return the exit status.

    In a step the host queues work and does not wait for the device. Batches are copied from pinned
    memory, gradients are clipped and updates skipped by tensors on the device (optim.Optimizer),
    ranks agree on a stop one step late, through CPU tensors (dist.StopRequest), and log rows are
    copied asynchronously (log.Log). An .item(), a print or an `if` on a device tensor would make
    the host wait. It waits only for an evaluation, a save, the end of the run, statistics for
    optim.jsonl, data, another host more than a step behind, and a row that is still on its way
    when the next one is due.
    """
    stop = dist.StopRequest(start.world)
    saver = open_saver(run, start)
    batches = MicroBatches(run, start, state.step)
    step_context = profile_steps(run, start, batches, in_flight=[stop, saver])
    log = open_log(state, run, start)
    with stop, record_failure(state, saver, log):
        first_step = state.step + 1
        stopped = False
        while state.step < run.max_steps and not stopped:
            state.step += 1
            state.tokens += run.tokens_per_step
            with step_context(state.step):
                columns, table = train_step(state, batches, run)
            # True if any rank had a signal one step ago: all ranks stop after this step.
            stopped = stop.poll()

            is_last = state.step == run.max_steps
            evaluates = not stopped and not is_last and is_due(state.step, run.eval_interval)
            saves = stopped or is_last or is_due(state.step, run.save_interval)
            has_row = state.step == first_step or is_due(state.step, run.log_interval)

            # Once in a while: write a row of the log, as soon as its values have arrived.
            log.write_arrived_row()
            if has_row or evaluates or saves:
                columns.setdefault("spread", {})["data_wait"] = batches.take_wait()
                log.row(state.step, state.tokens, **columns)
            if table and start.world.rank == 0:
                log.parameters(state.step, table.rows())  # waits for the device

            # Once in a while: evaluate. A signal ends the evaluation, and the step is saved.
            if evaluates:
                with log.pause():
                    val_loss = evaluate(state, start.val_batches, stop)
                    log.evaluation(state.step, val_loss)
                stopped = val_loss is None

            # Once in a while: save. A run that continues from this checkpoint does not evaluate
            # its step again, so the evaluation comes first.
            if saves or stopped:
                with log.pause():
                    save(state, run, start, saver)
            if saver.rows:
                log.checkpoints(saver.take_rows())

            if state.step % 100 == 0:
                gc.collect(1)  # on all ranks in the same step

        # The end. The last step has been saved: if a signal ends its evaluation, a later start
        # does only that.
        if not stopped:
            with log.pause():
                val_loss = evaluate(state, start.val_batches, stop)
                log.evaluation(state.step, val_loss)
            stopped = val_loss is None
        finish_save(state, start, saver, log)
        if stopped:
            continues = "" if run.checkpoint == "none" else "; the same command continues"
            log.end(state.step, "stopped")
            return errors.report_stop(f"stopped after step {state.step}{continues}")
        log.end(state.step, "finished")
        if run.sample_tokens:
            print_sample(state, run, start)
    return 0


# --------------------------------------------------------------------------------------------------
# The parts of a run


def build(
    run: Run,
    mesh: dist.DeviceMesh,
    decoder: Transformer | None = None,
    init_weights: bool = True,
) -> State:
    """Build the model with its initial weights and the optimizer, on the mesh.

    `decoder` is on the meta device, by default a new one. A rehearsal (tools.plan) gives its own,
    and does without initial weights.
    """
    decoder = decoder or empty_model(run)
    tensor_parallel = None
    if run.tp > 1:
        errors.need_extra("tensor_parallel", f"--tp {run.tp}")
        from extras.tensor_parallel import split as tensor_parallel
    model = dist.place(decoder, mesh, run, tensor_parallel, init_weights)
    # Before the first forward: after an evaluation, the parameters of FSDP's root are full weights.
    tensors = {"model": {name: weight.detach() for name, weight in decoder.named_parameters()}}
    optimizer = None
    if not run.eval_only:
        parameters, rules = decoder.named_parameters(), config.update_rules(run)
        optimizer = optim.Optimizer(parameters, decoder.decays, run, decoder.is_hidden, rules)
        tensors["optimizer"] = optimizer.state()
    torch.cuda.empty_cache()  # frees the full tensors that the shards were cut from; no-op on CPUs
    return State(0, 0, model, decoder, optimizer, tensors)


def empty_model(run: Run) -> Transformer:
    """Return the model on the meta device, where it needs no memory."""
    model = meta_model(run.model_config, run.compute_dtype)
    if run.loss_chunks > 1:
        errors.need_extra("chunked_loss", f"--loss_chunks {run.loss_chunks}")
        from extras.chunked_loss import ChunkedLoss

        model.head.loss = ChunkedLoss(model.head.loss, run.loss_chunks)
    return model


def load(state: State, start: Start) -> None:
    """Load the start's checkpoint, if any; with --init_from or --eval_only, only its weights."""
    origin = start.origin
    state.step, state.tokens = origin.step, origin.tokens
    if origin.path is None:
        return
    replicas = start.mesh.get_group("dp_replicate")
    with dist.raise_on_all_ranks():
        if origin.only_weights:
            checkpoint.load_state(origin.path, {"model": state.tensors["model"]}, replicas)
        else:
            checkpoint.load_state(origin.path, state.tensors, replicas)


class MicroBatches:
    """An iterator over this rank's micro-batches (B, T + 1), on its device, after `step` steps.

    Which sequences a step reads depends only on the seed and the step. `waited` counts the seconds
    spent waiting for them.
    """

    def __init__(self, run: Run, start: Start, step: int):
        indices = local_train_indices(run, start.mesh, range(step + 1, run.max_steps + 1))
        self.device = start.world.device
        is_cuda = self.device.type == "cuda"
        self.batches = data.read_ahead(start.train_data, indices, pin=is_cuda)
        self.waited = 0.0
        self.waited_before = 0.0  # `waited` at the last call of take_wait

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        began = time.perf_counter()
        tokens = next(self.batches).to(self.device, non_blocking=True)  # from pinned memory
        self.waited += time.perf_counter() - began
        return tokens

    def take_wait(self) -> float:
        """Return the seconds waited since the last call."""
        waited, self.waited_before = self.waited - self.waited_before, self.waited
        return waited


def open_log(state: State, run: Run, start: Start) -> Log:
    """Write config.json, with the flags as given, and the log's row of this start.

    Until here, nothing is written to the run folder.
    """
    out = Path(run.out)
    send = None
    if run.tracker == "wandb":
        with dist.raise_on_all_ranks():
            if start.world.rank == 0:
                send = open_wandb(out, run.manifest["config"])
    dist.on_rank0(write_config, run)
    log = Log(
        out,
        run,
        start.world.device,
        flops_per_token=state.decoder.flops_per_token(),
        step=state.step,
        tokens=state.tokens,
        send=send,
    )
    log.start(dist.describe_ranks(start.world) | run.manifest | {"notes": start.notes})
    return log


def open_saver(run: Run, start: Start) -> checkpoint.Saver:
    origin = start.origin
    options = dict(
        run=Path(run.out),
        keep_last=run.keep_last,
        keep_every=run.keep_every,
        extra_files=start.source.tokenizer_file,
        verified=None if origin.only_weights else origin.path,
    )
    if not run.async_save:
        return checkpoint.Saver(**options, on_all_ranks=dist.on_all_ranks)
    errors.need_extra("async_save", "--async_save")
    from extras.async_save import AsyncSaver

    return AsyncSaver(**options, timeout=start.world.timeout)


def profile_steps(run: Run, start: Start, batches: MicroBatches, in_flight: list):
    """Return the context around step number n: a profiler's, or one that does nothing."""
    if not run.profile:
        return contextlib.nullcontext
    errors.need_extra("profile", "--profile")
    from extras.profile import Profiler

    window = config.profile_window(run.profile)
    folder = Path(run.out) / "profile"
    profiler = Profiler(window, folder, start.mesh, say, in_flight, lambda: batches.waited)
    return profiler.step


def save(state: State, run: Run, start: Start, saver: checkpoint.Saver) -> None:
    """Save a checkpoint; with --async_save, start to save it.

    Does not save if the loss of a rank or a weight is not finite.
    """
    if run.checkpoint == "none":
        return
    if not is_finite(state):
        saver.refuse(state.step, "the loss or a weight is not finite")
        return
    saver.save(state.tensors, {"step": state.step, "tokens": state.tokens} | run.manifest)


def is_finite(state: State) -> bool:
    """Whether the losses of the last step and the weights of all ranks are finite."""
    # A sum is not finite if an element is not. isfinite() on every element is 20x slower on a CPU.
    sums = [optim.local(weight).sum() for weight in state.tensors["model"].values()]
    finite = torch.stack([*sums, state.loss]).isfinite().all().float()
    torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN)
    return finite.item() == 1


def finish_save(state: State, start: Start, saver: checkpoint.Saver, log: Log) -> None:
    """Wait for the last save. Raises CheckpointError if it has failed."""
    saver.wait()
    log.checkpoints(saver.take_rows())
    if saver.failure:
        raise checkpoint.CheckpointError(saver.failure)


@contextlib.contextmanager
def record_failure(state: State, saver: checkpoint.Saver, log: Log) -> Iterator[None]:
    """A context that writes the error with which the run fails to the log."""
    try:
        yield
    except Exception as error:  # not the Ctrl-C that ends a run at once
        if isinstance(error, Diverged):  # on all ranks, so they can complete a save that has begun
            saver.wait()
            log.checkpoints(saver.take_rows())
        log.end(state.step, "failed", str(error).partition("\n")[0])
        raise


def print_sample(state: State, run: Run, start: Start) -> None:
    """Print how the model continues the start of the validation set. All ranks call it."""
    try:
        text = sample_text(state, run, start)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        text = f"no text: {reason}; run python sample.py --run {run.out} instead"
    say(f"{' sample ':-^80}\n{text}\n{'-' * 80}")


def sample_text(state: State, run: Run, start: Start) -> str:
    source = start.source
    (sequence,) = dist.on_rank0(start.val_data.__getitem__, [0]).tolist()
    tokens = sequence[: max(1, run.seq_len // 4)]
    size = dict(
        seq_len=run.seq_len, vocab_size=source.vocab_size, device=start.world.device, tp=run.tp
    )
    sampling = Sampling(temperature=0.8)
    tokens += list(generate(state.model, tokens, run.sample_tokens, sampling, **size))
    if not source.tokenizer_file:
        return source.decode(tokens)
    from text import tokenizer

    return "".join(tokenizer.decode(source.tokenizer, tokens))


# --------------------------------------------------------------------------------------------------
# The command


def command(argv: list[str]) -> int:
    """Train or evaluate the model of the command line on all ranks; return the exit status."""
    typed = config.parse(argv)
    dist.refuse_other_launchers()
    world = dist.start(typed.device, timedelta(seconds=typed.timeout))
    with contextlib.ExitStack() as held, dist.name_lost_rank(world):
        gc.disable()  # on one rank it would delay all, so the loop collects on all ranks at once
        held.callback(gc.enable)
        run, start = start_run(argv, world, held, load_mixture)
        status = train_or_evaluate(run, start)
    torch.distributed.destroy_process_group()
    return status


def load_mixture():
    """Return the module for --data with several folders."""
    errors.need_extra("mixture", "--data with several folders")
    from extras import mixture

    return mixture


def train_or_evaluate(run: Run, start: Start) -> int:
    """Build and load the model, then train it, or with --eval_only evaluate it."""
    origin = start.origin
    if start.is_finished(run.max_steps):
        done = f"{run.out} is finished at step {origin.step}, and --max_steps is {run.max_steps}"
        say(f"{done}: raise it, or choose another --out", *indented(start.notes))
        return 0
    if not run.eval_only:
        say(*describe_start(run, start))
    state = build(run, start.mesh, init_weights=origin.path is None)
    load(state, start)
    if run.eval_only:
        val_loss = evaluate(state, start.val_batches)
        say(describe_evaluation(run, start, val_loss))
        return 0
    if run.dry_run:
        say("--dry_run: all is ready for the first step; nothing was written")
        return 0
    if start.world.device.type == "cpu":
        dist.keep_freed_memory()
    return train(state, run, start)


def describe_start(run: Run, start: Start) -> list[str]:
    """Return the lines on model, mesh, dtype, batch, data and checkpoint."""
    world, origin = start.world, start.origin
    lines = [
        f"model   {run.model}: {run.n_layer} layers x {run.d_model} wide, vocabulary "
        f"{run.model_config.vocab_size:,}: {empty_model(run).parameter_count():,} parameters",
        f"mesh    {run.strategy}: dp_replicate {run.dp_replicate} x dp_shard {run.dp_shard} x "
        f"tp {run.tp} = {world.size} x {run.device} ({dist.device_name(world.device)})",
        f"dtype   {run.dtype}; weights, reductions and optimizer in float32",
        f"batch   {run.global_batch_size} sequences = micro_batch_size {run.micro_batch_size} x "
        f"grad_accum_steps {run.grad_accum_steps} x dp_size {run.dp_size}; "
        f"x {run.seq_len} tokens = {run.tokens_per_step:,} tokens a step",
    ]
    if run.device == "cuda" and not run.compile:
        lines.append(
            "        --compile is off: it fuses elementwise operations, so that steps are faster "
            "after a longer start"
        )
    for line in start.train_data.describe(run.max_steps * run.global_batch_size):
        lines.append(f"data    {line}")
    lines += indented(f"passed over {path}: {why}" for path, why in origin.damaged.items())
    how = "a new run with the weights of" if origin.only_weights else "continuing from"
    lines.append(f"out     {run.out}" + (f", {how} {origin.path}" if origin.path else ""))
    return lines + indented(start.notes)


def indented(lines: Iterable[str]) -> list[str]:
    return [f"        {line}" for line in lines]


def main(argv: list[str]) -> int:
    return errors.execute("train.py", command, argv)


if __name__ == "__main__":
    # It adds the traceback of an unexpected error to torchrun's report.
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(main)(sys.argv[1:]))
