"""Read documents from text, JSON, CSV and parquet files; text, JSON and CSV may be compressed.
Skipped and replaced text is counted. A file that cannot be read is an error.
"""

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import stat
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

from errors import plural

# Separates the documents of a text file.
SEPARATOR = "<|endoftext|>"
# Characters read at a time, so that memory stays flat for a document of any size. A chunk has at
# most about 3 * CHUNK characters (see `cut`): on about a million white-space characters in a row,
# tiktoken's regular expressions overflow their stack.
CHUNK = 1 << 18
# GPT-2's pattern always splits text between a letter or digit and a space or line break, so a cut
# there does not change the tokens.
LAST_WORD_END = re.compile(r".*[^\W_](?=[ \n])", re.DOTALL)
# A surrogate is half of a UTF-16 pair, not a character. With errors="surrogateescape", a byte that
# is not UTF-8 is decoded to a surrogate. JSON can contain one as well, for example "\ud83d".
SURROGATE = re.compile("[\ud800-\udfff]")
# A file with a NUL byte in its first 8 KiB is binary.
PROBE = 8192
BLOCK = 1 << 16  # bytes read at a time
PARQUET_ROWS = 256  # decoded at a time
STDIN = Path("/dev/stdin")  # stands for `-` in lists of files and in messages


class SourceError(ValueError):
    """A source cannot be read, or cannot be used."""

    exit_status = 2


def unreadable(path: str | Path, error: Exception) -> SourceError:
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return SourceError(f"--source {path} cannot be read ({reason}): fix this, or leave it out")


@contextmanager
def source_errors(path: Path) -> Iterator[None]:
    """Turn errors in reading a file into SourceErrors (pyarrow's include ValueErrors)."""
    try:
        yield
    except SourceError:
        raise
    except (EOFError, OSError, ValueError, RecursionError, zlib.error, lzma.LZMAError) as error:
        raise unreadable(path, error) from None


# Kinds of files that are skipped in a folder -> the error if such a file is given as --source
REFUSED = {
    "special file": "is neither a regular file nor a folder: to read a pipe, use --source -",
    "binary file": f"is binary (a NUL byte in its first {PROBE:,} bytes): leave it out; only "
    "--tokenizer bytes reads binary files",
}


class NoField(SourceError):
    def __init__(self, path: Path, text_field: str, fields: Iterable[str]):
        super().__init__(
            f"--source {path} has no field {text_field}: set --field to one of its fields "
            f"({', '.join(map(str, fields))})"
        )


# --------------------------------------------------------------------------------------------------
# The files to read


def builtin_sources() -> list[Path]:
    """List the code and text files of the installed standard library: about 12 MB, no download."""
    suffixes = (".py", ".txt", ".html", ".rst")
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - left_out
        files += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(files)


def expand(source: str) -> list[Path]:
    """List the files in a folder, or that match a glob, following links. Raises SourceError."""

    def fail(error: OSError) -> None:  # without this, os.walk skips unreadable folders
        raise unreadable(error.filename, error)

    matches = [source] if os.path.isdir(source) else glob.glob(source, recursive=True)
    if not matches:
        raise SourceError(f"--source {source} matches no file")
    # Links can give a folder several paths, and can form loops: visit each real folder only once.
    found = {}  # (real folder, name) -> path
    walked = set()  # real folders
    for match in sorted(matches):
        if not os.path.isdir(match):
            folder, name = os.path.split(match)
            found.setdefault((os.path.realpath(folder), name), Path(match))
            continue
        for folder, subfolders, names in os.walk(match, onerror=fail, followlinks=True):
            real_folder = os.path.realpath(folder)
            if real_folder in walked:
                subfolders.clear()
                continue
            walked.add(real_folder)
            subfolders.sort()  # if two paths lead to a folder, every machine keeps the same one
            for name in names:
                found.setdefault((real_folder, name), Path(folder, name))
    return sorted(found.values())


