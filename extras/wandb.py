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


def open_tracker(out: Path, config: dict, starts: list[dict]) -> Callable[[dict], None] | None:
    """Return send(row) of --tracker, or None with a printed line if it fails in a later start.

    The tracker's run is named after the first of the run's earlier `starts`. In a first start
    somebody is there to correct it: raises TrackerError.
    """
    began = datetime.now()
    if starts:
        began = datetime.fromisoformat(starts[0]["time"])
    name = f"{out.name}-{began:%Y%m%d-%H%M%S}"
    try:
        return open_wandb(out, name, config)
    except Exception as error:
        if not starts:
            raise TrackerError(
                f"--tracker {config['tracker']} cannot be used: {error!r}; correct this, or train "
                "with --tracker none"
            ) from None
        print(f"--tracker failed and is off until the next start: {error!r}", flush=True)
        return None


def open_wandb(out: Path, run_id: str, config: dict) -> Callable[[dict], None]:
    """Start or continue the wandb run `run_id`, with its files in `out`; return send(row)."""
    wandb = importlib.import_module("wandb")  # an optional package
    options = {"project": "nanoshard", "name": out.name, "dir": out, "config": config}
    run = wandb.init(id=run_id, resume="allow", **options)

    def send(row: dict) -> None:
        values = {name: value for name, value in row.items() if name != "step"}
        run.log(values, step=row["step"])

    return send
