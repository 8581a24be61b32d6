"""Where a run starts: its checkpoint, its flags, its data.

newest intact checkpoint in OUT? All ranks verify; damaged ones are passed over.
  yes   continue: its step, weights and optimizer
  no    a new run; with --init_from, the weights of the newest intact checkpoint there

flags: the parts of a run that its checkpoint records, then OUT/config.json, then --config, then
typed ones: each replaces those before

OUT/config.json  the flags as given, in this start or an earlier one; editing it is typing them
metrics.jsonl    one row per start, log_interval, evaluation and checkpoint
optim.jsonl      one row per parameter, with --optim_metrics_interval
checkpoints/     see checkpoint.py
lock             held while a run writes to the folder
"""

import contextlib
import dataclasses
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import checkpoint
import config
import data
import dist
from checkpoint import CheckpointError
from config import KINDS, SIZE_FLAGS, Config, Run
from errors import UsageError, hold_lock, import_extra
from log import has_evaluation, has_saved
from model import SIZES, ModelConfig


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a start uses; `path` is None for initial weights."""

    path: Path | None = None
    manifest: dict = field(default_factory=dict)
    only_weights: bool = False  # with --init_from or --eval_only
    step: int = 0  # the steps done before this start
    tokens: int = 0  # of these steps
    model_config: ModelConfig | None = None
    extra_files: dict[str, bytes] = field(default_factory=dict)  # such as those of tools.hf
    notes: list[str] = field(default_factory=list)  # on newer checkpoints, which are damaged


@dataclass(frozen=True)
class Start:
    """This process's place among the ranks, and what it needs to take steps of a run."""

    world: dist.World
    mesh: DeviceMesh
    origin: Origin
    source: data.TokenFolder
    train_data: data.TokenDataset
    val_data: data.TokenDataset
    val_batches: list[tuple[int, Tensor]]  # of this rank: (sequences that count, (B, T + 1))
    is_evaluated: bool  # the log has the evaluation of the origin's step, or that is step 0
    notes: list[str] = field(default_factory=list)  # lines to print


def start_run(argv: list[str], world: dist.World, held: contextlib.ExitStack) -> tuple[Run, Start]:
    """Resolve the command line into a run, and open all that it needs on this rank.

    All ranks call it, and use rank 0's flags. `held` keeps the run's lock until it closes.
    """
    typed = dist.on_rank0(config.parse, argv)
    if typed.get("init_from") and not typed.get("eval_only") and "out" not in typed:
        raise UsageError("--init_from begins a new run: give it a folder with --out")
    typed.setdefault("out", f"runs/{typed.get('model') or 'tiny'}")
    if not typed.get("eval_only"):
        out = Path(typed["out"])
        if dist.on_rank0((out / "manifest.json").exists):
            raise UsageError(f"--out {out} is a checkpoint: give its run folder, or --init_from")
        lock_folder(out, world, held)
    given, origin = find_origin(typed, world)
    source = open_data(given.data, world)
    run = dist.on_rank0(config.resolve, given, world, source, origin.model_config)
    changes = dist.on_rank0(find_changes, run, origin, source)
    start = open_start(run, origin, source, world)
    return run, dataclasses.replace(start, notes=origin.notes + changes)


def lock_folder(out: Path, world: dist.World, held: contextlib.ExitStack) -> None:
    """Lock the run folder until `held` closes. Raises UsageError if another run holds it."""
    # A host that was lost may hold its lock until the file server notices that.
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    wait = world.timeout.total_seconds() / 2 if restarts else 3.0
    lock = out / "lock"
    dist.on_rank0(held.enter_context, hold_lock(lock, wait))
    for rank, is_there in enumerate(dist.on_all_ranks(lock.exists)):
        if not is_there:
            raise UsageError(f"rank {rank} does not see {lock}: give a folder that all hosts share")


