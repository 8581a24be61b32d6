"""A run has the losses, gradient norms, weights and moments of an independent trainer.

`train_plainly` below is the reference: a plain decoder, torch.optim.AdamW with two groups,
torch.nn.utils.clip_grad_norm_, the schedules written down once more, and for a step the mean over
micro-batches of their mean losses. It reads the bytes of a token folder, starts from the weights of
a checkpoint, and uses nothing of this project. So a fault that all meshes share, which comparisons
of one mesh with another cannot see, is seen here.
"""

import hashlib
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rig import SMALL, cells
from torch import Tensor

# name | flags. Of 45 windows of 528 tokens, 60 are read, so the second epoch has begun.
TABLE = """
accumulation | --global_batch_size 12 --micro_batch_size 3
long         | --model tinyllama-1.1b --seq_len 528 --global_batch_size 3 --schedule wsd
adaptive     | --clip adaptive --max_grad_norm_ratio 0.5 --seed 3 --schedule cosine --min_lr 2e-3
"""
# Flags of every run. The reference reads the numbers from them, too.
COMMON = "--max_steps 20 --lr 1e-2 --warmup_steps 4 --eval_sequences 6 --weight_decay 0.3"
# The reference's own defaults, which are those that --help prints
DEFAULTS = (
    "--micro_batch_size 16 --seed 0 --min_lr 0 --schedule linear --clip norm --max_grad_norm 1 "
    "--max_grad_norm_ratio 2"
)
BETAS = (0.9, 0.95)

# --------------------------------------------------------------------------------------------------
# The reference trainer


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def rotate(x: Tensor) -> Tensor:
    """Rotary embeddings of x (B, H, T, d_head), with complex numbers."""
    T, half = x.size(-2), x.size(-1) // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(T, dtype=x.dtype), frequencies)
    y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((y.real, y.imag), dim=-1)


