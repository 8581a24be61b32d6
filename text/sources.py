"""The documents of text files, JSON lines and parquet files, in chunks.

Text and JSON lines may be compressed with gzip. What is not text is refused if it is named, with a
command that converts it, and otherwise skipped and counted.
"""

import glob
import gzip
import io
import json
import os
import re
import stat
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
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
    except (EOFError, OSError, ValueError, RecursionError, zlib.error) as error:
        raise unreadable(path, error) from None


ROWS = {".jsonl": "JSON lines", ".ndjson": "JSON lines", ".parquet": "parquet"}  # by suffix
READ = {"text", *ROWS.values()}  # the kinds of files that are read

PRINT_ROWS = "import csv, json, sys; [print(json.dumps(row)) for row in {}]"
CONVERT = "convert it: python -c '{}' < FILE > FILE.jsonl"
# Kinds of files that are not read -> what to do with one
REMEDIES = {
    "special file": "it is neither a file nor a folder: to read a pipe, use --source -",
    "binary file": f"it has a NUL byte in its first {PROBE:,} bytes: leave it out; only "
    "--tokenizer bytes reads a binary file, if you name it",
    "UTF-16 file": "convert it: iconv -f utf-16 -t utf-8 FILE > NEW_FILE",
    "archive": "unpack it into a folder, for example with unzip or tar -xf",
    "bzip2 file": "decompress it: bunzip2 FILE",
    "xz file": "decompress it: unxz FILE",
    "zstd file": "decompress it: unzstd FILE",
    "CSV file": CONVERT.format(PRINT_ROWS.format("csv.DictReader(sys.stdin)")),
    "TSV file": CONVERT.format(PRINT_ROWS.format('csv.DictReader(sys.stdin, delimiter="\\t")')),
    "JSON file": "rename it to .jsonl if each line is an object, or else "
    + CONVERT.format(PRINT_ROWS.format("json.load(sys.stdin)")),
}
# The first bytes of files that are not read
BEGINNINGS = {
    rb"PK\x03\x04|7z\xbc\xaf\x27\x1c|Rar!|.{257}ustar": "archive",
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": "bzip2 file",
    rb"\xfd7zXZ\0": "xz file",
    rb"\x28\xb5\x2f\xfd": "zstd file",
    rb"(\xff\xfe|\xfe\xff).*\0": "UTF-16 file",
}
# ... and their suffixes, after .gz is removed
SUFFIXES = {".csv": "CSV file", ".tsv": "TSV file", ".json": "JSON file", ".zip": "archive"}
SUFFIXES |= {".tar": "archive", ".tgz": "archive", ".7z": "archive"}
SUFFIXES |= {".bz2": "bzip2 file", ".xz": "xz file", ".zst": "zstd file"}

CHATS = "for chats, see the fork chat in docs/forking.md"


class NoField(SourceError):
    """The first row has no text in --field."""

    def __init__(self, path: Path, name: str, row: dict):
        texts = [str(key) for key, value in row.items() if isinstance(value, str)]
        problem = f"the field {name} is no text" if name in row else f"it has no field {name}"
        remedy = f"set --field to one of its texts ({', '.join(texts)})"
        if not texts:
            remedy = f"none of its fields ({', '.join(map(str, row))}) is a text; {CHATS}"
        super().__init__(f"--source {path}: {problem}: {remedy}")


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


def row_format(path: Path) -> str | None:
    """The format of a file with one document per row, by its suffix."""
    return ROWS.get(suffix_of(path))


