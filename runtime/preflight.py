"""Find the checkpoint that a start uses, and refuse invalid starts before a model is built.

`find_origin` finds the checkpoint. `find_changes` compares the run recorded in it with the run of
this start. Later, train.check_ranks_agree compares the weights of the ranks.
"""

import dataclasses
import zlib
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import checkpoint
import dist
from config import (
    BUILTIN,
    DEFAULTS,
    MESH,
    PER_START,
    POLICIES,
    flag_value,
)
from data import TokenFolder
from errors import UsageError
from metrics import read_log
from model import ModelConfig
from runtime import run_folder

# --------------------------------------------------------------------------------------------------
# The checkpoint that a start uses


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a start uses, or none (`path` is None) for a new run."""

    path: Path | None = None
    manifest: dict = field(default_factory=dict)
    step: int = 0  # the steps done before this start
    only_weights: bool = False  # for a new run with --init_from, or for --eval_only
    model_config: ModelConfig | None = None
    kept_flags: dict = field(default_factory=dict)  # typed for the run that is continued
    kept_values: dict = field(default_factory=dict)  # values of its flags, typed or not
    damaged: dict[Path, str] = field(default_factory=dict)  # newer checkpoints and their problems
    first_start: datetime | None = None  # of the run in --out


NEW_RUN = Origin()


def recorded_flags(manifest: dict) -> dict:
    """Return the flags that were typed, from a manifest or a row of starts.jsonl.

    tools.hf writes manifests without flags.
    """
    return manifest.get("flags", {})


def recorded_values(manifest: dict) -> dict:
    """Return the values of the flags that a manifest or a row of starts.jsonl records."""
    return without_computed(manifest.get("config", {}))


def without_computed(values: dict) -> dict:
    """Leave out None and "auto", which stand for values computed later."""
    return {name: value for name, value in values.items() if value not in (None, "auto")}


def read_model(path: Path, manifest: dict) -> ModelConfig:
    """Return the model in the manifest of the checkpoint `path`. Raises UsageError."""
    if "model" not in manifest:
        raise UsageError(f"{path} is not a checkpoint of train.py: its manifest.json lacks 'model'")
    try:
        return ModelConfig.from_dict(manifest["model"])
    except ValueError as error:
        raise UsageError(f"{path} cannot be used: {error}") from None


def find_origin(flags: dict, world: dist.World) -> Origin:
    """Find the checkpoint that a start uses. All ranks call it and get the same result.

    Rank 0 chooses a checkpoint, and each rank verifies some of its files. If one is damaged, rank 0
    chooses the previous checkpoint. Raises UsageError, PathError and CheckpointError on all ranks.
    """
    damaged: dict[Path, str] = {}
    while True:
        origin = dist.on_rank0(read_origin, flags, damaged)
        if origin.path is None:
            return origin
        problems = dist.on_all_ranks(checkpoint.verify, origin.path, world.rank, world.size)
        if not any(problems):
            return origin
        damaged = origin.damaged | {origin.path: next(filter(None, problems))}


def read_origin(flags: dict, damaged: dict[Path, str]) -> Origin:
    """Read the manifest of the latest checkpoint that is not `damaged`. Does not verify its files.

    The checkpoints of --out take precedence over --init_from, so that the same command can be
    repeated, even if that folder was removed. Raises UsageError, PathError and CheckpointError.
    """
    out = Path(flags["out"])
    if flag_value(flags, "eval_only"):
        return read_named(flags, flags.get("init_from", out), damaged)
    saved = checkpoint.list_checkpoints(out)
    starts = run_folder.read_starts(out)
    check_folder(flags, saved, starts)
    first_start = datetime.fromisoformat(starts[0]["time"]) if starts else None
    if saved:
        origin = read_latest(flags, saved, damaged)
        return dataclasses.replace(origin, first_start=first_start)
    kept = {}
    if starts:  # the run stopped before its first checkpoint: repeat its last start
        begun = recorded_flags(starts[-1])
        if "init_from" in begun:
            flags = {"init_from": begun["init_from"]} | flags
        kept = flags_to_keep(flags, starts[-1], only_weights=False)
    named = flags.get("init_from")
    origin = read_named(flags, named, damaged) if named else NEW_RUN
    return dataclasses.replace(origin, first_start=first_start, **kept)


def read_named(flags: dict, named: Path | str, damaged: dict[Path, str]) -> Origin:
    """Read the manifest of the checkpoint `named`, or of the latest one of the run `named`.

    A start takes only its weights. Raises PathError and the errors of `read_latest`.
    """
    paths = run_folder.checkpoints_at(Path(named))[-1:]
    return read_latest(flags, paths, damaged, only_weights=True)


def read_latest(
    flags: dict, paths: list[Path], damaged: dict[Path, str], only_weights: bool = False
) -> Origin:
    """Read the manifest of the last of `paths` that is not `damaged` and can be read.

    Raises CheckpointError if there is none, and UsageError if its model cannot be used.
    """
    problems = dict(damaged)
    for path in reversed(paths):
        if path in problems:
            continue
        try:
            manifest = checkpoint.read_manifest(path)
        except checkpoint.CheckpointError as error:
            problems[path] = str(error)
            continue
        return Origin(
            path=path,
            manifest=manifest,
            step=0 if only_weights else manifest["step"],
            only_weights=only_weights,
            model_config=read_model(path, manifest),
            damaged=problems,
            **flags_to_keep(flags, manifest, only_weights),
        )
    listed = "; ".join(f"{path}: {problem}" for path, problem in problems.items())
    raise checkpoint.CheckpointError(
        f"no checkpoint to use: {listed}; restore one, or name another checkpoint"
    )


def flags_to_keep(flags: dict, manifest: dict, only_weights: bool) -> dict[str, dict]:
    """Return what a start takes from the checkpoint's run for flags that are not typed now."""
    typed = recorded_flags(manifest)
    values = recorded_values(manifest)
    evaluates = flag_value(flags, "eval_only")
    if only_weights and not evaluates:
        return {"kept_values": {"model": values["model"]} if "model" in values else {}}
    left_out = {name for name, policy in POLICIES.items() if policy == "not compared"}
    if evaluates or not flags.keys().isdisjoint(MESH):
        left_out |= {*MESH}
    kept_values = {name: values[name] for name in (DEFAULTS.keys() & values.keys()) - PER_START}
    if evaluates and "micro_batch_size" in values:  # it fitted in memory
        kept_values["micro_batch_size"] = values["micro_batch_size"]
    kept_flags = {name: typed[name] for name in (DEFAULTS.keys() & typed.keys()) - left_out}
    return {"kept_values": kept_values, "kept_flags": kept_flags}


