"""Tokenizers: each is a tiktoken.Encoding, or a JsonEncoding with the same methods."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tiktoken

from text.tokenizer_json import JsonEncoding, TokenizerError, load_json

END_OF_TEXT = "<|endoftext|>"

# --------------------------------------------------------------------------------------------------
# Loading


def load_encoding(name: str, end_of_text: str | None = None) -> tiktoken.Encoding | JsonEncoding:
    """Return the tokenizer: bytes (256 bytes and end-of-text), gpt2 or a tokenizer.json, by path.

    `end_of_text` names the token that ends a document, if not tokenizer_config.json does. Raises
    TokenizerError.
    """
    if end_of_text and name in ("bytes", "gpt2"):
        raise TokenizerError(f"--end_token {end_of_text}: {name} ends a document by {END_OF_TEXT}")
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
        )
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:  # requests' exceptions are OSErrors
            raise TokenizerError(
                f"the merges of the gpt2 tokenizer cannot be downloaded ({type(error).__name__}): "
                "run once with network access, set TIKTOKEN_CACHE_DIR to a copy of a filled cache, "
                "or use --tokenizer bytes"
            ) from None
    return load_json(Path(name), end_of_text)


def find_in_folder(path: Path, name: str, vocab_size: int) -> str:
    """Return what to load for `name`: a built-in tokenizer, or a file in the folder `path`.

    Raises TokenizerError, also if the tokenizer does not have vocab_size tokens.
    """
    if name not in ("bytes", "gpt2"):
        file = path / Path(name).name  # a hostile manifest may name a file outside of its folder
        if not file.is_file():
            raise TokenizerError(
                f"the tokenizer of {path} is missing: there is no {file}; copy the file there"
            )
        name = str(file)
    size = load_encoding(name).n_vocab
    if size != vocab_size:
        raise TokenizerError(
            f"{name} is a different tokenizer: it has {size:,} tokens, the model's {vocab_size:,}"
        )
    return name


# --------------------------------------------------------------------------------------------------
# Text <-> tokens


def token_ids(encoding: tiktoken.Encoding | JsonEncoding, text: str) -> np.ndarray | list[int]:
    """The tokens of `text`: an array if possible, since building a list blocks other threads."""
    if isinstance(encoding, JsonEncoding):
        return encoding.encode_ordinary(text)
    if encoding.name == "bytes":  # tiktoken would lose bytes that are not UTF-8
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
    return encoding.encode_to_numpy(text, disallowed_special=())


def encode(name: str | None, text: str) -> list[int]:
    """Return the tokens of `text`, or end-of-text if it is empty.

    With no tokenizer (None), `text` is a list of token ids. Raises TokenizerError.
    """
    if name is None:
        try:
            return [int(token) for token in text.split()] or [0]
        except ValueError:
            raise TokenizerError(
                f"the tokenizer of this data is unknown: write the prompt as token ids, such as "
                f"'17 4 52', not {text!r}"
            ) from None
    encoding = load_encoding(name)
    return [int(token) for token in token_ids(encoding, text)] or [encoding.eot_token]


def decode(name: str | None, tokens: Iterable[int], before: Iterable[int] = ()) -> Iterator[str]:
    """Yield the text of each token in turn; a character of several tokens comes with the last one.

    `before` contains the preceding tokens: a tokenizer may drop the first space of a text.
    Raises TokenizerError.
    """
    if name is None:
        for token in tokens:
            yield f"{token} "
        return
    encoding = load_encoding(name)
    byte_tokens = getattr(encoding, "byte_tokens", ())
    before = list(before)
    new = []
    for token in tokens:
        new.append(token)
        text = added_text(encoding, before, new)
        if token in byte_tokens or text.endswith("\ufffd"):
            yield ""
        else:
            yield text
            before, new = new, []
    yield added_text(encoding, before, new)


def added_text(encoding, before: list[int], new: list[int]) -> str:
    """Return the text of the tokens `new` when they follow the tokens `before`."""
    return encoding.decode(before + new)[len(encoding.decode(before)) :]
