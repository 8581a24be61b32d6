"""--profile START:STOP: a trace and figures of each rank, and the same numbers as without."""

import contextlib
import io
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from old import documented_fields, listen
from rig import build_run, train_step
from torch.autograd.profiler_util import FunctionEvent

import dist
from errors import UsageError
from extras import profile as profiling
from log import Log


@pytest.mark.parametrize("ranks, mesh", [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_a_profiled_run_has_the_same_numbers_and_no_host_syncs(train, ranks, mesh):
    flags = f"--strategy {mesh} --dtype bfloat16"
    plain = train(ranks, flags, "plain")
    run = train(ranks, f"{flags} --profile 1:3", "profiled")
    assert (plain.status, run.status) == (0, 0), run.error
    assert [each["loss"] for each in run.rows()] == [each["loss"] for each in plain.rows()]
    for rank in range(ranks):
        figures = json.loads((run.out / f"profile/rank_{rank}.json").read_text())
        assert figures["steps"] == [2, 3]
        assert not figures["host_syncs"]
        for each in figures["communicated"]:
            gathers = each["kind"] == "all_gather"
            assert each["dtypes"] == (["bfloat16"] if gathers else ["float32"])


def profiled(argv: list[str]) -> tuple[int, str]:
    """Train. From step 4 on, steps have a host sync, and rank 1 sleeps in two."""
    steps = []

    def ask(module: torch.nn.Module, inputs: tuple) -> None:
        if not isinstance(module, torch.nn.Embedding) or inputs[0].is_meta:
            return
        if not torch.is_grad_enabled():
            return
        steps.append(module)
        if len(steps) > 3:
            torch.ones(()).item()  # here
        if int(os.environ.get("RANK", 0)) == 1 and 3 < len(steps) <= 5:
            threading.Event().wait(0.7)  # `listen` replaces time.sleep

    with torch.nn.modules.module.register_module_forward_pre_hook(ask):
        status, out, _ = listen(argv)
    return status, out


def test_a_profile_window_is_traced_on_every_rank(on_ranks, tmp_path):
    text = "--strategy fsdp --wrap block --max_steps 6 --profile 3:5"
    (status, out), _ = on_ranks(2, profiled, text)
    assert status == 0
    source = Path(__file__).read_text().splitlines()
    (line,) = [i for i, text in enumerate(source, 1) if text.endswith("# here")]
    for rank in range(2):
        figures = json.loads((tmp_path / f"run/profile/rank_{rank}.json").read_text())
        trace = json.loads((tmp_path / f"run/profile/rank_{rank}.trace.json").read_text())
        fields = documented_fields("reference.md", "field of `rank_N.json` | meaning")
        assert figures.keys() == fields
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
        assert names.count("aten::embedding") == 2  # one forward pass per step
        sent = {(row["kind"], row["axis"]): row["calls"] for row in figures["communicated"]}
        assert sent == {
            ("all_gather", "dp_shard"): 4,
            ("reduce_scatter", "dp_shard"): 3,
            ("all_reduce", "dp_shard"): 1,  # an axis of all ranks has the group of the world
        }
        shares = [figures[name] for name in ("busy", "exposed_communication")]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) < 1.1  # the rest went to other processes
        assert figures["host_syncs"] == {f"{Path(__file__).name}:{line}": 1}
        waits, sleeps = figures["waited"]
        assert waits > max(0.4, sleeps)  # rank 1 waits as well on a busy machine
        exposed = figures["exposed_communication"] * figures["step_time"]
        assert exposed == pytest.approx([waits, sleeps][rank])


# --------------------------------------------------------------------------------------------------
# The window


@pytest.mark.parametrize("text", ["3", "3:3", "a:b", "-1:3", "3:9"])
def test_a_window_that_no_run_of_nine_steps_has_is_refused(text):
    with pytest.raises(UsageError):
        profiling.parse_window(text, 9)


def test_a_run_continued_inside_the_window_is_not_profiled(train):
    assert train(1, "--max_steps 4 --schedule constant").status == 0
    run = train(1, "--max_steps 9 --schedule constant --profile 2:6")
    assert run.status == 0, run.error
    assert not (run.out / "profile").exists()


class Work:
    """A collective in flight, or a save."""

    def __init__(self):
        self.waited = []

    def wait(self) -> None:
        self.waited.append(torch.autograd.profiler._is_profiler_enabled)


def test_the_profiler_starts_and_stops_with_nothing_in_flight(one_rank, tmp_path):
    """It waits before it starts, while it does not run yet, and before it stops."""
    mesh, work = dist.make_mesh(one_rank, (1, 1, 1)), Work()
    with contextlib.redirect_stdout(io.StringIO()):
        profiler = profiling.Profiler((2, 3), tmp_path / "profile", mesh, print, [work])
        for step in range(1, 6):
            with profiler.step(step):
                pass
    assert work.waited == [False, True]
    assert len(list(tmp_path.glob("profile/*"))) == 2


# --------------------------------------------------------------------------------------------------
# Counters, and the figures of a GPU


def test_an_axis_of_one_rank_communicates_nothing(one_rank):
    mesh = dist.make_mesh(one_rank, (1, 1, 1))
    with profiling.CommunicationCounter(mesh) as traffic:
        torch.distributed.all_reduce(torch.ones(2), group=mesh.get_group("tp"))
    assert traffic.counts == {}


def test_a_blocking_copy_between_devices_is_a_host_sync():
    on_host, on_device = torch.zeros(3), torch.zeros(3, device="meta")
    with profiling.HostSyncCounter() as syncs:
        on_host.to("meta", non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)
        on_host.to(torch.float64).copy_(on_host)
    assert not syncs.counts
    with profiling.HostSyncCounter() as syncs:
        on_host.to("meta")
        on_device.copy_(on_host)
    assert list(syncs.counts.values()) == [1, 1]


# device, name, begin, end, whether the host has annotated a range: a step of 1,000 microseconds
STEP = """\
CPU  aten::mm                          0   50
CPU  Optimizer.step#AdamW.step        50   90 annotation
CUDA sm90_gemm                         0  400
CUDA ncclDevKernel_AllGather_RING_LL 300  600
CUDA Memcpy_HtoD                     700  800
CUDA FSDP::all_gather                  0 1000 annotation
CUDA nccl:_all_gather_base           300  600 annotation
CUDA Optimizer.step#AdamW.step       650 1000 annotation
"""


def event(line: str) -> FunctionEvent:
    """An event of torch's profiler."""
    device, name, start, end, *annotation = line.split()
    return FunctionEvent(
        id=int(start),
        name=name,
        thread=1,
        start_us=int(start),
        end_us=int(end),
        stack=[],
        use_device="cuda",
        device_type=getattr(torch.autograd.DeviceType, device),
        is_user_annotation=bool(annotation),
    )


def test_annotated_ranges_of_a_gpu_do_not_count_as_work(monkeypatch, tmp_path, one_rank):
    """The GPU works from 0 to 600 us and from 700 to 800 us; only NCCL runs from 400 to 600 us."""
    trace = mock.Mock(**{"events.return_value": [event(line) for line in STEP.splitlines()]})
    monkeypatch.setattr(profiling, "profile", lambda activities: trace)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(profiling.time, "perf_counter", iter([0.0, 1e-3]).__next__)  # seconds
    mesh = SimpleNamespace(device_type="cuda", mesh_dim_names=())
    profiler = profiling.Profiler((3, 4), tmp_path, mesh, lambda line: None, [])
    for step in (4, 5):
        with profiler.step(step):
            pass
    figures = json.loads((tmp_path / "rank_0.json").read_text())
    assert figures["busy"] == pytest.approx(0.7)
    assert figures["exposed_communication"] == pytest.approx(0.2)


# --------------------------------------------------------------------------------------------------
# On a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@needs_gpu
def test_a_profile_of_a_gpu_has_plausible_figures(on_ranks, tmp_path):
    ((status, _),) = on_ranks(1, profiled, "--max_steps 8 --profile 3:6 --device cuda")
    figures = json.loads((tmp_path / "run/profile/rank_0.json").read_text())
    assert status == 0 and 0 < figures["busy"] <= 1
    assert any(Path(__file__).name in place for place in figures["host_syncs"])


def cuda_steps(argv: list[str]) -> int:
    run = build_run(argv)
    log = Log(run.run, run.start.world.device, flops_per_token=1, step=0)
    for step in (1, 2, 3):  # the first steps allocate
        train_step(run, step)
    torch.cuda.set_sync_debug_mode("error")
    for step in (4, 5, 6):
        columns, _ = train_step(run, step)
        log.write_arrived_row()
        log.row(step, step, 0.1, columns, run.state.data_wait)
    torch.cuda.set_sync_debug_mode("default")
    with log.pause():  # which waits for the row
        return 0


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("flags", ["--strategy single", "--strategy fsdp --clip adaptive"])
def test_a_step_on_cuda_does_not_synchronise(on_ranks, flags):
    """tests/core counts on CPUs. Statistics, which wait, are off."""
    text = f"{flags} --micro_batch_size 1 --global_batch_size 4 --device cuda"
    assert on_ranks(1, cuda_steps, text) == [0]
