"""The start proves itself: what the ranks must share is compared, what they must not is too."""

import os
import platform
import resource
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import flags, listen

import data
import dist
import model
import prepare
import train


def start_with_a_fault(argv: list[str], fault: str, other: str) -> tuple[int, str, str]:
    """train.py on four ranks, of which rank 2 is not like the others (or none knows its rank)."""
    odd, init = os.environ["RANK"] == "2", model.Transformer.init_tensor
    patches = {
        "flag": mock.patch.object(
            train,
            "parse",
            lambda argv, parse=train.parse: parse([*argv, "--lr", "1"] if odd else argv),
        ),
        "code": mock.patch.object(train, "source_hash", lambda: "abc" if odd else "def"),
        "data": mock.patch.object(
            data,
            "open_folder",
            lambda path, open=data.open_folder: open(Path(other) if odd else path),
        ),
        "weights": mock.patch.object(
            model.Transformer,
            "init_tensor",
            lambda net, name, t, seed: init(net, name, t, seed + odd),
        ),
        "order": mock.patch.object(dist, "dp_rank", lambda mesh: 1),
        "group": mock.patch.object(
            dist, "dp_rank", lambda mesh, own=dist.dp_rank: own(mesh) - (os.environ["RANK"] == "3")
        ),
        "norm": mock.patch.object(
            model.Transformer,
            "init_tensor",
            lambda net, name, t, seed: t.fill_(1 + odd * (t.dim() == 1)),
        ),
    }
    with patches[fault]:
        return listen(argv)


LINES = {
    "flag": "--lr is 0.003 on rank 0 and 1.0 on rank 2: start all ranks alike",
    "code": "the code is def on rank 0 and abc on rank 2: start all ranks alike",
    "data": "on rank 2: start all ranks alike",
    "weights": "ranks 0 and 2 hold the same part of the model, but with different weights",
    "order": "ranks 0 and 1 both read sequence",
    "group": "ranks 2 and 3 are one tp group, but read different sequences",
    "norm": "ranks 2 and 3 hold the same part of the model, but with different weights",
}


@pytest.mark.parametrize("fault", LINES)
def test_a_rank_that_is_not_like_the_others_ends_the_run(pool, tokens, tmp_path, fault):
    (tmp_path / "text").write_text("another text " * 400)
    prepare.prepare([str(tmp_path / "text")], tmp_path / "other", say=lambda line: None)
    strategy = "fsdp --tp 2" if fault in ("group", "norm") else "hsdp --dp_shard 2"
    argv = flags(f"--data {tokens} --out {tmp_path}/run --strategy {strategy} --max_steps 2")
    answers = pool(4, start_with_a_fault, argv, fault, str(tmp_path / "other"))
    assert [status for status, _, _ in answers] == [2] * 4
    assert LINES[fault] in answers[0][2] and answers[0][2].count("\n") == 1
    assert not (tmp_path / "run").exists()


WORLDS = {(1, 1): "single", (8, 8): "fsdp", (16, 8): "hsdp"}


@pytest.mark.parametrize("size, local", WORLDS)
def test_auto_takes_ddp_where_it_fits_and_shards_where_not(size, local):
    world = dist.World(0, size, 0, local, torch.device("cpu"))
    with mock.patch.object(dist, "device_memory", lambda world: 80 * 10**9):
        fits, why = dist.choose_strategy(world, 10**9, 4 * 10**9)  # 16 + 4 GB
        assert fits == ("single" if size == 1 else "ddp")
        assert (
            why
            == "16 bytes x 1,000,000,000 parameters + 4.00 GB activations = 20.00 GB, at most 80% of 80.0 GB"
        )
        assert dist.choose_strategy(world, 4 * 10**9, 10**9)[0] == WORLDS[size, local]  # 64 + 1 GB


def test_auto_says_what_decided(pool, tokens, tmp_path):
    ((status, said, _), _) = pool(
        2, listen, flags(f"--data {tokens} --out {tmp_path}/run --max_steps 1")
    )
    assert status == 0 and "mesh    ddp: dp_replicate 2 x dp_shard 1" in said
    assert "--strategy auto: 16 bytes x " in said and "at most 80% of" in said


def page_faults_of_a_large_tensor() -> int:
    dist.start("cpu")
    faults = []
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)  # 64 MB: 16,384 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are"
)
def test_memory_that_a_tensor_freed_comes_again_without_the_kernel(pool):
    (faults,) = pool(1, page_faults_of_a_large_tensor)
    assert faults < 100
