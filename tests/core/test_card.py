"""The command that people come for, on as many ranks as it says."""

import pytest

from .conftest import Job

SHORT = "--max_steps 30 --warmup_steps 5 --log_interval 10 --sample_tokens 0"


@pytest.mark.slow(proves="the first command, with its default sizes, on eight ranks")
def test_eight_ranks_of_fsdp_train_with_the_defaults(tokens, tmp_path):
    """torchrun --standalone --nproc_per_node 8 train.py --strategy fsdp"""
    flags = f"--strategy fsdp --data {tokens} --out {tmp_path}/run {SHORT}"
    job = Job(8, flags.split(), tmp_path)
    try:
        assert job.wait(300) == 0, job.printed()
    finally:
        job.end()
    losses = [row["loss"] for row in job.rows()]
    assert [row["step"] for row in job.rows()] == [1, 10, 20, 30]
    assert losses[-1] < losses[0] - 1
    assert len([*(tmp_path / "run/checkpoints/step-00000030").glob("rank-*.safetensors")]) == 8
