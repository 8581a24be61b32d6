"""Checkpoints: atomic, verified, in files that anyone can open, loadable on any mesh.

    RUN/checkpoints/step-00000100/
        rank-00000.safetensors ...  the chunks of tensors that each rank wrote
        index.json                  where these chunks are in their tensors
        tokenizer.*                 the tokenizer, if it is a file
        manifest.json               step, tokens, config, data, file sizes, checksums

The manifest is written last: a folder without one is not a checkpoint. Nothing in these files
can be executed. A safetensors file consists of 8 bytes with the size of its header, the header in
JSON and the bytes of its tensors (https://github.com/huggingface/safetensors#format). index.json
has one entry for all tensors that are cut in the same way, and a model has about a dozen of them:

    [{"tensors": ["model.embed.weight", ...], "dtype": "F32", "shape": [320, 64],
      "chunks": [[0, [0, 0], [160, 64]], [1, [160, 0], [160, 64]]]}, ...]

Here rank 0 has written 160 x 64 elements from row 0 and column 0 on, and rank 1 as many from row
160 on, each under the name of the tensor.
"""

import contextlib
import functools
import json
import math
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
import torch.distributed
from torch import Tensor
from torch.distributed.tensor import DTensor

FORMAT = 4  # the version of the format of a run's files: see docs/reference.md
SHARED = 2**16  # bytes: of smaller parts, one rank writes all, so that others' files stay closed
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, incomplete, or does not fit. The message is one line."""

    exit_status = 1


class FormatError(CheckpointError):
    """A checkpoint of other code or another step: it must neither be passed over nor replaced."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The flags of checkpoints; config.py explains the annotations."""

    save_interval: Annotated[int, "free", "steps between saves; 0: only at the end", (0,)] = 250
    keep_last: Annotated[int, "free", "latest checkpoints to keep; 0: save nothing", (0,)] = 2
    keep_every: Annotated[int, "free", "also keep steps N, 2N, 3N, ...; 0: none", (0,)] = 0
    async_save: Annotated[bool, "free", "write checkpoints while training continues"] = False
    init_from: Annotated[str | None, "part", "start from the weights at this path"] = None


# --------------------------------------------------------------------------------------------------
# Saving


def save_state(
    path: Path,
    state: dict,
    manifest: dict,
    extra_files: dict[str, bytes] | None = None,
    on_all_ranks: Callable = lambda function: [function()],
    chunks: dict[str, tuple] | None = None,
) -> int:
    """Write `state`, nested dicts of tensors and DTensors, as a checkpoint; return its bytes.

    All ranks call it together. The folder gets its name only when all files are on disk: if a rank
    is killed before that, there is no new checkpoint, and earlier ones are intact. If a rank fails,
    all raise.

    manifest       "step", and any other values that the caller wants to read later
    extra_files    {name: contents}, for example the tokenizer
    on_all_ranks   dist.on_all_ranks, if there are other ranks
    chunks         {name: chunk_of(tensor)} with copies, if the tensors in `state` change meanwhile
    """
    work = temporary(path)
    rank, _ = rank_and_size()

    def make_folder() -> None:
        if rank == 0:
            remove_leftovers(path)
            work.mkdir(parents=True)

    def write_chunks() -> tuple[dict, dict]:
        tensors, boxes = {}, {}
        for name, tensor in flatten(state):
            start, values = chunks[name] if chunks else chunk_of(tensor)
            boxes[cut_of(tensor)] = start, tuple(values.shape)
            if values.numel():
                tensors[name] = values
        return write_safetensors(work / file_of(rank), tensors), boxes

    def publish() -> int:
        if rank > 0:
            return 0
        entries, boxes = zip(*written)
        files = {file_of(writer): entry for writer, entry in enumerate(entries)}
        index = json.dumps(index_of(state, boxes)).encode()
        for name, contents in {**(extra_files or {}), "index.json": index}.items():
            files[name] = write_file(work / name, [contents])
        complete(work, path, {**manifest, "files": files})
        return sum(entry["bytes"] for entry in files.values())

    try:
        on_all_ranks(make_folder)
        written = on_all_ranks(write_chunks)
        return on_all_ranks(publish)[0]
    finally:
        if rank == 0:
            remove_leftovers(path)


