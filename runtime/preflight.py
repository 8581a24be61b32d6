"""Everything that can refuse a run before its first step.

`check` needs no weights and no other rank: flags, data, run folder, what the run continues from and
which flags may change. `agree` needs the ranks: whether they form one run.
"""

import contextlib
import dataclasses
import re
import socket
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

import checkpoint
import data
import dist
import layout
import metrics
import prepare
from config import BUILTIN, Config, check_min_lr, fill_sizes, model_config, read_model, resolve
from metrics import read_log
from model import ModelConfig, Transformer
from optim import learning_rate
from runtime import memory, run_folder
from runtime.cli import UsageError
from text import tokenizer

# --------------------------------------------------------------------------------------------------
# What needs no weights


@dataclass(frozen=True)
class Start:
    """Where a run begins: after `step`, with the state of `checkpoint`, or new after step 0."""

    config: Config  # with the values that the run or its model has for flags not given
    model: ModelConfig
    manifest: dict  # goes into every checkpoint
    device_memory: int  # bytes that a rank may fill
    step: int = 0
    checkpoint: Path | None = None
    init_from: Path | None = None  # weights for a new run, or for --eval_only
    new_parameters: list[str] = field(default_factory=list)  # which init_from lacks
    changes: list[str] = field(default_factory=list)  # changed flags, as "--NAME OLD -> NEW"
    passed_over: list[str] = field(default_factory=list)  # newer checkpoints and their problems
    warnings: list[str] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return not self.config.eval_only and self.step >= self.config.max_steps


def check(flags: Config, world: dist.World, latest: Path | None, passed_over: list[str]) -> Start:
    """Check what needs no weights, on rank 0; find where the run begins and with what model.

    `latest` is the latest valid checkpoint of --out, `passed_over` has the problems of newer ones.
    Writes only the built-in data. Raises UsageError, CheckpointError, DataError, TokenizerError and
    TrackerError.
    """
    metrics.check_tracker(flags.tracker)
    origin = find_origin(flags)
    c = settle(flags, origin)
    if c.data == BUILTIN:
        prepare_builtin()
    folders = data.open_folders(c.data)
    first = folders[0]  # for what all share: vocabulary and tokenizer
    if first.tokenizer_file:  # a built-in tokenizer has none, and may need the network
        tokenizer.find(first.path.absolute(), first.tokenizer_name, first.vocab_size)
    model = model_config(c, first.vocab_size, origin.model)
    manifest = {
        "config": dataclasses.asdict(c),
        "model": dataclasses.asdict(model),
        "dtype": str(layout.compute_dtype(c.dtype, world.device)).removeprefix("torch."),
        "data": ", ".join(folder.fingerprint for folder in folders),
        "tokenizer": first.tokenizer_name,
        "tokens_in_vocabulary": first.vocab_size,
    }
    device_memory = memory.device_memory(world.device, world.local_size)
    start = Start(c, model, manifest, device_memory)
    if c.eval_only:
        return start_evaluation(start, origin)
    return start_training(start, origin, latest, passed_over)


def prepare_builtin() -> None:
    if not Path(BUILTIN).exists():
        prepare.prepare(None, Path(BUILTIN))


def warn_of_short_memory(c: Config, setup: layout.Setup, world: dist.World) -> None:
    """Warn if this host lacks memory for its CPU ranks, before they build their models."""
    if world.local_rank > 0:
        return
    need = layout.estimate_memory(c, setup).total
    available = memory.available_memory()
    if world.local_size * need > available:
        print(
            f"train.py: warning: on {socket.gethostname()} this run needs at least "
            f"{world.local_size * need / 1e9:,.1f} GB more ({world.local_size} x {need / 1e9:,.1f} "
            f"a rank), and {available / 1e9:,.1f} GB are available: lower --micro_batch_size, "
            "shard with --strategy fsdp, or start fewer ranks on a host",
            file=sys.stderr,
            flush=True,
        )


