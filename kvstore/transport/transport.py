"""``Transport``: the interface between the logic and whatever moves its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from kvstore import wire
from kvstore.transport.memory import Memory, ScatteredFrame

Peer: TypeAlias = bytes
Frames: TypeAlias = "list[wire.Buffer]"

BACKLOG = 1024  # connections that wait to be accepted
# Firewalls silently forget connections that are idle for some minutes. So after IDLE_S without traffic the system sends
# a keepalive probe, and then ASKS more, every ASK_S. A peer that answers none is gone.
IDLE_S, ASK_S, ASKS = 60, 15, 4
MAX_FRAME = 1 << 36  # bytes; a peer that announces more is disconnected


class Admission(Protocol):
    """Which of the links that others have made stay, and what is known of them."""

    def admit(self, peer: Peer) -> None:
        """Note that ``peer`` is a member of the job.

        Until then it is a stranger. Strangers may send short messages only. All of them together get a small part of
        this process's time. When there are too many, the one that has been silent for longest is dropped.
        """
        ...

    def refuse(self, peer: Peer) -> None:
        """Drop a link that others have made, because of its last message. Charge the message's cost to strangers.

        A transport that cannot drop a single link keeps it.
        """
        ...

    def identity(self, peer: Peer) -> str:
        """Return the public key whose secret key ``peer`` has proved to have; empty on links without keys."""
        ...

    def gone(self, peer: Peer) -> bool:
        """Whether a link that others have made has ended; False if the transport cannot tell."""
        ...


class Transport(Memory, Admission, Protocol):
    """One member's end of its links. It may listen, connect to others, or both.

    A ``Peer`` names a link at this end only. ``connect`` returns one, and ``recv`` returns one with each message, to
    answer to. Frames arrive whole, once on each link, and in order except for priorities. A message to a peer that is
    gone is dropped. A peer that reads nothing for a minute of what waits for it is disconnected.

    Buffers that were sent must not change afterwards, and received buffers must not be written to, for both may be the
    same memory. Received buffers stay valid as long as they are held, whatever happens to the link.

    ``allocate`` returns memory that can be sent, whole or in part, in the cheapest way. It is freed when its last view
    is dropped and no peer can read any more what was sent from it. ``busy`` tells whether a peer still can.

    One thread at a time may call the methods, except ``allocate``, ``busy`` and ``interrupt``, which any thread may
    call.
    """

    def bind(self, endpoint: str) -> str:
        """Listen, and return the endpoint that others can connect to."""
        ...

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """Make a link to the listener at ``endpoint``, which need not be there yet. Return at once.

        Args:
            bulk: large frames will go over the link, so prepare now whatever makes them cheap.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Drop a link of ``connect``, for good: nothing comes over it any more, and what is queued does not leave."""
        ...

    def send(self, peer: Peer, frames: Sequence[wire.Buffer | ScatteredFrame], priority: int | None = None) -> None:
        """Queue ``frames`` for ``peer``; never blocks.

        Args:
            priority: the message leaves before waiting ones of lower priority, if the transport has priorities. Without
                one it overtakes nothing, and nothing that is sent later overtakes it.
        """
        ...

    def gathers(self, peer: Peer) -> bool:
        """Whether frames for ``peer`` may be a ``ScatteredFrame``, so that scattered buffers need no copy.

        True where a message is read once, when it leaves.
        """
        ...

    def shares(self, peer: Peer) -> bool:
        """Whether ``peer`` reads large frames from this process's own memory, as far as is known."""
        ...

    def detach(self) -> None:
        """Copy what has been sent and has not left yet: the buffers may change from now on."""
        ...

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """Return the next message, or None after ``timeout`` seconds or an interrupt.

        A message without frames says that a link of ``connect`` was lost and has been made anew, if the transport can
        tell: all that was sent over it until now may be lost. At the other end it is a new peer.
        """
        ...

    def interrupt(self) -> None:
        """Make the ``recv`` that another thread is in, or else the next one, return soon. Any thread may call it."""
        ...

    def abandon(self) -> None:
        """Drop all links at once, whatever state an exception has left them in. Nothing else is called afterwards.

        If an exception ends this call too, it is called again.
        """
        ...

    def close(self, linger: float = 0.0) -> None:
        """Wait at most ``linger`` seconds for queued messages to leave, and close all links. May be called again."""
        ...
