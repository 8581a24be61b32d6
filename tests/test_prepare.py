"""Text -> token folders: every source gives the same documents, and a mistake is one line."""

import gzip
import io
import itertools
import json
import os
import random
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, Job
from test_tokenizer import small_gpt2

import data
import prepare

TEXTS = [
    "one\r\ntwo é\n",
    " 雪 \U0001f600\0",
    "x" * 99,
    *(f"{i} words\n" * (i + 1) for i in range(60)),
]


def tokens_of(folder: Path, split: str = "both") -> list[int]:
    dtype = data.open_folder(folder).dtype
    splits = ("train", "val") if split == "both" else (split,)
    return [int(n) for name in splits for n in np.fromfile(folder / f"{name}.bin", dtype)]


def documents_of(folder: Path, split: str = "both") -> list[str]:
    """The documents in a folder of bytes."""
    parts = itertools.groupby(tokens_of(folder, split), lambda token: token == 256)
    return [bytes(part).decode() for is_end, part in parts if not is_end]


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


# ---- formats


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "PARQUET", "separated", "dataset"])
def test_every_source_gives_the_same_documents(tmp_path, kind):
    folder = tmp_path / "text"
    folder.mkdir()
    options = {"val_fraction": 0.3}
    if kind == "txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i:02}.txt").write_bytes(text.encode("utf-8-sig" if i % 2 else "utf-8"))
    elif kind == "separated":
        (folder / "all.md").write_bytes("<|endoftext|>".join(TEXTS).encode())
    else:
        options["column"] = "body"
        rows = json_lines(TEXTS, "body")
        streams = [rows[:999], b"", rows[999:]]  # a file may consist of several
        if kind == "PARQUET":
            write_parquet(folder / "a.PARQUET", TEXTS, "body")
        elif kind == "jsonl.gz":
            (folder / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, streams)))
        else:
            (folder / "a.jsonl").write_bytes(rows)
    if kind == "dataset":
        pytest.importorskip("datasets")
        out = tmp_path / "out"
        prepare.prepare(None, out, dataset=[str(folder)], **options)
    else:
        out = run(tmp_path / "out", folder, **options)
    train, val = documents_of(out, "train"), documents_of(out, "val")
    assert sorted(train + val) == sorted(TEXTS)
    side = [prepare.choose_split(text.encode(), 0.3) for text in TEXTS]
    assert [text for text, split in zip(TEXTS, side) if split == "val"] == val
    meta = meta_of(out)
    assert meta["documents"] == {"train": len(train), "val": len(val)} and 5 < len(val) < 30
    assert meta["val_bytes"] == len("".join(val).encode())
    assert meta["val_tokens"] == meta["val_bytes"] + len(val)
    assert meta["train_tokens"] == len(tokens_of(out, "train"))


def test_files_within_a_folder_are_sorted_and_what_is_not_text_is_skipped(tmp_path, capsys):
    """What `git clone` and `hf download` leave beside the data is no text.

    In the cache of the Hub, files are links to blobs, whose names say nothing.
    """
    kept = ["a/y.md", "b/1.txt", "b/2.py", "c/deep/3.TXT"]
    hidden = [".git/hooks/a.txt", ".env", ".cache/huggingface/a.jsonl", ".gitattributes"]
    other = ["README.md", "a/n.ipynb", "a/p.svg", "a/p.html", "b/1.txt.bak", "data.csv", "LICENSE"]
    for name in reversed(kept + hidden + other):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    (tmp_path / "in/d.png").write_bytes(b"\x89PNG\xff\0")
    (tmp_path / "in/empty.txt").touch()
    (tmp_path / "in/loop").symlink_to("..")
    (tmp_path / "in/z.jsonl").symlink_to("blob")
    (tmp_path / "in/blob").write_bytes(json_lines(["linked"]))
    out = run(tmp_path / "out", tmp_path / "in", val_fraction=1e-9)
    assert documents_of(out) == [*kept, "linked"]
    skipped = capsys.readouterr().out.splitlines()[0]
    assert skipped.startswith(f"{tmp_path}/in: skipped {len(other) + 2} files: ")
    for kind in (".md", ".ipynb", ".svg", ".html", ".bak", ".csv", "LICENSE", ".png"):
        assert f"1 {kind}" in skipped
    named = [tmp_path / "in" / name for name in (".env", "README.md", "LICENSE", "b")]
    out = run(tmp_path / "named", *named, val_fraction=1e-9)
    assert documents_of(out) == [".env", "README.md", "LICENSE", "b/1.txt", "b/2.py"]


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


