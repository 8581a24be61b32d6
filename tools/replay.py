"""Repeat one step of a run, to find the text behind a spike, or the module with the first nan.

python -m tools.replay runs/mine
python -m tools.replay runs/mine 4120
torchrun --standalone --nproc_per_node 4 -m tools.replay runs/mine 4120

Without STEP, lists the spikes in the log. One process can repeat a step of any mesh up to rounding.
As many ranks as the run had repeat it bit for bit on CPUs. Nothing is written.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean, median, stdev

import torch
import torch.distributed
from torch import Tensor, nn

import checkpoint
import data
import dist
import errors
import optim
import tokenizer
from checkpoint import CheckpointError
from errors import UsageError
from prepare import plural
from tools import common
from tools.common import Origin, Run, State, flag_value, say
from tools.measuring.runs import read_rows, read_starts, relative_difference

ROWS, DEVIATIONS = 20, 5  # a spike is DEVIATIONS x stdev above the median of the ROWS before it
SHOWN = 20  # sequences and parameters
CHARACTERS = 200  # of a sequence's text
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
            count = plural(row["skipped_steps"] - skipped, "update")
            found.append(f"{count} skipped after step {last_step}")
        if found:
            yield f"step {step}: {', '.join(found)}: python -m tools.replay {out} {step}"
        skipped, last_step = row["skipped_steps"], step


def start_of(starts: list[dict], step: int) -> dict:
    """Return the last start before `step`, which trained it. Raises UsageError without one."""
    earlier = [start for start in starts if start["step"] < step]
    if not earlier:
        first = min(start["step"] for start in starts)
        raise UsageError(
            f"step {step} is in another run: this one began with its checkpoint of step {first}; "
            "give that run, or a later step"
        )
    return earlier[-1]


# --------------------------------------------------------------------------------------------------
# The run up to the step


@dataclass
class Step:
    """A step that is about to be taken."""

    run: Run
    state: State
    micro_batches: list[Tensor]  # of this rank, (B, T + 1)

    def take(self, measure: bool = False) -> tuple[dict[str, Tensor], list[dict]]:
        """Take the step as train.py does: see common.train_step."""
        lr = optim.learning_rate(self.state.step, self.run)
        return common.train_step(self.state, iter(self.micro_batches), self.run, lr, measure)


class Replay:
    """A run and its data, on as many ranks as the run had, or on one.

    Raises UsageError if the data, the step or the number of ranks does not match the run.
    """

    def __init__(self, args: argparse.Namespace, starts: list[dict], world: dist.World):
        self.out = args.run
        self.starts = starts
        self.world = world
        start = start_of(starts, args.step)
        path = args.data or start["config"]["data"]
        self.source = common.open_source(path)
        if self.source.fingerprint != start["data"]:
            raise UsageError(
                f"{path} has the fingerprint {self.source.fingerprint}, and {self.out} was trained "
                f"on {start['config']['data']} with {start['data']}: give its data with --data"
            )
        run = self.resolve(start)
        if args.step > run.max_steps:
            raise UsageError(f"{self.out} ends with step {run.max_steps}: give a step up to that")
        self.start = common.open_start(run, Origin(), self.source, world)
        batch, steps = run.global_batch_size, range(args.step, args.step + 1)
        (indices,) = data.train_indices(steps, batch, batch, dp_rank=0, dp_size=1)
        self.sequences = describe_sequences(self.start, indices)

    def resolve(self, start: dict) -> Run:
        """Return the run of a start on these ranks. Raises UsageError."""
        flags = common.recorded_flags(self.out, start) | {"profile": None}
        if self.world.size == 1:
            flags |= ALONE
        elif self.world.size != start["ranks"]:
            raise UsageError(
                f"{self.out} ran on {plural(start['ranks'], 'rank')} after step {start['step']}, "
                f"not on {self.world.size}: start as many, or one process without torchrun"
            )
        recorded = common.recorded_model(self.out, start)
        return common.resolve(flags, self.world, self.source, recorded)

    def segments(self, first: int, last: int) -> list[tuple[Run, list[int]]]:
        """Group the steps `first` to `last` by the start that trained them: (its run, steps)."""
        trained_by = functools.partial(start_of, self.starts)
        by_start = itertools.groupby(range(first, last + 1), trained_by)
        return [(self.resolve(start), list(steps)) for start, steps in by_start]

    def begin(self, last: int, step_time: float | None) -> State:
        """Build the model with weights from before step `last`: of a checkpoint, or initial ones.

        Prints the number of steps to take and how long they should take: `step_time` seconds for
        each step and each of the ranks that one process stands for. Passes over a checkpoint that
        is damaged, or that the run removes meanwhile. Raises UsageError if no weights are left.
        """
        turns = start_of(self.starts, last)["ranks"] // self.world.size
        world = self.world
        passed_over = set()
        while True:
            saved = dist.on_rank0(checkpoint.list_checkpoints, self.out)  # a live run saves more
            saved = [path for path in saved if checkpoint.step_of(path) < last]
            path = next((path for path in reversed(saved) if path not in passed_over), None)
            step = checkpoint.step_of(path) if path else 0
            origin = Origin(path, step=step)
            first = self.starts[0]
            if not path and (first["step"] > 0 or first["config"].get("init_from")):
                raise UsageError(
                    f"{self.out} began with the weights of another run, and has no checkpoint "
                    f"from before step {last}: give a later step"
                )
            (run, _), *_ = self.segments(step + 1, last)  # resolves all: it may refuse one
            try:
                if path:
                    problems = dist.on_all_ranks(checkpoint.verify, path, world.rank, world.size)
                    if any(problems):
                        raise CheckpointError(next(filter(None, problems)))
                count = last - step
                distance = f"{plural(count, 'step')} after {path or 'the initial weights'}"
                estimate = "time unknown: the log has no row"
                if step_time:
                    estimate = f"about {count * turns * step_time:,.0f} s, the log's "
                    estimate += f"{step_time:.3g} s a step x {plural(turns, 'rank')}"
                say(f"step {last} of {self.out}: {distance}, {estimate}")
                state = common.build(run, self.start.mesh, common.empty_model(run))
                common.load(state, dataclasses.replace(self.start, origin=origin))
                return state
            except (CheckpointError, OSError, dist.RankError) as error:
                say(f"passed over {path}: {error}")
                passed_over.add(path)

    def steps(self, last: int, step_time: float | None) -> Iterator[Step]:
        """Yield the steps up to `last`, each to be taken before the next; see `begin`."""
        state = self.begin(last, step_time)
        for i, (run, steps) in enumerate(self.segments(state.step + 1, last)):
            if i > 0:  # the run continued here, perhaps with other flags
                source = dict(checkpoint.flatten(state.tensors))
                state = common.build(run, self.start.mesh, common.empty_model(run))
                for name, tensor in checkpoint.flatten(state.tensors):
                    optim.local(tensor).copy_(optim.local(source[name]))
            batches = common.micro_batches(run, self.start, steps[0] - 1)
            for state.step in steps:
                micro_batches = list(itertools.islice(batches, run.grad_accum_steps))
                yield Step(run, state, micro_batches)


# --------------------------------------------------------------------------------------------------
# What a step shows


def describe_sequences(start, indices: list[int]) -> dict[int, str]:
    """Return index -> how the text of a sequence begins.

    `start` is what common.open_start returns. Raises TokenizerError.
    """
    sequences = {}
    for n in indices:
        (tokens,) = start.train_data[[n]].tolist()
        text = ""
        for piece in tokenizer.decode(start.source.tokenizer, tokens):
            text += piece
            if len(text) >= CHARACTERS:
                break
        sequences[n] = f"sequence {n}: {text[:CHARACTERS]!r}"
    return sequences


def repeat(replay: Replay, last: int, rows: list[dict]) -> None:
    """Repeat the steps up to `last`, and print what step `last` shows. `rows` are the log's."""
    step_time = median(row["step_time"] for row in rows) if rows else None
    for step in replay.steps(last, step_time):
        number = step.state.step
        if number < last:
            columns, _ = step.take()
            if columns["skipped_in_a_row"] > 0:
                say(f"step {number}: its update is skipped")
    indices = common.local_train_indices(step.run, replay.start.mesh, range(last, last + 1))
    losses = sequence_losses(step, indices)
    columns, parameters = step.take(measure=True)
    losses_of_ranks = dist.on_all_ranks(columns["loss"].item)
    found = {"loss": fmean(losses_of_ranks)}  # as in a row of the log
    found["grad_norm"] = columns["grad_norm"].item()
    row = next((row for row in rows if row["step"] == last), {})
    for name, value in found.items():
        logged = ""
        if name in row:
            difference = relative_difference(value, row[name])
            logged = f", logged {row[name]:.9g}: a relative difference of {difference:.2g}"
        say(f"{name} {value:.9g}{logged}")
    total = sum(losses.values())
    shares = {
        n: f"{loss / total:.1%} {loss:.4f} {replay.sequences[n]}" for n, loss in losses.items()
    }
    say("share of the loss, loss, sequence:", *largest(losses, shares))
    norms = {row["parameter"]: row["grad_norm"] for row in parameters}
    lines = {name: f"{norm:.4g} {name}" for name, norm in norms.items()}
    say("norm of the gradient, parameter:", *largest(norms, lines))
    if not all(map(math.isfinite, found.values())):
        say(*find_non_finite(step))  # the update was skipped: the weights are the same


