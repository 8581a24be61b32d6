"""Convert a checkpoint to a model folder for Hugging Face transformers, and back.

python -m tools.hf export runs/tiny OUT
python -m tools.hf import DIR OUT
python -m tools.hf consolidate runs/tiny OUT

An import is a checkpoint for --init_from and sample.py, and so is a consolidated checkpoint, which
has one file instead of one for each rank. What an import came with, such as a chat template, is in
its base.json, which training copies and an export restores. The decoder is Hugging Face's Llama:
RoPE pairs the same elements, so tensors map one to one. No command executes code from the files
that it reads.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import errors
import tokenizer
from errors import UsageError
from model import ModelConfig, RopeScaling, meta_model
from sample import Trained, newest_checkpoint, read_trained
from start import checkpoints_at
from tokenizer import Encoding

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
# Field of ModelConfig -> field of config.json
FIELDS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "seq_len": "max_position_embeddings",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
# The fields of ModelConfig that an export keeps. A fork adds those that it maps in to_hf, and those
# that act only in training.
KEPT = {
    *FIELDS,
    "rope_theta",
    "rope_scaling",
}
# Field of RopeScaling -> field of rope_scaling
ROPE_FIELDS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_seq_len": "original_max_position_embeddings",
}
# What base.json keeps of a model folder: ids of config.json, and files
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
KEPT_FILES = ("generation_config.json", *tokenizer.SETTINGS, "chat_template.jinja")
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
    "quantization_config": (None,),
}


def read_full(reader: checkpoint.Reader, name: str) -> Tensor:
    """Return a full tensor of a checkpoint. Raises CheckpointError."""
    full = torch.empty_like(reader.tensors[name].full, device="cpu")
    reader.fill(name, full)
    return full


def hf_name(name: str) -> str:
    """blocks.0.attention.q.weight -> model.layers.0.self_attn.q_proj.weight"""
    module = name.removesuffix(".weight")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.weight"
    _, layer, part = module.split(".", 2)
    return f"model.layers.{layer}.{IN_BLOCK[part]}.weight"


def meta_weights(config: ModelConfig) -> dict[str, Tensor]:
    """Return the names and shapes of the model's weights, as meta tensors without values."""
    return dict(meta_model(config).named_parameters())


# --------------------------------------------------------------------------------------------------
# Export


def export_model(named: Path, out: Path) -> None:
    """Write a checkpoint, or the latest of a run, as the new model folder `out`, in float32.

    Reads one tensor at a time. Raises UsageError and CheckpointError.
    """
    path = newest_checkpoint(named)
    trained = read_trained(path)
    encoding = tokenizer.load_encoding(trained.tokenizer) if trained.tokenizer else None
    files = small_files(path, trained, encoding)
    seq_len = files["config.json"]["max_position_embeddings"]
    config = dataclasses.replace(trained.config, seq_len=seq_len)
    files["config.json"] = to_hf(config) | files["config.json"]
    reader = checkpoint.Reader(path)
    weights = meta_weights(config)
    layout = {hf_name(name): weight for name, weight in weights.items()}
    ours = {hf_name(name): f"model.{name}" for name in weights}
    with new_folder(out) as work:
        for name, contents in files.items():
            write_file(work / name, contents)
        if isinstance(encoding, tokenizer.JsonEncoding):
            (work / "tokenizer.json").write_bytes(encoding.contents)
        elif encoding:
            convert_tokenizer(encoding).save(str(work / "tokenizer.json"))
        checkpoint.write_safetensors(
            work / "model.safetensors", layout, lambda name: read_full(reader, ours[name]).float()
        )
        os.rename(work, out)
    print(f"{out}: {path} in float32, for transformers, with a context of {seq_len:,} tokens")
    if encoding is None:
        print(f"{out} has no tokenizer, because {path} has none")


def write_file(file: Path, contents: dict | str) -> None:
    text = contents if isinstance(contents, str) else json.dumps(contents, indent=2) + "\n"
    file.write_text(text, encoding="utf-8")


def small_files(path: Path, trained: Trained, encoding: Encoding | None) -> dict[str, dict | str]:
    """Return the files beside the weights of an export: those of base.json, if they still apply.

    Of config.json, it has what does not follow from the model's shape.
    """
    base = json.loads((path / "base.json").read_bytes()) if (path / "base.json").exists() else {}
    end = encoding.eot_token if encoding else None  # without null, Llama's ids would apply
    files = {"config.json": dict.fromkeys(SPECIAL_IDS, end)}
    if encoding:
        names = dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.end_name(encoding))
        files[tokenizer.CONFIG] = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    if base.get("tokenizer") == tokenizer.fingerprint(encoding):
        files |= base.get("files", {})
    elif "files" in base:
        print("the run's tokenizer is not that of its model, whose other files are left out")
    # As in sample.py, never draw ids that only pad the head.
    padding = range(trained.vocab_size, trained.config.vocab_size)
    generation = files.get("generation_config.json", files["config.json"])
    suppressed = sorted({*(generation.get("suppress_tokens") or ()), *padding})
    files["generation_config.json"] = generation | {"suppress_tokens": suppressed or None}
    if encoding:
        files = {name: with_end(name, contents, encoding) for name, contents in files.items()}
    context = max(longest_context(path), base.get("max_position_embeddings", 0))
    files["config.json"] = files["config.json"] | {"max_position_embeddings": context}
    return files


