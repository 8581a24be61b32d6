"""train.py as a command: what it prints, logs and evaluates, and how it ends."""

import contextlib
import io
import os
import re
import shutil
import signal
import time
from datetime import datetime

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    contents,
    documented_fields,
    last_checkpoint,
    listen,
    rows,
    tensors,
    torchrun,
)
from core import conftest as core

import checkpoint
import model


def test_the_command_of_the_readme_trains(tmp_path):
    """Shortened to 5 steps. It prepares the built-in data in the current folder."""
    text = "--strategy fsdp --device cpu --max_steps 5 --eval_sequences 16 --sample_tokens 16"
    job = torchrun(2, [*text.split(), "--warmup_steps", 5], tmp_path / "job", cwd=tmp_path)
    assert job.wait(150) == 0, job.err
    assert (tmp_path / "tokens/python/meta.json").exists()
    assert "fsdp: dp_replicate 1 x dp_shard 2 x tp 1 = 2 x " in job.out
    assert re.search(r"^step 5/5 +100%  loss \d\.\d{4}", job.out, re.M)
    first, last = rows(tmp_path / "runs/tiny")
    assert last["tokens"] == 5 * 16 * 128 and last["loss"] < first["loss"]
    fields = documented_fields("reference.md", "rows | fields", "training")
    assert last.keys() == fields | {"time"} and last["mfu"] is None
    assert last["tokens_per_second"] == pytest.approx(2048 / last["step_time"])
    (evaluation,) = rows(tmp_path / "runs/tiny", "val_loss")
    fields = documented_fields("reference.md", "rows | fields", "evaluation")
    assert evaluation.keys() == fields | {"time"}
    (saved,) = rows(tmp_path / "runs/tiny", "bytes")
    fields = documented_fields("reference.md", "rows | fields", "checkpoint")
    assert saved.keys() == fields - {"checkpoint_failed", "error", "checkpoint"} | {"time"}
    (start,) = rows(tmp_path / "runs/tiny", "ranks")
    fields = documented_fields("reference.md", "rows | fields", "start")
    assert start.keys() == fields - {"start"} | {"time"}


@pytest.mark.slow(proves="the loss at the end of the default run")
def test_the_default_run_learns_in_three_minutes(tmp_path):
    began = time.monotonic()
    job = torchrun(2, ["--strategy", "fsdp"], tmp_path / "job", cwd=tmp_path)
    assert job.wait(400) == 0, job.err
    assert time.monotonic() - began < 180
    assert rows(tmp_path / "runs/tiny", "val_loss")[-1]["val_loss"] <= 1.45


def test_init_from_keeps_a_vocabulary_that_is_large_enough(on_ranks, tmp_path):
    """The first run has a folder like nanoGPT's, whose tokenizer is described only by a pickle."""
    larger = tmp_path / "larger"
    larger.mkdir()
    for split in ("train", "val"):
        np.tile(np.arange(400, dtype="<u2"), 20).tofile(larger / f"{split}.bin")
    (larger / "meta.pkl").write_bytes(b"never read")
    first, second = tmp_path / "first", tmp_path / "second"
    text = f"--max_steps 1 --dtype float32 --data {larger} --out {first} --sample_tokens 4"
    ((status, said, _),) = on_ranks(1, listen, text)
    sample = said.split(" sample ")[1].splitlines()[1]
    assert status == 0 and re.fullmatch(r"0 1 2 3 4( \d+){4} ?", sample)  # token ids
    text = f"--dtype float32 --out {second} --max_steps 1 --init_from {first}"
    text += " --allow_changes"  # the data has another tokenizer
    ((status, said, err),) = on_ranks(1, listen, text)
    assert (status, err) == (0, "")
    assert "2 layers x 32 wide, vocabulary 448: " in said
    assert [row["step"] for row in rows(second)] == [1]
    before, after = (tensors(last_checkpoint(path)) for path in (first, second))
    # trained on from these weights: lr is 3e-3
    name = "model.blocks.1.mlp.up.weight"
    assert (after[name] - before[name]).abs().max() < 0.01 < before[name].abs().max()


def run_that_may_restart(argv: list[str]) -> tuple[int, str, str]:
    """Run train.py as under torchrun --max-restarts 3, which would restart it after an error."""
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    return core.run_command(argv)


STOPS = {  # flags, how it runs, status, number of checkpoints
    "without checkpoints": ("--keep_last 0", core.run_command, os.EX_TEMPFAIL, 0),
    "torchrun may restart": ("--strategy fsdp", run_that_may_restart, 0, 1),
}


@pytest.mark.parametrize("stop", STOPS)
def test_a_stopped_run_ends_with_the_status_that_its_launcher_needs(pool, tokens, tmp_path, stop):
    text, run, status, saved = STOPS[stop]
    text += " --max_steps 1000000 --log_interval 1000000"
    running = core.PoolJob(pool, core.arguments(tokens, tmp_path / "run", text), 1, run)
    running.until(running.rows)
    os.kill(running.ranks()[0], signal.SIGTERM)
    assert running.wait() == status
    (step,) = re.findall(r"stopped after step (\d+)", running.printed())
    assert [row["step"] for row in running.rows()] == [1, int(step)]
    assert len(checkpoint.list_checkpoints(running.out)) == saved


