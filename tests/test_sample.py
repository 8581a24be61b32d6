"""sample.py: which checkpoint and tokenizer it uses, and what it prints."""

import json
import shutil
from pathlib import Path

import pytest
import rig
from rig import cells, full_tensors, last_checkpoint, run_command, save_tokenizer

import checkpoint
import prepare
import sample
import tokenizer

GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def trained(pool, tokens, tmp_path_factory) -> Path:
    """A run of two checkpoints, of a model of bytes."""
    out = tmp_path_factory.mktemp("sample") / "run"
    flags = "--max_steps 2 --save_interval 1 --strategy fsdp"
    assert rig.train(2, tokens, out, flags).status == 0
    return out


def change(folder: Path, source: Path, **fields) -> Path:
    """Copy a checkpoint and change fields of the manifest."""
    shutil.copytree(source, folder)
    rig.edit_manifest(folder / "manifest.json", fields)
    return folder


def always(path: Path, token: int, out: Path) -> Path:
    """Copy a checkpoint, with weights that prefer this token to all others.

    Blocks add nothing, so a logit is the product of the embeddings of two tokens, and this token's
    embedding is twice as long as the others, which are equal.
    """
    manifest = checkpoint.read_manifest(path)
    tensors = full_tensors(path)
    weights = {name: tensors[name] for name in tensors if name.startswith("model.")}
    for name, weight in weights.items():
        weight.fill_(0.0 if name.endswith(("out.weight", "down.weight")) else 1.0)
    weights["model.embed.weight"][token] = 2.0
    files = [name for name in manifest.pop("files") if name.startswith("tokenizer")]
    contents = {name: (path / name).read_bytes() for name in files}
    checkpoint.save_state(out, weights, manifest, extra_files=contents)
    return out


def sampled(path: Path, *options: str, prompt: str = "the") -> str:
    """The text that sample.py prints."""
    argv = ["--run", path, "--max_new_tokens", 10, "--prompt", prompt, *options]
    status, printed, error = run_command(argv, sample.main)
    assert status == 0, error
    return printed


def test_flags_choose_how_tokens_are_drawn(trained):
    text = sampled(trained)
    assert text.startswith("the") and len(text) > len("the") + 5
    assert text == sampled(trained) == sampled(last_checkpoint(trained))
    greedy = sampled(trained, *GREEDY)
    assert greedy != sampled(trained, "--seed", "1") != sampled(trained, "--seed", "2")
    for option in ("--temperature=1e-9", "--top_k=1"):
        assert sampled(trained, "--seed", "1", option) == greedy
    assert sampled(trained, "--seed", "1", "--top_k", "2") != greedy


def test_the_model_sees_the_end_of_a_long_prompt(trained):
    """The context is 16 tokens, here bytes."""
    text = sampled(trained, prompt="x" * 5 + "the " * 4)
    assert text == "x" * 5 + sampled(trained, prompt="the " * 4)


def test_text_ends_with_its_document_or_within_a_character(trained, tmp_path):
    path = last_checkpoint(trained)
    ends = always(path, 256, tmp_path / "ends")  # the end-of-text token
    assert sampled(ends, *GREEDY) == "the\n"
    torn = always(path, 0xC3, tmp_path / "torn")  # the first byte of two
    assert sampled(torn, *GREEDY) == "the" + 10 * "\ufffd" + "\n"


def test_a_tokenizer_file_may_drop_the_first_space_of_a_text(train, tokenizers, tmp_path):
    """It is in the checkpoints: the token folder may be gone."""
    file = save_tokenizer(tokenizers, "llama 2", tmp_path / "llama.json")
    (tmp_path / "text").write_text("the thing is a text that goes on and on\n" * 50)
    prepare.prepare([str(tmp_path / "text")], tmp_path / "tokens", str(file))
    path = last_checkpoint(train(1, f"--data {tmp_path}/tokens --max_steps 1").out)
    shutil.rmtree(tmp_path / "tokens")
    file.unlink()
    (word,) = tokenizer.load_encoding(f"{path}/tokenizer.json").encode_ordinary("the")
    words = always(path, word, tmp_path / "words")
    assert sampled(words, *GREEDY) == "the" + 10 * " the" + "\n"
    assert sampled(words, *GREEDY, prompt="") == "the" + 9 * " the" + "\n"


# Fields of the manifest, of which a hostile one names a file elsewhere | what the error says
REFUSED = """
{"tokens_in_vocabulary": 258}    | 258 tokens
{"tokens_in_vocabulary": 256}    | 256 tokens
{"tokenizer": null}              | --prompt
{"tokenizer": "/tmp/mine.json"}  | {path}/mine.json
{"tokenizer": "../../mine.json"} | {path}/mine.json
"""


@pytest.mark.parametrize("fields, said", cells(REFUSED))
def test_a_tokenizer_that_does_not_fit_is_refused(trained, tmp_path, fields, said):
    path = change(tmp_path / "step-00000002", last_checkpoint(trained), **json.loads(fields))
    status, _, error = run_command(["--run", path, "--prompt=the"], sample.main)
    assert status == 2 and said.replace("{path}", str(path)) in error


def test_only_the_damaged_checkpoint_of_a_run_is_refused(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    damaged = last_checkpoint(run)
    (damaged / "index.json").unlink()
    status, _, error = run_command(["--run", run], sample.main)
    assert status == 1 and str(damaged) in error
    sampled(damaged.with_name("step-00000001"))
