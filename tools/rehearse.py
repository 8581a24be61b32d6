"""One optimizer step of one rank of any cluster, on this machine, without doing its arithmetic.

The model is laid out and the step is run by the code that trains: layout.py, dist.py, optim.py and
train.train_step. Only two things are not real. The process group is torch's `fake` one, whose
collectives return at once and send nothing. The tensors are torch's fake ones, which have shapes,
dtypes and storages but no values. So what is communicated, allocated and computed is counted, not
derived from a formula, for one rank of thousands.
"""

import contextlib
import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed
from torch import Tensor, nn

# What is private in torch, all of it here. There are no public fake tensors, no public process
# group that sends nothing, and no public way to see every operation.
from torch._C._distributed_c10d import Work, _create_work_from_future
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import dist
import layout
import model
import optim
import train
from checkpoint import flatten
from config import Config
from layout import Layout, choose_layout
from profiling import CommunicationCounter

# --------------------------------------------------------------------------------------------------
# What comes out


@dataclass(frozen=True)
class Communication:
    """What one rank sends on one axis in one optimizer step."""

    axis: str  # dp_replicate, dp_shard, tp, world
    collective: str  # as profiling.CommunicationCounter names them
    phase: str  # forward, backward, optimizer
    count: int
    bytes: int  # of full tensors, as profiling.CommunicationCounter counts them


@dataclass(frozen=True)
class Rehearsal:
    """What one optimizer step of one rank takes."""

    layout: Layout
    parameters: int  # of the whole model
    parameters_per_rank: int
    memory: dict[str, int]  # bytes at the peak by kind, see KINDS; their sum is the peak
    peak: int  # bytes of tensors, from the build of the model on
    state: dict[str, int]  # bytes of parameters, gradients and optimizer at the update
    communication: list[Communication]
    flops: float  # in one step, without those of recomputation
    recomputed_flops: float
    checkpoint_bytes: int  # that this rank writes with --checkpoint sharded


# --------------------------------------------------------------------------------------------------
# The rehearsal


def rehearse(
    config: Config,
    rank: int,
    world_size: int,
    local_size: int,
    vocab_size: int,
    device_type: str,
    device_memory: int,
) -> Rehearsal:
    """Run one optimizer step of rank `rank` of `world_size`, of which a host has `local_size`.

    `vocab_size` is that of the tokenizer, `device_memory` the bytes that one rank may fill, for
    --strategy auto. With `device_type` "cuda" the step allocates what it would on a GPU. --compile
    is ignored: the rehearsal shows the step without it. Raises UsageError and MeshError where flags
    and ranks do not fit together, as train.py does.
    """
    c = dataclasses.replace(config, compile=False)
    if device_type == "cuda" and c.dtype == "auto":
        c = dataclasses.replace(c, dtype="bfloat16")  # there may be no GPU here to ask
    with fake_group(rank, world_size) as store:
        world = dist.World(
            rank=rank,
            size=world_size,
            local_rank=rank % local_size,
            local_size=local_size,
            device=torch.device(device_type),
            timeout=timedelta(minutes=1),
            store=store,
        )
        chosen = choose_layout(c, world, vocab_size, device_memory)
        # FSDP on "cuda" would need a GPU's streams.
        world = dataclasses.replace(world, device=torch.device("cpu"))
        with as_on(device_type):
            return run_step(c, chosen, world)


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[FakeStore]:
    """A process group of `world_size` ranks, of which only this one exists."""
    store = FakeStore()
    torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield store
    finally:
        dist.stop()


def run_step(c: Config, chosen: Layout, world: dist.World) -> Rehearsal:
    """Build the model and the optimizer, run one step and sum up."""
    mesh = dist.make_mesh(world, chosen.mesh_shape)
    net = layout.empty_model(chosen, c)
    parameters = net.parameter_count()
    fakes = FakeTensors()
    times = times_of_micro_batches(chosen.grad_accum_steps)
    recorder = Recorder(chosen, fakes)
    counter = StepCommunication(mesh, recorder)
    with fakes, StandIn(), counter, recorder, loss_parallel(), without_initial_weights():
        forward = layout.lay_out(net, mesh, chosen, c)
        optimizer = train.build_optimizer(net, c)
        state = optimizer.state()
        run = SimpleNamespace(
            plan=SimpleNamespace(config=c),
            layout=dataclasses.replace(chosen, grad_accum_steps=len(times)),
            world=world,
            forward=forward,
            model=net,
            optimizer=optimizer,
        )
        recorder.follow(run)
        train.train_step(run, recorder.batches(empty_batches(chosen), times), step=1)
    memory = recorder.at_peak()
    return Rehearsal(
        layout=chosen,
        parameters=parameters,
        parameters_per_rank=sum(optim.local(p).numel() for p in net.parameters()),
        memory=memory,
        peak=sum(memory.values()),
        state=recorder.state_bytes(),
        communication=counter.of_step(),
        flops=recorder.flops["computed"],
        recomputed_flops=recorder.flops["recomputed"],
        checkpoint_bytes=own_bytes({"model": dict(net.named_parameters()), "optimizer": state}),
    )


