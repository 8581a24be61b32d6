"""Text -> tokens -> text: bytes, gpt2, or the tokenizer.json of a model.

A tokenizer is a tiktoken.Encoding, or a JsonEncoding with the same members.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

from errors import UsageError

END_OF_TEXT = "<|endoftext|>"
# The first of these that a tokenizer.json has ends a document, unless a file of SETTINGS beside it
# names another token.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")
CONFIG = "tokenizer_config.json"
SETTINGS = (CONFIG, "special_tokens_map.json")


class JsonEncoding:
    """A tokenizer.json of Hugging Face, which the package tokenizers reads."""

    def __init__(self, path: Path, contents: bytes, end_of_text: str | None):
        """`end_of_text` names the token that ends a document. Raises ValueError."""
        from tokenizers import Tokenizer

        self.path, self.name, self.contents = path, path.name, contents
        self.package = Tokenizer.from_buffer(contents)
        self.package.no_truncation()
        self.package.no_padding()
        self.package.encode_special_tokens = True  # as ordinary text, where a document names them
        vocab = self.package.get_vocab()
        added = [token.content for token in self.package.get_added_tokens_decoder().values()]
        if end_of_text:  # which need not be marked: a vocabulary may have </s> as a word
            ends, candidates = [end_of_text], vocab
        else:
            ends, candidates = ENDS_OF_TEXT, added
        self.end_of_text = next((name for name in ends if name in candidates), None)
        if self.end_of_text is None:
            raise ValueError(
                f"no token ends a document: name its eos_token in a {CONFIG} beside it"
            )
        self.eot_token = vocab[self.end_of_text]
        self.n_vocab = 1 + max(vocab.values())

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the tokens of `text`, never the end of a document. Raises UsageError."""
        return self.encode_ordinary_batch([text])[0]

    def encode_ordinary_batch(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of each text; the package encodes texts in parallel."""
        try:
            encoded = self.package.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:
            raise UsageError(f"--tokenizer {self.path}: {error}") from None
        ids = [text.ids for text in encoded]
        if any(self.eot_token in tokens for tokens in ids):  # its vocabulary has </s> as a word
            raise UsageError(
                f"--tokenizer {self.path} takes {self.end_of_text} in a text for its end"
            )
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.package.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and, for the end of a document, tokenizer_config.json."""
        (folder / "tokenizer.json").write_bytes(self.contents)
        (folder / CONFIG).write_text(json.dumps({"eos_token": self.end_of_text}) + "\n")


Encoding = tiktoken.Encoding | JsonEncoding
# Cached: sample.py needs the same tokenizer to encode and to decode.
load_json = functools.lru_cache(maxsize=1)(JsonEncoding)


def load_encoding(name: str) -> Encoding:
    """Return the tokenizer bytes, gpt2, or that of a path: a tokenizer.json or a model's folder.

    Raises UsageError, and OSError if tiktoken cannot download gpt2.
    """
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        ends = {END_OF_TEXT: 256}
        pattern = r"[\s\S]{1,64}"  # any pattern gives the same tokens, and this one is fast
        return tiktoken.Encoding(
            "bytes", pat_str=pattern, mergeable_ranks=ranks, special_tokens=ends
        )
    if name == "gpt2":
        try:
            return tiktoken.get_encoding("gpt2")
        except OSError as error:
            hint = "set TIKTOKEN_CACHE_DIR to a folder that has it, or name a tokenizer.json"
            raise OSError(f"gpt2 cannot be downloaded: {hint} ({error})") from None
    path = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
    try:
        end = None
        for file in map(path.with_name, SETTINGS):
            if not end and file.exists():
                end = named_end(json.loads(file.read_bytes()))
        return load_json(path, path.read_bytes(), end)
    except ImportError:
        raise
    except Exception as error:  # a damaged file can raise almost any
        raise UsageError(
            f"--tokenizer {name} is not bytes, gpt2 or a tokenizer.json to use: {error}"
        ) from None


def end_name(encoding: Encoding) -> str:
    """Return the name of eot_token, the token that ends a text."""
    return encoding.end_of_text if isinstance(encoding, JsonEncoding) else END_OF_TEXT


def fingerprint(encoding: Encoding | None) -> str | None:
    """Return what differs for tokenizers with other tokens, whichever of them ends a text."""
    if isinstance(encoding, JsonEncoding):
        return hashlib.sha256(encoding.contents).hexdigest()
    return encoding and encoding.name


def named_end(settings: dict) -> str | None:
    """Return the name of the token that ends a text, from the contents of a file of SETTINGS."""
    token = settings.get("eos_token")
    return token["content"] if isinstance(token, dict) else token


def decode(name: str | None, tokens: Iterable[int], before: Iterable[int] = ()) -> Iterator[str]:
    """Yield the text of each token in turn; a character of several tokens comes with the last one.

    `before` contains the preceding tokens: a tokenizer may drop the first space of a text. With no
    tokenizer (None), yields token ids. Raises UsageError.
    """
    if name is None:
        yield from (f"{token} " for token in tokens)
        return
    encoding = load_encoding(name)
    before, new = list(before), []
    for token in tokens:
        new.append(token)
        text = encoding.decode(before + new)[len(encoding.decode(before)) :]
        if text.endswith("\ufffd"):  # part of a character
            yield ""
        else:
            yield text
            before, new = new, []
    if new:
        yield text
