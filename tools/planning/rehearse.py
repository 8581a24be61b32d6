"""One optimizer step of one rank of any cluster, on this machine, without its arithmetic.

The training code lays out the model and runs the step: layout.py, dist.py, optim.py and
train.train_step. Only two things are fake, both from torch: the process group, whose collectives
return at once and send nothing, and the tensors, which have shapes, dtypes and storages but no
values. So communication, allocations and arithmetic are counted, not derived from formulas, for
one rank of thousands.
"""

import dataclasses
import difflib
import gc
import itertools
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

# Modules with an underscore are private. torch has no public fake tensors or fake process group,
# and no public way to see every operation.
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, debug
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import dist
import layout
import model
import optim
import train
from config import blocks_per_unit
from layout import Run
from runtime.profiling import CommunicationCounter, Traffic

# --------------------------------------------------------------------------------------------------
# Results


@dataclass(frozen=True)
class Communication:
    """What one rank sends on one axis in one optimizer step."""

    axis: str  # dp_replicate, dp_shard, tp, world
    collective: str  # as profiling.CommunicationCounter names them
    phase: str  # forward, backward, optimizer
    count: int
    bytes: int  # of full tensors, as profiling.CommunicationCounter counts them


@dataclass
class Operation:
    """Identical operations of one rank in one optimizer step."""

    phase: str  # forward, backward, optimizer
    name: str  # torch's operator
    shape: tuple[int, ...]  # of the result; matrix products: (..., m, n, k); lists: ()
    count: int = 0
    flops: float = 0.0  # of all, in matrix products
    bytes: int = 0  # read and written by all of them


# A block was allocated, resized or freed: number of the phase as text, kind, bytes
Change = tuple[str, str, int]

# Kinds of memory. If several apply to a storage in its life, the first counts.
KINDS = (
    "parameters",
    "optimizer",
    "gradients",  # that the optimizer reads, and those kept for a later micro-batch
    "logits",
    "gathered",  # FSDP's collective buffers, and weights in the compute dtype
    "activations",
    "other",
)


@dataclass(frozen=True)
class Rehearsal:
    """What one optimizer step of one rank takes."""

    run: Run
    parameters: int  # of the whole model
    parameters_per_rank: int
    memory: dict[str, int]  # bytes of tensors by KINDS, at the peak
    state: dict[str, int]  # bytes of parameters, gradients, optimizer at the update
    communication: list[Communication]
    operations: list[Operation]
    flops: float  # per step, without recomputation and the update
    recomputed_flops: float
    changes: list[Change] = field(default_factory=list, repr=False)  # until summed up

    @property
    def peak(self) -> int:
        """Peak bytes of tensors since the model's build."""
        return sum(self.memory.values())


# --------------------------------------------------------------------------------------------------
# The rehearsal


