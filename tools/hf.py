"""Models from and for Hugging Face: a checkpoint as a model folder of transformers, and back.

python -m tools.hf export runs/tiny OUT
python -m tools.hf import DIR OUT

The decoder is Hugging Face's Llama: RoPE pairs the same elements, so tensors map one to one. Both
commands execute nothing they read and do without transformers; weights need safetensors.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import tiktoken
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # as in checkpoint.py

import checkpoint
from model import ModelConfig, RopeScaling, Transformer
from runtime import cli
from runtime.cli import UsageError
from sample import Trained, describe
from text import tokenizer

SHARD_BYTES = 5_000_000_000  # of a file; transformers' own limit was the same for years

# Modules of the decoder and of Hugging Face's Llama
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
# Sizes of ModelConfig and of config.json
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


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = Transformer(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def require_safetensors():
    """The package safetensors. Raises UsageError."""
    try:
        import safetensors.torch
    except ImportError:
        raise UsageError("tools.hf needs safetensors: pip install safetensors") from None
    return safetensors


# --------------------------------------------------------------------------------------------------
# Export


def export_model(source: Path, out: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a checkpoint, or the newest of a run, as the new model folder `out`.

    Weights are float32. Holds `shard_bytes` of them at a time. Raises UsageError, CheckpointError
    and TokenizerError.
    """
    checkpoint.check_new(out)
    safetensors = require_safetensors()
    path = checkpoint.choose_checkpoint(source, "tools.hf")
    trained = describe(path)
    shapes = parameter_shapes(trained.config)
    size = sum(4 * shape.numel() for shape in shapes.values())
    encoding = tokenizer.load_encoding(trained.tokenizer) if trained.tokenizer else None
    config = to_hf(trained.config, encoding)
    with checkpoint.new_folder(out, size) as work:
        write_json(work / "config.json", config)
        write_json(work / "generation_config.json", generation_config(trained, encoding))
        if encoding:
            if trained.tokenizer.endswith(".json"):
                shutil.copyfile(trained.tokenizer, work / "tokenizer.json")
            else:
                write_json(work / "tokenizer.json", tokenizer_json(encoding))
            write_json(work / "tokenizer_config.json", tokenizer_config(trained.config, encoding))
        try:
            write_weights(safetensors, path, shapes, work, shard_bytes)
        except safetensors.SafetensorError as error:  # a full disk, for instance
            raise OSError(str(error)) from None
        for file in work.iterdir():
            checkpoint.sync(file)
        os.rename(work, out)
        checkpoint.sync(out.parent)
    print(f"{out}: {path} as a LlamaForCausalLM, {size / 1e6:,.1f} MB in float32")
    if encoding is None:
        print(f"{out} has no tokenizer: that of {path} is unknown")


def write_json(file: Path, contents: dict) -> None:
    file.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def shards(shapes: dict[str, torch.Size], shard_bytes: int) -> list[list[str]]:
    """The names of the tensors of each file: at most `shard_bytes`, or one tensor."""
    found: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = 4 * shape.numel()
        if size > room or not found:
            found.append([])
            room = shard_bytes
        found[-1].append(name)
        room -= size
    return found


def write_weights(
    safetensors, path: Path, shapes: dict[str, torch.Size], work: Path, shard_bytes: int
) -> None:
    """Write model.safetensors, or several files and their index."""
    parts = shards(shapes, shard_bytes)
    weight_map = {}
    for number, names in enumerate(parts, start=1):
        file = "model.safetensors"
        if len(parts) > 1:
            file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        weights = {name: torch.empty(shapes[name]) for name in names}
        checkpoint.load_state(path, {"model": weights})
        renamed = {hf_name(name): weight for name, weight in weights.items()}
        safetensors.torch.save_file(renamed, work / file, metadata={"format": "pt"})
        shutil.copymode(work / "config.json", work / file)  # it is for its owner only
        for name in renamed:
            weight_map[name] = file
    if len(parts) > 1:
        size = sum(4 * shape.numel() for shape in shapes.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        write_json(work / "model.safetensors.index.json", index)


def to_hf(config: ModelConfig, encoding: tiktoken.Encoding | None) -> dict:
    """The config.json of a model. transformers 4.43 and later read it. Raises UsageError."""
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
        **{theirs: getattr(config, ours) for ours, theirs in INTEGERS.items()},
        "num_key_value_heads": config.n_kv_head,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **special_ids(encoding),
    }
    # What is not mapped above, such as a field that a fork adds, is read back as its default.
    read_back = read_config(hf)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value != getattr(read_back, field.name):
            raise UsageError(f"a LlamaForCausalLM cannot have the model's {field.name} {value}")
    return hf


