"""The mesh, a model on the mesh, the choice of a strategy, and an exception on one rank."""

import math
import threading
from datetime import timedelta

import pytest
import torch
from conftest import build_run

import dist


@pytest.mark.parametrize(
    "arguments, shape",
    [
        (("single", 1, 1, None, None), (1, 1, 1)),
        (("ddp", 6, 2, None, None), (6, 1, 1)),
        (("hsdp", 8, 4, None, None), (2, 4, 1)),  # two hosts of four
        (("hsdp", 8, 8, 4, None), (4, 2, 1)),
        (("hsdp", 8, 4, None, 8), (1, 8, 1)),
        (("fsdp", 256, 8, None, None, 8), (1, 32, 8)),  # Llama 3 70B
        (("hsdp", 16, 8, None, None, 2), (2, 4, 2)),
    ],
)
def test_the_mesh_shape_follows_from_the_strategy(arguments, shape):
    assert dist.mesh_shape(*arguments) == shape


def test_a_mesh_of_the_wrong_size_is_refused():
    line = "4 x dp_shard 3 x tp 2 needs 24 processes, but 12 were started"
    with pytest.raises(dist.MeshError, match=line):
        dist.mesh_shape("hsdp", 12, 6, 4, 3, 2)


@pytest.mark.parametrize("dp_replicate, dp_shard", [(8, None), (None, 8)])
def test_a_mesh_with_an_axis_longer_than_the_world_is_refused(dp_replicate, dp_shard):
    with pytest.raises(dist.MeshError, match="needs 8 processes, but 4 were started"):
        dist.mesh_shape("hsdp", 4, 4, dp_replicate, dp_shard)


def test_ddp_refuses_the_sizes_of_a_mesh():
    with pytest.raises(dist.MeshError, match="--strategy ddp sets dp_replicate and dp_shard itse"):
        dist.mesh_shape("ddp", 4, 4, 2, 2)


def place_on_mesh(shape: tuple[int, int, int], device: str = "cpu") -> tuple[int, list[tuple]]:
    """The dp_rank, and (members, timeout, description) of this rank's group on each axis."""
    world = dist.start(device, timedelta(seconds=77))
    mesh = dist.make_mesh(world, shape)
    found = []
    for axis in dist.AXES:
        group = mesh.get_group(axis)
        # There is no public way to read a group's timeout.
        timeout = group._get_backend(world.device).options._timeout
        members = torch.distributed.get_process_group_ranks(group)
        found.append((members, timeout.total_seconds(), group.group_desc))
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
def test_each_axis_of_a_mesh_has_a_group(pool, shape, groups_of_last):
    """Even an axis of all ranks has its own group, so that its traffic counts for that axis."""
    world_size, tp = math.prod(shape), shape[-1]
    answers = pool(world_size, place_on_mesh, shape)
    assert [dp_rank for dp_rank, _ in answers] == [rank // tp for rank in range(world_size)]
    expected = [(members, 77, axis) for members, axis in zip(groups_of_last, dist.AXES)]
    assert answers[-1][1] == expected


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


FULL = "this disk is full"


class TwoArguments(ValueError):
    exit_status = 2

    def __init__(self, disk: str, problem: str):
        super().__init__(f"this {disk} is {problem}")


def outcome(how: str, kinds: str) -> tuple[str, str, int | None]:
    """Return class, text and status of what this rank raises or returns.

    `kinds` has the ending of each rank.
    """

    class Local(Exception):
        pass

    world = dist.start("cpu", timedelta(seconds=9))
    endings = {"fine": f"done on {world.rank}", "lock": threading.Lock(), "system": OSError(FULL)}
    endings |= {"two": TwoArguments("disk", "full"), "key": KeyError(FULL), "local": Local(FULL)}

    def work():
        ending = endings[kinds.split()[world.rank]]
        if isinstance(ending, Exception):
            raise ending
        return ending

    try:
        if how == "on_all_ranks":
            result = dist.on_all_ranks(work)[world.rank]
        elif how == "on_rank0":
            result = dist.on_rank0(work)
        else:
            with dist.raise_on_all_ranks():
                result = work()
    except Exception as error:
        result = error
    text = str(result).partition(" at 0x")[0]
    return type(result).__name__, text, getattr(result, "exit_status", None)


DONE = ("str", "done on 0", None)
LOCAL = ("Local", FULL, None), ("RankError", f"Local: {FULL}", 1)
KEY = ("RankError", f"KeyError: '{FULL}'", 1), ("KeyError", f"'{FULL}'", None)
SYSTEM = ("RankError", FULL, 1), ("OSError", FULL, None)
TWO = ("RankError", FULL, 2), ("TwoArguments", FULL, 2)
LOCK = "cannot pickle '_thread.lock' object"
LOCKS = ("TypeError", LOCK, None), ("RankError", f"TypeError: {LOCK}", 1)
UNLOCKED = ("lock", "<unlocked _thread.lock object", None)


@pytest.mark.parametrize(
    "how, kinds, on_rank_0, on_rank_1",
    [
        ("on_all_ranks", "fine fine", DONE, ("str", "done on 1", None)),
        ("on_all_ranks", "fine system", *SYSTEM),
        ("on_all_ranks", "fine two", *TWO),
        ("on_all_ranks", "two local", *reversed(TWO)),
        ("on_all_ranks", "fine key", *KEY),
        ("on_all_ranks", "local system", *LOCAL),
        ("on_all_ranks", "fine lock", *reversed(LOCKS)),
        ("on_rank0", "fine local", DONE, DONE),
        ("on_rank0", "local fine", *LOCAL),
        ("on_rank0", "two fine", *reversed(TWO)),
        ("on_rank0", "lock fine", *LOCKS),
        ("raise_on_all_ranks", "fine lock", DONE, UNLOCKED),
        ("raise_on_all_ranks", "fine local", *reversed(LOCAL)),
        ("raise_on_all_ranks", "local system", *LOCAL),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(pool, how, kinds, on_rank_0, on_rank_1):
    """All get its text within seconds, even if the error or a result cannot be pickled."""
    assert pool(2, outcome, how, kinds, timeout=8) == [on_rank_0, on_rank_1]


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
            found.append(str(error))
    return dist.on_all_ranks(lambda: found)[rank]  # no rank exits while another one connects


def test_on_all_ranks_works_in_a_subgroup(pool):
    error = "integer division or modulo by zero"
    of_rank_1 = f"ZeroDivisionError: {error}"
    assert pool(3, fail_in_a_group) == [[], [1, 2, of_rank_1], [1, 2, error]]
