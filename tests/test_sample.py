"""Sampling: which checkpoint and tokenizer are used, and what is printed."""

import io
import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import call_train, flags, last_checkpoint, tensors

import checkpoint
import prepare
import sample
import tokenizer

TEN_TOKENS = ["--max_new_tokens", "10"]

# The tokenizer `bytes` as a tokenizer.json, in which bytes that cannot be printed are letters
LETTERS = map(chr, itertools.count(256))
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
END = {"id": 256, "content": tokenizer.END_OF_TEXT, "special": True}
END |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
VOCAB = {}
for byte in range(256):
    VOCAB[chr(byte) if chr(byte).isprintable() and chr(byte) != " " else next(LETTERS)] = byte
BYTES = {"added_tokens": [END], "pre_tokenizer": BYTE_LEVEL, "decoder": BYTE_LEVEL}
BYTES["model"] = {"type": "BPE", "vocab": VOCAB, "merges": [], "ignore_merges": True}


@pytest.fixture(scope="module")
def with_file(pool, tmp_path_factory) -> Path:
    """A run of two checkpoints, whose tokenizer is a file and whose token folder has moved."""
    root = tmp_path_factory.mktemp("sample")
    (root / "text").write_text("the thing " * 500)
    prepare.prepare([str(root / "text")], root / "tokens")
    (root / "tokens/tokenizer.json").write_text(json.dumps(BYTES))
    meta = json.loads((root / "tokens/meta.json").read_text()) | {"tokenizer": "tokenizer.json"}
    (root / "tokens/meta.json").write_text(json.dumps(meta))
    argv = flags(f"--data {root}/tokens --out {root}/run --max_steps 2 --save_interval 1")
    assert pool(2, call_train, [*argv, "--strategy", "fsdp"]) == [0, 0]
    shutil.rmtree(root / "tokens")
    return root / "run"


def variant(folder: Path, source: Path, **fields) -> None:
    """Copy a checkpoint and change fields of the manifest."""
    shutil.copytree(source, folder)
    manifest = checkpoint.read_manifest(source) | fields
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def trained(with_file, tmp_path_factory) -> Path:
    """The same run with the same tokens, but the built-in tokenizer, which needs no package."""
    run = tmp_path_factory.mktemp("built in") / "run"
    for path in with_file.glob("checkpoints/*"):
        variant(run / "checkpoints" / path.name, path, tokenizer="bytes")
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def text(capsys):
    """text(path): the standard output and standard error of sample.py."""

    def call(path: Path, *options: str) -> tuple[str, str]:
        argv = ["--run", str(path), *TEN_TOKENS, *(options or ("--prompt", "the"))]
        assert sample.main(argv) == 0
        return capsys.readouterr()

    return call


def test_several_samples_have_the_seeds_from_the_first_on(trained, text):
    alone = [text(trained, "--prompt", "the", "--seed", str(seed)).out for seed in (5, 6, 7)]
    assert len({*alone}) == 3
    options = "--prompt the --seed 5 --num_samples 3 --max_new_tokens 10"
    said = text(trained, *options.split()).out
    assert said == f"{'-' * 80}\n".join(alone)


def test_sampling_needs_only_the_checkpoint(with_file):
    path = last_checkpoint(with_file)
    manifest = checkpoint.read_manifest(path)
    assert manifest["tokenizer"] == "tokenizer.json" and "tokenizer.json" in manifest["files"]
    found = sample.read_trained(path)
    assert (found.tokenizer, found.vocab_size) == (str(path / "tokenizer.json"), 257)


def test_text_continues_the_prompt(trained, text, monkeypatch):
    out, err = text(trained)
    assert out.startswith("the") and len(out) > len("the") + 5
    assert err == ""
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n"))
    assert text(trained, "--prompt", "-") == (out, err)


def test_a_tokenizer_file_gives_the_same_text(trained, with_file, text, tokenizers):
    assert text(with_file) == text(trained)


def test_only_the_damaged_checkpoint_of_a_run_is_refused(run, text, capsys):
    damaged = last_checkpoint(run)
    (damaged / "index.json").unlink()
    assert sample.main(["--run", str(run)]) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"sample.py: error: {damaged}: ") and "index.json" in line
    assert line.endswith("; name another checkpoint\n") and line.count("\n") == 1
    assert text(damaged.with_name("step-00000001"))[0]


