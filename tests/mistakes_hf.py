"""Model folders of Hugging Face that tools.hf refuses; none has weights."""

import json
import math
import os
from pathlib import Path

from mistakes import Mistake

MISTAKES = {
    "tools.hf": [
        Mistake("export {other} {foreign}", "foreign exists: remove it or choose another name"),
        Mistake(
            "import {root}/nowhere {root}/new", "there is no file {root}/nowhere/config.json: na"
        ),
        Mistake("import {torn} {root}/new", "no file {torn}/config.json: name a model folder"),
        Mistake(
            "import {hf}/pipe {root}/new", "no file {hf}/pipe/config.json: name a model folder"
        ),
        Mistake("import {listed} {root}/new", "config.json is not a JSON object"),
        Mistake("import {foreign} {root}/new", "config.json: it lacks 'model_type'"),
        Mistake("import {hf}/not_json {root}/new", "config.json is not JSON: Expecting value"),
        Mistake(
            "import {hf}/qwen2 {root}/new",
            "{hf}/qwen2/config.json: the model needs model_type 'qwen2', which this decoder",
        ),
        Mistake(
            "import {hf}/head_dim {root}/new", "head_dim 64 (not hidden_size 32 / num_attention_h"
        ),
        Mistake(
            "import {hf}/attention_bias {root}/new", "needs attention_bias True, which this decod"
        ),
        Mistake(
            "import {hf}/mlp_bias {root}/new", "needs mlp_bias True, which this decoder does not"
        ),
        Mistake(
            "import {hf}/gelu {root}/new", "needs hidden_act 'gelu', which this decoder does not"
        ),
        Mistake(
            "import {hf}/window {root}/new", "needs sliding_window 4096, which this decoder does"
        ),
        Mistake(
            "import {hf}/no_window {root}/new", "needs sliding_window 4096, which this decoder"
        ),
        Mistake(
            "import {hf}/yarn {root}/new", "needs rope_type 'yarn', which this decoder does not"
        ),
        Mistake(
            "import {hf}/linear {root}/new", "needs rope_type 'linear', which this decoder does"
        ),
        Mistake(
            "import {hf}/partial {root}/new", "needs partial_rotary_factor 0.5, which this decoder"
        ),
        Mistake("import {hf}/outer_partial {root}/new", "needs partial_rotary_factor 0.25, which"),
        Mistake("import {hf}/granite {root}/new", "needs model_type 'granite', which this decod"),
        Mistake(
            "import {hf}/theta {root}/new", "config.json: rope_theta nan must be above 0, norm_"
        ),
        Mistake("import {hf}/eps {root}/new", "norm_eps -1e-05 at least 0, and both finite"),
        Mistake("import {hf}/power {root}/new", "config.json: int too large to convert to"),
        Mistake(
            "import {hf}/kv {root}/new", "n_kv_head -2 must be a whole number from 1 to 16,777,"
        ),
        Mistake(
            "import {hf}/positions {root}/new", "seq_len 1000000000000 must be a whole number fr"
        ),
        Mistake("import {hf}/deep {root}/new", "n_layer 1000000 must be a whole number from 1 to"),
        Mistake("import {hf}/quantized {root}/new", "needs quantization_config {{'quant_method': "),
        Mistake("import {hf}/no_rope_factor {root}/new", "config.json: it lacks 'factor'"),
        Mistake("import {hf}/text {root}/new", "d_model '32' must be a whole number from 1 to"),
        Mistake("import {hf}/odd {root}/new", "d_model 33 / n_head 4 must be a whole, even number"),
        Mistake("import {hf}/rope_list {root}/new", "config.json: 'int' object is not"),
        Mistake("import {hf}/good {root}/new", "good has no model.safetensors (other formats than"),
    ],
}


LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}


LLAMA3_ROPE = {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}


SPOILT_LLAMAS = {
    "qwen2": {"model_type": "qwen2"},
    "head_dim": {"head_dim": 64},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "gelu": {"hidden_act": "gelu"},
    "window": {"model_type": "mistral", "sliding_window": 4096},
    "no_window": {"model_type": "mistral"},  # which is Mistral's default
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "partial": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "outer_partial": {"partial_rotary_factor": 0.25},
    "granite": {"model_type": "granite", "residual_multiplier": 0.22},
    "theta": {"rope_theta": math.nan},
    "eps": {"rms_norm_eps": -1e-5},
    "power": {"rope_theta": 10**400},
    "kv": {"num_key_value_heads": -2},
    "positions": {"max_position_embeddings": 10**12},
    "deep": {"num_hidden_layers": 10**6},
    "quantized": {"quantization_config": {"quant_method": "gptq"}},
    "no_rope_factor": {"rope_scaling": LLAMA3_ROPE},
    "text": {"hidden_size": "32"},
    "odd": {"hidden_size": 33},
    "rope_list": {"rope_scaling": 5},
    "good": {},
}


def write_folders(root: Path) -> None:
    folder = root / "hf"
    for name, change in SPOILT_LLAMAS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(LLAMA | change))
    (folder / "not_json").mkdir()
    (folder / "not_json/config.json").write_text("model_type: llama")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe/config.json")
    (folder / "deep/model.safetensors").touch()
