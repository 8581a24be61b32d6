"""Hugging Face folders: export and import keep the logits, the tokens and the weights."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import call_train, copy_with, last_checkpoint, tensors
from test_tokenizer import make_json, small_gpt2

import checkpoint
import prepare
import sample
import tokenizer
from errors import UsageError
from tools import hf

TOKENS = torch.randint(257, (2, 16), generator=torch.Generator().manual_seed(0))
TRAIN = (
    "--device cpu --dtype float32 --seq_len 16 --global_batch_size 8 --eval_sequences 10 "
    "--sample_tokens 0 --log_interval 1 --lr 3e-3 --warmup_steps 1 --max_steps 3"
)


@pytest.fixture
def safetensors():
    pytest.importorskip("safetensors.torch", reason="needs tests/requirements-extra.txt")
    return pytest.importorskip("safetensors", reason="needs tests/requirements-extra.txt")


@pytest.fixture
def transformers(safetensors, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return pytest.importorskip("transformers", reason="needs tests/requirements-extra.txt")


def convert(command: str, source: Path, out: Path) -> Path:
    assert hf.main([command, str(source), str(out)]) == 0
    return out


def our_logits(path: Path) -> torch.Tensor:
    model = sample.load_model(path, sample.read_trained(path).config, torch.device("cpu"))
    with torch.no_grad():
        return model(TOKENS)


def their_logits(transformers, folder: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        return model(TOKENS).logits


def train_from(pool, path: Path, tokens: Path, out: Path, *flags: str) -> Path:
    """Train three steps with fsdp from the weights of `path`; return the last checkpoint."""
    argv = f"{TRAIN} --strategy fsdp --init_from {path} --data {tokens} --out {out}".split()
    assert pool(2, call_train, [*argv, *flags]) == [0, 0]
    return last_checkpoint(out)


# --------------------------------------------------------------------------------------------------
# Export, and import again


@pytest.fixture
def trained(run) -> Path:
    """The last checkpoint of a tied model, sharded over two ranks."""
    return last_checkpoint(run(2, "--strategy fsdp --max_steps 3 --dtype float32"))


@pytest.mark.hf
def test_an_exported_model_has_the_same_logits_in_transformers(
    transformers, trained, tmp_path, capsys
):
    out = convert("export", trained.parent.parent, tmp_path / "exported")
    logits = their_logits(transformers, out)
    torch.testing.assert_close(logits, our_logits(trained), rtol=0, atol=1e-4)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == list(range(257, 320))  # which are only padding
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1  # the mode of the umask
    capsys.readouterr()
    greedy = ["--temperature", "0", "--max_new_tokens", "11", "--prompt", "abcde"]
    assert sample.main(["--run", str(trained), *greedy]) == 0
    generate = transformers.pipeline("text-generation", str(out))
    (answer,) = generate("abcde", max_new_tokens=11, do_sample=False)
    assert answer["generated_text"] == capsys.readouterr().out.removesuffix("\n")


@pytest.mark.hf
def test_an_exported_model_is_imported_bit_for_bit(safetensors, trained, tmp_path):
    out = convert("export", trained, tmp_path / "exported")
    state = safetensors.torch.load_file(out / "model.safetensors")
    for i in (0, 1):  # two files
        part = {name: state[name] for name in sorted(state)[i::2]}
        safetensors.torch.save_file(part, out / f"model-{i + 1:05d}-of-00002.safetensors")
    (out / "model.safetensors").unlink()
    imported = convert("import", out, tmp_path / "imported")
    assert checkpoint.verify(imported) is None
    before, after = tensors(trained, "model."), tensors(imported)
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    assert sample.read_trained(imported) == sample.read_trained(trained)


@pytest.mark.hf
def test_a_field_of_a_fork_is_exported_only_at_its_default(safetensors, trained, tmp_path):
    line = "    tied: bool = True"
    field = ("model.py", line, f"{line}\n    window: int = 0")
    names = "ONLY_IN_TRAINING: set[str] = set()"
    fork = copy_with(tmp_path / "fork", field)
    named = copy_with(tmp_path / "named", field, ("tools/hf.py", names, f"{names} | {{'window'}}"))

    def export(name: str, fork: Path) -> tuple[int, str]:
        command = [sys.executable, "-m", "tools.hf", "export", trained, tmp_path / name]
        answer = subprocess.run(command, cwd=fork, capture_output=True, text=True)
        return answer.returncode, answer.stderr

    assert export("exported", fork) == (0, "")
    manifest = checkpoint.read_manifest(trained)
    manifest["model"]["window"] = 4
    (trained / "manifest.json").write_text(json.dumps(manifest))
    status, line = export("new", fork)
    assert status == 2
    assert line.startswith("tools.hf: error: a LlamaForCausalLM cannot have the model's window 4: ")
    assert export("new", named) == (0, "")


# --------------------------------------------------------------------------------------------------
# The Llama family

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


def make_model(transformers, family: str, folder: Path) -> Path:
    """Save a random model of the family with transformers."""
    kind = "Mistral" if "mistral" in family else "Llama"
    config = getattr(transformers, f"{kind}Config")(**SHAPE | FAMILIES[family])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 2.0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.hf
@pytest.mark.parametrize("family", FAMILIES)
def test_a_round_trip_keeps_the_logits(transformers, family, pool, tokens, tmp_path):
    """The model is imported, trained for three steps on two ranks and exported."""
    source = make_model(transformers, family, tmp_path / "source")
    imported = convert("import", source, tmp_path / "imported")
    expected = their_logits(transformers, source)
    torch.testing.assert_close(our_logits(imported), expected, rtol=0, atol=1e-4)
    # The tokenizer of the model is unknown, or another than that of the data.
    path = train_from(pool, imported, tokens, tmp_path / "run", "--allow_changes")
    logits = our_logits(path)
    assert (logits - expected).abs().max() > 0.01  # it has learned something
    out = convert("export", path, tmp_path / "exported")
    torch.testing.assert_close(their_logits(transformers, out), logits, rtol=0, atol=1e-4)
    # The run continues without the imported folder: its checkpoints describe the model.
    shutil.rmtree(imported)
    assert train_from(pool, imported, tokens, tmp_path / "run", "--allow_changes") == path


@pytest.mark.hf
def test_a_separate_head_is_imported_untied(transformers, safetensors, tmp_path):
    source = make_model(transformers, "llama 3.2", tmp_path / "source")
    weights = safetensors.torch.load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights[EMBEDDING] + torch.randn(32)
    safetensors.torch.save_file(weights, source / "model.safetensors")
    imported = convert("import", source, tmp_path / "imported")
    assert not sample.read_trained(imported).config.tied
    expected = their_logits(transformers, source)
    torch.testing.assert_close(our_logits(imported), expected, rtol=0, atol=1e-4)


# --------------------------------------------------------------------------------------------------
# Tokenizers

UGLY = [
    "the thing that isn't there:  two   spaces\n\n\t and 12345678 tabs \r\n  end   ",
    "I'LL we'Ve 'S ſ 'ſ naïve Ünïcödé 東京都に 한국어 ١٢٣ ½ e\u0301 \u00a0\u2003x\u0085y",
    "👩\u200d👩\u200d👧 \x00\x1c\x7f",
    "def f(x):\n    return {'a': [1,2,3], \"b\": x**2}  # comment...!!!\n\n\n",
    "\n", "   ", "a\n ", "a \n b", "\ufeff\u180e\u200b", "x" * 300, "aaaaaaa aaaa aaa",
]  # fmt: skip


def trained_tokens(tokenizers, size: int) -> list[bytes]:
    """The merged tokens of a byte-level BPE, lowest rank first."""
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([Path(__file__).read_text(), *UGLY, "aaa aaaa " * 50], trainer)
    words = sorted(bpe.get_vocab(), key=bpe.get_vocab().get)[256:]
    return [bytes(map(hf.ALPHABET.get, word)) for word in words]


@pytest.mark.hf
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_tokenizer_json_gives_the_same_tokens(tokenizers, monkeypatch, name, tmp_path):
    words = trained_tokens(tokenizers, 700)
    small_gpt2(monkeypatch, [*words, b"unreachable", b"aaaaa"])  # no merges lead to the last two
    encoding = tokenizer.load_encoding(name)
    file = tmp_path / "tokenizer.json"
    hf.write_tokenizer(encoding, file)
    reference = tokenizers.Tokenizer.from_file(str(file))
    for line in [*UGLY, Path(__file__).read_text(), "unreachable unreachables aaaaa"]:
        assert reference.encode(line).ids == encoding.encode_ordinary(line), repr(line)
        assert reference.decode(reference.encode(line).ids) == line
    (end,) = reference.encode(tokenizer.END_OF_TEXT).ids
    assert end == encoding.eot_token


@pytest.mark.hf
def test_a_round_trip_keeps_the_tokenizer(
    transformers, tokenizers, pool, tmp_path, monkeypatch, capsys
):
    source = tmp_path / "source"
    monkeypatch.setitem(SHAPE, "vocab_size", 900)
    make_model(transformers, "mistral 0.3", source)
    made = tokenizers.Tokenizer.from_file(make_json(tokenizers, "llama 2", tmp_path / "a.json"))
    made.no_truncation()
    made.no_padding()
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(source)
    imported = convert("import", source, tmp_path / "imported")
    (tmp_path / "text").write_text(tokenizer.END_OF_TEXT.join(UGLY * 20).replace("\0", ""))
    argv = f"--source {tmp_path}/text --tokenizer {imported}/tokenizer.json --out {tmp_path}/tokens"
    assert prepare.main(argv.split()) == 0
    path = train_from(pool, imported, tmp_path / "tokens", tmp_path / "run")
    out = convert("export", path, tmp_path / "exported")
    assert capsys.readouterr().out.count(hf.ADDS_TOKENS) == 2  # in both directions
    before = transformers.AutoTokenizer.from_pretrained(source)
    after = transformers.AutoTokenizer.from_pretrained(out)
    assert type(before) is type(after)
    assert after.eos_token == "</s>"
    for line in [*UGLY, Path(__file__).read_text()]:
        ids = after(line)["input_ids"]
        assert ids == before(line)["input_ids"]
        assert ids == [1, *tokenizer.encode(str(path / "tokenizer.json"), line)] or "</s>" in line


@pytest.mark.hf
def test_a_tokenizer_that_does_not_fit_is_left_out(transformers, trained, tmp_path, capsys):
    out = convert("export", trained, tmp_path / "out")
    spec = json.loads((out / "tokenizer.json").read_text())
    (end,) = spec["added_tokens"]
    more = [end | {"id": i, "content": f"<{i}>"} for i in range(257, 321)]  # the model has 320
    (out / "tokenizer.json").write_text(json.dumps(spec | {"added_tokens": [end, *more]}))
    imported = convert("import", out, tmp_path / "in")
    assert checkpoint.read_manifest(imported)["tokenizer"] is None
    assert not (imported / "tokenizer.json").exists()
    assert "left out" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------
# Damage


SIZES = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 8}
SIZES |= {"intermediate_size": 8, "max_position_embeddings": 16, "num_key_value_heads": None}


def test_missing_fields_of_config_json_have_their_defaults(tmp_path):
    hf.write_json(tmp_path / "config.json", {"model_type": "llama"} | SIZES)
    config = hf.from_hf(tmp_path)
    assert (config.norm_eps, config.rope_theta, config.n_kv_head) == (1e-6, 10_000, 4)
    assert not config.tied
    assert config.rope_scaling is None


def test_an_unknown_rope_type_is_refused(tmp_path):
    old = {"rope_scaling": {"type": "linear", "factor": 2.0}}  # as written until 2024
    hf.write_json(tmp_path / "config.json", {"model_type": "llama"} | SIZES | old)
    with pytest.raises(UsageError, match="the model needs rope_type 'linear'"):
        hf.from_hf(tmp_path)


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
DAMAGE = {
    "norm.weight is missing; config.json describes it, with the shape [8]": {NORM: None},
    "norm.weight has the shape [7]; config.json describes [8]": {NORM: torch.ones(7)},
    "extra is not a part of the model that config.json describes": {"extra": torch.ones(2)},
    "norm.weight is I8: quantized": {NORM: torch.ones(8, dtype=torch.int8)},
    "norm.weight has values that are nan": {NORM: torch.ones(8, dtype=torch.bfloat16) / 0},
    "tokens.weight has values that are nan": {
        EMBEDDING: torch.ones(64, 8).fill_diagonal_(torch.nan)
    },
}


@pytest.mark.parametrize("line", DAMAGE)
def test_weights_that_do_not_fit_config_json_are_refused(tmp_path, capsys, line):
    hf.write_json(tmp_path / "config.json", {"model_type": "llama"} | SIZES)
    weights = {}
    for name, weight in hf.meta_weights(hf.from_hf(tmp_path)).items():
        weights[hf.hf_name(name)] = torch.ones(weight.shape)
    for number, changes in enumerate(({}, DAMAGE[line])):
        written = {name: value for name, value in (weights | changes).items() if value is not None}
        checkpoint.write_safetensors(tmp_path / "model.safetensors", written)
        status = hf.main(["import", str(tmp_path), str(tmp_path / str(number))])
        said = capsys.readouterr().err
        assert (status, said.count("\n")) == (2 * number, number)
    assert line in said
    assert not (tmp_path / "1").exists()
    assert not list(tmp_path.glob(".*"))
