"""Text <-> tokens. Every tokenizer is a tiktoken.Encoding."""

import base64
import codecs
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

END_OF_TEXT = "<|endoftext|>"

# How text is split before byte-pair merging, for PATH.tiktoken: as Llama 3 and cl100k_base do it.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or text that it cannot encode."""


def load(name: str) -> tiktoken.Encoding:
    """Return the encoding `bytes` (256 bytes and end-of-text), `gpt2`, or PATH.tiktoken.

    A .tiktoken file has a line for each token: base64 and rank. Raises TokenizerError.
    """
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
        )
    if name == "gpt2":
        return load_gpt2()
    return load_file(Path(name))


def load_gpt2() -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # requests' exceptions are OSErrors
        raise TokenizerError(
            "the merges of the gpt2 tokenizer are not in tiktoken's cache and cannot be downloaded "
            f"({type(error).__name__}): run once with network access, set TIKTOKEN_CACHE_DIR to a "
            "copy of a filled cache, or use --tokenizer bytes"
        ) from None


def load_file(path: Path) -> tiktoken.Encoding:
    try:
        ranks = {}
        for line in path.read_bytes().splitlines():
            if line:
                token, rank = line.split()
                ranks[base64.b64decode(token)] = int(rank)
        if not all(bytes([i]) in ranks for i in range(256)):
            raise ValueError("a byte without a token")
        return tiktoken.Encoding(
            path.stem,
            pat_str=LLAMA3_PATTERN,
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: max(ranks.values()) + 1},
        )
    except OSError as error:
        raise TokenizerError(
            f"--tokenizer {path}: {error.strerror}; choose bytes, gpt2 or PATH.tiktoken"
        ) from None
    except ValueError:
        raise TokenizerError(
            f"--tokenizer {path} is not a .tiktoken file: it needs lines of a base64 token and its "
            "rank, with a token for each of the 256 bytes"
        ) from None


def encode(name: str | None, text: str) -> list[int]:
    """Return the tokens of `text`, or end-of-text if it is empty.

    Without a tokenizer (None) the text is a list of token ids. Raises TokenizerError.
    """
    if name is None:
        try:
            return [int(token) for token in text.split()] or [0]
        except ValueError:
            raise TokenizerError(
                f"the tokenizer of this data is unknown: write the prompt as token ids, such as "
                f"'17 4 52', not {text!r}"
            ) from None
    encoding = load(name)
    return encoding.encode_ordinary(text) or [encoding.eot_token]


def decode(name: str | None, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they come; a character of several tokens comes with the last."""
    if name is None:
        for token in tokens:
            yield f"{token} "
        return
    encoding = load(name)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(encoding.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)
