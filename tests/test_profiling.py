"""--profile: a trace for each rank, and correct figures."""

import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from conftest import documented_fields, listen, rows
from torch.autograd.profiler_util import FunctionEvent

import checkpoint
import data
import dist
import optim
from extras import profile as profiling


def profiled(argv: list[str]) -> tuple[int, str, str]:
    """Run train.py; batches take 0.1 s, and from step 4 on, steps have a host sync and a sleep."""
    step, read_ahead = optim.Optimizer.step, data.read_ahead

    def ask(self, number, lr, measure=False):
        if number > 3:
            torch.ones(()).item()  # here
        if int(os.environ["RANK"]) == 1 and 3 < number <= 5:
            threading.Event().wait(0.7)  # time.sleep is patched here
        return step(self, number, lr, measure)

    def wait(*arguments, **options):
        for batch in read_ahead(*arguments, **options):
            threading.Event().wait(0.1)
            yield batch

    with (
        mock.patch.object(optim.Optimizer, "step", ask),
        mock.patch.object(data, "read_ahead", wait),
    ):
        return listen(argv)


def test_a_profile_window_is_traced_on_every_rank(on_ranks, tmp_path):
    text = "--strategy fsdp --max_steps 6 --profile 3:5"
    ((status, out, _), (_, quiet, _)) = on_ranks(2, profiled, text)
    assert (status, quiet) == (0, "")
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
            ("all_reduce", "world"): 1,
        }
        shares = [figures[name] for name in ("busy", "exposed_communication", "data_wait")]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) < 1.1  # the rest went to other processes
        assert figures["host_syncs"] == {f"test_profiling.py:{line}": 1}
        assert figures["data_wait"] * figures["step_time"] > 0.09
        waits, sleeps = figures["waited"]
        assert waits > max(0.4, sleeps)  # rank 1 waits as well on a busy machine
        exposed = figures["exposed_communication"] * figures["step_time"]
        assert exposed == pytest.approx([waits, sleeps][rank])
    assert min(row["data_wait"] for row in rows(tmp_path / "run")) > 0.09
    assert "profile steps 4 to 5, " in out and "4 x all_gather over dp_shard" in out
    assert "host syncs: 1 x test_profiling.py:" in out
    assert "slowest is rank 1: it waited " in out


def communicated_alone() -> dict:
    mesh = dist.make_mesh(dist.start("cpu"), (1, 1, 1))
    with profiling.CommunicationCounter(mesh) as traffic:
        torch.distributed.all_reduce(torch.ones(2), group=mesh.get_group("tp"))
    return traffic.counts


def test_an_axis_of_one_rank_communicates_nothing(pool):
    assert pool(1, communicated_alone) == [{}]


def test_an_operation_without_a_process_group_has_no_group_name():
    assert profiling.group_name(([torch.ones(2)], -1)) is None


def switches(argv: list[str]) -> tuple[int, list]:
    """Run train.py; return (status, what is in flight when the profiler starts and stops)."""
    works, saves, found = [], [], []
    all_reduce, write = torch.distributed.all_reduce, checkpoint.Saver.write

    def late(*args, **options):
        if not options.get("async_op"):
            return all_reduce(*args, **options)
        threading.Event().wait(0.1 * torch.distributed.get_rank())  # longer than a step
        works.append(all_reduce(*args, **options))
        return works[-1]

    def slow(saver, *save):
        saves.append("a save")
        threading.Event().wait(0.2)
        write(saver, *save)
        saves.pop()

    def in_flight() -> list[str]:
        return [str(work) for work in works if not work.is_completed()] + saves

    class Switch(torch.profiler.profile):
        def start(self):
            found.append(in_flight())
            super().start()

        def stop(self):
            found.append(in_flight())
            super().stop()

    with (
        mock.patch("torch.distributed.all_reduce", late),
        mock.patch.object(checkpoint.Saver, "write", slow),
        mock.patch.object(profiling, "profile", Switch),
    ):
        status, *_ = listen(argv)
    return status, found


def test_the_profiler_starts_and_stops_with_nothing_in_flight(on_ranks, tmp_path):
    text = "--max_steps 6 --profile 2:3 --strategy ddp --async_save --save_interval 2"
    assert on_ranks(2, switches, f"{text} --log_interval 10") == [(0, [[], []])] * 2
    assert len(list(tmp_path.glob("run/profile/*"))) == 4


def test_a_run_continued_inside_the_window_is_not_profiled(run):
    run(1, "--max_steps 4 --save_interval 4")
    out = run(1, "--max_steps 9 --profile 2:6")
    assert not (out / "profile").exists()


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


def test_overlapping_spans_count_once():
    for spans, length in (([], 0), ([(0, 2), (1, 3)], 3), ([(0, 9), (1, 2), (3, 4)], 9)):
        events = [event("CUDA", "sm90_gemm", start, end) for start, end in spans]
        assert profiling.covered_seconds(events) == pytest.approx(length / 1e6)


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
    profiler = profiling.Profiler((3, 4), tmp_path, mesh, lambda line: None, [], lambda: 0.0)
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
    ((status, _, _),) = on_ranks(1, profiled, "--max_steps 8 --profile 3:6 --device cuda")
    figures = json.loads((tmp_path / "run/profile/rank_0.json").read_text())
    assert status == 0 and 0 < figures["busy"] <= 1
    assert any("test_profiling.py" in place for place in figures["host_syncs"])
