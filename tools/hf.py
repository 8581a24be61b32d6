"""Convert a checkpoint to a model folder for Hugging Face transformers, and back.

python -m tools.hf export runs/tiny OUT
python -m tools.hf import DIR OUT

The decoder is Hugging Face's Llama: RoPE pairs the same elements, so tensors map one to one. No
command executes code from the files that it reads.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

import tiktoken
import torch

import checkpoint
import errors
import tokenizer
from errors import UsageError
from model import ModelConfig, RopeScaling, meta_model
from sample import read_trained
from tools import common
from tools.common import new_folder, read_full, write_full

# Module of the decoder -> module of Hugging Face's Llama
OUTSIDE = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
IN_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
ACTIVATION = "silu"  # of our MLP; a fork writes the name that transformers has for its own
# Fields of ModelConfig that do not change what the weights compute: a fork adds its own
ONLY_IN_TRAINING: set[str] = set()
ADDS_TOKENS = (
    "in transformers, the post_processor of tokenizer.json adds tokens to a text; prepare.py and "
    "sample.py do not: give add_special_tokens=False there, or write the tokens into your texts"
)
# Size in ModelConfig -> field of config.json
INTEGERS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "seq_len": "max_position_embeddings",
}


def hf_name(name: str) -> str:
    """blocks.0.attention.q.weight -> model.layers.0.self_attn.q_proj.weight"""
    module = name.removesuffix(".weight")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.weight"
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{IN_BLOCK[part]}.weight"


def meta_weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the names and shapes of the model's weights, as meta tensors without values."""
    return dict(meta_model(config).named_parameters())


# --------------------------------------------------------------------------------------------------
# Export


def export_model(source: Path, out: Path) -> None:
    """Write a checkpoint, or the latest of a run, as the new model folder `out`, in float32.

    Reads one tensor at a time. Raises UsageError, CheckpointError and TokenizerError.
    """
    path = common.newest_checkpoint(source)
    trained = read_trained(path)
    encoding = tokenizer.load_encoding(trained.tokenizer) if trained.tokenizer else None
    config = to_hf(trained.config, encoding)
    with new_folder(out) as work:
        write_json(work / "config.json", config)
        # As in sample.py, never draw ids that only pad the head.
        padding = list(range(trained.vocab_size, trained.config.vocab_size))
        generation = special_ids(encoding) | {"suppress_tokens": padding or None}
        write_json(work / "generation_config.json", generation)
        if encoding:
            if isinstance(encoding, tokenizer.JsonEncoding):
                encoding.save(work)
                end = encoding.end_of_text
                if encoding.adds_tokens:
                    print(ADDS_TOKENS)
            else:
                write_tokenizer(encoding, work / "tokenizer.json")
                end = tokenizer.END_OF_TEXT
            write_json(work / "tokenizer_config.json", tokenizer_config(trained.config, end))
        write_weights(path, meta_weights(trained.config), work / "model.safetensors")
        for file in work.iterdir():
            checkpoint.sync(file)
        os.rename(work, out)
        checkpoint.sync(out.parent)
    print(f"{out}: {path} as a LlamaForCausalLM in float32")
    if encoding is None:
        print(f"{out} has no tokenizer, because {path} has none")


def write_json(file: Path, contents: dict) -> None:
    file.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def write_weights(path: Path, weights: dict[str, torch.Tensor], file: Path) -> None:
    """Write the weights of a checkpoint as one safetensors file, one tensor at a time."""
    reader = checkpoint.Reader(path)
    layout = {}
    ours = {}  # name in Hugging Face's Llama -> name in the checkpoint
    for name, weight in weights.items():
        saved = reader.tensors.get(f"model.{name}")
        if saved is None or saved.full.shape != weight.shape:
            problem = f"no model.{name} of {weight.shape}"
            raise checkpoint.CheckpointError(f"cannot read {path}: {problem}")
        layout[hf_name(name)] = weight
        ours[hf_name(name)] = f"model.{name}"

    def read(name: str) -> torch.Tensor:
        return read_full(reader, ours[name]).float()

    checkpoint.write_safetensors(file, layout, read)


def to_hf(config: ModelConfig, encoding: tiktoken.Encoding | None) -> dict:
    """Return the config.json of a model, for transformers 4.43 and later. Raises UsageError."""
    rope_scaling = None
    if scaling := config.rope_scaling:
        rope_scaling = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        }
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{field: getattr(config, ours) for ours, field in INTEGERS.items()},
        "num_key_value_heads": config.n_kv_head,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tied,
        "hidden_act": ACTIVATION,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **special_ids(encoding),
    }
    # A field that is not mapped above, such as a fork's, reads back as its default.
    read_back = read_config(hf)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(read_back, field.name) and field.name not in ONLY_IN_TRAINING:
            raise UsageError(
                f"a LlamaForCausalLM cannot have the model's {field.name} {value}: if it acts only "
                "in training, add it to ONLY_IN_TRAINING in tools/hf.py"
            )
    return hf


