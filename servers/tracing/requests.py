"""Which notes are about the same request: who asked, who handled it, where the answer left, and when it came. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kvstore import wire
from kvstore.spec import Key
from kvstore.wire.tracing import ANSWERED, ASKED, HANDLED

# Who asks, the number of the request, and whether the scheduler is asked: aggregators count these requests apart.
RequestId: TypeAlias = "tuple[wire.Node, int, bool]"
SCHEDULER = "the scheduler"  # as links call it


class Moment(NamedTuple):
    """A time by the clock of a member, and the thread that was there."""

    node: wire.Node
    at: float
    thread: int


@dataclass
class TracedRequest:
    """A request, as far as it was noted.

    Attributes:
        name, key, keys, nbytes, round, peer: what was asked of whom; see ``kvstore.wire.tracing.ASKED``.
        asked: when it left; None if that was not noted.
        handled: when a process began to work on it: twice if it came twice.
        left: when an answer left.
        answered: when the answer came.
    """

    name: str = ""
    key: Key | None = None
    keys: int = 0
    nbytes: int = 0
    round: int = 0
    peer: str = ""
    asked: Moment | None = None
    handled: list[Moment] = field(default_factory=list)
    left: list[Moment] = field(default_factory=list)
    answered: Moment | None = None


def requests_of(records: Mapping[wire.Node, Iterable[list[Any]]]) -> dict[RequestId, TracedRequest]:
    """Return the requests that members have noted, whose ``records`` these are."""
    found: dict[RequestId, TracedRequest] = {}
    for node, noted in records.items():
        for record in noted:
            if record[1] == ASKED:
                _, _, at, seq, name, key, keys, nbytes, round_, thread, peer = record
                request = found.setdefault((node, seq, peer == SCHEDULER), TracedRequest())
                request.name, request.key, request.keys, request.nbytes = name, key, keys, nbytes
                request.round, request.peer, request.asked = round_, peer, Moment(node, at, thread)
            elif record[1] == ANSWERED:
                _, _, at, seq, thread, peer = record
                found.setdefault((node, seq, peer == SCHEDULER), TracedRequest()).answered = Moment(node, at, thread)
            elif record[1] == HANDLED:
                _take_handled(node, record, found)
    return found


def _take_handled(node: wire.Node, record: list[Any], found: dict[RequestId, TracedRequest]) -> None:
    _, _, start, left, _, thread, _, asker, seq, _, _, answered = record
    scheduler = node.role == "scheduler"
    if asker[0]:
        found.setdefault((wire.Node(*asker), seq, scheduler), TracedRequest()).handled.append(
            Moment(node, start, thread)
        )
    for other, number in answered:
        if other[0]:
            found.setdefault((wire.Node(*other), number, scheduler), TracedRequest()).left.append(
                Moment(node, left, thread)
            )
