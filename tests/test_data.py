"""Token folders, and which rank reads which sequence."""

import dataclasses
import json
import multiprocessing
import pickle
import shutil

import numpy as np
import pytest
from conftest import listen

import data
from tools.planning.rehearse import no_garbage_collection


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
    with no_garbage_collection():  # as in a run; a collection waits 5 s for each worker
        for workers in (0, 2):
            with pytest.raises(data.DataError, match=line):
                list(data.loader(dataset, [[0], [SURVEY // 8]], workers))
            assert set(multiprocessing.active_children()) == set(processes)


# --------------------------------------------------------------------------------------------------
# Mixtures


def write_folder(path, first_id: int, windows: int) -> None:
    """Write 16 times the token first_id + w as window w, so that a sequence shows its window."""
    path.mkdir()
    tokens = np.append(np.repeat(np.arange(first_id, first_id + windows), 16), 0)
    write_tokens(path, tokens, tokens)


@pytest.fixture
def mixture(tmp_path) -> str:
    write_folder(tmp_path / "web", 0, 60)
    write_folder(tmp_path / "code", 100, 25)
    return f"{tmp_path}/web:0.7,{tmp_path}/code:0.3"


@pytest.mark.parametrize("shares", [[334, 333, 333], [1, 999], [331, 2, 89, 17, 561]])
def test_a_mixture_reads_its_folders_in_exact_shares(shares, tmp_path):
    items = []
    for i, share in enumerate(shares):
        write_folder(tmp_path / str(i), i, 1)
        items.append(f"{tmp_path}/{i}:{share / 1000}")
    dataset = data.open_dataset(data.open_folders(",".join(items)), "train", 16, seed=5)
    turns = dataset[list(range(2000))][:, 0]
    for first in (0, 1000):
        assert turns[first : first + 1000].bincount().tolist() == shares
    counts = np.cumsum(np.eye(len(shares))[turns], axis=0)  # (2000, folders)
    due = np.arange(1, 2001)[:, None] * np.array(shares) / 1000
    assert abs(counts - due).max() < 2


def test_each_folder_of_a_mixture_keeps_its_own_order(mixture):
    """So no sequence of the folder is read twice in an epoch."""
    folders = data.open_folders(mixture)
    read = data.open_dataset(folders, "train", 16, seed=0)[list(range(2100))][:, 0]
    for folder, is_of_folder in zip(folders, (read < 100, read >= 100)):
        of_folder = read[is_of_folder]
        alone = data.TokenDataset(folder, "train", 16, seed=0)
        assert of_folder.equal(alone[list(range(2100 * folder.share // 1000))][:, 0])


def test_the_facts_of_a_mixture_contain_each_fingerprint(mixture):
    folders = data.open_folders(mixture)
    facts = data.facts_of(folders)
    assert (facts.vocab_size, facts.tokenizer) == (folders[1].vocab_size, folders[1].tokenizer_name)
    assert facts.fingerprint.split(", ") == [folder.fingerprint for folder in folders]
    assert facts.fingerprint.startswith("700/1000 of ")


def test_the_order_of_a_mixture_has_not_changed(mixture):
    """A run saved by earlier code reads on where it stopped. The numbers are of 2026-11-22."""
    folders = data.open_folders(mixture)
    train = data.open_dataset(folders, "train", 16, seed=5)
    read = train[[*range(12), 999, 1000, 10**9]][:, 0].tolist()
    assert read == [20, 33, 120, 54, 35, 114, 1, 34, 9, 100, 58, 13, 102, 13, 1]
    val = data.open_dataset(folders, "val", 16, seed=None)
    (chosen,) = data.val_indices(9, len(val), 9, 0, 1)
    assert val[chosen][:, 0].tolist() == [0, 9, 19, 28, 38, 47, 57, 106, 115]


def test_the_order_of_a_mixture_is_the_same_on_any_mesh(mixture):
    """Nor does it depend on the number of workers, the micro-batch size or the start step."""
    train = data.open_dataset(data.open_folders(mixture), "train", 16, seed=5)
    expected = train[list(range(96))]
    for ranks, micro_batch, workers, start_step in ((2, 2, 1, 1), (4, 1, 0, 7)):
        for rank in range(ranks):
            steps = range(start_step, 13)
            indices = list(data.train_indices(steps, 8, micro_batch, rank, ranks))
            for numbers, batch in zip(indices, data.loader(train, indices, workers), strict=True):
                assert batch.equal(expected[numbers])


@pytest.mark.parametrize("share, count", [(0.7, 10), (0.7, 77), (0.99, 2500)])
def test_validation_of_a_mixture_keeps_its_shares(mixture, share, count):
    """It spreads each part evenly, even one with more windows than thousandths (code at 0.01)."""
    mixture = mixture.replace("0.7", f"{share}").replace("0.3", f"{1 - share:g}")
    dataset = data.open_dataset(data.open_folders(mixture), "val", 16, seed=None)
    (chosen,) = data.val_indices(count, len(dataset), count, 0, 1)
    read = dataset[chosen][:, 0].tolist()
    web = [token for token in read if token < 100]
    assert len(web) == pytest.approx(share * count, abs=1)
    assert web == pytest.approx([i * 60 // len(web) for i in range(len(web))], abs=1)
    code = [token - 100 for token in read if token >= 100]
    assert code == pytest.approx([i * 25 // len(code) for i in range(len(code))], abs=1)


def test_a_path_with_commas_and_colons_is_one_folder(tokens, tmp_path):
    write_folder(tmp_path / "run:1,x:0.5", 0, 20)
    for path in (f"{tmp_path}/run:1,x:0.5", str(tokens)):
        (folder,) = data.open_folders(path)
        assert folder == data.open_folder(folder.path)
    with pytest.raises(data.DataError, match="nowhere:here: no train.bin there"):
        data.open_folders("nowhere:here")


@pytest.mark.parametrize(
    "shares, problem",
    [
        ("a,b:1", "it lacks the share of a$"),
        ("a:0,b:1", "the share 0 of a is less than 0.001"),
        ("a:-0.5,b:1.5", "the share -0.5 of a is less"),
        ("a:0.0004,b:0.9996", "the share 0.0004 of a is less"),
        ("a:0.6,b:0.5", "add up to 1.1, not 1"),
        ("a:0.6", "add up to 0.6, not 1"),
    ],
)
def test_an_invalid_mixture_is_refused_with_the_reason(shares, problem):
    with pytest.raises(data.DataError, match=problem):
        data.open_folders(shares)


def test_only_the_same_tokenizer_gives_the_same_vocabulary(tokens):
    """A tokenizer of the same size, or in a file of the same name, may be a different one."""
    folder = data.open_folder(tokens)
    files = [{"a.json": contents} for contents in (b"one", b"other")]
    others = [dataclasses.replace(folder, tokenizer_file=file) for file in files]
    folders = [folder, dataclasses.replace(folder, tokenizer_name="gpt2"), *others]
    for one in folders:
        assert [other.vocabulary == one.vocabulary for other in folders].count(True) == 1


def test_a_run_keeps_the_shares_of_its_mixture(on_ranks, mixture, tmp_path):
    ((status, out, _),) = on_ranks(1, listen, f"--data {mixture} --max_steps 20")
    assert status == 0
    # 160 sequences: 112 from the 60 of web, 48 from the 25 of code
    assert f"{tmp_path}/web: 60 sequences; 20 steps read 1.87 epochs at a share of 0.7" in out
    assert f"{tmp_path}/code: 25 sequences; 20 steps read 1.92 epochs at a share of 0.3" in out
    other = mixture.replace("0.7", "0.6").replace("0.3", "0.4")
    ((status, _, err),) = on_ranks(1, listen, f"--data {other}")
    assert status == 2 and "the data's fingerprint " in err
    assert f" (--data {mixture} -> {other}); change that back" in err
