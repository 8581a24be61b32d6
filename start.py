"""Where a run starts: its flags, its checkpoint, its data, and what all ranks must agree on.

    newest intact checkpoint in OUT? All ranks verify; damaged ones are passed over.
      yes   continue: its step, weights and optimizer; the run's flags, then those typed now
      no    with OUT/config.json, begin again at step 0; else a new run
            with --init_from, typed or in config.json: the weights of the newest checkpoint there

OUT/config.json      the flags as given, in this start or an earlier one; editing it is typing them
    metrics.jsonl    one row per start, log_interval, evaluation and checkpoint
    optim.jsonl      one row per parameter, with --optim_metrics_interval
    checkpoints/     see checkpoint.py
    profile/         with --profile
    wandb/           with --tracker wandb
    lock             exists while a run writes to the folder
"""

import contextlib
import dataclasses
import json
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import checkpoint
import config
import data
import dist
from checkpoint import CheckpointError, PathError
from config import FLAGS, SIZE_FLAGS, Config, Run
from errors import UsageError, plural, try_lock
from log import has_evaluation, read_log, replace_file
from model import ModelConfig, weights_fit


@dataclass(frozen=True)
class Start:
    """This process's place among the ranks, and what it needs to take steps of a run."""

    world: dist.World
    mesh: DeviceMesh
    origin: "Origin"
    source: data.Source
    train_data: data.Sequences
    val_data: data.Sequences
    val_batches: list[tuple[int, Tensor]]  # of this rank: (sequences that count, (B, T + 1))
    is_evaluated: bool = False  # whether the log has an evaluation of the origin's step
    notes: list[str] = field(default_factory=list)  # lines to print

    def is_finished(self, max_steps: int) -> bool:
        """Whether the run has nothing left to do."""
        step = self.origin.step
        return step > max_steps or (step == max_steps and self.is_evaluated)


def start_run(
    argv: list[str],
    world: dist.World,
    held: contextlib.ExitStack,
    load_mixture: Callable | None = None,
) -> tuple[Run, Start]:
    """Resolve the command line into a run, and open all that it needs on this rank.

    All ranks call it. `held` keeps the run's lock until it closes. load_mixture() returns the
    module extras.mixture; it is called only if --data names several folders.
    """
    typed = dist.on_rank0(config.parse, argv)  # all ranks use rank 0's flags
    if not typed.eval_only:  # an evaluation may run during training
        dist.on_rank0(held.enter_context, hold_lock(Path(typed.out), LOCK_WAIT))
    origin = find_origin(argv, world)
    machine = dist.on_rank0(dist.read_machine, world)
    mixture = load_mixture() if data.names_mixture(origin.given.data) else None
    source = open_data(origin.given.data, mixture)
    refuse_other_data(source)
    facts = data.facts_of(source)
    saved = origin.kept, origin.model_config
    run = dist.on_rank0(config.resolve, origin.given, machine, facts, *saved)
    changes = dist.on_rank0(compare, origin, run, source)
    notes = [f"changed: {change}" for change in changes]
    # Refuse hardware that only emulates bfloat16, unless --dtype was given.
    if run.dtype == "bfloat16" and not run.eval_only and origin.given.dtype == "auto":
        with dist.raise_on_all_ranks():
            dist.refuse_emulated_bfloat16(world)
    start = open_start(run, origin, source, world)
    return run, dataclasses.replace(start, notes=notes)


def open_start(run: Run, origin: "Origin", source: data.Source, world: dist.World) -> Start:
    """Create the mesh of a run and open its data on this rank. All ranks call it."""
    mesh = dist.make_mesh(world, run.mesh_shape)
    train_data = source.open("train", run.seq_len, run.seed)
    val_data = source.open("val", run.seq_len, None)
    val_indices = local_val_indices(run, mesh, len(val_data))
    val_batches = []
    with dist.raise_on_all_ranks():  # read once: a damaged file ends the run before its first step
        for indices in val_indices:
            # A rank without sequences evaluates sequence 0 with weight 0: forward is collective.
            batch = val_data[indices or [0]].to(world.device)
            val_batches.append((len(indices), batch))
    is_evaluated = dist.on_rank0(has_evaluation, Path(run.out), origin.step)
    return Start(
        world, mesh, origin, source, train_data, val_data, val_batches, is_evaluated=is_evaluated
    )


