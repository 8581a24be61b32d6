"""A mesh changes where numbers are computed, not the numbers.

Each row of TABLE is a mesh with a policy. It is trained once, and so is one rank with the same
flags for the numbers. The tests of this file read what these runs have left: the log, statistics of
each parameter, checkpoints, and notes of what each rank has sent. They also continue a row from
its first checkpoint, on its own mesh and on that of another row.
"""

import functools
import math
import shutil
from collections import Counter
from typing import NamedTuple

import pytest
import rig
import torch
import torch.distributed
from rig import Operations, Run, arguments, assert_same_bits, cells, run_command
from torch import nn
from torch.utils._pytree import tree_leaves

import checkpoint
from model import Transformer

STEPS, STOP = 6, 4  # a run's last step, and the step of its first checkpoint
SEQUENCES = 12  # of a global batch
BASE = (
    f"--max_steps {STEPS} --global_batch_size {SEQUENCES} --lr 1e-2 --max_grad_norm 1.8 "
    f"--save_interval {STOP} --keep_every 1 --optim_metrics_interval 2"
)

# Flags that change the numbers, also on one rank
NUMBERS = {
    "plain": "",
    "bfloat16": "--dtype bfloat16",
    "untied": "--model tinyllama-1.1b",  # SMALL overrides all its sizes, but not its separate head
    # Three does not divide the rows of these weights, except those of the embedding.
    "uneven": "--n_head 3 --n_kv_head 1 --d_model 42 --d_ff 53 --clip adaptive "
    "--max_grad_norm_ratio 1.05",
}
# How much results may differ, relative to their size. At first the gradients of q and k are small
# differences of large numbers, whose rounding errors in bfloat16 show in their statistics.
TOLERANCES = dict.fromkeys(NUMBERS, {"logs": 1e-5, "weights": 3e-5, "statistics": 1e-4})
TOLERANCES["bfloat16"] = {"logs": 1e-2, "weights": 1e-1, "statistics": 2e-1}

FSDP = "--strategy fsdp --wrap block"
HSDP = "--strategy hsdp --wrap block --dp_shard 2"
KEPT = "--reshard_after_forward false --activation_checkpointing selective"
# ranks | micro-batches of a rank, in a step | a key of NUMBERS | what changes no number
TABLE = f"""
ddp2         | 2 | 3 | plain    | --strategy ddp
ddp4         | 4 | 3 | plain    | --strategy ddp --grad_sync micro_batch
fsdp2        | 2 | 2 | untied   | {FSDP}
fsdp2-none   | 2 | 3 | plain    | {FSDP} --wrap none --activation_checkpointing full
fsdp3-uneven | 3 | 1 | uneven   | {FSDP} --wrap block_group:2
hsdp4-shard  | 4 | 3 | plain    | {HSDP} --grad_sync shard
hsdp4-kept   | 4 | 3 | bfloat16 | {HSDP} --grad_sync micro_batch {KEPT}
"""


class Row(NamedTuple):
    ranks: int
    micro_batches: int
    numbers: str
    mesh: str

    def flags(self) -> str:
        size = SEQUENCES // self.ranks // self.micro_batches
        return f"{BASE} --micro_batch_size {size} {NUMBERS[self.numbers]} {self.mesh}"


ROWS = {name: Row(int(ranks), int(n), *rest) for name, ranks, n, *rest in cells(TABLE)}
SINGLE = {numbers: Row(1, 1, numbers, "") for numbers in NUMBERS}  # to compare with

# The scope makes all tests of a row follow each other, so that one process needs its run.
each_row = pytest.mark.parametrize("name", ROWS, scope="module")


# --------------------------------------------------------------------------------------------------
# Runs

KINDS = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Notes(list):
    """What a rank sends in a step, and where its host waits.

    A message is (kind, ranks in its group, bytes of the full tensors). Groups of one rank send
    nothing. No traffic of a step are single numbers, for example a request to stop, and rows of the
    log, which are in float64.

    ("wait", operation): here a host would wait until a GPU has computed a value, because a result,
    or its shape, depends on the values of a tensor. So do item and equal, for example, nonzero, and
    an index that is a mask.
    """

    def see(self, operation, arguments: tuple, result: object) -> None:
        namespace, _, name = operation._schema.name.partition("::")
        waits = not WAITS.isdisjoint(operation.tags)
        if operation.overloadpacket is torch.ops.aten.index:
            waits = any(index is not None and index.dtype == torch.bool for index in arguments[1])
        if waits:
            self.append(("wait", name))
        found = [kind for kind in KINDS if name.replace("_", "").startswith(kind)]
        if found and namespace in ("c10d", "_c10d_functional"):
            self.see_message(found[0], group_size(arguments), [*arguments, result])

    def see_message(self, kind: str, ranks: int, values: list) -> None:
        tensors = [[x for x in tree_leaves(value) if torch.is_tensor(x)] for value in values]
        largest = max(sum(tensors, []), key=torch.numel)
        if ranks > 1 and largest.numel() > 1 and largest.dtype != torch.float64:
            self.append((kind, ranks, max(sum(x.nbytes for x in each) for each in tensors)))


