"""Sample text in one process from a model that was trained on any mesh.

python sample.py --run runs/tiny --prompt "def "
python sample.py --run runs/tiny/checkpoints/step-00000700 --temperature 0 --max_new_tokens 100
"""

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import checkpoint
import data
import dist
import errors
from config import Run
from model import ModelConfig, Transformer, eval_mode
from runtime.watchdog import Watchdog
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
    with torch.device("meta"):
        model = Transformer(config)
    model.to_empty(device=device)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    checkpoint.load_state(path, {"model": weights})
    return model


# --------------------------------------------------------------------------------------------------
# Generation


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
    split a sequence; it divides seq_len. Raises RunError.
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
                raise errors.RunError(
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


def closing_sample(
    model: nn.Module, folder: data.TokenFolder, run: Run, world: dist.World, watchdog: Watchdog
) -> str:
    """Continue the start of the validation set; return the text on rank 0. All ranks call it."""
    tokens = folder.tokens("val")[: max(1, run.seq_len // 4)].tolist()
    size = dict(seq_len=run.seq_len, vocab_size=folder.vocab_size, device=world.device, tp=run.tp)
    try:
        if isinstance(model, FSDPModule):
            gather_once(model, run, world)
        for token in generate(model, tokens, run.sample_tokens, Sampling(temperature=0.8), **size):
            tokens.append(token)
            watchdog.progress(run.max_steps, "sampling", slow=True, status=0)
        return "".join(tokenizer.decode(folder.tokenizer, tokens)) if world.rank == 0 else ""
    except Exception as error:  # the run itself has succeeded
        reason = str(error).partition("\n")[0]
        return f"no text: {reason}; python sample.py --run {run.out} needs one process only"


def gather_once(model: FSDPModule, run: Run, world: dist.World) -> None:
    """Have FSDP keep the weights that it gathers. Raises RunError if a rank lacks the memory."""
    size = model.parameter_count() * run.compute_dtype.itemsize // run.tp  # tp does not split norms
    if min(dist.on_all_ranks(free_memory, world)) < size:
        raise errors.RunError(
            f"all weights, {size / 1e9:.1f} GB, do not fit in a rank's free memory"
        )
    model.set_reshard_after_forward(False)


def free_memory(world: dist.World) -> int:
    """The free memory in bytes: of this rank's GPU, or this rank's share of the host's."""
    if world.device.type == "cuda":
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    if not (file := Path("/proc/meminfo")).exists():  # macOS
        return dist.read_machine(world).device_memory
    _, _, available = file.read_text().partition("MemAvailable:")  # includes the page cache
    return int(available.split()[0]) * 1024 // world.local_size


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

    def add_number(flag: str, default: float, help: str, least: float = 0) -> None:
        kind = errors.number(type(default), least, below=2**32)
        add(flag, type=kind, default=default, metavar="N", help=f"{help} (default: {default})")

    add_number("--max_new_tokens", 500, "tokens to sample, unless the document ends earlier")
    add_number("--temperature", 0.8, "0 takes the most likely token")
    add_number("--top_k", 0, "sample only from the N most likely tokens; 0: from all")
    add_number("--top_p", 1.0, "sample only from the fewest tokens with total probability N", 1e-9)
    add_number("--seed", 0, "the same seed gives the same text")
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
    """Print the prompt and its continuation, token by token."""
    path = newest_checkpoint(args.run)
    trained = read_trained(path)
    name = trained.tokenizer
    prompt = encode_prompt(args.prompt, trained)
    model = load_model(path, trained.config, device)
    stop = tokenizer.load_encoding(name).eot_token if name else None
    how = Sampling(args.temperature, args.top_k, args.top_p, stop, args.seed)
    seq_len, vocab_size = trained.config.seq_len, trained.vocab_size
    n = args.max_new_tokens
    tokens = generate(model, prompt, n, how, seq_len=seq_len, vocab_size=vocab_size, device=device)
    texts = tokenizer.decode(name, tokens, prompt if args.prompt else [])
    beginning = next(texts, "")  # before printing the prompt: the model may be broken
    shown = args.prompt if name else "".join(tokenizer.decode(None, prompt))
    print(shown, beginning, sep="", end="", flush=True)
    for text in texts:
        print(text, end="", flush=True)
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
