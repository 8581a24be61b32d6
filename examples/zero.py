"""Data parallelism by hand: a ring, ddp, and the three stages of ZeRO.

torchrun --standalone --nproc_per_node 4 examples/zero.py          # all stages
torchrun --standalone --nproc_per_node 4 examples/zero.py ring     # one of them

Each stage is a function that takes one training step. zero_check.py calls it for five steps and
compares the weights with one rank's. Model and batch can be split over 2, 3, 4, 5, 6 or 8 ranks.
"""

import sys

import torch
import torch.distributed as td

sys.path.append("examples")  # for a copy of this file in another folder
import zero_check
from zero_check import group, n, rank  # torch's collectives, number of ranks, this rank

LAYERS, D, ROWS = 4, 120, 240  # the model is LAYERS times tanh(x @ weight), and x is ROWS x D
L, P = D * D, LAYERS * D * D  # parameters of a layer, of the model
# Adam's usual eps, 1e-8, would hide gradients n times too large: updates would be nearly the same
LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.95, 1e-3, 0.1

# --------------------------------------------------------------------------------------------------
# The ring


def exchange(chunk):
    """Send `chunk` to the next rank of the ring, and return the chunk of the rank before.

    `group.isend(tensor, to)` starts to send and returns a request, which has wait().
    `td.recv(tensor, source)` waits until `tensor` is received.
    """
    received = torch.empty_like(chunk)
    request = group.isend(chunk, (rank + 1) % n)
    td.recv(received, (rank - 1) % n)
    request.wait()
    return received


def reduce_scatter(tensor):
    """Return part number `rank` of the n equal parts of the sum of all ranks' tensors, flat.

    In each of n - 1 rounds call `exchange` once, with one part. Do not change `tensor`.
    """
    parts = tensor.clone().view(n, -1)
    for i in range(1, n):  # part p starts at rank p + 1; each rank on its way adds its own
        parts[(rank - i - 1) % n] += exchange(parts[(rank - i) % n])
    return parts[rank]


def all_gather(part):
    """Return the parts of ranks 0 to n - 1, concatenated.

    In each of n - 1 rounds call `exchange` once, with one part.
    """
    parts = torch.empty(n, part.numel())
    parts[rank] = part
    for i in range(n - 1):  # pass on the part of the round before
        parts[(rank - i - 1) % n] = exchange(parts[(rank - i) % n])
    return parts.view(-1)


def all_reduce(tensor):
    """Return the sum of all ranks' tensors, flat: a reduce_scatter and then an all_gather."""
    return all_gather(reduce_scatter(tensor))


# --------------------------------------------------------------------------------------------------
# The model and the optimizer


def backward(x, weight, out, d):
    """Return the gradients of a layer's weight, D x D, and of its input x, rows x D.

    `out` is the layer's output tanh(x @ weight), and `d` the gradient of `out`.
    """
    d = d * (1 - out**2)  # the derivative of tanh
    group.rows = len(x)  # for zero_check.py, which also counts full layers
    return group.note("gradients", x.T @ d), d @ weight.T


def gradients(weights, x, y):
    """Yield (layer's index, gradient of its weight), from the last layer to the first.

    The loss is the mean squared error over the rows of x. `weights` is LAYERS x D x D.
    """
    outs = [x]  # rows x D
    for weight in weights:
        outs.append((outs[-1] @ weight).tanh())
    d = 2 * (outs[-1] - y) / y.numel()  # the gradient of mean((out - y)**2)
    for i in reversed(range(LAYERS)):
        gradient, d = backward(outs[i], weights[i], outs[i + 1], d)
        yield i, gradient


def adamw(weights, gradients, moments, step):
    """Update weights and moments (2 x the shape of the weights) in place. The first step is 1.

    A parameter takes 16 bytes: 4 for its weight, 4 for its gradient, 8 for its moments.
    """
    m, v = moments
    m.lerp_(gradients, 1 - BETA1)
    v.lerp_(gradients**2, 1 - BETA2)
    weights *= 1 - LR * DECAY
    weights -= LR * (m / (1 - BETA1**step)) / ((v / (1 - BETA2**step)).sqrt() + EPS)


# --------------------------------------------------------------------------------------------------
# The stages. Each takes one step on a batch: x and y are ROWS x D, the same on all ranks, and this
# rank trains on part `rank` of n of the rows. It sets state.gradients to the mean over all ROWS
# rows, and calls adamw once, which updates state.weights and state.moments.
#
# state.weights, .gradients       full: LAYERS x D x D, or
#                                 sharded: LAYERS x L / n, part `rank` of n of each layer
# state.moments                   2 x that shape
# state.step                      1, 2, ...
# group.all_reduce(tensor)        replaces `tensor` by the sum over the ranks
# group.start_all_reduce(tensor)  returns a handle: `tensor` is the sum after handle.wait()
# group.reduce_scatter(tensor)    returns part `rank` of n of the sum, flat
# group.all_gather(shard)         returns the shards of all ranks: n x the elements of one


def one_rank(state, x, y):
    """Train on all rows, without communication. The state is full."""
    for i, gradient in gradients(state.weights, x, y):
        state.gradients[i] = gradient
    adamw(state.weights, state.gradients, state.moments, state.step)


