"""Sources -> documents: every format gives the same documents, and every loss is reported."""

import bz2
import contextlib
import csv
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from text import sources
from text.sources import SourceError, find_files

DOCUMENTS = [
    "one\r\ntwo é\n",
    "\ufeff 雪 \U0001f600\0",
    "<|endoftext|> is no separator here",
    "x" * 99,
]


def documents(*names: Path | str, **options) -> list[str]:
    """The documents of sources, each in one piece."""
    corpus = find_files([str(name) for name in names], takes_binary=False, **options)
    return join(corpus.read())


def join(chunks: Iterator[sources.Chunk]) -> list[str]:
    found = [""]
    for text, ends_document in chunks:
        found[-1] += text
        if ends_document:
            found.append("")
    assert found.pop() == ""
    return found


def json_lines(texts: list, field: str = "text") -> bytes:
    lines = [json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)]
    return "".join(lines).encode()


def write_parquet(path: Path, texts: list, field: str = "text", kind: str = "string") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"id": list(range(len(texts))), field: pyarrow.array(texts, kind)})
    parquet.write_table(table, path, row_group_size=3)


@contextlib.contextmanager
def standard_input(contents: bytes):
    """Make stdin a pipe that gives the first byte of `contents`, and a moment later the rest."""
    out, into = os.pipe()
    os.write(into, contents[:1])

    def write_the_rest() -> None:
        os.write(into, contents[1:])
        os.close(into)

    threading.Timer(0.05, write_the_rest).start()
    saved = os.dup(0)
    os.dup2(out, 0)
    try:
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)
        os.close(out)


# ---- formats


PACKED = {"": bytes, ".GZ": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKED)
def test_a_text_file_is_a_document_even_if_compressed(tmp_path, suffix):
    text = DOCUMENTS[0].encode("utf-8-sig")
    for streams in ([text], [text[:3], b"", text[3:]]):  # a file may consist of several
        (tmp_path / f"a{suffix}").write_bytes(b"".join(map(PACKED[suffix], streams)))
        assert documents(tmp_path) == [DOCUMENTS[0]]


@pytest.mark.parametrize(
    "name",
    ["a.JSONL", "a.ndjson.xz", "a.json.GZ", "array.json.bz2", "array.json", "a.csv.xz", "a.TSV.GZ"],
)
def test_a_json_object_or_csv_row_is_a_document(tmp_path, name):
    text = json_lines(DOCUMENTS, "body").decode()
    expected = DOCUMENTS
    if "array" in name:
        text = f" [{','.join(text.splitlines())}]"
    if "csv" in name or "TSV" in name:
        table = io.StringIO()
        delimiter = "," if "csv" in name else "\t"
        expected = [text.replace("\0", "") for text in DOCUMENTS]  # \0 would make the file binary
        csv.writer(table, delimiter=delimiter).writerows([["id", "body"], *enumerate(expected)])
        text = table.getvalue()
    pack = PACKED.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(text.encode("utf-8-sig")))
    assert documents(tmp_path, text_field="body") == expected


@pytest.mark.parametrize(
    "name, text",
    [("a.json", '[{"body": "x"}]'), ("a.csv", "body,b\nx,y\n"), ("a.tsv", "body\tb\nx\ty\n")],
)
def test_only_a_named_file_must_have_the_field(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (tmp_path / "text").write_text("text")
    with pytest.raises(SourceError, match=f"{name} has no field text: set --field to one"):
        documents(tmp_path / name)
    corpus = find_files([str(tmp_path)], takes_binary=False)
    assert join(corpus.read()) == ["text"]
    assert corpus.describe_skipped() == "1 file (no field text)"


@pytest.mark.parametrize("kind", ["string", "binary"])
def test_a_parquet_row_is_a_document(tmp_path, kind):
    texts = [*DOCUMENTS, None, b"n\xe9" if kind == "binary" else "n"]
    write_parquet(tmp_path / "a.parquet", texts, "body", kind)
    corpus = find_files([str(tmp_path)], takes_binary=False, text_field="body")
    assert join(corpus.read()) == [*DOCUMENTS, "n\ufffd" if kind == "binary" else "n"]
    assert corpus.describe_skipped() == "1 blank document"
    assert corpus.replaced == (kind == "binary")


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress])
def test_the_first_bytes_of_standard_input_decide_its_format(pack):
    corpus = find_files(["-"], takes_binary=False)
    with standard_input(pack(b"")):
        assert not list(corpus.read()) and corpus.describe_skipped() == "1 empty file"
    with standard_input(pack(b"one<|endoftext|>{two}")):
        assert documents("-") == ["one", "{two}"]
    with standard_input(pack(json_lines(DOCUMENTS))):
        assert documents("-") == DOCUMENTS


