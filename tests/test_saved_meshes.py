"""What every mesh computed and saved on 2026-11-22 is what it computes, and loads on any other.

meshes_2026_11_22/ has a checkpoint of step 2 of each mesh and format, all of one configuration, and
the losses and gradient norms of the runs of test_parity.py. They stay until the numbers change for
a reason.
"""

from pathlib import Path

import pytest
import torch
from conftest import build_run, call_train, rows, tensors

import checkpoint

SAVED = Path(__file__).parent / "meshes_2026_11_22"
CHECKPOINTS = sorted(path.parent for path in SAVED.glob("*/manifest.json"))
FLAGS = (
    "--model tinyllama-1.1b --n_layer 1 --n_head 4 --n_kv_head 2 --d_model 8 --d_ff 16 "
    "--seq_len 16 --global_batch_size 8 --sample_tokens 0 --eval_sequences 1 --device cpu "
    "--dtype float32 --lr 3e-3 --warmup_steps 1 --clip adaptive --log_interval 1"
)
LOSS_OF_STEP_3 = 5.719810485839844


def load_all(argv: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The full tensors of each saved checkpoint, loaded on this mesh."""
    run = build_run(argv)
    found = {}
    for path in CHECKPOINTS:
        checkpoint.load_state(path, run.state)
        found[path.name] = {}
        for name, tensor in checkpoint.flatten(run.state):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[path.name][name] = whole.clone()
    return found


@pytest.mark.parametrize("ranks, mesh", [(1, "single"), (4, "fsdp --tp 2")])
def test_a_checkpoint_of_every_mesh_loads(pool, tokens, tmp_path, ranks, mesh):
    argv = f"{FLAGS} --data {tokens} --out {tmp_path}/run --max_steps 3 --strategy {mesh}".split()
    expected = tensors(SAVED / "single")
    assert len(CHECKPOINTS) == 11 and len(expected) > 40
    for found in pool(ranks, load_all, argv):
        for state in found.values():
            torch.testing.assert_close(state, expected, rtol=1e-3, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", ["single", "fsdp_2_tp_2", "full_tp"])
def test_a_run_of_another_mesh_goes_on(pool, tokens, tmp_path, name):
    text = f"{FLAGS} --data {tokens} --out {tmp_path}/run --max_steps 3 --resume {SAVED / name}"
    assert pool(1, call_train, [*text.split(), "--allow_changes"]) == [0]
    (row,) = rows(tmp_path / "run")
    assert row["step"] == 3
    assert row["loss"] == pytest.approx(LOSS_OF_STEP_3, rel=1e-5)
