"""Tokenizers: each is a tiktoken.Encoding, or a JsonEncoding with the same methods."""

import functools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tiktoken

END_OF_TEXT = "<|endoftext|>"
# The first of these tokens that a tokenizer.json contains ends a document.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or cannot encode a text."""

    exit_status = 2


# --------------------------------------------------------------------------------------------------
# Loading


def load_encoding(name: str) -> "tiktoken.Encoding | JsonEncoding":
    """Return the tokenizer: bytes (256 bytes and end-of-text), gpt2 or a tokenizer.json, by path.

    Executes no code from a file. Raises TokenizerError.
    """
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
    path = Path(name)
    try:
        contents = path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"--tokenizer {path}: {error.strerror}; choose bytes, gpt2 or a tokenizer.json"
        ) from None
    if path.suffix != ".json":
        raise TokenizerError(
            f"--tokenizer {path} is not a tokenizer.json: prepare the data with the tokenizer.json "
            "of the same model"
        )
    try:
        return load_json(path, contents)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise TokenizerError(
            f"--tokenizer {path} cannot be used as a tokenizer.json of Hugging Face: {reason}"
        ) from None


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
# Hugging Face's tokenizer.json


class JsonEncoding:
    """A tokenizer.json. Members with the names of tiktoken.Encoding's members do the same.

    The tokenizers package encodes and decodes. Everything else needs only the file.
    """

    def __init__(self, path: Path, contents: bytes):
        """Raises what `load_encoding` catches."""
        spec = json.loads(contents)
        model = spec["model"]
        vocab = model["vocab"]
        if isinstance(vocab, list):  # Unigram's: [piece, score]
            vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
        self.path = path
        self.name = path.name
        self.contents = contents
        self.added_tokens = {token["content"]: token["id"] for token in spec["added_tokens"]}
        self.special_tokens_set = {t["content"] for t in spec["added_tokens"] if t["special"]}
        ends = [name for name in ENDS_OF_TEXT if name in self.special_tokens_set]
        if not ends:
            raise ValueError(f"none of its special tokens is {', '.join(ENDS_OF_TEXT)}")
        self.eot_token = self.added_tokens[ends[0]]
        unknown = {vocab.get(model.get("unk_token")), model.get("unk_id")}  # Unigram stores the id
        self.special_ids = {self.added_tokens[name] for name in self.special_tokens_set} - unknown
        self.n_vocab = 1 + max(*vocab.values(), *self.added_tokens.values())
        # Byte fallback: `decode` waits for the last byte of a character.
        self.byte_tokens = {vocab.get(f"<0x{byte:02X}>") for byte in range(256)}

    @functools.cached_property
    def package(self):
        """The file as a tokenizers.Tokenizer that does not recognise special tokens in text."""
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # prepare.py has its own threads
        try:
            import tokenizers
        except ImportError:
            raise TokenizerError(
                f"--tokenizer {self.path} needs the tokenizers package: pip install tokenizers"
            ) from None
        with package_errors(f"--tokenizer {self.path} cannot be used"):
            package = tokenizers.Tokenizer.from_buffer(self.contents)
            for name, token in self.added_tokens.items():
                if package.token_to_id(name) != token:
                    raise ValueError(f"{name} gets the id {package.token_to_id(name)}, not {token}")
            package.encode_special_tokens = True
            package.no_truncation()
            package.no_padding()
            if getattr(package.model, "dropout", None):
                package.model.dropout = None
            return package

    def encode_ordinary(self, text: str) -> list[int]:
        package = self.package
        what = f"the {len(text):,} characters that begin with {text[:20]!r}"
        with package_errors(f"--tokenizer {self.path} cannot encode {what}"):
            # Unlike encode(), a batch lets other threads run; "fast" means without offsets.
            (encoded,) = package.encode_batch_fast([text], add_special_tokens=False)
            ids = encoded.ids
            if self.special_ids.isdisjoint(ids):
                return ids
            # The model merged the letters of </s>, or knows it as a word: split it into letters.
            for i, token in reversed(list(enumerate(ids))):
                if token in self.special_ids:
                    letters = map(package.model.tokenize, package.id_to_token(token))
                    ids[i : i + 1] = [letter.id for tokens in letters for letter in tokens]
            return ids

    def decode(self, ids: list[int]) -> str:
        return self.package.decode(ids, skip_special_tokens=False)


@contextmanager
def package_errors(what: str) -> Iterator[None]:
    """Turn errors of the package tokenizers into TokenizerError."""
    try:
        yield
    except (TokenizerError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        reason = str(error).partition("\n")[0]
        raise TokenizerError(f"{what}: {reason}") from None


# Cached: a run needs the same tokenizer.json at its start and for the sample at its end.
load_json = functools.lru_cache(maxsize=1)(JsonEncoding)


# --------------------------------------------------------------------------------------------------
# Text <-> tokens


def token_ids(encoding: "tiktoken.Encoding | JsonEncoding", text: str) -> np.ndarray | list[int]:
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
