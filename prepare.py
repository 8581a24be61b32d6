"""Tokenize text into a folder that train.py reads: train.bin, val.bin and meta.json.

python prepare.py --source corpus/ --tokenizer gpt2 --out tokens/corpus
python prepare.py --source web/*.jsonl.gz --tokenizer SmolLM2-135M/ --out tokens/web
python prepare.py --dataset HuggingFaceFW/fineweb-edu sample-10BT --out tokens/edu

    sources -> documents, in pieces -> train or val, by a hash -> tokens -> a new folder
"""

import hashlib
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import GzipFile
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

import errors
import tokenizer
from errors import UsageError

# Characters that are read at a time, and that decide on the split of a document. A piece has at
# most 3 * PIECE: on a million spaces, tiktoken's regular expressions overflow their stack.
PIECE = 1 << 18
BATCH = 1 << 18  # characters that a thread encodes at a time
SEPARATOR = "<|endoftext|>"  # of the documents of a text file
# Most tokenizers split text between a letter or digit and a space or line break, so a cut there
# does not change the tokens.
LAST_WORD_END = re.compile(r".*[^\W_](?=[ \n])", re.DOTALL)
SAMPLE = 1_000_000  # bytes of text whose tokens are decoded again
# A tokenizer that loses a larger share of the text would win each comparison by bits per byte.
LOSES_LITTLE = 0.001
PROGRESS_INTERVAL = 10.0  # seconds

ROWS = (".jsonl", ".jsonl.gz", ".parquet")
TEXT = (
    *(".txt", ".md", ".rst", ".tex", ".py", ".c", ".h", ".cc", ".cpp", ".cu", ".hpp", ".rs"),
    *(".go", ".java", ".kt", ".scala", ".cs", ".swift", ".js", ".ts", ".tsx", ".rb", ".php"),
    *(".lua", ".jl", ".r", ".hs", ".ml", ".lean", ".sh", ".sql"),
)


class SourceError(ValueError):
    """A source cannot be read, or has no text where it should."""

    exit_status = 2


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# --------------------------------------------------------------------------------------------------
# Sources -> documents


class Piece(NamedTuple):
    text: str
    ends_document: bool


@contextmanager
def source_errors(source: str | Path) -> Iterator[None]:
    """Turn errors in reading a source into SourceErrors: those of packages may have any type."""
    try:
        yield
    except (SourceError, ImportError):
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise SourceError(f"{source} cannot be read: {type(error).__name__}: {reason}") from None


def find_files(sources: list[str] | None) -> list[Path]:
    """List the files of `sources` (None: the built-in set), in the same order on any machine.

    Raises SourceError, and OSError for a folder that cannot be read.
    """
    if sources is None:
        return builtin_files()
    files = []
    for source in map(Path, sources):
        if not source.exists():
            raise SourceError(f"{source} does not exist")
        if source.is_dir():
            files += files_in(source)
        elif source.suffix and not source.name.lower().endswith((*TEXT, *ROWS)):
            kinds = ", ".join((*ROWS, *TEXT[:4]))
            raise SourceError(f"{source}: {kinds} and source code are read: rename or convert it")
        else:
            files.append(source)
    return files


def files_in(folder: Path) -> list[Path]:
    """List the files to read in a folder, and print how many others there are.

    Hidden names are passed over, and so is README.md, which on the Hub describes the data.
    """

    def fail(error: OSError) -> None:  # without this, os.walk passes over what it cannot read
        raise error

    files, skipped = [], Counter()
    for place, subfolders, names in os.walk(folder, onerror=fail):
        subfolders[:] = [name for name in subfolders if name[0] != "."]
        for path in [Path(place, name) for name in names if name[0] != "."]:
            if path.name.lower().endswith((*TEXT, *ROWS)) and path.name != "README.md":
                files.append(path)
            else:
                skipped[path.suffix or path.name] += 1
    if skipped:
        kinds = ", ".join(f"{count:,} {suffix}" for suffix, count in skipped.most_common(9))
        print(f"{folder}: skipped {plural(skipped.total(), 'file')}: {kinds}")
    return sorted(files)