def group_size(arguments) -> int:
    """The number of ranks of the group among the arguments of a collective."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return torch.distributed.ProcessGroup.unbox(leaf).size()
    # Functional collectives, as DTensor calls them, name their group instead.
    return torch.distributed.distributed_c10d._resolve_process_group(arguments[-1]).size()


def run_and_note(argv: list[str]) -> tuple[int, str, list[Notes]]:
    """Run train.command; return its status, its error, and notes from each forward pass on."""
    passes = [Notes()]

    def begin(module: nn.Module, inputs: tuple) -> None:
        is_real = isinstance(module, Transformer) and not inputs[0].is_meta
        if is_real and torch.is_grad_enabled():
            passes.append(Notes())

    def see(*operation) -> None:
        passes[-1].see(*operation)

    with Operations(see), nn.modules.module.register_module_forward_pre_hook(begin):
        status, _, error = run_command(argv)
    return status, error, passes[1:]


class Trained(NamedTuple):
    run: Run
    step: list[list[tuple]]  # notes of each rank from the first forward pass of step 3 to step 4's


@pytest.fixture(scope="module")
def trained(pool, tokens, tmp_path_factory):
    """trained(name): this row of ROWS or SINGLE."""
    root = tmp_path_factory.mktemp("trained")

    @functools.cache
    def train(name: str) -> Trained:
        row = (ROWS | SINGLE)[name]
        answers = pool(row.ranks, run_and_note, arguments(tokens, root / name, row.flags()))
        n, notes = row.micro_batches, []
        for status, error, passes in answers:
            assert (status, error) == (0, "")
            before = name.startswith("ddp") + 2 * n  # DDP has a pass before step 1
            assert len(passes) == before + (STEPS - 2) * n
            notes.append(sum(passes[before : before + n], []))
        return Trained(Run(root / name), notes)

    return train


# --------------------------------------------------------------------------------------------------
# The same numbers

COLUMNS = ("tokens", "lr", "loss", "grad_norm", "clipped", "skipped_steps", "val_loss")


def assert_numbers(run: Run, expected: Run, tolerances: dict[str, float]) -> None:
    """Compare the rows of all steps, the evaluation, and the last weights, each as a vector."""
    for key in COLUMNS:
        values = [row[key] for row in expected.rows(key)]
        assert len(values) == (1 if key == "val_loss" else STEPS)
        assert [row[key] for row in run.rows(key)] == pytest.approx(values, tolerances["logs"]), key
    assert run.steps() == [STOP, STEPS]
    found, others = run.weights(), expected.weights()
    assert found.keys() == others.keys()
    for name in [name for name in others if name.startswith("model.")]:
        difference = (found[name] - others[name]).norm()
        assert difference <= tolerances["weights"] * others[name].norm(), name


@each_row
def test_a_mesh_has_the_numbers_of_one_rank(trained, name):
    run, single = trained(name).run, trained(ROWS[name].numbers).run
    tolerances = TOLERANCES[ROWS[name].numbers]
    assert_numbers(run, single, tolerances)
    assert {row["clipped"] for row in run.rows()} == {0, 1}
    for row, other in zip(run.statistics(), single.statistics(), strict=True):
        place = row.pop("step"), row.pop("parameter")
        assert place == (other.pop("step"), other.pop("parameter"))
        assert row == pytest.approx(other, rel=tolerances["statistics"]), place


NORMS = {
    "weight_norm": "model",
    "exp_avg_norm": "optimizer.exp_avg",
    "exp_avg_sq_norm": "optimizer.exp_avg_sq",
}


@each_row
def test_statistics_describe_the_checkpoint_and_the_log(trained, name):
    run = trained(name).run
    last = [row for row in run.statistics() if row["step"] == STEPS]
    grad_norm = run.rows()[-1]["grad_norm"]
    assert math.hypot(*[row["grad_norm"] for row in last]) == pytest.approx(grad_norm, rel=1e-5)
    tensors = run.weights()
    assert len(last) == sum(name.startswith("model.") for name in tensors)
    for row in last:
        for column, kind in NORMS.items():
            norm = tensors[f"{kind}.{row['parameter']}"].norm().item()
            assert row[column] == pytest.approx(norm, rel=1e-5)
        assert row["update_ratio"] == pytest.approx(row["update_norm"] / row["weight_norm"])
        assert 1e-4 < row["update_ratio"] < 1e-1  # the last lr is 2e-3; weights are below 1


# --------------------------------------------------------------------------------------------------
# Communication, and no wait for the device

# The sizes of SMALL. The vocabulary of bytes, 257, is rounded up to a multiple of 64.
D, FF, VOCABULARY = 32, 64, 320
BLOCK = 2 * D * D + 2 * D * (D // 2) + 3 * D * FF + 2 * D  # k and v have half as many heads as q
HEAD = VOCABULARY * D
P = HEAD + 2 * BLOCK + D  # tied: the head is the embedding
BLOCK_UNEVEN = 2 * 42 * 42 + 2 * 15 * 42 + 2 * 54 * 42 + 42 * 53 + 2 * 42
P_UNEVEN = 321 * 42 + 2 * BLOCK_UNEVEN + 42
TENSORS = 1 + 2 * 9 + 1  # the embedding, nine a block, the last norm
NORM = (1, 4 * TENSORS)  # the squared norm of each parameter's gradient

# What a step sends: (messages, bytes). Gradients are in float32, whatever the compute dtype. FSDP
# gathers each unit once in each micro-batch, and once more for backward if it was resharded. Under
# --wrap block the units are the blocks and the rest of the model, the root. The last block and the
# root are not resharded.
SENT = {
    "ddp2": {("allreduce", 2): (1, 4 * P)},
    "ddp4": {("allreduce", 4): (3, 3 * 4 * P)},
    # The embedding and the head are two more units. Backward does not need the embedding, and the
    # head is the last unit, so both blocks are gathered again.
    "fsdp2": {
        ("allgather", 2): (2 * 7, 2 * 4 * (P + HEAD + 2 * BLOCK)),
        ("reducescatter", 2): (5, 4 * (P + HEAD)),
        ("allreduce", 2): (1, 4 * (TENSORS + 1)),
    },
    "fsdp2-none": {
        ("allgather", 2): (3, 3 * 4 * P),
        ("reducescatter", 2): (1, 4 * P),
        ("allreduce", 2): NORM,
    },
    # Rows are padded to a multiple of three.
    "fsdp3-uneven": {
        ("allgather", 3): (2, 4 * P_UNEVEN),
        ("reducescatter", 3): (2, 4 * P_UNEVEN),
        ("allreduce", 3): NORM,
    },
    # Each rank averages its half of the gradients with the other replica.
    "hsdp4-shard": {
        ("allgather", 2): (3 * 4, 3 * 4 * (P + BLOCK)),
        ("reducescatter", 2): (3 * 3, 3 * 4 * P),
        ("allreduce", 2): (3, 4 * P // 2),
        ("allreduce", 4): NORM,
    },
    "hsdp4-kept": {
        ("allgather", 2): (3 * 3, 3 * 2 * P),
        ("reducescatter", 2): (3 * 3, 3 * 4 * P),
        ("allreduce", 2): (3 * 3, 3 * 4 * P // 2),
        ("allreduce", 4): NORM,
    },
}


@each_row
def test_a_step_sends_what_its_formula_says(trained, name):
    for notes in trained(name).step:
        messages, size = Counter(), Counter()
        for kind, ranks, nbytes in [note for note in notes if note[0] in KINDS]:
            messages[kind, ranks] += 1
            size[kind, ranks] += nbytes
        assert {key: (messages[key], size[key]) for key in messages} == SENT[name]


@each_row
def test_the_host_does_not_wait_for_the_device_in_a_step(trained, name):
    for notes in trained(name).step:
        assert [note for note in notes if note[0] == "wait"] == []


# --------------------------------------------------------------------------------------------------
# Continuing


@pytest.fixture
def go_on(pool, tokens, tmp_path, trained):
    """go_on(name, other): train the last steps of a run once more, with the flags of another."""

    def call(name: str, other: str) -> Run:
        row, run, out = (ROWS | SINGLE)[other], trained(name).run, tmp_path / "run"
        shutil.copytree(run.out, out)
        shutil.rmtree(checkpoint.step_path(out, STEPS))
        continued = rig.train(row.ranks, tokens, out, row.flags())
        assert continued.status == 0, continued.error
        assert continued.rows()[:STOP] == run.rows()[:STOP]  # with their times: it went on
        return continued

    return call


@each_row
def test_a_continued_run_ends_with_identical_bits(go_on, trained, name):
    continued = go_on(name, name)
    assert_same_bits(continued.out, trained(name).run.out)
    assert continued.statistics() == trained(name).run.statistics()


MOVES = """
hsdp4-shard  | fsdp2-none
fsdp2-none   | ddp2
fsdp3-uneven | uneven
untied       | fsdp2
"""


@pytest.mark.parametrize("name, other", cells(MOVES))
def test_a_run_continues_on_another_mesh(go_on, trained, name, other):
    numbers = (ROWS | SINGLE)[name].numbers
    assert_numbers(go_on(name, other), trained(name).run, TOLERANCES[numbers])
