"""Text from a trained model, on one process, whatever mesh trained it.

python sample.py --run runs/tiny --prompt "def "
"""

import argparse
import sys
from pathlib import Path

import torch

import checkpoint
import dist
import tokenizer
from model import ModelConfig, Transformer, build_model, generate


def load(run: Path, device: torch.device) -> tuple[Transformer, dict]:
    """(model in float32, manifest) of a checkpoint, or of the newest one of a run."""
    saved = [run] if (run / "manifest.json").exists() else checkpoint.list_checkpoints(run)
    if not saved:
        raise checkpoint.CheckpointError(
            f"--run {run}: no checkpoint there; give a run such as runs/tiny or its checkpoint"
        )
    manifest = checkpoint.read_manifest(saved[-1])
    try:
        config = ModelConfig(**manifest["model"])
    except (KeyError, TypeError) as error:
        raise checkpoint.CheckpointError(
            f"{saved[-1]} is no checkpoint of train.py: its manifest.json lacks {error}"
        ) from None
    model = build_model(config, device)
    checkpoint.load(
        saved[-1],
        {"model": {name: parameter.detach() for name, parameter in model.named_parameters()}},
    )
    return model, manifest


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Continue a prompt with a model that train.py has saved."
    )
    add = parser.add_argument
    add(
        "--run",
        required=True,
        type=Path,
        metavar="DIR",
        help="run folder, or one of its checkpoints",
    )
    add(
        "--prompt",
        default="",
        metavar="TEXT",
        help="text to continue; token ids where the tokenizer is unknown "
        "(default: the start of a document)",
    )
    add(
        "--max_new_tokens",
        type=int,
        default=500,
        metavar="N",
        help="tokens to write (default: 500)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token (default: 0.8)",
    )
    add(
        "--top_k",
        type=int,
        default=0,
        metavar="K",
        help="draw from the K likeliest tokens only (default: all)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="the same seed writes the same text (default: 0)",
    )
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    args = parser.parse_args()
    try:
        for option in ("max_new_tokens", "temperature", "top_k", "seed"):
            if not 0 <= getattr(args, option) < 2**32:
                raise tokenizer.TokenizerError(
                    f"--{option} {getattr(args, option)} must be at least 0, and a number"
                )
        device = dist.start(args.device).device
        model, manifest = load(args.run, device)
        name = manifest["tokenizer"]
        tokens = tokenizer.encode(name, args.prompt)
        if not 0 <= min(tokens) <= max(tokens) < manifest["tokens_in_vocabulary"]:
            raise tokenizer.TokenizerError(
                f"--prompt: token ids are 0 to {manifest['tokens_in_vocabulary'] - 1}"
            )
        print(args.prompt, end="", flush=True)
        new = generate(
            model,
            tokens,
            args.max_new_tokens,
            seq_len=model.config.seq_len,
            vocab_size=manifest["tokens_in_vocabulary"],
            device=device,
            temperature=args.temperature,
            top_k=args.top_k,
            seed=args.seed,
        )
        for text in tokenizer.decode(name, new):
            print(text, end="", flush=True)
        print()
        dist.stop()
        return 0
    except (tokenizer.TokenizerError, dist.MeshError) as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        return 2
    except checkpoint.CheckpointError as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130


if __name__ == "__main__":
    sys.exit(main())
