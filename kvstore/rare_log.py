"""What goes wrong again and again, as others like: counted, and now and then logged."""

from __future__ import annotations

import logging


def worth_a_line(count: int) -> bool:
    """Whether the ``count``-th time is the first, the tenth, the hundredth: a flood must not fill the disk."""
    return str(count).strip("0") == "1"


class Drops:
    """Messages that were dropped because they were none: counts them, and logs those that are ``worth_a_line``.

    Args:
        log: where to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0

    def note(self, what: str, why: object) -> None:
        """Count one more: ``what`` was dropped, and why."""
        self._count += 1
        if worth_a_line(self._count):
            self._log.warning("dropped %s (%d so far): %s", what, self._count, why)
