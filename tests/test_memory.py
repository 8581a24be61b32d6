"""What a rank holds in memory: gradients, the weights of a unit, and freed blocks."""

import platform
import resource

import pytest
import torch
from conftest import build_run, resolve, train_step

import dist
from dist import blocks_per_unit, keep_freed_memory


def gradient_storages(argv: list[str]) -> tuple[int, list[set[tuple[int, int]]]]:
    """The bytes of all weights, and the gradients' storages before each backward of three steps.

    A storage is (address, bytes).
    """
    run = build_run(argv)
    found = []

    def look(*_):
        gradients = [weight.grad for weight in run.state.decoder.parameters()]
        storages = [grad.untyped_storage() for grad in gradients if grad is not None]
        found.append({(storage.data_ptr(), storage.nbytes()) for storage in storages})

    run.state.model.register_forward_hook(look)
    for step in (1, 2, 3):
        train_step(run, step)
    return 4 * run.state.decoder.parameter_count(), found


def test_ddp_accumulates_gradients_only_in_its_bucket(on_ranks):
    """They are there before its first all_reduce. In the second step DDP uses its final bucket."""
    for weights, found in on_ranks(2, gradient_storages, "--strategy ddp --micro_batch_size 1"):
        first_step, later_steps = found[:4], found[4:]
        for storages in (first_step, later_steps):
            assert all(storage == storages[0] for storage in storages)
            ((_, size),) = storages[0]  # one for 20 gradients
            assert size == weights


def page_faults_of_a_large_tensor() -> int:
    dist.start("cpu")
    keep_freed_memory()
    faults = []
    for _ in range(30):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)  # 64 MB: 16,384 pages
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")
def test_freed_memory_is_reused_without_page_faults(pool):
    (faults,) = pool(1, page_faults_of_a_large_tensor)
    assert faults < 100


@pytest.mark.parametrize(
    "wrap, size, blocks",
    [
        ("block", "tiny", 1),
        ("block_group:3", "tiny", 3),
        ("none", "llama3-8b", None),
        ("auto", "tiny", None),  # 3.4 MB of float32 weights: one unit
        # 4 x 256 x 256 + 3 x 256 x 512 weights and 2 norms: 2.6 MB a block, 21 MB in all
        ("auto", "tiny --n_layer 8 --d_model 256 --n_kv_head 4 --d_ff 512", 3),
        ("auto", "llama3-8b", 1),  # 872 MB a block
    ],
)
def test_wrap_gives_the_number_of_blocks_per_unit(wrap, size, blocks):
    run = resolve(f"--model {size} --wrap {wrap}")
    assert blocks_per_unit(run.wrap) == blocks
