"""tools/hf.py: export and import keep logits, weights and tokens; one file has what many had."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from old import call_train, file_names, listen, rows, tensors
from rig import last_checkpoint
from test_tokenizer import make_json, small_gpt2

import checkpoint
import prepare
import sample
import tokenizer
from errors import UsageError
from model import ModelConfig
from tools import hf

TOKENS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
TRAIN = (
    "--device cpu --dtype float32 --seq_len 16 --global_batch_size 8 --eval_sequences 10 "
    "--sample_tokens 0 --log_interval 1 --lr 3e-3 --warmup_steps 1 --max_steps 3"
)


@pytest.fixture
def transformers(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return pytest.importorskip("transformers", reason="needs tests/requirements-extra.txt")


def convert(command: str, source: Path, out: Path) -> Path:
    assert hf.main([command, str(source), str(out)]) == 0
    return out


def refused(command: str, source: Path, out: Path) -> tuple[int, str]:
    """Return the status and the line of an error, and check that it leaves nothing."""
    status, _, err = listen([command, str(source), str(out)], hf.main)
    assert err.count("\n") == 1 and not list(out.parent.glob(f"*{out.name}*"))
    return status, err


def our_logits(path: Path) -> torch.Tensor:
    model = sample.load_model(path, sample.read_trained(path).config, torch.device("cpu"))
    with torch.no_grad():
        return model(TOKENS)


def their_logits(transformers, folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        return model(TOKENS).logits


def their_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a folder in float32."""
    found = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in checkpoint.map_safetensors(file).items():
            found[name] = tensor.float().clone()  # the file may be replaced
    return found


def train_from(pool, path: Path, tokens: Path, out: Path, *flags: str) -> Path:
    """Train three steps with fsdp from the weights of `path`; return the last checkpoint."""
    argv = f"{TRAIN} --strategy fsdp --init_from {path} --data {tokens} --out {out}".split()
    assert pool(2, call_train, [*argv, *flags]) == [0, 0]
    return last_checkpoint(out)


@pytest.fixture
def trained(run) -> Path:
    """The last checkpoint of a tied model, sharded over two ranks."""
    return last_checkpoint(run(2, "--strategy fsdp --max_steps 3 --dtype float32"))


# --------------------------------------------------------------------------------------------------
# Export and import


@pytest.mark.hf
def test_an_exported_model_answers_in_transformers_and_comes_back(
    transformers, trained, tmp_path, capsys
):
    out = convert("export", trained.parent.parent, tmp_path / "exported")
    logits = their_logits(transformers, out)
    torch.testing.assert_close(logits, our_logits(trained), rtol=0, atol=1e-4)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == list(range(257, 320))  # which are only padding
    capsys.readouterr()
    greedy = ["--temperature", "0", "--max_new_tokens", "11", "--prompt", "abcde"]
    assert sample.main(["--run", str(trained), *greedy]) == 0
    generate = transformers.pipeline("text-generation", str(out))
    (answer,) = generate("abcde", max_new_tokens=11, do_sample=False)
    assert answer["generated_text"] == capsys.readouterr().out.removesuffix("\n")

    imported = convert("import", out, tmp_path / "imported")
    assert checkpoint.verify(imported) is None
    torch.testing.assert_close(tensors(trained, "model."), tensors(imported), rtol=0, atol=0)
    # The tokenizer `bytes` comes back as a file.
    found = dataclasses.replace(sample.read_trained(imported), tokenizer="bytes")
    assert found == sample.read_trained(trained)


SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
SHAPE |= {"vocab_size": 300}  # not a multiple of 64
SHAPE |= {"initializer_range": 0.2}  # logits of about 1, so that a lost term shows
# Of the frequencies of 8 elements, some are high, some low, and one is in between.
LLAMA31 = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0}
LLAMA31 |= {"low_freq_factor": 0.1, "high_freq_factor": 4.0}
LLAMA31 |= {"original_max_position_embeddings": 32}
FAMILIES = {
    "llama 2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama 3.2": {"rope_parameters": LLAMA31 | {"factor": 32.0}, "tie_word_embeddings": True},
    "smollm2": {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}
    | {"tie_word_embeddings": True, "rope_theta": 100_000.0},
    "mistral 0.3": {"rope_theta": 1e6, "sliding_window": None, "dtype": torch.bfloat16},
}


