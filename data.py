"""From a token folder to sequence n, and to the batches of a dp_rank.

A token folder contains `train.bin` and `val.bin` (token ids, little-endian, no header) and
`meta.json`, as prepare.py writes them. nanoGPT's folders (uint16, no meta.json) also work.

A window is the piece of a file that a sequence reads: T tokens and the token after them. A file of
N tokens has (N - 1) // T windows. With epoch, i = divmod(n, windows), sequence n of a run is window
i in the order of this epoch, which depends on (seed, epoch). So the sequence is a pure function of
(seed, n), whatever the number of ranks, the micro-batch size or the step at which a run resumed. A
checkpoint needs no state of the data. In a mixture, n also selects the folder.

prepare.py ends each document with an end-of-text token and packs documents one after the other.
A window may therefore contain parts of several documents, and attention sees all of them.
"""

import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """Text or token files that cannot be used."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of the data; config.py explains the annotations."""

    data: Annotated[str, "free", "token folder, or DIR:SHARE,..."] = "tokens/python"
    seed: Annotated[int, "part", "seed of the initial weights and the data order", (0, 2**32)] = 0


# --------------------------------------------------------------------------------------------------
# Sequence number n


def window_of(n: int, windows: int, seed: int) -> int:
    """Return the window of sequence n, from a keyed pseudo-random permutation of range(windows).

    The permutation needs no table, whatever the size of the corpus. A Feistel network on the
    smallest even number of bits that can represent all windows is applied until the result is
    below `windows`, at most 4 times on average ("cycle walking", Black & Rogaway 2002, Ciphers with
    arbitrary finite domains). With fewer than about 20 windows, not all orders are equally likely.
    """
    epoch, n = divmod(n, windows)
    key = b"%d %d" % (seed, epoch)
    half = max(1, ((windows - 1).bit_length() + 1) // 2)  # bits
    mask = (1 << half) - 1
    while True:
        left, right = n >> half, n & mask
        for turn in range(6):
            digest = hashlib.blake2b(b"%d %d" % (turn, right), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        n = left << half | right
        if n < windows:
            return n


class TokenDataset:
    """The sequences of one split; `dataset[[n, ...]]` is a batch (B, T + 1) in int64.

    With a seed, the windows of each epoch are permuted. Without one (the validation split),
    sequence n reads window n.
    """

    def __init__(self, folder: "TokenFolder", split: str, seq_len: int, seed: int | None):
        self.path = folder.path / f"{split}.bin"
        self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115, for the whole run
        self.dtype, self.vocab_size = folder.dtype, folder.vocab_size
        self.seq_len = seq_len
        self.seed = seed
        n_tokens = self.path.stat().st_size // self.dtype.itemsize
        self.n_windows = (n_tokens - 1) // seq_len
        if self.n_windows < 1:
            raise DataError(
                f"{self.path} contains {n_tokens:,} tokens: one sequence of "
                f"--seq_len {seq_len} needs {seq_len + 1:,}"
            )

    def __len__(self) -> int:
        return self.n_windows

    def __getitem__(self, indices: list[int]) -> Tensor:
        """Return a batch. Threads may call it: preadv is told where to read. Raises DataError."""
        batch = np.empty((len(indices), self.seq_len + 1), self.dtype)
        for row, n in zip(batch, indices):
            window = n if self.seed is None else window_of(n, self.n_windows, self.seed)
            start = window * self.seq_len * self.dtype.itemsize  # bytes
            if os.preadv(self.file.fileno(), [row], start) < row.nbytes:
                raise DataError(f"{self.path} was truncated while it was read")
        check_ids(batch, self.vocab_size, self.path)
        return torch.from_numpy(batch.astype(np.int64))


# --------------------------------------------------------------------------------------------------
# The batches of a dp_rank


def train_indices(
    steps: range, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[list[int]]:
    """Yield the sequence indices of each micro-batch of a dp_rank.

    Step s, counted from 1, trains on the G sequences (s - 1) * G ... s * G - 1. Each dp_rank reads
    G / dp_size consecutive sequences, one micro-batch after another: config.resolve makes sure
    that both divisions leave no remainder.
    """
    per_rank = global_batch_size // dp_size
    for step in steps:
        first = (step - 1) * global_batch_size + dp_rank * per_rank
        for start in range(first, first + per_rank, micro_batch_size):
            yield list(range(start, start + micro_batch_size))


def val_indices(
    count: int, n_sequences: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[list[int]]:
    """Yield the batches of a dp_rank, from `count` sequences spread evenly over the val split.

    The sequences are the same in every evaluation and on any mesh. Every dp_rank gets the same
    number of batches, since a forward pass is collective; batches past the last sequence are empty.
    """
    chosen = [i * n_sequences // count for i in range(count)]
    for start in range(0, count, micro_batch_size * dp_size):
        first = start + dp_rank * micro_batch_size
        yield chosen[first : first + micro_batch_size]


AHEAD = 4  # batches, each read by a thread: a file system may answer slowly, but in parallel


def read_ahead(
    dataset: TokenDataset, indices: Iterable[list[int]], pin: bool = False
) -> Iterator[Tensor]:
    """Yield the batch for each list in `indices`, in order, while threads read the next ones.

    `pin` puts batches in pinned memory. Raises DataError.
    """
    with ThreadPoolExecutor(AHEAD) as threads:
        reads = (threads.submit(dataset.__getitem__, batch) for batch in indices)  # in order
        started = deque(itertools.islice(reads, AHEAD))
        while started:
            batch = started.popleft().result()
            started.extend(itertools.islice(reads, 1))
            yield batch.pin_memory() if pin else batch


# --------------------------------------------------------------------------------------------------
# Token folders


@dataclass(frozen=True)
class TokenFolder:
    """A token folder. For other data, write a class with these attributes and the method `open`."""

    path: Path
    dtype: np.dtype  # of the files: uint16 or uint32
    vocab_size: int  # token ids are below it
    tokenizer: str | None  # bytes, gpt2 or the path of a tokenizer.json; None: unknown
    fingerprint: str  # differs for other tokens

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        """{name: contents} of the tokenizer, to copy into checkpoints; empty for bytes and gpt2."""
        return read_tokenizer_files(self.tokenizer)

    def open(self, split: str, seq_len: int, seed: int | None) -> TokenDataset:
        """Return the sequences of "train" or "val", shuffled if there is a seed."""
        return TokenDataset(self, split, seq_len, seed)


BLOCK = 1 << 16  # tokens


def open_folder(path: Path) -> TokenFolder:
    """Open a token folder of prepare.py or of nanoGPT. Raises DataError.

    The fingerprint covers meta.json, into which prepare.py writes the SHA-256 of the token files,
    the size, the first and the last block of each file, and the tokenizer.
    """
    try:
        meta = read_meta(path)
        dtype, vocab_size = np.dtype(meta["dtype"]), int(meta["vocab_size"])
        if dtype not in (np.uint16, np.uint32):
            raise ValueError(f"the dtype is {dtype}, not uint16 or uint32")
        digest = hashlib.sha256(json.dumps(meta).encode())
        for split in ("train", "val"):
            file = path / f"{split}.bin"
            size = file.stat().st_size
            if size != meta.get(f"{split}_tokens", size // dtype.itemsize) * dtype.itemsize:
                raise ValueError(f"{file} has {size:,} bytes, which meta.json contradicts")
            tokens = np.memmap(file, dtype, "r")
            digest.update(b"%d" % size)
            for block in (tokens[:BLOCK], tokens[-BLOCK:]):
                check_ids(block, vocab_size, file)
                digest.update(block)
        tokenizer = meta["tokenizer"]
        if tokenizer not in (None, "bytes", "gpt2"):
            tokenizer = str(path.absolute() / Path(tokenizer).name)  # never outside of the folder
            if not Path(tokenizer).name.startswith("tokenizer"):  # it goes into checkpoints, too
                raise ValueError(f"{tokenizer} is not named tokenizer.json")
        for contents in read_tokenizer_files(tokenizer).values():
            digest.update(contents)
    except Exception as error:  # damaged JSON can raise almost any
        raise DataError(
            f"--data {path} is not a token folder ({type(error).__name__}: {error}); make one with "
            "python prepare.py --source FILE|DIR --out NEW_DIR"
        ) from None
    return TokenFolder(path, dtype, vocab_size, tokenizer, digest.hexdigest()[:16])


def check_ids(tokens: np.ndarray, vocab_size: int, file: Path) -> None:
    """Raise DataError if a token id in `file` is not below vocab_size."""
    highest = int(tokens.max())
    if highest >= vocab_size:
        raise DataError(f"{file} contains token id {highest}, but vocab_size is {vocab_size}")


def read_meta(path: Path) -> dict:
    """Return meta.json, or what it would contain for a folder of nanoGPT."""
    if (path / "meta.json").exists():
        return json.loads((path / "meta.json").read_bytes())
    if np.fromfile(path / "train.bin", np.uint16, BLOCK)[1::2].max() < 4:
        # They look like the upper halves of wider numbers, which are 0 to 3 below 2^18.
        raise ValueError("without meta.json, tokens must have two bytes, but here they have more")
    meta = {"dtype": "uint16", "vocab_size": 50257, "tokenizer": "gpt2"}
    if (path / "meta.pkl").exists():  # of characters. It is not unpickled: it could run any code
        files = [np.memmap(path / f"{split}.bin", np.uint16, "r") for split in ("train", "val")]
        meta |= {"vocab_size": 1 + max(int(tokens.max()) for tokens in files), "tokenizer": None}
    return meta


def read_tokenizer_files(tokenizer: str | None) -> dict[str, bytes]:
    """Return {name: contents} of a tokenizer.json and of the file that names the end of a text."""
    if tokenizer in (None, "bytes", "gpt2"):
        return {}
    file = Path(tokenizer)
    files = {file.name: file.read_bytes()}
    settings = file.with_name("tokenizer_config.json")
    if settings.exists():
        files[settings.name] = settings.read_bytes()
    return files
