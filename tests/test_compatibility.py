"""What earlier code saved loads on any mesh, and continues with the numbers it had.

meshes_2026_11_22/ has a checkpoint of step 2 of three meshes, all of one configuration, and the
losses and gradient norms of the runs of test_parity.py. They stay until the numbers change for a
reason.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import build_run, call_train, last_checkpoint, rows, tensors

import checkpoint

SAVED = Path(__file__).parent / "meshes_2026_11_22"
CHECKPOINTS = sorted(path.parent for path in SAVED.glob("*/manifest.json"))
FLAGS = (
    "--model tinyllama-1.1b --n_layer 1 --n_head 4 --n_kv_head 2 --d_model 8 --d_ff 16 "
    "--seq_len 16 --global_batch_size 8 --sample_tokens 0 --eval_sequences 1 --device cpu "
    "--dtype float32 --lr 3e-3 --warmup_steps 1 --clip adaptive --log_interval 1"
)


def load_all(argv: list[str]) -> dict[str, dict[str, torch.Tensor]]:
    """The full tensors of each saved checkpoint, loaded on this mesh."""
    run = build_run(argv)
    found = {}
    for path in CHECKPOINTS:
        checkpoint.load_state(path, run.state.tensors)
        found[path.name] = {}
        for name, tensor in checkpoint.flatten(run.state.tensors):
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            found[path.name][name] = whole.clone()
    return found


@pytest.mark.parametrize("ranks, mesh", [(1, "single"), (4, "fsdp --tp 2")])
def test_a_checkpoint_of_every_mesh_loads(pool, tokens, tmp_path, ranks, mesh):
    argv = f"{FLAGS} --data {tokens} --out {tmp_path}/run --max_steps 3 --strategy {mesh}".split()
    expected = tensors(SAVED / "full")
    del expected["optimizer.window"]  # of a flag that is gone, --skip_spikes
    assert len(CHECKPOINTS) == 3 and len(expected) > 30
    for found in pool(ranks, load_all, argv):
        for state in found.values():
            torch.testing.assert_close(state, expected, rtol=0, atol=0, equal_nan=True)


# --------------------------------------------------------------------------------------------------
# The first of them

SAVED_RUN = Path(__file__).parent / "saved_run_2026_11_22"


@pytest.mark.parametrize("strategy, ranks", [("fsdp", 2), ("single", 1)])
def test_a_run_saved_on_2026_11_22_continues_with_the_losses_it_had(
    pool, tmp_path, strategy, ranks
):
    """Names inside checkpoints and manifests are a contract.

    The run was fsdp on two ranks, saved at step 4 of 8.
    """
    out = tmp_path / "run"
    shutil.copytree(SAVED_RUN / "run", out)
    argv = ["--config", str(out / "config.json"), "--data", str(SAVED_RUN / "tokens")]
    argv += ["--out", str(out), "--strategy", strategy]
    assert pool(ranks, call_train, argv) == [0] * ranks
    before = rows(SAVED_RUN / "run")
    after = rows(out)
    assert [row["step"] for row in after] == list(range(1, 9))
    assert checkpoint.read_manifest(last_checkpoint(out))["format"] == 2
    for key in ("loss", "grad_norm", "lr", "skipped_steps"):
        assert [row[key] for row in after] == pytest.approx([row[key] for row in before], rel=1e-5)
