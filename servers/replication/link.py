"""The primary's link to its standby: made over the transport of this process, so that one loop serves all. I/O."""

from __future__ import annotations

from kvstore.errors import WireError
from kvstore.transport import Peer, Transport
from kvstore.wire import Buffer, Here, Message, Node, Stored, decode, encode


class StandbyLink:
    """See the module.

    Args:
        transport: of this process.
        address: of the standby.
        node: this process.

    Attributes:
        peer: the link's name here.
    """

    def __init__(self, transport: Transport, address: str, node: Node) -> None:
        self._transport = transport
        self._node = node
        self.peer: Peer = transport.connect(address, bulk=True)
        self.introduce()

    def introduce(self) -> None:
        """Say whose link this is: first of all, and again when the link has been made anew."""
        self.send(Here(self._node))

    def send(self, message: Message) -> None:
        """Send ``message``. Its large frames go by reference where the standby can map this process's memory."""
        self._transport.send(self.peer, encode(message))


def stored(frames: list[Buffer]) -> Stored:
    """Return what a standby says.

    Raises:
        WireError: it is something else.
    """
    message = decode(frames)
    if not isinstance(message, Stored):
        raise WireError(f"expected Stored of a standby, got {type(message).__name__}")
    return message
