"""What a run folder holds, and which run may continue in it.

OUT/config.json      the flags of the last start
    metrics.jsonl    one row per log_interval, evaluation and checkpoint
    optim.jsonl      one row per parameter, with --optim_metrics_interval
    checkpoints/     see checkpoint.py
    profile/         with --profile
    flight/          the last collectives, where a rank hung or was lost
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import checkpoint
from cli import UsageError
from config import Config
from metrics import replace_file


@dataclass(frozen=True)
class ResumePoint:
    """A run begins after `step`, with the state of `checkpoint`; a new run at (0, None)."""

    step: int
    checkpoint: Path | None


def resume_key(manifest: dict) -> dict:
    """What must not change within a run: the shape of the model, the data and their order."""
    return {
        **manifest["model"],
        "data": manifest["data"],
        "global_batch_size": manifest["config"]["global_batch_size"],
        "seed": manifest["config"]["seed"],
    }


def resume_point(config: Config, manifest: dict, latest: Path | None) -> ResumePoint:
    """Find where the run begins. Raises UsageError where it may not.

    `latest`, the newest valid checkpoint of --out, comes before --resume PATH, so that the same
    command can be given again.
    """
    out = Path(config.out)
    if config.resume == "never" and out.exists() and any(out.iterdir()):
        raise UsageError(
            f"--out {out} is not empty, and --resume never would overwrite it: choose another --out"
        )
    resume_from = latest
    if config.resume not in ("auto", "never"):
        named = Path(config.resume)
        check_named(named, latest, out)
        resume_from = latest or named
    if resume_from is None:
        return ResumePoint(steps_without_checkpoint(out, config.max_steps), None)
    saved = checkpoint.read_manifest(resume_from)
    check_same_run(resume_from, saved, manifest)
    return ResumePoint(saved["step"], resume_from)


def check_named(named: Path, latest: Path | None, out: Path) -> None:
    """Check the checkpoint of --resume PATH against the newest one of --out."""
    if not (named / "manifest.json").is_file():
        raise UsageError(
            f"--resume {named}: no checkpoint there; "
            "name one like runs/tiny/checkpoints/step-00000250"
        )
    if latest is None:
        if problem := checkpoint.verify(named):
            raise checkpoint.CheckpointError(f"--resume {named}: {problem}")
        return
    is_of_this_run = named.resolve().parent == latest.resolve().parent
    if is_of_this_run and named.resolve() != latest.resolve():
        raise UsageError(
            f"--resume {named} is not the newest checkpoint of --out {out}: "
            "choose another --out to branch off"
        )


def check_same_run(path: Path, saved: dict, manifest: dict) -> None:
    try:
        before = resume_key(saved)
        now = resume_key(manifest)
    except (KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a checkpoint of train.py: its manifest.json lacks {error}"
        ) from None
    changed = []
    for key, value in now.items():
        if value != before.get(key):
            changed.append(f"{key} was {before.get(key)} and is now {value}")
    if changed:
        raise UsageError(
            f"{path} cannot be continued: {', '.join(changed)}; "
            "change that back or choose another --out"
        )


def steps_without_checkpoint(out: Path, max_steps: int) -> int:
    """Return the steps of a finished run with --checkpoint none in `out`; 0 if there is none.

    Raises UsageError if it is not finished, since it cannot be continued.
    """
    try:
        before = json.loads((out / "config.json").read_text())
        if before["checkpoint"] != "none":
            return 0
        rows = (out / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(row)["step"] for row in rows]
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--out {out} holds files that are not train.py's ({error!r}): choose another --out"
        ) from None
    if steps and steps[-1] >= max_steps:
        return steps[-1]
    raise UsageError(
        f"--out {out} holds a run that saved no checkpoints and cannot be continued: "
        "choose another --out"
    )


def create(out: Path, config: Config) -> None:
    """Make `out` this run's folder."""
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "config.json", json.dumps(dataclasses.asdict(config), indent=2) + "\n")