def write_config(run: Run) -> None:
    """Write OUT/config.json: the flags as they were given."""
    out = Path(run.out)
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "config.json", json.dumps(run.manifest["given"], indent=2) + "\n")


def local_train_indices(run: Run, mesh: DeviceMesh, steps: range) -> Iterator[list[int]]:
    """Yield the sequence indices of each of this rank's micro-batches in `steps`."""
    return data.train_indices(
        steps, run.global_batch_size, run.micro_batch_size, dist.dp_rank(mesh), run.dp_size
    )


def local_val_indices(run: Run, mesh: DeviceMesh, n_sequences: int) -> list[list[int]]:
    """Return the sequence indices of each of this rank's batches of an evaluation."""
    count = min(run.eval_sequences, n_sequences)
    return list(
        data.val_indices(count, n_sequences, run.micro_batch_size, dist.dp_rank(mesh), run.dp_size)
    )


def describe_evaluation(run: Run, start: Start, val_loss: float) -> str:
    """Return the lines of --eval_only for `val_loss`, in nats per token."""
    bits = val_loss / math.log(2) / start.val_data.bytes_per_token
    bits_per_byte = f"{bits:.6f} bits per byte"
    if math.isnan(bits):
        bits_per_byte = "bits per byte not comparable (text is lost, or its size is unknown)"
    perplexity = math.exp(min(val_loss, 700))  # exp(710) overflows
    count = min(run.eval_sequences, len(start.val_data))
    lines = [f"passed over {path}: {why}" for path, why in start.origin.damaged.items()]
    lines.append(
        f"{start.origin.path} on {run.data}: val_loss {val_loss:.6f}, "
        f"perplexity {perplexity:,.4f}, {bits_per_byte} "
        f"({plural(count, 'sequence')} of {run.seq_len:,} tokens)"
    )
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------
# The checkpoint and the flags of a start


@dataclass(frozen=True)
class Origin:
    """The flags of a start and the checkpoint that it uses; `path` is None for initial weights."""

    given: Config
    path: Path | None = None
    manifest: dict = field(default_factory=dict)  # of the checkpoint
    step: int = 0  # the steps done before this start
    tokens: int = 0  # of these steps
    only_weights: bool = False  # with --init_from or --eval_only
    model_config: ModelConfig | None = None  # of the checkpoint
    kept: dict = field(default_factory=dict)  # see config.resolve
    damaged: dict[Path, str] = field(default_factory=dict)  # newer checkpoints and their problems


def find_origin(argv: list[str], world: dist.World) -> Origin:
    """Find the flags of a start and its checkpoint. All ranks call it and get rank 0's result.

    The checkpoints of --out take precedence over --init_from, so that the same command can be
    repeated, even if the folder of --init_from was removed. Raises UsageError, PathError and
    CheckpointError on all ranks.
    """
    typed = dist.on_rank0(config.parse, argv)
    if typed.eval_only:
        named = Path(typed.init_from or typed.out)
        path, damaged = newest_intact(dist.on_rank0(checkpoints_at, named), world)
        return dist.on_rank0(with_checkpoint, argv, run_of(path), path, damaged, True)
    out = Path(typed.out)
    saved = dist.on_rank0(checkpoint.list_checkpoints, out)
    if saved:
        path, damaged = newest_intact(saved, world)
        return dist.on_rank0(with_checkpoint, argv, out, path, damaged, False)
    origin = dist.on_rank0(without_checkpoint, argv, out)
    if origin.given.init_from is None:
        return origin
    named = Path(origin.given.init_from)
    path, damaged = newest_intact(dist.on_rank0(checkpoints_at, named), world)
    return dist.on_rank0(with_weights, origin, path, damaged)


def newest_intact(paths: list[Path], world: dist.World) -> tuple[Path, dict[Path, str]]:
    """Return the last of `paths` that is intact, and the problems of those after it.

    Each rank verifies some of the files. Raises CheckpointError if no checkpoint is intact.
    """
    damaged = {}
    for path in reversed(paths):
        problems = dist.on_all_ranks(checkpoint.verify, path, world.rank, world.size)
        if not any(problems):
            return path, damaged
        damaged[path] = next(filter(None, problems))
    listed = "; ".join(f"{path}: {problem}" for path, problem in damaged.items())
    raise CheckpointError(
        f"no checkpoint to use: {listed}; restore one, or name another checkpoint"
    )


