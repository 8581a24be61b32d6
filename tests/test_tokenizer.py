"""Text <-> tokens, with tokenizers that need no network."""

import json
import os
import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
from tiktoken_ext import openai_public

import data
import prepare
from text import encode, sources, tokenizer


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


def prepared(tmp_path: Path, texts: dict[str, str], **options) -> data.TokenFolder:
    """Prepare a folder of `texts`, in files of these names, or NAME.txt if they have no suffix."""
    source = tmp_path / "text"
    source.mkdir(parents=True)
    for name, text in texts.items():
        (source / (name if "." in name else f"{name}.txt")).write_bytes(text.encode())
    prepare.prepare([str(source)], tmp_path / "tokens", **options)
    return data.open_folder(tmp_path / "tokens")


def ids_of(folder: data.TokenFolder, split: str) -> list[int]:
    return np.fromfile(folder.path / f"{split}.bin", folder.dtype).tolist()


def meta_of(folder: data.TokenFolder) -> dict:
    return json.loads((folder.path / "meta.json").read_text())


MERGES = [b"12", b"34", b"1234", b"aB", b" a", b" 1", b"\n\n", b".\n", b".\n/", b"  ", b"    "]
MERGES += [b"\n ", b"th", b" th"]
WORDS = ["th", " th", "aB", " aB", "\n\n", "\n", "  ", " ", ".\n", ".\n/", "1234"]


def test_text_in_chunks_has_the_same_tokens(tmp_path, monkeypatch):
    text = "".join(random.Random(0).choices(WORDS, k=250_000))
    assert len(text) > 2 * sources.CHUNK
    expected = small_gpt2(monkeypatch, MERGES).encode_ordinary(text)
    folder = prepared(tmp_path, {"a": text}, name="gpt2")
    assert folder.tokenizer == "gpt2"
    tokens = ids_of(folder, "train") + ids_of(folder, "val")
    assert tokens[:-1] == expected == tokenizer.encode("gpt2", text)
    assert "".join(tokenizer.decode("gpt2", expected)) == text


def test_a_million_spaces_in_a_row_can_be_encoded(tmp_path, monkeypatch, capsys):
    """Given all of them at once, tiktoken's regular expressions overflow their stack."""
    small_gpt2(monkeypatch, [b"  "])
    prepared(tmp_path, {"a": "a" + " " * 1_100_000 + "b"}, name="gpt2")
    assert "read 1 file: 1 document, 1,100,002 bytes of text\n" in capsys.readouterr().out


def test_only_up_to_65_536_ids_fit_into_two_bytes():
    for n, dtype in ((65_536, "<u2"), (65_537, "<u4")):
        encoding = SimpleNamespace(n_vocab=n, eot_token=n - 1, encode_ordinary=list)
        assert encode.Encoder(encoding).dtype == dtype


def test_text_is_decoded_token_by_token():
    """A character of several tokens comes with the last."""
    assert tokenizer.encode("bytes", os.fsdecode(b"n\xe9 \xc3\xa9")) == [*b"n\xe9 \xc3\xa9"]
    assert list(tokenizer.decode("bytes", [0xC3, 0xA9, 0x61])) == ["", "é", "a", ""]


def test_text_without_a_tokenizer_is_token_ids():
    assert "".join(tokenizer.decode(None, tokenizer.encode(None, "3 4"))) == "3 4 "
    with pytest.raises(tokenizer.TokenizerError, match="write the prompt as token ids"):
        tokenizer.encode(None, "three")


# --------------------------------------------------------------------------------------------------
# Hugging Face's tokenizer.json

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


# Parts of tokenizer.json: normalizers, pre-tokenizers (which cut text), decoders (which join it)
def split_by(regex: str) -> dict:
    cut = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return sequence(cut, BYTE_LEVEL | {"use_regex": False})