def check_folder(flags: dict, saved: list[Path], starts: list[dict]) -> None:
    """Raise UsageError if a run would overwrite the contents of --out.

    `saved` contains its checkpoints, damaged or not, and `starts` the rows of its starts.jsonl.
    """
    out = Path(flags["out"])
    if saved:
        return
    rows = read_log(out / "metrics.jsonl")
    logged = [row["step"] for row in rows if row.get("event") == "checkpoint"]
    if logged:
        reason = f"its checkpoint of step {logged[-1]} is missing: restore it"
    elif not starts and (out / "config.json").exists():
        reason = "it contains files that train.py did not write: choose another --out"
    elif starts and rows and starts[-1]["config"].get("checkpoint") == "none":
        reason = "its run has --checkpoint none: choose another --out"
    else:
        return
    raise UsageError(f"cannot continue --out {out}: {reason}")


# --------------------------------------------------------------------------------------------------
# What has changed since the checkpoint


def find_changes(origin: Origin, manifest: dict) -> list[str]:
    """Return descriptions of the changes from the checkpoint's run to this start's `manifest`.

    Raises UsageError for changes that are never allowed, or not without --allow_changes (see
    config.flag), and for weights that do not fit.
    """
    if origin.only_weights:
        check_weights(origin, manifest["model"])
        return []
    policies = {f"--{name}": policy for name, policy in POLICIES.items()}
    # A flag that did not exist yet had its default.
    before = without_computed(DEFAULTS) | recorded_values(origin.manifest)
    now = manifest["config"]
    model = dataclasses.asdict(origin.model_config)
    recorded = properties(before, model, origin.manifest.get("data"))
    found = properties(now, manifest["model"], manifest["data"])
    changes = []
    refused = {}
    for name, old in recorded.items():
        new = found.get(name, "unknown to this code")
        policy = policies.get(name, "refused" if name.startswith("--") else "never")
        if new == old or policy == "not compared":
            continue
        change = f"{name} {old} -> {new}"
        if name == "the data's fingerprint":  # a hash: print the folders as well
            change += f" (--data {before.get('data')} -> {now['data']})"
        changes.append(change)
        if policy == "never" or (policy == "refused" and not now["allow_changes"]):
            refused[change] = policy
    if refused:
        remedy = "choose another --out, or give --allow_changes"
        if "never" in refused.values():
            remedy = (
                f"or start a new run with its weights: --init_from {origin.path} and another --out"
            )
        raise UsageError(
            f"cannot continue from {origin.path}: {', '.join(refused)}; change that back, {remedy}"
        )
    return changes


