"""Shared memory for links inside one host, around a transport that carries everything else.

Messages go through the inner transport, large frames of them as *references* to memory that the peer can map.
A hello goes out when the first large frame does; until it is answered, and after a refusal, frames go as they are. So a
peer on another host, in another container or of another kind costs one small message, and nobody has to know who is
where. The first frame of a message is its header and never goes by reference. Each direction is for itself.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import msgpack
import numpy as np

from kvstore import wire
from kvstore.errors import WireError
from kvstore.job.config import Config
from kvstore.rare_log import Drops
from kvstore.transport.memory import ScatteredFrame
from kvstore.transport.shm.arena import Arena, ArenaUsage, Bytes
from kvstore.transport.shm.presence import (
    CELLS,
    CELLS_AT,
    CONTROL,
    DIRECTORY,
    FREE,
    HELD,
    SENT,
    OwnerGoneError,
    PeerPresence,
    Presence,
    available,
    exists,
    open_control,
    open_peers,
    room,
)
from kvstore.transport.system_errors import require_systems
from kvstore.transport.transport import Frames, Peer, Transport

log = logging.getLogger(__name__)

LARGE = 32 << 10  # bytes; smaller frames are as fast through a socket
# Frames of our own that one ``recv`` takes before it returns without a message: a peer that sends nothing but hellos
# must not keep this process from looking at its other links, and at the time.
MAX_OWN = 100

# Frames of our own, beside messages.
MARK = 0xC1
REFERENCES, HELLO, MAPPED, CANNOT = range(4)
MAX_HELLO = 512
REFERENCE = struct.Struct("<HHIQQ")  # position in the message, chunk, cell, offset, length
NO_REFERENCES = bytes((MARK, REFERENCES))  # what references are added to
REFUSAL = bytes((MARK, CANNOT))


class _ReferenceView(weakref.ref[Bytes]):
    """Notices when the last view of a reference is gone."""

    __slots__ = ("cell", "mapped")
    cell: int
    mapped: Mapped


# A weak reference must live to be called. It keeps our presence locked too, or the peer would take us for dead.
_views: dict[int, _ReferenceView] = {}


def _let_go(view: weakref.ref[Bytes]) -> None:
    """Tell the owner that its memory is free. Runs at any time, in any thread."""
    if isinstance(view, _ReferenceView) and _views.pop(id(view), None) is not None:
        view.mapped.let_go(view.cell)


class Mapped:
    """The arena of one peer.

    Raises:
        WireError: this host has no such arena: the peer is on another host, or lies.
    """

    def __init__(self, name: str, nonce: bytes, presence: Presence) -> None:
        self.name = name
        self._presence = presence
        self._cells = memoryview(_mapping(open_control(name, nonce), CONTROL))[CELLS_AT:]
        self._chunks: dict[int, Bytes] = {}

    def view(self, number: int, cell: int, offset: int, length: int) -> memoryview:
        """Return a view of what a reference refers to. The memory does not change until its last view is dropped.

        Raises:
            WireError: the reference is out of bounds, or was not sent.
        """
        chunk = self._chunks.get(number)
        if chunk is None:
            for old in [old for old in self._chunks if not exists(self.name, old + 1)]:
                del self._chunks[old]  # its owner has given it back
            fd, size = open_peers(self.name, number + 1)
            chunk = self._chunks[number] = np.frombuffer(_mapping(fd, size), np.uint8)
        if length == 0 or offset + length > len(chunk):
            raise WireError(f"a reference to {length} bytes at {offset} of {len(chunk)}")
        if cell >= CELLS or self._cells[cell] != SENT:
            raise WireError("a reference that was not sent, or was received before")
        array = chunk[offset : offset + length]
        view = _ReferenceView(array, _let_go)
        view.cell, view.mapped = cell, self
        _views[id(view)] = view
        # After the view is known: if an exception came between the two lines the other way round, nobody would ever
        # free the cell. HELD, and not still SENT, so that the same reference cannot be taken twice.
        self._cells[cell] = HELD
        return array.data

    def let_go(self, cell: int) -> None:
        """Give the memory back to the owner. In a child after fork, that is left to the parent."""
        # A plain store: all loads of the data came before it in this process, and x86-64 keeps loads before later
        # stores. A processor that may delay loads (ARM) could read what the owner writes next; see
        # ``presence.available``.
        if not self._presence.inherited:
            self._cells[cell] = FREE


def _mapping(fd: int, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except (OSError, ValueError) as exc:
        require_systems(exc)
        raise WireError(f"shared memory cannot be mapped: {exc}") from None
    finally:
        os.close(fd)


def introduction(kind: int, name: str, nonce: bytes) -> bytes:
    return bytes((MARK, kind)) + bytes(msgpack.packb([name, nonce]))


def introduced(own: wire.Buffer) -> tuple[str, bytes]:
    """Return the name and the nonce in a ``HELLO`` or a ``MAPPED``; raise ``WireError`` if it has something else."""
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


def sharing(make: Callable[[], Transport], config: Config) -> Callable[[], Transport]:
    """Return a maker of transports that share memory, or ``make`` itself where that is off or impossible."""
    if not (config.shm and available()):
        return make
    return lambda: SharedMemoryTransport(make(), config.job)


class _Sharing:
    """The reader of our references over one link, and the arena of the peer."""

    __slots__ = ("asked", "mapped", "reader")

    def __init__(self) -> None:
        self.asked = False
        self.reader: PeerPresence | None = None
        self.mapped: Mapped | None = None


class SharedMemoryTransport(Transport):
    """One member's end of its links, which shares memory with peers on the same host. ``inner`` carries messages."""

    def __init__(self, inner: Transport, job: str) -> None:
        self._inner = inner
        self._job = job
        self._making = threading.Lock()
        self._arena: Arena | None = None
        self._tried = self._closed = False
        self._links: dict[Peer, _Sharing] = {}
        self._drops = Drops(log)

    def bind(self, endpoint: str) -> str:
        return self._inner.bind(endpoint)

    def connect(self, endpoint: str, *, bulk: bool = False) -> Peer:
        """With ``bulk``, say hello now, so that the first large frame can go by reference already."""
        peer = self._inner.connect(endpoint)
        if bulk:
            self._greeted(peer)
        return peer

    def disconnect(self, peer: Peer) -> None:
        self._inner.disconnect(peer)
        self._links.pop(peer, None)

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory that peers on this host can read; plain memory where that is not possible, or never used."""
        arena = self._own() if nbytes >= LARGE else None
        if arena is not None:
            try:
                return arena.allocate(nbytes)
            except OSError as exc:
                require_systems(exc)
                _notice(nbytes, exc)
        return super().allocate(nbytes)

    def usage(self) -> ArenaUsage | None:
        arena = self._arena
        return None if arena is None else arena.usage()

    def trim(self) -> None:
        arena = self._arena
        if arena is not None:
            arena.trim()

    def busy(self, buffer: wire.Buffer) -> bool:
        arena = self._arena
        return arena is None or arena.busy(buffer)

    def send(self, peer: Peer, frames: Sequence[wire.Buffer | ScatteredFrame], priority: int | None = None) -> None:
        """Large frames go as references if the peer can map their memory."""
        if self._closed:
            return
        left: list[wire.Buffer | ScatteredFrame] = []
        references = [NO_REFERENCES]
        link: _Sharing | None = None
        for position, frame in enumerate(frames):
            if position and len(frame) >= LARGE and not isinstance(frame, ScatteredFrame):
                link = link or self._greeted(peer)
                if link.reader is not None and (packed := self._refer(link.reader, position, frame)):
                    references.append(packed)
                    continue
            if isinstance(frame, memoryview) and self._arena is not None:  # no other is the arena's
                self._arena.lend(frame)
            left.append(frame)
        if len(references) > 1 or (left and len(left[0]) and left[0][0] == MARK):
            left.insert(0, b"".join(references))
        self._inner.send(peer, left, priority)

    def admit(self, peer: Peer) -> None:
        self._inner.admit(peer)

    def refuse(self, peer: Peer) -> None:
        self._inner.refuse(peer)

    def identity(self, peer: Peer) -> str:
        return self._inner.identity(peer)

    def gone(self, peer: Peer) -> bool:
        return self._inner.gone(peer)

    def gathers(self, peer: Peer) -> bool:
        """Whether the inner transport gathers, and carries what goes to ``peer``, as far as is known."""
        link = self._links.get(peer)
        return (link is None or link.reader is None) and self._inner.gathers(peer)

    def shares(self, peer: Peer) -> bool:
        link = self._links.get(peer)
        return link is not None and link.reader is not None

    def detach(self) -> None:
        """What peers read by reference is this process's shared memory, not the caller's."""
        self._inner.detach()

    def recv(self, timeout: float) -> tuple[Peer, Frames] | None:
        """The large frames of a message may be views of the sender's memory."""
        deadline = 0.0
        for _ in range(MAX_OWN):
            received = self._inner.recv(timeout)
            if received is None:
                return None
            peer, frames = received
            if not frames and self._links.pop(peer, None) is not None:
                self._greeted(peer)
            if not frames or not len(frames[0]) or frames[0][0] != MARK:
                return received
            deadline = deadline or time.monotonic() + timeout
            try:
                message = self._take(peer, frames)
            except WireError as exc:
                if isinstance(exc, OwnerGoneError):
                    log.debug("dropped the answer of a peer that has ended: %s", exc)
                else:
                    self._drops.note("a bad message", exc)
                self._inner.refuse(peer)
                message = None
            if message is not None:
                return peer, message
            timeout = max(0.0, deadline - time.monotonic())
        return None

    def interrupt(self) -> None:
        self._inner.interrupt()

    def abandon(self) -> None:
        self._closed = True
        self._inner.abandon()
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.abandon()
        self._links.clear()

    def close(self, linger: float = 0.0) -> None:
        """Peers have ``linger`` seconds to receive what was sent, and keep what they hold."""
        if self._closed:
            return
        with self._making:
            self._closed = True
        deadline = time.monotonic() + linger
        if self._arena is not None:
            self._arena.drain(linger)
        self._inner.close(max(0.0, deadline - time.monotonic()))
        if self._arena is not None:
            self._arena.close()
        self._arena = None  # so that peers need not wait for us, unless we still hold what they sent
        self._links.clear()

    def _own(self) -> Arena | None:
        if self._arena is None and not self._tried:
            with self._making:
                if self._arena is None and not self._tried and not self._closed:
                    self._tried = True
                    try:
                        self._arena = Arena(self._job)
                    except OSError as exc:
                        require_systems(exc)
                        _notice(CONTROL, exc)
        return self._arena if self._arena is not None and self._arena.usable else None

    def _greeted(self, peer: Peer) -> _Sharing:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = _Sharing()
        if link.reader is not None and not link.reader.lives():  # somebody else may have taken its place
            link.asked, link.reader = False, None
        if not link.asked:
            link.asked = True
            arena = self._own()
            if arena is not None:
                self._inner.send(peer, [introduction(HELLO, arena.presence.name, arena.presence.nonce)])
        return link

    def _refer(self, reader: PeerPresence, position: int, frame: wire.Buffer) -> bytes | None:
        if self._arena is None:
            return None
        try:
            reference = self._arena.refer(frame, reader)
        except OSError as exc:
            require_systems(exc)
            _notice(len(frame), exc)
            return None
        return reference and REFERENCE.pack(position, *reference)

    def _take(self, peer: Peer, frames: Frames) -> Frames | None:
        """Act on a frame of the transport's own; return the message that it begins, if it begins one."""
        own = frames[0]
        kind = own[1] if len(own) > 1 else -1
        link = self._links.get(peer)
        if kind == REFERENCES:
            return resolved(frames, None if link is None or link.mapped is None else link.mapped.view)
        if kind not in (HELLO, MAPPED, CANNOT) or len(frames) > 1:
            raise WireError("a frame of the transport itself, of an unknown kind")
        if kind == HELLO:
            self._meet(peer, own)
            return None
        if link is None or not link.asked or link.reader is not None:
            raise WireError("an answer to a question that was not asked")
        if kind == MAPPED:
            link.reader = PeerPresence(*introduced(own))
        return None

    def _meet(self, peer: Peer, own: wire.Buffer) -> None:
        name, nonce = introduced(own)
        self._forget()
        link = self._links.setdefault(peer, _Sharing())
        arena, link.mapped = self._own(), None
        try:
            if arena is not None:
                link.mapped = Mapped(name, nonce, arena.presence)
        except WireError as exc:
            log.debug("no shared memory with a peer: %s", exc)
        answer = REFUSAL
        if arena is not None and link.mapped is not None:
            answer = introduction(MAPPED, arena.presence.name, arena.presence.nonce)
        self._inner.send(peer, [answer])
        if link.mapped is not None:  # a peer that sends large frames will get some
            self._greeted(peer)

    def _forget(self) -> None:
        """Drop arenas whose owners have closed them, and links that are gone: a new peer may be an old one."""
        for peer, link in list(self._links.items()):
            if self._inner.gone(peer) or (link.mapped is not None and not exists(link.mapped.name)):
                del self._links[peer]


noticed = threading.Lock()  # held from the time on that this process has logged it


def _notice(nbytes: int, error: OSError) -> None:
    """Log, once in a process, that it goes on without more shared memory."""
    if not noticed.acquire(blocking=False):
        return
    try:
        total, free = (count / 2**20 for count in room())
        state = f"{DIRECTORY} has {total:.0f} MiB, {free:.0f} of them free"
    except OSError:
        state = f"there is no {DIRECTORY}"
    log.warning(
        "no shared memory for %d bytes: %s (%s). This process goes on over sockets, which is slower; "
        "in a container, more comes with docker run --shm-size",
        nbytes,
        error.strerror or error,
        state,
    )
