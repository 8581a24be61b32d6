"""tools/check.py: clean ranks pass, and each planted fault is reported."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from rig import arguments, copy_with, run_command, torchrun

from model import Transformer
from tools import check

DDP = "--n_layer 3 --micro_batch_size 2 --strategy ddp"


def test_clean_ranks_pass(pool, tokens, tmp_path):
    argv = arguments(tokens, tmp_path / "work", DDP)
    answers = pool(2, run_command, argv, check.main, timeout=120)
    (status, printed, _), (_, quiet, _) = answers
    assert (status, quiet) == (0, ""), printed
    assert not list((tmp_path / "work").iterdir())
    rows = re.findall(r"^(\w.*?)  +([\d.e+-]+) +([\d.e+-]+)$", printed, re.M)
    table = {name: (float(value), float(limit)) for name, value, limit in rows}
    # The limits are 8 times the effect of one ulp in the float32 weights.
    for name, least in check.LEAST[torch.float32].items():
        value, limit = table[f"{name}, mesh and one rank, relative"]
        assert value <= limit and least <= limit < 1e-4
        assert table[f"{name}, resumed and not, relative"] == (0, 0)
    assert len(table) == 10


def check_with_syncs(argv: list[str]) -> tuple[int, str, str]:
    """Run tools.check of a model that waits for its logits where there are two ranks."""

    def wait(module: torch.nn.Module, inputs: tuple, loss: torch.Tensor) -> None:
        is_real = isinstance(module, Transformer) and not loss.is_meta
        if is_real and "RANK" in os.environ and torch.distributed.get_backend() != "fake":
            loss.sum().item()

    with torch.nn.modules.module.register_module_forward_hook(wait):
        return run_command(argv, check.main)


def test_a_step_that_waits_for_its_device_does_not_pass(pool, tokens, tmp_path):
    argv = arguments(tokens, tmp_path / "work", DDP)
    (status, printed, _), _ = pool(2, check_with_syncs, argv, timeout=120)
    assert status == 1
    (wrong,) = [line for line in printed.splitlines() if "  FAIL" in line]
    assert wrong.startswith("host syncs in a step")


# --------------------------------------------------------------------------------------------------
# Faults, planted in a copy of the project. Each one leaves the rehearsal alone, or does not show.

MESH = 'torch.distributed.get_world_size() > 1 and torch.distributed.get_backend() != "fake"'
STEP = "    update, rows = state.optimizer.step("
BACKWARD = "micro_loss.backward()  #"
TENSORS = '    tensors = {"model": {name'
Q = "decoder.blocks[0].attention.q.weight"

# Name -> ranks, flags, file, old text, new text, parts of rows that are wrong
FAULTS = {
    "a step sends more and a rank waits": (
        *(2, DDP, "train.py", STEP),
        f"    if {MESH}:\n        torch.distributed.all_reduce(torch.ones(25))\n"
        f"        torch.distributed.get_rank() == 1 and loss.item()\n{STEP}",
        ["bytes .*  100 .*.100 of all_reduce over dp_replicate", "host syncs .*FAIL train.py:"],
    ),
    "moments are not loaded": (
        *(1, DDP.replace("ddp", "single"), "checkpoint.py"),
        "    for name, tensor in flatten(state):\n        reader.fill",
        "    for name, tensor in flatten({'model': state['model']}):\n        reader.fill",
        ["losses, resumed"],
    ),
    "weights only decay": (
        *(1, DDP.replace("ddp", "single"), "optim.py"),
        *("lr=update.lr,\n            weight_decay", "lr=1e-9,\n            weight_decay"),
        ["loss, second", "parameters that only decay  +20 "],
    ),
    "a gradient in bfloat16 is 5% too large on a mesh": (
        *(2, f"{DDP} --dtype bfloat16", "train.py", TENSORS),
        f"    if {MESH}:\n        {Q}.register_hook(lambda grad: 1.05 * grad)\n{TENSORS}",
        ["gradient, mesh .* 0.0[45].*FAIL blocks.0.attention.q.weight"],
    ),
    "the last micro-batch has another weight": (
        *(2, DDP, "train.py", BACKWARD),
        f"micro_loss = micro_loss * (1.5 if micro_step == n - 1 > 0 and {MESH} else 1)\n"
        f"            {BACKWARD}",
        ["losses, mesh", "grad_norms, mesh", "gradient, mesh"],
    ),
}


def run_check(ranks: int, text: str, folder: Path, tokens: Path, out: Path) -> tuple[int, str]:
    """Run tools.check of the project in `folder`; return its status and what it printed."""
    argv = ["-m", "tools.check", *arguments(tokens, out, text)]
    words = torchrun(2, [], f"--nproc_per_node={ranks}")[:-3]  # without its ranks and script
    answer = subprocess.run([*words, *argv], cwd=folder, capture_output=True, text=True)
    return answer.returncode, answer.stdout


@pytest.mark.slow(proves="the command finds a fault in the code, from start to end")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(tokens, tmp_path, fault):
    ranks, text, *change, expected = FAULTS[fault]
    folder = copy_with(tmp_path / "project", tuple(change))
    status, printed = run_check(ranks, text, folder, tokens, tmp_path / "work")
    assert status == 1, printed
    wrong = "\n".join(line for line in printed.splitlines() if "  FAIL" in line)
    for row in expected:
        assert re.search(f"^{row}", wrong, re.M), printed
    assert list((tmp_path / "work").iterdir())


@pytest.mark.slow(proves="a model with random layers is no false alarm")
def test_a_fork_with_dropout_passes(tokens, tmp_path):
    """tools.check turns dropout off: it would differ from mesh to mesh."""
    mlp = "self.down(F.silu(self.gate(x)) * self.up(x))"
    dropped = ("model.py", f"return {mlp}", f"return F.dropout({mlp}, 0.5, self.training)")
    folder = copy_with(tmp_path / "project", dropped)
    status, printed = run_check(2, DDP, folder, tokens, tmp_path / "work")
    assert status == 0, printed
