"""--profile: host syncs, waits and communication are those of the steps."""

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
from conftest import documented_fields, listen
from torch.autograd.profiler_util import FunctionEvent

import dist
from errors import UsageError
from extras import profile as profiling


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
    text = "--strategy fsdp --max_steps 6 --profile 3:5"
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
        assert figures["host_syncs"] == {f"test_profiling.py:{line}": 1}
        waits, sleeps = figures["waited"]
        assert waits > max(0.4, sleeps)  # rank 1 waits as well on a busy machine
        exposed = figures["exposed_communication"] * figures["step_time"]
        assert exposed == pytest.approx([waits, sleeps][rank])


def test_an_axis_of_one_rank_communicates_nothing(one_rank):
    mesh = dist.make_mesh(one_rank, (1, 1, 1))
    with profiling.CommunicationCounter(mesh) as traffic:
        torch.distributed.all_reduce(torch.ones(2), group=mesh.get_group("tp"))
    assert traffic.counts == {}


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


def test_a_run_continued_inside_the_window_is_not_profiled(run):
    run(1, "--max_steps 4 --save_interval 4")
    out = run(1, "--max_steps 9 --profile 2:6")
    assert not (out / "profile").exists()


@pytest.mark.parametrize("text", ["3", "3:3", "a:b", "-1:3", "3:9"])
def test_a_window_that_no_run_of_nine_steps_has_is_refused(text):
    with pytest.raises(UsageError):
        profiling.parse_window(text, 9)


# --------------------------------------------------------------------------------------------------
# The figures of a GPU, from events as torch's profiler would return them for one step


def event(device: str, name: str, start: int, end: int, annotation: bool = False) -> FunctionEvent:
    """An event of torch's profiler; times in microseconds."""
    return FunctionEvent(
        id=start,
        name=name,
        thread=1,
        start_us=start,
        end_us=end,
        stack=[],
        use_device="cuda",
        device_type=getattr(torch.autograd.DeviceType, device),
        is_user_annotation=annotation,
    )


STEP = [  # of 1,000 microseconds
    event("CPU", "aten::mm", 0, 50),
    event("CPU", "Optimizer.step#AdamW.step", 50, 90, annotation=True),
    event("CUDA", "sm90_gemm", 0, 400),
    event("CUDA", "ncclDevKernel_AllGather_RING_LL", 300, 600),
    event("CUDA", "Memcpy HtoD (Pinned -> Device)", 700, 800),
    event("CUDA", "FSDP::all_gather (blocks.0)", 0, 1000, annotation=True),
    event("CUDA", "nccl:_all_gather_base", 300, 600, annotation=True),
    event("CUDA", "Optimizer.step#AdamW.step", 650, 1000, annotation=True),
]


def test_annotated_ranges_of_a_gpu_do_not_count_as_work(monkeypatch, tmp_path, one_rank):
    """The GPU works from 0 to 600 us and from 700 to 800 us; only NCCL runs from 400 to 600 us."""
    trace = mock.Mock(**{"events.return_value": STEP})
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


def test_a_blocking_copy_between_devices_is_a_host_sync():
    on_host, on_device = torch.zeros(3), torch.zeros(3, device="meta")
    with profiling.HostSyncCounter() as syncs:
        on_host.to("meta")
        on_device.copy_(on_host)
        on_host.to("meta", non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)
        on_host.to(torch.float64).copy_(on_host)
    assert list(syncs.counts.values()) == [1, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_profile_of_a_gpu_has_plausible_figures(on_ranks, tmp_path):
    ((status, _),) = on_ranks(1, profiled, "--max_steps 8 --profile 3:6 --device cuda")
    figures = json.loads((tmp_path / "run/profile/rank_0.json").read_text())
    assert status == 0 and 0 < figures["busy"] <= 1
    assert any("test_profiling.py" in place for place in figures["host_syncs"])
