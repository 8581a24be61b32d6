"""Tokenize text into a folder that train.py reads: train.bin, val.bin and meta.json.

python prepare.py --source corpus/ --tokenizer gpt2 --out tokens/corpus
python prepare.py --source web/*.jsonl.gz --tokenizer SmolLM2-135M/ --out tokens/web
python prepare.py --dataset HuggingFaceFW/fineweb-edu sample-10BT --out tokens/edu

    sources -> documents, in pieces -> tokens -> train or val, by a hash -> a new folder
"""

import hashlib
import json
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from gzip import GzipFile
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

import errors
import tokenizer
from errors import UsageError

# Characters that are read at a time, and that decide on the split of a document. A piece has at
# most 3 * PIECE: on a million spaces, tiktoken's regular expressions overflow their stack.
PIECE = 1 << 18
BATCH = 1 << 22  # characters that are encoded at a time, in parallel
SEPARATOR = "<|endoftext|>"  # of the documents of a text file
# Most tokenizers split text between a letter or digit and a space or line break, so a cut there
# does not change the tokens.
LAST_WORD_END = re.compile(r".*[^\W_](?=[ \n])", re.DOTALL)
PROGRESS_INTERVAL = 10.0  # seconds

ROWS = (".jsonl", ".jsonl.gz", ".parquet")
TEXT = (".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cpp", ".cu", ".rs", ".go", ".js", ".sh")


# --------------------------------------------------------------------------------------------------
# Sources -> documents


class Piece(NamedTuple):
    """A part of a document, or all of it."""

    text: str
    ends_document: bool
    split: str = ""  # train or val; see assign


@dataclass
class Sources:
    """Where documents come from: files, or a data set for the package datasets."""

    files: list[Path]
    dataset: list[str]  # its name, and perhaps that of a configuration
    split: str  # of the data set
    column: str  # of a row
    position: int = 0  # the bytes of the files that have been read

    def read(self) -> Iterator[Piece]:
        """Yield the documents, in pieces. Raises UsageError."""
        if self.dataset:
            yield from read_dataset(self.dataset, self.split, self.column)
        before = 0
        for path in self.files:
            with source_errors(path), open(path, "rb") as file:
                for piece in read_file(path, file, self.column):
                    self.position = before + file.tell()
                    yield piece
            before += path.stat().st_size


@contextmanager
def source_errors(source: str | Path) -> Iterator[None]:
    """Turn errors in reading a source into UsageErrors: those of packages may have any type."""
    try:
        yield
    except (UsageError, ImportError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{source} cannot be read: {type(error).__name__}: {reason}") from None


def find_files(sources: list[str] | None) -> list[Path]:
    """List the files of `sources`, in the same order on any machine.

    Without sources, these are code and text of the installed standard library: about 12 MB.
    Raises UsageError, and OSError for a folder that cannot be read.
    """
    if sources is None:
        left_out = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")
        return files_in(sysconfig.get_path("stdlib"), (".py", ".txt", ".html", ".rst"), left_out)
    files = []
    for source in map(Path, sources):
        if source.is_dir():
            files += files_in(source, (*TEXT, *ROWS))
        elif not source.exists():
            raise UsageError(f"{source} does not exist")
        elif source.suffix and not source.name.lower().endswith((*TEXT, *ROWS)):
            raise UsageError(f"{source}: its suffix is none of {' '.join((*TEXT, *ROWS))}")
        else:
            files.append(source)
    return files


def files_in(
    folder: str | Path, suffixes: tuple[str, ...], left_out: tuple[str, ...] = ()
) -> list[Path]:
    """List the files with these suffixes in a folder, without hidden ones; print their number."""

    def fail(error: OSError) -> None:  # without this, os.walk passes over what it cannot read
        raise error

    files, skipped = [], 0
    for place, subfolders, names in os.walk(folder, onerror=fail):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in left_out]
        for link in filter(os.path.islink, (Path(place, name) for name in subfolders)):
            print(f"{link}: a link to a folder is not followed")
        for name in names:
            if name[0] != "." and name.lower().endswith(suffixes):
                files.append(Path(place, name))
            else:
                skipped += 1
    print(f"{folder}: {len(files):,} files to read, {skipped:,} others skipped")
    return sorted(files)


def read_dataset(dataset: list[str], split: str, column: str) -> Iterator[Piece]:
    """Yield the rows of a data set, in pieces, while it is downloaded. Raises UsageError."""
    import datasets

    name = " ".join(dataset)
    with source_errors(name):
        rows = datasets.load_dataset(*dataset, split=split, streaming=True)
        yield from cut_rows(rows, column, name)


def read_file(path: Path, file: BinaryIO, column: str) -> Iterator[Piece]:
    """Yield the documents of a file, in pieces. Raises UsageError."""
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from cut_rows(read_parquet(file, column), column, path)
        return
    unpacked = GzipFile(fileobj=file) if name.endswith(".gz") else file
    text = TextIOWrapper(unpacked, "utf-8-sig", newline="")
    if name.endswith(ROWS):
        yield from cut_rows((parse(line, column) for line in text), column, path)
    else:
        yield from cut(iter(lambda: text.read(PIECE), ""), SEPARATOR)


