"""The folders that the mistaken commands of test_mistakes.py use, each with something wrong."""

import json
import os
import shutil
from pathlib import Path

import checkpoint
from text import tokenizer
from tools import hf

RANKS = "tokenizer.llama3.tiktoken"  # the name of a file of ranks, which is not read


def write_folders(root: Path, tokens: Path) -> None:
    """Write all of them next to `root / "other"`, a good run of two steps on `tokens`."""
    write_token_folders(root, tokens)
    write_sources(root)
    write_checkpoints(root, root / "other/checkpoints/step-00000002")
    write_runs(root)
    write_llamas(root)


# --------------------------------------------------------------------------------------------------
# What prepare.py reads, and what it writes


def write_token_folders(root: Path, tokens: Path) -> None:
    """Write changed copies of a token folder. train.py accepts only `changed`."""
    for name in ("changed", "high", "torn", "misfit", "ranks"):
        shutil.copytree(tokens, root / name)
    for name, token in (("changed", 0), ("high", 300)):
        with open(root / name / "train.bin", "r+b") as file:
            file.write(token.to_bytes(2, "little"))
    os.truncate(root / "torn/train.bin", 1999)
    hf.write_tokenizer(tokenizer.load_encoding("bytes"), root / "tokenizer.json")
    spec = json.loads((root / "tokenizer.json").read_text())
    spec["added_tokens"].append({"id": 257, "content": "<|im_end|>", "special": True})
    meta = json.loads((tokens / "meta.json").read_text())
    for folder, name, contents in (("misfit", "my.json", json.dumps(spec)), ("ranks", RANKS, "")):
        (root / folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": name}))
        (root / folder / name).write_text(contents)


def write_sources(root: Path) -> None:
    text = root / "text"
    text.mkdir()
    (text / "a").write_text("text")
    skipped = root / "skipped"
    skipped.mkdir()
    (skipped / "page.html").write_text("<html>")


# --------------------------------------------------------------------------------------------------
# Runs and checkpoints


def write_checkpoints(root: Path, newest: Path) -> None:
    """Write copies of the checkpoint `newest`, each with something wrong."""
    model = checkpoint.read_manifest(newest)["model"]
    changes = {
        "ids": {"tokenizer": None},
        "old": {"tokenizer": RANKS},
        "forked": {"model": model | {"window": 4}},
        "damaged": {},
    }
    for name, fields in changes.items():
        variant(root / name, newest, **fields)
    (root / "old" / RANKS).touch()
    (root / "damaged/rank-00000.safetensors").unlink()
    shutil.copytree(newest, root / "renamed/step-00000045")


def variant(folder: Path, source: Path, **fields) -> None:
    """Copy a checkpoint and change fields of the manifest."""
    shutil.copytree(source, folder)
    manifest = checkpoint.seal(checkpoint.read_manifest(source) | fields)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write_runs(root: Path) -> None:
    """Write run folders without checkpoints, some with a spoilt log or configuration."""
    shutil.copytree(root / "other", root / "gone", ignore=shutil.ignore_patterns("checkpoints"))
    (root / "foreign").mkdir()
    (root / "foreign/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    config = (root / "other/config.json").read_text()
    lines = (root / "other/metrics.jsonl").read_text().splitlines()
    training = [line for line in lines if '"loss"' in line]
    spoilt = {
        "unlogged": ([], config, 0),
        "unsaved": (training, '{"checkpoint": "none"}', 0),
        "winged": (training, '{"wings": 2}', 0),
        "restarted": (training, config, 2),
    }
    for name, (log, config, step) in spoilt.items():
        (root / name).mkdir()
        start = json.dumps({"event": "start", "step": step, "config": json.loads(config)})
        (root / name / "metrics.jsonl").write_text("\n".join([start, *log]))
        (root / name / "config.json").write_text(config)
    (root / "comma.json").write_text('{"lr": 0.5\n"seed": 1}')


# --------------------------------------------------------------------------------------------------
# Hugging Face model folders without weights

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
SPOILT_LLAMAS = {
    "qwen2": {"model_type": "qwen2"},
    "window": {"model_type": "mistral", "sliding_window": 4096},
    "deep": {"num_hidden_layers": 10**9},
    "quoted": {"hidden_size": "32", "head_dim": 8},
    "wide": {"head_dim": 16},
    "good": {},
}


def write_llamas(root: Path) -> None:
    for name, change in SPOILT_LLAMAS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(LLAMA | change))