def run_the_notebook(folder: str) -> str:
    """What the code in docs/forking.md prints when it runs in `folder`."""
    page = (ROOT / "docs/forking.md").read_text()
    (code,) = re.findall(r"## In a notebook\n.*?```python\n(.*?)```", page, re.DOTALL)
    assert len(code.strip().splitlines()) <= 15
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    return out.getvalue()


def test_the_documented_notebook_trains_saves_and_loads(pool, tmp_path):
    for said in pool(2, run_the_notebook, str(tmp_path)):
        assert said.startswith("tensor(5.")
    path = last_checkpoint(tmp_path / "runs/notebook")
    assert checkpoint.verify(path) is None and len(tensors(path)) > 50


def seconds(row: dict) -> float:
    """The time at which a row was written."""
    return datetime.fromisoformat(row["time"]).timestamp()


def test_saves_and_evaluations_are_not_part_of_a_step_time(run):
    out = run(1, "--max_steps 4 --save_interval 2 --eval_interval 1 --log_interval 1")
    evaluated = {row["step"]: seconds(row) for row in rows(out, "val_loss")}
    saved = {row["step"]: seconds(row) for row in rows(out, "blocking_seconds")}
    assert (list(evaluated), list(saved)) == ([1, 2, 3, 4], [2, 4])
    # A save and an evaluation write their rows at their ends: the save, the evaluation, a step.
    for step in saved:
        assert saved[step] <= evaluated[step]
    for row in rows(out)[1:]:
        assert row["step_time"] <= seconds(row) - evaluated[row["step"] - 1]


# --------------------------------------------------------------------------------------------------
# Evaluation


def val_loss(said: str) -> float:
    return float(re.search(r"val_loss (\S+)\n", said)[1])


def test_eval_only_prints_the_validation_loss_of_a_run(run, pool, tokens, tmp_path):
    out = run(1, "--max_steps 2 --dtype float32")
    (row,) = rows(out, "val_loss")
    other = shutil.copytree(tokens, tmp_path / "other")
    shutil.copy(tokens / "train.bin", other / "val.bin")
    meta = (other / "meta.json").read_text()
    (other / "meta.json").write_text(meta.replace('"val_tokens"', '"of_another_val.bin"'))
    before = contents(tmp_path)
    # The run determines the model, its dtype, the data and the number of sequences. Three ranks may
    # evaluate, though they cannot divide the global batch of 8.
    argv = f"--out {out} --eval_only --device cpu --strategy".split()
    for ranks, mesh in ((2, "fsdp --tp 2"), (3, "ddp")):
        status, said, err = pool(ranks, listen, [*argv, *mesh.split()])[0]
        assert (status, err) == (0, "")
        assert f"{out}/checkpoints/step-00000002 on {tokens}: val_loss " in said
        assert val_loss(said) == pytest.approx(row["val_loss"], rel=1e-5)
    # A validation set with fewer sequences than --eval_sequences is read once.
    size = (len(np.fromfile(tokens / "val.bin", "<u2")) - 1) // 16
    found = []
    for text in (f"--eval_sequences {size}", f"--eval_sequences {3 * size + 1}", f"--data {other}"):
        ((_, said, _),) = pool(1, listen, [*argv, "single", *text.split()])
        found.append(val_loss(said))
    assert found[0] == found[1] != found[2]
    assert contents(tmp_path) == before


def train_with_dropout(argv: list[str]) -> tuple[str, set]:
    """Train with dropout; return the output and (training mode, gradients enabled) of MLPs."""
    modes = set()

    def drop(module: torch.nn.Module, inputs: tuple, output: torch.Tensor):
        if isinstance(module, model.MLP):
            modes.add((module.training, torch.is_grad_enabled()))
            return F.dropout(output, 0.5, module.training)

    with torch.nn.modules.module.register_module_forward_hook(drop):
        status, said, err = listen(argv)
    assert (status, err) == (0, "")
    return said, modes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp --activation_checkpointing full"])
def test_dropout_is_active_only_in_training_steps(on_ranks, tmp_path, strategy):
    text = f"--strategy {strategy} --max_steps 2 --eval_interval 1 --sample_tokens 3 --lr 0.1"
    for _, modes in on_ranks(2, train_with_dropout, text):
        assert modes == {(True, True), (False, False)}
    (said, modes), _ = on_ranks(2, train_with_dropout, f"{text} --eval_only")
    assert modes == {(False, False)}
    logged = rows(tmp_path / "run", "val_loss")[-1]["val_loss"]
    assert val_loss(said) == pytest.approx(logged, abs=1e-6)
