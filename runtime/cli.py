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

VERSION = "0.1"


class UsageError(ValueError):
    """Flags that do not fit together, or do not fit what is on disk: exit status 2."""


class Parser(argparse.ArgumentParser):
    """argparse with --version, and with errors raised as a UsageError of one line."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)
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


def print_any_text() -> None:
    """Let stdout take any text: it prints as \\u1234 what its encoding, such as ASCII, lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def run(
    program: str,
    command: Callable[[], int | None],
    usage: tuple[type[Exception], ...] = (),
    failure: tuple[type[Exception], ...] = (),
) -> int:
    """Call `command` and return the exit status: its result, or that of an error it raises.

    An expected error is printed in one line: 2 for a UsageError or one of `usage`, 1 for an OSError
    or one of `failure`. 130 for Ctrl-C, and where the reader of a pipe has left.
    """
    print_any_text()
    try:
        return command() or 0
    except (UsageError, *usage) as error:
        status, message = 2, error
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    except (OSError, *failure) as error:
        status, message = 1, error
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    return status
