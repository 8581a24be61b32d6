"""Text <-> tokens, with and without a network."""

import base64
import json
import random
import sys
from pathlib import Path

import pytest
import tiktoken
import torch
from tiktoken_ext import openai_public

import data
import prepare
from config import Config, model_config
from model import Transformer
from text import sources, tokenizer


def write_ranks(path: Path, merges: list[bytes]) -> str:
    """Write a .tiktoken file of the 256 bytes and `merges`; return its path."""
    tokens = [bytes([i]) for i in range(256)] + merges
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    path.write_text("".join(lines))
    return str(path)


def test_a_tiktoken_file_is_a_tokenizer_and_stays_with_the_folder(tmp_path):
    name = write_ranks(tmp_path / "mine.tiktoken", [b"th", b"the"])
    (tmp_path / "text").write_text("the thing" * 50)
    said = []
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", name, say=said.append)
    assert said[0] == f"{name} is used with the pattern of llama3 (--pattern names another)"
    (tmp_path / "mine.tiktoken").unlink()
    folder = data.open_folder(tmp_path / "tokens")
    tokens = folder.tokens("train").tolist()
    assert tokens[0] == 257 and folder.vocab_size == 259
    assert "".join(tokenizer.decode(folder.tokenizer, tokens)).startswith("the thing")


# llama3: " 1234" is " ", "123", "4" and "Ab" one piece. o200k cuts "Ab" as the others do not "aB".
MERGES = [b"12", b"34", b"1234", b"aB", b" a", b" 1", b"\n\n", b".\n", b".\n/"]
TEXT = "1234 aB.\n/ \n\n 1234"


@pytest.mark.parametrize("pattern", tokenizer.PATTERNS)
def test_the_pattern_goes_with_the_folder_and_its_checkpoints(tmp_path, pattern):
    """In the file's name: a checkpoint knows its tokenizer by this name alone."""
    name = write_ranks(tmp_path / "mine.tiktoken", MERGES)
    (tmp_path / "text").write_text(TEXT * 20)
    source = [str(tmp_path / "text")]
    prepare.prepare(source, tmp_path / "tokens", name, say=lambda line: None, pattern=pattern)
    folder = data.open_folder(tmp_path / "tokens")
    assert Path(folder.tokenizer).name == f"tokenizer.{pattern}.tiktoken"
    expected = tokenizer.load_encoding(name, pattern).encode_ordinary(TEXT * 20)
    tokens = [*folder.tokens("train"), *folder.tokens("val")]
    assert tokens[:-1] == expected == tokenizer.encode(folder.tokenizer, TEXT * 20)


def test_the_patterns_give_different_tokens(tmp_path):
    name = write_ranks(tmp_path / "mine.tiktoken", MERGES)
    tokens = {p: tokenizer.load_encoding(name, p).encode_ordinary(TEXT) for p in tokenizer.PATTERNS}
    assert tokens["llama3"] == tokens["cl100k"]
    assert len({*map(tuple, tokens.values())}) == 3


def test_the_patterns_are_those_of_tiktoken(monkeypatch):
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *arguments, **options: {})
    assert tokenizer.PATTERNS["gpt2"] == openai_public.r50k_pat_str
    assert tokenizer.PATTERNS["cl100k"] == openai_public.cl100k_base()["pat_str"]
    assert tokenizer.PATTERNS["o200k"] == openai_public.o200k_base()["pat_str"]


@pytest.mark.parametrize(
    "path, pattern",
    [
        ("o200k_base.tiktoken", "o200k"),
        ("o200k/cl100k_base.tiktoken", "cl100k"),
        ("tokens/tokenizer.gpt2.tiktoken", "gpt2"),
        ("tokens/tokenizer.tiktoken", "llama3"),  # of token folders up to 2026-11-21
        ("mygpt2.tiktoken", "llama3"),
    ],
)
def test_a_file_name_may_contain_its_pattern(path, pattern):
    assert tokenizer.pattern_of(path) == pattern