def longest_context(path: Path) -> int:
    """Return the longest context of a checkpoint's model and of those that it was trained from."""
    manifest = checkpoint.read_manifest(path)
    seq_len = manifest["model"]["seq_len"]
    named = manifest.get("config", {}).get("init_from")
    try:
        origins = checkpoints_at(Path(named)) if named else []
    except UsageError:  # it is gone
        origins = []
    return max([seq_len, *map(longest_context, origins[-1:])])


def with_end(name: str, contents: dict | str, encoding: Encoding) -> dict | str:
    """Return the contents of a file, with the end of the run's texts among its ends."""
    changed = contents
    if name in tokenizer.SETTINGS and tokenizer.named_end(contents) != tokenizer.end_name(encoding):
        changed = contents | {"eos_token": tokenizer.end_name(encoding)}
    if name in ("config.json", "generation_config.json"):
        ids = contents.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if encoding.eot_token not in ids:
            others = [token for token in ids if token is not None]
            changed = contents | {"eos_token_id": [encoding.eot_token, *others]}
    if changed is not contents:
        print(f"{name}: the run's texts end in {tokenizer.end_name(encoding)}, which is now an end")
    return changed


def to_hf(config: ModelConfig) -> dict:
    """Return the config.json of a model, for any version of transformers. Raises UsageError."""
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{field: getattr(config, ours) for ours, field in FIELDS.items()},
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "hidden_act": ACTIVATION,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }
    if scaling := config.rope_scaling:
        fields = {field: getattr(scaling, ours) for ours, field in ROPE_FIELDS.items()}
        hf["rope_scaling"] = {"rope_type": "llama3", **fields}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in KEPT and value != field.default:
            raise UsageError(f"a LlamaForCausalLM cannot have the model's {field.name} {value}")
    return hf


def convert_tokenizer(encoding: Encoding):
    """Return `bytes` or `gpt2` as a tokenizers.Tokenizer, which gives the same ids."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        def load_tiktoken_bpe(self, file: None) -> dict[bytes, int]:
            tokens = encoding.token_byte_values()
            return {token: encoding.encode_single_token(token) for token in tokens}

    return Converter(
        pattern=encoding._pat_str, extra_special_tokens=[tokenizer.END_OF_TEXT]
    ).converted()


# --------------------------------------------------------------------------------------------------
# Import


def import_model(folder: Path, out: Path) -> None:
    """Write a model folder as the new checkpoint `out`, in the dtypes of its weights.

    Reads one tensor at a time. Raises UsageError.
    """
    config = read_config(folder / "config.json")
    found = open_weights(folder)
    if config.tied and (head := found.get("lm_head.weight")) is not None:
        if torch.equal(head, found.get("model.embed_tokens.weight", head).to(head.dtype)):
            del found["lm_head.weight"]
        else:
            config = dataclasses.replace(config, tied=False)
    check_weights(folder, found, config)
    tensors = {f"model.{name}": found[hf_name(name)] for name in meta_weights(config)}
    with new_folder(out) as work:
        encoding = import_tokenizer(folder, work)
        manifest = {
            "step": 0,
            "tokens": 0,
            "model": dataclasses.asdict(config),
            "tokenizer": encoding.name if encoding else None,
            "tokens_in_vocabulary": encoding.n_vocab if encoding else config.vocab_size,
        }
        base = {"max_position_embeddings": config.seq_len, "files": read_small_files(folder)}
        write_file(work / "base.json", base | {"tokenizer": tokenizer.fingerprint(encoding)})
        write_checkpoint(work, out, tensors, tensors.get, manifest)
    print(f"{out}: {folder}, {len(tensors)} tensors")
    if encoding is None:
        print(f"{out} has no tokenizer: sample.py reads and prints token ids")


def read_config(file: Path) -> ModelConfig:
    """Return the model of a config.json. Raises UsageError if the decoder cannot compute it."""
    import transformers

    try:
        hf = transformers.AutoConfig.for_model(**json.loads(file.read_bytes()))  # with all defaults
        values = hf.to_dict() | hf.rope_parameters
    except Exception as error:  # a damaged file can raise almost any
        raise UsageError(f"{file}: {' '.join(str(error).split())}") from None
    for field, computed in COMPUTED.items():
        if field in values and values[field] not in computed:
            raise UsageError(f"{file}: this decoder does not have {field} {values[field]!r}")
    if hf.head_dim * hf.num_attention_heads != hf.hidden_size:
        raise UsageError(f"{file}: this decoder does not have head_dim {hf.head_dim}")
    scaling = None
    if values["rope_type"] == "llama3":
        scaling = RopeScaling(**{ours: values[field] for ours, field in ROPE_FIELDS.items()})
    sizes = {ours: values[field] for ours, field in FIELDS.items()}
    return ModelConfig(**sizes, rope_theta=values["rope_theta"], rope_scaling=scaling)


def read_small_files(folder: Path) -> dict[str, dict | str]:
    """Return the special ids of config.json, and KEPT_FILES. Raises UsageError."""
    found = {}
    for file in [folder / name for name in ("config.json", *KEPT_FILES)]:
        if file.exists():
            text = file.read_text(encoding="utf-8")
            found[file.name] = read_object(file) if file.suffix == ".json" else text
    config = found["config.json"]
    return found | {"config.json": {name: config[name] for name in SPECIAL_IDS if name in config}}


def read_object(file: Path) -> dict:
    try:
        return dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"{file}: {error}") from None


def open_weights(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a model folder, mapped into memory. Raises UsageError."""
    import safetensors

    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists() and whole.exists():
        raise UsageError(f"{folder} has {index.name} and {whole.name}: remove one of them")
    found = {}
    try:
        file_of = json.loads(index.read_bytes())["weight_map"] if index.exists() else None
        for name in sorted({*file_of.values()} if file_of else {whole.name}):
            with safetensors.safe_open(folder / name, "pt") as file:
                for key in file.keys():  # noqa: SIM118, it is no dict
                    if not file_of or file_of.get(key) == name:
                        found[key] = file.get_tensor(key)
    except Exception as error:  # a damaged file can raise almost any
        raise UsageError(f"{folder}: {error or repr(error)}") from None
    # Old files of Llama have RoPE's frequencies.
    return {name: found[name] for name in found if not name.endswith("rotary_emb.inv_freq")}


