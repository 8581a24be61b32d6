"""List, verify and consolidate checkpoints.

python -m tools.checkpoint list RUN
python -m tools.checkpoint verify RUN|CHECKPOINT
python -m tools.checkpoint consolidate CHECKPOINT OUT

A RUN is a run folder, such as runs/tiny; a CHECKPOINT is a folder in it, such as
runs/tiny/checkpoints/step-00000600.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import checkpoint
from checkpoint import CheckpointError, PathError, checkpoints_at, read_manifest, total_bytes
from runtime import cli, console, consolidate


def list_checkpoint(path: Path) -> str:
    """One line about a checkpoint. Raises CheckpointError."""
    manifest = read_manifest(path)
    progress = f"step {manifest['step']:,}  {manifest.get('tokens', 0):,} tokens"
    return f"{path}  {progress}  {total_bytes(manifest) / 1e6:,.1f} MB"


def verify_checkpoint(path: Path) -> str:
    """One line about a checkpoint that verifies. Raises CheckpointError if it does not."""
    manifest = read_manifest(path)
    if problem := checkpoint.verify(path):
        raise CheckpointError(f"{path}: {problem}")
    size = f"{len(manifest['files'])} files, {total_bytes(manifest) / 1e6:,.1f} MB"
    return f"{path}: complete and unchanged: {size}"


def report(path: Path, line: Callable[[Path], str]) -> None:
    """Print the line of each checkpoint that `path` names. Raises CheckpointError and PathError.

    A damaged checkpoint of a run does not hide the others.
    """
    paths = checkpoints_at(path)
    if paths == [path]:
        print(line(path))
        return
    damaged = 0
    for each in paths:
        try:
            print(line(each))
        except CheckpointError as error:
            damaged += 1
            print(f"DAMAGED: {error}")
    if damaged:
        raise CheckpointError(f"{path}: {damaged} of {len(paths)} checkpoints damaged")


def write_one_file(path: Path, out: Path) -> None:
    """Consolidate a checkpoint into the new folder `out`. Raises CheckpointError and PathError."""
    consolidate.check_new(out)
    latest = checkpoints_at(path)[-1]
    if latest != path:
        raise PathError(f"{path} is a run folder: name one of its checkpoints, such as {latest}")
    if consolidate.FULL in read_manifest(path)["files"]:
        raise PathError(f"{path} is already in the full format: see {path / consolidate.FULL}")
    with console.live(console.Progress("consolidating")) as progress:
        consolidate.consolidate(path, out, functools.partial(setattr, progress, "share"))
    size = total_bytes(read_manifest(out))
    print(f"{out}: one file, {size / 1e6:,.1f} MB")


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="tools.checkpoint",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("list", help="list the checkpoints of a run: step, tokens and size")
    add.add_argument("path", metavar="RUN", type=Path)
    add = commands.add_parser(
        "verify", help="compare a checkpoint, or all of a run, with their manifests"
    )
    add.add_argument("path", metavar="RUN|CHECKPOINT", type=Path)
    add = commands.add_parser(
        "consolidate", quiet=True, help="convert a sharded checkpoint to the full format"
    )
    add.add_argument("path", metavar="CHECKPOINT", type=Path)
    add.add_argument("out", metavar="OUT", type=Path, help="the folder to create")
    return parser


def run(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.command == "list":
        report(args.path, list_checkpoint)
    elif args.command == "verify":
        report(args.path, verify_checkpoint)
    else:
        write_one_file(args.path, args.out)


def main(argv: list[str]) -> int:
    return cli.execute("tools.checkpoint", lambda: run(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
