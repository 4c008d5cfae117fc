"""Types and defaults that several command lines share."""

from __future__ import annotations

import argparse

from kvstore.job.config import Config


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
