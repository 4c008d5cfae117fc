"""Those who can reach a socket and are no members: what they send, and how it is seen that they were refused."""

from __future__ import annotations

import random
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq
from waiting import LONG

from kvstore.job.curve_keys import split_key

NULL, CURVE = b"NULL", b"CURVE"
HELLO_BYTES = 64 + 202  # a CURVE client's greeting and HELLO
REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
)


def place(endpoint: str) -> tuple[str, int]:
    host, _, port = split_key(endpoint)[0].removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def greeting(mechanism: bytes, as_server: bool = False) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def frame(body: bytes, more: bool = False, command: bool = False) -> bytes:
    return bytes([4 * command + more, len(body)]) + body


READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00", command=True)
BYTES = {
    "noise": random.Random(1).randbytes(4000),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4,
    "no security": greeting(NULL) + READY + frame(b"forged"),
    "curve, then a READY": greeting(CURVE) + READY + frame(b"forged"),
    "curve, then a message": greeting(CURVE) + frame(b"forged") * 10,
    "curve, then a HELLO of noise": greeting(CURVE) + frame(b"\x05HELLO\x01\x00" + bytes(192), command=True),
    "a HELLO of the wrong length": greeting(CURVE) + frame(b"\x05HELLO", command=True),
    "an INITIATE first": greeting(CURVE) + frame(b"\x08INITIATE" + bytes(200), command=True),
    "a frame of exabytes": greeting(CURVE) + b"\x06" + b"\xff" * 8,
    "another server": greeting(CURVE, as_server=True) + READY,
    "an old protocol, ZMTP 1.0": b"\x01\x00" + b"\x07\x00forged" * 20,
    "an old protocol, ZMTP 2.0": b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00" + b"\x00\x06forged" * 20,
    "PLAIN": greeting(b"PLAIN") + frame(b"\x05HELLO\x01u\x01p", command=True),
}


def throw(endpoint: str, data: bytes) -> None:
    """Send bytes, and return when they have cost the connection."""
    with socket.create_connection(place(endpoint), timeout=LONG) as sock:
        try:
            sock.sendall(data)
            while sock.recv(1 << 16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass


def attempt(endpoint: str, *keys: str) -> None:
    """Connect with ZeroMQ, send, and return when it was refused.

    Args:
        endpoint: where to.
        keys: the listener's public key, one's own and one's secret one; none for a plain link.
    """
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    monitor = sock.get_monitor_socket(REFUSED)
    try:
        sock.linger = 0
        for option, key in zip((zmq.CURVE_SERVERKEY, zmq.CURVE_PUBLICKEY, zmq.CURVE_SECRETKEY), keys, strict=False):
            sock.set(option, key.encode())
        sock.connect(split_key(endpoint)[0])
        with suppress(zmq.Again):  # it was refused before all was sent: a send that waits would wait for ever
            for _ in range(10):
                sock.send_multipart([b"forged", bytes(1000)], zmq.NOBLOCK)
        assert monitor.poll(LONG * 1000), "not refused"
        sock.disable_monitor()
    finally:
        monitor.close()
        sock.close()
        context.term()


@contextmanager
def idle(endpoint: str, count: int) -> Iterator[list[socket.socket]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count + 1000)), hard))
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            made.append(socket.create_connection(place(endpoint), timeout=LONG))
        yield made
    finally:
        for sock in made:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Tap:
    """Between a client and a server: keeps what the client sends, passes at most ``limit`` bytes of it on, and can add.

    Attributes:
        endpoint: where to connect instead, with the server's key.
        recorded: what the first client has sent.
        ended: is set when the server has closed the first connection.
    """

    def __init__(self, endpoint: str, limit: int | None = None) -> None:
        self._target = place(endpoint)
        self._limit = limit
        # An address of its own: whoever still tries a port of another test's that is free again tries 127.0.0.1.
        self._listening = socket.create_server(("127.0.0.2", 0))
        own, target = self._listening.getsockname(), self._target
        self.endpoint = endpoint.replace(f"{target[0]}:{target[1]}", f"{own[0]}:{own[1]}")
        self.recorded = bytearray()
        self.ended = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def inject(self, data: bytes) -> None:
        self._sockets[1].sendall(data)

    def close(self) -> None:
        for sock in [self._listening, *self._sockets]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONG)
        for sock in [self._listening, *self._sockets]:
            sock.close()

    def _serve(self) -> None:
        """Take one client; later ones, such as the first again, wait for ever."""
        try:
            client, _ = self._listening.accept()
        except OSError:
            return
        server = socket.create_connection(self._target, timeout=LONG)
        self._sockets += [client, server]
        pumps: list[tuple[Any, ...]] = [(self._up, client, server), (self._down, server, client)]
        for pump, *ends in pumps:
            self._threads.append(threading.Thread(target=pump, args=ends))
            self._threads[-1].start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        try:
            while data := client.recv(1 << 16):
                room = len(data) if self._limit is None else max(0, self._limit - len(self.recorded))
                self.recorded += data
                server.sendall(data[:room])
            if self._limit is None:
                server.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def _down(self, server: socket.socket, client: socket.socket) -> None:
        try:
            server.settimeout(None)
            while data := server.recv(1 << 16):
                client.sendall(data)
        except OSError:
            pass
        self.ended.set()
