"""Text -> token folders: nothing is lost or overwritten, and the split is reproducible."""

import gzip
import importlib.util
import io
import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, Job
from test_tokenizer import ids_of, meta_of, prepared, small_gpt2

import data
import prepare
from errors import UsageError
from text import encode, sources
from text.sources import Corpus


def test_prepared_documents_come_back_exactly(tmp_path, capsys):
    texts = {"a": "one\r\ntwo é\n", "b": "".join(map(chr, range(256))), "c": "x<|endoftext|>y"}
    folder = prepared(tmp_path, texts, val_fraction=0.5)
    tokens = ids_of(folder, "train") + ids_of(folder, "val")
    ends = itertools.groupby(tokens, lambda token: token == 256)
    documents = {bytes(group) for is_end, group in ends if not is_end}
    assert documents == {texts["a"].encode(), texts["b"].encode(), b"x", b"y"}
    assert tokens.count(256) == 4
    assert capsys.readouterr().out.startswith("read 3 files: 4 documents, ")


def test_sources_without_any_text_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(sources.SourceError, match=r"contain no text \(1 file without text\)"):
        prepare.prepare([str(tmp_path)], tmp_path / "tokens")


def test_documents_are_split_by_their_content(tmp_path):
    texts = {f"{i:03}": f"document {i} " * (i + 1) for i in range(300)}
    folder = prepared(tmp_path, texts | {"copy": texts["017"]}, val_fraction=0.3)
    meta = meta_of(folder)
    parts = {}
    for split in ("train", "val"):
        parts[split] = bytes(id % 256 for id in ids_of(folder, split)).split(b"\0")  # 256 -> 0
    assert {split: len(part) - 1 for split, part in parts.items()} == meta["documents"]
    assert set(parts["train"]) & set(parts["val"]) == {b""}
    assert sum(meta["documents"].values()) == 301
    assert 60 < meta["documents"]["val"] < 120
    assert Counter(parts["train"] + parts["val"])[texts["017"].encode()] == 2
    assert meta["train_tokens"] == len(ids_of(folder, "train"))


def test_one_document_gives_its_tail_to_validation(tmp_path):
    """By their hash, a third of these documents would be entirely in the validation set."""
    for i in range(9):
        text = f"\n\n{i} text " * 20
        folder = prepared(tmp_path / str(i), {"a": text}, val_fraction=0.3)
        *both, _ = ids_of(folder, "train") + ids_of(folder, "val")
        assert bytes(both).decode() == text
        assert len(ids_of(folder, "val")) == len(text) * 3 // 10


def test_prepare_prints_what_it_read_and_skipped(tmp_path, capsys):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("one<|endoftext|>")  # nothing follows, so no blank document
    (text / "b.txt").write_text("two<|endoftext|>three<|endoftext|>\n")
    (text / "empty.txt").touch()
    (text / "page.html").write_text("<html>")
    (text / ".env").write_text("KEY=secret")
    prepare.prepare([str(text)], tmp_path / "tokens", val_fraction=0.5)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "read 3 files: 3 documents, 11 bytes of text"
    suffixes = ".txt, .jsonl, .jsonl.gz, .parquet"
    skipped = f"1 file (its suffix is none of {suffixes}), 1 hidden name"
    assert said[1] == f"skipped 1 blank document, {skipped}"


MERGES = [b"th", b" th", b"the", b" the", b"  ", b"\n\n", b"12", b"\xc3\xa9", b"\xef\xbf\xbd"]


def write_ugly_corpus(folder: Path) -> list[str]:
    """Write files of every kind, in sorted order; return the documents in them."""
    folder.mkdir()
    rows = ["the <|endoftext|> of a row", "\ud83d half a pair", "x " * 300_000, "é " * 200_000]
    rows += [" \n", None]
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
    files = {
        "1 empty.txt": b"",
        "1 nothing.jsonl.gz": gzip.compress(b""),
        "2 latin-1.txt": "the né à".encode("latin-1"),
        "4 two<|endoftext|>.txt": b"one 12<|endoftext|>\r\n  two\n\n",
        "5 lines.jsonl": lines.encode(),
        "6 packed.jsonl.gz": gzip.compress(b'{"text": "packed the"}\n{"text": "cut'),
        "7 long.TXT": b"the 12\n" * 100_000,
    }
    for name, contents in files.items():
        (folder / name).write_bytes(contents)
    documents = ["the n\ufffd \ufffd", "one 12", "\r\n  two\n\n", rows[0]]
    documents += ["\ufffd half a pair", *rows[2:4], "packed the", files["7 long.TXT"].decode()]
    if importlib.util.find_spec("pyarrow"):
        table = importlib.import_module("pyarrow").table({"text": ["the row", None, "é"]})
        importlib.import_module("pyarrow.parquet").write_table(table, folder / "9.parquet")
        documents += ["the row", "é"]
    return documents


def test_a_messy_corpus_gets_the_tokens_of_tiktoken(tmp_path, monkeypatch, capsys):
    documents = write_ugly_corpus(tmp_path / "text")
    encoding = small_gpt2(monkeypatch, MERGES)
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", "gpt2", val_fraction=0.5)
    said = capsys.readouterr().out.splitlines()
    expected = {"train": [], "val": []}
    for document in documents:
        chunks = list(sources.cut(io.StringIO(document, newline="")))
        split = encode.choose_split(chunks[0].text.encode(), 0.5)
        expected[split] += encoding.encode(document, disallowed_special=())
        expected[split].append(encoding.eot_token)
    folder = data.open_folder(tmp_path / "tokens")
    for split in ("train", "val"):
        assert ids_of(folder, split) == expected[split]
    skipped, first_broken, replaced = said[1:4]
    assert "1 broken line (not a JSON object)" in skipped
    assert first_broken.endswith("6 packed.jsonl.gz, line 2: not a JSON object")
    assert replaced.startswith("3 characters became U+FFFD, the first in ")
    assert "2 latin-1.txt: bytes that are not UTF-8 (convert the file, for example" in replaced


def test_progress_has_the_size_the_speed_and_a_percentage():
    corpus = Corpus(files=[Path("a")], size=400_000_000, position=100_000_000)
    splitter = encode.Splitter(corpus, 0.1)
    splitter.size = 300_000_000
    line = "tokenizing: 300.0 MB of text read, 10.0 MB/s, 25%"
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


def test_prepare_replaces_only_what_a_killed_process_left(tmp_path, endless):
    (tmp_path / "text").write_text("one document")
    work = tmp_path / ".tokens.unfinished"
    inode = work.stat().st_ino
    with pytest.raises(UsageError, match="lock is held by another process"):
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
    assert len(ids_of(data.open_folder(tmp_path / "tokens"), "val")) == 1
