"""What a request waits for: in words, and which workers. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvstore import wire


class Reason(NamedTuple):
    """Why a request has no answer yet.

    Attributes:
        text: in words, after the name of who says it; empty if it does not wait here.
        missing: the ranks of the workers that it waits for.
    """

    text: str = ""
    missing: Collection[int] = ()

    def reply(self, seq: int) -> wire.Explanation:
        """Return the answer to question ``seq``."""
        return wire.Explanation(seq, self.text[: wire.MAX_REASON], sorted(self.missing))
