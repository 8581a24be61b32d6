"""What train.py does with a GPU, in whole runs on the fake ones of fake_cuda.py.

In the steps nothing goes between host and device but batches and rows of the log, nobody waits for
them, and nothing asks for values. The kernels that are strict about their operands, and NCCL, would
take them. What is sent is what the rehearsal says. The groups are those of make_mesh.
"""

import contextlib
import io
import json
import os
import shutil
import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import fake_cuda
import pytest
import torch
from conftest import Pool, flags, free_port

import train
from config import model_config
from runtime import watchdog
from tools import check
from tools.planning.rehearse import make_world, rehearse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="a library is preloaded as Linux does"),
    pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler (c++) here"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch has real CUDA devices"),
]

# (strategy and more, ranks, micro-batches of a rank in a step)
CASES = [
    ("single", 1, 2),
    ("single --dtype float32 --n_kv_head 4", 1, 1),
    ("single --clip adaptive", 1, 1),
    ("single --activation_checkpointing selective", 1, 1),
    ("single --model tinyllama-1.1b --sample_tokens 2", 1, 1),
    ("single --checkpoint sharded --async_save", 1, 1),
    ("single --tp 2 --model tinyllama-1.1b", 2, 1),
    ("ddp --grad_sync micro_batch --clip adaptive", 2, 2),
    ("fsdp --clip adaptive --optim_metrics_interval 2 --loss_chunks 2", 2, 1),
    ("fsdp --reshard_after_forward false --model tinyllama-1.1b", 2, 2),
    ("single --optimizer muon --optim_metrics_interval 2", 1, 1),
    ("ddp --num_workers 1 --optimizer muon", 2, 2),
    ("fsdp --optimizer muon --clip adaptive", 2, 1),
    ("fsdp --n_layer 3 --wrap block_group:2", 2, 1),
    ("fsdp --tp 2 --optimizer muon", 4, 1),
    ("fsdp --tp 2 --checkpoint sharded --async_save --profile 0:1", 4, 1),
    ("hsdp --dp_shard 2 --grad_sync shard", 4, 2),
]
BLOCKS = "to cuda, pageable, blocking"
ASKS = "asks for _local_scalar_dense"
# What the host waits for beside the steps, by (function, what)
COMPARED = ("agreement.py sum_bits", "to cpu, pageable, blocking")
AT_START = {("optim.py __init__", BLOCKS), COMPARED}
EVALUATION = {("train.py evaluate", BLOCKS), ("train.py evaluate", ASKS)}
SAMPLING = {
    ("sample.py generate", BLOCKS),
    ("sample.py generate", "to cpu, pageable, blocking"),
}
SAVING = {
    ("train.py is_finite", ASKS),
    COMPARED,
    ("checkpoint.py blocks", "to cpu, pageable, blocking"),
}
ASYNC_SAVING = {
    ("train.py is_finite", ASKS),
    COMPARED,
    ("saver.py copy_to_host", "to cpu, pinned, blocking"),
}
LOADING = {("checkpoint.py load_state", BLOCKS)}


@dataclass
class Report:
    """What a rank has seen of a case."""

    error: str = ""
    crossings: Counter = field(default_factory=Counter)
    refusals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # of tools.check
    traffic: list = field(default_factory=list)  # [communication, bytes of state] of a step
    rehearsed: list = field(default_factory=list)
    groups: list[tuple] = field(default_factory=list)  # (name, ranks, seconds) of each axis
    connections: int = 0  # to the store


# --------------------------------------------------------------------------------------------------
# In the workers