def sequence(*pretokenizers: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": list(pretokenizers)}


PREPEND = [
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
]
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
NFKC = {"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Normalizer and pre-tokenizer
KINDS = {
    "gpt2": (None, BYTE_LEVEL),
    "llama 3": (None, split_by(LLAMA3)),
    "roberta": (None, BYTE_LEVEL | {"add_prefix_space": True}),
    "lower case": (NFKC, BYTE_LEVEL),
    "llama 2": ({"type": "Sequence", "normalizers": PREPEND}, None),
    "t5": (NFKC, sequence({"type": "WhitespaceSplit"}, METASPACE | {"split": True})),
}
SPACES = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
]


def make_json(tokenizers, kind: str, path: Path, more: str = "") -> str:
    """Write a tokenizer.json of a kind, trained on data.py and `more`; return its path."""
    normalizer, pre_tokenizer = KINDS[kind]
    has_bytes = kind == "llama 2"
    models, trainers = tokenizers.models, tokenizers.trainers
    model = "Unigram" if kind == "t5" else "BPE"
    made = tokenizers.Tokenizer(getattr(models, model)())
    special, alphabet = ["</s>", "<s>"], tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False)
    options = {"vocab_size": 900, "show_progress": False}
    if has_bytes or model != "BPE":
        special += ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = []
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    if model == "Unigram":
        options["unk_token"] = "<unk>"
    trainer = trainers.UnigramTrainer if model == "Unigram" else trainers.BpeTrainer
    trainer = trainer(special_tokens=special, initial_alphabet=alphabet, **options)
    made.train_from_iterator([Path(data.__file__).read_text(), more], trainer)
    spec = json.loads(made.to_str())
    spec |= {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "decoder": BYTE_LEVEL}
    if has_bytes:
        spec["model"] |= {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
        spec["decoder"] = {"type": "Sequence", "decoders": SPACES}
    if "<unk>" in special:
        spec["added_tokens"] = spec["added_tokens"][:3]
    if model != "BPE":
        spec["decoder"] = {"type": "Fuse"}
    made = tokenizers.Tokenizer.from_str(json.dumps(spec))
    made.enable_truncation(5)  # as in the files of embedding models
    made.enable_padding(length=5)
    made.save(str(path))
    return str(path)


def mixed_text(rng: random.Random, size: int) -> str:
    parts = [*"abeStTlLmM'  \t\n\r./,!?019_é日ا\u00a0\u2003ſ²ﬁ½😀\x00\x1c\x7f\ufeff\ufffd"]
    parts += ["'s", "'LL", "\r\n", " self", " return", "      ", "12345", "e\u0301", "日本語。\n"]
    parts += ["</s>", "<|endoftext|>", "<unk>", "<0x41>", "👩\u200d👩\u200d👧", "def f(x):\n    "]
    return "x" + "".join(rng.choices(parts, k=size))


@pytest.mark.slow(proves="random documents of a hundred thousand characters")
@pytest.mark.parametrize("kind", KINDS)
def test_documents_read_in_chunks_get_the_tokens_of_the_package(tokenizers, tmp_path, kind):
    """Decoding these tokens, and others, gives the text of the package as well."""
    rng = random.Random(0)
    documents = [*(mixed_text(rng, 3 * i * i) for i in range(16)), "-" * 1000]
    documents.insert(0, mixed_text(rng, 150_000))
    assert len(documents[0]) > sources.CHUNK
    name = make_json(tokenizers, kind, tmp_path / "a.json")
    if kind == "t5":  # its vocabulary has names of special tokens
        documents = [text.replace("</s>", "").replace("<unk>", "") for text in documents]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in documents)
    tokens = prepared(tmp_path, {"a.jsonl": lines}, name=name, val_fraction=0.3)
    reference = tokenizers.Tokenizer.from_file(name)
    reference.encode_special_tokens = True
    reference.no_truncation()
    reference.no_padding()
    end = reference.token_to_id("</s>")
    expected = [reference.encode(text, add_special_tokens=False).ids + [end] for text in documents]
    found = []
    for split in ("train", "val"):
        ids = ids_of(tokens, split)
        while ids:
            length = ids.index(end) + 1
            found.append(ids[:length])
            ids = ids[length:]
    assert sorted(found) == sorted(expected)
    for ids in [*expected[-3:], random.Random(0).choices(range(tokens.vocab_size), k=300)]:
        text = reference.decode(ids, skip_special_tokens=False)
        assert "".join(tokenizer.decode(name, ids)) == text
        rest = tokenizer.decode(name, ids[3:], ids[:3])
        if text.startswith(beginning := reference.decode(ids[:3], skip_special_tokens=False)):
            assert beginning + "".join(rest) == text


def test_text_never_encodes_to_the_end_of_text_token(tokenizers, tmp_path):
    more = "".join(f"{letter}</s> " * 50 for letter in "abcdefgh")
    name = make_json(tokenizers, "llama 2", tmp_path / "a.json", more)
    end = tokenizer.load_encoding(name).eot_token
    text = "x </s> a</s>b</s>"
    reference = tokenizers.Tokenizer.from_file(name)
    reference.encode_special_tokens = True
    reference.no_truncation()
    assert end in reference.encode(text).ids
    ids = tokenizer.encode(name, text)
    assert end not in ids and "".join(tokenizer.decode(name, ids)) == text
    n = len(tokenizer.encode(name, "x"))
    assert "".join(tokenizer.decode(name, ids[n:], ids[:n])) == text[1:]  # with its first space


