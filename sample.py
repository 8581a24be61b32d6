"""Sample text in one process from a model that was trained on any mesh.

python sample.py --run runs/tiny --prompt "def "
python sample.py --run runs/tiny/checkpoints/step-00000700 --temperature 0 --max_new_tokens 100
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import dist
import errors
from model import ModelConfig, Sampling, Transformer, generate, meta_model
from start import newest_checkpoint, read_model
from text import tokenizer


@dataclass(frozen=True)
class Trained:
    """What a checkpoint's manifest contains about its model."""

    config: ModelConfig
    tokenizer: str | None  # for tokenizer.load_encoding; None if unknown: the text is then ids
    vocab_size: int  # of the data; the model's vocabulary is padded


def read_trained(path: Path) -> Trained:
    """Read the manifest of a checkpoint. Raises CheckpointError, UsageError and TokenizerError."""
    manifest = checkpoint.read_manifest(path)
    needed = ("model", "tokens_in_vocabulary", "tokenizer")
    missing = ", ".join(name for name in needed if name not in manifest)
    if missing:  # other programs than train.py may call save_state
        raise errors.UsageError(
            f"{path} is not a checkpoint of train.py: its manifest.json lacks {missing}; "
            "give a checkpoint that was written by train.py or tools.hf"
        )
    config = read_model(path, manifest)
    vocab_size = manifest["tokens_in_vocabulary"]
    name = manifest["tokenizer"]
    if name:
        name = tokenizer.find_in_folder(path, name, vocab_size)
    return Trained(config, name, vocab_size)


def load_model(path: Path, config: ModelConfig, device: torch.device) -> Transformer:
    """Load the model of a checkpoint in float32. Raises CheckpointError."""
    model = meta_model(config)
    model.to_empty(device=device)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    checkpoint.load_state(path, {"model": weights})
    return model


# --------------------------------------------------------------------------------------------------
# The command


def build_parser() -> errors.Parser:
    parser = errors.Parser(prog="sample.py", description=__doc__)
    add = parser.add_argument
    add("--run", required=True, type=Path, metavar="DIR", help="a run folder, or a checkpoint")
    add(
        "--prompt",
        default="",
        metavar="TEXT",
        help="text to continue, or token ids if the tokenizer is unknown (default: the start of a "
        "document)",
    )

    def add_number(*flags: str, default: float, help: str, least: float = 0) -> None:
        kind = errors.number(type(default), least, below=2**32)
        add(*flags, type=kind, default=default, metavar="N", help=f"{help} (default: {default})")

    longest = "tokens to sample, unless the document ends earlier"
    add_number("--max_new_tokens", "--max_tokens", default=500, help=longest)
    add_number("--num_samples", default=1, help="texts, with the seeds from --seed on", least=1)
    add_number("--temperature", default=0.8, help="0 takes the most likely token")
    likely = "sample only from the N most likely tokens; 0: from all"
    add_number("--top_k", default=0, help=likely)
    nucleus = "sample only from the fewest tokens with total probability N"
    add_number("--top_p", default=1.0, help=nucleus, least=1e-9)
    add_number("--seed", default=0, help="the same seed gives the same text")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    return parser


def encode_prompt(prompt: str, trained: Trained) -> list[int]:
    """The tokens of a prompt. Raises UsageError and TokenizerError."""
    tokens = tokenizer.encode(trained.tokenizer, prompt)
    if not 0 <= min(tokens) <= max(tokens) < trained.vocab_size:
        raise errors.UsageError(f"--prompt: token ids are 0 to {trained.vocab_size - 1}")
    seq_len = trained.config.seq_len
    if len(tokens) > seq_len:
        warning = f"the prompt has {len(tokens):,} tokens: the model sees the last {seq_len:,}"
        print(f"sample.py: {warning}", file=sys.stderr)
    return tokens


def sample(args: argparse.Namespace, device: torch.device) -> None:
    """Print the prompt and its continuations, token by token."""
    path = newest_checkpoint(args.run)
    trained = read_trained(path)
    prompt = encode_prompt(args.prompt, trained)
    model = load_model(path, trained.config, device)
    name = trained.tokenizer
    stop = tokenizer.load_encoding(name).eot_token if name else None
    size = {"seq_len": trained.config.seq_len, "vocab_size": trained.vocab_size, "device": device}
    for seed in range(args.seed, args.seed + args.num_samples):
        if seed > args.seed:
            print("-" * 80)
        how = Sampling(args.temperature, args.top_k, args.top_p, stop, seed)
        tokens = generate(model, prompt, args.max_new_tokens, how, **size)
        print_text(args.prompt, prompt, name, tokens)


def print_text(text: str, prompt: list[int], name: str | None, tokens: Iterator[int]) -> None:
    """Print the prompt and the tokens that follow it. `name` is the tokenizer."""
    texts = tokenizer.decode(name, tokens, prompt if text else [])
    beginning = next(texts, "")  # before printing the prompt: the model may be broken
    shown = text if name else "".join(tokenizer.decode(None, prompt))
    print(shown, beginning, sep="", end="", flush=True)
    for piece in texts:
        print(piece, end="", flush=True)
    print()


def main(argv: list[str]) -> int:
    def command() -> None:
        args = build_parser().parse_args(argv)
        device = dist.find_device(args.device, local_rank=0, local_size=1)
        if device.type == "cpu":
            dist.keep_freed_memory()  # each token needs the same buffers again
        try:
            sample(args, device)
        except torch.OutOfMemoryError as error:
            raise errors.RunError(str(error)) from None

    return errors.execute("sample.py", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
