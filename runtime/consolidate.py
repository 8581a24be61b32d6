"""A checkpoint in the full format: one file, in which each tensor is one chunk.

One process converts a checkpoint, with one tensor in memory: see `tools.checkpoint consolidate`.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
from checkpoint import CheckpointError, PathError

FULL = "full.safetensors"


def consolidate(path: Path, out: Path) -> None:
    """Write the checkpoint `path` as the new checkpoint `out` in the full format.

    `out` appears complete or not at all. Raises CheckpointError and PathError.
    """
    manifest = checkpoint.read_manifest(path)
    with new_folder(out) as work:
        if problem := checkpoint.verify(path):
            raise CheckpointError(f"{path}: {problem}")
        reader = checkpoint.Reader(path)
        layout = {name: entry.full for name, entry in reader.tensors.items()}
        replaced = (".safetensors", "index.json")
        kept = {k: file for k, file in manifest["files"].items() if not k.endswith(replaced)}
        files = kept | write_full(work, layout, lambda name: read_full(reader, name))
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


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, for the block to fill and to rename.

    Removes it if the block fails, which raises CheckpointError. Raises PathError if `out` exists.
    """
    if out.exists():
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
