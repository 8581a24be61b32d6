"""What several commands of tools/ share: the origin that flags name, and reading a log."""

import math
from pathlib import Path

import checkpoint
from log import read_rows
from model import ModelConfig
from start import Origin, checkpoints_at


def named_origin(flags: dict) -> Origin:
    """Return the origin with the weights that --init_from names, or a new run without this flag."""
    named = flags.get("init_from")
    if not named:
        return Origin()
    path = checkpoints_at(Path(named))[-1]
    manifest = checkpoint.read_manifest(path)
    model_config = ModelConfig.from_dict(manifest["model"])
    return Origin(path, manifest, only_weights=True, model_config=model_config)


def read_log(file: Path) -> tuple[list[dict], list[dict]]:
    """Return the rows of the starts in a file of a run's log, and its other rows that count.

    A start makes the rows of later steps void. Values are nan for null, which stands for any value
    that is not finite.
    """
    starts, rows = [], []
    for row in read_rows(file):
        if row.get("event") == "start":
            starts.append(row)
            rows = [earlier for earlier in rows if earlier["step"] <= row["step"]]
        else:
            rows.append({name: math.nan if row[name] is None else row[name] for name in row})
    return starts, rows


def relative_difference(a: float, b: float) -> float:
    """Return |a - b| relative to the larger one; inf if only one is nan."""
    if math.isnan(a) or math.isnan(b):
        return 0.0 if math.isnan(a) and math.isnan(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0
