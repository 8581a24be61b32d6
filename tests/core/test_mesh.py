"""A mesh changes where numbers are computed, not the numbers.

ROWS lists meshes with their policies. Every row is trained once, and so is one rank with the same
flags for the numbers. The tests of this file read what these runs have written: the log, the
statistics of each parameter, and checkpoints. They compare the communication of a step with SENT,
and they continue a row from its first checkpoint, also on the mesh of another row.
"""

import functools
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed
from rig import SMALL, Job, Operations, Run, copy_run, full_tensors, run_command
from torch import nn
from torch.utils._pytree import tree_leaves

import checkpoint
from model import Transformer

STEPS, STOP = 6, 3  # a run's last step, and the step of its first checkpoint
SEQUENCES, LENGTH = 16, 16  # of a global batch

BASE = f"--max_steps {STEPS} --global_batch_size {SEQUENCES} --lr 1e-2 --max_grad_norm 1.8"
FILES = f"--save_interval {STOP} --keep_every 1 --optim_metrics_interval 1"

# The sizes of SMALL. The vocabulary of bytes, 257, is rounded up to a multiple of 64.
D, FF, VOCABULARY = 32, 64, 320
BLOCK = 2 * D * D + 2 * D * (D // 2) + 3 * D * FF + 2 * D  # k and v have half as many heads as q
HEAD = VOCABULARY * D
P = HEAD + 2 * BLOCK + D  # tied: the head is the embedding
TENSORS = 1 + 2 * 9 + 1  # the embedding, nine a block, the last norm

# Flags that change the numbers, also on one rank
NUMBERS = {
    "plain": "",
    "bfloat16": "--dtype bfloat16",
    "adaptive": "--clip adaptive --max_grad_norm_ratio 1.05",
    "untied": "--model tinyllama-1.1b",  # SMALL overrides all its sizes, but not its separate head
}
# How much results may differ, relative to their size. At first the gradients of q and k are small
# differences of large numbers, whose rounding errors in bfloat16 show in their statistics.
TOLERANCES = dict.fromkeys(NUMBERS, {"logs": 1e-5, "weights": 3e-5, "statistics": 1e-4})
TOLERANCES["bfloat16"] = {"logs": 1e-2, "weights": 1e-1, "statistics": 2e-1}


class Row(NamedTuple):
    ranks: int
    micro_batches: int  # of a rank, in a step
    numbers: str  # a key of NUMBERS
    flags: str  # of the mesh and its policy: they change no number


FSDP = "--strategy fsdp --wrap block"
HSDP = "--strategy hsdp --wrap block --dp_shard 2"
ROWS = {
    "ddp2-batch": Row(2, 2, "plain", "--strategy ddp --grad_sync batch"),
    "ddp4-micro_batch": Row(4, 4, "plain", "--strategy ddp --grad_sync micro_batch"),
    "fsdp2-none": Row(2, 4, "plain", f"{FSDP} --wrap none --activation_checkpointing full"),
    "hsdp4-shard": Row(4, 2, "plain", f"{HSDP} --grad_sync shard"),
    "hsdp4-bfloat16": Row(4, 2, "bfloat16", f"{HSDP} --grad_sync micro_batch"),
    "fsdp2-adaptive": Row(2, 1, "adaptive", f"{FSDP} --wrap block_group:2"),
    "fsdp2-untied": Row(2, 2, "untied", FSDP),
}
SINGLE = {numbers: Row(1, 1, numbers, "") for numbers in NUMBERS}  # to compare with

each_row = pytest.mark.parametrize("name", ROWS)


# --------------------------------------------------------------------------------------------------
# Runs


def command_of(row: Row) -> str:
    """The flags of a row."""
    size = SEQUENCES // row.ranks // row.micro_batches
    return f"{BASE} --micro_batch_size {size} {NUMBERS[row.numbers]} {row.flags}"


@pytest.fixture(scope="module")
def start(pool, tokens):
    """start(ranks, "FLAGS", out, function): run it on all ranks; return the answer of each."""

    def call(ranks: int, text: str, out: Path, function=run_command) -> list:
        argv = [*SMALL.split(), "--data", str(tokens), "--out", str(out), *text.split()]
        return pool(ranks, function, argv)

    return call


def succeed(answers: list) -> None:
    assert [(status, error) for status, _, error in answers] == [(0, "")] * len(answers)


@pytest.fixture(scope="module")
def trained(start, tmp_path_factory):
    """trained(name): the run of this row of ROWS or SINGLE."""
    root = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train(name: str) -> Run:
        row, out = (ROWS | SINGLE)[name], root / name
        answers = start(row.ranks, f"{command_of(row)} {FILES}", out)
        succeed(answers)
        return Run(out, 0, answers[0][1], "")

    return train


# --------------------------------------------------------------------------------------------------
# The same numbers


def assert_rows(run: Run, expected: Run, relative: float) -> None:
    """Compare all training rows and the last evaluation of two runs."""
    rows, others = run.rows(), expected.rows()
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    for key in ("step", "tokens", "lr", "clipped", "skipped_steps"):
        assert [row[key] for row in rows] == [row[key] for row in others], key
    for key in ("loss", "grad_norm", "val_loss"):
        values = [row[key] for row in expected.rows(key)]
        assert [row[key] for row in run.rows(key)] == pytest.approx(values, rel=relative), key


def assert_weights(run: Run, expected: Run, relative: float) -> None:
    """Compare the weights of the last checkpoints, each as a vector."""
    found, others = run.weights(), expected.weights()
    assert found.keys() == others.keys()
    for name in [name for name in others if name.startswith("model.")]:
        difference = (found[name] - others[name]).norm()
        assert difference <= relative * others[name].norm(), name


NORMS = {
    "weight_norm": "model",
    "exp_avg_norm": "optimizer.exp_avg",
    "exp_avg_sq_norm": "optimizer.exp_avg_sq",
}


@each_row
def test_a_mesh_has_the_numbers_of_one_rank(trained, name):
    """In its log, its checkpoints and its statistics, which describe the checkpoint."""
    run, single = trained(name), trained(ROWS[name].numbers)
    relative = TOLERANCES[ROWS[name].numbers]
    assert_rows(run, single, relative["logs"])
    assert {row["clipped"] for row in run.rows()} == {0, 1}
    assert run.steps() == [STOP, STEPS]
    assert_weights(run, single, relative["weights"])
    rows, others = run.statistics(), single.statistics()
    assert len(rows) == STEPS * (TENSORS + (ROWS[name].numbers == "untied"))
    for row, other in zip(rows, others, strict=True):
        place = row.pop("step"), row.pop("parameter")
        assert place == (other.pop("step"), other.pop("parameter"))
        assert row == pytest.approx(other, rel=relative["statistics"]), place

    last = [row for row in run.statistics() if row["step"] == STEPS]
    grad_norm = run.rows()[-1]["grad_norm"]
    assert math.hypot(*[row["grad_norm"] for row in last]) == pytest.approx(grad_norm, rel=1e-5)
    tensors = run.weights()
    for row in last:
        for column, kind in NORMS.items():
            norm = tensors[f"{kind}.{row['parameter']}"].norm().item()
            assert row[column] == pytest.approx(norm, rel=1e-5)
        assert row["update_ratio"] == pytest.approx(row["update_norm"] / row["weight_norm"])
        assert 1e-4 < row["update_ratio"] < 1e-1  # the last lr is 2e-3; weights are below 1


# --------------------------------------------------------------------------------------------------
# Communication

KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")


class Sent:
    """Counts collectives: {(kind, ranks in the group): messages} and their bytes of full tensors.

    Groups of one rank send nothing. A single number, for example a request to stop, is no traffic.
    """

    def __init__(self):
        self.messages, self.bytes = Counter(), Counter()

    def see(self, operation, arguments: tuple, result: object) -> None:
        namespace, _, name = operation._schema.name.partition("::")
        found = [kind for kind in KINDS if name.replace("_", "").startswith(kind)]
        if found and namespace in ("c10d", "_c10d_functional"):
            self.count(found[0], group_size(arguments), [*arguments, result])

    def count(self, kind: str, ranks: int, values: list) -> None:
        tensors = [[x for x in tree_leaves(value) if torch.is_tensor(x)] for value in values]
        if ranks > 1 and max(x.numel() for x in sum(tensors, [])) > 1:
            self.messages[kind, ranks] += 1
            self.bytes[kind, ranks] += max(sum(x.nbytes for x in each) for each in tensors)


def group_size(args) -> int:
    """The number of ranks of the group among the arguments of a collective."""
    for leaf in tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return torch.distributed.ProcessGroup.unbox(leaf).size()
    # Functional collectives, as DTensor calls them, name their group instead.
    return torch.distributed.distributed_c10d._resolve_process_group(args[-1]).size()


def count_sent(argv: list[str]) -> list[dict]:
    """Return what a run had sent at the beginning of each forward pass in training."""
    found, sent = [], Sent()

    def see(module: nn.Module, inputs: tuple) -> None:
        is_real = isinstance(module, Transformer) and not inputs[0].is_meta
        if is_real and torch.is_grad_enabled():
            found.append({key: (sent.messages[key], sent.bytes[key]) for key in sent.messages})

    with Operations(sent.see), nn.modules.module.register_module_forward_pre_hook(see):
        succeed([run_command(argv)])
    return found


NORM = (1, 4 * TENSORS)  # the squared norm of each parameter's gradient

# What a step sends: (messages, bytes). Gradients are in float32, whatever the compute dtype. FSDP
# gathers each unit once in each micro-batch, and once more for backward if it was resharded. Under
# --wrap block the units are the blocks and the rest of the model, the root. The last block and the
# root are not resharded.
SENT = {
    "ddp2-batch": {("allreduce", 2): (1, 4 * P)},
    "ddp4-micro_batch": {("allreduce", 4): (4, 4 * 4 * P)},
    "fsdp2-none": {
        ("allgather", 2): (4, 4 * 4 * P),
        ("reducescatter", 2): (1, 4 * P),
        ("allreduce", 2): NORM,
    },
    # Each rank averages its half of the gradients with the other replica.
    "hsdp4-shard": {
        ("allgather", 2): (2 * 4, 2 * 4 * (P + BLOCK)),
        ("reducescatter", 2): (2 * 3, 2 * 4 * P),
        ("allreduce", 2): (3, 4 * P // 2),
        ("allreduce", 4): NORM,
    },
    "hsdp4-bfloat16": {
        ("allgather", 2): (2 * 4, 2 * 2 * (P + BLOCK)),
        ("reducescatter", 2): (2 * 3, 2 * 4 * P),
        ("allreduce", 2): (2 * 3, 2 * 4 * P // 2),
        ("allreduce", 4): NORM,
    },
    "fsdp2-adaptive": {
        ("allgather", 2): (2, 4 * P),
        ("reducescatter", 2): (2, 4 * P),
        ("allreduce", 2): NORM,
    },
    # The embedding and the head are two more units. Backward does not need the embedding, and the
    # head is the last unit, so both blocks are gathered again.
    "fsdp2-untied": {
        ("allgather", 2): (2 * 7, 2 * 4 * (P + HEAD + 2 * BLOCK)),
        ("reducescatter", 2): (5, 4 * (P + HEAD)),
        ("allreduce", 2): (1, 4 * (TENSORS + 1)),
    },
}


@each_row
def test_a_step_sends_what_its_formula_says(start, tmp_path, name):
    """From the first forward pass of step 2 to that of step 3. DDP has a pass before step 1."""
    row = ROWS[name]
    text = f"{command_of(row)} --max_steps 3 --log_interval 1000 --keep_last 0"
    n, first = row.micro_batches, int(name.startswith("ddp"))
    for passes in start(row.ranks, text, tmp_path / "run", count_sent):
        assert len(passes) == first + 3 * n
        two, three = passes[first + n], passes[first + 2 * n]
        found = {}
        for key, (messages, size) in three.items():
            before = two.get(key, (0, 0))
            if (messages, size) != before:
                found[key] = (messages - before[0], size - before[1])
        assert found == SENT[name]


# --------------------------------------------------------------------------------------------------
# Continuing


def go_on(start, run: Run, row: Row, out: Path) -> Run:
    """Continue a copy of a run, from its first checkpoint, with the command of a row."""
    copy_run(run.out, out)
    shutil.rmtree(checkpoint.step_path(out, STEPS))
    for path in (out / "metrics.jsonl", out / "optim.jsonl"):  # as they were at that checkpoint
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= STOP))
    before = (out / "metrics.jsonl").read_text()
    answers = start(row.ranks, f"{command_of(row)} {FILES}", out)
    succeed(answers)
    # It went on: rows with their times would differ if it had begun again.
    assert (out / "metrics.jsonl").read_text().startswith(before)
    return Run(out, 0, answers[0][1], "")


@each_row
def test_a_continued_run_ends_with_identical_bits(start, trained, tmp_path, name):
    run = trained(name)
    continued = go_on(start, run, ROWS[name], tmp_path / "run")
    assert_rows(continued, run, 0)
    assert continued.statistics() == run.statistics()
    found, expected = (full_tensors(checkpoint.step_path(x.out, STEPS)) for x in (continued, run))
    assert any(tensor.startswith("optimizer.") for tensor in expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


MOVES = [
    ("hsdp4-shard", "fsdp2-none"),
    ("fsdp2-none", "ddp2-batch"),
    ("fsdp2-adaptive", "adaptive"),
    ("untied", "fsdp2-untied"),
]


@pytest.mark.parametrize("name, other", MOVES)
def test_a_run_continues_on_another_mesh(start, trained, tmp_path, name, other):
    run, row = trained(name), (ROWS | SINGLE)[other]
    continued = go_on(start, run, row, tmp_path / "run")
    assert_rows(continued, run, TOLERANCES[row.numbers]["logs"])
    assert_weights(continued, run, TOLERANCES[row.numbers]["weights"])
    assert continued.steps() == [STOP, STEPS]


# --------------------------------------------------------------------------------------------------
# The command that people come for


@pytest.mark.slow(proves="the first command, with its default sizes, on eight ranks")
def test_eight_ranks_of_fsdp_train_with_the_defaults(tokens, tmp_path):
    """torchrun --standalone --nproc_per_node 8 train.py --strategy fsdp"""
    flags = f"--strategy fsdp --data {tokens} --out {tmp_path}/run --max_steps 30 --sample_tokens 0"
    job = Job(8, f"{flags} --warmup_steps 5".split(), tmp_path)
    try:
        assert job.wait(300) == 0, job.printed()
    finally:
        job.end()
    losses = {row["step"]: row["loss"] for row in job.rows()}
    assert [*losses] == [1, 10, 20, 30]
    assert losses[30] < losses[1] - 1
    assert len([*(tmp_path / "run/checkpoints/step-00000030").glob("rank-*.safetensors")]) == 8
