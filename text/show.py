"""What a token folder holds: counts, lengths, and the beginnings of a few documents."""

from pathlib import Path

import numpy as np
import tiktoken

from text import tokenizer
from text.sources import plural

SHOWN = 100  # tokens printed of a document


def show(path: Path) -> None:
    """Print counts, lengths, and the beginnings of a few documents. Raises DataError."""
    from data import open_folder  # here, since importing torch is slow

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
    """Count the documents that end-of-text ends, block by block; a rest after it is ignored."""
    if encoding is None:
        return ""
    ends = [[-1]]
    for start in range(0, len(ids), 1 << 20):
        ends.append(start + np.flatnonzero(ids[start : start + (1 << 20)] == encoding.eot_token))
    lengths = np.diff(np.concatenate(ends)) - 1
    if not len(lengths):
        return " of one document"
    spread = f"{lengths.min():,} to {lengths.max():,} tokens each, {lengths.mean():,.1f} on average"
    return f", {plural(len(lengths), 'document')} of {spread}"


def document_starts(ids: np.ndarray, encoding: tiktoken.Encoding | None) -> list[int]:
    """Find the first document at or after 0, 1/3 and 2/3 of the tokens."""
    starts = {0}
    for position in (len(ids) // 3, 2 * len(ids) // 3):
        window = ids[position : position + (1 << 20)]
        ends = np.flatnonzero(window == encoding.eot_token) if encoding else []
        start = position + int(ends[0]) + 1 if len(ends) else position
        if start < len(ids):
            starts.add(start)
    return sorted(starts)


def printable(ids: np.ndarray, encoding: tiktoken.Encoding | None) -> str:
    """Decode up to the end of a document, with control characters escaped."""
    if encoding is None:
        return " ".join(map(str, ids))
    ends = np.flatnonzero(ids == encoding.eot_token)
    shown = ids[: ends[0]] if len(ends) else ids
    text = encoding.decode(shown.tolist()) + ("" if len(ends) else " ...")
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
