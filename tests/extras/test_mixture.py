"""--data A:0.7,B:0.3: every thousand sequences have these shares, on any mesh and when resumed."""

import pytest
from core.conftest import pool, tokens, train, write_tokens  # noqa: F401

import data


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("mixture")
    return tuple(str(write_tokens(root / name, seed)) for name, seed in (("a", 1), ("b", 2)))


def sources(spec: str, count: int, seed: int = 0) -> list[int]:
    mixture = data.open_dataset(data.open_folders(spec), "train", 16, seed)
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
    mixture = data.open_dataset(data.open_folders(f"{a}:0.6,{b}:0.4"), "train", 16, 5)
    numbers = {0: [], 1: []}
    for n in range(2000):
        part, number = mixture.source(n)
        numbers[part].append(number)
    for part in (0, 1):
        assert sorted(numbers[part]) == [*range(len(numbers[part]))]


def test_a_mixture_gives_the_same_numbers_on_two_ranks_and_after_a_resume(train, folders):  # noqa: F811
    a, b = folders
    flags = f"--data {a}:0.75,{b}:0.25 --schedule constant --save_interval 3 --keep_last 0"
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
