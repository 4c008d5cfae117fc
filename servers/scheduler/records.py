"""What the scheduler's log consists of: the scheduler's inputs in order, so that a successor can take them again. Pure.

A log begins with ``beginning``. Then each record is a list in msgpack, behind its length and checksums. The
scheduler is killed, not the machine, so only the last record may be cut short. Anything else that is wrong with a log
is an error.

Equal declarations of many workers have one ``body`` in the log, as a declaration may name all keys of a model.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import msgpack

from kvstore import wire
from kvstore.errors import KVStoreError, WireError

VERSION = 1
_LENGTH = struct.Struct("<I")
_FRAME = struct.Struct("<III")  # length, its checksum, that of the payload
_NOBODY = wire.Sender(wire.Node("worker", 0, 0), 0, 0)
_START, _BODY, _INPUT, _SHARED, _TICK = range(5)


class Succession(NamedTuple):
    """A process has begun to be the scheduler; links of the one before are gone."""


class Came(NamedTuple):
    """A message has come, at the time ``now``, over link ``peer``, which has proved ``key``."""

    now: float
    peer: bytes
    key: str
    message: wire.Message


class Ticked(NamedTuple):
    """Time has passed. ``silent`` are those who were overdue, each with the time of its last sign of life."""

    now: float
    silent: list[tuple[wire.Node, float]]


Record = Succession | Came | Ticked


def beginning(*shape: int) -> bytes:
    """The first bytes of a log.

    Args:
        shape: numbers that tell this job from another, such as how many workers it has.
    """
    return _framed(["kvstore scheduler log", VERSION, list(shape)])


class RecordPacker:
    """Packs records for one log."""

    def __init__(self) -> None:
        self._bodies: dict[bytes, int] = {}

    def pack(self, record: Record) -> bytes:
        """Return a record as bytes, behind the body of its message if that is new."""
        if isinstance(record, Succession):
            return _framed([_START])
        if isinstance(record, Ticked):
            return _framed([_TICK, record.now, [[*node, heard] for node, heard in record.silent]])
        now, peer, key, message = record
        if not isinstance(message, wire.Declare):
            return _framed([_INPUT, now, peer, key, bytes(wire.encode(message)[0])])
        body, new = bytes(wire.encode(replace(message, sender=_NOBODY))[0]), b""
        number = self._bodies.get(body)
        if number is None:
            number = self._bodies[body] = len(self._bodies)
            new = _framed([_BODY, body])
        (role, rank, incarnation), seq, done = message.sender
        return new + _framed([_SHARED, now, peer, key, [role, rank, incarnation, seq, done], number])

    def know(self, body: bytes) -> None:
        """Note the next body that is in the log already."""
        self._bodies[body] = len(self._bodies)


class Unpacked(NamedTuple):
    """A record that was in a log.

    Attributes:
        record: what it says; None for the body of later ones.
        data: all of it, as bytes.
    """

    record: Record | None
    data: bytes


def unpack(log: bytes, begins: bytes, packer: RecordPacker) -> Iterator[Unpacked]:
    """Yield the records of a log, but not the last one if it was cut short.

    Args:
        log: its bytes.
        begins: the ``beginning`` that it must have.
        packer: is told what is in the log.

    Raises:
        KVStoreError: the log is of another job or version, or damaged.
    """
    if log[: len(begins)] != begins:
        raise KVStoreError("the scheduler's log is of another job, or of another version")
    bodies: list[bytes] = []
    place = len(begins)
    while len(log) - place >= _FRAME.size:
        length, length_sum, payload_sum = _FRAME.unpack_from(log, place)
        end = place + _FRAME.size + length
        try:
            if zlib.crc32(_LENGTH.pack(length)) != length_sum:
                raise ValueError("the checksum of its length is wrong")
            if end > len(log):
                return
            payload = log[place + _FRAME.size : end]
            if zlib.crc32(payload) != payload_sum:
                raise ValueError("its checksum is wrong")
            record = _record(msgpack.unpackb(payload), bodies)
        except (ValueError, TypeError, KeyError, IndexError, WireError, msgpack.UnpackException) as exc:
            raise KVStoreError(f"the scheduler's log is damaged: the record at byte {place}: {exc}") from None
        if record is None:
            packer.know(bodies[-1])
        yield Unpacked(record, log[place:end])
        place = end


def _record(fields: list[Any], bodies: list[bytes]) -> Record | None:
    kind, *values = fields
    if kind == _START:
        return Succession()
    if kind == _BODY:
        bodies.append(*values)
        return None
    if kind == _TICK:
        now, silent = values
        return Ticked(now, [(wire.Node(*node), heard) for *node, heard in silent])
    if kind == _INPUT:
        now, peer, key, frame = values
        return Came(now, peer, key, wire.decode([frame]))
    if kind == _SHARED:
        now, peer, key, (role, rank, incarnation, seq, done), number = values
        message = wire.decode([bodies[number]])
        return Came(now, peer, key, replace(message, sender=wire.Sender(wire.Node(role, rank, incarnation), seq, done)))
    raise ValueError(f"a record of kind {kind!r} is not known")


def _framed(fields: list[Any]) -> bytes:
    payload: bytes = msgpack.packb(fields)
    length = len(payload)
    return _FRAME.pack(length, zlib.crc32(_LENGTH.pack(length)), zlib.crc32(payload)) + payload


def sender_of(record: Record | None) -> wire.Sender | None:
    """Return who has made the request that a record is of; None if it is of none."""
    if isinstance(record, Came) and isinstance(record.message, wire.Request):
        return record.message.sender
    return None
