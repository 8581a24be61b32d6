"""Text -> token folders: every source gives the same documents, and a mistake is one line."""

import gzip
import io
import itertools
import json
import os
import random
import re
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from old import Job
from rig import ROOT
from test_tokenizer import small_gpt2

import data
import prepare

TEXTS = [
    "one\r\ntwo é\n",
    " 雪 \U0001f600\0",
    "x" * 99,
    *(f"{i} words\n" * (i + 1) for i in range(60)),
]


def tokens_of(folder: Path, *splits: str) -> np.ndarray:
    dtype = data.open_folder(folder).dtype
    files = [folder / f"{split}.bin" for split in splits or ("train", "val")]
    return np.concatenate([np.fromfile(file, dtype) for file in files])


def documents_of(folder: Path, *splits: str) -> list[str]:
    """The documents in a folder of bytes."""
    tokens = tokens_of(folder, *splits)
    *documents, rest = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    assert rest.size == 0
    return [bytes(document[:-1].astype(np.uint8)).decode() for document in documents]


def meta_of(folder: Path) -> dict:
    return json.loads((folder / "meta.json").read_text())


def run(out: Path, *sources, **options) -> Path:
    prepare.prepare([str(source) for source in sources], out, **options)
    return out


def json_lines(texts: list, column: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, column: t}) + "\n" for i, t in enumerate(texts)).encode()


def write_parquet(path: Path, texts: list, column: str = "text") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(texts))), column: texts})
    parquet.write_table(table, path, row_group_size=3)


# ---- sources


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "PARQUET", "separated", "dataset"])
def test_every_source_gives_the_same_documents(tmp_path, kind):
    folder, out = tmp_path / "text", tmp_path / "out"
    folder.mkdir()
    rows = json_lines(TEXTS, "body")
    streams = [rows[:999], b"", rows[999:]]  # a file may consist of several
    if kind == "txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:02}.txt").write_bytes(text.encode("utf-8-sig" if i % 2 else "utf-8"))
    elif kind == "separated":
        (folder / "all.md").write_bytes("<|endoftext|>".join(TEXTS).encode())
    elif kind == "PARQUET":
        write_parquet(folder / "a.PARQUET", TEXTS, "body")
    elif kind == "jsonl.gz":
        (folder / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, streams)))
    else:
        (folder / "a.jsonl").write_bytes(rows)
    if kind == "dataset":
        pytest.importorskip("datasets")
        prepare.prepare(None, out, dataset=[str(folder)], val_fraction=0.3, column="body")
    else:
        run(out, folder, val_fraction=0.3, column="body")
    sides = {text: prepare.choose_split(text.encode(), 0.3) for text in TEXTS}
    meta = meta_of(out)
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
    hidden = [".git/hooks/a.txt", ".env", ".cache/huggingface/a.jsonl"]
    other = ["a/n.ipynb", "a/p.svg", "a/p.html", "b/1.txt.bak", "data.csv", "LICENSE", "blob"]
    for name in reversed(kept + hidden + other):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "in/empty.txt").touch()
    (tmp_path / "in/loop").symlink_to("..")
    (tmp_path / "in/blob").write_bytes(json_lines(["linked"]))
    (tmp_path / "in/z.jsonl").symlink_to("blob")
    out = run(tmp_path / "out", tmp_path / "in", val_fraction=1e-9)
    assert documents_of(out) == [*kept, "linked"]
    assert f"{len(kept) + 2:,} files to read, {len(other) + 1:,} others" in capsys.readouterr().out


# ---- documents of any size


@pytest.mark.parametrize("separator", ["\n", " "])
@pytest.mark.parametrize("size", [1, 1000, prepare.PIECE])
def test_long_documents_are_cut_into_pieces(separator, size):
    """Blocks of any size may cut separators."""
    rng = random.Random(0)
    words = rng.choices(["ab", "é✓", prepare.SEPARATOR, "<|end", "x" * 40], k=4000)
    text = separator.join(words)[:9000]
    if size > 1:
        # Two blocks of PIECE characters end within the separator, and no word ends before it.
        text = "z" * (2 * prepare.PIECE - 5) + prepare.SEPARATOR
        text += separator.join(words + ["y"] * 2 * prepare.PIECE)
    for by, documents in ((prepare.SEPARATOR, text.split(prepare.SEPARATOR)), ("", [text])):
        found = [[]]
        for piece in prepare.cut(iter(partial(io.StringIO(text, newline="").read, size), ""), by):
            assert len(piece.text) <= 3 * prepare.PIECE
            found[-1].append(piece.text)
            if piece.ends_document:
                found.append([])
        assert found.pop() == [] and ["".join(pieces) for pieces in found] == documents
        for pieces in found:
            assert len(pieces) == 1 or len(pieces[0]) >= prepare.PIECE
            for before, after in itertools.pairwise(pieces if "z" not in pieces[0] else []):
                assert before[-1].isalnum() and after[0] in " \n"


