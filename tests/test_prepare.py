"""Text -> token folders: nothing is lost or overwritten, and the split is reproducible."""

import gzip
import importlib.util
import io
import itertools
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Job
from test_tokenizer import ADDED, prepared, small_gpt2

import data
import prepare
from errors import UsageError
from text import encode, sources
from text.sources import STDIN, Corpus


def test_prepared_documents_come_back_exactly(tmp_path, capsys):
    texts = {"a": "one\r\ntwo é\n", "b": bytes(range(256)), "c": "x<|endoftext|>y"}
    folder = prepared(tmp_path, texts, named=True, val_fraction=0.5)
    tokens = np.concatenate([folder.tokens("train"), folder.tokens("val")]).tolist()
    ends = itertools.groupby(tokens, lambda token: token == 256)
    documents = {bytes(group) for is_end, group in ends if not is_end}
    assert documents == {texts["a"].encode(), texts["b"], b"x", b"y"}
    assert tokens.count(256) == 4
    assert capsys.readouterr().out.startswith("read 3 files, 1 of them binary: 4 documents, ")


def test_sources_without_any_text_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(sources.SourceError, match=r"contain no text \(1 file without text\)"):
        prepare.prepare([str(tmp_path)], tmp_path / "tokens")


def test_documents_are_split_by_their_content(tmp_path):
    texts = {f"{i:03}": f"document {i} " * (i + 1) for i in range(300)}
    folder = prepared(tmp_path, texts | {"copy": texts["017"]}, val_fraction=0.3)
    meta = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    parts = {}
    for split in ("train", "val"):
        parts[split] = bytes(folder.tokens(split).astype(np.uint8)).split(b"\0")  # 256 -> 0
    assert {split: len(part) - 1 for split, part in parts.items()} == meta["documents"]
    assert set(parts["train"]) & set(parts["val"]) == {b""}
    assert sum(meta["documents"].values()) == 301
    assert 60 < meta["documents"]["val"] < 120
    assert Counter(parts["train"] + parts["val"])[texts["017"].encode()] == 2
    assert meta["train_tokens"] == len(folder.tokens("train"))


def test_one_document_gives_its_tail_to_validation(tmp_path):
    """By their hash, a third of these documents would be entirely in the validation set."""
    for i in range(9):
        text = f"\n\n{i} text " * 20
        folder = prepared(tmp_path / str(i), {"a": text}, val_fraction=0.3)
        both = np.concatenate([folder.tokens("train"), folder.tokens("val")])
        assert bytes(both[:-1].astype(np.uint8)).decode() == text
        assert len(folder.tokens("val")) == len(text) * 3 // 10


