"""How a run saves: in the background or not, after failures, and which checkpoints it removes."""

import contextlib
import threading
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

import checkpoint
from checkpoint import CheckpointError, step_of


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

    A failed save raises nothing: `rows` and `failure` report it.
    """

    run: Path
    async_save: bool  # training waits only for a copy in host memory; a thread writes the files
    keep_last: int  # checkpoints to keep; 0 keeps all
    keep_every: int  # also keep those whose step is a multiple of this; 0 for none
    timeout: timedelta  # for the collectives of a save
    # Small files to put in every checkpoint, {name: contents}, such as the tokenizer's
    extra_files: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self):
        self.rank = torch.distributed.get_rank()
        # The saving thread's collectives must not mix with those of the training step.
        self.group = torch.distributed.new_group(backend="gloo", timeout=self.timeout)
        self.host_copy = torch.empty(0, dtype=torch.uint8)
        self.thread: threading.Thread | None = None
        # Of the saves that have finished, for the log: their event is "checkpoint", or
        # "checkpoint_failed" with the reason as `error`.
        self.rows: list[dict] = []
        self.failure: str | None = None  # "cannot write PATH: REASON" if the last save failed
        self.ends_run = False  # after a save that was refused: no later one could be better

    def save(self, state: dict, manifest: dict) -> None:
        """Save `state`, nested dicts of tensors and DTensors, as step manifest["step"].

        Waits for the previous save. With async_save, returns as soon as `state` may change.
        """
        began = time.perf_counter()
        self.wait()  # before the copy, which replaces that of the previous save
        try:
            local = checkpoint.local_parts(state)
            if self.async_save:
                local = self.copy_to_host(local)
        except Exception as error:
            local = error  # save_state tells all ranks
        if not self.async_save:
            self.finish(state, local, manifest, began)
            return
        arguments = (state, local, manifest, began, time.perf_counter() - began)
        self.thread = threading.Thread(target=self.finish, args=arguments, daemon=True)
        self.thread.start()

    def refuse(self, step: int, why: str, ends_run: bool = False) -> None:
        """Report the save of `step` as failed without trying: earlier checkpoints are better."""
        self.wait()
        self.ends_run = ends_run
        self.finish({}, CheckpointError(why), {"step": step}, time.perf_counter())

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def copy_to_host(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy to one block of host memory; allocating it, the slowest part, is done only once."""
        size = sum(part.nbytes for part in parts.values())
        if size != self.host_copy.nbytes:
            self.host_copy = torch.empty(0)  # frees the old one first
            is_cuda = any(part.is_cuda for part in parts.values())
            self.host_copy = pinned(size) if is_cuda else torch.empty(size, dtype=torch.uint8)
        copies = {}
        end = 0
        # By falling element size, each copy is aligned.
        for name, part in sorted(parts.items(), key=lambda item: -item[1].itemsize):
            begin, end = end, end + part.nbytes
            copy = self.host_copy[begin:end].view(part.dtype).view(part.shape)
            copies[name] = copy.copy_(part)
        return copies

    def finish(
        self,
        state: dict,
        local: dict[str, Tensor] | Exception,
        manifest: dict,
        began: float,
        blocking: float | None = None,
    ) -> None:
        """Write the checkpoint and report it. Runs in the saving thread if async_save."""
        path = checkpoint.step_path(self.run, manifest["step"])
        row = {"step": manifest["step"], "event": "checkpoint", "path": str(path)}
        self.failure = None
        try:
            row["bytes"] = checkpoint.save_state(
                path, state, manifest, self.extra_files, self.group, local
            )
            if self.rank == 0:
                self.remove_old(path)
        except Exception as error:
            why = checkpoint.reason(error)
            self.failure = f"cannot write {path}: {why}"
            row |= {"event": "checkpoint_failed", "error": why}
            if self.rank == 0:
                checkpoint.remove_leftovers(path)
        row["seconds"] = time.perf_counter() - began
        row["blocking_seconds"] = row["seconds"] if blocking is None else blocking
        self.rows.append(row)

    def remove_old(self, latest: Path) -> None:
        """Remove checkpoints before `latest` as keep_last and keep_every demand.

        Later ones did not verify when this run started. They neither count nor are removed.
        """
        last = step_of(latest)
        found = [path for path in checkpoint.list_checkpoints(self.run) if step_of(path) <= last]
        for path in found[: -self.keep_last] if self.keep_last else []:
            if self.keep_every and step_of(path) % self.keep_every == 0:
                continue
            with contextlib.suppress(OSError):  # it is gone, or another user's
                # Renamed first, so that a run killed meanwhile leaves no incomplete checkpoint.
                path.rename(path.with_name(f".{path.name}.removed.tmp"))
                checkpoint.remove_leftovers(path)
