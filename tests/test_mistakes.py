"""Mistakes: each command answers with one clear line and the right status, and writes nothing."""

import ast
import base64
import contextlib
import gzip
import io
import json
import math
import os
import pickle
import re
import shlex
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT, call_train, flags, listen

import checkpoint
import prepare
import sample
from tools import bench, check, cluster, compare, hf, plan, timecheck
from tools import checkpoint as commands

SOURCES = [
    *ROOT.glob("*.py"),
    *ROOT.glob("runtime/*.py"),
    *ROOT.glob("text/*.py"),
    *ROOT.glob("tools/**/*.py"),
]


class Mistake(NamedTuple):
    arguments: str  # {...} are folders of the fixture
    line: str  # part of the line printed, after "COMMAND: error: "
    status: int = 2  # 1 for a run-time error
    ranks: int = 1  # of train.py


TRAIN = [
    Mistake("--no_such_flag 1", "unrecognized arguments: --no_such_flag 1"),
    Mistake("--max_steps ten", "argument --max_steps: invalid int value: 'ten'"),
    Mistake("--strategy zero", "invalid choice: 'zero'"),
    Mistake("--max_steps 0", "--max_steps 0 must be at least 1"),
    Mistake("--lr -1", "--lr -1.0 must be at least 0"),
    Mistake("--lr nan", "--lr nan must be at least 0"),
    Mistake("--data {root}/nowhere", "no train.bin there; create it with: python prepare.py"),
    Mistake("--seq_len 100000", "one sequence of --seq_len 100000 needs 100,001"),
    Mistake("--data {high}", "train.bin holds token 300, above its vocabulary of 257"),
    Mistake("--data {torn}", "is torn: 1,999 bytes are not 1,000 tokens of 2 bytes"),
    Mistake("--data {no_tokenizer_file}", "my.tiktoken: No such file or directory; the token fold"),
    Mistake("--data {stray}", "stray/meta.json is damaged (tokenizer is not the name of a file"),
    Mistake("--data {secret}", "secret/my.tiktoken is not a .tiktoken file (line 1 is not a token"),
    Mistake("--data {misfit}", "is another tokenizer: it has 258 tokens, the model's 257"),
    Mistake("--data {pipe}", "pipe/meta.json: Not a regular file; the token folder needs this"),
    Mistake("--data {changed}:0.7,{high}:0.2", "add up to 1, but the least is 0.2 and the sum 0.9"),
    Mistake("--data {changed}:1.5,{high}:-0.5", "to 1, but the least is -0.5 and the sum 1"),
    Mistake(
        "--data {changed},{high}", "there is no such folder, and a mixture gives each folder a"
    ),
    Mistake("--data {changed}:0.5,{root}/./changed:0.5", "changed is there twice; name it once"),
    Mistake(
        "--data {changed}:0.5,{gpt2}:0.5", "gpt2 has another tokenizer than {changed}; prepare"
    ),
    Mistake("--n_layer 1000000", "--n_layer 1000000 must be at least 1 and below 10000"),
    Mistake("--d_model 30", "d_model 30 / n_head 4 must be a whole, even number"),
    Mistake(
        "--profile 2:2",
        "--profile 2:2: give START:STOP with START < STOP < max_steps 4, like 10:13",
    ),
    Mistake(
        "--wrap blocks", "--wrap blocks: choose block, block_group:K (K blocks at a time) or none"
    ),
    Mistake("--grad_sync shard", "--grad_sync shard is for --strategy hsdp, not single"),
    Mistake("--tp 4", "n_kv_head 2 / tp 4 = 0.5, but each rank of a tp group takes a whole number"),
    Mistake(
        "--tp 2", "1 processes / tp 2 is not a whole number: start a multiple of 2 or change --tp"
    ),
    Mistake("--n_kv_head 3", "n_head 4 must be a multiple of n_kv_head 3"),
    Mistake(
        "--global_batch_size 6 --micro_batch_size 4",
        "6 is not a multiple of micro_batch_size 4 x 1",
    ),
    Mistake("--strategy fsdp --dp_replicate 2", "--strategy fsdp has dp_replicate 1, not 2"),
    Mistake("--strategy hsdp --dp_shard 2", "dp_replicate 0 x dp_shard 2 = 0, but 1 processes"),
    Mistake("--out {other} --resume never", "is not empty, and --resume never would overwrite it"),
    Mistake("--out {other} --seed 7", "seed was 0 and is now 7"),
    Mistake("--out {other} --data {changed}", "data was"),
    Mistake("--out {other} --d_ff 80", "d_ff was 64 and is now 80"),
    Mistake("--resume {root}", "no checkpoint there"),
    Mistake(
        "--out {other} --resume {other}/checkpoints/step-00000001",
        "is not the newest checkpoint of",
    ),
    Mistake("--out {foreign}", "holds files that are not train.py's"),
    Mistake("--beta2 1", "--beta2 1.0 must be at least 0 and below 1"),
    Mistake("--timeout inf", "--timeout inf must be at least 1 and below"),
    Mistake("--seed 9999999999", "--seed 9999999999 must be at least 0 and below"),
    Mistake("--device cuda", "PyTorch finds no CUDA device here"),
    Mistake("--config {root}/nothing.json", "nothing.json: No such file or directory"),
    Mistake("--config {listed}/config.json", "config.json is not a JSON object of flags"),
    Mistake(
        "--config {configs}/comma", "comma is not JSON: Expecting property name enclosed in do"
    ),
    Mistake("--config {configs}/twice", "/twice gives --lr a second time: leave one"),
    Mistake("--config {configs}/nested", "/nested gives --config a second time: leave one"),
    Mistake("--config {configs}/object", "--data takes one value, not an object or a list"),
    Mistake("--config {configs}/list", "--data takes one value, not an object or a list"),
    Mistake(
        "--config {foreign}/config.json", "config.json: unrecognized arguments: --architectures"
    ),
    Mistake("--max_step 5", "unrecognized arguments: --max_step 5; did you mean --max_steps?"),
    Mistake("--learning_rate 1", "--learning_rate 1; did you mean --lr?"),
    Mistake("--learning-rate 1", "--learning-rate 1; did you mean --lr?"),
    Mistake("--lr inf", "--lr inf must be at least 0 and finite"),
    Mistake("--peak_tflops 0", "--peak_tflops 0.0 must be at least 1e-09 and finite"),
    Mistake("--peak_tflops -989", "--peak_tflops -989.0 must be at least 1e-09 and finite"),
    Mistake("--warmup_steps 5", "--warmup_steps 5 is more than --max_steps 4"),
    Mistake("--min_lr 0.1", "--min_lr 0.1 is above the peak learning rate 0.003"),
    Mistake("--async_save --checkpoint none", "--async_save with --checkpoint none has nothing to"),
    Mistake("--out=", "--out is empty: name a folder"),
    Mistake("--out {foreign}/config.json", "config.json: File exists; choose another --out"),
    Mistake("--out {foreign}/config.json/run", "run: Not a directory; choose another --out"),
    Mistake("--out {other} --lr 0.5", "would not have the same numbers with --lr 0.003 -> 0.5"),
    Mistake(
        "--out {other} --max_steps 2 --clip none", "is finished, step 2 of 2, with other flags"
    ),
    Mistake(
        "--out {other} --max_steps 1", "is at step 2, and --max_steps 1 leaves nothing to train"
    ),
    Mistake(
        "--resume {other}/checkpoints/step-00000002 --max_steps 2",
        "is at step 2, and --max_steps 2 leaves nothing to train",
    ),
    Mistake(
        "--resume {other}/checkpoints/step-00000002 --init_from {other}/checkpoints/step-00000002",
        "--init_from begins a new run and --resume PATH continues one",
    ),
    Mistake("--strategy single", "is one process, but 2 were started: use ddp, fsdp", ranks=2),
    Mistake("--data {no_meta}", "meta.json is damaged (it lacks 'vocab_size'): prepare the folder"),
    Mistake("--out {lost}", "lost has checkpoints, but none is valid ({lost}/checkpoints/step-", 1),
    Mistake(
        "--out {gone}", "gone has saved step 2, by its metrics.jsonl, and has no checkpoint", 1
    ),
    Mistake("--out {unsaved}", "holds a run that saved no checkpoints and cannot be continued"),
    Mistake("--init_from {root}", "--init_from on this host: {root} holds no checkpoint: name a"),
    Mistake("--init_from {other} --out {other}", "{other} is the run in --out {other}: choose an"),
    Mistake("--dry_run --eval_only", "--dry_run ends before training and --eval_only trains not"),
    Mistake("--eval_only", "there is no folder {root}/new: name a run folder"),
    Mistake("--eval_only --init_from {foreign}", "foreign holds no checkpoint: name a run folder"),
    Mistake("--eval_only --resume {other} --d_ff 80", "has d_ff 64, and this run has 80: its"),
    Mistake("--eval_only --init_from {damaged}", "{damaged}: __0_0.distcp is missing", 1),
    Mistake("--tracker comet", "argument --tracker: invalid choice: 'comet'"),
    Mistake("--init_from {other}/checkpoints/step-00000002 --d_ff 80", "has d_ff 64, and this run"),
    Mistake("--init_from {no_model}", "no_model cannot be used: its model lacks vocab_size, n_l"),
    Mistake("--init_from {forked}", "forked cannot be used: its model has window, which this"),
    Mistake("--eval_only --resume {forked}", "forked cannot be used: its model has window, which"),
    Mistake(
        "--init_from {deep}", "deep cannot be used: its model has 9,280,010,272 parameters, but"
    ),
    Mistake(
        "--eval_only --init_from {deep}", "deep cannot be used: its model has 9,280,010,272 par"
    ),
    Mistake(
        "--resume {no_seed}", "is not a checkpoint of train.py: its manifest.json lacks 'seed'"
    ),
    Mistake("--out /proc/run", "--out /proc/run: No such file or directory; choose another --out"),
]

