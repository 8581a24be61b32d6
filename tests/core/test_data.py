"""Token folders: nanoGPT's, those with a tokenizer file, and those that are damaged or hostile."""

import json
import os
import shutil
import threading

import numpy as np
import pytest
import torch
from rig import write_tokens

import data


def test_nanogpt_folders_are_read_without_their_pickle(tmp_path):
    tokens = np.arange(3000, dtype=np.uint16) % 65
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")
    folder = data.open_folder(tmp_path)
    assert (folder.vocab_size, folder.tokenizer) == (50257, "gpt2")
    (tmp_path / "meta.pkl").write_bytes(b"what cannot be unpickled")
    folder = data.open_folder(tmp_path)
    assert (folder.vocab_size, folder.tokenizer) == (65, None)
    np.append(tokens, 70).astype(np.uint16).tofile(tmp_path / "val.bin")  # a rare character
    assert data.open_folder(tmp_path).vocab_size == 71
    for dtype in ("uint32", "int64"):  # read as uint16, half of the tokens or more would be 0
        for split in ("train", "val"):
            (np.arange(5000) * 7).astype(dtype).tofile(tmp_path / f"{split}.bin")
        with pytest.raises(data.DataError):
            data.open_folder(tmp_path)


def change_meta(folder, **changes) -> None:
    file = folder / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_token_folder_contains_its_tokenizer_file(tokens, tmp_path):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    change_meta(folder, tokenizer="tokenizer.json")
    (folder / "tokenizer.json").write_bytes(b"IQ== 0")
    opened = data.open_folder(folder)
    assert opened.tokenizer_files == {"tokenizer.json": b"IQ== 0"}
    assert opened.tokenizer == str(folder / "tokenizer.json")


HOSTILE = [{"dtype": "O"}, {"vocab_size": float("inf")}, {"train_tokens": None}]
# A file secret lies beside the folder; rank-0, inside it, would replace a file of a checkpoint.
HOSTILE += [{"tokenizer": name} for name in (["bytes"], "secret", "../secret", "/secret", "rank-0")]
HOSTILE += ["[]", "{}", "[" * 100_000, "\udcff"]


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line(tokens, tmp_path, change):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    (tmp_path / "secret").touch()
    (folder / "rank-0").touch()
    if isinstance(change, dict):
        change_meta(folder, **change)
    else:
        (folder / "meta.json").write_text(change, errors="surrogateescape")
    with pytest.raises(data.DataError, match=f"^--data {folder} [^\n]*$"):
        data.open_folder(folder)


# --------------------------------------------------------------------------------------------------
# A file that is too large to be read in full at the start


def open_large(folder, split: str, place: int, token: int) -> data.TokenFolder:
    """Open a folder whose files have three blocks of zeros, but `token` at one place of a split."""
    for name in ("train", "val"):
        ids = np.zeros(3 * data.BLOCK, np.uint16)
        ids[place] = token if name == split else 0
        ids.tofile(folder / f"{name}.bin")
    meta = {"dtype": "uint16", "vocab_size": 257, "tokenizer": "bytes"}
    (folder / "meta.json").write_text(json.dumps(meta))
    return data.open_folder(folder)


def test_the_start_reads_the_first_and_the_last_block_of_both_files(tmp_path):
    """Other tokens, or one that is too high, are noticed there."""
    last = 3 * data.BLOCK - 1
    fingerprints = {open_large(tmp_path, "train", 0, 0).fingerprint}
    for split in ("train", "val"):
        for place in (0, data.BLOCK - 1, 2 * data.BLOCK, last):
            fingerprints.add(open_large(tmp_path, split, place, 256).fingerprint)
        with pytest.raises(data.DataError, match=f"{split}.bin contains token id 257"):
            open_large(tmp_path, split, last, 257)
    assert len(fingerprints) == 9


def test_a_batch_with_a_token_above_the_vocabulary_is_refused(tmp_path):
    place = data.BLOCK + 5  # in the block that the start does not read
    dataset = open_large(tmp_path, "train", place, 257).open("train", 8, None)
    batches = data.read_ahead(dataset, [[0], [1], [data.BLOCK // 8], [2]])
    assert [len(next(batches)), len(next(batches))] == [1, 1]
    with pytest.raises(data.DataError, match=r"^\S+train.bin contains token id 257[^\n]*$"):
        next(batches)


# --------------------------------------------------------------------------------------------------
# Reading


def test_a_folder_that_is_exchanged_changes_nothing(tmp_path):
    """An open file survives a move and a replacement, but it may be cut."""
    folder = write_tokens(tmp_path / "data", seed=1)
    dataset = data.open_folder(folder).open("train", 16, None)
    expected = dataset[[0, 1, 2]]  # of which the last one ends after 98 bytes
    folder.rename(tmp_path / "moved")
    write_tokens(folder, seed=2)
    assert torch.equal(dataset[[0, 1, 2]], expected)
    os.truncate(tmp_path / "moved/train.bin", 90)
    with pytest.raises(data.DataError, match="train.bin was truncated while it was read"):
        dataset[[0, 1, 2]]


class OverlappingDataset:
    """Returns batch n only once somebody reads batch n + 1, if there is one."""

    def __init__(self, dataset: data.TokenDataset, count: int):
        self.dataset = dataset
        self.begun = [threading.Event() for _ in range(count)]

    def __getitem__(self, indices: list[int]) -> torch.Tensor:
        self.begun[indices[0]].set()
        assert self.begun[min(indices[0] + 1, len(self.begun) - 1)].wait(20)
        return self.dataset[indices]


@pytest.mark.parametrize("count", [0, 1, 3, 600])
def test_threads_read_batches_ahead_and_give_them_in_order(tokens, count):
    dataset = data.open_folder(tokens).open("train", 16, 0)
    indices = [[n, n + 1] for n in range(count)]
    batches = [*data.read_ahead(OverlappingDataset(dataset, count), iter(indices))]
    torch.testing.assert_close(batches, [dataset[batch] for batch in indices])
