"""train.py as a command: what it prints, logs and evaluates, and how it ends."""

import contextlib
import io
import os
import re
import signal
import time

import numpy as np
import pytest
import rig
import torch
import torch.nn.functional as F
from old import documented_fields, listen, rows, tensors, torchrun
from rig import ROOT, last_checkpoint

import checkpoint
import model


def test_the_command_of_the_readme_trains(tmp_path):
    """Shortened to 5 steps. It prepares the built-in data in the current folder."""
    text = "--strategy fsdp --device cpu --max_steps 5 --eval_sequences 16 --sample_tokens 16"
    job = torchrun(2, [*text.split(), "--warmup_steps", 5], tmp_path / "job", cwd=tmp_path)
    assert job.wait(150) == 0, job.err
    assert (tmp_path / "tokens/python/meta.json").exists()
    assert re.search(r"^step 5/5 +100%  loss \d\.\d{4}", job.out, re.M)
    out = tmp_path / "runs/tiny"
    first, last = rows(out)
    assert last["tokens"] == 5 * 16 * 128 and last["loss"] < first["loss"]
    assert last["tokens_per_second"] == pytest.approx(2048 / last["step_time"])
    for kind, row in {
        "training": last,
        "evaluation": rows(out, "val_loss")[0],
        "start": rows(out, "ranks")[0],
    }.items():
        fields = documented_fields("reference.md", "rows | fields", kind)
        assert row.keys() == fields - {"start"} | {"time"}


@pytest.mark.slow(proves="the loss at the end of the default run")
def test_the_default_run_learns_in_three_minutes(tmp_path):
    began = time.monotonic()
    job = torchrun(2, ["--strategy", "fsdp"], tmp_path / "job", cwd=tmp_path)
    assert job.wait(400) == 0, job.err
    assert time.monotonic() - began < 180
    assert rows(tmp_path / "runs/tiny", "val_loss")[-1]["val_loss"] <= 1.45


def run_the_notebook(folder: str) -> str:
    """What the code in docs/forking.md prints when it runs in `folder`."""
    page = (ROOT / "docs/forking.md").read_text()
    (code,) = re.findall(r"## In a notebook\n.*?```python\n(.*?)```", page, re.DOTALL)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    return out.getvalue()


def test_the_documented_notebook_trains_saves_and_loads(pool, tmp_path):
    for said in pool(2, run_the_notebook, str(tmp_path)):
        assert said.startswith("tensor(5.")
    path = last_checkpoint(tmp_path / "runs/notebook")
    assert checkpoint.verify(path) is None and len(tensors(path)) > 50


def test_init_from_keeps_a_vocabulary_that_is_large_enough(on_ranks, tmp_path):
    """The first run has a folder like nanoGPT's, whose tokenizer is described only by a pickle."""
    larger = tmp_path / "larger"
    larger.mkdir()
    for split in ("train", "val"):
        np.tile(np.arange(400, dtype="<u2"), 20).tofile(larger / f"{split}.bin")
    (larger / "meta.pkl").write_bytes(b"never read")
    text = f"--max_steps 1 --data {larger} --out {tmp_path}/first --sample_tokens 4"
    ((status, said, _),) = on_ranks(1, listen, text)
    sample = said.split(" sample ")[1].splitlines()[1]
    assert status == 0 and re.fullmatch(r"0 1 2 3 4( \d+){4} ?", sample)  # token ids
    text = f"--out {tmp_path}/second --max_steps 1 --init_from {tmp_path}/first --allow_changes"
    assert on_ranks(1, listen, text)[0][0] == 0
    weights = tensors(last_checkpoint(tmp_path / "second"))
    assert len(weights["model.embed.weight"]) == 448


# --------------------------------------------------------------------------------------------------
# How a stopped run ends


def run_that_may_restart(argv: list[str]) -> tuple[int, str, str]:
    """Run train.py as under torchrun --max-restarts 3, which would restart it after an error."""
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    return rig.run_command(argv)


@pytest.mark.parametrize(
    "flags, run, status",
    [
        ("--keep_last 0", rig.run_command, os.EX_TEMPFAIL),
        ("--keep_last 1", run_that_may_restart, 0),
    ],
)
def test_a_stopped_run_ends_with_the_status_that_its_launcher_needs(
    pool, tokens, tmp_path, flags, run, status
):
    text = f"{flags} --max_steps 1000000 --log_interval 1000000"
    running = rig.PoolJob(rig.arguments(tokens, tmp_path / "run", text), 1, run)
    running.until(running.rows)
    os.kill(running.ranks()[0], signal.SIGTERM)
    assert running.wait() == status
    (step,) = re.findall(r"stopped after step (\d+)", running.printed())
    assert [row["step"] for row in running.rows()] == [1, int(step)]
    assert len(checkpoint.list_checkpoints(running.out)) == int(flags.split()[1])


# --------------------------------------------------------------------------------------------------
# Evaluation


def test_ranks_that_cannot_divide_the_batch_may_evaluate(run, pool):
    out = run(1, "--max_steps 2 --dtype float32")
    (row,) = rows(out, "val_loss")
    argv = f"--out {out} --eval_only --device cpu --strategy ddp".split()  # its batch is 8
    status, said, _ = pool(3, listen, argv)[0]
    assert status == 0
    found = float(re.search(r"val_loss (\S+)\n", said)[1])
    assert found == pytest.approx(row["val_loss"], rel=1e-5)


def train_with_dropout(argv: list[str]) -> set[tuple[bool, bool]]:
    """Train with dropout in MLPs; return {(training mode, gradients enabled)} of their passes."""
    modes = set()

    def drop(module: torch.nn.Module, inputs: tuple, output: torch.Tensor):
        if isinstance(module, model.MLP):
            modes.add((module.training, torch.is_grad_enabled()))
            return F.dropout(output, 0.5, module.training)

    with torch.nn.modules.module.register_module_forward_hook(drop):
        status, _, err = listen(argv)
    assert (status, err) == (0, "")
    return modes


@pytest.mark.parametrize("strategy", ["ddp", "fsdp --activation_checkpointing full"])
def test_dropout_is_active_only_in_training_steps(on_ranks, strategy):
    text = f"--strategy {strategy} --max_steps 2 --eval_interval 1 --sample_tokens 3"
    for modes in on_ranks(2, train_with_dropout, text):
        assert modes == {(True, True), (False, False)}
    assert on_ranks(2, train_with_dropout, f"{text} --eval_only") == [{(False, False)}] * 2