def with_checkpoint(
    argv: list[str], out: Path, path: Path, damaged: dict[Path, str], only_weights: bool
) -> Origin:
    """Return the start that continues the run `out` from `path`, or evaluates its weights."""
    manifest = checkpoint.read_manifest(path)
    recorded = manifest.get("config", {})
    kept = {name: recorded.get(name) for name, flag in FLAGS.items() if flag.kind == "part"}
    if only_weights:  # it fitted in memory
        kept["micro_batch_size"] = recorded.get("micro_batch_size")
    return dataclasses.replace(
        with_flags(argv, read_saved(out, path, manifest)),
        path=path,
        manifest=manifest,
        step=0 if only_weights else manifest["step"],
        tokens=0 if only_weights else manifest.get("tokens", 0),
        only_weights=only_weights,
        model_config=read_model(path, manifest),
        kept={name: value for name, value in kept.items() if value is not None},
        damaged=damaged,
    )


def without_checkpoint(argv: list[str], out: Path) -> Origin:
    """Return the start of a new run, or of one that begins again. Raises UsageError."""
    saved = read_saved(out)
    rows = read_log(out / "metrics.jsonl")
    logged = [row["step"] for row in rows if row.get("event") == "checkpoint"]
    if logged:
        raise UsageError(
            f"cannot continue --out {out}: its checkpoint of step {logged[-1]} is missing: "
            "restore it, or choose another --out"
        )
    if rows and config.merge(saved).get("checkpoint") == "none":
        raise UsageError(
            f"cannot continue --out {out}: its run has --checkpoint none: choose another --out"
        )
    return with_flags(argv, saved)


def with_flags(argv: list[str], saved: dict[str, dict]) -> Origin:
    """Return the start of a new run with the flags of `saved`, then those typed now."""
    return Origin(config.parse(argv, saved))


def with_weights(origin: Origin, path: Path, damaged: dict[Path, str]) -> Origin:
    """Return the start of a new run with the weights of the checkpoint `path`."""
    manifest = checkpoint.read_manifest(path)
    name = manifest.get("config", {}).get("model", origin.given.init_from)
    return dataclasses.replace(
        origin,
        path=path,
        manifest=manifest,
        only_weights=True,
        model_config=read_model(path, manifest),
        kept={"model": name},
        damaged=damaged,
    )


def read_saved(out: Path, path: Path | None = None, manifest: dict | None = None) -> dict:
    """Return {file: flags} of the run `out`, whose newest checkpoint, if any, is `path`.

    Flags that the checkpoint records, but this code does not know, are left to `compare`. Raises
    UsageError.
    """
    known_there = (manifest or {}).get("config", {})
    ignored = tuple(name for name in known_there if name not in FLAGS)
    file = out / "config.json"
    if file.exists():
        return {str(file): config.read_flags(file, str(file), ignored)}
    if path is None or "given" not in manifest:  # tools.hf writes manifests without flags
        return {}
    return {str(path): config.check_flags(manifest["given"], str(path), ignored)}


def read_model(path: Path, manifest: dict) -> ModelConfig:
    """Return the model in the manifest of the checkpoint `path`. Raises UsageError."""
    if "model" not in manifest:
        raise UsageError(f"{path} is not a checkpoint of train.py: its manifest.json lacks 'model'")
    try:
        return ModelConfig.from_dict(manifest["model"])
    except ValueError as error:
        raise UsageError(f"{path} cannot be used: {error}") from None


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoint `path`, or all checkpoints of the run folder `path`, oldest first.

    Raises PathError if there are none.
    """
    found = checkpoint.list_checkpoints(path)
    if not found and (path / "manifest.json").is_file():
        found = [path]
    if not found:
        remedy = "name a run folder such as runs/tiny, or a checkpoint in one"
        raise PathError(f"{path} contains no checkpoint: {remedy}")
    return found


def newest_checkpoint(named: Path) -> Path:
    """Return the checkpoint `named`, or the newest one of the run `named`, after verifying it.

    Raises PathError, and CheckpointError if it is damaged.
    """
    path = checkpoints_at(named)[-1]
    if problem := checkpoint.verify(path):
        raise CheckpointError(f"{path}: {problem}; name another checkpoint")
    return path


def run_of(path: Path) -> Path:
    """Return the run folder of a checkpoint; of one outside a run folder, the checkpoint itself."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


