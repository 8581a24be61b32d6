"""The decoder: a Llama-3-style transformer, its named sizes, its initial weights and its FLOPs.

Knows nothing of ranks or files. Every strategy runs this same arithmetic: weights arrive in float32 (single, ddp)
or already in the compute dtype (FSDP gathers them so), and each layer casts its weight to the dtype of its input.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
)
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Raises ValueError where the numbers do not fit together."""

    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int  # fewer than n_head: grouped-query attention (Ainslie et al. 2023)
    d_model: int
    d_ff: int
    seq_len: int  # the longest sequence, in tokens
    rope_theta: float = 10_000.0
    tied: bool = True  # the head shares the embedding's matrix (Press & Wolf 2017)

    def __post_init__(self):
        if self.d_model % self.n_head or self.d_model // self.n_head % 2:
            raise ValueError(
                f"d_model {self.d_model} / n_head {self.n_head} must be a whole, even number (RoPE turns pairs)"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(
                f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}"
            )

    def check_tensor_parallel(self, tp: int) -> None:
        """Raises ValueError where the ranks of a tp group could not take equal parts."""
        for name in ("n_kv_head", "n_head", "d_ff", "vocab_size"):
            if (size := getattr(self, name)) % tp:
                raise ValueError(
                    f"{name} {size} / tp {tp} = {size / tp:.3g}, but each rank of a tp group takes a whole number: "
                    f"choose a --tp that divides {size}"
                )


SIZES = {
    # 4 blocks of 4 * 128^2 + 3 * 128 * 352: what two laptop cores can teach in two minutes
    "tiny": ModelConfig(257, n_layer=4, n_head=4, n_kv_head=4, d_model=128, d_ff=352, seq_len=128),
    # GPT-2's depth, width and vocabulary; 3 * 768 * 2048 is its 2 * 768 * 3072 MLP with SwiGLU's third matrix
    "gpt2-124m": ModelConfig(
        50257, n_layer=12, n_head=12, n_kv_head=12, d_model=768, d_ff=2048, seq_len=1024
    ),
    "tinyllama-1.1b": ModelConfig(
        32000, n_layer=22, n_head=32, n_kv_head=4, d_model=2048, d_ff=5632, seq_len=2048, tied=False
    ),
    "olmo-1b": ModelConfig(
        50304, n_layer=16, n_head=16, n_kv_head=16, d_model=2048, d_ff=8192, seq_len=2048
    ),
    "llama3-8b": ModelConfig(
        128256,
        n_layer=32,
        n_head=32,
        n_kv_head=8,
        d_model=4096,
        d_ff=14336,
        seq_len=8192,
        rope_theta=500_000.0,
        tied=False,
    ),
    "llama3-70b": ModelConfig(
        128256,
        n_layer=80,
        n_head=64,
        n_kv_head=8,
        d_model=8192,
        d_ff=28672,
        seq_len=8192,
        rope_theta=500_000.0,
        tied=False,
    ),
}


class Linear(nn.Linear):
    """A linear layer without bias that computes in the dtype of its input, whatever dtype its weight is kept in."""

    def __init__(self, d_in: int, d_out: int):
        super().__init__(d_in, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang & Sennrich 2019): statistics in float32, result in the input's dtype."""

    def __init__(self, d: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), eps=1e-5)


