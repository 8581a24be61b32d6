"""Sample text from a trained model, on one process, whatever mesh trained it.

python sample.py --run runs/tiny --prompt "def "
"""

import argparse
import sys
from pathlib import Path

import torch

import checkpoint
import dist
import tokenizer
from model import ModelConfig, Transformer, generate


class SampleError(ValueError):
    """Flags that cannot be used."""


def load(run: Path, device: torch.device) -> tuple[Transformer, dict]:
    """Return the model, in float32, and the manifest of a checkpoint, or of a run's newest."""
    path = run
    if not (run / "manifest.json").exists():
        checkpoints = checkpoint.list_checkpoints(run)
        if not checkpoints:
            raise checkpoint.CheckpointError(
                f"--run {run}: no checkpoint there; name a run such as runs/tiny, or a checkpoint"
            )
        path = checkpoints[-1]
    manifest = checkpoint.read_manifest(path)
    try:
        config = ModelConfig(**manifest["model"])
    except (KeyError, TypeError) as error:
        raise checkpoint.CheckpointError(
            f"{path} is not a checkpoint of train.py: its manifest.json lacks {error}"
        ) from None
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    checkpoint.load(path, {"model": weights})
    return model, manifest


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sample.py", description="Continue a prompt with a model that train.py has saved."
    )
    add = parser.add_argument
    add("--run", required=True, type=Path, metavar="DIR", help="a run folder, or a checkpoint")
    add(
        "--prompt",
        default="",
        metavar="TEXT",
        help="text to continue; token ids where the tokenizer is unknown (default: the start of a "
        "document)",
    )
    add(
        "--max_new_tokens",
        type=int,
        default=500,
        metavar="N",
        help="number of tokens to sample (default: 500)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the most likely token (default: 0.8)",
    )
    add(
        "--top_k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens only; 0: from all (default: 0)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="the same seed gives the same text (default: 0)",
    )
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    return parser


def check_ranges(args: argparse.Namespace) -> None:
    for option in ("max_new_tokens", "temperature", "top_k", "seed"):
        value = getattr(args, option)
        if not 0 <= value < 2**32:
            raise SampleError(f"--{option} {value} must be a number of at least 0")


def sample(args: argparse.Namespace) -> None:
    """Print the prompt and its continuation, token by token."""
    device = dist.start(args.device).device
    model, manifest = load(args.run, device)
    name = manifest["tokenizer"]
    vocab_size = manifest["tokens_in_vocabulary"]
    tokens = tokenizer.encode(name, args.prompt)
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise SampleError(f"--prompt: token ids are 0 to {vocab_size - 1}")
    print(args.prompt, end="", flush=True)
    new = generate(
        model,
        tokens,
        args.max_new_tokens,
        seq_len=model.config.seq_len,
        vocab_size=vocab_size,
        device=device,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    for text in tokenizer.decode(name, new):
        print(text, end="", flush=True)
    print()
    dist.stop()


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    try:
        check_ranges(args)
        sample(args)
        return 0
    except (SampleError, tokenizer.TokenizerError, dist.MeshError) as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        return 2
    except checkpoint.CheckpointError as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
