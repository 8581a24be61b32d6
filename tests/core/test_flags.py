"""Every flag has an effect, which a user can see.

Each row of TABLE is run twice, with a flag and without it, and says what differs: a column of the
log, its rows, the files of the run, its status or the operations that it computes. A flag that
--help lists, but that neither a row nor a test named in ELSEWHERE shows, fails, because it may do
nothing.
"""

import functools
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rig import SMALL, Operations, Run, cells, run_command, write_tokens

# The flag and its value | ranks | flags of both runs | what differs: see assert_seen
# {other} is another token folder, {file} a file with {"lr": 1e-4}, {first} a run of one step, and
# both runs continue a copy of it if they have the word "again".
TABLE = """
model tinyllama-1.1b       | 1 |                               | loss from 1
n_layer 1                  | 1 |                               | loss from 1
n_head 2                   | 1 |                               | loss from 1
n_kv_head 4                | 1 |                               | loss from 1
d_model 64                 | 1 |                               | loss from 1
d_ff 32                    | 1 |                               | loss from 1
seq_len 8                  | 1 |                               | tokens from 1
dtype bfloat16             | 1 |                               | loss from 1
data {other}               | 1 |                               | loss from 1
seed 1                     | 1 |                               | loss from 1
global_batch_size 4        | 1 |                               | tokens from 1
micro_batch_size 2         | 1 |                               | more mm
max_steps 3                | 1 |                               | rows loss 1 2 3
lr 1e-3                    | 1 |                               | lr from 1
config {file}              | 1 |                               | lr from 1
min_lr 1e-3                | 1 |                               | lr from 3
warmup_steps 3             | 1 |                               | lr from 1
schedule cosine            | 1 |                               | lr from 3
weight_decay 0.9           | 1 |                               | loss from 2
beta1 0.8                  | 1 |                               | loss from 3
beta2 0.5                  | 1 |                               | loss from 3
clip adaptive              | 1 |                               | clipped from 1
max_grad_norm 100          | 1 |                               | clipped from 1
max_grad_norm_ratio 1e-3   | 1 | --clip adaptive               | clipped from 1
log_interval 2             | 1 |                               | rows loss 1 2 4 5
eval_interval 2            | 1 | --max_steps 4                 | rows val_loss 2 4
eval_sequences 5           | 1 |                               | val_loss from 5
optim_metrics_interval 2   | 1 |                               | files + optim.jsonl
sample_tokens 3            | 1 |                               | says sample
save_interval 2            | 1 |                               | files + step-00000004
keep_last 1                | 1 | --save_interval 2             | files - step-00000004
keep_every 3               | 1 | --save_interval 1             | files + step-00000003
init_from {first}          | 1 |                               | loss from 1
strategy fsdp              | 2 |                               | more reduce_scatter
dp_shard 1                 | 2 | --strategy hsdp               | fewer reduce_scatter
wrap none                  | 2 | --strategy fsdp --wrap block  | fewer allgather
reshard_after_forward false| 2 | --strategy fsdp --wrap block  | fewer allgather
grad_sync micro_batch      | 2 | --strategy fsdp --micro_batch_size 1 | more reduce_scatter
activation_checkpointing full | 1 |                            | more mm
device cuda                | 1 |                               | status 2
eval_only                  | 1 | again                         | rows loss 1; says val_loss
allow_changes              | 1 | again --lr 1e-4               | status 0
"""
# Flags whose effect is not in a healthy run of a few steps, and the test that shows it
ELSEWHERE = {
    "out": "test_flags.py::test_a_flag_has_the_effect_that_its_row_names",
    "compile": "test_rare.py::test_a_compiled_run_has_the_numbers_of_the_plain_one",
    "tracker": "test_wandb.py::test_rank_0_sends_every_row_once_to_one_page_even_if_that_fails",
    "timeout": "test_kill.py::test_a_rank_that_hangs_ends_the_job_by_a_line_that_names_it",
}
# Flags of extras: tests/extras/test_flags.py has their rows
EXTRAS = {"tp", "optimizer", "loss_chunks", "async_save", "profile"}
ROWS = {flag.split()[0]: (flag, *line) for flag, *line in cells(TABLE)}


