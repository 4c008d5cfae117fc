"""What the server supervisor says of a job that has failed: one root cause, as launch.py does. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.job.exit_report import ExitReport

INTERRUPTED = f": {KeyboardInterrupt.__name__}"  # a worker's error after Ctrl-C, which needs no explanation


@dataclass(frozen=True)
class MemberEnd:
    """How one of the supervised processes has ended, or will.

    Attributes:
        name: which one, as ``server 1``.
        how: as ``exited with code 7``.
        report: why, as it has told; None if it has not.
        blameless: whether it ended in order, or when another process had failed.
    """

    name: str
    how: str
    report: ExitReport | None
    blameless: bool

    @classmethod
    def expected(cls, name: str, report: ExitReport) -> MemberEnd:
        """The end of a process that has told why it will end, and still runs."""
        return cls(name, "has failed", report, report.consequence)


def root_cause(ends: Sequence[MemberEnd]) -> str:
    """Why a job has failed, in one line, or with a traceback; empty if nothing says that it has.

    Args:
        ends: how the supervised processes have ended, in the order in which they did, and why others will.
    """
    for end in ends:
        if not end.blameless and (end.report is None or not end.report.consequence):
            return _in_full(end)
    # All others hear of a failure from the scheduler. Supervisors on other hosts leave it to this one to say so.
    error = next((end.report.error for end in ends if end.name == "scheduler" and end.report is not None), "")
    return f"the job has failed: {error}" if error and not error.endswith(INTERRUPTED) else ""


def _in_full(end: MemberEnd) -> str:
    if end.report is None:
        return f"{end.name} {end.how}"
    return f"{end.name} {end.how}:\n{end.report.details or end.report.error}".rstrip()
