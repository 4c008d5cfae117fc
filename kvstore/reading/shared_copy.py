"""A copy of what is published, in /dev/shm: the readers of one host fetch each version once, and hold it once.

Beside it are the changes that were fetched last, so that the others need not read all of the copy for them.

Two files have a name that says which arrays of which job are in them. Each reader has a lock on the first, so that
readers that are killed leave nothing for long: who closes last removes both, and so does whoever sweeps
(``presence.sweep``). The second has the copy. A reader locks it while it takes a version into its arrays, together with
others, or alone while it fetches one. The kernel ends the locks of a reader that is killed, and the piece that it was
writing is fetched again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kvstore.codecs.changes import Array
from kvstore.errors import DeadlineExceeded, KVStoreError, UsageError
from kvstore.reading.published_copy import BEAT, HEAD, LABEL, LOGS, MADE, WRITER, CopyMemory, Published
from kvstore.spec import ITEMSIZE, Key
from kvstore.transport.shm.presence import available, disown_in_children, make_shared, own_file, remove_shared, room
from kvstore.values import as_dtype
from kvstore.wire.coding import padded

LEAST_BYTES = 1 << 20  # of a copy that is shared
POLL_S = 0.002
STALL_S = 5.0  # so long nothing happens before this reader goes on alone: another one is stopped

LOG = 8  # of so many bytes of a piece, one is room for changes: beyond that, copying all of it takes as long

_IS_MADE = 0x6B76636F70793031


class SharingStalled(KVStoreError):
    """Another reader of this host holds the shared copy, and does nothing."""


class SharedCopy(CopyMemory):
    """See the module. ``share`` makes it."""

    def __init__(
        self, name: str, in_use: int, lock: int, file: int, memory: mmap.mmap, arrays: Mapping[Key, Published]
    ) -> None:
        self._leave = weakref.finalize(self, _leave, name, in_use, lock)  # first: from here on nobody else does it
        # Not by ``close``: of a file that is closed while another thread writes, the number may be another file's.
        weakref.finalize(self, os.close, file)
        self._lock, self._file = lock, file
        self._seen, self._stalls_at = -1, 0.0  # the last beat, and until when there must be another one
        disown_in_children(self)
        self.head = _view(memory, 0, np.int64, HEAD + LABEL // 8)
        self.held, self.changed, self.sums, self.flats = {}, {}, {}, {}
        self._memory = memory
        self._places = _layout(arrays)[0]
        self._logs: dict[Key, Array] = {}  # of each piece: the version that the logged changes follow, and their number
        for (key, each), at in zip(arrays.items(), self._places.values(), strict=True):
            count = len(at.ranges)
            self.held[key] = _view(memory, at.held, np.int64, count)
            self.changed[key] = _view(memory, at.changed, np.int64, count)
            self.sums[key] = _view(memory, at.sums, np.uint64, count)
            self._logs[key] = _view(memory, at.counts, np.int64, 2 * count).reshape(count, 2)
            values = _view(memory, at.flat, np.uint8, each.size * ITEMSIZE[each.dtype])
            self.flats[key] = torch.from_numpy(values).view(as_dtype(each.dtype))

    def fill(self, key: Key, start: int, values: Array) -> None:
        """See ``CopyMemory``.

        Through the mapping, each new page would cost a fault, and be cleared before it is written: 2.5 times as much.
        """
        self._put(self._places[key].flat + start * values.itemsize, values)

    def log(self, key: Key, place: int, since: int, positions: Array | None, values: Array) -> None:
        log = self._logs[key][place]
        log[1] = 0
        if positions is None or not self.head[LOGS]:
            return
        at, room = self._log_of(key, place)
        if len(positions) * (4 + values.itemsize) <= room:
            with suppress(OSError):  # /dev/shm is full; the others copy all of the piece
                self._put(at, positions.astype(np.uint32))
                self._put(at + 4 * len(positions), values)
                log[:] = since, len(positions)

    def logged(self, key: Key, place: int, since: int) -> tuple[Array, Array] | None:
        before, count = self._logs[key][place].tolist()
        if not count or before != since:
            self.head[LOGS] = 1  # from now on somebody reads them
            return None
        at, _ = self._log_of(key, place)
        positions = _view(self._memory, at, np.uint32, count).astype(np.int64)
        return positions, _view(self._memory, at + 4 * count, f"u{self.flats[key].itemsize}", count)

    def _log_of(self, key: Key, place: int) -> tuple[int, int]:
        """Return where the log of a piece begins, and its room."""
        size = self.flats[key].itemsize
        first, end = (size * element // LOG for element in self._places[key].ranges[place])
        return self._places[key].log + padded(first, 8), end - padded(first, 8)

    def _put(self, at: int, values: Array) -> None:
        data = values.data.cast("B")
        while data:
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written

    def close(self) -> None:
        self._leave()

    def disown(self) -> None:
        """In a child after fork: locks are the parent's, and are released only if no child has them open."""
        if (mine := self._leave.detach()) is not None:
            _, _, (_, in_use, lock), _ = mine
            os.close(lock)
            os.close(in_use)

    def reading(self, deadline: float) -> AbstractContextManager[None]:
        return self._locked(fcntl.LOCK_SH, deadline)

    @contextmanager
    def writing(self, deadline: float) -> Iterator[None]:
        with self._locked(fcntl.LOCK_EX, deadline):
            self.head[WRITER] = os.getpid()
            yield

    @contextmanager
    def _locked(self, kind: int, deadline: float) -> Iterator[None]:
        """Raise SharingStalled, or DeadlineExceeded, if others hold it for too long."""
        if not self._leave.alive:
            raise UsageError("a follower does not work in a child after fork: connect in the child")
        try:
            while not self._has_locked(kind):
                now, beat = time.monotonic(), int(self.head[BEAT])
                who = f"the reader with pid {self.head[WRITER]}, or another one of this host,"
                if beat != self._seen:  # calls with short timeouts count together
                    self._seen, self._stalls_at = beat, now + STALL_S
                if now >= self._stalls_at:
                    raise SharingStalled(f"{who} has kept the shared copy for {STALL_S:g} s")
                if now >= deadline:
                    raise DeadlineExceeded(f"{who} still fetches the version for all readers of this host")
                time.sleep(POLL_S)
            self.beat()
            yield
        finally:
            if self._leave.alive:  # else the file is closed, and its number another file's by now
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    def _has_locked(self, kind: int) -> bool:
        try:
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def share(root: str, store: int, arrays: Mapping[Key, Published]) -> CopyMemory | None:
    """Return the copy of the readers of this host that follow the same arrays of a job; None if there is no room.

    Args:
        root: the scheduler's address, with its key.
    """
    arrays = dict(sorted(arrays.items(), key=repr))  # all readers have them in the same order
    _, held, nbytes = _layout(arrays)
    if not available() or held < LEAST_BYTES:
        return None
    digest = hashlib.sha256(repr((root, store, arrays)).encode()).hexdigest()[:16]
    name = f"kvstore-{os.getuid()}-readers-0-{digest}"
    try:
        in_use = make_shared(name)
    except OSError:
        return None
    lock = -1
    try:
        lock = own_file(f"{name}.1")
        if not _make(lock, held, nbytes):
            raise OSError(errno.EBUSY, "another reader makes it, and is stopped")
        file = own_file(f"{name}.1")  # a mapping keeps its file open: of ``lock`` that would keep the lock
        try:
            if not os.path.sameopenfile(lock, file):
                raise OSError(errno.ESTALE, "somebody has removed it")
            memory = mmap.mmap(file, nbytes)
        except BaseException:
            os.close(file)
            raise
    except BaseException as exc:
        _leave(name, in_use, lock)
        if isinstance(exc, OSError):
            return None
        raise
    return SharedCopy(name, in_use, lock, file, memory, arrays)


