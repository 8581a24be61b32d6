"""Token folders: nanoGPT's, those with a tokenizer file, and those that are damaged or hostile."""

import json
import os
import pickle
import shutil
import threading

import numpy as np
import pytest
import rig
import torch

import data


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("the pickle was loaded",)


def test_nanogpt_folders_are_read_without_their_pickle(tmp_path):
    tokens = np.arange(3000, dtype=np.uint16) % 65
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")
    folder = data.open_folder(tmp_path)
    assert (folder.vocab_size, folder.tokenizer) == (50257, "gpt2")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    folder = data.open_folder(tmp_path)
    assert (folder.vocab_size, folder.tokenizer) == (65, None)
    np.append(tokens, 70).astype(np.uint16).tofile(tmp_path / "val.bin")  # a rare character
    assert data.open_folder(tmp_path).vocab_size == 71
    dataset = data.TokenDataset(folder, "train", 8, None)
    assert dataset[[0, 1]][1].tolist() == list(range(8, 17))
    # 3000 is a multiple of 8, and the last window needs a token after it.
    assert dataset[[len(dataset) - 1]].shape == (1, 9)
    for dtype in ("uint32", "int64"):  # read as uint16, half of the tokens or more would be 0
        for split in ("train", "val"):
            (np.arange(5000) * 7).astype(dtype).tofile(tmp_path / f"{split}.bin")
        with pytest.raises(data.DataError):
            data.open_folder(tmp_path)


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
HOSTILE += [{"tokenizer": name} for name in (["bytes"], "../secret", "/secret")]
HOSTILE += ["[]", "{}", "[" * 100_000, "\udcff"]


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


# --------------------------------------------------------------------------------------------------
# A file that is too large to be read in full at the start


def write_large(folder, place: int | None, token: int) -> None:
    """Write a folder whose train.bin has three blocks of zeros, but `token` at one place."""
    tokens = np.zeros(3 * data.BLOCK, np.uint16)
    tokens[[] if place is None else [place]] = token
    for split, ids in (("train", tokens), ("val", np.zeros(100, np.uint16))):
        ids.tofile(folder / f"{split}.bin")
    meta = {"dtype": "uint16", "vocab_size": 257, "tokenizer": "bytes"}
    (folder / "meta.json").write_text(json.dumps(meta))


def test_the_start_reads_the_first_and_the_last_block_of_a_large_file(tmp_path):
    """Other tokens, or one that is too high, are noticed there."""
    last = 3 * data.BLOCK - 1
    fingerprints = set()
    for place in (None, 0, data.BLOCK - 1, 2 * data.BLOCK, last):
        write_large(tmp_path, place, 256)
        fingerprints.add(data.open_folder(tmp_path).fingerprint)
    assert len(fingerprints) == 5
    write_large(tmp_path, last, 257)
    with pytest.raises(data.DataError, match="train.bin contains token id 257"):
        data.open_folder(tmp_path)


def test_a_batch_with_a_token_above_the_vocabulary_is_refused(tmp_path):
    write_large(tmp_path, data.BLOCK + 5, 257)  # in the block that the start does not read
    dataset = data.open_folder(tmp_path).open("train", 8, None)
    batches = data.read_ahead(dataset, [[0], [1], [data.BLOCK // 8], [2]])
    assert [len(next(batches)), len(next(batches))] == [1, 1]
    with pytest.raises(data.DataError, match=r"^\S+train.bin contains token id 257[^\n]*$"):
        next(batches)


# --------------------------------------------------------------------------------------------------
# Reading


def test_a_folder_that_is_exchanged_changes_nothing(tmp_path):
    """An open file survives a move, a replacement and a removal, but it may be cut."""
    folder = rig.write_tokens(tmp_path / "data", seed=1)
    dataset = data.TokenDataset(data.open_folder(folder), "train", 16, seed=None)
    expected = dataset[[0, 1, 2]]  # of which the last one ends after 98 bytes
    folder.rename(tmp_path / "moved")
    rig.write_tokens(folder, seed=2)
    assert torch.equal(dataset[[0, 1, 2]], expected)
    shutil.rmtree(folder)
    assert torch.equal(dataset[[0, 1, 2]], expected)
    os.truncate(tmp_path / "moved/train.bin", 90)
    with pytest.raises(data.DataError, match="train.bin was truncated while it was read"):
        dataset[[0, 1, 2]]


def test_threads_read_the_same_batches_in_order(tmp_path):
    folder = data.open_folder(rig.write_tokens(tmp_path / "data"))
    dataset = data.TokenDataset(folder, "train", 16, seed=0)
    for count in (0, 1, 3, 600):
        indices = [[n, n + 1] for n in range(count)]
        read = list(data.read_ahead(dataset, iter(indices)))
        assert len(read) == count
        assert all(torch.equal(batch, dataset[numbers]) for batch, numbers in zip(read, indices))


class OverlappingDataset:
    """Returns batch n only once somebody reads batch n + 1, if there is one."""

    def __init__(self, count: int):
        self.begun = [threading.Event() for _ in range(count)]

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        (n,) = indices
        self.begun[n].set()
        assert self.begun[min(n + 1, len(self.begun) - 1)].wait(20)
        return torch.tensor(indices)


def test_several_batches_are_read_ahead():
    batches = data.read_ahead(OverlappingDataset(20), ([n] for n in range(20)))
    assert [batch.tolist() for batch in batches] == [[n] for n in range(20)]
