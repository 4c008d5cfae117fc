"""The primary's link to its standby: made over the transport of this process, so that one loop serves all. I/O."""

from __future__ import annotations

from kvstore import wire
from kvstore.errors import WireError
from kvstore.transport import Peer, Transport


class StandbyLink:
    """See the module.

    Args:
        transport: of this process.
        address: of the standby.
        node: this process.

    Attributes:
        peer: the link's name here.
    """

    def __init__(self, transport: Transport, address: str, node: wire.Node) -> None:
        self._transport = transport
        self._address = address
        self._node = node
        self.peer = self._connect()

    def renew(self) -> None:
        """Make the link anew."""
        self.close()
        self.peer = self._connect()

    def introduce(self) -> None:
        """Say whose link this is, as has to be said again when the transport has made the link anew."""
        self.send(wire.Here(self._node))

    def send(self, message: wire.Message) -> None:
        """Send ``message``. Its large frames go by reference where the standby can map this process's memory."""
        self._transport.send(self.peer, wire.encode(message))

    def close(self) -> None:
        """Drop the link for good."""
        self._transport.disconnect(self.peer)

    def _connect(self) -> Peer:
        peer = self._transport.connect(self._address, bulk=True)
        self._transport.send(peer, wire.encode(wire.Here(self._node)))
        return peer


def stored(frames: list[wire.Buffer]) -> wire.Stored:
    """Return what a standby says.

    Raises:
        WireError: it is something else.
    """
    message = wire.decode(frames)
    if not isinstance(message, wire.Stored):
        raise WireError(f"expected Stored of a standby, got {type(message).__name__}")
    return message