@pytest.mark.parametrize("pattern", tokenizer.PATTERNS)
def test_a_long_document_in_chunks_has_the_same_tokens(tmp_path, monkeypatch, pattern):
    merges = [b"\n\n", b"  ", b"    ", b".\n", b"\n ", b"th", b" th", b"12"]
    encoding = tokenizer.load_encoding(write_ranks(tmp_path / "mine.tiktoken", merges), pattern)
    words = ["th", " th", "\n\n", "\n", "  ", " ", ".\n", "1234"]
    text = "".join(random.Random(0).choices(words, k=2000))
    (tmp_path / "text").write_text(text)
    monkeypatch.setattr(sources, "CHUNK", 100)
    tokens = []
    for chunk in sources.find_files([str(tmp_path / "text")], takes_binary=False).read():
        tokens += encoding.encode_ordinary(chunk.text)
    assert tokens == encoding.encode_ordinary(text)


def test_a_million_spaces_in_a_row_are_no_problem(tmp_path):
    """tiktoken's regular expressions overflow their stack on as many at once."""
    name = write_ranks(tmp_path / "mine.tiktoken", [b"  "])
    (tmp_path / "text").write_text("a" + " " * 1_100_000 + "b")
    said = []
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", name, say=said.append)
    assert "read 1 file: 1 document, 1,100,002 bytes of text" in said


def test_without_a_tokenizer_text_is_token_ids():
    assert "".join(tokenizer.decode(None, tokenizer.encode(None, "3 4"))) == "3 4 "
    with pytest.raises(tokenizer.TokenizerError, match="write the prompt as token ids"):
        tokenizer.encode(None, "three")


def test_a_character_of_several_tokens_comes_with_its_last():
    assert list(tokenizer.decode("bytes", [0xC3, 0xA9, 0x61])) == ["", "é", "a", ""]


@pytest.mark.tries("not in tiktoken's cache")
def test_gpt2_without_network_says_what_to_do(tmp_path, monkeypatch):
    import requests
    import tiktoken.registry

    def offline(*arguments, **options):
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(tokenizer.TokenizerError, match="TIKTOKEN_CACHE_DIR.*--tokenizer bytes"):
        tokenizer.load_encoding("gpt2")


def test_text_bytes_leave_out_the_end_of_a_document(tmp_path):
    name = write_ranks(tmp_path / "mine.tiktoken", [b"th", b"the"])
    counts = [0] * 259
    for token in [*tokenizer.encode(name, "the thé"), 258]:
        counts[token] += 1
    assert tokenizer.text_bytes(name, counts) == len("the thé".encode())


# --------------------------------------------------------------------------------------------------
# Llama 3's tokenizer.model


def test_llama_3s_tokenizer_gives_the_model_that_meta_published(tmp_path):
    """128,000 ranks and 256 special tokens: 128,256 rows, with nothing padded."""
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    triples = [pair + b"x" for pair in pairs]
    name = write_ranks(tmp_path / "tokenizer.model", [*pairs, *triples][: 128_000 - 256])
    encoding = tokenizer.load_encoding(name)
    assert encoding.encode_single_token("<|begin_of_text|>") == 128_000
    assert encoding.eot_token == encoding.encode_single_token("<|end_of_text|>") == 128_001
    assert encoding.encode_single_token("<|start_header_id|>") == 128_006
    assert encoding.encode_single_token("<|eot_id|>") == 128_009
    assert encoding.encode_single_token("<|reserved_special_token_250|>") == 128_255
    config = model_config(Config(model="llama3-8b"), encoding.n_vocab)
    assert config.vocab_size == encoding.n_vocab == 128_256
    with torch.device("meta"):
        assert Transformer(config).parameter_count() == 8_030_261_248


