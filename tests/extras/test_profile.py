"""--profile START:STOP: a trace and figures of each rank, and the same numbers as without."""

import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import ROOT, cells, read_rows, run_command
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.modules.module import register_module_forward_pre_hook

from extras.profile import HostSyncCounter, Profiler


def run_with(argv: list[str], at_pass: Callable[[int], None]) -> tuple[int, str, str]:
    """Train; call at_pass(n) in forward pass n of the training."""
    passes = itertools.count(1)

    def see(module: torch.nn.Module, inputs: tuple) -> None:
        is_real = isinstance(module, torch.nn.Embedding) and not inputs[0].is_meta
        if is_real and torch.is_grad_enabled():
            at_pass(next(passes))

    with register_module_forward_pre_hook(see):
        return run_command(argv)


def disturb(n: int) -> None:
    """From pass 4 on, each pass has a host sync, and rank 1 sleeps in two of them."""
    if n > 3:
        torch.ones(()).item()  # here
    if n in (4, 5) and os.environ.get("RANK") == "1":
        time.sleep(0.7)


def test_a_window_is_traced_on_every_rank_and_changes_no_number(on_ranks, train, tmp_path):
    flags = "--strategy fsdp --wrap block --dtype bfloat16 --max_steps 6"
    plain = train(2, flags, "plain")
    (status, _, error), _ = on_ranks(2, run_with, f"{flags} --profile 3:5", disturb)
    assert (plain.status, status) == (0, 0), error
    rows = read_rows(tmp_path / "run/metrics.jsonl")
    assert [row["loss"] for row in rows] == [row["loss"] for row in plain.rows()]
    lines = Path(__file__).read_text().splitlines()
    (here,) = [number for number, line in enumerate(lines, 1) if line.endswith("# here")]
    for rank in range(2):
        figures = json.loads((tmp_path / f"run/profile/rank_{rank}.json").read_text())
        trace = json.loads((tmp_path / f"run/profile/rank_{rank}.trace.json").read_text())
        reference = (ROOT / "docs/reference.md").read_text()
        assert [name for name in figures if f"`{name}`" not in reference] == []
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
        assert names.count("aten::embedding") == 2  # one forward pass per step
        assert figures["steps"] == [4, 5]
        assert figures["host_syncs"] == {f"{Path(__file__).name}:{here}": 1}
        sent = {}
        for row in figures["communicated"]:
            sent[row["kind"], row["axis"]] = row["calls"], row["bytes"], row["dtypes"]
        assert sent == {
            # Of 28,832 parameters, the 9,280 of the first block are gathered once more.
            ("all_gather", "dp_shard"): (4, 2 * (28_832 + 9280), ["bfloat16"]),
            ("reduce_scatter", "dp_shard"): (3, 4 * 28_832, ["float32"]),
            # The squared norms of 20 gradients: the axis has the group of all ranks.
            ("all_reduce", "dp_shard"): (1, 4 * 20, ["float32"]),
        }
        shares = [figures[name] for name in ("busy", "exposed_communication")]
        assert all(0 <= share <= 1 for share in shares)
        assert sum(shares) < 1.1  # the rest went to other processes
        waits, sleeps = figures["waited"]
        assert waits > max(0.4, sleeps)  # rank 1 waits as well on a busy machine
        exposed = figures["exposed_communication"] * figures["step_time"]
        assert exposed == pytest.approx([waits, sleeps][rank])


@pytest.mark.parametrize("window", ["3", "3:3", "3:5", "1:3:4"])
def test_a_window_that_a_run_of_five_steps_does_not_have_is_refused(train, window):
    assert train(1, f"--profile {window}").status == 2


def test_a_run_continued_inside_the_window_is_not_profiled(train):
    assert train(1, "--max_steps 3 --schedule constant").status == 0
    run = train(1, "--max_steps 6 --schedule constant --profile 2:5")
    assert run.status == 0, run.error
    assert not (run.out / "profile").exists()


def test_a_blocking_copy_between_devices_is_a_host_sync():
    on_host, on_device = torch.zeros(3), torch.zeros(3, device="meta")
    with HostSyncCounter() as syncs:
        on_host.to("meta", non_blocking=True)
        on_device.copy_(on_host, non_blocking=True)
        on_host.to(torch.float64).copy_(on_host)
    assert not syncs.counts
    with HostSyncCounter() as syncs:
        on_host.to("meta")
        on_device.copy_(on_host)
    assert [*syncs.counts.values()] == [1, 1]


# device | name | begin | end, in microseconds | whether the host has annotated a range
EVENTS = """
CPU  | aten::mm                         |   0 |   50 |
CUDA | sm90_gemm                        |   0 |  400 |
CUDA | ncclDevKernel_AllGather_RING_LL  | 300 |  600 |
CUDA | Memcpy_HtoD                      | 700 |  800 |
CUDA | FSDP::all_gather                 |   0 | 1000 | yes
CUDA | nccl:_all_gather_base            | 300 |  600 | yes
"""


def event(device: str, name: str, begin: str, end: str, annotated: str) -> FunctionEvent:
    kind = getattr(torch.autograd.DeviceType, device)
    options = dict(device_type=kind, is_user_annotation=bool(annotated))
    return FunctionEvent(0, name, 1, int(begin), int(end), **options)


def test_annotated_ranges_of_a_gpu_do_not_count_as_work(one_rank, tmp_path):
    """It works from 0 to 600 us and from 700 to 800 us; only NCCL runs from 400 to 600 us."""
    profiler = Profiler((3, 4), tmp_path, SimpleNamespace(device_type="cuda"), str, [])
    profiler.trace = SimpleNamespace(events=lambda: [event(*row) for row in cells(EVENTS)])
    assert profiler.busy_and_exposed(1e-3, 1e-3) == pytest.approx((7e-4, 2e-4))


# --------------------------------------------------------------------------------------------------
# On a GPU


def forbid_syncs(n: int) -> None:
    """Of steps of four passes, allow no sync in steps 4 to 6: the first steps allocate."""
    modes = {13: "error", 25: "default"}
    if n in modes:
        torch.cuda.set_sync_debug_mode(modes[n])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("flags", ["--strategy single", "--strategy fsdp --clip adaptive"])
def test_a_step_on_cuda_does_not_synchronise_and_its_profile_is_plausible(
    on_ranks, tmp_path, flags
):
    """tests/core counts on CPUs. Statistics, which wait, are off."""
    flags += " --device cuda --micro_batch_size 1 --global_batch_size 4 --max_steps 7"
    ((status, _, error),) = on_ranks(1, run_with, f"{flags} --profile 0:2", forbid_syncs)
    assert status == 0, error
    figures = json.loads((tmp_path / "run/profile/rank_0.json").read_text())
    assert 0 < figures["busy"] <= 1
    assert not figures["host_syncs"]