# --------------------------------------------------------------------------------------------------
# What a start takes over


@dataclass(frozen=True)
class Origin:
    """What a start takes over from a checkpoint or from the starts before it in its run folder."""

    path: Path | None = None  # the checkpoint that --init_from or --resume stands for, if needed
    manifest: dict = field(default_factory=dict)  # of that, or of the latest in --out
    model: ModelConfig | None = None  # of --init_from or --resume; flags override its parts
    flags: dict = field(default_factory=dict)  # of the run so far: those that hold until given


def find_origin(config: Config) -> Origin:
    """Read what `settle` and `resume_point` need. Raises UsageError and CheckpointError.

    Once --out has a checkpoint, the model is that one's, and what --init_from or --resume named may
    be gone.
    """
    out = Path(config.out)
    starts = run_folder.read_starts(out)
    manifest = None if config.eval_only else latest_manifest(out)
    path = None
    if manifest is None and (config.source or config.eval_only):
        path = find_source(config)
        manifest = checkpoint.read_manifest(path)
    if manifest is None:
        return Origin(flags=starts[-1]["config"] if starts else {})
    model = None
    if config.source or config.eval_only:
        size = checkpoint.total_bytes(manifest)
        model = read_model(path or checkpoint.list_checkpoints(out)[-1], manifest, size)
    flags = manifest.get("config") or {}
    if path is None and starts:
        flags = starts[-1]["config"]
    elif config.init_from and not config.eval_only:
        flags = {}  # a new run
    return Origin(path, manifest, model, flags)


def latest_manifest(out: Path) -> dict | None:
    """The newest manifest of a run that can be read: of its model any tells as much."""
    for path in reversed(checkpoint.list_checkpoints(out)):
        with contextlib.suppress(checkpoint.CheckpointError):
            return checkpoint.read_manifest(path)
    return None


def find_source(config: Config) -> Path:
    """The checkpoint that --init_from or --resume stands for, of a run its latest that verifies.

    With --eval_only its latest, by default of --out. Raises UsageError and CheckpointError.
    """
    if config.eval_only:
        return run_folder.checkpoints_at(Path(config.source or config.out))[-1]
    try:
        return run_folder.choose_checkpoint(Path(config.source), "train.py")
    except checkpoint.PathError as error:
        flag = "--init_from" if config.init_from else "--resume"
        raise UsageError(f"{flag}: {error}") from None


def settle(config: Config, origin: Origin) -> Config:
    """Fill in the flags whose values are the run's or its model's. Raises UsageError."""
    values = {}
    for f in dataclasses.fields(Config):
        if f.metadata["new_run"] is not None and getattr(config, f.name) is None:
            so_far = origin.flags.get(f.name)
            values[f.name] = f.metadata["new_run"] if so_far is None else so_far
    if config.eval_only:
        values |= to_evaluate(config, origin)
    if origin.model:
        config = fill_sizes(config, origin.model)
        # The rest of the model is the named size's, if any: --config RUN/config.json needs both.
        values["model"] = (origin.manifest.get("config") or {}).get("model", config.model)
    config = dataclasses.replace(config, **values)
    if not config.eval_only:
        check_min_lr(config)
    return config


def to_evaluate(config: Config, origin: Origin) -> dict:
    """Flags of --eval_only: the checkpoint, and by default its data, its dtype and batches."""
    saved = origin.manifest
    values = {"init_from": str(origin.path), "resume": "auto"}
    values["data"] = config.data or (saved.get("config") or {}).get("data") or BUILTIN
    if config.dtype == "auto":  # the manifest has what it was beside the config
        values["dtype"] = saved.get("dtype", "auto")
    values["micro_batch_size"] = config.micro_batch_size or saved.get("micro_batch_size")
    return values


# --------------------------------------------------------------------------------------------------
# Where a run begins


