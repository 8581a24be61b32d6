"""--data A:0.7,B:0.3: every thousand sequences have these shares, on any mesh and when resumed."""

import json
from pathlib import Path

import numpy as np
import pytest
from rig import write_tokens

import data
from extras import mixture as mixtures

# --------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Two token folders, a and b, and a third one, c, with another tokenizer."""
    root = tmp_path_factory.mktemp("mixture")
    folders = {name: write_tokens(root / name, seed) for seed, name in enumerate("abc")}
    file = folders["c"] / "meta.json"
    file.write_text(file.read_text().replace('"bytes"', '"gpt2"'))
    return folders


def test_a_mixture_gives_the_same_numbers_on_two_ranks_and_after_a_resume(train, folders):
    flags = "--data {a}:0.75,{b}:0.25 --schedule constant --save_interval 3".format(**folders)
    one = train(1, f"{flags} --max_steps 6", "one")
    assert train(2, f"{flags} --strategy fsdp --max_steps 3", "two").status == 0
    two = train(2, f"{flags} --strategy fsdp --max_steps 6", "two")
    assert (one.status, two.status) == (0, 0), two.error
    assert [row["step"] for row in two.rows()] == [1, 2, 3, 4, 5, 6]
    for expected, row in zip(one.rows(), two.rows(), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    found, expected = (run.rows("val_loss")[-1]["val_loss"] for run in (two, one))
    assert found == pytest.approx(expected, rel=1e-5)


REFUSED = """\
{a}:0.5,{b}:0.4
{a}:0.6
{a}:0.5,{b}
{a}:0,{b}:1
{a}:-0.5,{b}:1.5
{a}:0.0004,{b}:0.9996
{a}:0.5,{c}:0.5
"""


@pytest.mark.parametrize("mixture", REFUSED.splitlines())
def test_folders_and_shares_that_are_no_mixture_are_refused(train, folders, mixture):
    refused = train(1, f"--data {mixture.format(**folders)}")
    assert refused.status == 2 and "--data" in refused.error
    assert not refused.out.exists()


def test_changed_shares_are_another_run(train, folders):
    assert train(1, "--data {a}:0.5,{b}:0.5".format(**folders)).status == 0
    refused = train(1, "--data {a}:0.6,{b}:0.4 --max_steps 6".format(**folders))
    assert refused.status == 2 and "--data" in refused.error


# --------------------------------------------------------------------------------------------------
# Folders whose sequences show where they are from


def write_folder(path: Path, first_id: int, windows: int) -> None:
    """Write 16 times the token first_id + w as window w, so that a sequence shows its window."""
    path.mkdir()
    ids = np.append(np.repeat(np.arange(first_id, first_id + windows), 16), 0)
    meta = {"dtype": "uint16", "vocab_size": 257, "tokenizer": "bytes"}
    for split in ("train", "val"):
        ids.astype("<u2").tofile(path / f"{split}.bin")
        meta[f"{split}_tokens"] = len(ids)
    (path / "meta.json").write_text(json.dumps(meta))


@pytest.fixture
def mixture(tmp_path) -> str:
    write_folder(tmp_path / "web", 0, 60)
    write_folder(tmp_path / "code", 100, 25)
    return f"{tmp_path}/web:0.7,{tmp_path}/code:0.3"


@pytest.mark.parametrize("shares", [[334, 333, 333], [1, 999], [331, 2, 89, 17, 561]])
def test_a_mixture_reads_its_folders_in_exact_shares(shares, tmp_path):
    """In every thousand sequences, and spread over them."""
    items = []
    for i, share in enumerate(shares):
        write_folder(tmp_path / str(i), i, 1)
        items.append(f"{tmp_path}/{i}:{(share - 0.4) / 1000:.4f}")  # rounded to thousandths
    dataset = mixtures.open_mixture(",".join(items)).open("train", 16, 5)
    turns = dataset[list(range(2000))][:, 0]
    for first in (0, 1000):
        assert turns[first : first + 1000].bincount().tolist() == shares
    counts = np.cumsum(np.eye(len(shares))[turns], axis=0)  # (2000, folders)
    due = np.arange(1, 2001)[:, None] * np.array(shares) / 1000
    assert abs(counts - due).max() < 2


def test_each_folder_of_a_mixture_keeps_its_own_order(mixture):
    """So no sequence of the folder is read twice in an epoch."""
    source = mixtures.open_mixture(mixture)
    read = source.open("train", 16, 0)[list(range(2100))][:, 0]
    for folder, share, is_of_folder in zip(
        source.folders, source.shares, (read < 100, read >= 100)
    ):
        alone = data.TokenDataset(folder, "train", 16, seed=0)
        assert read[is_of_folder].equal(alone[list(range(2100 * share // 1000))][:, 0])


def test_the_order_of_a_mixture_has_not_changed(mixture):
    """A run reads on where it stopped, also with later code."""
    source = mixtures.open_mixture(mixture)
    read = source.open("train", 16, 5)[[*range(12), 999, 1000, 10**9]][:, 0].tolist()
    assert read == [20, 33, 120, 54, 35, 114, 1, 34, 9, 100, 58, 13, 102, 13, 1]
    first, second = source.folders
    assert (source.vocab_size, source.tokenizer) == (second.vocab_size, second.tokenizer)
    expected = f"700/1000 of {first.fingerprint}, 300/1000 of {second.fingerprint}"
    assert source.fingerprint == expected


@pytest.mark.parametrize("share, count", [(0.7, 10), (0.7, 77), (0.99, 2500)])
def test_validation_of_a_mixture_keeps_its_shares(mixture, share, count):
    """It spreads each part evenly, even one with more windows than thousandths (code at 0.01)."""
    mixture = mixture.replace("0.7", f"{share}").replace("0.3", f"{1 - share:g}")
    dataset = mixtures.open_mixture(mixture).open("val", 16, None)
    (chosen,) = data.val_indices(count, len(dataset), count, 0, 1)
    read = dataset[chosen][:, 0].tolist()
    web = [token for token in read if token < 100]
    assert len(web) == pytest.approx(share * count, abs=1)
    assert web == pytest.approx([i * 60 // len(web) for i in range(len(web))], abs=1)
    code = [token - 100 for token in read if token >= 100]
    assert code == pytest.approx([i * 25 // len(code) for i in range(len(code))], abs=1)
