"""From a token folder to sequence n, and to the batches of a dp_rank.

A token folder contains `train.bin` and `val.bin` (token ids, little-endian, no header) and
`meta.json`, as prepare.py writes them. nanoGPT's folders (uint16, no meta.json) also work; their
`meta.pkl` is never unpickled.

A window is the piece of a file that a sequence reads: T tokens and the token after them. A file of
N tokens has (N - 1) // T windows. With epoch, i = divmod(n, windows), sequence n of a run is window
i in the order of this epoch, which depends on (seed, epoch). So the sequence is a pure function of
(seed, n), whatever the number of ranks, the micro-batch size or the step at which a run resumed. A
checkpoint needs no state of the data. In a mixture, n also selects the folder.

prepare.py ends each document with an end-of-text token and packs documents one after the other.
A window may therefore contain parts of several documents, and attention sees all of them.
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """Text or token files that cannot be used."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of the data; config.py explains the annotations."""

    data: Annotated[str, "free", "token folder, or DIR:SHARE,...", "DIR"] = "tokens/python"
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


class Source(Protocol):
    """What a run reads. A TokenFolder is one, and so is the mixture of extras/mixture.py.

    For other data, write such a class, and return an object of it from start.open_data. Sequence n
    must be a function of the seed and n. A stream without random access is not supported: a run
    that continues, perhaps on other ranks, would have to read all sequences before its own again.
    """

    vocab_size: int  # token ids are below it
    tokenizer: str | None  # bytes, gpt2 or the path of a tokenizer.json; None: unknown
    tokenizer_file: dict[str, bytes]  # {name: contents} to copy into checkpoints, or empty
    fingerprint: str  # differs for other tokens

    def open(self, split: str, seq_len: int, seed: int | None) -> "Sequences":
        """Return the sequences of "train" or "val", shuffled if there is a seed."""

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, unless there is a tokenizer_file, which decodes them."""


class Sequences(Protocol):
    """One split of a source."""

    bytes_per_token: float  # of the validation text, for bits per byte; nan: unknown

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int]) -> Tensor:
        """Return a batch (B, T + 1) in int64. Threads call it. Raises DataError."""

    def describe(self, n: int) -> Iterator[str]:
        """Yield lines about reading n sequences, for the start of a run."""

    def place_of(self, n: int) -> str:
        """Return where sequence n is from, for tools.replay."""


class TokenDataset:
    """The sequences of one split; `dataset[[n, ...]]` is a batch (B, T + 1) in int64.

    With a seed, the windows of each epoch are permuted. Without one (the validation split),
    sequence n reads window n.

    The file is opened once, so it may be moved, replaced or removed meanwhile.
    """

    def __init__(self, folder: "TokenFolder", split: str, seq_len: int, seed: int | None):
        self.folder = folder
        self.split = split
        self.file = folder.path / f"{split}.bin"
        self.seq_len = seq_len
        self.seed = seed
        self.descriptor = os.open(self.file, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        n_tokens = os.fstat(self.descriptor).st_size // folder.dtype.itemsize
        self.n_windows = (n_tokens - 1) // seq_len
        if self.n_windows < 1:
            raise DataError(
                f"{self.file} contains {n_tokens:,} tokens: one sequence of "
                f"--seq_len {seq_len} needs {seq_len + 1:,}"
            )

    def __len__(self) -> int:
        return self.n_windows

    @property
    def bytes_per_token(self) -> float:
        """Of the validation split; nan if its size is unknown, or if the tokens lose some text."""
        size = self.folder.val_bytes
        is_comparable = size and not self.folder.lost
        return size / len(self.folder.tokens("val")) if is_comparable else math.nan

    def describe(self, n: int) -> Iterator[str]:
        epochs = n / len(self)
        yield f"{self.folder.path}: {len(self):,} sequences; the run reads {epochs:.2f} epochs"
        if self.folder.is_nanogpt:
            tokenizer = self.folder.tokenizer_name or "an unknown tokenizer"
            yield f"it has no meta.json, so it is read as nanoGPT's: uint16, {tokenizer}"

    def place_of(self, n: int) -> str:
        return f"{self.folder.path} at token {self.window(n) * self.seq_len}"

    def window(self, n: int) -> int:
        return n if self.seed is None else window_of(n, self.n_windows, self.seed)

    def __getitem__(self, indices: list[int]) -> Tensor:
        batch = np.empty((len(indices), self.seq_len + 1), self.folder.dtype)
        # Mapping the file for each batch would take twice as long. preadv is told where to read, so
        # threads share no position in the file.
        for row, n in zip(batch, indices):
            start = self.window(n) * self.seq_len * batch.itemsize
            if os.preadv(self.descriptor, [row], start) < row.nbytes:
                raise DataError(f"{self.file} was truncated while it was read")
        check_range(batch, self.folder.vocab_size, self.file)
        return torch.from_numpy(batch.astype(np.int64))


# --------------------------------------------------------------------------------------------------
# The batches of a dp_rank


def train_indices(
    steps: range, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[list[int]]:
    """Yield the sequence indices of each micro-batch of a dp_rank.

    Step s, counted from 1, trains on the B sequences (s - 1) * B ... s * B - 1. Each dp_rank reads
    B / dp_size consecutive sequences, one micro-batch after another: config.check_batch makes sure
    that both divisions have no rest.
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
    dataset: Sequences, indices: Iterable[list[int]], pin: bool = False
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
    """A checked folder of train.bin and val.bin, with the facts from its meta.json."""

    path: Path
    dtype: np.dtype  # of the files: uint16 or uint32
    vocab_size: int  # token ids are below it
    # "bytes", "gpt2" or the name of a file in the folder. None: unknown, ids cannot be decoded.
    tokenizer_name: str | None
    fingerprint: str  # differs for other tokens: see `read_folder`
    # The tokenizer's file as {name: contents}, to copy into checkpoints; empty if there is none
    tokenizer_file: dict[str, bytes] = field(default_factory=dict)
    val_bytes: int = 0  # size of the text in val.bin; 0: unknown
    lost: float = 0.0  # share of the text that the tokens do not keep
    is_nanogpt: bool = False  # whether there is no meta.json

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer that decodes the ids: a built-in one's name or the path of a file."""
        if self.tokenizer_file:
            return str(self.path.absolute() / self.tokenizer_name)
        return self.tokenizer_name

    @property
    def vocabulary(self) -> tuple:
        """The meaning of an id, whatever the folder's path: equal for all folders of a mixture."""
        return self.vocab_size, self.tokenizer_name, self.tokenizer_file

    def open(self, split: str, seq_len: int, seed: int | None) -> TokenDataset:
        """Return the sequences of "train" or "val". Raises DataError."""
        return TokenDataset(self, split, seq_len, seed)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens of a built-in tokenizer; without a known one, their ids."""
        if self.tokenizer_name is None:
            return " ".join(map(str, tokens))
        if self.tokenizer_name == "bytes":  # 256 is the end of a text
            pieces = [bytes([token]) if token < 256 else b"<|endoftext|>" for token in tokens]
            return b"".join(pieces).decode(errors="replace")
        import tiktoken

        return tiktoken.get_encoding("gpt2").decode(tokens)

    def tokens(self, split: str) -> np.ndarray:
        """Memory-map the tokens of train.bin or val.bin, (n_tokens,)."""
        return memmap_tokens(self.path / f"{split}.bin", self.dtype)


@dataclass(frozen=True)
class DataFacts:
    """What a run needs to know about its data before it reads any."""

    vocab_size: int
    tokenizer: str | None  # its name, as recorded in checkpoints
    fingerprint: str


def facts_of(source: Source) -> DataFacts:
    name = source.tokenizer and Path(source.tokenizer).name
    return DataFacts(source.vocab_size, name, source.fingerprint)


SHARE = re.compile(r"(.+):(-?\d*\.?\d+)")  # DIR:SHARE


def names_mixture(data: str) -> bool:
    """Whether --data is a mixture DIR:SHARE,DIR:SHARE,... A path that exists is one folder."""
    if "," not in data and not SHARE.fullmatch(data):
        return False
    with contextlib.suppress(OSError):  # many folders are too long for a path
        return not Path(data).exists()
    return True


def memmap_tokens(file: Path, dtype: np.dtype) -> np.ndarray:
    """Memory-map the complete tokens of a file; return an empty array if there are none to map."""
    count = file.stat().st_size // dtype.itemsize
    return np.memmap(file, dtype, "r", shape=count) if count else np.empty(0, dtype)


def open_folder(path: Path) -> TokenFolder:
    """Read and check a token folder of prepare.py or of nanoGPT. Raises DataError."""
    for name in ("train.bin", "val.bin"):
        if not (path / name).is_file():
            raise DataError(
                f"--data {path}: no {name} there; create it with: "
                f"python prepare.py --source FILE|DIR --out {path}"
            )
    try:
        return read_folder(path)
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"--data {path}: {error.filename}: {error.strerror}") from None
    except Exception as error:
        reason = f"meta.json lacks {error}" if isinstance(error, KeyError) else error
        raise DataError(f"--data {path} is damaged: {reason}; prepare it again") from None


def read_folder(path: Path) -> TokenFolder:
    """Read and check a folder with both token files. Damaged files may raise any exception.

    The fingerprint trusts the SHA-256 of the files that prepare.py writes into meta.json. Of the
    files themselves it covers the sizes and some blocks. The ids in these blocks are checked now,
    those of a batch when it is read.
    """
    is_ours = (path / "meta.json").exists()
    meta = json.loads((path / "meta.json").read_bytes()) if is_ours else nanogpt_meta(path)
    dtype = np.dtype(meta["dtype"])
    vocab_size = int(meta["vocab_size"])
    if dtype not in (np.uint16, np.uint32):
        raise ValueError(f"meta.json has the dtype {dtype}, not uint16 or uint32")
    checksums = [meta.get(f"{split}_sha256") for split in ("train", "val")]
    digest = hashlib.sha256(f"{dtype.name} {vocab_size} {checksums}".encode())
    for split in ("train", "val"):
        file = path / f"{split}.bin"
        size = file.stat().st_size
        count = int(meta[f"{split}_tokens"]) if is_ours else size // dtype.itemsize
        if size != count * dtype.itemsize:
            raise ValueError(f"{file} has {size:,} bytes, not {count:,} tokens x {dtype.itemsize}")
        tokens = memmap_tokens(file, dtype)
        digest.update(len(tokens).to_bytes(8))
        for block in spread_blocks(tokens):
            check_range(block, vocab_size, file)
            digest.update(block.tobytes())
    tokenizer = meta["tokenizer"]
    has_file = tokenizer not in (None, "bytes", "gpt2")  # unknown or built in
    tokenizer_file = {}
    if has_file:
        tokenizer_file = read_tokenizer_file(path, tokenizer, meta.get("tokenizer_sha256", {}))
    fingerprint = digest.hexdigest()[:16]
    of_text = meta.get("val_bytes", 0), meta.get("lost", 0.0)
    return TokenFolder(
        path,
        dtype,
        vocab_size,
        tokenizer,
        fingerprint,
        tokenizer_file,
        *of_text,
        is_nanogpt=not is_ours,
    )


TOKENIZER_CONFIG = "tokenizer_config.json"


def read_tokenizer_file(path: Path, name: str, checksums: dict[str, str]) -> dict[str, bytes]:
    """Return {name: contents} of the tokenizer's file, and of the one that names its end of text.

    Raises DataError, also for a file without its SHA-256 in `checksums`, and ValueError.
    """
    if name != Path(str(name)).name:
        raise ValueError("the tokenizer in meta.json is not the name of a file in the folder")
    try:
        files = {name: (path / name).read_bytes()}
        if (path / TOKENIZER_CONFIG).exists():
            files[TOKENIZER_CONFIG] = (path / TOKENIZER_CONFIG).read_bytes()
    except OSError as error:
        what = f"{path / name}, the tokenizer's file: {error.strerror}"
        raise DataError(f"{what}; put it back, or prepare the folder again") from None
    for file, checksum in checksums.items():
        if hashlib.sha256(files.get(file, b"")).hexdigest() != checksum:
            raise DataError(
                f"{path / file} is not the file with which prepare.py made these tokens: put that "
                "one back, or prepare the folder again"
            )
    return files


def nanogpt_meta(path: Path) -> dict:
    """Replace a missing meta.json: GPT-2's vocabulary or, with a meta.pkl, the ids that occur."""
    dtype = np.dtype("<u2")
    for split in ("train", "val"):
        refuse_wide_tokens(path / f"{split}.bin")
    meta = {"dtype": dtype, "vocab_size": 50257, "tokenizer": "gpt2"}
    if (path / "meta.pkl").exists():
        splits = [memmap_tokens(path / f"{split}.bin", dtype) for split in ("train", "val")]
        highest = max(int(tokens.max(initial=0)) for tokens in splits)
        meta |= {"vocab_size": 1 + highest, "tokenizer": None}
    return meta


