"""Options of what is shown of the processes' lines, and of the files that they go to. No I/O."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from launcher.job.output_options import LOG_FILES, LOG_SIZE, OutputOptions, parse_ranks
from launcher.options.values import count

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SMALLEST = 64 << 10


def add(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        "--log-dir", metavar="DIR", help="write what each process prints into a file of its own in DIR, too"
    )
    group.add_argument(
        "--log-size",
        metavar="SIZE",
        type=_size,
        default=LOG_SIZE,
        help=f"begin a new file when one has this size, such as 500k, 16m or 1g (default: {LOG_SIZE >> 20}m)",
    )
    group.add_argument(
        "--log-files",
        metavar="N",
        type=count,
        default=LOG_FILES,
        help=f"how many files of each process are kept, the newest ones (default: {LOG_FILES})",
    )
    group.add_argument(
        "--show",
        metavar="RANKS",
        type=_ranks,
        default=argparse.SUPPRESS,
        help="show the lines of these workers only: ranks such as 0 or 0,4-7, all, or none (default: all)",
    )
    group.add_argument(
        "--live",
        action="store_true",
        help="on a terminal, show one line for each process, with its state and its last line; needs rich",
    )


def read(options: argparse.Namespace) -> OutputOptions:
    """What the options say; paths are absolute from here on."""
    directory = options.log_dir and str(Path(options.log_dir).absolute())
    return OutputOptions(
        log_dir=directory or None,
        log_size=options.log_size,
        log_files=options.log_files,
        show=getattr(options, "show", None),
        live=options.live,
        scroll="show" in options,
    )


def _ranks(text: str) -> tuple[int, ...] | None:
    try:
        return parse_ranks(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size(text: str) -> int:
    match = re.fullmatch(r"([1-9][0-9]{0,9})([kmg])", text.lower())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < _SMALLEST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size from 64k on; valid: such as 500k, 16m or 1g")
    return size
