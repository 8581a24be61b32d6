import itertools
import json
import pickle
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import data


def prepare(tmp_path: Path, texts: dict[str, str | bytes], **options) -> data.TokenFolder:
    source = tmp_path / "text"
    source.mkdir(parents=True)
    for name, text in texts.items():
        (source / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    data.prepare([str(source)], tmp_path / "tokens", progress=lambda line: None, **options)
    return data.open_folder(tmp_path / "tokens")


def test_bytes_come_back_exactly_and_documents_end(tmp_path):
    texts = {"a": "one\r\ntwo é\n", "b": bytes(range(256)), "c": "x<|endoftext|>y"}
    folder = prepare(tmp_path, texts, val_fraction=0.5)
    tokens = np.concatenate([folder.tokens("train"), folder.tokens("val")]).tolist()
    documents = [
        list(group)
        for end, group in itertools.groupby(tokens, lambda token: token == 256)
        if not end
    ]
    assert {bytes(document) for document in documents} == {
        "one\r\ntwo é\n".encode(),
        bytes(range(256)),
        b"x",
        b"y",
    }
    assert tokens.count(256) == 4
    assert "".join(data.decode("bytes", data.encode("bytes", "naïve ✓"))) == "naïve ✓"


def test_documents_are_split_by_their_content_and_meta_counts_them(tmp_path):
    texts = {f"{i:03}": f"document {i} " * (i + 1) for i in range(300)}
    folder = prepare(tmp_path, texts | {"copy": texts["017"]}, val_fraction=0.3)
    meta = json.loads((tmp_path / "tokens" / "meta.json").read_text())
    parts = {
        split: bytes(folder.tokens(split).astype(np.uint8)).split(b"\0")
        for split in ("train", "val")
    }  # 256 -> 0
    assert {split: len(part) - 1 for split, part in parts.items()} == meta["documents"]
    assert set(parts["train"]) & set(parts["val"]) == {b""}
    assert sum(meta["documents"].values()) == 301 and 60 < meta["documents"]["val"] < 120
    assert Counter(parts["train"] + parts["val"])[texts["017"].encode()] == 2
    assert meta["train_tokens"] == len(folder.tokens("train"))


def test_one_document_gives_its_tail_to_validation(tmp_path):
    text = "".join(random.Random(0).choices("abcdef\n", k=5000))
    folder = prepare(tmp_path, {"a": text}, val_fraction=0.1)
    both = np.concatenate([folder.tokens("train"), folder.tokens("val")])
    assert bytes(both[:-1].astype(np.uint8)).decode() == text and len(folder.tokens("val")) == 500


def test_a_corpus_of_one_document_is_never_all_validation(tmp_path):
    """Its hash would put one in twenty there."""
    for i in range(60):
        folder = prepare(tmp_path / str(i), {"a": f"\n\n{i} text " * 20}, val_fraction=0.3)
        tokens = np.concatenate([folder.tokens("train"), folder.tokens("val")])
        assert bytes(tokens[:-1].astype(np.uint8)).decode() == f"\n\n{i} text " * 20
        assert len(folder.tokens("train")) > len(folder.tokens("val")) > 0
    with pytest.raises(data.DataError, match="no text"):
        prepare(tmp_path / "none", {"a": " \n "})


@pytest.mark.parametrize("separator", ["\n", " "])
def test_long_documents_are_read_in_pieces(tmp_path, monkeypatch, separator):
    """Whatever the length of the pieces, and wherever they fall on separators and characters of several bytes."""
    text = separator.join(
        random.Random(0).choices(["ab", "é✓", "<|endoftext|>", "<|end", "x" * 40], k=400)
    )
    want = [part for part in text.split("<|endoftext|>") if part.strip()]
    path = tmp_path / "a"
    path.write_text(text)
    for size in (1, 7, 64, 1 << 20):
        monkeypatch.setattr(data, "PIECE", size)
        found, document = [], ""
        for piece, ends in data.pieces(path):
            document += piece
            assert len(piece) <= 2 * size + 13
            if ends:
                found, document = found + [document] * bool(document.strip()), ""
        assert found == want


def test_a_tiktoken_file_is_a_tokenizer_and_goes_with_the_folder(tmp_path):
    import base64

    ranks = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    (tmp_path / "mine.tiktoken").write_text(
        "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(ranks))
    )
    folder = prepare(tmp_path, {"a": "the thing" * 50}, name=str(tmp_path / "mine.tiktoken"))
    (tmp_path / "mine.tiktoken").unlink()
    tokens = folder.tokens("train").tolist()
    assert tokens[0] == 257 and folder.vocab_size == 259
    assert "".join(data.decode(folder.tokenizer, tokens)).startswith("the thing")


def test_nanogpt_folders_are_read_and_their_pickle_is_not(tmp_path):
    tokens = np.arange(3000, dtype=np.uint16) % 65
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")
    assert (
        data.open_folder(tmp_path).vocab_size == 50257
        and data.open_folder(tmp_path).tokenizer == "gpt2"
    )
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Bomb()))
    folder = data.open_folder(tmp_path)
    assert folder.vocab_size == 65 and folder.tokenizer is None
    assert data.Windows(folder, "train", 8, None)[[0, 1]][1].tolist() == list(range(8, 17))
    assert "".join(data.decode(None, data.encode(None, "3 4"))) == "3 4 "


