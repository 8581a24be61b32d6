"""Train a language model: torchrun --standalone --nproc_per_node 2 train.py --strategy fsdp

One step of two ranks with fsdp, which gathers the weights of one unit at a time (--wrap): a block,
several blocks or, for a small model, all. Between steps each rank holds half of every tensor.

    forward    per unit: all_gather the weights, compute, free them (but not the last and the root)
    backward   per unit: all_gather the weights, unless kept, compute, free them;
               in the last micro-batch: reduce_scatter the gradients
    update     norms of the halves: one small all_reduce; clip; each rank updates its halves
"""

import contextlib
import gc
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

# Before torch is imported: FSDP allocates on four streams, which share no blocks, and expandable
# segments leave no gaps between them.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor, nn

import checkpoint
import config
import data
import dist  # ours; torch's is spelled torch.distributed
import errors
import optim
from config import Run
from errors import import_extra
from log import COLUMNS, Log, say
from model import Transformer, generate, meta_model
from start import Start, describe_start, start_run, write_config

# Most functions take a run, a state and a start:
#
#     run      the flags, and what follows from them (config.py)
#     state    what a step changes
#     start    this process's rank and device, the mesh, the data, the checkpoint (start.py)


@dataclass
class State:
    """What a step changes. A checkpoint stores step, tokens and tensors."""

    step: int  # the last finished step, or the one in progress
    tokens: int  # of all steps
    model: nn.Module  # what a step calls: the decoder, or DDP around it
    decoder: Transformer
    optimizer: optim.Optimizer | None  # None with --eval_only
    tensors: dict  # weights and state of the optimizer, as in a checkpoint: see `build`
    data_wait: float = 0.0  # seconds for which the host waited for batches, since the last row


def train_step(
    state: State, batches: Iterator[Tensor], run: Run, lr: float, measure: bool = False
) -> tuple[dict[str, Tensor], list[dict]]:
    """Train on one global batch. The host queues the work and does not wait for the device.

    `batches` yields this rank's micro-batches (B, T + 1). Returns columns of a log row, 0-d tensors
    of which the log takes the mean over ranks, and what Optimizer.step returns to `measure`.
    """
    n = run.grad_accum_steps
    loss = 0
    columns: dict[str, Tensor] = defaultdict(float)  # that modules of a fork compute
    for micro_step in range(n):
        began = time.perf_counter()
        tokens = next(batches)  # (B, T + 1)
        state.data_wait += time.perf_counter() - began
        with dist.gradient_sync(state.model, run.grad_sync, is_last=micro_step == n - 1):
            # The mean over the micro-batch, divided by n. Its sum over micro-batches, averaged over
            # ranks, is the mean over the global batch.
            micro_loss = state.model(tokens[:, :-1], tokens[:, 1:]) / n
            micro_loss.backward()  # in the last micro-batch, this averages gradients over ranks
        loss = loss + micro_loss.detach()
        for name, value in state.decoder.columns().items():
            columns[name] = columns[name] + value / n
    update, rows = state.optimizer.step(state.step, lr, measure)  # clips and clears gradients
    if taken := columns.keys() & {"loss", *update, *COLUMNS}:
        raise errors.UsageError(f"rows have a column {min(taken)}: rename that of the model")
    return {"loss": loss, **update, **columns}, rows


@torch.no_grad()
def evaluate(
    state: State, val_batches: list[tuple[int, Tensor]], stop: dist.StopRequest | None = None
) -> float | None:
    """Return the mean loss over the fixed validation set, in nats per token.

    Every rank takes part in every forward: once it has no sequences left, it computes sequence 0
    with weight 0. Returns None on all ranks soon after one of them got a signal to stop.
    """
    total = count = 0
    state.model.eval()
    for weight, tokens in val_batches:
        total = total + weight * state.model(tokens[:, :-1], tokens[:, 1:])
        count += weight
        if stop and stop.poll():
            return None
    state.model.train()
    # Under tp, all ranks of a group add the same sequences to both sums, so the ratio is right.
    sums = torch.stack((total.double(), total.new_tensor(count, dtype=torch.float64)))
    torch.distributed.all_reduce(sums)
    loss, sequences = sums.tolist()
    return loss / sequences