def check_weights(folder: Path, found: dict[str, Tensor], config: ModelConfig) -> None:
    """Raise UsageError unless the tensors are the model's weights, as floats."""
    expected = {hf_name(name): [*weight.shape] for name, weight in meta_weights(config).items()}
    given = {name: [*tensor.shape] for name, tensor in found.items()}
    for name in expected | given:
        if given.get(name) != expected.get(name):
            shapes = f"{given.get(name, 'missing')}, by config.json {expected.get(name, 'missing')}"
            raise UsageError(f"{folder}: the shape of {name} is {shapes}")
        if found[name].dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(f"{folder}: {name} is {found[name].dtype}, not a float")


def import_tokenizer(folder: Path, work: Path) -> Encoding | None:
    """Copy the tokenizer of a model folder to `work`, if tokenizer.py can read it."""
    try:
        encoding = tokenizer.load_encoding(str(folder / "tokenizer.json"))
    except UsageError as error:
        print(error)
        return None
    encoding.save(work)
    return encoding


# --------------------------------------------------------------------------------------------------
# A checkpoint in one file


def consolidate(named: Path, out: Path) -> None:
    """Write a checkpoint, or the latest of a run, as the new checkpoint `out`, as one rank would.

    Reads one tensor at a time. Raises UsageError, and CheckpointError for a damaged file.
    """
    path = newest_checkpoint(named)  # after verifying it
    manifest = checkpoint.read_manifest(path)
    reader = checkpoint.Reader(path)
    layout = {name: saved.full for name, saved in reader.tensors.items()}
    with new_folder(out) as work:
        for name in manifest["files"]:
            if not name.endswith((".safetensors", "index.json")):  # of the tokenizer
                shutil.copyfile(path / name, work / name)
        write_checkpoint(work, out, layout, functools.partial(read_full, reader), manifest)
    print(f"{out}: {path} in one file; all {len(manifest['files'])} checksums were right")


def write_checkpoint(
    work: Path, out: Path, layout: dict[str, Tensor], read: Callable[[str], Tensor], manifest: dict
) -> None:
    """Turn the folder `work`, which has the files of the tokenizer, into the checkpoint `out`.

    read(name) returns the values of a tensor of the layout.
    """
    files = {}
    for file in work.iterdir():
        files[file.name] = checkpoint.write_file(file, [file.read_bytes()])
    boxes = {}
    for tensor in layout.values():
        boxes[checkpoint.cut_of(tensor)] = (0,) * tensor.dim(), tuple(tensor.shape)
    index = json.dumps(checkpoint.index_of(layout, [boxes])).encode()
    files["index.json"] = checkpoint.write_file(work / "index.json", [index])
    name = checkpoint.file_of(rank=0)
    files[name] = checkpoint.write_safetensors(work / name, layout, read)
    checkpoint.complete(work, out, manifest | {"files": files})


# --------------------------------------------------------------------------------------------------
# The command


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `out`. The block fills it and renames it to `out`.

    If the block fails, removes it. Raises UsageError if `out` exists.
    """
    if out.exists():
        raise UsageError(f"{out} exists: remove it or choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        work = Path(folder, out.name)
        work.mkdir()
        yield work


COMMANDS = {"export": export_model, "import": import_model, "consolidate": consolidate}


def command(argv: list[str]) -> None:
    parser = errors.Parser(prog="tools.hf", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("source", type=Path, help="a run or a checkpoint; a model folder to import")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to create")
    args = parser.parse_args(argv)
    COMMANDS[args.command](args.source, args.out)


def main(argv: list[str]) -> int:
    return errors.execute("tools.hf", command, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
