"""Checkpoints: atomic, verified, loadable on any mesh, within a host's memory.

    RUN/checkpoints/step-00000100/
        __0_0.distcp __1_0.distcp ...   sharded format: the shards that each rank wrote
        .metadata                       and their index
        full.pt                         full format: all tensors in one file, for torch.load
        tokenizer.*                     the tokenizer, if it is a file
        manifest.json                   step, tokens, config, data; file sizes and checksums

The manifest is written last: a directory without one is not a checkpoint. Sharded checkpoints are
written and read by torch.distributed.checkpoint (DCP); one process converts them to full ones.
Loading executes no code: tensors are read with weights_only=True, `.metadata` with an unpickler
that admits only a few classes.

    python -m tools.checkpoint list|verify|consolidate ...
"""

import contextlib
import errno
import json
import os
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from pathlib import Path
from pickle import Unpickler, UnpicklingError

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # not public, but in skip_data's docs
from torch.distributed.tensor import DTensor
from torch.futures import Future

FORMAT = 1  # of a run's files, as in docs/reference.md


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read: damage, an I/O error. The message is one line."""

    exit_status = 1


class PathError(ValueError):
    """A path names no checkpoint, or none can be created there. The message is one line."""

    exit_status = 2


def unwrap(error: BaseException) -> BaseException:
    """The exception inside a DCP error: a Ctrl-C, else that of the first rank that failed."""
    if not isinstance(error, dcp.CheckpointException):
        return error
    causes = [cause for cause, _ in error.failures.values()]
    return next((cause for cause in causes if not isinstance(cause, Exception)), causes[0])


def last_line(error: BaseException) -> str:
    """The reason in one line; with the type if the error's text may be a mere name."""
    lines = str(error).strip().splitlines()
    if lines and isinstance(error, (OSError, RuntimeError, ValueError, UnpicklingError)):
        return lines[-1]
    return repr(error)


# --------------------------------------------------------------------------------------------------
# Checkpoints on disk


def step_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first; contents not verified."""
    found = [manifest.parent for manifest in run.glob("checkpoints/step-*/manifest.json")]
    return sorted(path for path in found if path.name.removeprefix("step-").isdecimal())


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint `path`, or all checkpoints of the run folder `path`, oldest first.

    Raises PathError if there are none.
    """
    if (path / "manifest.json").is_file():
        return [path]
    found = list_checkpoints(path)
    if not found:
        problem = f"{path} holds no checkpoint" if path.is_dir() else f"there is no folder {path}"
        raise PathError(f"{problem}: name a run folder such as runs/tiny, or a checkpoint in one")
    return found


def read_manifest(path: Path) -> dict:
    """The manifest of the checkpoint `path`, with the fields that this file reads checked.

    Raises CheckpointError if it is missing or damaged, PathError if its format is not FORMAT.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if not manifest["files"]:
            raise ValueError("it names no file")
        numbers = [manifest["step"], manifest.get("tokens", 0)]
        for name, file in manifest["files"].items():
            if Path(name).name != name:
                raise ValueError(f"it names the file {name}, outside the checkpoint")
            numbers.append(file["bytes"])
        for number in numbers:
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"{number!r} must be an integer of at least 0")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not a complete checkpoint: its manifest.json is damaged: {error!r}"
        ) from None
    if manifest.get("format", FORMAT) != FORMAT:
        raise PathError(
            f"{path} has format {manifest['format']}, and this code reads {FORMAT}: use the "
            "version of nanoshard that wrote it"
        )
    return manifest


def total_bytes(manifest: dict) -> int:
    return sum(file["bytes"] for file in manifest["files"].values())


def checksum(path: Path) -> str:
    """CRC-32 of a file in hexadecimal. Detects damage, not forgery, at several GB/s."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def compare(path: Path, part: int | None = 0, parts: int = 1) -> Iterator[str | None]:
    """Compare a checkpoint with its manifest: yield the problem of each file, or None.

    Compares all sizes, and the checksums of every `parts`-th file starting with `part`, so that
    `parts` ranks can share the reading. `part` None compares sizes only.
    """
    try:
        for index, (name, expected) in enumerate(sorted(read_manifest(path)["files"].items())):
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                yield f"{name} has {size:,} bytes, not {expected['bytes']:,}"
            elif index % parts == part and checksum(path / name) != expected.get("crc32"):
                yield f"{name} has changed since it was written: its checksum differs"
            else:
                yield None
    except FileNotFoundError as error:
        yield f"{Path(error.filename).name} is missing"
    except (CheckpointError, OSError) as error:
        yield str(error)


