"""The heartbeat: a thread that tells the scheduler that this process is alive, hears the same, and takes notices.

It has a link of its own, so that a long computation or a long wait in the caller's thread does not look like death.
When it hears nothing, it reconnects that link, again and again. TCP repeats what an outage has swallowed after up to
twice the length of the outage, but a new connection is there as soon as the line is.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvstore import wire
from kvstore.errors import KVStoreError, NodeLost, WireError
from kvstore.job.curve_keys import split_key
from kvstore.job.valid_values import RoundWindow
from kvstore.member.pulse import PulseProcess
from kvstore.member.stacks import place_of, where
from kvstore.rare_log import Drops
from kvstore.tracer import Tracer
from kvstore.transport import Transport

log = logging.getLogger(__name__)

CLOCK_S = 0.05  # the time between the first heartbeats, where the scheduler's clock is asked for
REDIAL_S = 3.0  # after so long without a message, or three heartbeats, the link is reconnected, repeatedly


class Listener(NamedTuple):
    """What the heartbeat calls, in its own thread.

    Attributes:
        on_lost: called once, when the scheduler is lost.
        on_back: called when the scheduler is heard again over a link that had to be reconnected.
        on_traced: called with the rounds that are to be noted for the job's trace, each time the scheduler says them.
    """

    on_notice: Callable[[wire.Message], None]
    on_lost: Callable[[KVStoreError], None]
    on_back: Callable[[], None] = lambda: None
    on_traced: Callable[[RoundWindow], None] = lambda _: None


class Heartbeat:
    """Sends heartbeats for ``node`` until stopped.

    Args:
        make_transport: returns a transport of its own.
        limit_s: how long the scheduler may be silent before it is lost.
        beside: starts a process that sends heartbeats, too, until this ends; None for no such process.
        thread: makes the thread, with the arguments of ``threading.Thread``.
        report: returns what follows each heartbeat, None for nothing. Called in the heartbeat's thread.
        tracer: its notes go over this link.
    """

    def __init__(
        self,
        make_transport: Callable[[], Transport],
        root: str,
        node: wire.Node,
        interval_s: float,
        limit_s: float,
        clock: Callable[[], float],
        listener: Listener,
        beside: Callable[[], PulseProcess] | None = None,
        thread: Callable[..., threading.Thread] = threading.Thread,
        report: Callable[[], wire.Message | None] | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._make_transport = make_transport
        self._root = root
        self._node = node
        self._beat_frames = wire.encode(wire.Beat(node))
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._redial_s = max(REDIAL_S, 3 * interval_s)
        self._clock = clock
        self._listener = listener
        self._beside = beside
        self._make_report = report
        self._tracer = tracer
        self._trace_now = False
        self._pulse: PulseProcess | None = None
        self._drops = Drops(log)
        self._program: threading.Thread | None = None  # the thread that has started this
        self._unsaid: deque[wire.Message] = deque()
        self._stop = threading.Event()
        self._transport = make_transport()
        self._scheduler = self._transport.connect(root)
        self._thread = thread(target=self.run, name=f"heartbeat of {node}", daemon=True)
        # debugpy stops all threads at a breakpoint but these; pdb stops the one that is at it. Heartbeats must go on.
        setattr(self._thread, "pydev_do_not_trace", True)  # noqa: B010 (no attribute of the class)

    def start(self) -> None:
        """Start the pulse, then the thread. When this returns, the caller may enter C at once and stay there."""
        self._program = threading.current_thread()
        self._see_to_pulse()
        try:
            self._thread.start()
        except BaseException:
            self._end_pulse()
            raise

    def say(self, notice: wire.Message) -> None:
        """Send a notice of this process soon, in the heartbeat's thread. Any thread may call it, and does not wait.

        Nobody says whether it has arrived: it is lost if the link is.
        """
        self._unsaid.append(notice)
        self._transport.interrupt()

    def trace(self, tracer: Tracer) -> None:
        """Send what ``tracer`` notes from now on. Call it in the heartbeat's thread."""
        self._tracer = tracer

    def flush_trace(self) -> None:
        """Send the trace so far soon, in the heartbeat's thread. Any thread may call it."""
        self._trace_now = True
        self._transport.interrupt()

    def stop(self) -> None:
        """Returns when the thread is gone."""
        self._stop.set()
        self._transport.interrupt()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def join(self, timeout: float) -> bool:
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def run(self) -> None:
        """Send heartbeats until stopped, or until the scheduler is lost, and close the link. What the thread does."""
        try:
            self._beat()
        except Exception as exc:  # a dead heartbeat must be as loud as a dead scheduler
            self._listener.on_lost(NodeLost(f"the heartbeat of {self._node} failed: {exc!r}"))
        finally:
            self._end_pulse()
            self._transport.close()

    def _beat(self) -> None:
        heard = looked = dialled = self._clock()
        back = True
        while not self._stop.is_set():
            self._say_alive()
            self._report()
            self._note_place()
            last = self._hear(self._clock() + self._pause())
            if last is not None:
                heard = last
                if not back:
                    back = True
                    self._listener.on_back()
            now = self._clock()
            # Silence while this process was stopped, or the machine was busy, proves nothing.
            heard = min(now, heard + max(0.0, now - looked - 2 * self._interval_s))
            looked = now
            if now - heard > self._limit_s:
                where = split_key(self._root)[0]
                self._listener.on_lost(NodeLost(f"the scheduler at {where} has been silent for {now - heard:.1f} s"))
                return
            if now - max(heard, dialled) > self._redial_s:
                dialled, back = now, False
                self._redial()
            self._see_to_pulse()

    def _hear(self, until: float) -> float | None:
        """Take messages until the time ``until``; return when the last one came, None if none did."""
        heard: float | None = None
        while not self._stop.is_set() and (left := until - self._clock()) > 0:
            if self._trace_now:
                self._send_trace()
            while self._unsaid:
                self._transport.send(self._scheduler, wire.encode(self._unsaid.popleft()))
            received = self._transport.recv(left)
            if received is None:
                continue
            if not received[
                1
            ]:  # the link was reconnected: the scheduler may have news, and announces it at a heartbeat
                self._say_alive()
                continue
            heard = self._clock()
            self._take(received[1], heard)
            until = min(until, heard + self._pause())  # a trace has begun: its notes are to find the clocks compared
        self._send_trace()
        return heard

    def _report(self) -> None:
        """Send what this process reports of itself. An error in making it must not end the heartbeats."""
        if self._make_report is None:
            return
        try:
            report = self._make_report()
        except Exception as exc:
            self._drops.note("a report of this process", repr(exc))
            return
        if report is not None:
            self._transport.send(self._scheduler, wire.encode(report))

    def _say_alive(self) -> None:
        frames = self._beat_frames if self._tracer is None else wire.encode(wire.Beat(self._node, self._clock()))
        self._transport.send(self._scheduler, frames)

    def _pause(self) -> float:
        """Return the time to the next heartbeat: short as long as the scheduler's clock is asked for and not known."""
        if self._tracer is None or self._tracer.offsets.settled:
            return self._interval_s
        return min(self._interval_s, CLOCK_S)

    def _send_trace(self) -> None:
        self._trace_now = False
        if self._tracer is not None:
            for chunk in self._tracer.chunks(self._node):
                self._transport.send(self._scheduler, wire.encode(chunk))

    def _note_place(self) -> None:
        """Let the pulse know where this process is, in case that this thread cannot say it later."""
        if self._pulse is not None:
            try:
                self._pulse.note_place(place_of(self._program))
            except Exception as exc:
                self._drops.note("a note where this process is", repr(exc))

    def _redial(self) -> None:
        before, self._transport = self._transport, self._make_transport()
        self._scheduler = self._transport.connect(self._root)
        before.abandon()

    def _see_to_pulse(self) -> None:
        if self._beside is None or self._stop.is_set() or (self._pulse is not None and not self._pulse.ended):
            return
        self._end_pulse()
        try:
            self._pulse = self._beside()
        except OSError as exc:
            self._drops.note("a process that beats for this one", exc)

    def _end_pulse(self) -> None:
        if self._pulse is not None:
            self._pulse.end()

    def _take(self, frames: list[bytes | bytearray | memoryview], received: float) -> None:
        try:
            message = wire.decode(frames)
        except WireError as exc:
            self._drops.note("a bad message from the scheduler", exc)
            return
        if isinstance(message, wire.Where):
            self._tell_where(message.number)
        elif not isinstance(message, wire.Alive):
            self._listener.on_notice(message)
        else:
            if message.traced[1]:
                self._listener.on_traced(RoundWindow(*message.traced))
            if self._tracer is not None and message.now:
                self._tracer.offsets.take(message.start, message.sent, received, message.now)

    def _tell_where(self, number: int) -> None:
        """Say where this process is in its code. A failure costs the answer, not the heartbeat."""
        try:
            frames = wire.encode(where(self._node, number, self._program))
        except Exception as exc:
            self._drops.note("the question where this process is", repr(exc))
            return
        self._transport.send(self._scheduler, frames)
