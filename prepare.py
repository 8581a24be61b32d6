"""Tokenize text into a folder that train.py reads: train.bin, val.bin and meta.json.

python prepare.py --source corpus/ --tokenizer gpt2 --out tokens/corpus
python prepare.py --source web/*.jsonl.gz --tokenizer tokenizer.json --out tokens/web
"""

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import errors
from errors import UsageError, hold_lock
from text import tokenizer
from text.encode import Encoder, Splitter, tokenize
from text.sources import Corpus, SourceError, find_files, plural

# A tokenizer that loses a larger share of the text would win each comparison by bits per byte.
LOSES_LITTLE = 0.001

# --------------------------------------------------------------------------------------------------
# Token folders


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


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Yield a new folder beside `out`; remove it after an exception.

    Replaces a folder that a killed prepare.py left there. Raises UsageError if `out` exists or
    another prepare.py is writing it.
    """
    folder = out.with_name(f".{out.name}.unfinished")
    lock_file = out.with_name(f".{out.name}.lock")
    with hold_lock(lock_file):
        try:
            if os.path.lexists(out):
                raise UsageError(f"--out {out} exists: remove it or choose another folder")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            lock_file.unlink()


def prepare(
    sources: list[str] | None,
    out: Path,
    name: str = "bytes",
    val_fraction: float = 0.05,
    field: str = "text",
    end_token: str | None = None,
) -> None:
    """Tokenize `sources` (None: the built-in set) into the new token folder `out`.

    `name` and `end_token` are passed to tokenizer.load_encoding. `field` is the field of a row of
    JSON lines or parquet that contains the text. The folder is created complete or, after an error,
    not at all.
    Raises UsageError, SourceError, TokenizerError and OSError.
    """
    encoding = tokenizer.load_encoding(name, end_token)
    new_folder = Path(os.path.realpath(out))
    corpus = find_files(sources, field)
    with unfinished(new_folder) as folder:
        checksums = {}
        if name not in ("bytes", "gpt2"):
            encoding.save(folder)
            name = "tokenizer.json"
            checksums = {
                f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()
            }
        encoder = Encoder(encoding)
        splitter = tokenize(corpus, encoder, folder, val_fraction)
        if not splitter.size:
            found = corpus.describe_skipped() or plural(len(corpus.files), "file") + " without text"
            raise SourceError(f"the sources contain no text ({found})")
        fill_empty_split(folder, val_fraction, encoder.dtype.itemsize)
        lost = 0 if name == "bytes" else tokenizer.lost_bytes(encoding, splitter.beginning)
        meta = describe_tokens(name, encoder, splitter, folder)
        if checksums:
            meta["tokenizer_sha256"] = checksums
        share = lost / splitter.beginning_size
        meta["lost"] = share if share > LOSES_LITTLE else 0.0
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        for path in folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        os.rename(folder, new_folder)
    report(out, corpus, splitter, meta)
    if lost:
        print(
            f"{lost:,} of the first {splitter.beginning_size:,} bytes do not come back from their "
            f"tokens{'; bits per byte will not be comparable' if meta['lost'] else ''}"
        )


def describe_tokens(name: str, encoder: Encoder, splitter: Splitter, folder: Path) -> dict:
    """Return the contents of meta.json."""
    encoding = encoder.encoding
    meta = {
        "tokenizer": name,
        "dtype": encoder.dtype.name,
        "vocab_size": encoding.n_vocab,
        "documents": splitter.documents,
    }
    for split in ("train", "val"):
        with open(folder / f"{split}.bin", "rb") as tokens:
            meta[f"{split}_tokens"] = os.fstat(tokens.fileno()).st_size // encoder.dtype.itemsize
            meta[f"{split}_sha256"] = hashlib.file_digest(tokens, "sha256").hexdigest()
    meta["val_bytes"] = splitter.val_size
    if not all(splitter.documents.values()):  # fill_empty_split has moved tokens
        n_tokens = meta["train_tokens"] + meta["val_tokens"]
        meta["val_bytes"] = splitter.size * meta["val_tokens"] // n_tokens
    return meta


def report(out: Path, corpus: Corpus, splitter: Splitter, meta: dict) -> None:
    files = plural(len(corpus.files), "file")
    documents = plural(sum(splitter.documents.values()), "document")
    print(f"read {files}: {documents}, {plural(splitter.size, 'byte')} of text")
    if corpus.describe_skipped():
        print(f"skipped {corpus.describe_skipped()}")
    if corpus.first_broken:
        print(f"the first broken line is {corpus.first_broken}")
    if corpus.replaced:
        print(
            f"{plural(corpus.replaced, 'character')} became U+FFFD, the first in "
            f"{corpus.first_replaced}: bytes that are not UTF-8 (convert the file, for example "
            "with iconv -f latin1 -t utf-8), or halves of a surrogate pair, like \\ud83d in JSON"
        )
    train, val = meta["train_tokens"], meta["val_tokens"]
    print(
        f"{out}: {train:,} tokens to train on, {val:,} ({100 * val / (train + val):.3g}%) to "
        f"validate, vocabulary {meta['vocab_size']:,} ({meta['tokenizer']})"
    )


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
        help=".txt, .jsonl, .jsonl.gz or .parquet, or folders of them (default: the library of the "
        "installed Python)",
    )
    field_help = "field of a row with the text (default: text)"
    add("--field", default="text", metavar="NAME", help=field_help)
    name_help = "bytes, gpt2 or the path of a tokenizer.json (default: bytes)"
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
    """Run `prepare`; after Ctrl-C or SIGTERM, print that nothing was created."""
    args = build_parser().parse_args(argv)
    if args.sources and "" in args.sources:
        raise UsageError("--source '' is empty: name a file or a folder")
    try:
        prepare(**vars(args))
    except (KeyboardInterrupt, SystemExit):
        print(f"prepare.py: stopped; {args.out} was not created", file=sys.stderr, flush=True)
        raise


def main(argv: list[str]) -> int:
    return errors.execute("prepare.py", run_command, argv)


def exit_on_signal(number: int, frame) -> None:
    sys.exit(128 + number)  # an exception, so that the unfinished folder is removed


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, exit_on_signal)
    sys.exit(main(sys.argv[1:]))
