"""Token folders: nanoGPT's, those with a tokenizer file, and those that are damaged or hostile."""

import dataclasses
import gc
import json
import multiprocessing
import pickle
import shutil

import numpy as np
import pytest

import data


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
    assert opened.tokenizer_file == {"my.json": b"IQ== 0"}
    assert opened.tokenizer_name == "my.json"
    assert opened.tokenizer == str(folder / "my.json")
    (folder / "my.json").unlink()
    line = f"^{folder}/my.json, the tokenizer's file: No such file or directory; put it back"
    with pytest.raises(data.DataError, match=line):
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
    """It reads every second one of 512 blocks (32 MiB). The last block is not full."""
    tokens = np.zeros(512 * SURVEY - 9, np.uint16)
    fingerprints = []
    for block in (511, 510):
        write_tokens(tmp_path, tokens, tokens[:100])
        fingerprints.append(data.open_folder(tmp_path).fingerprint)
        tokens[block * SURVEY + 5] = 1
    write_tokens(tmp_path, tokens, tokens[:100])
    fingerprints.append(data.open_folder(tmp_path).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    tokens[511 * SURVEY - 1] = 257
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
    processes = multiprocessing.active_children()
    gc.disable()  # as in a run; a collection waits 5 s for each worker
    try:
        for workers in (0, 2):
            with pytest.raises(data.DataError, match=line):
                list(data.loader(dataset, [[0], [SURVEY // 8]], workers))
            assert set(multiprocessing.active_children()) == set(processes)
    finally:
        gc.enable()


def test_only_the_same_tokenizer_gives_the_same_vocabulary(tokens):
    """A tokenizer of the same size, or in a file of the same name, may be a different one."""
    folder = data.open_folder(tokens)
    files = [{"a.json": contents} for contents in (b"one", b"other")]
    others = [dataclasses.replace(folder, tokenizer_file=file) for file in files]
    folders = [folder, dataclasses.replace(folder, tokenizer_name="gpt2"), *others]
    for one in folders:
        assert [other.vocabulary == one.vocabulary for other in folders].count(True) == 1
