"""Checkpoints: all or nothing, checked, of any mesh and for any mesh, within a host's memory. Knows nothing of the loop.

    RUN/checkpoints/step-00000100/    __0_0.distcp ...  sharded: what each rank owns, by torch.distributed.checkpoint (DCP)
                                      .metadata                  and where each tensor lies
                                      full.pt           or full: everything in one file that torch.load reads
                                      manifest.json     step, tokens, config, data; sizes and checksums; written last

Loading executes nothing: tensors are read with weights_only, `.metadata` with an unpickler that knows only its classes.

    python checkpoint.py list|verify|consolidate ...
"""

import argparse
import json
import os
import pickle
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
)  # the one way to describe a file of tensors without holding them
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor, distribute_tensor


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, in one line."""


# ---------------------------------------------------------------------------------------------------------------
# What is on disk


def directory(run: Path) -> Path:
    return run / "checkpoints"


def saved(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first; their contents are not checked."""
    return sorted(path.parent for path in directory(run).glob("step-*/manifest.json"))


def read_manifest(path: Path) -> dict:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if not isinstance(manifest["step"], int) or not isinstance(manifest["files"], dict):
            raise ValueError("its fields have other types")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no complete checkpoint: its manifest.json is damaged: {error!r}"
        ) from None


def checksum(path: Path, progress: Callable[[int], None] = lambda size: None) -> str:
    """CRC-32 of a file, in hexadecimal: finds torn and flipped bits at several GB/s; it is no defence against forgery."""
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
            progress(len(block))
    return f"{crc:08x}"


def verify(
    path: Path, part: int = 0, parts: int = 1, progress: Callable[[int], None] = lambda size: None
) -> str | None:
    """What is wrong with a checkpoint, or None. Of `parts` readers each checks the contents of its part of the files."""
    try:
        files = read_manifest(path)["files"]
        for i, (name, want) in enumerate(sorted(files.items())):
            size = (path / Path(name).name).stat().st_size
            if size != want["bytes"]:
                return f"{name} has {size:,} bytes, not {want['bytes']:,}"
            if i % parts == part and checksum(path / Path(name).name, progress) != want["crc32"]:
                return f"{name} has changed since it was written: its checksum differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (CheckpointError, OSError, KeyError, TypeError) as error:
        return str(error)
    return None


def newest(run: Path) -> tuple[Path | None, list[str]]:
    """(the newest checkpoint that verifies, what is wrong with those passed over), on all ranks, which share the reading."""
    box, passed = [saved(run)], []
    dist.broadcast_object_list(box, src=0)  # one listing for all
    for path in reversed(box[0]):
        problems: list = [None] * dist.get_world_size()
        dist.all_gather_object(problems, verify(path, dist.get_rank(), dist.get_world_size()))
        problem = next(filter(None, problems), None)
        if problem is None:
            return path, passed
        passed.append(f"{path}: {problem}")
    return None, passed


# ---------------------------------------------------------------------------------------------------------------
# Saving


def host_memory() -> dict[str, int]:
    """Bytes: resident in this process now and at most so far, and available on its host; 0 where the system does not tell."""
    try:
        lines = (
            Path("/proc/self/status").read_text() + Path("/proc/meminfo").read_text()
        ).splitlines()
    except OSError:
        return {"resident": 0, "peak": 0, "available": 0}
    fields = (line.partition(":") for line in lines)
    found = {name: int(rest.split()[0]) * 1024 for name, _, rest in fields if rest.endswith("kB")}
    return {"resident": found["VmRSS"], "peak": found["VmHWM"], "available": found["MemAvailable"]}


def check_full(parameters: int) -> None:
    """Refuse `full` where its 12 bytes a parameter (a weight and two moments in float32) are not free on this host."""
    need, free = 12 * parameters, host_memory()["available"]
    if free and need > free:
        raise CheckpointError(
            f"--checkpoint full gathers 12 bytes x {parameters:,} parameters = {need / 1e9:,.1f} GB on the first host, which has "
            f"{free / 1e9:,.1f} GB free: use --checkpoint sharded"
        )


