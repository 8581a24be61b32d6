"""Text <-> tokens. Every tokenizer is a tiktoken.Encoding."""

import base64
import codecs
import errno
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tiktoken

END_OF_TEXT = "<|endoftext|>"
# A document ends with the first of these that its tokenizer has.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>")
# Suffixes of files that bring their pattern and their special tokens.
SELF_CONTAINED = (".model", ".json")

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
# SmolLM's and StarCoder's: every digit is a piece, the rest is cut as by GPT2.
GPT2_DIGITS = r"'(?:[sdmt]|ll|ve|re)|\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
PATTERNS = {"llama3": LLAMA3, "cl100k": CL100K, "o200k": O200K, "gpt2": GPT2}
BYTES = r"[\s\S]"
# Of tokenizer.json files: Qwen2's, and that of Mistral NeMo and Nemotron.
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = O200K.replace(r"\p{N}{1,3}", r"\p{N}").replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "")


class TokenizerError(ValueError):
    """A tokenizer that cannot be loaded, or text that it cannot encode."""

    exit_status = 2


class Encoding(tiktoken.Encoding):
    @property
    def eot_token(self) -> int:
        """The token that ends a document. (tiktoken's is <|endoftext|> alone.)"""
        ends = [name for name in ENDS_OF_TEXT if name in self.special_tokens_set]
        return self.encode_single_token(ends[0])


# --------------------------------------------------------------------------------------------------
# Loading


def load_encoding(name: str, pattern: str | None = None) -> tiktoken.Encoding:
    """Return the encoding `bytes` (256 bytes and end-of-text), `gpt2`, or that of a file.

    PATH.tiktoken has a line for each token: base64 and rank. `pattern`, one of PATTERNS, is for
    such a file only, and by default the one that the file's name names. PATH.model is the
    tokenizer.model of Llama 3, and PATH.json a tokenizer.json of Hugging Face, of byte-level BPE.
    Nothing is executed. Raises TokenizerError.
    """
    path = Path(name)
    if pattern and (name in ("bytes", "gpt2") or path.suffix in SELF_CONTAINED):
        raise TokenizerError(f"--pattern {pattern} is for --tokenizer PATH.tiktoken, not {name}")
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return Encoding(
            "bytes", pat_str=BYTES, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: 256}
        )
    if name == "gpt2":
        return load_gpt2()
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may not end
            raise OSError(errno.EINVAL, "Not a regular file")
        contents = path.read_bytes()
    except OSError as error:
        raise TokenizerError(
            f"--tokenizer {path}: {error.strerror}; choose bytes, gpt2 or PATH (a .tiktoken, "
            ".model or .json file)"
        ) from None
    if path.suffix == ".json":
        return load_json(path, contents)
    return load_ranks(path, contents, pattern or pattern_of(name))


def find(path: Path, name: str, vocab_size: int) -> str:
    """The tokenizer `name`, which is built in or a file in the checkpoint `path`.

    Raises TokenizerError.
    """
    if name not in ("bytes", "gpt2"):
        # Older manifests have the path of where the file was, in a token folder.
        file = path / Path(name).name
        if not file.is_file():
            raise TokenizerError(
                f"the tokenizer of {path} is missing: there is no {file}; copy the file there"
            )
        name = str(file)
    size = load_encoding(name).n_vocab
    if size != vocab_size:
        raise TokenizerError(
            f"{name} is another tokenizer: it has {size:,} tokens, the model's {vocab_size:,}"
        )
    return name


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


def train_ranks(texts: Iterable[str], vocab_size: int) -> bytes:
    """Return a .tiktoken file of byte-pair merges, trained on `texts` with the pattern llama3.

    It has `vocab_size` tokens with end-of-text, or fewer if there is nothing left to merge. The
    same texts give the same file. Raises TokenizerError.
    """
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise TokenizerError(
            "--train_tokenizer needs the tokenizers package: pip install tokenizers"
        ) from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Merges take the square of a piece's length: it is bounded, and shorter ones are as in LLAMA3.
    pattern = LLAMA3.replace("+", "{1,1000}").replace("*", "{0,1000}")
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    lines = []
    for text, rank in sorted(model.get_vocab().items(), key=lambda token: token[1]):
        lines.append(base64.b64encode(to_bytes(text)) + f" {rank}\n".encode())
    return b"".join(lines)


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
# Hugging Face's tokenizer.json


