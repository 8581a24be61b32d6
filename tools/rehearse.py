"""Run one optimizer step of one rank of any cluster on this machine, without the arithmetic.

The training code lays out the model and runs the step: train.build, dist.py, optim.py and
train.train_step. Only two things are fake, both from torch: the process group, whose collectives
return at once and send nothing, and the tensors, which have shapes, dtypes and storages but no
values. So the communication, allocations and FLOPs of one rank out of thousands are counted, not
derived from formulas.
"""

import dataclasses
import difflib
import gc
import itertools
import platform
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
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
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import dist
import optim
import train
from config import Run
from extras.profile import CommunicationCounter, Traffic

# --------------------------------------------------------------------------------------------------
# Results


@dataclass(frozen=True)
class Communication:
    """The collectives of one kind that one rank runs on one axis in one phase of a step."""

    axis: str  # dp_replicate, dp_shard, tp, world
    collective: str  # a kind of extras.profile.CommunicationCounter
    phase: str  # forward, backward, optimizer
    count: int
    bytes: int  # of full tensors, as extras.profile.CommunicationCounter counts them


@dataclass
class Operation:
    """Identical operations of one rank in one optimizer step."""

    phase: str  # forward, backward, optimizer
    name: str  # torch's operator
    shape: tuple[int, ...]  # of the first result, with k for a matrix product; () without result
    count: int = 0
    flops: float = 0.0  # of all of them; 0 unless matrix products
    bytes: int = 0  # read and written by all of them


# A block was allocated, resized or freed: number of the phase as text, kind, bytes that it grew by
Change = tuple[str, str, int]

# Kinds of memory. If a storage has several during its life, the first of this list counts.
KINDS = (
    "parameters",
    "optimizer",
    "gradients",  # those that the optimizer reads, and those kept for a later micro-batch
    "logits",
    "gathered",  # FSDP's collective buffers, and weights in the compute dtype
    "activations",
    "other",
)


@dataclass(frozen=True)
class Rehearsal:
    """What one rank holds, sends and computes in one optimizer step."""

    run: Run
    parameters: int  # of the full model
    parameters_per_rank: int
    memory: dict[str, int]  # bytes of tensors by KINDS, at the peak
    state: dict[str, int]  # bytes of parameters, gradients and optimizer at the update
    communication: list[Communication]
    operations: list[Operation]
    flops: float  # per step, without recomputation and the update
    recomputed_flops: float
    changes: list[Change] = field(default_factory=list, repr=False)  # until `memory` is known

    @property
    def peak(self) -> int:
        """Peak bytes of tensors, from the build of the model on."""
        return sum(self.memory.values())


# --------------------------------------------------------------------------------------------------
# The rehearsal


def rehearse(run: Run, rank: int = 0) -> Rehearsal:
    """Run one optimizer step of a rank of `run`.

    If the run's device is "cuda", the step allocates as on a GPU. The step is not compiled.
    """
    world_size = run.dp_size * run.tp
    with fake_group(rank, world_size):
        # On "cuda" FSDP would need a GPU's streams. No count depends on hosts.
        world = fake_world(world_size, rank)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real run shows them
            eager = dataclasses.replace(run, compile=False, optim_metrics_interval=0)
            found = run_layers(eager, world)
    return dataclasses.replace(found, run=run)


def fake_world(size: int, rank: int = 0, local_size: int | None = None) -> dist.World:
    """Return a world of `size` CPUs like this one, as if all were on one host."""
    device = torch.device("cpu")
    return dist.World(
        rank=rank,
        size=size,
        local_size=local_size or size,
        device=device,
        timeout=timedelta(minutes=1),
        device_name=platform.machine(),
        has_bfloat16=dist.has_bfloat16(device),
    )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Free tensors only with their last reference, not when a collection happens to run."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """A process group of `world_size` ranks, of which only `rank` exists."""
    settings = {"store": FakeStore(), "rank": rank, "world_size": world_size}
    torch.distributed.init_process_group("fake", **settings)
    try:
        yield
    finally:
        leave_group()


def leave_group() -> None:
    """Leave the process group, if any, so that this process can join another."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    # DTensor caches meshes by shape, with the names of groups that no longer exist.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()