def rehearse(run: Run, rank: int = 0) -> Rehearsal:
    """Run one optimizer step of a rank of `run`.

    If the run's device is "cuda", the step allocates as on a GPU. The step is not compiled.
    """
    world_size = math.prod(run.mesh_shape)
    with fake_group(rank, world_size) as store:
        world = dist.World(
            rank=rank,
            size=world_size,
            local_rank=rank,  # hosts change no count
            local_size=world_size,
            device=torch.device("cpu"),  # on "cuda" FSDP would need a GPU's streams
            timeout=timedelta(minutes=1),
            store=store,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the run shows them
            found = run_layers(dataclasses.replace(run, compile=False), world)
    return dataclasses.replace(found, run=run)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Free a tensor when its last reference goes, and not when a collection happens to run."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[FakeStore]:
    """A process group of `world_size` ranks; only this one exists."""
    store = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield store
    finally:
        leave_group()


def leave_group() -> None:
    """Leave the process group, if any, so that this process can join another."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # DTensor caches meshes by shape, with the names of groups that are gone.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def run_step(run: Run, mesh: dist.DeviceMesh) -> Rehearsal:
    """Build the model and the optimizer, run a step and sum up."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fakes)
    net = layout.empty_model(run)  # outside: a parameter that is followed cannot move
    if run.device != "cpu":
        choose_gpu_kernels(net)
    with fakes, recorder, loss_parallel(), no_garbage_collection():
        state, forward = train.build(run, mesh, net, init_weights=False)
        optimizer = recorder.follow(mesh, run, state, forward)
        # How many micro-batches each rehearsed one stands for: the first, a middle one, the last
        n = run.grad_accum_steps
        all_times = [[1] * n if n <= 3 else [1, n - 2, 1]]
        if isinstance(forward, DistributedDataParallel):
            all_times.insert(0, [1])  # the first step, where DDP rebuilds its buckets
        shape = (run.micro_batch_size, run.seq_len + 1)
        for times in all_times:
            recorder.forget_counts()
            tokens = (torch.zeros(shape, dtype=torch.int64) for _ in times)
            batches = recorder.batches(tokens, times)
            train.train_step(forward, optimizer, batches, 1, 0.1, len(times), run.grad_sync)
    return Rehearsal(
        run=run,
        parameters=state.model.parameter_count(),
        parameters_per_rank=sum(optim.local(w).numel() for w in state.model.parameters()),
        memory={},
        state=recorder.state,
        communication=recorder.communication(),
        operations=list(recorder.operations.values()),
        flops=recorder.flops["computed"],
        recomputed_flops=recorder.flops["recomputed"],
        changes=recorder.changes(),
    )


# --------------------------------------------------------------------------------------------------
# A step of many layers, from steps of few

REHEARSED_UNITS = 2  # of FSDP: the first and the last


def run_layers(run: Run, world: dist.World) -> Rehearsal:
    """The step of `run`, extended from a few layers if that is exact.

    Units between the first and the last do the same, in the same places of the step. What one unit
    adds to these two, all others add too. Not for DDP, whose buckets end anywhere, nor for Muon,
    whose matrices are dealt to all ranks.
    """
    mesh = dist.make_mesh(world, run.mesh_shape)  # once: DTensor keeps the groups of the first

    def rehearse_layers(n_layer: int) -> Rehearsal:
        model_config = dataclasses.replace(run.model_config, n_layer=n_layer)
        return run_step(dataclasses.replace(run, n_layer=n_layer, model_config=model_config), mesh)

    n_layer = run.n_layer
    unit = blocks_per_unit(run.wrap) or n_layer  # one unit: nothing repeats
    more = n_layer // unit - REHEARSED_UNITS  # units
    few = n_layer - more * unit
    found = None
    repeats = run.optimizer != "muon" and (run.strategy != "ddp" or run.tp > 1)
    if more > REHEARSED_UNITS + 1 and repeats:
        with suppress(ValueError):  # they do not: see `extend`
            found = extend(rehearse_layers(few), rehearse_layers(few + unit), more)
    found = found or rehearse_layers(n_layer)
    return dataclasses.replace(found, memory=at_peak(found.changes), changes=[])


def extend(few, more, times: int):
    """`few` plus `times` times what `more` has beyond it, in all its numbers and lists.

    Raises ValueError if the two differ otherwise.
    """
    if few == more:
        return few
    if isinstance(few, int | float):
        return few + times * (more - few)
    if isinstance(few, list | tuple) and len(few) == len(more):
        return type(few)(extend(a, b, times) for a, b in zip(few, more))
    if isinstance(few, list) and isinstance(few[0], tuple):
        return extend_list(few, more, times)
    if isinstance(few, dict):
        return {key: extend(few[key], more[key], times) for key in few}
    if dataclasses.is_dataclass(few):
        return dataclasses.replace(few, **extend(vars(few), vars(more), times))
    raise ValueError(f"not repeated: {few} and {more}")


def extend_list(few: list, more: list, times: int) -> list:
    """Repeats what `more` inserts `times` times; extends the rest pair by pair."""
    found = []
    matcher = difflib.SequenceMatcher(None, few, more, autojunk=False)
    for _, i, i_end, j, j_end in matcher.get_opcodes():
        old, new = few[i:i_end], more[j:j_end]
        inserted = len(new) - len(old)
        if inserted < 0:
            raise ValueError("a longer model lacks what a shorter one does")
        if all(a[:2] == b[:2] for a, b in zip(old, new[inserted:])):  # phase and kind
            found += times * new[:inserted] + extend(old, new[inserted:], times)
        else:
            found += extend(old, new[: len(old)], times) + times * new[len(old) :]
    return found


def at_peak(changes: list[Change]) -> dict[str, int]:
    """Bytes by kind when their sum first reaches its maximum."""
    totals = list(itertools.accumulate(size for _, _, size in changes))
    sizes = dict.fromkeys(KINDS, 0)
    for _, kind, size in changes[: totals.index(max(totals)) + 1]:
        sizes[kind] += size
    return sizes


# --------------------------------------------------------------------------------------------------
# Recording a step


@dataclass(eq=False)
class Block:
    """A storage that tensors share."""

    phase: str  # in which it was allocated
    kind: str
    reference: weakref.ref | None
    size: int = 0

    def resize(self, size: int) -> int:
        """Set the size; return by how much it grew."""
        grown = size - self.size
        self.size = size
        return grown


class Collectives(CommunicationCounter):
    """Counts by axis, kind and phase, once per micro-batch that a collective stands for."""

    def __init__(self, mesh: dist.DeviceMesh, recorder: "Recorder"):
        super().__init__(mesh)
        self.recorder = recorder

    def record(self, kind: str, axis: str, size: int) -> None:
        traffic = self.counts.setdefault((axis, kind, self.recorder.phase), Traffic())
        traffic.calls += self.recorder.times
        traffic.bytes += self.recorder.times * size


# CPU attention operators, which torch's flop_counter does not count
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_product(q: Tensor, k: Tensor) -> int:
    """FLOPs of one product with the scores (B, H, T, T); a causal kernel computes half."""
    B, H, T, d_head = q.shape
    return 2 * B * H * T * k.size(2) * d_head // 2


# Operators that read few elements of their first operand
SELECTING = {
    torch.ops.aten.embedding,
    torch.ops.aten.nll_loss_forward,
    torch.ops.aten.nll_loss_backward,
}


def tensors_in(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size_of(tensor: Tensor) -> int:
    """Bytes; for an expanded tensor, of its storage."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def moved_by(function, operands: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """The tensors that a kernel reads or writes; twice if it changes them in place."""
    if function.overloadpacket in SELECTING:
        return results
    if any(word in function._schema.name for word in ("copy", "cat", "zero", "fill")):
        return list({id(tensor): tensor for tensor in operands + results}.values())
    return operands + (results or operands)


class Recorder(TorchDispatchMode):
    """Records operations, collectives, and when each tensor's storage is allocated and freed.

    A storage's kind may be known late, a gradient's when the optimizer reads it, so the peak is
    found at the end. Memory that one operation both allocates and frees is not seen.
    """

    def __init__(self, fakes: FakeTensorMode):
        super().__init__()
        self.fakes = fakes
        self.phase = "build"
        self.times = 1  # micro-batches that the current one stands for
        self.live: dict[int, Block] = {}  # by storage id
        self.resizable: dict[int, Block] = {}  # the blocks of `live` that FSDP may resize
        self.vocab_size = 0  # of this rank; `follow` sets it
        self.phases = 0  # begun so far
        self.events: list[tuple[int, Block, int]] = []  # Changes, before kinds are known
        self.collectives: Collectives | None = None
        self.flops: Counter[str] = Counter()
        self.operations: dict[tuple, Operation] = {}
        self.state: dict[str, int] = {}
        self.empty = torch.empty(0, device="meta")

    # Operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types or AsyncCollectiveTensor in types:
            return NotImplemented  # decomposes into operations on local tensors
        if function is torch.ops.prim.device.default:  # every second operation
            return args[0].fake_device
        kwargs = kwargs or {}
        result = self.run(function, types, args, kwargs)
        if self.is_about_shapes(types):
            return result
        operands, results = tensors_in((args, kwargs)), tensors_in(result)
        if not function.is_view:  # a view adds only gloo's buffers, split later
            if self.phase != "optimizer":  # FSDP is done by then
                self.see_resized()
            for tensor in results:
                self.see(tensor)
        self.classify(function, operands, results)
        if self.phase != "build":
            self.collectives.count_operation(function, args, kwargs, result)
            flops = self.count_flops(function, args, kwargs, result)
            self.count_operation(function, operands, results, flops)
        return result

    def run(self, function, types, args, kwargs):
        """Run an operation, and do what the fake process group omits."""
        if function is torch.ops.aten.new_empty.default and args[1] == [0] and args[0].is_meta:
            # FSDP creates one per rank that gets no row of a weight, twelve million for llama3-70b
            # on 16,384 ranks, and uses its own rank's.
            return self.empty
        if FakeTensor not in types and is_real(args, kwargs):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # a fake one would be a copy
        result = function(*args, **kwargs)
        if function is torch.ops.c10d.allreduce_.default:
            # DDP reads the reduced bucket from the future, which the fake group leaves empty.
            tensors, _ = result
            future = torch.futures.Future()
            future.set_result(tensors)
            return tensors, _create_work_from_future(future).boxed()
        return result

    def is_about_shapes(self, types) -> bool:
        """Whether DTensor is only computing a result's shape.

        It then enters the mode once more and runs the operation on full tensors, which no rank
        ever holds.
        """
        return len(self.fakes.enter_stack) > 1

    def takes_memory(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor)

    # Memory

    def see(self, tensor: Tensor) -> None:
        """Record the storage of a tensor if it is new."""
        if not self.takes_memory(tensor):
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self.live:
            return
        kind = "other"
        if self.phase in ("forward", "backward"):
            is_logits = tensor.dim() > 1 and tensor.shape[-1] == self.vocab_size
            kind = "logits" if is_logits else "activations"
        reference = weakref.ref(storage, lambda _: self.freed(key))
        self.live[key] = Block(self.phase, kind, reference)
        self.resize(self.live[key], storage.nbytes())

    def see_resized(self) -> None:
        """Record which storages FSDP has freed or regrown since the last call.

        Resizing a storage is not an operation that a mode sees.
        """
        for block in self.resizable.values():
            size = block.reference().nbytes()
            if size != block.size:
                self.resize(block, size)

    def resize(self, block: Block, size: int) -> None:
        self.events.append((self.phases, block, block.resize(size)))

    def freed(self, key: int) -> None:
        block = self.live.pop(key)
        self.resizable.pop(key, None)
        self.resize(block, 0)
        block.reference = None

    def block_of(self, tensor: Tensor) -> Block | None:
        return self.live.get(id(tensor.untyped_storage()))

    def mark(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of some tensors."""
        for tensor in tensors:
            block = self.block_of(optim.local(tensor))
            if block and KINDS.index(kind) < KINDS.index(block.kind):
                block.kind = kind

    def classify(self, function, operands: list[Tensor], results: list[Tensor]) -> None:
        """Recognize FSDP's buffers and cast weights."""
        if function is torch.ops.aten.empty.memory_format and self.phase in ("forward", "backward"):
            # FSDP allocates a gathered weight once, with torch.empty, and then resizes its storage.
            key = id(results[0].untyped_storage())
            if key in self.live:
                self.resizable[key] = self.live[key]
        elif function.namespace == "fsdp":
            self.mark(operands, "gathered")
        elif function is torch.ops.aten._to_copy.default:
            source = self.block_of(operands[0])
            if source and source.kind == "parameters":
                self.mark(results, "gathered")

    def changes(self) -> list[Change]:
        """What happened to blocks, now that their kinds are known."""
        return [(str(phase), block.kind, size) for phase, block, size in self.events]

    # FLOPs, kernels and collectives

    def count_flops(self, function, args, kwargs, result) -> float:
        """FLOPs of a matrix product; adds them to the step's."""
        packet = function.overloadpacket
        repeated = 0.0
        if packet is ATTENTION:
            flops = 2 * attention_product(*args[:2])
        elif packet is ATTENTION_BACKWARD:
            # Gradients of q, k, v and the scores, and the scores again, which were not kept
            repeated = attention_product(*args[1:3])
            flops = 5 * repeated
        elif formula := flop_registry.get(packet):
            flops = formula(*args, **kwargs, out_val=result)
        else:
            return 0.0
        # In backward, autograd records only while a forward pass is recomputed.
        if self.phase == "backward" and torch.is_grad_enabled():
            repeated = flops
        if self.phase != "optimizer":
            self.flops["recomputed"] += self.times * repeated
            self.flops["computed"] += self.times * (flops - repeated)
        return flops

    def count_operation(
        self, function, operands: list[Tensor], results: list[Tensor], flops: float
    ) -> None:
        """Count a kernel: its FLOPs, and the bytes it reads and writes."""
        name = function._schema.name
        if function.is_view or any(word in name for word in ("prim", "empty", "view", "copy_in")):
            return  # FSDP's copy_in of its own shard overlaps the rest
        if function.namespace in ("c10d", "_c10d_functional"):
            return
        shape = tuple(results[0].shape) if results else ()
        if flops:
            shape += (round(flops / 2 / results[0].numel()),)  # k of a matrix product
        new = Operation(self.phase, name.partition("::")[2], shape)
        operation = self.operations.setdefault((new.phase, new.name, shape), new)
        operation.count += self.times
        operation.flops += self.times * flops
        operation.bytes += self.times * sum(map(size_of, moved_by(function, operands, results)))

    def forget_counts(self) -> None:
        self.collectives.counts.clear()
        self.operations.clear()
        self.flops.clear()

    def communication(self) -> list[Communication]:
        counts = self.collectives.counts.items()
        return [Communication(*key, traffic.calls, traffic.bytes) for key, traffic in counts]

    # The phases of a step

    def follow(
        self, mesh: dist.DeviceMesh, run: Run, state: train.State, forward: nn.Module
    ) -> SimpleNamespace:
        """Recognize the tensors of a built run, and the phases of its steps.

        Returns what stands for the optimizer in train.train_step.
        """
        self.collectives = Collectives(mesh, self)
        net, optimizer = state.model, state.optimizer
        self.vocab_size = run.model_config.vocab_size // run.tp  # of this rank
        self.mark(net.parameters(), "parameters")
        self.mark(tree_leaves(optimizer.state()), "optimizer")
        self.mark_gradients(net)
        forward.register_forward_hook(lambda *_: self.begin("backward"))

        def step(*arguments) -> dict[str, Tensor]:
            self.begin("optimizer")
            self.mark_gradients(net)
            self.state = self.state_bytes()
            return optimizer.step(*arguments)

        return SimpleNamespace(step=step)

    def begin(self, phase: str) -> None:
        self.see_resized()
        self.phase = phase
        self.phases += 1
        if phase == "optimizer":
            self.times = 1

    def batches(self, batches: Iterator[Tensor], times: list[int]) -> Iterator[Tensor]:
        """The micro-batches of a step; each stands for `times` equal ones."""
        for number, stands_for in enumerate(times):
            if number > 0:
                self.mark_kept_gradients()
            self.begin("build")  # the micro-batch, not counted
            tokens = next(batches)
            self.begin("forward")
            self.times = stands_for
            yield tokens

    def mark_gradients(self, net: nn.Module) -> None:
        self.mark([p.grad for p in net.parameters() if p.grad is not None], "gradients")

    def mark_kept_gradients(self) -> None:
        """What backward leaves for the next micro-batch is gradients, except scalars."""
        for block in self.live.values():
            is_new = KINDS.index(block.kind) > KINDS.index("gradients")
            if block.phase == "backward" and block.size > 8 and is_new:
                block.kind = "gradients"

    def state_bytes(self) -> dict[str, int]:
        sizes = {"parameters": 0, "gradients": 0, "optimizer": 0}
        for block in self.live.values():
            if block.kind in sizes:
                sizes[block.kind] += block.size
        return sizes


# --------------------------------------------------------------------------------------------------
# Fake tensors in place of real ones


def is_real(args, kwargs) -> bool:
    """Whether an operation without fake operands stays real.

    torch reads the ranks of a mesh and the order of DDP's buckets: small int32 tensors on the CPU,
    a dtype that the model does not use. On the meta device, where the model is before it gets
    memory, fake tensors would only be slower.
    """
    tensors = tensors_in((args, kwargs))
    if not tensors:
        return kwargs.get("dtype") == torch.int32
    return "device" not in kwargs or kwargs["device"] == tensors[0].device


# --------------------------------------------------------------------------------------------------
# What a GPU allocates


def choose_gpu_kernels(net: nn.Module) -> None:
    """Make the model allocate on the CPU as on a GPU.

    There attention is one kernel for any length. The CPU's keeps as much (q, k, v, result, a number
    per token and head) and returns the result in q's layout, like cuDNN. A norm is one kernel, too.
    """
    kernels = GpuKernels()
    # By module: autograd switches modes off in backward, where a block may be computed again.
    for module in net.modules():
        if isinstance(module, model.Attention | model.Embedding | model.RMSNorm):
            module.register_forward_pre_hook(kernels.enter)
            module.register_forward_hook(kernels.leave, always_call=True)


class GpuKernels(TorchFunctionMode):
    """Answers in place of the functions by which the model chooses a kernel."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is model.is_gpu:
            return True
        if function is F.rms_norm:
            return FusedRMSNorm.apply(args[0], kwargs["weight"])
        return function(*args, **kwargs)

    def enter(self, *_) -> None:
        self.__enter__()

    def leave(self, *_) -> None:
        self.__exit__(None, None, None)


class FusedRMSNorm(torch.autograd.Function):
    """Allocates as the GPU's kernel, whose operator has no CPU implementation."""

    @staticmethod
    def forward(context, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)  # 1 / rms of each token
        context.save_for_backward(x, weight, rstd)
        return x * weight

    @staticmethod
    def backward(context, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = context.saved_tensors
        return grad * x, torch.empty_like(weight)
