"""train.py as a command: what it prints, logs, refuses and survives."""

import contextlib
import dataclasses
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    build_run,
    contents,
    copy_with,
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
import optim
from text import tokenizer
from tools import hf


@pytest.mark.slow(proves="the built-in data, in a copy of the core")
def test_the_built_in_data_needs_prepare_and_text(tmp_path):
    fork = copy_with(tmp_path / "fork")
    shutil.rmtree(fork / "text")
    command = [sys.executable, "train.py", "--max_steps", "1"]
    answer = subprocess.run(command, cwd=fork, capture_output=True, text=True)
    line = "train.py: error: tokens/python is prepared by prepare.py and text/: restore them, or "
    assert answer.returncode == 2 and answer.stderr.splitlines()[-1].startswith(line)


def test_the_command_of_the_readme_trains(tmp_path):
    """Shortened to 5 steps. It prepares the built-in data in the current folder."""
    text = "--strategy fsdp --device cpu --max_steps 5 --eval_sequences 16 --sample_tokens 16"
    job = torchrun(2, [*text.split(), "--warmup_steps", 5], tmp_path / "job", cwd=tmp_path)
    assert job.wait(150) == 0, job.err
    assert (tmp_path / "tokens/python/meta.json").exists()
    assert "fsdp: dp_replicate 1 x dp_shard 2 x tp 1 = 2 x cpu" in job.out
    assert (
        "16 sequences = micro_batch_size 8 x grad_accum_steps 1 x dp_size 2; "
        "x 128 tokens = 2,048 tokens a step"
    ) in job.out
    assert re.search(r"^step 5/5 +100%  loss \d\.\d{4}", job.out, re.M)
    first, last = rows(tmp_path / "runs/tiny")
    assert last["tokens"] == 5 * 16 * 128 and last["loss"] < first["loss"]
    fields = documented_fields("reference.md", "rows | fields", "training")
    assert last.keys() == fields | {"time"} and last["mfu"] is None
    assert last["tokens_per_second"] == pytest.approx(2048 / last["step_time"])
    (evaluation,) = rows(tmp_path / "runs/tiny", "val_loss")
    fields = documented_fields("reference.md", "rows | fields", "evaluation")
    assert evaluation.keys() == fields | {"time"}


def test_a_start_on_a_full_disk_leaves_nothing(on_ranks, small_disk):
    (small_disk / "other").write_bytes(bytes(1 << 20))
    ((status, _, err),) = on_ranks(1, listen, f"--out {small_disk}/runs/new --max_steps 2")
    line = f"[Errno 28] No space left on device: '{small_disk}/runs/new/config.json'"
    assert (status, err) == (1, f"train.py: error: {line}\n")
    assert [path.name for path in small_disk.iterdir()] == ["other"]


def test_weights_that_are_not_finite_are_never_saved(run, on_ranks):
    out = run(2, "--max_steps 3 --strategy fsdp")
    good = checkpoint.list_checkpoints(out)
    text = "--max_steps 5 --strategy fsdp --save_interval 1 --lr 1e300 --allow_changes"
    (status, said, err), _ = on_ranks(2, listen, text)
    assert status == 1 and "changed: --lr 0.003 -> 1e+300\n" in said
    assert f"NOT SAVED: cannot write {out}/checkpoints/step-00000004: the loss or a weight" in said
    assert err == (
        "train.py: error: the validation loss of step 5 is nan. The checkpoints in --out precede "
        "the divergence: lower --lr or check the data\n"
    )
    assert checkpoint.list_checkpoints(out) == good and checkpoint.verify(good[0]) is None


