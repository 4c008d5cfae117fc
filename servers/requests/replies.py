"""A reply, its request, and the link that it goes over; errors as replies."""

from __future__ import annotations

from typing import NamedTuple

from kvstore import wire
from kvstore.errors import BY_NAME, KVStoreError

Outbox = list[tuple[bytes, wire.Message]]  # links, and what to send over each


class Answer(NamedTuple):
    """``reply`` is for ``request``, which came from ``peer``."""

    peer: bytes
    request: wire.Request
    reply: wire.Reply


def refuse(peer: bytes, request: wire.Request, error: Exception) -> Answer:
    """Return ``error`` as the answer to ``request``: of its own class if that is of ``kvstore.errors``."""
    return Answer(peer, request, wire.Failure(request.seq, *described_error(error)))


def described_error(error: Exception) -> tuple[str, str]:
    """Return the class of ``kvstore.errors``, by name, and the text that stand for ``error`` in messages."""
    name = type(error).__name__
    if isinstance(error, KVStoreError) and name in BY_NAME:
        return name, str(error)[: wire.MAX_REASON]
    return "ServerError", f"{name}: {error}"[: wire.MAX_REASON]