def empty_batches(chosen: Layout) -> Iterator[Tensor]:
    """Micro-batches (B, T + 1), as those of train.py."""
    while True:
        shape = (chosen.micro_batch_size, chosen.model_config.seq_len + 1)
        yield torch.zeros(shape, dtype=torch.int64)


def times_of_micro_batches(grad_accum_steps: int) -> list[int]:
    """How many micro-batches each that is run stands for: the first, one between and the last."""
    if grad_accum_steps <= 3:
        return [1] * grad_accum_steps
    return [1, grad_accum_steps - 2, 1]


def own_bytes(state: dict) -> int:
    """Bytes of `state` that a rank writes. Ranks that hold the same tensor share the writing."""
    world_size = torch.distributed.get_world_size()
    total = 0.0
    for _, tensor in flatten(state):
        holders = world_size / optim.num_shards(tensor)
        total += optim.local(tensor).nbytes / holders
    return round(total)


# --------------------------------------------------------------------------------------------------
# What fake tensors and the fake process group cannot do


class FakeTensors(FakeTensorMode):
    """torch's fake tensors, which also says when a shape alone is asked for.

    DTensor enters the mode once more to find the shape of a result, by the operation on whole
    tensors, which no rank ever has.
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.depth = 0

    def __enter__(self):
        self.depth += 1
        return super().__enter__()

    def __exit__(self, *error):
        self.depth -= 1
        return super().__exit__(*error)

    @property
    def asks_for_shapes(self) -> bool:
        return self.depth > 1


class StandIn(TorchDispatchMode):
    """Runs for real what needs values or takes no memory, and completes DDP's collectives.

    torch reads the ranks of a mesh and the order of DDP's buckets, small tensors of 32-bit integers
    on the CPU. Nothing in the model is of that dtype. Before it has memory, it is on the meta
    device, where FSDP cuts each weight into as many views as there are ranks: as fake tensors these
    would take a second for 16,384 ranks.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it decomposes into operations on its local tensors
        kwargs = kwargs or {}
        if is_real(args, kwargs):
            with unset_fake_temporarily():
                return function(*args, **kwargs)
        if function is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # a fake one would be a copy
        result = function(*args, **kwargs)
        if function is torch.ops.c10d.allreduce_.default:
            # DDP reads the averaged bucket from the future, which the fake group leaves empty.
            tensors, _ = result
            future = torch.futures.Future()
            future.set_result(tensors)
            return tensors, _create_work_from_future(future).boxed()
        return result


