"""From a command line and processes to ranks on a mesh, and how a command ends."""

import contextlib
import dataclasses
import io
import os
import re
import signal
import time
from datetime import timedelta
from functools import partial

import numpy as np
import pytest
import rig
import torch
from rig import ROOT, cells, free_port, resolve, run_command, variables

import checkpoint
import dist
import errors
import model
from config import KINDS, SIZE_FLAGS

# --------------------------------------------------------------------------------------------------
# Flags -> run

# flags | ranks, ranks of a host, GPU | values of the run
RUNS = """
| 1 1      | strategy=single dp_size=1 grad_accum_steps=1 wrap=none lr=0.00390625 dtype=float32
| 8 4      | strategy=ddp dp_size=8 micro_batch_size=2
| 1 1 H200 | dtype=bfloat16 peak_tflops=989
--dtype float32                     | 1 1 H200 | peak_tflops=None
--tp 8                              | 8 4      | strategy=single dp_size=1 micro_batch_size=16
--strategy fsdp                     | 16 8     | dp_shard=16 micro_batch_size=1
--strategy hsdp                     | 8 4      | dp_replicate=2 dp_shard=4 tokens_per_step=2048
--strategy hsdp --dp_shard 2        | 8 8      | dp_replicate=4 dp_shard=2
--strategy hsdp --tp 2              | 16 8     | dp_replicate=2 dp_shard=4 dp_size=8
--n_head 2                          | 1 1      | n_head=2 n_kv_head=2
--model llama3-8b --n_head 64       | 1 1      | wrap=block n_kv_head=8
--config {configs}/gpt2-124m.json   | 8 8      | grad_accum_steps=5 tokens_per_step=491520
--config {configs}/olmo-1b.json     | 64 8     | grad_accum_steps=4 tokens_per_step=4194304
--config {configs}/llama3-8b.json   | 64 8     | grad_accum_steps=8 tokens_per_step=4194304
"""


@pytest.mark.parametrize("text, place, values", cells(RUNS))
def test_a_run_follows_from_flags_ranks_and_hardware(text, place, values):
    size, local_size, *gpu = place.split()
    world = {"size": int(size), "local_size": int(local_size), "has_bfloat16": bool(gpu)}
    run = resolve(text.format(configs=ROOT / "configs"), device_name=" ".join(gpu), **world)
    names = [value.partition("=")[0] for value in values.split()]
    assert [f"{name}={getattr(run, name)}" for name in names] == values.split()


def test_the_reference_lists_the_kinds_of_flags():
    table = (ROOT / "docs/reference.md").read_text().partition("## Resuming")[2]
    for kind in ("part", "once"):
        (row,) = re.findall(rf"^\| {kind} \| (.*?) \|", table, re.M)
        expected = {name for name, its_kind in KINDS.items() if its_kind == kind}
        assert {*re.findall(r"--(\w+)", row)} == expected - {"model", *SIZE_FLAGS}


# --------------------------------------------------------------------------------------------------
# Processes -> ranks


def run_with(environment: dict[str, str], argv: list[str]) -> tuple[int, str, str]:
    """Run train.command in an environment with these variables."""
    os.environ |= environment
    return run_command(argv)


@pytest.mark.parametrize("variable, status", [("WORLD_SIZE", 2), ("SLURM_NTASKS", 2), ("OTHER", 0)])
def test_one_of_several_processes_without_torchrun_is_refused(
    pool, tokens, tmp_path, variable, status
):
    """Otherwise `srun -n 8 python train.py` would become eight runs of one process."""
    argv = rig.arguments(tokens, tmp_path / "run", "--max_steps 1")
    ((found, _, _),) = pool(1, run_with, {"WORLD_SIZE": "1", variable: "8"}, argv)
    assert found == status
    assert (tmp_path / "run").exists() == (status == 0)


def join_again(environment: dict[str, str]) -> list[bool]:
    """Whether a rank finds what it stored before: at first, again, and after a restart."""
    os.environ |= environment | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    port = int(environment["MASTER_PORT"])
    server = torch.distributed.TCPStore("127.0.0.1", port, is_master=True)  # noqa: F841
    found = []
    for attempt in "001":
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        store, *numbers = dist.find_ranks(timedelta(seconds=5))
        assert numbers == [0, 2]
        found.append(store.check(["address"]))
        store.set("address", "of this attempt")
    return found


