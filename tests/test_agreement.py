"""Ranks that were started differently are refused; a stop signal to one rank stops all."""

import os
import signal
import socket
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import flags, listen

import data
import dist
import model
import prepare
import start
from errors import UsageError
from start import refuse_shared_sequences, source_hash


def start_with_a_fault(argv: list[str], fault: str, other_data: Path) -> tuple[int, str, str]:
    """Run train.py on four ranks with a fault that makes ranks differ, in most cases rank 2."""
    rank = int(os.environ["RANK"])
    is_odd = rank == 2
    open_folder, dp_rank = data.open_folder, dist.dp_rank
    init_tensor, read = model.Transformer.init_tensor, data.TokenDataset.__getitem__

    def other_weights(net, name, tensor, seed):
        init_tensor(net, name, tensor, seed + is_odd)

    def other_norms(net, name, tensor, seed):
        tensor.fill_(2 if is_odd and tensor.dim() == 1 else 1)

    def damaged(dataset, indices):
        if dataset.split == "val" and is_odd:
            raise data.DataError("val.bin is damaged")
        return read(dataset, indices)

    patches = {
        "data": (data, "open_folder", lambda path: open_folder(other_data if is_odd else path)),
        "weights": (model.Transformer, "init_tensor", other_weights),
        "order": (dist, "dp_rank", lambda mesh: 1),
        "group": (dist, "dp_rank", lambda mesh: dp_rank(mesh) - (rank == 3)),
        "norm": (model.Transformer, "init_tensor", other_norms),
        "read": (data.TokenDataset, "__getitem__", damaged),
        "hardware": (torch.cpu, "get_capabilities", lambda: {"avx512_bf16": not is_odd}),
    }
    with mock.patch.object(*patches[fault]):
        return listen(argv)


SAME = "start all ranks with the same code and data\n"
LINES = {
    "data": "error: rank 2 has other data than rank 0: the fingerprints are ",
    "weights": "error: embed.weight has different bits on rank 0 (HOST) than on rank 2 (HOST), "
    f"which holds the same part of it: {SAME}",
    "order": "is read twice: by dp_replicate 0, dp_shard 0 and, on rank 1, by dp_replicate 0, ",
    "group": "first, but another rank of its tp group, dp_replicate 0, dp_shard 1, reads [",
    "norm": "error: blocks.0.attention_norm.weight has different bits on rank 2 (HOST) than on "
    "rank 3 ",
    "read": "train.py: error: val.bin is damaged\n",
    "hardware": "in bfloat16, which the hardware of rank 2 on ",
}


@pytest.mark.parametrize("fault", LINES)
def test_a_rank_that_differs_from_the_others_ends_the_run(pool, tokens, tmp_path, fault):
    (tmp_path / "text").write_text("another text " * 400)
    prepare.prepare([str(tmp_path / "text")], tmp_path / "other")
    strategy = "fsdp --tp 2" if fault in ("group", "norm") else "hsdp --dp_shard 2"
    argv = flags(f"--data {tokens} --out {tmp_path}/run --strategy {strategy} --max_steps 2")
    argv.append("--check_replicas")
    answers = pool(4, start_with_a_fault, argv, fault, tmp_path / "other")
    assert [status for status, _, _ in answers] == [2] * 4
    line = LINES[fault].replace("HOST", socket.gethostname())
    assert line in answers[0][2]
    assert answers[0][2].count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_source_hash_covers_the_modules_in_all_folders(tmp_path):
    files = [tmp_path / name for name in ("train.py", "extras/replicas.py", "text/encode.py")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
    # Each file changes, the first one twice. Then two files are exchanged, and one is renamed.
    contents = [("", "", ""), ("a", "", ""), ("a", "a", ""), ("a", "a", "a"), ("b", "a", "a")]
    contents.append(("a", "a", "b"))
    hashes = set()
    for texts in contents:
        for file, text in zip(files, texts):
            file.write_text(text)
        hashes.add(source_hash(tmp_path))
    files[0].rename(tmp_path / "sample.py")
    hashes.add(source_hash(tmp_path))
    assert len(hashes) == 7


def read(indices_of_ranks: list[list[int]]) -> str:
    """Return the error of ranks that read these sequences."""
    world = dist.start("cpu")
    mesh = dist.make_mesh(world, (1, 2, 1))
    with pytest.raises(UsageError) as error:
        refuse_shared_sequences(mesh, indices_of_ranks[world.rank])
    return str(error.value)


def test_a_sequence_that_two_ranks_read_is_found(pool):
    for line in pool(2, read, [[0, 4, 1], [2, 3, 4]]):
        assert line == (
            "sequence 4 is read twice: by dp_replicate 0, dp_shard 0 and, on rank 1, by "
            "dp_replicate 0, dp_shard 1"
        )


def compare_differing(argv_of_ranks: list[list[str]], hashes: list[str]) -> list[str]:
    rank = dist.start("cpu").rank
    folder = data.TokenFolder(Path(), np.dtype("<u2"), 257, "bytes", fingerprint="abc")
    with mock.patch.object(start, "source_hash", lambda: hashes[rank]):
        return start.compare_ranks(argv_of_ranks[rank], folder)


def test_ranks_with_other_flags_or_code_are_named(pool):
    same, other = ["--lr", "1"], ["--lr", "2"]
    lines = ["rank 1 was started with other flags", "rank 2 runs other code"]
    for found in pool(3, compare_differing, [same, other, same], ["a", "a", "b"]):
        assert [line.partition("; ")[0].partition(" than")[0] for line in found] == lines
    for found in pool(2, compare_differing, [same, same], ["a", "a"]):
        assert found == []


def test_a_run_under_nohup_outlives_its_terminal(pool):
    assert pool(1, start_under_nohup) == [True]


def start_under_nohup() -> bool:
    """Return whether SIGHUP stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with dist.StopRequest(dist.start("cpu")):
        return signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