@pytest.mark.parametrize(
    "kind, letters, size, tokens",
    [("bytes", "éàüößñ", 200, 201), ("lower case", "ＡＢＣＤＥＦ", 300, 101)],
)
def test_val_bytes_count_the_original_text(request, tmp_path, kind, letters, size, tokens):
    """They count neither characters nor tokens: NFKC turns a wide letter of 3 bytes into 1 byte."""
    name = kind
    if kind in KINDS:
        name = make_json(request.getfixturevalue("tokenizers"), kind, tmp_path / "a.json")
    documents = [letter * 100 for letter in letters]
    options = {"name": name, "val_fraction": 0.5}
    folder = prepared(tmp_path / "six", {"a": "<|endoftext|>".join(documents)}, **options)
    assert ids_of(folder, "train")
    count = ids_of(folder, "val").count(tokenizer.load_encoding(name).eot_token)
    assert meta_of(folder)["val_bytes"] == size * count > 0
    folder = prepared(tmp_path / "one", {"a": documents[0]}, **options)  # validation gets the tail
    assert meta_of(folder)["val_bytes"] == size * len(ids_of(folder, "val")) // tokens


def test_a_tokenizer_json_is_copied_into_the_folder(tokenizers, tmp_path):
    name = make_json(tokenizers, "gpt2", tmp_path / "mine.json")
    folder = prepared(tmp_path, {"a": "the thé" * 50}, name=name)
    spec = json.loads(Path(name).read_text())
    n = len(spec["model"]["vocab"])
    assert (Path(folder.tokenizer).name, folder.vocab_size) == ("tokenizer.json", n)
    *tokens, end = ids_of(folder, "train") + ids_of(folder, "val")
    assert end == spec["model"]["vocab"]["</s>"]
    assert "".join(tokenizer.decode(folder.tokenizer, tokens)) == "the thé" * 50
    # <|endoftext|> is preferred to </s>, whatever their order in the file.
    spec["added_tokens"].append(spec["added_tokens"][0] | {"id": n, "content": "<|endoftext|>"})
    Path(name).write_text(json.dumps(spec))
    assert tokenizer.load_encoding(name).eot_token == n


def added(name: str, number: int) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": name, "special": True} | flags


@pytest.mark.parametrize(
    "config, flag, end",
    [
        (None, None, "</s>"),
        ({"eos_token": "<eos>"}, None, "<eos>"),  # Gemma's
        ({"eos_token": {"content": "<eos>", "lstrip": False}}, None, "<eos>"),
        ({"eos_token": None}, None, "</s>"),
        ({"eos_token": "<eos>"}, "<turn>", "<turn>"),
        (None, "<eos>", "<eos>"),
        ({"eos_token": "<gone>"}, None, "it has no token <gone>, which would end a document: name"),
        (
            None,
            "<gone>",
            "it has no token <gone>, which would end a document: name one with --end_",
        ),
    ],
)
def test_the_end_of_a_document_is_named_beside_the_tokenizer(
    tokenizers, tmp_path, capsys, config, flag, end
):
    """And a checkpoint and an export of the run, which have their own copies, agree: P21."""
    name = make_json(tokenizers, "gpt2", tmp_path / "tokenizer.json")
    spec = json.loads(Path(name).read_text())
    n = len(spec["model"]["vocab"])
    spec["added_tokens"] += [added("<eos>", n), added("<turn>", n + 1)]
    Path(name).write_text(json.dumps(spec))
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "text").write_text("the text")
    argv = f"--source {tmp_path}/text --tokenizer {name} --out {tmp_path}/tokens".split()
    status = prepare.main(argv + (["--end_token", flag] if flag else []))
    if end.startswith("it has no"):
        assert status == 2 and end in capsys.readouterr().err
        return
    assert status == 0
    folder = data.open_folder(tmp_path / "tokens")
    ids = ids_of(folder, "train") + ids_of(folder, "val")
    assert ids[-1] == {"</s>": 0, "<eos>": n, "<turn>": n + 1}[end]
    copies = tmp_path / "checkpoint"
    copies.mkdir()
    for file, contents in folder.tokenizer_files.items():
        (copies / file).write_bytes(contents)
    assert tokenizer.load_encoding(f"{copies}/tokenizer.json").eot_token == ids[-1]


def test_an_end_token_of_a_built_in_tokenizer_is_refused():
    with pytest.raises(tokenizer.TokenizerError, match="--end_token x: bytes ends a document by"):
        tokenizer.load_encoding("bytes", "x")