def play(flags_of: dict, ports_of: dict) -> dict[tuple, Report]:
    """Play this worker's rank in each case; cases of few ranks run side by side."""
    fake_cuda.install()
    worker = int(os.environ["RANK"])
    reports = {}
    for size in (4, 2, 1):
        team, rank = divmod(worker, size)
        for case in [case for case in flags_of if case[1] == size][team :: 4 // size]:
            # Always on the same GPU, since fake tensors remember which one "cuda" was.
            numbers = {"RANK": rank, "LOCAL_RANK": worker}
            numbers |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            os.environ.update({name: str(number) for name, number in numbers.items()})
            report = reports[case, rank] = Report()
            try:
                run_case(report, flags_of[case], ports_of[case])
                if size > 1 and rank == size - 1:
                    config = train.parse(flags_of[case])
                    decoder = model_config(config, 257)
                    world = make_world(rank, size, size, "cuda")
                    found = rehearse(config, world, decoder, 80 << 30)
                    report.rehearsed = [sorted(found.communication, key=repr), found.state]
                    if config.profile:
                        profiled = check.Check("profile")
                        file = Path(config.out, f"profile/rank_{rank}.json")
                        profile = json.loads(file.read_text())
                        check.check_profile(profiled, profile, found.communication)
                        report.problems += profiled.problems
            except BaseException:
                report.error = traceback.format_exc()
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
    return reports


def run_case(report: Report, argv: list[str], ports: list[int]) -> None:
    """Run train.py, and where it saves once more, to go on from the checkpoint.

    The ranks meet on another port then: the first store may still be there, with old addresses.
    """
    fakes = fake_cuda.Fakes()
    gpu = fake_cuda.Gpu(fakes)
    report.crossings, report.refusals = gpu.crossings, gpu.refusals
    build_run, train_step = train.build, train.train_step

    def within(part: str, function):
        def call(*arguments, **options):
            with mock.patch.object(gpu, "part", part):
                return function(*arguments, **options)

        return call

    def build(c, setup, mesh):
        with mock.patch.object(torch.cuda, "empty_cache") as empty_cache:
            state, forward = build_run(c, setup, mesh)
        empty_cache.assert_called_once()  # full tensors leave no gaps behind
        gpu.follow(mesh, setup, state, forward)
        report.groups = [describe(mesh.get_group(axis)) for axis in mesh.mesh_dim_names]
        report.connections = store_connections()
        return state, forward

    def step(forward, optimizer, batches, step, n, grad_sync, measure):
        gpu.part = "loop"
        gpu.forget_counts()
        batches = gpu.batches(batches, [1] * n)
        values = train_step(forward, optimizer, batches, step, n, grad_sync, measure)
        if not measure:  # for which the rehearsal has no step
            report.traffic = [sorted(gpu.communication(), key=repr), gpu.state]
        return values

    patches = mock.patch.multiple(
        train,
        build=build,
        train_step=step,
        evaluate=within("beside", train.evaluate),
        save=within("beside", train.save),
        closing_sample=within("beside", train.closing_sample),
    )
    starts = 1 if train.parse(argv).checkpoint == "none" else 2
    for max_steps, port in [(2, ports[0]), (3, ports[1])][:starts]:
        os.environ["MASTER_PORT"] = str(port)
        gpu.part = "start"
        with patches, fakes, gpu, contextlib.redirect_stdout(io.StringIO()):
            assert train.command([*argv, "--max_steps", str(max_steps)]) == 0


def describe(group: torch.distributed.ProcessGroup) -> tuple:
    timeout = group._get_backend(torch.device("cuda")).options._timeout
    ranks = torch.distributed.get_process_group_ranks(group)
    return group.group_desc, ranks, timeout.total_seconds()


def store_connections() -> int:
    """How many sockets of this process are connected to the store."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    own = {os.readlink(link) for link in links}
    port = f":{int(os.environ['MASTER_PORT']):04X}"
    found = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines():
            columns = line.split()  # of which 2 is the other end and 9 the inode
            found += columns[2].endswith(port) and f"socket:[{columns[9]}]" in own
    return found


# --------------------------------------------------------------------------------------------------
# The cases


class Gpus(Pool):
    start_method = "spawn"  # a library is preloaded when a process starts

    def start(self) -> None:
        preload = {"LD_PRELOAD": str(fake_cuda.library()), "OMP_NUM_THREADS": "1"}
        with mock.patch.dict(os.environ, preload):
            super().start()


@pytest.fixture(scope="module")
def gpus():
    ranks = Gpus()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def reports(gpus, tokens, tmp_path_factory) -> dict[tuple, Report]:
    """The report of each rank of each case."""
    root = tmp_path_factory.mktemp("runs")
    flags_of = {}
    for number, (text, ranks, accum) in enumerate(CASES):
        dp_size = ranks // 2 if "--tp 2" in text else ranks
        few = f"--n_layer 1 --micro_batch_size 1 --global_batch_size {accum * dp_size}"
        few += " --num_workers 0 --eval_sequences 1 --checkpoint none"
        out = f"--device cuda --data {tokens} --out {root}/{number}"
        flags_of[text, ranks, accum] = flags(f"{out} {few} --strategy {text}")
    found = {}
    ports_of = {case: [free_port(), free_port()] for case in CASES}
    for reports in gpus(4, play, flags_of, ports_of, timeout=300):
        found |= reports
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_step_waits_for_nothing_and_each_kernel_takes_it(reports, case):
    text, ranks, accum = case
    for rank in range(ranks):
        report = reports[case, rank]
        assert not report.error, report.error
        assert not report.refusals and not report.problems
        steps = 3 if "--checkpoint" in text else 2
        in_loop = {
            ("train.py __next__", "to cuda, pinned"): steps * accum,
            ("metrics.py send", "to cuda, pinned"): steps,
            ("metrics.py send", "to cpu, pinned"): steps,
        }
        beside = AT_START | EVALUATION
        if "--optim_metrics_interval" in text and rank == 0:
            in_loop["optim.py rows", ASKS] = mock.ANY
        if "--sample_tokens" in text:
            beside |= SAMPLING
        if "--checkpoint" in text:
            beside |= LOADING | (ASYNC_SAVING if "--async_save" in text else SAVING)
        found = {part: {} for part in ("start", "loop", "beside")}
        for (part, *what), times in report.crossings.items():
            found[part][tuple(what)] = times
        assert found["loop"] == in_loop
        assert (found["start"] | found["beside"]).keys() <= beside
    assert report.traffic == report.rehearsed or ranks == 1


def test_make_mesh_names_the_groups_and_gives_them_the_timeout(reports):
    case = CASES[-1]
    seconds = watchdog.SLOW_FACTOR * train.parse([]).timeout
    for rank in range(4):
        report = reports[case, rank]
        replicas, shards = [rank % 2, rank % 2 + 2], [rank // 2 * 2, rank // 2 * 2 + 1]
        ranks_of = {"dp_replicate": replicas, "dp_shard": shards, "tp": [rank]}
        assert report.groups == [(name, ranks, seconds) for name, ranks in ranks_of.items()]
        assert report.connections <= 8  # torchrun's limit of open files is theirs
