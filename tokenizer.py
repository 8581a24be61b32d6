"""Text -> tokens -> text: bytes, gpt2, or the tokenizer.json of a model.

A tokenizer is a tiktoken.Encoding, or a JsonEncoding with the same members.
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tiktoken

END_OF_TEXT = "<|endoftext|>"
# The first of these that a tokenizer.json has ends a document, unless a file of SETTINGS beside it,
# or --end_token, names another token.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")
CONFIG = "tokenizer_config.json"
SETTINGS = (CONFIG, "special_tokens_map.json")


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or cannot encode a text."""

    exit_status = 2


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
                f"it has no token {', '.join(ends)}, which would end a document: name one with "
                f"--end_token ({', '.join(added[:5])})"
            )
        self.eot_token = vocab[self.end_of_text]
        self.n_vocab = 1 + max(vocab.values())

    def encode_ordinary(self, text: str) -> list[int]:
        """Return the tokens of `text`, never the end of a document. Raises TokenizerError."""
        try:
            # Unlike encode(), a batch lets other threads run; "fast" means without offsets.
            (encoded,) = self.package.encode_batch_fast([text], add_special_tokens=False)
        except Exception as error:
            raise TokenizerError(f"--tokenizer {self.path}: {error}, in {text[:20]!r}...") from None
        ids = encoded.ids
        if self.eot_token in ids:  # a vocabulary may have </s> as a word, which is then spelled
            letters = [self.package.model.tokenize(letter) for letter in self.end_of_text]
            spelled = [token.id for tokens in letters for token in tokens]
            ids = [n for token in ids for n in (spelled if token == self.eot_token else [token])]
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


def load_encoding(name: str, end_of_text: str | None = None) -> Encoding:
    """Return the tokenizer bytes, gpt2, or that of a path: a tokenizer.json or a model's folder.

    `end_of_text` names the token that ends a document, if no file of SETTINGS does.
    Raises TokenizerError, and OSError if tiktoken cannot download gpt2.
    """
    if end_of_text and name in ("bytes", "gpt2"):
        raise TokenizerError(f"--end_token {end_of_text}: {name} ends a document by {END_OF_TEXT}")
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
        )
    if name == "gpt2":
        return tiktoken.get_encoding("gpt2")
    path = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
    try:
        for file in map(path.with_name, SETTINGS):
            if not end_of_text and file.exists():
                end_of_text = named_end(json.loads(file.read_bytes()))
        return load_json(path, path.read_bytes(), end_of_text)
    except ImportError:
        raise
    except Exception as error:  # a damaged file can raise almost any
        raise TokenizerError(
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


def token_ids(encoding: Encoding, text: str) -> np.ndarray | list[int]:
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
                f"the tokenizer of this data is unknown: write token ids, like 17 4 52, not {text}"
            ) from None
    encoding = load_encoding(name)
    return [int(token) for token in token_ids(encoding, text)] or [encoding.eot_token]


def decode(name: str | None, tokens: Iterable[int], before: Iterable[int] = ()) -> Iterator[str]:
    """Yield the text of each token in turn; a character of several tokens comes with the last one.

    `before` contains the preceding tokens: a tokenizer may drop the first space of a text. With no
    tokenizer (None), yields token ids. Raises TokenizerError.
    """
    encoding = load_encoding(name) if name else None
    before, new = list(before), []
    for token in tokens:
        new.append(token)
        text = added_text(encoding, before, new)
        if text.endswith("\ufffd"):  # part of a character
            yield ""
        else:
            yield text
            before, new = new, []
    yield added_text(encoding, before, new)


def added_text(encoding: Encoding | None, before: list[int], new: list[int]) -> str:
    """Return the text of the tokens `new` when they follow the tokens `before`."""
    if encoding is None:
        return "".join(f"{token} " for token in new)
    return encoding.decode(before + new)[len(encoding.decode(before)) :]


def lost_bytes(encoding: Encoding, text: str) -> int:
    """Return how many bytes of `text`, at least, are not in the text of its tokens."""
    ids = [int(token) for token in token_ids(encoding, text)]
    lost = Counter(text) - Counter(encoding.decode(ids))
    return sum(n * len(letter.encode(errors="surrogateescape")) for letter, n in lost.items())
