"""A checkpoint in the full format: one file, in which each tensor is one chunk.

One process converts a checkpoint, with one tensor in memory: `train.py --checkpoint full` when the
training is over, and `tools.checkpoint consolidate`.
"""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

import checkpoint
from checkpoint import CheckpointError, PathError

FULL = "full.safetensors"
LATE_FILES_SECONDS = 90  # how late another host's files may appear: NFS can cache for a minute


def consolidate(path: Path, out: Path, report: Callable[[float], None]) -> None:
    """Write the checkpoint `path` as the checkpoint `out` in the full format.

    A new `out` appears complete or not at all. If `out` is `path`, replaces its files so that it
    verifies at any time. Calls `report` with the share that is done. Raises CheckpointError.
    """
    manifest = checkpoint.read_manifest(path)
    if problem := checkpoint.verify(path):
        raise CheckpointError(f"{path}: {problem}")
    reader = checkpoint.Reader(path)
    layout = {name: reader.empty(name) for name in reader.tensors}
    kept = {name: file for name, file in manifest["files"].items() if not is_replaced(name)}
    # An upper bound: one file has smaller headers than many.
    with new_folder(out, checkpoint.total_bytes(manifest)) as work:
        files = kept | write_full(work, layout, reader.read, report)
        if out == path:
            replace_files(path, work, manifest, files)
            return
        for name in kept:
            shutil.copyfile(path / name, work / name)
            checkpoint.sync(work / name)
        checkpoint.complete(work, out, manifest | {"files": files})


def is_replaced(name: str) -> bool:
    return name.endswith(".safetensors") or name == "index.json"


def write_full(
    folder: Path,
    layout: dict[str, Tensor],
    read: Callable[[str], Tensor],
    report: Callable[[float], None],
) -> dict[str, dict]:
    """Write the one file and its index; return their entries in the manifest.

    `layout` has meta tensors, and read(name) returns the values of one.
    """
    parts = checkpoint.local_parts(layout)
    one_rank = checkpoint.bounds_of(parts)[None].numpy()
    tensors, _ = checkpoint.choose_writers(parts, one_rank)
    full = checkpoint.write_safetensors(folder / FULL, layout, read, report)
    return {FULL: full, "index.json": checkpoint.write_index(folder, [FULL], tensors)}


def replace_files(path: Path, work: Path, manifest: dict, files: dict) -> None:
    """Move the new `files` from `work` to `path`, whose manifest agrees with it at any time."""

    def move(name: str) -> None:
        os.replace(work / name, path / name)
        checkpoint.sync(path)

    move(FULL)
    # While the index changes, the manifest names the files of both, and has no checksum of it.
    both = manifest["files"] | files
    del both["index.json"]
    checkpoint.write_manifest(work, manifest | {"files": both})
    move("manifest.json")
    move("index.json")
    checkpoint.write_manifest(work, manifest | {"files": files})
    move("manifest.json")


def replace_shards(path: Path, report: Callable[[float], None]) -> bool:
    """Replace the shards of the checkpoint `path` by one file; return whether there were any.

    Call it again to complete what a killed process left. Raises CheckpointError.
    """
    try:
        names = checkpoint.read_manifest(path)["files"]
        is_sharded = any(is_shard(name) for name in names)
        if is_sharded:
            deadline = time.monotonic() + LATE_FILES_SECONDS
            while not all((path / name).exists() for name in names):
                if time.monotonic() > deadline:
                    break
                time.sleep(1)
            consolidate(path, path, report)
        shutil.rmtree(path.with_name(f".{path.name}.tmp"), ignore_errors=True)
        for file in path.iterdir():
            if is_shard(file.name):
                file.unlink()
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{error}; {path} stays in the sharded format") from None
    return is_sharded


def is_shard(name: str) -> bool:
    return name.endswith(".safetensors") and name != FULL


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
        why = checkpoint.why_not_written(error, out.parent)
        raise CheckpointError(f"cannot write {out}: {why}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
