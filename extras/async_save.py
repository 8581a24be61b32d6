"""--async_save: training waits only for a copy in host memory, and a thread writes the files.

A rank needs host memory for what it writes, its share of the weights and the optimizer state. The
copy keeps this memory from the first save on. To remove this, delete this file, and its branch in
train.open_saver.
"""

import functools
import threading
import time
from datetime import timedelta

import torch
import torch.distributed
from torch import Tensor

import checkpoint
import dist


class AsyncSaver(checkpoint.Saver):
    """A Saver whose `save` returns as soon as the tensors may change.

    Arguments are those of checkpoint.Saver. The saving thread has collectives of its own, which
    must not mix with those of the training step.
    """

    def __init__(self, timeout: timedelta, **options):
        group = torch.distributed.new_group(backend="gloo", timeout=timeout)
        super().__init__(on_all_ranks=functools.partial(dist.on_all_ranks, group=group), **options)
        self.chunks: dict[str, tuple[tuple, Tensor]] = {}  # by name, as of checkpoint.chunk_of
        self.thread: threading.Thread | None = None

    def save(self, state: dict, manifest: dict, problem: str | None = None) -> None:
        """Copy `state` as step manifest["step"], and begin to write it.

        Waits for the previous save. Raises on all ranks if a rank has too little host memory.
        """
        began = time.perf_counter()
        self.wait()  # before the copy, which replaces the previous one
        self.on_all_ranks(self.copy_to_host, state)
        waited = time.perf_counter() - began
        arguments = (state, manifest, problem, self.chunks, waited)
        # No daemon: if the run diverges, the process ends after this thread has finished.
        self.thread = threading.Thread(target=self.write_in_thread, args=arguments)
        self.thread.start()

    def write_in_thread(self, *arguments) -> None:
        """Write the files. The error of a lost or slow rank fails the save, as all others do."""
        try:
            self.write(*arguments)
        except Exception as error:
            self.failure = f"the save of step {arguments[1]['step']} was not finished: {error}"

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self.thread:
            self.thread.join()
            self.thread = None

    def copy_to_host(self, state: dict) -> None:
        """Copy what this rank writes, as `chunks`, to memory that is allocated only once."""
        for name, tensor in checkpoint.flatten(state):
            start, values = checkpoint.chunk_of(tensor)
            if name not in self.chunks:  # GPUs copy faster to pinned memory
                copy = torch.empty_like(values, device="cpu", pin_memory=values.is_cuda)
                self.chunks[name] = start, copy
            self.chunks[name][1].copy_(values)
