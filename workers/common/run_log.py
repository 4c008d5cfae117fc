"""The log lines of a training: MXNet's, and visible without a set-up of logging."""

from __future__ import annotations

import logging
import sys

# The root logger, as in MXNet: with basicConfig, lines begin with INFO:root:.
_root = logging.getLogger()


def log_line(rank: int, text: str, *args: object) -> None:
    """Log a line of a training, such as ``Epoch[0] Train-accuracy=0.382812``.

    If the root logger has handlers, the line is a record of it at INFO, on every rank. Otherwise rank 0 writes the line
    to standard error, as ``logging`` itself writes warnings there: no handler is added.
    """
    if _root.hasHandlers():
        _root.info(text, *args, stacklevel=2)
    elif rank == 0 and _root.manager.disable < logging.INFO:
        print(text % args, file=sys.stderr, flush=True)
