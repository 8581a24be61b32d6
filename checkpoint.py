"""Checkpoints: atomic, verified, in files that anyone can open, loadable on any mesh.

    RUN/checkpoints/step-00000100/
        rank-00000.safetensors ...  the chunks of tensors that each rank wrote
        full.safetensors            full format: instead, one file in which each tensor is one chunk
        index.json                  which file holds which chunk of a tensor
        tokenizer.*                 the tokenizer, if it is a file
        manifest.json               step, tokens, config, data; file sizes and checksums

The manifest is written last: a directory without one is not a checkpoint. Nothing in these files
can be executed. A safetensors file is 8 bytes with the size of its header, the header in JSON and
the bytes of its tensors (https://github.com/huggingface/safetensors#format). index.json is

    {"files": ["rank-00000.safetensors", "rank-00001.safetensors"],
     "tensors": {"model.embed.weight": {"dtype": "F32", "shape": [320, 64],
                                        "cuts": [[0, 160], [0]], "grid": [0, 1]}, ...}}

`cuts` has the indices at which chunks begin, for each dimension; `grid` the file of each chunk, row
by row. In its file, a chunk has the name of its tensor.
"""

import contextlib
import itertools
import json
import math
import mmap
import os
import shutil
import sys
import threading
import time
import weakref
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

FORMAT = 2  # of a run's files, as in docs/reference.md
HEADER_LIMIT = 100_000_000  # bytes, of the package safetensors
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
    **{"C64": torch.complex64, "BOOL": torch.bool},
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read: damage, an I/O error. The message is one line."""

    exit_status = 1


class PathError(ValueError):
    """A path names no checkpoint, or none can be created there. The message is one line."""

    exit_status = 2


def reason(error: BaseException) -> str:
    """The last line of an error's text; with the type if the text may be a mere name."""
    lines = str(error).splitlines()
    return lines[-1] if lines and not isinstance(error, LookupError) else repr(error)


# --------------------------------------------------------------------------------------------------
# Checkpoints on disk


def step_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """100 for a folder step-00000100; None for one with another name."""
    before, _, digits = path.name.partition("step-")
    return int(digits) if not before and digits.isdecimal() else None


def list_checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; contents not verified, manifests perhaps missing."""
    paths = [path for path in run.glob("checkpoints/step-*") if path.is_dir()]
    return sorted((path for path in paths if step_of(path) is not None), key=step_of)


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoint `path`, or all checkpoints of the run folder `path`, oldest first.

    Raises PathError if there are none.
    """
    found = list_checkpoints(path)
    if (path / "manifest.json").is_file() or (path.is_dir() and step_of(path) and not found):
        return [path]  # even if its manifest is missing
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
        files = manifest["files"]
        sizes = [file["bytes"] for file in files.values()]
        for number in (manifest["step"], manifest.get("tokens", 0), *sizes):
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"{number!r} must be an integer of at least 0")
        if not files or any(Path(name).name != name for name in files):
            raise ValueError("it names no file, or a file outside the checkpoint")
        version = manifest.get("format", 1)
    except Exception as error:
        problem = "missing" if isinstance(error, FileNotFoundError) else f"damaged: {error!r}"
        raise CheckpointError(
            f"{path} is not a complete checkpoint: its manifest.json is {problem}"
        ) from None
    if version != FORMAT:
        wrote = "version 0.2.0 of nanoshard" if version == 1 else "the version that wrote it"
        raise PathError(f"{path} has format {version}, and this code reads {FORMAT}: use {wrote}")
    if step_of(path) not in (None, manifest["step"]):
        raise CheckpointError(
            f"{path} holds step {manifest['step']}, says its manifest.json: rename the folder back"
        )
    return manifest


def total_bytes(manifest: dict) -> int:
    return sum(file["bytes"] for file in manifest["files"].values())


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; follow no link, and do not wait for a pipe."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK
    return open(path, "rb", opener=lambda name, mode: os.open(name, mode | flags))