@dataclass
class Corpus:
    """The files to read, in order, and what was skipped or replaced."""

    text_field: str = "text"  # of JSON, CSV and parquet rows
    takes_binary: bool = False  # accept binary files; keep non-UTF-8 bytes of text as surrogates
    files: list[Path] = field(default_factory=list)
    size: int = 0  # total bytes of `files`, not counting standard input
    skipped: Counter[str] = field(default_factory=Counter)
    first_broken: str = ""  # "FILE, line N: REASON"
    binary: int = 0  # binary files among those read
    replaced: int = 0  # characters
    first_replaced: Path | None = None
    position: int = 0  # bytes of `files` read so far, as stored on disk

    def read(self) -> Iterator["Chunk"]:
        """Yield the documents of all files, in chunks. Raises SourceError."""
        finished = 0  # bytes of the files before this one
        for path in self.files:
            source = 0 if path == STDIN else path
            with source_errors(path), open(source, "rb", closefd=path != STDIN) as file:
                size = os.fstat(file.fileno()).st_size
                for chunk in read_file(self, path, file):
                    self.position = finished + (file.tell() if file.seekable() else 0)
                    yield chunk
                finished += size

    def add(self, path: Path, is_named: bool = False) -> None:
        """Add a file, or count it as skipped if it is not text. Raises SourceError."""
        try:
            kind = classify(path, self.text_field)
        except NoField:
            if is_named or not re.search(r"\.(json|csv|tsv)(\.\w+)?$", path.name, re.I):
                raise
            kind = f"file (no field {self.text_field})"
        takes = kind == "binary file" and is_named and self.takes_binary
        if is_named and kind in REFUSED and not takes:
            raise SourceError(f"--source {path} {REFUSED[kind]}")
        if takes or kind in ("text", *ROWS):
            self.files.append(path)
            self.size += path.stat().st_size
        else:
            self.skipped[kind] += 1

    def skip_line(self, place: str, reason: str) -> None:
        self.skipped[f"broken line ({reason})"] += 1
        self.first_broken = self.first_broken or f"{place}: {reason}"

    def replace_surrogates(self, text: str, path: Path) -> str:
        """Replace surrogates with U+FFFD, and count them."""
        if text.isascii():
            return text
        text, count = SURROGATE.subn("\ufffd", text)
        if count:
            self.replaced += count
            self.first_replaced = self.first_replaced or path
        return text

    def describe_skipped(self) -> str:
        """Return, for example, "1 binary file, 2 empty files"."""
        return ", ".join(plural(count, kind) for kind, count in sorted(self.skipped.items()))


def find_files(sources: list[str] | None, takes_binary: bool, text_field: str = "text") -> Corpus:
    """List the files under `sources` (None: the built-in set), in the same order on any machine.

    Raises SourceError, for example if a file cannot be read.
    """
    corpus = Corpus(text_field, takes_binary)
    for path in builtin_sources() if sources is None else ():
        corpus.add(path)
    for source in sources or ():
        if source == "-":
            corpus.files.append(STDIN)
        elif os.path.isdir(source) or (glob.has_magic(source) and not os.path.lexists(source)):
            for path in expand(source):
                corpus.add(path)
        else:
            corpus.add(Path(source), is_named=True)
    if not corpus.files:
        found = corpus.describe_skipped() or "no files"
        raise SourceError(f"--source {' '.join(sources or ())} contains no text ({found})")
    return corpus


def classify(path: Path, text_field: str) -> str:
    """Return a file's kind, see `detect`, or "special file". Raises SourceError, also NoField."""
    with source_errors(path):
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe, a socket or a device
            return "special file"
        with open(path, "rb") as file:
            kind, contents = detect(path, file)
            if kind in ROWS:  # raises NoField if the first object lacks the field
                next(read_rows(Corpus(text_field), path, kind, contents), None)
            return kind


# --------------------------------------------------------------------------------------------------
# Bytes of a file, decompressed


# Regular expression for a compressed file's first bytes -> the function that opens the file
COMPRESSED = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open,
    rb"\xfd7zXZ\0": lzma.open,
}
# Suffix of a file's name, after .gz, .bz2 or .xz is removed -> key of ROWS
SUFFIXES = {".csv": "CSV", ".tsv": "TSV"}
SUFFIXES |= dict.fromkeys((".jsonl", ".ndjson", ".json"), "JSON lines")


def detect(path: Path, file: BinaryIO) -> tuple[str, TextIO | BinaryIO]:
    """Return a file's kind and its contents: decompressed and, except for parquet, as text.

    The kind is a key of ROWS, "text", "empty file" or "binary file". Compressed files are
    identified by their first bytes, parquet files by their first bytes or the suffix .parquet.
    """
    # One read of a pipe may be short. A BufferedReader fills its buffer: peek() sees enough.
    contents = io.BufferedReader(file, BLOCK)
    magic = contents.peek(16)
    if magic.startswith(b"PAR1") or (magic and path.name.lower().endswith(".parquet")):
        return "parquet", contents
    for beginning, decompress in COMPRESSED.items():
        if re.match(beginning, magic):
            contents = io.BufferedReader(decompress(contents), BLOCK)
    beginning = contents.peek(PROBE)[:PROBE]
    start = beginning.decode("utf-8-sig", "replace")  # drops a byte order mark
    if not beginning:
        kind = "empty file"
    elif "\0" in start:
        kind = "binary file"
    elif path == STDIN:
        kind = "JSON lines" if re.match(r'\s*\{\s*"', start) else "text"
    else:
        name = re.sub(r"\.(gz|bz2|xz)$", "", path.name.lower())
        kind = SUFFIXES.get(Path(name).suffix, "text")
        if name.endswith(".json") and start.lstrip().startswith("["):
            kind = "JSON array"
    # Bytes that are not UTF-8 become surrogates.
    return kind, io.TextIOWrapper(contents, "utf-8-sig", errors="surrogateescape", newline="")


# --------------------------------------------------------------------------------------------------
# Documents


class Chunk(NamedTuple):
    text: str
    ends_document: bool


