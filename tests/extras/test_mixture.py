"""--data A:0.7,B:0.3: every thousand sequences have these shares, on any mesh and when resumed."""

import json
from pathlib import Path

import numpy as np
import pytest
from rig import assert_close

import data
from extras import mixture as mixtures


def write_folder(path: Path, first_id: int, windows: int, tokenizer: str = "bytes") -> Path:
    """Write 16 times the token first_id + w as window w, so that a sequence shows its window."""
    path.mkdir()
    ids = np.append(np.repeat(np.arange(first_id, first_id + windows), 16), 0)
    meta = {"dtype": "uint16", "vocab_size": 257, "tokenizer": tokenizer}
    for split in ("train", "val"):
        ids.astype("<u2").tofile(path / f"{split}.bin")
        meta[f"{split}_tokens"] = len(ids)
    (path / "meta.json").write_text(json.dumps(meta))
    return path


@pytest.fixture
def folders(tmp_path) -> dict[str, Path]:
    other = write_folder(tmp_path / "other", 0, 60, tokenizer="gpt2")
    a, b = write_folder(tmp_path / "a", 0, 60), write_folder(tmp_path / "b", 100, 25)
    return {"a": a, "b": b, "other": other}


def test_a_mixture_gives_the_same_numbers_on_two_ranks_and_after_a_resume(train, folders):
    flags = "--data {a}:0.75,{b}:0.25 --schedule constant".format(**folders)
    one = train(1, f"{flags} --max_steps 6", "one")
    assert train(2, f"{flags} --strategy fsdp --max_steps 3", "two").status == 0
    shares = "--data {a}:0.5,{b}:0.5".format(**folders)
    assert train(2, f"{flags} {shares} --max_steps 6", "two").status == 2
    two = train(2, f"{flags} --strategy fsdp --max_steps 6", "two")
    assert (one.status, two.status) == (0, 0), two.error
    assert_close(two.out, one.out)
    found, expected = (run.rows("val_loss")[-1]["val_loss"] for run in (two, one))
    assert found == pytest.approx(expected, rel=1e-5)


REFUSED = """\
{a}:0.5,{b}:0.4
{a}:0.5,{b}
{a}:0.0004,{b}:0.9996
{a}:0.5,{other}:0.5
"""


@pytest.mark.parametrize("mixture", REFUSED.splitlines())
def test_folders_and_shares_that_are_no_mixture_are_refused(train, folders, mixture):
    refused = train(1, f"--data {mixture.format(**folders)}")
    assert refused.status == 2 and "--data" in refused.error
    assert not refused.out.exists()


@pytest.mark.parametrize("shares", [[334, 333, 333], [1, 999], [331, 2, 89, 17, 561]])
def test_a_mixture_reads_its_folders_in_exact_shares(shares, tmp_path):
    """In every thousand sequences, and spread over them. Each folder keeps its own order."""
    items = []
    for i, share in enumerate(shares):
        write_folder(tmp_path / str(i), 50 * i, 20 + i)
        items.append(f"{tmp_path}/{i}:{(share - 0.4) / 1000:.4f}")  # rounded to thousandths
    source = mixtures.open_mixture(",".join(items))
    dataset = source.open("train", 16, 5)
    read = dataset[[*range(2000)]][:, 0]
    turns = read // 50
    counts = np.cumsum(np.eye(len(shares))[turns], axis=0)  # (2000, folders)
    assert [counts[999].tolist(), counts[1999].tolist()] == [shares, [2 * n for n in shares]]
    # Its first epoch ends as soon as a folder has been read to its end.
    assert len(dataset) == min((20 + i) * 1000 // share for i, share in enumerate(shares))
    due = np.arange(1, 2001)[:, None] * np.array(shares) / 1000
    assert abs(counts - due).max() < 2
    for i, share in enumerate(shares):
        alone = data.TokenDataset(source.folders[i], "train", 16, seed=5)
        assert read[turns == i].equal(alone[[*range(2 * share)]][:, 0])


@pytest.mark.parametrize("share, count", [(0.7, 10), (0.99, 2500)])
def test_validation_of_a_mixture_keeps_its_shares(folders, share, count):
    """It spreads each part evenly, even one with more windows than thousandths (b at 0.01)."""
    items = "{a}:{share},{b}:{rest:g}".format(**folders, share=share, rest=1 - share)
    dataset = mixtures.open_mixture(items).open("val", 16, None)
    (chosen,) = data.val_indices(count, len(dataset), count, 0, 1)
    read = dataset[chosen][:, 0].tolist()
    for is_second, windows, part in ((False, 60, share), (True, 25, 1 - share)):
        found = [token % 100 for token in read if (token >= 100) == is_second]
        assert len(found) == pytest.approx(part * count, abs=1)
        assert found == pytest.approx([i * windows // len(found) for i in range(len(found))], abs=1)