def run_step(run: Run, mesh: dist.DeviceMesh) -> Rehearsal:
    """Build the model and the optimizer, run a step, and return what was recorded."""
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fakes)
    net = train.empty_model(run)  # outside: a parameter with weak references cannot move
    if run.device != "cpu":
        choose_gpu_kernels(net)
    with fakes, recorder, no_garbage_collection():
        state = train.build(run, mesh, net, init=False)
        state.step = 1
        state.optimizer = recorder.follow(mesh, run, state)
        # How many micro-batches each rehearsed one stands for: the first, a middle one, the last
        n = run.grad_accum_steps
        all_times = [[1] * n if n <= 3 else [1, n - 2, 1]]
        if isinstance(state.model, DistributedDataParallel):
            all_times.insert(0, [1])  # the first step, where DDP rebuilds its buckets
        shape = (run.micro_batch_size, run.seq_len + 1)
        for times in all_times:
            recorder.forget_counts()
            tokens = (torch.zeros(shape, dtype=torch.int64) for _ in times)
            batches = recorder.batches(tokens, times)
            short = dataclasses.replace(run, grad_accum_steps=len(times))
            train.train_step(state, batches, short, run.lr)
    return Rehearsal(
        run=run,
        parameters=state.decoder.parameter_count(),
        parameters_per_rank=sum(optim.local(w).numel() for w in state.decoder.parameters()),
        memory={},
        state=recorder.state,
        communication=recorder.communication(),
        operations=list(recorder.operations.values()),
        flops=recorder.flops["computed"],
        recomputed_flops=recorder.flops["recomputed"],
        changes=recorder.changes(),
    )


# --------------------------------------------------------------------------------------------------
# A step of many layers, from steps of few layers

REHEARSED_UNITS = 2  # FSDP units: the first and the last


def run_layers(run: Run, world: dist.World) -> Rehearsal:
    """Rehearse the step of `run`, by extending a step of few layers if that is exact.

    All FSDP units between the first and the last do the same, in the same places of the step. So
    each further unit adds what a third adds to two. This is not so with DDP, whose buckets may end
    anywhere, nor with Muon, whose matrices are dealt to all ranks.
    """
    # One mesh for all steps, because DTensor caches its groups.
    mesh = dist.make_mesh(world, (run.dp_replicate, run.dp_shard, run.tp))

    def rehearse_layers(n_layer: int) -> Rehearsal:
        model_config = dataclasses.replace(run.model_config, n_layer=n_layer)
        return run_step(dataclasses.replace(run, n_layer=n_layer, model_config=model_config), mesh)

    n_layer = run.n_layer
    unit = dist.blocks_per_unit(run.wrap) or n_layer  # one unit: nothing repeats
    more = n_layer // unit - REHEARSED_UNITS  # units to add
    few = n_layer - more * unit
    found = None
    repeats = run.optimizer != "muon" and (run.strategy != "ddp" or run.tp > 1)
    if more > REHEARSED_UNITS + 1 and repeats:
        with suppress(ValueError):  # from `extend`: the units differ
            found = extend(rehearse_layers(few), rehearse_layers(few + unit), more)
    found = found or rehearse_layers(n_layer)
    return dataclasses.replace(found, memory=at_peak(found.changes), changes=[])


