"""The decoder: a Llama-3-style transformer, its sizes, initial weights and generation.

Every strategy runs the same arithmetic. Weights are in float32 (single, DDP) or already in the
compute dtype (FSDP gathers them in it); each layer casts its weight to the dtype of its input.

In shape comments there are B sequences of T tokens and H heads, and d_head = d_model / n_head.
"""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class ModelError(ValueError):
    """The numbers of a model do not fit together."""

    exit_status = 2


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations for long contexts, as in Llama 3.1: see `scale_frequencies`."""

    factor: float  # divides the slow frequencies
    low_freq_factor: float  # slow: at most this many turns in the original context
    high_freq_factor: float  # fast: at least this many turns
    original_seq_len: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Raises ModelError if its numbers do not fit together."""

    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int  # fewer than n_head: grouped-query attention (Ainslie et al. 2023)
    d_model: int  # width of the residual stream
    d_ff: int  # hidden width of the MLP
    seq_len: int
    rope_theta: float = 10_000.0
    tied: bool = True  # the head shares the embedding's matrix (Press & Wolf 2017)
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    rope_scaling: RopeScaling | None = None

    @classmethod
    def from_dict(cls, fields: dict) -> "ModelConfig":
        """Create the config from a checkpoint's manifest. Raises TypeError for unknown fields."""
        scaling = fields.get("rope_scaling")
        return cls(**fields | {"rope_scaling": RopeScaling(**scaling) if scaling else None})

    def __post_init__(self):
        if self.d_model % self.n_head or self.d_model // self.n_head % 2:
            raise ModelError(
                f"d_model {self.d_model} / n_head {self.n_head} must be a whole, even number "
                "(RoPE rotates pairs of elements)"
            )
        if self.n_head % self.n_kv_head:
            raise ModelError(f"n_kv_head {self.n_kv_head} must divide n_head {self.n_head}")


# --------------------------------------------------------------------------------------------------
# Layers


class Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Embedding(nn.Embedding):
    """Look up tokens (B, T) in the weight (vocab_size, d_model): (B, T, d_model)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return select_rows(tokens, self.weight)


def select_rows(tokens: Tensor, weight: Tensor) -> Tensor:
    """F.embedding, but its backward always sums the gradients of equal tokens in float32.

    torch sums them in the dtype of the weight on CPUs, and on CUDA for up to 3,072 tokens. FSDP
    gathers weights in bfloat16, in which a sum stops growing at 256 times its addend.
    """
    if weight.is_cuda and tokens.numel() > 3072:
        return F.embedding(tokens, weight)
    return F.embedding(tokens, weight.float()).to(weight.dtype)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (Zhang & Sennrich 2019): statistics in float32, result in x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rope_table(config: ModelConfig, T: int, device: torch.device) -> Tensor:
    """Return cos and sin of position x frequency (RoPE, Su et al. 2021), (2, T, d_head) in float32.

    Both elements of a pair have the same angle. The table is built in every forward, because it
    costs little compared with a block, and a buffer would have to be placed on the mesh.
    """
    d_head = config.d_model // config.n_head
    exponents = -torch.arange(0, d_head, 2, device=device, dtype=torch.float32) / d_head
    frequencies = config.rope_theta**exponents  # (d_head / 2,)
    if config.rope_scaling:
        frequencies = scale_frequencies(frequencies, config.rope_scaling)
    positions = torch.arange(T, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)  # (T, d_head / 2)
    # -angle for the first of a pair: cos stays, and sin changes its sign
    angles = torch.cat((-angles, angles), dim=-1)  # (T, d_head)
    return torch.stack((angles.cos(), angles.sin()))


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide slow frequencies by the factor, keep fast ones, and interpolate in between.

    For contexts longer than the original one (Llama 3.1, Grattafiori et al. 2024).
    """
    low = scaling.low_freq_factor
    high = scaling.high_freq_factor
    turns = scaling.original_seq_len * frequencies / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow, 1: fast
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair (i, i + d_head / 2) of x (B, H, T, d_head) by the angle of its position."""
    cos, sin = rope  # (T, d_head) each
    others = x.roll(x.size(-1) // 2, dims=-1)  # the other element of each pair
    # The sum has the memory layout of its first operand, and attention on a GPU that of q. With x's
    # layout, (B, T, H, d_head) in memory, the heads are joined without a copy.
    return (x * cos + others * sin).to(x.dtype)


CPU_KERNEL_ABOVE = 512  # tokens; up to this length, written-out attention is faster on a CPU


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d_head) + causal mask) v, shaped like q.

    q is (B, H, T, d_head). k and v may have fewer heads, if their number divides H.
    """
    H, T, d_head = q.shape[1:]
    writes_out = q.is_cpu and T <= CPU_KERNEL_ABOVE
    group_size = H // k.size(1)  # query heads that share a key and value head
    # In float32, the only GPU kernel that does not write out the scores cannot share heads.
    if group_size > 1 and (writes_out or q.dtype == torch.float32):
        k = k.repeat_interleave(group_size, dim=1)
        v = v.repeat_interleave(group_size, dim=1)
    if not writes_out:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.size(1) < H)
    # The backward of torch's CPU kernel takes twice as long for such lengths.
    mask = q.new_full((T, T), -math.inf).triu(1)
    scores = torch.baddbmm(mask, q.flatten(0, 1), k.flatten(0, 1).mT, alpha=d_head**-0.5)
    y = scores.softmax(-1) @ v.flatten(0, 1)  # (B * H, T, d_head)
    return y.view(q.shape)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        d_model = config.d_model
        self.d_head = d_model // config.n_head
        d_kv = config.n_kv_head * self.d_head
        self.q = Linear(d_model, d_model, bias=False)  # n_head * d_head = d_model
        self.k = Linear(d_model, d_kv, bias=False)
        self.v = Linear(d_model, d_kv, bias=False)
        self.out = Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        q = self.split_heads(self.q(x))  # (B, n_head, T, d_head)
        k = self.split_heads(self.k(x))  # (B, n_kv_head, T, d_head)
        v = self.split_heads(self.v(x))  # (B, n_kv_head, T, d_head)
        y = causal_attention(apply_rope(q, rope), apply_rope(k, rope), v)
        y = y.transpose(1, 2).flatten(-2)  # (B, H, T, d_head) -> (B, T, H * d_head)
        return self.out(y)  # (B, T, d_model)

    def split_heads(self, x: Tensor) -> Tensor:
        # (B, T, H * d_head) -> (B, T, H, d_head) -> (B, H, T, d_head), H: heads of this tp rank
        return x.unflatten(-1, (-1, self.d_head)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): (B, T, d_model) -> (B, T, d_model)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Linear(config.d_model, config.d_ff, bias=False)
        self.up = Linear(config.d_model, config.d_ff, bias=False)
        self.down = Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the MLP: (B, T, d_model) -> (B, T, d_model)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        # rope is passed by keyword, because the hooks of --tp split positional arguments.
        x = x + self.attention(self.attention_norm(x), rope=rope)
        return x + self.mlp(self.mlp_norm(x))