def test_documents_end_with_the_end_of_text_of_their_tokenizer(tmp_path):
    name = write_ranks(tmp_path / "tokenizer.model", [b"th", b"the"])
    (tmp_path / "text").write_text("the<|endoftext|>" * 50)
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", name, say=lambda line: None)
    folder = data.open_folder(tmp_path / "tokens")
    assert folder.tokens("train").tolist()[:4] == [257, 259, 257, 259]
    assert (folder.tokenizer_name, folder.vocab_size) == ("tokenizer.model", 258 + 256)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name, contents in folder.tokenizer_file.items():
        (checkpoint / name).write_bytes(contents)
    found = tokenizer.find(checkpoint, folder.tokenizer_name, folder.vocab_size)
    assert "".join(tokenizer.decode(found, [257, 259])) == "the<|end_of_text|>"
    assert tokenizer.encode(found, "") == [259]


def test_the_same_ranks_in_an_older_folder_keep_their_end_of_text(tmp_path):
    """Until 2026-11-21 it was the first free rank, for Llama 3's ranks too."""
    encoding = tokenizer.load_encoding(
        write_ranks(tmp_path / "tokenizer.llama3.tiktoken", [b"th", b"the"])
    )
    assert (encoding.eot_token, encoding.n_vocab) == (258, 259)


def test_a_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    with pytest.raises(tokenizer.TokenizerError, match="SentencePiece models, as Llama 2 has"):
        tokenizer.load_encoding(str(tmp_path / "tokenizer.model"))


# --------------------------------------------------------------------------------------------------
# Hugging Face's tokenizer.json

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
DIGITS = {"type": "Digits", "individual_digits": True}


