"""Everything that can refuse a run before its first step and needs no weights.

It checks flags, data, run folder, what the run continues from, and which flags may change. Later,
train.agree checks whether the ranks form one run.
"""

import contextlib
import dataclasses
import shutil
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import checkpoint
import data
import dist
import layout
import prepare
from config import (
    BUILTIN,
    EVAL_SEQUENCES,
    Config,
    fill_learning_rate,
    fill_sizes,
    from_saved,
    model_config,
    read_model,
)
from metrics import read_log
from model import ModelConfig
from runtime import memory, run_folder
from runtime.cli import UsageError
from text import tokenizer


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    config: Config  # with the values that the run or its model has for flags not given
    model: ModelConfig
    manifest: dict  # goes into every checkpoint
    device_memory: int  # bytes that a rank may fill, for --strategy auto
    times: list[datetime]  # of all starts of the run, this one last
    step: int  # done before; 0 for a new run
    checkpoint: Path | None  # the state to begin with
    only_weights: bool  # of `checkpoint`: for a new run, or for --eval_only
    changes: list[str]  # since the checkpoint, such as "--max_steps 100 -> 200"
    damaged: dict[Path, str]  # newer checkpoints and their problems


def find_start(flags: Config, world: dist.World, held: contextlib.ExitStack) -> Start:
    """Find where the run begins. A collective: rank 0 checks for all ranks, as `check` does.

    All ranks verify its checkpoint together; if it is damaged, rank 0 finds the one before.
    """
    start = dist.on_rank0(check, flags, world, held, {})
    while path := start.checkpoint:
        problems = dist.on_all_ranks(checkpoint.verify, path, world.rank, world.size)
        if not any(problems):
            break
        damaged = start.damaged | {path: next(filter(None, problems))}
        start = dist.on_rank0(check, flags, world, held, damaged)
    return start


def check(
    flags: Config, world: dist.World, held: contextlib.ExitStack, damaged: dict[Path, str]
) -> Start:
    """Check what needs no weights, on rank 0; find where the run begins and with what model.

    The first call, with nothing `damaged` yet, enters the lock of --out into `held`. Files of the
    checkpoint are not verified. Writes only the built-in data, which `held` removes again if the
    start is rejected. Raises UsageError, PathError, CheckpointError, DataError and TokenizerError.
    """
    now = datetime.now().astimezone()
    saved, starts = [], []
    if not flags.eval_only:  # which only reads
        out = Path(flags.out)
        if not damaged:
            held.enter_context(run_folder.hold_lock(out, flags.timeout))
        saved, starts = checkpoint.list_checkpoints(out), run_folder.read_starts(out)
        check_folder(flags, saved, starts)
    origin = find_origin(flags, saved, damaged)
    c = settle(flags, origin)
    if c.data == BUILTIN and prepare_builtin():
        held.push(remove_rejected_builtin)
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
    step, changes = find_step(origin, model, manifest)
    device_memory = memory.device_memory(world.device, world.local_size)
    times = [*(datetime.fromisoformat(row["time"]) for row in starts), now]
    found = step, origin.path, origin.only_weights, changes, damaged
    return Start(c, model, manifest, device_memory, times, *found)


def prepare_builtin() -> bool:
    """Prepare the built-in data unless it exists; return whether this call has prepared it."""
    is_missing = not Path(BUILTIN).exists()
    if is_missing:
        prepare.prepare(None, Path(BUILTIN))
    return is_missing


