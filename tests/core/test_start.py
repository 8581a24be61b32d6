"""How runs start and continue: tables of starts, judged by what they print and leave on disk.

A row of STARTS is a name and the starts of one run folder, a line each:

    changes of the disk before the start | how and flags | what is seen

A line of REFUSED is a name and one start, which ends with status 2. A start that lists no steps
must leave every file as it was.

Changes are those of `change`, with paths or patterns of paths below the row's folder, in which
`run` is the run. How: `x2` starts two ranks, and `bare` types no flags but those of the line; all
others also type TYPED. A start of {rank} differs between ranks. What is seen is one or more of

    status 2     the exit status of all ranks, if it is not 0
    says A, B    parts of the line of the error or, with status 0, of what is printed. They have
                 what a user needs, which is the flag or file and the values
    steps 1 2    of the training rows of the log
    saved 1 2    steps of the checkpoints, if they are not the last two steps
    evaluated 2  steps of the evaluations
    tokens 128   counted in each training row
    lr 0.01      in the last training row
    like FLAGS   the same losses and rates as those of a new run with these flags, on one rank
    val 2        it prints the validation loss of this step of the run {trained}
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from rig import SMALL, Run, cells, edit_manifest, run_command, snapshot, write_tokens

# The learning rate is constant, so that a run which ends and continues takes the same steps as one
# that does neither.
TYPED = f"{SMALL} --schedule constant --max_steps 2 --save_interval 1 --eval_interval 1"


class Place(NamedTuple):
    """The folders of a row. Its flags and what is seen name them as {root}, {trained}, ..."""

    root: Path  # the row's own
    tokens: Path
    other: Path  # other tokens
    trained: Path  # a run of two steps, each with a checkpoint: it may be read and copied


def change(place: Place, text: str) -> None:
    """Change the disk before a start."""
    root = place.root
    match text.split(":", 2):
        case "copy", source, name:  # the folder {trained} or {tokens}
            shutil.copytree(getattr(place, source), root / name)
        case "remove", pattern:
            for path in root.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        case "write", name, contents:
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(contents)
        case "edit", pattern, fields:  # of a JSON file
            (path,) = root.glob(pattern)
            if path.name == "manifest.json":
                edit_manifest(path, json.loads(fields))
            else:
                path.write_text(json.dumps(json.loads(path.read_text()) | json.loads(fields)))
        case "cut", name, count:  # a file of tokens, as a full disk does
            os.truncate(root / name, 2 * int(count))
        case _:
            raise ValueError(text)


# --------------------------------------------------------------------------------------------------
# One start


def run_rank(argvs: list[list[str]]) -> tuple[int, str, str]:
    """Run train.command with the flags of this rank."""
    return run_command(argvs[int(os.environ.get("RANK", 0))])


def column(out: Path, name: str) -> dict[int, float]:
    """Step -> value of a column of the log."""
    return {row["step"]: row[name] for row in Run(out).rows(name)}


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


class Judge:
    """Makes the starts of a row, and compares what they do with the row."""

    def __init__(self, pool, place: Place, new_runs: dict[str, Path]):
        self.pool = pool
        self.place = place
        self.new_runs = new_runs  # runs that ended without a stop, by flags

    def __call__(self, changes: str, flags: str, seen: str) -> None:
        for text in changes.split():
            change(self.place, text)
        before = snapshot(self.place.root)
        expected = self.start(flags, seen)
        if "steps" in expected:
            self.compare_folder(self.place.root / "run", expected)
        else:
            assert snapshot(self.place.root) == before

    def start(self, flags: str, seen: str, out: Path | None = None) -> dict[str, str]:
        """Make one start and compare what it prints; return all that the line expects."""
        names = self.place._asdict()
        expected = {}
        for part in seen.format(**names).split(";"):
            word, _, value = part.strip().partition(" ")
            expected[word] = value
        status = int(expected.get("status", 0))
        how, dashes, given = flags.partition("--")
        typed = "--device cpu" if "bare" in how else f"{TYPED} --data {{tokens}}"
        text = f"{typed} --out {out or self.place.root / 'run'} {dashes}{given}"
        found = re.search(r"x(\d)", how)
        ranks = int(found[1]) if found else 1
        argvs = [text.format(**names, rank=rank).split() for rank in range(ranks)]
        answers = self.pool(ranks, run_rank, argvs)
        _, printed, _ = answers[0]
        for found, _, error in answers:
            assert found == status, (printed, error)
            assert len(error.splitlines()) == (status > 0), error
            for part in expected.get("says", "").split(","):
                assert part.strip() in (error if status else printed)
        if "val" in expected:
            said = re.findall(r"val_loss (\d+\.\d+)", printed)[-1]
            loss = column(self.place.trained, "val_loss")[int(expected["val"])]
            assert float(said) == pytest.approx(loss, rel=1e-4)
        return expected

    def compare_folder(self, out: Path, expected: dict[str, str]) -> None:
        steps = numbers(expected["steps"])
        saved = numbers(expected["saved"]) if "saved" in expected else steps[-2:]
        assert [*column(out, "loss")] == steps
        assert Run(out).steps() == saved
        if "evaluated" in expected:
            assert [*column(out, "val_loss")] == numbers(expected["evaluated"])
        if "tokens" in expected:
            assert [*column(out, "tokens").values()] == numbers(expected["tokens"])
        if "lr" in expected:
            assert [*column(out, "lr").values()][-1] == pytest.approx(float(expected["lr"]))
        if "like" in expected:
            for name in ("loss", "val_loss", "lr"):
                of_new_run = column(self.new_run(expected["like"]), name)
                found = column(out, name)
                assert found == pytest.approx({step: of_new_run[step] for step in found}, rel=1e-5)

    def new_run(self, flags: str) -> Path:
        """Return a run with these flags that was never stopped, on one rank."""
        if flags not in self.new_runs:
            out = self.place.trained.parent / f"like-{len(self.new_runs)}"
            self.start(f"{flags} --max_steps 8", "status 0", out)
            self.new_runs[flags] = out
        return self.new_runs[flags]


@pytest.fixture(scope="module")
def folders(pool, tokens, tmp_path_factory) -> tuple[Place, dict[str, Path]]:
    """The folders that all rows read, and the runs of Judge.new_run."""
    root = tmp_path_factory.mktemp("start")
    other = write_tokens(root / "other", seed=2)
    place = Place(root, tokens, other, trained=root / "run")
    judge = Judge(pool, place, {})
    judge("", "", "steps 1 2; evaluated 1 2")
    return place, judge.new_runs


@pytest.fixture
def judge(pool, folders, tmp_path) -> Judge:
    """judge(changes, flags, seen): make a start, in a folder of this test."""
    place, new_runs = folders
    return Judge(pool, place._replace(root=tmp_path), new_runs)


# --------------------------------------------------------------------------------------------------
# Starts that train, and starts that only look

STARTS = """
# A run goes on after its newest checkpoint
more steps
copy:trained:run | --max_steps 3 | steps 1 2 3; like; says step-00000002, max_steps 2 -> 3
copy of one checkpoint
copy:trained:run remove:run/*.json* remove:run/*/*1 | --max_steps 4 |\
    steps 3 4; evaluated 2 3 4; like