@pytest.mark.parametrize("kind", KINDS)
def test_long_documents_are_cut_only_where_no_token_can_change(tokenizers, tmp_path, kind):
    encoding = tokenizer.load_encoding(make_json(tokenizers, kind, tmp_path / "a.json"))
    texts = ["one", " two", "\nthree ", "four", ".", " five", "é", " 6", "\tseven"]
    pieces = [encode.Piece("train", text, text == "\tseven") for text in texts]
    joined = list(encode.join(pieces, encoding.encodes_words_alone, 10**9))
    assert "".join(piece.text for piece in joined) == "".join(texts)
    assert [piece.ends_document for piece in joined] == [False] * (len(joined) - 1) + [True]
    is_cut = kind in ("gpt2", "llama 3")
    assert encoding.encodes_words_alone == is_cut
    expected = ["one", " two", "\nthree four. fiveé", " 6\tseven"] if is_cut else ["".join(texts)]
    assert [piece.text for piece in joined] == expected


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(normalizer={"type": "Lowercase"}),
        lambda spec: spec.update(pre_tokenizer=None),
        lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True),
        lambda spec: spec["pre_tokenizer"].update(use_regex=False),
        lambda spec: spec.update(pre_tokenizer=split_by("[a-z ]+")),
        lambda spec: spec.update(pre_tokenizer={"type": "Whitespace"}),
        lambda spec: spec["added_tokens"].append(added("of the", 3000) | {"special": False}),
        lambda spec: spec["added_tokens"].append(
            added("  ", 3000) | {"special": False, "lstrip": True}
        ),
    ],
)
def test_an_unknown_way_to_split_words_is_not_cut(tokenizers, tmp_path, change):
    name = make_json(tokenizers, "gpt2", tmp_path / "a.json")
    spec = json.loads(Path(name).read_text())
    assert tokenizer.load_encoding(name).encodes_words_alone
    change(spec)
    Path(name).write_text(json.dumps(spec))
    assert not tokenizer.load_encoding(name).encodes_words_alone


def test_a_tokenizer_that_loses_text_is_not_comparable_by_bits_per_byte(
    tokenizers, tmp_path, capsys
):
    """A vocabulary of words beat an honest one by far: N4."""
    text = " ".join(f"word{i % 50} rare{i}" for i in range(300))
    words = {f"word{i}": i for i in range(50)} | {"[UNK]": 50, "</s>": 51}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    made.save(str(tmp_path / "words.json"))
    honest = make_json(tokenizers, "gpt2", tmp_path / "honest.json")
    for name, loses in ((str(tmp_path / "words.json"), True), (honest, False)):
        folder = prepared(tmp_path / Path(name).stem, {"a": text}, name=name)
        (said,) = re.findall(r"(.*) of the first (.*) bytes do not", capsys.readouterr().out) or [
            ()
        ]
        assert (meta_of(folder)["lost"] > 0) == bool(said) == loses
        if loses:
            lost, size = (int(number.replace(",", "")) for number in said)
            # All letters of rareN but those of the [UNK] in its place, and no more
            rare = sum(len(f"rare{i}") for i in range(300))
            assert size == len(text) and 0.9 * rare < lost <= rare
            assert meta_of(folder)["lost"] == lost / size


def test_a_document_too_large_for_one_piece_is_refused_with_the_estimate():
    pieces = [encode.Piece("train", "x" * 1000, False)] * 20
    assert len(list(encode.join(pieces[:9], False, 1_500_000))) == 0  # it has not ended
    with pytest.raises(sources.SourceError, match="at least 11,000 characters needs .* 0.0 GB"):
        list(encode.join(pieces, False, 1_500_000))


ADDED = added("<|im_end|>", 3000)
CHANGES = {
    "it has no token <|endoftext|>, <|end_of_text|>, </s>, which would": [ADDED],
    "of Hugging Face: 'int' object is not subscriptable": [5],
    "cannot be used: <|im_end|> gets the id ": [ADDED | {"content": "</s>", "id": 0}, ADDED],
}


@pytest.mark.parametrize("line", CHANGES)
def test_a_tokenizer_json_that_does_not_work_is_refused(tokenizers, tmp_path, capsys, line):
    name = make_json(tokenizers, "gpt2", tmp_path / "tokenizer.json")
    spec = json.loads(Path(name).read_text()) | {"added_tokens": CHANGES[line]}
    Path(name).write_text(json.dumps(spec))
    (tmp_path / "text").write_text("text")
    argv = f"--source {tmp_path}/text --tokenizer {name} --out {tmp_path}/tokens".split()
    assert prepare.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"prepare.py: error: --tokenizer {name} ") and err.count("\n") == 1
    assert line in err and not (tmp_path / "tokens").exists()