def special_ids(encoding: tiktoken.Encoding | None) -> dict:
    """End-of-text ends a document and begins one. Without the null, Llama's default ids apply."""
    end = encoding.eot_token if encoding else None
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def generation_config(trained: Trained, encoding: tiktoken.Encoding | None) -> dict:
    """Ids that only pad the head are never drawn, as in sample.py."""
    padding = list(range(trained.vocab_size, trained.config.vocab_size))
    return {**special_ids(encoding), "suppress_tokens": padding or None}


# --------------------------------------------------------------------------------------------------
# Import

# Where config.json has one of these fields, the values that the decoder computes
COMPUTED = {
    "model_type": ("llama", "mistral"),
    "hidden_act": ("silu",),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "rope_type": ("default", "llama3"),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None, {}),
}
# Other numbers that are read below, or do not change the logits. What a number that is not listed
# does, such as Granite's residual_multiplier, is unknown; 0 and 1 rarely do anything.
NUMBERS = {
    *INTEGERS.values(),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "sliding_window"),
    *("initializer_range", "attention_dropout", "pretraining_tp", "max_sequence_length"),
    *("max_length", "temperature", "top_k", "top_p", "repetition_penalty"),
}
DTYPES = ("F32", "F16", "BF16")


def import_model(source: Path, out: Path) -> None:
    """Write the model folder `source` as the new checkpoint `out`, for --init_from and sample.py.

    In the full format, in float32. Holds one tensor at a time. Raises UsageError and
    CheckpointError.
    """
    checkpoint.check_new(out)
    config = from_hf(source)
    files = weight_files(source)
    try:
        config.check_room(sum(file.stat().st_size for file in files))
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from None
    safetensors = require_safetensors()
    if config.tied and has_own_head(safetensors, files):
        print(f"{source} has a head of its own: it is not tied to the embedding")
        config = dataclasses.replace(config, tied=False)
    shapes = parameter_shapes(config)
    found = find_weights(safetensors, files, shapes)
    size = sum(4 * shape.numel() for shape in shapes.values())
    with checkpoint.new_folder(out, size) as work:
        copy_weights(safetensors, found, shapes, work / "full.pt")
        encoding = import_tokenizer(source, work, config.vocab_size)
        manifest = {
            "step": 0,
            "tokens": 0,
            "model": dataclasses.asdict(config),
            "tokenizer": encoding.name if encoding else None,
            "tokens_in_vocabulary": encoding.n_vocab if encoding else config.vocab_size,
            "files": {file.name: checkpoint.sync_and_checksum(file) for file in work.iterdir()},
            "torch": torch.__version__,
        }
        checkpoint.complete(work, out, manifest)
    print(f"{out}: {source}, {len(shapes)} tensors, {size / 1e6:,.1f} MB in float32")
    if encoding is None:
        print(f"{out} has no tokenizer: sample.py takes and prints token ids")


def copy_weights(
    safetensors, files: dict[str, Path], shapes: dict[str, torch.Size], full: Path
) -> None:
    """Write full.pt, one tensor at a time."""
    with FakeTensorMode():
        layout = {name: torch.empty(shape) for name, shape in shapes.items()}

    def read(name: str) -> torch.Tensor:  # of the layout, "model.embed.weight"
        name = name.removeprefix("model.")
        with open_weights(safetensors, files[name]) as opened:
            return opened.get_tensor(hf_name(name))

    for _ in checkpoint.write_full({"model": layout}, full, read):
        pass


def read_json(file: Path) -> dict:
    """Raises UsageError."""
    if not file.is_file():
        raise UsageError(f"there is no file {file}: name a model folder")
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not JSON: {error}") from None
    if not isinstance(contents, dict):
        raise UsageError(f"{file} is not a JSON object")
    return contents


