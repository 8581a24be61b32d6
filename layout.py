"""Place a run's model on the mesh: its FSDP units, recomputation and compilation."""

import collections
import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import dist
import optim
from config import Run
from model import ModelConfig, Transformer


def fsdp_units(model: Transformer, wrap: str) -> list[list[nn.Module]]:
    """Return the modules of each FSDP unit; the rest of the model, its root, is one more unit.

    Larger units send fewer, longer messages and need more memory for gathered weights. An embedding
    and a head that are not tied are also units. With --wrap none, the root is the full model.
    """
    size = dist.blocks_per_unit(wrap)
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