def resume_key(path: Path, manifest: dict) -> dict:
    """What must not change within a run: model, optimizer, the data and its order."""
    try:
        return {
            **dataclasses.asdict(read_model(path, manifest)),
            "data": manifest["data"],
            "global_batch_size": manifest["config"]["global_batch_size"],
            "seed": manifest["config"]["seed"],
            "optimizer": manifest["config"].get("optimizer", Config.optimizer),
        }
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a checkpoint of train.py: its manifest.json lacks {error}"
        ) from None


def start_training(
    start: Start, origin: Origin, latest: Path | None, passed_over: list[str]
) -> Start:
    """Find where the run begins. Raises UsageError if it may not, CheckpointError for damage.

    `latest`, the latest valid checkpoint of --out, takes precedence over --resume PATH, so that the
    same command can be repeated.
    """
    c, manifest = start.config, start.manifest
    out = Path(c.out)
    if c.resume == "never" and any(path.name != "lock" for path in out.glob("*")):
        raise UsageError(
            f"--out {out} is not empty, and --resume never would overwrite it: choose another --out"
        )
    if c.init_from:
        check_is_new(Path(c.init_from), out)
    if latest is None:
        check_nothing_is_lost(out, passed_over)
    elif c.continues:
        check_named(Path(c.continues), latest, out)
    resume_from = latest or (origin.path if c.continues else None)
    if resume_from is None:
        step = steps_without_checkpoint(c, manifest)
        if origin.path and step == 0:
            return start_with_weights(start, origin)
        return dataclasses.replace(start, step=step)
    saved = checkpoint.read_manifest(resume_from)
    step = saved["step"]
    check_same_run(resume_from, saved, manifest)
    # A new folder must have steps left to train.
    if step > c.max_steps or (latest is None and step == c.max_steps):
        raise UsageError(
            f"{resume_from} is at step {step}, and --max_steps {c.max_steps} leaves nothing "
            "to train: raise --max_steps or choose another --out"
        )
    changes = check_changes(saved, manifest, step)
    return dataclasses.replace(
        start, step=step, checkpoint=resume_from, changes=changes, passed_over=passed_over
    )


def start_with_weights(start: Start, origin: Origin) -> Start:
    """Begin a new run with the weights of a checkpoint. Raises UsageError and CheckpointError."""
    new = check_init(origin, start.manifest)
    warnings = [warning] if (warning := other_tokenizer(origin, start.manifest)) else []
    return dataclasses.replace(start, init_from=origin.path, new_parameters=new, warnings=warnings)


def start_evaluation(start: Start, origin: Origin) -> Start:
    """The weights that --eval_only evaluates. Raises UsageError and CheckpointError."""
    if problem := checkpoint.verify(origin.path):
        raise checkpoint.CheckpointError(f"{origin.path}: {problem}")
    start = start_with_weights(start, origin)
    if start.new_parameters:
        raise UsageError(
            f"{origin.path} lacks {in_short(start.new_parameters)}: evaluate it with the code and "
            "flags that trained it"
        )
    return start


def check_is_new(init_from: Path, out: Path) -> None:
    """Refuse to begin a run in the run folder that --init_from names."""
    is_run = not (init_from / "manifest.json").is_file()
    if is_run and init_from.resolve() == out.resolve():
        raise UsageError(f"--init_from {init_from} is the run in --out {out}: choose another --out")


def check_nothing_is_lost(out: Path, passed_over: list[str]) -> None:
    """Refuse to begin at step 1 in a folder whose checkpoints are all damaged or gone."""
    for path in sorted(out.glob("checkpoints/step-*")):
        if path.name.removeprefix("step-").isdecimal():
            reason = passed_over[0] if passed_over else f"{path}: manifest.json is missing"
            raise checkpoint.CheckpointError(
                f"--out {out} has checkpoints, but none is valid ({reason}): restore one, or start "
                "over in another --out"
            )
    saved = [row for row in read_log(out / "metrics.jsonl") if row.get("event") == "checkpoint"]
    if saved:
        raise checkpoint.CheckpointError(
            f"--out {out} saved step {saved[-1].get('step')}, according to its metrics.jsonl, but "
            "has no checkpoint now: restore its checkpoints/, or start over in another --out"
        )


