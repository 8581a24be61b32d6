"""The documents of text files, JSON lines and parquet files, in chunks.

The suffix of a file decides how it is read: .txt, .jsonl, .jsonl.gz or .parquet. In a folder, files
with another suffix are skipped and counted. A file that is named is refused if it has another
suffix, and read as text if it has none.
"""

import gzip
import io
import json
import os
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO

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
PARQUET_ROWS = 256  # decoded at a time
BLOCK = 1 << 16  # bytes of a parquet file read at a time
SUFFIXES = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
OTHER_SUFFIX = f"file (its suffix is none of {', '.join(SUFFIXES)})"


def plural(count: int, noun: str) -> str:
    """Return "2 lines (broken)" for 2 and "line (broken)"."""
    word, bracket, note = noun.partition(" (")
    ending = "" if count == 1 else "s"
    return f"{count:,} {word}{ending}{bracket}{note}"


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


@dataclass
class Corpus:
    """The files to read, in order, and what was skipped or replaced."""

    text_field: str = "text"  # of the rows of JSON lines and parquet
    files: list[Path] = field(default_factory=list)
    size: int = 0  # total bytes of `files`
    skipped: Counter[str] = field(default_factory=Counter)
    first_broken: str = ""  # "FILE, line N: REASON"
    replaced: int = 0  # characters
    first_replaced: Path | None = None
    position: int = 0  # bytes of `files` read so far, as stored on disk

    def files_in(self, folder: Path) -> Iterator[Path]:
        """Yield the files in a folder that can be read; count the others, and hidden names.

        Hidden names begin with a dot: .git, .cache and .env are no texts.
        """

        def fail(error: OSError) -> None:  # without this, os.walk skips unreadable folders
            raise unreadable(error.filename, error)

        for place, subfolders, names in os.walk(folder, onerror=fail):
            hidden = [name for name in (*subfolders, *names) if name.startswith(".")]
            self.skipped["hidden name"] += len(hidden)
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for path in [Path(place, name) for name in names if not name.startswith(".")]:
                if has_known_suffix(path):
                    yield path
                else:
                    self.skipped[OTHER_SUFFIX] += 1

    def read(self) -> Iterator["Chunk"]:
        """Yield the documents of all files, in chunks. Raises SourceError."""
        finished = 0  # bytes of the files before this one
        for path in self.files:
            with source_errors(path), open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                for chunk in read_file(self, path, file):
                    self.position = finished + file.tell()
                    yield chunk
                finished += size

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
        """Return, for example, "2 blank documents, 1 file with another suffix"."""
        counts = sorted(self.skipped.items())
        return ", ".join(plural(count, kind) for kind, count in counts if count)


def find_files(sources: list[str] | None, text_field: str = "text") -> Corpus:
    """List the files under `sources` (None: the built-in set), in the same order on any machine.

    Raises SourceError, for example if a file cannot be read, or if its first row has no text.
    """
    corpus = Corpus(text_field)
    corpus.files = builtin_sources() if sources is None else []
    for source in map(Path, sources or ()):
        if source.is_dir():
            corpus.files += sorted(corpus.files_in(source))
        elif source.suffix and not has_known_suffix(source):
            suffixes = ", ".join(SUFFIXES)
            raise SourceError(
                f"--source {source}: prepare.py reads {suffixes}: rename a text to .txt, and "
                "convert or unpack anything else"
            )
        else:
            corpus.files.append(source)
    for path in corpus.files:
        with source_errors(path), open(path, "rb") as file:
            corpus.size += os.fstat(file.fileno()).st_size
            if is_rows(path):  # raises NoField if the first object lacks the field
                next(read_rows(Corpus(text_field), path, file), None)
    if not corpus.files:
        found = corpus.describe_skipped() or "no files"
        raise SourceError(f"--source {' '.join(sources or ())} contains no text ({found})")
    return corpus


def has_known_suffix(path: Path) -> bool:
    return path.name.lower().endswith(SUFFIXES)


def is_rows(path: Path) -> bool:
    """Whether a file has a document in each row."""
    return path.name.lower().endswith((".jsonl", ".jsonl.gz", ".parquet"))


# --------------------------------------------------------------------------------------------------
# Documents


class Chunk(NamedTuple):
    text: str
    ends_document: bool


def read_file(corpus: Corpus, path: Path, file: BinaryIO) -> Iterator[Chunk]:
    """Yield the documents of a file, in chunks. Raises SourceError."""
    if is_rows(path):
        yield from cut_rows(corpus, path, read_rows(corpus, path, file))
        return
    for text, ends_document in cut(as_text(file), SEPARATOR):
        yield Chunk(corpus.replace_surrogates(text, path), ends_document)


def as_text(file: BinaryIO) -> TextIO:
    """Return a file as text, in which bytes that are not UTF-8 become surrogates."""
    return io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")


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


def read_rows(corpus: Corpus, path: Path, file: BinaryIO) -> Iterator[str]:
    """Yield the text of each row, "" for null; count broken rows. Raises SourceError."""
    name = corpus.text_field
    is_first = True  # no object has been read yet
    for place, row in rows_of(path, file, name):
        if row is BLANK:
            continue
        if not isinstance(row, dict):
            corpus.skip_line(f"{path}, {place}", "not a JSON object")
            continue
        text = row.get(name, NO_TEXT)
        if isinstance(text, bytes):  # in parquet
            text = text.decode("utf-8", "surrogateescape")
        if text is None or isinstance(text, str):
            yield text or ""
        elif is_first:
            raise NoField(path, name, row)
        else:
            corpus.skip_line(f"{path}, {place}", f"no text in the field {name}")
        is_first = False


def rows_of(path: Path, file: BinaryIO, name: str) -> Iterator[tuple[str, object]]:
    """Yield the place and the value of each row."""
    if path.name.lower().endswith(".parquet"):
        for number, row in enumerate(read_parquet(path, file, name), start=1):
            yield f"row {number}", row
        return
    lines = as_text(gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file)
    for number, line in enumerate(lines, start=1):
        yield f"line {number}", parse_line(line)


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
