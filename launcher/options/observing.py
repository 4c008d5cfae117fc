"""Options of what shows a running job. No I/O."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.job.trace_target import TRACED, TraceTarget
from launcher.options.values import number

_DASHBOARD = "--dashboard"
_ANY = f"{_DASHBOARD}=\0"  # no word of a command line can be it


def add(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    group.add_argument(
        _DASHBOARD,
        metavar="PORT",
        nargs="?",
        type=_port,
        help="serve a page that shows the running job, at 127.0.0.1 and this port (default: a free one). Its address, "
        "with a token, is printed",
    )
    group.add_argument(
        "--dashboard-token-file",
        metavar="FILE",
        type=lambda text: str(Path(text).absolute()),
        help="the token of the page, so that it is the same for many jobs; FILE is made if it is not there",
    )
    group.add_argument(
        "--attach",
        metavar="RANK",
        type=number,
        help="give this worker the terminal, for breakpoint() in its program (local; by default with -n 1)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE[:ROUNDS]",
        type=_trace,
        help="write a trace of the whole job to FILE, for ui.perfetto.dev or chrome://tracing. ROUNDS: how many rounds "
        f"it has, or the first and the last, such as 500-600 (default: {TRACED})",
    )


def with_ports(argv: Sequence[str]) -> list[str]:
    """Say for each `--dashboard` that no port follows it, or the parser would take the command for one."""
    return [
        _ANY if word == _DASHBOARD and not (after.isascii() and after.isdigit()) else word
        for word, after in pairwise([*argv, ""])
    ]


def as_given(command: Sequence[str]) -> list[str]:
    """Return the words of a command without what `with_ports` has done to them."""
    return [_DASHBOARD if word == _ANY else word for word in command]


def _trace(text: str) -> str:
    """Return the file, as an absolute path, and the rounds, after a colon."""
    try:
        target = TraceTarget.parse(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return f"{target.file}:{target.rounds}"


def _port(text: str) -> int:
    if text == "\0":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; valid: 1 to 65535")
    return int(text)
