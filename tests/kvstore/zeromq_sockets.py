"""The sockets of ZeroMQ that are made during a test."""

from __future__ import annotations

from typing import Any

import pytest
import zmq


class Sockets:
    """Notes each socket that a context makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[zmq.Socket[bytes]] = []
        really = zmq.Context.socket

        def socket(context: zmq.Context[Any], *args: Any, **options: Any) -> Any:
            self._made.append(really(context, *args, **options))
            return self._made[-1]

        monkeypatch.setattr(zmq.Context, "socket", socket)

    def last(self, kind: int) -> zmq.Socket[bytes]:
        """The one of this type that was made last."""
        return [made for made in self._made if made.type == kind][-1]
