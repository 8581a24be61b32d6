"""The mesh, a model on the mesh, memory that is reused, and an exception on one rank."""

import math
import platform
import resource
import threading
from datetime import timedelta

import pytest
import torch
from conftest import build_run, resolve, train_step

import dist

# --------------------------------------------------------------------------------------------------
# The mesh


@pytest.mark.parametrize(
    "arguments, shape",
    [
        (("single", 1, 1), (1, 1, 1)),
        (("ddp", 6, 2), (6, 1, 1)),
        (("hsdp", 8, 4), (2, 4, 1)),  # two hosts of four
        (("hsdp", 8, 8, 2), (4, 2, 1)),
        (("hsdp", 8, 4, 8), (1, 8, 1)),
        (("hsdp", 4, 4, 1), (4, 1, 1)),
        (("fsdp", 256, 8, None, 8), (1, 32, 8)),  # Llama 3 70B
        (("fsdp", 8, 8, 8), (1, 8, 1)),
        (("hsdp", 16, 8, None, 2), (2, 4, 2)),
    ],
)
def test_the_mesh_shape_follows_from_the_strategy(arguments, shape):
    assert dist.mesh_shape(*arguments) == shape


@pytest.mark.parametrize(
    "arguments",
    [
        ("hsdp", 12, 6, 4, 2),
        ("hsdp", 4, 4, 8),
        ("fsdp", 4, 4, 2),
        ("single", 2, 2, 2),
        ("ddp", 4, 4, 2),
    ],
)
def test_a_mesh_that_does_not_fit_the_ranks_is_refused(arguments):
    with pytest.raises(dist.MeshError):
        dist.mesh_shape(*arguments)


def place_on_mesh(shape: tuple[int, int, int]) -> tuple[int, list[tuple]]:
    """The dp_rank, and the members and the timeout of this rank's group on each axis."""
    world = dist.start("cpu", timedelta(seconds=77))
    mesh = dist.make_mesh(world, shape)
    found = []
    for axis in dist.AXES:
        group = mesh.get_group(axis)
        # There is no public way to read a group's timeout.
        timeout = group._get_backend(world.device).options._timeout
        members = torch.distributed.get_process_group_ranks(group)
        found.append((members, timeout.total_seconds()))
    dist.on_all_ranks(int)  # no rank exits while another one is still connecting
    return dist.dp_rank(mesh), found