PREPARE = [
    Mistake("--source {text}/a", "the following arguments are required: --out"),
    Mistake("--out {root}/new --soruce x", "--soruce x; did you mean --source?"),
    Mistake("--out {root}/new --val_fraction nan", "--val_fraction nan must be between 0 and 1"),
    Mistake("--out {root}/new --val_fraction 5", "--val_fraction 5.0 must be between 0 and 1"),
    Mistake("--out {text}", "text exists: remove it or choose another folder"),
    Mistake("--out {text}/a", "text/a exists: remove it or choose another folder"),
    Mistake("--out {text}/a/new", "text/a is not a folder that can be written to"),
    Mistake("--out {text}/new --source {text}", "where it would be read as text next time"),
    Mistake("--out {root}/new --source ''", "--source '' is empty: name a file or a folder"),
    Mistake(
        "--out {root}/new --source {root}/nowhere", "cannot be read (No such file or directory"
    ),
    Mistake("--out {root}/new --source {unreadable}/broken", "broken, a link to nowhere, cannot"),
    Mistake("--out {root}/new --source {unreadable}", "/broken, a link to nowhere, cannot be read"),
    Mistake("--out {root}/new --source {unreadable}/loop", "(Too many levels of symbolic links)"),
    Mistake("--out {root}/new --source /dev/null", "/dev/null is neither a file nor a folder"),
    Mistake("--out {root}/new --source {skipped}", "holds no text (1 binary file, 1 empty file"),
    Mistake("--out {root}/new --source {skipped}/empty", "holds no text (1 empty file)"),
    Mistake(
        "--out {root}/new --source {text}/blank", "the sources hold no text (1 blank document)"
    ),
    Mistake("--out {root}/new --num_threads 0", "--num_threads 0 must be at least 1"),
    Mistake("--out {text}/new --source {text}/*", "where it would be read as text next time"),
    Mistake("--out {root}/new --source {root}/*.nothing", "*.nothing matches no file"),
    Mistake(
        "--out {root}/new --source {broken}/rows.jsonl --field body",
        "rows.jsonl has no field body: give --field one of its own (id, text)",
    ),
    Mistake("--out {root}/new --source {broken}/cut.gz", "cut.gz is damaged (its compressed data"),
    Mistake("show", "the following arguments are required: DIR (prepare.py show --help lists"),
    Mistake("show {root}/nowhere", "nowhere: no train.bin there; create it with"),
    Mistake(
        "--out {root}/new --source {skipped}/binary --tokenizer {ranks}/o200k.tiktoken",
        "is binary (a NUL byte in its first 8,192): leave it out; only --tokenizer bytes reads",
    ),
    Mistake("--out {root}/new --tokenizer gpt3", "gpt3: No such file or directory; choose bytes,"),
    Mistake(
        "--out {root}/new --tokenizer {root}", "Not a regular file; choose bytes, gpt2 or PATH"
    ),
    Mistake("--out {root}/new --tokenizer {pipe}/meta.json", "Not a regular file; choose bytes,"),
    Mistake("--out {root}/new --pattern gpt4", "argument --pattern: invalid choice: 'gpt4'"),
    Mistake(
        "--out {root}/new --pattern o200k",
        "--pattern o200k is for --tokenizer PATH.tiktoken, not bytes",
    ),
    Mistake(
        "--out {root}/new --tokenizer {text}/a",
        "a is not a .tiktoken file (line 1 is not a token and a rank): it needs lines of a base64",
    ),
    Mistake("--out {root}/new --tokenizer {ranks}/short", "(no token for byte 255)"),
    Mistake("--out {root}/new --tokenizer {ranks}/token", "(line 257 repeats the token of rank 7)"),
    Mistake("--out {root}/new --tokenizer {ranks}/rank", "(line 257 repeats rank 7 of line 8)"),
    Mistake("--out {root}/new --tokenizer {ranks}/gap", "(257 tokens, but none has rank 256)"),
    Mistake("--out {root}/new --tokenizer {ranks}/minus", "(257 tokens, but none has rank 256)"),
    Mistake(
        "--out {root}/new --tokenizer {foreign}/config.json",
        "config.json is not a tokenizer.json of Hugging Face (it lacks 'model')",
    ),
    Mistake(
        "--out {root}/new --tokenizer {foreign}/config.json --pattern gpt2",
        "--pattern gpt2 is for --tokenizer PATH.tiktoken, not {foreign}/config.json",
    ),
    Mistake(
        "--out {root}/new --tokenizer gpt2 --train_tokenizer 300",
        "argument --train_tokenizer: not allowed with argument --tokenizer",
    ),
    Mistake(
        "--out {root}/new --train_tokenizer 300 --pattern gpt2",
        "--pattern is for --tokenizer PATH.tiktoken, not --train_tokenizer",
    ),
    Mistake(
        "--out {root}/new --train_tokenizer 256 --source {text}",
        "--train_tokenizer 256 must be at least 257: the bytes and end-of-text",
    ),
    Mistake(
        "--out {root}/new --train_tokenizer 300 --source -",
        "--train_tokenizer reads the sources twice, which --source - cannot: name files",
    ),
]