def test_init_from_keeps_a_vocabulary_that_is_large_enough(on_ranks, tmp_path):
    """The first run has a folder like nanoGPT's, whose tokenizer is described only by a pickle."""
    larger = tmp_path / "larger"
    larger.mkdir()
    for split in ("train", "val"):
        np.tile(np.arange(400, dtype="<u2"), 20).tofile(larger / f"{split}.bin")
    (larger / "meta.pkl").write_bytes(b"never read")
    first = tmp_path / "first"
    text = f"--max_steps 1 --dtype float32 --data {larger} --out {first} --sample_tokens 4"
    ((status, said, _),) = on_ranks(1, listen, text)
    sample = said.split(" sample ")[1].splitlines()[1]
    assert status == 0 and re.fullmatch(r"0 1 2 3( \d+){4}", sample)  # token ids
    text = f"--dtype float32 --out {tmp_path}/second --max_steps 1 --init_from {first}"
    text += " --allow_changes"  # the data has another tokenizer
    ((status, said, err),) = on_ranks(1, listen, text)
    assert (status, err) == (0, "")
    assert "2 layers x 32 wide, vocabulary 448: " in said
    assert [row["step"] for row in rows(tmp_path / "second")] == [1]
    before, after = (tensors(last_checkpoint(path)) for path in (first, tmp_path / "second"))
    # trained on from these weights: lr is 3e-3
    name = "model.blocks.1.mlp.up.weight"
    assert (after[name] - before[name]).abs().max() < 0.01 < before[name].abs().max()