def verify(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """Compare a checkpoint with its manifest: return the first problem, or None.

    Compares all sizes, and the checksums of every `parts`-th file starting with `part`, so that
    `parts` ranks can share the reading. CRC-32 detects damage, not forgery, at about 1 GB/s.
    """
    try:
        for number, (name, expected) in enumerate(sorted(read_manifest(path)["files"].items())):
            size = (path / name).lstat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes, not {expected['bytes']:,}"
            if number % parts != part:
                continue
            crc = 0
            with open_regular(path / name) as file:
                while block := file.read(1 << 20):
                    crc = zlib.crc32(block, crc)
            if f"{crc:08x}" != expected.get("crc32"):
                return f"{name} has changed since it was written: its checksum differs"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


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


def rank_and_size() -> tuple[int, int]:
    return (
        (torch.distributed.get_rank(), torch.distributed.get_world_size())
        if torch.distributed.is_initialized()
        else (0, 1)
    )


def all_gather(value, group: torch.distributed.ProcessGroup | None = None) -> list:
    """The values of all ranks; without a process group, of this process."""
    values = [value] * rank_and_size()[1]
    if torch.distributed.is_initialized():
        torch.distributed.all_gather_object(values, value, group=group)
    return values


def latest_valid(run: Path) -> tuple[Path | None, list[str]]:
    """`last_that_verifies` for a run. A collective: ranks share the reading and agree."""
    paths = all_gather(list_checkpoints(run))[0]  # hosts may see a shared disk in different states

    def verify_together(path: Path) -> str | None:
        return next(filter(None, all_gather(verify(path, *rank_and_size()))), None)

    return last_that_verifies(paths, verify_together)


# --------------------------------------------------------------------------------------------------
# Loading


def flatten(state: dict, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, each with its keys joined by dots."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class LocalPart(NamedTuple):
    """This rank's part of a tensor: `local` begins at the indices `start` of the whole."""

    local: Tensor
    start: tuple[int, ...]
    full_shape: tuple[int, ...]


def local_part(tensor: Tensor) -> LocalPart:
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return LocalPart(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
    # Not public. It also knows rows that are split twice, over tp and then over dp_shard.
    (chunk,) = tensor.__create_chunk_list__()
    return LocalPart(tensor.to_local(), tuple(chunk.offsets), tuple(tensor.shape))


def load_state(path: Path, state: dict) -> None:
    """Fill the tensors of `state` in place, from a checkpoint of any mesh and format.

    A checkpoint loads on any mesh because it does not know of meshes. A mesh only decides how a
    tensor is cut: fsdp by rows, tp by rows or columns, single not at all. On disk, a chunk is known
    by the name of its tensor and the indices at which it begins in the full tensor, not by a rank.
    In memory, each rank knows its own part in the same way. It copies what the two have in common:

        saved by fsdp on 4 ranks       | rows 0-2 | rows 3-5 | rows 6-8 | 9 |
        part of rank 0 of 2, with tp   |    rows 0-4    |
        copied                          rows 0-2   3-4

    Files are mapped into memory, so that only what is copied is read. There is no collective: each
    rank loads alone. Tensors that `state` lacks are skipped. Raises CheckpointError before anything
    is changed.
    """
    reader = Reader(path)
    copies = []
    for name, tensor in flatten(state):
        part = local_part(tensor)
        if name not in reader.tensors or reader.empty(name).shape != part.full_shape:
            raise CheckpointError(
                f"cannot read {path}: it has no tensor {name} of shape {part.full_shape}"
            )
        for place, saved in reader.overlaps(name, part.start, part.local.shape):
            copies.append((part.local[place], saved))
    for target, saved in copies:
        target.copy_(saved)
        reader.release(saved.nbytes)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The full shape of each saved tensor, such as "model.norm.weight". Raises CheckpointError."""
    reader = Reader(path)
    return {name: tuple(reader.empty(name).shape) for name in reader.tensors}


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any exception into a CheckpointError: damaged JSON can raise most of them."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"cannot read {path}: {reason(error)}") from None


class Reader:
    """The tensors of a checkpoint, by name. Methods raise CheckpointError for damage."""

    def __init__(self, path: Path):
        self.path = path
        self.mapped: dict[str, tuple[dict[str, Tensor], mmap.mmap]] = {}  # file -> its chunks
        self.used = 0  # bytes read since the last release
        with reading(path / "index.json"), open_regular(path / "index.json") as file:
            index = json.load(file)
            self.files: list[str] = index["files"]
            self.tensors: dict[str, dict] = dict(index["tensors"].items())
            for name in self.files:
                if Path(name).name != name or not name.endswith(".safetensors"):
                    raise ValueError(f"it points to {name}")

    def empty(self, name: str) -> Tensor:
        """A saved tensor's shape and dtype, as a meta tensor."""
        with reading(self.path / "index.json"):
            entry = self.tensors[name]
            return torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta")

    def overlaps(
        self, name: str, start: Iterable[int], shape: Iterable[int]
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield what the saved chunks have of a part of a tensor: where in the part, the values.

        The part begins at the indices `start` of the full tensor.
        """
        edges, grid = self.grid(name)
        dims = []  # for each dimension, the chunks that overlap the part
        for edge, begin, size in zip(edges, start, shape):
            found = []
            for i in range(bisect_right(edge, begin) - 1, bisect_left(edge, begin + size)):
                low, high = max(begin, edge[i]), min(begin + size, edge[i + 1])
                in_chunk = slice(low - edge[i], high - edge[i])
                found.append((i, edge[i + 1] - edge[i], slice(low - begin, high - begin), in_chunk))
            dims.append(found)
        for position in itertools.product(*dims):
            indices, sizes, in_part, in_chunk = zip(*position) if position else [()] * 4
            yield in_part, self.chunk(name, self.files[grid[indices]], sizes)[in_chunk]

    def grid(self, name: str) -> tuple[list[list[int]], np.ndarray]:
        """The edges of a tensor's chunks in each dimension, and the number of each chunk's file."""
        shape = self.empty(name).shape
        with reading(self.path / "index.json"):
            cuts = zip(self.tensors[name]["cuts"], shape, strict=True)
            edges = [np.array([*cut, size]) for cut, size in cuts]
            grid = np.array(self.tensors[name]["grid"]).reshape([len(edge) - 1 for edge in edges])
            is_cover = all(array.dtype.kind == "i" for array in (*edges, grid))
            for edge in edges:  # ascending from 0 to the size
                is_cover = is_cover and edge[0] == 0 and (np.diff(edge) >= min(edge[-1], 1)).all()
            # Each file has one chunk at most, so that no tensor is larger than all files.
            if not is_cover or len(np.unique(grid)) < grid.size or grid.min() < 0:
                raise ValueError(f"the chunks of {name} do not make up the whole")
            if grid.max() >= len(self.files):
                raise ValueError(f"it has no file {grid.max()}")
        return [edge.tolist() for edge in edges], grid

    def chunk(self, name: str, file: str, shape: tuple[int, ...]) -> Tensor:
        """The chunk of a tensor in one file, mapped into memory."""
        if file not in self.mapped:
            self.mapped[file] = map_safetensors(self.path / file)
        chunk = self.mapped[file][0].get(name)
        dtype = self.empty(name).dtype
        if chunk is None or (chunk.shape, chunk.dtype) != (shape, dtype):
            where = f"cannot read {self.path / file}"
            raise CheckpointError(f"{where}: it has no {name} of shape {shape}, {dtype}")
        return chunk

    def release(self, used: int) -> None:
        """Count `used` bytes as copied; now and then, take mapped pages out of this process."""
        self.used += used
        if self.used > 64e6:
            self.used = 0
            for _, buffer in self.mapped.values():
                buffer.madvise(mmap.MADV_DONTNEED)

    def read(self, name: str) -> Tensor:
        """A full tensor; mapped, if it is one chunk."""
        full = self.empty(name)
        self.release(full.nbytes)
        pieces = list(self.overlaps(name, (0,) * full.dim(), full.shape))
        if len(pieces) == 1:
            return pieces[0][1]
        full = torch.empty_like(full, device="cpu")  # the files have as many bytes
        for place, saved in pieces:
            full[place] = saved
        return full


def map_safetensors(path: Path) -> tuple[dict[str, Tensor], mmap.mmap]:
    """The tensors of a safetensors file, and its mapping. Raises CheckpointError for damage.

    Their bytes must follow one another without a gap, as the format demands. So none lies outside
    the file, and all have as many bytes as the file.
    """
    tensors = {}
    with reading(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > min(size, HEADER_LIMIT):
            raise ValueError(f"its header ends at byte {start:,} of {size:,}")
        header = json.loads(file.read(start - 8))
        header.pop("__metadata__", None)
        data_end = 0
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
            dtype = DTYPES[entry["dtype"]]
            like = torch.empty(shape, dtype=dtype, device="meta")  # refuses absurd shapes
            if begin != data_end or end != begin + like.nbytes or start + end > size:
                raise ValueError(f"the bytes {begin:,} to {end:,} of {name} are not its own")
            data_end = end
            tensors[name] = torch.empty_like(like, device="cpu")
            if like.numel():
                place = {"count": like.numel(), "offset": start + begin}
                tensors[name] = torch.frombuffer(buffer, dtype=dtype, **place).view(shape)
        if start + data_end != size:
            raise ValueError(f"its tensors end at byte {start + data_end:,} of {size:,}")
    return tensors, buffer


# --------------------------------------------------------------------------------------------------
# Files


def sync(path: Path) -> None:
    """fsync a file, or a directory, which puts its new and renamed entries on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, blocks: Iterable) -> dict:
    """Write bytes, or arrays of them, to a file and to disk; return its entry in the manifest."""
    crc = 0
    with open(path, "wb", buffering=0) as file:
        for block in blocks:
            rest = memoryview(block)
            while rest:
                written = file.write(rest[: 1 << 20])
                crc = zlib.crc32(rest[:written], crc)
                rest = rest[written:]
            del block, rest  # before the next one is read
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "crc32": f"{crc:08x}"}


def write_index(folder: Path, files: list[str], tensors: dict[str, dict]) -> dict:
    text = json.dumps({"files": files, "tensors": tensors}, separators=(",", ":"))
    return write_file(folder / "index.json", [text.encode()])


def write_safetensors(
    path: Path,
    layout: dict[str, Tensor],
    read: Callable[[str], Tensor] | None = None,
    report: Callable[[float], None] = lambda share: None,
) -> dict:
    """Write the tensors `layout` to a file, from where they lie; return its entry in the manifest.

    With `read`, `layout` has meta tensors, and read(name) returns the values of one. Calls `report`
    with the share that is done.
    """
    # By falling element size, behind a header padded to 8 bytes, each tensor is aligned.
    layout = dict(sorted(layout.items(), key=lambda item: -item[1].itemsize))
    header: dict = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in layout.items():
        begin, end = end, end + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"{len(layout):,} tensors are too many for one safetensors file")

    def blocks() -> Iterator:
        yield len(text).to_bytes(8, "little") + text
        for name, tensor in layout.items():
            values = (read(name) if read else tensor).cpu().contiguous()
            yield values.view(-1).view(torch.uint8).numpy()
            del values  # before the next one is read
            report(header[name]["data_offsets"][1] / max(end, 1))

    return write_file(path, blocks())


def complete(work: Path, path: Path, manifest: dict) -> None:
    """Turn the temporary directory `work` into the checkpoint `path`, which must not exist."""
    write_manifest(work, manifest)
    os.rename(work, path)
    sync(path.parent)


def write_manifest(folder: Path, manifest: dict) -> None:
    """Write the last file of a checkpoint, then sync the folder."""
    text = json.dumps({**manifest, "format": FORMAT, "torch": torch.__version__}, indent=2)
    write_file(folder / "manifest.json", [text.encode()])
    sync(folder)


def why_not_written(error: BaseException, folder: Path) -> str:
    """Why nothing could be written to `folder`, with its free space."""
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free at {folder}"
    except OSError:  # the folder or its disk is gone
        return reason(error)
    return f"{reason(error)} ({free})"


# --------------------------------------------------------------------------------------------------
# Saving


def local_parts(state: dict) -> dict[str, LocalPart]:
    """This rank's parts of the tensors in nested dicts. Raises CheckpointError."""
    parts = {}
    for name, value in flatten(state):
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{name} is of {type(value)}: only tensors can be saved")
        if value.dtype not in DTYPE_NAMES or value.layout != torch.strided:
            kind = f"{value.dtype}, {value.layout}"
            raise CheckpointError(f"{name} is a tensor of {kind}, which safetensors cannot hold")
        parts[name] = local_part(value)
    return parts


def bounds_of(parts: dict[str, LocalPart]) -> Tensor:
    """Where parts begin and end in the full tensors: (tensors, 2, dims)."""
    dims = max(len(part.start) for part in parts.values())
    rows = []
    for part in parts.values():
        end = [begin + size for begin, size in zip(part.start, part.local.shape)]
        missing = dims - len(end)  # a missing dimension reaches from 0 to 1
        rows.append([[*part.start, *[0] * missing], [*end, *[1] * missing]])
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), 2, dims)