SAMPLE = [
    Mistake("", "the following arguments are required: --run"),
    Mistake("--run {other} --promt x", "unrecognized arguments: --promt x; did you mean --prompt?"),
    Mistake(
        "--run {root}/nowhere", "nowhere: name a run folder such as runs/tiny, or a checkpoint"
    ),
    Mistake("--run {foreign}/config.json", "there is no folder"),
    Mistake("--run {foreign}", "holds no checkpoint: name a run folder such as runs/tiny, or"),
    Mistake(
        "--run {other} --max_new_tokens -1", "--max_new_tokens -1 must be at least 0 and below"
    ),
    Mistake("--run {other} --temperature nan", "--temperature nan must be at least 0 and below"),
    Mistake("--run {other} --temperature inf", "--temperature inf must be at least 0 and below"),
    Mistake("--run {other} --top_p 0", "--top_p 0.0 must be above 0 and at most 1"),
    Mistake("--run {other} --top_p nan", "--top_p nan must be above 0 and at most 1"),
    Mistake("--run {other} --top_k -1", "--top_k -1 must be at least 0 and below"),
    Mistake("--run {other} --seed 4294967296", "--seed 4294967296 must be at least 0 and below"),
    Mistake("--run {other} --prompt \udcff", "--prompt is not valid UTF-8"),
    Mistake("--run {other} --device cuda", "PyTorch finds no CUDA device here"),
    Mistake("--run {ids} --prompt three", "write the prompt as token ids, such as '17 4 52'"),
    Mistake("--run {ids} --prompt '1 257'", "--prompt: token ids are 0 to 256"),
    Mistake("--run {moved}", "is missing: there is no {moved}/my.tiktoken; copy the file there"),
    Mistake("--run {outside}", "is missing: there is no {outside}/o200k.tiktoken; copy the file"),
    Mistake("--run {other_tokenizer}", "is another tokenizer: it has 258 tokens, the model's 257"),
    Mistake("--run {damaged}", "no checkpoint to use: {damaged}: __0_0.distcp is missing", 1),
    Mistake("--run {no_model}", "cannot be used: its model lacks vocab_size, n_layer, n_head,", 1),
    Mistake("--run {forked}", "its model has window, which this code does not know", 1),
    Mistake("--run {listed_model}", "cannot be used: the fields of its model are damaged: ", 1),
    Mistake("--run {no_data}", "is not a checkpoint of train.py: its manifest.json lacks 'tok", 1),
    Mistake("--run {no_tokenizer}", "used: its tokenizer must be a name or null, not 5", 1),
    Mistake("--run {no_tokens}", "its tokens_in_vocabulary must be 1 to 320, not 0", 1),
    Mistake("--run {deep}", "its model has 9,280,010,272 parameters, but its files only", 1),
    Mistake("--run {nan}", "the model's logits are not finite: its weights have diverged or", 1),
]

CHECKPOINT = [
    Mistake("", "the following arguments are required: command (tools.checkpoint --help"),
    Mistake("lst {other}", "invalid choice: 'lst'"),
    Mistake("list {root}/nowhere", "there is no folder"),
    Mistake("list {foreign}", "holds no checkpoint: name a run folder such as runs/tiny, or"),
    Mistake("verify {foreign}", "holds no checkpoint: name a run folder such as runs/tiny, or"),
    Mistake("verify {damaged}", "{damaged}: __0_0.distcp is missing", 1),
    Mistake("verify {truncated}", "__0_0.distcp has 1,000 bytes, not", 1),
    Mistake("verify {flipped}", "__0_0.distcp has changed since it was written", 1),
    Mistake(
        "verify {torn_manifest}", "is not a complete checkpoint: its manifest.json is damaged", 1
    ),
    Mistake(
        "list {torn_manifest}", "is not a complete checkpoint: its manifest.json is damaged", 1
    ),
    Mistake("consolidate {newest}", "the following arguments are required: OUT"),
    Mistake("consolidate {foreign} {root}/new", "holds no checkpoint: name a run folder"),
    Mistake("consolidate {other} {root}/new", "is a run folder: name one of its checkpoints, such"),
    Mistake("consolidate {newest} {foreign}", "exists: remove it or choose another name"),
    Mistake("consolidate {nan} {root}/new", "is already in the full format"),
    Mistake("consolidate {newest} {foreign}/config.json/new", "new cannot be created: "),
    Mistake("consolidate {damaged} {root}/new", "{damaged}: __0_0.distcp is missing", 1),
    Mistake("consolidate {hostile} {root}/new", "its .metadata is damaged or hostile", 1),
    Mistake("consolidate {no_names} {root}/new", "its .metadata is damaged or hostile", 1),
]