def builtin_files() -> list[Path]:
    """List the code and text files of the installed standard library: about 12 MB, no download."""
    suffixes = (".py", ".txt", ".html", ".rst")
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - left_out
        files += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(files)


@dataclass
class Sources:
    """Where documents come from: files, or a data set for the package datasets."""

    files: list[Path]
    dataset: list[str]  # its name, and perhaps that of a configuration
    split: str  # of the data set
    column: str  # of a row
    position: int = 0  # the bytes of the files that have been read

    def read(self) -> Iterator[Piece]:
        """Yield the documents, in pieces. Raises SourceError."""
        if self.dataset:
            yield from read_dataset(self.dataset, self.split, self.column)
        before = 0
        for path in self.files:
            with source_errors(path), open(path, "rb") as file:
                for piece in read_file(path, file, self.column):
                    self.position = before + file.tell()
                    yield piece
            before += path.stat().st_size


def read_dataset(dataset: list[str], split: str, column: str) -> Iterator[Piece]:
    """Yield the rows of a data set, in pieces, while it is downloaded. Raises SourceError."""
    import datasets

    name = " ".join(dataset)
    with source_errors(name):
        rows = datasets.load_dataset(*dataset, split=split, streaming=True)
        yield from cut_rows(rows, column, name)


def read_file(path: Path, file: BinaryIO, column: str) -> Iterator[Piece]:
    """Yield the documents of a file, in pieces. Raises SourceError."""
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

    table = parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 16)
    columns = [column] if column in table.schema_arrow.names else None
    for batch in table.iter_batches(256, columns=columns, use_threads=False):
        yield from batch.to_pylist()


def parse(line: str, column: str) -> object:
    """Return the value of a line: None if it is not JSON, and a blank row for a blank line."""
    try:
        return {column: ""} if line.isspace() else json.loads(line)
    except (ValueError, RecursionError):
        return None


def cut_rows(rows: Iterable[object], column: str, source: str | Path) -> Iterator[Piece]:
    """Yield the text of each row, in pieces. Raises SourceError if a row has no text."""
    for number, row in enumerate(rows, start=1):
        text = row.get(column) if isinstance(row, dict) else None
        if isinstance(text, str):
            yield from cut(text[i : i + PIECE] for i in range(0, len(text), PIECE))
            continue
        problem = "it is not a JSON object"
        if isinstance(row, dict):
            texts = [name for name, value in row.items() if isinstance(value, str)]
            problem = f"no text in {column}; --column names the column, and {texts or 'none'} fit"
        raise SourceError(f"{source}, line {number}: {problem}")


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


