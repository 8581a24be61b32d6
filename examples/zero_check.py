"""Check the functions of zero.py: what they compute, hold and send."""

import os
import sys
import time
import traceback
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as td
from torch.multiprocessing.reductions import StorageWeakRef

import __main__ as zero  # zero.py, or a copy of it

rank, n = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
# Names since torch 2.13, which warns of the older ones
all_gather = getattr(td, "all_gather_single", td.all_gather_into_tensor)
reduce_scatter = getattr(td, "reduce_scatter_single", td.reduce_scatter_tensor)


class Group:
    """torch's collectives, with counters.

    They work on copies, because torch's threads still hold a tensor for a moment after the result
    has arrived, and because only a rank that waits should see an all_reduce's sum.
    """

    def __init__(self):
        self.start_step()

    def start_step(self):
        self.sent = 0  # bytes, by isend
        self.handed = self.ring = 0  # bytes handed to torch, bytes that a rank of a ring sends
        self.calls = Counter()
        self.waiting = self.overlapped = 0  # all_reduces on their way, full layers made meanwhile
        self.rows = 0  # of the input of a layer
        self.full = {"weights": [], "gradients": []}  # references to full layers
        self.most = {"weights": 0, "gradients": 0}  # full layers that existed at one time

    def count(self, name, tensor, passes=1):
        self.calls[name] += 1
        self.handed += tensor.nbytes
        self.ring += passes * (n - 1) * tensor.nbytes // n

    def note(self, kind, tensor):
        self.full[kind].append(StorageWeakRef(tensor.untyped_storage()))
        alive = sum(not reference.expired() for reference in self.full[kind])
        self.most[kind] = max(self.most[kind], alive)
        self.overlapped += self.waiting > 0
        return tensor

    def isend(self, tensor, to):
        self.sent += tensor.nbytes
        return td.isend(tensor, to)

    def start_all_reduce(self, tensor):
        self.count("all_reduce", tensor, passes=2)
        self.waiting += 1
        total = tensor.clone()
        work = td.all_reduce(total, async_op=True)

        def wait():
            work.wait()
            self.waiting -= 1
            tensor.copy_(total)

        return SimpleNamespace(wait=wait)

    def all_reduce(self, tensor):
        self.start_all_reduce(tensor).wait()

    def reduce_scatter(self, tensor):
        self.count("reduce_scatter", tensor)
        part = torch.empty(tensor.numel() // n)
        reduce_scatter(part, tensor.flatten().clone())
        return part

    def all_gather(self, shard):
        full = torch.empty(n * shard.numel())
        self.count("all_gather", full)
        all_gather(full, shard.flatten())
        return self.note("weights", full.view(n, -1).clone())


group = Group()


def say(line):
    if rank == 0:
        print(line, flush=True)


# --------------------------------------------------------------------------------------------------
# The ring

DEVICE = Path("/proc/net/dev")
ELEMENTS = 240 * 16_666  # 16 MB


def on_the_wire():
    """Return the bytes that this machine's processes have sent each other; 0 if not on Linux."""
    return int(DEVICE.read_text().split("lo:")[1].split()[8]) if DEVICE.exists() else 0


def count(name, rounds, collective, *tensors):
    """Print the predicted and the counted bytes on the wire for each rank. Return the result."""
    before = on_the_wire()
    td.barrier()
    result = collective(*tensors)
    td.barrier()
    counted = f" {(on_the_wire() - before) / n / 1e6:.1f} MB"
    if not DEVICE.exists():
        counted = ": only Linux counts bytes of the loopback device"
        if collective is zero.all_reduce:
            counted = f" {group.sent / 1e6:.1f} MB"
    predicted = rounds * 4 * ELEMENTS / n
    say(f"{name:21} predicted {predicted / 1e6:.1f} MB, counted{counted}")
    return result


def check_ring():
    values = torch.arange(ELEMENTS) % 1000.0  # whole numbers: their sums are exact
    ours, total = values * (rank + 1), values * (n * (n + 1) / 2)
    part = total.view(n, -1)[rank].clone()
    came = zero.exchange(torch.tensor([float(rank)]))
    assert came == (rank - 1) % n, f"exchange gives rank {rank} the chunk of rank {came.item():.0f}"
    is_right = part.equal(zero.reduce_scatter(ours))
    assert is_right, f"reduce_scatter gives rank {rank} the wrong part or sum"
    assert ours.equal(values * (rank + 1)), "reduce_scatter changes its tensor"
    assert total.equal(zero.all_gather(part)), f"all_gather gives rank {rank} the wrong parts"
    group.start_step()
    result = count("ring by hand", 2 * (n - 1), zero.all_reduce, ours)
    assert total.equal(result), f"all_reduce gives rank {rank} the wrong sum"
    formula = 2 * (n - 1) * ours.nbytes // n
    assert group.sent == formula, f"{group.sent:,} bytes are sent, the formula says {formula:,}"
    count("torch, all_reduce", 2 * (n - 1), td.all_reduce, ours)
    count("torch, all_gather", n - 1, all_gather, ours, part)
    count("torch, reduce_scatter", n - 1, reduce_scatter, part, ours)


# --------------------------------------------------------------------------------------------------
# The stages

STEPS = 5


def on_one_rank(weights, xs, ys):
    """Train on one rank with autograd. Yield the gradients and weights of each step."""
    weights, moments = weights.clone(), torch.zeros(2, *weights.shape)
    for step, (x, y) in enumerate(zip(xs, ys), start=1):
        weights.requires_grad_()
        for weight in weights:
            x = (x @ weight).tanh()
        (gradients,) = torch.autograd.grad(((x - y) ** 2).mean(), weights)
        weights = weights.detach()
        zero.adamw(weights, gradients, moments, step)
        yield gradients, weights


def own_shard(tensor):
    """Return part `rank` of n of each layer."""
    return tensor.view(len(tensor), n, -1)[:, rank]


def held(tensors):
    """Return the bytes of the memory that contains the tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def expect(what, found, formula):
    assert found == formula, f"{found:,} {what}, the formula says {formula:,}"


def compare(what, tensors, expected, tolerance):
    """Compare this rank's layers, full or shards, with one rank's.

    Return the largest difference, relative to the largest element of one rank's.
    """
    own = torch.stack([tensor.reshape(-1) for tensor in tensors])  # LAYERS x L or L / n
    largest = expected.abs().max()
    is_full = own.shape[1] == zero.L
    expected = expected.view(zero.LAYERS, -1) if is_full else own_shard(expected)
    ratio = (own * expected).sum() / (expected**2).sum()
    assert own.any(), f"{what} of rank {rank} are still 0"
    if abs(ratio - 1) > 0.01 and (own - ratio * expected).abs().max() < 1e-5 * largest:
        hint = "a sum where the mean is needed?" if ratio > 1 else "divided by n twice?"
        raise AssertionError(f"{what} of rank {rank} are {ratio:.2f} times one rank's: {hint}")
    differences = (own - expected).abs().amax(1) / largest
    i, worst = differences.argmax(), differences.max()
    says = f"{what} of rank {rank} differ from one rank's by {worst:.0e}, most in layer {i}"
    assert worst < tolerance, says
    return worst


def check_step(stage, state, gradients, weights):
    """Check what a stage has done in a step. Return the difference from one rank's weights."""
    step = f"step {state.step}"
    assert group.waiting == 0, f"{step}: {group.waiting} all_reduces were not waited for"
    rows = zero.ROWS if stage is zero.one_rank else zero.ROWS // n
    assert group.rows == rows, f"rank {rank} trains on {group.rows} rows, its part has {rows}"
    is_zero1 = stage is zero.zero1  # only its own shard of the gradients is a mean
    own = own_shard(state.gradients) if is_zero1 else state.gradients
    compare(f"{step}: the gradients", own, gradients, 1e-5)
    if stage is not zero.zero3:
        of_rank_0 = state.weights.clone()
        td.broadcast(of_rank_0, 0)
        difference = (state.weights - of_rank_0).abs().max()
        td.all_reduce(difference, td.ReduceOp.MAX)
        assert difference == 0, f"the ranks' weights differ after {step}, by {difference:.0e}"
    worst = compare(f"after {step} the weights", state.weights, weights, 1e-6)
    *held_bytes, handed, overlapped, calls = zero.STAGES[stage]
    for kind, formula in zip(("weights", "gradients", "moments"), held_bytes):
        expect(f"bytes of {kind} on a rank", held(getattr(state, kind)), formula)
    dropped = {zero.zero2: ["gradients"], zero.zero3: ["weights", "gradients"]}
    for kind in dropped.get(stage, []):  # the one in use and the next, which replaces it
        most = group.most[kind]
        assert most <= 2, f"the full {kind} of {most} layers exist at one time, 2 are enough"
    expect("bytes handed to torch in a step", group.handed, handed)
    expect("gradients made while an all_reduce is on its way", group.overlapped, overlapped)
    found = ", ".join(f"{count} {name}" for name, count in sorted(group.calls.items())) or "none"
    assert found == calls, f"the collectives of a step are {found}, the formula says {calls}"
    return worst


def check(stage):
    """Take five steps with a stage, check each of them, and print the stage's line."""
    torch.manual_seed(0)
    full = torch.randn(zero.LAYERS, zero.D, zero.D) / zero.D**0.5
    xs, ys = torch.randn(2, STEPS, zero.ROWS, zero.D)
    sizes = zip(zero.STAGES[stage], (4 * zero.P, 4 * zero.P, 8 * zero.P))
    weights, gradients, moment = (
        full if size == whole else own_shard(full) for size, whole in sizes
    )
    state = SimpleNamespace(weights=weights.clone(), gradients=torch.zeros(gradients.shape))
    state.moments = torch.zeros(2, *moment.shape)
    worst = torch.zeros(())
    for i, expected in enumerate(on_one_rank(full, xs, ys)):
        group.start_step()
        state.step = i + 1
        stage(state, xs[i], ys[i])
        worst = torch.maximum(worst, check_step(stage, state, *expected))
    td.all_reduce(worst, td.ReduceOp.MAX)
    counts = (sum(zero.STAGES[stage][:3]), group.handed, group.ring)
    holds, handed, sends = (f"{count / 1e3:.1f} kB" for count in counts)
    line = f"state {holds} a rank, handed to torch {handed} a step, a ring sends {sends}"
    say(f"{stage.__name__:15} {line}   equal to one rank's weights within {worst:.0e}")


# --------------------------------------------------------------------------------------------------
# The command


def explain(error):
    """Return one line: a failed check, or an error with its line in the stage or the ring."""
    written = ["exchange", "reduce_scatter", "all_gather", "all_reduce"]
    written += [stage.__name__ for stage in zero.STAGES]
    frames = traceback.extract_tb(error.__traceback__)
    file = os.path.abspath(zero.__file__)
    in_file = [frame for frame in frames if os.path.abspath(frame.filename) == file]
    lines = [frame.lineno for frame in in_file if frame.name in written]
    if not lines and isinstance(error, AssertionError):
        return str(error)
    place = f"line {lines[-1]}: " if lines else ""
    if "gloo" in str(error):  # the rank waited too long, or another rank ended
        return f"{place}no answer: do all ranks make the same calls in the same order?"
    return place + traceback.format_exception_only(error)[0].splitlines()[0]


def main(names):
    """Check the stages `names`, or all. Return the exit status. torchrun prints one to stderr."""
    stages = {stage.__name__: stage for stage in zero.STAGES}
    if {*names} - {"ring", *stages} or n == 1 or 240 % n:
        usage = f"usage: torchrun --standalone --nproc_per_node 4 {sys.argv[0]}"
        say(f"{usage} [{'] ['.join(['ring', *stages])}], with 2, 3, 4, 5, 6 or 8 ranks")
        time.sleep(3 if rank else 0)  # rank 0 prints first, before torchrun ends all
        return 2
    store, _, _ = next(td.rendezvous("env://"))
    limit = timedelta(seconds=20)
    td.init_process_group("gloo", store=store, rank=rank, world_size=n, timeout=limit)
    for name in names or ["ring", *stages]:
        try:
            check_ring() if name == "ring" else check(stages[name])
        except Exception as error:
            if store.add("failed", 1) == 1:  # the first rank prints, before torchrun ends all
                print(f"{name}: {explain(error)}", flush=True)
            else:
                time.sleep(1)
            os._exit(1)
    td.destroy_process_group()
    return 0
