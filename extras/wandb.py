"""--tracker wandb: training and evaluation rows are also sent to wandb.

wandb sends from a process of its own, so a step does not wait. To remove it, delete this file and
its branch in train.open_log.
"""

import importlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path


class TrackerError(RuntimeError):
    """A tracker cannot be opened in the first start of a run."""

    exit_status = 2


def open_tracker(out: Path, config: dict, is_first: bool) -> Callable[[dict], None] | None:
    """Return send(row) of --tracker, or None with a printed line if it fails in a later start.

    In the first start of a run somebody is there to correct it: raises TrackerError.
    """
    try:
        return open_wandb(out, config)
    except Exception as error:
        if is_first:
            raise TrackerError(
                f"--tracker {config['tracker']} cannot be used: {error!r}; correct this, or train "
                "with --tracker none"
            ) from None
        print(f"--tracker failed and is off until the next start: {error!r}", flush=True)
        return None


def open_wandb(out: Path, config: dict) -> Callable[[dict], None]:
    """Start or continue the wandb run whose id is in out/wandb_id; return send(row)."""
    wandb = importlib.import_module("wandb")  # an optional package
    file = out / "wandb_id"
    run_id = f"{out.name}-{datetime.now():%Y%m%d-%H%M%S}"
    if file.exists():
        run_id = file.read_text()
    options = {"project": "nanoshard", "name": out.name, "dir": out, "config": config}
    run = wandb.init(id=run_id, resume="allow", **options)
    file.write_text(run_id)

    def send(row: dict) -> None:
        values = {name: value for name, value in row.items() if name != "step"}
        run.log(values, step=row["step"])

    return send