def test_files_within_a_folder_or_glob_are_sorted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.txt", "a/[x].txt", "a/y.md", "c/deep/3.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    assert documents("b", "a/[x].txt") == ["b/1.txt", "b/2.txt", "a/[x].txt"]
    assert documents("?/*.txt") == ["a/[x].txt", "b/1.txt", "b/2.txt"]
    everything = ["a/[x].txt", "a/y.md", "b/1.txt", "b/2.txt", "c/deep/3.txt"]
    assert documents("*") == documents("**") == documents(tmp_path) == everything
    assert documents("**/*.txt") == [name for name in everything if name.endswith("txt")]
    with pytest.raises(SourceError, match="--source \\*.jsonl matches no file"):
        find_files(["a", "*.jsonl"], takes_binary=False)


def test_linked_folders_are_read_once(tmp_path):
    """Every machine uses the first of several paths to a folder."""
    for name in ("text/own", "other/deep"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("text/own/1", "other/2", "other/deep/3"):
        (tmp_path / name).write_text(name)
    for name in "hgfedcba":
        (tmp_path / "text" / name).symlink_to("../other")
    (tmp_path / "text/deep").symlink_to("../other/deep")
    text = tmp_path / "text"
    expected = [text / "a/2", text / "a/deep/3", text / "own/1"]
    assert find_files([f"{text}/**/*"], takes_binary=False).files == expected
    (text / "own/loop").symlink_to(".")
    assert find_files([str(text)], takes_binary=False).files == expected


# ---- chunks


@pytest.mark.parametrize("separator", ["\n", " "])
def test_long_documents_are_read_in_chunks(tmp_path, monkeypatch, separator):
    """Chunks of any size may cut separators, and characters of several bytes."""
    text = separator.join(
        random.Random(0).choices(["ab", "é✓", "<|endoftext|>", "<|end", "x" * 40], k=400)
    )
    (tmp_path / "a").write_text(text)
    (tmp_path / "b.jsonl").write_bytes(json_lines([text]))
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(sources, "CHUNK", size)
        corpus = find_files([str(tmp_path)], takes_binary=False)
        assert join(corpus.read()) == [*text.split("<|endoftext|>"), text]
        assert max(len(chunk.text) for chunk in corpus.read()) <= 2 * size + len("<|endoftext|>")


def test_the_position_counts_the_bytes_of_all_files_so_far(tmp_path):
    contents = {"a": b"x" * 100, "b.gz": gzip.compress(b"y" * 500), "c.jsonl": json_lines(["1"])}
    for name, packed in contents.items():
        (tmp_path / name).write_bytes(packed)
    corpus = find_files([str(tmp_path)], takes_binary=False)
    positions = [corpus.position for _ in corpus.read()]
    assert positions == list(itertools.accumulate(map(len, contents.values())))
    assert positions[-1] == corpus.size


# ---- what is skipped, replaced or refused


def test_broken_lines_are_skipped_and_counted(tmp_path):
    lines = [
        b'{"text": "first"}\r',
        b'{"text": "number", "id": %s}' % (b"1" * 5000),  # more digits than Python's int accepts
        b"",
        b'{"text": "cut',
        b'["no object"]',
        b'{"text": 5}',
        b'{"other": "field"}',
        b'{"text": null}',
        b'{"text": ""}',
        b"[" * 4000,  # nested more deeply than Python's parser allows
        b'{"text": "last"}',
    ]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join(lines))
    corpus = find_files([str(file)], takes_binary=False)
    assert join(corpus.read()) == ["first", "number", "last"]
    assert corpus.describe_skipped() == (
        "2 blank documents, 2 broken lines (no text in the field text), "
        "3 broken lines (not a JSON object)"
    )
    assert corpus.first_broken == f"{file}, line 4: not a JSON object"


TWO_ROWS = 'id,text\n0,"two\nlines"\n1,one\n'