def refuse_wide_tokens(file: Path) -> None:
    """Raise DataError if the tokens of a file without meta.json have 4 or 8 bytes, not 2.

    Read as uint16, the upper half of each small number is 0: every second value.
    """
    values = memmap_tokens(file, np.dtype("<u2"))[: 1 << 15]
    if len(values) > 1 and values[::2].any() and not values[1::2].any():
        raise DataError(
            f"{file} seems to have 4 or 8 bytes per token, since every second uint16 in it is 0. "
            "Without a meta.json, token files are uint16, as nanoGPT's are: write them again with "
            "numpy's astype('uint16')"
        )


def spread_blocks(tokens: np.ndarray) -> Iterator[np.ndarray]:
    """Yield up to 16 blocks of 64 KiB, spread evenly over the tokens, quickly from any disk."""
    block = (1 << 16) // tokens.itemsize  # tokens
    blocks = -(-len(tokens) // block)
    count = min(blocks, 16)
    for i in range(count):
        start = i * blocks // count * block
        yield tokens[start : start + block]


def check_range(tokens: np.ndarray, vocab_size: int, file: Path) -> None:
    """Raise DataError if a token id in `file` is not below vocab_size."""
    highest = int(tokens.max(initial=0))
    if highest >= vocab_size:
        problem = f"{file} contains token id {highest}; ids must be below vocab_size {vocab_size}"
        raise DataError(f"{problem}; prepare it again with prepare.py")
