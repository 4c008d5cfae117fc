"""The frames that transports with shared memory send each other beside messages. No I/O; what a peer sent is checked.

They begin with a byte that no msgpack begins with, and the kind:

    HELLO       this is my arena; can you map it?        name, nonce
    MAPPED      yes; by this you see whether I live      name, nonce of the reader's own
    CANNOT      no
    REFERENCES  before the frames of a message: those that are left out of it, and where they are
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import msgpack

from kvstore.errors import WireError
from kvstore.transport.base import Frames
from kvstore.wire import Buffer

MARK = 0xC1
REFERENCES, HELLO, MAPPED, CANNOT = range(4)
MAX_HELLO = 512

REFERENCE = struct.Struct("<HHIQQ")  # position in the message, chunk, cell, offset, length
NO_REFERENCES = bytes((MARK, REFERENCES))  # what references are added to
REFUSAL = bytes((MARK, CANNOT))


def introduction(kind: int, name: str, nonce: bytes) -> bytes:
    """Return a ``HELLO`` or a ``MAPPED`` of the arena of this name and nonce."""
    return bytes((MARK, kind)) + bytes(msgpack.packb([name, nonce]))


def introduced(own: Buffer) -> tuple[str, bytes]:
    """Return the name and the nonce in a ``HELLO`` or a ``MAPPED``.

    Raises:
        WireError: it has something else.
    """
    try:
        fields = msgpack.unpackb(own[2:]) if len(own) <= MAX_HELLO else None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        fields = None
    if type(fields) is not list or [type(field) for field in fields] != [str, bytes]:
        raise WireError("a hello without a name and a nonce")
    return fields[0], fields[1]


def resolved(frames: Frames, view: Callable[[int, int, int, int], memoryview] | None) -> Frames:
    """Return the message whose first frame is references: views where frames were left out.

    Args:
        frames: as they came.
        view: returns the memory at a chunk, a cell, an offset and a length; None if the peer has shown no arena.

    Raises:
        WireError: they make no message, or ``view`` raises it.
    """
    references = memoryview(frames[0])[2:]
    if len(references) % REFERENCE.size:
        raise WireError(f"references of {len(references)} bytes")
    if references and view is None:
        raise WireError("a reference to memory that was not introduced")
    message = frames[1:]
    if view is not None:
        last = -1
        for position, chunk, cell, offset, length in REFERENCE.iter_unpack(references):
            if position > len(message):
                raise WireError("a reference behind the end of its message")
            if position <= last:
                raise WireError("references out of order")
            message.insert(position, view(chunk, cell, offset, length))
            last = position
    if not message:
        raise WireError("a message without frames")
    return message