def ddp_each(state, x, y):
    """Train on this rank's rows. After backward, all_reduce the gradients layer by layer.

    The state is full: every rank holds everything.
    """
    x, y = x.chunk(n)[rank], y.chunk(n)[rank]  # ROWS / n x D
    for i, gradient in gradients(state.weights, x, y):
        state.gradients[i] = gradient
    for gradient in state.gradients:
        group.all_reduce(gradient)  # 4 L bytes
    state.gradients /= n  # all ranks have equally many rows: the mean of means is the mean
    adamw(state.weights, state.gradients, state.moments, state.step)


def ddp_bucket(state, x, y):
    """Do what ddp_each does, with one all_reduce: state.gradients is a single piece of memory."""
    x, y = x.chunk(n)[rank], y.chunk(n)[rank]
    for i, gradient in gradients(state.weights, x, y):
        state.gradients[i] = gradient
    group.all_reduce(state.gradients)  # 4 P bytes
    state.gradients /= n
    adamw(state.weights, state.gradients, state.moments, state.step)


def ddp_overlapped(state, x, y):
    """Do what ddp_each does, but start to all_reduce a gradient as soon as backward has made it.

    Gradients travel while backward makes the next ones. Wait for all of them before the update.
    """
    x, y = x.chunk(n)[rank], y.chunk(n)[rank]
    handles = []
    for i, gradient in gradients(state.weights, x, y):
        state.gradients[i] = gradient
        handles.append(group.start_all_reduce(state.gradients[i]))  # 4 L bytes
    for handle in handles:
        handle.wait()
    state.gradients /= n
    adamw(state.weights, state.gradients, state.moments, state.step)


def zero1(state, x, y):
    """Update only this rank's shard of the weights. state.moments is sharded, the rest is full.

    After backward, reduce_scatter the gradients layer by layer: in state.gradients only this
    rank's shard becomes the mean. After the update, all_gather the weights layer by layer.
    """
    x, y = x.chunk(n)[rank], y.chunk(n)[rank]
    for i, gradient in gradients(state.weights, x, y):
        state.gradients[i] = gradient
    own_gradients = state.gradients.view(LAYERS, n, L // n)[:, rank]  # LAYERS x L / n, not a copy
    own_weights = state.weights.view(LAYERS, n, L // n)[:, rank]
    for i in range(LAYERS):
        own_gradients[i] = group.reduce_scatter(state.gradients[i]) / n  # 4 L bytes
    adamw(own_weights, own_gradients, state.moments, state.step)
    for i in range(LAYERS):
        state.weights[i] = group.all_gather(own_weights[i]).view(D, D)  # 4 L bytes


def zero2(state, x, y):
    """Do what zero1 does, with sharded gradients. state.weights is full, the rest is sharded.

    reduce_scatter a gradient as soon as backward has made it, and keep only this rank's shard.
    """
    x, y = x.chunk(n)[rank], y.chunk(n)[rank]
    for i, gradient in gradients(state.weights, x, y):
        state.gradients[i] = group.reduce_scatter(gradient) / n  # 4 L bytes
    own_weights = state.weights.view(LAYERS, n, L // n)[:, rank]  # LAYERS x L / n, not a copy
    adamw(own_weights, state.gradients, state.moments, state.step)
    for i in range(LAYERS):
        state.weights[i] = group.all_gather(own_weights[i]).view(D, D)  # 4 L bytes


def zero3(state, x, y):
    """Do what zero2 does, with sharded weights. All of the state is sharded.

    all_gather a layer's weights for its forward pass, drop them, and gather them again for its
    backward pass. Do not drop the last layer's: its backward pass comes next. `gradients` cannot do
    this: write your own passes, with `backward`.
    """
    outs, y = [x.chunk(n)[rank]], y.chunk(n)[rank]
    for shard in state.weights:
        weight = group.all_gather(shard).view(D, D)  # 4 L bytes; drops the layer before
        outs.append((outs[-1] @ weight).tanh())
    d = 2 * (outs[-1] - y) / y.numel()
    for i in reversed(range(LAYERS)):
        if i < LAYERS - 1:
            weight = group.all_gather(state.weights[i]).view(D, D)  # 4 L bytes
        gradient, d = backward(outs[i], weight, outs[i + 1], d)
        state.gradients[i] = group.reduce_scatter(gradient) / n  # 4 L bytes
    adamw(state.weights, state.gradients, state.moments, state.step)


# {stage: bytes of weights, gradients and moments on a rank; then for a step: bytes handed to torch,
# gradients that backward makes while an all_reduce is on its way, and collectives}
S = P // n  # parameters in the shards of a rank
STAGES = {
    one_rank: (4 * P, 4 * P, 8 * P, 0, 0, "none"),
    ddp_each: (4 * P, 4 * P, 8 * P, 4 * P, 0, "4 all_reduce"),
    ddp_bucket: (4 * P, 4 * P, 8 * P, 4 * P, 0, "1 all_reduce"),
    ddp_overlapped: (4 * P, 4 * P, 8 * P, 4 * P, LAYERS - 1, "4 all_reduce"),
    zero1: (4 * P, 4 * P, 8 * S, 4 * P + 4 * P, 0, "4 all_gather, 4 reduce_scatter"),
    zero2: (4 * P, 4 * S, 8 * S, 4 * P + 4 * P, 0, "4 all_gather, 4 reduce_scatter"),
    zero3: (4 * S, 4 * S, 8 * S, 4 * (2 * P - L) + 4 * P, 0, "7 all_gather, 4 reduce_scatter"),
}

if __name__ == "__main__":
    sys.exit(zero_check.main(sys.argv[1:]))
