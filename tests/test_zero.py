"""examples/zero.py: each stage equals one rank, and a student's mistakes fail in one line."""

import re
import sys

import pytest
import torch
from conftest import ROOT, torchrun

sys.path.append(str(ROOT / "examples"))
import zero

REAL_RANKS = pytest.mark.slow(proves="each stage and mistake of a student, on real ranks")


@REAL_RANKS
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_stage_equals_one_rank(ranks, tmp_path):
    job = torchrun(ranks, [], tmp_path, script=zero.__file__, cwd=ROOT)
    assert job.wait(100) == 0, job.out
    lines = job.out.splitlines()
    assert f"ring by hand          predicted {2 * (ranks - 1) * 16 / ranks:.1f} MB" in lines[0]
    names = [line.split()[0] for line in lines if "equal to one rank's weights" in line]
    assert names == [stage.__name__ for stage in zero.STAGES]


def test_adamw_by_hand_matches_torch():
    expected = torch.randn(9).requires_grad_()
    ours, moments = expected.detach().clone(), torch.zeros(2, 9)
    betas = (zero.BETA1, zero.BETA2)
    optimizer = torch.optim.AdamW([expected], zero.LR, betas, zero.EPS, zero.DECAY)
    for step in (1, 2, 3):
        expected.grad = torch.randn(9) / 1000
        optimizer.step()
        zero.adamw(ours, expected.grad, moments, step)
        torch.testing.assert_close(ours, expected.detach())


MEAN = "state.gradients /= n"
UPDATE = "adamw(state.weights, state.gradients, state.moments, state.step)"
GATHER = "state.weights[i] = group.all_gather(own_weights[i]).view(D, D)"
ALL = "every = [group.all_gather(s) for s in state.weights]; "
WRONG = [  # a function, its code, what a student writes instead, words of the error
    ("reduce_scatter", "parts[rank]\n", "parts[rank - 1]\n", "ring: reduce_scatter gives rank"),
    ("ddp_each", MEAN, "pass", "ddp_each: step 1: .* rank . are 3.00 times one rank's: a sum"),
    ("ddp_each", MEAN, f"{MEAN} * n", "step 1: .* rank . are 0.33 times .*: divided by n twice"),
    ("ddp_each", "in state.gradients:", "in state.gradients[1:]:", "gradients .* in layer 0"),
    ("ddp_each", "x.chunk(n)[rank]", "x.chunk(n)[0]", "step 1: the gradients of rank . differ"),
    ("zero1", "x.chunk(n)[rank], y.chunk(n)[rank]", "x, y", "trains on 240 rows, its part has 80"),
    ("zero2", "state.gradients[i] =", "_ =", "step 1: the gradients of rank . are still 0"),
    ("ddp_bucket", "group", f"{UPDATE}; group", "the ranks' weights differ after step 1"),
    ("ddp_bucket", "state.moments", "state.moments * 0", "after step 2 the weights of rank"),
    ("ddp_overlapped", "handle.wait()", "pass", "4 all_reduces were not waited for"),
    ("zero1", "rank]\n    for i in", "rank - 1]\n    for i in", "after step 1 the weights of rank"),
    ("zero1", GATHER, "pass", "the ranks' weights differ after step 1"),
    ("zero1", "adamw", f"for i in range(LAYERS): {GATHER}\n    return adamw", "weights differ"),
    ("zero2", "in grad", "in list(gradients(state.weights, x, y)): #", "gradients of 4 layers"),
    ("zero3", "outs, y", f"{ALL}outs, y", "the full weights of 6 layers exist at one time"),
    ("zero3", "if i < LAYERS - 1", "if True", "691,200 bytes handed .* formula says 633,600"),
    ("zero3", "d = 2", "return missing", r"zero3: line \d+: NameError: name 'missing'"),
]


@REAL_RANKS
@pytest.mark.parametrize("function, code, wrong, words", WRONG)
def test_a_wrong_implementation_fails_in_one_line(function, code, wrong, words, tmp_path):
    before, after = (ROOT / "examples/zero.py").read_text().split(f"def {function}(")
    copy = tmp_path / "zero.py"
    copy.write_text(f"{before}def {function}({after.replace(code, wrong, 1)}")
    stage = "ring" if function == "reduce_scatter" else function
    job = torchrun(3, [stage], tmp_path, script=copy, cwd=ROOT)
    assert job.wait(100) == 1
    (line,) = job.out.splitlines()
    assert re.search(words, line)