def rotations(c: ModelConfig, T: int, device: torch.device) -> Tensor:
    """cos and sin of position x frequency (Su et al. 2021), float32 (2, T, d_head / 2).

    Made anew for each forward: T x d_head / 2 angles are nothing beside a block, and a model without buffers has nothing
    but parameters to place.
    """
    d_head = c.d_model // c.n_head
    frequency = c.rope_theta ** (
        -torch.arange(0, d_head, 2, device=device, dtype=torch.float32) / d_head
    )
    angle = torch.outer(torch.arange(T, device=device, dtype=torch.float32), frequency)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair (i, i + d_head / 2) of x (B, H, T, d_head) by its position's angle; the layout of Hugging Face's Llama."""
    cos, sin = rope[0], rope[1]  # (T, d_head / 2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax(q k^T / sqrt(d_head)) v: q (B, H, T, d_head), k and v (B, H or fewer, T, d_head) -> (B, H, T, d_head).

    Written out for short sequences on a CPU, where the backward pass of torch's kernel takes twice as long. On a GPU torch
    itself takes the fastest it has: since 2.11 cuDNN's on Hopper and Blackwell, else FlashAttention.
    """
    (B, H, T, d_head), group = q.shape, q.size(1) // k.size(1)
    if q.device.type != "cpu" or T > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1)
    k, v = (x.repeat_interleave(group, 1).reshape(B * H, T, d_head) for x in (k, v))
    future = torch.full((T, T), -math.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(
        future, q.reshape(B * H, T, d_head), k.mT, alpha=d_head**-0.5
    )  # (B * H, T, T)
    return (scores.softmax(-1) @ v).view(B, H, T, d_head)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.d_head = c.d_model // c.n_head
        self.q = Linear(c.d_model, c.n_head * self.d_head)
        self.k = Linear(c.d_model, c.n_kv_head * self.d_head)
        self.v = Linear(c.d_model, c.n_kv_head * self.d_head)
        self.out = Linear(c.n_head * self.d_head, c.d_model)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q, k, v = (  # each (B, T, heads * d_head) -> (B, heads, T, d_head)
            layer(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = attend(rotate(q, rope), rotate(k, rope), v)
        return self.out(y.transpose(1, 2).flatten(-2))  # (B, T, d_model)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate = Linear(c.d_model, c.d_ff)
        self.up = Linear(c.d_model, c.d_ff)
        self.down = Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(c.d_model), Attention(c)
        self.mlp_norm, self.mlp = RMSNorm(c.d_model), MLP(c)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope)
        return x + self.mlp(self.mlp_norm(x))


class Head(Linear):
    """x (B, T, d_model) -> logits (B, T, vocab_size) in float32, or with targets (B, T) their mean cross-entropy.

    With `chunks` the loss is that of so many runs of tokens, one after the other, of which each makes its logits again in
    the backward pass: in memory are 1 / chunks of them, for one more matrix product. Tied to the embedding it has no
    parameter of its own, rather than one shared by two modules, which a move off the meta device would part.
    """

    def __init__(self, c: ModelConfig, chunks: int):
        super().__init__(c.d_model, c.vocab_size)
        self.chunks = chunks
        if c.tied:
            self.weight = None

    def forward(
        self, x: Tensor, targets: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        weight = (self.weight if weight is None else weight).to(x.dtype)
        if targets is None:
            return F.linear(x, weight).float()

        def loss(x: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")

        if self.chunks == 1:
            return loss(x.flatten(0, 1), targets.flatten()) / targets.numel()
        parts = zip(x.flatten(0, 1).chunk(self.chunks), targets.flatten().chunk(self.chunks))
        return (
            sum(
                checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False)
                for part in parts
            )
            / targets.numel()
        )


class Transformer(nn.Module):
    """tokens (B, T) -> logits (B, T, vocab_size), or with targets (B, T) -> mean cross-entropy in nats, a float32 scalar.

    Build it under torch.device("meta") and give it memory and values with `init_tensor`, name by name: so a rank can
    hold one whole tensor at a time and keep its shard.
    """

    def __init__(self, c: ModelConfig, dtype: torch.dtype = torch.float32, loss_chunks: int = 1):
        super().__init__()
        self.config, self.dtype = (
            c,
            dtype,
        )  # of the activations; the weights' is the caller's choice
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.n_layer))
        self.norm = RMSNorm(c.d_model)
        self.head = Head(c, loss_chunks)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens).to(self.dtype)  # (B, T, d_model)
        rope = rotations(self.config, tokens.size(1), tokens.device)
        for block in self.blocks:
            x = block(x, rope)
        return whole(
            self.head(
                self.norm(x),
                targets=targets,
                weight=self.embed.weight if self.config.tied else None,
            )
        )

    @torch.no_grad()
    def init_tensor(self, name: str, tensor: Tensor, seed: int) -> None:
        """Fill the full-size parameter `name` in place, a function of (seed, name) and the kind of device alone.

        Normal with deviation 0.02; 0.02 / sqrt(2 * n_layer) where a layer writes to the residual stream, which adds
        up 2 * n_layer of them (GPT-2, Radford et al. 2019); ones for norms.
        """
        if tensor.dim() == 1:
            tensor.fill_(1.0)
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
            # hashed together: a CPU generator looks at no more than 32 bits of its seed
            generator = torch.Generator(tensor.device).manual_seed(
                zlib.crc32(f"{seed} {name}".encode())
            )
            tensor.normal_(0.0, std, generator=generator)

    def ends(self) -> list[nn.Module]:
        """The layers before and after the blocks, where each has weights of its own: not where the head is the embedding."""
        return [] if self.config.tied else [self.embed, self.head]

    def tensor_parallel_plan(self) -> dict[str, ParallelStyle]:
        """How the T ranks of a tp group share each layer (Shoeybi et al. 2019), for torch's parallelize_module.

        Column-wise, a rank has the rows of the weight that make its n_head / T heads, its d_ff / T of the hidden layer,
        its vocab_size / T of the logits; row-wise, the columns that read those, so that each sums a part of the output and
        one all-reduce of (B, T, d_model) adds the parts: one forward and one backward per attention, per MLP and at each
        end. Norms and the residual stream are whole on each rank. The loss never sees whole logits: under torch's
        loss_parallel() the ranks exchange a maximum, a sum and the target's logit for each token.
        """
        rows, columns = RowwiseParallel(), ColwiseParallel()
        # From here on x is a replicated DTensor, whose gradients from q, k and v (gate and up) are added before they are sent.
        shared = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Replicate(), use_local_output=False
        )
        blocks = {
            "attention_norm": shared,
            "attention.q": columns,
            "attention.k": columns,
            "attention.v": columns,
            "attention.out": rows,
            "mlp_norm": shared,
            "mlp.gate": columns,
            "mlp.up": columns,
            "mlp.down": rows,
        }
        head = (
            {}
            if self.config.tied
            else {"head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}
        )
        return {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "norm": shared,
            **head,
            **{f"blocks.*.{name}": style for name, style in blocks.items()},
        }

    def activation_bytes(self, sequences: int, checkpointing: str = "none") -> int:
        """An estimate of what a forward pass of so many sequences of seq_len keeps for the backward pass.

        Per token and block, in elements of the compute dtype: inputs of both norms, their outputs, q, k, v, attention's
        output, the projections' (7 d_model + 2 kv) and gate, up, silu and product (4 d_ff); "selective" keeps about half,
        "full" the block's input. The logits and their gradient are float32.
        """
        c, tokens = self.config, sequences * self.config.seq_len
        kv = c.n_kv_head * c.d_model // c.n_head
        block = 7 * c.d_model + 2 * kv + 4 * c.d_ff
        block = {"none": block, "selective": block // 2, "full": c.d_model}[checkpointing]
        return tokens * (
            c.n_layer * block * self.dtype.itemsize + 2 * 4 * c.vocab_size // self.head.chunks
        )

    def decays(self, name: str) -> bool:
        """Whether weight decay applies: to the matrices, not to the norms nor to the embedding, which is a table of vectors."""
        return name != "embed.weight" and not name.endswith("norm.weight")

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, seq_len: int) -> float:
        """Training FLOPs a token: 6 N + 6 * n_layer * d_model * seq_len (after Chowdhery et al. 2022, appendix B).

        N: the parameters in matrix products, so the head but not the embedding's lookup. Each takes a multiply and an
        add in the forward pass and twice that in the backward pass: 6. Attention: two products of d_model * T per
        token (scores, values), 12 * d_model * T per layer with both passes, of which the causal mask needs half.
        """
        c = self.config
        n = self.parameter_count() - (0 if c.tied else c.vocab_size * c.d_model)
        return 6 * n + 6 * c.n_layer * c.d_model * seq_len


def whole(x: Tensor) -> Tensor:
    """What the ranks of a tp group share, on each of them; without tp, x itself."""
    return (
        x.full_tensor().clone() if isinstance(x, DTensor) else x
    )  # a copy, since FSDP could lose its hook on a view


@torch.no_grad()
def generate(
    model,
    tokens: list[int],
    n: int,
    *,
    seq_len: int,
    vocab_size: int,
    device,
    temperature=1.0,
    top_k=0,
    seed=0,
) -> Iterator[int]:
    """Yield n tokens that continue `tokens` (not empty), each drawn from the model's distribution over the last seq_len.

    temperature 0 takes the most likely token; top_k > 0 leaves only the k most likely; vocab_size leaves out the rows
    that pad the head. One seed gives one text.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(tokens)
    for _ in range(n):
        window = torch.tensor([tokens[-seq_len:]], device=device)
        logits = (
            model(window)[0, -1, :vocab_size].cpu().double()
        )  # so that no temperature above 0 divides to infinity
        if temperature == 0:
            token = int(logits.argmax())
        else:
            if 0 < top_k < vocab_size:
                logits[logits < logits.topk(top_k).values[-1]] = -math.inf
            token = int(
                torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            )
        tokens.append(token)
        yield token
