"""Checkpoints: each rank writes the part it owns, all or nothing, and any mesh reads it. Knows nothing of the loop.

    RUN/checkpoints/step-00000100/    __0_0.distcp ...  the tensors, through torch.distributed.checkpoint (DCP)
                                      .metadata         where each tensor lies
                                      manifest.json     step, tokens, config, data; written last

Loading executes nothing: tensors are read with weights_only, `.metadata` with an unpickler that knows only its classes.
"""

import json
import os
import pickle
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, in one line."""


class MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's `.metadata`, which is a pickle, without the power of pickle: only the classes that describe tensors.

    BytesStorageMetadata is left out on purpose: it marks pickled objects, which DCP would load with plain pickle.
    """

    ALLOWED = {
        "torch": {"Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"},
        "torch.serialization": {"_get_layout"},
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "collections": {"OrderedDict"},
        "pathlib": {"PosixPath", "WindowsPath"},
        "pathlib._local": {"PosixPath", "WindowsPath"},  # as Python 3.13 names them
    }

    def find_class(self, module: str, name: str):
        if name not in self.ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint's metadata")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    """DCP's reader, with its metadata read safely, and at once: DCP would retry after an error, with a traceback for each try."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        try:
            with open(path / ".metadata", "rb") as file:
                self.metadata = MetadataUnpickler(file).load()
        except Exception as error:  # a damaged pickle can raise anything
            reason = str(error) or type(error).__name__
            raise CheckpointError(f"cannot read {path}: its .metadata is damaged or hostile: {reason}") from None

    def read_metadata(self, *args, **kwargs) -> dcp.Metadata:
        return self.metadata


def directory(run: Path) -> Path:
    return run / "checkpoints"


def saved(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first, from what is on disk."""
    return sorted(path.parent for path in directory(run).glob("step-*/manifest.json"))


def read_manifest(path: Path) -> dict:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        if not isinstance(manifest["step"], int):
            raise ValueError(f"step {manifest['step']!r}")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is no complete checkpoint: its manifest.json is damaged: {error!r}") from None


def save(run: Path, state: dict, manifest: dict, keep_last: int = 0) -> dict:
    """Write `state` (nested dicts of tensors, sharded or not) as checkpoint manifest["step"]; all ranks call it together.

    Everything is on disk before the rename that makes it a checkpoint: a run killed at any instant leaves the ones
    before it as they were, and what it left half-written is removed by the next save. keep_last > 0 then removes all but
    so many. Returns path, bytes, seconds. Raises CheckpointError on every rank.
    """
    began = time.perf_counter()
    path = directory(run) / f"step-{manifest['step']:08d}"
    work = path.with_name(f".{path.name}.tmp")
    first = dist.get_rank() == 0
    if first:
        for left in directory(run).glob(".step-*.tmp"):
            shutil.rmtree(left)
        work.mkdir(parents=True)
    dist.barrier()
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(str(work), sync_files=True))
    except (dcp.CheckpointException, OSError) as error:
        raise CheckpointError(f"cannot write {path}: {str(error).strip().splitlines()[-1]}") from None
    size = sum(file.stat().st_size for file in work.iterdir()) if first else 0
    if first:
        with open(work / "manifest.json", "w") as file:
            json.dump({**manifest, "bytes": size, "torch": torch.__version__}, file, indent=2)
            os.fsync(file.fileno())
        fsync_directory(work)
        os.rename(work, path)
        fsync_directory(path.parent)
        for old in saved(run)[:-keep_last] if keep_last else []:
            shutil.rmtree(old)
    dist.barrier()
    return {"path": str(path), "bytes": size, "seconds": time.perf_counter() - began}


def fsync_directory(path: Path) -> None:
    """Names are data of their directory: a rename is on disk when that is."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def load(path: Path, state: dict) -> None:
    """Fill the tensors of `state` in place, whatever mesh wrote them; a rank reads its parts only. Raises CheckpointError."""
    try:
        dcp.load(state, storage_reader=Reader(path))
    except (dcp.CheckpointException, OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {str(error).strip().splitlines()[-1]}") from None
