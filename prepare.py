"""Text -> a token folder that train.py reads.

    python prepare.py --source FILE|DIR|GLOB|- ... --tokenizer bytes|gpt2|PATH --out DIR
    python prepare.py show DIR

A token folder holds `train.bin` and `val.bin` (token ids, little-endian, no header) and
`meta.json` (the tokenizer, the dtype, counts and checksums).
"""

import argparse
import base64
import errno
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken

from runtime import cli
from runtime.cli import UsageError
from runtime.lock import try_lock
from text import tokenizer
from text.sources import STDIN, Corpus, SourceError, find_files, plural
from text.tokenizer import TokenizerError

BATCH = 1 << 18  # characters that a thread encodes at a time
SHOWN = 100  # tokens of a document that `show` prints

# --------------------------------------------------------------------------------------------------
# Token folders


def choose_split(beginning: bytes, val_fraction: float) -> str:
    """Assign a document to a split by the hash of its beginning.

    The order of the files does not matter, and copies of a document get the same split.
    """
    key = int.from_bytes(hashlib.blake2b(beginning, digest_size=8).digest())
    return "val" if key < val_fraction * 2**64 else "train"


class Piece(NamedTuple):
    split: str
    text: str
    ends_document: bool


class Splitter:
    """Assigns documents to train or val, and counts them."""

    def __init__(self, corpus: Corpus, val_fraction: float):
        self.corpus = corpus
        self.val_fraction = val_fraction
        self.documents = {"train": 0, "val": 0}
        self.size = 0  # bytes of text

    def pieces(self) -> Iterator[Piece]:
        split = None  # of the current document; None between documents
        for chunk in self.corpus.read():
            if split is None and not chunk.text.strip():
                # A document does not begin with white space alone.
                if chunk.ends_document and chunk.text:
                    self.corpus.skipped["blank document"] += 1
                continue
            raw = chunk.text.encode("utf-8", "surrogateescape")
            if split is None:
                split = choose_split(raw, self.val_fraction)
                self.documents[split] += 1
            self.size += len(raw)
            yield Piece(split, *chunk)
            if chunk.ends_document:
                split = None


