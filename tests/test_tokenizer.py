"""Text <-> tokens, with and without a network."""

import base64

import pytest

import data
import prepare
import tokenizer


def test_a_tiktoken_file_is_a_tokenizer_and_stays_with_the_folder(tmp_path):
    ranks = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (tmp_path / "mine.tiktoken").write_text("".join(lines))
    (tmp_path / "text").write_text("the thing" * 50)
    name = str(tmp_path / "mine.tiktoken")
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", name, say=lambda line: None)
    (tmp_path / "mine.tiktoken").unlink()
    folder = data.open_folder(tmp_path / "tokens")
    tokens = folder.tokens("train").tolist()
    assert tokens[0] == 257 and folder.vocab_size == 259
    assert "".join(tokenizer.decode(folder.tokenizer, tokens)).startswith("the thing")


def test_a_file_that_lacks_a_byte_is_refused(tmp_path):
    (tmp_path / "bad.tiktoken").write_text("YQ== 0\n")
    with pytest.raises(tokenizer.TokenizerError, match="bad.tiktoken is not a .tiktoken file"):
        tokenizer.load(str(tmp_path / "bad.tiktoken"))


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