def properties(values: dict, model: dict, fingerprint: str | None) -> dict:
    """Return the properties that `find_changes` compares: flags, model and data."""
    flags = {f"--{name}": value for name, value in values.items() if name not in model}
    return flags | model | {"the data's fingerprint": fingerprint}


def check_weights(origin: Origin, model: dict) -> None:
    """Raise UsageError if the checkpoint's model differs from the run's, except in seq_len.

    The names and shapes of weights are checked when the weights are loaded.
    """
    for name, before in dataclasses.asdict(origin.model_config).items():
        value = model[name]
        if value != before and name != "seq_len":
            raise UsageError(
                f"{origin.path} has {name} {before}, and this run has {value}: "
                "its weights do not fit"
            )


# --------------------------------------------------------------------------------------------------
# The data


def find_other_tokenizer(origin: Origin, folder: TokenFolder, allow_changes: bool) -> list[str]:
    """Return a line if the weights know other tokens than those of the data.

    A tokenizer is identified by its name, and by the checksum of its file. Raises UsageError unless
    `allow_changes`.
    """
    if "tokenizer" not in origin.manifest:  # other programs than train.py may call save_state
        return []
    name = origin.manifest["tokenizer"]
    file = origin.manifest["files"].get(name, {})
    before = describe_tokenizer(name, file.get("crc32"))
    crc32 = None
    for contents in folder.tokenizer_file.values():
        crc32 = f"{zlib.crc32(contents):08x}"
    now = describe_tokenizer(folder.tokenizer_name, crc32)
    if now == before:
        return []
    if not allow_changes:
        raise UsageError(
            f"{origin.path} knows the tokens of another tokenizer: {before}, but those of "
            f"{folder.path} are of {now}; prepare the data with the tokenizer of the weights, or "
            "give --allow_changes to train a new vocabulary"
        )
    return [f"the tokenizer {before} -> {now}"]


def describe_tokenizer(name: str | None, crc32: str | None) -> str:
    if name is None:
        return "an unknown tokenizer"
    return f"{name} (crc32 {crc32})" if crc32 else name


def check_tokenizer(folder: TokenFolder) -> None:
    """Load the tokenizer file of a token folder. Raises TokenizerError."""
    from text import tokenizer  # most token folders have no such file

    tokenizer.find_in_folder(folder.path.absolute(), folder.tokenizer_name, folder.vocab_size)


def prepare_builtin() -> None:
    """Prepare the built-in data unless it exists."""
    if not Path(BUILTIN).exists():
        import prepare  # other data needs neither this file nor those of text/

        prepare.prepare(None, Path(BUILTIN))