def verify(path: Path, part: int | None = 0, parts: int = 1) -> str | None:
    """The first problem that `compare` finds, or None."""
    return next(filter(None, compare(path, part, parts)), None)


def last_that_verifies(paths: list[Path], verify: Callable) -> tuple[Path | None, list[str]]:
    """The last of `paths` that verifies, and a "PATH: PROBLEM" for each one after it."""
    passed_over = []
    for path in reversed(paths):
        problem = verify(path)
        if problem is None:
            return path, passed_over
        passed_over.append(f"{path}: {problem}")
    return None, passed_over


def choose_checkpoint(named: Path, program: str) -> Path:
    """The checkpoint `named`, or the latest of the run `named` that verifies.

    Reports on stderr, as `program`, newer ones that failed. Raises PathError and CheckpointError.
    """
    path, passed_over = last_that_verifies(checkpoints_at(named), verify)
    if path is None:
        raise CheckpointError(f"no checkpoint to use: {'; '.join(passed_over)}")
    for line in passed_over:
        print(f"{program}: passed over {line}; using {path}", file=sys.stderr)
    return path


def latest_valid(run: Path) -> tuple[Path | None, list[str]]:
    """`last_that_verifies` for a run. A collective: ranks share the reading and agree."""
    listing = [list_checkpoints(run)]
    dist.broadcast_object_list(listing, src=0)  # hosts may see a shared disk in different states

    def verify_together(path: Path) -> str | None:
        problems: list = [None] * dist.get_world_size()
        dist.all_gather_object(problems, verify(path, dist.get_rank(), dist.get_world_size()))
        return next(filter(None, problems), None)

    return last_that_verifies(listing[0], verify_together)


# --------------------------------------------------------------------------------------------------
# Saving