def special_ids(encoding: tiktoken.Encoding | None) -> dict:
    """Return end-of-text, or null, as each special id. Without null, Llama's ids would apply."""
    end = encoding.eot_token if encoding else None
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


# --------------------------------------------------------------------------------------------------
# Import

# Field of config.json -> values that the decoder can compute. No other field changes the logits of
# these two model types in transformers.
COMPUTED = {
    "model_type": ("llama", "mistral"),
    "hidden_act": (ACTIVATION,),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None, {}),
}


def import_model(source: Path, out: Path) -> None:
    """Write the model folder `source` as the new checkpoint `out`, for --init_from and sample.py.

    Writes one file in float32, one tensor at a time. Raises UsageError, CheckpointError.
    """
    config = from_hf(source)
    found = {}  # tensors mapped into memory
    files = sorted(source.glob("model*.safetensors"))
    if not files:
        raise UsageError(f"{source} has no model.safetensors: other formats cannot be read")
    for file in files:
        found |= checkpoint.map_safetensors(file)
    if hf_name("head") in found:  # the head may differ from the embedding
        config = dataclasses.replace(config, tied=False)
    weights = meta_weights(config)
    check_weights(source, found, weights)
    with new_folder(out) as work:
        entries = copy_weights(found, weights, work)
        encoding = import_tokenizer(source, work, config.vocab_size)
        for copied in work.glob("tokenizer*.json"):
            entries[copied.name] = checkpoint.write_file(copied, [copied.read_bytes()])  # and sync
        manifest = {
            "step": 0,
            "tokens": 0,
            "model": dataclasses.asdict(config),
            "tokenizer": encoding.name if encoding else None,
            "tokens_in_vocabulary": encoding.n_vocab if encoding else config.vocab_size,
            "files": entries,
        }
        checkpoint.complete(work, out, manifest)
    print(f"{out}: {source}, {len(weights)} tensors in float32")
    if encoding is None:
        print(f"{out} has no tokenizer: sample.py reads and prints token ids")


def copy_weights(found: dict, weights: dict, work: Path) -> dict:
    """Write the files of a checkpoint, one tensor at a time; return their entries."""
    layout = {f"model.{name}": weight for name, weight in weights.items()}

    def read(name: str) -> torch.Tensor:
        source = hf_name(name.removeprefix("model."))
        values = found[source].float()
        if not values.isfinite().all():
            raise UsageError(
                f"{source} has values that are nan or infinite: they cannot be trained"
            )
        return values

    return write_full(work, layout, read)


def from_hf(folder: Path) -> ModelConfig:
    """Return the model that config.json describes. Raises UsageError, also for missing features."""
    file = folder / "config.json"
    try:
        return read_config(json.loads(file.read_bytes()))
    except KeyError as error:
        raise UsageError(f"{file}: it lacks {error}") from None
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{file}: {error}") from None


def read_config(hf: dict) -> ModelConfig:
    """Return the model of a config.json. Raises ValueError, or what from_hf catches if damaged."""
    rope = read_rope(hf)
    if feature := missing_feature(hf, rope):
        fork = "; the fork qwen3 in docs/forking.md has it" if hf["model_type"] == "qwen3" else ""
        raise ValueError(f"the model needs {feature}, which this decoder does not have{fork}")
    return ModelConfig(
        **read_sizes(hf),
        rope_theta=float(rope["rope_theta"]),
        tied=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_scaling=read_rope_scaling(rope),
    )


def read_sizes(hf: dict) -> dict[str, int]:
    """Read the sizes, within the limits of train.py's flags. Raises KeyError and ValueError."""
    sizes = {ours: hf[field] for ours, field in INTEGERS.items()}
    sizes["n_kv_head"] = hf.get("num_key_value_heads") or sizes["n_head"]
    for name, size in sizes.items():
        if type(size) is not int or not 1 <= size < 2**32:
            field = INTEGERS.get(name, "num_key_value_heads")
            raise ValueError(f"{field} is {size!r}, not an integer from 1 to {2**32 - 1:,}")
    common.parse_flags([f"--{name}={size}" for name, size in common.known_flags(sizes).items()])
    width, n_head, head_dim = sizes["d_model"], sizes["n_head"], hf.get("head_dim")
    if head_dim not in (None, width / n_head):
        raise ValueError(
            f"the model needs head_dim {head_dim!r}, but this decoder has only hidden_size {width} "
            f"/ num_attention_heads {n_head}"
        )
    return sizes


def read_rope(hf: dict) -> dict:
    """Return RoPE's fields: in rope_parameters from transformers 5 on, before in two places."""
    rope = {"rope_theta": hf.get("rope_theta", 10_000.0)}
    rope |= hf.get("rope_scaling") or {}
    rope |= hf.get("rope_parameters") or {}
    rope.setdefault("rope_type", rope.get("type", "default"))  # "type" until 2024
    return rope


