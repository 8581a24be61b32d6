"""--tp: ranks that compute one forward pass together give the numbers of one rank."""

import json

import numpy as np
import pytest
from rig import Run, assert_close


def assert_same_numbers(one: Run, other: Run) -> None:
    assert (one.status, other.status) == (0, 0), other.error
    assert_close(other.out, one.out)
    found, expected = ([row["val_loss"] for row in run.rows("val_loss")] for run in (other, one))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow(proves="further meshes")
@pytest.mark.parametrize("meshes", [(1, 2), (2, 1)])
def test_a_run_continues_with_and_without_tensor_parallelism(train, meshes):
    flags = "--schedule constant --eval_interval 6"
    whole = train(1, f"{flags} --max_steps 8", "whole")
    for tp, steps in zip(meshes, (6, 8)):
        text = f"--strategy single --tp {tp} {flags} --max_steps {steps}"
        run = train(tp, text, "continued")
    assert_same_numbers(whole, run)


@pytest.mark.slow(proves="the compiler, which takes half a minute")
def test_compiled_ranks_have_the_numbers_of_one_rank(train):
    one = train(1, "--strategy single", "one")
    split = train(2, "--strategy single --tp 2 --compile", "split", timeout=240)
    assert_same_numbers(one, split)


def test_a_size_that_tp_cannot_split_is_refused(train):
    """SMALL has n_kv_head 2."""
    refused = train(4, "--strategy single --tp 4")
    assert refused.status == 2 and "--tp 4" in refused.error
    assert not refused.out.exists()


def test_each_token_is_looked_up_by_the_rank_that_holds_its_row(train, tmp_path):
    """Each rank holds half of the rows of the embedding; the data has all 257 tokens."""
    (tmp_path / "all").mkdir()
    for split in ("train", "val"):
        np.tile(np.arange(257, dtype=np.uint16), 2).tofile(tmp_path / f"all/{split}.bin")
    meta = {"tokenizer": "bytes", "dtype": "uint16", "vocab_size": 257}
    meta |= {"train_tokens": 514, "val_tokens": 514}
    (tmp_path / "all/meta.json").write_text(json.dumps(meta))
    flags = f"--data {tmp_path}/all --eval_sequences 32 --max_steps 1 --sample_tokens 3"
    one = train(1, f"--strategy single {flags}", "one")
    split = train(2, f"--strategy single --tp 2 {flags}", "split")
    assert_same_numbers(one, split)
    texts = [run.printed.partition(" sample ")[2].splitlines()[1] for run in (one, split)]
    assert texts[0] == texts[1] != ""