checkpoint of another format, which other code can read, or of another step
copy:trained:run edit:run/*/*2/manifest.json:{"format":2} | x2 | status 1; says step-00000002
edit:run/*/*2/manifest.json:{"format":9} | | status 1; says step-00000002
edit:run/*/*2/manifest.json:{"format":4,"step":1} | | status 1; says step-00000002
no checkpoint yet
copy:trained:run remove:run/metrics* remove:run/checkpoints edit:run/config.json:{"max_steps":3} |\
    bare | steps 1 2 3; like
no checkpoint ever
| --keep_last 0 | steps 1 2; saved
| --keep_last 0 --max_steps 3 | steps 1 2 3; saved; like
# Flags that are not typed again
flags kept
| x2 --strategy fsdp --seed 3 --beta1 0.8 --max_grad_norm 0.5 | steps 1 2
| x2 bare --max_steps 3 |\
    steps 1 2 3; like --seed 3 --beta1 0.8 --max_grad_norm 0.5; says fsdp, dp_shard 2
mesh not kept
| x4 --strategy hsdp --dp_shard 2 | steps 1 2
| x2 bare --max_steps 3 | steps 1 2 3; like; says hsdp: dp_replicate 1 x dp_shard 2
auto takes back a kept flag
| --lr auto --micro_batch_size 2 | steps 1 2; lr 0.015625
| bare --lr auto --micro_batch_size auto --max_steps 3 |\
    steps 1 2 3; lr 0.015625; says micro_batch_size 2 -> 8
| bare --max_steps 4 | steps 1 2 3 4; lr 0.015625; says micro_batch_size 8 x
config.json edited
copy:trained:run edit:run/config.json:{"max_steps":4} | bare |\
    steps 1 2 3 4; like; says max_steps 2 -> 4
# --allow_changes, until a checkpoint has the change
changed lr kept
copy:trained:run | --lr 0.01 --max_steps 3 --save_interval 0 --allow_changes |\
    steps 1 2 3; lr 0.01; says lr 0.003 -> 0.01
remove:run/*/*3 | bare | status 2; says lr 0.003 -> 0.01
| bare --allow_changes | steps 1 2 3; saved 2 3
| bare --max_steps 4 | steps 1 2 3 4; lr 0.01
| --max_steps 5 | status 2; says lr 0.01 -> 0.003
several parts
copy:trained:run | --seed 1 --schedule linear --data {other} --max_steps 3 --allow_changes |\
    steps 1 2 3; lr 0.0015; says seed 0 -> 1, schedule constant -> linear, {tokens} -> {other}
