"""What train.py does with a GPU, in complete runs on the fake GPUs of fake_cuda.py.

In a step only batches and log rows go between host and device, and the host waits for neither.
NCCL and AdamW's kernel would accept their operands.
"""

import contextlib
import io
import shutil
import sys
from collections import Counter

import fake_cuda
import pytest
import torch
from rig import Pool, arguments, cells

import train

# ranks | micro-batches of a rank in a step | sequences of a step | further flags
RUNS = """
1 | 2 | 2 | --dtype bfloat16 --model tinyllama-1.1b --async_save --optim_metrics_interval 2
4 | 2 | 4 | --strategy ddp --tp 2 --grad_sync micro_batch --loss_chunks 2
4 | 1 | 4 | --dtype bfloat16 --strategy hsdp --dp_shard 2 --optimizer muon --clip adaptive
"""

BLOCKS, READS = "to cuda, pageable, blocking", "to cpu, pageable, blocking"
ASKS = "asks for _local_scalar_dense"
# What the host waits for outside the steps
OUTSIDE = {
    ("optim.py __init__", BLOCKS),
    ("optim.py statistics", ASKS),  # with --optim_metrics_interval, in a step too
    ("start.py read_val_batches", BLOCKS),
    ("train.py evaluate", BLOCKS),
    ("train.py evaluate", ASKS),
    ("train.py save", ASKS),
    ("checkpoint.py blocks", READS),
    ("checkpoint.py fill", BLOCKS),
    ("async_save.py copy_to_host", "to cpu, pinned, blocking"),
    ("model.py generate", BLOCKS),
    ("model.py generate", READS),
}


def play(function, *arguments) -> tuple[object, Counter]:
    """Call a function on this rank's fake GPU; return its answer and its crossings."""
    fake_cuda.install()
    gpu = fake_cuda.Gpu()
    with gpu.fakes, gpu, contextlib.redirect_stdout(io.StringIO()):
        answer = function(*arguments)
    return answer, gpu.crossings


@pytest.fixture(scope="module")
def gpus(tmp_path_factory):
    if sys.platform != "linux" or not shutil.which("c++"):
        pytest.skip("LD_PRELOAD of the library needs Linux and a C++ compiler (c++)")
    if torch.backends.cuda.is_built():
        pytest.skip("this torch has real CUDA devices")
    library = fake_cuda.compile_library(tmp_path_factory.mktemp("library"))
    ranks = Pool()
    ranks.start_method = "spawn"  # a library is preloaded when a process starts
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LD_PRELOAD", str(library))
        yield ranks
    ranks.stop()


@pytest.mark.slow(proves="what only a CUDA device's code paths do")
@pytest.mark.parametrize("ranks, accum, batch, flags", cells(RUNS))
def test_a_step_does_not_wait_for_the_gpu(gpus, tokens, tmp_path, ranks, accum, batch, flags):
    """Kernels accept their operands, and a run continues from its checkpoint."""
    flags += " --device cuda --n_layer 1 --micro_batch_size 1 --eval_sequences 1 --sample_tokens 2"
    flags += f" --global_batch_size {batch}"
    for max_steps, steps in ((2, 2), (3, 1)):
        argv = arguments(tokens, tmp_path / "run", f"{flags} --max_steps {max_steps}")
        for status, crossings in gpus(int(ranks), play, train.command, argv, timeout=200):
            assert status == 0
            assert {what: n for what, n in crossings.items() if what not in OUTSIDE} == {
                ("train.py micro_batches", "to cuda, pinned"): steps * int(accum),
                ("log.py row", "to cuda, pinned"): steps,
                ("log.py row", "to cpu, pinned"): steps,
            }