def flatten(state: dict, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, each with its keys joined by dots."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def copy_to_host(state: dict, host: dict) -> None:
    """Copy nested dicts of tensors to `host`, allocating its memory, the slowest part, only once.

    DCP's DefaultStager takes 1.6 times as long on CPUs, and copies the device mesh as well.
    """
    for key, value in state.items():
        if isinstance(value, dict):
            copy_to_host(value, host.setdefault(key, {}))
            continue
        if key not in host:
            # Pinned memory makes copies from a GPU faster. A DTensor becomes one on the CPU.
            host[key] = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
        host[key].copy_(value)


def sync(path: Path) -> None:
    """fsync a file, or a directory, which puts its new and renamed entries on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_and_checksum(path: Path) -> dict:
    """Return a file's entry in the manifest; compute the checksum while the disk writes."""
    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(sync, path)
        crc32 = checksum(path)
        syncing.result()
    return {"bytes": path.stat().st_size, "crc32": crc32}


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write the last file of a checkpoint, then sync it and the folder."""
    with open(folder / "manifest.json", "w") as file:
        json.dump({"format": FORMAT, **manifest}, file, indent=2)
    sync(folder / "manifest.json")
    sync(folder)


def complete(work: Path, path: Path, manifest: dict) -> None:
    """Turn the temporary directory `work` into the checkpoint `path`, which must not exist."""
    write_manifest(work, manifest)
    os.rename(work, path)
    sync(path.parent)


def why_not_written(error: BaseException, folder: Path) -> str:
    """Why nothing could be written to `folder`, with its free space."""
    reason = last_line(error)
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB"
    except OSError:  # the folder or its disk is gone
        return reason
    # torch reports a full disk only as a file shorter than what it wrote.
    full = ("unexpected pos", os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    if any(sign in reason for sign in full):
        return f"the disk is full, or its quota: {free} free at {folder} ({reason})"
    return f"{reason} ({free} were free on its disk)"


class Writer(dcp.FileSystemWriter):
    """Writes one checkpoint of a Saver.

    DCP calls prepare_global_plan on rank 0, write_data on all ranks, then finish on rank 0, and
    raises an error of one on all.
    """

    def __init__(self, saver: "Saver", path: Path, manifest: dict):
        # sync_files=False: sync_and_checksum does it.
        # per_thread_copy_ahead=0: no CUDA streams. Otherwise even CPU tensors would use the current
        # stream of the saving thread, which is GPU 0's: every rank would get a context on GPU 0.
        work = path.with_name(f".{path.name}.tmp")
        super().__init__(str(work), sync_files=False, per_thread_copy_ahead=0)
        self.saver = saver
        self.final_path = path
        self.manifest = manifest

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        return plan  # DCP's own creates the directory on all ranks at once

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        self.saver.remove_leftovers()
        self.path.mkdir(parents=True)
        for name, contents in self.saver.extra_files.items():
            (self.path / name).write_bytes(contents)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future:
        """Write this rank's shards; `finish` gets the future's value from each rank."""
        future: Future = Future()
        try:
            written = super().write_data(plan, planner).wait()
            own = self.path.glob(f"__{dist.get_rank()}_*.distcp")
            files = {file.name: sync_and_checksum(file) for file in own}
            future.set_result((written, files, self.saver.host_memory()))
        except Exception as error:
            # DCP pickles errors for the other ranks; if that failed, they would wait.
            raise CheckpointError(f"rank {dist.get_rank()}: {last_line(error)}") from None
        return future

    def finish(self, metadata: dcp.Metadata, results: list[tuple]) -> None:
        written, files_of_ranks, memory = zip(*results)
        super().finish(metadata, written)
        names = (".metadata", *self.saver.extra_files)
        files = {name: sync_and_checksum(self.path / name) for name in names}
        for files_of_rank in files_of_ranks:
            files |= files_of_rank
        manifest = self.manifest | {"files": files, "torch": torch.__version__}
        final = self.final_path
        if final.exists():  # damaged, or the run would have continued from it
            os.rename(final, final.with_name(f".{final.name}.damaged.tmp"))
        complete(self.path, final, manifest)
        self.saver.remove_old(final)
        # Not written to the file: dcp.save returns `metadata` on all ranks.
        metadata.row = {
            "bytes": total_bytes(manifest),
            "peak_host_memory": max(peak for _, peak, _ in memory),
            "host_memory_after": memory[0][0],
            "available_host_memory": min(available for _, _, available in memory),
        }


@dataclass
class Saver:
    """Writes the checkpoints of a run. All ranks construct it and call its methods together.

    A checkpoint is written under a temporary name, synced, completed by its manifest and renamed:
    a run killed at any time leaves earlier checkpoints intact. A failed save raises nothing:
    done() and `failure` report it.
    """

    run: Path
    async_save: bool  # training waits only for a copy in host memory; a thread writes the files
    keep_last: int  # checkpoints to keep; 0 keeps all
    keep_every: int  # also keep those whose step is a multiple of this; 0 for none
    timeout: timedelta  # for the collectives of a save
    # Small files to put in every checkpoint, {name: contents}, such as the tokenizer's
    extra_files: dict[str, bytes] = field(default_factory=dict)
    # For log rows: bytes resident in this process, its peak, and bytes available on the host
    host_memory: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)

    def __post_init__(self):
        # The saving thread's collectives must not mix with those of the training step.
        self.group = dist.new_group(backend="gloo", timeout=self.timeout)
        # torch.save's own checksums halve its speed, and the manifest has one for the file.
        torch.serialization.set_crc32_options(False)
        self.host_copy: dict = {}
        self.thread: threading.Thread | None = None
        self.rows: list[dict] = []
        # "cannot write PATH: REASON" if the last finished save failed
        self.failure: str | None = None
        # Estimate for replace_shards after the last save: one process does the work of all ranks,
        # at 100 MB/s or more.
        self.replace_seconds = 0.0

    def save(self, state: dict, manifest: dict) -> None:
        """Save `state`, nested dicts of tensors and DTensors, as step manifest["step"].

        Waits for the previous save. With async_save, returns as soon as `state` may change.
        """
        began = time.perf_counter()
        row = {
            "step": manifest["step"],
            "event": "checkpoint",
            "path": str(step_path(self.run, manifest["step"])),
            "host_memory_before": self.host_memory()[0],
        }
        self.wait()
        if self.async_save:
            copy_to_host(state, self.host_copy)
            row["blocking_seconds"] = time.perf_counter() - began
            arguments = (self.host_copy, manifest, row, began)
            self.thread = threading.Thread(target=self.finish, args=arguments, daemon=True)
            self.thread.start()
        else:
            self.finish(state, manifest, row, began)

    def refuse(self, step: int, reason: str) -> None:
        """Report the save of `step` as failed without trying: earlier checkpoints are better."""
        self.wait()
        path = step_path(self.run, step)
        self.failure = f"cannot write {path}: {reason}"
        row = {"step": step, "event": "checkpoint_failed", "path": str(path), "error": reason}
        self.rows.append(row | {"seconds": 0.0, "blocking_seconds": 0.0})

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def done(self) -> list[dict]:
        """Log rows of the saves finished since the last call.

        Their event is "checkpoint", or "checkpoint_failed" with the reason as `error`.
        """
        rows = list(self.rows)
        del self.rows[: len(rows)]  # not all: the saving thread may have appended meanwhile
        return rows

    def finish(self, state: dict, manifest: dict, row: dict, began: float) -> None:
        """Write the checkpoint and append its log row. Runs in the saving thread if async_save."""
        writer = Writer(self, Path(row["path"]), manifest)
        try:
            row |= dcp.save(state, storage_writer=writer, process_group=self.group).row
            self.failure = None
        except BaseException as error:  # of any kind: a lost save must not pass as success
            cause = unwrap(error)
            if not (self.async_save or isinstance(cause, Exception)):
                raise cause from None  # Ctrl-C ends the run
            del row["host_memory_before"]
            row |= {"event": "checkpoint_failed", "error": why_not_written(cause, self.run)}
            self.failure = f"cannot write {row['path']}: {row['error']}"
            if dist.get_rank() == 0:
                with contextlib.suppress(OSError):  # the next save tries again
                    self.remove_leftovers()
        row["seconds"] = time.perf_counter() - began
        row.setdefault("blocking_seconds", row["seconds"])
        self.rows.append(row)
        if not self.failure:
            alone = dist.get_world_size() * row["seconds"]
            self.replace_seconds = min(alone, row["bytes"] / 100e6)

    def remove_leftovers(self) -> None:
        """Remove what killed or failed saves of this run have left."""
        for leftover in self.run.glob("checkpoints/.*step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def remove_old(self, latest: Path) -> None:
        if not self.keep_last:
            return
        # Listed from disk, not from memory, so that a continued run counts its predecessor's.
        # Checkpoints later than `latest` did not verify and do not count.
        saved = [path for path in list_checkpoints(self.run) if path.name <= latest.name]
        for path in saved[: -self.keep_last]:
            step = int(path.name.removeprefix("step-"))
            if self.keep_every and step % self.keep_every == 0:
                continue
            # Renamed first, so that a run killed meanwhile leaves no incomplete checkpoint.
            removed = path.rename(path.with_name(f".{path.name}.removed.tmp"))
            shutil.rmtree(removed)


# --------------------------------------------------------------------------------------------------
# Loading


class MetadataUnpickler(Unpickler):
    """Reads DCP's `.metadata`, a pickle, but creates only classes that describe tensors.

    BytesStorageMetadata is missing on purpose: it marks entries that DCP loads with plain pickle.
    """

    ALLOWED = {
        "torch": "Size float32 float64 bfloat16 float16 int64 int32 uint8 bool",
        "torch.serialization": "_get_layout",
        "torch.distributed.checkpoint.metadata": (
            "Metadata MetadataIndex StorageMeta TensorStorageMetadata TensorProperties "
            "ChunkStorageMetadata _MEM_FORMAT_ENCODING"
        ),
        "torch.distributed.checkpoint.filesystem": "_StorageInfo",
        "collections": "OrderedDict",
        "pathlib": "PosixPath WindowsPath",
    }

    def find_class(self, module: str, name: str):
        if module == "pathlib._local":  # pathlib's classes in Python 3.13
            module = "pathlib"
        if (module, name) == ("builtins", "getattr"):  # for members of an Enum, up to Python 3.11.3
            return enum_member
        if name not in self.ALLOWED.get(module, "").split():
            raise UnpicklingError(f"{module}.{name} is not allowed in it")
        return super().find_class(module, name)


def enum_member(cls: type[Enum], name: str) -> Enum:
    """What `getattr` is in a pickle that is read safely."""
    if not (isinstance(cls, type) and issubclass(cls, Enum)):
        raise UnpicklingError("builtins.getattr is not allowed in it")
    return cls[name]


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any exception into a CheckpointError: a damaged pickle can raise anything."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        cause = unwrap(error)
        if not isinstance(cause, Exception):
            raise cause from None  # a Ctrl-C
        raise CheckpointError(f"cannot read {path}: {last_line(cause)}") from None


class Reader(dcp.FileSystemReader):
    """DCP's reader, with metadata read safely and on construction.

    DCP itself would retry damaged metadata, with a traceback each time.
    """

    def __init__(self, path: Path):
        super().__init__(str(path))
        with reading(path / ".metadata"), open(path / ".metadata", "rb") as file:
            self.metadata = MetadataUnpickler(file).load()
            for place in self.metadata.storage_data.values():
                # Refuse files outside the checkpoint and decoders registered by extensions.
                name = place.relative_path
                if Path(name).name != name or place.transform_descriptors:
                    raise ValueError(f"it points to {name}")

    def read_metadata(self, *args, **kwargs) -> dcp.Metadata:
        return self.metadata

    def read_tensor(self, name: str) -> Tensor:
        """Read one whole tensor, in this process alone."""
        entry = self.metadata.state_dict_metadata[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        load_shards(self, {name: tensor}, no_dist=True)
        return tensor


def load_state(path: Path, state: dict) -> None:
    """Fill the tensors of `state` in place, from a checkpoint of any mesh and format.

    Tensors are saved by name and global offset, so a rank finds and reads just its shards, whatever
    mesh wrote them. Tensors that `state` lacks are skipped. Raises CheckpointError.
    """
    full = path / "full.pt"
    if full.exists():
        with reading(full):
            load_full(full, state)
    else:
        load_shards(Reader(path), state, no_dist=not dist.is_initialized())


def load_shards(reader: Reader, state: dict, no_dist: bool) -> None:
    """Load from a sharded checkpoint, on all ranks together or in this process alone (no_dist)."""
    with reading(reader.path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # DCP's, for no_dist
        dcp.load(state, storage_reader=reader, no_dist=no_dist)


def load_full(path: Path, state: dict) -> None:
    """Load from one file, mapped into memory: a rank reads only the shards that it copies."""
    full = dict(flatten(torch.load(path, map_location="cpu", mmap=True, weights_only=True)))
    for name, target in flatten(state):
        if name not in full or full[name].shape != target.shape:
            raise ValueError(f"it has no tensor {name} of shape {tuple(target.shape)}")
        source = full[name]
        if isinstance(target, DTensor):
            # Cut by hand: distribute_tensor would first move the full tensor to the mesh's device.
            # DCP's protocol gives the offsets of the one chunk, which no public function does.
            (chunk,) = target.__create_chunk_list__()
            for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes)):
                source = source.narrow(dim, offset, size)  # a view
            target = target.to_local()
        target.copy_(source)


# --------------------------------------------------------------------------------------------------
# One file

LATE_FILES_SECONDS = 90  # how late another host's files may appear: NFS can cache for a minute


def consolidate(path: Path, out: Path) -> Iterator[float]:
    """Write the sharded checkpoint `path` as the checkpoint `out` in the full format.

    Runs in one process and holds one tensor at a time. A new `out` appears complete or not at all.
    If `out` is `path`, adds full.pt, then replaces the manifest and leaves the shards: `path`
    verifies at any time. Yields the share that is done, after each verified file up to a half and
    after each written tensor up to 1. Raises CheckpointError.
    """
    manifest = read_manifest(path)
    for done, problem in enumerate(compare(path), 1):
        if problem:
            raise CheckpointError(f"{path}: {problem}")
        yield done / len(manifest["files"]) / 2
    reader = Reader(path)
    with reading(path / ".metadata"):
        state = empty_state(reader.metadata)
    # An upper bound: one file has smaller headers than the shards
    with new_folder(out, total_bytes(manifest)) as work:
        crc32 = yield from write_full(state, work / "full.pt", reader.read_tensor, done=0.5)
        sync(work / "full.pt")
        kept = {name: file for name, file in manifest["files"].items() if not is_shard(name)}
        full = {"bytes": (work / "full.pt").stat().st_size, "crc32": crc32}
        manifest |= {"files": {**kept, "full.pt": full}, "torch": torch.__version__}
        if out == path:
            write_manifest(work, manifest)
            for name in ("full.pt", "manifest.json"):
                os.replace(work / name, path / name)
                sync(path)
        else:
            for name in kept:
                shutil.copyfile(path / name, work / name)
                sync(work / name)
            complete(work, out, manifest)


def replace_shards(path: Path) -> Iterator[float]:
    """Replace the shards of the checkpoint `path` by full.pt; yields like `consolidate`.

    Does nothing if `path` is full or does not exist. Call it again to complete what a killed
    process left. Raises CheckpointError.
    """
    if not path.exists():
        return
    try:
        if "full.pt" not in read_manifest(path)["files"]:
            deadline = time.monotonic() + LATE_FILES_SECONDS
            while verify(path, part=None) and time.monotonic() < deadline:
                time.sleep(1)
            yield from consolidate(path, path)
        shutil.rmtree(path.with_name(f".{path.name}.tmp"), ignore_errors=True)
        for file in path.iterdir():
            if is_shard(file.name):
                file.unlink()
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{error}; {path} stays in the sharded format") from None


def is_shard(name: str) -> bool:
    return name == ".metadata" or name.endswith(".distcp")


def write_full(
    state: dict, file: Path, read: Callable[[str], Tensor], done: float = 0.0
) -> Generator[float, None, str]:
    """Write nested dicts like torch.save, with one tensor in memory at a time.

    `state` holds fake tensors; read("model.norm.weight") returns the values of one. Yields the
    share of the file after each tensor, from `done` up to 1; returns the CRC-32 of the file.
    """
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(state, file)  # with holes in place of the values
    with FakeTensorMode():
        holes = dict(flatten(torch.load(file, weights_only=True)))
    offsets = {name: hole.untyped_storage()._checkpoint_offset for name, hole in holes.items()}
    crc = 0
    # Not through a mapping of the file: there an I/O error would kill the process.
    with open(file, "r+b") as opened:
        for name in sorted(offsets, key=offsets.get):
            header = opened.read(offsets[name] - opened.tell())
            values = read(name).to(holes[name].dtype).reshape(-1).view(torch.uint8).numpy()
            opened.write(values)
            crc = zlib.crc32(values, zlib.crc32(header, crc))
            del values  # before reading the next one
            yield done + (1 - done) * opened.tell() / file.stat().st_size
        crc = zlib.crc32(opened.read(), crc)
    return f"{crc:08x}"


def check_new(out: Path) -> None:
    """Raise PathError unless the folder `out` can be created."""
    if out.exists():
        raise PathError(f"{out} exists: remove it or choose another name")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise PathError(f"{out} cannot be created: {folder} is a file")


@contextlib.contextmanager
def new_folder(out: Path, size: int) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, for the block to fill with `size` bytes and rename.

    Removes it if the block fails. Raises CheckpointError, at once if the disk has no room.
    """
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise CheckpointError(
            f"{out} needs {size / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB free"
        )
    work = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(work, ignore_errors=True)  # left by a killed process
        work.mkdir(parents=True)
        yield work
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {out}: {why_not_written(error, out.parent)}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def empty_state(metadata: dcp.Metadata) -> dict:
    """The nested dicts of a sharded checkpoint, filled with fake tensors."""
    state: dict = {}
    with FakeTensorMode():
        # planner_data: flat name -> keys of the nested dicts, as ("model", "embed.weight")
        for name, keys in metadata.planner_data.items():
            inner = state
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            tensor = metadata.state_dict_metadata[name]
            inner[keys[-1]] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
    return state


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The full shape of each saved tensor, such as "model.norm.weight". Raises CheckpointError."""
    if (path / "full.pt").exists():
        with reading(path / "full.pt"):
            state = torch.load(path / "full.pt", map_location="cpu", mmap=True, weights_only=True)
            return {name: tuple(tensor.shape) for name, tensor in flatten(state)}
    saved = Reader(path).metadata.state_dict_metadata
    return {name: tuple(entry.size) for name, entry in saved.items()}