def chunk_of(tensor: Tensor) -> tuple[tuple, Tensor]:
    """What this rank writes of a tensor: the indices at which it starts, and a view of it.

    It is this rank's part or, if other ranks hold copies of a large part, some of its rows. For
    example of 10 rows under hsdp on 4 ranks:

        rows 0-4, of which ranks 0 and 2 hold copies    rank 0: rows 0-1    rank 2: rows 2-4
        rows 5-9, of which ranks 1 and 3 hold copies    rank 1: rows 5-6    rank 3: rows 7-9
    """
    part, start = local(tensor), start_of(tensor)
    number, copies = copy_of(tensor)
    if part.nbytes < SHARED:
        return start, part if number == 0 else part.new_empty(0)
    first, end = len(part) * number // copies, len(part) * (number + 1) // copies
    return (start[0] + first, *start[1:]), part[first:end]


def copy_of(tensor: Tensor) -> tuple[int, int]:
    """This rank's number among the ranks with the same part of a tensor, and how many they are."""
    if not isinstance(tensor, DTensor):
        return rank_and_size()
    number, copies = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            size = tensor.device_mesh.size(axis)
            number = number * size + tensor.device_mesh.get_coordinate()[axis]
            copies *= size
    return number, copies


def cut_of(tensor: Tensor) -> tuple:
    """How a tensor is cut: if it is equal for two tensors, so are the places of their chunks."""
    cut = tensor.dtype, tensor.shape
    if isinstance(tensor, DTensor):
        cut += tensor.placements, tensor.device_mesh.mesh_dim_names
    return cut


def index_of(state: dict, boxes: Sequence[dict]) -> list[dict]:
    """The contents of index.json, from {cut: (start, shape) of the chunk} of each rank.

    Raises CheckpointError if the chunks do not make up a tensor.
    """
    groups = {}
    for name, tensor in flatten(state):
        cut = cut_of(tensor)
        if cut not in groups:
            # Equal chunks of several ranks are copies, of which one is enough.
            writer_of = {boxes_of_rank[cut]: rank for rank, boxes_of_rank in enumerate(boxes)}
            chunks = [[rank, *box] for box, rank in writer_of.items() if math.prod(box[1]) > 0]
            if sum(math.prod(shape) for _, _, shape in chunks) != tensor.numel():
                raise CheckpointError(f"the ranks' parts of {name} do not make up the tensor")
            dtype, shape = DTYPE_NAMES[tensor.dtype], list(tensor.shape)
            groups[cut] = {"tensors": [], "dtype": dtype, "shape": shape, "chunks": chunks}
        groups[cut]["tensors"].append(name)
    return list(groups.values())


# --------------------------------------------------------------------------------------------------
# Loading


def load_state(path: Path, state: dict) -> None:
    """Fill the tensors of `state` in place, from a checkpoint of any mesh.

    A mesh only decides how a tensor is cut: by rows (fsdp), by rows or columns (tp) or not at all.
    Each rank copies the overlap of its part with each chunk:

        saved by fsdp on 4 ranks       | rows 0-2 | rows 3-5 | rows 6-8 | 9 |
        part of rank 0 of 2, with tp   |    rows 0-4    |
        copied                          rows 0-2   3-4

    Files are mapped into memory, so that only the copied values are read. Tensors that are not in
    `state` are skipped. Values are converted to the dtype of the tensor in `state`. Raises
    CheckpointError if a tensor is missing or has another shape. Only `verify` notices damage.
    """
    reader = Reader(path)
    for name, tensor in flatten(state):
        reader.fill(name, tensor)


class Saved(NamedTuple):
    """A tensor in a checkpoint, in n chunks."""

    full: Tensor  # its shape and dtype, on the meta device
    ranks: list[int]  # (n,): who wrote them
    begin: np.ndarray  # (n, dim): the indices in the full tensor at which they begin
    end: np.ndarray  # (n, dim): and those before which they end


