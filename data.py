"""Text -> token files, and which sequence is number n of a run. Knows nothing of torch.distributed.

    python data.py --source FILE|DIR ... --tokenizer bytes|gpt2|PATH.tiktoken --out DIR

A token folder holds `train.bin` and `val.bin` (token ids, little-endian, nothing else) and `meta.json`. nanoGPT's
folders (uint16, no meta.json) are read as they are; their `meta.pkl` is never unpickled.

A file of N tokens is cut into (N - 1) // T windows of T tokens, each with the one that follows. Sequence n of a run
is window permute(n mod windows) of epoch n div windows: a pure function of (seed, n), whatever the number of ranks, of
workers, the micro-batch or the step a run was resumed at. So a checkpoint needs no loader state.
"""

import argparse
import base64
import codecs
import hashlib
import itertools
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

END_OF_TEXT = "<|endoftext|>"
PIECE = (
    1 << 20
)  # characters read and encoded at a time: memory stays flat whatever the size of a document
# How text is cut before byte-pair merging, for PATH.tiktoken: the pattern of Llama 3 and cl100k_base.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class DataError(ValueError):
    """Something about the text or the token files that the user can mend."""


# ---------------------------------------------------------------------------------------------------------------
# Tokenizers: all are tiktoken.Encoding


def tokenizer(name: str) -> tiktoken.Encoding:
    """`bytes` (256 bytes and end-of-text), `gpt2`, or the path of a `.tiktoken` file (lines of base64 token and rank)."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
        )
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:  # requests' exceptions are OSErrors
            raise DataError(
                f"the gpt2 tokenizer's merges are not in tiktoken's cache and cannot be downloaded ({type(error).__name__}): run "
                "once with a network, point TIKTOKEN_CACHE_DIR to a cache copied from elsewhere, or use --tokenizer bytes"
            ) from None
    try:
        lines = Path(name).read_bytes().splitlines()
        ranks = {
            base64.b64decode(token): int(rank)
            for token, rank in (line.split() for line in lines if line)
        }
        if not all(bytes([i]) in ranks for i in range(256)):
            raise ValueError("a byte without a token")
        return tiktoken.Encoding(
            Path(name).stem,
            pat_str=LLAMA3_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: max(ranks.values()) + 1},
        )
    except OSError as error:
        raise DataError(
            f"--tokenizer {name}: {error.strerror}; it must be bytes, gpt2 or the path of a .tiktoken file"
        ) from None
    except ValueError:
        raise DataError(
            f"--tokenizer {name}: no .tiktoken file (lines of base64 token and rank, all bytes among them)"
        ) from None


def encode(name: str | None, text: str) -> list[int]:
    """The tokens of a text, end-of-text for an empty one; without a tokenizer (None) the text is their numbers."""
    if name is None:
        try:
            return [int(number) for number in text.split()] or [0]
        except ValueError:
            raise DataError(
                f"this data's tokenizer is unknown: a prompt is token ids such as '17 4 52', not {text!r}"
            ) from None
    encoding = tokenizer(name)
    return encoding.encode_ordinary(text) or [encoding.eot_token]


def decode(name: str | None, tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens as they come; a character of several tokens appears with its last one."""
    if name is None:
        yield from (f"{token} " for token in tokens)
        return
    encoding, decoder = tokenizer(name), codecs.getincrementaldecoder("utf-8")("replace")
    yield from (decoder.decode(encoding.decode_single_token_bytes(token)) for token in tokens)
    yield decoder.decode(b"", final=True)


# ---------------------------------------------------------------------------------------------------------------
# Text -> token files


def builtin_sources() -> list[Path]:
    """The installed Python's own library: sources, and documentation (pydoc_data, idlelib's help); no network, about 12 MB."""
    files = []
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = set(inside) - {
            "test",
            "tests",
            "idle_test",
            "site-packages",
            "dist-packages",
            "__pycache__",
        }
        files += [
            Path(folder, name) for name in names if name.endswith((".py", ".txt", ".html", ".rst"))
        ]
    return sorted(files)


def source_files(sources: list[str]) -> list[Path]:
    """All files under the given files and directories, in sorted order: the same corpus on every machine."""
    files = []
    for source in map(Path, sources):
        if not source.exists():
            raise DataError(f"--source {source}: no such file or directory")
        found = (
            [source]
            if source.is_file()
            else sorted(path for path in source.rglob("*") if path.is_file())
        )
        files += [path for path in found if path.stat().st_size]
    if not files:
        raise DataError(f"--source {' '.join(sources)}: no text in it")
    return files


def pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """The text of a file as (piece, does its document end here); a document is the file, or what END_OF_TEXT parts in it.

    Bytes that are not UTF-8 travel as surrogates: the byte tokenizer restores them, the others see U+FFFD.
    """
    rest = ""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        while text := file.read(PIECE):
            *ended, rest = (rest + text).split(END_OF_TEXT)
            yield from ((document, True) for document in ended)
            if (
                len(rest) >= PIECE
            ):  # cut after a line, where merges do not cross; without one, not through a separator
                cut = rest.rfind("\n") + 1 or max(0, len(rest) - len(END_OF_TEXT))
                yield rest[:cut], False
                rest = rest[cut:]
    yield rest, True


def tokenize(files: list[Path], name: str, folder: Path, val_fraction: float, progress) -> dict:
    """Write train.bin and val.bin into `folder`; returns the start of meta.json: tokenizer, dtype, counts of documents."""
    encoding = tokenizer(name)
    dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
    total, seen, shown = sum(path.stat().st_size for path in files), 0, time.monotonic()
    documents = {"train": 0, "val": 0}
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        split = None  # of the document being read; None between documents
        for text, ends in (piece for path in files for piece in pieces(path)):
            if split is None and not text.strip():
                continue
            raw = text.encode("utf-8", "surrogateescape")
            if split is None:
                key = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest())
                split = "val" if key < val_fraction * 2**64 else "train"
                documents[split] += 1
            # For bytes the same ids as encode_ordinary, but exact for bytes that are not UTF-8.
            ids = (
                np.frombuffer(raw, np.uint8) if name == "bytes" else encoding.encode_ordinary(text)
            )
            out = {"train": train, "val": val}[split]
            out.write(np.asarray(ids, dtype).tobytes())
            if ends:
                out.write(np.asarray(encoding.eot_token, dtype).tobytes())
                split = None
            seen += len(raw)
            if time.monotonic() - shown > 2:
                shown = time.monotonic()
                progress(
                    f"tokenizing: {seen / 1e6:,.1f} of {total / 1e6:,.1f} MB, {seen / total:.0%}"
                )
    return {
        "tokenizer": name,
        "dtype": dtype.name,
        "vocab_size": encoding.n_vocab,
        "documents": documents,
    }


def prepare(
    sources: list[str] | None,
    out: Path,
    name: str = "bytes",
    val_fraction: float = 0.05,
    progress=print,
) -> None:
    """Tokenize `sources` (None: the built-in set) into the new token folder `out`: all of it or, after an error, nothing.

    A document goes to validation when the hash of its beginning falls under `val_fraction`: whatever the order of the
    files, and copies of one document stay on one side. A corpus of few documents may leave validation without any;
    then it gets the tail of the tokens. Raises DataError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"--out {out} exists: remove it or choose another folder")
    files = source_files(sources) if sources else builtin_sources()
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        meta = tokenize(files, name, work, val_fraction, progress)
        itemsize = np.dtype(meta["dtype"]).itemsize
        train, val = work / "train.bin", work / "val.bin"
        if not train.stat().st_size:  # the only documents there are fell to validation
            os.replace(val, train)
            val.touch()
        if not train.stat().st_size:
            raise DataError("no text in the sources")
        if not val.stat().st_size:
            hold_out_tail(
                train, val, max(1, int(train.stat().st_size // itemsize * val_fraction)) * itemsize
            )
            progress(
                f"too few documents to part: validation gets the last {val_fraction:.0%} of the tokens"
            )
        if name not in ("bytes", "gpt2"):  # the folder keeps its tokenizer
            meta["tokenizer"] = shutil.copyfile(name, work / "tokenizer.tiktoken").name
        for path in (train, val):
            meta[f"{path.stem}_tokens"] = path.stat().st_size // itemsize
            with open(path, "rb") as file:
                meta[f"{path.stem}_sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
                os.fsync(file.fileno())
        (work / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        work.chmod(0o755)  # mkdtemp's folder is private
        os.rename(work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    progress(
        f"{out}: {meta['train_tokens']:,} tokens to train on, {meta['val_tokens']:,} to validate, "
        f"vocabulary {meta['vocab_size']:,} ({meta['tokenizer']})"
    )


def hold_out_tail(train: Path, val: Path, size: int) -> None:
    """Move the last `size` bytes of one file to the other."""
    with open(train, "r+b") as source, open(val, "wb") as target:
        source.seek(-size, os.SEEK_END)
        shutil.copyfileobj(source, target)
        source.seek(-size, os.SEEK_END)
        source.truncate()


# ---------------------------------------------------------------------------------------------------------------
# Token files -> sequences


@dataclass(frozen=True)
class TokenFolder:
    path: Path
    dtype: str
    vocab_size: int
    tokenizer: str | None  # what `tokenizer` takes; None: unknown, ids have no text
    fingerprint: str  # changes when the tokens do

    def tokens(self, split: str) -> np.memmap:
        return np.memmap(self.path / f"{split}.bin", self.dtype, "r")


def open_folder(path: Path) -> TokenFolder:
    """Read and check a token folder, ours or nanoGPT's. Raises DataError."""
    for name in ("train.bin", "val.bin"):
        if not (path / name).is_file():
            raise DataError(
                f"--data {path}: no {name} there; make one with: python data.py --source FILE|DIR --out {path}"
            )
    try:
        meta = json.loads((path / "meta.json").read_text())
        dtype, vocab_size, name = (
            np.dtype(meta["dtype"]),
            int(meta["vocab_size"]),
            meta["tokenizer"],
        )
        counts = {split: int(meta[f"{split}_tokens"]) for split in ("train", "val")}
    except (
        FileNotFoundError
    ):  # nanoGPT: with a meta.pkl a vocabulary of its own, without one GPT-2's
        meta, dtype, counts = {}, np.dtype("<u2"), None
        own = (path / "meta.pkl").exists()
        vocab_size, name = (1 + max_token(path, dtype), None) if own else (50257, "gpt2")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path / 'meta.json'} is damaged ({error!r}): prepare the folder anew with data.py"
        ) from None
    if name and name.endswith(".tiktoken"):
        name = str((path / name).resolve())
    digest = hashlib.sha256(
        f"{dtype.name} {vocab_size} {[meta.get(f'{split}_sha256') for split in ('train', 'val')]}".encode()
    )
    for split in ("train", "val"):
        file = path / f"{split}.bin"
        size = file.stat().st_size
        if size % dtype.itemsize or counts and size != counts[split] * dtype.itemsize:
            want = f"{counts[split]:,} tokens" if counts else "whole tokens"
            raise DataError(
                f"{file} is torn: {size:,} bytes are not {want} of {dtype.itemsize} bytes; prepare it anew"
            )
        survey(file, dtype, vocab_size, digest)
    return TokenFolder(path, dtype.name, vocab_size, name, digest.hexdigest()[:16])


