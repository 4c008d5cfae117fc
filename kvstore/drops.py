"""What was dropped because it was no message: counted, and now and then logged."""

from __future__ import annotations

import logging


class Drops:
    """Counts them, and logs the first, the tenth, the hundredth: a flood must not fill the disk.

    Args:
        log: where to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._count = 0

    def note(self, what: str, why: object) -> None:
        """Count one more: ``what`` was dropped, and why."""
        self._count += 1
        if str(self._count).strip("0") == "1":
            self._log.warning("dropped %s (%d so far): %s", what, self._count, why)
