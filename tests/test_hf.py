"""tools/hf.py: a model answers and learns as in transformers, and comes back; one file for many."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from rig import (
    SMALL,
    Run,
    cells,
    full_tensors,
    last_checkpoint,
    run_command,
    save_tokenizer,
    small_gpt2,
)

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


def refused(command: str, source: Path, out: Path, status: int = 2) -> str:
    """Check that the command fails and leaves nothing; return the line of its error."""
    found, _, error = run_command([command, source, out], hf.main)
    assert found == status and error.count("\n") == 1
    assert not list(out.parent.glob(f"*{out.name}*"))
    return error


def ours(path: Path) -> torch.nn.Module:
    return sample.load_model(path, sample.read_trained(path).config, torch.device("cpu"))


def theirs(transformers, folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result = model(TOKENS)
    return getattr(result, "logits", result)


def assert_same_logits(model: torch.nn.Module, other: torch.nn.Module) -> None:
    torch.testing.assert_close(logits_of(model), logits_of(other), rtol=0, atol=1e-4)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder in float32."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= {name: x.float().clone() for name, x in checkpoint.map_safetensors(file).items()}
    return found


def train_from(pool, imported: Path, tokens: Path, out: Path, text: str = "") -> Run:
    argv = f"{TRAIN} --init_from {imported} --data {tokens} --out {out} {text}".split()
    answers = pool(2, run_command, argv)
    assert [status for status, _, _ in answers] == [0, 0], answers
    return Run(out, *answers[0])


@pytest.fixture
def trained(train) -> Path:
    """The last checkpoint of a tied model, sharded over two ranks."""
    return last_checkpoint(train(2, "--strategy fsdp --max_steps 3", "trained").out)


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
    "llama 2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama 3.2": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "smollm2": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}
    | {"tie_word_embeddings": True, "rope_theta": 100_000.0},
    "mistral 0.3": {"rope_theta": 1e6, "sliding_window": None, "dtype": torch.bfloat16},
}


def make_model(transformers, family: str, folder: Path, **options) -> Path:
    """Save a random model of the family with transformers."""
    kind = "Mistral" if "mistral" in family else "Llama"
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
    """The model is imported, trained for three steps on two ranks and exported."""
    source = make_model(transformers, family, tmp_path / "source")
    imported = convert("import", source, tmp_path / "imported")
    model = theirs(transformers, source)
    assert_same_logits(ours(imported), model)
    same = convert("export", imported, tmp_path / "same")
    torch.testing.assert_close(weights_of(same), weights_of(source), rtol=0, atol=0)

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
    out = convert("export", run.out, tmp_path / "exported")
    assert_same_logits(theirs(transformers, out), model)
    # It was trained on sequences of 16 tokens, but began with a context of 64. Its special tokens
    # are now those of the data.
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.max_position_embeddings, config.bos_token_id) == (64, 256)
    assert (out / "tokenizer.json").exists()
    # The run continues without the imported folder: its checkpoints describe the model.
    shutil.rmtree(imported)
    assert train_from(pool, imported, tokens, run.out, flags).steps() == run.steps()


@pytest.mark.hf
def test_a_trained_model_answers_in_transformers_and_comes_back(transformers, trained, tmp_path):
    out = convert("export", trained.parent.parent, tmp_path / "exported")
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == list(range(257, 320))  # which are only padding
    flags = ["--temperature", 0, "--max_new_tokens", 11, "--prompt", "abcde"]
    status, printed, _ = run_command(["--run", trained, *flags], sample.main)
    generate = transformers.pipeline("text-generation", str(out))
    (answer,) = generate("abcde", max_new_tokens=11, do_sample=False)
    assert (status, printed) == (0, answer["generated_text"] + "\n")

    imported = convert("import", out, tmp_path / "imported")
    assert checkpoint.verify(imported) is None
    # The tokenizer `bytes` comes back as a file.
    found = dataclasses.replace(sample.read_trained(imported), tokenizer="bytes")
    assert found == sample.read_trained(trained)


@pytest.mark.hf
def test_a_tensor_is_read_from_the_file_that_the_index_names(transformers, tmp_path):
    """Files of other models lie beside it, and a file may have a tensor of another one, too."""
    source = make_model(transformers, "mistral 0.3", tmp_path / "source", max_shard_size="20KB")
    model = theirs(transformers, source)
    file_of = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    zeros = {name: torch.zeros_like(x) for name, x in weights_of(source).items()}
    for file in source.glob("*.safetensors"):
        right = {name: x.clone() for name, x in checkpoint.map_safetensors(file).items()}
        stale = {name: zeros[name] for name in file_of if file_of[name] != file.name}
        checkpoint.write_safetensors(file, right | stale)
    for name in ("model-99999-of-99999.safetensors", "model_old.safetensors", "old.safetensors"):
        checkpoint.write_safetensors(source / name, zeros)
    assert_same_logits(ours(convert("import", source, tmp_path / "imported")), model)
    # A shard is missing; and where there are two models, transformers would read one.
    (source / file_of["model.norm.weight"]).unlink()
    refused("import", source, tmp_path / "new")
    checkpoint.write_safetensors(source / "model.safetensors", zeros)
    assert "remove one" in refused("import", source, tmp_path / "new")


# Fields of config.json, or a tensor and what it is instead | what the error says
REFUSED = """
{"model_type": "qwen3"}                                   | model_type 'qwen3'
{"model_type": "mistral"}                                 | sliding_window 4096
{"hidden_act": "gelu"}                                    | hidden_act 'gelu'
{"attention_bias": true}                                  | attention_bias True
{"mlp_bias": true}                                        | mlp_bias True
{"head_dim": 16}                                          | head_dim 16
{"rope_scaling": {"type": "linear", "factor": 2.0}}       | rope_type 'linear'
{"rope_parameters": {"rope_type": "yarn", "factor": 2.0}} | rope_type 'yarn'
{"partial_rotary_factor": 0.5}                            | partial_rotary_factor 0.5
{"quantization_config": {"quant_method": "fp8"}}          | quantization_config
{"num_hidden_layers": 3}                                  | model.layers.2.
{"num_hidden_layers": 1}                                  | model.layers.1.
{"num_hidden_layers": "many"}                             | config.json
model.norm.weight float32 7                               | model.norm.weight
model.norm.weight int8 32                                 | model.norm.weight
"""


@pytest.mark.hf
def test_models_that_the_decoder_cannot_compute_are_refused(transformers, tmp_path):
    source = make_model(transformers, "llama 3.2", tmp_path / "source")
    weights = weights_of(source)
    config = SHAPE | {"model_type": "llama", "tie_word_embeddings": True}
    for change, said in cells(REFUSED):
        fields, tensors = {}, {}
        if change[0] == "{":
            fields = json.loads(change)
        else:
            name, dtype, size = change.split()
            tensors[name] = torch.ones(int(size), dtype=getattr(torch, dtype))
        hf.write_file(source / "config.json", config | fields)
        checkpoint.write_safetensors(source / "model.safetensors", weights | tensors)
        assert said in refused("import", source, tmp_path / "new"), change
    # A head that is the embedding stays tied to it. Another head is imported untied.
    hf.write_file(source / "config.json", config)
    embedding = weights["model.embed_tokens.weight"]
    for tied, head in ((True, embedding.clone()), (False, embedding + 1)):
        tensors = weights | {"lm_head.weight": head}
        checkpoint.write_safetensors(source / "model.safetensors", tensors)
        imported = convert("import", source, tmp_path / f"tied-{tied}")
        assert ours(imported).config.tied == tied
        assert_same_logits(ours(imported), theirs(transformers, source))


def test_a_field_of_a_fork_is_exported_only_at_its_default():
    @dataclasses.dataclass(frozen=True)
    class Fork(ModelConfig):
        window: int = 0

    sizes = dict(vocab_size=64, n_layer=1, n_head=4, n_kv_head=4, d_model=8, d_ff=8, seq_len=16)
    assert hf.to_hf(Fork(**sizes)) == hf.to_hf(ModelConfig(**sizes))
    with pytest.raises(UsageError, match="window 4"):
        hf.to_hf(Fork(**sizes, window=4))


def test_a_model_that_was_finetuned_on_short_sequences_keeps_its_context(train):
    first = train(1, "--max_steps 1", "first").out
    short = train(1, f"--max_steps 1 --seq_len 8 --init_from {first}").out
    assert hf.longest_context(last_checkpoint(short)) == 16
    shutil.rmtree(first)
    assert hf.longest_context(last_checkpoint(short)) == 8


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
    """Its tokenizer, template, special ids and context, if the run's tokenizer is the model's."""
    monkeypatch.setitem(SHAPE, "vocab_size", 900)
    source = make_model(transformers, "mistral 0.3", tmp_path / "source")
    file = save_tokenizer(tokenizers, "llama 2", tmp_path / "llama.json")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "model_max_length": 77}
    names |= {"chat_template": "{{ messages }}", "tokenizer_file": str(file)}
    transformers.PreTrainedTokenizerFast(**names).save_pretrained(source)
    ids = {"bos_token_id": 1, "eos_token_id": [3, 0], "pad_token_id": 2}
    config = json.loads((source / "config.json").read_text())
    hf.write_file(source / "config.json", config | ids)
    hf.write_file(source / "generation_config.json", ids | {"do_sample": True, "temperature": 0.7})

    imported = convert("import", source, tmp_path / "imported")
    (tmp_path / "text").write_text(tokenizer.END_OF_TEXT.join(UGLY * 20).replace("\0", ""))
    tokens = tmp_path / "tokens"
    prepare.prepare([str(tmp_path / "text")], tokens, f"{imported}/tokenizer.json")
    run = train_from(pool, imported, tokens, tmp_path / "run")
    shutil.rmtree(imported)
    out = convert("export", run.out, tmp_path / "exported")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_text().strip() == (source / name).read_text().strip(), name
    generation = json.loads((source / "generation_config.json").read_text())
    generation |= {"suppress_tokens": None}
    assert json.loads((out / "generation_config.json").read_text()) == generation
    config = transformers.AutoConfig.from_pretrained(out)
    assert {name: getattr(config, name) for name in ids} == ids
    assert config.max_position_embeddings == 64
    after = transformers.AutoTokenizer.from_pretrained(out)
    encoding = tokenizer.load_encoding(f"{last_checkpoint(run.out)}/tokenizer.json")
    for line in UGLY:
        assert after(line)["input_ids"] == encoding.encode_ordinary(line)


# --------------------------------------------------------------------------------------------------
# A checkpoint in one file


def test_a_consolidated_checkpoint_is_complete_and_continues(train, tmp_path):
    steps = "--save_interval 2 --keep_every 1 --max_steps 4"
    whole = train(2, f"{steps} --strategy fsdp", "whole")
    path = checkpoint.step_path(whole.out, 2)
    manifest = checkpoint.read_manifest(path)
    manifest["files"]["my.json"] = checkpoint.write_file(path / "my.json", [b"{}"])
    (path / "manifest.json").write_text(json.dumps(manifest))
    out = convert("consolidate", path, checkpoint.step_path(tmp_path / "run", 2))
    assert [entry.name for entry in out.parent.iterdir()] == [out.name]
    names = {"index.json", "manifest.json", "my.json", "rank-00000.safetensors"}
    assert {file.name for file in out.iterdir()} == names and checkpoint.verify(out) is None
    torch.testing.assert_close(full_tensors(out), full_tensors(path), rtol=0, atol=0)
    assert checkpoint.read_manifest(out) | {"files": 0} == manifest | {"files": 0}
    resumed = [row["loss"] for row in train(1, steps).rows()]
    assert resumed == pytest.approx([row["loss"] for row in whole.rows()[2:]], rel=1e-5)
    # A folder that exists, and a checkpoint that is damaged, are refused.
    assert run_command(["consolidate", path, out], hf.main)[0] == 2
    (path / "rank-00001.safetensors").write_bytes(b"?")
    refused("consolidate", path, tmp_path / "new", status=1)
