"""Text <-> tokens, with tokenizers that need no network."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tiktoken_ext import openai_public

import data
import prepare
import tokenizer


def small_gpt2(monkeypatch, merges: list[bytes]) -> tiktoken.Encoding:
    """GPT-2's tokenizer with `merges` instead of the 50,000 merges that tiktoken downloads."""
    ranks = {bytes([i]): i for i in range(256)} | {token: 256 + i for i, token in enumerate(merges)}
    encoding = tiktoken.Encoding(
        "gpt2",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={tokenizer.END_OF_TEXT: len(ranks)},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": encoding}.get)
    return encoding


def test_text_is_decoded_token_by_token():
    """A character of several tokens comes with the last."""
    assert list(tokenizer.decode("bytes", [0xC3, 0xA9, 0x61])) == ["", "é", "a"]
    assert list(tokenizer.decode("bytes", [0x61, 0xC3])) == ["a", "", "\ufffd"]
    assert list(tokenizer.decode(None, [3, 4])) == ["3 ", "4 "]


# --------------------------------------------------------------------------------------------------
# Hugging Face's tokenizer.json

KINDS = ("byte level", "llama 2", "unigram", "wordpiece", "lower case")
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA2 = {  # a BPE like SentencePiece's, which spells an unknown character in bytes
    "pre_tokenizer": None,
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "decoder": {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    },
}


def make_json(tokenizers, kind: str, path: Path, more: str = "") -> str:
    """Write a tokenizer.json of a kind, trained on data.py and `more`; return its path."""
    models, trainers, pre = tokenizers.models, tokenizers.trainers, tokenizers.pre_tokenizers
    special = ["</s>", "<s>", "<unk>"]
    options = {"vocab_size": 900, "show_progress": False, "special_tokens": special}
    if kind in ("byte level", "lower case"):
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre.ByteLevel.alphabet(), **options)
    elif kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.pre_tokenizer = pre.BertPreTokenizer()
        made.decoder = tokenizers.decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(**options)
    elif kind == "unigram":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre.Metaspace()
        made.decoder = tokenizers.decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    else:
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre.Metaspace()
        trainer = trainers.BpeTrainer(**options | {"special_tokens": special + BYTES})
    if kind == "lower case":
        made.normalizer = tokenizers.normalizers.Lowercase()
    made.train_from_iterator([Path(data.__file__).read_text(), more], trainer)
    if kind == "llama 2":
        spec = json.loads(made.to_str()) | LLAMA2
        spec["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
        spec["added_tokens"] = spec["added_tokens"][:3]
        made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    made.enable_truncation(5)  # as in the files of embedding models
    made.enable_padding(length=5)
    made.save(str(path))
    return str(path)


def prepared(tmp_path: Path, text: str, *options: str) -> tuple[int, list[int]]:
    """Prepare a folder of one text; return the status and its tokens."""
    (tmp_path / "text").write_bytes(text.encode())
    status = prepare.main([f"--source={tmp_path}/text", f"--out={tmp_path}/tokens", *options])
    if status:
        return status, []
    folder = data.open_folder(tmp_path / "tokens")
    files = [tmp_path / f"tokens/{split}.bin" for split in ("train", "val")]
    return 0, [int(n) for file in files for n in np.fromfile(file, folder.dtype)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_gets_the_tokens_of_the_package(tokenizers, tmp_path, capsys, kind):
    """Its file goes into the folder, and decodes there; what does not come back is printed."""
    words = ["def f(x):\n  ", "é", "ı", "e\u0301", "ABC ", "\t", "12", "<s>"]
    text = "x" + "".join(random.Random(0).choices(words, k=2000))
    name = make_json(tokenizers, kind, tmp_path / "mine.json")
    status, tokens = prepared(tmp_path, text, f"--tokenizer={name}")
    reference = tokenizers.Tokenizer.from_file(name)
    reference.no_truncation()
    reference.no_padding()
    reference.encode_special_tokens = True
    expected = reference.encode(text, add_special_tokens=False).ids
    assert (status, tokens) == (0, [*expected, 0])  # </s>
    assert (1 in tokens) == (kind == "unigram")  # <s>, a word of its vocabulary
    folder = data.open_folder(tmp_path / "tokens")
    assert folder.vocab_size == reference.get_vocab_size()
    assert folder.tokenizer == str(tmp_path / "tokens/tokenizer.json")
    decoded = "".join(tokenizer.decode(folder.tokenizer, expected))
    assert decoded == reference.decode(expected, skip_special_tokens=False)
    rest = "".join(tokenizer.decode(folder.tokenizer, expected[9:], expected[:9]))
    assert decoded.endswith(rest) and len(rest) > len(decoded) / 2
    assert (decoded == text) == (kind in ("byte level", "llama 2"))
    assert ("do not come back" in capsys.readouterr().out) == (decoded != text)


@pytest.mark.parametrize("kind", KINDS)
def test_text_never_encodes_to_the_end_of_a_document(tokenizers, tmp_path, capsys, kind):
    """A text is refused if the vocabulary has the end as a word (Unigram)."""
    name = make_json(tokenizers, kind, tmp_path / "a.json", "a</s> " * 50)
    text = "a </s> b</s>c d"
    status, tokens = prepared(tmp_path, text, f"--tokenizer={name}")
    if kind == "unigram":
        line = capsys.readouterr().err
        assert status == 2 and "</s>" in line and line.count("\n") == 1
        return
    assert (status, tokens.index(0)) == (0, len(tokens) - 1)
    decoded = "".join(tokenizer.decode(name, tokens[:-1]))
    assert "".join(decoded.split()) == "".join(text.split())


def added(name: str, number: int) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, "special": True} | flags


@pytest.mark.parametrize(
    "config, end",
    [
        (None, "<|endoftext|>"),
        ({"eos_token": "<eos>"}, "<eos>"),  # Gemma's
        ({"eos_token": {"content": "<eos>", "lstrip": False}}, "<eos>"),
        ({"eos_token": None}, "<|endoftext|>"),
        ({"eos_token": "</s>"}, "</s>"),
        ({"eos_token": "<gone>"}, None),
    ],
)
def test_the_end_of_a_document_is_named_beside_the_tokenizer(tokenizers, tmp_path, config, end):
    """A folder of a model is enough, and the copies that a checkpoint has name the same token."""
    model, copies = tmp_path / "model", tmp_path / "checkpoint"
    model.mkdir()
    copies.mkdir()
    path = Path(make_json(tokenizers, "byte level", model / "tokenizer.json"))
    spec = json.loads(path.read_text())
    n = len(spec["model"]["vocab"])
    spec["added_tokens"] += [added("<eos>", n), added("<|endoftext|>", n + 1)]
    path.write_text(json.dumps(spec))
    if config:
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    status, tokens = prepared(tmp_path, "the text", f"--tokenizer={model}")
    if end is None:
        assert status == 2
        return
    assert tokens[-1] == {"</s>": 0, "<eos>": n, "<|endoftext|>": n + 1}[end]
    for file, contents in data.open_folder(tmp_path / "tokens").tokenizer_files.items():
        (copies / file).write_bytes(contents)
    assert tokenizer.load_encoding(f"{copies}/tokenizer.json").eot_token == tokens[-1]


@pytest.mark.parametrize(
    "change", ["no end", "no model", "no JSON", "tokenizer.model", "no folder", "no unknown"]
)
def test_a_tokenizer_that_cannot_be_used_is_refused(tokenizers, tmp_path, capsys, change):
    path = tmp_path / "tokenizer.json"
    spec = json.loads(Path(make_json(tokenizers, "byte level", path)).read_text())
    if change == "no end":
        spec["added_tokens"] = [added("<|im_end|>", 3000)]
    if change == "no model":
        del spec["model"]
    if change == "no unknown":  # and so no token for a word that is not in the vocabulary
        spec |= {"model": {"type": "WordLevel", "vocab": {"</s>": 0}, "unk_token": "<unk>"}}
        spec["added_tokens"] = [added("</s>", 0)]
    path.write_text(json.dumps(spec) if change != "no JSON" else "[")
    if change in ("tokenizer.model", "no folder"):
        path = tmp_path / change
    if change == "tokenizer.model":
        path.write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0")
    status, _ = prepared(tmp_path, "text", f"--tokenizer={path}")
    line = capsys.readouterr().err
    assert status == 2 and line.startswith(f"prepare.py: error: --tokenizer {path}")
    assert line.count("\n") == 1 and not (tmp_path / "tokens").exists()