class Reader:
    """The tensors of a checkpoint."""

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, Saved] = {}
        self.open_file = functools.cache(map_safetensors)  # maps each file once
        for group in json.loads((path / "index.json").read_bytes()):
            full = torch.empty(group["shape"], dtype=DTYPES[group["dtype"]], device="meta")
            chunks = group["chunks"]
            ranks = [rank for rank, _, _ in chunks]
            boxes = np.array([box for _, *box in chunks], int).reshape(len(chunks), 2, full.dim())
            saved = Saved(full, ranks, begin=boxes[:, 0], end=boxes.sum(axis=1))
            self.tensors |= dict.fromkeys(group["tensors"], saved)

    def fill(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's part of a tensor."""
        saved = self.tensors.get(name)
        if saved is None or saved.full.shape != tensor.shape:
            raise CheckpointError(f"{self.path} has no {name} of shape {tuple(tensor.shape)}")
        part = local(tensor)
        start = np.array(start_of(tensor), int)
        begin = np.maximum(saved.begin, start)  # (n, dim): of the overlaps
        end = np.minimum(saved.end, start + np.array(part.shape, int))
        for i in np.flatnonzero((begin < end).all(axis=1)):
            in_part = tuple(map(slice, begin[i] - start, end[i] - start))
            in_chunk = tuple(map(slice, begin[i] - saved.begin[i], end[i] - saved.begin[i]))
            chunk = self.open_file(self.path / file_of(saved.ranks[i]))[name]
            part[in_part].copy_(chunk[in_chunk])


# --------------------------------------------------------------------------------------------------
# Tensors and ranks


def flatten(state: dict, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts, each with its keys joined by dots."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory, without gradients."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()


def start_of(tensor: Tensor) -> tuple[int, ...]:
    """The indices in the full tensor at which this rank's part starts."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    # This method is not public, but it handles rows split twice, over tp and then over dp_shard.
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks; 0 and 1 without a process group."""
    if not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


# --------------------------------------------------------------------------------------------------
# The checkpoints of a run


@dataclass
class Saver:
    """Writes the checkpoints of a run, and removes old ones. All ranks call its methods together.

    A failed save raises nothing before `close`, because a later one may succeed.
    """

    run: Path  # the run folder
    keep_last: int  # number of latest checkpoints to keep
    keep_every: int  # also keep those whose step is a multiple of this; 0: none
    extra_files: dict[str, bytes]  # see save_state
    on_all_ranks: Callable
    report: Callable[[dict, str], None]  # called after each save with a row and a line for the log
    failure: str | None = None  # why the last save failed, if it did

    def save(self, state: dict, manifest: dict, problem: str | None = None) -> None:
        """Save `state` as step manifest["step"], or only report a `problem`, which forbids that."""
        self.write(state, manifest, problem)

    def wait(self) -> None:
        """Wait for the save in progress: there is one only in extras/async_save.py."""

    def close(self) -> None:
        """Wait for the last save. Raises CheckpointError if it has failed."""
        self.wait()
        if self.failure:
            raise CheckpointError(self.failure)

    def write(
        self,
        state: dict,
        manifest: dict,
        problem: str | None,
        chunks: dict | None = None,
        blocking_seconds: float | None = None,
    ) -> None:
        """Write a checkpoint, remove old ones, and report that to the log.

        `blocking_seconds` are those for which training waited, if it does not wait for this call.
        """
        began = time.perf_counter()
        step = manifest["step"]
        path = step_path(self.run, step)
        row = {"step": step, "event": "checkpoint", "path": str(path)}
        self.failure = None
        try:
            if problem:
                raise CheckpointError(problem)
            others = self.extra_files, self.on_all_ranks, chunks
            row["bytes"] = save_state(path, state, manifest, *others)
            remove_old(self.run, step, self.keep_last, self.keep_every)
        except Exception as error:
            if type(error) is RuntimeError and "gloo/" in str(error):
                raise  # a rank is lost: see dist.name_lost_rank
            self.failure = f"cannot write {path}: {str(error) or repr(error)}"
            row |= {"event": "checkpoint_failed", "error": self.failure}
        row["seconds"] = time.perf_counter() - began + (blocking_seconds or 0.0)
        row["blocking_seconds"] = blocking_seconds or row["seconds"]
        if self.failure:
            line = f"NOT SAVED: {self.failure}; earlier checkpoints are intact"
        else:
            line = f"saved {path}: {row['bytes'] / 1e6:,.1f} MB in {row['seconds']:.2f} s"
        self.report(row, line)


def remove_old(run: Path, step: int, keep_last: int, keep_every: int) -> None:
    """Remove checkpoints up to `step`, but the last `keep_last` and multiples of `keep_every`."""
    if rank_and_size()[0] > 0:
        return
    saved = [path for path in list_checkpoints(run) if step_of(path) <= step]
    for path in saved[:-keep_last]:
        if keep_every == 0 or step_of(path) % keep_every > 0:
            with contextlib.suppress(OSError):  # it was removed meanwhile, or is another user's
                shutil.rmtree(hide(path), ignore_errors=True)


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
    """The manifest of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{path}/manifest.json is missing or damaged: {error}") from None
    if (found := manifest.get("format")) != FORMAT:
        raise FormatError(f"{path} has format {found}, not {FORMAT}: use the code that wrote it")
    crc = manifest.pop("crc32", None)
    if crc != zlib.crc32(json.dumps(manifest).encode()):
        raise CheckpointError(f"{path}/manifest.json has changed since it was written")
    if step_of(path) not in (None, manifest["step"]):
        raise FormatError(f"{path} was saved as step {manifest['step']}: give it this number again")
    return manifest


def verify(path: Path, part: int = 0, parts: int = 1) -> str | None:
    """Compare a checkpoint with its manifest: return the first problem, or None.

    Reads every `parts`-th file, from file number `part`, so that `parts` ranks can share the files.
    CRC-32 detects damage, not forgery, at about 1 GB/s. Raises FormatError and PermissionError.
    """
    try:
        files = read_manifest(path)["files"]
        for name in sorted(files)[part::parts]:
            if Path(name).name != name:
                return f"{name} is not in this folder"
            crc = 0
            with open(path / name, "rb") as file:
                while block := file.read(1 << 20):
                    crc = zlib.crc32(block, crc)
                found = {"bytes": file.tell(), "crc32": f"{crc:08x}"}
            if found != files[name]:
                return f"{name} has changed since it was written: {found}, not {files[name]}"
    except (FormatError, PermissionError):
        raise  # it may be intact, so no start may replace it
    except Exception as error:  # damaged JSON can raise almost any
        return f"{type(error).__name__}: {error}"
    return None


# --------------------------------------------------------------------------------------------------
# Files


def file_of(rank: int) -> str:
    """The name of the file in which a rank writes its chunks."""
    return f"rank-{rank:05d}.safetensors"


def temporary(path: Path) -> Path:
    """The name of a checkpoint that is not yet complete, or is being removed."""
    return path.with_name(f".{path.name}.tmp")


def remove_leftovers(path: Path) -> None:
    """Remove the temporary folders of killed saves beside the checkpoint `path`."""
    for folder in [temporary(path), *path.parent.glob(".step-*.tmp")]:
        shutil.rmtree(folder, ignore_errors=True)


def hide(path: Path) -> Path:
    """Take a checkpoint's name away, so that a kill leaves no half of it; return where it is."""
    hidden = temporary(path.with_name(f"{path.name}.old"))
    os.rename(path, hidden)
    return hidden


def complete(work: Path, path: Path, manifest: dict) -> None:
    """Turn the temporary folder `work` into the checkpoint `path`."""
    manifest = {**manifest, "format": FORMAT, "torch": torch.__version__}
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())  # of all that comes before it
    write_file(work / "manifest.json", [json.dumps(manifest, indent=2).encode()])
    sync(work)
    if path.exists():  # it is damaged, or the run would have continued from it
        hide(path)  # `remove_leftovers` removes it
    os.rename(work, path)
    sync(path.parent)
    sync(path.parent.parent)


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
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "crc32": f"{crc:08x}"}


def write_safetensors(
    path: Path, tensors: dict[str, Tensor], read: Callable[[str], Tensor] | None = None
) -> dict:
    """Write tensors to a file; return the file's entry in the manifest.

    With read(name), which returns the values of one tensor, `tensors` may be on the meta device.
    """
    read = read or tensors.__getitem__
    # The widest dtypes first, after a header padded to 8 bytes, so that each tensor is aligned.
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.nbytes
        dtype = DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def blocks() -> Iterator:
        yield len(text).to_bytes(8, "little") + text
        for name in names:
            yield read(name).cpu().contiguous().view(-1).view(torch.uint8).numpy()

    return write_file(path, blocks())


def map_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped into memory: only what is used is read."""
    file = np.memmap(path, mode="c")  # copy-on-write: torch warns about memory that is read-only
    start = 8 + int.from_bytes(file[:8].tobytes(), "little")
    tensors = {}
    for name, entry in json.loads(file[8:start].tobytes()).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            values = torch.from_numpy(file[start + begin : start + end])
            tensors[name] = values.view(DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
