"""A user's mistakes: one clear error line, the right exit status, and nothing written.

MISTAKES has a row for each family of errors. {...} is a folder that mistakes.py writes.
"""

import importlib
import os
import shlex
from pathlib import Path
from unittest import mock

import mistakes
import pytest
import torch
from conftest import call_train, contents, flags, listen

# Arguments, part of the line after "COMMAND: error: ", and the exit status if it is not 2
MISTAKES = {
    "train.py": [
        # Flags that argparse does not know or cannot parse, as in every command
        ("--max_steps ten", "argument --max_steps: invalid int value: 'ten'"),
        ("--max_step 5", "unrecognized arguments: --max_step 5"),
        ("--lr nan", "argument --lr: nan must be at least 0 and finite"),
        ("--config {root}/nothing.json", "--config {root}/nothing.json: No such file or"),
        ("--config {root}/comma.json", "comma.json: Expecting ',' delimiter"),
        ("--config {other}", "--config {other} is a folder: give a file, such as {other}/config"),
        # Flags that do not fit each other, the model or the number of ranks
        ("--device cuda", "PyTorch finds no CUDA device here"),
        ("--d_model 30", "d_model 30 / n_head 4 must be a whole, even number"),
        ("--tp 2", "needs 2 processes, but 1 were started: change --strategy"),
        # --data
        ("--data {root}/nowhere", "no train.bin there; create it with: python prepare.py"),
        ("--seq_len 100000", "one sequence of --seq_len 100000 needs 100,001"),
        ("--data {high}", "train.bin contains token id 300; ids must be below vocab_size 257; pre"),
        ("--data {torn}", "torn/train.bin has 1,999 bytes, not "),
        ("--data {misfit}", "is a different tokenizer: it has 258 tokens, the model's 257"),
        (
            "--data {ranks}",
            "llama3.tiktoken is not a tokenizer.json: prepare the data with the tokenizer.json of",
        ),
        (
            "--data {changed}:0.7,{high}:0.2",
            "the shares, rounded to thousandths, add up to 0.9, not 1",
        ),
        # --out, --init_from
        ("--out ''", "--out is empty: give a path"),
        ("--out .", "--out . is the current folder or a folder above it"),
        ("--out /", "--out / is the current folder or a folder above it"),
        ("--out {other} --data {changed}", "the data's fingerprint "),
        ("--out {other} --lr 0.5", "--lr 0.003 -> 0.5"),
        (
            "--out {foreign}",
            "{foreign}/config.json: unrecognized arguments: --architectures=['LlamaForCausalLM']",
        ),
        ("--out {gone}", "cannot continue --out {gone}: its checkpoint of step 2 is missing"),
        (
            "--out {unsaved}",
            "cannot continue --out {unsaved}: its run has --checkpoint none: choose",
        ),
        ("--init_from {root}", "{root} contains no checkpoint: name a run folder such as"),
        ("--init_from {other} --d_ff 80", "d_ff 64 -> 80; change that back"),
        ("--eval_only --init_from {damaged}", "{damaged}: rank-00000.safetensors is mis", 1),
    ],
    "prepare.py": [
        ("--source {text}/a", "the following arguments are required: --out"),
        ("--out {root}/new --source {root}/nowhere", "cannot be read (No such file or dire"),
        ("--out {root}/new --source {skipped}", "contains no text (1 file (its suffix is non"),
        ("--out {root}/new --source {skipped}/page.html", "page.html: prepare.py reads .txt, .js"),
        ("--out {root}/new --tokenizer gpt3", "gpt3: No such file or directory; choose byt"),
        (
            "--out {root}/new --tokenizer {old}/tokenizer.llama3.tiktoken",
            "llama3.tiktoken is not a tokenizer.json: prepare the data with the tokenizer.json of",
        ),
    ],
    "sample.py": [
        ("--run {root}/nowhere", "nowhere contains no checkpoint: name a run folder such"),
        ("--run {ids} --prompt '1 257'", "--prompt: token ids are 0 to 256"),
        ("--run {old}", "llama3.tiktoken is not a tokenizer.json: prepare the data with the tok"),
        ("--run {damaged}", "{damaged}: rank-00000.safetensors is missing; name another", 1),
        (
            "--run {forked}",
            "its model does not match this code: missing fields: none; unknown fields: window",
        ),
    ],
    "tools.checkpoint": [
        ("consolidate {other}", "the following arguments are required: OUT"),
        ("verify {renamed}/step-00000045", "step-00000045 was renamed: it holds step 2, not 45", 1),
        ("consolidate {ids} {foreign}", "exists: remove it or choose another name"),
    ],
    "tools.compare": [
        ("{unlogged}", "unlogged has no training row yet: let it run until its first one"),
    ],
    "tools.check": [
        ("--json {root}/nowhere/check.json", "check.json: there is no folder "),
    ],
    "tools.plan": [
        ("", "--world_size is missing: give the number of devices in all"),
        ("--world_size 12", "--world_size 12 is not a multiple of --nproc_per_node 8"),
        ("--world_size 8 --tp 3", "n_kv_head 4 / tp 3 = 1.33, but each rank of a tp group"),
        ("--world_size 8 --dtype float32", "the speed of --device_type h100 with --dtype f"),
        ("--run {restarted}", "restarted has no training row of its last start yet"),
        ("--run {winged}", "winged was trained by other code: "),
        ("--run {other} --tp=2", "--run takes the flags of the run: leave out --tp"),
    ],
    "tools.hf": [
        ("export {other} {foreign}", "foreign exists: remove it or choose another name"),
        ("import {foreign} {root}/new", "config.json: it lacks 'model_type'"),
        ("import {qwen2} {root}/new", "{qwen2}/config.json: the model needs model_ty"),
        ("import {window} {root}/new", "needs sliding_window 4096, which this decoder d"),
        (
            "import {deep} {root}/new",
            "num_hidden_layers is 1000000000, not an integer from 1 to 9,999",
        ),
        ("import {quoted} {root}/new", "hidden_size is '32', not an integer from 1 to 999,999"),
        ("import {wide} {root}/new", "the model needs head_dim 16, but this decoder has only hid"),
        ("import {good} {root}/new", "good has no model.safetensors: other formats cannot"),
    ],
}
CASES = [(command, *row) for command, rows in MISTAKES.items() for row in rows]