def remove_rejected_builtin(kind, error, traceback) -> None:
    """Remove the built-in data, which this start has prepared, if the start is rejected.

    For contextlib.ExitStack.push, which passes on the exception that ends the block.
    """
    if getattr(error, "exit_status", None) == UsageError.exit_status:
        shutil.rmtree(BUILTIN)
        with contextlib.suppress(OSError):  # other data is there
            Path(BUILTIN).parent.rmdir()


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a start takes something over from, if any."""

    path: Path | None = None  # the latest checkpoint of --out, else that of --init_from or --resume
    manifest: dict = field(default_factory=dict)  # of that
    model: ModelConfig | None = None  # with --init_from or --resume; flags override its parts
    only_weights: bool = False  # with --init_from


def find_origin(config: Config, saved: list[Path], damaged: dict[Path, str]) -> Origin:
    """Read what a start takes over. Raises UsageError, PathError and CheckpointError.

    `saved`, the checkpoints of --out, take precedence over --init_from and --resume, so that the
    same command can be repeated, even if what they named is gone. Of those, passes over the
    `damaged`, and adds those without a readable manifest to them.
    """
    named = config.source or (config.out if config.eval_only else None)
    paths = saved
    if named and not saved:
        paths = run_folder.checkpoints_at(Path(named))[-1:]
    for path in reversed(paths):
        if path in damaged:
            continue
        try:
            manifest = checkpoint.read_manifest(path)
        except checkpoint.CheckpointError as error:
            damaged[path] = str(error)
            continue
        only_weights = config.eval_only or bool(config.init_from and not saved)
        return Origin(path, manifest, read_model(path, manifest) if named else None, only_weights)
    if damaged:
        problems = "; ".join(f"{path}: {problem}" for path, problem in damaged.items())
        raise checkpoint.CheckpointError(f"no checkpoint to use: {problems}; restore or name one")
    return Origin()


def check_folder(c: Config, saved: list[Path], starts: list[dict]) -> None:
    """Refuse a folder whose contents a run would overwrite. Raises UsageError.

    `saved` has its checkpoints, damaged or not, and `starts` the rows of starts.jsonl.
    """
    out = Path(c.out)
    if c.resume == "never":
        if any(path.name != "lock" for path in out.glob("*")):
            raise UsageError(f"--resume never would overwrite --out {out}: choose another --out")
        return
    rows = read_log(out / "metrics.jsonl")
    has_saved = any(row.get("event") == "checkpoint" for row in rows)
    saves_nothing = rows and starts and starts[-1]["config"].get("checkpoint") == "none"
    is_foreign = not starts and (out / "config.json").exists()
    if not saved and (has_saved or saves_nothing or is_foreign):
        raise UsageError(
            f"cannot continue --out {out}: it has no checkpoint, but files that a new run would "
            "overwrite; choose another --out"
        )


def settle(config: Config, origin: Origin) -> Config:
    """Fill in the flags whose values are the checkpoint's."""
    saved = origin.manifest
    flags = saved.get("config") or {}
    values = {}
    if config.eval_only:  # by default on the checkpoint's data, in its dtype and batches
        for name, default in {"data": BUILTIN, "eval_sequences": EVAL_SEQUENCES}.items():
            values[name] = getattr(config, name) or flags.get(name) or default
        values["dtype"] = saved.get("dtype", "auto") if config.dtype == "auto" else config.dtype
        values["micro_batch_size"] = config.micro_batch_size or saved.get("micro_batch_size")
    if origin.model:
        config = fill_sizes(config, origin.model)
        # The rest of the model is the named size's, if any: --config RUN/config.json needs both.
        values["model"] = flags.get("model", config.model)
    return dataclasses.replace(config, **values)


def find_step(origin: Origin, model: ModelConfig, manifest: dict) -> tuple[int, list[str]]:
    """The step after which a run begins, and what changed since. Raises UsageError."""
    path, saved = origin.path, origin.manifest
    if path is None:
        return 0, []
    if not origin.only_weights:
        return saved["step"], check_changes(path, saved, manifest)
    # Names and shapes are checked when they are loaded.
    for key, before in vars(read_model(path, saved)).items():
        value = getattr(model, key)
        if value != before and key != "seq_len":
            raise UsageError(
                f"{path} has {key} {before}, and this run has {value}: its weights do not fit"
            )
    return 0, []


def check_changes(path: Path, saved: dict, manifest: dict) -> list[str]:
    """Return what differs between the checkpoint `path` and this start, as text.

    Raises UsageError for what may not change, or not without --allow_changes (see config.flag).
    """
    policies = {f"--{f.name}": f.metadata["resume"] for f in dataclasses.fields(Config)}
    before, now = properties(path, saved), properties(path, manifest)
    changes, refused = [], {}
    for name, old in before.items():
        # A flag that this code no longer has, and that was not set, changes nothing.
        new = now.get(name, None if old is None else "unknown to this code")
        policy = policies.get(name, "refused" if name.startswith("--") else "never")
        if new == old or policy == "not compared":
            continue
        changes.append(f"{name} {old} -> {new}")
        if name == "the data's fingerprint":  # a hash, which tells nobody the folder
            changes[-1] += f" (--data {before['--data']} -> {now['--data']})"
        if policy == "never" or (policy == "refused" and not now["--allow_changes"]):
            refused[changes[-1]] = policy
    if refused:
        remedy = "choose another --out, or give --allow_changes"
        if "never" in refused.values():
            remedy = f"or begin a new run with its weights: --init_from {path} and another --out"
        raise UsageError(
            f"cannot continue from {path}: {', '.join(refused)}; change that back, {remedy}"
        )
    return changes


def properties(path: Path, manifest: dict) -> dict:
    """What a manifest says of a run: its flags with defaults resolved, its model and its data."""
    flags, model = manifest.get("config") or {}, vars(read_model(path, manifest))
    c = dataclasses.replace(from_saved(flags), d_model=model["d_model"])
    resolved = vars(fill_learning_rate(c))
    dtype = {"dtype": manifest.get("dtype", resolved["dtype"])}  # what --dtype auto chose
    merged = flags | resolved | dtype
    found = {f"--{name}": value for name, value in merged.items() if name not in model}
    return found | model | {"the data's fingerprint": manifest.get("data")}
