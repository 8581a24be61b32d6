"""Flags -> Config, and what follows from it."""

import codecs
import dataclasses
import json
import re

import pytest
from conftest import ROOT

import config
from config import Config, model_config, parse, profile_window
from layout import split_batch
from runtime.cli import UsageError


def test_flags_override_a_config_file_and_defaults_fill_the_rest(tmp_path):
    file = tmp_path / "config.json"
    flags = {"lr": 0.5, "async_save": True, "model": "gpt2-124m", "tp": 1, "allow_changes": True}
    file.write_text(json.dumps(flags))
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())  # as some editors write it
    config = parse(["--config", str(file), "--lr", "1e-3"])
    assert (config.lr, config.async_save, config.max_steps) == (1e-3, True, 600)
    assert config.out == "runs/gpt2-124m"
    assert not config.allow_changes  # it applied to one start


def test_a_run_from_other_weights_has_their_name():
    """Nothing is read: the path may be another host's."""
    source = "runs/a/checkpoints/step-00000600"
    assert parse(["--init_from", "imported/smollm2"]).out == "runs/smollm2"
    assert parse(["--init_from", source]).out == "runs/a-step-00000600"
    assert parse(["--init_from", source, "--out", "mine"]).out == "mine"


def test_where_a_run_began_does_not_go_into_another(tmp_path):
    for name, path in {"resume": "runs/a/checkpoints/step-00000001", "init_from": "b"}.items():
        run = tmp_path / name
        run.mkdir()
        file = run / "config.json"
        file.write_text(json.dumps({name: path, "lr": 0.5, "out": str(run)}))
        written_by_hand = parse(["--config", str(file), "--out", "new"])
        assert getattr(written_by_hand, name) == path
        (run / "starts.jsonl").touch()
        other = parse(["--config", str(file), "--out", "new"])
        assert (other.lr, other.resume, other.init_from) == (0.5, "auto", None)
        for same in ([], ["--out", str(run)]):
            assert getattr(parse(["--config", str(file), *same]), name) == path


def test_a_flag_of_a_fork_can_be_true_false_or_not_given(monkeypatch):
    """For a field of ModelConfig that has none here."""

    @dataclasses.dataclass(frozen=True)
    class Fork(Config):
        qk_norm: bool | None = config.free("model", None, "")
        rope_theta: float | None = config.free("model", None, "")

    assert model_config(Fork(rope_theta=5.0), vocab_size=64).rope_theta == 5.0
    assert model_config(Fork(model="llama3-8b"), vocab_size=64).rope_theta == 500_000.0
    monkeypatch.setattr(config, "Config", Fork)
    values = [parse(argv).qk_norm for argv in ([], ["--qk_norm"], ["--qk_norm", "false"])]
    assert values == [None, True, False]


def test_the_reference_tells_which_flags_may_not_change():
    resuming = (ROOT / "docs/reference.md").read_text().partition("## Resuming")[2]
    (of_numbers,) = re.findall(r"^\| (`--lr`.*?) \| Refused without", resuming, re.M)
    refused = {f.name for f in dataclasses.fields(Config) if f.metadata["resume"] == "refused"}
    assert {*re.findall(r"--(\w+)", of_numbers)} == refused


def test_a_profile_window_lies_within_the_run_and_wrap_is_one_of_four():
    assert profile_window(Config()) is None
    assert profile_window(Config(profile="10:13")) == (10, 13)
    for text in ("3", "3:3", "a:b", "-1:3", "3:600"):
        with pytest.raises(UsageError, match="give START:STOP"):
            profile_window(Config(profile=text))
    for wrap in ("blocks", "block_group", "block_group:0", "block:2", "none:2", "auto:2"):
        with pytest.raises(UsageError, match=f"--wrap {wrap}: choose auto, block, block_group"):
            parse(["--wrap", wrap])


def test_a_batch_is_split_into_micro_batches():
    assert split_batch(Config(global_batch_size=32), dp_size=4) == (8, 1)
    assert split_batch(Config(global_batch_size=32, micro_batch_size=2), dp_size=4) == (2, 4)
    # As where a host was lost, and the run continues on the others
    with pytest.raises(UsageError, match="16 is not a multiple of micro_batch_size 2 x 6 .* = 12:"):
        split_batch(Config(global_batch_size=16, micro_batch_size=2), dp_size=6)


@pytest.mark.parametrize(
    "name, ranks, split, tokens_per_step, tokens",
    [
        ("gpt2-124m", 8, (12, 5), 491_520, 295e9),
        ("olmo-1b", 64, (8, 4), 4_194_304, 3.1e12),
        ("llama3-8b", 64, (1, 8), 4_194_304, 15e12),
    ],
)
def test_configs_have_the_arithmetic_of_the_reference(name, ranks, split, tokens_per_step, tokens):
    config = parse(["--config", str(ROOT / f"configs/{name}.json")])
    model = model_config(config, vocab_size=64)
    assert split_batch(config, ranks) == split
    assert config.global_batch_size * model.seq_len == tokens_per_step
    assert config.max_steps * tokens_per_step == pytest.approx(tokens, rel=1e-3)


def test_a_named_size_takes_overrides_and_a_padded_vocabulary():
    model = model_config(Config(model="tiny", n_head=2, d_ff=64), vocab_size=257)
    assert (model.vocab_size, model.n_head, model.n_kv_head, model.d_ff) == (320, 2, 2, 64)
    assert model_config(Config(model="llama3-8b", n_head=64), vocab_size=64).n_kv_head == 8
    with pytest.raises(UsageError, match="n_kv_head 4 / tp 3"):
        model_config(Config(model="tiny", tp=3), vocab_size=257)