def make_model(transformers, family: str, folder: Path, **options) -> Path:
    """Save a random model of the family with transformers, in a folder with files of others."""
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
def test_a_round_trip_keeps_the_logits(transformers, family, pool, tokens, tmp_path):
    """The model is imported, trained for three steps on two ranks and exported."""
    source = make_model(transformers, family, tmp_path / "source")
    imported = convert("import", source, tmp_path / "imported")
    expected = their_logits(transformers, source)
    torch.testing.assert_close(our_logits(imported), expected, rtol=0, atol=1e-4)
    same = convert("export", imported, tmp_path / "same")
    torch.testing.assert_close(their_weights(same), their_weights(source), rtol=0, atol=0)
    # The tokenizer of the model is unknown, or another than that of the data.
    path = train_from(pool, imported, tokens, tmp_path / "run", "--allow_changes")
    logits = our_logits(path)
    assert (logits - expected).abs().max() > 0.01  # it has learned something
    out = convert("export", path, tmp_path / "exported")
    torch.testing.assert_close(their_logits(transformers, out), logits, rtol=0, atol=1e-4)
    # It was trained on sequences of 16 tokens, but began with a context of 64.
    for folder in (same, out):
        config = transformers.AutoConfig.from_pretrained(folder)
        assert config.max_position_embeddings == 64
    # The run continues without the imported folder: its checkpoints describe the model.
    shutil.rmtree(imported)
    assert train_from(pool, imported, tokens, tmp_path / "run", "--allow_changes") == path


@pytest.mark.hf
def test_only_the_files_of_the_model_are_read(transformers, tmp_path):
    source = make_model(transformers, "mistral 0.3", tmp_path / "source", max_shard_size="20KB")
    expected = their_logits(transformers, source)
    files = sorted(source.glob("*.safetensors"))
    assert len(files) > 2
    zeros = {name: torch.zeros_like(x) for name, x in their_weights(source).items()}
    for stale in ("model-99999-of-99999.safetensors", "model_old.safetensors", "old.safetensors"):
        checkpoint.write_safetensors(source / stale, zeros)
    imported = convert("import", source, tmp_path / "imported")
    torch.testing.assert_close(our_logits(imported), expected, rtol=0, atol=1e-4)
    # Where there are two models, transformers would read one.
    checkpoint.write_safetensors(source / "model.safetensors", zeros)
    status, line = refused("import", source, tmp_path / "new")
    assert status == 2 and "remove one" in line
    (source / "model.safetensors").unlink()
    # A tensor is read from the file that the index names, not from another one that has it too.
    index = source / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"]
    for file in files:
        stale = {name: torch.zeros(1) for name in named if named[name] != file.name}
        right = {name: x.clone() for name, x in checkpoint.map_safetensors(file).items()}
        checkpoint.write_safetensors(file, right | stale)
    imported = convert("import", source, tmp_path / "again")
    torch.testing.assert_close(our_logits(imported), expected, rtol=0, atol=1e-4)
    for damaged in ("[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"):
        kept = index.read_text()
        index.write_text(damaged)
        assert refused("import", source, tmp_path / "new")[0] == 2, damaged
        index.write_text(kept)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    assert refused("import", source, tmp_path / "new")[0] == 2
    files[1].unlink()
    assert refused("import", source, tmp_path / "new")[0] == 2


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
WEIGHTS = {
    "[32], by config.json missing": {"extra": torch.ones(32)},
    "norm.weight is missing, by config.json [32]": {NORM: None},
    "norm.weight is [7], by config.json [32]": {NORM: torch.ones(7)},
    "norm.weight is torch.int8": {NORM: torch.ones(32, dtype=torch.int8)},
}


@pytest.mark.hf
def test_weights_that_do_not_fit_config_json_are_refused(transformers, tmp_path):
    source = make_model(transformers, "llama 3.2", tmp_path / "source")
    weights = their_weights(source)
    for problem, changes in WEIGHTS.items():
        changed = {name: value for name, value in (weights | changes).items() if value is not None}
        checkpoint.write_safetensors(source / "model.safetensors", changed)
        status, line = refused("import", source, tmp_path / "new")
        assert status == 2 and problem in line
    # A head that is the embedding stays tied to it.
    weights["lm_head.weight"] = weights[EMBEDDING].clone()
    checkpoint.write_safetensors(source / "model.safetensors", weights)
    assert sample.read_trained(convert("import", source, tmp_path / "tied")).config.tied
    # A head that is not the embedding is imported untied.
    weights["lm_head.weight"] = weights[EMBEDDING] + torch.randn(32)
    checkpoint.write_safetensors(source / "model.safetensors", weights)
    imported = convert("import", source, tmp_path / "imported")
    expected = their_logits(transformers, source)
    torch.testing.assert_close(our_logits(imported), expected, rtol=0, atol=1e-4)


