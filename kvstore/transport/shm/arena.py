"""The memory from which this process sends: chunks in /dev/shm that its peers map, cut into blocks.

A block is free when no view of it is left in this process *and* no reader needs it any more. For the second, the
control file has a byte, a *cell*, for each reference that was sent. The owner sets it to SENT before it sends the
reference. The reader sets it to HELD when it has the reference, and to FREE when its last view is gone. That takes no
message.

Why plain stores are enough. Sending and receiving the message orders what the owner wrote, the cell included, before
what the reader does. For the way back, all loads of the data by the reader come before its store of FREE, and all the
owner's stores of new data after its load of FREE: x86 keeps loads before later stores, and stores in order
(``presence.available`` keeps other processors out).
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
import time
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from ctypes import addressof, c_char
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.transport.shm.presence import CELLS, FREE, SENT, PeerPresence, Presence, create, remove_chunk, room, sweep

# Chunks double, so a job with large models has few of them to map, and one with small models takes little of /dev/shm,
# which containers give 64 MB. Beyond LARGEST_CHUNK doubling would waste more than it saves.
FIRST_CHUNK = 4 << 20
LARGEST_CHUNK = 256 << 20
MOST_CHUNKS = 60_000  # a reference has two bytes for the number; from here on none is given back
POLL_S = 0.001
# Cells of one block from which on it is worth looking which are free. ``prune_at`` then doubles with what is left, so
# that a block that many readers keep costs each new reference a constant time, not a look at all cells.
PRUNE = 16
NEW = 1 << 20  # bytes of new blocks, at least, between two looks for blocks whose size nobody asks for any more

Bytes = npt.NDArray[np.uint8]


GRAIN = 64
PAGE = 4096
LARGE = 1 << 16  # bytes from which blocks are whole pages

_CHUNK = 48  # a key is the chunk's number above so many bits of offset: chunks never touch


def rounded(nbytes: int) -> int:
    grain = GRAIN if nbytes < LARGE else PAGE
    return -(-nbytes // grain) * grain


class Block:
    """``size`` bytes of chunk ``chunk`` from ``offset``.

    ``cells`` are the cells of the sent references to it, ``prune_at`` is how many there may be before the arena
    looks which are free, ``lent`` is whether a transport has it that does not tell when it has read it, ``look`` is
    how many looks for unused blocks there had been when it was given back last.
    """

    __slots__ = ("cells", "chunk", "key", "lent", "look", "offset", "prune_at", "size")

    def __init__(self, key: int, size: int) -> None:
        self.key, self.size = key, size
        self.chunk, self.offset = key >> _CHUNK, key & ((1 << _CHUNK) - 1)
        self.cells: list[int] = []
        self.prune_at = 0
        self.lent = False
        self.look = 0


class Blocks:
    """The blocks of all chunks, and the holes between them.

    A training step asks for the same sizes as the step before. So a block that is given back keeps its size, and the
    next request for that size gets it. Of several, the one with the lowest address goes first. So each step's messages
    have the blocks of the last step's, and no reader maps what only another one reads. When no hole fits, such blocks
    are made holes, and neighboring holes merge.

    Messages of rows change their sizes all the time, and blocks of old sizes would fill chunk after chunk, in each
    process that maps them. So now and then the allocator makes holes of all blocks that were not used since the look
    before.
    """

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._spare: dict[int, list[tuple[int, Block]]] = {}  # heaps by address
        self._holes: list[tuple[int, int]] = []  # (size, key), sorted
        self._starts: dict[int, int] = {}  # where a hole starts -> its size
        self._ends: dict[int, int] = {}  # where a hole ends -> where it starts
        self._nbytes = 0  # of all blocks
        self._new = 0  # bytes of blocks since the last look for unused ones
        self._looks = 1

    def grow(self, chunk: int, size: int) -> None:
        self._add_hole(chunk << _CHUNK, size)

    def take_same(self, size: int) -> Block | None:
        spare = self._spare.get(size)
        return heappop(spare)[1] if spare else None

    def take(self, size: int) -> Block | None:
        """Return a block of ``size`` bytes, a multiple of ``GRAIN``, or None if there is no room."""
        block = self.take_same(size)
        if block is not None:
            return block
        # With more blocks there are fewer looks: what a step takes anew must not cost a look at the others each time.
        if self._new > max(NEW, (self._nbytes - self._new) // 2):
            self.look()
        block = self._carve(size)
        if block is None and self._dissolve():
            block = self._carve(size)
        return block

    def look(self) -> None:
        """Make holes of the blocks that nobody has had since the look before."""
        self._dissolve(unused_since=self._looks)
        self._looks += 1
        self._new = 0

    def remove(self, chunk: int, size: int) -> bool:
        """Forget a chunk of ``size`` bytes if no block is in it; return whether that is so."""
        if self._starts.get(chunk << _CHUNK) != size:
            return False
        self._drop_hole(chunk << _CHUNK, size)
        return True

    def give(self, block: Block) -> None:
        block.look = self._looks
        self._spare_again(block)

    def _spare_again(self, block: Block) -> None:
        heappush(self._spare.setdefault(block.size, []), (block.key, block))

    def find(self, chunk: int, offset: int) -> Block | None:
        key = chunk << _CHUNK | offset
        index = bisect_right(self._keys, key) - 1
        if index < 0:
            return None
        block = self._blocks[self._keys[index]]
        return block if key < block.key + block.size else None

    def all(self) -> list[Block]:
        """Return all blocks, including those that were given back."""
        return list(self._blocks.values())

    @property
    def free(self) -> int:
        """Bytes that can be taken, if not in one piece."""
        return sum(size for size, _ in self._holes) + sum(size * len(spare) for size, spare in self._spare.items())

    def _carve(self, size: int) -> Block | None:
        index = bisect_left(self._holes, (size, 0))
        if index == len(self._holes):
            return None
        whole, key = self._holes[index]
        self._drop_hole(key, whole)
        if whole > size:
            self._add_hole(key + size, whole - size)
        block = Block(key, size)
        self._nbytes += size
        self._new += size
        insort(self._keys, key)
        self._blocks[key] = block
        return block

    def _dissolve(self, unused_since: float = math.inf) -> bool:
        """Make holes of blocks that were given back, before that look; return whether there were any."""
        spare = [block for blocks in self._spare.values() for _, block in blocks]
        self._spare.clear()
        gone = [block for block in spare if block.look < unused_since]
        for block in spare:
            if block.look >= unused_since:
                self._spare_again(block)
        for block in gone:
            del self._blocks[block.key]
            self._nbytes -= block.size
            self._merge_hole(block.key, block.size)
        if gone:
            self._keys = sorted(self._blocks)
        return bool(gone)

    def _merge_hole(self, key: int, size: int) -> None:
        before = self._ends.get(key)
        if before is not None:
            self._drop_hole(before, key - before)
            key, size = before, size + key - before
        behind = self._starts.get(key + size)
        if behind is not None:
            self._drop_hole(key + size, behind)
            size += behind
        self._add_hole(key, size)

    def _add_hole(self, key: int, size: int) -> None:
        insort(self._holes, (size, key))
        self._starts[key] = size
        self._ends[key + size] = key

    def _drop_hole(self, key: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, key))]
        del self._starts[key], self._ends[key + size]


class ArenaUsage(NamedTuple):
    """How much of an arena is in use, in bytes and references. ``blocks`` include free ones of a size that was used."""

    chunks: tuple[int, ...]
    blocks: int
    free: int
    references: int
    free_cells: int


class _BlockView(weakref.ref[Bytes]):
    """Notices when the last view of a block is gone: all views refer to one array, and this refers to it."""

    __slots__ = ("block", "key", "nbytes")
    block: Block
    key: int
    nbytes: int


class Arena:
    """The owner's side. Any thread may use it. In a child after fork it refuses to work."""

    def __init__(self, job: str) -> None:
        sweep()
        self.presence = Presence(job)
        self._cells = self.presence.cells
        self._lock = threading.Lock()
        self._blocks = Blocks()
        self._chunks: dict[int, Bytes] = {}
        self._memory: dict[int, mmap.mmap] = {}
        self._made = 0  # how many chunks there have been; a number is not used again, because readers keep the chunk
        self._bases: list[tuple[int, int]] = []  # (address, number of the chunk), sorted
        self._views: dict[int, _BlockView] = {}  # by the id of the array; a weak reference must live to be called
        # Those whose array is gone: their callbacks come at any time, in any thread.
        self._unseen: deque[_BlockView] = deque()
        self._notice = self._unseen.append
        self._read: dict[int, list[Block]] = {}  # size -> blocks without a view that somebody may still read
        self._free_cells = list(range(CELLS - 1, -1, -1))
        self._sent: dict[int, PeerPresence] = {}
        self._closed = False

    @property
    def usable(self) -> bool:
        return not (self._closed or self.presence.inherited)

    def allocate(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` of memory, writable and aligned to 64 bytes, that can be sent without a copy."""
        size = rounded(max(nbytes, 1))
        with self._lock:
            if not self.usable:
                raise OSError(errno.EBADF, "this process's shared memory is closed")
            block = self._same(size) or self._other(size)
            array = self._chunks[block.chunk][block.offset : block.offset + nbytes]
            view = _BlockView(array, self._notice)
            view.block, view.key, view.nbytes = block, id(array), nbytes
            self._views[view.key] = view
        return array.data

    def refer(self, frame: wire.Buffer, reader: PeerPresence) -> tuple[int, int, int, int] | None:
        """Make a reference to ``frame`` for ``reader``. A frame outside of the arena is copied into it.

        Return chunk, cell, offset and length of the reference; None if too many are out.
        """
        place = self._locate(frame)
        if place is None:
            copy = self.allocate(len(frame))
            copy[:] = frame
            frame = copy
            place = self._locate(frame)
        if place is None:
            raise AssertionError("a block of the arena is not in it")
        chunk, offset, block = place
        with self._lock:
            if len(block.cells) > block.prune_at:
                self._prune(block)
            if not self._free_cells:
                for each in self._blocks.all():
                    self._prune(each)
                if not self._free_cells:
                    return None
            cell = self._free_cells.pop()
            # Before the reference leaves: the system call that sends it, and the one that receives it, order this store
            # before the reader's look at the cell. The reader refuses a reference whose cell is not SENT.
            self._cells[cell] = SENT
            self._sent[cell] = reader
            block.cells.append(cell)
        return chunk, cell, offset, len(frame)

    def lend(self, frame: wire.Buffer) -> None:
        """Mark the block of ``frame`` as read by a transport that does not tell when it is done."""
        place = self._locate(frame)
        if place is not None:
            place[2].lent = True

    def busy(self, buffer: wire.Buffer) -> bool:
        """Whether any peer may still read ``buffer``; True if it is not in the arena."""
        place = self._locate(buffer)
        if place is None:
            return True
        cells = self._cells
        with self._lock:
            return place[2].lent or any(cells[cell] for cell in place[2].cells)

    def usage(self) -> ArenaUsage:
        with self._lock:
            self._same(0)
            self._regain()
            chunks = tuple(map(len, self._chunks.values()))
            blocks = self._blocks
            return ArenaUsage(chunks, len(blocks.all()), blocks.free, len(self._sent), len(self._free_cells))

    def trim(self) -> None:
        """Give back chunks in which no block has been used since the call before. Never waits for the lock."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.usable and self._made < MOST_CHUNKS:
                self._same(0)
                self._regain()
                self._blocks.look()
                for number, chunk in list(self._chunks.items()):
                    if self._blocks.remove(number, len(chunk)):
                        self._bases.remove((chunk.ctypes.data, number))
                        remove_chunk(self.presence.name, number + 1, self._memory.pop(number))
                        del self._chunks[number]
        finally:
            self._lock.release()

    def drain(self, timeout: float) -> None:
        """Wait until all living readers have received what was sent, for at most ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with self._lock:
                waits = {reader for cell, reader in self._sent.items() if self._cells[cell] == SENT}
            if not any(reader.lives() for reader in waits):
                return
            time.sleep(POLL_S)

    def close(self) -> None:
        """Remove the files. Views stay valid, here and in other processes. New blocks are refused."""
        with self._lock:
            self._closed = True
            self.presence.unlink()

    def abandon(self) -> None:
        """``close``, whatever state an exception has left the arena in: it may have left the lock taken."""
        self._closed = True
        self.presence.unlink()

    def _same(self, size: int) -> Block | None:
        """Return a block that had this size before, the common case in training."""
        while self._unseen:
            self._bury(self._unseen.popleft())
        waiting = self._read.get(size)
        if waiting:
            self._read[size] = [block for block in waiting if not self._returned(block)]
        return self._blocks.take_same(size)

    def _other(self, size: int) -> Block:
        self._regain()
        block = self._blocks.take(size)
        if block is None and self._forget_the_dead():
            self._regain()
            block = self._blocks.take(size)
        if block is None:
            self._grow(size)
            block = self._blocks.take(size)
        if block is None:
            raise AssertionError("a new chunk is too small for what it was made for")
        return block

    def _bury(self, view: _BlockView) -> None:
        block = view.block
        if self._views.get(view.key) is view:  # else a new array has that place already
            del self._views[view.key]
        if self._prune(block):
            self._read.setdefault(block.size, []).append(block)
        else:
            self._reset(block)

    def _reset(self, block: Block) -> None:
        block.lent = False
        self._blocks.give(block)

    def _returned(self, block: Block) -> bool:
        """Take back a block if no peer reads it any more; return whether that is so."""
        if self._prune(block):
            return False
        self._reset(block)
        return True

    def _regain(self) -> None:
        read = {size: [block for block in blocks if not self._returned(block)] for size, blocks in self._read.items()}
        self._read = {size: blocks for size, blocks in read.items() if blocks}

    def _forget_the_dead(self) -> bool:
        dead = {reader for reader in set(self._sent.values()) if not reader.lives()}
        for cell, reader in self._sent.items():
            if reader in dead:
                self._cells[cell] = FREE
        return bool(dead)

    def _prune(self, block: Block) -> bool:
        """Take back those cells of ``block`` that are free; return whether some are not."""
        if not block.cells:
            return False
        # This load of FREE is what all stores of new data into the block come after. No lock is shared with the reader,
        # and none could be: a reader that is killed while it holds one would stop this process. A count in place of
        # a byte for each reference would have to be changed atomically, which Python cannot do in shared memory.
        cells, left = self._cells, []
        for cell in block.cells:
            if cells[cell]:
                left.append(cell)
            else:
                del self._sent[cell]
                self._free_cells.append(cell)
        block.cells = left
        block.prune_at = max(PRUNE, 2 * len(left))
        return bool(left)

    def _grow(self, size: int) -> None:
        """Add a chunk, twice as large as the last one, or smaller where /dev/shm has little room."""
        wanted = min(FIRST_CHUNK << len(self._chunks), LARGEST_CHUNK)
        free = room()[1]
        while wanted > free / 2:  # leave room for other processes
            wanted //= 2
        nbytes = max(wanted, -(-size // PAGE) * PAGE)
        number = self._made
        fd = create(self.presence.name, number + 1, nbytes)
        try:
            memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        chunk: Bytes = np.frombuffer(memory, np.uint8)
        self._chunks[number] = chunk
        self._memory[number] = memory
        self._made += 1
        insort(self._bases, (chunk.ctypes.data, number))
        self._blocks.grow(number, nbytes)

    def _locate(self, buffer: wire.Buffer) -> tuple[int, int, Block] | None:
        if not self._bases or not isinstance(buffer, memoryview) or not buffer.nbytes or type(buffer.obj) is bytearray:
            return None  # small, most often: looking it up would take longer than to copy it
        array: object = buffer.obj
        view = self._views.get(id(array))
        if view is not None and view() is array and view.nbytes == buffer.nbytes:  # as it was allocated
            return view.block.chunk, view.block.offset, view.block
        if buffer.readonly:
            address = np.frombuffer(buffer, np.uint8).ctypes.data
        else:
            address = addressof(c_char.from_buffer(buffer))
        with self._lock:
            index = bisect_right(self._bases, (address, CELLS)) - 1
            if index < 0:
                return None
            base, number = self._bases[index]
            offset = address - base
            if offset >= len(self._chunks[number]):
                return None
            block = self._blocks.find(number, offset)
        return None if block is None else (number, offset, block)
