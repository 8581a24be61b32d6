"""Checkpoints: atomic, verified, in files that anyone can open, loadable on any mesh.

    RUN/checkpoints/step-00000100/
        rank-00000.safetensors ...  the chunks of tensors that each rank wrote
        full.safetensors            instead, in a full checkpoint: each tensor is one chunk
        index.json                  the chunks of each tensor, and the files that contain them
        tokenizer.*                 the tokenizer, if it is a file
        manifest.json               step, tokens, config, data, file sizes, checksums

The manifest is written last: a folder without one is not a checkpoint. Nothing in these files
can be executed. A safetensors file consists of 8 bytes with the size of its header, the header in
JSON and the bytes of its tensors (https://github.com/huggingface/safetensors#format). index.json is

    {"files": ["rank-00000.safetensors", "rank-00001.safetensors"],
     "tensors": {"model.embed.weight": {"dtype": "F32", "shape": [320, 64],
                                        "cuts": [[0, 160], [0]], "grid": [0, 1]}, ...}}

`cuts` lists the indices at which chunks start in each dimension. `grid` lists the chunks' files, as
positions in `files`, row by row. A file stores a chunk under the name of its tensor.
"""

import contextlib
import functools
import itertools
import json
import math
import mmap
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

FORMAT = 2  # the version of the format of a run's files: see docs/reference.md
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
CHANGED = "has changed since it was written: its checksum differs"


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or cannot be written or read. The message is one line."""

    exit_status = 1


class PathError(ValueError):
    """A path has no readable checkpoint, or none can be created there. The message is one line."""

    exit_status = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of checkpoints; config.py explains the annotations."""

    save_interval: Annotated[int, "free", "steps between checkpoints; 0: only at the end", (0,)] = (
        250
    )
    keep_last: Annotated[int, "free", "number of latest checkpoints to keep; 0: all", (0,)] = 2
    keep_every: Annotated[int, "free", "also keep steps N, 2N, 3N, ...; 0: none", (0,)] = 0
    checkpoint: Annotated[
        Literal["sharded", "none"],
        "free",
        "sharded: one file per rank; none: the run cannot be continued",
    ] = "sharded"
    async_save: Annotated[bool, "free", "write checkpoints while training continues"] = False
    init_from: Annotated[
        str | None, "free", "start from the weights of this checkpoint or run", "PATH"
    ] = None


# --------------------------------------------------------------------------------------------------
# Saving and loading


def save_state(
    path: Path | str,
    state: dict,
    manifest: dict,
    extra_files: dict[str, bytes] | None = None,
    on_all_ranks: Callable | None = None,
    chunks: dict[str, Tensor] | None = None,
) -> int:
    """Write `state`, dicts of tensors and DTensors, as a checkpoint; return its bytes.

    Each rank writes one file. If ranks hold copies of a tensor, one copy is written: the one whose
    ranks have the least to write so far. Every rank deals the tensors in the same way, the largest
    first, so they need not communicate. For example under hsdp on 4 ranks:

        tensor, by size        |     0      |     1      |     2      |     3      |
        ranks 0 and 1 write    |  rows 0-4  |            |            |  rows 0-2  |
                               |  rows 5-9  |            |            |  rows 3-5  |
        ranks 2 and 3 write    |            |  rows 0-4  |  rows 0-2  |            |
                               |            |  rows 5-9  |  rows 3-5  |            |

    All ranks call it together. The folder gets its name only when all files are on disk: if a rank
    is killed before that, there is no new checkpoint, and earlier ones are intact.

    manifest       "step", and any other values that the caller wants to read later
    extra_files    {name: contents}, for example the tokenizer
    on_all_ranks   on_all_ranks(function, *arguments) returns the results of all ranks, or raises on
                   all ranks, like dist.on_all_ranks; the default is for a single process
    chunks         a copy of `chunks_to_write(state)`, if the tensors in `state` change meanwhile

    Raises CheckpointError on a rank that fails, and what on_all_ranks raises on the others.
    """
    path = Path(path)
    extra_files = extra_files or {}
    on_all_ranks = on_all_ranks or on_only_rank
    on_all_ranks(begin_save, path, state, manifest, extra_files)
    written = on_all_ranks(write_chunks, path, state, chunks)
    return on_all_ranks(publish, path, state, manifest, extra_files, written)[0]


