"""``Transport``: the interface between the logic and whatever moves its frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvstore import wire
from kvstore.transport.memory import Heap, ScatteredFrame

Peer: TypeAlias = bytes
Frames: TypeAlias = "list[wire.Buffer]"

BACKLOG = 1024  # connections that wait to be accepted
# Firewalls silently forget connections that are idle for some minutes. So after IDLE_S without traffic the system sends
# a keepalive probe, and then ASKS more, every ASK_S. A peer that answers none is gone.
IDLE_S, ASK_S, ASKS = 60, 15, 4
MAX_FRAME = 1 << 36  # bytes; a peer that announces more is disconnected


class Admission:
    """Which incoming links stay, and what is known of them. This one admits every link, and no link proves a key."""

    def admit(self, peer: Peer) -> None:
        """Treat ``peer`` as a member of the job from now on.

        Until then it is a stranger. Strangers may send short messages only. All of them together get a small part of
        this process's time. When there are too many, the one that has been silent for longest is dropped.
        """

    def refuse(self, peer: Peer) -> None:
        """Drop an incoming link because of its last message, and charge the cost of the message to strangers.

        A transport that cannot drop a single link keeps it.
        """

    def identity(self, peer: Peer) -> str:
        """Return the public key whose secret key ``peer`` has proved to have; empty on links without keys."""
        return ""

    def gone(self, peer: Peer) -> bool:
        """Whether an incoming link has ended; False if the transport cannot tell."""
        return False


class Transport(Heap, Admission):
    """One member's end of its links. It may listen, connect to others, or both.

    A ``Peer`` names a link at this end only. ``connect`` returns one, and ``recv`` returns one with each message, to
    answer to. Frames arrive whole, once on each link, and in order except for priorities. A message to a peer that is
    gone is dropped. A peer that reads nothing for a minute of what waits for it is disconnected.

    Buffers that were sent must not change afterwards, and received buffers must not be written to, for both may be the
    same memory. Received buffers stay valid as long as they are held, whatever happens to the link.

    ``allocate`` returns memory that can be sent, whole or in part, in the cheapest way. It is freed when its last view
    is dropped and no peer can read any more what was sent from it. ``busy`` tells whether a peer still can. ``trim``
    gives back what has not been used since the call before.

    One thread at a time may call the methods, except ``allocate``, ``busy``, ``trim`` and ``interrupt``, which any
    thread may call.
    """

    def bind(self, endpoint: str) -> str:
        """Listen, and return the endpoint that others can connect to."""
        raise NotImplementedError

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """Connect to the listener at ``endpoint``, which need not be there yet. Return at once.

        Args:
            bulk: large frames will go over the link, so prepare now whatever makes them cheap.
        """
        raise NotImplementedError

    def disconnect(self, peer: Peer) -> None:
        """Drop an outgoing link, for good: nothing comes over it any more, and what is queued does not leave."""
        raise NotImplementedError

    def send(self, peer: Peer, frames: Sequence[wire.Buffer | ScatteredFrame], priority: int | None = None) -> None:
        """Queue ``frames`` for ``peer``; never blocks.

        Args:
            priority: the message leaves before waiting ones of lower priority, if the transport has priorities. Without
                one it overtakes nothing, and no later message overtakes it.
        """
        raise NotImplementedError

    def gathers(self, peer: Peer) -> bool:
        """Whether frames for ``peer`` may be a ``ScatteredFrame``, so that scattered buffers need no copy.

        True where a message is read once, when it leaves.
        """
        return False

    def shares(self, peer: Peer) -> bool:
        """Whether ``peer`` reads large frames from this process's own memory, as far as is known."""
        return False

    def detach(self) -> None:
        """Copy the messages that have not left yet: their buffers may change from now on."""

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """Return the next message, or None after ``timeout`` seconds or an interrupt.

        A message without frames says that an outgoing link was lost and has been reconnected, if the transport can
        tell: all that was sent over it until now may be lost. At the other end it is a new peer.
        """
        raise NotImplementedError

    def interrupt(self) -> None:
        """Make the ``recv`` that another thread is in, or else the next one, return soon. Any thread may call it."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Drop all links at once, whatever state an exception has left them in. Nothing else is called afterwards.

        If an exception ends this call too, it is called again.
        """
        raise NotImplementedError

    def close(self, linger: float = 0.0) -> None:
        """Wait at most ``linger`` seconds for queued messages to leave, and close all links. May be called again."""
        raise NotImplementedError
