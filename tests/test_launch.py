"""From a command line and processes to ranks on a mesh, and how a command ends."""

import os
import platform
import re
import resource
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from old import flags, listen
from rig import ROOT, build_run, free_port, resolve, train_step, variables

import dist
import errors
from config import KINDS, SIZE_FLAGS

# --------------------------------------------------------------------------------------------------
# Flags -> run

# flags | ranks, ranks of a host, GPU | values of the run
RUNS = """\
                                   | 1  1      | strategy=single dp_size=1 grad_accum_steps=1
                                   | 8  4      | strategy=ddp dp_size=8 micro_batch_size=2
--tp 8                             | 8  4      | strategy=single dp_size=1 micro_batch_size=16
--strategy hsdp                    | 8  4      | dp_replicate=2 dp_shard=4 tokens_per_step=2048
--strategy hsdp --dp_shard 2       | 8  8      | dp_replicate=4 dp_shard=2
--strategy hsdp --dp_shard 8       | 8  4      | dp_replicate=1 dp_shard=8
--strategy hsdp --tp 2             | 16 8      | dp_replicate=2 dp_shard=4 dp_size=8
--strategy hsdp --dp_shard 4 --tp 2 | 12 6     | refused
--strategy fsdp --tp 8             | 64 8      | dp_replicate=1 dp_shard=8
--strategy fsdp --dp_shard 2       | 4  4      | refused
--strategy fsdp --micro_batch_size 2 | 6  6    | refused
--strategy single                  | 2  2      | refused
                                   | 1  1      | wrap=none lr=0.00390625 dtype=float32
--model llama3-8b                  | 1  1      | wrap=block
--wrap block_group:0               | 1  1      | refused
                                   | 1  1 H200 | dtype=bfloat16 peak_tflops=989
--dtype float32                    | 1  1 H200 | dtype=float32 peak_tflops=None
--n_head 2                         | 1  1      | n_head=2 n_kv_head=2
--model llama3-8b --n_head 64      | 1  1      | n_kv_head=8
--config {c}/gpt2-124m.json        | 8  8      | grad_accum_steps=5 tokens_per_step=491520
--config {c}/olmo-1b.json          | 64 8      | grad_accum_steps=4 tokens_per_step=4194304
--config {c}/llama3-8b.json        | 64 8      | grad_accum_steps=8 tokens_per_step=4194304
"""


@pytest.mark.parametrize("row", RUNS.splitlines())
def test_a_run_follows_from_flags_ranks_and_hardware(row):
    text, place, values = (cell.strip() for cell in row.split("|"))
    text = text.format(c=ROOT / "configs")
    size, local_size, *gpu = place.split()
    world = {"size": int(size), "local_size": int(local_size), "has_bfloat16": bool(gpu)}
    world["device_name"] = " ".join(["NVIDIA", *gpu])
    if values == "refused":
        with pytest.raises(ValueError) as refused:
            resolve(text, **world)
        assert refused.value.exit_status == 2
        return
    run = resolve(text, **world)
    names = [value.partition("=")[0] for value in values.split()]
    assert [f"{name}={getattr(run, name)}" for name in names] == values.split()


def test_the_reference_lists_the_kinds_of_flags():
    table = (ROOT / "docs/reference.md").read_text().partition("## Resuming")[2]
    for kind in ("part", "once"):
        (row,) = re.findall(rf"^\| {kind} \| (.*?) \|", table, re.M)
        expected = {name for name, its_kind in KINDS.items() if its_kind == kind}
        assert {*re.findall(r"--(\w+)", row)} == expected - {*SIZE_FLAGS}


# --------------------------------------------------------------------------------------------------
# Processes -> ranks


def listen_with(variables: dict[str, str], argv: list[str]) -> tuple:
    """Run a command without torchrun, in an environment with these variables."""
    with mock.patch.dict(os.environ, variables):
        return listen(argv)


@pytest.mark.parametrize("variable", ["WORLD_SIZE=8", "SLURM_NTASKS=8", "WORLD_SIZE=1"])
def test_one_of_several_processes_without_torchrun_is_refused(pool, tokens, tmp_path, variable):
    """Otherwise `srun -n 8 python train.py` would become eight runs of one process."""
    argv = flags(f"--data {tokens} --out {tmp_path}/run --max_steps 1")
    name, _, number = variable.partition("=")
    ((status, _, err),) = pool(1, listen_with, {name: number}, argv)
    assert (status, err.count("\n")) == ((0, 0) if number == "1" else (2, 1))
    assert (tmp_path / "run").exists() == (number == "1")


# --device, GPUs of the host, LOCAL_RANK | device
DEVICES = """\
auto 8 3 | cuda:3
cuda 8 3 | cuda:3
cpu  8 3 | cpu
auto 0 3 | cpu
auto 4 4 | refused
cuda 0 0 | refused
"""


@pytest.mark.parametrize("row", DEVICES.splitlines())
def test_each_rank_gets_its_own_gpu(monkeypatch, row):
    name, gpus, local_rank, _, device = row.split()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(gpus))
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    if device == "refused":
        with pytest.raises(dist.MeshError):
            dist.find_device(name)
    else:
        assert dist.find_device(name) == torch.device(device)