def from_hf(folder: Path) -> ModelConfig:
    """The model that config.json describes. Raises UsageError, also for what the decoder lacks."""
    file = folder / "config.json"
    hf = read_json(file)
    try:
        return read_config(hf)
    except KeyError as error:
        raise UsageError(f"{file} lacks {error}") from None
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise UsageError(f"{file} is damaged: {error}") from None
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from None


def read_config(hf: dict) -> ModelConfig:
    """The model of a config.json. Raises ValueError, and for damage also what from_hf catches."""
    rope = read_rope(hf)
    if feature := missing_feature(hf, rope):
        raise ValueError(f"the model needs {feature}, which this decoder does not have")
    sizes = {ours: hf[theirs] for ours, theirs in INTEGERS.items()}
    return ModelConfig(
        **sizes,
        n_kv_head=hf.get("num_key_value_heads") or sizes["n_head"],
        rope_theta=float(rope["rope_theta"]),
        tied=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        rope_scaling=read_rope_scaling(rope),
    )


def read_rope(hf: dict) -> dict:
    """The fields of RoPE: transformers 5 has them in rope_parameters, older ones in two places."""
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
    """What a model needs and the decoder lacks; None if nothing. Raises KeyError and TypeError."""
    fields = hf | rope
    if hf["model_type"] == "llama":
        fields["sliding_window"] = None  # which Llama ignores
    fields.setdefault("sliding_window", 4096)  # Mistral's default
    for key, values in COMPUTED.items():
        if key in fields and fields[key] not in values:
            return f"{key} {fields[key]!r}"
    head_dim = hf.get("head_dim")
    if head_dim is not None and head_dim * hf["num_attention_heads"] != hf["hidden_size"]:
        return (
            f"head_dim {head_dim} (not hidden_size {hf['hidden_size']} / "
            f"num_attention_heads {hf['num_attention_heads']})"
        )
    for key, value in hf.items():
        is_known = key in NUMBERS or key.endswith("_token_id")
        if type(value) in (int, float) and value not in (0, 1) and not is_known:
            return f"{key} {value}"
    return None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises UsageError."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UsageError(f"{index} has no weight_map")
        names = sorted(map(str, set(weight_map.values())))
    for name in names:
        if Path(name).name != name:
            raise UsageError(f"{index} names {name}, outside the folder")
        if not (folder / name).is_file():
            raise UsageError(
                f"{folder} has no {name} (other formats than safetensors are not read)"
            )
    return [folder / name for name in names]


@contextlib.contextmanager
def open_weights(safetensors, file: Path) -> Iterator:
    """Open a safetensors file, which is mapped into memory. Raises CheckpointError for damage."""
    try:
        with safetensors.safe_open(file, framework="pt") as opened:
            yield opened
    except safetensors.SafetensorError as error:
        raise checkpoint.CheckpointError(f"cannot read {file}: {error}") from None


def find_weights(safetensors, files: list[Path], shapes: dict[str, torch.Size]) -> dict[str, Path]:
    """The file of each parameter. Raises UsageError unless the files hold exactly the model."""
    ours = {hf_name(name): name for name in shapes}
    found = {}
    for file in files:
        with open_weights(safetensors, file) as opened:
            for theirs in opened.keys():  # noqa: SIM118 (not a dict)
                if theirs in ours:
                    check_tensor(file, theirs, opened.get_slice(theirs), shapes[ours[theirs]])
                    found[ours[theirs]] = file
                elif not is_redundant(theirs):
                    raise UsageError(f"{file} holds {theirs}, which this decoder does not have")
    for name in shapes:
        if name not in found:
            raise UsageError(f"{files[0].parent} lacks the tensor {hf_name(name)}")
    return found


def has_own_head(safetensors, files: list[Path]) -> bool:
    """Whether the files hold a head that is not the embedding, which transformers does not tie."""
    found = {}
    for file in files:
        with open_weights(safetensors, file) as opened:
            for name in {hf_name("embed"), hf_name("head")}.intersection(opened.keys()):
                found[name] = opened.get_tensor(name)  # mapped, not read into memory
    if len(found) < 2:
        return False
    embedding, head = found.values()
    return embedding.dtype != head.dtype or not torch.equal(embedding, head)