def check_named(named: Path, latest: Path, out: Path) -> None:
    """Check the checkpoint of --resume PATH against the latest one of --out. Raises UsageError."""
    is_of_this_run = named.resolve().parent == latest.resolve().parent
    if is_of_this_run and named.resolve() != latest.resolve():
        raise UsageError(
            f"--resume {named} is not the latest checkpoint of --out {out}: "
            "choose another --out to branch off"
        )


def check_same_run(path: Path, saved: dict, manifest: dict) -> None:
    before = resume_key(path, saved)
    now = resume_key(path, manifest)
    changed = []
    for key, value in now.items():
        if key != "data" and value != before[key]:
            changed.append(f"{key} was {before[key]} and is now {value}")
    if changed:
        raise UsageError(
            f"{path} cannot be continued: {', '.join(changed)}; "
            "change that back or choose another --out"
        )
    if now["data"] != before["data"]:
        folder = manifest["config"]["data"]
        old_folder = saved["config"].get("data")
        what = f"the data was {old_folder} and is now {folder}"
        if folder == old_folder:
            what = f"the tokens in {folder} have changed"
        raise UsageError(
            f"{path} cannot be continued: {what}; change that back, or begin a new run with its "
            f"weights: --init_from {path} and another --out"
        )


def check_init(origin: Origin, manifest: dict) -> list[str]:
    """Check that saved weights fit the model; return the parameters that the checkpoint lacks.

    Raises UsageError and CheckpointError.
    """
    path = origin.path
    now = ModelConfig.from_dict(manifest["model"])
    parameters = parameter_shapes(now)
    for key, before in dataclasses.asdict(read_model(path, origin.manifest)).items():
        value = manifest["model"].get(key, before)
        if key == "seq_len" or value == before:
            continue
        if key == "vocab_size":
            folder, tokens = manifest["config"]["data"], manifest.get("tokens_in_vocabulary", value)
            raise UsageError(
                f"{path} has vocab_size {before}, and the tokenizer of {folder} has {tokens} "
                "tokens: its weights do not fit"
            )
        if not adds_parameters(now, key, before):
            raise UsageError(
                f"{path} has {key} {before}, and this run has {value}: its weights do not fit"
            )
    saved = checkpoint.tensor_shapes(path)
    new = []
    for name, shape in parameters.items():
        saved_shape = saved.get(f"model.{name}")
        if saved_shape is None:
            new.append(name)
        elif saved_shape != shape:
            raise UsageError(
                f"{path} has {name} of shape {saved_shape}, and this run of {shape}: "
                "its weights do not fit"
            )
    return new


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        parameters = Transformer(model).named_parameters()
    return {name: tuple(parameter.shape) for name, parameter in parameters}


def adds_parameters(model: ModelConfig, key: str, before) -> bool:
    """Whether a changed field of the model adds parameters to those it had with `before`."""
    try:
        less = parameter_shapes(dataclasses.replace(model, **{key: before}))
    except ValueError:  # its numbers do not fit together
        return False
    return parameter_shapes(model).keys() > less.keys()


def in_short(parameters: list[str]) -> str:
    """Such as "blocks.*.attention.q_norm.weight (4)"."""
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name in parameters)
    return ", ".join(f"{name} ({n})" if "*" in name else name for name, n in counts.items())


def other_tokenizer(origin: Origin, manifest: dict) -> str | None:
    """What to say if the data has another tokenizer than the checkpoint, as far as is known."""
    known = []
    for one in (origin.manifest, manifest):
        known.append((one.get("tokenizer"), one.get("tokens_in_vocabulary")))
    (name, tokens), (new_name, new_tokens) = known
    if tokens in (None, new_tokens) and (name == new_name or None in (name, new_name)):
        return None
    return (
        f"the tokenizer of {manifest['config']['data']}, {new_name} with {new_tokens} tokens, is "
        f"not the checkpoint's, {name} with {tokens}"
    )


