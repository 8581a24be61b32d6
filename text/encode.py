"""Encode documents into the tokens of two splits, in several threads but in a fixed order."""

import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tiktoken

from text import tokenizer
from text.sources import STDIN, Corpus, SourceError
from text.tokenizer_json import JsonEncoding

BATCH = 1 << 18  # characters that a thread encodes at a time
PROGRESS_INTERVAL = 30.0  # seconds between progress lines


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
                # A chunk of white space alone does not start a document.
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

    def __call__(self, pieces: list[Piece]) -> dict[str, bytes]:
        """Return the next bytes of each split's token file."""
        tokens = {"train": bytearray(), "val": bytearray()}
        for piece in pieces:
            tokens[piece.split] += self.to_bytes(tokenizer.token_ids(self.encoding, piece.text))
            if piece.ends_document:
                tokens[piece.split] += self.end
        return tokens


# A document that is encoded in one piece takes up to 150 bytes per character (measured).
BYTES_PER_CHARACTER = 150


def join(pieces: Iterable[Piece], at_words: bool, memory: int) -> Iterator[Piece]:
    """Join the pieces of each document, since separate pieces may have different tokens.

    at_words  the tokens do not change if a piece ends with a letter or digit, and the next begins
              with a space or line break: such pieces stay apart
    memory    bytes that encoding may take. Raises SourceError for a document that needs more.
    """
    texts = []  # of the document, or of its rest
    size = 0  # characters
    for piece in pieces:
        starts_word = piece.text[:1] in (" ", "\n")
        if texts and at_words and starts_word and texts[-1][-1:].isalnum():
            yield Piece(piece.split, "".join(texts), ends_document=False)
            texts, size = [], 0
        texts.append(piece.text)
        size += len(piece.text)
        if BYTES_PER_CHARACTER * size > memory:
            need = BYTES_PER_CHARACTER * size / 1e9
            raise SourceError(
                f"a document of at least {size:,} characters needs more than {need:.1f} GB of "
                f"memory, because this tokenizer encodes it in one piece ({texts[0][:40]!r}...): "
                "divide it with <|endoftext|>"
            )
        if piece.ends_document:
            yield piece._replace(text="".join(texts))
            texts, size = [], 0


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces, since it is slower to hand short documents to threads one by one."""
    batch = []
    size = 0  # characters
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def map_in_order(function: Callable, items: Iterable, num_threads: int) -> Iterator:
    """Call `function` on each item in threads; yield the results in order.

    Reads only a few items ahead, so that memory stays flat. After an exception, for example from a
    signal, does not wait for calls that have started.
    """
    ahead = deque()
    pool = ThreadPoolExecutor(num_threads)
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * num_threads:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def tokenize(
    corpus: Corpus, encoder: Encoder, folder: Path, val_fraction: float, num_threads: int
) -> Splitter:
    """Write train.bin and val.bin into `folder`; return the Splitter with its counts."""
    splitter = Splitter(corpus, val_fraction)
    pieces = splitter.pieces()
    if isinstance(encoder.encoding, JsonEncoding):
        pieces = join(pieces, encoder.encoding.encodes_words_alone, host_memory())
    began = reported = time.monotonic()
    with open(folder / "train.bin", "wb") as train, open(folder / "val.bin", "wb") as val:
        for tokens in map_in_order(encoder, batches(pieces), num_threads):
            train.write(tokens["train"])
            val.write(tokens["val"])
            if time.monotonic() > reported + PROGRESS_INTERVAL:
                reported = time.monotonic()
                print(describe_progress(splitter, reported - began), file=sys.stderr)
    return splitter


def host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe_progress(splitter: Splitter, seconds: float) -> str:
    """For example "tokenizing: 52.4 MB of text read, 13.1 MB/s, 25%"; a pipe has no percentage."""
    corpus = splitter.corpus
    size = splitter.size / 1e6
    line = f"tokenizing: {size:,.1f} MB of text read, {size / seconds:,.1f} MB/s"
    if STDIN in corpus.files:
        return line
    return f"{line}, {corpus.position / corpus.size:.0%}"
