"""What earlier code saved loads on any mesh, and continues with the numbers it had.

meshes_2026_11_22/ has a checkpoint of step 2 of each mesh and format, all of one configuration, and
the losses and gradient norms of the runs of test_parity.py. They stay until the numbers change for
a reason.
"""

import base64
import shutil
import zlib
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


# --------------------------------------------------------------------------------------------------
# The first of them

SAVED_RUN = Path(__file__).parent / "saved_run_2026_11_22"

# The .metadata of a checkpoint with one tensor, pickled by Python 3.13.0: a path in it is one of
# pathlib._local, a module that 3.11 and 3.12 do not have.
METADATA_OF_PYTHON_3_13 = """
eNp9kktv00AUhQN5GEiDEC0/AAlEu4ix27RqVwiVgqIqadR2i0Zjz3U8xPEYz7gvqRIsskC6uw7/lxnn4UgIvLKvvznnnjv3
R+P3t3qtfPCtEnkYu4xLlfOgUMDcMIZwkgmeKncKijKqqMYng+Xrg975qe/1Nm5KRRUQxkNFVuC9xtY18HGsdFzDV5eQSpFf
GBM6hr8lnmW5yCBXHKTFX8zxUVUsyW1sll1qdKJEULW3a+q4Oe9cQs5pwu+o4iLV2CZjUCSht6JQluosKJOOAdMzfa5/Gact
MjgZkM9n54OPl+RkeHz2qT/8YvjTWkkoHWBD8jvQK+vGhf00RH1WqmArjIt0IvVX2/nWsf34Z05HRJEEZUK+tg7l+abVLysL
xSKgRSBxI0tomkJOFvOMndiZaVOXc/VVvYadpVM/ZXBT2dWj72l1D9jk5e/TGrbmfay1UQT47r8rEPEE5K1UMNW4QRYJ+2kk
KrtODokZ/xWQjKrYYsQjXikYZjr+YI0TSMfm32CnVWZcZrF7Y5O010a3Jlz1QTjT+NzqJzxwSSJCmmh8OhKS34ys64PhH73X
WFfTTOPjcGInPKWJodqVjNT40iwDZF1v/viu5ZW9EEdSE8H6vPH2/YP9Hj3qBlEUdHse+N3D3iHrHkV7jIY+9UPPYI5ZRmYP
DNGZClaYQZltMBN1riCX5To2fddzPVNz/wAKwlh5
"""


def test_metadata_of_other_versions_of_python_is_read(tmp_path):
    of_3_11 = (SAVED_RUN / "run/checkpoints/step-00000004/.metadata").read_bytes()
    of_3_13 = zlib.decompress(base64.b64decode(METADATA_OF_PYTHON_3_13))
    for pickled, tensor in ((of_3_11, "model.norm.weight"), (of_3_13, "weight")):
        (tmp_path / ".metadata").write_bytes(pickled)
        metadata = checkpoint.Reader(tmp_path).metadata
        assert tensor in metadata.state_dict_metadata
        assert isinstance(metadata.storage_meta.checkpoint_id, Path)


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
    assert checkpoint.read_manifest(last_checkpoint(out))["format"] == 1  # as its own, without one
    for key in ("loss", "grad_norm", "lr", "skipped_steps"):
        assert [row[key] for row in after] == pytest.approx([row[key] for row in before], rel=1e-5)