@pytest.mark.parametrize(
    "text, line",
    [
        (TWO_ROWS + '2,"never closed\n3,x\n4,y\n', 5),
        (TWO_ROWS + '2,"closed by the next\n3,"x"\n', 5),
        (TWO_ROWS + '2,"he said "no", and went"\n', 5),
        ('id,"text\n0,x\n', 1),
    ],
)
def test_a_stray_quote_in_csv_is_refused_with_its_line(tmp_path, text, line):
    file = tmp_path / "a.csv"
    for suffix, delimiter in ((".csv", ","), (".tsv", "\t")):
        file = file.with_suffix(suffix)
        file.write_text(text.replace(",", delimiter))
        problem = (
            f"--source {file} cannot be read \\(the row that begins at line {line} has a quote"
        )
        with pytest.raises(SourceError, match=problem):
            documents(file)


def test_a_row_with_an_unquoted_comma_is_skipped(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("text,label\nHello, world,1\nno label\nlast,2,,\n")
    corpus = find_files([str(file)], takes_binary=False)
    assert join(corpus.read()) == ["no label", "last"]
    assert corpus.describe_skipped() == "1 broken line (more fields than columns)"
    assert corpus.first_broken == f"{file}, row 1: more fields than columns"


def test_several_columns_with_the_fields_name_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("text,b,text\n1,2,3\n")
    with pytest.raises(SourceError, match="a.csv has several columns text: rename all but one"):
        find_files([str(tmp_path)], takes_binary=False)
    assert documents(tmp_path / "a.csv", text_field="b") == ["2"]


def test_invalid_utf_8_is_replaced_and_counted(tmp_path):
    (tmp_path / "a").write_text("é")
    (tmp_path / "b").write_bytes("né à Noël".encode("latin-1"))
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "\xe9 \\ud83d \\ud83d\\ude00"}')
    corpus = find_files([str(tmp_path)], takes_binary=False)
    assert join(corpus.read()) == ["é", "n\ufffd \ufffd No\ufffdl", "\ufffd \ufffd \U0001f600"]
    assert (corpus.replaced, corpus.first_replaced) == (5, tmp_path / "b")


def test_a_nul_byte_in_the_first_8_kib_makes_a_file_binary(tmp_path):
    (tmp_path / "text").write_bytes(b"x" * 8192 + b"\0")
    (tmp_path / "binary").write_bytes(b"x" * 8191 + b"\0")
    (tmp_path / "packed").write_bytes(gzip.compress(b"\0"))
    (tmp_path / "empty").write_bytes(gzip.compress(b""))
    corpus = find_files([str(tmp_path)], takes_binary=True)
    assert corpus.files == [tmp_path / "text"]
    assert dict(corpus.skipped) == {"binary file": 2, "empty file": 1}
    named = find_files([str(tmp_path / "binary")], takes_binary=True)
    assert named.files == [tmp_path / "binary"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_a_damaged_compressed_file_is_an_error(tmp_path, pack):
    whole = pack(random.Random(0).randbytes(300_000).hex().encode())
    changed = whole[:100_000] + bytes(1000) + whole[101_000:]
    for name, contents in {"cut": whole[:-100], "changed": changed}.items():
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(SourceError, match=f"--source .*/{name} cannot be read"):
            documents(tmp_path / name)


def test_parquet_without_text_is_refused_or_skipped(tmp_path):
    write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    with pytest.raises(SourceError, match=r"has no field body: .* its fields \(id, text\)"):
        find_files([str(tmp_path)], takes_binary=False, text_field="body")
    numbers = find_files([str(tmp_path)], takes_binary=False, text_field="id")
    assert not list(numbers.read())
    assert numbers.describe_skipped() == "4 broken lines (no text in the field id)"
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match="a.parquet cannot be read"):
        find_files([str(tmp_path)], takes_binary=False)
    with standard_input(whole), pytest.raises(SourceError, match="cannot read parquet from a pipe"):
        documents("-")


@pytest.mark.parametrize("name", ["folder", "file"])
def test_a_source_without_read_permission_is_an_error(tmp_path, monkeypatch, request, name):
    monkeypatch.chdir(tmp_path)  # other users may have no access to the folders above
    tmp_path.chmod(0o755)
    Path("text/folder").mkdir(parents=True)
    Path("text/file").write_text("secret")
    Path("text", name).chmod(0)
    request.addfinalizer(functools.partial(os.seteuid, os.geteuid()))
    os.seteuid(os.geteuid() or 65534)  # permissions do not stop root
    with pytest.raises(SourceError, match=rf"text/{name} cannot be read \(Permission denied"):
        find_files(["text"], takes_binary=False)