def test_a_checkpoint_of_another_program_is_refused(run, capsys):
    """save_state accepts any manifest, as the notebook of docs/forking.md shows."""
    path = last_checkpoint(run)
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("tokens_in_vocabulary", "tokenizer", "model"):
        less = {key: value for key, value in manifest.items() if key != name}
        (path / "manifest.json").write_text(json.dumps(less))
        assert sample.main(["--run", str(path)]) == 2
        line = capsys.readouterr().err
        assert str(path) in line and f"lacks '{name}'" in line and line.count("\n") == 1


def test_a_tokenizer_is_read_only_from_its_checkpoint(with_file, tmp_path, capsys):
    """The manifest of a hostile checkpoint names another file."""
    run = shutil.copytree(with_file, tmp_path / "run")
    path = last_checkpoint(run)
    inside = path / "tokenizer.json"
    outside = inside.rename(tmp_path / "elsewhere.json")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][inside.name]
    for name in (str(outside), "../../../elsewhere.json"):
        manifest["tokenizer"] = name
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert (path / name).is_file()
        assert sample.main(["--run", str(path)]) == 2
        line = capsys.readouterr().err
        assert f"--tokenizer {path / outside.name} is not" in line and line.count("\n") == 1
    inside = outside.rename(path / outside.name)
    assert sample.read_trained(path).tokenizer == str(inside)


def test_flags_choose_how_tokens_are_drawn(trained, text):
    def drawn(*options: str) -> str:
        return text(trained, "--prompt", "the", *options)[0]

    greedy = drawn("--temperature", "0")
    assert greedy != drawn("--seed", "1") != drawn("--seed", "2")
    for option in ("--temperature=1e-9", "--top_k=1"):
        assert drawn("--seed", "1", option) == greedy
    assert drawn("--seed", "1", "--top_k", "2") != greedy


def test_a_tokenizer_of_another_size_and_ids_outside_of_it_are_refused(run, capsys):
    path = last_checkpoint(run)
    manifest = json.loads((path / "manifest.json").read_text())
    for changes, prompt, word in (
        ({"tokens_in_vocabulary": 258}, "the", "258 tokens"),
        ({"tokens_in_vocabulary": 256}, "the", "256 tokens"),
        ({"tokenizer": None}, "257", "0 to 256"),
        ({"tokenizer": None}, "-1", "0 to 256"),
        ({"tokenizer": None}, "the", "token ids"),
    ):
        (path / "manifest.json").write_text(json.dumps(manifest | changes))
        assert sample.main(["--run", str(path), f"--prompt={prompt}"]) == 2
        assert word in capsys.readouterr().err


def test_a_model_whose_tokenizer_is_unknown_prints_ids(run, text):
    path = last_checkpoint(run)
    manifest = json.loads((path / "manifest.json").read_text()) | {"tokenizer": None}
    (path / "manifest.json").write_text(json.dumps(manifest))
    ids = [int(token) for token in text(path, "--prompt", "116 104")[0].split()]
    assert ids[:2] == [116, 104] and len(ids) == 12


def test_the_model_sees_the_end_of_a_long_prompt(trained, text):
    """The context is 16 tokens, here bytes."""
    out, err = text(trained, "--prompt", "x" * 5 + "the " * 4)
    assert err == "sample.py: the prompt has 21 tokens: the model sees the last 16\n"
    short, _ = text(trained, "--prompt", "the " * 4)
    assert out == "x" * 5 + short


def always(run: Path, token: int, folder: Path) -> Path:
    """Write the run's last checkpoint with weights that prefer this token to all others.

    Blocks add nothing, so a logit is the product of the embeddings of two tokens, and this token's
    embedding is twice as long as the others, which are equal.
    """
    path = last_checkpoint(run)
    manifest = checkpoint.read_manifest(path)
    weights = tensors(path, "model.")
    for name, weight in weights.items():
        weight.fill_(0.0 if name.endswith(("out.weight", "down.weight")) else 1.0)
    weights["model.embed.weight"][token] = 2.0
    shown = {
        name: manifest[name] for name in ("step", "model", "tokenizer", "tokens_in_vocabulary")
    }
    files = {name: (path / name).read_bytes() for name in manifest["files"] if ".json" in name}
    files.pop("index.json")
    out = folder / path.name
    checkpoint.save_state(out, weights, manifest=shown, extra_files=files)
    return out


GREEDY = ("--prompt", "the", "--temperature", "0")


def test_text_ends_with_its_document_or_within_a_character(trained, text, tmp_path):
    whole, _ = text(trained)
    ends = always(trained, 256, tmp_path / "ends")  # the end-of-text token
    assert text(ends, *GREEDY)[0] == "the\n" != whole
    torn = always(trained, 0xC3, tmp_path / "torn")  # the first byte of two
    assert text(torn, *GREEDY)[0] == "the" + 10 * "\ufffd" + "\n"