def choose_writers(parts: dict[str, LocalPart], bounds: np.ndarray) -> tuple[dict, np.ndarray]:
    """Choose who writes each chunk: of the ranks that hold it, the one with the least to write.

    `bounds` (ranks, tensors, 2, dims) has where the parts of all ranks begin and end. Returns the
    tensors of index.json, and which tensors' chunks each rank writes (ranks, tensors). All ranks
    come to the same result. The loop is over tensors only: Llama-3 70B has 1.1 million chunks on
    512 ranks.
    """
    tensors = dict.fromkeys(parts)
    writes = np.zeros(bounds.shape[:2], dtype=bool)
    load = np.zeros(len(bounds))  # bytes to write, of each rank
    numbered = sorted(enumerate(parts.items()), key=lambda item: -math.prod(item[1][1].full_shape))
    for number, (name, part) in numbered:  # the largest first
        shape = part.full_shape
        begin, end = bounds[:, number, 0], bounds[:, number, 1]  # (ranks, dims)
        holders = np.flatnonzero((begin < end).all(1) | (0 in shape))
        cuts = []
        position = np.zeros(len(holders), dtype=int)  # of each holder's part in the grid
        is_cover = True
        for dim, size in enumerate(shape):
            cut, i = np.unique(begin[holders, dim], return_inverse=True)
            is_cover &= cut[0] == 0 and (np.append(cut[1:], size)[i] == end[holders, dim]).all()
            position = position * len(cut) + i
            cuts.append(cut.tolist())
        order = np.argsort(load[holders], kind="stable")
        _, first = np.unique(position[order], return_index=True)  # the least load of each chunk
        writers = holders[order[first]]
        if not is_cover or len(writers) != math.prod(map(len, cuts)):
            raise CheckpointError(f"the ranks' parts do not make up the whole of {name}")
        load[writers] += part.local.itemsize * math.prod(shape) / len(writers)
        writes[writers, number] = True
        dtype, grid = DTYPE_NAMES[part.local.dtype], writers.tolist()
        tensors[name] = {"dtype": dtype, "shape": [*shape], "cuts": cuts, "grid": grid}
    return tensors, writes


