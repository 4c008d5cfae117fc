"""The interface between the logic and whatever moves its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from kvstore.transport.memory import Memory, ScatteredFrame
from kvstore.wire import Buffer

Peer: TypeAlias = bytes
Frames: TypeAlias = "list[Buffer]"

BACKLOG = 1024  # connections that wait to be accepted
# Firewalls forget connections over which nothing has gone for some minutes, and say so to nobody. So after IDLE_S the
# system asks the other side whether it is there, and ASKS times more, every ASK_S; who does not answer is gone.
IDLE_S, ASK_S, ASKS = 60, 15, 4
MAX_FRAME = 1 << 36  # bytes; a peer that announces more is disconnected


class Admission(Protocol):
    """Who may come: what is decided about links that others have made, and what is known of them."""

    def admit(self, peer: Peer) -> None:
        """Note that ``peer`` is a member of the job.

        Until then it is a stranger: it may send short messages only, all strangers together get a small part of this
        process's time, and the one that has been silent for longest is dropped when there are too many.
        """
        ...

    def refuse(self, peer: Peer) -> None:
        """Drop a link that others have made, because of the message that came last: what it has cost is strangers'.

        A transport that cannot drop one link goes on with it.
        """
        ...

    def identity(self, peer: Peer) -> str:
        """Return the public key that ``peer`` has proved to have the secret key of; empty where nothing is proved."""
        ...

    def gone(self, peer: Peer) -> bool:
        """Whether a link that others have made has ended; False if it is not known."""
        ...


class Transport(Memory, Admission, Protocol):
    """One member's end of its links: it may listen, connect to others, or both.

    A ``Peer`` names a link at this end only: ``connect`` returns one, and ``recv`` gives one with each message, to
    answer by. Frames arrive whole, once on each link, and in order but for priorities. A message to a peer that is gone
    is dropped; whoever takes nothing for a minute of what is sent to them is disconnected. The buffers that are sent
    must not change afterwards, those that are received must not be written to: they may be one memory. Received ones
    stay good as long as they are held, whatever happens to the link.

    ``allocate`` gives memory that can be sent, whole or in parts, in the cheapest way that there is. It is freed when
    its last view is dropped and nobody can read any more what was sent of it; ``busy`` is whether somebody can.

    One thread at a time may call the methods, except ``allocate``, ``busy`` and ``interrupt``, which any may.
    """

    def bind(self, endpoint: str) -> str:
        """Listen, and return the endpoint that others can connect to."""
        ...

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """Make a link to whoever listens, or will listen, at ``endpoint``; returns at once.

        Args:
            bulk: large frames will go over it, so whatever makes them cheap is to be prepared now.
        """
        ...

    def send(self, peer: Peer, frames: Sequence[Buffer | ScatteredFrame], priority: int | None = None) -> None:
        """Queue ``frames`` for ``peer``; never blocks.

        Args:
            priority: lets the message leave before those of a lower priority that wait, if the transport can; without
                one it overtakes nothing, and nothing that is sent later overtakes it.
        """
        ...

    def gathers(self, peer: Peer) -> bool:
        """Whether frames for ``peer`` may be a ``ScatteredFrame``, so that what lies in several places is not copied.

        It is so where a message is read once, when it leaves.
        """
        ...

    def detach(self) -> None:
        """Let what has been sent and not left yet be independent of the buffers it was in: those may change again."""
        ...

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """Return the next message, or None after ``timeout`` seconds or an interrupt.

        No frames say that a link of ``connect`` was lost and has been made anew, if the transport can tell: what was
        sent over it before, until now, may be lost. The other side knows it as another peer.
        """
        ...

    def interrupt(self) -> None:
        """Make a ``recv`` that another thread is in, or the next one, return soon. Any thread may call it."""
        ...

    def abandon(self) -> None:
        """Drop all links at once, in whatever state an exception has left this; nothing else is called afterwards.

        It may itself be ended by an exception, and is called again then.
        """
        ...

    def close(self, linger: float = 0.0) -> None:
        """Close all links, having waited at most ``linger`` seconds for what is queued to leave. May be repeated."""
        ...
