"""Sampling: which checkpoint, which tokenizer."""

import base64
import json
import re
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
    """text(path): what sample.py prints, and what it says beside, but for the speed."""

    def call(path: Path, *options: str) -> tuple[str, str]:
        argv = ["--run", str(path), *TEN_TOKENS, *(options or ("--prompt", "the"))]
        assert sample.main(argv) == 0
        out, err = capsys.readouterr()
        warnings, _, speed = err.rpartition("sample.py: ")
        assert re.fullmatch(r"[\d,]+ tokens in \d+\.\d s: [\d,]+ tokens/s\n", speed)
        return out, warnings

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


def test_a_tokenizer_is_read_in_its_checkpoint_only(run, tmp_path, trained, text, capsys):
    """Until 2026-11-21 manifests had its absolute path. One may be hostile."""
    path = newest(run)
    (inside,) = path.glob("*.tiktoken")
    outside = inside.rename(tmp_path / "elsewhere.tiktoken")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][inside.name]
    for name in (str(outside), "../../../elsewhere.tiktoken"):
        manifest["tokenizer"] = name
        (path / "manifest.json").write_text(json.dumps(manifest))
        assert (path / name).is_file()
        assert sample.main(["--run", str(path)]) == 2
        line = f"is missing: there is no {path / outside.name}; copy the file there\n"
        assert capsys.readouterr().err.endswith(line)
    outside.rename(path / outside.name)
    assert text(path) == text(trained)


def test_several_prompts_are_continued_in_one_batch(trained, text):
    prompts = ["the", "thing", "t"]
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    out, _ = text(trained, *flags)
    alone = [text(trained, "--prompt", prompt)[0] for prompt in prompts]
    assert out == f"{'-' * 80}\n".join(alone)


def test_a_prompt_longer_than_the_context_is_slid_and_that_is_said(trained, text):
    """The context is 16 tokens; one token of this tokenizer is "the"."""
    out, err = text(trained, "--prompt", "x" * 5 + "the" * 16)
    assert err == "sample.py: a prompt has 21 tokens: the model sees the last 16\n"
    short, _ = text(trained, "--prompt", "the" * 16)
    assert out == "x" * 5 + short


def test_text_ends_where_the_document_does(trained, text, monkeypatch):
    whole, _ = text(trained)
    weights = sample.load_model

    def prefers_the_end(path, config, device):
        model = weights(path, config, device)
        end = 258  # the end-of-text token
        model.head.register_forward_hook(lambda module, x, logits: favour(logits, end))
        return model

    monkeypatch.setattr(sample, "load_model", prefers_the_end)
    assert text(trained)[0] == "the\n" != whole


def favour(logits, token: int):
    logits[..., token] = 1e3
    return logits


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        sample.main(["--help"])
    assert capsys.readouterr().out.count("\n  python sample.py --run runs/tiny") == 2
