"""Which requests have been seen, and what they were answered: what makes a repeated request harmless. Pure.

A request is known by its sender, the sender's incarnation, and a sequence number. A repeat is answered again, never
applied again. Senders say below which number everything has been answered, so the ledger stays small; a repeat from
below that, or from an incarnation that has been replaced, is stale and nobody waits for its answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from kvstore.wire import Request

T = TypeVar("T")


class Verdict(Enum):
    """What to do with a request."""

    NEW = "apply it"
    REPEAT = "answer it again"
    STALE = "drop it"


@dataclass
class _Page(Generic[T]):
    incarnation: int
    done: int = 0
    answers: dict[int, T | None] = field(default_factory=dict)


class Ledger(Generic[T]):
    """The requests of all senders; ``T`` is what an answer is remembered as."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, int], _Page[T]] = {}

    def admit(self, request: Request) -> Verdict:
        """Note ``request`` and return what to do with it."""
        sender = (request.role, request.rank)
        page = self._pages.get(sender)
        if page is None or request.incarnation > page.incarnation:
            page = self._pages[sender] = _Page(request.incarnation)
        if request.incarnation < page.incarnation:
            return Verdict.STALE
        if request.done > page.done:
            page.done = request.done
            for seq in [seq for seq in page.answers if seq < page.done]:
                del page.answers[seq]
        if request.seq < page.done:
            return Verdict.STALE
        if request.seq in page.answers:
            return Verdict.REPEAT
        page.answers[request.seq] = None
        return Verdict.NEW

    def note(self, request: Request, answer: T) -> None:
        """Remember how ``request`` was answered, as long as its sender may repeat it."""
        page = self._pages.get((request.role, request.rank))
        if page is not None and page.incarnation == request.incarnation and request.seq in page.answers:
            page.answers[request.seq] = answer

    def recall(self, request: Request) -> T | None:
        """Return what ``request`` was answered, or None if it still waits."""
        page = self._pages.get((request.role, request.rank))
        return None if page is None else page.answers.get(request.seq)

    def __len__(self) -> int:
        return sum(len(page.answers) for page in self._pages.values())