def load_json(path: Path, contents: bytes) -> tiktoken.Encoding:
    """Load a tokenizer.json whose ids tiktoken computes exactly. Raises TokenizerError."""
    try:
        spec = json.loads(contents)
        ranks, special_tokens = read_vocabulary(spec)
        check_merges(spec["model"], ranks)
        return Encoding(
            path.name,
            pat_str=read_pattern(spec["pre_tokenizer"]),
            mergeable_ranks=ranks,
            special_tokens=special_tokens,
        )
    except ValueError as error:
        raise TokenizerError(f"--tokenizer {path} cannot be used: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else "a value has a wrong type"
        raise TokenizerError(
            f"--tokenizer {path} is not a tokenizer.json of Hugging Face ({reason})"
        ) from None


def read_vocabulary(spec: dict) -> tuple[dict[bytes, int], dict[str, int]]:
    """Return the ids of ordinary and of special tokens. Raises ValueError."""
    model = spec["model"]
    if model["type"] != "BPE" or model.get("byte_fallback"):
        raise ValueError("its model is not byte-level BPE")
    if spec.get("normalizer"):
        raise ValueError(f"its normalizer {spec['normalizer']['type']} is not supported")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            raise ValueError(f"its option {option} is not supported")
    special_tokens = {}
    for token in spec["added_tokens"]:
        if not token["special"]:  # it would be found in text, before the pattern cuts it
            raise ValueError(f"its added token {token['content']!r} is not a special one")
        special_tokens[token["content"]] = token["id"]
    ranks = {}
    for text, rank in model["vocab"].items():
        if text not in special_tokens:
            ranks[to_bytes(text)] = rank
    check_bytes(ranks)
    ids = sorted([*ranks.values(), *special_tokens.values()])
    if ids != list(range(len(ids))):
        raise ValueError(f"the ids of its {len(ids):,} tokens are not 0 to {len(ids) - 1:,}")
    if special_tokens.keys().isdisjoint(ENDS_OF_TEXT):
        raise ValueError(f"none of its special tokens ends a document: {', '.join(ENDS_OF_TEXT)}")
    return ranks, special_tokens


def byte_alphabet() -> dict[str, int]:
    """Return the byte for which each character stands in a byte-level vocabulary, as in GPT-2's.

    Printable bytes of Latin-1 are their own characters; the others follow from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    for byte in range(256):
        if byte not in printable:
            alphabet[chr(256 + len(alphabet) - len(printable))] = byte
    return alphabet


ALPHABET = byte_alphabet()


def to_bytes(text: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary. Raises ValueError."""
    try:
        return bytes([ALPHABET[character] for character in text])
    except KeyError:
        raise ValueError(f"its token {text!r} is not one of bytes") from None


def read_pattern(pre_tokenizer: dict | None) -> str:
    """Return the pattern that cuts text as the file's pre-tokenizers do. Raises ValueError."""
    steps = []
    if pre_tokenizer:
        steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step["type"] for step in steps]
    if kinds[-1:] == ["ByteLevel"] and not steps[-1]["add_prefix_space"]:
        cuts_as_gpt2 = steps[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and cuts_as_gpt2:
            return GPT2
        if kinds == ["Digits", "ByteLevel"] and cuts_as_gpt2 and steps[0]["individual_digits"]:
            return GPT2_DIGITS
        if kinds == ["Split", "ByteLevel"] and not cuts_as_gpt2:
            return split_pattern(steps[0])
    raise ValueError(f"its pre-tokenizer ({', '.join(kinds) or 'none'}) is not supported")


def oniguruma_pattern(pattern: str) -> str:
    """Return a pattern of tiktoken for Oniguruma, the regular expressions of tokenizers.

    Oniguruma reads {1,3}+ as a repetition of {1,3}, not as possessive; it is at the end of an
    alternative, where {1,3} matches the same.
    """
    return pattern.replace("{1,3}+", "{1,3}")


def split_pattern(split: dict) -> str:
    """Return the regular expression of a Split whose matches and what lies between are pieces."""
    regex = split["pattern"].get("Regex")
    if not regex or split["behavior"] != "Isolated" or split["invert"]:
        raise ValueError("its Split is not one by the matches of a regular expression (Isolated)")
    # Only these: Oniguruma and tiktoken read \w, [:alpha:], ~~, $ and more differently.
    for pattern in (*PATTERNS.values(), QWEN2, TEKKEN, BYTES):
        if regex == oniguruma_pattern(pattern):
            return pattern
    raise ValueError(f"its regular expression is not one that tiktoken is known to share: {regex}")


def check_merges(model: dict, ranks: dict[bytes, int]) -> None:
    """Raise ValueError unless tiktoken's merges are those of the file, for any text.

    The file lists pairs, the first of which in a piece is merged. tiktoken merges the two
    neighbours whose joint token has the lowest rank. Neighbours that have come about by merges
    within their own bytes are what these bytes alone would have become (`last_merge`). So if each
    token's last merge is listed, and the list is in the order of ranks, both merge alike.
    """
    listed = set()
    previous = -1
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        pair = (to_bytes(left), to_bytes(right))
        rank = ranks[pair[0] + pair[1]]
        if rank < previous:
            raise ValueError(f"its merge {left!r} {right!r} is not in the order of the ids")
        previous = rank
        listed.add(pair)
    for token, rank in ranks.items():
        if len(token) == 1:
            continue
        parts = last_merge(token, ranks)
        # tiktoken takes a whole piece that is a token without merging, as ignore_merges does.
        whole_only = len(parts) > 2 and model.get("ignore_merges", False)
        if not (whole_only or tuple(parts) in listed):
            raise ValueError(f"its merges do not lead to token {rank}, {token!r}, as tiktoken's do")


def last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that tiktoken joins to `token`; more where its merges end before."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = None
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1])
            if rank is not None and (best is None or rank < ranks[parts[best] + parts[best + 1]]):
                best = i
        if best is None:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


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
    encoding = load_encoding(name)
    return encoding.encode_ordinary(text) or [encoding.eot_token]


def decode(name: str | None, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of tokens as they come; a character of several tokens comes with the last."""
    if name is None:
        for token in tokens:
            yield f"{token} "
        return
    encoding = load_encoding(name)
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
    encoding = load_encoding(name)
    total = 0
    for token, count in enumerate(counts):
        if count and not encoding.is_special_token(token):
            total += count * len(encoding.decode_single_token_bytes(token))
    return total