def is_real(args, kwargs) -> bool:
    """Whether an operation has real operands only, and does not leave the meta device."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not tensors:
        return kwargs.get("dtype") == torch.int32
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return False
    return "device" not in kwargs or kwargs["device"] == tensors[0].device


@contextmanager
def without_initial_weights() -> Iterator[None]:
    """Let dist.materialize give the model memory, but compute no weights."""
    with mock.patch.object(dist, "materialize", materialize_empty):
        yield


def materialize_empty(net: nn.Module, device: torch.device, init: Callable) -> None:
    net.to_empty(device=device)
    # dist.materialize has one whole tensor at a time.
    largest = max(net.parameters(), key=Tensor.numel)
    torch.empty(largest.shape, dtype=largest.dtype, device=device)


@contextmanager
def as_on(device_type: str) -> Iterator[None]:
    """Let the model allocate on the CPU what it would on a device of this type."""
    if device_type == "cpu":
        yield
        return
    with contextlib.ExitStack() as stack:
        # Attention is one kernel for any length there. The CPU's keeps as much, q, k, v, the result
        # and a number per token and head, and returns the result in the layout of q, as cuDNN does.
        stack.enter_context(mock.patch.object(model, "causal_mask", lambda *_: None))
        # A norm is one kernel, too.
        stack.enter_context(mock.patch.object(model.RMSNorm, "forward", fused_rms_norm))
        yield


def fused_rms_norm(norm: model.RMSNorm, x: Tensor) -> Tensor:
    return FusedRMSNorm.apply(x, norm.weight.to(x.dtype))


class FusedRMSNorm(torch.autograd.Function):
    """What a GPU's kernel allocates. Its operator has no implementation for the CPU."""

    @staticmethod
    def forward(context, x: Tensor, weight: Tensor) -> Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)  # 1 / rms of each token
        context.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(context, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = context.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


# --------------------------------------------------------------------------------------------------
# Recording


@dataclass
class Collective:
    kind: str
    axis: str
    phase: str
    times: int  # micro-batches that it stands for
    bytes: int


class StepCommunication(CommunicationCounter):
    """Counts collectives by phase, and those of a micro-batch as often as it stands for others."""

    def __init__(self, mesh: dist.DeviceMesh, recorder: "Recorder"):
        super().__init__(mesh)
        self.recorder = recorder
        self.collectives: list[Collective] = []

    def record(self, kind: str, axis: str, size: int) -> None:
        at = self.recorder
        self.collectives.append(Collective(kind, axis, at.phase, at.times, size))

    def of_step(self) -> list[Communication]:
        counts: Counter = Counter()
        sizes: Counter = Counter()
        for one in self.collectives:
            if one.phase != "build":
                key = (one.axis, one.kind, one.phase)
                counts[key] += one.times
                sizes[key] += one.times * one.bytes
        return [Communication(*key, count, sizes[key]) for key, count in counts.items()]


# The kinds of memory. Where several apply to a storage in its life, the first one counts.
KINDS = (
    "parameters",
    "optimizer",
    "gradients",  # of the optimizer step
    "unsynchronized",  # gradients that wait for a later micro-batch, beyond those
    "logits",
    "gathered",  # buffers of FSDP's collectives, and weights in the compute dtype
    "activations",
    "other",
)


@dataclass
class Block:
    """A storage that some tensors share."""

    size: int
    phase: str  # in which it was allocated
    kind: str
    reference: weakref.ref | None = None


@dataclass
class Event:
    """A block has grown or shrunk."""

    block: Block
    change: int  # bytes


# The kernel's operators, which torch's flop_counter does not count
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attention_product(q: Tensor, k: Tensor) -> int:
    """FLOPs of one product with the scores (B, H, T, T), of which a causal kernel computes half."""
    B, H, T, d_head = q.shape
    return 2 * B * H * T * k.size(2) * d_head // 2


class Recorder(TorchDispatchMode):
    """Records when each storage of a tensor comes and goes, and counts FLOPs.

    A storage's kind may only be known later, a gradient's for example when the optimizer reads it,
    so that the peak is searched in the end. What a kernel allocates and frees within one operation
    is not seen. It works with real tensors, too.
    """

    def __init__(self, chosen: Layout, fakes: FakeTensors | None = None):
        super().__init__()
        self.fakes = fakes
        self.phase = "build"
        self.times = 1
        self.vocab = chosen.model_config.vocab_size // chosen.mesh_shape[2]
        self.live: dict[int, Block] = {}  # by the id of a storage
        self.events: list[Event] = []
        self.flops: Counter[str] = Counter()

    def __enter__(self):
        recorder = self
        resize = torch.UntypedStorage.resize_

        def resize_(storage, size):  # by which FSDP frees gathered weights; no operation shows it
            resize(storage, size)
            recorder.resized(storage)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    # What happens

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it decomposes into operations on its local tensors
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self.is_about_shapes(types):
            return result
        if not function.is_view:  # else nothing is new but gloo's buffers, on which it works later
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.see(leaf)
        self.classify(function, args, kwargs, result)
        if self.phase != "build":
            self.count_flops(function, args, kwargs, result)
        return result

    def see(self, tensor: Tensor) -> None:
        """Record the storage of a tensor if it is new."""
        if not self.is_own(tensor):
            return
        storage = tensor.untyped_storage()
        if id(storage) in self.live:
            return
        kind = "activations" if self.phase in ("forward", "backward") else "other"
        if tensor.dim() > 1 and tensor.shape[-1] == self.vocab and kind == "activations":
            kind = "logits"
        block = Block(0, self.phase, kind)
        key = id(storage)
        block.reference = weakref.ref(storage, lambda _: self.freed(key))
        self.live[key] = block
        self.resized(storage)

    def is_about_shapes(self, types) -> bool:
        """Whether DTensor asks for a shape, for which it uses fake tensors in a real run, too."""
        if self.fakes is not None:
            return self.fakes.asks_for_shapes
        return any(issubclass(kind, FakeTensor) for kind in types)

    def is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor takes memory of the rank: here a fake one, or in a real run a real one.

        The meta device takes none, nor does a tensor that wraps another until a collective ends.
        """
        if isinstance(tensor, FakeTensor):
            return self.fakes is not None
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        return self.fakes is None and is_plain and tensor.device.type != "meta"

    def resized(self, storage: torch.UntypedStorage) -> None:
        block = self.live.get(id(storage))
        if block is not None:
            change = storage.nbytes() - block.size
            block.size += change
            self.events.append(Event(block, change))

    def freed(self, key: int) -> None:
        block = self.live.pop(key)
        self.events.append(Event(block, -block.size))
        block.reference = None

    def mark(self, tensors, kind: str) -> None:
        """Say what some tensors are."""
        for tensor in tensors:
            if block := self.block_of(optim.local(tensor)):
                self.classify_as(block, kind)

    def classify_as(self, block: Block, kind: str) -> None:
        if KINDS.index(kind) < KINDS.index(block.kind):
            block.kind = kind

    def block_of(self, tensor: Tensor) -> Block | None:
        return self.live.get(id(tensor.untyped_storage()))

    def classify(self, function, args, kwargs, result) -> None:
        """Recognize FSDP's buffers, and weights that are cast."""
        namespace, _, name = function._schema.name.partition("::")
        if namespace == "fsdp" or name in ("_allgather_base_", "_reduce_scatter_base_"):
            leaves = tree_leaves((args, kwargs))
            self.mark((leaf for leaf in leaves if isinstance(leaf, Tensor)), "gathered")
        elif name == "_to_copy":
            source = self.block_of(args[0])
            if source and source.kind == "parameters":
                self.mark([result], "gathered")

    def count_flops(self, function, args, kwargs, result) -> None:
        # Gradients are recorded in backward only while a forward pass is repeated there.
        is_repeated = self.phase == "backward" and torch.is_grad_enabled()
        purpose = "recomputed" if is_repeated else "computed"
        packet = function.overloadpacket
        if packet is ATTENTION:
            self.flops[purpose] += self.times * 2 * attention_product(*args[:2])
        elif packet is ATTENTION_BACKWARD:
            # Gradients of q, k, v and the scores, and the scores once more, which were not kept
            product = attention_product(*args[1:3])
            self.flops["computed"] += self.times * 4 * product
            self.flops["recomputed"] += self.times * product
        elif formula := flop_registry.get(packet):
            self.flops[purpose] += self.times * formula(*args, **kwargs, out_val=result)

    # The phases of a step

    def follow(self, run: train.Run) -> None:
        """Recognize the tensors of a run that has been built, and the phases of its steps."""
        self.mark(run.model.parameters(), "parameters")
        self.mark(tree_leaves(run.optimizer.state()), "optimizer")
        self.mark_gradients(run.model)
        run.forward.register_forward_hook(lambda *_: self.begin("backward"))
        update = run.optimizer.step

        def step(*arguments):
            self.begin("optimizer")
            self.mark_gradients(run.model)
            return update(*arguments)

        run.optimizer.step = step

    def batches(self, batches: Iterator[Tensor], times: list[int]) -> Iterator[Tensor]:
        """The micro-batches of a step; `times` says how many micro-batches each stands for."""
        for number, stands_for in enumerate(times):
            if number > 0:
                self.mark_unsynchronized()
            self.times = stands_for
            self.begin("forward")
            yield next(batches)

    def begin(self, phase: str) -> None:
        self.phase = phase
        if phase == "optimizer":
            self.times = 1

    def mark_gradients(self, net: nn.Module) -> None:
        self.mark((p.grad for p in net.parameters() if p.grad is not None), "gradients")

    def mark_unsynchronized(self) -> None:
        """What a backward pass leaves for the next micro-batch is gradients."""
        for block in self.live.values():
            is_scalar = block.size <= 8
            if block.phase == "backward" and not is_scalar:
                self.classify_as(block, "unsynchronized")

    # What was found

    def state_bytes(self) -> dict[str, int]:
        sizes = {"parameters": 0, "gradients": 0, "optimizer": 0}
        blocks = {id(event.block): event.block for event in self.events}
        largest: Counter[int] = Counter()
        for event in self.events:
            largest[id(event.block)] += max(0, event.change)
        for key, block in blocks.items():
            if block.kind in sizes:
                sizes[block.kind] += largest[key]
        return sizes

    def at_peak(self) -> dict[str, int]:
        """Bytes by kind, at the first moment at which their sum is largest."""
        total = 0
        peak = 0
        peak_event = 0
        for number, event in enumerate(self.events, start=1):
            total += event.change
            if total > peak:
                peak = total
                peak_event = number
        sizes = dict.fromkeys(KINDS, 0)
        for event in self.events[:peak_event]:
            sizes[event.block.kind] += event.change
        return sizes
