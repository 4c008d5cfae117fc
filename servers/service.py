"""The loop around a core: receive, decode, handle, encode, send. All I/O and time of a process is here."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from kvstore import wire
from kvstore.errors import WireError
from kvstore.rare_log import Drops
from kvstore.transport import Transport
from servers.requests.replies import Outbox
from servers.requests.request_tracer import RequestTracer

if TYPE_CHECKING:
    from kvstore.rows.slab_space import GrownTables
    from servers.reading.pace import ReaderPace
    from servers.store.lateness import ArrivalTimes

log = logging.getLogger(__name__)

Handle: TypeAlias = Callable[[bytes, wire.Message], Outbox]
Take: TypeAlias = Callable[[bytes, "list[wire.Buffer]"], "Outbox | None"]


PATIENCE_S = 0.05  # work that is due waits no longer than this for a moment in which no message waits


class Service:
    """Serves messages until ``stop``. Only ``run`` uses ``transport``, which is bound already.

    Attributes:
        now: when the message came that is being handled, by ``clock``.
        timed: is told when each message came, as its ``now``; None tells nobody.
        grown: tables that have work done for them while no message comes.
        busy_s: the seconds in which messages have been handled, and their answers sent.
        received, sent: bytes of what messages carry, their headers apart.
        tracer: notes what is handled, for the job's trace; None notes nothing.
    """

    def __init__(
        self,
        transport: Transport,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = clock()
        self.busy_s = 0.0
        self.received = self.sent = 0
        self._transport = transport
        self._interval_s = interval_s
        self._clock = clock
        self._posted: queue.SimpleQueue[Callable[[], Outbox]] = queue.SimpleQueue()
        self._stopped = False
        self.tracer: RequestTracer | None = None
        self.timed: ArrivalTimes | None = None
        self.grown: GrownTables | None = None
        self._drops = Drops(log)

    def run(
        self,
        handle: Handle,
        tick: Callable[[], Outbox] = list,
        soon: Callable[[], float | None] = lambda: None,
        take: Take | None = None,
        between: ReaderPace | None = None,
    ) -> None:
        """Serve until ``stop``.

        Args:
            handle: the core: a message and its link in, messages and their links out.
            tick: what the core does when time has passed; returns messages to send. It is called when no message waits,
                so that nobody is overdue whose message has arrived; in a flood of messages, half as often.
            soon: returns when ``tick`` is to be called before its time; None for no such wish.
            take: is given each message first, in frames; returns what to send, or None to leave it to ``handle``.
            between: what is done when no message waits; in a flood of messages, it waits ``PATIENCE_S`` for that.
        """
        due = heard = now = self._clock()
        while not self._stopped:
            wished = soon()
            spare = None if between is None else between.due()
            if spare is not None:  # the time from before ``due`` is older: epoll would wait 1 ms for what is due now
                now = self._clock()
            until = due if wished is None else min(due, wished)
            wait = max(0.0, (until if spare is None else min(until, spare)) - now)
            if self.grown:
                wait = min(wait, max(0.0, heard + self.grown.patience_s - now))
            received = self._transport.recv(wait)
            came = received is not None
            self.now = self._clock()
            if received is not None:
                if self.timed is not None:
                    self.timed.now = self.now
                outbox = None if take is None else take(*received)
                if outbox is None:
                    self._receive(handle, *received)
                else:
                    self._send(outbox, self.now)
                if len(received[1]) > 1:  # counted when the answer has left; no loop variable, which would hold memory
                    self.received += sum(map(len, received[1][1:]))
                del received  # its sender waits for the memory
            elif self.grown and self.now >= heard + self.grown.patience_s:
                self.grown.work()
            while not self._posted.empty():
                self._send(self._posted.get()())
            now = self._clock()
            self.busy_s += now - self.now
            heard = now if came else heard
            ticks = now >= due + (self._interval_s if came else 0.0)
            if ticks:
                due = now + self._interval_s
            if ticks or (wished is not None and now >= wished):
                self._send(tick())
                now = self._clock()
            if between is not None and spare is not None and now >= spare + (PATIENCE_S if came else 0.0):
                self._send(between.do())
                now = self._clock()

    def post(self, action: Callable[[], Outbox]) -> None:
        """Run ``action`` in the loop, between two messages. Any thread may call it."""
        # A function: cores have no locks, so another thread must not call one while a message is handled.
        self._posted.put(action)
        self._transport.interrupt()

    def stop(self) -> None:
        """End ``run`` soon. Any thread may call it."""
        self._stopped = True
        self._transport.interrupt()

    def _receive(self, handle: Handle, peer: bytes, frames: list[wire.Buffer]) -> None:
        message: wire.Message | None = None
        try:
            message = wire.decode(frames)
            outbox = handle(peer, message)
        except WireError as exc:
            self._drops.note("a bad message", exc)
            self._transport.refuse(peer)
            return
        except Exception:
            log.exception("a %s could not be handled", "message" if message is None else type(message).__name__)
            return
        if self.tracer is None:
            self._put(outbox)
        else:
            self._send(outbox, self.now, peer, message)

    def _send(self, outbox: Outbox, began: float = 0.0, peer: bytes = b"", message: wire.Message | None = None) -> None:
        """Send ``outbox``, and trace it as the answer to ``message`` of ``peer``, with its start; 0 for now."""
        tracer = self.tracer
        if tracer is None:
            self._put(outbox)
            return
        left = self._clock()
        self._put(outbox)
        tracer.note(began or left, left, outbox, peer, message)

    def _put(self, outbox: Outbox) -> None:
        before: wire.Message | None = None
        for peer, message in outbox:
            if message is not before:  # a notice to thousands of members is encoded once
                frames, before = wire.encode(message), message
            urgency = message.priority if isinstance(message, wire.Values) else None
            self._transport.send(peer, frames, urgency)
            for frame in frames[1:]:
                self.sent += len(frame)
