"""--watchdog: if ranks hang or die, the job ends with one line that names them.

Without it, torchrun ends the ranks of its host when one of them dies, and --timeout ends a
collective that hangs; neither says which rank was the first, nor sees a lost host. It costs two
threads per rank and a message a second. To remove it, delete this file and its branch in
train.command.

What happens when rank 3 is killed in step 41:

1. Collectives with rank 3 fail on other ranks, and the error passes through `Watchdog.__exit__`. If
   they hang instead, rank 2's heartbeat thread finds rank 3, which it watches, silent (`run`).
2. A few of the ranks that notice this read all heartbeats (`abort_if_confirmed`). The first rank to
   announce the failure prints who died after which step, for torchrun too (`errors.report_error`).
3. Every rank ends, even if its main thread hangs: with status 1, or 0 if its run is complete
   (`abort`). On GPUs, NCCL's error handling may end a rank first, with a line of its own.
4. `torchrun --max-restarts` or Slurm starts all ranks again, from the latest valid checkpoint.

A rank whose own code fails prints its error (errors.execute); the other ranks then find it silent.
"""

import atexit
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed

import errors
from dist import SLOW_FACTOR, Progress
from errors import format_ranks

CONFIRM_INTERVALS = 3  # between two reads of all heartbeats, which show the silent ranks
INVESTIGATORS = 8  # ranks that read all heartbeats; if all of 4,096 did, it would take minutes
STORE_GONE = "the store that the ranks share does not answer: rank 0 or its host was lost"
LAST_WORDS_SECONDS = 10  # for a rank to exit after an error


class Heartbeat(NamedTuple):
    """What each rank writes to the store once per `Watchdog.interval`."""

    count: int
    reports: int  # of progress so far
    place: str  # where the rank was at the last report