def suffix_of(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix


@dataclass
class Corpus:
    """The files to read, in order, and what was skipped or replaced."""

    text_field: str = "text"  # of the rows of JSON lines and parquet
    takes_binary: bool = False  # accept binary files; keep non-UTF-8 bytes of text as surrogates
    files: list[Path] = field(default_factory=list)
    size: int = 0  # total bytes of `files`, not counting standard input
    skipped: Counter[str] = field(default_factory=Counter)
    first_broken: str = ""  # "FILE, line N: REASON"
    binary: int = 0  # binary files among those read
    replaced: int = 0  # characters
    first_replaced: Path | None = None
    position: int = 0  # bytes of `files` read so far, as stored on disk

    def expand(self, source: str) -> list[Path]:
        """List the files in a folder, or that match a glob, following links. Raises SourceError.

        Names that begin with a dot are skipped and counted: .git, .cache and .env are no texts.
        """

        def fail(error: OSError) -> None:  # without this, os.walk skips unreadable folders
            raise unreadable(error.filename, error)

        matches = [source] if os.path.isdir(source) else glob.glob(source, recursive=True)
        if not matches:
            raise SourceError(f"--source {source} matches no file")
        found = []
        walked = set()  # real folders: links can form loops
        for match in sorted(matches):
            if not os.path.isdir(match):
                found.append(Path(match))
                continue
            for folder, subfolders, names in os.walk(match, onerror=fail, followlinks=True):
                real_folder = os.path.realpath(folder)
                if real_folder in walked:
                    subfolders.clear()
                    continue
                walked.add(real_folder)
                self.skipped["hidden name"] += sum(
                    name.startswith(".") for name in (*subfolders, *names)
                )
                # Sorted: if two paths lead to a folder, every machine keeps the same one.
                subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
                found += [Path(folder, name) for name in names if not name.startswith(".")]
        return sorted(found)

    def one_name_each(self, paths: list[Path]) -> list[Path]:
        """Keep one path of each real file, if possible one whose suffix tells what it is.

        In a folder of Hugging Face's cache, snapshots/REVISION/a.jsonl is a link to blobs/HASH.
        """
        best = {}  # (device, inode) -> path
        for path in paths:
            with source_errors(path):
                found = path.stat()
            key = found.st_dev, found.st_ino
            if key not in best or row_format(path) and not row_format(best[key]):
                best[key] = path
        self.skipped["second name of a file"] += len({*paths}) - len(best)
        return [*best.values()]

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
        kind = classify(path, self.text_field)
        takes = kind == "binary file" and is_named and self.takes_binary
        if is_named and kind in REMEDIES and not takes:
            raise refused(path, kind)
        if takes or kind in READ:
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
        counts = sorted(self.skipped.items())
        return ", ".join(plural(count, kind) for kind, count in counts if count)

    def remedies(self) -> Iterator[str]:
        """Yield what to do with the files that were skipped, if they are texts."""
        for kind in sorted(REMEDIES.keys() - {"special file", "binary file"}):
            if self.skipped[kind]:
                yield f"{plural(self.skipped[kind], kind)} skipped; to use one, {REMEDIES[kind]}"


def refused(path: Path, kind: str) -> SourceError:
    return SourceError(f"--source {path} is refused ({kind}): {REMEDIES[kind]}")


def find_files(sources: list[str] | None, takes_binary: bool, text_field: str = "text") -> Corpus:
    """List the files under `sources` (None: the built-in set), in the same order on any machine.

    Raises SourceError, for example if a file cannot be read.
    """
    corpus = Corpus(text_field, takes_binary)
    paths = builtin_sources() if sources is None else []
    named = set()
    for source in sources or ():
        if source == "-":
            paths.append(STDIN)
        elif os.path.isdir(source) or (glob.has_magic(source) and not os.path.lexists(source)):
            paths += corpus.expand(source)
        else:
            paths.append(Path(source))
            named.add(Path(source))
    for path in corpus.one_name_each(paths):
        if path == STDIN:
            corpus.files.append(path)
        else:
            corpus.add(path, is_named=path in named)
    if not corpus.files:
        remedies = "; ".join(corpus.remedies()) or corpus.describe_skipped() or "no files"
        raise SourceError(f"--source {' '.join(sources or ())} contains no text ({remedies})")
    return corpus


def classify(path: Path, text_field: str) -> str:
    """Return a file's kind, see `detect`, or "special file". Raises SourceError, also NoField."""
    with source_errors(path):
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe, a socket or a device
            return "special file"
        with open(path, "rb") as file:
            kind, contents = detect(path, file)
            if kind in ROWS.values():  # raises NoField if the first object lacks the field
                next(read_rows(Corpus(text_field), path, kind, contents), None)
            return kind


# --------------------------------------------------------------------------------------------------
# The kind of a file


def detect(path: Path, file: BinaryIO) -> tuple[str, TextIO | BinaryIO]:
    """Return a file's kind and its contents: decompressed and, except for parquet, as text.

    The kind is in READ or REMEDIES, or "empty file". The first bytes decide, and then the suffix.
    """
    # One read of a pipe may be short. A BufferedReader fills its buffer: peek() sees enough.
    contents = io.BufferedReader(file, BLOCK)
    magic = contents.peek(16)
    if magic.startswith(b"PAR1") or (magic and suffix_of(path) == ".parquet"):
        return "parquet", contents
    if magic.startswith(b"\x1f\x8b"):
        contents = io.BufferedReader(gzip.GzipFile(fileobj=contents), BLOCK)
    beginning = contents.peek(PROBE)[:PROBE]
    # Bytes that are not UTF-8 become surrogates.
    text = io.TextIOWrapper(contents, "utf-8-sig", errors="surrogateescape", newline="")
    if not beginning:
        return "empty file", text
    for pattern, kind in BEGINNINGS.items():
        if re.match(pattern, beginning, re.DOTALL):
            return kind, text
    if kind := SUFFIXES.get(suffix_of(path)):
        return kind, text
    if b"\0" in beginning:
        return "binary file", text
    if path == STDIN and re.match(rb'(\xef\xbb\xbf)?\s*\{\s*"', beginning):
        return "JSON lines", text
    return row_format(path) or "text", text


# --------------------------------------------------------------------------------------------------
# Documents


class Chunk(NamedTuple):
    text: str
    ends_document: bool


def read_file(corpus: Corpus, path: Path, file: BinaryIO) -> Iterator[Chunk]:
    """Yield the documents of a file, in chunks. Raises SourceError."""
    kind, contents = detect(path, file)
    if kind in ROWS.values():
        yield from cut_rows(corpus, path, read_rows(corpus, path, kind, contents))
        return
    if kind == "binary file" and corpus.takes_binary:
        corpus.binary += 1
    elif kind in REMEDIES:  # standard input, or a file that changed after `classify`
        raise refused(path, kind)
    if kind == "empty file":
        corpus.skipped[kind] += 1
        return
    for text, ends_document in cut(contents, SEPARATOR):
        if not corpus.takes_binary:
            text = corpus.replace_surrogates(text, path)
        yield Chunk(text, ends_document)


def cut(file: TextIO, separator: str = "", size: int = CHUNK) -> Iterator[Chunk]:
    """Yield text in chunks, read `size` characters at a time. A separator ends a document."""
    rest = ""
    while text := file.read(size):
        rest += text
        if separator:
            *documents, rest = rest.split(separator)
            for document in documents:
                yield Chunk(document, ends_document=True)
        if len(rest) >= size:
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
    rows = read_parquet(path, file, name) if kind == "parquet" else map(parse_line, file)
    for number, row in enumerate(rows, start=1):
        if row is BLANK:
            continue
        place = f"{path}, {'row' if kind == 'parquet' else 'line'} {number}"
        if not isinstance(row, dict):
            corpus.skip_line(place, "not a JSON object")
            continue
        text = row.get(name, NO_TEXT)
        if isinstance(text, bytes):  # in parquet
            text = text.decode("utf-8", "surrogateescape")
        if text is None or isinstance(text, str):
            yield text or ""
        elif is_first:
            raise NoField(path, name, row)
        else:
            corpus.skip_line(place, f"no text in the field {name}")
        is_first = False


BLANK = object()  # the row of a blank line
NO_TEXT = object()  # the text of a row without the field, unlike null, which is an empty text
JSON = json.JSONDecoder(parse_int=float)  # int() refuses more than 4,300 digits


def parse_line(line: str) -> object:
    """Return a line's value: BLANK for a blank line, None for a broken line."""
    with suppress(ValueError, RecursionError):
        return BLANK if line.isspace() else JSON.decode(line)


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
    types = {column.name: str(column.type) for column in table.schema_arrow}
    row = {key: "" if re.search("string|binary", kind) else None for key, kind in types.items()}
    if row.get(name) is None:
        raise NoField(path, name, row)
    for batch in table.iter_batches(PARQUET_ROWS, columns=[name], use_threads=False):
        yield from batch.to_pylist()
