"""Run folders and checkpoints that cannot be continued, sampled, read or written."""

import json
import os
import shutil
import zlib
from pathlib import Path

import torch
from mistakes import Mistake
from mistakes_data import RANKS

import checkpoint
from runtime import consolidate

MISTAKES = {
    "train.py": [
        Mistake(
            "--out {other} --resume never", "is not empty, and --resume never would overwrite it"
        ),
        Mistake("--out {other} --seed 7", "seed was 0 and is now 7"),
        Mistake("--out {other} --data {changed}", "data was"),
        Mistake("--out {other} --d_ff 80", "d_ff was 64 and is now 80"),
        Mistake(
            "--resume {root}", "--resume: {root} holds no checkpoint: name a run folder such as"
        ),
        Mistake(
            "--out {other} --resume {other}/checkpoints/step-00000001",
            "is not the latest checkpoint of",
        ),
        Mistake("--out {foreign}", "holds files that are not train.py's"),
        Mistake("--out=", "--out is empty: name a folder"),
        Mistake("--out {foreign}/config.json", "config.json: File exists; choose another --out"),
        Mistake("--out {foreign}/config.json/run", "run: Not a directory; choose another --out"),
        Mistake("--out {other} --lr 0.5", "--lr 0.003 -> 0.5 would change the results of {other}:"),
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
            "--resume {other} --init_from {other}",
            "--init_from begins a new run and --resume PATH continues one",
        ),
        Mistake(
            "--out {lost}", "lost has checkpoints, but none is valid ({lost}/checkpoints/step-", 1
        ),
        Mistake(
            "--out {gone}", "gone saved step 2, according to its metrics.jsonl, but has no check", 1
        ),
        Mistake("--out {older}", "has format 1, and this code reads 2: use version 0.2.0 of nano"),
        Mistake("--out {unsaved}", "holds a run that saved no checkpoints and cannot be continued"),
        Mistake("--init_from {root}", "--init_from: {root} holds no checkpoint: name a"),
        Mistake(
            "--init_from {other} --out {other}", "{other} is the run in --out {other}: choose an"
        ),
        Mistake(
            "--dry_run --eval_only", "--dry_run ends before training and --eval_only trains not"
        ),
        Mistake("--eval_only", "there is no folder {root}/new: name a run folder"),
        Mistake(
            "--eval_only --init_from {foreign}", "foreign holds no checkpoint: name a run folder"
        ),
        Mistake("--eval_only --resume {other} --d_ff 80", "has d_ff 64, and this run has 80: its"),
        Mistake(
            "--eval_only --init_from {damaged}", "{damaged}: rank-00000.safetensors is missing", 1
        ),
        Mistake(
            "--init_from {other}/checkpoints/step-00000002 --d_ff 80", "has d_ff 64, and this run"
        ),
        Mistake(
            "--init_from {no_model}", "missing 7 required positional arguments: 'vocab_size', 'n_l"
        ),
        Mistake("--init_from {forked}", "forked cannot be used: its model has window, which this"),
        Mistake(
            "--eval_only --resume {forked}", "forked cannot be used: its model has window, which"
        ),
        Mistake(
            "--init_from {deep}", "deep cannot be used: its model has 9,280,010,272 parameters, but"
        ),
        Mistake(
            "--eval_only --init_from {deep}", "deep cannot be used: its model has 9,280,010,272 par"
        ),
        Mistake(
            "--resume {no_seed}", "is not a checkpoint of train.py: its manifest.json lacks 'seed'"
        ),
        Mistake(
            "--out /proc/run", "--out /proc/run: No such file or directory; choose another --out"
        ),
    ],
    "sample.py": [
        Mistake(
            "--run {root}/nowhere", "nowhere: name a run folder such as runs/tiny, or a checkpoint"
        ),
        Mistake("--run {foreign}/config.json", "there is no folder"),
        Mistake("--run {foreign}", "holds no checkpoint: name a run folder such as runs/tiny, or"),
        Mistake(
            "--run {other} --max_new_tokens -1", "--max_new_tokens -1 must be at least 0 and below"
        ),
        Mistake(
            "--run {other} --temperature nan", "--temperature nan must be at least 0 and below"
        ),
        Mistake(
            "--run {other} --temperature inf", "--temperature inf must be at least 0 and below"
        ),
        Mistake("--run {other} --top_p 0", "--top_p 0.0 must be above 0 and at most 1"),
        Mistake("--run {other} --top_p nan", "--top_p nan must be above 0 and at most 1"),
        Mistake("--run {other} --top_k -1", "--top_k -1 must be at least 0 and below"),
        Mistake(
            "--run {other} --seed 4294967296", "--seed 4294967296 must be at least 0 and below"
        ),
        Mistake("--run {other} --device cuda", "PyTorch finds no CUDA device here"),
        Mistake("--run {ids} --prompt three", "write the prompt as token ids, such as '17 4 52'"),
        Mistake("--run {ids} --prompt '1 257'", "--prompt: token ids are 0 to 256"),
        Mistake(
            "--run {moved}", "is missing: there is no {moved}/my.tiktoken; copy the file there"
        ),
        Mistake(
            "--run {outside}", "is missing: there is no {outside}/o200k.tiktoken; copy the file"
        ),
        Mistake(
            "--run {other_tokenizer}", "is another tokenizer: it has 258 tokens, the model's 257"
        ),
        Mistake(
            "--run {damaged}",
            "no checkpoint to use: {damaged}: rank-00000.safetensors is missing",
            1,
        ),
        Mistake(
            "--run {no_model}", "missing 7 required positional arguments: 'vocab_size', 'n_lay", 1
        ),
        Mistake("--run {forked}", "its model has window, which this code does not know", 1),
        Mistake("--run {listed_model}", "cannot be used: the fields of its model are damaged: ", 1),
        Mistake(
            "--run {no_data}", "is not a checkpoint of train.py: its manifest.json lacks 'tok", 1
        ),
        Mistake("--run {no_tokenizer}", "is missing: there is no {no_tokenizer}/5; copy the file"),
        Mistake("--run {deep}", "its model has 9,280,010,272 parameters, but its files only", 1),
        Mistake(
            "--run {nan}", "the model's logits are not finite: its weights have diverged or", 1
        ),
    ],
    "tools.checkpoint": [
        Mistake("list {root}/nowhere", "there is no folder"),
        Mistake("list {foreign}", "holds no checkpoint: name a run folder such as runs/tiny, or"),
        Mistake("verify {foreign}", "holds no checkpoint: name a run folder such as runs/tiny, or"),
        Mistake("verify {damaged}", "{damaged}: rank-00000.safetensors is missing", 1),
        Mistake("verify {truncated}", "rank-00000.safetensors has 1,000 bytes, not", 1),
        Mistake(
            "verify {newer}", "has format 3, and this code reads 2: use the version that wrote"
        ),
        Mistake(
            "verify {no_manifest}/step-00000001",
            "1 is not a complete checkpoint: its manifest.json is missing",
            1,
        ),
        Mistake(
            "verify {renamed}/step-00000045",
            "renamed/step-00000045 is not a complete checkpoint: its manifest.json is damaged: ",
            1,
        ),
        Mistake(
            "verify {flipped}",
            "rank-00000.safetensors has changed since it was written: its checksum",
            1,
        ),
        Mistake(
            "verify {torn_manifest}",
            "is not a complete checkpoint: its manifest.json is damaged",
            1,
        ),
        Mistake(
            "list {torn_manifest}", "is not a complete checkpoint: its manifest.json is damaged", 1
        ),
        Mistake("consolidate {foreign} {root}/new", "holds no checkpoint: name a run folder"),
        Mistake(
            "consolidate {other}/checkpoints/step-00000002 {foreign}",
            "exists: remove it or choose another name",
        ),
        Mistake(
            "consolidate {other}/checkpoints/step-00000002 {foreign}/config.json/new",
            "new: [Errno 20] Not a directory: ",
            1,
        ),
        Mistake(
            "consolidate {flipped} {root}/new",
            "{flipped}: rank-00000.safetensors has changed since",
            1,
        ),
        Mistake("consolidate {hostile} {root}/new", "{hostile}/index.json: it points to ../x", 1),
        Mistake("consolidate {no_names} {root}/new", "cannot read {no_names}/index.json: ", 1),
    ],
}