class Encoder:
    """Encodes pieces of text to the bytes of a token file."""

    def __init__(self, encoding: tiktoken.Encoding):
        self.encoding = encoding
        self.dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
        self.end = self.to_bytes([encoding.eot_token])

    def to_bytes(self, ids) -> bytes:
        return np.asarray(ids, self.dtype).tobytes()

    def ids(self, text: str) -> np.ndarray:
        if self.encoding.name == "bytes":  # tiktoken would lose the bytes that are not UTF-8
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        # encode_ordinary, but without a Python list, during which no other thread could run
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def __call__(self, pieces: list[Piece]) -> dict[str, bytes]:
        """Return what comes next in the token file of each split."""
        tokens = {"train": bytearray(), "val": bytearray()}
        for piece in pieces:
            tokens[piece.split] += self.to_bytes(self.ids(piece.text))
            if piece.ends_document:
                tokens[piece.split] += self.end
        return tokens


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces, since handing over each short document by itself would take longer."""
    batch = []
    size = 0  # characters
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    yield batch


def map_in_order(function: Callable, items: Iterable, num_threads: int) -> Iterator:
    """Call `function` on each item in threads; yield the results in order.

    Few items are taken ahead, so that memory stays flat.
    """
    ahead = deque()
    with ThreadPoolExecutor(num_threads) as pool:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * num_threads:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()


def tokenize(
    corpus: Corpus,
    encoder: Encoder,
    folder: Path,
    val_fraction: float,
    num_threads: int,
    say: Callable[[str], None],
) -> Splitter:
    """Write train.bin and val.bin into `folder`; return the counts."""
    began = last_said = time.monotonic()
    splitter = Splitter(corpus, val_fraction)
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for tokens in map_in_order(encoder, batches(splitter.pieces()), num_threads):
            train.write(tokens["train"])
            val.write(tokens["val"])
            if time.monotonic() - last_said > 2:
                last_said = time.monotonic()
                say(describe_progress(corpus, splitter.size, last_said - began))
    return splitter


def describe_progress(corpus: Corpus, size: int, seconds: float) -> str:
    """Such as "tokenizing: 52.4 MB of text, 13.1 MB/s, 25%, 0:00:12 left"."""
    line = f"tokenizing: {size / 1e6:,.1f} MB of text, {size / 1e6 / seconds:,.1f} MB/s"
    if STDIN in corpus.files or not corpus.position:
        return line
    share = min(1, corpus.position / corpus.size)
    left = timedelta(seconds=round(seconds / share - seconds))
    return f"{line}, {share:.0%}, {left} left"


def fill_empty_split(
    train: Path, val: Path, val_fraction: float, itemsize: int, say: Callable[[str], None]
) -> None:
    """Give both splits tokens where a corpus has too few documents, and say so."""
    if not train.stat().st_size:  # the only documents fell to validation
        os.replace(val, train)
        val.touch()
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
        pattern = os.path.realpath(source)
        folders = map(str, (out, *out.parents))
        if any(folder == pattern or fnmatch(folder, pattern) for folder in folders):
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
    field: str = "text",
    num_threads: int = 1,
    train_vocab_size: int | None = None,
) -> None:
    """Tokenize `sources` (None: the built-in set) into the new token folder `out`.

    `name` and `pattern` are those of tokenizer.load_encoding; `field` is that of JSON lines and
    parquet; `train_vocab_size` trains a tokenizer of that size on the sources instead. The folder
    appears complete or, after an error, not at all.
    Raises UsageError, SourceError, TokenizerError and OSError.
    """
    trains = train_vocab_size is not None
    encoding = None if trains else tokenizer.load_encoding(name, pattern)
    new_folder = Path(os.path.realpath(out))
    check_out(new_folder, sources or [])
    takes_binary = name == "bytes" and not trains
    corpus = find_files(sources, takes_binary, field)
    with unfinished(new_folder) as folder:
        if trains:
            # Another corpus, so that what is skipped does not count twice
            same = find_files(sources, takes_binary, field)
            name = train_tokenizer(same, train_vocab_size, folder, say)
            encoding = tokenizer.load_encoding(str(folder / name))
        elif name not in ("bytes", "gpt2"):
            name = keep_tokenizer(name, pattern, folder, say)
        encoder = Encoder(encoding)
        splitter = tokenize(corpus, encoder, folder, val_fraction, num_threads, say)
        if not splitter.size:
            raise SourceError(f"the sources hold no text ({corpus.describe_skipped()})")
        itemsize = encoder.dtype.itemsize
        fill_empty_split(folder / "train.bin", folder / "val.bin", val_fraction, itemsize, say)
        meta = {
            "tokenizer": name,
            "dtype": encoder.dtype.name,
            "vocab_size": encoding.n_vocab,
            "documents": splitter.documents,
        }
        for split in ("train", "val"):
            meta |= measure(folder / f"{split}.bin", itemsize)
        write_meta(folder / "meta.json", meta)
        os.rename(folder, new_folder)
    say_what_was_read(corpus, splitter, say)
    say_what_was_written(out, meta, val_fraction, say)


def write_meta(path: Path, meta: dict) -> None:
    with open(path, "w") as file:
        file.write(json.dumps(meta, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def train_tokenizer(
    corpus: Corpus, vocab_size: int, folder: Path, say: Callable[[str], None]
) -> str:
    """Write a tokenizer trained on a corpus into the token folder; return its name there."""
    say(f"training a vocabulary of {vocab_size:,} on {corpus.size / 1e6:,.1f} MB")
    file = folder / "tokenizer.llama3.tiktoken"
    texts = (chunk.text for chunk in corpus.read())
    file.write_bytes(train_ranks(texts, vocab_size))
    return file.name


def train_ranks(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a .tiktoken file of byte-pair merges, trained on `texts` with the pattern llama3.

    It has `vocab_size` tokens with end-of-text, or fewer if there is nothing left to merge. The
    same texts give the same file. Raises TokenizerError.
    """
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise TokenizerError(
            "--train_tokenizer needs the tokenizers package: pip install tokenizers"
        ) from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Merges take the square of a piece's length: it is bounded, and shorter ones are as in LLAMA3.
    pattern = tokenizer.LLAMA3.replace("+", "{1,1000}").replace("*", "{0,1000}")
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    lines = []
    for text, rank in sorted(model.get_vocab().items(), key=lambda token: token[1]):
        lines.append(base64.b64encode(tokenizer.to_bytes(text)) + f" {rank}\n".encode())
    return b"".join(lines)


