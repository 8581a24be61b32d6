"""The flags and the numbers of commands."""

from argparse import ArgumentParser

import errors

positive_number = errors.number(float, 1e-12)  # a type of argparse


def add_flags(parser: ArgumentParser, flags: dict[str, dict]) -> None:
    """Add `flags`, a dict from flag to argparse options."""
    for name, options in flags.items():
        parser.add_argument(f"--{name}", **options)


def count(default: int | None, what: str) -> dict:
    """Return argparse options of a positive integer. `what` explains a default that is None."""
    help = what if default is None else f"{what} (default: {default})"
    return dict(type=errors.number(int, 1), default=default, metavar="N", help=help)


def three_digits(number: float) -> str:
    """Format with three significant digits, or from 100 on as an integer."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
