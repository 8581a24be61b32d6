"""From flags to the resolved run."""

import codecs
import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import CPU, FACTS, ROOT, resolve

import config
from config import (
    FLAGS,
    SIZE_FLAGS,
    Config,
    as_argv,
    check_flags,
    parse,
    profile_window,
)
from dist import MeshError
from errors import UsageError


def test_flags_take_precedence_over_a_config_file(tmp_path):
    file = tmp_path / "config.json"
    flags = {"lr": 0.5, "async_save": True, "model": "gpt2-124m", "tp": 2, "min_lr": None}
    file.write_text(json.dumps(flags))
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())  # some editors write a byte order mark
    expected = Config(lr=1e-3, async_save=True, model="gpt2-124m", tp=2, out="runs/gpt2-124m")
    assert parse(["--config", str(file), "--lr", "1e-3"]) == expected


def test_a_config_is_read_as_it_was_written():
    """as_argv and JSON keep every value, also those that stand for a computed default."""
    config = Config(out="a", lr=1e-3, n_layer=3, compile=True, data="a b,c", strategy="fsdp")
    written = json.loads(json.dumps(dataclasses.asdict(config)))
    assert parse(as_argv(written)) == config
    assert parse(["--out=a"], {"config.json": check_flags(written, "config.json")}) == config


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.default is None])
def test_auto_takes_back_a_flag(name):
    value = {"model": "llama3-8b", "profile": "3:4", "out": "a", "init_from": "a"}.get(name, 5)
    saved = {"config.json": {name: value}}
    assert parse(["--out=b", f"--{name}=auto"], saved) == parse(["--out=b", f"--{name}=auto"])
    assert parse([f"--{name}=auto"]) == parse([])


def test_a_run_is_named_after_its_initial_weights():
    """The path is not read, since it may be on another host."""
    source = "runs/a/checkpoints/step-00000600"
    assert parse(["--init_from", "imported/smollm2"]).out == "runs/smollm2"
    assert parse(["--init_from", source]).out == "runs/a-step-00000600"
    assert parse(["--init_from", source, "--out", "mine"]).out == "mine"


def test_a_run_from_another_run_needs_a_new_folder():
    argv = ["--init_from", "runs/a"]
    with pytest.raises(UsageError, match="choose a new folder with --out: runs/a belongs "):
        parse(argv)
    assert parse([*argv, "--out", "runs/c"]).out == "runs/c"
    assert parse([*argv, "--eval_only"]).init_from == "runs/a"


@pytest.mark.parametrize("flag", ["--init_from", "--out"])
def test_an_empty_path_is_refused(flag):
    with pytest.raises(UsageError, match=f"{flag} is empty: give a path"):
        parse([flag, ""])


@pytest.mark.slow(proves="a fork of the core without extras")
def test_a_field_of_the_model_gets_a_flag_with_one_line(tmp_path):
    """The new flag overrides the field of each named size, unless it is not given."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    source = (tmp_path / "model.py").read_text()
    line = "    tied: bool = True"
    flag = '    tied: Annotated[bool, "part", "share the matrix"] = True'
    assert source.count(line) == 1
    (tmp_path / "model.py").write_text(source.replace(line, flag))
    code = """
import config, data, dist
machine, facts = dist.Machine(1, 1, "cpu", "", False), data.DataFacts(257, "bytes", "")
for text in ("", "--tied", "--tied false", "--model llama3-8b", "--model llama3-8b --tied auto"):
    run = config.resolve(config.parse(text.split()), machine, facts)
    print(run.model_config.tied)
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True", "False", "False", "False"]


def test_the_reference_lists_the_kinds_of_flags():
    table = (ROOT / "docs/reference.md").read_text().partition("## Resuming")[2]
    for kind in ("part", "once"):
        (row,) = re.findall(rf"^\| {kind} \| (.*?) \|", table, re.M)
        expected = {name for name, flag in FLAGS.items() if flag.kind == kind}
        assert {*re.findall(r"--(\w+)", row)} == expected - SIZE_FLAGS