def test_a_copy_of_a_long_document_gets_the_same_split(tmp_path):
    """Wherever it begins in a file, and whatever follows its first PIECE characters."""
    for i in range(8):
        long = f"{i} words " * 40_000
        others = ["short", long, "x" * 1000 * i, long + "another end"]
        (tmp_path / f"{i}.txt").write_text("<|endoftext|>".join(others))
        (tmp_path / f"{i}.jsonl").write_bytes(json_lines([long]))
    out = run(tmp_path / "out", *tmp_path.glob("?.*"), val_fraction=0.5)
    sides = {}
    for split in ("train", "val"):
        for text in documents_of(out, split):
            sides.setdefault(text[: prepare.PIECE], []).append(split)
    long = [found for text, found in sides.items() if len(text) == prepare.PIECE]
    assert len(long) == 8 and all(len(found) == 3 and len({*found}) == 1 for found in long)
    assert len({found[0] for found in long}) == 2


MERGES = [b"th", b" th", b"the", b" the", b"  ", b"\n\n", b"12", b"aB", b" a", b".\n", b"\xc3\xa9"]
WORDS = ["th", " the", "aB", " aB", "\n\n", "\n", "  ", " ", ".\n", ".\n/", "1234", "é", "</s>"]


def test_text_in_pieces_has_the_tokens_of_tiktoken(tmp_path, monkeypatch):
    rng = random.Random(0)
    texts = ["".join(rng.choices(WORDS, k=k)) for k in (5, 600_000, 50)]
    texts += ["a" + " " * 1_100_000 + "b", "the <|endoftext|> of a row"]
    (tmp_path / "a.jsonl").write_bytes(json_lines(texts))
    encoding = small_gpt2(monkeypatch, MERGES)
    out = run(tmp_path / "out", tmp_path / "a.jsonl", name="gpt2", val_fraction=1e-9)
    expected = []
    for text in [*texts[:3], texts[4]]:
        expected.append([*encoding.encode_ordinary(text), encoding.eot_token])
    found = tokens_of(out)
    spaces = slice(sum(map(len, expected[:3])), -len(expected[3]))  # tiktoken's stack is too small
    assert found[: spaces.start] == sum(expected[:3], []) and found[spaces.stop :] == expected[3]
    assert encoding.decode(found[spaces][:-1]) == texts[3]


def test_one_document_gives_its_tail_to_validation(tmp_path):
    """By their hash, a third of these documents would be entirely in the validation set."""
    for i in range(9):
        text = f"\n\n{i} text é " * 20
        (tmp_path / "a").write_text(text)
        out = run(tmp_path / str(i), tmp_path / "a", val_fraction=0.3)
        *both, end = tokens_of(out)
        assert bytes(both).decode() == text and end == 256
        meta = meta_of(out)
        assert meta["val_tokens"] == len(tokens_of(out, "val")) == int((len(both) + 1) * 0.3)
        assert meta["val_bytes"] == len(both) * meta["val_tokens"] // (len(both) + 1)


def test_half_of_a_pair_becomes_one_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(rb'{"text": "\ud83d \ud83d\ude00 \udc00\u00e9"}')
    out = run(tmp_path / "out", tmp_path / "a.jsonl")
    assert bytes(tokens_of(out)[:-1]).decode() == "\ufffd \U0001f600 \ufffdé"