class Watchdog:
    """A context that ends the job when a rank stops, dies or makes no progress.

    Once per `interval`, a thread of each rank writes the rank's heartbeat to the store and reads
    the next rank's: three small messages, whatever the size of the world. A rank reads the
    heartbeats of all ranks for CONFIRM_INTERVALS, to find which ranks failed, if it

    - finds the next rank silent for `timeout` seconds,
    - makes no progress itself for that long (SLOW_FACTOR times as long during slow work),
    - or leaves the context because a collective failed.

    If INVESTIGATORS ranks already do this, it leaves the work to them.

    store        of the rendezvous, over a connection of its own
    timeout      seconds
    progress     where this rank is; the thread only reads it
    """

    def __init__(
        self,
        store: torch.distributed.Store,
        rank: int,
        world_size: int,
        timeout: float,
        progress: Progress,
    ):
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self.progress = progress
        self.interval = min(1.0, timeout / 20)  # seconds
        self.inquiry = 2 * CONFIRM_INTERVALS * self.interval  # seconds to confirm a failure
        self.count = 1  # heartbeats sent
        self.stopped = threading.Event()
        self.announcing = threading.Lock()  # held from before the announcement until the end
        self.ending = threading.Lock()
        self.ask(store.add, "failures announced", 0)
        first = json.dumps(self.heartbeat()._replace(count=0))
        self.ask(store.set, f"heartbeat {rank}", first)  # or readers wait for it

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.count, self.progress.reports, self.progress.place)

    def __enter__(self) -> "Watchdog":
        self.thread = threading.Thread(target=self.run, daemon=True)
        if self.world_size > 1:
            self.thread.start()
            threading.Thread(target=self.watch_store, daemon=True).start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.world_size == 1:
            return
        if error is not None:
            atexit.register(end_process_soon)
        if kind is RuntimeError or isinstance(error, torch.distributed.DistError):
            # Perhaps a collective failed because another rank was lost: then this call never ends.
            self.abort_if_confirmed(collective_failed=True)
        self.stopped.set()
        self.thread.join(2 * self.interval)  # not forever: the store may not answer

    def run(self) -> None:
        """Watch the next rank and this rank's own progress, in the heartbeat thread.

        Time is counted in heartbeats: none is sent while a job is suspended, so its time stops.
        """
        self.store.set_timeout(timedelta(seconds=self.timeout))
        # In heartbeats. Leaves time to confirm the failure and print the line within `timeout`.
        limit = self.timeout / self.interval - 2 * CONFIRM_INTERVALS
        silent_for = 0  # heartbeats of this rank since the next rank's last one
        stalled_for = 0  # heartbeats since this rank's last report of progress
        last_heard = None
        last_reports = 0
        next_rank = (self.rank + 1) % self.world_size
        while not self.stopped.wait(self.interval):
            heard = self.exchange([next_rank])
            silent_for = silent_for + 1 if heard == last_heard else 0
            reports = self.progress.reports
            stalled_for = stalled_for + 1 if reports == last_reports else 0
            last_heard = heard
            last_reports = reports
            patience = SLOW_FACTOR if self.progress.is_slow else 1
            if max(silent_for, stalled_for / patience) > limit:
                self.abort_if_confirmed()

    def watch_store(self) -> None:
        """In a second thread, abort if `run` gets no answer from the store.

        A lost host closes no connections: the store's client asks to cancel, and waits forever.
        """
        waited, last_count = 0, -1
        while not self.stopped.wait(self.interval):
            waited = waited + 1 if self.count == last_count else 0
            last_count = self.count
            if waited > 1.5 * self.timeout / self.interval:
                self.abort(STORE_GONE)

    def exchange(self, ranks: Iterable[int]) -> list[Heartbeat]:
        """Send a heartbeat; return the latest ones of `ranks`. Abort if a failure is announced."""
        names = [f"heartbeat {rank}" for rank in ranks]
        self.ask(self.store.set, f"heartbeat {self.rank}", json.dumps(self.heartbeat()))
        self.count += 1
        *texts, failures = self.ask(self.store.multi_get, [*names, "failures announced"])
        if int(failures):
            with self.announcing:  # the main thread or `run` may be about to print the line
                self.abort()  # without a line: the rank that announced the failure prints it
        return [Heartbeat(*json.loads(text)) for text in texts]

    def ask(self, request: Callable, *arguments):
        """Return the store's answer to a request; abort if the store is lost."""
        try:
            return request(*arguments)
        except RuntimeError:
            # Without torchrun, rank 0 serves the store: perhaps it finished, and so will this rank.
            if self.stopped.wait(self.inquiry):
                sys.exit()  # ends this thread alone: the main thread has left the context
            self.abort(STORE_GONE)

    def abort_if_confirmed(self, collective_failed: bool = False) -> None:
        """Read all heartbeats for a while; if they show a failure, announce it and abort."""
        # Investigators are counted again in each period: if they die, other ranks take over.
        period = f"investigators {time.time() // self.inquiry:.0f}"
        if self.ask(self.store.add, period, 1) > INVESTIGATORS:
            if collective_failed:  # `run` goes on, and ends this process if a failure is announced
                self.stopped.wait(3 * self.inquiry)  # hosts may be slow
            return
        before = self.exchange(range(self.world_size))
        for _ in range(CONFIRM_INTERVALS):
            if self.stopped.wait(self.interval):
                return
            after = self.exchange(range(self.world_size))
        if line := self.diagnose(before, after, collective_failed):
            with self.announcing:
                is_first = self.ask(self.store.add, "failures announced", 1) == 1
                self.abort(line if is_first else None)

    def diagnose(
        self, before: list[Heartbeat], after: list[Heartbeat], collective_failed: bool
    ) -> str | None:
        """Return a line about the ranks that failed, from the heartbeats of all ranks at two times.

        Returns None if a collective failed and all ranks are alive: the error is this rank's.
        """
        silent = [rank for rank, last in enumerate(before) if last.count == after[rank].count]
        if silent:
            return (
                f"{format_ranks(silent)} stopped or died, last seen {after[silent[0]].place}; "
                f"rank {self.rank} is {after[self.rank].place}"
            )
        if collective_failed:
            return None
        reports = [heartbeat.reports for heartbeat in after]
        behind = [rank for rank, count in enumerate(reports) if count == min(reports)]
        if len(behind) == self.world_size:
            return f"no rank made progress for {self.timeout:g} s: all are {after[0].place}"
        ahead = reports.index(max(reports))
        return (
            f"{format_ranks(behind)} did not arrive within {self.timeout:g} s: "
            f"still {after[behind[-1]].place}; rank {ahead} is {after[ahead].place}"
        )

    def abort(self, line: str | None = None) -> None:
        """End this process, even if its main thread hangs."""
        self.ending.acquire()  # only once: another thread waits here for the end
        try:
            if line:
                # All ranks end now. torchrun reports the earliest failure as the cause: this one.
                began = time.time() - self.timeout
                errors.report_error(Path(sys.argv[0]).name, line, began=began)
            if self.rank == 0:
                # Rank 0 may serve the store, from which other ranks read the announcement.
                time.sleep(2 * self.interval)
        finally:
            os._exit(self.progress.exit_status)


def end_process_soon() -> None:
    """End this process with status 1 if its exit after an error exceeds LAST_WORDS_SECONDS.

    The destructors of torch's process groups hold the GIL and wait in NCCL for other ranks, which
    may never answer. faulthandler's timer is a C thread, which needs no GIL. Its traceback goes to
    /dev/null, so that the error stays the last line.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    faulthandler.dump_traceback_later(LAST_WORDS_SECONDS, exit=True, file=nowhere)