@torch.no_grad()
def sequence_losses(step: Step, indices: Iterator[list[int]]) -> dict[int, float]:
    """Return index -> loss of the sequences of all ranks, before the update. All ranks call it."""
    local_losses = {}
    step.state.model.eval()
    for numbers, tokens in zip(indices, step.micro_batches):
        for n, sequence in zip(numbers, tokens.split(1)):  # (1, T + 1)
            local_losses[n] = step.state.model(sequence[:, :-1], sequence[:, 1:]).item()
    step.state.model.train()
    losses = {}
    for of_rank in dist.on_all_ranks(local_losses.copy):
        losses |= of_rank  # equal on the ranks of a tp group
    return losses


def largest(values: dict[object, float], lines: dict[object, str]) -> list[str]:
    """Return the lines of the SHOWN largest values; values that are not finite come first."""
    ranked = sorted(values, key=lambda key: (math.isfinite(values[key]), -values[key]))
    shown = [f"  {lines[key]}" for key in ranked[:SHOWN]]
    left_out = len(ranked) - SHOWN
    return [*shown, f"  and {left_out} more"] if left_out > 0 else shown


def find_non_finite(step: Step) -> list[str]:
    """Repeat a step that is skipped; report the first modules that make a non-finite value.

    In forward it is the first whose output is not finite; in backward, the first that makes a
    non-finite gradient of its inputs from a finite one of its outputs. Collective, over all ranks.
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

    for name, module in step.state.decoder.named_modules():
        module.register_forward_hook(functools.partial(after_forward, name))
        module.register_full_backward_hook(functools.partial(after_backward, name))
    with warnings.catch_warnings(action="ignore"):  # about tokens without a gradient
        step.take()
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
# The command line


def parse(argv: list[str]) -> argparse.Namespace:
    parser = errors.Parser(prog="tools.replay", description=__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run folder, for example runs/mine")
    add("step", metavar="STEP", nargs="?", type=errors.number(int, 1), help="the step to repeat")
    add("--data", metavar="DIR", help="the run's data, if it has moved")
    return parser.parse_args(argv)


def run(argv: list[str]) -> None:
    args = parse(argv)
    starts = read_starts(args.run)
    rows = [row for row in read_rows(args.run / "metrics.jsonl") if "loss" in row]
    if args.step is None:
        nothing = f"no spike and no skipped update in {plural(len(rows), 'training row')}"
        print(*(list(describe_spikes(args.run, rows)) or [nothing]), sep="\n")
        return
    values = start_of(starts, args.step)["config"]
    device = "cpu" if flag_value(values, "device") == "cpu" else "auto"
    world = dist.start(device, timedelta(seconds=flag_value(values, "timeout")))
    try:
        with dist.name_lost_rank(world):
            replay = Replay(args, starts, world)
            repeat(replay, args.step, rows)
    finally:
        torch.distributed.destroy_process_group()


def main(argv: list[str]) -> int:
    return errors.execute("tools.replay", run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