def test_only_up_to_65_536_ids_fit_into_two_bytes(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("text")
    for n, dtype in ((65_279, "uint16"), (65_280, "uint32")):  # and 256 bytes, and end-of-text
        small_gpt2(monkeypatch, [b"%06d" % i for i in range(n)])
        out = run(tmp_path / dtype, tmp_path / "a", name="gpt2")
        assert (meta_of(out)["dtype"], meta_of(out)["vocab_size"]) == (dtype, n + 257)
        assert tokens_of(out) == [*b"text", n + 256]


# ---- what is refused


BAD_ROWS = {
    '{"body": "x", "id": 1}': "['body']",
    '{"text": 5}': "no text in text",
    '{"text": null}': "no text in text",
    '{"text": ["x"], "title": "y"}': "['title']",
    '["text"]': "not a JSON object",
    '{"text": "cut': "not a JSON object",
    "[" * 100_000: "not a JSON object",
}


def refused(capsys, tmp_path: Path, *sources) -> str:
    argv = ["--source", *map(str, sources), "--out", f"{tmp_path}/out"]
    assert prepare.main(argv) == 2
    line = capsys.readouterr().err
    assert line.startswith("prepare.py: error: ") and line.count("\n") == 1
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    return line


@pytest.mark.parametrize("row", BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_row_without_text_is_refused_with_its_line(tmp_path, capsys, row):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n\n' + row + "\n")
    line = refused(capsys, tmp_path, tmp_path / "a.jsonl")
    assert f"{tmp_path}/a.jsonl, line 3: " in line and BAD_ROWS[row] in line


def test_parquet_and_data_sets_without_text_are_refused(tmp_path, capsys):
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(99))
    pytest.importorskip("pyarrow")
    assert "a.parquet cannot be read" in refused(capsys, tmp_path, tmp_path)
    write_parquet(tmp_path / "a.parquet", ["x", None, "y"])
    assert "a.parquet, line 2: no text in text" in refused(capsys, tmp_path, tmp_path)
    write_parquet(tmp_path / "a.parquet", ["x"], "body")
    assert "a.parquet, line 1: " in (line := refused(capsys, tmp_path, tmp_path))
    assert "['body']" in line
    pytest.importorskip("datasets")
    for name, words in ((tmp_path, "line 1: no text in text"), (tmp_path / "gone", "cannot be")):
        assert prepare.main(f"--dataset {name} --out {tmp_path}/out".split()) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]


def test_a_file_that_cannot_be_read_is_refused(tmp_path, capsys):
    whole = gzip.compress(json_lines([random.Random(0).randbytes(300_000).hex()] * 2))
    contents = {
        "cut.jsonl.gz": whole[:-100],
        "changed.jsonl.gz": whole[:100_000] + bytes(1000) + whole[101_000:],
        "no.jsonl.gz": b"{}",
        "latin-1.txt": "né".encode("latin-1"),
        "utf-16.txt": "text".encode("utf-16"),
        "rows.csv": b"text",
        "empty.txt": b"\n",
    }
    for name, packed in contents.items():
        (tmp_path / name).write_bytes(packed)
        line = refused(capsys, tmp_path, tmp_path / name)
        assert name in line
    line = refused(capsys, tmp_path, tmp_path / "latin-1.txt", tmp_path / "gone.txt")
    assert "gone.txt" in line  # at once, before any file is read


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


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, capsys, small_disk):
    (tmp_path / "text").write_bytes(b"0123456789abcde\n" * 50_000)  # 1.6 MB of tokens
    argv = ["--source", str(tmp_path / "text"), "--out", str(small_disk / "tokens")]
    assert prepare.main(argv) == 1
    line = f"prepare.py: error: [Errno 28] No space left on device: '{small_disk}/tokens'\n"
    assert capsys.readouterr().err == line
    assert not list(small_disk.iterdir())


def test_an_existing_folder_is_never_overwritten(tmp_path, capsys):
    (tmp_path / "keep").write_text("mine")
    assert prepare.main(["--out", str(tmp_path)]) == 2
    assert f"--out {tmp_path} exists" in capsys.readouterr().err
    assert (tmp_path / "keep").read_text() == "mine"


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(tmp_path, number, status):
    with open(tmp_path / "source", "w") as file:
        file.truncate(1 << 40)  # sparse: no block of it is on the disk
    command = [ROOT / "prepare.py", "--source", file.name, "--out", tmp_path / "tokens"]
    job = Job(command, tmp_path / "job")
    job.wait_until(lambda: [*tmp_path.glob(".tokens.*/tokens/train.bin")], 60)
    os.kill(job.pid, number)
    assert job.wait(10) == status
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
    line = prepare.describe_progress(sources, documents=3, tokens=60_000, seconds=60)
    assert line == "3 documents, 60,000 tokens, 1,000 tokens/s, 3.0 minutes left"
