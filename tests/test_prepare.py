"""Text -> token folders: every source gives the same documents, and a mistake is one line."""

import gzip
import json
import os
import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from rig import ROOT, Job, run_command, small_gpt2

import data
import prepare

TEXTS = ["one\r\ntwo é\n", " 雪 \U0001f600\0", "x" * 99]
TEXTS += [f"{i} words\n" * (i + 1) for i in range(60)]


def tokens_of(folder: Path, *splits: str) -> np.ndarray:
    dtype = data.open_folder(folder).dtype
    files = [folder / f"{split}.bin" for split in splits or ("train", "val")]
    return np.concatenate([np.fromfile(file, dtype) for file in files])


def documents_of(folder: Path, *splits: str) -> list[str]:
    """The documents in a folder of bytes, in which 256 ends each of them."""
    tokens = tokens_of(folder, *splits)
    *documents, rest = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    assert rest.size == 0
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in documents]


def run(out: Path, *sources, **options) -> Path:
    prepare.prepare([str(source) for source in sources], out, **options)
    return out


def json_lines(texts: list, column: str = "text") -> bytes:
    return "".join(json.dumps({"id": 0, column: text}) + "\n" for text in texts).encode()


# --------------------------------------------------------------------------------------------------
# Sources


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "PARQUET", "separated", "dataset"])
def test_every_source_gives_the_same_documents(tmp_path, kind):
    folder, out = tmp_path / "text", tmp_path / "out"
    folder.mkdir()
    rows = json_lines(TEXTS, "body")
    if kind == "txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:02}.txt").write_bytes(text.encode("utf-8-sig" if i % 2 else "utf-8"))
    elif kind == "separated":
        (folder / "all.md").write_bytes("<|endoftext|>".join(TEXTS).encode())
    elif kind == "PARQUET":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"id": list(range(len(TEXTS))), "body": TEXTS})
        parquet.write_table(table, folder / "a.PARQUET", row_group_size=3)
    elif kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows))
    else:
        (folder / "a.jsonl").write_bytes(rows)
    if kind == "dataset":
        pytest.importorskip("datasets")
        prepare.prepare(None, out, dataset=[str(folder)], val_fraction=0.3, column="body")
    else:
        run(out, folder, val_fraction=0.3, column="body")
    sides = {text: prepare.choose_split(text.encode(), 0.3) for text in TEXTS}
    meta = json.loads((out / "meta.json").read_text())
    for split in ("train", "val"):
        documents = documents_of(out, split)
        assert documents == [text for text, side in sides.items() if side == split]
        assert meta["documents"][split] == len(documents) > 5
        assert meta[f"{split}_tokens"] == len(tokens_of(out, split))
    assert meta["val_bytes"] == meta["val_tokens"] - meta["documents"]["val"]
    assert meta["documents"]["val"] < 0.5 * len(TEXTS)


def test_a_folder_gives_its_text_files_in_order(tmp_path, capsys):
    """What `git clone` and `hf download` leave beside the data is no text.

    In the cache of the Hub, files are links to blobs, whose names say nothing.
    """
    kept = ["a/y.md", "b/1.txt", "b/2.py", "c/deep/3.TXT"]
    hidden = [".git/hooks/a.txt", "a/.draft.md", ".cache/huggingface/a.jsonl"]
    other = ["a/n.ipynb", "a/p.html", "b/1.txt.bak", "data.csv", "LICENSE", "blob"]
    for name in reversed(kept + hidden + other):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "in/empty.txt").touch()
    (tmp_path / "in/blob").write_bytes(json_lines(["linked"]))
    (tmp_path / "in/z.jsonl").symlink_to("blob")
    (tmp_path / "in/a/around").symlink_to("..")
    out = run(tmp_path / "out", tmp_path / "in", val_fraction=1e-9)
    assert documents_of(out) == [*kept, "linked"]
    assert f"{tmp_path}/in/a/around" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Documents of any size


