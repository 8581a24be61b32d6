"""Repeat one step of a run, to find the text behind a spike, or the module with the first nan.

python -m tools.replay runs/mine
python -m tools.replay runs/mine 4120
torchrun --standalone --nproc_per_node 4 -m tools.replay runs/mine 4120

Without STEP, lists the spikes in the log. One process can repeat a step of any mesh up to rounding.
As many ranks as the run had repeat it bit for bit on CPUs. Nothing is written.
"""

import functools
import itertools
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median, stdev

import torch
import torch.distributed
from torch import Tensor, nn

import checkpoint
import config
import data
import dist
import errors
import optim
import tokenizer
from config import Config, Run
from errors import UsageError
from log import say
from model import ModelConfig
from sample import newest_checkpoint
from start import Origin, Start, open_source, open_start
from tools.common import read_log, relative_difference
from train import State, build, empty_model, load, micro_batches, train_step

ROWS, DEVIATIONS = 20, 5  # a spike is DEVIATIONS x stdev above the median of the ROWS before it
SEQUENCES, CHARACTERS = 20, 200  # that are shown; of a sequence's text
# One process computes the micro-batches of all ranks.
ALONE = dict(strategy="single", dp_shard=1, tp=1, grad_sync="batch", compile=False)

# --------------------------------------------------------------------------------------------------
# The log


def describe_spikes(out: Path, rows: list[dict]) -> Iterator[str]:
    """Yield a line for each training row with a spike of the loss, or after skipped updates."""
    skipped = last_step = 0
    for i, row in enumerate(rows):
        step, loss = row["step"], row["loss"]
        before = [earlier["loss"] for earlier in rows[max(0, i - ROWS) : i]]
        before = list(filter(math.isfinite, before))
        limit = math.inf
        if len(before) == ROWS:
            limit = median(before) + DEVIATIONS * stdev(before)
        found = []
        if not loss <= limit:  # also if loss is nan
            found.append(f"loss {loss:.4f}, above {limit:.4f}")
        if row["skipped_steps"] > skipped:
            count = row["skipped_steps"] - skipped
            found.append(f"updates skipped after step {last_step}: {count}")
        if found:
            yield f"step {step}: {', '.join(found)}: python -m tools.replay {out} {step}"
        skipped, last_step = row["skipped_steps"], step


# --------------------------------------------------------------------------------------------------
# The run up to the step


def start_of(starts: list[dict], step: int) -> dict:
    """Return the row of the start that trained `step`. Raises UsageError if there is none."""
    earlier = [start for start in starts if start["step"] < step]
    if not earlier:
        raise UsageError(f"step {step} is in the run whose checkpoint this one began with")
    return earlier[-1]


def find_origin(out: Path, start: dict, step: int) -> Origin:
    """Return the newest checkpoint before `step`, or no checkpoint for the initial weights.

    Raises UsageError if another start, whose flags may differ, did the steps from there on, and
    CheckpointError if the checkpoint is damaged.
    """
    saved = [path for path in checkpoint.list_checkpoints(out) if checkpoint.step_of(path) < step]
    origin = Origin()
    if saved:
        path = newest_checkpoint(saved[-1])  # after verifying it
        origin = Origin(path, step=checkpoint.step_of(path))
    if origin.step < start["step"] or (not saved and start["config"]["init_from"]):
        raise UsageError(
            f"{out} has no checkpoint from step {start['step']}, where training started, or from "
            f"later, before step {step}: give a later step"
        )
    return origin


def open_run(out: Path, row: dict, step: int, world: dist.World) -> tuple[Run, Start]:
    """Open the run of a start, whose row this is, on as many ranks or on one. All ranks call it.

    Raises UsageError if the data, the step or the ranks are not the run's, and CheckpointError.
    """
    flags = row["config"] | {"profile": None}
    source = open_source(flags["data"])
    if source.fingerprint != row["data"]:
        raise UsageError(f"{out} was trained on other tokens than --data {flags['data']} has now")
    if step > flags["max_steps"]:
        raise UsageError(f"{out} ends with step {flags['max_steps']}: give a step up to that")
    if world.size == 1:
        flags |= ALONE
    elif world.size != row["ranks"]:
        raise UsageError(f"{out} ran on {row['ranks']} ranks: start as many, or one process")
    model_config = ModelConfig.from_dict(row["model"])
    run = config.resolve(Config(**flags), world, source, model_config)
    origin = dist.on_rank0(find_origin, out, row, step)
    return run, open_start(run, origin, source, world)


def reach(step: int, run: Run, start: Start) -> tuple[State, list[Tensor]]:
    """Take the steps before `step`; return the state, and this rank's micro-batches of `step`."""
    origin = start.origin
    state = build(run, start.mesh, empty_model(run))
    load(state, start)
    say(f"step {step} of {run.out}, from {origin.path or 'the initial weights'} on")
    batches = micro_batches(run, start, origin.step)
    for state.step in range(origin.step + 1, step):
        lr = optim.learning_rate(state.step, run)
        train_step(state, batches, run, lr)
    state.step = step
    return state, list(itertools.islice(batches, run.grad_accum_steps))


# --------------------------------------------------------------------------------------------------
# What a step shows


