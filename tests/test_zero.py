"""examples/zero.py: each stage equals one rank, and a student's mistakes fail in one line."""

import re
import subprocess
import sys

import pytest
from rig import ROOT, cells, torchrun

sys.path.append(str(ROOT / "examples"))
import zero


def run_zero(ranks: int, *stages: str, script: str = zero.__file__) -> tuple[int, str]:
    """The status and the standard output of the script, on real ranks."""
    command = torchrun(ranks, stages, script=script)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    return done.returncode, done.stdout


@pytest.mark.slow(proves="each stage, on real ranks")
@pytest.mark.parametrize("ranks", [2, 3])
def test_each_stage_equals_one_rank(ranks):
    status, printed = run_zero(ranks)
    assert status == 0, printed
    assert f"ring by hand          predicted {2 * (ranks - 1) * 16 / ranks:.1f} MB" in printed
    equal = re.findall(r"^(\S+) .*equal to one rank's weights", printed, re.M)
    assert equal == [stage.__name__ for stage in zero.STAGES]


# A function | its code | what a student writes instead | the error
WRONG = r"""
reduce_scatter | parts[rank] | parts[rank - 1] | ring: reduce_sc
ddp_each | state.gradients /= n | pass | 3.00 times .* sum
ddp_bucket | state.moments | state.moments * 0 | after step 2 the
ddp_overlapped | handle.wait() | pass | 4 .* waited for
zero1 | state.weights[i] = | _ = | weights differ
zero1 | x.chunk(n)[rank], y.chunk(n)[rank] | x, y | on 240 rows
zero2 | state.gradients[i] = | _ = | are still 0
zero2 | in grad | in list(gradients(state.weights, x, y)): # | of 4 layers
zero3 | if i < LAYERS - 1 | if True | says 633,600
"""


@pytest.mark.slow(proves="each mistake of a student, on real ranks")
@pytest.mark.parametrize("function, code, wrong, words", cells(WRONG))
def test_a_wrong_implementation_fails_in_one_line(function, code, wrong, words, tmp_path):
    before, after = (ROOT / "examples/zero.py").read_text().split(f"def {function}(")
    assert code in after
    copy = tmp_path / "zero.py"
    copy.write_text(f"{before}def {function}({after.replace(code, wrong, 1)}")
    stage = "ring" if function == "reduce_scatter" else function
    status, printed = run_zero(3, stage, script=copy)
    assert status == 1
    (line,) = printed.splitlines()
    assert re.search(words, line)