def test_copies_of_a_long_document_land_on_one_side(tmp_path):
    """Several times in a file and in several files, between documents of odd lengths."""
    for i in range(3):
        long = f"{i} words " * 112_500  # 900,000 characters
        others = ["short", long, "x" * 77_777 * i, long + "another end"]
        (tmp_path / f"{i}.txt").write_text("<|endoftext|>".join(others))
        (tmp_path / f"{i}.jsonl").write_bytes(json_lines(["y" * 12_345, long]))
    out = run(tmp_path / "out", *tmp_path.glob("?.*"), val_fraction=0.5)
    sides = {}
    for split in ("train", "val"):
        for text in documents_of(out, split):
            if len(text) >= 900_000:
                sides.setdefault(text[:2], []).append(split)
    assert [len(found) for found in sides.values()] == [3, 3, 3]
    assert all(len({*found}) == 1 for found in sides.values())
    assert {found[0] for found in sides.values()} == {"train", "val"}


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
    assert found[: sum(map(len, expected))] == sum(expected, [])
    # tiktoken's stack is too small for the last text in one piece.
    assert encoding.decode(found[sum(map(len, expected)) : -1]) == texts[4]


def test_one_document_gives_its_tail_to_validation(tmp_path):
    """By their hash, a third of these documents would be entirely in the validation set."""
    for i in range(9):
        text = f"\n\n{i} text é " * 20
        (tmp_path / "a").write_text(text)
        out = run(tmp_path / str(i), tmp_path / "a", val_fraction=0.3)
        size = len(text.encode())
        assert documents_of(out) == [text]
        meta = meta_of(out)
        assert meta["val_tokens"] == len(tokens_of(out, "val")) == int((size + 1) * 0.3)
        assert meta["val_bytes"] == size * meta["val_tokens"] // (size + 1)


def test_half_of_a_pair_becomes_one_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rb'{"text": "\ud83d \ud83d\ude00 \udc00\u00e9"}')
    assert documents_of(run(tmp_path / "out", tmp_path / "a.jsonl")) == [
        "\ufffd \U0001f600 \ufffdé"
    ]