def load_state(path: Path | str, state: dict, replicas: ProcessGroup | None = None) -> None:
    """Fill the tensors of `state` in place, from a checkpoint of any mesh.

    A mesh only decides how a tensor is cut: by rows (fsdp), by rows or columns (tp) or not at all.
    On disk, a chunk is identified by the name of its tensor and the indices at which it starts in
    the full tensor, not by a rank. A rank's part is identified in the same way. Each rank copies
    the overlap of its part with each chunk:

        saved by fsdp on 4 ranks       | rows 0-2 | rows 3-5 | rows 6-8 | 9 |
        part of rank 0 of 2, with tp   |    rows 0-4    |
        copied                          rows 0-2   3-4

    Files are mapped into memory, so that only the copied values are read. By default each rank
    reads its part. With `replicas`, a group of ranks that hold the same parts, only the group's
    first rank reads, and broadcasts each tensor. Tensors that are not in `state` are skipped.
    Values are converted to the dtype of the tensor in `state`. Raises CheckpointError on the ranks
    that read; part of `state` may then be filled.

    Checks the checksums of manifest.json and index.json, the sizes of the files that it reads, and
    the name, dtype and shape of each chunk. Only `verify`, which reads all files, detects changed
    values, swapped chunks of equal shape and dtype, and swapped files with equal headers.
    """
    is_reader = replicas is None or torch.distributed.get_rank(replicas) == 0
    reader, error = None, None
    for name, tensor in flatten(state):
        if is_reader and not error:
            try:
                reader = reader or Reader(Path(path))
                reader.fill(name, tensor)
            except (CheckpointError, PathError) as failure:
                error = failure  # raise after the loop: other replicas still expect broadcasts
        if replicas:
            torch.distributed.broadcast(local(tensor), group=replicas, group_src=0)
    if error:
        raise error