class TokenLoss(nn.Module):
    """The summed cross-entropy of targets (N,), for x (N, d_model), weight (vocab_size, d_model).

    It is a separate module so that it can be compiled, or replaced.
    """

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")


class Head(Linear):
    """x (B, T, d_model) -> float32 logits, or with targets (B, T) their mean cross-entropy.

    A tied head has no parameter; forward gets the embedding's weight as an argument. A parameter
    shared by two modules would become two parameters when the model leaves the meta device.
    """

    def __init__(self, config: ModelConfig):
        super().__init__(config.d_model, config.vocab_size, bias=False)
        self.loss = TokenLoss()
        if config.tied:
            self.weight = None

    def forward(
        self, x: Tensor, targets: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        weight = self.weight if weight is None else weight
        weight = weight.to(x.dtype)  # (vocab_size, d_model)
        if targets is None:
            return F.linear(x, weight).float()  # (B, T, vocab_size)
        x = x.flatten(0, 1)  # (B * T, d_model)
        targets = targets.flatten()  # (B * T,)
        return self.loss(x, weight, targets) / targets.numel()


# --------------------------------------------------------------------------------------------------
# The decoder


class Transformer(nn.Module):
    """tokens (B, T) -> logits (B, T, vocab_size); with targets (B, T) -> their mean cross-entropy.

    Logits are in float32, activations in `dtype`; the loss is in nats. Build a distributed model
    under torch.device("meta") and fill one parameter after another with `init_tensor`, so that a
    rank never has more in memory than its shards and one full tensor.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed = Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = Head(config)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.embed(tokens).to(self.dtype)  # (B, T, d_model)
        rope = rope_table(self.config, tokens.size(1), tokens.device)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x)
        weight = self.embed.weight if self.config.tied else None
        return self.head(x, targets=targets, weight=weight)

    @torch.no_grad()
    def init_tensor(self, name: str, tensor: Tensor, seed: int) -> None:
        """Fill the full parameter `name` in place. Its values depend on seed, name and device type.

        Norms are 1. Matrices are normal with standard deviation 0.02, or 0.02 / sqrt(2 * n_layer)
        in the 2 * n_layer layers that add to the residual stream (GPT-2, Radford et al. 2019).
        """
        if tensor.dim() == 1:
            tensor.fill_(1.0)
            return
        std = 0.02
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            std /= math.sqrt(2 * self.config.n_layer)
        # Hashed, because a CPU generator uses only 32 bits of its seed
        hashed = zlib.crc32(f"{seed} {name}".encode())
        generator = torch.Generator(tensor.device).manual_seed(hashed)
        tensor.normal_(0.0, std, generator=generator)

    def decays(self, name: str) -> bool:
        """Whether weight decay applies: to all but norms and the embedding."""
        return name != "embed.weight" and not name.endswith("norm.weight")

    def columns(self) -> dict[str, Tensor]:
        """Columns of the log that modules of a fork left in `self.logged`: {name: 0-d tensor}."""
        values: dict[str, list[Tensor]] = {}
        for module in self.modules():
            for name, value in getattr(module, "logged", {}).items():
                value = value.detach().float()
                if isinstance(value, DTensor):  # under tp, a rank has a part of the mean
                    value = value.full_tensor()
                values.setdefault(name, []).append(value)
        return {name: torch.stack(found).mean() for name, found in values.items()}

    def parameter_count(self) -> int:
        """Return the number of elements of all parameters, over all ranks."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Return the FLOPs of forward and backward per token (Chowdhery et al. 2022, appendix B).

        Each weight of a matrix product costs a multiply and an add in forward, and two of each in
        backward. So does each element of a query with a key and of a score with a value, but the
        causal mask hides half of them. An embedding is only looked up.
        """
        weights = sum(p.numel() for p in self.parameters() if p.dim() == 2)
        if not self.config.tied:
            weights -= self.embed.weight.numel()
        attention = self.config.n_layer * self.config.d_model * self.config.seq_len
        return 6 * (weights + attention)


def meta_model(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return a model on the meta device, where it needs no memory."""
    with torch.device("meta"):
        return Transformer(config, dtype)


# --------------------------------------------------------------------------------------------------
# Generation


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    n: int,
    *,
    seq_len: int,
    vocab_size: int,
    device: torch.device | str,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    multiple: int = 128,
) -> Iterator[int]:
    """Continue a prompt, which must not be empty: yield n tokens, given the last seq_len tokens.

    temperature  0 takes the most likely token
    top_k        draw only from this many of the most likely tokens; 0: from all
    vocab_size   ids from here on only pad the head, and are never drawn
    multiple     of tokens to which the context is padded: the ranks of a tp group split them, and
                 cuDNN builds a plan for each new shape, which takes about half a second
    """
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        context = tokens[-seq_len:]
        padding = [0] * (-len(context) % multiple)  # at the end, since attention is causal
        logits = model(torch.tensor([context + padding], device=device))  # (1, T, vocab_size)
        logits = logits[0, len(context) - 1, :vocab_size].cpu().double()
        if temperature == 0:
            token = int(logits.argmax())
        else:
            if 0 < top_k < len(logits):
                logits[logits < logits.topk(top_k).values[-1]] = -math.inf
            probabilities = (logits / temperature).softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        tokens.append(token)
        yield token


