"""The decoder: a Llama-3-style transformer, its sizes, weights and generation.

Every strategy runs the same arithmetic. Weights are in float32 (single, DDP) or already in the
compute dtype (FSDP gathers them in it); each layer casts its weight to the dtype of its input.

In shape comments there are B sequences of T tokens and H heads, and d_head = d_model / n_head.
"""

import contextlib
import dataclasses
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import wrap_torch_function


@dataclass(frozen=True)
class RopeScaling:
    """Slower rotations for long contexts, as in Llama 3.1: see `scale_frequencies`."""

    factor: float  # divides the slow frequencies
    low_freq_factor: float  # slow: at most this many turns in the original context
    high_freq_factor: float  # fast: at least this many turns
    original_seq_len: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Raises ValueError if its numbers do not fit together.

    A field with an annotation is also a flag, which config.py explains. If the flag is not given,
    the named size, or the model of the checkpoint, has the value.
    """

    vocab_size: int
    n_layer: Annotated[int, "part", "number of blocks", (1, 10_000)]
    n_head: Annotated[int, "part", "number of attention heads", (1, 10_000)]
    # Grouped-query attention (Ainslie et al. 2023)
    n_kv_head: Annotated[int, "part", "key and value heads; fewer than n_head: GQA", (1, 10_000)]
    d_model: Annotated[int, "part", "width of the residual stream", (1, 1_000_000)]
    d_ff: Annotated[int, "part", "hidden width of the MLP", (1, 10_000_000)]
    seq_len: Annotated[int, "part", "tokens per sequence", (1,)]
    rope_theta: float = 10_000.0
    tied: bool = True  # the head shares the embedding's matrix (Press & Wolf 2017)
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    rope_scaling: RopeScaling | None = None

    @classmethod
    def from_dict(cls, fields: dict) -> "ModelConfig":
        """Create the config from a manifest's model. Missing optional fields get their defaults.

        Raises ValueError, also for an unknown field: ignoring it would change the model.
        """
        try:
            check_fields("model", cls, fields)
            scaling = fields.get("rope_scaling")
            if scaling:
                check_fields("rope_scaling", RopeScaling, scaling)
                scaling = RopeScaling(**scaling)
            return cls(**fields | {"rope_scaling": scaling})
        except (TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(f"its model has an invalid value: {error}") from None

    def __post_init__(self):
        if self.d_model % self.n_head or self.d_model // self.n_head % 2:
            raise ValueError(
                f"d_model {self.d_model} / n_head {self.n_head} must be a whole, even number "
                "(RoPE rotates pairs of elements)"
            )
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head {self.n_kv_head} must divide n_head {self.n_head}")


@wrap_torch_function(lambda x: (x,))
def is_gpu(x: Tensor) -> bool:
    """Whether to use kernels for GPUs. A TorchFunctionMode of tools.plan overrides this."""
    return x.device.type != "cpu"


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
    if is_gpu(weight) and tokens.numel() > 3072:
        return F.embedding(tokens, weight)
    return F.embedding(tokens, weight.float()).to(weight.dtype)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (Zhang & Sennrich 2019): statistics in float32, result in x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps=self.eps)


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
    # A sum has the memory layout of its first operand: `others` is contiguous, while x is (B, T, H,
    # d_head) in memory. Attention on a GPU returns the layout of q, so with x's layout it joins the
    # heads without a copy. The written-out attention on a CPU is faster with contiguous operands.
    first, second = (x * cos, others * sin) if is_gpu(x) else (others * sin, x * cos)
    return (first + second).to(x.dtype)


CPU_KERNEL_ABOVE = 512  # tokens; up to this length, written-out attention is faster on a CPU


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d_head) + causal mask) v, shaped like q.

    q is (B, H, T, d_head). k and v may have fewer heads, if their number divides H.
    """
    B, H, T, d_head = q.shape
    on_gpu = is_gpu(q)
    writes_out = not on_gpu and T <= CPU_KERNEL_ABOVE
    group_size = H // k.size(1)  # query heads that share a key and value head
    # In float32, the only GPU kernel that does not write out the scores cannot share heads.
    takes_groups = not writes_out and not (on_gpu and q.dtype == torch.float32)
    if group_size > 1 and not takes_groups:
        k = k.repeat_interleave(group_size, dim=1)
        v = v.repeat_interleave(group_size, dim=1)
        group_size = 1
    if not writes_out:
        # torch picks the fastest kernel: since 2.11, cuDNN's on Hopper and Blackwell GPUs and
        # FlashAttention on other GPUs.
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group_size > 1)

    # The backward of torch's CPU kernel takes twice as long for such lengths. In bfloat16, unlike
    # in the kernel, the scores are rounded: float32 scores would take a sixth longer.
    mask = q.new_full((T, T), -math.inf).triu(1)
    q = q.flatten(0, 1)  # (B * H, T, d_head)
    k = k.flatten(0, 1)
    v = v.flatten(0, 1)
    scores = torch.baddbmm(mask, q, k.mT, alpha=d_head**-0.5)  # (B * H, T, T)
    y = scores.softmax(-1) @ v  # (B * H, T, d_head)
    return y.view(B, H, T, d_head)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023)."""

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

    activation = staticmethod(F.silu)

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = Linear(config.d_model, config.d_ff, bias=False)
        self.up = Linear(config.d_model, config.d_ff, bias=False)
        self.down = Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x)) * self.up(x))


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
        if weight is None:
            weight = self.weight
        weight = weight.to(x.dtype)  # (vocab_size, d_model)
        if targets is None:
            return F.linear(x, weight).float()  # (B, T, vocab_size)
        x = x.flatten(0, 1)  # (B * T, d_model)
        targets = targets.flatten()  # (B * T,)
        return self.loss(x, weight, targets) / targets.numel()


class TokenLoss(nn.Module):
    """The summed cross-entropy of targets (N,), for x (N, d_model), weight (vocab_size, d_model).

    It is a separate module so that it can be compiled, or replaced.
    """

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")


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

        On GPUs, values of large matrices also depend on the number of multiprocessors.

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
        """Whether weight decay applies: to matrices, but not to norms and the embedding."""
        return name != "embed.weight" and not name.endswith("norm.weight")

    def is_hidden(self, name: str) -> bool:
        """Whether a parameter belongs to a block, not to the embedding, the head or last norm."""
        return name.startswith("blocks.")

    def logged_values(self) -> dict[str, Tensor]:
        """Columns of the log that modules computed in the last forward pass, 0-d tensors.

        A module computes one if its forward sets self.logged = {"z_loss": z_loss.detach()}, for
        example. If several modules have the same column, it is their mean.
        """
        values: dict[str, list[Tensor]] = {}
        for module in self.modules():
            for name, value in getattr(module, "logged", {}).items():
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


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in evaluation mode, for forks with dropout, then restore each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


# --------------------------------------------------------------------------------------------------
# Generation


class NotFinite(RuntimeError):
    """The model computes values that are not finite."""

    exit_status = 1


@dataclass(frozen=True)
class Sampling:
    """How `generate` draws tokens, and when it stops. See `draw`."""

    temperature: float = 1.0  # 0: take the most likely token
    top_k: int = 0  # 0: draw from all tokens
    top_p: float = 1.0
    stop: int | None = None  # this token ends the text, and is not part of it
    seed: int = 0


CUDA_CONTEXT_MULTIPLE = 128  # tokens: see `generate`


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: list[int],
    n: int,
    sampling: Sampling,
    *,
    seq_len: int,
    vocab_size: int,
    device: torch.device | str,
    tp: int = 1,
) -> Iterator[int]:
    """Continue a prompt, which must not be empty: yield up to n tokens.

    `draw` draws each token, given the last seq_len tokens. Ids of vocab_size and above only pad the
    head and are never drawn. The same seed gives the same tokens. `tp` is the number of ranks that
    split a sequence; it divides seq_len. Raises NotFinite.
    """
    tokens = list(prompt)
    generator = torch.Generator().manual_seed(sampling.seed)
    # cuDNN builds a plan for each new shape, which takes about half a second: the context may not
    # grow by one token at a time. On CPUs, which need no plans, padding would change the rounding.
    is_cuda = torch.device(device).type == "cuda"
    multiple = math.lcm(tp, CUDA_CONTEXT_MULTIPLE) if is_cuda else tp
    with eval_mode(model):
        for _ in range(n):
            context = tokens[-seq_len:]
            padding = [0] * (-len(context) % multiple)  # at the end, since attention is causal
            logits = model(torch.tensor([context + padding], device=device))  # (1, T, vocab_size)
            logits = logits[0, len(context) - 1, :vocab_size].cpu().double()
            if not logits.isfinite().all():
                raise NotFinite(
                    "the model's logits are not finite: its weights have diverged or are damaged"
                )
            token = draw(logits, sampling, generator)
            if token == sampling.stop:
                return
            tokens.append(token)
            yield token


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from softmax(logits / temperature); at temperature 0 take the most likely.

    top_k > 0 keeps only the top_k most likely tokens. Then top_p < 1 keeps the fewest tokens whose
    probabilities add up to at least top_p (nucleus sampling, Holtzman et al. 2020).
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    if 0 < sampling.top_k < len(logits):
        smallest_kept = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, -math.inf)
    # Subtract the largest first, so that no temperature above 0 overflows.
    probabilities = ((logits - logits.max()) / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ranked, tokens = probabilities.sort(descending=True)
        before = ranked.cumsum(-1) - ranked  # total of all more likely tokens
        probabilities[tokens[before >= sampling.top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))


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
    """The flags of the model, beside those of ModelConfig; config.py explains the annotations."""

    model: Annotated[
        Literal[tuple(SIZES)] | None,
        "part",
        "named size (default: tiny, or that of --init_from); --n_layer ... override its parts",
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        "part",
        "compute dtype; auto: bfloat16 if the hardware supports it",
    ] = "auto"
    loss_chunks: Annotated[int, "free", "compute logits and loss in N chunks of tokens", (1,)] = 1


def size_flags() -> type:
    """The class of flags that override fields of ModelConfig: None unless they are given."""
    flags = []
    for name, hint in get_type_hints(ModelConfig, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, *metadata = get_args(hint)
            flags.append((name, Annotated[(kind | None, *metadata)], None))
    return dataclasses.make_dataclass("SizeFlags", flags, frozen=True, kw_only=True)


SizeFlags = size_flags()
SizeFlags.__module__ = __name__  # so that --help lists them as flags of this file


# Fields that change what the weights mean, but not their names and shapes
MEANINGS = ("n_head", "n_kv_head", "rope_theta", "rope_scaling", "norm_eps")


def weights_fit(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two models have the same weights, by their names and shapes, and their meaning."""
    if any(getattr(one, name) != getattr(other, name) for name in MEANINGS):
        return False
    first, second = (
        {name: weight.shape for name, weight in meta_model(config).named_parameters()}
        for config in (one, other)
    )
    return first == second


def check_fields(what: str, cls: type, fields: dict) -> None:
    """Raise ValueError if `fields` lacks required fields of a dataclass, or has unknown ones."""
    known = {field.name: field for field in dataclasses.fields(cls)}
    required = [name for name in known if known[name].default is dataclasses.MISSING]
    missing = ", ".join(name for name in required if name not in fields)
    unknown = ", ".join(name for name in fields if name not in known)
    if missing or unknown:
        raise ValueError(
            f"its {what} does not match this code: "
            f"missing fields: {missing or 'none'}; unknown fields: {unknown or 'none'}"
        )