@pytest.fixture(scope="module")
def folders(pool, tokens, tmp_path_factory) -> dict[str, Path]:
    """Name -> path of the folders of mistakes.py, and of `other`, a run of two steps."""
    root = tmp_path_factory.mktemp("bad")
    text = f"--data {tokens} --out {root}/other --max_steps 2 --save_interval 1"
    assert pool(1, call_train, flags(text)) == [0]
    mistakes.write_folders(root, tokens)
    return {"root": root} | {path.name: path for path in root.iterdir()}


def call(name: str, argv: list[str]) -> tuple[int, str, str]:
    """Return (status, standard output, standard error) of a command in this process."""
    command = importlib.import_module(name.removesuffix(".py"))
    with mock.patch.dict(os.environ):  # which train.py changes for NCCL
        answer = listen(argv, command.main)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return answer


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[:2])[:60])
def test_a_mistake_only_prints_one_error_line(case, folders, tokens):
    name, arguments, line, *status = case
    if "--device cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    root = folders["root"]
    before = contents(root)
    argv = shlex.split(arguments.format(**folders))
    if name == "train.py":
        argv = [*flags(f"--data {tokens} --out {root}/new --max_steps 4"), *argv]
    found, out, err = call(name, argv)
    assert (found, out, err.count("\n")) == (*(status or [2]), "", 1), err
    assert err.startswith(f"{name}: error: ")
    assert line.format(**folders) in err
    assert contents(root) == before


def test_every_rank_reports_a_mesh_that_does_not_fit(on_ranks):
    answers = on_ranks(2, listen, "--strategy single")
    for (status, out, err), name in zip(answers, ("error", "error on rank 1")):
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"train.py: {name}: --strategy single ")
        assert "needs 1 processes, but 2 were started" in err
