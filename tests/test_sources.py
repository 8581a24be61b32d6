"""Sources -> documents: every format gives the same documents, and every loss is reported."""

import bz2
import codecs
import contextlib
import functools
import gzip
import io
import itertools
import json
import lzma
import os
import random
import re
import subprocess
import tarfile
import threading
import zipfile
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


PACKED = {"": bytes, ".GZ": gzip.compress}


@pytest.mark.parametrize("suffix", PACKED)
def test_a_text_file_is_a_document_even_if_compressed(tmp_path, suffix):
    text = DOCUMENTS[0].encode("utf-8-sig")
    for streams in ([text], [text[:3], b"", text[3:]]):  # a file may consist of several
        (tmp_path / f"a{suffix}").write_bytes(b"".join(map(PACKED[suffix], streams)))
        assert documents(tmp_path) == [DOCUMENTS[0]]


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.ndjson.GZ"])
def test_a_json_object_is_a_document(tmp_path, name):
    pack = PACKED.get(Path(name).suffix, bytes)
    (tmp_path / name).write_bytes(pack(codecs.BOM_UTF8 + json_lines(DOCUMENTS, "body")))
    assert documents(tmp_path, text_field="body") == DOCUMENTS


@pytest.mark.parametrize("kind", ["string", "binary"])
def test_a_parquet_row_is_a_document(tmp_path, kind):
    texts = [*DOCUMENTS, None, b"n\xe9" if kind == "binary" else "n"]
    write_parquet(tmp_path / "a.parquet", texts, "body", kind)
    corpus = find_files([str(tmp_path)], takes_binary=False, text_field="body")
    assert join(corpus.read()) == [*DOCUMENTS, "n\ufffd" if kind == "binary" else "n"]
    assert corpus.describe_skipped() == "1 blank document"
    assert corpus.replaced == (kind == "binary")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
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
    chunks = list(find_files([str(tmp_path)], takes_binary=False).read())
    assert len(chunks) > 2 and join(iter(chunks)) == [row, "short"]


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