def extend(few, more, times: int):
    """Return `few` plus `times` times what `more` adds to its numbers and lists.

    Raises ValueError if the two differ in any other way.
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
    """Repeat `times` times what `more` inserts, and extend the other items pair by pair."""
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
    """Return the bytes by kind when their sum first reaches its maximum."""
    totals = list(itertools.accumulate(size for _, _, size in changes))
    sizes = dict.fromkeys(KINDS, 0)
    for _, kind, size in changes[: totals.index(max(totals)) + 1]:
        sizes[kind] += size
    return sizes


# --------------------------------------------------------------------------------------------------
# Recording a step


@dataclass(eq=False)
class Block:
    """A storage, which several tensors may share."""

    phase: str  # when it was allocated
    kind: str
    reference: weakref.ref | None
    size: int = 0

    def resize(self, size: int) -> int:
        """Set the size; return by how much it grew."""
        grown = size - self.size
        self.size = size
        return grown


class Collectives(CommunicationCounter):
    """Counts by axis, kind and phase, once for each micro-batch that the current one stands for."""

    def __init__(self, mesh: dist.DeviceMesh, recorder: "Recorder"):
        super().__init__(mesh)
        self.recorder = recorder

    def record(self, kind: str, axis: str, full: Tensor) -> None:
        traffic = self.counts.setdefault((axis, kind, self.recorder.phase), Traffic())
        traffic.calls += self.recorder.times
        traffic.bytes += self.recorder.times * full.nbytes


ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


# Operators that read only a few elements of their first operand
SELECTING = {
    torch.ops.aten.embedding,
    torch.ops.aten.nll_loss_forward,
    torch.ops.aten.nll_loss_backward,
}


def tensors_in(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def size_of(tensor: Tensor) -> int:
    """Bytes of a tensor, or of its storage if an expanded tensor repeats it."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def moved_by(function, operands: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    """The tensors that a kernel reads or writes. Those that it changes in place count twice."""
    if function.overloadpacket in SELECTING:
        return results
    if any(word in function._schema.name for word in ("copy", "cat", "zero", "fill")):
        return list({id(tensor): tensor for tensor in operands + results}.values())
    return operands + (results or operands)


class Recorder(TorchDispatchMode):
    """Records operations, collectives, and when each tensor's storage is allocated and freed.

    A storage's kind may be known only later: a gradient's when the optimizer reads it. So the peak
    is found at the end. Memory that a single operation allocates and frees is not seen.
    """

    def __init__(self, fakes: FakeTensorMode):
        super().__init__()
        self.fakes = fakes
        self.phase = "build"
        self.times = 1  # micro-batches that the current one stands for
        self.live: dict[int, Block] = {}  # by storage id
        self.resizable: dict[int, Block] = {}  # the blocks of `live` that FSDP may resize
        self.vocab_size = 0  # of this rank; `follow` sets it
        self.phases = 0  # started so far
        self.events: list[tuple[int, Block, int]] = []  # like Change, before kinds are known
        self.collectives: Collectives | None = None
        self.flops: Counter[str] = Counter()
        self.operations: dict[tuple, Operation] = {}
        self.state: dict[str, int] = {}

    # Operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types or AsyncCollectiveTensor in types:
            return NotImplemented  # it decomposes into operations on local tensors
        if function is torch.ops.prim.device.default:  # half of all operations
            return args[0].fake_device
        kwargs = kwargs or {}
        result = self.run(function, types, args, kwargs)
        if self.is_about_shapes(types):
            return result
        operands, results = tensors_in((args, kwargs)), tensors_in(result)
        if not function.is_view:  # a view allocates nothing, but might show a buffer of gloo
            if self.phase != "optimizer":  # which FSDP does not take part in
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
        if FakeTensor not in types and is_real(args, kwargs):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # on fake tensors it would make a copy
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

        For this it enters the mode once more, and runs the operation on full tensors, which no
        rank ever holds.
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

        A dispatch mode does not see that a storage is resized.
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
        """Set the kind of these tensors' storages, unless theirs comes first in KINDS."""
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
        """Return what happened to the blocks, now that their kinds are known."""
        return [(str(phase), block.kind, size) for phase, block, size in self.events]

    # FLOPs, kernels and collectives

    def count_flops(self, function, args, kwargs, result) -> float:
        """Return the FLOPs of a matrix product, and add them to those of the step."""
        packet = function.overloadpacket
        repeated = 0.0
        if packet is ATTENTION:
            q, k, *options = args
            flops = attention_flops(q.shape, k.shape, *options, **kwargs)
        elif packet is ATTENTION_BACKWARD:
            # The gradients of q, k, v and the scores, and once more the scores, which were not kept
            _, q, k, v, _, _, *options = args
            repeated = attention_flops(q.shape, k.shape, v, *options, **kwargs) // 2
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

    def follow(self, mesh: dist.DeviceMesh, run: Run, state: train.State) -> SimpleNamespace:
        """Mark the tensors of a built run, and follow the phases of its steps.

        Returns what train.train_step gets in place of the optimizer.
        """
        self.collectives = Collectives(mesh, self)
        net, optimizer = state.decoder, state.optimizer
        self.vocab_size = run.model_config.vocab_size // run.tp  # of this rank
        self.mark(net.parameters(), "parameters")
        self.mark(tree_leaves(optimizer.state()), "optimizer")
        self.mark_gradients(net)
        state.model.register_forward_hook(lambda *_: self.begin("backward"))

        def step(*arguments) -> tuple[dict, list]:
            self.begin("optimizer")
            self.mark_gradients(net)
            self.state = self.state_bytes()
            with nullcontext() if run.device == "cpu" else GPUKernels():
                return optimizer.step(*arguments)

        return SimpleNamespace(step=step)

    def begin(self, phase: str) -> None:
        self.see_resized()
        self.phase = phase
        self.phases += 1
        if phase == "optimizer":
            self.times = 1

    def batches(self, batches: Iterator[Tensor], times: list[int]) -> Iterator[Tensor]:
        """Yield the micro-batches of a step; number i stands for times[i] equal ones."""
        for number, stands_for in enumerate(times):
            if number > 0:
                self.mark_kept_gradients()
            self.begin("build")  # the micro-batch; not counted
            tokens = next(batches)
            self.begin("forward")
            self.times = stands_for
            yield tokens

    def mark_gradients(self, net: nn.Module) -> None:
        self.mark([p.grad for p in net.parameters() if p.grad is not None], "gradients")

    def mark_kept_gradients(self) -> None:
        """Mark what backward leaves for the next micro-batch as gradients, except scalars."""
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
    """Whether an operation without fake operands runs on real tensors.

    torch reads the ranks of a mesh and the order of DDP's buckets from small int32 tensors on the
    CPU, a dtype that the model does not use. On the meta device, where the model is before it gets
    memory, fake tensors would only be slower.
    """
    tensors = tensors_in((args, kwargs))
    if not tensors:
        return kwargs.get("dtype") == torch.int32
    return "device" not in kwargs or kwargs["device"] == tensors[0].device


