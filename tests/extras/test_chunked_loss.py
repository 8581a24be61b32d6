"""--loss_chunks: logits and loss in parts give the numbers of one part, on every mesh."""

import pytest
import torch
from core.conftest import pool, tokens, train  # noqa: F401

from extras.chunked_loss import ChunkedLoss
from model import ModelConfig, Transformer

ROWS = {
    "single": (1, "--strategy single", "--loss_chunks 4"),
    "single, no divisor of the tokens": (1, "--strategy single", "--loss_chunks 7"),
    "ddp 2": (2, "--strategy ddp", "--loss_chunks 2 --micro_batch_size 2"),
    "fsdp 2": (2, "--strategy fsdp", "--loss_chunks 2"),
    "fsdp 2, untied": (2, "--strategy fsdp", "--loss_chunks 3 --model tinyllama-1.1b"),
}


@pytest.mark.parametrize("row", ROWS)
def test_chunks_give_the_numbers_of_one_chunk(train, row):  # noqa: F811
    ranks, mesh, flags = ROWS[row]
    size = "--model tinyllama-1.1b" if "untied" in row else ""
    one = train(1, f"--strategy single --loss_chunks 1 {size}", "one")
    many = train(ranks, f"{mesh} {flags}", "many")
    assert (one.status, many.status) == (0, 0), many.error
    assert len(one.rows()) == 5
    for expected, found in zip(one.rows(), many.rows(), strict=True):
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize("chunks", [1, 3, 5, 16])
def test_the_gradients_are_those_of_one_chunk(chunks):
    config = ModelConfig(64, n_layer=1, n_head=2, n_kv_head=1, d_model=16, d_ff=24, seq_len=8)
    tokens_ = torch.arange(18).view(2, 9) % 64
    found = []
    for each in (1, chunks):
        model = Transformer(config)
        if each > 1:
            model.head.loss = ChunkedLoss(model.head.loss, each)
        for name, parameter in model.named_parameters():
            model.init_tensor(name, parameter, seed=1)
        loss = model(tokens_[:, :-1], tokens_[:, 1:])
        (loss / 2).backward()  # as in a step of two micro-batches
        found.append((loss.item(), [p.grad for p in model.parameters()]))
    (loss, grads), (loss_of_chunks, grads_of_chunks) = found
    assert loss_of_chunks == pytest.approx(loss, rel=1e-6)
    for expected, grad in zip(grads, grads_of_chunks, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-7)