def open_start(run: Run, origin: Origin, source: data.TokenFolder, world: dist.World) -> Start:
    """Create the mesh of a run and open its data on this rank. All ranks call it."""
    mesh = dist.make_mesh(world, (run.dp_replicate, run.dp_shard, run.tp))
    train_data = source.open("train", run.seq_len, run.seed)
    val_data = source.open("val", run.seq_len, None)
    count = min(run.eval_sequences, len(val_data))
    part = dist.dp_rank(mesh), run.dp_size
    val_batches = []

    def read_val_batches() -> None:
        for indices in data.val_indices(count, len(val_data), run.micro_batch_size, *part):
            # A rank without sequences evaluates sequence 0 with weight 0: forward is collective.
            val_batches.append((len(indices), val_data[indices or [0]].to(world.device)))

    dist.on_all_ranks(read_val_batches)  # once: a damaged file ends the run before its first step
    is_evaluated = origin.step == 0 or dist.on_rank0(has_evaluation, Path(run.out), origin.step)
    return Start(world, mesh, origin, source, train_data, val_data, val_batches, is_evaluated)


def write_config(run: Run) -> None:
    """Write OUT/config.json: the flags as they were given."""
    file = Path(run.out, "config.json")
    new = file.with_name(".config.json.tmp")  # so that a kill leaves no half of the file
    checkpoint.write_file(new, [json.dumps(run.manifest["given"], indent=2).encode() + b"\n"])
    os.replace(new, file)


def describe_start(run: Run, start: Start, parameters: int) -> list[str]:
    """Return the lines on model, mesh, batch, data and checkpoint."""
    world, origin = start.world, start.origin
    sequences = len(start.train_data)
    epochs = run.max_steps * run.global_batch_size / sequences
    how = "a new run with the weights of" if origin.only_weights else "continuing from"
    how = "evaluating" if run.eval_only else how
    return [
        f"model   {run.model}: {run.n_layer} layers x {run.d_model} wide, vocabulary "
        f"{run.model_config.vocab_size:,}: {parameters:,} parameters, {run.dtype}",
        f"mesh    {run.strategy}: dp_replicate {run.dp_replicate} x dp_shard {run.dp_shard} x "
        f"tp {run.tp} = {world.size} x {world.device_name}",
        f"batch   {run.global_batch_size} sequences = micro_batch_size {run.micro_batch_size} x "
        f"grad_accum_steps {run.grad_accum_steps} x dp_size {run.dp_size}; "
        f"x {run.seq_len} tokens = {run.tokens_per_step:,} tokens a step",
        f"data    {run.data}: {sequences:,} sequences; the run reads {epochs:.2f} epochs",
        f"out     {run.out}" + (f", {how} {origin.path}" if origin.path else ""),
        *(f"        {note}" for note in start.notes),
    ]


# --------------------------------------------------------------------------------------------------
# The checkpoint and the flags of a start


def find_origin(typed: dict, world: dist.World) -> tuple[Config, Origin]:
    """Return the flags of a start as given, and its checkpoint. All ranks call it.

    The checkpoints of --out take precedence over --init_from, so that the same command can be
    repeated. Raises UsageError and CheckpointError.
    """
    evaluates = typed.get("eval_only", False)
    named = Path(typed["out"])
    if evaluates and typed.get("init_from"):
        named = Path(typed["init_from"])
    in_run = named.parent.name == "checkpoints" and dist.on_rank0((named / "manifest.json").exists)
    run_folder = named.parent.parent if in_run else named
    file = run_folder / "config.json"
    flags = dist.on_rank0(lambda: config.read_flags(file) if file.exists() else {}) | typed
    continues = not evaluates and dist.on_rank0(checkpoint.list_checkpoints, named) != []
    if not evaluates and not continues:
        if dist.on_rank0(has_saved, named):
            raise UsageError(f"the checkpoints of {named} are gone: choose another --out")
        if not flags.get("init_from"):
            return Config(**flags), Origin()
        named = Path(flags["init_from"])
    path, notes = newest_intact(named, world)
    manifest = dist.on_rank0(checkpoint.read_manifest, path)
    recorded = manifest.get("config", {})  # tools.hf writes none
    # Recorded parts are defaults of the flags above, but sizes are those of the checkpoint's model.
    parts = [name for name, kind in KINDS.items() if kind == "part" and name not in SIZE_FLAGS]
    inherited = parts if continues else ["model"]
    defaults = {name: recorded[name] for name in inherited if name in recorded}
    if defaults.get("model") not in SIZES:  # "imported"
        defaults.pop("model", None)
    flags = defaults | flags
    ours = ("rank-", "index.", "tokenizer")  # all other files are kept in the run's checkpoints
    others = [name for name in manifest["files"] if not name.startswith(ours)]
    origin = Origin(
        path=path,
        manifest=manifest,
        only_weights=not continues,
        step=manifest["step"] if continues else 0,
        tokens=manifest["tokens"] if continues else 0,
        model_config=ModelConfig.from_dict(manifest["model"]),
        extra_files={name: (path / name).read_bytes() for name in others},
        notes=notes,
    )
    return Config(**flags), origin