def test_a_tokenizer_file_that_has_changed_is_refused(on_ranks, tokens, tmp_path):
    """The file has the same name, and the tokens of the data are the same."""
    folder = shutil.copytree(tokens, tmp_path / "own")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "tokenizer.json"}))
    hf.write_tokenizer(tokenizer.load_encoding("bytes"), folder / "tokenizer.json")
    text = f"--data {folder} --out {tmp_path}/run --max_steps"
    assert on_ranks(1, listen, f"{text} 1")[0][0] == 0
    with open(folder / "tokenizer.json", "a") as file:
        file.write("\n")
    ((status, _, err),) = on_ranks(1, listen, f"{text} 2")
    assert status == 2
    assert "the data's tokenizer tokenizer.json (crc32 " in err
    assert on_ranks(1, listen, f"{text} 2 --allow_changes")[0][0] == 0
    end = {"eos_token": tokenizer.END_OF_TEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    ((status, _, err),) = on_ranks(1, listen, f"--eval_only --out {tmp_path}/run --data {folder}")
    assert status == 2 and "the data's tokenizer tokenizer.json (crc32 " in err


def run_that_may_restart(argv: list[str]) -> tuple[int, str, str]:
    """Run train.py as under torchrun --max-restarts 3, which would restart it after an error."""
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    return core.run_command(argv)


STOPS = {  # flags, how it runs, status, number of checkpoints
    "without checkpoints": ("--checkpoint none", core.run_command, os.EX_TEMPFAIL, 0),
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


def settings_of_the_optimizer(argv: list[str]) -> dict:
    return vars(build_run(argv).state.optimizer.settings)


def test_every_flag_of_the_optimizer_reaches_it(on_ranks):
    """With the same name, and the value that was given."""
    given = {"eps": 0.5, "weight_decay": 0.25, "beta1": 0.125, "beta2": 0.0625, "min_lr": 1e-4}
    given |= {"max_grad_norm": 3.0, "max_grad_norm_ratio": 4.0}
    given |= {"clip": "adaptive", "schedule": "wsd", "optimizer": "muon", "lr": 2e-3}
    given |= {"max_steps": 9, "warmup_steps": 7, "device": "cpu"}
    assert given.keys() == {field.name for field in dataclasses.fields(optim.Settings)}
    text = " ".join(f"--{name} {value}" for name, value in given.items())
    (settings,) = on_ranks(1, settings_of_the_optimizer, text)
    assert given.items() <= settings.items()


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
    saving = {row["step"]: row["blocking_seconds"] for row in rows(out, "blocking_seconds")}
    assert (list(evaluated), list(saving)) == ([1, 2, 3, 4], [2, 4])
    # An evaluation writes its row at its end; then come the save of that step, and the next step.
    for after in rows(out)[1:]:
        before = after["step"] - 1
        passed = seconds(after) - evaluated[before]
        assert after["step_time"] + saving.get(before, 0) <= passed


def test_eval_only_prints_the_validation_loss_of_a_run(run, pool, tokens, tmp_path):
    out = run(1, "--max_steps 2 --save_interval 1 --dtype float32")
    (row,) = rows(out, "val_loss")
    before = contents(tmp_path)
    # Each byte is a token. val.bin also has end-of-text tokens, id 256.
    ids = np.fromfile(tokens / "val.bin", "<u2")
    tokens_per_byte = len(ids) / np.count_nonzero(ids != 256)
    # The run determines the model, its dtype, the data and the number of sequences. Three ranks may
    # evaluate, though they cannot divide the global batch of 8.
    argv = f"--out {out} --eval_only --device cpu --strategy".split()
    for ranks, mesh in ((1, "single"), (2, "fsdp --tp 2"), (3, "ddp")):
        status, line, err = pool(ranks, listen, [*argv, *mesh.split()])[0]
        assert (status, line.count("\n"), err) == (0, 1, "")
        assert line.startswith(f"{out}/checkpoints/step-00000002 on {tokens}: val_loss ")
        loss, perplexity, bits = evaluation(line)
        assert loss == pytest.approx(row["val_loss"], rel=1e-5)
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        assert bits == pytest.approx(loss / math.log(2) * tokens_per_byte, rel=1e-5)
    # A validation set with fewer sequences than --eval_sequences is read once.
    size = (len(ids) - 1) // 16
    lines = []
    for count in (size, 3 * size + 1):
        asked = [*argv, "single", "--eval_sequences", str(count)]
        lines += [said for _, said, _ in pool(1, listen, asked)]
    assert lines[0] == lines[1] and f"({size} sequences of 16 tokens)" in lines[0]
    assert contents(tmp_path) == before


def evaluation(line: str) -> list[float]:
    """Loss, perplexity and bits per byte."""
    pattern = r"val_loss (\S+), perplexity (\S+), (\S+) bits per byte \(10 sequences of 16 tokens\)"
    return [float(text) for text in re.search(pattern, line).groups()]


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
    assert evaluation(said)[0] == pytest.approx(logged, abs=1e-6)


def test_eval_only_accepts_another_checkpoint_and_other_data(run, pool, tokens, tmp_path):
    out = run(1, "--max_steps 2 --save_interval 1 --dtype float32 --eval_interval 1")
    other = shutil.copytree(tokens, tmp_path / "other")
    np.zeros(1000, "<u2").tofile(other / "val.bin")
    meta = json.loads((other / "meta.json").read_text()) | {"val_tokens": 1000, "val_bytes": 2000}
    (other / "meta.json").write_text(json.dumps(meta))
    path = checkpoint.list_checkpoints(out)[0]
    text = "--eval_only --eval_sequences 10 --device cpu --dtype float32"
    argv = [*text.split(), "--init_from"]
    ((_, first, _),) = pool(1, listen, [*argv, str(path)])
    assert evaluation(first)[0] == pytest.approx(rows(out, "val_loss")[0]["val_loss"], abs=1e-6)
    argv += [str(out), "--data", str(other)]
    ((_, newest, _),) = pool(1, listen, argv)
    assert newest.startswith(f"{out}/checkpoints/step-00000002 on {other}: val_loss ")
    loss, _, bits = evaluation(newest)
    assert bits == pytest.approx(loss / math.log(2) / 2, rel=1e-5)
    (other / "meta.json").write_text(json.dumps(meta | {"val_bytes": 0}))
    ((_, newest, _),) = pool(1, listen, argv)
    assert "bits per byte not comparable (text is lost, or its size is unknown) (10 " in newest


@pytest.mark.slow(proves="the loss at the end of the default run")
def test_the_default_run_learns_in_three_minutes(tmp_path):
    began = time.monotonic()
    job = torchrun(2, ["--strategy", "fsdp"], tmp_path / "job", cwd=tmp_path)
    assert job.wait(400) == 0, job.err
    assert time.monotonic() - began < 180
    assert rows(tmp_path / "runs/tiny", "val_loss")[-1]["val_loss"] <= 1.45