def train(state: State, run: Run, start: Start, held: contextlib.ExitStack) -> int:
    """Train from the state's step to max_steps, evaluate and save; return the exit status.

    In a step the host queues work and does not wait for the device. Batches are copied from pinned
    memory, gradients are clipped and updates skipped by tensors on the device (optim.Optimizer),
    ranks agree on a stop one step late, through CPU tensors (dist.StopRequest), and log rows are
    copied asynchronously (log.Log). An .item(), a print or an `if` on a device tensor would make
    the host wait.
    """
    batches = micro_batches(run, start, state.step)
    log = Log(run, start.world.device, state.decoder.flops_per_token(), state.step)
    saver = open_saver(run, start, log)
    held.callback(saver.wait)  # also after an error, before the next start may have the folder
    stop = dist.StopRequest(start.world)
    profiled = profile_steps(run, start, in_flight=[stop, saver])
    write_start(run, start, log)  # until here, only the lock is in the run folder
    first_step = state.step + 1
    saved_step = state.step
    stopped = False
    # A start makes up the evaluation of the step that it continues from, if the log has none.
    evaluates = not start.is_evaluated and evaluation_is_due(state.step, run)
    while not stopped:
        if evaluates:
            with log.pause():
                val_loss = evaluate(state, start.val_batches, stop)
            if val_loss is not None:  # no signal has ended it
                log.evaluation(state.step, val_loss)
            stopped = val_loss is None
        if stopped or state.step >= run.max_steps:
            break
        state.step += 1
        state.tokens += run.tokens_per_step
        lr = optim.learning_rate(state.step, run)
        measures = is_due(state.step, run.optim_metrics_interval)
        with profiled(state.step):
            columns, rows = train_step(state, batches, run, lr, measures)
        # True if any rank had got a signal one step ago: all ranks stop after this step.
        stopped = stop.poll()

        evaluates = evaluation_is_due(state.step, run)
        saves = stopped or state.step == run.max_steps or is_due(state.step, run.save_interval)
        log.write_arrived_row()
        if evaluates or saves or state.step == first_step or is_due(state.step, run.log_interval):
            log.row(state.step, state.tokens, lr, columns, state.data_wait)
            state.data_wait = 0.0
        if measures:
            log.append("optim.jsonl", [{"step": state.step, **row} for row in rows])
        if saves:
            with log.pause():
                save(state, run, saver)
            saved_step = state.step
        if state.step % 100 == 0:
            gc.collect(1)  # on all ranks in the same step
    if saved_step < state.step:  # a signal has ended an evaluation
        save(state, run, saver)
    saver.close()
    stop.close()
    if not stopped and run.sample_tokens:
        print_sample(state, run, start)
    return report_stop(state.step, saves=run.keep_last > 0) if stopped else 0


def report_stop(step: int, saves: bool) -> int:
    """Print that the run stopped early, as it was asked to; return the exit status."""
    say(f"stopped after step {step}" + ("; the same command continues" if saves else ""))
    # 75 (EX_TEMPFAIL) asks a scheduler to start the run again. torchrun --max-restarts would
    # restart a failed run at once.
    restarts_failures = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
    return 0 if restarts_failures else os.EX_TEMPFAIL


def is_due(step: int, interval: int) -> bool:
    """Whether something is due that happens every `interval` steps; 0: never."""
    return interval > 0 and step % interval == 0


def evaluation_is_due(step: int, run: Run) -> bool:
    return step == run.max_steps or is_due(step, run.eval_interval)


# --------------------------------------------------------------------------------------------------
# The parts of a run


def build(run: Run, mesh: dist.DeviceMesh, decoder: Transformer, init: bool = True) -> State:
    """Lay out a model of `empty_model` on the mesh, with initial weights and the optimizer."""
    kept = dist.KEPT_OPERATIONS
    if run.tp > 1:
        extra = import_extra("tensor_parallel", f"--tp {run.tp}")
        extra.split(decoder, mesh["tp"])
        kept = extra.kept_results(run.model_config, run.tp)
    init_tensor = partial(decoder.init_tensor, seed=run.seed) if init else None
    model = dist.parallelize(decoder, mesh, run, init_tensor, run.compute_dtype, kept)
    # Before the first forward: after an evaluation, the parameters of FSDP's root are full weights.
    tensors = {"model": {name: weight.detach() for name, weight in decoder.named_parameters()}}
    optimizer = None
    if not run.eval_only:
        shape = (run.micro_batch_size, run.seq_len)  # as in train_step
        tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device_type)
        dist.warm_up_ddp(model, tokens, tokens)
        rules = [optim.AdamW]  # the first one that takes a parameter updates it
        if run.optimizer == "muon":
            rules.insert(0, import_extra("muon", "--optimizer muon").Muon)
        optimizer = optim.Optimizer(decoder.named_parameters(), decoder.decays, run, rules)
        tensors["optimizer"] = optimizer.state()
    torch.cuda.empty_cache()  # frees the full tensors that the shards were cut from; no-op on CPUs
    return State(0, 0, model, decoder, optimizer, tensors)


def empty_model(run: Run) -> Transformer:
    """Return the model of a run, with the loss of its flags, on the meta device."""
    model = meta_model(run.model_config, run.compute_dtype)
    if run.loss_chunks > 1:
        extra = import_extra("chunked_loss", f"--loss_chunks {run.loss_chunks}")
        model.head.loss = extra.ChunkedLoss(model.head.loss, run.loss_chunks)
    return model


def load(state: State, start: Start) -> None:
    """Load the start's checkpoint, if any; with --init_from or --eval_only, only its weights."""
    origin = start.origin
    state.step, state.tokens = origin.step, origin.tokens
    if origin.path:
        wanted = {"model": state.tensors["model"]} if origin.only_weights else state.tensors
        dist.on_all_ranks(checkpoint.load_state, origin.path, wanted)


