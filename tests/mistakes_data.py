"""Sources, tokenizers and token folders that prepare.py and train.py cannot use."""

import base64
import gzip
import json
import os
from pathlib import Path

import numpy as np
from mistakes import Mistake

MISTAKES = {
    "train.py": [
        Mistake("--data {root}/nowhere", "no train.bin there; create it with: python prepare.py"),
        Mistake("--seq_len 100000", "one sequence of --seq_len 100000 needs 100,001"),
        Mistake("--data {high}", "train.bin holds token 300, above its vocabulary of 257; prepare"),
        Mistake("--data {torn}", "torn/train.bin has 1,999 bytes, not 1,000 tokens of 2"),
        Mistake("--data {no_tokenizer_file}", "No such file or directory: '{no_tokenizer_file}/my"),
        Mistake("--data {stray}", "the tokenizer in meta.json is not the name of a file in the"),
        Mistake("--data {secret}", "secret/my.tiktoken is not a .tiktoken file (line 1 is"),
        Mistake("--data {misfit}", "is another tokenizer: it has 258 tokens, the model's 257"),
        Mistake("--data {changed}:0.7,{high}:0.2", "of shares of at least 0.001 that add up to 1"),
        Mistake("--data {changed}:0.5,{gpt2}:0.5", "gpt2 and {changed} have different tokenizers;"),
    ],
    "prepare.py": [
        Mistake("--out {root}/new --val_fraction 0", "0.0 must be at least 1e-09 and below 1"),
        Mistake("--out {text}", "text exists: remove it or choose another folder"),
        Mistake("--out {root}/new --source ''", "--source '' is empty: name a file or a folder"),
        Mistake("--out {root}/new --source {root}/nowhere", "cannot be read (No such file or dire"),
        Mistake("--out {root}/new --source /dev/null", "/dev/null is neither a file nor a folder"),
        Mistake("--out {root}/new --source {skipped}", "holds no text (1 binary file, 1 empty fil"),
        Mistake("--out {root}/new --source {text}/blank", "the sources hold no text (1 blank docu"),
        Mistake("--out {root}/new --source {root}/*.nothing", "*.nothing matches no file"),
        Mistake(
            "--out {root}/new --source {broken}/rows.jsonl --field body",
            "rows.jsonl has no field body: give --field one of its own (id, text)",
        ),
        Mistake("--out {root}/new --source {broken}/cut.gz", "cut.gz cannot be read (Compressed f"),
        Mistake(
            "--out {root}/new --source {skipped}/binary --tokenizer {ranks}/o200k.tiktoken",
            "is binary (a NUL byte in its first 8,192): leave it out; only --tokenizer bytes reads",
        ),
        Mistake("--out {root}/new --tokenizer gpt3", "gpt3: No such file or directory; choose byt"),
        Mistake("--out {root}/new --pattern o200k", "--pattern o200k is for --tokenizer PATH.tikt"),
        Mistake("--out {root}/new --tokenizer {text}/a", "a is not a .tiktoken file (line 1 is no"),
        Mistake("--out {root}/new --tokenizer {ranks}/short", "(no token for byte 255)"),
        Mistake("--out {root}/new --tokenizer {ranks}/token", "(its 257 lines are not 257 tokens"),
        Mistake(
            "--out {root}/new --tokenizer {foreign}/config.json",
            "config.json cannot be used as a tokenizer.json of Hugging Face: it lacks 'model'",
        ),
    ],
}


# A .tiktoken file of the 256 bytes
RANKS = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))


def write_folders(root: Path) -> None:
    write_token_folders(root)
    write_sources(root)
    write_rank_files(root / "ranks")


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


def write_token_folders(root: Path) -> None:
    """Token folders, of which train.py can use `changed` only."""
    ids = np.arange(1000) % 256
    write_tokens(root / "changed", ids)
    write_tokens(root / "high", np.where(ids == 200, 300, ids))
    write_tokens(root / "gpt2", ids, tokenizer="gpt2")
    write_tokens(root / "no_tokenizer_file", ids, tokenizer="my.tiktoken")
    write_tokens(root / "stray", ids, tokenizer="../secret/my.tiktoken")
    torn = write_tokens(root / "torn", ids)
    os.truncate(torn / "train.bin", 1999)
    secret = write_tokens(root / "secret", ids, tokenizer="my.tiktoken")
    (secret / "my.tiktoken").write_text("not a tokenizer")
    misfit = write_tokens(root / "misfit", ids, tokenizer="my.tiktoken")
    (misfit / "my.tiktoken").write_text(RANKS + "dGg= 256\n")


def write_sources(root: Path) -> None:
    """What prepare.py reads, and what it cannot."""
    text = root / "text"
    text.mkdir()
    (text / "a").write_text("text")
    (text / "blank").write_text(" \n")
    skipped = root / "skipped"
    skipped.mkdir()
    (skipped / "empty").touch()
    (skipped / "binary").write_bytes(b"\x7fELF\0")
    broken = root / "broken"
    broken.mkdir()
    (broken / "rows.jsonl").write_text('{"id": 1, "text": "one"}\n')
    (broken / "cut.gz").write_bytes(gzip.compress(b"text")[:-9])


def write_rank_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "o200k.tiktoken").write_text(RANKS)
    (folder / "short").write_text("".join(RANKS.splitlines(keepends=True)[:-1]))
    (folder / "token").write_text(RANKS + "Bw== 256")