def check_complete(path: Path, state: dict) -> None:
    """Check that a checkpoint to continue from has all of `state`. Raises UsageError."""
    saved = checkpoint.tensor_shapes(path)
    missing = [name for name, _ in checkpoint.flatten(state) if name not in saved]
    if missing:
        raise UsageError(
            f"{path} cannot be continued by this code, which keeps more in a checkpoint: "
            f"{in_short(missing)}; use the code that wrote it, or begin a new run with its "
            f"weights: --init_from {path} and another --out"
        )


def steps_without_checkpoint(config: Config, manifest: dict) -> int:
    """Return the steps of a finished run with --checkpoint none in --out; 0 if there is none.

    Raises UsageError if the run is not finished: it cannot be continued.
    """
    out = Path(config.out)
    starts = run_folder.read_starts(out)
    if not starts and (out / "config.json").exists():
        raise UsageError(f"--out {out} holds files that are not train.py's: choose another --out")
    steps = [row["step"] for row in read_log(out / "metrics.jsonl")] if starts else []
    if not steps or starts[-1]["config"]["checkpoint"] != "none":
        return 0
    if steps[-1] != config.max_steps:
        raise UsageError(
            f"--out {out} holds a run that saved no checkpoints and cannot be continued: "
            "choose another --out"
        )
    check_same_run(out, starts[-1], manifest)
    check_changes(starts[-1], manifest, steps[-1])
    return steps[-1]


# --------------------------------------------------------------------------------------------------
# Flags that changed between two starts


def check_changes(saved: dict, manifest: dict, step: int) -> list[str]:
    """Return each flag that differs between two manifests, as text, after `step` updates.

    Raises UsageError for one that may change results, unless --allow_changes is given.
    """
    config = with_sizes(manifest["config"], manifest)
    now = dataclasses.asdict(resolve(config)) | {"dtype": manifest["dtype"]}
    known, changes = {}, []
    for name, value in saved["config"].items():
        if name in now:
            known[name] = value
        else:
            changes.append(f"--{name} {value} -> unknown to this code")
    refused = list(changes)
    before_config = with_sizes(known, saved)  # with defaults for newer flags
    before = dataclasses.asdict(resolve(before_config))
    before["dtype"] = saved.get("dtype", before_config.dtype)
    for f in dataclasses.fields(Config):
        old, new = before[f.name], now[f.name]
        if new == old or f.metadata["resume"] == "not compared":
            continue
        changes.append(f"--{f.name} {old} -> {new}")
        if f.metadata["resume"] == "refused":
            refused.append(changes[-1])
        if f.name == "max_steps":
            changes[-1] += f": {new_schedule(before_config, config, step)}"
    if refused and not config.allow_changes:
        if step == config.max_steps:
            raise UsageError(
                f"{config.out} is finished, step {step} of {step}, with other flags "
                f"({', '.join(refused)}): choose another --out"
            )
        raise UsageError(
            f"{', '.join(refused)} would change the results of {config.out}: change that back, "
            "choose another --out, or give --allow_changes"
        )
    return changes


def with_sizes(flags: dict, manifest: dict) -> Config:
    """The flags of a manifest, with the sizes of its model, whether given or not."""
    sizes = {f.name: manifest["model"].get(f.name) for f in dataclasses.fields(Config)}
    return Config(**flags | {name: size for name, size in sizes.items() if size is not None})


def new_schedule(before: Config, now: Config, step: int) -> str:
    """How a changed --max_steps changes the learning rate."""
    old_lr = f"{learning_rate(step + 1, resolve(before)):.2e}"
    new_lr = f"{learning_rate(step + 1, resolve(now)):.2e}"
    ends = f"the {now.schedule} schedule ends at step {now.max_steps}"
    if new_lr == old_lr:
        return ends
    return f"{ends}; the learning rate of step {step + 1} is {new_lr}, not {old_lr}"
