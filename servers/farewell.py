"""What a process of this package says when it ends because another one has failed."""

from __future__ import annotations

import logging
import os

from kvstore.job.exit_report import ExitReport, hand_over

log = logging.getLogger(__name__)


def say(what: str, failure: str, cause: str = "") -> None:
    """Tell the supervisor, or the log, that the failure of another process ends this one.

    Args:
        what: who ends, for the log.
        failure: of the other process.
        cause: see ``ExitReport``.
    """
    if not hand_over(ExitReport(failure, consequence=True, cause=cause), os.environ):
        log.error("%s: %s", what, failure)
