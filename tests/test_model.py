"""Generation: which tokens the model gets, and which are drawn."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import generate


class Stub(nn.Module):
    """A model that computes its logits by a function of the tokens."""

    def __init__(self, logits: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.forward = logits


@pytest.mark.parametrize("multiple", [1, 4])
def test_generate_gives_the_model_the_last_seq_len_tokens(multiple):
    """Padding at the end, which causal attention ignores, lets tp ranks split them."""
    given = []

    def count_up(tokens: torch.Tensor) -> torch.Tensor:
        given.append(tokens[0].tolist())
        return F.one_hot((tokens + 1) % 60, 64).float()

    options = dict(seq_len=16, vocab_size=60, device="cpu", temperature=0, multiple=multiple)
    assert [*generate(Stub(count_up), [5, 6], 30, **options)] == [*range(7, 37)]
    for n, context in enumerate(given):
        expected = [*range(5, 7 + n)][-16:]
        assert context == expected + [0] * (-len(expected) % multiple)


# Of six logits, the last two pad the head of a vocabulary of four
LOGITS = torch.tensor([0.3, 0.15, 0.5, 0.05, 0.6, 0.6]).log()
DRAWN = [
    ({}, {0, 1, 2, 3}),
    ({"top_k": 2}, {0, 2}),
    ({"top_k": 9}, {0, 1, 2, 3}),
    ({"temperature": 0}, {2}),
    ({"temperature": 0.01}, {2}),
]


@pytest.mark.parametrize("options, drawn", DRAWN)
def test_generate_draws_the_likely_tokens_of_the_vocabulary(options, drawn):
    model = Stub(lambda tokens: LOGITS.expand(*tokens.shape, 6))
    options = dict(seq_len=16, vocab_size=4, device="cpu") | options
    first, again, other = ([*generate(model, [0], 300, seed=seed, **options)] for seed in (5, 5, 6))
    assert {*first} == drawn
    assert first == again
    assert (first != other) == (len(drawn) > 1)
