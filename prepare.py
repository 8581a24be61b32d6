"""Text -> a token folder that train.py reads.

    python prepare.py --source FILE|DIR ... --tokenizer bytes|gpt2|PATH.tiktoken --out DIR

A token folder holds `train.bin` and `val.bin` (token ids, little-endian, no header) and
`meta.json` (the tokenizer, the dtype, counts and checksums).
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

import tokenizer
from data import DataError
from tokenizer import END_OF_TEXT, TokenizerError

# Characters read and encoded at a time, so that memory stays flat for a document of any size.
CHUNK = 1 << 20


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


def source_files(sources: list[str]) -> list[Path]:
    """List the non-empty files under `sources`, sorted: the same corpus on every machine."""
    files = []
    for source in map(Path, sources):
        if not source.exists():
            raise DataError(f"--source {source}: no such file or directory")
        found = [source] if source.is_file() else sorted(source.rglob("*"))
        files += [path for path in found if path.is_file() and path.stat().st_size]
    if not files:
        raise DataError(f"--source {' '.join(sources)} holds no text")
    return files


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
                # Cut after a line break, which merges do not cross. Without one, keep enough of the
                # end that a separator is never cut in two.
                cut = rest.rfind("\n") + 1 or max(0, len(rest) - len(END_OF_TEXT))
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

    def __init__(self, name: str, val_fraction: float, train: BinaryIO, val: BinaryIO):
        self.encoding = tokenizer.load(name)
        self.is_bytes = name == "bytes"
        self.dtype = np.dtype("<u2" if self.encoding.n_vocab <= 1 << 16 else "<u4")
        self.val_fraction = val_fraction
        self.files = {"train": train, "val": val}
        self.documents = {"train": 0, "val": 0}
        self.split: str | None = None  # of the current document; None between documents

    def write(self, chunk: Chunk) -> int:
        """Append the tokens of a chunk; return the bytes of text consumed."""
        if self.split is None and not chunk.text.strip():
            return 0  # a document does not begin with white space alone
        raw = chunk.text.encode("utf-8", "surrogateescape")
        if self.split is None:
            self.split = choose_split(raw, self.val_fraction)
            self.documents[self.split] += 1
        if self.is_bytes:  # encode_ordinary would lose the bytes that are not UTF-8
            ids = np.frombuffer(raw, np.uint8)
        else:
            ids = self.encoding.encode_ordinary(chunk.text)
        file = self.files[self.split]
        file.write(np.asarray(ids, self.dtype).tobytes())
        if chunk.ends_document:
            file.write(np.asarray(self.encoding.eot_token, self.dtype).tobytes())
            self.split = None
        return len(raw)


def tokenize(
    files: list[Path], name: str, folder: Path, val_fraction: float, say: Callable[[str], None]
) -> dict:
    """Write train.bin and val.bin into `folder`; return the first fields of meta.json."""
    total = sum(path.stat().st_size for path in files)
    done = 0
    last_said = time.monotonic()
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        writer = SplitWriter(name, val_fraction, train, val)
        for path in files:
            for chunk in read_chunks(path):
                done += writer.write(chunk)
                if time.monotonic() - last_said > 2:
                    last_said = time.monotonic()
                    megabytes = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
                    say(f"tokenizing: {megabytes}, {done / total:.0%}")
    return {
        "tokenizer": name,
        "dtype": writer.dtype.name,
        "vocab_size": writer.encoding.n_vocab,
        "documents": writer.documents,
    }


def fill_empty_split(train: Path, val: Path, val_fraction: float, itemsize: int) -> str | None:
    """Give both splits tokens where a corpus has too few documents; return what was done."""
    if not train.stat().st_size:  # the only documents fell to validation
        os.replace(val, train)
        val.touch()
    if not train.stat().st_size:
        raise DataError("the sources hold no text")
    if val.stat().st_size:
        return None
    tokens = train.stat().st_size // itemsize
    move_tail(train, val, max(1, int(tokens * val_fraction)) * itemsize)
    return f"too few documents to split: validation gets the last {val_fraction:.0%} of the tokens"


def move_tail(source: Path, target: Path, size: int) -> None:
    """Move the last `size` bytes of one file to another."""
    with open(source, "r+b") as head, open(target, "wb") as tail:
        head.seek(-size, os.SEEK_END)
        shutil.copyfileobj(head, tail)
        head.seek(-size, os.SEEK_END)
        head.truncate()


def prepare(
    sources: list[str] | None,
    out: Path,
    name: str = "bytes",
    val_fraction: float = 0.05,
    say: Callable[[str], None] = print,
) -> None:
    """Tokenize `sources` (None: the built-in set) into the new token folder `out`.

    The folder appears complete or, after an error, not at all. Raises DataError and TokenizerError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out} exists: remove it or choose another folder")
    files = source_files(sources) if sources else builtin_sources()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        meta = tokenize(files, name, work, val_fraction, say)
        itemsize = np.dtype(meta["dtype"]).itemsize
        if note := fill_empty_split(work / "train.bin", work / "val.bin", val_fraction, itemsize):
            say(note)
        if name not in ("bytes", "gpt2"):  # the folder keeps its tokenizer
            meta["tokenizer"] = shutil.copyfile(name, work / "tokenizer.tiktoken").name
        for split in ("train", "val"):
            with open(work / f"{split}.bin", "rb") as file:
                meta[f"{split}_tokens"] = os.fstat(file.fileno()).st_size // itemsize
                meta[f"{split}_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
        (work / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        work.chmod(0o755)  # mkdtemp creates a private folder
        os.rename(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    say(
        f"{out}: {meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate, "
        f"vocabulary {meta['vocab_size']:,} ({meta['tokenizer']})"
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="prepare.py", description="Turn text into a token folder that train.py reads."
    )
    parser.add_argument(
        "--source",
        nargs="+",
        metavar="FILE|DIR",
        help="text files, or folders, read in sorted order; a document is a file, or "
        "a part of one that <|endoftext|> ends (default: the library of the installed Python)",
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, gpt2 or PATH.tiktoken (default: bytes)",
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="the token folder to create"
    )
    parser.add_argument(
        "--val_fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="fraction of the documents kept for validation (default: 0.05)",
    )
    args = parser.parse_args(argv)
    try:
        if not 0 < args.val_fraction < 1:
            raise DataError(f"--val_fraction {args.val_fraction} must be between 0 and 1")
        prepare(args.source, args.out, args.tokenizer, args.val_fraction)
    except (DataError, TokenizerError) as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