class Bomb:
    def __reduce__(self):
        return pytest.fail, ("the pickle was loaded",)


def test_permute_is_a_permutation_and_a_good_one():
    for size in (1, 2, 3, 7, 64, 1000, 1025):
        assert sorted(data.permute(n, size, b"key") for n in range(size)) == list(range(size))
    order = [data.permute(n, 1000, b"key") for n in range(1000)]
    assert order != [data.permute(n, 1000, b"other") for n in range(1000)]
    assert (
        abs(np.corrcoef(order, range(1000))[0, 1]) < 0.1
        and abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.1
    )
    assert 0 <= data.permute(10**14 - 1, 10**14, b"key") < 10**14  # 10^14 windows: no table


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("micro_batch", [1, 2])
def test_each_sequence_is_read_once_per_epoch_by_one_rank(tokens, ranks, micro_batch):
    windows = data.Windows(data.open_folder(tokens), "train", 16, seed=5)
    count, batch = len(windows), 8
    steps = range(2 * count // batch + 1)
    read: dict[int, list] = {step: [] for step in steps}
    for rank in range(ranks):
        numbers = list(data.train_numbers(steps, batch, micro_batch, rank, ranks))
        per_step = batch // ranks // micro_batch
        for i, part in enumerate(numbers):
            assert len(part) == micro_batch
            read[i // per_step] += part
    # step s reads s * B ... (s + 1) * B - 1, whatever the number of ranks
    assert all(
        sorted(part) == list(range(step * batch, (step + 1) * batch)) for step, part in read.items()
    )
    order = [windows.window(n) for n in range(2 * count)]
    assert sorted(order[:count]) == sorted(order[count:]) == list(range(count))
    assert order[:count] != order[count:]
    # resumed at step 3: what a run that was never stopped reads from there
    whole = list(data.train_numbers(steps, batch, micro_batch, 0, ranks))
    assert (
        list(data.train_numbers(range(3, len(steps)), batch, micro_batch, 0, ranks))
        == whole[3 * per_step :]
    )


def test_workers_do_not_change_the_batches(tokens):
    windows = data.Windows(data.open_folder(tokens), "train", 16, seed=5)
    numbers = list(data.train_numbers(range(6), 8, 4, 0, 1))
    alone, helped = (list(data.loader(windows, iter(numbers), workers)) for workers in (0, 2))
    assert len(alone) == 12 and all(a.equal(b) for a, b in zip(alone, helped, strict=True))
    file = windows.folder.tokens("train")
    start = windows.window(numbers[1][0]) * 16
    assert alone[1][0].tolist() == file[start : start + 17].tolist()


def test_validation_set_is_the_same_on_any_mesh():
    for count, micro_batch, ranks in ((10, 3, 1), (10, 3, 2), (10, 1, 4), (3, 2, 4)):
        lists = [
            list(data.val_numbers(count, 100, micro_batch, rank, ranks)) for rank in range(ranks)
        ]
        assert len({len(part) for part in lists}) == 1  # as many forwards on each rank
        assert sorted(n for part in lists for batch in part for n in batch) == [
            i * 100 // count for i in range(count)
        ]


def test_a_token_above_the_vocabulary_is_found_in_the_batch_too(tmp_path):
    """In a corpus too large to be read whole at the start."""
    tokens = np.zeros(40 << 20, np.uint16)
    survey = (
        65536 // 2
    )  # tokens in a block of the start-up survey; the second of a run of blocks is not read
    tokens[survey + 5] = 999
    tokens.tofile(tmp_path / "train.bin")
    tokens[:100].tofile(tmp_path / "val.bin")
    (tmp_path / "meta.json").write_text(
        json.dumps(
            {
                "dtype": "uint16",
                "vocab_size": 257,
                "tokenizer": "bytes",
                "train_tokens": len(tokens),
                "val_tokens": 100,
            }
        )
    )
    windows = data.Windows(data.open_folder(tmp_path), "train", 8, None)
    for workers in (0, 1):
        with pytest.raises(
            data.DataError,
            match=r"^\S+train.bin holds token 999, above its vocabulary of 257[^\n]*$",
        ):
            list(data.loader(windows, [[0], [survey // 8]], workers))


def test_builtin_set_is_large_enough():
    assert sum(path.stat().st_size for path in data.builtin_sources()) > 5e6


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing"], "--source missing: no such file or directory"),
        ([], "is not empty|exists"),
    ],
)
def test_prepare_refuses_and_overwrites_nothing(tmp_path, arguments, message):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "keep").write_text("mine")
    with pytest.raises(data.DataError, match=message):
        data.prepare(arguments or None, tmp_path / ("new" if arguments else "out"))
    assert (tmp_path / "out" / "keep").read_text() == "mine" and sorted(
        p.name for p in tmp_path.iterdir()
    ) == ["out"]


def test_an_error_while_preparing_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "tokenize", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data.prepare(None, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_gpt2_without_network_says_what_to_do(tmp_path, monkeypatch):
    import requests
    import tiktoken.registry

    def offline(*arguments, **options):
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "get", offline)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(data.DataError, match="TIKTOKEN_CACHE_DIR.*--tokenizer bytes"):
        data.tokenizer("gpt2")