def survey(file: Path, dtype: np.dtype, vocab_size: int, digest) -> None:
    """Hash and range-check up to 256 blocks of 64 KiB spread evenly over a file: all of it up to 16 MiB, a sample beyond.

    So a start costs milliseconds on any corpus; what the sample misses, Windows still checks in every batch.
    """
    tokens = np.memmap(file, dtype, "r") if file.stat().st_size else np.empty(0, dtype)
    block = (1 << 16) // dtype.itemsize
    blocks = -(-len(tokens) // block)
    digest.update(len(tokens).to_bytes(8))
    for i in range(min(blocks, 256)):
        start = i * blocks // min(blocks, 256) * block
        check_tokens(tokens[start : start + block], vocab_size, file)
        digest.update(tokens[start : start + block].tobytes())


def check_tokens(tokens: np.ndarray, vocab_size: int, file: Path) -> None:
    if len(tokens) and (highest := int(tokens.max())) >= vocab_size:
        raise DataError(
            f"{file} holds token {highest}, above its vocabulary of {vocab_size}: prepare it anew with data.py"
        )


def max_token(path: Path, dtype: np.dtype) -> int:
    step = 1 << 24  # tokens at a time: memory stays flat
    files = [np.memmap(path / f"{split}.bin", dtype, "r") for split in ("train", "val")]
    return max(
        int(tokens[i : i + step].max()) for tokens in files for i in range(0, len(tokens), step)
    )


def permute(n: int, size: int, key: bytes) -> int:
    """Where a keyed pseudo-random permutation of range(size) takes n: no table, so a corpus of any size costs nothing.

    A Feistel network on the smallest even number of bits that holds `size`, walked on until it lands inside (Black &
    Rogaway 2002, "Ciphers with arbitrary finite domains"); at most 4 walks on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        left, right = n >> half, n & ((1 << half) - 1)
        for turn in range(6):
            digest = hashlib.blake2b(b"%d %d" % (turn, right), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & ((1 << half) - 1))
        n = left << half | right
        if n < size:
            return n


class Windows(Dataset):
    """The windows of one split; `windows[[n, ...]]` is the batch of sequences n, ..., int64 (len, T + 1).

    With a seed, sequence n is the window of the seed's permutation of its epoch; without one, window n itself.
    """

    def __init__(self, folder: TokenFolder, split: str, seq_len: int, seed: int | None):
        self.folder, self.split, self.seq_len, self.seed = folder, split, seq_len, seed
        self.file = folder.path / f"{split}.bin"
        n_tokens = self.file.stat().st_size // np.dtype(folder.dtype).itemsize
        self.count = (n_tokens - 1) // seq_len
        if self.count < 1:
            raise DataError(
                f"{self.file} holds {n_tokens:,} tokens: one sequence of --seq_len {seq_len} needs {seq_len + 1:,}"
            )

    def __len__(self) -> int:
        return self.count

    def window(self, n: int) -> int:
        if self.seed is None:
            return n
        epoch, position = divmod(n, self.count)
        return permute(position, self.count, b"%d %d" % (self.seed, epoch))

    def __getitem__(self, numbers: list[int]) -> Tensor:
        tokens = self.folder.tokens(
            self.split
        )  # mapped anew for each batch: microseconds, and nothing to send to a worker
        starts = [self.window(n) * self.seq_len for n in numbers]
        batch = np.stack([tokens[start : start + self.seq_len + 1] for start in starts]).astype(
            np.int64
        )
        check_tokens(batch.reshape(-1), self.folder.vocab_size, self.file)
        return torch.from_numpy(batch)


def loader(
    windows: Windows, numbers: Iterable[list[int]], workers: int = 0, pin: bool = False
) -> Iterator[Tensor]:
    """The batch of each list in `numbers`, in that order, read ahead by `workers` processes (0: in this one)."""
    try:
        yield from DataLoader(
            windows, batch_size=None, sampler=numbers, num_workers=workers, pin_memory=pin
        )
    except DataError as error:  # from a worker it comes with the worker's traceback before it
        raise DataError(
            str(error).strip().splitlines()[-1].removeprefix("data.DataError: ")
        ) from None


def on_device(batches: Iterator[Tensor], device: torch.device) -> Iterator[Tensor]:
    """The batches on a device. A GPU gets the next one, from pinned memory, on a stream of its own while this one is used."""
    if device.type != "cuda":
        yield from batches
        return
    stream, ahead = torch.cuda.Stream(device), None
    for batch in itertools.chain(batches, [None]):
        used = torch.cuda.current_stream(device)
        if ahead is not None:
            used.wait_stream(stream)
            ahead.record_stream(
                used
            )  # its memory is not used again before `used` is through with it
        ready, ahead = ahead, None
        if batch is not None:
            with torch.cuda.stream(stream):
                ahead = batch.to(device, non_blocking=True)
        if ready is not None:
            yield ready


def train_numbers(
    steps: range, global_batch: int, micro_batch: int, rank: int, ranks: int
) -> Iterator[list[int]]:
    """The sequence numbers of each micro-batch of one data-parallel rank. Step s trains on s * B ... (s + 1) * B - 1,
    of which rank r of R reads the r-th run of B / R, micro-batch by micro-batch."""
    share = global_batch // ranks
    for step in steps:
        first = step * global_batch + rank * share
        for start in range(first, first + share, micro_batch):
            yield list(range(start, start + micro_batch))


def val_numbers(
    count: int, windows: int, micro_batch: int, rank: int, ranks: int
) -> Iterator[list[int]]:
    """One rank's part of `count` validation windows spread evenly over all: the same set at every evaluation, on any mesh.

    Every rank gets equally many lists, since forwards are collective; those that have run out are empty.
    """
    chosen = [i * windows // count for i in range(count)]
    for start in range(0, count, micro_batch * ranks):
        yield chosen[start + rank * micro_batch :][:micro_batch]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Turn text into a token folder that train.py reads."
    )
    add = parser.add_argument
    add(
        "--source",
        nargs="+",
        metavar="FILE|DIR",
        help="text to read; a directory is read whole, in sorted order; a document is "
        "a file, or what <|endoftext|> separates in it (default: the installed Python's library)",
    )
    add(
        "--tokenizer",
        default="bytes",
        metavar="NAME",
        help="bytes, gpt2 or PATH.tiktoken (default: bytes)",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="the new token folder")
    add(
        "--val_fraction",
        type=float,
        default=0.05,
        metavar="F",
        help="share of documents kept for validation (default: 0.05)",
    )
    args = parser.parse_args()
    try:
        if not 0 < args.val_fraction < 1:
            raise DataError(f"--val_fraction {args.val_fraction} must be between 0 and 1")
        prepare(args.source, args.out, args.tokenizer, args.val_fraction)
    except (DataError, OSError) as error:
        print(f"data.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, DataError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