@pytest.mark.parametrize(
    "shape, groups_of_last",
    [
        ((3, 1, 1), [[0, 1, 2], [2], [2]]),
        ((1, 4, 1), [[3], [0, 1, 2, 3], [3]]),
        ((2, 2, 1), [[1, 3], [2, 3], [3]]),
        ((2, 1, 2), [[1, 3], [3], [2, 3]]),
        ((1, 2, 2), [[3], [1, 3], [2, 3]]),
    ],
)
def test_each_axis_of_a_mesh_has_a_group_with_the_timeout(pool, shape, groups_of_last):
    world_size, tp = math.prod(shape), shape[-1]
    answers = pool(world_size, place_on_mesh, shape)
    assert [dp_rank for dp_rank, _ in answers] == [rank // tp for rank in range(world_size)]
    assert answers[-1][1] == [(members, 77) for members in groups_of_last]


# --------------------------------------------------------------------------------------------------
# A model on the mesh


@pytest.mark.parametrize(
    "wrap, size, blocks",
    [
        ("block", "tiny", 1),
        ("block_group:3", "tiny", 3),
        ("none", "llama3-8b", None),
        ("auto", "tiny", None),  # 3.4 MB of float32 weights: one unit
        # 4 x 256 x 256 + 3 x 256 x 512 weights and 2 norms: 2.6 MB a block, 21 MB in all
        ("auto", "tiny --n_layer 8 --d_model 256 --n_kv_head 4 --d_ff 512", 1),
        ("auto", "llama3-8b", 1),  # 872 MB a block
    ],
)
def test_wrap_gives_the_number_of_blocks_per_unit(wrap, size, blocks):
    run = resolve(f"--model {size} --wrap {wrap}")
    assert dist.blocks_per_unit(run.wrap) == blocks


@pytest.mark.parametrize("wrap", ["blocks", "block_group", "block_group:0", "block:2", "none:2"])
def test_an_unknown_wrap_is_refused(wrap):
    with pytest.raises(dist.MeshError):
        dist.blocks_per_unit(wrap)


def dtype_of_rotations(argv: list[str]) -> torch.dtype:
    """Return the dtype of the RoPE table that a block wrapped by FSDP gets."""
    run = build_run(argv)
    seen = []

    def see(attention, inputs, keywords) -> None:
        seen.append(keywords["rope"].dtype)

    run.state.decoder.blocks[0].attention.register_forward_pre_hook(see, with_kwargs=True)
    run.state.model(torch.zeros(1, 16, dtype=torch.int64))
    return seen[0]


def test_the_rope_table_stays_in_float32_in_a_bfloat16_run(on_ranks):
    text = "--strategy fsdp --dtype bfloat16"
    assert on_ranks(2, dtype_of_rotations, text) == [torch.float32] * 2


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
    """It has its final bucket since `warm_up`."""
    for weights, found in on_ranks(2, gradient_storages, "--strategy ddp --micro_batch_size 1"):
        assert len(found) == 12 and all(storages == found[0] for storages in found)
        ((_, size),) = found[0]  # one for 20 gradients
        assert size == weights


def page_faults_of_a_large_tensor() -> int:
    dist.keep_freed_memory()
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


# --------------------------------------------------------------------------------------------------
# An exception on one rank

FULL = "this disk is full"


class TwoArguments(ValueError):
    exit_status = 2

    def __init__(self, disk: str, problem: str):
        super().__init__(f"this {disk} is {problem}")


def outcome(kinds: str, only_rank0: bool) -> tuple[str, str, int | None]:
    """Return class, text and status of what this rank raises or returns.

    `kinds` has the ending of each rank.
    """

    class Local(Exception):
        pass

    world = dist.start("cpu", timedelta(seconds=9))
    endings = {"fine": f"done on {world.rank}", "system": OSError(FULL), "key": KeyError(FULL)}
    endings |= {"two": TwoArguments("disk", "full"), "local": Local(FULL), "lock": threading.Lock()}

    def work():
        ending = endings[kinds.split()[world.rank]]
        if isinstance(ending, Exception):
            raise ending
        return ending

    try:
        result = dist.on_rank0(work) if only_rank0 else dist.on_all_ranks(work)[world.rank]
    except Exception as error:
        result = error
    return type(result).__name__, str(result), getattr(result, "exit_status", None)


DONE = ("str", "done on 0", None)
LOCAL = ("Local", FULL, None), ("RankError", f"rank 0: {FULL}", 1)
KEY = ("RankError", f"rank 1: '{FULL}'", 1), ("KeyError", f"'{FULL}'", None)
SYSTEM = ("RankError", f"rank 1: {FULL}", 1), ("OSError", FULL, None)
TWO = ("TwoArguments", FULL, 2), ("RankError", f"rank 0: {FULL}", 2)


@pytest.mark.parametrize(
    "kinds, only_rank0, on_rank_0, on_rank_1",
    [
        ("fine fine", False, DONE, ("str", "done on 1", None)),
        ("fine system", False, *SYSTEM),
        ("fine key", False, *KEY),
        ("two local", False, *TWO),
        ("local system", False, *LOCAL),
        ("fine local", True, DONE, DONE),
        ("local fine", True, *LOCAL),
        ("two fine", True, *TWO),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(pool, kinds, only_rank0, on_rank_0, on_rank_1):
    """All get its text within seconds, even if the error cannot be pickled."""
    assert pool(2, outcome, kinds, only_rank0, timeout=8) == [on_rank_0, on_rank_1]


def fail_in_a_group() -> list:
    """Return what ranks 1 and 2 gather in a subgroup, and the error when rank 2 fails in it."""
    rank = dist.start("cpu", timedelta(seconds=9)).rank
    group = torch.distributed.new_group([1, 2])
    found = []
    if rank > 0:
        found = dist.on_all_ranks(lambda: rank, group=group)
        try:
            dist.on_all_ranks(lambda: 1 // (2 - rank), group=group)
        except (ZeroDivisionError, dist.RankError) as error:
            found.append(type(error).__name__)
    return dist.on_all_ranks(lambda: found)[rank]  # no rank exits while another one connects


def test_on_all_ranks_works_in_a_subgroup(pool):
    assert pool(3, fail_in_a_group) == [[], [1, 2, "RankError"], [1, 2, "ZeroDivisionError"]]