COMPARE = [
    Mistake("", "the following arguments are required: RUN"),
    Mistake("--los=2 {other}", "unrecognized arguments: --los=2; did you mean --loss?"),
    Mistake("--loss nan {other}", "argument --loss: nan must be above 0 and finite"),
    Mistake("--loss low {other}", "argument --loss: invalid positive_number value: 'low'"),
    Mistake("--tolerance 0 {other}", "argument --tolerance: 0 must be above 0 and finite"),
    Mistake("{other} {root}/nowhere", "nowhere has no config.json: it is not the folder of a"),
    Mistake("{other} {torn}", "torn has no config.json: it is not the folder of a started run"),
    Mistake("{foreign}", "foreign has no metrics.jsonl: it is not the folder of a started run"),
    Mistake("{other}/checkpoints/step-00000001", "step-00000001 is a checkpoint: name the run"),
    Mistake("{unlogged}", "unlogged has no training row yet: let it run until its first one"),
    Mistake("{listed}", "config.json is not a JSON object: it must hold the flags of the run"),
    Mistake("{cut}", "cut/metrics.jsonl, line 2 is damaged: delete it to compare", status=1),
    Mistake("{lacking}", "lacking/metrics.jsonl, line 1 is damaged: delete it to", status=1),
    Mistake("{mixed}", "step 1 follows step 2: two runs have written into this log", status=1),
    Mistake("{other} --plot {root}/ab.xyz", "ab.xyz: the name must end in .png, .pdf, .svg"),
    Mistake("{other} --plot {root}/ab", "ab: the name must end in .png, .pdf, .svg"),
    Mistake("{other} --plot {root}/nowhere/ab.png", "ab.png: there is no folder "),
]

BENCH = [
    Mistake("memory --layers 0", "argument --layers: invalid positive value: '0'"),
    Mistake("", "the following arguments are required: TABLE"),
    Mistake("speed", "argument TABLE: invalid choice: 'speed' (choose from 'strategies'"),
    Mistake("scaling --round 2", "unrecognized arguments: --round 2; did you mean --rounds?"),
    Mistake("strategies --rounds 0", "argument --rounds: invalid positive value: '0'"),
    Mistake("accumulation --nproc two", "argument --nproc: invalid positive value: 'two'"),
    Mistake("loader --model huge", "argument --model: invalid choice: 'huge' (choose from 'tiny'"),
    Mistake("optimizer --device tpu", "argument --device: invalid choice: 'tpu'"),
    Mistake("optimizer --device cuda", "PyTorch finds no CUDA device here; use --device cpu"),
    Mistake("nanogpt", "the following arguments are required: --path"),
    Mistake("nanogpt --path {root}", "no nanoGPT with data/shakespeare_char/train.bin there"),
    Mistake("nanogpt --path {root} --target nan", "--target: nan must be above 0 and finite"),
]

CLUSTER = [
    Mistake("--hosts 0", "argument --hosts: invalid positive value: '0'"),
    Mistake("--hosts 300", "--hosts 300: 10.0.0.0/24 has room for 254"),
    Mistake("--bandwith 1gbit", "unrecognized arguments: --bandwith 1gbit; did you mean"),
    Mistake("--bandwidth fast", "--bandwidth: fast is not a rate as tc writes it, such as 200mbit"),
    Mistake("--strategies zero", "argument --strategies: invalid choice: 'zero' (choose from"),
    Mistake("--strategies", "argument --strategies: expected at least one argument"),
]

TIMECHECK = [
    Mistake("--bandwidths fast", "--bandwidths: fast is not a rate as tc writes it, such as 200m"),
    Mistake("--syncs never", "argument --syncs: invalid choice: 'never'"),
]

CHECK = [
    Mistake("--device cuda", "PyTorch finds no CUDA device here; use --device cpu"),
    Mistake("--ranks 0", "argument --ranks: invalid positive value: '0'"),
    Mistake("devices pairity", "no check is named pairity: choose from devices, parity, cpu, "),
    Mistake("--json {root}/nowhere/check.json", "check.json: there is no folder "),
    Mistake("--rank=2", "unrecognized arguments: --rank=2; did you mean --ranks?"),
]

