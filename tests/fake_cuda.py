"""Fake CUDA devices for a CPU build of torch: streams and pinned memory, but no values.

In a process that preloads the library, torch finds four GPUs. `install` adds the Python half. All
of train.py then runs, in seconds, in two modes: `Fakes`, torch's fake tensors, and `Gpu`, which
leaves operations on a GPU to the fake tensors and runs operations on the CPU for real. gloo forms
the groups that NCCL would form, but nothing is sent. Not covered: values, races between streams,
GPU memory, NCCL itself and torch.compile. Nearly everything that is patched here is private to
torch: check it at each release.
"""

import contextlib
import functools
import subprocess
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from extras.profile import asks_for_values, caller

SOURCE = Path(__file__).with_suffix(".cpp")
GPUS = 4
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


class Properties:
    name = "NVIDIA H100 80GB HBM3"
    total_memory = 80 << 30


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")  # no random numbers are drawn on a fake GPU


class FakeNCCL(c10d.ProcessGroupGloo):
    """Forms groups, and splits into subgroups, as NCCL does."""

    class Options(c10d.ProcessGroupGloo._Options):
        def __init__(self):
            super().__init__()
            self._devices = [c10d.ProcessGroupGloo.create_default_device()]


def without_fakes(function):
    """Wrap a function that needs real tensors, so that it runs without the modes of this file."""

    @functools.wraps(function)
    def call(*arguments, **options):
        is_fake = isinstance(active_fake_mode(), Fakes)
        with _disable_current_modes() if is_fake else contextlib.nullcontext():
            return function(*arguments, **options)

    return call


def flash_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> Tensor:
    """Call the kernel: a CPU build has no code that chooses among the kernels of a GPU."""
    assert enable_gqa == (q.size(1) != k.size(1))
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


STAND_INS = {  # for the functions of torch.cuda
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_initialized": lambda: True,
    "device_count": lambda: GPUS,
    "current_device": torch.accelerator.current_device_index,
    "set_device": torch.accelerator.set_device_index,
    "current_stream": torch.accelerator.current_stream,
    "stream": lambda stream: stream or contextlib.nullcontext(),
    "Stream": torch.Stream,
    "Event": torch.Event,
    "max_memory_allocated": lambda: 0,
    "empty_cache": lambda: None,
    "synchronize": lambda device=None: None,
    "get_device_name": lambda device=None: Properties.name,
    "get_device_properties": lambda device=None: Properties,
    "get_device_capability": lambda device=None: (9, 0),
}


@functools.cache
def install() -> None:
    for name, stand_in in STAND_INS.items():
        assert hasattr(torch.cuda, name), f"torch has renamed {name}, so train.py would not find it"
        setattr(torch.cuda, name, stand_in)
    torch.cuda.nccl.version = lambda: (2, 29, 3)
    torch.Generator = Generator
    torch.nn.functional.scaled_dot_product_attention = flash_attention
    # DDP's timer for GPUs exists only in a CUDA build.
    torch.distributed.Logger.set_runtime_stats_and_log = lambda logger: None
    c10d.is_nccl_available = lambda: True
    c10d.ProcessGroupNCCL = FakeNCCL
    c10d.ProcessGroupGloo._Options.__deepcopy__ = lambda options, memo: FakeNCCL.Options()
    c10d._object_to_tensor = without_fakes(c10d._object_to_tensor)
    c10d._tensor_to_object = without_fakes(c10d._tensor_to_object)


# --------------------------------------------------------------------------------------------------
# A GPU that computes nothing


class Fakes(FakeTensorMode):
    avoid_device_init = True  # the device does not exist

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)


class Gpu(TorchDispatchMode):
    """Runs the operations of a rank, and fails where a kernel of a GPU or NCCL would.

    It counts transfers between host and device, and operations that ask for values:
    {("file.py function", what): times}.
    """

    def __init__(self, fakes: Fakes):
        super().__init__()
        self.fakes = fakes
        self.crossings: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types or AsyncCollectiveTensor in types:
            return NotImplemented  # torch then runs it on the local tensors
        if function is torch.ops.prim.device.default:
            return args[0].fake_device
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]
        return self.run(function, args, kwargs or {})

    def run(self, function, args, kwargs):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if kwargs.get("dtype") == torch.int32 and not tensors:
            kwargs = kwargs | {"device": None}  # the order of DDP's buckets, which DDP reads
        device = kwargs.get("device")
        target = device and torch.device(device).type
        if function.namespace == "c10d" and tensors[0].dtype == torch.int32:
            return self.communicate(function, args, [])
        if target != "cuda" and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if len(self.fakes.enter_stack) > 1:  # DTensor computes the shape of a result
            return function(*args, **kwargs)
        if asks_for_values(function, args):
            self.cross(f"asks for {function.overloadpacket.__name__}")
        if function is aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if function is aten.record_stream.default:
            return self.cross("record_stream")
        if function.namespace == "c10d":
            return self.communicate(function, args, tensors)
        if function is aten.copy_.default and args[0].device.type != args[1].device.type:
            to, source, *non_blocking = args
            host = to if to.device.type == "cpu" else source
            self.cross_by_copy(to.device.type, is_pinned(host), *non_blocking)
            return to
        if function is aten._to_copy.default and target in {"cpu", "cuda"} - {args[0].device.type}:
            non_blocking = kwargs.get("non_blocking") or False
            # For a non-blocking copy to the host, torch allocates pinned memory itself.
            pinned = non_blocking if target == "cpu" else is_pinned(args[0])
            self.cross_by_copy(target, pinned, non_blocking)
        if function.overloadpacket is aten._fused_adamw_:
            found = {(tensor.device, tensor.dtype) for tensor in tensors}
            assert found == {(args[0][0].device, torch.float32)}
        result = function(*args, **kwargs)
        if not isinstance(result, FakeTensor):
            return result
        if result.device.type == "cpu":
            with unset_fake_temporarily():
                pin_memory = kwargs.get("pin_memory") or False
                return torch.ones(result.shape, dtype=result.dtype, pin_memory=pin_memory)
        assert result.device.index in (None, torch.cuda.current_device()), function
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

    def cross_by_copy(self, target: str, pinned: bool, non_blocking: bool = False) -> None:
        memory = "pinned" if pinned else "pageable"
        wait = "" if non_blocking else ", blocking"
        stream = ", side stream" if torch.cuda.current_stream().stream_id else ""
        self.cross(f"to {target}, {memory}{wait}{stream}")

    def cross(self, what: str) -> None:
        """Count it for the innermost function outside torch."""
        place = caller(__file__)
        self.crossings[f"{Path(place.filename).name} {place.function}", what] += 1


def is_pinned(tensor: Tensor) -> bool:
    with unset_fake_temporarily():
        return tensor.is_pinned()
