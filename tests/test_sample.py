"""Sampling: which checkpoint and tokenizer are used, and what is printed."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from old import call_train, flags, tensors
from rig import last_checkpoint

import checkpoint
import prepare
import sample
import tokenizer

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
def text(capsys):
    """text(path): the standard output of sample.py."""

    def call(path: Path, *options: str, prompt: str = "the") -> str:
        argv = ["--run", str(path), "--max_new_tokens", "10", "--prompt", prompt, *options]
        assert sample.main(argv) == 0
        return capsys.readouterr().out

    return call


def test_text_continues_the_prompt(trained, text):
    out = text(trained)
    assert out.startswith("the") and len(out) > len("the") + 5


def test_a_tokenizer_file_gives_the_same_text(trained, with_file, text, tokenizers):
    assert text(with_file) == text(trained)


def test_only_the_damaged_checkpoint_of_a_run_is_refused(trained, text, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    damaged = last_checkpoint(run)
    (damaged / "index.json").unlink()
    assert sample.main(["--run", str(run)]) == 1
    line = capsys.readouterr().err
    assert line.startswith(f"sample.py: error: {damaged}: ") and "index.json" in line
    assert line.endswith("; name another checkpoint\n") and line.count("\n") == 1
    assert text(damaged.with_name("step-00000001"))


def test_a_tokenizer_is_read_only_from_its_checkpoint(with_file, tmp_path, capsys, tokenizers):
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
    greedy = text(trained, "--temperature", "0")
    assert greedy != text(trained, "--seed", "1") != text(trained, "--seed", "2")
    for option in ("--temperature=1e-9", "--top_k=1"):
        assert text(trained, "--seed", "1", option) == greedy
    assert text(trained, "--seed", "1", "--top_k", "2") != greedy


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"tokens_in_vocabulary": 258}, "258 tokens"),
        ({"tokens_in_vocabulary": 256}, "256 tokens"),
        ({"tokenizer": None}, "--prompt"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(trained, tmp_path, capsys, changes, word):
    variant(tmp_path / "run", last_checkpoint(trained), **changes)
    assert sample.main(["--run", f"{tmp_path}/run", "--prompt=the"]) == 2
    assert word in capsys.readouterr().err


def test_a_model_whose_tokenizer_is_unknown_prints_ids(trained, text, tmp_path):
    variant(tmp_path / "run", last_checkpoint(trained), tokenizer=None)
    ids = [int(token) for token in text(tmp_path / "run", prompt="").split()]
    assert len(ids) == 10 and len({*ids}) > 5 and max(ids) < 257


def test_the_model_sees_the_end_of_a_long_prompt(trained, text):
    """The context is 16 tokens, here bytes."""
    out = text(trained, prompt="x" * 5 + "the " * 4)
    assert out == "x" * 5 + text(trained, prompt="the " * 4)


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


def test_text_ends_with_its_document_or_within_a_character(trained, text, tmp_path):
    greedy = ("--temperature", "0")
    ends = always(trained, 256, tmp_path / "ends")  # the end-of-text token
    assert text(ends, *greedy) == "the\n" != text(trained)
    torn = always(trained, 0xC3, tmp_path / "torn")  # the first byte of two
    assert text(torn, *greedy) == "the" + 10 * "\ufffd" + "\n"