HF = [
    Mistake("", "the following arguments are required: command"),
    Mistake("exprot {other} {root}/new", "invalid choice: 'exprot'"),
    Mistake("export {other}", "the following arguments are required: OUT"),
    Mistake("export {other} {foreign}", "foreign exists: remove it or choose another name"),
    Mistake("import {root}/nowhere {foreign}", "foreign exists: remove it or choose another name"),
    Mistake("import {root}/nowhere {root}/new", "there is no file {root}/nowhere/config.json: na"),
    Mistake("import {torn} {root}/new", "no file {torn}/config.json: name a model folder"),
    Mistake("import {hf}/pipe {root}/new", "no file {hf}/pipe/config.json: name a model folder"),
    Mistake("import {listed} {root}/new", "config.json is not a JSON object"),
    Mistake("import {foreign} {root}/new", "config.json lacks 'model_type'"),
    Mistake("import {hf}/not_json {root}/new", "config.json is not JSON: Expecting value"),
    Mistake(
        "import {hf}/qwen2 {root}/new",
        "error: {hf}/qwen2/config.json: the model needs model_type 'qwen2' (biases of q, k and v)",
    ),
    Mistake("import {hf}/qwen3 {root}/new", "needs model_type 'qwen3' (norms of q and k), which"),
    Mistake(
        "import {hf}/mamba {root}/new", "needs model_type 'mamba', which this decoder does not"
    ),
    Mistake("import {hf}/head_dim {root}/new", "head_dim 64 (not hidden_size 32 / num_attention_h"),
    Mistake("import {hf}/attention_bias {root}/new", "needs attention_bias, which this decoder"),
    Mistake("import {hf}/mlp_bias {root}/new", "needs mlp_bias, which this decoder does not have"),
    Mistake("import {hf}/gelu {root}/new", "needs hidden_act 'gelu', which this decoder does not"),
    Mistake("import {hf}/window {root}/new", "needs sliding_window 4096, which this decoder does"),
    Mistake("import {hf}/no_window {root}/new", "needs sliding_window 4096, which this decoder"),
    Mistake("import {hf}/yarn {root}/new", "needs rope_type 'yarn', which this decoder does not"),
    Mistake("import {hf}/linear {root}/new", "needs rope_type 'linear', which this decoder does"),
    Mistake(
        "import {hf}/partial {root}/new", "needs partial_rotary_factor 0.5, which this decoder"
    ),
    Mistake("import {hf}/outer_partial {root}/new", "needs partial_rotary_factor 0.25, which"),
    Mistake("import {hf}/granite {root}/new", "needs residual_multiplier 0.22, which this decod"),
    Mistake("import {hf}/theta {root}/new", "config.json: rope_theta nan must be above 0, norm_"),
    Mistake("import {hf}/eps {root}/new", "norm_eps -1e-05 at least 0, and both finite"),
    Mistake("import {hf}/power {root}/new", "config.json is damaged: int too large to convert to"),
    Mistake("import {hf}/kv {root}/new", "n_kv_head -2 must be a whole number from 1 to 16,777,"),
    Mistake("import {hf}/positions {root}/new", "seq_len 1000000000000 must be a whole number fr"),
    Mistake("import {hf}/deep {root}/new", "parameters, but its files only 0 bytes"),
    Mistake("import {hf}/quantized {root}/new", "needs quantization_config, which this decoder"),
    Mistake("import {hf}/no_rope_factor {root}/new", "config.json lacks 'factor'"),
    Mistake("import {hf}/rope_factors {root}/new", "turns: it takes 0 < factor and 0 < low < high"),
    Mistake("import {hf}/text {root}/new", "hidden_size must be a whole number above 0, not '32'"),
    Mistake("import {hf}/odd {root}/new", "d_model 33 / n_head 4 must be a whole, even number"),
    Mistake("import {hf}/rope_list {root}/new", "config.json is damaged: "),
    Mistake("import {hf}/good {root}/new", "good has no model.safetensors (other formats than"),
    Mistake("import {hf}/no_map {root}/new", "index.json has no weight_map"),
    Mistake("import {hf}/outside {root}/new", "index.json names ../x.safetensors, outside the fol"),
]

PLAN = [
    Mistake("", "--world_size is missing: give the number of devices in all"),
    Mistake("--world_sise 8", "--world_sise 8; did you mean --world_size?"),
    Mistake("--world_size 8 --dp_shards 8", "--dp_shards 8; did you mean --dp_shard?"),
    Mistake("--world_size 0", "argument --world_size: invalid positive value: '0'"),
    Mistake("--world_size 12", "--world_size 12 is not a multiple of --nproc_per_node 8"),
    Mistake("--world_size 8 --rank 8", "--rank 8: the ranks are 0 to 7"),
    Mistake("--world_size 8 --achieved 1.5", "--achieved: 1.5 must be above 0 and at most 1"),
    Mistake("--world_size 8 --achieved {other}", "the log of {other} has no MFU: it needs --peak_"),
    Mistake("--world_size 8 --achieved {root}/nowhere", "--achieved: invalid fraction value: "),
    Mistake("--world_size 8 --tokens inf", "--tokens: inf must be above 0 and finite"),
    Mistake("--world_size 8 --device_type h300", "--device_type: invalid choice: 'h300'"),
    Mistake(
        "--world_size 8 --dtype float32",
        "the speed of --device_type h100 with --dtype float32 is not known: give --peak_tflops",
    ),
    # As train.py says it
    Mistake("--world_size 8 --data {root}/nowhere", "no train.bin there; create it with"),
    Mistake("--world_size 8 --max_steps 0", "--max_steps 0 must be at least 1"),
    Mistake("--world_size 8 --dp_replicate 2 --strategy fsdp", "has dp_replicate 1, not 2"),
    Mistake("--world_size 8 --tp 3", "n_kv_head 4 / tp 3 = 1.33, but each rank of a tp group"),
    Mistake("--world_size 8 --global_batch_size 12", "12 is not a multiple of micro_batch_size 1"),
]

COMMANDS = {
    "train.py": (TRAIN, None),
    "prepare.py": (PREPARE, prepare.main),
    "sample.py": (SAMPLE, sample.main),
    "tools.checkpoint": (CHECKPOINT, commands.main),
    "tools.compare": (COMPARE, compare.main),
    "tools.bench": (BENCH, bench.main),
    "tools.cluster": (CLUSTER, cluster.main),
    "tools.check": (CHECK, check.main),
    "tools.hf": (HF, hf.main),
    "tools.plan": (PLAN, plan.main),
    "tools.timecheck": (TIMECHECK, timecheck.main),
}
CASES = [(name, mistake) for name, (mistakes, _) in COMMANDS.items() for mistake in mistakes]


# A .tiktoken file of the 256 bytes
RANKS = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))