def flatten(state: dict, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, each with its keys joined by dots."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_distributed(tensor: Tensor) -> bool:
    """Whether ranks may hold different parts. Without elements, it counts as replicated."""
    return isinstance(tensor, DTensor) and tensor.numel() > 0


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory, without gradients."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def start_of(tensor: Tensor) -> tuple[int, ...]:
    """The indices in the full tensor at which this rank's part starts."""
    if not is_distributed(tensor):
        return (0,) * tensor.dim()
    # This method is not public, but it handles rows split twice, over tp and then over dp_shard.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def reason(error: BaseException) -> str:
    """The first line of an error's text, or repr(error) if it is empty or perhaps only a key."""
    lines = str(error).strip().splitlines()
    if not lines or isinstance(error, LookupError):
        return repr(error)
    return lines[0]


@contextlib.contextmanager
def as_checkpoint_error(what: str | None = None) -> Iterator[None]:
    """Turn any exception into a CheckpointError: `what: reason`. The default `what` is "rank N".

    Damaged JSON can raise almost any exception.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{what or f'rank {this_rank()}'}: {reason(error)}") from None


# --------------------------------------------------------------------------------------------------
# The steps of a save


def on_only_rank(function: Callable, *arguments) -> list:
    """Call `function` in a process without other ranks. Raises ValueError if there are any."""
    if world_size() > 1:
        raise ValueError("on several ranks, save_state needs on_all_ranks=dist.on_all_ranks")
    return [function(*arguments)]


def this_rank() -> int:
    """The rank of this process; 0 without a process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


@as_checkpoint_error()
def begin_save(path: Path, state: dict, manifest: dict, extra_files: dict[str, bytes]) -> None:
    """Check that all of it can be saved, then create the temporary folder on rank 0."""
    check_tensors(state)
    ours = {"index.json", "manifest.json", *map(file_of, range(world_size()))}
    if taken := ours & extra_files.keys():
        raise ValueError(f"an extra file may not be named {min(taken)}")
    planned = dict.fromkeys(["index.json", *extra_files], {"bytes": 0})
    check_manifest(path, seal({**manifest, "files": planned}))
    if this_rank() == 0:
        remove_leftovers(path)
        temporary(path).mkdir(parents=True)


def check_tensors(state: dict) -> None:
    """Raise CheckpointError if a tensor cannot be saved."""
    for name, value in flatten(state):
        kind = getattr(value, "dtype", type(value).__name__)
        if kind not in DTYPE_NAMES:
            raise CheckpointError(f"{name} cannot be saved: {kind} is none of {', '.join(DTYPES)}")
        if isinstance(value, DTensor) and any(how.is_partial() for how in value.placements):
            raise CheckpointError(f"{name} cannot be saved: each rank holds a part of its sum")


def temporary(path: Path, kind: str = "") -> Path:
    """The name of an incomplete, replaced or removed checkpoint, in the same folder as `path`."""
    return path.with_name(f".{path.name}{kind}.tmp")


def remove_leftovers(path: Path) -> None:
    """Remove the temporary folders of earlier saves beside the checkpoint `path`. Never raises."""
    own = [temporary(path), temporary(path, ".damaged")]
    for leftover in [*own, *path.parent.glob(".step-*.tmp")]:
        shutil.rmtree(leftover, ignore_errors=True)


@as_checkpoint_error()
def write_chunks(path: Path, state: dict, chunks: dict[str, Tensor] | None) -> tuple[dict, list]:
    """Write this rank's chunks, from `chunks` or else `state`.

    Returns the file's entry in the manifest, and `bounds_of_parts`.
    """
    chunks = chunks_to_write(state) if chunks is None else chunks
    file = temporary(path) / file_of(this_rank())
    return write_safetensors(file, chunks), bounds_of_parts(state)


def file_of(rank: int) -> str:
    """The name of the file in which a rank writes its chunks."""
    return f"rank-{rank:05d}.safetensors"


def chunks_to_write(state: dict) -> dict[str, Tensor]:
    """The parts of tensors that this rank writes, by name. Raises CheckpointError."""
    check_tensors(state)
    writers = writers_of(state)
    chunks = {}
    for name, tensor in flatten(state):
        part = local(tensor)
        if this_rank() in writers[name] and (part.numel() or not tensor.numel()):
            chunks[name] = part
    return chunks


def writers_of(state: dict) -> dict[str, np.ndarray]:
    """The ranks that write the parts of each tensor: those with the least to write so far."""
    holders = {layout: holders_of(tensor) for layout, tensor in layouts_of(state).items()}
    load = np.zeros(world_size())  # bytes, by rank
    writers = {}
    for name, tensor in sorted(flatten(state), key=lambda item: (-item[1].numel(), item[0])):
        copies = holders[layout_of(tensor)]  # (copies, parts)
        chosen = copies[load[copies].sum(axis=1).argmin()]
        load[chosen] += tensor.nbytes / len(chosen)
        writers[name] = chosen
    return writers


def layouts_of(state: dict) -> dict[tuple, Tensor]:
    """A tensor of each layout in the state. A model has only about a dozen layouts."""
    layouts = {}
    for _, tensor in flatten(state):
        layouts.setdefault(layout_of(tensor), tensor)
    return layouts


def layout_of(tensor: Tensor) -> tuple:
    """The tensor's shape, and how it is distributed."""
    if is_distributed(tensor):
        return tensor.shape, tensor.placements, tensor.device_mesh
    return (tensor.shape,)


def holders_of(tensor: Tensor) -> np.ndarray:
    """The ranks that hold a tensor, as (copies, parts): the ranks of a row hold all of it."""
    if not is_distributed(tensor):
        return np.arange(world_size())[:, None]
    mesh = tensor.device_mesh
    # A mesh that was sliced from another one, for example only tp, lacks axes: along those there
    # are copies, too. This method is not public, but no public one returns that other mesh.
    whole = mesh._get_root_mesh()
    names = mesh.mesh_dim_names or range(mesh.ndim)
    splits = {name for name, how in zip(names, tensor.placements) if not how.is_replicate()}
    axes = whole.mesh_dim_names or range(whole.ndim)
    copying = [axis for axis, name in enumerate(axes) if name not in splits]
    copies = math.prod(whole.size(axis) for axis in copying)
    return np.moveaxis(whole.mesh.numpy(), copying, range(len(copying))).reshape(copies, -1)


def bounds_of_parts(state: dict) -> list[tuple[tuple[int, ...], int]]:
    """For each layout in the state: where this rank's part starts, and its number of elements."""
    return [(start_of(tensor), local(tensor).numel()) for tensor in layouts_of(state).values()]


@as_checkpoint_error()
def publish(
    path: Path, state: dict, manifest: dict, extra_files: dict[str, bytes], written: list
) -> int:
    """Complete a checkpoint on rank 0, with each rank's result of `write_chunks`.

    Returns its bytes on rank 0, and 0 on the other ranks.
    """
    if this_rank() != 0:
        return 0
    work = temporary(path)
    entries, bounds = zip(*written)
    files = {file_of(rank): entry for rank, entry in enumerate(entries)}
    index = write_index(work, list(files), index_of(state, bounds))
    for name, contents in extra_files.items():
        files[name] = write_file(work / name, [contents])
    files["index.json"] = index
    complete(work, path, {**manifest, "files": files})
    remove_leftovers(path)
    return total_bytes({"files": files})


def index_of(state: dict, bounds: Sequence[list]) -> dict[str, dict]:
    """The entries of tensors in index.json, from the `bounds_of_parts` of each rank.

    Raises CheckpointError if the parts that are written do not make up a tensor.
    """
    bounds_of = dict(zip(layouts_of(state), zip(*bounds, strict=True), strict=True))
    writers = writers_of(state)
    arranged = {}
    index = {}
    for name, tensor in flatten(state):
        layout = layout_of(tensor)
        key = layout, int(writers[name][0])
        if key not in arranged:
            with as_checkpoint_error(f"the ranks' parts do not make up {name}"):
                arranged[key] = arrange(tensor.shape, writers[name], bounds_of[layout])
        cuts, grid = arranged[key]
        dtype = DTYPE_NAMES[tensor.dtype]
        index[name] = {"dtype": dtype, "shape": [*tensor.shape], "cuts": cuts, "grid": grid}
    return index


def arrange(shape: torch.Size, writers: np.ndarray, bounds: Sequence) -> tuple[list, list]:
    """The cuts and the grid of a tensor, from its writers and the bounds of all ranks' parts."""
    writer_at = {}  # keys: the indices at which a part starts
    numel = 0
    for rank in writers.tolist():
        start, size = bounds[rank]
        if size == 0 and shape.numel() > 0:
            continue  # more ranks than rows
        if start in writer_at:
            raise ValueError(f"ranks {writer_at[start]} and {rank} have the same part")
        writer_at[start] = rank
        numel += size
    if numel != shape.numel():
        raise ValueError(f"they have {numel:,} elements, not the {shape.numel():,} of its shape")
    cuts = [sorted(set(starts)) for starts in zip(*writer_at)]
    return cuts, [writer_at[start] for start in itertools.product(*cuts)]


# --------------------------------------------------------------------------------------------------
# Reading


class Entry(NamedTuple):
    """The entry of a tensor in index.json."""

    full: Tensor  # its shape and dtype, on the meta device
    edges: list[list[int]]  # where chunks start in each dimension, and where the last one ends
    grid: np.ndarray  # each chunk's file, as a position in Reader.files


class Reader:
    """The tensors of a checkpoint, with the checks of `load_state`. Raises CheckpointError."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, Entry] = {}
        self.map_file = functools.cache(map_safetensors)  # maps each file once
        self.entries = read_manifest(path)["files"]  # sizes and checksums
        with as_checkpoint_error(f"cannot read {path}/index.json"):
            text = (path / "index.json").read_bytes()
            if f"{zlib.crc32(text):08x}" != self.entries["index.json"]["crc32"]:
                raise ValueError(f"it {CHANGED}")
            index = json.loads(text)
            self.files: list[str] = index["files"]
            for name, value in index["tensors"].items():
                full = torch.empty(value["shape"], dtype=DTYPES[value["dtype"]], device="meta")
                edges = []
                for cuts, size in zip(value["cuts"], full.shape, strict=True):
                    if cuts[0] != 0:
                        raise ValueError(f"the first chunk of {name} does not start at index 0")
                    edges.append([*cuts, size])
                grid = np.reshape(value["grid"], [len(edge) - 1 for edge in edges])
                self.tensors[name] = Entry(full, edges, grid)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's part of a tensor."""
        with as_checkpoint_error(f"cannot read {self.path}"):
            entry = self.tensors.get(name)
            if entry is None or entry.full.shape != tensor.shape:
                raise ValueError(f"it has no tensor {name} of shape {tuple(tensor.shape)}")
            part = local(tensor)
            for place, saved in self.overlaps(name, start_of(tensor), part.shape):
                part[place].copy_(saved)

    def overlaps(
        self, name: str, start: Sequence[int], shape: Sequence[int]
    ) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
        """Yield the overlaps of saved chunks with a part of a tensor: (slices of the part, values).

        The part starts at the indices `start` of the full tensor.
        """
        edges = self.tensors[name].edges
        along_dims = [overlaps_along(*dim) for dim in zip(edges, start, shape)]
        for overlap in itertools.product(*along_dims):
            position = tuple(i for i, _, _ in overlap)
            in_part = tuple(place for _, place, _ in overlap)
            in_chunk = tuple(place for _, _, place in overlap)
            chunk, buffer = self.map_chunk(name, position)
            yield in_part, chunk[in_chunk]
            buffer.madvise(mmap.MADV_DONTNEED)  # free the pages that were read

    def map_chunk(self, name: str, position: tuple[int, ...]) -> tuple[Tensor, mmap.mmap]:
        """The chunk of a tensor at this position of its grid, and the mapping of its file."""
        full, edges, grid = self.tensors[name]
        shape = [edge[i + 1] - edge[i] for edge, i in zip(edges, position)]
        with as_checkpoint_error(f"cannot read {self.path}"):
            file = self.files[grid[position]]
            size = self.entries[file]["bytes"]  # an unlisted file may be anywhere: it is not opened
            chunks, buffer = self.map_file(self.path / file)
            if len(buffer) != size:
                raise ValueError(f"{file} has {len(buffer):,} bytes, not {size:,}")
            chunk = chunks.get(name)
            if chunk is None or chunk.dtype != full.dtype or list(chunk.shape) != shape:
                raise ValueError(f"{file} has no {name} of shape {shape} and type {full.dtype}")
        return chunk, buffer


def overlaps_along(edges: list[int], start: int, size: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield (i, slice of the part, slice of chunk i) for the overlaps in one dimension."""
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        first = max(low, start)
        last = min(high, start + size)
        if first < last:
            in_part = slice(first - start, last - start)
            in_chunk = slice(first - low, last - low)
            yield i, in_part, in_chunk


def map_safetensors(path: Path) -> tuple[dict[str, Tensor], mmap.mmap]:
    """The tensors of a safetensors file, and its mapping. Raises CheckpointError if damaged."""
    tensors = {}
    with as_checkpoint_error(f"cannot read {path}"), open(path, "rb") as file:
        # Not ACCESS_READ: torch.frombuffer warns about memory that cannot be written.
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = 8 + int.from_bytes(buffer[:8], "little")
        header = json.loads(buffer[8:start])
        header.pop("__metadata__", None)
        data = torch.frombuffer(buffer, dtype=torch.uint8, offset=start)
        begins, ends = zip(*sorted(entry["data_offsets"] for entry in header.values()))
        if (0, *ends) != (*begins, len(data)):  # each starts where the previous one ends
            raise ValueError("its tensors overlap, or do not fill the file")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in DTYPES:
                raise ValueError(f"{name} has the unknown dtype {entry['dtype']}")
            values = data[begin:end].view(DTYPES[entry["dtype"]])
            tensors[name] = values.view(entry["shape"])
    return tensors, buffer


# --------------------------------------------------------------------------------------------------
# The checkpoints of a run


class Saver:
    """Writes the checkpoints of a run. All ranks construct it and call its methods together.

    A failed save raises nothing: `failure` and a row of `take_rows` report it.

    run           the run folder
    keep_last     number of checkpoints to keep; 0 keeps all. It counts `verified` and those that
                  this object has saved
    keep_every    also keep those whose step is a multiple of this; 0 for none
    on_all_ranks  see save_state
    extra_files   {name: contents} of files in every checkpoint, such as the tokenizer
    verified      the checkpoint of this run that has been verified, if any
    """

    def __init__(
        self,
        run: Path,
        keep_last: int,
        keep_every: int,
        on_all_ranks: Callable | None = None,
        extra_files: dict[str, bytes] | None = None,
        verified: Path | None = None,
    ):
        self.run = run
        self.intact = [verified] if verified else []  # and those saved since, oldest first
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.on_all_ranks = on_all_ranks
        self.extra_files = extra_files
        self.rows: list[dict] = []
        self.failure: str | None = None  # "cannot write PATH: REASON" if the last save failed

    def save(self, state: dict, manifest: dict) -> None:
        """Save `state`, nested dicts of tensors and DTensors, as step manifest["step"]."""
        self.write(state, manifest, None, time.perf_counter())

    def wait(self) -> None:
        """Wait for the save in progress: there is one only in extras/async_save.py."""

    def refuse(self, step: int, why: str) -> None:
        """Report the save of `step` as failed without trying it: earlier checkpoints are better."""
        self.wait()
        self.add_row(step, {"error": why}, began=time.perf_counter())

    def take_rows(self) -> list[dict]:
        """Return the log rows of the saves that have finished since the last call.

        Their event is "checkpoint", or "checkpoint_failed" with the reason as `error`.
        """
        rows = list(self.rows)
        del self.rows[: len(rows)]  # not all: the saving thread may have appended one meanwhile
        return rows

    def write(
        self,
        state: dict,
        manifest: dict,
        chunks: dict[str, Tensor] | None,
        began: float,
        waited: float | None = None,
    ) -> None:
        """Write the checkpoint and add its row."""
        path = step_path(self.run, manifest["step"])
        try:
            arguments = (path, state, manifest, self.extra_files, self.on_all_ranks, chunks)
            outcome = {"bytes": save_state(*arguments)}
            self.intact.append(path)
            if this_rank() == 0:
                self.remove_old()
        except Exception as error:
            if this_rank() == 0:
                remove_leftovers(path)
            outcome = {"error": reason(error)}
        self.add_row(manifest["step"], outcome, began, waited)

    def add_row(self, step: int, outcome: dict, began: float, waited: float | None = None) -> None:
        """Add a row to the log, with {"bytes": ...} or {"error": ...}, and set `failure`.

        The save started at `began`. Training waited `waited` seconds for it (default: to its end).
        """
        path = step_path(self.run, step)
        seconds = time.perf_counter() - began
        row = {"step": step, "event": "checkpoint", "path": str(path), **outcome}
        self.failure = None
        if "error" in outcome:
            row["event"] = "checkpoint_failed"
            self.failure = f"cannot write {path}: {outcome['error']}"
        blocking = seconds if waited is None else waited
        self.rows.append(row | {"seconds": seconds, "blocking_seconds": blocking})

    def remove_old(self) -> None:
        """Remove what is older than the last keep_last intact checkpoints, except keep_every's."""
        if self.keep_last == 0 or len(self.intact) < self.keep_last:
            return
        oldest = step_of(self.intact[-self.keep_last])
        for path in list_checkpoints(self.run):
            step = step_of(path)
            if step >= oldest or (self.keep_every and step % self.keep_every == 0):
                continue
            with contextlib.suppress(OSError):  # it was removed meanwhile, or is another user's
                # Renamed first, so that a run killed meanwhile leaves no incomplete checkpoint.
                path.rename(temporary(path, ".removed"))
                remove_leftovers(path)


# --------------------------------------------------------------------------------------------------
# Manifests: what makes a folder a checkpoint


def step_path(run: Path, step: int) -> Path:
    """The folder of a run's checkpoint at this step: RUN/checkpoints/step-00000100, for example."""
    return run / "checkpoints" / f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """100 for the folder step-00000100; None for another name, such as step-100, a user's copy."""
    match = re.fullmatch(r"step-([0-9]{8,})", path.name)
    return int(match[1]) if match else None


def list_checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, oldest first. They are not verified, and may even lack a manifest."""
    found = [path for path in run.glob("checkpoints/step-*") if step_of(path) is not None]
    return sorted(found, key=step_of)


def read_manifest(path: Path) -> dict:
    """The manifest of the checkpoint `path`.

    Raises CheckpointError if it is missing, changed or damaged, or if the folder was renamed, and
    PathError if its format is not FORMAT.
    """
    incomplete = f"{path} is not a complete checkpoint: its manifest.json is"
    with as_checkpoint_error(f"{incomplete} damaged"):
        if not (path / "manifest.json").exists():
            raise CheckpointError(f"{incomplete} missing")
        manifest = json.loads((path / "manifest.json").read_bytes())
        if manifest.get("crc32") != seal(manifest)["crc32"]:
            raise CheckpointError(f"{path}/manifest.json {CHANGED}")
        check_manifest(path, manifest)
    version = manifest.get("format")
    if version != FORMAT:
        raise PathError(f"{path} has format {version}, not {FORMAT}: use the version that wrote it")
    return manifest


def check_manifest(path: Path, manifest: dict) -> None:
    """Raise ValueError for an invalid field, CheckpointError for a folder with another step."""
    step = manifest.get("step")
    numbers = {"the manifest's step": step, "the manifest's tokens": manifest.get("tokens", 0)}
    if not manifest["files"]:
        raise ValueError("it lists no files")
    for name, file in manifest["files"].items():
        if Path(name).name != name:
            raise ValueError(f"{name!r} is not the name of a file in its folder")
        numbers[f"the size of {name!r}"] = file["bytes"]
    for name, number in numbers.items():
        if type(number) is not int or number < 0:
            raise ValueError(f"{name} is {number!r}, not an integer of at least 0")
    if step_of(path) not in (None, step):
        raise CheckpointError(f"{path} was renamed: it holds step {step}, not {step_of(path)}")


def seal(manifest: dict) -> dict:
    """The manifest after a turn through JSON, plus "crc32", a checksum of its other fields."""
    fields = json.loads(json.dumps(manifest))  # keys become strings
    fields.pop("crc32", None)
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return fields | {"crc32": f"{zlib.crc32(text.encode()):08x}"}


def total_bytes(manifest: dict) -> int:
    """The size of a checkpoint's files in bytes, without its manifest.json."""
    return sum(file["bytes"] for file in manifest["files"].values())


def verify(path: Path | str, part: int = 0, parts: int = 1) -> str | None:
    """Compare a checkpoint with its manifest: return the first problem, or None.

    Raises PathError if its format is not FORMAT.

    Compares the size and checksum of every `parts`-th file, from file number `part`, so that
    `parts` ranks can share the files. CRC-32 detects damage, not forgery, at about 1 GB/s.
    """
    path = Path(path)
    try:
        files = read_manifest(path)["files"]
        for name in sorted(files)[part::parts]:
            expected = files[name]
            size = (path / name).stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size:,} bytes, not {expected['bytes']:,}"
            crc = 0
            with open(path / name, "rb") as file:
                while block := file.read(1 << 20):
                    crc = zlib.crc32(block, crc)
            if f"{crc:08x}" != expected.get("crc32"):
                return f"{name} {CHANGED}"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


# --------------------------------------------------------------------------------------------------
# Files


def sync(path: Path) -> None:
    """fsync a file or a directory. For a directory, this makes its entries durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, blocks: Iterable) -> dict:
    """Write blocks of bytes to a file, and fsync it; return the file's entry in the manifest."""
    crc = 0
    with open(path, "wb") as file:
        for block in blocks:
            file.write(block)
            crc = zlib.crc32(block, crc)
            del block  # free it before the next one is read
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "crc32": f"{crc:08x}"}


