"""Model folders of Hugging Face that tools.hf refuses; none has weights."""

import json
from pathlib import Path

from mistakes import Mistake

MISTAKES = {
    "tools.hf": [
        Mistake("export {other} {foreign}", "foreign exists: remove it or choose another name"),
        Mistake("import {root}/nowhere {root}/new", "there is no file {root}/nowhere/config.json:"),
        Mistake("import {listed} {root}/new", "config.json is not a JSON object"),
        Mistake("import {foreign} {root}/new", "config.json: it lacks 'model_type'"),
        Mistake("import {hf}/not_json {root}/new", "config.json is not JSON: Expecting value"),
        Mistake("import {hf}/qwen2 {root}/new", "{hf}/qwen2/config.json: the model needs model_ty"),
        Mistake("import {hf}/head_dim {root}/new", "head_dim 64 (not hidden_size 32 / num_attenti"),
        Mistake("import {hf}/window {root}/new", "needs sliding_window 4096, which this decoder d"),
        Mistake("import {hf}/yarn {root}/new", "needs rope_type 'yarn', which this decoder does n"),
        Mistake("import {hf}/partial {root}/new", "needs partial_rotary_factor 0.5, which this de"),
        Mistake("import {hf}/power {root}/new", "config.json: int too large to convert to"),
        Mistake("import {hf}/no_rope_factor {root}/new", "config.json: it lacks 'factor'"),
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
    "window": {"model_type": "mistral", "sliding_window": 4096},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "partial": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    "power": {"rope_theta": 10**400},
    "no_rope_factor": {"rope_scaling": LLAMA3_ROPE},
    "good": {},
}


def write_folders(root: Path) -> None:
    folder = root / "hf"
    for name, change in SPOILT_LLAMAS.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(LLAMA | change))
    (folder / "not_json").mkdir()
    (folder / "not_json/config.json").write_text("model_type: llama")