def read_parquet(file: BinaryIO, column: str) -> Iterator[dict]:
    """Yield rows, with only the column if it is there. Memory stays flat for any row groups."""
    from pyarrow import parquet

    table = parquet.ParquetFile(file, buffer_size=1 << 16)
    columns = [column] if column in table.schema_arrow.names else None
    for batch in table.iter_batches(256, columns=columns, use_threads=False):
        yield from batch.to_pylist()


def parse(line: str, column: str) -> dict:
    """Return the row of a JSON line: without text for a blank line, empty if it is no object."""
    if line.isspace():
        return {column: ""}
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    return row if isinstance(row, dict) else {}


def cut_rows(rows: Iterable[dict], column: str, source: str | Path) -> Iterator[Piece]:
    """Yield the text of each row, in pieces. Raises UsageError if a row has no text."""
    for number, row in enumerate(rows, start=1):
        text = row.get(column)
        if not isinstance(text, str):
            problem = f"no text in {column}; --column names one of {list(row) or 'no columns'}"
            raise UsageError(f"{source}, line {number}: {problem}")
        # JSON may have half of a pair, like "\ud83d", which is no character.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        yield from cut(text[i : i + PIECE] for i in range(0, len(text), PIECE))


def cut(blocks: Iterable[str], separator: str = "") -> Iterator[Piece]:
    """Yield documents, which the separator ends, in pieces.

    A block has at most PIECE characters. The first piece has PIECE characters, or the document.
    """
    rest = ""
    for block in blocks:
        rest += block
        if separator:
            *documents, rest = rest.split(separator)
            for document in documents:
                yield Piece(document, ends_document=True)
        if len(rest) >= 2 * PIECE:
            # If there is no word, keep back enough that a separator is never cut in two.
            word = LAST_WORD_END.match(rest, PIECE)
            end = word.end() if word else len(rest) - len(SEPARATOR)
            yield Piece(rest[:end], ends_document=False)
            rest = rest[end:]
    yield Piece(rest, ends_document=True)


# --------------------------------------------------------------------------------------------------
# Documents -> tokens


def choose_split(beginning: bytes, val_fraction: float) -> str:
    """Assign a document to a split by the hash of its beginning.

    Order does not matter, and copies of a document get the same split.
    """
    key = int.from_bytes(hashlib.blake2b(beginning, digest_size=8).digest())
    return "val" if key < val_fraction * 2**64 else "train"


def assign(pieces: Iterable[Piece], val_fraction: float) -> Iterator[Piece]:
    """Yield each piece with its document's split; leave out documents of white space."""
    split = ""  # of the current document
    for text, ends_document, _ in pieces:
        if not split and ends_document and not text.strip():
            continue
        split = split or choose_split(text[:PIECE].encode(), val_fraction)
        yield Piece(text, ends_document, split)
        if ends_document:
            split = ""


def batch_up(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces, because the packages of tokenizers encode the texts of a list in parallel."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def tokenize(
    sources: Sources,
    encoding: tokenizer.Encoding,
    dtype: np.dtype,
    folder: Path,
    val_fraction: float,
) -> Counter:
    """Write train.bin and val.bin into `folder`; count the documents and bytes of each split."""
    counts = Counter()
    began = reported = time.monotonic()
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        files = {"train": train, "val": val}
        for batch in batch_up(assign(sources.read(), val_fraction)):
            texts = [piece.text for piece in batch]
            tokens = encoding.encode_ordinary_batch(texts)
            if not counts:
                print_lost("".join(texts), "".join(map(encoding.decode, tokens)))
            for piece, ids in zip(batch, tokens):
                if piece.ends_document:
                    ids.append(encoding.eot_token)
                    counts[f"{piece.split} documents"] += 1
                files[piece.split].write(np.array(ids, dtype))
                counts["tokens"] += len(ids)
                counts[f"{piece.split} bytes"] += len(piece.text.encode())
            if time.monotonic() > reported + PROGRESS_INTERVAL:
                reported = time.monotonic()
                print(describe_progress(sources, counts, reported - began), file=sys.stderr)
    return counts


def print_lost(text: str, decoded: str) -> None:
    """Print the share of the characters of `text` that `decoded` lacks, if there are any."""
    lost = (Counter(text) - Counter(decoded)).total()
    if lost:
        share = f"{lost / len(text):.2%} of the first {len(text):,} characters"
        print(f"{share} do not come back from their tokens, so bits per byte mean less")


def describe_progress(sources: Sources, counts: Counter, seconds: float) -> str:
    """For example "12,345 documents, 67,890,123 tokens, 4,526,008 tokens/s, 4.2 minutes left"."""
    documents = counts["train documents"] + counts["val documents"]
    speed = counts["tokens"] / seconds
    line = f"{documents:,} documents, {counts['tokens']:,} tokens, {speed:,.0f} tokens/s"
    if sources.position:
        size = sum(path.stat().st_size for path in sources.files)
        line += f", {seconds / 60 * (size / sources.position - 1):,.1f} minutes left"
    return line