def read_file(corpus: Corpus, path: Path, file: BinaryIO) -> Iterator[Chunk]:
    """Yield the documents of a file, in chunks. Raises SourceError."""
    kind, contents = detect(path, file)
    if kind in ROWS:
        yield from cut_rows(corpus, path, read_rows(corpus, path, kind, contents))
        return
    if kind == "binary file":
        corpus.binary += 1
        if not corpus.takes_binary:  # a binary stdin, or a file that changed after `classify`
            raise SourceError(f"--source {path} {REFUSED[kind]}")
    if kind == "empty file":
        corpus.skipped[kind] += 1
        return
    for text, ends_document in cut(contents, SEPARATOR):
        if not corpus.takes_binary:
            text = corpus.replace_surrogates(text, path)
        yield Chunk(text, ends_document)


def cut(file: TextIO, separator: str = "") -> Iterator[Chunk]:
    """Yield text in chunks. The separator, if any, ends a document."""
    rest = ""
    while text := file.read(CHUNK):
        rest += text
        if separator:
            *documents, rest = rest.split(separator)
            for document in documents:
                yield Chunk(document, ends_document=True)
        if len(rest) >= CHUNK:
            # Cut at the end of a word, or else at the end of a line. If there is neither, keep back
            # enough characters that a separator is never cut in two.
            word = LAST_WORD_END.match(rest)
            end = word.end() if word else rest.rfind("\n") + 1
            end = end or max(0, len(rest) - len(SEPARATOR))
            yield Chunk(rest[:end], ends_document=False)
            rest = rest[end:]
    yield Chunk(rest, ends_document=True)


def cut_rows(corpus: Corpus, path: Path, rows: Iterator[str]) -> Iterator[Chunk]:
    """Yield each row as a document; count rows without text."""
    for text in rows:
        text = corpus.replace_surrogates(text, path)
        if not text:
            corpus.skipped["blank document"] += 1
        elif len(text) < CHUNK:
            yield Chunk(text, ends_document=True)
        else:
            yield from cut(io.StringIO(text, newline=""))


def read_rows(corpus: Corpus, path: Path, kind: str, file: TextIO | BinaryIO) -> Iterator[str]:
    """Yield the text of each row, "" for null; count broken rows. Raises SourceError."""
    name = corpus.text_field
    is_first = True  # no object has been read yet
    for number, row in enumerate(ROWS[kind](path, file, name), start=1):
        if row is BLANK:
            continue
        place = f"{path}, {'line' if kind == 'JSON lines' else 'row'} {number}"
        if not isinstance(row, dict):
            corpus.skip_line(place, "not a JSON object")
            continue
        if name not in row and is_first:
            raise NoField(path, name, row)
        is_first = False
        if any(row.get(None, ())):  # for example, a comma in unquoted CSV text
            corpus.skip_line(place, "more fields than columns")
            continue
        text = row.get(name, NO_TEXT)
        if isinstance(text, bytes):  # in parquet
            text = text.decode("utf-8", "surrogateescape")
        if text is None or isinstance(text, str):
            yield text or ""
        else:
            corpus.skip_line(place, f"no text in the field {name}")


BLANK = object()  # the row of a blank line
NO_TEXT = object()  # the text of a row without the field, unlike null, which is an empty text
JSON = json.JSONDecoder(parse_int=float)  # int() refuses more than 4,300 digits


def parse_line(line: str) -> object:
    """Return a line's value: BLANK for a blank line, None for a broken line."""
    with suppress(ValueError, RecursionError):
        return BLANK if line.isspace() else JSON.decode(line)


def read_csv(path: Path, file: TextIO, name: str, delimiter: str) -> Iterator[dict]:
    """Yield rows; extra fields are under the key None. Raises SourceError and ValueError."""
    csv.field_size_limit(sys.maxsize)
    # strict, since otherwise a stray quote could hide rows and cut texts
    rows = csv.DictReader(file, delimiter=delimiter, strict=True)
    try:
        if (rows.fieldnames or []).count(name) > 1:
            raise SourceError(f"--source {path} has several columns {name}: rename all but one")
        yield from rows
    except csv.Error as error:
        row = f"the row that begins at line {rows.line_num + 1}"
        raise ValueError(f"{row} has a quote that is not closed or not doubled: {error}") from None


def read_parquet(path: Path, file: BinaryIO, name: str) -> Iterator[dict]:
    """Yield rows with only the column `name`. Raises SourceError.

    Without pre-buffering and with small buffers, memory stays flat for row groups of any size.
    """
    if not file.seekable():
        raise SourceError("--source - cannot read parquet from a pipe: give the path of a file")
    try:
        from pyarrow import parquet
    except ImportError:
        raise SourceError(f"--source {path} needs pyarrow: pip install pyarrow") from None
    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=BLOCK)
    if name not in table.schema_arrow.names:
        raise NoField(path, name, table.schema_arrow.names)
    for batch in table.iter_batches(PARQUET_ROWS, columns=[name], use_threads=False):
        yield from batch.to_pylist()


# Formats with one document per row -> the function that reads their rows
ROWS = {
    "JSON lines": lambda path, file, name: map(parse_line, file),
    "JSON array": lambda path, file, name: JSON.decode(file.read()),
    "CSV": lambda path, file, name: read_csv(path, file, name, ","),
    "TSV": lambda path, file, name: read_csv(path, file, name, "\t"),
    "parquet": read_parquet,
}