batch
copy:trained:run | --global_batch_size 16 --max_steps 3 --allow_changes | steps 1 2 3
| bare --max_steps 4 | steps 1 2 3 4; tokens 128 256 512 768
# Flags that may change
strategy and micro-batches
copy:trained:run | x2 bare --micro_batch_size 2 --max_steps 3 |\
    steps 1 2 3; like; says strategy single -> ddp, micro_batch_size 8 -> 2
intervals
copy:trained:run | --log_interval 4 --eval_interval 5 --save_interval 0 --max_steps 8 |\
    steps 1 2 3 4 5 8; saved 2 8; evaluated 1 2 5 8; like
data moved
copy:trained:run copy:tokens:data | --data {root}/data --max_steps 3 |\
    steps 1 2 3; like; says {tokens} -> {root}/data
# --config
a file before the run's own flags
copy:trained:run write:mine.json:{"max_steps":3,"lr":null} | bare --config {root}/mine.json |\
    steps 1 2 3; like
typed flags before those of a file
write:mine.json:{"lr":0.5,"max_steps":9} | --config {root}/mine.json | steps 1 2; like
# --init_from
weights of a run
| --init_from {trained} --lr 0 --max_steps 1 | steps 1; lr 0; val 2
remove:run/metrics* remove:run/checkpoints | bare --max_steps 2 | steps 1 2; val 2
weights of a checkpoint
| --init_from {trained}/checkpoints/step-00000001 --lr 0 --max_steps 1 | steps 1; val 1
imported weights, gone later
copy:trained:old remove:old/*/*1 edit:old/*/*2/manifest.json:{"config":{}} |\
    --init_from {root}/old --data {other} | steps 1 2
| --eval_only --init_from {root}/run --data {other} | says evaluating {root}/run
remove:old | --init_from {root}/old --data {other} --max_steps 3 | steps 1 2 3
| bare --max_steps 4 | steps 1 2 3 4
weights, but the default learning rate
| bare --init_from {trained} --data {tokens} --max_steps 1 --warmup_steps 1 --sample_tokens 0 |\
    steps 1; lr 0.015625
weights of another tokenizer, with --allow_changes
copy:tokens:data edit:data/meta.json:{"tokenizer":null} |\
    --init_from {trained} --data {root}/data --allow_changes | steps 1 2; says bytes -> None
# A process that torchrun did not start is alone on its host
hsdp
| --strategy hsdp | steps 1 2; like
# Ranks that were started with different flags use those of rank 0
other flags on a rank
| x2 --lr 0.00{rank}3 | steps 1 2; lr 0.0003
# Starts that only look
finished, in a folder whose name is also that of the folder of checkpoints
copy:trained:checkpoints/run | bare --out {root}/checkpoints/run | says step 2, max_steps is 2
--eval_only on two ranks
copy:trained:run | x2 --eval_only --strategy fsdp --micro_batch_size 3 | val 2
--eval_only of other weights, with their flags
write:run/config.json:unread | bare --eval_only --init_from {trained}/checkpoints/step-00000001 |\
    val 1