def show(run: Run, start: Start, step: int, logged: dict) -> None:
    """Repeat a step, and print what it shows. `logged` is its row, or empty."""
    state, micro_batches = reach(step, run, start)
    losses = sequence_losses(state, micro_batches, run, start)
    columns, _ = train_step(state, iter(micro_batches), run, optim.learning_rate(step, run))
    # As in a row of the log, where the loss is the mean over ranks
    found = {"loss": fmean(dist.on_all_ranks(columns["loss"].item))}
    found["grad_norm"] = columns["grad_norm"].item()
    for name, value in found.items():
        line = f"{name} {value:.9g}"
        if name in logged:
            difference = relative_difference(value, logged[name])
            line += f", logged {logged[name]:.9g}: a relative difference of {difference:.2g}"
        say(line)
    say("loss, share of the batch's, sequence:")
    total = sum(losses.values())
    # Those that are not finite come first.
    ranked = sorted(losses.items(), key=lambda item: (math.isfinite(item[1]), -item[1]))
    for sequence, loss in ranked[:SEQUENCES]:
        say(f"  {loss:.4g} {loss / total:.1%} {sequence}")
    if not all(map(math.isfinite, found.values())):  # so the update was skipped
        say(*find_non_finite(state, micro_batches, run))


@torch.no_grad()
def sequence_losses(
    state: State, micro_batches: list[Tensor], run: Run, start: Start
) -> dict[str, float]:
    """Return the losses of the sequences of all ranks, before the update. All ranks call it.

    Their names are their numbers and how their texts begin: "sequence 7: 'To be'".
    """
    place = dist.dp_rank(start.mesh), run.dp_size
    steps = range(state.step, state.step + 1)
    batches = data.train_indices(steps, run.global_batch_size, run.micro_batch_size, *place)
    local_losses = {}
    state.model.eval()
    for indices, tokens in zip(batches, micro_batches):
        for n, sequence in zip(indices, tokens.split(1)):  # (1, T + 1)
            beginning = sequence[0, :CHARACTERS].tolist()
            text = "".join(tokenizer.decode(start.source.tokenizer, beginning))
            loss = state.model(sequence[:, :-1], sequence[:, 1:]).item()
            local_losses[f"sequence {n}: {text[:CHARACTERS]!r}"] = loss
    state.model.train()
    losses = {}
    for of_rank in dist.on_all_ranks(local_losses.copy):
        losses |= of_rank  # equal on the ranks of a tp group
    return losses


def find_non_finite(state: State, micro_batches: list[Tensor], run: Run) -> list[str]:
    """Repeat a step that is skipped; report the first modules that make a non-finite value.

    In forward it is the first whose output is not finite; in backward, the first that makes a
    non-finite gradient of its inputs from a finite one of its outputs. All ranks call it.
    """
    turns = itertools.count()
    found = {"forward": [], "backward": []}  # (turn, module)

    def after_forward(name: str, module: nn.Module, inputs: tuple, output: object) -> None:
        turn = next(turns)
        if not is_finite(output):
            found["forward"].append((turn, name))

    def after_backward(name: str, module: nn.Module, of_inputs: tuple, of_outputs: tuple) -> None:
        turn = next(turns)
        if is_finite(*of_outputs) and not is_finite(*of_inputs):
            found["backward"].append((turn, name))

    for name, module in state.decoder.named_modules():
        module.register_forward_hook(functools.partial(after_forward, name))
        module.register_full_backward_hook(functools.partial(after_backward, name))
    with warnings.catch_warnings(action="ignore"):  # about tokens without a gradient
        train_step(state, iter(micro_batches), run, lr=0.0)
    lines = []
    for direction, of_rank in found.items():
        firsts = itertools.chain(*dist.on_all_ranks(of_rank.copy))
        _, name = min(firsts, default=(0, "none"))
        lines.append(f"first not finite in {direction}: {name}")
    return lines


def is_finite(*values: object) -> bool:
    """Whether all tensors among the values are finite, in this rank's parts."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    return all(optim.local(tensor).isfinite().all() for tensor in tensors)


# --------------------------------------------------------------------------------------------------
# The command


def command(argv: list[str]) -> None:
    parser = errors.Parser(prog="tools.replay", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run folder, for example runs/mine")
    add("step", metavar="STEP", nargs="?", type=errors.number(int, 1), help="the step to repeat")
    args = parser.parse_args(argv)
    starts, rows = read_log(args.run / "metrics.jsonl")
    if not starts:
        raise UsageError(f"{args.run} is not the folder of a run that has started")
    rows = [row for row in rows if "loss" in row]
    if args.step is None:
        nothing = f"no spike and no skipped update in {len(rows)} training rows"
        print(*(list(describe_spikes(args.run, rows)) or [nothing]), sep="\n")
        return
    row = start_of(starts, args.step)
    logged = next((row for row in rows if row["step"] == args.step), {})
    world = dist.join("cpu" if row["config"]["device"] == "cpu" else "auto")
    try:
        run, start = open_run(args.run, row, args.step, world)
        show(run, start, args.step, logged)
    finally:
        torch.distributed.destroy_process_group()


def main(argv: list[str]) -> int:
    return errors.execute("tools.replay", command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