def newest_intact(named: Path, world: dist.World) -> tuple[Path, list[str]]:
    """Return the newest intact checkpoint at `named`, and notes on newer ones, which are damaged.

    Each rank verifies some of the files. Raises UsageError, or CheckpointError if none is intact.
    """
    notes = []
    for path in reversed(dist.on_rank0(checkpoints_at, named)):
        problems = dist.on_all_ranks(checkpoint.verify, path, world.rank, world.size)
        if not any(problems):
            return path, notes
        notes.append(f"passed over {path}: {next(filter(None, problems))}")
    raise CheckpointError(f"no checkpoint of {named} is intact: {'; '.join(notes)}")


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint `path`, or all checkpoints of the run folder `path`, oldest first.

    Raises UsageError if there are none.
    """
    found = [path] if (path / "manifest.json").is_file() else checkpoint.list_checkpoints(path)
    if not found:
        raise UsageError(f"{path} is neither a checkpoint nor a run folder with checkpoints")
    return found


def find_changes(run: Run, origin: Origin, source: data.TokenFolder) -> list[str]:
    """Return a line for each flag that has changed since the checkpoint of the start.

    Raises UsageError for a model that the weights do not fit and, without --allow_changes, for a
    changed part of the run. If a start uses only the weights, the tokenizer is the only part.
    """
    if origin.path is None:
        return []
    saved = origin.manifest
    flags = saved.get("config", {})
    before = {"model": flags.get("model", run.model)} | dataclasses.asdict(origin.model_config)
    sizes = {"model": run.model} | run.manifest["model"]
    misfits = [
        f"{name} {before[name]} -> {size}"
        for name, size in sizes.items()
        if name != "seq_len" and size != before[name]
    ]
    if misfits:
        raise UsageError(f"the weights of {origin.path} do not fit: {', '.join(misfits)}")

    parts, rest = [], []
    checksums = {name: file["crc32"] for name, file in saved["files"].items()}
    files = {name: f"{zlib.crc32(text):08x}" for name, text in source.tokenizer_files.items()}
    if saved["tokenizer"] != run.tokenizer or not files.items() <= checksums.items():
        parts.append(f"the tokenizer {saved['tokenizer']} -> {source.tokenizer}")
    if origin.only_weights:
        flags = {}
    elif saved["data"] != source.fingerprint:
        parts.append(f"the tokens of --data {flags.get('data')} -> {run.data}")
    for name, value in flags.items():
        now = getattr(run, name, value)  # other code may have had other flags
        if now != value and KINDS[name] != "once":
            changed = parts if KINDS[name] == "part" else rest
            changed.append(f"--{name} {value} -> {now}")
    if parts and not run.allow_changes:
        raise UsageError(
            f"cannot use {origin.path}, because {', '.join(parts)}: change that back, choose "
            "another --out, or give --allow_changes until a checkpoint has been saved"
        )
    return [f"changed: {change}" for change in parts + rest]


# --------------------------------------------------------------------------------------------------
# The data


def open_data(path: str, world: dist.World) -> data.TokenFolder:
    """Open --data on all ranks, and prepare the built-in data if it is missing."""
    if path == Config.data:
        dist.on_rank0(prepare_builtin, Path(path))
    sources = dist.on_all_ranks(open_source, path)
    for rank, source in enumerate(sources):
        if source.fingerprint != sources[0].fingerprint:
            raise UsageError(f"rank {rank} has other data than rank 0 in --data {path}")
    return sources[world.rank]


def open_source(path: str) -> data.TokenFolder:
    """Open --data on this rank."""
    if ":" in path:
        return import_extra("mixture", "--data DIR:SHARE,...").open_mixture(path)
    return data.open_folder(Path(path))


def prepare_builtin(path: Path) -> None:
    if path.exists():
        return
    try:
        import prepare  # other data needs neither prepare.py nor tokenizer.py
    except ImportError as error:
        raise UsageError(f"--data {path} needs prepare.py and tokenizer.py: {error}") from None
    prepare.prepare(None, path)
