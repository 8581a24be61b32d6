"""Sample text from a trained model, on one process, whatever mesh trained it.

python sample.py --run runs/tiny --prompt "def "
python sample.py --run runs/tiny/checkpoints/step-00000600 --temperature 0 --max_new_tokens 100
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime import launcher

if __name__ == "__main__":
    launcher.end_quietly()

import torch
from torch import Tensor, nn

import checkpoint
import data
import dist
from model import ModelConfig, Transformer
from runtime import cli, memory, run_folder
from text import tokenizer


@dataclass(frozen=True)
class Trained:
    """What a checkpoint tells about its model."""

    config: ModelConfig
    tokenizer: str | None  # for tokenizer.load_encoding; None: unknown, ids have no text
    vocab_size: int  # of the data; the model's is padded


def describe(path: Path) -> Trained:
    """Read the manifest of a checkpoint. Raises CheckpointError and TokenizerError."""
    manifest = checkpoint.read_manifest(path)
    try:
        config = ModelConfig.from_dict(manifest["model"])
        vocab_size = int(manifest["tokens_in_vocabulary"])
        name = manifest["tokenizer"]
        config.check_room(checkpoint.total_bytes(manifest))
    except KeyError as error:
        raise checkpoint.CheckpointError(
            f"{path} is not a checkpoint of train.py: its manifest.json lacks {error}"
        ) from None
    except (TypeError, ValueError) as error:
        raise checkpoint.CheckpointError(f"{path} cannot be used: {error}") from None
    return Trained(config, name and tokenizer.find(path, str(name), vocab_size), vocab_size)


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


class NotFinite(ArithmeticError):
    """Logits that are not finite."""

    exit_status = 1


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: list[list[int]],
    n: int,
    *,
    seq_len: int,
    vocab_size: int,
    device: torch.device | str,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    stop: int | None = None,
    seed: int = 0,
    tp: int = 1,
) -> Iterator[dict[int, int]]:
    """Continue all prompts in one batch: yield up to n times {index of a prompt: its next token}.

    Prompts must not be empty. One that draws the token `stop` ends there, without it. A token
    depends on the last seq_len tokens and comes from `draw`; ids of vocab_size and above only pad
    the head and are never drawn. Prompt i draws with seed + i: the same seed gives the same tokens.
    The `tp` ranks that split a sequence divide seq_len. Raises NotFinite.
    """
    rows = {i: list(tokens) for i, tokens in enumerate(prompts)}  # prompts that have not ended
    generators = [torch.Generator().manual_seed(seed + i) for i in rows]
    for _ in range(n):
        logits = next_logits(model, [tokens[-seq_len:] for tokens in rows.values()], device, tp)
        logits = logits[:, :vocab_size].cpu().double()  # (B, vocab_size)
        if not logits.isfinite().all():
            raise NotFinite(
                "the model's logits are not finite: its weights have diverged or are damaged"
            )
        drawn = {}
        for i, row_logits in zip(list(rows), logits):
            token = draw(row_logits, temperature, top_k, top_p, generators[i])
            if token == stop:
                del rows[i]
            else:
                rows[i].append(token)
                drawn[i] = token
        yield drawn
        if not rows:
            return


def next_logits(model: nn.Module, contexts: list[list[int]], device, tp: int) -> Tensor:
    """The logits (B, vocab_size) after the last token of each context."""
    last = [len(tokens) - 1 for tokens in contexts]
    T = math.ceil((1 + max(last)) / tp) * tp
    # Padded at the end, where causal attention does not look.
    padded = [tokens + [0] * (T - len(tokens)) for tokens in contexts]
    logits = model(torch.tensor(padded, device=device))  # (B, T, vocab_size)
    return logits[range(len(last)), last]


def draw(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Draw a token from softmax(logits / temperature); at temperature 0 take the most likely.

    top_k > 0 leaves the top_k most likely tokens, top_p < 1 the fewest whose probabilities add up
    to top_p or more (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < len(logits):
        smallest_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, -math.inf)
    # Subtract the largest first, so that no temperature above 0 overflows.
    probabilities = ((logits - logits.max()) / temperature).softmax(-1)
    if top_p < 1:
        ranked, tokens = probabilities.sort(descending=True)
        before = ranked.cumsum(-1) - ranked  # total of all more likely tokens
        probabilities[tokens[before >= top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))


def closing_sample(
    model: nn.Module, folder: data.TokenFolder, n: int, seq_len: int, tp: int, world: dist.World
) -> str:
    """Continue the start of the validation set; text on rank 0. Collective, like every forward."""
    prompt = folder.tokens("val")[: max(1, seq_len // 4)].tolist()
    new = generate(
        model,
        [prompt],
        n,
        seq_len=seq_len,
        vocab_size=folder.vocab_size,
        device=world.device,
        temperature=0.8,
        tp=tp,
    )
    try:
        tokens = [*prompt, *(drawn[0] for drawn in new)]
        if not world.is_rank0:
            return ""
        return "".join(tokenizer.decode(folder.tokenizer, tokens))
    except (tokenizer.TokenizerError, NotFinite) as error:  # the run itself has succeeded
        return f"no text: {error}"


# --------------------------------------------------------------------------------------------------
# The command

# Flag -> its default, and its metavar and help text
NUMBERS = {
    "max_new_tokens": (500, "N", "tokens to sample, unless the document ends earlier"),
    "temperature": (0.8, "T", "0 takes the most likely token"),
    "top_k": (0, "K", "sample only from the K most likely tokens; 0: from all"),
    "top_p": (1.0, "P", "sample from the fewest tokens whose probabilities reach P; 1: from all"),
    "seed": (0, "S", "the same seed gives the same text; prompt i, from 0, uses S + i"),
}


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="sample.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", required=True, type=Path, metavar="DIR", help="a run folder, or a checkpoint")
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, or token ids if the tokenizer is unknown (default: the start of a "
        "document); repeat --prompt to continue several in one batch",
    )
    for name, (default, metavar, text) in NUMBERS.items():
        text += f" (default: {default})"
        add(f"--{name}", type=type(default), default=default, metavar=metavar, help=text)
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    return parser


def check_flags(args: argparse.Namespace) -> None:
    for option in ("max_new_tokens", "temperature", "top_k", "seed"):
        value = getattr(args, option)
        if not 0 <= value < 2**32:  # refuses nan, too
            raise cli.UsageError(f"--{option} {value} must be at least 0 and below {2**32}")
    if not 0 < args.top_p <= 1:
        raise cli.UsageError(f"--top_p {args.top_p} must be above 0 and at most 1")


def encode_prompt(prompt: str, trained: Trained) -> list[int]:
    """The tokens of a prompt. Raises UsageError and TokenizerError."""
    tokens = tokenizer.encode(trained.tokenizer, prompt)
    if not 0 <= min(tokens) <= max(tokens) < trained.vocab_size:
        raise cli.UsageError(f"--prompt: token ids are 0 to {trained.vocab_size - 1}")
    seq_len = trained.config.seq_len
    if len(tokens) > seq_len:
        warning = f"a prompt has {len(tokens):,} tokens: the model sees the last {seq_len:,}"
        print(f"sample.py: {warning}", file=sys.stderr)
    return tokens


def keep(steps: Iterator[dict[int, int]], kept: list[list[int]]) -> Iterator[int]:
    """Yield the tokens of the first prompt as they come; append those of all to `kept`."""
    for drawn in steps:
        for i, token in drawn.items():
            kept[i].append(token)
        if 0 in drawn:
            yield drawn[0]


def sample(args: argparse.Namespace, device: torch.device) -> None:
    """Print each prompt and its continuation; the first token by token."""
    path = run_folder.choose_checkpoint(args.run, "sample.py")
    trained = describe(path)
    name = trained.tokenizer
    prompts = [encode_prompt(prompt, trained) for prompt in args.prompt]
    shown = args.prompt if name else ["".join(tokenizer.decode(None, ids)) for ids in prompts]
    steps = generate(
        load_model(path, trained.config, device),
        prompts,
        args.max_new_tokens,
        seq_len=trained.config.seq_len,
        vocab_size=trained.vocab_size,
        device=device,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop=tokenizer.load_encoding(name).eot_token if name else None,
        seed=args.seed,
    )
    new: list[list[int]] = [[] for _ in prompts]
    began = time.perf_counter()
    before = [ids if prompt else [] for prompt, ids in zip(args.prompt, prompts)]
    texts = tokenizer.decode(name, keep(steps, new), before[0])
    beginning = next(texts, "")  # before printing the prompt: the model may prove broken
    print(shown[0] + beginning, end="", flush=True)
    for text in texts:
        print(text, end="", flush=True)
    print()
    seconds = time.perf_counter() - began
    for prompt, tokens, ids in zip(shown[1:], new[1:], before[1:]):
        print("-" * 80)
        print(prompt + "".join(tokenizer.decode(name, tokens, ids)))
    count = sum(map(len, new))
    speed = f"{count:,} tokens in {seconds:.1f} s: {count / seconds:,.0f} tokens/s"
    print(f"sample.py: {speed}", file=sys.stderr)


def main(argv: list[str]) -> int:
    def command() -> None:
        args = build_parser().parse_args(argv)
        args.prompt = args.prompt or [""]
        check_flags(args)
        device = dist.start(args.device).device
        if device.type == "cpu":
            memory.keep_freed_memory()  # each token takes the same activations
        try:
            sample(args, device)
        except torch.OutOfMemoryError as error:
            raise cli.RunError(str(error)) from None
        finally:
            dist.stop()

    return cli.execute("sample.py", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