def test_ranks_that_torchrun_restarts_do_not_read_the_addresses_of_dead_ones(pool):
    assert pool(1, join_again, variables(0, 2, free_port())) == [[False, True, False]]


def seconds_until_absent_ranks_are_missed() -> float:
    """How long ranks 0 and 3 wait for ranks 1 and 2 in the first collective of their groups."""
    world = dist.join("cpu", timedelta(seconds=60))
    dist.on_all_ranks(int)  # then no rank waits 2 s for another one that still joins
    impatient = dataclasses.replace(world, timeout=timedelta(seconds=2))
    # Which of two ranks connects to the other depends on their ports, so several meshes are made.
    meshes = [dist.make_mesh(impatient, (2, 2, 1)) for _ in range(4)]
    groups = [mesh.get_group(axis) for mesh in meshes for axis in ("dp_replicate", "dp_shard")]
    began = time.monotonic()
    if world.rank in (0, 3):
        sums = [torch.distributed.all_reduce(torch.ones(1), group=g, async_op=True) for g in groups]
        for waiting in sums:
            with pytest.raises(RuntimeError, match="gloo/"):
                waiting.wait()
    seconds = time.monotonic() - began
    dist.on_all_ranks(int)  # no rank exits while another one connects
    return seconds


def test_a_mesh_waits_for_a_rank_as_long_as_its_world_says(pool):
    """gloo waits for a connection five times as long as for a collective."""
    first, *_, last = pool(4, seconds_until_absent_ranks_are_missed)
    assert 2 <= first < 20 and 2 <= last < 20


# --------------------------------------------------------------------------------------------------
# A model on the mesh


def see_passes(argv: list[str]) -> set[tuple]:
    """Train; return the different passes through attention.

    Each is (training mode, gradients are enabled, dtype of the RoPE table).
    """
    found = set()

    def see(module, inputs, keywords, output) -> None:
        if isinstance(module, model.Attention):
            found.add((module.training, torch.is_grad_enabled(), keywords["rope"].dtype))

    with torch.nn.modules.module.register_module_forward_hook(see, with_kwargs=True):
        status, _, error = run_command(argv)
    assert status == 0, error
    return found


def test_only_steps_are_in_training_mode_and_the_rope_table_is_never_rounded(on_ranks):
    """Dropout of a fork is active in steps, but neither in evaluations nor in samples."""
    text = "--strategy fsdp --wrap block --dtype bfloat16 --eval_interval 1 --sample_tokens 3"
    step, other = (True, True, torch.float32), (False, False, torch.float32)
    assert on_ranks(2, see_passes, text) == [{step, other}] * 2
    assert on_ranks(2, see_passes, f"{text} --eval_only") == [{other}] * 2


# --------------------------------------------------------------------------------------------------
# Commands that people come for

SHORT = "--max_steps 5 --warmup_steps 5 --eval_sequences 16 --sample_tokens 16"
WHOLE = pytest.param("", 1.6, marks=pytest.mark.slow(proves="the loss of the default run"))


@pytest.mark.parametrize("flags, most", [(SHORT, 5.5), WHOLE])
def test_the_command_of_the_readme_learns(tmp_path, flags, most):
    """It prepares its data in an empty folder. At first the loss is 5.55."""
    command = rig.torchrun(2, ["--strategy", "fsdp", *flags.split()])
    job = rig.Job(command, tmp_path / "job", cwd=tmp_path)
    assert job.wait(400) == 0, job.printed()
    evaluations = rig.read_rows(tmp_path / "runs/tiny/metrics.jsonl", "val_loss")
    assert evaluations[-1]["val_loss"] <= most


def run_the_notebook(folder: str) -> str:
    """What the code in docs/forking.md prints when it runs in `folder`."""
    page = (ROOT / "docs/forking.md").read_text()
    (code,) = re.findall(r"## In a notebook\n.*?```python\n(.*?)```", page, re.DOTALL)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    return out.getvalue()


def test_the_documented_notebook_trains_and_saves(pool, tmp_path):
    for said in pool(2, run_the_notebook, str(tmp_path)):
        assert said.startswith("tensor(5.")
    assert checkpoint.verify(rig.last_checkpoint(tmp_path / "runs/notebook")) is None


