"""Strangers: peers that have made a link and are not known yet, and limits on the memory, links and time they cost.

Strangers and the listening sockets have a selector of their own, which is one entry of the members' selector. When the
strangers' time is spent, that entry is taken out. Strangers then wait, and new connections wait in the kernel's
backlog, while members are served as if nobody else was there.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore import wire
from kvstore.errors import WireError
from kvstore.transport.sockets.link import Link
from kvstore.transport.sockets.stream import Introduction
from kvstore.transport.system_errors import require_systems
from kvstore.transport.transport import Frames, Peer


class Budget:
    """A token bucket of seconds, filled by ``share`` of all time. An expense may exceed it; then nothing is left until
    ``least_s`` are there again.
    """

    def __init__(self, share: float, burst_s: float, least_s: float) -> None:
        self._share = share
        self._burst_s = burst_s
        self._least_s = least_s
        self._saved_s = burst_s
        self._at = float("-inf")  # when that was so

    def spend(self, seconds: float, now: float) -> bool:
        """Return whether anything is left."""
        if self._saved_s < self._burst_s:
            self._saved_s = min(self._burst_s, self._saved_s + self._share * (now - self._at))
        self._saved_s -= seconds
        self._at = now
        return self._saved_s > 0.0

    def refund(self, seconds: float) -> None:
        """Give back an expense that was not a stranger's after all."""
        self._saved_s = min(self._burst_s, self._saved_s + seconds)

    def due(self) -> float:
        return self._at + (self._least_s - self._saved_s) / self._share


@dataclass(frozen=True)
class StrangerLimits:
    """What strangers may cost one process. Times are processor time, so a busy machine does not hear them less."""

    links: int = 256  # if there are more, the one that has been silent for longest is dropped
    silence_s: float = 10.0  # of the clock, as the only one: how long one may be silent
    # The part of all time that they may take in the long run; time for peers that turn out to be members is refunded.
    # It is this little because a peer that connects again as fast as it is dropped takes far more of a machine.
    share: float = 0.005
    burst_s: float = 0.05  # how much of that they may take at once
    pause_s: float = 0.001  # how much must be saved up before they are heard again
    turn_s: float = 0.001  # how long they are heard before it is the members' turn again
    # The most that one step, such as reading a message, is charged. The interpreter is to blame for a longer one: a
    # garbage collection of 0.3 s, charged in full, would keep strangers waiting for a minute.
    step_s: float = 0.002


@dataclass
class Stranger:
    """One stranger: when it was last heard, and how many seconds of processor time that has taken."""

    link: Link
    introduction: Introduction
    heard: float
    cost: float = 0.0


