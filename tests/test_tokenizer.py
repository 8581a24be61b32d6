"""Text <-> tokens, with and without a network."""

import base64
import random
from pathlib import Path

import pytest
import torch
from tiktoken_ext import openai_public

import data
import prepare
import sample
import sources
import tokenizer
from config import Config, model_config
from model import Transformer


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
    expected = tokenizer.load(name, pattern).encode_ordinary(TEXT * 20)
    tokens = [*folder.tokens("train"), *folder.tokens("val")]
    assert tokens[:-1] == expected == tokenizer.encode(folder.tokenizer, TEXT * 20)


def test_the_patterns_give_different_tokens(tmp_path):
    name = write_ranks(tmp_path / "mine.tiktoken", MERGES)
    tokens = {p: tokenizer.load(name, p).encode_ordinary(TEXT) for p in tokenizer.PATTERNS}
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
def test_cutting_a_long_document_into_chunks_does_not_change_its_tokens(
    tmp_path, monkeypatch, pattern
):
    merges = [b"\n\n", b"  ", b"    ", b".\n", b"\n ", b"th", b" th", b"12"]
    encoding = tokenizer.load(write_ranks(tmp_path / "mine.tiktoken", merges), pattern)
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


def test_gpt2_without_network_says_what_to_do(tmp_path, monkeypatch):
    import requests
    import tiktoken.registry

    def offline(*arguments, **options):
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(tokenizer.TokenizerError, match="TIKTOKEN_CACHE_DIR.*--tokenizer bytes"):
        tokenizer.load("gpt2")


def test_text_bytes_are_those_of_the_text_without_the_end_of_a_document(tmp_path):
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
    encoding = tokenizer.load(name)
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
    found = sample.find_tokenizer(checkpoint, folder.tokenizer_name, folder.vocab_size)
    assert "".join(tokenizer.decode(found, [257, 259])) == "the<|end_of_text|>"
    assert tokenizer.encode(found, "") == [259]


def test_the_same_ranks_in_an_older_folder_keep_their_end_of_text(tmp_path):
    """Until 2026-11-21 it was the first free rank, for Llama 3's ranks too."""
    encoding = tokenizer.load(write_ranks(tmp_path / "tokenizer.llama3.tiktoken", [b"th", b"the"]))
    assert (encoding.eot_token, encoding.n_vocab) == (258, 259)


def test_a_sentencepiece_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    with pytest.raises(tokenizer.TokenizerError, match="SentencePiece models, as Llama 2 has"):
        tokenizer.load(str(tmp_path / "tokenizer.model"))