@dataclass
class Splitter:
    """Assigns documents to train or val, and counts them."""

    val_fraction: float
    documents: dict[str, int] = field(default_factory=lambda: {"train": 0, "val": 0})
    size: int = 0  # bytes of text
    val_size: int = 0
    sample: str = ""  # the first pieces, until they have SAMPLE bytes

    def assign(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        """Yield each piece with its split; leave out documents of white space."""
        split = None  # of the current document; None between documents
        for text, ends_document in pieces:
            if split is None and ends_document and not text.strip():
                continue
            if not text.isascii():  # JSON may have half of a pair, like "\ud83d": no character
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if split is None:
                split = choose_split(text[:PIECE].encode(), self.val_fraction)
                self.documents[split] += 1
            if self.size < SAMPLE:
                self.sample += text
            size = len(text.encode())
            self.size += size
            self.val_size += size if split == "val" else 0
            yield split, Piece(text, ends_document)
            if ends_document:
                split = None


def tokenize(
    sources: Sources,
    encoding: tokenizer.Encoding,
    dtype: np.dtype,
    folder: Path,
    val_fraction: float,
) -> Splitter:
    """Write train.bin and val.bin into `folder`; return the Splitter with its counts."""

    def encode(batch: list[tuple[str, Piece]]) -> list[tuple[str, np.ndarray]]:
        encoded = []
        for split, piece in batch:
            tokens = np.asarray(tokenizer.token_ids(encoding, piece.text), dtype)
            if piece.ends_document:
                tokens = np.append(tokens, dtype.type(encoding.eot_token))
            encoded.append((split, tokens))
        return encoded

    splitter = Splitter(val_fraction)
    began = reported = time.monotonic()
    count = 0  # tokens
    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "val.bin", "wb") as val,
        ThreadPoolExecutor(os.cpu_count()) as threads,
    ):
        batches = batch_up(splitter.assign(sources.read()))
        calls = (threads.submit(encode, batch) for batch in batches)  # in order
        started = deque(islice(calls, 2 * os.cpu_count()))
        while started:
            for split, tokens in started.popleft().result():
                (val if split == "val" else train).write(tokens)
                count += tokens.size
            started.extend(islice(calls, 1))
            if time.monotonic() > reported + PROGRESS_INTERVAL:
                reported = time.monotonic()
                documents = sum(splitter.documents.values())
                line = describe_progress(sources, documents, count, reported - began)
                print(line, file=sys.stderr)
    return splitter


def batch_up(assigned: Iterable[tuple[str, Piece]]) -> Iterator[list[tuple[str, Piece]]]:
    """Group pieces, since it is slower to hand short documents to threads one by one."""
    batch, size = [], 0
    for split, piece in assigned:
        batch.append((split, piece))
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def describe_progress(sources: Sources, documents: int, tokens: int, seconds: float) -> str:
    """For example "12,345 documents, 67,890,123 tokens, 4,526,008 tokens/s, 4.2 minutes left"."""
    line = f"{documents:,} documents, {tokens:,} tokens, {tokens / seconds:,.0f} tokens/s"
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
            for path in folder.iterdir():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            os.rename(folder, out)
    except OSError as error:
        if error.filename is None:  # a full disk
            raise OSError(error.errno, error.strerror, str(out)) from None
        raise


def fill_empty_split(folder: Path, val_fraction: float, itemsize: int) -> None:
    """If a split got no documents, move tokens from the other split, and print that."""
    train, val = folder / "train.bin", folder / "val.bin"
    if not train.stat().st_size:  # all documents were assigned to validation
        os.replace(val, train)
        val.touch()
    if val.stat().st_size:
        return
    tokens = train.stat().st_size // itemsize
    size = max(1, int(tokens * val_fraction)) * itemsize
    with open(train, "r+b") as head, open(val, "wb") as tail:
        head.seek(-size, os.SEEK_END)
        shutil.copyfileobj(head, tail)
        head.seek(-size, os.SEEK_END)
        head.truncate()
    print(f"too few documents to split: validation gets the last {val_fraction:.3g} of the tokens")


