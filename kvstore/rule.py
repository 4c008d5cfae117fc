"""The consistency of a store: one rule, of which sync, async and bounded staleness are cases. Pure.

Each worker has a clock for each key: how often it has pushed it.

``sync``: the n-th pushes of all workers are one round and one update, and a read at clock n gives the value after round
n. With a ``quorum`` of k, a round is over when k of them are there (backup workers: Chen et al., arXiv:1604.00981);
contributions that come later are dropped, or kept for the next round. With a ``grace`` a round that has its quorum
waits for the others, for as long as they usually take, and at most so many seconds.

``async``: each push is an update. With a ``staleness`` of s, a read at clock n waits until every worker has pushed
n - s times (stale synchronous parallel: Ho et al., NIPS 2013); without one, it never waits. ``compensation`` corrects a
gradient for what others have changed since its worker last read (DC-ASGD: Zheng et al., arXiv:1609.08326).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from kvstore.errors import UsageError

MODES = ("sync", "async")
LATE = ("drop", "keep")
AGGREGATE = ("rounds", "host")
MAX_STALENESS = 1 << 30


@dataclass(frozen=True)
class Rule:
    """See the module.

    Attributes:
        aggregate: which pushes an aggregator may sum: those of one round (``rounds``), or in ``async`` those that are
            there at the same time, too (``host``).

    Raises:
        UsageError: the values contradict each other. The message says what is valid.
    """

    mode: str = "sync"  # ``sync`` or ``async``
    staleness: int | None = None
    quorum: int | None = None
    late: str = "drop"  # with a quorum: ``drop`` or ``keep`` what comes when its round is over
    grace: float = 0.0  # with a quorum: how many seconds a round that has it waits for the others at most
    compensation: float = 0.0  # async: the factor of the correction; 0 for none
    finite: bool = False  # whether an update with NaN or infinite values is refused
    aggregate: str = "rounds"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"mode={self.mode!r} must be one of {', '.join(MODES)}")
        if self.late not in LATE:
            raise UsageError(f"late={self.late!r} must be one of {', '.join(LATE)}")
        if self.aggregate not in AGGREGATE:
            raise UsageError(f"aggregate={self.aggregate!r} must be one of {', '.join(AGGREGATE)}")
        if self.mode == "sync" and self.aggregate == "host":
            raise UsageError("aggregate='host' is for 'dist_async' and 'dist_ssp'; rounds are always summed by host")
        if self.compensation and self.aggregate == "host":
            raise UsageError(
                "delay_compensation corrects each worker's gradient by itself; aggregate='host' sums them before that"
            )
        if self.mode == "sync" and (self.staleness is not None or self.compensation):
            raise UsageError(
                "staleness is for 'dist_ssp' stores, and delay_compensation for 'dist_async' and 'dist_ssp'"
            )
        if self.mode == "async" and self.quorum is not None:
            raise UsageError("a quorum is for stores with rounds: 'dist_sync' and 'dist_device_sync'")
        if self.staleness is not None and not 0 <= self.staleness <= MAX_STALENESS:
            raise UsageError(f"staleness={self.staleness} must be from 0 to {MAX_STALENESS}")
        if self.quorum is not None and self.quorum < 1:
            raise UsageError(f"quorum={self.quorum} must be at least 1")
        if self.grace and self.quorum is None:
            raise UsageError(f"grace={self.grace} is how long a round that has its quorum waits: give a quorum, too")
        if not 0 <= self.grace < float("inf"):
            raise UsageError(f"grace={self.grace} must be a finite number of seconds, at least 0")
        if not 0 <= self.compensation < float("inf"):
            raise UsageError(f"delay_compensation={self.compensation} must be a finite number, at least 0")

    @classmethod
    def of(cls, message: Any) -> Rule:
        return cls(**{each.name: getattr(message, each.name) for each in fields(cls)})

    @property
    def described(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @property
    def merges(self) -> bool:
        """Whether an aggregator may sum the pushes of several workers."""
        return self.mode == "sync" or self.aggregate == "host"

    def needs(self, clock: int) -> int:
        """How often every worker must have pushed before a read at ``clock`` is answered."""
        if self.mode == "sync":
            return clock
        return 0 if self.staleness is None else max(0, clock - self.staleness)

    def require_workers(self, count: int) -> None:
        """Raise ``UsageError`` if a job of ``count`` workers can never satisfy the rule."""
        if self.quorum is not None and self.quorum > count:
            raise UsageError(f"quorum={self.quorum} is more than the {count} workers of this job")

    def __str__(self) -> str:
        parts = [self.mode]
        if self.staleness is not None:
            parts.append(f"staleness {self.staleness}")
        if self.quorum is not None:
            parts.append(f"quorum {self.quorum}, late {self.late}")
        if self.grace:
            parts.append(f"grace {self.grace:g} s")
        if self.compensation:
            parts.append(f"delay compensation {self.compensation:g}")
        if self.finite:
            parts.append("finite values only")
        if self.aggregate == "host":
            parts.append("summed by host")
        return ", ".join(parts)