# --------------------------------------------------------------------------------------------------
# Sizes and flags

LLAMA3_SHAPE = dict(vocab_size=128256, n_kv_head=8, seq_len=8192, rope_theta=500_000.0, tied=False)

SIZES = {
    # 4 blocks of 4 * 128^2 + 3 * 128 * 352 weights: two laptop cores train it in two minutes
    "tiny": ModelConfig(257, n_layer=4, n_head=4, n_kv_head=4, d_model=128, d_ff=352, seq_len=128),
    # GPT-2's depth, width and vocabulary. SwiGLU has three matrices where GPT-2's MLP has two:
    # 3 * 768 * 2048 = 2 * 768 * 3072
    "gpt2-124m": ModelConfig(
        50257, n_layer=12, n_head=12, n_kv_head=12, d_model=768, d_ff=2048, seq_len=1024
    ),
    "tinyllama-1.1b": ModelConfig(
        32000, n_layer=22, n_head=32, n_kv_head=4, d_model=2048, d_ff=5632, seq_len=2048, tied=False
    ),
    "olmo-1b": ModelConfig(
        50304, n_layer=16, n_head=16, n_kv_head=16, d_model=2048, d_ff=8192, seq_len=2048
    ),
    "llama3-8b": ModelConfig(n_layer=32, n_head=32, d_model=4096, d_ff=14336, **LLAMA3_SHAPE),
    "llama3-70b": ModelConfig(n_layer=80, n_head=64, d_model=8192, d_ff=28672, **LLAMA3_SHAPE),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of the model; config.py explains the annotations.

    A size that is not given is that of --model, or of the checkpoint.
    """

    model: Annotated[Literal[tuple(SIZES)] | None, "part", "size (default: tiny)"] = None
    n_layer: Annotated[int | None, "part", "number of blocks", (1, 10_000)] = None
    n_head: Annotated[int | None, "part", "number of attention heads", (1, 10_000)] = None
    n_kv_head: Annotated[int | None, "part", "fewer than n_head: GQA", (1, 10_000)] = None
    d_model: Annotated[int | None, "part", "width of the residual stream", (1, 1_000_000)] = None
    d_ff: Annotated[int | None, "part", "hidden width of the MLP", (1, 10_000_000)] = None
    seq_len: Annotated[int | None, "part", "tokens per sequence", (1,)] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], "part", "auto: bfloat16 if the device has it"
    ] = "auto"
    loss_chunks: Annotated[int, "free", "compute logits and loss in N chunks", (1,)] = 1