def split_by(regex: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def sequence(*pre_tokenizers: dict) -> dict:
    """Pre-tokenizers whose ByteLevel only maps bytes to characters where a Split precedes it."""
    use_regex = pre_tokenizers[0]["type"] != "Split"
    last = BYTE_LEVEL | {"use_regex": use_regex}
    return {"type": "Sequence", "pretokenizers": [*pre_tokenizers, last]}


def describe(ranks: dict[bytes, int], pre_tokenizer: dict, **options) -> dict:
    """A tokenizer.json of `ranks`, whose ids come after that of <|endoftext|>, as SmolLM's do."""
    characters = {byte: character for character, byte in tokenizer.byte_alphabet().items()}

    def text(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = []
    for token in sorted(ranks, key=ranks.get):
        if len(token) > 1:
            merges.append([text(part) for part in tokenizer.last_merge(token, ranks)])
    vocab = {text(token): rank + 1 for token, rank in ranks.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = {"id": 0, "content": "<|endoftext|>", "special": True}
    return {
        "version": "1.0",
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges} | options,
    }


def some_ranks() -> dict[bytes, int]:
    """The bytes and three merges: 256 to 258."""
    tokens = [*(bytes([i]) for i in range(256)), b"th", b"the", " é".encode()[:2]]
    return {token: rank for rank, token in enumerate(tokens)}


def write_json(path: Path, spec: object) -> str:
    path.write_text(json.dumps(spec))
    return str(path)


def test_a_tokenizer_json_is_a_tokenizer_and_stays_with_the_folder(tmp_path):
    name = write_json(tmp_path / "mine.json", describe(some_ranks(), BYTE_LEVEL))
    (tmp_path / "text").write_text("the thé" * 50)
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", name, say=lambda line: None)
    folder = data.open_folder(tmp_path / "tokens")
    tokens = folder.tokens("train").tolist()
    assert tokens[:5] == [1 + 257, 1 + ord(" "), 1 + 256, 1 + 0xC3, 1 + 0xA9]
    assert (folder.tokenizer_name, folder.vocab_size) == ("tokenizer.json", 260)
    assert folder.tokens("val")[-1] == 0  # <|endoftext|> has the id that the file gives
    assert "".join(tokenizer.decode(folder.tokenizer, tokens)).startswith("the thé")


CHANGES = {
    "its model is not byte-level BPE": {"model": {"type": "Unigram"}},
    "its normalizer NFC is not supported": {"normalizer": {"type": "NFC"}},
    "its added token '  ' is not a special one": {
        "added_tokens": [{"id": 0, "content": "  ", "special": False}]
    },
    "none of its special tokens ends a document": {
        "added_tokens": [{"id": 0, "content": "<|im_end|>", "special": True}]
    },
    "the ids of its 260 tokens are not 0 to 259": {
        "added_tokens": [{"id": 300, "content": "<|endoftext|>", "special": True}]
    },
    "its pre-tokenizer (none) is not supported": {"pre_tokenizer": None},
    "its pre-tokenizer (ByteLevel) is not": {
        "pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}
    },
    "its pre-tokenizer (Split, Split, ByteLevel) is not": {
        "pre_tokenizer": sequence(split_by("[0-9]"), split_by("[a-z]"))
    },
    "its Split is not one by the matches": {
        "pre_tokenizer": sequence(split_by("a") | {"behavior": "Removed"})
    },
    "is not a tokenizer.json of Hugging Face (it lacks 'added_tokens')": {"added_tokens": None},
    "is not a tokenizer.json of Hugging Face (a value has a wrong type)": {"added_tokens": [5]},
}
# What another language of regular expressions would read differently, or not at all
for regex in (r"\w+", r"[[:alpha:]]+", r"\pL+", "[a~~b]", r"(.)\1", "a*", r"\s+$", "("):
    line = f"its regular expression is not one that tiktoken is known to share: {regex}"
    CHANGES[line] = {"pre_tokenizer": sequence(split_by(regex))}
MODEL_CHANGES = {
    "its option dropout is not supported": {"dropout": 0.1},
    "its token '▁the' is not one of bytes": {"vocab": {"▁the": 0}},
    "no token for byte 0": {"vocab": {"a": 0}},
    # The right merges in the wrong order, or not those of the vocabulary
    "its merge 't' 'h' is not in the order": {"merges": ["th e", "t h", "Ġ Ã"]},
    "its merges do not lead to token 258, b'the'": {"merges": [["t", "h"], ["Ġ", "Ã"]]},
}


@pytest.mark.tries(
    "cannot be used",
    "its model is not",
    "its normalizer",
    "its option",
    "its added token",
    "the ids of its",
    "none of its special tokens",
    "is not one of bytes",
    "its pre-tokenizer",
    "its Split",
    "its regular expression",
    "is not in the order of the ids",
    "its merges do not lead",
)
@pytest.mark.parametrize("line", [*CHANGES, *MODEL_CHANGES])
def test_a_tokenizer_json_with_other_ids_in_tiktoken_is_refused(tmp_path, line):
    spec = describe(some_ranks(), BYTE_LEVEL)
    spec["model"] |= MODEL_CHANGES.get(line, {})
    spec |= CHANGES.get(line, {})
    spec = {key: value for key, value in spec.items() if value or key != "added_tokens"}
    name = write_json(tmp_path / "tokenizer.json", spec)
    with pytest.raises(tokenizer.TokenizerError) as refused:
        tokenizer.load_encoding(name)
    assert line in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", '{"model": 5}', "\x00", '{"model": {"type": "BPE"}}'])
def test_other_json_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(tokenizer.TokenizerError, match="cannot be used|is not a tokenizer.json"):
        tokenizer.load_encoding(str(tmp_path / "a.json"))


def test_a_token_that_no_merge_leads_to_needs_ignore_merges(tmp_path):
    """tiktoken takes a piece that is a token whole. With ignore_merges, so does Hugging Face."""
    ranks = some_ranks() | {b"xyz": 259}
    spec = describe(ranks, BYTE_LEVEL, ignore_merges=True)
    spec["model"]["merges"].pop()  # last_merge has three parts
    encoding = tokenizer.load_encoding(write_json(tmp_path / "a.json", spec))
    assert encoding.encode_ordinary("xyz") == [260]
    spec["model"]["ignore_merges"] = False
    with pytest.raises(tokenizer.TokenizerError, match="do not lead to token 260, b'xyz'"):
        tokenizer.load_encoding(write_json(tmp_path / "a.json", spec))


# --------------------------------------------------------------------------------------------------
# With the package tokenizers


@pytest.fixture
def tokenizers():
    return pytest.importorskip("tokenizers", reason="needs tests/requirements-extra.txt")


def trained_ranks() -> dict[bytes, int]:
    sources = [path.read_text() for path in sorted(Path(prepare.__file__).parent.glob("*.py"))]
    return tokenizer.read_ranks(tokenizer.train_ranks(sources, 2000))


# Regular expressions as the files of Hugging Face have them
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
MISTRAL_NEMO = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {
    "gpt2": BYTE_LEVEL,
    "smollm": sequence(DIGITS),
    "llama3": sequence(split_by(LLAMA3)),
    "qwen2": sequence(split_by(QWEN2)),
    "mistral nemo": sequence(split_by(MISTRAL_NEMO)),
    "bytes": sequence(split_by(r"[\s\S]")),
}
for name, pattern in tokenizer.PATTERNS.items():
    # Oniguruma has no possessive intervals
    PRE_TOKENIZERS[f"split {name}"] = sequence(split_by(pattern.replace("{1,3}+", "{1,3}")))


@pytest.mark.hf
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_tokenizer_json_has_the_ids_of_the_package(tokenizers, tmp_path, name):
    path = write_json(tmp_path / "a.json", describe(trained_ranks(), PRE_TOKENIZERS[name]))
    theirs = tokenizers.Tokenizer.from_file(path)
    ours = tokenizer.load_encoding(path)
    words = [*"abeStTlLmM'  \t\n\r./,!?019_é日ा\u00a0\u2003ſ²😀", "'s", "'LL", "\r\n", "self", "12"]
    generator = random.Random(0)
    texts = ["".join(generator.choices(words, k=40)) for _ in range(2000)]
    texts.append(Path(data.__file__).read_text())
    for text, encoded in zip(texts, theirs.encode_batch(texts)):
        assert ours.encode_ordinary(text) == encoded.ids, repr(text)


@pytest.mark.hf
def test_a_vocabulary_is_trained_on_the_source(tokenizers, tmp_path):
    (tmp_path / "text").write_bytes(b"the thing " * 50 + b"\xff 1234")
    for out in ("a", "b"):
        argv = f"--source {tmp_path}/text --train_tokenizer 262 --out {tmp_path}/{out}".split()
        assert prepare.main(argv) == 0
    folder = data.open_folder(tmp_path / "a")
    assert (folder.tokenizer_name, folder.vocab_size) == ("tokenizer.llama3.tiktoken", 262)
    encoding = tokenizer.load_encoding(folder.tokenizer)
    assert isinstance(encoding, tiktoken.Encoding) and encoding.eot_token == 261
    tokens = folder.tokens("train")
    assert len(tokens) < 300  # of 500 bytes
    assert encoding.decode(tokens.tolist()).startswith("the thing the thing")
    assert folder.tokenizer_file == data.open_folder(tmp_path / "b").tokenizer_file


@pytest.mark.hf
def test_a_source_too_small_for_the_vocabulary_gives_fewer_tokens(tokenizers):
    assert len(tokenizer.read_ranks(tokenizer.train_ranks(["abab"], 1000))) == 258


@pytest.mark.hf
def test_no_word_is_so_long_that_training_does_not_end(tokenizers):
    """Merges take the square of the length of what is not cut."""
    ranks = tokenizer.read_ranks(tokenizer.train_ranks(["a" * 5000, " " * 5000, "?" * 5000], 1000))
    assert max(map(len, ranks)) == 1000


@pytest.mark.tries("needs the tokenizers package")
def test_a_vocabulary_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(tokenizer.TokenizerError, match="pip install tokenizers"):
        tokenizer.train_ranks(["text"], 300)