# --------------------------------------------------------------------------------------------------
# The kernels of a GPU, for fake tensors that are on a CPU: what a kernel keeps for backward decides
# the memory of a step.

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attention_flops(
    q: torch.Size, k: torch.Size, v, dropout: float = 0.0, is_causal: bool = False, **_
) -> int:
    """FLOPs of softmax(q k^T) v for q (B, H, T, d_head). The causal mask hides half of them."""
    B, H, T, d_head = q
    flops = 2 * (2 * B * H * T * k[-2] * d_head)  # two products, a multiply and an add each
    return flops // 2 if is_causal else flops


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention with a kernel that keeps no scores, as on CPUs and GPUs.

    It keeps q, k, v, the result and a number per token and head; the result has the layout of q, as
    cuDNN's has. Without a device, torch would write out the scores.
    """
    options = {"attn_mask": attn_mask, "scale": scale}
    y, _ = ATTENTION(q, k, v, dropout_p, is_causal, **options)
    return y


def rms_norm(x: Tensor, shape: tuple, weight: Tensor | None = None, eps: float | None = None):
    """F.rms_norm with the kernel of a GPU."""
    return FusedRMSNorm.apply(x, weight)


class FusedRMSNorm(torch.autograd.Function):
    """Reads and writes what the GPU's kernel does, whose operator has no CPU implementation."""

    @staticmethod
    def forward(context, x: Tensor, weight: Tensor | None) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)  # 1 / rms of each token
        context.save_for_backward(x, weight, rstd)
        return x.clone() if weight is None else x * weight

    @staticmethod
    def backward(context, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = context.saved_tensors
        return grad * x, None if weight is None else torch.empty_like(weight)


# What a step asks to choose a kernel, or calls to run one -> what it gets
ON_GPU = {
    Tensor.is_cuda.__get__: lambda tensor: True,
    Tensor.is_cpu.__get__: lambda tensor: False,
    F.scaled_dot_product_attention: flash_attention,
    F.rms_norm: rms_norm,
}


def choose_gpu_kernels(net: nn.Module) -> None:
    """Make a model of fake tensors allocate what it would on a GPU."""
    kernels = GPUKernels()
    layers = [layer for block in net.blocks for layer in block.children()]
    # In hooks: autograd switches modes off in backward, where a block may be computed again.
    for module in (net.embed, *layers, net.norm, net.head):
        module.register_forward_pre_hook(kernels.enter)
        module.register_forward_hook(kernels.leave, always_call=True)


class GPUKernels(TorchFunctionMode):
    """Answers as if all tensors were on a GPU, and calls kernels like those of a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return ON_GPU.get(function, function)(*args, **kwargs or {})

    def enter(self, *_) -> None:
        self.__enter__()

    def leave(self, *_) -> None:
        self.__exit__(None, None, None)