class Strangers:
    """The strangers of one transport. One thread at a time may use it.

    Args:
        members: the selector of the members' links.
        arrive: prepares a new connection and returns its link; None if the peer may not connect.
    """

    def __init__(
        self,
        members: selectors.BaseSelector,
        arrive: Callable[[socket.socket], Link | None],
        limits: StrangerLimits,
    ) -> None:
        self.links: OrderedDict[Peer, Stranger] = OrderedDict()  # the longest silent first
        self.opens_at = math.inf  # when strangers are heard again, if they are not now
        self._members = members
        self._arrive = arrive
        self._limits = limits
        self._budget = Budget(limits.share, limits.burst_s, limits.pause_s)
        self._listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._ready: deque[selectors.SelectorKey] = deque()  # strangers that have sent something and wait to be heard

    # ---- arrivals and departures

    def listen(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ)
        if not self._listeners:
            self._members.register(self._selector, selectors.EVENT_READ, self)
        self._listeners.append(listener)

    def admit(self, peer: Peer) -> Link | None:
        """Return the link of a peer that is a member from now on; None if it was not a stranger."""
        stranger = self._release(peer)
        if stranger is None:
            return None
        self._budget.refund(stranger.cost)
        return stranger.link

    def drop(self, peer: Peer) -> None:
        stranger = self._release(peer)
        if stranger is not None:
            stranger.link.lose(time.monotonic())

    def _release(self, peer: Peer) -> Stranger | None:
        stranger = self.links.pop(peer, None)
        if stranger is not None and stranger.link.socket is not None:
            self._selector.unregister(stranger.link.socket)
        return stranger

    def answer(self, peer: Peer, parts: Sequence[wire.Buffer]) -> None:
        """Send to a stranger. One that has not read the last answer is dropped."""
        if not self.links[peer].link.put(parts):
            self.drop(peer)

    def close(self) -> None:
        for sock in [*self._listeners, *(stranger.link.socket for stranger in self.links.values())]:
            if sock is not None:
                sock.close()
        self._selector.close()

    # ---- time

    def spend(self, peer: Peer | None, seconds: float, now: float) -> None:
        """Charge a stranger. If the budget is spent, hear and accept no strangers for a while."""
        seconds = min(seconds, self._limits.step_s)
        if peer is not None and peer in self.links:
            self.links[peer].cost += seconds
        if self._budget.spend(seconds, now) or not self._listeners:
            return
        if self.opens_at == math.inf:
            self._members.unregister(self._selector)
        self.opens_at = self._budget.due()

    def open(self) -> None:
        self.opens_at = math.inf
        self._members.register(self._selector, selectors.EVENT_READ, self)

    # ---- hearing them

    def attend(self, now: float) -> tuple[Peer, Frames] | None:
        """Accept and hear strangers in turn, until one has sent a message, which is returned, or their turn is over."""
        began = before = time.thread_time()
        if not self._ready:
            self._look(now)
        message = None
        while self._ready and message is None and before - began < self._limits.turn_s and self.opens_at == math.inf:
            key = self._ready.popleft()
            if key.data is None:
                peer = self._let_in(key.fileobj, now)  # type: ignore[arg-type]
            else:
                peer = key.data.link.peer
                message = self._hear(key.data)
            after = time.thread_time()
            self.spend(peer, after - before, now)
            before = after
        return message

    def dismiss(self, now: float) -> None:
        """Drop strangers that have been silent for too long, unless they had to wait to be heard."""
        if not self.links or self._ready or self.opens_at < math.inf:
            return
        limit = now - self._limits.silence_s
        if next(iter(self.links.values())).heard > limit:
            return
        self._look(now)
        for peer in [peer for peer, stranger in self.links.items() if stranger.heard <= limit]:
            self.drop(peer)

    def _look(self, now: float) -> None:
        for key, _ in self._selector.select(0):
            self._ready.append(key)
            if key.data is not None:
                key.data.heard = now
                self.links.move_to_end(key.data.link.peer)

    def _let_in(self, listener: socket.socket, now: float) -> Peer | None:
        try:
            made, _ = listener.accept()
        except BlockingIOError:
            return None
        except OSError as exc:  # too many files are open
            require_systems(exc)
            self._make_room()
            return None
        made.setblocking(False)
        link = self._arrive(made)
        if link is None:
            made.close()
            return None
        if len(self.links) >= self._limits.links:
            self._make_room()
        stranger = self.links[link.peer] = Stranger(link, Introduction(), now)
        self._selector.register(made, selectors.EVENT_READ, stranger)
        return link.peer

    def _make_room(self) -> None:
        if self.links:
            self.drop(next(iter(self.links)))

    def _hear(self, stranger: Stranger) -> tuple[Peer, Frames] | None:
        link, introduction = stranger.link, stranger.introduction
        if link.peer not in self.links or link.socket is None:  # known by now, or gone
            return None
        try:
            while True:
                room = introduction.room()
                count = link.socket.recv_into(room)
                if not count:
                    break
                message = introduction.take(count)
                if message is not None:
                    return link.peer, message
                if count < len(room):
                    return None
        except BlockingIOError:
            return None
        except (OSError, WireError) as exc:
            require_systems(exc)
        self.drop(link.peer)
        return None
