"""Text -> token folders: nothing lost, nothing overwritten, the same split on every machine."""

import contextlib
import itertools
import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Job

import data
import prepare
import tokenizer
from cli import UsageError


def quiet(line: str) -> None:
    """What `prepare` says is not wanted."""


def prepared(
    tmp_path: Path, texts: dict[str, str | bytes], named: bool = False, **options
) -> data.TokenFolder:
    """Prepare a folder of `texts` or, with `named`, each file by its name."""
    source = tmp_path / "text"
    source.mkdir(parents=True)
    for name, text in texts.items():
        (source / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    sources = [str(path) for path in source.iterdir()] if named else [str(source)]
    prepare.prepare(sources, tmp_path / "tokens", say=quiet, **options)
    return data.open_folder(tmp_path / "tokens")


def test_bytes_come_back_exactly_and_documents_end(tmp_path):
    texts = {"a": "one\r\ntwo é\n", "b": bytes(range(256)), "c": "x<|endoftext|>y"}
    folder = prepared(tmp_path, texts, named=True, val_fraction=0.5)
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
    with pytest.raises(UsageError, match="no text but white space"):
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


# ---- what is read and what is not


def test_what_was_read_and_skipped_is_said(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    (text / "a").write_text("one")
    (text / "b").write_text("two<|endoftext|>three<|endoftext|>\n")
    (text / "empty").touch()
    (text / "utf-16").write_text("text", encoding="utf-16")
    (text / "image").write_bytes(b"\x89PNG\0" + bytes(95))
    (text / "folder").symlink_to(tmp_path)
    (text / "file").symlink_to("a")
    os.mkfifo(text / "pipe")
    said = []
    prepare.prepare([str(text)], tmp_path / "tokens", val_fraction=0.5, say=said.append)
    assert said[0] == "read 3 files: 4 documents, 14 bytes of text"
    assert said[1] == (
        "skipped 2 binary files, 1 blank document, 1 empty file, 1 linked folder, 1 special file "
        "(110 bytes)"
    )


def test_a_nul_byte_counts_in_the_first_8_kib(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 8192 + b"\0")
    (tmp_path / "binary").write_bytes(b"x" * 8191 + b"\0")
    corpus = prepare.find_files([str(tmp_path)], takes_binary=True)
    assert corpus.files == [tmp_path / "text"]
    named = prepare.find_files([str(tmp_path / "binary")], takes_binary=True)
    assert named.files == [tmp_path / "binary"]


@contextlib.contextmanager
def as_an_ordinary_user():
    """For root, whom permissions do not stop."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["folder", "file"])
def test_what_may_not_be_read_is_an_error_and_not_a_gap(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)  # above it, the way may be barred to other users
    tmp_path.chmod(0o755)
    Path("text/folder").mkdir(parents=True)
    Path("text/file").write_text("secret")
    Path("text/readable").write_text("text")
    Path("text", name).chmod(0)
    line = rf"--source text/{name} cannot be read \(Permission denied\)"
    with as_an_ordinary_user(), pytest.raises(UsageError, match=line):
        prepare.find_files(["text"], takes_binary=False)
    Path("text", name).chmod(0o700)


def test_the_share_of_validation_is_said_where_it_is_not_the_one_asked_for(tmp_path):
    """A long document to train on, and a short one to validate."""
    by_split = {}
    for i in range(1000):
        for document in (f"document {i}", f"document {i} " * 1000):
            by_split[prepare.choose_split(document.encode(), 0.05), len(document) > 100] = document
    (tmp_path / "long").write_text(by_split["train", True])
    (tmp_path / "short").write_text(by_split["val", False])
    sources = [str(tmp_path / "short"), str(tmp_path / "long")]
    said = []
    prepare.prepare(sources, tmp_path / "tokens", val_fraction=0.05, say=said.append)
    assert "13,001 tokens to train on, 13 (0.0999%) to validate" in said[1]
    assert said[2].startswith("validation has 0.0999% of the tokens, not 5%: whole documents are")
    assert "or change --val_fraction" in said[2]


# ---- the folder appears whole or not at all


def test_an_existing_folder_is_refused_and_kept(tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(UsageError, match=f"--out {tmp_path} exists: remove it"):
        prepare.prepare(None, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert (tmp_path / "keep").read_text() == "mine"


def test_a_mounted_disk_itself_is_refused(small_disk):
    with pytest.raises(UsageError, match="disk is in use: name a new folder in it"):
        prepare.prepare(None, small_disk)


def test_the_working_directory_itself_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"{tmp_path} is in use: name a new folder in it"):
        prepare.prepare(None, Path("."))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_while_preparing_leaves_nothing(tmp_path, error):
    def say(line: str) -> None:
        raise error

    (tmp_path / "text").write_text("one document")
    with pytest.raises(error):
        prepare.prepare([str(tmp_path / "text")], tmp_path / "a" / "b" / "tokens", say=say)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, capsys, small_disk):
    (tmp_path / "text").write_bytes(b"0123456789abcde\n" * 50_000)  # 1.6 MB of tokens
    argv = ["--source", str(tmp_path / "text"), "--out", str(small_disk / "tokens")]
    assert prepare.main(argv) == 1
    said, error = capsys.readouterr()
    line = f"prepare.py: error: no space left on the disk of --out {small_disk}/tokens, and nothing"
    assert said == "" and error.startswith(line) and error.count("\n") == 1
    assert not list(small_disk.iterdir())


@pytest.fixture
def endless(tmp_path):
    """prepare.py at work on a source that it does not finish, into tmp_path / "tokens"."""
    source = tmp_path / "source"
    with open(source, "w") as file:
        file.truncate(1 << 40)  # no block of it is on the disk
    command = [ROOT / "prepare.py", "--source", source, "--out", tmp_path / "tokens"]
    # Background jobs of a shell, such as this test may be, ignore SIGINT.
    default = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    job = Job(command, tmp_path / "job", **default)
    work = tmp_path / ".tokens.unfinished"
    job.wait_until(lambda: (work / "train.bin").exists(), 60)
    yield job
    job.process.kill()
    job.wait(10)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_one_line_and_leaves_nothing(tmp_path, endless, number, status):
    os.kill(endless.pid, number)
    assert endless.wait(10) == status
    assert endless.err == f"prepare.py: stopped; {tmp_path}/tokens was not created\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "source"]


def test_what_a_killed_process_left_is_replaced_but_not_what_a_living_one_writes(tmp_path, endless):
    (tmp_path / "text").write_text("one document")
    work = tmp_path / ".tokens.unfinished"
    inode = work.stat().st_ino
    with pytest.raises(UsageError, match="another process is writing --out .*/tokens: wait"):
        prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", say=quiet)
    assert work.stat().st_ino == inode and (work / "train.bin").exists()
    endless.process.kill()
    endless.wait(10)
    assert (work / "train.bin").exists()
    (work / "tokenizer.gpt2.tiktoken").touch()
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", say=quiet)
    assert not work.exists()
    names = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    assert names == ["meta.json", "train.bin", "val.bin"]
    assert len(data.open_folder(tmp_path / "tokens").tokens("val")) == 1


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("one two three " * 20)
    assert prepare.main(["--source", "text", "--out", "tokens"]) == 0
    assert "tokens to train on" in capsys.readouterr().out
    assert data.open_folder(Path("tokens")).vocab_size == 257