def write_safetensors(
    path: Path, layout: dict[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> dict:
    """Write tensors to a file; return the file's entry in the manifest.

    `layout` gives their names, dtypes and shapes. read(name) returns the values of one tensor; with
    it, `layout` may be on the meta device. Without it, the values in `layout` are written.
    """
    read = read or layout.__getitem__
    # The widest dtypes first, after a header padded to 8 bytes, so that each tensor is aligned.
    names = sorted(layout, key=lambda name: -layout[name].itemsize)
    header: dict = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        tensor = layout[name]
        end = begin + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def blocks() -> Iterator:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            tensor = read(name)
            values = tensor.cpu().contiguous()
            yield values.view(-1).view(torch.uint8).numpy()
            del tensor, values  # free them before the next one is read

    return write_file(path, blocks())


def write_index(folder: Path, files: list[str], tensors: dict[str, dict]) -> dict:
    """Write index.json (described at the top); return the file's entry in the manifest."""
    text = json.dumps({"files": files, "tensors": tensors}, separators=(",", ":"))
    return write_file(folder / "index.json", [text.encode()])


def complete(work: Path, path: Path, manifest: dict) -> None:
    """Turn the temporary folder `work` into the checkpoint `path`."""
    manifest = seal({**manifest, "format": FORMAT, "torch": torch.__version__})
    text = json.dumps(manifest, indent=2)
    write_file(work / "manifest.json", [text.encode()])
    sync(work)
    if path.exists():  # it is damaged, or the run would have resumed from it
        os.rename(path, temporary(path, ".damaged"))
    os.rename(work, path)
    sync(path.parent)
