"""List, verify and consolidate checkpoints.

python -m tools.checkpoint list RUN
python -m tools.checkpoint verify RUN|CHECKPOINT
python -m tools.checkpoint consolidate RUN|CHECKPOINT OUT

A RUN is a run folder, such as runs/tiny; a CHECKPOINT is a folder in it, such as
runs/tiny/checkpoints/step-00000600.
"""

import argparse
import sys
from pathlib import Path

import checkpoint
from checkpoint import CheckpointError
from runtime import cli, consolidate
from runtime.run_folder import checkpoints_at


def report(path: Path, verifies: bool) -> None:
    """Print a line for each checkpoint that `path` names. Raises CheckpointError and PathError."""
    paths = checkpoints_at(path)
    damaged = 0
    for each in paths:
        try:
            manifest = checkpoint.read_manifest(each)
            if verifies and (problem := checkpoint.verify(each)):
                raise CheckpointError(f"{each}: {problem}")
        except CheckpointError as error:  # which does not hide the others
            if paths == [path]:
                raise
            damaged += 1
            print(f"DAMAGED: {error}")
            continue
        size = f"{checkpoint.total_bytes(manifest) / 1e6:,.1f} MB"
        if verifies:
            print(f"{each}: complete and unchanged: {len(manifest['files'])} files, {size}")
        else:
            tokens = f"{manifest.get('tokens', 0):,} tokens"
            print(f"{each}  step {manifest['step']:,}  {tokens}  {size}")
    if damaged:
        raise CheckpointError(f"{path}: {damaged} of {len(paths)} checkpoints damaged")


def build_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="tools.checkpoint",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("list", help="list the checkpoints of a run: step, tokens and size")
    add.add_argument("path", metavar="RUN|CHECKPOINT", type=Path)
    add = commands.add_parser("verify", help="compare checkpoints with their manifests")
    add.add_argument("path", metavar="RUN|CHECKPOINT", type=Path)
    text = "convert a sharded checkpoint, by default a run's latest, to the full format"
    add = commands.add_parser("consolidate", help=text)
    add.add_argument("path", metavar="RUN|CHECKPOINT", type=Path)
    add.add_argument("out", metavar="OUT", type=Path, help="the folder to create")
    return parser


def run(argv: list[str]) -> None:
    args = build_parser().parse_args(argv)
    if args.command != "consolidate":
        report(args.path, verifies=args.command == "verify")
        return
    consolidate.consolidate(checkpoints_at(args.path)[-1], args.out)
    size = checkpoint.total_bytes(checkpoint.read_manifest(args.out))
    print(f"{args.out}: one file, {size / 1e6:,.1f} MB")


def main(argv: list[str]) -> int:
    return cli.execute("tools.checkpoint", run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