def keep_tokenizer(name: str, pattern: str | None, folder: Path, say: Callable[[str], None]) -> str:
    """Copy a tokenizer's file into the token folder; return its name there.

    The name keeps what the file does not say: the pattern, or that it is Llama 3's.
    """
    suffix = Path(name).suffix
    if suffix not in tokenizer.SELF_CONTAINED:
        pattern = pattern or tokenizer.pattern_of(name)
        say(f"{name} is used with the pattern of {pattern} (--pattern names another)")
        suffix = f".{pattern}.tiktoken"
    return shutil.copyfile(name, folder / f"tokenizer{suffix}").name


def measure(file: Path, itemsize: int) -> dict:
    """Return the fields of meta.json on a token file, once it is safely on the disk."""
    with open(file, "rb") as tokens:
        os.fsync(tokens.fileno())
        return {
            f"{file.stem}_tokens": os.fstat(tokens.fileno()).st_size // itemsize,
            f"{file.stem}_sha256": hashlib.file_digest(tokens, "sha256").hexdigest(),
        }


def say_what_was_read(corpus: Corpus, splitter: Splitter, say: Callable[[str], None]) -> None:
    files = plural(len(corpus.files), "file")
    documents = plural(sum(splitter.documents.values()), "document")
    say(f"read {files}: {documents}, {plural(splitter.size, 'byte')} of text")
    if corpus.skipped:
        say(f"skipped {corpus.describe_skipped()}")
    if corpus.first_broken:
        say(f"the first broken line is {corpus.first_broken}")
    if corpus.replaced:
        say(
            f"{plural(corpus.replaced, 'byte')} not in UTF-8 became U+FFFD, the first in "
            f"{corpus.first_replaced}: convert such files, as with iconv -f latin1 -t utf-8"
        )


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
# What a token folder holds


def show(path: Path) -> None:
    """Print counts, lengths, and the beginnings of a few documents. Raises DataError."""
    from data import open_folder  # imports torch, which takes longer than preparing a small corpus

    folder = open_folder(path)
    name = folder.tokenizer_name or "unknown"
    print(f"{path}: tokenizer {name}, vocabulary {folder.vocab_size:,}, {folder.dtype.name}")
    encoding = tokenizer.load_encoding(folder.tokenizer) if folder.tokenizer else None
    for split in ("train", "val"):
        ids = folder.tokens(split)
        print(f"{split}: {plural(len(ids), 'token')}{describe_documents(ids, encoding)}")
    for start in document_starts(folder.tokens("train"), encoding):
        ids = folder.tokens("train")[start : start + SHOWN]
        print(f"\n--- train, from token {start:,}\n{printable(ids, encoding)}")


def describe_documents(ids: np.ndarray, encoding: tiktoken.Encoding | None) -> str:
    """Count what end-of-text ends, block by block; what follows the last one is not counted."""
    if encoding is None:
        return ""
    count = longest = 0
    shortest = len(ids)
    last_end = -1
    for start in range(0, len(ids), 1 << 20):
        ends = start + np.flatnonzero(ids[start : start + (1 << 20)] == encoding.eot_token)
        if not len(ends):
            continue
        lengths = np.diff(ends, prepend=last_end) - 1
        count += len(ends)
        shortest = min(shortest, lengths.min())
        longest = max(longest, lengths.max())
        last_end = ends[-1]
    if not count:
        return " of one document"
    mean = (last_end + 1) / count - 1
    lengths = f"{shortest:,} to {longest:,} tokens each, {mean:,.1f} on average"
    return f", {plural(count, 'document')} of {lengths}"