CONFIGS = {
    "model_type 'qwen3'": {"model_type": "qwen3"},
    "model_type 'nothing'": None,
    "hidden_act 'gelu'": {"hidden_act": "gelu"},
    "attention_bias True": {"attention_bias": True},
    "mlp_bias True": {"mlp_bias": True},
    "head_dim 16": {"head_dim": 16},
    "sliding_window 4096": {"model_type": "mistral"},  # its default
    "rope_type 'linear'": {"rope_scaling": {"type": "linear", "factor": 2.0}},  # until 2024
    "rope_type 'yarn'": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "partial_rotary_factor 0.5": {"partial_rotary_factor": 0.5},
    "quantization_config": {"quantization_config": {"quant_method": "fp8"}},
}


@pytest.mark.hf
def test_models_that_the_decoder_cannot_compute_are_refused(transformers, tmp_path):
    file = tmp_path / "config.json"
    plain = SHAPE | {"model_type": "llama"}
    del plain["num_key_value_heads"]
    for feature, fields in CONFIGS.items():
        contents = json.dumps(plain | fields) if fields else '{"model_type": '
        file.write_text(contents)
        status, line = refused("import", tmp_path, tmp_path / "new")
        assert status == 2 and (fields is None or f"does not have {feature}" in line)
    hf.write_file(file, plain)
    config = hf.read_config(file)  # missing fields have their defaults
    assert (config.norm_eps, config.rope_theta, config.n_kv_head) == (1e-6, 10_000, 4)
    assert (config.tied, config.rope_scaling) == (False, None)


def test_a_field_of_a_fork_is_exported_only_at_its_default():
    @dataclasses.dataclass(frozen=True)
    class Fork(ModelConfig):
        window: int = 0

    sizes = dict(vocab_size=64, n_layer=1, n_head=4, n_kv_head=4, d_model=8, d_ff=8, seq_len=16)
    assert hf.to_hf(Fork(**sizes)) == hf.to_hf(ModelConfig(**sizes))
    with pytest.raises(UsageError, match="window 4"):
        hf.to_hf(Fork(**sizes, window=4))


# --------------------------------------------------------------------------------------------------
# Tokenizers

UGLY = [
    "the thing that isn't there:  two   spaces\n\n\t and 12345678 tabs \r\n  end   ",
    "I'LL we'Ve 'S ſ 'ſ naïve Ünïcödé 東京都に 한국어 ١٢٣ ½ e\u0301 \u00a0\u2003x\u0085y",
    "👩\u200d👩\u200d👧 \x00\x1c\x7f",
    "def f(x):\n    return {'a': [1,2,3], \"b\": x**2}  # comment...!!!\n\n\n",
    "\n", "   ", "a\n ", "a \n b", "\ufeff\u180e\u200b", "x" * 300, "aaaaaaa aaaa aaa",
]  # fmt: skip


@pytest.mark.hf
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_tokenizer_json_gives_the_same_tokens(transformers, tokenizers, monkeypatch, name):
    made = tokenizers.ByteLevelBPETokenizer()
    texts = [Path(__file__).read_text(), *UGLY, "aaa aaaa " * 50]
    made.train_from_iterator(texts, 700, show_progress=False)
    words = [made.decode([i]).encode() for i in range(256, made.get_vocab_size())]
    words = [word for word in dict.fromkeys(words) if len(word) > 1 and b"\xef\xbf\xbd" not in word]
    small_gpt2(monkeypatch, [*words, b"unreachable"])  # no merges lead to the last one
    encoding = tokenizer.load_encoding(name)
    converted = hf.convert_tokenizer(encoding)
    for line in [*UGLY, Path(__file__).read_text(), "unreachable unreachables aaaaa"]:
        assert converted.encode(line).ids == encoding.encode_ordinary(line), repr(line)
        assert converted.decode(converted.encode(line).ids) == line
    assert converted.encode(tokenizer.END_OF_TEXT).ids == [encoding.eot_token]


