"""Fake CUDA devices for a CPU build of torch: streams and pinned memory, but no values.

In a process that preloads the library, torch finds four GPUs. `install` adds the Python half. All
of train.py then runs, in seconds, in the mode `Gpu`, which leaves operations on a GPU to torch's
fake tensors and runs operations on the CPU for real. gloo forms the groups that NCCL would form,
but nothing is sent. Not covered: values, DDP, races between streams, GPU memory, NCCL itself and
torch.compile. Nearly everything that is patched here is private to torch: check it at each release.
"""

import contextlib
import subprocess
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from extras.profile import asks_for_values, caller

SOURCE = Path(__file__).with_suffix(".cpp")
aten = torch.ops.aten
c10d_ops = torch.ops.c10d


def compile_library(folder: Path) -> Path:
    """Compile the C++ half."""
    root = Path(torch.__file__).parent
    path = folder / "fake_cuda.so"
    command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{root}/include", SOURCE, "-o", path]
    command += [f"-L{root}/lib", f"-Wl,-rpath,{root}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True)
    return path


# --------------------------------------------------------------------------------------------------
# The Python half


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")  # no random numbers are drawn on a fake GPU


class FakeNCCL(c10d.ProcessGroupGloo):
    class Options(c10d.ProcessGroupGloo._Options):
        pass  # a Python class takes the attributes of NCCL's options

    def __init__(self, store, rank: int, size: int, options):
        super().__init__(store, rank, size, options._timeout)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Call the kernel: a CPU build has no code that chooses among the kernels of a GPU."""
    assert enable_gqa == (q.size(1) != k.size(1))
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


STAND_INS = {  # for the functions of torch.cuda
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 4,
    "current_device": torch.accelerator.current_device_index,
    "set_device": torch.accelerator.set_device_index,
    "current_stream": torch.accelerator.current_stream,
    "stream": lambda stream: stream or contextlib.nullcontext(),
    "Stream": torch.Stream,
    "Event": torch.Event,
    "max_memory_allocated": lambda: 0,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
}


def install() -> None:
    patch.multiple(torch.cuda, **STAND_INS).start()  # fails for a name that torch.cuda lacks
    FakeTensorMode.avoid_device_init = True  # or torch would allocate on the device
    torch.Generator = Generator
    torch.nn.functional.scaled_dot_product_attention = flash_attention
    c10d.is_nccl_available = lambda: True
    c10d.ProcessGroupNCCL = FakeNCCL
    with_real_tensors = _disable_current_modes()
    c10d._object_to_tensor = with_real_tensors(c10d._object_to_tensor)
    c10d._tensor_to_object = with_real_tensors(c10d._tensor_to_object)


# --------------------------------------------------------------------------------------------------
# A GPU that computes nothing


class Gpu(TorchDispatchMode):
    """Runs the operations of a rank, and fails where a kernel of a GPU or NCCL would.

    It counts transfers between host and device, and operations that ask for values:
    {("file.py function", what): times}.
    """

    def __init__(self):
        super().__init__()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)  # to enter before this mode
        self.crossings: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types or AsyncCollectiveTensor in types:
            return NotImplemented  # torch then runs it on the local tensors
        if function is torch.ops.prim.device.default:
            return args[0].fake_device
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        target = device and torch.device(device).type
        if target != "cuda" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if len(self.fakes.enter_stack) > 1:  # DTensor computes the shape of a result
            return function(*args, **kwargs)
        if asks_for_values(function, args):
            self.cross(f"asks for {function.overloadpacket.__name__}")
        if function is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if function.namespace == "c10d":
            return self.communicate(function, args, tensors)
        if function is aten.copy_.default and args[0].device.type != args[1].device.type:
            to, source, *non_blocking = args
            self.cross_by_copy(source, to, *non_blocking)
            return to
        if function.overloadpacket is aten._fused_adamw_:
            found = {(tensor.device, tensor.dtype) for tensor in tensors}
            assert found == {(args[0][0].device, torch.float32)}
        result = function(*args, **kwargs)
        if not isinstance(result, FakeTensor):
            return result
        non_blocking = kwargs.get("non_blocking") or False
        if result.device.type == "cpu":
            # For a non-blocking copy, torch allocates pinned memory itself.
            pinned = kwargs.get("pin_memory") or non_blocking
            with unset_fake_temporarily():
                result = torch.ones(result.shape, dtype=result.dtype, pin_memory=pinned)
        assert result.device.index in (None, torch.cuda.current_device()), function
        if function is aten._to_copy.default and result.device.type != args[0].device.type:
            self.cross_by_copy(args[0], result, non_blocking)
        return result

    def communicate(self, function, args, tensors: list[Tensor]):
        """Return the tensors unchanged, at once."""
        for tensor in tensors:
            assert tensor.device.type == "cuda" and tensor.is_contiguous(), function
        future = torch.futures.Future()
        future.set_result(args[0])
        work = _create_work_from_future(future).boxed()
        only_work = (c10d_ops.barrier, c10d_ops.send, c10d_ops.recv_, c10d_ops.alltoall_base_)
        return work if function.overloadpacket in only_work else (args[0], work)

    def cross_by_copy(self, source: Tensor, to: Tensor, non_blocking: bool = False) -> None:
        host = to if to.device.type == "cpu" else source
        with unset_fake_temporarily():
            memory = "pinned" if host.is_pinned() else "pageable"
        wait = "" if non_blocking else ", blocking"
        self.cross(f"to {to.device.type}, {memory}{wait}")

    def cross(self, what: str) -> None:
        """Count it for the innermost function outside torch."""
        place = caller(__file__)
        self.crossings[f"{Path(place.filename).name} {place.function}", what] += 1
