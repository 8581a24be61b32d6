"""The process group, mesh shapes and the choice of a strategy."""

import math
import resource
from datetime import timedelta
from unittest import mock

import pytest
import torch
from conftest import build_run, flags, free_port, listen, resolve

import dist
import layout


@pytest.mark.parametrize(
    "arguments, shape",
    [
        (("single", 1, 1, None, None), (1, 1, 1)),
        (("ddp", 6, 2, None, None), (6, 1, 1)),
        (("hsdp", 8, 4, None, None), (2, 4, 1)),  # two hosts of four
        (("hsdp", 8, 8, 4, None), (4, 2, 1)),
        (("hsdp", 8, 4, None, 8), (1, 8, 1)),
        (("fsdp", 256, 8, None, None, 8), (1, 32, 8)),  # Llama-3 70B's
        (("hsdp", 16, 8, None, None, 2), (2, 4, 2)),
    ],
)
def test_mesh_shapes(arguments, shape):
    assert dist.mesh_shape(*arguments) == shape


def test_a_mesh_that_does_not_multiply_is_refused_with_its_product():
    line = "4 x dp_shard 3 x tp 2 takes 24 processes, but 12 were started"
    with pytest.raises(dist.MeshError, match=line):
        dist.mesh_shape("hsdp", 12, 6, 4, 3, 2)
    with pytest.raises(dist.MeshError, match="--strategy ddp sets dp_replicate and dp_shard itse"):
        dist.mesh_shape("ddp", 4, 4, 2, 2)


