"""Turn flags and ranks into a run, and place the run's model on the mesh.

`resolve` fills in every default, `place` lays out the model, and `estimate_memory` estimates the
memory that a rank needs.
"""

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dist
import metrics
import optim
from config import (
    DEFAULTS,
    Config,
    blocks_per_unit,
    default_out,
    profile_window,
)
from data import DataFacts
from errors import UsageError
from model import SIZES, ModelConfig, Transformer, activation_bytes_of_block
from runtime.machine import Machine
from runtime.preflight import NEW_RUN, Origin

# --------------------------------------------------------------------------------------------------
# A run


@dataclass(frozen=True, kw_only=True)
class Run(Config):
    """A resolved run: the value of every flag, and what follows from flags, ranks and data.

    It is the same on all ranks, and the manifest of each checkpoint records it. No value is None or
    "auto", except init_from and profile if not given, peak_tflops of an unknown device, the name of
    an unknown tokenizer, and rope_scaling of a model without it.
    """

    flags: dict  # as typed for this start or for an earlier start of the run
    model_config: ModelConfig
    data_facts: DataFacts
    mesh_shape: tuple[int, int, int]  # dp_replicate, dp_shard, tp
    dp_size: int  # dp_replicate x dp_shard
    grad_accum_steps: int
    tokens_per_step: int  # of all ranks
    compute_dtype: torch.dtype  # of the forward pass

    @property
    def manifest(self) -> dict:
        """What every checkpoint of the run records."""
        return {
            "flags": self.flags,
            "config": {name: getattr(self, name) for name in DEFAULTS},
            "model": dataclasses.asdict(self.model_config),
            "data": self.data_facts.fingerprint,
            "tokenizer": self.data_facts.tokenizer,
            "tokens_in_vocabulary": self.data_facts.vocab_size,
        }


# --------------------------------------------------------------------------------------------------
# Flags -> run

# Flags that override a part of the model
SIZE_FLAGS = DEFAULTS.keys() & {f.name for f in dataclasses.fields(ModelConfig)}


def resolve(flags: dict, machine: Machine, data: DataFacts, origin: Origin = NEW_RUN) -> Run:
    """Fill in every default of a run. Reads no file, prints nothing and queries no hardware.

    flags     {name: value} of the flags that were typed, as config.parse returns them
    machine   the ranks and their hardware
    data      vocabulary, tokenizer and fingerprint of the data
    origin    the checkpoint that this start continues or takes weights from, if any

    Raises UsageError and MeshError if flags, ranks, data and model do not fit together.
    """
    values = take_over(flags, origin)
    if origin.kept_flags or origin.kept_values:
        check_choices(values)
    model_config = resolve_model(values, data.vocab_size, origin.model_config)
    values = compute_defaults(values, model_config, machine)
    typed = origin.kept_flags | flags
    check_steps(values)
    if flags.get("init_from"):  # so that config.json describes the model without the checkpoint
        typed |= {name: values[name] for name in ("model", *SIZE_FLAGS)}
    *preferred, last = possible_strategies(values, machine)
    for strategy in preferred:
        with contextlib.suppress(dist.MeshError):  # for example, hsdp on hosts of unequal sizes
            run = on_mesh(values, strategy, machine, typed, model_config, data)
            if fits(run, machine.device_memory):
                return run
    return on_mesh(values, last, machine, typed, model_config, data)


def take_over(flags: dict, origin: Origin) -> dict:
    """Return the value of every flag: as typed, else from the run to continue, else the default.

    Defaults that are computed later are still None or "auto".
    """
    return DEFAULTS | origin.kept_values | origin.kept_flags | flags


