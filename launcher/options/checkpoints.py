"""Options of checkpoints, which processes get as variables. No I/O."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvstore.job.settings import (
    CHECKPOINT_DIR,
    CHECKPOINT_EVERY,
    CHECKPOINT_KEEP,
    CHECKPOINT_RESUME,
)
from launcher.options.values import count


def add(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--checkpoint-dir", metavar="DIR", help="save checkpoints in DIR, which all hosts of the job share"
    )
    group.add_argument(
        "--checkpoint-every",
        metavar="INTERVAL",
        type=_interval,
        help=f"how often: {CHECKPOINT_EVERY.values.valid} (default: where the program asks for it)",
    )
    group.add_argument(
        "--checkpoint-keep", metavar="N", type=count, help="how many are kept, the newest ones (default: 3)"
    )
    group.add_argument(
        "--resume",
        metavar="PATH",
        help="continue from this checkpoint, or from the newest in this directory, if it has one",
    )


def variables(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the options of checkpoints stand for; paths are absolute from here on."""
    values = {
        CHECKPOINT_DIR.name: options.checkpoint_dir and str(Path(options.checkpoint_dir).absolute()),
        CHECKPOINT_EVERY.name: options.checkpoint_every,
        CHECKPOINT_KEEP.name: options.checkpoint_keep,
        CHECKPOINT_RESUME.name: options.resume and str(Path(options.resume).absolute()),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _interval(text: str) -> str:
    try:
        CHECKPOINT_EVERY.values.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid: {CHECKPOINT_EVERY.values.valid}") from None
    return text