# --------------------------------------------------------------------------------------------------
# What has changed since the checkpoint

# What `find_changes` compares beside flags and the parts of the model
FINGERPRINT, TOKENIZER, MESH = "the data's fingerprint", "the data's tokenizer", "the mesh"
# Weights fit sequences of any length.
MODEL = {field.name for field in dataclasses.fields(ModelConfig)} - {"seq_len"}
NOT_FLAGS = MODEL | {"seq_len", FINGERPRINT, TOKENIZER, MESH}


def compare(origin: Origin, run: Run, source: data.Source) -> list[str]:
    """Return a line for each difference between the checkpoint's run and this start's `run`.

    Raises UsageError for a changed part of the run without --allow_changes, and for a model that
    the weights do not fit. If a start uses only the weights, only the model and the tokenizer are
    compared.
    """
    if origin.path is None:
        return []
    changes = find_changes(origin, run, source)
    fits = weights_fit(origin.model_config, run.model_config)
    fixed = changes.keys() & ({"model"} if fits else {"model"} | MODEL)
    parts = {name for name in changes if name not in FLAGS or FLAGS[name].kind == "part"} - {MESH}
    if origin.only_weights:
        parts -= MODEL  # for example the weight of a loss term
    refused = fixed if run.allow_changes else fixed | parts
    if not refused:
        return list(changes.values())
    lines = [changes[name] for name in changes if name in refused]  # in the order of the flags
    does = "use the weights of" if origin.only_weights else "continue from"
    remedy = "change that back"
    if not origin.only_weights:
        remedy += " or choose another --out"
    if fixed:
        remedy += ": weights fit only their own model"
    else:
        remedy += ", or give --allow_changes in each start until one has saved a checkpoint"
    raise UsageError(f"cannot {does} {origin.path}: {', '.join(lines)}; {remedy}")


def find_changes(origin: Origin, run: Run, source: data.Source) -> dict[str, str]:
    """Return a line for each property of the run that differs from the checkpoint's, by name."""
    old = properties(origin.manifest) | dataclasses.asdict(origin.model_config)
    new = properties(run.manifest) | run.manifest["model"]
    checksums = [f"{zlib.crc32(contents):08x}" for contents in source.tokenizer_file.values()]
    new[TOKENIZER] = describe_tokenizer(run.data_facts.tokenizer, checksums)
    if "tokenizer" in origin.manifest:  # other programs than train.py may call save_state
        old[TOKENIZER] = tokenizer_of(origin.manifest)
    changes = {}
    for name in {**old, **new}:
        if origin.only_weights and name not in MODEL | {TOKENIZER}:
            continue
        before, now = old.get(name), new.get(name)
        if name not in old:  # a flag that the checkpoint's code did not have had its default
            before = FLAGS[name].default if name in FLAGS else now
            before = now if before in (None, "auto") else before  # which was computed
        if now == before:
            continue
        label = name if name in NOT_FLAGS else f"--{name}"
        changes[name] = f"{label} {before} -> {now if name in new else 'unknown to this code'}"
        if name in (FINGERPRINT, TOKENIZER):  # name the folders as well
            folders = f"{origin.manifest.get('config', {}).get('data')} -> {run.data}"
            changes[name] += f" (--data {folders})"
    return changes


def properties(manifest: dict) -> dict:
    """Return what `find_changes` compares, by name: flags, the mesh and the data's fingerprint.

    Sizes are compared as parts of the model. init_from only says where a run began.
    """
    left_out = {name for name, flag in FLAGS.items() if flag.kind == "once"}
    left_out |= {"init_from", *SIZE_FLAGS}
    values = manifest.get("config", {})
    found = {name: value for name, value in values.items() if name not in left_out}
    if values:
        found[MESH] = " x ".join(f"{axis} {values[axis]}" for axis in dist.AXES)
    return found | {FINGERPRINT: manifest.get("data")}


