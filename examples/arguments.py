"""What the command lines of several examples have in common."""

from __future__ import annotations

import argparse

from kvstore.job.config import Config


def default_store() -> str:
    """`dist_sync` for a process that was started as one of several, `local` for one that runs by itself."""
    return "dist_sync" if Config.from_env().in_job else "local"


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = natural(text)
    if not number:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def natural(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)
