"""Text <-> tokens. Every tokenizer is a tiktoken.Encoding."""

import base64
import codecs
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

END_OF_TEXT = "<|endoftext|>"
# A document ends with the first of these that its tokenizer has.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>")
# Suffixes of files that bring their pattern and their special tokens.
SELF_CONTAINED = (".model",)

# How text is cut into pieces before byte-pair merging, for PATH.tiktoken. llama3 is that of Meta's
# llama3/tokenizer.py. The others are tiktoken's own, from tiktoken_ext/openai_public.py, copied
# because two of them are in functions that download their ranks.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
PATTERNS = {"llama3": LLAMA3, "cl100k": CL100K, "o200k": O200K, "gpt2": GPT2}


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or text that it cannot encode."""


class Encoding(tiktoken.Encoding):
    @property
    def eot_token(self) -> int:
        """The token that ends a document. (tiktoken's is <|endoftext|> alone.)"""
        ends = [name for name in ENDS_OF_TEXT if name in self.special_tokens_set]
        return self.encode_single_token(ends[0])


# --------------------------------------------------------------------------------------------------
# Loading


def load(name: str, pattern: str | None = None) -> tiktoken.Encoding:
    """Return the encoding `bytes` (256 bytes and end-of-text), `gpt2`, or that of a file.

    PATH.tiktoken has a line for each token: base64 and rank. `pattern`, one of PATTERNS, is for
    such a file only, and by default the one that the file's name names. PATH.model is the
    tokenizer.model of Llama 3. Raises TokenizerError.
    """
    path = Path(name)
    if pattern and (name in ("bytes", "gpt2") or path.suffix in SELF_CONTAINED):
        raise TokenizerError(f"--pattern {pattern} is for --tokenizer PATH.tiktoken, not {name}")
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
        )
    if name == "gpt2":
        return load_gpt2()
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"--tokenizer {path}: {error.strerror}; choose bytes, gpt2 or PATH (a .tiktoken "
            "or .model file)"
        ) from None
    return load_ranks(path, contents, pattern or pattern_of(name))


def pattern_of(path: str) -> str:
    """Return the pattern that a file's name contains as a word, as o200k_base.tiktoken; or llama3.

    prepare.py writes tokenizer.PATTERN.tiktoken into a token folder.
    """
    for word in re.split("[^a-z0-9]+", Path(path).name.lower()):
        if word in PATTERNS:
            return word
    return "llama3"


def load_gpt2() -> tiktoken.Encoding:
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as error:  # requests' exceptions are OSErrors
        raise TokenizerError(
            "the merges of the gpt2 tokenizer are not in tiktoken's cache and cannot be downloaded "
            f"({type(error).__name__}): run once with network access, set TIKTOKEN_CACHE_DIR to a "
            "copy of a filled cache, or use --tokenizer bytes"
        ) from None


# --------------------------------------------------------------------------------------------------
# Rank files


def load_ranks(path: Path, contents: bytes, pattern: str) -> tiktoken.Encoding:
    """Load a .tiktoken file, or Llama 3's tokenizer.model. Special tokens follow the ranks."""
    is_llama3 = path.suffix == ".model"
    try:
        ranks = read_ranks(contents)
    except ValueError as error:
        hint = "; SentencePiece models, as Llama 2 has, are not supported" if is_llama3 else ""
        raise TokenizerError(
            f"--tokenizer {path} is not a {path.suffix if is_llama3 else '.tiktoken'} file "
            f"({error}): it needs lines of a base64 token and its rank, with a token for each of "
            f"the 256 bytes{hint}"
        ) from None
    names = llama3_special_tokens() if is_llama3 else [END_OF_TEXT]
    return Encoding(
        path.name,
        pat_str=LLAMA3 if is_llama3 else PATTERNS[pattern],
        mergeable_ranks=ranks,
        special_tokens={name: len(ranks) + i for i, name in enumerate(names)},
    )


def llama3_special_tokens() -> list[str]:
    """The 256 tokens that follow the 128,000 ranks, of Meta's llama3/tokenizer.py.

    Llama 3.1 renames four of the reserved ones and has the same ids.
    """
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(251)]
    return [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        *reserved[:4],
        "<|start_header_id|>",
        "<|end_header_id|>",
        reserved[4],
        "<|eot_id|>",  # of a turn in a chat
        *reserved[5:],
    ]


def read_ranks(contents: bytes) -> dict[bytes, int]:
    """Return the rank of each token of a .tiktoken file. Raises ValueError."""
    ranks = {}
    line_of_rank = {}
    for number, line in enumerate(contents.splitlines(), start=1):
        if not line:
            continue
        try:
            encoded, digits = line.split()
            token = base64.b64decode(encoded, validate=True)
            rank = int(digits)
        except ValueError:
            raise ValueError(f"line {number} is not a token and a rank") from None
        if token in ranks:
            raise ValueError(f"line {number} repeats the token of rank {ranks[token]}")
        if rank in line_of_rank:
            raise ValueError(f"line {number} repeats rank {rank} of line {line_of_rank[rank]}")
        ranks[token] = rank
        line_of_rank[rank] = number
    for rank in range(len(ranks)):
        if rank not in line_of_rank:
            raise ValueError(f"{len(ranks)} tokens, but none has rank {rank}")
    check_bytes(ranks)
    return ranks


def check_bytes(ranks: dict[bytes, int]) -> None:
    """Raise ValueError unless any text can be encoded."""
    for i in range(256):
        if bytes([i]) not in ranks:
            raise ValueError(f"no token for byte {i}")


# --------------------------------------------------------------------------------------------------
# Text <-> tokens


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


def text_bytes(name: str | None, counts: list[int]) -> int:
    """The bytes of the text of counts[i] tokens of each id i; special tokens have none.

    Raises TokenizerError.
    """
    if name is None:
        raise TokenizerError("the tokenizer of this data is unknown, and ids have no text")
    encoding = load(name)
    total = 0
    for token, count in enumerate(counts):
        if count and not encoding.is_special_token(token):
            total += count * len(encoding.decode_single_token_bytes(token))
    return total