def micro_batches(run: Run, start: Start, step: int) -> Iterator[Tensor]:
    """Yield this rank's micro-batches (B, T + 1), on its device, of all steps after `step`.

    Which sequences a step reads depends only on the seed, the global batch size and the step.
    """
    steps = range(step + 1, run.max_steps + 1)
    part = dist.dp_rank(start.mesh), run.dp_size
    indices = data.train_indices(steps, run.global_batch_size, run.micro_batch_size, *part)
    device = start.world.device
    for tokens in data.read_ahead(start.train_data, indices, pin=device.type == "cuda"):
        yield tokens.to(device, non_blocking=True)  # from pinned memory


def write_start(run: Run, start: Start, log: Log) -> None:
    """Write config.json, with the flags as given, and the log's row of this start."""
    dist.on_rank0(write_config, run)
    if run.tracker == "wandb":
        dist.on_rank0(log.open_wandb)
    facts = {"ranks": start.world.size, "device": start.world.device_name, "notes": start.notes}
    log.start(facts | run.manifest)


def open_saver(run: Run, start: Start, log: Log) -> checkpoint.Saver:
    options = dict(
        run=Path(run.out),
        keep_last=run.keep_last,
        keep_every=run.keep_every,
        extra_files=start.source.tokenizer_files | start.origin.extra_files,
        report=log.write,
    )
    if not run.async_save:
        return checkpoint.Saver(on_all_ranks=dist.on_all_ranks, **options)
    extra = import_extra("async_save", "--async_save")
    return extra.AsyncSaver(start.world.timeout, **options)


def profile_steps(run: Run, start: Start, in_flight: list) -> Callable:
    """Return the context around step number n: a profiler's, or one that does nothing.

    The profiler starts and stops only after wait() of `in_flight`, which communicate in threads.
    """
    if not run.profile:
        return contextlib.nullcontext
    extra = import_extra("profile", "--profile")
    window = extra.parse_window(run.profile, run.max_steps)
    return extra.Profiler(window, Path(run.out) / "profile", start.mesh, say, in_flight).step


def save(state: State, run: Run, saver: checkpoint.Saver) -> None:
    """Save a checkpoint; with --async_save, start to save it."""
    if run.keep_last == 0:
        return
    # Weights that are not finite would replace better ones. A sum is not finite if an element is
    # not, and on a CPU isfinite() on every element takes 20 times as long.
    sums = torch.stack([optim.local(weight).sum() for weight in state.tensors["model"].values()])
    is_finite = sums.isfinite().all().float()
    torch.distributed.all_reduce(is_finite, op=torch.distributed.ReduceOp.MIN)
    problem = None if is_finite else "a weight is not finite"
    manifest = {"step": state.step, "tokens": state.tokens} | run.manifest
    saver.save(state.tensors, manifest, problem)


def print_sample(state: State, run: Run, start: Start) -> None:
    """Print how the model continues the start of the validation set. All ranks call it."""
    source = start.source
    state.model.eval()
    (sequence,) = start.val_data[[0]].tolist()
    tokens = sequence[: 1 + run.seq_len // 4]
    tokens += generate(
        state.model,
        tokens,
        run.sample_tokens,
        seq_len=run.seq_len,
        vocab_size=source.vocab_size,
        device=start.world.device,
        temperature=0.8,
        multiple=math.lcm(128, run.tp),
    )
    if start.world.rank > 0:
        return
    try:
        import tokenizer

        text = "".join(tokenizer.decode(source.tokenizer, tokens))
    except Exception as error:  # tokenizer.py was deleted, or gpt2 cannot be downloaded
        text = f"no text: {error}"
    say(f"{' sample ':-^80}\n{text}\n{'-' * 80}")


# --------------------------------------------------------------------------------------------------
# The command


def command(argv: list[str]) -> int:
    """Train or evaluate the model of the command line on all ranks; return the exit status."""
    own = config.Config(**config.parse(argv))  # to join the ranks, whose flags are rank 0's
    world = dist.join(own.device, timedelta(seconds=own.timeout))
    with contextlib.ExitStack() as held, dist.name_lost_rank(world):
        gc.disable()  # on one rank it would delay all, so the loop collects on all ranks at once
        held.callback(gc.enable)
        run, start = start_run(argv, world, held)
        status = train_or_evaluate(run, start, held)
    torch.distributed.destroy_process_group()
    return status


def train_or_evaluate(run: Run, start: Start, held: contextlib.ExitStack) -> int:
    """Build and load the model, then train it, or with --eval_only evaluate it."""
    origin = start.origin
    if origin.step > run.max_steps or (origin.step == run.max_steps and start.is_evaluated):
        done = f"{run.out} is finished at step {origin.step}, and --max_steps is {run.max_steps}"
        say(f"{done}: raise it, or choose another --out")
        return 0
    decoder = empty_model(run)
    say(*describe_start(run, start, decoder.parameter_count()))
    state = build(run, start.mesh, decoder, init=origin.path is None)
    load(state, start)
    if run.eval_only:
        val_loss = evaluate(state, start.val_batches)
        say(f"{origin.path} on {run.data}: val_loss {val_loss:.6f}")
        return 0
    if start.world.device.type == "cpu":
        dist.keep_freed_memory()
    return train(state, run, start, held)


def main(argv: list[str]) -> int:
    return errors.execute("train.py", command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
