"""--async_save: training waits only for a copy in host memory, and a thread writes the files.

A rank needs host memory for what it writes, its share of the weights and the optimizer state. The
copy keeps this memory from the first save on. To remove this, delete this file, and its branch in
train.open_saver.
"""

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


def pinned(size: int) -> Tensor:
    """Return pinned memory, to which GPUs copy faster; torch would allocate a power of two."""
    buffer = torch.empty(size, dtype=torch.uint8)
    cuda = torch.cuda.cudart()
    if int(cuda.cudaHostRegister(buffer.data_ptr(), size, 0)) == 0:
        weakref.finalize(buffer, cuda.cudaHostUnregister, buffer.data_ptr())
    return buffer


class AsyncSaver(checkpoint.Saver):
    """A Saver whose `save` returns as soon as the tensors may change.

    timeout       of the collectives during a save

    The other arguments are those of checkpoint.Saver.
    """

    def __init__(
        self,
        run: Path,
        keep_last: int,
        keep_every: int,
        timeout: timedelta,
        extra_files: dict[str, bytes] | None = None,
        verified: Path | None = None,
    ):
        # The saving thread's collectives must not mix with those of the training step.
        self.group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        on_all_ranks = functools.partial(dist.on_all_ranks, group=self.group)
        super().__init__(run, keep_last, keep_every, on_all_ranks, extra_files, verified)
        self.host_memory = torch.empty(0, dtype=torch.uint8)
        self.copies: dict[str, Tensor] = {}  # in host_memory
        self.thread: threading.Thread | None = None

    def save(self, state: dict, manifest: dict) -> None:
        """Copy `state` as step manifest["step"], and begin to write it.

        Waits for the previous save.
        """
        began = time.perf_counter()
        self.wait()  # before the copy, which replaces the previous one
        try:
            self.on_all_ranks(self.copy_to_host, state)
        except Exception as error:
            self.add_row(manifest["step"], {"error": checkpoint.reason(error)}, began)
            return
        arguments = (state, manifest, self.copies, began, time.perf_counter() - began)
        self.thread = threading.Thread(target=self.write, args=arguments, daemon=True)
        self.thread.start()

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self.thread:
            self.thread.join()
            self.thread = None

    @checkpoint.as_checkpoint_error()
    def copy_to_host(self, state: dict) -> None:
        """Copy what this rank writes to one block of host memory, as `copies`.

        The block is allocated only once, because that takes longest. The DefaultStager of
        torch.distributed.checkpoint took 1.6 times as long on CPUs.
        """
        chunks = checkpoint.chunks_to_write(state)
        size = sum(chunk.nbytes for chunk in chunks.values())
        self.copies = {}
        if size != self.host_memory.nbytes:
            self.host_memory = torch.empty(0)  # frees the old block first
            is_cuda = any(chunk.is_cuda for chunk in chunks.values())
            self.host_memory = pinned(size) if is_cuda else torch.empty(size, dtype=torch.uint8)
        end = 0
        # In the order of decreasing element size, each copy is aligned.
        for name, chunk in sorted(chunks.items(), key=lambda item: -item[1].itemsize):
            begin, end = end, end + chunk.nbytes
            copy = self.host_memory[begin:end].view(chunk.dtype).view(chunk.shape)
            self.copies[name] = copy.copy_(chunk)
