"""How runs start and continue: tables of starts, judged by what they print and leave on disk.

A row is a name and a list of starts of one run folder. A start has flags, perhaps a change of the
disk before it, and what must be true after it: the exit status, a pattern of what it says, and the
steps in the log and on disk. A start whose row lists no steps must leave every file as it was.

A pattern has only what a user needs from a line, which is the flag or file and the two values.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from .conftest import SMALL, Run, run_command, write_tokens

# What a user types again in each start, before the flags of a row. The learning rate is constant,
# so that a run which ends and continues takes the same steps as one that does neither.
TYPED = f"{SMALL} --schedule constant --max_steps 2 --save_interval 1 --eval_interval 1"


@dataclass(frozen=True)
class Place:
    """The folders of a row. Its flags and patterns name them as {p.root}, {p.trained}, ..."""

    root: Path  # the row's own; its runs are here
    tokens: Path
    other: Path  # other tokens
    trained: Path  # a run of two steps, each with a checkpoint: it may be read and copied


@dataclass(frozen=True)
class Start:
    """One start of train.command, and what must be true after it."""

    flags: str = ""
    says: str = ""  # pattern in the line of the error or, with status 0, in what is printed
    before: tuple[Callable[[Place], None], ...] = ()  # changes of the disk
    ranks: int = 1  # flags may contain {rank}
    typed: str = TYPED
    out: str = "run"
    status: int = 0
    steps: list[int] | None = None  # of the training rows; None: nothing on disk changes
    saved: list[int] | None = None  # steps of the checkpoints; None: the last two of `steps`
    like: str | None = None  # same losses and rates as a new run with these flags, on one rank
    lr: float | None = None  # in the last training row
    val_loss: int | None = None  # it says the validation loss of this step of `trained`
    evaluated: list[int] | None = None  # steps of the evaluations


# --------------------------------------------------------------------------------------------------
# Changes of the disk before a start


def copy_trained(place: Place) -> None:
    shutil.copytree(place.trained, place.root / "run")


def copy_tokens(place: Place) -> None:
    shutil.copytree(place.tokens, place.root / "data")


def copy_newest_checkpoint(place: Place) -> None:
    name = "checkpoints/step-00000002"
    shutil.copytree(place.trained / name, place.root / "run" / name)


def remove(*names: str) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        for name in names:
            path = place.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def write(name: str, contents: str | dict | list) -> Callable[[Place], None]:
    """Write a file, as JSON if the contents are not text."""

    def change(place: Place) -> None:
        path = place.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(contents if isinstance(contents, str) else json.dumps(contents))

    return change


def edit(name: str, **changes) -> Callable[[Place], None]:
    """Change fields of a JSON file."""

    def change(place: Place) -> None:
        path = place.root / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def damage(name: str) -> Callable[[Place], None]:
    """Flip a bit in the middle of a file, which keeps its size and time."""

    def change(place: Place) -> None:
        path = place.root / name
        contents, times = bytearray(path.read_bytes()), path.stat()
        contents[len(contents) // 2] ^= 1
        path.write_bytes(contents)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    return change


def cut(split: str, count: int) -> Callable[[Place], None]:
    """Shorten a split of the data to `count` tokens, in meta.json as well."""

    def change(place: Place) -> None:
        os.truncate(place.root / f"data/{split}.bin", 2 * count)
        edit("data/meta.json", **{f"{split}_tokens": count})(place)

    return change


def tear(place: Place) -> None:
    """Lose the end of a token file, as a full disk does."""
    os.truncate(place.root / "data/train.bin", 1999)


def end_with(token: int, split: str) -> Callable[[Place], None]:
    """Replace the last token of a split of the data, which is that of the end of a text."""

    def change(place: Place) -> None:
        ids = np.memmap(place.root / f"data/{split}.bin", np.uint16, "r+")
        ids[-1] = token
        ids.flush()

    return change


# --------------------------------------------------------------------------------------------------
# One start


def run_rank(argvs: list[list[str]]) -> tuple[int, str, str]:
    """Run train.command with the flags of this rank."""
    return run_command(argvs[int(os.environ.get("RANK", 0))])


def files(root: Path) -> dict[str, tuple]:
    """Name -> time and contents of all files below root; folders have only a name."""
    found = {}
    for path in sorted(root.rglob("*")):
        is_file = path.is_file()
        found[str(path)] = (path.stat().st_mtime_ns, path.read_bytes()) if is_file else ()
    return found


class Judge:
    """Runs the starts of a row and compares what they did with the row."""

    def __init__(self, pool, place: Place, new_runs: dict[str, Run]):
        self.pool = pool
        self.place = place
        self.new_runs = new_runs  # runs that ended without a stop, by flags

    def __call__(self, *starts: Start) -> None:
        for start in starts:
            for change in start.before:
                change(self.place)
            before = files(self.place.root)
            runs = self.run(start)
            self.check_lines(start, runs)
            if start.steps is None:
                assert files(self.place.root) == before
            else:
                self.check_folder(start, runs[0])

    def run(self, start: Start) -> list[Run]:
        """Return what each rank did."""
        out = self.place.root / start.out
        argvs = []
        for rank in range(start.ranks):
            typed = f"{start.typed} --data {{p.tokens}}" if start.typed else "--device cpu"
            text = f"{typed} --out {out} {start.flags}".format(p=self.place, rank=rank)
            argvs.append(text.split())
        answers = self.pool(start.ranks, run_rank, argvs)
        return [Run(out, *answer) for answer in answers]

    def check_lines(self, start: Start, runs: list[Run]) -> None:
        for run in runs:
            assert run.status == start.status, (run.printed, run.error)
            assert len(run.error.splitlines()) == (1 if start.status else 0), run.error
            says = run.error if start.status else runs[0].printed
            assert re.search(start.says.format(p=self.place), says, re.DOTALL), says
        if start.val_loss:
            said = re.findall(r"val_loss (\d+\.\d+)", runs[0].printed)[-1]
            expected = column(self.place.trained, "val_loss")[start.val_loss]
            assert float(said) == pytest.approx(expected, rel=1e-4)

    def check_folder(self, start: Start, run: Run) -> None:
        assert [row["step"] for row in run.rows()] == start.steps
        assert run.steps() == (start.steps[-2:] if start.saved is None else start.saved)
        if start.like is not None:
            like = self.new_run(start.like).out
            for name in ("loss", "val_loss", "lr"):
                expected = column(like, name)
                found = column(run.out, name)
                assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)
        if start.lr is not None:
            assert run.rows()[-1]["lr"] == pytest.approx(start.lr)
        if start.evaluated is not None:
            assert [*column(run.out, "val_loss")] == start.evaluated

    def new_run(self, flags: str) -> Run:
        """Return a run with these flags that was never stopped, on one rank."""
        if flags not in self.new_runs:
            out = self.place.trained.parent / f"like-{len(self.new_runs)}"
            start = Start(f"{flags} --max_steps 8", out=str(out))
            (self.new_runs[flags],) = self.run(start)
            assert self.new_runs[flags].status == 0, self.new_runs[flags].error
        return self.new_runs[flags]


def column(out: Path, name: str) -> dict[int, float]:
    """Step -> value of a column of the log."""
    return {row["step"]: row[name] for row in Run(out, 0, "", "").rows(name)}


@pytest.fixture(scope="module")
def folders(pool, tokens, tmp_path_factory) -> tuple[Place, dict[str, Run]]:
    """The folders that all rows read, and the runs of Judge.new_run."""
    root = tmp_path_factory.mktemp("start")
    other = write_tokens(root / "other", seed=2)
    place = Place(root, tokens, other, trained=root / "run")
    judge = Judge(pool, place, {})
    judge(Start("--max_steps 2", steps=[1, 2], evaluated=[1, 2]))
    return place, judge.new_runs


@pytest.fixture
def judge(pool, folders, tmp_path) -> Judge:
    """judge(start, ...): run the starts of a row, in a folder of their own."""
    place, new_runs = folders
    return Judge(pool, replace(place, root=tmp_path), new_runs)


def table(rows: dict[str, list | tuple]):
    """Parametrize a test with the rows of a table, by their names."""
    return pytest.mark.parametrize("row", rows.values(), ids=rows)


# --------------------------------------------------------------------------------------------------
# Starts that train

trained = partial(Start, before=(copy_trained,))
bare = partial(Start, typed="")  # no flag is typed again, not even those of the model
refused = partial(Start, status=2)

LOG = "run/metrics.jsonl"
CHECKPOINTS = "run/checkpoints"
OLDER = f"{CHECKPOINTS}/step-00000001"
NEWEST = f"{CHECKPOINTS}/step-00000002"
THIRD = f"{CHECKPOINTS}/step-00000003"
LOST = (copy_trained, remove(LOG, CHECKPOINTS))  # as if killed before its first checkpoint
OPTIMIZER = "--seed 3 --weight_decay 0.3 --beta1 0.8 --max_grad_norm 0.5 --warmup_steps 2"
MANY = "--global_batch_size 24"
SAVED = "--init_from {p.root}/run"
OTHER_INTERVALS = "--log_interval 3 --eval_interval 5 --save_interval 0"
# The flags of TYPED as the contents of a --config file
WORDS = TYPED.replace("--", "").split()
FILE = dict(zip(WORDS[::2], WORDS[1::2]))

TO_2 = {"steps": [1, 2], "like": ""}
TO_3 = {"steps": [1, 2, 3], "like": ""}
TO_4 = {"steps": [1, 2, 3, 4], "like": ""}
FROM_2 = {"steps": [3, 4], "like": ""}  # without the log of the first two steps

STARTS = {
    # A run goes on after its newest checkpoint
    "more steps": [
        trained("--max_steps 3", f"{NEWEST}.*max_steps 2 -> 3", **TO_3),
        Start("--max_steps 4", f"{THIRD}.*max_steps 3 -> 4", **TO_4),
    ],
    "log removed": [Start("--max_steps 4", before=(copy_trained, remove(LOG)), **FROM_2)],
    "copy of one checkpoint": [Start("--max_steps 4", before=(copy_newest_checkpoint,), **FROM_2)],
    "no checkpoint yet": [bare("--max_steps 3", before=LOST, **TO_3)],
    "--max_steps in config.json, no checkpoint yet": [
        bare(before=(*LOST, edit("run/config.json", max_steps=3)), **TO_3)
    ],
    "--keep_last 0": [
        Start("--keep_last 0", steps=[1, 2], saved=[]),
        Start("--keep_last 0 --max_steps 3", **TO_3 | {"saved": []}),
    ],
    "--keep_last 0, stopped before its first step": [
        Start(before=(write("run/config.json", {"keep_last": 0}),), **TO_2 | {"saved": []}),
    ],
    "--keep_last 0 later": [
        trained("--keep_last 0 --max_steps 3", saved=[1, 2], **TO_3),
        Start("--keep_last 2 --max_steps 4", saved=[3, 4], **TO_4),
    ],
    # or, if this is damaged, after the one before it
    "newest checkpoint damaged": [
        Start(
            "--max_steps 3",
            f"{NEWEST}: rank-00000.safetensors",
            before=(copy_trained, damage(f"{NEWEST}/rank-00000.safetensors")),
            **TO_3,
        ),
    ],
    "newest checkpoint incomplete": [
        Start(
            "--max_steps 3",
            f"{NEWEST}: .*manifest.json",
            before=(copy_trained, remove(f"{NEWEST}/manifest.json")),
            **TO_3,
        ),
    ],
    "file of either rank damaged": [
        Start("--strategy fsdp", ranks=2, **TO_2),
        Start(
            "--strategy fsdp --max_steps 3",
            f"{NEWEST}: rank-00001.safetensors",
            before=(damage(f"{NEWEST}/rank-00001.safetensors"),),
            ranks=2,
            **TO_3,
        ),
        Start(
            "--strategy fsdp --max_steps 4",
            f"{THIRD}: rank-00000.safetensors",
            before=(damage(f"{THIRD}/rank-00000.safetensors"),),
            ranks=2,
            **TO_4,
        ),
    ],
    # Flags that are not typed again
    "flags kept": [bare("--max_steps 4", before=(copy_trained,), **TO_4)],
    "dtype kept": [
        Start("--dtype bfloat16", steps=[1, 2]),
        bare("--max_steps 3", **TO_3 | {"like": "--dtype bfloat16"}),
    ],
    "optimizer kept": [
        Start(OPTIMIZER, steps=[1, 2]),
        bare("--max_steps 3", **TO_3 | {"like": OPTIMIZER}),
    ],
    "fsdp kept": [
        Start("--strategy fsdp", ranks=2, steps=[1, 2]),
        bare("--max_steps 3", "mesh +fsdp.* dp_shard 2 ", ranks=2, **TO_3),
    ],
    "mesh not kept": [
        Start("--strategy hsdp --dp_shard 2", ranks=4, steps=[1, 2]),
        bare("--max_steps 3", "mesh +hsdp: dp_replicate 1 x dp_shard 2 ", ranks=2, **TO_3),
    ],
    "auto takes back a kept flag": [
        Start("--micro_batch_size 2", steps=[1, 2]),
        bare(
            "--micro_batch_size auto --max_steps 3",
            "micro_batch_size 2 -> 8",
            **TO_3,
        ),
        bare("--max_steps 4", "micro_batch_size 8 x", **TO_4),
    ],
    "default lr kept": [
        Start("--lr auto", steps=[1, 2], lr=0.5 / 32),
        bare("--lr auto --max_steps 3", steps=[1, 2, 3], lr=0.5 / 32),
    ],
    "config.json edited": [
        bare(
            "",
            "max_steps 2 -> 4",
            before=(copy_trained, edit("run/config.json", max_steps=4)),
            **TO_4,
        ),
    ],
    "changed lr kept": [
        trained(
            "--lr 0.01 --max_steps 3 --allow_changes", "lr 0.003 -> 0.01", steps=[1, 2, 3], lr=0.01
        ),
        bare("--max_steps 4", steps=[1, 2, 3, 4], lr=0.01),
        refused("--max_steps 5", r"lr 0.01 -> 0.003"),
    ],
    "--allow_changes until a checkpoint has the change": [
        trained(
            "--lr 0.01 --max_steps 3 --save_interval 0 --allow_changes",
            steps=[1, 2, 3],
            saved=[2, 3],
        ),
        bare("", r"lr 0.003 -> 0.01", (remove(THIRD),), status=2),
        bare("--allow_changes", steps=[1, 2, 3], saved=[2, 3]),
        bare("--max_steps 4", steps=[1, 2, 3, 4], saved=[3, 4], lr=0.01),
    ],
    "seed, batch and data, with --allow_changes": [
        trained(
            "--seed 1 --global_batch_size 16 --data {p.other} --max_steps 3 --allow_changes",
            "(?=.*seed 0 -> 1)(?=.*batch_size 8 -> 16)(?=.*{p.tokens} -> {p.other})",
            steps=[1, 2, 3],
        ),
    ],
    # Flags that may change
    "other strategies": [
        trained("--strategy ddp --max_steps 3", "strategy single -> ddp", ranks=2, **TO_3),
        Start("--strategy fsdp --max_steps 4", "strategy ddp -> fsdp", ranks=2, **TO_4),
    ],
    "other numbers of ranks": [
        Start(MANY, steps=[1, 2]),
        Start(f"{MANY} --max_steps 3", ranks=2, steps=[1, 2, 3]),
        Start(f"{MANY} --max_steps 4", ranks=3, **TO_4 | {"like": MANY}),
    ],
    "fewer steps than done, without an evaluation there": [
        Start("--eval_interval 0", steps=[1, 2], evaluated=[2]),
        Start("--eval_interval 0 --max_steps 1", "at step 2, and --max_steps is 1:"),
    ],
    "other micro-batches": [
        trained("--micro_batch_size 2 --max_steps 3", "micro_batch_size 8 -> 2", **TO_3),
    ],
    "other intervals": [
        trained(
            f"{OTHER_INTERVALS} --max_steps 8",
            "eval_interval 1 -> 5",
            steps=[1, 2, 3, 5, 6, 8],
            saved=[2, 8],
            evaluated=[1, 2, 5, 8],
            like="",
        ),
    ],
    "data moved": [
        Start(
            "--data {p.root}/data --max_steps 3",
            "{p.tokens} -> {p.root}/data",
            before=(copy_trained, copy_tokens),
            **TO_3,
        ),
    ],
    "several parts, with --allow_changes": [
        trained(
            "--lr 0.01 --beta1 0.8 --schedule linear --max_steps 3 --allow_changes",
            "(?=.*lr 0.003 -> 0.01)(?=.*beta1 0.9 -> 0.8)(?=.*schedule constant -> linear)",
            steps=[1, 2, 3],
            lr=0.005,
        ),
    ],
    # --config
    "config of a run": [bare("--config {p.trained}/config.json --max_steps 3", **TO_3)],
    "config of the run": [
        bare("--config {p.root}/run/config.json --max_steps 3", before=(copy_trained,), **TO_3),
    ],
    "a file before the run's own flags": [
        bare(
            "--config {p.root}/mine.json",
            "max_steps 2 -> 3",
            before=(copy_trained, write("mine.json", {"max_steps": 3, "lr": None})),
            **TO_3,
        ),
    ],
    "typed flags before those of a file": [
        bare(
            "--lr 3e-3 --data {p.tokens} --config {p.root}/mine.json --max_steps 3",
            before=(write("mine.json", FILE | {"lr": 0.5, "max_steps": 9}),),
            **TO_3,
        ),
    ],
    # --init_from
    "weights of a run": [
        Start("--init_from {p.trained} --lr 0 --max_steps 1", steps=[1], lr=0, val_loss=2),
    ],
    "weights of a checkpoint": [
        Start(
            "--init_from {p.trained}/checkpoints/step-00000001 --lr 0 --max_steps 1",
            steps=[1],
            lr=0,
            val_loss=1,
        ),
    ],
    "only weights": [
        Start("--lr 0", out="source", steps=[1, 2]),
        Start("--init_from {p.root}/source --max_steps 3", **TO_3),
    ],
    "weights of an imported model": [  # whose manifest has no flags
        Start(
            SAVED,
            before=(copy_trained, remove(OLDER), edit(f"{NEWEST}/manifest.json", config={})),
            out="new",
            steps=[1, 2],
        ),
        Start(f"{SAVED} --max_steps 3", out="new", steps=[1, 2, 3]),
        bare("--max_steps 4", out="new", steps=[1, 2, 3, 4]),
    ],
    "weights that are gone later": [
        Start(SAVED, before=(copy_trained,), out="new", steps=[1, 2]),
        Start(f"{SAVED} --max_steps 3", before=(remove("run"),), out="new", steps=[1, 2, 3]),
    ],
    "weights, no checkpoint yet": [
        Start("--init_from {p.trained} --lr 0 --max_steps 1", steps=[1]),
        bare("--max_steps 2", before=(remove(LOG, CHECKPOINTS),), steps=[1, 2], val_loss=2),
    ],
    "weights, with the default learning rate": [
        bare(
            "--init_from {p.trained} --data {p.tokens} --max_steps 1 --warmup_steps 1 "
            "--sample_tokens 0 --eval_sequences 10",
            steps=[1],
        ),
    ],
    "weights of another tokenizer, with --allow_changes": [
        Start(
            "--init_from {p.trained} --data {p.root}/data --allow_changes",
            "tokenizer bytes -> None",
            before=(copy_tokens, edit("data/meta.json", tokenizer=None)),
            steps=[1, 2],
        ),
    ],
    # Ranks that were started with different flags use those of rank 0
    "other flags on a rank": [
        Start("--lr 0.00{rank}3", ranks=2, steps=[1, 2]),
        bare("--max_steps {rank}3", ranks=2, steps=[1, 2, 3]),
    ],
    # The learning rate
    "long warm-up": [Start("--warmup_steps 3", steps=[1, 2])],
    "longer schedule": [
        Start("--schedule linear", steps=[1, 2]),
        Start("--schedule linear --max_steps 4", steps=[1, 2, 3, 4]),
    ],
    # Data
    "data of one sequence": [
        Start("--data {p.root}/data", before=(copy_tokens, cut("train", 17)), steps=[1, 2]),
    ],
}


@table(STARTS)
def test_a_start_trains_the_steps_that_are_left(row, judge):
    judge(*row)


def test_tokens_are_counted_with_the_batch_that_each_step_had(judge):
    """Two steps have 8 sequences of 16 tokens, and two later ones have 16 sequences."""
    judge(
        trained("--global_batch_size 16 --max_steps 3 --allow_changes", steps=[1, 2, 3]),
        bare("--max_steps 4", steps=[1, 2, 3, 4]),
    )
    tokens = column(judge.place.root / "run", "tokens")
    assert tokens == {1: 128, 2: 256, 3: 512, 4: 768}


# --------------------------------------------------------------------------------------------------
# Starts that write nothing

ON_TWO = "--eval_only --strategy fsdp --micro_batch_size 3"

LOOKS = {
    "finished": trained("", "at step 2, and --max_steps is 2:"),
    "fewer steps than done": trained("--max_steps 1", "at step 2, and --max_steps is 1:"),
    "--help": Start("--help", "--init_from"),
    "--eval_only": trained("--eval_only", val_loss=2),
    "--eval_only without flags": bare("--eval_only", before=(copy_trained,), val_loss=2),
    "--eval_only on two ranks": trained(ON_TWO, ranks=2, val_loss=2),
    "--eval_only of other weights": Start(
        "--eval_only --init_from {p.trained}/checkpoints/step-00000001", val_loss=1
    ),
    "--eval_only of other weights, with their flags": bare(
        "--eval_only --init_from {p.trained}",
        before=(write("run/config.json", "not read"),),
        val_loss=2,
    ),
}


@table(LOOKS)
def test_a_start_that_only_looks_writes_nothing(row, judge):
    judge(row)


# --------------------------------------------------------------------------------------------------
# Starts that are refused

FLAGS = {
    "unknown flag": ("--learning_rate 1", "--learning_rate"),
    "shortened flag": ("--max_step 5", "--max_step 5"),
    "flag without a value": ("--lr", "--lr"),
    "no number": ("--max_steps ten", "--max_steps.*ten"),
    "fraction of a step": ("--max_steps 1.5", "--max_steps.*1.5"),
    "no step": ("--max_steps 0", "--max_steps.*0"),
    "negative number": ("--lr -1", "--lr.*-1"),
    "negative interval": ("--save_interval -1", "--save_interval.*-1"),
    "nan": ("--weight_decay nan", "--weight_decay.*nan"),
    "beta of one": ("--beta2 1", "--beta2.* 1"),
    "unknown choice": ("--schedule step", "--schedule.*step.*cosine"),
    "unknown unit": ("--wrap blocks", "--wrap blocks"),
    "unknown model": ("--model huge", "--model.*huge.*tiny"),
    "min_lr above lr": ("--min_lr 0.1", "min_lr 0.1.*0.003"),
    "odd heads": ("--d_model 30", "d_model 30.*n_head 4"),
    "uneven groups of heads": ("--n_kv_head 3", "n_kv_head 3.*n_head 4"),
    "no --config file": ("--config {p.root}/no.json", "{p.root}/no.json"),
    "folder as --config": ("--config {p.trained}", "{p.trained}"),
    "missing --init_from": ("--init_from {p.root}/no", "{p.root}/no "),
    "--init_from without a checkpoint": ("--init_from {p.tokens}", "{p.tokens} "),
    "--init_from a narrower model": ("--init_from {p.trained} --d_ff 80", "d_ff 64.* 80"),
    "--init_from fewer layers": ("--init_from {p.trained} --n_layer 3", "n_layer 2.* 3"),
    "--eval_only of nothing": ("--eval_only", "{p.root}/run "),
    "no data": ("--data {p.root}/no", "{p.root}/no.*train.bin"),
}

# What a weight knows is the tokens of its tokenizer: its name, or the checksum of its file
TOKENIZERS = {
    "another name": (edit("data/meta.json", tokenizer="gpt2"), "bytes.* gpt2"),
    "unknown": (edit("data/meta.json", tokenizer=None), "bytes.* None"),
}


@pytest.mark.parametrize(
    "start", ["--init_from {p.trained}", "--eval_only --init_from {p.trained}"]
)
@table(TOKENIZERS)
def test_weights_of_another_tokenizer_are_refused(row, start, judge):
    change, says = row
    judge(refused(f"{start} --data {{p.root}}/data", says, (copy_tokens, change)))


@table(FLAGS)
def test_flags_of_no_possible_run_are_refused(row, judge):
    judge(refused(*row))


FILES = {
    "unknown name": ({"wings": 2}, "wings"),
    "no number": ({"lr": "fast"}, "lr.*fast"),
    "negative number": ({"max_steps": -1}, "max_steps.*-1"),
    "unknown choice": ({"dtype": "float8"}, "dtype.*float8"),
    "list": ([1], "object"),
    "torn": ('{"lr": 1', ""),
}


@table(FILES)
def test_a_config_file_is_checked_like_typed_flags(row, judge):
    contents, says = row
    changes = (write("mine.json", contents),)
    judge(refused("--config {p.root}/mine.json", f"mine.json.*{says}", changes))


# Flag: its value in the run `trained`, and another one
PARTS = {
    "lr": (0.003, 0.5),
    "min_lr": (0.0, 0.001),
    "warmup_steps": (1, 2),
    "schedule": ("constant", "linear"),
    "weight_decay": (0.1, 0.2),
    "beta1": (0.9, 0.8),
    "beta2": (0.95, 0.99),
    "max_grad_norm": (1.0, 2.0),
    "dtype": ("float32", "bfloat16"),
    "seed": (0, 1),
    "global_batch_size": (8, 16),
    "n_layer": (2, 3),
    "n_kv_head": (2, 4),
    "d_ff": (64, 80),
    "seq_len": (16, 8),
}


@pytest.mark.parametrize("flag", PARTS)
def test_a_part_of_a_run_may_not_change(flag, judge):
    old, new = PARTS[flag]
    judge(trained(f"--max_steps 4 --{flag} {new}", rf"{flag} {old} -> {new}\b", status=2))


FOLDERS = {
    "file": refused("", "{p.root}/run", (write("run", "mine"),)),
    "folder of another program": refused(
        "", "run/config.json: .*architectures", (write("run/config.json", {"architectures": []}),)
    ),
    "checkpoints lost": refused(
        "--max_steps 3", "{p.root}/run", (copy_trained, remove(CHECKPOINTS))
    ),
    "all checkpoints damaged": Start(
        "--max_steps 3",
        f"(?=.*{OLDER}: rank-00000.safetensors)(?=.*{NEWEST}: index.json)",
        (
            copy_trained,
            damage(f"{OLDER}/rank-00000.safetensors"),
            damage(f"{NEWEST}/index.json"),
        ),
        status=1,
    ),
    "another model": refused(
        "--model gpt2-124m --allow_changes",
        r"model tiny -> gpt2-124m",
        (copy_trained,),
    ),
    "more layers, although --allow_changes": refused(
        "--n_layer 3 --allow_changes", "n_layer 2 -> 3", (copy_trained,)
    ),
    "config.json of another code": refused(
        "", "run/config.json: .*wings", (copy_trained, edit("run/config.json", wings=2))
    ),
    "bad value in config.json": refused(
        "",
        "run/config.json: .*max_steps.*-4",
        (copy_trained, edit("run/config.json", max_steps=-4)),
    ),
    "part changed in config.json": bare(
        "",
        r"lr 0.003 -> 0.5",
        (copy_trained, edit("run/config.json", lr=0.5)),
        status=2,
    ),
    "two parts changed": refused(
        "--lr 0.5 --beta1 0.5", "(?=.*lr 0.003 -> 0.5)(?=.*beta1 0.9 -> 0.5)", (copy_trained,)
    ),
    "part changed, on two ranks": refused(
        "--lr 0.5 --max_steps 3", "lr 0.003 -> 0.5", (copy_trained,), ranks=2
    ),
    "part changed by a file": refused(
        "--config {p.root}/mine.json",
        "beta1 0.9 -> 0.5",
        (copy_trained, write("mine.json", {"beta1": 0.5})),
    ),
    "other data": refused(
        "--data {p.other} --max_steps 3", "{p.tokens} -> {p.other}", (copy_trained,)
    ),
}


@table(FOLDERS)
def test_a_folder_that_this_run_cannot_continue_is_refused(row, judge):
    judge(row)


DATA = {
    "no val.bin": ("val.bin", remove("data/val.bin")),
    "torn": ("train.bin.*1,999", tear),
    "high token": ("train.bin.* 300.* 257", end_with(300, "train")),
    "high validation token": ("val.bin.* 300.* 257", end_with(300, "val")),
    "token at the limit": ("train.bin.* 256.* 256", edit("data/meta.json", vocab_size=256)),
    "unknown dtype": ("float32.*uint16", edit("data/meta.json", dtype="float32")),
    "dtype of another size": ("train.bin", edit("data/meta.json", dtype="uint32")),
    "torn meta.json": ("{p.root}/data", write("data/meta.json", "{")),
    "no vocabulary": ("vocab_size", write("data/meta.json", {"dtype": "uint16"})),
    "too short": ("train.bin.* 16.* 17", cut("train", 16)),
    "validation too short": ("val.bin.* 16.* 17", cut("val", 16)),
}


@table(DATA)
def test_data_that_cannot_be_used_is_refused(row, judge):
    says, change = row
    judge(refused("--data {p.root}/data", says, (copy_tokens, change)))


@pytest.mark.parametrize("split", ["train", "val"])
def test_one_token_exchanged_between_starts_is_refused(split, judge):
    judge(
        Start("--data {p.root}/data", before=(copy_tokens,), steps=[1, 2]),
        refused("--data {p.root}/data --max_steps 3", "data", (end_with(0, split),)),
    )


RANKS = {
    "batch of nine": (2, "--global_batch_size 9", "global_batch_size 9.* 2 "),
    "batch of eight on three": (3, "", "global_batch_size 8.* 3 "),
    "micro-batches of three": (1, "--micro_batch_size 3", "8.*micro_batch_size 3"),
    "single on two": (2, "--strategy single", "single.* 1 .* 2 "),
    "three shards": (4, "--strategy hsdp --dp_shard 3", "dp_shard 3.* 4 "),
    "four shards": (2, "--strategy hsdp --dp_shard 4", "dp_shard 4.* 2 "),
    "shards of ddp": (2, "--strategy ddp --dp_shard 2", "ddp.*--dp_shard"),
}


@table(RANKS)
def test_ranks_that_do_not_fit_each_other_are_all_refused(row, judge):
    ranks, flags, says = row
    judge(refused(flags, says, ranks=ranks))


# --------------------------------------------------------------------------------------------------
# Two runs at once


def test_a_folder_belongs_to_one_run_at_a_time(judge, job):
    """Another process may only look at it, until the run has stopped."""
    copy_trained(judge.place)
    first = job(1, "--schedule constant --max_steps 1000000 --log_interval 100")
    first.until(lambda: len(first.rows()) > 2)
    second = refused("--timeout 3", f"{first.out}")
    judge.check_lines(second, judge.run(second))
    look = Start("--eval_only", val_loss=2)
    judge.check_lines(look, judge.run(look))
    first.process.terminate()
    assert first.wait() == 75  # the process is not torchrun's, so its status is train.py's
    (stopped,) = Run(first.out, 0, "", "").steps()[-1:]
    assert stopped == first.rows()[-1]["step"]
    assert f"stopped after step {stopped}" in first.printed()
    last = Start(f"--max_steps {stopped}", f"step {stopped}/{stopped}  val_loss")
    judge.check_lines(last, judge.run(last))
    judge(Start(f"--max_steps {stopped}", f"at step {stopped}, and --max_steps is {stopped}:"))
