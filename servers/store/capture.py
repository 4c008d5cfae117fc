"""Captures: segments as they are at chosen rounds, copied while the server goes on. Memory only; files are elsewhere.

When a segment reaches its round, what is to be copied is noted, and nothing is copied yet. ``copy`` runs in a thread,
and copies piece by piece. Before the server changes a value, ``secure`` copies what the thread has not come to. So a
server that waits for gradients, as it does most of the time, loses no time to a capture. Tables are frozen instead, and
read when they are written: see ``TableCapture``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvstore.checkpoint.checkpoint_reader import state_name, value_name
from kvstore.checkpoint.tables import IDS, VALUES, page_name, rest_name
from kvstore.checkpoint.tensors import TensorHeader
from kvstore.errors import WeightsInDoubt
from kvstore.optim.updater import Updater
from kvstore.rows.layout import bytes_of
from kvstore.spec import ITEMSIZE
from servers.store.array_updates import Updates
from servers.store.bucket import Bucket
from servers.store.buckets import Buckets
from servers.store.rounds import Rounds
from servers.store.row_target import RowTarget
from servers.store.target import AnyTarget

PIECE = 4 << 20  # bytes: so much at most is being copied when an update has to wait for it
SMALL = 64 << 10  # bytes that are copied at once

Bytes = npt.NDArray[np.uint8]


PAGE_BYTES = 2 << 20  # of rows and what belongs to them: an update waits for one page at most


class TableCapture:
    """A table as it was at one round: frozen then, and read page by page by a thread while it changes.

    ``drop`` must follow.
    """

    def __init__(self, target: RowTarget) -> None:
        self._segment = target.number
        self._table = target.description
        self._parts = dict(target.table.parts)
        self._frozen = target.table.freeze()
        self._rest = target.table.rest()
        others = sum(max(1, part.columns) * ITEMSIZE[part.dtype] for part in self._parts.values())
        self._slots = max(1, PAGE_BYTES // (self._table.row_bytes + 8 + others))
        self._pages: list[int] = []  # the first slot of each page that has rows

    def headers(self) -> Iterator[TensorHeader]:
        """Yield the headers of the tensors; for the thread, and before ``contents``."""
        self._pages = []
        for start in range(0, self._frozen.slots, self._slots):
            count = self._frozen.count(start, self._slots)
            if count:
                yield from self._page_headers(len(self._pages), count)
                self._pages.append(start)
        for name, array in self._rest.items():
            yield TensorHeader(rest_name(self._segment, name), "int64", (len(array),))

    def contents(self) -> Iterator[memoryview]:
        for start in self._pages:
            ids, rows, parts = self._frozen.page(start, self._slots)
            yield from map(bytes_of, (ids, rows, *parts.values()))
        for array in self._rest.values():
            yield bytes_of(np.ascontiguousarray(array, np.int64))

    def drop(self) -> None:
        self._frozen.thaw()

    def _page_headers(self, page: int, count: int) -> Iterator[TensorHeader]:
        table = self._table
        yield TensorHeader(page_name(self._segment, page, IDS), "int64", (count,))
        yield TensorHeader(page_name(self._segment, page, VALUES), table.dtype, (count, table.width))
        for name, part in self._parts.items():
            shape = (count, part.columns) if part.columns else (count,)
            yield TensorHeader(page_name(self._segment, page, name), part.dtype, shape)


class _Piece:
    """Bytes to copy once: the thread or the update copies, whichever comes first, and the other waits for it."""

    __slots__ = ("_lock", "_source", "_target")

    def __init__(self, source: Bytes, target: Bytes) -> None:
        self._source: Bytes | None = source
        self._target = target
        self._lock = threading.Lock()

    def copy(self) -> None:
        with self._lock:
            if self._source is not None:
                np.copyto(self._target, self._source)
                self._source = None


class StoreCapture:
    """The values and optimizer states of a store's segments, each at its own round.

    Args:
        number: of the checkpoint.
        clocks: by segment: the round to capture it at, or the first one after that.
        on_complete: called when all segments have reached their rounds.

    Attributes:
        clocks: by segment, the round that it was captured at.
        optimizer: the name of the rule that updates; None if there is none.
        doubt: why there can be no checkpoint, though all segments count as captured; None if there can.
    """

    def __init__(
        self,
        store: int,
        number: int,
        clocks: Mapping[int, int],
        on_complete: Callable[[StoreCapture], None],
        memory: CaptureMemory,
    ) -> None:
        self._memory: CaptureMemory | None = memory
        memory.hold()
        self.store = store
        self.number = number
        self.ids = list(clocks)
        self.clocks: dict[int, int] = {}
        self.copied = False
        self.optimizer: str | None = None
        self.doubt: WeightsInDoubt | None = None
        self._missing = dict(clocks)
        self._on_complete = on_complete
        self._tensors: dict[str, tuple[TensorHeader, Bytes]] = {}
        self._pieces: dict[int, list[_Piece]] = {}  # by segment
        self._tables: list[TableCapture] = []

    @property
    def complete(self) -> bool:
        return not self._missing

    def reached(self, target: AnyTarget, updater: Updater | None, doubt: WeightsInDoubt | None) -> None:
        """Note the segments of ``target`` that have reached their rounds. Where there are no rounds, it is now.

        ``doubt`` is why the segments are not served; None if they are.
        """
        version = target.rounds.version
        now = not isinstance(target.rounds, Rounds)
        ids = [number for number in target.ids if number in self._missing and (now or self._missing[number] <= version)]
        if not ids:
            return
        if updater is not None:
            self.optimizer = updater.optimizer.rule
        if doubt is not None:
            self.doubt = doubt
        elif isinstance(target, RowTarget):
            self._tables.append(TableCapture(target))
        elif isinstance(target, Bucket):
            self._note_values(target, ids, updater)
        for number in ids:
            self.clocks[number] = version
            del self._missing[number]
        if self.complete:
            self._on_complete(self)

    def _note_values(self, bucket: Bucket, ids: Sequence[int], updater: Updater | None) -> None:
        for number in ids:
            place = bucket.places[number]
            start = bucket.starts[place]
            self._note(number, value_name(number), bucket.value[start : start + bucket.sizes[place]])
        if updater is not None:
            for (key, name), value in updater.states.of(ids).items():
                self._note(int(key), state_name(int(key), name), value.detach())

    def _note(self, segment: int, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel()
        source = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if size else np.empty(0, np.uint8)
        target = np.empty(len(source), np.uint8) if self._memory is None else self._memory.take(len(source))
        self._tensors[name] = TensorHeader.of(name, tensor), target
        if len(source) <= SMALL:
            np.copyto(target, source)
            return
        pieces = self._pieces.setdefault(segment, [])
        for start in range(0, len(source), PIECE):
            pieces.append(_Piece(source[start : start + PIECE], target[start : start + PIECE]))

    def secure(self, ids: Iterable[int]) -> None:
        """Copy what is left of segments ``ids``: they are about to change."""
        for number in ids:
            # From the other end than ``copy``: an update then waits for one piece of the thread's at most.
            for piece in reversed(self._pieces.get(number, ())):
                piece.copy()

    def copy(self) -> None:
        """Copy all that is left. For a thread; the capture is complete."""
        for pieces in self._pieces.values():
            for piece in pieces:
                piece.copy()
        self.copied = True

    @property
    def headers(self) -> list[TensorHeader]:
        """The headers of the captured tensors, in order. For the thread: it looks at each row of tables."""
        arrays = (header for header, _ in self._tensors.values())
        return [*arrays, *(header for table in self._tables for header in table.headers())]

    def contents(self) -> Iterator[memoryview]:
        """Yield the bytes of the tensors in ``headers``, and let go of each."""
        while self._tensors:
            _, target = self._tensors.pop(next(iter(self._tensors)))
            yield target.data
        for table in self._tables:
            yield from table.contents()

    def drop(self) -> int:
        """Let go of everything; return how many bytes captures have needed, if no other is under way."""
        self._missing.clear()
        self._tensors.clear()
        self._pieces.clear()
        while self._tables:
            self._tables.pop().drop()
        memory, self._memory = self._memory, None
        return 0 if memory is None else memory.release()


class Captures:
    """The captures of one store that are under way."""

    def __init__(self, buckets: Buckets, updates: Updates) -> None:
        self._buckets = buckets
        self._updates = updates
        self._active: list[StoreCapture] = []

    def __bool__(self) -> bool:
        return bool(self._active)

    @property
    def nbytes(self) -> int:
        """How many bytes a capture of the whole store copies; 0 if it has no optimizer."""
        updater = self._updates.updater
        if updater is None:
            return 0
        states = updater.states.of(list(self._buckets.ids)).values()
        return sum(value.nbytes for value in (*(bucket.value for bucket in self._buckets.all()), *states))

    def begin(
        self,
        store: int,
        number: int,
        clocks: Mapping[int, int],
        on_complete: Callable[[StoreCapture], None],
        memory: CaptureMemory,
    ) -> StoreCapture:
        """Begin a capture; see ``StoreCapture``. Segments that have reached their rounds are noted at once."""
        self._buckets.groups.split_all()
        targets = self._buckets.targets_of(list(clocks))
        capture = StoreCapture(store, number, clocks, on_complete, memory)
        self._active.append(capture)
        try:
            for target in targets:
                self._reached(capture, target)
        except BaseException:
            self.end(capture)
            capture.drop()
            raise
        if not clocks:
            on_complete(capture)
        return capture

    def secure(self, buckets: Sequence[Bucket]) -> None:
        """Copy what is left to copy of ``buckets``, which are about to change."""
        self._active = [capture for capture in self._active if not capture.copied]
        for capture in self._active:
            for bucket in buckets:
                capture.secure(bucket.ids)

    def reached(self, targets: Iterable[AnyTarget]) -> None:
        for capture in [capture for capture in self._active if not capture.complete]:
            for target in targets:
                self._reached(capture, target)

    def end(self, capture: StoreCapture) -> None:
        self._active = [each for each in self._active if each is not capture]

    def _reached(self, capture: StoreCapture, target: AnyTarget) -> None:
        capture.reached(target, self._updates.updater, self._buckets.doubt_of(target.ids))


TOUCHED = 1 << 20  # bytes that are touched at a time: other threads of this process come in between
PAGE = 4096
ALIGN = 64


class CaptureMemory:
    """One block of memory, divided among the captures that are under way. Any thread may call it.

    ``wanted`` is how many bytes these captures have asked for.
    """

    def __init__(self) -> None:
        self.wanted = 0
        self._block: Bytes = np.empty(0, np.uint8)
        self._used = 0
        self._holders = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        return len(self._block)

    def reserve(self, nbytes: int) -> None:
        """Have at least so many bytes, all of them touched, unless a capture is under way.

        MemoryError leaves all as it was.
        """
        if nbytes <= len(self._block):
            return
        block = np.empty(nbytes, np.uint8)
        # A page that no process has used since a virtual machine has started costs far more than the copy itself: 28 us
        # for 4 KB where we measured it, so 1.5 s for 204 MB. An update that waits for a copy would wait for that, too.
        for start in range(0, nbytes, TOUCHED):
            block[start : min(nbytes, start + TOUCHED) : PAGE] = 0
        with self._lock:
            if not self._holders:
                self._block = block

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def take(self, nbytes: int) -> Bytes:
        """Return memory for a capture that holds this: of the block while that lasts, else new."""
        with self._lock:
            start = self._used
            self.wanted += nbytes + -nbytes % ALIGN
            if nbytes <= len(self._block) - start:
                self._used += nbytes + -nbytes % ALIGN
                return self._block[start : start + nbytes]
        return np.empty(nbytes, np.uint8)

    def release(self) -> int:
        """Note that a capture ends; return how many bytes all have asked for, if it was the last."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return 0
            wanted, self.wanted, self._used = self.wanted, 0, 0
            return wanted