def tar_of(contents: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("a.txt")
        member.size = len(contents)
        archive.addfile(member, io.BytesIO(contents))
    return file.getvalue()


def zip_of(contents: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", contents)
    return file.getvalue()


TEXT = "a text of some length, in lines\n" * 20
ROWS = json_lines(["one", "two"])
ZSTD = b"\x28\xb5\x2f\xfd" + bytes(40)
# A file that is no text -> its contents, and what the error says it is and what it advises
NO_TEXTS = {
    "a.csv": (b"id,text\n1,one\n", "(CSV file): convert it: python -c"),
    "a.tsv.gz": (gzip.compress(b"id\ttext\n1\tone\n"), "(TSV file): convert it: python -c"),
    "a.json": (b'[{"text": "one"}]', "(JSON file): rename it to .jsonl if"),
    "a.jsonl.bz2": (bz2.compress(ROWS), "(bzip2 file): decompress it: bunzip2"),
    "a.txt": (lzma.compress(ROWS), "(xz file): decompress it: unxz"),
    "a.jsonl.zst": (ZSTD, "(zstd file): decompress it: unzstd"),
    "b.txt": (ZSTD, "(zstd file): decompress it: unzstd"),
    "a.zip": (zip_of(ROWS), "(archive): unpack it"),
    "b.jsonl": (zip_of(ROWS), "(archive): unpack it"),
    "a.tar.gz": (gzip.compress(tar_of(ROWS)), "(archive): unpack it"),
    "c.txt": (tar_of(ROWS), "(archive): unpack it"),
    "c.jsonl": (ROWS.decode().encode("utf-16"), "(UTF-16 file): convert it: iconv"),
    "d.txt": (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), "(UTF-16 file): convert it: iconv"),
}


@pytest.mark.parametrize("takes_binary", [False, True])
@pytest.mark.parametrize("name", NO_TEXTS)
def test_what_is_no_text_is_refused_with_a_remedy(tmp_path, name, takes_binary):
    contents, problem = NO_TEXTS[name]
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(SourceError, match=re.escape(f"{tmp_path}/{name} is refused {problem}")):
        find_files([str(tmp_path / name)], takes_binary)
    with pytest.raises(SourceError, match="contains no text"):
        find_files([str(tmp_path)], takes_binary)
    (tmp_path / "text").write_text("text")
    corpus = find_files([str(tmp_path)], takes_binary)
    assert corpus.files == [tmp_path / "text"]
    kind = problem.partition(")")[0][1:]
    (remedy,) = corpus.remedies()
    assert corpus.describe_skipped() == f"1 {kind}" and remedy.startswith(f"1 {kind} skipped")


@pytest.mark.parametrize("name", ["c.jsonl", "d.txt", "b.jsonl", "a.tar.gz", "b.txt"])
def test_standard_input_that_is_no_text_is_refused(name):
    contents, problem = NO_TEXTS[name]
    corpus = find_files(["-"], takes_binary=True)
    match = re.escape(f"--source /dev/stdin is refused {problem}")
    with standard_input(contents), pytest.raises(SourceError, match=match):
        list(corpus.read())


@pytest.mark.parametrize(
    "name, contents",
    [
        ("a.csv", b'id,text\n1,"one, with a ""quote"""\n'),
        ("a.tsv", b"id\ttext\n1\tone\n"),
        ("a.json", b'[{"text": "one"}, {"text": "two"}]'),
    ],
)
def test_the_advised_conversion_gives_json_lines(tmp_path, name, contents):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(SourceError) as refused:
        find_files([str(tmp_path / name)], takes_binary=False)
    command = re.search(r"python -c .*", str(refused.value))[0].replace("FILE", name)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    texts = documents(tmp_path / f"{name}.jsonl")
    assert texts[0] == {"a.csv": 'one, with a "quote"'}.get(name, "one")


def test_hidden_names_are_read_only_if_they_are_named(tmp_path):
    """What `git clone` and `hf download` leave beside the data: P4."""
    for name in (".git/hooks/commit.sample", ".env", ".cache/huggingface/a.jsonl.metadata"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("KEY=secret")
    (tmp_path / "a.txt").write_text("text")
    corpus = find_files([str(tmp_path)], takes_binary=False)
    assert join(corpus.read()) == ["text"] and corpus.describe_skipped() == "3 hidden names"
    assert documents(f"{tmp_path}/*", f"{tmp_path}/**") == ["text"]
    assert documents(tmp_path / ".env", tmp_path / ".git/hooks") == ["KEY=secret"] * 2


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_file_is_read_once_under_its_telling_name(tmp_path, link):
    """A folder of Hugging Face's cache has each file in blobs/ and in snapshots/: P5."""
    for folder in ("blobs", "snapshots/abc"):
        (tmp_path / folder).mkdir(parents=True)
    blob = tmp_path / "blobs/0123"
    blob.write_bytes(ROWS)
    link(blob, tmp_path / "snapshots/abc/train.jsonl")
    corpus = find_files([str(tmp_path)], takes_binary=False)
    assert join(corpus.read()) == ["one", "two"]
    assert corpus.describe_skipped() == "1 second name of a file"
    assert documents(tmp_path / "blobs", tmp_path / "snapshots") == ["one", "two"]


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
        find_files([str(tmp_path)], takes_binary=False)


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
    assert corpus.describe_skipped() == "2 binary files, 1 empty file"
    named = find_files([str(tmp_path / "binary")], takes_binary=True)
    assert named.files == [tmp_path / "binary"]


def test_a_damaged_compressed_file_is_an_error(tmp_path):
    whole = gzip.compress(random.Random(0).randbytes(300_000).hex().encode())
    changed = whole[:100_000] + bytes(1000) + whole[101_000:]
    for name, contents in {"cut": whole[:-100], "changed": changed}.items():
        (tmp_path / name).write_bytes(contents)
        with pytest.raises(SourceError, match=f"--source .*/{name} cannot be read"):
            documents(tmp_path / name)


def test_parquet_without_text_is_refused_or_skipped(tmp_path):
    write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    for name, problem in (("body", "it has no field body"), ("id", "the field id is no text")):
        with pytest.raises(SourceError, match=rf"{problem}.* one of its texts \(text\)"):
            find_files([str(tmp_path)], takes_binary=False, text_field=name)
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
