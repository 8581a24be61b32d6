"""--loss_chunks: logits and loss in parts give the numbers of one part, on every mesh."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from extras.chunked_loss import ChunkedLoss
from model import Head, ModelConfig, Transformer

# ranks | flags of both runs | chunks, and other flags of the second run
ROWS = """\
1 |                        | 7
2 |                        | 2 --strategy ddp --micro_batch_size 2
2 | --model tinyllama-1.1b | 3 --strategy fsdp
"""


@pytest.mark.parametrize("row", ROWS.splitlines())
def test_chunks_give_the_numbers_of_one_chunk(train, row):
    """Also if their number is no divisor of that of the tokens."""
    ranks, flags, chunked = row.split("|")
    one = train(1, flags, "one")
    many = train(int(ranks), f"{flags} --loss_chunks {chunked}", "many")
    assert (one.status, many.status) == (0, 0), many.error
    assert len(one.rows()) == 5
    for expected, found in zip(one.rows(), many.rows(), strict=True):
        for name in ("loss", "grad_norm"):
            assert found[name] == pytest.approx(expected[name], rel=1e-5)
    (expected, *_), (found, *_) = one.rows("val_loss"), many.rows("val_loss")
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)


class Largest(TorchDispatchMode):
    """Finds the number of elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


def loss_in_chunks(chunks: int) -> tuple[float, list[torch.Tensor], int]:
    """The loss of 128 tokens, the gradients of half of it, and the most elements of a tensor."""
    model = Transformer(
        ModelConfig(640, n_layer=1, n_head=4, n_kv_head=4, d_model=16, d_ff=48, seq_len=32)
    )
    for name, parameter in model.named_parameters():
        model.init_tensor(name, parameter, seed=1)
    if chunks > 1:
        model.head.loss = ChunkedLoss(model.head.loss, chunks)
    windows = torch.arange(4 * 33).view(4, 33) % 640
    with Largest() as largest:
        loss = model(windows[:, :-1], windows[:, 1:])
        (loss / 2).backward()  # as in a step of two micro-batches
    return loss.item(), [p.grad for p in model.parameters()], largest.elements


def test_the_gradients_are_those_of_one_chunk_but_no_tensor_has_all_logits():
    loss, gradients, most = loss_in_chunks(1)
    loss_of_five, gradients_of_five, most_of_five = loss_in_chunks(5)
    assert loss_of_five == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(gradients_of_five, gradients, rtol=1e-5, atol=1e-7)
    assert (most, most_of_five) == (128 * 640, 26 * 640)


def test_gradients_of_chunks_are_summed_in_float32():
    """FSDP gathers weights in bfloat16, in which a sum of 64 parts would be 1% off."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    gradients = []
    for chunks in (1, 64):
        weight = torch.ones(32, 16, dtype=torch.bfloat16, requires_grad=True)
        head = Head(
            ModelConfig(32, n_layer=1, n_head=2, n_kv_head=2, d_model=16, d_ff=8, seq_len=8)
        )
        if chunks > 1:
            head.loss = ChunkedLoss(head.loss, chunks)
        head(x[None], targets=torch.arange(64)[None] % 32, weight=weight).backward()
        gradients.append(weight.grad.float())
    whole, chunked = gradients
    assert (whole - chunked).norm() <= 0.005 * whole.norm()