def is_redundant(name: str) -> bool:
    """The head of a tied model is its embedding; old Llama files hold RoPE's frequencies."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")


def check_tensor(file: Path, name: str, tensor, shape: torch.Size) -> None:
    if tensor.get_shape() != list(shape):
        raise UsageError(
            f"{file}: {name} has the shape {tensor.get_shape()}, config.json gives {list(shape)}"
        )
    if tensor.get_dtype() not in DTYPES:
        raise UsageError(
            f"{file}: {name} is of dtype {tensor.get_dtype()}; {', '.join(DTYPES)} are read"
        )


# --------------------------------------------------------------------------------------------------
# Tokenizers


def tokenizer_json(encoding: tiktoken.Encoding) -> dict:
    """An encoding as a tokenizer.json of byte-level BPE, which gives the same tokens."""
    pattern = encoding._pat_str  # there is no public name for it
    split = {
        "type": "Split",
        "pattern": {"Regex": tokenizer.oniguruma_pattern(pattern)},
        "behavior": "Isolated",
        "invert": False,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens(encoding),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": byte_level_bpe(encoding),
    }


def special_tokens(encoding: tiktoken.Encoding) -> list[dict]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokens = []
    for text in sorted(encoding.special_tokens_set, key=encoding.encode_single_token):
        token = {"id": encoding.encode_single_token(text), "content": text}
        tokens.append(token | flags | {"special": True})
    return tokens


def byte_level_bpe(encoding: tiktoken.Encoding) -> dict:
    """The vocabulary, and the pairs that merge, lowest rank first.

    tiktoken merges any two parts whose union has a rank; tokenizers has a list of pairs. When it is
    a rank's turn, only one pair can be its parts: what lower ranks leave of its token.
    """
    letters = {byte: letter for letter, byte in tokenizer.ALPHABET.items()}

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    vocabulary = {}
    merges = []
    for token in sorted(ranks, key=ranks.get):
        vocabulary[written(token)] = ranks[token]
        parts = last_merge(token, ranks)
        if len(parts) == 2:  # more: no merge leads there, only a piece of text that is the token
            merges.append(f"{written(parts[0])} {written(parts[1])}")
    return {
        "type": "BPE",
        "ignore_merges": True,  # a piece of text that is a token is not merged, as in tiktoken
        "vocab": vocabulary,
        "merges": merges,
    }


def last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """Return the two tokens that tiktoken joins to `token`; more where its merges end before."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        best = None
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1])
            if rank is not None and (best is None or rank < ranks[parts[best] + parts[best + 1]]):
                best = i
        if best is None:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


def tokenizer_config(config: ModelConfig, encoding: tiktoken.Encoding) -> dict:
    names = encoding.special_tokens_set
    end = next(name for name in tokenizer.ENDS_OF_TEXT if name in names)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": config.seq_len,
        "clean_up_tokenization_spaces": False,
    }


def import_tokenizer(folder: Path, work: Path, vocab_size: int) -> tiktoken.Encoding | None:
    """Copy the tokenizer.json of a model folder to `work`, if tokenizer.py reads it.

    The built-in `bytes` needs no copy. An encoding's name is the tokenizer's in the manifest.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        print(f"{folder} has no tokenizer.json")
        return None
    built_in = tokenizer.load_encoding("bytes")
    if read_json(file) == tokenizer_json(built_in):
        return built_in
    try:
        encoding = tokenizer.load_encoding(str(file))
    except tokenizer.TokenizerError as error:
        print(error)
        return None
    if encoding.n_vocab > vocab_size:
        print(f"{file} has {encoding.n_vocab:,} tokens, the model {vocab_size:,}: it is left out")
        return None
    shutil.copyfile(file, work / file.name)
    return encoding


# --------------------------------------------------------------------------------------------------
# The command


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="tools.hf",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("export", help="write a checkpoint as a model folder")
    add.add_argument("source", metavar="RUN|CHECKPOINT", type=Path)
    add.add_argument("out", metavar="OUT", type=Path, help="the folder to create")
    add.set_defaults(convert=export_model)
    add = commands.add_parser("import", help="write a model folder as a checkpoint")
    add.add_argument("source", metavar="DIR", type=Path, help="config.json, model.safetensors")
    add.add_argument("out", metavar="OUT", type=Path, help="the checkpoint to create")
    add.set_defaults(convert=import_model)
    return parser


def convert(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    args.convert(args.source, args.out)


def main(argv: list[str]) -> int:
    return cli.run("tools.hf", lambda: convert(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
