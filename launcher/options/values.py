"""The values that options take. No I/O.

No error shows the value of an environment variable, which may be a secret.
"""

from __future__ import annotations

import argparse
import re

from launcher.job.description import MAX_PER_ROLE

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def memory(text: str) -> str:
    """A size of memory, such as 500m or 4g; without a unit, in megabytes."""
    if text and not re.fullmatch(r"[1-9][0-9]{0,9}[mMgG]?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; valid: a number with m or g, such as 500m or 4g")
    return f"{text}m" if text[-1:].isdigit() else text.lower()


def number(text: str) -> int:
    """A number of processes, cores or other things of which there may be none."""
    return _whole(text, 0)


def count(text: str) -> int:
    """The same, where there must be one at least."""
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    number = int(text.lstrip("0")[:9] or 0) if text.isascii() and text.isdigit() else -1
    if not least <= number <= MAX_PER_ROLE:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {MAX_PER_ROLE}")
    return number


def variable(text: str) -> tuple[str, str]:
    """A variable and its value."""
    variable_name, colon, value = text.partition(":")
    if not colon or not _VARIABLE.fullmatch(variable_name):
        raise argparse.ArgumentTypeError("expected NAME:VALUE (what was given is not shown: it may be a secret)")
    return variable_name, value


def name(text: str) -> str:
    """The name of a variable."""
    if not _VARIABLE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            "expected a variable's name alone (what was given is not shown: it may be a secret); "
            "to set one, use --env-worker NAME:VALUE or --env-server NAME:VALUE"
        )
    return text