def prepare(
    sources: list[str] | None,
    out: Path,
    name: str = "bytes",
    val_fraction: float = 0.05,
    column: str = "text",
    end_token: str | None = None,
    dataset: list[str] | None = None,
    split: str = "train",
) -> None:
    """Tokenize `sources`, `dataset`, or without both the built-in files into a new token folder.

    `name` and `end_token` are passed to tokenizer.load_encoding, and `column` is the field of a row
    that has the text. The folder `out` is created complete or, after an error, not at all.
    Raises UsageError, SourceError, TokenizerError and OSError.
    """
    encoding = tokenizer.load_encoding(name, end_token)
    dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
    files = [] if dataset else find_files(sources)
    with new_folder(out) as folder:
        meta = {"tokenizer": name, "dtype": dtype.name, "vocab_size": encoding.n_vocab}
        if name not in ("bytes", "gpt2"):
            encoding.save(folder)
            meta["tokenizer"] = "tokenizer.json"
            meta["tokenizer_sha256"] = {path.name: sha256(path) for path in folder.iterdir()}
        found = Sources(files, dataset or [], split, column)
        splitter = tokenize(found, encoding, dtype, folder, val_fraction)
        if not splitter.size:
            raise SourceError(f"no text in {' '.join(dataset or map(str, files[:3]))}")
        fill_empty_split(folder, val_fraction, dtype.itemsize)
        meta |= describe_tokens(splitter, folder, dtype.itemsize)
        lost = tokenizer.lost_bytes(encoding, splitter.sample) / len(splitter.sample.encode())
        meta["lost"] = lost if lost > LOSES_LITTLE else 0.0
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
    print(
        f"{out}: {plural(sum(splitter.documents.values()), 'document')}, "
        f"{plural(splitter.size, 'byte')} of text, {meta['train_tokens']:,} tokens to train on, "
        f"{meta['val_tokens']:,} to validate, vocabulary {encoding.n_vocab:,} ({meta['tokenizer']})"
    )
    if lost:
        print(
            f"{100 * lost:.2g}% of the first bytes do not come back from their tokens"
            + "; bits per byte will not be comparable" * bool(meta["lost"])
        )


def describe_tokens(splitter: Splitter, folder: Path, itemsize: int) -> dict:
    """Return what meta.json states about the token files."""
    found = {"documents": splitter.documents}
    for split in ("train", "val"):
        path = folder / f"{split}.bin"
        found[f"{split}_tokens"] = path.stat().st_size // itemsize
        found[f"{split}_sha256"] = sha256(path)
    found["val_bytes"] = splitter.val_size
    if not all(splitter.documents.values()):  # fill_empty_split has moved tokens
        tokens = found["train_tokens"] + found["val_tokens"]
        found["val_bytes"] = splitter.size * found["val_tokens"] // tokens
    return found


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------------------------------
# The command


def build_parser() -> errors.Parser:
    """Return a parser whose results are the arguments of `prepare`."""
    parser = errors.Parser(prog="prepare.py", description=__doc__)
    add = parser.add_argument
    add(
        "--source",
        dest="sources",
        nargs="+",
        metavar="FILE|DIR",
        help="text, .jsonl, .jsonl.gz, .parquet, or folders of them (default: the library of the "
        "installed Python)",
    )
    add(
        "--dataset",
        nargs="+",
        metavar=("NAME", "CONFIG"),
        help="a data set of the Hub, or a folder, for the package datasets; --split names a split",
    )
    add("--split", default="train", metavar="S", help="of the data set (default: train)")
    add("--column", default="text", metavar="C", help="of a row with the text (default: text)")
    name_help = "bytes, gpt2, a tokenizer.json or the folder of a model (default: bytes)"
    add("--tokenizer", dest="name", default="bytes", metavar="NAME", help=name_help)
    end_help = (
        "token that ends a document (default: eos_token of the tokenizer_config.json beside a "
        "tokenizer.json, or else <|endoftext|>, <|end_of_text|> or </s>)"
    )
    add("--end_token", metavar="NAME", help=end_help)
    add("--out", required=True, type=Path, metavar="DIR", help="the token folder to create")
    fraction = errors.number(float, 1e-9, 1)
    fraction_help = "fraction of the documents kept for validation (default: 0.05)"
    add("--val_fraction", type=fraction, default=0.05, metavar="F", help=fraction_help)
    return parser


def run_command(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.sources and args.dataset:
        raise UsageError("--source and --dataset are two sources: prepare each into its own folder")
    prepare(**vars(args))


def main(argv: list[str]) -> int:
    return errors.execute("prepare.py", run_command, argv)


def exit_on_signal(number: int, frame) -> None:
    sys.exit(128 + number)  # an exception, so that the temporary folder is removed


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(main(sys.argv[1:]))
