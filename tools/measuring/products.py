"""Run a training script, time the matrix products of its second micro-batch, and print its memory.

python tools/measuring/products.py SCRIPT [FLAG ...]

The time is a lower bound for a micro-batch on this machine. It does not include the products of
attention, which are part of a fused kernel.
"""

import itertools
import resource
import runpy
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode  # no public way to see all operations

aten = torch.ops.aten
PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
REPEATS, SECONDS = 5, 0.02  # seconds of each repeat


class Products(TorchDispatchMode):
    """Counts matrix products by operator and operands, each a (shape, stride, dtype, device)."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in PRODUCTS:
            operands = tuple((a.shape, a.stride(), a.dtype, a.device) for a in args)
            self.counts[function.overloadpacket, operands] += 1
        return function(*args, **(kwargs or {}))


def seconds_of(function, operands: tuple) -> float:
    """Return the median seconds of one product of random tensors that are like these operands."""
    tensors = []
    for shape, stride, dtype, device in operands:
        empty = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        tensors.append(torch.randn_like(empty))  # with the same strides

    def mean(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            function(*tensors)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / count

    mean(1)  # the first call allocates
    count = 1 + int(SECONDS / mean(1))
    return statistics.median(mean(count) for _ in range(REPEATS))


def main(argv: list[str]) -> None:
    """Run the script `argv`. A micro-batch is what runs between the ends of two backward passes."""
    products = Products()
    returns = itertools.count(1)

    def profile(frame, event: str, _) -> None:
        if event != "return" or frame.f_code is not torch.Tensor.backward.__code__:
            return
        if frame.f_locals["self"].is_meta:  # an estimate of the memory, before the run
            return
        number = next(returns)
        if number == 1:
            products.__enter__()
        elif number == 2:
            sys.setprofile(None)  # what follows runs at full speed
            products.__exit__(None, None, None)
            seconds = sum(n * seconds_of(*product) for product, n in products.counts.items())
            print(f"matrix products of a micro-batch: {seconds} s", flush=True)

    sys.argv = argv
    sys.path[0] = str(Path(argv[0]).resolve().parent)
    sys.setprofile(profile)
    try:
        runpy.run_path(argv[0], run_name="__main__")
    finally:  # also after sys.exit
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"peak memory of this process: {1024 * kilobytes} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
