"""Text -> token folders: nothing lost, nothing overwritten, the same split on every machine."""

import itertools
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import data
import prepare
import tokenizer


def prepared(tmp_path: Path, texts: dict[str, str | bytes], **options) -> data.TokenFolder:
    source = tmp_path / "text"
    source.mkdir(parents=True)
    for name, text in texts.items():
        (source / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    prepare.prepare([str(source)], tmp_path / "tokens", say=lambda line: None, **options)
    return data.open_folder(tmp_path / "tokens")


def test_bytes_come_back_exactly_and_documents_end(tmp_path):
    texts = {"a": "one\r\ntwo é\n", "b": bytes(range(256)), "c": "x<|endoftext|>y"}
    folder = prepared(tmp_path, texts, val_fraction=0.5)
    tokens = np.concatenate([folder.tokens("train"), folder.tokens("val")]).tolist()
    documents = [
        list(group)
        for end, group in itertools.groupby(tokens, lambda token: token == 256)
        if not end
    ]
    assert {bytes(document) for document in documents} == {
        "one\r\ntwo é\n".encode(),
        bytes(range(256)),
        b"x",
        b"y",
    }
    assert tokens.count(256) == 4
    assert "".join(tokenizer.decode("bytes", tokenizer.encode("bytes", "naïve ✓"))) == "naïve ✓"


def test_documents_are_split_by_their_content_and_meta_counts_them(tmp_path):
    texts = {f"{i:03}": f"document {i} " * (i + 1) for i in range(300)}
    folder = prepared(tmp_path, texts | {"copy": texts["017"]}, val_fraction=0.3)
    meta = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    parts = {
        split: bytes(folder.tokens(split).astype(np.uint8)).split(b"\0")
        for split in ("train", "val")
    }  # 256 -> 0
    assert {split: len(part) - 1 for split, part in parts.items()} == meta["documents"]
    assert set(parts["train"]) & set(parts["val"]) == {b""}
    assert sum(meta["documents"].values()) == 301 and 60 < meta["documents"]["val"] < 120
    assert Counter(parts["train"] + parts["val"])[texts["017"].encode()] == 2
    assert meta["train_tokens"] == len(folder.tokens("train"))


def test_one_document_gives_its_tail_to_validation(tmp_path):
    text = "".join(random.Random(0).choices("abcdef\n", k=5000))
    folder = prepared(tmp_path, {"a": text}, val_fraction=0.1)
    both = np.concatenate([folder.tokens("train"), folder.tokens("val")])
    assert bytes(both[:-1].astype(np.uint8)).decode() == text and len(folder.tokens("val")) == 500


def test_a_corpus_of_one_document_is_never_all_validation(tmp_path):
    """Its hash would put one in twenty there."""
    for i in range(60):
        folder = prepared(tmp_path / str(i), {"a": f"\n\n{i} text " * 20}, val_fraction=0.3)
        tokens = np.concatenate([folder.tokens("train"), folder.tokens("val")])
        assert bytes(tokens[:-1].astype(np.uint8)).decode() == f"\n\n{i} text " * 20
        assert len(folder.tokens("train")) > len(folder.tokens("val")) > 0
    with pytest.raises(data.DataError, match="no text"):
        prepared(tmp_path / "none", {"a": " \n "})


@pytest.mark.parametrize("separator", ["\n", " "])
def test_long_documents_are_read_in_chunks(tmp_path, monkeypatch, separator):
    """Whatever their length, and wherever they cut separators and characters of several bytes."""
    text = separator.join(
        random.Random(0).choices(["ab", "é✓", "<|endoftext|>", "<|end", "x" * 40], k=400)
    )
    want = [part for part in text.split("<|endoftext|>") if part.strip()]
    path = tmp_path / "a"
    path.write_text(text)
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(prepare, "CHUNK", size)
        found, document = [], ""
        for chunk, ends in prepare.read_chunks(path):
            document += chunk
            assert len(chunk) <= 2 * size + 13
            if ends:
                found, document = found + [document] * bool(document.strip()), ""
        assert found == want


def test_builtin_set_is_large_enough():
    assert sum(path.stat().st_size for path in prepare.builtin_sources()) > 5e6


def test_sources_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(data.DataError, match="--source missing: no such file or directory"):
        prepare.prepare(["missing"], tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_refused_and_kept(tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(data.DataError, match=f"--out {tmp_path} exists: remove it"):
        prepare.prepare(None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert (tmp_path / "keep").read_text() == "mine"


def test_an_error_while_preparing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "tokenize", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare.prepare(None, tmp_path / "new")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options, status, line",
    [
        (["--source", "text"], 0, None),
        (["--source", "nowhere"], 2, "--source nowhere: no such file or directory"),
        (
            ["--source", "text", "--val_fraction", "2"],
            2,
            "--val_fraction 2.0 must be between 0 and 1",
        ),
        (["--source", "text", "--tokenizer", "x"], 2, "--tokenizer x: No such file or directory"),
    ],
)
def test_the_command(tmp_path, monkeypatch, capsys, options, status, line):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("one two three " * 20)
    assert prepare.main(["--out", "tokens", *options]) == status
    said, error = capsys.readouterr()
    if line is None:
        assert "tokens to train on" in said and data.open_folder(Path("tokens")).vocab_size == 257
    else:
        assert error.startswith(f"prepare.py: error: {line}") and error.count("\n") == 1
        assert not Path("tokens").exists()
