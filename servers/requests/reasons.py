"""What a request waits for: in words, and which workers. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from kvstore import wire


class Reason(NamedTuple):
    """Why a request has no answer yet."""

    text: str = ""  # after the name of the process that says it; empty if the request does not wait there
    missing: Collection[int] = ()  # the ranks of the workers that it waits for

    def reply(self, seq: int) -> wire.Explanation:
        return wire.Explanation(seq, self.text[: wire.MAX_REASON], sorted(self.missing))
