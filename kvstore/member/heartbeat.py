"""Signs of life: a thread that tells the scheduler "I am alive", hears the same, and takes its notices.

It has a link of its own, so that a long computation or a long wait in the caller's thread does not look like death.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.drops import Drops
from kvstore.errors import KVStoreError, NodeLost, WireError
from kvstore.keys import split_key
from kvstore.transport import Transport
from kvstore.wire import Alive, Beat, Message, Node, decode, encode

log = logging.getLogger(__name__)


class Heartbeat:
    """Beats for ``node`` until stopped.

    Args:
        transport: an end of its own; closed when stopped.
        root: the scheduler's endpoint.
        node: who is alive.
        interval_s: time between beats.
        limit_s: the scheduler's silence after which it is lost.
        clock: seconds, monotonic.
        on_notice: takes the scheduler's notices, in this thread.
        on_lost: is called once when the scheduler is lost, in this thread.
    """

    def __init__(
        self,
        transport: Transport,
        root: str,
        node: Node,
        interval_s: float,
        limit_s: float,
        clock: Callable[[], float],
        on_notice: Callable[[Message], None],
        on_lost: Callable[[KVStoreError], None],
    ) -> None:
        self._transport = transport
        self._root = root
        self._node = node
        self._interval_s = interval_s
        self._limit_s = limit_s
        self._clock = clock
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._drops = Drops(log)
        self._stop = threading.Event()
        self._scheduler = transport.connect(root)
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of {node}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, and close the link. Returns when the thread is gone."""
        self._stop.set()
        self._transport.interrupt()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            beat = encode(Beat(self._node.role, self._node.rank, self._node.incarnation))
            heard = looked = self._clock()
            while not self._stop.is_set():
                self._transport.send(self._scheduler, beat)
                due = self._clock() + self._interval_s
                while not self._stop.is_set() and (left := due - self._clock()) > 0:
                    received = self._transport.recv(left)
                    if received is not None and received[1]:  # else the link has been made anew
                        heard = self._clock()
                        self._take(received[1])
                now = self._clock()
                if now - looked > 2 * self._interval_s:  # this process was stopped; what it missed proves nothing
                    heard = now
                looked = now
                if now - heard > self._limit_s:
                    where = split_key(self._root)[0]
                    self._on_lost(NodeLost(f"the scheduler at {where} has been silent for {now - heard:.1f} s"))
                    return
        except Exception as exc:  # a dead heartbeat must be as loud as a dead scheduler
            self._on_lost(NodeLost(f"the heartbeat of {self._node} failed: {exc!r}"))
        finally:
            self._transport.close()

    def _take(self, frames: list[bytes | bytearray | memoryview]) -> None:
        try:
            message = decode(frames)
        except WireError as exc:
            self._drops.note("a bad message from the scheduler", exc)
            return
        if not isinstance(message, Alive):
            self._on_notice(message)