@pytest.mark.parametrize(
    "variables",
    [
        "WORLD_SIZE=2",
        "RANK=0, WORLD_SIZE=1, MASTER_PORT=b, MASTER_ADDR=a",
        "RANK=2, WORLD_SIZE=2, MASTER_PORT=1, MASTER_ADDR=a",
    ],
)
def test_variables_that_are_incomplete_are_refused_at_once(monkeypatch, tokens, variables):
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # of a rank other than 0
    for variable in variables.split(", "):
        monkeypatch.setenv(*variable.split("="))
    status, out, err = listen(flags(f"--data {tokens} --max_steps 1"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f": {variables} in the environment is no rank of a run: unset these" in err


def test_ranks_that_do_not_join_are_named(monkeypatch):
    store, timeout = torch.distributed.HashStore(), timedelta(minutes=20)
    world = dist.World(1, 4, 1, 4, torch.device("cpu"), timeout, store)
    store.set("joined 0", "")
    store.add("joined", 1)
    line = "^2 of 4 ranks did not join within 0.5 s, first rank 2$"
    with pytest.raises(ConnectionError, match=line):
        dist.await_ranks(world, store, timedelta(seconds=0.5))
    port = free_port()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    line = f"nobody listens at MASTER_ADDR:MASTER_PORT, 127.0.0.1:{port}, after 0.5 s: rank 0"
    with pytest.raises(ConnectionError, match=line):
        dist.start("cpu", timeout, join_timeout=timedelta(seconds=0.5))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConnectionError, match="the ranks do not meet: Timed out .* 1/2 clients"):
        dist.start("cpu", timeout, join_timeout=timedelta(seconds=1))


def test_a_missing_rank_is_named_in_each_attempt(monkeypatch):
    """In torchrun's store, which also has what the attempt before has left."""
    port = free_port()
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"}
    for attempt in range(2):
        for name, value in (variables | {"TORCHELASTIC_RESTART_COUNT": attempt}).items():
            monkeypatch.setenv(name, str(value))
        line = "^1 of 2 ranks did not join within 0.5 s, first rank 1$"
        with pytest.raises(ConnectionError, match=line):
            dist.start("cpu", timedelta(seconds=5), join_timeout=timedelta(seconds=0.5))
    assert store.port == port  # it was there until here


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
def test_each_axis_has_a_group_and_ranks_that_share_data_a_dp_rank(pool, shape, groups_of_last):
    """An axis that is the whole world, too: what it communicates is counted as that axis's."""
    world_size, tp = math.prod(shape), shape[-1]
    answers = pool(world_size, place_on_mesh, shape)
    assert [dp_rank for dp_rank, _ in answers] == [rank // tp for rank in range(world_size)]
    expected = [(members, 77, axis) for members, axis in zip(groups_of_last, dist.AXES)]
    assert answers[-1][1] == expected


def dtype_of_rotations(argv: list[str]) -> torch.dtype:
    """The dtype of what a block that FSDP has wrapped gets as RoPE's table."""
    run = build_run(argv)
    seen = []

    def see(attention, inputs, keywords) -> None:
        seen.append(keywords["rope"].dtype)

    run.state.model.blocks[0].attention.register_forward_pre_hook(see, with_kwargs=True)
    run.forward(torch.zeros(1, 16, dtype=torch.int64))
    return seen[0]


def test_rotations_stay_in_float32_in_a_bfloat16_run(pool, tokens, tmp_path):
    text = f"--data {tokens} --out {tmp_path}/run --strategy fsdp --dtype bfloat16"
    assert pool(2, dtype_of_rotations, flags(text)) == [torch.float32] * 2


@pytest.fixture
def see_gpus(monkeypatch):
    """see_gpus(n): this process sees n GPUs."""

    def see(count: int) -> None:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return see


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one(see_gpus, monkeypatch):
    see_gpus(8)
    assert dist.set_device("auto", local_rank=3, local_size=8) == torch.device("cuda", 3)
    see_gpus(4)
    with pytest.raises(dist.MeshError, match="8 processes .* 4 GPUs: use --nproc_per_node 4"):
        dist.set_device("auto", local_rank=0, local_size=8)
    see_gpus(1)  # srun --gpus-per-task=1
    assert dist.set_device("auto", local_rank=3, local_size=8) == torch.device("cuda", 0)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")  # torchrun shows the same GPUs to all ranks
    with pytest.raises(dist.MeshError, match="8 processes .* 1 GPUs: use --nproc_per_node 1"):
        dist.set_device("auto", local_rank=0, local_size=8)


def test_ranks_that_do_not_reach_each_other_name_the_interface():
    reason = "timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:42420$1"
    error = RuntimeError(f"Gloo connectFullMesh failed with [/gloo/tcp/pair.cc:152] {reason}")
    world = dist.World(0, 2, 0, 1, torch.device("cpu"), timedelta(seconds=9), mock.Mock())
    refused = pytest.raises(ConnectionError, match="set GLOO_SOCKET_IFNAME .NCCL_SOCKET_IFNAME")
    with mock.patch("torch.distributed.init_process_group", side_effect=error), refused as said:
        dist.join_group(world, mock.Mock())
    assert f"cannot connect to another rank: {reason}; " in str(said.value)


def open_file_limits() -> list[int]:
    """The soft limit before and after a start, and the hard one, where it begins low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    dist.start("cpu")
    return [*resource.getrlimit(resource.RLIMIT_NOFILE), hard]


def test_a_rank_may_open_as_many_files_as_the_system_grants(pool):
    ((soft, hard, hard_before),) = pool(1, open_file_limits)
    assert soft == hard == hard_before


class TwoArguments(ValueError):
    def __init__(self, disk: str, problem: str):
        super().__init__(f"this {disk} is {problem}")


def fail_on_rank_1(kind: str) -> tuple[str, str]:
    """The class and the text of the error on this rank, or what it returned."""

    class Local(Exception):
        pass

    world = dist.start("cpu", timedelta(seconds=9))
    text = "this disk is full"
    errors = {"system": OSError(text), "two": TwoArguments("disk", "full")}
    errors |= {"local": Local(text), "key": KeyError(text)}

    def work() -> str:
        if world.rank == 1 and kind in errors:
            raise errors[kind]
        return f"done on {world.rank}"

    try:
        return "", dist.on_all_ranks(work)[world.rank]
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    "kind, on_rank_1, on_rank_0",
    [
        ("system", ("OSError", "this disk is full"), ("OSError", "this disk is full")),
        ("two", ("TwoArguments", "this disk is full"), ("TwoArguments", "this disk is full")),
        ("local", ("Local", "this disk is full"), ("RankError", "Local: this disk is full")),
        (
            "key",
            ("KeyError", "'this disk is full'"),
            ("RankError", "KeyError: 'this disk is full'"),
        ),
        ("none", ("", "done on 1"), ("", "done on 0")),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(pool, kind, on_rank_1, on_rank_0):
    """Whatever its class, and with its text."""
    assert pool(2, fail_on_rank_1, kind) == [on_rank_0, on_rank_1]


@pytest.mark.parametrize(
    "size, local_size, strategies",
    [
        (1, 1, ["single"] * 3),
        (8, 8, ["ddp", "fsdp", "fsdp"]),
        (16, 8, ["ddp", "hsdp", "fsdp"]),  # two hosts
    ],
)
def test_auto_takes_the_first_strategy_that_fits(size, local_size, strategies):
    text = "--global_batch_size 16 --micro_batch_size 1"
    ranks = {"world_size": size, "local_size": local_size}
    ddp = resolve(f"{text} --strategy ddp", **ranks)
    need = sum(layout.estimate_memory(ddp, layout.empty_model(ddp)).values())
    found = [resolve(text, **ranks, device_memory=room) for room in (2 * need, need, 1)]
    assert [run.strategy for run in found] == strategies
