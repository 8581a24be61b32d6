"""Text -> a token folder that train.py reads.

    python prepare.py --source FILE|DIR ... --tokenizer bytes|gpt2|PATH.tiktoken --out DIR

A token folder holds `train.bin` and `val.bin` (token ids, little-endian, no header) and
`meta.json` (the tokenizer, the dtype, counts and checksums).
"""

import argparse
import errno
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import tiktoken

import cli
import tokenizer
from cli import UsageError
from lock import try_lock
from tokenizer import END_OF_TEXT, TokenizerError

# Characters read and encoded at a time, so that memory stays flat for a document of any size. A
# chunk has at most twice as many: tiktoken's regular expressions overflow their stack on about a
# million white-space characters in a row.
CHUNK = 1 << 18
# Between a letter or digit and a space or line break every tokenizer's pattern ends a piece, so a
# cut there does not change the tokens.
LAST_WORD_END = re.compile(r".*[^\W_](?=[ \n])", re.DOTALL)
# A file with a NUL byte among its first 8 KiB is binary.
PROBE = 8192


# --------------------------------------------------------------------------------------------------
# Sources


def builtin_sources() -> list[Path]:
    """List the installed Python's own sources and documentation: about 12 MB, without a network."""
    suffixes = (".py", ".txt", ".html", ".rst")
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = set(subfolders) - left_out
        files += [Path(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(files)


def unreadable(path: str | Path, error: OSError) -> UsageError:
    link = f", a link to {os.readlink(path)}," if os.path.islink(path) else ""
    return UsageError(
        f"--source {path}{link} cannot be read ({error.strerror}): correct that, or name sources "
        "without it"
    )


def walk(source: Path) -> Iterator[Path]:
    """Yield what is in a folder and its subfolders. Raises UsageError where one is unreadable."""

    def fail(error: OSError) -> None:  # os.walk passes over such folders otherwise
        raise unreadable(error.filename, error)

    for folder, subfolders, names in os.walk(source, onerror=fail):
        for name in names:
            yield Path(folder, name)
        for name in subfolders:
            if Path(folder, name).is_symlink():  # os.walk does not follow it
                yield Path(folder, name)


def classify(path: Path) -> str:
    """Return what is at `path`; only a "text file" is read. Raises UsageError."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return "linked folder"
        if not stat.S_ISREG(mode):
            return "special file"  # a pipe, a socket or a device
        with open(path, "rb") as file:
            beginning = file.read(PROBE)
    except OSError as error:
        raise unreadable(path, error) from None
    if not beginning:
        return "empty file"
    return "binary file" if b"\0" in beginning else "text file"


def classify_named(path: Path, takes_binary: bool) -> str:
    """Return what a file that --source names is read as. Raises UsageError."""
    kind = classify(path)
    if kind == "special file":
        raise UsageError(f"--source {path} is neither a file nor a folder")
    if kind != "binary file":
        return kind
    if not takes_binary:
        raise UsageError(
            f"--source {path} is binary (a NUL byte in its first {PROBE:,}): leave it out; only "
            "--tokenizer bytes reads binary files"
        )
    return "text file"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@dataclass
class Corpus:
    """The files to read, in order, and what was skipped."""

    files: list[Path] = field(default_factory=list)
    size: int = 0  # of `files`, in bytes
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_size: int = 0  # bytes

    def add(self, path: Path, kind: str) -> None:
        """Add a text file, or count another kind as skipped."""
        size = path.stat().st_size
        if kind == "text file":
            self.files.append(path)
            self.size += size
        else:
            self.skipped[kind] += 1
            self.skipped_size += size if kind == "binary file" else 0

    def describe_skipped(self) -> str:
        """Such as "1 binary file, 2 empty files (300 bytes)"."""
        counts = [plural(count, kind) for kind, count in sorted(self.skipped.items())]
        size = f" ({plural(self.skipped_size, 'byte')})" if self.skipped_size else ""
        return ", ".join(counts) + size


def find_files(sources: list[str] | None, takes_binary: bool) -> Corpus:
    """List the files under `sources` (None: the built-in set), sorted: alike on every machine.

    Raises UsageError, also where any of them cannot be read.
    """
    corpus = Corpus()
    for path in builtin_sources() if sources is None else ():
        corpus.add(path, classify(path))
    for source in map(Path, sources or ()):
        if os.path.isdir(source):
            for path in sorted(walk(source)):
                corpus.add(path, classify(path))
        else:
            corpus.add(source, classify_named(source, takes_binary))
    if not corpus.files:
        found = corpus.describe_skipped() or "no files"
        raise UsageError(f"--source {' '.join(sources or ())} holds no text ({found})")
    return corpus


class Chunk(NamedTuple):
    text: str
    ends_document: bool


def read_chunks(path: Path) -> Iterator[Chunk]:
    """Yield the text of a file in chunks. A document is the file, or what END_OF_TEXT separates.

    Bytes that are not UTF-8 are read as surrogates: the bytes tokenizer restores them, the others
    see U+FFFD.
    """
    rest = ""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        while text := file.read(CHUNK):
            *documents, rest = (rest + text).split(END_OF_TEXT)
            for document in documents:
                yield Chunk(document, ends_document=True)
            if len(rest) >= CHUNK:
                # Cut at the end of a word, else of a line. Without either, keep enough of the end
                # that a separator is never cut in two.
                word = LAST_WORD_END.match(rest)
                cut = word.end() if word else rest.rfind("\n") + 1
                cut = cut or max(0, len(rest) - len(END_OF_TEXT))
                yield Chunk(rest[:cut], ends_document=False)
                rest = rest[cut:]
    yield Chunk(rest, ends_document=True)


# --------------------------------------------------------------------------------------------------
# Token folders


def choose_split(beginning: bytes, val_fraction: float) -> str:
    """Assign a document to a split by the hash of its beginning.

    The order of the files does not matter, and copies of a document get the same split.
    """
    key = int.from_bytes(hashlib.blake2b(beginning, digest_size=8).digest())
    return "val" if key < val_fraction * 2**64 else "train"


class SplitWriter:
    """Writes the tokens of documents to train.bin or val.bin."""

    def __init__(
        self, encoding: tiktoken.Encoding, val_fraction: float, train: BinaryIO, val: BinaryIO
    ):
        self.encoding = encoding
        self.dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
        self.val_fraction = val_fraction
        self.files = {"train": train, "val": val}
        self.split: str | None = None  # of the current document; None between documents
        self.documents = {"train": 0, "val": 0}
        self.blank_documents = 0  # white space alone: not written
        self.size = 0  # bytes of text written

    def write(self, chunk: Chunk) -> None:
        """Append the tokens of a chunk."""
        if self.split is None and not chunk.text.strip():
            # A document does not begin with white space alone.
            self.blank_documents += chunk.ends_document and chunk.text != ""
            return
        raw = chunk.text.encode("utf-8", "surrogateescape")
        if self.split is None:
            self.split = choose_split(raw, self.val_fraction)
            self.documents[self.split] += 1
        if self.encoding.name == "bytes":  # encode_ordinary would lose the bytes that are not UTF-8
            ids = np.frombuffer(raw, np.uint8)
        else:
            ids = self.encoding.encode_ordinary(chunk.text)
        file = self.files[self.split]
        file.write(np.asarray(ids, self.dtype).tobytes())
        self.size += len(raw)
        if chunk.ends_document:
            file.write(np.asarray(self.encoding.eot_token, self.dtype).tobytes())
            self.split = None


def tokenize(
    corpus: Corpus,
    encoding: tiktoken.Encoding,
    folder: Path,
    val_fraction: float,
    say: Callable[[str], None],
) -> SplitWriter:
    """Write train.bin and val.bin into `folder`; return their writer, with its counts."""
    last_said = time.monotonic()
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        writer = SplitWriter(encoding, val_fraction, train, val)
        for path in corpus.files:
            for chunk in read_chunks(path):
                writer.write(chunk)
                if time.monotonic() - last_said > 2:
                    last_said = time.monotonic()
                    megabytes = f"{writer.size / 1e6:,.1f} of {corpus.size / 1e6:,.1f} MB"
                    say(f"tokenizing: {megabytes}, {writer.size / max(corpus.size, 1):.0%}")
    return writer


def fill_empty_split(
    train: Path, val: Path, val_fraction: float, itemsize: int, say: Callable[[str], None]
) -> None:
    """Give both splits tokens where a corpus has too few documents, and say so."""
    if not train.stat().st_size:  # the only documents fell to validation
        os.replace(val, train)
        val.touch()
    if not train.stat().st_size:
        raise UsageError("the sources hold no text but white space")
    if val.stat().st_size:
        return
    tokens = train.stat().st_size // itemsize
    move_tail(train, val, max(1, int(tokens * val_fraction)) * itemsize)
    last = f"the last {percent(val_fraction)} of the tokens"
    say(f"too few documents to split: validation gets {last}")


def percent(fraction: float) -> str:
    return f"{100 * fraction:.3g}%"


def move_tail(source: Path, target: Path, size: int) -> None:
    """Move the last `size` bytes of one file to another."""
    with open(source, "r+b") as head, open(target, "wb") as tail:
        head.seek(-size, os.SEEK_END)
        shutil.copyfileobj(head, tail)
        head.seek(-size, os.SEEK_END)
        head.truncate()


def check_out(out: Path, sources: list[str]) -> None:
    """Raise UsageError unless `out`, an absolute path, can become the new token folder."""
    refuse_existing(out)
    parent = next(parent for parent in out.parents if parent.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UsageError(f"--out {out}: {parent} is not a folder that can be written to")
    if os.path.ismount(out) or out == Path.cwd():
        raise UsageError(f"--out {out} is in use: name a new folder in it")
    for source in sources:
        if Path(os.path.realpath(source)) in (out, *out.parents):
            raise UsageError(
                f"--out {out} is in --source {source}, where it would be read as text next time: "
                "choose a folder outside it"
            )


def refuse_existing(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"--out {out} exists: remove it or choose another folder")


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Yield a new folder beside `out`, which is removed after an exception.

    What a killed prepare.py has left there is replaced. Raises UsageError while another writes.
    """
    folder = out.with_name(f".{out.name}.unfinished")
    lock_file = out.with_name(f".{out.name}.lock")
    missing = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = try_lock(lock_file)
    if lock is None:
        raise UsageError(f"another process is writing --out {out}: wait until it has finished")
    try:
        refuse_existing(out)  # another prepare.py may just have finished it
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                f"no space left on the disk of --out {out}, and nothing was kept: free some, or "
                "choose another disk"
            ) from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock_file.unlink()
        os.close(lock)
        with suppress(OSError):  # not empty
            for parent in missing:
                parent.rmdir()


def prepare(
    sources: list[str] | None,
    out: Path,
    name: str = "bytes",
    val_fraction: float = 0.05,
    say: Callable[[str], None] = print,
    pattern: str | None = None,
) -> None:
    """Tokenize `sources` (None: the built-in set) into the new token folder `out`.

    `name` and `pattern` are those of tokenizer.load. The folder appears complete or, after an
    error, not at all. Raises UsageError, TokenizerError and OSError.
    """
    encoding = tokenizer.load(name, pattern)
    new_folder = Path(os.path.realpath(out))
    check_out(new_folder, sources or [])
    corpus = find_files(sources, takes_binary=name == "bytes")
    with unfinished(new_folder) as folder:
        if name not in ("bytes", "gpt2"):
            name = keep_tokenizer(name, pattern or tokenizer.pattern_of(name), folder, say)
        writer = tokenize(corpus, encoding, folder, val_fraction, say)
        itemsize = writer.dtype.itemsize
        fill_empty_split(folder / "train.bin", folder / "val.bin", val_fraction, itemsize, say)
        meta = {
            "tokenizer": name,
            "dtype": writer.dtype.name,
            "vocab_size": encoding.n_vocab,
            "documents": writer.documents,
        }
        for split in ("train", "val"):
            meta |= measure(folder / f"{split}.bin", itemsize)
        with open(folder / "meta.json", "w") as file:
            file.write(json.dumps(meta, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.rename(folder, new_folder)
    say_what_was_read(corpus, writer, say)
    say_what_was_written(out, meta, val_fraction, say)


def keep_tokenizer(name: str, pattern: str, folder: Path, say: Callable[[str], None]) -> str:
    """Copy a .tiktoken file into the token folder; return its name there, with the pattern."""
    say(f"{name} is used with the pattern of {pattern} (--pattern names another)")
    return shutil.copyfile(name, folder / f"tokenizer.{pattern}.tiktoken").name


def measure(file: Path, itemsize: int) -> dict:
    """Return the fields of meta.json on a token file, once it is safely on the disk."""
    with open(file, "rb") as tokens:
        os.fsync(tokens.fileno())
        return {
            f"{file.stem}_tokens": os.fstat(tokens.fileno()).st_size // itemsize,
            f"{file.stem}_sha256": hashlib.file_digest(tokens, "sha256").hexdigest(),
        }


def say_what_was_read(corpus: Corpus, writer: SplitWriter, say: Callable[[str], None]) -> None:
    files = plural(len(corpus.files), "file")
    documents = plural(sum(writer.documents.values()), "document")
    say(f"read {files}: {documents}, {plural(writer.size, 'byte')} of text")
    if writer.blank_documents:
        corpus.skipped["blank document"] = writer.blank_documents
    if corpus.skipped:
        say(f"skipped {corpus.describe_skipped()}")


def say_what_was_written(
    out: Path, meta: dict, val_fraction: float, say: Callable[[str], None]
) -> None:
    share = meta["val_tokens"] / (meta["train_tokens"] + meta["val_tokens"])
    say(
        f"{out}: {meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} "
        f"({percent(share)}) to validate, vocabulary {meta['vocab_size']:,} ({meta['tokenizer']})"
    )
    if abs(share - val_fraction) > val_fraction / 2:
        say(
            f"validation has {percent(share)} of the tokens, not {percent(val_fraction)}: whole "
            "documents are drawn, and these are few or of unequal length; separate the parts of "
            "long ones with <|endoftext|>, or change --val_fraction"
        )


# --------------------------------------------------------------------------------------------------
# The command

EXAMPLES = """examples:
  python prepare.py --source corpus/ --tokenizer gpt2 --out tokens/corpus
  python prepare.py --source a.txt b.txt --tokenizer o200k_base.tiktoken --out tokens/mine
"""


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="prepare.py",
        description="Turn text into a token folder that train.py reads.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--source",
        nargs="+",
        metavar="FILE|DIR",
        help="text files, or folders, read in sorted order; a document is a file, or "
        "a part of one that <|endoftext|> ends (default: the library of the installed Python)",
    )
    add(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, gpt2 or PATH.tiktoken (default: bytes)",
    )
    add(
        "--pattern",
        choices=tokenizer.PATTERNS,
        help="how text is cut before merging, with PATH.tiktoken (default: the one in the file's "
        "name, as in o200k_base.tiktoken, else llama3)",
    )
    add(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="the token folder to create",
    )
    add(
        "--val_fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction of the documents kept for validation (default: 0.05)",
    )
    return parser


def run_command(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if not 0 < args.val_fraction < 1:
        raise UsageError(f"--val_fraction {args.val_fraction} must be between 0 and 1")
    if args.source and "" in args.source:
        raise UsageError("--source '' is empty: name a file or a folder")
    try:
        prepare(args.source, args.out, args.tokenizer, args.val_fraction, pattern=args.pattern)
    except (KeyboardInterrupt, SystemExit):
        print(f"prepare.py: stopped; {args.out} was not created", file=sys.stderr, flush=True)
        raise


def main(argv: list[str]) -> int:
    return cli.run("prepare.py", lambda: run_command(argv), usage=(TokenizerError,))


def exit_on_signal(number: int, frame) -> None:
    sys.exit(128 + number)  # an exception, so that the unfinished folder is removed


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(main(sys.argv[1:]))
