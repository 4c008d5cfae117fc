"""An allocator: which parts of an arena's chunks are in use. Pure: the arena has the memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heappop, heappush

GRAIN = 64
PAGE = 4096
LARGE = 1 << 16  # bytes from which blocks are whole pages

_CHUNK = 48  # a key is the chunk's number above so many bits of offset: chunks never touch


def rounded(nbytes: int) -> int:
    """Return the size of the block for ``nbytes``."""
    grain = GRAIN if nbytes < LARGE else PAGE
    return -(-nbytes // grain) * grain


class Block:
    """``size`` bytes of chunk ``chunk`` from ``offset``.

    Attributes that the arena uses: ``cells`` are those of the references to it that were sent, ``prune_at`` is how many
    of them there may be before the arena looks which are free, ``lent`` is whether a transport has it that does not
    tell when it has read it.
    """

    __slots__ = ("cells", "chunk", "key", "lent", "offset", "prune_at", "size")

    def __init__(self, key: int, size: int) -> None:
        self.key, self.size = key, size
        self.chunk, self.offset = key >> _CHUNK, key & ((1 << _CHUNK) - 1)
        self.cells: list[int] = []
        self.prune_at = 0
        self.lent = False


class Blocks:
    """The blocks of all chunks, and the holes between them.

    A training step asks for the same sizes as the step before. So a block that is given back keeps its size, and the
    next request for that size gets it. Of several, the one with the lowest address goes first. So each step's messages
    have the blocks of the last step's, and no reader maps what only another one reads. Only when no hole fits are such
    blocks made holes, and neighboring holes merge.
    """

    def __init__(self) -> None:
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._spare: dict[int, list[tuple[int, Block]]] = {}  # heaps by address
        self._holes: list[tuple[int, int]] = []  # (size, key), sorted
        self._starts: dict[int, int] = {}  # where a hole starts -> its size
        self._ends: dict[int, int] = {}  # where a hole ends -> where it starts

    def grow(self, chunk: int, size: int) -> None:
        """Add a chunk."""
        self._add_hole(chunk << _CHUNK, size)

    def take_same(self, size: int) -> Block | None:
        """Return a block that had this size before, if there is one."""
        spare = self._spare.get(size)
        return heappop(spare)[1] if spare else None

    def take(self, size: int) -> Block | None:
        """Return a block of ``size`` bytes, a multiple of ``GRAIN``, or None if there is no room."""
        block = self.take_same(size) or self._carve(size)
        if block is None and self._dissolve():
            block = self._carve(size)
        return block

    def give(self, block: Block) -> None:
        """Take back a block."""
        heappush(self._spare.setdefault(block.size, []), (block.key, block))

    def find(self, chunk: int, offset: int) -> Block | None:
        """Return the block that has the byte at ``offset`` of ``chunk``, if it is in one."""
        key = chunk << _CHUNK | offset
        index = bisect_right(self._keys, key) - 1
        if index < 0:
            return None
        block = self._blocks[self._keys[index]]
        return block if key < block.key + block.size else None

    def all(self) -> list[Block]:
        """Return all blocks, those that were given back among them."""
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
        insort(self._keys, key)
        self._blocks[key] = block
        return block

    def _dissolve(self) -> bool:
        """Make holes of the blocks that were given back; return whether there were any."""
        spare = [block for blocks in self._spare.values() for _, block in blocks]
        self._spare.clear()
        for block in spare:
            del self._blocks[block.key]
            self._merge_hole(block.key, block.size)
        if spare:
            self._keys = sorted(self._blocks)
        return bool(spare)

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
