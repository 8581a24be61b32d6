"""Token folders: nanoGPT's, those with a tokenizer file, and those that are damaged or hostile."""

import json
import os
import pickle
import shutil

import numpy as np
import pytest
import torch

import data

from . import conftest
from .conftest import PoolJob, arguments


def test_nanogpt_folders_are_read_without_their_pickle(tmp_path):
    tokens = np.arange(3000, dtype=np.uint16) % 65
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")
    folder = data.open_folder(tmp_path)
    assert (folder.vocab_size, folder.tokenizer) == (50257, "gpt2")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    folder = data.open_folder(tmp_path)
    assert folder.vocab_size == 65
    assert folder.tokenizer is None
    np.append(tokens, 70).astype(np.uint16).tofile(tmp_path / "val.bin")  # a rare character
    assert data.open_folder(tmp_path).vocab_size == 71
    dataset = data.TokenDataset(folder, "train", 8, None)
    assert dataset[[0, 1]][1].tolist() == list(range(8, 17))
    # 3000 is a multiple of 8, and the last window needs a token after it.
    assert dataset[[len(dataset) - 1]].shape == (1, 9)


def test_a_token_folder_contains_its_tokenizer_file(tokens, tmp_path):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "my.json"}))
    (folder / "my.json").write_bytes(b"IQ== 0")
    opened = data.open_folder(folder)
    assert opened.tokenizer_files == {"my.json": b"IQ== 0"}
    assert opened.tokenizer == str(folder / "my.json")
    (folder / "my.json").unlink()
    with pytest.raises(data.DataError, match=f"{folder}/my.json"):
        data.open_folder(folder)


HOSTILE = [{"dtype": "O"}, {"vocab_size": float("inf")}, {"train_tokens": None}]
# The last two are not the names of files in the folder.
HOSTILE += [{"tokenizer": name} for name in (["bytes"], "a\0b", "../secret", "/secret")]
HOSTILE += ["", "[]", "{}", "[" * 100_000, "\udcff"]


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line(tokens, tmp_path, change):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    (tmp_path / "secret").touch()
    text = change
    if isinstance(change, dict):
        text = json.dumps(json.loads((folder / "meta.json").read_text()) | change)
    (folder / "meta.json").write_text(text, errors="surrogateescape")
    with pytest.raises(data.DataError, match=f"^--data {folder} [^\n]*$"):
        data.open_folder(folder)


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("the pickle was loaded",)


def write_tokens(folder, train: np.ndarray, val: np.ndarray) -> None:
    meta = {"dtype": "uint16", "vocab_size": 257, "tokenizer": "bytes"}
    for split, tokens in (("train", train), ("val", val)):
        tokens.astype("<u2").tofile(folder / f"{split}.bin")
        meta[f"{split}_tokens"] = len(tokens)
    (folder / "meta.json").write_text(json.dumps(meta))


def test_the_start_reads_the_first_and_the_last_block_of_a_large_file(tmp_path):
    """Other tokens, or one that is too high, are noticed there."""
    tokens = np.zeros(3 * data.BLOCK, np.uint16)
    fingerprints = []
    for place in (None, 0, data.BLOCK - 1, 2 * data.BLOCK, len(tokens) - 1):
        changed = tokens.copy()
        changed[[] if place is None else [place]] = 1
        write_tokens(tmp_path, changed, tokens[:100])
        fingerprints.append(data.open_folder(tmp_path).fingerprint)
    assert len({*fingerprints}) == len(fingerprints)
    changed[-1] = 257
    write_tokens(tmp_path, changed, tokens[:100])
    with pytest.raises(data.DataError, match="train.bin contains token id 257"):
        data.open_folder(tmp_path)


def test_a_batch_with_a_token_above_the_vocabulary_is_refused(tmp_path):
    """The corpus is too large to be read in full at the start."""
    tokens = np.zeros(3 * data.BLOCK, np.uint16)
    tokens[data.BLOCK + 5] = 257  # in a block that the start does not read
    write_tokens(tmp_path, tokens, tokens[:100])
    dataset = data.open_folder(tmp_path).open("train", 8, None)
    batches = data.read_ahead(dataset, [[0], [1], [data.BLOCK // 8], [2]])
    assert [len(next(batches)), len(next(batches))] == [1, 1]
    with pytest.raises(data.DataError, match=r"^\S+train.bin contains token id 257[^\n]*$"):
        next(batches)


# --------------------------------------------------------------------------------------------------
# The folder changes while it is read


def test_a_folder_that_is_exchanged_changes_nothing(tmp_path):
    """An open file survives a move, a replacement and a removal."""
    folder = conftest.write_tokens(tmp_path / "data", seed=1)
    dataset = data.TokenDataset(data.open_folder(folder), "train", 16, seed=0)
    expected = dataset[[0, 1, 2]]
    folder.rename(tmp_path / "moved")
    conftest.write_tokens(folder, seed=2)
    assert torch.equal(dataset[[0, 1, 2]], expected)
    shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "moved")
    assert torch.equal(dataset[[0, 1, 2]], expected)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path):
    folder = conftest.write_tokens(tmp_path / "data")
    dataset = data.TokenDataset(data.open_folder(folder), "train", 16, seed=None)
    os.truncate(folder / "train.bin", 100)
    with pytest.raises(data.DataError, match="train.bin was truncated while it was read"):
        dataset[[5]]


def test_threads_read_the_same_batches_in_order(tmp_path):
    folder = data.open_folder(conftest.write_tokens(tmp_path / "data"))
    dataset = data.TokenDataset(folder, "train", 16, seed=0)
    for count in (0, 1, 3, 600):
        indices = [[n, n + 1] for n in range(count)]
        read = list(data.read_ahead(dataset, iter(indices)))
        assert len(read) == count
        for batch, numbers in zip(read, indices):
            assert torch.equal(batch, dataset[numbers])


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64"])
def test_tokens_of_more_than_two_bytes_without_a_meta_json_are_refused(tmp_path, dtype):
    """Read as uint16, half of the tokens or more would be 0."""
    tokens = np.random.default_rng(0).integers(0, 32_000, 5000)
    for split in ("train", "val"):
        tokens.astype(dtype).tofile(tmp_path / f"{split}.bin")
    with pytest.raises(data.DataError, match="two bytes"):
        data.open_folder(tmp_path)
    for split in ("train", "val"):
        tokens.astype("uint16").tofile(tmp_path / f"{split}.bin")
    assert data.open_folder(tmp_path).vocab_size == 50257


def test_a_run_whose_data_is_removed_finishes_with_its_sample(pool, tokens, tmp_path):
    folder = shutil.copytree(tokens, tmp_path / "mine")
    text = "--strategy fsdp --max_steps 60 --sample_tokens 3"
    running = PoolJob(pool, arguments(folder, tmp_path / "run", text))
    running.until(running.rows)
    shutil.rmtree(folder)
    assert running.wait() == 0
    assert "- sample -" in running.printed()
