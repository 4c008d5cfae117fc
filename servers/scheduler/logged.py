"""The scheduler with a log of its inputs, from which its successor makes the same scheduler again. Pure.

Links end with the process that has them. So in a replay each has a name that no link has now; members reconnect, say
whose the new links are, and resend what has no answer. Heartbeats are not logged: at the first one over a new link,
each member gets again each announcement that it may have missed.

A log begins with ``beginning``. Then each record is a list in msgpack, behind its length and checksums. The scheduler
is killed, not the machine, so only the last record may be cut short. Anything else that is wrong with a log is an
error. Equal declarations of many workers have one ``body`` in the log, as a declaration may name all keys of a model.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import replace
from typing import Any, NamedTuple

import msgpack

from kvstore import wire
from kvstore.errors import KVStoreError, WireError
from kvstore.shares import KEPT
from kvstore.transport.transport import Admission
from servers.requests.replies import Outbox
from servers.scheduler.core import Scheduler

# Not ``Explain``, ``Locate`` and ``Census``, which change nothing, and no reports: a job that is watched would fill the
# log.
REQUESTS = (
    wire.Leave,
    wire.OpenStore,
    wire.CloseStore,
    wire.Declare,
    wire.Ready,
    wire.Barrier,
    wire.Pause,
    wire.Enter,
    wire.Admitted,
    wire.TakeShare,
)  # of members, that change anything
_FORMER = b"former "  # begins the names of links that were there before a replay


# ---- records

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
    """Time has passed. ``silent`` are the members that were overdue, each with the time of its last sign of life."""

    now: float
    silent: list[tuple[wire.Node, float]]


Record = Succession | Came | Ticked


def beginning(*shape: int) -> bytes:
    """The first bytes of a log: numbers that tell this job from another, such as how many workers it has."""
    return _framed(["kvstore scheduler log", VERSION, list(shape)])


class RecordPacker:
    """Packs records for one log."""

    def __init__(self) -> None:
        self._bodies: dict[bytes, int] = {}

    def pack(self, record: Record) -> bytes:
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
        """Take the next body that is in the log already."""
        self._bodies[body] = len(self._bodies)


class Unpacked(NamedTuple):
    """A record that was in a log, and all of its bytes. The body of later records is no record of its own."""

    record: Record | None
    data: bytes


def unpack(log: bytes, begins: bytes, packer: RecordPacker) -> Iterator[Unpacked]:
    """Yield the records of a log, but not the last one if it was cut short. ``packer`` is told what is in the log.

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
    """Return the sender of the request that a record is of; None if it is of none."""
    if isinstance(record, Came) and isinstance(record.message, wire.Request):
        return record.message.sender
    return None


class LiveRecords:
    """The records of one log that a successor still needs, as bytes, so that the log of a long job stays short.

    All are needed but those of samples of earlier epochs, and of barriers that are over: all workers have come to such
    a barrier, and each has said since that it has its answer. A job may have a barrier in every step. What else is
    logged grows with what the job declares. ``lost`` are the workers that are lost, as the scheduler knows at any time:
    they come to no barrier.
    """

    def __init__(self, num_workers: int, lost: Set[int] = frozenset()) -> None:
        self.nbytes = 0
        self._num_workers, self._lost = num_workers, lost
        self._numbers = itertools.count()
        self._records: dict[int, bytes] = {}
        self._done: dict[wire.Node, int] = {}  # each sender has its answers to all requests below this number
        self._barriers: dict[
            tuple[int, int], dict[int, tuple[wire.Node, int]]
        ] = {}  # by store and number, then by record
        self._shares: dict[str, dict[int, list[int]]] = {}  # by data set and epoch, records of what was taken

    def add(self, data: bytes, record: Record | None) -> None:
        number = next(self._numbers)
        self._records[number] = data
        self.nbytes += len(data)
        sender = sender_of(record)
        if sender is None:
            return
        self._done[sender.node] = max(sender.done, self._done.get(sender.node, 0))
        if isinstance(record, Came) and isinstance(record.message, wire.Barrier):
            barrier = (record.message.store, record.message.number)
            self._barriers.setdefault(barrier, {})[number] = sender.node, sender.seq
        if isinstance(record, Came) and isinstance(record.message, wire.TakeShare):
            self._shares.setdefault(record.message.data, {}).setdefault(record.message.epoch, []).append(number)

    def trim(self) -> bytes:
        """Drop what is not needed; return the rest, in order."""
        for barrier, arrivals in list(self._barriers.items()):
            if self._over(arrivals):
                del self._barriers[barrier]
                for number in arrivals:
                    self.nbytes -= len(self._records.pop(number))
        for epochs in self._shares.values():
            for epoch in sorted(epochs)[:-KEPT]:
                for number in epochs.pop(epoch):
                    self.nbytes -= len(self._records.pop(number))
        return b"".join(self._records.values())

    def _over(self, arrivals: dict[int, tuple[wire.Node, int]]) -> bool:
        if len(self._lost | {node.rank for node, _ in arrivals.values()}) < self._num_workers:
            return False
        return all(seq < self._done[node] for node, seq in arrivals.values() if node.rank not in self._lost)


