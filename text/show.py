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
    encoding = end = None
    try:
        if folder.tokenizer:
            encoding = tokenizer.load_encoding(folder.tokenizer)
            end = encoding.eot_token
    except tokenizer.TokenizerError as error:
        if folder.tokenizer != "gpt2":
            raise
        print(f"{error}; here are ids")
        end = tokenizer.GPT2_END
    for split in ("train", "val"):
        ids = folder.tokens(split)
        print(f"{split}: {plural(len(ids), 'token')}{describe_documents(ids, end)}")
    for start in document_starts(folder.tokens("train"), end):
        ids = folder.tokens("train")[start : start + SHOWN]
        print(f"\n--- train, from token {start:,}\n{printable(ids, encoding)}")


def describe_documents(ids: np.ndarray, end: int | None) -> str:
    """Count the documents that the token `end` ends, block by block; a rest after it is ignored."""
    if end is None:
        return ""
    ends = [[-1]]
    for start in range(0, len(ids), 1 << 20):
        ends.append(start + np.flatnonzero(ids[start : start + (1 << 20)] == end))
    lengths = np.diff(np.concatenate(ends)) - 1
    if not len(lengths):
        return " of one document"
    spread = f"{lengths.min():,} to {lengths.max():,} tokens each, {lengths.mean():,.1f} on average"
    return f", {plural(len(lengths), 'document')} of {spread}"


def document_starts(ids: np.ndarray, end: int | None) -> list[int]:
    """Find the first document at or after 0, 1/3 and 2/3 of the tokens."""
    starts = {0}
    for position in (len(ids) // 3, 2 * len(ids) // 3):
        window = ids[position : position + (1 << 20)]
        ends = [] if end is None else np.flatnonzero(window == end)
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