def flatten(state: dict, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dicts, with their keys joined by dots."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def assemble(state: dict) -> dict:
    """The whole tensors, on rank 0 in host memory; the others hold one at a time, on the device, and keep none."""
    whole = {}
    for key, value in state.items():
        if isinstance(value, dict):
            whole[key] = assemble(value)
        else:
            tensor = value.full_tensor() if isinstance(value, DTensor) else value
            if dist.get_rank() == 0:
                whole[key] = tensor.to("cpu", copy=True)
    return whole


def clone(state: dict) -> dict:
    return {
        key: clone(value) if isinstance(value, dict) else value.clone()
        for key, value in state.items()
    }


class Saver:
    """Writes the checkpoints of a run. `form` is sharded or full; all ranks call it together.

    A checkpoint is written under a temporary name, flushed to disk, completed by its manifest and renamed: a run killed
    at any instant leaves those before it as they were. A save that fails is reported, and the run goes on with the
    checkpoint before. With `asynchronous`, only the copy to host memory holds the run up; the writing follows in a
    thread, on a process group of its own, one at a time.
    """

    def __init__(
        self,
        run: Path,
        form: str,
        asynchronous: bool,
        keep_last: int,
        keep_every: int,
        timeout: timedelta,
    ):
        self.run, self.form, self.asynchronous, self.keep_last, self.keep_every = (
            run,
            form,
            asynchronous,
            keep_last,
            keep_every,
        )
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self.first = dist.get_rank() == 0
        torch.serialization.set_crc32_options(
            False
        )  # torch.save's own, at half the speed; the manifest's cover its files
        self.thread: threading.Thread | None = None
        self.stager, self.copy = BlockingAsyncStager(cache_staged_state_dict=True), None
        self.rows: list[dict] = []

    def save(self, state: dict, manifest: dict) -> None:
        """Begin to save `state`, nested dicts of tensors, sharded or not, as step manifest["step"]; waits for the save before."""
        began, before = time.perf_counter(), host_memory()
        self.wait()
        if self.form == "full":
            state = assemble(state)
        elif self.asynchronous:
            state = self.copy_to_host(state)
        if self.asynchronous:
            blocking = time.perf_counter() - began
            self.thread = threading.Thread(
                target=self.finish, args=(state, manifest, before, began, blocking), daemon=True
            )
            self.thread.start()
        else:
            self.finish(state, manifest, before, began, None)

    def finish(
        self, state: dict, manifest: dict, before: dict, began: float, blocking: float | None
    ) -> None:
        path = directory(self.run) / f"step-{manifest['step']:08d}"
        row = {"step": manifest["step"], "event": "checkpoint", "path": str(path)}
        try:
            row |= self.write(path, state, manifest, before)
        except (dcp.CheckpointException, OSError, RuntimeError) as error:
            free = (
                shutil.disk_usage(self.run).free / 1e6
            )  # torch hides a full disk behind its own errors
            reason = f"{str(error).strip().splitlines()[-1]} ({free:,.1f} MB were free on its disk)"
            row |= {"event": "checkpoint_failed", "error": reason}
            if self.first:
                self.remove_leftovers()
        seconds = time.perf_counter() - began
        self.rows.append(
            row
            | {"seconds": seconds, "blocking_seconds": seconds if blocking is None else blocking}
        )

    def copy_to_host(self, state: dict) -> dict:
        """A copy of this rank's parts, in memory that is kept for the next: fresh pages would cost most of the time.

        DCP's stager pins it and knows the DTensors of GPUs; on a CPU there is nothing to pin.
        """
        if any(tensor.device.type != "cpu" for _, tensor in flatten(state)):
            return self.stager.stage(state)
        if self.copy is None:
            self.copy = clone(state)
        else:
            for (_, target), (_, source) in zip(flatten(self.copy), flatten(state)):
                target.copy_(source)
        return self.copy

    def done(self) -> list[dict]:
        """The rows of saves that ended since the last call, for the log: event "checkpoint", or "checkpoint_failed" and why."""
        rows, self.rows = self.rows, []
        return rows

    def wait(self) -> None:
        if self.thread:
            self.thread.join()
            self.thread = None

    def write(self, path: Path, state: dict, manifest: dict, before: dict) -> dict:
        """Write, flush, take checksums; then, on rank 0, make it a checkpoint. Returns bytes and memory; raises on all ranks."""
        work = path.with_name(f".{path.name}.tmp")
        self.on_first(lambda: self.clear(work))
        if self.form == "sharded":  # DCP lets one of the ranks that hold a copy write it
            dcp.save(
                state,
                storage_writer=dcp.FileSystemWriter(str(work), sync_files=False),
                process_group=self.group,
            )
            own = [
                *work.glob(f"__{dist.get_rank()}_*.distcp"),
                *([work / ".metadata"] if self.first else []),
            ]
        else:
            self.on_first(lambda: torch.save(state, work / "full.pt"))
            own = [work / "full.pt"] if self.first else []
        mine = self.together(lambda: {file.name: flush(file) for file in own})
        reports: list = [None] * dist.get_world_size()
        dist.all_gather_object(reports, (mine, host_memory()), group=self.group)
        files = {name: entry for entries, _ in reports for name, entry in entries.items()}
        self.on_first(
            lambda: self.complete(
                work, path, manifest | {"files": files, "torch": torch.__version__}
            )
        )
        return {
            "bytes": sum(entry["bytes"] for entry in files.values()),
            "peak_host_memory": max(memory["peak"] for _, memory in reports),
            "host_memory_before": before["resident"],
            "host_memory_after": host_memory()["resident"],
            "available_host_memory": min(memory["available"] for _, memory in reports),
        }

    def remove_leftovers(self) -> None:
        """What killed or failed saves of this run left half-written."""
        for left in directory(self.run).glob(".step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)

    def clear(self, work: Path) -> None:
        self.remove_leftovers()
        work.mkdir(parents=True)

    def complete(self, work: Path, path: Path, manifest: dict) -> None:
        with open(work / "manifest.json", "w") as file:
            json.dump(manifest, file, indent=2)
        flush(work / "manifest.json")
        flush(work)
        if path.exists():  # one that did not verify, else the run would have begun there
            os.rename(path, path.with_name(f".{path.name}.damaged.tmp"))
        os.rename(work, path)
        flush(path.parent)  # a rename is on disk when its directory is
        # From what is on disk, never from memory; what is newer than this did not verify and counts for nothing.
        older = [other for other in saved(self.run) if other.name <= path.name]
        for other in older[: -self.keep_last] if self.keep_last else []:
            if not self.keep_every or int(other.name.removeprefix("step-")) % self.keep_every:
                # Renamed first: killed while it removes files, the run leaves no checkpoint that lacks some.
                shutil.rmtree(other.rename(other.with_name(f".{other.name}.removed.tmp")))

    def on_first(self, work: Callable[[], None]) -> None:
        """Do it on rank 0, and raise its error on all."""
        self.together(work if self.first else lambda: None)

    def together(self, work: Callable):
        """Do it on each rank, and raise an error of any on all."""
        try:
            result, error = work(), None
        except (OSError, RuntimeError) as failure:
            result, error = None, f"rank {dist.get_rank()}: {failure}"
        errors: list = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error, group=self.group)
        if found := next(filter(None, errors), None):
            raise CheckpointError(found)
        return result


def flush(path: Path) -> dict:
    """Bring a file or directory to disk, and read a file's checksum meanwhile."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(1) as pool:
            crc = None if path.is_dir() else pool.submit(checksum, path)
            os.fsync(descriptor)
            return {"bytes": path.stat().st_size, "crc32": crc.result()} if crc else {}
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------
# Loading


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's `.metadata`, which is a pickle, without the power of pickle: only the classes that describe tensors.

    BytesStorageMetadata is left out on purpose: it marks pickled objects, which DCP would load with plain pickle.
    """

    ALLOWED = {
        "torch": {
            "Size",
            "float32",
            "float64",
            "bfloat16",
            "float16",
            "int64",
            "int32",
            "uint8",
            "bool",
        },
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.metadata": {
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "WindowsPath"},
        "pathlib._local": {"PosixPath", "WindowsPath"},  # as Python 3.13 names them
    }

    def find_class(self, module: str, name: str):
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(
                f"it names {module}.{name}, which has no place in a checkpoint's metadata"
            )
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """DCP's reader, with its metadata read safely, and at once: after an error DCP would try again, a traceback each time."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        try:
            with open(path / ".metadata", "rb") as file:
                self.metadata = MetadataUnpickler(file).load()
            if not isinstance(self.metadata, dcp.Metadata):
                raise ValueError(f"it holds a {type(self.metadata).__name__}")
            for place in self.metadata.storage_data.values():
                if (
                    Path(place.relative_path).name != place.relative_path
                    or place.transform_descriptors
                ):
                    raise ValueError(f"it points to {place.relative_path}")
        except Exception as error:  # a damaged pickle can raise anything
            reason = str(error) or type(error).__name__
            raise CheckpointError(
                f"cannot read {path}: its .metadata is damaged or hostile: {reason}"
            ) from None

    def read_metadata(self, *args, **kwargs) -> dcp.Metadata:
        return self.metadata


def load(path: Path, state: dict) -> None:
    """Fill the tensors of `state` in place, whatever mesh and form wrote them; a rank reads its parts. Raises CheckpointError."""
    try:
        if (path / "full.pt").exists():
            load_full(path / "full.pt", state)
        else:
            dcp.load(state, storage_reader=Reader(path), no_dist=not dist.is_initialized())
    except CheckpointError:
        raise
    except (
        dcp.CheckpointException,
        OSError,
        ValueError,
        RuntimeError,
        pickle.UnpicklingError,
    ) as error:
        raise CheckpointError(
            f"cannot read {path}: {str(error).strip().splitlines()[-1]}"
        ) from None


def load_full(path: Path, state: dict) -> None:
    """The file is mapped, not read: of each tensor a rank touches the part that it copies."""
    whole = dict(flatten(torch.load(path, map_location="cpu", mmap=True, weights_only=True)))
    for name, target in flatten(state):
        if name not in whole or whole[name].shape != target.shape:
            raise ValueError(f"it lacks {name} {tuple(target.shape)}")
        source = whole[name]
        if isinstance(target, DTensor):
            source = distribute_tensor(
                source, target.device_mesh, target.placements, src_data_rank=None
            )
        target.copy_(source)


# ---------------------------------------------------------------------------------------------------------------
# Commands


def consolidate(path: Path, out: Path, progress: Callable[[str], None]) -> None:
    """Sharded -> one file like `full`, in one process, with one tensor at a time in memory. Raises CheckpointError."""
    if out.exists():
        raise CheckpointError(f"{out} exists: remove it or choose another name")
    reader, state = Reader(path), {}
    metadata = reader.metadata.state_dict_metadata
    with FakeTensorMode() as fake:
        for name, (
            *keys,
            last,
        ) in reader.metadata.planner_data.items():  # dotted name -> the keys of the nested dicts
            inner = state
            for key in keys:
                inner = inner.setdefault(key, {})
            inner[last] = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
    work = out.with_name(f".{out.name}.tmp")
    with torch.serialization.skip_data(
        materialize_fake_tensors=True
    ):  # the file with room for the values, but none yet
        torch.save(state, work)
    with fake:
        empty = torch.load(work, weights_only=True)
        places = {
            name: tensor.untyped_storage()._checkpoint_offset for name, tensor in flatten(empty)
        }
    with open(work, "r+b") as file:
        for i, (name, offset) in enumerate(places.items()):
            tensor = torch.empty(metadata[name].size, dtype=metadata[name].properties.dtype)
            dcp.load({name: tensor}, storage_reader=reader, no_dist=True)
            file.seek(offset)
            file.write(tensor.flatten().view(torch.uint8).numpy())
            if i % 50 == 0 or i == len(places) - 1:
                progress(f"{i + 1} of {len(places)} tensors")
    flush(work)
    os.rename(work, out)


def list_run(run: Path) -> None:
    paths = saved(run)
    if not paths:
        raise CheckpointError(f"{run} has no checkpoints")
    for path in paths:
        manifest = read_manifest(path)
        size = sum(entry["bytes"] for entry in manifest["files"].values())
        print(
            f"{path}  step {manifest['step']:,}  {manifest.get('tokens', 0):,} tokens  {size / 1e6:,.1f} MB"
        )


def verify_with_progress(path: Path) -> None:
    size, seen, shown = (
        sum(entry["bytes"] for entry in read_manifest(path)["files"].values()),
        0,
        0.0,
    )

    def progress(block: int) -> None:
        nonlocal seen, shown
        seen += block
        if time.monotonic() - shown > 2 or seen == size:
            shown = time.monotonic()
            print(f"read {seen / 1e6:,.1f} of {size / 1e6:,.1f} MB")

    if problem := verify(path, progress=progress):
        raise CheckpointError(f"{path}: {problem}")
    print(f"{path}: complete and unchanged")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Look at checkpoints, check them, and turn sharded ones into one file."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("list", help="the checkpoints of a run, with step, tokens and size")
    add.add_argument("path", metavar="RUN", type=Path)
    add = commands.add_parser(
        "verify", help="read a checkpoint and compare sizes and checksums with its manifest"
    )
    add.add_argument("path", metavar="CKPT", type=Path)
    add = commands.add_parser(
        "consolidate", help="write a sharded checkpoint as one file for torch.load"
    )
    add.add_argument("path", metavar="CKPT", type=Path)
    add.add_argument("out", metavar="OUT.pt", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings(
        "ignore", "torch.distributed is disabled"
    )  # one process is what these commands are for
    try:
        if args.command == "list":
            list_run(args.path)
        elif args.command == "verify":
            verify_with_progress(args.path)
        else:
            consolidate(args.path, args.out, print)
    except (CheckpointError, OSError) as error:
        print(f"checkpoint.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
