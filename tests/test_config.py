"""From flags to the resolved run."""

import dataclasses
import re
import shutil
import subprocess
import sys

import pytest
from conftest import CPU, ROOT, SOURCE, resolve

import config
from config import KINDS, SIZE_FLAGS, Config, parse
from errors import UsageError


@pytest.mark.slow(proves="a fork of the core without extras")
def test_a_field_of_the_model_gets_a_flag_with_one_line(tmp_path):
    """The new flag overrides the field of each named size, unless it is not given."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    source = (tmp_path / "model.py").read_text()
    line = "    loss_chunks: Annotated"
    flag = '    tied: Annotated[bool | None, "part", "share the matrix"] = None\n'
    assert source.count(line) == 1
    (tmp_path / "model.py").write_text(source.replace(line, flag + line))
    code = """
import datetime, config, data, dist, numpy, torch
world = dist.World(0, 1, 1, torch.device("cpu"), datetime.timedelta(1), "", False)
source = data.TokenFolder("tokens", numpy.dtype("uint16"), 257, "bytes", "abc")
for text in ("", "--tied", "--tied false", "--model llama3-8b", "--model llama3-8b --tied auto"):
    run = config.resolve(config.Config(**config.parse(text.split())), world, source)
    print(run.model_config.tied)
"""
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True", "False", "False", "False"]


def test_the_reference_lists_the_kinds_of_flags():
    table = (ROOT / "docs/reference.md").read_text().partition("## Resuming")[2]
    for kind in ("part", "once"):
        (row,) = re.findall(rf"^\| {kind} \| (.*?) \|", table, re.M)
        expected = {name for name, its_kind in KINDS.items() if its_kind == kind}
        assert {*re.findall(r"--(\w+)", row)} == expected - {*SIZE_FLAGS}


# (flags, ranks): strategy, dp_replicate x dp_shard, micro_batch_size x grad_accum_steps. The global
# batch has 512 sequences, and a host has 4 ranks.
SPLITS = {
    ("", 1): ("single", "1 x 1", "512 x 1"),
    ("", 8): ("ddp", "8 x 1", "64 x 1"),
    ("--tp 8", 8): ("single", "1 x 1", "512 x 1"),
    ("--tp 2", 8): ("ddp", "4 x 1", "128 x 1"),
    ("--strategy fsdp --micro_batch_size 16", 8): ("fsdp", "1 x 8", "16 x 4"),
    ("--strategy hsdp", 8): ("hsdp", "2 x 4", "64 x 1"),
}


@pytest.mark.parametrize("text, ranks", SPLITS)
def test_the_mesh_and_the_batch_follow_from_flags_and_ranks(text, ranks):
    run = resolve(f"{text} --global_batch_size 512", size=ranks, local_size=min(ranks, 4))
    mesh = f"{run.dp_replicate} x {run.dp_shard}"
    batch = f"{run.micro_batch_size} x {run.grad_accum_steps}"
    assert (run.strategy, mesh, batch) == SPLITS[text, ranks]
    assert run.tokens_per_step == 512 * 128


def test_a_batch_that_ranks_cannot_share_is_refused():
    with pytest.raises(UsageError):
        resolve("--strategy fsdp --global_batch_size 16 --micro_batch_size 2", size=6)


@pytest.mark.parametrize(
    "name, ranks, split, tokens_per_step, tokens",
    [
        ("gpt2-124m", 8, (12, 5), 491_520, 295e9),
        ("olmo-1b", 64, (8, 4), 4_194_304, 3.1e12),
        ("llama3-8b", 64, (1, 8), 4_194_304, 15e12),
    ],
)
def test_configs_have_the_documented_number_of_tokens(name, ranks, split, tokens_per_step, tokens):
    run = resolve(f"--config {ROOT}/configs/{name}.json", size=ranks, local_size=8)
    assert (run.micro_batch_size, run.grad_accum_steps) == split
    assert run.tokens_per_step == tokens_per_step
    assert run.max_steps * tokens_per_step == pytest.approx(tokens, rel=1e-3)


def test_sizes_follow_from_the_model_the_flags_and_the_data():
    run = resolve("--n_head 2 --d_ff 64")
    assert (run.n_head, run.n_kv_head, run.d_ff) == (2, 2, 64)
    assert resolve("--model llama3-8b --n_head 64").n_kv_head == 8
    assert run.model_config.vocab_size == 320  # 257, padded to a multiple of 64
    assert run.lr == 0.5 / 128
    with pytest.raises(UsageError):
        resolve("--min_lr 0.01")


COMMAND_LINES = [
    ("--strategy fsdp --wrap block_group:2", 4),
    ("--strategy hsdp --dp_shard 2 --grad_sync shard", 4),
    ("--tp 2 --strategy fsdp --model tinyllama-1.1b --optimizer muon", 4),
    ("--eval_only --out runs/mine", 1),
    ("--n_layer 2 --d_model 32 --n_head 4 --d_ff 64 --seq_len 16", 2),
]


@pytest.mark.parametrize("text, ranks", COMMAND_LINES)
def test_a_resolved_run_has_no_unresolved_value(text, ranks):
    run = resolve(f"{text} --out a", size=ranks)
    values = {name: getattr(run, name) for name in KINDS}
    nothing = {name for name, value in values.items() if value in config.COMPUTED}
    assert nothing == {"init_from", "profile"}
    for name in SIZE_FLAGS:
        assert values[name] == getattr(run.model_config, name)


def test_resolve_depends_only_on_its_arguments():
    given = Config(**parse(["--n_layer", "3"]))
    one, other = (config.resolve(given, CPU, SOURCE) for _ in range(2))
    assert one == other and given == Config(n_layer=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.lr = 1.0


@pytest.mark.parametrize(
    "text, hardware, dtype, tflops",
    [
        ("", {}, "float32", None),
        ("", {"has_bfloat16": True}, "bfloat16", None),
        ("", {"has_bfloat16": True, "device_name": "NVIDIA H200"}, "bfloat16", 989),
        ("--dtype float32", {"has_bfloat16": True, "device_name": "NVIDIA H200"}, "float32", None),
    ],
)
def test_defaults_depend_on_the_hardware(text, hardware, dtype, tflops):
    run = resolve(text, **hardware)
    assert (run.dtype, run.peak_tflops) == (dtype, tflops)
