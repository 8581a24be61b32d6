"""--data A:0.7,B:0.3: every thousand sequences have these shares, on any mesh and when resumed."""

import json

import numpy as np
import pytest
from core.conftest import pool, tokens, train, write_tokens  # noqa: F401

import data
from extras import mixture as mixtures


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("mixture")
    return tuple(str(write_tokens(root / name, seed)) for name, seed in (("a", 1), ("b", 2)))


def open_mixture(spec: str, split: str, seed: int | None) -> mixtures.Mixture:
    return mixtures.open_mixture(spec).open(split, 16, seed)


def sources(spec: str, count: int, seed: int = 0) -> list[int]:
    mixture = open_mixture(spec, "train", seed)
    return [mixture.source(n)[0] for n in range(count)]


@pytest.mark.parametrize("share", [0.7, 0.5, 0.001, 0.999])
def test_every_thousand_sequences_have_the_shares(folders, share):
    a, b = folders
    drawn = sources(f"{a}:{share},{b}:{1 - share:.3f}", 3000)
    for start in (0, 1000, 2000):
        thousand = drawn[start : start + 1000]
        assert thousand.count(0) == round(1000 * share)
        assert thousand.count(1) == 1000 - round(1000 * share)


def test_sequences_of_a_part_follow_in_its_own_order(folders):
    """So each part is read once before any of its sequences is read again."""
    a, b = folders
    mixture = open_mixture(f"{a}:0.6,{b}:0.4", "train", 5)
    numbers = {0: [], 1: []}
    for n in range(2000):
        part, number = mixture.source(n)
        numbers[part].append(number)
    for part in (0, 1):
        assert sorted(numbers[part]) == [*range(len(numbers[part]))]


def test_a_mixture_gives_the_same_numbers_on_two_ranks_and_after_a_resume(train, folders):  # noqa: F811
    a, b = folders
    flags = f"--data {a}:0.75,{b}:0.25 --schedule constant --save_interval 3 --keep_every 1"
    one = train(1, f"{flags} --max_steps 6", "one")
    assert train(2, f"{flags} --strategy fsdp --max_steps 3", "two").status == 0
    two = train(2, f"{flags} --strategy fsdp --max_steps 6", "two")
    assert (one.status, two.status) == (0, 0), two.error
    assert [row["step"] for row in two.rows()] == [1, 2, 3, 4, 5, 6]
    for expected, row in zip(one.rows(), two.rows(), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert one.rows("val_loss")[-1]["val_loss"] == pytest.approx(
        two.rows("val_loss")[-1]["val_loss"], rel=1e-5
    )


@pytest.mark.parametrize(
    "spec, problem",
    [
        ("{a}:0.5,{b}:0.4", "add up to 0.9"),
        ("{a}:0.5,{b}", "lacks the share of"),
        ("{a}:0.0001,{b}:0.9999", "less than 0.001"),
    ],
)
def test_shares_that_are_no_mixture_are_refused(train, folders, spec, problem):  # noqa: F811
    a, b = folders
    refused = train(1, f"--data {spec.format(a=a, b=b)}")
    assert refused.status == 2 and problem in refused.error
    assert not refused.out.exists()


def test_changed_shares_are_another_run(train, folders):  # noqa: F811
    a, b = folders
    assert train(1, f"--data {a}:0.5,{b}:0.5").status == 0
    refused = train(1, f"--data {a}:0.6,{b}:0.4 --max_steps 6")
    assert refused.status == 2 and "--data" in refused.error


# --------------------------------------------------------------------------------------------------
# Folders whose sequences show where they are from


def write_folder(path, first_id: int, windows: int) -> None:
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
    items = []
    for i, share in enumerate(shares):
        write_folder(tmp_path / str(i), i, 1)
        items.append(f"{tmp_path}/{i}:{share / 1000}")
    dataset = open_mixture(",".join(items), "train", 5)
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
        of_folder = read[is_of_folder]
        alone = data.TokenDataset(folder, "train", 16, seed=0)
        assert of_folder.equal(alone[list(range(2100 * share // 1000))][:, 0])


def test_a_mixture_has_the_vocabulary_and_all_fingerprints_of_its_folders(mixture):
    source = mixtures.open_mixture(mixture)
    first, second = source.folders
    assert (source.vocab_size, source.tokenizer) == (second.vocab_size, second.tokenizer)
    expected = f"700/1000 of {first.fingerprint}, 300/1000 of {second.fingerprint}"
    assert source.fingerprint == expected


def test_the_order_of_a_mixture_has_not_changed(mixture):
    """A run reads on where it stopped, also with later code."""
    folders = mixtures.open_mixture(mixture)
    dataset = folders.open("train", 16, 5)
    read = dataset[[*range(12), 999, 1000, 10**9]][:, 0].tolist()
    assert read == [20, 33, 120, 54, 35, 114, 1, 34, 9, 100, 58, 13, 102, 13, 1]
    val = folders.open("val", 16, None)
    (chosen,) = data.val_indices(9, len(val), 9, 0, 1)
    assert val[chosen][:, 0].tolist() == [0, 9, 19, 28, 38, 47, 57, 106, 115]


def test_the_order_of_a_mixture_is_the_same_on_any_mesh(mixture):
    """Nor does it depend on the micro-batch size or the start step."""
    dataset = open_mixture(mixture, "train", 5)
    expected = dataset[list(range(96))]
    for ranks, micro_batch, start_step in ((2, 2, 1), (4, 1, 7)):
        for rank in range(ranks):
            steps = range(start_step, 13)
            indices = list(data.train_indices(steps, 8, micro_batch, rank, ranks))
            for numbers, batch in zip(indices, data.read_ahead(dataset, indices), strict=True):
                assert batch.equal(expected[numbers])


@pytest.mark.parametrize("share, count", [(0.7, 10), (0.7, 77), (0.99, 2500)])
def test_validation_of_a_mixture_keeps_its_shares(mixture, share, count):
    """It spreads each part evenly, even one with more windows than thousandths (code at 0.01)."""
    mixture = mixture.replace("0.7", f"{share}").replace("0.3", f"{1 - share:g}")
    dataset = open_mixture(mixture, "val", None)
    (chosen,) = data.val_indices(count, len(dataset), count, 0, 1)
    read = dataset[chosen][:, 0].tolist()
    web = [token for token in read if token < 100]
    assert len(web) == pytest.approx(share * count, abs=1)
    assert web == pytest.approx([i * 60 // len(web) for i in range(len(web))], abs=1)
    code = [token - 100 for token in read if token >= 100]
    assert code == pytest.approx([i * 25 // len(code) for i in range(len(code))], abs=1)


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
        mixtures.open_mixture(shares)
