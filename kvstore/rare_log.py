"""Rate-limited logging of repeated errors that peers cause."""

from __future__ import annotations

import logging


def worth_a_line(count: int) -> bool:
    """Whether to log the ``count``-th occurrence: the 1st, 10th, 100th, ... A flood must not fill the disk."""
    return str(count).strip("0") == "1"


class Drops:
    """Counts malformed messages that were dropped, and logs those that are ``worth_a_line``."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0

    def note(self, what: str, why: object) -> None:
        self._count += 1
        if worth_a_line(self._count):
            self._log.warning("dropped %s (%d so far): %s", what, self._count, why)