def write_tokens(folder: Path, tokens: np.ndarray, tokenizer: str = "bytes") -> Path:
    folder.mkdir()
    for split in ("train", "val"):
        tokens.astype("<u2").tofile(folder / f"{split}.bin")
    meta = {
        "dtype": "uint16",
        "vocab_size": 257,
        "tokenizer": tokenizer,
        "train_tokens": len(tokens),
        "val_tokens": len(tokens),
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


def without_meta(folder: Path, tokens: np.ndarray) -> Path:
    write_tokens(folder, tokens)
    (folder / "meta.json").write_text("{}")
    return folder


def token_folders(root: Path) -> dict[str, Path]:
    """Token folders whose tokenizer or meta.json is not what train.py can use."""
    ids = np.arange(1000) % 256
    found = {
        "stray": write_tokens(root / "stray", ids, tokenizer="../secret/my.tiktoken"),
        "secret": write_tokens(root / "secret", ids, tokenizer="my.tiktoken"),
        "misfit": write_tokens(root / "misfit", ids, tokenizer="my.tiktoken"),
        "pipe": write_tokens(root / "pipe", ids),
    }
    (found["secret"] / "my.tiktoken").write_text("not a tokenizer")
    (found["misfit"] / "my.tiktoken").write_text(RANKS + "dGg= 256\n")
    (found["pipe"] / "meta.json").unlink()
    os.mkfifo(found["pipe"] / "meta.json")
    return found


def lost_run(folder: Path, run: Path) -> Path:
    """A copy of a run in which every checkpoint is damaged."""
    shutil.copytree(run, folder)
    for file in folder.glob("checkpoints/*/__0_0.distcp"):
        file.unlink()
    return folder


def spoilt_logs(root: Path, run: Path) -> dict[str, Path]:
    """Copies of a run of two steps whose logs or flags are spoilt in one way each."""
    config = (run / "config.json").read_text()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    training = [line for line in lines if '"loss"' in line]
    first, second = training
    spoilt = {
        "unlogged": ([], config),
        "listed": (lines, "[]"),
        "unsaved": (training, '{"checkpoint": "none"}'),
        "cut": ([first, second[:50], *lines], config),
        "lacking": ([first.replace('"tokens"', '"tokEns"'), second], config),
        "mixed": ([*training, *lines], config),
    }
    found = {}
    for name, (log, config) in spoilt.items():
        found[name] = root / name
        found[name].mkdir()
        (found[name] / "metrics.jsonl").write_text("\n".join(log))
        (found[name] / "config.json").write_text(config)
    return found


def write_configs(folder: Path) -> Path:
    """Files for --config that cannot be used."""
    folder.mkdir()
    contents = {
        "comma": '{"lr": 0.5,\n}',
        "twice": '{"lr": 0.5, "lr": 0.6}',
        "nested": '{"config": "other.json"}',
        "object": '{"data": {"web": 0.5}}',
        "list": '{"data": ["web"]}',
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    return folder


def write_sources(root: Path) -> dict[str, Path]:
    """What prepare.py reads, and what it cannot."""
    text = root / "text"
    text.mkdir()
    (text / "a").write_text("text")
    (text / "blank").write_text(" \n")
    skipped = root / "skipped"
    skipped.mkdir()
    (skipped / "empty").touch()
    (skipped / "binary").write_bytes(b"\x7fELF\0")
    broken = root / "broken_sources"
    broken.mkdir()
    (broken / "rows.jsonl").write_text('{"id": 1, "text": "one"}\n')
    (broken / "cut.gz").write_bytes(gzip.compress(b"text")[:-9])
    unreadable = root / "unreadable"
    unreadable.mkdir()
    (unreadable / "broken").symlink_to("nowhere")
    (unreadable / "loop").symlink_to("loop")
    return {"text": text, "skipped": skipped, "broken": broken, "unreadable": unreadable}


def write_rank_files(folder: Path) -> Path:
    folder.mkdir()
    last_lines = {"token": "Bw== 256", "rank": "dGg= 7", "gap": "dGg= 300", "minus": "dGg= -1"}
    (folder / "o200k.tiktoken").write_text(RANKS)
    (folder / "short").write_text("".join(RANKS.splitlines(keepends=True)[:-1]))
    for name, line in last_lines.items():
        (folder / name).write_text(RANKS + line)
    return folder


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}
SPOILT_LLAMAS = {
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mamba": {"model_type": "mamba"},
    "head_dim": {"head_dim": 64},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "window": {"model_type": "mistral", "sliding_window": 4096},
    "no_window": {"model_type": "mistral"},  # which is Mistral's default
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "partial": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "outer_partial": {"partial_rotary_factor": 0.25},
    "granite": {"use_cache": True, "bos_token_id": 5, "residual_multiplier": 0.22},
    "theta": {"rope_theta": math.nan},
    "eps": {"rms_norm_eps": -1e-5},
    "power": {"rope_theta": 10**400},
    "kv": {"num_key_value_heads": -2},
    "positions": {"max_position_embeddings": 10**12},
    "deep": {"num_hidden_layers": 10**6},
    "quantized": {"quantization_config": {"quant_method": "gptq"}},
    "no_rope_factor": {"rope_scaling": LLAMA3_ROPE},
    "rope_factors": {
        "rope_scaling": {**LLAMA3_ROPE, "factor": 8.0, "original_max_position_embeddings": 16}
    },
    "text": {"hidden_size": "32"},
    "odd": {"hidden_size": 33},
    "rope_list": {"rope_scaling": 5},
    "good": {},
    "no_map": {},
    "outside": {},
}


def write_llamas(folder: Path) -> Path:
    """Model folders without weights."""
    for name, change in SPOILT_LLAMAS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(LLAMA | change))
    (folder / "not_json").mkdir()
    (folder / "not_json/config.json").write_text("model_type: llama")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe/config.json")
    (folder / "deep/model.safetensors").touch()
    index = "model.safetensors.index.json"
    (folder / "no_map" / index).write_text("{}")
    weight_map = {"lm_head.weight": "../x.safetensors"}
    (folder / "outside" / index).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def folders(pool, tokens, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bad")
    text = f"--data {tokens} --out {root}/other --max_steps 2 --save_interval 1"
    assert pool(1, call_train, flags(text)) == [0]
    ramp = np.arange(1000) % 256
    torn = write_tokens(root / "torn", ramp)
    with open(torn / "train.bin", "r+b") as file:
        file.truncate(1999)
    foreign = root / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return {
        **checkpoints(root, root / "other/checkpoints/step-00000002"),
        "root": root,
        "other": root / "other",
        "changed": write_tokens(root / "changed", ramp),
        "high": write_tokens(root / "high", np.where(ramp == 200, 300, ramp)),
        "gpt2": write_tokens(root / "gpt2", ramp, tokenizer="gpt2"),
        "torn": torn,
        "no_meta": without_meta(root / "no_meta", ramp),
        "no_tokenizer_file": write_tokens(root / "no_file", ramp, tokenizer="my.tiktoken"),
        "foreign": foreign,
        **token_folders(root),
        **spoilt_logs(root, root / "other"),
        "lost": lost_run(root / "lost", root / "other"),
        "gone": shutil.copytree(
            root / "other", root / "gone", ignore=shutil.ignore_patterns("checkpoints")
        ),
        **write_sources(root),
        "ranks": write_rank_files(root / "ranks"),
        "hf": write_llamas(root / "hf"),
        "configs": write_configs(root / "configs"),
    }


def variant(folder: Path, source: Path, **fields) -> Path:
    """A copy of a checkpoint whose manifest differs; a field that is ... is left out."""
    shutil.copytree(source, folder)
    manifest = checkpoint.read_manifest(source) | fields
    manifest = {name: value for name, value in manifest.items() if value is not ...}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def rewritten(folder: Path, source: Path, name: str, contents: bytes) -> Path:
    """A copy of a checkpoint with other contents of one file, which verifies."""
    files = dict(checkpoint.read_manifest(source)["files"])
    files[name] = {"bytes": len(contents), "crc32": f"{zlib.crc32(contents):08x}"}
    variant(folder, source, files=files)
    (folder / name).write_bytes(contents)
    return folder


def diverged(folder: Path, source: Path) -> Path:
    """A copy of a checkpoint in the full format, with weights that are not finite."""
    with contextlib.redirect_stdout(io.StringIO()):
        checkpoint.consolidate(source, folder)
    state = torch.load(folder / "full.pt", weights_only=True)
    state["model"]["norm.weight"].fill_(torch.nan)
    torch.save(state, folder / "full.pt")
    manifest = checkpoint.read_manifest(folder)
    manifest["files"]["full.pt"] = checkpoint.sync_and_checksum(folder / "full.pt")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def checkpoints(root: Path, newest: Path) -> dict[str, Path]:
    """Copies of the checkpoint `newest`, each with something wrong."""
    model = checkpoint.read_manifest(newest)["model"]
    found = {
        "newest": newest,
        "ids": variant(root / "ids", newest, tokenizer=None),
        "outside": variant(root / "outside", newest, tokenizer="../ranks/o200k.tiktoken"),
        "moved": variant(root / "moved", newest, tokenizer="/old/my.tiktoken"),
        "other_tokenizer": variant(root / "other_tokenizer", newest, tokenizer="my.tiktoken"),
        "deep": variant(root / "deep", newest, model=model | {"n_layer": 10**6}),
        "no_tokens": variant(root / "no_tokens", newest, tokens_in_vocabulary=0),
        "no_model": variant(root / "no_model", newest, model={}),
        "no_seed": variant(root / "no_seed", newest, config={"global_batch_size": 8}),
        "forked": variant(root / "forked", newest, model=model | {"window": 4}),
        "listed_model": variant(root / "listed_model", newest, model=[]),
        "no_data": variant(root / "no_data", newest, tokens_in_vocabulary=...),
        "no_tokenizer": variant(root / "no_tokenizer", newest, tokenizer=5),
        "damaged": variant(root / "damaged", newest),
        "truncated": variant(root / "truncated", newest),
        "flipped": variant(root / "flipped", newest),
        "torn_manifest": variant(root / "torn_manifest", newest),
        "nan": diverged(root / "nan", newest),
    }
    (found["other_tokenizer"] / "my.tiktoken").write_text(RANKS + "dGg= 256\n")
    (found["damaged"] / "__0_0.distcp").unlink()
    os.truncate(found["truncated"] / "__0_0.distcp", 1000)
    with open(found["flipped"] / "__0_0.distcp", "r+b") as file:
        file.write(b"x")
    os.truncate(found["torn_manifest"] / "manifest.json", 100)
    call = pickle.dumps(print)
    found["hostile"] = rewritten(root / "hostile", newest, ".metadata", call)
    metadata = checkpoint.Reader(newest).metadata
    metadata.planner_data = None
    no_names = pickle.dumps(metadata)
    found["no_names"] = rewritten(root / "no_names", newest, ".metadata", no_names)
    return found


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@dataclass(frozen=True)
class Answer:
    status: int
    out: str
    err: str
    wrote_nothing: bool


@pytest.fixture(scope="module")
def answer(pool, tokens, folders):
    """answer(command, mistake): what the command says to it. Each is tried once."""
    root = folders["root"]
    answers = {}

    def ask(name: str, mistake: Mistake) -> Answer:
        before = contents(root)
        if name == "train.py":
            text = f"--data {tokens} --out {root}/new --max_steps 4 {mistake.arguments}"
            argv = flags(text.format(**folders))
            status, out, err = pool(mistake.ranks, listen, argv)[0]
        else:
            argv = shlex.split(mistake.arguments.format(**folders))
            status, out, err = call(name, argv)
        return Answer(status, out, err, contents(root) == before)

    def look_up(name: str, mistake: Mistake) -> Answer:
        if (name, mistake) not in answers:
            answers[name, mistake] = ask(name, mistake)
        return answers[name, mistake]

    return look_up


def call(name: str, argv: list[str]) -> tuple[int, str, str]:
    """Return (status, standard output, standard error) of a command other than train.py."""
    _, main = COMMANDS[name]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(argv)
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("name, mistake", CASES, ids=lambda case: str(case)[:60])
def test_a_mistake_is_one_clear_line_and_writes_nothing(name, mistake, folders, answer):
    if "--device cuda" in mistake.arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    said = answer(name, mistake)
    assert (said.status, said.out, said.err.count("\n")) == (mistake.status, "", 1), said.err
    assert said.err.startswith(f"{name}: error: ")
    assert mistake.line.format(**folders) in said.err
    assert said.wrote_nothing


# --------------------------------------------------------------------------------------------------
# Every text is tried

RANKS_DIFFER = "test_watchdog.py::test_a_rank_that_is_not_like_the_others_ends_the_run"
OTHER_IDS = "test_tokenizer.py::test_a_tokenizer_json_with_other_ids_in_tiktoken_is_refused"
CHECKED_ON_CPUS = "test_check.py::test_a_check_that_fails_says_why_and_the_others_go_on"
SPOILT_WEIGHTS = "test_hf.py::test_weights_that_are_not_those_of_config_json_are_refused"
# Part of a text, and the test that tries it: it takes more than a command line and a folder.
TRIED_ELSEWHERE = {
    # Ranks that differ
    "start all ranks alike": RANKS_DIFFER,
    "hold the same part": RANKS_DIFFER,
    "both read sequence": RANKS_DIFFER,
    "one tp group": RANKS_DIFFER,
    # Optional packages, pipes
    ": pip install": "test_sources.py::test_a_package_that_is_not_installed_is_named",
    "not text": "test_sources.py::test_parquet_that_holds_no_text_is_refused",
    "cannot be read from a pipe": "test_sources.py::test_parquet_that_holds_no_text_is_refused",
    # Two processes
    "is in use by": "test_train.py::test_a_folder_in_use_is_refused_until_its_run_is_dead",
    "another process is writing": "test_prepare.py::"
    "test_what_a_killed_process_left_is_replaced_but_not_what_a_living_one_writes",
    # Training that diverges
    "updates in a row were skipped": "test_metrics.py::"
    "test_too_many_skipped_updates_in_a_row_end_the_run_after_their_row",
    "the validation loss of step": "test_train.py::"
    "test_weights_that_are_not_finite_are_never_saved_over_good_ones",
    # Small hosts, full disks, what is not installed
    "--checkpoint full gathers": "test_checkpoint.py::"
    "test_full_is_refused_where_it_does_not_fit_in_host_memory",
    "cannot write": "test_checkpoint.py::"
    "test_consolidate_leaves_nothing_on_a_disk_that_fills_up_meanwhile",
    "and its disk has": "test_checkpoint.py::test_consolidate_refuses_a_disk_without_the_room",
    "no space left on the disk": "test_prepare.py::test_a_full_disk_is_one_line_and_leaves_nothing",
    "no room for a whole row": "test_metrics.py::"
    "test_rows_that_a_full_disk_does_not_take_come_with_the_next",
    "is in use: name a new folder": "test_prepare.py::test_the_working_directory_itself_is_refused",
    "--plot needs matplotlib": "test_tools.py::test_a_plot_without_matplotlib_says_what_to_install",
    "install iproute2": "test_cluster.py::test_without_iproute2_it_says_what_to_install",
    "--tracker ": "test_train.py::test_a_tracker_that_is_not_installed_is_named_at_once",
    "and ids have no text": "test_train.py::test_eval_only_takes_another_checkpoint_and_other_data",
    "not in tiktoken's cache": "test_tokenizer.py::test_gpt2_without_network_says_what_to_do",
    "which has  ...  GPUs": "test_dist.py::test_more_processes_than_gpus_are_refused",
    "some share a GPU": "test_dist.py::test_processes_that_share_a_gpu_are_refused",
    "network namespaces need root": "test_cluster.py::test_without_root_it_says_so",
    "needs the tokenizers package": "test_tokenizer.py::"
    "test_training_a_vocabulary_without_the_package_says_what_to_install",
    # A tokenizer.json with something that tiktoken does not compute
    "cannot be used": OTHER_IDS,
    "its model is not": OTHER_IDS,
    "its normalizer": OTHER_IDS,
    "its option": OTHER_IDS,
    "its added token": OTHER_IDS,
    "the ids of its": OTHER_IDS,
    "none of its special tokens": OTHER_IDS,
    "is not one of bytes": OTHER_IDS,
    "its pre-tokenizer": OTHER_IDS,
    "its Split": OTHER_IDS,
    "its regular expression": OTHER_IDS,
    "is not in the order of the ids": OTHER_IDS,
    "its merges do not lead": OTHER_IDS,
    # Damaged and hostile checkpoints
    "step and tokens must be": "test_checkpoint.py::test_list_says_which_manifest_is_damaged",
    "files must be an object": "test_checkpoint.py::test_list_says_which_manifest_is_damaged",
    "it names the file": "test_checkpoint.py::test_list_says_which_manifest_is_damaged",
    "the entry of": "test_checkpoint.py::test_list_says_which_manifest_is_damaged",
    "it is missing, or not": "test_checkpoint.py::"
    "test_a_manifest_that_is_no_file_is_damaged_and_nobody_waits_for_it",
    "neither full.pt nor": "test_checkpoint.py::test_a_checkpoint_of_no_known_format_is_refused",
    "checkpoints damaged": "test_checkpoint.py::test_list_says_which_manifest_is_damaged",
    "it holds a": "test_checkpoint.py::test_a_hostile_pickle_runs_nothing",
    "it points to": "test_checkpoint.py::"
    "test_metadata_that_sends_dcp_to_plain_pickle_or_elsewhere_is_refused",
    "it has no tensor": "test_checkpoint.py::test_a_full_checkpoint_of_another_model_is_refused",
    # Model folders, with safetensors
    "lacks the tensor": SPOILT_WEIGHTS,
    "holds  ... , which this decoder": SPOILT_WEIGHTS,
    "has the shape": SPOILT_WEIGHTS,
    "is of dtype": SPOILT_WEIGHTS,
    "cannot have the model's": "test_hf.py::test_a_field_of_a_fork_is_exported_at_its_default_only",
    "needs safetensors": "test_hf.py::test_without_safetensors_it_says_what_to_install",
    # Machines that lack something
    "it takes a multiple of": CHECKED_ON_CPUS,
    "it takes a GPU": CHECKED_ON_CPUS,
    "nothing fits on": "test_plan.py::test_a_model_that_fits_nowhere_is_refused",
    # Programs that a benchmark starts
    "bench.py": "test_tools.py::test_bench_shows_the_error_of_a_trainer_that_failed",
}


def error_classes() -> set[str]:
    """The exceptions that this project defines, and those of Python that it raises for users."""
    names = {"ValueError", "OSError", "NotFinite"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
                if any(base.endswith("Error") for base in bases):
                    names.add(node.name)
    return names


def raised_texts() -> dict[str, re.Pattern]:
    """A pattern for each text that is raised somewhere, by the place where it is."""
    names = error_classes()
    texts = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            name = ast.unparse(node.exc.func).split(".")[-1]
            pieces = constant_pieces(node.exc.args[0]) if node.exc.args else []
            if name in names and any(len(piece) > 4 for piece in pieces):
                pattern = ".*".join(re.escape(piece) for piece in pieces)
                texts[f"{path.name}:{node.lineno} {' ... '.join(pieces)}"] = re.compile(pattern)
    return texts


def constant_pieces(text: ast.expr) -> list[str]:
    """The constant parts of a string or an f-string."""
    values = text.values if isinstance(text, ast.JoinedStr) else [text]
    constants = [value.value for value in values if isinstance(value, ast.Constant)]
    return [constant for constant in constants if isinstance(constant, str)]


def test_every_text_that_the_code_raises_for_a_user_is_tried(answer):
    errors = [answer(*case).err for case in CASES]
    untried = {}
    for place, pattern in raised_texts().items():
        if not any(pattern.search(error) for error in errors):
            untried[place] = [start for start in TRIED_ELSEWHERE if start in place]
    missing = [place for place, elsewhere in untried.items() if not elsewhere]
    assert not missing, "\n".join(missing)
    used = {start for starts in untried.values() for start in starts}
    assert used == TRIED_ELSEWHERE.keys()  # none that the table tries, or that is gone


@pytest.mark.parametrize("start, place", TRIED_ELSEWHERE.items())
def test_what_is_tried_elsewhere_is_tried_there(start, place):
    file, _, name = place.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()
