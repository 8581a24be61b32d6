"""Sources -> documents: every format gives the same documents, and every loss is reported."""

import codecs
import functools
import gzip
import io
import itertools
import json
import os
import random
import re
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
    corpus = find_files([str(name) for name in names], **options)
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


# ---- formats


@pytest.mark.parametrize("name", ["a.txt", "a.TXT", "a"])
def test_a_text_file_is_a_document(tmp_path, name):
    (tmp_path / name).write_bytes(DOCUMENTS[0].encode("utf-8-sig"))
    assert documents(tmp_path / name) == [DOCUMENTS[0]]


@pytest.mark.parametrize("name, pack", [("a.JSONL", bytes), ("a.jsonl.GZ", gzip.compress)])
def test_a_json_object_is_a_document(tmp_path, name, pack):
    rows = codecs.BOM_UTF8 + json_lines(DOCUMENTS, "body")
    for streams in ([rows], [rows[:9], b"", rows[9:]]):  # a file may consist of several
        (tmp_path / name).write_bytes(b"".join(map(pack, streams)))
        assert documents(tmp_path, text_field="body") == DOCUMENTS


@pytest.mark.parametrize("kind", ["string", "binary"])
def test_a_parquet_row_is_a_document(tmp_path, kind):
    texts = [*DOCUMENTS, None, b"n\xe9" if kind == "binary" else "n"]
    write_parquet(tmp_path / "a.parquet", texts, "body", kind)
    corpus = find_files([str(tmp_path)], text_field="body")
    assert join(corpus.read()) == [*DOCUMENTS, "n\ufffd" if kind == "binary" else "n"]
    assert corpus.describe_skipped() == "1 blank document"
    assert corpus.replaced == (kind == "binary")


def test_files_within_a_folder_are_sorted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.txt", "a/[x].txt", "a/y.md", "c/deep/3.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    assert documents("b", "a/[x].txt") == ["b/1.txt", "b/2.txt", "a/[x].txt"]
    assert documents(tmp_path) == ["a/[x].txt", "b/1.txt", "b/2.txt", "c/deep/3.txt"]
    with pytest.raises(SourceError, match=r"--source c/\*.jsonl cannot be read \(No such file"):
        find_files(["a", "c/*.jsonl"])


def test_linked_files_are_read_and_linked_folders_are_not(tmp_path):
    """In Hugging Face's cache, snapshots/ has links to blobs/, whose names say nothing."""
    for folder in ("blobs", "snapshots/abc"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "blobs/0123").write_bytes(ROWS)
    (tmp_path / "snapshots/abc/train.jsonl").symlink_to("../../blobs/0123")
    (tmp_path / "snapshots/loop").symlink_to("..")
    assert documents(tmp_path) == ["one", "two"]


# ---- chunks


@pytest.mark.parametrize("separator", ["\n", " "])
@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_long_documents_are_read_in_chunks(separator, size):
    """Chunks of any size may cut separators, and characters of several bytes."""
    text = separator.join(
        random.Random(0).choices(["ab", "é✓", "<|endoftext|>", "<|end", "x" * 40], k=400)
    )
    for by, documents in ((sources.SEPARATOR, text.split(sources.SEPARATOR)), ("", [text])):
        assert join(sources.cut(io.StringIO(text), by, size)) == documents
        chunks = [chunk.text for chunk in sources.cut(io.StringIO(text), by, size)]
        assert max(map(len, chunks)) <= 2 * size + len(sources.SEPARATOR)


def test_a_long_row_is_read_in_chunks(tmp_path):
    row = "ab é " * 100_000
    (tmp_path / "b.jsonl").write_bytes(json_lines([row, "short"]))
    chunks = list(find_files([str(tmp_path)]).read())
    assert len(chunks) > 2 and join(iter(chunks)) == [row, "short"]


def test_the_position_counts_the_bytes_of_all_files_so_far(tmp_path):
    contents = {"a.txt": b"x" * 100, "b.jsonl.gz": gzip.compress(json_lines(["y" * 500]))}
    contents["c.jsonl"] = json_lines(["1"])
    for name, packed in contents.items():
        (tmp_path / name).write_bytes(packed)
    corpus = find_files([str(tmp_path)])
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
    corpus = find_files([str(file)])
    assert join(corpus.read()) == ["first", "number", "last"]
    assert corpus.describe_skipped() == (
        "2 blank documents, 2 broken lines (no text in the field text), "
        "3 broken lines (not a JSON object)"
    )
    assert corpus.first_broken == f"{file}, line 4: not a JSON object"


