"""Sampling: which checkpoint, which tokenizer."""

import base64
import json
import shutil
from pathlib import Path

import pytest
from conftest import call_train, flags

import checkpoint
import prepare
import sample

TEN_TOKENS = ["--max_new_tokens", "10", "--temperature", "0"]


@pytest.fixture(scope="module")
def trained(pool, tmp_path_factory) -> Path:
    """A run of two checkpoints, whose tokenizer is a file and whose token folder has moved."""
    root = tmp_path_factory.mktemp("sample")
    words = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    lines = [f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words)]
    (root / "mine.tiktoken").write_text("".join(lines))
    (root / "text").write_text("the thing " * 500)
    name = str(root / "mine.tiktoken")
    prepare.prepare([str(root / "text")], root / "tokens", name, say=lambda line: None)
    argv = flags(f"--data {root}/tokens --out {root}/run --max_steps 2 --save_interval 1")
    assert pool(2, call_train, [*argv, "--strategy", "fsdp"]) == [0, 0]
    shutil.rmtree(root / "tokens")
    (root / "mine.tiktoken").unlink()
    return root / "run"


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy to damage."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def text(capsys):
    """text(path): what sample.py prints, and what it says beside."""

    def call(path: Path) -> tuple[str, str]:
        assert sample.main(["--run", str(path), "--prompt", "the", *TEN_TOKENS]) == 0
        return capsys.readouterr()

    return call


def newest(run: Path) -> Path:
    return checkpoint.list_checkpoints(run)[-1]


def test_a_checkpoint_holds_all_that_sampling_needs(trained, text):
    out, err = text(trained)
    assert out.startswith("the") and len(out) > len("the") + 5
    assert err == ""
    (name,) = newest(trained).glob("*.tiktoken")
    manifest = checkpoint.read_manifest(newest(trained))
    assert manifest["tokenizer"] == name.name
    assert name.name in manifest["files"]


def test_a_consolidated_checkpoint_continues_with_the_same_text(trained, tmp_path, text, capsys):
    out = tmp_path / "one"
    assert checkpoint.main(["consolidate", str(newest(trained)), str(out)]) == 0
    capsys.readouterr()
    assert text(out) == text(trained)


def test_a_damaged_checkpoint_is_passed_over_and_that_is_said(run, text):
    damaged = newest(run)
    (damaged / ".metadata").unlink()
    out, err = text(run)
    older = damaged.with_name("step-00000001")
    assert err == f"sample.py: passed over {damaged}: .metadata is missing; using {older}\n"
    assert out == text(older)[0]


def test_a_manifest_may_name_the_tokenizer_by_its_absolute_path(run, tmp_path, trained, text):
    """As checkpoints did until 2026-11-21. The file may also lie in the checkpoint by now."""
    path = newest(run)
    (inside,) = path.glob("*.tiktoken")
    outside = inside.rename(tmp_path / "elsewhere.tiktoken")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][inside.name]
    manifest["tokenizer"] = str(outside)
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert text(path) == text(trained)
    outside.rename(path / outside.name)
    assert text(path) == text(trained)


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    assert capsys.readouterr().out.count("\n  python sample.py --run runs/tiny") == 2
