"""Where the peers of a member listen, and what the transport in use calls the links to them.

A transport names each link that it makes. If all links are made anew there is another transport, with other names. So
``Links`` knows its peers by names of its own, and ``Routes`` translates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvstore.transport import Peer, Transport


class _LinkAddress(NamedTuple):
    """The arguments that a link was made with."""

    endpoint: str
    bulk: bool


class Routes:
    """The links of one transport. An exception may end a method between two lines: then use ``renewed``.

    Attributes:
        transport: the transport in use, which only the owner of these routes uses.
        names: what the transport calls each peer.
        peers: the reverse.
    """

    __slots__ = ("_addresses", "names", "peers", "transport")

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.names: dict[Peer, Peer] = {}
        self.peers: dict[Peer, Peer] = {}
        self._addresses: dict[Peer, _LinkAddress] = {}

    @property
    def endpoints(self) -> dict[Peer, str]:
        """Where each peer listens."""
        return {peer: address.endpoint for peer, address in self._addresses.items()}

    def leads(self, peer: Peer, endpoint: str, bulk: bool) -> bool:
        """Whether there is such a link."""
        return self._addresses.get(peer) == (endpoint, bulk)

    def add(self, peer: Peer, endpoint: str, bulk: bool) -> None:
        """Make a link to ``peer``; see ``Transport.connect``."""
        self._addresses[peer] = _LinkAddress(endpoint, bulk)
        self._connect(peer)

    def misleads(self, peer: Peer, endpoint: str) -> bool:
        """Whether there is a link to ``peer``, and it leads to another place than ``endpoint``."""
        address = self._addresses.get(peer)
        return address is not None and address.endpoint != endpoint

    def replace(self, peer: Peer, endpoint: str) -> None:
        """Replace the link to ``peer`` by one to where it is now. What still comes over the old one is a stranger's."""
        self._addresses[peer] = self._addresses[peer]._replace(endpoint=endpoint)
        before = self.names[peer]
        self._connect(peer)
        del self.peers[before]
        self.transport.disconnect(before)

    def renewed(self, transport: Transport, moves: Mapping[Peer, str]) -> Routes:
        """Return routes to the same peers over another transport. These here stay as they are.

        Args:
            moves: endpoints of peers that are elsewhere now.
        """
        routes = Routes(transport)
        for peer, (endpoint, bulk) in self._addresses.items():
            routes.add(peer, moves.get(peer, endpoint), bulk)
        return routes

    def _connect(self, peer: Peer) -> None:
        endpoint, bulk = self._addresses[peer]
        name = self.transport.connect(endpoint, bulk=bulk)
        self.names[peer], self.peers[name] = name, peer