def compute_defaults(values: dict, model_config: ModelConfig, machine: Machine) -> dict:
    """Return the values with the model's sizes and all defaults that do not depend on the mesh."""
    filled = values | {name: getattr(model_config, name) for name in SIZE_FLAGS}
    if filled["out"] is None:
        filled["out"] = default_out(values)
    filled["device"] = machine.device_type
    if filled["dtype"] == "auto":
        filled["dtype"] = "bfloat16" if machine.has_bfloat16 else "float32"
    if filled["wrap"] == "auto":
        filled["wrap"] = choose_wrap(model_config)
    if filled["lr"] is None:
        filled["lr"] = 0.5 / model_config.d_model
    if filled["num_workers"] is None:
        filled["num_workers"] = 2 if machine.device_type == "cuda" else 0
    if filled["peak_tflops"] is None and filled["dtype"] == "bfloat16":
        filled["peak_tflops"] = metrics.PEAK_TFLOPS.get(machine.device_name)
    return filled


def resolve_model(values: dict, vocab_size: int, saved: ModelConfig | None) -> ModelConfig:
    """Return the named size or `saved`, the model of a checkpoint, as changed by the size flags.

    The vocabulary of a checkpoint is kept if it has room for `vocab_size` ids. Otherwise vocab_size
    is rounded up to a multiple of 64, for which matrix kernels are fast. Raises UsageError.
    """
    size = saved or SIZES[values["model"]]
    overrides = {}
    if saved is None or vocab_size > saved.vocab_size:
        overrides["vocab_size"] = math.ceil(vocab_size / 64) * 64
    for name in SIZE_FLAGS:
        if values[name] is not None:
            overrides[name] = values[name]
    if size.n_kv_head == size.n_head and values["n_kv_head"] is None:
        # A model without grouped-query attention gets it only from --n_kv_head.
        overrides["n_kv_head"] = overrides.get("n_head", size.n_head)
    try:
        model_config = dataclasses.replace(size, **overrides)
        if values["tp"] > 1:
            model_config.check_tensor_parallel(values["tp"])
    except ValueError as error:
        raise UsageError(str(error)) from None
    return model_config


def check_choices(values: dict) -> None:
    """Raise UsageError if a value of the run to continue is not a choice in this code."""
    for f in dataclasses.fields(Config):
        if get_origin(f.type) is Literal and values[f.name] not in get_args(f.type):
            raise UsageError(
                f"--{f.name} {values[f.name]} of the run is unknown to this code: choose from "
                f"{', '.join(get_args(f.type))}"
            )


def check_steps(values: dict) -> None:
    """Raise UsageError for steps or learning rates that contradict each other."""
    max_steps = values["max_steps"]
    if values["min_lr"] > values["lr"]:
        raise UsageError(
            f"--min_lr {values['min_lr']} is above the peak learning rate {values['lr']}"
        )
    if values["profile"] and profile_window(values["profile"])[1] >= max_steps:
        raise UsageError(f"--profile {values['profile']}: STOP must be below max_steps {max_steps}")


def possible_strategies(values: dict, machine: Machine) -> list[str]:
    """Return --strategy or, for auto, the strategies to try, least communication first.

    The last one is used even if it does not fit into memory.
    """
    if values["strategy"] != "auto":
        return [values["strategy"]]
    if machine.world_size == values["tp"]:
        return ["single"]
    if values["dp_replicate"] or values["dp_shard"] or values["grad_sync"] == "shard":
        return ["hsdp"]
    if machine.world_size > machine.local_size:
        return ["ddp", "hsdp", "fsdp"]
    return ["ddp", "fsdp"]


# Logits that need more than this share of the device memory are computed in chunks. Chunks cost
# time: tools.plan predicts 0.8% of a step of llama3-8b on H100s for 2 chunks, and 2.4% for 8.
LOGITS_SHARE = 0.1


def check_batch(global_batch_size: int, micro_batch_size: int | None, dp_size: int) -> None:
    """Raise UsageError unless every rank gets as many sequences, in whole micro-batches."""
    per_forward = (micro_batch_size or 1) * dp_size  # the fewest sequences of all ranks
    if global_batch_size % per_forward == 0:
        return
    larger = math.ceil(global_batch_size / per_forward) * per_forward
    split = f"{dp_size} data-parallel ranks"
    remedy = f"give --global_batch_size {larger}"
    if micro_batch_size:
        split = f"micro_batch_size {micro_batch_size} x {split} = {per_forward}"
        remedy += ", another --micro_batch_size"
    raise UsageError(
        f"global_batch_size {global_batch_size} is not a multiple of {split}: {remedy} "
        "or another number of ranks"
    )


