"""Verify and consolidate checkpoints.

python -m tools.checkpoint verify RUN|CHECKPOINT
python -m tools.checkpoint consolidate RUN|CHECKPOINT OUT

A RUN is a run folder, such as runs/tiny; a CHECKPOINT is a folder in it, such as
runs/tiny/checkpoints/step-00000700.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

import checkpoint
import errors
from checkpoint import CheckpointError
from tools.common import (
    checkpoints_at,
    new_folder,
    newest_checkpoint,
    write_full,
)


def verify(path: Path) -> None:
    """Print a line for each checkpoint at `path`. Raises CheckpointError and UsageError."""
    paths = checkpoints_at(path)
    damaged = 0
    for each in paths:
        try:
            manifest = checkpoint.read_manifest(each)
            if problem := checkpoint.verify(each):
                raise CheckpointError(f"{each}: {problem}")
        except CheckpointError as error:  # report the other checkpoints as well
            if paths == [path]:
                raise
            damaged += 1
            print(f"DAMAGED: {error}")
            continue
        size = f"{total_bytes(manifest) / 1e6:,.1f} MB"
        print(f"{each}: complete and unchanged: {len(manifest['files'])} files, {size}")
    if damaged:
        raise CheckpointError(f"{path}: {damaged} of {len(paths)} checkpoints damaged")


def total_bytes(manifest: dict) -> int:
    """The size of a checkpoint's files in bytes, without its manifest.json."""
    return sum(file["bytes"] for file in manifest["files"].values())


# --------------------------------------------------------------------------------------------------
# A checkpoint in one file


def consolidate(named: Path, out: Path) -> None:
    """Write a checkpoint, or the newest of a run, as the new checkpoint `out`, as one rank would.

    Runs in one process, with one tensor in memory. `out` appears complete or not at all. Raises
    CheckpointError and UsageError.
    """
    path = newest_checkpoint(named)
    manifest = checkpoint.read_manifest(path)
    reader = checkpoint.Reader(path)
    layout = {name: entry.full for name, entry in reader.tensors.items()}
    # For all tensors in turn: glibc before 2.38 seldom reuses the memory of aligned blocks.
    memory = torch.empty(max(full.nbytes for full in layout.values()), dtype=torch.uint8)

    def read(name: str) -> Tensor:
        full = memory[: layout[name].nbytes].view(layout[name].dtype).view(layout[name].shape)
        reader.fill(name, full)
        return full

    with new_folder(out) as work:
        kept = {}  # with the old checksums, so that a file that is damaged now does not verify
        for name, entry in manifest["files"].items():
            if not name.endswith((".safetensors", "index.json")):
                kept[name] = entry
                checkpoint.write_file(work / name, [(path / name).read_bytes()])
        files = kept | write_full(work, layout, read)
        checkpoint.complete(work, out, manifest | {"files": files})


# --------------------------------------------------------------------------------------------------
# The command


def build_parser() -> errors.Parser:
    parser = errors.Parser(prog="tools.checkpoint", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    path = {"metavar": "RUN|CHECKPOINT", "type": Path}

    verifying = commands.add_parser("verify", help="compare checkpoints with their manifests")
    verifying.add_argument("path", **path)
    consolidating = commands.add_parser(
        "consolidate", help="write a checkpoint, by default a run's latest, as one file"
    )
    consolidating.add_argument("path", **path)
    consolidating.add_argument("out", metavar="OUT", type=Path, help="the folder to create")
    return parser


def run(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.command == "verify":
        verify(args.path)
        return
    consolidate(args.path, args.out)
    size = total_bytes(checkpoint.read_manifest(args.out))
    print(f"{args.out}: one file, {size / 1e6:,.1f} MB")


def main(argv: list[str]) -> int:
    return errors.execute("tools.checkpoint", run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
