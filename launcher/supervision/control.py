"""Orders to a running job: the socket in its private directory, which `kvstore-job` writes to.

Only the user who has started the job can enter that directory, so nobody else can give an order: no observer and no
reader. An order is a line of JSON. The answers are lines of JSON, too: `{"say": TEXT}` any number of times, then
`{"end": CODE, "say": TEXT}`.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SOCKET = "control"  # in the job's private directory
LONGEST = 4096  # bytes of an order
MOST_CALLERS = 8
DONE, REFUSED, USAGE, FAILED = 0, 1, 2, 4  # how an order ends


class Orderer:
    """Somebody who has connected to give one order."""

    def __init__(self, link: socket.socket, ends: Callable[[Orderer], None]) -> None:
        self.link = link
        self.read = b""
        self._ends = ends

    def say(self, text: str) -> None:
        self._write({"say": text})

    def end(self, code: int, text: str) -> None:
        self._write({"end": code, "say": text})
        self._ends(self)

    def _write(self, answer: dict[str, Any]) -> None:
        with suppress(OSError):  # nobody listens any more, or reads: what was ordered is done all the same
            self.link.send(json.dumps(answer).encode() + b"\n")


class Control:
    """Listens in `directory`, and calls `take` with each order and its caller."""

    def __init__(
        self, directory: Path, selector: selectors.BaseSelector, take: Callable[[dict[str, str], Orderer], None]
    ) -> None:
        self._selector, self._take = selector, take
        self._callers: list[Orderer] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(os.fspath(directory / SOCKET))
        self._listener.listen()
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for caller in list(self._callers):
            caller.end(FAILED, "the job has ended")
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            link, _ = self._listener.accept()
            link.setblocking(False)
            caller = Orderer(link, self._close)
            self._callers.append(caller)
            self._selector.register(link, selectors.EVENT_READ, lambda: self._read(caller))
            if len(self._callers) > MOST_CALLERS:
                caller.end(REFUSED, f"{MOST_CALLERS} orders wait already")

    def _read(self, caller: Orderer) -> None:
        try:
            data = caller.link.recv(LONGEST)
        except OSError:
            data = b""
        asked = b"\n" in caller.read
        caller.read += data
        if not data:
            self._close(caller)
        elif asked or len(caller.read) > LONGEST:
            caller.end(USAGE, f"expected one order in a line of at most {LONGEST} bytes")
        elif b"\n" in caller.read:
            order = _order(caller.read)
            if order is None:
                caller.end(USAGE, "expected an object of JSON, with texts")
            else:
                self._take(order, caller)

    def _close(self, caller: Orderer) -> None:
        if caller in self._callers:
            self._callers.remove(caller)
            self._selector.unregister(caller.link)
            caller.link.close()


def _order(line: bytes) -> dict[str, str] | None:
    with suppress(ValueError):
        order = json.loads(line)
        if isinstance(order, dict) and all(isinstance(text, str) for text in order.values()):
            return order
    return None