def test_documents_of_any_size_come_back_and_copies_land_on_one_side(tmp_path):
    """In several files, among documents of odd lengths; a separator is where pieces are cut."""
    cut = 2 * prepare.PIECE - 5
    written = []
    for i in range(3):
        long = f"{i} words " * 112_500  # 900,000 characters
        texts = ["z" * cut, "short", long, "x" * 77_777 * i + " ", long + "another end"]
        (tmp_path / f"{i}.txt").write_text("<|endoftext|>".join(texts))
        rows = ["y" * 12_345, long]
        (tmp_path / f"{i}.jsonl").write_bytes(json_lines(rows))
        written += [text for text in texts + rows if text.strip()]
    out = run(tmp_path / "out", *tmp_path.glob("?.*"), val_fraction=0.5)
    found = {split: documents_of(out, split) for split in ("train", "val")}
    assert sorted(found["train"] + found["val"]) == sorted(written)
    beginnings = {split: {text[:1000] for text in texts} for split, texts in found.items()}
    assert not beginnings["train"] & beginnings["val"]
    assert all(beginnings.values())


MERGES = [b"th", b" th", b"the", b" the", b"  ", b"\n\n", b"12", b"aB", b" a", b".\n", b"\xc3\xa9"]
WORDS = ["th", " the", "aB", " aB", "\n\n", "\n", "  ", " ", ".\n", ".\n/", "1234", "é", "</s>"]


def test_text_in_pieces_has_the_tokens_of_tiktoken(tmp_path, monkeypatch):
    """And the end of a document that a row names stays text."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(WORDS, k=k)) for k in (5, 600_000, 50)]
    texts += ["the <|endoftext|> of a row", "a" + " " * 1_100_000 + "b"]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    encoding = small_gpt2(monkeypatch, MERGES)
    out = run(tmp_path / "out", tmp_path / "a.jsonl", name="gpt2", val_fraction=1e-9)
    found = tokens_of(out).tolist()
    expected = [[*encoding.encode_ordinary(text), encoding.eot_token] for text in texts[:4]]
    size = sum(map(len, expected))
    assert found[:size] == sum(expected, [])
    # tiktoken's stack is too small for the last text in one piece.
    assert encoding.decode(found[size:-1]) == texts[4]


def test_one_document_gives_its_tail_to_validation(tmp_path):
    """By their hash, a third of these documents would be entirely in the validation set."""
    for i in range(9):
        text = f"\n\n{i} text é " * 20
        (tmp_path / "a").write_text(text)
        out = run(tmp_path / str(i), tmp_path / "a", val_fraction=0.3)
        size = len(text.encode())
        assert documents_of(out) == [text]
        meta = json.loads((out / "meta.json").read_text())
        assert meta["val_tokens"] == len(tokens_of(out, "val")) == int((size + 1) * 0.3)
        assert meta["val_bytes"] == size * meta["val_tokens"] // (size + 1)


# --------------------------------------------------------------------------------------------------
# What is refused

GOOD = b'{"text": "good"}\n\n'
REFUSED = {  # name and contents, and what the line must have
    "no column": ("a.jsonl", GOOD + b'{"body": "x", "id": 1}', "line 3: .*'body'"),
    "cut": ("a.jsonl", GOOD + b'{"text": "cut', "line 3"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(GOOD)[:-1], ""),
    "latin-1": ("a.txt", "né".encode("latin-1"), ""),
    "suffix": ("a.csv", b"text", ""),
    "empty": ("a.txt", b"\n", ""),
    "missing": ("gone/a.txt", b"", "does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_source_that_cannot_be_used_is_one_line(tmp_path, case):
    name, contents, words = REFUSED[case]
    if case != "missing":
        (tmp_path / name).write_bytes(contents)
    argv = ["--source", tmp_path / name, "--out", tmp_path / "out"]
    status, _, error = run_command(argv, prepare.main)
    assert status == 2 and not [*tmp_path.glob("*out*")]
    assert re.fullmatch(f".*{tmp_path}/{name}.*{words}.*\n", error)


def test_an_existing_folder_is_never_overwritten(tmp_path):
    (tmp_path / "keep").write_text("mine")
    status, _, error = run_command(["--out", tmp_path], prepare.main)
    assert status == 2 and str(tmp_path) in error
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    with open(tmp_path / "source", "w") as file:
        file.truncate(1 << 40)  # sparse: no block of it is on the disk
    folder = tmp_path / "folder"
    command = ["python", ROOT / "prepare.py", "--source", file.name, "--out", folder / "tokens"]
    job = Job(command, tmp_path / "job")
    job.until(lambda: [*folder.glob(".tokens.*/tokens/train.bin")])
    os.kill(job.process.pid, signal.SIGINT)
    assert job.wait() == 130
    assert not list(folder.iterdir())