@pytest.mark.hf
def test_what_a_model_came_with_survives(transformers, tokenizers, pool, tmp_path, monkeypatch):
    """Its tokenizer, template, special ids and context, if the run's tokenizer is the model's."""
    source = tmp_path / "source"
    monkeypatch.setitem(SHAPE, "vocab_size", 900)
    make_model(transformers, "mistral 0.3", source)
    made = tokenizers.Tokenizer.from_file(make_json(tokenizers, "llama 2", tmp_path / "a.json"))
    made.no_truncation()
    made.no_padding()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "model_max_length": 77}
    names |= {"chat_template": "{{ messages }}"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(source)
    ids = {"bos_token_id": 1, "eos_token_id": [3, 0], "pad_token_id": 2}
    config = json.loads((source / "config.json").read_text())
    hf.write_file(source / "config.json", config | ids)
    hf.write_file(source / "generation_config.json", ids | {"do_sample": True, "temperature": 0.7})
    imported = convert("import", source, tmp_path / "imported")
    (tmp_path / "text").write_text(tokenizer.END_OF_TEXT.join(UGLY * 20).replace("\0", ""))
    argv = f"--source {tmp_path}/text --tokenizer {imported}/tokenizer.json --out {tmp_path}/tokens"
    assert prepare.main(argv.split()) == 0
    path = train_from(pool, imported, tmp_path / "tokens", tmp_path / "run")
    shutil.rmtree(imported)
    out = convert("export", path, tmp_path / "exported")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_text().strip() == (source / name).read_text().strip(), name
    generation = json.loads((source / "generation_config.json").read_text())
    assert json.loads((out / "generation_config.json").read_text()) == generation | {
        "suppress_tokens": None
    }
    config = transformers.AutoConfig.from_pretrained(out)
    assert {name: getattr(config, name) for name in ids} == ids
    assert config.max_position_embeddings == 64
    before = transformers.AutoTokenizer.from_pretrained(source)
    after = transformers.AutoTokenizer.from_pretrained(out)
    assert type(before) is type(after)
    assert after.eos_token == "</s>"
    encoding = tokenizer.load_encoding(str(path / "tokenizer.json"))
    for line in [*UGLY, Path(__file__).read_text()]:
        ids = after(line)["input_ids"]
        assert ids == before(line)["input_ids"]
        assert ids == encoding.encode_ordinary(line) or "</s>" in line
    # Texts of another tokenizer: nothing of the first one applies.
    convert("import", source, imported)
    argv = f"--source {tmp_path}/text --out {tmp_path}/bytes"
    assert prepare.main(argv.split()) == 0
    path = train_from(pool, imported, tmp_path / "bytes", tmp_path / "other", "--allow_changes")
    out = convert("export", path, tmp_path / "others")
    generation = json.loads((out / "generation_config.json").read_text())
    assert [generation[name] for name in hf.SPECIAL_IDS] == [256] * 3
    assert not (out / "chat_template.jinja").exists()


# --------------------------------------------------------------------------------------------------
# A checkpoint in one file


def test_a_consolidated_checkpoint_is_complete_and_continues(run, tmp_path):
    steps = "--dtype float32 --save_interval 2 --keep_every 1 --max_steps 4"
    source = run(2, f"{steps} --strategy fsdp", "whole")
    path = checkpoint.step_path(source, 2)
    (path / "my.json").write_bytes(b"{}")
    manifest = checkpoint.read_manifest(path)
    manifest["files"]["my.json"] = checkpoint.write_file(path / "my.json", [b"{}"])
    (path / "manifest.json").write_text(json.dumps(manifest))
    out = convert("consolidate", path, checkpoint.step_path(tmp_path / "run", 2))
    assert file_names(out.parent) == [out.name]
    names = ["index.json", "manifest.json", "my.json", "rank-00000.safetensors"]
    assert file_names(out) == names and checkpoint.verify(out) is None
    torch.testing.assert_close(tensors(out), tensors(path), rtol=0, atol=0, equal_nan=True)
    assert checkpoint.read_manifest(out) | {"files": 0} == manifest | {"files": 0}
    resumed = [row["loss"] for row in rows(run(1, steps, "run"))]
    assert resumed == pytest.approx([row["loss"] for row in rows(source)[2:]], rel=1e-5)
    # A checkpoint that is damaged, and a folder that exists, are refused.
    assert listen(["consolidate", str(path), str(out)], hf.main)[0] == 2
    (path / "rank-00001.safetensors").write_bytes(b"?")
    assert refused("consolidate", path, tmp_path / "new")[0] == 1


def test_consolidate_leaves_nothing_on_a_disk_that_fills_up(trained, small_disk):
    (small_disk / "other").write_bytes(bytes(900_000))
    status, line = refused("consolidate", trained, small_disk / "new/one")
    assert status == 1 and "No space left" in line


def test_a_model_that_was_finetuned_on_short_sequences_keeps_its_context(run):
    first = run(1, "--max_steps 1")
    short = run(1, f"--max_steps 1 --seq_len 8 --init_from {first}", "short")
    assert hf.longest_context(last_checkpoint(short)) == 16
    shutil.rmtree(first)
    assert hf.longest_context(last_checkpoint(short)) == 8
