"""CURVE on one ZeroMQ socket: links over TCP that are encrypted, and that only members of the job can make.

ZeroMQ copies a socket's options at each ``bind`` and ``connect``. So they are set before each, and one socket can
listen, connect, and use unix sockets too. None of a peer's frames reaches the socket before the peer has proved that it
has the secret key of one of the job's public keys, and that it knows ours.
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
        context: the socket's, and of no other socket: an authenticator checks the keys of a whole context.
        sock: whose options to set.
        keys: the job's, and this process's own.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], sock: zmq.Socket[bytes], keys: CurveKeys) -> None:
        self._context = context
        self._socket = sock
        self._keys = keys
        self._admitted = {key.encode() for key in keys.members | keys.guests}
        self._refused = 0
        self._checker: ThreadAuthenticator | None = None

    def plain(self) -> None:
        """Let the next ``bind`` or ``connect`` use no keys."""
        self._socket.set(zmq.CURVE_SERVER, 0)

    def serve(self) -> None:
        """Let the next ``bind`` accept members only."""
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
        """Let the next ``connect``, to ``endpoint``, demand that the listener has the public key ``key``.

        Raises:
            ConfigError: ``key`` is empty, or not one of the job's.
        """
        if not endpoint.startswith("tcp://"):
            self.plain()
            return
        if not key:
            raise ConfigError(
                f"{endpoint} has no key, and this process's links are encrypted: whoever listens there must have "
                "the job's keys too, and KVSTORE_ENCRYPTION=0 must be set in all processes or none"
            )
        if key not in self._keys.members and not self._keys.follows:
            raise ConfigError(
                f"the key of {endpoint} is not among KVSTORE_MEMBER_KEYS: the listener, or the keys, are another job's"
            )
        self._socket.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
        self._socket.set(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        self._socket.set(zmq.CURVE_SERVERKEY, key.encode())

    def knows(self, key: str) -> bool:
        """Whether ``key`` is the public key of a member, or of readers or observers."""
        return key.encode() in self._admitted

    def callback(self, _domain: str, key: bytes) -> bool:
        """Whether a peer with the public key ``key`` may connect. The authenticator's thread calls it."""
        known = key in self._admitted
        if not known:
            self._refused += 1
            if worth_a_line(self._refused):
                log.warning("refused a connection with a key that is not of this job (%d so far)", self._refused)
        return known

    def close(self) -> None:
        """Stop the authenticator: nobody can connect any more. The socket must be closed already."""
        if self._checker is not None:
            self._checker.stop()
            self._checker = None
