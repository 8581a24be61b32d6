"""Text <-> tokens, with tokenizers that need no network."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from rig import cells, run_command, save_tokenizer

import data
import prepare
import tokenizer


def prepared(tmp_path: Path, text: str, name: Path) -> tuple[list[int], str, str]:
    """Prepare a folder of one text. Return its tokens, what is printed and the line of an error."""
    (tmp_path / "text").write_bytes(text.encode())
    argv = ["--source", tmp_path / "text", "--out", tmp_path / "tokens", "--tokenizer", name]
    status, printed, error = run_command(argv, prepare.main)
    if status:
        assert status == 2 and error.count("\n") == 1 and str(name) in error
        assert not (tmp_path / "tokens").exists()
        return [], printed, error
    folder = data.open_folder(tmp_path / "tokens")
    files = [tmp_path / f"tokens/{split}.bin" for split in ("train", "val")]
    return [int(n) for file in files for n in np.fromfile(file, folder.dtype)], printed, ""


def test_text_is_decoded_token_by_token():
    """A character of several tokens comes with the last."""
    assert list(tokenizer.decode("bytes", [0xC3, 0xA9, 0x61])) == ["", "é", "a"]
    assert list(tokenizer.decode("bytes", [0x61, 0xC3])) == ["a", "", "\ufffd"]
    assert list(tokenizer.decode(None, [3, 4])) == ["3 ", "4 "]


# --------------------------------------------------------------------------------------------------
# Hugging Face's tokenizer.json

KINDS = ("byte level", "llama 2", "unigram")


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_gets_the_tokens_of_the_package(tokenizers, tmp_path, kind):
    """Its file goes into the folder, and decodes there; what does not come back is printed."""
    words = ["def f(x):\n  ", "é", "ı", "e\u0301", "ABC ", "\t", "12", "<s>"]
    text = "x" + "".join(random.Random(0).choices(words, k=2000))
    file = save_tokenizer(tokenizers, kind, tmp_path / "mine.json")
    reference = tokenizers.Tokenizer.from_file(str(file))
    reference.encode_special_tokens = True
    expected = reference.encode(text, add_special_tokens=False).ids

    cuts = tokenizers.Tokenizer.from_file(str(file))
    cuts.enable_truncation(5)  # as in the files of embedding models
    cuts.enable_padding(length=5)
    cuts.save(str(file))
    tokens, printed, _ = prepared(tmp_path, text, file)
    assert tokens == [*expected, 0]  # </s>
    assert (1 in tokens) == (kind == "unigram")  # <s>, a word of its vocabulary

    folder = data.open_folder(tmp_path / "tokens")
    assert folder.vocab_size == reference.get_vocab_size()
    assert folder.tokenizer == str(tmp_path / "tokens/tokenizer.json")
    decoded = "".join(tokenizer.decode(folder.tokenizer, expected))
    assert decoded == reference.decode(expected, skip_special_tokens=False)
    rest = "".join(tokenizer.decode(folder.tokenizer, expected[9:], expected[:9]))
    assert decoded.endswith(rest) and len(rest) > len(decoded) / 2
    assert (decoded == text) == (kind != "unigram")
    assert ("do not come back" in printed) == (decoded != text)


@pytest.mark.parametrize("kind", KINDS)
def test_text_never_encodes_to_the_end_of_a_document(tokenizers, tmp_path, kind):
    """A text is refused if the vocabulary has the end as a word (Unigram)."""
    file = save_tokenizer(tokenizers, kind, tmp_path / "a.json", "a</s> " * 50)
    text = "a </s> b</s>c d"
    tokens, _, error = prepared(tmp_path, text, file)
    if kind == "unigram":
        assert not tokens and "</s>" in error
        return
    assert tokens.index(0) == len(tokens) - 1
    decoded = "".join(tokenizer.decode(str(file), tokens[:-1]))
    assert "".join(decoded.split()) == "".join(text.split())


def added(name: str, number: int) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, "special": True} | flags


# tokenizer_config.json, if there is one, beside a tokenizer.json | the end of its documents
ENDS = """
                                                 | endoftext
{"eos_token": "<eos>"}                           | <eos>
{"eos_token": {"content": "<eos>", "rstrip": 1}} | <eos>
{"eos_token": null}                              | endoftext
{"eos_token": "</s>"}                            | </s>
{"eos_token": "<gone>"}                          | refused
"""


@pytest.mark.parametrize("settings, end", cells(ENDS))
def test_the_end_of_a_document_is_named_beside_the_tokenizer(tokenizers, tmp_path, settings, end):
    """A folder of a model is enough, and the copies that a checkpoint has name the same token."""
    model, copies = tmp_path / "model", tmp_path / "checkpoint"
    model.mkdir()
    copies.mkdir()
    file = save_tokenizer(tokenizers, "byte level", model / "tokenizer.json")
    spec = json.loads(file.read_text())
    n = len(spec["model"]["vocab"])
    spec["added_tokens"] += [added("<eos>", n), added("<|endoftext|>", n + 1)]
    file.write_text(json.dumps(spec))
    if settings:
        (model / "tokenizer_config.json").write_text(settings)
    tokens, _, _ = prepared(tmp_path, "the text", model)
    if end == "refused":
        assert tokens == []
        return
    assert tokens[-1] == {"</s>": 0, "<eos>": n, "endoftext": n + 1}[end]
    for name, contents in data.open_folder(tmp_path / "tokens").tokenizer_files.items():
        (copies / name).write_bytes(contents)
    assert tokenizer.load_encoding(f"{copies}/tokenizer.json").eot_token == tokens[-1]


def test_a_tokenizer_that_cannot_be_used_is_refused(tokenizers, tmp_path):
    file = save_tokenizer(tokenizers, "byte level", tmp_path / "byte level")
    spec = json.loads(file.read_text())
    del spec["added_tokens"]
    end = {"added_tokens": [added("</s>", 0)]}
    words = {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "<unk>"}
    refused = {
        "no end": json.dumps(spec | {"added_tokens": [added("<|im_end|>", 3000)]}),
        "no model": json.dumps(end),
        "no token for a word": json.dumps(end | {"model": words}),
        "no JSON": "[",
        "SentencePiece": "\n\x0e\n\x05<unk>\x15\0\0\0\0",
    }
    for name, contents in refused.items():
        (tmp_path / name).write_text(contents)
        assert prepared(tmp_path, "text", tmp_path / name)[0] == [], name
    assert prepared(tmp_path, "text", tmp_path / "gone")[0] == []
    (tmp_path / "accepted").write_text(json.dumps(spec | end))
    assert prepared(tmp_path, "text", tmp_path / "accepted")[0] != []