def _make(lock: int, held: int, nbytes: int) -> bool:
    """Have the memory of the file but for logs, once; return whether it is there in time. OSError: no room."""
    until, size = time.monotonic() + STALL_S, 0
    made = _IS_MADE.to_bytes(8, sys.byteorder)
    while os.pread(lock, 8, 8 * MADE) != made:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if (now_has := os.fstat(lock).st_blocks) != size:  # gigabytes take their time
                until, size = time.monotonic() + STALL_S, now_has
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
            continue
        try:
            if os.fstat(lock).st_size < held and 2 * held > room()[1]:  # what others send needs some, too
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(lock, 0, held)
            os.ftruncate(lock, nbytes)
            os.pwrite(lock, made, 8 * MADE)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)
    return os.fstat(lock).st_size == nbytes


def _leave(name: str, in_use: int, lock: int) -> None:
    """Stop to use the files; remove them if nobody else uses them."""
    with suppress(OSError):
        if lock >= 0:
            os.close(lock)
    with suppress(OSError):
        remove_shared(name, in_use)


def _view(memory: mmap.mmap, start: int, dtype: Any, count: int) -> Array:
    return np.frombuffer(memory, dtype, count, start)


class _Places(NamedTuple):
    """Where what belongs to an array begins; ``log``: the changes of its pieces."""

    ranges: list[tuple[int, int]]  # of its pieces
    held: int
    changed: int
    sums: int
    counts: int  # of logged changes
    flat: int
    log: int


def _layout(arrays: Mapping[Key, Published]) -> tuple[dict[Key, _Places], int, int]:
    """Return where all is, where logs begin, and the length of the file."""
    ranges = [each.ranges for each in arrays.values()]
    sizes = [
        nbytes
        for each, pieces in zip(arrays.values(), ranges, strict=True)
        for nbytes in (*[8 * len(pieces)] * 3, 16 * len(pieces), each.size * ITEMSIZE[each.dtype])
    ]
    sizes += [each.size * ITEMSIZE[each.dtype] // LOG for each in arrays.values()]
    *starts, end = accumulate((padded(nbytes, 64) for nbytes in sizes), initial=8 * HEAD + LABEL)
    columns, logs = iter(starts), starts[5 * len(arrays) :]
    places = [
        _Places(pieces, held, changed, sums, counts, flat, log)
        for pieces, held, changed, sums, counts, flat, log in zip(ranges, *[columns] * 5, logs, strict=False)
    ]
    return dict(zip(arrays, places, strict=True)), (logs or [end])[0], end
