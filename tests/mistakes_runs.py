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
        # --out
        Mistake("--out {other} --resume never", "is not empty, and --resume never would overwrite"),
        Mistake("--out {other} --data {changed}", "the data's fingerprint "),
        Mistake("--out {other} --lr 0.5", "--lr 0.003 -> 0.5"),
        Mistake("--out {other} --max_steps 1", "is at step 2, and --max_steps 1 leaves nothing to"),
        Mistake("--out {foreign}", "holds files that are not train.py's"),
        Mistake("--out {foreign}/config.json", "config.json: File exists; choose another --out"),
        Mistake("--out {lost}", "no checkpoint to use: {lost}/checkpoints/step-", 1),
        Mistake("--out {gone}", "cannot continue --out {gone}: its checkpoint of step 2 is"),
        Mistake("--out {older}", "has format 1, and this code reads 2: use version 0.2.0"),
        Mistake("--out {unsaved}", "cannot continue --out {unsaved}: its run has --checkpoint non"),
        # --resume, --init_from, --eval_only
        Mistake("--resume {root}", "{root} holds no checkpoint: name a run folder such as"),
        Mistake("--resume {other} --init_from {other}", "--init_from begins a new run and --resum"),
        Mistake("--init_from {other} --d_ff 80", "has d_ff 64, and this run has 80: its weights d"),
        Mistake("--init_from {forked}", "forked cannot be used: its model has other fields than"),
        Mistake("--eval_only --init_from {damaged}", "{damaged}: rank-00000.safetensors is mis", 1),
    ],
    "sample.py": [
        Mistake("--run {root}/nowhere", "nowhere: name a run folder such as runs/tiny, or a check"),
        Mistake("--run {other} --top_p 0", "argument --top_p: 0.0 must be at least 1e-09 and"),
        Mistake("--run {other} --device cuda", "PyTorch finds no CUDA device here"),
        Mistake("--run {ids} --prompt three", "write the prompt as token ids, such as '17 4 52'"),
        Mistake("--run {ids} --prompt '1 257'", "--prompt: token ids are 0 to 256"),
        Mistake("--run {outside}", "is missing: there is no {outside}/o200k.tiktoken; copy"),
        Mistake("--run {other_tokenizer}", "is another tokenizer: it has 258 tokens, the model's"),
        Mistake("--run {damaged}", "no checkpoint to use: {damaged}: rank-00000.safetensors is", 1),
        Mistake("--run {forked}", "its model has other fields than this code: ModelConfig", 1),
        Mistake("--run {no_data}", "is not a checkpoint of train.py: its manifest.json lacks", 1),
        Mistake("--run {no_tokenizer}", "is missing: there is no {no_tokenizer}/5; copy the"),
        Mistake("--run {nan}", "the model's logits are not finite: its weights have diverged", 1),
    ],
    "tools.checkpoint": [
        Mistake("list {root}/nowhere", "there is no folder"),
        Mistake("verify {foreign}", "holds no checkpoint: name a run folder such as runs/tiny"),
        Mistake("verify {truncated}", "rank-00000.safetensors has 1,000 bytes, not", 1),
        Mistake("verify {newer}", "has format 3, and this code reads 2: use the version that"),
        Mistake("verify {no_manifest}/step-00000001", "1 is not a complete checkpoint: its man", 1),
        Mistake("verify {renamed}/step-00000045", "is not a complete checkpoint: its manifest", 1),
        Mistake("list {torn_manifest}", "is not a complete checkpoint: its manifest.json is", 1),
        Mistake("consolidate {ids} {foreign}", "exists: remove it or choose another name"),
        Mistake("consolidate {ids} {foreign}/config.json/new", "[Errno 20] Not a directory", 1),
        Mistake("consolidate {flipped} {root}/new", "rank-00000.safetensors has changed since", 1),
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
    consolidate.consolidate(source, folder)
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
        "other_tokenizer": {"tokenizer": "my.tiktoken"},
        "newer": {"format": 3},
        "forked": {"model": model | {"window": 4}},
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
    no_names = {"files": [], "tensors": []}
    rewritten(root / "no_names", newest, "index.json", json.dumps(no_names).encode())
    shutil.copytree(newest, root / "renamed/step-00000045")
    shutil.copytree(newest, root / "no_manifest/step-00000001")
    (root / "no_manifest/step-00000001/manifest.json").unlink()
