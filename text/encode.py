"""Documents -> the tokens of two splits, in threads and in order."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken

from runtime import console
from text.sources import STDIN, Corpus
from text.tokenizer import JsonEncoding

BATCH = 1 << 18  # characters that a thread encodes at a time


def choose_split(beginning: bytes, val_fraction: float) -> str:
    """Assign a document to a split by the hash of its beginning.

    File order does not matter, and copies of a document get the same split.
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
        self.val_size = 0

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
            self.val_size += len(raw) if split == "val" else 0
            yield Piece(split, *chunk)
            if chunk.ends_document:
                split = None


class Encoder:
    """Encodes pieces of text to the bytes of a token file."""

    def __init__(self, encoding: tiktoken.Encoding | JsonEncoding):
        self.encoding = encoding
        self.dtype = np.dtype("<u2" if encoding.n_vocab <= 1 << 16 else "<u4")
        self.end = self.to_bytes([encoding.eot_token])
        encoding.encode_ordinary("")  # raises TokenizerError before threads start

    def to_bytes(self, ids) -> bytes:
        return np.asarray(ids, self.dtype).tobytes()

    def ids(self, text: str) -> np.ndarray | list[int]:
        if isinstance(self.encoding, JsonEncoding):
            return self.encoding.encode_ordinary(text)
        if self.encoding.name == "bytes":  # tiktoken would lose bytes that are not UTF-8
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        # encode_ordinary without a Python list, whose creation would block other threads
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def __call__(self, pieces: list[Piece]) -> dict[str, bytes]:
        """Return the next bytes of each split's token file."""
        tokens = {"train": bytearray(), "val": bytearray()}
        for piece in pieces:
            tokens[piece.split] += self.to_bytes(self.ids(piece.text))
            if piece.ends_document:
                tokens[piece.split] += self.end
        return tokens


def join(pieces: Iterable[Piece], keeps_words: bool) -> Iterator[Piece]:
    """Join the pieces of each document that cannot be encoded one by one."""
    texts: list[str] = []
    for piece in pieces:
        after_word = texts and texts[-1][-1:].isalnum() and piece.text[:1] in (" ", "\n")
        if keeps_words and after_word:
            yield Piece(piece.split, "".join(texts), ends_document=False)
            texts = []
        texts.append(piece.text)
        if piece.ends_document:
            yield Piece(piece.split, "".join(texts), ends_document=True)
            texts = []


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces, since handing over short documents one by one takes longer."""
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

    Takes few items ahead, so that memory stays flat.
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
) -> Splitter:
    """Write train.bin and val.bin into `folder`; return the counts."""
    splitter = Splitter(corpus, val_fraction)
    pieces = splitter.pieces()
    if isinstance(encoder.encoding, JsonEncoding):
        pieces = join(pieces, encoder.encoding.keeps_words)
    began = time.monotonic()

    def progress() -> str:
        return describe_progress(corpus, splitter.size, time.monotonic() - began)

    with (
        open(folder / "train.bin", "wb") as train,
        open(folder / "val.bin", "wb") as val,
        console.live(progress, plain_interval=2),
    ):
        for tokens in map_in_order(encoder, batches(pieces), num_threads):
            train.write(tokens["train"])
            val.write(tokens["val"])
    return splitter


def describe_progress(corpus: Corpus, size: int, seconds: float) -> str:
    """Such as "tokenizing: 52.4 MB of text, 13.1 MB/s, 25%, 0:00:12 left"."""
    line = f"tokenizing: {size / 1e6:,.1f} MB of text, {size / 1e6 / seconds:,.1f} MB/s"
    if STDIN in corpus.files or not corpus.position:
        return line
    share = min(1, corpus.position / corpus.size)
    left = timedelta(seconds=round(seconds / share - seconds))
    return f"{line}, {share:.0%}, {left} left"
