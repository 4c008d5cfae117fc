"""CURVE on one ZeroMQ socket: links over TCP that are encrypted, and that only members of the job can make.

ZeroMQ copies a socket's options at each ``bind`` and ``connect``, so they are set anew before each, and one socket can
listen, connect and use unix sockets too. Before a peer has proved that it has the secret key of one of the job's public
keys, and knows ours, none of its frames reaches the socket.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import zmq

from kvstore.errors import ConfigError
from kvstore.job.curve_keys import CurveKeys
from kvstore.rare_log import worth_a_line

if TYPE_CHECKING:
    from zmq.auth.thread import ThreadAuthenticator

log = logging.getLogger(__name__)

DOMAIN = "kvstore"


class Curve:
    """The keys of one socket.

    Args:
        context: the socket's, and of no other: whoever checks keys checks them for the whole context.
        sock: whose options to set.
        keys: the job's, and this process's own.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], keys: CurveKeys) -> None:
        self._context = context
        self._socket = sock
        self._keys = keys
        self._members = {key.encode() for key in keys.members}
        self._refused = 0
        self._checker: ThreadAuthenticator | None = None

    def plain(self) -> None:
        """Let what is bound or connected next do without."""
        self._socket.set(zmq.CURVE_SERVER, 0)

    def serve(self) -> None:
        """Let what is bound next take members only."""
        if self._checker is None:
            from zmq.auth.thread import ThreadAuthenticator  # brings asyncio, which workers do without

            self._socket.set(zmq.ZAP_DOMAIN, DOMAIN.encode())
            self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a checker nobody gets in, instead of everybody
            self._checker = ThreadAuthenticator(self._context)
            self._checker.configure_curve_callback(DOMAIN, self)
            self._checker.start()
        self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        self._socket.set(zmq.CURVE_SERVER, 1)

    def link(self, endpoint: str, key: str) -> None:
        """Let what is connected next, to ``endpoint``, find there whoever has the public key ``key``.

        Raises:
            ConfigError: it has no key, or one that is not the job's.
        """
        if not endpoint.startswith("tcp://"):
            self.plain()
            return
        if not key:
            raise ConfigError(
                f"{endpoint} has no key, and this process's links are encrypted: whoever listens there must have "
                "the job's keys too, and KVSTORE_ENCRYPTION=0 must be set in all processes or none"
            )
        if key not in self._keys.members:
            raise ConfigError(f"the key of {endpoint} is not among KVSTORE_MEMBER_KEYS: it is none of this job")
        self._socket.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        self._socket.set(zmq.CURVE_SERVERKEY, key.encode())

    def knows(self, key: str) -> bool:
        """Whether ``key`` is the public key of a member."""
        return key in self._keys.members

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether whoever has the public key ``key`` may come in; the checker's thread asks."""
        known = key in self._members
        if not known:
            self._refused += 1
            if worth_a_line(self._refused):
                log.warning("refused a connection with a key that is not of this job (%d so far)", self._refused)
        return known

    def close(self) -> None:
        """Stop checking: nobody comes in any more. The socket must be closed already."""
        if self._checker is not None:
            self._checker.stop()
            self._checker = None
