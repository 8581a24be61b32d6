"""What train.py does with a GPU, in complete runs on the fake GPUs of fake_cuda.py.

In a step only batches and log rows go between host and device, and the host waits for neither.
NCCL and the kernels with strict requirements would accept their operands.
"""

import contextlib
import io
import os
import shutil
import sys
from collections import Counter
from datetime import timedelta
from unittest import mock

import fake_cuda
import pytest
import torch
from old import flags
from rig import Pool

import dist
import train

# ranks, micro-batches of a rank in a step, flags
RUNS = """
1 2 single --model tinyllama-1.1b --keep_last 2 --async_save --optim_metrics_interval 2
2 2 ddp    --dtype float32 --n_kv_head 4 --grad_sync micro_batch --loss_chunks 2 --keep_last 2
4 2 hsdp   --dp_shard 2 --grad_sync shard --clip adaptive --keep_last 2 --async_save
4 1 fsdp   --tp 2 --optimizer muon --activation_checkpointing selective --profile 0:1
""".strip().splitlines()

BLOCKS, READS = "to cuda, pageable, blocking", "to cpu, pageable, blocking"
ASKS = "asks for _local_scalar_dense"
# What the host waits for outside the steps
OUTSIDE = {
    ("optim.py __init__", BLOCKS),
    ("optim.py statistics", ASKS),  # with --optim_metrics_interval, in a step too
    ("start.py read_val_batches", BLOCKS),
    ("train.py evaluate", BLOCKS),
    ("train.py evaluate", ASKS),
    ("train.py save", ASKS),
    ("checkpoint.py blocks", READS),
    ("checkpoint.py fill", BLOCKS),
    ("async_save.py copy_to_host", "to cpu, pinned, blocking"),
    ("model.py generate", BLOCKS),
    ("model.py generate", READS),
}


def play(argv: list[str]) -> tuple[Counter, list[str]]:
    """Run train.py on this rank; return its crossings and refusals."""
    fake_cuda.install()
    fakes = fake_cuda.Fakes()
    gpu = fake_cuda.Gpu(fakes)
    save = train.save

    def save_and_wait(state, run, saver) -> None:
        save(state, run, saver)
        saver.wait()  # fake tensors are not made for two threads

    waits = mock.patch.object(train, "save", save_and_wait)
    frees = mock.patch.object(torch.cuda, "empty_cache")
    with waits, frees as empty_cache, fakes, gpu, contextlib.redirect_stdout(io.StringIO()):
        assert train.command(argv) == 0
    empty_cache.assert_called_once()  # after the shards were cut from full tensors
    return gpu.crossings, gpu.refusals


class Gpus(Pool):
    start_method = "spawn"  # a library is preloaded when a process starts

    def __init__(self, library):
        super().__init__()
        self.library = library

    def start(self) -> None:
        preload = {"LD_PRELOAD": str(self.library), "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, preload):
            super().start()


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    if sys.platform != "linux" or not shutil.which("c++"):
        pytest.skip("LD_PRELOAD of the library needs Linux and a C++ compiler (c++)")
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has real CUDA devices")
    ranks = Gpus(fake_cuda.compile_library(tmp_path_factory.mktemp("library")))
    yield ranks
    ranks.stop()


@pytest.mark.slow(proves="what only a CUDA device's code paths do")
@pytest.mark.parametrize("row", RUNS)
def test_a_step_does_not_wait_for_the_gpu(gpus, tokens, tmp_path, row):
    """Kernels accept their operands, and a run that saves continues from its checkpoint."""
    ranks, accum, text = row.split(None, 2)
    batch = int(accum) * int(ranks) // (2 if "--tp 2" in text else 1)
    few = f"--n_layer 1 --micro_batch_size 1 --global_batch_size {batch} --eval_sequences 1"
    few += f" --sample_tokens 2 --keep_last 0 --data {tokens} --out {tmp_path}/run"
    starts = [(2, 2), (3, 1)] if "--keep_last" in text else [(2, 2)]
    for max_steps, steps in starts:
        argv = flags(f"--device cuda {few} --max_steps {max_steps} --strategy {text}")
        for crossings, refusals in gpus(int(ranks), play, argv, timeout=200):
            assert not refusals
            assert {what: n for what, n in crossings.items() if what not in OUTSIDE} == {
                ("train.py micro_batches", "to cuda, pinned"): steps * int(accum),
                ("log.py row", "to cuda, pinned"): steps,
                ("log.py row", "to cpu, pinned"): steps,
            }


def groups_on_gpus(shape: tuple[int, int, int]) -> tuple[str, list[tuple[list[int], float]]]:
    """Return this rank's device, and the members and the timeout of its group on each axis."""
    fake_cuda.install()
    world = dist.start("cuda", timedelta(seconds=77))
    assert torch.distributed.get_backend_config() == "cpu:gloo,cuda:nccl"
    found = []
    for group in dist.make_mesh(world, shape).get_all_groups():
        # There is no public way to read a group's timeout.
        timeout = group._get_backend(world.device).options._timeout
        members = torch.distributed.get_process_group_ranks(group)
        found.append((members, timeout.total_seconds()))
    dist.on_all_ranks(int)  # no rank exits while another one is still connecting
    return str(world.device), found


@pytest.mark.slow(proves="the options of NCCL's groups")
def test_make_mesh_sets_the_timeout_of_nccl_groups(gpus):
    for rank, (device, groups) in enumerate(gpus(4, groups_on_gpus, (2, 2, 1))):
        replicas, shards = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        assert device == f"cuda:{rank}"
        assert groups == [(replicas, 77), (shards, 77), ([rank], 77)]