def on_mesh(
    values: dict,
    strategy: str,
    machine: Machine,
    flags: dict,
    model_config: ModelConfig,
    data: DataFacts,
) -> Run:
    """Return the run with this strategy: add its mesh shape and each rank's share of the batch.

    Raises UsageError, for example if the batch cannot be split, and MeshError.
    """
    if values["grad_sync"] == "shard" and strategy != "hsdp":
        raise UsageError(f"--grad_sync shard is for --strategy hsdp, not {strategy}")
    asked = (values["dp_replicate"], values["dp_shard"], values["tp"])
    shape = dist.mesh_shape(strategy, machine.world_size, machine.local_size, *asked)
    dp_size = shape[0] * shape[1]
    global_batch_size = values["global_batch_size"]
    if not values["eval_only"]:
        check_batch(global_batch_size, values["micro_batch_size"], dp_size)
    micro_batch_size = values["micro_batch_size"] or max(1, global_batch_size // dp_size)
    per_forward = micro_batch_size * dp_size  # sequences of all ranks
    on_this_mesh = {
        "strategy": strategy,
        "dp_replicate": shape[0],
        "dp_shard": shape[1],
        "micro_batch_size": micro_batch_size,
    }
    if values["loss_chunks"] is None:
        logits = micro_batch_size * values["seq_len"] * model_config.vocab_size // values["tp"]
        size = logits * logit_bytes(getattr(torch, values["dtype"]))
        chunks = max(1, size / (LOGITS_SHARE * machine.device_memory))
        on_this_mesh["loss_chunks"] = 2 ** math.ceil(math.log2(chunks))
    return Run(
        **values | on_this_mesh,
        flags=flags,
        model_config=model_config,
        data_facts=data,
        mesh_shape=shape,
        dp_size=dp_size,
        grad_accum_steps=global_batch_size // per_forward,
        tokens_per_step=global_batch_size * values["seq_len"],
        compute_dtype=getattr(torch, values["dtype"]),
    )


# --------------------------------------------------------------------------------------------------
# FSDP units

# The most bytes of float32 weights in an FSDP unit of --wrap auto. With 8 blocks of 2.6 MB on 2
# ranks (gloo, Zen 3, medians of three rounds) a step took 386, 360, 346 and 335 ms with 1, 2, 3 and
# 4 blocks per unit, and 311 ms with a single unit. A limit of 8 MB gives half of this gain. Two
# gathered units are in memory at a time, since FSDP gathers one ahead; with
# --wrap none, the full model is.
UNIT_BYTES = 8_000_000


def choose_wrap(model_config: ModelConfig) -> str:
    """Choose --wrap auto: blocks in groups of up to UNIT_BYTES, or one unit for a small model.

    Each message has a fixed cost, so small blocks are gathered together. A model that fits into one
    unit is gathered once per micro-batch.
    """
    with torch.device("meta"):
        model = Transformer(model_config)
    if 4 * model.parameter_count() <= UNIT_BYTES:
        return "none"
    block_bytes = 4 * sum(p.numel() for p in model.blocks[0].parameters())
    return f"block_group:{max(1, UNIT_BYTES // block_bytes)}"


def fsdp_units(model: Transformer, wrap: str) -> list[list[nn.Module]]:
    """Return the modules of each FSDP unit; the rest of the model, its root, is one more unit.

    Larger units send fewer, longer messages and need more memory for gathered weights. An embedding
    and a head that are not tied are also units. With --wrap none, the root is the full model.
    """
    size = blocks_per_unit(wrap)
    if size is None:
        return []
    starts = range(0, len(model.blocks), size)
    units = [list(model.blocks[start : start + size]) for start in starts]
    return units if model.config.tied else [[model.embed], *units, [model.head]]


# --------------------------------------------------------------------------------------------------
# The model on the mesh


def empty_model(run: Run) -> Transformer:
    """Return the model on the meta device, where it needs no memory."""
    with torch.device("meta"):
        return Transformer(run.model_config, run.compute_dtype, run.loss_chunks)


def place(
    model: Transformer, mesh: dist.DeviceMesh, run: Run, init_weights: bool = True
) -> nn.Module:
    """Place the model on the mesh; return the module to call.

    With `init_weights` False, weights are allocated but not filled, as a rehearsal needs them.
    With ddp, this runs one forward and backward pass: see dist.warm_up_buckets.
    """
    if run.activation_checkpointing != "none":
        mode = run.activation_checkpointing
        checkpoint_activations(model.blocks, mode, run.model_config, run.tp)
    if run.compile:
        modules = [*model.blocks, model.head.loss]
        if run.tp > 1:
            # Inductor silently gave wrong losses under loss_parallel() (torch 2.13, CPU).
            modules.remove(model.head.loss)
        elif run.strategy == "single" and len(model.blocks) <= 4 and run.loss_chunks == 1:
            modules = [model]  # deeper models gain nothing and take longer to compile
        compile_modules(modules)
    forward = dist.parallelize(
        model,
        mesh,
        run.strategy,
        init=functools.partial(model.init_tensor, seed=run.seed) if init_weights else None,
        dtype=run.compute_dtype,
        tp_plan=model.tensor_parallel_plan() if run.tp > 1 else None,
        fsdp_units=fsdp_units(model, run.wrap),
        reshard_after_forward=run.reshard_after_forward,
        keep_gradients=run.grad_sync == "batch" and run.grad_accum_steps > 1,
    )
    if isinstance(forward, DistributedDataParallel) and not run.eval_only:
        shape = (run.micro_batch_size, run.seq_len + 1)  # as in train_step
        tokens = torch.zeros(shape, dtype=torch.int64, device=mesh.device_type)
        dist.warm_up_buckets(forward, tokens[:, :-1], tokens[:, 1:])
    return forward


# --------------------------------------------------------------------------------------------------
# Recomputation and compilation

PRODUCT = torch.ops.aten.mm.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default  # of tp
# Selective checkpointing keeps the results that cost most to compute, with exceptions below.
SAVED_OPERATIONS = [
    PRODUCT,
    REDUCE_SCATTER,  # so that it is not sent twice
    torch.ops.aten.bmm.default,  # written-out attention
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def selective_contexts(c: ModelConfig, tp: int) -> tuple:
    """Return the contexts of a block's forward and recomputation: see checkpoint_activations.

    Called in each forward of a block, and when a block is compiled; then no tensor is a DTensor.
    """
    # Backward does not need the result of mlp.down, which is only added to the residual stream.
    recomputed = [(c.d_ff // tp, c.d_model)]  # shapes of weights, (in, out)
    if tp > 1:
        # attention.out computes a partial sum as large as the full output. The result of its
        # reduce_scatter is kept instead, which is only 1 / tp as large.
        recomputed.append((c.d_model // tp, c.d_model))
    scattered = collections.Counter()

    def is_saved(context, operator, *args, **kwargs) -> bool:
        if operator is PRODUCT:
            return tuple(optim.local(args[1]).shape) not in recomputed
        if operator is REDUCE_SCATTER:
            scattered[context.is_recompute] += 1  # torch 2.11 asks again when it recomputes
            return scattered[context.is_recompute] == 1  # the second one is mlp.down's
        return operator in SAVED_OPERATIONS

    return create_selective_checkpoint_contexts(is_saved)


def checkpoint_activations(
    blocks: Iterable[nn.Module], mode: str, c: ModelConfig, tp: int = 1
) -> None:
    """Keep fewer activations of each block and recompute the rest in backward (Chen et al. 2016).

    full keeps only the input of a block and costs a third more compute. selective keeps results of
    matrix products and attention and recomputes the rest (Korthikanti et al. 2022).
    """
    # By default checkpoint() also restores the random generators, so that dropout in a fork drops
    # the same elements when a block is computed again.
    options = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = functools.partial(selective_contexts, c, tp)
    for block in blocks:  # replaces forward only, so that parameters keep their names
        block.forward = functools.partial(checkpoint, block.forward, **options)


def compile_modules(modules: Iterable[nn.Module]) -> None:
    """Compile the forward and backward of each module for the shapes of its first call.

    Replaces their forward. Other shapes (samples, a smaller last evaluation batch) run uncompiled.
    Equal modules share one compilation. Call this before FSDP wraps the modules, so that gathering
    weights stays outside the compiled region. Parameters keep their names.
    """
    # By default Dynamo splits graphs at DDP's bucket boundaries, to send buckets during backward.
    # Compiling layer by layer also overlaps the two, and is faster. This setting has no public
    # name, but torch's notes on DDP describe it.
    torch._dynamo.config.optimize_ddp = False
    for module in modules:
        module.forward = compiled_for_one_shape(module.forward)


def compiled_for_one_shape(forward: Callable) -> Callable:
    """Compile a function for the shapes of its first call; other shapes run uncompiled."""
    compiled = torch.compile(forward, dynamic=False)
    first_shapes = None

    def call(*args, **kwargs) -> Tensor:
        nonlocal first_shapes
        shapes = [getattr(arg, "shape", None) for arg in (*args, *kwargs.values())]
        if first_shapes is None:
            first_shapes = shapes
        if shapes == first_shapes:
            return compiled(*args, **kwargs)
        return forward(*args, **kwargs)

    return call


# --------------------------------------------------------------------------------------------------
# Memory


def fits(run: Run, device_memory: int) -> bool:
    """Whether a fifth of `device_memory` stays free for what `estimate_memory` does not count."""
    need = estimate_memory(run, empty_model(run))
    return sum(need.values()) <= 0.8 * device_memory


def estimate_memory(run: Run, model: Transformer) -> dict[str, int]:
    """Estimate the bytes that a rank needs, by part.

    Weights, gradients and optimizer are exact. Activations reach their peak before the gradients
    do. Not counted are gathered weights, communication buffers and the process itself: tools.plan
    rehearses a step to count them.
    """
    weights = gradients = optimizer = 0
    # Until the last micro-batch, FSDP accumulates unsharded gradients: see dist.gradient_sync.
    accumulates_full = run.grad_sync == "batch" and run.grad_accum_steps > 1
    for name, parameter in model.named_parameters():
        # FSDP splits the rows of all parameters, and pads the last shards to the size of the first.
        # tp splits only matrices.
        tp = run.tp if parameter.dim() > 1 else 1
        columns = parameter.numel() // len(parameter)
        local = math.ceil(len(parameter) / (run.dp_shard * tp)) * columns
        weights += 4 * local
        gradients += 4 * (parameter.numel() // tp if accumulates_full else local)
        updater = optim.updater(run.optimizer, name, parameter.shape, model.is_hidden(name))
        for shape in updater.slots(parameter.shape).values():
            optimizer += 4 * (local if shape else 1)  # a slot is sharded like its parameter
    dtype = run.compute_dtype
    block = activation_bytes_of_block(run.model_config, dtype, run.device, run.tp)  # per token
    activations = {
        "none": run.n_layer * block,
        "selective": run.n_layer * block // 2,  # approximately
        # The inputs of all blocks, and the activations of the block that is recomputed
        "full": run.n_layer * dtype.itemsize * run.d_model // run.tp + block,
    }
    tokens = run.micro_batch_size * run.seq_len
    vocab_size = run.model_config.vocab_size // run.tp  # of this rank
    logits = logit_bytes(dtype) * tokens * vocab_size // run.loss_chunks
    if run.loss_chunks > 1:
        logits += 4 * run.d_model * vocab_size  # the head's gradient, summed over the chunks
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": tokens * activations[run.activation_checkpointing],
        "logits": logits,
    }


def logit_bytes(dtype: torch.dtype) -> int:
    """Return the bytes per logit: float32 value and gradient, and a copy if `dtype` is another."""
    return 4 + 4 + (dtype.itemsize if dtype != torch.float32 else 0)