# ---- the scheduler


class FormerLinks(Admission):
    """The links of this process, and of the processes before it, which have ended."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._key = ""

    def recall(self, start: int, peer: bytes, key: str) -> bytes:
        """Return a name for a former link; the latest to be recalled is known to have proved ``key``."""
        self._key = key
        return b"%s%d %s" % (_FORMER, start, peer)

    def admit(self, peer: bytes) -> None:
        if not is_former(peer):
            self._admission.admit(peer)

    def refuse(self, peer: bytes) -> None:
        if not is_former(peer):
            self._admission.refuse(peer)

    def identity(self, peer: bytes) -> str:
        return self._key if is_former(peer) else self._admission.identity(peer)

    def gone(self, peer: bytes) -> bool:
        return is_former(peer) or self._admission.gone(peer)


def is_former(peer: bytes) -> bool:
    return peer.startswith(_FORMER)


class LoggedScheduler:
    """Logs what changes a scheduler, before anybody is told of the change."""

    def __init__(self, scheduler: Scheduler, links: FormerLinks, log: Callable[[Record], None]) -> None:
        self._scheduler = scheduler
        self._links = links
        self._log = log
        self._synced: dict[tuple[str, int], tuple[int, bool]] = {}  # by seat: the latest epoch and state of its standby

    def replay(self, records: Iterable[Record], now: float) -> None:
        """Take the inputs of the processes before this one, and go on from there."""
        scheduler, starts = self._scheduler, itertools.count()
        start = next(starts)
        for record in records:
            if isinstance(record, Succession):
                start = next(starts)
            elif isinstance(record, Ticked):
                scheduler.tick_again(record.now, record.silent)
            else:
                peer = self._links.recall(start, record.peer, record.key)
                scheduler.handle(peer, record.message, record.now)
        scheduler.resume(now)

    def handle(self, peer: bytes, message: wire.Message, now: float) -> Outbox:
        """Return what to send because ``message`` came from ``peer``; log the message if it has changed anything."""
        may_matter = not self._scheduler.changes_nothing(peer, message) and self._may_matter(message)
        outbox = self._scheduler.handle(peer, message, now)
        if may_matter and not (isinstance(message, wire.Join) and not self._joined(message)):
            self._log(Came(now, peer, self._links.identity(peer), message))
        return _over_links(outbox)

    def tick(self, now: float) -> Outbox:
        """Return what to send because time has passed; log the tick if it has changed anything."""
        before = self._scheduler.epoch
        outbox = self._scheduler.tick(now)
        changed = any(not isinstance(message, wire.Located) for _, message in outbox)
        if changed or self._scheduler.silent or self._scheduler.epoch != before:
            self._log(Ticked(now, self._scheduler.silent))
        return _over_links(outbox)

    def _may_matter(self, message: wire.Message) -> bool:
        """Whether a message may change the scheduler. Strangers must not fill the log."""
        if isinstance(message, wire.Join):
            return not self._joined(message)
        if isinstance(message, REQUESTS):
            known = self._scheduler.members.identify(message.node) is not None
            return known or (isinstance(message, wire.Leave) and message.node.rank < 0 and self._joined(message))
        if isinstance(message, wire.Standing):
            seat, state = message.node[:2], (message.epoch, message.synced)
            before = self._synced.get(seat)
            self._synced[seat] = state
            return before != state
        return isinstance(message, wire.Lost | wire.Retire)

    def _joined(self, message: wire.Join | wire.Leave) -> bool:
        return self._scheduler.members.by_nonce(message.node.incarnation) is not None


def _over_links(outbox: Outbox) -> Outbox:
    """Return what goes over links that are there: members have asked again over these."""
    return [entry for entry in outbox if not is_former(entry[0])]
