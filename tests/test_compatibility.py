"""What earlier code saved can still be read, and a run continues with the same numbers.

meshes_2026_11_22/ contains the checkpoints of step 2 on three meshes with one configuration, and
the losses and gradient norms of the runs of test_parity.py. Do not replace these files unless the
numbers change for a reason.
"""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import call_train, command, last_checkpoint, rows, tensors

import checkpoint

SAVED = Path(__file__).parent / "meshes_2026_11_22"


def test_an_old_checkpoint_of_every_mesh_can_be_read():
    expected = tensors(SAVED / "full")
    assert len(expected) > 30
    for mesh in ("fsdp_2", "fsdp_2_tp_2"):
        torch.testing.assert_close(tensors(SAVED / mesh), expected, rtol=0, atol=0, equal_nan=True)


def test_verify_reports_an_old_manifest_without_a_checksum():
    path = SAVED / "full"
    unchanged, unchecked = f"{path}: complete and unchanged: 2 files", "it cannot be checked\n"
    status, said, error = command("verify", path)
    assert (status, error) == (0, "")
    assert said.startswith(unchanged) and said.endswith(unchecked) and said.count("\n") == 2


SAVED_RUN = Path(__file__).parent / "saved_run_2026_11_22"


@pytest.mark.parametrize("strategy, ranks", [("fsdp", 2), ("single", 1)])
def test_an_old_run_continues_with_the_same_losses(pool, tmp_path, strategy, ranks):
    """The names inside checkpoints and manifests may not change.

    The run used fsdp on two ranks and was saved at step 4 of 8.
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