def test_init_from_keeps_a_vocabulary_that_is_large_enough(train, tmp_path):
    """The first run has a folder like nanoGPT's, whose tokenizer is described only by a pickle."""
    larger = tmp_path / "larger"
    larger.mkdir()
    for split in ("train", "val"):
        np.tile(np.arange(400, dtype="<u2"), 20).tofile(larger / f"{split}.bin")
    (larger / "meta.pkl").write_bytes(b"never read")
    first = train(1, f"--max_steps 1 --data {larger} --sample_tokens 4", "first")
    sample = first.printed.split(" sample ")[1].splitlines()[1]
    assert re.fullmatch(r"0 1 2 3 4( \d+){4} ?", sample)  # token ids
    second = train(1, f"--max_steps 1 --init_from {first.out} --allow_changes", "second")
    assert len(second.weights()["model.embed.weight"]) == 448


# --------------------------------------------------------------------------------------------------
# Ends


def test_a_stopped_run_that_torchrun_would_restart_ends_with_status_0(pool, tokens, tmp_path):
    """Its last step has a row and a checkpoint. Without --max-restarts its status is 75."""
    text = "--max_steps 1000000 --log_interval 1000000"
    argv = rig.arguments(tokens, tmp_path / "run", text)
    running = rig.PoolJob(argv, 1, partial(run_with, {"TORCHELASTIC_MAX_RESTARTS": "3"}))
    running.until(running.rows)
    os.kill(running.ranks()[0], signal.SIGTERM)
    assert running.wait() == 0
    step = checkpoint.step_of(rig.last_checkpoint(running.out))
    assert [row["step"] for row in running.rows()] == [1, step]


class DiskError(ValueError):
    """An error that cannot be unpickled, because its arguments are not those of ValueError."""

    exit_status = 2

    def __init__(self, disk: str, problem: str):
        super().__init__(f"{disk} {problem}")


def outcome(where: str, endings: list[str]) -> str:
    """What this rank returns or raises, if each rank has its own ending."""
    world = dist.join("cpu", timedelta(seconds=9))
    group = torch.distributed.new_group([1, 2]) if where == "group" else None

    def work() -> str:
        if endings[world.rank] != "fine":
            raise {"os": OSError("full"), "disk": DiskError("disk", "full")}[endings[world.rank]]
        return f"rank {world.rank}"

    try:
        if where == "rank0":
            found = dist.on_rank0(work)
        elif endings[world.rank] == "outside":
            found = "outside"
        else:
            found = " ".join(dist.on_all_ranks(work, group=group))
    except Exception as error:
        found = f"{type(error).__name__} {getattr(error, 'exit_status', '-')}"
    dist.on_all_ranks(int)  # no rank exits while another one connects
    return found


# where, the endings of three ranks | what each rank gets
OUTCOMES = """
all   fine fine fine    | rank 0 rank 1 rank 2 | rank 0 rank 1 rank 2 | rank 0 rank 1 rank 2
all   fine os   fine    | RankError 1          | OSError -            | RankError 1
all   fine disk os      | RankError 2          | DiskError 2          | RankError 2
rank0 fine disk os      | rank 0               | rank 0               | rank 0
rank0 disk fine fine    | DiskError 2          | RankError 2          | RankError 2
group outside fine fine | outside              | rank 1 rank 2        | rank 1 rank 2
group outside fine disk | outside              | RankError 2          | DiskError 2
"""


@pytest.mark.parametrize("case, expected", [(case, found) for case, *found in cells(OUTCOMES)])
def test_an_error_on_one_rank_is_raised_on_all(pool, case, expected):
    where, *endings = case.split()
    assert pool(3, outcome, where, endings, timeout=8) == expected


ENDS = [
    (errors.UsageError("--lr is too high"), 2),
    (OSError(28, "No space left"), 1),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1),
    (ModuleNotFoundError("No module named 'wandb'", name="wandb"), 1),
    (KeyboardInterrupt(), 130),
    (ZeroDivisionError("a bug"), None),
]


@pytest.mark.parametrize("error, status", ENDS)
def test_an_expected_error_gives_one_line_and_a_status(capsys, error, status):
    """An unexpected one is raised. Ctrl-C prints nothing."""

    def fail() -> None:
        raise error

    if status is None:
        with pytest.raises(type(error)):
            errors.execute("prog", fail)
        return
    assert errors.execute("prog", fail) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 0 if status == 130 else 1)
    assert str(error) in err
