"""A line between clients and a server that can be cut, or stop to take anything."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

from strangers import place
from waiting import LONG


class Line:
    """Passes what comes to its endpoint on to a server, and back.

    Attributes:
        endpoint: where to connect instead, with the server's key.
        passed: how many bytes each client has sent that were passed on.
    """

    def __init__(self, endpoint: str) -> None:
        self._target = place(endpoint)
        self._listening = socket.create_server(("127.0.0.3", 0))
        own, target = self._listening.getsockname(), self._target
        self.endpoint = endpoint.replace(f"{target[0]}:{target[1]}", f"{own[0]}:{own[1]}")
        self.passed: list[int] = []
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    @property
    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads[1::2])

    def stop(self) -> None:
        """Take nothing more from clients; at most what is on its way by now."""
        self._open.clear()

    def cut(self) -> None:
        for sock in list(self._sockets):  # those that are made meanwhile are none of them
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._open.set()

    def close(self) -> None:
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(LONG)
        self.cut()
        for thread in self._threads:
            thread.join(LONG)
        for sock in [self._listening, *self._sockets]:
            sock.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=LONG)
            except OSError:  # it has gone; clients come again until they are closed
                client.close()
                continue
            server.settimeout(None)
            self._sockets += [client, server]
            self.passed.append(0)
            pumps = [(client, server, len(self.passed) - 1), (server, client, None)]
            for ends in pumps:
                self._threads.append(threading.Thread(target=self._pump, args=ends))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, number: int | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if number is not None:
                    self._open.wait()
                target.sendall(data)
                if number is not None:
                    self.passed[number] += len(data)
        for sock in (source, target):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
