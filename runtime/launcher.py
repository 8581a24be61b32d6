"""The launcher of the ranks: if it has gone, they end. Imported before torch."""

import os
import sys
import threading
import time
from pathlib import Path

from runtime import console

PARENT = os.getppid()  # now, since the launcher may die while torch is imported


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