def test_a_profile_window_lies_within_the_run():
    assert profile_window("10:13") == (10, 13)
    for text in ("3", "3:3", "a:b", "-1:3"):
        with pytest.raises(UsageError, match=f"--profile {text}: give START:STOP"):
            profile_window(text)
    with pytest.raises(UsageError, match="--profile 3:700: STOP must be below max_steps 700"):
        resolve("--profile 3:700")


@pytest.mark.parametrize(
    "wrap", ["blocks", "block_group", "block_group:0", "block:2", "none:2", "auto:2"]
)
def test_an_unknown_wrap_is_refused(wrap):
    with pytest.raises(MeshError, match=f"--wrap {wrap}: choose auto, block, block_group"):
        resolve(f"--wrap {wrap}")


def test_a_batch_is_split_into_micro_batches():
    run = resolve("--strategy fsdp", world_size=4)
    assert (run.micro_batch_size, run.grad_accum_steps) == (4, 1)
    run = resolve("--strategy fsdp --micro_batch_size 2", world_size=4)
    assert (run.micro_batch_size, run.grad_accum_steps) == (2, 2)
    # The two ranks of a tp group share their sequences.
    assert resolve("--strategy fsdp --tp 2", world_size=4).micro_batch_size == 8
    # For example, one of several hosts was lost.
    with pytest.raises(UsageError, match="16 is not a multiple of micro_batch_size 2 x 6 .* = 12:"):
        resolve("--strategy fsdp --global_batch_size 16 --micro_batch_size 2", world_size=6)


@pytest.mark.parametrize(
    "ranks, flags, larger",
    [
        (3, "", 18),
        (6, "", 18),
        (7, "", 21),
        (32, "", 32),
        (6, "--tp 2", 18),
        (6, "--micro_batch_size 2", 24),
        (2, "--micro_batch_size 3", 18),
        (3, "--micro_batch_size 16", 48),
    ],
)
def test_a_refused_batch_comes_with_one_that_works(ranks, flags, larger):
    """It has the default of 16 sequences; only a micro-batch that was typed is mentioned."""
    with pytest.raises(UsageError) as refused:
        resolve(f"--strategy fsdp {flags}", world_size=ranks)
    text = str(refused.value)
    assert text.startswith("global_batch_size 16 is not a multiple of ") and "\n" not in text
    assert ("micro_batch_size" in text) == ("micro_batch_size" in flags)
    (given,) = re.findall(r"give .*--global_batch_size (\d+)", text)
    assert int(given) == larger
    run = resolve(f"--strategy fsdp {flags} --global_batch_size {given}", world_size=ranks)
    assert run.micro_batch_size * run.grad_accum_steps * run.dp_size == larger


DEFAULTS = {  # (flags, ranks): strategy, dp_replicate x dp_shard, micro-batches
    ("--model gpt2-124m", 1): ("single", "1 x 1", "512 x 1"),
    ("--model llama3-70b", 8): ("ddp", "8 x 1", "64 x 1"),
    ("--tp 8", 8): ("single", "1 x 1", "512 x 1"),
    ("--tp 2", 8): ("ddp", "4 x 1", "128 x 1"),
    ("--strategy fsdp --micro_batch_size 16", 8): ("fsdp", "1 x 8", "16 x 4"),
    ("--strategy hsdp", 8): ("hsdp", "2 x 4", "64 x 1"),
}


@pytest.mark.parametrize("flags, ranks", DEFAULTS)
def test_defaults_of_the_mesh_and_the_batch(flags, ranks):
    text = f"{flags} --global_batch_size 512 --n_kv_head 8 --n_head 8"
    run = resolve(text, world_size=ranks, local_size=min(ranks, 4))
    mesh = f"{run.dp_replicate} x {run.dp_shard}"
    batch = f"{run.micro_batch_size} x {run.grad_accum_steps}"
    assert (run.strategy, mesh, batch) == DEFAULTS[flags, ranks]
    assert (run.grad_sync, run.loss_chunks) == ("batch", 1)


@pytest.mark.parametrize(
    "name, ranks, split, tokens_per_step, tokens",
    [
        ("gpt2-124m", 8, (12, 5), 491_520, 295e9),
        ("olmo-1b", 64, (8, 4), 4_194_304, 3.1e12),
        ("llama3-8b", 64, (1, 8), 4_194_304, 15e12),
    ],
)
def test_configs_have_the_documented_number_of_tokens(name, ranks, split, tokens_per_step, tokens):
    run = resolve(f"--config {ROOT}/configs/{name}.json", world_size=ranks, local_size=8)
    assert (run.micro_batch_size, run.grad_accum_steps) == split
    assert run.tokens_per_step == tokens_per_step
    assert run.max_steps * tokens_per_step == pytest.approx(tokens, rel=1e-3)


