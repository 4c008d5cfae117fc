"""Whoever has made a link and is not known yet: what they may cost, in memory, in connections and in time.

Strangers and the sockets at which they arrive have a selector of their own, which is a single entry of the members'
selector. When their time is spent, that entry is taken out: strangers then wait, and whoever wants to become one waits
in the kernel's backlog, while members are served as if nobody else was there.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import WireError
from kvstore.transport.base import Frames, Peer
from kvstore.transport.sockets.budget import Budget
from kvstore.transport.sockets.link import Link
from kvstore.transport.sockets.stream import Introduction
from kvstore.transport.system_errors import require_systems


@dataclass(frozen=True)
class StrangerLimits:
    """What strangers may cost one process. Times are a processor's: on a busy machine they are not heard less.

    Attributes:
        links: how many there may be; of more, the one that has been silent for longest is dropped.
        silence_s: how long they may say nothing, in seconds of the clock.
        share: how much of all time they may take, less what it took to hear those who turned out to be members. It is
            this little because whoever makes connections as fast as they are ended takes more than that of a machine.
        burst_s: how much of that they may take at once.
        pause_s: how much is saved up before they are heard again.
        turn_s: how long they are heard before it is members' turn again.
        step_s: the most that one step, such as reading a message, is charged. A longer step is the interpreter's doing:
            a garbage collection of 0.3 s, charged in full, would keep strangers waiting for a minute.
    """

    links: int = 256
    silence_s: float = 10.0
    share: float = 0.005
    burst_s: float = 0.05
    pause_s: float = 0.001
    turn_s: float = 0.001
    step_s: float = 0.002


@dataclass
class Stranger:
    """Somebody who has made a link.

    Attributes:
        link: through which they are answered.
        introduction: through which they are heard.
        heard: when they last had something to say.
        cost: what it has taken to hear them, in seconds.
    """

    link: Link
    introduction: Introduction
    heard: float
    cost: float = 0.0


class Strangers:
    """See the module. One thread at a time may use it.

    Args:
        members: the selector of those who are known.
        arrive: makes a connection ready to be used, and returns the link that it is; None if it may not be one.
        limits: what they may cost.
    """

    def __init__(
        self,
        members: selectors.BaseSelector,
        arrive: Callable[[socket.socket], Link | None],
        limits: StrangerLimits,
    ) -> None:
        self.links: OrderedDict[Peer, Stranger] = OrderedDict()  # the longest silent first
        self.opens_at = math.inf  # when they may be heard again, if they may not now
        self._members = members
        self._arrive = arrive
        self._limits = limits
        self._budget = Budget(limits.share, limits.burst_s, limits.pause_s)
        self._listeners: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._ready: deque[selectors.SelectorKey] = deque()  # who has something to say, and has not been heard yet

    # ---- who there is

    def listen(self, listener: socket.socket) -> None:
        """Let strangers come in at a socket."""
        self._selector.register(listener, selectors.EVENT_READ)
        if not self._listeners:
            self._members.register(self._selector, selectors.EVENT_READ, self)
        self._listeners.append(listener)

    def admit(self, peer: Peer) -> Link | None:
        """Return the link of somebody who is known from now on; None if they were no stranger."""
        stranger = self._release(peer)
        if stranger is None:
            return None
        self._budget.refund(stranger.cost)
        return stranger.link

    def drop(self, peer: Peer) -> None:
        """End a link."""
        stranger = self._release(peer)
        if stranger is not None:
            stranger.link.lose(time.monotonic())

    def _release(self, peer: Peer) -> Stranger | None:
        stranger = self.links.pop(peer, None)
        if stranger is not None and stranger.link.socket is not None:
            self._selector.unregister(stranger.link.socket)
        return stranger

    def answer(self, peer: Peer, parts: Sequence[memoryview]) -> None:
        """Send to a stranger; whoever has not read what was sent before is dropped."""
        if not self.links[peer].link.put(parts):
            self.drop(peer)

    def close(self) -> None:
        """End all. May be repeated."""
        for sock in [*self._listeners, *(stranger.link.socket for stranger in self.links.values())]:
            if sock is not None:
                sock.close()
        self._selector.close()

    # ---- time

    def spend(self, peer: Peer | None, seconds: float, now: float) -> None:
        """Note what a stranger has cost; if all that is too much, hear nobody and let nobody in for a while."""
        seconds = min(seconds, self._limits.step_s)
        if peer is not None and peer in self.links:
            self.links[peer].cost += seconds
        if self._budget.spend(seconds, now) or not self._listeners:
            return
        if self.opens_at == math.inf:
            self._members.unregister(self._selector)
        self.opens_at = self._budget.due()

    def open(self) -> None:
        """Hear them again."""
        self.opens_at = math.inf
        self._members.register(self._selector, selectors.EVENT_READ, self)

    # ---- hearing them

    def attend(self, now: float) -> tuple[Peer, Frames] | None:
        """Let strangers in and hear them, in turn, until there is a message, which is returned, or it was enough."""
        began = before = time.thread_time()
        if not self._ready:
            self._look(now)
        message = None
        while self._ready and message is None and before - began < self._limits.turn_s and self.opens_at == math.inf:
            key = self._ready.popleft()
            if key.data is None:
                who = self._let_in(key.fileobj, now)  # type: ignore[arg-type]
            else:
                who = key.data.link.peer
                message = self._hear(key.data)
            after = time.thread_time()
            self.spend(who, after - before, now)
            before = after
        return message

    def dismiss(self, now: float) -> None:
        """Drop those who have been silent for too long, though they could have been heard."""
        if not self.links or self._ready or self.opens_at < math.inf:
            return
        limit = now - self._limits.silence_s
        if next(iter(self.links.values())).heard > limit:
            return
        self._look(now)
        for peer in [peer for peer, stranger in self.links.items() if stranger.heard <= limit]:
            self.drop(peer)

    def _look(self, now: float) -> None:
        """See who has something to say."""
        for key, _ in self._selector.select(0):
            self._ready.append(key)
            if key.data is not None:
                key.data.heard = now
                self.links.move_to_end(key.data.link.peer)

    def _let_in(self, listener: socket.socket, now: float) -> Peer | None:
        """Accept a connection; return whose it is, if they may come."""
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
        """Read until there is a whole message."""
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