def write_folders(root: Path) -> None:
    write_checkpoints(root, root / "other/checkpoints/step-00000002")
    shutil.copytree(root / "other", root / "lost")
    for file in root.glob("lost/checkpoints/*/rank-00000.safetensors"):
        file.unlink()
    shutil.copytree(root / "other", root / "gone", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(root / "other", root / "older")
    manifest = root / "older/checkpoints/step-00000002/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 1}))
    (root / "foreign").mkdir()
    (root / "foreign/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


def variant(folder: Path, source: Path, **fields) -> None:
    """A copy of a checkpoint whose manifest differs; a field that is ... is left out."""
    shutil.copytree(source, folder)
    manifest = checkpoint.read_manifest(source) | fields
    manifest = {name: value for name, value in manifest.items() if value is not ...}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rewritten(folder: Path, source: Path, name: str, contents: bytes) -> None:
    """A copy of a checkpoint with other contents of one file, which verifies."""
    files = dict(checkpoint.read_manifest(source)["files"])
    files[name] = {"bytes": len(contents), "crc32": f"{zlib.crc32(contents):08x}"}
    variant(folder, source, files=files)
    (folder / name).write_bytes(contents)


def diverged(folder: Path, source: Path) -> None:
    """A copy of a checkpoint in the full format, with weights that are not finite."""
    consolidate.consolidate(source, folder, lambda share: None)
    mapped, _ = checkpoint.map_safetensors(folder / consolidate.FULL)
    layout = {name: tensor.clone() for name, tensor in mapped.items()}
    layout["model.norm.weight"].fill_(torch.nan)
    entry = checkpoint.write_safetensors(folder / consolidate.FULL, layout)
    manifest = checkpoint.read_manifest(folder)
    manifest["files"][consolidate.FULL] = entry
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_checkpoints(root: Path, newest: Path) -> None:
    """Copies of the checkpoint `newest`, each with something wrong."""
    model = checkpoint.read_manifest(newest)["model"]
    changes = {
        "ids": {"tokenizer": None},
        "outside": {"tokenizer": "../ranks/o200k.tiktoken"},
        "moved": {"tokenizer": "/old/my.tiktoken"},
        "other_tokenizer": {"tokenizer": "my.tiktoken"},
        "deep": {"model": model | {"n_layer": 10**6}},
        "no_model": {"model": {}},
        "no_seed": {"config": {"global_batch_size": 8}},
        "newer": {"format": 3},
        "forked": {"model": model | {"window": 4}},
        "listed_model": {"model": []},
        "no_data": {"tokens_in_vocabulary": ...},
        "no_tokenizer": {"tokenizer": 5},
        "damaged": {},
        "truncated": {},
        "flipped": {},
        "torn_manifest": {},
    }
    for name, fields in changes.items():
        variant(root / name, newest, **fields)
    (root / "other_tokenizer/my.tiktoken").write_text(RANKS + "dGg= 256\n")
    (root / "damaged/rank-00000.safetensors").unlink()
    os.truncate(root / "truncated/rank-00000.safetensors", 1000)
    with open(root / "flipped/rank-00000.safetensors", "r+b") as file:
        file.write(b"x")
    os.truncate(root / "torn_manifest/manifest.json", 100)
    diverged(root / "nan", newest)
    hostile = {"files": ["../x"], "tensors": {}}
    rewritten(root / "hostile", newest, "index.json", json.dumps(hostile).encode())
    no_names = {"files": [], "tensors": []}
    rewritten(root / "no_names", newest, "index.json", json.dumps(no_names).encode())
    shutil.copytree(newest, root / "renamed/step-00000045")
    shutil.copytree(newest, root / "no_manifest/step-00000001")
    (root / "no_manifest/step-00000001/manifest.json").unlink()
