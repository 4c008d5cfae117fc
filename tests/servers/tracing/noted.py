"""A small job that has been noted: members with clocks of their own, and requests between them."""

from __future__ import annotations

from collections.abc import Callable

from kvstore import wire
from kvstore.job.valid_values import RoundWindow
from kvstore.tracer import NOBODY, Tracer
from servers.tracing.collected import CollectedNotes

SCHEDULER = wire.Node("scheduler", 0, 1)
SERVER = wire.Node("server", 0, 1)
WORKERS = (wire.Node("worker", 0, 1), wire.Node("worker", 1, 1))
PUSH_S = 0.01  # how long a message takes


class NotedJob:
    """Two workers and a server, which have done some rounds.

    Args:
        ahead: by how much the clock of each member is ahead of the scheduler's.

    Attributes:
        now: the time of the scheduler.
    """

    def __init__(self, ahead: dict[wire.Node, float] | None = None) -> None:
        self.now = 100.0
        ahead = ahead or {}
        window = RoundWindow(1, 100)
        self.tracers = {
            node: Tracer(window, self._clock(ahead.get(node, 0.0))) for node in (SCHEDULER, *WORKERS, SERVER)
        }
        for node, tracer in self.tracers.items():
            offset = ahead.get(node, 0.0)
            tracer.offsets.take(1, self.now + offset - 0.5, self.now + offset + 0.5, self.now)
        self._seq = 0

    def _clock(self, ahead: float) -> Callable[[], float]:
        return lambda: self.now + ahead

    def round(self, number: int, answered: bool = True) -> None:
        server = self.tracers[SERVER]
        self._seq += 1
        begun = {}
        for node in WORKERS:
            tracer = self.tracers[node]
            tracer.reached(number)
            begun[node] = tracer.clock()
            tracer.asked(self._seq, b"server 0", "pushpull", ["w", "b"], 400)
            self.now += PUSH_S
            came = server.clock()
            self.now += PUSH_S
            if node == WORKERS[1]:
                with server.during("update", ["w"], number):
                    self.now += PUSH_S
            replies = [(other, self._seq) for other in WORKERS] if node == WORKERS[1] else []
            server.handled(came, server.clock(), "Push", node, self._seq, 400, number, replies)
        self.now += PUSH_S
        for node in WORKERS:
            tracer = self.tracers[node]
            if answered:
                tracer.answered(self._seq, b"server 0")
            self.now += PUSH_S / 10
            tracer.span("wait", begun[node], ["w", "b"])
            tracer.span("pushpull", begun[node], ["w", "b"])

    def mark(self, text: str) -> None:
        self.tracers[SCHEDULER].mark(text)

    def replies_without_a_request(self) -> None:
        server = self.tracers[SERVER]
        server.handled(server.clock(), server.clock(), "", NOBODY, 0, 0, 1, [(WORKERS[0], self._seq)])

    def chunks(self) -> list[wire.TraceChunk]:
        return [chunk for node, tracer in self.tracers.items() for chunk in tracer.chunks(node)]

    def collected(self) -> CollectedNotes:
        made = CollectedNotes()
        made.take(fetched(self.chunks()))
        return made


def fetched(chunks: list[wire.TraceChunk], first: int = 1, dropped: int = 0) -> wire.TraceFetched:
    return wire.TraceFetched(
        1, first, dropped, False, [bytes(frame) for chunk in chunks for frame in wire.encode(chunk)]
    )