def test_only_up_to_65_536_ids_fit_into_two_bytes(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("text")
    for n, dtype in ((65_279, "uint16"), (65_280, "uint32")):  # and 256 bytes, and end-of-text
        small_gpt2(monkeypatch, [b"%06d" % i for i in range(n)])
        out = run(tmp_path / dtype, tmp_path / "a", name="gpt2")
        assert (meta_of(out)["dtype"], meta_of(out)["vocab_size"]) == (dtype, n + 257)
        assert tokens_of(out).tolist() == [*b"text", n + 256]


# ---- what is refused

GZIP = gzip.compress(json_lines([random.Random(0).randbytes(300_000).hex()] * 2))
GOOD = b'{"text": "good"}\n\n'
REFUSED = {  # name and contents, and what the line must have
    "no column": ("a.jsonl", GOOD + b'{"body": "x", "id": 1}', "line 3: .*'body'"),
    "a number": ("a.jsonl", GOOD + b'{"text": 5}', "line 3"),
    "null": ("a.jsonl", GOOD + b'{"text": null, "title": "y"}', "line 3: .*'title'"),
    "a list": ("a.jsonl", GOOD + b'["text"]', "line 3"),
    "cut": ("a.jsonl", GOOD + b'{"text": "cut', "line 3"),
    "deep": ("a.jsonl", GOOD + b"[" * 100_000, "line 3"),
    "cut gzip": ("a.jsonl.gz", GZIP[:-100], ""),
    "changed gzip": ("a.jsonl.gz", GZIP[:100_000] + bytes(1000) + GZIP[101_000:], ""),
    "no gzip": ("a.jsonl.gz", b"{}", ""),
    "latin-1": ("a.txt", "né".encode("latin-1"), ""),
    "utf-16": ("a.txt", "text".encode("utf-16"), ""),
    "suffix": ("a.csv", b"text", ""),
    "empty": ("a.txt", b"\n", ""),
    "no parquet": ("a.parquet", b"PAR1" + bytes(99), ""),
}


def refused(capsys, tmp_path: Path, *argv) -> str:
    """Prepare tmp_path/out, which must fail; return the line of the error."""
    assert prepare.main([*map(str, argv), "--out", f"{tmp_path}/out"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("prepare.py: error: ") and line.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    return line


@pytest.mark.parametrize("case", REFUSED)
def test_a_source_that_cannot_be_used_is_one_line(tmp_path, capsys, case):
    name, contents, words = REFUSED[case]
    if case == "no parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(contents)
    line = refused(capsys, tmp_path, "--source", tmp_path / name)
    assert re.search(f"{tmp_path}/{name}.*{words}", line)
    line = refused(capsys, tmp_path, "--source", tmp_path / name, tmp_path / "gone")
    assert "gone does not exist" in line or case == "suffix"  # before any file is read


def test_rows_of_parquet_and_data_sets_without_text_are_refused(tmp_path, capsys):
    write_parquet(tmp_path / "a.parquet", ["x", None, "y"])
    assert "a.parquet, line 2: " in refused(capsys, tmp_path, "--source", tmp_path)
    write_parquet(tmp_path / "a.parquet", ["x"], "body")
    assert "'body'" in refused(capsys, tmp_path, "--source", tmp_path)
    pytest.importorskip("datasets")
    for name, words in ((tmp_path, "line 1: "), (tmp_path / "gone", "cannot be read")):
        assert prepare.main(f"--dataset {name} --out {tmp_path}/out".split()) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
    for flags in ("--dataset x --source y", "--val_fraction 1", "--val_fraction 0"):
        refused(capsys, tmp_path, *flags.split())


def test_a_folder_that_cannot_be_read_is_not_passed_over(tmp_path, monkeypatch, request, capsys):
    monkeypatch.chdir(tmp_path)  # other users may have no access to the folders above
    tmp_path.chmod(0o777)
    Path("text/secret").mkdir(parents=True)
    Path("text/a.txt").write_text("text")
    Path("text/secret").chmod(0)
    request.addfinalizer(partial(os.seteuid, os.geteuid()))
    os.seteuid(os.geteuid() or 65534)  # permissions do not stop root
    assert prepare.main(["--source", "text", "--out", "out"]) == 1
    line = capsys.readouterr().err
    assert "text/secret" in line and line.count("\n") == 1 and not Path("out").exists()


def test_a_full_disk_leaves_nothing(tmp_path, capsys, small_disk):
    (tmp_path / "text").write_bytes(b"0123456789abcde\n" * 50_000)  # 1.6 MB of tokens
    argv = ["--source", str(tmp_path / "text"), "--out", str(small_disk / "tokens")]
    assert prepare.main(argv) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not list(small_disk.iterdir())


def test_an_existing_folder_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "keep").write_text("mine")
    assert prepare.main(["--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} exists" in capsys.readouterr().err
    assert (tmp_path / "keep").read_text() == "mine"


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    with open(tmp_path / "source", "w") as file:
        file.truncate(1 << 40)  # sparse: no block of it is on the disk
    command = [ROOT / "prepare.py", "--source", file.name, "--out", tmp_path / "tokens"]
    job = Job(command, tmp_path / "job")
    job.wait_until(lambda: [*tmp_path.glob(".tokens.*/tokens/train.bin")], 60)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(10) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job", "source"]


def test_progress_has_documents_tokens_speed_and_the_time_left(tmp_path):
    contents = {"a.txt": b"x" * 100, "b.jsonl.gz": gzip.compress(json_lines(["y" * 500]))}
    contents["c"] = b"z" * (400 - 100 - len(contents["b.jsonl.gz"]))
    for name, packed in contents.items():
        (tmp_path / name).write_bytes(packed)
    sources = prepare.Sources([tmp_path / name for name in contents], [], "train", "text")
    positions = [sources.position for _ in sources.read()]
    assert positions == list(itertools.accumulate(map(len, contents.values())))
    sources.position = 100
    counts = {"train documents": 1, "val documents": 2, "tokens": 60_000}
    line = prepare.describe_progress(sources, counts, seconds=60)
    assert line == "3 documents, 60,000 tokens, 1,000 tokens/s, 3.0 minutes left"
