"""What all commands share: usage errors of one line, exit statuses, --version."""

import argparse
import difflib
import io
import platform
import re
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import NoReturn

from runtime import console

VERSION = "0.2.0"


class UsageError(ValueError):
    """Flags that do not fit together, or do not fit what is on disk."""

    exit_status = 2


class RunError(RuntimeError):
    """A run-time error with a known remedy, such as too little memory."""

    exit_status = 1


QUIET = "no live line and no lines of progress; errors, warnings and results are printed"


class Quiet(argparse.Action):
    """--quiet of a command that may take minutes."""

    def __call__(self, *_):
        console.is_quiet = True


class Parser(argparse.ArgumentParser):
    """argparse with --version, and with errors raised as a UsageError of one line."""

    def __init__(self, quiet: bool = False, **options):
        super().__init__(allow_abbrev=False, **options)
        if quiet:
            self.add_argument("--quiet", action=Quiet, nargs=0, dest=argparse.SUPPRESS, help=QUIET)
        self.add_argument(
            "--version",
            action="version",
            version=f"nanoshard {VERSION}, torch {version('torch')}, "
            f"Python {platform.python_version()}",
        )

    def flags(self) -> dict[str, str]:
        """All flags with their help texts, those of subcommands included."""
        found = {}
        for action in self._actions:
            found |= dict.fromkeys(action.option_strings, action.help or "")
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found |= parser.flags()
        return found

    def error(self, message: str) -> NoReturn:
        """In place of argparse's own, which prints the usage, many lines of it, and exits."""
        _, is_unknown, rest = message.partition("unrecognized arguments: ")
        if is_unknown:
            name = rest.split()[0].split("=")[0]
            others = self.flags()
            others.pop(name, None)  # it may be a flag of another subcommand
            words = re.sub("[-_]+", " ", name).strip()
            nearest = difflib.get_close_matches(name, others, n=1)
            if " " in words:  # as in --learning_rate, whose words are in the help text of --lr
                nearest += [flag for flag, text in others.items() if words in text]
            message += f"; did you mean {nearest[0]}?" if nearest else ""
        raise UsageError(f"{message} ({self.prog} --help lists the flags)")


def fail(program: str, message: str, status: int) -> int:
    """Print what is wrong in one line; return the exit status."""
    console.print_error(f"{program}: error: {message}")
    return status


def run(
    program: str,
    command: Callable[[], int | None],
    fail: Callable[[str, str, int], int] = fail,
) -> int:
    """Call `command` and return the exit status: its result, or that of an error it raises.

    An expected error is printed in one line: its class has an `exit_status`, 2 for usage
    and 1 at run time, or it is an OSError, 1. 130 for Ctrl-C, and where the reader of a pipe has
    left. Other exceptions are faults of the program and pass.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # It prints as \u1234 what its encoding, such as ASCII, lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return command() or 0
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    except Exception as error:
        status = getattr(error, "exit_status", 1 if isinstance(error, OSError) else None)
        if status is None:
            raise
        return fail(program, str(error), status)
