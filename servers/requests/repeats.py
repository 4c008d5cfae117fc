"""The requests that have been seen, and their answers, so that a repeated request does no harm. Pure.

A request is identified by its sender's node and its number. A repeat is answered again, never applied again. Senders
say below which number all their requests have been answered, so the ledger stays small. A repeat from below that
number, or from an incarnation that has been replaced, is stale: nobody waits for its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from kvstore import wire

T = TypeVar("T")


class Verdict(Enum):
    """What to do with a request."""

    NEW = "apply it"
    REPEAT = "answer it again"
    STALE = "drop it"


@dataclass(slots=True)
class _Page(Generic[T]):
    incarnation: int
    done: int = 0
    answers: dict[int, T | None] = field(default_factory=dict)


class Ledger(Generic[T]):
    """The requests of all senders. ``T`` is the type that answers are remembered as."""

    def __init__(self) -> None:
        self._pages: dict[tuple[str, int], _Page[T]] = {}  # by role and rank, which all incarnations have in common

    def admit(self, request: wire.Request) -> Verdict:
        node, seq, done = request.sender
        incarnation = node.incarnation
        page = self._pages.get(node[:2])
        if page is None or incarnation > page.incarnation:
            page = self._pages[node[:2]] = _Page(incarnation)
        elif incarnation < page.incarnation:
            return Verdict.STALE
        answers = page.answers
        if done > page.done:
            page.done = done
            for old in [old for old in answers if old < done]:
                del answers[old]
        if seq < page.done:
            return Verdict.STALE
        if seq in answers:
            return Verdict.REPEAT
        answers[seq] = None  # before it is served: a repeat that comes while it waits must not be applied, either
        return Verdict.NEW

    @property
    def pages(self) -> list[tuple[wire.Node, int, dict[int, T | None]]]:
        """For each sender, below which number all is answered, and the answers, None for requests that wait."""
        return [
            (wire.Node(role, rank, page.incarnation), page.done, page.answers)
            for (role, rank), page in self._pages.items()
        ]

    def restore(self, node: wire.Node, done: int, answers: Mapping[int, T]) -> None:
        """Know the requests of ``node`` that another server has answered."""
        page = self._pages.setdefault(node[:2], _Page(node.incarnation))
        page.done = max(page.done, done)
        page.answers |= answers

    def note(self, request: wire.Request, answer: T | None) -> None:
        """Remember the answer to ``request`` for as long as its sender may repeat it; None if it waits again."""
        node, seq, _ = request.sender
        page = self._pages.get(node[:2])
        if page is not None and page.incarnation == node.incarnation and seq in page.answers:
            page.answers[seq] = answer

    def recall(self, request: wire.Request) -> T | None:
        """Return the answer to ``request``, or None if it still waits."""
        page = self._pages.get(request.node[:2])
        return None if page is None else page.answers.get(request.seq)

    def __len__(self) -> int:
        return sum(len(page.answers) for page in self._pages.values())
