"""Token folders: nanoGPT's, those with a tokenizer file, and those that are damaged or hostile."""

import dataclasses
import hashlib
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
    *_, line = data.TokenDataset(folder, "train", 8, None).describe(1)
    assert line == "it has no meta.json, so it is read as nanoGPT's: uint16, gpt2"
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
    assert opened.tokenizer_file == {"my.json": b"IQ== 0"}
    assert opened.tokenizer_name == "my.json"
    assert opened.tokenizer == str(folder / "my.json")
    (folder / "my.json").unlink()
    line = f"^{folder}/my.json, the tokenizer's file: No such file or directory; put it back"
    with pytest.raises(data.DataError, match=line):
        data.open_folder(folder)


@pytest.mark.parametrize("changed", ["my.json", "tokenizer_config.json"])
def test_a_tokenizer_file_that_was_exchanged_is_refused(tokens, tmp_path, changed):
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    files = {"my.json": b"IQ== 0", "tokenizer_config.json": b"{}"}
    checksums = {name: hashlib.sha256(contents).hexdigest() for name, contents in files.items()}
    meta = json.loads((folder / "meta.json").read_text())
    meta |= {"tokenizer": "my.json", "tokenizer_sha256": checksums}
    (folder / "meta.json").write_text(json.dumps(meta))
    for name, contents in files.items():
        (folder / name).write_bytes(contents)
    assert data.open_folder(folder).tokenizer_file == files
    (folder / changed).write_bytes(b"IQ== 1")
    with pytest.raises(data.DataError, match=f"^{folder}/{changed} is not the file with which"):
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
    with pytest.raises(data.DataError, match=f"^--data {folder} is damaged: [^\n]*; prepare it"):
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


SURVEY = 65536 // 2  # tokens in a block of the start-up survey


def test_the_start_reads_blocks_of_a_large_file_up_to_its_end(tmp_path):
    """It reads every second one of 32 blocks (2 MiB). The last block is not full."""
    tokens = np.zeros(32 * SURVEY - 9, np.uint16)
    fingerprints = []
    for block in (31, 30):
        write_tokens(tmp_path, tokens, tokens[:100])
        fingerprints.append(data.open_folder(tmp_path).fingerprint)
        tokens[block * SURVEY + 5] = 1
    write_tokens(tmp_path, tokens, tokens[:100])
    fingerprints.append(data.open_folder(tmp_path).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    tokens[31 * SURVEY - 1] = 257
    write_tokens(tmp_path, tokens, tokens[:100])
    with pytest.raises(data.DataError, match="train.bin contains token id 257; ids must be"):
        data.open_folder(tmp_path)


def test_a_batch_with_a_token_above_the_vocabulary_is_refused(tmp_path):
    """The corpus is too large to be read in full at the start."""
    tokens = np.zeros(40 << 20, np.uint16)
    tokens[SURVEY + 5] = 257  # in a block that the start does not read
    write_tokens(tmp_path, tokens, tokens[:100])
    dataset = data.TokenDataset(data.open_folder(tmp_path), "train", 8, None)
    line = r"^\S+train.bin contains token id 257; ids must be below vocab_size 257[^\n]*$"
    batches = data.read_ahead(dataset, [[0], [1], [SURVEY // 8], [2]])
    assert [len(next(batches)), len(next(batches))] == [1, 1]
    with pytest.raises(data.DataError, match=line):
        next(batches)


def test_only_the_same_tokenizer_gives_the_same_vocabulary(tokens):
    """A tokenizer of the same size, or in a file of the same name, may be a different one."""
    folder = data.open_folder(tokens)
    files = [{"a.json": contents} for contents in (b"one", b"other")]
    others = [dataclasses.replace(folder, tokenizer_file=file) for file in files]
    folders = [folder, dataclasses.replace(folder, tokenizer_name="gpt2"), *others]
    for one in folders:
        assert [other.vocabulary == one.vocabulary for other in folders].count(True) == 1


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
    with pytest.raises(data.DataError, match="train.bin seems to have 4 or 8 bytes per token"):
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
    assert "- sample -" in running.printed() and "no text" not in running.printed()