def pinned(size: int) -> Tensor:
    """`size` bytes of host memory that GPUs copy to faster.

    torch's own pinned memory is rounded up to a power of two.
    """
    buffer = torch.empty(size, dtype=torch.uint8)
    cuda = torch.cuda.cudart()
    if int(cuda.cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
        weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())
    return buffer


@dataclass
class Saver:
    """Writes the checkpoints of a run. All ranks construct it and call its methods together.

    A checkpoint is written under a temporary name, synced, completed by its manifest and renamed:
    a run killed at any time leaves earlier checkpoints intact. A failed save raises nothing:
    done() and `failure` report it. A single process needs no process group.
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
    # The step from which this start continues. Later checkpoints that it finds are never removed.
    start_step: int | None = None

    def __post_init__(self):
        self.rank, self.size = rank_and_size()
        # The saving thread's collectives must not mix with those of the training step.
        is_group = torch.distributed.is_initialized()
        self.group = (
            torch.distributed.new_group(backend="gloo", timeout=self.timeout) if is_group else None
        )
        self.host_copy = torch.empty(0, dtype=torch.uint8)
        self.thread: threading.Thread | None = None
        self.rows: list[dict] = []
        # "cannot write PATH: REASON" if the last finished save failed
        self.failure: str | None = None
        self.seconds = 0.0  # of the last save that succeeded
        # Estimate for replace_shards after it: one process does the work of all ranks, at 100 MB/s
        # or more.
        self.replace_seconds = 0.0
        found = list_checkpoints(self.run) if self.start_step is not None else []
        self.protected = {path for path in found if step_of(path) > self.start_step}

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
        self.wait()  # before the copy, which replaces that of the previous save
        try:
            parts = local_parts(state)
            if self.async_save:
                parts = self.copy_to_host(parts)
        except Exception as error:
            parts = error  # `finish` tells all ranks
        if self.async_save:
            row["blocking_seconds"] = time.perf_counter() - began
            arguments = (parts, manifest, row, began)
            self.thread = threading.Thread(target=self.finish, args=arguments, daemon=True)
            self.thread.start()
        else:
            self.finish(parts, manifest, row, began)

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

    def copy_to_host(self, parts: dict[str, LocalPart]) -> dict[str, LocalPart]:
        """Copy to one block of host memory; allocating it, the slowest part, is done only once."""
        size = sum(part.local.nbytes for part in parts.values())
        if size != self.host_copy.nbytes:
            self.host_copy = torch.empty(0)  # frees the old one first
            is_cuda = any(part.local.is_cuda for part in parts.values())
            self.host_copy = pinned(size) if is_cuda else torch.empty(size, dtype=torch.uint8)
        copies = {}
        end = 0
        # By falling element size, each copy is aligned.
        for name, part in sorted(parts.items(), key=lambda item: -item[1].local.itemsize):
            begin, end = end, end + part.local.nbytes
            copy = self.host_copy[begin:end].view(part.local.dtype).view(part.local.shape)
            copies[name] = part._replace(local=copy.copy_(part.local))
        return copies

    def finish(
        self, parts: dict[str, LocalPart] | Exception, manifest: dict, row: dict, began: float
    ) -> None:
        """Write the checkpoint and append its log row. Runs in the saving thread if async_save."""
        try:
            row |= self.write(parts, manifest, Path(row["path"]))
            self.failure = None
        except BaseException as error:  # of any kind: a lost save must not pass as success
            if not (self.async_save or isinstance(error, Exception)):
                raise  # Ctrl-C ends the run
            del row["host_memory_before"]
            row |= {"event": "checkpoint_failed", "error": why_not_written(error, self.run)}
            self.failure = f"cannot write {row['path']}: {row['error']}"
            if self.rank == 0:
                self.remove_leftovers()
        row["seconds"] = time.perf_counter() - began
        row.setdefault("blocking_seconds", row["seconds"])
        self.rows.append(row)
        if not self.failure:
            self.seconds = row["seconds"]
            self.replace_seconds = min(self.size * row["seconds"], row["bytes"] / 100e6)

    def write(self, parts: dict[str, LocalPart] | Exception, manifest: dict, final: Path) -> dict:
        """Write the checkpoint `final`; return what its log row says of it."""
        work = final.with_name(f".{final.name}.tmp")
        files = {}

        def begin() -> str:
            if isinstance(parts, Exception):
                raise parts
            if self.rank == 0:
                self.remove_leftovers()
                work.mkdir(parents=True)
                for name, contents in self.extra_files.items():
                    files[name] = write_file(work / name, [contents])
            tensors = [(name, part.full_shape, part.local.dtype) for name, part in parts.items()]
            return f"{zlib.crc32(repr(tensors).encode()):08x}"

        def write_parts() -> tuple[dict, tuple[int, int, int]]:
            layout = {name: parts[name].local for name in mine}
            return write_safetensors(work / names[self.rank], layout), self.host_memory()

        def end() -> int:
            if self.rank != 0:
                return 0
            files["index.json"] = write_index(work, names, tensors)
            if final.exists():  # damaged, or the run would have continued from it
                os.rename(final, final.with_name(f".{final.name}.damaged.tmp"))
            complete(work, final, manifest | {"files": files})
            self.remove_old(final)
            return total_bytes({"files": files})

        if len({*self.on_all_ranks(begin)}) > 1:
            raise CheckpointError("ranks differ in the names, shapes or dtypes of tensors")
        tensors, mine = self.share_out(parts)
        names = [f"rank-{rank:05d}.safetensors" for rank in range(self.size)]
        written, memory = zip(*self.on_all_ranks(write_parts))
        files |= dict(zip(names, written))
        return {
            "bytes": self.on_all_ranks(end)[0],
            "peak_host_memory": max(peak for _, peak, _ in memory),
            "host_memory_after": memory[0][0],
            "available_host_memory": min(available for _, _, available in memory),
        }

    def on_all_ranks(self, work: Callable) -> list:
        """Call `work` on each rank; return all results, or raise on all ranks what one raised."""
        result = problem = None
        try:
            result = work()
        except BaseException as error:
            if not (self.async_save or isinstance(error, Exception)):
                raise
            problem = f"rank {self.rank}: {reason(error)}"  # text can always be sent
        answers = all_gather((result, problem), self.group)
        for _, problem in answers:
            if problem:
                raise CheckpointError(problem)
        return [result for result, _ in answers]

    def share_out(self, parts: dict[str, LocalPart]) -> tuple[dict, list[str]]:
        """Return the tensors of index.json, and the names of those that this rank writes."""
        bounds = bounds_of(parts)
        gathered = bounds[None].repeat(self.size, 1, 1, 1)
        if self.group:
            torch.distributed.all_gather(list(gathered), bounds, group=self.group)
        tensors, writes = choose_writers(parts, gathered.numpy())
        return tensors, [name for name, is_mine in zip(parts, writes[self.rank]) if is_mine]

    def remove_leftovers(self) -> None:
        """Remove what killed or failed saves of this run have left."""
        for leftover in self.run.glob("checkpoints/.*step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def remove_old(self, latest: Path) -> None:
        self.protected.discard(latest)
        if not self.keep_last:
            return
        # Listed from disk, not from memory, so that a continued run counts its predecessor's.
        # Checkpoints later than `latest` did not verify and do not count.
        saved = []
        for path in list_checkpoints(self.run):
            if step_of(path) <= step_of(latest) and path not in self.protected:
                with contextlib.suppress(CheckpointError, PathError):  # damaged: kept, not counted
                    read_manifest(path)
                    saved.append(path)
        for path in saved[: -self.keep_last]:
            if self.keep_every and step_of(path) % self.keep_every == 0:
                continue
            # Renamed first, so that a run killed meanwhile leaves no incomplete checkpoint.
            removed = path.rename(path.with_name(f".{path.name}.removed.tmp"))
            shutil.rmtree(removed)