def test_flags_override_fields_of_a_named_size():
    run = resolve("--n_head 2 --d_ff 64")
    assert (run.n_head, run.n_kv_head, run.d_ff) == (2, 2, 64)
    assert resolve("--model llama3-8b --n_head 64").n_kv_head == 8


def test_the_vocabulary_of_a_model_is_padded():
    assert resolve("").model_config.vocab_size == 320


def test_tp_must_divide_the_number_of_kv_heads():
    with pytest.raises(UsageError, match="n_kv_head 4 / tp 3"):
        resolve("--tp 3", world_size=3)


# --------------------------------------------------------------------------------------------------
# The resolved run

NONE_IS_A_VALUE = {"init_from", "profile", "peak_tflops", "rope_scaling"}
COMMAND_LINES = [
    ("", 1),
    ("--strategy ddp", 2),
    ("--strategy fsdp --wrap block_group:2", 4),
    ("--strategy hsdp --dp_replicate 2 --grad_sync shard", 4),
    ("--tp 2 --strategy fsdp --model tinyllama-1.1b", 4),
    ("--model gpt2-124m --global_batch_size 512 --micro_batch_size 8", 8),
    ("--model llama3-70b --strategy fsdp --activation_checkpointing full", 512),
    ("--optimizer muon --schedule wsd --lr 1e-3 --warmup_steps 10", 1),
    ("--eval_only --out runs/mine", 1),
    ("--dry_run --dtype bfloat16 --compile", 2),
    ("--max_steps 20 --checkpoint none --sample_tokens 0", 1),
    ("--n_layer 2 --d_model 32 --n_head 4 --d_ff 64 --seq_len 16", 2),
]


@pytest.mark.parametrize("text, ranks", COMMAND_LINES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_resolved_run_has_no_unresolved_value(text, ranks, device):
    options = f"{text} --global_batch_size 512" if ranks == 512 else text
    run = resolve(options, world_size=ranks, device_type=device)
    values = vars(run) | vars(run.model_config) | vars(run.data_facts)
    assert {name for name, value in values.items() if value is None} <= NONE_IS_A_VALUE
    assert "auto" not in [value for value in values.values() if isinstance(value, str)]
    for name in SIZE_FLAGS:
        assert getattr(run, name) == getattr(run.model_config, name)


def test_resolve_depends_only_on_its_arguments():
    given = parse(["--n_layer", "3"])
    kept = {"lr": 0.5}
    runs = [config.resolve(given, CPU, FACTS, kept) for _ in range(2)]
    assert runs[0] == runs[1] and runs[0].lr == 0.5
    assert (given, kept) == (parse(["--n_layer", "3"]), {"lr": 0.5})
    with pytest.raises(dataclasses.FrozenInstanceError):
        runs[0].lr = 1.0


H200 = {"device_type": "cuda", "has_bfloat16": True, "device_name": "NVIDIA H200"}


@pytest.mark.parametrize(
    "hardware, dtype, tflops",
    [
        ({}, "float32", None),
        ({"has_bfloat16": True}, "bfloat16", None),
        (H200, "bfloat16", 989),
    ],
)
def test_defaults_depend_on_the_hardware(hardware, dtype, tflops):
    run = resolve("", **hardware)
    assert (run.dtype, run.peak_tflops) == (dtype, tflops)
    assert resolve("--dtype float32 --peak_tflops 7", **hardware).peak_tflops == 7
    assert resolve("--dtype float32", **hardware).peak_tflops is None


def test_the_default_learning_rate_depends_on_the_width():
    assert resolve("").lr == 0.5 / 128
    assert resolve("--d_model 64 --n_head 4 --lr 0.25").lr == 0.25
    with pytest.raises(UsageError, match="--min_lr 0.01 is above the peak learning rate 0.0039"):
        resolve("--min_lr 0.01")
