"""Before torch is imported, which takes seconds: Ctrl-C, and who started this process."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from runtime import console

PARENT = os.getppid()  # now, since the launcher may die while torch is imported
INTERVAL = 1.0  # seconds between two looks


def leave(number: int, frame) -> None:
    os._exit(130)


def end_quietly() -> None:
    """Until `take_ctrl_c`, Ctrl-C ends this process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup's & ignores it
        signal.signal(signal.SIGINT, leave)


def take_ctrl_c() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt, so that what is open is closed."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_launched() -> bool:
    """Whether torchrun or srun started this process, and not a shell, which it may outlive."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ


def watch() -> None:
    """End this process when its launcher has gone: nobody would, in no phase of a run.

    The kernel gives an orphan another parent. PR_SET_PDEATHSIG tells the same, but on Linux only,
    without a line, and also where a thread of the launcher ends.
    """
    if is_launched():
        threading.Thread(target=look, daemon=True).start()


def look() -> None:
    while os.getppid() == PARENT:
        time.sleep(INTERVAL)
    try:
        console.close()
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once on each host
            console.print_error(
                f"{Path(sys.argv[0]).name}: error: the launcher of the ranks on this host, process "
                f"{PARENT}, has gone: they end, too"
            )
    finally:  # stderr may have gone with it
        os._exit(1)
