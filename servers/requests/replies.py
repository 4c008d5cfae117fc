"""Answers: which reply goes to whom for which request, and errors as replies."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.errors import BY_NAME, KVStoreError
from kvstore.wire import MAX_REASON, Failure, Message, Reply, Request

Outbox = list[tuple[bytes, Message]]  # what to send, and to whom


class Answer(NamedTuple):
    """``reply`` is for ``request``, which came from ``peer``."""

    peer: bytes
    request: Request
    reply: Reply


def refuse(peer: bytes, request: Request, error: Exception) -> Answer:
    """Return ``error`` as the answer to ``request``: by its own name if it is one of this package's."""
    name = type(error).__name__
    if isinstance(error, KVStoreError) and name in BY_NAME:
        return Answer(peer, request, Failure(request.seq, name, str(error)[:MAX_REASON]))
    return Answer(peer, request, Failure(request.seq, "ServerError", f"{name}: {error}"[:MAX_REASON]))