def tokenizer_of(manifest: dict) -> str:
    """Describe the tokenizer that a checkpoint records."""
    name, files = manifest["tokenizer"], manifest["files"]
    checksums = [files[file]["crc32"] for file in (name, data.TOKENIZER_CONFIG) if file in files]
    return describe_tokenizer(name, checksums)


def describe_tokenizer(name: str | None, checksums: list[str]) -> str:
    """A tokenizer is identified by its name and the checksums of its files, if it has any.

    They are those of tokenizer.json and of tokenizer_config.json, which names the end of a text.
    """
    if name is None:
        return "an unknown tokenizer"
    return f"{name} (crc32 {', '.join(checksums)})" if checksums else name


# --------------------------------------------------------------------------------------------------
# The data


def open_data(path: str, mixture=None) -> data.Source:
    """Open --data on all ranks, and prepare the built-in data if it is missing.

    `mixture` is the module extras.mixture if there are several. Raises the errors of data.py,
    extras.mixture and text.tokenizer on all ranks.
    """
    if path == FLAGS["data"].default:
        dist.on_rank0(prepare_builtin, Path(path))
    with dist.raise_on_all_ranks():
        source = mixture.open_mixture(path) if mixture else data.open_folder(Path(path))
        # Most token folders have no tokenizer.json, and a run without text/ cannot check one.
        can_check = Path(__file__).with_name("text").is_dir()
        if torch.distributed.get_rank() == 0 and source.tokenizer_file and can_check:
            from text import tokenizer

            file = Path(source.tokenizer)
            tokenizer.find_in_folder(file.parent, file.name, source.vocab_size)
    return source


def prepare_builtin(path: Path) -> None:
    """Prepare the built-in data unless it exists."""
    if not path.exists():
        here = Path(__file__).parent
        if not (here / "prepare.py").exists() or not (here / "text").exists():
            raise UsageError(
                f"{path} is prepared by prepare.py and text/: restore them, or give --data"
            )
        import prepare  # other data needs neither

        prepare.prepare(None, path)


# --------------------------------------------------------------------------------------------------
# What all ranks must agree on


def refuse_other_data(source: data.Source) -> None:
    """Raise UsageError on all ranks if a rank has other data than rank 0. All ranks call it."""
    fingerprints = dist.on_all_ranks(lambda: source.fingerprint)
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise UsageError(
                f"rank {rank} has other data than rank 0: the fingerprints are {fingerprint} and "
                f"{fingerprints[0]}; give all ranks the same data"
            )


# --------------------------------------------------------------------------------------------------
# The lock

LOCK_WAIT = 3.0  # seconds: a killed process keeps its lock until its last thread has ended


@contextlib.contextmanager
def hold_lock(out: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold OUT/lock, so that only this run writes to OUT; the process's death releases it.

    Creates the folder if needed, and removes it again if the run writes nothing to it. Waits up to
    `wait` seconds for another run to end. Raises UsageError if it keeps the lock.
    """
    path = out / "lock"
    deadline = time.monotonic() + wait
    while True:
        try:
            new_folders = [folder for folder in (out, *out.parents) if not folder.exists()]
            out.mkdir(parents=True, exist_ok=True)
            if (descriptor := try_lock(path)) is not None:
                break
        except OSError as error:
            why = error.strerror
            if isinstance(error, FileExistsError) and os.path.islink(error.filename):
                link = error.filename
                why = f"{link} is a link to {os.readlink(link)}, where there is no folder"
            raise UsageError(f"--out {out}: {why}; choose another --out") from None
        if time.monotonic() >= deadline:
            owner = "another run"
            with contextlib.suppress(OSError):  # it has just ended
                owner = path.read_text() or owner
            raise UsageError(
                f"--out {out} is in use by {owner}: wait until it ends or choose another --out"
            )
        time.sleep(1)
    name = f"host {socket.gethostname()}, process {os.getpid()}"
    with contextlib.suppress(OSError):  # disk full: leave the owner's name out
        os.ftruncate(descriptor, 0)
        os.write(descriptor, name.encode())
    try:
        yield
    finally:
        # Remove the file before the lock is released: later it may be another run's lock.
        path.unlink(missing_ok=True)
        os.close(descriptor)
        with contextlib.suppress(OSError):  # not empty
            for folder in new_folders:  # innermost first
                folder.rmdir()
