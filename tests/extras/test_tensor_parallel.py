"""--tp: ranks that compute one forward pass together give the numbers of one rank."""

import json

import numpy as np
import pytest
from core.conftest import pool, tokens, train  # noqa: F401

UNTIED = "--model tinyllama-1.1b"  # a size with an untied head; SMALL overrides all other sizes
# ranks, flags of the mesh, flags of both runs
ROWS = {
    "single tp 2": (2, "--strategy single --tp 2", "--activation_checkpointing full"),
    "ddp 2 x tp 2": (4, "--strategy ddp --tp 2", "--micro_batch_size 2"),
    "fsdp 2 x tp 2": (4, "--strategy fsdp --tp 2", "--activation_checkpointing selective"),
    "fsdp 2 x tp 2, untied": (4, "--strategy fsdp --tp 2", UNTIED),
}


def assert_same_numbers(one, other, relative: float = 1e-5) -> None:
    assert len(one.rows()) == len(other.rows()) > 0
    for expected, row in zip(one.rows(), other.rows()):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=relative), row["step"]
    for expected, row in zip(one.rows("val_loss"), other.rows("val_loss"), strict=True):
        assert row["val_loss"] == pytest.approx(expected["val_loss"], rel=relative)


@pytest.mark.slow(proves="statistics, beside the recorded losses")
@pytest.mark.parametrize("row", ROWS)
def test_tensor_parallel_ranks_give_the_numbers_of_one_rank(train, row):  # noqa: F811
    ranks, mesh, flags = ROWS[row]
    flags += " --max_grad_norm 0.5 --optim_metrics_interval 1"
    one = train(1, f"--strategy single {flags}", "one")
    split = train(ranks, f"{mesh} {flags}", "split")
    assert (one.status, split.status) == (0, 0), split.error
    assert_same_numbers(one, split)
    assert {each["clipped"] for each in one.rows()} == {1}
    expected = {(each["step"], each["parameter"]): each for each in one.statistics()}
    found = {(each["step"], each["parameter"]): each for each in split.statistics()}
    assert expected.keys() == found.keys() and len(found) > 50
    for place, values in expected.items():
        for name in ("grad_norm", "weight_norm", "update_norm", "exp_avg_sq_norm"):
            assert found[place][name] == pytest.approx(values[name], rel=2e-3, abs=1e-9), place


@pytest.mark.slow(proves="further meshes")
def test_a_run_continues_with_and_without_tensor_parallelism(train):  # noqa: F811
    whole = train(1, "--save_interval 3 --keep_every 1 --max_steps 6", "whole")
    for ranks, mesh in ((2, "--strategy single --tp 2"), (1, "--strategy single")):
        first = "--strategy single" if ranks == 2 else "--strategy single --tp 2"
        name = f"continued {ranks}"
        assert train(3 - ranks, f"{first} --max_steps 6 --save_interval 3", name).status == 0
        stopped = train(ranks, f"{mesh} --max_steps 8 --allow_changes", name)
        assert stopped.status == 0, stopped.error
        for expected, row in zip(whole.rows(), stopped.rows()):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert stopped.rows()[-1]["step"] == 8


@pytest.mark.parametrize("tp", [3, 4])
def test_a_size_that_tp_cannot_split_is_refused(train, tp):  # noqa: F811
    refused = train(tp, f"--strategy single --tp {tp}")
    assert refused.status == 2
    assert "n_kv_head 2" in refused.error and f"tp {tp}" in refused.error
    assert not refused.out.exists()


def test_a_sample_of_odd_length_is_split(train):  # noqa: F811
    run = train(2, "--strategy single --tp 2 --sample_tokens 3")
    assert run.status == 0 and "sample" in run.printed and "no text" not in run.printed


def test_each_token_is_looked_up_by_the_rank_that_holds_its_row(train, tmp_path):  # noqa: F811
    """Each rank holds half of the rows of the embedding; the data has all 257 tokens."""
    (tmp_path / "all").mkdir()
    for split in ("train", "val"):
        np.tile(np.arange(257, dtype=np.uint16), 2).tofile(tmp_path / f"all/{split}.bin")
    meta = {"tokenizer": "bytes", "dtype": "uint16", "vocab_size": 257}
    meta |= {"train_tokens": 514, "val_tokens": 514}
    (tmp_path / "all/meta.json").write_text(json.dumps(meta))
    flags = f"--data {tmp_path}/all --eval_sequences 32 --max_steps 1"
    one = train(1, f"--strategy single {flags}", "one")
    split = train(2, f"--strategy single --tp 2 {flags}", "split")
    assert (one.status, split.status) == (0, 0), split.error
    assert_same_numbers(one, split)
