"""tools/hf.py: a model answers and learns as in transformers, and comes back; one file for many."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from rig import SMALL, Run, cells, full_tensors, run_command, save_tokenizer, small_gpt2

import checkpoint
import data
import prepare
import sample
import tokenizer
from errors import UsageError
from model import ModelConfig
from tools import hf

TOKENS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
# Flags of a run of an imported model, which brings its own shape
TRAIN = f"--seq_len {SMALL.partition('--seq_len')[2]} --strategy fsdp --max_steps 3"


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return pytest.importorskip("transformers", reason="needs tests/requirements-extra.txt")


def convert(command: str, source: Path, out: Path) -> Path:
    status, _, error = run_command([command, source, out], hf.main)
    assert status == 0, error
    return out


def ours(path: Path) -> torch.nn.Module:
    return sample.load_model(path, sample.read_trained(path).config, torch.device("cpu"))


def theirs(transformers, folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def assert_same_logits(model: torch.nn.Module, other: torch.nn.Module) -> None:
    with torch.no_grad():
        results = [each(TOKENS) for each in (model, other)]
    logits = [getattr(result, "logits", result) for result in results]  # theirs is an object
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def train_from(pool, imported: Path, tokens: Path, out: Path, text: str = "") -> Run:
    argv = f"{TRAIN} --init_from {imported} --data {tokens} --out {out} {text}".split()
    answers = pool(2, run_command, argv)
    assert [status for status, _, _ in answers] == [0, 0], answers
    return Run(out, *answers[0])


# --------------------------------------------------------------------------------------------------
# Models

SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
SHAPE |= {"vocab_size": 300}  # not a multiple of 64
SHAPE |= {"initializer_range": 0.2}  # logits of about 1, so that a lost term shows
# Of the frequencies of 8 elements, some are high, some low, and one is in between.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0}
LLAMA3 |= {"low_freq_factor": 0.1, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
FAMILIES = {
    "Llama 2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "Llama 3.2": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "Llama of SmolLM2": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}
    | {"tie_word_embeddings": True, "rope_theta": 100_000.0},
    "Mistral 0.3": {"rope_theta": 1e6, "sliding_window": None, "dtype": torch.bfloat16},
}


def make_model(transformers, family: str, folder: Path, **options) -> Path:
    """Save a random model of the family with transformers."""
    kind = family.split()[0]
    config = getattr(transformers, f"{kind}Config")(**SHAPE | FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 2.0)
    model.save_pretrained(folder, **options)
    return folder


@pytest.mark.hf
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_further_training_are_those_of_transformers(
    transformers, family, pool, tokens, tmp_path
):
    """The model is imported from several files, trained for three steps on two ranks, exported."""
    source = make_model(transformers, family, tmp_path / "source", max_shard_size="20KB")
    imported = convert("import", source, tmp_path / "imported")
    model = theirs(transformers, source)
    assert_same_logits(ours(imported), model)

    # The tokenizer of the model is unknown, so it may be another than that of the data.
    flags = "--allow_changes --weight_decay 0 --max_grad_norm 100"
    run = train_from(pool, imported, tokens, tmp_path / "run", flags)
    sequences = data.open_folder(tokens).open("train", seq_len=16, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0)
    for step, row in enumerate(run.rows()):
        batch = sequences[list(range(8 * step, 8 * step + 8))]
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss  # the mean over the last 16 of 17 tokens
        loss.backward()
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
        assert (row["loss"], row["grad_norm"]) == pytest.approx((loss.item(), norm.item()), 1e-4)
        optimizer.param_groups[0]["lr"] = row["lr"]
        optimizer.step()
    shutil.rmtree(imported)  # the run's checkpoints are enough
    out = convert("export", run.out, tmp_path / "exported")
    assert_same_logits(theirs(transformers, out), model)
    # It was trained on sequences of 16 tokens, but began with a context of 64. Its special tokens
    # are now those of the data.
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.max_position_embeddings, config.bos_token_id) == (64, 256)


@pytest.mark.hf
def test_a_trained_model_answers_in_transformers_and_comes_back(transformers, train, tmp_path):
    run = train(2, "--strategy fsdp --max_steps 3").out
    out = convert("export", run, tmp_path / "exported")
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == list(range(257, 320))  # which are only padding
    flags = ["--temperature", 0, "--max_new_tokens", 11, "--prompt", "abcde"]
    status, printed, _ = run_command(["--run", run, *flags], sample.main)
    generate = transformers.pipeline("text-generation", str(out))
    (answer,) = generate("abcde", max_new_tokens=11, do_sample=False)
    assert (status, printed) == (0, answer["generated_text"] + "\n")

    imported = convert("import", out, tmp_path / "imported")
    # The tokenizer `bytes` comes back as a file.
    found = dataclasses.replace(sample.read_trained(imported), tokenizer="bytes")
    assert found == sample.read_trained(checkpoint.step_path(run, 3))

    # A field of a fork, which an export cannot keep, is refused.
    fields = [("window", int, 0)]
    fork = dataclasses.make_dataclass("Fork", fields, bases=(ModelConfig,), frozen=True)
    with pytest.raises(UsageError, match="window 4"):
        hf.to_hf(fork(**vars(found.config), window=4))


# Fields of config.json | what the error says
REFUSED = """
{"model_type": "mistral"}                           | sliding_window 4096
{"attention_bias": true}                            | attention_bias True
{"head_dim": 16}                                    | head_dim 16
{"rope_scaling": {"type": "linear", "factor": 2.0}} | rope_type 'linear'
{"num_hidden_layers": 3}                            | model.layers.2.
{"num_hidden_layers": 1}                            | model.layers.1.
{"num_hidden_layers": "many"}                       | config.json
"""


@pytest.mark.hf
def test_models_that_the_decoder_cannot_compute_are_refused(transformers, tmp_path):
    source = make_model(transformers, "Llama 3.2", tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    for change, said in cells(REFUSED):
        hf.write_file(source / "config.json", config | json.loads(change))
        status, _, error = run_command(["import", source, tmp_path / "new"], hf.main)
        assert status == 2 and error.count("\n") == 1 and said in error, change
        assert [*tmp_path.iterdir()] == [source]


# --------------------------------------------------------------------------------------------------
# Tokenizers

UGLY = [
    "the thing that isn't there:  two   spaces\n\n\t and 12345678 tabs \r\n  end   ",
    "I'LL we'Ve 'S ſ 'ſ naïve Ünïcödé 東京都に 한국어 ١٢٣ ½ e\u0301 \u00a0\u2003x\u0085y",
    "👩\u200d👩\u200d👧 \x00\x1c\x7f \ufeff\u180e\u200b",
    "def f(x):\n    return {'a': [1,2,3], \"b\": x**2}  # comment...!!!\n\n\n",
    *("\n", "   ", "a\n ", "a \n b", "x" * 300, "aaaaaaa aaaa aaa unreachable"),
]
# No merges lead to the last one.
MERGES = "th| t|he|the| the|  |    |\n\n|in|ing| an|12|123|aa|aaa|aaaa| a| aa|xx|é|unreachable"


@pytest.mark.hf
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_an_exported_tokenizer_gives_the_same_tokens(transformers, monkeypatch, name):
    small_gpt2(monkeypatch, [merge.encode() for merge in MERGES.split("|")])
    encoding = tokenizer.load_encoding(name)
    converted = hf.convert_tokenizer(encoding)
    for line in [*UGLY, Path(__file__).read_text()]:
        assert converted.encode(line).ids == encoding.encode_ordinary(line), repr(line)
        assert converted.decode(converted.encode(line).ids) == line
    assert converted.encode(tokenizer.END_OF_TEXT).ids == [encoding.eot_token]


@pytest.mark.hf
def test_what_a_model_came_with_survives(transformers, tokenizers, pool, tmp_path, monkeypatch):
    """Its tokenizer, template and special ids, if the run's tokenizer is the model's."""
    monkeypatch.setitem(SHAPE, "vocab_size", 900)
    source = make_model(transformers, "Mistral 0.3", tmp_path / "source")
    file = save_tokenizer(tokenizers, "llama 2", tmp_path / "llama.json")
    names = {"eos_token": "</s>", "chat_template": "{{ messages }}", "tokenizer_file": str(file)}
    transformers.PreTrainedTokenizerFast(**names).save_pretrained(source)
    generation = {"eos_token_id": [3, 0], "pad_token_id": 2, "temperature": 0.7}
    hf.write_file(source / "generation_config.json", generation)

    imported = convert("import", source, tmp_path / "imported")
    tokens = tmp_path / "tokens"
    prepare.prepare([__file__], tokens, f"{imported}/tokenizer.json")
    run = train_from(pool, imported, tokens, tmp_path / "run")
    whole = convert("consolidate", run.out, tmp_path / "whole")
    out = convert("export", whole, tmp_path / "exported")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_text().strip() == (source / name).read_text().strip(), name
    found = json.loads((out / "generation_config.json").read_text())
    assert found == generation | {"suppress_tokens": None}


# --------------------------------------------------------------------------------------------------
# A checkpoint in one file


def test_a_consolidated_checkpoint_is_complete_and_continues(train, tmp_path):
    steps = "--save_interval 2 --keep_every 1 --max_steps 4"
    whole = train(2, f"{steps} --strategy fsdp", "whole")
    path = checkpoint.step_path(whole.out, 2)
    out = convert("consolidate", path, checkpoint.step_path(tmp_path / "run", 2))
    names = {"index.json", "manifest.json", "rank-00000.safetensors"}
    assert {file.name for file in out.iterdir()} == names and checkpoint.verify(out) is None
    torch.testing.assert_close(full_tensors(out), full_tensors(path), rtol=0, atol=0)
    resumed = [row["loss"] for row in train(1, steps).rows()]
    assert resumed == pytest.approx([row["loss"] for row in whole.rows()[2:]], rel=1e-5)
    # A checkpoint that is damaged is refused.
    (path / "rank-00001.safetensors").write_bytes(b"?")
    assert run_command(["consolidate", path, tmp_path / "new"], hf.main)[0] == 1
    assert not [*tmp_path.glob("*new*")]
