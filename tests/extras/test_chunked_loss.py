"""--loss_chunks: logits and loss in parts give the numbers of one part, on every mesh."""

import pytest
import torch
from rig import assert_close, cells, run_command
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from extras.chunked_loss import ChunkedLoss
from model import Head, ModelConfig

# ranks | flags of both runs | chunks, and other flags of the second run
ROWS = """
1 | --micro_batch_size 4   | 7
2 | --model tinyllama-1.1b | 3 --strategy fsdp
"""


@pytest.mark.parametrize("ranks, flags, chunked", cells(ROWS))
def test_chunks_give_the_numbers_of_one_chunk(train, ranks, flags, chunked):
    """Also if their number is no divisor of that of the tokens."""
    one = train(1, flags, "one")
    many = train(int(ranks), f"{flags} --loss_chunks {chunked}", "many")
    assert (one.status, many.status) == (0, 0), many.error
    assert_close(many.out, one.out)
    (expected,), (found,) = one.rows("val_loss"), many.rows("val_loss")
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)


class Largest(TorchDispatchMode):
    """Finds the number of elements of the largest result of an operation."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def train_and_measure(argv: list[str]) -> tuple[int, int]:
    with Largest() as largest:
        status, _, _ = run_command(argv)
    return status, largest.elements


@pytest.mark.parametrize("chunks, size", [(1, 128), (3, 43)])
def test_no_tensor_has_more_logits_than_those_of_a_chunk(on_ranks, chunks, size):
    """Of 320 ids. All weights are smaller, and none are saved."""
    flags = f"--loss_chunks {chunks} --keep_last 0"
    assert on_ranks(1, train_and_measure, flags) == [(0, 320 * size)]


def test_gradients_of_chunks_are_summed_in_float32():
    """FSDP gathers weights in bfloat16, in which a sum of 64 parts would be 1% off."""
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    sizes = ModelConfig(32, n_layer=1, n_head=2, n_kv_head=2, d_model=16, d_ff=8, seq_len=8)
    gradients = []
    for chunks in (1, 64):
        weight = torch.ones(32, 16, dtype=torch.bfloat16, requires_grad=True)
        head = Head(sizes)
        if chunks > 1:
            head.loss = ChunkedLoss(head.loss, chunks)
        head(x[None], targets=torch.arange(64)[None] % 32, weight=weight).backward()
        gradients.append(weight.grad.float())
    whole, chunked = gradients
    assert (whole - chunked).norm() <= 0.005 * whole.norm()
