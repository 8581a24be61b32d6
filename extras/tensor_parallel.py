"""--tp N: the ranks of a tp group compute one forward pass together, each with a part of a layer.

After Megatron-LM (Shoeybi et al. 2019). A column-wise layer splits its outputs: a rank has
n_head / tp heads, d_ff / tp hidden units or vocab_size / tp logits. The row-wise layer after it
splits its inputs the same way, so each rank computes a partial sum.

Norms and the residual stream are split by tokens (Korthikanti et al. 2022). An all_gather of
(B, T, d_model) precedes attention, MLP and head; a reduce_scatter adds the partial sums after
attention, MLP and embedding. Backward swaps the two. These collectives interrupt each layer, so a
tp group should share fast links.

A tied head uses the embedding's weight, whose rows are split: each rank has
(vocab_size / tp, d_model), Shard(0). The logits are split by vocabulary, as in a column-wise head.
Both gradients are Shard(0), so autograd adds them without communication.

To remove it, delete this file and its branch in train.build.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from dist import KEPT_OPERATIONS
from errors import UsageError
from model import Embedding, ModelConfig, RMSNorm, Transformer, select_rows


def split(model: Transformer, mesh: DeviceMesh) -> None:
    """Split a model on the meta device over the ranks of `mesh`, its tp axis.

    Parameters keep their names. Those that the plan does not split are replicated. Raises
    UsageError unless the ranks can split every layer into equal parts.
    """
    tp = mesh.size()
    for name in ("n_kv_head", "d_ff", "vocab_size", "seq_len"):  # and so n_head
        if (size := getattr(model.config, name)) % tp:
            raise UsageError(f"--tp {tp} does not divide {name} {size}: choose another one")
    compute_loss_from_parts()
    parallelize_module(model, mesh, plan(model))
    distribute_module(model, mesh)
    for module in model.modules():
        if isinstance(module, Embedding):
            module.forward = functools.partial(look_up_parts, module)
        elif isinstance(module, RMSNorm):
            module.forward = functools.partial(normalize_tokens, module)
    model.register_forward_hook(collect)


def plan(model: Transformer) -> dict[str, ParallelStyle]:
    """Return how each layer is split, for torch's parallelize_module."""
    tokens = Shard(1)  # of (B, T, d_model)
    column = ColwiseParallel()
    row = RowwiseParallel(output_layouts=tokens)
    # Backward adds the gradients from q, k and v (or gate and up), then scatters them once.
    gather = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
    layers = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "blocks.*.attention": gather,
        "blocks.*.attention.q": column,
        "blocks.*.attention.k": column,
        "blocks.*.attention.v": column,
        "blocks.*.attention.out": row,
        "blocks.*.mlp": gather,
        "blocks.*.mlp.gate": column,
        "blocks.*.mlp.up": column,
        "blocks.*.mlp.down": row,
        "head": gather,
    }
    if not model.config.tied:
        layers["head"] = ColwiseParallel(
            input_layouts=tokens, output_layouts=Replicate(), use_local_output=False
        )
    return layers


def look_up_parts(embedding: Embedding, tokens: Tensor) -> Tensor:
    """The forward of an embedding whose rows are split.

    torch's rule for F.embedding would give every rank the gradient of all rows.
    """
    mesh = tokens.device_mesh
    rows = embedding.weight.to_local()  # (vocab_size / tp, d_model)
    index = tokens.to_local() - mesh.get_local_rank() * len(rows)  # (B, T)
    is_elsewhere = (index < 0) | (index >= len(rows))
    x = select_rows(index.masked_fill(is_elsewhere, 0), rows)
    x = DTensor.from_local(x.masked_fill(is_elsewhere[..., None], 0), mesh, [Partial()])
    # RowwiseParallel would return an asynchronous tensor, which a compiled block cannot use.
    return x.redistribute(placements=[Shard(1)])


def normalize_tokens(norm: RMSNorm, x: Tensor) -> Tensor:
    """The forward of a norm that sees some of the tokens.

    So its gradient of the weight is a partial sum, marked `Partial`. FSDP adds these sums when it
    reduces gradients; without FSDP, optim.py does.
    """
    weight = norm.weight.to_local(grad_placements=[Partial()])
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), norm.eps)


def kept_results(config: ModelConfig, tp: int) -> Callable:
    """Return which results selective recomputation keeps: see dist.checkpoint_activations.

    Row-wise layers compute partial sums, as large as the full output. What their reduce_scatter
    returns is kept instead, which is 1 / tp as large.
    """
    row_wise = [(size // tp, config.d_model) for size in (config.d_model, config.d_ff)]  # (in, out)

    def is_kept(context, operator, *args, **kwargs) -> bool:
        if operator is torch.ops.aten.mm.default:
            weight = args[1].to_local() if isinstance(args[1], DTensor) else args[1]
            return tuple(weight.shape) not in row_wise
        return operator in KEPT_OPERATIONS

    return is_kept


def collect(model: Transformer, inputs: tuple, y: Tensor) -> Tensor:
    """Turn the loss, or the logits, into a plain tensor with all parts."""
    # Return a copy, not a view. An in-place operation on a view, for example `loss /= 2`, would
    # silently drop the FSDP hook that gathers weights again before backward.
    return y.full_tensor().clone() if isinstance(y, DTensor) else y


@functools.cache
def compute_loss_from_parts():
    """Make F.cross_entropy add up the parts of the logits, so that no rank gathers all of them.

    This holds for the rest of the process, because backward needs the context as much as forward.
    """
    context = loss_parallel()
    context.__enter__()
    return context  # functools.cache keeps it
