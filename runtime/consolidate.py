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

import torch
from torch import Tensor

import checkpoint
from checkpoint import CheckpointError, PathError
from runtime import console

FULL = "full.safetensors"
LATE_FILES_SECONDS = 90  # how late another host's files may appear: NFS can cache for a minute


def consolidate(path: Path, out: Path) -> None:
    """Write the checkpoint `path` as the checkpoint `out` in the full format.

    A new `out` appears complete or not at all. If `out` is `path`, replaces its files so that it
    verifies at any time. Raises CheckpointError.
    """
    manifest = checkpoint.read_manifest(path)
    with new_folder(out, replaces=out == path) as work:
        if problem := checkpoint.verify(path):
            raise CheckpointError(f"{path}: {problem}")
        reader = checkpoint.Reader(path)
        layout = {name: entry.full for name, entry in reader.tensors.items()}
        replaced = (".safetensors", "index.json")
        kept = {k: file for k, file in manifest["files"].items() if not k.endswith(replaced)}
        files = kept | write_full(work, layout, lambda name: read_full(reader, name))
        if out == path:
            replace_files(path, work, manifest, files)
            return
        for name in kept:
            checkpoint.write_file(work / name, [(path / name).read_bytes()])
        checkpoint.complete(work, out, manifest | {"files": files})


def read_full(reader: checkpoint.Reader, name: str) -> Tensor:
    """A full tensor of a checkpoint. Raises CheckpointError."""
    full = reader.tensors[name].full
    pieces = list(reader.overlaps(name, (0,) * full.dim(), full.shape))
    full = torch.empty_like(full, device="cpu")  # not before: the files have as many bytes
    for place, saved in pieces:
        full[place] = saved
    return full


def write_full(
    folder: Path, layout: dict[str, Tensor], read: Callable[[str], Tensor]
) -> dict[str, dict]:
    """Write the one file and its index; return their entries in the manifest.

    `layout` has meta tensors, and read(name) returns the values of one.
    """
    index = {}
    for name, tensor in layout.items():
        dtype, cuts = checkpoint.DTYPE_NAMES[tensor.dtype], [[0]] * tensor.dim()
        index[name] = {"dtype": dtype, "shape": [*tensor.shape], "cuts": cuts, "grid": [0]}
    full = checkpoint.write_safetensors(folder / FULL, layout, read)
    return {FULL: full, "index.json": checkpoint.write_index(folder, [FULL], index)}


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


def consolidate_last(run: Path, step: int | None) -> None:
    """Turn the checkpoint of `step` into one file, at the end of a run that saved it.

    On rank 0, after the process group has ended: no other rank waits, and no timeout applies.
    Raises CheckpointError and leaves the sharded checkpoint.
    """
    if step is None:
        return
    began = time.perf_counter()
    path = checkpoint.step_path(run, step)
    with console.live(lambda: "consolidating"):
        is_new = replace_shards(path)
    if is_new:
        seconds = time.perf_counter() - began
        with contextlib.suppress(OSError):  # nobody takes the line
            print(f"consolidated {path} in {FULL} in {seconds:.2f} s", flush=True)


def replace_shards(path: Path) -> bool:
    """Replace the shards of the checkpoint `path` by one file; return whether there were any.

    Call it again to complete what a killed process left. Raises CheckpointError.
    """

    def is_shard(name: str) -> bool:
        return name.endswith(".safetensors") and name != FULL

    try:
        names = checkpoint.read_manifest(path)["files"]
        is_sharded = any(map(is_shard, names))
        if is_sharded:
            for _ in range(LATE_FILES_SECONDS):
                if all((path / name).exists() for name in names):
                    break
                time.sleep(1)
            consolidate(path, path)
        shutil.rmtree(path.with_name(f".{path.name}.tmp"), ignore_errors=True)
        for file in filter(is_shard, os.listdir(path)):
            (path / file).unlink()
    except (CheckpointError, OSError) as error:
        raise CheckpointError(f"{error}; {path} stays in the sharded format") from None
    return is_sharded


@contextlib.contextmanager
def new_folder(out: Path, replaces: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, for the block to fill and to rename.

    Removes it if the block fails, which raises CheckpointError. Raises PathError if `out` exists,
    unless the block `replaces` what it holds.
    """
    if out.exists() and not replaces:
        raise PathError(f"{out} exists: remove it or choose another name")
    work = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(work, ignore_errors=True)  # left by a killed process
        work.mkdir(parents=True)
        yield work
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"cannot write {out}: {checkpoint.reason(error)}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