def join_twice(variables: dict[str, str]) -> None:
    """Look for the store of torchrun, and again after a restart."""
    os.environ |= variables | {"TORCHELASTIC_RESTART_COUNT": "0"}
    port = int(variables["MASTER_PORT"])
    server = torch.distributed.TCPStore("127.0.0.1", port, is_master=True)  # noqa: F841

    def find_store() -> torch.distributed.Store:
        store, rank, size = dist.find_ranks(timedelta(seconds=5))
        assert (rank, size) == (0, 2)
        return store

    find_store().set("address", "of the first")
    assert find_store().check(["address"])
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    assert not find_store().check(["address"])


def test_ranks_that_torchrun_restarts_do_not_read_the_addresses_of_dead_ones(pool):
    pool(1, join_twice, variables(0, 2, free_port()) | {"TORCHELASTIC_USE_AGENT_STORE": "True"})


def wait_for_neighbours() -> float:
    """The seconds for which rank 0 waits for the others of its groups, which are not there."""
    world = dist.start("cpu", timedelta(seconds=1))
    mesh = dist.make_mesh(world, (2, 2, 1))
    groups = [mesh.get_group(axis) for axis in ("dp_replicate", "dp_shard")]
    for group in groups:
        torch.distributed.all_reduce(torch.ones(1), group=group)  # connects its ranks
    began = time.monotonic()
    if world.rank == 0:
        for group in groups:
            with pytest.raises(RuntimeError):
                torch.distributed.all_reduce(torch.ones(1), group=group)
    else:
        time.sleep(8)  # a rank that ends would end the wait
    return time.monotonic() - began


def test_the_groups_of_a_mesh_have_the_timeout_of_the_world(pool):
    waited, *_ = pool(4, wait_for_neighbours, timeout=20)
    assert 2 <= waited < 7


# --------------------------------------------------------------------------------------------------
# A model on the mesh


def dtype_of_rotations(argv: list[str]) -> torch.dtype:
    """The dtype of the RoPE table that a block wrapped by FSDP gets."""
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
    """The bytes of all weights, and {(address, bytes)} of the gradients after each of two steps."""
    run = build_run(argv)
    found = []
    for step in (1, 2):
        train_step(run, step)
        storages = [weight.grad.untyped_storage() for weight in run.state.decoder.parameters()]
        found.append({(storage.data_ptr(), storage.nbytes()) for storage in storages})
    return 4 * run.state.decoder.parameter_count(), found


def test_ddp_accumulates_gradients_only_in_its_bucket(on_ranks):
    """It has its final bucket since `warm_up`: one for 20 gradients."""
    for weights, (first, second) in on_ranks(2, gradient_storages, "--strategy ddp"):
        assert first == second and [size for _, size in first] == [weights]


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
# Ends


class TwoArguments(ValueError):
    exit_status = 2

    def __init__(self, disk: str, problem: str):
        super().__init__(f"{disk} {problem}")


def outcome(endings: list[str], only_rank0: bool) -> str:
    """What this rank returns or raises, if each rank has its own ending."""

    class Local(Exception):
        """An error that cannot be pickled."""

    world = dist.start("cpu", timedelta(seconds=9))
    found = {"system": OSError("full"), "two": TwoArguments("disk", "full"), "local": Local("full")}

    def work() -> str:
        ending = endings[world.rank]
        if ending in found:
            raise found[ending]
        return f"rank {world.rank} is {ending}"

    try:
        return dist.on_rank0(work) if only_rank0 else dist.on_all_ranks(work)[world.rank]
    except Exception as error:
        return f"{type(error).__name__} {getattr(error, 'exit_status', '-')}: {error}"


# where, endings of both ranks | what rank 0 gets | what rank 1 gets
OUTCOMES = """\
on_all_ranks fine  fine   | rank 0 is fine            | rank 1 is fine
on_all_ranks fine  system | RankError 1: rank 1: full | OSError -: full
on_all_ranks two   local  | TwoArguments 2: disk full | RankError 2: rank 0: disk full
on_all_ranks local system | Local -: full             | RankError 1: rank 0: full
on_rank0     fine  local  | rank 0 is fine            | rank 0 is fine
on_rank0     two   fine   | TwoArguments 2: disk full | RankError 2: rank 0: disk full
"""


@pytest.mark.parametrize("row", OUTCOMES.splitlines())
def test_an_error_on_one_rank_is_raised_on_all(pool, row):
    case, *expected = (cell.strip() for cell in row.split("|"))
    where, *endings = case.split()
    assert pool(2, outcome, endings, where == "on_rank0", timeout=8) == expected


def fail_in_a_group() -> list:
    """What ranks 1 and 2 gather in a subgroup, and the error when rank 2 fails in it."""
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


ENDS = [
    (errors.UsageError("--lr is too high"), 2),
    (dist.RankError("rank 1: no memory is left", 1), 1),
    (OSError(28, "No space left"), 1),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1),
    (ModuleNotFoundError("No module named 'wandb'", name="wandb"), 1),
    (KeyboardInterrupt(), 130),
    (ZeroDivisionError("a bug"), None),
]


@pytest.mark.parametrize("error, status", ENDS)
def test_an_expected_error_gives_one_line_and_a_status(capsys, error, status):
    """An unexpected one is raised. Ctrl-C prints nothing."""

    def fail() -> None:
        raise error

    if status is None:
        with pytest.raises(type(error)):
            errors.execute("prog", fail)
        return
    assert errors.execute("prog", fail) == status
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 0 if status == 130 else 1)
    assert err == "" or str(error) in err