def decoder(w: dict[str, Tensor], tokens: Tensor, n_layer: int, d_head: int) -> Tensor:
    """The logits (B, T, vocab_size) of a Llama, written down once more without any module."""
    T = tokens.size(1)
    past = torch.ones(T, T, dtype=torch.bool).tril()
    x = w["embed.weight"][tokens]
    for block in (f"blocks.{i}" for i in range(n_layer)):
        y = normalize(x, w[f"{block}.attention_norm.weight"])
        q, k, v = (y @ w[f"{block}.attention.{name}.weight"].T for name in "qkv")
        q, k, v = (t.unflatten(-1, (-1, d_head)).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
        scores = rotate(q) @ rotate(k).mT / math.sqrt(d_head)
        y = scores.where(past, -math.inf).softmax(-1) @ v
        x = x + y.transpose(1, 2).flatten(-2) @ w[f"{block}.attention.out.weight"].T
        y = normalize(x, w[f"{block}.mlp_norm.weight"])
        gate, up = (y @ w[f"{block}.mlp.{name}.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"{block}.mlp.down.weight"].T
    return normalize(x, w["norm.weight"]) @ w.get("head.weight", w["embed.weight"]).T


def loss_of(w: dict[str, Tensor], tokens: Tensor, run: SimpleNamespace) -> Tensor:
    """The mean cross-entropy of sequences (B, T + 1), in nats."""
    logits = decoder(w, tokens[:, :-1], run.n_layer, run.d_model // run.n_head)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def rate(step: int, run: SimpleNamespace) -> float:
    """The learning rate of a step, counted from 1."""
    if step <= run.warmup_steps:
        return run.lr * step / run.warmup_steps
    progress = (step - 1 - run.warmup_steps) / (run.max_steps - run.warmup_steps)
    factors = {
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "wsd": min(1.0, (1 - progress) / 0.2),
        "constant": 1.0,
    }
    return run.min_lr + (run.lr - run.min_lr) * factors[run.schedule]


def window(n: int, windows: int, seed: int) -> int:
    """The window that training sequence n reads: a Feistel network with six rounds."""
    epoch, place = divmod(n, windows)
    bits = max(1, math.ceil(math.log2(windows) / 2)) if windows > 1 else 1
    while True:
        left, right = divmod(place, 2**bits)
        for turn in range(6):
            text, key = f"{turn} {right}".encode(), f"{seed} {epoch}".encode()
            digest = hashlib.blake2b(text, digest_size=8, key=key).digest()
            left, right = right, left ^ int.from_bytes(digest, "big") % 2**bits
        place = left * 2**bits + right
        if place < windows:
            return place


def read_windows(folder: Path, split: str, T: int) -> Tensor:
    """All windows of a split, (windows, T + 1); the last token of one is the next one's first."""
    meta = json.loads((folder / "meta.json").read_text())
    tokens = torch.from_numpy(np.fromfile(folder / f"{split}.bin", meta["dtype"]).astype(np.int64))
    return tokens.unfold(0, T + 1, T)


@torch.no_grad()
def clip_adaptively(weights: list[Tensor], averages: list[float], ratio: float) -> bool:
    """Limit each gradient's norm to `ratio` x the average of its clipped norms, as OLMo does."""
    clips = False
    for i, weight in enumerate(weights):
        norm = weight.grad.norm().item()
        average = averages[i] or norm
        factor = min(1.0, ratio * average / norm)
        clips |= factor < 1
        weight.grad *= factor
        averages[i] = average + (1 - max(BETAS)) * (norm * factor - average)
    return clips


def train_plainly(
    w: dict[str, Tensor], data: Path, run: SimpleNamespace
) -> tuple[list[dict], dict]:
    """Train the weights `w` in place; return a row for each step, and AdamW's state.

    One more row has the validation loss.
    """
    sequences, held_out = (read_windows(data, split, run.seq_len) for split in ("train", "val"))
    weights = [weight.requires_grad_() for weight in w.values()]
    no_decay = [name for name in w if name.endswith("norm.weight") or name == "embed.weight"]
    groups = [
        {"params": [w[name] for name in w if name not in no_decay]},
        {"params": [w[name] for name in no_decay], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=BETAS, eps=1e-8, weight_decay=run.weight_decay)
    averages = [0.0] * len(weights)
    rows = []
    for step in range(1, run.max_steps + 1):
        first = (step - 1) * run.global_batch_size
        numbers = range(first, first + run.global_batch_size)
        batch = sequences[[window(n, len(sequences), run.seed) for n in numbers]]
        losses = [loss_of(w, part, run) for part in batch.split(run.micro_batch_size)]
        loss = torch.stack(losses).mean()
        adamw.zero_grad()
        loss.backward()
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm().item()
        if run.clip == "norm":
            torch.nn.utils.clip_grad_norm_(weights, run.max_grad_norm)
            clips = norm > run.max_grad_norm
        else:
            clips = clip_adaptively(weights, averages, run.max_grad_norm_ratio)
        lr = rate(step, run)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        tokens = step * run.global_batch_size * run.seq_len
        row = {"step": step, "tokens": tokens, "lr": lr, "clipped": clips}
        rows.append(row | {"loss": loss.item(), "grad_norm": norm})
    chosen = [i * len(held_out) // run.eval_sequences for i in range(run.eval_sequences)]
    with torch.no_grad():
        rows.append({"step": run.max_steps, "val_loss": loss_of(w, held_out[chosen], run).item()})
    return rows, adamw.state


# --------------------------------------------------------------------------------------------------
# The real command


def parse(text: str) -> SimpleNamespace:
    """The values of a text of flags; a later flag replaces an earlier one."""
    words = text.split()
    found = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        try:
            found[name.removeprefix("--")] = json.loads(value)
        except ValueError:
            found[name.removeprefix("--")] = value
    return SimpleNamespace(**found)


@pytest.mark.parametrize("name, flags", cells(TABLE))
def test_a_run_has_the_numbers_of_the_reference(train, tokens, name, flags):
    flags = f"{COMMON} {flags}"
    # One step at a high learning rate, after which no weight is small, and no norm's weight is 1
    first = train(1, f"{flags} --max_steps 1 --warmup_steps 1 --lr 0.05", "first")
    run = train(1, f"{flags} --init_from {first.out}")
    assert (first.status, run.status) == (0, 0), run.error

    prefix = "model."
    before = first.weights()
    weights = {name.removeprefix(prefix): before[name] for name in before if prefix in name}
    given = parse(f"{DEFAULTS} {SMALL} {flags}")
    (*rows, evaluation), state = train_plainly(weights, tokens, given)
    for key in ("step", "tokens", "lr", "clipped"):
        assert [row[key] for row in run.rows()] == [row[key] for row in rows], key
    assert {row["clipped"] for row in rows} == {0, 1}
    for key, relative in {"loss": 1e-5, "grad_norm": 1e-4}.items():
        values = [row[key] for row in rows]
        assert [row[key] for row in run.rows()] == pytest.approx(values, rel=relative), key
    (evaluated,) = run.rows("val_loss")
    assert evaluated["step"] == evaluation["step"]
    assert evaluated["val_loss"] == pytest.approx(evaluation["val_loss"], rel=1e-5)

    expected = {f"{prefix}{name}": weight.detach() for name, weight in weights.items()}
    for name, moment in itertools.product(weights, ("exp_avg", "exp_avg_sq")):
        expected[f"optimizer.{moment}.{name}"] = state[weights[name]][moment]
    tensors = run.weights()
    assert tensors.keys() == {*expected, "optimizer.skipped_steps", "optimizer.norm_average"}
    for name, tensor in expected.items():
        assert (tensors[name] - tensor).norm() <= 1e-3 * tensor.norm(), name