ROWS = json_lines(["one", "two"])


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.zip", "a.txt.gz", "a.md", "a.jsonl.zst"])
def test_another_suffix_is_refused_if_it_is_named_and_else_skipped(tmp_path, name):
    (tmp_path / name).write_bytes(ROWS)
    line = f"--source {tmp_path}/{name}: prepare.py reads .txt, .jsonl, .jsonl.gz, .parquet: "
    with pytest.raises(SourceError, match=re.escape(line)):
        find_files([str(tmp_path / name)])
    with pytest.raises(SourceError, match="contains no text"):
        find_files([str(tmp_path)])
    (tmp_path / "text.txt").write_text("text")
    corpus = find_files([str(tmp_path)])
    assert corpus.files == [tmp_path / "text.txt"]
    assert corpus.skipped.total() == 1 and corpus.describe_skipped().startswith("1 file (its suff")


def test_hidden_names_are_read_only_if_they_are_named(tmp_path):
    """What `git clone` and `hf download` leave beside the data."""
    for name in (".git/hooks/commit.txt", ".env", ".cache/huggingface/a.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("KEY=secret")
    (tmp_path / "a.txt").write_text("text")
    corpus = find_files([str(tmp_path)])
    assert join(corpus.read()) == ["text"] and corpus.describe_skipped() == "3 hidden names"
    assert documents(tmp_path / ".env", tmp_path / ".git/hooks") == ["KEY=secret"] * 2


@pytest.mark.parametrize(
    "row, problem",
    [
        ({"body": "x", "id": 1}, r"it has no field text: set --field to one of its texts \(body\)"),
        ({"text": 5, "body": "x"}, r"the field text is no text: set .* texts \(body\)"),
        (
            {"text": [], "id": 1},
            r"the field text is no text: none of its fields \(text, id\) is a text; for chats",
        ),
        (
            {"messages": [{"role": "user"}]},
            r"it has .* \(messages\) is a text; for chats, see the fork chat",
        ),
    ],
)
def test_a_first_row_without_text_is_refused(tmp_path, row, problem):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(SourceError, match=f"--source .*a.jsonl: {problem}"):
        find_files([str(tmp_path)])


def test_invalid_utf_8_is_replaced_and_counted(tmp_path):
    (tmp_path / "a.txt").write_text("é")
    (tmp_path / "b.txt").write_bytes("né à Noël".encode("latin-1"))
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "\xe9 \\ud83d \\ud83d\\ude00"}')
    corpus = find_files([str(tmp_path)])
    assert join(corpus.read()) == ["é", "n\ufffd \ufffd No\ufffdl", "\ufffd \ufffd \U0001f600"]
    assert (corpus.replaced, corpus.first_replaced) == (5, tmp_path / "b.txt")


def test_a_damaged_compressed_file_is_an_error(tmp_path):
    whole = gzip.compress(json_lines([random.Random(0).randbytes(300_000).hex()] * 2))
    changed = whole[:100_000] + bytes(1000) + whole[101_000:]
    for name, contents in {"cut.jsonl.gz": whole[:-100], "changed.jsonl.gz": changed}.items():
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(SourceError, match=f"--source .*/{name} cannot be read"):
            documents(tmp_path / name)


def test_parquet_without_text_is_refused_or_skipped(tmp_path):
    write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    for name, problem in (("body", "it has no field body"), ("id", "the field id is no text")):
        with pytest.raises(SourceError, match=rf"{problem}.* one of its texts \(text\)"):
            find_files([str(tmp_path)], text_field=name)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match="a.parquet cannot be read"):
        find_files([str(tmp_path)])


@pytest.mark.parametrize("name", ["folder", "file.txt"])
def test_a_source_without_read_permission_is_an_error(tmp_path, monkeypatch, request, name):
    monkeypatch.chdir(tmp_path)  # other users may have no access to the folders above
    tmp_path.chmod(0o755)
    Path("text/folder").mkdir(parents=True)
    Path("text/file.txt").write_text("secret")
    Path("text", name).chmod(0)
    request.addfinalizer(functools.partial(os.seteuid, os.geteuid()))
    os.seteuid(os.geteuid() or 65534)  # permissions do not stop root
    with pytest.raises(SourceError, match=rf"text/{name} cannot be read \(Permission denied"):
        find_files(["text"])
