"""Save checkpoints, in the background or not; report failed saves; remove old checkpoints."""

import contextlib
import functools
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor

import checkpoint
import dist
from checkpoint import step_of


def pinned(size: int) -> Tensor:
    """Return pinned memory, to which GPUs copy faster; torch would allocate a power of two."""
    buffer = torch.empty(size, dtype=torch.uint8)
    cuda = torch.cuda.cudart()
    if int(cuda.cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
        weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())
    return buffer


class Saver:
    """Writes the checkpoints of a run. All ranks construct it and call its methods together.

    A failed save raises nothing: `failure` and a row of `take_rows` report it.

    run           the run folder
    async_save    training waits only for a copy in host memory; a thread writes the files
    keep_last     number of checkpoints to keep; 0 keeps all
    keep_every    also keep those whose step is a multiple of this; 0 for none
    timeout       of the collectives during a save
    extra_files   {name: contents} of files in every checkpoint, such as the tokenizer
    """

    def __init__(
        self,
        run: Path,
        async_save: bool,
        keep_last: int,
        keep_every: int,
        timeout: timedelta,
        extra_files: dict[str, bytes] | None = None,
    ):
        self.run = run
        self.async_save = async_save
        self.keep_last = keep_last
        self.keep_every = keep_every
        self.extra_files = extra_files
        self.rank = torch.distributed.get_rank()
        # The saving thread's collectives must not mix with those of the training step.
        self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        self.on_all_ranks = functools.partial(dist.on_all_ranks, group=self.group)
        self.host_memory = torch.empty(0, dtype=torch.uint8)
        self.copies: dict[str, Tensor] = {}  # in host_memory
        self.index: dict[str, dict] = {}  # which rank writes what: the same in every save
        self.thread: threading.Thread | None = None
        self.rows: list[dict] = []
        self.failure: str | None = None  # "cannot write PATH: REASON" if the last save failed
        self.ends_run = False  # set by `refuse` if no later save could be better

    def save(self, state: dict, manifest: dict) -> None:
        """Save `state`, nested dicts of tensors and DTensors, as step manifest["step"].

        Waits for the previous save. With async_save, returns as soon as `state` may change.
        """
        began = time.perf_counter()
        self.wait()  # before the copy, which replaces the previous one
        if not self.async_save:
            self.write(state, manifest, None, began)
            return
        try:
            self.on_all_ranks(self.copy_to_host, state)
        except Exception as error:
            self.add_row(manifest["step"], {"error": checkpoint.reason(error)}, began)
            return
        arguments = (state, manifest, self.copies, began, time.perf_counter() - began)
        self.thread = threading.Thread(target=self.write, args=arguments, daemon=True)
        self.thread.start()

    def refuse(self, step: int, why: str, ends_run: bool = False) -> None:
        """Report the save of `step` as failed without trying it: earlier checkpoints are better."""
        self.wait()
        self.ends_run = ends_run
        self.add_row(step, {"error": why}, began=time.perf_counter())

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def take_rows(self) -> list[dict]:
        """Return the log rows of the saves that have finished since the last call.

        Their event is "checkpoint", or "checkpoint_failed" with the reason as `error`.
        """
        rows = list(self.rows)
        del self.rows[: len(rows)]  # not all: the saving thread may have appended one meanwhile
        return rows

    @checkpoint.as_checkpoint_error()
    def copy_to_host(self, state: dict) -> None:
        """Copy this rank's parts to one block of host memory, as `copies`.

        The block is allocated only once, because that takes longest. The DefaultStager of
        torch.distributed.checkpoint took 1.6 times as long on CPUs.
        """
        parts = checkpoint.local_parts(state)
        size = sum(part.nbytes for part in parts.values())
        self.copies = {}
        if size != self.host_memory.nbytes:
            self.host_memory = torch.empty(0)  # frees the old block first
            is_cuda = any(part.is_cuda for part in parts.values())
            self.host_memory = pinned(size) if is_cuda else torch.empty(size, dtype=torch.uint8)
        end = 0
        # In the order of decreasing element size, each copy is aligned.
        for name, part in sorted(parts.items(), key=lambda item: -item[1].itemsize):
            begin, end = end, end + part.nbytes
            copy = self.host_memory[begin:end].view(part.dtype).view(part.shape)
            self.copies[name] = copy.copy_(part)

    def write(
        self,
        state: dict,
        manifest: dict,
        parts: dict[str, Tensor] | None,
        began: float,
        waited: float | None = None,
    ) -> None:
        """Write the checkpoint and add its row. Runs in the saving thread if async_save."""
        path = checkpoint.step_path(self.run, manifest["step"])
        try:
            self.index = self.index or checkpoint.choose_writers(state, self.on_all_ranks)
            arguments = (path, state, manifest, self.extra_files, self.on_all_ranks, parts)
            outcome = {"bytes": checkpoint.save_state(*arguments, self.index)}
            if self.rank == 0:
                self.remove_old(path)
        except Exception as error:
            if self.rank == 0:
                checkpoint.remove_leftovers(path)
            outcome = {"error": checkpoint.reason(error)}
        self.add_row(manifest["step"], outcome, began, waited)

    def add_row(self, step: int, outcome: dict, began: float, waited: float | None = None) -> None:
        """Add a row to the log, with {"bytes": ...} or {"error": ...}, and set `failure`.

        The save started at `began`. Training waited `waited` seconds for it (default: to its end).
        """
        path = checkpoint.step_path(self.run, step)
        seconds = time.perf_counter() - began
        row = {"step": step, "event": "checkpoint", "path": str(path), **outcome}
        self.failure = None
        if "error" in outcome:
            row["event"] = "checkpoint_failed"
            self.failure = f"cannot write {path}: {outcome['error']}"
        blocking = seconds if waited is None else waited
        self.rows.append(row | {"seconds": seconds, "blocking_seconds": blocking})

    def remove_old(self, latest: Path) -> None:
        """Remove checkpoints before `latest`, except those that keep_last and keep_every keep.

        Checkpoints of later steps did not verify when this run started. They are not removed, and
        keep_last does not count them.
        """
        last = step_of(latest)
        found = [path for path in checkpoint.list_checkpoints(self.run) if step_of(path) <= last]
        for path in found[: -self.keep_last] if self.keep_last else []:
            if self.keep_every and step_of(path) % self.keep_every == 0:
                continue
            with contextlib.suppress(OSError):  # it was removed meanwhile, or is another user's
                # Renamed first, so that a run killed meanwhile leaves no incomplete checkpoint.
                path.rename(checkpoint.temporary(path, ".removed"))
                checkpoint.remove_leftovers(path)
