"""A parser, types and defaults that several command lines share."""

from __future__ import annotations

import argparse
from typing import NoReturn

from kvstore.job.config import Config


class Parser(argparse.ArgumentParser):
    """A parser for a program that runs once or as many workers: rank 0 alone says what is wrong, in one line."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, formatter_class=_Help)

    def error(self, message: str) -> NoReturn:
        """End the program with code 2, as argparse does, without all options before the error."""
        first = Config.from_env().rank_hint <= 0
        self.exit(2, f"{self.prog}: error: {message}; -h lists the options\n" if first else None)


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but no None, no False, and no lists of all that there is."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        hidden = action.default is None or action.default is False or isinstance(action.default, list)
        return action.help if hidden else super()._get_help_string(action)


def default_store() -> str:
    """Return `dist_sync` in a job, and `local` outside of one."""
    return "dist_sync" if Config.from_env().in_job else "local"


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    number = natural(text)
    if not number:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def natural(text: str) -> int:
    """Parse an integer of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