# --------------------------------------------------------------------------------------------------
# Tokens -> a folder


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, and rename it to `out` at the end of the block.

    After an exception, removes it. Raises UsageError if `out` exists.
    """
    if os.path.lexists(out):
        raise UsageError(f"--out {out} exists: remove it or choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
            folder = Path(work, out.name)
            folder.mkdir()
            yield folder
            os.rename(folder, out)
    except OSError as error:  # of a full disk, which names no file
        raise OSError(error.errno, error.strerror, error.filename or str(out)) from None


def split_few_documents(folder: Path, val_fraction: float, itemsize: int) -> None:
    """Give validation the last tokens, if the hash has assigned all documents to one split."""
    train, val = folder / "train.bin", folder / "val.bin"
    if not train.stat().st_size:
        os.replace(val, train)
    elif val.stat().st_size:
        return
    size = train.stat().st_size
    moved = max(1, int(size // itemsize * val_fraction)) * itemsize
    with open(train, "rb") as head, open(val, "wb") as tail:
        head.seek(size - moved)
        shutil.copyfileobj(head, tail)
    os.truncate(train, size - moved)
    print(f"too few documents to split: validation gets the last {val_fraction:.3g} of the tokens")


def prepare(
    sources: list[str] | None,
    out: Path,
    name: str = "bytes",
    val_fraction: float = 0.05,
    column: str = "text",
    dataset: list[str] | None = None,
    split: str = "train",
) -> None:
    """Tokenize `sources`, `dataset`, or without both the built-in files into a new token folder.

    `name` is passed to tokenizer.load_encoding, and `column` is the field of a row that has the
    text. The folder `out` is created complete or, after an error, not at all.
    Raises UsageError and OSError.
    """
    encoding = tokenizer.load_encoding(name)
    dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
    files = [] if dataset else find_files(sources)
    with new_folder(out) as folder:
        meta = {"tokenizer": name, "dtype": dtype.name, "vocab_size": encoding.n_vocab}
        if name not in ("bytes", "gpt2"):
            encoding.save(folder)
            meta["tokenizer"] = "tokenizer.json"
        found = Sources(files, dataset or [], split, column)
        counts = tokenize(found, encoding, dtype, folder, val_fraction)
        if not counts["tokens"]:
            raise UsageError(f"no text in {' '.join(dataset or map(str, files[:3]))}")
        split_few_documents(folder, val_fraction, dtype.itemsize)
        meta |= describe_tokens(folder, counts, dtype.itemsize)
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    print(
        f"{out}: {counts['train bytes'] + counts['val bytes']:,} bytes of text, "
        f"{meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate, "
        f"vocabulary {encoding.n_vocab:,} ({meta['tokenizer']})"
    )


def describe_tokens(folder: Path, counts: Counter, itemsize: int) -> dict:
    """Return what meta.json states about the token files."""
    meta = {"documents": {split: counts[f"{split} documents"] for split in ("train", "val")}}
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        meta[f"{split}_tokens"] = path.stat().st_size // itemsize
        meta[f"{split}_sha256"] = sha256(path)
    meta["val_bytes"] = counts["val bytes"]
    if not all(meta["documents"].values()):  # split_few_documents has moved tokens
        size = counts["train bytes"] + counts["val bytes"]
        meta["val_bytes"] = size * meta["val_tokens"] // counts["tokens"]
    return meta


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------------
# The command


def build_parser() -> errors.Parser:
    """Return a parser whose results are the arguments of `prepare`."""
    parser = errors.Parser(prog="prepare.py", description=__doc__)
    add = parser.add_argument
    source_help = (
        "text, .jsonl, .jsonl.gz, .parquet, or folders of them (default: the library of the "
        "installed Python)"
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--source", dest="sources", nargs="+", metavar="FILE|DIR", help=source_help
    )
    dataset_help = "a data set of the Hub, or a folder, for the package datasets"
    sources.add_argument("--dataset", nargs="+", metavar=("NAME", "CONFIG"), help=dataset_help)
    add("--split", default="train", metavar="S", help="of the data set (default: train)")
    add("--column", default="text", metavar="C", help="of a row with the text (default: text)")
    name_help = "bytes, gpt2, a tokenizer.json or the folder of a model (default: bytes)"
    add("--tokenizer", dest="name", default="bytes", metavar="NAME", help=name_help)
    add("--out", required=True, type=Path, metavar="DIR", help="the token folder to create")
    fraction = errors.number(float, 1e-9, 1)
    fraction_help = "fraction of the documents kept for validation (default: 0.05)"
    add("--val_fraction", type=fraction, default=0.05, metavar="F", help=fraction_help)
    return parser


def main(argv: list[str]) -> int:
    def command() -> None:
        prepare(**vars(build_parser().parse_args(argv)))

    return errors.execute("prepare.py", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