# --------------------------------------------------------------------------------------------------
# What can be seen of a run


def run_and_count(argv: list[str]) -> tuple[int, str, str, Counter]:
    """Run train.command on this rank; also return how often it called each operation of torch."""
    counts = Counter()

    def see(operation, arguments, result) -> None:
        counts[operation._schema.name] += 1  # for example aten::mm or c10d::allreduce_

    with Operations(see):
        answer = run_command(argv)
    return *answer, counts


class Seen(NamedTuple):
    """A run and what its rank 0 computed."""

    run: Run
    operations: Counter

    def column(self, name: str) -> dict[int, float | None]:
        return {row["step"]: row[name] for row in self.run.rows(name)}

    def count(self, operation: str) -> int:
        return sum(count for name, count in self.operations.items() if operation in name)


def assert_seen(what: str, with_flag: Seen, without: Seen) -> None:
    """Fail unless the runs differ in this way."""
    match what.split():
        case [name, "from", step]:  # the first at which a column differs by more than rounding
            values, others = with_flag.column(name), without.column(name)
            assert values.keys() == others.keys()
            rounded = {each: pytest.approx(others[each], rel=1e-6) for each in others}
            assert [each for each in values if values[each] != rounded[each]][:1] == [int(step)]
        case ["rows", name, *steps]:  # that have the column
            assert [*with_flag.column(name)] == [*map(int, steps)] != [*without.column(name)]
        case ["files", sign, name]:  # a file or folder that only one of the runs has
            found, other = ([*seen.run.out.rglob(name)] for seen in (with_flag, without))
            assert bool(found) == (sign == "+") != bool(other)
        case ["status", status]:
            assert with_flag.run.status == int(status) != without.run.status
        case ["says", text]:  # the other run may say it as well
            assert text in with_flag.run.printed
        case ["more", operation]:
            assert with_flag.count(operation) > without.count(operation)
        case ["fewer", operation]:
            assert with_flag.count(operation) < without.count(operation)
        case _:
            raise ValueError(what)


# --------------------------------------------------------------------------------------------------
# The test


@pytest.fixture(scope="module")
def see_row(pool, tokens, tmp_path_factory):
    """see_row(*row): run it with its flag and without it, and compare the runs."""
    root = tmp_path_factory.mktemp("flags")
    others = {"other": root / "other", "file": root / "flags.json", "first": root / "first"}
    write_tokens(others["other"], seed=2)
    others["file"].write_text(json.dumps({"lr": 1e-4}))
    small = f"{SMALL.replace('--lr 3e-3', '')} --data {tokens}"  # so that a file can give --lr
    pool(1, run_command, f"{small} --max_steps 1 --out {others['first']}".split())

    @functools.cache
    def run(ranks: str, flags: str) -> Seen:
        out = tmp_path_factory.mktemp("flags") / "run"
        if flags.startswith("again"):
            shutil.copytree(others["first"], out)
        argv = f"{small} --out {out} {flags.removeprefix('again')}".format(**others).split()
        *answer, operations = pool(int(ranks), run_and_count, argv)[0]
        return Seen(Run(out, *answer), operations)

    def call(flag: str, ranks: str, flags: str, seen: str) -> None:
        with_flag, without = run(ranks, f"{flags} --{flag}"), run(ranks, flags)
        for what in seen.split(";"):
            assert_seen(what, with_flag, without)

    return call


@pytest.mark.parametrize("name", ROWS)
def test_a_flag_has_the_effect_that_its_row_names(see_row, name):
    if name == "device" and torch.cuda.is_available():
        pytest.skip("with a GPU, --device cuda is not refused")
    see_row(*ROWS[name])


def test_every_flag_has_a_row_or_a_test():
    _, printed, _ = run_command(["--help"])
    in_help = {*re.findall(r"^  --(\w+)", printed, re.M)} - {"help", "version"}
    assert sorted([*ROWS, *ELSEWHERE, *EXTRAS]) == sorted(in_help)
    for file, function in (test.split("::") for test in ELSEWHERE.values()):
        assert f"def {function}(" in Path(__file__).with_name(file).read_text()
