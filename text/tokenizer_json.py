"""A tokenizer.json of Hugging Face, with the members of a tiktoken.Encoding.

To remove it, delete this file and its branches in tokenizer.py and encode.py.
"""

import functools
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The first of these tokens that a tokenizer.json contains ends a document, unless eos_token in the
# tokenizer_config.json beside it, or --end_token, says which one does.
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>")
CONFIG = "tokenizer_config.json"

# Patterns by which tokenizers cut text into words. In each, a word ends before a space or line
# break, and only a space at the end of a text could join the white space after it.
GPT2 = "GPT-2"  # of ByteLevel, which has no pattern in the file
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_PATTERNS = {GPT2, LETTERS + r"|\p{N}{1,3}" + REST, LETTERS + r"|\p{N}" + REST}  # Llama 3, Qwen


class TokenizerError(ValueError):
    """A tokenizer cannot be loaded, or cannot encode a text."""

    exit_status = 2


def load_json(path: Path, end_of_text: str | None = None) -> "JsonEncoding":
    """Return the tokenizer of a file. Executes no code from it. Raises TokenizerError."""
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
        return load_contents(path, contents, end_of_text or read_eos_token(path.with_name(CONFIG)))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise TokenizerError(
            f"--tokenizer {path} cannot be used as a tokenizer.json of Hugging Face: {reason}"
        ) from None


def read_eos_token(config: Path) -> str | None:
    """Return eos_token of a tokenizer_config.json, if there is one."""
    if not config.exists():
        return None
    token = json.loads(config.read_bytes()).get("eos_token")
    return token["content"] if isinstance(token, dict) else token


class JsonEncoding:
    """A tokenizer.json. Members with the names of tiktoken.Encoding's members do the same.

    The tokenizers package encodes and decodes. Everything else needs only the file.
    """

    def __init__(self, path: Path, contents: bytes, end_of_text: str | None = None):
        """`end_of_text` is the token that ends a document. Raises what `load_json` catches."""
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
        self.end_of_text = end_of_text or (ends[0] if ends else None)
        if self.end_of_text not in self.added_tokens:
            raise ValueError(
                f"it has no token {end_of_text or ', '.join(ENDS_OF_TEXT)}, which would end a "
                "document: name one with --end_token, such as "
                f"{', '.join(sorted(self.special_tokens_set)[:5])}"
            )
        self.eot_token = self.added_tokens[self.end_of_text]
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

    @functools.cached_property
    def encodes_words_alone(self) -> bool:
        """Whether a cut between a letter or digit and a space or line break changes no token.

        Known patterns split a text there whatever comes before or after, each part is encoded
        alone, nothing is put before the first part, and no added token contains such a place.
        """
        spec = json.loads(self.contents)
        splitter = spec.get("pre_tokenizer") or {}
        parts = splitter.get("pretokenizers", [splitter])
        patterns = {pattern_of(part) for part in parts} - {None}
        added = [token for token in spec["added_tokens"] if not token["special"]]
        return (
            (spec.get("normalizer") or {}).get("type") in (None, "NFC")
            and spec["model"].get("type", "BPE") == "BPE"
            and bool(patterns)
            and patterns <= WORD_PATTERNS
            and not any(part.get("add_prefix_space") for part in parts)
            and not any(token["lstrip"] or token["rstrip"] for token in added)
            and not any(re.search(r"[^\W_][ \n]", token["content"]) for token in added)
        )

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and, for the end of a document, tokenizer_config.json."""
        (folder / "tokenizer.json").write_bytes(self.contents)
        (folder / CONFIG).write_text(json.dumps({"eos_token": self.end_of_text}) + "\n")

    def decode(self, ids: list[int]) -> str:
        return self.package.decode(ids, skip_special_tokens=False)


def pattern_of(splitter: dict) -> str | None:
    """Return the pattern by which a part of a pre-tokenizer splits text, or None if it does not."""
    if splitter.get("type") == "ByteLevel":
        return GPT2 if splitter.get("use_regex", True) else None
    is_known = splitter.get("type") == "Split" and splitter["behavior"] == "Isolated"
    return splitter["pattern"].get("Regex", "another") if is_known else "another"


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
load_contents = functools.lru_cache(maxsize=1)(JsonEncoding)