def read_rope_scaling(rope: dict) -> RopeScaling | None:
    if rope["rope_type"] == "default":
        return None
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_seq_len=int(rope["original_max_position_embeddings"]),
    )


def missing_feature(hf: dict, rope: dict) -> str | None:
    """Return a feature of the model that the decoder lacks, or None. Raises KeyError, TypeError."""
    fields = hf | rope
    if hf["model_type"] == "llama":
        fields["sliding_window"] = None  # Llama ignores it
    fields.setdefault("sliding_window", 4096)  # Mistral's default
    for key, values in COMPUTED.items():
        if key in fields and fields[key] not in values:
            return f"{key} {fields[key]!r}"
    return None


def check_weights(folder: Path, found: dict, weights: dict) -> None:
    """Raise UsageError unless `found` has exactly the tensors of the model's weights, as floats."""
    expected = {hf_name(name): [*weight.shape] for name, weight in weights.items()}
    given = {}
    for name, tensor in found.items():
        if name.endswith("rotary_emb.inv_freq"):  # RoPE's frequencies, in old Llama files
            continue
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            dtype = checkpoint.DTYPE_NAMES[tensor.dtype]
            raise UsageError(f"{folder}: {name} is {dtype}: quantized weights cannot be read")
        given[name] = [*tensor.shape]
    for name in expected | given:
        if name not in given:
            problem = f"is missing; config.json describes it, with the shape {expected[name]}"
        elif name not in expected:
            problem = "is not a part of the model that config.json describes"
        elif given[name] != expected[name]:
            problem = f"has the shape {given[name]}; config.json describes {expected[name]}"
        else:
            continue
        raise UsageError(f"{folder}: {name} {problem}")


# --------------------------------------------------------------------------------------------------
# Tokenizers


# Characters of a byte-level vocabulary (like GPT-2's) and their bytes. A printable byte of Latin-1
# stands for itself; the other bytes have characters from U+0100 on.
PRINTABLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
ALPHABET = {chr(byte): byte for byte in PRINTABLE}
ALPHABET |= {chr(256 + i): byte for i, byte in enumerate(OTHERS)}


def write_tokenizer(encoding: tiktoken.Encoding, file: Path) -> None:
    """Write `bytes` or `gpt2` as a tokenizer.json: a byte-level BPE.

    tiktoken keeps a word that is a token. Otherwise it merges any two neighbouring tokens that form
    a token, lowest id first. The package tokenizers needs a list of these pairs.
    """
    character = {byte: letter for letter, byte in ALPHABET.items()}

    def word(token: bytes) -> str:
        return "".join(character[byte] for byte in token)

    ids = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    merges = []
    for token in sorted(ids, key=ids.get):
        for i in range(1, len(token)):
            if token[:i] in ids and token[i:] in ids:
                merges.append(f"{word(token[:i])} {word(token[i:])}")
    end = {"id": encoding.eot_token, "content": tokenizer.END_OF_TEXT, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    # Also splits text by GPT-2's pattern. That does not affect `bytes`, which merges nothing.
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    vocab = {word(token): i for token, i in ids.items()}
    spec = {
        "added_tokens": [end],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": True},
    }
    write_json(file, spec)


def tokenizer_config(config: ModelConfig, end: str) -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": config.seq_len,
        "clean_up_tokenization_spaces": False,
    }


def import_tokenizer(folder: Path, work: Path, vocab_size: int) -> tiktoken.Encoding | None:
    """Copy the tokenizer.json of a model folder to `work`, if tokenizer.py can read it.

    The built-in `bytes` needs no copy. The manifest refers to a tokenizer by its encoding's name.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        print(f"{folder} has no tokenizer.json")
        return None
    try:
        encoding = tokenizer.load_encoding(str(file))
    except tokenizer.TokenizerError as error:
        print(error)
        return None
    is_bytes = json.loads(file.read_bytes())["model"]["vocab"] == ALPHABET
    if is_bytes and (encoding.eot_token, encoding.n_vocab) == (256, 257):
        return tokenizer.load_encoding("bytes")
    if encoding.n_vocab > vocab_size:
        print(f"{file} has {encoding.n_vocab:,} tokens, the model {vocab_size:,}: it is left out")
        return None
    encoding.save(work)
    if encoding.adds_tokens:
        print(ADDS_TOKENS)
    return encoding


# --------------------------------------------------------------------------------------------------
# The command

CONVERT = {"export": export_model, "import": import_model}


def build_parser() -> errors.Parser:
    parser = errors.Parser(prog="tools.hf", description=__doc__)
    parser.add_argument("command", choices=CONVERT)
    parser.add_argument("source", type=Path, help="a run or a checkpoint; a model folder to import")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to create")
    return parser


def main(argv: list[str]) -> int:
    def command() -> None:
        args = build_parser().parse_args(argv)
        CONVERT[args.command](args.source, args.out)

    return errors.execute("tools.hf", command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