def document_starts(ids: np.ndarray, encoding: tiktoken.Encoding | None) -> list[int]:
    """Find the documents that begin next after 0, 1/3 and 2/3 of the tokens."""
    starts = {0}
    for position in (len(ids) // 3, 2 * len(ids) // 3):
        window = ids[position : position + (1 << 20)]
        ends = np.flatnonzero(window == encoding.eot_token) if encoding else []
        start = position + int(ends[0]) + 1 if len(ends) else position
        if start < len(ids):
            starts.add(start)
    return sorted(starts)


def printable(ids: np.ndarray, encoding: tiktoken.Encoding | None) -> str:
    """Decode up to the end of a document, without what would control a terminal."""
    if encoding is None:
        return " ".join(map(str, ids))
    ends = np.flatnonzero(ids == encoding.eot_token)
    shown = ids[: ends[0]] if len(ends) else ids
    text = encoding.decode(shown.tolist()) + ("" if len(ends) else " ...")
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


# --------------------------------------------------------------------------------------------------
# The command

EXAMPLES = """examples:
  python prepare.py --source corpus/ --tokenizer gpt2 --out tokens/corpus
  python prepare.py --source 'web/*.jsonl.gz' --tokenizer o200k_base.tiktoken --out tokens/web
  curl -L URL | python prepare.py --source - --out tokens/web
  python prepare.py show tokens/web    counts, lengths and a few documents
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
        metavar="FILE|DIR|GLOB|-",
        help="text or .jsonl, also in .gz or .zst, .parquet, folders, quoted globs, in sorted "
        "order, and - for standard input; a document is a JSON line, a row, a text file, or a part "
        "of one that <|endoftext|> ends (default: the library of the installed Python)",
    )
    field_help = (
        "field of JSON lines, column of parquet, with the text; a.b if nested (default: text)"
    )
    add("--field", default="text", metavar="NAME", help=field_help)
    add_tokenizer_flags(parser)
    add("--out", required=True, type=Path, metavar="DIR", help="the token folder to create")
    add(
        "--val_fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction of the documents kept for validation (default: 0.05)",
    )
    add(
        "--num_threads",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="threads that encode; the tokens do not depend on it (default: all cores)",
    )
    return parser


def add_tokenizer_flags(parser: cli.Parser) -> None:
    tokenizers = parser.add_mutually_exclusive_group()
    tokenizers.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, gpt2, PATH.tiktoken, Llama 3's tokenizer.model or a tokenizer.json of "
        "byte-level BPE (default: bytes)",
    )
    tokenizers.add_argument(
        "--train_tokenizer",
        type=int,
        metavar="SIZE",
        help="train a vocabulary of SIZE tokens on the sources; needs the tokenizers package",
    )
    parser.add_argument(
        "--pattern",
        choices=tokenizer.PATTERNS,
        help="how text is cut before merging, with PATH.tiktoken (default: the one in the file's "
        "name, as in o200k_base.tiktoken, else llama3)",
    )


def check_train_tokenizer(args: argparse.Namespace) -> None:
    if args.train_tokenizer < 257:
        raise UsageError(
            f"--train_tokenizer {args.train_tokenizer} must be at least 257: the bytes and "
            "end-of-text"
        )
    if "-" in (args.source or ()):
        raise UsageError(
            "--train_tokenizer reads the sources twice, which --source - cannot: name files"
        )
    if args.pattern:
        raise UsageError("--pattern is for --tokenizer PATH.tiktoken, not --train_tokenizer")


def run_command(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if not 0 < args.val_fraction < 1:
        raise UsageError(f"--val_fraction {args.val_fraction} must be between 0 and 1")
    if args.num_threads < 1:
        raise UsageError(f"--num_threads {args.num_threads} must be at least 1")
    if args.source and "" in args.source:
        raise UsageError("--source '' is empty: name a file or a folder")
    if args.train_tokenizer is not None:
        check_train_tokenizer(args)
    try:
        prepare(
            args.source,
            args.out,
            args.tokenizer,
            args.val_fraction,
            pattern=args.pattern,
            field=args.field,
            num_threads=args.num_threads,
            train_vocab_size=args.train_tokenizer,
        )
    except (KeyboardInterrupt, SystemExit):
        print(f"prepare.py: stopped; {args.out} was not created", file=sys.stderr, flush=True)
        raise


def run_show(argv: list[str]) -> None:
    parser = cli.Parser(prog="prepare.py show", description="Show what a token folder holds.")
    parser.add_argument("folder", type=Path, metavar="DIR")
    show(parser.parse_args(argv[1:]).folder)


def main(argv: list[str]) -> int:
    command = run_show if argv[:1] == ["show"] else run_command
    return cli.run("prepare.py", lambda: command(argv))


def exit_on_signal(number: int, frame) -> None:
    sys.exit(128 + number)  # an exception, so that the unfinished folder is removed


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(main(sys.argv[1:]))