def test_prepare_prints_what_it_read_and_skipped(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a").write_text("one<|endoftext|>")  # nothing follows, so no blank document
    (text / "b").write_text("two<|endoftext|>three<|endoftext|>\n")
    (text / "empty").touch()
    (text / "utf-16").write_text("text", encoding="utf-16")
    (text / "folder").symlink_to(tmp_path)
    (text / "second").symlink_to("a")
    (text / ".env").write_text("KEY=secret")
    os.mkfifo(text / "pipe")
    prepare.prepare([str(text)], tmp_path / "tokens", val_fraction=0.5)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "read 2 files: 3 documents, 11 bytes of text"
    assert said[1] == (
        "skipped 1 UTF-16 file, 1 blank document, 1 empty file, 1 hidden name, "
        "1 second name of a file, 1 special file"
    )
    assert said[2].startswith("1 UTF-16 file skipped; to use one, convert it: iconv ")


MERGES = [b"th", b" th", b"the", b" the", b"  ", b"\n\n", b"12", b"\xc3\xa9", b"\xef\xbf\xbd"]


def write_ugly_corpus(folder: Path) -> list[str]:
    """Write files of every kind, in sorted order; return the documents in them."""
    folder.mkdir()
    rows = ["the <|endoftext|> of a row", "\ud83d half a pair", "x " * 300_000, "é " * 200_000]
    rows += [" \n", None]
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    files = {
        "0 binary": b"\x7fELF\0",
        "1 empty": b"",
        "1 nothing.gz": gzip.compress(b""),
        "2 latin-1": "the né à".encode("latin-1"),
        "3 utf-16": "\0the é".encode("utf-16"),
        "4 two<|endoftext|>": b"one 12<|endoftext|>\r\n  two\n\n",
        "5 lines.jsonl": lines.encode(),
        "6 packed.jsonl.gz": gzip.compress(b'{"text": "packed the"}\n{"text": "cut'),
        "7 long": b"the 12\n" * 100_000,
    }
    for name, contents in files.items():
        (folder / name).write_bytes(contents)
    documents = ["the n\ufffd \ufffd", "one 12", "\r\n  two\n\n", rows[0]]
    documents += ["\ufffd half a pair", *rows[2:4], "packed the", files["7 long"].decode()]
    if importlib.util.find_spec("pyarrow"):
        table = importlib.import_module("pyarrow").table({"text": ["the row", None, "é"]})
        importlib.import_module("pyarrow.parquet").write_table(table, folder / "9.parquet")
        documents += ["the row", "é"]
    return documents


def test_a_messy_corpus_gets_the_tokens_of_tiktoken(tmp_path, monkeypatch, capsys):
    documents = write_ugly_corpus(tmp_path / "text")
    encoding = small_gpt2(monkeypatch, MERGES)
    for num_threads, out in ((1, "tokens"), (4, "again")):
        options = {"val_fraction": 0.5, "num_threads": num_threads}
        prepare.prepare([str(tmp_path / "text")], tmp_path / out, "gpt2", **options)
    said = capsys.readouterr().out.splitlines()
    for file in (tmp_path / "tokens").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    expected = {"train": [], "val": []}
    for document in documents:
        chunks = list(sources.cut(io.StringIO(document, newline="")))
        split = encode.choose_split(chunks[0].text.encode(), 0.5)
        expected[split] += encoding.encode(document, disallowed_special=())
        expected[split].append(encoding.eot_token)
    folder = data.open_folder(tmp_path / "tokens")
    for split in ("train", "val"):
        assert folder.tokens(split).tolist() == expected[split]
    skipped, _, first_broken, replaced = said[1:5]
    assert skipped.startswith("skipped 1 UTF-16 file, 1 binary file, ")
    assert "1 broken line (not a JSON object), 2 empty" in skipped
    assert first_broken.endswith("6 packed.jsonl.gz, line 2: not a JSON object")
    assert replaced.startswith("3 characters became U+FFFD, the first in ")
    assert "2 latin-1: bytes that are not UTF-8 (convert the file, for example with" in replaced


def test_progress_has_a_percentage_only_for_a_known_size():
    corpus = Corpus(files=[Path("a")], size=400_000_000, position=100_000_000)
    splitter = encode.Splitter(corpus, 0.1)
    splitter.size = 300_000_000
    line = "tokenizing: 300.0 MB of text read, 10.0 MB/s"
    assert encode.describe_progress(splitter, seconds=30) == f"{line}, 25%"
    corpus.files.append(STDIN)
    assert encode.describe_progress(splitter, seconds=30) == line


def test_an_existing_folder_is_never_overwritten(tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(UsageError, match=f"--out {tmp_path} exists: remove it"):
        prepare.prepare(None, tmp_path)
    assert (tmp_path / "keep").read_text() == "mine"


def test_prepare_cleans_up_after_a_full_disk(tmp_path, capsys, small_disk):
    (tmp_path / "text").write_bytes(b"0123456789abcde\n" * 50_000)  # 1.6 MB of tokens
    argv = ["--source", str(tmp_path / "text"), "--out", str(small_disk / "tokens")]
    assert prepare.main(argv) == 1
    said, error = capsys.readouterr()
    assert said == "" and error == "prepare.py: error: [Errno 28] No space left on device\n"
    assert not list(small_disk.iterdir())


@pytest.fixture
def endless(tmp_path):
    """prepare.py, working on an endless source, with the output tmp_path / "tokens"."""
    source = tmp_path / "source"
    with open(source, "w") as file:
        file.truncate(1 << 40)  # sparse: no block of it is on the disk
    command = [ROOT / "prepare.py", "--source", source, "--out", tmp_path / "tokens"]
    job = Job(command, tmp_path / "job")
    work = tmp_path / ".tokens.unfinished"
    job.wait_until(lambda: (work / "train.bin").exists(), 60)
    return job


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_prepare_cleans_up_after_a_signal(tmp_path, endless, number, status):
    os.kill(endless.pid, number)
    assert endless.wait(10) == status
    assert endless.err == f"prepare.py: stopped; {tmp_path}/tokens was not created\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "source"]


def test_a_signal_interrupts_the_encoding_of_a_long_document(tokenizers, tmp_path):
    """The document cannot be cut: the package tokenizers needs a minute for it."""
    spec = {"added_tokens": [ADDED | {"id": 0, "content": "</s>"}]}
    vocab = {token: i for i, token in enumerate(["</s>", "a", "b", "ab", "abab"])}
    spec["model"] = {"type": "BPE", "vocab": vocab, "merges": ["a b", "ab ab"], "unk_token": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "text").write_text("ab" * 20_000_000)
    command = [ROOT / "prepare.py", "--source", tmp_path / "text", "--out", tmp_path / "tokens"]
    command += ["--tokenizer", tmp_path / "tokenizer.json"]
    job = Job(command, tmp_path / "job")
    job.wait_until(lambda: (tmp_path / ".tokens.unfinished/train.bin").exists(), 60)
    time.sleep(2)  # it has read the text
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(2) == 143
    assert job.err == f"prepare.py: stopped; {tmp_path}/tokens was not created\n"
    assert not (tmp_path / "tokens").exists()
    assert not (tmp_path / ".tokens.unfinished").exists()


def test_prepare_replaces_only_what_a_killed_process_left(tmp_path, endless):
    (tmp_path / "text").write_text("one document")
    work = tmp_path / ".tokens.unfinished"
    inode = work.stat().st_ino
    with pytest.raises(UsageError, match="another process is writing --out .*/tokens: wait"):
        prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens")
    assert work.stat().st_ino == inode and (work / "train.bin").exists()
    endless.process.kill()
    endless.wait(10)
    assert (work / "train.bin").exists()
    (work / "tokenizer.json").touch()
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens")
    assert not work.exists()
    names = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    assert names == ["meta.json", "train.bin", "val.bin"]
    assert len(data.open_folder(tmp_path / "tokens").tokens("val")) == 1
