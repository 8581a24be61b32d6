"""Before torch is imported, which takes seconds: Ctrl-C, and who started this process."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from runtime import console

PARENT = os.getppid()  # now, since the launcher may die while torch is imported


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


def watch() -> None:
    """End this process when torchrun or srun, which started it, has gone: nobody else would.

    A process that a shell started may outlive it. The kernel gives an orphan another parent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_STEP_NUM_TASKS" in os.environ:
        threading.Thread(target=end_with_launcher, daemon=True).start()


def end_with_launcher() -> None:
    while os.getppid() == PARENT:
        time.sleep(1)
    try:
        console.ended.set()
        if os.environ.get("LOCAL_RANK", "0") == "0":  # once on each host
            console.print_error(
                f"{Path(sys.argv[0]).name}: error: the launcher of the ranks on this host, process "
                f"{PARENT}, has gone: they end, too"
            )
    finally:  # stderr may have gone with it
        os._exit(1)