"""

ROWS: dict[str, list[list[str]]] = {}
for name, *line in cells(STARTS):
    if line:
        [*ROWS.values()][-1].append([name, *line])
    else:
        ROWS[name] = []


@pytest.mark.parametrize("name", ROWS)
def test_a_start_trains_the_steps_that_are_left(judge, name):
    for line in ROWS[name]:
        judge(*line)


# --------------------------------------------------------------------------------------------------
# Starts that are refused

REFUSED = """
# Flags of no possible run
unknown flag           | | --learning_rate 1               | --learning_rate
shortened flag         | | --max_step 5                    | --max_step 5
no step                | | --max_steps 0                   | --max_steps, 0
nan                    | | --weight_decay nan              | --weight_decay, nan
beta of one            | | --beta2 1                       | --beta2, 1
unknown choice         | | --schedule step                 | --schedule, step, cosine
unknown unit           | | --wrap blocks                   | --wrap blocks
min_lr above lr        | | --min_lr 0.1                    | min_lr 0.1, 0.003
uneven heads           | | --d_model 34                    | d_model 34, n_head 4
heads of an odd size   | | --d_model 36                    | d_model 36, n_head 4
uneven groups of heads | | --n_kv_head 3                   | n_kv_head 3, n_head 4
no file                | | --config {root}/no.json         | {root}/no.json
no run                 | | --init_from {root}/no           | {root}/no
no checkpoint          | | --eval_only                     | {root}/run
no data                | | --data {root}/no                | {root}/no, train.bin
narrower model         | | --init_from {trained} --d_ff 80 | d_ff 64 -> 80
# Files of flags
wrong type   | write:mine.json:{"lr":"fast"} | --config {root}/mine.json | mine.json, lr, fast
torn file    | write:mine.json:{"lr":1       | --config {root}/mine.json | mine.json
# Folders that this run cannot continue
file             | write:run:mine        |                                | {root}/run
a checkpoint     | copy:trained:run | --out {root}/run/checkpoints/step-00000002 | step-00000002
other program    | write:run/config.json:[1] |                            | run/config.json
checkpoints lost | copy:trained:run remove:run/checkpoints | --max_steps 3     | {root}/run
every size       | copy:trained:run | --allow_changes --model olmo-1b --n_layer 3 --n_head 8\
    --n_kv_head 1 --d_model 64 --d_ff 80 | model tiny -> olmo-1b, n_layer 2 -> 3, n_head 4 -> 8,\
    n_kv_head 2 -> 1, d_model 32 -> 64, d_ff 64 -> 80
every other part | copy:trained:run | x2 --lr 0.5 --min_lr 0.1 --warmup_steps 2 --schedule linear\
    --optimizer muon --weight_decay 0.2 --beta1 0.5 --beta2 0.6 --clip adaptive --max_grad_norm 2\
    --max_grad_norm_ratio 3 --seed 1 --seq_len 8 --dtype bfloat16 --global_batch_size 16\
    --init_from {trained} | init_from None -> {trained},\
    lr 0.003 -> 0.5, min_lr 0.0 -> 0.1, warmup_steps 1 -> 2, schedule constant -> linear,\
    optimizer adamw -> muon, weight_decay 0.1 -> 0.2, beta1 0.9 -> 0.5, beta2 0.95 -> 0.6,\
    clip norm -> adaptive, max_grad_norm 1.0 -> 2.0, max_grad_norm_ratio 2.0 -> 3.0, seed 0 -> 1,\
    seq_len 16 -> 8, dtype float32 -> bfloat16, global_batch_size 8 -> 16
other data       | copy:trained:run | --data {other} --max_steps 3             | {tokens} -> {other}
# Data that cannot be used
torn             | copy:tokens:data cut:data/train.bin:999 | --data {root}/data | train.bin, 1,998
too short        | copy:tokens:data cut:data/train.bin:16 edit:data/meta.json:{"train_tokens":16} |\
    --data {root}/data | train.bin, 16, 17
other tokenizer  | copy:tokens:data edit:data/meta.json:{"tokenizer":"gpt2"} |\
    --init_from {trained} --data {root}/data | bytes -> gpt2
no tokenizer     | copy:tokens:data edit:data/meta.json:{"tokenizer":null} |\
    --eval_only --init_from {trained} --data {root}/data | bytes -> None
# Ranks that do not fit each other
above a batch   | | x2 --micro_batch_size 8         | global_batch_size 8, micro_batch_size 8 x 2
single          | | x2 --strategy single            | single, 1, 2
three shards    | | x4 --strategy hsdp --dp_shard 3 | dp_shard 3, 4
shards of ddp   | | x2 --strategy ddp --dp_shard 2  | ddp, --dp_shard
"""

REFUSALS = [pytest.param(*line, id=name) for name, *line in cells(REFUSED)]


@pytest.mark.parametrize("changes, flags, says", REFUSALS)
def test_a_start_that_cannot_succeed_is_refused(judge, changes, flags, says):
    judge(changes, flags, f"status 2; says {says}")


# --------------------------------------------------------------------------------------------------
# Two runs at once


def test_a_folder_belongs_to_one_run_at_a_time(judge, job):
    """Another process may only look at it, until the run has stopped."""
    change(judge.place, "copy:trained:run")
    first = job(1, "--schedule constant --max_steps 1000000 --log_interval 100")
    first.until(lambda: len(first.rows()) > 2)
    judge.start("--timeout 3", f"status 2; says {first.out}")
    judge.start("--eval_only", "val 2")
    first.process.terminate()
    assert first.wait() == 75  # the process is not torchrun's, so its status is train.py's
    stopped = first.rows()[-1]["step"]
    assert Run(first.out).steps()[-1] == stopped
    judge.start(f"--max_steps {stopped}", f"says step {stopped}/{stopped}  val_loss")
    judge("", f"--max_steps {stopped}", f"says step {stopped}, max_steps is {stopped}")
